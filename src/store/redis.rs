//! Counters in Redis: one server, one that sentinels name, or a cluster; shared by all instances and counted in Redis' time.
//!
//! The charges of one slot are one script and one atomic step. The scripts of one node are one write, and all nodes are called at
//! once. A script that was provably not executed is sent again; one that may have been executed is not.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use smallvec::{SmallVec, smallvec};
use tokio::sync::oneshot;
use tokio::time::Instant;

use self::address::Topology;
use self::concurrency::Permit;
use self::groups::{ScriptTaken, SlotGroup, Taken, each};
use self::manager::Access;
use self::node::Node;
use self::room::Room;
use self::script::{ChargeRows, Mode, Requests};
use self::script_call::ScriptCall;
use self::servers::Servers;
use super::{ChargeResults, Charged, Granted, Store, StoreError, Undo};
use crate::algorithm::Charge;
use crate::model::{Charging, Micros};
use crate::telemetry::traces;

pub mod address;
pub mod advice;
pub mod announce;
pub mod auth_command;
pub mod backoff;
pub mod breaker;
pub mod clock;
pub mod concurrency;
pub mod connection;
pub mod credentials;
pub mod dialect;
mod files;
mod groups;
mod hidden;
mod later;
pub mod login;
pub mod manager;
pub mod node;
mod permits;
pub mod replies;
mod room;
pub mod round_trip;
pub mod script;
mod script_call;
pub mod servers;
pub mod silence;
mod stream;

pub use self::stream::{Connecting, HostNetwork, Network, RedisSocket};

/// Counters in Redis.
#[derive(Clone)]
pub struct Redis(Arc<Instances>);

struct Instances {
    main: Servers,
    /// The servers for limits per second, if they have servers of their own.
    per_second: Option<Servers>,
    prefix: Vec<u8>,
    room: Room,
}

/// A set of Redis servers and the access to them.
pub struct Instance {
    /// Single server, sentinels or cluster.
    pub topology: Topology,
    /// Credentials, TLS and timeouts.
    pub access: Access,
}

/// For each group: the time of the charge by the node's clock and the script's row for each charge, or the error.
type Outcomes = SmallVec<[Result<(Micros, ChargeRows), StoreError>; 1]>;

/// The groups of one node, each with its index in the request.
struct Batch<'a> {
    servers: &'a Servers,
    node: Arc<Node>,
    groups: SmallVec<[(usize, &'a SlotGroup); 4]>,
}

impl Redis {
    /// Creates a store of counters at `main`, and of limits per second at `per_second` if that is given. `prefix` stands before each key;
    /// at most `threads` threads call it.
    pub fn new(main: Instance, per_second: Option<Instance>, prefix: &str, threads: usize) -> Self {
        let servers = |Instance { topology, access }: Instance| {
            Servers::new(topology, Access { prefix: prefix.as_bytes().into(), ..access }, threads)
        };
        Self(Arc::new(Instances {
            main: servers(main),
            per_second: per_second.map(servers),
            prefix: prefix.as_bytes().to_vec(),
            room: Room::default(),
        }))
    }

    /// Maintains the connections and the state of the servers; runs for ever.
    pub async fn supervise(&self) {
        let Instances { main, per_second, room, .. } = &*self.0;
        let per_second = async {
            if let Some(servers) = per_second {
                tokio::join!(servers.supervise(), room.watch(servers));
            }
        };
        tokio::join!(main.supervise(), room.watch(main), per_second);
    }

    /// Connects the calling thread to every server that is known, within `budget`.
    pub async fn connect(&self, budget: Duration) {
        let Instances { main, per_second, .. } = &*self.0;
        let until = Instant::now() + budget;
        join_all(std::iter::once(main).chain(per_second).map(|servers| servers.connect(until))).await;
    }

    /// Returns the text in front of the name of every counter.
    fn prefix(&self) -> &[u8] {
        &self.0.prefix
    }

    /// Returns the server of `main` that has `key`, if one is known.
    fn node(&self, key: &[u8]) -> Option<Arc<Node>> {
        let Instances { main, .. } = &*self.0;
        main.node(main.slot(&[], key))
    }

    /// Returns for each Redis, the main one first, if there has been a connection to it since the start.
    pub fn were_reached(&self) -> impl Iterator<Item = bool> {
        let Instances { main, per_second, .. } = &*self.0;
        std::iter::once(main).chain(per_second).map(Servers::was_reached)
    }

    /// Returns true if at least one server is connected.
    pub fn is_connected(&self) -> bool {
        let Instances { main, per_second, .. } = &*self.0;
        std::iter::once(main).chain(per_second).any(Servers::is_connected)
    }
}

impl Store for Redis {
    fn charge<'a>(
        &'a self,
        charges: &'a [Charge],
        budget: Duration,
    ) -> Pin<Box<dyn Future<Output = Charged> + Send + 'a>> {
        Box::pin(self.charge_by(charges, Instant::now() + budget))
    }

    fn charge_existing<'a>(
        &'a self,
        charges: &'a [Charge],
        budget: Duration,
    ) -> Option<Pin<Box<dyn Future<Output = Charged> + Send + 'a>>> {
        let is_scarce = self.0.room.is_scarce();
        is_scarce.then(|| Box::pin(self.charge_sparingly(charges, true, Instant::now() + budget)) as Pin<Box<_>>)
    }

    fn give_back<'a>(
        &'a self,
        charges: &'a [Charge],
        taken: &'a [Option<Micros>],
    ) -> Pin<Box<dyn Future<Output = ()> + Send + 'a>> {
        Box::pin(self.give_back(self.0.dated(charges, taken)))
    }

    fn settle<'a>(
        &'a self,
        charges: &'a [Charge],
        budget: Duration,
    ) -> Pin<Box<dyn Future<Output = Vec<bool>> + Send + 'a>> {
        Box::pin(self.settle_by(charges, Instant::now() + budget))
    }

    fn lease<'a>(
        &'a self,
        charges: &'a [Charge],
        budget: Duration,
    ) -> Pin<Box<dyn Future<Output = Vec<Option<Granted>>> + Send + 'a>> {
        Box::pin(self.lease_by(charges, Instant::now() + budget))
    }

    fn round_trip(&self) -> Option<Duration> {
        let Instances { main, per_second, .. } = &*self.0;
        std::iter::once(main).chain(per_second).filter_map(Servers::round_trip).max()
    }
}

impl Redis {
    async fn charge_by(&self, charges: &[Charge], until: Instant) -> Charged {
        let is_together = charges.iter().any(|charge| charge.charging == Charging::AllOrNothing);
        if !is_together && self.0.room.is_scarce() {
            return Box::pin(self.charge_sparingly(charges, false, until)).await;
        }
        let mut groups = self.0.groups(charges, if is_together { Mode::All } else { each(charges) });
        if is_together && groups.len() > 1 {
            groups = self.0.groups(charges, Mode::Take);
        }
        if groups.iter().all(|group| group.mode != Mode::Take) {
            let outcomes = self.0.ask(&groups, charges, until).await;
            return self.conclude(&groups, charges, outcomes);
        }
        // A task of its own: hits that are taken are given back even if the caller goes away.
        let (store, owned) = (self.clone(), charges.to_vec());
        let (sender, result) = oneshot::channel();
        traces::spawn(async move {
            let outcomes = store.0.ask(&groups, &owned, until).await;
            let _ = sender.send(store.conclude(&groups, &owned, outcomes));
        });
        result.await.unwrap_or_else(|_| Charged::failed(charges, StoreError::TimedOut))
    }

    fn conclude(&self, groups: &[SlotGroup], charges: &[Charge], outcomes: Outcomes) -> Charged {
        let mut answers: ChargeResults = charges.iter().map(|_| Err(StoreError::Unreachable)).collect();
        let mut granted = SmallVec::new();
        let mut taken: SmallVec<[Taken; 1]> = SmallVec::new();
        for (group, outcome) in groups.iter().zip(outcomes) {
            match outcome {
                Ok((at, rows)) => {
                    // One script that decided on all charges needs no undo.
                    if group.mode == Mode::Take || rows.iter().any(|row| row.answer.is_none()) {
                        Taken::add(&mut taken, group, charges, (at, &rows));
                    }
                    for (&member, row) in group.members.iter().zip(rows.iter()) {
                        answers[member] = row.verdict();
                        if let Ok(verdict) = &mut answers[member]
                            && charges[member].ask > 0
                        {
                            granted.push((member, later::granted_beside(&charges[member], verdict, at)));
                        }
                    }
                }
                Err(error) => group.members.iter().for_each(|&member| answers[member] = Err(error)),
            }
        }
        let undo = |Taken { charging, left, scripts }| {
            let store = self.clone();
            Undo::new(charging, left, move || {
                // Without a runtime the process is ending; the hits expire.
                if tokio::runtime::Handle::try_current().is_ok() {
                    traces::spawn(async move { store.give_back(scripts).await });
                }
            })
        };
        let taken = taken.into_iter().filter(|taken| !taken.scripts.is_empty());
        Charged { answers, granted, undos: taken.map(undo).collect() }
    }
}

impl Instances {
    fn servers(&self, is_per_second: bool) -> &Servers {
        match &self.per_second {
            Some(servers) if is_per_second => servers,
            _ => &self.main,
        }
    }

    /// Calls all nodes at once, each with one write. The outcomes are in the order of `groups`.
    async fn ask(&self, groups: &[SlotGroup], charges: &[Charge], until: Instant) -> Outcomes {
        if let [group] = groups {
            // The common case: one slot.
            let servers = self.servers(group.is_per_second);
            let Some(node) = servers.node(group.slot) else { return smallvec![servers.unmapped(group.members.len())] };
            return self.ask_node(servers, &node, None, &[group], charges, until).await;
        }
        // Boxed, so that a request for one slot does not carry it.
        Box::pin(self.ask_nodes(groups, charges, until)).await
    }

    /// Calls the nodes of several slots.
    async fn ask_nodes(&self, groups: &[SlotGroup], charges: &[Charge], until: Instant) -> Outcomes {
        // One mode for the permits: what is charged whole needs all of them.
        let mut modes = groups.iter().map(|group| group.mode);
        let mode = modes.find(|mode| matches!(mode, Mode::Take | Mode::Later)).unwrap_or(Mode::Each);
        // The outcome of groups that are not sent for want of room.
        let mut outcomes: Outcomes = groups.iter().map(|_| Err(StoreError::Overloaded)).collect();
        let mut batches: SmallVec<[Batch<'_>; 4]> = SmallVec::new();
        for (index, group) in groups.iter().enumerate() {
            let servers = self.servers(group.is_per_second);
            let Some(node) = servers.node(group.slot) else {
                outcomes[index] = servers.unmapped(group.members.len());
                continue;
            };
            match batches.iter_mut().find(|batch| Arc::ptr_eq(&batch.node, &node)) {
                Some(batch) => batch.groups.push((index, group)),
                None => batches.push(Batch { servers, node, groups: smallvec![(index, group)] }),
            }
        }
        let permits = permits::take(&mut batches, mode, until).await;
        let asked = join_all(batches.iter().zip(permits).map(async |(Batch { servers, node, groups }, permit)| {
            let groups: SmallVec<[&SlotGroup; 4]> = groups.iter().map(|(_, group)| *group).collect();
            match permit {
                Ok(permit) => self.ask_node(servers, node, Some(permit), &groups, charges, until).await,
                Err(error) => {
                    if let Some(reason) = error.reason().filter(|_| mode != Mode::Later) {
                        node.metrics().failed(reason, groups.iter().map(|group| group.members.len()).sum());
                    }
                    groups.iter().map(|_| Err(error)).collect()
                }
            }
        }));
        for (batch, answered) in batches.iter().zip(asked.await) {
            for ((index, _), outcome) in batch.groups.iter().zip(answered) {
                outcomes[*index] = outcome;
            }
        }
        outcomes
    }

    async fn ask_node(
        &self,
        servers: &Servers,
        node: &Arc<Node>,
        permit: Option<Permit>,
        groups: &[&SlotGroup],
        charges: &[Charge],
        until: Instant,
    ) -> Outcomes {
        let members: SmallVec<[SmallVec<[&Charge; 4]>; 1]> =
            groups.iter().map(|group| group.members.iter().map(|&member| &charges[member]).collect()).collect();
        let requests: SmallVec<[_; 1]> = members
            .iter()
            .zip(groups)
            .map(|(members, group)| {
                move |deadline, requests: &mut Requests| requests.charge(&self.prefix, members, group.mode, deadline)
            })
            .collect();
        let call = |((request, members), group): ((_, &SmallVec<[&Charge; 4]>), &&SlotGroup)| {
            let cost = script_cost(members.iter().copied());
            ScriptCall { request, cost, expects: Some((members.len(), group.mode)) }
        };
        let calls: SmallVec<[ScriptCall<'_>; 1]> =
            requests.iter().map(|request| request as _).zip(&members).zip(groups).map(call).collect();
        let outcomes = script_call::run(servers, node, permit, &calls, until).await;
        if outcomes.iter().any(room::is_full) {
            self.room.is_full();
        }
        outcomes
    }
}

/// Returns the longest time of a script with these charges, as a multiple of that of one charge of a fixed window.
fn script_cost<'a>(charges: impl Iterator<Item = &'a Charge>) -> usize {
    charges.map(|charge| charge.limit.algorithm().script_cost()).sum()
}

#[cfg(test)]
mod tests;
