//! Limits that a person can try by hand.

use super::Rule;
use crate::model::{Micros, Role};

/// Maximum limit that a person would try by hand: 100 hits.
const MOST_TRIED: u32 = 100;
/// Minimum window in which a person can try them: 10 s.
const TIME_TO_TRY: Micros = Micros::from_secs(10);
/// Time for which a person sits and waits to be admitted again: 15 s.
const TIME_TO_SIT: Micros = Micros::from_secs(15);
/// Time after which a person who did something else expects to be admitted again: a minute.
const TIME_TO_WAIT: Micros = Micros::from_secs(60);
/// Longest time of one call of a shell's loop: 50 ms.
const TIME_PER_CALL: Micros = Micros::from_millis(50);

/// A limit that can be tried by hand. Of two, the smaller is easier to try: one that admits again soon comes first, then one that takes few hits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Trial {
    is_over_a_minute: bool,
    is_over_15_s: bool,
    /// Number of hits that it admits one after the other.
    pub(crate) limit: u32,
    /// The longest time from a refusal until it admits a hit again.
    pub(crate) admits_again_within: Micros,
}

impl Rule {
    /// Returns its smallest enforced limit, if that can be tried by hand.
    pub(crate) fn trial(&self) -> Option<Trial> {
        let enforced = self.limits.iter().filter(|limit| !limit.is_shadow);
        let limit = enforced.map(|limit| limit.limit).min_by_key(|limit| limit.capacity())?;
        let (hits, admits_again_within) = (limit.capacity(), limit.admits_again_within());
        let is_short = (1..=MOST_TRIED).contains(&hits);
        // Otherwise a bucket gains a hit while a loop of calls empties it, and admits the last of them.
        let is_emptied = admits_again_within.get() >= TIME_PER_CALL.get() * u64::from(hits);
        let is_plain = self.role == Role::Enforce
            && self.request_cost.get() == 1
            && self.limits.iter().all(|limit| limit.cost.get() == 1 && limit.limit.delay().is_none())
            && self.limits.iter().all(|limit| limit.limit.quota().window().length() >= TIME_TO_TRY);
        (is_short && is_emptied && is_plain).then_some(Trial {
            is_over_a_minute: admits_again_within > TIME_TO_WAIT,
            is_over_15_s: admits_again_within > TIME_TO_SIT,
            limit: hits,
            admits_again_within,
        })
    }
}
