//! Where counters live, and what is answered when they cannot be asked.

use std::future::{Future, ready};
use std::pin::Pin;
use std::time::Duration;

use smallvec::SmallVec;
use thiserror::Error;

use crate::algorithm::Charge;
#[cfg(doc)]
use crate::model::Charging;
use crate::model::{Micros, Verdict};
use crate::telemetry::servers::Reason;

pub mod guard;
pub mod known;
pub mod memory;
pub mod redis;
pub mod replicas;

/// The verdicts for some charges, in their order; most requests have few.
pub type Verdicts = SmallVec<[Verdict; 4]>;

/// The answers to some charges, in their order.
pub type Answers = SmallVec<[Result<Verdict, StoreError>; 4]>;

/// A place where counters live.
///
/// The charges of one call are one request: they are charged in order, and those whose charging is all-or-nothing stay
/// uncharged when the request is refused ([`crate::model::policy::is_request_refused`]).
pub trait Store: Send + Sync {
    /// Charges the counters of one request and answers each charge, in order and as many, within `budget`. What is not
    /// answered by then is not charged later.
    fn charge<'a>(
        &'a self,
        charges: &'a [Charge],
        budget: Duration,
    ) -> Pin<Box<dyn Future<Output = Charged> + Send + 'a>>;

    /// Charges a part of a request whose other parts are charged before or after it, within `budget`. What it takes and would
    /// not keep if the request were refused, it takes all the same unless this part alone is refused, and says so:
    /// [`Store::give_back`] takes it back.
    fn take<'a>(&'a self, charges: &'a [Charge], budget: Duration) -> Pin<Box<dyn Future<Output = Taken> + Send + 'a>>;

    /// Takes back charges of a request that was refused, each with the moment that [`Store::take`] returned for it.
    fn give_back<'a>(
        &'a self,
        charges: &'a [Charge],
        taken: &'a [Option<Micros>],
    ) -> Pin<Box<dyn Future<Output = ()> + Send + 'a>>;

    /// Charges hits that were decided without the store, each on its own, within `budget`. Of hits that were admitted
    /// ([`Charging::AllOrNothing`]) it charges as many as still fit; those that were refused ([`Charging::Each`]) it charges where
    /// nothing is left of the limit. Returns for each charge whether it is done.
    ///
    /// A store that answers every call is never asked this.
    fn settle<'a>(
        &'a self,
        charges: &'a [Charge],
        budget: Duration,
    ) -> Pin<Box<dyn Future<Output = Vec<bool>> + Send + 'a>> {
        let _ = budget;
        Box::pin(ready(vec![true; charges.len()]))
    }

    /// Returns the smallest recent round trip to the store, of its servers that of the one furthest away; `None` where there is no
    /// network in between, or nothing has been measured.
    fn round_trip(&self) -> Option<Duration> {
        None
    }
}

/// What became of the charges of a part of a request.
#[derive(Debug)]
pub struct Taken {
    /// The answer to each charge.
    pub answers: Answers,
    /// For each charge that is to be taken back if the request is refused, the moment at which it was charged.
    pub taken: Vec<Option<Micros>>,
}

/// What became of the charges of one request.
#[derive(Debug)]
pub struct Charged {
    /// The answer to each charge.
    pub answers: Answers,
    /// What was taken although the store could not know whether the request would be admitted.
    pub undo: Option<Undo>,
}

/// What was taken on account of a request, and is given back when that request is refused, or dropped before it was known
/// what became of it.
pub struct Undo {
    /// For each charge that is given back: which it is, and what remains of its counter then, and for how long.
    left: SmallVec<[(usize, u32, Micros); 4]>,
    give_back: Option<Box<dyn FnOnce() + Send>>,
}

impl Undo {
    /// What `give_back` gives back, and what is `left` of the counter of each of those charges then.
    pub fn new(left: SmallVec<[(usize, u32, Micros); 4]>, give_back: impl FnOnce() + Send + 'static) -> Self {
        Self { left, give_back: Some(Box::new(give_back)) }
    }

    /// The request is not refused: what was taken stays taken.
    pub fn keep(mut self) {
        self.give_back = None;
    }

    /// The request is refused: its verdicts tell what is left without what it took.
    pub fn take_back(self, verdicts: &mut [Verdict]) {
        for &(index, remaining, reset) in &self.left {
            if let Some(verdict) = verdicts.get_mut(index) {
                verdict.remaining = remaining;
                verdict.reset = reset;
            }
        }
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

/// The reason why the store did not answer a charge. A client can cause an overload ([`StoreError::is_overload`]) and nothing else.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum StoreError {
    /// The caller leaves no time to ask.
    #[error("the caller waits too short a time for the store to be asked")]
    NoTime,
    /// The store did not answer in time, nor did it answer anybody else lately. Whether it charged is unknown only if the answer
    /// was lost: what it executes late it does not charge.
    #[error("the store did not answer in time")]
    TimedOut,
    /// The store is busy and did not answer in time: it answers others. As to what it charged, see [`Self::TimedOut`].
    #[error("the store is too busy to answer in time")]
    Late,
    /// There is no connection.
    #[error("there is no connection to the store")]
    Unreachable,
    /// The store is known to be down.
    #[error("the store is down; it is asked again in {}", .retry)]
    Down {
        /// Until it is asked again.
        retry: Micros,
    },
    /// The call was not sent: the store is too busy to answer it in time.
    #[error("the store is too busy to be asked")]
    Overloaded,
    /// Under the counter's key stands something that is no counter of ours.
    #[error("what stands under the counter's key is no counter")]
    Foreign,
    /// The store answered with an error.
    #[error("the store refuses the command")]
    Rejected,
}

impl StoreError {
    /// How long it may take until asking again makes sense, where that is not known: 1 s, the time within which a store
    /// that is back is asked again.
    const UNKNOWN_RETRY: Micros = Micros::from_secs(1);

    /// Why its server did not answer, where it is to blame.
    pub const fn reason(self) -> Option<Reason> {
        match self {
            Self::TimedOut => Some(Reason::TimedOut),
            Self::Late => Some(Reason::Late),
            Self::Unreachable => Some(Reason::Unreachable),
            Self::Down { .. } => Some(Reason::Down),
            Self::Overloaded => Some(Reason::Overloaded),
            Self::Rejected => Some(Reason::Rejected),
            Self::NoTime | Self::Foreign => None,
        }
    }

    /// Returns whether the store is too slow for this call but works. Then the overload policy answers, otherwise the failure policy.
    pub const fn is_overload(self) -> bool {
        matches!(self, Self::NoTime | Self::Late | Self::Overloaded)
    }

    /// Returns whether the call was not sent. Then nothing of it was charged.
    pub const fn is_unsent(self) -> bool {
        matches!(self, Self::NoTime | Self::Overloaded)
    }

    /// How long until asking again makes sense.
    pub const fn retry(self) -> Micros {
        match self {
            Self::Down { retry } => retry,
            _ => Self::UNKNOWN_RETRY,
        }
    }
}
