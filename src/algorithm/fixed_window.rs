//! Counts the hits of each window of fixed length, aligned to the epoch.
//! From the reference (envoyproxy/ratelimit), whose answers it gives.
//! Remembers a count and the number of its window: 16 bytes.
//! Up to twice the limit passes within one window's length across a border; never more than the limit in one window.
//! Choose another where a burst at the border hurts: `gcra` is smooth.

use super::{Count, MOST_COUNTED, Step, hits32};
use crate::model::{Hits, InvalidQuota, Micros, Outcome, Provenance, Quota, Verdict};

/// The hits of each window.
pub struct FixedWindow;

/// The hits counted in one window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct State {
    window: u64,
    count: u64,
}

impl Count for FixedWindow {
    type State = State;
    const HAS_BURST: bool = false;
    const COUNTS_REFUSED_WHEN_EACH: bool = true;

    fn check(_: Quota) -> Result<(), InvalidQuota> {
        Ok(())
    }

    fn step(state: &State, now: Micros, hits: Hits, quota: Quota) -> Step<State> {
        let length = quota.window().length().get();
        // A clock that steps back stays in the window it had reached: no hits are forgotten.
        let window = (now.get() / length).max(state.window);
        let used = if state.window == window { state.count } else { 0 };
        let limit = u64::from(quota.limit());

        let wanted = used + hits.taken();
        // Hits given back are taken back whatever is used.
        let outcome = Outcome::admitted_if(wanted <= limit || hits.given_back() > 0);
        let count = wanted.saturating_sub(hits.given_back()).min(MOST_COUNTED);
        let reset = end_of(window, length).saturating_sub(now);
        let retry = (outcome.is_refused() && hits.taken() <= limit).then_some(reset);
        // What a refused charge leaves behind is for the store to say; its answer is about the count it found.
        let left = if outcome.is_refused() { used } else { count };
        let remaining = hits32(limit.saturating_sub(left));
        Step {
            verdict: Verdict { outcome, remaining, reset, retry, provenance: Provenance::Store },
            charged: State { window, count },
        }
    }

    fn idle_at(state: &State, quota: Quota) -> Micros {
        end_of(state.window, quota.window().length().get())
    }
}

fn end_of(window: u64, length: u64) -> Micros {
    Micros::new(window.saturating_add(1).saturating_mul(length))
}
