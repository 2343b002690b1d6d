//! Ways to the cluster that end.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::{
    APART, Account, Counters, FAR, Instance, RESTORED, assert_none_failed, behind_proxies, exact_again, hits,
    last_failed, more, slot_of,
};
use crate::faults::table::{Site, instance_cut};
use crate::load::alone;
use crate::redis::Single;
use crate::redis::cluster::Cluster;
use crate::redis::proxy::{Faults, Way};
use crate::support::eventually;

#[tokio::test]
async fn an_instance_cut_from_one_shard_is_alone_with_that() {
    let _alone = alone().await;
    let mut site = Site::start().await;
    let instances = [Instance::start(&site.apart()).await, Instance::start(&site.cluster.addresses()).await];
    let (cut, counters) = (site.broken.clone(), Counters::of(&site.cluster.shards().await, &["one"]));
    let loads = [instances[0].load(&counters).await, instances[1].load(&counters).await];
    more(&loads[0], 200).await;
    instance_cut().begin(&site).await;
    let began = loads[0].elapsed();
    eventually("the policy decides", async || (loads[0].since(began).failed() > 100).then_some(())).await;
    instance_cut().end(&mut site).await;
    let healed = loads[0].elapsed();
    exact_again(&loads[0], &counters, cut.master, healed).await;
    let [apart, direct] = loads;
    let (apart, direct) = (apart.stop().await, direct.stop().await);
    assert_none_failed(&direct, "the other instance");
    assert_none_failed(&apart.such_that(|call| !counters.is_on(call, cut.master)), "the other shards");
    let after = last_failed(&apart, healed, Duration::MAX).map_or(Duration::ZERO, |last| last - healed);
    let mut client = instances[1].client().await;
    let both = apart.and(&direct);
    counters.assert_exact(&mut client, &both).await;
    let accounts = counters.accounts(&mut client, &both).await;
    let late: usize = accounts.iter().map(|account| account.held - account.admitted()).sum();
    println!(
        "B4 an instance cut from a shard: {} calls by policy, {late} of them charged, the last {after:.0?} after the cut healed (bar {RESTORED:?}), the other instance and the other shards exact",
        apart.failed()
    );
    // What stood in the way when it was cut was executed, and its answers are lost; what was sent later is too late.
    assert!(late * 4 <= apart.failed(), "{late} of {} were charged", apart.failed());
    assert!(after < RESTORED * FAR, "the policy answers for {after:?} after the cut healed");
}

#[tokio::test]
async fn seeds_that_vanish_take_nothing_with_them() {
    let _alone = alone().await;
    let cluster = Cluster::start().await;
    // The cluster names its nodes by their own address, so nothing but the first question comes this way.
    let seeds = cluster.proxies(APART).await;
    let seed = seeds[0].address();
    let instance = Instance::start(&format!("nowhere.invalid:6379,{seed}")).await;
    let shards = cluster.shards().await;
    let counters = Counters::of(&shards, &["one", "two"]);
    let load = instance.load(&counters).await;
    more(&load, 200).await;
    seeds[0].set(Faults { is_refusing: true, ..Faults::default() });
    seeds[0].reset();
    more(&load, 400).await;
    // Nobody at the seeds tells of the new master.
    cluster.failover(shards[0].replicas[0]).await;
    more(&load, 400).await;
    let calls = load.stop().await;
    assert_none_failed(&calls, "without seeds");
    let accounts = counters.accounts(&mut instance.client().await, &calls).await;
    accounts.iter().for_each(Account::assert_exact);
    println!("B6 seeds that vanish: 0 of {} by policy (bar 0), through a failover", calls.count());
}

#[tokio::test]
async fn an_older_map_is_not_taken_though_only_it_is_told() {
    let (cluster, older) = tokio::join!(Cluster::start(), Cluster::start());
    let shard = cluster.shards().await.remove(0);
    // A map is as old as the last election in it.
    cluster.failover(shard.replicas[0]).await;
    let value = (0..).map(|number: u32| format!("v{number}")).find(|value| shard.owns(slot_of("one", value)));
    let value = value.expect("there are many");
    let slot = slot_of("one", &value).to_string();
    for node in cluster.nodes() {
        node.cli(&["CLUSTER", "DELSLOTS", &slot]).await;
    }
    // Five of the twelve nodes are asked for the map at a time, so that now and then all of them are the older cluster's.
    let instance = Instance::start(&format!("{},{}", cluster.addresses(), older.addresses())).await;
    let mut client = instance.client().await;
    let hit = hits(&[("one", &value)], 1);
    eventually("the newer map is taken", async || client.ask(&hit).await.err()).await;
    // Each call hints at a change of the map, which is asked for every 50 ms then.
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(6) {
        assert!(client.ask(&hit).await.is_err(), "a node of the older map decides");
        sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn a_slow_cluster_is_not_taken_for_servers_without_a_cluster() {
    let (_cluster, proxies, apart) = behind_proxies().await;
    let instance = Instance::start_with(&apart, &[("STORE_DEADLINE", "100ms")]).await;
    proxies.iter().for_each(|proxy| proxy.set(Faults::both(Way::latency_ms(150))));
    let mut client = instance.client().await;
    eventually("it is said that no map is told", async || {
        let _ = client.ask(&hits(&[("one", "v")], 1)).await;
        instance.tidegate.log().contains("store.cluster.late_map").then_some(())
    })
    .await;
    assert!(!instance.tidegate.log().contains("in cluster mode"), "{}", instance.tidegate.log());
}

#[tokio::test]
async fn servers_without_a_cluster_are_said_to_be_none() {
    let server = Single::start(&[]).await;
    let instance = Instance::launch(&server.address().to_string(), &[]).await;
    eventually("it is asked", async || instance.tidegate.log().contains("store.cluster.no_map").then_some(())).await;
}
