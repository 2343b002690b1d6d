//! Rules from a control plane, with a management server of the tests.

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;

use envoy_types::pb::envoy::service::discovery::v3::aggregated_discovery_service_server::{
    AggregatedDiscoveryService, AggregatedDiscoveryServiceServer,
};
use envoy_types::pb::envoy::service::discovery::v3::{
    DeltaDiscoveryRequest, DeltaDiscoveryResponse, DiscoveryRequest, DiscoveryResponse,
};
use futures_util::{Stream, StreamExt, stream};
use prost::Message;
use rustix::process::Signal;
use tidegate::proto::ratelimit::config::ratelimit::v3::{
    RateLimitConfig, RateLimitDescriptor, RateLimitPolicy, RateLimitUnit,
};
use tokio::net::TcpListener;
use tokio::process::Command;
use tokio::sync::{Mutex, mpsc};
use tonic::{Request, Response, Status, Streaming};

use crate::support::{Process, Tidegate, eventually, in_time, on_free_ports, said};

const TYPE_URL: &str = "type.googleapis.com/ratelimit.config.ratelimit.v3.RateLimitConfig";

/// A management server that records each request and sends what the test says.
struct Plane {
    address: SocketAddr,
    requests: mpsc::UnboundedReceiver<DiscoveryRequest>,
    streams: mpsc::UnboundedReceiver<mpsc::UnboundedSender<Result<DiscoveryResponse, Status>>>,
}

struct Service {
    requests: mpsc::UnboundedSender<DiscoveryRequest>,
    streams: mpsc::UnboundedSender<mpsc::UnboundedSender<Result<DiscoveryResponse, Status>>>,
}

type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl AggregatedDiscoveryService for Service {
    type StreamAggregatedResourcesStream = Answers<DiscoveryResponse>;
    type DeltaAggregatedResourcesStream = Answers<DeltaDiscoveryResponse>;

    async fn stream_aggregated_resources(
        &self,
        request: Request<Streaming<DiscoveryRequest>>,
    ) -> Result<Response<Self::StreamAggregatedResourcesStream>, Status> {
        let (send, receive) = mpsc::unbounded_channel();
        let _ = self.streams.send(send);
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

    async fn delta_aggregated_resources(
        &self,
        _: Request<Streaming<DeltaDiscoveryRequest>>,
    ) -> Result<Response<Self::DeltaAggregatedResourcesStream>, Status> {
        Err(Status::unimplemented("state of the world only"))
    }
}

impl Plane {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("it has one");
        let (to_requests, requests) = mpsc::unbounded_channel();
        let (to_streams, streams) = mpsc::unbounded_channel();
        let service = AggregatedDiscoveryServiceServer::new(Service { requests: to_requests, streams: to_streams });
        let listener = Arc::new(Mutex::new(listener));
        let incoming = stream::unfold(listener, async |listener| {
            let accepted = listener.lock().await.accept().await.map(|(stream, _)| stream);
            Some((accepted, listener))
        });
        tokio::spawn(tonic::transport::Server::builder().add_service(service).serve_with_incoming(incoming));
        Self { address, requests, streams }
    }

    /// The next request of any stream.
    async fn request(&mut self) -> DiscoveryRequest {
        in_time("a request comes", self.requests.recv()).await.expect("the server runs")
    }

    /// The next stream, and its first request.
    async fn stream(&mut self) -> (mpsc::UnboundedSender<Result<DiscoveryResponse, Status>>, DiscoveryRequest) {
        let stream = in_time("a stream is opened", self.streams.recv()).await.expect("the server runs");
        (stream, self.request().await)
    }

    fn variables(&self) -> Vec<(String, String)> {
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

/// A resource with one limit per day on the key `user`.
fn limit(name: &str, domain: &str, unit: RateLimitUnit, requests_per_unit: u32) -> RateLimitConfig {
    let policy = RateLimitPolicy { unit: unit.into(), requests_per_unit, ..RateLimitPolicy::default() };
    let descriptor =
        RateLimitDescriptor { key: "user".to_owned(), rate_limit: Some(policy), ..RateLimitDescriptor::default() };
    RateLimitConfig { name: name.to_owned(), domain: domain.to_owned(), descriptors: vec![descriptor] }
}

fn response(version: &str, nonce: &str, resources: &[RateLimitConfig]) -> Result<DiscoveryResponse, Status> {
    let any = |config: &RateLimitConfig| envoy_types::pb::google::protobuf::Any {
        type_url: TYPE_URL.to_owned(),
        value: config.encode_to_vec(),
    };
    Ok(DiscoveryResponse {
        version_info: version.to_owned(),
        nonce: nonce.to_owned(),
        type_url: TYPE_URL.to_owned(),
        resources: resources.iter().map(any).collect(),
        ..DiscoveryResponse::default()
    })
}

/// The requested version, the nonce, and the reasons of a refusal.
fn answer(request: &DiscoveryRequest) -> (&str, &str, Option<&str>) {
    let reasons = request.error_detail.as_ref().map(|detail| detail.message.as_str());
    (&request.version_info, &request.response_nonce, reasons)
}

/// The limit of `user` in `domain`, as the debug page shows it.
async fn rlconfig(server: &Tidegate) -> String {
    let page = said(server.debug, "GET /rlconfig HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").await;
    page.split_once("\r\n\r\n").map_or(String::new(), |(_, body)| body.trim().to_owned())
}

/// Status and body of a call for `user` in `edge`.
async fn call(server: &Tidegate) -> String {
    let body = r#"{"domain":"edge","descriptors":[{"entries":[{"key":"user","value":"a"}]}]}"#;
    let head = format!("POST /json HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: {}\r\n\r\n", body.len());
    said(server.http, &(head + body)).await
}

async fn start(variables: &[(String, String)], more: &[(&str, &str)]) -> Tidegate {
    let given: Vec<_> = variables.iter().map(|(name, value)| (&**name, &**value)).chain(more.iter().copied()).collect();
    Tidegate::start_with(None, &given).await
}

#[tokio::test]
async fn pushed_rules_are_acknowledged_and_decide_and_a_wrong_set_is_refused_and_changes_nothing() {
    let mut plane = Plane::start().await;
    let variables = plane.variables();
    let starting = tokio::spawn(async move { start(&variables, &[]).await });
    let (stream, first) = plane.stream().await;
    assert_eq!(answer(&first), ("", "", None));
    assert_eq!((&*first.type_url, first.resource_names.len()), (TYPE_URL, 0));
    let node = first.node.clone().expect("a node");
    assert_eq!(node.id, "node-1");
    assert_eq!(node.metadata.expect("metadata").fields.keys().collect::<Vec<_>>(), ["zone"]);

    stream.send(response("1", "n1", &[limit("res", "edge", RateLimitUnit::Week, 1)])).expect("it is sent");
    let server = in_time("the listeners open after the first rules", starting).await.expect("it starts");
    let accepted = plane.request().await;
    assert_eq!(answer(&accepted), ("1", "n1", None));
    assert_eq!(accepted.node.expect("in every request").id, "node-1");
    let in_force = "edge.user: unit=WEEK requests_per_unit=1, shadow_mode: false, quota_mode: false";
    assert_eq!(rlconfig(&server).await, in_force);
    assert!(call(&server).await.starts_with("HTTP/1.1 200 "));
    assert!(call(&server).await.starts_with("HTTP/1.1 429 "));

    let mut wrong = limit("res-bad", "edge", RateLimitUnit::Day, 9);
    wrong.descriptors[0].key.clear();
    stream.send(response("2", "n2", &[limit("res", "other", RateLimitUnit::Unknown, 9), wrong])).expect("it is sent");
    let refused = plane.request().await;
    let (version, nonce, reasons) = answer(&refused);
    assert_eq!((version, nonce), ("1", "n2"));
    let reasons = reasons.expect("all reasons");
    assert!(reasons.contains("res:2:1: error: the rate limit has no unit"), "{reasons}");
    assert!(reasons.contains("res-bad:2:1: error: the descriptor has no key"), "{reasons}");
    assert_eq!(rlconfig(&server).await, in_force);

    // The counter lives on under the new limit.
    stream.send(response("3", "n3", &[limit("res", "edge", RateLimitUnit::Week, 2)])).expect("it is sent");
    let corrected = plane.request().await;
    assert_eq!(answer(&corrected), ("3", "n3", None));
    assert!(rlconfig(&server).await.contains("requests_per_unit=2"));

    stream.send(response("4", "n4", &[])).expect("it is sent");
    let emptied = plane.request().await;
    assert_eq!(answer(&emptied), ("4", "n4", None));
    assert_eq!(rlconfig(&server).await, "");
}

#[tokio::test]
async fn a_new_stream_begins_without_version_and_the_rules_stay_meanwhile() {
    let mut plane = Plane::start().await;
    let server = start(&plane.variables(), &[("FORCE_START_WITHOUT_INITIAL_CONFIG", "true")]).await;
    let (stream, _) = plane.stream().await;
    let undecided = call(&server).await;
    assert!(undecided.contains("no rate limit configuration loaded"), "{undecided}");
    stream.send(response("7", "n1", &[limit("res", "edge", RateLimitUnit::Day, 5)])).expect("it is sent");
    let accepted = plane.request().await;
    assert_eq!(answer(&accepted), ("7", "n1", None));
    stream.send(Err(Status::unavailable("restarting"))).expect("it is sent");
    drop(stream);
    let (stream, first) = plane.stream().await;
    assert_eq!(answer(&first), ("", "", None));
    assert!(rlconfig(&server).await.contains("requests_per_unit=5"));
    assert!(server.log().contains("restarting"), "{}", server.log());
    stream.send(response("1", "n1", &[limit("res", "edge", RateLimitUnit::Day, 6)])).expect("it is sent");
    let accepted = plane.request().await;
    assert_eq!(answer(&accepted), ("1", "n1", None));
    assert!(rlconfig(&server).await.contains("requests_per_unit=6"));
}

#[tokio::test]
async fn a_response_above_the_bound_is_named_in_the_log_and_the_rules_stay() {
    let mut plane = Plane::start().await;
    let more = [("FORCE_START_WITHOUT_INITIAL_CONFIG", "true"), ("XDS_CLIENT_MAX_MSG_SIZE_IN_BYTES", "300")];
    let server = start(&plane.variables(), &more).await;
    let (stream, _) = plane.stream().await;
    stream.send(response("1", "n1", &[limit("res", "edge", RateLimitUnit::Day, 5)])).expect("it is sent");
    plane.request().await;
    stream.send(response("2", "n2", &[limit(&"x".repeat(300), "edge", RateLimitUnit::Day, 6)])).expect("it is sent");
    let (_stream, first) = plane.stream().await;
    assert_eq!(answer(&first), ("", "", None), "no refusal before the new stream");
    assert!(rlconfig(&server).await.contains("requests_per_unit=5"));
    let log = server.log();
    assert!(log.contains("larger than 300 bytes"), "{log}");
}

#[tokio::test]
async fn a_stop_signal_is_obeyed_while_the_first_rules_are_awaited() {
    let mut plane = Plane::start().await;
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    command.arg("serve").env_clear();
    let mut process = Process::start(on_free_ports(&mut command).envs(plane.variables()));
    plane.stream().await;
    process.signal(Signal::TERM);
    assert!(process.ended().await.success());
    eventually("it says so", async || process.errors().contains("before the control plane sent rules").then_some(()))
        .await;
}
