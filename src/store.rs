//! The store of counters: its interface and errors, its implementations in memory and in Redis, and the guard that answers when
//! it fails.

use std::future::{Future, ready};
use std::pin::Pin;
use std::time::Duration;

use smallvec::SmallVec;
use thiserror::Error;

use crate::algorithm::{Charge, Refusals};
use crate::model::{Charging, Micros, Verdict};
#[cfg(feature = "server")]
use crate::telemetry::servers::FailureReason;

pub mod clock;
pub mod deadline;
pub mod guard;
pub mod known;
pub mod memory;
#[cfg(feature = "server")]
pub mod redis;
pub mod replicas;

/// Verdicts in the order of their charges. Most requests have few charges.
pub type Verdicts = SmallVec<[Verdict; 4]>;

/// Verdicts or errors in the order of their charges.
pub type ChargeResults = SmallVec<[Result<Verdict, StoreError>; 4]>;

/// Holds counters and charges them.
///
/// The charges of one call belong to one request. They are charged in order. Charges that are decided together are not spent if one
/// of them refuses ([`Refusals`]).
pub trait Store: Send + Sync {
    /// Charges the counters of one request within `budget`. Returns one answer per charge, in order. A charge that is not
    /// answered by then is not charged later.
    fn charge<'a>(
        &'a self,
        charges: &'a [Charge],
        budget: Duration,
    ) -> Pin<Box<dyn Future<Output = Charged> + Send + 'a>>;

    /// As [`Store::charge`], for charges of a request that is refused, if the store has little memory left: none of them makes a new counter.
    /// `None` if it has enough.
    fn charge_existing<'a>(
        &'a self,
        charges: &'a [Charge],
        budget: Duration,
    ) -> Option<Pin<Box<dyn Future<Output = Charged> + Send + 'a>>> {
        let _ = (charges, budget);
        None
    }

    /// Reverses charges. `taken` has the time at which each was charged, or `None` if there is nothing to reverse.
    fn give_back<'a>(
        &'a self,
        charges: &'a [Charge],
        taken: &'a [Option<Micros>],
    ) -> Pin<Box<dyn Future<Output = ()> + Send + 'a>>;

    /// Charges hits that were decided without the store, each charge on its own, within `budget`. Of admitted hits
    /// ([`Charging::AllOrNothing`]) it charges as many as still fit. It charges refused hits ([`Charging::Each`]) only if nothing
    /// is left of the limit. Returns one flag per charge, true if the charge is done.
    ///
    /// A store that answers every call gets no such hits.
    fn settle<'a>(
        &'a self,
        charges: &'a [Charge],
        budget: Duration,
    ) -> Pin<Box<dyn Future<Output = Vec<bool>> + Send + 'a>> {
        let _ = budget;
        Box::pin(ready(vec![true; charges.len()]))
    }

    /// Charges hits that are spent later, each charge on its own, within `budget`: of each as many as fit into a quarter of the
    /// remaining hits. Returns the result of each charge; `None` if it is unknown. Hits that are not spent are given back by
    /// [`Store::give_back`].
    ///
    /// A store that answers every call grants none.
    fn lease<'a>(
        &'a self,
        charges: &'a [Charge],
        budget: Duration,
    ) -> Pin<Box<dyn Future<Output = Vec<Option<Granted>>> + Send + 'a>> {
        let _ = budget;
        Box::pin(ready(vec![None; charges.len()]))
    }

    /// Returns the smallest recent round trip to the store; with several servers, that of the furthest one. Returns `None` if
    /// there is no network in between or nothing has been measured.
    fn round_trip(&self) -> Option<Duration> {
        None
    }
}

/// Hits of one counter that were charged and may be spent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Granted {
    /// Time of the charge by the store's clock, which [`Store::give_back`] needs.
    pub at: Micros,
    /// Number of hits; 0 if the counter has too few.
    pub hits: u64,
    /// Remaining hits of the counter after the charge.
    pub remaining: u32,
    /// Time from the charge until the counter is idle; in a fixed window until its end.
    pub reset: Micros,
    /// Time from the charge until one hit fits; `None` if hits remain.
    pub retry: Option<Micros>,
}

/// Result of charging one request.
#[derive(Debug)]
pub struct Charged {
    /// One answer per charge, in order.
    pub answers: ChargeResults,
    /// The hits for a lease that were charged beside charges with an [`ask`](Charge::ask), each with the index of its charge.
    pub granted: SmallVec<[(usize, Granted); 1]>,
    /// Hits that were taken before the store could know if what they are decided with refuses.
    pub undos: SmallVec<[Undo; 1]>,
}

impl Charged {
    /// Returns a result of answers alone.
    pub fn answered(answers: ChargeResults) -> Self {
        Self { answers, granted: SmallVec::new(), undos: SmallVec::new() }
    }

    /// Returns the same error for each charge.
    pub fn failed(charges: &[Charge], error: StoreError) -> Self {
        Self::answered(charges.iter().map(|_| Err(error)).collect())
    }
}

/// Hits that were taken for the charges of one charging mode of a request. They are given back if these are refused, or if this value
/// is dropped before the outcome is known.
pub struct Undo {
    charging: Charging,
    /// For each charge that is given back: its index, and the `remaining` and `reset` of its counter after that.
    left: SmallVec<[(usize, u32, Micros); 4]>,
    give_back: Option<Box<dyn FnOnce() + Send>>,
}

impl Undo {
    /// Creates an undo of charges of this mode that calls `give_back`. `left` has the index, remaining hits and reset of each charge
    /// that is given back.
    pub fn new(
        charging: Charging,
        left: SmallVec<[(usize, u32, Micros); 4]>,
        give_back: impl FnOnce() + Send + 'static,
    ) -> Self {
        Self { charging, left, give_back: Some(Box::new(give_back)) }
    }

    /// Keeps the hits.
    pub fn keep(mut self) {
        self.give_back = None;
    }

    /// Gives the hits back if `refusals` refuse them, and keeps them otherwise. If it gives them back, it sets `remaining` and `reset` in
    /// `verdicts` to the values without these hits. Returns true if it gives them back.
    pub fn settle(self, refusals: &Refusals, verdicts: &mut [Verdict]) -> bool {
        if !refusals.refuse(self.charging) {
            self.keep();
            return false;
        }
        for &(index, remaining, reset) in &self.left {
            if let Some(verdict) = verdicts.get_mut(index) {
                verdict.remaining = remaining;
                verdict.reset = reset;
            }
        }
        true
    }
}

impl Drop for Undo {
    fn drop(&mut self) {
        if let Some(give_back) = self.give_back.take() {
            give_back();
        }
    }
}

impl std::fmt::Debug for Undo {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Undo").field("left", &self.left).finish_non_exhaustive()
    }
}

/// The reason for which the store did not answer a charge. A client can cause an overload ([`StoreError::is_overload`]) and
/// nothing else.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum StoreError {
    /// The caller's timeout leaves no time for a call to the store.
    #[error("the caller waits too short a time for the store to be asked")]
    NoTime,
    /// The store did not answer this call in time, and recently no other call either. Its effect is uncertain only if the reply
    /// was lost: the store does not charge what it executes too late.
    #[error("the store did not answer in time")]
    TimedOut,
    /// The store did not answer this call in time, but answers others: it is busy. Its effect is as uncertain as for
    /// [`Self::TimedOut`].
    #[error("the store is too busy to answer in time")]
    Late,
    /// There is no connection to the store.
    #[error("there is no connection to the store")]
    Unreachable,
    /// The store is known to be down. The call was not sent.
    #[error("the store is down; it is asked again in {}", .retry)]
    Down {
        /// Time until the store is called again.
        retry: Micros,
    },
    /// The call was not sent: the store is too busy to answer it in time.
    #[error("the store is too busy to be asked")]
    Overloaded,
    /// The store has no memory for the counter. Nothing of it was charged.
    #[error("the store has no memory for the counter")]
    OutOfMemory,
    /// The counter's key holds a value that is not a counter of Tidegate.
    #[error("what stands under the counter's key is no counter")]
    Foreign,
    /// The store answered with an error.
    #[error("the store refuses the command")]
    Rejected,
}

impl StoreError {
    /// Retry time for errors without one: 1 s, the time within which a store that is back is called again.
    const UNKNOWN_RETRY: Micros = Micros::from_secs(1);

    /// Returns the reason for the metrics of the server; `None` if the server is not to blame.
    #[cfg(feature = "server")]
    pub const fn reason(self) -> Option<FailureReason> {
        match self {
            Self::TimedOut => Some(FailureReason::TimedOut),
            Self::Late => Some(FailureReason::Late),
            Self::Unreachable => Some(FailureReason::Unreachable),
            Self::Down { .. } => Some(FailureReason::Down),
            Self::Overloaded => Some(FailureReason::Overloaded),
            Self::OutOfMemory => Some(FailureReason::OutOfMemory),
            Self::Rejected => Some(FailureReason::Rejected),
            Self::NoTime | Self::Foreign => None,
        }
    }

    /// Returns true if the store works but is too slow or too full for this call. Then the overload policy answers, otherwise the failure
    /// policy.
    pub const fn is_overload(self) -> bool {
        matches!(self, Self::NoTime | Self::Late | Self::Overloaded | Self::OutOfMemory)
    }

    /// Returns true if nothing was charged because of overload: the call was not sent, or the store had no memory for it.
    pub const fn is_uncharged(self) -> bool {
        matches!(self, Self::NoTime | Self::Overloaded | Self::OutOfMemory)
    }

    /// Returns the time until a retry makes sense.
    pub const fn retry(self) -> Micros {
        match self {
            Self::Down { retry } => retry,
            _ => Self::UNKNOWN_RETRY,
        }
    }
}
