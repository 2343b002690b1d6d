//! Quotas: a number of hits per window.

use std::fmt;

use thiserror::Error;

use super::time::Micros;

/// The units of Envoy's protocol; lengths are fixed and aligned to the epoch, as in the reference.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Unit {
    /// One second.
    Second,
    /// 60 s.
    Minute,
    /// 3,600 s.
    Hour,
    /// 86,400 s.
    Day,
    /// 7 days, counted from Thursday, 1 January 1970.
    Week,
    /// 30 days, not a calendar month.
    Month,
    /// 365 days, not a calendar year.
    Year,
}

impl Unit {
    /// Every unit, shortest first.
    pub const ALL: [Self; 7] = [Self::Second, Self::Minute, Self::Hour, Self::Day, Self::Week, Self::Month, Self::Year];

    /// Returns the unit's word in a rule file.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Second => "second",
            Self::Minute => "minute",
            Self::Hour => "hour",
            Self::Day => "day",
            Self::Week => "week",
            Self::Month => "month",
            Self::Year => "year",
        }
    }

    /// Returns the length of one unit.
    pub const fn length(self) -> Micros {
        Micros::from_secs(match self {
            Self::Second => 1,
            Self::Minute => 60,
            Self::Hour => 3_600,
            Self::Day => 86_400,
            Self::Week => 604_800,
            Self::Month => 2_592_000,
            Self::Year => 31_536_000,
        })
    }

    /// Returns the unit called `name`, in any letter case.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|unit| unit.name().eq_ignore_ascii_case(name))
    }
}

/// The span of time over which a quota counts: a number of units, or any other length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Window {
    length: Micros,
    unit: Option<(Unit, u32)>,
    tick: Micros,
}

impl Window {
    /// The shortest window: 1 ms.
    pub const SHORTEST: Micros = Micros::from_millis(1);
    /// The longest window: 365 days.
    pub const LONGEST: Micros = Micros::YEAR;

    /// Returns a window of one unit.
    pub const fn of_unit(unit: Unit) -> Self {
        Self::new(unit.length(), Some((unit, 1)))
    }

    /// Returns a window of `multiplier` units in a row (Envoy's `unit_multiplier`).
    ///
    /// # Errors
    /// [`InvalidQuota::Window`] if `multiplier` is 0 or the window is longer than a year.
    pub fn of_units(unit: Unit, multiplier: u32) -> Result<Self, InvalidQuota> {
        let length = Micros::new(unit.length().get().saturating_mul(u64::from(multiplier)));
        Self::new(length, Some((unit, multiplier))).bounded()
    }

    /// Returns a window of any length. It is reported in the largest unit of which it is a multiple, if there is one.
    ///
    /// # Errors
    /// [`InvalidQuota::Window`] below 1 ms or above 365 days.
    pub fn of_length(length: Micros) -> Result<Self, InvalidQuota> {
        let unit = Unit::ALL.into_iter().rev().find_map(|unit| {
            let whole = length.get().is_multiple_of(unit.length().get());
            whole.then(|| u32::try_from(length.get() / unit.length().get()).ok()).flatten().map(|times| (unit, times))
        });
        Self::new(length, unit).bounded()
    }

    const fn new(length: Micros, unit: Option<(Unit, u32)>) -> Self {
        let mut tick = 1;
        while length.get() / tick > MOST_TICKS {
            tick *= 10;
        }
        Self { length, unit, tick: Micros::new(tick) }
    }

    fn bounded(self) -> Result<Self, InvalidQuota> {
        if self.length < Self::SHORTEST || self.length > Self::LONGEST {
            return Err(InvalidQuota::Window { found: self.length });
        }
        Ok(self)
    }

    /// Returns the length of the window.
    pub const fn length(self) -> Micros {
        self.length
    }

    /// Returns the unit and the number of units, if the window is whole units.
    pub const fn unit(self) -> Option<(Unit, u32)> {
        self.unit
    }
}

/// Writes the window: `second`, `15 minutes`, `250ms`.
impl fmt::Display for Window {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.unit {
            Some((unit, 1)) => f.write_str(unit.name()),
            Some((unit, multiplier)) => write!(f, "{multiplier} {}s", unit.name()),
            None => self.length.fmt(f),
        }
    }
}

/// A limit on hits: `limit` per `window`, and at most `burst` at once where the algorithm has a burst.
///
/// ```
/// use tidegate::model::{Quota, Unit, Window};
///
/// let quota = Quota::new(1_000, Window::of_units(Unit::Minute, 15)?).with_burst(50);
/// assert_eq!((quota.limit(), quota.burst()), (1_000, 50));
/// assert_eq!(quota.window().to_string(), "15 minutes");
/// # Ok::<(), tidegate::model::InvalidQuota>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Quota {
    limit: u32,
    window: Window,
    burst: u32,
}

/// Maximum number of ticks in a window: 2^20, so that 32 bits of hits times the ticks of a window stay below 2^53.
const MOST_TICKS: u64 = 1 << 20;

impl Quota {
    /// Returns a quota of `limit` hits per window, with a burst of the same number.
    pub const fn new(limit: u32, window: Window) -> Self {
        Self { limit, window, burst: limit }
    }

    /// Returns the same quota with another limit.
    #[must_use]
    pub const fn with_limit(self, limit: u32) -> Self {
        Self { limit, ..self }
    }

    /// Returns the same quota with another burst.
    #[must_use]
    pub const fn with_burst(self, burst: u32) -> Self {
        Self { burst, ..self }
    }

    /// Returns the hits per window.
    pub const fn limit(self) -> u32 {
        self.limit
    }

    /// Returns the window.
    pub const fn window(self) -> Window {
        self.window
    }

    /// Returns the maximum number of hits at once, for algorithms that have a burst.
    pub const fn burst(self) -> u32 {
        self.burst
    }

    /// Returns the length of one tick: the smallest power of ten in microseconds that divides the window into at most 2^20 ticks.
    pub const fn tick(self) -> Micros {
        self.window.tick
    }

    /// Returns the number of ticks in the window.
    pub const fn ticks(self) -> u64 {
        self.window.length.get() / self.tick().get()
    }

    /// Checks that the window is a whole number of ticks, so that an algorithm that counts in ticks can count it exactly.
    ///
    /// # Errors
    /// [`InvalidQuota::Ticks`], with the nearest lengths that are whole ticks.
    pub const fn is_whole_ticks(self) -> Result<(), InvalidQuota> {
        let (length, tick) = (self.window.length.get(), self.tick().get());
        if length.is_multiple_of(tick) {
            return Ok(());
        }
        let below = length / tick * tick;
        Err(InvalidQuota::Ticks {
            found: self.window.length,
            tick: self.tick(),
            below: Micros::new(below),
            above: Micros::new(below.saturating_add(tick)),
        })
    }

    /// Checks that the burst has room for the hits that drain in one tick.
    ///
    /// # Errors
    /// [`InvalidQuota::Burst`], with the smallest burst that has room.
    pub fn has_room_for_a_tick(self) -> Result<(), InvalidQuota> {
        let least = u64::from(self.limit).div_ceil(self.ticks());
        if u64::from(self.burst) >= least {
            return Ok(());
        }
        Err(InvalidQuota::Burst { found: self.burst, limit: self.limit, least })
    }

    /// Checks that the limit is small enough for an algorithm that remembers every hit.
    ///
    /// # Errors
    /// [`InvalidQuota::Limit`] above `most`.
    pub const fn is_at_most(self, most: u32) -> Result<(), InvalidQuota> {
        if self.limit > most { Err(InvalidQuota::Limit { found: self.limit, most }) } else { Ok(()) }
    }
}

/// Writes the quota: `20 per second`. The alternate form (`{:#}`) also names a burst that differs from the limit:
/// `5 at once, 20 per second`.
impl fmt::Display for Quota {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if f.alternate() && self.burst != self.limit {
            write!(f, "{} at once, ", self.burst)?;
        }
        write!(f, "{} per {}", self.limit, self.window)
    }
}

/// Reason why a quota cannot be counted.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum InvalidQuota {
    /// The window is too short or too long.
    #[error("the window {found} is out of range: it must be from {} to {}", Window::SHORTEST, Window::LONGEST)]
    Window {
        /// Length in the rule or request.
        found: Micros,
    },
    /// The window is not a whole number of ticks.
    #[error(
        "a window of {found} cannot be counted exactly in ticks of {tick}: write one of the nearest, {below} or {above}"
    )]
    Ticks {
        /// Length in the rule or request.
        found: Micros,
        /// Tick of a window of this length.
        tick: Micros,
        /// The nearest shorter window.
        below: Micros,
        /// The nearest longer window.
        above: Micros,
    },
    /// The burst holds fewer hits than drain in one tick.
    #[error(
        "a burst of {found} is too small for {limit} hits per window, because it must hold one hit and all hits that drain in one tick: write at least {least}"
    )]
    Burst {
        /// Burst in the rule.
        found: u32,
        /// Hits per window.
        limit: u32,
        /// The smallest burst that can be counted.
        least: u64,
    },
    /// The limit is larger than the algorithm can remember.
    #[error(
        "a limit of {found} is too large for an algorithm that stores every hit: write at most {most}, or choose `sliding_window`, which accepts any limit"
    )]
    Limit {
        /// Limit in the rule or request.
        found: u32,
        /// Largest limit of the algorithm.
        most: u32,
    },
}

#[cfg(test)]
mod tests {
    use super::{InvalidQuota, Quota, Unit, Window};
    use crate::model::Micros;

    #[test]
    fn ticks_are_those_of_the_table() {
        let tick = |unit| Quota::new(1, Window::of_unit(unit)).tick().get();
        assert_eq!(tick(Unit::Second), 1);
        assert_eq!(tick(Unit::Minute), 100);
        assert_eq!(tick(Unit::Day), 100_000);
        assert_eq!(tick(Unit::Month), 10_000_000);
        for unit in Unit::ALL {
            assert_eq!(Quota::new(1, Window::of_unit(unit)).is_whole_ticks(), Ok(()), "{unit:?}");
        }
    }

    #[test]
    fn a_window_between_ticks_is_refused_with_its_neighbours() {
        let window = Window::of_length(Micros::new(2_000_001)).expect("it is in bounds");
        let error = Quota::new(5, window).is_whole_ticks().expect_err("2,000,001 us is no multiple of 10 us");
        assert_eq!(
            error,
            InvalidQuota::Ticks {
                found: Micros::new(2_000_001),
                tick: Micros::new(10),
                below: Micros::new(2_000_000),
                above: Micros::new(2_000_010),
            }
        );
    }

    #[test]
    fn a_burst_below_what_drains_in_a_tick_is_refused() {
        let quota = Quota::new(4_000_000_000, Window::of_unit(Unit::Second)).with_burst(3_999);
        assert_eq!(
            quota.has_room_for_a_tick(),
            Err(InvalidQuota::Burst { found: 3_999, limit: 4_000_000_000, least: 4_000 })
        );
        assert_eq!(quota.with_burst(4_000).has_room_for_a_tick(), Ok(()));
    }

    #[test]
    fn a_window_is_named_by_its_largest_unit() {
        let named = |text| Window::of_length(Micros::parse(text).expect("a length")).expect("in bounds").unit();
        assert_eq!(named("15m"), Some((Unit::Minute, 15)));
        assert_eq!(named("7d"), Some((Unit::Week, 1)));
        assert_eq!(named("250ms"), None);
    }
}
