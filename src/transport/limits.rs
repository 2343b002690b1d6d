//! What a connection may take: time, and a file descriptor.

use std::sync::Arc;
use std::time::Duration;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// File descriptors that connections leave to the store, the rule files and the log: 64 (`docs/decisions/0003`).
/// Half of the limit where the limit is below 128.
pub const DESCRIPTOR_RESERVE: u64 = 64;

/// How long one connection may take for what, each a length of time. Every value is valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionLimits {
    /// From accept to the HTTP/2 preface and the first frame, or to a whole HTTP/1 request head: 5 s.
    /// An HTTP/1 connection that is kept alive may be idle as long, since hyper counts a head from the answer before it.
    pub handshake: Duration,
    /// From the first wait for a request's body to the body's end, or from 64 KiB of it to the next: 10 s, as for a stall. With less, a Tidegate that has
    /// more calls than it can decide fails those whose bodies its own windows hold up, and an error is a yes to Envoy.
    pub body: Duration,
    /// Without the peer taking a byte while there is something to write: 10 s, as long as a ping may go unanswered.
    pub stall: Duration,
    /// Without a frame from an HTTP/2 peer before it is pinged: 30 s.
    pub ping_after: Duration,
    /// Without an answer to that ping before the connection is dropped: 10 s.
    pub ping_answer: Duration,
    /// From accept to the GOAWAY, plus or minus 10 % by connection (gRFC A9): 24 h. `Duration::MAX` is never.
    pub age: Duration,
    /// From that GOAWAY until the connection is cut: 1 h.
    pub grace: Duration,
    /// From the stop of the service until every connection is cut: 5 s.
    pub drain: Duration,
}

impl Default for ConnectionLimits {
    fn default() -> Self {
        Self {
            handshake: Duration::from_secs(5),
            body: Duration::from_secs(10),
            stall: Duration::from_secs(10),
            ping_after: Duration::from_secs(30),
            ping_answer: Duration::from_secs(10),
            age: Duration::from_secs(24 * 3_600),
            grace: Duration::from_secs(3_600),
            drain: Duration::from_secs(5),
        }
    }
}

/// Room for so many connections. Clones share it: listeners with one `Slots` have one cap between them.
#[derive(Clone, Debug)]
pub struct Slots(Arc<Semaphore>);

impl Slots {
    /// Room for `cap` connections.
    pub fn new(cap: usize) -> Self {
        Self(Arc::new(Semaphore::new(cap.min(Semaphore::MAX_PERMITS))))
    }

    /// A place that is free again when the permit is dropped; `None` when all are taken.
    pub(super) fn take(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.0).try_acquire_owned().ok()
    }
}

/// Raises this process's soft limit of open files to the hard one and says what it is then.
/// Where it may not be raised the soft limit stands.
pub fn raise_open_files() -> u64 {
    let limit = getrlimit(Resource::Nofile);
    let raised = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).is_ok();
    let open_files = if raised { limit.maximum } else { limit.current };
    open_files.unwrap_or(u64::MAX)
}

/// The connections that fit into so many open files, less [`DESCRIPTOR_RESERVE`].
pub fn connection_cap(open_files: u64) -> usize {
    let reserve = DESCRIPTOR_RESERVE.min(open_files / 2);
    usize::try_from(open_files - reserve).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_leave_a_reserve_of_descriptors_and_never_none_for_themselves() {
        assert_eq!(connection_cap(1_048_576), 1_048_512);
        assert_eq!(connection_cap(64), 32);
        assert_eq!(connection_cap(u64::MAX), usize::MAX - 64);
    }
}
