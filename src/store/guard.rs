//! Where the failure of a store becomes a verdict. Stores can fail; the guard above them cannot.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use super::memory::Memory;
use super::{Answers, Charged, Store, StoreError, Verdicts};
use crate::algorithm::{Charge, Limit};
use crate::model::policy::is_request_refused;
use crate::model::{Clock, FailurePolicy, Hits, Micros, Outcome, Provenance, Verdict};

/// Asks a store, and answers by policy what it does not.
pub struct Guard {
    store: Arc<dyn Store>,
    deadline: Deadline,
    /// Decides under the policy `local`.
    local: Arc<Memory>,
    replicas: NonZeroU32,
    clock: Arc<dyn Clock>,
}

/// How long the store may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deadline {
    /// Half of the time the caller waits, from 1 to 100 ms; 10 ms when it does not say.
    Auto,
    /// None: the store is in this process and answers at once, so it is asked however short the caller waits.
    AtOnce,
    /// As long as this.
    Fixed(Duration),
}

impl Deadline {
    /// Below 1 ms no store answers over a network.
    const LEAST: Duration = Duration::from_millis(1);
    /// Above 100 ms a caller is better served by the policy.
    const MOST: Duration = Duration::from_millis(100);
    /// Half of Envoy's default call time-out (20 ms, `rate_limit.proto`, field `timeout`).
    const UNTOLD: Duration = Duration::from_millis(10);
    /// What decoding, deciding and answering may take beside the store: 3 ms.
    const OWN: Duration = Duration::from_millis(3);

    /// How long the store may take when the caller waits this long; `None` when there is no time to ask.
    pub fn budget(self, patience: Option<Duration>) -> Option<Duration> {
        let wanted = match self {
            Self::AtOnce => return Some(Duration::MAX),
            Self::Fixed(fixed) => fixed,
            Self::Auto => patience.map_or(Self::UNTOLD, |patience| (patience / 2).min(Self::MOST)),
        };
        let bound = patience.map_or(Duration::MAX, |patience| patience.saturating_sub(Self::OWN));
        (bound > Self::LEAST).then(|| wanted.min(bound))
    }
}

impl Guard {
    /// A guard over `store`. Under the policy `local`, `local` counts, and each limit is shared among `replicas`.
    pub fn new(
        store: Arc<dyn Store>,
        deadline: Deadline,
        local: Arc<Memory>,
        replicas: NonZeroU32,
        clock: Arc<dyn Clock>,
    ) -> Self {
        Self { store, deadline, local, replicas, clock }
    }

    /// Charges the counters of one request and answers each charge, for a caller who waits no longer than `patience`.
    pub async fn charge(&self, charges: &[Charge], patience: Option<Duration>) -> Verdicts {
        if charges.iter().all(|charge| charge.limit.is_closed()) {
            return charges.iter().map(|charge| self.closed_limit(charge)).collect();
        }
        let Charged { answers, undo } = match self.deadline.budget(patience) {
            Some(budget) => self.store.charge(charges, budget).await,
            None => Charged { answers: charges.iter().map(|_| Err(StoreError::NoTime)).collect(), undo: None },
        };
        let mut verdicts: Verdicts =
            charges.iter().zip(&answers).map(|(charge, answer)| self.verdict(charge, *answer)).collect();
        let asks_local = |(charge, answer): (&Charge, &Result<Verdict, StoreError>)| is_local(charge, answer);
        if charges.iter().zip(&answers).any(asks_local) {
            self.decide_locally(charges, &answers, &mut verdicts);
        }
        if let Some(undo) = undo {
            let ballots = charges.iter().zip(&verdicts).map(|(charge, verdict)| charge.ballot(verdict.outcome));
            if is_request_refused(ballots) { undo.take_back(&mut verdicts) } else { undo.keep() }
        }
        verdicts
    }

    /// The store's verdict, or that of the policy. Under `local` it is one to be replaced.
    fn verdict(&self, charge: &Charge, answer: Result<Verdict, StoreError>) -> Verdict {
        let error = match answer {
            Ok(verdict) => return verdict,
            Err(error) => error,
        };
        if charge.limit.is_closed() {
            return self.closed_limit(charge);
        }
        let unasked = |outcome, provenance| {
            let (reset, delay) = (Micros::ZERO, Micros::ZERO);
            Verdict { outcome, remaining: 0, room: 0, reset, retry: None, delay, provenance }
        };
        match charge.on_store_failure {
            // Hits that cannot be given back are lost; that refuses nobody.
            _ if charge.hits.given_back() > 0 => unasked(Outcome::Admitted, Provenance::Open),
            FailurePolicy::Open | FailurePolicy::Local => unasked(Outcome::Admitted, Provenance::Open),
            FailurePolicy::Error => unasked(Outcome::Failed, Provenance::Error),
            FailurePolicy::Closed => {
                let retry = error.retry();
                Verdict { reset: retry, retry: Some(retry), ..unasked(Outcome::Refused, Provenance::Closed) }
            }
        }
    }

    /// A limit of 0 has no counter, so it is decided whatever becomes of the store.
    fn closed_limit(&self, charge: &Charge) -> Verdict {
        charge.limit.verdict(None, self.clock.now(), charge.hits)
    }

    /// Decides the charges under `local` in the embedded store, all in one step. The others stand in it as limits of 0, which
    /// have no counter: refused ones are asked for a hit, the others for none.
    fn decide_locally(&self, charges: &[Charge], answers: &Answers, verdicts: &mut Verdicts) {
        let nothing = Limit::closed();
        let stand_in = |charge: &Charge, verdict: &Verdict| Charge {
            limit: nothing,
            hits: if verdict.outcome.is_refused() { Hits::take(1) } else { Hits::LOOK },
            ..charge.clone()
        };
        let request: Vec<Charge> = charges
            .iter()
            .zip(answers)
            .zip(verdicts.iter())
            .map(|((charge, answer), verdict)| {
                if is_local(charge, answer) {
                    Charge { limit: charge.limit.shared_among(self.replicas), ..charge.clone() }
                } else {
                    stand_in(charge, verdict)
                }
            })
            .collect();
        let decided = self.local.charge_now(&request);
        let local = charges.iter().zip(answers).zip(verdicts).zip(decided);
        for ((_, verdict), decided) in local.filter(|(((charge, answer), _), _)| is_local(charge, answer)) {
            *verdict = Verdict { provenance: Provenance::Local, ..decided };
        }
    }
}

fn is_local(charge: &Charge, answer: &Result<Verdict, StoreError>) -> bool {
    answer.is_err() && charge.on_store_failure == FailurePolicy::Local && !charge.limit.is_closed()
}
