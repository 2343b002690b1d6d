//! The rules in force: one immutable rule set, replaced as a whole.

use std::sync::Arc;

use arc_swap::{ArcSwap, Guard};

use super::{Generation, RuleSet};

/// The rules in force.
#[derive(Debug)]
pub struct LiveRules {
    current: ArcSwap<RuleSet>,
}

/// The rules at one moment. A request uses one snapshot from beginning to end.
pub type Snapshot = Guard<Arc<RuleSet>>;

impl LiveRules {
    /// Puts `rules` in force as load 1.
    pub fn new(rules: RuleSet) -> Self {
        Self { current: ArcSwap::from_pointee(RuleSet { generation: 1, ..rules }) }
    }

    /// Creates it without rules, as load 0.
    pub fn without_rules() -> Self {
        Self { current: ArcSwap::from_pointee(RuleSet::default()) }
    }

    /// Returns the rules in force.
    pub fn snapshot(&self) -> Snapshot {
        self.current.load()
    }

    /// Returns the number of the next load.
    pub fn next_generation(&self) -> Generation {
        self.current.load().generation.saturating_add(1)
    }

    /// Puts `rules` in force as the next load. Must not be called concurrently.
    /// Returns the previous rules. The caller drops them, which takes a while if there are many.
    pub fn replace(&self, rules: RuleSet) -> Arc<RuleSet> {
        let generation = self.next_generation();
        self.current.swap(Arc::new(RuleSet { generation, ..rules }))
    }
}
