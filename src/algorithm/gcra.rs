//! Counts as the generic cell rate algorithm does: hits evenly spaced, and a burst ahead of time.
//! From ITU-T I.371; told as redis-cell tells it (limit, remaining, retry after, reset after).
//! Remembers what `meter` remembers: 16 bytes.
//! Exact: in any interval at most the burst plus the interval's share of the limit.
//! Choose `fixed_window` for quotas that start anew with the hour or the day.

use super::{Count, Step, meter};
use crate::model::{Hits, InvalidQuota, Micros, Quota};

/// Hits evenly spaced.
pub struct Gcra;

impl Count for Gcra {
    type State = meter::State;
    const HAS_BURST: bool = true;
    const COUNTS_REFUSED_WHEN_EACH: bool = false;

    fn check(quota: Quota) -> Result<(), InvalidQuota> {
        quota.exact_in_ticks()
    }

    fn step(state: &meter::State, now: Micros, hits: Hits, quota: Quota) -> Step<meter::State> {
        meter::step(state, now, hits, quota)
    }

    fn idle_at(state: &meter::State, quota: Quota) -> Micros {
        meter::idle_at(state, quota)
    }
}
