//! The path from a request to its decision: find the rules, charge the counters, fold the verdicts.

use std::cmp::Ordering;
use std::sync::Arc;
use std::time::Duration;

use crate::algorithm::Charge;
use crate::model::policy::is_request_refused;
use crate::model::{Decision, Finding, Micros, Outcome, Part, Provenance, Request, Tightest, Verdict};
use crate::rules::{Matched, MatchedItem, MatchedKind, Rule, RuleSet};
use crate::store::Verdicts;
use crate::store::guard::Guard;

/// Decides requests.
pub struct Limiter {
    rules: Arc<RuleSet>,
    guard: Arc<Guard>,
}

impl Limiter {
    /// A limiter of these rules, counting behind this guard.
    pub fn new(rules: Arc<RuleSet>, guard: Arc<Guard>) -> Self {
        Self { rules, guard }
    }

    /// The rules in force.
    pub fn rules(&self) -> &RuleSet {
        &self.rules
    }

    /// Whether this request may pass, and why; for a caller who waits no longer than `patience`.
    pub async fn decide(&self, request: &Request, patience: Option<Duration>) -> Decision {
        let matched = self.rules.find(request);
        let verdicts = self.guard.charge(&matched.charges, patience).await;
        fold(&matched, &verdicts)
    }
}

fn fold(matched: &Matched<'_>, verdicts: &Verdicts) -> Decision {
    let answers = matched.charges.iter().zip(verdicts);
    let ballots = answers.clone().map(|(charge, verdict)| charge.ballot(verdict.outcome));
    // What only watches neither refuses nor makes the call fail.
    let mut enforced = answers.clone().filter(|(charge, _)| !charge.role.is_shadow());
    let outcome = if matched.is_shadowed {
        Outcome::Admitted
    } else if is_request_refused(ballots) {
        Outcome::Refused
    } else if enforced.any(|(_, verdict)| verdict.outcome.is_failed()) {
        Outcome::Failed
    } else {
        Outcome::Admitted
    };
    let unavailable_for = outcome.is_refused().then(|| unavailable_for(answers.clone())).flatten();
    let mut answers = answers;
    let parts = matched.items.iter().map(|item| part(item, &mut answers)).collect();
    Decision { outcome, parts, unavailable_for }
}

/// How long until the store is asked again, when a request is refused that would pass if all that was not asked let it.
fn unavailable_for<'a>(answers: impl Iterator<Item = (&'a Charge, &'a Verdict)> + Clone) -> Option<Micros> {
    let is_unasked = |verdict: &Verdict| verdict.provenance == Provenance::Closed;
    let asked = answers
        .clone()
        .map(|(charge, verdict)| charge.ballot(if is_unasked(verdict) { Outcome::Admitted } else { verdict.outcome }));
    let unasked = answers.filter(|(charge, verdict)| is_unasked(verdict) && !charge.role.is_shadow());
    if is_request_refused(asked) { None } else { unasked.map(|(_, verdict)| verdict.duration_until_reset()).max() }
}

/// The part of one descriptor, from the answers to its own charges.
fn part<'a>(item: &MatchedItem<'_>, answers: &mut impl Iterator<Item = (&'a Charge, &'a Verdict)>) -> Part {
    let finding = match &item.kind {
        MatchedKind::Unmatched => Finding::Unmatched,
        MatchedKind::Unlimited => Finding::Unlimited,
        MatchedKind::Limited(names) => {
            let own = names.iter().zip(answers);
            let tightest = own.min_by(|(_, (one, a)), (_, (other, b))| tightness(one, a, other, b));
            tightest.map_or(Finding::Unmatched, |(name, (charge, verdict))| {
                Finding::Limited(Tightest {
                    quota: charge.limit.quota(),
                    name: name.cloned(),
                    role: charge.role,
                    verdict: *verdict,
                })
            })
        }
    };
    let metadata = match finding {
        Finding::Limited(_) if !item.is_overridden => item.rule.and_then(Rule::metadata).cloned(),
        _ => None,
    };
    Part { rule: item.rule.map(Rule::id), finding, metadata }
}

/// The tighter first: the refused, what nobody knows, then the least remaining share, then the longest to wait for; last
/// what was admitted unchecked.
fn tightness(one: &Charge, a: &Verdict, other: &Charge, b: &Verdict) -> Ordering {
    let rank = |verdict: &Verdict| match (verdict.outcome, verdict.provenance) {
        (Outcome::Refused, Provenance::Closed) => 1,
        (Outcome::Refused, _) => 0,
        (Outcome::Failed, _) => 2,
        (Outcome::Admitted, Provenance::Open) => 4,
        (Outcome::Admitted, _) => 3,
    };
    let share = |verdict: &Verdict, of: &Charge| u64::from(verdict.remaining) * u64::from(of.limit.capacity());
    rank(a)
        .cmp(&rank(b))
        .then(share(a, other).cmp(&share(b, one)))
        .then(b.duration_until_reset().cmp(&a.duration_until_reset()))
}
