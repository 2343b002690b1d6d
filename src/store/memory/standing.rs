//! The eviction data of a counter in one 64-bit word. A full shard compares these words to choose the counter that it evicts.

use crate::model::Micros;

/// Resolution of the share of a limit in use: 8 parts, an even number, so that "more than half" is exact.
const PARTS: u64 = 8;
/// Bits of the idle time: 53. They hold microseconds until the year 2255 ([`Micros`]).
const IDLE_BITS: u32 = 53;
/// Bits of the second of the last refusal: 7, the rest of 64 bits beside the idle time and the 4 bits of the share.
const REFUSED_BITS: u32 = 7;
/// Period of the refusal clock in seconds: 127, since one of the 128 values of 7 bits means "never refused".
const ROUND_SECS: u64 = 127;
/// Age in seconds after which a sweep clears a refusal: 60. Sweeps are 10 s apart (`SWEEP_EVERY` in `app.rs`), so a refusal is
/// cleared before the refusal clock wraps and shows it as a new one.
const REMEMBERED_SECS: u64 = 60;
/// Maximum age, in whole seconds, at which a refused counter counts as fully used: 1. A counter that is refused at least once a
/// second is never older.
const RECENT_SECS: u64 = 1;

/// Time for which a recent refusal can keep an idle counter: up to two seconds, since ages are whole seconds.
const KEPT_US: u64 = (RECENT_SECS + 1) * 1_000_000;

const IDLE: u64 = (1 << IDLE_BITS) - 1;
const REFUSED: u64 = (1 << REFUSED_BITS) - 1;
const SHARE_SHIFT: u32 = IDLE_BITS + REFUSED_BITS;

/// Share of a limit in use, in eighths, rounded up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Share(u64);

/// Eviction data of a counter: the share of its limit in use after the last charge, the second of its last refusal, and the time
/// from which it is idle.
///
/// From the highest bit: 4 bits of share, 7 bits of second, 53 bits of time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Standing(u64);

/// Order in which counters are evicted, lowest first: idle counters without a recent refusal, then by the share in use, then by
/// the last refusal, then by the time from which they are idle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rank(u64);

impl Share {
    const FULL: Self = Self(PARTS);

    /// Returns the share in use of a limit that admits `capacity` hits at once, of which `remaining` are left.
    pub fn in_use(remaining: u32, capacity: u32) -> Self {
        let capacity = u64::from(capacity.max(1));
        let used = capacity.saturating_sub(remaining.into());
        Self((used * PARTS).div_ceil(capacity))
    }

    const fn is_more_than_half(self) -> bool {
        self.0 > PARTS / 2
    }
}

impl Standing {
    /// Creates the standing of a counter that was never refused.
    pub fn new(idle_at: Micros, share: Share) -> Self {
        Self::pack(share, 0, idle_at.get().min(IDLE))
    }

    /// Returns the standing after a charge or an undo. The last refusal stays.
    #[must_use]
    pub fn counting(self, idle_at: Micros, share: Share) -> Self {
        Self::pack(share, self.refused(), idle_at.get().min(IDLE))
    }

    /// Returns the standing after a refusal: fully used, whatever part of the limit is left.
    #[must_use]
    pub fn refusing(self, now: Micros) -> Self {
        Self::pack(Share::FULL, second(now) + 1, self.0 & IDLE)
    }

    /// Returns the standing without a refusal that is more than a minute old.
    #[must_use]
    pub fn without_old_refusal(self, now: Micros) -> Self {
        let is_old = self.refusal_age(now).is_some_and(|age| age > REMEMBERED_SECS);
        if is_old { Self::pack(self.share(), 0, self.0 & IDLE) } else { self }
    }

    /// Returns true if the loss of the counter changes nothing: it changes no verdict, and no refusal is recent. The next window
    /// of a client that continues too fast needs the recent refusal, and may begin with the very charge that makes room.
    pub fn is_forgettable(self, now: Micros) -> bool {
        // If the counter has been idle for longer, its refusal is old and only looks recent because the refusal clock has
        // wrapped.
        let is_kept = self.is_recently_refused(now) && now.get() < (self.0 & IDLE) + KEPT_US;
        self.is_idle(now) && !is_kept
    }

    /// Returns the position of the counter in the order of eviction.
    ///
    /// A counter whose window has just begun is little used although it was refused a moment ago. It counts as fully used, so
    /// that the counter of a client that continues too fast is not evicted at the beginning of each window.
    pub fn rank(self, now: Micros) -> Rank {
        if self.is_forgettable(now) {
            return Rank(self.0 & IDLE);
        }
        let Some(age) = self.refusal_age(now) else { return Rank(self.0) };
        let share = if self.is_recently_refused(now) { Share::FULL } else { self.share() };
        Rank(Self::pack(share, ROUND_SECS - age, self.0 & IDLE).0)
    }

    /// Returns true if the hits of the counter no longer count. A time that does not fit into 53 bits is never reached.
    pub fn is_idle(self, now: Micros) -> bool {
        let idle_at = self.0 & IDLE;
        idle_at <= now.get() && idle_at != IDLE
    }

    fn is_recently_refused(self, now: Micros) -> bool {
        self.refusal_age(now).is_some_and(|age| age <= RECENT_SECS)
    }

    /// Returns the whole seconds since the last refusal, modulo 127; `None` if the counter was never refused.
    fn refusal_age(self, now: Micros) -> Option<u64> {
        let refused = self.refused().checked_sub(1)?;
        Some((second(now) + ROUND_SECS - refused) % ROUND_SECS)
    }

    const fn pack(share: Share, refused: u64, idle_at: u64) -> Self {
        Self(share.0 << SHARE_SHIFT | refused << IDLE_BITS | idle_at)
    }

    const fn share(self) -> Share {
        Share(self.0 >> SHARE_SHIFT)
    }

    const fn refused(self) -> u64 {
        self.0 >> IDLE_BITS & REFUSED
    }
}

impl Rank {
    /// Returns true if more than half of the limit is in use.
    pub const fn is_more_than_half_used(self) -> bool {
        Standing(self.0).share().is_more_than_half()
    }
}

/// Returns the second of `now` on the refusal clock.
const fn second(now: Micros) -> u64 {
    now.get() / 1_000_000 % ROUND_SECS
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{IDLE, PARTS, ROUND_SECS, Share, Standing};
    use crate::model::Micros;

    const NOON: Micros = Micros::from_secs(1_795_262_400);

    fn after(secs: u64) -> Micros {
        NOON.saturating_add(Micros::from_secs(secs))
    }

    fn used(share: u64) -> Standing {
        Standing::new(after(3_600), Share(share))
    }

    #[test]
    fn a_share_is_more_than_half_from_the_first_hit_above_half_of_the_limit() {
        let is_more = |used: u32, capacity| Share::in_use(capacity - used, capacity).is_more_than_half();
        for capacity in (1..1_000).chain([u32::MAX - 1, u32::MAX]) {
            assert!(!is_more(0, capacity) && !is_more(capacity / 2, capacity), "{capacity}");
            assert!(is_more(capacity / 2 + 1, capacity) && is_more(capacity, capacity), "{capacity}");
        }
        assert_eq!(
            (Share::in_use(100, 100), Share::in_use(99, 100), Share::in_use(0, 100)),
            (Share(0), Share(1), Share(8))
        );
        assert_eq!(Share::in_use(0, 0), Share::FULL, "a limit of nothing");
        assert_eq!(Share::in_use(200, 100), Share(0), "more is left than the limit is now");
    }

    #[test]
    fn a_refused_counter_is_fully_used_for_the_second_after_and_keeps_its_place_before_older_refusals() {
        let refused = used(2).refusing(NOON);
        assert_eq!(refused.share(), Share::FULL);
        // A new window: one hit of a hundred.
        let begun = refused.counting(after(3_600), Share(1));
        assert!(begun.rank(after(1)).is_more_than_half_used());
        assert!(!begun.rank(after(2)).is_more_than_half_used());
        assert!(used(8).rank(after(1)) < begun.rank(after(1)), "as used, and never refused");
        assert!(refused.rank(after(50)) < used(2).refusing(after(40)).rank(after(50)));
        assert!(used(7).rank(NOON) < used(8).rank(NOON), "the share comes first");
    }

    #[test]
    fn a_refused_counter_whose_window_is_over_is_not_forgettable_for_the_second_after() {
        let refused = Standing::new(NOON, Share(8)).refusing(NOON);
        assert!(Standing::new(NOON, Share(8)).is_forgettable(NOON));
        assert!(!refused.is_forgettable(after(1)) && refused.rank(after(1)).is_more_than_half_used());
        assert!(refused.is_forgettable(after(2)) && refused.rank(after(2)) < used(1).rank(after(2)));
        assert!(refused.is_forgettable(after(ROUND_SECS)), "the clock of refusals has gone round");
    }

    #[test]
    fn a_refusal_is_cleared_before_its_clock_has_gone_round() {
        let refused = used(8).refusing(NOON);
        for secs in 0..=60 {
            assert_eq!(refused.without_old_refusal(after(secs)), refused, "{secs} s");
        }
        for secs in 61..ROUND_SECS {
            assert_eq!(refused.without_old_refusal(after(secs)), used(8), "{secs} s");
        }
        // If the clock steps back by less than 66 s, the refusal is in the future and looks old. It is cleared; the next one
        // replaces it.
        assert_eq!(refused.without_old_refusal(Micros::from_secs(1_795_262_395)), used(8));
    }

    #[test]
    fn a_time_beyond_the_year_2255_never_comes() {
        let never = Standing::new(Micros::new(u64::MAX), Share(3));
        assert!(!never.is_idle(Micros::new(u64::MAX)) && !never.is_idle(NOON));
        assert_eq!((never.share(), never.refused()), (Share(3), 0));
        assert!(Standing::new(Micros::new(IDLE - 1), Share(3)).is_idle(Micros::new(IDLE - 1)));
    }

    /// Generates a standing, and its share, age of the refusal and idle time.
    fn standing() -> impl Strategy<Value = (Standing, u64, Option<u64>, u64)> {
        let idle_at = prop_oneof![0..IDLE, NOON.get() - 2..NOON.get() + 2, Just(IDLE)];
        (0..=PARTS, prop::option::of(0..ROUND_SECS), idle_at).prop_map(|(share, age, idle_at)| {
            let refused = age.map(|age| (NOON.get() / 1_000_000 - age) % ROUND_SECS + 1);
            (Standing::pack(Share(share), refused.unwrap_or(0), idle_at), share, age, idle_at)
        })
    }

    proptest! {
        #[test]
        fn a_word_holds_its_three_parts((standing, share, age, idle_at) in standing()) {
            prop_assert_eq!(standing.share(), Share(share));
            prop_assert_eq!(standing.refusal_age(NOON), age);
            prop_assert_eq!(standing.is_idle(NOON), idle_at <= NOON.get());
            prop_assert_eq!(standing.counting(Micros::new(idle_at), Share(share)), standing);
            prop_assert_eq!(standing.refusing(NOON).counting(Micros::new(idle_at), Share(share)).refusal_age(NOON), Some(0));
        }

        #[test]
        fn counters_are_forgotten_by_idleness_then_share_then_refusal_then_time(one in standing(), other in standing()) {
            // The same order as a tuple: the smaller one is evicted first.
            let order = |(_, share, age, idle_at): (Standing, u64, Option<u64>, u64)| {
                let is_recent = age.is_some_and(|age| age <= 1);
                let place = (if is_recent { PARTS } else { share }, age.map(|age| ROUND_SECS - age));
                let is_needed = idle_at > NOON.get() || (is_recent && idle_at + 2_000_000 > NOON.get());
                (is_needed, is_needed.then_some(place), idle_at)
            };
            prop_assert_eq!(one.0.rank(NOON).cmp(&other.0.rank(NOON)), order(one).cmp(&order(other)));
            prop_assert_eq!(one.0.rank(NOON).is_more_than_half_used(), order(one).1.is_some_and(|place| place.0 > PARTS / 2));
        }
    }
}
