//! Sockets to Redis servers. The bytes to and from the Redis client are checked on their way.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures_util::future::select_ok;
use redis::aio::AsyncStream;
use redis::io::tcp::socket2::{SockRef, TcpKeepalive};
use rustls::pki_types::ServerName;
use thiserror::Error;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UnixStream, lookup_host};
use tokio_rustls::TlsConnector;

use super::address::Address;
use super::replies::{InvalidReply, ReplyStream};
use super::tls::Tls;

/// TCP keepalive: an idle connection is probed after 15 s.
const KEEPALIVE: Duration = Duration::from_secs(15);
/// TCP user timeout: the kernel drops a connection whose bytes are not acknowledged for 1.5 s. Its default of 15 minutes is too
/// long.
const USER_TIMEOUT: Duration = Duration::from_millis(1_500);

/// A byte stream to and from a server.
pub type RedisSocket = Box<dyn AsyncStream + Send + Unpin>;

/// A socket whose reads fail after bytes that no Redis server sends.
pub struct Guarded {
    socket: RedisSocket,
    server: String,
    replies: ReplyStream,
    refused: Option<RejectedReply>,
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

/// Connects to `address`; over TCP with TLS if `tls` is given.
///
/// # Errors
/// If the server does not accept the connection, or TLS fails.
pub async fn connect(address: &Address, tls: Option<&Tls>) -> io::Result<RedisSocket> {
    match (address, tls) {
        (Address::Unix(path), _) => Ok(Box::new(UnixStream::connect(path).await?)),
        (Address::Tcp(host, port), None) => Ok(Box::new(first(lookup_host((host.as_str(), *port)).await?, tcp).await?)),
        (Address::Tcp(host, port), Some(tls)) => {
            let connector = TlsConnector::from(Arc::new(tls.config()?));
            let name = ServerName::try_from(host.clone()).map_err(io::Error::other)?;
            let connected = first(lookup_host((host.as_str(), *port)).await?, |address| {
                let (connector, name) = (&connector, name.clone());
                async move { connector.connect(name, tcp(address).await?).await }
            });
            Ok(Box::new(connected.await?))
        }
    }
}

/// Connects to all `addresses` of a host at once. Returns the first connection.
async fn first<T, F: Future<Output = io::Result<T>>>(
    addresses: impl Iterator<Item = SocketAddr>,
    connect: impl Fn(SocketAddr) -> F,
) -> io::Result<T> {
    let attempts: Vec<_> = addresses.map(|address| Box::pin(connect(address))).collect();
    if attempts.is_empty() {
        return Err(io::Error::new(io::ErrorKind::NotFound, "the host has no address"));
    }
    Ok(select_ok(attempts).await?.0)
}

async fn tcp(address: SocketAddr) -> io::Result<TcpStream> {
    let stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    let socket = SockRef::from(&stream);
    socket.set_tcp_keepalive(&TcpKeepalive::new().with_time(KEEPALIVE).with_interval(KEEPALIVE))?;
    socket.set_tcp_user_timeout(Some(USER_TIMEOUT))?;
    Ok(stream)
}

impl Guarded {
    /// Wraps a socket to `server`. Calls `report` with the first refused reply.
    pub fn new(socket: RedisSocket, server: &Address, report: impl Fn(&RejectedReply) + Send + 'static) -> Self {
        let (server, replies) = (server.to_string(), ReplyStream::default());
        Self { socket, server, replies, refused: None, report: Box::new(report) }
    }
}

impl AsyncRead for Guarded {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if let Some(refused) = &this.refused {
            return Poll::Ready(Err(refused.clone().into()));
        }
        let before = into.filled().len();
        ready!(Pin::new(&mut this.socket).poll_read(cx, into))?;
        let read = into.filled().get(before..).unwrap_or_default();
        Poll::Ready(this.replies.received(read).map_err(|refusal| {
            let refused = RejectedReply { server: this.server.clone(), refusal };
            (this.report)(&refused);
            this.refused = Some(refused.clone());
            refused.into()
        }))
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_host_without_an_address_is_an_error() {
        let connected = first(std::iter::empty(), tcp).await;
        assert_eq!(connected.err().map(|error| error.kind()), Some(io::ErrorKind::NotFound));
    }
}
