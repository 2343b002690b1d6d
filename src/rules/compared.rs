//! Values that rules compare or count, for requests of which a value is not known as it was sent.

use super::RuleSet;
use super::tree::{TreeLevel, Values};
use crate::model::{Descriptor, Entry};

/// Use that the rules of a domain make of an entry's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ValueUse {
    /// No rule has a key for the entry.
    Unused,
    /// Each value has a counter of its own.
    Counted,
    /// At least one rule is for some values only.
    Compared,
}

impl RuleSet {
    /// Returns the use that the rules of `domain` make of the value of entry `index` of `descriptor`.
    pub fn value_use(&self, domain: &str, descriptor: &Descriptor, index: usize) -> ValueUse {
        let Some(domain) = self.domains.get(domain) else { return ValueUse::Unused };
        let trees = std::iter::once(&domain.root).chain(domain.overlays.iter().map(|overlay| &overlay.root));
        let uses = trees.map(|root| root.value_use(&descriptor.entries, index));
        uses.max().unwrap_or(ValueUse::Unused)
    }
}

impl TreeLevel {
    fn value_use(&self, entries: &[Entry], index: usize) -> ValueUse {
        let Some((entry, rest)) = entries.split_first() else { return ValueUse::Unused };
        let children = self.children.iter().filter(|child| child.key.matches(&entry.key));
        let uses = children.map(|child| match (index, &child.values, &child.below) {
            (0, Values::Any, _) => ValueUse::Counted,
            (0, ..) => ValueUse::Compared,
            (_, _, Some(below)) => below.value_use(rest, index - 1),
            (_, _, None) => ValueUse::Unused,
        });
        uses.max().unwrap_or(ValueUse::Unused)
    }
}
