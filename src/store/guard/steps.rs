//! Steps of the wall clock: it is set, or this machine is suspended. The ages of leases are wrong then.

use std::sync::atomic::{AtomicI64, Ordering};

use tokio::time::Instant;

use crate::model::{Clock, Micros};

/// The least step: 20 ms. A clock that is slewed differs by less from one look to the next, a tenth of a second later.
const STEP_US: u64 = 20_000;
/// The longest time between two readings of one moment: 1 ms. This thread may be held up between them.
const ONE_MOMENT: Micros = Micros::from_millis(1);

/// Compares the wall clock with the steady one.
#[derive(Debug)]
pub(super) struct ClockSteps {
    began: Instant,
    /// The wall clock less the steady one, in microseconds, as it was last.
    offset: AtomicI64,
}

impl ClockSteps {
    pub(super) fn new(clock: &dyn Clock) -> Self {
        let began = Instant::now();
        Self { began, offset: AtomicI64::new(clock.now().get().cast_signed()) }
    }

    /// Returns true if the wall clock, which is `now`, was set since the last call of [`ClockSteps::follow`].
    pub(super) fn has_stepped(&self, clock: &dyn Clock, now: Micros) -> bool {
        let last = self.offset.load(Ordering::Relaxed);
        self.offset(now).abs_diff(last) > STEP_US && self.measured(clock).abs_diff(last) > STEP_US
    }

    /// Takes the wall clock as it is. Returns true if it was set since the last call.
    pub(super) fn follow(&self, clock: &dyn Clock) -> bool {
        let offset = self.measured(clock);
        self.offset.swap(offset, Ordering::Relaxed).abs_diff(offset) > STEP_US
    }

    fn offset(&self, wall: Micros) -> i64 {
        wall.get().cast_signed() - Micros::from(self.began.elapsed()).get().cast_signed()
    }

    /// Reads both clocks at one moment.
    fn measured(&self, clock: &dyn Clock) -> i64 {
        loop {
            let before = self.began.elapsed();
            let offset = self.offset(clock.now());
            if Micros::from(self.began.elapsed() - before) <= ONE_MOMENT {
                return offset;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicU64;
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_clock_that_is_set_by_twenty_milliseconds_has_stepped_and_one_that_is_slewed_has_not() {
        let began = Instant::now();
        let set_to = Arc::new(AtomicU64::new(1_000_000_000));
        let clock = {
            let set_to = Arc::clone(&set_to);
            move || Micros::new(set_to.load(Ordering::Relaxed)).saturating_add(began.elapsed().into())
        };
        let steps = ClockSteps::new(&clock);
        for _ in 0..100 {
            tokio::time::advance(Duration::from_millis(100)).await;
            set_to.fetch_add(19_000, Ordering::Relaxed);
            assert!(!steps.has_stepped(&clock, clock.now()), "it is slewed");
            assert!(!steps.follow(&clock));
        }
        for step in [21_000, -21_000_i64, 3_600_000_000, -3_600_000_000] {
            let before = clock.now();
            set_to.fetch_add(step.cast_unsigned(), Ordering::Relaxed);
            assert!(!steps.has_stepped(&clock, before), "it was read before");
            assert!(steps.has_stepped(&clock, clock.now()), "by {step} us");
            assert!(steps.has_stepped(&clock, clock.now()), "until somebody follows");
            assert!(steps.follow(&clock));
            assert!(!steps.has_stepped(&clock, clock.now()));
        }
        tokio::time::advance(Duration::from_millis(30)).await;
        assert!(!steps.has_stepped(&clock, clock.now().saturating_sub(Micros::from_millis(30))), "it was held up");
    }
}
