//! One counter charged with hits: what a store is called with.

use super::Limit;
use crate::model::{Ballot, Charging, CounterKey, Hits, Outcome, Role, StorePolicies};

/// One key asked to take hits against one limit.
#[derive(Clone, Debug)]
pub struct Charge {
    /// The counter.
    pub key: CounterKey,
    /// The limit.
    pub limit: Limit,
    /// What it costs.
    pub hits: Hits,
    /// Which descriptor of the request it belongs to. The charges of one descriptor stand next to each other.
    pub descriptor: usize,
    /// What its refusal means for the request.
    pub role: Role,
    /// Whether it is spared when the request is refused.
    pub charging: Charging,
    /// The policies that answer in place of the store.
    pub policies: StorePolicies,
    /// True where this instance may refuse the charge by itself for up to a second after the store refused it.
    pub remembers_refusals: bool,
}

impl Charge {
    /// Its part in the outcome of the request, when that is its own outcome.
    pub const fn ballot(&self, outcome: Outcome) -> Ballot {
        Ballot { descriptor: self.descriptor, role: self.role, refused: outcome.is_refused() }
    }

    /// Whether it stays although its request is refused: it is on its own, it is counted whatever becomes of it, or it
    /// gives back.
    pub fn is_kept(&self) -> bool {
        self.charging == Charging::Each || self.limit.counts_refused() || self.hits.given_back() > 0
    }
}
