//! Counter-key parts: by which text an entry is counted.

use std::borrow::Cow;

use smallvec::SmallVec;

use crate::model::Entry;
use crate::model::key::{CountedBy, KeyPart};
use crate::normalize::{NormalizedValue, Normalizer};

/// Counter-key part of an entry.
#[derive(Clone, Debug, Default)]
pub enum CountedAs<'a> {
    /// The value as sent.
    #[default]
    Own,
    /// The first bytes of the value.
    First(usize),
    /// The normalised value.
    Text(SmallVec<[u8; 48]>),
    /// The network of the address.
    Network(SmallVec<[u8; 48]>),
    /// The keyed digest of the value.
    Digest(String),
    /// The wildcard that matches the value.
    Pattern(&'a str),
    /// The list that contains the value.
    List(&'a str),
}

impl CountedAs<'_> {
    /// Returns the counter-key part of an entry with `key` and `value`.
    pub fn key_part<'p>(&'p self, key: &'p [u8], value: &'p [u8]) -> KeyPart<'p> {
        let (by, text) = match self {
            CountedAs::Own => (CountedBy::Value, value),
            CountedAs::First(bytes) => (CountedBy::Value, value.get(..*bytes).unwrap_or(value)),
            CountedAs::Text(text) => (CountedBy::Value, &text[..]),
            CountedAs::Network(network) => (CountedBy::Network, &network[..]),
            CountedAs::Digest(digest) => (CountedBy::Digest, digest.as_bytes()),
            CountedAs::Pattern(pattern) => (CountedBy::Pattern, pattern.as_bytes()),
            CountedAs::List(list) => (CountedBy::List, list.as_bytes()),
        };
        KeyPart { key, by, text }
    }
}

/// Returns the counter-key part for an entry's own value. `bits` is the matched prefix length.
pub fn own_value<'a>(
    normalizer: Option<&Normalizer>,
    entry: &Entry,
    normalized: &NormalizedValue<'_>,
    bits: u8,
) -> CountedAs<'a> {
    let Some(normalizer) = normalizer else { return CountedAs::Own };
    let network = normalized.address.and_then(|address| normalizer.network(address, bits));
    if let Some(digester) = normalizer.digester {
        let value = network.as_deref().map_or_else(|| normalized.text(), Cow::Borrowed);
        return CountedAs::Digest(digester.digest(&entry.key, &value));
    }
    match (network, normalized.first_of()) {
        (Some(network), _) => CountedAs::Network(network),
        (None, Some(all)) if all == entry.value.len() => CountedAs::Own,
        (None, Some(first)) => CountedAs::First(first),
        (None, None) => CountedAs::Text(normalized.text().as_ref().into()),
    }
}
