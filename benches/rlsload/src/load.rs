//! Many calls: lanes of one call at a time, in a closed loop or at a fixed rate.

use std::error::Error;
use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use bytes::Bytes;
use hdrhistogram::Histogram;

use crate::call::{Client, Outcome};
use crate::options::Options;
use crate::process::Usage;
use crate::tls::Server;

/// The time until all lanes wait for their first call: 300 ms, enough for a thousand.
const LANES_START: Duration = Duration::from_millis(300);

/// What all lanes share.
struct Load {
    options: Options,
    bodies: Vec<Bytes>,
    start: Instant,
    issued: AtomicU64,
    /// Calls of the measurement by outcome, in the order of [`Outcome::ALL`].
    outcomes: [AtomicU64; Outcome::ALL.len()],
}

/// Runs the load and reports it in one line of `name=number`.
pub async fn run(options: Options) -> Result<String, Box<dyn Error>> {
    let bodies = (0..options.keys).map(|key| options.body(key)).collect();
    let server = Server::of(&options)?;
    let mut clients = Vec::new();
    for _ in 0..options.connections {
        clients.push(Client::connect(&server).await?);
    }
    let start = Instant::now() + LANES_START;
    let load = Arc::new(Load { options, bodies, start, issued: AtomicU64::new(0), outcomes: Default::default() });
    let lanes = (0..load.options.streams).flat_map(|_| &clients).enumerate();
    let lanes: Vec<_> =
        lanes.map(|(number, client)| tokio::spawn(lane(load.clone(), client.clone(), number))).collect();

    tokio::time::sleep_until(load.measure_from().into()).await;
    let usage = || load.options.pids.iter().map(|(_, pid)| Usage::of(*pid)).collect::<Vec<_>>();
    let own = || Usage::of(std::process::id()).cpu_us;
    let (from, used, own_used, decided) = (Instant::now(), usage(), own(), load.decided());
    load.wait().await;
    let (seconds, decided) = (from.elapsed().as_secs_f64(), (load.decided() - decided) as f64);
    let (now_used, own_used) = (usage(), own() - own_used);

    let (mut latency, mut over) = (histogram(), histogram());
    for lane in lanes {
        if let Ok(measured) = tokio::time::timeout(Duration::from_secs(10), lane).await {
            let (all, refused) = measured?;
            latency.add(all)?;
            over.add(refused)?;
        }
    }
    let micros = |nanos: u64| nanos as f64 / 1e3;
    let quantile = |of| micros(latency.value_at_quantile(of));
    let mut line = format!(
        "rps={:.0} p50={:.1} p90={:.1} p99={:.1} p999={:.1} max={:.1} p50_over={:.1} us",
        decided / seconds,
        quantile(0.5),
        quantile(0.9),
        quantile(0.99),
        quantile(0.999),
        micros(latency.max()),
        micros(over.value_at_quantile(0.5))
    );
    let each = |cpu_us: f64| cpu_us / decided.max(1.0);
    for ((label, _), (before, after)) in load.options.pids.iter().zip(used.iter().zip(&now_used)) {
        let cpu = each(after.cpu_us - before.cpu_us);
        write!(line, " cpu_us[{label}]={cpu:.2} rss_mb[{label}]={:.1}", after.resident_mib)?;
    }
    write!(line, " load_cpu_us={:.2}", each(own_used))?;
    for ((name, _), count) in Outcome::ALL.iter().zip(&load.outcomes) {
        write!(line, " {name}={}", count.load(Relaxed))?;
    }
    Ok(line)
}

impl Load {
    fn measure_from(&self) -> Instant {
        self.start + self.options.warm
    }

    fn end(&self) -> Option<Instant> {
        self.options.count.is_none().then(|| self.measure_from() + self.options.length)
    }

    /// The moment at which a lane's call is due: at once in a closed loop.
    fn due(&self, lane: usize, call: u64) -> Instant {
        let Some(rate) = self.options.rate else { return Instant::now() };
        let lanes = (self.options.connections * self.options.streams) as f64;
        self.start + Duration::from_secs_f64((call as f64 * lanes + lane as f64) / rate)
    }

    /// The next body; `None` when enough were sent.
    fn next(&self) -> Option<Bytes> {
        let number = self.issued.fetch_add(1, Relaxed);
        if self.options.count.is_some_and(|count| number >= count) {
            return None;
        }
        let key = if self.options.in_turn {
            number as usize % self.bodies.len()
        } else if self.options.zipf {
            // Evenly distributed in the logarithm of the rank.
            (self.bodies.len() as f64).powf(fastrand::f64()) as usize - 1
        } else {
            fastrand::usize(..self.bodies.len())
        };
        Some(self.bodies[key].clone())
    }

    fn record(&self, outcome: Outcome) {
        let index = Outcome::ALL.iter().position(|(_, other)| *other == outcome).expect("all outcomes are listed");
        self.outcomes[index].fetch_add(1, Relaxed);
    }

    fn decided(&self) -> u64 {
        let decisions = Outcome::ALL.iter().zip(&self.outcomes).filter(|((_, outcome), _)| outcome.is_decision());
        decisions.map(|(_, count)| count.load(Relaxed)).sum()
    }

    /// Until the time is up, or the last call was sent.
    async fn wait(&self) {
        match (self.end(), self.options.count) {
            (Some(end), _) => tokio::time::sleep_until(end.into()).await,
            (None, count) => {
                while self.issued.load(Relaxed) < count.unwrap_or(0) {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            }
        }
    }
}

/// One call after the other; the latencies of those that began within the measurement, and of those over their limit.
async fn lane(load: Arc<Load>, mut client: Client, number: usize) -> (Histogram<u64>, Histogram<u64>) {
    let (mut latency, mut over) = (histogram(), histogram());
    tokio::time::sleep_until(load.start.into()).await;
    for call in 0.. {
        let due = load.due(number, call);
        if load.end().is_some_and(|end| due >= end) {
            break;
        }
        if due > Instant::now() {
            tokio::time::sleep_until(due.into()).await;
        }
        let Some(body) = load.next() else { break };
        let outcome = client.call(body, load.options.timeout).await;
        let is_measured = due >= load.measure_from();
        if is_measured {
            load.record(outcome);
        }
        if outcome == Outcome::Transport && !client.is_open().await {
            break;
        }
        if is_measured {
            let took = due.elapsed().as_nanos() as u64;
            latency.saturating_record(took);
            if outcome == Outcome::OverLimit {
                over.saturating_record(took);
            }
        }
    }
    (latency, over)
}

/// Of nanoseconds from a tenth of a microsecond up to a minute, to three digits.
fn histogram() -> Histogram<u64> {
    Histogram::new_with_bounds(100, 60_000_000_000, 3).expect("the bounds are valid")
}
