//! What an instance knows of counters in the store: it refuses without asking what the store would refuse, and charges later what
//! it decided alone.

use std::future::{Future, ready};
use std::num::NonZeroU32;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use proptest::prelude::*;
use tidegate::algorithm::{Algorithm, Charge, Limit, State};
use tidegate::model::{
    Charging, Clock, Delay, FailurePolicy, Hits, Micros, Outcome, Provenance, Role, StorePolicies, Verdict,
};
use tidegate::store::deadline::Deadline;
use tidegate::store::guard::Guard;
use tidegate::store::known::Known;
use tidegate::store::memory::Memory;
use tidegate::store::replicas::Replicas;
use tidegate::store::{ChargeResults, Charged, Store, StoreError};

use crate::histories::{
    Amount, Pause, Waiting, algorithm, burst, charge, charging, hits_per_window, limit, per_minute, slot, window,
};
use crate::world::{HandClock, NOON, futures};

/// The time for which a refusal is believed.
const BELIEVED: u64 = 1_000_000;

/// A store that counts every counter by itself, and is too busy when it is told so.
struct Counting {
    clock: Arc<HandClock>,
    counters: Mutex<Vec<(String, State)>>,
    calls: Mutex<usize>,
    error: Mutex<Option<StoreError>>,
}

impl Counting {
    fn new(clock: &Arc<HandClock>) -> Arc<Self> {
        Arc::new(Self {
            clock: Arc::clone(clock),
            counters: Mutex::default(),
            calls: Mutex::default(),
            error: Mutex::default(),
        })
    }

    fn with<T>(&self, charge: &Charge, on: impl FnOnce(&mut State) -> T) -> T {
        let (name, mut counters) = (charge.key.to_string(), self.counters.lock());
        let place = counters.iter().position(|(known, _)| *known == name).unwrap_or_else(|| {
            counters.push((name, charge.limit.fresh()));
            counters.len() - 1
        });
        on(&mut counters[place].1)
    }

    /// Decides without charging.
    fn look(&self, charge: &Charge) -> Verdict {
        let Charge { limit, hits, charging, .. } = charge;
        self.with(charge, |state| limit.charge(&mut state.clone(), self.clock.now(), *hits, *charging).0)
    }

    fn remaining(&self, charge: &Charge) -> u32 {
        self.look(&Charge { hits: Hits::LOOK, ..charge.clone() }).remaining
    }

    fn charge_now(&self, charge: &Charge) -> Verdict {
        let Charge { limit, hits, charging, .. } = charge;
        self.with(charge, |state| limit.charge(state, self.clock.now(), *hits, *charging).0)
    }
}

impl Store for Counting {
    fn charge<'a>(&'a self, charges: &'a [Charge], _: Duration) -> Pin<Box<dyn Future<Output = Charged> + Send + 'a>> {
        *self.calls.lock() += 1;
        let error = *self.error.lock();
        let answer = |charge| error.map_or_else(|| Ok(self.charge_now(charge)), Err);
        let answers: ChargeResults = charges.iter().map(answer).collect();
        Box::pin(ready(Charged::answered(answers)))
    }

    fn give_back<'a>(
        &'a self,
        _: &'a [Charge],
        _: &'a [Option<Micros>],
    ) -> Pin<Box<dyn Future<Output = ()> + Send + 'a>> {
        Box::pin(ready(()))
    }

    fn settle<'a>(
        &'a self,
        charges: &'a [Charge],
        _: Duration,
    ) -> Pin<Box<dyn Future<Output = Vec<bool>> + Send + 'a>> {
        let is_settled = self.error.lock().is_none();
        for charge in charges.iter().filter(|_| is_settled) {
            let (hits, remaining) = (charge.hits.taken(), self.remaining(charge));
            let hits = match charge.charging {
                Charging::AllOrNothing | Charging::Group(_) => hits.min(remaining.into()),
                Charging::Each => {
                    if remaining == 0 {
                        hits
                    } else {
                        0
                    }
                }
            };
            self.charge_now(&Charge { hits: Hits::take(hits), ..charge.clone() });
        }
        Box::pin(ready(vec![is_settled; charges.len()]))
    }
}

/// One instance in front of a store that instances share.
fn instance(store: &Arc<Counting>, replicas: u32) -> Arc<Guard> {
    let clock: Arc<dyn Clock> = Arc::clone(&store.clock) as _;
    let local = Arc::new(Memory::new(Arc::clone(&clock), 1_000));
    let replicas = Arc::new(Replicas::set(NonZeroU32::new(replicas).expect("at least one")));
    Arc::new(Guard::new(Arc::clone(store) as _, Deadline::Auto, local, replicas, clock))
}

fn ask(guard: &Guard, charge: &Charge) -> Verdict {
    futures(guard.charge(std::slice::from_ref(charge), None))[0]
}

#[derive(Clone, Copy, Debug)]
struct Event {
    instance: usize,
    after: Pause,
    amount: Amount,
    turn: usize,
    is_reset: bool,
}

fn event() -> impl Strategy<Value = Event> {
    let after = prop_oneof![
        4 => Just(Pause::None),
        4 => (0_u32..1_500_000).prop_map(Pause::Micros),
        2 => (-1_i8..=1).prop_map(Pause::Edge),
        2 => (0_u16..1_100).prop_map(Pause::Share),
        1 => (0_u16..500).prop_map(Pause::Back),
        2 => (0_u8..3, -1_i8..=1).prop_map(|(hits, off)| Pause::Hits(hits, off)),
    ];
    let amount = prop_oneof![
        6 => (1_u64..4).prop_map(Amount::Take),
        3 => (-1_i8..=1).prop_map(Amount::Limit),
        1 => Just(Amount::Look),
        1 => (0_u16..1_500).prop_map(Amount::Share),
        1 => (1_u64..3).prop_map(Amount::GiveBack),
    ];
    let is_reset = prop_oneof![19 => Just(false), 1 => Just(true)];
    (0..2_usize, after, amount, 0..2_usize, is_reset).prop_map(|(instance, after, amount, turn, is_reset)| Event {
        instance,
        after,
        amount,
        turn,
        is_reset,
    })
}

#[derive(Debug)]
struct Scene {
    limits: Vec<Limit>,
    charging: Charging,
    events: Vec<Event>,
}

fn scene() -> impl Strategy<Value = Scene> {
    let waiting = prop_oneof![3 => Just(Waiting::None), 1 => slot()];
    let counts = prop_oneof![4 => Just(false), 1 => Just(true)];
    let of_limits = (algorithm(), window(), prop::collection::vec(hits_per_window(), 1..3), burst(), waiting, counts);
    (of_limits, charging(), prop::collection::vec(event(), 1..60)).prop_map(
        |((algorithm, window, hits, burst, waiting, counts), charging, events)| {
            let limit = |hits| {
                let limit = waiting.on(limit(algorithm, window, hits, burst));
                if counts { limit.counting_refused() } else { limit }
            };
            let limits: Vec<Limit> = hits.into_iter().map(limit).collect();
            Scene { limits, charging, events }
        },
    )
}

proptest! {
    #[test]
    fn a_known_refusal_is_what_the_store_would_answer(scene in scene()) {
        let Scene { limits, charging, events } = scene;
        let clock = HandClock::at(NOON);
        let store = Counting::new(&clock);
        let instances = [instance(&store, 2), instance(&store, 2)];
        // When hits were last given back or forgotten, where the instance could not know.
        let mut changed = [Micros::ZERO; 2];
        let mut is_stepped_back = false;
        for Event { instance, after, amount, turn, is_reset } in events {
            let limit = limits[turn % limits.len()];
            let now = after.from(clock.now(), &limit);
            is_stepped_back |= now < clock.now();
            clock.set(now);
            if is_reset {
                store.counters.lock().clear();
                changed = [now; 2];
                continue;
            }
            let charge = charge("one", limit, charging, amount.of(&limit));
            if charge.hits.given_back() > 0 || limits.len() > 1 {
                changed[1 - instance] = now;
            }
            let (expected, calls) = (store.look(&charge), *store.calls.lock());
            let told = ask(&instances[instance], &charge);
            if *store.calls.lock() > calls {
                prop_assert_eq!(told, expected);
                continue;
            }
            prop_assert_eq!((told.outcome, told.provenance), (Outcome::Refused, Provenance::Known));
            prop_assert!(!limit.records_every_charge(), "each of its refusals is counted");
            // An answer may be a second old.
            if is_stepped_back || now.get() <= changed[instance].get() + BELIEVED {
                continue;
            }
            prop_assert_eq!(expected.outcome, Outcome::Refused);
            prop_assert_eq!(told.retry.is_some(), expected.retry.is_some());
            prop_assert!(told.retry <= expected.retry, "{:?} is no longer than {:?}", told.retry, expected.retry);
        }
    }
}

#[test]
fn a_refused_counter_is_asked_about_once_a_second_and_a_raised_limit_at_once() {
    for (name, algorithm) in Algorithm::ALL {
        let clock = HandClock::at(NOON);
        let store = Counting::new(&clock);
        let guard = instance(&store, 1);
        let one = |limit| charge("one", limit, Charging::AllOrNothing, Hits::take(1));
        let limit = per_minute(algorithm, 2);
        let outcomes: Vec<_> = (0..1_000).map(|_| ask(&guard, &one(limit)).outcome).collect();
        assert_eq!(outcomes.iter().filter(|outcome| outcome.is_refused()).count(), 998, "{name}");
        assert_eq!(*store.calls.lock(), 3, "{name}: two are admitted, and one is refused by the store");
        clock.advance("999ms");
        assert_eq!((ask(&guard, &one(limit)).provenance, *store.calls.lock()), (Provenance::Known, 3), "{name}");
        clock.advance("1ms");
        assert_eq!((ask(&guard, &one(limit)).provenance, *store.calls.lock()), (Provenance::Store, 4), "{name}");
        let raised = ask(&guard, &one(per_minute(algorithm, 3)));
        assert_eq!((raised.outcome, raised.provenance), (Outcome::Admitted, Provenance::Store), "{name}");
        let silent = Charge { remembers_refusals: false, ..one(limit) };
        assert_eq!(ask(&guard, &silent).provenance, Provenance::Store, "{name}: the rule turns it off");
    }
}

#[test]
fn more_hits_than_the_limit_are_told_when_there_is_a_slot_for_them() {
    let clock = HandClock::at(NOON);
    let store = Counting::new(&clock);
    let guard = instance(&store, 1);
    let waiting = Delay::Slot { max: Micros::from_secs(30) };
    let limit = per_minute(Algorithm::Gcra, 10).delaying(waiting).expect("it has slots");
    let ask = |hits| ask(&guard, &charge("one", limit, Charging::Each, Hits::take(hits)));
    assert_eq!(ask(15).outcome, Outcome::Admitted, "it waits for 30 s");
    assert_eq!(ask(1).outcome, Outcome::Refused);
    for (hits, fits_ever) in [(10, true), (11, true), (15, true), (16, false)] {
        let told = ask(hits);
        assert_eq!((told.provenance, told.retry.is_some()), (Provenance::Known, fits_ever), "{hits} hits");
    }
}

#[test]
fn one_call_asks_about_an_old_refusal_and_the_others_are_refused_meanwhile() {
    let clock = HandClock::at(NOON);
    let store = Counting::new(&clock);
    let guard = instance(&store, 1);
    let one = charge("one", per_minute(Algorithm::FixedWindow, 1), Charging::Each, Hits::take(1));
    (0..2).for_each(|_| assert_ne!(ask(&guard, &one).outcome, Outcome::Failed));
    *store.error.lock() = Some(StoreError::Late);
    clock.advance("1s");
    for expected in [3, 3, 3] {
        assert!(ask(&guard, &one).outcome.is_refused(), "a refusal lasts while the store is too busy to be asked");
        assert_eq!(*store.calls.lock(), expected);
    }
    assert_eq!(
        guard.known().map(Known::refused),
        Some(3),
        "each of them is counted, whether the store was asked or not"
    );
    clock.advance("100ms");
    assert!(ask(&guard, &one).outcome.is_refused());
    assert_eq!(*store.calls.lock(), 4, "the next call asks");
    clock.advance("1m");
    assert_eq!(ask(&guard, &one).provenance, Provenance::Local, "in the next window nothing is known");
}

#[test]
fn a_known_refusal_of_one_tier_spares_the_others_and_leaves_what_is_kept() {
    let clock = HandClock::at(NOON);
    let store = Counting::new(&clock);
    let guard = instance(&store, 1);
    let tier = |name, hits, limit| charge(name, limit, Charging::AllOrNothing, Hits::take(hits));
    let (small, large) = (per_minute(Algorithm::Gcra, 1), per_minute(Algorithm::Gcra, 100));
    let request = [tier("user", 1, small), tier("all", 1, large), tier("watched", 1, large.counting_refused())];
    let request = [0, 1, 2].map(|descriptor| Charge { descriptor, ..request[descriptor].clone() });
    let decide = || futures(guard.charge(&request, None));
    // This store charges each by itself, so the second request is refused and leaves 98 for all.
    (0..2).for_each(|_| drop(decide()));
    let left = || [1, 2].map(|tier| store.remaining(&request[tier]));
    assert_eq!(left(), [98, 98]);
    let verdicts = decide();
    let by = [Provenance::Known, Provenance::Known, Provenance::Store];
    assert_eq!(
        [0, 1, 2].map(|tier| (verdicts[tier].provenance, verdicts[tier].outcome.is_refused())),
        [(by[0], true), (by[1], false), (by[2], false)]
    );
    assert_eq!(verdicts[1].remaining, 98, "as the store said last");
    assert_eq!(left(), [98, 97], "what is counted although the request is refused is charged");
    let other = [request[0].clone(), Charge { hits: Hits::take(2), ..request[1].clone() }];
    let verdicts = futures(guard.charge(&other, None));
    assert_eq!(verdicts[1], Verdict::uncounted(Outcome::Admitted, Provenance::Spared), "nothing is known of two hits");
    let closed = [request[0].clone(), Charge { limit: per_minute(Algorithm::Gcra, 0), ..request[1].clone() }];
    let verdict = futures(guard.charge(&closed, None))[1];
    assert_eq!((verdict.outcome, verdict.remaining), (Outcome::Refused, 0), "a limit of 0 refuses without the store");
    // A quota or a shadow decides nothing alone, so all are asked.
    for role in [Role::Quota, Role::Shadow] {
        let request = [Charge { role, ..request[0].clone() }, request[1].clone()];
        assert_eq!(futures(guard.charge(&request, None))[1].provenance, Provenance::Store, "{role:?}");
    }
}

/// Runs the task that charges later, for so long.
async fn settle(guard: &Guard, length: Duration) {
    let _ = tokio::time::timeout(length, guard.settle()).await;
}

#[tokio::test(start_paused = true)]
async fn refused_hits_that_a_fixed_window_counts_are_charged_later_together() {
    let clock = HandClock::at(NOON);
    let store = Counting::new(&clock);
    let guard = instance(&store, 1);
    let one = charge("one", per_minute(Algorithm::FixedWindow, 10), Charging::Each, Hits::take(1));
    (0..100).for_each(|_| assert_ne!(ask(&guard, &one).outcome, Outcome::Failed));
    let raised = |hits| store.remaining(&Charge { limit: per_minute(Algorithm::FixedWindow, hits), ..one.clone() });
    assert_eq!(raised(1_000), 1_000 - 11, "ten were admitted, and one was refused by the store");
    clock.advance("1s");
    settle(&guard, Duration::from_secs(1)).await;
    assert_eq!(raised(1_000), 1_000 - 100);
    // After a reset elsewhere they would only fill the counter again.
    (0..50).for_each(|_| assert_ne!(ask(&guard, &one).outcome, Outcome::Failed));
    store.counters.lock().clear();
    clock.advance("1s");
    settle(&guard, Duration::from_secs(1)).await;
    assert_eq!(raised(1_000), 1_000);
}

#[tokio::test(start_paused = true)]
async fn under_overload_an_instance_admits_its_share_of_what_was_left_and_charges_it_later() {
    for (name, algorithm) in Algorithm::ALL {
        let clock = HandClock::at(NOON);
        let store = Counting::new(&clock);
        let instances = [(); 3].map(|()| instance(&store, 3));
        let one = charge("one", per_minute(algorithm, 30), Charging::AllOrNothing, Hits::take(1));
        for guard in &instances {
            (0..5).for_each(|_| assert_ne!(ask(guard, &one).outcome, Outcome::Failed));
        }
        *store.error.lock() = Some(StoreError::Overloaded);
        let admitted = instances.each_ref().map(|guard| {
            let verdicts: Vec<_> = (0..100).map(|_| ask(guard, &one)).collect();
            assert!(verdicts.iter().all(|verdict| verdict.provenance == Provenance::Local), "{name}");
            verdicts.iter().filter(|verdict| verdict.outcome == Outcome::Admitted).count()
        });
        // The last replies left 25, 20 and 15, of which each instance takes a third.
        assert_eq!(admitted, [9, 7, 5], "{name}");
        *store.error.lock() = None;
        for guard in &instances {
            settle(guard, Duration::from_secs(1)).await;
        }
        assert_eq!(store.remaining(&one), 0, "{name}: 15 and 21 are more than the limit, so as many as fit");
    }
}

/// Decides one hit of a counter again and again, while the store is too busy: how many are admitted.
fn admitted_alone(store: &Counting, guard: &Guard, charge: &Charge) -> usize {
    *store.error.lock() = Some(StoreError::Overloaded);
    let one = Charge { hits: Hits::take(1), ..charge.clone() };
    (0..100).filter(|_| ask(guard, &one).outcome == Outcome::Admitted).count()
}

#[test]
fn an_instance_admits_its_share_of_what_was_left_whatever_request_was_told_of_it() {
    let most = |charging| charge("most", per_minute(Algorithm::Gcra, 30), charging, Hits::take(25));
    // A request beside a refusal that is known and does not decide it.
    for (charging, role) in [(Charging::Each, Role::Enforce), (Charging::AllOrNothing, Role::Quota)] {
        let store = Counting::new(&HandClock::at(NOON));
        let guard = instance(&store, 3);
        let small = Charge { role, ..charge("small", per_minute(Algorithm::Gcra, 1), charging, Hits::take(1)) };
        (0..2).for_each(|_| assert_ne!(ask(&guard, &small).outcome, Outcome::Failed));
        let other = Charge { descriptor: 1, ..most(charging) };
        let calls = *store.calls.lock();
        futures(guard.charge(&[small, other.clone()], None));
        assert_eq!(*store.calls.lock(), calls + 1, "{role:?}: the other is asked about");
        assert_eq!(admitted_alone(&store, &guard, &other), 2, "{role:?}");
    }
}

#[test]
fn a_refusal_for_other_hits_of_the_same_request_is_not_remembered() {
    let clock: Arc<dyn Clock> = HandClock::at(NOON);
    let [store, local] = [(); 2].map(|()| Arc::new(Memory::new(Arc::clone(&clock), 1_000)));
    let guard = Guard::new(store, Deadline::Auto, local, Arc::new(Replicas::set(NonZeroU32::MIN)), clock);
    let part = charge("one", per_minute(Algorithm::Gcra, 100), Charging::AllOrNothing, Hits::take(60));
    let verdicts = futures(guard.charge(&[part.clone(), Charge { descriptor: 1, ..part.clone() }], None));
    assert!(verdicts.iter().any(|verdict| verdict.outcome.is_refused()), "twice is too much: {verdicts:?}");
    assert_eq!(ask(&guard, &part).outcome, Outcome::Admitted, "nothing of the refused request was charged");
    assert!(ask(&guard, &part).outcome.is_refused());
}

#[tokio::test(start_paused = true)]
async fn hits_whose_window_is_over_are_dropped_and_those_that_cannot_be_sent_are_kept() {
    let clock = HandClock::at(NOON);
    let store = Counting::new(&clock);
    let guard = instance(&store, 1);
    let one = charge("one", per_minute(Algorithm::FixedWindow, 10), Charging::Each, Hits::take(1));
    *store.error.lock() = Some(StoreError::Overloaded);
    (0..4).for_each(|_| assert_ne!(ask(&guard, &one).outcome, Outcome::Failed));
    settle(&guard, Duration::from_secs(5)).await;
    *store.error.lock() = None;
    settle(&guard, Duration::from_secs(2)).await;
    assert_eq!(store.remaining(&one), 6, "once there is room");
    *store.error.lock() = Some(StoreError::Overloaded);
    (0..4).for_each(|_| assert_ne!(ask(&guard, &one).outcome, Outcome::Failed));
    clock.advance("1m");
    *store.error.lock() = None;
    settle(&guard, Duration::from_secs(2)).await;
    assert_eq!(store.remaining(&one), 10, "they belong to the window before");
    // What was sent may have been charged, though no reply came in time.
    *store.error.lock() = Some(StoreError::Late);
    (0..4).for_each(|_| assert_ne!(ask(&guard, &one).outcome, Outcome::Failed));
    *store.error.lock() = None;
    settle(&guard, Duration::from_secs(2)).await;
    assert_eq!(store.remaining(&one), 10);
}

#[test]
fn overload_has_a_policy_of_its_own_and_a_store_that_fails_another() {
    let clock = HandClock::at(NOON);
    let store = Counting::new(&clock);
    let guard = instance(&store, 1);
    let policies = StorePolicies { on_failure: FailurePolicy::Error, on_overload: FailurePolicy::Closed };
    let one = charge("one", per_minute(Algorithm::Gcra, 10), Charging::Each, Hits::take(1));
    let one = Charge { policies, ..one };
    for (error, provenance) in [
        (StoreError::Overloaded, Provenance::Closed),
        (StoreError::Late, Provenance::Closed),
        (StoreError::NoTime, Provenance::Closed),
        (StoreError::OutOfMemory, Provenance::Closed),
        (StoreError::TimedOut, Provenance::Error),
        (StoreError::Unreachable, Provenance::Error),
        (StoreError::Down { retry: Micros::ZERO }, Provenance::Error),
        (StoreError::Rejected, Provenance::Error),
        (StoreError::Foreign, Provenance::Error),
    ] {
        *store.error.lock() = Some(error);
        assert_eq!(ask(&guard, &one).provenance, provenance, "{error}");
    }
}
