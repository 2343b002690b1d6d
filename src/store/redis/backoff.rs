//! Not too often: attempts that fail, and complaints about them.

use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;

/// How long to wait between attempts that fail: about half a second, by chance, so that many instances do not come at once,
/// and each comes twice a second.
#[derive(Debug, Default)]
pub struct Backoff {
    until: Mutex<Option<Instant>>,
    failures: Notify,
    /// Whether a failure may be complained about.
    pub quiet: Quiet,
    /// Whether a reply that is refused may be complained about.
    pub refused: Quiet,
}

impl Backoff {
    /// The shortest: 400 ms.
    pub const LEAST: Duration = Duration::from_millis(400);
    const SPREAD_MS: u64 = 200;

    /// When the next attempt may be made, if not now.
    pub fn until(&self) -> Option<Instant> {
        (*self.until.lock()).filter(|until| *until > Instant::now())
    }

    /// An attempt failed.
    pub fn failed(&self) {
        *self.until.lock() = Some(Instant::now() + Self::LEAST + Duration::from_millis(chance(Self::SPREAD_MS)));
        self.failures.notify_waiters();
    }

    /// Waits for the next attempt that fails.
    pub async fn failure(&self) {
        self.failures.notified().await;
    }

    /// An attempt succeeded.
    pub fn clear(&self) {
        *self.until.lock() = None;
    }
}

/// Says or does the same thing at most once in a length of time, ten seconds for log lines.
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
    /// One for log lines that has said nothing.
    pub const fn new() -> Self {
        Self::every(Duration::from_secs(10))
    }

    /// One that has said nothing and is quiet for `length` after each time.
    pub const fn every(length: Duration) -> Self {
        Self { length, until: Mutex::new(None) }
    }

    /// Whether it may be said again; then it is quiet for its length.
    pub fn is_over(&self) -> bool {
        let (now, mut until) = (Instant::now(), self.until.lock());
        let is_over = until.is_none_or(|until| until <= now);
        if is_over {
            *until = Some(now + self.length);
        }
        is_over
    }
}

/// A number below `bound`, by chance.
pub fn chance(bound: u64) -> u64 {
    RandomState::new().hash_one(0) % bound.max(1)
}
