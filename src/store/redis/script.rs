//! The script that charges counters in Redis: its text, which has the twins of all algorithms and one driver, its commands and
//! its replies.

use std::sync::LazyLock;

use redis::{Cmd, Script, Value};
use smallvec::{SmallVec, smallvec};

use self::requests::{HEAD, SHORTEST, number};
use crate::algorithm::{Algorithm, SHARED_TWINS};
use crate::model::{Micros, Outcome, Provenance, Verdict};
use crate::store::StoreError;

mod requests;

pub use self::requests::{By, Requests, UNREAD};

/// Relation between the charges of one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// No charge is all-or-nothing: nothing is reversed.
    Each,
    /// As [`Mode::Each`], with charges of groups: those of a group that refuses are not made.
    Group,
    /// As [`Mode::Group`]. The call has all charges of the request. If it is refused, it makes no new counter.
    Lean,
    /// As [`Mode::Group`]. No new counter is made.
    Existing,
    /// The call has all charges of the request. If the request, or a group, is refused, only charges that are kept stay.
    All,
    /// The request, or the group, has more charges elsewhere. The script reverses these if an enforced one of them refuses. Otherwise the caller
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
    /// Number of charges for which there was no memory.
    pub unsaved: usize,
}

impl ChargeRows {
    /// Returns the rows in order.
    pub fn iter(&self) -> impl Iterator<Item = ChargeRow> + Clone {
        // `read` has parsed all of them once.
        self.reply.get(FRAME + TIME..).unwrap_or_default().chunks_exact(self.width.max(1)).filter_map(row)
    }
}

/// Result of one charge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChargeRow {
    /// The verdict. `None` if there is no memory to save an admitted charge, or if the key holds no counter of Tidegate; the key is left as
    /// it is.
    pub answer: Option<Verdict>,
    /// True if there is no memory.
    pub is_unsaved: bool,
    /// True if the charge is admitted but its hits are not on the counter: there is nothing to reverse.
    pub is_unrecorded: bool,
    /// In [`Mode::Take`], the remaining hits and the reset if the charges of this call are reversed.
    pub left: Option<(u32, Micros)>,
}

impl ChargeRow {
    /// Returns the verdict.
    ///
    /// # Errors
    /// The reason why there is none.
    pub fn verdict(&self) -> Result<Verdict, StoreError> {
        self.answer.ok_or(if self.is_unsaved { StoreError::OutOfMemory } else { StoreError::Foreign })
    }
}

/// Bytes of the length at the start of a reply, and the bit of it that marks an error.
const FRAME: usize = 4;
const IS_ERROR: u32 = 1 << 31;
/// Bytes of the longest error in a reply.
const LONGEST_ERROR: usize = 128;
/// Bytes of the time at the start of a reply.
const TIME: usize = 8;
/// Bytes of a reply for each charge: `row` in `driver.lua`.
const ROW: usize = 25;
/// Bytes of a reply for each charge in [`Mode::Take`], where `left` follows `row`.
const TAKE_ROW: usize = ROW + 12;
/// Code of an admitted charge for which there is no memory.
const UNSAVED: u8 = 4;
/// Wait in a reply if waiting does not help, or if there is nothing to wait for.
const NO_WAIT: i64 = -1;

/// Text of the script: the function `twin(number)`, which creates the twin of the algorithm of that number and no other, and then the driver.
static TEXT: LazyLock<String> = LazyLock::new(|| {
    let shared = SHARED_TWINS.map(|(name, body)| format!("local function {name}(...)\n{body}end\n"));
    let twins = Algorithm::TWINS.iter().zip(Algorithm::ALL);
    let twins: String = twins
        .map(|((name, body), (_, algorithm))| format!("if number == {} then -- {name}\n{body}end\n", number(algorithm)))
        .collect();
    let (fixed_window, driver) = (number(Algorithm::FixedWindow), include_str!("driver.lua"));
    let shared = shared.concat();
    without_comments(&format!(
        "local fixed_window = {fixed_window}\nlocal function twin(number)\n{shared}{twins}end\n{driver}"
    ))
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

/// Returns a script without its comments, its indentation and its empty lines, which a server would be sent for nothing.
fn without_comments(script: &str) -> String {
    let mut text = String::with_capacity(script.len());
    for line in script.lines() {
        let mut quote = None;
        let is_comment = |(at, letter): &(usize, char)| {
            match quote {
                Some(open) => quote = quote.filter(|_| *letter != open),
                None if matches!(letter, '\'' | '"') => quote = Some(*letter),
                None => return line[*at..].starts_with("--"),
            }
            false
        };
        let end = line.char_indices().find(is_comment).map_or(line.len(), |(at, _)| at);
        let code = line[..end].trim();
        if !code.is_empty() {
            text.push_str(code);
            text.push('\n');
        }
    }
    text
}

/// Splits the reply to a call with so many requests: one reply for each, as if it had been called alone.
pub fn split(reply: Value, requests: usize) -> SmallVec<[Value; 1]> {
    match reply {
        Value::BulkString(bytes) if requests > 1 => {
            let mut rest = bytes.as_slice();
            let piece = |_| match length(rest).and_then(|length| rest.split_at_checked(FRAME + length)) {
                Some((piece, others)) => {
                    rest = others;
                    Value::BulkString(piece.to_vec())
                }
                None => Value::Nil,
            };
            (0..requests).map(piece).collect()
        }
        reply => smallvec![reply; requests],
    }
}

/// Returns the server's error in place of a reply that has one.
pub fn unframed(reply: Value) -> Value {
    let error = match &reply {
        Value::BulkString(bytes) if bytes.get(FRAME - 1).is_some_and(|byte| byte & 0x80 != 0) => &bytes[FRAME..],
        _ => return reply,
    };
    redis::parse_redis_value(&[b"-", error, b"\r\n"].concat()).unwrap_or(Value::Nil)
}

/// Returns the length of the answer to the first request.
fn length(mut reply: &[u8]) -> Option<usize> {
    let length = u32::from_le_bytes(take::<FRAME>(&mut reply)?) & !IS_ERROR;
    usize::try_from(length).ok()
}

/// Returns the time of the node at which the script ran, from its `reply`.
pub fn time_of(reply: &Value) -> Option<Micros> {
    let Value::BulkString(reply) = reply else { return None };
    // The reply to SCRIPT LOAD, or an error, has no length that is its own.
    let mut rest = reply.get(FRAME..).filter(|rest| length(reply) == Some(rest.len()))?;
    let time = take::<TIME>(&mut rest).map(u64::from_le_bytes);
    // A text gives a number far above those that Lua counts exactly.
    time.filter(|time| *time < 1 << 53).map(Micros::new)
}

/// Parses the reply to `charges` charges; `None` if the script does not send such a reply.
pub fn read(reply: Value, charges: usize, mode: Mode) -> Option<ScriptReply> {
    let Value::BulkString(reply) = reply else { return None };
    let mut rows = reply.get(FRAME..).filter(|rest| length(&reply) == Some(rest.len()))?;
    let now = Micros::new(u64::from_le_bytes(take::<TIME>(&mut rows)?));
    if rows.is_empty() {
        return Some(ScriptReply::TooLate { now });
    }
    let width = if mode == Mode::Take { TAKE_ROW } else { ROW };
    if rows.len() != charges.checked_mul(width)? {
        return None;
    }
    let mut unsaved = 0;
    for bytes in rows.chunks_exact(width) {
        unsaved += usize::from(row(bytes)?.is_unsaved);
    }
    Some(ScriptReply::Done { now, rows: ChargeRows { reply, width, unsaved } })
}

/// Returns the maximum size of a reply to requests of `packed_bytes` bytes in total: 37 bytes for each charge, and a length and the longest error
/// for each request.
pub const fn largest_reply(packed_bytes: usize) -> usize {
    // `$`, a length of up to 20 digits, and two line ends.
    const HEADER: usize = 25;
    // A request has a charge at least, and a mode of 3 letters at least.
    let requests = packed_bytes / (SHORTEST + HEAD - 2) + 1;
    HEADER + packed_bytes / SHORTEST * TAKE_ROW + requests * (FRAME + LONGEST_ERROR)
}

impl Mode {
    const fn name(self) -> &'static str {
        match self {
            Self::Each => "each",
            Self::Group => "group",
            Self::Lean => "lean",
            Self::Existing => "old",
            Self::All => "all",
            Self::Take => "take",
            Self::Later => "later",
            Self::Lease => "lease",
        }
    }
}

fn row(mut bytes: &[u8]) -> Option<ChargeRow> {
    let [code] = take(&mut bytes)?;
    let outcome = match code {
        0 | 3 => Some(Outcome::Admitted),
        1 => Some(Outcome::Refused),
        2 | UNSAVED => None,
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
    Some(ChargeRow { answer, is_unsaved: code == UNSAVED, is_unrecorded: code == 3, left })
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

    use super::requests::{LONGEST, Packed};
    use super::{FRAME, Mode, ROW, SHORTEST, ScriptReply, TAKE_ROW, TIME, largest_reply, read, text, without_comments};
    use crate::algorithm::{Algorithm, Charge, Limit};
    use crate::model::key::KeyPart;
    use crate::model::{Charging, Colocation, CounterKey, Hits, Micros, Quota, Role, StorePolicies, Unit, Window};

    /// Returns a reply at the time 7 with a row for each of `rows`.
    fn reply(rows: &[(u8, u32, u64, i64)]) -> Vec<u8> {
        let mut bytes = u32::try_from(TIME + rows.len() * ROW).unwrap().to_le_bytes().to_vec();
        bytes.extend(7_u64.to_le_bytes());
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
        assert_eq!(whole.len(), FRAME + TIME + ROW);
        assert!(is_read(&whole, 1, Mode::Each));
        assert!(!is_read(&whole, 1, Mode::Take), "a row of that mode is longer");
        assert!(!is_read(&whole, 2, Mode::Each), "one row is missing");
        for length in 0..whole.len() {
            assert!(!is_read(&whole[..length], 1, Mode::Each), "only {length} bytes");
        }
        for wrong in [(5, 1, 2, -1), (0, 1, 2, -2)] {
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
    fn the_script_is_sent_without_comments_and_what_looks_like_one_in_a_text_stays() {
        let script =
            "-- all of it\n\n  local a = '--' -- a text\n\tlocal b = \"-- it's\" --[ no block\nreturn a - -1\n";
        assert_eq!(without_comments(script), "local a = '--'\nlocal b = \"-- it's\"\nreturn a - -1\n");
        assert!(!text().contains("--"), "the script itself has no such text");
        println!("the script has {} bytes", text().len());
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
                    ask: 0,
                };
                let mut packed = Vec::new();
                Packed::new(&charge).write(&mut packed, &[&charge.key]);
                assert!((SHORTEST..=LONGEST).contains(&packed.len()), "{name}, {role:?}: {} bytes", packed.len());
            }
        }
        for charges in [1, 100, 1_000] {
            let length = FRAME + TIME + charges * TAKE_ROW;
            let reply = format!("${length}\r\n").len() + length + 2;
            assert!(reply <= largest_reply(charges * SHORTEST), "{charges} charges");
            assert!(largest_reply(charges * LONGEST) <= 200 * charges + 200, "{charges} charges");
        }
    }
}
