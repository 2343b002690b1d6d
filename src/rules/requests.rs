//! Reading of plain HTTP requests: which descriptors a domain counts a request of a gateway by.
//!
//! The rule file alone decides how a request is read. From the headers of a gateway only those of its own family are read, so a client that sends
//! those of another gateway changes nothing.

use std::borrow::Cow;
use std::net::IpAddr;

use http::header::{HeaderMap, HeaderName};
use http::{HeaderValue, Method};
use thiserror::Error;

use crate::model::{Descriptor, Entry};
use crate::normalize::address;
use crate::normalize::network::Network;
use crate::normalize::path::canonical;

/// Maximum number of parts of `X-Forwarded-For`: 100, each of which is parsed.
const MOST_PROXIES: usize = 100;
/// Header with the addresses of the client and of the proxies in between.
const FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");

/// Reading of the plain HTTP requests of a domain.
#[derive(Debug)]
pub struct HttpRequests {
    pub(crate) gateway: Gateway,
    pub(crate) trusted_proxies: Vec<Network>,
    pub(crate) refusal_status: u16,
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
    const fn headers(self) -> Option<(HeaderName, HeaderName)> {
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
}

/// Origin of the value of an entry.
#[derive(Clone, Debug)]
pub(crate) enum Source {
    /// The client's address.
    ClientIp,
    /// The path without the query, in its one spelling.
    Path,
    Method,
    /// A header, and what is done without it.
    Header(HeaderName, Missing),
    /// The rule file.
    Value(String),
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
    /// A part of `X-Forwarded-For` is no address.
    #[error("x-forwarded-for has a part that is no address")]
    Chain,
    /// A path has a slash that some servers do not take for one.
    #[error("the path of the original request has an escaped slash or a backslash")]
    Slash,
    /// `X-Forwarded-For` has too many parts.
    #[error("x-forwarded-for has more than {MOST_PROXIES} parts")]
    LongChain,
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

    /// Returns true if the path of the check itself has the path of the request.
    pub fn are_in_path(&self) -> bool {
        self.gateway == Gateway::Envoy
    }

    /// Returns the status of a refusal.
    pub const fn refusal_status(&self) -> u16 {
        self.refusal_status
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
            let read = entries.iter().map(|entry| {
                let value = self.value(&entry.source, check)?;
                Ok(value.map(|value| Entry::new(entry.key.clone(), value)))
            });
            // With an entry that is skipped, all of the descriptor is.
            let entries: Result<Option<Vec<Entry>>, Unreadable> =
                read.collect::<Result<Vec<_>, _>>().map(|entries| entries.into_iter().collect());
            descriptors.extend(entries?.map(|entries| Descriptor { entries, ..Descriptor::default() }));
        }
        Ok(descriptors)
    }

    /// Returns the value of an entry; `None` if its descriptor is skipped.
    fn value(&self, source: &Source, check: Check<'_>) -> Result<Option<String>, Unreadable> {
        Ok(Some(match source {
            Source::ClientIp => self.client(check)?.to_string(),
            Source::Path => self.path(check)?,
            Source::Method => match self.gateway.headers() {
                Some((_, name)) => required(check.headers, name)?.into_owned(),
                None => check.method.as_str().to_owned(),
            },
            Source::Header(name, missing) => match (one(check.headers, name)?, missing) {
                (Some(value), _) => text(value).into_owned(),
                (None, Missing::Skip) => return Ok(None),
                (None, Missing::Refuse) => return Err(Unreadable::Missing(name.clone())),
                (None, Missing::Value(value)) => value.clone(),
            },
            Source::Value(value) => value.clone(),
        }))
    }

    /// Returns the client's address: the last one of the chain that is no trusted proxy; the first if all are.
    fn client(&self, check: Check<'_>) -> Result<IpAddr, Unreadable> {
        let mut client = check.peer.to_canonical();
        let mut is_proxy = self.trusts(client);
        let lines: Vec<Cow<'_, str>> = check.headers.get_all(FORWARDED_FOR).iter().map(text).collect();
        let parts = lines.iter().rev().flat_map(|line| line.rsplit(','));
        for (number, part) in parts.enumerate() {
            if number >= MOST_PROXIES {
                return Err(Unreadable::LongChain);
            }
            let address = address::parse_one(part.trim_ascii().as_bytes()).ok_or(Unreadable::Chain)?;
            if is_proxy {
                client = address;
                is_proxy = self.trusts(client);
            }
        }
        Ok(client)
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
