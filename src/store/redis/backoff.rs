//! Backoff with jitter for failed attempts, and rate limits for log lines.

use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;

/// Backoff between failed attempts: 400 to 600 ms with jitter, so that many instances do not retry at once, and each retries
/// about twice a second.
#[derive(Debug, Default)]
pub struct Backoff {
    until: Mutex<Option<Instant>>,
    failures: Notify,
    /// Rate limit of log lines about failures.
    pub quiet: Quiet,
    /// Rate limit of log lines about refused replies.
    pub refused: Quiet,
}

impl Backoff {
    /// Minimum backoff: 400 ms.
    pub const LEAST: Duration = Duration::from_millis(400);
    const SPREAD_MS: u64 = 200;

    /// Returns the time of the next attempt; `None` if it may be made now.
    pub fn until(&self) -> Option<Instant> {
        (*self.until.lock()).filter(|until| *until > Instant::now())
    }

    /// Notes that an attempt failed.
    pub fn failed(&self) {
        *self.until.lock() = Some(Instant::now() + Self::LEAST + Duration::from_millis(chance(Self::SPREAD_MS)));
        self.failures.notify_waiters();
    }

    /// Waits for the next failed attempt.
    pub async fn failure(&self) {
        self.failures.notified().await;
    }

    /// Notes that an attempt succeeded.
    pub fn clear(&self) {
        *self.until.lock() = None;
    }
}

/// Allows an event at most once per interval, ten seconds for log lines.
#[derive(Debug)]
pub struct Quiet {
    length: Duration,
    until: Mutex<Option<Instant>>,
}

impl Default for Quiet {
    fn default() -> Self {
        Self::new()
    }
}

impl Quiet {
    /// Creates a rate limit for log lines. The first is allowed.
    pub const fn new() -> Self {
        Self::every(Duration::from_secs(10))
    }

    /// Creates a rate limit of one event per `length`. The first is allowed.
    pub const fn every(length: Duration) -> Self {
        Self { length, until: Mutex::new(None) }
    }

    /// Returns true if the event is allowed now. Then a new interval begins.
    pub fn is_over(&self) -> bool {
        let (now, mut until) = (Instant::now(), self.until.lock());
        let is_over = until.is_none_or(|until| until <= now);
        if is_over {
            *until = Some(now + self.length);
        }
        is_over
    }
}

/// Returns a random number below `bound`, or 0 if `bound` is 0.
pub fn chance(bound: u64) -> u64 {
    RandomState::new().hash_one(0) % bound.max(1)
}
