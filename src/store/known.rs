//! The knowledge of this instance about counters in the store: the last reply, refusals that still hold, hits that are charged later,
//! and leases. It reads no clock and calls no store: the caller passes the time and sends what is due.

use std::hash::{BuildHasher, Hash, Hasher, RandomState};
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use lru::LruCache;
use parking_lot::Mutex;
use smallvec::{SmallVec, smallvec};

use self::leases::Leases;
pub use self::leases::Spent;
pub use self::leasing::{LeaseHits, Paid};
use self::leasing::{Leased, leasable};
pub use self::parcel::Unspent;
use self::replies::{CounterHash, LastReplies, LastReply};
use crate::algorithm::{Charge, Limit};
use crate::model::{Charging, CounterKey, Hits, Micros, Outcome, Provenance, Verdict};

mod counter_lease;
mod leases;
mod leasing;
mod parcel;
mod replies;

/// The most refusals, replies and counters with hits to charge later that are remembered, of each: 65,536.
const MOST: usize = 65_536;
/// The most of them in one shard.
const MOST_OF_SHARD: NonZeroUsize = NonZeroUsize::new(MOST / Known::SHARDS).unwrap();
/// The most limits for which refusals of one counter are remembered: 4. It has several where requests bring limits.
const MOST_LIMITS: usize = 4;
/// The time for which a refusal is believed without asking the store again: 1 s, so that a refund, a reset or a raised limit
/// elsewhere takes effect within it.
const BELIEVED: Micros = Micros::from_secs(1);
/// The time after which another call asks, where the one that asked got no answer: 100 ms, the longest budget of a call.
const ASK_AGAIN: Micros = Micros::from_millis(100);
/// The time for which hits of refused charges are collected before they are sent: 1 s. They change no answer.
const COLLECTED: Micros = Micros::from_secs(1);

/// Knowledge of counters in the store.
pub struct Known {
    /// Hashes keys, which clients choose.
    keys: RandomState,
    /// Hashes limits, which clients do not choose, for less.
    limits: foldhash::fast::RandomState,
    shards: Box<[Mutex<KnownShard>]>,
    /// The latest time until which a refusal was remembered. From then on no refusal has to be looked for.
    refusals_until: AtomicU64,
    refused: AtomicU64,
    backlog: AtomicUsize,
    /// Index of the shard with which the next round of [`Self::due`] starts, modulo their number.
    next_shard: AtomicUsize,
    dropped: AtomicU64,
    leased: Leased,
}

struct KnownShard {
    /// The least recently refused is evicted first.
    refusals: LruCache<CounterKey, SmallVec<[KnownRefusal; 1]>>,
    replies: LastReplies,
    admitted: LruCache<CounterKey, Later>,
    refused: LruCache<CounterKey, Later>,
    leases: Leases,
}

/// A refusal by the store.
struct KnownRefusal {
    limit: Limit,
    /// The smallest number of hits that was refused.
    hits: u64,
    verdict: Verdict,
    /// Time at which the call was sent that it answers.
    at: Micros,
    /// The earliest time at which the store could admit `hits`.
    until: Micros,
    /// Time of the last call that asked again.
    asked: Micros,
}

/// Hits of one counter that are charged later.
#[derive(Clone, Debug)]
pub struct Later {
    /// The counter, its limit and the hits. Hits that were admitted are charged [`Charging::AllOrNothing`]: as many as fit. Hits that
    /// were refused, which a fixed window counts too, are charged [`Charging::Each`]: all of them, if the limit is used up.
    pub charge: Charge,
    due: Micros,
    /// The time from which the hits change no answer.
    ends: Micros,
}

impl Default for Known {
    fn default() -> Self {
        let shard = || {
            Mutex::new(KnownShard {
                refusals: table(MOST_OF_SHARD),
                replies: LastReplies::new(MOST_OF_SHARD.get()),
                admitted: table(MOST_OF_SHARD),
                refused: table(MOST_OF_SHARD),
                leases: Leases::default(),
            })
        };
        Self {
            keys: RandomState::default(),
            limits: foldhash::fast::RandomState::default(),
            shards: std::iter::repeat_with(shard).take(Self::SHARDS).collect(),
            refusals_until: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            backlog: AtomicUsize::new(0),
            next_shard: AtomicUsize::new(0),
            dropped: AtomicU64::new(0),
            leased: Leased::default(),
        }
    }
}

impl Known {
    /// The number of shards, each with a lock of its own: 16, so that two threads seldom meet at one.
    pub const SHARDS: usize = 16;

    /// Returns the answer to a charge at `now` that is charged on its own and needs no store: its lease pays, or a known refusal holds.
    pub fn answer(&self, charge: &Charge, now: Micros) -> Option<Verdict> {
        if leasable(charge).is_none() {
            return self.refusal(charge, now);
        }
        let mut shard = self.shard(&charge.key).lock();
        self.spend(&mut shard.leases, charge, now).or_else(|| self.refusal_in(&mut shard, charge, now))
    }

    /// Returns the known refusal of a charge at `now`. `None` if the store has to be called: nothing is known, or the refusal is a
    /// second old and this is the one call that asks again.
    pub fn refusal(&self, charge: &Charge, now: Micros) -> Option<Verdict> {
        if leasable(charge).is_none() && !self.may_have_refusals(now) {
            return None;
        }
        self.refusal_in(&mut self.shard(&charge.key).lock(), charge, now)
    }

    fn refusal_in(&self, shard: &mut KnownShard, charge: &Charge, now: Micros) -> Option<Verdict> {
        let until_grant = leasable(charge).and_then(|_| shard.leases.refusal(charge, now));
        if until_grant.is_some() {
            self.refused.fetch_add(1, Ordering::Relaxed);
            return until_grant;
        }
        let refusal = shard.refusal(charge, now)?;
        let is_believed = now < refusal.at.saturating_add(BELIEVED);
        if !is_believed && now >= refusal.asked.saturating_add(ASK_AGAIN) {
            refusal.asked = now;
            return None;
        }
        self.refused.fetch_add(1, Ordering::Relaxed);
        Some(refusal.verdict(charge, now))
    }

    /// Returns the known refusal of a charge at `now`, of any age: for a store that is too busy to be asked.
    pub fn lasting_refusal(&self, charge: &Charge, now: Micros) -> Option<Verdict> {
        if !self.may_have_refusals(now) {
            return None;
        }
        let mut shard = self.shard(&charge.key).lock();
        let refusal = shard.refusal(charge, now)?;
        self.refused.fetch_add(1, Ordering::Relaxed);
        Some(refusal.verdict(charge, now))
    }

    /// Notes the store's reply `verdict` to a charge that was sent at `at`. Returns the hits of the counter that this instance holds beside it.
    pub fn learn(&self, charge: &Charge, verdict: &Verdict, at: Micros) -> u64 {
        let Charge { key, limit, hits, .. } = charge;
        if limit.is_closed() {
            return 0;
        }
        let (shard, fingerprint) = self.place(key, limit);
        let mut shard = shard.lock();
        let KnownShard { refusals, replies, leases, .. } = &mut *shard;
        let held = if charge.lease.is_some() { leases.note(charge, verdict, at) } else { 0 };
        if let Some(terms) = leasable(charge).filter(|_| !verdict.outcome.is_refused())
            && replies.get(fingerprint).is_some_and(|before| before.is_younger(at, terms.ttl()))
        {
            self.want(leases, charge, terms, verdict.remaining, at);
        }
        let refunded_until = match hits.given_back() {
            0 => replies.get(fingerprint).and_then(|before| before.refunded_until(at)),
            _ => Some(at.saturating_add(limit.quota().window().length())),
        };
        replies.put(fingerprint, LastReply::new(*hits, verdict, at, refunded_until));
        if refunded_until.is_some() || !remembers_refusals(charge) {
            if !refusals.is_empty() {
                refusals.pop(key);
            }
        } else if verdict.outcome.is_refused() {
            let until = at.saturating_add(verdict.retry.unwrap_or(Micros::YEAR));
            self.refusals_until.fetch_max(until.get(), Ordering::Relaxed);
            let refusal = KnownRefusal { limit: *limit, hits: hits.taken(), verdict: *verdict, at, until, asked: at };
            match refusals.get_mut(key) {
                Some(known) => remember(known, refusal),
                None => {
                    refusals.put(key.clone(), smallvec![refusal]);
                }
            }
        } else if let Some(known) = refusals.peek_mut(key) {
            // An admission drains the counter at the rate of its own limit, so refusals under other limits no longer hold.
            known.retain(|known| known.limit == *limit && known.hits > hits.taken());
        }
        held
    }

    /// Forgets the refusals of a counter, because hits on it are given back.
    pub fn forget_refusal(&self, key: &CounterKey) {
        self.shard(key).lock().refusals.pop(key);
    }

    /// Returns the verdict for a charge that is not sent, because another charge of its request is known to be refused: the last reply to
    /// the same number of hits, if it is less than a second old.
    pub fn spared(&self, charge: &Charge, now: Micros) -> Verdict {
        let (shard, fingerprint) = self.place(&charge.key, &charge.limit);
        let shard = shard.lock();
        let reply = shard.replies.get(fingerprint);
        let verdict = reply.and_then(|reply| Some(aged(&reply.verdict(charge.hits, now, BELIEVED)?, reply.at(), now)));
        verdict.unwrap_or_else(|| Verdict::uncounted(Outcome::Admitted, Provenance::Spared))
    }

    /// Returns the hits that the last reply left, if it is younger than one window and its share was not taken yet.
    pub fn take_remaining(&self, charge: &Charge, now: Micros) -> Option<u32> {
        let (shard, fingerprint) = self.place(&charge.key, &charge.limit);
        shard.lock().replies.get_mut(fingerprint)?.take_remaining(now, charge.limit.quota().window().length())
    }

    /// Remembers the hits of a charge that was decided without the store and got this verdict.
    pub fn charge_later(&self, charge: &Charge, verdict: &Verdict, now: Micros) {
        let is_refused = verdict.outcome.is_refused();
        let (charging, due) =
            if is_refused { (Charging::Each, now.saturating_add(COLLECTED)) } else { (Charging::AllOrNothing, now) };
        let charge = Charge { limit: charge.limit.plain(), charging, ..charge.clone() };
        self.put_back(Later { charge, due, ends: now.saturating_add(verdict.reset) }, now);
    }

    /// Removes and returns hits that are due, of at most `most` counters. Hits that no longer change a decision are dropped. Each round starts with
    /// the next shard, and what is put back goes to the end of its queue: hits that are put back again and again keep no others waiting.
    pub fn due(&self, now: Micros, most: usize) -> Vec<Later> {
        let mut due = Vec::new();
        if self.backlog() == 0 {
            return due;
        }
        let (shards, next) = (self.shards.len(), self.next_shard.fetch_add(1, Ordering::Relaxed));
        for shard in self.shards.iter().cycle().skip(next % shards).take(shards) {
            let KnownShard { admitted, refused, .. } = &mut *shard.lock();
            for queue in [admitted, refused] {
                while due.len() < most && queue.peek_lru().is_some_and(|(_, later)| later.due <= now) {
                    let Some((_, later)) = queue.pop_lru() else { break };
                    self.backlog.fetch_sub(1, Ordering::Relaxed);
                    if later.ends > now { due.push(later) } else { self.drop_later(&later) }
                }
            }
        }
        due
    }

    /// Puts back hits that could not be sent, and adds them to those of the same counter.
    pub fn put_back(&self, later: Later, now: Micros) {
        let mut shard = self.shard(&later.charge.key).lock();
        let queue = match later.charge.charging {
            Charging::Each => &mut shard.refused,
            Charging::AllOrNothing | Charging::Group(_) => &mut shard.admitted,
        };
        match queue.peek_mut(&later.charge.key) {
            Some(known) if known.ends > now => {
                let hits = known.charge.hits.taken().saturating_add(later.charge.hits.taken());
                known.charge = Charge { hits: Hits::take(hits), ..later.charge };
                known.ends = known.ends.max(later.ends);
            }
            Some(known) => self.drop_later(&std::mem::replace(known, later)),
            None => {
                // A full queue drops its oldest entry.
                match queue.push(later.charge.key.clone(), later) {
                    Some((_, oldest)) => self.drop_later(&oldest),
                    None => {
                        self.backlog.fetch_add(1, Ordering::Relaxed);
                    }
                }
            }
        }
    }

    /// Returns the number of charges that were refused without a call to the store.
    pub fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }

    /// Returns the number of counters with hits to charge later.
    pub fn backlog(&self) -> usize {
        self.backlog.load(Ordering::Relaxed)
    }

    /// Returns the number of admitted hits that were never charged: their window was over first, or there were too many counters.
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    fn drop_later(&self, later: &Later) {
        if later.charge.charging == Charging::AllOrNothing {
            self.dropped.fetch_add(later.charge.hits.taken(), Ordering::Relaxed);
        }
    }

    fn may_have_refusals(&self, now: Micros) -> bool {
        now.get() < self.refusals_until.load(Ordering::Relaxed)
    }

    fn shard(&self, key: &CounterKey) -> &Mutex<KnownShard> {
        self.shard_of(self.hash(key))
    }

    /// Returns the shard of a counter, and the fingerprint of the counter under a limit.
    fn place(&self, key: &CounterKey, limit: &Limit) -> (&Mutex<KnownShard>, CounterHash) {
        let hash = self.hash(key);
        (self.shard_of(hash), CounterHash(hash ^ self.limits.hash_one(limit)))
    }

    /// Returns the keyed hash of a counter's key.
    fn hash(&self, key: &CounterKey) -> u64 {
        let mut hasher = self.keys.build_hasher();
        hasher.write(key.as_bytes());
        hasher.finish()
    }

    /// Returns the shard of the counters with this hash: its low bits, which [`LastReplies`] does not use.
    fn shard_of(&self, hash: u64) -> &Mutex<KnownShard> {
        &self.shards[usize::try_from(hash % Self::SHARDS as u64).unwrap_or(0)]
    }
}

impl KnownShard {
    /// Returns the refusal that holds for a charge at `now`.
    fn refusal(&mut self, charge: &Charge, now: Micros) -> Option<&mut KnownRefusal> {
        if charge.hits.given_back() > 0 || !remembers_refusals(charge) {
            return None;
        }
        // After a step of the clock backwards, the age of a refusal is unknown.
        let is_current = |refusal: &KnownRefusal| refusal.at <= now && now < refusal.until;
        let holds = |refusal: &KnownRefusal| {
            is_current(refusal) && refusal.limit == charge.limit && charge.hits.taken() >= refusal.hits
        };
        let place = self.refusals.peek(&charge.key)?.iter().position(holds)?;
        self.refusals.get_mut(&charge.key)?.get_mut(place)
    }
}

impl KnownRefusal {
    /// Returns the verdict at `now` for a charge of at least `self.hits`. For more hits the wait is that of `self.hits`, which is shorter.
    fn verdict(&self, charge: &Charge, now: Micros) -> Verdict {
        let verdict = aged(&self.verdict, self.at, now);
        Verdict {
            retry: verdict.retry.filter(|_| charge.hits.taken() == self.hits || charge.limit.fits(now, charge.hits)),
            // Where refused hits are counted, the first refusal has taken what was left.
            room: if charge.limit.records_refused(charge.charging) { 0 } else { verdict.room },
            ..verdict
        }
    }
}

/// Returns the verdict that the store gave at `at` with its times reduced to `now`.
fn aged(verdict: &Verdict, at: Micros, now: Micros) -> Verdict {
    let passed = now.saturating_sub(at);
    Verdict {
        reset: verdict.reset.saturating_sub(passed),
        retry: verdict.retry.map(|retry| retry.saturating_sub(passed)),
        provenance: Provenance::Known,
        ..*verdict
    }
}

/// Adds a refusal to those of the same counter. A known refusal of fewer hits that still holds says more, and stays.
fn remember(known: &mut SmallVec<[KnownRefusal; 1]>, refusal: KnownRefusal) {
    let is_known = |known: &KnownRefusal| {
        let is_believed = refusal.at < known.until && refusal.at < known.at.saturating_add(BELIEVED);
        known.limit == refusal.limit && known.hits < refusal.hits && is_believed
    };
    if known.iter().any(is_known) {
        return;
    }
    known.retain(|known| known.limit != refusal.limit);
    if known.len() >= MOST_LIMITS {
        known.remove(0);
    }
    known.push(refusal);
}

/// Returns true if refusals of a charge are remembered. If the limit counts refused hits, each refusal changes the next reply, so they
/// are not.
fn remembers_refusals(charge: &Charge) -> bool {
    charge.remembers_refusals && !charge.limit.records_every_charge()
}

/// A table that grows to `most` entries. Beyond it a new entry takes the place of the least recently used one.
fn table<K: Hash + Eq, T>(most: NonZeroUsize) -> LruCache<K, T> {
    let mut table = LruCache::unbounded();
    table.resize(most);
    table
}

#[cfg(test)]
mod tests;
