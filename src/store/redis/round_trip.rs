//! Minimum of the recent round trips to a node: its distance, without the time that a busy node adds.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// Length of a span of samples: 5 s. The minimum covers this span and the one before it, so the last 5 to 10 s.
const SPAN: Duration = Duration::from_secs(5);

/// Minimum of the round trips of the last 5 to 10 s. While there are no samples, the last minimum stays.
#[derive(Debug, Default)]
pub struct RoundTrips {
    /// The minimum in microseconds, for readers without the lock; 0 before the first sample.
    least_us: AtomicU64,
    spans: Mutex<Option<Spans>>,
}

#[derive(Debug, Clone, Copy)]
struct Spans {
    began: Instant,
    /// Minimum of the present span, and of the previous one.
    least: Duration,
    before: Duration,
}

impl RoundTrips {
    /// Adds a round trip of length `took` that ended at `now`.
    pub fn add(&self, now: Instant, took: Duration) {
        let mut spans = self.spans.lock();
        let next = match *spans {
            None => Spans { began: now, least: took, before: took },
            Some(last) if now.saturating_duration_since(last.began) >= SPAN => {
                Spans { began: now, least: took, before: last.least }
            }
            Some(last) => Spans { least: last.least.min(took), ..last },
        };
        *spans = Some(next);
        let least_us = u64::try_from(next.least.min(next.before).as_micros()).unwrap_or(u64::MAX);
        self.least_us.store(least_us.max(1), Ordering::Relaxed);
    }

    /// Returns the minimum; `None` before the first sample.
    pub fn least(&self) -> Option<Duration> {
        let least_us = self.least_us.load(Ordering::Relaxed);
        (least_us > 0).then(|| Duration::from_micros(least_us))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    #[tokio::test]
    async fn the_smallest_of_the_last_two_spans_counts() {
        let began = Instant::now();
        let trips = RoundTrips::default();
        let add = |at_ms, took_ms| trips.add(began + ms(at_ms), ms(took_ms));
        assert_eq!(trips.least(), None);
        add(0, 40);
        assert_eq!(trips.least(), Some(ms(40)));
        add(10, 2);
        add(20, 90);
        assert_eq!(trips.least(), Some(ms(2)), "a busy node adds nothing");
        add(5_100, 40);
        assert_eq!(trips.least(), Some(ms(2)), "a span old");
        add(10_200, 41);
        assert_eq!(trips.least(), Some(ms(40)), "the node is further away now");
        assert_eq!(trips.least(), Some(ms(40)), "and stays there while nobody asks");
    }

    #[tokio::test]
    async fn a_round_trip_of_no_time_is_one_too() {
        let trips = RoundTrips::default();
        trips.add(Instant::now(), Duration::ZERO);
        assert_eq!(trips.least(), Some(Duration::from_micros(1)));
    }
}
