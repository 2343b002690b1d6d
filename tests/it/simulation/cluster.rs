//! The slots of a simulated cluster, as each of its servers knows them (Redis cluster specification).

use std::ops::Range;
use std::rc::Rc;

use super::keys::Reply;

pub const SLOTS: usize = 16_384;

/// The servers of all slots, at one epoch.
pub struct Map {
    /// The master of each slot.
    owners: Vec<usize>,
    /// The replica of each server that is a master.
    replicas: Vec<Option<usize>>,
    pub epoch: u64,
    addresses: Rc<[String]>,
}

/// Slots that move: the keys that are not at `from` any more are at `to`.
#[derive(Clone)]
pub struct Moving {
    pub slots: Range<usize>,
    pub from: usize,
    pub to: usize,
}

/// The cluster as one of its servers knows it.
#[derive(Clone)]
pub struct View {
    pub own: usize,
    pub map: Rc<Map>,
    pub moving: Option<Moving>,
    /// It has not heard of most masters for the node timeout, and serves nobody.
    pub is_down: bool,
}

/// The reason for which a command is not executed at a server.
#[derive(Debug, PartialEq, Eq)]
pub enum Elsewhere {
    CrossSlot,
    Down,
    Moved(usize, usize),
    Ask(usize, usize),
    TryAgain,
}

/// The slot of a key.
pub fn slot(key: &[u8]) -> usize {
    let tag = key.iter().position(|byte| *byte == b'{').and_then(|open| {
        let rest = &key[open + 1..];
        rest.iter().position(|byte| *byte == b'}').filter(|end| *end > 0).map(|end| &rest[..end])
    });
    usize::from(crc16::State::<crc16::XMODEM>::calculate(tag.unwrap_or(key))) % SLOTS
}

impl Map {
    /// Creates a map of the first `masters` servers. Behind them stand their replicas, in the same order.
    pub fn new(masters: usize, addresses: Rc<[String]>) -> Self {
        let owners = (0..SLOTS).map(|slot| slot * masters / SLOTS).collect();
        let replicas = (0..addresses.len()).map(|place| (place < masters).then_some(place + masters)).collect();
        Self { owners, replicas, epoch: 1, addresses }
    }

    pub fn owner(&self, slot: usize) -> usize {
        self.owners[slot]
    }

    /// Returns the next map, in which `to` has these slots.
    pub fn given(&self, slots: Range<usize>, to: usize) -> Self {
        let mut owners = self.owners.clone();
        owners[slots].fill(to);
        let (replicas, addresses) = (self.replicas.clone(), Rc::clone(&self.addresses));
        Self { owners, replicas, epoch: self.epoch + 1, addresses }
    }

    /// Returns the next map, in which `new` is the master in place of `old`, which is its replica.
    pub fn promoted(&self, old: usize, new: usize) -> Self {
        let owners = self.owners.iter().map(|owner| if *owner == old { new } else { *owner }).collect();
        let (mut replicas, addresses) = (self.replicas.clone(), Rc::clone(&self.addresses));
        (replicas[old], replicas[new]) = (None, Some(old));
        Self { owners, replicas, epoch: self.epoch + 1, addresses }
    }

    /// The reply to `CLUSTER SLOTS`.
    pub fn slots(&self) -> Reply {
        let number = |slot: usize| Reply::Number(i64::try_from(slot).expect("it fits"));
        let node = |place: usize| {
            let (host, port) = self.addresses[place].split_once(':').expect("a port");
            Reply::List(vec![Reply::Text(host.into()), Reply::Number(port.parse().expect("a number"))])
        };
        let mut first = 0;
        let ranges = self.owners.chunk_by(|one, other| one == other).map(|range| {
            let (from, owner) = (first, range[0]);
            first += range.len();
            let nodes = std::iter::once(owner).chain(self.replicas[owner]).map(node);
            Reply::List([number(from), number(first - 1)].into_iter().chain(nodes).collect())
        });
        Reply::List(ranges.collect())
    }
}

impl View {
    /// Takes a newer map over.
    pub fn learn(&mut self, map: &Rc<Map>) {
        if map.epoch > self.map.epoch {
            self.map = Rc::clone(map);
        }
    }

    /// Takes a map over that another server sends, which does not reach a server that is cut off.
    pub fn hear(&mut self, map: &Rc<Map>) {
        if !self.is_down {
            self.learn(map);
        }
    }

    /// The reply to `CLUSTER INFO`.
    pub fn info(&self) -> Reply {
        let state = if self.is_down { "fail" } else { "ok" };
        Reply::Text(format!("cluster_state:{state}\r\ncluster_current_epoch:{}\r\n", self.map.epoch).into_bytes())
    }

    /// Returns the reason for which a command with these keys is not executed here (`getNodeByQuery`). `is_there` says which are here.
    pub fn elsewhere(&self, keys: &[&[u8]], is_asking: bool, is_there: impl Fn(&[u8]) -> bool) -> Option<Elsewhere> {
        let slot = slot(keys.first()?);
        if keys.iter().any(|key| self::slot(key) != slot) {
            return Some(Elsewhere::CrossSlot);
        } else if self.is_down {
            return Some(Elsewhere::Down);
        }
        let (owner, missing) = (self.map.owner(slot), keys.iter().filter(|key| !is_there(key)).count());
        match self.moving.as_ref().filter(|moving| moving.slots.contains(&slot)) {
            Some(moving) if moving.from == self.own && owner == self.own && missing > 0 => {
                Some(if missing < keys.len() { Elsewhere::TryAgain } else { Elsewhere::Ask(slot, moving.to) })
            }
            Some(moving) if moving.to == self.own && is_asking => {
                (keys.len() > 1 && missing > 0).then_some(Elsewhere::TryAgain)
            }
            _ => (owner != self.own).then_some(Elsewhere::Moved(slot, owner)),
        }
    }

    /// The server's reply to a command that is not executed.
    pub fn redirection(&self, elsewhere: &Elsewhere) -> Reply {
        let address = |place: usize| &self.map.addresses[place];
        Reply::Error(match elsewhere {
            Elsewhere::CrossSlot => "CROSSSLOT Keys in request don't hash to the same slot".to_owned(),
            Elsewhere::Down => "CLUSTERDOWN The cluster is down".to_owned(),
            Elsewhere::Moved(slot, to) => format!("MOVED {slot} {}", address(*to)),
            Elsewhere::Ask(slot, to) => format!("ASK {slot} {}", address(*to)),
            Elsewhere::TryAgain => "TRYAGAIN Multiple keys request during rehashing of slot".to_owned(),
        })
    }
}
