//! The number of instances that share the counters of one store.

use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU32, Ordering};

use parking_lot::Mutex;

use crate::model::Micros;

/// Number assumed until one is known: 4.
const ASSUMED: NonZeroU32 = NonZeroU32::MIN.saturating_add(3);
/// Time in which the number falls by at most half: 3 s. An instance that has not announced itself for this time is not counted.
pub const FALL: Micros = Micros::from_secs(3);

/// The number of instances. Each takes its share of a limit while the store is unavailable.
#[derive(Debug)]
pub struct Replicas {
    number: AtomicU32,
    source: Source,
    state: Mutex<ReplicaState>,
}

/// The origin of the number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The setting `REPLICAS`.
    Set,
    /// The announcements of the instances in Redis.
    Counted,
    /// The default, as the instances could not be counted yet.
    Assumed,
}

#[derive(Debug, Default)]
struct ReplicaState {
    /// The number that may fall to half, and the time from which it may; `None` before the first count.
    high: Option<(u32, Micros)>,
}

impl Source {
    /// Returns its label in metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Set => "set",
            Self::Counted => "counted",
            Self::Assumed => "assumed",
        }
    }
}

impl Replicas {
    /// Creates a number that does not change.
    pub fn set(number: NonZeroU32) -> Self {
        Self { number: number.get().into(), source: Source::Set, state: Mutex::default() }
    }

    /// Creates a number that is counted. Before the first count it is 4.
    pub fn counted() -> Self {
        Self { number: ASSUMED.get().into(), source: Source::Counted, state: Mutex::default() }
    }

    /// Returns the number.
    pub fn get(&self) -> NonZeroU32 {
        NonZeroU32::new(self.number.load(Ordering::Relaxed)).unwrap_or(NonZeroU32::MIN)
    }

    /// Returns the origin of the number.
    pub fn source(&self) -> Source {
        if self.source == Source::Counted && self.state.lock().high.is_none() { Source::Assumed } else { self.source }
    }

    /// Sets the number of instances that were counted at `now`. A larger number applies at once. A smaller one applies down to
    /// half of the number 3 s ago: instances that only lost their connection to Redis still admit their share.
    pub fn count(&self, counted: u32, now: Micros) {
        let mut state = self.state.lock();
        let counted = counted.max(1);
        let present = self.number.load(Ordering::Relaxed);
        let (high, since) = match state.high {
            Some((high, since)) if counted < present && now < since.saturating_add(FALL) => (high, since),
            Some(_) if counted < present => (present, now),
            Some(_) | None => (counted, now),
        };
        state.high = Some((high, since));
        self.number.store(counted.max(high.div_ceil(2)), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_grows_at_once_and_falls_by_half_in_three_seconds() {
        let replicas = Replicas::counted();
        assert_eq!((replicas.get().get(), replicas.source()), (4, Source::Assumed));
        let at = |seconds: u64, counted: u32| {
            replicas.count(counted, Micros::from_secs(1_000 + seconds));
            replicas.get().get()
        };
        assert_eq!(at(0, 1), 1, "the first number is believed");
        assert_eq!(replicas.source(), Source::Counted);
        assert_eq!(at(1, 16), 16);
        assert_eq!([at(2, 2), at(3, 2), at(4, 2)], [8, 8, 4]);
        assert_eq!([at(5, 2), at(6, 2), at(7, 2), at(8, 2)], [4, 4, 2, 2]);
        assert_eq!([at(9, 0), at(12, 0)], [1, 1], "this instance is there");
        assert_eq!(Replicas::set(NonZeroU32::new(7).unwrap()).source(), Source::Set);
    }
}
