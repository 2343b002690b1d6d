//! Counting algorithms. Each is a pure step on a small state, and time is an argument.
//!
//! To add an algorithm, write its two files beside the others, in Rust and in Lua, and add two lines here: its `mod` and its row
//! in the table. Rule files, `check`, `explain` and every store then know it.

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

/// Builds [`Algorithm`] and [`State`], and dispatches each call to the row of the variant.
macro_rules! algorithms {
    ($($variant:ident = $name:literal, $count:ty;)+) => {
        /// Name of a counting algorithm.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Algorithm {
            $(#[doc = concat!("`", $name, "`")] $variant,)+
        }

        /// State of one counter, by the algorithm that counts it.
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub enum State {
            $(#[doc = concat!("Of `", $name, "`")] $variant(<$count as Count>::State),)+
        }

        impl Algorithm {
            /// All algorithms, each with its word in a rule file.
            pub const ALL: [(&'static str, Self); [$($name),+].len()] = [$(($name, Self::$variant)),+];

            /// Names of all algorithms and their twins in Lua. A twin is the body of a function that returns the functions that
            /// `store/redis/driver.lua` requires.
            pub const TWINS: [(&'static str, &'static str); [$($name),+].len()] =
                [$(($name, include_str!(concat!("algorithm/", $name, ".lua")))),+];

            /// Returns its word in a rule file.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)+
                }
            }

            /// Returns true if its quotas may have a `burst`.
            pub const fn has_burst(self) -> bool {
                match self {
                    $(Self::$variant => <$count as Count>::HAS_BURST,)+
                }
            }

            /// Returns true if a charge that comes too early may wait for a slot.
            pub const fn has_slots(self) -> bool {
                match self {
                    $(Self::$variant => <$count as Count>::HAS_SLOTS,)+
                }
            }

            /// Returns the longest time of a charge in Redis, as a multiple of that of a fixed window.
            pub const fn script_cost(self) -> usize {
                match self {
                    $(Self::$variant => <$count as Count>::SCRIPT_COST,)+
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

/// Lua code that several of [`Algorithm::TWINS`] share, by the name of the function: each text is the body of that function.
pub const SHARED_TWINS: [(&str, &str); 1] = [("meter", include_str!("algorithm/meter.lua"))];

impl Default for Algorithm {
    /// Returns the reference's algorithm.
    fn default() -> Self {
        Self::FixedWindow
    }
}

/// A quota and the algorithm that counts it. The algorithm can count the quota exactly.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Limit {
    algorithm: Algorithm,
    quota: Quota,
    count_refused: bool,
    delay: Option<Delay>,
}

impl Limit {
    /// Returns a limit of `quota`, counted by `algorithm`.
    ///
    /// # Errors
    /// The reason why `algorithm` cannot count `quota` exactly.
    pub fn new(algorithm: Algorithm, quota: Quota) -> Result<Self, InvalidQuota> {
        algorithm.check(quota)?;
        Ok(Self { algorithm, quota, count_refused: false, delay: None })
    }

    /// Returns a limit of 0, which admits nothing and has no counter.
    pub const fn closed() -> Self {
        let quota = Quota::new(0, Window::of_unit(Unit::Second));
        Self { algorithm: Algorithm::FixedWindow, quota, count_refused: false, delay: None }
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
        let (algorithm, count_refused, delay) =
            first.map_or_else(Default::default, |first| (first.algorithm, first.count_refused, first.delay));
        let can_count = algorithm.check(sent.quota()).is_ok();
        let algorithm = if can_count { algorithm } else { Algorithm::FixedWindow };
        let limit = Self { algorithm, quota: sent.quota(), count_refused, delay: None };
        // If the rule's delay is not possible here, the limit has none: it refuses requests that do not fit.
        delay.and_then(|delay| limit.delaying(delay).ok()).unwrap_or(limit)
    }

    /// Returns the same limit, which also records refused charges.
    #[must_use]
    pub const fn counting_refused(self) -> Self {
        Self { count_refused: true, ..self }
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

    /// Returns the same quota and algorithm without a delay and without the option to record refused charges.
    #[must_use]
    pub const fn plain(self) -> Self {
        Self { count_refused: false, delay: None, ..self }
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

    /// Returns true if every charge is recorded, even if its request is refused.
    pub const fn counts_refused(&self) -> bool {
        self.count_refused
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

    /// Returns the verdict for a charge of `hits` at `now`. `state` is a state of this algorithm; `None` is an unused counter.
    pub fn verdict(&self, state: Option<&State>, now: Micros, hits: Hits) -> Verdict {
        if self.is_closed() {
            return self.fresh().verdict(now, hits, self.quota.with_burst(0));
        }
        match state {
            Some(state) => self.told(state, now, hits),
            None => self.told(&self.fresh(), now, hits),
        }
    }

    /// Decides a charge of `hits` at `now`. Adds the hits to the counter if they stay on it. Returns the verdict, and true if the
    /// hits stay. The hits of a look never stay, and a closed limit has no counter.
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
        // If refused hits stay, the remaining hits and the wait are those of the counter that includes them.
        let again = || Verdict { room: verdict.room, ..self.verdict(Some(state), now, hits) };
        (if is_refused { again() } else { verdict }, true)
    }

    /// Takes back `hits` that were charged at `at`. The level of the counter never falls below its level without that charge,
    /// unless hits were given back in between.
    pub fn undo(&self, state: &mut State, now: Micros, at: Micros, hits: u64) {
        state.undo(now, at, hits, self.quota);
    }

    /// Returns the hits of one charge that are counted: all of them, but at most 2^31 under a growing delay.
    pub fn counted(&self, hits: Hits) -> Hits {
        match self.delay_of(hits) {
            Some(Delay::Growing { .. }) => Hits::take(hits.taken().min(MOST_OVER.into())),
            _ => hits,
        }
    }

    /// Returns its quota with the capacity raised to `u32::MAX`, more hits than a counter ever has under this limit. The number
    /// of hits on the counter is `u32::MAX` minus the remaining hits.
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

    /// Returns the verdict of a charge under a growing delay, which refuses none, and true if its hits stay.
    fn growing(&self, state: &State, now: Micros, hits: Hits, step: Micros, max: Micros) -> (Verdict, bool) {
        let (hits, widened, capacity) = (self.counted(hits), self.widened(), u64::from(self.capacity()));
        let told = state.verdict(now, hits, widened);
        let used = u64::from(u32::MAX - told.remaining);
        let most = capacity + Delay::Growing { step, max }.hits_over();
        // If the hits do not fit into the widened quota, another limit has raised the level above this delay's maximum.
        if told.outcome.is_refused() || used - hits.taken() >= most {
            // More hits would only prolong the debt.
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

    /// Returns the first time at which forgetting `state` changes no verdict, under any of the limits it was charged against.
    pub fn idle_at(&self, state: &State) -> Micros {
        state.idle_at(self.quota)
    }
}

/// A counting algorithm. It reads no clock and knows no store. A state stores used hits independently of the limit that wrote
/// them, so a changed limit continues with the same hits.
pub trait Count {
    /// State of one counter; the default is an unused counter.
    type State: Clone + Default;

    /// True if a quota may have a burst of its own.
    const HAS_BURST: bool;

    /// True if a charge that comes too early may wait for a slot.
    const HAS_SLOTS: bool = false;

    /// Maximum number of hits on a counter that continues to count above its limit.
    const MOST_OVER: u32 = MOST_OVER;

    /// The longest time of a charge in Redis, as a multiple of that of a fixed window.
    const SCRIPT_COST: usize = 1;

    /// True if refused hits stay on the counter when each limit is charged on its own.
    const COUNTS_REFUSED_WHEN_EACH: bool;

    /// Checks that `quota` can be counted exactly.
    fn check(quota: Quota) -> Result<(), InvalidQuota>;

    /// Returns the verdict of a charge.
    fn verdict(state: &Self::State, now: Micros, hits: Hits, quota: Quota) -> Verdict;

    /// Returns the verdict of a charge that may wait for its slot, at most `max`. Called only if the algorithm has slots.
    fn slot(state: &Self::State, now: Micros, hits: Hits, quota: Quota, max: Micros) -> Verdict {
        let _ = max;
        Self::verdict(state, now, hits, quota)
    }

    /// Adds the hits to the counter for any verdict. If the verdict admits them, a look then finds the `remaining` of
    /// that verdict.
    fn charge(state: &mut Self::State, now: Micros, hits: Hits, quota: Quota);

    /// Takes back `hits` that were charged at `at`, as far as they still count: never more than that charge added. Equal to
    /// `undo` of the twin in Lua.
    fn undo(state: &mut Self::State, now: Micros, at: Micros, hits: u64, quota: Quota);

    /// Returns the first time at which forgetting `state` changes no verdict, under any of the limits it was charged against.
    /// Uses only the window of `quota`.
    fn idle_at(state: &Self::State, quota: Quota) -> Micros;
}

/// Maximum number of hits or grains that one counter holds: 2^52, exact in Lua's numbers with one more charge on top.
const MOST_COUNTED: u64 = 1 << 52;

/// Maximum number of hits on a counter that continues to count above its limit, and of one charge on it: 2^31, so that the sum of
/// both fits in the 32 bits of the remaining hits.
const MOST_OVER: u32 = 1 << 31;

/// Largest limit of a log, and maximum number of its entries: 10,000 (`docs/algorithms.md` gives their memory).
const MOST_LOGGED: u32 = 10_000;

/// Returns hits as the 32 bits of the protocol, at most `u32::MAX`.
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
