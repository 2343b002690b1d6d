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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rulefile::{File, Options, load};

    #[test]
    fn a_value_is_compared_if_a_rule_is_for_some_values_only() {
        let text = "domain: d
descriptors:
  - key: user
    rate_limit: { unit: day, requests_per_unit: 1 }
    descriptors:
      - { key: path, value: /login, rate_limit: { unit: day, requests_per_unit: 1 } }
      - { key: path, rate_limit: { unit: day, requests_per_unit: 2 } }
  - { key: address, cidr: [10.0.0.0/8], deny: true }
";
        let file = File { name: "rules.yaml".into(), bytes: text.into() };
        let rules = load(&[file], Options::default()).unwrap().rules;
        let value_use =
            |domain: &str, entries: &str, index| rules.value_use(domain, &Descriptor::parse(entries).unwrap(), index);
        assert_eq!(value_use("d", "user=1", 0), ValueUse::Counted);
        assert_eq!(value_use("d", "user=1,path=/x", 0), ValueUse::Counted);
        assert_eq!(value_use("d", "user=1,path=/x", 1), ValueUse::Compared);
        assert_eq!(value_use("d", "user=1,other=/x", 1), ValueUse::Unused);
        assert_eq!(value_use("d", "address=a", 0), ValueUse::Compared);
        assert_eq!(value_use("e", "user=1", 0), ValueUse::Unused);
    }
}
