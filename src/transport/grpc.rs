//! Services of the gRPC listener: `ShouldRateLimit`, health and reflection.

use std::convert::Infallible;
use std::error::Error;
use std::future::ready;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::request::Parts;
use http_body::Body;
use prost::DecodeError;
use thiserror::Error;
use tonic::server::{Grpc, UnaryService};
use tonic::service::Routes;
use tonic::{Code, Request as Wire, Response, Status};
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;
use tower::Service;

mod large;
mod undecided;

use super::budget;
use super::callers::{ConnectionCaller, Denied};
use super::head::{EXPLAIN, GRPC_ENCODING};
use super::hold::{Caller, Held, Permits};
use super::message::{Began, Beginning, Compression, LARGEST_MESSAGE, Unopened, UnreadMessage, Unreadable};
use super::wire::{Answers, StoreUnavailable};
use crate::limiter::{CallerTime, Limiter};
use crate::model::{InvalidRequest, Request, Rights};
use crate::proto::DESCRIPTORS;
use crate::proto::codec::{Decisions, Incoming, Outgoing};
use crate::proto::envoy::service::ratelimit::v3::rate_limit_service_server::SERVICE_NAME;
use crate::proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use crate::proto::large::SLICE_DESCRIPTORS;
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
    /// Maximum number of descriptors in one slice of a large request.
    slice: usize,
}

impl Edge {
    /// Creates an edge that decides with `limiter`, formats with `answers` and reports to `telemetry`. It delays at
    /// most `most_held` calls at a time.
    pub fn new(limiter: Arc<Limiter>, answers: Arc<Answers>, telemetry: Arc<Telemetry>, most_held: usize) -> Self {
        Self { limiter, answers, telemetry, permits: Permits::new(most_held), slice: SLICE_DESCRIPTORS }
    }

    /// Sets the maximum number of descriptors in one slice of a large request to `slice`.
    #[must_use]
    pub fn slicing(self, slice: usize) -> Self {
        Self { slice, ..self }
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
        let request = Request::try_from(wire).inspect_err(|_| self.telemetry.invalid())?;
        self.decide_read(request, timeout.into(), span).await
    }

    /// Decides a request that is not of the wire, as [`Self::decide`] does.
    ///
    /// # Errors
    /// Returns an error if no rules were ever loaded, or if the store is unavailable and the decision is left to the caller.
    pub async fn decide_read(
        &self,
        request: Request,
        timeout: CallerTime,
        span: Option<&mut Span>,
    ) -> Result<RateLimitResponse, Undecided> {
        let caller = Caller::who_waits(timeout);
        let held = {
            let rules = self.limiter.rules();
            if !rules.can_decide(request.domain()) {
                self.telemetry.invalid();
                return Err(Undecided::NoRules);
            }
            let mut decision = match &span {
                None => self.limiter.decide(&rules, &request, timeout).await,
                // Boxed, so that calls without a span do not carry it.
                Some(span) => span.around(Box::pin(self.limiter.decide(&rules, &request, timeout))).await,
            };
            let hold = caller.hold(&mut decision, &self.permits);
            self.telemetry.observe(&request, &decision, span);
            Held { response: self.answers.respond(&request, &decision)?, hold }
        };
        // From here on, neither the rules nor the request are needed, however long the delay is.
        drop(request);
        Ok(held.over().await)
    }

    /// Takes out of `wire` what its `caller` has no right to.
    ///
    /// # Errors
    /// Returns an error if the caller may not ask about the domain.
    pub fn restrict(caller: Option<&ConnectionCaller>, wire: &mut RateLimitRequest) -> Result<(), Undecided> {
        let Some(caller) = caller else { return Ok(()) };
        let rights = caller.rights(&wire.domain).ok_or(Undecided::NotGranted)?;
        let mut denied = Denied::default();
        ConnectionCaller::restrict(rights, &mut wire.descriptors, &mut denied);
        caller.note(denied, &wire.domain);
        Ok(())
    }

    /// Decides a request whose message was above [`LARGEST_MESSAGE`]. Only its `domain` was read.
    fn decide_unread(
        &self,
        domain: String,
        unread: UnreadMessage,
        caller: Option<&ConnectionCaller>,
        span: Option<&mut Span>,
    ) -> Result<RateLimitResponse, Undecided> {
        self.telemetry.call_limited(Cause::TooLarge);
        let rights = rights(caller, &domain)?;
        let request = Request::unread(domain).inspect_err(|_| self.telemetry.invalid())?;
        let rules = self.limiter.rules();
        if !rules.can_decide(request.domain()) {
            self.telemetry.invalid();
            return Err(Undecided::NoRules);
        }
        if unread.may_bring_limit
            && !rights.may_override
            && let Some(caller) = caller
        {
            caller.note(Denied::OVERRIDES, request.domain());
        }
        let decision = self.limiter.decide_unread(&rules, &request, unread.may_bring_limit && rights.may_override);
        self.telemetry.observe(&request, &decision, span);
        Ok(self.answers.respond(&request, &decision)?)
    }
}

impl Edge {
    /// Answers a call of `ShouldRateLimit`.
    ///
    /// # Errors
    /// Returns an error if the request is malformed or invalid, or the store is unavailable.
    pub async fn should_rate_limit(&self, wire: Wire<Incoming>) -> Result<Response<Outgoing>, Status> {
        let _call = self.telemetry.call();
        let waited = wire.extensions().get::<Began>().map_or_else(budget::waited, Began::waited);
        let timeout = wire.metadata().get("grpc-timeout").and_then(|timeout| parse_timeout(timeout.as_bytes()));
        let mut span = self.telemetry.request(Way::Grpc, wire.metadata().as_ref());
        let unread = wire.extensions().get::<UnreadMessage>().copied();
        let caller = wire.extensions().get::<Arc<ConnectionCaller>>().cloned();
        let timeout = CallerTime { timeout, waited, longest_delay: None };
        let answer = match (wire.into_inner(), unread) {
            (Incoming::Small(mut request), None) => match Self::restrict(caller.as_deref(), &mut request) {
                Ok(()) => self.decide(request, timeout, span.as_mut()).await.map(Outgoing::Small),
                Err(undecided) => Err(undecided),
            },
            // Boxed, so that ordinary calls do not carry it.
            (Incoming::Large(message), None) => {
                Box::pin(self.decide_large(message, timeout, caller, &mut span)).await.map(Outgoing::Large)
            }
            (message, Some(unread)) => {
                let request = message.decoded();
                let decided = |request: RateLimitRequest| {
                    self.decide_unread(request.domain, unread, caller.as_deref(), span.as_mut())
                };
                request.map_err(Undecided::from).and_then(decided).map(Outgoing::Small)
            }
        };
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

    /// Counts a call that ended before a decision.
    fn undecided(&self, reason: Reason, method: Option<&str>) {
        self.telemetry.undecided(reason, budget::peer(), method);
    }
}

/// Handler of one call of `ShouldRateLimit`.
struct DecisionHandler<'a>(&'a Arc<Edge>);

impl UnaryService<Incoming> for DecisionHandler<'_> {
    type Response = Outgoing;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Outgoing>, Status>> + Send>>;

    fn call(&mut self, request: Wire<Incoming>) -> Self::Future {
        let is_explained = request.metadata().as_ref().contains_key(&EXPLAIN);
        let edge = if is_explained { Arc::new(self.0.explaining()) } else { Arc::clone(self.0) };
        Box::pin(async move { edge.should_rate_limit(request).await })
    }
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
pub(in crate::transport) fn rights(caller: Option<&ConnectionCaller>, domain: &str) -> Result<Rights, Undecided> {
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
    decisions: Arc<Edge>,
    others: Routes,
    limiter: Arc<Limiter>,
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
        let others = Routes::new(health_service)
            .add_service(reflection().build_v1()?)
            .add_service(reflection().build_v1alpha()?)
            .prepare();
        let limiter = Arc::clone(&edge.limiter);
        Ok((Self { decisions: Arc::new(edge), others, limiter }, health))
    }

    /// Answers a call whose message has not arrived, is above [`LARGEST_MESSAGE`], or is compressed.
    fn open<B>(&self, mut head: Parts, body: Unopened<B>, compression: Compression) -> AnswerFuture
    where
        B: Body<Data = Bytes> + Unpin + Send + 'static,
        B::Error: Into<Box<dyn Error + Send + Sync>> + Send + 'static,
    {
        let (decisions, limiter) = (Arc::clone(&self.decisions), Arc::clone(&self.limiter));
        self.counted(Box::pin(async move {
            match body.open(&mut head, compression, || limiter.rules().longest_domain()).await {
                Ok(body) => answer(decisions, http::Request::from_parts(head, body)).await,
                Err(unreadable) => Ok(decisions.unreadable(unreadable)),
            }
        }))
    }

    /// Answers a call of any other method. One that no service has is answered with the method that decides.
    fn other<B>(&self, mut head: Parts, body: B) -> AnswerFuture
    where
        B: Body<Data = Bytes> + Unpin + Send + 'static,
        B::Error: Into<Box<dyn Error + Send + Sync>> + Send + 'static,
    {
        let (edge, limiter, mut others) = (Arc::clone(&self.decisions), Arc::clone(&self.limiter), self.others.clone());
        Box::pin(async move {
            let path = head.uri.path().to_owned();
            // Its requests are single messages. tonic would refuse the encoding, even if the message is not compressed.
            let encoding = path.starts_with(HEALTH).then(|| head.headers.remove(&GRPC_ENCODING)).flatten();
            let answer = match encoding {
                None => others.call(http::Request::from_parts(head, body)).await,
                Some(encoding) => {
                    let opened = match Beginning::of(body) {
                        Ok(Beginning::Ordinary(body)) => Ok(body),
                        Ok(Beginning::Other(body)) => {
                            let compression = Compression::of(Some(&encoding));
                            let longest_domain = || limiter.rules().longest_domain();
                            body.open(&mut head, compression, longest_domain).await
                        }
                        Err(broken) => Err(Status::from_error(broken.into()).into()),
                    };
                    match opened {
                        Ok(body) => others.call(http::Request::from_parts(head, body)).await,
                        Err(unreadable) => return Ok(edge.unreadable(unreadable)),
                    }
                }
            };
            Ok(edge.named(answer?, &path))
        })
    }

    /// Counts the call if its body does not arrive in time.
    fn counted(&self, answer: AnswerFuture) -> AnswerFuture {
        let telemetry = Arc::clone(&self.decisions.telemetry);
        Box::pin(async move {
            let answer = answer.await?;
            // No other answer has this status: see `RequestBody`.
            if Status::from_header_map(answer.headers()).is_some_and(|status| status.code() == Code::DeadlineExceeded) {
                telemetry.call_limited(Cause::LateBody);
            }
            Ok(answer)
        })
    }
}

/// Answers a call whose message is within the bound.
async fn answer<B>(edge: Arc<Edge>, request: http::Request<B>) -> Result<http::Response<tonic::body::Body>, Infallible>
where
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<Box<dyn Error + Send + Sync>> + Send + 'static,
{
    let mut grpc = Grpc::new(Decisions).max_decoding_message_size(LARGEST_MESSAGE);
    let answer = grpc.unary(DecisionHandler(&edge), request).await;
    edge.note_malformed(&answer);
    Ok(answer)
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
        let (mut head, body) = request.into_parts();
        if head.uri.path() != SHOULD_RATE_LIMIT {
            return self.other(head, body);
        }
        // tonic would refuse the encoding, even if the message is not compressed.
        let compression = Compression::of(head.headers.remove(&GRPC_ENCODING).as_ref());
        match Beginning::of(body) {
            Ok(Beginning::Ordinary(body)) => {
                let has_arrived = body.has_arrived();
                let request = http::Request::from_parts(head, body);
                let answered: AnswerFuture = Box::pin(answer(Arc::clone(&self.decisions), request));
                if has_arrived { answered } else { self.counted(answered) }
            }
            Ok(Beginning::Other(body)) => self.open(head, body, compression),
            Err(broken) => Box::pin(ready(Ok(Status::from_error(broken.into()).into_http()))),
        }
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
