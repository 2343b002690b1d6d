//! Leases of three instances while their Redis fails, in each way of `faults::table`: never more than the limit, which is reached.

use std::time::Duration;

use rustix::process::Signal;
use tidegate::proto::envoy::service::ratelimit::v3::rate_limit_response::Code;
use tokio::time::sleep;

use crate::faults::request;
use crate::faults::table::Fault;
use crate::load::{Calls, Load};
use crate::redis::Single;
use crate::support::{Tidegate, rule_file};

/// Hits a year of each counter of one Redis. Three instances use them up in about two seconds.
const LIMIT: usize = 3_000;
/// Calls a second to each instance.
const RATE: u32 = 1_000;
/// The keys of the rules, which are algorithms.
const KEYS: [&str; 2] = ["fixed_window", "token_bucket"];

pub struct Fleet {
    /// Key and value of each counter.
    counters: Vec<(&'static str, String)>,
    instances: Vec<Tidegate>,
    loads: Vec<Load>,
}

/// How often each counter was admitted.
#[derive(Debug)]
pub struct Admitted {
    pub key: &'static str,
    pub value: String,
    pub hits: usize,
}

impl Fleet {
    /// Starts three instances on one Redis, of whose leases each may hold a fifteenth of a limit.
    async fn start(url: &str) -> Self {
        Self::of([url; 3], "single", LIMIT, &["all".to_owned()]).await
    }

    /// Starts three instances, and a load on each that uses a counter of each algorithm for each of these values. What Redis does not decide
    /// is refused.
    pub async fn of(urls: [&str; 3], kind: &str, limit: usize, values: &[String]) -> Self {
        let rule = |key: &str| {
            let limit = format!("{{ unit: year, requests_per_unit: {limit}, algorithm: {key} }}");
            format!("  - {{ key: {key}, rate_limit: {limit} }}\n")
        };
        let rules = KEYS.map(rule).concat();
        let rules = rule_file(&format!(
            "domain: d\nlease: {{ share: 20%, ttl: 500ms }}\non_store_failure: closed\non_store_overload: closed\ndescriptors:\n{rules}"
        ));
        let counters: Vec<_> = values.iter().flat_map(|value| KEYS.map(|key| (key, value.clone()))).collect();
        let requests: Vec<_> = counters.iter().map(|(key, value)| request(key, value)).collect();
        let (mut instances, mut loads) = (Vec::new(), Vec::new());
        for url in urls {
            let variables = [
                ("REDIS_URL", url),
                ("REDIS_TYPE", kind),
                ("REPLICAS", "3"),
                ("LOG_LEVEL", "error"),
                ("REDIS_TIMEOUT", "2s"),
            ];
            let instance = Tidegate::start(rules.path(), &variables).await;
            loads.push(Load::patient(instance.grpc, requests.clone(), RATE, Duration::from_millis(20)).await);
            instances.push(instance);
        }
        Self { counters, instances, loads }
    }

    /// Returns how many decisions have this provenance.
    async fn decisions(&self, provenance: &str) -> f64 {
        let mut decisions = 0.0;
        for instance in &self.instances {
            decisions += super::redis::decisions(instance, provenance).await;
        }
        decisions
    }

    /// Returns how many calls of each counter were admitted, after so long.
    pub async fn admitted(self, length: Duration) -> Vec<Admitted> {
        sleep(length).await;
        let by_lease = self.decisions("lease").await;
        let counter = |(key, value)| Admitted { key, value, hits: 0 };
        let mut admitted: Vec<_> = self.counters.into_iter().map(counter).collect();
        let counters = admitted.len();
        for load in self.loads {
            let calls: Calls = load.stop().await;
            for call in calls.iter() {
                let is_ok = call.answer.as_ref().is_ok_and(|answer| answer.overall_code() == Code::Ok);
                admitted[call.request % counters].hits += usize::from(is_ok);
            }
        }
        let hits: Vec<_> = admitted.iter().map(|counter| counter.hits).collect();
        println!("{hits:?}, {by_lease} by leases");
        assert!(by_lease > 0.0, "leases decide some");
        admitted
    }
}

/// Of each counter at most so many limits were admitted.
fn assert_within(limits: usize, admitted: &[Admitted]) {
    assert!(admitted.iter().all(|counter| counter.hits <= limits * LIMIT), "{admitted:?} of {limits} times {LIMIT}");
}

/// Of each counter at most its limit was admitted, and all of it but for a lease of each instance, whose reply can be too late.
fn assert_used_up(admitted: &[Admitted]) {
    assert_within(1, admitted);
    assert!(admitted.iter().all(|counter| counter.hits >= LIMIT - 3 * LIMIT / 15), "{admitted:?} of {LIMIT}");
}

pub const BEFORE: Duration = Duration::from_millis(300);
pub const AFTER: Duration = Duration::from_secs(5);

/// Makes a fault while three instances use up counters.
pub async fn leased(fault: &Fault) {
    let (mut redis, proxy) = fault.start().await;
    let fleet = Fleet::start(&fault.address(&redis, &proxy)).await;
    sleep(BEFORE).await;
    fault.pass(&mut redis, &proxy).await;
    let admitted = fleet.admitted(AFTER).await;
    assert_within(fault.limits, &admitted);
    if fault.is_used_up {
        assert_used_up(&admitted);
    }
}

#[tokio::test]
async fn leases_begin_when_redis_does() {
    let mut redis = Single::start(&[]).await;
    redis.signal(Signal::KILL);
    redis.ended().await;
    let fleet = Fleet::start(&redis.address().to_string()).await;
    sleep(BEFORE).await;
    redis.restart().await;
    assert_used_up(&fleet.admitted(AFTER).await);
}

#[tokio::test]
async fn a_counter_whose_key_holds_another_value_grants_nothing() {
    let redis = Single::start(&[]).await;
    let fleet = Fleet::start(&redis.address().to_string()).await;
    sleep(BEFORE).await;
    let keys = redis.cli(&["KEYS", "*"]).await;
    assert_eq!(keys.lines().count(), KEYS.len(), "{keys}");
    for key in keys.lines() {
        redis.cli(&["SET", key, "not a counter"]).await;
    }
    // Longer than a lease.
    sleep(Duration::from_secs(1)).await;
    let before = (fleet.decisions("lease").await, fleet.decisions("store").await);
    sleep(Duration::from_secs(1)).await;
    let after = (fleet.decisions("lease").await, fleet.decisions("store").await);
    assert_eq!(after, before, "leases end, and Redis decides nothing");
    let admitted = fleet.admitted(Duration::ZERO).await;
    assert_within(1, &admitted);
}
