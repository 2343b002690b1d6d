//! Rate limits of Tidegate for axum and other tower services, and for callers of an API that is limited. Copy this file.

use std::convert::Infallible;
use std::io::Write;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant, SystemTime};

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use http::header::{CONTENT_TYPE, RETRY_AFTER};
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderName, HeaderValue, Request, StatusCode};
use tokio::sync::Notify;
use tonic::Status;
use tonic::client::Grpc;
use tonic::transport::{Channel, ClientTlsConfig, Endpoint, Error};
use tonic_prost::ProstCodec;
use tower::{Layer, Service};

pub use message::{Descriptor, Entry, Limit, Unit};

// --- The service: asks Tidegate before it answers ---

impl Descriptor {
    /// A descriptor of these keys and values, such as `[("path", "/orders"), ("user", "ann")]`. Their order matters.
    pub fn new<'a>(entries: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        let entry = |(key, value): (&str, &str)| Entry { key: key.to_owned(), value: value.to_owned() };
        Self { entries: entries.into_iter().map(entry).collect(), limit: None, hits: None, is_negative_hits: false }
    }

    /// Sends a limit in place of the rule's.
    pub fn with_limit(mut self, requests: u32, unit: Unit) -> Self {
        self.limit = Some(Limit { requests, unit: unit.into() });
        self
    }

    /// Sends a cost of its own; 0 looks without spending.
    pub fn with_hits(mut self, hits: u64) -> Self {
        self.hits = Some(hits);
        self
    }

    fn given_back(self, hits: u32) -> Self {
        Self { hits: Some(self.hits.unwrap_or(hits.into())), is_negative_hits: true, ..self }
    }
}

/// What to do with a request.
pub struct Decision {
    /// 200 (go on), 429 (refused) or 503 (no answer in time, and the service fails closed).
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: Vec<u8>,
    /// Why there was no answer.
    pub error: Option<Status>,
    /// Of the request, for descriptors without hits of their own.
    hits: u32,
}

impl Decision {
    fn admitted(error: Option<Status>) -> Self {
        Self { status: StatusCode::OK, headers: HeaderMap::new(), body: Vec::new(), error, hits: 1 }
    }

    /// Adds the headers to the response of an admitted request. `into_response` is the response of another.
    pub fn add_headers(&self, headers: &mut HeaderMap) {
        for (name, value) in &self.headers {
            headers.append(name, value.clone());
        }
    }
}

impl IntoResponse for Decision {
    fn into_response(self) -> Response {
        let mut response = Response::new(Body::from(self.body));
        *response.status_mut() = self.status;
        *response.headers_mut() = self.headers;
        let plain = HeaderValue::from_static("text/plain; charset=utf-8");
        response.headers_mut().entry(CONTENT_TYPE).or_insert(plain);
        response
    }
}

/// A connection that is opened once, kept, and shared by all clones.
#[derive(Clone)]
pub struct Tidegate {
    grpc: Grpc<Channel>,
    domain: Arc<str>,
    timeout: Duration,
    fail_open: bool,
    on_undecided: Arc<dyn Fn(&Status) + Send + Sync>,
    log: Arc<Log>,
}

/// The time from one line about calls without a decision to the next.
const LOG_PAUSE: Duration = Duration::from_secs(10);

/// Lines about calls without a decision.
struct Log {
    address: String,
    /// Time of the last line, and the number of calls since then.
    last: Mutex<Option<(Instant, u64)>>,
}

impl Log {
    fn report(&self, error: &Status, result: &str) {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let unlogged = match &mut *last {
            Some((at, unlogged)) if at.elapsed() < LOG_PAUSE => return *unlogged += 1,
            Some((_, unlogged)) => *unlogged,
            None => 0,
        };
        *last = Some((Instant::now(), 0));
        drop(last);
        let (address, code, why) = (&self.address, error.code(), error.message());
        // Replace it with `tracing::warn!` where your service logs by it.
        let _ = writeln!(
            std::io::stderr(),
            "Tidegate at {address} did not decide: {code:?}: {why}. {result}; {unlogged} more since the last such line"
        );
    }
}

impl Tidegate {
    /// Prepares a connection to `host:port`, in a runtime of tokio.
    ///
    /// `timeout` is the longest that a request waits for an answer. Without an answer a request goes on if `fail_open`, and
    /// otherwise gets status 503.
    pub fn new(address: &str, domain: &str, timeout: Duration, fail_open: bool) -> Result<Self, Error> {
        let endpoint = Endpoint::from_shared(format!("http://{address}"))?;
        Ok(Self::of(endpoint, domain, timeout, fail_open))
    }

    /// The same over TLS, with what `tls` trusts: `ClientTlsConfig::new().ca_certificate(Certificate::from_pem(ca))`, and with
    /// `.identity(Identity::from_pem(certificate, key))` a client certificate where Tidegate asks for one.
    pub fn with_tls(
        address: &str,
        domain: &str,
        timeout: Duration,
        fail_open: bool,
        tls: ClientTlsConfig,
    ) -> Result<Self, Error> {
        let endpoint = Endpoint::from_shared(format!("https://{address}"))?.tls_config(tls)?;
        Ok(Self::of(endpoint, domain, timeout, fail_open))
    }

    fn of(endpoint: Endpoint, domain: &str, timeout: Duration, fail_open: bool) -> Self {
        // A dead peer is noticed within 15 s. A connection that is lost is made again at the next request.
        let endpoint = endpoint
            .http2_keep_alive_interval(Duration::from_secs(10))
            .keep_alive_timeout(Duration::from_secs(5))
            .keep_alive_while_idle(true);
        let log = Arc::new(Log { address: endpoint.uri().to_string(), last: Mutex::default() });
        let grpc = Grpc::new(endpoint.connect_lazy());
        Self { grpc, domain: domain.into(), timeout, fail_open, on_undecided: Arc::new(|_| {}), log }
    }

    /// Sets what is called with the error of each call without a decision, for a metric of yours. Besides, standard error has a line
    /// about the first, and then at most every 10 s with the number of those in between.
    pub fn on_undecided(mut self, hook: impl Fn(&Status) + Send + Sync + 'static) -> Self {
        self.on_undecided = Arc::new(hook);
        self
    }

    /// Asks about a request, in a layer or in a handler that has read the body. Without an answer, `fail_open` decides, and
    /// `Decision::error` says why. 0 hits mean 1.
    pub async fn decide(&self, hits: u32, descriptors: Vec<Descriptor>) -> Decision {
        if descriptors.is_empty() {
            return Decision::admitted(None);
        }
        match self.ask(hits, descriptors).await {
            Ok(answer) => Decision { hits: hits.max(1), ..answer.into() },
            Err(error) if self.fail_open => {
                self.report(&error, "The request goes on without a limit");
                Decision::admitted(Some(error))
            }
            Err(error) => {
                self.report(&error, "The request gets status 503");
                Decision {
                    status: StatusCode::SERVICE_UNAVAILABLE,
                    headers: HeaderMap::from_iter([(RETRY_AFTER, HeaderValue::from_static("1"))]),
                    body: b"The rate limiter is unavailable.\n".to_vec(),
                    error: Some(error),
                    hits: 1,
                }
            }
        }
    }

    /// Gives back the hits that an admitted request spent on these of its descriptors. Call it once for a decision at most.
    ///
    /// Nothing is given back where Tidegate refused or did not decide: those hits may not be counted. If this call is not answered, it
    /// is reported like a call without a decision, and not sent again: the hits stay counted.
    pub async fn give_back(&self, decision: &Decision, descriptors: Vec<Descriptor>) {
        if decision.status != StatusCode::OK || decision.error.is_some() || descriptors.is_empty() {
            return;
        }
        let given = descriptors.into_iter().map(|descriptor| descriptor.given_back(decision.hits)).collect();
        if let Err(error) = self.ask(1, given).await {
            self.report(&error, "Hits are not given back");
        }
    }

    fn report(&self, error: &Status, result: &str) {
        (self.on_undecided)(error);
        self.log.report(error, result);
    }

    async fn ask(&self, hits: u32, descriptors: Vec<Descriptor>) -> Result<message::Answer, Status> {
        let request = message::Request { domain: self.domain.to_string(), descriptors, hits };
        let answer = tokio::time::timeout(self.timeout, self.send(request)).await;
        answer.unwrap_or_else(|_| Err(Status::deadline_exceeded("no answer in time")))
    }

    async fn send(&self, request: message::Request) -> Result<message::Answer, Status> {
        let mut grpc = self.grpc.clone();
        grpc.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
        let mut request = tonic::Request::new(request);
        request.set_timeout(self.timeout);
        let path = PathAndQuery::from_static("/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit");
        grpc.unary(request, path, ProstCodec::default()).await.map(tonic::Response::into_inner)
    }
}

impl From<message::Answer> for Decision {
    fn from(answer: message::Answer) -> Self {
        let is_refused = answer.code == message::OVER_LIMIT;
        let status = if is_refused { StatusCode::TOO_MANY_REQUESTS } else { StatusCode::OK };
        let header = |header: message::Header| {
            Some((HeaderName::try_from(header.key).ok()?, HeaderValue::try_from(header.value).ok()?))
        };
        let mut headers = HeaderMap::new();
        for (name, value) in answer.headers.into_iter().filter_map(header) {
            headers.append(name, value);
        }
        Self { status, headers, body: answer.body, error: None, hits: 1 }
    }
}

type Describe = dyn Fn(&Request<Body>) -> (u32, Vec<Descriptor>) + Send + Sync;

/// A layer: `router.layer(RateLimit::new(tidegate, describe))`. `describe` returns hits and descriptors; no descriptors: no limit.
#[derive(Clone)]
pub struct RateLimit {
    tidegate: Tidegate,
    describe: Arc<Describe>,
}

impl RateLimit {
    pub fn new(
        tidegate: Tidegate,
        describe: impl Fn(&Request<Body>) -> (u32, Vec<Descriptor>) + Send + Sync + 'static,
    ) -> Self {
        Self { tidegate, describe: Arc::new(describe) }
    }
}

impl<S> Layer<S> for RateLimit {
    type Service = Limited<S>;

    fn layer(&self, inner: S) -> Self::Service {
        Limited { limit: self.clone(), inner }
    }
}

/// A service behind the layer.
#[derive(Clone)]
pub struct Limited<S> {
    limit: RateLimit,
    inner: S,
}

impl<S> Service<Request<Body>> for Limited<S>
where
    S: Service<Request<Body>, Response = Response, Error = Infallible, Future: Send> + Clone + Send + 'static,
{
    type Response = Response;
    type Error = Infallible;
    type Future = std::pin::Pin<Box<dyn Future<Output = Result<Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        // `poll_ready` made this service ready, and not its clone.
        let clone = self.inner.clone();
        let mut inner = std::mem::replace(&mut self.inner, clone);
        let (hits, descriptors) = (self.limit.describe)(&request);
        let tidegate = self.limit.tidegate.clone();
        Box::pin(async move {
            let decision = tidegate.decide(hits, descriptors).await;
            if decision.status != StatusCode::OK {
                return Ok(decision.into_response());
            }
            let mut response = inner.call(request).await?;
            decision.add_headers(response.headers_mut());
            Ok(response)
        })
    }
}

/// What is sent and received of `envoy/service/ratelimit/v3/rls.proto`, so that nothing has to be generated.
mod message {
    /// `RateLimitRequest`
    #[derive(Clone, PartialEq, prost::Message)]
    pub struct Request {
        #[prost(string, tag = "1")]
        pub domain: String,
        #[prost(message, repeated, tag = "2")]
        pub descriptors: Vec<Descriptor>,
        #[prost(uint32, tag = "3")]
        pub hits: u32,
    }

    /// `RateLimitDescriptor`: what is limited.
    #[derive(Clone, PartialEq, prost::Message)]
    pub struct Descriptor {
        #[prost(message, repeated, tag = "1")]
        pub entries: Vec<Entry>,
        #[prost(message, optional, tag = "2")]
        pub limit: Option<Limit>,
        #[prost(message, optional, tag = "3")]
        pub hits: Option<u64>,
        #[prost(bool, tag = "4")]
        pub is_negative_hits: bool,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub struct Entry {
        #[prost(string, tag = "1")]
        pub key: String,
        #[prost(string, tag = "2")]
        pub value: String,
    }

    /// `RateLimitOverride`
    #[derive(Clone, PartialEq, prost::Message)]
    pub struct Limit {
        #[prost(uint32, tag = "1")]
        pub requests: u32,
        #[prost(enumeration = "Unit", tag = "2")]
        pub unit: i32,
    }

    /// `RateLimitUnit`
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, prost::Enumeration)]
    #[repr(i32)]
    pub enum Unit {
        Unknown = 0,
        Second = 1,
        Minute = 2,
        Hour = 3,
        Day = 4,
        Month = 5,
        Year = 6,
    }

    /// `RateLimitResponse.Code.OVER_LIMIT`, the only code that refuses.
    pub const OVER_LIMIT: i32 = 2;

    /// `RateLimitResponse`
    #[derive(Clone, PartialEq, prost::Message)]
    pub struct Answer {
        #[prost(int32, tag = "1")]
        pub code: i32,
        #[prost(message, repeated, tag = "3")]
        pub headers: Vec<Header>,
        #[prost(bytes = "vec", tag = "5")]
        pub body: Vec<u8>,
    }

    /// `HeaderValue`
    #[derive(Clone, PartialEq, prost::Message)]
    pub struct Header {
        #[prost(string, tag = "1")]
        pub key: String,
        #[prost(string, tag = "2")]
        pub value: String,
    }
}

// --- The caller: what to do when an API refuses ---

const ATTEMPTS: u32 = 5;
const BASE: Duration = Duration::from_millis(100);
const LONGEST_JITTER: Duration = Duration::from_secs(10);

/// Calls `send` until its response is neither 429 nor 503, at most 5 times; returns the last response.
///
/// Waits as long as Retry-After says, and then a random time of at most as long again (at least 100 ms), twice that, and so on up
/// to 10 s (full jitter), so that callers who were refused together do not return together. An error of `send` ends it.
pub async fn retry<B, E>(mut send: impl AsyncFnMut() -> Result<http::Response<B>, E>) -> Result<http::Response<B>, E> {
    for attempt in 0..ATTEMPTS - 1 {
        let response = send().await?;
        if ![StatusCode::TOO_MANY_REQUESTS, StatusCode::SERVICE_UNAVAILABLE].contains(&response.status()) {
            return Ok(response);
        }
        let wait = retry_after(response.headers());
        tokio::time::sleep(wait + jitter(wait.max(BASE) * 2_u32.pow(attempt))).await;
    }
    send().await
}

fn jitter(most: Duration) -> Duration {
    LONGEST_JITTER.min(most).mul_f64(fastrand::f64())
}

/// 0 without the header, or if it is a date, which Tidegate does not send.
fn retry_after(headers: &HeaderMap) -> Duration {
    Duration::from_secs(number(headers, "retry-after").unwrap_or(0).into())
}

fn number(headers: &HeaderMap, name: &str) -> Option<u32> {
    headers.get(name)?.to_str().ok()?.parse().ok()
}

/// Keeps a caller below the limit that the responses report.
///
/// While no limit is known, one call is in flight; afterwards as many as the last response left, less those in flight. Without any
/// left it waits until the reset, and a random time of at most as long again (10 s at most): others may wait for the same reset.
#[derive(Default)]
pub struct Pacer {
    state: Mutex<State>,
    changed: Notify,
}

#[derive(Default)]
struct State {
    in_flight: i64,
    /// Calls that are left, and until when that is known.
    known: Option<(i64, Instant)>,
}

/// When to look again.
enum Wait {
    Now,
    Until(Instant),
    ForAnswer,
}

impl Pacer {
    /// Waits for its turn and calls `send`.
    pub async fn call<B, E>(
        &self,
        send: impl AsyncFnOnce() -> Result<http::Response<B>, E>,
    ) -> Result<http::Response<B>, E> {
        self.enter().await;
        let mut turn = Turn { pacer: self, reported: None };
        let response = send().await?;
        turn.reported = reported_limit(response.headers());
        Ok(response)
    }

    async fn enter(&self) {
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            // From here on a change is not missed.
            changed.as_mut().enable();
            let wait = self.state.lock().unwrap_or_else(PoisonError::into_inner).enter();
            match wait {
                Wait::Now => return,
                Wait::Until(time) => drop(tokio::time::timeout_at(time.into(), changed).await),
                Wait::ForAnswer => changed.await,
            }
        }
    }
}

impl State {
    fn enter(&mut self) -> Wait {
        let known = self.known.filter(|(_, until)| Instant::now() < *until);
        match known {
            None if self.in_flight > 0 => return Wait::ForAnswer,
            Some((left, until)) if left < 1 => return Wait::Until(until),
            _ => {}
        }
        self.known = known.map(|(left, until)| (left - 1, until));
        self.in_flight += 1;
        Wait::Now
    }
}

/// A call in flight. It ends when it is answered, fails or is cancelled.
struct Turn<'a> {
    pacer: &'a Pacer,
    reported: Option<(u32, Duration)>,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut state = self.pacer.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.in_flight -= 1;
        if let Some((remaining, reset)) = self.reported {
            let jitter = if remaining == 0 { jitter(reset) } else { Duration::ZERO };
            state.known = Some((i64::from(remaining) - state.in_flight, Instant::now() + reset + jitter));
        } else if state.known.is_none() {
            // Without a reported limit, calls are not held back for a second.
            state.known = Some((i64::MAX, Instant::now() + Duration::from_secs(1)));
        }
        drop(state);
        self.pacer.changed.notify_waiters();
    }
}

/// Calls that remain, and the time until that changes; from RateLimit, RateLimit-* or X-RateLimit-*.
fn reported_limit(headers: &HeaderMap) -> Option<(u32, Duration)> {
    let wait = retry_after(headers);
    if !wait.is_zero() {
        return Some((0, wait));
    }
    // RateLimit: "per-user";r=1;t=46, "all";r=999;t=946. The least remaining counts, for the longest time.
    let list = headers.get("ratelimit").and_then(|value| value.to_str().ok()).unwrap_or_default();
    let items = list.split(";r=").skip(1).filter_map(|item| {
        let (remaining, rest) = item.split_once(";t=")?;
        let seconds: u32 = rest.split([',', ';']).next()?.trim().parse().ok()?;
        Some((remaining.parse().ok()?, Duration::from_secs(seconds.into())))
    });
    let least = items.min_by_key(|(remaining, reset): &(u32, Duration)| (*remaining, std::cmp::Reverse(*reset)));
    let reference = || {
        let reset = number(headers, "ratelimit-reset")?;
        Some((number(headers, "ratelimit-remaining")?, Duration::from_secs(reset.into())))
    };
    // X-RateLimit-Reset of Tidegate is a time in seconds of the epoch.
    let x_ratelimit = || {
        let reset = SystemTime::UNIX_EPOCH + Duration::from_secs(number(headers, "x-ratelimit-reset")?.into());
        let reset = reset.duration_since(SystemTime::now()).unwrap_or_default();
        Some((number(headers, "x-ratelimit-remaining")?, reset))
    };
    least.or_else(reference).or_else(x_ratelimit)
}
