//! Leases of three instances while their Redis fails, in each way of the fault matrix: never more than the limit, which is reached.

use std::time::Duration;

use rustix::process::Signal;
use tidegate::proto::envoy::service::ratelimit::v3::rate_limit_response::Code;
use tokio::time::sleep;

use super::redis::request;
use crate::load::{Calls, Load};
use crate::redis::Single;
use crate::redis::cluster::Cluster;
use crate::support::{Tidegate, rule_file};

/// Hits a year of each rule. Three instances use them up in about two seconds.
const LIMIT: usize = 3_000;
/// Calls a second to each instance.
const RATE: u32 = 1_000;
/// The keys of the rules, which are algorithms.
const KEYS: [&str; 2] = ["fixed_window", "token_bucket"];

struct Fleet {
    instances: Vec<Tidegate>,
    loads: Vec<Load>,
}

impl Fleet {
    /// Starts three instances with leases of a fifth of each limit, and a load on each. What Redis does not decide is refused.
    async fn start(url: &str, kind: &str) -> Self {
        let rule = |key: &str| {
            let limit = format!("{{ unit: year, requests_per_unit: {LIMIT}, algorithm: {key} }}");
            format!("  - {{ key: {key}, rate_limit: {limit} }}\n")
        };
        let rules = KEYS.map(rule).concat();
        let rules = rule_file(&format!(
            "domain: d\nlease: {{ share: 20%, ttl: 500ms }}\non_store_failure: closed\non_store_overload: closed\ndescriptors:\n{rules}"
        ));
        let variables = [
            ("REDIS_URL", url),
            ("REDIS_TYPE", kind),
            ("REPLICAS", "3"),
            ("LOG_LEVEL", "error"),
            ("REDIS_TIMEOUT", "2s"),
        ];
        let (mut instances, mut loads) = (Vec::new(), Vec::new());
        for _ in 0..3 {
            let instance = Tidegate::start(rules.path(), &variables).await;
            let requests = KEYS.map(|key| request(key, "all")).to_vec();
            loads.push(Load::patient(instance.grpc, requests, RATE, Duration::from_millis(20)).await);
            instances.push(instance);
        }
        Self { instances, loads }
    }

    /// Returns how many calls of each key were admitted, after so long.
    async fn admitted(self, length: Duration) -> [usize; 2] {
        sleep(length).await;
        let mut admitted = [0; 2];
        for load in self.loads {
            let calls: Calls = load.stop().await;
            for call in calls.iter() {
                let is_ok = call.answer.as_ref().is_ok_and(|answer| answer.overall_code() == Code::Ok);
                admitted[call.request % KEYS.len()] += usize::from(is_ok);
            }
        }
        let mut by_lease = 0.0;
        for instance in &self.instances {
            by_lease += super::redis::decisions(instance, "lease").await;
        }
        println!("{admitted:?} of {LIMIT}, {by_lease} by leases");
        assert!(by_lease > 0.0, "leases decide some");
        admitted
    }
}

/// Of each limit at most all was admitted, and nearly all.
fn assert_used_up(admitted: [usize; 2]) {
    for (key, admitted) in KEYS.iter().zip(admitted) {
        assert!(admitted <= LIMIT, "{key}: {admitted} of {LIMIT}");
        assert!(admitted * 100 >= LIMIT * 95, "{key}: {admitted} of {LIMIT}");
    }
}

const BEFORE: Duration = Duration::from_millis(300);
const AFTER: Duration = Duration::from_secs(5);

#[tokio::test]
async fn a_redis_that_pauses_grants_nothing_twice() {
    let redis = Single::start(&[]).await;
    let fleet = Fleet::start(&redis.address().to_string(), "single").await;
    sleep(BEFORE).await;
    for _ in 0..3 {
        redis.signal(Signal::STOP);
        sleep(Duration::from_millis(400)).await;
        redis.signal(Signal::CONT);
        sleep(Duration::from_millis(200)).await;
    }
    let admitted = fleet.admitted(AFTER).await;
    // Grants whose replies came too late are given back or wasted.
    assert!(admitted.iter().all(|admitted| *admitted <= LIMIT), "{admitted:?} of {LIMIT}");
}

#[tokio::test]
async fn connections_that_are_reset_and_scripts_that_are_flushed_cost_no_hit_too_many() {
    let redis = Single::start(&[]).await;
    let fleet = Fleet::start(&redis.address().to_string(), "single").await;
    for _ in 0..20 {
        redis.cli(&["CLIENT", "KILL", "TYPE", "normal"]).await;
        redis.cli(&["SCRIPT", "FLUSH"]).await;
        sleep(Duration::from_millis(50)).await;
    }
    let admitted = fleet.admitted(AFTER).await;
    assert!(admitted.iter().all(|admitted| *admitted <= LIMIT), "{admitted:?} of {LIMIT}");
}

#[tokio::test]
async fn a_redis_without_memory_grants_nothing_that_it_cannot_charge() {
    let redis = Single::start(&[]).await;
    let fleet = Fleet::start(&redis.address().to_string(), "single").await;
    sleep(BEFORE).await;
    redis.cli(&["CONFIG", "SET", "maxmemory", "1"]).await;
    sleep(Duration::from_millis(700)).await;
    redis.cli(&["CONFIG", "SET", "maxmemory", "0"]).await;
    assert_used_up(fleet.admitted(AFTER).await);
}

#[tokio::test]
async fn a_redis_that_comes_back_empty_admits_one_limit_more_with_leases_too() {
    let mut redis = Single::start(&[]).await;
    let fleet = Fleet::start(&redis.address().to_string(), "single").await;
    sleep(BEFORE).await;
    redis.signal(Signal::KILL);
    redis.ended().await;
    redis.restart().await;
    let admitted = fleet.admitted(AFTER).await;
    assert!(admitted.iter().all(|admitted| *admitted <= 2 * LIMIT), "{admitted:?} of {LIMIT}");
}

#[tokio::test]
async fn a_clock_of_redis_that_steps_admits_no_hit_too_many_within_a_year() {
    let redis = Single::with_clock(&[]).await;
    let fleet = Fleet::start(&redis.address().to_string(), "single").await;
    for step in [-3_600_000_000, 1_000_000, -20_000_000] {
        sleep(BEFORE).await;
        redis.shift_clock(step);
    }
    let admitted = fleet.admitted(AFTER).await;
    assert!(admitted.iter().all(|admitted| *admitted <= LIMIT), "{admitted:?} of {LIMIT}");
}

#[tokio::test]
async fn planned_failovers_and_slots_that_move_cost_no_hit_of_a_lease() {
    let cluster = Cluster::start().await;
    let fleet = Fleet::start(&cluster.addresses(), "cluster").await;
    let shards = cluster.shards().await;
    for shard in &shards {
        sleep(Duration::from_millis(100)).await;
        cluster.failover(shard.replicas[0]).await;
    }
    let shards = cluster.shards().await;
    cluster.reshard(shards[0].master, shards[1].master, 5_000).await;
    let admitted = fleet.admitted(AFTER).await;
    assert!(admitted.iter().all(|admitted| *admitted <= LIMIT), "{admitted:?} of {LIMIT}");
}
