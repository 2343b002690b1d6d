//! Types of settings: the accepted values of each in words, and its parser.

use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroU32;
use std::path::PathBuf;

use http::HeaderName;

use super::hidden::{HIDDEN, shown_url};
use crate::model::{FailurePolicy, LeaseTerms, Leasing, Micros};

/// Type of a setting.
pub(super) trait Setting: Sized {
    /// Accepted values, in words.
    const TAKES: &'static str;
    /// True if the value is a secret: it is read from the environment only, is not trimmed, and is never shown.
    const IS_SECRET: bool = false;
    /// True if the value is not trimmed before it is parsed.
    const KEEPS_BLANKS: bool = Self::IS_SECRET;
    /// True if an empty text stands for the default, because the reference starts with it.
    const EMPTY_IS_DEFAULT: bool = false;
    /// Parses `text`; returns `None` if it is not an accepted value.
    fn parse(text: &str) -> Option<Self>;
    /// Returns an invalid `text` as an error shows it, without possible secrets: a URL may have a password even where none is
    /// expected.
    fn shown(text: &str) -> String {
        match Self::IS_SECRET {
            true => HIDDEN.to_owned(),
            false if text.contains("://") || text.contains('@') => shown_url(text),
            false => text.to_owned(),
        }
    }
}

impl Setting for IpAddr {
    const TAKES: &'static str = "an IP address such as 0.0.0.0, 127.0.0.1 or ::";
    const EMPTY_IS_DEFAULT: bool = true;
    fn parse(text: &str) -> Option<Self> {
        if text.eq_ignore_ascii_case("localhost") {
            return Some(Self::from([127, 0, 0, 1]));
        }
        text.trim_start_matches('[').trim_end_matches(']').parse().ok()
    }
}

impl Setting for u16 {
    const TAKES: &'static str = "a port from 0 to 65535";
    fn parse(text: &str) -> Option<Self> {
        text.parse().ok()
    }
}

impl Setting for usize {
    const TAKES: &'static str = "a whole number";
    fn parse(text: &str) -> Option<Self> {
        text.parse().ok()
    }
}

/// Maximum number of counters in the memory store; at least 6400. Each of its 64 shards holds an equal part, and with fewer
/// than a hundred per shard one could be full while another has room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CounterCount(pub usize);

impl Setting for CounterCount {
    const TAKES: &'static str = "a whole number from 6400";
    fn parse(text: &str) -> Option<Self> {
        text.parse().ok().filter(|count| *count >= 6_400).map(Self)
    }
}

/// Maximum number of bytes of a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BodySize(pub usize);

impl BodySize {
    /// Units and their names. A number without a unit is bytes.
    const UNITS: [(&'static str, usize); 3] = [("KiB", 1 << 10), ("MiB", 1 << 20), ("", 1)];
    /// Accepted sizes, from 1 KiB, which holds an ordinary request, to 4 MiB, the size of the largest gRPC message.
    const BOUNDS: std::ops::RangeInclusive<usize> = (1 << 10)..=(4 << 20);
}

impl Setting for BodySize {
    const TAKES: &'static str = "a size from 1KiB to 4MiB, such as 256KiB, or a number of bytes";
    fn parse(text: &str) -> Option<Self> {
        let of_unit = |(unit, bytes): (&str, usize)| Some((text.strip_suffix(unit)?.trim_end(), bytes));
        let (number, unit) = Self::UNITS.into_iter().find_map(of_unit)?;
        let bytes = number.parse::<usize>().ok()?.checked_mul(unit)?;
        Self::BOUNDS.contains(&bytes).then_some(Self(bytes))
    }
}

impl Setting for bool {
    const TAKES: &'static str = "true or false";
    /// Accepts the same words as Go.
    fn parse(text: &str) -> Option<Self> {
        match text {
            "1" | "t" | "T" | "true" | "TRUE" | "True" => Some(true),
            "0" | "f" | "F" | "false" | "FALSE" | "False" => Some(false),
            _ => None,
        }
    }
}

impl Setting for String {
    const TAKES: &'static str = "any text";
    fn parse(text: &str) -> Option<Self> {
        Some(text.to_owned())
    }
}

impl Setting for Micros {
    const TAKES: &'static str = "a duration such as 5s, 250ms or 1h30m";
    fn parse(text: &str) -> Option<Self> {
        Self::parse(text)
    }
}

/// Number of threads that answer calls; `None` for one per core.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkerCount(pub Option<usize>);

impl Setting for WorkerCount {
    const TAKES: &'static str = "a number of threads from 1 to 1024, or auto for one per core";
    fn parse(text: &str) -> Option<Self> {
        if text == "auto" {
            return Some(Self(None));
        }
        text.parse().ok().filter(|workers| (1..=1024).contains(workers)).map(|workers| Self(Some(workers)))
    }
}

/// Number of open connections beyond which idle ones are closed; `None` to derive it from the available memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdleConnections(pub Option<usize>);

impl Setting for IdleConnections {
    const TAKES: &'static str = "a number of connections from 1, or auto for a quarter of the memory";
    fn parse(text: &str) -> Option<Self> {
        if text == "auto" {
            return Some(Self(None));
        }
        text.parse().ok().filter(|connections| *connections > 0).map(|connections| Self(Some(connections)))
    }
}

/// Listen address: an IP address, or all of them, and a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListenAddress(pub SocketAddr);

impl Setting for ListenAddress {
    const TAKES: &'static str = "ADDRESS:PORT, or :PORT for all addresses";
    const EMPTY_IS_DEFAULT: bool = true;
    fn parse(text: &str) -> Option<Self> {
        let (host, port) = text.rsplit_once(':')?;
        let host = match host {
            "" => IpAddr::from([0; 4]),
            host => <IpAddr as Setting>::parse(host)?,
        };
        Some(Self(SocketAddr::new(host, port.parse().ok()?)))
    }
}

/// Path of a page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PagePath(pub String);

impl Setting for PagePath {
    const TAKES: &'static str = "a path such as /metrics";
    fn parse(text: &str) -> Option<Self> {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "/-_.~".contains(c);
        (text.starts_with('/') && text.chars().all(is_plain)).then(|| Self(text.to_owned()))
    }
}

/// A ratio from 0 to 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ratio(pub f32);

impl Setting for Ratio {
    const TAKES: &'static str = "a number from 0 to 1";
    fn parse(text: &str) -> Option<Self> {
        text.parse().ok().filter(|ratio| (0.0..=1.0).contains(ratio)).map(Self)
    }
}

/// Number of instances; `None` to count the instances that announce themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplicaCount(pub Option<NonZeroU32>);

impl Setting for ReplicaCount {
    const TAKES: &'static str = "auto, or a whole number from 1";
    fn parse(text: &str) -> Option<Self> {
        if text == "auto" { Some(Self(None)) } else { text.parse().ok().map(|number| Self(Some(number))) }
    }
}

/// A [`FailurePolicy`] as a setting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy(pub FailurePolicy);

impl Setting for Policy {
    const TAKES: &'static str = "error, open, closed or local";
    fn parse(text: &str) -> Option<Self> {
        FailurePolicy::ALL.into_iter().find(|(name, _)| *name == text).map(|(_, policy)| Self(policy))
    }
}

/// A [`FailurePolicy`] for overload as a setting; `None` to derive it from the policy for failures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OverloadPolicy(pub Option<FailurePolicy>);

impl Setting for OverloadPolicy {
    const TAKES: &'static str = Policy::TAKES;
    fn parse(text: &str) -> Option<Self> {
        if text.is_empty() { Some(Self(None)) } else { Policy::parse(text).map(|Policy(policy)| Self(Some(policy))) }
    }
}

/// Leases of limits whose rules set none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseDefault(pub Leasing);

impl Setting for LeaseDefault {
    const TAKES: &'static str = "off, a share such as 5%, or a share and a length from 50ms to 1m such as 5%,1s";
    fn parse(text: &str) -> Option<Self> {
        // An `off` without quotes in YAML is `false`.
        if ["off", "false", ""].contains(&text) {
            return Some(Self(Leasing::Off));
        }
        let (share, ttl) = text.split_once(',').map_or((text, None), |(share, ttl)| (share.trim(), Some(ttl.trim())));
        let ttl = ttl.map_or(Some(LeaseTerms::DEFAULT_TTL), Micros::parse)?;
        Some(Self(Leasing::On(LeaseTerms::new(LeaseTerms::parse_share(share)?, ttl)?)))
    }
}

/// Name of a header, in the operator's spelling.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeaderText(pub String);

impl Setting for HeaderText {
    const TAKES: &'static str = "a header name of letters, digits and dashes";
    const EMPTY_IS_DEFAULT: bool = true;
    fn parse(text: &str) -> Option<Self> {
        HeaderName::try_from(text).ok().map(|_| Self(text.to_owned()))
    }
}

/// Style of the headers that report the limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeaderStyle {
    /// The headers of `LIMIT_RESPONSE_HEADERS_ENABLED`, if that is set.
    Unset,
    /// The reference's three headers.
    Reference,
    /// X-RateLimit-Limit, -Remaining and -Reset.
    XRateLimit,
    /// RateLimit-Policy and RateLimit.
    Ietf,
    /// Both of these.
    XRateLimitAndIetf,
}

impl Setting for HeaderStyle {
    const TAKES: &'static str = "reference, x-ratelimit, ietf, both as `x-ratelimit,ietf`, or empty for none of them";
    fn parse(text: &str) -> Option<Self> {
        match text {
            "" => Some(Self::Unset),
            "reference" => Some(Self::Reference),
            "x-ratelimit" => Some(Self::XRateLimit),
            "ietf" => Some(Self::Ietf),
            "x-ratelimit,ietf" | "ietf,x-ratelimit" => Some(Self::XRateLimitAndIetf),
            _ => None,
        }
    }
}

/// Path of a Unix socket; `None`: TCP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SocketPath(pub Option<PathBuf>);

impl Setting for SocketPath {
    // Linux keeps 108 bytes, the last of which is 0 (`man 7 unix`).
    const TAKES: &'static str = "a path of at most 107 bytes, without `unix:` or `@` before it, or empty";
    fn parse(text: &str) -> Option<Self> {
        let is_path = text.len() <= 107 && !text.contains('\0') && !text.starts_with("unix:") && !text.starts_with('@');
        is_path.then(|| Self((!text.is_empty()).then(|| text.into())))
    }
}

/// Permissions of a Unix socket; `None`: those that the umask leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketMode(pub Option<u32>);

impl Setting for SocketMode {
    const TAKES: &'static str = "three or four octal digits such as 0660, or empty";
    fn parse(text: &str) -> Option<Self> {
        if text.is_empty() {
            return Some(Self(None));
        }
        let is_octal = matches!(text.len(), 3 | 4) && text.bytes().all(|byte| matches!(byte, b'0'..=b'7'));
        let mode = u32::from_str_radix(text, 8).ok().filter(|mode| is_octal && *mode <= 0o777)?;
        Some(Self(Some(mode)))
    }
}

/// Format of the body of a refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BodyStyle {
    /// The rule's own message, if it has one.
    Unset,
    /// A JSON object.
    Json,
    /// A sentence.
    Text,
}

impl Setting for BodyStyle {
    const TAKES: &'static str = "json, text, or empty for only the message of the rule";
    fn parse(text: &str) -> Option<Self> {
        match text {
            "" => Some(Self::Unset),
            "json" => Some(Self::Json),
            "text" => Some(Self::Text),
            _ => None,
        }
    }
}

/// Time that the store may take before the failure policy answers; `None` derives it from the caller's timeout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoreDeadline(pub Option<Micros>);

impl StoreDeadline {
    /// Minimum: 1 ms, the least that `auto` gives the store.
    const SHORTEST: Micros = Micros::from_millis(1);
    /// Maximum: 10 s, the reference's timeout for connecting (`REDIS_TIMEOUT`). No caller waits that long.
    const LONGEST: Micros = Micros::from_secs(10);
}

impl Setting for StoreDeadline {
    const TAKES: &'static str = "auto, or a duration from 1ms to 10s";
    fn parse(text: &str) -> Option<Self> {
        if text == "auto" {
            return Some(Self(None));
        }
        let length = Micros::parse(text).filter(|length| (Self::SHORTEST..=Self::LONGEST).contains(length));
        length.map(|length| Self(Some(length)))
    }
}

/// Time for which refusals are kept: from 1 min, less than it takes to look, to 1 h, the most that is promised to clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RefusalsKeep(pub Micros);

impl Setting for RefusalsKeep {
    const TAKES: &'static str = "a duration from 1m to 1h";
    fn parse(text: &str) -> Option<Self> {
        let accepted = Micros::from_secs(60)..=Micros::from_secs(3_600);
        Micros::parse(text).filter(|length| accepted.contains(length)).map(Self)
    }
}

/// Prefix of every counter's name in Redis. A brace in it would choose the slot in a cluster, or separate the limits of one
/// descriptor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyPrefix(pub String);

impl Setting for KeyPrefix {
    const TAKES: &'static str = "text without braces";
    fn parse(text: &str) -> Option<Self> {
        (!text.contains(['{', '}'])).then(|| Self(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_has_a_path_that_the_system_takes_and_permissions_in_octal() {
        let path = |length: usize| SocketPath::parse(&"x".repeat(length));
        assert_eq!(path(0), Some(SocketPath(None)));
        assert_eq!(path(107), Some(SocketPath(Some("x".repeat(107).into()))));
        assert_eq!(path(108), None);
        assert_eq!((SocketPath::parse("unix:/a"), SocketPath::parse("@a")), (None, None));
        let mode = |text| SocketMode::parse(text).map(|mode| mode.0);
        assert_eq!((mode(""), mode("0660"), mode("777")), (Some(None), Some(Some(0o660)), Some(Some(0o777))));
        for wrong in ["66", "0668", "1777", "+660", "rw-rw----", "00660"] {
            assert_eq!(mode(wrong), None, "{wrong}");
        }
    }
}
