//! Hits of a lease from one reply of the store.

use smallvec::SmallVec;

use crate::algorithm::Charge;
use crate::model::{Hits, Micros};

/// Hits from one reply of the store.
pub(super) struct Parcel {
    /// Time of the charge by the store's clock.
    pub(super) at: Micros,
    pub(super) granted: u64,
    pub(super) left: u64,
    /// Time at which it was asked for. After a step of the clock backwards before it, its age is unknown.
    pub(super) since: Micros,
    pub(super) ends: Micros,
    /// Time from which the hits are no longer on the counter, so that giving them back changes nothing.
    pub(super) counted_until: Micros,
}

/// Hits of a lease that were spent on one charge: those of each parcel, by the time of the parcel.
pub(super) type Parts = SmallVec<[(Micros, u64); 2]>;

/// Hits of a lease that are given back.
pub struct Unspent {
    /// The counter, its limit and the hits.
    pub charge: Charge,
    /// Time at which they were charged, by the store's clock.
    pub at: Micros,
}

impl Unspent {
    /// Gives back so many hits of the counter of `charge`, which were charged at `at`.
    pub(super) fn new(charge: &Charge, hits: u64, at: Micros) -> Self {
        Self { charge: Charge { hits: Hits::take(hits), ..charge.clone() }, at }
    }
}

impl Parcel {
    /// Returns true if its hits can be spent at `now`.
    pub(super) fn is_live(&self, now: Micros) -> bool {
        self.since <= now && now < self.ends
    }

    /// Returns the hits to give back at `now`.
    pub(super) fn unspent(self, charge: &Charge, now: Micros) -> Option<Unspent> {
        let is_counted = self.left > 0 && now < self.counted_until;
        is_counted.then(|| Unspent::new(charge, self.left, self.at))
    }
}
