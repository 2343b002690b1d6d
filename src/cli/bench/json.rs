//! The results of a load as JSON.

use std::time::Duration;

use hdrhistogram::Histogram;
use serde_json::{Map, Value, json};
use tonic::Code;

use super::process::Used;
use super::results::{OUTCOMES, QUANTILES, Results, precise};

impl Results<'_> {
    /// Returns the results as a JSON object. Durations are in the unit of their names.
    pub(super) fn json(&self) -> Value {
        let tally = self.tally;
        let outcomes =
            || OUTCOMES.iter().zip(&tally.latencies).map(|((_, name), latency)| ((*name).to_owned(), latency));
        let failed = tally.failed.iter().map(|(code, count)| (format!("{:?}", Code::from_i32(*code)), json!(count)));
        let without_status = [("timed_out", tally.timed_out), ("disconnected", tally.disconnected)];
        let without_status = without_status.map(|(name, count)| (name.to_owned(), json!(count)));
        json!({
            "load": self.title,
            "seconds": self.measured.as_secs_f64(),
            "calls": tally.decided() + tally.undecided(),
            "answered": tally.decided(),
            "answers_per_second": self.rate(),
            "outcomes": outcomes().map(|(name, latency)| (name, json!(latency.len()))).collect::<Map<_, _>>(),
            "errors": without_status.into_iter().chain(failed).collect::<Map<_, _>>(),
            "by_policy": tally.by_policy,
            "provenances": tally.provenances,
            "begun_late": tally.late,
            "latency_us": latency_us(self.latency),
            "latency_us_by_outcome": outcomes().map(|(name, latency)| (name, latency_us(latency))).collect::<Map<_, _>>(),
            "processes": self.used.iter().map(|used| self.process(used)).collect::<Vec<_>>(),
        })
    }

    /// Returns the usage of a process; null if it ended during the load.
    fn process(&self, Used { process, usage }: &Used) -> Value {
        json!({
            "name": process.name,
            "pid": process.pid,
            "cpu_us": usage.map(|usage| Duration::as_micros(&usage.cpu)).and_then(|cpu_us| u64::try_from(cpu_us).ok()),
            "cpu_us_per_answer": usage.map(|usage| self.cpu_us(usage.cpu)),
            "resident_bytes": usage.map(|usage| usage.resident_bytes),
        })
    }
}

/// Returns the quantiles of latencies; null if there are none.
fn latency_us(latency: &Histogram<u64>) -> Value {
    if latency.is_empty() {
        return Value::Null;
    }
    let micros = |quantile| json!(precise(latency.value_at_quantile(quantile)) / 1_000.0);
    QUANTILES.iter().map(|(name, quantile)| ((*name).to_owned(), micros(*quantile))).collect()
}
