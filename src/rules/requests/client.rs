//! Reading of the client's address from the headers that proxies write.

use std::net::IpAddr;

use http::header::{HeaderMap, HeaderName};

use super::{Check, HttpRequests, one};
use crate::normalize::address;

/// Maximum number of trusted proxies that are passed over: 100. Behind them the chain is not read.
const MOST_PROXIES: usize = 100;
/// Header with the addresses of the client and of the proxies in between.
pub(crate) const FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
/// Header with the client and the proxies in between as elements (RFC 7239).
const FORWARDED: HeaderName = HeaderName::from_static("forwarded");

/// Headers in which proxies and content delivery networks send the client's address.
const ADDRESS_HEADERS: [&str; 19] = [
    "ali-cdn-real-ip",
    "cf-connecting-ip",
    "cf-connecting-ipv6",
    "client-ip",
    "do-connecting-ip",
    "fastly-client-ip",
    "fly-client-ip",
    "forwarded",
    "incap-client-ip",
    "true-client-ip",
    "x-appengine-user-ip",
    "x-azure-clientip",
    "x-azure-socketip",
    "x-client-ip",
    "x-cluster-client-ip",
    "x-envoy-external-address",
    "x-nf-client-connection-ip",
    "x-real-ip",
    "x-sucuri-clientip",
];

/// The client, as far as it is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Client {
    pub(super) address: IpAddr,
    /// True if the address is that of a trusted proxy, and no other is known.
    pub(super) is_proxy: bool,
}

/// Returns true if the header `name` has the client's address.
pub(crate) fn has_address(name: &HeaderName) -> bool {
    ADDRESS_HEADERS.contains(&name.as_str())
}

impl HttpRequests {
    /// Returns the client: the last address of `X-Forwarded-For`, with the peer behind it, that is no trusted proxy.
    pub(super) fn client(&self, check: Check<'_>) -> Client {
        self.behind(check.peer.to_canonical(), forwarded_for(check.headers))
    }

    /// Returns the client that the header `name` has. It is read only if the gateway's own peer, which `X-Forwarded-For` has last, is a
    /// trusted proxy, and if it is there once: otherwise a client may have written it.
    pub(super) fn client_of_header(&self, check: Check<'_>, name: &HeaderName) -> Option<Client> {
        let proxy = forwarded_for(check.headers).next().flatten().filter(|proxy| self.trusts(*proxy))?;
        let value = one(check.headers, name).ok()??.as_bytes();
        let mut addresses = match name == FORWARDED {
            true => forwarded(value).peekable(),
            false => return one_address(value).map(|address| Client { address, is_proxy: self.trusts(address) }),
        };
        addresses.peek().copied().flatten()?;
        Some(self.behind(proxy, addresses))
    }

    /// Returns the client that is connected through `nearest`. `chain` has the addresses behind it, the nearest first, and `None` for a part
    /// that is no address. The first that is no trusted proxy is the client's. What follows it, the client itself may have written.
    fn behind(&self, nearest: IpAddr, chain: impl Iterator<Item = Option<IpAddr>>) -> Client {
        let known = |address| Client { address, is_proxy: self.trusts(address) };
        let mut client = known(nearest);
        let mut chain = chain.take(MOST_PROXIES);
        while client.is_proxy
            && let Some(address) = chain.next().flatten()
        {
            client = known(address);
        }
        client
    }
}

/// Returns the addresses of `X-Forwarded-For` from the right; `None` for a part that is no address. Empty parts are left out (RFC 9110,
/// 5.6.1.2).
fn forwarded_for(headers: &HeaderMap) -> impl Iterator<Item = Option<IpAddr>> {
    let lines = headers.get_all(FORWARDED_FOR).iter().rev();
    let parts = lines.flat_map(|line| line.as_bytes().rsplit(|byte| *byte == b','));
    parts.map(<[u8]>::trim_ascii).filter(|part| !part.is_empty()).map(one_address)
}

/// Returns the addresses of `for` in the elements of `Forwarded` from the right; `None` for an element without one. Quotes are counted from
/// the right too, so that an open quote on the left, which the client wrote, changes nothing.
fn forwarded(value: &[u8]) -> impl Iterator<Item = Option<IpAddr>> {
    outside_quotes(value, b',').filter(|element| !element.trim_ascii().is_empty()).map(|element| {
        let mut found = outside_quotes(element, b';').filter_map(|pair| {
            let (name, value) = pair.split_at(pair.iter().position(|byte| *byte == b'=')?);
            name.trim_ascii().eq_ignore_ascii_case(b"for").then_some(value[1..].trim_ascii())
        });
        let value = found.next().filter(|_| found.next().is_none())?;
        let bare = value.strip_prefix(b"\"").and_then(|value| value.strip_suffix(b"\"")).unwrap_or(value);
        one_address(bare)
    })
}

/// Returns the parts of `text` between separators that stand outside of quotes, from the right.
fn outside_quotes(text: &[u8], separator: u8) -> impl Iterator<Item = &[u8]> {
    let mut is_quoted = false;
    text.rsplit(move |byte| {
        is_quoted ^= *byte == b'"';
        *byte == separator && !is_quoted
    })
}

/// Returns the address in `text`: alone, in brackets, with a port or with a zone id.
fn one_address(text: &[u8]) -> Option<IpAddr> {
    let text = text.trim_ascii();
    // Of several addresses, none is the one.
    if text.contains(&b',') { None } else { address::parse(text) }
}
