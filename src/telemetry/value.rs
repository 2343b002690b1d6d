//! Values of metrics.

use std::fmt;
use std::num::NonZeroU32;

/// Value of one series.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Value {
    /// A whole number.
    Whole(u64),
    /// A fraction.
    Fraction(f64),
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Whole(number) => number.fmt(f),
            Self::Fraction(number) => number.fmt(f),
        }
    }
}

macro_rules! whole {
    ($($type:ty)+) => {
        $(impl From<$type> for Value {
            fn from(number: $type) -> Self {
                Self::Whole(number.into())
            }
        })+
    };
}

whole!(u8 u32 u64);

impl From<usize> for Value {
    fn from(number: usize) -> Self {
        Self::Whole(u64::try_from(number).unwrap_or(u64::MAX))
    }
}

impl From<NonZeroU32> for Value {
    fn from(number: NonZeroU32) -> Self {
        number.get().into()
    }
}

impl From<f64> for Value {
    fn from(number: f64) -> Self {
        Self::Fraction(number)
    }
}

/// Converts microseconds to seconds.
pub fn seconds(us: u64) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "exact for the first 285 years")]
    let us = us as f64;
    us / 1e6
}
