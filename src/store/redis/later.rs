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
pub(super) fn granted_beside(charge: &Charge, verdict: &mut Verdict, at: Micros) -> Granted {
    let hits = match verdict.outcome {
        Outcome::Admitted => std::mem::replace(&mut verdict.room, verdict.remaining),
        _ => 0,
    };
    let Verdict { remaining, reset, retry, .. } = *verdict;
    // The wait for one hit.
    let retry = retry.filter(|_| remaining == 0 && charge.hits.taken() == 1);
    Granted { at, hits: hits.into(), remaining, reset, retry }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithm::{Algorithm, Limit};
    use crate::model::key::KeyPart;
    use crate::model::{
        Charging, Colocation, CounterKey, Hits, Provenance, Quota, Role, StorePolicies, Unit, Verdict, Window,
    };

    #[test]
    fn a_refusal_of_several_hits_does_not_say_when_one_fits() {
        let limit = Limit::new(Algorithm::Gcra, Quota::new(10, Window::of_unit(Unit::Second))).unwrap();
        let user = std::iter::once(KeyPart::own(b"user", b"one"));
        let charge = |hits| Charge {
            key: CounterKey::new("d", user.clone(), Colocation::Descriptor, "gcra", Unit::Second.length()),
            limit,
            hits: Hits::take(hits),
            descriptor: 0,
            role: Role::Enforce,
            charging: Charging::Each,
            policies: StorePolicies::default(),
            remembers_refusals: true,
            lease: None,
            ask: 4,
        };
        let retry = Some(Micros::new(7));
        for (hits, remaining, expected) in [(1, 0, retry), (3, 0, None), (3, 2, None)] {
            let refused = Verdict::uncounted(Outcome::Refused, Provenance::Store);
            let mut refused = Verdict { remaining, room: 2, retry, ..refused };
            let granted = granted_beside(&charge(hits), &mut refused, Micros::ZERO);
            assert_eq!(
                (granted.hits, granted.retry, refused.room),
                (0, expected, 2),
                "{hits} hits, {remaining} remain"
            );
        }
        let admitted = Verdict::uncounted(Outcome::Admitted, Provenance::Store);
        let mut admitted = Verdict { remaining: 9, room: 4, ..admitted };
        let granted = granted_beside(&charge(1), &mut admitted, Micros::ZERO);
        assert_eq!((granted.hits, granted.remaining, admitted.room), (4, 9, 9));
    }
}
