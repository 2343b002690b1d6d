//! A Redis that answers what no Redis answers.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use tidegate::proto::envoy::service::ratelimit::v3::rate_limit_response::Code as Outcome;
use tidegate::proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use tokio::time::Instant;
use tonic::Code;

use super::{Asker, POLICIES, policies, request, rule_file, rules, tidegate, tidegate_with};
use crate::redis::Single;
use crate::redis::liar::{Liar, Lie, Then};
use crate::redis::sentinel::{MASTER, Sentinel};
use crate::support::{Tidegate, eventually};

/// The memory that may be taken beside what the calls take: 8 MiB. Without a bound it was 270 to 840 MB in 1.5 s.
const LITTLE: u64 = 8 << 20;
/// The memory that a map of the cluster may take: 8 MiB of the smallest values, at 56 bytes each, and a vector that grows.
const MAP: u64 = 160 << 20;
/// How long it lies: the time in which the memory was taken.
const LYING: Duration = Duration::from_millis(1_500);
/// The log line, once in ten seconds.
const CLOSED: &str = "store.connection.closed";
const TOO_LARGE: &str = "a reply larger than its request allows";

fn lie(word: &'static str, begin: &str, then: Then) -> Lie {
    Lie { word, begin: Arc::from(begin), then }
}

/// Lies about a request, the reasons in the metric, and in the log.
fn lies(word: &'static str) -> [(Lie, &'static str, &'static str); 8] {
    let nested =
        if word == "EVALSHA" { ("too_large", TOO_LARGE) } else { ("malformed", "bytes that are no reply of Redis") };
    [
        (lie(word, "+", Then::Endless("x")), "too_large", TOO_LARGE),
        (lie(word, "$536870912\r\n", Then::Endless("x")), "too_large", TOO_LARGE),
        (lie(word, "*1000000000\r\n", Then::Endless(":1\r\n")), "too_large", TOO_LARGE),
        (lie(word, "", Then::Endless("*1\r\n")), nested.0, nested.1),
        (lie(word, "", Then::Endless("*4096\r\n_\r\n")), "too_large", TOO_LARGE),
        (lie(word, "*1000000000\r\n$536870912\r\n", Then::Silence), "too_large", TOO_LARGE),
        (lie(word, "", Then::Endless("+OK\r\n")), "unasked", "a reply that nothing had asked for"),
        (lie(word, "", Then::Endless(">1\r\n+a\r\n")), "malformed", "bytes that are no reply of Redis"),
    ]
}

/// How many connections the metric says were ended for a reason.
async fn ended(server: &Tidegate, name: &str, reason: &str) -> u64 {
    let page = server.metrics().await;
    let series = format!("tidegate_store_bad_replies_total{{server=\"{name}\",reason=\"{reason}\"}} ");
    page.lines().find_map(|line| line.strip_prefix(&series)?.parse().ok()).unwrap_or(0)
}

/// A request of so many counters.
fn large(key: &str, counters: usize) -> RateLimitRequest {
    let descriptors = (0..counters).flat_map(|counter| request(key, &format!("{counters}-{counter}")).descriptors);
    RateLimitRequest { descriptors: descriptors.collect(), ..request(key, "") }
}

/// Asks for a hit under each policy, several at once; returns how many were answered by policy.
async fn ask_all(asker: &Asker, round: usize) -> usize {
    let calls = (0..16).map(async |call| {
        let policy = POLICIES[call % POLICIES.len()];
        let answer = asker.clone().ask(policy, &format!("{round}-{call}")).await;
        let outcome = answer.as_ref().map(RateLimitResponse::overall_code);
        match answer.as_ref().map(policies) {
            Err(code) => assert_eq!((policy, *code), ("error", Code::Unavailable)),
            Ok(by) if by.is_empty() => assert_eq!(outcome, Ok(Outcome::Ok)),
            Ok(by) => {
                let expected = if policy == "closed" { Outcome::OverLimit } else { Outcome::Ok };
                assert_eq!((by, outcome), (vec![policy.to_owned()], Ok(expected)));
            }
        }
        usize::from(answer.map_or(true, |answer| !policies(&answer).is_empty()))
    });
    join_all(calls).await.into_iter().sum()
}

#[tokio::test]
async fn a_redis_that_answers_charges_with_nonsense_takes_little_memory_and_the_policy_answers() {
    let redis = Single::start(&[]).await;
    join_all(lies("EVALSHA").map(async |(lie, reason, said)| {
        let liar = Liar::start(redis.address()).await;
        let name = liar.address().to_string();
        let server = tidegate(&name).await;
        let mut asker = Asker::of(&server).await;
        asker.decided("closed", &format!("before {name}")).await;
        let before = server.peak_memory();
        liar.lies(&lie);
        let (mut round, mut by_policy, until) = (0, 0, Instant::now() + LYING);
        while Instant::now() < until {
            by_policy += ask_all(&asker, round).await;
            round += 1;
        }
        let (taken, log) = (server.peak_memory().saturating_sub(before), server.log());
        let count = ended(&server, &name, reason).await;
        println!("{lie:?}: {taken} bytes, {count} connections ended, {by_policy} of {} by policy", 16 * round);
        assert_eq!(by_policy, 16 * round, "nothing was counted");
        assert!(taken <= LITTLE, "{lie:?}: {taken} bytes");
        assert!(count > 0, "{lie:?}: {}", server.metrics().await);
        let line = log.lines().find(|line| line.contains(CLOSED)).unwrap_or_else(|| panic!("{lie:?}: {log}"));
        assert!(line.contains(said) && line.contains(&name), "{line}");
        assert!(log.matches(CLOSED).count() == 1 && !log.contains("store.connection.lost"), "it is said once: {log}");
        liar.is_honest();
        assert!(asker.decided("closed", &format!("after {name}")).await);
    }))
    .await;
}

#[tokio::test]
async fn a_redis_that_greets_with_nonsense_takes_little_memory_and_is_tried_again() {
    let redis = Single::start(&[]).await;
    let greeted = async |(lie, reason, said): (Lie, &str, &str)| {
        let liar = Liar::start(redis.address()).await;
        let name = liar.address().to_string();
        let server = tidegate(&name).await;
        let mut asker = Asker::of(&server).await;
        asker.decided("open", "before").await;
        let before = server.peak_memory();
        liar.lies(&lie);
        // Where connections are lost, new ones are made.
        redis.cli(&["CLIENT", "KILL", "TYPE", "normal"]).await;
        eventually("the log says it", async || {
            let answer = asker.ask("open", "meanwhile").await.expect("the policy answers");
            assert!(policies(&answer).is_empty() || policies(&answer) == ["open"]);
            server
                .log()
                .lines()
                .any(|line| line.contains("cannot connect") && line.contains(&format!("{name} sent {said}")))
                .then_some(())
        })
        .await;
        let taken = server.peak_memory().saturating_sub(before);
        assert!(taken <= LITTLE, "{lie:?}: {taken} bytes");
        assert!(ended(&server, &name, reason).await > 0, "{lie:?}");
        liar.is_honest();
        asker.decided("open", "after").await;
    };
    join_all(lies("HELLO").map(&greeted)).await;
    join_all(lies("SCRIPT").map(&greeted)).await;
}

#[tokio::test]
async fn a_sentinel_that_answers_nonsense_takes_little_memory_and_the_next_is_asked() {
    let set = Sentinel::start().await;
    let [first, others @ ..] = set.sentinels() else { panic!("there are some") };
    let liar = Liar::start(first.address()).await;
    let (lie, _, said) = lies("SENTINEL")[1].clone();
    liar.lies(&lie);
    let url = |addresses: Vec<std::net::SocketAddr>| {
        let addresses = addresses.iter().map(ToString::to_string);
        [MASTER.to_owned()].into_iter().chain(addresses).collect::<Vec<_>>().join(",")
    };
    let rules = rules("fixed_window");
    let all = [vec![liar.address()], others.iter().map(Single::address).collect()].concat();
    let server = tidegate_with(rules.path(), &[("REDIS_TYPE", "sentinel"), ("REDIS_URL", &url(all))]).await;
    Asker::of(&server).await.decided("open", "a").await;

    let alone = url(vec![liar.address()]);
    let server = tidegate_with(rules.path(), &[("REDIS_TYPE", "sentinel"), ("REDIS_URL", &alone)]).await;
    let mut asker = Asker::of(&server).await;
    let before = server.peak_memory();
    eventually("the log says it", async || {
        assert_eq!(policies(&asker.ask("open", "b").await.expect("the policy answers")), ["open"]);
        server.log().contains(&format!("{} sent {said}", liar.address())).then_some(())
    })
    .await;
    assert!(server.peak_memory().saturating_sub(before) <= LITTLE);
    assert!(ended(&server, &format!("sentinels' {MASTER}"), "too_large").await > 0);
    liar.is_honest();
    asker.decided("open", "b").await;
}

/// A map of the cluster with a line for each slot, and the same node so many times in each; its epoch before it.
fn map(node: std::net::SocketAddr, nodes: usize) -> String {
    let (host, port) = (node.ip().to_string(), node.port());
    let node = format!("*4\r\n${}\r\n{host}\r\n:{port}\r\n$40\r\n{port:040}\r\n*0\r\n", host.len());
    let line = |slot: usize| format!("*{}\r\n:{slot}\r\n:{slot}\r\n{}", 2 + nodes, node.repeat(nodes));
    let lines: String = (0..16_384).map(line).collect();
    let info = "cluster_state:ok\r\ncluster_current_epoch:7\r\n";
    format!("${}\r\n{info}\r\n*16384\r\n{lines}", info.len())
}

#[tokio::test]
async fn a_map_of_the_cluster_is_read_up_to_8_mib_and_no_further() {
    let redis = Single::start(&[]).await;
    let liar = Liar::start(redis.address()).await;
    let name = liar.address().to_string();
    let given = [("REDIS_TYPE", "cluster"), ("REDIS_URL", name.as_str()), ("REDIS_TIMEOUT", "10s")];
    let largest = map(liar.address(), 6);
    assert!((7 << 20..8 << 20).contains(&largest.len()), "{} bytes", largest.len());
    liar.lies(&Lie { word: "CLUSTER", begin: largest.into(), then: Then::Truth });
    let rules = rules("fixed_window");
    let server = tidegate_with(rules.path(), &given).await;
    assert!(Asker::of(&server).await.decided("open", "a").await);
    assert_eq!(ended(&server, &name, "too_large").await, 0, "{}", server.log());

    for (begin, then, reason) in [
        ("$5\r\nhello\r\n*1048576\r\n", Then::Endless("_\r\n"), "unasked"),
        ("$5\r\nhello\r\n*1000000000\r\n", Then::Endless("_\r\n"), "too_large"),
        ("$5\r\nhello\r\n+", Then::Endless("x"), "too_large"),
    ] {
        let lie = lie("CLUSTER", begin, then);
        liar.is_honest();
        let server = tidegate_with(rules.path(), &given).await;
        let mut asker = Asker::of(&server).await;
        let before = server.peak_memory();
        liar.lies(&lie);
        eventually("it is refused", async || {
            assert_eq!(policies(&asker.ask("open", "b").await.expect("the policy answers")), ["open"]);
            (ended(&server, &name, reason).await > 2).then_some(())
        })
        .await;
        let taken = server.peak_memory().saturating_sub(before);
        println!("{lie:?}: {taken} bytes");
        assert!(taken <= MAP, "{lie:?}: {taken} bytes");
        assert!(server.log().contains(CLOSED), "{}", server.log());
    }
}

#[tokio::test]
async fn the_replies_to_the_largest_requests_are_never_refused() {
    let redis = Single::start(&[]).await;
    for charging in ["each", "all_or_nothing"] {
        let rule = "{ key: k, rate_limit: { unit: year, requests_per_unit: 5, algorithm: gcra } }";
        let rules = rule_file(&format!("domain: d\ncharging: {charging}\ndescriptors:\n  - {rule}\n"));
        let address = redis.address().to_string();
        let server = tidegate_with(rules.path(), &[("REDIS_URL", &address), ("STORE_DEADLINE", "10s")]).await;
        let calls = (1..=20)
            .flat_map(|_| [1_000, 2_500])
            .map(async |counters| Asker::of(&server).await.request(large("k", counters)).await.expect("it is decided"));
        for answer in join_all(calls).await {
            assert_eq!(policies(&answer), Vec::<String>::new(), "{}", server.log());
        }
        for reason in ["too_large", "malformed", "unasked"] {
            assert_eq!(ended(&server, &address, reason).await, 0);
        }
    }
}
