//! Counters in Redis: one server, one that sentinels name, or a cluster; shared by all instances and counted in Redis' time.
//!
//! The charges of one slot are one script and one atomic step. The scripts of one node are one write, and all nodes are called at
//! once. A script that was provably not executed is sent again; one that may have been executed is not.

use std::collections::HashMap;
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
use self::manager::Access;
use self::node::Node;
use self::room::Room;
use self::script::{ChargeRows, Mode, Requests};
use self::script_call::ScriptCall;
use self::servers::Servers;
use super::{ChargeResults, Charged, Granted, Store, StoreError, Undo};
use crate::algorithm::Charge;
use crate::model::policy::is_request_refused;
use crate::model::{Charging, Micros, Outcome, Role, Unit};
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

/// The most counters of one script whose charges are independent: 100, which occupy a server for
/// about 0.7 ms (`INFO commandstats` after 1,152 charges: 6.6 us each), and for 1.2 to 8 ms where all are logs (the longer and
/// the more refusals they record, the more).
const MOST_PER_SCRIPT: usize = 100;
/// The most counters that one script charges together: 1,000, about 7 ms, and a tenth of that where all are logs, of which each takes
/// up to ten times as long. A request with more charges them like counters of several slots.
const MOST_TOGETHER: usize = 1_000;

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

/// The charges of one request that one script charges: those of one slot.
struct SlotGroup {
    is_per_second: bool,
    slot: u16,
    /// Indices of the charges in the request.
    members: SmallVec<[usize; 4]>,
}

/// For each group: the time of the charge by the node's clock and the script's row for each charge, or the error.
type Outcomes = SmallVec<[Result<(Micros, ChargeRows), StoreError>; 1]>;

/// The groups of one node, each with its index in the request.
struct Batch<'a> {
    servers: &'a Servers,
    node: Arc<Node>,
    groups: SmallVec<[(usize, &'a SlotGroup); 4]>,
}

/// Hits that one script gives back: each charge with the time at which it was made.
struct ScriptTaken {
    is_per_second: bool,
    slot: u16,
    charges: Vec<(Charge, Micros)>,
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

    fn take<'a>(
        &'a self,
        charges: &'a [Charge],
        budget: Duration,
    ) -> Pin<Box<dyn Future<Output = super::Taken> + Send + 'a>> {
        Box::pin(self.take_by(charges, Instant::now() + budget))
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
        let groups = self.0.groups(charges, is_together);
        let mode = match (is_together, groups.len()) {
            (false, _) => Mode::Each,
            (true, 1) => Mode::All,
            (true, _) => Mode::Take,
        };
        if mode != Mode::Take {
            let outcomes = self.0.ask(&groups, charges, mode, until).await;
            return self.conclude(&groups, charges, mode, outcomes);
        }
        // A task of its own: hits that are taken are given back even if the caller goes away.
        let (store, owned) = (self.clone(), charges.to_vec());
        let (sender, result) = oneshot::channel();
        traces::spawn(async move {
            let outcomes = store.0.ask(&groups, &owned, mode, until).await;
            let _ = sender.send(store.conclude(&groups, &owned, mode, outcomes));
        });
        result.await.unwrap_or_else(|_| Charged::failed(charges, StoreError::TimedOut))
    }

    /// Charges a part of a request. Must run to its end: if it is dropped, the hits that it took are not given back.
    async fn take_by(&self, charges: &[Charge], until: Instant) -> super::Taken {
        let groups = self.0.groups(charges, true);
        let outcomes = self.0.ask(&groups, charges, Mode::Take, until).await;
        let mut answers: ChargeResults = charges.iter().map(|_| Err(StoreError::Unreachable)).collect();
        let mut taken = vec![None; charges.len()];
        for (group, outcome) in groups.iter().zip(outcomes) {
            match outcome {
                Ok((at, rows)) => {
                    for member in group.taken(charges, &rows, Mode::Take, &mut SmallVec::new()) {
                        taken[member] = Some(at);
                    }
                    for (&member, row) in group.members.iter().zip(rows.iter()) {
                        answers[member] = row.verdict();
                    }
                }
                Err(error) => group.members.iter().for_each(|&member| answers[member] = Err(error)),
            }
        }
        super::Taken { answers, taken }
    }

    fn conclude(&self, groups: &[SlotGroup], charges: &[Charge], mode: Mode, outcomes: Outcomes) -> Charged {
        let mut answers: ChargeResults = charges.iter().map(|_| Err(StoreError::Unreachable)).collect();
        let mut granted = SmallVec::new();
        let mut left = SmallVec::new();
        let mut taken = Vec::new();
        for (group, outcome) in groups.iter().zip(outcomes) {
            match outcome {
                Ok((at, rows)) => {
                    // One script that decided on the whole request needs no undo.
                    if mode == Mode::Take || rows.iter().any(|row| row.answer.is_none()) {
                        let members = group.taken(charges, &rows, mode, &mut left);
                        if !members.is_empty() {
                            let charges = members.into_iter().map(|member| (charges[member].clone(), at)).collect();
                            let SlotGroup { is_per_second, slot, .. } = *group;
                            taken.push(ScriptTaken { is_per_second, slot, charges });
                        }
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
        if taken.is_empty() {
            return Charged { answers, granted, undo: None };
        }
        let store = self.clone();
        let give_back = move || {
            // Without a runtime the process is ending; the hits expire.
            if tokio::runtime::Handle::try_current().is_ok() {
                traces::spawn(async move { store.give_back(taken).await });
            }
        };
        Charged { answers, granted, undo: Some(Undo::new(left, give_back)) }
    }
}

impl Instances {
    fn servers(&self, is_per_second: bool) -> &Servers {
        match &self.per_second {
            Some(servers) if is_per_second => servers,
            _ => &self.main,
        }
    }

    /// Groups the charges by Redis instance and slot, in order. Limits of 0 have no counter and join any group.
    fn groups(&self, charges: &[Charge], is_together: bool) -> SmallVec<[SlotGroup; 1]> {
        // Of each charge: the instance, the slot, where a script has one key the first charge with its key, and its own place.
        let mut places: SmallVec<[(bool, u16, usize, usize); 4]> = SmallVec::with_capacity(charges.len());
        let mut firsts = HashMap::new();
        for (member, charge) in charges.iter().enumerate().filter(|(_, charge)| !charge.limit.is_closed()) {
            let is_per_second =
                self.per_second.is_some() && charge.limit.quota().window().length() == Unit::Second.length();
            let servers = self.servers(is_per_second);
            let slot = servers.slot(&self.prefix, charge.key.as_bytes());
            let first = if servers.is_together() { 0 } else { *firsts.entry(&charge.key).or_insert(member) };
            places.push((is_per_second, slot, first, member));
        }
        if let Some(&(is_per_second, slot, first, _)) = places.first() {
            let closed = charges.iter().enumerate().filter(|(_, charge)| charge.limit.is_closed());
            places.extend(closed.map(|(member, _)| (is_per_second, slot, first, member)));
        }
        places.sort_unstable();
        let script = |place: &(bool, u16, usize, usize)| (place.0, place.1, place.2);
        let mut groups: SmallVec<[SlotGroup; 1]> = SmallVec::new();
        for places in places.chunk_by(|one, other| script(one) == script(other)) {
            // A bounded script does not hold up others for long.
            let most = if is_together { MOST_TOGETHER } else { MOST_PER_SCRIPT };
            let mut cost_of_script = most;
            for &(is_per_second, slot, _, member) in places {
                let cost = if is_together { charges[member].limit.algorithm().script_cost() } else { 1 };
                if cost_of_script + cost > most {
                    groups.push(SlotGroup { is_per_second, slot, members: SmallVec::new() });
                    cost_of_script = 0;
                }
                cost_of_script += cost;
                if let Some(group) = groups.last_mut() {
                    group.members.push(member);
                }
            }
        }
        groups
    }

    /// Groups charges to give back by slot.
    fn dated(&self, charges: &[Charge], taken: &[Option<Micros>]) -> Vec<ScriptTaken> {
        let taken = charges.iter().zip(taken).filter_map(|(charge, at)| at.map(|at| (charge.clone(), at)));
        let (charges, times): (Vec<Charge>, Vec<Micros>) = taken.unzip();
        let script = |SlotGroup { is_per_second, slot, members }: SlotGroup| {
            let charges = members.iter().map(|&member| (charges[member].clone(), times[member])).collect();
            ScriptTaken { is_per_second, slot, charges }
        };
        self.groups(&charges, true).into_iter().map(script).collect()
    }

    /// Calls all nodes at once, each with one write. The outcomes are in the order of `groups`.
    async fn ask(&self, groups: &[SlotGroup], charges: &[Charge], mode: Mode, until: Instant) -> Outcomes {
        if let [group] = groups {
            // The common case: one slot.
            let servers = self.servers(group.is_per_second);
            let Some(node) = servers.node(group.slot) else { return smallvec![servers.unmapped(group.members.len())] };
            return self.ask_node(servers, &node, None, &[group], charges, (mode, until)).await;
        }
        // Boxed, so that a request for one slot does not carry it.
        Box::pin(self.ask_nodes(groups, charges, mode, until)).await
    }

    /// Calls the nodes of several slots.
    async fn ask_nodes(&self, groups: &[SlotGroup], charges: &[Charge], mode: Mode, until: Instant) -> Outcomes {
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
                Ok(permit) => self.ask_node(servers, node, Some(permit), &groups, charges, (mode, until)).await,
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
        (mode, until): (Mode, Instant),
    ) -> Outcomes {
        let members: SmallVec<[SmallVec<[&Charge; 4]>; 1]> =
            groups.iter().map(|group| group.members.iter().map(|&member| &charges[member]).collect()).collect();
        let requests: SmallVec<[_; 1]> = members
            .iter()
            .map(|members| {
                move |deadline, requests: &mut Requests| requests.charge(&self.prefix, members, mode, deadline)
            })
            .collect();
        let call = |(request, members): (_, &SmallVec<[&Charge; 4]>)| {
            let cost = script_cost(members.iter().copied());
            ScriptCall { request, cost, expects: Some((members.len(), mode)) }
        };
        let calls: SmallVec<[ScriptCall<'_>; 1]> =
            requests.iter().map(|request| request as _).zip(&members).map(call).collect();
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

impl SlotGroup {
    /// Returns the charges that the script of this group has taken and that have to be given back if the request is refused; adds to
    /// `left` the remaining hits after that.
    fn taken(
        &self,
        charges: &[Charge],
        rows: &ChargeRows,
        mode: Mode,
        left: &mut SmallVec<[(usize, u32, Micros); 4]>,
    ) -> SmallVec<[usize; 4]> {
        let members = || self.members.iter().map(|&member| (member, &charges[member])).zip(rows.iter());
        let verdicts = || members().filter_map(|((_, charge), row)| row.answer.map(|verdict| (charge, verdict)));
        let has_refused = match mode {
            Mode::Each | Mode::Lean | Mode::Existing | Mode::Later | Mode::Lease => false,
            Mode::All => is_request_refused(verdicts().map(|(charge, verdict)| charge.charge_outcome(verdict.outcome))),
            Mode::Take => {
                verdicts().any(|(charge, verdict)| charge.role == Role::Enforce && verdict.outcome.is_refused())
            }
        };
        let mut taken = SmallVec::new();
        if has_refused {
            return taken;
        }
        for ((member, charge), row) in members() {
            if charge.limit.is_closed() || charge.is_recorded_despite_refusal() {
                continue;
            }
            if let Some((remaining, reset)) = row.left {
                left.push((member, remaining, reset));
            }
            let is_admitted = row.answer.is_some_and(|verdict| verdict.outcome == Outcome::Admitted);
            if is_admitted && !row.is_unrecorded && charge.hits.taken() > 0 {
                taken.push(member);
            }
        }
        taken
    }
}

#[cfg(test)]
mod tests;
