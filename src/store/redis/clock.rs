//! The clock of a node, estimated from its replies. It converts the deadline of a command to the node's time.

use std::sync::LazyLock;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use crate::model::Micros;

/// Length of a span of samples: 1 s. No clock drifts enough in it to matter for a deadline.
const SAMPLE_LIFE: Duration = Duration::from_secs(1);

/// Zero point of this process's own clock.
static BEGAN: LazyLock<Instant> = LazyLock::new(Instant::now);

/// Offset of a node's clock from this process's monotonic clock.
///
/// Every reply contains the node's time between our sending and our receiving. That time minus the time of receiving is at most
/// the true offset, so a deadline made with it is never too late. The largest of the last two spans is the closest.
#[derive(Debug, Default)]
pub struct NodeClock(Mutex<Samples>);

#[derive(Debug, Default)]
struct Samples {
    /// Largest lower bound in the present span, and in the previous one.
    best: Option<i64>,
    before: Option<i64>,
    since: i64,
}

impl NodeClock {
    /// Adds a sample: the command was `sent`, its reply was `received`, and the reply contains the node's `time`.
    pub fn learn(&self, sent: Instant, received: Instant, time: Micros) {
        let (sent, received) = (own(sent), own(received));
        let time = i64::try_from(time.get()).unwrap_or(i64::MAX);
        let (least, most) = (time.saturating_sub(received), time.saturating_sub(sent));
        let mut samples = self.0.lock();
        if received.saturating_sub(samples.since) > i64::try_from(SAMPLE_LIFE.as_micros()).unwrap_or(i64::MAX) {
            samples.before = samples.best.take();
            samples.since = received;
        }
        // Above the upper bound: the node's clock has stepped back.
        if samples.offset().is_some_and(|offset| offset > most) {
            samples.before = None;
            samples.best = None;
        }
        samples.best = samples.best.max(Some(least));
    }

    /// Returns a lower bound of the node's time at `moment`; `None` before the first reply.
    pub fn at(&self, moment: Instant) -> Option<Micros> {
        let offset = self.0.lock().offset()?;
        u64::try_from(own(moment).saturating_add(offset)).ok().map(Micros::new)
    }
}

impl Samples {
    fn offset(&self) -> Option<i64> {
        self.best.max(self.before)
    }
}

/// Returns `moment` in microseconds of this process's own clock.
fn own(moment: Instant) -> i64 {
    let since = moment.saturating_duration_since(*BEGAN);
    i64::try_from(since.as_micros()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A node time that is far from this process's own time.
    const THERE: u64 = 1_800_000_000_000_000;

    fn moment(micros: u64) -> Instant {
        *BEGAN + Duration::from_micros(micros)
    }

    fn at(clock: &NodeClock, micros: u64) -> Option<u64> {
        clock.at(moment(micros)).map(|time| time.get() - THERE)
    }

    fn learn(clock: &NodeClock, sent: u64, received: u64, time: u64) {
        clock.learn(moment(sent), moment(received), Micros::new(THERE + time));
    }

    #[test]
    fn the_quickest_reply_tells_the_time_best() {
        let clock = NodeClock::default();
        assert_eq!(at(&clock, 0), None);
        learn(&clock, 0, 900, 1_300);
        assert_eq!(at(&clock, 1_000), Some(1_400));
        learn(&clock, 1_000, 1_100, 2_050);
        assert_eq!(at(&clock, 2_000), Some(2_950));
        learn(&clock, 2_000, 5_000, 3_000);
        assert_eq!(at(&clock, 5_000), Some(5_950), "a slow reply does not undo a quick one");
    }

    #[test]
    fn a_time_that_both_samples_allow_keeps_the_better_one() {
        let clock = NodeClock::default();
        learn(&clock, 0, 0, 500);
        // The script ran at the moment of sending, and the reply took 100 us.
        learn(&clock, 1_000, 1_100, 1_500);
        assert_eq!(at(&clock, 2_000), Some(2_500));
    }

    #[test]
    fn a_clock_that_steps_back_is_believed_at_once() {
        let clock = NodeClock::default();
        learn(&clock, 0, 100, 30_000_000);
        learn(&clock, 1_000, 1_100, 1_050);
        assert_eq!(at(&clock, 2_000), Some(1_950));
    }

    #[test]
    fn a_clock_that_steps_forward_is_believed_at_once() {
        let clock = NodeClock::default();
        learn(&clock, 0, 100, 50);
        learn(&clock, 1_000, 1_100, 3_600_000_000);
        assert_eq!(at(&clock, 2_000), Some(3_600_000_900));
    }

    #[test]
    fn what_was_learnt_long_ago_is_forgotten() {
        let clock = NodeClock::default();
        learn(&clock, 0, 10, 10);
        for second in 1..4 {
            // Each reply took 5 ms on its way back, and the node's clock loses 1 ms from one sample to the next.
            let sent = second * 1_100_000;
            learn(&clock, sent, sent + 5_000, sent - second * 1_000);
        }
        assert_eq!(at(&clock, 4_000_000), Some(4_000_000 - 7_000), "from the last two");
    }
}
