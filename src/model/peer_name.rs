//! Names of a peer, as an operator writes them and as certificates have them.

use std::fmt;
use std::net::IpAddr;

/// Name that an operator expects in the certificate of a peer. The first label of a DNS name may be `*`, which stands for
/// one whole label.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PeerName {
    /// DNS name.
    Dns(String),
    /// IP address.
    Ip(IpAddr),
    /// URI, such as a SPIFFE ID; equal byte by byte.
    Uri(String),
}

/// Name in a certificate: a subject alternative name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Presented<'a> {
    /// DNS name, possibly with `*` as its first label.
    Dns(&'a str),
    /// IP address.
    Ip(IpAddr),
    /// URI.
    Uri(&'a str),
}

impl From<Presented<'_>> for PeerName {
    fn from(presented: Presented<'_>) -> Self {
        match presented {
            Presented::Dns(name) => Self::Dns(name.to_owned()),
            Presented::Ip(address) => Self::Ip(address),
            Presented::Uri(uri) => Self::Uri(uri.to_owned()),
        }
    }
}

impl fmt::Display for PeerName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Dns(text) | Self::Uri(text) => f.write_str(text),
            Self::Ip(address) => address.fmt(f),
        }
    }
}

impl PeerName {
    /// Parses a DNS name, an IP address or a URI. Returns `None` if `text` is none of them.
    pub fn parse(text: &str) -> Option<Self> {
        if let Some((scheme, rest)) = text.split_once("://") {
            let is_scheme = scheme.starts_with(|c: char| c.is_ascii_alphabetic())
                && scheme.chars().all(|c| c.is_ascii_alphanumeric() || "+-.".contains(c));
            let is_uri = is_scheme && !rest.is_empty() && rest.chars().all(|c| c.is_ascii_graphic() && c != '*');
            return is_uri.then(|| Self::Uri(text.to_owned()));
        }
        if let Ok(address) = text.trim_start_matches('[').trim_end_matches(']').parse() {
            return Some(Self::Ip(address));
        }
        let name = text.strip_prefix("*.").unwrap_or(text);
        (text.len() <= 253 && name.split('.').all(is_label)).then(|| Self::Dns(text.to_owned()))
    }

    /// Returns this name as a certificate has it.
    pub fn as_presented(&self) -> Presented<'_> {
        match self {
            Self::Dns(name) => Presented::Dns(name),
            Self::Ip(address) => Presented::Ip(*address),
            Self::Uri(uri) => Presented::Uri(uri),
        }
    }

    /// Returns true if a certificate with the name `presented` is that of this peer.
    pub fn is_of(&self, presented: &Presented<'_>) -> bool {
        match (self, presented) {
            (Self::Dns(name), Presented::Dns(presented)) => covers(name, presented) || covers(presented, name),
            (Self::Ip(address), Presented::Ip(presented)) => address == presented,
            (Self::Uri(uri), Presented::Uri(presented)) => uri == presented,
            _ => false,
        }
    }
}

fn is_label(label: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    (1..=63).contains(&label.len()) && label.chars().all(is_plain)
}

/// Returns true if `pattern` is `name`, or has `*` in place of its first label.
fn covers(pattern: &str, name: &str) -> bool {
    if pattern.eq_ignore_ascii_case(name) {
        return true;
    }
    let (Some(parent), Some((label, rest))) = (pattern.strip_prefix("*."), name.split_once('.')) else { return false };
    !label.is_empty() && !parent.is_empty() && parent.eq_ignore_ascii_case(rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_of(name: &str, presented: &Presented<'_>) -> bool {
        PeerName::parse(name).unwrap().is_of(presented)
    }

    #[test]
    fn a_wildcard_is_one_whole_label_on_either_side() {
        for (name, presented, same) in [
            ("envoy.edge", "envoy.edge", true),
            ("Envoy.edge", "eNVOY.edge", true),
            ("*.edge", "envoy.edge", true),
            ("*.edge", "*.edge", true),
            ("envoy.edge", "*.edge", true),
            ("*.edge", "edge", false),
            ("*.edge", ".edge", false),
            ("*.edge", "a.envoy.edge", false),
            ("envoy.edge", "*.envoy.edge", false),
            ("envoy.edge", "envoy.edge.evil", false),
            ("envoy.edge", "evil-envoy.edge", false),
            ("envoy.edge", "env*.edge", false),
            ("envoy.edge", "*", false),
            ("envoy", "*", false),
        ] {
            assert_eq!(is_of(name, &Presented::Dns(presented)), same, "{name} {presented}");
        }
    }

    #[test]
    fn addresses_and_uris_are_equal_or_not() {
        assert!(is_of("10.0.0.1", &Presented::Ip([10, 0, 0, 1].into())));
        assert!(is_of("[::1]", &Presented::Ip("::1".parse().unwrap())));
        assert!(!is_of("10.0.0.1", &Presented::Dns("10.0.0.1")), "an address is no DNS name");
        let identity = "spiffe://cluster.local/ns/edge/sa/envoy";
        assert!(is_of(identity, &Presented::Uri(identity)));
        assert!(!is_of(identity, &Presented::Uri("spiffe://cluster.local/ns/edge/sa/envoy-evil")));
        assert!(!is_of(identity, &Presented::Uri("spiffe://CLUSTER.local/ns/edge/sa/envoy")));
    }

    #[test]
    fn what_is_no_name_is_refused() {
        let long = format!("{}.edge", "a".repeat(64));
        for text in ["", "*", "*.", "a.*", "en*.edge", "a..b", "a b", "spiffe://", "spiffe://a/*", "://a", "a/b", &long]
        {
            assert_eq!(PeerName::parse(text), None, "{text}");
        }
        assert!(matches!(PeerName::parse("*.envoy-gateway-system"), Some(PeerName::Dns(_))));
        assert!(matches!(PeerName::parse("::1"), Some(PeerName::Ip(_))));
    }
}
