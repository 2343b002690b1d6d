//! Calls of one moment share a call of the script, and something breaks while it is on its way.
//!
//! A single worker makes all calls, so that they meet. That they did is seen by the number of scripts that Redis ran.

use std::collections::HashMap;
use std::time::Duration;

use rustix::process::Signal;
use tempfile::NamedTempFile;
use tokio::task::JoinHandle;

use super::{Asker, Books, MOST_CALLS, lasting, pause, policies, rules, tidegate_with};
use crate::redis::Single;
use crate::redis::cluster::{Cluster, slot};
use crate::redis::proxy::{Faults, Proxy};
use crate::support::{Tidegate, eventually};

/// So many calls are made at once.
const AT_ONCE: usize = 64;
/// The most scripts for them where they share.
const MOST_SCRIPTS: u32 = 32;

/// An instance with one worker, in front of the Redis at `url`, that gives it so much time.
async fn one_worker(url: &str, deadline: &str) -> Tidegate {
    tidegate_with(rules("fixed_window").path(), &[("REDIS_URL", url), ("STORE_DEADLINE", deadline), ("WORKERS", "1")])
        .await
}

/// Begins calls at once, each with the counter of its number. Their results: whether the store decided.
fn begun(asker: &Asker, numbers: impl Iterator<Item = usize>) -> Vec<JoinHandle<bool>> {
    let begin = |number: usize| {
        let mut asker = asker.clone();
        tokio::spawn(async move {
            let answer = asker.ask("open", &number.to_string()).await.expect("a policy that admits is no error");
            policies(&answer).is_empty()
        })
    };
    numbers.map(begin).collect()
}

/// How many of these calls the store decided.
async fn decided(calls: Vec<JoinHandle<bool>>) -> usize {
    let mut decided = 0;
    for call in calls {
        decided += usize::from(call.await.expect("it is answered"));
    }
    decided
}

#[tokio::test]
async fn calls_that_are_made_at_once_share_scripts_and_a_lost_script_is_loaded_for_each_of_them() {
    let redis = Single::start(&[]).await;
    let server = one_worker(&redis.address().to_string(), "10s").await;
    let mut asker = Asker::of(&server).await;
    assert!(asker.decided("open", "0").await);
    let before = redis.scripts_run().await;
    assert_eq!(decided(begun(&asker, 0..AT_ONCE)).await, AT_ONCE);
    let scripts = redis.scripts_run().await - before;
    assert!(scripts < MOST_SCRIPTS, "{scripts} scripts for {AT_ONCE} calls");
    assert_eq!(redis.cli(&["SCRIPT", "FLUSH"]).await, "OK");
    assert_eq!(decided(begun(&asker, 0..AT_ONCE)).await, AT_ONCE);
    let books = Books::of(&redis).await;
    assert!((1..AT_ONCE).all(|number| books.0[&number] == 2), "each is charged once by each of its calls");
}

#[tokio::test]
async fn shared_calls_that_a_paused_redis_runs_too_late_charge_nobody() {
    let redis = Single::start(&[]).await;
    let server = one_worker(&redis.address().to_string(), "20ms").await;
    let mut asker = Asker::of(&server).await;
    assert!(asker.decided("open", "0").await);
    let before = redis.scripts_run().await;
    pause(&redis).await;
    assert_eq!(decided(begun(&asker, 1..AT_ONCE)).await, 0);
    redis.signal(Signal::CONT);
    let scripts = redis.scripts_run().await - before;
    assert!((1..MOST_SCRIPTS).contains(&scripts), "{scripts} scripts for {AT_ONCE} calls");
    let books = Books::of(&redis).await;
    assert!((1..AT_ONCE).all(|number| !books.0.contains_key(&number)), "all of them were too late");
}

#[tokio::test]
async fn callers_that_go_away_take_no_answer_from_those_that_share_their_script() {
    let redis = Single::start(&[]).await;
    let server = one_worker(&redis.address().to_string(), "10s").await;
    let mut asker = Asker::of(&server).await;
    assert!(asker.decided("open", "0").await);
    let before = redis.scripts_run().await;
    pause(&redis).await;
    let mut calls = begun(&asker, 1..AT_ONCE);
    lasting(Duration::from_millis(100)).await;
    // Those that came first send the scripts of the others.
    let others = calls.split_off(AT_ONCE / 2);
    calls.iter().for_each(JoinHandle::abort);
    lasting(Duration::from_millis(100)).await;
    redis.signal(Signal::CONT);
    let count = others.len();
    assert_eq!(decided(others).await, count);
    let scripts = redis.scripts_run().await - before;
    assert!(scripts < MOST_SCRIPTS, "{scripts} scripts for {AT_ONCE} calls");
}

#[tokio::test]
async fn shared_calls_whose_connection_is_lost_or_whose_redis_is_killed_are_answered_by_policy_and_charged_once_at_most()
 {
    let mut redis = Single::start(&[]).await;
    let proxy = Proxy::start(redis.address()).await;
    let server = one_worker(&proxy.address().to_string(), "10s").await;
    let mut asker = Asker::of(&server).await;
    let mut first = 1;
    for is_killed in [false, true] {
        assert!(asker.decided("open", "0").await);
        pause(&redis).await;
        let calls = begun(&asker, first..first + AT_ONCE);
        lasting(Duration::from_millis(100)).await;
        if is_killed {
            redis.signal(Signal::KILL);
            redis.ended().await;
        } else {
            proxy.set(Faults { reset_each: Some(Duration::from_millis(1)), ..Faults::default() });
        }
        assert_eq!(decided(calls).await, 0, "none has an answer, and none waits for one");
        if is_killed {
            redis.restart().await;
        } else {
            redis.signal(Signal::CONT);
            proxy.heal();
        }
        eventually("the store decides", async || asker.decided("open", "0").await.then_some(())).await;
        first += AT_ONCE;
    }
    let books = Books::of(&redis).await;
    assert!((1..first).all(|number| books.0.get(&number).is_none_or(|hits| *hits == 1)));
}

/// An instance with one worker, in front of a cluster.
async fn one_worker_of(cluster: &Cluster, rules: &NamedTempFile) -> Tidegate {
    let settings =
        [("REDIS_TYPE", "cluster"), ("REDIS_URL", &cluster.addresses()), ("STORE_DEADLINE", "10s"), ("WORKERS", "1")];
    tidegate_with(rules.path(), &settings).await
}

#[tokio::test]
async fn calls_to_a_cluster_share_scripts_also_while_slots_move_and_a_node_loses_its_script() {
    let cluster = Cluster::start().await;
    let server = one_worker_of(&cluster, &rules("fixed_window")).await;
    let mut asker = Asker::of(&server).await;
    assert!(asker.decided("open", "0").await);
    let before = cluster.scripts_run().await;
    assert_eq!(decided(begun(&asker, 1..1 + AT_ONCE)).await, AT_ONCE);
    let scripts = cluster.scripts_run().await - before;
    assert!(scripts < MOST_SCRIPTS, "{scripts} scripts for {AT_ONCE} calls");

    let shards = cluster.shards().await;
    let mut moving: Vec<u16> = (1..1 + AT_ONCE).map(|number| slot(&format!("{{d|open={number}}}"))).collect();
    moving.retain(|slot| shards[0].owns(*slot));
    moving.dedup();
    let mut migrations = Vec::new();
    for &slot in moving.iter().take(4) {
        migrations.push(cluster.migrate(slot, shards[1].master).await);
    }
    assert_eq!(decided(begun(&asker, 1..1 + AT_ONCE)).await, AT_ONCE, "their counters are where they were");
    for (place, migration) in migrations.iter().enumerate() {
        if place % 2 == 0 {
            migration.move_keys().await;
        }
    }
    assert_eq!(decided(begun(&asker, 1..1 + AT_ONCE)).await, AT_ONCE, "some counters are at the other node");
    for migration in migrations {
        migration.move_keys().await;
        migration.finish().await;
    }
    for node in cluster.nodes() {
        assert_eq!(node.cli(&["SCRIPT", "FLUSH"]).await, "OK");
    }
    assert_eq!(decided(begun(&asker, 1..1 + AT_ONCE)).await, AT_ONCE, "the map is old, and no node has the script");
    let before = cluster.scripts_run().await;
    assert_eq!(decided(begun(&asker, 1..1 + AT_ONCE)).await, AT_ONCE);
    let scripts = cluster.scripts_run().await - before;
    assert!(scripts < MOST_SCRIPTS, "they share again: {scripts} scripts for {AT_ONCE} calls");
    let mut hits = HashMap::new();
    for shard in cluster.shards().await {
        hits.extend(Books::of(&cluster.nodes()[shard.master]).await.0);
    }
    assert!((1..1 + AT_ONCE).all(|number| hits[&number] == 5), "each is charged once by each of its calls: {hits:?}");
}

/// Scripts whose counters are in several slots are refused there, and no load may make the policy answer for it.
#[tokio::test]
async fn a_node_of_a_cluster_that_is_named_as_a_single_server_decides_what_it_has_under_load_too() {
    let cluster = Cluster::shared().await;
    let shard = cluster.shards().await.swap_remove(0);
    let node = &cluster.nodes()[shard.master];
    let server = one_worker(&node.address().to_string(), "10s").await;
    let mut asker = Asker::of(&server).await;
    let is_own = |number: &usize| shard.owns(slot(&format!("{{d|open={number}}}")));
    let own: Vec<_> = (MOST_CALLS..).filter(is_own).take(1 + 4 * AT_ONCE).collect();
    assert!(asker.decided("open", &own[0].to_string()).await);
    for numbers in own[1..].chunks(AT_ONCE) {
        assert_eq!(decided(begun(&asker, numbers.iter().copied())).await, AT_ONCE);
    }
    // Beside those that others have.
    let all = MOST_CALLS..MOST_CALLS + 4 * AT_ONCE;
    let count = all.clone().filter(is_own).count();
    assert_eq!(decided(begun(&asker, all)).await, count);
}
