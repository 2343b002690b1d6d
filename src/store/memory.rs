//! The embedded store: counters in this process. It is sharded, bounded in size, swept, and exact under concurrency.

use std::future::{Future, ready};
use std::hash::{BuildHasher, RandomState};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use hashbrown::HashTable;
use parking_lot::{Mutex, MutexGuard};
use smallvec::SmallVec;

use self::sample::Sample;
use self::standing::{Share, Standing};
use super::{Charged, Store, Verdicts};
use crate::algorithm::{Charge, Limit, Refusals, State};
use crate::model::{Charging, Clock, CounterKey, Hits, Micros, Verdict};

mod sample;
mod standing;

/// Number of shards: 64, well above the cores that share them, so that two requests rarely contend for one lock.
const SHARDS: usize = 64;
/// Maximum charges of one request in one atomic step: 1,000, as many as one Redis script charges together. They hold their locks
/// for about 2 ms at most, and for 8 ms if all are new and a full store is used up
/// (`how_long_a_request_holds_the_locks_of_the_embedded_store` prints it).
const MOST_TOGETHER: usize = 1_000;
/// Charges in one group of a larger request: 256, so that other requests wait for a fraction of a millisecond.
const GROUP: usize = 256;
/// Maximum charges whose shards are locked without reserving room first: 16, more than ordinary requests have.
const FEW: usize = 16;
/// Buckets checked for an idle counter per new counter: 2, so that a busy store sweeps faster than it grows.
const SWEPT_PER_NEW: usize = 2;
/// Divisor of a shard's capacity: a shard releases memory when it uses less than a quarter of its capacity.
const SHRINK_BELOW: usize = 4;

/// A store of counters in memory.
pub struct Memory {
    clock: Arc<dyn Clock>,
    /// SipHash with a random key: clients choose the names of counters, and could attack weaker hashes with collisions.
    hasher: RandomState,
    shards: Box<[Mutex<Shard>]>,
    most_per_shard: usize,
    evicted: AtomicU64,
}

#[derive(Default)]
struct Shard {
    counters: HashTable<Slot>,
    /// Bucket that was swept last.
    swept: usize,
    /// Chooses the counter to evict.
    sample: Sample,
}

/// Table entry of a counter. The box holds the data that eviction does not need: sampling and sweeping read only the table, which
/// is contiguous in memory. Up to half of a table's buckets are empty; an empty one takes 17 bytes.
struct Slot {
    standing: Standing,
    counter: Box<Counter>,
}

struct Counter {
    key: CounterKey,
    state: State,
}

/// A charge, the hash of its key, and the index of its counter's shard.
#[derive(Clone, Copy)]
struct Located<'a> {
    charge: &'a Charge,
    hash: u64,
    shard: usize,
}

/// Charges that are decided in one atomic step, in order.
struct Step<'a> {
    located: SmallVec<[Located<'a>; 4]>,
    /// Indices of their shards, sorted, without duplicates.
    shards: SmallVec<[usize; 4]>,
    /// Hashes of the keys that occur more than once, sorted, without duplicates. Keys with the same hash count as one.
    repeated: SmallVec<[u64; 4]>,
}

/// The locked shards of one step. They are locked in order of their indices, so that requests cannot deadlock. `places` maps the
/// index of a shard to its position in `guards`.
struct Locked<'a> {
    places: [u8; SHARDS],
    guards: SmallVec<[MutexGuard<'a, Shard>; 4]>,
    /// Dropped after the locks are released: fields are dropped in the order of declaration.
    gone: Gone,
}

/// Counters that were removed to make room. They lie far apart in memory, so dropping one takes as long as charging it.
type Gone = SmallVec<[Box<Counter>; 4]>;

/// Copies of the counters that a request charges more than once, found by the hash of the key. Each has the state after the
/// charges so far.
type Copies<'a> = HashTable<(&'a CounterKey, State)>;

/// Hits to take back from one counter.
struct Back<'a> {
    at: Located<'a>,
    charged: Micros,
    hits: u64,
}

impl Store for Memory {
    fn charge<'a>(&'a self, charges: &'a [Charge], _: Duration) -> Pin<Box<dyn Future<Output = Charged> + Send + 'a>> {
        let answers = self.charge_now(charges).into_iter().map(Ok).collect();
        Box::pin(ready(Charged::answered(answers)))
    }

    fn give_back<'a>(
        &'a self,
        charges: &'a [Charge],
        taken: &'a [Option<Micros>],
    ) -> Pin<Box<dyn Future<Output = ()> + Send + 'a>> {
        self.give_back_now(charges, taken);
        Box::pin(ready(()))
    }
}

impl Memory {
    /// Creates an empty store of at most `most_counters` counters, rounded up to a multiple of its 64 shards.
    pub fn new(clock: Arc<dyn Clock>, most_counters: usize) -> Self {
        Self {
            clock,
            hasher: RandomState::default(),
            shards: std::iter::repeat_with(Mutex::default).take(SHARDS).collect(),
            most_per_shard: most_counters.div_ceil(SHARDS).max(1),
            evicted: AtomicU64::new(0),
        }
    }

    /// Returns the number of counters.
    pub fn counters(&self) -> usize {
        self.shards.iter().map(|shard| shard.lock().counters.len()).sum()
    }

    /// Returns the number of counters that were evicted for lack of room before they were idle.
    pub fn evicted(&self) -> u64 {
        self.evicted.load(Ordering::Relaxed)
    }

    /// Charges the counters of one request.
    pub fn charge_now(&self, charges: &[Charge]) -> Verdicts {
        // A single charge needs no decision together with others.
        if charges.len() == 1 || charges.iter().all(|charge| charge.charging == Charging::Each) {
            let each = charges.iter().map(|charge| self.locate(charge));
            return each.map(|at| self.charge_alone(at)).collect();
        }
        let is_whole = charges.iter().any(|charge| charge.charging == Charging::AllOrNothing);
        if charges.len() > MOST_TOGETHER || !is_whole {
            return self.charge_in_steps(charges);
        }
        self.charge_together(charges)
    }

    /// Charges the counter of `charge` until at most `remaining` hits remain.
    pub fn leave_at_most(&self, charge: &Charge, remaining: u32) {
        let limit = charge.limit.plain();
        let left = self
            .charge_now(&[Charge { limit, hits: Hits::LOOK, ..charge.clone() }])
            .first()
            .map_or(0, |look| look.remaining);
        if left > remaining {
            let hits = Hits::take((left - remaining).into());
            self.charge_now(&[Charge { limit, hits, charging: Charging::AllOrNothing, ..charge.clone() }]);
        }
    }

    /// Charges a part of a request that has no groups, in atomic steps of up to 256 charges. A refusal of one charge does not stop the others.
    /// Returns the verdicts, and the time of each charge that [`Memory::give_back_now`] must reverse if the request is refused.
    pub fn take_now(&self, charges: &[Charge]) -> (Verdicts, Vec<Option<Micros>>) {
        let (mut verdicts, mut taken) = (Verdicts::with_capacity(charges.len()), Vec::with_capacity(charges.len()));
        for group in charges.chunks(GROUP) {
            self.take_group(group, &mut verdicts, &mut taken);
        }
        (verdicts, taken)
    }

    /// Reverses charges. `taken` has the time of each charge, or `None` if there is nothing to reverse. Locks one shard at a
    /// time.
    pub fn give_back_now(&self, charges: &[Charge], taken: &[Option<Micros>]) {
        let due = charges.iter().zip(taken).filter_map(|(charge, charged)| {
            let hits = charge.limit.counted(charge.hits).taken();
            charged.map(|charged| Back { at: self.locate(charge), charged, hits })
        });
        let mut due: Vec<_> = due.collect();
        due.sort_by_key(|back| (back.at.shard, back.at.hash, back.charged));
        // Charges of one counter against one limit are reversed as one, as in the script: what has drained since then has drained
        // from all of them.
        due.dedup_by(|next, first| {
            let is_same = (next.charged, &next.at.charge.key, next.at.charge.limit.quota().limit())
                == (first.charged, &first.at.charge.key, first.at.charge.limit.quota().limit());
            if is_same {
                first.hits = first.hits.saturating_add(next.hits);
            }
            is_same
        });
        for group in due.chunk_by(|one, other| one.at.shard == other.at.shard) {
            for part in group.chunks(GROUP) {
                let mut shard = self.shards[part[0].at.shard].lock();
                let now = self.clock.now();
                part.iter().for_each(|back| shard.give_back(back, now));
            }
        }
    }

    /// Removes every counter whose loss changes nothing, and clears every refusal that is more than a minute old. Locks one shard
    /// at a time.
    pub fn sweep(&self) {
        for shard in &self.shards {
            let now = self.clock.now();
            let Shard { counters, .. } = &mut *shard.lock();
            counters.retain(|slot| {
                slot.standing = slot.standing.without_old_refusal(now);
                !slot.standing.is_forgettable(now)
            });
            if counters.len() < counters.capacity() / SHRINK_BELOW {
                counters.shrink_to(counters.len() * 2, |slot| self.hash(slot));
            }
        }
    }

    fn charge_alone(&self, at: Located<'_>) -> Verdict {
        // Dropped after the lock is released.
        let mut gone = Gone::new();
        let mut shard = self.shards[at.shard].lock();
        // Read under the lock: a later holder of the lock never has an earlier time, so a swept counter stays idle.
        let now = self.clock.now();
        shard.charge(at, now, self, &mut gone).0
    }

    fn locate<'a>(&self, charge: &'a Charge) -> Located<'a> {
        let hash = self.hasher.hash_one(&charge.key);
        // The table uses bits from both ends of the hash; the shard index uses bits from the middle.
        let shard = usize::try_from((hash >> 32) % SHARDS as u64).unwrap_or(0);
        Located { charge, hash, shard }
    }

    /// Charges several counters in one atomic step. Decides all charges in order. Then it spends those that no refusal spares.
    fn charge_together(&self, charges: &[Charge]) -> Verdicts {
        // Slow work without counters is done before the locks are taken. Values that are no longer needed are dropped after they
        // are released.
        let step = self.step(charges);
        let mut copies = Copies::with_capacity(step.repeated.len());
        let mut verdicts = Verdicts::with_capacity(charges.len());
        let mut locked = self.lock(&step);
        let now = self.clock.now();

        for &at in &step.located {
            let shard = locked.shard(at);
            let is_repeated = step.is_repeated(at);
            verdicts.push(if is_repeated {
                self.decide_in_turn(shard, &mut copies, at, now)
            } else {
                shard.decide(at, now)
            });
        }
        let refusals = Refusals::of(charges, &verdicts);
        let spares_any = charges.iter().any(|charge| refusals.spare(charge));
        for (&at, verdict) in step.located.iter().zip(&mut verdicts) {
            if refusals.spare(at.charge) {
                continue;
            }
            let (first_verdict, _) = locked.charge(at, now, self);
            // If charges are spared, a counter that is charged more than once keeps its first verdict: the charges that are not
            // kept are missing now.
            if !(spares_any && step.is_repeated(at)) {
                *verdict = first_verdict;
            }
        }
        let is_left = is_left(charges, &refusals);
        for (&at, verdict) in step.located.iter().zip(&mut verdicts).filter(|(at, _)| is_left(at.charge)) {
            locked.shard(at).refuse(at, now, verdict);
        }
        verdicts
    }

    /// Charges counters in several atomic steps, the groups of a descriptor in one. If the request is refused, reverses what its
    /// all-or-nothing charges took.
    fn charge_in_steps(&self, charges: &[Charge]) -> Verdicts {
        let has_group = |charges: &[Charge]| charges.iter().any(|charge| charge.group().is_some());
        let splits = has_group(charges);
        let (mut verdicts, mut taken) = (Verdicts::with_capacity(charges.len()), Vec::with_capacity(charges.len()));
        for own in charges.chunk_by(|one, other| !splits || one.descriptor == other.descriptor) {
            if has_group(own) {
                verdicts.extend(self.charge_together(own));
                taken.resize(verdicts.len(), None);
            } else {
                let (own_verdicts, own_taken) = self.take_now(own);
                verdicts.extend(own_verdicts);
                taken.extend(own_taken);
            }
        }
        let refusals = Refusals::of(charges, &verdicts);
        if charges.iter().any(|charge| charge.charging == Charging::AllOrNothing) && refusals.is_request_refused() {
            self.give_back_now(charges, &taken);
            for (charge, verdict) in charges.iter().zip(&mut verdicts) {
                let at = self.locate(charge);
                let mut shard = self.shards[at.shard].lock();
                shard.refuse(at, self.clock.now(), verdict);
            }
        }
        verdicts
    }

    fn take_group(&self, charges: &[Charge], verdicts: &mut Verdicts, taken: &mut Vec<Option<Micros>>) {
        let step = self.step(charges);
        let mut locked = self.lock(&step);
        let now = self.clock.now();
        for &at in &step.located {
            let (verdict, is_recorded) = locked.charge(at, now, self);
            let is_taken = is_recorded && !at.charge.is_recorded_despite_refusal() && at.charge.hits.taken() > 0;
            verdicts.push(verdict);
            taken.push(is_taken.then_some(now));
        }
    }

    /// Decides a charge of a counter that its request charges more than once. Charges a copy of the counter.
    fn decide_in_turn<'a>(&self, shard: &Shard, copies: &mut Copies<'a>, at: Located<'a>, now: Micros) -> Verdict {
        let Charge { key, limit, hits, charging, .. } = at.charge;
        let copy = || (key, shard.state(at).cloned().unwrap_or_else(|| limit.fresh()));
        let entry = copies.entry(at.hash, |(known, _)| *known == key, |(known, _)| self.hasher.hash_one(known));
        let (_, state) = entry.or_insert_with(copy).into_mut();
        limit.charge(state, now, *hits, *charging).0
    }

    /// Reserves room for new counters in the shards of `step`, one shard at a time, so that none grows while all are locked.
    fn make_ready(&self, step: &Step<'_>) {
        let mut needed = [0; SHARDS];
        step.located.iter().for_each(|at| needed[at.shard] += 1);
        for &number in &step.shards {
            self.shards[number].lock().counters.reserve(needed[number], |slot| self.hash(slot));
        }
    }

    fn hash(&self, slot: &Slot) -> u64 {
        self.hasher.hash_one(&slot.counter.key)
    }

    fn step<'a>(&self, charges: &'a [Charge]) -> Step<'a> {
        let located: SmallVec<[Located<'_>; 4]> = charges.iter().map(|charge| self.locate(charge)).collect();
        let mut shards: SmallVec<[usize; 4]> = located.iter().map(|at| at.shard).collect();
        shards.sort_unstable();
        shards.dedup();
        let mut hashes: SmallVec<[u64; 4]> = located.iter().map(|at| at.hash).collect();
        hashes.sort_unstable();
        let pairs = hashes.windows(2).filter(|pair| pair[0] == pair[1]);
        let mut repeated: SmallVec<[u64; 4]> = pairs.map(|pair| pair[0]).collect();
        repeated.dedup();
        Step { located, shards, repeated }
    }

    /// Locks the shards of `step`.
    fn lock(&self, step: &Step<'_>) -> Locked<'_> {
        if step.located.len() > FEW {
            self.make_ready(step);
        }
        let mut locked =
            Locked { places: [0; SHARDS], guards: SmallVec::with_capacity(step.shards.len()), gone: Gone::new() };
        for (place, &number) in (0..).zip(&step.shards) {
            locked.places[number] = place;
            locked.guards.push(self.shards[number].lock());
        }
        locked
    }
}

impl Step<'_> {
    /// Returns true if the step may charge the counter of `at` more than once.
    fn is_repeated(&self, at: Located<'_>) -> bool {
        !self.repeated.is_empty() && self.repeated.binary_search(&at.hash).is_ok()
    }
}

impl Locked<'_> {
    /// Returns the shard of `at`, which must be a charge of this step.
    fn shard(&mut self, at: Located<'_>) -> &mut Shard {
        &mut self.guards[usize::from(self.places[at.shard])]
    }

    /// Calls [`Shard::charge`] on the shard of `at`.
    fn charge(&mut self, at: Located<'_>, now: Micros, memory: &Memory) -> (Verdict, bool) {
        self.guards[usize::from(self.places[at.shard])].charge(at, now, memory, &mut self.gone)
    }
}

impl Shard {
    fn find(&self, at: Located<'_>) -> Option<usize> {
        self.counters.find_bucket_index(at.hash, |slot| slot.counter.key == at.charge.key)
    }

    fn state(&self, at: Located<'_>) -> Option<&State> {
        self.find(at).and_then(|bucket| self.counters.get_bucket(bucket)).map(|slot| &slot.counter.state)
    }

    /// Returns the verdict for a charge and spends nothing.
    fn decide(&self, at: Located<'_>, now: Micros) -> Verdict {
        at.charge.limit.verdict(self.state(at), now, at.charge.hits)
    }

    /// Sets `remaining` and `reset` in the `verdict` of a refused request to what is left of the counter. The outcome stays. If
    /// the verdict is a refusal, the counter remembers it.
    fn refuse(&mut self, at: Located<'_>, now: Micros, verdict: &mut Verdict) {
        let slot = self.find(at).and_then(|bucket| self.counters.get_bucket_mut(bucket));
        let left = at.charge.limit.left(slot.as_deref().map(|slot| &slot.counter.state), now);
        verdict.remaining = left.remaining;
        verdict.reset = left.reset;
        if let Some(slot) = slot.filter(|_| verdict.outcome.is_refused()) {
            slot.standing = slot.standing.refusing(now);
        }
    }

    /// Takes hits back. Does nothing if the counter is gone.
    fn give_back(&mut self, back: &Back<'_>, now: Micros) {
        let limit = &back.at.charge.limit;
        if let Some(slot) = self.find(back.at).and_then(|bucket| self.counters.get_bucket_mut(bucket)) {
            limit.undo(&mut slot.counter.state, now, back.charged, back.hits);
            let left = limit.left(Some(&slot.counter.state), now);
            slot.standing = slot.standing.counting(limit.idle_at(&slot.counter.state), share(limit, &left));
        }
    }

    /// Decides one charge and saves the new state. Returns the verdict, and true if the hits are on the counter. A charge that
    /// takes no hits creates no counter.
    fn charge(&mut self, at: Located<'_>, now: Micros, memory: &Memory, gone: &mut Gone) -> (Verdict, bool) {
        let Charge { key, hits, limit, charging, .. } = at.charge;
        let bucket = self.find(at);
        if let Some(slot) = bucket.and_then(|bucket| self.counters.get_bucket_mut(bucket)) {
            let (verdict, is_recorded) = limit.charge(&mut slot.counter.state, now, *hits, *charging);
            if is_recorded {
                slot.standing = slot.standing.counting(limit.idle_at(&slot.counter.state), share(limit, &verdict));
            }
            if verdict.outcome.is_refused() {
                slot.standing = slot.standing.refusing(now);
            }
            return (verdict, is_recorded);
        }
        let mut state = limit.fresh();
        let (verdict, is_recorded) = limit.charge(&mut state, now, *hits, *charging);
        if is_recorded && hits.taken() > 0 {
            let standing = Standing::new(limit.idle_at(&state), share(limit, &verdict));
            let standing = if verdict.outcome.is_refused() { standing.refusing(now) } else { standing };
            self.make_room(now, memory, gone);
            let slot = Slot { standing, counter: Box::new(Counter { key: key.clone(), state }) };
            self.counters.insert_unique(at.hash, slot, |slot| memory.hash(slot));
        }
        (verdict, is_recorded)
    }

    fn remove(&mut self, bucket: usize, gone: &mut Gone) {
        if let Ok(slot) = self.counters.get_bucket_entry(bucket) {
            gone.push(slot.remove().0.counter);
        }
    }

    /// Checks two buckets for idle counters. If the shard is still full, evicts the counter whose loss changes the least.
    fn make_room(&mut self, now: Micros, memory: &Memory, gone: &mut Gone) {
        let buckets = self.counters.num_buckets().max(1);
        for _ in 0..SWEPT_PER_NEW {
            self.swept = (self.swept + 1) % buckets;
            if self.counters.get_bucket(self.swept).is_some_and(|slot| slot.standing.is_forgettable(now)) {
                self.remove(self.swept, gone);
            }
        }
        while self.counters.len() >= memory.most_per_shard {
            let Some(least) = self.sample.least(&self.counters, |slot| slot.standing.rank(now)) else { return };
            let is_idle = self.counters.get_bucket(least).is_some_and(|slot| slot.standing.is_idle(now));
            self.remove(least, gone);
            memory.evicted.fetch_add(u64::from(!is_idle), Ordering::Relaxed);
        }
    }
}

/// Returns a function that is true for a charge whose verdict tells what is left without the charges that `refusals` spare: each charge of a
/// group that refuses and, if there are all-or-nothing charges and the request is refused, each charge of the request.
fn is_left(charges: &[Charge], refusals: &Refusals) -> impl Fn(&Charge) -> bool {
    let is_whole = charges.iter().any(|charge| charge.charging == Charging::AllOrNothing);
    move |charge| (is_whole && refusals.is_request_refused()) || refusals.refuse(charge.charging)
}

/// Returns the share of `limit` in use when the hits in `left` remain.
fn share(limit: &Limit, left: &Verdict) -> Share {
    Share::in_use(left.remaining, limit.capacity())
}
