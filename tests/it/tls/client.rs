//! A client whose certificate, versions of TLS and protocols a test chooses.

use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use h2::client::SendRequest;
use hyper_util::rt::TokioIo;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, HandshakeKind, ProtocolVersion, RootCertStore, SupportedProtocolVersion};
use tidegate::proto::envoy::service::ratelimit::v3::rate_limit_response::Code;
use tidegate::proto::envoy::service::ratelimit::v3::rate_limit_service_client::RateLimitServiceClient;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tonic::transport::{Channel, Endpoint};

use crate::edges::support::{health_check, message};
use crate::grpc;
use crate::redis::certificates::{Authority, Issued};
use crate::support::in_time;

/// A client.
#[derive(Clone)]
pub struct Client(pub ClientConfig);

/// What a client sees of a connection on which a call was answered.
#[derive(Debug)]
pub struct Seen {
    pub version: ProtocolVersion,
    pub kind: HandshakeKind,
    /// The server's own certificate; none on a resumed connection.
    pub certificate: Vec<u8>,
}

impl Client {
    /// A client that trusts this authority and has no certificate.
    pub fn of(authority: &Authority) -> Self {
        Self::of_versions(authority, rustls::DEFAULT_VERSIONS)
    }

    /// The same with these versions only.
    pub fn of_versions(authority: &Authority, versions: &[&'static SupportedProtocolVersion]) -> Self {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_file(authority.certificate()).expect("a certificate")).expect("it is one");
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider).with_protocol_versions(versions).expect("versions");
        let mut config = config.with_root_certificates(roots).with_no_client_auth();
        config.alpn_protocols = vec![b"h2".to_vec()];
        Self(config)
    }

    /// The same with a certificate.
    pub fn with(mut self, issued: &Issued) -> Self {
        let chain: Vec<_> =
            CertificateDer::pem_file_iter(&issued.certificate).expect("a file").map(Result::unwrap).collect();
        let key = PrivateKeyDer::from_pem_file(&issued.key).expect("a key");
        let key = rustls::crypto::ring::sign::any_supported_type(&key).expect("a key that signs");
        // The resolver sends it whatever authorities the server names.
        let certified = rustls::sign::CertifiedKey::new(chain, key);
        self.0.client_auth_cert_resolver = Arc::new(rustls::sign::SingleCertAndKey::from(certified));
        self
    }

    /// The same with these protocols in ALPN.
    pub fn speaking(mut self, protocols: &[&str]) -> Self {
        self.0.alpn_protocols = protocols.iter().map(|protocol| protocol.as_bytes().to_vec()).collect();
        self
    }

    /// A connection after its handshake.
    pub async fn connect(&self, at: SocketAddr) -> std::io::Result<TlsStream<TcpStream>> {
        let tcp = TcpStream::connect(at).await?;
        // Without it, the system delays most calls by 40 ms.
        tcp.set_nodelay(true)?;
        let name = ServerName::from(at.ip());
        TlsConnector::from(Arc::new(self.0.clone())).connect(name, tcp).await
    }

    /// Makes a call on a connection of its own. The error is the text of the first thing that went wrong.
    pub async fn call(&self, at: SocketAddr) -> Result<Seen, String> {
        in_time("there is an answer", async {
            let stream = self.connect(at).await.map_err(|error| error.to_string())?;
            let session = stream.get_ref().1;
            let seen = Seen {
                version: session.protocol_version().expect("a version"),
                kind: session.handshake_kind().expect("a kind"),
                certificate: session.peer_certificates().map_or(Vec::new(), |chain| chain[0].to_vec()),
            };
            // With TLS 1.3, a refusal of the client's certificate arrives after the client's end of the handshake.
            let (client, connection) = h2::client::handshake(stream).await.map_err(|error| error.to_string())?;
            tokio::spawn(connection);
            ask(client).await.map_err(|error| error.to_string())?;
            Ok(seen)
        })
        .await
    }

    /// A connection that is open, and does not come back when it ends.
    pub async fn connection(&self, at: SocketAddr) -> SendRequest<Bytes> {
        let stream = self.connect(at).await.expect("a handshake");
        let (client, connection) = h2::client::handshake(stream).await.expect("a connection");
        tokio::spawn(connection);
        client
    }

    /// A connection of a gRPC library, which connects again when it ends.
    pub fn channel(&self, at: SocketAddr) -> Channel {
        let client = self.clone();
        let connect = move |_| {
            let client = client.clone();
            async move { client.connect(at).await.map(TokioIo::new) }
        };
        Endpoint::from_static("http://server").connect_with_connector_lazy(tower::service_fn(connect))
    }
}

/// Checks the health of the server on this connection.
pub async fn ask(client: SendRequest<Bytes>) -> Result<(), h2::Error> {
    let mut client = client.ready().await?;
    let (answer, mut body) = client.send_request(health_check(), false)?;
    body.send_data(message(""), true)?;
    let mut answer = answer.await?.into_body();
    let mut bytes = Vec::<Bytes>::new();
    while let Some(part) = answer.data().await {
        bytes.push(part?);
    }
    assert_eq!(bytes.concat(), [0, 0, 0, 0, 2, 8, 1], "it serves");
    Ok(())
}

/// Asks for a decision. The error is the status of the call.
pub async fn decide(channel: &Channel) -> Result<(), tonic::Status> {
    let request = grpc::one("edge", "user", "a");
    let answer =
        in_time("it is answered", RateLimitServiceClient::new(channel.clone()).should_rate_limit(request)).await?;
    assert_eq!(answer.into_inner().overall_code(), Code::Ok);
    Ok(())
}
