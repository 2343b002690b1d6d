//! The descriptor tree and its lookup: level by level, exact before wildcard before key-only, without backtracking.

use std::sync::Arc;

use foldhash::HashMap;
use smallvec::SmallVec;

use super::list::ListValue;
use super::trial::Trial;
use super::{Action, Rule};
use crate::algorithm::Limit;
use crate::model::key::SHADOW_MARK;
use crate::model::{Colocation, CounterKey, Descriptor, Entry};
use crate::normalize::pattern::Pattern;
use crate::normalize::{NormalizedValue, Normalizer, Normalizers, address};

mod counted;
mod keys;
mod reach;
mod texts;
mod wildcards;

use counted::{CountedAs, own_value};
use keys::{KeyChildren, Keys, MoreChildren};
use wildcards::Wildcards;

/// One level of the descriptor tree. The lookup cost does not depend on the number of exact and key-only children.
#[derive(Debug, Default)]
pub(crate) struct TreeLevel {
    /// Children in file order.
    pub(crate) children: Vec<Child>,
    by_key: Keys,
    /// Children with a wildcard in the key.
    wild_keys: Wildcards,
    /// Children with a wildcard in key or value, to find duplicates.
    wild: HashMap<(Pattern, Option<Pattern>), u32>,
}

/// One item of a `descriptors` list.
#[derive(Debug)]
pub(crate) struct Child {
    pub(crate) key: Pattern,
    pub(crate) values: Values,
    pub(crate) is_shared: bool,
    /// True if values of the entry are sensitive.
    pub(crate) is_hidden: bool,
    pub(crate) file: u32,
    pub(crate) place: Position,
    pub(crate) rule: Option<Rule>,
    /// Next level, if any.
    pub(crate) below: Option<Box<TreeLevel>>,
}

/// A place in a rule file; line and column count from 1, as in editors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Position {
    /// The line.
    pub line: u32,
    /// The column, in characters.
    pub column: u32,
}

/// Values that an item matches.
#[derive(Debug)]
pub(crate) enum Values {
    /// Any value that no other item matches.
    Any,
    /// One value, or the values of a wildcard.
    Pattern(Pattern),
    /// The values of a list.
    Listed(Box<Listed>),
}

/// The list of an item. Its values are in the maps of the level.
#[derive(Debug)]
pub(crate) struct Listed {
    /// Text for the list in the key of a shared counter.
    pub(crate) counted: Box<str>,
    /// Text for the list in messages and names.
    pub(crate) shown: Box<str>,
    /// One value of the list, if the rule file itself contains one and it is not sensitive.
    pub(crate) example: Option<Box<str>>,
    /// True if the list has a `values_file`. Other lists may then contain the same values.
    pub(crate) has_file: bool,
}

/// Result of a lookup in the tree.
#[derive(Debug, Default)]
pub(crate) struct TreeMatch<'a> {
    pub(crate) rule: Option<&'a Rule>,
    /// Counter-key parts that replace values, by level. Empty if every level uses the value as sent.
    counted: SmallVec<[CountedAs<'a>; 1]>,
    /// True if the rule of an overlay replaces the limits of this rule, and a limit that the request sends.
    pub(crate) is_replaced: bool,
}

/// The child that matches an entry.
#[derive(Clone, Copy, Debug)]
struct Chosen<'a> {
    child: &'a Child,
    /// Length of the matched network prefix, in bits; `u8::MAX` for an exact text, 0 for wildcards and key-only children.
    bits: u8,
}

impl TreeLevel {
    /// Adds an item after all earlier ones. Returns the index of an earlier item with the same key and value as the error.
    pub(crate) fn add(&mut self, child: Child, normalizer: Option<&Arc<Normalizer>>) -> Result<(), usize> {
        let index = u32::try_from(self.children.len()).unwrap_or(u32::MAX);
        let pattern = child.pattern();
        if child.key.is_literal() {
            let key_children = self.by_key.of(&self.children, &child);
            if let Some(normalizer) = normalizer {
                key_children.more_mut().normalizer = Some(Arc::clone(normalizer));
            }
        }
        let is_wild = !child.key.is_literal() || pattern.is_some_and(|value| !value.is_literal());
        let earlier = if is_wild {
            let earlier = *self.wild.entry((child.key.clone(), pattern.cloned())).or_insert(index);
            if earlier == index {
                if child.key.is_literal() {
                    let prefix = pattern.map_or(&[][..], Pattern::prefix);
                    self.by_key.of(&self.children, &child).more_mut().wild.add(prefix, index);
                } else {
                    self.wild_keys.add(child.key.prefix(), index);
                }
            }
            earlier
        } else {
            match &child.values {
                Values::Listed(_) => index,
                Values::Any => self.by_key.of(&self.children, &child).any_or(index),
                Values::Pattern(value) => {
                    let text = value.text().as_bytes();
                    // If values are addresses, a single address is also stored as a network.
                    let normalizer = normalizer.map(AsRef::as_ref).filter(|normalizer| normalizer.is_of_addresses());
                    let list_value = normalizer.and_then(|_| ListValue::parse(text, normalizer).ok());
                    let list_value = list_value.unwrap_or_else(|| ListValue::Text(text.into()));
                    let earlier = register(&mut self.by_key, &self.children, &child, list_value);
                    earlier.map_or(index, |earlier| u32::try_from(earlier).unwrap_or(index))
                }
            }
        };
        if earlier != index {
            return Err(place(earlier));
        }
        self.children.push(child);
        Ok(())
    }

    /// Registers `list_value` as a value of the last added child. Returns the index of an earlier child with that value as the error.
    /// If one of the two has a `values_file`, a duplicate is no error: `deny` wins over `exempt`, and both over other items.
    pub(crate) fn add_list_value(&mut self, list_value: ListValue) -> Result<(), usize> {
        let Self { children, by_key, .. } = self;
        let Some((child, earlier)) = children.split_last() else { return Ok(()) };
        register(by_key, earlier, child, list_value).map_or(Ok(()), Err)
    }

    /// Returns the child that matches `entry` and is not passed over, and the counter-key part of the entry.
    fn answer(
        &self,
        normalizers: &Normalizers,
        entry: &Entry,
        is_passed_over: impl Fn(&Child) -> bool,
    ) -> Option<(&Child, CountedAs<'_>)> {
        let key_children = self.by_key.get(&self.children, &entry.key);
        let normalizer = match key_children {
            Some(key_children) => key_children.more().and_then(|more| more.normalizer.as_deref()),
            // Only items with a wildcard in the key can match.
            None => normalizers.of(&entry.key).map(AsRef::as_ref),
        };
        let normalized = normalized(normalizer, entry);
        let chosen = self.choose(key_children, &entry.key, &normalized, is_passed_over)?;
        Some((chosen.child, chosen.counted(normalizer, entry, &normalized)))
    }

    /// Returns the child that matches `entry`.
    pub(crate) fn child(&self, normalizers: &Normalizers, entry: &Entry) -> Option<&Child> {
        self.answer(normalizers, entry, |_| false).map(|(child, _)| child)
    }

    fn choose<'a>(
        &'a self,
        key_children: Option<&'a KeyChildren>,
        key: &[u8],
        normalized: &NormalizedValue<'_>,
        is_passed_over: impl Fn(&Child) -> bool,
    ) -> Option<Chosen<'a>> {
        let chosen = |index: u32, bits: u8| {
            let child = self.children.get(place(index)).filter(|child| !is_passed_over(child))?;
            Some(Chosen { child, bits })
        };
        let more = key_children.and_then(KeyChildren::more);
        if let Some(more) = more {
            // If values are addresses, the map of texts contains none.
            if normalized.address.is_none()
                && let Some(exact) = more.exact.get(&self.children, &normalized.text())
                && let Some(found) = chosen(exact, u8::MAX)
            {
                return Some(found);
            }
            if let Some(networks) = more.networks.as_deref()
                && let Some(address) = normalized.address.or_else(|| address::parse(&normalized.text()))
                && let Some(found) = networks.find(address, chosen)
            {
                return Some(found);
            }
        }
        if !self.wild.is_empty() {
            let text = normalized.text();
            let mut candidates = SmallVec::<[u32; 8]>::new();
            if let Some(more) = more {
                more.wild.candidates(&text, &mut candidates);
            }
            self.wild_keys.candidates(key, &mut candidates);
            candidates.sort_unstable();
            let is_matched = |chosen: &Chosen<'_>| chosen.child.matches(key, &text);
            let wild = candidates.into_iter().filter_map(|index| chosen(index, 0)).find(is_matched);
            if wild.is_some() {
                return wild;
            }
        }
        key_children?.any().and_then(|any| chosen(any, 0))
    }

    /// Returns the key of the child that matches `entry`.
    pub(crate) fn key_of(&self, normalizers: &Normalizers, entry: &Entry) -> Option<&str> {
        self.answer(normalizers, entry, |_| false).map(|(child, _)| child.key.text())
    }

    /// Returns the rule at the end of the descriptor's entries if the tree has exactly that depth there. A rule on the way that
    /// decides the whole request wins.
    pub(crate) fn find<'a>(&'a self, normalizers: &Normalizers, descriptor: &Descriptor) -> TreeMatch<'a> {
        let mut counted = SmallVec::new();
        let mut node = Some(self);
        let mut last = None;
        for (level, entry) in descriptor.entries.iter().enumerate() {
            let is_of_proxy = descriptor.proxy_entry.is_some_and(|proxy| proxy <= level);
            let is_passed_over = |child: &Child| is_of_proxy && child.is_free(level + 1 == descriptor.entries.len());
            let Some((child, by)) = node.and_then(|node| node.answer(normalizers, entry, is_passed_over)) else {
                return TreeMatch::default();
            };
            if !matches!(by, CountedAs::Own) {
                counted.resize(level, CountedAs::Own);
                counted.push(by);
            }
            node = child.below.as_deref();
            last = Some(child);
            if child.action().is_some() {
                break;
            }
        }
        match last.and_then(|child| child.rule.as_ref()) {
            Some(rule) => TreeMatch { rule: Some(rule), counted, is_replaced: false },
            None => TreeMatch::default(),
        }
    }

    /// Searches for the enforced limit that is easiest to try, and stores it in `best`. Fills in example values for wildcards, and skips entries
    /// that another rule matches.
    pub(crate) fn easiest_trial(
        &self,
        root: &Self,
        normalizers: &Normalizers,
        entries: &mut Vec<(String, String)>,
        best: &mut Option<(Trial, Vec<(String, String)>)>,
    ) {
        for child in &self.children {
            let Some(value) = child.example() else { continue };
            entries.push((child.key.example(), value));
            if let Some(rule) = &child.rule
                && let Some(trial) = rule.trial()
                && best.as_ref().is_none_or(|(easiest, _)| trial < *easiest)
                && root.find(normalizers, &described(entries)).rule.is_some_and(|found| found.id() == rule.id())
            {
                *best = Some((trial, entries.clone()));
            }
            if let Some(below) = &child.below {
                below.easiest_trial(root, normalizers, entries, best);
            }
            entries.pop();
        }
    }

    /// Returns true if any rule of the tree can refuse a request.
    pub(crate) fn is_enforcing(&self) -> bool {
        self.children.iter().any(|child| {
            child.rule.as_ref().is_some_and(Rule::is_enforcing)
                || child.below.as_ref().is_some_and(|below| below.is_enforcing())
        })
    }

    pub(crate) fn collect_rules<'a>(&'a self, rules: &mut Vec<&'a Rule>) {
        for child in &self.children {
            rules.extend(&child.rule);
            if let Some(below) = &child.below {
                below.collect_rules(rules);
            }
        }
    }
}

fn described(entries: &[(String, String)]) -> Descriptor {
    let entries = entries.iter().map(|(key, value)| Entry::new(key.clone(), value.clone()));
    Descriptor { entries: entries.collect(), ..Descriptor::default() }
}

/// Registers `list_value` for `child`, which follows `earlier`. Returns the index of an earlier child with that value, unless one
/// of the two has a `values_file`: then the lower rank keeps the value.
fn register(by_key: &mut Keys, earlier: &[Child], child: &Child, list_value: ListValue) -> Option<usize> {
    if !child.key.is_literal() {
        return None;
    }
    let MoreChildren { exact, networks, .. } = by_key.of(earlier, child).more_mut();
    let index = u32::try_from(earlier.len()).unwrap_or(u32::MAX);
    let known = match &list_value {
        ListValue::Network(network) => *networks.get_or_insert_default().entry(*network, index),
        ListValue::Text(text) => exact.get(earlier, text).unwrap_or(index),
    };
    // A new value is found at `index`, which is no earlier child.
    if let Some(other) = earlier.get(place(known)) {
        if !child.has_file() && !other.has_file() {
            return Some(place(known));
        }
        if child.rank() >= other.rank() {
            return None;
        }
    }
    match list_value {
        ListValue::Network(network) => *networks.get_or_insert_default().entry(network, index) = index,
        ListValue::Text(text) => exact.set(earlier, child, text),
    }
    None
}

fn place(index: u32) -> usize {
    usize::try_from(index).unwrap_or(usize::MAX)
}

/// Returns the normalised value of `entry`.
pub(crate) fn normalized<'e>(normalizer: Option<&Normalizer>, entry: &'e Entry) -> NormalizedValue<'e> {
    normalizer.map_or_else(|| NormalizedValue::plain(&entry.value), |normalizer| normalizer.normalize(&entry.value))
}

impl Child {
    /// Returns `key=value`, or the key alone. Masks hidden values.
    pub(crate) fn label(&self) -> String {
        let key = self.key.text();
        match &self.values {
            Values::Any => key.to_owned(),
            Values::Pattern(_) if self.is_hidden => format!("{key}=***"),
            Values::Pattern(value) => format!("{key}={}", value.text()),
            Values::Listed(listed) => format!("{key}={}", listed.shown),
        }
    }

    /// Returns the value or wildcard, if the child has one.
    pub(crate) fn pattern(&self) -> Option<&Pattern> {
        match &self.values {
            Values::Pattern(pattern) => Some(pattern),
            Values::Any | Values::Listed(_) => None,
        }
    }

    /// Returns true if the child's key and value match, ignoring precedence. Does not search lists: returns false for them.
    pub(crate) fn matches(&self, key: &[u8], value: &[u8]) -> bool {
        self.key.matches(key)
            && match &self.values {
                Values::Any => true,
                Values::Pattern(pattern) => pattern.matches(value),
                Values::Listed(_) => false,
            }
    }

    /// Returns the decision for the whole request, if the child's rule makes one.
    pub(crate) fn action(&self) -> Option<Action> {
        self.rule.as_ref().and_then(Rule::action)
    }

    /// Returns true if the child exempts the request, or is `unlimited` and the `last` of the descriptor.
    fn is_free(&self, last: bool) -> bool {
        let is_free = |rule: &Rule| rule.action() == Some(Action::Exempt) || (last && rule.is_unlimited());
        self.rule.as_ref().is_some_and(is_free)
    }

    /// Returns true if this is the child's literal key.
    fn is_of(&self, key: &[u8]) -> bool {
        self.key.text().as_bytes() == key
    }

    /// Returns the value that the child itself has, in bytes.
    fn own_text(&self) -> Option<&[u8]> {
        self.pattern().map(|pattern| pattern.text().as_bytes())
    }

    fn has_file(&self) -> bool {
        matches!(&self.values, Values::Listed(listed) if listed.has_file)
    }

    /// Returns the precedence among items with the same value; the lowest wins.
    fn rank(&self) -> u8 {
        match self.action() {
            Some(Action::Deny) => 0,
            Some(Action::Exempt) => 1,
            None => 2,
        }
    }

    /// Returns a value that the child matches, if one is known.
    fn example(&self) -> Option<String> {
        match &self.values {
            Values::Any => Some("demo".to_owned()),
            Values::Pattern(_) if self.is_hidden => None,
            Values::Pattern(pattern) => Some(pattern.example()),
            Values::Listed(listed) => listed.example.as_deref().map(str::to_owned),
        }
    }
}

impl<'a> Chosen<'a> {
    /// Returns the counter-key part of an entry under this child's rule.
    fn counted(
        self,
        normalizer: Option<&Normalizer>,
        entry: &Entry,
        normalized: &NormalizedValue<'_>,
    ) -> CountedAs<'a> {
        if !self.child.is_shared {
            return own_value(normalizer, entry, normalized, self.bits);
        }
        let (text, shared) = match &self.child.values {
            Values::Any => ("", CountedAs::Pattern("")),
            Values::Pattern(pattern) => (pattern.text(), CountedAs::Pattern(pattern.text())),
            Values::Listed(listed) => (&*listed.counted, CountedAs::List(&listed.counted)),
        };
        // The pattern or list of a sensitive entry may contain sensitive values, so it is digested too.
        let digester = normalizer.and_then(|normalizer| normalizer.digester);
        digester.map_or(shared, |digester| CountedAs::Digest(digester.digest_of_shared(&entry.key, text.as_bytes())))
    }
}

impl<'a> TreeMatch<'a> {
    /// Returns the counter-key parts for a descriptor without a rule: its normalised values.
    pub(crate) fn unruled(self, normalizers: &Normalizers, descriptor: &Descriptor) -> Self {
        let counted = descriptor.entries.iter().map(|entry| {
            let normalizer = normalizers.of(&entry.key).map(AsRef::as_ref);
            own_value(normalizer, entry, &normalized(normalizer, entry), 0)
        });
        Self { rule: None, counted: counted.collect(), is_replaced: false }
    }
}

impl TreeMatch<'_> {
    /// Returns the counter key of `descriptor` under `limit`. `mark` is that of the overlay; empty for the source. `is_shadow`: the limit alone is in
    /// shadow mode.
    pub(crate) fn counter_key(
        &self,
        domain: &str,
        colocation: Colocation,
        mark: &str,
        descriptor: &Descriptor,
        limit: &Limit,
        is_shadow: bool,
    ) -> CounterKey {
        let parts = descriptor.entries.iter().enumerate().map(|(level, Entry { key, value })| {
            self.counted.get(level).unwrap_or(&CountedAs::Own).key_part(key, value)
        });
        let marks = [mark, if is_shadow { SHADOW_MARK } else { "" }];
        CounterKey::marked(domain, parts, colocation, marks, limit.algorithm().name(), limit.quota().window().length())
    }
}
