//! How long a request of many charges holds the locks of the embedded store: figures for people, not bars for CI.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tidegate::algorithm::{Algorithm, Charge};
use tidegate::model::{Charging, Clock, Hits, Micros};
use tidegate::store::memory::Memory;
use tokio::time::Instant;

use super::{charge, limit};
use crate::world::NOON;

/// Requests of each kind that are measured.
const REQUESTS: usize = 200;
/// Charges that are made of each request: the bars are for 64 and for 1,000.
const CHARGES: [usize; 3] = [64, 1_000, 10_000];

/// A clock that notes when it is read. The store reads it once behind its locks, and then again behind the next.
struct Noting {
    now: Mutex<Micros>,
    read: Mutex<Vec<Instant>>,
}

impl Clock for Noting {
    fn now(&self) -> Micros {
        self.read.lock().expect("nobody panics").push(Instant::now());
        *self.now.lock().expect("nobody panics")
    }
}

/// A store under measurement.
struct Watched {
    clock: Arc<Noting>,
    store: Memory,
}

impl Watched {
    fn new(most_counters: usize) -> Self {
        let clock = Arc::new(Noting { now: Mutex::new(NOON), read: Mutex::default() });
        Self { store: Memory::new(Arc::clone(&clock) as Arc<dyn Clock>, most_counters), clock }
    }

    /// Charges a request, and says for how long it held its locks at most. That counts what it does after it has released the
    /// last ones: in a full store, nearly half of the time goes to dropping the counters that made room.
    fn charge(&self, charges: &[Charge]) -> Duration {
        self.clock.read.lock().expect("nobody panics").clear();
        let verdicts = self.store.charge_now(charges);
        let end = Instant::now();
        assert_eq!(verdicts.len(), charges.len());
        let mut read = self.clock.read.lock().expect("nobody panics").clone();
        read.push(end);
        read.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or_default()
    }

    fn pass(&self, micros: u64) {
        let mut now = self.clock.now.lock().expect("nobody panics");
        *now = now.saturating_add(Micros::new(micros));
    }
}

/// A kind of request, by the number of the request and of the charge.
type Kind = (&'static str, usize, fn(usize, usize) -> Charge);

fn window(name: &str) -> Charge {
    charge(name, limit(Algorithm::FixedWindow, 1_000_000), Charging::AllOrNothing, 1)
}

fn used_up(name: &str) -> Charge {
    charge(name, limit(Algorithm::FixedWindow, 1), Charging::AllOrNothing, 1)
}

fn log(name: &str) -> Charge {
    charge(name, limit(Algorithm::SlidingLog, 10_000), Charging::AllOrNothing, 1)
}

const KINDS: [Kind; 7] = [
    ("known counters", 10_000_000, |_, charge| window(&format!("{charge}"))),
    ("new counters", 10_000_000, |request, charge| window(&format!("{request}.{charge}"))),
    ("new counters in a full store", 100_000, |request, charge| window(&format!("{request}.{charge}"))),
    ("new counters in a full store, all used up", 100_000, |request, charge| used_up(&format!("{request}.{charge}"))),
    ("half of them twice", 10_000_000, |_, charge| window(&format!("{}", charge / 2))),
    ("refused by the last", 10_000_000, |request, charge| {
        let hits = if (charge + 1) % CHARGES[0] == 0 { Hits::take(2_000_000) } else { Hits::take(1) };
        Charge { hits, ..window(&format!("{request}.{charge}")) }
    }),
    ("two charges of a full log, and others", 10_000_000, |_, charge| {
        if charge < 2 { log("full") } else { window(&format!("{charge}")) }
    }),
];

#[test]
#[ignore = "prints how long locks are held; run it by its name with --nocapture"]
fn how_long_a_request_holds_the_locks_of_the_embedded_store() {
    println!("{:>8} {:<40} {:>10} {:>10} {:>10}", "charges", "kind", "median us", "p99 us", "most us");
    for number in CHARGES {
        for (kind, most_counters, make) in KINDS {
            let watched = Watched::new(most_counters);
            for _ in 0..10_000 {
                if kind.contains("log") {
                    watched.pass(1);
                    watched.charge(&[Charge { charging: Charging::Each, ..log("full") }]);
                }
            }
            if kind.contains("full store") {
                let old = if kind.contains("used up") { used_up } else { window };
                let full: Vec<_> = (0..200_000).map(|index| old(&format!("old {index}"))).collect();
                for part in full.chunks(100) {
                    watched.charge(part);
                }
            }
            let rounds = REQUESTS * CHARGES[0] / number.min(CHARGES[0] * 8);
            let mut held: Vec<_> = (0..rounds)
                .map(|request| {
                    let charges: Vec<_> = (0..number).map(|index| make(request, index)).collect();
                    watched.charge(&charges)
                })
                .collect();
            held.sort_unstable();
            let micros = |share: usize| held[(held.len() - 1) * share / 100].as_micros();
            println!("{number:>8} {kind:<40} {:>10} {:>10} {:>10}", micros(50), micros(99), micros(100));
        }
    }
}
