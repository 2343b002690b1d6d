//! Requests as they are packed for the script, and the command that runs them.

use std::collections::HashMap;

use redis::Cmd;
use smallvec::SmallVec;

use super::{Mode, SHA1, text};
use crate::algorithm::{Algorithm, Charge};
use crate::model::{CounterKey, Delay, Micros};

/// Kinds of `delay` in a packed charge.
const NO_DELAY: u8 = 0;
const SLOT: u8 = 1;
const GROWING: u8 = 2;
/// In place of a delay, which leased limits have none of: hits for a lease.
const ASK: u8 = 3;
/// In place of a delay, which such limits have none of: a peek, which is refused while one hit does not fit.
const PEEK: u8 = 4;
/// Bytes of a request without its charges: a length of 4, a deadline of 8, a mode of up to 5 letters with its terminator, and two numbers of 4.
pub(super) const HEAD: usize = 26;
/// Bytes of the name of the command and of a number of keys of up to 7 digits.
const NUMBER: usize = 14;
/// Bytes of the longest packed charge, so that charges are packed without reallocation: that of a growing delay.
pub(super) const LONGEST: usize = SHORTEST + 12;
/// Bytes of the shortest packed charge, so that the length of packed charges bounds their number.
pub(super) const SHORTEST: usize = 56;
/// Code of the error of a request whose counters could not be read, so that nothing was written for it.
pub const UNREAD: &str = "UNREAD";
/// Mode of a call that reverses charges.
const UNDO: &str = "undo";

/// Way in which a command names the script.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    /// `EVALSHA` and its hash: the server has to know it.
    Hash,
    /// `EVAL` and its text. The server knows it afterwards.
    Text,
}

/// Requests that one call of the script decides, one after the other.
#[derive(Debug, Default)]
pub struct Requests {
    /// Keys of all requests, and where each ends.
    keys: Vec<u8>,
    ends: SmallVec<[usize; 4]>,
    packed: Vec<u8>,
}

impl Requests {
    /// Adds a request that charges `charges`, in a cluster of one slot. The script does nothing for it after `deadline`, which is a time of
    /// the node's clock.
    pub fn charge(&mut self, prefix: &[u8], charges: &[&Charge], mode: Mode, deadline: Micros) {
        // A part of a group, or of a request, is not decided here.
        let has_groups = mode != Mode::Take;
        let mut packed: SmallVec<[Packed<'_>; 4]> = charges.iter().map(|charge| Packed::new(charge)).collect();
        for packed in &mut packed {
            packed.group = packed.charge.group().filter(|_| has_groups);
        }
        self.add(prefix, &packed, deadline, mode.name());
    }

    /// Adds a request that reverses `charges`, each with the time of its reply. It has no deadline: until it runs, the counters are too high.
    pub fn undo(&mut self, prefix: &[u8], charges: &[(Charge, Micros)]) {
        let mut undone: Vec<Packed<'_>> = Vec::with_capacity(charges.len());
        let mut places = HashMap::new();
        for (charge, at) in charges {
            let Packed { hits, .. } = Packed::new(charge);
            // Charges of one counter against one limit are reversed as one: each would move all that came after them.
            let place = *places.entry((&charge.key, charge.limit.quota().limit(), at)).or_insert(undone.len());
            match undone.get_mut(place) {
                Some(same) => same.hits = same.hits.saturating_add(hits),
                None => undone.push(Packed { charge, hits, back: at.get(), group: None }),
            }
        }
        self.add(prefix, &undone, Micros::ZERO, UNDO);
    }

    fn add(&mut self, prefix: &[u8], charges: &[Packed<'_>], deadline: Micros, mode: &str) {
        // Each key once. A closed limit has no counter.
        let open = charges.iter().filter(|packed| !packed.charge.limit.is_closed());
        let mut keys: SmallVec<[&CounterKey; 4]> = open.map(|packed| &packed.charge.key).collect();
        keys.sort_unstable();
        keys.dedup();

        self.keys.reserve(keys.iter().map(|key| prefix.len() + key.as_bytes().len()).sum());
        for key in &keys {
            self.keys.extend_from_slice(prefix);
            self.keys.extend_from_slice(key.as_bytes());
            self.ends.push(self.keys.len());
        }
        let begin = self.packed.len();
        self.packed.reserve(HEAD + LONGEST * charges.len());
        self.packed.extend_from_slice(&[0; size_of::<u32>()]);
        self.packed.extend_from_slice(&deadline.get().to_le_bytes());
        self.packed.extend_from_slice(mode.as_bytes());
        self.packed.push(0);
        self.packed.extend_from_slice([small(keys.len()), small(charges.len())].map(u32::to_le_bytes).as_flattened());
        for packed in charges {
            packed.write(&mut self.packed, &keys);
        }
        let length = small(self.packed.len() - begin).to_le_bytes();
        self.packed[begin..begin + length.len()].copy_from_slice(&length);
    }

    /// Returns a request that charges nothing and is answered with the time. It has `key` where the server is found by a key.
    pub fn time(key: Option<&[u8]>) -> Self {
        let mut requests = Self::default();
        requests.undo(&[], &[]);
        if let Some(key) = key {
            requests.keys.extend_from_slice(key);
            requests.ends.push(key.len());
        }
        requests
    }

    /// Returns true if they have more than one counter.
    pub fn has_several_keys(&self) -> bool {
        self.ends.len() > 1
    }

    /// Returns the command that runs them. In a cluster, all their counters must be in one slot.
    pub fn command(&self, by: By) -> Cmd {
        self.command_with(self.ends.len(), by)
    }

    /// Returns the command that runs them at a node of a cluster, where their counters are in any slots. A request whose slots are not all
    /// there fails with the code [`UNREAD`].
    pub fn command_over_slots(&self, by: By) -> Cmd {
        self.command_with(0, by)
    }

    /// Returns the command in which so many counters are declared, all or none.
    fn command_with(&self, declared: usize, by: By) -> Cmd {
        let (name, script) = match by {
            By::Hash => ("EVALSHA", SHA1.as_str()),
            By::Text => ("EVAL", text()),
        };
        let mut command =
            Cmd::with_capacity(self.ends.len() + 4, script.len() + self.keys.len() + self.packed.len() + NUMBER);
        command.arg(name).arg(script).arg(declared);
        let mut begin = 0;
        for &end in &self.ends {
            command.arg(&self.keys[begin..end]);
            begin = end;
        }
        // One argument for all: each costs the client, the server and `replies.rs` more than its bytes.
        command.arg(self.packed.as_slice());
        command
    }
}

/// A charge as it is packed: `hits` are taken; `back` are given back, or the time of the charge if it is reversed.
pub(super) struct Packed<'a> {
    charge: &'a Charge,
    hits: u64,
    back: u64,
    /// The group that the script decides.
    group: Option<u32>,
}

impl<'a> Packed<'a> {
    pub(super) fn new(charge: &'a Charge) -> Self {
        let hits = charge.limit.counted(charge.hits);
        Self { charge, hits: hits.taken(), back: hits.given_back(), group: None }
    }

    /// Writes it in the format of `record` in `driver.lua`.
    pub(super) fn write(&self, into: &mut Vec<u8>, keys: &[&CounterKey]) {
        let Self { charge: Charge { key, limit, .. }, hits, back, group } = *self;
        let delay = limit.delay_of(self.charge.hits);
        let place = if limit.is_closed() { 0 } else { keys.partition_point(|known| *known < key) + 1 };
        let quota = match delay {
            _ if limit.is_closed() => limit.quota().with_burst(0),
            Some(Delay::Growing { .. }) => limit.widened(),
            _ => limit.quota(),
        };
        into.extend_from_slice(&small(place).to_le_bytes());
        into.push(number(limit.algorithm()));
        // Few long writes: each costs as much as it writes.
        into.extend_from_slice([quota.limit(), quota.burst()].map(u32::to_le_bytes).as_flattened());
        let numbers = [quota.window().length().get(), quota.tick().get(), hits, back];
        into.extend_from_slice(numbers.map(u64::to_le_bytes).as_flattened());
        into.extend_from_slice(&small(self.charge.descriptor).to_le_bytes());
        let records = limit.records_refused(self.charge.charging);
        let stays = u32::from(self.charge.is_always_recorded()) + group.map_or(0, |group| 2 * (group + 1));
        let kind = match delay {
            None if self.charge.ask > 0 => ASK,
            None if limit.refuses_full_peek(self.charge.hits) => PEEK,
            None => NO_DELAY,
            Some(Delay::Slot { .. }) => SLOT,
            Some(Delay::Growing { .. }) => GROWING,
        };
        into.extend_from_slice(&[self.charge.role as u8 + 1, u8::from(records), kind]);
        into.extend_from_slice(&stays.to_le_bytes());
        if let Some(delay) = delay {
            into.extend_from_slice(&short(delay.max()).to_le_bytes());
            if let Delay::Growing { step, .. } = delay {
                into.extend_from_slice(&short(step).to_le_bytes());
                into.extend_from_slice(&limit.capacity().to_le_bytes());
            }
        } else if kind == ASK {
            into.extend_from_slice(&self.charge.ask.to_le_bytes());
        }
    }
}

/// Returns the number of an algorithm in the script.
pub(super) const fn number(algorithm: Algorithm) -> u8 {
    algorithm as u8 + 1
}

/// Converts a wait. The longest that a rule may set has 29 bits.
fn short(wait: Micros) -> u32 {
    u32::try_from(wait.get()).unwrap_or(u32::MAX)
}

/// Converts an index within a request. The largest request that is read, 4 MiB, has far fewer entries.
fn small(place: usize) -> u32 {
    u32::try_from(place).unwrap_or(u32::MAX)
}
