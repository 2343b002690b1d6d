//! Leases of all counters: who spends them, what is asked for, and what is given back.

use std::num::NonZeroU32;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use smallvec::SmallVec;
use tokio::sync::Notify;

use super::counter_lease::lately;
use super::leases::{Leases, Spent};
use super::parcel::Unspent;
use super::replies::LastReply;
use super::{Known, KnownShard};
use crate::algorithm::Charge;
use crate::model::{Charging, LeaseTerms, Micros, Outcome, Provenance, Verdict};
use crate::store::{Charged, Granted, StoreError};

/// Leases as a whole. Those of each counter are in its shard.
#[derive(Default)]
pub(super) struct Leased {
    /// Tells the task that asks for leases that a counter needs hits.
    due: Notify,
    /// True from the time at which there are no more leases, because the process stops.
    is_closed: AtomicBool,
    hits: [AtomicU64; LeaseHits::ALL.len()],
}

/// For each charge of a request, what a lease has paid.
pub type Paid = SmallVec<[Option<Spent>; 4]>;

/// Kind of hits of leases, for metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseHits {
    /// Charged in the store.
    Granted,
    /// Spent by a request.
    Spent,
    /// Given back to the store.
    GivenBack,
}

impl LeaseHits {
    /// All kinds, in the order of the metric's series.
    pub const ALL: [Self; 3] = [Self::Granted, Self::Spent, Self::GivenBack];

    /// Returns the value of the label `hits`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Granted => "granted",
            Self::Spent => "spent",
            Self::GivenBack => "given_back",
        }
    }
}

impl Known {
    /// Pays a charge at `now` from the lease of its counter. `None` if the lease has too few hits, or if there is none.
    pub(super) fn spend(&self, leases: &mut Leases, charge: &Charge, now: Micros) -> Option<Verdict> {
        let spent = self.leased.telling_due(leases, |leases| leases.spend(charge, now))?;
        self.leased.count(LeaseHits::Spent, charge.hits.taken());
        Some(spent.verdict)
    }

    /// Pays those of these charges of one request that leases can pay. What is not kept by [`Known::keep`] has to be put back.
    pub fn pay(&self, charges: &[Charge], now: Micros) -> Paid {
        let pay = |charge: &Charge| {
            leasable(charge)?;
            let leases = &mut self.shard(&charge.key).lock().leases;
            self.leased.telling_due(leases, |leases| leases.spend(charge, now))
        };
        charges.iter().map(pay).collect()
    }

    /// Keeps what was paid.
    pub fn keep(&self, charges: &[Charge], paid: &Paid) {
        let hits = |(charge, paid): (&Charge, &Option<Spent>)| paid.as_ref().map_or(0, |_| charge.hits.taken());
        self.leased.count(LeaseHits::Spent, charges.iter().zip(paid).map(hits).sum());
    }

    /// Puts back what was paid for a charge that is not made after all.
    pub fn unpay(&self, charge: &Charge, spent: Spent) {
        let leases = &mut self.shard(&charge.key).lock().leases;
        leases.put_back(charge, spent);
        if !leases.is_idle() {
            self.leased.due.notify_one();
        }
    }

    /// Asks for a lease on behalf of a charge at `now` that the store is too far away or too busy to decide, if it is not the first one.
    pub fn want_lease(&self, charge: &Charge, now: Micros) {
        if let Some(terms) = leasable(charge) {
            let (shard, fingerprint) = self.place(&charge.key, &charge.limit);
            let KnownShard { leases, replies, .. } = &mut *shard.lock();
            leases.leave_other_limit(charge, false);
            if let Some(before) = replies.get(fingerprint) {
                self.want(leases, charge, terms, before.remaining(), now);
            } else {
                // A counter that one call needs gets no lease.
                replies.put(fingerprint, LastReply::unknown(now));
            }
        }
    }

    pub(super) fn want(&self, leases: &mut Leases, charge: &Charge, terms: LeaseTerms, remaining: u32, now: Micros) {
        if self.leased.is_closed.load(Ordering::Relaxed) {
            return;
        }
        self.leased.telling_due(leases, |leases| leases.want(charge, terms, remaining, now));
    }

    /// Waits until a counter needs a lease.
    pub async fn lease_due(&self) {
        self.leased.due.notified().await;
    }

    /// Returns at most `most` charges to ask the store for at `now`, for leases of `replicas` instances; the others wait. Begins with the
    /// shard of this `turn`.
    pub fn lease_asks(&self, now: Micros, replicas: NonZeroU32, turn: usize, most: usize) -> Vec<Charge> {
        let mut asks = Vec::new();
        for shard in 0..self.shards.len() {
            let shard = &self.shards[(turn + shard) % self.shards.len()];
            shard.lock().leases.ask(now, replicas, most, &mut asks);
        }
        asks
    }

    /// Returns these charges with asks for leases, if the leases of some need hits: the store, which decides them at `now`, grants them beside.
    /// `None` if some charges are decided together.
    pub fn carry(&self, charges: &[Charge], now: Micros, replicas: NonZeroU32) -> Option<Vec<Charge>> {
        if charges.iter().any(|charge| charge.charging != Charging::Each) {
            return None;
        }
        let mut carrying: Option<Vec<Charge>> = None;
        for (index, charge) in charges.iter().enumerate() {
            let Some(terms) = leasable(charge) else { continue };
            let (shard, fingerprint) = self.place(&charge.key, &charge.limit);
            let KnownShard { leases, replies, .. } = &mut *shard.lock();
            if let Some(before) =
                replies.get(fingerprint).filter(|before| before.was_admitted_within(now, lately(terms)))
            {
                self.want(leases, charge, terms, before.remaining(), now);
            }
            let hits = leases.carry(charge, now, replicas);
            if hits > 0 {
                carrying.get_or_insert_with(|| charges.to_vec())[index].ask = hits;
            }
        }
        carrying
    }

    /// Adds the hits that the store granted beside charges that were sent at `sent`.
    pub fn carried(&self, charges: &[Charge], charged: &Charged, sent: Micros, now: Micros) {
        for (index, ask) in charges.iter().enumerate().filter(|(_, charge)| charge.ask > 0) {
            let leases = &mut self.shard(&ask.key).lock().leases;
            let error = charged.answers.get(index).and_then(|answer| answer.err());
            let is_late = matches!(error, Some(StoreError::Late | StoreError::TimedOut));
            if is_late || error.is_some_and(StoreError::is_uncharged) {
                self.leased.telling_due(leases, |leases| leases.ask_again(ask, is_late));
                continue;
            }
            let granted = charged.granted.iter().find(|(member, _)| *member == index).map(|(_, granted)| *granted);
            self.leased.count(LeaseHits::Granted, granted.map_or(0, |granted| granted.hits));
            leases.grant(ask, granted, sent, now);
            if self.leased.is_closed.load(Ordering::Relaxed) {
                leases.close();
            }
        }
    }

    /// Adds the hits that the store granted to an `ask` that was sent at `sent`; `None` if it did not answer.
    pub fn grant(&self, ask: &Charge, granted: Option<Granted>, sent: Micros, now: Micros) {
        self.leased.count(LeaseHits::Granted, granted.map_or(0, |granted| granted.hits));
        let (shard, fingerprint) = self.place(&ask.key, &ask.limit);
        let mut shard = shard.lock();
        shard.leases.grant(ask, granted, sent, now);
        if let Some(Granted { remaining, reset, .. }) = granted {
            let before = shard.replies.get(fingerprint).filter(|before| before.at() <= sent);
            let refunded_until = before.and_then(|before| before.refunded_until(sent));
            let verdict = Verdict { remaining, reset, ..Verdict::uncounted(Outcome::Admitted, Provenance::Store) };
            shard.replies.put(fingerprint, LastReply::new(ask.hits, &verdict, sent, refunded_until));
        }
        if self.leased.is_closed.load(Ordering::Relaxed) {
            shard.leases.close();
        }
    }

    /// Ends leases of one shard whose time is over at `now`, and returns hits to give back. The shards take turns.
    pub fn end_leases(&self, now: Micros, turn: usize) -> Vec<Unspent> {
        let mut unspent = Vec::new();
        let mut shard = self.shards[turn % self.shards.len()].lock();
        self.leased.telling_due(&mut shard.leases, |leases| leases.end(now));
        shard.leases.unspent(&mut unspent);
        drop(shard);
        self.leased.count(LeaseHits::GivenBack, unspent.iter().map(|unspent| unspent.charge.hits.taken()).sum());
        unspent
    }

    /// Ends leases of all shards, as [`Known::end_leases`].
    pub fn end_all_leases(&self, now: Micros) -> Vec<Unspent> {
        (0..self.shards.len()).flat_map(|turn| self.end_leases(now, turn)).collect()
    }

    /// Ends all leases at once. [`Known::end_all_leases`] returns their hits.
    pub fn drop_leases(&self) {
        for shard in &self.shards {
            shard.lock().leases.close();
        }
    }

    /// Ends all leases; there are none from now on. [`Known::end_all_leases`] returns their hits.
    pub fn close_leases(&self) {
        self.leased.is_closed.store(true, Ordering::Relaxed);
        self.drop_leases();
    }

    /// Returns the number of counters with a lease.
    pub fn leases(&self) -> usize {
        self.shards.iter().map(|shard| shard.lock().leases.len()).sum()
    }

    /// Returns true if there are leases, or hits to give back.
    pub fn has_leases(&self) -> bool {
        self.shards.iter().any(|shard| !shard.lock().leases.is_idle())
    }

    /// Returns the number of hits of leases of this kind.
    pub fn lease_hits(&self, kind: LeaseHits) -> u64 {
        self.leased.hits[kind as usize].load(Ordering::Relaxed)
    }
}

impl Leased {
    /// Changes the leases of a shard, and wakes the task that asks for leases if a counter needs hits then, and none did before.
    fn telling_due<T>(&self, leases: &mut Leases, change: impl FnOnce(&mut Leases) -> T) -> T {
        let was_due = leases.is_due();
        let changed = change(leases);
        if !was_due && leases.is_due() {
            self.due.notify_one();
        }
        changed
    }

    fn count(&self, kind: LeaseHits, hits: u64) {
        if hits > 0 {
            self.hits[kind as usize].fetch_add(hits, Ordering::Relaxed);
        }
    }
}

/// Returns the terms of the lease that may pay a charge. Looks and refunds are the store's.
pub(super) fn leasable(charge: &Charge) -> Option<LeaseTerms> {
    charge.lease.filter(|_| charge.hits.taken() > 0 && charge.hits.given_back() == 0)
}

#[cfg(test)]
mod tests;
