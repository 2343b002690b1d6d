//! Memory bound for the calls of all connections together.
//!
//! Each connection counts the bytes that its calls hold. The share of a connection is the bound divided by the number
//! of connections that hold memory.
//!
//! | all connections hold | a connection within its share | a connection above its share |
//! |---|---|---|
//! | up to the bound | is read | is read; above [`MOST_BYTES`]: slowly |
//! | more than the bound | is read | above [`LEAST_SHARE_BYTES`]: one turn every `socket::MEMORY_REST` |
//! | more than 1.5 times the bound | is read in short turns | above [`LEAST_STOPPED_BYTES`]: not read until its calls end |
//!
//! A short turn reads `socket::SHORT_TURN_BYTES`. Calls are still answered in each case. Beyond 1.5 times
//! the bound, a request must arrive within `body::PRESSED`.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Bytes that the calls of all connections hold before some are read slowly: 256 MiB. [`CALL_BYTES`] and
/// [`OPEN_BODY_BYTES`], by which they are counted, are upper bounds.
pub const PROCESS_BYTES: usize = 256 << 20;
/// Divisor of the process's memory: calls hold at most half of it.
pub const PROCESS_MEMORY_SHARE: u64 = 2;
/// Minimum share of a connection: 2 MiB. So idle connections take no share from the others, and a connection with up to
/// 256 calls is never slow.
pub const LEAST_SHARE_BYTES: usize = 2 << 20;
/// Minimum share above which a connection is not read: 256 KiB, so that 8 bodies that have not arrived do not stop a
/// connection.
pub const LEAST_STOPPED_BYTES: usize = 256 << 10;
/// Bytes of one connection above which it is read slowly, whatever the others hold: 48 MiB. An honest connection has up
/// to 38 MiB: 1,024 calls with unread bodies, and the messages of `docs/decisions/0024`.
pub const MOST_BYTES: usize = 48 << 20;
/// Bytes counted for a call: 8 KiB for its task, its HTTP/2 stream and an answer of up to 8 KiB. Most answers are
/// smaller (`docs/decisions/0024`).
pub const CALL_BYTES: usize = 8 << 10;
/// Bytes counted for a body that is not read to its end: 24 KiB. A window of 8 KiB in frames of 256 bytes takes as much
/// in h2 (`benches/peers/memory`).
pub const OPEN_BODY_BYTES: usize = 24 << 10;
/// Granularity at which a connection's memory is counted here: 64 KiB. A connection with fewer than 8 calls counts
/// nothing, and the workers rarely write to a number that they share.
const UNIT_BYTES: usize = 64 << 10;

/// Bytes that the calls of all connections hold.
#[derive(Debug)]
pub struct ProcessAccount {
    held: AtomicUsize,
    /// Number of connections that hold at least [`UNIT_BYTES`].
    holding: AtomicUsize,
    bound: usize,
}

/// Speed at which a connection may be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pace {
    /// Whole turns.
    Whole,
    /// Short turns.
    Short,
    /// One whole turn at a time, with a rest between two.
    Slow,
    /// Not read at all.
    Stopped,
}

impl Default for ProcessAccount {
    fn default() -> Self {
        Self::new(u64::MAX)
    }
}

impl ProcessAccount {
    /// Creates an account for a process that may use `memory_bytes`.
    pub fn new(memory_bytes: u64) -> Self {
        let share = usize::try_from(memory_bytes / PROCESS_MEMORY_SHARE).unwrap_or(usize::MAX);
        Self::bounded(share.min(PROCESS_BYTES))
    }

    fn bounded(bound: usize) -> Self {
        let [held, holding] = [0; 2].map(AtomicUsize::new);
        Self { held, holding, bound }
    }

    /// Returns the bytes that are held now, rounded down to 64 KiB for each connection.
    pub fn held(&self) -> usize {
        self.held.load(Ordering::Relaxed)
    }

    /// Returns the speed at which a connection that holds `bytes` may be read.
    pub(crate) fn pace(&self, bytes: usize) -> Pace {
        let held = self.held();
        if held <= self.bound {
            return if bytes > MOST_BYTES { Pace::Slow } else { Pace::Whole };
        }
        let share = self.bound / self.holding.load(Ordering::Relaxed).max(1);
        match self.is_pressed() {
            true if bytes > share.max(LEAST_STOPPED_BYTES) => Pace::Stopped,
            true => Pace::Short,
            false if bytes > share.max(LEAST_SHARE_BYTES) => Pace::Slow,
            false => Pace::Whole,
        }
    }

    /// Returns true if all connections together hold more than 1.5 times the bound.
    pub(crate) fn is_pressed(&self) -> bool {
        self.held() > self.bound + self.bound / 2
    }

    /// Counts a connection whose bytes changed from `before` to `after`.
    pub(crate) fn change(&self, before: usize, after: usize) {
        let (before, after) = (before / UNIT_BYTES, after / UNIT_BYTES);
        if before == 0 && after > 0 {
            self.holding.fetch_add(1, Ordering::Relaxed);
        } else if before > 0 && after == 0 {
            self.holding.fetch_sub(1, Ordering::Relaxed);
        }
        if after > before {
            self.held.fetch_add((after - before) * UNIT_BYTES, Ordering::Relaxed);
        } else if before > after {
            self.held.fetch_sub((before - after) * UNIT_BYTES, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn beyond_the_bound_those_are_slow_that_hold_more_than_their_share() {
        let account = ProcessAccount::bounded(160 * LEAST_SHARE_BYTES);
        let share = 16 * LEAST_SHARE_BYTES;
        (0..10).for_each(|_| account.change(0, share));
        let most = [MOST_BYTES, MOST_BYTES + 1].map(|bytes| account.pace(bytes));
        assert_eq!(most, [Pace::Whole, Pace::Slow], "the bound is reached, not passed");
        account.change(share, share + UNIT_BYTES);
        assert_eq!([share, share + 1].map(|bytes| account.pace(bytes)), [Pace::Whole, Pace::Slow]);
        account.change(share, 0);
        assert_eq!(account.pace(MOST_BYTES), Pace::Whole);
    }

    #[test]
    fn far_beyond_the_bound_those_are_not_read_that_hold_more_than_their_share() {
        let account = ProcessAccount::bounded(160 * LEAST_STOPPED_BYTES);
        (0..80).for_each(|_| account.change(0, 3 * LEAST_STOPPED_BYTES));
        let least = [LEAST_SHARE_BYTES, LEAST_SHARE_BYTES + 1].map(|bytes| account.pace(bytes));
        assert_eq!(least, [Pace::Whole, Pace::Slow], "1.5 times the bound is reached, not passed");
        account.change(0, UNIT_BYTES);
        let share = 160 * LEAST_STOPPED_BYTES / 81;
        assert_eq!([share, share + 1].map(|bytes| account.pace(bytes)), [Pace::Short, Pace::Stopped]);
        (0..1_000).for_each(|_| account.change(0, UNIT_BYTES));
        let least = [LEAST_STOPPED_BYTES, LEAST_STOPPED_BYTES + 1].map(|bytes| account.pace(bytes));
        assert_eq!(least, [Pace::Short, Pace::Stopped]);
    }

    #[test]
    fn a_process_with_little_memory_has_a_lower_bound() {
        assert_eq!(ProcessAccount::new(512 << 20).bound, 256 << 20);
        assert_eq!(ProcessAccount::new(u64::MAX).bound, PROCESS_BYTES);
    }

    #[test]
    fn what_is_held_is_counted_in_units_and_comes_back_to_nothing() {
        let account = ProcessAccount::default();
        let steps = [0, CALL_BYTES, UNIT_BYTES - 1, UNIT_BYTES, 3 * UNIT_BYTES + 7, 2 * UNIT_BYTES, 1, 0];
        for pair in steps.windows(2) {
            account.change(pair[0], pair[1]);
            assert_eq!(account.held(), pair[1] / UNIT_BYTES * UNIT_BYTES);
            assert_eq!(account.holding.load(Ordering::Relaxed), usize::from(pair[1] >= UNIT_BYTES));
        }
    }
}
