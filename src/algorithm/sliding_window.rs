//! Counts the hits of this window, and a share of the previous window: the part of it that is less than a window ago.
//! From Cloudflare's "How we built rate limiting capable of scaling to millions of domains", 2017; here in whole ticks.
//! Remembers two counts and the number of a window: 24 bytes.
//! Assumes that the hits of the previous window were spread evenly. If they came at its end, nearly twice the limit can pass
//! within one window's length. If they came at its beginning, as many hits are refused that would have fitted. The share is rounded
//! down: who calls once a window is never refused by a limit of 1, and at a border at most one hit more passes.
//! Choose `sliding_log` if the limit is small and no hit may be one too many.

use super::{Counting, MOST_COUNTED, hits32};
use crate::model::{Hits, InvalidQuota, Micros, Outcome, Provenance, Quota, Verdict};

/// Counts the hits of this window and a share of the previous window.
pub struct SlidingWindow;

/// The hits counted in two windows, and the number of the later one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct State {
    window: u64,
    previous: u64,
    current: u64,
}

/// Elapsed part of one window: `ticks` of its `of` ticks have passed.
#[derive(Clone, Copy)]
struct Elapsed {
    ticks: u64,
    of: u64,
}

impl Counting for SlidingWindow {
    type State = State;
    const HAS_BURST: bool = false;
    const COUNTS_REFUSED_WHEN_EACH: bool = false;

    fn check(quota: Quota) -> Result<(), InvalidQuota> {
        quota.is_whole_ticks()
    }

    fn verdict(state: &State, now: Micros, hits: Hits, quota: Quota) -> Verdict {
        let limit = u64::from(quota.limit());
        let (found, elapsed) = state.at(now, quota);
        let used = found.estimate(elapsed);
        // Giving back is admitted at any level.
        let outcome = Outcome::admitted_if(used + hits.taken() <= limit || hits.given_back() > 0);
        let left = if outcome.is_refused() { found } else { found.charged(hits) };
        let remaining = hits32(limit.saturating_sub(left.estimate(elapsed)));
        Verdict {
            outcome,
            remaining,
            room: remaining,
            reset: left.idle_at(quota).saturating_sub(now),
            retry: (outcome.is_refused() && hits.taken() <= limit)
                .then(|| found.fits_at(limit - hits.taken(), quota).saturating_sub(now)),
            delay: Micros::ZERO,
            provenance: Provenance::Store,
        }
    }

    fn charge(state: &mut State, now: Micros, hits: Hits, quota: Quota) {
        *state = state.at(now, quota).0.charged(hits);
    }

    fn undo(state: &mut State, _: Micros, at: Micros, hits: u64, quota: Quota) {
        // Only the window of the charge is changed, if it still counts.
        let window = at.get() / quota.window().length().get();
        if window == state.window {
            state.current = state.current.saturating_sub(hits);
        } else if window.checked_add(1) == Some(state.window) {
            state.previous = state.previous.saturating_sub(hits);
        }
    }

    fn idle_at(state: &State, quota: Quota) -> Micros {
        state.idle_at(quota)
    }
}

impl State {
    /// Returns the state at `now`, with the counts that matter then, and the elapsed part of its window.
    fn at(self, now: Micros, quota: Quota) -> (Self, Elapsed) {
        let length = quota.window().length().get();
        let reached = now.get() / length;
        // If the clock steps back, it stays at the beginning of the window that it had reached.
        let window = reached.max(self.window);
        let passed = if reached == window { now.get() % length / quota.tick().get() } else { 0 };
        let (previous, current) = match window - self.window {
            0 => (self.previous, self.current),
            1 => (self.current, 0),
            _ => (0, 0),
        };
        (Self { window, previous, current }, Elapsed { ticks: passed, of: quota.ticks() })
    }

    /// Returns the estimated hits of a window's length that ends now. Assumes that the hits of the previous window were spread
    /// evenly.
    fn estimate(self, elapsed: Elapsed) -> u64 {
        self.current + elapsed.share_left(self.previous)
    }

    /// Returns the state with the hits added. Hits given back are taken from this window first, then from the previous one.
    fn charged(self, hits: Hits) -> Self {
        let current = self.current + hits.taken();
        let beyond = hits.given_back().saturating_sub(current);
        Self {
            current: current.saturating_sub(hits.given_back()).min(MOST_COUNTED),
            previous: self.previous.saturating_sub(beyond),
            ..self
        }
    }

    /// Returns the first time at which the estimate, now above `most`, has come down to `most`.
    fn fits_at(self, most: u64, quota: Quota) -> Micros {
        let ticks = quota.ticks();
        // It comes down in this window as the share of the previous window shrinks, or in the next as the share of this one
        // shrinks.
        let (window, room, shrinking) = match most.checked_sub(self.current) {
            Some(room) => (self.window, room, self.previous),
            None => (self.window.saturating_add(1), most, self.current),
        };
        // The most ticks left of which the share is below `room + 1`.
        let left = ((room + 1) * ticks - 1).checked_div(shrinking).unwrap_or(ticks).min(ticks);
        let passed = ticks - left;
        let begin = window.saturating_mul(quota.window().length().get());
        Micros::new(begin.saturating_add(passed * quota.tick().get()))
    }

    fn idle_at(self, quota: Quota) -> Micros {
        if (self.previous, self.current) == (0, 0) { Micros::ZERO } else { self.fits_at(0, quota) }
    }
}

impl Elapsed {
    /// Returns the share of `hits` for the ticks that have not passed yet, rounded down. Computed in two parts, so that no product
    /// exceeds 2^53.
    const fn share_left(self, hits: u64) -> u64 {
        let left = self.of - self.ticks;
        hits / self.of * left + hits % self.of * left / self.of
    }
}
