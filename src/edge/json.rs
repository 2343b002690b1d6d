//! The HTTP listener: `/healthcheck` and `/json`, as the reference has them, `/check` for gateways that ask over HTTP, and `/metrics`.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, BodyDataStream, Bytes};
use axum::extract::{Request, State};
use axum::http::request::Parts;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::any;
use futures_util::StreamExt;
use http_body::Body as _;
use http_body_util::BodyExt;
use prost_types::value::Kind;
use prost_types::{Struct, Value};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use self::bodies::{Bodies, BodyPermits, UNCOUNTED_BYTES};
pub use self::service::HttpService;
use super::answer::{Answers, Format};
use super::callers::ConnectionCaller;
use super::grpc::{Edge, Undecided};
use super::message;
use super::metrics;
use super::pages::{PageGate, PageSign};
use crate::limiter::CallerTime;
use crate::proto::envoy::service::ratelimit::v3::RateLimitResponse;
use crate::proto::envoy::service::ratelimit::v3::rate_limit_response::Code;
use crate::serve::http::HttpConnection;
use crate::telemetry::interface::HttpInterface;
use crate::telemetry::limited::Cause;
use crate::telemetry::traces::{Span, Way};

mod bodies;
mod check;
mod read;
mod service;
#[cfg(test)]
mod tests;
mod write;

/// Bytes of a body above the bound that are read and thrown away, so that its sender reads the answer: 4 MiB.
const MOST_DISCARDED: usize = 4 << 20;

/// Bytes of a body that hold at most 1,000 descriptors (`{},`) or entries: 3,000. Each worker reads and decides one larger body at a time.
const FEW_BYTES: usize = 3_000;

/// Share of the connections that may have a request of `/json` in flight: an eighth.
const JSON_SHARE: usize = 8;
/// Share of the connections that may have a check in flight: three quarters.
const CHECK_SHARE: (usize, usize) = (3, 4);

/// Readiness of this instance, for `/healthcheck`.
#[derive(Clone, Debug, Default)]
pub struct Readiness(Arc<ReadinessFlags>);

#[derive(Debug, Default)]
struct ReadinessFlags {
    is_ready: AtomicBool,
    lacks_store: AtomicBool,
}

impl Readiness {
    /// Sets the readiness.
    pub fn set(&self, ready: bool) {
        self.0.is_ready.store(ready, Ordering::Release);
    }

    /// Returns the readiness.
    pub fn get(&self) -> bool {
        self.0.is_ready.load(Ordering::Acquire)
    }

    /// Notes that a Redis has not been reached since the start, or that all have been. The readiness does not change.
    pub fn set_lacks_store(&self, lacks_store: bool) {
        self.0.lacks_store.store(lacks_store, Ordering::Release);
    }

    /// Returns the body of the answer of an instance that is ready.
    fn body(&self) -> &'static str {
        match self.0.lacks_store.load(Ordering::Acquire) {
            false => "OK",
            true => "OK, but Redis has not been reached since the start: the failure policy answers\n",
        }
    }
}

/// Returns the service of the HTTP listener. A body of `/json` has at most `most_bytes`, and is taken from addresses that `admits` accepts.
/// `pages` admits no web page of another site. The listener has `connections`; at most three quarters of them have a check in flight, and an eighth
/// a request of `/json`, so that the others answer probes.
pub fn service(
    edge: Edge,
    readiness: Readiness,
    most_bytes: usize,
    admits: impl Fn(IpAddr) -> bool + Send + Sync + 'static,
    pages: Arc<PageGate>,
    connections: usize,
) -> HttpService {
    let metrics = metrics::routes("/metrics", edge.telemetry());
    let (of_json, of_check) = (connections / JSON_SHARE, connections / CHECK_SHARE.1 * CHECK_SHARE.0);
    let in_flight = |most: usize| Arc::new(Semaphore::new(most.clamp(1, Semaphore::MAX_PERMITS)));
    let edge = HttpEdge {
        edge,
        most_bytes,
        admits: Arc::new(admits),
        pages,
        bodies: Bodies::new(most_bytes),
        in_flight: in_flight(of_json),
    };
    // Callers of /json cannot take the memory of /check.
    let check = HttpEdge { bodies: Bodies::new(most_bytes), in_flight: in_flight(of_check), ..edge.clone() };
    let routes = Router::new()
        .route("/healthcheck", any(healthcheck).with_state(readiness))
        .route("/json", any(json).with_state(edge))
        .merge(metrics);
    HttpService::new(check, routes)
}

async fn healthcheck(State(readiness): State<Readiness>) -> Response {
    if readiness.get() { readiness.body().into_response() } else { StatusCode::INTERNAL_SERVER_ERROR.into_response() }
}

/// State of the handlers of `/json` and `/check`.
#[derive(Clone)]
struct HttpEdge {
    edge: Edge,
    most_bytes: usize,
    admits: Arc<dyn Fn(IpAddr) -> bool + Send + Sync>,
    pages: Arc<PageGate>,
    bodies: Bodies,
    /// Permits of the requests in flight.
    in_flight: Arc<Semaphore>,
}

/// Reasons for which the request in a body was not decided.
enum UnreadBody {
    /// The body is above the bound. Contains its rest.
    TooLarge(BodyDataStream),
    /// The body ended with an error, or did not arrive in time.
    Broken,
    /// Others held the memory for as long as the caller waits.
    NoMemory,
    /// The body was read, and there is no decision. Contains the answer.
    Undecided(Response),
}

/// Status and text of an answer.
struct JsonAnswer {
    status: StatusCode,
    text: Vec<u8>,
}

async fn json(State(edge): State<HttpEdge>, request: Request) -> Response {
    let (head, body) = request.into_parts();
    edge.edge.telemetry().arrived(HttpInterface::Json);
    if !(edge.admits)(peer(&head)) {
        return (StatusCode::FORBIDDEN, "The request was not decided: /json is closed to this caller (JSON_ACCESS).\n")
            .into_response();
    }
    if let Err(sign) = edge.pages.admit_to_json(&head.headers) {
        return refused(sign);
    }
    if caller(&head).is_some_and(|caller| caller.is_granted_nothing()) {
        return (
            StatusCode::FORBIDDEN,
            "The request was not decided: CALLERS_FILE grants nothing to `anonymous`, so /json is closed.\n",
        )
            .into_response();
    }
    let Ok(_in_flight) = edge.in_flight.try_acquire() else { return edge.crowded(StatusCode::TOO_MANY_REQUESTS) };
    let mut span = edge.span(&head);
    let response =
        match edge.decide_body(&head, body, None, (caller_time(&head, None), Answers::respond), &mut span).await {
            Ok(response) => JsonAnswer::of(&response).map_or_else(broken, JsonAnswer::into_response),
            Err(UnreadBody::TooLarge(rest)) => edge.too_large(&head, rest).await,
            Err(UnreadBody::NoMemory) => edge.crowded(StatusCode::TOO_MANY_REQUESTS),
            Err(UnreadBody::Broken) => bad_request(&"the body did not arrive whole"),
            Err(UnreadBody::Undecided(response)) => response,
        };
    end_span(span, response)
}

impl HttpEdge {
    /// Refuses a request for which there is no room, with the status `refusal`.
    fn crowded(&self, refusal: StatusCode) -> Response {
        self.edge.telemetry().call_limited(Cause::Crowded);
        (refusal, "The request was not decided: too many requests are in flight.\n").into_response()
    }

    /// Decides the request in a body, about `domain` if it is given. Waits for the memory of the body for as long as the caller does.
    async fn decide_body<T>(
        &self,
        head: &Parts,
        body: Body,
        domain: Option<&str>,
        (time, format): (CallerTime, Format<T>),
        span: &mut Option<Span>,
    ) -> Result<T, UnreadBody> {
        let announced = body.size_hint().exact().map(|bytes| usize::try_from(bytes).unwrap_or(usize::MAX));
        let (body, permits) = match announced {
            Some(bytes) if bytes > self.most_bytes => return Err(UnreadBody::TooLarge(body.into_data_stream())),
            Some(bytes) if bytes <= UNCOUNTED_BYTES => (self.small(body).await?, None),
            // Boxed, so that small requests do not carry it.
            _ => Box::pin(self.large(body, time.timeout.unwrap_or(Duration::MAX))).await?,
        };
        let caller = caller(head).map(|caller| &**caller);
        let held = {
            let _turn = message::turn(body.len() > FEW_BYTES).await;
            let mut request = read::read(&body).map_err(|error| UnreadBody::Undecided(not_json(&error)))?;
            drop((body, permits));
            if let Some(domain) = domain {
                domain.clone_into(request.domain_mut());
            }
            self.edge.decide_wire(request, caller, (time, format), span.as_mut()).await
        };
        Ok(held.map_err(|undecided| UnreadBody::Undecided(failed(&undecided)))?.over().await)
    }

    fn span(&self, head: &Parts) -> Option<Span> {
        self.edge.telemetry().request(Way::Http { interface: HttpInterface::Json, method: &head.method }, &head.headers)
    }

    /// Reads a body of up to [`UNCOUNTED_BYTES`]. One that arrived in one piece is not copied.
    async fn small(&self, mut body: Body) -> Result<Bytes, UnreadBody> {
        let mut whole = Bytes::new();
        while !body.is_end_stream()
            && let Some(frame) = body.frame().await
        {
            let Ok(part) = frame.map_err(|error| self.broken_off(error))?.into_data() else { continue };
            whole = if whole.is_empty() { part } else { [&whole[..], &part].concat().into() };
        }
        Ok(whole)
    }

    /// Reads a larger body, unless others need its memory before it has arrived.
    async fn large(&self, body: Body, longest: Duration) -> Result<(Bytes, Option<BodyPermits>), UnreadBody> {
        let mut permits = self.bodies.permits();
        let end = permits.end();
        let whole = tokio::select! {
            whole = self.whole(body, &mut permits, longest) => whole?,
            () = end.notified() => {
                self.edge.telemetry().call_limited(Cause::LateBody);
                return Err(UnreadBody::Broken);
            }
        };
        Ok((whole, Some(permits)))
    }

    /// Reads a body whole, with `permits` for its bytes, for which it waits at most `longest`.
    async fn whole(&self, body: Body, permits: &mut BodyPermits, longest: Duration) -> Result<Bytes, UnreadBody> {
        let expected = usize::try_from(body.size_hint().lower()).unwrap_or(usize::MAX);
        let mut whole = Vec::with_capacity(expected.min(UNCOUNTED_BYTES));
        let mut data = body.into_data_stream();
        while !data.is_end_stream()
            && let Some(part) = data.next().await
        {
            let part = part.map_err(|error| self.broken_off(error))?;
            if whole.len() + part.len() > self.most_bytes {
                return Err(UnreadBody::TooLarge(data));
            }
            let held = timeout(longest, permits.hold(whole.len() + part.len())).await;
            held.map_err(|_| UnreadBody::NoMemory)?;
            whole.extend_from_slice(&part);
        }
        Ok(whole.into())
    }

    /// Counts a body that did not arrive in time.
    fn broken_off(&self, error: axum::Error) -> UnreadBody {
        if tonic::Status::from_error(error.into_inner()).code() == tonic::Code::DeadlineExceeded {
            self.edge.telemetry().call_limited(Cause::LateBody);
        }
        UnreadBody::Broken
    }

    /// Answers a request whose body is above the bound. The rest of the body is read and thrown away, up to a bound: a
    /// client that is still sending when its connection is closed may not see the answer.
    async fn too_large(&self, head: &Parts, mut rest: BodyDataStream) -> Response {
        self.edge.telemetry().call_limited(Cause::JsonTooLarge);
        let mut discarded = 0;
        // A client that sent `Expect` waits for our consent before it sends the body.
        let is_sending = !head.headers.contains_key(header::EXPECT);
        while is_sending && discarded < MOST_DISCARDED {
            let Some(Ok(part)) = rest.next().await else { break };
            discarded += part.len();
        }
        let why = format!(
            "The body is larger than {} bytes (JSON_MAX_BODY), so the request was not decided. Treat this answer as a refusal. Send fewer descriptors in one request, or call over gRPC.\n",
            self.most_bytes
        );
        (StatusCode::PAYLOAD_TOO_LARGE, why).into_response()
    }
}

impl JsonAnswer {
    /// Creates the answer. Returns `None` if it has no form as JSON, which is a bug.
    fn of(response: &RateLimitResponse) -> Option<Self> {
        let status = match response.overall_code() {
            Code::Ok => StatusCode::OK,
            Code::OverLimit => StatusCode::TOO_MANY_REQUESTS,
            Code::Unknown => StatusCode::INTERNAL_SERVER_ERROR,
        };
        Some(Self { status, text: write::write(response)? })
    }

    fn into_response(self) -> Response {
        (self.status, [(header::CONTENT_TYPE, "application/json")], self.text).into_response()
    }
}

/// Returns the address of the peer. One that has already left has none.
fn peer(head: &Parts) -> IpAddr {
    connection(head).and_then(|connection| connection.peer).unwrap_or(Ipv4Addr::UNSPECIFIED.into())
}

/// Returns the caller, if callers have rights.
fn caller(head: &Parts) -> Option<&Arc<ConnectionCaller>> {
    head.extensions.get()
}

/// Returns what is known of the connection.
fn connection(head: &Parts) -> Option<&HttpConnection> {
    head.extensions.get::<Arc<HttpConnection>>().map(|connection| &**connection)
}

/// Returns the time of a caller that waits for `timeout`.
fn caller_time(head: &Parts, timeout: Option<Duration>) -> CallerTime {
    let waited = connection(head).map_or(Duration::ZERO, HttpConnection::waited);
    CallerTime { timeout, waited, longest_delay: None }
}

/// Answers a request of a web page as one that a limit refuses, with the reason in the metadata. A client can write the headers that show a
/// page, and a script that passes them on may admit what is answered by any other status than 429.
fn refused(sign: PageSign) -> Response {
    let reason = Value { kind: Some(Kind::StringValue(format!("The request was not decided: {sign}."))) };
    let response = RateLimitResponse {
        overall_code: Code::OverLimit.into(),
        dynamic_metadata: Some(Struct { fields: [("reason".to_owned(), reason)].into() }),
        ..RateLimitResponse::default()
    };
    JsonAnswer::of(&response).map_or_else(broken, JsonAnswer::into_response)
}

/// Ends the span of a request with the status of its answer, and returns the answer.
fn end_span(span: Option<Span>, response: Response) -> Response {
    if let Some(mut span) = span {
        span.answered_http(response.status().as_u16());
    }
    response
}

fn failed(undecided: &Undecided) -> Response {
    match undecided {
        Undecided::Invalid(error) => bad_request(error),
        Undecided::Malformed(error) => bad_request(error),
        Undecided::NotGranted => (
            StatusCode::FORBIDDEN,
            "The request was not decided: CALLERS_FILE does not grant this domain to `anonymous`.\n",
        )
            .into_response(),
        Undecided::NoRules => (StatusCode::SERVICE_UNAVAILABLE, format!("{undecided}\n")).into_response(),
        Undecided::Unavailable(error) => (StatusCode::SERVICE_UNAVAILABLE, format!("{error}\n")).into_response(),
    }
}

fn not_json(error: &serde_json::Error) -> Response {
    bad_request(&format_args!("the body is not a RateLimitRequest in JSON: {error}"))
}

/// Answers a request that cannot be decided, with the reason.
fn bad_request(reason: &dyn fmt::Display) -> Response {
    (StatusCode::BAD_REQUEST, format!("The request was not decided: {reason}.\n")).into_response()
}

fn broken() -> Response {
    StatusCode::INTERNAL_SERVER_ERROR.into_response()
}
