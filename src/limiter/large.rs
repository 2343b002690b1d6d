//! Decides a large request slice by slice. Memory is bounded by its charges, and other requests are served between slices.

use std::time::Duration;

use super::notable::Notables;
use super::{Limiter, asked, fold, noting_known_good, origins, ruled};
use crate::model::policy::OutcomeCount;
use crate::model::{Decision, Descriptor, Micros, Outcome, Provenance, Request, UsageWarning, Wait};
use crate::rules::{Matched, RuleSet, Survey};
use crate::store::Verdicts;
use crate::store::guard::TakenCharge;

/// Maximum number of warnings that are kept: 16, the number that fits in the header that lists them.
const MOST_WARNINGS: usize = 16;

/// A large request that is being decided. Its descriptors come in slices, up to three times:
///
/// 1. All slices are surveyed.
/// 2. Each slice is decided.
/// 3. If the request is refused and [`Large::is_taken`] is true, each slice is given back.
pub struct Large<'a> {
    limiter: &'a Limiter,
    survey: Survey<'a>,
    /// Number of descriptors that are decided.
    decided: usize,
    charge_outcomes: OutcomeCount,
    /// The same outcomes, with every charge that policy `closed` refused counted as admitted.
    checked_outcomes: OutcomeCount,
    has_failed: bool,
    retry: Retry,
    unavailable_for: Option<Micros>,
    wait: Wait,
    warnings: Vec<UsageWarning<'a>>,
    notables: Notables<'a>,
    /// Hits to give back if the request is refused: one item for each charge so far, in order.
    taken: Vec<Option<TakenCharge>>,
    given_back: usize,
}

/// Time until all limits that refuse would let the request pass.
#[derive(Clone, Copy, Debug, Default)]
struct Retry {
    /// Longest wait for a limit that refuses alone.
    longest: Option<Micros>,
    /// True if a limit that refuses alone never lets the request pass, or is not exposed.
    is_never: bool,
    is_alone: bool,
    /// Shortest wait for a quota.
    shortest: Option<Micros>,
}

impl Limiter {
    /// Starts to decide a large request of `domain` by `rules`.
    pub fn large<'a>(&'a self, rules: &'a RuleSet, domain: &str) -> Large<'a> {
        Large {
            limiter: self,
            survey: rules.survey(domain),
            decided: 0,
            charge_outcomes: OutcomeCount::default(),
            checked_outcomes: OutcomeCount::default(),
            has_failed: false,
            retry: Retry::default(),
            unavailable_for: None,
            wait: Wait::default(),
            warnings: Vec::new(),
            notables: Notables::default(),
            taken: Vec::new(),
            given_back: 0,
        }
    }
}

impl<'a> Large<'a> {
    /// Surveys the next descriptors and charges nothing.
    pub fn survey(&mut self, descriptors: &[Descriptor]) {
        self.survey.add(descriptors);
    }

    /// Decides the next slice, within the `timeout` of the caller. The parts and answers of the returned decision belong
    /// to the slice. Its outcome is that of the slice alone, not of the request.
    pub async fn decide(&mut self, slice: &Request, timeout: Option<Duration>) -> Decision<'a> {
        let generation = self.survey.rules().generation();
        let matched = self.survey.find(slice);
        let decision = match matched.ruling {
            Some(ruling) => ruled(matched, ruling, generation),
            None => {
                let (verdicts, taken) = self.limiter.guard.take(&matched.charges, timeout.into()).await;
                self.taken.extend(taken);
                self.add(&matched, &verdicts);
                fold(matched, &verdicts, generation)
            }
        };
        self.notables.add(self.decided, slice, &decision);
        self.decided += slice.descriptors().len();
        decision
    }

    /// Returns true if a charge was taken that must be given back when the request is refused.
    pub fn is_taken(&self) -> bool {
        self.taken.iter().any(Option::is_some)
    }

    /// Returns true if the slices decided so far refuse the request.
    pub fn is_refused(&self) -> bool {
        self.charge_outcomes.is_refused()
    }

    /// Gives back the charges of the next slice. The slices must be the same as for [`Large::decide`], in the same order.
    pub async fn give_back(&mut self, slice: &Request) {
        let charges = self.survey.find(slice).charges;
        let end = (self.given_back + charges.len()).min(self.taken.len());
        let taken = &self.taken[self.given_back..end];
        if taken.iter().any(Option::is_some) {
            self.limiter.guard.give_back(&charges, taken).await;
        }
        self.given_back = end;
    }

    /// Returns true if all charges that were taken are given back.
    pub fn is_given_back(&self) -> bool {
        self.given_back >= self.taken.len()
    }

    /// Returns the decision on the whole request, and the part of the request that it describes: the descriptors for headers,
    /// body, metadata, metrics and spans. All other descriptors are left out.
    pub fn conclude(self, request: &Request) -> (Request, Decision<'a>) {
        let Self {
            survey,
            notables,
            charge_outcomes,
            checked_outcomes,
            has_failed,
            unavailable_for,
            wait,
            warnings,
            retry,
            ..
        } = self;
        let generation = survey.rules().generation();
        let (descriptors, parts, answers, hidden) = notables.into_parts();
        let request = request.with(descriptors);
        let matched = survey.find(&request);
        let domain = matched.domain;
        let is_shadowed = matched.is_shadowed;
        if let Some(ruling) = matched.ruling {
            return (request, ruled(matched, ruling, generation));
        }
        let spares = charge_outcomes.is_refused();
        let outcome = match () {
            () if is_shadowed => Outcome::Admitted,
            () if spares => Outcome::Refused,
            () if has_failed => Outcome::Failed,
            () => Outcome::Admitted,
        };
        let is_asked = outcome == Outcome::Admitted && !is_shadowed;
        let (wait, warnings) = if is_asked { (wait, warnings) } else { Default::default() };
        let is_refused = outcome.is_refused();
        let decision = Decision {
            outcome,
            domain,
            parts,
            answers,
            ruling: None,
            retry: is_refused.then(|| retry.wait()).flatten(),
            unavailable_for: unavailable_for.filter(|_| is_refused && !checked_outcomes.is_refused()),
            wait,
            warnings,
            known_good: None,
            hidden,
            is_refusal_shadowed: is_shadowed && spares,
            is_unread: false,
            generation,
        };
        let decision = noting_known_good(decision, survey.rules(), &request);
        (request, decision)
    }

    /// Adds the charges of a slice to the result of the whole request.
    fn add(&mut self, matched: &Matched<'a>, verdicts: &Verdicts) {
        for ((_, from), (charge, verdict)) in origins(matched).zip(matched.charges.iter().zip(verdicts)) {
            let mut charge_outcome = charge.charge_outcome(verdict.outcome);
            charge_outcome.descriptor += self.decided;
            self.charge_outcomes.add(charge_outcome);
            let is_unchecked = verdict.provenance == Provenance::Closed;
            charge_outcome.refused &= !is_unchecked;
            self.checked_outcomes.add(charge_outcome);
            if charge.role.is_shadow() {
                continue;
            }
            self.has_failed |= verdict.outcome.is_failed();
            if is_unchecked {
                self.unavailable_for = self.unavailable_for.max(Some(verdict.duration_until_reset()));
            }
            if verdict.outcome.is_refused() {
                let is_exposed = from.rule.is_none_or(|rule| rule.about().is_exposed);
                self.retry.add(verdict.retry.filter(|_| is_exposed), charge.role.is_quota());
            }
        }
        let (wait, warnings) = asked(matched, verdicts);
        self.wait = Wait { header: self.wait.header.max(wait.header), hold: self.wait.hold.max(wait.hold) };
        let room = MOST_WARNINGS.saturating_sub(self.warnings.len());
        self.warnings.extend(warnings.into_iter().filter(|warning| warning.rule.is_exposed).take(room));
    }
}

impl Retry {
    fn add(&mut self, wait: Option<Micros>, is_quota: bool) {
        if is_quota {
            self.shortest = match (self.shortest, wait) {
                (Some(one), Some(other)) => Some(one.min(other)),
                (one, other) => one.or(other),
            };
            return;
        }
        self.is_alone = true;
        self.is_never |= wait.is_none();
        self.longest = self.longest.max(wait);
    }

    fn wait(self) -> Option<Micros> {
        if self.is_alone { self.longest.filter(|_| !self.is_never) } else { self.shortest }
    }
}
