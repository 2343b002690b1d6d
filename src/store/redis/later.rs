//! Charges for which no caller waits: hits that were decided without Redis, and leases, whose hits are spent later.

use tokio::time::Instant;

use super::Redis;
use super::script::Mode;
use crate::algorithm::Charge;
use crate::model::{Micros, Outcome, Verdict};
use crate::store::{Granted, StoreError};

impl Redis {
    pub(super) async fn settle_by(&self, charges: &[Charge], until: Instant) -> Vec<bool> {
        let groups = self.0.groups(charges, false);
        let outcomes = self.0.ask(&groups, charges, Mode::Later, until).await;
        let mut settled = vec![true; charges.len()];
        for (group, outcome) in groups.iter().zip(outcomes) {
            // A script that was sent may have been executed.
            let is_settled = !matches!(outcome, Err(StoreError::Overloaded | StoreError::Down { .. }));
            group.members.iter().for_each(|&member| settled[member] = is_settled);
        }
        settled
    }

    pub(super) async fn lease_by(&self, charges: &[Charge], until: Instant) -> Vec<Option<Granted>> {
        let groups = self.0.groups(charges, false);
        let outcomes = self.0.ask(&groups, charges, Mode::Lease, until).await;
        let mut granted = vec![None; charges.len()];
        for (group, outcome) in groups.iter().zip(outcomes) {
            let Ok((at, rows)) = outcome else { continue };
            for (&member, row) in group.members.iter().zip(rows.iter()) {
                granted[member] = row.answer.map(|Verdict { room: hits, remaining, reset, retry, .. }| Granted {
                    at,
                    hits: hits.into(),
                    remaining,
                    reset,
                    retry,
                });
            }
        }
        granted
    }
}

/// Returns the hits for a lease that were charged at `at` beside a charge with this verdict, which has their number in `room` if it is admitted.
pub(super) fn granted_beside(verdict: &mut Verdict, at: Micros) -> Granted {
    let hits = match verdict.outcome {
        Outcome::Admitted => std::mem::replace(&mut verdict.room, verdict.remaining),
        _ => 0,
    };
    let Verdict { remaining, reset, retry, .. } = *verdict;
    Granted { at, hits: hits.into(), remaining, reset, retry }
}
