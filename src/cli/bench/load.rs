//! Calls in a closed loop, or at a fixed rate. Each connection has a thread of its own.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, Scope};
use std::time::Duration;

use anyhow::Context;
use clap::ArgMatches;
use futures_util::StreamExt;
use futures_util::future::join_all;
use futures_util::stream::FuturesUnordered;
use parking_lot::Mutex;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, interval_at, sleep, sleep_until, timeout_at};
use tonic::Request;
use tonic::metadata::MetadataValue;
use tonic::transport::Channel;

use super::results::{Ended, Interval, Tally};
use crate::cli::server;
use crate::proto::EXPLAIN;
use crate::proto::envoy::service::ratelimit::v3::RateLimitRequest;
use crate::proto::envoy::service::ratelimit::v3::rate_limit_service_client::RateLimitServiceClient;

/// Least timeout of connecting: 5 s. That of a call may be much shorter.
const CONNECTING: Duration = Duration::from_secs(5);
/// Pause of a caller after a call that the server did not answer: 10 ms, so that a server that is gone is not called in a tight loop.
const AFTER_ERROR: Duration = Duration::from_millis(10);

type Client = RateLimitServiceClient<Channel>;

/// Calls to make: to whom, how often, and for how long.
pub(super) struct Load {
    pub(super) address: String,
    /// One for each key.
    pub(super) requests: Vec<RateLimitRequest>,
    pub(super) distribution: Distribution,
    pub(super) connections: u32,
    pub(super) pace: Pace,
    pub(super) warm_up: Duration,
    pub(super) duration: Duration,
    pub(super) timeout: Duration,
    /// True if the server is asked what decided each call.
    pub(super) explains: bool,
}

/// Shares of the keys in the calls.
pub(super) enum Distribution {
    /// Each as often as any other.
    Uniform,
    /// The key of rank k as often as 1/k: the probability of each key and of those before it.
    Zipf(Vec<f64>),
}

/// Event that a call waits for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Pace {
    /// The end of the call before it: so many are in flight on each connection.
    InFlight(u32),
    /// Its time: so many are made in each second.
    Rate(u32),
}

/// Times of a load.
#[derive(Clone, Copy)]
struct Times {
    begin: Instant,
    measured_from: Instant,
    end: Instant,
}

/// State that the threads of a load share.
struct Course<'l> {
    load: &'l Load,
    matches: &'l ArgMatches,
    is_stopped: &'l AtomicBool,
}

impl Distribution {
    /// Returns that of so many keys.
    pub(super) fn zipf(keys: u32) -> Self {
        let mut total = 0.0;
        let mut cumulative: Vec<f64> = Vec::new();
        for rank in 1..=keys {
            total += 1.0 / f64::from(rank);
            cumulative.push(total);
        }
        cumulative.iter_mut().for_each(|sum| *sum /= total);
        Self::Zipf(cumulative)
    }

    /// Draws one of so many keys.
    fn draw(&self, keys: usize) -> usize {
        match self {
            Self::Uniform => fastrand::usize(..keys.max(1)),
            Self::Zipf(cumulative) => {
                let drawn = fastrand::f64();
                cumulative.partition_point(|sum| *sum <= drawn).min(keys.saturating_sub(1))
            }
        }
    }
}

impl Load {
    /// Returns what was measured for so long, in a line.
    pub(super) fn title(&self, measured: Duration) -> String {
        let Self { requests, distribution, connections, pace, .. } = self;
        let kind = match distribution {
            Distribution::Uniform => "uniform",
            Distribution::Zipf(_) => "zipf",
        };
        let how = match pace {
            Pace::InFlight(count) => {
                format!("closed loop, {count} calls in flight on each of {connections} connections")
            }
            Pace::Rate(rate) => format!("open loop, {rate} calls a second on {connections} connections"),
        };
        format!("{how}, {} keys ({kind}), {:.1} s", requests.len(), measured.as_secs_f64())
    }

    /// Runs the load, and writes a line for each second to standard error. Returns what was measured, and for how long.
    ///
    /// # Errors
    /// If there is no server.
    pub(super) fn run(&self, matches: &ArgMatches) -> anyhow::Result<(Tally, Duration)> {
        let tallies: Vec<Mutex<Tally>> =
            (0..self.connections).map(|_| Tally::new().map(Mutex::new)).collect::<Result<_, _>>()?;
        let is_stopped = AtomicBool::new(false);
        let course = Course { load: self, matches, is_stopped: &is_stopped };
        let measured = thread::scope(|scope| {
            let measured = runtime()?.block_on(self.watch(scope, &course, &tallies));
            is_stopped.store(true, Ordering::Relaxed);
            measured
        })?;
        let mut all = Tally::new()?;
        for tally in tallies {
            all.add(&tally.into_inner())?;
        }
        Ok((all, measured))
    }

    /// Starts the connections and reports each second until the load ends, or Ctrl-C ends it. Returns the length of the measurement.
    async fn watch<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        course: &'scope Course<'scope>,
        tallies: &'scope [Mutex<Tally>],
    ) -> anyhow::Result<Duration> {
        let mut starts = Vec::new();
        for (number, tally) in (0..).zip(tallies) {
            let (connected, is_connected) = oneshot::channel();
            let (start, started) = oneshot::channel();
            scope.spawn(move || course.connection(scope, number, tally, connected, started));
            is_connected.await.context("a thread ended")??;
            starts.push(start);
        }
        let begin = Instant::now();
        let measured_from = begin + self.warm_up;
        let times = Times { begin, measured_from, end: measured_from + self.duration };
        for start in starts {
            // A thread that has ended makes no calls, and is reported by those that it does not make.
            let _ = start.send(times);
        }
        let mut interrupted = std::pin::pin!(tokio::signal::ctrl_c());
        let second = Duration::from_secs(1);
        let mut seconds = interval_at(begin + second, second);
        loop {
            tokio::select! {
                _ = &mut interrupted => break,
                () = sleep_until(times.end) => break,
                now = seconds.tick() => {
                    let mut interval = Interval::new()?;
                    for tally in tallies {
                        interval.take(&mut tally.lock())?;
                    }
                    let is_warm_up = now <= measured_from;
                    eprintln!("{:4} s  {interval}{}", (now - begin).as_secs(), if is_warm_up { "  warm-up" } else { "" });
                }
            }
        }
        Ok(Instant::now().min(times.end).saturating_duration_since(measured_from))
    }
}

impl<'l> Course<'l> {
    /// Makes the calls of one connection.
    fn connection<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        number: u32,
        tally: &'scope Mutex<Tally>,
        connected: oneshot::Sender<anyhow::Result<()>>,
        start: oneshot::Receiver<Times>,
    ) {
        let Self { load, matches, .. } = self;
        let runtime = match runtime() {
            Ok(runtime) => runtime,
            Err(error) => {
                let _ = connected.send(Err(error));
                return;
            }
        };
        runtime.block_on(async {
            let connecting = load.timeout.max(CONNECTING);
            let client = match server::connect(&load.address, matches, connecting).await {
                Ok(channel) => RateLimitServiceClient::new(channel),
                Err(error) => {
                    let _ = connected.send(Err(error));
                    return;
                }
            };
            if connected.send(Ok(())).is_err() {
                return;
            }
            let Ok(times) = start.await else { return };
            match load.pace {
                Pace::InFlight(count) => {
                    join_all((0..count).map(|_| self.in_turn(&client, tally, times))).await;
                }
                Pace::Rate(rate) => {
                    let (sender, due) = mpsc::unbounded_channel();
                    scope.spawn(move || self.pace(number, rate, times, &sender));
                    self.when_due(&client, tally, times, due).await;
                }
            }
        });
    }

    /// Makes one call after the other.
    async fn in_turn(&self, client: &Client, tally: &Mutex<Tally>, times: Times) {
        loop {
            let due = Instant::now();
            if due >= times.end || self.is_stopped.load(Ordering::Relaxed) {
                return;
            }
            if self.call(client.clone(), tally, due, times).await {
                sleep(AFTER_ERROR).await;
            }
        }
    }

    /// Makes calls when they are due.
    async fn when_due(
        &self,
        client: &Client,
        tally: &Mutex<Tally>,
        times: Times,
        mut due: mpsc::UnboundedReceiver<Instant>,
    ) {
        let mut calls = FuturesUnordered::new();
        let mut is_over = false;
        while !is_over || !calls.is_empty() {
            tokio::select! {
                next = due.recv(), if !is_over => match next {
                    Some(due) => calls.push(self.call(client.clone(), tally, due, times)),
                    None => is_over = true,
                },
                Some(_) = calls.next(), if !calls.is_empty() => {}
            }
        }
    }

    /// Sends the times at which calls of this connection are due, as they come.
    fn pace(&self, number: u32, rate: u32, times: Times, due: &mpsc::UnboundedSender<Instant>) {
        // The connections take turns.
        for call in (u64::from(number)..).step_by(self.load.connections.try_into().unwrap_or(1)) {
            let next = times.begin + Duration::from_nanos(call.saturating_mul(1_000_000_000) / u64::from(rate));
            if next >= times.end || self.is_stopped.load(Ordering::Relaxed) {
                return;
            }
            #[expect(
                clippy::disallowed_methods,
                reason = "a timer of tokio is up to 1 ms late, which would count as latency"
            )]
            thread::sleep(next.saturating_duration_since(Instant::now()));
            if due.send(next).is_err() {
                return;
            }
        }
    }

    /// Makes a call that is due. Returns true if the server did not answer.
    async fn call(&self, mut client: Client, tally: &Mutex<Tally>, due: Instant, times: Times) -> bool {
        let load = self.load;
        let Some(request) = load.requests.get(load.distribution.draw(load.requests.len())) else { return true };
        let mut request = Request::new(request.clone());
        request.set_timeout(load.timeout);
        if load.explains {
            request.metadata_mut().insert(EXPLAIN, MetadataValue::from_static("1"));
        }
        let ended = match timeout_at(due + load.timeout, client.should_rate_limit(request)).await {
            Ok(Ok(response)) => Ended::Answered(response.into_inner()),
            Ok(Err(status)) => Ended::Failed(status.code()),
            Err(_) => Ended::TimedOut,
        };
        let is_unanswered = !matches!(ended, Ended::Answered(_));
        tally.lock().count(&ended, due.elapsed(), due >= times.measured_from);
        is_unanswered
    }
}

fn runtime() -> anyhow::Result<Runtime> {
    Builder::new_current_thread().enable_all().build().context("no runtime can be started")
}

#[cfg(test)]
mod tests {
    use super::Distribution;

    #[test]
    fn the_key_of_rank_k_is_drawn_as_often_as_one_kth_of_the_first() {
        let zipf = Distribution::zipf(3);
        let mut drawn = [0_u32; 3];
        fastrand::seed(7);
        for _ in 0..110_000 {
            drawn[zipf.draw(3)] += 1;
        }
        for (drawn, expected) in drawn.into_iter().zip([60_000, 30_000, 20_000]) {
            assert!(drawn.abs_diff(expected) < 1_000, "{drawn} for {expected}");
        }
    }
}
