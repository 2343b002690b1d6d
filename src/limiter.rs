//! The path from a request to its decision: finds the rules, charges the counters, folds the verdicts.

use std::cmp::Ordering;
use std::sync::Arc;

use crate::algorithm::Charge;
use crate::model::policy::is_request_refused;
use crate::model::{
    Answered, Decision, Delivery, Finding, Micros, Outcome, Part, Provenance, Request, Ruling, Tightest, UsageWarning,
    Verdict, Wait,
};
use crate::rules;
use crate::rules::live::LiveRules;
use crate::rules::{ChargeOrigin, MOST_CHARGES, Matched, MatchedItem, MatchedKind, Rule, RuleLimit, RuleSet};
use crate::store::Verdicts;
use crate::store::guard::Guard;

pub use crate::rules::live::Snapshot;
pub use crate::store::deadline::CallerTime;

/// Decides requests.
pub struct Limiter {
    rules: Arc<LiveRules>,
    guard: Arc<Guard>,
}

impl Limiter {
    /// Returns a limiter that decides by `rules` and charges counters through `guard`.
    pub fn new(rules: Arc<LiveRules>, guard: Arc<Guard>) -> Self {
        Self { rules, guard }
    }

    /// Returns the rules in force.
    pub fn rules(&self) -> Snapshot {
        self.rules.snapshot()
    }

    /// Explains which rule of `rules` answers for the first descriptor of `request`, which counter it charges, and why the other rules do
    /// not match. Returns text for people.
    pub fn explain(rules: &RuleSet, request: &Request) -> String {
        let explain = |descriptor| rules::explain(rules, request.domain(), descriptor).to_string();
        request.descriptors().first().map(explain).unwrap_or_default()
    }

    /// Decides `request` by `rules`, within the `timeout` of the caller. One with more than [`MOST_CHARGES`] is decided by its domain alone, and
    /// charges nothing.
    pub async fn decide<'a>(
        &self,
        rules: &'a RuleSet,
        request: &Request,
        timeout: impl Into<CallerTime>,
    ) -> Decision<'a> {
        let (mut matched, timeout) = (rules.find(request), timeout.into());
        let decision = match matched.ruling {
            Some(ruling) => ruled(matched, ruling, rules.generation()),
            None if matched.charges.len() > MOST_CHARGES => {
                let brings_limit = request.descriptors().iter().any(|descriptor| descriptor.limit.is_some());
                Decision { hidden: matched.hidden, ..by_domain(rules, request.domain(), brings_limit) }
            }
            None => {
                if let Some(longest) = timeout.longest_delay.map(Micros::from) {
                    // A slot beyond it would be reserved, and its request refused.
                    matched
                        .charges
                        .iter_mut()
                        .for_each(|charge| charge.limit = charge.limit.with_slots_within(longest));
                }
                let verdicts = self.guard.charge(&matched.charges, timeout).await;
                fold(matched, &verdicts, rules.generation())
            }
        };
        noting_known_good(decision, rules, request)
    }
}

/// Decides a request of which only the domain counts, because it is too large, and charges nothing. Refuses if the domain is known, and it
/// enforces a rule or the request may bring its own limit (`may_bring_limit`). The global shadow mode admits it.
pub fn by_domain<'a>(rules: &'a RuleSet, domain: &str, may_bring_limit: bool) -> Decision<'a> {
    let (domain, is_enforcing) = rules.domain(domain).unzip();
    // A limit of the request counts only in a known domain.
    let would_refuse = is_enforcing.is_some_and(|is_enforcing| is_enforcing || may_bring_limit);
    Decision {
        outcome: Outcome::admitted_if(!would_refuse || rules.is_shadowed()),
        domain,
        answers: Vec::new(),
        parts: Vec::new(),
        ruling: None,
        retry: None,
        unavailable_for: None,
        wait: Wait::default(),
        warnings: Vec::new(),
        known_good: None,
        hidden: Vec::new(),
        is_refusal_shadowed: would_refuse && rules.is_shadowed(),
        is_too_large: true,
        generation: rules.generation(),
    }
}

/// Returns `decision` with the known good caller that it refuses, or would without a shadow mode.
fn noting_known_good<'a>(decision: Decision<'a>, rules: &'a RuleSet, request: &Request) -> Decision<'a> {
    let known_good = if decision.is_refused_or_shadowed() { rules.known_good(request) } else { None };
    Decision { known_good, ..decision }
}

/// Returns the decision for a request that `ruling` decides as a whole.
fn ruled<'a>(matched: Matched<'a>, ruling: Ruling<'a>, generation: u64) -> Decision<'a> {
    Decision {
        outcome: Outcome::admitted_if(!ruling.is_denied || matched.is_shadowed),
        domain: matched.domain,
        answers: Vec::new(),
        parts: matched.items.iter().map(|item| part(item, &mut std::iter::empty())).collect(),
        ruling: Some(ruling),
        retry: None,
        unavailable_for: None,
        wait: Wait::default(),
        warnings: Vec::new(),
        known_good: None,
        hidden: matched.hidden,
        is_refusal_shadowed: ruling.is_denied && matched.is_shadowed,
        is_too_large: false,
        generation,
    }
}

fn fold<'a>(matched: Matched<'a>, verdicts: &Verdicts, generation: u64) -> Decision<'a> {
    let answers = matched.charges.iter().zip(verdicts);
    let charge_outcomes = answers.clone().map(|(charge, verdict)| charge.charge_outcome(verdict.outcome));
    // Shadow charges neither refuse the request nor make the call fail.
    let mut enforced = answers.clone().filter(|(charge, _)| !charge.role.is_shadow());
    let outcome = if matched.is_shadowed {
        Outcome::Admitted
    } else if is_request_refused(charge_outcomes.clone()) {
        Outcome::Refused
    } else if enforced.any(|(_, verdict)| verdict.outcome.is_failed()) {
        Outcome::Failed
    } else {
        Outcome::Admitted
    };
    let is_refused = outcome.is_refused();
    // Under the global shadow mode a refusal still spares the other charges.
    let spares = is_request_refused(charge_outcomes);
    let unavailable_for = is_refused.then(|| unavailable_for(answers.clone())).flatten();
    // Under the global shadow mode waits and warnings do not apply either.
    let is_asked = outcome == Outcome::Admitted && !matched.is_shadowed;
    let (wait, warnings) = if is_asked { asked(&matched, verdicts) } else { Default::default() };
    let mut rest = answers.clone();
    let mut answered_charges = Vec::with_capacity(matched.charges.len());
    answered_charges.extend(origins(&matched).zip(answers.clone()).map(|(origin, answer)| answered(origin, answer)));
    Decision {
        outcome,
        domain: matched.domain,
        answers: answered_charges,
        parts: matched.items.iter().map(|item| part(item, &mut rest)).collect(),
        ruling: None,
        retry: is_refused.then(|| retry(&matched, answers)).flatten(),
        unavailable_for,
        wait,
        warnings,
        known_good: None,
        hidden: matched.hidden,
        is_refusal_shadowed: matched.is_shadowed && spares,
        is_too_large: false,
        generation,
    }
}

/// Returns the limits of the rules with their charges and verdicts.
fn limits<'m, 'a>(
    matched: &'m Matched<'a>,
    verdicts: &'m Verdicts,
) -> impl Iterator<Item = (&'a Rule, &'a RuleLimit, &'m Charge, &'m Verdict)> {
    let from = origins(matched).map(|(_, origin)| origin.rule.zip(origin.limit));
    let answers = matched.charges.iter().zip(verdicts);
    from.zip(answers).filter_map(|(from, (charge, verdict))| from.map(|(rule, limit)| (rule, limit, charge, verdict)))
}

/// Returns the item of each charge, and the origin of the charge.
fn origins<'m, 'a>(matched: &'m Matched<'a>) -> impl Iterator<Item = (&'m MatchedItem<'a>, ChargeOrigin<'a>)> + Clone {
    matched.items.iter().flat_map(|item| {
        let origins: &[ChargeOrigin<'a>] = match &item.kind {
            MatchedKind::Limited(origins) => origins,
            _ => &[],
        };
        origins.iter().map(move |origin| (item, *origin))
    })
}

fn answered<'a>(
    (item, from): (&MatchedItem<'a>, ChargeOrigin<'a>),
    (charge, verdict): (&Charge, &Verdict),
) -> Answered<'a> {
    // A limit that the request sent has no name.
    let named = from.limit.filter(|_| !item.is_overridden);
    Answered {
        limit: named.and_then(|limit| limit.name.as_deref()),
        descriptor: charge.descriptor,
        rule: from.rule.map(Rule::about),
        hits: charge.hits,
        capacity: charge.limit.capacity(),
        quota: charge.limit.quota(),
        algorithm: charge.limit.algorithm().name(),
        role: charge.role,
        verdict: *verdict,
    }
}

/// Returns the waits and the warnings of an admitted request.
fn asked<'a>(matched: &Matched<'a>, verdicts: &Verdicts) -> (Wait, Vec<UsageWarning<'a>>) {
    let (mut wait, mut warnings) = (Wait::default(), Vec::new());
    for (rule, limit, charge, verdict) in limits(matched, verdicts).filter(|(.., charge, _)| !charge.role.is_shadow()) {
        match limit.delivery {
            Delivery::Header => wait.header = wait.header.max(verdict.delay),
            Delivery::Hold => wait.hold = wait.hold.max(verdict.delay),
        }
        let capacity = charge.limit.capacity();
        let used = capacity.saturating_sub(verdict.remaining);
        let is_much = |percent: u8| u64::from(used) * 100 >= u64::from(capacity) * u64::from(percent);
        // No warnings for one instance's part of a limit.
        if !verdict.provenance.is_policy() && limit.warn_at.is_some_and(is_much) {
            let (rule, name) = (rule.about(), limit.name.as_deref());
            warnings.push(UsageWarning { rule, name, capacity, verdict: *verdict });
        }
    }
    (wait, warnings)
}

/// Returns the time until all enforced limits that refuse would let the request pass. If only quotas refuse: the time until one
/// of them would, because quotas refuse only together.
fn retry<'a>(
    matched: &Matched<'_>,
    answers: impl Iterator<Item = (&'a Charge, &'a Verdict)> + Clone,
) -> Option<Micros> {
    let exposed_retry = |(from, (_, verdict)): (ChargeOrigin<'_>, (&Charge, &Verdict))| {
        verdict.retry.filter(|_| from.rule.is_none_or(|rule| rule.about().is_exposed))
    };
    let answers = origins(matched).map(|(_, from)| from).zip(answers);
    let refusing = answers.filter(|(_, (charge, verdict))| verdict.outcome.is_refused() && !charge.role.is_shadow());
    let mut enforcing = refusing.clone().filter(|(_, (charge, _))| !charge.role.is_quota()).peekable();
    if enforcing.peek().is_none() {
        return refusing.filter_map(exposed_retry).min();
    }
    enforcing.map(exposed_retry).collect::<Option<Vec<_>>>()?.into_iter().max()
}

/// Returns the time until the store is called again, if the request is refused only by policy `closed`: the limits that were
/// checked let it pass.
fn unavailable_for<'a>(answers: impl Iterator<Item = (&'a Charge, &'a Verdict)> + Clone) -> Option<Micros> {
    let is_unasked = |verdict: &Verdict| verdict.provenance == Provenance::Closed;
    let asked = answers.clone().map(|(charge, verdict)| {
        charge.charge_outcome(if is_unasked(verdict) { Outcome::Admitted } else { verdict.outcome })
    });
    let unasked = answers.filter(|(charge, verdict)| is_unasked(verdict) && !charge.role.is_shadow());
    if is_request_refused(asked) { None } else { unasked.map(|(_, verdict)| verdict.duration_until_reset()).max() }
}

/// Returns the part of one descriptor. Takes the answers to its own charges from `answers`.
fn part<'a, 'v>(item: &MatchedItem<'a>, answers: &mut impl Iterator<Item = (&'v Charge, &'v Verdict)>) -> Part<'a> {
    let mut rule = item.rule;
    let finding = match &item.kind {
        MatchedKind::Unmatched => Finding::Unmatched,
        MatchedKind::Unlimited => Finding::Unlimited,
        MatchedKind::Denied => Finding::Denied,
        MatchedKind::Limited(origins) => {
            let own = origins.iter().zip(answers);
            let tightest = own.min_by(|(_, (one, a)), (_, (other, b))| tightness(one, a, other, b));
            tightest.map_or(Finding::Unmatched, |(from, (charge, verdict))| {
                rule = from.rule;
                let named = from.limit.filter(|_| !item.is_overridden);
                Finding::Limited(Tightest {
                    quota: charge.limit.quota(),
                    name: named.and_then(|limit| limit.name.as_deref()),
                    role: charge.role,
                    verdict: *verdict,
                })
            })
        }
    };
    let metadata = match finding {
        Finding::Limited(_) if !item.is_overridden => rule.and_then(|rule| rule.about().metadata.as_deref()),
        _ => None,
    };
    Part { rule: rule.map(Rule::about), finding, metadata }
}

/// Orders the tighter limit first: refused by a counter, refused by policy `closed`, failed, admitted, admitted unchecked. Ties
/// are broken by the smaller remaining share, then by the longer wait. Limits of source and overlay may have different roles: a
/// shadow limit comes last, and a limit that refuses alone comes before a quota.
fn tightness(one: &Charge, a: &Verdict, other: &Charge, b: &Verdict) -> Ordering {
    let rank = |verdict: &Verdict| match (verdict.outcome, verdict.provenance) {
        (Outcome::Refused, Provenance::Closed) => 1,
        (Outcome::Refused, _) => 0,
        (Outcome::Failed, _) => 2,
        (Outcome::Admitted, Provenance::Open | Provenance::Spared) => 4,
        (Outcome::Admitted, _) => 3,
    };
    let share = |verdict: &Verdict, of: &Charge| u64::from(verdict.remaining) * u64::from(of.limit.capacity());
    let (one_role, other_role) = (one.role, other.role);
    (one_role.is_shadow(), rank(a), one_role.is_quota())
        .cmp(&(other_role.is_shadow(), rank(b), other_role.is_quota()))
        .then(share(a, other).cmp(&share(b, one)))
        .then(b.duration_until_reset().cmp(&a.duration_until_reset()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithm::{Algorithm, Limit};
    use crate::model::key::KeyPart;
    use crate::model::{Charging, Colocation, CounterKey, Hits, Quota, Role, StorePolicies, Unit, Window};

    fn charge(limit: u32) -> Charge {
        let window = Window::of_unit(Unit::Minute);
        let limit = Limit::new(Algorithm::FixedWindow, Quota::new(limit, window)).expect("it can be counted");
        let part = std::iter::once(KeyPart::own(b"k", b"v"));
        let key = CounterKey::new("d", part, Colocation::Descriptor, limit.algorithm().name(), window.length());
        let (hits, role, charging, policies) = (Hits::take(9), Role::Enforce, Charging::Each, StorePolicies::default());
        Charge {
            key,
            limit,
            hits,
            descriptor: 0,
            role,
            charging,
            policies,
            remembers_refusals: true,
            lease: None,
            ask: 0,
        }
    }

    #[test]
    fn a_limit_that_refuses_is_shown_before_one_that_failed_and_that_before_those_with_the_least_left() {
        let of = |outcome, provenance, remaining, secs| Verdict {
            remaining,
            reset: Micros::from_secs(secs),
            ..Verdict::uncounted(outcome, provenance)
        };
        let admitted = |remaining, secs| of(Outcome::Admitted, Provenance::Store, remaining, secs);
        let in_order = [
            (10, of(Outcome::Refused, Provenance::Store, 5, 1)),
            (10, of(Outcome::Refused, Provenance::Closed, 0, 60)),
            (10, of(Outcome::Failed, Provenance::Error, 0, 0)),
            (10, admitted(0, 60)),
            (10, admitted(0, 1)),
            (20, admitted(5, 1)),
            (10, admitted(4, 60)),
            (10, of(Outcome::Admitted, Provenance::Open, 0, 60)),
        ]
        .map(|(limit, verdict)| (charge(limit), verdict));
        for (index, (one, a)) in in_order.iter().enumerate() {
            for (other, b) in &in_order[index + 1..] {
                assert_eq!(tightness(one, a, other, b), Ordering::Less, "{a:?}, {b:?}");
                assert_eq!(tightness(other, b, one, a), Ordering::Greater, "{b:?}, {a:?}");
            }
        }
    }
}
