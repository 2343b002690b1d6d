//! Leases: hits that were charged in the store ahead of the requests that spend them here.
//!
//! A counter gets a lease once two requests need it within one length of a lease. A lease is a few parcels, each from one reply of the
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

use super::parcel::{Parcel, Parts, Unspent};
use super::{BELIEVED, table};
use crate::algorithm::{Algorithm, Charge};
use crate::model::{Charging, CounterKey, Hits, LeaseTerms, Micros, Outcome, Provenance, Verdict};
use crate::store::Granted;

/// The most counters with a lease in one shard: 1,024, so 16,384 in all. They are looked through ten times a second.
const MOST_OF_SHARD: NonZeroUsize = NonZeroUsize::new(1_024).unwrap();
/// The first pause after the store granted nothing: 5 ms, the pause between two commands that ask for leases.
const FIRST_PAUSE: Micros = Micros::from_millis(5);
/// The longest such pause: 1 s, the age up to which a refusal is believed.
const LONGEST_PAUSE: Micros = Micros::from_secs(1);
/// The time after a charge can fit for which it waits for the next grant: 25 ms, the pause between two commands that ask for leases and a
/// round trip to a store nearby, several times over.
const GRACE: Micros = Micros::from_millis(25);
/// The most of the time in which an idle counter fills for which a charge that can fit waits: a part of 32.
const PART_OF_FILL: i128 = 32;
/// The least time in which an idle counter fills, if its callers wait for grants: 200 ms. A counter that fills faster would be full while they
/// wait, and lose hits.
const LEAST_FILL: Micros = Micros::from_millis(200);
/// The longest time in which one hit drains, if callers wait for grants: 250 ms. The store grants the last hits only of such limits.
const HIT: Micros = Micros::from_millis(250);
/// Charges under another limit of the counter, one after the other, after which a lease is given back: 8.
const OTHERS: u32 = 8;
/// The time of a grant from which a store is far, so that calls cannot wait for its decision: 20 ms, Envoy's timeout. Leases of such a store
/// are renewed also while no call comes, for one that comes between two renewals is decided by policy.
const FAR: Micros = Micros::from_millis(20);
/// Hits that a lease of a store that is far holds beside those that are expected until the next grant: 4, for calls come unevenly.
const SPARE: u64 = 4;
/// The most parcels of a lease: 32. Further hits go with those of the last parcel, as if they were as old.
const MOST_PARCELS: usize = 32;
/// The smallest size of a lease after its first hit: 2.
const LEAST_SIZE: u64 = 2;

/// The leases of one shard of counters.
pub(super) struct Leases {
    /// The least recently used is evicted first.
    counters: LruCache<CounterKey, CounterLease>,
    /// Counters that need hits.
    due: VecDeque<CounterKey>,
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
    /// Remaining hits in the store after the last reply, and the time at which the call was sent that it answers.
    remaining: u32,
    replied_at: Micros,
    /// Time at which one hit fits, if none did then.
    fits_at: Micros,
    /// Time at which the counter is idle, as of the last reply.
    reset_at: Micros,
    /// Time of the last grant, or of the lease's beginning, and the hits that were spent since.
    granted_at: Micros,
    spent: u64,
    /// The time that the last grant took, from the need to the reply.
    took: Micros,
    /// Time of the last request for the counter.
    used_at: Micros,
    /// Charges under another limit since the last one under this limit.
    others: u32,
    /// Time from which the store is asked again, after it granted nothing.
    ask_at: Micros,
    pause: Micros,
    /// True from the time at which it needs hits until the store has answered.
    is_asked: bool,
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
            lease.is_asked = true;
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
            let parcel = lease.as_mut().and_then(|lease| {
                let has_room = lease.held().saturating_add(hits) <= lease.most;
                lease.parcels.iter_mut().find(|parcel| parcel.at == at && has_room)
            });
            match parcel {
                Some(parcel) => parcel.left += hits,
                None => self.unspent.push(Unspent::new(charge, hits, at)),
            }
        }
    }

    /// Notes that a request at `now` needs the counter of `charge`, which has no lease, and that the store decides it.
    pub(super) fn want(&mut self, charge: &Charge, terms: LeaseTerms, now: Micros) {
        let is_too_small = terms.most(charge.limit.quota().limit(), NonZeroU32::MIN) == 0;
        if is_too_small || self.counters.contains(&charge.key) {
            return;
        }
        let lease = CounterLease {
            charge: Charge { charging: Charging::AllOrNothing, ..charge.clone() },
            terms,
            parcels: SmallVec::new(),
            size: charge.hits.taken().saturating_mul(2).max(LEAST_SIZE),
            most: u64::MAX,
            remaining: u32::MAX,
            replied_at: now,
            fits_at: Micros::ZERO,
            reset_at: now,
            granted_at: now,
            spent: 0,
            took: FIRST_PAUSE,
            used_at: now,
            others: 0,
            ask_at: now,
            pause: FIRST_PAUSE,
            is_asked: true,
        };
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
            let Some(lease) = self.counters.peek_mut(&key).filter(|lease| lease.is_asked) else { continue };
            let most = lease.terms.most(lease.charge.limit.quota().limit(), replicas);
            (lease.size, lease.most) = (lease.size.min(most), most);
            let hits = lease.size.saturating_sub(lease.lasting(now)).min(most.saturating_sub(lease.held()));
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
                self.unspent.push(Unspent::new(ask, hits, at));
            }
            return;
        };
        lease.is_asked = false;
        let is_of_window = lease.charge.limit.algorithm() == Algorithm::FixedWindow;
        let Some(Granted { at, hits, remaining, reset, retry }) = granted else {
            // A store that does not answer is asked ever less often.
            lease.pause(now);
            return;
        };
        if sent >= lease.replied_at {
            (lease.remaining, lease.replied_at, lease.reset_at) = (remaining, sent, sent.saturating_add(reset));
            lease.fits_at = retry.map_or(Micros::ZERO, |retry| sent.saturating_add(retry));
        }
        lease.pause = FIRST_PAUSE;
        lease.ask_at = lease.next_grant(now);
        // A lease that was given back while it was asked for can be asked for twice.
        let kept = hits.min(lease.most.saturating_sub(lease.held()));
        if kept < hits {
            self.unspent.push(Unspent::new(ask, hits - kept, at));
        }
        if kept > 0 {
            (lease.granted_at, lease.spent) = (now, 0);
            lease.took =
                now.saturating_sub(sent).saturating_add(FIRST_PAUSE).min(Micros::new(lease.terms.ttl().get() / 4));
            lease.parcels.retain(|parcel| parcel.left > 0);
            let counted_until = if is_of_window { lease.reset_at } else { Micros::new(u64::MAX) };
            let ends = sent.saturating_add(lease.terms.ttl()).min(counted_until);
            lease.add(Parcel { at, granted: kept, left: kept, since: sent, ends, counted_until }, now);
        }
    }

    /// Ends parcels whose time is over at `now`, and forgets counters that nobody needs any more.
    pub(super) fn end(&mut self, now: Micros) {
        let mut idle = SmallVec::<[CounterKey; 8]>::new();
        for (key, lease) in &mut self.counters {
            if lease.is_far() && lease.is_in_use(now) && lease.needs(0, Some(lease.left(now)), now) {
                lease.is_asked = true;
                self.due.push_back(key.clone());
            }
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

impl CounterLease {
    /// Returns the hits that can be spent at `now`.
    fn left(&self, now: Micros) -> u64 {
        self.parcels.iter().filter(|parcel| parcel.is_live(now)).map(|parcel| parcel.left).sum()
    }

    /// Returns the hits that can be spent at `now` and do not end before the store has granted more.
    fn lasting(&self, now: Micros) -> u64 {
        let soon = now.saturating_add(self.took).saturating_add(self.took);
        self.parcels.iter().filter(|parcel| parcel.is_live(now) && parcel.ends > soon).map(|parcel| parcel.left).sum()
    }

    /// Returns the hits that are held, also in parcels that have ended.
    fn held(&self) -> u64 {
        self.parcels.iter().map(|parcel| parcel.left).sum()
    }

    /// Returns true if the store is to be asked for more: most of the lease is spent, or it has too few hits for a charge (`left` is
    /// `None`). Adapts the size to the time that this took.
    fn needs(&mut self, hits: u64, left: Option<u64>, now: Micros) -> bool {
        let is_too_large = left.is_none() && !self.can_gather(hits, now);
        if self.is_asked
            || now < self.ask_at
            || is_too_large
            || left.is_some_and(|left| !self.is_low(left.min(self.lasting(now)), now))
        {
            return false;
        }
        let passed = now.saturating_sub(self.granted_at);
        if left.is_none() || passed.get() < self.terms.ttl().get() / 2 {
            self.size = self.size.saturating_mul(2).max(hits);
        }
        if self.is_far() {
            self.size = self.size.max(self.needed(now).saturating_mul(2));
        }
        true
    }

    /// Returns true if three quarters of the lease are spent, or if it will be spent before the store has granted more.
    fn is_low(&self, left: u64, now: Micros) -> bool {
        left <= self.size / 4 || left < self.needed(now)
    }

    /// Returns twice the hits that will be spent before the store has granted more, as many as since the last grant.
    fn needed(&self, now: Micros) -> u64 {
        let passed = now.saturating_sub(self.granted_at);
        let spare = if self.is_far() { SPARE } else { 0 };
        if passed < self.took.max(Micros::new(1)) {
            return spare;
        }
        self.spent.saturating_mul(2).saturating_mul(self.took.get()).div_ceil(passed.get()).saturating_add(spare)
    }

    /// Returns true if the store takes longer to grant hits than a call can wait for its decision.
    const fn is_far(&self) -> bool {
        self.took.get() >= FAR.get()
    }

    /// Returns true if a request needed the counter in the last half of a length of a lease.
    fn is_in_use(&self, now: Micros) -> bool {
        self.used_at <= now && now.saturating_sub(self.used_at).get() < self.terms.ttl().get() / 2
    }

    fn add(&mut self, parcel: Parcel, now: Micros) {
        let is_full = self.parcels.len() >= MOST_PARCELS;
        match self.parcels.last_mut().filter(|last| is_full && last.is_live(now)) {
            Some(last) => {
                last.granted += parcel.granted;
                last.left += parcel.left;
                last.ends = last.ends.min(parcel.ends);
                last.counted_until = last.counted_until.min(parcel.counted_until);
            }
            None => self.parcels.push(parcel),
        }
    }

    /// Asks the store again after a pause, which doubles.
    fn pause(&mut self, now: Micros) {
        self.ask_at = now.saturating_add(self.pause);
        self.pause = Micros::new(self.pause.get().saturating_mul(2)).min(LONGEST_PAUSE);
    }

    /// Returns the earliest time at which the store grants a hit, if no hits are given back before; at most a second from `now`.
    fn next_grant(&self, now: Micros) -> Micros {
        let quarter = 4_u32.saturating_sub(self.remaining);
        let wait = match (self.remaining, self.grants_last_hits()) {
            (0, true) => self.fits_at.saturating_sub(now),
            (_, true) => return now,
            (_, false) if quarter == 0 => return now,
            (_, false) if self.charge.limit.algorithm() == Algorithm::FixedWindow => self.reset_at.saturating_sub(now),
            (_, false) => Micros::new(self.hit().get().saturating_mul(quarter.into())),
        };
        now.saturating_add(wait.clamp(FIRST_PAUSE, LONGEST_PAUSE))
    }

    /// Returns the time in which one hit drains.
    fn hit(&self) -> Micros {
        let quota = self.charge.limit.quota();
        Micros::new(quota.window().length().get() / u64::from(quota.limit().max(1)))
    }

    /// Returns true if the store grants the last hits too, and not only a quarter of what remains.
    fn grants_last_hits(&self) -> bool {
        let quota = self.charge.limit.quota();
        let is_fast = u64::from(quota.limit()).saturating_mul(HIT.get()) >= quota.window().length().get();
        is_fast && self.charge.limit.algorithm() != Algorithm::FixedWindow
    }

    /// Returns true if a lease can hold so many hits together: what is granted first must not end before the last is.
    fn can_gather(&self, hits: u64, now: Micros) -> bool {
        let is_far = self.time_until(hits, now) > i128::from(self.terms.ttl().get() / 2);
        hits <= self.most && (!is_far || self.charge.limit.algorithm() == Algorithm::FixedWindow)
    }

    /// Returns the microseconds in which so many hits drain.
    fn time_of(&self, hits: i128) -> i128 {
        let quota = self.charge.limit.quota();
        hits * i128::from(quota.window().length().get()) / i128::from(quota.limit().max(1))
    }

    /// Returns the microseconds from the last reply until a charge of so many hits fits, negative if it fitted then.
    fn time_until(&self, hits: u64, now: Micros) -> i128 {
        self.time_of(i128::from(hits) - i128::from(self.remaining) - i128::from(self.left(now)))
    }

    /// Returns the time until a charge of so many hits gets its next answer. `None` if the store is to decide it: it may fit, or it does not
    /// wait for grants.
    fn wait(&self, hits: u64, now: Micros) -> Option<Micros> {
        let is_known = self.replied_at <= now && now < self.replied_at.saturating_add(BELIEVED);
        let is_awaited = self.is_asked || now < self.ask_at;
        let fill = self.time_of(self.charge.limit.capacity().into());
        let can_wait = self.grants_last_hits() && fill >= LEAST_FILL.get().into() && self.can_gather(hits, now);
        if !is_known || !is_awaited || !can_wait {
            return None;
        }
        let fits_at = i128::from(self.replied_at.get()) + self.time_until(hits, now);
        let fits_in = fits_at.max(self.fits_at.get().into()) - i128::from(now.get());
        let waits = fits_in + i128::from(GRACE.get()).min(fill / PART_OF_FILL) > 0;
        waits.then(|| Micros::new(u64::try_from(fits_in).unwrap_or(0)).max(FIRST_PAUSE))
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
        self.spent = self.spent.saturating_add(hits);
        parts
    }
}
