//! The faults of a run: those of the table, and what operators do.

use std::time::Duration;

use tokio::time::sleep;

use super::World;
use crate::faults::table::{ClusterFault, Fault, of_a_cluster, of_a_node};
use crate::redis::cluster::Shard;
use crate::support::eventually;
use crate::topology::masters::replica_follows;

/// What is done to the servers or to an instance.
pub enum Kind {
    OfANode(Fault),
    OfACluster(ClusterFault),
    PlannedFailover,
    MoveSlots,
    KillInstance,
    ReloadRules,
}

/// What a fault did.
#[derive(Default)]
pub struct Done {
    pub name: String,
    /// Slots whose server may have forgotten hits.
    pub forgotten: Vec<u16>,
    /// Slots that have another master now, as was meant.
    pub moved: Vec<u16>,
    pub killed: Option<usize>,
}

/// Slots that are moved at a time.
const MOVED: usize = 4;

impl Kind {
    pub fn all() -> Vec<Self> {
        let own = [Self::PlannedFailover, Self::MoveSlots, Self::KillInstance, Self::ReloadRules];
        let of_nodes = of_a_node().into_iter().map(Self::OfANode);
        of_nodes.chain(of_a_cluster().into_iter().map(Self::OfACluster)).chain(own).collect()
    }
}

impl World {
    /// Does it to a shard, and waits until all is well again.
    pub async fn make(&mut self, kind: Kind) -> Done {
        // Of one after the other: who has voted for a shard's replica does not vote for another of it at once.
        self.turn += 1;
        let shards = self.site.cluster.shards().await;
        let shard = shards[self.turn % shards.len()].clone();
        let slots = self.slots_of(&shard);
        self.site.broken = shard.clone();
        let done = match kind {
            Kind::OfANode(fault) => {
                fault.pass(self.site.cluster.node_mut(shard.master), &self.site.proxies[shard.master]).await;
                Done { name: fault.name.to_owned(), ..Done::default() }
            }
            Kind::OfACluster(fault) => {
                fault.begin(&self.site).await;
                fault.end(&mut self.site).await;
                let forgotten = if fault.limits() > 1 { slots } else { Vec::new() };
                Done { name: format!("{fault:?}"), forgotten, ..Done::default() }
            }
            Kind::PlannedFailover => {
                self.site.cluster.failover(shard.replicas[0]).await;
                Done { name: "a planned failover".to_owned(), moved: slots, ..Done::default() }
            }
            Kind::MoveSlots => {
                let to = shards[(self.turn + 1) % shards.len()].master;
                Done { name: "slots moved".to_owned(), moved: self.move_slots(slots, to).await, ..Done::default() }
            }
            Kind::KillInstance => {
                let instance = self.random.usize(..self.instances.len());
                self.restart(instance).await;
                Done { name: "an instance killed".to_owned(), killed: Some(instance), ..Done::default() }
            }
            Kind::ReloadRules => {
                self.is_changed = !self.is_changed;
                self.write_rules();
                Done { name: "rules changed".to_owned(), ..Done::default() }
            }
        };
        self.is_whole().await;
        done
    }

    /// Waits until each master has its replica, which follows.
    pub async fn is_whole(&self) {
        let shards = eventually("each master has a replica", async || {
            let shards = self.site.cluster.shards().await;
            shards.iter().all(|shard| shard.replicas.len() == 1).then_some(shards)
        })
        .await;
        for shard in shards {
            replica_follows(&self.site.cluster, shard.replicas[0]).await;
        }
    }

    /// The slots of a shard that have counters.
    fn slots_of(&self, shard: &Shard) -> Vec<u16> {
        self.rules.slots.iter().copied().filter(|slot| shard.owns(*slot)).collect()
    }

    /// Moves some of these slots to a master, while they are used. Returns those.
    async fn move_slots(&mut self, mut slots: Vec<u16>, to: usize) -> Vec<u16> {
        slots.sort_unstable();
        slots.dedup();
        self.random.shuffle(&mut slots);
        slots.truncate(MOVED);
        for slot in &slots {
            let migration = self.site.cluster.migrate(*slot, to).await;
            for _ in 0..2 {
                sleep(Duration::from_millis(100)).await;
                migration.move_keys().await;
            }
            migration.finish().await;
        }
        slots
    }
}
