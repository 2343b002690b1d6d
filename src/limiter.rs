//! The path from a request to its decision: find the rules, charge the counters, fold the verdicts.

use std::cmp::Ordering;
use std::sync::Arc;

use crate::algorithm::Charge;
use crate::model::policy::is_request_refused;
use crate::model::{Ballot, Decision, Finding, Outcome, Part, Request, Tightest, Verdict};
use crate::rules::{Matched, MatchedItem, MatchedKind, Rule, RuleSet};
use crate::store::{Store, Verdicts};

/// Decides requests.
pub struct Limiter {
    rules: Arc<RuleSet>,
    store: Arc<dyn Store>,
}

impl Limiter {
    /// A limiter of these rules, counting in this store.
    pub fn new(rules: Arc<RuleSet>, store: Arc<dyn Store>) -> Self {
        Self { rules, store }
    }

    /// The rules in force.
    pub fn rules(&self) -> &RuleSet {
        &self.rules
    }

    /// Whether this request may pass, and why.
    pub async fn decide(&self, request: &Request) -> Decision {
        let matched = self.rules.find(request);
        let verdicts =
            if matched.charges.is_empty() { Verdicts::new() } else { self.store.charge(&matched.charges).await };
        fold(&matched, &verdicts)
    }
}

fn fold(matched: &Matched<'_>, verdicts: &Verdicts) -> Decision {
    let answers = matched.charges.iter().zip(verdicts);
    let ballots = answers.clone().map(|(charge, verdict)| Ballot {
        descriptor: charge.descriptor,
        role: charge.role,
        refused: verdict.outcome.is_refused(),
    });
    let is_refused = is_request_refused(ballots) && !matched.is_shadowed;
    let mut answers = answers;
    let parts = matched.items.iter().map(|item| part(item, &mut answers)).collect();
    Decision { outcome: Outcome::admitted_if(!is_refused), parts }
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

/// The tighter first: the refused, then the least remaining share, then the longest to wait for.
fn tightness(one: &Charge, a: &Verdict, other: &Charge, b: &Verdict) -> Ordering {
    let share = |verdict: &Verdict, of: &Charge| u64::from(verdict.remaining) * u64::from(of.limit.capacity());
    let by_outcome = b.outcome.is_refused().cmp(&a.outcome.is_refused());
    by_outcome.then(share(a, other).cmp(&share(b, one))).then(b.reset.cmp(&a.reset))
}
