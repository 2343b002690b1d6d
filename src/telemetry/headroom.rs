//! Use of limits by keys: the highest share that was seen of each key in each window, as a histogram for each rule.
//!
//! Only sampled decisions are seen, so a share may be too small by the hits between two of them, and keys with few calls are often missing.

use std::collections::BTreeMap;
use std::hash::BuildHasher;
use std::mem;
use std::sync::Arc;

use foldhash::HashMap;
use parking_lot::Mutex;

use super::histogram::Histogram;
use super::metrics::KEY_PEAK_SHARE;
use super::page::Page;
use crate::model::{Finding, Micros, Part, Path, Tightest};

/// Upper bounds of the buckets, in millionths of a limit.
const BOUNDS: &[u64] = &[100_000, 250_000, 500_000, 750_000, 900_000, 999_999, 1_000_000];
/// Maximum number of keys whose windows are open: 4,096, about 400 KiB. Further ones are not seen.
const MOST_KEYS: usize = 4_096;
/// Maximum number of rules with a histogram: 200, which make about 150 KiB of a page of metrics.
const MOST_RULES: usize = 200;
/// The longest time for which a key is watched: an hour. Of a longer window, each hour counts by itself.
const LONGEST: Micros = Micros::from_secs(3_600);

/// Highest shares of keys.
#[derive(Debug, Default)]
pub(super) struct Headroom {
    hasher: foldhash::fast::RandomState,
    seen: Mutex<Seen>,
}

#[derive(Debug, Default)]
struct Seen {
    /// Keys whose windows are open, by digest.
    open: HashMap<u64, Peak>,
    rules: Peaks,
}

/// Peaks of windows that are over, by the domain and the path of the rule.
#[derive(Debug, Default)]
struct Peaks(BTreeMap<(String, String), Histogram>);

/// The highest share that was seen of a key in its window.
#[derive(Debug)]
struct Peak {
    rule: Arc<Path>,
    ends: Micros,
    millionths: u64,
}

impl Headroom {
    /// Notes a sampled decision of `now` on a descriptor; `entries` is the hash of its entries.
    pub(super) fn saw(&self, part: &Part<'_>, entries: u64, now: Micros) {
        let Some((rule, tightest)) = part.rule.zip(limited(&part.finding)) else { return };
        let window = tightest.quota.window().length();
        let digest = self.hasher.hash_one((entries, Arc::as_ptr(&rule.path), window.get()));
        let length = window.min(LONGEST).get();
        let ends = Micros::new((now.get() / length).saturating_add(1).saturating_mul(length));
        let peak = Peak { rule: Arc::clone(&rule.path), ends, millionths: share(tightest) };
        let Seen { open, rules } = &mut *self.seen.lock();
        let is_full = open.len() >= MOST_KEYS;
        match open.get_mut(&digest) {
            Some(open) if open.ends == ends => open.millionths = open.millionths.max(peak.millionths),
            Some(open) => {
                let before = mem::replace(open, peak);
                rules.close(&before);
            }
            None if is_full => {}
            None => {
                open.insert(digest, peak);
            }
        }
    }

    /// Counts the peaks of windows that are over at `now`.
    pub(super) fn close_windows(&self, now: Micros) {
        let Seen { open, rules } = &mut *self.seen.lock();
        open.retain(|_, peak| {
            let is_over = peak.ends <= now;
            if is_over {
                rules.close(peak);
            }
            !is_over
        });
    }

    /// Writes the metric.
    pub(super) fn write_to(&self, page: &mut Page) {
        page.family(&KEY_PEAK_SHARE, |family| {
            for ((domain, rule), shares) in &self.seen.lock().rules.0 {
                family.histogram(&[domain, rule], shares);
            }
        });
    }
}

impl Peaks {
    fn close(&mut self, peak: &Peak) {
        let rule = (peak.rule.domain().to_owned(), peak.rule.to_string());
        if self.0.len() < MOST_RULES || self.0.contains_key(&rule) {
            self.0.entry(rule).or_insert_with(|| Histogram::new(BOUNDS)).record_millionths(peak.millionths);
        }
    }
}

/// Returns the limit of a descriptor, if a store counted it.
fn limited<'d, 'a>(finding: &'d Finding<'a>) -> Option<&'d Tightest<'a>> {
    match finding {
        Finding::Limited(tightest) if tightest.verdict.provenance.is_counted() => Some(tightest),
        _ => None,
    }
}

/// Returns the share of the limit that is used, in millionths. All of it if the charge is refused.
fn share(tightest: &Tightest<'_>) -> u64 {
    // Without a burst it is the limit.
    let capacity = u64::from(tightest.quota.burst());
    let used = capacity.saturating_sub(tightest.verdict.remaining.into());
    if tightest.verdict.outcome.is_refused() || capacity == 0 { 1_000_000 } else { used * 1_000_000 / capacity }
}
