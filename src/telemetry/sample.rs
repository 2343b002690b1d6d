//! Choice of the requests that are sampled, and pace of what is new.

use crate::model::Micros;

/// One of so many requests is sampled: 16. Every refusal is recorded.
pub(super) const SAMPLE: u32 = 16;

/// Returns true for one of `of` numbers, without the regularity of every so many: requests may be as regular.
pub(super) fn is_sampled(number: u64, of: u32) -> bool {
    // The golden ratio in 64 bits: its multiples are spread evenly, and in no order that requests have.
    let spread = number.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    u128::from(spread) * u128::from(of) < 1 << 64
}

/// Least time between two new entries of a record that is full: 10 ms. Copying the text of each would cost a flood of refusals a twentieth
/// more.
const NEW_EVERY: Micros = Micros::from_millis(10);

/// Returns true if a full record takes no new entry at `now`, after one at `last`. A clock that has stepped back does not matter.
pub(super) fn is_too_soon(now: Micros, last: Micros) -> bool {
    now >= last && now.saturating_sub(last) < NEW_EVERY
}

#[cfg(test)]
mod tests {
    use super::{NEW_EVERY, is_sampled, is_too_soon};
    use crate::model::Micros;

    #[test]
    fn a_new_entry_is_too_soon_for_ten_milliseconds_and_never_after_a_step_back() {
        let last = Micros::from_secs(1_795_262_400);
        let micros = |of: i64| Micros::new(last.get().wrapping_add_signed(of));
        for (of, expected) in [(-1, false), (0, true), (9_999, true), (10_000, false)] {
            assert_eq!(is_too_soon(micros(of), last), expected, "{of} us after it, of {NEW_EVERY}");
        }
    }

    #[test]
    fn what_is_sampled_is_a_share_of_requests_however_regular_these_are() {
        for (every, begin) in [(1, 0), (2, 0), (2, 1), (3, 2), (16, 0), (16, 5), (32, 7)] {
            let sampled = (0..16_000_u64).filter(|number| is_sampled(begin + every * number, 16)).count();
            assert!((900..=1_100).contains(&sampled), "{sampled} of 16,000, each {every}. from {begin}");
        }
    }
}
