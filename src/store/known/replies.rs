//! The last reply of the store to a charge of each counter.
//!
//! Every charge writes here. So it is one table of small sets and no list: nearly every charge reads and writes one line of memory,
//! where a list of the least recently used has to change its neighbours too (`docs/decisions/0034`).

use crate::model::{Hits, Micros, Outcome, Provenance, Verdict};

/// The counters of one set: 4. A fifth takes the place of the one with the oldest reply.
const COUNTERS_OF_SET: usize = 4;

/// Stands for no wait: a wait has at most 2^63 microseconds.
const NO_RETRY: Micros = Micros::new(u64::MAX);

/// A keyed hash (SipHash) of a counter's key, mixed with a hash of its limit, in place of both: clients choose the names of counters, and must find no two
/// with the same hash. The chance that any two of 65,536 counters have it is 1 in 8 billion (2^31 pairs, 2^64 hashes).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CounterHash(pub u64);

/// The parts of a store's reply that are needed later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LastReply {
    /// Time at which the call was sent that it answers.
    at: Micros,
    reset: Micros,
    /// The end of the window in which hits were given back; 0 where none were.
    refunded_until: Micros,
    /// [`NO_RETRY`] where the reply has none.
    retry: Micros,
    hits: Hits,
    remaining: u32,
    room: u32,
    outcome: Outcome,
    /// True if this instance has taken its share of the remaining hits.
    is_shared: bool,
}

/// The last replies of one shard.
pub struct LastReplies {
    sets: Box<[Set]>,
}

/// The replies of counters whose hashes have the same high bits.
type Set = [Place; COUNTERS_OF_SET];

/// The last reply to one counter. It fills one line of a processor's cache.
#[derive(Clone, Copy, Default)]
#[repr(align(64))]
struct Place {
    /// Zero in a free place.
    counter: CounterHash,
    reply: LastReply,
}
const _: () = assert!(size_of::<Place>() == 64);

impl Default for LastReply {
    fn default() -> Self {
        let nothing = Verdict::uncounted(Outcome::Failed, Provenance::Store);
        Self::new(Hits::LOOK, &nothing, Micros::ZERO, None)
    }
}

impl LastReply {
    /// Keeps the reply `verdict` to a charge of `hits` that was sent at `at`. `refunded_until` is the end of the window in which hits were
    /// given back, if any were.
    pub fn new(hits: Hits, verdict: &Verdict, at: Micros, refunded_until: Option<Micros>) -> Self {
        let Verdict { outcome, remaining, room, reset, retry, .. } = *verdict;
        let (refunded_until, retry) = (refunded_until.unwrap_or(Micros::ZERO), retry.unwrap_or(NO_RETRY));
        Self { at, reset, refunded_until, retry, hits, remaining, room, outcome, is_shared: false }
    }

    /// Stands for a charge at `at` that got no reply.
    pub fn unknown(at: Micros) -> Self {
        let nothing = Verdict::uncounted(Outcome::Failed, Provenance::Store);
        Self { is_shared: true, ..Self::new(Hits::LOOK, &nothing, at, None) }
    }

    /// Returns the end of the window in which hits were given back, if that is later than `now`.
    pub fn refunded_until(&self, now: Micros) -> Option<Micros> {
        (self.refunded_until > now).then_some(self.refunded_until)
    }

    /// Returns the verdict as it was at `self.at`, if the charge was of the same number of `hits` and is younger than `believed`.
    pub fn verdict(&self, hits: Hits, now: Micros, believed: Micros) -> Option<Verdict> {
        let Self { reset, retry, remaining, room, outcome, .. } = *self;
        (self.is_younger(now, believed) && self.hits == hits).then(|| Verdict {
            remaining,
            room,
            reset,
            retry: (retry != NO_RETRY).then_some(retry),
            ..Verdict::uncounted(outcome, Provenance::Store)
        })
    }

    /// Returns true if its call was sent less than `length` before `now`.
    pub fn is_younger(&self, now: Micros, length: Micros) -> bool {
        self.at <= now && now < self.at.saturating_add(length)
    }

    /// Returns true if it is an admission, and its call was sent less than `length` before `now`.
    pub fn was_admitted_within(&self, now: Micros, length: Micros) -> bool {
        self.outcome == Outcome::Admitted && self.is_younger(now, length)
    }

    /// Returns the remaining hits; 0 where the charge got no reply.
    pub const fn remaining(&self) -> u32 {
        self.remaining
    }

    /// Returns the time at which the call was sent that it answers.
    pub const fn at(&self) -> Micros {
        self.at
    }

    /// Returns the remaining hits if the reply is younger than one `window`; only once.
    pub fn take_remaining(&mut self, now: Micros, window: Micros) -> Option<u32> {
        let is_over = self.at.saturating_add(window) <= now;
        (!is_over && !std::mem::replace(&mut self.is_shared, true)).then_some(self.remaining)
    }
}

impl LastReplies {
    /// Creates room for `most` replies, or up to twice as many: the number of sets is a power of 2.
    pub fn new(most: usize) -> Self {
        Self {
            sets: vec![[Place::default(); COUNTERS_OF_SET]; most.div_ceil(COUNTERS_OF_SET).next_power_of_two()]
                .into_boxed_slice(),
        }
    }

    /// Returns the last reply to a charge of a counter, if it is known.
    pub fn get(&self, counter: CounterHash) -> Option<&LastReply> {
        let set = self.set(counter);
        Some(&self.sets[set][find(&self.sets[set], counter)?].reply)
    }

    /// As [`LastReplies::get`].
    pub fn get_mut(&mut self, counter: CounterHash) -> Option<&mut LastReply> {
        let set = self.set(counter);
        let place = find(&self.sets[set], counter)?;
        Some(&mut self.sets[set][place].reply)
    }

    /// Stores a reply in place of the counter's last one, or else of the oldest in the set.
    pub fn put(&mut self, counter: CounterHash, reply: LastReply) {
        let set = self.set(counter);
        let places = &mut self.sets[set];
        let place = find(places, counter).unwrap_or_else(|| oldest(places, counter));
        places[place] = Place { counter, reply };
    }

    /// The high bits choose the set.
    fn set(&self, counter: CounterHash) -> usize {
        usize::try_from(counter.0 >> 32).unwrap_or(0) & (self.sets.len() - 1)
    }
}

/// Returns the place of a counter in its set. The search begins where a counter is put while all places are free.
fn find(set: &Set, counter: CounterHash) -> Option<usize> {
    places(counter).find(|&place| set[place].counter == counter)
}

/// Returns the place of the oldest reply. A free place counts as oldest.
fn oldest(set: &Set, counter: CounterHash) -> usize {
    places(counter).min_by_key(|&place| set[place].reply.at).unwrap_or(0)
}

/// Returns all places of a set, in the order in which this counter takes them.
fn places(counter: CounterHash) -> impl Iterator<Item = usize> {
    let first = usize::try_from(counter.0 >> 16).unwrap_or(0);
    (0..COUNTERS_OF_SET).map(move |next| first.wrapping_add(next) % COUNTERS_OF_SET)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reply(secs: u64) -> LastReply {
        let verdict = Verdict::uncounted(Outcome::Admitted, Provenance::Store);
        LastReply::new(Hits::take(1), &verdict, Micros::from_secs(secs), None)
    }

    #[test]
    fn a_fifth_counter_of_a_set_takes_the_place_of_the_one_with_the_oldest_reply() {
        let mut replies = LastReplies::new(COUNTERS_OF_SET);
        let known = |replies: &LastReplies| {
            (1..=6).filter_map(|counter| Some((counter, replies.get(CounterHash(counter))?.at))).collect::<Vec<_>>()
        };
        (1..=4).for_each(|counter| replies.put(CounterHash(counter), reply(counter)));
        replies.put(CounterHash(1), reply(5));
        replies.put(CounterHash(5), reply(6));
        let expected = [(1, 5), (3, 3), (4, 4), (5, 6)].map(|(counter, secs)| (counter, Micros::from_secs(secs)));
        assert_eq!(known(&replies), expected);
    }

    #[test]
    fn counters_are_spread_over_the_sets() {
        let mut replies = LastReplies::new(400);
        let counter = |number: u64| CounterHash(number.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        (1..=200).for_each(|number| replies.put(counter(number), reply(number)));
        let known = (1..=200).filter(|&number| replies.get(counter(number)).is_some()).count();
        assert!(known > 180, "{known} of 200 in 128 sets");
    }

    #[test]
    fn what_remained_is_shared_once_and_within_one_window() {
        let verdict = Verdict { remaining: 7, ..Verdict::uncounted(Outcome::Refused, Provenance::Store) };
        let (now, window) = (Micros::from_secs(10), Micros::from_secs(60));
        let mut reply = LastReply::new(Hits::take(1), &verdict, now, None);
        assert_eq!(reply.take_remaining(now.saturating_add(window), window), None, "it is a window old");
        assert_eq!([(); 2].map(|()| reply.take_remaining(now, window)), [Some(7), None]);
    }

    #[test]
    fn a_reply_is_believed_for_the_same_hits_for_a_while() {
        let retry = Some(Micros::from_secs(3));
        let verdict =
            Verdict { remaining: 7, room: 2, retry, ..Verdict::uncounted(Outcome::Refused, Provenance::Store) };
        let (now, believed, hits) = (Micros::from_secs(10), Micros::from_secs(1), Hits::take(8));
        let reply = LastReply::new(hits, &verdict, now, None);
        assert_eq!(reply.verdict(hits, now, believed), Some(verdict));
        assert_eq!(reply.verdict(Hits::take(1), now, believed), None);
        assert_eq!(reply.verdict(hits, Micros::from_secs(11), believed), None);
        assert_eq!(reply.verdict(hits, Micros::from_secs(9), believed), None, "the clock was stepped back");
    }
}
