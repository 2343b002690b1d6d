//! The answer for a request. Wire answer, headers, metadata and log line are views of this value.

use super::descriptor::Hits;
use super::policy::Role;
use super::quota::Quota;
use super::rule::About;
use super::time::Micros;
use super::verdict::{Outcome, Verdict};

/// Free-form metadata of a rule, as its file has it.
pub type Metadata = serde_json::Map<String, serde_json::Value>;

/// The answer for a request, by the rules that it borrows from.
#[derive(Clone, Debug)]
pub struct Decision<'a> {
    /// The answer to the question: failed when no limit refuses, and one that could not be checked may not be passed over.
    /// Under a global shadow mode it is always admitted.
    pub outcome: Outcome,
    /// The domain, as the rules have it; `None` where they do not.
    pub domain: Option<&'a str>,
    /// One part per descriptor, in request order.
    pub parts: Vec<Part<'a>>,
    /// Every charge and its answer, in request order.
    pub answers: Vec<Answered<'a>>,
    /// What decided the request before anything was charged, if anything did.
    pub ruling: Option<Ruling<'a>>,
    /// Of a refused request: how long until each limit that refuses would let it pass; `None` when one of them never would,
    /// or may not be told of.
    pub retry: Option<Micros>,
    /// How long until the store is asked again, when the request is refused only because it could not be: the limits that
    /// were looked at let it pass.
    pub unavailable_for: Option<Micros>,
    /// Of an admitted request: how long it is to wait, by who makes it wait.
    pub wait: Wait,
    /// Of an admitted request: the limits of which so much is used that their rule warns of it.
    pub warnings: Vec<Warning<'a>>,
    /// The entries whose values are shown nowhere, in request order.
    pub hidden: Vec<Hidden>,
    /// Whether it would have been refused if refusals were not only watched.
    pub is_refusal_watched: bool,
    /// Whether only the domain of the request was read, because its message is too large. Then there are no parts.
    pub is_unread: bool,
    /// Which load of the rules decided, counted from 1.
    pub generation: u64,
}

/// A charge and its answer, as they are counted.
#[derive(Clone, Copy, Debug)]
pub struct Answered<'a> {
    /// Which descriptor of the request it belongs to.
    pub descriptor: usize,
    /// The rule of its limit; none where the request sent the limit and no rule answers.
    pub rule: Option<&'a About>,
    /// What it asked for.
    pub hits: Hits,
    /// The most hits its limit lets pass at once.
    pub capacity: u32,
    /// What its refusal means for the request.
    pub role: Role,
    /// Its answer.
    pub verdict: Verdict,
    /// Whether it would have been admitted, and is not charged because the request is refused.
    pub is_spared: bool,
}

/// An entry whose value is shown nowhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hidden {
    /// Which descriptor of the request it belongs to.
    pub descriptor: usize,
    /// Which entry of the descriptor it is.
    pub entry: usize,
    /// What is shown in place of its value.
    pub digest: String,
}

/// What decides a whole request before anything is charged.
#[derive(Clone, Copy, Debug)]
pub struct Ruling<'a> {
    /// Whether the request is refused (`deny`) or passes (`exempt`).
    pub is_denied: bool,
    /// The rule that says so.
    pub rule: &'a About,
}

/// How long an admitted request is to wait.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wait {
    /// At Envoy, told by a header.
    pub header: Micros,
    /// Here, before it is answered.
    pub hold: Micros,
}

/// A limit of which much is used.
#[derive(Clone, Copy, Debug)]
pub struct Warning<'a> {
    /// Its rule.
    pub rule: &'a About,
    /// Its name, where it has one.
    pub name: Option<&'a str>,
    /// The most hits at once.
    pub capacity: u32,
    /// The answer for its charge.
    pub verdict: Verdict,
}

/// What was decided about one descriptor.
#[derive(Clone, Debug)]
pub struct Part<'a> {
    /// The rule that was found, if any.
    pub rule: Option<&'a About>,
    /// What was found.
    pub finding: Finding<'a>,
    /// The rule's metadata, where it has some and the descriptor is limited and not replaced.
    pub metadata: Option<&'a Metadata>,
}

/// What a descriptor met.
#[derive(Clone, Debug)]
pub enum Finding<'a> {
    /// No rule, or only limits that another rule of the request replaces; or nothing was looked at, for the request was decided
    /// by another descriptor.
    Unmatched,
    /// A rule that frees the descriptor.
    Unlimited,
    /// A rule that refuses the whole request.
    Denied,
    /// At least one limit.
    Limited(Tightest<'a>),
}

/// The tightest of a descriptor's limits: the refused before the admitted, then the least remaining share.
#[derive(Clone, Debug)]
pub struct Tightest<'a> {
    /// The limit's quota.
    pub quota: Quota,
    /// The limit's name, where it has one.
    pub name: Option<&'a str>,
    /// What a refusal of this descriptor means for the request.
    pub role: Role,
    /// Its verdict.
    pub verdict: Verdict,
}

impl Part<'_> {
    /// A descriptor that no rule limits.
    pub const UNMATCHED: Self = Self { rule: None, finding: Finding::Unmatched, metadata: None };

    /// What is shown for this descriptor: a shadowed refusal shows as admitted.
    pub fn outcome(&self) -> Outcome {
        match &self.finding {
            Finding::Limited(tightest) if !tightest.role.is_shadow() => tightest.verdict.outcome,
            Finding::Denied => Outcome::Refused,
            _ => Outcome::Admitted,
        }
    }

    /// Whether headers, bodies and statuses may tell of its limit.
    pub fn is_exposed(&self) -> bool {
        self.rule.is_none_or(|rule| rule.is_exposed)
    }
}
