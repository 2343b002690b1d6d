//! Names of rules in metrics.

use std::hash::BuildHasher;

use super::escape::is_hidden;
use crate::model::{About, Decision, Path, Request, Series, Shown};

/// Maximum length of one level in a label: 128 bytes, longer than any address and most paths.
const MOST_WORD_BYTES: usize = 128;
/// Name of the series shared by rules that have none of their own.
const OTHER: &str = "other";

/// Identity of a series, as printed: two names that print the same are the same series.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct SeriesName {
    domain: String,
    /// One word per level, joined by dots; empty for requests that no rule of the domain matches.
    rule: String,
    /// `other` for the series that values of the rule share which have none of their own; else empty.
    value: &'static str,
}

impl SeriesName {
    /// Returns the name for requests of a domain that none of its rules matches.
    pub(super) fn of_domain(domain: &str) -> Self {
        Self { domain: printed(domain), rule: String::new(), value: "" }
    }

    /// Returns the name of the series that all rules without a series of their own share.
    pub(super) fn other() -> Self {
        Self { domain: String::new(), rule: OTHER.to_owned(), value: "" }
    }

    /// Returns the name of the series that values of a rule share which have none of their own.
    pub(super) fn other_values(about: &About) -> Self {
        Self { value: OTHER, ..Self::of_rule(about) }
    }

    /// Returns true for the name of the series that all rules without a series of their own share.
    pub(super) fn is_other(&self) -> bool {
        self.domain.is_empty() && self.rule == OTHER
    }

    /// Returns the name of a rule.
    pub(super) fn of_rule(about: &About) -> Self {
        Self::of(about, |_, level| printed(level.word()))
    }

    /// Returns the name of a rule with the request's values where the rule asks for them. Sensitive values appear as their
    /// digests.
    pub(super) fn of_values(about: &About, descriptor: usize, request: &Request, decision: &Decision<'_>) -> Self {
        let sent = request.descriptors().get(descriptor);
        Self::of(about, |number, level| {
            let entry = sent.and_then(|sent| sent.entries.get(number));
            let (Some(entry), true) = (entry, level.shown() != Shown::Pattern) else { return printed(level.word()) };
            let is_detailed = about.series == Series::Detailed;
            if !is_detailed && (level.shown() == Shown::Word || entry.value.is_empty()) {
                return printed(if level.shown() == Shown::Word { level.word() } else { level.key() });
            }
            let digest = decision.digest(descriptor, number);
            // Cut before the conversion: a value may have megabytes.
            let beginning = entry.value.get(..MOST_WORD_BYTES).unwrap_or(&entry.value);
            let value = digest.map_or_else(|| String::from_utf8_lossy(beginning), Into::into);
            printed(&format!("{}_{value}", level.key()))
        })
    }

    fn of(about: &About, word: impl Fn(usize, &Path) -> String) -> Self {
        let levels = about.path.levels();
        let domain = levels.first().map(|domain| printed(domain.word())).unwrap_or_default();
        let words = levels.iter().skip(1).enumerate().map(|(number, level)| word(number, level));
        Self { domain, rule: words.collect::<Vec<_>>().join("."), value: "" }
    }

    /// Returns a 64-bit hash of the name.
    pub(super) fn digest(&self) -> u64 {
        foldhash::fast::FixedState::default().hash_one(self)
    }

    /// Returns the domain.
    pub(super) fn domain(&self) -> &str {
        &self.domain
    }

    /// Returns all levels below the domain, joined by dots.
    pub(super) fn rule(&self) -> &str {
        &self.rule
    }

    /// Returns `other` for the series that values of a rule share; else an empty text.
    pub(super) fn value(&self) -> &'static str {
        self.value
    }

    /// Returns the name without all that follows the second dot.
    pub(super) fn upper(&self) -> Self {
        let end = self.rule.match_indices('.').nth(1).map_or(self.rule.len(), |(at, _)| at);
        Self { domain: self.domain.clone(), rule: self.rule.get(..end).unwrap_or_default().to_owned(), value: "" }
    }

    /// Returns the reference's labels `key1` and `key2`: the first two words between dots. Its mapper drops the rest.
    pub(super) fn keys(&self) -> (&str, &str) {
        let mut words = self.rule.split('.');
        (words.next().unwrap_or_default(), words.next().unwrap_or_default())
    }
}

/// Normalises a word as the reference's statistics do: `:` and `|` become underscores, and so do the dots of anything like an
/// IPv4 address. Also cuts it at 128 bytes and replaces hidden characters.
fn printed(word: &str) -> String {
    let end = (0..=MOST_WORD_BYTES.min(word.len())).rev().find(|end| word.is_char_boundary(*end));
    let word = word.get(..end.unwrap_or(0)).unwrap_or_default();
    let plain: String = word.chars().map(|c| if matches!(c, ':' | '|') || is_hidden(c) { '_' } else { c }).collect();
    let mut text = String::with_capacity(plain.len());
    let mut rest = plain.as_str();
    while let Some(c) = rest.chars().next() {
        let address = address_bytes(rest).and_then(|bytes| rest.split_at_checked(bytes));
        let (part, after) = address.unwrap_or_else(|| rest.split_at(c.len_utf8()));
        if address.is_some() {
            text.push_str(&part.replace('.', "_"));
        } else {
            text.push_str(part);
        }
        rest = after;
    }
    text
}

/// Returns the length of the text at the start that looks like an IPv4 address: four groups of one to three digits, joined by
/// dots.
fn address_bytes(text: &str) -> Option<usize> {
    let mut at = 0;
    for group in 0..4 {
        if group > 0 {
            text.get(at..)?.strip_prefix('.')?;
            at += 1;
        }
        let digits = text.bytes().skip(at).take(3).take_while(u8::is_ascii_digit).count();
        if digits == 0 {
            return None;
        }
        at += digits;
    }
    Some(at)
}
