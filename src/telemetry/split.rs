//! Where on its limit the hits of a charge fall, by the reference's arithmetic.

use crate::model::{Answered, Provenance};

/// The hits of one charge, by where on its limit they fall.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Split {
    /// Those of a charge that fits.
    pub(super) within: u64,
    /// Those that fit, beyond the near ratio.
    pub(super) near: u64,
    /// Those beyond the limit.
    pub(super) over: u64,
}

impl Split {
    /// The hits of this charge, near from that share of the limit on.
    pub(super) fn of(answer: &Answered<'_>, near_ratio: f32) -> Self {
        let Answered { verdict, capacity, is_spared, .. } = answer;
        let (hits, limit) = (answer.hits.taken(), u64::from(*capacity));
        match (verdict.provenance, verdict.outcome.is_refused()) {
            (Provenance::Store | Provenance::Known, _) => {}
            // Of an instance's own part of a limit nobody knows where it stands.
            (Provenance::Local, true) => return Self { over: hits, ..Self::default() },
            (Provenance::Local, false) => return Self { within: hits, ..Self::default() },
            // Nothing was counted.
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
        let used = limit.saturating_sub(verdict.remaining.into());
        let after = if *is_spared { used + hits } else { used };
        let before = after.saturating_sub(hits);
        let near = match after > near {
            true if before >= near => hits,
            true => after - near,
            false => 0,
        };
        Self { within: hits, near, over: 0 }
    }
}

/// From how many hits on a limit is near, computed as the reference does it, in 32 bits.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    reason = "the reference's own arithmetic; the ratio is from 0 to 1"
)]
pub(super) fn near(limit: u32, ratio: f32) -> u64 {
    (limit as f32 * ratio).floor() as u64
}
