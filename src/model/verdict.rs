//! The answer for one charge.

use super::time::Micros;

/// Whether hits may be spent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// They may.
    Admitted,
    /// They may not.
    Refused,
    /// Nobody knows: the store could not be asked, and the operator wants the caller told so.
    Failed,
}

impl Outcome {
    /// Admitted when `admitted` holds.
    pub const fn admitted_if(admitted: bool) -> Self {
        if admitted { Self::Admitted } else { Self::Refused }
    }

    /// Whether it is unknown.
    pub const fn is_failed(self) -> bool {
        matches!(self, Self::Failed)
    }

    /// Whether it is a refusal.
    pub const fn is_refused(self) -> bool {
        matches!(self, Self::Refused)
    }
}

/// How an answer came about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Provenance {
    /// The store was asked.
    Store,
    /// The store could not be asked, and nobody was.
    Error,
    /// The store could not be asked: admitted unchecked.
    Open,
    /// The store could not be asked: refused unchecked.
    Closed,
    /// The store could not be asked: decided by the embedded store of this instance alone.
    Local,
    /// The store was not asked: its last reply says that it refuses.
    Known,
    /// Nobody was asked: another charge of the request is known to be refused, which decides the request.
    Spared,
}

impl Provenance {
    /// Its word in metadata, metrics and logs.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Store => "store",
            Self::Error => "error",
            Self::Open => "open",
            Self::Closed => "closed",
            Self::Local => "local",
            Self::Known => "known",
            Self::Spared => "spared",
        }
    }

    /// Whether some store counted the hits, so that limit and remaining mean something.
    pub const fn is_counted(self) -> bool {
        matches!(self, Self::Store | Self::Local | Self::Known)
    }

    /// Returns true where a policy answered in place of the store.
    pub const fn is_policy(self) -> bool {
        matches!(self, Self::Error | Self::Open | Self::Closed | Self::Local)
    }
}

/// The answer for one charge against one limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// Admitted or refused.
    pub outcome: Outcome,
    /// Hits that could still be taken now.
    pub remaining: u32,
    /// Of a refusal: hits that could have been taken in place of those that were refused, and now cannot if they stay.
    pub room: u32,
    /// Until the counter is idle, and all of the limit is there again. A fixed window: until its end.
    pub reset: Micros,
    /// How long the caller has to wait until this charge would fit; `None` when admitted, and when waiting does not help.
    pub retry: Option<Micros>,
    /// How long an admitted request is to wait before it goes on, where its limit asks for that.
    pub delay: Micros,
    /// Where the answer comes from.
    pub provenance: Provenance,
}

impl Verdict {
    /// The answer for a charge that no counter was asked about.
    pub const fn uncounted(outcome: Outcome, provenance: Provenance) -> Self {
        let (reset, delay) = (Micros::ZERO, Micros::ZERO);
        Self { outcome, remaining: 0, room: 0, reset, retry: None, delay, provenance }
    }

    /// What the protocol calls so: how long to wait where waiting helps, and else how long until the counter is idle.
    pub fn duration_until_reset(&self) -> Micros {
        self.retry.unwrap_or(self.reset)
    }
}
