//! The faults of a run.

use std::time::Duration;

use rustix::process::Signal;
use tokio::time::sleep;

use super::World;
use crate::redis::cluster::Shard;
use crate::redis::proxy::{Faults, Way};
use crate::support::eventually;
use crate::topology::masters::replica_follows;

/// What is done to the servers or to an instance.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    KillMaster,
    PauseMasterUntilReplaced,
    CutMasterFromCluster,
    PauseNode,
    PlannedFailover,
    MoveSlots,
    KillConnections,
    FlushScripts,
    KillInstance,
    ReloadRules,
    CutInstanceFromShard,
    ResetConnections,
}

pub const KINDS: [Kind; 12] = [
    Kind::KillMaster,
    Kind::PauseMasterUntilReplaced,
    Kind::CutMasterFromCluster,
    Kind::PauseNode,
    Kind::PlannedFailover,
    Kind::MoveSlots,
    Kind::KillConnections,
    Kind::FlushScripts,
    Kind::KillInstance,
    Kind::ReloadRules,
    Kind::CutInstanceFromShard,
    Kind::ResetConnections,
];

/// What a fault did.
#[derive(Default)]
pub struct Done {
    /// Slots whose server may have forgotten hits.
    pub forgotten: Vec<u16>,
    /// Slots that have another master now, as was meant.
    pub moved: Vec<u16>,
    pub killed: Option<usize>,
}

/// Slots that are moved at a time.
const MOVED: usize = 4;

impl World {
    /// Does it, and waits until all is well again.
    pub async fn make(&mut self, kind: Kind) -> Done {
        // Of one after the other: who has voted for a shard's replica does not vote for another of it at once.
        self.turn += 1;
        let shards = self.cluster.shards().await;
        let shard = shards[self.turn % shards.len()].clone();
        let slots = self.slots_of(&shard);
        match kind {
            Kind::KillMaster => {
                self.cluster.nodes()[shard.master].signal(Signal::KILL);
                self.cluster.promoted(&shard).await;
                self.cluster.node_mut(shard.master).restart().await;
                Done { forgotten: slots, ..Done::default() }
            }
            Kind::PauseMasterUntilReplaced => {
                self.cluster.nodes()[shard.master].signal(Signal::STOP);
                self.cluster.promoted(&shard).await;
                self.cluster.nodes()[shard.master].signal(Signal::CONT);
                Done { forgotten: slots, ..Done::default() }
            }
            Kind::CutMasterFromCluster => {
                self.cluster.nodes()[shard.master].cut().await;
                self.cluster.promoted(&shard).await;
                self.cluster.nodes()[shard.master].rejoin().await;
                Done { forgotten: slots, ..Done::default() }
            }
            Kind::PauseNode => {
                let node = &self.cluster.nodes()[self.random.usize(..self.cluster.nodes().len())];
                node.signal(Signal::STOP);
                sleep(Duration::from_millis(self.random.u64(50..500))).await;
                node.signal(Signal::CONT);
                Done::default()
            }
            Kind::PlannedFailover => {
                replica_follows(&self.cluster, shard.replicas[0]).await;
                self.cluster.failover(shard.replicas[0]).await;
                Done { moved: slots, ..Done::default() }
            }
            Kind::MoveSlots => {
                let to = shards[(self.turn + 1) % shards.len()].master;
                let moved = self.move_slots(slots, to).await;
                Done { moved, ..Done::default() }
            }
            Kind::KillConnections => self.on_all_nodes(&["CLIENT", "KILL", "TYPE", "normal"]).await,
            Kind::FlushScripts => self.on_all_nodes(&["SCRIPT", "FLUSH"]).await,
            Kind::KillInstance => {
                let instance = self.random.usize(..self.instances.len());
                self.restart(instance).await;
                Done { killed: Some(instance), ..Done::default() }
            }
            Kind::ReloadRules => {
                self.is_changed = !self.is_changed;
                self.write_rules();
                Done::default()
            }
            Kind::CutInstanceFromShard => {
                for node in shard.replicas.iter().chain([&shard.master]) {
                    self.proxies[*node].set(Faults::both(Way::black_hole()));
                }
                self.heal_proxies(Duration::from_secs(1)).await
            }
            Kind::ResetConnections => {
                let reset_each = Some(Duration::from_millis(50));
                self.proxies.iter().for_each(|proxy| proxy.set(Faults { reset_each, ..Faults::default() }));
                self.heal_proxies(Duration::from_secs(1)).await
            }
        }
    }

    /// Waits until each master has its replica, which follows.
    pub async fn is_whole(&self) {
        let shards = eventually("each master has a replica", async || {
            let shards = self.cluster.shards().await;
            shards.iter().all(|shard| shard.replicas.len() == 1).then_some(shards)
        })
        .await;
        for shard in shards {
            replica_follows(&self.cluster, shard.replicas[0]).await;
        }
    }

    /// The slots of a shard that have counters.
    fn slots_of(&self, shard: &Shard) -> Vec<u16> {
        self.rules.slots.iter().copied().filter(|slot| shard.owns(*slot)).collect()
    }

    async fn heal_proxies(&self, length: Duration) -> Done {
        sleep(length).await;
        self.proxies.iter().for_each(crate::redis::proxy::Proxy::heal);
        Done::default()
    }

    async fn on_all_nodes(&self, command: &[&str]) -> Done {
        for _ in 0..3 {
            for node in self.cluster.nodes() {
                node.cli(command).await;
            }
            sleep(Duration::from_millis(50)).await;
        }
        Done::default()
    }

    /// Moves some of these slots to a master, while they are used. Returns those.
    async fn move_slots(&mut self, mut slots: Vec<u16>, to: usize) -> Vec<u16> {
        slots.sort_unstable();
        slots.dedup();
        self.random.shuffle(&mut slots);
        slots.truncate(MOVED);
        for slot in &slots {
            let migration = self.cluster.migrate(*slot, to).await;
            sleep(Duration::from_millis(100)).await;
            migration.move_keys().await;
            sleep(Duration::from_millis(100)).await;
            migration.move_keys().await;
            migration.finish().await;
        }
        slots
    }
}
