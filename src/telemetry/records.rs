//! Memory of the last decisions of this instance, for the person who asks who is refused and why.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::decision_id::{DecisionId, DecisionIds, DigestPart, Made, Meaning};
use super::headroom::Headroom;
use super::page::Page;
use super::recent::{RecentRefusals, Refused};
use super::sample::{SAMPLE, is_sampled};
use super::tap::Tap;
use super::top::Top;
use super::unmatched::Unmatched;
use crate::model::{Clock, Deciding, Decision, Micros, Request};

/// Records of decisions, in the memory of this process only.
pub struct Records {
    /// The last refusals of each rule.
    pub recent: RecentRefusals,
    /// Descriptors, domains and keys that no rule matches.
    pub unmatched: Unmatched,
    /// The descriptors that are refused or asked about most.
    pub top: Top,
    /// Decisions as they are made.
    pub tap: Arc<Tap>,
    headroom: Headroom,
    ids: Option<DecisionIds>,
    clock: Arc<dyn Clock>,
    /// Number of requests.
    requests: AtomicU64,
}

/// Maximum number of descriptors of a request that are counted as activity, and of its shadow refusals that are kept: 8.
const MOST_OF_REQUEST: usize = 8;

impl fmt::Debug for Records {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Records").finish_non_exhaustive()
    }
}

impl Records {
    /// Returns empty records; `clock` is their time. Refusals are kept for `keep`. Without `ids`, decisions have no ids.
    pub fn new(clock: Arc<dyn Clock>, keep: Micros, ids: Option<DecisionIds>) -> Self {
        let recent = RecentRefusals::new(Arc::clone(&clock), keep);
        let unmatched = Unmatched::new(Arc::clone(&clock));
        Self {
            recent,
            unmatched,
            top: Top::new(Arc::clone(&clock)),
            tap: Arc::new(Tap::new(Arc::clone(&clock))),
            headroom: Headroom::default(),
            ids,
            clock,
            requests: AtomicU64::new(0),
        }
    }

    /// Erases what is older than it may be shown.
    pub fn forget_old(&self) {
        let now = self.clock.now();
        self.recent.forget_old(now);
        self.top.forget_old(now);
        self.headroom.close_windows(now);
    }

    /// Writes the metrics of records.
    pub(super) fn write_to(&self, page: &mut Page) {
        self.headroom.write_to(page);
    }

    /// Returns an id for a decision.
    pub fn id(&self, request: &Request, decision: &Decision<'_>) -> Option<DecisionId> {
        let ids = self.ids.as_ref()?;
        let kept_by = |deciding, refused| DigestPart::of(self.recent.digest(request, decision, deciding, &refused));
        let meaning = if decision.outcome.is_refused() {
            let deciding = decision.deciding();
            Meaning::Refused(kept_by(deciding, Refused::of(decision, deciding)))
        } else {
            let first = decision.shadow_refusals().first().copied();
            let by_first = first.map(|first| kept_by(first.0, Refused::in_shadow(decision, first)));
            by_first.map_or(Meaning::Admitted, Meaning::AdmittedByShadow)
        };
        Some(ids.next(meaning, self.clock.now()))
    }

    /// Returns the decision of an id. `None` if this instance has not made it.
    pub fn made(&self, id: DecisionId) -> Option<Made> {
        self.ids.as_ref()?.read(id, self.clock.now())
    }

    /// Records a decision.
    pub(super) fn decided(&self, request: &Request, decision: &Decision<'_>, deciding: Deciding<'_>) {
        self.unmatched.record(request, decision);
        let number = self.requests.fetch_add(1, Ordering::Relaxed);
        if is_sampled(number, SAMPLE) {
            let now = self.clock.now();
            let limited = decision.parts.iter().enumerate().filter_map(|(index, part)| Some((index, part, part.rule?)));
            for (descriptor, part, rule) in limited.take(MOST_OF_REQUEST) {
                let entries = self.recent.hash_entries(request, Some(descriptor));
                self.top.asked((request, decision, descriptor), &rule.path, entries, now);
                self.headroom.saw(part, entries, now);
            }
        }
        self.unmatched.look_for_keys(request, decision, number);
        self.concluded(request, decision, deciding);
    }

    /// Records what is of the whole request: nothing if it is admitted without a shadow mode and nobody listens.
    #[inline]
    fn concluded(&self, request: &Request, decision: &Decision<'_>, deciding: Deciding<'_>) {
        if self.tap.is_heard() || decision.is_refused_or_shadowed() {
            self.record_heard_or_refused(request, decision, deciding);
        }
    }

    #[inline(never)]
    fn record_heard_or_refused(&self, request: &Request, decision: &Decision<'_>, deciding: Deciding<'_>) {
        let now = self.clock.now();
        if self.tap.is_heard() {
            self.tap.send(request, decision, deciding, now);
        }
        if decision.outcome.is_refused() {
            self.refused(request, decision, deciding, now);
        }
        for shadow in decision.shadow_refusals().into_iter().take(MOST_OF_REQUEST) {
            let refused = Refused::in_shadow(decision, shadow);
            let entries = self.recent.hash_entries(request, refused.descriptor);
            self.recent.record(request, decision, shadow.0, &refused, entries, now);
        }
    }

    fn refused(&self, request: &Request, decision: &Decision<'_>, deciding: Deciding<'_>, now: Micros) {
        let refused = Refused::of(decision, deciding);
        let entries = self.recent.hash_entries(request, refused.descriptor);
        if let (Some(rule), Some(descriptor)) = (deciding.rule, refused.descriptor) {
            self.top.refused((request, decision, descriptor), &rule.path, entries, now);
        }
        self.recent.record(request, decision, deciding, &refused, entries, now);
    }
}
