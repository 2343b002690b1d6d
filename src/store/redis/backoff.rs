//! Backoff with jitter for failed attempts.

use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::sync::futures::Notified;
use tokio::time::Instant;

use crate::telemetry::throttle::LogThrottle;

/// Backoff between failed attempts: 400 to 600 ms with jitter, so that many instances do not retry at once, and each retries
/// about twice a second.
#[derive(Debug, Default)]
pub struct Backoff {
    until: Mutex<Option<Instant>>,
    failures: Notify,
    /// Rate limit of log lines about failures.
    pub failed: LogThrottle,
    /// Rate limit of log lines about refused replies.
    pub refused: LogThrottle,
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

    /// Waits for the next failed attempt, from the time of the call on.
    pub fn failure(&self) -> Notified<'_> {
        self.failures.notified()
    }

    /// Notes that an attempt succeeded.
    pub fn clear(&self) {
        *self.until.lock() = None;
    }
}

/// Returns a random number below `bound`, or 0 if `bound` is 0.
pub fn chance(bound: u64) -> u64 {
    RandomState::new().hash_one(0) % bound.max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn after_a_failure_the_next_attempt_waits_unless_another_one_succeeds_meanwhile() {
        let backoff = Backoff::default();
        let began = Instant::now();
        backoff.failed();
        let until = backoff.until().expect("it waits");
        assert!((Backoff::LEAST..Duration::from_millis(600)).contains(&(until - began)));
        backoff.clear();
        assert_eq!(backoff.until(), None, "the server can be reached");
    }
}
