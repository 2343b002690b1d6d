//! A Redis that is away: killed, paused, or behind a network that swallows or cuts.

use std::time::Duration;

use rustix::process::Signal;

use super::{
    Asker, Books, assert_policies, exact, failing, is_counted, lasting, load, metric, ms, openings, report,
    report_restored, restored, rules, tidegate, tidegate_with,
};
use crate::load::alone;
use crate::redis::Single;
use crate::redis::proxy::{Faults, Proxy, Way};
use crate::redis::sentinel::{MASTER, Sentinel};
use crate::support::eventually;

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
