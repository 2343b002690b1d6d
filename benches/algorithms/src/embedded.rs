//! The embedded store with a clock that moves by hand, and an allocator that counts.

use std::alloc::{GlobalAlloc, Layout, System};
use std::slice::from_ref;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::Instant;

use tidegate::algorithm::Charge;
use tidegate::model::{Clock, Micros};
use tidegate::store::memory::Memory;

use crate::replay::START;

/// Requests that are timed together: many against the cost of reading the clock, few against what else the machine does.
const AT_ONCE: usize = 100;

/// The system's allocator, and how many bytes are asked of it and not given back.
struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;
static ALLOCATED: AtomicUsize = AtomicUsize::new(0);

/// The bytes that are allocated now.
pub fn allocated() -> usize {
    ALLOCATED.load(Relaxed)
}

// SAFETY: every call goes to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATED.fetch_add(layout.size(), Relaxed);
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        ALLOCATED.fetch_sub(layout.size(), Relaxed);
        unsafe { System.dealloc(pointer, layout) }
    }
}

struct Hand(AtomicU64);

impl Clock for Hand {
    fn now(&self) -> Micros {
        Micros::new(self.0.load(Relaxed))
    }
}

/// An embedded store.
pub struct Embedded {
    memory: Memory,
    hand: Arc<Hand>,
}

impl Embedded {
    pub fn new() -> Self {
        let hand = Arc::new(Hand(AtomicU64::new(START.get())));
        // More than is ever used: nothing is evicted.
        Self { memory: Memory::new(hand.clone(), 10_000_000), hand }
    }

    pub fn pass(&self, length: Micros) {
        self.hand.0.fetch_add(length.get(), Relaxed);
    }

    /// Sends requests one after the other, all of them to be admitted or all to be refused: the nanoseconds of one, for each
    /// group of them.
    pub fn send<'a>(&self, requests: impl Iterator<Item = &'a [Charge]>, are_admitted: bool) -> Vec<f64> {
        let requests: Vec<_> = requests.collect();
        let groups = requests.chunks(AT_ONCE).map(|group| {
            let begin = Instant::now();
            let admitted = group.iter().filter(|charges| self.is_admitted(charges)).count();
            let took = begin.elapsed();
            assert_eq!(admitted, if are_admitted { group.len() } else { 0 }, "of {}", group.len());
            took.as_nanos() as f64 / group.len() as f64
        });
        groups.collect()
    }

    /// Fills logs: one hit for each of so many moments.
    pub fn fill(&self, logs: &[Charge], moments: usize) {
        for _ in 0..moments {
            self.pass(Micros::new(1));
            self.send(logs.iter().map(from_ref), true);
        }
    }

    fn is_admitted(&self, charges: &[Charge]) -> bool {
        self.memory.charge_now(charges).iter().all(|verdict| !verdict.outcome.is_refused())
    }
}
