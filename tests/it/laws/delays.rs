//! What holds where limits make requests wait instead of refusing them.

use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;
use tidegate::algorithm::{Algorithm, Charge, Limit};
use tidegate::model::{Charging, Delay, Hits, Micros, Quota, Unit, Verdict, Window};
use tidegate::store::deadline::Deadline;
use tidegate::store::guard::Guard;
use tidegate::store::memory::Memory;
use tidegate::store::redis::address::{Address, Topology};
use tidegate::store::redis::credentials::Credentials;
use tidegate::store::redis::login::Login;
use tidegate::store::redis::manager::Access;
use tidegate::store::redis::{HostNetwork, Instance, Redis};
use tidegate::store::replicas::Replicas;

use super::oracle::Told;
use super::stores::Store;
use super::{CASES, hold, hold_of, taking, ticks, used};
use crate::histories::{Amount, Pause, charge, charging, growing, limit, limit_of, moment, slot, taken, waiting};
use crate::redis::cluster::Cluster;
use crate::support::eventually;
use crate::world::{HandClock, NOON};

const WITH_SLOTS: [Algorithm; 2] = [Algorithm::LeakyBucket, Algorithm::Gcra];

type Uses = (Limit, Charging, Micros, Vec<(Pause, Amount)>);

/// A limit with slots, and what happens to its counter.
fn slots(algorithm: Algorithm) -> impl Strategy<Value = Uses> {
    let limit = (limit_of(algorithm), slot()).prop_map(|(limit, slot)| slot.on(limit));
    (limit, charging(), moment(), taking())
}

/// A limit that refuses nothing, and what happens to its counter. Where it can have none, it is a small one that can.
fn endless(algorithm: Algorithm) -> impl Strategy<Value = Uses> {
    let limit = (limit_of(algorithm), growing()).prop_map(move |(any, growing)| {
        let small = || Limit::new(algorithm, any.quota().with_limit(5).with_burst(5)).expect("it can be counted");
        let few = Delay::Growing { step: Micros::new(1), max: Micros::new(7) };
        let limit = growing.on(any);
        if limit.delay().is_some() { limit } else { small().delaying(few).expect("few hits are above it") }
    });
    (limit, charging(), moment(), taking())
}

/// The step and the longest wait.
fn grows(limit: &Limit) -> (u128, u128) {
    match limit.delay() {
        Some(Delay::Growing { step, max }) => (step.get().into(), max.get().into()),
        other => panic!("{other:?} does not grow"),
    }
}

/// A burst at once and then the limit's share of the ticks, where a queue's burst is its largest charge; and the tick by
/// which a wait is told too long.
pub fn hits_that_wait_out_their_delays_pass_no_faster_than_the_limit(store: &Store) {
    hold_of(&WITH_SLOTS, store, CASES, slots, |(limit, charging, begin, events)| {
        let counters = store.counters();
        let quota = limit.quota();
        let mut now = begin;
        let mut passed: Vec<(Micros, u128)> = Vec::new();
        for (after, amount) in events {
            now = after.from(now, &limit);
            let hits = amount.of(&limit).taken().min(quota.burst().into());
            let told = counters.charge(limit, charging, now, Hits::take(hits));
            if !told.is_refused {
                passed.push((now.saturating_add(told.delay), hits.into()));
            }
        }
        let is_queue = limit.algorithm() == Algorithm::LeakyBucket;
        for from in 0..passed.len() {
            let (mut sum, mut largest) = (0, 0);
            for &(to, hits) in &passed[from..] {
                (sum, largest) = (sum + hits, largest.max(hits));
                let burst = if is_queue { largest } else { quota.burst().into() };
                let drained = (ticks(&limit, to) - ticks(&limit, passed[from].0) + 1) * u128::from(quota.limit());
                let most = burst + drained / u128::from(quota.ticks());
                prop_assert!(sum <= most, "{} hits from {} to {}, at most {}", sum, passed[from].0, to, most);
            }
        }
        Ok(())
    });
}

/// The moment that a refused charge is told is the first at which it gets a slot, and who is told none never gets one.
pub fn who_finds_no_slot_is_told_the_first_moment_at_which_there_is_one(store: &Store) {
    let examples = |algorithm| (slots(algorithm), taken());
    hold_of(&WITH_SLOTS, store, CASES, examples, |((limit, charging, begin, events), amount)| {
        let (counters, now) = used(store, limit, charging, begin, &events);
        // One that is refused is not to keep the promised one out.
        let ask = |now: Micros, hits: u64| counters.charge(limit, Charging::AllOrNothing, now, Hits::take(hits));
        let mut hits = amount.of(&limit).taken().max(1);
        while !ask(now, hits).is_refused && hits < Hits::MOST {
            hits *= 2;
        }
        let probe = |now: Micros| ask(now, hits);
        let told = probe(now);
        prop_assume!(told.is_refused);
        let Some(retry) = told.retry else {
            let idle = counters.charge(limit, Charging::AllOrNothing, now, Hits::LOOK).reset;
            let end_of_tick = |moment: Micros| {
                let tick = limit.quota().tick().get();
                Micros::new((moment.get() / tick + 1) * tick - 1)
            };
            prop_assert!(probe(end_of_tick(now.saturating_add(idle))).is_refused, "it fits when all is idle");
            return Ok(());
        };
        prop_assume!(retry < super::LONGEST_WAIT);
        prop_assert!(retry > Micros::ZERO);
        let promised = now.saturating_add(retry);
        for early in [1, retry.get() / 2] {
            let early = Micros::new((promised.get() - early).max(now.get()));
            prop_assert!(early == promised || probe(early).is_refused, "admitted {} early", early);
        }
        let told = probe(promised);
        prop_assert!(!told.is_refused, "refused after {}", retry);
        prop_assert!(told.delay <= limit.delay().expect("it has slots").max());
        Ok(())
    });
}

pub fn a_delay_that_grows_refuses_nothing_and_is_a_step_for_each_hit_over_the_limit(store: &Store) {
    hold(store, CASES, endless, |(limit, charging, begin, events)| {
        let (step, max) = grows(&limit);
        let counters = store.counters();
        // All at one moment, and then as they come.
        let mut sum = 0;
        for (_, amount) in &events {
            let hits = amount.of(&limit);
            sum += u128::from(hits.taken());
            let told = counters.charge(limit, charging, begin, hits);
            prop_assert!(!told.is_refused && told.retry.is_none());
            let over = sum.saturating_sub(limit.capacity().into());
            prop_assert_eq!(u128::from(told.delay.get()), (over * step).min(max), "{} over", over);
            prop_assert_eq!(u128::from(told.remaining), u128::from(limit.capacity()).saturating_sub(sum));
        }
        let mut now = begin;
        for (after, amount) in events {
            now = after.from(now, &limit);
            let told = counters.charge(limit, charging, now, amount.of(&limit));
            prop_assert!(!told.is_refused && told.retry.is_none() && u128::from(told.delay.get()) <= max);
            prop_assert!(told.delay == Micros::ZERO || told.remaining == 0);
        }
        Ok(())
    });
}

pub fn what_makes_the_longest_wait_no_longer_is_not_recorded(store: &Store) {
    let examples = |algorithm| (endless(algorithm), 1_u64..1_000_000);
    hold(store, CASES, examples, |((limit, charging, begin, events), above)| {
        let (quiet, bothered) = (store.counters(), store.counters());
        let (_, max) = grows(&limit);
        let mut now = begin;
        for (after, amount) in events {
            now = after.from(now, &limit);
            let look = bothered.charge(limit, charging, now, Hits::LOOK);
            if u128::from(look.delay.get()) == max {
                for hits in [1, above, Hits::MOST] {
                    prop_assert_eq!(bothered.charge(limit, charging, now, Hits::take(hits)), look);
                }
            }
            let hits = amount.of(&limit);
            prop_assert_eq!(bothered.charge(limit, charging, now, hits), quiet.charge(limit, charging, now, hits));
        }
        Ok(())
    });
}

pub fn a_charge_that_finds_no_slot_spends_nothing(store: &Store) {
    let examples = |algorithm| (slots(algorithm), 1_u64..1_000_000);
    hold_of(&WITH_SLOTS, store, CASES, examples, |((limit, charging, begin, events), above)| {
        let (quiet, bothered) = (store.counters(), store.counters());
        let mut now = begin;
        for (after, amount) in events {
            now = after.from(now, &limit);
            let hits = amount.of(&limit);
            let told = quiet.charge(limit, charging, now, hits);
            prop_assert_eq!(bothered.charge(limit, charging, now, hits), told);
            if told.is_refused {
                for above in [0, above, Hits::MOST] {
                    let hits = Hits::take(hits.taken() + above);
                    prop_assert!(bothered.charge(limit, charging, now, hits).is_refused);
                }
            }
        }
        Ok(())
    });
}

/// A delayed charge is one that is admitted: beside one that is refused it leaves nothing.
pub fn a_charge_that_is_to_wait_leaves_nothing_when_its_request_is_refused(store: &Store) {
    let examples = |algorithm| {
        let limit = (limit_of(algorithm), waiting(algorithm)).prop_map(|(limit, waiting)| waiting.on(limit));
        ((limit, charging(), moment(), taking()), taken())
    };
    hold(store, CASES, examples, |((limit, charging, begin, events), amount)| {
        let (counters, now) = used(store, limit, charging, begin, &events);
        let look = || counters.charge(limit, Charging::AllOrNothing, now, Hits::LOOK);
        let before = look();
        let never = limit_that_refuses();
        let request = [
            charge("only", limit, Charging::AllOrNothing, amount.of(&limit)),
            charge("full", never, Charging::AllOrNothing, Hits::take(2)),
        ];
        let told = counters.request(&request, now);
        prop_assert!(told[1].outcome.is_refused());
        prop_assert_eq!(told[0].remaining, before.remaining);
        prop_assert_eq!(told[0].reset, before.reset);
        prop_assert_eq!(look(), before);
        Ok(())
    });
}

/// It never holds two hits.
fn limit_that_refuses() -> Limit {
    limit(Algorithm::FixedWindow, Window::of_unit(Unit::Year), 1, 1_000)
}

/// A guard over the store that the service has, on the cluster of all tests, under keys of its own.
async fn guard(prefix: &str) -> Guard {
    let addresses = Cluster::shared().await.nodes().iter().map(|node| node.address());
    let topology =
        Topology::Cluster(addresses.map(|address| Address::Tcp(address.ip().to_string(), address.port())).collect());
    let access = Access {
        max_age: None,
        credentials: Arc::new(Credentials::fixed(Login::default())),
        tls: None,
        db: 0,
        prefix: Arc::default(),
        connect_timeout: Duration::from_secs(10),
        alive: Arc::default(),
        metrics: Arc::default(),
        network: Arc::new(HostNetwork),
    };
    let redis = Redis::new(Instance { topology, access }, None, prefix, 1);
    let supervised = redis.clone();
    tokio::spawn(async move { supervised.supervise().await });
    let (clock, deadline) = (HandClock::at(NOON), Deadline::Fixed(Duration::from_secs(10)));
    let local = Arc::new(Memory::new(Arc::clone(&clock) as _, 100));
    Guard::new(Arc::new(redis), deadline, local, Arc::new(Replicas::set(std::num::NonZeroU32::MIN)), clock)
}

/// The first slot has three counters: one of slots; one that stands over its limit; and one that stands so far over it that
/// nothing more is recorded. In the second slot the request is refused.
#[tokio::test]
async fn of_a_request_refused_in_another_slot_what_was_taken_is_given_back_and_what_was_not_recorded_is_not() {
    let millis = Micros::from_millis;
    let growing = Delay::Growing { step: millis(100), max: millis(250) };
    let few =
        |algorithm| limit(algorithm, Window::of_unit(Unit::Year), 1, 1_000).delaying(growing).expect("it can wait");
    // A hit in five minutes, which are the longest wait.
    let hourly = Limit::new(Algorithm::Gcra, Quota::new(12, Window::of_unit(Unit::Hour)).with_burst(1));
    let slots = hourly.expect("it can be counted").delaying(Delay::Slot { max: Delay::LONGEST }).expect("it has slots");
    let limits = [slots, few(Algorithm::SlidingWindow), few(Algorithm::TokenBucket)];
    let charges = |hits: [u64; 3]| -> Vec<Charge> {
        // Each request is to reach the store.
        let asked = |charge| Charge { remembers_refusals: false, ..charge };
        let of = |(limit, hits)| asked(charge("waits", limit, Charging::AllOrNothing, Hits::take(hits)));
        limits.into_iter().zip(hits).map(of).collect()
    };

    let guard = guard("delays:").await;
    eventually("the cluster is asked", async || {
        let told = guard.charge(&charges([0; 3]), None).await;
        told.iter().all(|verdict| verdict.provenance.is_counted()).then_some(())
    })
    .await;
    let delays = |told: &[Verdict]| told.iter().map(|verdict| verdict.delay).collect::<Vec<_>>();
    let told = guard.charge(&charges([1, 2, 4]), None).await;
    assert_eq!(delays(&told), [Micros::ZERO, millis(100), millis(250)]);

    let mut request = charges([1; 3]);
    request.push(Charge {
        descriptor: 1,
        remembers_refusals: false,
        lease: None,
        ask: 0,
        ..charge("full", limit_that_refuses(), Charging::AllOrNothing, Hits::take(2))
    });
    for _ in 0..3 {
        let told = guard.charge(&request, None).await;
        let outcomes: Vec<_> = told.iter().map(|verdict| verdict.outcome.is_refused()).collect();
        assert_eq!(outcomes, [false, false, false, true]);
        assert_eq!(delays(&told)[1..3], [millis(200), millis(250)]);
        eventually("what was taken is given back", async || {
            let looks = guard.charge(&charges([0; 3]), None).await;
            // The three of them were taken by one script, and are given back by one.
            (looks[1].delay < millis(200)).then(|| {
                assert_eq!(delays(&looks)[1..], [millis(100), millis(250)]);
                assert_eq!(looks[0].delay, Micros::ZERO, "one hit is what the burst holds");
            })
        })
        .await;
    }
    let told = Told::from(guard.charge(&charges([1, 0, 0]), None).await[0]);
    assert!(!told.is_refused && told.delay > Micros::ZERO, "it is the first that waits: {told:?}");
}
