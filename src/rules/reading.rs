//! Normalisation of entry values before they are matched and counted, so that one client has one counter.
//!
//! Values in rule files and lists are normalised in the same way as values from clients, so the two are comparable.

use std::borrow::Cow;
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use foldhash::HashMap;

use super::tree::Pattern;
use crate::model::Entry;

mod address;
mod path;

use address::Text;
pub(super) use address::parse as parse_address;
pub(super) use path::canonical as canonical_path;

/// Default prefix length of IPv6 addresses: 64 bits. A host commonly gets 64 bits for addresses of its own choice
/// (RFC 4291, 2.5.4).
pub(super) const V6_PREFIX: u8 = 64;
/// Default prefix length of IPv4 addresses: 32 bits, the whole address.
pub(super) const V4_PREFIX: u8 = 32;
/// Minimum length of a secret: 16 bytes, the length of a shown digest.
const LEAST_SECRET: usize = 16;
/// Context string of BLAKE3's key derivation. It must be hard-coded, globally unique and application-specific.
const CONTEXT: &str = "tidegate 2026-11-21 digests of sensitive entries";

/// Key for the digests of sensitive values.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct KeySecret([u8; 32]);

impl KeySecret {
    /// Derives the key from the content of a secret file without surrounding white space. Returns `None` below 16 bytes.
    pub fn new(bytes: &[u8]) -> Option<Self> {
        let bytes = bytes.trim_ascii();
        (bytes.len() >= LEAST_SECRET).then(|| Self(blake3::derive_key(CONTEXT, bytes)))
    }
}

impl fmt::Debug for KeySecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

/// Normalisation of the values of a domain's entries, by entry key.
#[derive(Debug, Default)]
pub(super) struct Readings {
    by_key: HashMap<Box<[u8]>, Arc<Reading>>,
    has_sensitive: bool,
}

/// Normalisation of the values of one entry.
#[derive(Clone, Debug, Default)]
pub(super) struct Reading {
    pub(super) form: Form,
    pub(super) is_lower: bool,
    /// Digest settings of a sensitive entry; `None` if its values may be shown.
    pub(super) sensitive: Option<Sensitive>,
}

/// Key for the digests of a sensitive entry; `None` if the secret is not known, as in `tidegate check`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sensitive(pub(super) Option<KeySecret>);

/// Form of a value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Form {
    /// Any bytes.
    #[default]
    Text,
    /// An IP address, counted by its first `v4_prefix` or `v6_prefix` bits.
    Ip { v4_prefix: u8, v6_prefix: u8 },
    /// A URL path.
    Path,
}

/// A normalised value.
#[derive(Clone, Debug)]
pub(super) struct Read<'e> {
    /// Normalised value. Addresses stay here as sent.
    value: Cow<'e, [u8]>,
    /// Parsed address, if values of the entry are addresses.
    pub(super) address: Option<IpAddr>,
    /// True if the address may not be in its canonical spelling: any but a plain dotted IPv4 address.
    is_misspelled: bool,
}

impl<'e> Read<'e> {
    /// Returns a value without normalisation.
    pub(super) fn plain(value: &'e [u8]) -> Self {
        Self { value: Cow::Borrowed(value), address: None, is_misspelled: false }
    }

    /// Returns the normalised text, which wildcards and texts are compared with. An address is in its canonical spelling.
    pub(super) fn text(&self) -> Cow<'_, [u8]> {
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
    pub(super) fn first_of(&self) -> Option<usize> {
        match &self.value {
            Cow::Borrowed(value) if !self.is_misspelled => Some(value.len()),
            Cow::Borrowed(_) | Cow::Owned(_) => None,
        }
    }
}

impl Readings {
    pub(super) fn insert(&mut self, key: &str, reading: Reading) {
        self.has_sensitive |= reading.sensitive.is_some();
        self.by_key.insert(key.as_bytes().into(), Arc::new(reading));
    }

    /// Returns the normalisation for `key`; `None` if its values are plain bytes.
    pub(super) fn of(&self, key: &[u8]) -> Option<&Arc<Reading>> {
        if self.by_key.is_empty() { None } else { self.by_key.get(key) }
    }

    /// Returns the first key that `pattern` matches among the keys with a normalisation.
    pub(super) fn key_that_matches(&self, pattern: &Pattern) -> Option<String> {
        let key = self.by_key.keys().filter(|key| pattern.matches(key)).min()?;
        Some(String::from_utf8_lossy(key).into_owned())
    }

    /// Returns true if any entry is sensitive.
    pub(super) fn has_sensitive(&self) -> bool {
        self.has_sensitive
    }

    /// Returns the digest of the value of `entry` if it is sensitive.
    pub(super) fn digest(&self, entry: &Entry) -> Option<String> {
        self.of(&entry.key).and_then(|reading| reading.digest(&entry.key, &entry.value))
    }
}

impl Reading {
    /// Returns true if the values are addresses.
    pub(super) fn is_of_addresses(&self) -> bool {
        matches!(self.form, Form::Ip { .. })
    }

    /// Spells a wildcard like the values that it matches: in lower case for `case: lower`, and for paths with upper-case digits
    /// in percent-encodings (RFC 3986, 6.2.2.1).
    pub(super) fn wildcard(&self, text: &str) -> String {
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
    pub(super) fn read<'e>(&self, value: &'e [u8]) -> Read<'e> {
        let mut read = match self.form {
            Form::Text => Read::plain(value),
            Form::Path if self.is_lower => {
                // `canonical_path` percent-encodes letters beyond ASCII, so they are decoded before they become lower case.
                let lower = lower(Cow::Owned(path::decoded(&canonical_path(value))));
                return Read { value: Cow::Owned(canonical_path(&lower).into_owned()), ..Read::plain(value) };
            }
            Form::Path => Read { value: canonical_path(value), ..Read::plain(value) },
            Form::Ip { .. } => match address::v4(value) {
                // A dotted IPv4 address has only one spelling.
                Some(v4) => Read { address: Some(v4.into()), ..Read::plain(value) },
                None => {
                    let address = parse_address(value);
                    Read { address, is_misspelled: address.is_some(), ..Read::plain(value) }
                }
            },
        };
        if self.is_lower && read.address.is_none() {
            read.value = lower(read.value);
        }
        read
    }

    /// Returns the network that `address` is counted by, with the longer of the configured prefix and `matched`.
    /// Returns `None` if that is the single address.
    pub(super) fn network(&self, address: IpAddr, matched: u8) -> Option<Text> {
        let Form::Ip { v4_prefix, v6_prefix } = self.form else { return None };
        let bits = match address {
            IpAddr::V4(_) => v4_prefix,
            IpAddr::V6(_) => v6_prefix,
        };
        let network = Network::of(address, bits.max(matched));
        (!network.is_single()).then(|| network.text())
    }

    /// Returns the digest of `value` if the entry is sensitive.
    pub(super) fn digest(&self, key: &[u8], value: &[u8]) -> Option<String> {
        self.sensitive.map(|sensitive| sensitive.digest(key, &self.read(value).text()))
    }
}

impl Sensitive {
    /// Returns 128 bits of a keyed digest of `key` and `value`; the word `sensitive` without a secret. Nobody can compute it
    /// or test guessed values without the secret.
    pub(super) fn digest(self, key: &[u8], value: &[u8]) -> String {
        self.digest_of(b"value", key, value)
    }

    /// Returns the digest of a wildcard or list whose values share a counter. It differs from the digest of every value.
    pub(super) fn digest_of_shared(self, key: &[u8], text: &[u8]) -> String {
        self.digest_of(b"share", key, text)
    }

    fn digest_of(self, kind: &[u8; 5], key: &[u8], value: &[u8]) -> String {
        let Self(Some(KeySecret(secret))) = self else { return "sensitive".to_owned() };
        let mut hasher = blake3::Hasher::new_keyed(&secret);
        hasher.update(kind).update(&(key.len() as u64).to_le_bytes()).update(key).update(value);
        hasher.finalize().to_hex()[..32].to_owned()
    }
}

/// A network: an address and its prefix length. The bits after the prefix are 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Network {
    pub(super) address: IpAddr,
    pub(super) bits: u8,
}

impl Network {
    /// Returns the network of the first `bits` bits of `address`.
    pub(super) fn of(address: IpAddr, bits: u8) -> Self {
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
    pub(super) fn is_single(self) -> bool {
        self.bits == if self.address.is_ipv4() { 32 } else { 128 }
    }

    /// Returns the network's text; for a single address, the address alone.
    fn text(self) -> Text {
        let mut text = Text::new();
        address::write(self.address, &mut text);
        if !self.is_single() {
            text.push(b'/');
            address::write_number(self.bits, &mut text);
        }
        text
    }

    /// Parses `10.0.0.0/8` or a single address. Accepts IPv4 networks in IPv6 notation. Returns `None` for any other text.
    pub(super) fn parse(text: &str) -> Option<Result<Self, InvalidNetwork>> {
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
pub(super) enum InvalidNetwork {
    /// The prefix length is no number from 0 to `most`.
    Bits { most: u8 },
    /// The network is in IPv6 notation of an IPv4 address and larger than all of IPv4.
    Mapped,
    /// The address has bits after the prefix. `masked` is the network without them.
    Beyond { masked: Network },
    /// The text has a zone id, which is not part of a client's address. `network` is the text without it.
    Zone { network: Network },
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

/// Converts letters to lower case one by one, so that a part of the text converts in the same way alone. Other characters and
/// bytes that are not UTF-8 stay.
fn lower(value: Cow<'_, [u8]>) -> Cow<'_, [u8]> {
    if value.iter().all(|byte| byte.is_ascii() && !byte.is_ascii_uppercase()) {
        return value;
    }
    let mut bytes = Vec::with_capacity(value.len());
    for chunk in value.utf8_chunks() {
        bytes.extend_from_slice(lower_text(chunk.valid()).as_bytes());
        bytes.extend_from_slice(chunk.invalid());
    }
    Cow::Owned(bytes)
}

/// Converts a text to lower case, letter by letter.
fn lower_text(text: &str) -> String {
    text.chars().flat_map(char::to_lowercase).collect()
}

#[cfg(test)]
mod tests {
    use std::net::Ipv6Addr;

    use proptest::prelude::*;

    use super::*;

    fn ip(v4_prefix: u8, v6_prefix: u8) -> Reading {
        Reading { form: Form::Ip { v4_prefix, v6_prefix }, ..Reading::default() }
    }

    /// Returns the text that a value is matched by, and the text that it is counted by.
    fn told(reading: &Reading, value: &str) -> (String, String) {
        let read = reading.read(value.as_bytes());
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).expect("it is text");
        let matched = text(&read.text());
        let network = read.address.and_then(|address| reading.network(address, 0));
        let counted = network.map_or_else(|| matched.clone(), |network| text(&network));
        (matched, counted)
    }

    #[test]
    fn an_address_has_one_spelling() {
        let reading = ip(V4_PREFIX, V6_PREFIX);
        for v4 in ["192.0.2.1", "::ffff:192.0.2.1", "::FFFF:c000:201", "192.0.2.1:443", "[::ffff:192.0.2.1]:443"] {
            assert_eq!(told(&reading, v4), ("192.0.2.1".to_owned(), "192.0.2.1".to_owned()), "{v4}");
        }
        for v6 in [
            "2001:db8::1",
            "2001:DB8:0:0::1",
            "2001:0db8:0000:0000:0000:0000:0000:0001",
            "[2001:db8::1]",
            "[2001:db8::1]:443",
        ] {
            assert_eq!(told(&reading, v6), ("2001:db8::1".to_owned(), "2001:db8::/64".to_owned()), "{v6}");
        }
        for other in ["", "alice", "192.0.2", "192.0.2.01", "192.0.2.1 ", "10.0.0.0/8", "1", "[", "[]", ":"] {
            assert_eq!(told(&reading, other), (other.to_owned(), other.to_owned()), "it is no address");
        }
    }

    #[test]
    fn as_many_bits_count_as_the_file_says_and_no_fewer_than_were_matched() {
        let reading = ip(24, 48);
        assert_eq!(told(&reading, "192.0.2.77").1, "192.0.2.0/24");
        assert_eq!(told(&reading, "2001:db8:1:2::3").1, "2001:db8:1::/48");
        let text = |network: Text| String::from_utf8(network.to_vec()).unwrap();
        let network = |matched| reading.network(parse_address(b"192.0.2.77").unwrap(), matched).map(text);
        assert_eq!(network(16).as_deref(), Some("192.0.2.0/24"));
        assert_eq!(network(26).as_deref(), Some("192.0.2.64/26"));
        assert_eq!(network(32), None, "all of it");
        let all = |address: &[u8]| ip(0, 0).network(parse_address(address).unwrap(), 0).map(text);
        assert_eq!(all(b"192.0.2.77").as_deref(), Some("0.0.0.0/0"));
        assert_eq!(all(b"2001::1").as_deref(), Some("::/0"));
    }

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

    #[test]
    fn letters_are_lower_whether_or_not_all_bytes_are_text() {
        let reading = Reading { is_lower: true, ..Reading::default() };
        let read = |value: &'static [u8]| reading.read(value).text().into_owned();
        assert_eq!(read(b"Alice"), b"alice");
        assert_eq!(read("ÉCOLE".as_bytes()), "école".as_bytes());
        assert_eq!(read(b"A\xffB"), b"a\xffb");
    }

    #[test]
    fn a_digest_says_nothing_without_its_secret_and_differs_by_key() {
        let secret = |text: &str| Sensitive(KeySecret::new(text.as_bytes()));
        let (one, other) = (secret("0123456789abcdef"), secret("0123456789abcdeX"));
        assert_eq!(one.digest(b"k", b"v").len(), 32);
        assert_ne!(one.digest(b"k", b"v"), other.digest(b"k", b"v"));
        assert_ne!(one.digest(b"k", b"v"), one.digest(b"kv", b""));
        assert_eq!(KeySecret::new(b" 0123456789abcde\n"), None, "15 bytes are too few");
        assert_eq!(format!("{:?}", KeySecret::new(b"0123456789abcdef")), "Some(***)");
    }

    proptest! {
        #[test]
        fn what_is_read_reads_the_same_again(value in prop::collection::vec(any::<u8>(), 0..40), is_lower: bool) {
            for form in [Form::Text, Form::Ip { v4_prefix: 32, v6_prefix: 64 }] {
                let reading = Reading { form, is_lower, sensitive: None };
                let once = reading.read(&value).text().into_owned();
                let twice = reading.read(&once).text().into_owned();
                prop_assert_eq!(twice, once);
            }
        }

        #[test]
        fn every_spelling_of_an_address_is_counted_alike(bits: u128, port: u16) {
            let reading = ip(V4_PREFIX, V6_PREFIX);
            let address = Ipv6Addr::from(bits);
            let groups = address.segments().map(|group| format!("{group:04X}")).join(":");
            let plain = told(&reading, &address.to_string());
            for spelling in [groups.clone(), format!("[{address}]"), format!("[{groups}]:{port}")] {
                prop_assert_eq!(&told(&reading, &spelling), &plain);
            }
        }
    }
}
