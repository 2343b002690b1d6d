//! Requests that no limit applies to: descriptors without a rule, domains without rules, and keys that requests do not have.

use std::fmt;
use std::hash::{BuildHasher, Hash, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use arc_swap::ArcSwap;
use foldhash::HashMap;
use foldhash::fast::FixedState;
use lru::LruCache;
use parking_lot::Mutex;

use super::escape::word;
use super::sample::{is_sampled, is_too_soon};
use super::throttle::LogThrottle;
use crate::model::{About, Clock, Decision, Descriptor, Finding, Micros, Part, Request};

/// Maximum number of shapes: 256. A service has some tens of them.
const MOST_SHAPES: usize = 256;
/// Maximum number of keys of a shape that are kept: 16.
const MOST_KEYS: usize = 16;
/// Maximum number of descriptors of a request, or of a slice of a large one, that are counted: 16.
const MOST_OF_REQUEST: usize = 16;
/// Maximum number of entries of a request that is examined for keys of rules: 64.
const MOST_ENTRIES: usize = 64;
/// Requests under newly loaded rules of which each is examined for keys: 1,024, all domains together.
const EXAMINED_FIRST: u64 = 1_024;
/// One of so many further requests is examined for keys: 64, because each rule and each entry are compared.
const EXAMINED_LATER: u32 = 64;
/// Maximum number of keys of a domain's rules that are looked for: 32.
const MOST_EXPECTED: usize = 32;
/// Interval between two log lines: a minute.
const LINE_EVERY: Duration = Duration::from_secs(60);

/// Number of connections, as of now.
type Connections = Box<dyn Fn() -> u64 + Send + Sync>;

/// Descriptors, domains and keys that no rule matches, since the rules in force were loaded.
pub struct Unmatched {
    clock: Arc<dyn Clock>,
    hasher: foldhash::fast::RandomState,
    shapes: Mutex<Shapes>,
    /// Descriptors that are not counted: another thread was in the way, or there were too many shapes.
    missed: AtomicU64,
    keys: ArcSwap<Expected>,
    /// Number of requests of which each is still examined for keys.
    first_left: AtomicU64,
    line: LogThrottle,
    http1: OnceLock<Connections>,
}

/// Shapes by their digest. The first to go is the one that was not seen for the longest time.
struct Shapes {
    seen: LruCache<u64, Shape, FixedState>,
    generation: u64,
    /// Time of the last new shape.
    new_at: Micros,
    /// New shapes that no log line is about, and the last of them.
    unlogged: u64,
    last: u64,
}

/// Keys of descriptors that met no rule.
#[derive(Clone, Debug)]
pub struct Shape {
    /// Name of the domain, as far as it is kept.
    pub domain: Box<str>,
    /// Keys in order, as far as they are kept; empty if no rule file has the domain.
    pub keys: Vec<Box<str>>,
    /// True if the descriptor has more keys.
    pub is_cut: bool,
    /// Time of the first of them.
    pub first: Micros,
    /// Time of the last of them.
    pub last: Micros,
    /// Number of the descriptors, or of the requests if no rule file has the domain.
    pub count: u64,
}

/// Keys of the rules in force by domain.
#[derive(Default)]
struct Expected {
    generation: u64,
    since: Micros,
    domains: HashMap<Box<str>, KeysOfDomain>,
}

#[derive(Default)]
struct KeysOfDomain {
    examined: AtomicU64,
    /// Keys, each with the number of examined requests that have it.
    keys: Vec<(Box<str>, AtomicU64)>,
}

/// Requests of a domain that do not have a key of its rules.
#[derive(Clone, Debug)]
pub struct AbsentKey {
    /// Name of the domain.
    pub domain: Box<str>,
    /// The key.
    pub key: Box<str>,
    /// Number of requests that were examined.
    pub examined: u64,
    /// Number of those without the key.
    pub without: u64,
}

/// Snapshot of [`Unmatched`].
#[derive(Clone, Debug)]
pub struct UnmatchedNow {
    /// The time.
    pub now: Micros,
    /// Time at which the rules were loaded.
    pub since: Micros,
    /// Shapes, the most frequent first.
    pub shapes: Vec<Shape>,
    /// Keys that some requests do not have.
    pub absent: Vec<AbsentKey>,
    /// Descriptors that are not counted.
    pub missed: u64,
    /// Connections that spoke HTTP/1 to the gRPC port since the start.
    pub http1: u64,
}

impl Unmatched {
    /// Returns an empty collection.
    pub fn new(clock: Arc<dyn Clock>) -> Self {
        let seen = LruCache::unbounded_with_hasher(FixedState::default());
        let shapes = Shapes { seen, generation: 0, new_at: Micros::ZERO, unlogged: 0, last: 0 };
        Self {
            clock,
            hasher: foldhash::fast::RandomState::default(),
            shapes: Mutex::new(shapes),
            missed: AtomicU64::new(0),
            keys: ArcSwap::default(),
            first_left: AtomicU64::new(0),
            line: LogThrottle::every(LINE_EVERY),
            http1: OnceLock::new(),
        }
    }

    /// Sets where the number of connections that spoke HTTP/1 to the gRPC port comes from.
    pub fn set_http1(&self, connections: impl Fn() -> u64 + Send + Sync + 'static) {
        let _ = self.http1.set(Box::new(connections));
    }

    /// Begins anew with rules that are in force since `now`.
    pub(super) fn replace<'a>(&self, generation: u64, rules: impl Iterator<Item = &'a About>, now: Micros) {
        let mut domains: HashMap<Box<str>, KeysOfDomain> = HashMap::default();
        for about in rules {
            let domain = about.path.domain();
            if !domains.contains_key(domain) {
                domains.insert(domain.into(), KeysOfDomain::default());
            }
            let Some(KeysOfDomain { keys, .. }) = domains.get_mut(domain) else { continue };
            for key in about.path.entry_keys().filter(|key| !key.contains('*')) {
                if keys.len() < MOST_EXPECTED && !keys.iter().any(|(known, _)| **known == *key) {
                    keys.push((key.into(), AtomicU64::new(0)));
                }
            }
        }
        self.keys.store(Arc::new(Expected { generation, since: now, domains }));
        self.first_left.store(EXAMINED_FIRST, Ordering::Relaxed);
    }

    /// Counts what no rule matches in a request, or in a slice of a large one.
    #[inline]
    pub(super) fn record(&self, request: &Request, decision: &Decision<'_>) {
        if decision.domain.is_none() {
            self.shape(request.domain(), None, decision.generation);
        } else if decision.parts.iter().any(is_unmatched) {
            self.record_parts(request, decision);
        }
    }

    #[inline(never)]
    fn record_parts(&self, request: &Request, decision: &Decision<'_>) {
        // A rule that decides the whole request leaves the others unmatched.
        if decision.ruling.is_some() {
            return;
        }
        let parts = request.descriptors().iter().zip(&decision.parts);
        let unmatched = parts.filter(|(_, part)| is_unmatched(part)).take(MOST_OF_REQUEST);
        unmatched.for_each(|(descriptor, _)| self.shape(request.domain(), Some(descriptor), decision.generation));
    }

    /// Counts the keys of rules that request number `number` has, if it is one that is examined.
    #[inline]
    pub(super) fn look_for_keys(&self, request: &Request, decision: &Decision<'_>, number: u64) {
        let is_one_of_first = self.first_left.load(Ordering::Relaxed) > 0;
        if is_one_of_first || is_sampled(number, EXAMINED_LATER) {
            self.examine(request, decision, is_one_of_first);
        }
    }

    #[inline(never)]
    fn examine(&self, request: &Request, decision: &Decision<'_>, is_one_of_first: bool) {
        let expected = self.keys.load();
        let entries = request.descriptors().iter().flat_map(|descriptor| &descriptor.entries);
        let is_whole = !decision.is_too_large && entries.clone().nth(MOST_ENTRIES).is_none();
        let is_of_rules = decision.generation == expected.generation;
        let Some(domain) = decision.domain.filter(|_| is_of_rules && is_whole) else { return };
        let Some(KeysOfDomain { examined, keys }) = expected.domains.get(domain) else { return };
        examined.fetch_add(1, Ordering::Relaxed);
        if is_one_of_first {
            let less = |left: u64| left.checked_sub(1);
            let _ = self.first_left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        }
        for (key, with) in keys {
            if entries.clone().any(|entry| *entry.key == *key.as_bytes()) {
                with.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    /// Counts a descriptor without a rule, or a request of a domain without rules.
    fn shape(&self, domain: &str, descriptor: Option<&Descriptor>, generation: u64) {
        let entries = descriptor.map(|descriptor| &*descriptor.entries).unwrap_or_default();
        let mut hasher = self.hasher.build_hasher();
        domain.hash(&mut hasher);
        entries.iter().for_each(|entry| entry.key.hash(&mut hasher));
        let digest = hasher.finish();
        let now = self.clock.now();
        let Some(mut shapes) = self.shapes.try_lock() else {
            self.missed.fetch_add(1, Ordering::Relaxed);
            return;
        };
        let Shapes { seen, generation: since, new_at, unlogged, last } = &mut *shapes;
        if generation < *since {
            return;
        }
        if generation > *since {
            seen.clear();
            (*since, *new_at, *unlogged) = (generation, Micros::ZERO, 0);
            self.missed.store(0, Ordering::Relaxed);
        }
        if let Some(known) = seen.get_mut(&digest) {
            known.count = known.count.saturating_add(1);
            known.last = now;
        } else if seen.len() < MOST_SHAPES || !is_too_soon(now, *new_at) {
            if seen.len() >= MOST_SHAPES {
                seen.pop_lru();
            }
            let keys = entries.iter().take(MOST_KEYS).map(|entry| word(&entry.key)).collect();
            let (domain, is_cut) = (word(domain.as_bytes()), entries.len() > MOST_KEYS);
            seen.put(digest, Shape { domain, keys, is_cut, first: now, last: now, count: 1 });
            (*new_at, *last, *unlogged) = (now, digest, *unlogged + 1);
        } else {
            self.missed.fetch_add(1, Ordering::Relaxed);
        }
        if *unlogged > 0 && self.line.is_due() {
            let shape = seen.peek(last).cloned();
            let (shapes_since, others) = (std::mem::take(unlogged), seen.len().saturating_sub(1));
            drop(shapes);
            if let Some(shape) = shape {
                log(&shape, shapes_since, others);
            }
        }
    }

    /// Returns what met no rule so far.
    pub fn now(&self) -> UnmatchedNow {
        let expected = self.keys.load();
        let mut shapes: Vec<Shape> = {
            let shapes = self.shapes.lock();
            // Those of older rules may have a rule by now.
            let is_of_rules = shapes.generation >= expected.generation;
            shapes.seen.iter().filter(|_| is_of_rules).map(|(_, shape)| shape.clone()).collect()
        };
        shapes.sort_by_key(|shape| std::cmp::Reverse(shape.count));
        let mut absent: Vec<AbsentKey> = expected.domains.iter().flat_map(|(name, keys)| keys.absent(name)).collect();
        absent.sort_by(|one, other| (&one.domain, &one.key).cmp(&(&other.domain, &other.key)));
        let missed = self.missed.load(Ordering::Relaxed);
        let http1 = self.http1.get().map_or(0, |connections| connections());
        UnmatchedNow { now: self.clock.now(), since: expected.since, shapes, absent, missed, http1 }
    }
}

impl KeysOfDomain {
    fn absent(&self, domain: &str) -> Vec<AbsentKey> {
        let examined = self.examined.load(Ordering::Relaxed);
        let absent = |(key, with): &(Box<str>, AtomicU64)| {
            let without = examined.saturating_sub(with.load(Ordering::Relaxed));
            (without > 0).then(|| AbsentKey { domain: domain.into(), key: key.clone(), examined, without })
        };
        self.keys.iter().filter_map(absent).collect()
    }
}

/// Returns true if no rule matches the descriptor of this part.
fn is_unmatched(part: &Part<'_>) -> bool {
    part.rule.is_none() && matches!(part.finding, Finding::Unmatched)
}

/// Writes the log line about new shapes; `shape` is the last of them, and `others` the number of all others since the rules were loaded.
fn log(shape: &Shape, shapes: u64, others: usize) {
    let Shape { domain, keys, .. } = shape;
    let keys = keys.join(", ");
    tracing::warn!(
        event = "requests.unmatched",
        shapes,
        domain = &**domain,
        keys,
        others,
        "requests have descriptors or domains that no rule matches, so they are not limited; domain and keys are those of the last one, and there are {others} others since the rules were loaded; `tidegate top --unmatched` lists all with the nearest rule"
    );
}

impl fmt::Debug for Unmatched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Unmatched").field("missed", &self.missed).finish_non_exhaustive()
    }
}
