//! A limiter, or a store alone, in this process, whose time moves by hand.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tidegate::algorithm::Charge;
use tidegate::model::{Clock, Decision, Descriptor, Entry, Finding, Micros, Override, Request, Tightest, Verdict};
use tidegate::rulefile::{CompiledRules, Documents, File, InvalidRules, Options, compile};
use tidegate::rules::RuleSet;
use tidegate::rules::live::{LiveRules, Snapshot};
use tidegate::store::Store;
use tidegate::store::deadline::Deadline;
use tidegate::store::guard::Guard;
use tidegate::store::memory::Memory;
use tidegate::store::replicas::Replicas;

/// Saturday, 21 November 2026, 12:00:00 UTC: an hour and a day begin or are half over, a week is not.
pub const NOON: Micros = Micros::from_secs(1_795_262_400);

/// A clock that only tests move.
#[derive(Default)]
pub struct HandClock(AtomicU64);

impl HandClock {
    pub fn at(now: Micros) -> Arc<Self> {
        Arc::new(Self(AtomicU64::new(now.get())))
    }

    pub fn set(&self, now: Micros) {
        self.0.store(now.get(), Ordering::SeqCst);
    }

    pub fn advance(&self, text: &str) {
        self.0.fetch_add(micros(text).get(), Ordering::SeqCst);
    }

    pub fn back(&self, text: &str) {
        self.0.fetch_sub(micros(text).get(), Ordering::SeqCst);
    }
}

impl Clock for HandClock {
    fn now(&self) -> Micros {
        Micros::new(self.0.load(Ordering::SeqCst))
    }
}

pub fn micros(text: &str) -> Micros {
    Micros::parse(text).unwrap_or_else(|| panic!("{text:?} is no duration"))
}

/// A store, and a clock that is set for every charge.
pub struct Counters {
    pub clock: Arc<HandClock>,
    pub store: Memory,
}

impl Counters {
    pub fn new() -> Self {
        let clock = HandClock::at(Micros::ZERO);
        let store = Memory::new(Arc::clone(&clock) as Arc<dyn Clock>, 1_000_000);
        Self { clock, store }
    }

    pub fn request(&self, charges: &[Charge], now: Micros) -> Vec<Verdict> {
        self.clock.set(now);
        self.store.charge_now(charges).into_vec()
    }
}

/// Rules, a store and a clock.
pub struct World {
    pub clock: Arc<HandClock>,
    pub store: Arc<Memory>,
    options: Options,
    limiter: Limiter,
}

impl World {
    pub fn new(rules: &str) -> Self {
        Self::with(rules, Options::default())
    }

    pub fn with(rules: &str, options: Options) -> Self {
        let clock = HandClock::at(NOON);
        let store = Arc::new(Memory::new(Arc::clone(&clock) as Arc<dyn Clock>, 100_000));
        let limiter = limiter(rules, options, &store);
        Self { clock, store, options, limiter }
    }

    /// Puts other rules in force over the same counters.
    pub fn reload(&mut self, rules: &str) {
        self.limiter = limiter(rules, self.options, &self.store);
    }

    pub fn ask(&self, request: &Request) -> Decision<'_> {
        futures(self.limiter.decide(request, None))
    }

    /// Asks for one descriptor written `key=value,key=value`.
    pub fn one(&self, descriptor: Descriptor) -> Answer {
        Answer::of(&self.ask(&request([descriptor])))
    }

    pub fn hit(&self, entries: &str, hits: u64) -> Answer {
        self.one(Descriptor { hits_addend: Some(hits), ..descriptor(entries) })
    }

    pub fn look(&self, entries: &str) -> Answer {
        self.hit(entries, 0)
    }

    pub fn refund(&self, entries: &str, hits: u64) -> Answer {
        self.one(Descriptor { hits_addend: Some(hits), is_negative_hits: true, ..descriptor(entries) })
    }

    pub fn overridden(&self, entries: &str, limit: u32, unit: i32) -> Answer {
        let limit = Override::new(limit, unit, 1).expect("an override");
        self.one(Descriptor { limit: Some(limit), ..descriptor(entries) })
    }

    /// Asks for several descriptors at once: whether the request was refused, and each answer.
    pub fn all<const N: usize>(&self, descriptors: [&str; N]) -> (bool, Vec<Answer>) {
        let decision = self.ask(&request(descriptors.map(descriptor)));
        let answers = decision.parts.iter().map(|part| Answer::part(part.outcome().is_refused(), &part.finding));
        (decision.outcome.is_refused(), answers.collect())
    }
}

/// A rule file of that name.
pub fn file(name: &str, text: &str) -> File {
    File { name: name.into(), bytes: text.as_bytes().to_vec() }
}

/// A limiter whose rules stay.
pub struct Limiter {
    pub limiter: tidegate::limiter::Limiter,
    rules: Snapshot,
}

impl Limiter {
    pub fn new(rules: RuleSet, guard: Arc<Guard>) -> Self {
        let limiter = tidegate::limiter::Limiter::new(Arc::new(LiveRules::new(rules)), guard);
        Self { rules: limiter.rules(), limiter }
    }

    pub fn rules(&self) -> &RuleSet {
        &self.rules
    }

    pub async fn decide(&self, request: &Request, patience: Option<Duration>) -> Decision<'_> {
        self.limiter.decide(&self.rules, request, patience).await
    }
}

/// Compiles rule files and reads the lists that they name.
pub fn load(files: &[File], options: Options) -> Result<CompiledRules, InvalidRules> {
    let mut documents = Documents::parse(files.to_vec());
    documents.read_lists(|path| std::fs::read(path).map_err(|error| error.to_string()));
    compile(documents, &options)
}

/// A limiter of these rules over this store.
pub fn limiter(rules: &str, options: Options, store: &Arc<Memory>) -> Limiter {
    let loaded = load(&[file("rules.yaml", rules)], options).unwrap_or_else(|invalid| panic!("{invalid}"));
    // The embedded store is in the process, and always answers.
    let (clock, replicas) = (HandClock::at(NOON) as Arc<dyn Clock>, Arc::new(Replicas::set(NonZeroU32::MIN)));
    let store_of_process = Arc::clone(store) as Arc<dyn Store>;
    Limiter::new(
        loaded.rules,
        Arc::new(Guard::new(store_of_process, Deadline::AtOnce, Arc::clone(store), replicas, clock)),
    )
}

/// A guard over this store, whose own counters are shared among so many replicas.
pub fn guard(store: Arc<dyn Store>, replicas: u32) -> Guard {
    let clock = HandClock::at(NOON) as Arc<dyn Clock>;
    let replicas = Arc::new(Replicas::set(NonZeroU32::new(replicas).expect("at least one")));
    Guard::new(store, Deadline::Auto, Arc::new(Memory::new(Arc::clone(&clock), 100_000)), replicas, clock)
}

pub fn request(descriptors: impl IntoIterator<Item = Descriptor>) -> Request {
    Request::new("d".to_owned(), descriptors.into_iter().collect(), 0).expect("a request")
}

pub fn descriptor(entries: &str) -> Descriptor {
    let entry = |text: &str| {
        let (key, value) = text.split_once('=').unwrap_or_else(|| panic!("{text:?} is no entry"));
        Entry::new(key.to_owned(), value.to_owned())
    };
    Descriptor { entries: entries.split(',').map(entry).collect(), ..Descriptor::default() }
}

/// Runs a future of the embedded store, which never waits.
pub fn futures<T>(future: impl Future<Output = T>) -> T {
    let mut future = std::pin::pin!(future);
    match future.as_mut().poll(&mut std::task::Context::from_waker(std::task::Waker::noop())) {
        std::task::Poll::Ready(ready) => ready,
        std::task::Poll::Pending => panic!("the embedded store answers at once"),
    }
}

/// What one descriptor was told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    pub refused: bool,
    /// `None` where nothing is limited.
    pub limit: Option<u32>,
    pub remaining: u32,
    pub reset: Micros,
    pub retry: Option<Micros>,
}

impl Answer {
    fn of(decision: &Decision<'_>) -> Self {
        Self::part(decision.outcome.is_refused(), &decision.parts[0].finding)
    }

    pub fn part(refused: bool, finding: &Finding<'_>) -> Self {
        match finding {
            Finding::Limited(Tightest { quota, verdict, .. }) => Self {
                refused,
                limit: Some(quota.limit()),
                remaining: verdict.remaining,
                reset: verdict.reset,
                retry: verdict.retry,
            },
            _ => Self { refused, limit: None, remaining: 0, reset: Micros::ZERO, retry: None },
        }
    }

    #[track_caller]
    pub fn admitted(&self, remaining: u32) {
        assert!(!self.refused && self.remaining == remaining, "expected admitted with {remaining} left, got {self:?}");
    }

    #[track_caller]
    pub fn refused(&self, remaining: u32) {
        assert!(self.refused && self.remaining == remaining, "expected refused with {remaining} left, got {self:?}");
    }
}
