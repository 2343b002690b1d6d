//! Clocks that go with virtual time.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use tidegate::model::{Clock, Micros};
use tokio::time::Instant;

/// The moment at which every run begins: noon of a day in 2026, in microseconds since the epoch.
const BEGIN: u64 = 1_780_000_000 * 1_000_000 / 86_400_000_000 * 86_400_000_000 + 43_200_000_000;

/// A clock that is wrong by a number of microseconds, and can be set.
#[derive(Clone)]
pub struct SimulatedClock {
    began: Instant,
    wrong_by: Arc<AtomicI64>,
}

impl SimulatedClock {
    pub fn new(began: Instant, wrong_by: i64) -> Self {
        Self { began, wrong_by: Arc::new(AtomicI64::new(wrong_by)) }
    }

    /// Sets it forward, or back.
    pub fn step(&self, by: i64) {
        self.wrong_by.fetch_add(by, Ordering::Relaxed);
    }
}

impl Clock for SimulatedClock {
    fn now(&self) -> Micros {
        let passed = u64::try_from(self.began.elapsed().as_micros()).expect("a short run");
        Micros::new((BEGIN + passed).saturating_add_signed(self.wrong_by.load(Ordering::Relaxed)))
    }
}
