//! A receiver of spans and metrics, from the protocol's own definitions: over gRPC or HTTP, and one that takes the connection and says nothing.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::routing::post;
use opentelemetry_proto::tonic::collector::metrics::v1::metrics_service_server::{
    MetricsService, MetricsServiceServer,
};
use opentelemetry_proto::tonic::collector::metrics::v1::{ExportMetricsServiceRequest, ExportMetricsServiceResponse};
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{TraceService, TraceServiceServer};
use opentelemetry_proto::tonic::collector::trace::v1::{ExportTraceServiceRequest, ExportTraceServiceResponse};
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue};
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status};

use crate::redis::certificates::Authority;
use crate::support::eventually;

/// A receiver of spans and metrics. It ends when it is dropped.
pub struct Receiver {
    /// Where it listens.
    pub at: SocketAddr,
    taken: Taken,
    _server: AbortOnDrop,
}

/// What was received.
#[derive(Clone, Default)]
struct Taken(Arc<Mutex<Vec<Delivery>>>, Arc<Mutex<Vec<Metrics>>>);

/// One delivery of metrics.
#[derive(Clone)]
pub struct Metrics {
    /// What was sent.
    pub request: ExportMetricsServiceRequest,
    /// The header `api-key`.
    pub key: Option<String>,
}

/// One delivery.
struct Delivery {
    request: ExportTraceServiceRequest,
    key: Option<String>,
}

/// A span, and who made it.
#[derive(Clone, Debug)]
pub struct Received {
    /// The span.
    pub span: Span,
    /// What its process says of itself.
    pub resource: Vec<KeyValue>,
}

/// A task that ends when this is dropped.
pub struct AbortOnDrop(JoinHandle<()>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Receiver {
    /// One that speaks gRPC.
    pub async fn grpc() -> Self {
        Self::grpc_on(listener().await)
    }

    /// One that speaks gRPC on this listener.
    pub fn grpc_on(listener: TcpListener) -> Self {
        let taken = Taken::default();
        let at = listener.local_addr().expect("it is bound");
        let server = tonic::transport::Server::builder()
            .add_service(TraceServiceServer::new(taken.clone()))
            .add_service(MetricsServiceServer::new(taken.clone()));
        let serving = server.serve_with_incoming(TcpIncoming::from(listener));
        Self { at, taken, _server: AbortOnDrop(tokio::spawn(async { serving.await.expect("it serves") })) }
    }

    /// One that speaks HTTP.
    pub async fn http() -> Self {
        let (taken, listener) = (Taken::default(), listener().await);
        let at = listener.local_addr().expect("it is bound");
        let routes = Router::new().route("/v1/traces", post(take)).route("/v1/metrics", post(take_metrics));
        let routes = routes.with_state(taken.clone());
        let serving = axum::serve(listener, routes).into_future();
        Self { at, taken, _server: AbortOnDrop(tokio::spawn(async { serving.await.expect("it serves") })) }
    }

    /// One that takes connections, and says nothing on them.
    pub async fn silent() -> Self {
        let listener = listener().await;
        let at = listener.local_addr().expect("it is bound");
        let server = tokio::spawn(async move {
            let mut connections = Vec::new();
            loop {
                connections.push(listener.accept().await);
            }
        });
        Self { at, taken: Taken::default(), _server: AbortOnDrop(server) }
    }

    /// A way to it under TLS, by the name `localhost`.
    pub async fn under_tls(&self, authority: &Authority) -> (String, AbortOnDrop) {
        self.under_tls_for(authority, None).await
    }

    /// The same, only for clients with a certificate of `clients`, if that is given.
    pub async fn under_tls_for(&self, authority: &Authority, clients: Option<&Authority>) -> (String, AbortOnDrop) {
        let issued = authority.issue("localhost");
        let chain =
            CertificateDer::pem_file_iter(&issued.certificate).expect("it reads").map(|read| read.expect("PEM"));
        let key = PrivateKeyDer::from_pem_file(&issued.key).expect("a key");
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let config = config.expect("the protocol");
        let config = match clients {
            None => config.with_no_client_auth(),
            Some(clients) => {
                let mut roots = RootCertStore::empty();
                let certificate = CertificateDer::from_pem_file(clients.certificate()).expect("a certificate");
                roots.add(certificate).expect("an authority");
                let provider = Arc::new(rustls::crypto::ring::default_provider());
                let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider).build();
                config.with_client_cert_verifier(verifier.expect("a verifier"))
            }
        };
        let config = config.with_single_cert(chain.collect(), key);
        let mut config = config.expect("a key of this certificate");
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        let (acceptor, listener, to) = (TlsAcceptor::from(Arc::new(config)), listener().await, self.at);
        let url = format!("https://localhost:{}", listener.local_addr().expect("it is bound").port());
        let way = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                // Who does not trust us leaves.
                let Ok(mut stream) = acceptor.accept(stream).await else { continue };
                let mut plain = TcpStream::connect(to).await.expect("it listens");
                tokio::spawn(async move { tokio::io::copy_bidirectional(&mut stream, &mut plain).await });
            }
        });
        (url, AbortOnDrop(way))
    }

    /// Where it is, as a URL.
    pub fn url(&self) -> String {
        format!("http://{}", self.at)
    }

    /// What it was told so far.
    pub fn spans(&self) -> Vec<Received> {
        let deliveries = self.taken.0.lock().expect("nobody panicked");
        let resources = deliveries.iter().flat_map(|delivery| &delivery.request.resource_spans);
        let received = resources.flat_map(|of| {
            let resource = of.resource.as_ref().map(|resource| resource.attributes.clone()).unwrap_or_default();
            let spans = of.scope_spans.iter().flat_map(|of| &of.spans).cloned();
            spans.map(move |span| Received { span, resource: resource.clone() })
        });
        received.collect()
    }

    /// The metrics that it was told so far, in the order of the deliveries.
    pub fn metrics(&self) -> Vec<Metrics> {
        self.taken.1.lock().expect("nobody panicked").clone()
    }

    /// Everything, as it came.
    pub fn bytes(&self) -> Vec<u8> {
        let deliveries = self.taken.0.lock().expect("nobody panicked");
        deliveries.iter().flat_map(|delivery| delivery.request.encode_to_vec()).collect()
    }

    /// The keys that deliveries came with, in the header `api-key`.
    pub fn keys(&self) -> Vec<Option<String>> {
        self.taken.0.lock().expect("nobody panicked").iter().map(|delivery| delivery.key.clone()).collect()
    }

    /// The spans of this kind, once there are so many.
    pub async fn of_kind(&self, kind: i32, count: usize) -> Vec<Received> {
        eventually(&format!("{count} spans of kind {kind} come"), async || {
            let mut spans = self.spans();
            spans.retain(|received| received.span.kind == kind);
            assert!(spans.len() <= count, "no more than that: {spans:?}");
            (spans.len() == count).then_some(spans)
        })
        .await
    }
}

impl Received {
    /// An attribute of the span.
    pub fn attribute(&self, key: &str) -> Option<String> {
        find(&self.span.attributes, key)
    }

    /// An attribute of its process.
    pub fn of_process(&self, key: &str) -> Option<String> {
        find(&self.resource, key)
    }
}

fn find(attributes: &[KeyValue], key: &str) -> Option<String> {
    let found = attributes.iter().find(|pair| pair.key == key)?.value.clone();
    Some(match found {
        Some(AnyValue { value: Some(Value::StringValue(text)) }) => text,
        Some(AnyValue { value: Some(Value::IntValue(number)) }) => number.to_string(),
        other => panic!("{key} is {other:?}"),
    })
}

#[tonic::async_trait]
impl TraceService for Taken {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        let key = request.metadata().get("api-key").map(|key| key.to_str().expect("text").to_owned());
        self.0.lock().expect("nobody panicked").push(Delivery { request: request.into_inner(), key });
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

#[tonic::async_trait]
impl MetricsService for Taken {
    async fn export(
        &self,
        request: Request<ExportMetricsServiceRequest>,
    ) -> Result<Response<ExportMetricsServiceResponse>, Status> {
        let key = request.metadata().get("api-key").map(|key| key.to_str().expect("text").to_owned());
        self.1.lock().expect("nobody panicked").push(Metrics { request: request.into_inner(), key });
        Ok(Response::new(ExportMetricsServiceResponse::default()))
    }
}

async fn take_metrics(State(taken): State<Taken>, headers: HeaderMap, body: Bytes) -> Vec<u8> {
    assert_eq!(headers["content-type"], "application/x-protobuf");
    let request = ExportMetricsServiceRequest::decode(body).expect("the protocol's message");
    let key = headers.get("api-key").map(|key| key.to_str().expect("text").to_owned());
    taken.1.lock().expect("nobody panicked").push(Metrics { request, key });
    ExportMetricsServiceResponse::default().encode_to_vec()
}

async fn take(State(taken): State<Taken>, headers: HeaderMap, body: Bytes) -> Vec<u8> {
    assert_eq!(headers["content-type"], "application/x-protobuf");
    let request = ExportTraceServiceRequest::decode(body).expect("the protocol's message");
    let key = headers.get("api-key").map(|key| key.to_str().expect("text").to_owned());
    taken.0.lock().expect("nobody panicked").push(Delivery { request, key });
    ExportTraceServiceResponse::default().encode_to_vec()
}

async fn listener() -> TcpListener {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a free port")
}
