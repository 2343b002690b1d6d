//! The slots of a simulated cluster, and which of its servers has them.

use std::cell::{Cell, RefCell};

use super::keys::Reply;

const SLOTS: usize = 16_384;

/// The slots of a cluster, as all of its servers know them.
pub struct Cluster {
    /// The server of each slot.
    owners: RefCell<Vec<usize>>,
    epoch: Cell<u64>,
    addresses: Vec<String>,
}

/// The slot of a key (Redis cluster specification, "Key distribution model").
pub fn slot(key: &[u8]) -> usize {
    let tag = key.iter().position(|byte| *byte == b'{').and_then(|open| {
        let rest = &key[open + 1..];
        rest.iter().position(|byte| *byte == b'}').filter(|end| *end > 0).map(|end| &rest[..end])
    });
    usize::from(crc16::State::<crc16::XMODEM>::calculate(tag.unwrap_or(key))) % SLOTS
}

impl Cluster {
    pub fn new(addresses: Vec<String>) -> Self {
        let owners = (0..SLOTS).map(|slot| slot * addresses.len() / SLOTS).collect();
        Self { owners: RefCell::new(owners), epoch: Cell::new(1), addresses }
    }

    pub fn owner(&self, slot: usize) -> usize {
        self.owners.borrow()[slot]
    }

    /// Gives slots to another server.
    pub fn give(&self, slots: std::ops::Range<usize>, to: usize) {
        self.owners.borrow_mut()[slots].fill(to);
        self.epoch.set(self.epoch.get() + 1);
    }

    pub fn moved(&self, slot: usize) -> Reply {
        Reply::Error(format!("MOVED {slot} {}", self.addresses[self.owner(slot)]))
    }

    /// The reply to `CLUSTER INFO`.
    pub fn info(&self) -> Reply {
        Reply::Text(format!("cluster_state:ok\r\ncluster_current_epoch:{}\r\n", self.epoch.get()).into_bytes())
    }

    /// The reply to `CLUSTER SLOTS`.
    pub fn slots(&self) -> Reply {
        let owners = self.owners.borrow();
        let (mut ranges, mut first) = (Vec::new(), 0);
        for slot in 1..=SLOTS {
            if slot < SLOTS && owners[slot] == owners[first] {
                continue;
            }
            let (host, port) = self.addresses[owners[first]].split_once(':').expect("a port");
            let number = |slot: usize| Reply::Number(i64::try_from(slot).expect("it fits"));
            let node = vec![Reply::Text(host.into()), Reply::Number(port.parse().expect("a number"))];
            ranges.push(Reply::List(vec![number(first), number(slot - 1), Reply::List(node)]));
            first = slot;
        }
        Reply::List(ranges)
    }
}
