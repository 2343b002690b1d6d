//! Times of day and date in UTC, as RFC 3339 writes them.

use std::fmt;

use crate::model::Micros;

/// Length of a day in seconds.
const DAY: u64 = 86_400;
/// Days of 400 years, after which the calendar repeats.
const DAYS_OF_400_YEARS: u64 = 146_097;
/// Days from 1 March of the year 0 to 1 January 1970.
const EPOCH: u64 = 719_468;

/// A time, shown as `2026-11-21 12:00:00.250`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Utc(pub(super) Micros);

impl fmt::Display for Utc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let millis = self.0.get() / 1_000;
        let seconds = millis / 1_000;
        let (year, month, day) = date(seconds / DAY);
        let (hour, minute, second) = (seconds / 3_600 % 24, seconds / 60 % 60, seconds % 60);
        write!(f, "{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02}.{:03}", millis % 1_000)
    }
}

/// Parses a time of RFC 3339 such as `2026-11-21T12:00:00.250Z`, with at most six digits of a second's fraction that count. Returns
/// `None` for any other text, and for a time before 1970.
pub(super) fn parse(text: &str) -> Option<Micros> {
    let number = |from: usize, length: usize| -> Option<u64> {
        let digits = text.get(from..from + length)?;
        digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse().ok())?
    };
    let is_at = |index: usize, expected: &[u8]| text.as_bytes().get(index).is_some_and(|byte| expected.contains(byte));
    let marks: [(usize, &[u8]); 5] = [(4, b"-"), (7, b"-"), (10, b"Tt "), (13, b":"), (16, b":")];
    if !marks.iter().all(|(index, expected)| is_at(*index, expected)) {
        return None;
    }
    let (year, month, day) = (number(0, 4)?, number(5, 2)?, number(8, 2)?);
    let (hour, minute, second) = (number(11, 2)?, number(14, 2)?, number(17, 2)?);
    if !(1..=12).contains(&month) || !(1..=31).contains(&day) || hour > 23 || minute > 59 || second > 60 {
        return None;
    }
    let rest = text.get(19..)?;
    let digits =
        rest.strip_prefix('.').map_or("", |rest| rest.split(|c: char| !c.is_ascii_digit()).next().unwrap_or_default());
    let zone = rest.strip_prefix('.').unwrap_or(rest).get(digits.len()..)?;
    let micros: u64 = format!("{digits:0<6}").get(..6)?.parse().ok()?;
    let local = days(year, month, day)? * DAY + hour * 3_600 + minute * 60 + second;
    let seconds = match offset(zone)? {
        (true, ahead) => local.checked_sub(ahead)?,
        (false, behind) => local + behind,
    };
    Some(Micros::new(seconds.checked_mul(1_000_000)? + micros))
}

/// Returns the seconds of an offset such as `+02:00`, and true if it is ahead of UTC.
fn offset(zone: &str) -> Option<(bool, u64)> {
    if matches!(zone, "Z" | "z") {
        return Some((true, 0));
    }
    let (hours, minutes) = zone.get(1..)?.split_once(':')?;
    let part = |digits: &str, most: u64| {
        let is_right = digits.len() == 2 && digits.bytes().all(|byte| byte.is_ascii_digit());
        is_right.then(|| digits.parse::<u64>().ok())?.filter(|number| *number <= most)
    };
    let seconds = part(hours, 23)? * 3_600 + part(minutes, 59)? * 60;
    match zone.as_bytes().first()? {
        b'+' => Some((true, seconds)),
        b'-' => Some((false, seconds)),
        _ => None,
    }
}

/// Returns the days from 1 January 1970 to a date. Years are counted from March, so that a leap day is the last day of a year.
fn days(year: u64, month: u64, day: u64) -> Option<u64> {
    let year = if month <= 2 { year.checked_sub(1)? } else { year };
    let of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    let of_era = year % 400 * 365 + year % 400 / 4 - year % 400 / 100 + of_year;
    (year / 400 * DAYS_OF_400_YEARS + of_era).checked_sub(EPOCH)
}

/// Returns year, month and day of a number of days since 1 January 1970.
fn date(days: u64) -> (u64, u64, u64) {
    let days = days + EPOCH;
    let of_era = days % DAYS_OF_400_YEARS;
    let year = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month + 2) / 5 + 1;
    let is_next_year = month >= 10;
    let year = days / DAYS_OF_400_YEARS * 400 + year + u64::from(is_next_year);
    (year, if is_next_year { month - 9 } else { month + 3 }, day)
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
            "1969-12-31T23:59:59Z",
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
    }
}
