//! Where counters live.

use std::future::Future;
use std::pin::Pin;

use smallvec::SmallVec;

use crate::algorithm::Charge;
use crate::model::Verdict;

pub mod memory;
pub mod redis;

/// The verdicts for some charges, in their order; most requests have few.
pub type Verdicts = SmallVec<[Verdict; 4]>;

/// A place where counters live.
///
/// The charges of one call are one request: they are charged in order, and those whose charging is all-or-nothing stay
/// uncharged when the request is refused ([`crate::model::policy::is_request_refused`]).
pub trait Store: Send + Sync {
    /// Charges the counters of one request and answers each charge, in order and as many.
    fn charge<'a>(&'a self, charges: &'a [Charge]) -> Pin<Box<dyn Future<Output = Verdicts> + Send + 'a>>;

    /// How many counters are held, where the store knows.
    fn counters(&self) -> Option<usize>;
}
