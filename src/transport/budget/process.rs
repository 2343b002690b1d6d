//! Memory that the calls of all connections may hold together.
//!
//! Each connection counts what its calls hold. While all of them together hold more than the bound, a connection that holds
//! more than its share (the bound divided by the connections) is not read. Its calls go on to be answered, and it is read
//! again as soon as they hold less. So all connections hold at most twice the bound: what they held when it was reached,
//! and each a share.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Bytes that the calls of all connections hold before some connections have to wait: 192 MiB, counted by
/// [`CALL_BYTES`] and [`OPEN_BODY_BYTES`], which are upper bounds. Twice that, and what a process takes without a call,
/// stays below 512 MB.
pub const PROCESS_BYTES: usize = 192 << 20;
/// The share of the process's memory that calls have at most: a quarter.
pub const PROCESS_MEMORY_SHARE: u64 = 4;
/// Bytes that are counted for a call: 8 KiB for its task, its HTTP/2 stream and an answer of up to 8 KiB, which is
/// mostly smaller (`docs/decisions/0024`).
pub const CALL_BYTES: usize = 8 << 10;
/// Bytes that are counted for a body that is not read to its end: 24 KiB. A window of 8 KiB in frames of 256 bytes takes
/// as much in h2 (`benches/peers/memory`).
pub const OPEN_BODY_BYTES: usize = 24 << 10;
/// Bytes in which a connection's memory is counted here: 64 KiB. A connection with fewer than 8 calls counts nothing,
/// and the workers seldom write to a number that they share.
const UNIT_BYTES: usize = 64 << 10;

/// The bytes that the calls of all connections hold.
#[derive(Debug)]
pub struct ProcessAccount {
    held: AtomicUsize,
    connections: AtomicUsize,
    bound: usize,
}

impl Default for ProcessAccount {
    fn default() -> Self {
        Self::new(u64::MAX)
    }
}

impl ProcessAccount {
    /// An account for a process that may use `memory_bytes`.
    pub fn new(memory_bytes: u64) -> Self {
        let share = usize::try_from(memory_bytes / PROCESS_MEMORY_SHARE).unwrap_or(usize::MAX);
        Self { held: AtomicUsize::new(0), connections: AtomicUsize::new(0), bound: share.min(PROCESS_BYTES) }
    }

    /// Returns the bytes that are held now, to 64 KiB for each connection.
    pub fn held(&self) -> usize {
        self.held.load(Ordering::Relaxed)
    }

    /// Returns true when all connections hold more than the bound, and one that holds `bytes` has more than its share.
    pub(super) fn is_over(&self, bytes: usize) -> bool {
        self.held() > self.bound && bytes > self.bound / self.connections.load(Ordering::Relaxed).max(1)
    }

    /// Counts a connection.
    pub(super) fn open(&self) {
        self.connections.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a connection no longer.
    pub(super) fn close(&self) {
        self.connections.fetch_sub(1, Ordering::Relaxed);
    }

    /// Counts that what a connection holds went from `before` to `after` bytes.
    pub(super) fn change(&self, before: usize, after: usize) {
        let (before, after) = (before / UNIT_BYTES, after / UNIT_BYTES);
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

    fn account(bound: usize, connections: usize) -> ProcessAccount {
        let account = ProcessAccount { bound, ..ProcessAccount::new(u64::MAX) };
        (0..connections).for_each(|_| account.open());
        account
    }

    #[test]
    fn beyond_the_bound_those_wait_that_hold_more_than_their_share() {
        let account = account(100 * UNIT_BYTES, 10);
        let share = 10 * UNIT_BYTES;
        account.change(0, 100 * UNIT_BYTES);
        assert!(!account.is_over(usize::MAX), "the bound is reached, not passed");
        account.change(0, UNIT_BYTES);
        assert_eq!([share, share + 1].map(|bytes| account.is_over(bytes)), [false, true]);
        (0..5).for_each(|_| account.close());
        assert_eq!([2 * share, 2 * share + 1].map(|bytes| account.is_over(bytes)), [false, true]);
        account.change(UNIT_BYTES, UNIT_BYTES - 1);
        assert!(!account.is_over(usize::MAX));
    }

    #[test]
    fn a_process_with_little_memory_has_a_lower_bound() {
        assert_eq!(ProcessAccount::new(512 << 20).bound, 128 << 20);
        assert_eq!(ProcessAccount::new(u64::MAX).bound, PROCESS_BYTES);
    }

    #[test]
    fn what_is_held_is_counted_in_units_and_comes_back_to_nothing() {
        let account = account(PROCESS_BYTES, 1);
        let steps = [0, CALL_BYTES, UNIT_BYTES - 1, UNIT_BYTES, 3 * UNIT_BYTES + 7, 2 * UNIT_BYTES, 1, 0];
        for pair in steps.windows(2) {
            account.change(pair[0], pair[1]);
            assert_eq!(account.held(), pair[1] / UNIT_BYTES * UNIT_BYTES);
        }
    }
}
