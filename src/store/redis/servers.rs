//! The servers of one Redis and the slots of each: one server, one that sentinels name, or the masters of a cluster.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use arc_swap::ArcSwap;
use crc16::{State, XMODEM};
use futures_util::future::join_all;
use parking_lot::Mutex;
use redis::cmd;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep_until, timeout_at};

use super::address::{Address, Topology};
use super::backoff::chance;
use super::files;
use super::manager::{Access, Followed, Locate};
use super::node::Node;
use crate::store::StoreError;
use crate::telemetry::servers::{FailureReason, Server};
use crate::telemetry::throttle::LogThrottle;

mod follow;
mod lookup;
mod map;
mod sentinels;

use map::{MapReply, NoMap, Range, ask_for_map, complain_of_no_map};

/// Number of slots of a cluster (the cluster specification): 16,384.
const SLOTS: u16 = 16_384;
/// Interval between requests for the map of a cluster without a hint of a change: 10 s.
const REFRESH: Duration = Duration::from_secs(10);
/// Minimum time between two requests for the map after a hint of a change: 50 ms.
const REFRESH_AGAIN: Duration = Duration::from_millis(50);
/// Timeout of a request for the map, and of a `PING`: 100 ms.
const MAP_TIMEOUT: Duration = Duration::from_millis(100);
/// Nodes that are asked for the map at once: 5, so that newer maps of others replace an old one.
const MOST_ASKED: usize = 5;
/// Interval between attempts to connect while no connection is alive and no call tries: 500 ms.
const CONNECT_AGAIN: Duration = Duration::from_millis(500);
/// Time after which an older map is accepted if no node sends a newer one: 30 s. A master that was cut off from its cluster stops
/// by itself long before. An older map that is still sent then belongs to a cluster that was created anew.
const REBORN: Duration = Duration::from_secs(30);
/// Interval at which nodes in doubt are checked for a due probe: 20 ms.
const PROBES: Duration = Duration::from_millis(20);

/// Label in metrics for slots without a known node.
const UNMAPPED: &str = "unmapped";

/// The servers of one Redis.
pub struct Servers {
    access: Access,
    lanes: usize,
    shape: Shape,
    /// Wakes the supervisor.
    attention: Arc<Notify>,
    /// Time since which every received map has been older than the present one.
    older_since: Mutex<Option<Instant>>,
    unmapped: LogThrottle,
    nowhere: Arc<Server>,
    /// True once there was a connection.
    was_reached: AtomicBool,
}

enum Shape {
    /// One server: another node takes its place when it moves.
    One(ArcSwap<Node>),
    Cluster {
        map: ArcSwap<Map>,
        /// The configured nodes. They are kept, so that backoff applies to one that is down.
        seeds: Vec<Arc<Node>>,
        renewed: watch::Sender<()>,
    },
}

/// Assignment of slots to nodes.
#[derive(Default)]
struct Map {
    /// For each slot an index into `masters`, or a number beyond them.
    slots: Vec<u16>,
    masters: Vec<Arc<Node>>,
    /// Every node that this map names.
    known: HashMap<Address, Arc<Node>>,
    /// The cluster's epoch at the time of the map. A map with a lower epoch is older.
    epoch: u64,
}

impl Servers {
    /// Creates the servers of `topology`, each with a connection for each of `lanes` threads.
    pub fn new(topology: Topology, access: Access, lanes: usize) -> Self {
        let attention = Arc::new(Notify::new());
        let node = |locate| Arc::new(Node::new(locate, access.clone(), lanes, Arc::clone(&attention)));
        let shape = match topology {
            Topology::Single(address) => Shape::One(node(Locate::single(address)).into()),
            Topology::Sentinel { master: name, sentinels, login } => {
                let of = Followed::Master { name, sentinels, login };
                Shape::One(node(Locate::Followed { of, place: None }).into())
            }
            Topology::Cluster(seeds) => {
                let seeds = seeds.into_iter().map(|address| node(Locate::At(address))).collect();
                Shape::Cluster { map: ArcSwap::from_pointee(Map::default()), seeds, renewed: watch::Sender::new(()) }
            }
        };
        let nowhere = access.metrics.named(UNMAPPED);
        let (older_since, unmapped, was_reached) = (Mutex::new(None), LogThrottle::new(), AtomicBool::new(false));
        Self { access, lanes, shape, attention, older_since, unmapped, nowhere, was_reached }
    }

    /// Returns true if the counters of a call must be in one slot.
    pub const fn is_cluster(&self) -> bool {
        matches!(self.shape, Shape::Cluster { .. })
    }

    /// Returns true if a connection is alive and, in a cluster, the nodes of the slots are known.
    pub fn is_connected(&self) -> bool {
        let is_mapped = match &self.shape {
            Shape::One(_) => true,
            Shape::Cluster { map, .. } => !map.load().masters.is_empty(),
        };
        is_mapped && self.access.alive.load(Ordering::Acquire) > 0
    }

    /// Returns true if there has been a connection since the start.
    pub fn was_reached(&self) -> bool {
        let is_reached = self.access.alive.load(Ordering::Acquire) > 0;
        self.was_reached.fetch_or(is_reached, Ordering::AcqRel) || is_reached
    }

    /// Connects the calling thread to every node that receives charges. Waits until `until` at most.
    pub async fn connect(&self, until: Instant) {
        let nodes = self.nodes();
        join_all(nodes.iter().map(|node| node.ask(vec![cmd("PING")], until))).await;
    }

    /// Returns the slot of the key that begins with `prefix` and ends with `key`, or 0 outside a cluster. Counters of one slot are
    /// charged in one atomic step.
    pub fn slot(&self, prefix: &[u8], key: &[u8]) -> u16 {
        match &self.shape {
            Shape::One(_) => 0,
            Shape::Cluster { .. } if prefix.is_empty() => slot_of(key),
            Shape::Cluster { .. } => slot_of(&[prefix, key].concat()),
        }
    }

    /// Returns true if counters of one slot may be charged by one script. A single server that may be a proxy in front of several takes one
    /// counter each; the nodes of a cluster refuse what is elsewhere.
    pub fn is_together(&self) -> bool {
        match &self.shape {
            Shape::One(node) => node.load().is_together(),
            Shape::Cluster { .. } => true,
        }
    }

    /// Returns the node that has `slot`, if it is known.
    pub fn node(&self, slot: u16) -> Option<Arc<Node>> {
        match &self.shape {
            Shape::One(node) => Some(node.load_full()),
            Shape::Cluster { map, .. } => {
                let map = map.load();
                let master = map.slots.get(usize::from(slot)).and_then(|index| map.masters.get(usize::from(*index)));
                master.map(Arc::clone)
            }
        }
    }

    /// Returns the node that `from` named as `host:port` in `name`. An empty host is that of `from`. Waits until `until` for a
    /// cluster map with that node: redirects to unknown nodes are not followed.
    pub async fn named(&self, name: &str, from: &Node, until: Instant) -> Option<Arc<Node>> {
        let Shape::Cluster { map, renewed, .. } = &self.shape else { return None };
        let address = redirection(name, from.name())?;
        let mut maps = renewed.subscribe();
        self.attention.notify_one();
        loop {
            if let Some(node) = map.load().known.get(&address) {
                return Some(Arc::clone(node));
            }
            timeout_at(until, maps.changed()).await.ok()?.ok()?;
        }
    }

    /// Requests a new map of the cluster, since the present one may be old.
    pub fn doubt_map(&self) {
        self.attention.notify_one();
    }

    /// Returns the error for `charges` charges of a slot without a known node, and counts them in the metrics.
    pub fn unmapped<T>(&self, charges: usize) -> Result<T, StoreError> {
        self.doubt_map();
        self.nowhere.failed(FailureReason::Unreachable, charges);
        Err(StoreError::Unreachable)
    }

    /// Returns the metrics of charges for which no node is known.
    pub fn nowhere(&self) -> &Server {
        &self.nowhere
    }

    /// Connects, follows the cluster or the server's address, probes nodes in doubt, and polls files of secrets, for ever.
    pub async fn supervise(&self) {
        tokio::join!(self.look_after_nodes(), self.look_after_files(), self.follow());
    }

    async fn look_after_files(&self) {
        let Access { credentials, max_age, tls, .. } = &self.access;
        let password = credentials.follow(*max_age, || {
            self.nodes().iter().for_each(|node| node.authenticate_if_changed());
            self.attention.notify_one();
        });
        let certificates = async {
            if let Some(tls) = tls.clone().filter(|tls| tls.is_of_files()) {
                let changed = || {
                    tracing::warn!(
                        event = "store.tls.changed",
                        "the TLS files of Redis have changed; new connections use them"
                    );
                };
                files::follow("a TLS file of Redis", move || tls.read_again(), changed).await;
            }
        };
        tokio::join!(password, certificates);
    }

    async fn look_after_nodes(&self) {
        let mut refresh_at = Instant::now();
        loop {
            let nodes = self.nodes();
            join_all(nodes.iter().map(|node| node.probe())).await;
            let began = Instant::now();
            if refresh_at <= began {
                self.refresh().await;
                self.was_reached();
                refresh_at = began + REFRESH;
            }
            let is_in_doubt = self.nodes().iter().any(|node| !node.is_well());
            let is_alone = self.access.alive.load(Ordering::Acquire) == 0;
            let next = match (is_in_doubt, is_alone) {
                (true, _) => began + PROBES,
                (false, true) => began + CONNECT_AGAIN,
                (false, false) => refresh_at,
            };
            let is_hinted = tokio::select! {
                () = self.attention.notified() => true,
                () = sleep_until(next.min(refresh_at)) => false,
            };
            if is_hinted || is_in_doubt || is_alone {
                refresh_at = refresh_at.min(Instant::now().max(began + REFRESH_AGAIN));
            }
        }
    }

    /// Returns the smallest recent round trip of the furthest node.
    pub fn round_trip(&self) -> Option<Duration> {
        match &self.shape {
            Shape::One(node) => node.load().round_trip(),
            Shape::Cluster { map, .. } => map.load().masters.iter().filter_map(|node| node.round_trip()).max(),
        }
    }

    /// Returns every node that receives charges.
    pub fn nodes(&self) -> Vec<Arc<Node>> {
        match &self.shape {
            Shape::One(node) => vec![node.load_full()],
            Shape::Cluster { map, .. } => map.load().masters.clone(),
        }
    }

    /// In a cluster, asks some nodes for the map at once and takes the newest. Otherwise pings the server.
    async fn refresh(&self) {
        let (map, seeds, renewed) = match &self.shape {
            Shape::One(node) => {
                let node = node.load_full();
                if node.is_well() {
                    // Connects before the first charge, and detects a lost server. The timeout is short: no probe is sent meanwhile.
                    node.ask(vec![cmd("PING")], Instant::now() + MAP_TIMEOUT).await;
                }
                return;
            }
            Shape::Cluster { map, seeds, renewed } => (map, seeds, renewed),
        };
        let old = map.load_full();
        let (well, others): (Vec<_>, Vec<_>) = old
            .masters
            .iter()
            .chain(old.known.values())
            .cloned()
            .chain(seeds.iter().cloned())
            .partition(|node| node.is_well());
        let mut asked = HashSet::new();
        let distinct = |node: &Arc<Node>| asked.insert(node.name().to_owned());
        // Nodes in doubt are asked only if there are no others.
        let candidates = if well.is_empty() { others } else { well };
        let mut candidates: Vec<_> = candidates.into_iter().filter(distinct).collect();
        // Starts at a random node: nothing reveals that a replica is gone, and seeds are last in the list.
        let begin = usize::try_from(chance(candidates.len() as u64)).unwrap_or(0);
        candidates.rotate_left(begin);
        candidates.truncate(MOST_ASKED);
        let began = Instant::now();
        let until = began + if old.masters.is_empty() { self.access.connect_timeout } else { MAP_TIMEOUT };
        let replies = join_all(candidates.iter().map(|node| ask_for_map(node, until))).await;
        let is_no_cluster = replies.iter().any(|reply| matches!(reply, Err(NoMap::NoCluster)));
        // A node that was removed from the cluster knows no slots.
        let maps = replies.into_iter().flatten().filter(|reply| reply.slots() > 0);
        let Some(newest) = maps.max_by_key(|reply| (reply.epoch, reply.slots())) else {
            if self.unmapped.is_due() {
                complain_of_no_map(is_no_cluster, until - began);
            }
            return;
        };
        if newest.epoch < old.epoch && !self.is_reborn() {
            return;
        }
        *self.older_since.lock() = None;
        let new = self.map(&old, newest);
        // A node without slots is not probed. If it gets slots again, it starts as healthy.
        let left = old.masters.iter().filter(|node| !new.masters.iter().any(|master| Arc::ptr_eq(master, node)));
        left.for_each(|node| node.trust());
        map.store(Arc::new(new));
        renewed.send_replace(());
    }

    /// Returns true if no node has known the present epoch for 30 s, so that the cluster must have been created anew.
    fn is_reborn(&self) -> bool {
        self.older_since.lock().get_or_insert_with(Instant::now).elapsed() >= REBORN
    }

    fn map(&self, old: &Map, reply: MapReply) -> Map {
        let mut new = Map {
            slots: vec![u16::MAX; usize::from(SLOTS)],
            masters: Vec::new(),
            known: HashMap::new(),
            epoch: reply.epoch,
        };
        for Range { first, last, nodes } in reply.ranges {
            for (index, address) in nodes.into_iter().enumerate() {
                let node = match new.known.get(&address) {
                    Some(node) => Arc::clone(node),
                    None => self.node_at(old, &address),
                };
                new.known.insert(address, Arc::clone(&node));
                if index == 0 {
                    let at = new.masters.iter().position(|master| Arc::ptr_eq(master, &node)).unwrap_or_else(|| {
                        new.masters.push(node);
                        new.masters.len() - 1
                    });
                    let slots = usize::from(first)..=usize::from(last);
                    if let (Some(slots), Ok(at)) = (new.slots.get_mut(slots), u16::try_from(at)) {
                        slots.fill(at);
                    }
                }
            }
        }
        new
    }

    /// Returns the node at `address`; a known one keeps its connections.
    fn node_at(&self, old: &Map, address: &Address) -> Arc<Node> {
        let seed = || {
            let Shape::Cluster { seeds, .. } = &self.shape else { return None };
            let name = address.to_string();
            seeds.iter().find(|seed| seed.name() == name).cloned()
        };
        old.known.get(address).cloned().or_else(seed).unwrap_or_else(|| {
            let locate = Locate::At(address.clone());
            Arc::new(Node::new(locate, self.access.clone(), self.lanes, Arc::clone(&self.attention)))
        })
    }
}

/// Parses `name`, the `host:port` to which the node `from` redirects a call. An empty host is that of `from`.
fn redirection(name: &str, from: &str) -> Option<Address> {
    let (host, port) = name.rsplit_once(':')?;
    let host = if host.is_empty() { from.rsplit_once(':')?.0 } else { host };
    Some(Address::Tcp(host.trim_matches(['[', ']']).to_owned(), port.parse().ok()?))
}

/// Returns the slot of `key`: of the text in its first braces or, if that is missing or empty, of the whole key (the cluster
/// specification).
fn slot_of(key: &[u8]) -> u16 {
    let open = key.iter().position(|byte| *byte == b'{').map(|open| &key[open + 1..]);
    let tag = open.and_then(|rest| rest.iter().position(|byte| *byte == b'}').map(|close| &rest[..close]));
    State::<XMODEM>::calculate(tag.filter(|tag| !tag.is_empty()).unwrap_or(key)) % SLOTS
}

impl MapReply {
    /// Returns the number of slots that have a node.
    fn slots(&self) -> usize {
        self.ranges.iter().map(|range| usize::from(range.last.saturating_sub(range.first)) + 1).sum()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::{Address, Map, MapReply, Node, Range, Servers, Shape, Topology, redirection, slot_of};
    use crate::store::redis::tests::access;

    impl Servers {
        /// Puts `node` in the place of the only node.
        pub fn replace(&self, node: Arc<Node>) {
            let Shape::One(shown) = &self.shape else { panic!("a cluster has several") };
            shown.store(node);
        }
    }

    #[tokio::test]
    async fn the_first_node_of_each_range_of_slots_gets_its_charges_and_the_others_are_known() {
        let [one, other, replica] = [1, 2, 3].map(|port| Address::Tcp("127.0.0.1".to_owned(), port));
        let servers = Servers::new(Topology::Cluster(vec![one.clone()]), access(), 1);
        let range = |first, last, master: &Address| Range { first, last, nodes: vec![master.clone(), replica.clone()] };
        let ranges = vec![range(8_192, 16_383, &other), range(0, 8_191, &one)];
        let map = servers.map(&Map::default(), MapReply { epoch: 7, ranges });
        let master = |slot: usize| map.masters[usize::from(map.slots[slot])].name().to_owned();
        assert_eq!([0, 8_191].map(master), [one.to_string(), one.to_string()]);
        assert_eq!([8_192, 16_383].map(master), [other.to_string(), other.to_string()]);
        assert_eq!((map.masters.len(), map.known.len(), map.epoch), (2, 3, 7));
    }

    #[test]
    fn a_redirection_without_a_host_leads_to_another_port_of_the_same_host() {
        let to = |name| redirection(name, "10.0.0.2:7001").map(|address| address.to_string());
        assert_eq!(to("10.0.0.1:7000").as_deref(), Some("10.0.0.1:7000"));
        assert_eq!(to("fd00::1:7000"), to("[fd00::1]:7000"));
        assert_eq!(to(":7000").as_deref(), Some("10.0.0.2:7000"));
        assert_eq!(["10.0.0.1", "10.0.0.1:", "10.0.0.1:x", ""].map(to), [const { None }; 4]);
    }

    /// The expected slots are those of `CLUSTER KEYSLOT` in Redis 7.0.
    #[test]
    fn slots_are_those_of_the_server() {
        assert_eq!(slot_of(b"123456789"), 12_739);
        assert_eq!(slot_of(b"foo"), 12_182);
        assert_eq!(slot_of(b"x{foo}y{bar}"), 12_182);
        assert_eq!(slot_of(b"{}foo"), slot_of(b"{}foo"));
        assert_ne!(slot_of(b"{}foo"), slot_of(b"{}bar"), "empty braces are no tag");
        assert_ne!(slot_of(b"{foo"), slot_of(b"foo"), "nor is what is not closed");
    }
}
