//! Leases of the real binary on real servers.

use std::time::Duration;

use tidegate::proto::envoy::service::ratelimit::v3::rate_limit_response::Code;
use tidegate::proto::envoy::service::ratelimit::v3::rate_limit_service_client::RateLimitServiceClient;

use crate::faults::request;
use crate::load::{Calls, Load};
use crate::redis::Single;
use crate::redis::cluster::Cluster;
use crate::redis::proxy::{Faults, Proxy, Way};
use crate::support::{Tidegate, eventually, rule_file};

/// Hits a year of each rule.
const LIMIT: u32 = 100_000;
/// 5% of it.
const SHARE: u32 = LIMIT / 20;
const PATIENT: &str = "5s";
/// The algorithms that have leases; each is the key of a rule.
const ALGORITHMS: [&str; 5] = ["fixed_window", "sliding_window", "token_bucket", "leaky_bucket", "gcra"];

fn rules() -> String {
    let rule = |algorithm: &str| {
        format!(
            "  - {{ key: {algorithm}, rate_limit: {{ unit: year, requests_per_unit: {LIMIT}, algorithm: {algorithm} }} }}\n"
        )
    };
    let rules = ALGORITHMS.map(rule).concat();
    format!("domain: d\nlease: {{ share: 5%, ttl: 1s }}\non_store_overload: closed\ndescriptors:\n{rules}")
}

/// A Tidegate that lets Redis take so long, which is `auto` or more than this machine ever needs.
async fn tidegate(url: &str, kind: &str, deadline: &str) -> Tidegate {
    let rules = rule_file(&rules());
    let store = [("REDIS_URL", url), ("REDIS_TYPE", kind), ("STORE_DEADLINE", deadline)];
    Tidegate::start(rules.path(), &[&store[..], &[("REPLICAS", "1")]].concat()).await
}

/// Takes hits of the counter of each algorithm for a while, a thousand a second in all. All of them are admitted.
async fn load(server: &Tidegate, told: Duration, length: Duration) -> Calls {
    let requests = ALGORITHMS.map(|algorithm| request(algorithm, "busy")).to_vec();
    let load = Load::patient(server.grpc, requests, 1_000, told).await;
    tokio::time::sleep(length).await;
    load.stop().await
}

/// Returns the hits that are left of the counter of each algorithm, after one more each.
async fn remaining(server: &Tidegate) -> [u32; 5] {
    let mut client = RateLimitServiceClient::connect(format!("http://{}", server.grpc)).await.expect("it is there");
    let mut all = [0; 5];
    for (remaining, algorithm) in all.iter_mut().zip(ALGORITHMS) {
        let answer = client.should_rate_limit(request(algorithm, "busy")).await.expect("an answer").into_inner();
        *remaining = answer.statuses[0].limit_remaining;
    }
    all
}

fn admitted(calls: &Calls) -> [u32; 5] {
    let mut all = [0; 5];
    for call in calls.iter() {
        let answer = call.answer.as_ref().expect("an answer");
        assert_eq!(answer.overall_code(), Code::Ok, "{call:?}");
        all[call.request % ALGORITHMS.len()] += 1;
    }
    all
}

/// Returns the number of decisions of this provenance.
pub async fn decisions(server: &Tidegate, provenance: &str) -> f64 {
    let wanted = format!("provenance=\"{provenance}\"");
    let metrics = server.metrics().await;
    let lines = metrics.lines().filter(|line| line.starts_with("tidegate_decisions_total{") && line.contains(&wanted));
    lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
}

async fn a_stop_gives_back_what_is_left(url: &str, kind: &str, scripts: impl AsyncFn() -> u32) {
    let mut server = tidegate(url, kind, PATIENT).await;
    let before = scripts().await;
    let calls = load(&server, Duration::from_secs(10), Duration::from_secs(3)).await;
    let (admitted, scripts) = (admitted(&calls), scripts().await - before);
    let by_lease = decisions(&server, "lease").await;
    println!("{kind}: {} calls, {by_lease} by leases, {scripts} scripts", calls.count());
    assert!(by_lease > 0.9 * f64::from(admitted.iter().sum::<u32>()), "{by_lease} of {admitted:?} by leases");
    server.terminate();
    server.ended().await;
    let left = remaining(&tidegate(url, kind, PATIENT).await).await;
    assert_eq!(left, admitted.map(|admitted| LIMIT - admitted - 1), "what was admitted is charged, and nothing else");
}

#[tokio::test]
async fn leases_decide_most_calls_of_a_busy_counter_and_a_stop_gives_back_what_is_left() {
    let redis = Single::start(&[]).await;
    a_stop_gives_back_what_is_left(&redis.address().to_string(), "single", async || redis.scripts_run().await).await;
}

#[tokio::test]
async fn leases_of_a_cluster_decide_most_calls_and_a_stop_gives_back_what_is_left() {
    let cluster = Cluster::start().await;
    a_stop_gives_back_what_is_left(&cluster.addresses(), "cluster", async || cluster.scripts_run().await).await;
}

#[tokio::test]
async fn a_killed_instance_wastes_at_most_its_share() {
    let redis = Single::start(&[]).await;
    let url = redis.address().to_string();
    let mut server = tidegate(&url, "single", PATIENT).await;
    let calls = load(&server, Duration::from_secs(10), Duration::from_secs(2)).await;
    server.kill();
    server.ended().await;
    let left = remaining(&tidegate(&url, "single", PATIENT).await).await;
    for ((left, admitted), algorithm) in left.into_iter().zip(admitted(&calls)).zip(ALGORITHMS) {
        let wasted = (LIMIT - 1 - left).checked_sub(admitted).expect("what was admitted is charged");
        println!("{algorithm}: {admitted} admitted, {wasted} wasted");
        assert!(wasted <= SHARE, "{algorithm}: {wasted} wasted");
    }
}

#[tokio::test]
async fn a_redis_that_is_further_away_than_callers_wait_grants_leases_that_decide_in_its_place() {
    let redis = Single::start(&[]).await;
    let proxy = Proxy::start(redis.address()).await;
    proxy.set(Faults::both(Way::latency_ms(30)));
    let server = tidegate(&proxy.address().to_string(), "single", "auto").await;
    let told = Duration::from_millis(50);
    eventually("leases decide", async || {
        load(&server, told, Duration::from_millis(300))
            .await
            .iter()
            .all(|call| call.answer.as_ref().is_ok_and(|answer| answer.overall_code() == Code::Ok))
            .then_some(())
    })
    .await;
    let calls = load(&server, told, Duration::from_secs(3)).await;
    let all: u32 = admitted(&calls).iter().sum();
    println!("60 ms away: {all} calls, all by leases; p99 {:?}", calls.permille(990));
}
