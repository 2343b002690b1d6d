//! Sockets to Redis servers, and the bytes on them, which are followed on their way to and from Redis' client.

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

use super::manager::Address;
use super::replies::{Refusal, Replies};
use super::tls::Tls;

/// A connection that says nothing is asked for life after 15 s.
const KEEPALIVE: Duration = Duration::from_secs(15);
/// The kernel drops a connection whose bytes nobody acknowledges for 1.5 s; its own 15 minutes are for patient programs.
const USER_TIMEOUT: Duration = Duration::from_millis(1_500);

/// A stream of bytes to a server and from it.
pub type Socket = Box<dyn AsyncStream + Send + Unpin>;

/// A socket whose reads fail once the server answers what no Redis answers.
pub struct Guarded {
    socket: Socket,
    server: String,
    replies: Replies,
    refused: Option<Refused>,
    report: Box<dyn Fn(&Refused) + Send>,
}

/// The end of a connection whose server answered what no Redis answers.
#[derive(Clone, Debug, Error)]
#[error("{server} sent {refusal}")]
pub struct Refused {
    /// The server.
    pub server: String,
    /// What is wrong with its answer.
    pub refusal: Refusal,
}

impl From<Refused> for io::Error {
    /// Redis' client takes a connection for lost after an error of this kind.
    fn from(refused: Refused) -> Self {
        Self::new(io::ErrorKind::ConnectionAborted, refused)
    }
}

/// Connects to a server; with `tls`, in private.
///
/// # Errors
/// When nobody listens there, or it is not who it should be.
pub async fn connect(address: &Address, tls: Option<&Tls>) -> io::Result<Socket> {
    match (address, tls) {
        (Address::Unix(path), _) => Ok(Box::new(UnixStream::connect(path).await?)),
        (Address::Tcp(host, port), None) => Ok(Box::new(first(host, *port, tcp).await?)),
        (Address::Tcp(host, port), Some(tls)) => {
            let connector = TlsConnector::from(Arc::new(tls.config()?));
            let name = ServerName::try_from(host.clone()).map_err(io::Error::other)?;
            let connected = first(host, *port, |address| {
                let (connector, name) = (&connector, name.clone());
                async move { connector.connect(name, tcp(address).await?).await }
            });
            Ok(Box::new(connected.await?))
        }
    }
}

/// Connects to all addresses of a host at once; the first connection is taken.
async fn first<T, F: Future<Output = io::Result<T>>>(
    host: &str,
    port: u16,
    connect: impl Fn(SocketAddr) -> F,
) -> io::Result<T> {
    let attempts: Vec<_> = lookup_host((host, port)).await?.map(|address| Box::pin(connect(address))).collect();
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
    /// A socket to `server`; `report` is called with the first reply that is refused.
    pub fn new(socket: Socket, server: &Address, report: impl Fn(&Refused) + Send + 'static) -> Self {
        let (server, replies) = (server.to_string(), Replies::default());
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
            let refused = Refused { server: this.server.clone(), refusal };
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
