//! Services of the gRPC listener: `ShouldRateLimit`, health and reflection.

use std::convert::Infallible;
use std::error::Error;
use std::future::ready;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use http::request::Parts;
use http::{HeaderMap, HeaderValue, header};
use http_body::Body;
use http_body_util::{BodyExt, Full};
use prost::{DecodeError, Message as _};
use thiserror::Error;
use tonic::metadata::MetadataMap;
use tonic::service::Routes;
use tonic::{Request as Wire, Response, Status};
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;
use tower::Service;

mod undecided;

use super::answer::{Answers, Format, StoreUnavailable};
use super::callers::{ConnectionCaller, Denied};
use super::delay::{Arrival, Held, Hold, Permits};
use super::message::{self, Compression, LARGEST_MESSAGE, Message, Read, Skimmed, Unreadable, WireRequest};
use crate::limiter::{CallerTime, Limiter, Snapshot, by_domain};
use crate::model::{InvalidRequest, Request, Rights};
use crate::proto::DESCRIPTORS;
use crate::proto::envoy::service::ratelimit::v3::rate_limit_service_server::SERVICE_NAME;
use crate::proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use crate::serve::head::{EXPLAIN, GRPC_ENCODING};
use crate::serve::memory;
use crate::telemetry::Telemetry;
use crate::telemetry::limited::Cause;
use crate::telemetry::traces::{Span, Way};
use crate::telemetry::undecided::Reason;

/// Path of the only method that decides.
const SHOULD_RATE_LIMIT: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";
/// Prefix of the paths of the health check.
const HEALTH: &str = "/grpc.health.v1.Health/";
/// Names of the health check: the server as a whole, the reference's name, and the service's own name.
const HEALTH_NAMES: [&str; 3] = ["", "ratelimit", SERVICE_NAME];

/// Answers `ShouldRateLimit`.
#[derive(Clone)]
pub struct Edge {
    limiter: Arc<Limiter>,
    answers: Arc<Answers>,
    telemetry: Arc<Telemetry>,
    permits: Arc<Permits>,
}

impl Edge {
    /// Creates an edge that decides with `limiter`, formats with `answers` and reports to `telemetry`. It delays at
    /// most `most_held` calls at a time.
    pub fn new(limiter: Arc<Limiter>, answers: Arc<Answers>, telemetry: Arc<Telemetry>, most_held: usize) -> Self {
        Self { limiter, answers, telemetry, permits: Permits::new(most_held) }
    }

    /// Returns an edge that decides in the same way and delays at most `most_held` of the calls that both together may delay.
    #[must_use]
    pub fn delaying(&self, most_held: usize) -> Self {
        Self { permits: self.permits.at_most(most_held), ..self.clone() }
    }

    /// Returns an edge that decides in the same way and adds the decision to the metadata of its answers.
    fn explaining(&self) -> Self {
        let answers = Answers { decision_metadata: true, explains: true, ..Answers::clone(&self.answers) };
        Self { answers: Arc::new(answers), ..self.clone() }
    }

    /// Returns the telemetry to which it reports calls and decisions.
    pub fn telemetry(&self) -> Arc<Telemetry> {
        Arc::clone(&self.telemetry)
    }

    /// Returns the limiter with which it decides.
    pub fn limiter(&self) -> &Limiter {
        &self.limiter
    }

    /// Returns a function that counts the calls delayed at the time it is called.
    pub fn held_calls(&self) -> impl Fn() -> usize + use<> {
        let permits = Arc::clone(&self.permits);
        move || permits.taken()
    }

    /// Answers a call of `ShouldRateLimit` whose message was read.
    ///
    /// # Errors
    /// Returns an error if the request is malformed or invalid, or the store is unavailable.
    pub async fn should_rate_limit(&self, wire: Wire<Message>) -> Result<Response<RateLimitResponse>, Status> {
        let _call = self.telemetry.call();
        let waited = wire.extensions().get::<Waited>().map_or_else(memory::waited, |Waited(waited)| *waited);
        let timeout = wire.metadata().get("grpc-timeout").and_then(|timeout| parse_timeout(timeout.as_bytes()));
        let mut span = self.telemetry.request(Way::Grpc, wire.metadata().as_ref());
        let caller = wire.extensions().get::<Arc<ConnectionCaller>>().cloned();
        let time = CallerTime { timeout, waited, longest_delay: None };
        let answer = self.decide_message(wire.into_inner(), caller.as_deref(), time, span.as_mut()).await;
        if let Some(span) = &mut span {
            match &answer {
                Ok(_) => span.answered("OK", false),
                Err(Undecided::Invalid(_)) => span.answered("INVALID_ARGUMENT", false),
                Err(Undecided::Malformed(_)) => span.answered("INTERNAL", false),
                Err(Undecided::Unavailable(_)) => span.answered("UNAVAILABLE", true),
                Err(Undecided::NoRules) => span.answered("UNKNOWN", true),
                Err(Undecided::NotGranted) => span.answered("PERMISSION_DENIED", false),
            }
        }
        answer.map(Response::new).map_err(|undecided| {
            if let Some(reason) = undecided.reason() {
                self.undecided(reason, None);
            }
            undecided.into()
        })
    }

    /// Decides an encoded request of `caller`, who waits for `time`; `span` records the decision.
    ///
    /// # Errors
    /// Returns an error if the message is malformed, if the request is invalid, if the caller may not ask about the domain, or if the store is
    /// unavailable and the decision is left to the caller.
    pub async fn decide_message(
        &self,
        message: Message,
        caller: Option<&ConnectionCaller>,
        time: CallerTime,
        span: Option<&mut Span>,
    ) -> Result<RateLimitResponse, Undecided> {
        let held = {
            let (request, _turn) = message.decoded().await?;
            self.decide_wire(request, caller, (time, Answers::respond), span).await?
        };
        Ok(held.over().await)
    }

    /// Decides a request of the wire, as [`Self::decide_message`] does, for an answer in this form, which is still to be held back.
    pub(super) async fn decide_wire<T>(
        &self,
        request: WireRequest,
        caller: Option<&ConnectionCaller>,
        (time, format): (CallerTime, Format<T>),
        span: Option<&mut Span>,
    ) -> Result<Held<T>, Undecided> {
        match request {
            WireRequest::Whole(mut wire) => {
                Self::restrict(caller, &mut wire)?;
                let request = self.request(wire)?;
                self.decide_request(request, (time, format), span).await
            }
            WireRequest::TooLarge(skimmed) => self.decide_by_domain(skimmed, caller, format, span),
        }
    }

    /// Decides one request of the wire. `timeout` is the time that the caller waits; `span` records the decision.
    ///
    /// # Errors
    /// Returns an error if the request is invalid, or if the store is unavailable and the decision is left to the
    /// caller.
    pub async fn decide(
        &self,
        wire: RateLimitRequest,
        timeout: impl Into<CallerTime>,
        span: Option<&mut Span>,
    ) -> Result<RateLimitResponse, Undecided> {
        let request = self.request(wire)?;
        Ok(self.decide_request(request, (timeout.into(), Answers::respond), span).await?.over().await)
    }

    /// Decides a request, for an answer in this form. The answer is held back for as long as its limits ask. Neither the rules nor the request
    /// are needed meanwhile.
    ///
    /// # Errors
    /// Returns an error if no rules were ever loaded, or if the store is unavailable and the decision is left to the caller.
    pub(super) async fn decide_request<T>(
        &self,
        request: Request,
        (timeout, format): (CallerTime, Format<T>),
        span: Option<&mut Span>,
    ) -> Result<Held<T>, Undecided> {
        let arrival = Arrival::now(timeout);
        let rules = self.rules_for(&request)?;
        let mut decision = match &span {
            None => self.limiter.decide(&rules, &request, timeout).await,
            // Boxed, so that calls without a span do not carry it.
            Some(span) => span.around(Box::pin(self.limiter.decide(&rules, &request, timeout))).await,
        };
        if decision.is_too_large {
            self.telemetry.call_limited(Cause::TooLarge);
        }
        let hold = arrival.hold(&mut decision, &self.permits);
        self.telemetry.observe(&request, &decision, span);
        Ok(Held { answer: format(&self.answers, &request, &decision)?, hold })
    }

    /// Decides a request of which only the domain counts, because it is too large.
    fn decide_by_domain<T>(
        &self,
        Skimmed { domain, may_bring_limit, .. }: Skimmed,
        caller: Option<&ConnectionCaller>,
        format: Format<T>,
        span: Option<&mut Span>,
    ) -> Result<Held<T>, Undecided> {
        self.telemetry.call_limited(Cause::TooLarge);
        let rights = rights(caller, &domain)?;
        let request = Request::unread(domain).inspect_err(|_| self.telemetry.invalid())?;
        let rules = self.rules_for(&request)?;
        if may_bring_limit
            && !rights.may_override
            && let Some(caller) = caller
        {
            caller.note(Denied::OVERRIDES, request.domain());
        }
        let decision = by_domain(&rules, request.domain(), may_bring_limit && rights.may_override);
        self.telemetry.observe(&request, &decision, span);
        Ok(Held { answer: format(&self.answers, &request, &decision)?, hold: Hold::default() })
    }

    /// Returns the rules in force.
    ///
    /// # Errors
    /// Returns an error if no rules were ever loaded.
    fn rules_for(&self, request: &Request) -> Result<Snapshot, Undecided> {
        let rules = self.limiter.rules();
        if rules.can_decide(request.domain()) {
            return Ok(rules);
        }
        self.telemetry.invalid();
        Err(Undecided::NoRules)
    }

    fn request(&self, wire: RateLimitRequest) -> Result<Request, Undecided> {
        Ok(Request::try_from(wire).inspect_err(|_| self.telemetry.invalid())?)
    }

    /// Takes out of `wire` what its `caller` has no right to.
    ///
    /// # Errors
    /// Returns an error if the caller may not ask about the domain.
    pub fn restrict(caller: Option<&ConnectionCaller>, wire: &mut RateLimitRequest) -> Result<(), Undecided> {
        let rights = rights(caller, &wire.domain)?;
        let Some(caller) = caller else { return Ok(()) };
        let mut denied = Denied::default();
        ConnectionCaller::restrict(rights, &mut wire.descriptors, &mut denied);
        caller.note(denied, &wire.domain);
        Ok(())
    }

    /// Answers a call of `ShouldRateLimit` from its head and its body.
    async fn call<B>(&self, mut head: Parts, body: B) -> http::Response<tonic::body::Body>
    where
        B: Body<Data = Bytes> + Unpin,
        B::Error: Into<Box<dyn Error + Send + Sync>>,
    {
        let compression = Compression::of(head.headers.get(&GRPC_ENCODING));
        let read = match message::read(body, compression, || self.limiter.rules().longest_domain()).await {
            Ok(read) => read,
            Err(unreadable) => return self.unreadable(unreadable),
        };
        if read.began.is_some() {
            head.extensions.insert(Waited(read.waited()));
        }
        let metadata = MetadataMap::from_headers(head.headers);
        match self.should_rate_limit(Wire::from_parts(metadata, head.extensions, read.message)).await {
            Ok(answer) => encoded(answer.get_ref()),
            Err(status) => status.into_http(),
        }
    }

    /// Counts a call that ended before a decision.
    fn undecided(&self, reason: Reason, method: Option<&str>) {
        self.telemetry.undecided(reason, memory::peer(), method);
    }
}

/// Time for which a call has waited at most, if its message was compressed.
#[derive(Clone, Copy, Debug)]
struct Waited(Duration);

/// Returns the prefix of a message of `length` bytes (gRPC over HTTP/2, Length-Prefixed-Message), with room for the message.
fn prefixed(length: usize) -> BytesMut {
    let mut message = BytesMut::with_capacity(5 + length);
    message.put_u8(0);
    message.put_u32(u32::try_from(length).unwrap_or(u32::MAX));
    message
}

/// Returns an answer as a call of gRPC gets it: one message, and trailers that say OK.
fn encoded(answer: &RateLimitResponse) -> http::Response<tonic::body::Body> {
    let mut message = prefixed(answer.encoded_len());
    // The buffer grows, so there is room.
    let _ = answer.encode(&mut message);
    let trailers = HeaderMap::from_iter([(Status::GRPC_STATUS, HeaderValue::from_static("0"))]);
    let body = Full::new(message.freeze()).with_trailers(ready(Some(Ok(trailers))));
    let mut response = http::Response::new(tonic::body::Body::new(body));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    response
}

/// Reason for a request without a decision: the caller's configuration is wrong, or the operator leaves the decision to
/// the caller.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Undecided {
    /// The request is invalid.
    #[error(transparent)]
    Invalid(#[from] InvalidRequest),
    /// The message is not a `RateLimitRequest`.
    #[error(transparent)]
    Malformed(#[from] DecodeError),
    /// The store is unavailable.
    #[error(transparent)]
    Unavailable(#[from] StoreUnavailable),
    /// No rules were ever loaded. The text is that of the reference.
    #[error("no rate limit configuration loaded")]
    NoRules,
    /// The caller may not ask about the domain.
    #[error(
        "the caller may not ask about this domain: CALLERS_FILE of the rate limit service grants it to none of the names in the caller's certificate, or without a certificate not to `anonymous`"
    )]
    NotGranted,
}

/// Returns the rights of `caller` in `domain`: all, if callers have no rights.
///
/// # Errors
/// Returns an error if the caller may not ask about the domain.
pub(crate) fn rights(caller: Option<&ConnectionCaller>, domain: &str) -> Result<Rights, Undecided> {
    caller.map_or(Ok(Rights::ALL), |caller| caller.rights(domain).ok_or(Undecided::NotGranted))
}

impl From<Undecided> for Status {
    fn from(undecided: Undecided) -> Self {
        match undecided {
            Undecided::Invalid(error) => Self::invalid_argument(error.to_string()),
            // tonic answers with this status if it cannot decode a message.
            Undecided::Malformed(error) => Self::internal(error.to_string()),
            Undecided::Unavailable(error) => Self::unavailable(error.to_string()),
            Undecided::NoRules => Self::unknown(undecided.to_string()),
            Undecided::NotGranted => Self::permission_denied(undecided.to_string()),
        }
    }
}

/// Parses the time that a caller waits, gRPC's `grpc-timeout`: at most eight digits and a unit. `None` for any other
/// text.
fn parse_timeout(text: &[u8]) -> Option<Duration> {
    let (unit, digits) = text.split_last()?;
    if digits.is_empty() || digits.len() > 8 || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let number = digits.iter().fold(0, |number, digit| number * 10 + u64::from(digit - b'0'));
    Some(match unit {
        b'H' => Duration::from_secs(number * 3_600),
        b'M' => Duration::from_secs(number * 60),
        b'S' => Duration::from_secs(number),
        b'm' => Duration::from_millis(number),
        b'u' => Duration::from_micros(number),
        b'n' => Duration::from_nanos(number),
        _ => return None,
    })
}

/// All services of the gRPC listener. Calls of `ShouldRateLimit`, the busiest method, bypass the router.
#[derive(Clone)]
pub struct Services {
    edge: Arc<Edge>,
    others: Routes,
}

/// Health status of this instance, which tells callers if it accepts requests.
#[derive(Clone)]
pub struct Health(HealthReporter);

impl Health {
    /// Sets the status under every name.
    pub async fn set_serving(&self, serving: bool) {
        let status = if serving { ServingStatus::Serving } else { ServingStatus::NotServing };
        for name in HEALTH_NAMES {
            self.0.set_service_status(name, status).await;
        }
    }
}

impl Services {
    /// Creates the services and their health status, which starts as not serving.
    ///
    /// # Errors
    /// Returns an error if the descriptors of `proto/` do not suit reflection, which is a fault of the build.
    pub async fn new(edge: Edge) -> Result<(Self, Health), tonic_reflection::server::Error> {
        let (reporter, health_service) = tonic_health::server::health_reporter();
        let health = Health(reporter);
        health.set_serving(false).await;
        let reflection = || {
            tonic_reflection::server::Builder::configure()
                .register_encoded_file_descriptor_set(DESCRIPTORS)
                .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        };
        // A larger message would be kept by tonic, and in no account (`RequestBody`).
        let others = Routes::new(health_service.max_decoding_message_size(LARGEST_MESSAGE))
            .add_service(reflection().build_v1()?.max_decoding_message_size(LARGEST_MESSAGE))
            .add_service(reflection().build_v1alpha()?.max_decoding_message_size(LARGEST_MESSAGE))
            .prepare();
        Ok((Self { edge: Arc::new(edge), others }, health))
    }

    /// Answers a call of any other method. One that no service has is answered with the method that decides.
    fn other<B>(&self, mut head: Parts, body: B) -> AnswerFuture
    where
        B: Body<Data = Bytes> + Unpin + Send + 'static,
        B::Error: Into<Box<dyn Error + Send + Sync>> + Send + 'static,
    {
        let (edge, mut others) = (Arc::clone(&self.edge), self.others.clone());
        Box::pin(async move {
            let path = head.uri.path().to_owned();
            // Its requests are single messages. tonic would refuse the encoding, even if the message is not compressed.
            let encoding = path.starts_with(HEALTH).then(|| head.headers.remove(&GRPC_ENCODING)).flatten();
            let answer = match encoding {
                None => others.call(http::Request::from_parts(head, body)).await,
                Some(encoding) => match message::read(body, Compression::of(Some(&encoding)), || 0).await {
                    Ok(Read { message: Message::Whole { bytes, .. }, .. }) => {
                        let mut message = prefixed(bytes.len());
                        message.extend_from_slice(&bytes);
                        others.call(http::Request::from_parts(head, Full::new(message.freeze()))).await
                    }
                    Ok(_) => return Ok(Status::out_of_range("the message is above 1 MiB").into_http()),
                    Err(unreadable) => return Ok(edge.unreadable(unreadable)),
                },
            };
            Ok(edge.named(answer?, &path))
        })
    }
}

type AnswerFuture = Pin<Box<dyn Future<Output = Result<http::Response<tonic::body::Body>, Infallible>> + Send>>;

impl<B> Service<http::Request<B>> for Services
where
    B: Body<Data = Bytes> + Unpin + Send + 'static,
    B::Error: Into<Box<dyn Error + Send + Sync>> + Send + 'static,
{
    type Response = http::Response<tonic::body::Body>;
    type Error = Infallible;
    type Future = AnswerFuture;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<B>) -> AnswerFuture {
        let (head, body) = request.into_parts();
        if head.uri.path() != SHOULD_RATE_LIMIT {
            return self.other(head, body);
        }
        let is_explained = head.headers.contains_key(&EXPLAIN);
        let edge = if is_explained { Arc::new(self.edge.explaining()) } else { Arc::clone(&self.edge) };
        Box::pin(async move { Ok(edge.call(head, body).await) })
    }
}

#[cfg(test)]
mod tests {
    use super::{Duration, parse_timeout};

    #[test]
    fn a_callers_time_out_is_read_in_every_unit_of_the_protocol() {
        assert_eq!(parse_timeout(b"20m"), Some(Duration::from_millis(20)));
        assert_eq!(parse_timeout(b"1H"), Some(Duration::from_secs(3_600)));
        assert_eq!(parse_timeout(b"2M"), Some(Duration::from_secs(120)));
        assert_eq!(parse_timeout(b"3S"), Some(Duration::from_secs(3)));
        assert_eq!(parse_timeout(b"250000u"), Some(Duration::from_millis(250)));
        assert_eq!(parse_timeout(b"99999999n"), Some(Duration::from_nanos(99_999_999)));
        for wrong in ["", "m", "20", "20x", "123456789m", "-5m", "1.5S", "2 m"] {
            assert_eq!(parse_timeout(wrong.as_bytes()), None, "{wrong:?}");
        }
    }
}
