//! A Redis that is away: killed, paused, or behind a network that swallows or cuts.

use std::time::Duration;

use rustix::process::Signal;
use tokio::join;

use super::{
    Asker, Books, ENVOY, FAR, RESTORED, assert_policies, exact, failing, is_counted, lasting, late, load, metric, ms,
    openings, pause, report, report_restored, restored, rules, settled, tidegate, tidegate_with,
};
use crate::load::alone;
use crate::redis::Single;
use crate::redis::proxy::{Faults, Proxy, Way};
use crate::redis::sentinel::{MASTER, Sentinel};
use crate::support::eventually;

/// A breaker opens after so long: 100 ms of failures, and 100 ms in which probes check them.
const OPEN: Duration = Duration::from_millis(200);

#[tokio::test]
async fn a_killed_redis_is_answered_for_by_policy_until_it_is_back() {
    let _alone = alone().await;
    let mut redis = Single::start(&[]).await;
    let server = tidegate(&redis.address().to_string()).await;
    let load = load(&server).await;
    let killed = load.elapsed();
    redis.signal(Signal::KILL);
    redis.ended().await;
    let dead = load.elapsed();
    lasting(Duration::from_secs(1)).await;
    let alive = load.elapsed();
    redis.restart().await;
    let healed = load.elapsed();
    exact(&load, healed).await;
    let calls = load.stop().await;
    assert_policies(&calls);
    let without = calls.such_that(|call| call.made >= dead && call.answered <= alive);
    assert_eq!(without.such_that(is_counted).count(), 0);
    let books = Books::of(&redis).await;
    assert_eq!((late(&books, &calls, dead, alive), books.double(&calls)), (0, 0));
    let kept = calls.such_that(|call| call.made >= healed);
    assert_eq!(books.forgotten(&kept), 0);
    report("A1 killed for 1 s", &calls.between(killed, alive), "0 late charges (bar 0), 0 double (bar 0)");
    report_restored("A1 killed for 1 s", restored(&calls, healed));
}

#[tokio::test]
async fn a_killed_master_of_sentinels_is_followed_by_the_promoted_one() {
    let _alone = alone().await;
    let set = Sentinel::start().await;
    let addresses = set.addresses();
    let server =
        tidegate_with(rules("fixed_window").path(), &[("REDIS_TYPE", "sentinel"), ("REDIS_URL", &addresses)]).await;
    let load = load(&server).await;
    let [master, replica] = set.servers();
    let killed = load.elapsed();
    master.signal(Signal::KILL);
    failing(&load, killed).await;
    eventually("the replica takes charges", async || {
        (replica.cli(&["INFO", "replication"]).await.contains("role:master") && set.master().await == 1).then_some(())
    })
    .await;
    let promoted = load.elapsed();
    exact(&load, promoted).await;
    let calls = load.stop().await;
    assert_policies(&calls);
    let books = Books::of(replica).await;
    assert_eq!(books.double(&calls), 0);
    let kept = calls.such_that(|call| call.made >= promoted);
    assert_eq!(books.forgotten(&kept), 0);
    let lost = books.forgotten(&calls);
    let without = calls.between(killed, promoted);
    report("A1 master killed", &without, &format!("{lost} charges lost that were not replicated, 0 double (bar 0)"));
    println!("A1 master killed: promoted after {}", ms(promoted - killed));
    report_restored("A1 master killed, from the promotion on", restored(&calls, promoted));
}

#[tokio::test]
async fn a_sentinel_that_is_silent_leaves_time_to_ask_the_next() {
    let set = Sentinel::start().await;
    let silent = Proxy::start(set.sentinels()[0].address()).await;
    silent.set(Faults::both(Way::black_hole()));
    let slow = Proxy::start(set.sentinels()[1].address()).await;
    slow.set(Faults::both(Way::latency_ms(10)));
    let url = format!("{MASTER},{},{}", silent.address(), slow.address());
    let settings = [("REDIS_TYPE", "sentinel"), ("REDIS_URL", &url), ("REDIS_TIMEOUT", "2s")];
    let server = tidegate_with(rules("fixed_window").path(), &settings).await;
    assert!(Asker::of(&server).await.decided("open", "a").await);
}

#[tokio::test]
async fn what_is_sent_to_a_paused_redis_is_never_charged_later() {
    let _alone = alone().await;
    let redis = Single::start(&[]).await;
    let server = tidegate(&redis.address().to_string()).await;
    let load = load(&server).await;
    let mut pauses = Vec::new();
    for length in [200, 600, 5_000].map(Duration::from_millis) {
        let (before, broken) = (openings(&server), load.elapsed());
        pause(&redis).await;
        let paused = load.elapsed();
        let opened = async {
            if length > OPEN * FAR {
                eventually("the breaker opens", async || (openings(&server) > before).then_some(())).await;
                let opened = load.elapsed() - broken;
                println!("A2 paused {} s: the breaker opens after {} (bar {})", length.as_secs(), ms(opened), ms(OPEN));
                assert!(opened <= OPEN * FAR);
            }
        };
        join!(lasting(length), opened);
        let resumed = load.elapsed();
        redis.signal(Signal::CONT);
        exact(&load, resumed).await;
        pauses.push((length, broken, paused, resumed));
    }
    let (calls, books) = settled(load, &redis).await;
    for (length, broken, paused, resumed) in pauses {
        let what = format!("A2 paused {} s", length.as_secs_f64());
        let late = late(&books, &calls, paused, resumed);
        let during = calls.between(broken, resumed);
        assert_eq!(late, 0, "{what}");
        let unheard = books.charged_unheard(&calls.between(broken, resumed + ENVOY));
        report(&what, &during, &format!("0 late charges (bar 0), {unheard} replies lost"));
        report_restored(&what, restored(&calls, resumed));
        let open = during.such_that(|call| call.made >= broken + OPEN * FAR);
        if open.count() > 0 {
            println!("{what}: p99 {} with an open breaker (bar 1.0 ms)", ms(open.permille(990)));
            assert!(open.permille(500) < ENVOY / 4, "{what}: the breaker is open");
        }
    }
}

#[tokio::test]
async fn a_pause_as_short_as_that_of_a_fork_opens_no_breaker() {
    const SHORT: Duration = Duration::from_millis(150);
    const PAUSES: usize = 5;
    let _alone = alone().await;
    let redis = Single::start(&[]).await;
    let server = tidegate(&redis.address().to_string()).await;
    let load = load(&server).await;
    // This machine may make a pause longer than it is meant to be.
    let mut opened = 0;
    for _ in 0..PAUSES {
        let (before, broken) = (openings(&server), load.elapsed());
        redis.signal(Signal::STOP);
        lasting(SHORT).await;
        redis.signal(Signal::CONT);
        let resumed = load.elapsed();
        exact(&load, resumed).await;
        let has_opened = openings(&server) > before;
        opened += usize::from(has_opened);
        println!("A2 paused 0.15 s, in truth {}: a breaker opens: {has_opened} (bar: false)", ms(resumed - broken));
    }
    let calls = load.stop().await;
    assert_policies(&calls);
    assert!(opened * 2 < PAUSES, "{opened} of {PAUSES} opened it");
    assert!(calls.such_that(|call| !is_counted(call)).count() > 0, "no pause was noticed");
}

#[tokio::test]
async fn a_connection_that_swallows_everything_is_replaced() {
    let _alone = alone().await;
    let redis = Single::start(&[]).await;
    let proxy = Proxy::start(redis.address()).await;
    let server = tidegate(&proxy.address().to_string()).await;
    let load = load(&server).await;
    let before = proxy.accepted();
    proxy.set(Faults::both(Way::black_hole()));
    let broken = load.elapsed();
    let replaced = async {
        eventually("it connects anew", async || (proxy.accepted() > before).then_some(())).await;
        load.elapsed() - broken
    };
    let (replaced, ()) = join!(replaced, lasting(Duration::from_secs(3)));
    let healed = load.elapsed();
    proxy.heal();
    exact(&load, healed).await;
    let (calls, books) = settled(load, &redis).await;
    let late = late(&books, &calls, broken, healed);
    report("A4 half-open for 3 s", &calls.between(broken, healed), &format!("{late} late charges (bar 0)"));
    assert_eq!(late, 0);
    println!("A4 half-open for 3 s: connects anew after {} (bar 2000.0 ms)", ms(replaced));
    assert!(replaced <= Duration::from_secs(2));
    report_restored("A4 half-open for 3 s", restored(&calls, healed));
}

/// Where only one call may be in flight, no other call tells that its connection is dead.
#[tokio::test]
async fn a_connection_that_swallows_the_only_call_is_given_up() {
    let redis = Single::start(&[]).await;
    let proxy = Proxy::start(redis.address()).await;
    let variables = [("REDIS_URL", &*proxy.address().to_string()), ("WORKERS", "1")];
    let server = tidegate_with(rules("fixed_window").path(), &variables).await;
    let mut caller = Asker::of(&server).await;
    assert!(caller.decided("open", "first").await);
    proxy.set(Faults::both(Way::black_hole()));
    caller.ask("open", "second").await.expect("the overload policy decides");
    let in_flight = async || metric(&server, "tidegate_store_calls_in_flight").await;
    assert!(in_flight().await > 0.0, "its reply is still owed");
    assert!(metric(&server, "tidegate_store_calls_limit").await >= 1.0);
    eventually("another call may be sent", async || (in_flight().await == 0.0).then_some(())).await;
}

#[tokio::test]
async fn connections_reset_again_and_again_charge_nobody_twice() {
    let _alone = alone().await;
    let redis = Single::start(&[]).await;
    let proxy = Proxy::start(redis.address()).await;
    let server = tidegate(&proxy.address().to_string()).await;
    let load = load(&server).await;
    let (before, broken) = (proxy.accepted(), load.elapsed());
    proxy.set(Faults { reset_each: Some(Duration::from_millis(200)), ..Faults::default() });
    lasting(Duration::from_secs(4)).await;
    proxy.heal();
    let healed = load.elapsed();
    exact(&load, healed).await;
    let (calls, books) = settled(load, &redis).await;
    let during = calls.between(broken, healed);
    let unheard = books.charged_unheard(&during);
    let (counted, connections) = (during.such_that(is_counted).count(), proxy.accepted() - before);
    report(
        "A5 reset every 0.2 s for 4 s",
        &during,
        &format!(
            "0 double charges (bar 0), {unheard} replies lost, {counted} decided by the store, {connections} connections"
        ),
    );
    assert!(counted > 0, "it is asked in between");
    assert!(restored(&calls, healed) <= RESTORED * FAR);
}
