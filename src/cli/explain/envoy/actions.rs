//! Entries that Envoy's rate limit actions make of one request.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::fields::{Fields, Known, is_name};
use super::matchers::{all, header, is_header, is_query, query};
use crate::cli::explain::http::HttpRequest;
use crate::model::{Descriptor, Entry};
use crate::rulefile::yaml::Node;

/// A request at Envoy's rate limit filter.
pub(super) struct Called<'a> {
    pub(super) request: &'a HttpRequest,
    /// Address of the client that Envoy trusts.
    pub(super) client: Option<IpAddr>,
    /// Cluster of the route.
    pub(super) destination: Known<&'a str>,
    /// Cluster of Envoy itself.
    pub(super) source: Option<&'a str>,
}

/// Result of an item of `rate_limits`.
pub(super) enum Made {
    Descriptor(Descriptor),
    /// No descriptor, for this reason.
    Nothing(String),
    /// Perhaps a descriptor: its entries as far as known, and the reason.
    Unknown(String, String),
}

/// Result of one action.
enum Part {
    Entry(String, String),
    /// No entry, and the other actions of the item still make theirs.
    Skipped,
    /// No entry, so the item makes no descriptor.
    Missing(String),
    /// The key of the entry, and the reason for which its value is not known.
    Unknown(String, String),
}

impl Called<'_> {
    /// Returns what an item of `rate_limits` makes.
    pub(super) fn make(&self, item: Node<'_>) -> Made {
        let mut entries = Vec::new();
        let mut shown = Vec::new();
        let mut unknown = None;
        for action in item.field("actions").into_iter().flat_map(Fields::items) {
            let Some((name, node)) = action.fields().next() else { continue };
            match self.part(name, node) {
                Part::Entry(key, value) => {
                    shown.push(format!("{key}={value}"));
                    entries.push(Entry::new(key, value));
                }
                Part::Skipped => {}
                Part::Missing(reason) => return Made::Nothing(reason),
                Part::Unknown(key, reason) => {
                    shown.push(format!("{key}=?"));
                    unknown = unknown.or(Some(reason));
                }
            }
        }
        match unknown {
            Some(reason) => Made::Unknown(shown.join(","), reason),
            None => Made::Descriptor(Descriptor { entries, ..Descriptor::default() }),
        }
    }

    fn part(&self, action: &str, node: Node<'_>) -> Part {
        let is = |name| is_name(action, name);
        let key =
            |default: &str| node.text_of("descriptor_key").filter(|key| !key.is_empty()).unwrap_or(default).to_owned();
        let value = || node.text_of("descriptor_value").unwrap_or_default().to_owned();
        let skips = || node.flag_of("skip_if_absent").unwrap_or(false);
        if is("generic_key") {
            Part::Entry(key("generic_key"), value())
        } else if is("request_headers") {
            let name = node.text_of("header_name").unwrap_or_default();
            let found = header(self.request, name).map(|values| values.first().copied());
            optional(key(""), found, skips(), || format!("the request has no header {name}"))
        } else if is("query_parameters") {
            let name = node.text_of("query_parameter_name").unwrap_or_default();
            optional(key(""), query(self.request, name), skips(), || format!("the query has no parameter {name}"))
        } else if is("remote_address") {
            self.address("remote_address", |client| client.to_string())
        } else if is("masked_remote_address") {
            self.address("masked_remote_address", |client| masked(client, node))
        } else if is("header_value_match") {
            let matchers = node.field("headers").into_iter().flat_map(Fields::items);
            let found = all(matchers.map(|matcher| is_header(self.request, matcher)));
            matched(found, node, key("header_match"), value(), "headers")
        } else if is("query_parameter_value_match") {
            let matchers = node.field("query_parameters").into_iter().flat_map(Fields::items);
            let found = all(matchers.map(|matcher| is_query(self.request, matcher)));
            matched(found, node, key("query_match"), value(), "query parameters")
        } else if is("destination_cluster") {
            match &self.destination {
                Ok(cluster) => Part::Entry("destination_cluster".to_owned(), (*cluster).to_owned()),
                Err(reason) => Part::Unknown("destination_cluster".to_owned(), reason.clone()),
            }
        } else if is("source_cluster") {
            let reason = "the file has no `node: { cluster: NAME }`, and Envoy's --service-cluster is not known here";
            let key = "source_cluster".to_owned();
            match self.source {
                Some(cluster) => Part::Entry(key, cluster.to_owned()),
                None => Part::Unknown(key, reason.to_owned()),
            }
        } else if is("metadata") || is("dynamic_metadata") {
            Part::Unknown(
                key("metadata"),
                format!("`{action}` is written while Envoy handles the request, so its value is not known here"),
            )
        } else {
            Part::Unknown(key(action), format!("the action `{action}` is not evaluated here"))
        }
    }

    /// Returns the entry with a text of the client's address.
    fn address(&self, key: &str, text: impl FnOnce(IpAddr) -> String) -> Part {
        let reason = "`use_remote_address` and `xff_num_trusted_hops` of Envoy decide which address is the client's: give it with --peer";
        match self.client {
            Some(client) => Part::Entry(key.to_owned(), text(client)),
            None => Part::Unknown(key.to_owned(), reason.to_owned()),
        }
    }
}

/// Returns the entry of a value that the request can be without.
fn optional(key: String, found: Known<Option<&str>>, skips: bool, missing: impl FnOnce() -> String) -> Part {
    match found {
        Ok(Some(value)) => Part::Entry(key, value.to_owned()),
        Ok(None) if skips => Part::Skipped,
        Ok(None) => Part::Missing(missing()),
        Err(reason) => Part::Unknown(key, reason),
    }
}

/// Returns the entry of an action that compares the request with matchers.
fn matched(found: Known<bool>, node: Node<'_>, key: String, value: String, what: &str) -> Part {
    let expects = node.flag_of("expect_match").unwrap_or(true);
    match found {
        Ok(found) if found == expects => Part::Entry(key, value),
        Ok(true) => Part::Missing(format!("the request matches its {what}, and `expect_match` is false")),
        Ok(false) => Part::Missing(format!("the request does not match its {what}")),
        Err(reason) => Part::Unknown(key, reason),
    }
}

/// Returns the network of the client as Envoy writes it, with the prefix length even for a single address.
fn masked(client: IpAddr, node: Node<'_>) -> String {
    let length =
        |field, all: u32| node.number_of(field).and_then(|bits| u32::try_from(bits).ok()).unwrap_or(all).min(all);
    match client {
        IpAddr::V4(client) => {
            let bits = length("v4_prefix_mask_len", 32);
            let mask = u32::MAX.checked_shl(32 - bits).unwrap_or(0);
            format!("{}/{bits}", Ipv4Addr::from_bits(client.to_bits() & mask))
        }
        IpAddr::V6(client) => {
            let bits = length("v6_prefix_mask_len", 128);
            let mask = u128::MAX.checked_shl(128 - bits).unwrap_or(0);
            format!("{}/{bits}", Ipv6Addr::from_bits(client.to_bits() & mask))
        }
    }
}
