//! Warnings about a Redis server that may evict counters or is too old.

use std::fmt::Display;

use redis::{Cmd, Value, cmd, from_redis_value_ref};

use super::dialect::is_unknown;

/// Oldest supported version (docs/redis.md): 6.2.
const LEAST_VERSION: (u32, u32) = (6, 2);

/// Memory of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    /// It is bounded (`maxmemory`), and the server has used this share of it, in percent.
    Used(u64),
    /// It is not bounded.
    Unbounded,
    /// The user has no right to `INFO`, or the server does not know the command.
    Refused,
    /// The reply is another error, which may end soon, or no text.
    Unknown,
}

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

/// Parses the reply of a server to [`memory`].
pub fn read_memory(reply: &Value) -> Memory {
    let is_denied = matches!(reply, Value::ServerError(error) if error.code() == "NOPERM");
    if is_denied || is_unknown(reply) {
        return Memory::Refused;
    }
    let Ok(about) = from_redis_value_ref::<String>(reply) else { return Memory::Unknown };
    let number = |name| field(&about, name).and_then(|bytes| bytes.parse::<u64>().ok());
    let Some(most) = number("maxmemory").filter(|most| *most > 0) else { return Memory::Unbounded };
    let share = number("used_memory").map(|used| used.saturating_mul(100) / most);
    share.map_or(Memory::Unknown, Memory::Used)
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

    use super::{Memory, evicting_policy, read_memory, too_old};

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
            read_memory(&Value::BulkString(about.into_bytes()))
        };
        assert_eq!(
            [told(89, 100), told(301, 100), told(u64::MAX, 1)],
            [Memory::Used(89), Memory::Used(301), Memory::Used(u64::MAX)]
        );
        assert_eq!(told(5, 0), Memory::Unbounded);
        assert_eq!(
            read_memory(&Value::BulkString(b"maxmemory:100".into())),
            Memory::Unknown,
            "what it uses is not told"
        );
    }

    #[test]
    fn a_refused_question_about_memory_is_told_from_an_error_that_may_end() {
        let told = |line: &str| {
            let reply = redis::parse_redis_value(format!("-{line}\r\n").as_bytes()).expect("an error");
            read_memory(&reply)
        };
        assert_eq!(told("NOPERM this user has no permissions to run the 'info' command"), Memory::Refused);
        assert_eq!(told("ERR unknown command 'INFO', with args beginning with: 'memory' "), Memory::Refused);
        for line in
            ["LOADING Redis is loading the dataset in memory", "BUSY Redis is busy running a script", "ERR other"]
        {
            assert_eq!(told(line), Memory::Unknown, "{line}");
        }
        assert_eq!(read_memory(&Value::Nil), Memory::Unknown);
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
