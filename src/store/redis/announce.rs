//! Instances announce themselves in Redis once a second, so that each knows their number.

use std::time::Duration;

use redis::{Cmd, Script, ServerError, Value, cmd};
use tokio::time::{Instant, sleep};

use super::Redis;
use super::backoff::chance;
use super::dialect::{Dialect, said};
use crate::model::Clock;
use crate::store::replicas::{FALL, Replicas};
use crate::telemetry::throttle::LogThrottle;

/// Interval between two announcements: 1 s.
const EVERY: Duration = Duration::from_secs(1);
/// Timeout of one announcement: 100 ms.
const TIMEOUT: Duration = Duration::from_millis(100);
/// Name of the sorted set, after the prefix. No counter has this name: in the name of a counter, `|` follows the domain, directly
/// or after a closing brace.
const KEY: &str = "{tidegate}instances";

/// Announces the instance and returns the number of instances that announced themselves in the last 3 s, or removes it. The set
/// expires 10 s after the last announcement. It begins with a write that needs no memory: after it a Redis that has none takes what needs some.
const SCRIPT: &str = "local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
if ARGV[2] == 'leave' then
  return redis.call('ZREM', KEYS[1], ARGV[1])
end
redis.call('PEXPIRE', KEYS[1], 10000)
redis.call('ZADD', KEYS[1], now, ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - ARGV[2])
redis.call('PEXPIRE', KEYS[1], 10000)
return redis.call('ZCARD', KEYS[1])";

/// Announces one instance to the others.
pub struct Announcer {
    redis: Redis,
    key: Vec<u8>,
    id: String,
    script: Script,
    refused: LogThrottle,
}

impl Announcer {
    /// Creates an announcer with a random id.
    pub fn new(redis: Redis) -> Self {
        let id = format!("{:016x}{:016x}", chance(u64::MAX), chance(u64::MAX));
        let key = [redis.prefix(), KEY.as_bytes()].concat();
        Self { redis, key, id, script: Script::new(SCRIPT), refused: LogThrottle::new() }
    }

    /// Announces the instance once a second, for ever, and passes the number of instances to `replicas`.
    pub async fn announce(&self, replicas: &Replicas, clock: &dyn Clock) {
        loop {
            let reply = self.run(&FALL.get().to_string()).await;
            match &reply {
                Some(Value::Int(counted)) => replicas.count(u32::try_from(*counted).unwrap_or(u32::MAX), clock.now()),
                Some(Value::ServerError(error)) if self.refused.is_due() => tracing::warn!(
                    event = "store.replicas.not_counted",
                    code = error.code(),
                    said = said(error),
                    assumed = replicas.get(),
                    advice = advice(error),
                    "Redis does not count the instances, so the policy `local` divides limits by the assumed number"
                ),
                _ => {}
            }
            sleep(EVERY).await;
        }
    }

    /// Removes the instance from the set, so that the others no longer count it.
    pub async fn leave(&self) {
        self.run("leave").await;
    }

    async fn run(&self, argument: &str) -> Option<Value> {
        let call = |name, script: &str| {
            let mut call: Cmd = cmd(name);
            call.arg(script).arg(1).arg(&self.key).arg(&self.id).arg(argument);
            call
        };
        let commands = |dialect: Dialect| {
            if dialect.loads_by_eval() {
                return vec![call("EVAL", SCRIPT)];
            }
            let mut load: Cmd = cmd("SCRIPT");
            load.arg("LOAD").arg(SCRIPT);
            vec![load, call("EVALSHA", self.script.get_hash())]
        };
        let node = self.redis.node(&self.key)?;
        node.ask_in(commands, Instant::now() + TIMEOUT).await?.pop()
    }
}

/// Returns what to do about an error in place of the number of instances.
fn advice(error: &ServerError) -> &'static str {
    let said = error.details().unwrap_or_default();
    // In a script, a missing right is a general error whose text differs by version.
    if error.code() == "NOPERM"
        || ["NOPERM", "can't run this command", "permission"].iter().any(|text| said.contains(text))
    {
        "allow +zadd +zremrangebyscore +zcard +zrem +pexpire, or set REPLICAS"
    } else if said.contains("nknown") {
        "Redis has to know EVAL or EVALSHA, TIME, ZADD, ZREMRANGEBYSCORE, ZCARD, ZREM and PEXPIRE; or set REPLICAS"
    } else {
        "if it lasts, set REPLICAS"
    }
}

#[cfg(test)]
mod tests {
    use redis::Value;

    use super::advice;

    #[test]
    fn an_error_says_which_rights_or_commands_are_missing() {
        for (error, expected) in [
            ("NOPERM this user has no permissions", "allow +zadd"),
            ("ERR The user executing the script can't run this command or subcommand", "allow +zadd"),
            ("ERR ACL failure in script: NOPERM", "allow +zadd"),
            ("ERR unknown command 'zadd'", "Redis has to know"),
            ("ERR busy", "if it lasts"),
        ] {
            let read = redis::parse_redis_value(format!("-{error}\r\n").as_bytes());
            let Ok(Value::ServerError(read)) = read else { panic!("{read:?}") };
            assert!(advice(&read).starts_with(expected), "{error}: {}", advice(&read));
        }
    }
}
