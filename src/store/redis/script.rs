//! The script that charges counters in Redis: the twins of all algorithms behind one driver, how it is called and what it
//! answers.

use std::io::Write;
use std::sync::LazyLock;

use redis::{Cmd, RedisWrite, Script, Value};
use smallvec::SmallVec;

use crate::algorithm::{Algorithm, Charge, SHARED_TWINS};
use crate::model::{CounterKey, Micros, Outcome, Provenance, Role, Verdict};

/// How the charges of one call belong together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// No charge is all-or-nothing: nothing is taken back.
    Each,
    /// All charges of the request are here: when it is refused only what is kept stays.
    All,
    /// The request has more charges elsewhere: these are taken back when an enforced one of them refuses, and otherwise the
    /// caller undoes them if he must.
    Take,
}

/// What the script answers.
#[expect(clippy::large_enum_variant, reason = "it is read where it is made, and a box would cost every decision")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// It ran after its deadline and did nothing.
    TooLate {
        /// The time of the node.
        now: Micros,
    },
    /// It charged.
    Done {
        /// The time of the node, which dates the charges.
        now: Micros,
        /// What became of each charge, in their order.
        rows: SmallVec<[Row; 4]>,
    },
}

/// What became of one charge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// The answer; `None` when its key holds nothing of ours, which is left as it is.
    pub answer: Option<Verdict>,
    /// In [`Mode::Take`], what remains and when it is reset if the charges of this call are taken back.
    pub left: Option<(u32, Micros)>,
}

/// Arguments of the script for each charge, as its head says.
const CHARGE_WIDTH: usize = 12;
/// Arguments of the script for each undo, as its head says.
const UNDO_WIDTH: usize = 8;
/// Numbers that it answers for each charge.
const ROW: usize = 4;
/// Numbers that it answers for each charge in [`Mode::Take`].
const TAKE_ROW: usize = 6;
/// How it says that waiting does not help, or that there is nothing to wait for.
const NO_RETRY: i64 = -1;
/// Bytes that the arguments of an ordinary charge take, so that they are written without growing.
const ORDINARY: usize = 80;

/// `twin(name)`, which makes the twin of that name and no other, and the driver behind it.
static TEXT: LazyLock<String> = LazyLock::new(|| {
    let shared = SHARED_TWINS.map(|(name, body)| format!("local function {name}()\n{body}end\n"));
    let twins = Algorithm::TWINS.map(|(name, body)| format!("if name == '{name}' then\n{body}end\n"));
    let driver = include_str!("driver.lua");
    format!("local function twin(name)\n{}{}end\n{driver}", shared.concat(), twins.concat())
});

static SHA1: LazyLock<String> = LazyLock::new(|| Script::new(text()).get_hash().to_owned());

/// The script, as it is loaded.
pub fn text() -> &'static str {
    &TEXT
}

/// The command that makes a node know the script.
pub fn load() -> Cmd {
    let mut command = redis::cmd("SCRIPT");
    command.arg("LOAD").arg(text());
    command
}

/// The command that charges these counters, all of which live in one slot where there are slots. It does nothing after
/// `deadline`, which is told in the clock of the node.
pub fn charge(prefix: &[u8], charges: &[&Charge], mode: Mode, deadline: Micros) -> Cmd {
    let (mut command, keys) = call(prefix, charges, CHARGE_WIDTH);
    command.arg(deadline.get()).arg(mode.name());
    for charge in charges {
        write_counter(&mut command, charge, &keys);
        command.arg(charge.hits.taken()).arg(charge.hits.given_back());
        command.arg(charge.descriptor).arg(role_name(charge.role));
        command.arg(u8::from(charge.limit.records_refused(charge.charging))).arg(u8::from(charge.is_kept()));
    }
    command
}

/// The command that takes back charges of the moment `at`, which the reply to them told. It has no deadline: until it runs
/// the counters stand too high.
pub fn undo(prefix: &[u8], charges: &[&Charge], at: Micros) -> Cmd {
    let (mut command, keys) = call(prefix, charges, UNDO_WIDTH);
    command.arg(0).arg("undo");
    for charge in charges {
        write_counter(&mut command, charge, &keys);
        command.arg(charge.hits.taken()).arg(at.get());
    }
    command
}

/// What the script answered to so many charges; `None` when that is no answer of the script.
pub fn read(reply: &Value, charges: usize, mode: Mode) -> Option<Reply> {
    let Value::Array(numbers) = reply else { return None };
    let (now, rows) = numbers.split_first()?;
    let now = micros(now)?;
    if rows.is_empty() {
        return Some(Reply::TooLate { now });
    }
    let width = if mode == Mode::Take { TAKE_ROW } else { ROW };
    if rows.len() != charges.checked_mul(width)? {
        return None;
    }
    let rows: Option<_> = rows.chunks_exact(width).map(row).collect();
    Some(Reply::Done { now, rows: rows? })
}

/// The keys of some charges, each once, sorted; a closed limit has none.
type Keys<'a> = SmallVec<[&'a CounterKey; 4]>;

impl Mode {
    const fn name(self) -> &'static str {
        match self {
            Self::Each => "each",
            Self::All => "all",
            Self::Take => "take",
        }
    }
}

const fn role_name(role: Role) -> &'static str {
    match role {
        Role::Enforce => "enforce",
        Role::Shadow => "shadow",
        Role::Quota => "quota",
        Role::ShadowQuota => "shadow_quota",
    }
}

/// The call of the script as far as its keys go.
fn call<'a>(prefix: &[u8], charges: &[&'a Charge], width: usize) -> (Cmd, Keys<'a>) {
    let open = charges.iter().filter(|charge| !charge.limit.is_closed());
    let mut keys: Keys<'a> = open.map(|charge| &charge.key).collect();
    keys.sort_unstable();
    keys.dedup();

    let bytes: usize = keys.iter().map(|key| prefix.len() + key.as_bytes().len()).sum();
    let arguments = 5 + keys.len() + width * charges.len();
    let mut command = Cmd::with_capacity(arguments, bytes + ORDINARY * (1 + charges.len()));
    command.arg("EVALSHA").arg(SHA1.as_str()).arg(keys.len());
    for key in &keys {
        let mut writer = command.writer_for_next_arg();
        // Into memory: it does not fail.
        let _ = writer.write_all(prefix);
        let _ = writer.write_all(key.as_bytes());
    }
    (command, keys)
}

/// What charges and undos have in common: the counter and what it is counted against.
fn write_counter(command: &mut Cmd, charge: &Charge, keys: &Keys<'_>) {
    let Charge { key, limit, .. } = charge;
    let (place, quota) = if limit.is_closed() {
        (0, limit.quota().with_burst(0))
    } else {
        (keys.partition_point(|known| *known < key) + 1, limit.quota())
    };
    command.arg(place).arg(limit.algorithm().name()).arg(quota.limit()).arg(quota.burst());
    command.arg(quota.window().length().get()).arg(quota.tick().get());
}

fn row(numbers: &[Value]) -> Option<Row> {
    let [code, remaining, reset, retry, left @ ..] = numbers else { return None };
    let outcome = match number(code)? {
        0 => Some(Outcome::Admitted),
        1 => Some(Outcome::Refused),
        2 => None,
        _ => return None,
    };
    let (remaining, reset) = (hits(remaining)?, micros(reset)?);
    let retry = if number(retry)? == NO_RETRY { None } else { Some(micros(retry)?) };
    let answer = outcome.map(|outcome| Verdict { outcome, remaining, reset, retry, provenance: Provenance::Store });
    let left = match left {
        [remaining, reset] => Some((hits(remaining)?, micros(reset)?)),
        _ => None,
    };
    Some(Row { answer, left })
}

fn number(value: &Value) -> Option<i64> {
    if let Value::Int(number) = value { Some(*number) } else { None }
}

fn hits(value: &Value) -> Option<u32> {
    number(value)?.try_into().ok()
}

fn micros(value: &Value) -> Option<Micros> {
    number(value)?.try_into().ok().map(Micros::new)
}

#[cfg(test)]
mod tests {
    use redis::Value;

    use super::{Mode, Reply, read};
    use crate::model::Micros;

    fn reply(numbers: &[i64]) -> Value {
        Value::Array(numbers.iter().copied().map(Value::Int).collect())
    }

    #[test]
    fn what_the_script_never_answers_is_no_reply() {
        let whole = [7, 0, 1, 2, -1];
        assert!(read(&reply(&whole), 1, Mode::Each).is_some());
        assert!(read(&reply(&whole), 1, Mode::Take).is_none(), "a row of that mode is longer");
        assert!(read(&reply(&whole), 2, Mode::Each).is_none(), "one row is missing");
        assert!(read(&reply(&whole[..4]), 1, Mode::Each).is_none(), "a number is missing");
        for (place, wrong) in [(0, -1), (1, 3), (2, -1), (2, 1 << 32), (3, -1), (4, -2)] {
            let mut numbers = whole;
            numbers[place] = wrong;
            assert!(read(&reply(&numbers), 1, Mode::Each).is_none(), "{wrong} at {place}");
        }
        let text = Value::Array(vec![Value::Int(7), Value::Okay, Value::Int(1), Value::Int(2), Value::Int(-1)]);
        for other in [Value::Nil, Value::Okay, Value::Int(7), reply(&[]), text] {
            assert!(read(&other, 1, Mode::Each).is_none(), "{other:?}");
        }
    }

    #[test]
    fn the_time_alone_says_that_nothing_was_done() {
        assert_eq!(read(&reply(&[7]), 1, Mode::All), Some(Reply::TooLate { now: Micros::new(7) }));
    }
}
