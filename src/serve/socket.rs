//! Socket of one connection. It bounds the bytes that one turn reads, and detects a peer that never opens the
//! connection.

use std::future::Future;
use std::io::{Error, ErrorKind, IoSlice, Result};
use std::mem;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf, Take};
use tokio::time::{Instant, Sleep};

use super::frames::{FrameError, FrameReader, SHUTDOWN_PONG};
use super::memory::Account;
use super::memory::process::Pace;
use super::stream::Stream;
use super::turn::{State, TURN_BYTES, wake_after_others};
use super::waiting::ReadEmpty;
use crate::telemetry::limited::Cause;

/// Bytes read in a short turn: 1 KiB, about five ordinary calls, so that a connection detects soon that it holds its
/// share.
pub const SHORT_TURN_BYTES: u64 = 1_024;
/// Time between two turns of a connection that waits for memory: 20 ms, so that it reads 400 KiB a second.
pub const MEMORY_REST: Duration = Duration::from_millis(20);
/// Time for which a closed connection of HTTP/1 is read on, if its peer was sending: 1 s. A peer that sends on to a closed connection gets an
/// error in place of the answer, and a gateway may take that for an admission.
const LINGER: Duration = Duration::from_secs(1);
/// Maximum bytes that are read and thrown away in this time: 4 MiB.
const MOST_DISCARDED: usize = 4 << 20;
/// Bytes of one such read: 4 KiB.
const DISCARDED_AT_ONCE: usize = 4 << 10;

/// Time for which a graceful shutdown waits for calls that the client began before it saw the GOAWAY: 1 s after its answer to the PING. The
/// answer may overtake calls: the client of h2 writes it before the calls that are in its queue, and the server of h2 would then close the
/// connection with those calls unread.
const SHUTDOWN_WAIT: Duration = Duration::from_secs(1);

/// First bytes of TLS: a record with a handshake, and the major version.
const TLS_HANDSHAKE: &[u8] = &[0x16, 3];

/// Stream that reads at most [`TURN_BYTES`] in a turn, and counts its first bytes. With TLS these are the decrypted bytes.
#[derive(Debug)]
pub struct Socket {
    /// Its limit is the number of bytes that this turn may still read.
    stream: Take<Stream>,
    turn: u64,
    unopened_bytes: usize,
    state: State,
    http2: Option<Http2State>,
    read_empty: Arc<ReadEmpty>,
    /// Timer until the next turn that may read, while the connection waits for memory.
    rest: Option<Pin<Box<Sleep>>>,
    /// Set when an HTTP/1 connection is closed while its peer is sending.
    linger: Option<Linger>,
}

/// Bytes that are still to be read and thrown away, and the timer of their end.
#[derive(Debug)]
struct Linger {
    left: usize,
    over: Pin<Box<Sleep>>,
}

/// State that the socket keeps for an HTTP/2 connection.
#[derive(Debug)]
struct Http2State {
    account: Arc<Account>,
    frames: FrameReader,
    /// Bytes in the account for a head whose end has not arrived. `late_head` is the timer of its deadline.
    head_bytes: usize,
    late_head: Option<Pin<Box<Sleep>>>,
    /// Timer until h2 gets the answer to the PING of its graceful shutdown, if it has arrived.
    shutdown: Option<Pin<Box<Sleep>>>,
}

impl Socket {
    /// Wraps `stream`. It is opened after `opening_bytes` from the peer.
    pub(super) fn new(stream: Stream, opening_bytes: usize, state: State) -> Self {
        let turn = state.turn();
        Self {
            stream: stream.take(TURN_BYTES),
            turn,
            unopened_bytes: opening_bytes,
            state,
            http2: None,
            read_empty: Arc::default(),
            rest: None,
            linger: None,
        }
    }

    /// Returns the last time at which the socket had nothing to read. The socket keeps it up to date.
    pub(super) fn read_empty(&self) -> Arc<ReadEmpty> {
        Arc::clone(&self.read_empty)
    }

    /// Returns the address of the peer; `None` if it has already left.
    pub(super) fn peer_address(&self) -> Option<IpAddr> {
        self.stream.get_ref().peer_address()
    }

    /// Returns what the socket shares with the task of its connection.
    pub(super) fn state(&self) -> State {
        self.state.clone()
    }

    /// Reads HTTP/2 frames, slowly while the connection of `account` holds more than its share of the memory.
    pub(super) fn within(self, account: Arc<Account>) -> Self {
        let frames = FrameReader::new();
        let frames = if self.stream.get_ref().is_unix() { frames.repairing_authority() } else { frames };
        let http2 = Http2State { account, frames, head_bytes: 0, late_head: None, shutdown: None };
        Self { http2: Some(http2), ..self }
    }

    /// Returns the bytes that a new turn may read. `None` while the connection waits for memory: then the task is woken
    /// for another try.
    fn allowance(&mut self, cx: &mut Context<'_>) -> Option<u64> {
        let pace = self.http2.as_ref().map_or(Pace::Whole, |http2| http2.account.pace());
        let most = if pace == Pace::Short { SHORT_TURN_BYTES } else { TURN_BYTES };
        if matches!(pace, Pace::Whole | Pace::Short) {
            self.rest = None;
            return Some(most);
        }
        let rest = self.rest.get_or_insert_with(|| {
            if let Some(http2) = &self.http2 {
                http2.account.count(Cause::WaitedForMemory);
            }
            Box::pin(tokio::time::sleep(MEMORY_REST))
        });
        while rest.as_mut().poll(cx).is_ready() {
            rest.as_mut().reset(Instant::now() + MEMORY_REST);
            // After each rest one turn may read, so that resets, ping answers and the rest of messages still arrive.
            if pace == Pace::Slow {
                return Some(most);
            }
        }
        None
    }

    /// Returns true if this turn may read on. Otherwise the task is woken for the next turn.
    fn may_read(&mut self, cx: &mut Context<'_>) -> bool {
        let turn = self.state.turn();
        if turn != self.turn {
            let allowance = self.allowance(cx).unwrap_or(0);
            self.stream.set_limit(allowance);
            self.turn = turn;
        }
        if self.stream.limit() > 0 {
            return true;
        }
        let waits = self.rest.as_mut().is_some_and(|rest| rest.as_mut().poll(cx).is_pending());
        if !waits {
            wake_after_others(cx);
        }
        false
    }

    /// Returns true if the connection is in plaintext and `read`, its first bytes, begin a handshake of TLS (RFC 8446, 5.1).
    fn speaks_tls(&self, read: &[u8]) -> bool {
        let is_first = !self.state.has_begun_request();
        is_first && matches!(self.stream.get_ref(), Stream::Plain(_)) && read.starts_with(TLS_HANDSHAKE)
    }

    fn broken(&self, error: FrameError) -> Error {
        self.state.note_broken(error);
        Error::new(ErrorKind::InvalidData, error)
    }

    fn has_read(&mut self, bytes: usize) {
        self.unopened_bytes = self.unopened_bytes.saturating_sub(bytes);
        if self.unopened_bytes == 0 {
            self.state.note_opened();
        }
    }

    /// Reads and throws away what the peer still sends, until it closes the connection or `linger` is over.
    fn poll_discard(&mut self, cx: &mut Context<'_>, linger: &mut Linger) -> Poll<()> {
        let mut bytes = [0; DISCARDED_AT_ONCE];
        while linger.left > 0 {
            let mut buffer = ReadBuf::new(&mut bytes);
            match Pin::new(&mut *self).poll_read(cx, &mut buffer) {
                Poll::Ready(Ok(())) if !buffer.filled().is_empty() => {
                    linger.left = linger.left.saturating_sub(buffer.filled().len());
                }
                Poll::Ready(_) => return Poll::Ready(()),
                Poll::Pending => return linger.over.as_mut().poll(cx),
            }
        }
        Poll::Ready(())
    }

    fn stream(&mut self) -> Pin<&mut Stream> {
        Pin::new(self.stream.get_mut())
    }

    fn has_written(&self, written: Poll<Result<usize>>) -> Poll<Result<usize>> {
        if written.is_ready() {
            self.state.note_rest(true);
        }
        written
    }
}

impl Http2State {
    fn pass(&mut self, bytes: &mut [u8], cx: &mut Context<'_>) -> std::result::Result<(), FrameError> {
        self.frames.pass(bytes)?;
        self.account.reads_around(self.frames.take_around());
        let before = mem::replace(&mut self.head_bytes, self.frames.begun_bytes());
        if before != self.head_bytes {
            self.account.change(before, self.head_bytes);
        }
        self.late_head = self.frames.due().map(|due| Box::pin(tokio::time::sleep_until(due)));
        if let Some(late) = &mut self.late_head {
            // Not due yet. The poll registers the task to be woken.
            let _ = late.as_mut().poll(cx);
        }
        if self.frames.take_shutdown_pong() {
            self.shutdown = Some(Box::pin(tokio::time::sleep(SHUTDOWN_WAIT)));
        }
        Ok(())
    }

    /// Returns the answer to the PING of the graceful shutdown, once it has waited. Between two frames the task is woken for it.
    fn shutdown_pong(&mut self, cx: &mut Context<'_>) -> Option<&'static [u8]> {
        let shutdown = self.shutdown.as_mut().filter(|_| self.frames.is_between_frames())?;
        shutdown.as_mut().poll(cx).is_ready().then_some(&SHUTDOWN_PONG)
    }
}

impl Drop for Http2State {
    fn drop(&mut self) {
        self.account.change(self.head_bytes, 0);
    }
}

impl AsyncRead for Socket {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<Result<()>> {
        if let Some(error) = self.state.broken() {
            return Poll::Ready(Err(Error::new(ErrorKind::InvalidData, error)));
        }
        if let Some(http2) = &mut self.http2
            && let Some(pong) = http2.shutdown_pong(cx)
            && buffer.remaining() >= pong.len()
        {
            buffer.put_slice(pong);
            http2.shutdown = None;
            return Poll::Ready(Ok(()));
        }
        if !self.may_read(cx) {
            return Poll::Pending;
        }
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(cx, buffer);
        if read.is_pending() && !self.stream.get_ref().is_held() {
            self.read_empty.note();
        }
        let bytes = buffer.filled().len().saturating_sub(before);
        if bytes > 0 {
            if self.unopened_bytes > 0 && self.speaks_tls(buffer.filled().get(before..).unwrap_or_default()) {
                return Poll::Ready(Err(self.broken(FrameError::Tls)));
            }
            self.state.note_rest(false);
            let read = buffer.filled_mut().get_mut(before..).unwrap_or_default();
            if let Some(Err(error)) = self.http2.as_mut().map(|http2| http2.pass(read, cx)) {
                return Poll::Ready(Err(self.broken(error)));
            }
        }
        if self.unopened_bytes > 0 {
            self.has_read(bytes);
        }
        // Bytes that have arrived meanwhile are read first, however long the socket was not read.
        if let Some(Http2State { late_head: Some(late), .. }) = &mut self.http2
            && read.is_pending()
            && late.as_mut().poll(cx).is_ready()
        {
            return Poll::Ready(Err(self.broken(FrameError::LateHead)));
        }
        read
    }
}

impl AsyncWrite for Socket {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<Result<usize>> {
        let written = self.stream().poll_write(cx, bytes);
        self.has_written(written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<Result<usize>> {
        let written = self.stream().poll_write_vectored(cx, parts);
        self.has_written(written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.get_ref().is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        self.stream().poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        let mut linger = match self.linger.take() {
            Some(linger) => linger,
            None => {
                ready!(self.stream().poll_shutdown(cx))?;
                if self.http2.is_some() || !self.state.has_begun_request() {
                    return Poll::Ready(Ok(()));
                }
                Linger { left: MOST_DISCARDED, over: Box::pin(tokio::time::sleep(LINGER)) }
            }
        };
        let discarded = self.poll_discard(cx, &mut linger);
        self.linger = Some(linger);
        discarded.map(Ok)
    }
}
