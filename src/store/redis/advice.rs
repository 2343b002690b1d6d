//! What a server says of itself that its operator should hear before it matters.

use std::fmt::Display;

use redis::{Cmd, Value, cmd, from_redis_value_ref};

/// The least version that is supported (docs/redis.md): 6.2.
const LEAST_VERSION: (u32, u32) = (6, 2);

/// The questions to a server, two since 6.2 takes one section at a time. A user may lack the right to ask them.
pub fn questions() -> [Cmd; 2] {
    ["server", "memory"].map(|section| {
        let mut info = cmd("INFO");
        info.arg(section);
        info
    })
}

/// Warns of what the answers of a server say. Of one who must not be asked nothing is known.
pub fn warn(answers: &[Value], server: &impl Display) {
    let answers: Vec<String> = answers.iter().filter_map(|answer| from_redis_value_ref(answer).ok()).collect();
    let about = answers.concat();
    if let Some(policy) = evicting_policy(&about) {
        tracing::warn!(
            %server,
            policy,
            "this Redis forgets counters when its memory is full, and then more is admitted than the limits say; maxmemory-policy noeviction does not"
        );
    }
    if let Some(version) = too_old(&about) {
        tracing::warn!(%server, version, "this Redis is older than 6.2, the oldest that is supported");
    }
}

fn field<'a>(about: &'a str, name: &str) -> Option<&'a str> {
    about.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
}

/// The policy by which counters may be evicted. They all expire, so the `volatile` ones are no better.
fn evicting_policy(about: &str) -> Option<&str> {
    let is_bounded = field(about, "maxmemory").is_some_and(|bytes| bytes != "0");
    field(about, "maxmemory_policy").filter(|policy| is_bounded && *policy != "noeviction")
}

/// The version, when it is too old.
fn too_old(about: &str) -> Option<&str> {
    let version = field(about, "redis_version")?;
    let mut numbers = version.split('.').map(|number| number.parse::<u32>().ok());
    let known = (numbers.next()??, numbers.next()??);
    (known < LEAST_VERSION).then_some(version)
}

#[cfg(test)]
mod tests {
    use super::{evicting_policy, too_old};

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
