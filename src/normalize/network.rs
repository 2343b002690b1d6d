//! Networks: an address and a prefix length, with their text.

use std::fmt;
use std::net::IpAddr;

use super::address::{self, Text};

/// A network: an address and its prefix length. The bits after the prefix are 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Network {
    /// The address; its bits after the prefix are 0.
    pub address: IpAddr,
    /// Length of the prefix, in bits.
    pub bits: u8,
}

impl Network {
    /// Returns the network of the first `bits` bits of `address`.
    pub fn of(address: IpAddr, bits: u8) -> Self {
        match address {
            IpAddr::V4(v4) => {
                let bits = bits.min(32);
                let kept = u32::try_from(masked(v4.to_bits().into(), 32, bits)).unwrap_or(0);
                Self { address: IpAddr::V4(kept.into()), bits }
            }
            IpAddr::V6(v6) => {
                let bits = bits.min(128);
                Self { address: IpAddr::V6(masked(v6.to_bits(), 128, bits).into()), bits }
            }
        }
    }

    /// Returns true if the network is a single address.
    pub fn is_single(self) -> bool {
        self.bits == if self.address.is_ipv4() { 32 } else { 128 }
    }

    /// Returns the network's text; for a single address, the address alone.
    pub fn text(self) -> Text {
        let mut text = Text::new();
        address::write(self.address, &mut text);
        if !self.is_single() {
            text.push(b'/');
            address::write_number(self.bits, &mut text);
        }
        text
    }

    /// Parses `10.0.0.0/8` or a single address. Accepts IPv4 networks in IPv6 notation. Returns `None` for any other text.
    pub fn parse(text: &str) -> Option<Result<Self, InvalidNetwork>> {
        if let Some(without) = without_zone(text) {
            return match Self::parse(&without)? {
                Ok(network) => Some(Err(InvalidNetwork::Zone { network })),
                error => Some(error),
            };
        }
        let (address, bits) = match text.split_once('/') {
            Some((address, bits)) => (address, Some(bits)),
            None => (text, None),
        };
        let written: IpAddr = address.parse().ok()?;
        let address = written.to_canonical();
        let most = if written.is_ipv4() { 32 } else { 128 };
        let Some(bits) = bits else {
            return Some(Ok(Self { address, bits: if address.is_ipv4() { 32 } else { 128 } }));
        };
        let is_number = !bits.is_empty() && bits.len() <= 3 && bits.bytes().all(|byte| byte.is_ascii_digit());
        let Some(bits) = bits.parse().ok().filter(|bits: &u8| is_number && *bits <= most) else {
            return Some(Err(InvalidNetwork::Bits { most }));
        };
        // ::ffff:0:0/96 is all of IPv4.
        let network = if written.is_ipv6() && address.is_ipv4() {
            let Some(bits) = bits.checked_sub(96) else { return Some(Err(InvalidNetwork::Mapped)) };
            Self { address, bits }
        } else {
            Self { address, bits }
        };
        let masked = Self::of(network.address, network.bits);
        Some(if masked == network { Ok(network) } else { Err(InvalidNetwork::Beyond { masked }) })
    }
}

/// Prints `10.0.0.0/8`; for a single address, the address alone.
impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&String::from_utf8_lossy(&self.text()))
    }
}

/// Error in the text of a network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InvalidNetwork {
    /// The prefix length is no number from 0 to `most`.
    Bits {
        /// Length of the address, in bits.
        most: u8,
    },
    /// The network is in IPv6 notation of an IPv4 address and larger than all of IPv4.
    Mapped,
    /// The address has bits after the prefix.
    Beyond {
        /// The network without these bits.
        masked: Network,
    },
    /// The text has a zone id, which is not part of a client's address.
    Zone {
        /// The network without the zone id.
        network: Network,
    },
}

/// Removes the zone id from the text of a network: from the first `%` to the last `/`, or to the end. Returns `None` without `%`.
fn without_zone(text: &str) -> Option<String> {
    let (address, zone) = text.split_once('%')?;
    Some(zone.rsplit_once('/').map_or_else(|| address.to_owned(), |(_, bits)| format!("{address}/{bits}")))
}

/// Returns the first `bits` bits of a number of `width` bits; the other bits are 0.
fn masked(number: u128, width: u8, bits: u8) -> u128 {
    let rest = u32::from(width - bits);
    number.checked_shr(rest).and_then(|kept| kept.checked_shl(rest)).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_network_is_written_without_what_does_not_count() {
        let parse = |text| Network::parse(text).map(|network| network.map(|network| network.to_string()));
        let is = |text: &str| Some(Ok(text.to_owned()));
        assert_eq!(parse("10.0.0.0/8"), is("10.0.0.0/8"));
        assert_eq!(parse("10.0.0.1"), is("10.0.0.1"));
        assert_eq!(parse("2001:DB8::/32"), is("2001:db8::/32"));
        assert_eq!(parse("0.0.0.0/0"), is("0.0.0.0/0"));
        assert_eq!(parse("::/0"), is("::/0"));
        assert_eq!(parse("::ffff:10.0.0.0/104"), is("10.0.0.0/8"));
        assert_eq!(parse("::ffff:10.0.0.0/95"), Some(Err(InvalidNetwork::Mapped)));
        assert_eq!(parse("10.0.0.0/33"), Some(Err(InvalidNetwork::Bits { most: 32 })));
        assert_eq!(parse("10.0.0.0/+8"), Some(Err(InvalidNetwork::Bits { most: 32 })));
        assert_eq!(parse("::/129"), Some(Err(InvalidNetwork::Bits { most: 128 })));
        let masked = Network::of("10.0.0.0".parse().unwrap(), 8);
        assert_eq!(parse("10.1.2.3/8"), Some(Err(InvalidNetwork::Beyond { masked })));
        for other in ["alice", "10.0.0/8", "", "/8"] {
            assert_eq!(parse(other), None, "{other}");
        }
    }
}
