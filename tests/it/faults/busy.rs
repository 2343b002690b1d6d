//! A Redis that has more to do than it can: it decides what it can, and what it has refused stays refused.

use std::time::Duration;

use tempfile::NamedTempFile;
use tidegate::proto::envoy::service::ratelimit::v3::RateLimitRequest;
use tidegate::proto::envoy::service::ratelimit::v3::rate_limit_response::Code as Outcome;

use super::{Asker, ENVOY, is_counted, lasting, metric, openings, request, rule_file};
use crate::load::{Calls, Load, alone};
use crate::redis::Single;
use crate::redis::paced::Paced;
use crate::support::{Tidegate, eventually};

/// Scripts that the server executes in a second.
const CAPACITY: u32 = 400;
/// Calls in a second: more than it can decide.
const OFFERED: u32 = 1_600;
/// Every fourth call is of one client, who is at its limit.
const VICTIM: usize = 4;

const RULES: &str = "domain: d
descriptors:
  - { key: user, rate_limit: { unit: day, requests_per_unit: 1000 } }
  - { key: victim, rate_limit: { unit: day, requests_per_unit: 3 } }
  - { key: gcra, rate_limit: { unit: day, requests_per_unit: 3, algorithm: gcra } }
  - { key: shared, rate_limit: { unit: day, requests_per_unit: 600 } }
  - { key: local, on_store_failure: local, rate_limit: { unit: day, requests_per_unit: 65 } }
";
/// The limit of `shared`.
const SHARED: usize = 600;
/// The limit of `local`: no multiple of the number of instances.
const LOCAL: usize = 65;

fn call(number: usize) -> RateLimitRequest {
    match number % VICTIM {
        0 => request(if number.is_multiple_of(2 * VICTIM) { "victim" } else { "gcra" }, "one"),
        _ => request("user", &number.to_string()),
    }
}

fn is_of_victim(request: usize) -> bool {
    request.is_multiple_of(VICTIM)
}

async fn start(rules: &NamedTempFile, redis: &Paced) -> Tidegate {
    let url = redis.address().to_string();
    Tidegate::start(rules.path(), &[("REDIS_URL", &url), ("REPLICAS", "1"), ("LOG_LEVEL", "warn")]).await
}

/// Asks until a client is at its limit.
async fn exhaust(server: &Tidegate, key: &str) {
    let mut asker = Asker::of(server).await;
    while asker.decided(key, "one").await {}
}

/// Waits until Redis has all hits that an instance admitted while Redis was busy.
async fn charged_later(server: &Tidegate) {
    eventually("hits are charged later", async || {
        let page = server.metrics().await;
        let backlog = page.lines().find_map(|line| line.strip_prefix("tidegate_later_charges "));
        (backlog.expect("the metric is on the page") == "0").then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_redis_at_its_limit_goes_on_deciding_and_who_was_refused_stays_refused() {
    let _alone = alone().await;
    let redis = Single::start(&[]).await;
    let paced = Paced::start(redis.address(), CAPACITY);
    let rules = rule_file(RULES);
    let server = start(&rules, &paced).await;
    for key in ["victim", "gcra"] {
        exhaust(&server, key).await;
    }
    let load = Load::patient(server.grpc, (0..40_000).map(call).collect(), OFFERED, ENVOY).await;
    lasting(Duration::from_secs(3)).await;
    let (before, from) = (paced.scripts(), load.elapsed());
    lasting(Duration::from_secs(4)).await;
    let (passed, to) = (paced.scripts() - before, load.elapsed());
    // The server is ten times slower for a while.
    paced.set(CAPACITY / 10);
    lasting(Duration::from_secs(2)).await;
    paced.set(CAPACITY);
    lasting(Duration::from_secs(2)).await;
    let calls = load.stop().await;
    let failed: Vec<_> = calls.iter().filter_map(|call| call.answer.as_ref().err()).collect();
    assert!(failed.is_empty(), "overload is no error: {failed:?}");
    let victims = calls.such_that(|call| is_of_victim(call.request));
    assert_eq!(victims.answered(Outcome::Ok), 0, "of {} calls of refused clients", victims.count());
    assert_eq!(openings(&server), 0, "a busy server is not down");
    let counted = |calls: &Calls| calls.such_that(|call| is_counted(call) && !is_of_victim(call.request)).count();
    let decided = counted(&calls.between(from, to));
    println!("{decided} decisions of {passed} scripts that the server executed, p99 {:?}", calls.permille(990));
    assert!(decided as u64 * 4 >= passed, "{decided} of {passed}: it decides");
    let log = server.log();
    assert!(log.contains("store.overloaded"), "{log}");
    assert!(metric(&server, "tidegate_later_charges").await > 0.0, "hits wait to be charged");
    charged_later(&server).await;
    assert!(metric(&server, "tidegate_known_refusals_total").await > 0.0);
    let after = Load::patient(server.grpc, (40_000..41_000).map(call).collect(), CAPACITY / 4, ENVOY).await;
    super::exact(&after, Duration::ZERO).await;
}

#[tokio::test]
async fn a_client_that_is_refused_and_goes_on_costs_redis_two_commands_a_second() {
    let _alone = alone().await;
    let redis = Single::start(&[]).await;
    let paced = Paced::start(redis.address(), 100_000);
    let rules = rule_file(RULES);
    let server = start(&rules, &paced).await;
    exhaust(&server, "victim").await;
    let (before, load) =
        (paced.scripts(), Load::patient(server.grpc, vec![request("victim", "one")], 1_000, ENVOY).await);
    lasting(Duration::from_secs(4)).await;
    let length = load.elapsed();
    let calls = load.stop().await;
    let scripts = paced.scripts() - before;
    assert_eq!(calls.answered(Outcome::OverLimit), calls.count(), "every call is refused");
    // The first second may have a part at either end.
    let most = 2 * (length.as_secs() + 2);
    assert!(scripts <= most, "{scripts} commands in {length:?} for {} calls", calls.count());
    // A fixed window counts refused hits as well, so that a raised limit finds them.
    eventually("refused hits are counted", async || {
        let counted = redis.counter("{d|victim=one}fixed_window:1d").await;
        let hits: usize = counted.rsplit_once(' ')?.1.parse().ok()?;
        (hits > calls.count()).then_some(())
    })
    .await;
}

#[tokio::test]
async fn three_instances_of_a_redis_at_its_limit_admit_at_most_one_limit_more_and_charge_it_later() {
    let _alone = alone().await;
    let redis = Single::start(&[]).await;
    let paced = Paced::start(redis.address(), CAPACITY);
    let (rules, url) = (rule_file(RULES), paced.address().to_string());
    let variables = [("REDIS_URL", url.as_str()), ("REPLICAS", "3"), ("LOG_LEVEL", "warn")];
    let begin = async || Tidegate::start(rules.path(), &variables).await;
    let servers = [begin().await, begin().await, begin().await];
    // Every third call is of the client that all three limit.
    let is_shared = |request: usize| request.is_multiple_of(3);
    let call = |instance: usize, number: usize| match is_shared(number) {
        true => request("shared", "one"),
        false => request("user", &format!("{instance} {number}")),
    };
    let mut loads = Vec::new();
    for (instance, server) in servers.iter().enumerate() {
        let requests = (0..20_000).map(|number| call(instance, number)).collect();
        loads.push(Load::patient(server.grpc, requests, OFFERED / 3, ENVOY).await);
    }
    lasting(Duration::from_secs(5)).await;
    let (mut admitted, mut by_policy) = (0, 0);
    for load in loads {
        let calls = load.stop().await;
        assert_eq!(calls.failed(), 0, "overload is no error");
        let shared = calls.such_that(|call| is_shared(call.request));
        admitted += shared.answered(Outcome::Ok);
        by_policy += shared.such_that(|call| !is_counted(call)).answered(Outcome::Ok);
    }
    println!("{admitted} admitted of a limit of {SHARED}, {by_policy} of them by the policy of three instances");
    assert!(by_policy > 0, "it was overloaded");
    assert!(admitted <= 2 * SHARED, "one limit more at most");
    for server in &servers {
        charged_later(server).await;
    }
    let counter = redis.counter("{d|shared=one}fixed_window:1d").await;
    let hits: usize = counter.rsplit_once(' ').and_then(|(_, hits)| hits.parse().ok()).expect("a counter");
    assert!(hits >= admitted.min(SHARED), "{hits} charged of {admitted}");
}

/// Waits until an instance knows how many run.
async fn counts(server: &Tidegate, instances: f64) {
    eventually("the instances are counted", async || {
        let page = server.metrics().await;
        let line = page.lines().find(|line| line.starts_with("tidegate_replicas{source=\"counted\"}"))?;
        (line.rsplit_once(' ')?.1.parse() == Ok(instances)).then_some(())
    })
    .await;
}

#[tokio::test]
async fn instances_count_themselves() {
    let redis = Single::start(&[]).await;
    let rules = rule_file(RULES);
    let url = redis.address().to_string();
    let begin = async || Tidegate::start(rules.path(), &[("REDIS_URL", &url)]).await;
    let (one, other) = (begin().await, begin().await);
    counts(&one, 2.0).await;
    counts(&other, 2.0).await;
    let third = begin().await;
    counts(&one, 3.0).await;
    drop((other, third));
    counts(&one, 1.0).await;
    assert_eq!(redis.cli(&["ZCARD", "{tidegate}instances"]).await, "1");
}

#[tokio::test]
async fn two_instances_that_became_six_admit_one_limit_together_when_redis_goes() {
    let redis = Single::start(&[]).await;
    let (rules, url) = (rule_file(RULES), redis.address().to_string());
    let begin = async || Tidegate::start(rules.path(), &[("REDIS_URL", &url)]).await;
    let mut servers = vec![begin().await, begin().await];
    for server in &servers {
        counts(server, 2.0).await;
    }
    while servers.len() < 6 {
        servers.push(begin().await);
    }
    for server in &servers {
        counts(server, 6.0).await;
    }
    drop(redis);
    let mut admitted = 0;
    for server in &servers {
        let mut asker = Asker::of(server).await;
        for _ in 0..LOCAL {
            let answer = asker.ask("local", "one").await.expect("the policy answers");
            admitted += usize::from(answer.overall_code() == Outcome::Ok);
        }
    }
    println!("six instances admitted {admitted} of a limit of {LOCAL}");
    assert!((LOCAL - 6..=LOCAL * 11 / 10).contains(&admitted), "{admitted} of {LOCAL}");
}
