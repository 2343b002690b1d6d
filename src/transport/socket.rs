//! The socket of one connection: notices that the peer has opened it, and that the peer has stopped reading.

use std::future::Future;
use std::io::{Error, ErrorKind, IoSlice, Result};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::Sleep;

/// A TCP stream that counts its first bytes and gives up on a peer that takes none.
///
/// A peer with a closed window holds its connection for ever otherwise: a ping cannot reach it, so none goes unanswered.
#[derive(Debug)]
pub struct Socket {
    stream: TcpStream,
    unopened_bytes: usize,
    opened: Opened,
    stall: Duration,
    stalled: Option<Pin<Box<Sleep>>>,
}

/// Whether the peer has sent enough to count as a client.
#[derive(Clone, Debug, Default)]
pub(super) struct Opened(Arc<AtomicBool>);

impl Opened {
    /// True from the read that brought the last of the opening bytes.
    pub(super) fn get(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

impl Socket {
    /// A socket that is opened by so many bytes from the peer and fails when a write makes no progress for `stall`.
    pub(super) fn new(stream: TcpStream, opening_bytes: usize, opened: Opened, stall: Duration) -> Self {
        Self { stream, unopened_bytes: opening_bytes, opened, stall, stalled: None }
    }

    fn has_read(&mut self, bytes: usize) {
        self.unopened_bytes = self.unopened_bytes.saturating_sub(bytes);
        if self.unopened_bytes == 0 {
            self.opened.0.store(true, Ordering::Relaxed);
        }
    }

    fn unless_stalled(&mut self, cx: &mut Context<'_>, written: Poll<Result<usize>>) -> Poll<Result<usize>> {
        if written.is_ready() {
            self.stalled = None;
            return written;
        }
        let stall = self.stall;
        let stalled = self.stalled.get_or_insert_with(|| Box::pin(tokio::time::sleep(stall)));
        stalled.as_mut().poll(cx).map(|()| Err(Error::new(ErrorKind::TimedOut, "the peer stopped reading")))
    }
}

impl AsyncRead for Socket {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<Result<()>> {
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(cx, buffer);
        if self.unopened_bytes > 0 {
            self.has_read(buffer.filled().len().saturating_sub(before));
        }
        read
    }
}

impl AsyncWrite for Socket {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.unless_stalled(cx, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, parts);
        self.unless_stalled(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
