//! The tasks that ask the store for leases and give back what is left of them.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::oneshot;
#[cfg(not(feature = "server"))]
use tokio::task::spawn as spawn_in_span;
use tokio::time::{Instant, sleep};

use super::Guard;
use crate::algorithm::{Charge, Refusals};
use crate::model::{Micros, Role};
use crate::store::deadline::CallerTime;
use crate::store::known::{Known, Paid, Spent, Unspent};
use crate::store::{ChargeResults, Charged, StoreError, Verdicts};
#[cfg(feature = "server")]
use crate::telemetry::traces::spawn as spawn_in_span;

/// The pause between two commands that ask for leases: 5 ms. In it, the wants of many counters come together in one command.
const ASK_AGAIN: Duration = Duration::from_millis(5);
/// The most counters for which leases are asked for, or hits given back, at once: 100, which occupy a Redis for about a millisecond.
const MOST_ASKED: usize = 100;
/// The time that the store may take to grant a lease: 1 s. No caller waits for it.
const ASKING: Duration = Duration::from_secs(1);

/// Charges that carry asks for leases.
pub(super) struct Carrying {
    charges: Vec<Charge>,
    sent: Micros,
    asking: Asking,
}

/// An ask in flight, or hits that are given back. Leases end only when there is none.
struct Asking(Arc<AtomicUsize>);

impl Drop for Asking {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Guard {
    /// Charges a request with charges that are decided together: what leases can pay is paid, and put back if the rest is refused.
    pub(super) async fn charge_leased(
        &self,
        known: &Known,
        charges: &[Charge],
        timeout: CallerTime,
        (is_whole, now): (bool, Micros),
    ) -> Verdicts {
        let mut paid = known.pay(charges, now);
        // The store decides on the quotas of a request together.
        let is_quota = |charge: &Charge| matches!(charge.role, Role::Quota | Role::ShadowQuota);
        if charges.iter().zip(&paid).any(|(charge, paid)| is_quota(charge) && paid.is_none()) {
            unpay(known, charges, &mut paid, is_quota);
        }
        if paid.iter().all(Option::is_none) {
            return Box::pin(self.charge_unpaid(known, charges, timeout, (is_whole, now))).await;
        }
        let unpaid = charges.iter().zip(&paid).filter(|(_, paid)| paid.is_none());
        let rest: Vec<Charge> = unpaid.map(|(charge, _)| charge.clone()).collect();
        let mut decided = match rest.is_empty() {
            true => Verdicts::new(),
            false => Box::pin(self.charge_unpaid(known, &rest, timeout, (is_whole, now))).await,
        }
        .into_iter();
        let verdict = |paid: &Option<Spent>| paid.as_ref().map(|paid| paid.verdict).or_else(|| decided.next());
        let mut verdicts: Verdicts = paid.iter().filter_map(verdict).collect();
        let refusals = Refusals::of(charges, &verdicts);
        let paid_charges = charges.iter().zip(&mut verdicts).zip(&paid).filter(|(_, paid)| paid.is_some());
        for ((charge, verdict), _) in paid_charges.filter(|((charge, _), _)| refusals.spare(charge)) {
            *verdict = verdict.with_more(charge.hits.taken());
        }
        unpay(known, charges, &mut paid, |charge| refusals.spare(charge));
        known.keep(charges, &paid);
        verdicts
    }

    /// Returns the charges with asks for leases, if some of them are decided by the store at `now` and their leases need hits.
    pub(super) fn carry(&self, known: &Known, charges: &[Charge], now: Micros) -> Option<Carrying> {
        let is_leased = charges.iter().any(|charge| charge.lease.is_some());
        let asking = is_leased.then(|| self.ask_begins())?;
        let charges = known.carry(charges, now, self.replicas.get())?;
        Some(Carrying { charges, sent: now, asking })
    }

    /// Charges in the store, and grants what it charges for leases beside.
    pub(super) async fn charge_and_lease(&self, carrying: Carrying, budget: Duration) -> Charged {
        let Carrying { charges, sent, asking } = carrying;
        let Some(known) = self.known.clone() else { return self.store.charge(&charges, budget).await };
        let (store, clock) = (Arc::clone(&self.store), Arc::clone(&self.clock));
        let (count, (sender, charged)) = (charges.len(), oneshot::channel());
        // The caller's time passes also while the task waits for its turn.
        let until = Instant::now() + budget;
        // A task of its own: hits that are granted are kept even if the caller goes away.
        spawn_in_span(async move {
            let budget = until.saturating_duration_since(Instant::now());
            let charged = store.charge(&charges, budget).await;
            known.carried(&charges, &charged, sent, clock.now());
            drop(asking);
            let _ = sender.send(charged);
        });
        let unknown = || Charged::answered((0..count).map(|_| Err(StoreError::TimedOut)).collect());
        charged.await.unwrap_or_else(|_| unknown())
    }

    /// Asks for leases for charges that the store was too far away or too busy to decide, from which the next calls are decided.
    pub(super) fn want_leases(&self, charges: &[Charge], answers: &ChargeResults) {
        let Some(known) = &self.known else { return };
        let leased = charges.iter().zip(answers).filter(|(charge, _)| charge.lease.is_some());
        for (charge, _) in leased.filter(|(_, answer)| answer.is_err_and(StoreError::is_uncharged)) {
            known.want_lease(charge, self.clock.now());
        }
    }

    /// Asks for leases ahead of need, and gives back what is left when they end; runs for ever. Each step sends little, so that no other call
    /// waits long at the store.
    pub async fn keep_leases(self: Arc<Self>) {
        let Some(known) = &self.known else { return };
        loop {
            // Nothing has to be done until a lease is wanted.
            known.lease_due().await;
            let mut is_leasing = true;
            while is_leasing {
                for turn in 0..Known::SHARDS {
                    if self.steps.follow(&*self.clock) {
                        // The ages of leases are wrong now.
                        known.drop_leases();
                    }
                    let now = self.clock.now();
                    self.clone().ask_for(known.lease_asks(now, self.replicas.get(), turn, MOST_ASKED));
                    self.clone().give_back_ended(known.end_leases(now, turn));
                    sleep(ASK_AGAIN).await;
                }
                is_leasing = self.asking.load(Ordering::Relaxed) > 0 || known.has_leases();
            }
        }
    }

    /// Counts an ask or a return of hits until what it returns is dropped.
    fn ask_begins(&self) -> Asking {
        self.asking.fetch_add(1, Ordering::Relaxed);
        Asking(Arc::clone(&self.asking))
    }

    fn ask_for(self: Arc<Self>, asks: Vec<Charge>) {
        if !asks.is_empty() {
            let asking = self.ask_begins();
            tokio::spawn(async move {
                self.ask(asks).await;
                drop(asking);
            });
        }
    }

    async fn ask(&self, asks: Vec<Charge>) {
        let Some(known) = &self.known else { return };
        let sent = self.clock.now();
        let granted = self.store.lease(&asks, ASKING).await;
        let now = self.clock.now();
        for (ask, granted) in asks.iter().zip(granted) {
            known.grant(ask, granted, sent, now);
        }
    }

    fn give_back_ended(self: Arc<Self>, unspent: Vec<Unspent>) {
        if !unspent.is_empty() {
            let asking = self.ask_begins();
            tokio::spawn(async move {
                self.give_back_unspent(unspent).await;
                drop(asking);
            });
        }
    }

    async fn give_back_unspent(&self, mut unspent: Vec<Unspent>) {
        while !unspent.is_empty() {
            let some = unspent.split_off(unspent.len().saturating_sub(MOST_ASKED));
            let (charges, taken): (Vec<_>, Vec<_>) =
                some.into_iter().map(|Unspent { charge, at }| (charge, Some(at))).unzip();
            self.forget_refusals(charges.iter().map(|charge| (charge, ())));
            self.store.give_back(&charges, &taken).await;
        }
    }

    /// Ends all leases and gives their hits back. Waits for leases that were asked for, and gives these back too. Afterwards there are no
    /// more leases.
    pub async fn end_leases(&self) {
        let Some(known) = &self.known else { return };
        known.close_leases();
        loop {
            let is_asking = self.asking.load(Ordering::Relaxed) > 0;
            let unspent = known.end_all_leases(self.clock.now());
            if !unspent.is_empty() {
                self.give_back_unspent(unspent).await;
            }
            if !is_asking {
                return;
            }
            sleep(ASK_AGAIN).await;
        }
    }
}

/// Puts back what leases have paid for such charges, which are not made after all.
fn unpay(known: &Known, charges: &[Charge], paid: &mut Paid, is_put_back: impl Fn(&Charge) -> bool) {
    for (charge, paid) in charges.iter().zip(paid).filter(|(charge, _)| is_put_back(charge)) {
        if let Some(spent) = paid.take() {
            known.unpay(charge, spent);
        }
    }
}
