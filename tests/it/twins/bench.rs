//! The script as tests run it, on a real Redis: with a clock that moves by hand, and counters that outlast the test.

use redis::{Client, Cmd, Connection, Pipeline, Script, Value};
use tidegate::algorithm::Charge;
use tidegate::model::{Charging, Micros, Verdict};
use tidegate::store::redis::script::{self, Mode, Reply, Row};

use crate::redis::Single;

/// What the keys of tests begin with.
const PREFIX: &[u8] = b"tidegate:";

/// A Redis and what the test calls on it.
pub struct Bench {
    _single: Single,
    connection: Connection,
    sha1: String,
}

impl Bench {
    pub async fn start(arguments: &[&str]) -> Self {
        let single = Single::start(arguments).await;
        let mut connection = Client::open(single.url()).expect("a URL").get_connection().expect("it connects");
        let mut text = replaced(script::text(), "local now = ", "local now = tonumber(table.remove(ARGV, 1))");
        // A day: whatever the hand clock says, nothing is lost before the test ends.
        text = replaced(&text, "local slack = ", "local slack = 86400000");
        let script = Script::new(&text);
        let loaded: String = redis::cmd("SCRIPT").arg("LOAD").arg(&text).query(&mut connection).expect("it compiles");
        assert_eq!(loaded, script.get_hash());
        Self { _single: single, connection, sha1: loaded }
    }

    /// A call of the script as a call of the test's script, at a moment.
    fn at(&self, now: Micros, call: &Cmd) -> Cmd {
        let arguments: Vec<&[u8]> = call
            .args_iter()
            .map(|argument| match argument {
                redis::Arg::Simple(bytes) => bytes,
                _ => panic!("a call has plain arguments"),
            })
            .collect();
        let keys: usize = std::str::from_utf8(arguments[2]).expect("a number").parse().expect("a number");
        let mut command = Cmd::new();
        command.arg(arguments[0]).arg(&self.sha1);
        for argument in &arguments[2..3 + keys] {
            command.arg(argument);
        }
        command.arg(now.get());
        for argument in &arguments[3 + keys..] {
            command.arg(argument);
        }
        command
    }

    /// Many requests on an empty Redis, in one go: the answers to each.
    pub fn all(&mut self, requests: &[(Micros, Vec<Charge>)]) -> Vec<Vec<Verdict>> {
        let mut pipeline = Pipeline::new();
        pipeline.cmd("FLUSHALL").ignore();
        for (now, charges) in requests {
            let all: Vec<_> = charges.iter().collect();
            pipeline.add_command(self.at(*now, &script::charge(PREFIX, &all, mode(charges), *now)));
        }
        let replies: Vec<Value> = pipeline.query(&mut self.connection).expect("Redis answers");
        let each = requests.iter().zip(&replies);
        each.map(|((_, charges), reply)| answers(&rows(reply, charges.len(), mode(charges)))).collect()
    }
}

/// How the store charges all counters of a request where they are on one node.
fn mode(charges: &[Charge]) -> Mode {
    let is_each = charges.iter().all(|charge| charge.charging == Charging::Each);
    if is_each { Mode::Each } else { Mode::All }
}

fn rows(reply: &Value, charges: usize, mode: Mode) -> Vec<Row> {
    match script::read(reply, charges, mode) {
        Some(Reply::Done { rows, .. }) => rows.into_vec(),
        other => panic!("{reply:?} is {other:?}"),
    }
}

fn answers(rows: &[Row]) -> Vec<Verdict> {
    rows.iter().map(|row| row.answer.expect("its key is ours")).collect()
}

/// The text with the one line that begins so replaced.
fn replaced(text: &str, begin: &str, line: &str) -> String {
    assert_eq!(text.lines().filter(|found| found.starts_with(begin)).count(), 1, "one line begins with {begin:?}");
    text.lines().map(|found| if found.starts_with(begin) { line } else { found }).collect::<Vec<_>>().join("\n")
}
