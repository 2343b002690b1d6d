//! The last reply of the store to a charge of each counter.
//!
//! Every charge writes here. So it is one table of small sets and no list: 192 bytes that lie together are read and written, where a
//! list of the least recently used has to change its neighbours too (`docs/decisions/0034`).

use crate::model::{Hits, Micros, Outcome, Provenance, Verdict};

/// The counters of one set: 4. A fifth takes the place of the one with the oldest reply.
const COUNTERS_OF_SET: usize = 4;

/// A keyed hash (SipHash) of a counter's key and its limit, in place of both: clients choose the names of counters, and must find no two
/// with the same hash. The chance that any two of 65,536 counters have it is 1 in 8 billion (2^31 pairs, 2^64 hashes).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fingerprint(pub u64);

/// A reply by the store, as far as it is needed later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reply {
    /// When the call that brought it was sent.
    at: Micros,
    reset: Micros,
    /// The end of the window in which hits were given back; 0 where none were.
    refunded_until: Micros,
    hits: Hits,
    remaining: u32,
    is_admitted: bool,
    /// Whether this instance has already taken its share of what remained.
    is_shared: bool,
}

/// The last replies of one shard.
pub struct Replies {
    sets: Box<[Set]>,
}

#[derive(Clone, Copy, Default)]
struct Set {
    /// Zero where there is none. A search reads no more than these.
    counters: [Fingerprint; COUNTERS_OF_SET],
    replies: [Reply; COUNTERS_OF_SET],
}

impl Default for Reply {
    fn default() -> Self {
        let (at, reset, refunded_until) = (Micros::ZERO, Micros::ZERO, Micros::ZERO);
        Self { at, reset, refunded_until, hits: Hits::LOOK, remaining: 0, is_admitted: false, is_shared: false }
    }
}

impl Reply {
    /// The reply `verdict` to a charge of `hits` that was sent at `at`. Hits were given back in the window that ends at
    /// `refunded_until`, if there is one.
    pub fn new(hits: Hits, verdict: &Verdict, at: Micros, refunded_until: Option<Micros>) -> Self {
        let is_admitted = verdict.outcome == Outcome::Admitted;
        let Verdict { remaining, reset, .. } = *verdict;
        let refunded_until = refunded_until.unwrap_or(Micros::ZERO);
        Self { at, reset, refunded_until, hits, remaining, is_admitted, is_shared: false }
    }

    /// Returns the end of the window in which hits were given back, if that is later than `now`.
    pub fn refunded_until(&self, now: Micros) -> Option<Micros> {
        (self.refunded_until > now).then_some(self.refunded_until)
    }

    /// Returns what the store would admit now, if this is an admission of as many hits that is younger than `believed`.
    pub fn admission(&self, hits: Hits, now: Micros, believed: Micros) -> Option<Verdict> {
        let is_young = self.at <= now && now < self.at.saturating_add(believed);
        (is_young && self.is_admitted && self.hits == hits).then(|| Verdict {
            remaining: self.remaining,
            reset: self.reset.saturating_sub(now.saturating_sub(self.at)),
            ..Verdict::uncounted(Outcome::Admitted, Provenance::Known)
        })
    }

    /// Returns the hits that it left, once, if it is younger than one window.
    pub fn take_remaining(&mut self, now: Micros, window: Micros) -> Option<u32> {
        let is_over = self.at.saturating_add(window) <= now;
        (!is_over && !std::mem::replace(&mut self.is_shared, true)).then_some(self.remaining)
    }
}

impl Replies {
    /// Room for `most` replies, or up to twice as many: the number of sets is a power of 2.
    pub fn new(most: usize) -> Self {
        Self { sets: vec![Set::default(); most.div_ceil(COUNTERS_OF_SET).next_power_of_two()].into_boxed_slice() }
    }

    /// Returns the last reply to a charge of a counter, if it is known.
    pub fn get(&self, counter: Fingerprint) -> Option<&Reply> {
        let set = &self.sets[self.place(counter)];
        Some(&set.replies[set.find(counter)?])
    }

    /// As [`Replies::get`].
    pub fn get_mut(&mut self, counter: Fingerprint) -> Option<&mut Reply> {
        let place = self.place(counter);
        let set = &mut self.sets[place];
        Some(&mut set.replies[set.find(counter)?])
    }

    /// Remembers a reply in place of the one before, or of the oldest in its set.
    pub fn put(&mut self, counter: Fingerprint, reply: Reply) {
        let place = self.place(counter);
        let set = &mut self.sets[place];
        let place = set.find(counter).unwrap_or_else(|| set.oldest());
        (set.counters[place], set.replies[place]) = (counter, reply);
    }

    /// The high bits choose the set.
    fn place(&self, counter: Fingerprint) -> usize {
        usize::try_from(counter.0 >> 32).unwrap_or(0) & (self.sets.len() - 1)
    }
}

impl Set {
    fn find(&self, counter: Fingerprint) -> Option<usize> {
        self.counters.iter().position(|known| *known == counter)
    }

    /// Returns the place of the oldest reply; where there is none yet, the reply is as old as time.
    fn oldest(&self) -> usize {
        (0..COUNTERS_OF_SET).min_by_key(|&place| self.replies[place].at).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reply(secs: u64) -> Reply {
        let verdict = Verdict::uncounted(Outcome::Admitted, Provenance::Store);
        Reply::new(Hits::take(1), &verdict, Micros::from_secs(secs), None)
    }

    #[test]
    fn a_fifth_counter_of_a_set_takes_the_place_of_the_one_with_the_oldest_reply() {
        let mut replies = Replies::new(COUNTERS_OF_SET);
        let known = |replies: &Replies| {
            (1..=6).filter_map(|counter| Some((counter, replies.get(Fingerprint(counter))?.at))).collect::<Vec<_>>()
        };
        (1..=4).for_each(|counter| replies.put(Fingerprint(counter), reply(counter)));
        replies.put(Fingerprint(1), reply(5));
        replies.put(Fingerprint(5), reply(6));
        let expected = [(1, 5), (3, 3), (4, 4), (5, 6)].map(|(counter, secs)| (counter, Micros::from_secs(secs)));
        assert_eq!(known(&replies), expected);
    }

    #[test]
    fn counters_are_spread_over_the_sets() {
        let mut replies = Replies::new(400);
        let counter = |number: u64| Fingerprint(number.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        (1..=200).for_each(|number| replies.put(counter(number), reply(number)));
        let known = (1..=200).filter(|&number| replies.get(counter(number)).is_some()).count();
        assert!(known > 180, "{known} of 200 in 128 sets");
    }

    #[test]
    fn what_remained_is_shared_once_and_within_one_window() {
        let verdict = Verdict { remaining: 7, ..Verdict::uncounted(Outcome::Refused, Provenance::Store) };
        let (now, window) = (Micros::from_secs(10), Micros::from_secs(60));
        let mut reply = Reply::new(Hits::take(1), &verdict, now, None);
        assert_eq!(reply.take_remaining(now.saturating_add(window), window), None, "it is a window old");
        assert_eq!([(); 2].map(|()| reply.take_remaining(now, window)), [Some(7), None]);
        let reply = Reply::new(Hits::take(1), &verdict, now, None);
        assert_eq!(reply.admission(Hits::take(1), now, window), None, "it is a refusal");
    }
}
