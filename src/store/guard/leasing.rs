//! The tasks that ask the store for leases and give back what is left of them.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::{sleep, timeout};

use super::Guard;
use crate::algorithm::Charge;
use crate::model::Micros;
use crate::store::known::{Known, Unspent};

/// The pause between two commands that ask for leases: 5 ms. In it, the wants of many counters come together in one command.
const ASK_AGAIN: Duration = Duration::from_millis(5);
/// The pause between two looks for leases that have ended: 100 ms.
const END_AGAIN: Duration = Duration::from_millis(100);
/// The time that the store may take to grant a lease: 1 s. No caller waits for it.
const ASKING: Duration = Duration::from_secs(1);

impl Guard {
    /// Asks for leases ahead of need, and gives back what is left when they end; runs for ever.
    pub async fn keep_leases(self: Arc<Self>) {
        let Some(known) = &self.known else { return };
        let (mut ended, mut is_leasing) = (self.clock.now(), false);
        loop {
            let is_due = match is_leasing {
                true => timeout(END_AGAIN, known.lease_due()).await.is_ok(),
                // Nothing has to be done until a lease is wanted.
                false => {
                    known.lease_due().await;
                    true
                }
            };
            let now = self.clock.now();
            if self.steps.follow(&*self.clock) {
                // The ages of leases are wrong now.
                known.drop_leases();
            }
            if is_due {
                self.clone().ask_for(known.lease_asks(now, self.replicas.get()));
            }
            if now.saturating_sub(ended) >= Micros::from(END_AGAIN) || now < ended {
                ended = now;
                self.clone().give_back_ended(known, now);
                is_leasing = known.has_leases() || self.asking.load(Ordering::Relaxed) > 0;
            }
            is_leasing |= is_due;
            sleep(ASK_AGAIN).await;
        }
    }

    fn ask_for(self: Arc<Self>, asks: Vec<Charge>) {
        if !asks.is_empty() {
            self.asking.fetch_add(1, Ordering::Relaxed);
            tokio::spawn(async move { self.ask(asks).await });
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
        self.asking.fetch_sub(1, Ordering::Relaxed);
    }

    fn give_back_ended(self: Arc<Self>, known: &Known, now: Micros) {
        let unspent = known.end_leases(now);
        if !unspent.is_empty() {
            tokio::spawn(async move { self.give_back_unspent(unspent).await });
        }
    }

    async fn give_back_unspent(&self, unspent: Vec<Unspent>) {
        let (charges, taken): (Vec<_>, Vec<_>) =
            unspent.into_iter().map(|Unspent { charge, at }| (charge, Some(at))).unzip();
        self.forget_refusals(charges.iter().map(|charge| (charge, ())));
        self.store.give_back(&charges, &taken).await;
    }

    /// Ends all leases and gives their hits back. Waits for leases that were asked for, and gives these back too. Afterwards there are no
    /// more leases.
    pub async fn end_leases(&self) {
        let Some(known) = &self.known else { return };
        known.close_leases();
        loop {
            let is_asking = self.asking.load(Ordering::Relaxed) > 0;
            let unspent = known.end_leases(self.clock.now());
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
