//! Calls in a closed loop, or at a fixed rate. Each connection has a thread of its own.

use std::io::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{self, Scope};
use std::time::Duration;

use anyhow::{Context, ensure};
use bytes::Bytes;
use clap::ArgMatches;
use futures_util::StreamExt;
use futures_util::future::join_all;
use futures_util::stream::FuturesUnordered;
use parking_lot::Mutex;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, interval_at, sleep, sleep_until, timeout_at};
use tonic::Code;

use super::client::{Calls, Client};
use super::http::HttpClient;
use super::process::{Process, Used};
use super::requests::Distribution;
use super::results::{Ended, Interval, Tally};
use crate::app::process::Usage;
use crate::model::counted;

/// Pause of a caller after a call that the server did not answer: 10 ms, so that a server that is gone is not called in a tight loop.
const AFTER_ERROR: Duration = Duration::from_millis(10);
/// Time after which a call has begun late: 5 ms after it was due. The load is more than this command can make then.
const LATE: Duration = Duration::from_millis(5);
/// The longest sleep of a thread, so that it sees soon that the load is stopped: 100 ms.
const SLEEP: Duration = Duration::from_millis(100);
const SECOND: Duration = Duration::from_secs(1);

/// Calls to make: to whom, how often, and for how long.
pub(super) struct Load {
    pub(super) address: String,
    /// Domain that is asked about at `/check`; `None` for gRPC.
    pub(super) http: Option<String>,
    /// Encoded request of each key: as gRPC frames it, or as JSON.
    pub(super) requests: Vec<Bytes>,
    pub(super) distribution: Distribution,
    pub(super) connections: u32,
    pub(super) pace: Pace,
    pub(super) warm_up: Duration,
    pub(super) length: Length,
    pub(super) calls: Calls,
    /// Processes whose usage is measured.
    pub(super) processes: Vec<Process>,
    /// True if a line about each second is written to standard error.
    pub(super) reports: bool,
}

/// Length of the measurement.
#[derive(Clone, Copy)]
pub(super) enum Length {
    For(Duration),
    Calls(u64),
}

/// Measurement of a load.
pub(super) struct Measured {
    pub(super) tally: Tally,
    pub(super) length: Duration,
    pub(super) used: Vec<Used>,
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
    /// None if the load ends with its last call.
    end: Option<Instant>,
}

/// State that the threads of a load share.
struct Course<'l> {
    load: &'l Load,
    matches: &'l ArgMatches,
    /// Calls that were begun.
    begun: AtomicU64,
    /// True from the time at which Ctrl-C stops the load.
    is_stopped: watch::Receiver<bool>,
}

/// Connection of gRPC, or connections of HTTP.
enum AnyClient<'l> {
    Grpc(Client<'l>),
    Http(HttpClient<'l>),
}

/// A connection that waits for its start.
struct Ready<'l> {
    client: AnyClient<'l>,
    tally: &'l Mutex<Tally>,
    times: Times,
}

impl<'l> AnyClient<'l> {
    /// Connects to the server of `load`.
    ///
    /// # Errors
    /// If no server is there.
    async fn connect(load: &'l Load, matches: &'l ArgMatches) -> anyhow::Result<Self> {
        Ok(match &load.http {
            None => Self::Grpc(Client::connect(&load.address, matches, load.calls).await?),
            Some(domain) => Self::Http(HttpClient::connect(&load.address, matches, load.calls.timeout, domain).await?),
        })
    }

    /// Sends a request, and waits for the answer until `timeout` after it was `due`. Returns the end of the call, and the time since then.
    async fn call(&self, request: Bytes, due: Instant, timeout: Duration) -> (Ended, Duration) {
        let answer = async {
            match self {
                Self::Grpc(client) => client.answer(request).await,
                Self::Http(client) => client.answer(request).await,
            }
        };
        let answered = timeout_at(due + timeout, answer).await;
        let took = due.elapsed();
        let ended = match answered {
            Ok(Ok(Ended::Failed(Code::DeadlineExceeded))) | Err(_) => Ended::TimedOut,
            Ok(_) if took >= timeout => Ended::TimedOut,
            Ok(Ok(ended)) => ended,
            Ok(Err(_)) => Ended::Disconnected,
        };
        (ended, took)
    }
}

impl Times {
    fn are_over(self, now: Instant) -> bool {
        self.end.is_some_and(|end| now >= end)
    }
}

impl Load {
    /// Returns what was measured for so long, in a line.
    pub(super) fn title(&self, measured: Duration) -> String {
        let Self { requests, distribution, connections, pace, http, .. } = self;
        let kind = distribution.name();
        let how = match pace {
            Pace::InFlight(count) if http.is_some() => {
                let calls = counted(count * connections, "call");
                format!("closed loop, {calls} in flight over HTTP/1.1, each on its connection")
            }
            Pace::InFlight(count) => {
                let (calls, each) = (counted(*count, "call"), counted(*connections, "connection"));
                format!("closed loop, {calls} in flight on each of {each}")
            }
            Pace::Rate(rate) if http.is_some() => {
                format!("open loop, {} a second over HTTP/1.1", counted(*rate, "call"))
            }
            Pace::Rate(rate) => {
                let (calls, all) = (counted(*rate, "call"), counted(*connections, "connection"));
                format!("open loop, {calls} a second on {all}")
            }
        };
        let keys = counted(requests.len(), "key");
        format!("{how}, {keys} ({kind}), {:.1} s", measured.as_secs_f64())
    }

    /// Runs the load, and writes a line for each second to standard error. Returns what was measured.
    ///
    /// # Errors
    /// If there is no server, or no process that is to be measured, or if the load is stopped before the measurement.
    pub(super) fn run(&self, matches: &ArgMatches) -> anyhow::Result<Measured> {
        let tallies: Vec<Mutex<Tally>> =
            (0..self.connections).map(|_| Tally::new().map(Mutex::new)).collect::<Result<_, _>>()?;
        let (stop, is_stopped) = watch::channel(false);
        let course = Course { load: self, matches, begun: AtomicU64::new(0), is_stopped };
        let (length, used) = thread::scope(|scope| {
            let measured = runtime()?.block_on(self.watch(scope, &course, &tallies, &stop));
            stop.send_replace(true);
            measured
        })?;
        ensure!(length > Duration::ZERO, "nothing was measured: the load was stopped during its warm-up");
        let mut all = Tally::new()?;
        for tally in tallies {
            all.add(&tally.into_inner())?;
        }
        Ok(Measured { tally: all, length, used })
    }

    /// Returns the usage of the processes so far.
    fn usage(&self) -> anyhow::Result<Vec<Usage>> {
        self.processes.iter().map(Process::usage).collect()
    }

    /// Starts the connections and reports each second until all calls have ended, or Ctrl-C stops them. Returns the length of the measurement, and
    /// what the processes used in it.
    async fn watch<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        course: &'scope Course<'scope>,
        tallies: &'scope [Mutex<Tally>],
        stop: &watch::Sender<bool>,
    ) -> anyhow::Result<(Duration, Vec<Used>)> {
        // A wrong PID is an error before there are connections.
        self.usage()?;
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
        let end = match self.length {
            Length::For(duration) => Some(measured_from + duration),
            Length::Calls(_) => None,
        };
        let times = Times { begin, measured_from, end };
        let mut before = self.usage()?;
        for start in starts {
            // A thread that has ended makes no calls, and is reported by those that it does not make.
            let _ = start.send(times);
        }
        let mut interrupted = std::pin::pin!(tokio::signal::ctrl_c());
        let mut seconds = interval_at(begin + SECOND, SECOND);
        let mut reported = begin;
        let mut warms_up = !self.warm_up.is_zero();
        let mut is_last_ended = false;
        let ended_at = loop {
            tokio::select! {
                () = sleep_until(measured_from), if warms_up => {
                    before = self.usage()?;
                    warms_up = false;
                }
                now = seconds.tick(), if self.reports && !times.are_over(reported) => {
                    report(tallies, times, now)?;
                    reported = now;
                }
                _ = &mut interrupted => {
                    stop.send_replace(true);
                    break Instant::now();
                }
                _ = ended.recv(), if !is_last_ended => is_last_ended = true,
                // At a rate, the last call ends before the time does.
                () = sleep_until(times.end.unwrap_or(begin)), if is_last_ended => break Instant::now(),
            }
        };
        let used = self.processes.iter().zip(before).map(|(process, before)| process.used_since(before)).collect();
        let ended_at = times.end.map_or(ended_at, |end| ended_at.min(end));
        if self.reports && reported < ended_at {
            report(tallies, times, ended_at)?;
        }
        Ok((ended_at.saturating_duration_since(measured_from), used))
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
        let Self { load, matches, is_stopped, .. } = self;
        let runtime = match runtime() {
            Ok(runtime) => runtime,
            Err(error) => {
                let _ = connected.send(Err(error));
                return;
            }
        };
        runtime.block_on(async {
            let client = match AnyClient::connect(load, matches).await {
                Ok(client) => client,
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
            if ready.times.are_over(due) {
                return;
            }
            let Some(request) = self.next() else { return };
            if self.call(ready, request, due).await {
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
                    Some(due) => calls.extend(self.next().map(|request| self.call(ready, request, due))),
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
            let is_enough = matches!(self.load.length, Length::Calls(calls) if call >= calls);
            if is_enough || times.are_over(next) || !self.sleep_until(next) || due.send(next).is_err() {
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

    /// Returns the request of the next call. Returns `None` if all calls were begun.
    fn next(&self) -> Option<Bytes> {
        let Load { requests, distribution, length, .. } = self.load;
        let call = self.begun.fetch_add(1, Ordering::Relaxed);
        if matches!(length, Length::Calls(calls) if call >= *calls) {
            return None;
        }
        requests.get(distribution.key(call, requests.len())).cloned()
    }

    /// Makes a call that is due. Returns true if the server did not answer.
    async fn call(&self, ready: &Ready<'_>, request: Bytes, due: Instant) -> bool {
        let is_late = due.elapsed() > LATE;
        let (ended, took) = ready.client.call(request, due, self.load.calls.timeout).await;
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
