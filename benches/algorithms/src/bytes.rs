//! What a counter takes.

use std::iter::repeat_n;
use std::slice::from_ref;

use tidegate::algorithm::Algorithm;
use tidegate::model::{Unit, Window};

use crate::charges::{charge, charges, limit};
use crate::embedded::{Embedded, allocated};
use crate::redis::{MANY, Redis};
use crate::{Effort, Outcome, thousands};

const MOST: u32 = 10_000;
const FILLED: [usize; 4] = [10, 100, 1_000, 10_000];

pub fn print(effort: Effort) -> Outcome {
    let mut redis = Redis::start()?;
    // A year: none of them becomes idle while it is measured.
    let window = Window::of_unit(Unit::Year);
    println!("## Bytes per counter\n");
    let (shortest, longest) = (Algorithm::Gcra, Algorithm::SlidingWindow);
    let key_bytes = |algorithm| charge(limit(algorithm, MOST, window), 0).key.as_bytes().len();
    println!(
        "{} counters with keys of {} to {} bytes, and 9 more for the prefix in Redis {}.\n",
        thousands(effort.counters as u64),
        key_bytes(shortest),
        key_bytes(longest),
        redis.version()?
    );
    println!("| counter | embedded | Redis: `MEMORY USAGE` | Redis: growth of `used_memory` |");
    println!("|---|---|---|---|");
    for (name, algorithm) in Algorithm::ALL {
        let charges = charges(limit(algorithm, MOST, window), effort.counters);
        let store = Embedded::new();
        let before = allocated();
        store.send(charges.iter().map(from_ref), true);
        let embedded = (allocated() - before) / charges.len();
        redis.empty()?;
        let before = redis.used_memory()?;
        redis.send(charges.iter().map(from_ref), MANY, true)?;
        let grown = (redis.used_memory()? - before) / charges.len() as u64;
        println!("| `{name}`, one hit | {embedded} | {} | {grown} |", redis.bytes(&charges[0])?);
    }
    for moments in FILLED {
        let logs = charges(limit(Algorithm::SlidingLog, MOST, window), (200_000 / moments).clamp(10, effort.counters));
        let store = Embedded::new();
        let before = allocated();
        store.fill(&logs, moments);
        let embedded = (allocated() - before) / logs.len();
        redis.empty()?;
        let before = redis.used_memory()?;
        for log in &logs {
            redis.send(repeat_n(from_ref(log), moments), MANY, true)?;
        }
        let grown = (redis.used_memory()? - before) / logs.len() as u64;
        println!(
            "| `sliding_log`, {} moments | {} | {} | {} |",
            thousands(moments as u64),
            thousands(embedded as u64),
            thousands(redis.bytes(&logs[0])?),
            thousands(grown)
        );
    }
    println!();
    Ok(())
}
