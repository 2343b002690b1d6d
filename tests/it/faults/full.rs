//! A client that is refused goes on, with made-up users, until Redis is full.

use std::time::Duration;

use futures_util::future::join_all;
use tidegate::proto::envoy::service::ratelimit::v3::RateLimitRequest;
use tokio::time::Instant;

use super::{Asker, Outcome, policies, request, rule_file, tidegate_with};
use crate::redis::Single;
use crate::redis::cluster::Cluster;
use crate::support::eventually;

/// Windows of a second that the attack lasts.
const WINDOWS: u64 = 6;
/// The limit of the address in a window.
const LIMIT: u64 = 20;
/// Callers at once.
const CALLERS: usize = 16;

/// The rules of an edge with each limit on its own: by the address, and by a user that the client makes up. All policies are the defaults.
fn rules(charging: &str) -> tempfile::NamedTempFile {
    rule_file(&format!(
        "domain: d\ncharging: {charging}\ndescriptors:\n  \
         - {{ key: remote_address, rate_limit: {{ window: 1s, requests_per_unit: {LIMIT} }} }}\n  \
         - {{ key: user, rate_limit: {{ unit: day, requests_per_unit: 1000 }} }}\n",
    ))
}

/// A request of the address, which says that it is of this user.
fn made_up(user: &str) -> RateLimitRequest {
    of("198.51.100.7", user)
}

/// A request of an address and a user.
fn of(address: &str, user: &str) -> RateLimitRequest {
    let mut request = request("remote_address", address);
    request.descriptors.extend(self::request("user", user).descriptors);
    request
}

async fn used_bytes(redis: &Single) -> u64 {
    let memory = redis.cli(&["INFO", "memory"]).await;
    let used = memory.lines().find_map(|line| line.strip_prefix("used_memory:")).expect("it says");
    used.trim().parse().expect("a number")
}

/// Counters of users.
async fn users(redis: &Single) -> usize {
    redis.cli(&["KEYS", "*user=*"]).await.lines().filter(|line| !line.is_empty()).count()
}

/// What passes of an attack of so many windows, behind a caller that lets errors pass, and the calls.
async fn attack(asker: &Asker, windows: u64) -> (u64, usize) {
    let until = Instant::now() + Duration::from_secs(windows);
    let callers = (0..CALLERS).map(|caller| {
        let mut asker = asker.clone();
        async move {
            let (mut passed, mut calls) = (0, 0);
            while Instant::now() < until {
                let answer = asker.request(made_up(&format!("{caller}-{calls}"))).await;
                passed += u64::from(answer.map_or(true, |answer| answer.overall_code() == Outcome::Ok));
                calls += 1;
            }
            (passed, calls)
        }
    });
    join_all(callers).await.into_iter().fold((0, 0), |(passed, all), (more, calls)| (passed + more, all + calls))
}

#[tokio::test]
async fn a_client_that_is_refused_fills_redis_with_made_up_users_and_gains_nothing() {
    for (charging, has_two) in [("each", false), ("each", true), ("all_or_nothing", false)] {
        let redis = Single::start(&["--maxmemory", "2mb", "--maxmemory-policy", "noeviction"]).await;
        let other = Single::start(&[]).await;
        let (url, other) = (redis.address().to_string(), other.address().to_string());
        let mut variables = vec![("REDIS_URL", url.as_str()), ("STORE_DEADLINE", "10s")];
        if has_two {
            // The counter of the address is at another server than those of the users.
            variables.extend([("REDIS_PERSECOND", "true"), ("REDIS_PERSECOND_URL", other.as_str())]);
        }
        let rules = rules(charging);
        let server = tidegate_with(rules.path(), &variables).await;
        let mut asker = Asker::of(&server).await;
        assert!(asker.decided("user", "first").await);
        let began = Instant::now();
        let (passed, calls) = attack(&asker, WINDOWS).await;
        // A window more where the attack begins in the middle of one.
        let windows = began.elapsed().as_secs() + 2;
        let (made, used) = (users(&redis).await, used_bytes(&redis).await);
        println!(
            "{charging}: {passed} of {calls} passed in {windows} windows, {made} users have counters, {used} bytes"
        );
        assert!(passed <= windows * LIMIT, "{passed} of {calls} passed in {windows} windows");
        assert!(passed >= (windows - 4) * LIMIT, "{passed} of {calls} passed in {windows} windows");
        assert!(used < (2_048 + 256) * 1_024, "{used} bytes");
        if charging == "all_or_nothing" {
            assert!(u64::try_from(made).expect("few") <= passed + 1, "{made} users have counters, {passed} passed");
        }
        let log = server.log();
        assert!(!log.contains("store.script.refused") && !log.contains("store.breaker.opened"), "{log}");
    }
}

#[tokio::test]
async fn what_is_admitted_while_redis_is_full_is_charged_when_it_has_memory_again() {
    let redis = Single::start(&[]).await;
    let url = redis.address().to_string();
    let server = tidegate_with(rules("each").path(), &[("REDIS_URL", &url), ("STORE_DEADLINE", "10s")]).await;
    let mut asker = Asker::of(&server).await;
    assert!(asker.decided("user", "there").await);
    assert_eq!(redis.cli(&["CONFIG", "SET", "maxmemory", "1"]).await, "OK");
    for _ in 0..3 {
        let answer = asker.request(request("user", "new")).await.expect("no error");
        assert_eq!((answer.overall_code(), policies(&answer)), (Outcome::Ok, vec!["local".to_owned()]));
        assert!(asker.decided("user", "there").await, "it is charged in its place");
    }
    assert_eq!(users(&redis).await, 1);
    let failures = "tidegate_store_failures_total{server=\"127.0.0.1";
    let page = server.metrics().await;
    let counted = page.lines().find(|line| line.starts_with(failures) && line.contains("reason=\"out_of_memory\""));
    assert!(counted.is_some_and(|line| !line.ends_with(" 0")), "{page}");
    assert_eq!(redis.cli(&["CONFIG", "SET", "maxmemory", "0"]).await, "OK");
    // Each question takes a hit too.
    let mut asked = 0;
    eventually("all three hits are charged", async || {
        let answer = asker.request(request("user", "new")).await.ok().filter(|answer| policies(answer).is_empty())?;
        asked += 1;
        let remaining = answer.statuses.first()?.limit_remaining;
        (remaining + asked == 1_000 - 3).then_some(())
    })
    .await;
    let answer = asker.request(request("user", "there")).await.expect("no error");
    assert_eq!(answer.statuses[0].limit_remaining, 995, "the fifth");
}

#[tokio::test]
async fn in_a_cluster_with_little_memory_a_refused_request_makes_no_counter_in_any_slot_and_an_admitted_one_makes_all()
{
    let cluster = Cluster::start().await;
    let masters: Vec<_> = cluster.shards().await.iter().map(|shard| shard.master).collect();
    for &master in &masters {
        // 20 MiB of another application, and 1 MiB is free.
        let (node, key) = (&cluster.nodes()[master], cluster.key_of(master, "other").await);
        assert_eq!(node.cli(&["SETRANGE", &key, "20971519", "x"]).await, "20971520");
        let bytes = (used_bytes(node).await + (1 << 20)).to_string();
        assert_eq!(node.cli(&["CONFIG", "SET", "maxmemory", &bytes]).await, "OK");
    }
    let all_users = async || {
        let counted = join_all(masters.iter().map(|&master| users(&cluster.nodes()[master]))).await;
        counted.into_iter().sum::<usize>()
    };
    let rules = rule_file(
        "domain: d\ndescriptors:\n  \
         - { key: remote_address, remember_refusals: false, rate_limit: { unit: day, requests_per_unit: 1 } }\n  \
         - { key: user, rate_limit: { unit: day, requests_per_unit: 1000 } }\n",
    );
    let addresses = cluster.addresses();
    let variables = [("REDIS_TYPE", "cluster"), ("REDIS_URL", &addresses), ("STORE_DEADLINE", "10s")];
    let server = tidegate_with(rules.path(), &variables).await;
    let asker = Asker::of(&server).await;
    eventually("the cluster decides", async || {
        let answer = asker.clone().request(request("user", "hello")).await.ok()?;
        policies(&answer).is_empty().then_some(())
    })
    .await;
    let ask = async |address: &str, user: &str| {
        let answer = asker.clone().request(of(address, user)).await.expect("no error");
        assert!(policies(&answer).is_empty(), "{answer:?}");
        (answer.overall_code(), answer.statuses[1].limit_remaining)
    };
    assert_eq!(ask("spent", "there").await, (Outcome::Ok, 999));
    let mut round = 0;
    eventually("the memory of the masters is known, and refused requests make no counters", async || {
        round += 1;
        let before = all_users().await;
        for user in 0..20 {
            assert_eq!(ask("spent", &format!("refused-{round}-{user}")).await, (Outcome::OverLimit, 999));
        }
        (all_users().await == before).then_some(())
    })
    .await;
    // The counter that is there is charged beside the refusal.
    assert_eq!(ask("spent", "there").await, (Outcome::OverLimit, 998));
    assert_eq!(ask("spent", "there").await, (Outcome::OverLimit, 997));
    // Each counter of an admitted request is made and charged once.
    let before = all_users().await;
    for user in 0..20 {
        let user = user.to_string();
        assert_eq!(ask(&format!("first-{user}"), &user).await, (Outcome::Ok, 999));
        assert_eq!(ask(&format!("second-{user}"), &user).await, (Outcome::Ok, 998));
        assert_eq!(ask(&format!("first-{user}"), &user).await, (Outcome::OverLimit, 997));
    }
    assert_eq!(all_users().await, before + 20);
}
