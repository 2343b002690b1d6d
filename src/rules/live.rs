//! The rules in force: one rule set at a time, replaced whole.

use std::sync::Arc;

use arc_swap::{ArcSwap, Guard};

use super::RuleSet;

/// The rules in force.
#[derive(Debug)]
pub struct Live {
    current: ArcSwap<RuleSet>,
}

/// The rules as they were at one moment; a request is decided by one of these from beginning to end.
pub type Snapshot = Guard<Arc<RuleSet>>;

impl Live {
    /// These, as the first load.
    pub fn new(rules: RuleSet) -> Self {
        Self { current: ArcSwap::from_pointee(RuleSet { generation: 1, ..rules }) }
    }

    /// The rules at this moment.
    pub fn snapshot(&self) -> Snapshot {
        self.current.load()
    }

    /// Which load the next will be.
    pub fn next_generation(&self) -> u64 {
        self.current.load().generation.saturating_add(1)
    }

    /// Puts others in force, as the next load. To be called by one at a time.
    /// Hands back those before, for the caller to drop: where there are many, that takes a while.
    pub fn replace(&self, rules: RuleSet) -> Arc<RuleSet> {
        let generation = self.next_generation();
        self.current.swap(Arc::new(RuleSet { generation, ..rules }))
    }
}
