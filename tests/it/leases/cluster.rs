//! Leases of three instances while their cluster fails, and while sentinels name another master.

use std::time::Duration;

use rustix::process::Signal;
use tokio::time::sleep;

use super::faults::{AFTER, Admitted, BEFORE, Fleet};
use crate::faults::table::{ClusterFault, Site};
use crate::redis::cluster::{Cluster, Shard};
use crate::redis::proxy::Faults;
use crate::redis::sentinel::Sentinel;
use crate::topology::{APART, slot_of};

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

/// Makes a fault of a cluster while three instances use up counters, the first of them through the proxies.
pub async fn leased(fault: &ClusterFault) {
    let mut site = Site::start().await;
    let (apart, direct, shards) = (site.apart(), site.cluster.addresses(), site.cluster.shards().await);
    let fleet = Fleet::of([&*apart, &direct, &direct], "cluster", LIMIT, &values(&shards)).await;
    sleep(BEFORE).await;
    fault.begin(&site).await;
    fault.end(&mut site).await;
    assert_bounded(fault.limits(), &site.broken, &fleet.admitted(AFTER).await);
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
async fn a_shard_without_anybody_grants_nothing_and_the_others_do() {
    let cluster = Cluster::start().await;
    let (shards, fleet) = on(&cluster).await;
    for node in [shards[0].replicas[0], shards[0].master] {
        cluster.nodes()[node].signal(Signal::KILL);
    }
    assert_bounded(1, &shards[0], &fleet.admitted(AFTER).await);
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
