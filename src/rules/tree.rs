//! The descriptor tree and its lookup: level by level, exact before wildcard before key-only, without backtracking.

use std::borrow::Cow;
use std::sync::Arc;

use foldhash::HashMap;
use smallvec::SmallVec;

use super::list::{Member, Networks};
use super::problem::Place;
use super::reading::{Read, Reading, Readings, parse_address};
use super::{Decides, Rule};
use crate::algorithm::Limit;
use crate::model::key::{CountedBy, KeyPart};
use crate::model::{Colocation, CounterKey, Descriptor, Entry, Micros, Role};

mod pattern;

pub(super) use pattern::Pattern;
use pattern::Wildcards;

/// Maximum limit that a person would try by hand: 100 hits.
const MOST_TRIED: u32 = 100;
/// Minimum window in which a person can try them: 10 s.
const TIME_TO_TRY: Micros = Micros::from_secs(10);

/// One level of the descriptor tree. The lookup cost does not depend on the number of exact and key-only children.
#[derive(Debug, Default)]
pub(super) struct Node {
    /// Children in file order.
    pub(super) children: Vec<Child>,
    by_key: HashMap<Box<[u8]>, OfKey>,
    /// Children with a wildcard in the key.
    wild_keys: Wildcards,
    /// Children with a wildcard in key or value, to find duplicates.
    wild: HashMap<(Pattern, Option<Pattern>), u32>,
}

/// One item of a `descriptors` list.
#[derive(Debug)]
pub(super) struct Child {
    pub(super) key: Pattern,
    pub(super) values: Values,
    pub(super) is_shared: bool,
    /// True if values of the entry are sensitive.
    pub(super) is_hidden: bool,
    pub(super) file: u32,
    pub(super) place: Place,
    pub(super) rule: Option<Rule>,
    /// Next level, if any.
    pub(super) below: Option<Box<Node>>,
}

/// Values that an item matches.
#[derive(Debug)]
pub(super) enum Values {
    /// Any value that no other item matches.
    Any,
    /// One value, or the values of a wildcard.
    Pattern(Pattern),
    /// The values of a list.
    Listed(Box<Listed>),
}

/// The list of an item. Its values are in the maps of the level.
#[derive(Debug)]
pub(super) struct Listed {
    /// Text for the list in the key of a shared counter.
    pub(super) counted: Box<str>,
    /// Text for the list in messages and names.
    pub(super) shown: Box<str>,
    /// One value of the list, if the rule file itself contains one and it is not sensitive.
    pub(super) example: Option<Box<str>>,
    /// True if the list has a `values_file`. Other lists may then contain the same values.
    pub(super) has_file: bool,
}

/// The children with one literal key.
#[derive(Debug, Default)]
struct OfKey {
    /// Normalisation of the values; `None` for plain bytes.
    reading: Option<Arc<Reading>>,
    any: Option<u32>,
    /// Boxed, because in files with many different keys few keys have children with values.
    valued: Option<Box<Valued>>,
}

/// The children with one literal key and a value or list.
#[derive(Debug, Default)]
struct Valued {
    exact: HashMap<Box<[u8]>, u32>,
    networks: Option<Box<Networks>>,
    wild: Wildcards,
}

/// Result of a lookup in the tree.
#[derive(Debug, Default)]
pub(super) struct Found<'a> {
    pub(super) rule: Option<&'a Rule>,
    /// Counter-key parts that replace values, by level. Empty if every level uses the value as sent.
    counted: SmallVec<[Counted<'a>; 1]>,
}

/// Counter-key part of an entry.
#[derive(Clone, Debug, Default)]
enum Counted<'a> {
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

/// The child that matches an entry.
#[derive(Clone, Copy, Debug)]
struct Chosen<'a> {
    child: &'a Child,
    /// Length of the matched network prefix, in bits; `u8::MAX` for an exact text, 0 for wildcards and key-only children.
    bits: u8,
}

impl Node {
    /// Adds an item after all earlier ones. Returns the index of an earlier item with the same key and value as the error.
    pub(super) fn add(&mut self, child: Child, reading: Option<&Arc<Reading>>) -> Result<(), usize> {
        let index = u32::try_from(self.children.len()).unwrap_or(u32::MAX);
        let pattern = child.pattern();
        if child.key.is_literal() {
            self.of_key(&child.key).reading = reading.map(Arc::clone);
        }
        let is_wild = !child.key.is_literal() || pattern.is_some_and(|value| !value.is_literal());
        let earlier = if is_wild {
            let earlier = *self.wild.entry((child.key.clone(), pattern.cloned())).or_insert(index);
            if earlier == index {
                if child.key.is_literal() {
                    let prefix = pattern.map_or(&[][..], Pattern::prefix);
                    self.of_key(&child.key).valued.get_or_insert_default().wild.add(prefix, index);
                } else {
                    self.wild_keys.add(child.key.prefix(), index);
                }
            }
            earlier
        } else {
            match &child.values {
                Values::Listed(_) => index,
                Values::Any => *self.of_key(&child.key).any.get_or_insert(index),
                Values::Pattern(value) => {
                    let text = value.text().as_bytes();
                    // If values are addresses, a single address is also stored as a network.
                    let reading = reading.map(AsRef::as_ref).filter(|reading| reading.is_of_addresses());
                    let member = reading.and_then(|_| Member::parse(text, reading).ok());
                    let member = member.unwrap_or_else(|| Member::Text(text.into()));
                    let earlier = put(&mut self.by_key, &self.children, &child, member);
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

    /// Registers `member` as a value of the last added child. Returns the index of an earlier child with that value as the error.
    /// If one of the two has a `values_file`, a duplicate is no error: `deny` wins over `exempt`, and both over other items.
    pub(super) fn add_member(&mut self, member: Member) -> Result<(), usize> {
        let Self { children, by_key, .. } = self;
        let Some((child, earlier)) = children.split_last() else { return Ok(()) };
        put(by_key, earlier, child, member).map_or(Ok(()), Err)
    }

    fn of_key(&mut self, key: &Pattern) -> &mut OfKey {
        self.by_key.entry(key.text().as_bytes().into()).or_default()
    }

    /// Returns the child that matches `entry`, and the counter-key part of the entry.
    fn answer(&self, readings: &Readings, entry: &Entry) -> Option<(&Child, Counted<'_>)> {
        let of_key = self.by_key.get(entry.key.as_ref());
        let reading = match of_key {
            Some(of_key) => of_key.reading.as_deref(),
            // Only items with a wildcard in the key can match.
            None => readings.of(&entry.key).map(AsRef::as_ref),
        };
        let read = read(reading, entry);
        let chosen = self.choose(of_key, &entry.key, &read)?;
        Some((chosen.child, chosen.counted(reading, entry, &read)))
    }

    /// Returns the child that matches `entry`.
    pub(super) fn child(&self, readings: &Readings, entry: &Entry) -> Option<&Child> {
        self.answer(readings, entry).map(|(child, _)| child)
    }

    fn choose<'a>(&'a self, of_key: Option<&'a OfKey>, key: &[u8], read: &Read<'_>) -> Option<Chosen<'a>> {
        let chosen = |index: u32, bits: u8| self.children.get(place(index)).map(|child| Chosen { child, bits });
        let valued = of_key.and_then(|of_key| of_key.valued.as_deref());
        if let Some(valued) = valued {
            // If values are addresses, the map of texts contains none.
            if read.address.is_none()
                && let Some(&exact) = valued.exact.get(&*read.text())
            {
                return chosen(exact, u8::MAX);
            }
            if let Some(networks) = valued.networks.as_deref()
                && let Some(address) = read.address.or_else(|| parse_address(&read.text()))
                && let Some((index, bits)) = networks.find(address)
            {
                return chosen(index, bits);
            }
        }
        if !self.wild.is_empty() {
            let text = read.text();
            let mut candidates = SmallVec::<[u32; 8]>::new();
            if let Some(valued) = valued {
                valued.wild.candidates(&text, &mut candidates);
            }
            self.wild_keys.candidates(key, &mut candidates);
            candidates.sort_unstable();
            let is_matched = |chosen: &Chosen<'_>| chosen.child.matches(key, &text);
            let wild = candidates.into_iter().filter_map(|index| chosen(index, 0)).find(is_matched);
            if wild.is_some() {
                return wild;
            }
        }
        of_key?.any.and_then(|any| chosen(any, 0))
    }

    /// Returns the rule at the end of the descriptor's entries if the tree has exactly that depth there. A rule on the way that
    /// decides the whole request wins.
    pub(super) fn find<'a>(&'a self, readings: &Readings, descriptor: &Descriptor) -> Found<'a> {
        let mut counted = SmallVec::new();
        let mut node = Some(self);
        let mut last = None;
        for (level, entry) in descriptor.entries.iter().enumerate() {
            let Some((child, by)) = node.and_then(|node| node.answer(readings, entry)) else { return Found::default() };
            if !matches!(by, Counted::Own) {
                counted.resize(level, Counted::Own);
                counted.push(by);
            }
            node = child.below.as_deref();
            last = Some(child);
            if child.decides().is_some() {
                break;
            }
        }
        match last.and_then(|child| child.rule.as_ref()) {
            Some(rule) => Found { rule: Some(rule), counted },
            None => Found::default(),
        }
    }

    /// Searches for the entries of the smallest enforced limit above zero and stores them in `best`. Fills in example values for
    /// wildcards, and skips entries that another rule matches.
    pub(super) fn smallest_limit(
        &self,
        root: &Self,
        readings: &Readings,
        entries: &mut Vec<(String, String)>,
        best: &mut Option<(u32, Vec<(String, String)>)>,
    ) {
        for child in &self.children {
            let Some(value) = child.example() else { continue };
            entries.push((child.key.example(), value));
            if let Some(rule) = child.rule.as_ref().filter(|rule| rule.role() == Role::Enforce)
                && let Some(limit) = rule.limits().iter().map(|limit| limit.limit.capacity()).min()
                && (1..=MOST_TRIED).contains(&limit)
                && rule.request_cost().get() == 1
                && rule.limits().iter().all(|limit| limit.cost.get() == 1 && limit.limit.delay().is_none())
                && rule.limits().iter().all(|limit| limit.limit.quota().window().length() >= TIME_TO_TRY)
                && best.as_ref().is_none_or(|(least, _)| limit < *least)
                && root.find(readings, &described(entries)).rule.is_some_and(|found| found.id() == rule.id())
            {
                *best = Some((limit, entries.clone()));
            }
            if let Some(below) = &child.below {
                below.smallest_limit(root, readings, entries, best);
            }
            entries.pop();
        }
    }

    /// Returns true if any rule of the tree can refuse a request.
    pub(super) fn is_enforcing(&self) -> bool {
        self.children.iter().any(|child| {
            child.rule.as_ref().is_some_and(Rule::is_enforcing)
                || child.below.as_ref().is_some_and(|below| below.is_enforcing())
        })
    }

    pub(super) fn collect_rules<'a>(&'a self, rules: &mut Vec<&'a Rule>) {
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

/// Registers `member` for `child`, which follows `earlier`. Returns the index of an earlier child with that value, unless one
/// of the two has a `values_file`: then the lower rank keeps the value.
fn put(by_key: &mut HashMap<Box<[u8]>, OfKey>, earlier: &[Child], child: &Child, member: Member) -> Option<usize> {
    let index = u32::try_from(earlier.len()).unwrap_or(u32::MAX);
    let valued = by_key.get_mut(child.key.text().as_bytes())?.valued.get_or_insert_default();
    let found = match member {
        Member::Network(network) => valued.networks.get_or_insert_default().entry(network, index),
        Member::Text(text) => valued.exact.entry(text).or_insert(index),
    };
    if *found == index {
        return None;
    }
    let known = place(*found);
    let other = earlier.get(known)?;
    if !child.has_file() && !other.has_file() {
        return Some(known);
    }
    if child.rank() < other.rank() {
        *found = index;
    }
    None
}

fn place(index: u32) -> usize {
    usize::try_from(index).unwrap_or(usize::MAX)
}

/// Returns the normalised value of `entry`.
pub(super) fn read<'e>(reading: Option<&Reading>, entry: &'e Entry) -> Read<'e> {
    reading.map_or_else(|| Read::plain(&entry.value), |reading| reading.read(&entry.value))
}

impl Child {
    /// Returns the value or wildcard, if the child has one.
    pub(super) fn pattern(&self) -> Option<&Pattern> {
        match &self.values {
            Values::Pattern(pattern) => Some(pattern),
            Values::Any | Values::Listed(_) => None,
        }
    }

    /// Returns true if the child's key and value match, ignoring precedence. Does not search lists: returns false for them.
    pub(super) fn matches(&self, key: &[u8], value: &[u8]) -> bool {
        self.key.matches(key)
            && match &self.values {
                Values::Any => true,
                Values::Pattern(pattern) => pattern.matches(value),
                Values::Listed(_) => false,
            }
    }

    /// Returns the decision for the whole request, if the child's rule makes one.
    pub(super) fn decides(&self) -> Option<Decides> {
        self.rule.as_ref().and_then(Rule::decides)
    }

    fn has_file(&self) -> bool {
        matches!(&self.values, Values::Listed(listed) if listed.has_file)
    }

    /// Returns the precedence among items with the same value; the lowest wins.
    fn rank(&self) -> u8 {
        match self.decides() {
            Some(Decides::Deny) => 0,
            Some(Decides::Exempt) => 1,
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
    fn counted(self, reading: Option<&Reading>, entry: &Entry, read: &Read<'_>) -> Counted<'a> {
        if !self.child.is_shared {
            return counted_as_read(reading, entry, read, self.bits);
        }
        let (text, shared) = match &self.child.values {
            Values::Any => ("", Counted::Pattern("")),
            Values::Pattern(pattern) => (pattern.text(), Counted::Pattern(pattern.text())),
            Values::Listed(listed) => (&*listed.counted, Counted::List(&listed.counted)),
        };
        // The pattern or list of a sensitive entry may contain sensitive values, so it is digested too.
        let sensitive = reading.and_then(|reading| reading.sensitive);
        sensitive.map_or(shared, |sensitive| Counted::Digest(sensitive.digest_of_shared(&entry.key, text.as_bytes())))
    }
}

/// Returns the counter-key part for an entry's own value. `bits` is the matched prefix length.
fn counted_as_read<'a>(reading: Option<&Reading>, entry: &Entry, read: &Read<'_>, bits: u8) -> Counted<'a> {
    let Some(reading) = reading else { return Counted::Own };
    let network = read.address.and_then(|address| reading.network(address, bits));
    if let Some(sensitive) = reading.sensitive {
        let value = network.as_deref().map_or_else(|| read.text(), Cow::Borrowed);
        return Counted::Digest(sensitive.digest(&entry.key, &value));
    }
    match (network, read.first_of()) {
        (Some(network), _) => Counted::Network(network),
        (None, Some(all)) if all == entry.value.len() => Counted::Own,
        (None, Some(first)) => Counted::First(first),
        (None, None) => Counted::Text(read.text().as_ref().into()),
    }
}

impl<'a> Found<'a> {
    /// Returns the counter-key parts for a descriptor without a rule: its normalised values.
    pub(super) fn unruled(self, readings: &Readings, descriptor: &Descriptor) -> Self {
        let counted = descriptor.entries.iter().map(|entry| {
            let reading = readings.of(&entry.key).map(AsRef::as_ref);
            counted_as_read(reading, entry, &read(reading, entry), 0)
        });
        Self { rule: None, counted: counted.collect() }
    }
}

impl Found<'_> {
    /// Returns the counter key of `descriptor` under `limit`.
    pub(super) fn counter_key(
        &self,
        domain: &str,
        colocation: Colocation,
        descriptor: &Descriptor,
        limit: &Limit,
    ) -> CounterKey {
        let parts = descriptor.entries.iter().enumerate().map(|(level, Entry { key, value })| {
            let (by, text) = match self.counted.get(level).unwrap_or(&Counted::Own) {
                Counted::Own => (CountedBy::Value, &value[..]),
                Counted::First(bytes) => (CountedBy::Value, value.get(..*bytes).unwrap_or(value)),
                Counted::Text(text) => (CountedBy::Value, &text[..]),
                Counted::Network(network) => (CountedBy::Network, &network[..]),
                Counted::Digest(digest) => (CountedBy::Digest, digest.as_bytes()),
                Counted::Pattern(pattern) => (CountedBy::Pattern, pattern.as_bytes()),
                Counted::List(list) => (CountedBy::List, list.as_bytes()),
            };
            KeyPart { key, by, text }
        });
        CounterKey::new(domain, parts, colocation, limit.algorithm().name(), limit.quota().window().length())
    }
}
