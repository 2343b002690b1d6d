//! The few descriptors of a large request that its headers, body, metadata, metrics and spans describe.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::model::{
    Answered, Decision, Descriptor, Finding, Hidden, MOST_SHADOW_REFUSALS, Micros, Part, Request, Tightest,
};

/// Maximum number of limits that are kept for headers that list limits: 16, the number that fits in one header.
const MOST_LISTED: usize = 16;

/// A descriptor with its answers.
#[derive(Debug)]
struct Notable<'a> {
    descriptor: Descriptor,
    part: Part<'a>,
    answers: Vec<Answered<'a>>,
    hidden: Vec<Hidden>,
}

/// Reason why a descriptor is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum KeepReason {
    /// The first descriptor of the request.
    First,
    /// The n-th descriptor whose limit may be listed.
    Listed(usize),
    /// The first with a limit, and the first with a limit that this policy answered.
    Limited,
    Policy(&'static str),
    /// The first with a refusing limit; the first with one that is no quota; the first that refuses and is not exposed.
    Refused,
    RefusedAlone,
    RefusedUnexposed,
    /// The limit that three headers describe: among the exposed limits, and among all.
    Described,
    DescribedUnexposed,
    /// The exposed limit, no quota, that refuses longest, and the exposed limit that refuses shortest.
    Longest,
    Shortest,
    /// The first with a limit that failed.
    Failed,
    /// The first charge that a policy answered: any, and an enforced one.
    Unasked,
    EnforcedUnasked,
    /// The enforced charge with the longest delay.
    Delayed,
    /// The first with the n-th limit whose refusal a shadow mode keeps from the request.
    Shadowed(usize),
    /// The first quota that has room.
    QuotaWithRoom,
}

/// The kept descriptors, by reason: at most 50, one for each reason.
#[derive(Debug, Default)]
pub(super) struct Notables<'a> {
    kept: BTreeMap<KeepReason, (usize, Arc<Notable<'a>>)>,
    listed: usize,
    least: [Least; 2],
    longest: Option<Micros>,
    shortest: Option<Micros>,
    delay: Option<Micros>,
    /// Limits whose refusals a shadow mode keeps from the request.
    shadowed: Vec<Answered<'a>>,
}

/// Smallest `remaining` so far, as `described` in the headers compares it: 0 after a refusal that is no quota.
#[derive(Clone, Copy, Debug)]
struct Least(u32);

impl Default for Least {
    fn default() -> Self {
        Self(u32::MAX)
    }
}

impl<'a> Notables<'a> {
    /// Adds the next slice of a request. `begin` is the index of its first descriptor in the request.
    pub(super) fn add(&mut self, begin: usize, slice: &Request, decision: &Decision<'a>) {
        let mut answers = decision.answers.as_slice();
        for (index, part) in decision.parts.iter().enumerate() {
            let own = answers.iter().take_while(|answer| answer.descriptor == index).count();
            let (own, rest) = answers.split_at(own);
            answers = rest;
            let mut reasons = Vec::new();
            self.reasons(part, own, decision.is_refusal_shadowed, &mut reasons);
            if reasons.is_empty() {
                continue;
            }
            let hidden = decision.hidden.iter().filter(|hidden| hidden.descriptor == index).cloned();
            let notable = Arc::new(Notable {
                descriptor: slice.descriptors().get(index).cloned().unwrap_or_default(),
                part: part.clone(),
                answers: own.to_vec(),
                hidden: hidden.collect(),
            });
            for reason in reasons {
                self.kept.insert(reason, (begin + index, Arc::clone(&notable)));
            }
        }
    }

    /// Returns the kept descriptors, each once and in request order, with their parts, answers and hidden values.
    pub(super) fn into_parts(self) -> (Vec<Descriptor>, Vec<Part<'a>>, Vec<Answered<'a>>, Vec<Hidden>) {
        let kept: BTreeMap<usize, Arc<Notable<'a>>> = self.kept.into_values().collect();
        let (mut descriptors, mut parts, mut answers, mut hidden) = Default::default();
        let (d, p, a, h): (&mut Vec<_>, &mut Vec<_>, &mut Vec<_>, &mut Vec<_>) =
            (&mut descriptors, &mut parts, &mut answers, &mut hidden);
        for (descriptor, notable) in kept.values().enumerate() {
            d.push(notable.descriptor.clone());
            p.push(notable.part.clone());
            a.extend(notable.answers.iter().map(|answer| Answered { descriptor, ..*answer }));
            h.extend(notable.hidden.iter().map(|hidden| Hidden { descriptor, ..hidden.clone() }));
        }
        (descriptors, parts, answers, hidden)
    }

    /// Adds the reasons to keep this descriptor in place of those kept before for the same reasons.
    fn reasons(
        &mut self,
        part: &Part<'a>,
        answers: &[Answered<'a>],
        is_refusal_shadowed: bool,
        reasons: &mut Vec<KeepReason>,
    ) {
        let is_refused = part.outcome().is_refused();
        self.once(true, KeepReason::First, reasons);
        self.once(is_refused && !part.is_exposed(), KeepReason::RefusedUnexposed, reasons);
        // Where a rule denies the request, nothing is limited.
        self.once(matches!(part.finding, Finding::Denied), KeepReason::Refused, reasons);
        if let Finding::Limited(tightest) = &part.finding {
            self.limited(part, tightest, is_refused, reasons);
        }
        let mut quotas = answers.iter().filter(|answer| answer.role.is_quota()).peekable();
        let has_room = quotas.peek().is_some() && !quotas.any(|quota| quota.verdict.outcome.is_refused());
        self.once(has_room, KeepReason::QuotaWithRoom, reasons);
        for answer in answers {
            self.answered(answer, reasons);
            if answer.is_shadow_refusal(is_refusal_shadowed) {
                self.shadowed(answer, reasons);
            }
        }
    }

    fn shadowed(&mut self, answer: &Answered<'a>, reasons: &mut Vec<KeepReason>) {
        let is_kept = self.shadowed.iter().any(|kept| kept.is_of_same_limit(answer));
        if !is_kept && self.shadowed.len() < MOST_SHADOW_REFUSALS {
            reasons.push(KeepReason::Shadowed(self.shadowed.len()));
            self.shadowed.push(*answer);
        }
    }

    fn limited(&mut self, part: &Part<'a>, tightest: &Tightest<'a>, is_refused: bool, reasons: &mut Vec<KeepReason>) {
        let (verdict, is_quota) = (&tightest.verdict, tightest.role.is_quota());
        self.once(true, KeepReason::Limited, reasons);
        self.once(is_refused, KeepReason::Refused, reasons);
        self.once(is_refused && !is_quota, KeepReason::RefusedAlone, reasons);
        self.once(part.outcome().is_failed(), KeepReason::Failed, reasons);
        let is_policy = verdict.provenance.is_policy();
        self.once(is_policy, KeepReason::Policy(verdict.provenance.name()), reasons);
        if !verdict.provenance.is_counted() {
            return;
        }
        let is_refused_alone = is_refused && !is_quota;
        for (least, reason, is_eligible) in
            [(0, KeepReason::DescribedUnexposed, true), (1, KeepReason::Described, part.is_exposed())]
        {
            let Least(best) = &mut self.least[least];
            if is_eligible && (verdict.remaining < *best || is_refused_alone) {
                *best = if is_refused_alone { 0 } else { verdict.remaining };
                reasons.push(reason);
            }
        }
        if !part.is_exposed() {
            return;
        }
        if self.listed < MOST_LISTED {
            reasons.push(KeepReason::Listed(self.listed));
            self.listed += 1;
        }
        let wait = verdict.retry.unwrap_or(Micros::new(u64::MAX));
        if is_refused_alone && self.longest.is_none_or(|longest| wait >= longest) {
            self.longest = Some(wait);
            reasons.push(KeepReason::Longest);
        }
        if is_refused && self.shortest.is_none_or(|shortest| wait < shortest) {
            self.shortest = Some(wait);
            reasons.push(KeepReason::Shortest);
        }
    }

    fn answered(&mut self, answer: &Answered<'a>, reasons: &mut Vec<KeepReason>) {
        let Answered { role, verdict, .. } = answer;
        let is_unasked = verdict.provenance.is_policy();
        self.once(is_unasked, KeepReason::Unasked, reasons);
        if role.is_shadow() {
            return;
        }
        self.once(is_unasked, KeepReason::EnforcedUnasked, reasons);
        if self.delay.is_none_or(|delay| verdict.delay >= delay) && verdict.delay > Micros::ZERO {
            self.delay = Some(verdict.delay);
            reasons.push(KeepReason::Delayed);
        }
    }

    /// Adds `reason` if `holds` is true and no descriptor is kept for it yet.
    fn once(&self, holds: bool, reason: KeepReason, reasons: &mut Vec<KeepReason>) {
        if holds && !self.kept.contains_key(&reason) && !reasons.contains(&reason) {
            reasons.push(reason);
        }
    }
}
