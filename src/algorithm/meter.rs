//! Counts a level that every hit raises and time lowers: what `token_bucket`, `leaky_bucket` and `gcra` share.
//! The leaky bucket as a meter (Turner 1986), in whole ticks and grains instead of fractions.
//! Remembers a tick, a level and the smallest limit: 20 bytes.
//! Exact to the tick: never more than the burst plus what drains in the ticks that begin, in any interval; nothing is wasted.
//! Choose `fixed_window` for quotas that start anew with the hour or the day.
//!
//! A hit is as many grains as its window has ticks, and `limit` grains drain per tick, so the level knows nothing of the
//! limit. Every product stays below 2^53.

use super::{Count, MOST_COUNTED, hits32};
use crate::model::{Hits, InvalidQuota, Micros, Outcome, Provenance, Quota, Verdict};

/// The longest wait that is ever promised: ten years. Beyond that no clock is worth a promise.
const LONGEST_WAIT: Micros = Micros::from_secs(315_360_000);

/// A level of hits that drains.
pub struct Meter;

/// A level, and the tick at which it stood there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct State {
    tick: u64,
    level: u64,
    /// The smallest limit it was charged against: under that one it is idle last.
    slowest: u32,
}

impl Default for State {
    fn default() -> Self {
        Self { tick: 0, level: 0, slowest: u32::MAX }
    }
}

impl Count for Meter {
    type State = State;
    const HAS_BURST: bool = true;
    const COUNTS_REFUSED_WHEN_EACH: bool = false;

    fn check(quota: Quota) -> Result<(), InvalidQuota> {
        quota.is_whole_ticks()?;
        quota.has_room_for_a_tick()
    }

    fn verdict(state: &State, now: Micros, hits: Hits, quota: Quota) -> Verdict {
        let (limit, burst, grains) = (u64::from(quota.limit()), u64::from(quota.burst()), quota.ticks());
        let State { tick, level, .. } = state.at(now, quota);
        let (room, wanted) = (burst * grains, level + hits.taken() * grains);
        // Hits given back are taken back whatever is used.
        let outcome = Outcome::admitted_if(wanted <= room || hits.given_back() > 0);
        let left = if outcome.is_refused() { level } else { charged(level, hits, quota) };

        let wait = |grains: u64| {
            let ticks = if limit == 0 { 0 } else { grains.div_ceil(limit) };
            Micros::new(tick.saturating_add(ticks).saturating_mul(quota.tick().get()))
                .saturating_sub(now)
                .min(LONGEST_WAIT)
        };
        let fits_ever = hits.taken() <= burst && limit > 0;
        Verdict {
            outcome,
            remaining: hits32(room.saturating_sub(left) / grains),
            reset: if left == 0 { Micros::ZERO } else { wait(left) },
            retry: (outcome.is_refused() && fits_ever).then(|| wait(wanted - room)),
            delay: Micros::ZERO,
            provenance: Provenance::Store,
        }
    }

    fn charge(state: &mut State, now: Micros, hits: Hits, quota: Quota) {
        let State { tick, level, slowest } = state.at(now, quota);
        *state = State { tick, level: charged(level, hits, quota), slowest: slowest.min(quota.limit()) };
    }

    fn idle_at(state: &State, quota: Quota) -> Micros {
        let drained = state.level.checked_div(u64::from(state.slowest)).map_or(0, |whole| whole + 1);
        Micros::new(state.tick.saturating_add(drained).saturating_mul(quota.tick().get()))
    }
}

impl State {
    /// The tick of a moment, and the level then.
    fn at(self, now: Micros, quota: Quota) -> Self {
        // A clock that steps back waits where it was: nothing drains twice.
        let tick = (now.get() / quota.tick().get()).max(self.tick);
        let drained = (tick - self.tick).saturating_mul(u64::from(quota.limit()));
        Self { tick, level: self.level.saturating_sub(drained), ..self }
    }
}

fn charged(level: u64, hits: Hits, quota: Quota) -> u64 {
    let grains = quota.ticks();
    (level + hits.taken() * grains).saturating_sub(hits.given_back() * grains).min(MOST_COUNTED)
}
