//! Lists of networks, addresses and texts. The cost of a lookup does not depend on the number of values.

use std::net::IpAddr;

use foldhash::HashMap;
use memchr::memchr;

use crate::normalize::Normalizer;
use crate::normalize::network::{InvalidNetwork, Network};

/// One line of a list, or one item of `values`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ListValue {
    /// An address or a network.
    Network(Network),
    /// Anything else, normalised.
    Text(Box<[u8]>),
}

impl ListValue {
    /// Parses `text`, normalised by `normalizer`.
    ///
    /// # Errors
    /// Returns an error for an invalid network, and for an address with a zone id.
    pub(crate) fn parse(text: &[u8], normalizer: Option<&Normalizer>) -> Result<Self, InvalidNetwork> {
        // The first letter rules out most texts that are no address.
        let may_be_address = matches!(text.first(), Some(b'0'..=b'9' | b'a'..=b'f' | b'A'..=b'F' | b':'));
        if may_be_address && let Some(network) = std::str::from_utf8(text).ok().and_then(Network::parse) {
            return network.map(Self::Network);
        }
        let Some(normalizer) = normalizer else { return Ok(Self::Text(text.into())) };
        let read = normalizer.normalize(text);
        match read.address {
            // An address with a port or in brackets, as clients send it.
            Some(address) if !text.contains(&b',') => {
                let network = Network::of(address, u8::MAX);
                if text.contains(&b'%') { Err(InvalidNetwork::Zone { network }) } else { Ok(Self::Network(network)) }
            }
            // In a client's list the last address counts. In a line of our own list a comma is a mistake: keep it as a text.
            Some(_) => Ok(Self::Text(text.into())),
            None => Ok(Self::Text(read.text().into())),
        }
    }
}

/// Returns the non-empty lines of a list file with their line numbers from 1, without comments and surrounding white space.
pub(crate) fn lines(bytes: &[u8]) -> impl Iterator<Item = (u32, &[u8])> {
    let mut rest = Some(bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes));
    let mut number = 0_u32;
    std::iter::from_fn(move || {
        let text = rest?;
        let (line, after) = match memchr(b'\n', text) {
            Some(end) => (&text[..end], Some(&text[end + 1..])),
            None => (text, None),
        };
        rest = after;
        number = number.saturating_add(1);
        Some((number, without_comment(line).trim_ascii()))
    })
    .filter(|(_, line)| !line.is_empty())
}

/// Cuts off the comment. It begins with a `#` at the start of the line or after white space; another `#` is part of a value.
fn without_comment(line: &[u8]) -> &[u8] {
    let begins = |at: &usize| line[*at] == b'#' && (*at == 0 || line[*at - 1].is_ascii_whitespace());
    match memchr(b'#', line) {
        None => line,
        Some(first) => (first..line.len()).find(begins).map_or(line, |at| &line[..at]),
    }
}

/// Networks, each with the index of its item among the children of a level.
#[derive(Debug, Default)]
pub(crate) struct Networks {
    v4: ByLength<u32>,
    v6: ByLength<u128>,
}

/// Networks of one address family by prefix length, the longest first.
#[derive(Debug)]
struct ByLength<K>(Vec<(u8, HashMap<K, u32>)>);

impl<K> Default for ByLength<K> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl Networks {
    /// Returns the item index of `network`. Sets it to `index` if the network has none.
    pub(crate) fn entry(&mut self, network: Network, index: u32) -> &mut u32 {
        match network.address {
            IpAddr::V4(v4) => self.v4.entry(v4.to_bits(), network.bits, index),
            IpAddr::V6(v6) => self.v6.entry(v6.to_bits(), network.bits, index),
        }
    }

    /// Returns the first result of `accept` among the networks that contain `address`, the smallest first. `accept` gets the item index
    /// and the prefix length of a network.
    pub(crate) fn find<T>(&self, address: IpAddr, accept: impl Fn(u32, u8) -> Option<T>) -> Option<T> {
        match address {
            IpAddr::V4(v4) => {
                let bits = v4.to_bits();
                self.v4.find(|length| bits & u32::MAX.checked_shl(32 - u32::from(length)).unwrap_or(0), accept)
            }
            IpAddr::V6(v6) => {
                let bits = v6.to_bits();
                self.v6.find(|length| bits & u128::MAX.checked_shl(128 - u32::from(length)).unwrap_or(0), accept)
            }
        }
    }
}

impl<K: std::hash::Hash + Eq> ByLength<K> {
    fn entry(&mut self, network: K, bits: u8, index: u32) -> &mut u32 {
        let at = self.0.partition_point(|(length, _)| *length > bits);
        if self.0.get(at).is_none_or(|(length, _)| *length != bits) {
            self.0.insert(at, (bits, HashMap::default()));
        }
        self.0[at].1.entry(network).or_insert(index)
    }

    fn find<T>(&self, masked: impl Fn(u8) -> K, accept: impl Fn(u32, u8) -> Option<T>) -> Option<T> {
        self.0.iter().find_map(|(length, networks)| accept(*networks.get(&masked(*length))?, *length))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_list_has_comments_and_white_space() {
        let text = b"\xef\xbb\xbf# partners\r\n10.0.0.0/8   # ours\r\n\n  a#b  \n#\n\ta b # c # d\nlast";
        let found: Vec<_> = lines(text).map(|(number, line)| (number, String::from_utf8_lossy(line))).collect();
        let told: Vec<_> = found.iter().map(|(number, line)| (*number, &**line)).collect();
        assert_eq!(told, [(2, "10.0.0.0/8"), (4, "a#b"), (6, "a b"), (7, "last")]);
        assert_eq!(lines(b"").count() + lines(b"\n\n#x").count(), 0);
    }

    #[test]
    fn a_member_is_a_network_or_a_text() {
        let parse = |text: &str| ListValue::parse(text.as_bytes(), None);
        let network = |text: &str| Ok(ListValue::Network(Network::parse(text).unwrap().unwrap()));
        assert_eq!(parse("10.0.0.1"), network("10.0.0.1/32"));
        assert_eq!(parse("::1"), network("::1/128"));
        assert_eq!(parse("10.0.0.0/8"), network("10.0.0.0/8"));
        assert_eq!(parse("10.0.0.0/40"), Err(InvalidNetwork::Bits { most: 32 }));
        assert_eq!(parse("face"), Ok(ListValue::Text(b"face"[..].into())));
        assert_eq!(parse("/login"), Ok(ListValue::Text(b"/login"[..].into())));
    }

    proptest! {
        #[test]
        fn the_smallest_network_that_holds_an_address_is_found(
            networks in prop::collection::vec((any::<bool>(), 0_u128..64, 0_u8..=128), 0..40),
            addresses in prop::collection::vec((any::<bool>(), 0_u128..64), 1..20),
        ) {
            // Few different addresses, at both ends of the address space, so that networks overlap.
            let address = |is_v4: bool, seed: u128| -> IpAddr {
                let spread = |width: u32| (seed & 7) | (seed >> 3) << (width - 3);
                if is_v4 { std::net::Ipv4Addr::from_bits(u32::try_from(spread(32)).unwrap()).into() }
                else { std::net::Ipv6Addr::from_bits(spread(128)).into() }
            };
            let mut found = Networks::default();
            let mut all = Vec::new();
            for (index, (is_v4, seed, bits)) in networks.into_iter().enumerate() {
                let network = Network::of(address(is_v4, seed), bits);
                let index = u32::try_from(index).unwrap();
                if *found.entry(network, index) == index {
                    all.push((network, index));
                }
            }
            for (is_v4, seed) in addresses {
                let address = address(is_v4, seed);
                let holds = |network: &Network| network.address.is_ipv4() == address.is_ipv4() && Network::of(address, network.bits) == *network;
                let expected = all.iter().filter(|(network, _)| holds(network)).max_by_key(|(network, _)| network.bits);
                prop_assert_eq!(found.find(address, |index, bits| Some((index, bits))), expected.map(|(network, index)| (*index, network.bits)));
            }
        }
    }
}
