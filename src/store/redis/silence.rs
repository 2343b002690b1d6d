//! Time for which a server or a connection has owed a reply and sent none. An idle one owes nothing and is not silent.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use tokio::time::Instant;

/// Number of calls that are owed a reply, and the time of the last reply to any of them.
#[derive(Debug)]
pub struct Silence {
    began: Instant,
    owed: AtomicUsize,
    /// Time since which nothing was received: of the last reply, or of the call that ended the idle time. In microseconds since
    /// `began`.
    since_us: AtomicU64,
}

impl Default for Silence {
    fn default() -> Self {
        Self { began: Instant::now(), owed: AtomicUsize::new(0), since_us: AtomicU64::new(0) }
    }
}

impl Silence {
    /// Notes that a call was sent at `now`.
    pub fn sent(&self, now: Instant) {
        if self.owed.fetch_add(1, Ordering::AcqRel) == 0 {
            self.note(now);
        }
    }

    /// Notes a reply at `now`, however late.
    pub fn replied(&self, now: Instant) {
        self.note(now);
    }

    /// Notes that a sent call is owed no reply any more.
    pub fn ended(&self) {
        self.owed.fetch_sub(1, Ordering::AcqRel);
    }

    /// Returns true if a reply has been owed for `length` and none came.
    pub fn lasts(&self, now: Instant, length: Duration) -> bool {
        let since = self.began + Duration::from_micros(self.since_us.load(Ordering::Relaxed));
        self.owed.load(Ordering::Acquire) > 0 && now.saturating_duration_since(since) >= length
    }

    fn note(&self, now: Instant) {
        let us = now.saturating_duration_since(self.began).as_micros();
        self.since_us.store(u64::try_from(us).unwrap_or(u64::MAX), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn who_owes_nothing_is_not_silent_and_a_reply_of_any_age_ends_a_silence() {
        let (silence, began) = (Silence::default(), Instant::now());
        let at = |ms: u64| began + Duration::from_millis(ms);
        let lasts = |ms| silence.lasts(at(ms), Duration::from_millis(100));
        assert!(!lasts(10_000), "idle");
        silence.sent(at(10_000));
        silence.sent(at(10_050));
        assert_eq!([10_099, 10_101].map(lasts), [false, true], "since the first call after the idleness");
        silence.replied(at(10_200));
        silence.ended();
        assert_eq!([10_299, 10_301].map(lasts), [false, true], "since the last reply");
        silence.ended();
        assert!(!lasts(99_000), "nothing is owed");
    }
}
