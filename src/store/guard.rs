//! Where the failure of a store becomes a verdict. Stores can fail; the guard above them cannot.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use super::memory::Memory;
use super::{Answers, Charged, Store, StoreError, Taken, Verdicts};
use crate::algorithm::{Charge, Limit};
use crate::model::policy::is_request_refused;
use crate::model::{Charging, Clock, FailurePolicy, Hits, Micros, Outcome, Provenance, Verdict};

/// Asks a store, and answers by policy what it does not.
pub struct Guard {
    store: Arc<dyn Store>,
    deadline: Deadline,
    /// Decides under the policy `local`.
    local: Arc<Memory>,
    replicas: NonZeroU32,
    clock: Arc<dyn Clock>,
}

/// When a charge was taken that is taken back if its request is refused, and by which store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Given {
    at: Micros,
    /// Whether the embedded store took it, in place of one that failed.
    is_local: bool,
}

/// How long the store may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deadline {
    /// Half of the caller's timeout, at least 1 ms and at most 25 ms; 10 ms when the caller sends no timeout. For a store that is
    /// further away, at most three times its smallest recent round trip, and never more than 100 ms.
    Auto,
    /// None: the store is in this process and answers at once, so it is asked however short the caller waits.
    AtOnce,
    /// As long as this.
    Fixed(Duration),
}

impl Deadline {
    /// Below 1 ms no store answers over a network.
    const LEAST: Duration = Duration::from_millis(1);
    /// The upper bound of `auto` for a store in the same network: 25 ms. A longer timeout of the caller must not let a sick store hold
    /// up every request for as long.
    const NEAR: Duration = Duration::from_millis(25);
    /// Round trips that a store further away is given: 3. One is needed; the others allow for a busy store and a lost script.
    const ROUND_TRIPS: u32 = 3;
    /// The upper bound of `auto` for any store: 100 ms. Above it a caller is better served by the policy.
    const MOST: Duration = Duration::from_millis(100);
    /// The budget for a caller that sends no timeout: 10 ms, half of Envoy's default timeout (20 ms, `rate_limit.proto`, field `timeout`).
    const UNTOLD: Duration = Duration::from_millis(10);
    /// What decoding, deciding and answering may take beside the store: 3 ms.
    const OWN: Duration = Duration::from_millis(3);

    /// Returns how long the store may take for a caller whose timeout is `patience`; `None` when there is no time to ask.
    /// `round_trip` returns the smallest recent round trip to the store, if one is known.
    pub fn budget(self, patience: Option<Duration>, round_trip: impl FnOnce() -> Option<Duration>) -> Option<Duration> {
        let wanted = match (self, patience) {
            (Self::AtOnce, _) => return Some(Duration::MAX),
            (Self::Fixed(fixed), _) => fixed,
            (Self::Auto, None) => Self::UNTOLD,
            (Self::Auto, Some(patience)) if patience / 2 <= Self::NEAR => patience / 2,
            (Self::Auto, Some(patience)) => {
                let far =
                    round_trip().map_or(Duration::ZERO, |round_trip| round_trip.saturating_mul(Self::ROUND_TRIPS));
                (patience / 2).min(far.clamp(Self::NEAR, Self::MOST))
            }
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
        let Charged { answers, undo } = match self.deadline.budget(patience, || self.store.round_trip()) {
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

    /// Charges a part of a request, as [`Guard::charge`] does a whole one; [`Guard::give_back`] takes back what it took if the
    /// request is refused.
    pub async fn take(&self, charges: &[Charge], patience: Option<Duration>) -> (Verdicts, Vec<Option<Given>>) {
        if charges.iter().all(|charge| charge.charging == Charging::Each) {
            return (self.charge(charges, patience).await, vec![None; charges.len()]);
        }
        let Taken { answers, taken } = match self.deadline.budget(patience, || self.store.round_trip()) {
            Some(budget) => self.store.take(charges, budget).await,
            None => Taken {
                answers: charges.iter().map(|_| Err(StoreError::NoTime)).collect(),
                taken: vec![None; charges.len()],
            },
        };
        let mut verdicts: Verdicts =
            charges.iter().zip(&answers).map(|(charge, answer)| self.verdict(charge, *answer)).collect();
        let given = |at: Option<Micros>| at.map(|at| Given { at, is_local: false });
        let mut taken: Vec<_> = taken.into_iter().map(given).collect();
        let is_local = |index: usize| is_local(&charges[index], &answers[index]);
        let local: Vec<usize> = (0..charges.len()).filter(|&index| is_local(index)).collect();
        if !local.is_empty() {
            let shared: Vec<_> = local.iter().map(|&index| self.shared(&charges[index])).collect();
            let (decided, own) = self.local.take_now(&shared);
            for ((&index, verdict), at) in local.iter().zip(decided).zip(own) {
                verdicts[index] = Verdict { provenance: Provenance::Local, ..verdict };
                taken[index] = at.map(|at| Given { at, is_local: true });
            }
        }
        (verdicts, taken)
    }

    /// Takes back what [`Guard::take`] took.
    pub async fn give_back(&self, charges: &[Charge], taken: &[Option<Given>]) {
        let of = |wanted: bool| -> Vec<Option<Micros>> {
            taken.iter().map(|given| given.filter(|given| given.is_local == wanted).map(|given| given.at)).collect()
        };
        let (store, local) = (of(false), of(true));
        if local.iter().any(Option::is_some) {
            let shared: Vec<_> = charges.iter().map(|charge| self.shared(charge)).collect();
            self.local.give_back_now(&shared, &local);
        }
        if store.iter().any(Option::is_some) {
            self.store.give_back(charges, &store).await;
        }
    }

    /// A charge as the embedded store of this instance alone decides it.
    fn shared(&self, charge: &Charge) -> Charge {
        Charge { limit: charge.limit.shared_among(self.replicas), ..charge.clone() }
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
            .map(
                |((charge, answer), verdict)| {
                    if is_local(charge, answer) { self.shared(charge) } else { stand_in(charge, verdict) }
                },
            )
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
