//! The rule that is nearest to a descriptor that no rule matches, by the keys of the descriptor.

use std::collections::BTreeMap;
use std::fmt;

use super::RuleSet;
use super::spelling::nearest;
use super::tree::TreeLevel;
use crate::model::Path;
use crate::normalize::pattern::Pattern;

/// Maximum number of different key paths of a domain that are compared, and of domains: 1,000.
const MOST_PATHS: usize = 1_000;

/// The keys of all rules: which keys in which order lead to a rule.
#[derive(Debug)]
pub struct KeyPaths<'a> {
    domains: BTreeMap<&'a str, Vec<KeyPath<'a>>>,
}

/// Keys in an order that leads to rules.
#[derive(Debug)]
struct KeyPath<'a> {
    keys: Vec<&'a Pattern>,
    /// First of the rules.
    rule: &'a Path,
}

/// Relation between a descriptor that no rule matches and the nearest rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Nearest {
    /// No rule file has the domain.
    UnknownDomain {
        /// Domain with a similar name, if there is one.
        similar: Option<String>,
    },
    /// A rule has these keys, and matches other values.
    OtherValues {
        /// Path of the rule.
        rule: String,
    },
    /// A rule has these keys in another order.
    OtherOrder {
        /// Path of the rule.
        rule: String,
        /// Its keys.
        keys: Vec<String>,
    },
    /// The descriptor has more entries than a rule has levels.
    TooDeep {
        /// Path of the rule.
        rule: String,
        /// Keys of the entries that no rule has.
        more: Vec<String>,
    },
    /// A rule needs more entries.
    TooShort {
        /// Path of the rule.
        rule: String,
        /// Keys of the missing entries.
        missing: Vec<String>,
    },
    /// A rule has a similar key.
    Misspelt {
        /// Path of the rule.
        rule: String,
        /// Key of the descriptor.
        key: String,
        /// Key of the rule.
        expected: String,
    },
    /// Another domain has a rule with these keys.
    OtherDomain {
        /// Path of the rule, which begins with the domain.
        rule: String,
    },
}

impl RuleSet {
    /// Returns the keys of all rules.
    pub fn key_paths(&self) -> KeyPaths<'_> {
        let domains = self.domains.iter().map(|(name, domain)| {
            let mut found = Found::default();
            found.collect(&domain.root);
            domain.overlays.iter().for_each(|overlay| found.collect(&overlay.root));
            (&**name, found.paths.into_values().collect())
        });
        KeyPaths { domains: domains.collect() }
    }
}

/// Key paths that were found so far, and the keys of the place in the tree.
#[derive(Default)]
struct Found<'a> {
    paths: BTreeMap<Vec<&'a str>, KeyPath<'a>>,
    keys: Vec<&'a Pattern>,
    texts: Vec<&'a str>,
}

impl<'a> Found<'a> {
    /// Adds the key paths of the rules below `level`.
    fn collect(&mut self, level: &'a TreeLevel) {
        for child in &level.children {
            self.keys.push(&child.key);
            self.texts.push(child.key.text());
            if let Some(rule) = &child.rule
                && self.paths.len() < MOST_PATHS
                && !self.paths.contains_key(&*self.texts)
            {
                self.paths.insert(self.texts.clone(), KeyPath { keys: self.keys.clone(), rule: rule.path() });
            }
            if let Some(below) = &child.below {
                self.collect(below);
            }
            self.keys.pop();
            self.texts.pop();
        }
    }
}

impl KeyPaths<'_> {
    /// Returns the rule that is nearest to a descriptor with these keys. `None` if none is near.
    pub fn nearest(&self, domain: &str, keys: &[&str]) -> Option<Nearest> {
        let Some(paths) = self.domains.get(domain) else {
            let similar = nearest(domain, self.domains.keys().copied().take(MOST_PATHS)).map(str::to_owned);
            return Some(Nearest::UnknownDomain { similar });
        };
        let mut paths = paths.iter();
        paths
            .clone()
            .find_map(|path| path.same_keys(keys))
            .or_else(|| paths.clone().find_map(|path| path.other_order(keys)))
            .or_else(|| paths.clone().find_map(|path| path.misspelt(keys)))
            // The longest of those of which it has all keys.
            .or_else(|| {
                let those = paths.clone().filter(|path| path.has_more(keys).is_some());
                those.max_by_key(|path| path.keys.len())?.has_more(keys)
            })
            .or_else(|| paths.find_map(|path| path.lacks(keys)))
            .or_else(|| {
                let others = self.domains.iter().filter(|(name, _)| **name != domain).flat_map(|(_, paths)| paths);
                let same = others.filter(|path| path.has(keys)).map(|path| path.rule.to_string()).next();
                same.map(|rule| Nearest::OtherDomain { rule })
            })
    }
}

impl KeyPath<'_> {
    fn has(&self, keys: &[&str]) -> bool {
        self.keys.len() == keys.len() && self.keys.iter().zip(keys).all(|(own, key)| own.matches(key.as_bytes()))
    }

    fn rule(&self) -> String {
        self.rule.to_string()
    }

    fn texts(&self) -> impl Iterator<Item = String> {
        self.keys.iter().map(|key| key.text().to_owned())
    }

    fn same_keys(&self, keys: &[&str]) -> Option<Nearest> {
        self.has(keys).then(|| Nearest::OtherValues { rule: self.rule() })
    }

    fn other_order(&self, keys: &[&str]) -> Option<Nearest> {
        let is_in = |own: &&Pattern| keys.iter().any(|key| own.matches(key.as_bytes()));
        let is_of_rule = |key: &&str| self.keys.iter().any(|own| own.matches(key.as_bytes()));
        let has_all = self.keys.len() == keys.len() && self.keys.iter().all(is_in) && keys.iter().all(is_of_rule);
        has_all.then(|| Nearest::OtherOrder { rule: self.rule(), keys: self.texts().collect() })
    }

    /// The descriptor has all keys of the rule in order, and more.
    fn has_more(&self, keys: &[&str]) -> Option<Nearest> {
        let mut own = self.keys.iter().peekable();
        let is_more = |key: &&&str| own.next_if(|own| own.matches(key.as_bytes())).is_none();
        let more: Vec<String> = keys.iter().filter(is_more).map(ToString::to_string).collect();
        let has_all = own.peek().is_none() && !more.is_empty();
        has_all.then(|| Nearest::TooDeep { rule: self.rule(), more })
    }

    /// The rule has all keys of the descriptor in order, and more.
    fn lacks(&self, keys: &[&str]) -> Option<Nearest> {
        let mut keys = keys.iter().peekable();
        let is_missing = |own: &&&Pattern| keys.next_if(|key| own.matches(key.as_bytes())).is_none();
        let missing: Vec<String> = self.keys.iter().filter(is_missing).map(|own| own.text().to_owned()).collect();
        let has_all = keys.peek().is_none() && !missing.is_empty();
        has_all.then(|| Nearest::TooShort { rule: self.rule(), missing })
    }

    fn misspelt(&self, keys: &[&str]) -> Option<Nearest> {
        let mut wrong = self.keys.iter().zip(keys).filter(|(own, key)| !own.matches(key.as_bytes()));
        let (own, key) = wrong.next().filter(|_| self.keys.len() == keys.len())?;
        let expected = wrong.next().is_none().then(|| nearest(key, std::iter::once(own.text())))??;
        Some(Nearest::Misspelt { rule: self.rule(), key: (*key).to_owned(), expected: expected.to_owned() })
    }
}

impl Nearest {
    /// Returns the name of the relation.
    pub fn name(&self) -> &'static str {
        match self {
            Self::UnknownDomain { .. } => "unknown_domain",
            Self::OtherValues { .. } => "other_values",
            Self::OtherOrder { .. } => "other_order",
            Self::TooDeep { .. } => "too_deep",
            Self::TooShort { .. } => "too_short",
            Self::Misspelt { .. } => "misspelt",
            Self::OtherDomain { .. } => "other_domain",
        }
    }
}

/// A sentence for people.
impl fmt::Display for Nearest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnknownDomain { similar: None } => write!(f, "no rule file has this domain"),
            Self::UnknownDomain { similar: Some(similar) } => {
                write!(f, "no rule file has this domain; did you mean {similar}?")
            }
            Self::OtherValues { rule } => {
                write!(f, "the rule {rule} has these keys, and matches other values")
            }
            Self::OtherOrder { rule, keys } => {
                write!(f, "the rule {rule} has these keys in another order: {}", keys.join(", "))
            }
            Self::TooDeep { rule, more } => {
                let more = more.join(", ");
                write!(f, "the rule {rule} has no level for {more}: a rule matches only descriptors of its own depth")
            }
            Self::TooShort { rule, missing } => {
                let missing = missing.join(", ");
                write!(f, "the rule {rule} also needs {missing}: a rule matches only descriptors of its own depth")
            }
            Self::Misspelt { rule, key, expected } => {
                write!(f, "the rule {rule} has the key {expected} where this descriptor has {key}")
            }
            Self::OtherDomain { rule } => {
                write!(f, "a rule of another domain has these keys: {rule}")
            }
        }
    }
}
