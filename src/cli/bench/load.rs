//! Calls in a closed loop, or at a fixed rate. Each connection has a thread of its own.

use std::io::{self, Write};
use std::thread::{self, Scope};
use std::time::Duration;

use anyhow::{Context, ensure};
use clap::ArgMatches;
use futures_util::StreamExt;
use futures_util::future::join_all;
use futures_util::stream::FuturesUnordered;
use parking_lot::Mutex;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, interval_at, sleep, timeout_at};
use tonic::metadata::MetadataValue;
use tonic::transport::Channel;
use tonic::{Code, Request};

use super::results::{Ended, Interval, Tally};
use crate::cli::server;
use crate::proto::EXPLAIN;
use crate::proto::envoy::service::ratelimit::v3::RateLimitRequest;
use crate::proto::envoy::service::ratelimit::v3::rate_limit_service_client::RateLimitServiceClient;

/// Least timeout of connecting: 5 s. That of a call may be much shorter.
const CONNECTING: Duration = Duration::from_secs(5);
/// Pause of a caller after a call that the server did not answer: 10 ms, so that a server that is gone is not called in a tight loop.
const AFTER_ERROR: Duration = Duration::from_millis(10);
/// Time after which a call has begun late: 5 ms after it was due. The load is more than this command can make then.
const LATE: Duration = Duration::from_millis(5);
/// The longest sleep of a thread, so that it sees soon that the load is stopped: 100 ms.
const SLEEP: Duration = Duration::from_millis(100);
const SECOND: Duration = Duration::from_secs(1);

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
    /// True from the time at which Ctrl-C stops the load.
    is_stopped: watch::Receiver<bool>,
}

/// A connection that waits for its start.
struct Ready<'l> {
    client: Client,
    tally: &'l Mutex<Tally>,
    times: Times,
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
    /// If there is no server, or if it is stopped before the measurement.
    pub(super) fn run(&self, matches: &ArgMatches) -> anyhow::Result<(Tally, Duration)> {
        let tallies: Vec<Mutex<Tally>> =
            (0..self.connections).map(|_| Tally::new().map(Mutex::new)).collect::<Result<_, _>>()?;
        let (stop, is_stopped) = watch::channel(false);
        let course = Course { load: self, matches, is_stopped };
        let measured = thread::scope(|scope| {
            let measured = runtime()?.block_on(self.watch(scope, &course, &tallies, &stop));
            stop.send_replace(true);
            measured
        })?;
        ensure!(measured > Duration::ZERO, "nothing was measured: the load was stopped during its warm-up");
        let mut all = Tally::new()?;
        for tally in tallies {
            all.add(&tally.into_inner())?;
        }
        Ok((all, measured))
    }

    /// Starts the connections and reports each second until all calls have ended, or Ctrl-C stops them. Returns the length of the measurement.
    async fn watch<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        course: &'scope Course<'scope>,
        tallies: &'scope [Mutex<Tally>],
        stop: &watch::Sender<bool>,
    ) -> anyhow::Result<Duration> {
        let (running, mut ended) = mpsc::channel::<()>(1);
        let mut starts = Vec::new();
        for (number, tally) in (0..).zip(tallies) {
            let (connected, is_connected) = oneshot::channel();
            let (start, started) = oneshot::channel();
            let running = running.clone();
            let connection = move || {
                course.connection(scope, number, tally, connected, started);
                drop(running);
            };
            thread::Builder::new().spawn_scoped(scope, connection).context("no thread can be started")?;
            is_connected.await.context("a thread ended")??;
            starts.push(start);
        }
        drop(running);
        let begin = Instant::now();
        let measured_from = begin + self.warm_up;
        let times = Times { begin, measured_from, end: measured_from + self.duration };
        for start in starts {
            // A thread that has ended makes no calls, and is reported by those that it does not make.
            let _ = start.send(times);
        }
        let mut interrupted = std::pin::pin!(tokio::signal::ctrl_c());
        let mut seconds = interval_at(begin + SECOND, SECOND);
        let mut reported = begin;
        let ended_at = loop {
            tokio::select! {
                now = seconds.tick(), if reported < times.end => {
                    report(tallies, times, now)?;
                    reported = now;
                }
                _ = &mut interrupted => {
                    stop.send_replace(true);
                    break Instant::now();
                }
                _ = ended.recv() => break times.end,
            }
        };
        let ended_at = ended_at.min(times.end);
        if reported < ended_at {
            report(tallies, times, ended_at)?;
        }
        Ok(ended_at.saturating_duration_since(measured_from))
    }
}

/// Writes a line about the calls since the last one. Standard error may be closed.
fn report(tallies: &[Mutex<Tally>], times: Times, now: Instant) -> anyhow::Result<()> {
    let mut interval = Interval::new()?;
    for tally in tallies {
        interval.take(&mut tally.lock())?;
    }
    let phase = if now <= times.measured_from { "  warm-up" } else { "" };
    let seconds = (now - times.begin).as_secs_f64();
    let _ = writeln!(io::stderr(), "{seconds:4.0} s  {interval}{phase}");
    Ok(())
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
        let Self { load, matches, is_stopped } = self;
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
            let ready = Ready { client, tally, times };
            let calls = async {
                match load.pace {
                    Pace::InFlight(count) => {
                        join_all((0..count).map(|_| self.in_turn(&ready))).await;
                    }
                    Pace::Rate(rate) => {
                        let (sender, due) = mpsc::unbounded_channel();
                        let pacer = move || self.pace(number, rate, times, &sender);
                        // Without a thread there are no calls, which the results show.
                        let _ = thread::Builder::new().spawn_scoped(scope, pacer);
                        self.when_due(&ready, due).await;
                    }
                }
            };
            let mut is_stopped = is_stopped.clone();
            tokio::select! {
                () = calls => {}
                _ = is_stopped.wait_for(|is_stopped| *is_stopped) => {}
            }
        });
    }

    /// Makes one call after the other.
    async fn in_turn(&self, ready: &Ready<'_>) {
        loop {
            let due = Instant::now();
            if due >= ready.times.end {
                return;
            }
            if self.call(ready, due).await {
                sleep(AFTER_ERROR).await;
            }
        }
    }

    /// Makes calls when they are due.
    async fn when_due(&self, ready: &Ready<'_>, mut due: mpsc::UnboundedReceiver<Instant>) {
        let mut calls = FuturesUnordered::new();
        let mut is_over = false;
        while !is_over || !calls.is_empty() {
            tokio::select! {
                next = due.recv(), if !is_over => match next {
                    Some(due) => calls.push(self.call(ready, due)),
                    None => is_over = true,
                },
                Some(_) = calls.next(), if !calls.is_empty() => {}
            }
        }
    }

    /// Sends the times at which calls of this connection are due, as they come.
    fn pace(&self, number: u32, rate: u32, times: Times, due: &mpsc::UnboundedSender<Instant>) {
        let rate = u64::from(rate);
        // The connections take turns.
        for call in (u64::from(number)..).step_by(self.load.connections.try_into().unwrap_or(1)) {
            let part = Duration::from_nanos(call % rate * 1_000_000_000 / rate);
            let next = times.begin + Duration::from_secs(call / rate) + part;
            if next >= times.end || !self.sleep_until(next) || due.send(next).is_err() {
                return;
            }
        }
    }

    /// Sleeps until this time. Returns false if the load is stopped before.
    fn sleep_until(&self, time: Instant) -> bool {
        while !*self.is_stopped.borrow() {
            let rest = time.saturating_duration_since(Instant::now());
            if rest.is_zero() {
                return true;
            }
            #[expect(
                clippy::disallowed_methods,
                reason = "a timer of tokio is up to 1 ms late, which would count as latency"
            )]
            thread::sleep(rest.min(SLEEP));
        }
        false
    }

    /// Makes a call that is due. Returns true if the server did not answer.
    async fn call(&self, ready: &Ready<'_>, due: Instant) -> bool {
        let load = self.load;
        let Some(request) = load.requests.get(load.distribution.draw(load.requests.len())) else { return true };
        let mut request = Request::new(request.clone());
        request.set_timeout(load.timeout);
        if load.explains {
            request.metadata_mut().insert(EXPLAIN, MetadataValue::from_static("1"));
        }
        let is_late = due.elapsed() > LATE;
        let answered = timeout_at(due + load.timeout, ready.client.clone().should_rate_limit(request)).await;
        let took = due.elapsed();
        let ended = match answered {
            // The client's own timer reports an error in the same moment.
            _ if took >= load.timeout => Ended::TimedOut,
            Ok(Ok(response)) => Ended::Answered(response.into_inner()),
            Ok(Err(status)) if status.code() == Code::DeadlineExceeded => Ended::TimedOut,
            Ok(Err(status)) => Ended::Failed(status.code()),
            Err(_) => Ended::TimedOut,
        };
        let is_unanswered = !matches!(ended, Ended::Answered(_));
        let is_measured = due >= ready.times.measured_from;
        let mut tally = ready.tally.lock();
        tally.count(&ended, took, is_measured);
        tally.late += u64::from(is_late && is_measured);
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
