//! A store behind a network, both in this process and on a virtual clock: calls take time, links are cut, the store executes one command
//! after the other, and what it charges is recorded. The limit of calls in flight and the circuit breaker are the product's.

use std::collections::HashMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tidegate::algorithm::Charge;
use tidegate::model::{Charging, Clock, Hits, Micros, Outcome, Verdict};
use tidegate::store::memory::Memory;
use tidegate::store::redis::breaker::Breaker;
use tidegate::store::redis::concurrency::{CallPriority, Concurrency, Measured};
use tidegate::store::{ChargeResults, Charged, Granted, Store, StoreError};
use tokio::time::{Instant, sleep, sleep_until, timeout_at};

use crate::histories;
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
    /// The time that a command takes.
    command: Duration,
    /// The time until which it has commands to execute.
    busy_until: Mutex<Instant>,
}

impl Shared {
    pub fn new(clock: Arc<Virtual>, command: Duration) -> Arc<Self> {
        let memory = Memory::new(Arc::clone(&clock) as Arc<dyn Clock>, 1_000_000);
        let (charged, commands, busy_until) = (Mutex::default(), Mutex::default(), Mutex::new(Instant::now()));
        Arc::new(Self { clock, memory, charged, commands, command, busy_until })
    }

    /// Waits until the commands that came before are executed. Returns how long that took.
    async fn turn(&self) -> Duration {
        let arrived = Instant::now();
        let begins = arrived.max(*self.busy_until.lock());
        *self.busy_until.lock() = begins + self.command;
        sleep_until(begins).await;
        begins - arrived
    }

    fn record(&self, charge: &Charge, hits: i64) {
        if hits != 0 {
            self.charged.lock().entry(charge.key.to_string()).or_default().push((self.clock.now(), hits));
        }
    }

    fn charge(&self, charges: &[Charge]) -> Charged {
        *self.commands.lock() += 1;
        let mut charged = Charged::answered(ChargeResults::new());
        for (index, (charge, mut verdict)) in charges.iter().zip(self.memory.charge_now(charges)).enumerate() {
            let is_admitted = verdict.outcome == Outcome::Admitted;
            if is_admitted {
                self.record(charge, charge.hits.taken().cast_signed());
            }
            if charge.ask > 0 {
                let most = if is_admitted { histories::granted(&charge.limit, verdict.remaining) } else { 0 };
                let hits = most.min(charge.ask.into());
                let Verdict { remaining, reset, .. } = self.one(charge, hits);
                self.record(charge, hits.cast_signed());
                (verdict.remaining, verdict.reset) = (remaining, reset);
                let granted = Granted { at: self.clock.now(), hits, remaining, reset, retry: verdict.retry };
                charged.granted.push((index, granted));
            }
            charged.answers.push(Ok(verdict));
        }
        charged
    }

    fn one(&self, charge: &Charge, hits: u64) -> Verdict {
        let hits = if hits == 0 { Hits::LOOK } else { Hits::take(hits) };
        self.memory.charge_now(&[Charge { hits, ..charge.clone() }])[0]
    }

    /// Charges hits that were decided elsewhere. They pay for nothing here, so they are not recorded.
    fn settle(&self, charges: &[Charge]) {
        *self.commands.lock() += 1;
        for charge in charges {
            let left = self.one(charge, 0).remaining;
            let hits = match charge.charging {
                Charging::AllOrNothing | Charging::Group(_) => charge.hits.taken().min(left.into()),
                Charging::Each if left == 0 => charge.hits.taken(),
                Charging::Each => 0,
            };
            self.one(charge, hits);
        }
    }

    fn give_back(&self, charges: &[Charge], taken: &[Option<Micros>]) {
        *self.commands.lock() += 1;
        self.memory.give_back_now(charges, taken);
        for charge in charges {
            self.record(charge, -charge.hits.taken().cast_signed());
        }
    }

    fn lease(&self, charges: &[Charge]) -> Vec<Option<Granted>> {
        *self.commands.lock() += 1;
        let grant = |charge: &Charge| {
            let left = self.one(charge, 0).remaining;
            let hits = charge.hits.taken().min(histories::granted(&charge.limit, left));
            let Verdict { remaining, reset, .. } = self.one(charge, hits);
            self.record(charge, hits.cast_signed());
            let retry = if hits == 0 && remaining == 0 { self.one(charge, 1).retry } else { None };
            Some(Granted { at: self.clock.now(), hits, remaining, reset, retry })
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
    calls: Arc<Concurrency>,
    breaker: Breaker,
}

impl Link {
    pub fn new(shared: &Arc<Shared>, delay: Duration) -> Arc<Self> {
        let link = Arc::new(Self {
            shared: Arc::clone(shared),
            delay,
            is_cut: AtomicBool::new(false),
            calls: Arc::new(Concurrency::new(Instant::now())),
            breaker: Breaker::default(),
        });
        tokio::spawn(Arc::clone(&link).probe());
        link
    }

    /// Probes the store while the breaker asks for that.
    async fn probe(self: Arc<Self>) {
        loop {
            sleep(Duration::from_millis(20)).await;
            if self.breaker.is_probe_due(Instant::now()) {
                sleep(self.delay * 2).await;
                match self.is_cut.load(Ordering::Relaxed) {
                    true => _ = self.breaker.missed(Instant::now(), Instant::now() + Duration::from_millis(200)),
                    false => _ = self.breaker.passed(),
                }
            }
        }
    }

    /// Calls the store. A call whose caller no longer waits goes on, and holds its permit until the reply comes.
    async fn call<T: Send + 'static>(
        self: &Arc<Self>,
        turn: CallPriority,
        budget: Duration,
        on: impl FnOnce(&Shared) -> T + Send + 'static,
    ) -> Result<T, StoreError> {
        let (began, until) = (Instant::now(), Instant::now() + budget);
        if let Some(next_probe) = self.breaker.next_probe(budget) {
            return Err(StoreError::Down { retry: next_probe.saturating_duration_since(began).into() });
        }
        let permit = self.calls.permit(began, 1, until, turn).await.ok_or(StoreError::Overloaded)?.used();
        let link = Arc::clone(self);
        let call = tokio::spawn(async move {
            let sent = Instant::now();
            let (reply, delay) = link.carry(until, on).await;
            let now = Instant::now();
            link.breaker.answered(now - sent);
            permit.answered(Measured { now, delay, budget, is_late: reply.is_none() });
            reply
        });
        match timeout_at(until, call).await {
            Ok(reply) => reply.expect("a call does not fail").ok_or(StoreError::Late),
            Err(_) => {
                self.breaker.failed(Instant::now(), budget);
                Err(StoreError::TimedOut)
            }
        }
    }

    /// Carries a call to the store and its reply back, unless the link is cut. Returns the reply, none if the call came too late, and the time
    /// for which it waited at the store.
    async fn carry<T>(&self, until: Instant, on: impl FnOnce(&Shared) -> T) -> (Option<T>, Duration) {
        self.pass().await;
        let delay = self.shared.turn().await;
        let reply = (Instant::now() < until).then(|| on(&self.shared));
        self.pass().await;
        (reply, delay)
    }

    async fn pass(&self) {
        sleep(self.delay).await;
        while self.is_cut.load(Ordering::Relaxed) {
            // It is sent again when the link is whole.
            sleep(Duration::from_millis(50)).await;
        }
    }
}

type Answer<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// The way to the store, as a store.
pub struct Far(pub Arc<Link>);

impl Store for Far {
    fn charge<'a>(&'a self, charges: &'a [Charge], budget: Duration) -> Answer<'a, Charged> {
        let request = charges.to_vec();
        Box::pin(async move {
            let answered = self.0.call(CallPriority::InOrder, budget, move |shared| shared.charge(&request)).await;
            answered.unwrap_or_else(|error| Charged::failed(charges, error))
        })
    }

    fn give_back<'a>(&'a self, charges: &'a [Charge], taken: &'a [Option<Micros>]) -> Answer<'a, ()> {
        let (charges, taken) = (charges.to_vec(), taken.to_vec());
        Box::pin(async move {
            let undo = move |shared: &Shared| shared.give_back(&charges, &taken);
            let _ = self.0.call(CallPriority::First, Duration::from_secs(1), undo).await;
        })
    }

    fn settle<'a>(&'a self, charges: &'a [Charge], budget: Duration) -> Answer<'a, Vec<bool>> {
        let request = charges.to_vec();
        Box::pin(async move {
            let settled = self.0.call(CallPriority::Spare, budget, move |shared| shared.settle(&request)).await;
            // A call that was sent may have been executed.
            let is_settled = !matches!(settled, Err(StoreError::Overloaded | StoreError::Down { .. }));
            vec![is_settled; charges.len()]
        })
    }

    fn lease<'a>(&'a self, charges: &'a [Charge], budget: Duration) -> Answer<'a, Vec<Option<Granted>>> {
        let request = charges.to_vec();
        Box::pin(async move {
            let granted = self.0.call(CallPriority::InOrder, budget, move |shared| shared.lease(&request)).await;
            granted.unwrap_or_else(|_| vec![None; charges.len()])
        })
    }

    fn round_trip(&self) -> Option<Duration> {
        Some(self.0.delay * 2)
    }
}
