//! Byte stream of one connection: plaintext, or TLS over it.

use std::io::{Error, ErrorKind, IoSlice, Result};
use std::net::IpAddr;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Sleep;
use tokio_rustls::server::TlsStream;

use super::net::{AcceptedStream, NetStream};
use super::turn::{State, TURN_BYTES, wake_after_others};

/// Byte stream of a connection.
#[derive(Debug)]
pub(super) enum Stream {
    /// Plaintext.
    Plain(Link),
    /// TLS, after its handshake.
    Tls(Box<TlsStream<Link>>),
}

/// Stream of a connection below TLS. It fails if its peer stops reading, and bounds the bytes that TLS reads.
///
/// Without that failure, a peer with a closed window holds its connection forever: no ping can reach it, so none goes
/// unanswered. It is noticed here, below TLS, because TLS takes bytes before the peer does.
#[derive(Debug)]
pub(super) struct Link {
    /// `None` only if the stream could not move to its worker.
    stream: Option<NetStream>,
    stall: Duration,
    stalled: Option<Pin<Box<Sleep>>>,
    /// Bound on the bytes that TLS reads; `None` for plaintext, which the socket bounds.
    bound: Option<Box<Bound>>,
}

/// Bound on the bytes that TLS reads.
#[derive(Debug)]
enum Bound {
    /// Bytes that the peer may still send in its TLS handshake, of `most`.
    Handshake { left: usize, most: usize },
    /// Bytes that TLS may still read in this turn. A record without content costs a decryption and shows nothing above
    /// TLS, so the bound of the socket does not see it.
    Turn { state: State, turn: u64, left: u64, is_held: bool },
}

/// The peer sent more bytes in its TLS handshake than a handshake needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the TLS handshake is larger than {most} bytes")]
pub(super) struct HandshakeTooLarge {
    most: usize,
}

impl Link {
    /// Wraps `stream` as a plaintext connection that fails if a write makes no progress for `stall`.
    pub(super) fn plain(stream: NetStream, stall: Duration) -> Self {
        Self { stream: Some(stream), stall, stalled: None, bound: None }
    }

    /// Wraps `stream` for a TLS handshake, in which the peer may send `most` bytes.
    pub(super) fn for_handshake(stream: NetStream, stall: Duration, most: usize) -> Self {
        Self { bound: Some(Box::new(Bound::Handshake { left: most, most })), ..Self::plain(stream, stall) }
    }

    /// Moves the stream to the runtime of the caller after its handshake. From now on it bounds the turns of `state`.
    ///
    /// # Errors
    /// If the system does not register the stream there.
    pub(super) fn settle(&mut self, state: State) -> Result<()> {
        let stream = self.stream.take().map(NetStream::unregister).transpose()?;
        self.stream = stream.map(AcceptedStream::register).transpose()?;
        self.stalled = None;
        self.bound = Some(Box::new(Bound::Turn { turn: state.turn(), state, left: TURN_BYTES, is_held: false }));
        Ok(())
    }

    fn stream(&mut self) -> Result<Pin<&mut NetStream>> {
        self.stream.as_mut().map(Pin::new).ok_or_else(|| ErrorKind::NotConnected.into())
    }

    /// Returns true if the bound allows another read. Otherwise the task is woken for the next turn.
    fn may_read(&mut self, cx: &mut Context<'_>) -> Result<bool> {
        match self.bound.as_deref_mut() {
            Some(Bound::Handshake { left: 0, most }) => {
                Err(Error::new(ErrorKind::InvalidData, HandshakeTooLarge { most: *most }))
            }
            Some(Bound::Turn { state, turn, left, is_held }) => {
                if state.turn() != *turn {
                    (*turn, *left) = (state.turn(), TURN_BYTES);
                }
                *is_held = *left == 0;
                if *is_held {
                    wake_after_others(cx);
                }
                Ok(!*is_held)
            }
            _ => Ok(true),
        }
    }

    fn has_read(&mut self, bytes: usize) {
        match self.bound.as_deref_mut() {
            Some(Bound::Handshake { left, .. }) => *left = left.saturating_sub(bytes),
            Some(Bound::Turn { left, .. }) => *left = left.saturating_sub(u64::try_from(bytes).unwrap_or(u64::MAX)),
            None => {}
        }
    }

    /// Returns true if the last read was held back until the next turn.
    fn is_held(&self) -> bool {
        matches!(self.bound.as_deref(), Some(Bound::Turn { is_held: true, .. }))
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

impl Stream {
    /// Returns the address of the peer. `None` if it has already left, or on a Unix socket.
    pub(super) fn peer_address(&self) -> Option<IpAddr> {
        self.link().stream.as_ref()?.peer_address()
    }

    /// Returns true on a Unix socket.
    pub(super) fn is_unix(&self) -> bool {
        matches!(self.link().stream, Some(NetStream::Unix(_)))
    }

    fn link(&self) -> &Link {
        match self {
            Self::Plain(link) => link,
            Self::Tls(stream) => stream.get_ref().0,
        }
    }

    /// Returns true if the last read was held back until the next turn, although the peer may have sent more.
    pub(super) fn is_held(&self) -> bool {
        self.link().is_held()
    }
}

impl AsyncRead for Link {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<Result<()>> {
        if !self.may_read(cx)? {
            return Poll::Pending;
        }
        let before = buffer.filled().len();
        let read = self.stream()?.poll_read(cx, buffer);
        self.has_read(buffer.filled().len().saturating_sub(before));
        read
    }
}

impl AsyncWrite for Link {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<Result<usize>> {
        let written = self.stream()?.poll_write(cx, bytes);
        self.unless_stalled(cx, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<Result<usize>> {
        let written = self.stream()?.poll_write_vectored(cx, parts);
        self.unless_stalled(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        self.stream()?.poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        self.stream()?.poll_shutdown(cx)
    }
}

impl AsyncRead for Stream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_read(cx, buffer),
            Self::Tls(stream) => match Pin::new(stream).poll_read(cx, buffer) {
                // An end of TCP without an end of TLS. The frames of HTTP/2 show whether something is missing.
                Poll::Ready(Err(error)) if error.kind() == ErrorKind::UnexpectedEof => Poll::Ready(Ok(())),
                read => read,
            },
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<Result<usize>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_write(cx, bytes),
            Self::Tls(stream) => Pin::new(stream).poll_write(cx, bytes),
        }
    }

    fn poll_write_vectored(self: Pin<&mut Self>, cx: &mut Context<'_>, parts: &[IoSlice<'_>]) -> Poll<Result<usize>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_write_vectored(cx, parts),
            Self::Tls(stream) => Pin::new(stream).poll_write_vectored(cx, parts),
        }
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Self::Plain(stream) => stream.is_write_vectored(),
            Self::Tls(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_flush(cx),
            Self::Tls(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_shutdown(cx),
            Self::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt;
    use tokio::net::{TcpListener, TcpStream};

    use super::*;

    /// A stream whose peer sends more than any bound, on a task of its own.
    async fn flooded() -> NetStream {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (stream, accepted) = tokio::join!(TcpStream::connect(listener.local_addr().unwrap()), async {
            listener.accept().await.unwrap()
        });
        let mut peer = stream.unwrap();
        tokio::spawn(async move { while peer.write_all(&[7; 1_024]).await.is_ok() {} });
        NetStream::Tcp(accepted.0)
    }

    /// Reads until the stream holds a read back. Returns the number of bytes read.
    async fn read_turn(tcp: &mut Link) -> Result<u64> {
        let mut bytes = 0;
        std::future::poll_fn(|cx| {
            loop {
                let mut space = [0; 1_024];
                let mut buffer = ReadBuf::new(&mut space);
                match Pin::new(&mut *tcp).poll_read(cx, &mut buffer) {
                    Poll::Ready(Ok(())) => bytes += u64::try_from(buffer.filled().len()).unwrap(),
                    Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                    Poll::Pending if tcp.is_held() => return Poll::Ready(Ok(bytes)),
                    Poll::Pending => return Poll::Pending,
                }
            }
        })
        .await
    }

    #[tokio::test]
    async fn a_turn_of_tls_reads_a_bounded_number_of_encrypted_bytes() {
        let state = State::default();
        let mut tcp = Link::for_handshake(flooded().await, Duration::from_secs(10), 0);
        tcp.settle(state.clone()).unwrap();
        for _ in 0..3 {
            let bytes = read_turn(&mut tcp).await.unwrap();
            // The last read may begin within the bound and end beyond it.
            assert!((TURN_BYTES..TURN_BYTES + 1_024).contains(&bytes), "{bytes}");
            assert_eq!(read_turn(&mut tcp).await.unwrap(), 0, "the turn is over");
            state.begin_turn();
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_peer_that_reads_slowly_does_not_stall_and_one_that_stops_does() {
        let mut link = Link::plain(flooded().await, Duration::from_secs(10));
        let mut write = async |written: &dyn Fn() -> Poll<Result<usize>>| {
            std::future::poll_fn(|cx| Poll::Ready(link.unless_stalled(cx, written()))).await
        };
        for _ in 0..3 {
            assert!(write(&|| Poll::Pending).await.is_pending());
            tokio::time::advance(Duration::from_secs(6)).await;
            assert!(matches!(write(&|| Poll::Ready(Ok(1))).await, Poll::Ready(Ok(1))));
        }
        assert!(write(&|| Poll::Pending).await.is_pending());
        tokio::time::advance(Duration::from_secs(11)).await;
        assert!(matches!(write(&|| Poll::Pending).await, Poll::Ready(Err(_))));
    }

    #[tokio::test]
    async fn a_handshake_reads_a_bounded_number_of_bytes() {
        let mut tcp = Link::for_handshake(flooded().await, Duration::from_secs(10), 10_000);
        let error = read_turn(&mut tcp).await.unwrap_err();
        let error = error.get_ref().and_then(|error| error.downcast_ref::<HandshakeTooLarge>());
        assert_eq!(error.map(ToString::to_string).as_deref(), Some("the TLS handshake is larger than 10000 bytes"));
    }
}
