//! A quota, the algorithm that counts it, and what happens to a charge against them.

use std::num::NonZeroU32;

use thiserror::Error;

use super::{Algorithm, MOST_OVER, State, hits32};
use crate::model::{
    Charging, Delay, Hits, InvalidDelay, InvalidQuota, Micros, Outcome, Override, Quota, Unit, Verdict, Window,
};

/// A quota and the algorithm that counts it. The algorithm can count the quota exactly.
///
/// ```
/// use tidegate::algorithm::{Algorithm, Limit};
/// use tidegate::model::{Charging, Hits, Micros, Quota, Unit, Window};
///
/// let limit = Limit::new(Algorithm::TokenBucket, Quota::new(60, Window::of_unit(Unit::Minute)).with_burst(2))?;
/// let (mut counter, noon) = (limit.fresh(), Micros::from_secs(1_700_000_000));
/// let mut hit = |now| limit.charge(&mut counter, now, Hits::take(1), Charging::Each).0;
/// assert_eq!((hit(noon).remaining, hit(noon).remaining), (1, 0));
/// assert_eq!(hit(noon).retry, Some(Micros::from_secs(1)));
/// assert!(!hit(Micros::from_secs(1_700_000_001)).outcome.is_refused());
/// # Ok::<(), tidegate::model::InvalidQuota>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Limit {
    algorithm: Algorithm,
    quota: Quota,
    count_refused: bool,
    refuses_full_peek: bool,
    delay: Option<Delay>,
}

/// The reason why no lease may pay for charges against a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum NotLeasable {
    /// The algorithm counts each hit by its own time.
    #[error(
        "{algorithm} counts each hit by its own time, and a lease charges hits before they come: remove `lease`, or choose another algorithm"
    )]
    Dated {
        /// Name of the algorithm.
        algorithm: &'static str,
    },
    /// The limit has a delay.
    #[error("a lease admits hits without a delay: remove `lease` or `delay`")]
    Delayed,
    /// The limit records refused charges.
    #[error("`count_refused` needs each charge in the store, and a lease spares the store: remove one of the two")]
    Recorded,
    /// The limit refuses a peek while one hit does not fit.
    #[error(
        "`refuse_peek_at_limit` needs the exact count in the store, and a lease holds a part of it: remove one of the two"
    )]
    Peeked,
}

impl Limit {
    /// Returns a limit of `quota`, counted by `algorithm`.
    ///
    /// # Errors
    /// The reason why `algorithm` cannot count `quota` exactly.
    pub fn new(algorithm: Algorithm, quota: Quota) -> Result<Self, InvalidQuota> {
        algorithm.check(quota)?;
        Ok(Self { algorithm, quota, count_refused: false, refuses_full_peek: false, delay: None })
    }

    /// Returns a limit of 0, which admits nothing and has no counter.
    pub const fn closed() -> Self {
        let quota = Quota::new(0, Window::of_unit(Unit::Second));
        Self { algorithm: Algorithm::FixedWindow, quota, count_refused: false, refuses_full_peek: false, delay: None }
    }

    /// Returns the part of one instance when `replicas` share the limit: limit and burst divided, rounded up.
    #[must_use]
    pub const fn shared_among(self, replicas: NonZeroU32) -> Self {
        let (limit, burst) = (self.quota.limit().div_ceil(replicas.get()), self.quota.burst().div_ceil(replicas.get()));
        Self { quota: self.quota.with_limit(limit).with_burst(burst), ..self }
    }

    /// Returns the limit for `sent`, which a request sends in place of a rule's limits. It counts as `first`, the first limit of
    /// the rule, so that it continues with the same counter. If that algorithm cannot count `sent` exactly, fixed windows count
    /// it, which accept any quota.
    pub fn of_override(first: Option<Self>, sent: Override) -> Self {
        let (algorithm, count_refused, refuses_full_peek, delay) = first.map_or_else(Default::default, |first| {
            (first.algorithm, first.count_refused, first.refuses_full_peek, first.delay)
        });
        let can_count = algorithm.check(sent.quota()).is_ok();
        let algorithm = if can_count { algorithm } else { Algorithm::FixedWindow };
        let limit = Self { algorithm, quota: sent.quota(), count_refused, refuses_full_peek, delay: None };
        // If the rule's delay is not possible here, the limit has none: it refuses requests that do not fit.
        delay.and_then(|delay| limit.delaying(delay).ok()).unwrap_or(limit)
    }

    /// Returns the same limit, which also records refused charges.
    #[must_use]
    pub const fn counting_refused(self) -> Self {
        Self { count_refused: true, ..self }
    }

    /// Returns the same limit, which also refuses a peek while one hit does not fit.
    #[must_use]
    pub const fn refusing_full_peek(self) -> Self {
        Self { refuses_full_peek: true, ..self }
    }

    /// Returns the same limit with a delay for charges that come too early. A limit of 0 still refuses.
    ///
    /// # Errors
    /// The reason why the limit cannot have this delay.
    pub fn delaying(self, delay: Delay) -> Result<Self, InvalidDelay> {
        delay.check()?;
        let (capacity, over, most) = (self.capacity(), delay.hits_over(), self.algorithm.most_over());
        match delay {
            Delay::Slot { .. } if !self.algorithm.has_slots() => {
                Err(InvalidDelay::NoSlots { algorithm: self.algorithm.name() })
            }
            Delay::Growing { .. } if u64::from(capacity) + over > u64::from(most) => {
                Err(InvalidDelay::Over { capacity, over, most })
            }
            _ => Ok(Self { delay: Some(delay), ..self }),
        }
    }

    /// Returns the same limit, which reserves no slot later than `longest` from now.
    #[must_use]
    pub fn with_slots_within(self, longest: Micros) -> Self {
        match self.delay {
            Some(Delay::Slot { max }) if max > longest => Self { delay: Some(Delay::Slot { max: longest }), ..self },
            _ => self,
        }
    }

    /// Returns the same quota and algorithm without a delay, and without the options to record refused charges and to refuse peeks.
    #[must_use]
    pub const fn plain(self) -> Self {
        Self { count_refused: false, refuses_full_peek: false, delay: None, ..self }
    }

    /// Returns true if `hits` are a peek, which the limit refuses while one hit does not fit.
    pub fn refuses_full_peek(&self, hits: Hits) -> bool {
        self.refuses_full_peek && hits == Hits::LOOK
    }

    /// Returns the delay for charges that come too early, if the limit has one.
    pub const fn delay(&self) -> Option<Delay> {
        self.delay
    }

    /// Returns the delay for a charge of `hits`. A charge that gives back does not wait, and for a limit of 0 waiting does not
    /// help.
    pub fn delay_of(&self, hits: Hits) -> Option<Delay> {
        if hits.given_back() > 0 || self.is_closed() { None } else { self.delay }
    }

    /// Returns the counting algorithm.
    pub const fn algorithm(&self) -> Algorithm {
        self.algorithm
    }

    /// Returns the quota.
    pub const fn quota(&self) -> Quota {
        self.quota
    }

    /// Returns the maximum number of hits that it admits at once.
    pub const fn capacity(&self) -> u32 {
        if self.algorithm.has_burst() { self.quota.burst() } else { self.quota.limit() }
    }

    /// Returns the longest time until a counter that admits just as much admits one more hit, if nobody asks meanwhile.
    pub const fn admits_again_within(&self) -> Micros {
        let window = self.quota.window().length();
        match self.algorithm {
            Algorithm::FixedWindow | Algorithm::SlidingWindow | Algorithm::SlidingLog => window,
            Algorithm::TokenBucket | Algorithm::LeakyBucket | Algorithm::Gcra => {
                let limit = self.quota.limit() as u64;
                Micros::new(if limit == 0 { window.get() } else { window.get().div_ceil(limit) })
            }
        }
    }

    /// Returns true if every charge is recorded, even if its request is refused.
    pub const fn records_every_charge(&self) -> bool {
        self.count_refused
    }

    /// Checks that a lease may pay for charges against the limit.
    ///
    /// # Errors
    /// The reason why the store has to decide each charge.
    pub const fn can_be_leased(&self) -> Result<(), NotLeasable> {
        match self.delay {
            _ if !self.algorithm.can_be_leased() => Err(NotLeasable::Dated { algorithm: self.algorithm.name() }),
            Some(_) => Err(NotLeasable::Delayed),
            None if self.count_refused => Err(NotLeasable::Recorded),
            None if self.refuses_full_peek => Err(NotLeasable::Peeked),
            None => Ok(()),
        }
    }

    /// Returns true if nothing passes: a limit of 0 is decided without a counter.
    pub const fn is_closed(&self) -> bool {
        self.quota.limit() == 0
    }

    /// Returns true if a refused charge stays on the counter under this charging mode.
    pub fn records_refused(&self, charging: Charging) -> bool {
        self.count_refused || (charging == Charging::Each && self.algorithm.counts_refused_when_each())
    }

    /// Returns the state of an unused counter.
    pub fn fresh(&self) -> State {
        self.algorithm.fresh()
    }

    /// Returns true if an unused counter admits `hits` at `now` or later.
    pub fn fits(&self, now: Micros, hits: Hits) -> bool {
        let unused = self.verdict(None, now, hits);
        !unused.outcome.is_refused() || unused.retry.is_some()
    }

    /// Returns the verdict for a charge of `hits` at `now`. `state` is a state of this algorithm; `None` is an unused counter.
    pub fn verdict(&self, state: Option<&State>, now: Micros, hits: Hits) -> Verdict {
        if self.refuses_full_peek(hits) {
            let one = self.unpeeked_verdict(state, now, Hits::take(1));
            if one.outcome.is_refused() {
                return one;
            }
        }
        self.unpeeked_verdict(state, now, hits)
    }

    /// Returns the verdict of a look that no limit but one of 0 refuses: what is left. `state` is as for [`Self::verdict`].
    pub fn left(&self, state: Option<&State>, now: Micros) -> Verdict {
        self.unpeeked_verdict(state, now, Hits::LOOK)
    }

    fn unpeeked_verdict(&self, state: Option<&State>, now: Micros, hits: Hits) -> Verdict {
        if self.is_closed() {
            return self.fresh().verdict(now, self.counted(hits), self.quota.with_burst(0));
        }
        match state {
            Some(state) => self.open_verdict(state, now, hits),
            None => self.open_verdict(&self.fresh(), now, hits),
        }
    }

    /// Decides a charge of `hits` at `now`. Adds the hits to the counter if they stay on it. Returns the verdict, and true if the
    /// hits stay. The hits of a look never stay, and a closed limit has no counter.
    pub fn charge(&self, state: &mut State, now: Micros, hits: Hits, charging: Charging) -> (Verdict, bool) {
        if let Some(Delay::Growing { step, max }) = self.delay_of(hits) {
            let (verdict, is_recorded) = self.growing(state, now, hits, step, max);
            if is_recorded {
                state.charge(now, self.counted(hits), self.quota);
            }
            return (verdict, is_recorded);
        }
        let verdict = self.verdict(Some(state), now, hits);
        let is_refused = verdict.outcome.is_refused();
        let is_recorded = !is_refused || self.records_refused(charging);
        if !is_recorded || hits == Hits::LOOK || self.is_closed() {
            return (verdict, false);
        }
        state.charge(now, hits, self.quota);
        // If refused hits stay, the remaining hits and the wait are those of the counter that includes them.
        let again = || Verdict { room: verdict.room, ..self.verdict(Some(state), now, hits) };
        (if is_refused { again() } else { verdict }, true)
    }

    /// Takes back `hits` that were charged at `at`. The level of the counter never falls below its level without that charge,
    /// unless hits were given back in between.
    pub fn undo(&self, state: &mut State, now: Micros, at: Micros, hits: u64) {
        state.undo(now, at, hits, self.quota);
    }

    /// Returns the hits with which a charge is decided: its own, but at most 2^31 under a growing delay. A look at a limit of 0 is
    /// decided as one hit: a client that is looked at first and charged later would otherwise never be refused.
    pub fn counted(&self, hits: Hits) -> Hits {
        match self.delay_of(hits) {
            Some(Delay::Growing { .. }) => Hits::take(hits.taken().min(MOST_OVER.into())),
            _ if self.is_closed() && hits == Hits::LOOK => Hits::take(1),
            _ => hits,
        }
    }

    /// Returns its quota with the capacity raised to `u32::MAX`, more hits than a counter ever has under this limit. The number
    /// of hits on the counter is `u32::MAX` minus the remaining hits.
    #[must_use]
    pub const fn widened(&self) -> Quota {
        if self.algorithm.has_burst() { self.quota.with_burst(u32::MAX) } else { self.quota.with_limit(u32::MAX) }
    }

    fn open_verdict(&self, state: &State, now: Micros, hits: Hits) -> Verdict {
        match self.delay_of(hits) {
            None => state.verdict(now, hits, self.quota),
            Some(Delay::Slot { max }) => state.slot(now, hits, self.quota, max),
            Some(Delay::Growing { step, max }) => self.growing(state, now, hits, step, max).0,
        }
    }

    /// Returns the verdict of a charge under a growing delay, which refuses none, and true if its hits stay.
    fn growing(&self, state: &State, now: Micros, hits: Hits, step: Micros, max: Micros) -> (Verdict, bool) {
        let (hits, widened, capacity) = (self.counted(hits), self.widened(), u64::from(self.capacity()));
        let verdict = state.verdict(now, hits, widened);
        let used = u64::from(u32::MAX - verdict.remaining);
        let most = capacity + Delay::Growing { step, max }.hits_over();
        // If the hits do not fit into the widened quota, another limit has raised the level above this delay's maximum.
        if verdict.outcome.is_refused() || used - hits.taken() >= most {
            // More hits would only prolong the debt.
            let left = state.verdict(now, Hits::LOOK, widened);
            let verdict =
                Verdict { outcome: Outcome::Admitted, remaining: 0, room: 0, retry: None, delay: max, ..left };
            return (verdict, false);
        }
        let delay = Micros::new(used.saturating_sub(capacity).saturating_mul(step.get())).min(max);
        let remaining = hits32(capacity.saturating_sub(used));
        let verdict = Verdict { remaining, room: remaining, delay, ..verdict };
        (verdict, hits != Hits::LOOK)
    }

    /// Returns the first time at which forgetting `state` changes no verdict, under any of the limits it was charged against.
    pub fn idle_at(&self, state: &State) -> Micros {
        state.idle_at(self.quota)
    }
}

#[cfg(test)]
mod tests {
    use super::{Algorithm, Limit, State};
    use crate::model::{Charging, Delay, Hits, InvalidDelay, Micros, Quota, Unit, Window};

    const NOON: Micros = Micros::from_secs(1_795_262_400);

    fn per_hour(algorithm: Algorithm, hits: u32) -> Limit {
        Limit::new(algorithm, Quota::new(hits, Window::of_unit(Unit::Hour))).expect("it can be counted")
    }

    fn growing(step_ms: u64, max_ms: u64) -> Delay {
        Delay::Growing { step: Micros::from_millis(step_ms), max: Micros::from_millis(max_ms) }
    }

    #[test]
    fn a_state_takes_32_bytes_whatever_the_algorithm() {
        assert_eq!(size_of::<State>(), 32);
    }

    #[test]
    fn each_hit_over_the_limit_waits_a_step_longer_and_what_would_wait_longer_than_the_longest_is_not_recorded() {
        for (name, algorithm) in Algorithm::ALL {
            let limit = per_hour(algorithm, 3).delaying(growing(100, 250)).expect("it can wait");
            let mut state = limit.fresh();
            let mut charge = |hits| {
                let (told, is_recorded) = limit.charge(&mut state, NOON, hits, Charging::AllOrNothing);
                assert!(!told.outcome.is_refused() && told.retry.is_none(), "{name}");
                (told.remaining, told.delay.get() / 1_000, is_recorded)
            };
            let one = Hits::take(1);
            assert_eq!([charge(one), charge(one), charge(one)], [(2, 0, true), (1, 0, true), (0, 0, true)], "{name}");
            assert_eq!([charge(one), charge(one)], [(0, 100, true), (0, 200, true)], "{name}");
            assert_eq!(charge(Hits::LOOK), (0, 200, false), "{name}");
            assert_eq!(
                [charge(one), charge(one), charge(Hits::LOOK)],
                [(0, 250, true), (0, 250, false), (0, 250, false)]
            );
            // The counter has six hits, and the last charge was not recorded.
            assert_eq!(charge(Hits::give_back(4)), (1, 0, true), "{name}");
            // The maximum cost of one charge: 2^31 of its hits are counted.
            assert_eq!(charge(Hits::take(Hits::MOST)), (0, 250, true), "{name}");
            assert_eq!(charge(Hits::take(Hits::MOST)), (0, 250, false), "{name}");
            assert_eq!(charge(Hits::give_back(1 << 31)), (1, 0, true), "{name}");
        }
    }

    #[test]
    fn a_delay_that_cannot_be_counted_is_refused_with_what_to_write_instead() {
        for (name, algorithm) in Algorithm::ALL {
            let has_slots = matches!(algorithm, Algorithm::Gcra | Algorithm::LeakyBucket);
            assert_eq!(algorithm.has_slots(), has_slots, "{name}");
            let told = per_hour(algorithm, 3).delaying(Delay::Slot { max: Micros::from_secs(1) });
            assert_eq!(told.err(), (!has_slots).then_some(InvalidDelay::NoSlots { algorithm: name }));
            let most = if algorithm == Algorithm::SlidingLog { 10_000 } else { 1 << 31 };
            assert!(per_hour(algorithm, most - 3).delaying(growing(100, 250)).is_ok(), "{name}");
            let over = InvalidDelay::Over { capacity: most - 2, over: 3, most };
            assert_eq!(per_hour(algorithm, most - 2).delaying(growing(100, 250)), Err(over));
        }
        let told = per_hour(Algorithm::SlidingLog, 10_000).delaying(growing(100, 250)).expect_err("it is full");
        let text = "this delay reaches its longest wait 3 hits above the limit of 10000, but a counter holds at most 10000 \
            hits: write a larger `step`";
        assert_eq!(told.to_string(), text);
        let told = per_hour(Algorithm::TokenBucket, 1).delaying(Delay::Slot { max: Micros::from_secs(1) });
        let text = told.expect_err("it has none").to_string();
        assert!(text.starts_with("token_bucket has no slots to wait for: choose `gcra` or `leaky_bucket`"), "{text}");
    }

    #[test]
    fn a_limit_of_nothing_refuses_whatever_is_asked_of_others() {
        for (_, algorithm) in Algorithm::ALL {
            let limit = per_hour(algorithm, 0).delaying(growing(100, 250)).expect("it can be said");
            let told = limit.charge(&mut limit.fresh(), NOON, Hits::take(1), Charging::Each);
            assert!(told.0.outcome.is_refused() && !told.1 && told.0.delay == Micros::ZERO);
        }
    }
}
