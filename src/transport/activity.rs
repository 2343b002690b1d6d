//! What one connection does, as its calls count it and the accept loop reads it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use tokio::sync::Notify;
use tokio::time::Instant;

/// The calls in flight on a connection, and the time since when it has none. Clones are the same connection.
///
/// The calls of a connection run on one thread, so that its counts are never contended.
#[derive(Clone, Debug)]
pub struct Activity(Arc<State>);

#[derive(Debug)]
struct State {
    /// The start of the listener, from which times are counted.
    began: Instant,
    calls: AtomicU32,
    endless: AtomicU32,
    accepted_ms: u64,
    idle_since_ms: AtomicU64,
    is_leaving: AtomicBool,
    leave: Notify,
}

/// Calls on one connection that need not end, beyond which it is asked to leave: 4. Each takes about 11 KiB, and their connection
/// counts as idle.
const MOST_ENDLESS: u32 = 4;

/// A call in flight, until this is dropped.
#[derive(Debug)]
pub(super) struct InFlight {
    activity: Activity,
    is_endless: bool,
}

impl Activity {
    /// A connection that is idle since now, of a listener that started at `began`.
    pub(super) fn new(began: Instant) -> Self {
        let accepted_ms = since(began);
        let idle_since_ms = AtomicU64::new(accepted_ms);
        let (endless, calls, is_leaving, leave) =
            (AtomicU32::new(0), AtomicU32::new(0), AtomicBool::new(false), Notify::new());
        Self(Arc::new(State { began, calls, endless, accepted_ms, idle_since_ms, is_leaving, leave }))
    }

    /// Counts a call until the returned value is dropped.
    pub(super) fn call(&self) -> InFlight {
        self.0.calls.fetch_add(1, Ordering::Relaxed);
        InFlight { activity: self.clone(), is_endless: false }
    }

    /// Notes the end of a call.
    fn ends(&self) {
        let state = &self.0;
        if state.calls.load(Ordering::Relaxed) == 1 {
            state.idle_since_ms.store(since(state.began), Ordering::Relaxed);
        }
        // Whoever sees no call in flight sees the time above as well.
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

    /// The end of the last call, or the accept where there was none, in milliseconds since the listener started.
    pub(super) fn idle_since_ms(&self) -> u64 {
        self.0.idle_since_ms.load(Ordering::Relaxed)
    }

    /// The milliseconds since the listener started.
    pub(super) fn now_ms(&self) -> u64 {
        since(self.0.began)
    }

    /// Asks the connection to finish because others need its memory.
    pub(super) fn leave(&self) {
        self.0.is_leaving.store(true, Ordering::Relaxed);
        self.0.leave.notify_one();
    }

    /// Returns true from [`Activity::leave`] on.
    pub(super) fn is_leaving(&self) -> bool {
        self.0.is_leaving.load(Ordering::Relaxed)
    }

    /// Waits for [`Activity::leave`].
    pub(super) async fn asked_to_leave(&self) {
        while !self.is_leaving() {
            self.0.leave.notified().await;
        }
    }
}

impl InFlight {
    /// Notes that the call need not end. It does not make its connection busy.
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
