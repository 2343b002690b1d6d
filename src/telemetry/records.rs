//! Memory of the last decisions of this instance, for the person who asks who is refused and why.

use std::sync::Arc;

use super::decision_id::{DecisionId, DecisionIds, DigestPart, Meaning};
use super::recent::RecentRefusals;
use super::top::Top;
use super::unmatched::Unmatched;
use crate::model::{Clock, Deciding, Decision, Request};

/// Records of decisions, in the memory of this process only.
#[derive(Debug)]
pub struct Records {
    /// The last refusals of each rule.
    pub recent: RecentRefusals,
    /// Descriptors, domains and keys that no rule matches.
    pub unmatched: Unmatched,
    /// The descriptors that are refused or asked about most.
    pub top: Top,
    ids: Option<DecisionIds>,
}

impl Records {
    /// Returns empty records; `clock` is their time. Without `ids`, decisions have no ids.
    pub fn new(clock: Arc<dyn Clock>, ids: Option<DecisionIds>) -> Self {
        let (recent, unmatched) = (RecentRefusals::new(Arc::clone(&clock)), Unmatched::new(Arc::clone(&clock)));
        Self { recent, unmatched, top: Top::new(clock), ids }
    }

    /// Returns an id for a decision.
    pub fn id(&self, request: &Request, decision: &Decision<'_>) -> Option<DecisionId> {
        let meaning = match decision.outcome.is_refused() {
            true => Meaning::Refused(DigestPart::of(self.recent.digest(request, decision, decision.deciding()))),
            false => Meaning::Admitted,
        };
        self.ids.as_ref().map(|ids| ids.next(meaning))
    }

    /// Returns the meaning of an id. `None` if this instance has not made it.
    pub fn meaning(&self, id: DecisionId) -> Option<Meaning> {
        self.ids.as_ref()?.read(id)
    }

    /// Records a decision.
    pub(super) fn decided(&self, request: &Request, decision: &Decision<'_>, deciding: Deciding<'_>) {
        self.unmatched.record(request, decision);
        self.unmatched.look_for_keys(request, decision);
        self.top.record(request, decision, deciding);
        if decision.outcome.is_refused() {
            self.recent.record(request, decision, deciding);
        }
    }

    /// Records a slice of a large request.
    pub(super) fn sliced(&self, slice: &Request, decision: &Decision<'_>) {
        if decision.domain.is_some() {
            self.unmatched.record(slice, decision);
        }
    }

    /// Records a large request, whose slices are recorded.
    pub(super) fn decided_large(&self, request: &Request, decision: &Decision<'_>, deciding: Deciding<'_>) {
        if decision.domain.is_none() {
            self.unmatched.record(request, decision);
        }
        if decision.outcome.is_refused() {
            self.top.record(request, decision, deciding);
            self.recent.record(request, decision, deciding);
        }
    }
}
