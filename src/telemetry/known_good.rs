//! Refusals of callers that are known to be good.

use std::collections::BTreeMap;

use parking_lot::Mutex;

use super::metrics::KNOWN_GOOD_REFUSALS;
use super::page::Page;
use crate::model::Decision;

/// Maximum number of pairs of domain and key that are counted: 1,000. They come from rule files, so more only come after many loads.
const MOST_PAIRS: usize = 1_000;
/// Values of the label `mode`, in the order of the counts.
const MODES: [&str; 2] = ["enforced", "shadow"];

/// Counts per domain and key.
#[derive(Debug, Default)]
pub(super) struct KnownGoodRefusals(Mutex<BTreeMap<(String, String), [u64; 2]>>);

impl KnownGoodRefusals {
    /// Counts a decision that refuses a caller that is known to be good, or that would without a shadow mode.
    pub(super) fn count(&self, decision: &Decision<'_>) {
        let Some((domain, key)) = decision.domain.zip(decision.known_good) else { return };
        let mut counts = self.0.lock();
        let pair = (domain.to_owned(), key.to_owned());
        if counts.len() < MOST_PAIRS || counts.contains_key(&pair) {
            counts.entry(pair).or_default()[usize::from(!decision.outcome.is_refused())] += 1;
        }
    }

    /// Writes the metric.
    pub(super) fn write_to(&self, page: &mut Page) {
        page.family(&KNOWN_GOOD_REFUSALS, |family| {
            for ((domain, key), counts) in &*self.0.lock() {
                for (mode, count) in MODES.iter().zip(counts) {
                    family.sample(&[domain, key, mode], *count);
                }
            }
        });
    }
}
