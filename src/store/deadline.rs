//! The time that the store may take for a call.

use std::time::Duration;

/// The time that a caller waits for its answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CallerTime {
    /// The caller's timeout, if it sent one.
    pub timeout: Option<Duration>,
    /// The part of it that the call has spent waiting for its thread, or for its turn to be inflated.
    pub waited: Duration,
    /// The longest delay that the caller takes for an admission. A longer one is a refusal, and a shorter one is waited before the
    /// answer. `None`: a limit delays as long as it says, and in the way that it says.
    pub longest_delay: Option<Duration>,
}

impl CallerTime {
    /// Returns the time that the caller still waits, if it sent a timeout.
    pub fn left(self) -> Option<Duration> {
        self.timeout.map(|timeout| timeout.saturating_sub(self.waited))
    }
}

impl From<Option<Duration>> for CallerTime {
    fn from(timeout: Option<Duration>) -> Self {
        Self { timeout, ..Self::default() }
    }
}

/// The time that the store may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deadline {
    /// Half of the caller's timeout, at least 1 ms and at most 25 ms; 10 ms when the caller sends no timeout. For a store that is
    /// further away, at most three times its smallest recent round trip, and never more than 100 ms.
    Auto,
    /// None: the store is in this process and answers at once, however short the caller waits.
    AtOnce,
    /// As long as this.
    Fixed(Duration),
}

impl Deadline {
    /// The shortest budget: 1 ms. No store answers over a network in less.
    const LEAST: Duration = Duration::from_millis(1);
    /// The upper bound of `auto` for a store in the same network: 25 ms. A longer timeout of the caller must not let a sick store hold
    /// up every request for as long.
    const NEAR: Duration = Duration::from_millis(25);
    /// Round trips that a store further away is given: 3. One is needed; the others allow for a busy store and a lost script.
    const ROUND_TRIPS: u32 = 3;
    /// The upper bound of `auto` for any store: 100 ms. Above it a caller is better served by the policy.
    const MOST: Duration = Duration::from_millis(100);
    /// The budget for a caller that sends no timeout: 10 ms, half of Envoy's default timeout (20 ms, `rate_limit.proto`, field `timeout`).
    const UNTOLD: Duration = Duration::from_millis(10);
    /// Time for decoding, deciding and answering beside the store: 3 ms.
    const OWN: Duration = Duration::from_millis(3);

    /// Returns the time that the store may take for a caller with this timeout; `None` if there is no time for a call.
    /// `round_trip` returns the smallest recent round trip to the store, if one is known.
    pub fn budget(
        self,
        timeout: impl Into<CallerTime>,
        round_trip: impl FnOnce() -> Option<Duration>,
    ) -> Option<Duration> {
        let CallerTime { timeout, waited, .. } = timeout.into();
        let wanted = match (self, timeout) {
            (Self::AtOnce, _) => return Some(Duration::MAX),
            (Self::Fixed(fixed), _) => fixed,
            (Self::Auto, None) => Self::UNTOLD,
            (Self::Auto, Some(timeout)) if timeout / 2 <= Self::NEAR => timeout / 2,
            (Self::Auto, Some(timeout)) => {
                let far =
                    round_trip().map_or(Duration::ZERO, |round_trip| round_trip.saturating_mul(Self::ROUND_TRIPS));
                (timeout / 2).min(far.clamp(Self::NEAR, Self::MOST))
            }
        };
        let bound = timeout.map_or(Duration::MAX, |timeout| timeout.saturating_sub(Self::OWN));
        // A call that has waited has the rest of its time, and below the least it has none.
        let left = bound.saturating_sub(waited);
        (left > Self::LEAST && wanted > waited).then(|| wanted.min(left))
    }
}
