//! Requests that are charged in two slots and refused in one of them, late; and callers that go away meanwhile.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures_util::future::join_all;
use tidegate::algorithm::{Algorithm, Limit};
use tidegate::model::{Micros, Quota, Unit, Window};
use tidegate::proto::envoy::service::ratelimit::v3::rate_limit_response::Code as Outcome;
use tokio::time::timeout;

use super::{Client, Counter, Counters, FEW, Instance, behind_proxies, hits, slot_of};
use crate::laws::bound;
use crate::redis::Single;
use crate::redis::cluster::Cluster;
use crate::redis::proxy::{Faults, Way};
use crate::support::eventually;

/// So long an answer of one of the shards takes on its way, and the caller waits for a tenth of that.
const ANSWER: Duration = Duration::from_millis(500);

/// The windows of the counters that late undos reach, and how many hits each takes.
pub const SECONDS: u32 = 2;
pub const HITS: u32 = 20;
/// So many of them are taken and given back.
const UNDONE: u32 = 15;
/// So long after they were taken, at least. They are taken a second before the window ends.
const LATE: Duration = Duration::from_millis(1_200);

#[tokio::test]
async fn a_refusal_across_two_slots_costs_one_run_in_each_and_an_undo() {
    const REFUSED: u32 = 50;
    let cluster = Cluster::start().await;
    let instance = Instance::start_with(&cluster.addresses(), &[("STORE_DEADLINE", "10s")]).await;
    let counters = Counters::of(&cluster.shards().await[..2], &["few"]);
    let [first, full] = [&counters.0[0], &counters.0[counters.0.len() - 1]];
    let mut client = instance.client().await;
    client.ask(&hits(&[("few", &full.value)], FEW.into())).await.expect("it is answered");
    let before = cluster.scripts_run().await;
    for _ in 0..REFUSED {
        let answer =
            client.ask(&hits(&[("few", &first.value), ("few", &full.value)], 1)).await.expect("it is answered");
        assert_eq!(answer.overall_code(), Outcome::OverLimit);
    }
    let ran = eventually("the last undo has run", async || {
        let ran = cluster.scripts_run().await - before;
        (ran >= 3 * REFUSED).then_some(ran)
    })
    .await;
    assert_eq!(ran, 3 * REFUSED);
    assert_eq!(client.used(first).await, 0);
}

/// What Redis holds of the two limits of a counter, by their keys.
async fn counted(node: &Single, counter: &Counter) -> Vec<(String, String)> {
    let keys = node.cli(&["KEYS", &format!("*{}={}}}*", counter.key, counter.value)]).await;
    let mut counted = Vec::new();
    for key in keys.lines() {
        counted.push((key.to_owned(), node.counter(key).await));
    }
    assert_eq!(counted.len(), 2, "{counted:?}");
    counted.sort();
    counted
}

/// A cluster, an instance with patience, and two counters on two masters: one of this key, and one of `few`.
async fn two_slots(key: &'static str) -> (Cluster, Instance, [Counter; 2]) {
    let cluster = Cluster::start().await;
    let instance = Instance::start_with(&cluster.addresses(), &[("STORE_DEADLINE", "10s")]).await;
    let mut counters = Counters::of(&cluster.shards().await[..2], &[key, "few"]).0;
    let (few, other) = (counters.pop().expect("there are some"), counters.swap_remove(0));
    (cluster, instance, [other, few])
}

#[tokio::test]
async fn a_refusal_across_two_slots_gives_back_nothing_where_nothing_was_taken() {
    let (cluster, instance, [tight, few]) = two_slots("tight").await;
    let [on_tight, on_few] = [tight.master, few.master].map(|master| &cluster.nodes()[master]);
    assert!(tight.key == "tight" && few.key == "few" && tight.master != few.master);
    let mut client = instance.client().await;
    let once = client.ask(&hits(&[("tight", &tight.value)], 1)).await.expect("it is answered");
    assert_eq!(once.overall_code(), Outcome::Ok);
    let before = counted(on_tight, &tight).await;
    let undone = on_few.scripts_run().await + 2;
    // The year has room, the month has none: their script takes nothing, that of the other slot does.
    let both = hits(&[("tight", &tight.value), ("few", &few.value)], 1);
    let answer = client.ask(&both).await.expect("it is answered");
    assert_eq!(answer.overall_code(), Outcome::OverLimit);
    eventually("the other slot is undone", async || (on_few.scripts_run().await >= undone).then_some(())).await;
    assert_eq!(client.used(&few).await, 0);
    assert_eq!(counted(on_tight, &tight).await, before);
}

#[tokio::test]
async fn a_hit_that_was_admitted_without_being_counted_is_not_given_back() {
    let (cluster, instance, [grows, few]) = two_slots("grows").await;
    let node = &cluster.nodes()[grows.master];
    let mut client = instance.client().await;
    client.ask(&hits(&[("few", &few.value)], FEW.into())).await.expect("it is answered");
    // Of the limit of one hit, two more are counted: then the delay is the longest, and more would only prolong it.
    for _ in 0..4 {
        let answer = client.ask(&hits(&[("grows", &grows.value)], 1)).await.expect("it is answered");
        assert_eq!(answer.overall_code(), Outcome::Ok);
    }
    let before = counted(node, &grows).await;
    let undone = node.scripts_run().await + 2;
    let both = hits(&[("grows", &grows.value), ("few", &few.value)], 1);
    let answer = client.ask(&both).await.expect("it is answered");
    assert_eq!(answer.overall_code(), Outcome::OverLimit);
    eventually("the other limit is undone", async || (node.scripts_run().await >= undone).then_some(())).await;
    assert_eq!(counted(node, &grows).await, before);
}

#[tokio::test]
async fn what_a_caller_who_has_gone_away_took_in_two_slots_is_given_back() {
    let (cluster, proxies, apart) = behind_proxies().await;
    let instance = Instance::start_with(&apart, &[("STORE_DEADLINE", "10s")]).await;
    let shards = cluster.shards().await;
    let counters = Counters::of(&shards[..2], &["few"]);
    let [near, far] = [0, 1].map(|shard| {
        let of = |counter: &&Counter| counter.master == shards[shard].master;
        counters.0.iter().find(of).expect("there are some")
    });
    let both = |number| hits(&[("few", &near.value), ("few", &far.value)], number);
    let client = instance.client().await;
    let slow = Faults { to_client: Way { latency: ANSWER, ..Way::default() }, ..Faults::default() };
    proxies[shards[1].master].set(slow);
    let mut admitted = 0;
    for _ in 0..5 {
        let calls = (0..8).map(|_| {
            let mut client = client.clone();
            async move { timeout(ANSWER / 10, client.ask(&both(1))).await }
        });
        // Who is answered all the same, on a machine that stood still, is one who stayed.
        let stayed = join_all(calls).await.into_iter().flatten();
        admitted += stayed.filter(|answer| answer.as_ref().is_ok_and(|it| it.overall_code() == Outcome::Ok)).count();
    }
    let admitted = u32::try_from(admitted).expect("it fits");
    assert!(admitted < FEW, "somebody went away");
    let mut client = client;
    eventually("what the others took is given back", async || {
        let used = [client.used(near).await, client.used(far).await];
        assert!(used[0] >= admitted && used[1] >= admitted, "{used:?} of {admitted}");
        (used == [admitted; 2]).then_some(())
    })
    .await;
    proxies[shards[1].master].heal();
    let answer = client.ask(&both(u64::from(FEW - admitted))).await.expect("it is answered");
    assert_eq!(answer.overall_code(), Outcome::Ok, "all that nobody used is there");
}

fn now() -> Micros {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).expect("a clock that is set");
    Micros::new(since_epoch.as_micros().try_into().expect("it fits"))
}

/// Takes one hit after the other until it is told to stop: from when to when each may have been counted that was admitted.
async fn hammer(mut client: Client, key: String, value: String, is_over: Arc<AtomicBool>) -> Vec<(Micros, Micros)> {
    let mut admitted = Vec::new();
    while !is_over.load(Ordering::Relaxed) {
        let sent = now();
        let answer = client.ask(&hits(&[(&key, &value)], 1)).await.expect("the cluster decides");
        if answer.overall_code() == Outcome::Ok {
            admitted.push((sent, now()));
        }
    }
    admitted
}

#[tokio::test]
async fn an_undo_a_second_late_and_across_a_border_lets_not_one_hit_too_many_pass() {
    let (cluster, proxies, apart) = behind_proxies().await;
    let instance = Instance::start_with(&apart, &[("STORE_DEADLINE", "10s")]).await;
    let shards = cluster.shards().await;
    let few = Counters::of(&shards[..2], &["few"]);
    let [witness, full] = [&few.0[0], &few.0[few.0.len() - 1]];
    assert_ne!(witness.master, full.master);
    let late = Algorithm::ALL.map(|(name, algorithm)| {
        let key = format!("late_{name}");
        let mut values = (0..).map(|number: u32| format!("v{number}"));
        let value = values.find(|value| shards[0].owns(slot_of(&key, value))).expect("there are many");
        (algorithm, key, value)
    });
    let mut client = instance.client().await;
    client.ask(&hits(&[("few", &full.value)], FEW.into())).await.expect("it is answered");

    // What is taken at one shard is given back when the other, which has nothing left, has answered.
    proxies[full.master].set(Faults { to_client: Way { latency: LATE, ..Way::default() }, ..Faults::default() });
    let mut descriptors = vec![("few", &*witness.value), ("few", &*full.value)];
    descriptors.extend(late.iter().map(|(_, key, value)| (&**key, &**value)));
    let request = hits(&descriptors, UNDONE.into());
    let length = u64::from(SECONDS) * 1_000_000;
    let window = |moment: Micros| moment.get() / length;
    let a_second_before = length - 1_000_000..length - 900_000;
    eventually("a second of the window is left", async || {
        a_second_before.contains(&(now().get() % length)).then_some(())
    })
    .await;
    let sent = now();
    let refused = tokio::spawn({
        let mut client = client.clone();
        async move { client.ask(&request).await }
    });
    eventually("it is taken", async || (client.used(witness).await == UNDONE).then_some(())).await;
    assert_eq!(window(now()), window(sent), "it was taken before the border");
    // What was taken becomes old before what comes now does, so that too few that are counted in between are seen.
    let is_older = async || (now().saturating_sub(sent).get() > 400_000).then_some(());
    eventually("what was taken is older than what comes", is_older).await;

    let is_over = Arc::new(AtomicBool::new(false));
    let hammers =
        late.clone().map(|(_, key, value)| tokio::spawn(hammer(client.clone(), key, value, Arc::clone(&is_over))));
    eventually("it is given back", async || (client.used(witness).await == 0).then_some(())).await;
    let given_back = now();
    assert!(given_back.saturating_sub(sent).get() > 1_000_000, "the undo is late");
    assert!(window(given_back) > window(sent), "there is a border between the charge and its undo");
    let answer = refused.await.expect("it ends").expect("it is answered");
    assert_eq!(answer.overall_code(), Outcome::OverLimit);
    // What was let in too much would show while the window of the undo is looked back at.
    eventually("two windows more are over", async || (window(now()) > window(given_back) + 2).then_some(())).await;
    is_over.store(true, Ordering::Relaxed);
    let mut told = Vec::new();
    for (hammer, (algorithm, ..)) in hammers.into_iter().zip(&late) {
        let admitted = hammer.await.expect("it ends");
        let window = Window::of_units(Unit::Second, SECONDS).expect("it is in bounds");
        let limit = Limit::new(*algorithm, Quota::new(HITS, window)).expect("it can be counted");
        for (first, (from, _)) in admitted.iter().enumerate() {
            for (number, (_, to)) in (1_u128..).zip(&admitted[first..]) {
                let most = bound(&limit, *from, *to);
                assert!(number <= most, "{algorithm:?}: {number} of {most} from {from} to {to}");
            }
        }
        told.push((algorithm.name(), admitted.len()));
    }
    println!(
        "an undo {} after its charge, admitted over the border: {told:?}, 0 over",
        given_back.saturating_sub(sent)
    );
    assert!(told.iter().all(|(_, admitted)| *admitted > HITS as usize), "{told:?}");
}
