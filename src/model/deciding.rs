//! The rule, the limit and the origin that decided a request. Metadata, metrics, spans and the log line show this one value.

use super::decision::{Answered, Decision, LimitedPart};
use super::policy::{ChargeOutcome, Role, is_request_refused};
use super::rule::About;
use super::time::Micros;
use super::verdict::{Outcome, Provenance, Verdict};

/// Maximum number of shadow refusals of a request that are named: 16, of different limits.
pub const MOST_SHADOW_REFUSALS: usize = 16;

/// The rule, the limit and the origin that would refuse a request, and the answer of the limit; no answer if the whole request would be
/// refused uncounted.
pub type ShadowRefusal<'d, 'a> = (Deciding<'a>, Option<&'d Answered<'a>>);

/// The rule, the limit and the origin that decided a request.
#[derive(Clone, Copy, Debug)]
pub struct Deciding<'a> {
    /// Index of the deciding descriptor, if one of them decided.
    pub descriptor: Option<usize>,
    /// The deciding rule, if there is one.
    pub rule: Option<&'a About>,
    /// Name of the deciding limit, if it has one.
    pub limit: Option<&'a str>,
    /// Origin of the decision.
    pub origin: Origin,
}

/// Origin of a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The store answered.
    Store,
    /// Known refusal: the store refused the same charge less than a second ago, or was too busy for another call.
    Known,
    /// A lease paid, whose hits the store had charged before.
    Lease,
    /// Without the store: admitted unchecked.
    Open,
    /// Without the store: refused unchecked.
    Closed,
    /// Without the store: decided by this instance alone.
    Local,
    /// Without the store: the caller gets an error.
    Error,
    /// A rule decided without counting.
    Rule,
    /// The message was too large: refused without counting.
    TooLarge,
    /// No limit applies to the request.
    Nothing,
}

impl Origin {
    /// All origins, in the order of their discriminants.
    pub const ALL: [Self; 10] = [
        Self::Store,
        Self::Known,
        Self::Lease,
        Self::Open,
        Self::Closed,
        Self::Local,
        Self::Error,
        Self::Rule,
        Self::TooLarge,
        Self::Nothing,
    ];

    /// Returns the name in metrics, spans and logs.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Store => Provenance::Store.name(),
            Self::Open => Provenance::Open.name(),
            Self::Closed => Provenance::Closed.name(),
            Self::Local => Provenance::Local.name(),
            Self::Known => Provenance::Known.name(),
            Self::Lease => Provenance::Lease.name(),
            Self::Error => Provenance::Error.name(),
            Self::Rule => "rule",
            Self::TooLarge => "too_large",
            Self::Nothing => "none",
        }
    }
}

impl From<Provenance> for Origin {
    fn from(provenance: Provenance) -> Self {
        match provenance {
            Provenance::Store => Self::Store,
            Provenance::Open => Self::Open,
            Provenance::Closed => Self::Closed,
            Provenance::Local => Self::Local,
            Provenance::Known => Self::Known,
            Provenance::Lease => Self::Lease,
            // Another charge of the same request is known to be refused, and decides it.
            Provenance::Spared => Self::Known,
            Provenance::Error => Self::Error,
        }
    }
}

impl<'a> Deciding<'a> {
    fn none(origin: Origin) -> Self {
        Self { descriptor: None, rule: None, limit: None, origin }
    }

    fn answer(answer: &Answered<'a>) -> Self {
        let Answered { descriptor, rule, limit, verdict: Verdict { provenance, .. }, .. } = *answer;
        Self { descriptor: Some(descriptor), rule, limit, origin: provenance.into() }
    }

    fn part(decision: &Decision<'a>, (part, tightest): LimitedPart<'_, 'a>) -> Self {
        let descriptor = decision.parts.iter().position(|each| std::ptr::eq(each, part));
        Self { descriptor, rule: part.rule, limit: tightest.name, origin: tightest.verdict.provenance.into() }
    }
}

impl<'a> Decision<'a> {
    /// Returns what decided the whole request.
    ///
    /// A ruling decides first, then the size of the message. A refusal: the limit with the longest delay if there was no room
    /// to hold the call, else the first descriptor that refuses, with quotas last. A failure: the first descriptor that could
    /// not be checked. An admission: the first enforced limit that a failure policy answered, else the limit that the headers
    /// describe if all rules are exposed ([`described`]), else the first limit.
    pub fn deciding(&self) -> Deciding<'a> {
        if let Some(ruling) = self.ruling {
            return Deciding { rule: Some(ruling.rule), ..Deciding::none(Origin::Rule) };
        }
        if self.is_too_large && self.outcome.is_refused() {
            return Deciding::none(Origin::TooLarge);
        }
        let deciding = match self.outcome {
            Outcome::Refused if self.wait.hold > Micros::ZERO => {
                enforced(self).max_by_key(|answer| answer.verdict.delay).map(Deciding::answer)
            }
            Outcome::Refused => refusing(self).map(|found| Deciding::part(self, found)),
            Outcome::Failed => self.limited().find(is_failed).map(|found| Deciding::part(self, found)),
            Outcome::Admitted => {
                let by_policy = enforced(self).find(|answer| answer.verdict.provenance.is_policy());
                let limited = || described(self.counted()).or_else(|| self.limited().next());
                by_policy.map(Deciding::answer).or_else(|| limited().map(|found| Deciding::part(self, found)))
            }
        };
        deciding.unwrap_or(Deciding::none(Origin::Nothing))
    }

    /// Returns what would refuse the request if the process, its rules and their limits had no shadow mode: each limit once, in the order
    /// of the request, and the first 16 at most. Quotas refuse together or not at all.
    pub fn shadow_refusals(&self) -> Vec<ShadowRefusal<'_, 'a>> {
        if self.is_refusal_shadowed && self.answers.is_empty() {
            let by_rule = |rule| Deciding { rule: Some(rule), ..Deciding::none(Origin::Rule) };
            let whole = self.ruling.map_or(Deciding::none(Origin::TooLarge), |ruling| by_rule(ruling.rule));
            return vec![(whole, None)];
        }
        let mut refusals: Vec<&Answered<'a>> = Vec::new();
        for answer in self.answers.iter().filter(|answer| answer.is_shadow_refusal(self.is_refusal_shadowed)) {
            let is_kept = refusals.iter().any(|kept| kept.is_of_same_limit(answer));
            if !is_kept && refusals.len() < MOST_SHADOW_REFUSALS {
                refusals.push(answer);
            }
        }
        if refusals.iter().any(|answer| answer.role.is_quota()) && !self.do_quotas_refuse() {
            refusals.retain(|answer| !answer.role.is_quota());
        }
        refusals.into_iter().map(|answer| (Deciding::answer(answer), Some(answer))).collect()
    }

    /// Returns true if the quotas would refuse the request, those in shadow mode among them.
    fn do_quotas_refuse(&self) -> bool {
        let quotas = self.answers.iter().filter(|answer| answer.role.is_quota());
        is_request_refused(quotas.map(|answer| ChargeOutcome {
            descriptor: answer.descriptor,
            role: Role::Quota,
            refused: answer.verdict.outcome.is_refused(),
        }))
    }
}

/// Returns the descriptor that headers describe, chosen as the reference does: the last refused one that is not a
/// quota, or else the one with the least remaining, the first of equals.
pub fn described<'d, 'a>(counted: impl Iterator<Item = LimitedPart<'d, 'a>>) -> Option<LimitedPart<'d, 'a>> {
    let mut best = u32::MAX;
    let mut chosen = None;
    for (part, tightest) in counted {
        if tightest.verdict.remaining < best {
            best = tightest.verdict.remaining;
            chosen = Some((part, tightest));
        }
        if part.outcome().is_refused() && !tightest.role.is_quota() {
            best = 0;
            chosen = Some((part, tightest));
        }
    }
    chosen
}

fn enforced<'d, 'a>(decision: &'d Decision<'a>) -> impl Iterator<Item = &'d Answered<'a>> {
    decision.answers.iter().filter(|answer| !answer.role.is_shadow())
}

/// Returns the first descriptor that refuses the request by itself, or else the first of the quotas that refuse it
/// together.
fn refusing<'d, 'a>(decision: &'d Decision<'a>) -> Option<LimitedPart<'d, 'a>> {
    let mut refused = decision.limited().filter(|(part, _)| part.outcome().is_refused());
    let alone = refused.clone().find(|(_, tightest)| !tightest.role.is_quota());
    alone.or_else(|| refused.next())
}

fn is_failed((part, _): &LimitedPart<'_, '_>) -> bool {
    part.outcome().is_failed()
}
