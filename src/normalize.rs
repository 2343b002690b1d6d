//! Normalisation of entry values before they are matched and counted, so that one client has one counter.
//!
//! Values in rule files and lists are normalised in the same way as values from clients, so the two are comparable.

use std::borrow::Cow;
use std::net::IpAddr;
use std::sync::Arc;

use foldhash::HashMap;

use self::address::Text;
use self::case::{lower, lower_text};
use self::digest::Digester;
use self::network::Network;
use self::path::canonical;
use self::pattern::Pattern;
use crate::model::Entry;

pub mod address;
mod case;
pub mod digest;
pub mod network;
pub mod path;
pub mod pattern;

/// Default prefix length of IPv6 addresses: 64 bits. A host commonly gets 64 bits for addresses of its own choice
/// (RFC 4291, 2.5.4).
pub const V6_PREFIX: u8 = 64;
/// Default prefix length of IPv4 addresses: 32 bits, the whole address.
pub const V4_PREFIX: u8 = 32;

/// Normalisation of the values of a domain's entries, by entry key.
#[derive(Clone, Debug, Default)]
pub struct Normalizers {
    by_key: HashMap<Box<[u8]>, Arc<Normalizer>>,
    has_sensitive: bool,
}

/// Normalisation of the values of one entry.
#[derive(Clone, Debug, Default)]
pub struct Normalizer {
    /// Form of the values.
    pub form: Form,
    /// True if upper and lower case are equal.
    pub is_lower: bool,
    /// Digest settings of a sensitive entry; `None` if its values may be shown.
    pub digester: Option<Digester>,
    /// Treatment of a value that is no address.
    pub others: Others,
}

/// Treatment of a value of an address entry that is no address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Others {
    /// It is counted as text, because the rules say nothing else.
    #[default]
    Unset,
    /// It is counted as text, as the rules say.
    Counted,
    /// Its request is refused, as the rules say in this file (its index) and line.
    Refused {
        /// Index of the file.
        file: u32,
        /// The line.
        line: u32,
    },
}

/// Form of a value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Form {
    /// Any bytes.
    #[default]
    Text,
    /// An IP address, counted by its first `v4_prefix` or `v6_prefix` bits.
    Ip {
        /// Counted bits of an IPv4 address.
        v4_prefix: u8,
        /// Counted bits of an IPv6 address.
        v6_prefix: u8,
    },
    /// A URL path.
    Path,
}

/// A normalised value.
#[derive(Clone, Debug)]
pub struct NormalizedValue<'e> {
    /// Normalised value. Addresses stay here as sent.
    value: Cow<'e, [u8]>,
    /// Parsed address, if values of the entry are addresses.
    pub address: Option<IpAddr>,
    /// True if the address may not be in its canonical spelling: any but a plain dotted IPv4 address.
    is_misspelled: bool,
}

impl<'e> NormalizedValue<'e> {
    /// Returns a value without normalisation.
    pub fn plain(value: &'e [u8]) -> Self {
        Self { value: Cow::Borrowed(value), address: None, is_misspelled: false }
    }

    /// Returns the normalised text, which wildcards and texts are compared with. An address is in its canonical spelling.
    pub fn text(&self) -> Cow<'_, [u8]> {
        match self.address {
            Some(address) if self.is_misspelled => {
                let mut text = Text::new();
                address::write(address, &mut text);
                Cow::Owned(text.to_vec())
            }
            _ => Cow::Borrowed(&self.value),
        }
    }

    /// Returns the length of the normalised value if that is a prefix of the sent value, else `None`.
    pub fn first_of(&self) -> Option<usize> {
        match &self.value {
            Cow::Borrowed(value) if !self.is_misspelled => Some(value.len()),
            Cow::Borrowed(_) | Cow::Owned(_) => None,
        }
    }
}

impl Normalizers {
    /// Sets the normalisation for the values of `key`.
    pub fn insert(&mut self, key: &str, normalizer: Normalizer) {
        self.has_sensitive |= normalizer.digester.is_some();
        self.by_key.insert(key.as_bytes().into(), Arc::new(normalizer));
    }

    /// Reads the values of `key` as addresses, unless its form is set: an IPv6 address counts by its first 64 bits.
    pub fn default_to_addresses(&mut self, key: &str) {
        let normalizer = Arc::make_mut(self.by_key.entry(key.as_bytes().into()).or_default());
        if normalizer.form == Form::Text {
            normalizer.form = Form::Ip { v4_prefix: V4_PREFIX, v6_prefix: V6_PREFIX };
        }
    }

    /// Returns the normalisation for `key`; `None` if its values are plain bytes.
    pub fn of(&self, key: &[u8]) -> Option<&Arc<Normalizer>> {
        if self.by_key.is_empty() { None } else { self.by_key.get(key) }
    }

    /// Returns the keys of which a value that is no address refuses the request, sorted, each with the index of the file that says so, and
    /// the line.
    pub fn refusing(&self) -> Vec<(&[u8], (u32, u32))> {
        let refuses = |normalizer: &Normalizer| match normalizer.others {
            Others::Refused { file, line } => Some((file, line)),
            Others::Unset | Others::Counted => None,
        };
        let all = self.by_key.iter();
        let mut keys: Vec<(&[u8], _)> =
            all.filter_map(|(key, normalizer)| Some((&**key, refuses(normalizer)?))).collect();
        keys.sort_unstable();
        keys
    }

    /// Returns the first key that `pattern` matches among the keys with a normalisation.
    pub fn key_that_matches(&self, pattern: &Pattern) -> Option<String> {
        let key = self.by_key.keys().filter(|key| pattern.matches(key)).min()?;
        Some(String::from_utf8_lossy(key).into_owned())
    }

    /// Returns true if any entry is sensitive.
    pub fn has_sensitive(&self) -> bool {
        self.has_sensitive
    }

    /// Returns the digest of the value of `entry` if the entry is sensitive.
    pub fn digest(&self, entry: &Entry) -> Option<String> {
        self.of(&entry.key).and_then(|normalizer| normalizer.digest(&entry.key, &entry.value))
    }
}

impl Normalizer {
    /// Returns true if the values are addresses.
    pub fn is_of_addresses(&self) -> bool {
        matches!(self.form, Form::Ip { .. })
    }

    /// Spells a wildcard like the values that it matches: in lower case for `case: lower`, and for paths with upper-case digits
    /// in percent-encodings (RFC 3986, 6.2.2.1).
    pub fn wildcard(&self, text: &str) -> String {
        let text = if self.is_lower { lower_text(text) } else { text.to_owned() };
        if self.form != Form::Path {
            return text;
        }
        let mut pieces = text.split('%');
        let mut spelled = pieces.next().unwrap_or_default().to_owned();
        for piece in pieces {
            spelled.push('%');
            match piece.split_at_checked(2) {
                Some((digits, rest)) if digits.bytes().all(|digit| digit.is_ascii_hexdigit()) => {
                    spelled.push_str(&digits.to_ascii_uppercase());
                    spelled.push_str(rest);
                }
                _ => spelled.push_str(piece),
            }
        }
        spelled
    }

    /// Normalises a value.
    pub fn normalize<'e>(&self, value: &'e [u8]) -> NormalizedValue<'e> {
        let mut normalized = match self.form {
            Form::Text => NormalizedValue::plain(value),
            Form::Path if self.is_lower => {
                // `canonical` percent-encodes letters beyond ASCII, so they are decoded before they become lower case.
                let lower = lower(Cow::Owned(path::decoded(&canonical(value))));
                return NormalizedValue {
                    value: Cow::Owned(canonical(&lower).into_owned()),
                    ..NormalizedValue::plain(value)
                };
            }
            Form::Path => NormalizedValue { value: canonical(value), ..NormalizedValue::plain(value) },
            Form::Ip { .. } => match address::v4(value) {
                // A dotted IPv4 address has only one spelling.
                Some(v4) => NormalizedValue { address: Some(v4.into()), ..NormalizedValue::plain(value) },
                None => {
                    let address = address::parse(value);
                    NormalizedValue { address, is_misspelled: address.is_some(), ..NormalizedValue::plain(value) }
                }
            },
        };
        if self.is_lower && normalized.address.is_none() {
            normalized.value = lower(normalized.value);
        }
        normalized
    }

    /// Returns the network that `address` is counted by, with the longer of the configured prefix and `matched`.
    /// Returns `None` if that is the single address.
    pub fn network(&self, address: IpAddr, matched: u8) -> Option<Text> {
        let Form::Ip { v4_prefix, v6_prefix } = self.form else { return None };
        let bits = match address {
            IpAddr::V4(_) => v4_prefix,
            IpAddr::V6(_) => v6_prefix,
        };
        let network = Network::of(address, bits.max(matched));
        (!network.is_single()).then(|| network.text())
    }

    /// Returns the digest of `value` if the entry is sensitive.
    pub fn digest(&self, key: &[u8], value: &[u8]) -> Option<String> {
        self.digester.map(|digester| digester.digest(key, &self.normalize(value).text()))
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv6Addr;

    use proptest::prelude::*;

    use super::*;

    fn ip(v4_prefix: u8, v6_prefix: u8) -> Normalizer {
        Normalizer { form: Form::Ip { v4_prefix, v6_prefix }, ..Normalizer::default() }
    }

    /// Returns the text that a value is matched by, and the text that it is counted by.
    fn told(normalizer: &Normalizer, value: &str) -> (String, String) {
        let normalized = normalizer.normalize(value.as_bytes());
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).expect("it is text");
        let matched = text(&normalized.text());
        let network = normalized.address.and_then(|address| normalizer.network(address, 0));
        let counted = network.map_or_else(|| matched.clone(), |network| text(&network));
        (matched, counted)
    }

    #[test]
    fn an_address_has_one_spelling() {
        let normalizer = ip(V4_PREFIX, V6_PREFIX);
        for v4 in [
            "192.0.2.1",
            " 192.0.2.1,",
            "::ffff:192.0.2.1",
            "::FFFF:c000:201",
            "192.0.2.1:443",
            "[::ffff:192.0.2.1]:443",
        ] {
            assert_eq!(told(&normalizer, v4), ("192.0.2.1".to_owned(), "192.0.2.1".to_owned()), "{v4}");
        }
        for v6 in [
            "2001:db8::1",
            "2001:DB8:0:0::1",
            "2001:0db8:0000:0000:0000:0000:0000:0001",
            "[2001:db8::1]",
            "[2001:db8::1]:443",
        ] {
            assert_eq!(told(&normalizer, v6), ("2001:db8::1".to_owned(), "2001:db8::/64".to_owned()), "{v6}");
        }
        for other in ["", "alice", " alice,", "192.0.2", "192.0.2.01", "192.0.2.1 x", "10.0.0.0/8", "1", "[", "[]", ":"]
        {
            assert_eq!(told(&normalizer, other), (other.to_owned(), other.to_owned()), "it is no address");
        }
    }

    #[test]
    fn as_many_bits_count_as_the_file_says_and_no_fewer_than_were_matched() {
        let normalizer = ip(24, 48);
        assert_eq!(told(&normalizer, "192.0.2.77").1, "192.0.2.0/24");
        assert_eq!(told(&normalizer, "2001:db8:1:2::3").1, "2001:db8:1::/48");
        let text = |network: Text| String::from_utf8(network.to_vec()).unwrap();
        let network = |matched| normalizer.network(address::parse(b"192.0.2.77").unwrap(), matched).map(text);
        assert_eq!(network(16).as_deref(), Some("192.0.2.0/24"));
        assert_eq!(network(26).as_deref(), Some("192.0.2.64/26"));
        assert_eq!(network(32), None, "all of it");
        let all = |address: &[u8]| ip(0, 0).network(address::parse(address).unwrap(), 0).map(text);
        assert_eq!(all(b"192.0.2.77").as_deref(), Some("0.0.0.0/0"));
        assert_eq!(all(b"2001::1").as_deref(), Some("::/0"));
    }

    #[test]
    fn letters_are_lower_whether_or_not_all_bytes_are_text() {
        let normalizer = Normalizer { is_lower: true, ..Normalizer::default() };
        let read = |value: &'static [u8]| normalizer.normalize(value).text().into_owned();
        assert_eq!(read(b"Alice"), b"alice");
        assert_eq!(read("ÉCOLE".as_bytes()), "école".as_bytes());
        assert_eq!(read(b"A\xffB"), b"a\xffb");
    }

    proptest! {
        #[test]
        fn what_is_read_reads_the_same_again(value in prop::collection::vec(any::<u8>(), 0..40), is_lower: bool) {
            for form in [Form::Text, Form::Ip { v4_prefix: 32, v6_prefix: 64 }] {
                let normalizer = Normalizer { form, is_lower, ..Normalizer::default() };
                let once = normalizer.normalize(&value).text().into_owned();
                let twice = normalizer.normalize(&once).text().into_owned();
                prop_assert_eq!(twice, once);
            }
        }

        #[test]
        fn every_spelling_of_an_address_is_counted_alike(bits: u128, port: u16) {
            let normalizer = ip(V4_PREFIX, V6_PREFIX);
            let address = Ipv6Addr::from(bits);
            let groups = address.segments().map(|group| format!("{group:04X}")).join(":");
            let plain = told(&normalizer, &address.to_string());
            for spelling in [groups.clone(), format!("[{address}]"), format!("[{groups}]:{port}")] {
                prop_assert_eq!(&told(&normalizer, &spelling), &plain);
            }
        }
    }
}
