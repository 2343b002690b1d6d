//! How long things took, counted by bounds.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The bounds, in microseconds: those of Prometheus' own libraries from 5 ms to 10 s, which the reference's pages have, and
/// finer ones below, where the answers of this service are.
const BOUNDS_US: [u64; 16] = [
    100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000, 1_000_000, 2_500_000,
    5_000_000, 10_000_000,
];

/// How many times were up to each bound, and their sum.
#[derive(Debug, Default)]
pub struct Histogram {
    /// The last is beyond all bounds.
    counts: [AtomicU64; BOUNDS_US.len() + 1],
    sum_us: AtomicU64,
}

impl Histogram {
    /// Counts one time.
    pub fn record(&self, took: Duration) {
        let us = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        self.counts[BOUNDS_US.partition_point(|bound| *bound < us)].fetch_add(1, Ordering::Relaxed);
        self.sum_us.fetch_add(us, Ordering::Relaxed);
    }

    /// How many there were between each bound and the one before it; the last has none.
    pub fn buckets(&self) -> impl Iterator<Item = (Option<u64>, u64)> {
        let bounds = BOUNDS_US.into_iter().map(Some).chain([None]);
        bounds.zip(self.counts.iter().map(|count| count.load(Ordering::Relaxed)))
    }

    /// The sum of all, in microseconds.
    pub fn sum_us(&self) -> u64 {
        self.sum_us.load(Ordering::Relaxed)
    }
}
