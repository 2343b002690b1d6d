//! The answer for a request. Wire answer, headers, metadata and log line are views of this value.

use std::sync::Arc;

use super::policy::Role;
use super::quota::Quota;
use super::time::Micros;
use super::verdict::{Outcome, Verdict};

/// The dense number of a rule within its rule set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RuleId(pub u32);

/// Free-form metadata of a rule, as its file has it.
pub type Metadata = serde_json::Map<String, serde_json::Value>;

/// The answer for a request.
#[derive(Clone, Debug)]
pub struct Decision {
    /// The answer to the question: failed when no limit refuses, and one that could not be checked may not be passed over.
    /// Under a global shadow mode it is always admitted.
    pub outcome: Outcome,
    /// One part per descriptor, in request order.
    pub parts: Vec<Part>,
    /// How long until the store is asked again, when the request is refused only because it could not be: the limits that
    /// were looked at let it pass.
    pub unavailable_for: Option<Micros>,
}

/// What was decided about one descriptor.
#[derive(Clone, Debug)]
pub struct Part {
    /// The rule that was found, if any.
    pub rule: Option<RuleId>,
    /// What was found.
    pub finding: Finding,
    /// The rule's metadata, where it has some and the descriptor is limited and not replaced.
    pub metadata: Option<Arc<Metadata>>,
}

/// What a descriptor met.
#[derive(Clone, Debug)]
pub enum Finding {
    /// No rule, or only limits that another rule of the request replaces.
    Unmatched,
    /// A rule that frees the descriptor.
    Unlimited,
    /// At least one limit.
    Limited(Tightest),
}

/// The tightest of a descriptor's limits: the refused before the admitted, then the least remaining share.
#[derive(Clone, Debug)]
pub struct Tightest {
    /// The limit's quota.
    pub quota: Quota,
    /// The limit's name, where it has one.
    pub name: Option<Arc<str>>,
    /// What a refusal of this descriptor means for the request.
    pub role: Role,
    /// Its verdict.
    pub verdict: Verdict,
}

impl Part {
    /// A descriptor that no rule limits.
    pub const UNMATCHED: Self = Self { rule: None, finding: Finding::Unmatched, metadata: None };

    /// What is shown for this descriptor: a shadowed refusal shows as admitted.
    pub fn outcome(&self) -> Outcome {
        match &self.finding {
            Finding::Limited(tightest) if !tightest.role.is_shadow() => tightest.verdict.outcome,
            _ => Outcome::Admitted,
        }
    }
}
