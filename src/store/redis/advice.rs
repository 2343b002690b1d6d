//! Warnings about a Redis server that may evict counters or is too old.

use std::fmt::Display;

use redis::{Cmd, Value, cmd, from_redis_value_ref};

/// Oldest supported version (docs/redis.md): 6.2.
const LEAST_VERSION: (u32, u32) = (6, 2);

/// Returns the commands that inspect a server: two, since Redis 6.2 accepts one section per `INFO`. A user may lack the right to
/// run them.
pub fn questions() -> [Cmd; 2] {
    ["server", "memory"].map(|section| {
        let mut info = cmd("INFO");
        info.arg(section);
        info
    })
}

/// Share of its memory from which on a server is nearly full, in percent: 90.
pub const NEARLY_FULL: u64 = 90;

/// Returns the command that asks a server for its memory.
pub fn memory() -> Cmd {
    let [_, memory] = questions();
    memory
}

/// Returns the share of its memory that a server has used, in percent, from its reply to [`memory`]: `Some(None)` if its memory is not
/// bounded, `None` if it does not permit the question.
pub fn share_used(answer: &Value) -> Option<Option<u64>> {
    let about: String = from_redis_value_ref(answer).ok()?;
    let number = |name| field(&about, name).and_then(|bytes| bytes.parse::<u64>().ok());
    let most = number("maxmemory").filter(|most| *most > 0);
    Some(most.and_then(|most| number("used_memory")?.saturating_mul(100).checked_div(most)))
}

/// Logs warnings about `server`, given its replies in `answers` to [`questions`]. An error reply causes no warning.
pub fn warn(answers: &[Value], server: &impl Display) {
    let answers: Vec<String> = answers.iter().filter_map(|answer| from_redis_value_ref(answer).ok()).collect();
    let about = answers.concat();
    if let Some(policy) = evicting_policy(&about) {
        tracing::warn!(
            event = "store.advice.eviction",
            %server,
            policy,
            "this Redis evicts counters when its memory is full, and then requests over their limit are admitted: set maxmemory-policy noeviction"
        );
    }
    if let Some(version) = too_old(&about) {
        tracing::warn!(event = "store.advice.version", %server, version, "this Redis is older than 6.2, the oldest supported version");
    }
}

fn field<'a>(about: &'a str, name: &str) -> Option<&'a str> {
    about.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
}

/// Returns the eviction policy if it may evict counters. All counters expire, so the `volatile` policies evict them too.
fn evicting_policy(about: &str) -> Option<&str> {
    let is_bounded = field(about, "maxmemory").is_some_and(|bytes| bytes != "0");
    field(about, "maxmemory_policy").filter(|policy| is_bounded && *policy != "noeviction")
}

/// Returns the version if it is too old.
fn too_old(about: &str) -> Option<&str> {
    let version = field(about, "redis_version")?;
    let mut numbers = version.split('.').map(|number| number.parse::<u32>().ok());
    let known = (numbers.next()??, numbers.next()??);
    (known < LEAST_VERSION).then_some(version)
}

#[cfg(test)]
mod tests {
    use redis::Value;

    use super::{evicting_policy, share_used, too_old};

    #[test]
    fn versions_before_6_2_are_too_old() {
        let told = |version: &str| {
            too_old(&format!("# Server\r\nredis_version:{version}\r\nredis_mode:cluster\r\n")).is_some()
        };
        assert_eq!(["2.8.0", "5.0.14", "6.0.16"].map(told), [true; 3]);
        assert_eq!(["6.2.0", "7.0.15", "10.0.1", "unstable", ""].map(told), [false; 5]);
        assert_eq!(too_old(""), None, "nothing is known");
    }

    #[test]
    fn a_server_is_nearly_full_by_its_own_bound() {
        let told = |used: u64, most: u64| {
            let about = format!("# Memory\r\nused_memory:{used}\r\nused_memory_rss:1\r\nmaxmemory:{most}\r\n");
            share_used(&Value::BulkString(about.into_bytes()))
        };
        assert_eq!(
            [told(89, 100), told(301, 100), told(u64::MAX, 1)],
            [Some(Some(89)), Some(Some(301)), Some(Some(u64::MAX))]
        );
        assert_eq!(told(5, 0), Some(None), "it is not bounded");
        assert_eq!(share_used(&Value::Nil), None, "it is not permitted");
    }

    #[test]
    fn a_policy_evicts_only_where_memory_is_bounded() {
        let told = |bytes: &str, policy: &str| {
            let about = format!("# Memory\r\nmaxmemory:{bytes}\r\nmaxmemory_human:x\r\nmaxmemory_policy:{policy}\r\n");
            evicting_policy(&about).map(str::to_owned)
        };
        assert_eq!(told("0", "allkeys-lru"), None);
        assert_eq!(told("1000", "noeviction"), None);
        assert_eq!(told("1000", "volatile-ttl").as_deref(), Some("volatile-ttl"));
        assert_eq!(evicting_policy(""), None, "nothing is known");
    }
}
