//! Places of a level that no request can reach, for warnings.

use smallvec::SmallVec;

use super::keys::KeyChildren;
use super::{Child, TreeLevel, Values, place};
use crate::model::Entry;
use crate::normalize::Normalizers;

/// Text that a wildcard matches only if it matches every text.
const ANY: &str = "*";

impl TreeLevel {
    /// Returns the child that comes first for every entry that the child with this index could match. Such a child never matches. A `*` in
    /// the text of a wildcard is an ordinary character for another wildcard, which then matches every text of the first.
    pub(crate) fn hiding(&self, index: usize) -> Option<&Child> {
        let child = self.children.get(index)?;
        let value = child.pattern().map_or(ANY, |pattern| pattern.text());
        let is_key_only = child.key.is_literal() && matches!(child.values, Values::Any);
        let is_wild = !child.key.is_literal() || child.pattern().is_some_and(|pattern| !pattern.is_literal());
        if !is_key_only && !is_wild {
            return None;
        }
        let key = child.key.text().as_bytes();
        let mut candidates = SmallVec::<[u32; 8]>::new();
        if let Some(more) = self.by_key.get(&self.children, key).and_then(KeyChildren::more) {
            more.wild.candidates(value.as_bytes(), &mut candidates);
        }
        self.wild_keys.candidates(key, &mut candidates);
        candidates.sort_unstable();
        // Every wildcard comes before an item with the key alone, wherever it is written.
        let is_before = |candidate: &u32| is_key_only || place(*candidate) < index;
        let earlier =
            candidates.into_iter().filter(is_before).filter_map(|candidate| self.children.get(place(candidate)));
        earlier.into_iter().find(|earlier| earlier.matches(key, value.as_bytes()))
    }

    /// Returns true if a descriptor with these keys can match a rule. An entry without a value can have any.
    pub(crate) fn can_match(&self, normalizers: &Normalizers, entries: &[(&str, Option<&str>)]) -> bool {
        let Some(((key, value), rest)) = entries.split_first() else { return true };
        let goes_on = |child: &Child| {
            child.action().is_some()
                || if rest.is_empty() {
                    child.rule.is_some()
                } else {
                    child.below.as_ref().is_some_and(|below| below.can_match(normalizers, rest))
                }
        };
        match value {
            Some(value) => {
                self.child(normalizers, &Entry::new((*key).to_owned(), (*value).to_owned())).is_some_and(goes_on)
            }
            None => self.children.iter().filter(|child| child.key.matches(key.as_bytes())).any(goes_on),
        }
    }

    /// Returns the child that matches the entries of `child` of another tree; `None` if there is none or no entry is known.
    pub(crate) fn like(&self, normalizers: &Normalizers, child: &Child) -> Option<&Child> {
        let key = child.key.example();
        if matches!(child.values, Values::Any) {
            let any = self.by_key.get(&self.children, key.as_bytes()).and_then(KeyChildren::any);
            let is_any = |child: &&Child| child.matches(key.as_bytes(), ANY.as_bytes());
            return any.and_then(|any| self.children.get(place(any))).or_else(|| self.children.iter().find(is_any));
        }
        self.child(normalizers, &Entry::new(key, child.example()?))
    }

    /// Returns true if the level or one below it has a rule.
    pub(crate) fn has_rule(&self) -> bool {
        self.children
            .iter()
            .any(|child| child.rule.is_some() || child.below.as_ref().is_some_and(|below| below.has_rule()))
    }
}
