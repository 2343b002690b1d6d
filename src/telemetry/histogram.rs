//! Histogram of durations or shares.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Upper bounds of the buckets, in microseconds. From 5 ms to 10 s they are those of Prometheus' own libraries, which the
/// reference uses; the finer ones below cover this service's response times.
const BOUNDS_US: [u64; 16] = [
    100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000, 1_000_000, 2_500_000,
    5_000_000, 10_000_000,
];

/// Number of durations in each bucket, and their sum; or of shares, in millionths.
#[derive(Debug)]
pub struct Histogram {
    /// Upper bounds of the buckets, in microseconds or millionths.
    bounds: &'static [u64],
    /// Values in each bucket; the last bucket has no upper bound.
    counts: Box<[AtomicU64]>,
    sum: AtomicU64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self::new(&BOUNDS_US)
    }
}

impl Histogram {
    /// Returns an empty histogram with these upper bounds, in microseconds or millionths.
    pub fn new(bounds: &'static [u64]) -> Self {
        let counts = std::iter::repeat_with(AtomicU64::default).take(bounds.len() + 1).collect();
        Self { bounds, counts, sum: AtomicU64::new(0) }
    }

    /// Adds one duration.
    pub fn record(&self, took: Duration) {
        self.record_millionths(u64::try_from(took.as_micros()).unwrap_or(u64::MAX));
    }

    /// Adds one value, in microseconds or millionths.
    pub fn record_millionths(&self, value: u64) {
        if let Some(count) = self.counts.get(self.bounds.partition_point(|bound| *bound < value)) {
            count.fetch_add(1, Ordering::Relaxed);
        }
        self.sum.fetch_add(value, Ordering::Relaxed);
    }

    /// Returns the upper bound and the count of each bucket, in order. The last bucket has no bound.
    pub fn buckets(&self) -> impl Iterator<Item = (Option<u64>, u64)> {
        let bounds = self.bounds.iter().copied().map(Some).chain([None]);
        bounds.zip(self.counts.iter().map(|count| count.load(Ordering::Relaxed)))
    }

    /// Returns the sum of all values, in microseconds or millionths.
    pub fn sum(&self) -> u64 {
        self.sum.load(Ordering::Relaxed)
    }
}
