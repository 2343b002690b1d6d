//! What becomes of a counter when its rule changes, and of refusals that are counted.

use proptest::prelude::*;
use tidegate::algorithm::{Algorithm, Limit};
use tidegate::model::{Charging, Hits, Unit, Window};

use super::stores::Store;
use super::{CASES, hold, taking, used};
use crate::histories::{charging, hits_per_window, limit, moment, window};
use crate::world::NOON;

fn of(algorithm: Algorithm, hits: u32, unit: Unit) -> Limit {
    limit(algorithm, Window::of_unit(unit), hits, 1_000)
}

pub fn a_changed_limit_keeps_the_hits_already_used(store: &Store) {
    for (name, algorithm) in Algorithm::ALL {
        let counters = store.counters();
        let under = |most, hits| {
            let limit = of(algorithm, most, Unit::Hour);
            counters.charge(limit, Charging::AllOrNothing, NOON, Hits::take(hits))
        };
        assert_eq!(under(100, 80).remaining, 20, "{name}");
        assert_eq!(under(200, 0).remaining, 120, "{name}: raised");
        let lowered = under(50, 1);
        assert!(lowered.is_refused && lowered.remaining == 0, "{name}: lowered, {lowered:?}");
        assert!(under(200, 121).is_refused, "{name}: one more than is left");
        assert!(!under(200, 120).is_refused, "{name}: as many as are left");
    }
}

/// At the moment of a charge: afterwards a meter drains by the limit that holds.
pub fn what_is_left_under_another_limit_is_that_limit_less_what_was_used(store: &Store) {
    let examples = |algorithm| {
        let limits = (Just(algorithm), window(), hits_per_window(), hits_per_window());
        (limits, charging(), moment(), taking(), 0_u32..1_000)
    };
    hold(store, CASES, examples, |((algorithm, window, most, other), charging, begin, events, share)| {
        let limit = |hits| limit(algorithm, window, hits, 1_000);
        let (most, other) = (limit(most), limit(other));
        // A refused hit that is counted would be used and yet not missing from what is left.
        let (counters, now) = used(store, most, Charging::AllOrNothing, begin, &events);
        let charge = |limit, hits| counters.charge(limit, Charging::AllOrNothing, now, Hits::take(hits));
        let left = u64::from(charge(most, 0).remaining);
        prop_assume!(left > 0);
        let left = charge(most, 1 + (left - 1) * u64::from(share) / 1_000).remaining;
        let used = most.quota().limit() - left;
        let left = other.quota().limit().saturating_sub(used);
        prop_assert_eq!(counters.charge(other, charging, now, Hits::LOOK).remaining, left, "{} are used", used);
        prop_assert!(charge(other, u64::from(left) + 1).is_refused);
        prop_assert!(left == 0 || !charge(other, left.into()).is_refused);
        Ok(())
    });
}

pub fn a_changed_algorithm_or_window_starts_a_new_counter(store: &Store) {
    let counters = store.counters();
    let all = Algorithm::ALL.map(|(_, algorithm)| algorithm);
    let all = all.map(|algorithm| [Unit::Minute, Unit::Hour, Unit::Day].map(|unit| of(algorithm, 100, unit)));
    for (index, &limit) in all.as_flattened().iter().enumerate() {
        let charge = |hits| counters.charge(limit, Charging::AllOrNothing, NOON, Hits::take(hits));
        assert_eq!(charge(0).remaining, 100, "{limit:?}: nobody has used it");
        assert_eq!(charge(u64::try_from(index).expect("it is small") + 1).remaining, 99 - small(index), "{limit:?}");
    }
    for (index, &limit) in all.as_flattened().iter().enumerate() {
        let look = counters.charge(limit, Charging::AllOrNothing, NOON, Hits::LOOK);
        assert_eq!(look.remaining, 99 - small(index), "{limit:?}: what the others used is not its");
    }
}

fn small(number: usize) -> u32 {
    u32::try_from(number).expect("it is small")
}

/// Under `count_refused`, and in a fixed window where each limit is charged on its own: the only refusals that spend.
pub fn a_refused_charge_that_is_counted_stays(store: &Store) {
    for (name, algorithm) in Algorithm::ALL {
        for (_, charging) in Charging::ALL {
            let plain = of(algorithm, 10, Unit::Hour);
            let each_window = algorithm == Algorithm::FixedWindow && charging == Charging::Each;
            for (limit, stays) in [(plain, each_window), (plain.counting_refused(), true)] {
                let counters = store.counters();
                let charge = |hits| counters.charge(limit, charging, NOON, hits);
                assert_eq!(charge(Hits::take(8)).remaining, 2, "{name}, {charging:?}");
                assert!(charge(Hits::take(5)).is_refused, "{name}, {charging:?}");
                let left = if stays { 0 } else { 2 };
                assert_eq!(charge(Hits::LOOK).remaining, left, "{name}, {charging:?}, {limit:?}");
                // 13 less 4, or 8 less 4.
                let left = if stays { 1 } else { 6 };
                assert_eq!(charge(Hits::give_back(4)).remaining, left, "{name}, {charging:?}, {limit:?}");
            }
        }
    }
}
