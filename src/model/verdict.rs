//! The answer for one charge.

use super::time::Micros;

/// Whether hits may be spent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// They may.
    Admitted,
    /// They may not.
    Refused,
}

impl Outcome {
    /// Admitted when `admitted` holds.
    pub const fn admitted_if(admitted: bool) -> Self {
        if admitted { Self::Admitted } else { Self::Refused }
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
}

/// The answer for one charge against one limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// Admitted or refused.
    pub outcome: Outcome,
    /// Hits that could still be taken now.
    pub remaining: u32,
    /// Refused: until this charge would fit, or until the counter is idle if it never can. Admitted: until the counter
    /// is idle. A fixed window: always until its end.
    pub reset: Micros,
    /// How long the caller has to wait; `None` when admitted, and when waiting does not help.
    pub retry: Option<Micros>,
    /// Where the answer comes from.
    pub provenance: Provenance,
}
