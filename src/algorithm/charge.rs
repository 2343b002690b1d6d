//! The input of a store: one counter charged with hits.

use super::Limit;
use crate::model::{ChargeOutcome, Charging, CounterKey, Hits, LeaseTerms, Outcome, Role, StorePolicies};

/// A request to one counter key to take hits against one limit.
#[derive(Clone, Debug)]
pub struct Charge {
    /// Key of the counter.
    pub key: CounterKey,
    /// Limit of the counter.
    pub limit: Limit,
    /// Cost of the charge.
    pub hits: Hits,
    /// Index of its descriptor in the request. The charges of one descriptor are adjacent.
    pub descriptor: usize,
    /// Effect of a refusal on the request.
    pub role: Role,
    /// Charging mode, which decides if the charge is taken back when the request is refused.
    pub charging: Charging,
    /// The policies that answer in place of the store.
    pub policies: StorePolicies,
    /// True if this instance may refuse the charge by itself for up to a second after the store refused it.
    pub remembers_refusals: bool,
    /// Terms of the lease that may pay the charge; `None` if each charge is the store's.
    pub lease: Option<LeaseTerms>,
    /// Hits that the store charges beside it for a lease, at most a quarter of what remains then. 0 unless the charge is on its own.
    pub ask: u32,
}

impl Charge {
    /// Returns its part in the outcome of the request. `outcome` is the outcome of this charge.
    pub const fn charge_outcome(&self, outcome: Outcome) -> ChargeOutcome {
        ChargeOutcome { descriptor: self.descriptor, role: self.role, refused: outcome.is_refused() }
    }

    /// Returns true if the charge is recorded although its request is refused: the limits are charged each on their own, the limit
    /// records refused charges, or the charge gives hits back.
    pub fn is_recorded_despite_refusal(&self) -> bool {
        self.charging == Charging::Each || self.limit.records_every_charge() || self.hits.given_back() > 0
    }
}
