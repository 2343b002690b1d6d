//! Masters that step down, die, stand still or are left without anybody.

use std::time::Duration;

use rustix::process::Signal;
use tokio::time::sleep;

use super::{
    Account, Calls, Counters, FAR, FEW, Instance, RATE, RESTORED, assert_none_failed, exact_again, last_failed, more,
};
use crate::faults::table::{ClusterFault, Site};
use crate::load::{Load, alone};
use crate::redis::cluster::{Cluster, Shard};
use crate::support::eventually;

/// How long a planned failover may show.
const PLANNED: Duration = Duration::from_millis(250);
const FAILOVERS: usize = 6;

pub async fn replica_follows(cluster: &Cluster, replica: usize) {
    eventually("the replica follows", async || {
        let info = cluster.nodes()[replica].cli(&["INFO", "replication"]).await;
        (info.contains("role:slave") && info.contains("master_link_status:up")).then_some(())
    })
    .await;
}

#[tokio::test]
async fn planned_failovers_under_load_lose_nothing_and_double_nothing() {
    let _alone = alone().await;
    let cluster = Cluster::start().await;
    let instance = Instance::start(&cluster.addresses()).await;
    let shards = cluster.shards().await;
    let counters = Counters::of(&shards, &["one", "log", "two"]);
    let load = instance.load(&counters).await;
    more(&load, 200).await;
    let mut began = Vec::new();
    for failover in 0..FAILOVERS {
        // Of one after the other: who has voted for a shard's replica does not vote for another of it at once.
        let shard = cluster.shard_of(*shards[failover % shards.len()].slots[0].start()).await;
        replica_follows(&cluster, shard.replicas[0]).await;
        // So that the new master has never heard of the script.
        assert_eq!(cluster.nodes()[shard.replicas[0]].cli(&["SCRIPT", "FLUSH"]).await, "OK");
        began.push(load.elapsed());
        cluster.failover(shard.replicas[0]).await;
        more(&load, 400).await;
    }
    let calls = load.stop().await;
    counters.assert_exact(&mut instance.client().await, &calls).await;
    let ends = began.iter().skip(1).copied().chain([Duration::MAX]);
    let spans = began
        .iter()
        .zip(ends)
        .map(|(from, to)| last_failed(&calls, *from, to).map_or(Duration::ZERO, |last| last - *from));
    let longest = spans.max().expect("there were some");
    println!(
        "B1 {FAILOVERS} planned failovers: {} of {} by policy, the last {longest:.0?} after its failover (bar {PLANNED:?}), 0 lost, 0 doubled (bar 0)",
        calls.failed(),
        calls.count(),
    );
    assert!(longest < PLANNED * FAR, "the policy answers for {longest:?} after a failover");
}

/// What the failover that nobody planned leaves: healthy shards exact, and on the broken one at most a limit too much.
async fn assert_bounded(counters: &Counters, instance: &Instance, calls: &Calls, broken: &Shard) -> String {
    let accounts = counters.accounts(&mut instance.client().await, calls).await;
    let (on_broken, healthy): (Vec<&Account>, Vec<_>) =
        accounts.iter().partition(|account| account.counter.master == broken.master);
    for account in healthy {
        assert_none_failed(&account.calls, "a healthy shard");
        if account.counter.key == "few" {
            assert_eq!(account.admitted(), usize::try_from(FEW).expect("it fits"), "{:?}", account.counter);
        } else {
            account.assert_exact();
        }
    }
    for account in on_broken.iter().filter(|account| account.counter.key == "few") {
        let most = usize::try_from(2 * FEW).expect("it fits");
        assert!(account.admitted() <= most, "{} of {FEW}: {:?}", account.admitted(), account.counter);
    }
    let lost: usize = on_broken.iter().filter(|account| account.counter.key != "few").map(|a| a.lost()).sum();
    format!("{lost} charges lost (bar: those not replicated), the other shards exact")
}

/// Waits for the promotion, and until the new master decides; says how long that took.
async fn recovers(cluster: &Cluster, load: &Load, counters: &Counters, broken: &Shard, began: Duration) -> String {
    cluster.promoted(broken).await;
    let promoted = load.elapsed();
    exact_again(load, counters, broken.master, promoted).await;
    let calls = load.so_far();
    let after = last_failed(&calls, promoted, load.elapsed()).map_or(Duration::ZERO, |last| last - promoted);
    assert!(after < RESTORED * FAR, "the policy answers for {after:?} after the promotion");
    let failed = calls.such_that(|call| call.answer.is_err());
    assert!(failed.iter().all(|call| call.due + super::PATIENT > began), "nothing failed before");
    format!(
        "promoted after {:.1?}, {} calls by policy, the last {after:.0?} after the promotion (bar {RESTORED:?})",
        promoted - began,
        failed.count()
    )
}

/// Takes the master of a shard away while it is under load: what that costs is bounded.
pub async fn lose_master(fault: &ClusterFault) {
    lose(fault, async |site| fault.end(site).await).await;
}

/// The same, and while the master is cut, all nodes are asked for the map, the one that was cut too.
pub async fn cut_master(fault: &ClusterFault) {
    let calls = lose(fault, async |site| {
        let shards = site.cluster.shards().await;
        let other = shards.iter().find(|shard| !shard.owns(*site.broken.slots[0].start())).expect("there are three");
        site.cluster.failover(other.replicas[0]).await;
    });
    assert_none_failed(&calls.await, "the old map");
}

/// Begins a fault that costs a shard its master, and goes on when the replica decides. Returns the calls after that.
async fn lose(fault: &ClusterFault, go_on: impl AsyncFnOnce(&mut Site)) -> Calls {
    let _alone = alone().await;
    let mut site = Site::start().await;
    let instance = Instance::start(&site.cluster.addresses()).await;
    let counters = Counters::of(&site.cluster.shards().await, &["one", "few"]);
    let load = instance.load(&counters).await;
    more(&load, 300).await;
    let began = load.elapsed();
    fault.begin(&site).await;
    let recovered = recovers(&site.cluster, &load, &counters, &site.broken, began).await;
    go_on(&mut site).await;
    let settled = load.elapsed();
    more(&load, 500).await;
    let calls = load.stop().await;
    let left = assert_bounded(&counters, &instance, &calls, &site.broken).await;
    println!("{fault:?}: {recovered}, {left}");
    calls.between(settled, Duration::MAX)
}

/// What is said of a shard without anybody: for each of its two servers that the connection is lost and that none is made,
/// that the policy answers, and one more.
const MOST_LINES: usize = 6;

#[tokio::test]
async fn a_shard_without_anybody_is_answered_by_policy_and_the_others_exactly() {
    let _alone = alone().await;
    let mut cluster = Cluster::start().await;
    let instance = Instance::start(&cluster.addresses()).await;
    let shards = cluster.shards().await;
    let counters = Counters::of(&shards, &["one"]);
    let load = instance.load(&counters).await;
    more(&load, 200).await;
    let broken = &shards[0];
    // First the replica, so that nobody is promoted.
    for node in [broken.replicas[0], broken.master] {
        cluster.nodes()[node].signal(Signal::KILL);
    }
    let began = load.elapsed();
    more(&load, usize::try_from(4 * RATE).expect("it fits")).await;
    let lines = instance.tidegate.log();
    let of_broken = load.since(began).such_that(|call| call.due > began && counters.is_on(call, broken.master));
    assert_eq!(of_broken.failed(), of_broken.count(), "nobody is there to decide");
    cluster.node_mut(broken.master).restart().await;
    // A master that comes back refuses for two seconds, until it has heard from the others.
    eventually("it serves", async || {
        let info = cluster.nodes()[broken.master].cli(&["CLUSTER", "INFO"]).await;
        info.contains("cluster_state:ok").then_some(())
    })
    .await;
    let back = load.elapsed();
    exact_again(&load, &counters, broken.master, back).await;
    let calls = load.stop().await;
    let after = last_failed(&calls, back, Duration::MAX).map_or(Duration::ZERO, |last| last - back);
    let healthy = calls.such_that(|call| !counters.is_on(call, broken.master));
    assert_none_failed(&healthy, "a healthy shard");
    let accounts = counters.accounts(&mut instance.client().await, &calls).await;
    accounts.iter().filter(|account| account.counter.master != broken.master).for_each(Account::assert_exact);
    println!(
        "B3 a shard without anybody: {} lines in the log (bar {MOST_LINES}), exact {after:.0?} after its master is back (bar {RESTORED:?}), the other shards exact",
        lines.lines().count()
    );
    assert!(lines.lines().count() <= MOST_LINES, "{lines}");
    assert!(after < RESTORED * FAR, "the policy answers for {after:?} after the return");
}

/// Whether the page of metrics says that the breaker of a server is open.
async fn is_breaker_open(instance: &Instance, server: &str) -> bool {
    let sample = format!("tidegate_store_breaker_open{{server=\"{server}\"}} 1");
    instance.tidegate.metrics().await.lines().any(|line| line == sample)
}

#[tokio::test]
async fn a_master_that_was_down_when_it_was_replaced_is_as_good_as_new_when_it_comes_back() {
    let _alone = alone().await;
    let mut cluster = Cluster::start().await;
    let instance = Instance::start(&cluster.addresses()).await;
    let broken = cluster.shards().await[0].clone();
    let server = cluster.nodes()[broken.master].address().to_string();
    let counters = Counters::of(std::slice::from_ref(&broken), &["one"]);
    let load = instance.load(&counters).await;
    cluster.nodes()[broken.master].signal(Signal::KILL);
    eventually("its breaker opens", async || is_breaker_open(&instance, &server).await.then_some(())).await;
    cluster.promoted(&broken).await;
    let is_closed = async || (!is_breaker_open(&instance, &server).await).then_some(());
    eventually("it is down no more", is_closed).await;
    cluster.node_mut(broken.master).restart().await;
    replica_follows(&cluster, broken.master).await;
    // Who has voted for a shard's replica votes for another of it after two `cluster-node-timeout`s, 2 s.
    sleep(Duration::from_secs(3)).await;
    let began = load.elapsed();
    cluster.failover(broken.master).await;
    let is_back = load.elapsed();
    eventually("it decides again", async || {
        let calls = load.since(is_back).such_that(|call| call.due > is_back && call.answer.is_ok());
        calls.iter().nth(100).map(|_| ())
    })
    .await;
    eventually("it is not down", is_closed).await;
    let calls = load.stop().await;
    let after = last_failed(&calls, began, Duration::MAX).map_or(Duration::ZERO, |last| last - began);
    println!(
        "A failover back to a master that was down: the last policy answer {after:.0?} after it (bar {PLANNED:?})"
    );
}
