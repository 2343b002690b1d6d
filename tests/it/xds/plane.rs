//! A management server that sends what the test says, and records each request.

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;

use futures_util::{Stream, StreamExt, stream};
use prost::Message;
use tidegate::proto::envoy::service::discovery::v3::aggregated_discovery_service_server::{
    AggregatedDiscoveryService, AggregatedDiscoveryServiceServer,
};
use tidegate::proto::envoy::service::discovery::v3::{DiscoveryRequest, DiscoveryResponse};
use tidegate::proto::ratelimit::config::ratelimit::v3::{
    RateLimitConfig, RateLimitDescriptor, RateLimitPolicy, RateLimitUnit,
};
use tokio::net::TcpListener;
use tokio::sync::{Mutex, mpsc};
use tokio::task::JoinHandle;
use tonic::metadata::MetadataMap;
use tonic::transport::{Certificate, Identity, Server, ServerTlsConfig};
use tonic::{Request, Response, Status, Streaming};

use crate::http::{self, Answer};
use crate::redis::certificates::{Authority, Issued};
use crate::support::{Tidegate, eventually, in_time};

/// Type of the resources.
pub const TYPE_URL: &str = "type.googleapis.com/ratelimit.config.ratelimit.v3.RateLimitConfig";

/// A management server. It ends when it is dropped.
pub struct Plane {
    /// Where it listens.
    pub address: SocketAddr,
    requests: mpsc::UnboundedReceiver<DiscoveryRequest>,
    streams: mpsc::UnboundedReceiver<(MetadataMap, StreamTo)>,
    server: JoinHandle<()>,
}

/// The sending side of a stream; the stream ends when it is dropped.
pub type StreamTo = mpsc::UnboundedSender<Result<DiscoveryResponse, Status>>;

/// Certificates of a management server, and the authority of its clients.
pub struct Secured {
    /// Its certificate and key.
    pub own: Issued,
    /// The authority that its clients need a certificate of.
    pub clients: std::path::PathBuf,
}

impl Secured {
    /// A server for `127.0.0.1` whose certificate, and those of its clients, are of `authority`.
    pub fn by(authority: &Authority) -> Self {
        Self { own: authority.issue("127.0.0.1"), clients: authority.certificate() }
    }

    fn config(&self) -> ServerTlsConfig {
        let read = |path: &std::path::Path| std::fs::read(path).expect("it is there");
        let identity = Identity::from_pem(read(&self.own.certificate), read(&self.own.key));
        ServerTlsConfig::new().identity(identity).client_ca_root(Certificate::from_pem(read(&self.clients)))
    }
}

struct Service {
    requests: mpsc::UnboundedSender<DiscoveryRequest>,
    streams: mpsc::UnboundedSender<(MetadataMap, StreamTo)>,
}

impl Drop for Plane {
    fn drop(&mut self) {
        self.server.abort();
    }
}

#[tonic::async_trait]
impl AggregatedDiscoveryService for Service {
    type StreamAggregatedResourcesStream = Pin<Box<dyn Stream<Item = Result<DiscoveryResponse, Status>> + Send>>;

    async fn stream_aggregated_resources(
        &self,
        request: Request<Streaming<DiscoveryRequest>>,
    ) -> Result<Response<Self::StreamAggregatedResourcesStream>, Status> {
        let (send, receive) = mpsc::unbounded_channel();
        let _ = self.streams.send((request.metadata().clone(), send));
        let requests = self.requests.clone();
        let mut incoming = request.into_inner();
        tokio::spawn(async move {
            while let Some(Ok(request)) = incoming.next().await {
                let _ = requests.send(request);
            }
        });
        let answers = stream::unfold(receive, async |mut receive| Some((receive.recv().await?, receive)));
        Ok(Response::new(Box::pin(answers)))
    }
}

impl Plane {
    /// Starts one in plaintext.
    pub async fn start() -> Self {
        Self::start_at("127.0.0.1:0".parse().expect("an address"), None).await
    }

    /// Starts one at `address`, over TLS if `secured` is given.
    pub async fn start_at(address: SocketAddr, secured: Option<&Secured>) -> Self {
        let listener = eventually("the port is free", async || TcpListener::bind(address).await.ok()).await;
        let address = listener.local_addr().expect("it has one");
        let (to_requests, requests) = mpsc::unbounded_channel();
        let (to_streams, streams) = mpsc::unbounded_channel();
        let service = AggregatedDiscoveryServiceServer::new(Service { requests: to_requests, streams: to_streams });
        let listener = Arc::new(Mutex::new(listener));
        let incoming = stream::unfold(listener, async |listener| {
            let accepted = listener.lock().await.accept().await.map(|(stream, _)| stream);
            Some((accepted, listener))
        });
        let server = match secured {
            Some(secured) => Server::builder().tls_config(secured.config()).expect("valid certificates"),
            None => Server::builder(),
        };
        let serving = { server }.add_service(service).serve_with_incoming(incoming);
        let server = tokio::spawn(async { serving.await.expect("it serves") });
        Self { address, requests, streams, server }
    }

    /// The next request of any stream.
    pub async fn request(&mut self) -> DiscoveryRequest {
        in_time("a request comes", self.requests.recv()).await.expect("the server runs")
    }

    /// True if a request has come that was not taken yet.
    pub fn has_request(&self) -> bool {
        !self.requests.is_empty()
    }

    /// The next stream, and its first request.
    pub async fn stream(&mut self) -> (StreamTo, DiscoveryRequest) {
        let (_, stream, request) = self.stream_with_headers().await;
        (stream, request)
    }

    /// The headers of the next stream, the stream, and its first request.
    pub async fn stream_with_headers(&mut self) -> (MetadataMap, StreamTo, DiscoveryRequest) {
        let (headers, stream) = in_time("a stream is opened", self.streams.recv()).await.expect("the server runs");
        (headers, stream, self.request().await)
    }

    /// The variables of a process that gets its rules here.
    pub fn variables(&self) -> Vec<(String, String)> {
        [
            ("CONFIG_TYPE", "GRPC_XDS_SOTW".to_owned()),
            ("CONFIG_GRPC_XDS_SERVER_URL", self.address.to_string()),
            ("CONFIG_GRPC_XDS_NODE_ID", "node-1".to_owned()),
            ("CONFIG_GRPC_XDS_NODE_METADATA", "zone=a,dropped".to_owned()),
            ("XDS_CLIENT_BACKOFF_INITIAL_INTERVAL", "10ms".to_owned()),
            ("LOG_LEVEL", "info".to_owned()),
        ]
        .map(|(name, value)| (name.to_owned(), value))
        .into()
    }
}

/// A resource with one limit on the key `user`.
pub fn limit(name: &str, domain: &str, unit: RateLimitUnit, requests_per_unit: u32) -> RateLimitConfig {
    let policy = RateLimitPolicy { unit: unit.into(), requests_per_unit, ..RateLimitPolicy::default() };
    let descriptor =
        RateLimitDescriptor { key: "user".to_owned(), rate_limit: Some(policy), ..RateLimitDescriptor::default() };
    RateLimitConfig { name: name.to_owned(), domain: domain.to_owned(), descriptors: vec![descriptor] }
}

/// A response with these resources.
pub fn response(version: &str, nonce: &str, resources: &[RateLimitConfig]) -> Result<DiscoveryResponse, Status> {
    let any =
        |config: &RateLimitConfig| prost_types::Any { type_url: TYPE_URL.to_owned(), value: config.encode_to_vec() };
    Ok(DiscoveryResponse {
        version_info: version.to_owned(),
        nonce: nonce.to_owned(),
        type_url: TYPE_URL.to_owned(),
        resources: resources.iter().map(any).collect(),
    })
}

/// The requested version, the nonce, and the reasons of a refusal.
pub fn answer(request: &DiscoveryRequest) -> (&str, &str, Option<&str>) {
    let reasons = request.error_detail.as_ref().map(|detail| detail.message.as_str());
    (&request.version_info, &request.response_nonce, reasons)
}

/// The limits in force, as the debug page shows them.
pub async fn rlconfig(server: &Tidegate) -> String {
    page(server, "/rlconfig").await
}

/// The debug page at `path`.
pub async fn page(server: &Tidegate, path: &str) -> String {
    http::get(server.debug, path).await.body.trim().to_owned()
}

/// The answer to a call for `user` in `edge`.
pub async fn call(server: &Tidegate) -> Answer {
    http::post(server.http, "/json", http::descriptor("edge", &[("user", "a")])).await
}

/// Starts a process with these variables.
pub async fn start(variables: &[(String, String)], more: &[(&str, &str)]) -> Tidegate {
    let given: Vec<_> = variables.iter().map(|(name, value)| (&**name, &**value)).chain(more.iter().copied()).collect();
    Tidegate::start_with(None, &given).await
}
