//! The input of a store: one counter charged with hits.

use smallvec::SmallVec;

use super::Limit;
use crate::model::policy::is_request_refused;
use crate::model::{ChargeOutcome, Charging, CounterKey, Hits, LeaseTerms, Outcome, Role, StorePolicies, Verdict};

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
    /// Charging mode, which decides whose refusal spares the charge. The charges of one [`Charging::Group`] enforce or are quotas,
    /// and belong to one descriptor.
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

/// The refusals of one request, which decide the charges that are not recorded.
#[derive(Debug)]
pub struct Refusals {
    is_request_refused: bool,
    /// The groups that refuse.
    groups: SmallVec<[u32; 2]>,
}

impl Charge {
    /// Returns its part in the outcome of the request. `outcome` is the outcome of this charge.
    pub const fn charge_outcome(&self, outcome: Outcome) -> ChargeOutcome {
        ChargeOutcome { descriptor: self.descriptor, role: self.role, refused: outcome.is_refused() }
    }

    /// Returns true if the charge is recorded whatever other charges refuse: the limits are charged each on their own, the limit
    /// records refused charges, or the charge gives hits back.
    pub fn is_always_recorded(&self) -> bool {
        self.charging == Charging::Each || self.limit.records_every_charge() || self.hits.given_back() > 0
    }

    /// Returns true if the charge is recorded although its request is refused, unless its own group refuses.
    pub fn is_recorded_despite_refusal(&self) -> bool {
        matches!(self.charging, Charging::Group(_)) || self.is_always_recorded()
    }

    /// Returns the number of its group, if it has one.
    pub const fn group(&self) -> Option<u32> {
        match self.charging {
            Charging::Group(group) => Some(group),
            Charging::Each | Charging::AllOrNothing => None,
        }
    }
}

impl Refusals {
    /// Returns the refusals of a request. `outcomes` are its charges in order, each with its outcome.
    pub fn new<'a>(outcomes: impl Iterator<Item = (&'a Charge, Outcome)> + Clone) -> Self {
        let refusing = outcomes.clone().filter(|(_, outcome)| outcome.is_refused()).map(|(charge, _)| charge);
        let charge_outcomes = outcomes.map(|(charge, outcome)| charge.charge_outcome(outcome));
        Self::known(refusing, is_request_refused(charge_outcomes))
    }

    /// Returns the refusals of the charges of a request with these verdicts.
    pub fn of(charges: &[Charge], verdicts: &[Verdict]) -> Self {
        Self::new(charges.iter().zip(verdicts).map(|(charge, verdict)| (charge, verdict.outcome)))
    }

    /// Returns the refusals of a request of which only the charges in `refusing` are decided.
    pub fn known<'a>(refusing: impl Iterator<Item = &'a Charge>, is_request_refused: bool) -> Self {
        Self { is_request_refused, groups: refusing.filter_map(Charge::group).collect() }
    }

    /// Returns true if the request is refused.
    pub const fn is_request_refused(&self) -> bool {
        self.is_request_refused
    }

    /// Returns true if charges of this charging mode are refused together.
    pub fn refuse(&self, charging: Charging) -> bool {
        match charging {
            Charging::Each => false,
            Charging::AllOrNothing => self.is_request_refused,
            Charging::Group(group) => self.groups.contains(&group),
        }
    }

    /// Returns true if `charge` is not recorded, because charges that it is decided with refuse.
    pub fn spare(&self, charge: &Charge) -> bool {
        self.refuse(charge.charging) && !charge.is_always_recorded()
    }
}
