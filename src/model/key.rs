//! The identity of a counter.

use std::fmt;

use super::policy::Colocation;
use super::time::Micros;

/// The identity of one counted thing: domain, descriptor entries, algorithm and window, never the limit.
///
/// A key is readable, bounded and injective: `{edge|user=alice}gcra:1s`. A Redis cluster computes the slot from the text between
/// the braces, so all limits of one descriptor share a slot. No caller can choose the slot: every byte that is not plain in
/// domain, key or value is written as `%` and two hexadecimal digits. A text above [`LONGEST_TEXT`] bytes ends in `#` and a
/// BLAKE3 digest of 128 bits over the whole.
///
/// In a colocated domain a key is `{edge}|user=alice}gcra:1s`: the domain alone determines the slot. Such a key has two texts,
/// each with its own bound of [`LONGEST_TEXT`]. No key of one form equals a key of the other, because only this form has two
/// closing braces.
///
/// A counter of an overlay's own rules has a mark behind the last brace: `{edge|user=alice}~*~gcra:1s`. The mark is the pattern of
/// the overlay's domains. So a counter of the source and one of an overlay share a slot, and never a key: no algorithm begins with `~`.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CounterKey(Box<[u8]>);

/// Maximum number of bytes of readable text before a digest replaces the rest: 200 (`docs/decisions/0004`).
pub const LONGEST_TEXT: usize = 200;
/// Number of bytes of readable text kept before a digest: 160, so that text, `#` and 32 digits stay below [`LONGEST_TEXT`].
const KEPT_TEXT: usize = 160;
/// Bytes reserved for a key: 96, enough for ordinary entries without growing.
const ORDINARY: usize = 96;
/// Maximum number of bytes of a pattern in a mark: 64. A digest replaces a longer one.
const LONGEST_MARK: usize = 64;

/// One entry of a counter key.
#[derive(Clone, Copy, Debug)]
pub struct KeyPart<'a> {
    /// Key of the entry.
    pub key: &'a [u8],
    /// Kind of text that represents the value of the entry.
    pub by: CountedBy,
    /// Text that represents the value.
    pub text: &'a [u8],
}

/// Kind of text that represents the value of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CountedBy {
    /// The value itself: one counter for each value.
    Value,
    /// The matching pattern: one counter for all values that match it (`share_threshold`).
    Pattern,
    /// The list that contains the value: one counter for all values in the list.
    List,
    /// The network of the address: one counter for all addresses in the network.
    Network,
    /// The digest of a sensitive value: one counter for each value.
    Digest,
}

impl CountedBy {
    /// Returns the separator between key and text. No key or value contains it.
    const fn separator(self) -> &'static [u8] {
        match self {
            Self::Value => b"=",
            Self::Pattern => b"~",
            Self::List => b"~~",
            Self::Network => b"~=",
            Self::Digest => b"=#",
        }
    }
}

impl<'a> KeyPart<'a> {
    /// Returns an entry that is counted by its value.
    pub const fn own(key: &'a [u8], value: &'a [u8]) -> Self {
        Self { key, by: CountedBy::Value, text: value }
    }
}

impl CounterKey {
    /// Returns the key of a descriptor's counter for a limit of the source.
    pub fn new<'a>(
        domain: &str,
        parts: impl Iterator<Item = KeyPart<'a>> + Clone,
        colocation: Colocation,
        algorithm: &str,
        window: Micros,
    ) -> Self {
        Self::marked(domain, parts, colocation, ["", ""], algorithm, window)
    }

    /// Returns the key of a descriptor's counter for a limit with these marks: the [`overlay_mark`] of its overlay, and [`SHADOW_MARK`] if only
    /// this limit of its rule is in shadow mode; otherwise empty.
    pub fn marked<'a>(
        domain: &str,
        parts: impl Iterator<Item = KeyPart<'a>> + Clone,
        colocation: Colocation,
        marks: [&str; 2],
        algorithm: &str,
        window: Micros,
    ) -> Self {
        let domain = domain.as_bytes();
        let mut text = Vec::with_capacity(ORDINARY);
        text.push(b'{');
        let start = text.len();
        let mut fits = write_plain(&mut text, start, domain);
        let start = match colocation {
            Colocation::Descriptor => start,
            Colocation::Domain => {
                if !fits {
                    write_digest(&mut text, start, domain, std::iter::empty());
                }
                text.push(b'}');
                fits = true;
                text.len()
            }
        };
        if !(fits && write_parts(&mut text, start, parts.clone())) {
            write_digest(&mut text, start, domain, parts);
        }
        text.push(b'}');
        for mark in marks {
            text.extend_from_slice(mark.as_bytes());
        }
        text.extend_from_slice(algorithm.as_bytes());
        text.push(b':');
        // As `window` is displayed. Formatting it is several percent of a decision with many descriptors.
        let (number, unit) = window.in_largest_unit();
        text.extend_from_slice(itoa::Buffer::new().format(number).as_bytes());
        text.extend_from_slice(unit.as_bytes());
        Self(text.into_boxed_slice())
    }

    /// Returns the bytes of the key, all of them printable ASCII.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

/// Mark of the counters of a limit that is in shadow mode beside others of its rule. So it shares no counter with an enforced one of the same
/// algorithm and window.
pub const SHADOW_MARK: &str = "shadow:";

/// Returns the mark of the counters of an overlay whose domains are `pattern`.
pub fn overlay_mark(pattern: &str) -> Box<str> {
    let mut text = vec![b'~'];
    if !write_plain(&mut text, 0, pattern.as_bytes()) || text.len() > LONGEST_MARK {
        text.truncate(1);
        text.push(b'#');
        text.extend_from_slice(digest(pattern.as_bytes(), std::iter::empty()).as_bytes());
    }
    text.push(b'~');
    String::from_utf8_lossy(&text).into()
}

impl fmt::Display for CounterKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&String::from_utf8_lossy(&self.0))
    }
}

/// Writes only the length: a key holds values that clients sent, and a `{:?}` in a log line must not show them.
impl fmt::Debug for CounterKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CounterKey({} bytes)", self.0.len())
    }
}

/// Writes the parts. Stops early and returns false if the text from `start` on becomes too long.
fn write_parts<'a>(text: &mut Vec<u8>, start: usize, mut parts: impl Iterator<Item = KeyPart<'a>>) -> bool {
    parts.all(|part| {
        text.push(b'|');
        write_plain(text, start, part.key) && {
            text.extend_from_slice(part.by.separator());
            write_plain(text, start, part.text)
        }
    })
}

/// Writes `bytes`. Stops early and returns false if the text from `start` on becomes too long.
fn write_plain(text: &mut Vec<u8>, start: usize, bytes: &[u8]) -> bool {
    const HEX: &[u8; 16] = b"0123456789ABCDEF";
    let end = start + LONGEST_TEXT;
    for &byte in bytes {
        if text.len() >= end {
            return false;
        }
        if is_plain(byte) {
            text.push(byte);
        } else {
            text.extend_from_slice(&[b'%', HEX[usize::from(byte >> 4)], HEX[usize::from(byte & 15)]]);
        }
    }
    text.len() <= end
}

/// Replaces the text from `start` on, except its beginning, with a digest.
fn write_digest<'a>(text: &mut Vec<u8>, start: usize, domain: &[u8], parts: impl Iterator<Item = KeyPart<'a>>) {
    text.truncate(start + KEPT_TEXT);
    text.push(b'#');
    text.extend_from_slice(digest(domain, parts).as_bytes());
}

const fn is_plain(byte: u8) -> bool {
    byte.is_ascii_graphic() && !matches!(byte, b'{' | b'}' | b'|' | b'=' | b'~' | b'#' | b'%')
}

/// Returns the digest over lengths and bytes in order, so that no two different tuples have the same input.
fn digest<'a>(domain: &[u8], parts: impl Iterator<Item = KeyPart<'a>>) -> String {
    let mut hasher = blake3::Hasher::new();
    let mut feed = |bytes: &[u8]| {
        hasher.update(&(bytes.len() as u64).to_le_bytes());
        hasher.update(bytes);
    };
    feed(domain);
    for part in parts {
        feed(part.key);
        feed(part.by.separator());
        feed(part.text);
    }
    hasher.finalize().to_hex()[..32].to_owned()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{CountedBy, CounterKey, KeyPart, overlay_mark};
    use crate::model::{Colocation, Micros};

    type Tuple = (Colocation, String, Vec<(Vec<u8>, Vec<u8>, bool)>);

    fn key((colocation, domain, entries): &Tuple) -> CounterKey {
        let parts = entries.iter().map(|(key, value, shared)| KeyPart {
            key,
            by: if *shared { CountedBy::Pattern } else { CountedBy::Value },
            text: value,
        });
        CounterKey::new(domain, parts, *colocation, "fixed_window", Micros::from_secs(60))
    }

    fn of(colocation: Colocation, domain: &str, entries: &[(&str, &str)]) -> String {
        let entries = entries.iter().map(|(k, v)| (k.as_bytes().to_vec(), v.as_bytes().to_vec(), false)).collect();
        key(&(colocation, domain.to_owned(), entries)).to_string()
    }

    fn own(domain: &str, entries: &[(&str, &str)]) -> String {
        of(Colocation::Descriptor, domain, entries)
    }

    /// Returns the text that a cluster hashes: from the first opening brace to the next closing brace.
    fn slot(key: &CounterKey) -> Vec<u8> {
        let after = key.as_bytes().splitn(2, |&byte| byte == b'{').nth(1).expect("an opening brace");
        after.split(|&byte| byte == b'}').next().expect("a text").to_vec()
    }

    #[test]
    fn a_key_reads_as_what_it_counts() {
        assert_eq!(own("edge", &[("user", "alice"), ("path", "/a b")]), "{edge|user=alice|path=/a%20b}fixed_window:1m");
    }

    #[test]
    fn a_colocated_key_shares_its_slot_with_all_of_its_domain() {
        let colocated = |entries: &[(&str, &str)]| of(Colocation::Domain, "edge", entries);
        assert_eq!(colocated(&[("user", "alice"), ("path", "/a b")]), "{edge}|user=alice|path=/a%20b}fixed_window:1m");
        assert_eq!(colocated(&[("user", "}{x|b=c")]), "{edge}|user=%7D%7Bx%7Cb%3Dc}fixed_window:1m");
        let entry = |bytes: usize| "x".repeat(bytes);
        let long = colocated(&[("k", &entry(198))]);
        assert!(long.starts_with("{edge}|k=xxx") && long.contains('#') && long.len() < 240, "{long}");
        assert!(!colocated(&[("k", &entry(197))]).contains('#'));
        let domains = [entry(200), entry(201), entry(202)];
        let [plain, one, other] = domains.map(|domain| of(Colocation::Domain, &domain, &[("k", "v")]));
        assert_eq!(plain, format!("{{{}}}|k=v}}fixed_window:1m", entry(200)));
        assert!(one.contains("#") && one.ends_with("}|k=v}fixed_window:1m") && one.len() < 240, "{one}");
        assert_ne!(one, other);
    }

    #[test]
    fn a_value_can_neither_close_the_slot_nor_pass_for_two_entries() {
        assert_eq!(own("d", &[("a", "}{x|b=c")]), "{d|a=%7D%7Bx%7Cb%3Dc}fixed_window:1m");
    }

    #[test]
    fn a_counter_of_an_overlay_shares_the_slot_and_never_the_key() {
        let minute = Micros::from_secs(60);
        for colocation in [Colocation::Descriptor, Colocation::Domain] {
            let user = || std::iter::once(KeyPart::own(b"user", b"a"));
            let source = CounterKey::new("edge", user(), colocation, "gcra", minute);
            let long = ["x".repeat(63), "x".repeat(64), "x".repeat(65)];
            let patterns = ["*", "edge", "~", "%7E", "a~gcra", &long[0], &long[1], &long[2]];
            let marked = patterns.map(|pattern| {
                CounterKey::marked("edge", user(), colocation, [&overlay_mark(pattern), ""], "gcra", minute)
            });
            assert!(
                marked.iter().all(|key| slot(key) == slot(&source) && key.as_bytes().len() < 120),
                "{colocation:?}"
            );
            let all: std::collections::HashSet<_> = marked.iter().chain([&source]).collect();
            assert_eq!(all.len(), patterns.len() + 1);
        }
        assert_eq!(&*overlay_mark("*"), "~*~");
    }

    #[test]
    fn what_is_long_ends_in_a_digest() {
        let long = own("d", &[("k", &"x".repeat(60_000))]);
        assert!(long.len() < 240, "{} bytes", long.len());
        let other = own("d", &[("k", &format!("{}y", "x".repeat(59_999)))]);
        assert_ne!(long, other);
        let text = own("d", &[("k", &"x".repeat(197))]);
        assert!(text.contains('#'), "{text}");
        assert!(!own("d", &[("k", &"x".repeat(196))]).contains('#'));
    }

    #[test]
    fn a_digest_tells_in_which_way_a_text_is_counted() {
        let (key, text) = ([b'k'; 190], [b'x'; 100]);
        let ways = [CountedBy::Value, CountedBy::Pattern, CountedBy::List, CountedBy::Network, CountedBy::Digest];
        let keys = ways.map(|by| {
            let part = KeyPart { key: &key, by, text: &text };
            let key =
                CounterKey::new("d", std::iter::once(part), Colocation::Descriptor, "gcra", Micros::from_secs(60));
            key.to_string()
        });
        assert!(keys.iter().all(|key| key.contains('#')), "{keys:?}");
        assert_eq!(keys.iter().collect::<std::collections::HashSet<_>>().len(), ways.len(), "{keys:?}");
    }

    /// Generates few different bytes, separators among them, so that near misses are common.
    fn awkward() -> impl Strategy<Value = Vec<u8>> {
        let byte = prop_oneof![
            Just(b'a'),
            Just(b'='),
            Just(b'|'),
            Just(b'}'),
            Just(b'{'),
            Just(b'%'),
            Just(b'#'),
            Just(b'~'),
            Just(b'7'),
            Just(b'D'),
            Just(0),
            Just(0xff)
        ];
        prop_oneof![
            4 => prop::collection::vec(byte.clone(), 0..4),
            1 => prop::collection::vec(byte, 60..240),
        ]
    }

    fn colocation() -> impl Strategy<Value = Colocation> {
        prop_oneof![Just(Colocation::Descriptor), Just(Colocation::Domain)]
    }

    fn tuple() -> impl Strategy<Value = Tuple> {
        let domain = prop_oneof![
            Just(String::new()),
            Just("a".to_owned()),
            Just("a|a=".to_owned()),
            Just("a%7C".to_owned()),
            Just("a}".to_owned()),
            Just("a}|a=a".to_owned()),
            (199_usize..203).prop_map(|bytes| "a".repeat(bytes)),
        ];
        (colocation(), domain, prop::collection::vec((awkward(), awkward(), any::<bool>()), 0..4))
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(20_000))]

        #[test]
        fn different_descriptors_never_share_a_key(one in tuple(), other in tuple()) {
            prop_assert_eq!(one == other, key(&one) == key(&other));
        }

        #[test]
        fn a_colocated_key_is_no_other_key(one in tuple()) {
            let (colocation, domain, entries) = one.clone();
            let other = match colocation {
                Colocation::Descriptor => Colocation::Domain,
                Colocation::Domain => Colocation::Descriptor,
            };
            prop_assert_ne!(key(&one), key(&(other, domain, entries)));
        }

        #[test]
        fn the_slot_of_a_colocated_key_is_chosen_by_its_domain_alone(one in tuple(), other in tuple()) {
            let colocated = |(_, domain, entries): Tuple| (Colocation::Domain, domain, entries);
            let (one, other) = (colocated(one), colocated(other));
            prop_assert_eq!(one.1 == other.1, slot(&key(&one)) == slot(&key(&other)));
        }

        #[test]
        fn moving_a_byte_across_a_border_changes_the_key(
            colocation in colocation(), bytes in awkward(), cut in 0_usize..8, shift in 1_usize..4,
        ) {
            let split = |at: usize| {
                let at = at.min(bytes.len());
                (colocation, "d".to_owned(), vec![(bytes[..at].to_vec(), bytes[at..].to_vec(), false)])
            };
            let (one, other) = (split(cut), split(cut + shift));
            prop_assert_eq!(one == other, key(&one) == key(&other));
        }

        #[test]
        fn a_key_is_printable_and_bounded(one in tuple()) {
            let key = key(&one);
            prop_assert!(key.as_bytes().iter().all(u8::is_ascii_graphic));
            let bound = if one.0 == Colocation::Domain { 430 } else { 230 };
            prop_assert!(key.as_bytes().len() <= bound);
            prop_assert_eq!(key.as_bytes().iter().filter(|&&byte| byte == b'{').count(), 1);
        }
    }
}
