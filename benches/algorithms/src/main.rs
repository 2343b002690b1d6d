//! What docs/algorithms.md says in numbers and pictures, from the code that the service runs. `../../accuracy` calls it:
//!
//!     algorithms PICTURES [--quick]
//!
//! writes the pictures into the directory PICTURES and prints the tables. Needs redis-server.
#![expect(clippy::disallowed_methods, reason = "a benchmark reads the clock and waits")]

use std::error::Error;
use std::path::PathBuf;

use tidegate::algorithm::Algorithm;

mod accuracy;
mod bytes;
mod charges;
mod cost;
mod embedded;
mod logs;
mod picture;
mod redis;
mod replay;
mod traffic;

type Outcome<T = ()> = Result<T, Box<dyn Error>>;

/// How much is measured.
#[derive(Clone, Copy)]
struct Effort {
    /// Windows of traffic that are replayed.
    windows: u64,
    /// Counters that are filled to see what one takes.
    counters: usize,
    /// Counters that are charged to see how long one takes.
    charged: usize,
    /// How often a time is measured; the median is told.
    rounds: usize,
    /// Full logs of which each is charged once.
    logs: usize,
}

const FULL: Effort = Effort { windows: 3_000, counters: 100_000, charged: 2_000, rounds: 5, logs: 60 };
const QUICK: Effort = Effort { windows: 300, counters: 10_000, charged: 200, rounds: 1, logs: 5 };

fn main() -> Outcome {
    let mut arguments = std::env::args_os().skip(1);
    let pictures = PathBuf::from(arguments.next().ok_or("algorithms PICTURES [--quick]")?);
    let effort = match arguments.next() {
        None => FULL,
        Some(word) if word == "--quick" => QUICK,
        Some(_) => return Err("algorithms PICTURES [--quick]".into()),
    };

    for (name, algorithm) in Algorithm::ALL {
        picture::draw(&pictures.join(name).with_extension("svg"), algorithm)?;
    }
    accuracy::print(effort);
    bytes::print(effort)?;
    cost::print(effort)?;
    logs::print(effort)
}

/// With a comma between thousands.
fn thousands(number: u64) -> String {
    let digits = number.to_string();
    let groups: Vec<_> = digits.as_bytes().rchunks(3).rev().map(String::from_utf8_lossy).collect();
    groups.join(",")
}

/// The median of what so many rounds say.
fn median(mut rounds: Vec<f64>) -> f64 {
    rounds.sort_by(f64::total_cmp);
    rounds[rounds.len() / 2]
}
