//! Activity of one connection: its calls update it and the accept loop reads it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

/// Number of calls in flight on a connection, and the time since which it has none. Clones refer to the same
/// connection.
///
/// The calls of a connection run on one thread, so its counters are never contended.
#[derive(Clone, Debug)]
pub struct Activity(Arc<ActivityState>);

#[derive(Debug)]
struct ActivityState {
    /// Start of the listener. The times below are relative to it.
    began: Instant,
    calls: AtomicU32,
    endless: AtomicU32,
    accepted_ms: u64,
    idle_since_ms: AtomicU64,
    turn_ns: AtomicU64,
    is_leaving: AtomicBool,
    leave: Notify,
    is_end_announced: AtomicBool,
    /// True while the listener has more connections than it keeps.
    is_full: Arc<AtomicBool>,
}

/// Maximum number of endless calls (calls that need not end) on one connection: 4. With one more, the connection is
/// closed. Each takes about 11 KiB, and a connection with only endless calls counts as idle.
const MOST_ENDLESS: u32 = 4;

/// Guard that counts a call in flight until it is dropped.
#[derive(Debug)]
pub(crate) struct InFlight {
    activity: Activity,
    is_endless: bool,
}

impl Activity {
    /// Creates the activity of a connection that is idle from now on. Its listener started at `began`, and sets `is_full` while it has
    /// more connections than it keeps. Then each answer over HTTP/1 announces the end of its connection.
    pub(crate) fn new(began: Instant, is_full: Arc<AtomicBool>) -> Self {
        let accepted_ms = since(began);
        let idle_since_ms = AtomicU64::new(accepted_ms);
        let (endless, calls) = (AtomicU32::new(0), AtomicU32::new(0));
        let (is_leaving, leave, is_end_announced) = (AtomicBool::new(false), Notify::new(), AtomicBool::new(false));
        let turn_ns = AtomicU64::new(0);
        let state = ActivityState {
            began,
            calls,
            endless,
            accepted_ms,
            idle_since_ms,
            turn_ns,
            is_leaving,
            leave,
            is_end_announced,
            is_full,
        };
        let activity = Self(Arc::new(state));
        activity.begin_turn();
        activity
    }

    /// Records the time at which a turn of the connection begins.
    pub(super) fn begin_turn(&self) {
        let ns = u64::try_from(self.0.began.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.0.turn_ns.store(ns, Ordering::Relaxed);
    }

    /// Returns the time at which the present turn of the connection began.
    pub(super) fn turn_began(&self) -> Instant {
        self.0.began + Duration::from_nanos(self.0.turn_ns.load(Ordering::Relaxed))
    }

    /// Counts a call in flight until the returned guard is dropped.
    pub(super) fn call(&self) -> InFlight {
        self.0.calls.fetch_add(1, Ordering::Relaxed);
        InFlight { activity: self.clone(), is_endless: false }
    }

    /// Records that a call no longer keeps the connection busy.
    fn ends(&self) {
        let state = &self.0;
        if state.calls.load(Ordering::Relaxed) == 1 {
            state.idle_since_ms.store(since(state.began), Ordering::Relaxed);
        }
        // Release: a reader that sees no call in flight also sees the time above.
        state.calls.fetch_sub(1, Ordering::Release);
    }

    /// Returns true while a call is in flight.
    pub(super) fn is_busy(&self) -> bool {
        self.0.calls.load(Ordering::Acquire) > 0
    }

    /// Returns true from the first call on, unless that call ended within a millisecond of the accept.
    pub(super) fn is_used(&self) -> bool {
        self.is_busy() || self.idle_since_ms() > self.0.accepted_ms
    }

    /// Returns the end of the last call, or the accept if there was no call, in milliseconds since the listener
    /// started.
    pub(super) fn idle_since_ms(&self) -> u64 {
        self.0.idle_since_ms.load(Ordering::Relaxed)
    }

    /// Returns the milliseconds since the listener started.
    pub(super) fn now_ms(&self) -> u64 {
        since(self.0.began)
    }

    /// Requests a graceful close of the connection, because others need its memory.
    pub(super) fn leave(&self) {
        self.0.is_leaving.store(true, Ordering::Relaxed);
        self.0.leave.notify_one();
    }

    /// Returns true after [`Activity::leave`] was called.
    pub(super) fn is_leaving(&self) -> bool {
        self.0.is_leaving.load(Ordering::Relaxed)
    }

    /// Makes every answer that begins from now on announce the end of the connection (`Connection: close`).
    pub(super) fn announce_end(&self) {
        self.0.is_end_announced.store(true, Ordering::Relaxed);
    }

    /// Waits until [`Activity::leave`] is called.
    pub(super) async fn asked_to_leave(&self) {
        while !self.is_leaving() {
            self.0.leave.notified().await;
        }
    }
}

impl InFlight {
    /// Returns true if the answer of this call has to announce the end of the connection.
    pub(super) fn is_last(&self) -> bool {
        let state = &self.activity.0;
        state.is_end_announced.load(Ordering::Relaxed) || state.is_full.load(Ordering::Relaxed)
    }

    /// Marks the call as endless: it need not end, and it does not make its connection busy.
    pub(super) fn need_not_end(&mut self) {
        if !self.is_endless {
            self.is_endless = true;
            self.activity.ends();
            if self.activity.0.endless.fetch_add(1, Ordering::Relaxed) >= MOST_ENDLESS {
                self.activity.leave();
            }
        }
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        if self.is_endless {
            self.activity.0.endless.fetch_sub(1, Ordering::Relaxed);
        } else {
            self.activity.ends();
        }
    }
}

fn since(began: Instant) -> u64 {
    u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX)
}
