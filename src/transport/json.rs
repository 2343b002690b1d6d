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
use prost::Message;
use prost_types::value::Kind;
use prost_types::{Struct, Value};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use self::bodies::{Bodies, BodyPermits, UNCOUNTED_BYTES};
use self::room::{Room, RoomPermit, SMALL_BODY_BYTES};
pub use self::service::HttpService;
use super::callers::ConnectionCaller;
use super::grpc::{Edge, Undecided};
use super::metrics;
use super::page::{PageGate, PageSign};
use super::protocol::Origin;
use crate::limiter::CallerTime;
use crate::proto::envoy::service::ratelimit::v3::rate_limit_response::Code;
use crate::proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use crate::proto::large::is_large;
use crate::telemetry::door::HttpDoor;
use crate::telemetry::limited::Cause;
use crate::telemetry::traces::{Span, Way};

mod bodies;
mod check;
mod read;
mod room;
mod service;
#[cfg(test)]
mod tests;
mod write;

/// Bytes of a body above the bound that are read and thrown away, so that its sender reads the answer: 4 MiB.
const MOST_DISCARDED: usize = 4 << 20;

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
    let bodies = Bodies::new(most_bytes);
    let (of_json, of_check) = (connections / JSON_SHARE, connections / CHECK_SHARE.1 * CHECK_SHARE.0);
    let in_flight = |most: usize| Arc::new(Semaphore::new(most.clamp(1, Semaphore::MAX_PERMITS)));
    let door = Door {
        edge,
        most_bytes,
        admits: Arc::new(admits),
        pages,
        room: Room::new(),
        bodies,
        in_flight: in_flight(of_json),
    };
    // Callers of /json cannot take the room of /check.
    let (room, bodies) = (Room::new(), Bodies::new(most_bytes));
    let check = Door { room, bodies, in_flight: in_flight(of_check), ..door.clone() };
    let routes = Router::new()
        .route("/healthcheck", any(healthcheck).with_state(readiness))
        .route("/json", any(json).with_state(door))
        .merge(metrics);
    HttpService::new(check, routes)
}

async fn healthcheck(State(readiness): State<Readiness>) -> Response {
    if readiness.get() { readiness.body().into_response() } else { StatusCode::INTERNAL_SERVER_ERROR.into_response() }
}

/// State of the handlers of `/json` and `/check`.
#[derive(Clone)]
struct Door {
    edge: Edge,
    most_bytes: usize,
    admits: Arc<dyn Fn(IpAddr) -> bool + Send + Sync>,
    pages: Arc<PageGate>,
    room: Room,
    bodies: Bodies,
    /// Permits of the requests in flight.
    in_flight: Arc<Semaphore>,
}

/// Reasons for which a body was not read.
enum UnreadBody {
    /// The body is above the bound. Contains its rest.
    TooLarge(BodyDataStream),
    /// The body ended with an error, or did not arrive in time.
    Broken,
    /// Others held the memory for as long as the caller waits.
    NoMemory,
}

/// Decided request.
struct Decided {
    response: RateLimitResponse,
    /// More statuses of the response, encoded.
    statuses: Vec<Bytes>,
}

/// Wait for the memory that a large request needs, and the status of the answer where it is too long.
#[derive(Clone, Copy)]
struct MemoryWait {
    longest: Duration,
    refusal: StatusCode,
}

/// Wait of a caller of `/json`, whose timeout is unknown.
const JSON_WAIT: MemoryWait = MemoryWait { longest: Duration::MAX, refusal: StatusCode::TOO_MANY_REQUESTS };

/// Status and text of an answer.
struct JsonAnswer {
    status: StatusCode,
    text: Vec<u8>,
}

async fn json(State(door): State<Door>, request: Request) -> Response {
    let (head, body) = request.into_parts();
    door.edge.telemetry().arrived(HttpDoor::Json);
    if !(door.admits)(peer(&head)) {
        return (StatusCode::FORBIDDEN, "The request was not decided: /json is closed to this caller (JSON_DOOR).\n")
            .into_response();
    }
    if let Err(sign) = door.pages.admit_to_json(&head.headers) {
        return refused(sign);
    }
    if caller(&head).is_some_and(|caller| caller.is_granted_nothing()) {
        return (
            StatusCode::FORBIDDEN,
            "The request was not decided: CALLERS_FILE grants nothing to `anonymous`, so /json is closed.\n",
        )
            .into_response();
    }
    let Ok(_in_flight) = door.in_flight.try_acquire() else { return door.crowded(StatusCode::TOO_MANY_REQUESTS) };
    let announced = body.size_hint().exact().map(|bytes| usize::try_from(bytes).unwrap_or(usize::MAX));
    match announced {
        Some(bytes) if bytes > door.most_bytes => door.too_large(&head, body.into_data_stream()).await,
        Some(bytes) if bytes <= SMALL_BODY_BYTES => door.answer_small(&head, body).await,
        // Boxed, so that small requests do not carry it.
        _ => Box::pin(door.answer_large(&head, body)).await,
    }
}

impl Door {
    /// Refuses a request for which there is no room, with the status `refusal`.
    fn crowded(&self, refusal: StatusCode) -> Response {
        self.edge.telemetry().call_limited(Cause::Crowded);
        (refusal, "The request was not decided: too many requests are in flight.\n").into_response()
    }

    /// Answers a small request at once.
    async fn answer_small(&self, head: &Parts, body: Body) -> Response {
        let request = match self.small_request(head, body).await {
            Ok(request) => request,
            Err(response) => return response,
        };
        let mut span = self.span(head);
        let response = match self.decide(head, request, caller_time(head, None), &mut span).await {
            Ok(response) => {
                let decided = Decided { response, statuses: Vec::new() };
                JsonAnswer::of(&decided).map_or_else(broken, |answer| answer.with(Body::from))
            }
            Err(response) => response,
        };
        end_span(span, response)
    }

    /// Answers a large request: decoded and encoded off the workers, one at a time, and others wait in order.
    async fn answer_large(&self, head: &Parts, body: Body) -> Response {
        let (message, permit) = match self.large_message(head, body, JSON_WAIT).await {
            Ok(read) => read,
            Err(response) => return response,
        };
        let mut span = self.span(head);
        let response = match self.decide_large(head, message, caller_time(head, None), &mut span).await {
            Ok(decided) => {
                let turn = self.room.turn().await;
                let answer = self.room.run(move || {
                    let answer = JsonAnswer::of(&decided);
                    drop((decided, turn));
                    answer
                });
                let answer = answer.await.ok().flatten();
                answer.map_or_else(broken, |answer| answer.with(|text| Body::new(self.room.answer(text, permit))))
            }
            Err(response) => response,
        };
        end_span(span, response)
    }

    /// Reads a small request at once.
    async fn small_request(&self, head: &Parts, body: Body) -> Result<RateLimitRequest, Response> {
        match self.whole(body, &mut self.bodies.permits(), Duration::MAX).await {
            Ok(body) => read::read(&body).map_err(|error| not_json(&error)),
            Err(unread) => Err(self.unread(head, unread).await),
        }
    }

    /// Reads a large request: decodes it off the workers, one at a time, and others wait in order. Returns it encoded, and the permit for its
    /// memory.
    async fn large_message(&self, head: &Parts, body: Body, wait: MemoryWait) -> Result<(Bytes, RoomPermit), Response> {
        let (body, permits) = match self.whole_large(body, wait.longest).await {
            Ok(read) => read,
            Err(UnreadBody::NoMemory) => return Err(self.crowded(wait.refusal)),
            Err(unread) => return Err(self.unread(head, unread).await),
        };
        // After the body: one that does not end keeps nobody out.
        let permit = self.room.permit(|| self.edge.telemetry().call_limited(Cause::StalledAnswer));
        let Ok(permit) = timeout(wait.longest, permit).await else {
            return Err(self.crowded(wait.refusal));
        };
        let turn = self.room.turn().await;
        // The work continues when the caller has left, so it keeps the turn.
        let decode = move || {
            let message = read::encode(&body);
            drop((body, permits));
            (message, turn)
        };
        let Ok((message, turn)) = self.room.run(decode).await else {
            return Err(broken());
        };
        drop(turn);
        Ok((message.map_err(|error| not_json(&error))?, permit))
    }

    /// Decides a request whole.
    async fn decide(
        &self,
        head: &Parts,
        mut request: RateLimitRequest,
        time: CallerTime,
        span: &mut Option<Span>,
    ) -> Result<RateLimitResponse, Response> {
        Edge::restrict(caller(head).map(|caller| &**caller), &mut request).map_err(|undecided| failed(&undecided))?;
        let response = self.edge.decide(request, time, span.as_mut()).await;
        response.map_err(|undecided| failed(&undecided))
    }

    /// Decides an encoded request. A request of many descriptors is decided slice by slice.
    async fn decide_large(
        &self,
        head: &Parts,
        message: Bytes,
        time: CallerTime,
        span: &mut Option<Span>,
    ) -> Result<Decided, Response> {
        if !is_large(&message) {
            let request = RateLimitRequest::decode(message).map_err(|error| bad_request(&error))?;
            let response = self.decide(head, request, time, span).await?;
            return Ok(Decided { response, statuses: Vec::new() });
        }
        // Boxed, so that ordinary requests do not carry it.
        let parts = Box::pin(self.edge.decide_large(message, time, caller(head).cloned(), span)).await;
        let mut parts = parts.map_err(|undecided| failed(&undecided))?.into_iter();
        let response = parts.next().and_then(|first| RateLimitResponse::decode(first).ok());
        Ok(Decided { response: response.ok_or_else(broken)?, statuses: parts.collect() })
    }

    fn span(&self, head: &Parts) -> Option<Span> {
        self.edge.telemetry().request(Way::Http { door: HttpDoor::Json, method: &head.method }, &head.headers)
    }

    /// Reads a large body whole, unless others need its memory before it has arrived. Waits at most `longest` for memory.
    async fn whole_large(&self, body: Body, longest: Duration) -> Result<(Bytes, BodyPermits), UnreadBody> {
        let mut permits = self.bodies.permits();
        let end = permits.end();
        let whole = tokio::select! {
            whole = self.whole(body, &mut permits, longest) => whole?,
            () = end.notified() => {
                self.edge.telemetry().call_limited(Cause::LateBody);
                return Err(UnreadBody::Broken);
            }
        };
        Ok((whole, permits))
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

    async fn unread(&self, head: &Parts, unread: UnreadBody) -> Response {
        match unread {
            UnreadBody::TooLarge(rest) => self.too_large(head, rest).await,
            UnreadBody::NoMemory => self.crowded(StatusCode::TOO_MANY_REQUESTS),
            UnreadBody::Broken => bad_request(&"the body did not arrive whole"),
        }
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
    fn of(Decided { response, statuses }: &Decided) -> Option<Self> {
        let status = match response.overall_code() {
            Code::Ok => StatusCode::OK,
            Code::OverLimit => StatusCode::TOO_MANY_REQUESTS,
            Code::Unknown => StatusCode::INTERNAL_SERVER_ERROR,
        };
        Some(Self { status, text: write::write(response, statuses)? })
    }

    fn with(self, body: impl FnOnce(Vec<u8>) -> Body) -> Response {
        (self.status, [(header::CONTENT_TYPE, "application/json")], body(self.text)).into_response()
    }
}

/// Returns the address of the peer. One that has already left has none.
fn peer(head: &Parts) -> IpAddr {
    origin(head).and_then(|origin| origin.peer).unwrap_or(Ipv4Addr::UNSPECIFIED.into())
}

/// Returns the caller, if callers have rights.
fn caller(head: &Parts) -> Option<&Arc<ConnectionCaller>> {
    origin(head)?.caller.as_ref()
}

/// Returns what is known of the connection.
fn origin(head: &Parts) -> Option<&Origin> {
    head.extensions.get::<Arc<Origin>>().map(|origin| &**origin)
}

/// Returns the time of a caller that waits for `timeout`.
fn caller_time(head: &Parts, timeout: Option<Duration>) -> CallerTime {
    let waited = origin(head).map_or(Duration::ZERO, |origin| origin.read_empty.waited());
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
    let decided = Decided { response, statuses: Vec::new() };
    JsonAnswer::of(&decided).map_or_else(broken, |answer| answer.with(Body::from))
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
