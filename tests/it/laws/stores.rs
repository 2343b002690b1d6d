//! Every store with its clock in the test's hand, so that a law is written once.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicU64, Ordering};

use redis::{Client, Connection, Value};
use tidegate::algorithm::{Algorithm, Charge, Limit};
use tidegate::model::{Charging, Hits, Micros, Verdict};

use super::oracle::Told;
use crate::histories::charge;
use crate::redis::Single;
use crate::redis::cluster::{Cluster, slot};
use crate::support::by_tier;
use crate::twins::bench::{answers, at, by_hand, charging_call, mode, replaced, rows};
use crate::world;

/// Where counters live.
pub enum Store {
    /// In this process.
    Memory,
    /// In Redis, or in the masters of a cluster.
    Redis {
        /// Which of them has a slot.
        nodes: Vec<Node>,
        /// How many examples are tried where the embedded store tries 2,000: a call takes so much longer.
        cases: u32,
        _single: Option<Box<Single>>,
    },
}

/// A server that knows the script.
pub struct Node {
    slots: Vec<RangeInclusive<u16>>,
    connection: RefCell<Connection>,
    sha1: String,
}

/// Counters that nobody else uses, all of them gone when this is dropped. The clock is set for every charge.
pub enum Counters<'a> {
    Memory(world::Counters),
    Redis(Keys<'a>),
}

/// Counters in Redis, all in one slot, for a request of several is one call then.
pub struct Keys<'a> {
    node: &'a Node,
    prefix: String,
    used: RefCell<BTreeSet<Vec<u8>>>,
}

/// What is added to the moments at which keys expire, for which Redis has a clock of its own: microseconds by hand look to it
/// like milliseconds far ahead, the year 2286 at the earliest, so nothing goes before the test says so.
const FAR: u64 = 10_000_000_000_000;

impl Store {
    /// A server of its own.
    pub async fn redis() -> Self {
        let single = Single::start(&[]).await;
        let node = Node::new(&single, vec![0..=16_383]);
        Self::Redis { nodes: vec![node], cases: by_tier(400, 800), _single: Some(Box::new(single)) }
    }

    /// The cluster of six.
    pub async fn cluster() -> Self {
        let cluster = Cluster::shared().await;
        let shards = cluster.shards().await.into_iter();
        let nodes = shards.map(|shard| Node::new(&cluster.nodes()[shard.master], shard.slots)).collect();
        Self::Redis { nodes, cases: by_tier(200, 400), _single: None }
    }

    /// Counters that nobody has used.
    pub fn counters(&self) -> Counters<'_> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        match self {
            Self::Memory => Counters::Memory(world::Counters::new()),
            Self::Redis { nodes, .. } => {
                let number = NUMBER.fetch_add(1, Ordering::Relaxed).to_string();
                let slot = slot(&number);
                let node = nodes.iter().find(|node| node.slots.iter().any(|slots| slots.contains(&slot)));
                let node = node.expect("every slot has a master");
                Counters::Redis(Keys { node, prefix: format!("law:{{{number}}}"), used: RefCell::default() })
            }
        }
    }

    /// How many examples are tried where the embedded store tries so many.
    pub fn cases(&self, embedded: u32) -> u32 {
        match self {
            Self::Memory => embedded,
            Self::Redis { cases, .. } => *cases,
        }
    }

    /// The time by which a counter that was refused is remembered longer, so that it stays where a full store makes room.
    pub fn keeps_refused(&self) -> Micros {
        match self {
            Self::Memory => Micros::from_secs(2),
            Self::Redis { .. } => Micros::ZERO,
        }
    }

    /// How much longer than it must a counter may be remembered that was first charged so long before it is idle: Redis counts
    /// milliseconds, keeps a meter until a whole second, or until a multiple of up to twice the time in which it drains, and windows to their end.
    pub fn rounding(&self, limit: &Limit, used_for: Micros) -> Micros {
        match self {
            Self::Memory => Micros::ZERO,
            Self::Redis { .. } if limit.algorithm().has_burst() => {
                Micros::from_secs(1).max(used_for.saturating_add(used_for)).saturating_add(Micros::from_millis(1))
            }
            // It is kept to the end of the last window in which its hits count.
            Self::Redis { .. } if limit.algorithm() == Algorithm::SlidingWindow => {
                limit.quota().window().length().saturating_add(Micros::from_millis(1))
            }
            // A window that is used up is kept one longer, so that who goes on is counted in it where memory is full.
            Self::Redis { .. } if limit.algorithm() == Algorithm::FixedWindow => {
                limit.quota().window().length().saturating_add(Micros::from_millis(1))
            }
            Self::Redis { .. } => Micros::from_millis(1),
        }
    }
}

impl Node {
    fn new(server: &Single, slots: Vec<RangeInclusive<u16>>) -> Self {
        let mut connection = Client::open(server.url()).expect("a URL").get_connection().expect("it connects");
        let sha1 = redis::cmd("SCRIPT").arg("LOAD").arg(text()).query(&mut connection).expect("it compiles");
        Self { slots, connection: RefCell::new(connection), sha1 }
    }
}

/// The script with the clock of the test. It gives a counter the lifetime that it always gives, without the slack; but the
/// lifetime begins at the moment of the test and ends at one, which the key tells.
fn text() -> String {
    let text = replaced(&by_hand(), "local slack = ", "local slack = 0");
    let text = replaced(
        &text,
        "return string.format('%.0f', ttl)",
        &format!("return string.format('%.0f', {FAR} + now + ttl * 1000)"),
    );
    let text = replaced(
        &text,
        "reply = call('SET', key, saved, 'PX', ",
        "reply = call('SET', key, saved, 'PXAT', ttl_until(expiry))",
    );
    replaced(&text, "local failed = call('PEXPIRE', ", "local failed = call('PEXPIREAT', key, ttl_until(expiry))")
}

impl Counters<'_> {
    pub fn request(&self, charges: &[Charge], now: Micros) -> Vec<Verdict> {
        match self {
            Self::Memory(counters) => counters.request(charges, now),
            Self::Redis(keys) => keys.request(charges, now),
        }
    }

    /// Charges the only counter.
    pub fn charge(&self, limit: Limit, charging: Charging, now: Micros, hits: Hits) -> Told {
        self.request(&[charge("only", limit, charging, hits)], now)[0].into()
    }

    /// Forgets every counter that the store would have forgotten at this moment.
    pub fn forget(&self, now: Micros) {
        match self {
            Self::Memory(counters) => {
                counters.clock.set(now);
                counters.store.sweep();
            }
            Self::Redis(keys) => keys.forget(now),
        }
    }

    /// How many counters are remembered.
    pub fn held(&self) -> usize {
        match self {
            Self::Memory(counters) => counters.store.counters(),
            Self::Redis(keys) => keys.used.borrow().iter().filter(|key| keys.expires(key).is_some()).count(),
        }
    }
}

impl Keys<'_> {
    fn request(&self, charges: &[Charge], now: Micros) -> Vec<Verdict> {
        self.used.borrow_mut().extend(charges.iter().map(|charge| self.key(charge)));
        let (all, mode): (Vec<_>, _) = (charges.iter().collect(), mode(charges));
        let call = charging_call(self.prefix.as_bytes(), &all, mode, now);
        let reply = at(&self.node.sha1, now, &call).query(&mut *self.node.connection.borrow_mut());
        answers(&rows(&reply.expect("Redis answers"), charges.len(), mode))
    }

    /// The key of a counter.
    pub fn key(&self, charge: &Charge) -> Vec<u8> {
        [self.prefix.as_bytes(), charge.key.as_bytes()].concat()
    }

    /// Runs any command on a key.
    pub fn run(&self, command: &str, key: &[u8], arguments: &[&[u8]]) -> Value {
        let mut command = redis::cmd(command);
        command.arg(key);
        for argument in arguments {
            command.arg(*argument);
        }
        command.query(&mut *self.node.connection.borrow_mut()).expect("Redis answers")
    }

    /// When a key that is there expires, by the clock of the test.
    fn expires(&self, key: &[u8]) -> Option<Micros> {
        const NO_KEY: i64 = -2;
        let expires: i64 = redis::from_redis_value(self.run("PEXPIRETIME", key, &[])).expect("a number");
        let by_hand = |expires: i64| u64::try_from(expires).ok()?.checked_sub(FAR);
        (expires != NO_KEY).then(|| Micros::new(by_hand(expires).expect("every counter expires, by the test's clock")))
    }

    fn forget(&self, now: Micros) {
        for key in &*self.used.borrow() {
            if self.expires(key).is_some_and(|expires| expires <= now) {
                self.run("DEL", key, &[]);
            }
        }
    }
}

impl Drop for Keys<'_> {
    fn drop(&mut self) {
        for key in &*self.used.borrow() {
            self.run("DEL", key, &[]);
        }
    }
}
