//! How far each algorithm is from an exact count of the hits it has admitted.

use tidegate::algorithm::{Algorithm, Limit};
use tidegate::model::{Micros, Quota, Unit, Window};

use crate::replay::{Counter, Recent};
use crate::traffic::{self, Traffic};
use crate::{Effort, thousands};

const LIMIT: u32 = 100;
/// The burst of a meter that is to be smoother than the others.
const SMALL_BURST: u32 = 10;

/// What became of one traffic.
#[derive(Default)]
struct Tally {
    admitted: usize,
    over: Error,
    unused: Error,
}

/// Hits too many or too few, over so many observations.
#[derive(Default)]
struct Error {
    worst: usize,
    sum: usize,
    observed: usize,
}

impl Error {
    fn add(&mut self, hits: usize) {
        self.worst = self.worst.max(hits);
        self.sum += hits;
        self.observed += 1;
    }
}

pub fn print(effort: Effort) {
    println!("## Accuracy\n");
    println!(
        "A limit of {LIMIT} per minute, {} windows of each traffic, hits of 1, seed {}.\n",
        thousands(effort.windows),
        traffic::SEED
    );
    println!("| traffic | algorithm | too many: worst | mean | unused: worst | mean | admitted |");
    println!("|---|---|---|---|---|---|---|");
    for traffic in &traffic::ALL {
        let arrivals = traffic.arrivals(LIMIT, Window::of_unit(Unit::Minute).length(), effort.windows);
        table(traffic, &arrivals);
    }
    println!();
    for Traffic { name, says, .. } in &traffic::ALL {
        println!("* *{name}*: {says}.");
    }
    println!();
}

fn table(traffic: &Traffic, arrivals: &[Micros]) {
    let exact = tally(Algorithm::SlidingLog, LIMIT, arrivals).admitted;
    let mut rows: Vec<(Vec<String>, String)> = Vec::new();
    for (name, algorithm) in Algorithm::ALL {
        let found = tally(algorithm, LIMIT, arrivals).columns(exact);
        // Algorithms that do the same share a row.
        match rows.iter_mut().find(|(_, columns)| *columns == found) {
            Some((names, _)) => names.push(format!("`{name}`")),
            None => rows.push((vec![format!("`{name}`")], found)),
        }
    }
    let small = tally(Algorithm::Gcra, SMALL_BURST, arrivals).columns(exact);
    rows.push((vec![format!("`gcra`, burst {SMALL_BURST}")], small));
    for (names, columns) in rows {
        println!("| {} | {} | {columns} |", traffic.name, names.join(", "));
    }
}

fn tally(algorithm: Algorithm, burst: u32, arrivals: &[Micros]) -> Tally {
    let quota = Quota::new(LIMIT, Window::of_unit(Unit::Minute)).with_burst(burst);
    let mut counter = Counter::new(Limit::new(algorithm, quota).expect("it can be counted"));
    let mut recent = Recent::new(quota.window().length());
    let limit = LIMIT as usize;
    let mut tally = Tally::default();
    for &now in arrivals {
        let before = recent.count(now);
        if counter.admits(now) {
            recent.push(now);
            tally.admitted += 1;
        } else {
            tally.unused.add(limit.saturating_sub(before));
        }
        tally.over.add(recent.count(now).saturating_sub(limit));
    }
    tally
}

impl Tally {
    fn columns(&self, exact: usize) -> String {
        format!(
            "{} | {} | {:.1} %",
            self.over.columns(),
            self.unused.columns(),
            100.0 * self.admitted as f64 / exact as f64
        )
    }
}

impl Error {
    /// Worst and mean, in percent of the limit.
    fn columns(&self) -> String {
        let percent = |hits: f64| 100.0 * hits / f64::from(LIMIT);
        let mean = self.sum as f64 / self.observed.max(1) as f64;
        format!("{:.0} % | {:.1} %", percent(self.worst as f64), percent(mean))
    }
}
