//! Rate limit of log lines: a cause that repeats does not flood the log.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::Instant;

/// Default interval between two lines of one cause: 10 s.
const INTERVAL: Duration = Duration::from_secs(10);

/// Allows one log line, or one other rare action, per interval, and counts all events and those between lines. It takes no lock, so every thread may count at once.
#[derive(Debug)]
pub struct LogThrottle {
    interval: Duration,
    /// Time of the first event.
    began: OnceLock<Instant>,
    /// Time of the next line, in microseconds since `began`.
    due_us: AtomicU64,
    /// Events so far.
    events: AtomicU64,
    /// Events that a log line has reported.
    reported: AtomicU64,
}

impl Default for LogThrottle {
    fn default() -> Self {
        Self::new()
    }
}

impl LogThrottle {
    /// Creates a throttle of one line per 10 s. The first line is allowed at once.
    pub const fn new() -> Self {
        Self::every(INTERVAL)
    }

    /// Creates a throttle of one line per `interval`. The first line is allowed at once.
    pub const fn every(interval: Duration) -> Self {
        let [due_us, events, reported] = [const { AtomicU64::new(0) }; 3];
        Self { interval, began: OnceLock::new(), due_us, events, reported }
    }

    /// Counts one event. If a line is due, returns the number of events since the last line, and a new interval begins.
    pub fn due(&self) -> Option<u64> {
        self.events.fetch_add(1, Ordering::Relaxed);
        let now = Instant::now();
        let passed = now.saturating_duration_since(*self.began.get_or_init(|| now));
        let due = self.due_us.load(Ordering::Relaxed);
        let next = micros(passed + self.interval);
        if micros(passed) < due
            || self.due_us.compare_exchange(due, next, Ordering::Relaxed, Ordering::Relaxed).is_err()
        {
            return None;
        }
        let events = self.events();
        // Another thread may have reported more by now.
        Some(events.saturating_sub(self.reported.fetch_max(events, Ordering::Relaxed)))
    }

    /// Returns the number of events so far.
    pub fn events(&self) -> u64 {
        self.events.load(Ordering::Relaxed)
    }

    /// Counts one event, and returns true if a line is due.
    pub fn is_due(&self) -> bool {
        self.due().is_some()
    }
}

fn micros(length: Duration) -> u64 {
    u64::try_from(length.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn one_line_an_interval_with_the_events_since_the_last_one() {
        let throttle = LogThrottle::new();
        assert_eq!(throttle.due(), Some(1));
        assert_eq!((0..1_000).find_map(|_| throttle.due()), None);
        tokio::time::advance(INTERVAL).await;
        assert_eq!(throttle.due(), Some(1_001));
        assert_eq!(throttle.due(), None);
    }

    #[test]
    fn every_event_is_in_one_line_though_all_threads_count() {
        let throttle = LogThrottle::every(Duration::ZERO);
        let reported: u64 = std::thread::scope(|scope| {
            let count = || (0..10_000).filter_map(|_| throttle.due()).sum::<u64>();
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(count)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        let rest = throttle.events() - throttle.reported.load(Ordering::Relaxed);
        assert_eq!((reported + rest, throttle.events()), (40_000, 40_000));
    }
}
