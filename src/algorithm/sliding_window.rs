//! Counts the hits of this window, and those of the one before by the share of it that is less than a window ago.
//! From Cloudflare's "How we built rate limiting capable of scaling to millions of domains", 2017; here in whole ticks.
//! Remembers two counts and the number of a window: 24 bytes.
//! Assumes that the hits of the window before were spread evenly: where they came at its end, nearly twice the limit can
//! pass within one window's length, and where they came at its beginning, as much is refused that would have fitted.
//! Choose `sliding_log` where the limit is small and no hit may be one too many.

use super::{Count, MOST_COUNTED, hits32};
use crate::model::{Hits, InvalidQuota, Micros, Outcome, Provenance, Quota, Verdict};

/// The hits of this window and a share of those of the window before.
pub struct SlidingWindow;

/// The hits counted in two windows, and the number of the later one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct State {
    window: u64,
    previous: u64,
    current: u64,
}

/// Of one window: how many ticks of it, and how many of them have passed.
#[derive(Clone, Copy)]
struct Elapsed {
    ticks: u64,
    of: u64,
}

impl Count for SlidingWindow {
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
        // Hits given back are taken back whatever is used.
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
        // From the window of the charge, as far as that still counts.
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
    /// The window of a moment with the counts that matter then, and how much of it has passed.
    fn at(self, now: Micros, quota: Quota) -> (Self, Elapsed) {
        let length = quota.window().length().get();
        let reached = now.get() / length;
        // A clock that steps back waits at the beginning of the window it had reached.
        let window = reached.max(self.window);
        let passed = if reached == window { now.get() % length / quota.tick().get() } else { 0 };
        let (previous, current) = match window - self.window {
            0 => (self.previous, self.current),
            1 => (self.current, 0),
            _ => (0, 0),
        };
        (Self { window, previous, current }, Elapsed { ticks: passed, of: quota.ticks() })
    }

    /// The hits of the length of a window that ends now, if those of the window before were spread evenly.
    fn estimate(self, elapsed: Elapsed) -> u64 {
        self.current + elapsed.share_left(self.previous)
    }

    /// With the hits on it. Those given back are the latest: of this window first, then of the one before.
    fn charged(self, hits: Hits) -> Self {
        let current = self.current + hits.taken();
        let beyond = hits.given_back().saturating_sub(current);
        Self {
            current: current.saturating_sub(hits.given_back()).min(MOST_COUNTED),
            previous: self.previous.saturating_sub(beyond),
            ..self
        }
    }

    /// The moment at which the estimate, which is above it, has come down to `most`.
    fn fits_at(self, most: u64, quota: Quota) -> Micros {
        let ticks = quota.ticks();
        // In this window as the share of the previous one goes down, or in the next as that of this one does.
        let (window, room, shrinking) = match most.checked_sub(self.current) {
            Some(room) => (self.window, room, self.previous),
            None => (self.window.saturating_add(1), most, self.current),
        };
        let passed = ticks - (room * ticks).checked_div(shrinking).unwrap_or(ticks).min(ticks);
        let begin = window.saturating_mul(quota.window().length().get());
        Micros::new(begin.saturating_add(passed * quota.tick().get()))
    }

    fn idle_at(self, quota: Quota) -> Micros {
        let windows = match (self.previous, self.current) {
            (0, 0) => return Micros::ZERO,
            (_, 0) => 1,
            _ => 2,
        };
        Micros::new(self.window.saturating_add(windows).saturating_mul(quota.window().length().get()))
    }
}

impl Elapsed {
    /// The share of `hits` that belongs to the ticks not passed yet, rounded up. In two parts, so that no product leaves
    /// 2^53.
    const fn share_left(self, hits: u64) -> u64 {
        let left = self.of - self.ticks;
        hits / self.of * left + (hits % self.of * left).div_ceil(self.of)
    }
}
