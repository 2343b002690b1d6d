//! Leases: hits that were charged in the store ahead of the requests that spend them here.
//!
//! A counter gets a lease once two requests need it within one length of a lease. A lease is a few parcels, each from one reply of the
//! store. The size of a lease follows the demand: it doubles while half of it is spent in less than a quarter of its length, and
//! shrinks to what was spent when a parcel ends before it is used up. The store grants at most a quarter of what remains, so leases
//! shrink to nothing as a counter runs out, and the store decides each charge. A counter of which many charges are refused stays with
//! its leases, where the next grant is near: the store is asked by the task that asks for leases, and not by each caller.

use std::num::{NonZeroU32, NonZeroUsize};

use lru::LruCache;
use smallvec::SmallVec;

use super::table;
use crate::algorithm::{Algorithm, Charge};
use crate::model::{Charging, CounterKey, Hits, LeaseTerms, Micros, Outcome, Provenance, Verdict};
use crate::store::Granted;

/// The most counters with a lease in one shard: 1,024, so 16,384 in all. They are looked through ten times a second.
const MOST_OF_SHARD: NonZeroUsize = NonZeroUsize::new(1_024).unwrap();
/// The first pause after the store granted nothing: 5 ms, the pause between two commands that ask for leases.
const FIRST_PAUSE: Micros = Micros::from_millis(5);
/// The longest such pause: 1 s, the age up to which a refusal is believed.
const LONGEST_PAUSE: Micros = Micros::from_secs(1);
/// Refused charges in the last tenths of a second from which a counter may be at its limit: 4, and at least one of sixteen.
const AT_LIMIT: u32 = 4;
/// The most admitted charges for each refused one of a counter at its limit: 15.
const ADMITTED_AT_LIMIT: u32 = 15;
/// The part of its limit that a counter has left at most while it is at its limit: one of 64. Another instance may take what is refused here.
const NEARLY_USED_UP: u32 = 64;
/// The least limit of a sliding window whose callers wait for leases: 64. The store grants nothing of the last three hits, and less than one
/// hit of twenty may go unused.
const LEAST_SLIDING: u32 = 64;
/// The time for which callers of a counter at its limit wait for leases although nothing is admitted: 1 s. Then one of them asks the store.
const PROBED: Micros = Micros::from_secs(1);
/// Charges under another limit of the counter, one after the other, after which a lease is given back: 8.
const OTHERS: u32 = 8;
/// The smallest size of a lease after its first hit: 2.
const LEAST_SIZE: u64 = 2;

/// The leases of one shard of counters.
pub(super) struct Leases {
    /// The least recently used is evicted first.
    counters: LruCache<CounterKey, CounterLease>,
    /// Counters that need hits.
    due: Vec<CounterKey>,
    /// Hits that nobody spends any more.
    unspent: Vec<Unspent>,
}

/// The lease of one counter.
struct CounterLease {
    /// The counter and its limit, as they are asked for.
    charge: Charge,
    terms: LeaseTerms,
    /// Spent in this order.
    parcels: SmallVec<[Parcel; 2]>,
    /// Hits to hold.
    size: u64,
    /// The most hits to hold, as of the last time that the store was asked.
    most: u64,
    /// Remaining hits in the store after the last reply.
    remaining: u32,
    /// Time at which the counter is idle, as of the last reply.
    reset_at: Micros,
    /// Time of the last grant, or of the lease's beginning.
    granted_at: Micros,
    /// Time of the last request for the counter.
    used_at: Micros,
    /// Time of the last admitted charge, or of the last one that was let through to the store although its callers wait for leases.
    probed_at: Micros,
    /// Charges under another limit since the last one under this limit.
    others: u32,
    /// Time from which the store is asked again, after it granted nothing.
    ask_at: Micros,
    pause: Micros,
    /// True from the time at which it needs hits until the store has answered.
    is_asked: bool,
    /// Charges that were admitted and refused in the last tenths of a second; an older tenth counts half.
    admitted: u32,
    refused: u32,
}

/// Hits from one reply of the store.
struct Parcel {
    /// Time of the charge by the store's clock.
    at: Micros,
    granted: u64,
    left: u64,
    /// Time at which it was asked for. After a step of the clock backwards before it, its age is unknown.
    since: Micros,
    ends: Micros,
    /// Time from which the hits are no longer on the counter, so that giving them back changes nothing.
    counted_until: Micros,
}

/// Hits of a lease that were spent on one charge: those of each parcel, by the time of the parcel.
type Parts = SmallVec<[(Micros, u64); 2]>;

/// A charge that a lease has paid.
pub(super) struct Spent {
    pub(super) verdict: Verdict,
    parts: Parts,
}

/// Hits of a lease that are given back.
pub struct Unspent {
    /// The counter, its limit and the hits.
    pub charge: Charge,
    /// Time at which they were charged, by the store's clock.
    pub at: Micros,
}

impl Default for Leases {
    fn default() -> Self {
        Self { counters: table(MOST_OF_SHARD), due: Vec::new(), unspent: Vec::new() }
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
        let lease = self.counters.get_mut(&charge.key).filter(|lease| lease.charge.limit == charge.limit)?;
        (lease.used_at, lease.others) = (now, 0);
        let left = lease.left(now);
        let paid = left.checked_sub(hits);
        if lease.needs(hits, paid, now) {
            lease.is_asked = true;
            self.due.push(charge.key.clone());
        }
        let left = paid?;
        lease.count(false, now);
        let parts = lease.take(hits, now);
        let remaining = lease.remaining.saturating_add(u32::try_from(left).unwrap_or(u32::MAX));
        let reset = lease.reset_at.saturating_sub(now);
        let verdict =
            Verdict { remaining, room: remaining, reset, ..Verdict::uncounted(Outcome::Admitted, Provenance::Lease) };
        Some(Spent { verdict, parts })
    }

    /// Puts back the hits of a charge that is not made after all.
    pub(super) fn put_back(&mut self, charge: &Charge, spent: Spent) {
        let Some(lease) = self.counters.peek_mut(&charge.key) else { return };
        for (at, hits) in spent.parts {
            if let Some(parcel) = lease.parcels.iter_mut().find(|parcel| parcel.at == at) {
                parcel.left += hits;
            }
        }
    }

    /// Notes that a request at `now` needs the counter of `charge`, which has no lease, and that the store decides it.
    pub(super) fn want(&mut self, charge: &Charge, terms: LeaseTerms, now: Micros) {
        if self.counters.contains(&charge.key) {
            return;
        }
        let lease = CounterLease {
            charge: Charge { charging: Charging::AllOrNothing, ..charge.clone() },
            terms,
            parcels: SmallVec::new(),
            size: charge.hits.taken().saturating_mul(2).max(LEAST_SIZE),
            most: u64::MAX,
            remaining: u32::MAX,
            reset_at: now,
            granted_at: now,
            used_at: now,
            probed_at: now,
            others: 0,
            ask_at: now,
            pause: FIRST_PAUSE,
            is_asked: true,
            admitted: 0,
            refused: 0,
        };
        self.due.push(charge.key.clone());
        if let Some((key, evicted)) = self.counters.push(charge.key.clone(), lease)
            && key != charge.key
        {
            self.give_back(evicted);
        }
    }

    /// Notes the reply of the store to a charge at `now`. Returns the hits that this instance holds beside it.
    pub(super) fn note(&mut self, charge: &Charge, is_refused: bool, now: Micros) -> u64 {
        let Some(lease) = self.counters.peek_mut(&charge.key) else { return 0 };
        let left = lease.left(now);
        if lease.charge.limit == charge.limit {
            lease.terms = charge.lease.unwrap_or(lease.terms);
            lease.count(is_refused, now);
        }
        self.leave_other_limit(charge, is_refused);
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

    /// Notes that a refusal of a counter still holds.
    pub(super) fn note_known(&mut self, key: &CounterKey, now: Micros) {
        if let Some(lease) = self.counters.peek_mut(key) {
            lease.count(true, now);
        }
    }

    /// Returns the refusal of a charge at `now` of a counter at its limit, whose callers wait for the next grant of the store. `None` if
    /// the store is to decide it.
    pub(super) fn refusal_until_grant(&mut self, charge: &Charge, now: Micros) -> Option<Verdict> {
        let lease = self.counters.peek_mut(&charge.key).filter(|lease| lease.charge.limit == charge.limit)?;
        let retry = lease.next_grant(charge.hits.taken(), now)?;
        if lease.probed_at.saturating_add(PROBED) <= now {
            lease.probed_at = now;
            return None;
        }
        lease.count(true, now);
        let reset = lease.reset_at.saturating_sub(now);
        Some(Verdict { reset, retry: Some(retry), ..Verdict::uncounted(Outcome::Refused, Provenance::Known) })
    }

    /// Adds the charges to ask for at `now` to `asks`. A counter's leases in all instances together hold at most their share.
    pub(super) fn ask(&mut self, now: Micros, replicas: NonZeroU32, asks: &mut Vec<Charge>) {
        for key in std::mem::take(&mut self.due) {
            let Some(lease) = self.counters.peek_mut(&key).filter(|lease| lease.is_asked) else { continue };
            let most = lease.terms.most(lease.charge.limit.quota().limit(), replicas);
            (lease.size, lease.most) = (lease.size.min(most), most);
            let hits = lease.size.saturating_sub(lease.held());
            if most == 0 {
                // Its share is less than one hit.
                if let Some(lease) = self.counters.pop(&key) {
                    self.give_back(lease);
                }
                continue;
            }
            if hits == 0 {
                lease.is_asked = false;
                lease.ask_at = now.saturating_add(FIRST_PAUSE);
                continue;
            }
            asks.push(Charge { hits: Hits::take(hits), ..lease.charge.clone() });
        }
    }

    /// Adds the hits that the store granted to an `ask` that was sent at `sent`; `None` if it did not answer.
    pub(super) fn grant(&mut self, ask: &Charge, granted: Option<Granted>, sent: Micros, now: Micros) {
        let lease = self.counters.peek_mut(&ask.key).filter(|lease| lease.charge.limit == ask.limit);
        let Some(lease) = lease else {
            // The limit has changed meanwhile, or the lease was evicted.
            if let Some(Granted { at, hits, .. }) = granted.filter(|granted| granted.hits > 0) {
                self.unspent.push(Unspent { charge: Charge { hits: Hits::take(hits), ..ask.clone() }, at });
            }
            return;
        };
        lease.is_asked = false;
        let is_of_window = lease.charge.limit.algorithm() == Algorithm::FixedWindow;
        if let Some(Granted { remaining, reset, .. }) = granted {
            (lease.remaining, lease.reset_at) = (remaining, sent.saturating_add(reset));
        }
        let Some(Granted { at, hits, .. }) = granted.filter(|granted| granted.hits > 0) else {
            lease.ask_at = now.saturating_add(lease.pause);
            if granted.is_some() && is_of_window {
                lease.ask_at = lease.ask_at.min(lease.reset_at);
            }
            // A store that does not answer is asked ever less often.
            let longest = if granted.is_some() { lease.longest_pause() } else { LONGEST_PAUSE };
            lease.pause = Micros::new(lease.pause.get().saturating_mul(2)).min(longest);
            return;
        };
        lease.pause = FIRST_PAUSE;
        lease.granted_at = now;
        lease.parcels.retain(|parcel| parcel.left > 0);
        let counted_until = if is_of_window { lease.reset_at } else { Micros::new(u64::MAX) };
        let ends = sent.saturating_add(lease.terms.ttl()).min(counted_until);
        lease.parcels.push(Parcel { at, granted: hits, left: hits, since: sent, ends, counted_until });
    }

    /// Ends parcels whose time is over at `now`, and forgets counters that nobody needs any more.
    pub(super) fn end(&mut self, now: Micros) {
        let mut idle = SmallVec::<[CounterKey; 8]>::new();
        for (key, lease) in &mut self.counters {
            lease.admitted /= 2;
            lease.refused /= 2;
            while let Some(place) = lease.parcels.iter().position(|parcel| !parcel.is_live(now)) {
                let parcel = lease.parcels.remove(place);
                if parcel.left > 0 {
                    lease.size = lease.size.min(parcel.granted - parcel.left).max(1);
                }
                self.unspent.extend(parcel.unspent(&lease.charge, now));
            }
            let is_unused = lease.used_at.saturating_add(lease.terms.ttl()) <= now || lease.used_at > now;
            if lease.parcels.is_empty() && !lease.is_asked && is_unused {
                idle.push(key.clone());
            }
        }
        for key in idle {
            self.counters.pop(&key);
        }
    }

    /// Ends all leases.
    pub(super) fn close(&mut self) {
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

impl CounterLease {
    /// Returns the hits that can be spent at `now`.
    fn left(&self, now: Micros) -> u64 {
        self.parcels.iter().filter(|parcel| parcel.is_live(now)).map(|parcel| parcel.left).sum()
    }

    fn count(&mut self, is_refused: bool, now: Micros) {
        let count = if is_refused { &mut self.refused } else { &mut self.admitted };
        *count = count.saturating_add(1);
        if !is_refused {
            self.probed_at = now;
        }
    }

    /// Returns the time until the next grant, if the counter is at its limit, and a charge of so many hits waits for that.
    fn next_grant(&self, hits: u64, now: Micros) -> Option<Micros> {
        let is_refused_often = self.refused >= AT_LIMIT && self.refused >= self.admitted / ADMITTED_AT_LIMIT;
        let is_at_limit = is_refused_often || self.remaining <= self.charge.limit.quota().limit() / NEARLY_USED_UP;
        let is_awaited = self.is_asked || now < self.ask_at;
        // A charge that leases are too small for does not wait for them.
        let is_payable = hits <= self.most / 2;
        (is_at_limit && is_awaited && is_payable && self.is_refilled_soon())
            .then(|| self.ask_at.saturating_sub(now).max(FIRST_PAUSE))
    }

    /// Returns true if the counter always gets room for a grant soon, and loses nothing if that is used a little later.
    fn is_refilled_soon(&self) -> bool {
        let is_loss_small = match self.charge.limit.algorithm() {
            Algorithm::FixedWindow => false,
            Algorithm::SlidingWindow => self.charge.limit.quota().limit() >= LEAST_SLIDING,
            _ => true,
        };
        is_loss_small && self.longest_pause() < LONGEST_PAUSE
    }

    /// Returns the hits that are held, also in parcels that have ended.
    fn held(&self) -> u64 {
        self.parcels.iter().map(|parcel| parcel.left).sum()
    }

    /// Returns true if the store is to be asked for more: half of the lease is spent, or it has too few hits for a charge (`left` is
    /// `None`). Adapts the size to the time that this took.
    fn needs(&mut self, hits: u64, left: Option<u64>, now: Micros) -> bool {
        if self.is_asked || now < self.ask_at || left.is_some_and(|left| left > self.size / 2) {
            return false;
        }
        let passed = now.saturating_sub(self.granted_at);
        if left.is_none() || passed.get() < self.terms.ttl().get() / 4 {
            self.size = self.size.saturating_mul(2).max(hits);
        }
        true
    }

    /// Returns the longest pause after the store granted nothing: the time in which it has room for the four hits of which it grants one.
    /// A fixed window that is used up has none until it ends.
    fn longest_pause(&self) -> Micros {
        if self.charge.limit.algorithm() == Algorithm::FixedWindow {
            return LONGEST_PAUSE;
        }
        let quota = self.charge.limit.quota();
        let four_hits = quota.window().length().get().saturating_mul(4) / u64::from(quota.limit().max(1));
        Micros::new(four_hits).clamp(FIRST_PAUSE, LONGEST_PAUSE)
    }

    fn take(&mut self, hits: u64, now: Micros) -> Parts {
        let mut parts = Parts::new();
        let mut missing = hits;
        for parcel in self.parcels.iter_mut().filter(|parcel| parcel.is_live(now)) {
            let taken = parcel.left.min(missing);
            if taken > 0 {
                parcel.left -= taken;
                missing -= taken;
                parts.push((parcel.at, taken));
            }
        }
        parts
    }
}

impl Parcel {
    fn is_live(&self, now: Micros) -> bool {
        self.since <= now && now < self.ends
    }

    /// Returns the hits to give back at `now`.
    fn unspent(self, charge: &Charge, now: Micros) -> Option<Unspent> {
        let is_counted = self.left > 0 && now < self.counted_until;
        is_counted.then(|| Unspent { charge: Charge { hits: Hits::take(self.left), ..charge.clone() }, at: self.at })
    }
}
