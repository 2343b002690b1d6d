//! Counts the hits of the last window's length, each by its own time.
//! From Redis' own recipe of a sorted set of timestamps; here an entry is a time with all of its hits.
//! Remembers 16 bytes for each time in the last window's length at which hits came, for at most 10,000 times.
//! Exact: in any interval of a window's length at most the limit; no capacity is lost.
//! Choose `sliding_window` if the limit is large: its memory is the same for every limit.

use std::collections::VecDeque;

use super::{Counting, MOST_LOGGED, hits32};
use crate::model::{Hits, InvalidQuota, Micros, Outcome, Provenance, Quota, Verdict};

/// Maximum number of hits in one log: 2^48, less than the range of the running numbers of the twin in Lua.
const MOST_HITS: u64 = 1 << 48;

/// Maximum number of entries that an undo changes: 1,000. An undo that would change more leaves the log as it is: it then counts
/// too many hits, never too few. The twin has the same bound, because a long undo blocks its server.
const MOST_MOVED: usize = 1_000;

/// Divisor for shrinking: a log gives memory back when it uses less than a quarter of its capacity.
const SHRINK_BELOW: usize = 4;

/// Counts each hit by its time.
pub struct SlidingLog;

/// The entries of the last window's length, and perhaps older ones.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct State {
    /// Number of hits before the first entry. This number and those of the entries wrap around at 2^64.
    before: u64,
    entries: VecDeque<TimedHits>,
}

/// The hits of one time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct TimedHits {
    at: Micros,
    /// Number of hits up to and including its last one.
    upto: u64,
}

/// The entries that are less than a window's length old.
#[derive(Clone, Copy)]
struct Live<'a> {
    state: &'a State,
    /// Number of older entries.
    first: usize,
    /// Number of hits in the live entries.
    used: u64,
}

impl Counting for SlidingLog {
    /// Boxed, so that it is no larger than the states of other algorithms, which are many.
    type State = Box<State>;
    const HAS_BURST: bool = false;
    const COUNTS_REFUSED_WHEN_EACH: bool = false;
    const CAN_BE_LEASED: bool = false;
    const MOST_OVER: u32 = MOST_LOGGED;
    // The longer the log and the more refusals it records, the more commands a charge takes: 1.2 to 8 ms for 100 (`store/redis.rs`).
    const SCRIPT_COST: usize = 10;

    fn check(quota: Quota) -> Result<(), InvalidQuota> {
        quota.is_at_most(MOST_LOGGED)
    }

    fn verdict(state: &Self::State, now: Micros, hits: Hits, quota: Quota) -> Verdict {
        let (limit, length) = (u64::from(quota.limit()), quota.window().length());
        let clock = state.clock(now);
        let live = state.live(clock, length);
        let used = live.used;
        // Giving back is admitted at any level.
        let outcome = Outcome::admitted_if(used + hits.taken() <= limit || hits.given_back() > 0);
        let left = if outcome.is_refused() { used } else { charged(used, hits) };
        let until_old = |at: Micros| at.saturating_add(length).saturating_sub(now);
        let latest = if left > used { clock } else { live.moment_of(left) };
        let remaining = hits32(limit.saturating_sub(left));
        Verdict {
            outcome,
            remaining,
            room: remaining,
            reset: if left == 0 { Micros::ZERO } else { until_old(latest) },
            // The charge fits when enough of the oldest hits have expired.
            retry: (outcome.is_refused() && hits.taken() <= limit)
                .then(|| until_old(live.moment_of(used + hits.taken() - limit))),
            delay: Micros::ZERO,
            provenance: Provenance::Store,
        }
    }

    fn charge(state: &mut Self::State, now: Micros, hits: Hits, quota: Quota) {
        let clock = state.clock(now);
        let Live { first, used, .. } = state.live(clock, quota.window().length());
        state.forget(first);
        state.set(charged(used, hits), clock);
        // Gives memory back after a burst.
        if state.entries.len() < state.entries.capacity() / SHRINK_BELOW {
            state.entries.shrink_to(state.entries.len() * 2);
        }
    }

    fn undo(state: &mut Self::State, now: Micros, at: Micros, hits: u64, quota: Quota) {
        let (clock, length) = (state.clock(now), quota.window().length());
        let first = state.live(clock, length).first;
        if at.saturating_add(length) > clock && state.take_back(at, hits) {
            // The clock of the log may now be before its earlier value: hits that were expired stay expired.
            state.forget(first);
        }
    }

    fn idle_at(state: &Self::State, quota: Quota) -> Micros {
        state.entries.back().map_or(Micros::ZERO, |entry| entry.at.saturating_add(quota.window().length()))
    }
}

impl State {
    /// Returns the clock of the log. If the system clock steps back, the log stays at its last time.
    fn clock(&self, now: Micros) -> Micros {
        self.entries.back().map_or(now, |entry| entry.at.max(now))
    }

    fn live(&self, clock: Micros, length: Micros) -> Live<'_> {
        let first = self.entries.partition_point(|entry| entry.at.saturating_add(length) <= clock);
        let before = first.checked_sub(1).map_or(self.before, |last| self.entries[last].upto);
        Live { state: self, first, used: self.upto().wrapping_sub(before) }
    }

    fn upto(&self) -> u64 {
        self.entries.back().map_or(self.before, |entry| entry.upto)
    }

    /// Drops the `first` oldest entries.
    fn forget(&mut self, first: usize) {
        if let Some(last) = first.checked_sub(1).and_then(|last| self.entries.get(last)) {
            self.before = last.upto;
        }
        self.entries.drain(..first);
    }

    /// Takes `hits` off the entry of `at`, as far as it has them. Returns false if there is no such entry or too many entries
    /// follow it.
    fn take_back(&mut self, at: Micros, hits: u64) -> bool {
        let first = self.entries.partition_point(|entry| entry.at < at);
        let moved = self.entries.len() - first;
        let found = self.entries.get(first).filter(|entry| entry.at == at && moved <= MOST_MOVED);
        let Some(entry) = found else { return false };
        let before = first.checked_sub(1).map_or(self.before, |last| self.entries[last].upto);
        let own = entry.upto.wrapping_sub(before);
        let back = own.min(hits);
        // The running numbers of the later hits decrease.
        self.entries.range_mut(first..).for_each(|entry| entry.upto = entry.upto.wrapping_sub(back));
        if back == own {
            self.entries.remove(first);
        }
        true
    }

    /// Sets the number of hits to `hits`. New hits get the time `clock`; if hits have to go, the latest go first.
    fn set(&mut self, hits: u64, clock: Micros) {
        let upto = self.before.wrapping_add(hits);
        if hits > self.upto().wrapping_sub(self.before) {
            match self.entries.back_mut() {
                Some(last) if last.at == clock => last.upto = upto,
                _ => self.entries.push_back(TimedHits { at: clock, upto }),
            }
        } else {
            let whole = self.entries.partition_point(|entry| entry.upto.wrapping_sub(self.before) < hits);
            self.entries.truncate(whole + usize::from(hits > 0));
            if let Some(last) = self.entries.back_mut() {
                last.upto = upto;
            }
        }
        // Each other entry has at least one hit, so the limit stays used up until the oldest of them expires. The hits of the
        // dropped entry expire with those of the next entry.
        if self.entries.len() > MOST_LOGGED as usize {
            self.entries.pop_front();
        }
    }
}

impl Live<'_> {
    /// Returns the time of the `hit`-th oldest hit (1 = oldest).
    fn moment_of(self, hit: u64) -> Micros {
        let before = self.state.upto().wrapping_sub(self.used);
        let hits_upto = |entry: &TimedHits| entry.upto.wrapping_sub(before);
        // Older entries have smaller numbers and are not read.
        let (mut low, mut high) = (self.first, self.state.entries.len());
        while low < high {
            let middle = low.midpoint(high);
            if hits_upto(&self.state.entries[middle]) < hit { low = middle + 1 } else { high = middle }
        }
        self.state.entries.get(low).map_or(Micros::ZERO, |entry| entry.at)
    }
}

fn charged(used: u64, hits: Hits) -> u64 {
    (used + hits.taken()).saturating_sub(hits.given_back()).min(MOST_HITS)
}

#[cfg(test)]
mod tests {
    use crate::algorithm::{Algorithm, Limit};
    use crate::model::{Delay, Micros, Override, Quota, Unit, Window};

    #[test]
    fn a_limit_that_a_request_sends_waits_as_the_rule_does_where_it_can() {
        let few = Limit::new(Algorithm::SlidingLog, Quota::new(5, Window::of_unit(Unit::Minute)));
        let delay = Delay::Growing { step: Micros::from_millis(100), max: Micros::from_millis(250) };
        let rule = few.map(|few| few.delaying(delay)).expect("it can be counted").expect("it can wait");
        let sent = |hits| {
            let limit = Limit::of_override(Some(rule), Override::new(hits, 2, 1).expect("an override"));
            (limit.algorithm(), limit.delay().is_some())
        };
        assert_eq!(sent(9_997), (Algorithm::SlidingLog, true));
        assert_eq!(sent(9_998), (Algorithm::SlidingLog, false), "three hits more are not counted in a log");
        assert_eq!(sent(10_001), (Algorithm::FixedWindow, true), "counted in windows");
    }
}
