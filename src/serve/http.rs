//! Protocols of connections: HTTP/2 for gRPC, HTTP/1.1 for the other listeners.

use std::convert::Infallible;
use std::error::Error;
use std::future::Future;
use std::mem;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{Extensions, HeaderValue, Request, Response, header};
use http_body::Body;
use hyper::body::Incoming;
use hyper::rt::{Sleep, Timer};
use hyper::server::conn::{http1, http2};
use hyper::service::Service as HyperService;
use hyper_util::rt::{TokioIo, TokioTimer};
use tower::Service;

use super::activity::{Activity, InFlight};
use super::answer::AnswerBody;
use super::body::RequestBody;
use super::head;
use super::limits::ConnectionLimits;
use super::memory::process::ProcessAccount;
use super::memory::runner::Runner;
use super::memory::{self, Account};
use super::rest::HeadTimer;
use super::socket::Socket;
use super::tls::Peer;
use super::turn::State;
use super::waiting::ReadEmpty;
use crate::model::PeerName;
use crate::telemetry::limited::LimitedCalls;

/// Maximum number of calls in flight on one connection: 1,024 (`docs/decisions/0003`). tonic's default has no bound.
pub const MAX_STREAMS: u32 = 1_024;
/// Receive window of one call, in bytes: 8 KiB less the head of a frame, so that a whole window in one frame fits into
/// 8 KiB of memory. h2 keeps these bytes while a body waits for room, so [`MAX_STREAMS`] windows have to fit into the
/// memory that a connection may hold (`docs/decisions/0024`).
pub const STREAM_WINDOW_BYTES: u32 = 8 * 1_024 - 9;
/// Receive window of one connection, in bytes: a whole window for each call, 8 MiB. With less, bodies that wait for
/// room would block the body that has the turn. It is also above 512 x [`MAX_STREAMS`]: below that, h2 takes a burst of
/// small calls for an attack and ends the connection (RUSTSEC-2026-0258 and its sequel, h2#939).
pub const CONNECTION_WINDOW_BYTES: u32 = MAX_STREAMS * STREAM_WINDOW_BYTES;
/// Maximum bytes of one call's headers: 256 KiB. Envoy may copy a client's tracing headers into the call, and accepts
/// up to 60 KiB of them, or more if configured. A call refused for its headers is an error, and an error is an
/// admission to Envoy.
pub const MAX_HEADER_BYTES: u32 = 256 * 1_024;
/// Bytes of an answer buffered for one call: 16 KiB, one frame. hyper's default of 400 KiB is meant for files.
pub const SEND_BUFFER_BYTES: usize = 16 * 1_024;
/// Maximum number of calls that the client resets before h2 hands them over: 2,048 at a time. h2 ends the connection
/// beyond it, so it must never be reached: one turn reads 8 KiB (`turn::TURN_BYTES`). Together with a frame that
/// began in the turn before, these hold at most 1,000 such calls, and all of them are handed over before the next turn.
pub const MAX_RESET_BEFORE_ACCEPT: usize = 2_048;
/// Maximum number of calls that we reset for the client's errors in the life of a connection: 256 (RUSTSEC-2024-0003).
/// tonic removes this bound.
pub const MAX_RESET_FOR_ERRORS: usize = 256;
/// Maximum bytes of an HTTP/1 request head, and of a read: 64 KiB.
pub const HTTP1_BUFFER_BYTES: usize = 64 * 1_024;
/// Maximum number of headers of an HTTP/1 request: 2,048. A gateway hands on those of its clients; with more, the answer is 431, which each gateway of
/// the examples takes for a refusal, except an NGINX that fails open: it hands on as many as fit into 32 KiB, and with 256 a client with more would
/// pass there. hyper allocates two arrays of 32 bytes for each at every request: of 64 KiB, the largest that mimalloc keeps at hand. Twice as many
/// took 3,500 instructions more.
const HTTP1_HEADERS: usize = 2_048;

/// Path prefix of calls whose streams stay open while the client is idle: server reflection.
const OPEN_ENDED: &str = "/grpc.reflection.";
/// Path of the call whose answer does not end.
const WATCH: &str = "/grpc.health.v1.Health/Watch";

/// Adds to the extensions of each call of a connection what is known of its peer.
pub type Introduction = Arc<dyn Fn(&mut Extensions) + Send + Sync>;
/// Returns the introduction of a peer whose certificate has these names; `None` without a certificate.
pub type Introduce = Arc<dyn Fn(Option<Box<[PeerName]>>) -> Introduction + Send + Sync>;

/// Protocol of a connection.
pub trait Protocol: Clone + Send + 'static {
    /// Connection that is being served.
    type Connection: Connection;

    /// Returns the number of bytes that every client sends at once after it connects.
    fn opening_bytes(&self) -> usize;

    /// Serves `socket` of `peer` when polled. Counts the calls in flight in `activity`.
    fn connect(&self, socket: Socket, activity: &Activity, peer: &Peer) -> Self::Connection;
}

/// Connection that is being served. The future completes when the connection is closed.
pub trait Connection: Future<Output = hyper::Result<()>> + Send + 'static {
    /// Stops taking calls (GOAWAY, `connection: close`). The connection ends when the calls in flight are answered.
    fn finish(self: Pin<&mut Self>);

    /// Returns true if its next answer can announce its end (`Connection: close`), so that no request is lost. `finish` closes
    /// an idle HTTP/1 connection at once, and a request that is on its way is lost.
    fn can_announce_end(&self) -> bool {
        false
    }
}

/// Service that both protocols can serve; implemented for every tower service with these types.
pub trait CallService:
    Service<
        Request<RequestBody>,
        Response = Response<<Self as CallService>::Body>,
        Error = Infallible,
        Future: Send + Unpin + 'static,
    > + Clone
    + Send
    + 'static
{
    /// Body of an answer.
    type Body: Body<Data = Bytes, Error: Into<Box<dyn Error + Send + Sync>>> + Unpin + Send + 'static;
}

impl<S, B> CallService for S
where
    S: Service<Request<RequestBody>, Response = Response<B>, Error = Infallible> + Clone + Send + 'static,
    S::Future: Send + Unpin + 'static,
    B: Body<Data = Bytes, Error: Into<Box<dyn Error + Send + Sync>>> + Unpin + Send + 'static,
{
    type Body = B;
}

/// HTTP/2 without negotiation (h2c with prior knowledge), as Envoy and every gRPC client speak it.
#[derive(Clone)]
pub struct Http2<S> {
    service: S,
    limits: ConnectionLimits,
    limited: Option<Arc<LimitedCalls>>,
    process: Arc<ProcessAccount>,
    introduce: Option<Introduce>,
}

impl<S> Http2<S> {
    /// Serves calls with clones of `service`, which must always be ready, as tonic's generated services are:
    /// `poll_ready` is not called.
    pub fn new(service: S, limits: &ConnectionLimits) -> Self {
        Self { service, limits: *limits, limited: None, process: Arc::default(), introduce: None }
    }

    /// Bounds with `process` the memory that the calls of all connections hold.
    #[must_use]
    pub fn within(self, process: Arc<ProcessAccount>) -> Self {
        Self { process, ..self }
    }

    /// Adds to each call what `introduce` says of its peer.
    #[must_use]
    pub fn introducing(self, introduce: Option<Introduce>) -> Self {
        Self { introduce, ..self }
    }

    /// Counts calls in `limited` if their peer takes nothing of the answer, and reads that wait for memory.
    #[must_use]
    pub fn counting(self, limited: Arc<LimitedCalls>) -> Self {
        Self { limited: Some(limited), ..self }
    }
}

impl<S: CallService> Protocol for Http2<S> {
    type Connection = http2::Connection<TokioIo<Socket>, Calls<S>, Runner>;

    /// Returns the preface, 24 bytes, and the head of the first frame, 9 (RFC 9113, 3.4 and 4.1).
    fn opening_bytes(&self) -> usize {
        24 + 9
    }

    fn connect(&self, socket: Socket, activity: &Activity, peer: &Peer) -> Self::Connection {
        let limits = &self.limits;
        let account = Account::new(self.limited.clone(), Arc::clone(&self.process), socket.read_empty());
        let account = Arc::new(account.with_peer(socket.peer_address()));
        let calls = Calls::new(self.service.clone(), limits.body, Some(Arc::clone(&account)));
        let calls = Calls { introduction: self.introduce.as_ref().map(|introduce| introduce(peer.names())), ..calls };
        http2::Builder::new(Runner::new(Arc::clone(&account), limits.stall, activity.clone()))
            .timer(TurnTimer(activity.clone()))
            .max_concurrent_streams(MAX_STREAMS)
            .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
            .initial_stream_window_size(STREAM_WINDOW_BYTES)
            .max_header_list_size(MAX_HEADER_BYTES)
            .max_send_buf_size(SEND_BUFFER_BYTES)
            .max_pending_accept_reset_streams(MAX_RESET_BEFORE_ACCEPT)
            .max_local_error_reset_streams(MAX_RESET_FOR_ERRORS)
            .keep_alive_interval(limits.ping_after)
            .keep_alive_timeout(limits.ping_answer)
            .auto_date_header(false)
            .serve_connection(TokioIo::new(socket.within(account)), calls)
    }
}

/// Timer of a connection whose time stands still during a turn. hyper asks for the time at each frame, to know for how long a peer has
/// been idle; a turn is much shorter than `ConnectionLimits::ping_after`.
struct TurnTimer(Activity);

impl Timer for TurnTimer {
    fn sleep(&self, duration: Duration) -> Pin<Box<dyn Sleep>> {
        TokioTimer::new().sleep(duration)
    }

    fn sleep_until(&self, deadline: Instant) -> Pin<Box<dyn Sleep>> {
        TokioTimer::new().sleep_until(deadline)
    }

    fn now(&self) -> Instant {
        self.0.turn_began().into_std()
    }

    fn reset(&self, sleep: &mut Pin<Box<dyn Sleep>>, new_deadline: Instant) {
        TokioTimer::new().reset(sleep, new_deadline);
    }
}

impl<S: CallService> Connection for http2::Connection<TokioIo<Socket>, Calls<S>, Runner> {
    fn finish(self: Pin<&mut Self>) {
        self.graceful_shutdown();
    }
}

/// HTTP/1.1.
#[derive(Clone)]
pub struct Http1<S> {
    builder: http1::Builder,
    calls: Calls<S>,
    /// Time for a head that has begun.
    head: Duration,
    introduce: Option<Introduce>,
}

impl<S> Http1<S> {
    /// Serves requests with clones of `service`, which must always be ready: `poll_ready` is not called.
    pub fn new(service: S, limits: &ConnectionLimits) -> Self {
        let mut builder = http1::Builder::new();
        builder.header_read_timeout(limits.keep_alive);
        builder.max_buf_size(HTTP1_BUFFER_BYTES).max_headers(HTTP1_HEADERS);
        let calls = Calls::new(service, limits.body, None);
        Self { builder, calls, head: limits.handshake, introduce: None }
    }

    /// Adds to each request what `introduce` says of its peer.
    #[must_use]
    pub fn introducing(self, introduce: Option<Introduce>) -> Self {
        Self { introduce, ..self }
    }
}

impl<S: CallService> Protocol for Http1<S> {
    type Connection = http1::Connection<TokioIo<Socket>, Calls<S>>;

    /// Returns 1, for any first byte: the rest of the head has hyper's own timeout.
    fn opening_bytes(&self) -> usize {
        1
    }

    fn connect(&self, socket: Socket, activity: &Activity, peer: &Peer) -> Self::Connection {
        let connection =
            HttpConnection { peer: socket.peer_address(), read_empty: socket.read_empty(), state: socket.state() };
        let introduction = self.introduce.as_ref().map(|introduce| introduce(peer.names()));
        let activity = Some(activity.clone());
        let calls = Calls { connection: Some(Arc::new(connection)), activity, introduction, ..self.calls.clone() };
        let mut builder = self.builder.clone();
        builder.timer(HeadTimer::new(socket.state(), self.head));
        builder.serve_connection(TokioIo::new(socket), calls)
    }
}

impl<S: CallService> Connection for http1::Connection<TokioIo<Socket>, Calls<S>> {
    fn finish(self: Pin<&mut Self>) {
        self.graceful_shutdown();
    }

    fn can_announce_end(&self) -> bool {
        true
    }
}

/// Tower service in the form that hyper calls: one clone and one call, without a box of its own.
#[derive(Clone)]
pub struct Calls<S> {
    service: S,
    body: Duration,
    /// Memory account of a connection of gRPC, which may have many calls at once.
    account: Option<Arc<Account>>,
    /// Passed to HTTP requests; gRPC calls have an account that knows their wait.
    connection: Option<Arc<HttpConnection>>,
    /// Counts the HTTP requests in flight. gRPC calls are counted by their tasks.
    activity: Option<Activity>,
    /// Adds to each call what is known of its peer.
    introduction: Option<Introduction>,
}

impl<S> Calls<S> {
    fn new(service: S, body: Duration, account: Option<Arc<Account>>) -> Self {
        Self { service, body, account, connection: None, activity: None, introduction: None }
    }
}

/// Connection of an HTTP request, as its handlers know it.
#[derive(Debug)]
pub struct HttpConnection {
    /// Address of the peer. One that has already left has none.
    pub peer: Option<IpAddr>,
    /// Measures how long a request has waited.
    read_empty: Arc<ReadEmpty>,
    /// Told of each request.
    state: State,
}

impl HttpConnection {
    /// Returns the longest time for which a request of this connection can have waited for its thread.
    pub fn waited(&self) -> Duration {
        self.read_empty.waited()
    }
}

/// Call that is being answered.
#[derive(Debug)]
pub struct ResponseFuture<F> {
    answer: F,
    /// True until the first poll if the call is endless, so that it does not make its connection busy.
    is_endless: bool,
    /// Makes an HTTP/1 connection busy until the end of the answer.
    in_flight: Option<InFlight>,
}

impl<S> HyperService<Request<Incoming>> for Calls<S>
where
    S: CallService,
{
    type Response = Response<AnswerBody<<S as CallService>::Body>>;
    type Error = Infallible;
    type Future = ResponseFuture<S::Future>;

    fn call(&self, request: Request<Incoming>) -> Self::Future {
        let path = request.uri().path();
        let is_open_ended = path.starts_with(OPEN_ENDED);
        let is_endless = is_open_ended || path == WATCH;
        let allowed = (!is_open_ended).then_some(self.body);
        let (mut head, body) = request.into_parts();
        let body = match &self.account {
            Some(account) => RequestBody::of_account(body, allowed, account),
            None => RequestBody::new(body, allowed),
        };
        if self.account.is_some() && !body.has_arrived() {
            head::reduce(&mut head);
        }
        if let Some(connection) = &self.connection {
            connection.state.note_request();
            head.extensions.insert(Arc::clone(connection));
        }
        if let Some(introduction) = &self.introduction {
            introduction(&mut head.extensions);
        }
        let in_flight = self.activity.as_ref().map(Activity::call);
        ResponseFuture { answer: self.service.clone().call(Request::from_parts(head, body)), is_endless, in_flight }
    }
}

impl<F, B, E> Future for ResponseFuture<F>
where
    F: Future<Output = Result<Response<B>, E>> + Unpin,
{
    type Output = Result<Response<AnswerBody<B>>, E>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if mem::take(&mut self.is_endless) {
            memory::need_not_end();
        }
        let answered = Pin::new(&mut self.answer).poll(cx);
        answered.map_ok(|mut response| {
            let in_flight = self.in_flight.take();
            if in_flight.as_ref().is_some_and(InFlight::is_last) {
                response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
            }
            response.map(|body| AnswerBody::new(body, in_flight))
        })
    }
}
