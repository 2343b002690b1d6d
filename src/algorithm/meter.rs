//! Counts a level that every hit raises and time lowers: what `gcra` and its kin share.
//! The leaky bucket as a meter (Turner 1986), in whole ticks and grains instead of fractions.
//! Remembers a tick and a level: 16 bytes.
//! Exact: never more than the burst plus what drains, in any interval; nothing is wasted.
//! Choose `fixed_window` for quotas that start anew with the hour or the day.
//!
//! A hit is as many grains as its window has ticks, and `limit` grains drain per tick, so the state knows nothing of the
//! limit. Every product stays below 2^53.

use super::{MOST_COUNTED, Step, hits32};
use crate::model::{Hits, Micros, Outcome, Provenance, Quota, Verdict};

/// The longest wait that is ever promised: ten years. Beyond that no clock is worth a promise.
const LONGEST_WAIT: Micros = Micros::from_secs(315_360_000);

/// A level, and the tick at which it stood there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct State {
    tick: u64,
    level: u64,
}

pub(super) fn step(state: &State, now: Micros, hits: Hits, quota: Quota) -> Step<State> {
    let (limit, burst, grains) = (u64::from(quota.limit()), u64::from(quota.burst()), quota.ticks());
    // A clock that steps back waits where it was: nothing drains twice.
    let tick = (now.get() / quota.tick().get()).max(state.tick);
    let level = state.level.saturating_sub((tick - state.tick).saturating_mul(limit));

    let room = burst * grains;
    let wanted = level + hits.taken() * grains;
    // Hits given back are taken back whatever is used.
    let outcome = Outcome::admitted_if(wanted <= room || hits.given_back() > 0);
    let charged = wanted.saturating_sub(hits.given_back() * grains).min(MOST_COUNTED);
    // What a refused charge leaves behind is for the store to say; its answer is about the level it found.
    let left = if outcome.is_refused() { level } else { charged };

    let at = |ticks: u64| Micros::new((tick.saturating_add(ticks)).saturating_mul(quota.tick().get()));
    let wait_ticks = |grains: u64| if limit == 0 { 0 } else { grains.div_ceil(limit) };
    let idle = at(wait_ticks(left)).saturating_sub(now);
    let fits_ever = hits.taken() <= burst && limit > 0;
    let retry = (outcome.is_refused() && fits_ever)
        .then(|| at(wait_ticks(wanted - room)).saturating_sub(now).min(LONGEST_WAIT));
    let reset = retry.unwrap_or_else(|| if left == 0 { Micros::ZERO } else { idle.min(LONGEST_WAIT) });
    let remaining = hits32(room.saturating_sub(left) / grains);
    Step {
        verdict: Verdict { outcome, remaining, reset, retry, provenance: Provenance::Store },
        charged: State { tick, level: charged },
    }
}

pub(super) fn idle_at(state: &State, quota: Quota) -> Micros {
    let drained = state.level.checked_div(u64::from(quota.limit())).map_or(0, |whole| whole + 1);
    Micros::new(state.tick.saturating_add(drained).saturating_mul(quota.tick().get()))
}
