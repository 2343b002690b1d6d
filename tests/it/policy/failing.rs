//! A store that fails the charges it is told to fail, and a guard, limiters and an edge over it.

use std::num::NonZeroU32;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tidegate::algorithm::{Charge, Limit};

use tidegate::model::policy::is_request_refused;
use tidegate::model::{Charging, Clock, Hits, Micros};
use tidegate::rulefile::{Options, load};
use tidegate::store::deadline::Deadline;
use tidegate::store::guard::Guard;
use tidegate::store::memory::Memory;
use tidegate::store::replicas::Replicas;
use tidegate::store::{Charged, Store, StoreError, Undo};

use crate::world::{HandClock, Limiter, NOON, file};

/// Room for every counter of a test, so that none is evicted.
const COUNTERS: usize = 1 << 20;

/// The limit of those that fail where the value begins with `partly`.
pub const PARTLY: u32 = 77;

/// The embedded store, but charges whose value begins with `down` fail, and those of a limit of [`PARTLY`] whose value begins
/// with `partly`.
pub struct Failing {
    pub memory: Arc<Memory>,
    /// How they fail.
    pub error: Mutex<StoreError>,
    /// The budget of each call.
    pub budgets: Mutex<Vec<Duration>>,
    /// What its undos were told.
    pub told: Arc<Told>,
}

/// How many undos were kept, and how many given back.
#[derive(Default)]
pub struct Told {
    kept: AtomicUsize,
    given_back: AtomicUsize,
}

impl Told {
    /// Kept and given back.
    pub fn counts(&self) -> (usize, usize) {
        (self.kept.load(Ordering::SeqCst), self.given_back.load(Ordering::SeqCst))
    }

    /// An undo that counts here what it is told, and gives back by `give_back`.
    pub fn undo(
        self: &Arc<Self>,
        left: impl IntoIterator<Item = (usize, u32, Micros)>,
        give_back: impl FnOnce() + Send + 'static,
    ) -> Undo {
        let ending = Ending { told: Arc::clone(self), is_given_back: false };
        Undo::new(Charging::AllOrNothing, left.into_iter().collect(), move || {
            ending.with_all_given_back();
            give_back();
        })
    }
}

/// Counts at its end how an undo ended.
struct Ending {
    told: Arc<Told>,
    is_given_back: bool,
}

impl Ending {
    fn with_all_given_back(mut self) {
        self.is_given_back = true;
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        let count = if self.is_given_back { &self.told.given_back } else { &self.told.kept };
        count.fetch_add(1, Ordering::SeqCst);
    }
}

impl Failing {
    pub fn new(clock: &Arc<HandClock>) -> Arc<Self> {
        Arc::new(Self {
            memory: Arc::new(memory(clock)),
            error: Mutex::new(StoreError::TimedOut),
            budgets: Mutex::default(),
            told: Arc::default(),
        })
    }

    /// Charges what does not fail, as if what fails let the request pass; what it took on that account can be undone.
    fn charge_now(&self, charges: &[Charge]) -> Charged {
        let request: Vec<_> = charges
            .iter()
            .map(|charge| match is_down(charge) {
                // It passes, and has no counter.
                true => Charge { limit: Limit::closed(), hits: Hits::give_back(1), ..charge.clone() },
                false => charge.clone(),
            })
            .collect();
        let looks: Vec<_> = request.iter().map(|charge| Charge { hits: Hits::LOOK, ..charge.clone() }).collect();
        let before = self.memory.charge_now(&looks);
        let verdicts = self.memory.charge_now(&request);
        let charge_outcomes =
            request.iter().zip(&verdicts).map(|(charge, verdict)| charge.charge_outcome(verdict.outcome));
        let is_refused = is_request_refused(charge_outcomes);
        let error = *self.error.lock();
        let taken = |index: &usize| {
            let Charge { charging, hits, .. } = request[*index];
            charging == Charging::AllOrNothing && hits.taken() > 0 && !verdicts[*index].outcome.is_refused()
        };
        let taken: Vec<usize> = (0..request.len()).filter(taken).collect();
        let undo = (charges.iter().any(is_down) && !is_refused && !taken.is_empty()).then(|| {
            let left: Vec<_> =
                taken.iter().map(|&index| (index, before[index].remaining, before[index].reset)).collect();
            let memory = Arc::clone(&self.memory);
            let refund = |charge: &Charge| Charge { hits: Hits::give_back(charge.hits.taken()), ..charge.clone() };
            let refunds: Vec<_> = taken.iter().map(|&index| refund(&request[index])).collect();
            self.told.undo(left, move || drop(memory.charge_now(&refunds)))
        });
        let answer = |(charge, verdict)| if is_down(charge) { Err(error) } else { Ok(verdict) };
        Charged {
            undos: undo.into_iter().collect(),
            ..Charged::answered(charges.iter().zip(verdicts).map(answer).collect())
        }
    }
}

impl Store for Failing {
    fn charge<'a>(
        &'a self,
        charges: &'a [Charge],
        budget: Duration,
    ) -> Pin<Box<dyn Future<Output = Charged> + Send + 'a>> {
        self.budgets.lock().push(budget);
        Box::pin(std::future::ready(self.charge_now(charges)))
    }

    fn give_back<'a>(
        &'a self,
        charges: &'a [Charge],
        taken: &'a [Option<Micros>],
    ) -> Pin<Box<dyn Future<Output = ()> + Send + 'a>> {
        self.memory.give_back_now(charges, taken);
        Box::pin(std::future::ready(()))
    }
}

fn is_down(charge: &Charge) -> bool {
    let key = charge.key.to_string();
    key.contains("=down") || key.contains("=partly") && charge.limit.capacity() == PARTLY
}

/// The guard over this store of one of so many replicas.
pub fn guard(store: Arc<dyn Store>, clock: &Arc<HandClock>, deadline: Deadline, replicas: u32) -> Arc<Guard> {
    let replicas = Arc::new(Replicas::set(NonZeroU32::new(replicas).expect("at least one")));
    let local = Arc::new(memory(clock));
    Arc::new(Guard::new(store, deadline, local, replicas, Arc::clone(clock) as Arc<dyn Clock>))
}

fn memory(clock: &Arc<HandClock>) -> Memory {
    Memory::new(Arc::clone(clock) as Arc<dyn Clock>, COUNTERS)
}

/// A limiter of these rules behind this guard.
pub fn limiter(rules: &str, options: Options, guard: &Arc<Guard>) -> Limiter {
    let loaded = load(&[file("rules.yaml", rules)], options).unwrap_or_else(|invalid| panic!("{invalid}"));
    Limiter::new(loaded.rules, Arc::clone(guard))
}

/// One instance with a store that fails when told to.
pub struct Instance {
    pub clock: Arc<HandClock>,
    pub store: Arc<Failing>,
    pub guard: Arc<Guard>,
}

impl Instance {
    /// One of so many replicas.
    pub fn of(replicas: u32) -> Self {
        let clock = HandClock::at(NOON);
        let store = Failing::new(&clock);
        let guard = guard(Arc::clone(&store) as Arc<dyn Store>, &clock, Deadline::Auto, replicas);
        Self { clock, store, guard }
    }

    pub fn limiter(&self, rules: &str) -> Limiter {
        limiter(rules, Options::default(), &self.guard)
    }
}
