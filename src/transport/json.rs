//! The HTTP listener: `/healthcheck` and `/json`, as the reference has them, and `/metrics`.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::Router;
use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, State};
use axum::http::{HeaderMap, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::any;
use prost::Message;
use prost_reflect::{DescriptorPool, DynamicMessage, MessageDescriptor, SerializeOptions};
use thiserror::Error;

use super::grpc::{Edge, Undecided};
use super::message::LARGEST_MESSAGE;
use super::metrics;
use crate::proto::DESCRIPTORS;
use crate::proto::envoy::service::ratelimit::v3::rate_limit_response::Code;
use crate::proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use crate::telemetry::traces::{Span, Way};

const REQUEST: &str = "envoy.service.ratelimit.v3.RateLimitRequest";
const RESPONSE: &str = "envoy.service.ratelimit.v3.RateLimitResponse";

/// Whether this instance wants requests, for `/healthcheck`.
#[derive(Clone, Debug, Default)]
pub struct Readiness(Arc<AtomicBool>);

impl Readiness {
    /// Says so.
    pub fn set(&self, ready: bool) {
        self.0.store(ready, Ordering::Release);
    }

    fn get(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// The routes of the HTTP listener.
///
/// # Errors
/// When the messages are missing from `proto/`: a fault of the build.
pub fn routes(edge: Edge, readiness: Readiness) -> Result<Router, MissingMessages> {
    let metrics = metrics::routes("/metrics", edge.telemetry());
    let codec = Arc::new(Codec::new()?);
    Ok(Router::new()
        .route("/healthcheck", any(healthcheck).with_state(readiness))
        .route("/json", any(json).with_state((edge, codec)))
        .layer(DefaultBodyLimit::max(LARGEST_MESSAGE))
        .merge(metrics))
}

async fn healthcheck(State(readiness): State<Readiness>) -> Response {
    if readiness.get() { "OK".into_response() } else { StatusCode::INTERNAL_SERVER_ERROR.into_response() }
}

async fn json(
    State((edge, codec)): State<(Edge, Arc<Codec>)>,
    method: Method,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let Some(request) = codec.read(&body) else { return bad_request() };
    let mut span = edge.telemetry().request(Way::Json { is_post: method == Method::POST }, &headers);
    let response = decided(&edge, &codec, request, span.as_mut()).await;
    if let Some(span) = &mut span {
        span.answered_http(response.status().as_u16());
    }
    response
}

async fn decided(edge: &Edge, codec: &Codec, request: RateLimitRequest, span: Option<&mut Span>) -> Response {
    let response = match edge.decide(request, None, span).await {
        Ok(response) => response,
        Err(Undecided::Invalid(_)) => return bad_request(),
        Err(Undecided::Unavailable(error)) => {
            return (StatusCode::SERVICE_UNAVAILABLE, format!("{error}\n")).into_response();
        }
    };
    let status = match response.overall_code() {
        Code::Ok => StatusCode::OK,
        Code::OverLimit => StatusCode::TOO_MANY_REQUESTS,
        Code::Unknown => StatusCode::INTERNAL_SERVER_ERROR,
    };
    match codec.write(&response) {
        Some(body) => (status, [(header::CONTENT_TYPE, "application/json")], body).into_response(),
        None => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

fn bad_request() -> Response {
    (StatusCode::BAD_REQUEST, "Bad Request\n").into_response()
}

/// The protocol's messages as JSON, by their unpatched descriptors: there, entries are text.
struct Codec {
    request: MessageDescriptor,
    response: MessageDescriptor,
}

/// The descriptors lack a message of the protocol.
#[derive(Debug, Error)]
#[error("the built-in protocol descriptors lack {REQUEST} or {RESPONSE}: this build is broken")]
pub struct MissingMessages;

impl Codec {
    fn new() -> Result<Self, MissingMessages> {
        let pool = DescriptorPool::decode(DESCRIPTORS).map_err(|_| MissingMessages)?;
        let message = |name| pool.get_message_by_name(name).ok_or(MissingMessages);
        Ok(Self { request: message(REQUEST)?, response: message(RESPONSE)? })
    }

    fn read(&self, body: &[u8]) -> Option<RateLimitRequest> {
        let mut json = serde_json::Deserializer::from_slice(body);
        let message = DynamicMessage::deserialize(self.request.clone(), &mut json).ok()?;
        json.end().ok()?;
        RateLimitRequest::decode(message.encode_to_vec().as_slice()).ok()
    }

    fn write(&self, response: &RateLimitResponse) -> Option<Vec<u8>> {
        let message = DynamicMessage::decode(self.response.clone(), response.encode_to_vec().as_slice()).ok()?;
        let mut body = Vec::new();
        let mut json = serde_json::Serializer::new(&mut body);
        message.serialize_with_options(&mut json, &SerializeOptions::new()).ok()?;
        Some(body)
    }
}
