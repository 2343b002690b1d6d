//! Faults that seeds have found, each as the shortest course of events that shows it.

use std::rc::Rc;
use std::time::Duration;

use tidegate::model::{Clock as _, Outcome, Provenance};
use tokio::time::{Instant, sleep};

use super::clock::SimulatedClock;
use super::deployment::{Deployment, Kind};
use super::server::Server;
use super::world::{Process, on_virtual_time, request};

const RULES: &str = "domain: d
on_store_overload: closed
descriptors:
  - { key: user, rate_limit: { unit: year, requests_per_unit: 9000 } }
  - { key: leased, rate_limit: { unit: second, requests_per_unit: 1000, algorithm: gcra, lease: { share: 50%, ttl: 1s } } }
  - { key: brief, rate_limit: { unit: second, requests_per_unit: 3 } }
  - { key: few, rate_limit: { unit: year, requests_per_unit: 2 } }
";

/// Calls with a descriptor for each of these keys, and returns the decision and who decided on the first of them.
async fn call(instance: &Process, keys: &[&str]) -> (Outcome, Option<Provenance>) {
    let request = request(keys.iter().map(|key| (*key, "a")), 1);
    let rules = instance.limiter.rules();
    let decision = instance.limiter.decide(&rules, &request, Some(Duration::from_millis(100))).await;
    (decision.outcome, decision.limited().next().map(|(_, tightest)| tightest.verdict.provenance))
}

/// A server, and an instance that is connected to it.
async fn connected() -> (Rc<Server>, Rc<Process>) {
    let (deployment, instances) = connected_to(Kind::Single, RULES, 1).await;
    (Rc::clone(&deployment.servers[0]), Rc::clone(&instances[0]))
}

/// Servers, and instances with these rules that are connected to them.
async fn connected_to(kind: Kind, rules: &str, instances: usize) -> (Deployment, Vec<Rc<Process>>) {
    let deployment = Deployment::new(kind, &SimulatedClock::new(Instant::now(), 0), &Rc::default());
    let start = |number| {
        let own = SimulatedClock::new(Instant::now(), 0);
        Process::start((number, instances), rules, own, 100..=200, 1, &deployment)
    };
    let instances = (0..instances).map(start).collect();
    sleep(Duration::from_millis(500)).await;
    (deployment, instances)
}

/// Seed 96: while all calls are too late, each is followed by a pause. The call that would load the script again fell into the pause after its own first
/// reply, each time, and the instance never loaded it.
#[test]
fn a_lost_script_is_loaded_again_where_all_calls_were_too_late() {
    on_virtual_time(async {
        let (server, instance) = connected().await;
        assert_eq!(call(&instance, &["user"]).await.1, Some(Provenance::Store));
        instance.links[0].way.send_modify(|way| way.latency = 24_000..=24_000);
        for _ in 0..100 {
            call(&instance, &["user"]).await;
            sleep(Duration::from_millis(50)).await;
        }
        instance.links[0].way.send_modify(|way| way.latency = 100..=200);
        server.flush_scripts();
        let mut decided = 0;
        for _ in 0..20 {
            sleep(Duration::from_millis(300)).await;
            decided += u32::from(call(&instance, &["user"]).await.1 == Some(Provenance::Store));
        }
        assert!(decided >= 18, "{decided} of 20");
    });
}

/// Seed 1529: a counter is forgotten a second after its window, unless it was used up. Where the clock is then set back into that window, a limit is admitted
/// again, and only then.
#[test]
fn a_clock_that_is_set_back_by_more_than_a_second_admits_at_most_a_limit_again() {
    for (waits, steps_back, again) in [(1_200, 900_000, 2), (1_800, 1_600_000, 3)] {
        on_virtual_time(async {
            let (server, instance) = connected().await;
            assert_eq!(call(&instance, &["brief"]).await.0, Outcome::Admitted);
            sleep(Duration::from_millis(waits)).await;
            // The simulated server drops what has expired when a script begins.
            call(&instance, &["few"]).await;
            server.clock.step(-steps_back);
            let mut admitted = 0;
            for _ in 0..5 {
                admitted += u32::from(call(&instance, &["brief"]).await.0 == Outcome::Admitted);
            }
            assert_eq!(admitted, again, "of a limit of 3 after {waits} ms");
        });
    }
}

/// A lease that was taken under a larger limit pays for nothing under the smaller one.
#[test]
fn a_lease_of_an_earlier_limit_pays_for_nothing() {
    on_virtual_time(async {
        let (_server, instance) = connected().await;
        let by_lease = async || call(&instance, &["leased"]).await == (Outcome::Admitted, Some(Provenance::Lease));
        let mut calls = 0;
        while !by_lease().await && calls < 400 {
            calls += 1;
            sleep(Duration::from_millis(5)).await;
        }
        assert!(by_lease().await, "there is a lease");
        instance.reload(&RULES.replace("requests_per_unit: 1000", "requests_per_unit: 1"));
        for _ in 0..20 {
            assert!(!by_lease().await, "the lease is that of 1,000 a second");
        }
    });
}

/// Seed 61: a lease that paid for one limit of a request was taken for a refusal of the request. Where Redis had little memory, the others made no new counter, so
/// whoever had none was admitted without a charge.
#[test]
fn a_lease_that_pays_is_no_refusal_where_redis_has_no_memory() {
    on_virtual_time(async {
        let (server, instance) = connected().await;
        server.keys(|keys| keys.is_full = true);
        let mut decided_by_lease = 0;
        // The memory of a server is looked at once a second.
        for _ in 0..400 {
            server.keys(|keys| keys.is_full = false);
            decided_by_lease += u32::from(call(&instance, &["leased"]).await.1 == Some(Provenance::Lease));
            server.keys(|keys| keys.is_full = true);
            sleep(Duration::from_millis(5)).await;
        }
        assert!(decided_by_lease > 100, "{decided_by_lease} of 400");
        let mut admitted = 0;
        for _ in 0..20 {
            let (outcome, by) = call(&instance, &["leased", "few"]).await;
            admitted += u32::from(outcome == Outcome::Admitted && by == Some(Provenance::Lease));
        }
        assert_eq!(admitted, 0, "there is no memory to charge `few`");
    });
}

/// A request that is refused at one shard of a cluster gives back what it took at another. Where that arrives in the next window, nothing of it is taken off there.
#[test]
fn hits_of_the_window_before_are_not_given_back_to_this_one() {
    on_virtual_time(async {
        let rules = format!("charging: all_or_nothing\n{RULES}");
        let (deployment, instances) = connected_to(Kind::Cluster, &rules, 2).await;
        let [near, far] = [&instances[0], &instances[1]];
        for _ in 0..2 {
            assert_eq!(call(near, &["few"]).await.0, Outcome::Admitted);
        }
        far.links.iter().for_each(|link| link.way.send_modify(|way| way.latency = 4_000..=4_000));
        let clock = &deployment.servers[0].clock;
        // Charged 3 ms before the end of a window, and given back 5 ms after it.
        let until_the_border = 1_000_000 - clock.now().get() % 1_000_000;
        sleep(Duration::from_micros((until_the_border + 993_000) % 1_000_000)).await;
        let refused = async { call(far, &["brief", "few"]).await.0 };
        let between = async {
            sleep(Duration::from_millis(9)).await;
            call(near, &["brief"]).await.0
        };
        assert_eq!(tokio::join!(refused, between), (Outcome::Refused, Outcome::Admitted));
        sleep(Duration::from_millis(20)).await;
        let mut admitted = 1;
        for _ in 0..4 {
            admitted += u32::from(call(near, &["brief"]).await.0 == Outcome::Admitted);
        }
        assert_eq!(admitted, 3, "of a limit of 3");
    });
}
