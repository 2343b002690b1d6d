//! Leases of three instances while their cluster fails, and while sentinels name another master.

use std::time::Duration;

use rustix::process::Signal;
use tokio::time::sleep;

use super::faults::{AFTER, Admitted, BEFORE, Fleet};
use crate::redis::cluster::{Cluster, Shard};
use crate::redis::proxy::{Faults, Way};
use crate::redis::sentinel::Sentinel;
use crate::topology::{APART, behind_proxies, slot_of};

/// Hits a year of each counter of a cluster. Three instances use up the counters of three shards in about two seconds.
const LIMIT: usize = 1_000;
/// The time after which a replica is promoted or sentinels have named another master, and the counters are used up.
const PROMOTED: Duration = Duration::from_secs(9);

/// Returns a value for each shard, such that the shard has the counters of both keys.
fn values(shards: &[Shard]) -> Vec<String> {
    let is_on =
        |shard: &Shard, value: &str| ["fixed_window", "token_bucket"].iter().all(|key| shard.owns(slot_of(key, value)));
    let of = |shard: &Shard| (0..).map(|index: u32| index.to_string()).find(|value| is_on(shard, value));
    shards.iter().map(|shard| of(shard).expect("one of many")).collect()
}

async fn on(cluster: &Cluster) -> (Vec<Shard>, Fleet) {
    let (shards, addresses) = (cluster.shards().await, cluster.addresses());
    let fleet = Fleet::of([&*addresses; 3], "cluster", LIMIT, &values(&shards)).await;
    sleep(BEFORE).await;
    (shards, fleet)
}

/// Of the counters of the broken shard at most so many limits were admitted, and of all others at most one, and nearly all of it.
fn assert_bounded(limits: usize, broken: &Shard, admitted: &[Admitted]) {
    for counter in admitted {
        let Admitted { key, value, hits } = counter;
        let is_broken = broken.owns(slot_of(key, value));
        let most = if is_broken { limits * LIMIT } else { LIMIT };
        assert!(*hits <= most, "{counter:?}: at most {most}");
        assert!(is_broken || hits * 100 >= LIMIT * 95, "{counter:?} of {LIMIT}");
    }
}

#[tokio::test]
async fn planned_failovers_and_slots_that_move_cost_no_hit_of_a_lease() {
    let cluster = Cluster::start().await;
    let (shards, fleet) = on(&cluster).await;
    for shard in &shards {
        sleep(Duration::from_millis(100)).await;
        cluster.failover(shard.replicas[0]).await;
    }
    let shards = cluster.shards().await;
    cluster.reshard(shards[0].master, shards[1].master, 5_000).await;
    let admitted = fleet.admitted(AFTER).await;
    assert!(admitted.iter().all(|counter| counter.hits <= LIMIT), "{admitted:?} of {LIMIT}");
}

#[tokio::test]
async fn a_master_that_is_killed_or_paused_costs_its_shard_at_most_a_limit_with_leases_too() {
    for signal in [Signal::KILL, Signal::STOP] {
        let cluster = Cluster::start().await;
        let (shards, fleet) = on(&cluster).await;
        let broken = &cluster.nodes()[shards[0].master];
        broken.signal(signal);
        let admitted = fleet.admitted(PROMOTED).await;
        assert_bounded(2, &shards[0], &admitted);
        assert_eq!(cluster.promoted(&shards[0]).await.master, shards[0].replicas[0]);
        if signal == Signal::STOP {
            broken.signal(Signal::CONT);
        }
    }
}

#[tokio::test]
async fn a_shard_without_anybody_grants_nothing_and_the_others_do() {
    let cluster = Cluster::start().await;
    let (shards, fleet) = on(&cluster).await;
    for node in [shards[0].replicas[0], shards[0].master] {
        cluster.nodes()[node].signal(Signal::KILL);
    }
    assert_bounded(1, &shards[0], &fleet.admitted(AFTER).await);
}

#[tokio::test]
async fn an_instance_that_is_cut_from_a_shard_spends_only_what_that_granted() {
    let (cluster, proxies, apart) = behind_proxies().await;
    let (shards, addresses) = (cluster.shards().await, cluster.addresses());
    let urls = [&*apart, &*addresses, &*addresses];
    let fleet = Fleet::of(urls, "cluster", LIMIT, &values(&shards)).await;
    sleep(BEFORE).await;
    for node in [shards[0].master, shards[0].replicas[0]] {
        proxies[node].set(Faults::both(Way::black_hole()));
    }
    sleep(Duration::from_secs(1)).await;
    proxies.iter().for_each(crate::redis::proxy::Proxy::heal);
    assert_bounded(1, &shards[0], &fleet.admitted(AFTER).await);
}

#[tokio::test]
async fn a_master_that_is_cut_from_its_cluster_costs_its_shard_at_most_a_limit_with_leases_too() {
    let mut cluster = Cluster::start().await;
    let broken = cluster.shards().await[0].clone();
    cluster.node_mut(broken.master).restart_cuttable().await;
    crate::topology::masters::replica_follows(&cluster, broken.replicas[0]).await;
    let (_, fleet) = on(&cluster).await;
    cluster.nodes()[broken.master].cut().await;
    assert_bounded(2, &broken, &fleet.admitted(PROMOTED).await);
}

#[tokio::test]
async fn seeds_that_vanish_take_no_lease_with_them() {
    let cluster = Cluster::start().await;
    let seeds = cluster.proxies(APART).await;
    let (shards, seed) = (cluster.shards().await, seeds[0].address().to_string());
    let fleet = Fleet::of([&*seed; 3], "cluster", LIMIT, &values(&shards)).await;
    sleep(BEFORE).await;
    seeds[0].set(Faults { is_refusing: true, ..Faults::default() });
    seeds[0].reset();
    let admitted = fleet.admitted(AFTER).await;
    assert!(admitted.iter().all(|counter| (LIMIT * 95 / 100..=LIMIT).contains(&counter.hits)), "{admitted:?}");
}

#[tokio::test]
async fn a_master_that_sentinels_replace_costs_at_most_a_limit_with_leases_too() {
    for is_planned in [true, false] {
        let set = Sentinel::start().await;
        let addresses = set.addresses();
        let fleet = Fleet::of([&*addresses; 3], "sentinel", 3 * LIMIT, &["all".to_owned()]).await;
        sleep(BEFORE).await;
        match is_planned {
            true => set.failover().await,
            false => set.servers()[set.master().await].signal(Signal::KILL),
        }
        let admitted = fleet.admitted(PROMOTED).await;
        assert!(admitted.iter().all(|counter| counter.hits <= 6 * LIMIT), "{admitted:?} of {}", 3 * LIMIT);
    }
}
