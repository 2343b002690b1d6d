//! The socket of one connection: bounds what one turn reads, and notices a peer that never opens or stops reading.

use std::future::Future;
use std::io::{Error, ErrorKind, IoSlice, Result};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf, Take};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep};

use super::budget::Account;
use crate::telemetry::limited::Cause;

/// Bytes read in one turn of a connection, that is, in one poll of its task: 8 KiB.
///
/// h2 handles everything it has read before it lets go of the thread. It ends a connection on which too many calls are
/// reset before it could hand them over, and Envoy's shared connection looks like that when clients reset their requests.
/// 8 KiB hold about 375 calls with their resets, so h2's count stays far below `MAX_RESET_BEFORE_ACCEPT`, and a peer
/// that floods waits for the other connections after each turn (`docs/decisions/0023`).
pub const TURN_BYTES: u64 = 8 * 1_024;
/// The time from one turn to the next of a connection that waits for memory: 20 ms, so that it reads 400 KiB a second.
pub const MEMORY_REST: Duration = Duration::from_millis(20);

/// A TCP stream that reads at most [`TURN_BYTES`] in a turn, counts its first bytes, and fails when its peer stops reading.
///
/// Without the latter a peer with a closed window holds its connection for ever: no ping can reach it, so none goes
/// unanswered.
#[derive(Debug)]
pub struct Socket {
    /// Its limit is what this turn may still read.
    stream: Take<TcpStream>,
    turn: u64,
    unopened_bytes: usize,
    state: State,
    stall: Duration,
    stalled: Option<Pin<Box<Sleep>>>,
    account: Option<Arc<Account>>,
    /// The time until the next turn that may read, while the connection waits for memory.
    rest: Option<Pin<Box<Sleep>>>,
    /// The turn that may read meanwhile.
    slow_turn: u64,
}

/// What the task of a connection and its socket know of each other.
#[derive(Clone, Debug, Default)]
pub(super) struct State(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    is_opened: AtomicBool,
    is_at_rest: AtomicBool,
    turns: AtomicU64,
}

impl State {
    /// True from the read on that brought the last of the opening bytes.
    pub(super) fn is_opened(&self) -> bool {
        self.0.is_opened.load(Ordering::Relaxed)
    }

    /// True when the peer has sent nothing since the last write: of HTTP/1, since the last answer.
    pub(super) fn is_at_rest(&self) -> bool {
        self.0.is_at_rest.load(Ordering::Relaxed)
    }

    /// Begins a turn: the socket may read [`TURN_BYTES`] more. The connection's task calls this once per poll.
    pub(super) fn begin_turn(&self) {
        // One thread at a time polls a connection, so that nothing is lost between the two.
        self.0.turns.store(self.turn().wrapping_add(1), Ordering::Relaxed);
    }

    fn turn(&self) -> u64 {
        self.0.turns.load(Ordering::Relaxed)
    }
}

impl Socket {
    /// Wraps `stream`, which is opened after `opening_bytes` from the peer and fails when a write makes no progress for
    /// `stall`.
    pub(super) fn new(stream: TcpStream, opening_bytes: usize, state: State, stall: Duration) -> Self {
        let turn = state.turn();
        Self {
            stream: stream.take(TURN_BYTES),
            turn,
            unopened_bytes: opening_bytes,
            state,
            stall,
            stalled: None,
            account: None,
            rest: None,
            slow_turn: turn,
        }
    }

    /// Reads slowly while the connection of `account` holds more than its share of the memory.
    pub(super) fn within(self, account: Arc<Account>) -> Self {
        Self { account: Some(account), ..self }
    }

    /// Returns true while the connection waits because all connections together hold too much memory. After each
    /// [`MEMORY_REST`] one turn may read, so that resets, answers to pings and the rest of messages arrive all the same.
    fn waits_for_memory(&mut self, cx: &mut Context<'_>) -> bool {
        let Some(account) = self.account.as_ref().filter(|account| account.is_over()) else {
            self.rest = None;
            return false;
        };
        let rest = self.rest.get_or_insert_with(|| {
            account.count(Cause::WaitedForMemory);
            Box::pin(tokio::time::sleep(MEMORY_REST))
        });
        if self.slow_turn != self.turn {
            if rest.as_mut().poll(cx).is_pending() {
                return true;
            }
            rest.as_mut().reset(Instant::now() + MEMORY_REST);
            self.slow_turn = self.turn;
        }
        false
    }

    /// Returns true when this turn has read all it may.
    fn is_turn_over(&mut self) -> bool {
        let turn = self.state.turn();
        if turn != self.turn {
            self.turn = turn;
            self.stream.set_limit(TURN_BYTES);
        }
        self.stream.limit() == 0
    }

    fn has_read(&mut self, bytes: usize) {
        self.unopened_bytes = self.unopened_bytes.saturating_sub(bytes);
        if self.unopened_bytes == 0 {
            self.state.0.is_opened.store(true, Ordering::Relaxed);
        }
    }

    fn stream(&mut self) -> Pin<&mut TcpStream> {
        Pin::new(self.stream.get_mut())
    }

    fn unless_stalled(&mut self, cx: &mut Context<'_>, written: Poll<Result<usize>>) -> Poll<Result<usize>> {
        if written.is_ready() {
            self.stalled = None;
            self.state.0.is_at_rest.store(true, Ordering::Relaxed);
            return written;
        }
        let stall = self.stall;
        let stalled = self.stalled.get_or_insert_with(|| Box::pin(tokio::time::sleep(stall)));
        stalled.as_mut().poll(cx).map(|()| Err(Error::new(ErrorKind::TimedOut, "the peer stopped reading")))
    }
}

impl AsyncRead for Socket {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<Result<()>> {
        if self.is_turn_over() {
            wake_after_others(cx);
            return Poll::Pending;
        }
        if self.waits_for_memory(cx) {
            return Poll::Pending;
        }
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(cx, buffer);
        let bytes = buffer.filled().len().saturating_sub(before);
        if bytes > 0 {
            self.state.0.is_at_rest.store(false, Ordering::Relaxed);
        }
        if self.unopened_bytes > 0 {
            self.has_read(bytes);
        }
        read
    }
}

impl AsyncWrite for Socket {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<Result<usize>> {
        let written = self.stream().poll_write(cx, bytes);
        self.unless_stalled(cx, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<Result<usize>> {
        let written = self.stream().poll_write_vectored(cx, parts);
        self.unless_stalled(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.get_ref().is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        self.stream().poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        self.stream().poll_shutdown(cx)
    }
}

/// Wakes the task once the runtime has looked for what other tasks wait for. A task that wakes itself directly runs again
/// before the runtime looks, up to 61 times in a row (tokio's `event_interval`).
fn wake_after_others(cx: &mut Context<'_>) {
    let yielded = pin!(tokio::task::yield_now());
    // Its first poll arranges the waking and is never ready.
    let _ = yielded.poll(cx);
}
