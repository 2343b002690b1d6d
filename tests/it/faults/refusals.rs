//! A Redis that is there and refuses: out of memory, busy, without the script, without permission, with other values.

use std::time::Duration;

use futures_util::future::join_all;
use tempfile::NamedTempFile;
use tokio::join;

use super::{
    Asker, Books, LIMIT, MOST_CALLS, POLICIES, assert_policies, exact, failing, is_counted, lasting, late, load,
    load_of, openings, patient_tidegate, policies, report, report_restored, request, restored, rule_file, rules,
    rules_and, settled, start_load, tidegate, tidegate_with,
};
use crate::load::alone;
use crate::redis::Single;
use crate::redis::certificates::Authority;
use crate::support::{PATIENCE, eventually};

/// Calls in a second where none may be answered by policy: with more of them a pause of this machine fills the 256 places
/// there are for calls to one server.
const STEADY: u32 = 300;

/// The value of counters that are at their limit, and of no call of a load.
const SPENT: &str = "99999";

/// The name of a counter.
fn counter(key: &str, value: &str) -> String {
    let counts = if key == "gcra" { "gcra:1h" } else { "fixed_window:365d" };
    format!("{{d|{key}={value}}}{counts}")
}

/// Waits until a server says this to a command.
async fn says(server: &Single, command: &[&str], what: &str) {
    eventually(what, async || server.cli(command).await.contains(what).then_some(())).await;
}

/// The numbers of a server's connections, but for that of who asks.
async fn connections(server: &Single) -> Vec<String> {
    let list = server.cli(&["CLIENT", "LIST"]).await;
    let others = list.lines().filter(|line| !line.contains("cmd=client"));
    others.filter_map(|line| line.split_whitespace().next()).map(str::to_owned).collect()
}

#[tokio::test]
async fn a_redis_without_memory_still_refuses_who_is_over_the_limit() {
    let _alone = alone().await;
    let redis = Single::start(&[]).await;
    let (rules, url) = (rules_and("fixed_window", &["gcra"]), redis.address().to_string());
    let server = tidegate_with(rules.path(), &[("REDIS_URL", &url)]).await;
    let load = load(&server).await;
    let mut asker = Asker::of(&server).await;
    let keys = || POLICIES.into_iter().chain(["gcra"]);
    for key in keys() {
        assert_eq!(asker.admitted(key, SPENT, LIMIT).await, LIMIT, "{key}");
    }
    let before = connections(&redis).await;
    assert_eq!(redis.cli(&["CONFIG", "SET", "maxmemory", "1"]).await, "OK");
    let broken = load.elapsed();
    failing(&load, broken).await;
    for key in keys() {
        assert_eq!(asker.admitted(key, SPENT, 10).await, 0, "{key}");
    }
    // Beside one that is refused, what is not there is not made, so no memory is missing for it, and the request is refused.
    let mut both = request("open", "fresh");
    both.descriptors.extend(request("open", SPENT).descriptors);
    let answer = asker.request(both).await.expect("no error");
    let [fresh, spent] = answer.statuses.as_slice() else { panic!("{answer:?}") };
    assert_eq!([answer.overall_code, fresh.code, spent.code], [2, 1, 2], "{answer:?}");
    assert!(policies(&answer).is_empty(), "{answer:?}");
    let healed = load.elapsed();
    assert_eq!(connections(&redis).await, before, "none is made anew");
    assert_eq!(redis.cli(&["CONFIG", "SET", "maxmemory", "0"]).await, "OK");
    let restored_at = load.elapsed();
    exact(&load, restored_at).await;
    let calls = load.stop().await;
    assert_policies(&calls);
    let during = calls.such_that(|call| call.made >= broken && call.answered <= healed);
    assert_eq!(during.such_that(is_counted).count(), 0, "nothing can be charged");
    for key in keys() {
        redis.cli(&["DEL", &counter(key, SPENT)]).await;
    }
    let books = Books::of(&redis).await;
    assert_eq!((books.double(&calls), books.forgotten(&calls)), (0, 0));
    // What `local` admits is charged when there is memory again.
    let others = calls.such_that(|call| POLICIES[call.request % POLICIES.len()] != "local");
    assert_eq!((late(&books, &others, broken, healed), openings(&server)), (0, 0));
    report("A6 out of memory", &during, "who is over the limit is refused by the store");
    report_restored("A6 out of memory", restored(&calls, restored_at));
    let log = server.log();
    assert!(log.contains("store.out_of_memory") && !log.contains("store.script.refused"), "{log}");
}

#[tokio::test]
async fn a_request_refused_for_a_counter_that_cannot_be_read_spends_nothing() {
    let redis = Single::start(&[]).await;
    let limit = "rate_limit: { unit: year, requests_per_unit: 10 }";
    let rules = rule_file(&format!(
        "domain: d\ncharging: all_or_nothing\ndescriptors:\n  - {{ key: read, {limit} }}\n  \
         - {{ key: foreign, on_store_failure: closed, {limit} }}\n",
    ));
    let url = redis.address().to_string();
    let server = tidegate_with(rules.path(), &[("REDIS_URL", &url), ("STORE_DEADLINE", "10s")]).await;
    let mut asker = Asker::of(&server).await;
    let look = || {
        let mut look = request("read", "v");
        look.descriptors[0].hits_addend = Some(0);
        look
    };
    eventually("Redis decides", async || asker.request(look()).await.ok()).await;
    assert_eq!(redis.cli(&["RPUSH", &counter("foreign", "v"), "not ours"]).await, "1");
    let mut both = request("read", "v");
    both.descriptors.extend(request("foreign", "v").descriptors);
    for _ in 0..3 {
        let answer = asker.request(both.clone()).await.expect("no error");
        assert_eq!(answer.overall_code, 2, "{answer:?}");
    }
    eventually("the readable counter has all that it had", async || {
        let answer = asker.request(look()).await.expect("no error");
        (answer.statuses[0].limit_remaining == 10).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_redis_that_says_busy_to_each_call_opens_the_breaker() {
    let _alone = alone().await;
    let redis = Single::start(&["--busy-reply-threshold", "100"]).await;
    let server = tidegate(&redis.address().to_string()).await;
    assert!(Asker::of(&server).await.decided("open", "v").await);
    let script = redis.cli(&["EVAL", "while true do end", "0"]);
    let opened = async {
        says(&redis, &["PING"], "BUSY").await;
        // No call of it waits in vain: each is told so at once.
        let load = start_load(&server).await;
        eventually("the breaker opens", async || (openings(&server) > 0).then_some(())).await;
        assert_eq!(redis.cli(&["SCRIPT", "KILL"]).await, "OK");
        load.stop().await
    };
    let (_, calls) = join!(script, opened);
    assert_policies(&calls);
}

#[tokio::test]
async fn a_redis_that_says_to_each_call_that_it_loads_opens_the_breaker() {
    let _alone = alone().await;
    let redis = Single::slow_to_load(40_000).await;
    // No call waits in vain, so that no connection is lost, and each is told so.
    let server = patient_tidegate(&redis.address().to_string()).await;
    let load = load_of(&server, STEADY, PATIENCE).await;
    exact(&load, Duration::ZERO).await;
    // On live connections.
    let loading = redis.cli(&["DEBUG", "RELOAD"]);
    let (_, ()) = join!(loading, async {
        eventually("the breaker opens", async || (openings(&server) > 0).then_some(())).await;
        assert!(redis.cli(&["GET", "key:0"]).await.contains("LOADING"), "it opens while Redis loads");
    });
    assert_policies(&load.stop().await);
}

#[tokio::test]
async fn a_script_that_is_flushed_is_loaded_once_and_every_answer_stays_exact() {
    const FLUSHES: usize = 30;
    const AT_ONCE: usize = 64;
    let _alone = alone().await;
    let redis = Single::start(&[]).await;
    let server = patient_tidegate(&redis.address().to_string()).await;
    let load = load_of(&server, STEADY, PATIENCE).await;
    exact(&load, Duration::ZERO).await;
    let before = uploads(&redis).await;
    let broken = load.elapsed();
    let asker = Asker::of(&server).await;
    for flush in 0..FLUSHES {
        assert_eq!(redis.cli(&["SCRIPT", "FLUSH"]).await, "OK");
        // All these need the script at once.
        let asked = join_all((0..AT_ONCE).map(async |number| {
            let value = (MOST_CALLS + flush * AT_ONCE + number).to_string();
            asker.clone().ask("open", &value).await
        }));
        for answer in asked.await {
            assert!(policies(&answer.expect("no error")).is_empty());
        }
        lasting(Duration::from_millis(100)).await;
    }
    let healed = load.elapsed();
    exact(&load, healed).await;
    let uploads = uploads(&redis).await - before;
    let (calls, _) = settled(load, &redis).await;
    let during = calls.between(broken, healed);
    let missed = during.such_that(|call| !is_counted(call)).count();
    let what = format!("A12 {FLUSHES} flushes in {:.1} s", (healed - broken).as_secs_f64());
    report(&what, &during, &format!("{missed} policy answers (bar 0), {uploads} uploads (bar {FLUSHES})"));
    assert_eq!((missed, openings(&server)), (0, 0));
    // A flush may come between an upload and those who wait for it.
    assert!((FLUSHES / 2..=2 * FLUSHES).contains(&uploads), "{uploads} uploads");
}

/// How often a server was given a script.
async fn uploads(server: &Single) -> usize {
    let stats = server.cli(&["INFO", "commandstats"]).await;
    let calls = stats.lines().find_map(|line| line.strip_prefix("cmdstat_script|load:calls="));
    calls.and_then(|rest| rest.split(',').next()).and_then(|calls| calls.parse().ok()).expect("a number")
}

#[tokio::test]
async fn without_permission_or_password_the_policies_answer_until_they_are_given_back() {
    const SECRET: &str = "a-canary-that-is-nowhere-else";
    let _alone = alone().await;
    let redis = Single::start(&["--user", "tide", "on", &format!(">{SECRET}"), "~*", "+@all"]).await;
    let (rules, url, auth) = (rules("fixed_window"), redis.address().to_string(), format!("tide:{SECRET}"));
    let server = tidegate_with(rules.path(), &[("REDIS_URL", &url), ("REDIS_AUTH", &auth)]).await;
    let load = load(&server).await;
    let secret = format!(">{SECRET}");
    let faults = [
        ("without permission", vec!["ACL", "SETUSER", "tide", "-evalsha"], vec!["ACL", "SETUSER", "tide", "+evalsha"]),
        (
            "without password",
            vec!["ACL", "SETUSER", "tide", "resetpass", ">other"],
            vec!["ACL", "SETUSER", "tide", &secret],
        ),
    ];
    let mut phases = Vec::new();
    for (what, take, give) in faults {
        assert_eq!(redis.cli(&take).await, "OK");
        if what == "without password" {
            // Who is in stays in.
            redis.cli(&["CLIENT", "KILL", "USER", "tide"]).await;
        }
        let broken = load.elapsed();
        failing(&load, broken).await;
        lasting(Duration::from_secs(1)).await;
        let healed = load.elapsed();
        assert_eq!(redis.cli(&give).await, "OK");
        exact(&load, healed).await;
        phases.push((format!("A13 {what}"), broken, healed));
    }
    let (calls, _) = settled(load, &redis).await;
    for (what, broken, healed) in phases {
        let during = calls.such_that(|call| call.made >= broken && call.answered <= healed);
        assert_eq!(during.such_that(is_counted).count(), 0, "{what}");
        report(&what, &during, "0 decided by the store (bar 0)");
        report_restored(&what, restored(&calls, healed));
    }
    let log = server.log();
    assert!(log.contains("NOPERM") && log.contains("cannot connect to Redis"), "{log}");
    assert!(!log.contains(SECRET), "{log}");
}

#[tokio::test]
async fn a_server_with_a_strange_certificate_is_asked_nothing() {
    let _alone = alone().await;
    let [authority, other] = [Authority::new(), Authority::new()];
    let redis = Single::with_tls(&authority, "127.0.0.1", &["--tls-auth-clients", "no"]).await;
    let trusted = NamedTempFile::new().expect("a file");
    std::fs::copy(other.certificate(), trusted.path()).expect("it is copied");
    let url = format!("rediss://{}", redis.tls_address());
    let path = trusted.path().to_str().expect("a path of ours");
    let rules = rules("fixed_window");
    let server = tidegate_with(rules.path(), &[("REDIS_URL", &url), ("REDIS_TLS_CACERT", path)]).await;
    let load = start_load(&server).await;
    failing(&load, Duration::ZERO).await;
    lasting(Duration::from_secs(1)).await;
    let healed = load.elapsed();
    // It is read again for each connection.
    std::fs::copy(authority.certificate(), trusted.path()).expect("it is copied");
    exact(&load, healed).await;
    let calls = load.stop().await;
    assert_policies(&calls);
    let during = calls.such_that(|call| call.answered <= healed);
    assert_eq!(during.such_that(is_counted).count(), 0);
    report("A13 a strange certificate", &during, "0 decided by the store (bar 0)");
    report_restored("A13 a strange certificate", restored(&calls, healed));
    assert!(server.log().contains("certificate"), "{}", server.log());
}

#[tokio::test]
async fn a_value_that_is_no_counter_is_left_alone_and_concerns_its_key_only() {
    let _alone = alone().await;
    let redis = Single::start(&[]).await;
    let server = patient_tidegate(&redis.address().to_string()).await;
    let load = load_of(&server, STEADY, PATIENCE).await;
    let foreign: &[&[&str]] = &[
        &["RPUSH", "KEY", "a"],
        &["SADD", "KEY", "a"],
        &["ZADD", "KEY", "1", "a"],
        &["HSET", "KEY", "a", "1"],
        &["XADD", "KEY", "1-1", "a", "1"],
        &["PFADD", "KEY", "a"],
        &["SET", "KEY", ""],
        &["SET", "KEY", "foreign"],
        &["SET", "KEY", "9223372036854775807"],
        &["SET", "KEY", "56 9223372036854775807"],
        &["SET", "KEY", "9223372036854775807 1"],
        &["SETBIT", "KEY", "7", "1"],
    ];
    let mut asker = Asker::of(&server).await;
    let mut asked = 0;
    for (number, command) in foreign.iter().enumerate() {
        for policy in POLICIES {
            let value = format!("foreign{number}");
            let key = counter(policy, &value);
            let command: Vec<_> = command.iter().map(|word| if *word == "KEY" { &key } else { *word }).collect();
            redis.cli(&command).await;
            let before = redis.cli(&["DUMP", &key]).await;
            assert_ne!(before, "", "{command:?}");
            for _ in 0..3 {
                let answer = asker.ask(policy, &value).await;
                match policy {
                    "error" => assert_eq!(answer.expect_err("that is the policy"), tonic::Code::Unavailable),
                    _ => assert_eq!(policies(&answer.expect("no error")), [policy], "{command:?}"),
                }
                asked += 1;
            }
            assert_eq!(redis.cli(&["DUMP", &key]).await, before, "{command:?}");
            redis.cli(&["DEL", &key]).await;
            // Now there is no counter, and one is made.
            assert!(asker.decided(policy, &value).await);
            assert!(redis.counter(&key).await.ends_with(" 1"));
            redis.cli(&["DEL", &key]).await;
        }
    }
    let calls = load.stop().await;
    assert_policies(&calls);
    let books = Books::of(&redis).await;
    assert_eq!((books.double(&calls), books.forgotten(&calls), openings(&server)), (0, 0, 0));
    let missed = calls.such_that(|call| !is_counted(call)).count();
    println!("A14 foreign values: {asked} calls of theirs by policy, of {} others {missed} (bar 0)", calls.count());
    assert_eq!(missed, 0);
}
