//! TLS, and handshakes that are begun and never finished.

use std::error::Error;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use rustls::pki_types::{CertificateDer, ServerName, pem::PemObject};
use rustls::{ClientConfig, ClientConnection, RootCertStore};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::options::Options;

/// A server: where it is, and how it proves its name.
#[derive(Clone)]
pub struct Server {
    pub address: String,
    config: Option<Arc<ClientConfig>>,
}

impl Server {
    pub fn of(options: &Options) -> Result<Self, Box<dyn Error>> {
        let config = options.ca.as_deref().map(config).transpose()?;
        Ok(Self { address: options.address.clone(), config })
    }

    pub async fn tcp(&self) -> std::io::Result<TcpStream> {
        let socket = TcpStream::connect(&self.address).await?;
        socket.set_nodelay(true)?;
        Ok(socket)
    }

    /// Finishes the handshake on `socket`, or gives it back if the server speaks plaintext.
    pub async fn tls(&self, socket: TcpStream) -> Result<Result<TlsStream<TcpStream>, TcpStream>, Box<dyn Error>> {
        let Some(config) = &self.config else { return Ok(Err(socket)) };
        Ok(Ok(TlsConnector::from(config.clone()).connect(self.name()?, socket).await?))
    }

    fn name(&self) -> Result<ServerName<'static>, Box<dyn Error>> {
        let (host, _) = self.address.rsplit_once(':').ok_or("--addr has no port")?;
        Ok(ServerName::try_from(host.to_owned())?)
    }
}

/// Trusts the certificates in `ca` and asks for HTTP/2.
fn config(ca: &Path) -> Result<Arc<ClientConfig>, Box<dyn Error>> {
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_file_iter(ca)? {
        roots.add(certificate?)?;
    }
    let mut config = ClientConfig::builder().with_root_certificates(roots).with_no_client_auth();
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(Arc::new(config))
}

/// Begins handshakes on `--conns` connections at once for `--secs`. Each is held for `--hold-ms` after the server's part has
/// come, or until the server ends it, and then replaced.
pub async fn half_open(options: Options) -> Result<String, Box<dyn Error>> {
    let server = Server::of(&options)?;
    let config = server.config.clone().ok_or("half-open needs --ca")?;
    let mut hello = Vec::new();
    ClientConnection::new(config, server.name()?)?.write_tls(&mut hello)?;
    let (hello, begun, refused) = (Arc::new(hello), Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let end = Instant::now() + options.length;
    let lanes = (0..options.connections).map(|_| {
        let (server, hello, begun, refused) = (server.clone(), hello.clone(), begun.clone(), refused.clone());
        tokio::spawn(async move {
            while Instant::now() < end {
                begun.fetch_add(1, Relaxed);
                let left = end.saturating_duration_since(Instant::now());
                let held = tokio::time::timeout(left, hold(&server, &hello, options.hold)).await;
                if held.is_ok_and(|held| held.is_err()) {
                    refused.fetch_add(1, Relaxed);
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
            }
        })
    });
    for lane in lanes.collect::<Vec<_>>() {
        lane.await?;
    }
    let rate = begun.load(Relaxed) as f64 / options.length.as_secs_f64();
    Ok(format!("begun={} per_second={rate:.0} ended_by_server={}", begun.load(Relaxed), refused.load(Relaxed)))
}

/// Fails if the server ends the connection before its time is over.
async fn hold(server: &Server, hello: &[u8], length: Duration) -> std::io::Result<()> {
    let mut socket = server.tcp().await?;
    socket.write_all(hello).await?;
    let mut reply = [0; 4096];
    if socket.read(&mut reply).await? == 0 {
        return Err(std::io::ErrorKind::UnexpectedEof.into());
    }
    let until_closed = async {
        while socket.read(&mut reply).await? > 0 {}
        Err(std::io::ErrorKind::UnexpectedEof.into())
    };
    tokio::time::timeout(length, until_closed).await.unwrap_or(Ok(()))
}
