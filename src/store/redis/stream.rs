//! Sockets to Redis servers. The bytes to and from the Redis client are checked on their way.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use redis::aio::AsyncStream;
use thiserror::Error;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;

use super::address::Address;
use super::replies::{InvalidReply, ReplyStream};
use crate::dial::tls::Tls;
use crate::dial::{self, TcpTimeouts};

/// An idle connection is probed after 15 s. A connection whose bytes are not acknowledged for 1.5 s ends.
pub const TIMEOUTS: TcpTimeouts =
    TcpTimeouts { keepalive: Duration::from_secs(15), unacknowledged: Duration::from_millis(1_500) };

/// A byte stream to and from a server.
pub type RedisSocket = Box<dyn AsyncStream + Send + Unpin>;

/// A connection that is being made.
pub type Connecting<'a> = Pin<Box<dyn Future<Output = io::Result<RedisSocket>> + Send + 'a>>;

/// The network between this process and the servers.
pub trait Network: Send + Sync {
    /// Connects to `address`, or to `at`, the only one of its addresses in use; over TCP with TLS if `tls` is given. The error says why the server
    /// cannot be reached or does not accept the connection, or why TLS fails.
    fn connect<'a>(&'a self, address: &'a Address, at: Option<SocketAddr>, tls: Option<&'a Tls>) -> Connecting<'a>;
}

/// The sockets of the operating system.
#[derive(Clone, Copy, Debug, Default)]
pub struct HostNetwork;

/// A socket whose reads fail after bytes that no Redis server sends.
pub struct Guarded {
    socket: RedisSocket,
    server: String,
    replies: ReplyStream,
    refused: Option<RejectedReply>,
    failure: Arc<OnceLock<io::Error>>,
    report: Box<dyn Fn(&RejectedReply) + Send>,
}

/// The end of a connection whose server sent bytes that no Redis server sends.
#[derive(Clone, Debug, Error)]
#[error("{server} sent {refusal}")]
pub struct RejectedReply {
    /// The server.
    pub server: String,
    /// The reason for which its reply is refused.
    pub refusal: InvalidReply,
}

impl From<RejectedReply> for io::Error {
    /// The Redis client treats a connection as lost after an error of this kind.
    fn from(refused: RejectedReply) -> Self {
        Self::new(io::ErrorKind::ConnectionAborted, refused)
    }
}

impl Network for HostNetwork {
    fn connect<'a>(&'a self, address: &'a Address, at: Option<SocketAddr>, tls: Option<&'a Tls>) -> Connecting<'a> {
        Box::pin(async move {
            let socket: RedisSocket = match (address, tls, at) {
                (Address::Unix(path), ..) => Box::new(UnixStream::connect(path).await?),
                (Address::Tcp(..), None, Some(at)) => Box::new(dial::tcp_at(at, TIMEOUTS).await?),
                (Address::Tcp(host, port), None, None) => Box::new(dial::tcp(host, *port, TIMEOUTS).await?),
                (Address::Tcp(host, _), Some(tls), Some(at)) => {
                    Box::new(dial::tls_at(at, TIMEOUTS, tls.config()?, host).await?)
                }
                (Address::Tcp(host, port), Some(tls), None) => {
                    Box::new(dial::tls(host, *port, TIMEOUTS, tls.config()?, host).await?)
                }
            };
            Ok(socket)
        })
    }
}

impl Guarded {
    /// Wraps a socket to `server`. Calls `report` with the first refused reply.
    pub fn new(socket: RedisSocket, server: &Address, report: impl Fn(&RejectedReply) + Send + 'static) -> Self {
        let (server, replies) = (server.to_string(), ReplyStream::default());
        Self { socket, server, replies, refused: None, failure: Arc::default(), report: Box::new(report) }
    }

    /// Returns the place of the error that ends the connection. The Redis client tells it to a call in flight only.
    pub fn failure(&self) -> Arc<OnceLock<io::Error>> {
        Arc::clone(&self.failure)
    }

    fn read(&mut self, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if let Some(refused) = &self.refused {
            return Poll::Ready(Err(refused.clone().into()));
        }
        let before = into.filled().len();
        ready!(Pin::new(&mut self.socket).poll_read(cx, into))?;
        let read = into.filled().get(before..).unwrap_or_default();
        Poll::Ready(self.replies.received(read).map_err(|refusal| {
            let refused = RejectedReply { server: self.server.clone(), refusal };
            (self.report)(&refused);
            self.refused = Some(refused.clone());
            refused.into()
        }))
    }
}

impl AsyncRead for Guarded {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let read = self.read(cx, into);
        if let Poll::Ready(Err(error)) = &read {
            self.failure.get_or_init(|| again(error));
        }
        read
    }
}

/// Returns the same error once more.
pub fn again(error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), error.to_string())
}

impl AsyncWrite for Guarded {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = &mut *self;
        let written = ready!(Pin::new(&mut this.socket).poll_write(cx, bytes))?;
        this.replies.sent(bytes.get(..written).unwrap_or_default());
        Poll::Ready(Ok(written))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_shutdown(cx)
    }
}
