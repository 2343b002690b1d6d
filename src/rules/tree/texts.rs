//! Index of the children of a level by a value.

use std::hash::BuildHasher;

use foldhash::HashMap;
use hashbrown::HashTable;

use super::{Child, place};

/// Index of the children with one literal key by their values. Each value has one child.
#[derive(Debug, Default)]
pub(super) struct Texts {
    /// Children whose own value is the text. The text is in the child, which a lookup reads anyway, so an entry is four bytes.
    own: HashTable<u32>,
    /// Values of lists.
    listed: HashMap<Box<[u8]>, u32>,
    hasher: foldhash::fast::RandomState,
}

impl Texts {
    /// Returns the index of the child of `text`.
    pub(super) fn get(&self, children: &[Child], text: &[u8]) -> Option<u32> {
        let is_own = |index: &u32| own_text(children, *index) == Some(text);
        let own = self.own.find(self.hasher.hash_one(text), is_own).copied();
        if self.listed.is_empty() { own } else { own.or_else(|| self.listed.get(text).copied()) }
    }

    /// Registers `text` for `child`, which follows `children`, in place of a child that had it.
    pub(super) fn set(&mut self, children: &[Child], child: &Child, text: Box<[u8]>) {
        let Self { own, listed, hasher } = self;
        let index = u32::try_from(children.len()).unwrap_or(u32::MAX);
        let hash = hasher.hash_one(&*text);
        if let Ok(earlier) = own.find_entry(hash, |index| own_text(children, *index) == Some(&text)) {
            earlier.remove();
        }
        if child.own_text() == Some(&text) {
            listed.remove(&text);
            let hash_of = |index: &u32| hasher.hash_one(own_text(children, *index).unwrap_or_default());
            own.insert_unique(hash, index, hash_of);
        } else {
            listed.insert(text, index);
        }
    }
}

fn own_text(children: &[Child], index: u32) -> Option<&[u8]> {
    children.get(place(index))?.own_text()
}
