//! The embedded store: counters in this process, sharded, bounded, swept and exact under concurrency.

use std::collections::HashMap;
use std::future::{Future, ready};
use std::hash::{BuildHasher, RandomState};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
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
    evicted: AtomicU64,
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
        self.charge_together(charges)
    }

    /// Forgets every counter that is idle. Locks one shard at a time.
    pub fn sweep(&self) {
        for shard in &self.shards {
            let now = self.clock.now();
            let Shard { counters, .. } = &mut *shard.lock();
            counters.retain(|counter| counter.idle_at > now);
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

    /// One atomic step over several counters: decide all in order, and when it is known whether the request is refused,
    /// charge all of them or only what is kept all the same.
    fn charge_together(&self, charges: &[Charge]) -> Verdicts {
        let located: SmallVec<[Located<'_>; 4]> = charges.iter().map(|charge| self.locate(charge)).collect();
        let mut locked = self.lock(&located);
        let now = self.clock.now();

        let has_repeats = has_repeats(&located);
        let mut verdicts = if has_repeats {
            decide_in_order(&located, &mut locked, now)
        } else {
            located.iter().map(|&at| shard(&mut locked, at).decide(at, now)).collect()
        };
        let ballots = located.iter().zip(&verdicts).map(|(at, verdict)| at.charge.ballot(verdict.outcome));
        let is_refused = is_request_refused(ballots);
        for (&at, verdict) in located.iter().zip(&mut verdicts) {
            if is_refused && !at.charge.is_kept() {
                continue;
            }
            let told = shard(&mut locked, at).charge(at, now, self);
            // Where a counter was charged more than once, what it is without the others was not asked.
            if !(is_refused && has_repeats) {
                *verdict = told;
            }
        }
        if is_refused {
            // Each keeps its outcome; what is left is what nobody has taken.
            for (&at, verdict) in located.iter().zip(&mut verdicts) {
                let shard = shard(&mut locked, at);
                let left = at.charge.limit.verdict(shard.state(at), now, Hits::LOOK);
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

/// Whether some counter may be charged more than once. Keys of one hash count as one.
fn has_repeats(located: &[Located<'_>]) -> bool {
    let mut hashes: SmallVec<[u64; 4]> = located.iter().map(|at| at.hash).collect();
    hashes.sort_unstable();
    hashes.windows(2).any(|pair| pair[0] == pair[1])
}

/// What each charge is told if those before it are charged: on a copy of each counter, whatever the number of its charges.
fn decide_in_order(located: &[Located<'_>], locked: &mut Locked<'_>, now: Micros) -> Verdicts {
    let mut copies: HashMap<&CounterKey, State> = HashMap::new();
    let mut verdicts = Verdicts::with_capacity(located.len());
    for &at in located {
        let Charge { key, limit, hits, charging, .. } = at.charge;
        let shard = shard(locked, at);
        let copy = || shard.state(at).cloned().unwrap_or_else(|| limit.fresh());
        let state = copies.entry(key).or_insert_with(copy);
        verdicts.push(limit.charge(state, now, *hits, *charging).0);
    }
    verdicts
}

impl Shard {
    fn find(&self, at: Located<'_>) -> Option<usize> {
        self.counters.find_bucket_index(at.hash, |counter| counter.key == at.charge.key)
    }

    fn state(&self, at: Located<'_>) -> Option<&State> {
        self.find(at).and_then(|bucket| self.counters.get_bucket(bucket)).map(|counter| &counter.state)
    }

    /// What a charge is told.
    fn decide(&self, at: Located<'_>, now: Micros) -> Verdict {
        at.charge.limit.verdict(self.state(at), now, at.charge.hits)
    }

    /// Decides one charge and saves what it leaves behind. Giving back creates no counter.
    fn charge(&mut self, at: Located<'_>, now: Micros, memory: &Memory) -> Verdict {
        let Charge { hits, limit, charging, .. } = at.charge;
        let bucket = self.find(at);
        if let Some(counter) = bucket.and_then(|bucket| self.counters.get_bucket_mut(bucket)) {
            let (verdict, stays) = limit.charge(&mut counter.state, now, *hits, *charging);
            if stays {
                counter.idle_at = limit.idle_at(&counter.state);
            }
            return verdict;
        }
        let mut state = limit.fresh();
        let (verdict, stays) = limit.charge(&mut state, now, *hits, *charging);
        if stays && hits.taken() > 0 {
            self.make_room(now, memory);
            self.insert(at, state, memory);
        }
        verdict
    }

    fn insert(&mut self, at: Located<'_>, state: State, memory: &Memory) {
        let Charge { key, limit, .. } = at.charge;
        let counter = Box::new(Counter { key: key.clone(), idle_at: limit.idle_at(&state), state });
        self.counters.insert_unique(at.hash, counter, |counter| memory.hasher.hash_one(&counter.key));
    }

    fn remove(&mut self, bucket: usize) {
        if let Ok(counter) = self.counters.get_bucket_entry(bucket) {
            counter.remove();
        }
    }

    /// Sweeps a little, and when the shard is full all the same, evicts the earliest idle of a few.
    fn make_room(&mut self, now: Micros, memory: &Memory) {
        let buckets = self.counters.num_buckets().max(1);
        for _ in 0..SWEPT_PER_NEW {
            self.swept = (self.swept + 1) % buckets;
            if self.counters.get_bucket(self.swept).is_some_and(|counter| counter.idle_at <= now) {
                self.remove(self.swept);
            }
        }
        while self.counters.len() >= memory.most_per_shard {
            // A linear congruential step (Knuth's MMIX constants): samples wander over the shard and repeat late.
            self.sampled = self.sampled.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let begin = self.sampled >> 16;
            let sample = (0..buckets).filter_map(|offset| {
                let bucket = begin.wrapping_add(offset) % buckets;
                self.counters.get_bucket(bucket).map(|counter| (counter.idle_at, bucket))
            });
            match sample.take(SAMPLED).min() {
                Some((idle_at, bucket)) => {
                    self.remove(bucket);
                    memory.evicted.fetch_add(u64::from(idle_at > now), Ordering::Relaxed);
                }
                None => return,
            }
        }
    }
}
