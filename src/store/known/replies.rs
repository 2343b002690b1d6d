//! The last reply of the store to a charge of each counter.
//!
//! Every charge writes here. So it is a table of small sets and no list: one place in memory is read and one is written, where a list of
//! the least recently used has to change its neighbours too (`docs/decisions/0034`).

use smallvec::SmallVec;

use super::Reply;
use crate::model::Micros;

/// The counters of one set: 4. A fifth takes the place of the one with the oldest reply.
const COUNTERS_OF_SET: usize = 4;

/// A keyed hash (SipHash) of a counter's key, in place of the key: clients choose the names of counters, and must find no two with the
/// same hash. The chance that any two of 65,536 counters have it is 1 in 8 billion (2^31 pairs, 2^64 hashes).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fingerprint(pub u64);

/// The last replies of one shard.
pub struct Replies {
    /// Each is made when it is first needed.
    sets: Box<[Option<Box<Set>>]>,
}

#[derive(Default)]
struct Set {
    /// Each with the time of its reply, so that a search reads no more than these.
    counters: SmallVec<[(Fingerprint, Micros); COUNTERS_OF_SET]>,
    replies: SmallVec<[Reply; COUNTERS_OF_SET]>,
}

impl Replies {
    /// Room for at most `most` replies.
    pub fn new(most: usize) -> Self {
        Self { sets: std::iter::repeat_with(|| None).take(most.div_ceil(COUNTERS_OF_SET)).collect() }
    }

    /// Returns the last reply to a charge of a counter, if it is known.
    pub fn get(&self, counter: Fingerprint) -> Option<&Reply> {
        let set = self.sets[self.place(counter)].as_ref()?;
        set.replies.get(set.find(counter)?)
    }

    /// As [`Replies::get`].
    pub fn get_mut(&mut self, counter: Fingerprint) -> Option<&mut Reply> {
        let set = self.sets[self.place(counter)].as_mut()?;
        let place = set.find(counter)?;
        set.replies.get_mut(place)
    }

    /// Remembers a reply in place of the one before, or of the oldest in its set.
    pub fn put(&mut self, counter: Fingerprint, reply: Reply) {
        let set = self.sets[self.place(counter)].get_or_insert_default();
        let entry = (counter, reply.at);
        match set.find(counter).or_else(|| set.oldest_if_full()) {
            Some(place) => (set.counters[place], set.replies[place]) = (entry, reply),
            None => {
                set.counters.push(entry);
                set.replies.push(reply);
            }
        }
    }

    /// The high bits choose the set: the low ones chose the shard.
    fn place(&self, counter: Fingerprint) -> usize {
        usize::try_from((counter.0 >> 32) % self.sets.len() as u64).unwrap_or(0)
    }
}

impl Set {
    fn find(&self, counter: Fingerprint) -> Option<usize> {
        self.counters.iter().position(|(known, _)| *known == counter)
    }

    fn oldest_if_full(&self) -> Option<usize> {
        let oldest = (0..self.counters.len()).min_by_key(|&place| self.counters[place].1);
        oldest.filter(|_| self.counters.len() == COUNTERS_OF_SET)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithm::{Algorithm, Limit};
    use crate::model::{Hits, Outcome, Provenance, Quota, Unit, Verdict, Window};

    fn reply(secs: u64) -> Reply {
        let quota = Quota::new(1, Window::of_unit(Unit::Minute));
        Reply {
            limit: Limit::new(Algorithm::FixedWindow, quota).unwrap(),
            hits: Hits::take(1),
            verdict: Verdict::uncounted(Outcome::Admitted, Provenance::Store),
            at: Micros::from_secs(secs),
            is_shared: false,
            refunded_until: None,
        }
    }

    #[test]
    fn a_fifth_counter_of_a_set_takes_the_place_of_the_one_with_the_oldest_reply() {
        let mut replies = Replies::new(COUNTERS_OF_SET);
        let known = |replies: &Replies| {
            (0..6).filter_map(|counter| Some((counter, replies.get(Fingerprint(counter))?.at))).collect::<Vec<_>>()
        };
        (0..4).for_each(|counter| replies.put(Fingerprint(counter), reply(counter)));
        replies.put(Fingerprint(0), reply(5));
        replies.put(Fingerprint(4), reply(6));
        let expected = [(0, 5), (2, 2), (3, 3), (4, 6)].map(|(counter, secs)| (counter, Micros::from_secs(secs)));
        assert_eq!(known(&replies), expected);
    }

    #[test]
    fn counters_are_spread_over_the_sets() {
        let mut replies = Replies::new(400);
        let counter = |number: u64| Fingerprint(number.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        (0..200).for_each(|number| replies.put(counter(number), reply(number)));
        let known = (0..200).filter(|&number| replies.get(counter(number)).is_some()).count();
        assert!(known > 180, "{known} of 200 in 100 sets");
    }
}
