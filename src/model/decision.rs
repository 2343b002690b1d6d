//! The answer for a request. Wire answer, headers, metadata and log line are views of this value.

use super::descriptor::Hits;
use super::policy::Role;
use super::quota::Quota;
use super::rule::{About, Metadata};
use super::time::Micros;
use super::verdict::{Outcome, Verdict};

/// The answer for a request. It borrows from the rules.
#[derive(Clone, Debug)]
pub struct Decision<'a> {
    /// Overall outcome. Failed: no limit refuses, but an enforced limit could not be checked and its policy is `error`. Always
    /// admitted under the global shadow mode.
    pub outcome: Outcome,
    /// Domain name from the rules; `None` if no rule file has the domain.
    pub domain: Option<&'a str>,
    /// Parts, one per descriptor, in request order.
    pub parts: Vec<Part<'a>>,
    /// All charges and their answers, in request order.
    pub answers: Vec<Answered<'a>>,
    /// Rule that decided the request before anything was charged, if one did.
    pub ruling: Option<Ruling<'a>>,
    /// Time until the enforced limits that refuse would let the request pass, or until one quota would if only quotas refuse.
    /// `None` if the request is not refused, if waiting never helps, or if the rule must not be exposed.
    pub retry: Option<Micros>,
    /// Time until the store is called again, if the request is refused only because the store did not answer: the limits that
    /// were checked let it pass.
    pub unavailable_for: Option<Micros>,
    /// Waits of an admitted request, by the place of the wait.
    pub wait: Wait,
    /// Limits of an admitted request whose use has reached the warning threshold of their rule.
    pub warnings: Vec<UsageWarning<'a>>,
    /// Key of an entry that `known_good` of the domain names, if the request is refused, or would be without a shadow mode.
    pub known_good: Option<&'a str>,
    /// Entries with sensitive values, in request order.
    pub hidden: Vec<Hidden>,
    /// True if the request was admitted only because of the global shadow mode.
    pub is_refusal_shadowed: bool,
    /// True if the request is too large, and its domain alone decided. Then there are no parts.
    pub is_too_large: bool,
    /// Number of the rule load that decided, counted from 1.
    pub generation: u64,
}

/// A charge and its answer, for counting.
#[derive(Clone, Copy, Debug)]
pub struct Answered<'a> {
    /// Index of its descriptor in the request.
    pub descriptor: usize,
    /// Rule of the limit; `None` if the request sent the limit and no rule matches.
    pub rule: Option<&'a About>,
    /// Hits of the charge.
    pub hits: Hits,
    /// Maximum number of hits that the limit admits at once.
    pub capacity: u32,
    /// Quota of the limit.
    pub quota: Quota,
    /// Name of the algorithm that counts the limit.
    pub algorithm: &'static str,
    /// Name of the limit, if it has one.
    pub limit: Option<&'a str>,
    /// Effect of a refusal on the request.
    pub role: Role,
    /// Answer for the charge.
    pub verdict: Verdict,
}

/// An entry whose value must not appear anywhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hidden {
    /// Index of its descriptor in the request.
    pub descriptor: usize,
    /// Index of the entry in its descriptor.
    pub entry: usize,
    /// Digest that is shown in place of the value.
    pub digest: String,
}

/// Ruling on a whole request before anything is charged.
#[derive(Clone, Copy, Debug)]
pub struct Ruling<'a> {
    /// True if the request is refused (`deny`), false if it passes (`exempt`).
    pub is_denied: bool,
    /// Rule of the ruling.
    pub rule: &'a About,
}

/// Waits of an admitted request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wait {
    /// Wait in Envoy, sent in a header.
    pub header: Micros,
    /// Wait in Tidegate, before the answer.
    pub hold: Micros,
}

/// A limit whose use has reached its warning threshold.
#[derive(Clone, Copy, Debug)]
pub struct UsageWarning<'a> {
    /// Rule of the limit.
    pub rule: &'a About,
    /// Name of the limit, if it has one.
    pub name: Option<&'a str>,
    /// Maximum number of hits at once.
    pub capacity: u32,
    /// Answer for the charge.
    pub verdict: Verdict,
}

/// Decision on one descriptor.
#[derive(Clone, Debug)]
pub struct Part<'a> {
    /// Matching rule, if any.
    pub rule: Option<&'a About>,
    /// Result for the descriptor.
    pub finding: Finding<'a>,
    /// Metadata of the rule, if it has some, a limit of the rule applies, and the request did not override that limit.
    pub metadata: Option<&'a Metadata>,
}

/// Result for one descriptor.
#[derive(Clone, Debug)]
pub enum Finding<'a> {
    /// No rule matches, or another rule of the request replaces all of its limits, or another descriptor decided the request
    /// before anything was charged.
    Unmatched,
    /// A rule exempts the descriptor from limits.
    Unlimited,
    /// A rule that refuses the whole request.
    Denied,
    /// At least one limit.
    Limited(Tightest<'a>),
}

/// The tightest of a descriptor's limits: refused before admitted, then the smallest remaining share.
#[derive(Clone, Debug)]
pub struct Tightest<'a> {
    /// Quota of the limit.
    pub quota: Quota,
    /// Name of the limit, if it has one.
    pub name: Option<&'a str>,
    /// Effect of a refusal of this descriptor on the request.
    pub role: Role,
    /// Verdict of the limit.
    pub verdict: Verdict,
}

/// Descriptor and its tightest limit.
pub type LimitedPart<'d, 'a> = (&'d Part<'a>, &'d Tightest<'a>);

impl<'a> Decision<'a> {
    /// Returns true if the request is refused, or would be without a shadow mode of the process, of a rule or of a limit.
    pub fn is_refused_or_shadowed(&self) -> bool {
        self.outcome.is_refused() || !self.shadow_refusals().is_empty()
    }

    /// Returns the descriptors with limits.
    pub fn limited(&self) -> impl Iterator<Item = LimitedPart<'_, 'a>> + Clone {
        self.parts.iter().filter_map(|part| match &part.finding {
            Finding::Limited(tightest) => Some((part, tightest)),
            _ => None,
        })
    }

    /// Returns the digest that is shown in place of an entry's value, if that is sensitive.
    pub fn digest(&self, descriptor: usize, entry: usize) -> Option<&str> {
        // They are in request order.
        let place = |hidden: &Hidden| (hidden.descriptor, hidden.entry);
        let found = self.hidden.binary_search_by_key(&(descriptor, entry), place).ok()?;
        self.hidden.get(found).map(|hidden| &*hidden.digest)
    }

    /// Returns the descriptors with limits that a store counted.
    pub fn counted(&self) -> impl Iterator<Item = LimitedPart<'_, 'a>> + Clone {
        self.limited().filter(|(_, tightest)| tightest.verdict.provenance.is_counted())
    }
}

impl Answered<'_> {
    /// Returns true if the limit refuses, and a shadow mode keeps the refusal from the request. `is_global`: that of the process does.
    pub fn is_shadow_refusal(&self, is_global: bool) -> bool {
        self.verdict.outcome.is_refused() && (is_global || self.role.is_shadow())
    }

    /// Returns true if both answers are of the same limit, whatever its counter.
    pub fn is_of_same_limit(&self, other: &Self) -> bool {
        let limit = |answer: &Self| (answer.rule.map(|rule| rule.id), answer.quota, answer.role);
        limit(self) == limit(other) && self.limit == other.limit
    }
}

impl Part<'_> {
    /// Part of a descriptor that no rule limits.
    pub const UNMATCHED: Self = Self { rule: None, finding: Finding::Unmatched, metadata: None };

    /// Returns the outcome that is shown for this descriptor. A refusal in shadow mode is shown as admitted.
    pub fn outcome(&self) -> Outcome {
        match &self.finding {
            Finding::Limited(tightest) if !tightest.role.is_shadow() => tightest.verdict.outcome,
            Finding::Denied => Outcome::Refused,
            _ => Outcome::Admitted,
        }
    }

    /// Returns true if headers, bodies and statuses may expose its limit.
    pub fn is_exposed(&self) -> bool {
        self.rule.is_none_or(|rule| rule.is_exposed)
    }
}
