//! Counts a queue: a bucket that holds `burst` hits and leaks evenly, `limit` per window. Hits that do not fit are refused.
//! From Turner, "New directions in communications (or which way to the information age?)", 1986.
//! Remembers the state of `meter`, the hits that have not leaked yet: 20 bytes.
//! Exact to the tick: in any interval at most the burst plus the limit's share of the ticks that begin in it.
//! Choose `sliding_window` if no window may have more than the limit, even when a bucket fills at once.

use super::meter::{Ahead, Meter, SlotDelay};

/// A leaky bucket. The level of a [`Meter`] is its content.
pub type LeakyBucket = Meter<BucketQueue>;

/// A charge waits until the hits before it in the bucket have leaked, so that hits pass evenly spaced. Hits that do not fit into
/// the bucket are refused.
pub struct BucketQueue;

impl SlotDelay for BucketQueue {
    const ARE_THERE: bool = true;

    fn ahead(level: u64, wanted: u64, room: u64) -> Ahead {
        Ahead { of_turn: level, of_slot: wanted.saturating_sub(room) }
    }
}

#[cfg(test)]
mod tests {
    use crate::algorithm::{Algorithm, Limit};
    use crate::model::{Charging, Delay, Hits, Micros, Quota, Unit, Window};

    const NOON: Micros = Micros::from_secs(1_795_262_400);

    fn five_per_second(burst: u32, max: Micros) -> Limit {
        let quota = Quota::new(5, Window::of_unit(Unit::Second)).with_burst(burst);
        let limit = Limit::new(Algorithm::LeakyBucket, quota).expect("it can be counted");
        limit.delaying(Delay::Slot { max }).expect("it has slots")
    }

    #[test]
    fn a_bucket_of_eleven_lets_its_hits_out_a_fifth_of_a_second_apart() {
        // First case: the bucket and the longest wait end at the same hit. Second: the bucket ends first. Others: the longest
        // wait does.
        for (burst, max, slots, retry) in
            [(11, 2_000, 11, 200), (11, 3_000, 11, 200), (100, 2_000, 11, 200), (100, 1_000, 6, 200)]
        {
            let limit = five_per_second(burst, Micros::from_millis(max));
            let mut state = limit.fresh();
            let mut charge = |hits| limit.charge(&mut state, NOON, Hits::take(hits), Charging::Each).0;
            for slot in 0..slots {
                let told = charge(1);
                assert!(!told.outcome.is_refused());
                assert_eq!(told.delay, Micros::from_millis(200 * slot));
            }
            for _ in 0..2 {
                let told = charge(1);
                assert!(told.outcome.is_refused(), "{burst} {max}");
                assert_eq!((told.delay, told.retry), (Micros::ZERO, Some(Micros::from_millis(retry))));
            }
            assert_eq!(charge(u64::from(burst) + 1).retry, None, "it never fits");
        }
    }

    #[test]
    fn who_is_refused_is_told_the_later_of_the_moments_at_which_it_fits_and_its_wait_is_short_enough() {
        let limit = five_per_second(10, Micros::from_millis(1_500));
        let mut state = limit.fresh();
        let mut charge = |hits| limit.charge(&mut state, NOON, Hits::take(hits), Charging::Each).0;
        assert!(!charge(8).outcome.is_refused());
        // One hit fits at once, but would wait 1.6 s. Four hits fit when two have leaked.
        assert_eq!([charge(1), charge(4)].map(|told| told.retry), [100, 400].map(|ms| Some(Micros::from_millis(ms))));
    }
}
