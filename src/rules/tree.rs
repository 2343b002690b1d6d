//! Finding the rule of a descriptor: level by level, exact before wildcard before key-only, and no way back.

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

/// The most hits that somebody would try by hand: 100.
const MOST_TRIED: u32 = 100;
/// The shortest window in which somebody can try them: 10 s.
const TIME_TO_TRY: Micros = Micros::from_secs(10);

/// One level of the descriptor tree. Looking up an entry costs the same for any number of exact and key-only children.
#[derive(Debug, Default)]
pub(super) struct Node {
    /// In the order of the file.
    pub(super) children: Vec<Child>,
    by_key: HashMap<Box<[u8]>, OfKey>,
    /// Children with a wildcard in the key.
    wild_keys: Wildcards,
    /// Every child with a wildcard, to notice a second one.
    wild: HashMap<(Pattern, Option<Pattern>), u32>,
}

/// One item of a `descriptors` list.
#[derive(Debug)]
pub(super) struct Child {
    pub(super) key: Pattern,
    pub(super) values: Values,
    pub(super) is_shared: bool,
    /// Whether its value is shown nowhere.
    pub(super) is_hidden: bool,
    pub(super) file: u32,
    pub(super) place: Place,
    pub(super) rule: Option<Rule>,
    /// The level below, where there is one.
    pub(super) below: Option<Box<Node>>,
}

/// Which values an item answers for.
#[derive(Debug)]
pub(super) enum Values {
    /// All that nothing else answers for.
    Any,
    /// One, or those that a wildcard matches.
    Pattern(Pattern),
    /// Those of a list.
    Listed(Box<Listed>),
}

/// The list of an item; its members stand in the maps of its level.
#[derive(Debug)]
pub(super) struct Listed {
    /// What stands for the values in a counter that they share.
    pub(super) counted: Box<str>,
    /// What people are shown of it.
    pub(super) shown: Box<str>,
    /// One of its values, where they stand in the rule file itself.
    pub(super) example: Option<Box<str>>,
    /// Whether they stand in a file of their own: another list may have the same.
    pub(super) has_file: bool,
}

/// The children with one literal key.
#[derive(Debug, Default)]
struct OfKey {
    /// How its values are read, if they are not simply bytes.
    reading: Option<Arc<Reading>>,
    any: Option<u32>,
    /// Boxed because files of many different keys have seldom a value for each.
    valued: Option<Box<Valued>>,
}

/// The children with one literal key that have a value.
#[derive(Debug, Default)]
struct Valued {
    exact: HashMap<Box<[u8]>, u32>,
    networks: Option<Box<Networks>>,
    wild: Wildcards,
}

/// What a walk down the tree found.
#[derive(Debug, Default)]
pub(super) struct Found<'a> {
    pub(super) rule: Option<&'a Rule>,
    /// By level: what stands in the place of the value in the counter key. Empty where every level counts the value as it was sent.
    counted: SmallVec<[Counted<'a>; 1]>,
}

/// What an entry is counted by.
#[derive(Clone, Debug, Default)]
enum Counted<'a> {
    /// Its value.
    #[default]
    Own,
    /// The first bytes of its value.
    First(usize),
    /// Another spelling of its value.
    Text(SmallVec<[u8; 48]>),
    /// The network of its address.
    Network(SmallVec<[u8; 48]>),
    /// The digest of its value.
    Digest(String),
    /// The wildcard that its value matches.
    Pattern(&'a str),
    /// The list that its value is in.
    List(&'a str),
}

/// The child that answers for an entry.
#[derive(Clone, Copy, Debug)]
struct Chosen<'a> {
    child: &'a Child,
    /// How many bits of an address it was chosen by: all of them where the value is exactly that of the child.
    bits: u8,
}

impl Node {
    /// Adds an item below all earlier ones, unless one with the same key and value stands there: then its index.
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
                    // Where addresses are read, one that stands alone is found as one.
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

    /// Lets the child that was added last answer for one more value, unless another does: then its index. Of two items one of which
    /// has its values in a file, the one that refuses goes before the one that exempts, and that before all others.
    pub(super) fn add_member(&mut self, member: Member) -> Result<(), usize> {
        let Self { children, by_key, .. } = self;
        let Some((child, earlier)) = children.split_last() else { return Ok(()) };
        put(by_key, earlier, child, member).map_or(Ok(()), Err)
    }

    fn of_key(&mut self, key: &Pattern) -> &mut OfKey {
        self.by_key.entry(key.text().as_bytes().into()).or_default()
    }

    /// The child that answers for an entry, and what the entry is counted by then.
    fn answer(&self, readings: &Readings, entry: &Entry) -> Option<(&Child, Counted<'_>)> {
        let of_key = self.by_key.get(entry.key.as_ref());
        let reading = match of_key {
            Some(of_key) => of_key.reading.as_deref(),
            // Only an item with a wildcard in its key may answer.
            None => readings.of(&entry.key).map(AsRef::as_ref),
        };
        let read = read(reading, entry);
        let chosen = self.choose(of_key, &entry.key, &read)?;
        Some((chosen.child, chosen.counted(reading, entry, &read)))
    }

    /// The child that answers for an entry.
    pub(super) fn child(&self, readings: &Readings, entry: &Entry) -> Option<&Child> {
        self.answer(readings, entry).map(|(child, _)| child)
    }

    fn choose<'a>(&'a self, of_key: Option<&'a OfKey>, key: &[u8], read: &Read<'_>) -> Option<Chosen<'a>> {
        let chosen = |index: u32, bits: u8| self.children.get(place(index)).map(|child| Chosen { child, bits });
        let valued = of_key.and_then(|of_key| of_key.valued.as_deref());
        if let Some(valued) = valued {
            // No text in the map is an address where addresses are read.
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

    /// The rule at the end of a descriptor's entries, if the tree is exactly that deep there; on the way there, the rule that decides
    /// the whole request.
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

    /// The entries that lead to the smallest enforced limit above zero, with what stands for any value in them, as far as
    /// no other rule answers for them.
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

    /// Whether any rule of the tree can refuse a request.
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

/// Lets `child`, which comes behind `earlier`, answer for one more value: the index of the one that does already and goes on to.
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

/// The value of an entry, as it is read.
pub(super) fn read<'e>(reading: Option<&Reading>, entry: &'e Entry) -> Read<'e> {
    reading.map_or_else(|| Read::plain(&entry.value), |reading| reading.read(&entry.value))
}

impl Child {
    /// Its value or wildcard, where it has one.
    pub(super) fn pattern(&self) -> Option<&Pattern> {
        match &self.values {
            Values::Pattern(pattern) => Some(pattern),
            Values::Any | Values::Listed(_) => None,
        }
    }

    /// Whether the entry is one this child answers for, leaving aside that another may come first; of a list nothing is known here.
    pub(super) fn matches(&self, key: &[u8], value: &[u8]) -> bool {
        self.key.matches(key)
            && match &self.values {
                Values::Any => true,
                Values::Pattern(pattern) => pattern.matches(value),
                Values::Listed(_) => false,
            }
    }

    /// What it decides of the whole request, if it does.
    pub(super) fn decides(&self) -> Option<Decides> {
        self.rule.as_ref().and_then(Rule::decides)
    }

    fn has_file(&self) -> bool {
        matches!(&self.values, Values::Listed(listed) if listed.has_file)
    }

    /// Which of two items answers for a value of both: the lower.
    fn rank(&self) -> u8 {
        match self.decides() {
            Some(Decides::Deny) => 0,
            Some(Decides::Exempt) => 1,
            None => 2,
        }
    }

    /// A value that it answers for, if one is known.
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
    /// What an entry is counted by, by the rule of this child.
    fn counted(self, reading: Option<&Reading>, entry: &Entry, read: &Read<'_>) -> Counted<'a> {
        if !self.child.is_shared {
            return counted_as_read(reading, entry, read, self.bits);
        }
        let (text, shared) = match &self.child.values {
            Values::Any => ("", Counted::Pattern("")),
            Values::Pattern(pattern) => (pattern.text(), Counted::Pattern(pattern.text())),
            Values::Listed(listed) => (&*listed.counted, Counted::List(&listed.counted)),
        };
        // What stands in a rule for a value that is shown nowhere is shown nowhere either.
        let sensitive = reading.and_then(|reading| reading.sensitive);
        sensitive.map_or(shared, |sensitive| Counted::Digest(sensitive.digest_of_shared(&entry.key, text.as_bytes())))
    }
}

/// What an entry is counted by that is counted by its own value, chosen by so many bits of an address.
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
    /// For a descriptor that no rule answers for: its entries as they are read.
    pub(super) fn unruled(self, readings: &Readings, descriptor: &Descriptor) -> Self {
        let counted = descriptor.entries.iter().map(|entry| {
            let reading = readings.of(&entry.key).map(AsRef::as_ref);
            counted_as_read(reading, entry, &read(reading, entry), 0)
        });
        Self { rule: None, counted: counted.collect() }
    }
}

impl Found<'_> {
    /// The counter of a descriptor under one of its limits.
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
