//! Leases: hits that were charged in the store ahead of the requests that spend them here.
//!
//! A counter gets a lease once two requests need it within six lengths of a lease. A lease is a few parcels, each from one reply of the
//! store. The size of a lease follows the demand: it doubles while three quarters of it are spent in less than half of its length, and
//! shrinks to what was spent when a parcel ends before it is used up. The store grants at most a quarter of what remains, so leases
//! shrink to nothing as a counter runs out, and the store decides each charge.
//!
//! Of a counter that is used up, the last reply and the rate of the limit tell when a charge can fit. Until a little after that, it is
//! refused here, and the hits that drain meanwhile come with the next grant: so the task that asks for leases asks the store, and not
//! each caller.

use std::collections::VecDeque;
use std::num::{NonZeroU32, NonZeroUsize};

use lru::LruCache;
use smallvec::SmallVec;

use super::counter_lease::{Asking, CounterLease};
use super::parcel::{Parts, Unspent};
use super::table;
use crate::algorithm::Charge;
use crate::model::{CounterKey, Hits, LeaseTerms, Micros, Outcome, Provenance, Verdict};
use crate::store::Granted;

/// The most counters with a lease in one shard: 1,024, so 16,384 in all. They are looked through ten times a second.
const MOST_OF_SHARD: NonZeroUsize = NonZeroUsize::new(1_024).unwrap();
/// Charges under another limit of the counter, one after the other, after which a lease is given back: 8.
const OTHERS: u32 = 8;

/// The leases of one shard of counters.
pub(super) struct Leases {
    /// The least recently used is evicted first.
    counters: LruCache<CounterKey, CounterLease>,
    /// Counters that need hits.
    due: VecDeque<CounterKey>,
    /// Hits that nobody spends any more.
    unspent: Vec<Unspent>,
}

/// A charge that a lease has paid.
pub struct Spent {
    /// The answer.
    pub verdict: Verdict,
    parts: Parts,
}

impl Default for Leases {
    fn default() -> Self {
        Self { counters: table(MOST_OF_SHARD), due: VecDeque::new(), unspent: Vec::new() }
    }
}

impl Leases {
    /// Returns the number of counters with a lease.
    pub(super) fn len(&self) -> usize {
        self.counters.len()
    }

    /// Returns true if there are no leases and no hits to give back.
    pub(super) fn is_idle(&self) -> bool {
        self.counters.is_empty() && self.unspent.is_empty()
    }

    /// Returns true if a counter needs hits.
    pub(super) fn is_due(&self) -> bool {
        !self.due.is_empty()
    }

    /// Pays a charge at `now` from the lease of its counter. `None` if the lease has too few hits, or if there is none.
    pub(super) fn spend(&mut self, charge: &Charge, now: Micros) -> Option<Spent> {
        let hits = charge.hits.taken();
        if hits > charge.limit.capacity().into() {
            // It never fits, and the store says so.
            return None;
        }
        let lease = self.counters.get_mut(&charge.key).filter(|lease| lease.charge.limit == charge.limit)?;
        (lease.used_at, lease.others) = (now, 0);
        lease.terms = charge.lease.unwrap_or(lease.terms);
        let left = lease.left(now);
        let paid = left.checked_sub(hits).map(|left| (left, lease.take(hits, now)));
        if lease.needs(hits, paid.as_ref().map(|(left, _)| *left), now) {
            lease.asking = Asking::Due;
            self.due.push_back(charge.key.clone());
        }
        let (left, parts) = paid?;
        let (remaining, reset) = (lease.remaining, lease.reset_at.saturating_sub(now));
        let of_store = Verdict { remaining, reset, ..Verdict::uncounted(Outcome::Admitted, Provenance::Lease) };
        Some(Spent { verdict: of_store.with_more(left), parts })
    }

    /// Puts back the hits of a charge that is not made after all. If their parcel has ended meanwhile, or the lease holds as many as it may,
    /// they are given back.
    pub(super) fn put_back(&mut self, charge: &Charge, spent: Spent) {
        let mut lease = self.counters.peek_mut(&charge.key);
        for (at, hits) in spent.parts {
            if !lease.as_mut().is_some_and(|lease| lease.put_back(at, hits)) {
                self.unspent.push(Unspent::new(charge, hits, at));
            }
        }
    }

    /// Notes that a request at `now` needs the counter of `charge`, which has no lease, and that the store decides it. After its last reply,
    /// `remaining` hits remained.
    pub(super) fn want(&mut self, charge: &Charge, terms: LeaseTerms, remaining: u32, now: Micros) {
        let is_too_small = terms.most(charge.limit.quota().limit(), NonZeroU32::MIN) == 0;
        if is_too_small || self.counters.contains(&charge.key) {
            return;
        }
        let lease = CounterLease::new(charge, terms, remaining, now);
        self.due.push_back(charge.key.clone());
        if let Some((key, evicted)) = self.counters.push(charge.key.clone(), lease)
            && key != charge.key
        {
            self.give_back(evicted);
        }
    }

    /// Notes the store's reply `verdict` to a charge that was sent at `at`. Returns the hits that this instance holds beside it.
    pub(super) fn note(&mut self, charge: &Charge, verdict: &Verdict, at: Micros) -> u64 {
        let Some(lease) = self.counters.peek_mut(&charge.key) else { return 0 };
        let left = lease.left(at);
        if lease.charge.limit == charge.limit && at >= lease.replied_at {
            (lease.remaining, lease.replied_at) = (verdict.remaining, at);
            lease.reset_at = at.saturating_add(verdict.reset);
            let retry = verdict.retry.filter(|_| charge.hits.taken() == 1);
            lease.fits_at = retry.map_or(Micros::ZERO, |retry| at.saturating_add(retry));
        }
        self.leave_other_limit(charge, verdict.outcome.is_refused());
        left
    }

    /// Gives back the lease of a counter that is charged under another limit now, if the charge is refused or the limit of the lease comes no
    /// more.
    pub(super) fn leave_other_limit(&mut self, charge: &Charge, is_refused: bool) {
        let lease = self.counters.peek_mut(&charge.key).filter(|lease| lease.charge.limit != charge.limit);
        let Some(lease) = lease else { return };
        lease.others += 1;
        if (is_refused || lease.others >= OTHERS)
            && let Some(lease) = self.counters.pop(&charge.key)
        {
            self.give_back(lease);
        }
    }

    /// Returns the refusal of a charge at `now` that cannot fit yet, or that waits for the next grant. `None` if the store is to decide it.
    pub(super) fn refusal(&self, charge: &Charge, now: Micros) -> Option<Verdict> {
        if !charge.remembers_refusals {
            return None;
        }
        let lease = self.counters.peek(&charge.key).filter(|lease| lease.charge.limit == charge.limit)?;
        let retry = Some(lease.wait(charge.hits.taken(), now)?);
        let reset = lease.reset_at.saturating_sub(now);
        Some(Verdict { reset, retry, ..Verdict::uncounted(Outcome::Refused, Provenance::Known) })
    }

    /// Adds charges to ask for at `now` to `asks`, until these are `limit`. A counter's leases in all instances together hold at most their
    /// share.
    pub(super) fn ask(&mut self, now: Micros, replicas: NonZeroU32, limit: usize, asks: &mut Vec<Charge>) {
        while asks.len() < limit
            && let Some(key) = self.due.pop_front()
        {
            let is_due = |lease: &&mut CounterLease| lease.asking == Asking::Due;
            let Some(lease) = self.counters.peek_mut(&key).filter(is_due) else { continue };
            match lease.ask(now, replicas) {
                Some(0) => {}
                Some(hits) => asks.push(Charge { hits: Hits::take(hits.into()), ..lease.charge.clone() }),
                None => {
                    if let Some(lease) = self.counters.pop(&key) {
                        self.give_back(lease);
                    }
                }
            }
        }
    }

    /// Returns the hits to ask for beside a charge that the store decides at `now`; 0 if its counter needs none, or if calls cannot wait for the
    /// store.
    pub(super) fn carry(&mut self, charge: &Charge, now: Micros, replicas: NonZeroU32) -> u32 {
        let is_due = |lease: &&mut CounterLease| {
            lease.asking == Asking::Due && lease.charge.limit == charge.limit && !lease.is_far()
        };
        let lease = self.counters.peek_mut(&charge.key).filter(is_due);
        lease.and_then(|lease| lease.ask(now, replicas)).unwrap_or(0)
    }

    /// Notes that a call with this `ask` was not sent, or was answered too late.
    pub(super) fn ask_again(&mut self, ask: &Charge, is_late: bool) {
        let is_asked = |lease: &&mut CounterLease| lease.asking == Asking::Sent && lease.charge.limit == ask.limit;
        if let Some(lease) = self.counters.peek_mut(&ask.key).filter(is_asked) {
            lease.ask_again(is_late);
            self.due.push_back(ask.key.clone());
        }
    }

    /// Adds the hits that the store granted to an `ask` that was sent at `sent`; `None` if it did not answer.
    pub(super) fn grant(&mut self, ask: &Charge, granted: Option<Granted>, sent: Micros, now: Micros) {
        let lease = self.counters.peek_mut(&ask.key).filter(|lease| lease.charge.limit == ask.limit);
        let Some(lease) = lease else {
            // The limit has changed meanwhile, or the lease was evicted.
            if let Some(Granted { at, hits, .. }) = granted.filter(|granted| granted.hits > 0) {
                self.unspent.push(Unspent::new(ask, hits, at));
            }
            return;
        };
        match granted {
            Some(granted) => self.unspent.extend(lease.grant(granted, sent, now)),
            None => lease.pause(now),
        }
    }

    /// Ends parcels whose time is over at `now`, and forgets counters that nobody needs any more.
    pub(super) fn end(&mut self, now: Micros) {
        let mut idle = SmallVec::<[CounterKey; 8]>::new();
        for (key, lease) in &mut self.counters {
            lease.end_parcels(now, &mut self.unspent);
            if lease.needs_renewal(now) {
                lease.asking = Asking::Due;
                self.due.push_back(key.clone());
            }
            if lease.parcels.is_empty() && lease.asking == Asking::No && lease.is_unused(now) {
                idle.push(key.clone());
            }
        }
        for key in idle {
            self.counters.pop(&key);
        }
    }

    /// Ends all leases.
    pub(super) fn close(&mut self) {
        self.due.clear();
        while let Some((_, lease)) = self.counters.pop_lru() {
            self.give_back(lease);
        }
    }

    /// Removes and returns the hits that are to be given back.
    pub(super) fn unspent(&mut self, into: &mut Vec<Unspent>) {
        into.append(&mut self.unspent);
    }

    fn give_back(&mut self, lease: CounterLease) {
        let CounterLease { charge, parcels, .. } = lease;
        self.unspent.extend(parcels.into_iter().filter_map(|parcel| parcel.unspent(&charge, Micros::ZERO)));
    }
}
