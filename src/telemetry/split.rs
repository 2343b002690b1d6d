//! Division of a charge's hits into within, near and over its limit, by the reference's arithmetic.

use crate::model::{Answered, Provenance};

/// Hits of one charge, by their place on its limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Split {
    /// Hits of an admitted charge.
    pub(super) within: u64,
    /// Hits up to the limit but beyond the near ratio, also of a refused charge.
    pub(super) near: u64,
    /// Hits of a refused charge beyond the limit.
    pub(super) over: u64,
}

impl Split {
    /// Divides the hits of a charge. Hits beyond `near_ratio` of the limit are near it.
    pub(super) fn of(answer: &Answered<'_>, near_ratio: f32) -> Self {
        let Answered { verdict, capacity, .. } = answer;
        let (hits, limit) = (answer.hits.taken(), u64::from(*capacity));
        match (verdict.provenance, verdict.outcome.is_refused()) {
            (Provenance::Store | Provenance::Known | Provenance::Lease, _) => {}
            // The position within an instance's own part of a limit is unknown.
            (Provenance::Local, true) => return Self { over: hits, ..Self::default() },
            (Provenance::Local, false) => return Self { within: hits, ..Self::default() },
            // The store counted nothing.
            _ => return Self::default(),
        }
        let near = near(*capacity, near_ratio);
        if verdict.outcome.is_refused() {
            let before = limit.saturating_sub(verdict.room.into());
            let over = (before + hits).saturating_sub(limit);
            if before >= limit || over == 0 {
                return Self { over: hits, ..Self::default() };
            }
            return Self { over, near: limit.saturating_sub(near.max(before)), within: 0 };
        }
        // The reference reads a counter that it spared as one that it charged.
        let after = limit.saturating_sub(verdict.remaining.into());
        let before = after.wrapping_sub(hits);
        let near = match after > near {
            true if before >= near => hits,
            true => after - near,
            false => 0,
        };
        Self { within: hits, near, over: 0 }
    }
}

/// Returns the number of hits beyond which a limit is near; computed in 32 bits, as in the reference.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    reason = "the reference's own arithmetic; the ratio is from 0 to 1"
)]
pub(super) fn near(limit: u32, ratio: f32) -> u64 {
    (limit as f32 * ratio).floor() as u64
}
