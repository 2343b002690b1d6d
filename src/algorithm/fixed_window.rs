//! Counts the hits of each window of fixed length, aligned to the epoch.
//! From the reference (envoyproxy/ratelimit); the answers are equal.
//! Remembers a count and the number of its window: 16 bytes.
//! Up to twice the limit passes within one window's length across a border; never more than the limit in one window.
//! Choose `sliding_window` where a burst at the border hurts.

use super::{Counting, MOST_COUNTED, hits32};
use crate::model::{Hits, InvalidQuota, Micros, Outcome, Provenance, Quota, Verdict};

/// Counts the hits of each window.
pub struct FixedWindow;

/// The hits counted in one window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct State {
    window: u64,
    count: u64,
}

impl Counting for FixedWindow {
    type State = State;
    const HAS_BURST: bool = false;
    const COUNTS_REFUSED_WHEN_EACH: bool = true;

    fn check(_: Quota) -> Result<(), InvalidQuota> {
        Ok(())
    }

    fn verdict(state: &State, now: Micros, hits: Hits, quota: Quota) -> Verdict {
        let State { window, count: used } = state.at(now, quota);
        let limit = u64::from(quota.limit());
        // Giving back is admitted at any level.
        let outcome = Outcome::admitted_if(used + hits.taken() <= limit || hits.given_back() > 0);
        let left = if outcome.is_refused() { used } else { charged(used, hits) };
        let reset = end_of(window, quota).saturating_sub(now);
        let retry = (outcome.is_refused() && hits.taken() <= limit).then_some(reset);
        let remaining = hits32(limit.saturating_sub(left));
        Verdict {
            outcome,
            remaining,
            room: remaining,
            reset,
            retry,
            delay: Micros::ZERO,
            provenance: Provenance::Store,
        }
    }

    fn charge(state: &mut State, now: Micros, hits: Hits, quota: Quota) {
        let State { window, count } = state.at(now, quota);
        *state = State { window, count: charged(count, hits) };
    }

    fn undo(state: &mut State, _: Micros, at: Micros, hits: u64, quota: Quota) {
        // Only the window of the charge is changed.
        if state.window == at.get() / quota.window().length().get() {
            state.count = state.count.saturating_sub(hits);
        }
    }

    fn idle_at(state: &State, quota: Quota) -> Micros {
        end_of(state.window, quota)
    }
}

impl State {
    /// Returns the state at `now`: its window, and the hits counted in it.
    fn at(self, now: Micros, quota: Quota) -> Self {
        // If the clock steps back, the state keeps its window: no hits are forgotten.
        let window = (now.get() / quota.window().length().get()).max(self.window);
        Self { window, count: if self.window == window { self.count } else { 0 } }
    }
}

fn charged(used: u64, hits: Hits) -> u64 {
    (used + hits.taken()).saturating_sub(hits.given_back()).min(MOST_COUNTED)
}

fn end_of(window: u64, quota: Quota) -> Micros {
    Micros::new(window.saturating_add(1).saturating_mul(quota.window().length().get()))
}
