//! What happened to a listener's connections, in numbers.

use std::sync::atomic::{AtomicU64, Ordering};

/// One listener's connections since it started.
#[derive(Debug, Default)]
pub struct Tally {
    pub(super) accepted: AtomicU64,
    pub(super) refused: AtomicU64,
    pub(super) accept_errors: AtomicU64,
    pub(super) ended: AtomicU64,
    pub(super) failed: AtomicU64,
    pub(super) unopened: AtomicU64,
    pub(super) cut: AtomicU64,
}

/// A reading of a [`Tally`]; each a number of connections since the start, but for `open`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Connections open now.
    pub open: u64,
    /// Accepted and served.
    pub accepted: u64,
    /// Closed at once because all slots were taken.
    pub refused: u64,
    /// Accepts that failed, mostly for want of descriptors.
    pub accept_errors: u64,
    /// Ended by an error of the peer, the protocol or the socket, or by a panic.
    pub failed: u64,
    /// Dropped because the peer sent no preface in time.
    pub unopened: u64,
    /// Dropped because they could not be finished in time.
    pub cut: u64,
}

impl Tally {
    /// What has been counted so far.
    pub fn counts(&self) -> Counts {
        let ended = self.ended.load(Ordering::Relaxed);
        let accepted = self.accepted.load(Ordering::Relaxed);
        Counts {
            open: accepted.saturating_sub(ended),
            accepted,
            refused: self.refused.load(Ordering::Relaxed),
            accept_errors: self.accept_errors.load(Ordering::Relaxed),
            failed: self.failed.load(Ordering::Relaxed),
            unopened: self.unopened.load(Ordering::Relaxed),
            cut: self.cut.load(Ordering::Relaxed),
        }
    }
}
