//! Times of calls in whole milliseconds, for statsd.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Times below 128 ms are exact.
const EXACT: usize = 128;
/// Number of cells for each doubling above: 64, so that a time is at most 1.6% too short.
const CELLS: usize = 64;
/// Number of doublings: 13, up to 17 minutes. A longer time counts as that.
const DOUBLINGS: usize = 13;

/// Number of calls by their time since the last flush.
#[derive(Debug)]
pub(super) struct Times(Box<[AtomicU64]>);

impl Default for Times {
    fn default() -> Self {
        Self(std::iter::repeat_with(AtomicU64::default).take(EXACT + CELLS * DOUBLINGS).collect())
    }
}

impl Times {
    /// Counts a call.
    pub(super) fn record(&self, took: Duration) {
        let millis = usize::try_from(took.as_millis()).unwrap_or(usize::MAX);
        let at = place(millis).min(self.0.len() - 1);
        if let Some(cell) = self.0.get(at) {
            cell.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Returns the milliseconds and the number of calls that took them, and begins anew.
    pub(super) fn take(&self) -> Vec<(u64, u64)> {
        let taken = self.0.iter().enumerate().map(|(at, cell)| (least(at), cell.swap(0, Ordering::Relaxed)));
        taken.filter(|(_, calls)| *calls > 0).collect()
    }
}

fn place(millis: usize) -> usize {
    if millis < EXACT {
        return millis;
    }
    let doubling = (millis / EXACT).ilog2() as usize;
    EXACT + doubling * CELLS + (millis >> (doubling + 1)) - CELLS
}

/// Returns the shortest time of a cell, in milliseconds.
fn least(at: usize) -> u64 {
    let millis = match at.checked_sub(EXACT) {
        None => at,
        Some(above) => (CELLS + above % CELLS) << (above / CELLS + 1),
    };
    millis as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_kept_in_whole_milliseconds_and_a_long_one_a_little_short() {
        let times = Times::default();
        for millis in 0..2_000_000_u64 {
            let at = place(usize::try_from(millis).unwrap());
            let kept = least(at);
            assert!(kept <= millis && (millis - kept) * 64 <= millis, "{millis}: {kept}");
            assert!(millis >= 128 || kept == millis);
        }
        times.record(Duration::from_micros(1_999));
        times.record(Duration::from_secs(1_000_000));
        assert_eq!(times.take(), [(1, 1), (1_040_384, 1)]);
        assert_eq!(times.take(), []);
    }
}
