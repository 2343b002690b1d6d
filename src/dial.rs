//! Connections to other servers: TCP, and TLS over it.

use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::select_ok;
use rustix::net::sockopt;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::net::{TcpStream, UnixStream, lookup_host};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

pub mod grpc;
pub mod tls;

/// Times after which the kernel notices that the peer of a TCP connection is gone.
#[derive(Clone, Copy, Debug)]
pub struct TcpTimeouts {
    /// Idle time before the first probe, and the interval of the probes. The kernel rounds to seconds.
    pub keepalive: Duration,
    /// Time after which the connection ends if sent bytes are not acknowledged. The kernel's default is 15 minutes.
    pub unacknowledged: Duration,
}

/// Returns host and port as in a URL.
pub fn authority(host: &str, port: u16) -> String {
    match host.contains(':') {
        true => format!("[{host}]:{port}"),
        false => format!("{host}:{port}"),
    }
}

/// Connects to all addresses of `host` at once. Returns the first connection.
///
/// # Errors
/// If the host has no address, or none accepts the connection.
pub async fn tcp(host: &str, port: u16, timeouts: TcpTimeouts) -> io::Result<TcpStream> {
    first(lookup_host((host, port)).await?, |address| tcp_at(address, timeouts)).await
}

/// Connects over TLS to all addresses of `host` at once. Returns the first connection. Its certificate must be for `name`: a DNS name,
/// which is also sent as the server name, or an IP address.
///
/// # Errors
/// If the host has no address, or none accepts the connection, or TLS fails.
pub async fn tls(
    host: &str,
    port: u16,
    timeouts: TcpTimeouts,
    config: ClientConfig,
    name: &str,
) -> io::Result<TlsStream<TcpStream>> {
    first(lookup_host((host, port)).await?, |address| tls_at(address, timeouts, config.clone(), name)).await
}

/// Connects over TLS to `address`. Its certificate must be for `name`, as in [`tls()`].
///
/// # Errors
/// If it does not accept the connection, or TLS fails.
pub async fn tls_at(
    address: SocketAddr,
    timeouts: TcpTimeouts,
    config: ClientConfig,
    name: &str,
) -> io::Result<TlsStream<TcpStream>> {
    let name = ServerName::try_from(name.to_owned()).map_err(io::Error::other)?;
    TlsConnector::from(Arc::new(config)).connect(name, tcp_at(address, timeouts).await?).await
}

/// Connects over TLS to the Unix socket at `path`. Its certificate must be for `name`, as in [`tls()`].
///
/// # Errors
/// If nobody accepts the connection, or TLS fails.
pub async fn socket_tls(path: &Path, config: ClientConfig, name: &str) -> io::Result<TlsStream<UnixStream>> {
    let name = ServerName::try_from(name.to_owned()).map_err(io::Error::other)?;
    TlsConnector::from(Arc::new(config)).connect(name, UnixStream::connect(path).await?).await
}

/// Connects to all `addresses` of a host at once. Returns the first connection.
///
/// # Errors
/// If there is no address, or none accepts the connection.
pub async fn first<T, F: Future<Output = io::Result<T>>>(
    addresses: impl Iterator<Item = SocketAddr>,
    connect: impl Fn(SocketAddr) -> F,
) -> io::Result<T> {
    let attempts: Vec<_> = addresses.map(|address| Box::pin(connect(address))).collect();
    if attempts.is_empty() {
        return Err(io::Error::new(io::ErrorKind::NotFound, "the host has no address"));
    }
    Ok(select_ok(attempts).await?.0)
}

/// Connects to `address`.
///
/// # Errors
/// If it does not accept the connection.
pub async fn tcp_at(address: SocketAddr, timeouts: TcpTimeouts) -> io::Result<TcpStream> {
    let stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(&stream, true)?;
    sockopt::set_tcp_keepidle(&stream, timeouts.keepalive)?;
    sockopt::set_tcp_keepintvl(&stream, timeouts.keepalive)?;
    let unacknowledged = u32::try_from(timeouts.unacknowledged.as_millis()).unwrap_or(u32::MAX);
    sockopt::set_tcp_user_timeout(&stream, unacknowledged)?;
    Ok(stream)
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn a_host_without_an_address_is_an_error() {
        let connected = first(std::iter::empty(), |address| async move { TcpStream::connect(address).await }).await;
        assert_eq!(connected.err().map(|error| error.kind()), Some(io::ErrorKind::NotFound));
    }

    #[tokio::test]
    async fn the_kernel_notices_a_silent_peer() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let timeouts = TcpTimeouts { keepalive: Duration::from_secs(20), unacknowledged: Duration::from_millis(1_500) };
        let stream = tcp("127.0.0.1", port, timeouts).await.unwrap();
        assert!(sockopt::socket_keepalive(&stream).unwrap());
        assert_eq!(sockopt::tcp_keepidle(&stream).unwrap(), timeouts.keepalive);
        assert_eq!(sockopt::tcp_keepintvl(&stream).unwrap(), timeouts.keepalive);
        assert_eq!(sockopt::tcp_user_timeout(&stream).unwrap(), 1_500);
    }
}
