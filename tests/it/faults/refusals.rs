//! A Redis that is there and refuses: out of memory, busy, without the script, without permission, with other values.

use std::time::Duration;

use tempfile::NamedTempFile;
use tokio::join;

use super::{
    Asker, Books, LIMIT, POLICIES, assert_policies, exact, failing, is_counted, lasting, late, load, openings, report,
    report_restored, restored, rules, start_load, tidegate, tidegate_with,
};
use crate::load::alone;
use crate::redis::Single;
use crate::redis::certificates::Authority;
use crate::support::eventually;

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
async fn a6_a_redis_without_memory_still_refuses_who_is_over_the_limit() {
    let _alone = alone().await;
    for algorithm in ["fixed_window", "gcra"] {
        let redis = Single::start(&[]).await;
        let rules = rules(algorithm);
        let server = tidegate_with(rules.path(), &[("REDIS_URL", &redis.address().to_string())]).await;
        let mut asker = Asker::of(&server).await;
        for policy in POLICIES {
            assert_eq!(asker.admitted(policy, "0", LIMIT + 2).await, LIMIT, "{policy}");
        }
        redis.cli(&["FLUSHALL"]).await;
        let load = load(&server).await;
        for policy in POLICIES {
            assert_eq!(asker.admitted(policy, "99999", LIMIT).await, LIMIT, "{policy}");
        }
        let before = connections(&redis).await;
        assert_eq!(redis.cli(&["CONFIG", "SET", "maxmemory", "1"]).await, "OK");
        let broken = load.elapsed();
        failing(&load, broken).await;
        for policy in POLICIES {
            assert_eq!(asker.admitted(policy, "99999", 10).await, 0, "{algorithm}, {policy}");
        }
        let healed = load.elapsed();
        assert_eq!(connections(&redis).await, before, "none is made anew");
        assert_eq!(redis.cli(&["CONFIG", "SET", "maxmemory", "0"]).await, "OK");
        exact(&load, load.elapsed()).await;
        let calls = load.stop().await;
        assert_policies(&calls);
        let during = calls.such_that(|call| call.made >= broken && call.answered <= healed);
        assert_eq!(during.such_that(is_counted).count(), 0, "nothing can be charged");
        let books = Books::of(&redis).await;
        assert_eq!((books.double(&calls), books.forgotten(&calls)), (0, 0));
        assert_eq!((late(&books, &calls, broken, healed), openings(&server)), (0, 0));
        report(&format!("A6 out of memory, {algorithm}"), &during, "who is over the limit is refused by the store");
    }
}

#[tokio::test]
async fn a11_a_redis_busy_with_a_script_is_answered_for_by_policy() {
    let _alone = alone().await;
    let redis = Single::start(&["--busy-reply-threshold", "100"]).await;
    let server = tidegate(&redis.address().to_string()).await;
    let load = load(&server).await;
    let script = redis.cli(&["EVAL", "while true do end", "0"]);
    let killed = async {
        says(&redis, &["PING"], "BUSY").await;
        let broken = load.elapsed();
        lasting(Duration::from_secs(1)).await;
        let healed = load.elapsed();
        assert_eq!(redis.cli(&["SCRIPT", "KILL"]).await, "OK");
        (broken, healed)
    };
    let (_, (broken, healed)) = join!(script, killed);
    exact(&load, healed).await;
    let calls = load.stop().await;
    assert_policies(&calls);
    let books = Books::of(&redis).await;
    assert_eq!((books.double(&calls), books.forgotten(&calls)), (0, 0));
    let during = calls.such_that(|call| call.made >= broken && call.answered <= healed);
    assert_eq!((during.such_that(is_counted).count(), late(&books, &calls, broken, healed)), (0, 0));
    report("A11 busy for 1 s", &during, "0 late charges (bar 0)");
    report_restored("A11 busy for 1 s", restored(&calls, healed));
}

#[tokio::test]
async fn a12_a_script_that_is_flushed_is_loaded_once_and_every_answer_stays_exact() {
    const FLUSHES: usize = 30;
    let _alone = alone().await;
    let redis = Single::start(&[]).await;
    let server = tidegate(&redis.address().to_string()).await;
    let load = load(&server).await;
    let before = uploads(&redis).await;
    let broken = load.elapsed();
    for _ in 0..FLUSHES {
        assert_eq!(redis.cli(&["SCRIPT", "FLUSH"]).await, "OK");
        lasting(Duration::from_millis(100)).await;
    }
    let healed = load.elapsed();
    exact(&load, healed).await;
    let uploads = uploads(&redis).await - before;
    let calls = load.stop().await;
    assert_policies(&calls);
    let books = Books::of(&redis).await;
    assert_eq!((books.double(&calls), books.forgotten(&calls)), (0, 0));
    let during = calls.between(broken, healed);
    let missed = during.such_that(|call| !is_counted(call)).count();
    let what = format!("A12 {FLUSHES} flushes in {:.1} s", (healed - broken).as_secs_f64());
    report(&what, &during, &format!("{missed} policy answers (bar 0), {uploads} uploads (bar {FLUSHES})"));
    assert_eq!(openings(&server), 0);
    // This machine may be too busy for some to be in time.
    assert!(missed * 20 <= during.count(), "{missed} of {}", during.count());
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
async fn a13_without_permission_or_password_the_policies_answer_until_they_are_given_back() {
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
    let calls = load.stop().await;
    assert_policies(&calls);
    let books = Books::of(&redis).await;
    assert_eq!((books.double(&calls), books.forgotten(&calls)), (0, 0));
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
async fn a13_a_server_with_a_strange_certificate_is_asked_nothing() {
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
async fn a14_a_value_that_is_no_counter_is_left_alone_and_concerns_its_key_only() {
    let _alone = alone().await;
    let redis = Single::start(&[]).await;
    let server = tidegate(&redis.address().to_string()).await;
    let load = load(&server).await;
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
            let key = format!("{{d|{policy}={value}}}fixed_window:31536000s");
            let command: Vec<_> = command.iter().map(|word| if *word == "KEY" { &key } else { *word }).collect();
            redis.cli(&command).await;
            let before = redis.cli(&["DUMP", &key]).await;
            assert_ne!(before, "", "{command:?}");
            for _ in 0..3 {
                let answer = asker.ask(policy, &value).await;
                match policy {
                    "error" => assert_eq!(answer.expect_err("that is the policy"), tonic::Code::Unavailable),
                    _ => assert_eq!(super::policies(&answer.expect("no error")), [policy], "{command:?}"),
                }
                asked += 1;
            }
            assert_eq!(redis.cli(&["DUMP", &key]).await, before, "{command:?}");
            redis.cli(&["DEL", &key]).await;
            // Now there is no counter, and one is made.
            assert!(asker.decided(policy, &value).await);
            assert!(redis.cli(&["GET", &key]).await.ends_with(" 1"));
            redis.cli(&["DEL", &key]).await;
        }
    }
    let calls = load.stop().await;
    assert_policies(&calls);
    let books = Books::of(&redis).await;
    assert_eq!((books.double(&calls), books.forgotten(&calls), openings(&server)), (0, 0, 0));
    let missed = calls.such_that(|call| !is_counted(call)).count();
    report("A14 foreign values", &calls, &format!("{asked} calls of theirs by policy, of all others {missed} (bar 0)"));
    assert!(missed * 20 <= calls.count(), "{missed} of {}", calls.count());
}
