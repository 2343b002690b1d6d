//! A store behind a network, both in this process and on a virtual clock: calls take time, links are cut, and what the store
//! charges is recorded.

use std::collections::HashMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tidegate::algorithm::Charge;
use tidegate::model::{Clock, Hits, Micros, Outcome, Verdict};
use tidegate::store::memory::Memory;
use tidegate::store::{ChargeResults, Charged, Granted, Store, StoreError, Taken};
use tokio::time::{Instant, sleep, timeout};

use crate::world::NOON;

/// Virtual time: that of a paused runtime, from [`NOON`] on, as a clock that is wrong by `skew` tells it.
pub struct Virtual {
    began: Instant,
    skew: AtomicI64,
}

impl Virtual {
    pub fn new(began: Instant, skew: i64) -> Arc<Self> {
        Arc::new(Self { began, skew: AtomicI64::new(skew) })
    }

    /// Sets it by so much.
    pub fn step(&self, by: i64) {
        self.skew.fetch_add(by, Ordering::Relaxed);
    }
}

impl Clock for Virtual {
    fn now(&self) -> Micros {
        let passed = u64::try_from(self.began.elapsed().as_micros()).expect("it runs for minutes");
        Micros::new((NOON.get() + passed).saturating_add_signed(self.skew.load(Ordering::Relaxed)))
    }
}

/// The counters that all instances share, and the hits that were charged on each.
pub struct Shared {
    pub clock: Arc<Virtual>,
    pub memory: Memory,
    /// For each counter: time and hits of each charge, and of each undo as a negative number.
    pub charged: Mutex<HashMap<String, Vec<(Micros, i64)>>>,
    /// Number of commands.
    pub commands: Mutex<usize>,
}

impl Shared {
    pub fn new(clock: Arc<Virtual>) -> Arc<Self> {
        let memory = Memory::new(Arc::clone(&clock) as Arc<dyn Clock>, 1_000_000);
        Arc::new(Self { clock, memory, charged: Mutex::default(), commands: Mutex::default() })
    }

    fn record(&self, charge: &Charge, hits: i64) {
        if hits != 0 {
            self.charged.lock().entry(charge.key.to_string()).or_default().push((self.clock.now(), hits));
        }
    }

    fn charge(&self, charges: &[Charge]) -> Vec<Verdict> {
        *self.commands.lock() += 1;
        let verdicts = self.memory.charge_now(charges).into_vec();
        for (charge, verdict) in charges.iter().zip(&verdicts) {
            if verdict.outcome == Outcome::Admitted {
                self.record(charge, charge.hits.taken().cast_signed());
            }
        }
        verdicts
    }

    fn lease(&self, charges: &[Charge]) -> Vec<Option<Granted>> {
        *self.commands.lock() += 1;
        let one = |charge: &Charge| self.memory.charge_now(std::slice::from_ref(charge))[0];
        let grant = |charge: &Charge| {
            let left = one(&Charge { hits: Hits::LOOK, ..charge.clone() }).remaining;
            let hits = charge.hits.taken().min(u64::from(left / 4));
            let Verdict { remaining, reset, .. } = one(&Charge { hits: Hits::take(hits), ..charge.clone() });
            self.record(charge, hits.cast_signed());
            Some(Granted { at: self.clock.now(), hits, remaining, reset })
        };
        charges.iter().map(grant).collect()
    }
}

/// The way of one instance to the store.
pub struct Link {
    pub shared: Arc<Shared>,
    /// The time of each way.
    pub delay: Duration,
    pub is_cut: AtomicBool,
}

impl Link {
    /// Calls the store: the request and the reply are on their way for a while, and nothing arrives while the link is cut.
    async fn call<T>(&self, budget: Duration, on: impl FnOnce(&Shared) -> T) -> Result<T, StoreError> {
        let deadline = Instant::now() + budget;
        let call = async {
            sleep(self.delay).await;
            if self.is_cut.load(Ordering::Relaxed) || Instant::now() >= deadline {
                return std::future::pending().await;
            }
            let reply = on(&self.shared);
            sleep(self.delay).await;
            if self.is_cut.load(Ordering::Relaxed) {
                return std::future::pending().await;
            }
            reply
        };
        timeout(budget, call).await.map_err(|_| StoreError::TimedOut)
    }
}

type Answer<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

impl Store for Link {
    fn charge<'a>(&'a self, charges: &'a [Charge], budget: Duration) -> Answer<'a, Charged> {
        Box::pin(async move {
            let answers: ChargeResults = match self.call(budget, |shared| shared.charge(charges)).await {
                Ok(verdicts) => verdicts.into_iter().map(Ok).collect(),
                Err(error) => charges.iter().map(|_| Err(error)).collect(),
            };
            Charged { answers, undo: None }
        })
    }

    fn take<'a>(&'a self, charges: &'a [Charge], budget: Duration) -> Answer<'a, Taken> {
        Box::pin(async move {
            let Charged { answers, .. } = self.charge(charges, budget).await;
            Taken { answers, taken: vec![None; charges.len()] }
        })
    }

    fn give_back<'a>(&'a self, charges: &'a [Charge], taken: &'a [Option<Micros>]) -> Answer<'a, ()> {
        Box::pin(async move {
            let _ = self
                .call(Duration::from_secs(1), |shared| {
                    *shared.commands.lock() += 1;
                    shared.memory.give_back_now(charges, taken);
                    for charge in charges {
                        shared.record(charge, -charge.hits.taken().cast_signed());
                    }
                })
                .await;
        })
    }

    fn lease<'a>(&'a self, charges: &'a [Charge], budget: Duration) -> Answer<'a, Vec<Option<Granted>>> {
        Box::pin(async move {
            let granted = self.call(budget, |shared| shared.lease(charges)).await;
            granted.unwrap_or_else(|_| vec![None; charges.len()])
        })
    }

    fn round_trip(&self) -> Option<Duration> {
        Some(self.delay * 2)
    }
}
