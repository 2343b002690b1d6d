//! Channels for gRPC calls to another server, in plaintext or over TLS.

use std::io;
use std::path::PathBuf;

use hyper_util::rt::TokioIo;
use rustls::ClientConfig;
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;
use tonic::codegen::http::Uri;
use tonic::transport::{Channel, Endpoint, Error};
use tower::Service;

use super::TcpTimeouts;

/// User agent of all calls.
const AGENT: &str = concat!("tidegate/", env!("CARGO_PKG_VERSION"));

/// Server of gRPC calls.
#[derive(Clone, Debug)]
pub struct GrpcServer {
    /// Name or address of the host, without brackets.
    pub host: String,
    /// Port.
    pub port: u16,
    /// TLS settings, and the name that the certificate of the server must have; `None` for plaintext.
    pub tls: Option<(ClientConfig, String)>,
    /// Times after which a silent server is given up.
    pub timeouts: TcpTimeouts,
}

impl GrpcServer {
    /// Connects. `with` adds the settings of the caller.
    ///
    /// # Errors
    /// If there is no connection, or the host is no part of an address.
    pub async fn connect(self, with: impl FnOnce(Endpoint) -> Endpoint) -> Result<Channel, Error> {
        let endpoint = self.endpoint(with)?;
        let Self { host, port, tls, timeouts } = self;
        let Some(tls) = tls else {
            let connect = move |_: Uri| {
                let host = host.clone();
                async move { super::tcp(&host, port, timeouts).await.map(TokioIo::new) }
            };
            return endpoint.connect_with_connector(tower::service_fn(connect)).await;
        };
        endpoint.connect_with_connector(over_tls(host, port, timeouts, tls)).await
    }

    /// Returns a channel that connects at its first call.
    ///
    /// # Errors
    /// If the host is no part of an address.
    pub fn lazy(self, with: impl FnOnce(Endpoint) -> Endpoint) -> Result<Channel, Error> {
        let endpoint = self.endpoint(with)?;
        let Self { host, port, tls, timeouts } = self;
        Ok(match tls {
            Some(tls) => endpoint.connect_with_connector_lazy(over_tls(host, port, timeouts, tls)),
            None => endpoint.connect_lazy(),
        })
    }

    /// Returns the endpoint without a connector.
    fn endpoint(&self, with: impl FnOnce(Endpoint) -> Endpoint) -> Result<Endpoint, Error> {
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        let authority = super::authority(&self.host, self.port);
        // The connector speaks TLS, so tonic must not.
        let endpoint = with(Endpoint::from_shared(format!("http://{authority}"))?.user_agent(AGENT)?);
        Ok(match format!("{scheme}://{authority}").parse::<Uri>() {
            Ok(origin) => endpoint.origin(origin),
            Err(_) => endpoint,
        })
    }
}

/// Returns a connector over TLS, with its settings and the name that the certificate must have.
fn over_tls(
    host: String,
    port: u16,
    timeouts: TcpTimeouts,
    (mut config, name): (ClientConfig, String),
) -> impl Service<Uri, Response = TokioIo<TlsStream<TcpStream>>, Error = io::Error, Future: Send> {
    config.alpn_protocols = vec![b"h2".to_vec()];
    tower::service_fn(move |_: Uri| {
        let (host, config, name) = (host.clone(), config.clone(), name.clone());
        async move { super::tls(&host, port, timeouts, config, &name).await.map(TokioIo::new) }
    })
}

/// Connects over TLS to the Unix socket at `path`, whose certificate must be for `name`. `with` adds the settings of the caller.
///
/// # Errors
/// If there is no connection.
pub async fn over_socket(
    path: PathBuf,
    mut config: ClientConfig,
    name: String,
    with: impl FnOnce(Endpoint) -> Endpoint,
) -> Result<Channel, Error> {
    // A socket has no host. The connector speaks TLS, so tonic must not.
    let endpoint = with(Endpoint::from_static("http://localhost").user_agent(AGENT)?);
    config.alpn_protocols = vec![b"h2".to_vec()];
    let connect = move |_: Uri| {
        let (path, config, name) = (path.clone(), config.clone(), name.clone());
        async move { super::socket_tls(&path, config, &name).await.map(TokioIo::new) }
    };
    endpoint.origin(Uri::from_static("https://localhost")).connect_with_connector(tower::service_fn(connect)).await
}

/// Returns the text of an error and of its causes: the gRPC library's own text is only "transport error". Some causes repeat the text
/// of their own cause.
pub fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        let cause = error.to_string();
        if !text.ends_with(&cause) {
            text = format!("{text}: {cause}");
        }
        source = error.source();
    }
    text
}
