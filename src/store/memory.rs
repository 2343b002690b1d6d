//! The embedded store: counters in this process, sharded, bounded, swept and exact under concurrency.

use std::future::{Future, ready};
use std::hash::{BuildHasher, RandomState};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use hashbrown::HashTable;
use parking_lot::{Mutex, MutexGuard};
use smallvec::SmallVec;

use super::{Charged, Store, Verdicts};
use crate::algorithm::{Charge, State};
use crate::model::policy::is_request_refused;
use crate::model::{Charging, Clock, CounterKey, Hits, Micros, Verdict};

/// How many shards the counters are spread over: 64, well above the cores that share them, so that two requests seldom
/// meet at one lock.
const SHARDS: usize = 64;
/// How many counters are looked at to find one to evict: 8. The earliest idle of them goes.
const SAMPLED: usize = 8;
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
}

#[derive(Default)]
struct Shard {
    /// Boxed: as many as half of a table's buckets are empty, and an empty one costs 9 bytes so, not a whole counter's.
    counters: HashTable<Box<Counter>>,
    /// Where the sweep goes on.
    swept: usize,
    /// Where the last sample began.
    sampled: usize,
}

struct Counter {
    key: CounterKey,
    held: Held,
}

/// What is known of a counter.
#[derive(Clone)]
struct Held {
    state: State,
    idle_at: Micros,
}

/// A charge and where its counter lives.
#[derive(Clone, Copy)]
struct Located<'a> {
    charge: &'a Charge,
    hash: u64,
    shard: usize,
}

/// The shards of one request, locked in order of their numbers so that no two requests wait for each other.
type Locked<'a> = SmallVec<[(usize, MutexGuard<'a, Shard>); 4]>;

impl Store for Memory {
    fn charge<'a>(&'a self, charges: &'a [Charge], _: Duration) -> Pin<Box<dyn Future<Output = Charged> + Send + 'a>> {
        let answers = self.charge_now(charges).into_iter().map(Ok).collect();
        Box::pin(ready(Charged { answers, undo: None }))
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
        }
    }

    /// How many counters are held.
    pub fn counters(&self) -> usize {
        self.shards.iter().map(|shard| shard.lock().counters.len()).sum()
    }

    /// Charges the counters of one request.
    pub fn charge_now(&self, charges: &[Charge]) -> Verdicts {
        // A charge that is alone stays or not by itself.
        if charges.len() == 1 || charges.iter().all(|charge| charge.charging == Charging::Each) {
            let each = charges.iter().map(|charge| self.locate(charge));
            return each.map(|at| self.charge_alone(at)).collect();
        }
        self.charge_together(charges)
    }

    /// Forgets every counter that is idle. Locks one shard at a time.
    pub fn sweep(&self) {
        for shard in &self.shards {
            let now = self.clock.now();
            let Shard { counters, .. } = &mut *shard.lock();
            counters.retain(|counter| counter.held.idle_at > now);
            if counters.len() < counters.capacity() / SHRINK_BELOW {
                counters.shrink_to(counters.len() * 2, |counter| self.hasher.hash_one(&counter.key));
            }
        }
    }

    fn charge_alone(&self, at: Located<'_>) -> Verdict {
        let mut shard = self.shards[at.shard].lock();
        // Read under the lock: who comes second never brings the earlier time, so what was swept stays idle.
        let now = self.clock.now();
        shard.charge(at, now, self)
    }

    fn locate<'a>(&self, charge: &'a Charge) -> Located<'a> {
        let hash = self.hasher.hash_one(&charge.key);
        // The table takes its own bits from both ends of the hash; the shard takes some from the middle.
        let shard = usize::try_from((hash >> 32) % SHARDS as u64).unwrap_or(0);
        Located { charge, hash, shard }
    }

    /// One atomic step over several counters: charge all in order, and when the request is refused, take everything back
    /// and keep only what is recorded all the same.
    fn charge_together(&self, charges: &[Charge]) -> Verdicts {
        let located: SmallVec<[Located<'_>; 4]> = charges.iter().map(|charge| self.locate(charge)).collect();
        let mut locked = self.lock(&located);
        let now = self.clock.now();

        // What a counter was, if there was one, before a charge changed it: a log is not copied to be refused.
        let mut before: SmallVec<[Option<Option<Held>>; 4]> = SmallVec::with_capacity(located.len());
        let mut verdicts = Verdicts::with_capacity(located.len());
        for &at in &located {
            let shard = shard(&mut locked, at);
            let bucket = shard.find(at);
            let (verdict, changes) = shard.decide(at, bucket, now);
            before.push(changes.then(|| shard.held(bucket).cloned()));
            verdicts.push(if changes { shard.save(at, bucket, verdict, now, self) } else { verdict });
        }
        let ballots = located.iter().zip(&verdicts).map(|(at, verdict)| at.charge.ballot(verdict.outcome));
        if is_request_refused(ballots) {
            for (&at, held) in located.iter().zip(before).rev() {
                if let Some(held) = held {
                    shard(&mut locked, at).restore(at, held, self);
                }
            }
            for &at in located.iter().filter(|at| at.charge.is_kept()) {
                shard(&mut locked, at).charge(at, now, self);
            }
            // Each keeps its outcome; what is left is what nobody has taken.
            for (&at, verdict) in located.iter().zip(&mut verdicts) {
                let shard = shard(&mut locked, at);
                let left = at.charge.limit.verdict(shard.state(shard.find(at)), now, Hits::LOOK);
                verdict.remaining = left.remaining;
                verdict.reset = left.reset;
            }
        }
        verdicts
    }

    fn lock(&self, located: &[Located<'_>]) -> Locked<'_> {
        let mut numbers: SmallVec<[usize; 4]> = located.iter().map(|at| at.shard).collect();
        numbers.sort_unstable();
        numbers.dedup();
        numbers.into_iter().map(|number| (number, self.shards[number].lock())).collect()
    }
}

fn shard<'a, 'b>(locked: &'a mut Locked<'b>, at: Located<'_>) -> &'a mut Shard {
    let index = locked.binary_search_by_key(&at.shard, |(number, _)| *number);
    assert!(index.is_ok(), "every shard of the request is locked before it is used");
    &mut locked[index.unwrap_or_default()].1
}

impl Shard {
    fn find(&self, at: Located<'_>) -> Option<usize> {
        self.counters.find_bucket_index(at.hash, |counter| counter.key == at.charge.key)
    }

    fn held(&self, bucket: Option<usize>) -> Option<&Held> {
        bucket.and_then(|bucket| self.counters.get_bucket(bucket)).map(|counter| &counter.held)
    }

    fn state(&self, bucket: Option<usize>) -> Option<&State> {
        self.held(bucket).map(|held| &held.state)
    }

    /// Decides one charge and saves what it leaves behind.
    fn charge(&mut self, at: Located<'_>, now: Micros, memory: &Memory) -> Verdict {
        let bucket = self.find(at);
        let (verdict, changes) = self.decide(at, bucket, now);
        if changes { self.save(at, bucket, verdict, now, memory) } else { verdict }
    }

    /// What a charge is told, and whether its hits stay. A look has none, and a closed limit has no counter.
    fn decide(&self, at: Located<'_>, bucket: Option<usize>, now: Micros) -> (Verdict, bool) {
        let Charge { hits, limit, charging, .. } = at.charge;
        let verdict = limit.verdict(self.state(bucket), now, *hits);
        let stays = !verdict.outcome.is_refused() || limit.records_refused(*charging);
        (verdict, stays && *hits != Hits::LOOK && !limit.is_closed())
    }

    /// Puts the hits of a charge on its counter, and says what it is told then. Giving back creates no counter.
    fn save(
        &mut self,
        at: Located<'_>,
        bucket: Option<usize>,
        verdict: Verdict,
        now: Micros,
        memory: &Memory,
    ) -> Verdict {
        let Charge { hits, limit, .. } = at.charge;
        // Where refused hits stay, what is left and how long to wait are those of the counter with the hits on it.
        let told = |state: &State| {
            if verdict.outcome.is_refused() { limit.verdict(Some(state), now, *hits) } else { verdict }
        };
        if let Some(counter) = bucket.and_then(|bucket| self.counters.get_bucket_mut(bucket)) {
            let Held { state, idle_at } = &mut counter.held;
            limit.charge(state, now, *hits);
            *idle_at = limit.idle_at(state);
            told(state)
        } else if hits.taken() > 0 {
            self.make_room(now, memory.most_per_shard);
            let mut state = limit.fresh();
            limit.charge(&mut state, now, *hits);
            let told = told(&state);
            self.insert(at, Held { idle_at: limit.idle_at(&state), state }, memory);
            told
        } else {
            verdict
        }
    }

    fn restore(&mut self, at: Located<'_>, held: Option<Held>, memory: &Memory) {
        let bucket = self.find(at);
        match (held, bucket) {
            (Some(held), Some(bucket)) => {
                if let Some(counter) = self.counters.get_bucket_mut(bucket) {
                    counter.held = held;
                }
            }
            (Some(held), None) => self.insert(at, held, memory),
            (None, Some(bucket)) => self.remove(bucket),
            (None, None) => {}
        }
    }

    fn insert(&mut self, at: Located<'_>, held: Held, memory: &Memory) {
        let counter = Box::new(Counter { key: at.charge.key.clone(), held });
        self.counters.insert_unique(at.hash, counter, |counter| memory.hasher.hash_one(&counter.key));
    }

    fn remove(&mut self, bucket: usize) {
        if let Ok(counter) = self.counters.get_bucket_entry(bucket) {
            counter.remove();
        }
    }

    /// Sweeps a little, and when the shard is full all the same, evicts the earliest idle of a few.
    fn make_room(&mut self, now: Micros, most: usize) {
        let buckets = self.counters.num_buckets().max(1);
        for _ in 0..SWEPT_PER_NEW {
            self.swept = (self.swept + 1) % buckets;
            if self.counters.get_bucket(self.swept).is_some_and(|counter| counter.held.idle_at <= now) {
                self.remove(self.swept);
            }
        }
        while self.counters.len() >= most {
            // A linear congruential step (Knuth's MMIX constants): samples wander over the shard and repeat late.
            self.sampled = self.sampled.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let begin = self.sampled >> 16;
            let sample = (0..buckets).filter_map(|offset| {
                let bucket = begin.wrapping_add(offset) % buckets;
                self.counters.get_bucket(bucket).map(|counter| (counter.held.idle_at, bucket))
            });
            match sample.take(SAMPLED).min() {
                Some((_, bucket)) => self.remove(bucket),
                None => return,
            }
        }
    }
}
