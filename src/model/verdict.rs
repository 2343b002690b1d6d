//! The answer for one charge.

use super::time::Micros;

/// Result of a charge or a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The hits may be spent.
    Admitted,
    /// The hits may not be spent.
    Refused,
    /// Unknown: the store did not answer, and the failure policy returns an error to the caller.
    Failed,
}

impl Outcome {
    /// All outcomes, in the order of their discriminants.
    pub const ALL: [Self; 3] = [Self::Admitted, Self::Refused, Self::Failed];

    /// Returns the name in metrics, spans and logs.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Admitted => "admitted",
            Self::Refused => "refused",
            Self::Failed => "failed",
        }
    }

    /// Returns `Admitted` if `admitted` is true, else `Refused`.
    pub const fn admitted_if(admitted: bool) -> Self {
        if admitted { Self::Admitted } else { Self::Refused }
    }

    /// Returns true if the outcome is unknown.
    pub const fn is_failed(self) -> bool {
        matches!(self, Self::Failed)
    }

    /// Returns true for a refusal.
    pub const fn is_refused(self) -> bool {
        matches!(self, Self::Refused)
    }
}

/// Origin of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Provenance {
    /// The store answered.
    Store,
    /// The store did not answer, and nothing decided in its place.
    Error,
    /// The store did not answer: admitted unchecked.
    Open,
    /// The store did not answer: refused unchecked.
    Closed,
    /// The store did not answer: the embedded store of this instance decided alone.
    Local,
    /// The store was not called: its last reply already refuses.
    Known,
    /// The store was not called: a lease paid, whose hits the store had charged before.
    Lease,
    /// No store was called: another charge of the request is already known to be refused, which decides the request.
    Spared,
}

impl Provenance {
    /// Returns its word in metadata, metrics and logs.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Store => "store",
            Self::Error => "error",
            Self::Open => "open",
            Self::Closed => "closed",
            Self::Local => "local",
            Self::Known => "known",
            Self::Lease => "lease",
            Self::Spared => "spared",
        }
    }

    /// Returns true if a store counted the hits, so that limit and remaining are meaningful.
    pub const fn is_counted(self) -> bool {
        matches!(self, Self::Store | Self::Local | Self::Known | Self::Lease)
    }

    /// Returns true if a policy answered in place of the store.
    pub const fn is_policy(self) -> bool {
        matches!(self, Self::Error | Self::Open | Self::Closed | Self::Local)
    }
}

/// The answer for one charge against one limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// Result of the charge.
    pub outcome: Outcome,
    /// Hits that can still be taken now.
    pub remaining: u32,
    /// Hits that could be taken just before a refused charge. If the refused hits stay on the counter, this is more than
    /// `remaining`.
    pub room: u32,
    /// Time until the counter is idle: the whole limit is available again. In a fixed window: time until its end.
    pub reset: Micros,
    /// Time until this charge would fit; `None` if it was admitted or if waiting does not help.
    pub retry: Option<Micros>,
    /// Wait of an admitted request before it continues, if its limit has a delay.
    pub delay: Micros,
    /// Origin of the answer.
    pub provenance: Provenance,
}

impl Verdict {
    /// Returns the answer for a charge that no counter decided.
    pub const fn uncounted(outcome: Outcome, provenance: Provenance) -> Self {
        let (reset, delay) = (Micros::ZERO, Micros::ZERO);
        Self { outcome, remaining: 0, room: 0, reset, retry: None, delay, provenance }
    }

    /// Returns the answer of a counter that has so many hits more.
    #[must_use]
    pub fn with_more(self, hits: u64) -> Self {
        let remaining = self.remaining.saturating_add(u32::try_from(hits).unwrap_or(u32::MAX));
        Self { remaining, room: remaining, ..self }
    }

    /// Returns true if the charge was refused and never fits, however long its caller waits.
    pub fn never_fits(&self) -> bool {
        self.outcome.is_refused() && self.retry.is_none()
    }

    /// Returns the remaining hits that the client is shown: 0 if the charge never fits, so that the client does not try again.
    pub fn remaining_for_client(&self) -> u32 {
        if self.never_fits() { 0 } else { self.remaining }
    }

    /// Returns the value of the protocol field of this name: the time until the charge fits, or the time until the counter is
    /// idle if waiting does not help.
    pub fn duration_until_reset(&self) -> Micros {
        self.retry.unwrap_or(self.reset)
    }
}
