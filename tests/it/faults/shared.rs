//! Calls of one moment share a call of the script, and something breaks while it is on its way.
//!
//! A single worker makes all calls, so that they meet. That they did is seen by the number of scripts that Redis ran. No two counters
//! have spent the same, so that an answer tells whose it is.

use std::collections::HashMap;
use std::time::Duration;

use rustix::process::Signal;
use tempfile::NamedTempFile;
use tidegate::proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use tokio::task::JoinHandle;

use super::{Asker, Books, LIMIT, MOST_CALLS, lasting, pause, policies, request, rule_file, tidegate_with};
use crate::redis::Single;
use crate::redis::cluster::{Cluster, slot};
use crate::redis::proxy::{Faults, Proxy};
use crate::support::{Tidegate, eventually};

mod masters;

/// So many calls are made at once.
const AT_ONCE: usize = 64;
/// The most scripts for them where they share.
const MOST_SCRIPTS: u32 = 32;
/// More than any test asks for.
const ENDLESS: u32 = 4_000_000_000;
/// What a counter has spent is its number so many times: more than the calls that a test makes of each.
const APART: usize = 100;

/// A rule without an end, and one of few hits, under the policy `open`.
fn rules() -> NamedTempFile {
    let rule = |key: &str, limit: &str| {
        let policy = "on_store_failure: open, on_store_overload: open, remember_refusals: false";
        format!("  - {{ key: {key}, {policy}, rate_limit: {{ unit: year, requests_per_unit: {limit} }} }}\n")
    };
    rule_file(&format!(
        "domain: d\ndescriptors:\n{}{}",
        rule("open", &ENDLESS.to_string()),
        rule("few", &LIMIT.to_string())
    ))
}

/// An instance with one worker, in front of the Redis at `url`, that gives it so much time.
async fn one_worker(url: &str, deadline: &str) -> Tidegate {
    tidegate_with(rules().path(), &[("REDIS_URL", url), ("STORE_DEADLINE", deadline), ("WORKERS", "1")]).await
}

/// Spends hits of these counters, of each another number. Returns the books.
async fn spent(asker: &mut Asker, numbers: impl Iterator<Item = usize>) -> Books {
    let mut books = HashMap::new();
    for number in numbers {
        let hits = number * APART;
        let hits_addend = u32::try_from(hits).expect("it fits");
        let request = RateLimitRequest { hits_addend, ..request("open", &number.to_string()) };
        eventually("the store decides", async || {
            let answer = asker.request(request.clone()).await.expect("a policy that admits is no error");
            policies(&answer).is_empty().then_some(())
        })
        .await;
        books.insert(number, u64::from(hits_addend));
    }
    Books(books)
}

/// A call to the counter of a number, and what the store answered, if it decided.
type Call = JoinHandle<(usize, Option<RateLimitResponse>)>;

/// Begins calls at once, each with the counter of its number.
fn begun(asker: &Asker, key: &'static str, numbers: impl Iterator<Item = usize>) -> Vec<Call> {
    let begin = |number: usize| {
        let mut asker = asker.clone();
        tokio::spawn(async move {
            let answer = asker.ask(key, &number.to_string()).await.expect("a policy that admits is no error");
            (number, Some(answer).filter(|answer| policies(answer).is_empty()))
        })
    };
    numbers.map(begin).collect()
}

/// The numbers of those of these calls that the store did not decide. The others, which the books are given, were told of their own
/// counters.
async fn undecided(calls: Vec<Call>, books: &mut Books) -> Vec<usize> {
    let mut undecided = Vec::new();
    for call in calls {
        let (number, answer) = call.await.expect("it is answered");
        match answer {
            Some(answer) => {
                let hits = books.0.get_mut(&number).expect("it has spent some");
                *hits += 1;
                let told = ENDLESS - answer.statuses[0].limit_remaining;
                assert_eq!(u64::from(told), *hits, "the hits of counter {number}, by its answer and by its calls");
            }
            None => undecided.push(number),
        }
    }
    undecided
}

/// How many of these calls the store decided, each by an answer of its own.
async fn decided(calls: Vec<Call>, books: &mut Books) -> usize {
    calls.len() - undecided(calls, books).await.len()
}

/// What a store holds is what these books say.
fn assert_kept(held: &Books, books: &Books) {
    for (number, hits) in &books.0 {
        assert_eq!(held.0.get(number), Some(hits), "what counter {number} holds, and its calls");
    }
}

#[tokio::test]
async fn calls_that_are_made_at_once_share_scripts_and_a_lost_script_is_loaded_for_each_of_them() {
    let redis = Single::start(&[]).await;
    let server = one_worker(&redis.address().to_string(), "10s").await;
    let mut asker = Asker::of(&server).await;
    let mut books = spent(&mut asker, 1..=AT_ONCE).await;
    let before = redis.scripts_run().await;
    assert_eq!(decided(begun(&asker, "open", 1..=AT_ONCE), &mut books).await, AT_ONCE);
    let scripts = redis.scripts_run().await - before;
    assert!(scripts < MOST_SCRIPTS, "{scripts} scripts for {AT_ONCE} calls");
    assert_eq!(redis.cli(&["SCRIPT", "FLUSH"]).await, "OK");
    assert_eq!(decided(begun(&asker, "open", 1..=AT_ONCE), &mut books).await, AT_ONCE);
    assert_kept(&Books::of(&redis).await, &books);
}

#[tokio::test]
async fn shared_calls_that_a_paused_redis_runs_too_late_charge_nobody() {
    let redis = Single::start(&[]).await;
    let patient = one_worker(&redis.address().to_string(), "10s").await;
    let mut books = spent(&mut Asker::of(&patient).await, 1..=AT_ONCE).await;
    let server = one_worker(&redis.address().to_string(), "20ms").await;
    let mut asker = Asker::of(&server).await;
    assert!(asker.decided("open", "0").await);
    let before = redis.scripts_run().await;
    pause(&redis).await;
    assert_eq!(decided(begun(&asker, "open", 1..=AT_ONCE), &mut books).await, 0);
    redis.signal(Signal::CONT);
    let scripts = redis.scripts_run().await - before;
    assert!((1..MOST_SCRIPTS).contains(&scripts), "{scripts} scripts for {AT_ONCE} calls");
    // All of them were too late.
    assert_kept(&Books::of(&redis).await, &books);
    let calls = begun(&Asker::of(&patient).await, "open", 1..=AT_ONCE);
    assert_eq!(decided(calls, &mut books).await, AT_ONCE, "who is patient is answered");
}

#[tokio::test]
async fn callers_that_go_away_take_no_answer_from_those_that_share_their_script() {
    let redis = Single::start(&[]).await;
    let server = one_worker(&redis.address().to_string(), "10s").await;
    let mut asker = Asker::of(&server).await;
    let mut books = spent(&mut asker, 1..AT_ONCE).await;
    let before = redis.scripts_run().await;
    pause(&redis).await;
    let mut calls = begun(&asker, "open", 1..AT_ONCE);
    lasting(Duration::from_millis(100)).await;
    // Those that came first send the scripts of the others.
    let others = calls.split_off(AT_ONCE / 2);
    calls.iter().for_each(JoinHandle::abort);
    lasting(Duration::from_millis(100)).await;
    redis.signal(Signal::CONT);
    let count = others.len();
    assert_eq!(decided(others, &mut books).await, count);
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
    let mut books = spent(&mut asker, 1..=AT_ONCE).await;
    for is_killed in [false, true] {
        pause(&redis).await;
        let calls = begun(&asker, "open", 1..=AT_ONCE);
        lasting(Duration::from_millis(100)).await;
        if is_killed {
            redis.signal(Signal::KILL);
            redis.ended().await;
        } else {
            proxy.set(Faults { reset_each: Some(Duration::from_millis(1)), ..Faults::default() });
        }
        assert_eq!(decided(calls, &mut books).await, 0, "none has an answer, and none waits for one");
        if is_killed {
            redis.restart().await;
            books = spent(&mut asker, 1..=AT_ONCE).await;
        } else {
            redis.signal(Signal::CONT);
            proxy.heal();
            assert!(asker.decided("open", "0").await);
            let held = Books::of(&redis).await;
            assert!(books.0.iter().all(|(number, hits)| (*hits..=hits + 1).contains(&held.0[number])));
            books = held;
        }
        assert_eq!(decided(begun(&asker, "open", 1..=AT_ONCE), &mut books).await, AT_ONCE, "they share again");
    }
    assert_kept(&Books::of(&redis).await, &books);
}

/// An instance with one worker, in front of a cluster.
async fn one_worker_of(cluster: &Cluster) -> Tidegate {
    let settings =
        [("REDIS_TYPE", "cluster"), ("REDIS_URL", &cluster.addresses()), ("STORE_DEADLINE", "10s"), ("WORKERS", "1")];
    tidegate_with(rules().path(), &settings).await
}

/// What the masters hold together.
async fn held(cluster: &Cluster) -> Books {
    let mut held = HashMap::new();
    for shard in cluster.shards().await {
        held.extend(Books::of(&cluster.nodes()[shard.master]).await.0);
    }
    Books(held)
}

#[tokio::test]
async fn calls_to_a_cluster_share_scripts_also_while_slots_move_and_a_node_loses_its_script() {
    let cluster = Cluster::start().await;
    let server = one_worker_of(&cluster).await;
    let mut asker = Asker::of(&server).await;
    let mut books = spent(&mut asker, 1..=AT_ONCE).await;
    let before = cluster.scripts_run().await;
    assert_eq!(decided(begun(&asker, "open", 1..=AT_ONCE), &mut books).await, AT_ONCE);
    let scripts = cluster.scripts_run().await - before;
    assert!(scripts < MOST_SCRIPTS, "{scripts} scripts for {AT_ONCE} calls");

    let shards = cluster.shards().await;
    let mut moving: Vec<u16> = (1..=AT_ONCE).map(|number| slot(&format!("{{d|open={number}}}"))).collect();
    moving.retain(|slot| shards[0].owns(*slot));
    moving.dedup();
    let mut migrations = Vec::new();
    for &slot in moving.iter().take(4) {
        migrations.push(cluster.migrate(slot, shards[1].master).await);
    }
    assert_eq!(
        decided(begun(&asker, "open", 1..=AT_ONCE), &mut books).await,
        AT_ONCE,
        "their counters are where they were"
    );
    for (place, migration) in migrations.iter().enumerate() {
        if place % 2 == 0 {
            migration.move_keys().await;
        }
    }
    assert_eq!(
        decided(begun(&asker, "open", 1..=AT_ONCE), &mut books).await,
        AT_ONCE,
        "some counters are at the other node"
    );
    for migration in migrations {
        migration.move_keys().await;
        migration.finish().await;
    }
    for node in cluster.nodes() {
        assert_eq!(node.cli(&["SCRIPT", "FLUSH"]).await, "OK");
    }
    assert_eq!(
        decided(begun(&asker, "open", 1..=AT_ONCE), &mut books).await,
        AT_ONCE,
        "the map is old, and no node has the script"
    );
    let before = cluster.scripts_run().await;
    assert_eq!(decided(begun(&asker, "open", 1..=AT_ONCE), &mut books).await, AT_ONCE);
    let scripts = cluster.scripts_run().await - before;
    assert!(scripts < MOST_SCRIPTS, "they share again: {scripts} scripts for {AT_ONCE} calls");
    assert_kept(&held(&cluster).await, &books);
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
    let own: Vec<_> = (MOST_CALLS..).filter(is_own).take(4 * AT_ONCE).collect();
    let mut books = spent(&mut asker, own.iter().copied()).await;
    for numbers in own.chunks(AT_ONCE) {
        assert_eq!(decided(begun(&asker, "open", numbers.iter().copied()), &mut books).await, AT_ONCE);
    }
    // Beside those that others have.
    let all = MOST_CALLS..MOST_CALLS + 4 * AT_ONCE;
    let count = all.clone().filter(is_own).count();
    assert_eq!(decided(begun(&asker, "open", all), &mut books).await, count);
}
