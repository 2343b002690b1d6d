//! Counts a level that every hit raises and time lowers, for `token_bucket`, `leaky_bucket` and `gcra`.
//! The leaky bucket as a meter (Turner 1986), in whole ticks and grains instead of fractions.
//! Remembers a tick, a level and the smallest limit: 20 bytes.
//! Exact to the tick: in any interval at most the burst plus the hits that drain in the ticks that begin in it; no capacity is
//! lost.
//! Choose `fixed_window` for quotas that restart with the hour or the day.
//!
//! A hit costs one grain for each tick of its window, and `limit` grains drain per tick, so the level does not depend on the
//! limit. Every product stays below 2^53.
//!
//! With slots, a charge is admitted before there is room for it, and its verdict has the wait. The algorithms differ in the event
//! that a charge waits for; their files describe it.

use std::marker::PhantomData;

use super::{Counting, MOST_COUNTED, hits32};
use crate::model::{Hits, InvalidQuota, Micros, Outcome, Provenance, Quota, Verdict};

/// Longest wait that a verdict promises: ten years.
const LONGEST_WAIT: Micros = Micros::from_secs(315_360_000);

/// A level of hits that drains. `S` defines the wait of a charge for its slot.
pub struct Meter<S>(PhantomData<S>);

/// Wait of a charge for its slot.
pub trait SlotDelay {
    /// True if there are slots to wait for.
    const ARE_THERE: bool;

    /// Returns the grains that must drain before a charge. It finds this `level` and raises it to `wanted`; `room` is the level
    /// of a full burst.
    fn ahead(level: u64, wanted: u64, room: u64) -> Ahead;
}

/// Grains that must drain before a charge.
#[derive(Clone, Copy)]
pub struct Ahead {
    /// Grains before the turn of the charge: it waits for them in its slot.
    pub of_turn: u64,
    /// Grains before there is a slot for the charge.
    pub of_slot: u64,
}

/// No slots: a charge that does not fit is refused.
pub struct NoSlots;

/// A level, and the tick of that level.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct State {
    tick: u64,
    level: u64,
    /// Smallest limit that it was charged against: under this limit it becomes idle last.
    slowest: u32,
}

impl SlotDelay for NoSlots {
    const ARE_THERE: bool = false;

    fn ahead(_: u64, wanted: u64, room: u64) -> Ahead {
        Ahead { of_turn: 0, of_slot: wanted.saturating_sub(room) }
    }
}

impl Default for State {
    fn default() -> Self {
        Self { tick: 0, level: 0, slowest: u32::MAX }
    }
}

impl<S: SlotDelay> Counting for Meter<S> {
    type State = State;
    const HAS_BURST: bool = true;
    const HAS_SLOTS: bool = S::ARE_THERE;
    const COUNTS_REFUSED_WHEN_EACH: bool = false;

    fn check(quota: Quota) -> Result<(), InvalidQuota> {
        quota.is_whole_ticks()?;
        quota.has_room_for_a_tick()
    }

    fn verdict(state: &State, now: Micros, hits: Hits, quota: Quota) -> Verdict {
        verdict_with::<NoSlots>(state, now, hits, quota, Micros::ZERO)
    }

    fn slot(state: &State, now: Micros, hits: Hits, quota: Quota, max: Micros) -> Verdict {
        verdict_with::<S>(state, now, hits, quota, max)
    }

    fn charge(state: &mut State, now: Micros, hits: Hits, quota: Quota) {
        let State { tick, level, slowest } = state.at(now, quota);
        *state = State { tick, level: charged(level, hits, quota), slowest: slowest.min(quota.limit()) };
    }

    fn undo(state: &mut State, now: Micros, at: Micros, hits: u64, quota: Quota) {
        let drained = state.at(now, quota);
        // At least this much of the charge is still on the counter: its grains, minus the grains that have drained since.
        let since = drained.tick.saturating_sub(at.get() / quota.tick().get());
        let added = hits.saturating_mul(quota.ticks());
        let back = added.saturating_sub(since.saturating_mul(u64::from(quota.limit())));
        *state = State { level: drained.level.saturating_sub(back), ..drained };
    }

    fn idle_at(state: &State, quota: Quota) -> Micros {
        let drained = state.level.checked_div(u64::from(state.slowest)).map_or(0, |whole| whole + 1);
        Micros::new(state.tick.saturating_add(drained).saturating_mul(quota.tick().get()))
    }
}

impl State {
    /// Returns the state at `now`: its tick, and the level at that tick.
    fn at(self, now: Micros, quota: Quota) -> Self {
        // If the clock steps back, the state keeps its tick: nothing drains twice.
        let tick = (now.get() / quota.tick().get()).max(self.tick);
        let drained = (tick - self.tick).saturating_mul(u64::from(quota.limit()));
        Self { tick, level: self.level.saturating_sub(drained), ..self }
    }
}

/// Returns the verdict of a charge that waits for its slot, at most `max`.
fn verdict_with<S: SlotDelay>(state: &State, now: Micros, hits: Hits, quota: Quota, max: Micros) -> Verdict {
    let (limit, burst, grains) = (u64::from(quota.limit()), u64::from(quota.burst()), quota.ticks());
    let State { tick, level, .. } = state.at(now, quota);
    let (room, cost) = (burst * grains, hits.taken() * grains);
    let ticks = |grains: u64| if limit == 0 { 0 } else { grains.div_ceil(limit) };
    let wait = |grains: u64| {
        if grains == 0 {
            return Micros::ZERO;
        }
        Micros::new(tick.saturating_add(ticks(grains)).saturating_mul(quota.tick().get())).saturating_sub(now)
    };

    let Ahead { of_turn, of_slot } = S::ahead(level, level + cost, room);
    let delay = wait(of_turn);
    // Giving back is admitted at any level.
    let outcome = Outcome::admitted_if((of_slot == 0 && delay <= max) || hits.given_back() > 0);
    let is_refused = outcome.is_refused();
    let fits_ever = || {
        let idle = S::ahead(0, cost, room);
        idle.of_slot == 0 && ticks(idle.of_turn) <= max.get().div_ceil(quota.tick().get()) && limit > 0
    };
    // The wait shrinks with time. The charge fits as soon as there is a slot and its wait has shrunk to `max`.
    let fits_in = || wait(of_slot).max(delay.saturating_sub(max)).min(LONGEST_WAIT);
    let left = if is_refused { level } else { charged(level, hits, quota) };
    let remaining = hits32(room.saturating_sub(left) / grains);
    Verdict {
        outcome,
        remaining,
        room: remaining,
        reset: wait(left).min(LONGEST_WAIT),
        retry: (is_refused && fits_ever()).then(fits_in),
        delay: if is_refused { Micros::ZERO } else { delay },
        provenance: Provenance::Store,
    }
}

fn charged(level: u64, hits: Hits, quota: Quota) -> u64 {
    let grains = quota.ticks();
    (level + hits.taken() * grains).saturating_sub(hits.given_back() * grains).min(MOST_COUNTED)
}

/// Returns the grains of `wanted` above the highest level, `MOST_COUNTED`. Hits above it have no slot.
pub const fn above_the_highest(wanted: u64) -> u64 {
    wanted.saturating_sub(MOST_COUNTED)
}
