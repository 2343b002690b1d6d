//! The script as tests run it, on a real Redis: with a clock that moves by hand, and counters that outlast the test.

use redis::{Client, Cmd, Connection, Pipeline, RedisResult, Script, Value};
use tidegate::algorithm::Charge;
use tidegate::model::{Charging, Micros, Verdict};
use tidegate::store::redis::script::{self, By, ChargeRow, Mode, Requests, ScriptReply};

use crate::redis::Single;
use crate::redis::user::User;

/// What the keys of tests begin with.
pub const PREFIX: &[u8] = b"tidegate:";

/// Milliseconds for which a counter is kept beyond its idle moment, in place of a second: a day, so that whatever the hand
/// clock says, nothing is lost before the test ends.
pub const SLACK_MS: u64 = 86_400_000;

/// A Redis and what the test calls on it.
pub struct Bench {
    single: Single,
    pub connection: Connection,
    sha1: String,
}

impl Bench {
    pub async fn start(arguments: &[&str]) -> Self {
        let single = Single::start(arguments).await;
        let mut connection = Client::open(single.url()).expect("a URL").get_connection().expect("it connects");
        let text = replaced(&by_hand(), "local slack = ", &format!("local slack = {SLACK_MS}"));
        let script = Script::new(&text);
        let loaded: String = redis::cmd("SCRIPT").arg("LOAD").arg(&text).query(&mut connection).expect("it compiles");
        assert_eq!(loaded, script.get_hash());
        Self { single, connection, sha1: loaded }
    }

    /// From now on it is this user who calls.
    pub async fn be(&mut self, user: &User) {
        user.let_in(&self.single).await;
        assert_eq!(self.run("AUTH", &[user.name.as_bytes(), user.password.as_bytes()]), Value::Okay);
    }

    /// What the server has refused a user; empty when nothing.
    pub async fn denied(&self, user: &User) -> String {
        user.denied(&self.single).await
    }

    /// A call of the script as a call of the test's script, at a moment.
    pub fn at(&self, now: Micros, call: &Cmd) -> Cmd {
        at(&self.sha1, now, call)
    }

    /// Charges as the store does where all counters are on one node.
    pub fn charge(&mut self, charges: &[Charge], now: Micros) -> Vec<Verdict> {
        answers(&self.rows(charges, mode(charges), now))
    }

    pub fn rows(&mut self, charges: &[Charge], mode: Mode, now: Micros) -> Vec<ChargeRow> {
        let reply = self.try_charge(charges, mode, now).expect("Redis answers");
        rows(&reply, charges.len(), mode)
    }

    pub fn try_charge(&mut self, charges: &[Charge], mode: Mode, now: Micros) -> RedisResult<Value> {
        let charges: Vec<_> = charges.iter().collect();
        let command = self.at(now, &charging_call(PREFIX, &charges, mode, now));
        command.query::<Value>(&mut self.connection).and_then(|reply| script::unframed(reply).extract_error())
    }

    pub fn undo(&mut self, charges: &[Charge], at: Micros, now: Micros) {
        let charges: Vec<_> = charges.iter().map(|charge| (charge.clone(), at)).collect();
        let mut requests = Requests::default();
        requests.undo(PREFIX, &charges);
        let command = self.at(now, &requests.command(By::Hash));
        let reply = command.query::<Value>(&mut self.connection).expect("Redis answers");
        assert_eq!(script::time_of(&reply), Some(now));
    }

    /// Many requests on an empty Redis, in one go: the answers to each.
    pub fn all(&mut self, requests: &[(Micros, Vec<Charge>)]) -> Vec<Vec<Verdict>> {
        let mut pipeline = Pipeline::new();
        pipeline.cmd("FLUSHALL").ignore();
        for (now, charges) in requests {
            let all: Vec<_> = charges.iter().collect();
            pipeline.add_command(self.at(*now, &charging_call(PREFIX, &all, mode(charges), *now)));
        }
        let replies: Vec<Value> = pipeline.query(&mut self.connection).expect("Redis answers");
        let each = requests.iter().zip(&replies);
        each.map(|((_, charges), reply)| answers(&rows(reply, charges.len(), mode(charges)))).collect()
    }

    /// Forgets every counter.
    pub fn empty(&mut self) {
        self.run("FLUSHALL", &[]);
    }

    /// Runs any command.
    pub fn run(&mut self, command: &str, arguments: &[&[u8]]) -> Value {
        let mut command = redis::cmd(command);
        for argument in arguments {
            command.arg(*argument);
        }
        command.query::<Value>(&mut self.connection).expect("Redis answers")
    }

    /// How many keys there are.
    pub fn counters(&mut self) -> u64 {
        redis::from_redis_value(self.run("DBSIZE", &[])).expect("a number")
    }

    /// When a counter's key expires, by the clock of the server in milliseconds.
    pub fn expires_ms(&mut self, charge: &Charge) -> u64 {
        redis::from_redis_value(self.run("PEXPIRETIME", &[&key(charge)])).expect("a number")
    }

    /// The time of the server in milliseconds.
    pub fn time_ms(&mut self) -> u64 {
        let (seconds, micros): (u64, u64) = redis::from_redis_value(self.run("TIME", &[])).expect("a time");
        seconds * 1_000 + micros / 1_000
    }

    /// Puts a text where a counter is kept: that of a log is its entries, `<member> at <moment>` each.
    pub fn set(&mut self, charge: &Charge, text: &str) {
        if !text.contains(" at ") {
            self.run("SET", &[&key(charge), text.as_bytes()]);
            return;
        }
        for entry in text.split(", ") {
            let (member, moment) = entry.split_once(" at ").expect("an entry has a moment");
            self.run("ZADD", &[&key(charge), moment.as_bytes(), member.as_bytes()]);
        }
    }

    /// Puts the packed numbers of such a text where a counter is kept, as the script itself does; a log is stored as its entries.
    pub fn set_packed(&mut self, charge: &Charge, text: &str) {
        if text.contains(" at ") {
            return self.set(charge, text);
        }
        let numbers = text.split(' ').map(|number| number.parse::<u64>().expect("a number"));
        let packed: Vec<u8> = numbers.flat_map(u64::to_le_bytes).collect();
        self.run("SET", &[&key(charge), &packed]);
    }

    /// What a counter's key holds, as such a text: the numbers that the script packs, or a text that it did not write.
    pub fn text(&mut self, charge: &Charge) -> Option<String> {
        if self.run("TYPE", &[&key(charge)]) != Value::SimpleString("zset".to_owned()) {
            let stored: Option<Vec<u8>> =
                redis::cmd("GET").arg(key(charge)).query(&mut self.connection).expect("Redis answers");
            return stored.map(|stored| match stored.as_chunks() {
                (numbers @ [_, _] | numbers @ [_, _, _], []) if stored.contains(&0) => {
                    numbers.iter().map(|bytes| u64::from_le_bytes(*bytes).to_string()).collect::<Vec<_>>().join(" ")
                }
                _ => String::from_utf8_lossy(&stored).into_owned(),
            });
        }
        let entries = self.run("ZRANGE", &[&key(charge), b"0", b"-1", b"WITHSCORES"]);
        let entries: Vec<(String, String)> = redis::from_redis_value(entries).expect("members and scores");
        let entry = |(member, moment)| format!("{member} at {moment}");
        Some(entries.into_iter().map(entry).collect::<Vec<_>>().join(", "))
    }
}

/// The key of a counter in Redis.
pub fn key(charge: &Charge) -> Vec<u8> {
    [PREFIX, charge.key.as_bytes()].concat()
}

/// A call of the script that charges.
pub fn charging_call(prefix: &[u8], charges: &[&Charge], mode: Mode, deadline: Micros) -> Cmd {
    let mut requests = Requests::default();
    requests.charge(prefix, charges, mode, deadline);
    requests.command(By::Hash)
}

/// The script with a clock that moves by hand: its first argument is the moment.
pub fn by_hand() -> String {
    replaced(script::text(), "local now = ", "local now = tonumber(table.remove(ARGV, 1))")
}

/// A call of the script as a call of such a script, at a moment.
pub fn at(sha1: &str, now: Micros, call: &Cmd) -> Cmd {
    let arguments: Vec<&[u8]> = call
        .args_iter()
        .map(|argument| match argument {
            redis::Arg::Simple(bytes) => bytes,
            _ => panic!("a call has plain arguments"),
        })
        .collect();
    let keys: usize = std::str::from_utf8(arguments[2]).expect("a number").parse().expect("a number");
    let mut command = Cmd::new();
    command.arg(arguments[0]).arg(sha1);
    for argument in &arguments[2..3 + keys] {
        command.arg(argument);
    }
    command.arg(now.get());
    for argument in &arguments[3 + keys..] {
        command.arg(argument);
    }
    command
}

/// How the store charges all counters of a request where they are on one node.
pub fn mode(charges: &[Charge]) -> Mode {
    let has = |wanted: fn(&Charge) -> bool| charges.iter().any(wanted);
    match has(|charge| charge.charging == Charging::AllOrNothing) {
        true => Mode::All,
        false if has(|charge| charge.group().is_some()) => Mode::Group,
        false => Mode::Each,
    }
}

/// What a reply says of so many charges.
pub fn rows(reply: &Value, charges: usize, mode: Mode) -> Vec<ChargeRow> {
    match script::read(reply.clone(), charges, mode) {
        Some(ScriptReply::Done { rows, .. }) => rows.iter().collect(),
        other => panic!("{reply:?} is {other:?}"),
    }
}

/// The answers, where every key is ours.
pub fn answers(rows: &[ChargeRow]) -> Vec<Verdict> {
    rows.iter().map(|row| row.answer.expect("its key is ours")).collect()
}

/// The text with the one line that begins so replaced.
pub fn replaced(text: &str, begin: &str, line: &str) -> String {
    assert_eq!(text.lines().filter(|found| found.starts_with(begin)).count(), 1, "one line begins with {begin:?}");
    text.lines().map(|found| if found.starts_with(begin) { line } else { found }).collect::<Vec<_>>().join("\n")
}
