//! The service on virtual time: real limiters, guards and stores of several instances, the real script in a real interpreter, and a
//! simulated network and Redis that fail as a seed says. A run is one number, and the same number is the same run.
//!
//! `TIDEGATE_SEED=17 tests/run --test it simulation::one -- --ignored --nocapture` replays a run and prints what happened.

use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::redis::preloaded::preloaded;

mod calls;
mod clock;
mod cluster;
mod deployment;
mod faults;
mod judge;
mod keys;
mod lua;
mod network;
mod rules;
mod scenes;
mod server;
mod world;

use world::Run;

/// Runs of a change, and the time in which there may be more of them.
const LEAST: u64 = 500;
const TIME: Duration = Duration::from_secs(60);
/// Variables with the number of seeds to run in place of that, and the first of them.
const SEEDS: &str = "SIMULATION_SEEDS";
const FIRST: &str = "SIMULATION_FIRST";
/// The seed of a child process.
const SEED: &str = "TIDEGATE_SEED";

/// Runs a seed in a process of its own, in which whatever is random comes out the same each time.
fn child(seed: u64, is_shown: bool) -> Output {
    static RANDOM: LazyLock<PathBuf> = LazyLock::new(|| preloaded("random"));
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.args(["simulation::one", "--exact", "--ignored", "--nocapture"]);
    command.env(SEED, seed.to_string()).env("LD_PRELOAD", &*RANDOM);
    command.env("RUST_BACKTRACE", "0").env("SIMULATION_SHOWS", if is_shown { "1" } else { "" });
    command.output().expect("it runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn no_seed_breaks_a_promise() {
    let number = |variable: &str| std::env::var(variable).ok().and_then(|number| number.parse::<u64>().ok());
    let first = number(FIRST).unwrap_or(0);
    let last = first + number(SEEDS).unwrap_or(LEAST);
    let (began, next, done, calls) = (Instant::now(), AtomicU64::new(first), AtomicU64::new(0), AtomicU64::new(0));
    let broken: Mutex<Option<String>> = Mutex::default();
    let run_some = || {
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            let is_enough = seed >= last && (number(SEEDS).is_some() || began.elapsed() > TIME);
            if is_enough || broken.lock().is_some() {
                return;
            }
            let output = child(seed, false);
            let said = text(&output.stdout);
            let made = said.lines().find_map(|line| line.strip_prefix("calls: ")?.parse::<u64>().ok());
            match made.filter(|_| output.status.success()) {
                Some(made) => calls.fetch_add(made, Ordering::Relaxed),
                None => return *broken.lock() = Some(format!("seed {seed}\n{}{said}", text(&output.stderr))),
            };
            done.fetch_add(1, Ordering::Relaxed);
        }
    };
    std::thread::scope(|scope| (0..2).for_each(|_| drop(scope.spawn(run_some))));
    let seconds = began.elapsed().as_secs_f64();
    println!("{done:?} seeds from {first} on, {calls:?} calls, {seconds:.1} s");
    assert!(broken.lock().is_none(), "{}", broken.lock().take().unwrap_or_default());
}

#[test]
fn a_seed_is_one_run() {
    for seed in 0..5 {
        let [first, second] = [(); 2].map(|()| text(&child(seed, true).stdout));
        let differs = first.lines().zip(second.lines()).find(|(one, other)| one != other && !one.starts_with("test "));
        assert_eq!(differs, None, "seed {seed}");
        assert!(first.lines().count() > 100, "{first}");
    }
}

#[test]
#[ignore = "replays the run of TIDEGATE_SEED and prints its trace"]
fn one() {
    let seed = std::env::var(SEED).ok().and_then(|seed| seed.parse().ok()).unwrap_or_default();
    if std::env::var_os("LD_PRELOAD").is_none() {
        let output = child(seed, true);
        print!("{}", text(&output.stdout));
        assert!(output.status.success(), "{}", text(&output.stderr));
        return;
    }
    let run = Run::of(seed);
    println!("calls: {}", run.calls);
    if std::env::var("SIMULATION_SHOWS").is_ok_and(|shows| !shows.is_empty()) {
        run.trace.iter().for_each(|line| println!("{line}"));
    }
    run.assert_kept();
}
