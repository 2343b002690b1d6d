//! Charges for which no caller waits: hits that were decided without Redis, leases, whose hits are spent later, and hits that are given back.

use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::{Instant, sleep};

use super::script::{Mode, Requests};
use super::script_call::{self, ScriptCall};
use super::{Redis, ScriptTaken, script_cost};
use crate::algorithm::Charge;
use crate::model::{Micros, Outcome, Verdict};
use crate::store::{Granted, StoreError};

/// Pause before an undo is tried again where a node takes no more calls: 10 ms, the time in which it answers those in flight.
const UNDO_AGAIN: Duration = Duration::from_millis(10);
/// Time for an undo: 1 s. An undo carries the time of its charge, so a late one is still correct.
const UNDO_BUDGET: Duration = Duration::from_secs(1);

impl Redis {
    pub(super) async fn settle_by(&self, charges: &[Charge], until: Instant) -> Vec<bool> {
        let groups = self.0.groups(charges, Mode::Later);
        let outcomes = self.0.ask(&groups, charges, until).await;
        let mut settled = vec![true; charges.len()];
        for (group, outcome) in groups.iter().zip(outcomes) {
            // A script that was sent may have been executed.
            let is_settled = !matches!(outcome, Err(StoreError::Overloaded | StoreError::Down { .. }));
            group.members.iter().for_each(|&member| settled[member] = is_settled);
            let rows = outcome.iter().flat_map(|(_, rows)| rows.iter());
            group
                .members
                .iter()
                .zip(rows)
                .filter(|(_, row)| row.is_unsaved)
                .for_each(|(&member, _)| settled[member] = false);
        }
        settled
    }

    pub(super) async fn lease_by(&self, charges: &[Charge], until: Instant) -> Vec<Option<Granted>> {
        let groups = self.0.groups(charges, Mode::Lease);
        let outcomes = self.0.ask(&groups, charges, until).await;
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

    pub(super) async fn give_back(&self, taken: Vec<ScriptTaken>) {
        let until = Instant::now() + UNDO_BUDGET;
        let all = taken.iter().map(|ScriptTaken { is_per_second, slot, charges }| {
            let count = charges.len();
            let cost = script_cost(charges.iter().map(|(charge, _)| charge));
            let request = move |_, requests: &mut Requests| requests.undo(&self.0.prefix, charges);
            async move {
                let servers = self.0.servers(*is_per_second);
                let call = [ScriptCall { request: &request, cost, expects: None }];
                // An undo that was not sent is tried again, at the node that then has the slot. A lost one leaves the count too high until the
                // counter expires.
                loop {
                    let Some(node) = servers.node(*slot) else { return servers.nowhere().lost_undo(count) };
                    match script_call::run(servers, &node, None, &call, until).await.as_slice() {
                        [Err(StoreError::Overloaded | StoreError::Down { .. })] if Instant::now() < until => {}
                        [Ok(_)] => return,
                        _ => return node.metrics().lost_undo(count),
                    }
                    sleep(UNDO_AGAIN).await;
                }
            }
        });
        join_all(all).await;
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
