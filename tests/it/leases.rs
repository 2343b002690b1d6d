//! Leases: hits that are charged before they are spent, never more than the limit and its bound, however many instances there are.

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tidegate::algorithm::{Algorithm, Charge, Limit};
use tidegate::model::{
    Charging, Clock, FailurePolicy, Hits, LeaseTerms, Micros, Outcome, Provenance, Quota, StorePolicies, Unit, Verdict,
    Window,
};
use tidegate::store::deadline::Deadline;
use tidegate::store::guard::Guard;
use tidegate::store::memory::Memory;
use tidegate::store::replicas::Replicas;
use tidegate::store::{Granted, Store};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, sleep};

use self::network::{Far, Link, Shared, Virtual};
use crate::histories;

pub mod cluster;
pub mod faults;
mod network;
mod redis;

/// One instance, its way to the store, and the task that keeps its leases.
struct Instance {
    guard: Arc<Guard>,
    link: Arc<Link>,
    clock: Arc<Virtual>,
    keeper: JoinHandle<()>,
}

/// Instances that share a store.
struct Fleet {
    shared: Arc<Shared>,
    instances: Vec<Instance>,
    /// Number of calls.
    calls: AtomicU64,
    /// Number of verdicts by their provenance.
    decided: Mutex<HashMap<&'static str, usize>>,
    /// What each counter admitted.
    admitted: Mutex<HashMap<String, Vec<Admission>>>,
}

/// Time, hits and origin of an admission.
type Admission = (Micros, u64, Provenance);

/// Whole numbers in no order.
struct Numbers(u64);

impl Numbers {
    /// Returns a number from 0 to `below`, exclusive.
    fn below(&mut self, below: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (mixed ^ (mixed >> 31)) % below
    }
}

fn leased(name: &str, limit: Limit) -> Charge {
    Charge { lease: Some(LeaseTerms::default()), ..histories::charge(name, limit, Charging::Each, Hits::take(1)) }
}

fn per_second(algorithm: Algorithm, hits: u32) -> Limit {
    Limit::new(algorithm, Quota::new(hits, Window::of_unit(Unit::Second))).expect("it can be counted")
}

impl Instance {
    fn start(shared: &Arc<Shared>, (began, skew): (Instant, i64), delay: Duration, replicas: u32) -> Self {
        let own = Virtual::new(began, skew);
        let clock = Arc::clone(&own) as Arc<dyn Clock>;
        let link = Link::new(shared, delay);
        let local = Arc::new(Memory::new(Arc::clone(&clock), 10_000));
        let replicas = Arc::new(Replicas::set(NonZeroU32::new(replicas).expect("at least one")));
        let guard = Arc::new(Guard::new(Arc::new(Far(Arc::clone(&link))), Deadline::Auto, local, replicas, clock));
        let keeper = tokio::spawn(Arc::clone(&guard).keep_leases());
        let settling = Arc::clone(&guard);
        tokio::spawn(async move { settling.settle().await });
        Self { guard, link, clock: own, keeper }
    }
}

impl Fleet {
    /// Starts instances whose clocks are wrong by up to a year, and a store that executes 50,000 commands a second.
    fn start(count: u32, delay: Duration) -> Arc<Self> {
        Self::start_on(Duration::from_micros(20), count, delay)
    }

    /// Starts instances of a store that takes so long for a command.
    fn start_on(command: Duration, count: u32, delay: Duration) -> Arc<Self> {
        let began = Instant::now();
        let shared = Shared::new(Virtual::new(began, 0), command);
        let skew = |index: u32| (i64::from(index) - i64::from(count) / 2) * 31_536_000_000_000 / i64::from(count);
        let instances = (0..count).map(|index| Instance::start(&shared, (began, skew(index)), delay, count)).collect();
        Arc::new(Self {
            shared,
            instances,
            calls: AtomicU64::new(0),
            decided: Mutex::default(),
            admitted: Mutex::default(),
        })
    }

    async fn ask(&self, instance: usize, charge: &Charge) -> Verdict {
        self.calls.fetch_add(1, Ordering::Relaxed);
        let verdict = self.instances[instance].guard.charge(std::slice::from_ref(charge), None).await[0];
        *self.decided.lock().entry(verdict.provenance.name()).or_default() += 1;
        let is_counted = matches!(verdict.provenance, Provenance::Store | Provenance::Lease);
        if verdict.outcome == Outcome::Admitted && is_counted {
            let now = self.shared.clock.now();
            let mut admitted = self.admitted.lock();
            let of_counter = admitted.entry(charge.key.to_string()).or_default();
            of_counter.push((now, charge.hits.taken(), verdict.provenance));
        }
        verdict
    }

    /// Returns the hits of a counter that leases paid, and all that were admitted.
    fn hits(&self, charge: &Charge) -> (u64, u64) {
        let admitted = self.admitted.lock();
        let of = admitted.get(&charge.key.to_string()).map(Vec::as_slice).unwrap_or_default();
        let by_lease = of.iter().filter(|(_, _, by)| *by == Provenance::Lease).map(|(_, hits, _)| hits).sum();
        (by_lease, of.iter().map(|(_, hits, _)| hits).sum())
    }

    /// Returns the reason why what was admitted is not what was charged before: at some time, more was admitted than charged.
    fn is_charged_before_spent(&self) -> Result<(), String> {
        let charged = self.shared.charged.lock();
        for (name, admitted) in self.admitted.lock().iter() {
            let mut events: Vec<(Micros, i64)> = charged.get(name).cloned().unwrap_or_default();
            events.extend(admitted.iter().map(|(at, hits, _)| (*at, -hits.cast_signed())));
            // Of events at one time, charges come first.
            events.sort_by_key(|(at, hits)| (*at, -hits));
            let mut balance = 0;
            for (at, hits) in events {
                balance += hits;
                if balance < 0 {
                    return Err(format!("{name}: {} hits too many at {at}", -balance));
                }
            }
        }
        Ok(())
    }

    /// Returns time and hits of what a counter admitted, in order. A charge by the store counts when it was charged, a hit of a lease when it
    /// was spent.
    fn admissions(&self, charge: &Charge) -> Vec<(Micros, u64)> {
        let back = self.instances.first().map_or(Micros::ZERO, |instance| instance.link.delay.into());
        let admitted = self.admitted.lock();
        let of_counter = admitted.get(&charge.key.to_string()).into_iter().flatten();
        let counted_at = |at: Micros, by| if by == Provenance::Store { at.saturating_sub(back) } else { at };
        let mut all: Vec<_> = of_counter.map(|(at, hits, by)| (counted_at(*at, *by), *hits)).collect();
        all.sort();
        all
    }

    /// Returns the most hits of a counter that leases hold at once.
    fn leased(&self, charge: &Charge) -> u64 {
        let replicas = NonZeroU32::new(u32::try_from(self.instances.len()).expect("few")).expect("at least one");
        let terms = charge.lease.expect("it has leases");
        terms.most(charge.limit.quota().limit(), replicas) * u64::from(replicas.get())
    }

    /// Returns the reason why a counter of fixed windows admitted more than its limit in one of them.
    fn is_within_fixed_windows(&self, charge: &Charge) -> Result<(), String> {
        let quota = charge.limit.quota();
        let mut windows: HashMap<u64, u64> = HashMap::new();
        for (at, hits) in self.admissions(charge) {
            *windows.entry(at.get() / quota.window().length().get()).or_default() += hits;
        }
        match windows.iter().find(|(_, hits)| **hits > quota.limit().into()) {
            None => Ok(()),
            Some((window, hits)) => Err(format!("{hits} of {} in window {window}", quota.limit())),
        }
    }

    /// Returns the reason why a sliding window admitted more than its limit and all that is leased.
    fn is_within_sliding_window(&self, charge: &Charge) -> Result<(), String> {
        let quota = charge.limit.quota();
        let length = quota.window().length().get();
        // In parts of a hit, of which a window has as many as microseconds; one hit for rounding.
        let most = (u64::from(quota.limit()) + self.leased(charge) + 1) * length;
        let (mut window, mut before, mut present) = (0, 0, 0);
        for (at, hits) in self.admissions(charge) {
            let passed = at.get() / length - window;
            if passed > 0 {
                (window, before, present) = (window + passed, if passed == 1 { present } else { 0 }, 0);
            }
            present += hits;
            let counted = present * length + before * (length - at.get() % length);
            if counted > most {
                return Err(format!("{} hits too many at {at}", (counted - most).div_ceil(length)));
            }
        }
        Ok(())
    }

    /// Returns the reason why a meter admitted more in an interval than its burst, what drains in it, and all that is leased.
    fn is_within_meter(&self, charge: &Charge) -> Result<(), String> {
        let (quota, leased) = (charge.limit.quota(), self.leased(charge));
        let (window, limit) = (u128::from(quota.window().length().get()), u128::from(quota.limit()));
        // In parts of a hit, so that what drains in a microsecond is whole; a tick and a round trip of grace.
        let grace = u128::from(quota.tick().get()) + 4_000;
        let most = u128::from(u64::from(quota.burst()) + leased) * window + grace * limit;
        let (mut level, mut last) = (0_u128, Micros::ZERO);
        for (at, hits) in self.admissions(charge) {
            level = level.saturating_sub(u128::from(at.saturating_sub(last).get()) * limit);
            (level, last) = (level + u128::from(hits) * window, at);
            if level > most {
                return Err(format!("{} hits too many at {at}", (level - most) / window));
            }
        }
        Ok(())
    }

    fn check(&self, charge: &Charge) -> Result<(), String> {
        self.is_charged_before_spent()?;
        match charge.limit.algorithm() {
            Algorithm::FixedWindow => self.is_within_fixed_windows(charge),
            Algorithm::Gcra | Algorithm::TokenBucket | Algorithm::LeakyBucket => self.is_within_meter(charge),
            Algorithm::SlidingWindow => self.is_within_sliding_window(charge),
            Algorithm::SlidingLog => Ok(()),
        }
        .map_err(|reason| format!("{}: {reason}", charge.key))
    }
}

#[tokio::test(start_paused = true)]
async fn a_busy_counter_is_decided_by_leases_and_costs_few_commands() {
    for (name, algorithm) in Algorithm::ALL.into_iter().filter(|(_, algorithm)| algorithm.can_be_leased()) {
        let fleet = Fleet::start(1, Duration::from_millis(1));
        let one = leased("busy", per_second(algorithm, 10_000));
        for _ in 0..2_000 {
            assert_eq!(fleet.ask(0, &one).await.outcome, Outcome::Admitted, "{name}");
            sleep(Duration::from_millis(1)).await;
        }
        let (by_lease, all) = fleet.hits(&one);
        let commands = *fleet.shared.commands.lock();
        assert!(by_lease * 100 >= all * 95, "{name}: {by_lease} of {all} by a lease");
        assert!(commands < 100, "{name}: {commands} commands");
        fleet.check(&one).expect(name);
    }
}

/// Calls each instance 25,000 times a second for three seconds, for 20 counters of this limit, whether it has answered or not. Leases hold at
/// most a third of the limit. Returns the counters.
async fn saturate(fleet: &Arc<Fleet>, limit: Limit) -> Vec<Charge> {
    let lease = LeaseTerms::new(333_333, Micros::from_secs(1));
    let counter = |index: u32| Charge { lease, ..leased(&format!("full {index}"), limit) };
    let counters: Vec<Charge> = (0..20).map(counter).collect();
    let mut calls = JoinSet::new();
    let mut numbers = Numbers(1);
    for _ in 0..3_000 {
        for call in 0..25 * fleet.instances.len() {
            let (fleet, one) = (Arc::clone(fleet), counters[usize::try_from(numbers.below(20)).expect("few")].clone());
            calls.spawn(async move { fleet.ask(call % fleet.instances.len(), &one).await });
        }
        sleep(Duration::from_millis(1)).await;
    }
    calls.join_all().await;
    counters
}

#[tokio::test(start_paused = true)]
async fn three_saturated_instances_admit_the_limit_with_few_commands() {
    let meters = [20, 100, 1_000].map(|limit| (Algorithm::Gcra, limit));
    let windows = [100, 1_000].map(|limit| [(Algorithm::FixedWindow, limit), (Algorithm::SlidingWindow, limit)]);
    for (algorithm, limit) in meters.into_iter().chain(windows.into_iter().flatten()) {
        // The store is faster than all calls together: an answer that comes too late would waste a hit.
        let fleet = Fleet::start_on(Duration::from_micros(10), 3, Duration::from_millis(1));
        let counters = saturate(&fleet, per_second(algorithm, limit)).await;
        let passed = fleet.shared.clock.now().saturating_sub(crate::world::NOON).get();
        let (mut by_lease, mut all) = (0, 0);
        for counter in &counters {
            fleet.check(counter).expect("within its bound");
            let hits = fleet.hits(counter);
            (by_lease, all) = (by_lease + hits.0, all + hits.1);
        }
        // A meter is empty at first, and admits its burst beside what drains.
        let burst = if algorithm == Algorithm::Gcra { 1_000_000 } else { 0 };
        let due = counters.len() as u64 * u64::from(limit) * (passed + burst) / 1_000_000;
        let (calls, commands) = (fleet.calls.load(Ordering::Relaxed), *fleet.shared.commands.lock() as u64);
        println!("{algorithm:?} {limit}: {all} of {due}, {by_lease} by leases; {commands} commands for {calls} calls");
        assert!(all * 100 >= due * 95, "{algorithm:?} {limit}: {all} of {due}");
        // A fixed window begins with calls to the store.
        let most = if algorithm == Algorithm::FixedWindow { 3 } else { 2 };
        assert!(commands * 100 <= calls * most, "{algorithm:?} {limit}: {commands} commands for {calls} calls");
    }
}

/// Moves a fleet through `seconds` of load on counters of every algorithm, with links that are cut and instances that end.
async fn storm(fleet: &Arc<Fleet>, seconds: u64) -> Vec<Charge> {
    let algorithms = Algorithm::ALL.into_iter().filter(|(_, algorithm)| algorithm.can_be_leased());
    let counters: Vec<Charge> = algorithms
        .flat_map(|(name, algorithm)| {
            (0..20).map(move |index| {
                // A fifth of the limit, so that each instance has some hits.
                let lease = LeaseTerms::new(200_000, Micros::from_secs(1));
                let policy = if index % 2 == 0 { FailurePolicy::Closed } else { FailurePolicy::Local };
                let policies = StorePolicies { on_failure: policy, on_overload: policy };
                Charge { lease, policies, ..leased(&format!("{name} {index}"), per_second(algorithm, 2_000)) }
            })
        })
        .collect();
    let clients: Vec<_> = (0..fleet.instances.len())
        .map(|instance| {
            let (fleet, counters) = (Arc::clone(fleet), counters.clone());
            let mut numbers = Numbers(instance as u64);
            tokio::spawn(async move {
                let end = Instant::now() + Duration::from_secs(seconds);
                while Instant::now() < end {
                    // About as often as 1 / rank.
                    let most = u64::try_from(counters.len()).expect("few");
                    let ranks = numbers.below(most) + 1;
                    let rank = numbers.below(ranks);
                    let one = &counters[usize::try_from(rank).expect("few")];
                    let hits = Hits::take(1 + numbers.below(3));
                    fleet.ask(instance, &Charge { hits, ..one.clone() }).await;
                    sleep(Duration::from_micros(numbers.below(10_000))).await;
                    if numbers.below(1_000) == 0 {
                        fleet.instances[instance].link.is_cut.store(numbers.below(2) == 0, Ordering::Relaxed);
                    }
                    if numbers.below(300) == 0 {
                        // By up to a second, back or ahead.
                        let by = numbers.below(2_000_000).cast_signed() - 1_000_000;
                        fleet.instances[instance].clock.step(by);
                    }
                    if numbers.below(2_000) == 0 {
                        // As a process does that is killed: its leases are lost.
                        fleet.instances[instance].keeper.abort();
                    }
                }
                fleet.instances[instance].guard.end_leases().await;
            })
        })
        .collect();
    for client in clients {
        client.await.expect("a client does not fail");
    }
    counters
}

#[tokio::test(start_paused = true)]
async fn a_hundred_instances_stay_within_the_bounds_whatever_fails() {
    // A store that is too slow for all of them.
    let fleet = Fleet::start_on(Duration::from_micros(100), 100, Duration::from_millis(2));
    for counter in storm(&fleet, 10).await {
        fleet.check(&counter).expect("within its bound");
    }
    let decided = fleet.decided.lock().clone();
    println!("{decided:?}, {} commands", fleet.shared.commands.lock());
    for provenance in [Provenance::Store, Provenance::Lease, Provenance::Local, Provenance::Closed] {
        let count = decided.get(provenance.name()).copied().unwrap_or(0);
        assert!(count > 1_000, "{count} by {provenance:?}: {decided:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn hits_that_are_spent_before_they_are_charged_are_found() {
    let fleet = Fleet::start(1, Duration::from_millis(2));
    let Instance { guard, link, keeper, .. } = &fleet.instances[0];
    keeper.abort();
    // A task that believes in a lease when it asks for one.
    let (guard, link) = (Arc::clone(guard), Arc::clone(link));
    tokio::spawn(async move {
        let known = guard.known().expect("its store is far");
        loop {
            known.lease_due().await;
            for ask in known.lease_asks(link.shared.clock.now(), NonZeroU32::MIN, 0, 100) {
                let (now, hits) = (link.shared.clock.now(), ask.hits.taken());
                let reset = Micros::from_secs(1);
                let granted = Granted { at: now, hits, remaining: 0, reset, retry: None };
                known.grant(&ask, Some(granted), now, now);
                let _ = Far(Arc::clone(&link)).lease(std::slice::from_ref(&ask), Duration::from_secs(1)).await;
            }
        }
    });
    let one = leased("bug", per_second(Algorithm::Gcra, 10_000));
    for _ in 0..100 {
        // More at a moment than a lease has left when it asks for more.
        for _ in 0..8 {
            fleet.ask(0, &one).await;
        }
        sleep(Duration::from_millis(1)).await;
    }
    let found = fleet.is_charged_before_spent().expect_err("hits were spent before they were charged");
    assert!(found.contains("hits too many"), "{found}");
}
