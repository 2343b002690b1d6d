//! What a rule is called in metrics.

use std::hash::BuildHasher;

use super::escape::is_hidden;
use crate::model::{About, Decision, Path, Request, Series, Shown};

/// The most bytes of one level in a label: 128, more than any address and most paths have.
const MOST_WORD_BYTES: usize = 128;
/// What stands for all that have no series of their own.
const OTHER: &str = "other";

/// What tells the counts of one rule from those of others, as it is printed: what prints the same is the same.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Name {
    domain: String,
    /// A word for each level, with dots between them; nothing for what no rule of the domain answers.
    rule: String,
}

impl Name {
    /// Of what no rule of a domain answers.
    pub(super) fn of_domain(domain: &str) -> Self {
        Self { domain: printed(domain), rule: String::new() }
    }

    /// Of what has no series of its own.
    pub(super) fn other(domain: &str) -> Self {
        Self { domain: printed(domain), rule: OTHER.to_owned() }
    }

    /// Whether it is that of what has no series of its own.
    pub(super) fn is_other(&self) -> bool {
        self.rule == OTHER
    }

    /// Of a rule.
    pub(super) fn of_rule(about: &About) -> Self {
        Self::of(about, |_, level| printed(level.word()))
    }

    /// Of a rule, with the values of the request where the rule asks for them; what is sensitive shows as its digest.
    pub(super) fn of_values(about: &About, descriptor: usize, request: &Request, decision: &Decision<'_>) -> Self {
        let sent = request.descriptors().get(descriptor);
        Self::of(about, |number, level| {
            let entry = sent.and_then(|sent| sent.entries.get(number));
            let (Some(entry), true) = (entry, level.shown() != Shown::Pattern) else { return printed(level.word()) };
            let is_detailed = about.series == Series::Detailed;
            if !is_detailed && (level.shown() == Shown::Word || entry.value.is_empty()) {
                return printed(if level.shown() == Shown::Word { level.word() } else { level.key() });
            }
            let hidden =
                decision.hidden.iter().find(|hidden| (hidden.descriptor, hidden.entry) == (descriptor, number));
            // Cut first: a value may have megabytes.
            let beginning = entry.value.get(..MOST_WORD_BYTES).unwrap_or(&entry.value);
            let value = hidden.map_or_else(|| String::from_utf8_lossy(beginning), |hidden| (&hidden.digest).into());
            printed(&format!("{}_{value}", level.key()))
        })
    }

    fn of(about: &About, word: impl Fn(usize, &Path) -> String) -> Self {
        let levels = about.path.levels();
        let domain = levels.first().map(|domain| printed(domain.word())).unwrap_or_default();
        let words = levels.iter().skip(1).enumerate().map(|(number, level)| word(number, level));
        Self { domain, rule: words.collect::<Vec<_>>().join(".") }
    }

    /// What stands for it in 8 bytes.
    pub(super) fn digest(&self) -> u64 {
        foldhash::fast::FixedState::default().hash_one(self)
    }

    /// The domain.
    pub(super) fn domain(&self) -> &str {
        &self.domain
    }

    /// All levels.
    pub(super) fn rule(&self) -> &str {
        &self.rule
    }

    /// The reference's labels, which its mapper makes at dots: what stands before the first, and all behind it as one.
    pub(super) fn keys(&self) -> (&str, &str) {
        self.rule.split_once('.').unwrap_or((&self.rule, ""))
    }
}

/// A word as the reference's statistics have it: without `:` and `|`, and with the dots of what looks like an IPv4 address as
/// underscores; its beginning, where it is long, and nothing in it that ends a line.
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

/// How many bytes at the beginning look like an IPv4 address: four times one to three digits, with dots between them.
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
