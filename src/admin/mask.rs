//! Masks for values of clients, for readers who may not see them.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use serde_json::Value;

/// Returns the keyed digest of a key and its value.
pub type ValueDigest = Arc<dyn Fn(&str, &str) -> String + Send + Sync>;

/// Mask of values: the network of an address, and a keyed digest of any other value. It marks what it replaces, so that a reader does
/// not take it for the value: `is_cut` for a network, and `is_digest` for a digest.
#[derive(Clone)]
pub(super) struct Mask {
    digest: ValueDigest,
}

impl Mask {
    /// Returns a mask with this digest.
    pub(super) fn new(digest: ValueDigest) -> Self {
        Self { digest }
    }

    /// Masks the value of each entry in `page`: of each object with a `key` and a `value`.
    pub(super) fn apply(&self, page: &mut Value) {
        match page {
            Value::Array(items) => items.iter_mut().for_each(|item| self.apply(item)),
            Value::Object(fields) => {
                let masked = match (fields.get("key"), fields.get("value")) {
                    (Some(Value::String(key)), Some(Value::String(value))) => {
                        let mark = if network(value).is_some() { "is_cut" } else { "is_digest" };
                        Some((self.masked(key, value), mark))
                    }
                    _ => None,
                };
                match masked {
                    Some((masked, mark)) => {
                        fields.insert("value".to_owned(), masked.into());
                        fields.insert(mark.to_owned(), true.into());
                    }
                    None => fields.values_mut().for_each(|field| self.apply(field)),
                }
            }
            _ => {}
        }
    }

    /// Returns true if the value is an address, which a mask shows as its network.
    pub(super) fn hides_address(value: &str) -> bool {
        network(value).is_some()
    }

    /// Returns the mask of the value of a key.
    pub(super) fn masked(&self, key: &str, value: &str) -> String {
        network(value).unwrap_or_else(|| (self.digest)(key, value))
    }
}

impl fmt::Debug for Mask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mask").finish_non_exhaustive()
    }
}

/// Returns the network of an address, which may have a port or a prefix length: /24 of IPv4, and /48 of IPv6. `None` for other text.
fn network(value: &str) -> Option<String> {
    let bare = value.trim_start_matches('[').trim_end_matches(']');
    let of_prefix = || bare.split_once('/').and_then(|(address, _)| address.parse().ok());
    let address: IpAddr =
        bare.parse().ok().or_else(|| Some(value.parse::<SocketAddr>().ok()?.ip())).or_else(of_prefix)?;
    Some(match address.to_canonical() {
        IpAddr::V4(address) => {
            let [a, b, c, _] = address.octets();
            format!("{a}.{b}.{c}.0/24")
        }
        IpAddr::V6(address) => {
            let [a, b, c, ..] = address.segments();
            format!("{}/48", std::net::Ipv6Addr::new(a, b, c, 0, 0, 0, 0, 0))
        }
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_address_is_shown_as_its_network() {
        for (value, expected) in [
            ("203.0.113.77", Some("203.0.113.0/24")),
            ("203.0.113.77:8080", Some("203.0.113.0/24")),
            ("203.0.113.77/32", Some("203.0.113.0/24")),
            ("::ffff:203.0.113.77", Some("203.0.113.0/24")),
            ("2001:db8:1:2::3", Some("2001:db8:1::/48")),
            ("[2001:db8:1:2::3]", Some("2001:db8:1::/48")),
            ("[2001:db8:1:2::3]:443", Some("2001:db8:1::/48")),
            ("2001:db8:1:2::/64", Some("2001:db8:1::/48")),
            ("ann", None),
            ("203.0.113.77, 198.51.100.1", None),
            ("", None),
        ] {
            assert_eq!(network(value).as_deref(), expected, "{value}");
        }
    }

    #[test]
    fn values_are_masked_wherever_an_entry_is_and_nothing_else_is() {
        let mask = Mask::new(Arc::new(|key: &str, value: &str| format!("digest of {key}, {}", value.len())));
        let mut page = json!({
            "rule": "edge.user",
            "refusals": [{ "descriptors": [[{ "key": "user", "value": "ann" }, { "key": "ip", "value": "10.1.2.3" }]], "count": 7 }],
        });
        mask.apply(&mut page);
        let masked = json!({
            "rule": "edge.user",
            "refusals": [{ "descriptors": [[{ "key": "user", "value": "digest of user, 3", "is_digest": true }, { "key": "ip", "value": "10.1.2.0/24", "is_cut": true }]], "count": 7 }],
        });
        assert_eq!(page, masked);
    }
}
