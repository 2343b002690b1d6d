//! Counting algorithms. Each is a pure step on a small state, and time is an argument.
//!
//! To add an algorithm, write its two files beside the others, in Rust and in Lua, and add two lines here: its `mod` and its row
//! in the table. Rule files, `check`, `explain` and every store then know it.

use crate::model::{Hits, InvalidQuota, Micros, Quota, Verdict};

mod charge;
mod fixed_window;
mod gcra;
mod leaky_bucket;
mod limit;
mod meter;
mod sliding_log;
mod sliding_window;
mod token_bucket;

pub use charge::{Charge, Refusals};
pub use limit::Limit;

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
            $(#[doc = concat!("Of `", $name, "`")] $variant(<$count as Counting>::State),)+
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
                    $(Self::$variant => <$count as Counting>::HAS_BURST,)+
                }
            }

            /// Returns true if a charge that comes too early may wait for a slot.
            pub const fn has_slots(self) -> bool {
                match self {
                    $(Self::$variant => <$count as Counting>::HAS_SLOTS,)+
                }
            }

            /// Returns the longest time of a charge in Redis, as a multiple of that of a fixed window.
            pub const fn script_cost(self) -> usize {
                match self {
                    $(Self::$variant => <$count as Counting>::SCRIPT_COST,)+
                }
            }

            const fn most_over(self) -> u32 {
                match self {
                    $(Self::$variant => <$count as Counting>::MOST_OVER,)+
                }
            }

            /// Returns true if hits may be charged before they come.
            pub const fn can_be_leased(self) -> bool {
                match self {
                    $(Self::$variant => <$count as Counting>::CAN_BE_LEASED,)+
                }
            }

            const fn counts_refused_when_each(self) -> bool {
                match self {
                    $(Self::$variant => <$count as Counting>::COUNTS_REFUSED_WHEN_EACH,)+
                }
            }

            fn check(self, quota: Quota) -> Result<(), InvalidQuota> {
                match self {
                    $(Self::$variant => <$count as Counting>::check(quota),)+
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
                    $(Self::$variant(state) => <$count as Counting>::verdict(state, now, hits, quota),)+
                }
            }

            fn slot(&self, now: Micros, hits: Hits, quota: Quota, max: Micros) -> Verdict {
                match self {
                    $(Self::$variant(state) => <$count as Counting>::slot(state, now, hits, quota, max),)+
                }
            }

            fn charge(&mut self, now: Micros, hits: Hits, quota: Quota) {
                match self {
                    $(Self::$variant(state) => <$count as Counting>::charge(state, now, hits, quota),)+
                }
            }

            fn undo(&mut self, now: Micros, at: Micros, hits: u64, quota: Quota) {
                match self {
                    $(Self::$variant(state) => <$count as Counting>::undo(state, now, at, hits, quota),)+
                }
            }

            fn idle_at(&self, quota: Quota) -> Micros {
                match self {
                    $(Self::$variant(state) => <$count as Counting>::idle_at(state, quota),)+
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

/// A counting algorithm. It reads no clock and knows no store. A state stores used hits independently of the limit that wrote
/// them, so a changed limit continues with the same hits.
pub trait Counting {
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

    /// True if hits may be charged before they come: the algorithm does not count each hit by its own time.
    const CAN_BE_LEASED: bool = true;

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
