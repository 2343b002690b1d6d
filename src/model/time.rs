//! Time in whole microseconds, since the epoch or as a length.

use std::fmt;
use std::time::Duration;

/// Whole microseconds: a length, or a time since the Unix epoch.
///
/// The current time is 1.8e15 and stays below 2^53 until the year 2255, so the same integers are exact in Lua.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Micros(u64);

impl Micros {
    /// Zero length, or the epoch.
    pub const ZERO: Self = Self(0);
    /// Longest window of a rule: 365 days, the reference's year.
    pub const YEAR: Self = Self::from_secs(31_536_000);

    /// Returns a length of `micros` microseconds.
    pub const fn new(micros: u64) -> Self {
        Self(micros)
    }

    /// Returns a length of `millis` milliseconds.
    pub const fn from_millis(millis: u64) -> Self {
        Self(millis.saturating_mul(1_000))
    }

    /// Returns a length of `secs` seconds.
    pub const fn from_secs(secs: u64) -> Self {
        Self(secs.saturating_mul(1_000_000))
    }

    /// Returns the number of microseconds.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// Returns whole seconds, rounded up: a client that waits this long has waited long enough.
    pub const fn ceil_secs(self) -> u64 {
        self.0.div_ceil(1_000_000)
    }

    /// Returns the length from `earlier` to this time; zero if `earlier` is later.
    pub const fn saturating_sub(self, earlier: Self) -> Self {
        Self(self.0.saturating_sub(earlier.0))
    }

    /// Returns the time `length` after this one.
    pub const fn saturating_add(self, length: Self) -> Self {
        Self(self.0.saturating_add(length.0))
    }

    /// Parses a length as Go writes it (`250ms`, `1h30m`, `150us`), and also days and weeks (`1d`, `2w`).
    ///
    /// # Errors
    /// `None` if the text is not such a length, has a fraction of a microsecond, or does not fit.
    pub fn parse(text: &str) -> Option<Self> {
        if text == "0" {
            return Some(Self::ZERO);
        }
        let mut rest = text;
        let mut total = 0_u64;
        while !rest.is_empty() {
            let number_end = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
            let (number, tail) = rest.split_at(number_end);
            let unit_end = tail.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(tail.len());
            let (unit, tail) = tail.split_at(unit_end);
            total = total.checked_add(scaled(number, micros_per(unit)?)?)?;
            rest = tail;
        }
        (!text.is_empty()).then_some(Self(total))
    }

    /// Returns the length in its largest unit of which it is a multiple, and that unit; 0 in seconds.
    pub const fn in_largest_unit(self) -> (u64, &'static str) {
        match self.0 {
            0 => (0, "s"),
            us if us.is_multiple_of(86_400_000_000) => (us / 86_400_000_000, "d"),
            us if us.is_multiple_of(3_600_000_000) => (us / 3_600_000_000, "h"),
            us if us.is_multiple_of(60_000_000) => (us / 60_000_000, "m"),
            us if us.is_multiple_of(1_000_000) => (us / 1_000_000, "s"),
            us if us.is_multiple_of(1_000) => (us / 1_000, "ms"),
            us => (us, "us"),
        }
    }
}

/// Writes the length as [`Micros::parse`] reads it: `1d`, `15m`, `250ms`.
impl fmt::Display for Micros {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (number, unit) = self.in_largest_unit();
        write!(f, "{number}{unit}")
    }
}

/// Source of `now`. Only `app` holds the system's clock; tests advance theirs by hand.
pub trait Clock: Send + Sync {
    /// Returns the time since the Unix epoch.
    fn now(&self) -> Micros;
}

/// Whole microseconds; a longer time than these can count is the longest one.
impl From<Duration> for Micros {
    fn from(length: Duration) -> Self {
        Self(u64::try_from(length.as_micros()).unwrap_or(u64::MAX))
    }
}

/// A function that returns the time is a clock.
impl<F: Fn() -> Micros + Send + Sync> Clock for F {
    fn now(&self) -> Micros {
        self()
    }
}

fn micros_per(unit: &str) -> Option<u64> {
    Some(match unit {
        "us" | "µs" | "μs" => 1,
        "ms" => 1_000,
        "s" => 1_000_000,
        "m" => 60_000_000,
        "h" => 3_600_000_000,
        "d" => 86_400_000_000,
        "w" => 604_800_000_000,
        _ => return None,
    })
}

/// Returns `number` times `scale`. The number may have a fraction if the product is whole.
fn scaled(number: &str, scale: u64) -> Option<u64> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.is_empty() && fraction.is_empty() {
        return None;
    }
    let whole: u64 = if whole.is_empty() { 0 } else { whole.parse().ok()? };
    let fraction = fraction.trim_end_matches('0');
    let mut micros = whole.checked_mul(scale)?;
    if !fraction.is_empty() {
        let denominator = 10_u64.checked_pow(u32::try_from(fraction.len()).ok()?)?;
        let numerator = fraction.parse::<u64>().ok()?.checked_mul(scale)?;
        if !numerator.is_multiple_of(denominator) {
            return None;
        }
        micros = micros.checked_add(numerator / denominator)?;
    }
    Some(micros)
}

#[cfg(test)]
mod tests {
    use super::Micros;

    #[test]
    fn lengths_are_read_as_go_writes_them() {
        let read = |text| Micros::parse(text).map(Micros::get);
        assert_eq!(read("250ms"), Some(250_000));
        assert_eq!(read("1h30m"), Some(5_400_000_000));
        assert_eq!(read("1.5s"), Some(1_500_000));
        assert_eq!(read("24h0m0s"), Some(86_400_000_000));
        assert_eq!(read("2w"), Some(1_209_600_000_000));
        assert_eq!(read("0"), Some(0));
        for wrong in ["", "5", "s", "1.5us", "1x", "-1s", ".s", "1..5s", "99999999999999999999s"] {
            assert_eq!(read(wrong), None, "{wrong:?}");
        }
    }

    #[test]
    fn a_length_is_printed_as_it_is_read() {
        for text in ["1d", "15m", "250ms", "7us", "90s", "1h"] {
            assert_eq!(Micros::parse(text).map(|length| length.to_string()).as_deref(), Some(text));
        }
    }
}
