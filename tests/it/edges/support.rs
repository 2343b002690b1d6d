//! A real listener with a real gRPC service, and peers that speak HTTP/2 frame by frame.

use std::io;
use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use h2::client::SendRequest;
use http::Request;
use tidegate::serve::{
    ConnectionLimits, ConnectionSlots, Drained, Http1, Http2, Listener, NetListener, Tally, Workers,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tonic::codegen::BoxStream;
use tonic::{Response, Status};
use tonic_health::pb::health_client::HealthClient;
use tonic_health::pb::health_server::{Health, HealthServer};
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};

/// What a test waits for a thing that must happen, on a machine that may be very busy.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Health as a service that takes its orders from the name asked for: `wait 300` answers 300 ms later, `panic` panics. A watch
/// says nothing, and does not end.
#[derive(Clone)]
pub struct Obedient;

#[tonic::async_trait]
impl Health for Obedient {
    type WatchStream = BoxStream<HealthCheckResponse>;

    async fn check(
        &self,
        request: tonic::Request<HealthCheckRequest>,
    ) -> Result<Response<HealthCheckResponse>, Status> {
        let order = request.into_inner().service;
        assert!(order != "panic", "as ordered");
        if let Some(wait_ms) = order.strip_prefix("wait ") {
            tokio::time::sleep(Duration::from_millis(wait_ms.parse().unwrap())).await;
        }
        Ok(Response::new(HealthCheckResponse { status: 1 }))
    }

    async fn watch(&self, _: tonic::Request<HealthCheckRequest>) -> Result<Response<Self::WatchStream>, Status> {
        Ok(Response::new(Box::pin(futures_util::stream::pending())))
    }
}

/// A listener that serves on two workers of its own.
pub struct Edge {
    pub address: SocketAddr,
    pub tally: Arc<Tally>,
    stop: watch::Sender<bool>,
    served: JoinHandle<Drained>,
    workers: Workers,
}

impl Edge {
    pub async fn grpc(limits: ConnectionLimits, cap: usize) -> Self {
        Self::grpc_with_most_idle(limits, cap, usize::MAX).await
    }

    pub async fn grpc_with_most_idle(limits: ConnectionLimits, cap: usize, most_idle: usize) -> Self {
        let reflection = tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
            .build_v1()
            .unwrap();
        let routes = tonic::service::Routes::new(HealthServer::new(Obedient)).add_service(reflection).prepare();
        let (listener, stop, stopped, workers) = Self::parts(limits, cap).await;
        let (address, tally) = (listener.1, listener.0.tally());
        let listener = (listener.0.with_most_idle(most_idle), listener.1);
        let served = tokio::spawn(listener.0.serve(Http2::new(routes, &limits), workers.clone(), stopped));
        Self { address, tally, stop, served, workers }
    }

    pub async fn http1(limits: ConnectionLimits, router: axum::Router) -> Self {
        Self::http1_with_most_idle(limits, router, usize::MAX).await
    }

    pub async fn http1_with_most_idle(limits: ConnectionLimits, router: axum::Router, most_idle: usize) -> Self {
        let (listener, stop, stopped, workers) = Self::parts(limits, 100).await;
        let (address, tally) = (listener.1, listener.0.tally());
        let http1 = Http1::new(router, &limits);
        let served = tokio::spawn(listener.0.with_most_idle(most_idle).serve(http1, workers.clone(), stopped));
        Self { address, tally, stop, served, workers }
    }

    async fn parts(
        limits: ConnectionLimits,
        cap: usize,
    ) -> ((Listener, SocketAddr), watch::Sender<bool>, watch::Receiver<bool>, Workers) {
        let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = socket.local_addr().unwrap();
        let (stop, stopped) = watch::channel(false);
        let workers = Workers::start(NonZeroUsize::new(2).unwrap()).unwrap();
        (
            (Listener::new("test", NetListener::Tcp(socket), ConnectionSlots::new(cap), limits), address),
            stop,
            stopped,
            workers,
        )
    }

    /// Stops the listener; what it says, and how long it took.
    pub async fn stop(self) -> (Drained, Duration) {
        let began = Instant::now();
        self.stop.send_replace(true);
        let drained = tokio::time::timeout(PATIENCE, self.served).await.expect("the listener stops").unwrap();
        let took = began.elapsed();
        assert!(self.workers.stop(PATIENCE).await, "the workers stop");
        (drained, took)
    }

    pub async fn client(&self) -> HealthClient<tonic::transport::Channel> {
        client(self.address).await
    }

    pub async fn socket(&self) -> TcpStream {
        TcpStream::connect(self.address).await.unwrap()
    }

    /// A peer that has opened its connection and has read the listener's settings.
    pub async fn peer(&self) -> Peer {
        Peer::connect(self.address).await
    }
}

pub async fn client(address: SocketAddr) -> HealthClient<tonic::transport::Channel> {
    HealthClient::new(channel(address).await)
}

pub async fn channel(address: SocketAddr) -> tonic::transport::Channel {
    tonic::transport::Endpoint::from_shared(format!("http://{address}")).unwrap().connect().await.unwrap()
}

pub fn order(service: &str) -> HealthCheckRequest {
    HealthCheckRequest { service: service.to_owned() }
}

/// Waits until `is_so`, which must come true.
pub async fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < PATIENCE, "in {PATIENCE:?} it did not come to pass that {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Reads until the other side closes, which it must; what it said before.
pub async fn until_closed(socket: &mut TcpStream) -> Vec<u8> {
    let mut said = Vec::new();
    // A reset instead of an end is a close as well.
    let _ = tokio::time::timeout(PATIENCE, socket.read_to_end(&mut said)).await.expect("the connection is closed");
    said
}

pub const DATA: u8 = 0;
pub const HEADERS: u8 = 1;
pub const RST_STREAM: u8 = 3;
pub const SETTINGS: u8 = 4;
pub const PING: u8 = 6;
pub const GOAWAY: u8 = 7;
pub const WINDOW_UPDATE: u8 = 8;
pub const CONTINUATION: u8 = 9;
pub const END_STREAM: u8 = 1;
pub const END_HEADERS: u8 = 4;

/// The shortest head of a call that HTTP/2 takes for one: `POST http /`, all of it from HPACK's static table.
pub const SHORT_HEAD: [u8; 3] = [0x83, 0x86, 0x84];

pub fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let mut frame = u32::try_from(payload.len()).unwrap().to_be_bytes()[1..].to_vec();
    frame.extend([kind, flags]);
    frame.extend(stream.to_be_bytes());
    frame.extend(payload);
    frame
}

/// The head of a health check as HPACK without a dynamic table.
pub fn head() -> Vec<u8> {
    head_of("/grpc.health.v1.Health/Check")
}

/// The head of a call of `path`, in the same way.
pub fn head_of(path: &str) -> Vec<u8> {
    let mut head = vec![0x83, 0x86];
    for (name, value) in [(&[0x04][..], path), (&[0x01], "edge"), (&[0x0f, 0x10], "application/grpc")] {
        head.extend(name);
        head.push(u8::try_from(value.len()).unwrap());
        head.extend(value.bytes());
    }
    head
}

/// An HTTP/2 peer without manners.
pub struct Peer(pub TcpStream);

impl Peer {
    pub async fn connect(address: SocketAddr) -> Self {
        let mut peer = Self(TcpStream::connect(address).await.unwrap());
        peer.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.unwrap();
        peer.send(&frame(SETTINGS, 0, 0, &[])).await.unwrap();
        peer
    }

    pub async fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.0.write_all(bytes).await
    }
}

/// The frames in `bytes` as kind and payload; a last one that is cut off is left out.
pub fn frames(mut bytes: &[u8]) -> Vec<(u8, Vec<u8>)> {
    let mut frames = Vec::new();
    while bytes.len() >= 9 {
        let length = usize::try_from(u32::from_be_bytes([0, bytes[0], bytes[1], bytes[2]])).unwrap();
        let Some(payload) = bytes.get(9..9 + length) else { break };
        frames.push((bytes[3], payload.to_vec()));
        bytes = &bytes[9 + length..];
    }
    frames
}

/// The error code of the last GOAWAY in `bytes`.
pub fn goaway(bytes: &[u8]) -> Option<u32> {
    let (_, payload) = frames(bytes).into_iter().rfind(|(kind, _)| *kind == GOAWAY)?;
    Some(u32::from_be_bytes(payload[4..8].try_into().unwrap()))
}

/// A well-behaved HTTP/2 client connection; the flag turns true when it is over.
pub async fn h2_client(address: SocketAddr) -> (SendRequest<Bytes>, JoinHandle<Result<(), h2::Error>>) {
    let socket = TcpStream::connect(address).await.unwrap();
    let (client, connection) = h2::client::handshake(socket).await.unwrap();
    (client, tokio::spawn(connection))
}

pub fn health_check() -> Request<()> {
    Request::post("http://edge/grpc.health.v1.Health/Check")
        .header("content-type", "application/grpc")
        .body(())
        .unwrap()
}

/// A message as gRPC frames it, for the service name `service`.
pub fn message(service: &str) -> Bytes {
    let length = u8::try_from(service.len()).unwrap();
    let mut message = vec![0, 0, 0, 0, length + 2, 0x0a, length];
    message.extend(service.bytes());
    message.into()
}
