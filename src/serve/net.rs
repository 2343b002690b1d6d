//! Sockets of the gRPC listener: TCP or Unix.

use std::fmt;
use std::fs::{self, Permissions};
use std::io::{Error, ErrorKind, IoSlice, Result};
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener as StdUnixListener, UnixStream as StdUnixStream};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::task::{Context, Poll};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, socket_with};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpSocket, TcpStream, UnixListener, UnixStream};

/// Maximum number of connections that wait to be accepted: 65,535. The kernel uses the smaller of it and
/// `net.core.somaxconn`, 4,096 by default. A gateway opens as many connections at once as it has checks in flight, and
/// an attempt beyond the backlog is repeated after a second, which is too late for the gateway.
const BACKLOG: u16 = u16::MAX;

/// A bound socket that accepts connections.
#[derive(Debug)]
pub enum NetListener {
    /// A TCP port.
    Tcp(TcpListener),
    /// A Unix socket, whose file is removed at the end.
    Unix(UnixListener, SocketFile),
}

/// Address of a listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NetAddress {
    /// Address and port.
    Tcp(SocketAddr),
    /// Path of a Unix socket.
    Unix(PathBuf),
}

/// The file of a bound Unix socket. Dropping it removes the file, unless another file has taken its place.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    /// Device and inode of the file.
    identity: (u64, u64),
}

/// An accepted stream, not yet registered with a runtime.
#[derive(Debug)]
pub(super) enum AcceptedStream {
    Tcp(std::net::TcpStream),
    Unix(StdUnixStream),
}

/// A stream to a peer.
#[derive(Debug)]
pub(super) enum NetStream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl NetListener {
    /// Listens on a Unix socket at `path`, whose file gets the permission bits `mode`; `None`: those that the umask leaves. A
    /// socket there on which nobody listens is removed first.
    ///
    /// # Errors
    /// If another process listens there, the file is no socket, or the system refuses it.
    pub async fn unix(path: &Path, mode: Option<u32>) -> Result<Self> {
        remove_stale(path).await?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        bind(&socket, &SocketAddrUnix::new(path)?)?;
        let of_file = fs::symlink_metadata(path)?;
        let file = SocketFile { path: path.to_owned(), identity: (of_file.dev(), of_file.ino()) };
        if let Some(mode) = mode {
            // Before anyone can connect.
            fs::set_permissions(path, Permissions::from_mode(mode))?;
        }
        rustix::net::listen(&socket, BACKLOG.into())?;
        Ok(Self::Unix(UnixListener::from_std(StdUnixListener::from(socket))?, file))
    }

    /// Returns the address.
    ///
    /// # Errors
    /// If the system does not return it.
    pub fn local_addr(&self) -> Result<NetAddress> {
        Ok(match self {
            Self::Tcp(socket) => NetAddress::Tcp(socket.local_addr()?),
            Self::Unix(_, file) => NetAddress::Unix(file.path.clone()),
        })
    }

    /// Accepts a connection. Returns it with the address of its peer, which a Unix socket has not.
    pub(super) async fn accept(&self) -> Result<(AcceptedStream, Option<IpAddr>)> {
        match self {
            Self::Tcp(socket) => {
                let (stream, client) = socket.accept().await?;
                // Without TCP_NODELAY, an answer would wait for the acknowledgement of the one before. A socket that
                // refuses the option is dead already and ends by itself.
                let _ = stream.set_nodelay(true);
                Ok((AcceptedStream::Tcp(stream.into_std()?), Some(client.ip())))
            }
            Self::Unix(socket, _) => Ok((AcceptedStream::Unix(socket.accept().await?.0.into_std()?), None)),
        }
    }
}

/// Listens on `address`.
///
/// # Errors
/// If the system refuses the address.
pub fn listen(address: SocketAddr) -> Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    // A restart can bind while connections of the process before it are ending.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG.into())
}

/// Removes the socket at `path` if nobody listens on it.
async fn remove_stale(path: &Path) -> Result<()> {
    let file_type = match fs::symlink_metadata(path) {
        Ok(metadata) => metadata.file_type(),
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    if !file_type.is_socket() {
        return Err(Error::new(ErrorKind::AlreadyExists, "the file there is no socket"));
    }
    match UnixStream::connect(path).await {
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => fs::remove_file(path),
        // A full queue of connections is an error too, and somebody listens then.
        Ok(_) | Err(_) => Err(Error::new(ErrorKind::AddrInUse, "another process listens there")),
    }
}

impl fmt::Display for NetAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => address.fmt(f),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let is_ours = fs::symlink_metadata(&self.path).is_ok_and(|file| (file.dev(), file.ino()) == self.identity);
        if is_ours {
            // Nobody is left to hear of a failure; the next start removes the file.
            let _ = fs::remove_file(&self.path);
        }
    }
}

impl AcceptedStream {
    /// Registers the stream with the runtime of the caller.
    pub(super) fn register(self) -> Result<NetStream> {
        Ok(match self {
            Self::Tcp(stream) => NetStream::Tcp(TcpStream::from_std(stream)?),
            Self::Unix(stream) => NetStream::Unix(UnixStream::from_std(stream)?),
        })
    }
}

impl NetStream {
    /// Takes the stream from its runtime.
    pub(super) fn unregister(self) -> Result<AcceptedStream> {
        Ok(match self {
            Self::Tcp(stream) => AcceptedStream::Tcp(stream.into_std()?),
            Self::Unix(stream) => AcceptedStream::Unix(stream.into_std()?),
        })
    }

    /// Returns the address of the peer. `None` if it has already left, or on a Unix socket.
    pub(super) fn peer_address(&self) -> Option<IpAddr> {
        match self {
            Self::Tcp(stream) => Some(stream.peer_addr().ok()?.ip()),
            Self::Unix(_) => None,
        }
    }
}

impl AsyncRead for NetStream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_read(cx, buffer),
            Self::Unix(stream) => Pin::new(stream).poll_read(cx, buffer),
        }
    }
}

impl AsyncWrite for NetStream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<Result<usize>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_write(cx, bytes),
            Self::Unix(stream) => Pin::new(stream).poll_write(cx, bytes),
        }
    }

    fn poll_write_vectored(self: Pin<&mut Self>, cx: &mut Context<'_>, parts: &[IoSlice<'_>]) -> Poll<Result<usize>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_write_vectored(cx, parts),
            Self::Unix(stream) => Pin::new(stream).poll_write_vectored(cx, parts),
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_flush(cx),
            Self::Unix(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_shutdown(cx),
            Self::Unix(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt;

    use super::*;

    #[tokio::test]
    async fn a_restart_binds_while_connections_of_the_process_before_it_are_ending() {
        let listener = listen(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        let address = listener.local_addr().unwrap();
        let (client, accepted) = tokio::join!(TcpStream::connect(address), listener.accept());
        // The system keeps the address for the side that closes first.
        drop((accepted, listener));
        let mut client = client.unwrap();
        assert_eq!(client.read(&mut [0]).await.unwrap(), 0);
        drop(client);
        listen(address).unwrap();
    }
}
