//! Reading of plain HTTP requests: which descriptors a domain counts a request of a gateway by.
//!
//! The rule file alone decides how a request is read. From the headers of a gateway only those of its own family are read, so a client that sends
//! those of another gateway changes nothing.

mod client;
mod limited;

use std::borrow::Cow;
use std::net::IpAddr;
use std::time::Duration;

use http::header::{HeaderMap, HeaderName};
use http::{HeaderValue, Method};
use thiserror::Error;

use crate::model::{Descriptor, Entry};
use crate::normalize::network::Network;
use crate::normalize::path::canonical;
use crate::normalize::{V4_PREFIX, V6_PREFIX};
use crate::rules::tree::Position;

use client::Client;
pub(crate) use client::{FORWARDED_FOR, has_address};

/// Part of the longest wait that is left for deciding and answering after a delay: 5 ms.
const OWN: Duration = Duration::from_millis(5);

/// Reading of the plain HTTP requests of a domain.
#[derive(Debug)]
pub struct HttpRequests {
    /// Index of the rule file that has it.
    pub(crate) file: usize,
    pub(crate) gateway: Gateway,
    pub(crate) trusted_proxies: Vec<Network>,
    pub(crate) refusal_status: u16,
    /// Time that the gateway waits for an answer.
    pub(crate) timeout: Duration,
    /// True if a path may have an escaped slash or a backslash, which some servers take for a slash and others do not.
    pub(crate) keeps_escaped_slashes: bool,
    pub(crate) descriptors: Vec<Vec<ReadEntry>>,
}

/// Gateway that asks about requests, which says where the original request stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gateway {
    /// NGINX (`auth_request`): X-Original-URI and X-Original-Method.
    Nginx,
    /// Traefik (ForwardAuth): X-Forwarded-Uri and X-Forwarded-Method.
    Traefik,
    /// Caddy (`forward_auth`): as Traefik.
    Caddy,
    /// Envoy (`ext_authz` over HTTP): the method of the check itself, and the path behind `/check/DOMAIN`.
    Envoy,
    /// No gateway: the body has the descriptors.
    None,
}

impl Gateway {
    /// Every gateway with its word in a rule file.
    pub const ALL: [(&'static str, Self); 5] = [
        ("nginx", Self::Nginx),
        ("traefik", Self::Traefik),
        ("caddy", Self::Caddy),
        ("envoy", Self::Envoy),
        ("none", Self::None),
    ];

    /// Returns the headers with the path and the method of the original request, if it has such.
    pub(crate) const fn headers(self) -> Option<(HeaderName, HeaderName)> {
        match self {
            Self::Nginx => {
                Some((HeaderName::from_static("x-original-uri"), HeaderName::from_static("x-original-method")))
            }
            Self::Traefik | Self::Caddy => {
                Some((HeaderName::from_static("x-forwarded-uri"), HeaderName::from_static("x-forwarded-method")))
            }
            Self::Envoy | Self::None => None,
        }
    }
}

/// An entry of a descriptor, and where its value comes from.
#[derive(Debug)]
pub(crate) struct ReadEntry {
    pub(crate) key: String,
    pub(crate) source: Source,
    pub(crate) place: Position,
}

impl ReadEntry {
    /// Returns the key and the origin of the value, without the place.
    pub(crate) fn key_and_source(&self) -> (&str, &Source) {
        (&self.key, &self.source)
    }
}

/// Origin of the value of an entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// The path without the query, in its one spelling.
    Path,
    Method,
    /// The first of these that the request has, and what is done if it has none.
    First(Vec<ClientName>, Missing),
    /// The rule file.
    Value(String),
}

/// A name of the client in a request, and what stands before it in the value of the entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ClientName {
    pub(crate) part: ClientPart,
    /// Empty where nothing else can give the same value. Otherwise it makes the values of different parts different.
    pub(crate) prefix: String,
}

/// Part of a request that names its client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ClientPart {
    /// The client's address, as `X-Forwarded-For` has it.
    Address,
    /// A header with the client's address, which only a trusted proxy can have written.
    AddressHeader(HeaderName),
    /// A header with any text.
    Header(HeaderName),
}

impl ClientPart {
    /// Returns true if the part is an address.
    pub(crate) fn is_address(&self) -> bool {
        !matches!(self, Self::Header(_))
    }
}

impl Source {
    /// Returns true if the value is an address and nothing else.
    pub(crate) fn is_address(&self) -> bool {
        matches!(self, Self::First(names, _) if names.iter().all(|name| name.part.is_address()))
    }
}

/// Consequence of a header that is missing or empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Missing {
    /// The request has no such descriptor.
    Skip,
    /// The request is refused.
    Refuse,
    /// The entry has this value.
    Value(String),
}

/// Value of an entry.
struct Value {
    text: String,
    /// True if it is the address of a trusted proxy, because the client's is unknown.
    is_of_proxy: bool,
}

/// A value that is no proxy's address.
impl From<String> for Value {
    fn from(text: String) -> Self {
        Self { text, is_of_proxy: false }
    }
}

/// A check: a request to `/check/DOMAIN`.
#[derive(Clone, Copy)]
struct Check<'a> {
    peer: IpAddr,
    method: &'a Method,
    /// Path and query behind `/check/DOMAIN`.
    path: &'a str,
    headers: &'a HeaderMap,
}

/// Reason for which a request cannot be read, so that it is refused.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Unreadable {
    /// A header that is read is not there, or is empty.
    #[error("the header {0} is missing")]
    Missing(HeaderName),
    /// A header that is read stands there twice, so that it has no one value.
    #[error("the header {0} stands in the request more than once")]
    Repeated(HeaderName),
    /// A path has a slash that some servers do not take for one.
    #[error("the path of the original request has an escaped slash or a backslash")]
    Slash,
    /// The path does not begin with a slash.
    #[error("the path of the original request does not begin with /")]
    Path,
}

impl HttpRequests {
    /// Returns true if `peer` may ask.
    pub fn trusts(&self, peer: IpAddr) -> bool {
        let peer = peer.to_canonical();
        self.trusted_proxies.iter().any(|network| Network::of(peer, network.bits) == *network)
    }

    /// Returns true if the descriptors are in the body.
    pub fn are_in_body(&self) -> bool {
        self.gateway == Gateway::None
    }

    /// Returns the keys of the entries whose values are addresses and nothing else.
    pub(crate) fn address_keys(&self) -> impl Iterator<Item = &str> {
        let entries = self.descriptors.iter().flatten();
        entries.filter(|entry| entry.source.is_address()).map(|entry| entry.key.as_str())
    }

    /// Returns the status of a refusal.
    pub const fn refusal_status(&self) -> u16 {
        self.refusal_status
    }

    /// Returns the longest time that a request may wait here for anything: four fifths of the time that the gateway waits. The rest
    /// is for the network and for the processors of both.
    pub fn longest_wait(&self) -> Duration {
        self.timeout * 4 / 5
    }

    /// Returns the longest delay of an admitted request.
    pub fn longest_delay(&self) -> Duration {
        self.longest_wait().saturating_sub(OWN)
    }

    /// Returns the descriptors of the request that `peer` asks about. `path` is the path of the check behind `/check/DOMAIN`; `method` and `headers`
    /// are those of the check.
    ///
    /// # Errors
    /// Returns the first reason for which a descriptor has no value.
    pub fn read(
        &self,
        peer: IpAddr,
        method: &Method,
        path: &str,
        headers: &HeaderMap,
    ) -> Result<Vec<Descriptor>, Unreadable> {
        let check = Check { peer, method, path, headers };
        let mut descriptors = Vec::with_capacity(self.descriptors.len());
        for entries in &self.descriptors {
            let mut proxy_entry = None;
            let read = entries.iter().enumerate().map(|(index, entry)| {
                let value = self.value(&entry.source, check)?;
                Ok(value.map(|Value { text, is_of_proxy }| {
                    proxy_entry = proxy_entry.or(is_of_proxy.then_some(index));
                    Entry::new(entry.key.clone(), text)
                }))
            });
            // With an entry that is skipped, all of the descriptor is.
            let entries: Result<Option<Vec<Entry>>, Unreadable> =
                read.collect::<Result<Vec<_>, _>>().map(|entries| entries.into_iter().collect());
            descriptors.extend(entries?.map(|entries| Descriptor { entries, proxy_entry, ..Descriptor::default() }));
        }
        Ok(descriptors)
    }

    /// Returns the value of an entry; `None` if its descriptor is skipped.
    fn value(&self, source: &Source, check: Check<'_>) -> Result<Option<Value>, Unreadable> {
        Ok(Some(Value::from(match source {
            Source::Path => self.path(check)?,
            Source::Method => match self.gateway.headers() {
                Some((_, name)) => required(check.headers, name)?.into_owned(),
                None => check.method.as_str().to_owned(),
            },
            Source::First(names, missing) => match (self.first_of(names, check)?, missing) {
                (Some(value), _) => return Ok(Some(value)),
                (None, Missing::Skip) => return Ok(None),
                (None, Missing::Refuse) => return Err(Unreadable::Missing(of_any_header(names))),
                (None, Missing::Value(value)) => value.clone(),
            },
            Source::Value(value) => value.clone(),
        })))
    }

    /// Returns the first of `names` that the request has.
    fn first_of(&self, names: &[ClientName], check: Check<'_>) -> Result<Option<Value>, Unreadable> {
        for ClientName { part, prefix } in names {
            let client = match part {
                ClientPart::Address => Some(self.client(check)),
                ClientPart::AddressHeader(name) => self.client_of_header(check, name),
                ClientPart::Header(name) => {
                    let text = one(check.headers, name)?.map(text);
                    match text.filter(|text| !prefix.is_empty() || !is_of_other_part(text, names)) {
                        Some(text) => return Ok(Some(Value::from(format!("{prefix}{text}")))),
                        None => continue,
                    }
                }
            };
            if let Some(Client { address, is_proxy }) = client {
                let address = match prefix.as_str() {
                    // As an address it is counted by its network.
                    "" => address.to_string(),
                    prefix => format!("{prefix}{}", client_network(address)),
                };
                return Ok(Some(Value { text: address, is_of_proxy: is_proxy }));
            }
        }
        Ok(None)
    }

    fn path(&self, check: Check<'_>) -> Result<String, Unreadable> {
        let path = match self.gateway.headers() {
            Some((name, _)) => required(check.headers, name)?,
            None => check.path.into(),
        };
        // Of an absolute form (RFC 9112, 3.2.2), the path is what stands behind the host.
        let path = match path.split_once("://") {
            Some((scheme, rest)) if !scheme.contains(['/', '?']) => rest.find('/').map_or("/", |slash| &rest[slash..]),
            _ => &*path,
        };
        if !path.starts_with('/') {
            return Err(Unreadable::Path);
        }
        let before_query = path.split_once('?').map_or(path, |(path, _)| path);
        if !self.keeps_escaped_slashes && has_other_slash(before_query.as_bytes()) {
            return Err(Unreadable::Slash);
        }
        Ok(String::from_utf8_lossy(&canonical(path.as_bytes())).into_owned())
    }
}

/// Returns the network that the client with this address is counted by, where the value of its entry is no address alone.
fn client_network(address: IpAddr) -> Network {
    Network::of(address, if address.is_ipv4() { V4_PREFIX } else { V6_PREFIX })
}

/// Returns true if `text` is a value that another of `names` can have, in any letter case: a client could write it to be counted as somebody else.
fn is_of_other_part(text: &str, names: &[ClientName]) -> bool {
    let text = text.trim_start_matches([',', ' ', '\t']).as_bytes();
    let mut prefixes = names.iter().map(|name| name.prefix.as_bytes()).filter(|prefix| !prefix.is_empty());
    prefixes.any(|prefix| text.get(..prefix.len()).is_some_and(|start| start.eq_ignore_ascii_case(prefix)))
}

/// Returns the name of the first header among `names`.
fn of_any_header(names: &[ClientName]) -> HeaderName {
    let header = |name: &ClientName| match &name.part {
        ClientPart::Header(name) | ClientPart::AddressHeader(name) => Some(name.clone()),
        ClientPart::Address => None,
    };
    names.iter().find_map(header).unwrap_or(FORWARDED_FOR)
}

/// Returns true if a path has `%2f`, `%5c` or a backslash.
fn has_other_slash(path: &[u8]) -> bool {
    let is_escaped = |three: &[u8]| three.eq_ignore_ascii_case(b"%2f") || three.eq_ignore_ascii_case(b"%5c");
    path.contains(&b'\\') || path.windows(3).any(is_escaped)
}

/// Returns the value of a header; `None` if it is missing or empty.
fn one<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Result<Option<&'a HeaderValue>, Unreadable> {
    let mut values = headers.get_all(name).iter();
    let first = values.next();
    match values.next() {
        Some(_) => Err(Unreadable::Repeated(name.clone())),
        None => Ok(first.filter(|value| !value.as_bytes().trim_ascii().is_empty())),
    }
}

/// Returns the value of a header that has to be there, as text.
fn required(headers: &HeaderMap, name: HeaderName) -> Result<Cow<'_, str>, Unreadable> {
    one(headers, &name)?.map(text).ok_or(Unreadable::Missing(name))
}

/// Returns a header's value as text. Bytes that are none are replaced, so that they still are one value.
fn text(value: &HeaderValue) -> Cow<'_, str> {
    String::from_utf8_lossy(value.as_bytes().trim_ascii())
}

#[cfg(test)]
mod tests;
