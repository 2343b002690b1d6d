//! Times of day and date in UTC, as RFC 3339 writes them.

use std::fmt;

use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use crate::model::Micros;

/// Nanoseconds of a microsecond.
const NANOS: i128 = 1_000;

/// A time, shown as `2026-11-21 12:00:00.250`, or as its microseconds since 1970 after the year 9999.
#[derive(Clone, Copy, Debug)]
pub(super) struct Utc(pub(super) Micros);

impl fmt::Display for Utc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let micros = self.0.get();
        let Ok(time) = OffsetDateTime::from_unix_timestamp_nanos(i128::from(micros) * NANOS) else {
            return write!(f, "{micros} us");
        };
        let (date, (hour, minute, second, milli)) = (time.date(), time.to_hms_milli());
        write!(f, "{date} {hour:02}:{minute:02}:{second:02}.{milli:03}")
    }
}

/// Parses a time of RFC 3339 such as `2026-11-21T12:00:00.250Z`, with at most six digits of a second's fraction that count. Returns
/// `None` for any other text, and for a time before 1970.
pub(super) fn parse(text: &str) -> Option<Micros> {
    let time = OffsetDateTime::parse(text, &Rfc3339).ok()?;
    u64::try_from(time.unix_timestamp_nanos().div_euclid(NANOS)).ok().map(Micros::new)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_and_written() {
        let micros = |text: &str| parse(text).map(Micros::get);
        assert_eq!(micros("1970-01-01T00:00:00Z"), Some(0));
        // `date -u -d 2026-11-21T12:00:00Z +%s`
        assert_eq!(micros("2026-11-21T12:00:00.250Z"), Some(1_795_262_400_250_000));
        assert_eq!(micros("2026-11-21T14:00:00+02:00"), Some(1_795_262_400_000_000));
        assert_eq!(micros("2026-11-21T06:30:00.1234567-05:30"), Some(1_795_262_400_123_456));
        assert_eq!(micros("2024-02-29T23:59:59Z"), Some(1_709_251_199_000_000));
        assert_eq!(micros("1970-01-02T00:00:00+23:59"), Some(60_000_000));
        for wrong in [
            "",
            "2026-11-21",
            "2026-13-21T12:00:00Z",
            "2026-11-21T12:00:00",
            "2026-11-21T12:00:00+2",
            "2026-02-30T12:00:00Z",
            "2025-02-29T12:00:00Z",
            "1969-12-31T23:59:59Z",
            "1970-01-01T00:00:00+00:01",
            "2026-11-21T12:00:00+00:9999999999999999999",
            "2026-11-21T12:00:00-9999999999999999999:00",
            "2026-11-21T12:00:00+24:00",
            "2026-11-21T12:00:00-00:60",
            "2026-11-21T12:00:00+1:00",
            "2026-11-21T12:00:00+00:+1",
            "2026-11-21T12:00:00é00:00",
        ] {
            assert_eq!(micros(wrong), None, "{wrong}");
        }
        for text in [
            "1970-01-01 00:00:00.000",
            "2024-02-29 23:59:59.999",
            "2024-03-01 00:00:00.000",
            "2026-12-31 06:07:08.009",
            "2100-02-28 00:00:00.000",
        ] {
            let time = parse(&format!("{}Z", text.replace(' ', "T"))).unwrap();
            assert_eq!(Utc(time).to_string(), text);
        }
        assert_eq!(Utc(Micros::new(u64::MAX)).to_string(), "18446744073709551615 us");
    }
}
