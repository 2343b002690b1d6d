//! A real Redis server, and the script that the service sends.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use redis::{Client, Cmd, Connection, FromRedisValue, Pipeline, Value};
use tempfile::TempDir;
use tidegate::algorithm::Charge;
use tidegate::model::{Charging, Micros};
use tidegate::store::redis::script::{self, By, Mode, Requests, ScriptReply};

use crate::Outcome;

/// What keys begin with.
const PREFIX: &[u8] = b"tidegate:";
/// Calls in one write where nothing is timed.
pub const MANY: usize = 200;
/// Calls that are timed together: few, so that what else the machine does falls into few of the groups.
pub const FEW: usize = 20;
/// The same for calls of which some take a millisecond.
pub const FEWER: usize = 4;
/// A deadline that never passes.
const NEVER: Micros = Micros::new(1 << 53);

/// A server on a socket in a directory of its own. It ends with this value.
pub struct Redis {
    server: Child,
    connection: Connection,
    _directory: TempDir,
}

impl Drop for Redis {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

impl Redis {
    pub fn start() -> Outcome<Self> {
        let directory = tempfile::tempdir()?;
        let socket = directory.path().join("redis.sock");
        let mut server = Command::new("redis-server")
            .args(["--port", "0", "--save", "", "--unixsocket"])
            .arg(&socket)
            .arg("--dir")
            .arg(directory.path())
            .stdout(Stdio::null())
            .spawn()?;
        let client = Client::open(format!("redis+unix://{}", socket.display()))?;
        let begin = Instant::now();
        let mut connection = loop {
            match client.get_connection() {
                Ok(connection) => break connection,
                Err(error) if begin.elapsed() > Duration::from_secs(10) || server.try_wait()?.is_some() => {
                    let _ = server.kill();
                    return Err(error.into());
                }
                Err(_) => std::thread::sleep(Duration::from_millis(10)),
            }
        };
        script::load().exec(&mut connection)?;
        Ok(Self { server, connection, _directory: directory })
    }

    /// Sends requests one after the other, all of them to be admitted or all to be refused: the microseconds of one by the
    /// server's own account, for each group of so many.
    pub fn send<'a>(
        &mut self,
        requests: impl Iterator<Item = &'a [Charge]>,
        at_once: usize,
        are_admitted: bool,
    ) -> Outcome<Vec<f64>> {
        let requests: Vec<_> = requests.collect();
        requests.chunks(at_once).map(|group| self.send_group(group, are_admitted)).collect()
    }

    fn send_group(&mut self, group: &[&[Charge]], are_admitted: bool) -> Outcome<f64> {
        let mut pipeline = Pipeline::new();
        pipeline.cmd("CONFIG").arg("RESETSTAT").ignore();
        for charges in group {
            let all: Vec<_> = charges.iter().collect();
            let mut requests = Requests::default();
            requests.charge(PREFIX, &all, mode(charges), NEVER);
            pipeline.add_command(requests.command(By::Hash));
        }
        pipeline.cmd("INFO").arg("commandstats");
        let mut replies: Vec<Value> = pipeline.query(&mut self.connection)?;
        let stats: String = redis::from_redis_value(replies.pop().ok_or("there is no answer")?)?;
        for (charges, reply) in group.iter().zip(replies) {
            let is_admitted = is_admitted(reply, charges).ok_or("that is no answer of the script")?;
            assert_eq!(is_admitted, are_admitted, "{}", charges[0].key);
        }
        let line = stats.lines().find(|line| line.starts_with("cmdstat_evalsha:")).ok_or("no call is counted")?;
        let (calls, usec) = (field(line, "calls")?, field(line, "usec")?);
        assert_eq!(calls as usize, group.len(), "Redis counts other calls: {line}");
        Ok(usec / calls)
    }

    /// Gives the counter of one charge to another.
    pub fn copy(&mut self, from: &Charge, to: &Charge) -> Outcome {
        let is_copied: bool = self.run(redis::cmd("COPY").arg(key(from)).arg(key(to)).arg("REPLACE"))?;
        assert!(is_copied, "there is no counter {}", from.key);
        Ok(())
    }

    /// The bytes of a key, its value and what Redis needs to hold them.
    pub fn bytes(&mut self, charge: &Charge) -> Outcome<u64> {
        self.run(redis::cmd("MEMORY").arg("USAGE").arg(key(charge)).arg("SAMPLES").arg(0))
    }

    /// The bytes that the server has allocated.
    pub fn used_memory(&mut self) -> Outcome<u64> {
        let info: String = self.run(redis::cmd("INFO").arg("memory"))?;
        let line = info.lines().find_map(|line| line.strip_prefix("used_memory:")).ok_or("no used_memory")?;
        Ok(line.trim().parse()?)
    }

    pub fn version(&mut self) -> Outcome<String> {
        let info: String = self.run(redis::cmd("INFO").arg("server"))?;
        let line = info.lines().find_map(|line| line.strip_prefix("redis_version:")).ok_or("no version")?;
        Ok(line.trim().to_owned())
    }

    pub fn empty(&mut self) -> Outcome {
        self.run(redis::cmd("FLUSHALL").arg("SYNC"))
    }

    fn run<T: FromRedisValue>(&mut self, command: &Cmd) -> Outcome<T> {
        Ok(command.query(&mut self.connection)?)
    }
}

fn key(charge: &Charge) -> Vec<u8> {
    [PREFIX, charge.key.as_bytes()].concat()
}

/// How the store charges them where all counters are on one node.
fn mode(charges: &[Charge]) -> Mode {
    let is_each = charges.iter().all(|charge| charge.charging == Charging::Each);
    if is_each { Mode::Each } else { Mode::All }
}

fn is_admitted(reply: Value, charges: &[Charge]) -> Option<bool> {
    let Some(ScriptReply::Done { rows, .. }) = script::read(reply, charges.len(), mode(charges)) else { return None };
    let mut is_admitted = true;
    for row in rows.iter() {
        is_admitted &= !row.answer?.outcome.is_refused();
    }
    Some(is_admitted)
}

fn field(line: &str, name: &str) -> Outcome<f64> {
    let fields = line.split_once(':').map_or("", |(_, fields)| fields);
    let value = fields.split(',').find_map(|field| field.strip_prefix(name)?.strip_prefix('='));
    Ok(value.ok_or("a field is missing")?.parse()?)
}
