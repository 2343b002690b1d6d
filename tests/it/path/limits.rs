//! Limits of every algorithm: changed while they are used, and several on one descriptor.

use tidegate::algorithm::Algorithm;
use tidegate::model::{Descriptor, Override};
use tidegate::proto::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use tidegate::proto::envoy::service::ratelimit::v3::RateLimitResponse;
use tidegate::proto::envoy::service::ratelimit::v3::rate_limit_response::Code;
use tidegate::proto::envoy::service::ratelimit::v3::rate_limit_service_client::RateLimitServiceClient;
use tidegate::rulefile::{Options, load};

use crate::grpc;
use crate::redis::Single;
use crate::redis::cluster::{Cluster, slot};
use crate::support::{Tidegate, eventually, in_time, rule_file};
use crate::world::{World, descriptor, file, micros, request};

/// Envoy's number for a day.
const DAY: i32 = 4;

/// A limit of each algorithm on one descriptor, each of another number and over another window.
const MIXED: &str = "domain: d
charging: all_or_nothing
descriptors:
  - key: k
    rate_limits:
      - { window: 250ms, requests_per_unit: 4, algorithm: token_bucket }
      - { window: 10s, requests_per_unit: 6, algorithm: leaky_bucket }
      - { unit: minute, requests_per_unit: 9, algorithm: sliding_log }
      - { unit: minute, unit_multiplier: 15, requests_per_unit: 12, algorithm: sliding_window }
      - { unit: day, requests_per_unit: 13, algorithm: gcra }
      - { unit: week, requests_per_unit: 24 }
";

fn rule(limit: &str) -> String {
    format!("domain: d\ndescriptors: [{{ key: k, rate_limit: {{ {limit} }} }}]\n")
}

fn daily(algorithm: &str, limit: u32) -> String {
    rule(&format!("unit: day, requests_per_unit: {limit}, algorithm: {algorithm}"))
}

#[test]
fn used_hits_carry_over_when_a_limit_changes() {
    for (algorithm, _) in Algorithm::ALL {
        let mut world = World::new(&daily(algorithm, 100));
        world.hit("k=1", 80).admitted(20);
        world.reload(&daily(algorithm, 200));
        world.look("k=1").admitted(120);
        world.reload(&daily(algorithm, 50));
        world.look("k=1").refused(0);
        world.hit("k=1", 1).refused(0);
    }
}

#[test]
fn used_hits_carry_over_to_a_limit_that_a_request_sends() {
    for (algorithm, _) in Algorithm::ALL {
        let world = World::new(&daily(algorithm, 100));
        world.hit("k=1", 80).admitted(20);
        world.overridden("k=1", 200, DAY).admitted(119);
        world.look("k=1").admitted(19);
        world.overridden("k=1", 50, DAY).refused(0);
    }
}

#[test]
fn another_algorithm_or_window_starts_anew_and_the_old_counter_stays() {
    for (algorithm, _) in Algorithm::ALL {
        let mut world = World::new(&daily(algorithm, 100));
        world.hit("k=1", 80).admitted(20);
        for (other, _) in Algorithm::ALL.iter().filter(|(other, _)| *other != algorithm) {
            world.reload(&daily(other, 100));
            world.look("k=1").admitted(100);
        }
        for window in ["unit: week", "unit: day, unit_multiplier: 2", "window: 25h"] {
            world.reload(&rule(&format!("{window}, requests_per_unit: 100, algorithm: {algorithm}")));
            world.look("k=1").admitted(100);
        }
        world.reload(&rule(&format!("window: 24h, requests_per_unit: 100, algorithm: {algorithm}")));
        world.look("k=1").admitted(20);
    }
}

#[test]
fn an_override_that_the_algorithm_cannot_count_is_counted_in_fixed_windows() {
    let world = World::new(&rule("unit: second, requests_per_unit: 1, algorithm: gcra"));
    let sent = Override::new(5, 1, 1_048_577).expect("any window up to a year");
    let ask = || world.one(Descriptor { limit: Some(sent), ..descriptor("k=1") });
    let first = ask();
    first.admitted(4);
    assert_eq!(first.reset, micros("950001s"), "the end of the window, and not a fifth of its length");
    ask().admitted(3);
}

#[test]
fn an_override_of_more_than_a_log_remembers_is_counted_in_fixed_windows() {
    let world = World::new(&daily("sliding_log", 5));
    world.hit("k=1", 3).admitted(2);
    let in_the_log = world.overridden("k=1", 10_000, DAY);
    in_the_log.admitted(9_996);
    assert_eq!(in_the_log.reset, micros("1d"));
    let in_a_window = world.overridden("k=1", 10_001, DAY);
    in_a_window.admitted(10_000);
    assert_eq!(in_a_window.reset, micros("12h"), "at noon half of the day is over");
    world.overridden("k=1", 10_001, DAY).admitted(9_999);
    world.look("k=1").admitted(1);
}

#[test]
fn of_limits_of_every_algorithm_the_tightest_is_shown_and_a_refusal_spends_nothing_in_any() {
    let world = World::new(MIXED);
    let refused = true;
    // How long after the call before, the hits, and what is told: refused or not, by the limit of which number, what is left.
    let calls = [
        ("0s", 3, !refused, 4, 1),
        ("0s", 2, refused, 4, 1),
        ("1s", 0, !refused, 6, 3),
        ("0s", 3, !refused, 6, 0),
        ("0s", 1, refused, 6, 0),
        ("10s", 0, !refused, 9, 3),
        ("0s", 3, !refused, 9, 0),
        ("0s", 1, refused, 9, 0),
        ("1m", 0, !refused, 12, 3),
        ("0s", 3, !refused, 12, 0),
        ("0s", 1, refused, 12, 0),
        ("30m", 0, !refused, 13, 1),
        ("0s", 1, !refused, 13, 0),
        ("0s", 1, refused, 13, 0),
        ("1d", 0, !refused, 24, 11),
    ];
    for (number, (after, hits, is_refused, limit, left)) in calls.into_iter().enumerate() {
        world.clock.advance(after);
        let answer = world.hit("k=1", hits);
        assert_eq!((answer.refused, answer.limit, answer.remaining), (is_refused, Some(limit), left), "call {number}");
    }
}

struct Client(grpc::Client);

impl Client {
    async fn of(tidegate: &Tidegate) -> Self {
        let connected = RateLimitServiceClient::connect(format!("http://{}", tidegate.grpc));
        Self(in_time("the server is there", connected).await.expect("it takes connections"))
    }

    /// The answer of Redis, which may not be ready for the first.
    async fn hit(&mut self, hits: u64) -> RateLimitResponse {
        let asked = RateLimitDescriptor { hits_addend: Some(hits), ..grpc::descriptor(&[("k", "1")]) };
        let request = grpc::request("d", [asked]);
        let answer = async || self.0.should_rate_limit(request.clone()).await.ok();
        eventually("Redis decides", answer).await.into_inner()
    }
}

/// The counters of the descriptor, by their keys in Redis.
fn keys() -> Vec<String> {
    let rules = load(&[file("rules.yaml", MIXED)], Options::default()).expect("rules").rules;
    let charges = rules.find(&request([descriptor("k=1")])).charges;
    charges.iter().map(|charge| charge.key.to_string()).collect()
}

/// A service of these rules that leaves Redis as much time as it takes.
async fn tidegate(variables: &[(&str, &str)]) -> Tidegate {
    let rules = rule_file(MIXED);
    Tidegate::start(rules.path(), &[variables, &[("STORE_DEADLINE", "10s")]].concat()).await
}

#[tokio::test]
async fn limits_of_every_algorithm_are_charged_in_redis_all_or_none_in_one_step() {
    let redis = Single::start(&[]).await;
    let tidegate = tidegate(&[("REDIS_URL", &redis.address().to_string())]).await;
    let mut client = Client::of(&tidegate).await;
    let _ = client.hit(0).await;
    // That of a quarter of a second has gone by the time that it is read.
    let kept: Vec<_> = keys().into_iter().filter(|key| !key.ends_with(":250ms")).collect();
    assert_eq!(kept.len(), 5);
    let mut before = redis.scripts_run().await;
    let mut held = vec![String::new(); 5];
    for (hits, code) in [(3, Code::Ok), (5, Code::OverLimit), (1, Code::Ok)] {
        let answer = client.hit(hits).await;
        assert_eq!((answer.overall_code(), answer.statuses.len()), (code, 1), "{answer:?}");
        let ran = redis.scripts_run().await;
        assert_eq!(ran, before + 1, "one step for {hits} hits");
        before = ran;
        for (key, held) in kept.iter().zip(&mut held) {
            let now = redis.cli(&["DUMP", key]).await;
            assert!(!now.is_empty(), "{key} is counted");
            assert_eq!(now != *held, code == Code::Ok, "{key} after {hits} hits");
            *held = now;
        }
    }
}

#[tokio::test]
async fn limits_of_every_algorithm_on_a_descriptor_are_one_step_in_one_slot_of_a_cluster() {
    let slots: Vec<_> = keys().iter().map(|key| slot(key)).collect();
    assert_eq!(slots, [slots[0]; 6]);
    let cluster = Cluster::start().await;
    let tidegate = tidegate(&[("REDIS_TYPE", "cluster"), ("REDIS_URL", &cluster.addresses())]).await;
    let mut client = Client::of(&tidegate).await;
    let _ = client.hit(0).await;
    for (hits, code) in [(3, Code::Ok), (5, Code::OverLimit), (1, Code::Ok)] {
        let before = cluster.scripts_run().await;
        let answer = client.hit(hits).await;
        assert_eq!((answer.overall_code(), answer.statuses.len()), (code, 1), "{answer:?}");
        assert_eq!(cluster.scripts_run().await, before + 1, "one step for {hits} hits");
    }
}

#[test]
fn a_peek_at_a_limit_that_is_used_up_is_refused_by_choice() {
    for (algorithm, _) in Algorithm::ALL {
        for count_refused in ["", ", count_refused: true"] {
            let limit = format!("unit: day, requests_per_unit: 10, algorithm: {algorithm}{count_refused}");
            let world = World::new(&rule(&format!("{limit}, refuse_peek_at_limit: true")));
            world.look("k=1").admitted(10);
            assert_eq!(world.store.counters(), 0, "a peek creates nothing");
            world.hit("k=1", 9).admitted(1);
            world.look("k=1").admitted(1);
            world.hit("k=1", 1).admitted(0);
            let peek = world.look("k=1");
            peek.refused(0);
            world.look("k=1").refused(0);
            assert!(peek.retry.is_some(), "{algorithm}: it is told when a hit fits");
            world.refund("k=1", 1);
            world.look("k=1").admitted(1);
            let world = World::new(&rule(&limit));
            world.hit("k=1", 10).admitted(0);
            world.look("k=1").admitted(0);
        }
    }
}

#[test]
fn a_limit_of_one_admits_who_calls_once_a_window_by_every_algorithm() {
    for (algorithm, _) in Algorithm::ALL {
        let world = World::new(&rule(&format!("window: 10s, requests_per_unit: 1, algorithm: {algorithm}")));
        for _ in 0..20 {
            let hit = world.hit("k=1", 1);
            hit.admitted(0);
            assert!(hit.reset <= micros("10001ms"), "{algorithm}: all is reset in {}", hit.reset);
            world.clock.advance("10001ms");
        }
    }
}

#[test]
fn a_sliding_window_that_is_polled_all_the_time_admits_its_limit_a_window() {
    for limit in [1, 2, 3, 5, 10] {
        let world = World::new(&rule(&format!("window: 500ms, requests_per_unit: {limit}, algorithm: sliding_window")));
        let mut admitted = 0;
        for _ in 0..20 * 500 {
            admitted += u32::from(!world.hit("k=1", 1).refused);
            world.clock.advance("1ms");
        }
        assert_eq!(admitted, 20 * limit, "a limit of {limit} in 20 windows");
    }
}
