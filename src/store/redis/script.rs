//! The script that charges counters in Redis: its text, which has the twins of all algorithms and one driver, its commands and
//! its replies.

use std::collections::HashMap;
use std::io::Write;
use std::sync::LazyLock;

use redis::{Cmd, RedisWrite, Script, Value};
use smallvec::SmallVec;

use crate::algorithm::{Algorithm, Charge, SHARED_TWINS};
use crate::model::{CounterKey, Delay, Micros, Outcome, Provenance, Verdict};

/// Relation between the charges of one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// No charge is all-or-nothing: nothing is reversed.
    Each,
    /// The call has all charges of the request. If the request is refused, only charges that are kept stay.
    All,
    /// The request has more charges elsewhere. The script reverses these if an enforced one of them refuses. Otherwise the caller
    /// must reverse them if the request is refused.
    Take,
    /// The charges were decided without the server. [`crate::store::Store::settle`] says how much of each is charged.
    Later,
    /// The hits are spent later. [`crate::store::Store::lease`] says how many are charged, and `room` of each verdict is that number.
    Lease,
}

/// Reply of the script.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ScriptReply {
    /// The script ran after its deadline and did nothing.
    TooLate {
        /// Time of the node.
        now: Micros,
    },
    /// The script charged.
    Done {
        /// Time of the node, which dates the charges.
        now: Micros,
        /// Results of the charges, in order.
        rows: ChargeRows,
    },
}

/// Results of the charges of one call, in order. They stay packed as the script sent them, which is cheap to move.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ChargeRows {
    reply: Vec<u8>,
    width: usize,
}

impl ChargeRows {
    /// Returns the rows in order.
    pub fn iter(&self) -> impl Iterator<Item = ChargeRow> {
        // `read` has parsed all of them once.
        self.reply.get(TIME..).unwrap_or_default().chunks_exact(self.width.max(1)).filter_map(row)
    }
}

/// Result of one charge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChargeRow {
    /// The verdict. `None` if the key holds no counter of Tidegate; the key is left as it is. Also `None` if there was no memory
    /// to save an admitted charge beside a refused one.
    pub answer: Option<Verdict>,
    /// True if the charge is admitted but its hits are not on the counter: there is nothing to reverse.
    pub is_unrecorded: bool,
    /// In [`Mode::Take`], the remaining hits and the reset if the charges of this call are reversed.
    pub left: Option<(u32, Micros)>,
}

/// Bytes of the time at the start of a reply.
const TIME: usize = 8;
/// Mode of a call that reverses charges.
const UNDO: &str = "undo";
/// Bytes of a reply for each charge: `row` in `driver.lua`.
const ROW: usize = 25;
/// Bytes of a reply for each charge in [`Mode::Take`], where `left` follows `row`.
const TAKE_ROW: usize = ROW + 12;
/// Wait in a reply if waiting does not help, or if there is nothing to wait for.
const NO_WAIT: i64 = -1;
/// Kinds of `delay` in a packed charge.
const NO_DELAY: u8 = 0;
const SLOT: u8 = 1;
const GROWING: u8 = 2;
/// Bytes of the longest packed charge, so that charges are packed without reallocation: that of a growing delay.
const LONGEST: usize = SHORTEST + 12;
/// Bytes of the shortest packed charge, so that the length of packed charges bounds their number.
const SHORTEST: usize = 53;
/// Bytes of a call without its keys and charges: `EVALSHA` and its hash 47, a number of keys of up to 7 digits, a deadline of 8, a mode
/// of up to 5 letters with its terminator, and a number of charges of 4.
const HEAD: usize = 72;

/// Text of the script: the function `twin(algorithm)`, which creates the twin of that algorithm and no other, and then the driver. The
/// number of an algorithm is its place in [`Algorithm::ALL`], from 1.
static TEXT: LazyLock<String> = LazyLock::new(|| {
    let shared = SHARED_TWINS.map(|(name, body)| format!("local function {name}(...)\n{body}end\n"));
    let twins = Algorithm::TWINS.iter().zip(1..);
    let twins: String =
        twins.map(|((name, body), number)| format!("if algorithm == {number} then -- {name}\n{body}end\n")).collect();
    let driver = include_str!("driver.lua");
    format!("local function twin(algorithm)\n{}{twins}end\n{driver}", shared.concat())
});

static SHA1: LazyLock<String> = LazyLock::new(|| Script::new(text()).get_hash().to_owned());

/// Returns the text of the script.
pub fn text() -> &'static str {
    &TEXT
}

/// Returns the command that loads the script.
pub fn load() -> Cmd {
    let mut command = redis::cmd("SCRIPT");
    command.arg("LOAD").arg(text());
    command
}

/// Returns the command that charges `charges`. In a cluster, all their counters must be in one slot. The script does nothing
/// after `deadline`, which is a time of the node's clock.
pub fn charge(prefix: &[u8], charges: &[&Charge], mode: Mode, deadline: Micros) -> Cmd {
    let charges: SmallVec<[Packed<'_>; 4]> = charges.iter().map(|charge| Packed::new(charge)).collect();
    call(prefix, &charges, deadline, mode.name())
}

/// Returns the command that reverses `charges`, each with the time of its reply. The command has no deadline: until it runs, the counters
/// are too high.
pub fn undo(prefix: &[u8], charges: &[(Charge, Micros)]) -> Cmd {
    let mut undone: Vec<Packed<'_>> = Vec::with_capacity(charges.len());
    let mut places = HashMap::new();
    for (charge, at) in charges {
        let Packed { hits, .. } = Packed::new(charge);
        // Charges of one counter against one limit are reversed as one: each would move all that came after them.
        let place = *places.entry((&charge.key, charge.limit.quota().limit(), at)).or_insert(undone.len());
        match undone.get_mut(place) {
            Some(same) => same.hits = same.hits.saturating_add(hits),
            None => undone.push(Packed { charge, hits, back: at.get() }),
        }
    }
    call(prefix, &undone, Micros::ZERO, UNDO)
}

/// Returns the time of the node at which the script ran, from its `reply`.
pub fn time_of(reply: &Value) -> Option<Micros> {
    let Value::BulkString(reply) = reply else { return None };
    let time = take::<TIME>(&mut reply.as_slice()).map(u64::from_le_bytes);
    // A text, such as the reply to SCRIPT LOAD, gives a number far above those that Lua counts exactly.
    time.filter(|time| *time < 1 << 53).map(Micros::new)
}

/// Parses the reply to `charges` charges; `None` if the script does not send such a reply.
pub fn read(reply: Value, charges: usize, mode: Mode) -> Option<ScriptReply> {
    let Value::BulkString(reply) = reply else { return None };
    let mut rows = reply.as_slice();
    let now = Micros::new(u64::from_le_bytes(take::<TIME>(&mut rows)?));
    if rows.is_empty() {
        return Some(ScriptReply::TooLate { now });
    }
    let width = if mode == Mode::Take { TAKE_ROW } else { ROW };
    if rows.len() != charges.checked_mul(width)? {
        return None;
    }
    let is_read = rows.chunks_exact(width).all(|bytes| row(bytes).is_some());
    is_read.then_some(ScriptReply::Done { now, rows: ChargeRows { reply, width } })
}

/// Returns the maximum size of a reply to charges of `packed_bytes` bytes in total: 37 to 57 bytes for each charge.
pub const fn largest_reply(packed_bytes: usize) -> usize {
    // `$`, a length of up to 20 digits, and two line ends.
    const FRAME: usize = 25;
    FRAME + TIME + packed_bytes / SHORTEST * TAKE_ROW
}

impl Mode {
    const fn name(self) -> &'static str {
        match self {
            Self::Each => "each",
            Self::All => "all",
            Self::Take => "take",
            Self::Later => "later",
            Self::Lease => "lease",
        }
    }
}

/// A charge as it is packed: `hits` are taken; `back` are given back, or the time of the charge if it is reversed.
struct Packed<'a> {
    charge: &'a Charge,
    hits: u64,
    back: u64,
}

impl<'a> Packed<'a> {
    fn new(charge: &'a Charge) -> Self {
        let hits = charge.limit.counted(charge.hits);
        Self { charge, hits: hits.taken(), back: hits.given_back() }
    }

    /// Writes it in the format of `record` in `driver.lua`.
    fn write(&self, writer: &mut impl Write, keys: &[&CounterKey]) {
        let Self { charge: Charge { key, limit, .. }, hits, back } = *self;
        let delay = limit.delay_of(self.charge.hits);
        let place = if limit.is_closed() { 0 } else { keys.partition_point(|known| *known < key) + 1 };
        let quota = match delay {
            _ if limit.is_closed() => limit.quota().with_burst(0),
            Some(Delay::Growing { .. }) => limit.widened(),
            _ => limit.quota(),
        };
        write(writer, &small(place).to_le_bytes());
        write(writer, &[limit.algorithm() as u8 + 1]);
        // Few long writes: each costs as much as it writes.
        write(writer, [quota.limit(), quota.burst()].map(u32::to_le_bytes).as_flattened());
        let numbers = [quota.window().length().get(), quota.tick().get(), hits, back];
        write(writer, numbers.map(u64::to_le_bytes).as_flattened());
        write(writer, &small(self.charge.descriptor).to_le_bytes());
        let (records, kept) = (limit.records_refused(self.charge.charging), self.charge.is_recorded_despite_refusal());
        let kind = match delay {
            None => NO_DELAY,
            Some(Delay::Slot { .. }) => SLOT,
            Some(Delay::Growing { .. }) => GROWING,
        };
        write(writer, &[self.charge.role as u8 + 1, u8::from(records), u8::from(kept), kind]);
        if let Some(delay) = delay {
            write(writer, &short(delay.max()).to_le_bytes());
            if let Delay::Growing { step, .. } = delay {
                write(writer, &short(step).to_le_bytes());
                write(writer, &limit.capacity().to_le_bytes());
            }
        }
    }
}

fn call(prefix: &[u8], charges: &[Packed<'_>], deadline: Micros, mode: &str) -> Cmd {
    // Each key once. A closed limit has no counter.
    let open = charges.iter().filter(|packed| !packed.charge.limit.is_closed());
    let mut keys: SmallVec<[&CounterKey; 4]> = open.map(|packed| &packed.charge.key).collect();
    keys.sort_unstable();
    keys.dedup();

    let bytes: usize = keys.iter().map(|key| prefix.len() + key.as_bytes().len()).sum();
    let mut command = Cmd::with_capacity(keys.len() + 4, HEAD + bytes + LONGEST * charges.len());
    command.arg("EVALSHA").arg(SHA1.as_str()).arg(keys.len());
    for key in &keys {
        let mut writer = command.writer_for_next_arg();
        write(&mut writer, prefix);
        write(&mut writer, key.as_bytes());
    }
    // One argument for all: each costs the client, the server and `replies.rs` more than its bytes.
    let mut writer = command.writer_for_next_arg();
    write(&mut writer, &deadline.get().to_le_bytes());
    write(&mut writer, mode.as_bytes());
    write(&mut writer, b"\0");
    write(&mut writer, &small(charges.len()).to_le_bytes());
    for packed in charges {
        packed.write(&mut writer, &keys);
    }
    drop(writer);
    command
}

/// Converts a wait. The longest that a rule may set has 29 bits.
fn short(wait: Micros) -> u32 {
    u32::try_from(wait.get()).unwrap_or(u32::MAX)
}

/// Converts an index within a request. The largest request that is read, 4 MiB, has far fewer entries.
fn small(place: usize) -> u32 {
    u32::try_from(place).unwrap_or(u32::MAX)
}

/// Writes to memory, which does not fail.
fn write(writer: &mut impl Write, bytes: &[u8]) {
    let _ = writer.write_all(bytes);
}

fn row(mut bytes: &[u8]) -> Option<ChargeRow> {
    let [code] = take(&mut bytes)?;
    let outcome = match code {
        0 | 3 => Some(Outcome::Admitted),
        1 => Some(Outcome::Refused),
        2 => None,
        _ => return None,
    };
    let (remaining, reset) = look(&mut bytes)?;
    let wait = match i64::from_le_bytes(take(&mut bytes)?) {
        NO_WAIT => None,
        wait => Some(Micros::new(wait.try_into().ok()?)),
    };
    let room = u32::from_le_bytes(take(&mut bytes)?);
    let answer = outcome.map(|outcome| {
        let (retry, delay) = if outcome.is_refused() { (wait, None) } else { (None, wait) };
        let (delay, provenance) = (delay.unwrap_or_default(), Provenance::Store);
        Verdict { outcome, remaining, room, reset, retry, delay, provenance }
    });
    let left = if bytes.is_empty() { None } else { Some(look(&mut bytes)?) };
    Some(ChargeRow { answer, is_unrecorded: code == 3, left })
}

/// Parses the remaining hits and the reset.
fn look(bytes: &mut &[u8]) -> Option<(u32, Micros)> {
    Some((u32::from_le_bytes(take(bytes)?), Micros::new(u64::from_le_bytes(take(bytes)?))))
}

fn take<const SIZE: usize>(bytes: &mut &[u8]) -> Option<[u8; SIZE]> {
    let (taken, rest) = bytes.split_first_chunk()?;
    *bytes = rest;
    Some(*taken)
}

#[cfg(test)]
mod tests {
    use redis::Value;

    use super::{LONGEST, Mode, Packed, ROW, SHORTEST, ScriptReply, TAKE_ROW, TIME, largest_reply, read};
    use crate::algorithm::{Algorithm, Charge, Limit};
    use crate::model::key::KeyPart;
    use crate::model::{Charging, Colocation, CounterKey, Hits, Micros, Quota, Role, StorePolicies, Unit, Window};

    /// Returns a reply at the time 7 with a row for each of `rows`.
    fn reply(rows: &[(u8, u32, u64, i64)]) -> Vec<u8> {
        let mut bytes = 7_u64.to_le_bytes().to_vec();
        for (code, remaining, reset, retry) in rows {
            bytes.push(*code);
            bytes.extend(remaining.to_le_bytes());
            bytes.extend(reset.to_le_bytes());
            bytes.extend(retry.to_le_bytes());
            bytes.extend(remaining.to_le_bytes());
        }
        bytes
    }

    fn is_read(bytes: &[u8], charges: usize, mode: Mode) -> bool {
        read(Value::BulkString(bytes.to_vec()), charges, mode).is_some()
    }

    #[test]
    fn what_the_script_never_answers_is_no_reply() {
        let whole = reply(&[(0, 1, 2, -1)]);
        assert_eq!(whole.len(), 8 + ROW);
        assert!(is_read(&whole, 1, Mode::Each));
        assert!(!is_read(&whole, 1, Mode::Take), "a row of that mode is longer");
        assert!(!is_read(&whole, 2, Mode::Each), "one row is missing");
        for length in (0..whole.len()).filter(|length| *length != 8) {
            assert!(!is_read(&whole[..length], 1, Mode::Each), "only {length} bytes");
        }
        for wrong in [(4, 1, 2, -1), (0, 1, 2, -2)] {
            assert!(!is_read(&reply(&[wrong]), 1, Mode::Each), "{wrong:?}");
        }
        for other in [Value::Nil, Value::Okay, Value::Int(7), Value::Array(vec![Value::Int(7)])] {
            assert_eq!(read(other, 1, Mode::Each), None);
        }
    }

    #[test]
    fn who_is_admitted_waits_before_going_on_and_who_is_refused_before_trying_again() {
        let told = |code, wait| {
            let read = read(Value::BulkString(reply(&[(code, 1, 2, wait)])), 1, Mode::Each);
            let Some(ScriptReply::Done { rows, .. }) = read else { panic!("{read:?}") };
            let row = rows.iter().next().expect("a row");
            let verdict = row.answer.expect("its key is ours");
            (verdict.delay.get(), verdict.retry.map(Micros::get), row.is_unrecorded)
        };
        assert_eq!(told(0, -1), (0, None, false));
        assert_eq!(told(0, 5), (5, None, false));
        assert_eq!(told(3, 5), (5, None, true));
        assert_eq!(told(1, 5), (0, Some(5), false));
        assert_eq!(told(1, -1), (0, None, false));
    }

    #[test]
    fn the_time_alone_says_that_nothing_was_done() {
        let late = ScriptReply::TooLate { now: Micros::new(7) };
        assert_eq!(read(Value::BulkString(reply(&[])), 1, Mode::All), Some(late));
    }

    #[test]
    fn the_length_of_packed_charges_bounds_their_number_and_the_reply_to_them() {
        let window = Window::of_unit(Unit::Minute);
        for (name, algorithm) in Algorithm::ALL {
            for role in [Role::Enforce, Role::Shadow, Role::Quota, Role::ShadowQuota] {
                let key = CounterKey::new(
                    "d",
                    [KeyPart::own(b"k", b"v")].into_iter(),
                    Colocation::Descriptor,
                    name,
                    window.length(),
                );
                let limit = Limit::new(algorithm, Quota::new(1, window)).unwrap();
                let (hits, charging, policies) = (Hits::take(1), Charging::Each, StorePolicies::default());
                let charge = Charge {
                    key,
                    limit,
                    hits,
                    descriptor: 0,
                    role,
                    charging,
                    policies,
                    remembers_refusals: true,
                    lease: None,
                };
                let mut packed = Vec::new();
                Packed::new(&charge).write(&mut packed, &[&charge.key]);
                assert!((SHORTEST..=LONGEST).contains(&packed.len()), "{name}, {role:?}: {} bytes", packed.len());
            }
        }
        for charges in [1, 100, 1_000] {
            let reply = format!("${}\r\n", TIME + charges * TAKE_ROW).len() + TIME + charges * TAKE_ROW + 2;
            assert!(reply <= largest_reply(charges * SHORTEST), "{charges} charges");
            assert!(largest_reply(charges * LONGEST) <= 64 * charges + 64, "{charges} charges");
        }
    }
}
