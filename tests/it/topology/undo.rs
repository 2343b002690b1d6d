//! Callers that go away while their request is charged in two slots.

use std::net::Ipv4Addr;
use std::time::Duration;

use futures_util::future::join_all;
use tidegate::proto::envoy::service::ratelimit::v3::rate_limit_response::Code as Outcome;
use tokio::time::timeout;

use super::{Counter, Counters, FEW, Instance, hits};
use crate::redis::cluster::{Cluster, NAMES_NO_HOST};
use crate::redis::proxy::{Faults, Way};
use crate::support::eventually;

/// The address where the instance finds the cluster.
const APART: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);
/// So long an answer of one of the shards takes on its way, and the caller waits for a tenth of that.
const ANSWER: Duration = Duration::from_millis(500);

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

#[tokio::test]
async fn what_a_caller_who_has_gone_away_took_in_two_slots_is_given_back() {
    let cluster = Cluster::start_with(NAMES_NO_HOST).await;
    let proxies = cluster.proxies(APART).await;
    let apart: Vec<_> = proxies.iter().map(|proxy| proxy.address().to_string()).collect();
    let instance = Instance::start_with(&apart.join(","), &[("STORE_DEADLINE", "10s")]).await;
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
