//! Turns of a connection, and what its task and its socket share.

use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::Context;

use super::frames::FrameError;

/// Bytes read in one turn of a connection, which is one poll of its task: 8 KiB.
///
/// h2 handles everything it has read before it yields the thread. It ends a connection on which too many calls are
/// reset before it could hand them over, and Envoy's shared connection looks like that when clients reset their
/// requests. 8 KiB hold about 375 calls with their resets, so h2's count stays far below `MAX_RESET_BEFORE_ACCEPT`. A
/// peer that floods waits for the other connections after each turn (`docs/decisions/0023`).
pub const TURN_BYTES: u64 = 8 * 1_024;

/// State shared by the task of a connection and its socket.
#[derive(Clone, Debug, Default)]
pub(super) struct State(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    is_opened: AtomicBool,
    is_at_rest: AtomicBool,
    has_begun_request: AtomicBool,
    turns: AtomicU64,
    broken: OnceLock<FrameError>,
}

impl State {
    /// Returns the error in the peer's frames, if the socket failed for one. h2 keeps only the kind of an error.
    pub(super) fn broken(&self) -> Option<FrameError> {
        self.0.broken.get().copied()
    }

    /// Returns true after the read that brought the last of the opening bytes.
    pub(super) fn is_opened(&self) -> bool {
        self.0.is_opened.load(Ordering::Relaxed)
    }

    /// Returns true if the peer has sent nothing since the last write: in HTTP/1, since the last answer.
    pub(super) fn is_at_rest(&self) -> bool {
        self.0.is_at_rest.load(Ordering::Relaxed)
    }

    /// Returns true if the peer has sent something since its last request of HTTP/1 was passed to a handler: the rest of its body, or a
    /// head that has not ended.
    pub(super) fn has_begun_request(&self) -> bool {
        self.0.has_begun_request.load(Ordering::Relaxed)
    }

    /// Records that a request was passed to its handler.
    pub(super) fn note_request(&self) {
        self.0.has_begun_request.store(false, Ordering::Relaxed);
    }

    /// Records the error in the peer's frames for which the socket fails.
    pub(super) fn note_broken(&self, error: FrameError) {
        let _ = self.0.broken.set(error);
    }

    /// Records that the last of the opening bytes was read.
    pub(super) fn note_opened(&self) {
        self.0.is_opened.store(true, Ordering::Relaxed);
    }

    /// Records a read (false) or a write (true).
    pub(super) fn note_rest(&self, is_at_rest: bool) {
        if !is_at_rest {
            self.0.has_begun_request.store(true, Ordering::Relaxed);
        }
        self.0.is_at_rest.store(is_at_rest, Ordering::Relaxed);
    }

    /// Begins a turn: the socket may read [`TURN_BYTES`] more. The connection's task calls this once per poll.
    pub(super) fn begin_turn(&self) {
        // Only one thread at a time polls a connection, so no update is lost between load and store.
        self.0.turns.store(self.turn().wrapping_add(1), Ordering::Relaxed);
    }

    /// Returns the number of the present turn.
    pub(super) fn turn(&self) -> u64 {
        self.0.turns.load(Ordering::Relaxed)
    }
}

/// Wakes the task after the runtime has polled for events of other tasks. A task that wakes itself directly runs again
/// before that, up to 61 times in a row (tokio's `event_interval`).
pub(super) fn wake_after_others(cx: &mut Context<'_>) {
    let yielded = pin!(tokio::task::yield_now());
    // The first poll registers the wake-up and is never ready.
    let _ = yielded.poll(cx);
}
