//! Log line about refusals, at most one per second.

use std::time::Duration;

use tracing::Level;

use super::throttle::LogThrottle;
use crate::model::{Deciding, Decision};

/// Interval between two lines: 1 s. A client that floods the service does not flood the log.
const LINE_EVERY: Duration = Duration::from_secs(1);

/// Counts refusals between log lines. Each line describes the last refusal and gives the number since the line before.
#[derive(Debug)]
pub(super) struct Refusals(LogThrottle);

impl Refusals {
    /// Creates a counter without refusals.
    pub(super) const fn new() -> Self {
        Self(LogThrottle::every(LINE_EVERY))
    }

    /// Counts a refusal, and writes a log line if one is due.
    pub(super) fn count(&self, decision: &Decision<'_>, deciding: Deciding<'_>) {
        if !tracing::enabled!(Level::INFO) {
            return;
        }
        let Some(refusals) = self.0.due() else { return };
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
