//! Log line about refusals, at most one per second.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::Instant;
use tracing::Level;

use crate::model::{Deciding, Decision};

/// Interval between two lines: 1 s. A client that floods the service does not flood the log.
const LINE_EVERY: Duration = Duration::from_secs(1);

/// Counts refusals between log lines. Each line describes the last refusal and gives the number since the line before.
#[derive(Debug)]
pub(super) struct Refusals {
    began: Instant,
    /// Time of the next line, in microseconds since `began`.
    due_us: AtomicU64,
    unsaid: AtomicU64,
}

impl Refusals {
    /// Creates a counter without refusals.
    pub(super) fn new() -> Self {
        Self { began: Instant::now(), due_us: AtomicU64::new(0), unsaid: AtomicU64::new(0) }
    }

    /// Counts a refusal, and writes a log line if one is due.
    pub(super) fn count(&self, decision: &Decision<'_>, deciding: Deciding<'_>) {
        if !tracing::enabled!(Level::INFO) {
            return;
        }
        self.unsaid.fetch_add(1, Ordering::Relaxed);
        let now = u64::try_from(self.began.elapsed().as_micros()).unwrap_or(u64::MAX);
        let due = self.due_us.load(Ordering::Relaxed);
        let next = now.saturating_add(u64::try_from(LINE_EVERY.as_micros()).unwrap_or(u64::MAX));
        if now < due || self.due_us.compare_exchange(due, next, Ordering::Relaxed, Ordering::Relaxed).is_err() {
            return;
        }
        let refusals = self.unsaid.swap(0, Ordering::Relaxed);
        let rule = deciding.rule.map(|rule| rule.path.to_string()).unwrap_or_default();
        tracing::info!(
            event = "requests.refused",
            refusals,
            domain = decision.domain.unwrap_or_default(),
            rule,
            provenance = deciding.origin.name(),
            generation = decision.generation,
            "requests were refused; domain, rule and provenance are those of the last one"
        );
    }
}
