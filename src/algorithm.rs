//! The algorithms: each is a pure step on a small state, and time is an argument.
//!
//! To add one, write its two files beside the others, in Rust and in Lua, and add two lines here: its `mod` and its row in
//! the table. Rule files, `check`, `explain` and every store then know it.

use std::num::NonZeroU32;

use crate::model::{
    Charging, Delay, Hits, InvalidDelay, InvalidQuota, Micros, Outcome, Override, Quota, Unit, Verdict, Window,
};

mod charge;
mod fixed_window;
mod gcra;
mod leaky_bucket;
mod meter;
mod sliding_log;
mod sliding_window;
mod token_bucket;

pub use charge::Charge;

/// Builds [`Algorithm`] and [`State`] and sends each call to the row it belongs to.
macro_rules! algorithms {
    ($($variant:ident = $name:literal, $count:ty;)+) => {
        /// The name of a way of counting.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Algorithm {
            $(#[doc = concat!("`", $name, "`")] $variant,)+
        }

        /// What is remembered of one counter, by the algorithm that counts it.
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub enum State {
            $(#[doc = concat!("Of `", $name, "`")] $variant(<$count as Count>::State),)+
        }

        impl Algorithm {
            /// Every algorithm, with its word in a rule file.
            pub const ALL: [(&'static str, Self); [$($name),+].len()] = [$(($name, Self::$variant)),+];

            /// Every algorithm's name and its twin in Lua, the body of a function that returns what
            /// `store/redis/driver.lua` asks of a twin.
            pub const TWINS: [(&'static str, &'static str); [$($name),+].len()] =
                [$(($name, include_str!(concat!("algorithm/", $name, ".lua")))),+];

            /// Its word in a rule file.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)+
                }
            }

            /// Whether its quotas may have a `burst`.
            pub const fn has_burst(self) -> bool {
                match self {
                    $(Self::$variant => <$count as Count>::HAS_BURST,)+
                }
            }

            /// Whether a charge that comes too early may wait for a slot.
            pub const fn has_slots(self) -> bool {
                match self {
                    $(Self::$variant => <$count as Count>::HAS_SLOTS,)+
                }
            }

            const fn most_over(self) -> u32 {
                match self {
                    $(Self::$variant => <$count as Count>::MOST_OVER,)+
                }
            }

            const fn counts_refused_when_each(self) -> bool {
                match self {
                    $(Self::$variant => <$count as Count>::COUNTS_REFUSED_WHEN_EACH,)+
                }
            }

            fn check(self, quota: Quota) -> Result<(), InvalidQuota> {
                match self {
                    $(Self::$variant => <$count as Count>::check(quota),)+
                }
            }

            fn fresh(self) -> State {
                match self {
                    $(Self::$variant => State::$variant(Default::default()),)+
                }
            }
        }

        impl State {
            fn verdict(&self, now: Micros, hits: Hits, quota: Quota) -> Verdict {
                match self {
                    $(Self::$variant(state) => <$count as Count>::verdict(state, now, hits, quota),)+
                }
            }

            fn slot(&self, now: Micros, hits: Hits, quota: Quota, max: Micros) -> Verdict {
                match self {
                    $(Self::$variant(state) => <$count as Count>::slot(state, now, hits, quota, max),)+
                }
            }

            fn charge(&mut self, now: Micros, hits: Hits, quota: Quota) {
                match self {
                    $(Self::$variant(state) => <$count as Count>::charge(state, now, hits, quota),)+
                }
            }

            fn undo(&mut self, now: Micros, at: Micros, hits: u64, quota: Quota) {
                match self {
                    $(Self::$variant(state) => <$count as Count>::undo(state, now, at, hits, quota),)+
                }
            }

            fn idle_at(&self, quota: Quota) -> Micros {
                match self {
                    $(Self::$variant(state) => <$count as Count>::idle_at(state, quota),)+
                }
            }
        }
    };
}
algorithms! {
    FixedWindow = "fixed_window", fixed_window::FixedWindow;
    SlidingWindow = "sliding_window", sliding_window::SlidingWindow;
    SlidingLog = "sliding_log", sliding_log::SlidingLog;
    TokenBucket = "token_bucket", token_bucket::TokenBucket;
    LeakyBucket = "leaky_bucket", leaky_bucket::LeakyBucket;
    Gcra = "gcra", gcra::Gcra;
}

/// What several of [`Algorithm::TWINS`] share, by the name they call it: again the body of a function.
pub const SHARED_TWINS: [(&str, &str); 1] = [("meter", include_str!("algorithm/meter.lua"))];

impl Default for Algorithm {
    /// The reference's.
    fn default() -> Self {
        Self::FixedWindow
    }
}

/// A quota and the algorithm that counts it, known to be countable exactly.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Limit {
    algorithm: Algorithm,
    quota: Quota,
    count_refused: bool,
    delay: Option<Delay>,
}

impl Limit {
    /// A limit.
    ///
    /// # Errors
    /// What keeps `algorithm` from counting `quota` exactly.
    pub fn new(algorithm: Algorithm, quota: Quota) -> Result<Self, InvalidQuota> {
        algorithm.check(quota)?;
        Ok(Self { algorithm, quota, count_refused: false, delay: None })
    }

    /// The limit of 0, which admits nothing and has no counter.
    pub const fn closed() -> Self {
        let quota = Quota::new(0, Window::of_unit(Unit::Second));
        Self { algorithm: Algorithm::FixedWindow, quota, count_refused: false, delay: None }
    }

    /// One instance's part of it when `replicas` share it: limit and burst divided, rounded up.
    #[must_use]
    pub const fn shared_among(self, replicas: NonZeroU32) -> Self {
        let (limit, burst) = (self.quota.limit().div_ceil(replicas.get()), self.quota.burst().div_ceil(replicas.get()));
        Self { quota: self.quota.with_limit(limit).with_burst(burst), ..self }
    }

    /// The limit that a request sends in place of a rule's: it counts as the rule's first limit does, so that it goes on
    /// with the same counter. What that algorithm cannot count exactly is counted in fixed windows, which can be any.
    pub fn of_override(first: Option<Self>, sent: Override) -> Self {
        let (algorithm, count_refused, delay) =
            first.map_or_else(Default::default, |first| (first.algorithm, first.count_refused, first.delay));
        let can_count = algorithm.check(sent.quota()).is_ok();
        let algorithm = if can_count { algorithm } else { Algorithm::FixedWindow };
        let limit = Self { algorithm, quota: sent.quota(), count_refused, delay: None };
        // What cannot wait as the rule asks is refused as without a delay.
        delay.and_then(|delay| limit.delaying(delay).ok()).unwrap_or(limit)
    }

    /// The same limit, recording refused charges too.
    #[must_use]
    pub const fn counting_refused(self) -> Self {
        Self { count_refused: true, ..self }
    }

    /// The same limit, asking what comes too early to wait. One of 0 refuses all the same.
    ///
    /// # Errors
    /// What keeps the limit from asking so.
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

    /// The same quota and algorithm, counting what is admitted only and asking nobody to wait.
    #[must_use]
    pub const fn plain(self) -> Self {
        Self { count_refused: false, delay: None, ..self }
    }

    /// How it asks what comes too early to wait, if it does.
    pub const fn delay(&self) -> Option<Delay> {
        self.delay
    }

    /// How it asks a charge of these hits to wait: who gives back does not wait, and for a limit of 0 waiting does not help.
    pub fn delay_of(&self, hits: Hits) -> Option<Delay> {
        if hits.given_back() > 0 || self.is_closed() { None } else { self.delay }
    }

    /// How hits are counted.
    pub const fn algorithm(&self) -> Algorithm {
        self.algorithm
    }

    /// What is counted against.
    pub const fn quota(&self) -> Quota {
        self.quota
    }

    /// The most hits it admits at once.
    pub const fn capacity(&self) -> u32 {
        if self.algorithm.has_burst() { self.quota.burst() } else { self.quota.limit() }
    }

    /// Whether every charge is recorded, whatever becomes of its request.
    pub const fn counts_refused(&self) -> bool {
        self.count_refused
    }

    /// Whether nothing passes: a limit of 0 is decided without a counter.
    pub const fn is_closed(&self) -> bool {
        self.quota.limit() == 0
    }

    /// Whether a refused charge stays on the counter when the limits of a request are charged so.
    pub fn records_refused(&self, charging: Charging) -> bool {
        self.count_refused || (charging == Charging::Each && self.algorithm.counts_refused_when_each())
    }

    /// The state of a counter that nobody has used.
    pub fn fresh(&self) -> State {
        self.algorithm.fresh()
    }

    /// What a charge of `hits` at `now` is told, on the counter `state` of this algorithm or on one that nobody has used.
    pub fn verdict(&self, state: Option<&State>, now: Micros, hits: Hits) -> Verdict {
        if self.is_closed() {
            return self.fresh().verdict(now, hits, self.quota.with_burst(0));
        }
        match state {
            Some(state) => self.told(state, now, hits),
            None => self.told(&self.fresh(), now, hits),
        }
    }

    /// Decides a charge of `hits` at `now`, puts them on the counter if they stay there, and says what the charge is told, and
    /// whether they stay. Those of a look never do, and a closed limit has no counter.
    pub fn charge(&self, state: &mut State, now: Micros, hits: Hits, charging: Charging) -> (Verdict, bool) {
        if let Some(Delay::Growing { step, max }) = self.delay_of(hits) {
            let (verdict, is_kept) = self.growing(state, now, hits, step, max);
            if is_kept {
                state.charge(now, self.counted(hits), self.quota);
            }
            return (verdict, is_kept);
        }
        let verdict = self.verdict(Some(state), now, hits);
        let is_refused = verdict.outcome.is_refused();
        let is_kept = !is_refused || self.records_refused(charging);
        if !is_kept || hits == Hits::LOOK || self.is_closed() {
            return (verdict, false);
        }
        state.charge(now, hits, self.quota);
        // Where refused hits stay, what is left and how long to wait are those of the counter with the hits on it.
        let again = || Verdict { room: verdict.room, ..self.verdict(Some(state), now, hits) };
        (if is_refused { again() } else { verdict }, true)
    }

    /// Takes back `hits` that were charged at `at`. The state is then never below what it would be without that charge, unless
    /// hits were given back in between.
    pub fn undo(&self, state: &mut State, now: Micros, at: Micros, hits: u64) {
        state.undo(now, at, hits, self.quota);
    }

    /// As many of the hits of one charge as are counted: all of them, but at most 2^31 where none are refused.
    pub fn counted(&self, hits: Hits) -> Hits {
        match self.delay_of(hits) {
            Some(Delay::Growing { .. }) => Hits::take(hits.taken().min(MOST_OVER.into())),
            _ => hits,
        }
    }

    /// Its quota with room for more hits than a counter ever has under it: what remains of that tells how many there are.
    #[must_use]
    pub const fn widened(&self) -> Quota {
        if self.algorithm.has_burst() { self.quota.with_burst(u32::MAX) } else { self.quota.with_limit(u32::MAX) }
    }

    fn told(&self, state: &State, now: Micros, hits: Hits) -> Verdict {
        match self.delay_of(hits) {
            None => state.verdict(now, hits, self.quota),
            Some(Delay::Slot { max }) => state.slot(now, hits, self.quota, max),
            Some(Delay::Growing { step, max }) => self.growing(state, now, hits, step, max).0,
        }
    }

    /// What a charge is told where none is refused, and whether its hits stay.
    fn growing(&self, state: &State, now: Micros, hits: Hits, step: Micros, max: Micros) -> (Verdict, bool) {
        let (hits, widened, capacity) = (self.counted(hits), self.widened(), u64::from(self.capacity()));
        let told = state.verdict(now, hits, widened);
        let used = u64::from(u32::MAX - told.remaining);
        let most = capacity + Delay::Growing { step, max }.hits_over();
        // What does not even fit so stands higher than this delay lets it, under another limit.
        if told.outcome.is_refused() || used - hits.taken() >= most {
            // More would only prolong the debt.
            let left = state.verdict(now, Hits::LOOK, widened);
            let verdict =
                Verdict { outcome: Outcome::Admitted, remaining: 0, room: 0, retry: None, delay: max, ..left };
            return (verdict, false);
        }
        let delay = Micros::new(used.saturating_sub(capacity).saturating_mul(step.get())).min(max);
        let remaining = hits32(capacity.saturating_sub(used));
        let verdict = Verdict { remaining, room: remaining, delay, ..told };
        (verdict, hits != Hits::LOOK)
    }

    /// The first moment at which forgetting `state` changes no verdict, under none of the limits it was charged against.
    pub fn idle_at(&self, state: &State) -> Micros {
        state.idle_at(self.quota)
    }
}

/// A way of counting hits. It reads no clock and knows of no store, and what a state says of the hits already used does not
/// depend on the limit it was written under, so a changed limit goes on with them.
pub trait Count {
    /// What is remembered of one counter; the default is a counter nobody has used.
    type State: Clone + Default;

    /// Whether a quota may have a burst of its own.
    const HAS_BURST: bool;

    /// Whether a charge that comes too early may wait for a slot.
    const HAS_SLOTS: bool = false;

    /// The most hits of a counter that goes on counting above its limit.
    const MOST_OVER: u32 = MOST_OVER;

    /// Whether refused hits stay where each limit is charged on its own.
    const COUNTS_REFUSED_WHEN_EACH: bool;

    /// Whether `quota` can be counted exactly.
    fn check(quota: Quota) -> Result<(), InvalidQuota>;

    /// What a charge is told.
    fn verdict(state: &Self::State, now: Micros, hits: Hits, quota: Quota) -> Verdict;

    /// What a charge is told that may wait for its slot, `max` at most. Only asked where there are slots.
    fn slot(state: &Self::State, now: Micros, hits: Hits, quota: Quota, max: Micros) -> Verdict {
        let _ = max;
        Self::verdict(state, now, hits, quota)
    }

    /// Puts the hits on the counter, whatever the verdict says of them: what it says remains when they are admitted is then
    /// what a look finds.
    fn charge(state: &mut Self::State, now: Micros, hits: Hits, quota: Quota);

    /// Takes back `hits` that were charged at `at`, as far as they still count: never more than that charge added. Equal to
    /// `undo` of the twin in Lua.
    fn undo(state: &mut Self::State, now: Micros, at: Micros, hits: u64, quota: Quota);

    /// The first moment at which forgetting `state` changes no verdict, under none of the limits it was charged against. Of
    /// `quota` only the window counts.
    fn idle_at(state: &Self::State, quota: Quota) -> Micros;
}

/// The most that is ever counted on one counter: 2^52, exact in Lua's numbers with one more charge on top.
const MOST_COUNTED: u64 = 1 << 52;

/// The most hits of a counter that goes on counting above its limit, and of one charge on it: 2^31, so that both together
/// are told in the 32 bits of what remains.
const MOST_OVER: u32 = 1 << 31;

/// The largest limit of a log, and the most entries it has: 10,000 (`docs/algorithms.md` says what that many take).
const MOST_LOGGED: u32 = 10_000;

/// Hits as the protocol tells them: 32 bits.
fn hits32(hits: u64) -> u32 {
    u32::try_from(hits).unwrap_or(u32::MAX)
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
                let (told, is_kept) = limit.charge(&mut state, NOON, hits, Charging::AllOrNothing);
                assert!(!told.outcome.is_refused() && told.retry.is_none(), "{name}");
                (told.remaining, told.delay.get() / 1_000, is_kept)
            };
            let one = Hits::take(1);
            assert_eq!([charge(one), charge(one), charge(one)], [(2, 0, true), (1, 0, true), (0, 0, true)], "{name}");
            assert_eq!([charge(one), charge(one)], [(0, 100, true), (0, 200, true)], "{name}");
            assert_eq!(charge(Hits::LOOK), (0, 200, false), "{name}");
            assert_eq!(
                [charge(one), charge(one), charge(Hits::LOOK)],
                [(0, 250, true), (0, 250, false), (0, 250, false)]
            );
            // Six stand on it, and the last was not recorded.
            assert_eq!(charge(Hits::give_back(4)), (1, 0, true), "{name}");
            // The most that one charge can cost: 2^31 of it are counted.
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
        let text = "a delay that reaches its longest wait 3 hits above a limit of 10000 cannot be counted: together at \
            most 10000; a larger step takes fewer hits";
        assert_eq!(told.to_string(), text);
        let told = per_hour(Algorithm::TokenBucket, 1).delaying(Delay::Slot { max: Micros::from_secs(1) });
        let text = told.expect_err("it has none").to_string();
        assert!(text.starts_with("token_bucket has no slots to wait for: choose gcra or leaky_bucket"), "{text}");
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
