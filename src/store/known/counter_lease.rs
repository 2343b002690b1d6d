//! The lease of one counter: what it holds, when it needs more, and how long its callers wait.

use std::num::NonZeroU32;

use smallvec::SmallVec;

use super::BELIEVED;
use super::parcel::{Parcel, Parts, Unspent};
use crate::algorithm::{Algorithm, Charge, Limit};
use crate::model::{Charging, LeaseTerms, Micros};
use crate::store::Granted;

/// The lengths of a lease within which two requests of a counter get it one: 6. The second of two requests with more time between them is
/// seldom followed by a third before its lease ends. A counter of a store that is far is renewed for as long after its last request.
const LATELY: u64 = 6;
/// The smallest size of a lease after its first hit: 2.
const LEAST_SIZE: u64 = 2;
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
/// The time of a grant, with the pause before it, from which a store is far: 20 ms, Envoy's timeout, so that calls cannot wait for its
/// decision. Leases of such a store are renewed also while no call comes, for one that comes between two renewals is decided by policy.
const FAR: Micros = Micros::from_millis(20);
/// The time between two looks at a lease that no call needs: 100 ms, in which each shard has its turn once.
const TURN: Micros = Micros::from_millis(100);
/// Hits that a lease of a store that is far holds beside those that are expected until the next grant: 4, for calls come unevenly.
const SPARE: u64 = 4;
/// The time in which hits drain that are not given back while at least half of the limit remains: 100 ms. To give them back costs the store as
/// much as a call, and changes no decision.
const DRAINED: Micros = Micros::from_millis(100);
/// The time in which the hits drain that a lease asks for at least, while at least half of the limit remains: 10 ms, with leases of a second
/// a hundredth of the limit for each instance. Calls of a counter come unevenly, and each beyond the lease would be one in the store.
const AT_EASE: Micros = Micros::from_millis(10);
/// The most of these hits: 16. A counter that needs more in a length of its lease shows it, and its size follows.
const MOST_AT_EASE: u64 = 16;
/// The most parcels of a lease: 32. Further hits go with those of the last parcel, as if they were as old.
const MOST_PARCELS: usize = 32;

/// The lease of one counter.
pub(super) struct CounterLease {
    /// The counter and its limit, as they are asked for.
    pub(super) charge: Charge,
    pub(super) terms: LeaseTerms,
    /// Spent in this order.
    pub(super) parcels: SmallVec<[Parcel; 2]>,
    /// Hits to hold.
    pub(super) size: u64,
    /// The most hits to hold, as of the last time that the store was asked.
    pub(super) most: u64,
    /// Remaining hits in the store after the last reply, and the time at which the call was sent that it answers.
    pub(super) remaining: u32,
    pub(super) replied_at: Micros,
    /// Time at which one hit fits, if none did then.
    pub(super) fits_at: Micros,
    /// Time at which the counter is idle, as of the last reply.
    pub(super) reset_at: Micros,
    /// Time of the last grant, or of the lease's beginning, and the hits that were spent since.
    granted_at: Micros,
    spent: u64,
    /// The time that the last grant took, from the need to the reply.
    took: Micros,
    /// Time of the last request for the counter.
    pub(super) used_at: Micros,
    /// Charges under another limit since the last one under this limit.
    pub(super) others: u32,
    /// Time from which the store is asked again, after it granted nothing.
    pub(super) ask_at: Micros,
    pause: Micros,
    pub(super) asking: Asking,
}

/// Progress of an ask for hits.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Asking {
    /// It needs none.
    No,
    /// It needs some.
    Due,
    /// The store is asked, and has not answered.
    Sent,
}

impl CounterLease {
    /// Returns that of the counter of `charge`, which needs its first hits at `now`. After its last reply, `remaining` hits remained.
    pub(super) fn new(charge: &Charge, terms: LeaseTerms, remaining: u32, now: Micros) -> Self {
        let size = charge.hits.taken().saturating_mul(2).max(LEAST_SIZE);
        Self {
            charge: Charge { charging: Charging::AllOrNothing, ..charge.clone() },
            terms,
            parcels: SmallVec::new(),
            size: size.max(at_ease(&charge.limit, remaining)),
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
            asking: Asking::Due,
        }
    }

    /// Returns the hits that can be spent at `now`.
    pub(super) fn left(&self, now: Micros) -> u64 {
        self.parcels.iter().filter(|parcel| parcel.is_live(now)).map(|parcel| parcel.left).sum()
    }

    /// Returns the hits that can be spent at `now` and do not end before the store has granted more.
    pub(super) fn lasting(&self, now: Micros) -> u64 {
        let turn = if self.is_far() { TURN } else { Micros::ZERO };
        let grant = self.took.saturating_add(self.took).saturating_add(turn);
        let soon = now.saturating_add(grant.min(self.half()));
        self.parcels.iter().filter(|parcel| parcel.is_live(now) && parcel.ends > soon).map(|parcel| parcel.left).sum()
    }

    /// Returns the hits that are held, also in parcels that have ended.
    pub(super) fn held(&self) -> u64 {
        self.parcels.iter().map(|parcel| parcel.left).sum()
    }

    /// Returns true if the store is to be asked for more: most of the lease is spent, or it has too few hits for a charge (`left` is
    /// `None`). Adapts the size to the time that this took.
    pub(super) fn needs(&mut self, hits: u64, left: Option<u64>, now: Micros) -> bool {
        let is_needed = |lease: &Self| match left {
            Some(left) => lease.is_low(left.min(lease.lasting(now)), now),
            None => lease.can_gather(hits, now),
        };
        if !self.may_ask(now) || !is_needed(self) {
            return false;
        }
        if left.is_none() || now.saturating_sub(self.granted_at) < self.half() {
            self.size = self.size.saturating_mul(2).max(hits);
        }
        self.hold_spare(now);
        true
    }

    /// Returns true if the store is to be asked for more although no call comes: it is far, and what is left is little, or ends soon.
    pub(super) fn needs_renewal(&mut self, now: Micros) -> bool {
        let is_last_of_window =
            self.charge.limit.algorithm() == Algorithm::FixedWindow && self.reset_at <= now.saturating_add(self.took);
        // What little remains is for those who call.
        let has_room = u64::from(self.remaining) >= SPARE * 4 && !is_last_of_window;
        let is_needed = self.is_far() && !self.is_unused(now) && has_room && self.may_ask(now);
        if !is_needed || !self.is_low(self.lasting(now), now) {
            return false;
        }
        self.hold_spare(now);
        true
    }

    /// Returns half of its length.
    const fn half(&self) -> Micros {
        Micros::new(self.terms.ttl().get() / 2)
    }

    fn may_ask(&self, now: Micros) -> bool {
        self.asking == Asking::No && now >= self.ask_at
    }

    /// Sets the least size for a store that is far.
    fn hold_spare(&mut self, now: Micros) {
        if self.is_far() {
            self.size = self.size.max(self.needed(now).saturating_mul(2));
        }
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
    pub(super) const fn is_far(&self) -> bool {
        self.took.get() >= FAR.get()
    }

    /// Returns true if no request has needed the counter for a length of its lease, or, if the store is far, for the time within which two
    /// requests get it a lease.
    pub(super) fn is_unused(&self, now: Micros) -> bool {
        let kept = if self.is_far() { lately(self.terms) } else { self.terms.ttl() };
        self.used_at > now || self.used_at.saturating_add(kept) <= now
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

    /// Adds the hits that the store granted to an ask that was sent at `sent`. Returns those that the lease may not hold.
    pub(super) fn grant(&mut self, granted: Granted, sent: Micros, now: Micros) -> Option<Unspent> {
        let Granted { at, hits, remaining, reset, retry } = granted;
        self.asking = Asking::No;
        let reset_at = sent.saturating_add(reset);
        if sent >= self.replied_at {
            (self.remaining, self.replied_at, self.reset_at) = (remaining, sent, reset_at);
            self.fits_at = retry.map_or(Micros::ZERO, |retry| sent.saturating_add(retry));
        }
        self.pause = FIRST_PAUSE;
        self.ask_at = self.next_grant(now);
        // A lease that was given back while it was asked for can be asked for twice.
        let kept = hits.min(self.most.saturating_sub(self.held()));
        if kept > 0 {
            (self.granted_at, self.spent) = (now, 0);
            self.took =
                now.saturating_sub(sent).saturating_add(FIRST_PAUSE).min(Micros::new(self.terms.ttl().get() / 4));
            self.parcels.retain(|parcel| parcel.left > 0);
            let is_of_window = self.charge.limit.algorithm() == Algorithm::FixedWindow;
            let counted_until = if is_of_window { reset_at } else { Micros::new(u64::MAX) };
            let ends = sent.saturating_add(self.terms.ttl()).min(counted_until);
            self.add(Parcel { at, granted: kept, left: kept, since: sent, ends, counted_until }, now);
        }
        (kept < hits).then(|| Unspent::new(&self.charge, hits - kept, at))
    }

    /// Ends parcels whose time is over at `now`. Adds what is left of them to `unspent`.
    pub(super) fn end_parcels(&mut self, now: Micros, unspent: &mut Vec<Unspent>) {
        let mut ended = SmallVec::<[Parcel; 2]>::new();
        while let Some(place) = self.parcels.iter().position(|parcel| !parcel.is_live(now)) {
            let parcel = self.parcels.remove(place);
            if parcel.left > 0 {
                let spent = parcel.granted.saturating_sub(parcel.left);
                self.size = self.size.min(spent).max(at_ease(&self.charge.limit, self.remaining)).max(1);
            }
            ended.push(parcel);
        }
        if !drain_soon(&self.charge.limit, self.remaining, ended.iter().map(|parcel| parcel.left).sum()) {
            unspent.extend(ended.into_iter().filter_map(|parcel| parcel.unspent(&self.charge, now)));
        }
    }

    /// Puts back hits of the parcel of `at`, which were not spent after all. False if it has ended, or if the lease holds as many as it may.
    pub(super) fn put_back(&mut self, at: Micros, hits: u64) -> bool {
        self.spent = self.spent.saturating_sub(hits);
        let has_room = self.held().saturating_add(hits) <= self.most;
        let parcel = self.parcels.iter_mut().find(|parcel| parcel.at == at && has_room);
        parcel.map(|parcel| parcel.left += hits).is_some()
    }

    /// Returns the hits to ask for at `now`, so that the leases of all instances together hold at most their share. 0 if it needs none after
    /// all, `None` if its share is less than one hit.
    pub(super) fn ask(&mut self, now: Micros, replicas: NonZeroU32) -> Option<u32> {
        let most = self.terms.most(self.charge.limit.quota().limit(), replicas);
        (self.size, self.most) = (self.size.min(most), most);
        let hits = self.size.saturating_sub(self.lasting(now)).min(most.saturating_sub(self.held()));
        if hits == 0 {
            self.asking = Asking::No;
            self.ask_at = now.saturating_add(FIRST_PAUSE);
        } else {
            self.asking = Asking::Sent;
        }
        (most > 0).then(|| u32::try_from(hits).unwrap_or(u32::MAX))
    }

    /// Asks again without a call: the store answers too late for calls, or did not get this one. It is far until a grant shows that it is not.
    pub(super) fn ask_again(&mut self, is_late: bool) {
        self.asking = Asking::Due;
        if is_late {
            self.took = self.took.max(FAR);
        }
    }

    /// Asks a store that did not answer again after a pause, which doubles.
    pub(super) fn pause(&mut self, now: Micros) {
        self.asking = Asking::No;
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
        let is_far = self.time_until(hits, now) > self.half().get().into();
        hits <= self.most && (!is_far || self.charge.limit.algorithm() == Algorithm::FixedWindow)
    }

    /// Returns the microseconds from the last reply until a charge of so many hits fits, negative if it fitted then.
    fn time_until(&self, hits: u64, now: Micros) -> i128 {
        time_of(&self.charge.limit, i128::from(hits) - i128::from(self.remaining) - i128::from(self.left(now)))
    }

    /// Returns the time until a charge of so many hits gets its next answer. `None` if the store is to decide it: it may fit, or it does not
    /// wait for grants.
    pub(super) fn wait(&self, hits: u64, now: Micros) -> Option<Micros> {
        let is_known = self.replied_at <= now && now < self.replied_at.saturating_add(BELIEVED);
        let is_awaited = self.asking != Asking::No || now < self.ask_at;
        let fill = time_of(&self.charge.limit, self.charge.limit.capacity().into());
        let can_wait = self.grants_last_hits() && fill >= LEAST_FILL.get().into() && self.can_gather(hits, now);
        if !is_known || !is_awaited || !can_wait {
            return None;
        }
        let fits_at = i128::from(self.replied_at.get()) + self.time_until(hits, now);
        let fits_in = fits_at.max(self.fits_at.get().into()) - i128::from(now.get());
        let waits = fits_in + i128::from(GRACE.get()).min(fill / PART_OF_FILL) > 0;
        waits.then(|| Micros::new(u64::try_from(fits_in).unwrap_or(0)).max(FIRST_PAUSE))
    }

    pub(super) fn take(&mut self, hits: u64, now: Micros) -> Parts {
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

/// Returns the time within which two requests of a counter get it a lease with these terms.
pub(super) const fn lately(terms: LeaseTerms) -> Micros {
    Micros::new(terms.ttl().get().saturating_mul(LATELY))
}

/// Returns the microseconds in which so many hits drain.
fn time_of(limit: &Limit, hits: i128) -> i128 {
    let quota = limit.quota();
    hits * i128::from(quota.window().length().get()) / i128::from(quota.limit().max(1))
}

/// Returns true if so many hits need not be given back: they drain soon, and the limit is far from used up.
fn drain_soon(limit: &Limit, remaining: u32, hits: u64) -> bool {
    let drains = match limit.algorithm() {
        Algorithm::TokenBucket | Algorithm::LeakyBucket | Algorithm::Gcra => true,
        Algorithm::FixedWindow | Algorithm::SlidingWindow | Algorithm::SlidingLog => false,
    };
    drains && remaining >= limit.capacity() / 2 && time_of(limit, hits.into()) <= DRAINED.get().into()
}

/// Returns the least hits that a lease asks for where they need not be given back; 0 elsewhere.
fn at_ease(limit: &Limit, remaining: u32) -> u64 {
    let quota = limit.quota();
    let hits = AT_EASE.get().saturating_mul(quota.limit().into()) / quota.window().length().get().max(1);
    if drain_soon(limit, remaining, hits) { hits.min(MOST_AT_EASE) } else { 0 }
}
