//! One counter, asked hit by hit at moments that are given.

use std::collections::VecDeque;

use tidegate::algorithm::{Limit, State};
use tidegate::model::{Charging, Hits, Micros};

/// When the traffic begins: in January 2027, at the border of a minute.
pub const START: Micros = Micros::from_secs(1_800_000_000);

/// A counter.
pub struct Counter {
    limit: Limit,
    state: State,
}

impl Counter {
    pub fn new(limit: Limit) -> Self {
        Self { state: limit.fresh(), limit }
    }

    /// Whether one hit at that moment is admitted. A refused hit leaves nothing behind.
    pub fn admits(&mut self, now: Micros) -> bool {
        let (verdict, _) = self.limit.charge(&mut self.state, now, Hits::take(1), Charging::AllOrNothing);
        !verdict.outcome.is_refused()
    }
}

/// The hits of the last window's length, counted one by one: the measure of all algorithms.
pub struct Recent {
    length: Micros,
    moments: VecDeque<Micros>,
}

impl Recent {
    pub fn new(length: Micros) -> Self {
        Self { length, moments: VecDeque::new() }
    }

    /// How many there are at a moment, no earlier than the last.
    pub fn count(&mut self, now: Micros) -> usize {
        while self.moments.front().is_some_and(|at| at.saturating_add(self.length) <= now) {
            self.moments.pop_front();
        }
        self.moments.len()
    }

    pub fn push(&mut self, now: Micros) {
        self.moments.push_back(now);
    }
}
