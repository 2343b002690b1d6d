//! Counts a level that every hit raises and time lowers: what `token_bucket`, `leaky_bucket` and `gcra` share.
//! The leaky bucket as a meter (Turner 1986), in whole ticks and grains instead of fractions.
//! Remembers a tick, a level and the smallest limit: 20 bytes.
//! Exact to the tick: never more than the burst plus what drains in the ticks that begin, in any interval; nothing is wasted.
//! Choose `fixed_window` for quotas that start anew with the hour or the day.
//!
//! A hit is as many grains as its window has ticks, and `limit` grains drain per tick, so the level knows nothing of the
//! limit. Every product stays below 2^53.
//!
//! Where a charge may wait for a slot it is admitted before there is room for it, and told how long it has to wait. The
//! algorithms differ in what it waits for, and say so in their files.

use std::marker::PhantomData;

use super::{Count, MOST_COUNTED, hits32};
use crate::model::{Hits, InvalidQuota, Micros, Outcome, Provenance, Quota, Verdict};

/// The longest wait that is ever promised: ten years. Beyond that no clock is worth a promise.
const LONGEST_WAIT: Micros = Micros::from_secs(315_360_000);

/// A level of hits that drains, and how a charge waits for its slot.
pub struct Meter<S>(PhantomData<S>);

/// How a charge waits for its slot.
pub trait Slots {
    /// Whether there are slots to wait for.
    const ARE_THERE: bool;

    /// What has to drain for a charge that finds this `level` and makes it as high as `wanted`, where there is `room` up to
    /// the burst.
    fn ahead(level: u64, wanted: u64, room: u64) -> Ahead;
}

/// What has to drain, in grains.
#[derive(Clone, Copy)]
pub struct Ahead {
    /// Before it is the turn of a charge: so long it waits in its slot.
    pub of_turn: u64,
    /// Before there is a slot for it at all.
    pub of_slot: u64,
}

/// Nobody waits: what does not fit is refused.
pub struct NoSlots;

/// A level, and the tick at which it stood there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct State {
    tick: u64,
    level: u64,
    /// The smallest limit it was charged against: under that one it is idle last.
    slowest: u32,
}

impl Slots for NoSlots {
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

impl<S: Slots> Count for Meter<S> {
    type State = State;
    const HAS_BURST: bool = true;
    const HAS_SLOTS: bool = S::ARE_THERE;
    const COUNTS_REFUSED_WHEN_EACH: bool = false;

    fn check(quota: Quota) -> Result<(), InvalidQuota> {
        quota.is_whole_ticks()?;
        quota.has_room_for_a_tick()
    }

    fn verdict(state: &State, now: Micros, hits: Hits, quota: Quota) -> Verdict {
        told::<NoSlots>(state, now, hits, quota, Micros::ZERO)
    }

    fn slot(state: &State, now: Micros, hits: Hits, quota: Quota, max: Micros) -> Verdict {
        told::<S>(state, now, hits, quota, max)
    }

    fn charge(state: &mut State, now: Micros, hits: Hits, quota: Quota) {
        let State { tick, level, slowest } = state.at(now, quota);
        *state = State { tick, level: charged(level, hits, quota), slowest: slowest.min(quota.limit()) };
    }

    fn undo(state: &mut State, now: Micros, at: Micros, hits: u64, quota: Quota) {
        let drained = state.at(now, quota);
        // What the charge added, less what has drained since: at least that much still stands.
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
    /// The tick of a moment, and the level then.
    fn at(self, now: Micros, quota: Quota) -> Self {
        // A clock that steps back waits where it was: nothing drains twice.
        let tick = (now.get() / quota.tick().get()).max(self.tick);
        let drained = (tick - self.tick).saturating_mul(u64::from(quota.limit()));
        Self { tick, level: self.level.saturating_sub(drained), ..self }
    }
}

/// What a charge is told that waits for its slot, `max` at most.
fn told<S: Slots>(state: &State, now: Micros, hits: Hits, quota: Quota, max: Micros) -> Verdict {
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
    // Hits given back are taken back whatever is used.
    let outcome = Outcome::admitted_if((of_slot == 0 && delay <= max) || hits.given_back() > 0);
    let is_refused = outcome.is_refused();
    let fits_ever = || {
        let idle = S::ahead(0, cost, room);
        idle.of_slot == 0 && ticks(idle.of_turn) <= max.get().div_ceil(quota.tick().get()) && limit > 0
    };
    // Its wait shrinks as time goes on, so it fits when there is a slot whose wait has shrunk to the longest.
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

/// The most that a level can be: what would stand above it has no slot.
pub const fn above_the_highest(wanted: u64) -> u64 {
    wanted.saturating_sub(MOST_COUNTED)
}
