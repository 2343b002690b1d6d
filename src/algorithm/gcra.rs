//! Counts hits with the generic cell rate algorithm: evenly spaced, with a burst ahead of time.
//! From ITU-T I.371; reports the values that redis-cell reports (limit, remaining, retry after, reset after).
//! Remembers the state of `meter`: 20 bytes.
//! Exact to the tick: in any interval at most the burst plus the limit's share of the ticks that begin in it.
//! Choose `fixed_window` for quotas that restart with the hour or the day.

use super::meter::{Ahead, Meter, SlotDelay, above_the_highest};

/// Evenly spaced hits. In whole ticks, the theoretical arrival time of the next hit is the level of a [`Meter`].
pub type Gcra = Meter<Arrivals>;

/// A charge waits until the burst has room for it. After their waits, hits pass at the times at which they would have been
/// admitted without a delay. The level may exceed the burst, as far as the longest wait allows.
pub struct Arrivals;

impl SlotDelay for Arrivals {
    const ARE_THERE: bool = true;

    fn ahead(_: u64, wanted: u64, room: u64) -> Ahead {
        Ahead { of_turn: wanted.saturating_sub(room), of_slot: above_the_highest(wanted) }
    }
}

#[cfg(test)]
mod tests {
    use crate::algorithm::{Algorithm, Limit, State};
    use crate::model::{Charging, Delay, Hits, Micros, Quota, Unit, Verdict, Window};

    const NOON: Micros = Micros::from_secs(1_795_262_400);

    fn five_per_second(burst: u32, max: Micros) -> Limit {
        let quota = Quota::new(5, Window::of_unit(Unit::Second)).with_burst(burst);
        let limit = Limit::new(Algorithm::Gcra, quota).expect("it can be counted");
        limit.delaying(Delay::Slot { max }).expect("it has slots")
    }

    fn charge(limit: Limit, state: &mut State, now: Micros, hits: u64) -> Verdict {
        limit.charge(state, now, Hits::take(hits), Charging::Each).0
    }

    #[test]
    fn sixteen_hits_at_once_get_eleven_slots_a_fifth_of_a_second_apart() {
        let limit = five_per_second(1, Micros::from_secs(2));
        let mut state = limit.fresh();
        for slot in 0..11 {
            let told = charge(limit, &mut state, NOON, 1);
            assert!(!told.outcome.is_refused());
            assert_eq!((told.delay, told.retry), (Micros::from_millis(200 * slot), None));
            assert_eq!((told.remaining, told.reset), (0, Micros::from_millis(200 * (slot + 1))));
        }
        let full = state.clone();
        for _ in 0..5 {
            let told = charge(limit, &mut state, NOON, 1);
            assert!(told.outcome.is_refused());
            assert_eq!((told.delay, told.retry), (Micros::ZERO, Some(Micros::from_millis(200))));
        }
        assert_eq!(state, full, "a refused charge spends nothing");
        let promised = NOON.saturating_add(Micros::from_millis(200));
        assert!(charge(limit, &mut state, promised.saturating_sub(Micros::new(1)), 1).outcome.is_refused());
        assert_eq!(charge(limit, &mut state, promised, 1).delay, Micros::from_secs(2));
    }

    #[test]
    fn more_hits_than_the_burst_have_a_slot_when_the_wait_for_them_is_no_longer_than_the_longest() {
        let limit = five_per_second(1, Micros::from_secs(2));
        let told = |hits| limit.verdict(None, NOON, Hits::take(hits));
        assert_eq!(told(11).delay, Micros::from_secs(2));
        assert!(told(12).outcome.is_refused());
        assert_eq!(told(12).retry, None, "it never fits");
        let mut state = limit.fresh();
        charge(limit, &mut state, NOON, 2);
        let told = charge(limit, &mut state, NOON, 11);
        assert!(told.outcome.is_refused());
        assert_eq!(told.retry, Some(Micros::from_millis(400)), "when the counter is idle");
    }

    #[test]
    fn hits_that_fit_at_the_end_of_a_tick_only_are_promised_that() {
        // A hit is two ticks of 100 us.
        let quota = Quota::new(300_000, Window::of_unit(Unit::Minute)).with_burst(1);
        let limit = Limit::new(Algorithm::Gcra, quota).expect("it can be counted");
        let limit = limit.delaying(Delay::Slot { max: Micros::new(150) }).expect("it has slots");
        let told = |after| limit.verdict(None, NOON.saturating_add(Micros::new(after)), Hits::take(2));
        assert_eq!((told(0).outcome.is_refused(), told(0).retry), (true, Some(Micros::new(50))));
        assert_eq!([told(50), told(99)].map(|told| told.delay.get()), [150, 101]);
    }

    #[test]
    fn a_look_tells_how_long_the_next_waits_at_least_and_what_is_given_back_waits_for_nothing() {
        let limit = five_per_second(1, Micros::from_secs(2));
        let mut state = limit.fresh();
        charge(limit, &mut state, NOON, 4);
        let before = state.clone();
        assert_eq!(charge(limit, &mut state, NOON, 0).delay, Micros::from_millis(600));
        assert_eq!(state, before);
        let told = limit.charge(&mut state, NOON, Hits::give_back(1), Charging::Each).0;
        assert_eq!((told.outcome.is_refused(), told.delay), (false, Micros::ZERO));
        assert_eq!(charge(limit, &mut state, NOON, 0).delay, Micros::from_millis(400));
    }

    #[test]
    fn there_is_no_slot_above_the_highest_level_however_fast_it_drains() {
        // A level of 2^52 drains within two seconds, and the longest wait is 300 s.
        let quota = Quota::new(u32::MAX, Window::of_unit(Unit::Second));
        let limit = Limit::new(Algorithm::Gcra, quota).expect("it can be counted");
        let limit = limit.delaying(Delay::Slot { max: Delay::LONGEST }).expect("it has slots");
        let mut state = limit.fresh();
        assert!(!charge(limit, &mut state, NOON, u32::MAX.into()).outcome.is_refused());
        let told = charge(limit, &mut state, NOON, u32::MAX.into());
        assert!(told.outcome.is_refused());
        let promised = NOON.saturating_add(told.retry.expect("it fits later"));
        assert!(
            charge(limit, &mut state, promised.saturating_sub(Micros::new(1)), u32::MAX.into()).outcome.is_refused()
        );
        assert!(!charge(limit, &mut state, promised, u32::MAX.into()).outcome.is_refused());
    }
}
