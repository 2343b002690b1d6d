//! Decisions on a virtual clock: the limiter and the embedded store of the service, whose time is an argument.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::algorithm::Charge;
use crate::limiter::Limiter;
use crate::model::{Clock, Decision, Micros, Request};
use crate::rules::RuleSet;
use crate::rules::live::{LiveRules, Snapshot};
use crate::store::Store;
use crate::store::deadline::Deadline;
use crate::store::guard::Guard;
use crate::store::memory::Memory;
use crate::store::replicas::Replicas;

pub mod replay;

/// Maximum number of counters of a simulation: 10,000,000, about 2 GB.
pub const MOST_COUNTERS: usize = 10_000_000;

/// A limiter with counters of its own, empty at first, whose clock only a decision sets.
pub struct Simulator {
    clock: Arc<VirtualClock>,
    memory: Arc<Memory>,
    limiter: Limiter,
}

/// A clock that stands still until it is set.
#[derive(Default)]
struct VirtualClock(AtomicU64);

impl Simulator {
    /// Creates a simulator that decides by `rules`.
    pub fn new(rules: &Arc<LiveRules>) -> Self {
        let clock = Arc::new(VirtualClock::default());
        let shared = Arc::clone(&clock) as Arc<dyn Clock>;
        let memory = Arc::new(Memory::new(Arc::clone(&shared), MOST_COUNTERS));
        let (store, one) = (Arc::clone(&memory) as Arc<dyn Store>, Arc::new(Replicas::set(NonZeroU32::MIN)));
        let guard = Guard::new(store, Deadline::AtOnce, Arc::clone(&memory), one, shared);
        Self { clock, memory, limiter: Limiter::new(Arc::clone(rules), Arc::new(guard)) }
    }

    /// Returns the rules.
    pub fn rules(&self) -> Snapshot {
        self.limiter.rules()
    }

    /// Decides `request` by `rules` at the time `now`.
    pub async fn decide<'a>(&self, rules: &'a RuleSet, request: &Request, now: Micros) -> Decision<'a> {
        self.clock.0.store(now.get(), Ordering::Relaxed);
        self.limiter.decide(rules, request, None).await
    }

    /// Charges the counter of `charge` at the time `now` until at most `remaining` hits remain.
    fn leave_at_most(&self, charge: &Charge, remaining: u32, now: Micros) {
        self.clock.0.store(now.get(), Ordering::Relaxed);
        self.memory.leave_at_most(charge, remaining);
    }

    /// Returns the number of counters that were dropped because there were more than [`MOST_COUNTERS`].
    pub fn dropped_counters(&self) -> u64 {
        self.memory.evicted()
    }
}

impl std::fmt::Debug for Simulator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Simulator").field("now", &self.clock.now()).finish_non_exhaustive()
    }
}

impl Clock for VirtualClock {
    fn now(&self) -> Micros {
        Micros::new(self.0.load(Ordering::Relaxed))
    }
}
