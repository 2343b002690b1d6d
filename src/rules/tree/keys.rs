//! Index of the children of a level by their literal keys.

use std::hash::BuildHasher;
use std::sync::Arc;

use hashbrown::HashTable;

use super::texts::Texts;
use super::wildcards::Wildcards;
use super::{Child, place};
use crate::normalize::Normalizer;
use crate::rules::list::Networks;

/// Index of the children of a level by their literal keys.
#[derive(Debug, Default)]
pub(super) struct Keys {
    table: HashTable<KeyChildren>,
    hasher: foldhash::fast::RandomState,
}

/// The children with one literal key.
#[derive(Debug, Default)]
pub(super) struct KeyChildren {
    /// One child with the key, which a lookup mostly reads anyway, so the key has no copy here. The child without a value, if there
    /// is one.
    child: u32,
    is_any: bool,
    /// Boxed, because in files with many different keys few keys have more than a child without a value.
    more: Option<Box<MoreChildren>>,
}

/// Properties that few keys have.
#[derive(Debug, Default)]
pub(super) struct MoreChildren {
    /// Normalisation of the values; `None` for plain bytes.
    pub(super) normalizer: Option<Arc<Normalizer>>,
    pub(super) exact: Texts,
    pub(super) networks: Option<Box<Networks>>,
    pub(super) wild: Wildcards,
}

impl Keys {
    /// Returns the children with this key.
    pub(super) fn get(&self, children: &[Child], key: &[u8]) -> Option<&KeyChildren> {
        let is_same = |found: &KeyChildren| children.get(place(found.child)).is_some_and(|child| child.is_of(key));
        self.table.find(self.hasher.hash_one(key), is_same)
    }

    /// Returns the children with the key of `child`, which follows `children`.
    pub(super) fn of(&mut self, children: &[Child], child: &Child) -> &mut KeyChildren {
        let Self { table, hasher } = self;
        let key = |found: &KeyChildren| children.get(place(found.child)).unwrap_or(child).key.text().as_bytes();
        let own = child.key.text().as_bytes();
        let new = KeyChildren { child: u32::try_from(children.len()).unwrap_or(u32::MAX), ..KeyChildren::default() };
        let hash = hasher.hash_one(own);
        let entry = table.entry(hash, |found| key(found) == own, |found| hasher.hash_one(key(found)));
        entry.or_insert(new).into_mut()
    }
}

impl KeyChildren {
    /// Returns the index of the child without a value.
    pub(super) fn any(&self) -> Option<u32> {
        self.is_any.then_some(self.child)
    }

    /// Makes the child with this index the one without a value, if there is none. Returns the index of the one there is.
    pub(super) fn any_or(&mut self, index: u32) -> u32 {
        if !self.is_any {
            (self.child, self.is_any) = (index, true);
        }
        self.child
    }

    /// Returns the children with a value or list, and the normalisation.
    pub(super) fn more(&self) -> Option<&MoreChildren> {
        self.more.as_deref()
    }

    /// Returns the same to change it.
    pub(super) fn more_mut(&mut self) -> &mut MoreChildren {
        self.more.get_or_insert_default()
    }
}
