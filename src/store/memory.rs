//! The embedded store: counters in this process, sharded, bounded, swept and exact under concurrency.

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
use super::{Charged, Store, Taken, Verdicts};
use crate::algorithm::{Charge, Limit, State};
use crate::model::policy::is_request_refused;
use crate::model::{Charging, Clock, CounterKey, Hits, Micros, Verdict};

mod sample;
mod standing;

/// How many shards the counters are spread over: 64, well above the cores that share them, so that two requests seldom
/// meet at one lock.
const SHARDS: usize = 64;
/// The most charges of one request that are one atomic step: 1,000, as many as one Redis script charges together. They hold
/// their locks for about 2 ms at most, and for 8 ms if all are new and a full store is used up
/// (`how_long_a_request_holds_the_locks_of_the_embedded_store` prints it).
const MOST_TOGETHER: usize = 1_000;
/// The charges of one group of a larger request: 256, so that other requests wait for a fraction of a millisecond.
const GROUP: usize = 256;
/// Charges whose shards are locked at once without a look at their room first: 16, more than ordinary requests have.
const FEW: usize = 16;
/// How many buckets each new counter checks for an idle one: 2, so that a busy store sweeps faster than it grows.
const SWEPT_PER_NEW: usize = 2;
/// A shard gives memory back when it uses less than a quarter of what it has.
const SHRINK_BELOW: usize = 4;

/// Counters in memory.
pub struct Memory {
    clock: Arc<dyn Clock>,
    /// SipHash with a key of its own: clients choose what counters are called, and could aim at weaker hashes.
    hasher: RandomState,
    shards: Box<[Mutex<Shard>]>,
    most_per_shard: usize,
    evicted: AtomicU64,
}

#[derive(Default)]
struct Shard {
    counters: HashTable<Slot>,
    /// Where the sweep goes on.
    swept: usize,
    /// What chooses the counter to evict.
    sample: Sample,
}

/// A counter in its table. What is boxed is not needed to find a counter to forget: sampling and sweeping read the table alone,
/// which lies together in memory. As many as half of a table's buckets are empty; an empty one takes 17 bytes.
struct Slot {
    standing: Standing,
    counter: Box<Counter>,
}

struct Counter {
    key: CounterKey,
    state: State,
}

/// A charge and where its counter lives.
#[derive(Clone, Copy)]
struct Located<'a> {
    charge: &'a Charge,
    hash: u64,
    shard: usize,
}

/// Charges that are decided in one atomic step, in their order.
struct Step<'a> {
    located: SmallVec<[Located<'a>; 4]>,
    /// The numbers of their shards, sorted, each once.
    shards: SmallVec<[usize; 4]>,
    /// The hashes of the keys that more than one of them has, sorted, each once. Keys of one hash count as one.
    repeated: SmallVec<[u64; 4]>,
}

/// The shards of one step, locked in order of their numbers so that no two requests wait for each other: for each shard of
/// the store, its place among the locked ones.
struct Locked<'a> {
    places: [u8; SHARDS],
    guards: SmallVec<[MutexGuard<'a, Shard>; 4]>,
    /// Dropped after the locks are released, as fields are dropped in their order.
    gone: Gone,
}

/// Counters that made room for others. They lie far apart in memory, so that dropping one takes as long as charging it.
type Gone = SmallVec<[Box<Counter>; 4]>;

/// The counters that a request charges more than once, as its charges so far would leave them, by the hashes of their keys.
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
        Box::pin(ready(Charged { answers, undo: None }))
    }

    fn take<'a>(&'a self, charges: &'a [Charge], _: Duration) -> Pin<Box<dyn Future<Output = Taken> + Send + 'a>> {
        let (verdicts, taken) = self.take_now(charges);
        Box::pin(ready(Taken { answers: verdicts.into_iter().map(Ok).collect(), taken }))
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
    /// An empty store of at most `most_counters`, rounded up to a multiple of its 64 shards.
    pub fn new(clock: Arc<dyn Clock>, most_counters: usize) -> Self {
        Self {
            clock,
            hasher: RandomState::default(),
            shards: std::iter::repeat_with(Mutex::default).take(SHARDS).collect(),
            most_per_shard: most_counters.div_ceil(SHARDS).max(1),
            evicted: AtomicU64::new(0),
        }
    }

    /// How many counters are held.
    pub fn counters(&self) -> usize {
        self.shards.iter().map(|shard| shard.lock().counters.len()).sum()
    }

    /// How many counters were forgotten before they were idle, for want of room.
    pub fn evicted(&self) -> u64 {
        self.evicted.load(Ordering::Relaxed)
    }

    /// Charges the counters of one request.
    pub fn charge_now(&self, charges: &[Charge]) -> Verdicts {
        // A charge that is alone stays or not by itself.
        if charges.len() == 1 || charges.iter().all(|charge| charge.charging == Charging::Each) {
            let each = charges.iter().map(|charge| self.locate(charge));
            return each.map(|at| self.charge_alone(at)).collect();
        }
        if charges.len() > MOST_TOGETHER {
            return self.charge_in_groups(charges);
        }
        self.charge_together(charges)
    }

    /// Charges a counter until at most `remaining` hits remain.
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

    /// Charges a part of a request in one atomic step, whatever the others refuse. Returns the verdicts, and the moment of
    /// each charge that [`Memory::give_back_now`] has to take back if the request is refused.
    pub fn take_now(&self, charges: &[Charge]) -> (Verdicts, Vec<Option<Micros>>) {
        let (mut verdicts, mut taken) = (Verdicts::with_capacity(charges.len()), Vec::with_capacity(charges.len()));
        for group in charges.chunks(GROUP) {
            self.take_group(group, &mut verdicts, &mut taken);
        }
        (verdicts, taken)
    }

    /// Takes back charges, each with the moment at which it was charged; `None` where nothing is to be taken back. Locks one
    /// shard at a time.
    pub fn give_back_now(&self, charges: &[Charge], taken: &[Option<Micros>]) {
        let due = charges.iter().zip(taken).filter_map(|(charge, charged)| {
            let hits = charge.limit.counted(charge.hits).taken();
            charged.map(|charged| Back { at: self.locate(charge), charged, hits })
        });
        let mut due: Vec<_> = due.collect();
        due.sort_by_key(|back| (back.at.shard, back.at.hash, back.charged));
        // Charges of one counter against one limit are taken back as one, as by the script: what has drained since has
        // drained of all of them.
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

    /// Forgets every counter whose loss changes nothing, and every refusal that is more than a minute old. Locks one shard at a time.
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
        // Read under the lock: who comes second never brings the earlier time, so what was swept stays idle.
        let now = self.clock.now();
        shard.charge(at, now, self, &mut gone).0
    }

    fn locate<'a>(&self, charge: &'a Charge) -> Located<'a> {
        let hash = self.hasher.hash_one(&charge.key);
        // The table takes its own bits from both ends of the hash; the shard takes some from the middle.
        let shard = usize::try_from((hash >> 32) % SHARDS as u64).unwrap_or(0);
        Located { charge, hash, shard }
    }

    /// One atomic step over several counters: decide all in order, and when it is known whether the request is refused,
    /// charge all of them or only what is kept all the same.
    fn charge_together(&self, charges: &[Charge]) -> Verdicts {
        // Whatever takes long and needs no counter is done before the locks are taken, and what is no longer needed is
        // dropped after they are released.
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
        let ballots = charges.iter().zip(&verdicts).map(|(charge, verdict)| charge.ballot(verdict.outcome));
        let is_refused = is_request_refused(ballots);
        for (&at, verdict) in step.located.iter().zip(&mut verdicts) {
            if is_refused && !at.charge.is_kept() {
                continue;
            }
            let (told, _) = locked.charge(at, now, self);
            // Where a counter was charged more than once, what it is without the others was not asked.
            if !(is_refused && step.is_repeated(at)) {
                *verdict = told;
            }
        }
        if is_refused {
            for (&at, verdict) in step.located.iter().zip(&mut verdicts) {
                locked.shard(at).refuse(at, now, verdict);
            }
        }
        verdicts
    }

    /// Charges more counters than one atomic step does: group by group, and when it is known that the request is refused, what
    /// the groups took is taken back.
    fn charge_in_groups(&self, charges: &[Charge]) -> Verdicts {
        let (mut verdicts, taken) = self.take_now(charges);
        let ballots = charges.iter().zip(&verdicts).map(|(charge, verdict)| charge.ballot(verdict.outcome));
        if is_request_refused(ballots) {
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
            let (verdict, stays) = locked.charge(at, now, self);
            let is_taken = stays && !at.charge.is_kept() && at.charge.hits.taken() > 0;
            verdicts.push(verdict);
            taken.push(is_taken.then_some(now));
        }
    }

    /// Decides a charge of a counter that its request charges more than once, on a copy of the counter.
    fn decide_in_turn<'a>(&self, shard: &Shard, copies: &mut Copies<'a>, at: Located<'a>, now: Micros) -> Verdict {
        let Charge { key, limit, hits, charging, .. } = at.charge;
        let copy = || (key, shard.state(at).cloned().unwrap_or_else(|| limit.fresh()));
        let entry = copies.entry(at.hash, |(known, _)| *known == key, |(known, _)| self.hasher.hash_one(known));
        let (_, state) = entry.or_insert_with(copy).into_mut();
        limit.charge(state, now, *hits, *charging).0
    }

    /// Lets the shards of a step grow for counters that are new, one shard at a time, so that none grows while all are locked.
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

    /// Locks the shards of a step.
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
    /// Whether the counter of a charge may be charged more than once.
    fn is_repeated(&self, at: Located<'_>) -> bool {
        !self.repeated.is_empty() && self.repeated.binary_search(&at.hash).is_ok()
    }
}

impl Locked<'_> {
    /// The shard of a charge, which is one of those of its step.
    fn shard(&mut self, at: Located<'_>) -> &mut Shard {
        &mut self.guards[usize::from(self.places[at.shard])]
    }

    /// As [`Shard::charge`].
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

    /// What a charge is told.
    fn decide(&self, at: Located<'_>, now: Micros) -> Verdict {
        at.charge.limit.verdict(self.state(at), now, at.charge.hits)
    }

    /// Tells what is left of a counter when its request is refused: what nobody has taken. The outcome stays, and a counter that
    /// refused remembers it.
    fn refuse(&mut self, at: Located<'_>, now: Micros, verdict: &mut Verdict) {
        let slot = self.find(at).and_then(|bucket| self.counters.get_bucket_mut(bucket));
        let left = at.charge.limit.verdict(slot.as_deref().map(|slot| &slot.counter.state), now, Hits::LOOK);
        verdict.remaining = left.remaining;
        verdict.reset = left.reset;
        if let Some(slot) = slot.filter(|_| verdict.outcome.is_refused()) {
            slot.standing = slot.standing.refusing(now);
        }
    }

    /// Takes hits back; from a counter that is gone, none.
    fn give_back(&mut self, back: &Back<'_>, now: Micros) {
        let limit = &back.at.charge.limit;
        if let Some(slot) = self.find(back.at).and_then(|bucket| self.counters.get_bucket_mut(bucket)) {
            limit.undo(&mut slot.counter.state, now, back.charged, back.hits);
            let left = limit.verdict(Some(&slot.counter.state), now, Hits::LOOK);
            slot.standing = slot.standing.counting(limit.idle_at(&slot.counter.state), share(limit, &left));
        }
    }

    /// Decides one charge and saves what it leaves behind. Returns the verdict, and whether the hits are on the counter. Giving
    /// back creates no counter.
    fn charge(&mut self, at: Located<'_>, now: Micros, memory: &Memory, gone: &mut Gone) -> (Verdict, bool) {
        let Charge { key, hits, limit, charging, .. } = at.charge;
        let bucket = self.find(at);
        if let Some(slot) = bucket.and_then(|bucket| self.counters.get_bucket_mut(bucket)) {
            let (verdict, stays) = limit.charge(&mut slot.counter.state, now, *hits, *charging);
            if stays {
                slot.standing = slot.standing.counting(limit.idle_at(&slot.counter.state), share(limit, &verdict));
            }
            if verdict.outcome.is_refused() {
                slot.standing = slot.standing.refusing(now);
            }
            return (verdict, stays);
        }
        let mut state = limit.fresh();
        let (verdict, stays) = limit.charge(&mut state, now, *hits, *charging);
        if stays && hits.taken() > 0 {
            let standing = Standing::new(limit.idle_at(&state), share(limit, &verdict));
            let standing = if verdict.outcome.is_refused() { standing.refusing(now) } else { standing };
            self.make_room(now, memory, gone);
            let slot = Slot { standing, counter: Box::new(Counter { key: key.clone(), state }) };
            self.counters.insert_unique(at.hash, slot, |slot| memory.hash(slot));
        }
        (verdict, stays)
    }

    fn remove(&mut self, bucket: usize, gone: &mut Gone) {
        if let Ok(slot) = self.counters.get_bucket_entry(bucket) {
            gone.push(slot.remove().0.counter);
        }
    }

    /// Sweeps a little, and when the shard is full all the same, evicts the counter whose loss changes the least.
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

/// The share of a limit in use, by what an answer says is left of it.
fn share(limit: &Limit, left: &Verdict) -> Share {
    Share::in_use(left.remaining, limit.capacity())
}
