//! Results of a load: calls by outcome, and latencies.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use anyhow::Context;
use hdrhistogram::Histogram;
use tonic::Code;

use super::process::Used;
use crate::cli::metadata;
use crate::proto::envoy::service::ratelimit::v3::RateLimitResponse;
use crate::proto::envoy::service::ratelimit::v3::rate_limit_response::Code as Outcome;

/// Range of latencies: from 100 ns to a minute, to three digits.
const LEAST_NS: u64 = 100;
const MOST_NS: u64 = 60_000_000_000;
const DIGITS: u8 = 3;

/// Outcomes of answers, and their names.
pub(super) const OUTCOMES: [(Outcome, &str); 3] =
    [(Outcome::Ok, "OK"), (Outcome::OverLimit, "OVER_LIMIT"), (Outcome::Unknown, "UNKNOWN")];

/// Quantiles of the latencies in the results, and their names.
pub(super) const QUANTILES: [(&str, f64); 5] =
    [("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p99.9", 0.999), ("max", 1.0)];

/// The end of a call.
pub(super) enum Ended {
    Answered(RateLimitResponse),
    Failed(Code),
    TimedOut,
    /// The connection or the call was reset.
    Disconnected,
}

/// Calls of one connection, or of all.
pub(super) struct Tally {
    /// Latencies of answers in nanoseconds, in the order of [`OUTCOMES`].
    pub(super) latencies: [Histogram<u64>; OUTCOMES.len()],
    /// Calls that failed, by gRPC code.
    pub(super) failed: BTreeMap<i32, u64>,
    pub(super) timed_out: u64,
    pub(super) disconnected: u64,
    /// Calls that began long after they were due, because this command could not make them sooner.
    pub(super) late: u64,
    /// Answers that say that a policy decided, because the store did not.
    pub(super) by_policy: u64,
    /// Descriptors by what decided them, as far as the server says it.
    pub(super) provenances: BTreeMap<String, u64>,
    interval: Interval,
}

/// Calls since the last report.
pub(super) struct Interval {
    latency: Histogram<u64>,
    refused: u64,
    undecided: u64,
}

/// The results of a load.
pub(super) struct Results<'r> {
    /// Description of the load, in a line.
    pub(super) title: &'r str,
    pub(super) tally: &'r Tally,
    /// Latencies of all answers, in nanoseconds.
    pub(super) latency: &'r Histogram<u64>,
    /// Length of the measurement.
    pub(super) measured: Duration,
    /// Usage of the processes in `--process`.
    pub(super) used: &'r [Used],
}

impl Tally {
    /// Returns an empty one.
    pub(super) fn new() -> anyhow::Result<Self> {
        Ok(Self {
            latencies: [histogram()?, histogram()?, histogram()?],
            failed: BTreeMap::new(),
            timed_out: 0,
            disconnected: 0,
            late: 0,
            by_policy: 0,
            provenances: BTreeMap::new(),
            interval: Interval::new()?,
        })
    }

    /// Counts a call that took so long; one of the warm-up in the present interval only.
    pub(super) fn count(&mut self, ended: &Ended, took: Duration, is_measured: bool) {
        let took = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        match ended {
            Ended::Answered(answer) => {
                self.interval.latency.saturating_record(took);
                self.interval.refused += u64::from(answer.overall_code() == Outcome::OverLimit);
            }
            Ended::Failed(_) | Ended::TimedOut | Ended::Disconnected => self.interval.undecided += 1,
        }
        if !is_measured {
            return;
        }
        match ended {
            Ended::Answered(answer) => {
                let place = OUTCOMES.iter().position(|(outcome, _)| *outcome == answer.overall_code());
                if let Some(latency) = place.and_then(|place| self.latencies.get_mut(place)) {
                    latency.saturating_record(took);
                }
                self.by_policy += u64::from(is_by_policy(answer));
                for provenance in provenances(answer) {
                    *self.provenances.entry(provenance.to_owned()).or_default() += 1;
                }
            }
            Ended::Failed(code) => *self.failed.entry(i32::from(*code)).or_default() += 1,
            Ended::TimedOut => self.timed_out += 1,
            Ended::Disconnected => self.disconnected += 1,
        }
    }

    /// Adds the calls of another connection.
    pub(super) fn add(&mut self, other: &Self) -> anyhow::Result<()> {
        for (latency, more) in self.latencies.iter_mut().zip(&other.latencies) {
            latency.add(more).context("latencies cannot be added")?;
        }
        for (code, count) in &other.failed {
            *self.failed.entry(*code).or_default() += count;
        }
        for (provenance, count) in &other.provenances {
            *self.provenances.entry(provenance.clone()).or_default() += count;
        }
        self.timed_out += other.timed_out;
        self.disconnected += other.disconnected;
        self.late += other.late;
        self.by_policy += other.by_policy;
        Ok(())
    }

    /// Returns the number of calls that were answered.
    pub(super) fn decided(&self) -> u64 {
        self.latencies.iter().map(Histogram::len).sum()
    }

    /// Returns the latencies of all answers.
    pub(super) fn latency(&self) -> anyhow::Result<Histogram<u64>> {
        let mut all = histogram()?;
        for latency in &self.latencies {
            all.add(latency).context("latencies cannot be added")?;
        }
        Ok(all)
    }

    /// Returns the number of calls that were not answered.
    pub(super) fn undecided(&self) -> u64 {
        self.failed.values().sum::<u64>() + self.timed_out + self.disconnected
    }
}

impl Interval {
    /// Returns an empty one.
    pub(super) fn new() -> anyhow::Result<Self> {
        Ok(Self { latency: histogram()?, refused: 0, undecided: 0 })
    }

    /// Adds the interval of `tally`, which begins a new one.
    pub(super) fn take(&mut self, tally: &mut Tally) -> anyhow::Result<()> {
        let Self { latency, refused, undecided } = &mut tally.interval;
        self.latency.add(&*latency).context("latencies cannot be added")?;
        self.refused += std::mem::take(refused);
        self.undecided += std::mem::take(undecided);
        latency.reset();
        Ok(())
    }
}

impl fmt::Display for Interval {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [half, most] = [0.5, 0.99].map(|quantile| Latency(&self.latency, quantile));
        let answered = self.latency.len();
        write!(f, "{answered:>8} answers  p50 {half}  p99 {most}  refused {}", Percent(self.refused, answered))?;
        if self.undecided > 0 { write!(f, "  NOT ANSWERED {}", self.undecided) } else { Ok(()) }
    }
}

impl Results<'_> {
    /// Returns the answers in each second.
    pub(super) fn rate(&self) -> f64 {
        let seconds = self.measured.as_secs_f64();
        if seconds > 0.0 { precise(self.tally.decided()) / seconds } else { 0.0 }
    }

    /// Returns the CPU time for each answer, in microseconds.
    pub(super) fn cpu_us(&self, cpu: Duration) -> f64 {
        cpu.as_secs_f64() * 1e6 / precise(self.tally.decided().max(1))
    }
}

impl fmt::Display for Results<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Tally { latencies, failed, timed_out, disconnected, late, by_policy, provenances, .. } = self.tally;
        let (decided, undecided) = (self.tally.decided(), self.tally.undecided());
        let all = decided + undecided;
        writeln!(f, "{}\n", self.title)?;
        writeln!(f, "answered      {decided:>12}  {:.0} a second", self.rate())?;
        for ((_, name), latency) in OUTCOMES.iter().zip(latencies) {
            writeln!(f, "  {name:12}{:>12}  {}", latency.len(), Percent(latency.len(), all))?;
        }
        writeln!(f, "timed out     {timed_out:>12}  {}", Percent(*timed_out, all))?;
        writeln!(f, "failed        {:>12}  {}", undecided - timed_out, Percent(undecided - timed_out, all))?;
        for (code, count) in failed {
            writeln!(f, "  {:12}{count:>12}", format!("{:?}", Code::from_i32(*code)))?;
        }
        if *disconnected > 0 {
            writeln!(f, "  disconnected{disconnected:>12}")?;
        }
        if undecided > 0 {
            writeln!(
                f,
                "  Calls that time out or fail are admitted by a gateway that fails open, such as an Envoy with failure_mode_deny: false."
            )?;
        }
        writeln!(f, "by policy     {by_policy:>12}  {}  answers without the store", Percent(*by_policy, all))?;
        if !provenances.is_empty() {
            writeln!(f, "descriptors were decided by")?;
            for (provenance, count) in provenances {
                writeln!(f, "  {provenance:12}{count:>12}  {}", Percent(*count, provenances.values().sum()))?;
            }
        }
        write!(f, "latency of answers")?;
        for (name, quantile) in QUANTILES {
            write!(f, "  {name} {}", Latency(self.latency, quantile))?;
        }
        writeln!(f)?;
        if *late > 0 {
            writeln!(f, "begun late    {late:>12}  {}", Percent(*late, all))?;
            writeln!(
                f,
                "  This command made these calls more than 5 ms after they were due. Their latency is not the server's alone."
            )?;
        }
        self.used.iter().try_for_each(|used| self.write_used(used, f))
    }
}

impl Results<'_> {
    fn write_used(&self, used: &Used, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = &used.process.name;
        let Some(usage) = used.usage else {
            return writeln!(f, "process {name} ended during the load");
        };
        let (cpu, mib) = (self.cpu_us(usage.cpu), precise(usage.resident_bytes) / precise(1 << 20));
        writeln!(f, "process {name}: CPU {cpu:.2} us for each answer, memory {mib:.1} MiB")
    }
}

/// The latency at a quantile, in milliseconds.
struct Latency<'h>(&'h Histogram<u64>, f64);

impl fmt::Display for Latency<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(latency, quantile) = *self;
        if latency.is_empty() {
            return f.write_str("-");
        }
        let micros = latency.value_at_quantile(quantile) / 1_000;
        write!(f, "{}.{:03} ms", micros / 1_000, micros % 1_000)
    }
}

/// A part of a whole.
struct Percent(u64, u64);

impl fmt::Display for Percent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(part, whole) = *self;
        write!(f, "{:.2} %", precise(part) * 100.0 / precise(whole.max(1)))
    }
}

#[expect(clippy::cast_precision_loss, reason = "there are far fewer than 2^52 calls")]
pub(super) const fn precise(count: u64) -> f64 {
    count as f64
}

fn histogram() -> anyhow::Result<Histogram<u64>> {
    Histogram::new_with_bounds(LEAST_NS, MOST_NS, DIGITS).context("no histogram of latencies")
}

/// Returns true if the answer says that a policy decided because the store did not.
fn is_by_policy(answer: &RateLimitResponse) -> bool {
    answer.dynamic_metadata.as_ref().is_some_and(|metadata| metadata.fields.contains_key("on_store_failure"))
}

/// Returns what decided each descriptor, if the answer says it.
fn provenances(answer: &RateLimitResponse) -> impl Iterator<Item = &str> {
    let descriptors = metadata::decision(answer).map_or(&[][..], |decision| metadata::list(decision, "descriptors"));
    descriptors.iter().filter_map(|descriptor| metadata::text(metadata::object(descriptor)?, "provenance"))
}
