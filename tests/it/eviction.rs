//! What the embedded store forgets when it is full.

use std::sync::Arc;

use tidegate::algorithm::{Algorithm, Charge, Limit};
use tidegate::model::{Charging, Clock, Hits, Quota, Unit, Verdict, Window};
use tidegate::store::memory::Memory;

use crate::histories;
use crate::world::{HandClock, NOON};

/// Counters that the store holds.
const ROOM: usize = 65_536;
/// Counters that are fully used from the beginning, where half of the store is: a little less than half of it.
const USED: u32 = 32_000;
/// Seconds of a long attack. The windows of the victims begin anew ten times meanwhile.
const LONG: u32 = 600;
/// Seconds of a short one, for what takes long to choose: two windows.
const SHORT: u32 = 120;
/// Charges of a victim in a second. The limit of a minute leaves at least three of them to be refused in its first second.
const HITS: u32 = 8;
/// Counters that are made up after each of them: in a long attack 2.16 million, the store's room 33 times over.
const MADE_UP: u32 = 450;
/// Victims of each algorithm.
const VICTIMS: u32 = 4;

/// A store under attack, and one that has room for every counter, with the same clock.
struct Attack {
    clock: Arc<HandClock>,
    full: Memory,
    roomy: Memory,
    made_up: u32,
}

/// Of a counter that is made up: its limit per day, and how many charges of one hit it is sent.
#[derive(Clone, Copy, Debug)]
struct MadeUp {
    limit: u32,
    charges: usize,
}

impl Attack {
    fn new() -> Self {
        let clock = HandClock::at(NOON);
        let store = |room| Memory::new(Arc::clone(&clock) as Arc<dyn Clock>, room);
        Self { full: store(ROOM), roomy: store(10_000_000), clock, made_up: 0 }
    }

    /// Uses up the limits of [`USED`] counters.
    fn use_half(&self) {
        for number in 0..USED {
            self.full.charge_now(&[used(number, Hits::take(2))]);
        }
    }

    /// Fills the store with counters that have never been seen before.
    fn flood(&mut self, made_up: MadeUp) {
        for _ in 0..MADE_UP {
            self.made_up += 1;
            let charge = charge(&format!("made up {}", self.made_up), per(Unit::Day, made_up.limit), 1);
            for _ in 0..made_up.charges {
                self.full.charge_now(std::slice::from_ref(&charge));
            }
        }
    }

    /// Sends every victim a hit. The answers must be those of a store that has forgotten nothing.
    fn charge(&self, victims: &[Vec<Charge>]) {
        for victim in victims {
            let [told, expected] = [&self.full, &self.roomy].map(|store| -> Verdict { store.charge_now(victim)[0] });
            let Charge { limit, charging, .. } = &victim[0];
            let after = self.clock.now().saturating_sub(NOON);
            assert_eq!(told, expected, "after {after}, {:?}, {charging:?}", limit.algorithm());
        }
    }

    /// Charges the victims again and again while counters are made up. Nothing that the store forgets changes an answer to them.
    fn run(&mut self, made_up: MadeUp, seconds: u32) {
        let victims = victims();
        for _ in 0..seconds * HITS {
            self.charge(&victims);
            self.flood(made_up);
            self.clock.advance("125ms");
        }
        self.assert_full();
    }

    fn assert_full(&self) {
        assert!(self.full.counters() <= ROOM);
        let forgotten = self.full.evicted();
        assert!(forgotten + ROOM as u64 > self.made_up.into(), "{forgotten} of {} were forgotten", self.made_up);
    }
}

/// Victims of each algorithm that are charged on their own, and as many that share a request with a wide tier, which spends
/// nothing where the victim refuses.
fn victims() -> Vec<Vec<Charge>> {
    let victim = |(number, (name, algorithm))| {
        let limit = Limit::new(algorithm, Quota::new(5, Window::of_unit(Unit::Minute))).expect("it can be counted");
        let own =
            |charging| histories::charge(&format!("{name} {number} {charging:?}"), limit, charging, Hits::take(1));
        let wide = Charge {
            descriptor: 1,
            charging: Charging::AllOrNothing,
            ..charge(&format!("wide {name}"), per(Unit::Day, 1_000_000), 1)
        };
        [vec![own(Charging::Each)], vec![own(Charging::AllOrNothing), wide]]
    };
    (0..VICTIMS).flat_map(|number| Algorithm::ALL.map(|row| (number, row))).flat_map(victim).collect()
}

fn per(unit: Unit, hits: u32) -> Limit {
    Limit::new(Algorithm::FixedWindow, Quota::new(hits, Window::of_unit(unit))).expect("it can be counted")
}

fn charge(name: &str, limit: Limit, hits: u64) -> Charge {
    histories::charge(name, limit, Charging::Each, Hits::take(hits))
}

fn used(number: u32, hits: Hits) -> Charge {
    histories::charge(&format!("used {number}"), per(Unit::Day, 2), Charging::Each, hits)
}

#[test]
fn made_up_counters_get_no_refused_counter_forgotten_while_half_of_the_store_is_little_used() {
    let mut attack = Attack::new();
    attack.use_half();
    attack.run(MadeUp { limit: 100, charges: 1 }, LONG);
}

/// Half of the limit is not more than half of it, and the counters of victims whose window has just begun are less used.
#[test]
fn made_up_counters_that_are_half_used_get_no_refused_counter_forgotten() {
    Attack::new().run(MadeUp { limit: 2, charges: 1 }, LONG);
}

/// The second charge of a counter that is made up is refused too, but in a second a twentieth of the store is.
#[test]
fn where_every_counter_is_fully_used_the_last_refused_stay() {
    for charges in [1, 2] {
        Attack::new().run(MadeUp { limit: 1, charges }, SHORT);
    }
}

/// Each of the 32,000 could be the one that is forgotten. With a sample of eight, nearly all of them are.
#[test]
fn none_of_thousands_of_used_counters_is_forgotten_while_others_are_little_used() {
    let mut attack = Attack::new();
    attack.use_half();
    for _ in 0..LONG * HITS {
        attack.flood(MadeUp { limit: 100, charges: 1 });
    }
    attack.assert_full();
    let forgotten = (0..USED).filter(|&number| attack.full.charge_now(&[used(number, Hits::LOOK)])[0].remaining > 0);
    assert_eq!(forgotten.count(), 0);
}

/// A counter that is left with one hit of a hundred is no more used than those that are made up, whether its hits were given back
/// or undone.
#[test]
fn what_is_given_back_lowers_the_share_in_use() {
    let mut attack = Attack::new();
    attack.use_half();
    let hundred =
        |number: u32, charging, hits| histories::charge(&format!("{number}"), per(Unit::Day, 100), charging, hits);
    for number in 0..1_000 {
        attack.full.charge_now(&[hundred(number, Charging::Each, Hits::take(1))]);
        if number % 2 == 0 {
            attack.full.charge_now(&[hundred(number, Charging::Each, Hits::take(99))]);
            attack.full.charge_now(&[hundred(number, Charging::Each, Hits::give_back(99))]);
        } else {
            let charges = [hundred(number, Charging::AllOrNothing, Hits::take(99))];
            let (_, taken) = attack.full.take_now(&charges);
            attack.full.give_back_now(&charges, &taken);
        }
    }
    for _ in 0..SHORT * HITS {
        attack.flood(MadeUp { limit: 100, charges: 1 });
    }
    let left = |number| attack.full.charge_now(&[hundred(number, Charging::Each, Hits::LOOK)])[0].remaining;
    let kept = (0..1_000).filter(|&number| left(number) < 100).count();
    assert!(kept < 100, "{kept} of 1,000 counters of which nearly all was given back are still there");
}
