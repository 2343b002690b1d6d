//! Warnings about addresses that rules count as text, or trust.

use foldhash::HashSet;

use crate::normalize::network::Network;
use crate::rulefile::document::{DescriptorNode, Document, EntryNode, LimitsNode, RequestsNode};
use crate::rulefile::documents::OverlayRules;
use crate::rulefile::problem::{Placed, quoted};
use crate::rules::requests::Gateway;
use crate::rules::tree::Position;

/// Keys whose values are the addresses of clients, in lower case and with `_` for `-`.
const OF_ADDRESSES: [&str; 15] = [
    "remote_address",
    "remote_addr",
    "remote_ip",
    "client_ip",
    "client_address",
    "client_addr",
    "source_ip",
    "source_address",
    "ip",
    "ip_address",
    "x_forwarded_for",
    "x_real_ip",
    "cf_connecting_ip",
    "true_client_ip",
    "x_client_ip",
];
/// Shortest prefix of a network of proxies, in bits: 10.0.0.0/8 and fc00::/7 are the largest private ones (RFC 1918, RFC 4193).
const SHORTEST: (u8, u8) = (8, 7);

/// A warning, with the index of its file and its place.
pub(super) type Found = (usize, Position, String);

/// The warnings so far, and the keys that they name.
#[derive(Default)]
struct Addresses {
    found: Vec<Found>,
    seen: HashSet<(String, String)>,
}

/// Finds keys of addresses that `entries` does not name, and networks of proxies that anybody is in.
pub(super) fn addresses(documents: &[(usize, Document)], overlays: &[OverlayRules]) -> Vec<Found> {
    let mut addresses = Addresses::default();
    addresses.of(documents, overlays);
    addresses.found
}

impl Addresses {
    fn of(&mut self, documents: &[(usize, Document)], overlays: &[OverlayRules]) {
        for (file, document) in documents {
            let domain = &document.domain.value;
            let of_domain = || documents.iter().map(|(_, other)| other).filter(|other| other.domain.value == *domain);
            let entries: Vec<_> = of_domain().flat_map(|other| &other.entries).collect();
            let requests: Vec<_> = of_domain().filter_map(|other| other.requests.as_deref()).collect();
            self.uncounted(*file, document, &entries, &requests);
            if let Some(requests) = &document.requests {
                self.everybody(*file, requests);
            }
        }
        for own in overlays {
            self.uncounted(own.file, &own.document, &own.entries.iter().collect::<Vec<_>>(), &[]);
        }
    }

    /// Warns about each key of addresses in `document` without `as: ip`, once in a domain.
    fn uncounted(&mut self, file: usize, document: &Document, entries: &[&EntryNode], requests: &[&RequestsNode]) {
        let mut keys = Vec::new();
        counted_keys(&document.descriptors, &mut keys);
        for key in keys {
            let is_read = entries.iter().any(|entry| entry.key.value == key.value && entry.form.is_some());
            let is_of_requests = requests.iter().any(|requests| requests.address_keys().any(|own| own == key.value));
            if is_read || is_of_requests || !self.seen.insert((document.domain.value.clone(), key.value.clone())) {
                continue;
            }
            let message = format!(
                "addresses of {} are counted as text, so one IPv6 host, which commonly has 2^64 addresses, can use a new counter for each request: write `entries: {{ {}: {{ as: ip }} }}` at the top, which counts IPv6 clients by their /64 (for pushed rules, at the top of an overlay)",
                quoted(&key.value),
                key.value
            );
            self.found.push((file, key.place, message));
        }
    }

    /// Warns about `trusted_proxies` that include anybody.
    fn everybody(&mut self, file: usize, requests: &RequestsNode) {
        for text in &requests.trusted_proxies {
            let Some(Ok(network)) = Network::parse(&text.value) else { continue };
            let shortest = if network.address.is_ipv4() { SHORTEST.0 } else { SHORTEST.1 };
            if network.bits >= shortest {
                continue;
            }
            let effect = if requests.from_gateway.as_ref().is_some_and(|gateway| gateway.value == Gateway::None) {
                "so anybody who reaches this port may ask, and spend the limits of others"
            } else {
                "so a client can write the address that counts into `X-Forwarded-For`, and has a new counter for each request"
            };
            let message = format!(
                "{} trusts clients too, {effect}: write the addresses of the gateway alone",
                quoted(&text.value)
            );
            self.found.push((file, text.place, message));
        }
    }
}

/// Adds the keys of addresses of items that count each of several values by itself.
fn counted_keys<'d>(items: &'d [DescriptorNode], keys: &mut Vec<&'d Placed<String>>) {
    for item in items {
        if let Some(key) = &item.key
            && OF_ADDRESSES.contains(&key.value.to_ascii_lowercase().replace('-', "_").as_str())
            && item.share_threshold.is_none()
            && has_many_values(item)
            && has_limit(item)
        {
            keys.push(key);
        }
        counted_keys(&item.descriptors, keys);
    }
}

/// Returns true if the item matches more than single addresses.
fn has_many_values(item: &DescriptorNode) -> bool {
    let is_network =
        |text: &Placed<String>| matches!(Network::parse(&text.value), Some(Ok(found)) if !found.is_single());
    match (&item.value, &item.value_list) {
        (Some(value), _) => value.value.contains('*'),
        (None, None) => true,
        (None, Some(list)) => list.file.is_some() || list.cidr.iter().chain(&list.values).any(is_network),
    }
}

/// Returns true if the item or one below it has a limit that counts.
fn has_limit(item: &DescriptorNode) -> bool {
    matches!(&item.limits, LimitsNode::Limited(_)) || item.descriptors.iter().any(has_limit)
}
