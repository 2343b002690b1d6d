//! Finding the rule of a descriptor: level by level, exact before wildcard before key-only, and no way back.

use foldhash::HashMap;
use smallvec::SmallVec;

use super::Rule;
use super::problem::Place;
use crate::algorithm::Limit;
use crate::model::key::KeyPart;
use crate::model::{Colocation, CounterKey, Descriptor, Entry, Micros, Role};

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
    wild: HashMap<(Pattern, Option<Pattern>), usize>,
}

/// One item of a `descriptors` list.
#[derive(Debug)]
pub(super) struct Child {
    pub(super) key: Pattern,
    /// `None` for any value.
    pub(super) value: Option<Pattern>,
    pub(super) is_shared: bool,
    pub(super) file: u32,
    pub(super) place: Place,
    pub(super) rule: Option<Rule>,
    /// The level below, where there is one.
    pub(super) below: Option<Box<Node>>,
}

/// The children with one literal key.
#[derive(Debug, Default)]
struct OfKey {
    any: Option<usize>,
    /// Boxed because files of many different keys have seldom a value for each.
    valued: Option<Box<Valued>>,
}

/// The children with one literal key that have a value.
#[derive(Debug, Default)]
struct Valued {
    exact: HashMap<Box<[u8]>, usize>,
    wild: Wildcards,
}

/// Children with a wildcard, found by what stands before their first asterisk.
#[derive(Debug, Default)]
struct Wildcards {
    by_prefix: HashMap<Box<[u8]>, Vec<usize>>,
    /// The different lengths of those prefixes.
    lengths: Vec<usize>,
}

/// A text in which `*` stands for any bytes, none included.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Pattern {
    text: String,
}

/// What a walk down the tree found.
#[derive(Debug, Default)]
pub(super) struct Found<'a> {
    pub(super) rule: Option<&'a Rule>,
    /// By level: the pattern that takes the place of the value in the counter key. Empty where no level shares.
    shared: Vec<Option<&'a str>>,
}

impl Node {
    /// Adds an item below all earlier ones, unless one with the same key and value stands there: then its index.
    pub(super) fn add(&mut self, child: Child) -> Result<(), usize> {
        let index = self.children.len();
        let is_wild = !child.key.is_literal() || child.value.as_ref().is_some_and(|value| !value.is_literal());
        if is_wild {
            let earlier = *self.wild.entry((child.key.clone(), child.value.clone())).or_insert(index);
            if earlier != index {
                return Err(earlier);
            }
            if child.key.is_literal() {
                let prefix = child.value.as_ref().map_or(&[][..], Pattern::prefix);
                self.of_key(&child.key).valued.get_or_insert_default().wild.add(prefix, index);
            } else {
                self.wild_keys.add(child.key.prefix(), index);
            }
        } else {
            let of_key = self.of_key(&child.key);
            let earlier = match &child.value {
                None => *of_key.any.get_or_insert(index),
                Some(value) => {
                    let exact = &mut of_key.valued.get_or_insert_default().exact;
                    *exact.entry(value.text.as_bytes().into()).or_insert(index)
                }
            };
            if earlier != index {
                return Err(earlier);
            }
        }
        self.children.push(child);
        Ok(())
    }

    fn of_key(&mut self, key: &Pattern) -> &mut OfKey {
        self.by_key.entry(key.text.as_bytes().into()).or_default()
    }

    /// The child that answers for an entry.
    pub(super) fn child(&self, entry: &Entry) -> Option<&Child> {
        let of_key = self.by_key.get(entry.key.as_ref());
        let valued = of_key.and_then(|of_key| of_key.valued.as_deref());
        if let Some(&exact) = valued.and_then(|valued| valued.exact.get(entry.value.as_ref())) {
            return self.children.get(exact);
        }
        let mut candidates = SmallVec::<[usize; 8]>::new();
        if let Some(valued) = valued {
            valued.wild.candidates(&entry.value, &mut candidates);
        }
        self.wild_keys.candidates(&entry.key, &mut candidates);
        candidates.sort_unstable();
        let wild = candidates.into_iter().filter_map(|at| self.children.get(at)).find(|child| child.matches(entry));
        wild.or_else(|| of_key?.any.and_then(|any| self.children.get(any)))
    }

    /// The rule at the end of a descriptor's entries, if the tree is exactly that deep there.
    pub(super) fn find<'a>(&'a self, descriptor: &Descriptor) -> Found<'a> {
        let mut shared = Vec::new();
        let mut node = Some(self);
        let mut last = None;
        for (level, entry) in descriptor.entries.iter().enumerate() {
            let Some(child) = node.and_then(|node| node.child(entry)) else { return Found::default() };
            if child.is_shared {
                shared.resize(level, None);
                shared.push(Some(child.value.as_ref().map_or("", |value| value.text.as_str())));
            }
            node = child.below.as_deref();
            last = Some(child);
        }
        match last.and_then(|child| child.rule.as_ref()) {
            Some(rule) => Found { rule: Some(rule), shared },
            None => Found::default(),
        }
    }

    /// The entries that lead to the smallest enforced limit above zero, with what stands for any value in them, as far as
    /// no other rule answers for them.
    pub(super) fn smallest_limit(
        &self,
        root: &Self,
        entries: &mut Vec<(String, String)>,
        best: &mut Option<(u32, Vec<(String, String)>)>,
    ) {
        for child in &self.children {
            entries.push((child.key.example(), child.value.as_ref().map_or("demo".to_owned(), Pattern::example)));
            if let Some(rule) = child.rule.as_ref().filter(|rule| rule.role() == Role::Enforce)
                && let Some(limit) = rule.limits().iter().map(|limit| limit.limit.capacity()).min()
                && (1..=MOST_TRIED).contains(&limit)
                && rule.limits().iter().all(|limit| limit.limit.quota().window().length() >= TIME_TO_TRY)
                && best.as_ref().is_none_or(|(least, _)| limit < *least)
                && root.find(&described(entries)).rule.is_some_and(|found| found.id() == rule.id())
            {
                *best = Some((limit, entries.clone()));
            }
            if let Some(below) = &child.below {
                below.smallest_limit(root, entries, best);
            }
            entries.pop();
        }
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

impl Child {
    /// Whether the entry is one this child answers for, leaving aside that another may come first.
    pub(super) fn matches(&self, entry: &Entry) -> bool {
        self.key.matches(&entry.key) && self.value.as_ref().is_none_or(|value| value.matches(&entry.value))
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
        let parts = descriptor.entries.iter().enumerate().map(|(level, entry)| {
            match self.shared.get(level).copied().flatten() {
                Some(pattern) => KeyPart::Shared { key: &entry.key, pattern: pattern.as_bytes() },
                None => KeyPart::Own { key: &entry.key, value: &entry.value },
            }
        });
        CounterKey::new(domain, parts, colocation, limit.algorithm().name(), limit.quota().window().length())
    }
}

impl Wildcards {
    fn add(&mut self, prefix: &[u8], index: usize) {
        if !self.lengths.contains(&prefix.len()) {
            self.lengths.push(prefix.len());
        }
        self.by_prefix.entry(prefix.into()).or_default().push(index);
    }

    fn candidates(&self, text: &[u8], into: &mut SmallVec<[usize; 8]>) {
        for &length in &self.lengths {
            if let Some(indexes) = text.get(..length).and_then(|prefix| self.by_prefix.get(prefix)) {
                into.extend_from_slice(indexes);
            }
        }
    }
}

impl Pattern {
    pub(super) fn new(text: String) -> Self {
        Self { text }
    }

    pub(super) fn text(&self) -> &str {
        &self.text
    }

    /// A text that it matches.
    fn example(&self) -> String {
        let shortest = self.text.replace('*', "");
        if shortest.is_empty() { "demo".to_owned() } else { shortest }
    }

    pub(super) fn is_literal(&self) -> bool {
        !self.text.contains('*')
    }

    fn prefix(&self) -> &[u8] {
        self.text.split('*').next().unwrap_or("").as_bytes()
    }

    /// Whether `bytes` starts with the first piece, ends with the last and has the others between them, in order and
    /// apart. Each piece is taken at its first place, which leaves the most room for the rest.
    pub(super) fn matches(&self, bytes: &[u8]) -> bool {
        let Some((first, rest)) = self.text.split_once('*') else { return self.text.as_bytes() == bytes };
        let Some(bytes) = bytes.strip_prefix(first.as_bytes()) else { return false };
        let (middle, last) = rest.rsplit_once('*').unwrap_or(("", rest));
        let Some(mut bytes) = bytes.strip_suffix(last.as_bytes()) else { return false };
        for piece in middle.split('*') {
            match memchr::memmem::find(bytes, piece.as_bytes()) {
                Some(at) => bytes = &bytes[at + piece.len()..],
                None => return false,
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::Pattern;

    #[test]
    fn pieces_match_in_order_and_apart() {
        let matches = |pattern: &str, text: &str| Pattern::new(pattern.to_owned()).matches(text.as_bytes());
        assert!(matches("*", ""));
        assert!(matches("ab*ba", "abba"));
        assert!(!matches("ab*ba", "aba"));
        assert!(!matches("ab*ba", "abXYbaZ"));
        assert!(matches("/v*/users/*/edit", "/v/users//edit"));
        assert!(!matches("/v*/users/*/edit", "/v1/users/edit"));
        assert!(matches("*.example.org", ".example.org"));
        assert!(!matches("*a*a*", "a"));
        assert!(matches("**", "x"));
    }
}
