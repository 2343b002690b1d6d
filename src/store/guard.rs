//! Calls a store, and decides by policy where it fails: a store can fail, the guard cannot. Knowledge of the counters spares the
//! store calls, and decides while the store is overloaded.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use foldhash::HashSet;
use smallvec::SmallVec;
use tokio::time::{Instant, sleep};

use self::steps::ClockSteps;
use super::deadline::{CallerTime, Deadline};
use super::known::Known;
use super::memory::Memory;
use super::replicas::Replicas;
use super::{ChargeResults, Charged, Store, StoreError, Verdicts};
use crate::algorithm::{Charge, Limit, Refusals};
use crate::model::{Charging, Clock, FailurePolicy, Hits, Micros, Outcome, Provenance, Role, Verdict};

mod leasing;
mod steps;

/// The most counters that are charged later in one step: 100, as many as one Redis script charges.
const MOST_SETTLED: usize = 100;
/// The time that charging later may take: 1 s.
const SETTLING: Duration = Duration::from_secs(1);
/// The least pause between two steps of charging later: 10 ms.
const SETTLE_AGAIN: Duration = Duration::from_millis(10);

/// For each charge, the answer that needs no store.
type KnownAnswers = SmallVec<[Option<Verdict>; 4]>;

/// Calls a store, and answers by policy the charges that the store does not answer.
pub struct Guard {
    store: Arc<dyn Store>,
    deadline: Deadline,
    /// Knowledge of the counters in the store: last replies, refusals and later charges. None for a store in this process.
    known: Option<Arc<Known>>,
    /// The embedded store that decides under the policy `local`.
    local: Arc<Memory>,
    replicas: Arc<Replicas>,
    clock: Arc<dyn Clock>,
    steps: ClockSteps,
    untimely: AtomicU64,
    /// Number of tasks that ask for leases or give hits back.
    asking: Arc<AtomicUsize>,
}

impl Guard {
    /// Creates a guard of `store`. Under the policy `local`, the store `local` counts, and each limit is divided by the number of
    /// `replicas`.
    pub fn new(
        store: Arc<dyn Store>,
        deadline: Deadline,
        local: Arc<Memory>,
        replicas: Arc<Replicas>,
        clock: Arc<dyn Clock>,
    ) -> Self {
        let known = (deadline != Deadline::AtOnce).then(Arc::default);
        Self {
            store,
            deadline,
            known,
            local,
            replicas,
            steps: ClockSteps::new(&*clock),
            clock,
            untimely: AtomicU64::new(0),
            asking: Arc::default(),
        }
    }

    /// Creates a guard of an embedded store for at most about `counters` counters, which never fails.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use tidegate::algorithm::{Algorithm, Charge, Limit};
    /// # use tidegate::model::key::{CountedBy, KeyPart};
    /// # use tidegate::model::*;
    /// # use tidegate::store::guard::Guard;
    /// # tokio::runtime::Builder::new_current_thread().build()?.block_on(async {
    /// let guard = Guard::in_memory(1_000, Arc::new(|| Micros::from_secs(1_700_000_000)));
    /// let limit = Limit::new(Algorithm::Gcra, Quota::new(1, Window::of_unit(Unit::Minute)))?;
    /// let user = KeyPart { key: b"user", by: CountedBy::Value, text: b"alice" };
    /// let window = limit.quota().window().length();
    /// let charge = Charge {
    ///     key: CounterKey::new("edge", [user].into_iter(), Colocation::default(), limit.algorithm().name(), window),
    ///     limit,
    ///     hits: Hits::take(1),
    ///     descriptor: 0,
    ///     role: Role::Enforce,
    ///     charging: Charging::Each,
    ///     policies: StorePolicies::default(),
    ///     remembers_refusals: true,
    ///     lease: None,
    ///     ask: 0,
    /// };
    /// assert_eq!(guard.charge(&[charge.clone()], None).await[0].outcome, Outcome::Admitted);
    /// let refused = guard.charge(&[charge], None).await[0];
    /// assert_eq!((refused.outcome, refused.retry), (Outcome::Refused, Some(Micros::from_secs(60))));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// # })?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn in_memory(counters: usize, clock: Arc<dyn Clock>) -> Self {
        let memory = Arc::new(Memory::new(Arc::clone(&clock), counters));
        let store = Arc::clone(&memory) as Arc<dyn Store>;
        Self::new(store, Deadline::AtOnce, memory, Arc::new(Replicas::set(NonZeroU32::MIN)), clock)
    }

    /// Charges the counters of one request and returns a verdict for each charge, for a caller with this `timeout`.
    pub async fn charge(&self, charges: &[Charge], timeout: impl Into<CallerTime>) -> Verdicts {
        let timeout = timeout.into();
        if charges.iter().all(|charge| charge.limit.is_closed()) {
            return charges.iter().map(|charge| self.closed_limit(charge)).collect();
        }
        let Some((known, now)) = self.known_now() else { return self.charge_all(charges, timeout, None, false).await };
        let is_whole = charges.iter().any(|charge| charge.charging == Charging::AllOrNothing);
        let has_groups = charges.iter().any(|charge| charge.group().is_some());
        if charges.iter().any(|charge| charge.lease.is_some()) {
            if self.steps.has_stepped(&*self.clock, now) {
                // The task that keeps leases gives them back.
                known.drop_leases();
                self.steps.follow(&*self.clock);
            }
            if is_whole || has_groups {
                return self.charge_leased(known, charges, timeout, (is_whole, now)).await;
            }
        }
        self.charge_unpaid(known, charges, timeout, (is_whole, now)).await
    }

    /// Charges what no lease has paid.
    async fn charge_unpaid(
        &self,
        known: &Known,
        charges: &[Charge],
        timeout: CallerTime,
        (is_whole, now): (bool, Micros),
    ) -> Verdicts {
        match known_answers(known, charges, is_whole, now) {
            None => self.charge_all(charges, timeout, Some((known, now)), false).await,
            // In a box, so that calls of which nothing is known do not have its size.
            Some(answers) => match answers.iter().copied().collect::<Option<Verdicts>>() {
                Some(verdicts) if !is_whole => {
                    charge_refused_later(known, charges, &answers, now);
                    verdicts
                }
                _ => Box::pin(self.charge_unknown(known, charges, answers, timeout, (is_whole, now))).await,
            },
        }
    }

    /// Charges the counters that have no known refusal, unless a known refusal decides the whole request.
    async fn charge_unknown(
        &self,
        known: &Known,
        charges: &[Charge],
        mut answers: KnownAnswers,
        timeout: CallerTime,
        (is_whole, now): (bool, Micros),
    ) -> Verdicts {
        // An answer may also be that of a lease, which admits.
        let refuses = |answer: &Option<Verdict>| answer.is_some_and(|answer| answer.outcome.is_refused());
        let mut enforced = charges.iter().zip(&answers).filter(|(charge, _)| charge.role == Role::Enforce);
        let is_refused = enforced.any(|(_, answer)| refuses(answer));
        if is_whole && !is_refused {
            // The store decides together on all charges what it charges.
            return self.charge_all(charges, timeout, Some((known, now)), false).await;
        }
        charge_refused_later(known, charges, &answers, now);
        let refusing = charges.iter().zip(&answers).filter(|(_, answer)| refuses(answer));
        // Here a request with all-or-nothing charges is refused.
        let refusals = Refusals::known(refusing.map(|(charge, _)| charge), is_whole);
        for (charge, answer) in charges.iter().zip(&mut answers).filter(|(_, answer)| answer.is_none()) {
            if charge.limit.is_closed() && (is_whole || refusals.refuse(charge.charging)) {
                *answer = Some(self.closed_limit(charge));
            } else if refusals.spare(charge) {
                *answer = Some(known.spared(charge, now));
            }
        }
        let unknown = charges.iter().zip(&answers).filter(|(_, answer)| answer.is_none());
        let unknown: Vec<Charge> = unknown.map(|(charge, _)| charge.clone()).collect();
        let asked = match unknown.is_empty() {
            true => Verdicts::new(),
            false => self.charge_all(&unknown, timeout, Some((known, now)), is_refused).await,
        };
        let mut asked = asked.into_iter();
        answers.into_iter().filter_map(|answer| answer.or_else(|| asked.next())).collect()
    }

    /// Charges all of these charges: in the store, and by policy where the store does not answer. The replies are noted in `known`
    /// with the time beside it. `is_refused`: the request is refused by other charges.
    async fn charge_all(
        &self,
        charges: &[Charge],
        timeout: CallerTime,
        known: Option<(&Known, Micros)>,
        is_refused: bool,
    ) -> Verdicts {
        let budget = self.budget(timeout);
        let existing = budget.filter(|_| is_refused).and_then(|budget| self.store.charge_existing(charges, budget));
        let Charged { mut answers, undos, .. } = match (budget, existing) {
            (Some(_), Some(existing)) => existing.await,
            (Some(budget), None) => match known.and_then(|(known, now)| self.carry(known, charges, now)) {
                None => self.store.charge(charges, budget).await,
                Some(carrying) => Box::pin(self.charge_and_lease(carrying, budget)).await,
            },
            (None, _) => Charged::answered(self.untimely(charges)),
        };
        self.want_leases(charges, &answers);
        self.recall(charges, &mut answers);
        let mut verdicts: Verdicts =
            charges.iter().zip(&answers).map(|(charge, answer)| self.verdict(charge, *answer)).collect();
        let asks_local = |(charge, answer): (&Charge, &Result<Verdict, StoreError>)| is_local(charge, answer);
        if charges.iter().zip(&answers).any(asks_local) {
            self.decide_locally(charges, &answers, &mut verdicts);
        }
        let mut undone = None;
        if !undos.is_empty() {
            let refusals = Refusals::of(charges, &verdicts);
            let settled = undos.into_iter().map(|undo| undo.settle(&refusals, &mut verdicts));
            undone = (settled.filter(|is_undone| *is_undone).count() > 0).then_some(refusals);
        }
        learn(known, charges, &mut verdicts);
        if let Some(refusals) = undone {
            let given_back = charges.iter().zip(&answers).filter(|(charge, _)| refusals.spare(charge));
            self.forget_refusals(given_back.filter(|(_, answer)| is_admitted(answer)));
        }
        verdicts
    }

    fn budget(&self, timeout: CallerTime) -> Option<Duration> {
        self.deadline.budget(timeout, || self.store.round_trip())
    }

    /// Puts a refusal that still holds in the place of an error, where the store was too busy to answer.
    fn recall(&self, charges: &[Charge], answers: &mut ChargeResults) {
        let Some(known) = &self.known else { return };
        for (charge, answer) in charges.iter().zip(answers) {
            if answer.is_err_and(StoreError::is_overload)
                && let Some(refusal) = known.lasting_refusal(charge, self.clock.now())
            {
                *answer = Ok(refusal);
            }
        }
    }

    /// Returns the knowledge of the counters in the store and the present time. The embedded store needs neither.
    fn known_now(&self) -> Option<(&Known, Micros)> {
        self.known().map(|known| (known, self.clock.now()))
    }

    /// Returns the knowledge of the counters in the store; `None` if the store is in this process.
    pub fn known(&self) -> Option<&Known> {
        self.known.as_deref()
    }

    /// Returns the number of calls that had no time left for the store.
    pub fn untimely_calls(&self) -> u64 {
        self.untimely.load(Ordering::Relaxed)
    }

    fn untimely(&self, charges: &[Charge]) -> ChargeResults {
        self.untimely.fetch_add(1, Ordering::Relaxed);
        charges.iter().map(|_| Err(StoreError::NoTime)).collect()
    }

    /// Forgets the refusals of counters on which hits are given back.
    fn forget_refusals<'a, T>(&self, given_back: impl Iterator<Item = (&'a Charge, T)>) {
        if let Some(known) = &self.known {
            given_back.for_each(|(charge, _)| known.forget_refusal(&charge.key));
        }
    }

    /// Returns the charge with the share of the limit that this instance may admit alone.
    fn shared(&self, charge: &Charge) -> Charge {
        Charge { limit: charge.limit.shared_among(self.replicas.get()), ..charge.clone() }
    }

    /// Returns the store's verdict, or that of the policy. Under `local` the embedded store replaces it afterwards.
    fn verdict(&self, charge: &Charge, answer: Result<Verdict, StoreError>) -> Verdict {
        let error = match answer {
            Ok(verdict) => return verdict,
            Err(error) => error,
        };
        if charge.limit.is_closed() {
            return self.closed_limit(charge);
        }
        let unasked = Verdict::uncounted;
        match policy(charge, error) {
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

    /// Returns the verdict on a limit of 0. It has no counter, so no store is needed.
    fn closed_limit(&self, charge: &Charge) -> Verdict {
        charge.limit.verdict(None, self.clock.now(), charge.hits)
    }

    /// Decides the charges under `local` in the embedded store, in one step. Charges that are decided already take part as limits of 0,
    /// which have no counter: they take a hit if they are refused, and give one back if they are admitted.
    fn decide_locally(&self, charges: &[Charge], answers: &ChargeResults, verdicts: &mut Verdicts) {
        let nothing = Limit::closed();
        let stand_in = |charge: &Charge, verdict: &Verdict| Charge {
            limit: nothing,
            hits: if verdict.outcome.is_refused() { Hits::take(1) } else { Hits::give_back(1) },
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
        charges.iter().zip(answers).for_each(|(charge, answer)| self.share_remaining(charge, *answer));
        let decided = self.local.charge_now(&request);
        let local = charges.iter().zip(answers).zip(verdicts.iter_mut()).zip(decided);
        for ((_, verdict), decided) in local.filter(|(((charge, answer), _), _)| is_local(charge, answer)) {
            *verdict = Verdict { provenance: Provenance::Local, ..decided };
        }
        self.charge_admitted_later(charges, answers, verdicts);
    }

    /// Takes this instance's share of the hits that the store's last reply left, before a charge is decided here under overload.
    fn share_remaining(&self, charge: &Charge, answer: Result<Verdict, StoreError>) {
        let is_look = charge.hits.taken() == 0 && charge.hits.given_back() == 0;
        let is_overloaded = !is_look && answer.is_err_and(StoreError::is_overload) && is_local(charge, &answer);
        let Some(known) = self.known.as_ref().filter(|_| is_overloaded) else { return };
        if let Some(remaining) = known.take_remaining(charge, self.clock.now()) {
            let share = remaining.div_ceil(self.replicas.get().get());
            self.local.leave_at_most(&self.shared(charge), share);
        }
    }

    /// Remembers the hits that were admitted here under overload, to charge them in the store later.
    fn charge_admitted_later(&self, charges: &[Charge], answers: &ChargeResults, verdicts: &[Verdict]) {
        let Some(known) = &self.known else { return };
        let now = self.clock.now();
        let refusals = Refusals::of(charges, verdicts);
        for ((charge, answer), verdict) in charges.iter().zip(answers).zip(verdicts) {
            // What was sent may have been charged.
            let is_uncharged = answer.is_err_and(StoreError::is_uncharged) && is_local(charge, answer);
            let is_charged = verdict.outcome == Outcome::Admitted && !refusals.spare(charge);
            if is_uncharged && is_charged && charge.hits.taken() > 0 {
                known.charge_later(charge, verdict, now);
            }
        }
    }

    /// Charges hits in the store that were decided without it; runs for ever. These charges go behind all other calls and take at most a
    /// tenth of the store's time: each attempt is followed by a pause of nine times its length.
    pub async fn settle(&self) {
        let Some(known) = &self.known else { return };
        loop {
            let began = Instant::now();
            let due = known.due(self.clock.now(), MOST_SETTLED);
            let charges: Vec<Charge> = due.iter().map(|later| later.charge.clone()).collect();
            if !charges.is_empty() {
                let settled = self.store.settle(&charges, SETTLING).await;
                let now = self.clock.now();
                let unsettled = due.into_iter().zip(settled).filter(|(_, is_settled)| !is_settled);
                unsettled.for_each(|(later, _)| known.put_back(later, now));
            }
            sleep((began.elapsed() * 9).clamp(SETTLE_AGAIN, SETTLING)).await;
        }
    }
}

/// Returns the answers to charges that need no store: known refusals, and leases that pay for charges on their own. `None` if there is
/// no such answer.
fn known_answers(known: &Known, charges: &[Charge], is_whole: bool, now: Micros) -> Option<KnownAnswers> {
    let mut answers = KnownAnswers::new();
    for (index, charge) in charges.iter().enumerate() {
        let is_alone = !is_whole && charge.group().is_none();
        let answer = if is_alone { known.answer(charge, now) } else { known.refusal(charge, now) };
        if let Some(answer) = answer {
            answers.resize(index, None);
            answers.push(Some(answer));
        }
    }
    if answers.is_empty() {
        return None;
    }
    answers.resize(charges.len(), None);
    Some(answers)
}

/// Remembers refused hits that their limit counts, to charge them in the store later.
fn charge_refused_later(known: &Known, charges: &[Charge], answers: &[Option<Verdict>], now: Micros) {
    for (charge, answer) in charges.iter().zip(answers) {
        if let Some(answer) = answer
            && answer.outcome.is_refused()
            && charge.limit.records_refused(charge.charging)
        {
            known.charge_later(charge, answer, now);
        }
    }
}

/// Learns from the store's verdicts on charges that were sent at the time beside what is `known`, and adds to what remains what this instance
/// holds.
fn learn(known: Option<(&Known, Micros)>, charges: &[Charge], verdicts: &mut [Verdict]) {
    let Some((known, at)) = known else { return };
    // A refusal for the hits of another charge of the request may not outlast it.
    let mut admitted = HashSet::default();
    if charges.len() > 1 && verdicts.iter().any(|verdict| verdict.outcome.is_refused()) {
        let all = charges.iter().zip(&*verdicts).filter(|(_, verdict)| !verdict.outcome.is_refused());
        admitted.extend(all.map(|(charge, _)| &charge.key));
    }
    let answers = charges.iter().zip(verdicts).filter(|(_, verdict)| verdict.provenance == Provenance::Store);
    for (charge, verdict) in answers {
        if verdict.outcome.is_refused() && admitted.contains(&charge.key) {
            continue;
        }
        let held = known.learn(charge, verdict, at);
        if held > 0 && !verdict.outcome.is_refused() {
            *verdict = verdict.with_more(held);
        }
    }
}

fn is_admitted(answer: &Result<Verdict, StoreError>) -> bool {
    answer.is_ok_and(|verdict| verdict.outcome == Outcome::Admitted)
}

/// Returns the policy that answers a charge in place of the store.
const fn policy(charge: &Charge, error: StoreError) -> FailurePolicy {
    if error.is_overload() { charge.policies.on_overload } else { charge.policies.on_failure }
}

fn is_local(charge: &Charge, answer: &Result<Verdict, StoreError>) -> bool {
    answer.is_err_and(|error| policy(charge, error) == FailurePolicy::Local) && !charge.limit.is_closed()
}
