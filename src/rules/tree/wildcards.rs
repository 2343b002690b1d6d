//! Index of the wildcards of a level by the text before their first `*`.

use foldhash::HashMap;
use smallvec::SmallVec;

/// Index of children with a wildcard, by the text before their first `*`.
#[derive(Debug, Default)]
pub struct Wildcards {
    by_prefix: HashMap<Box<[u8]>, Vec<u32>>,
    /// Distinct lengths of the prefixes.
    lengths: Vec<usize>,
}

impl Wildcards {
    pub fn add(&mut self, prefix: &[u8], index: u32) {
        if !self.lengths.contains(&prefix.len()) {
            self.lengths.push(prefix.len());
        }
        self.by_prefix.entry(prefix.into()).or_default().push(index);
    }

    pub fn candidates(&self, text: &[u8], into: &mut SmallVec<[u32; 8]>) {
        for &length in &self.lengths {
            if let Some(indexes) = text.get(..length).and_then(|prefix| self.by_prefix.get(prefix)) {
                into.extend_from_slice(indexes);
            }
        }
    }
}
