//! Load that does not wait for answers: calls come when they are due, as from callers who know nothing of each other.

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use hyper::body::Incoming;
use hyper::client::conn::http2::{SendRequest, handshake};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tidegate::proto::envoy::service::ratelimit::v3::rate_limit_response::Code as Outcome;
use tidegate::proto::envoy::service::ratelimit::v3::rate_limit_service_client::RateLimitServiceClient;
use tidegate::proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use tokio::net::TcpStream;
use tokio::sync::{MutexGuard, oneshot};
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};
use tonic::body::Body;
use tonic::{Code, Request};
use tower::Service;

use crate::support::{PATIENCE, in_time, rule_file};

/// Held by a test that measures, so that those that do run one after the other.
pub async fn alone() -> MutexGuard<'static, ()> {
    static ALONE: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());
    ALONE.lock().await
}

/// How many connections share the calls, one after the other.
const CONNECTIONS: u64 = 4;

/// One call and what came of it.
#[derive(Clone, Debug)]
pub struct Call {
    /// Which of the requests it made.
    pub request: usize,
    /// When it was due, after the load began.
    pub due: Duration,
    /// When it was made: with the next tick of the timer, up to 2 ms later, and later still if this machine is too busy.
    pub made: Duration,
    /// When its answer was there, after the load began.
    pub answered: Duration,
    /// Its answer, or the status of its failure.
    pub answer: Result<RateLimitResponse, Code>,
}

impl Call {
    /// How long its caller waited, counted from when it was due, so that a call that is made late is no faster for it.
    pub fn duration(&self) -> Duration {
        self.answered - self.due
    }
}

/// Calls that were answered.
#[derive(Clone, Debug, Default)]
pub struct Calls(Vec<Call>);

impl Calls {
    /// Each of them, in the order of their answers.
    pub fn iter(&self) -> impl Iterator<Item = &Call> {
        self.0.iter()
    }

    /// How many they are.
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// These and others, of another load.
    pub fn and(&self, others: &Self) -> Self {
        Self(self.0.iter().chain(&others.0).cloned().collect())
    }

    /// Those that were due from one moment on and before another.
    pub fn between(&self, from: Duration, to: Duration) -> Self {
        self.such_that(|call| (from..to).contains(&call.due))
    }

    /// Those of a kind.
    pub fn such_that(&self, is_such: impl Fn(&Call) -> bool) -> Self {
        Self(self.0.iter().filter(|call| is_such(call)).cloned().collect())
    }

    /// How many were answered so.
    pub fn answered(&self, outcome: Outcome) -> usize {
        self.such_that(|call| call.answer.as_ref().is_ok_and(|answer| answer.overall_code() == outcome)).count()
    }

    /// How many failed.
    pub fn failed(&self) -> usize {
        self.such_that(|call| call.answer.is_err()).count()
    }

    /// The duration that so many of a thousand calls did not exceed: 990 is the 99th percentile, 1,000 the longest.
    pub fn permille(&self, permille: usize) -> Duration {
        let mut durations: Vec<_> = self.0.iter().map(Call::duration).collect();
        durations.sort_unstable();
        let rank = (durations.len() * permille).div_ceil(1_000).max(1);
        *durations.get(rank - 1).expect("there are calls")
    }
}

/// Calls that are made at a steady rate until this is stopped or dropped, by a thread of their own.
pub struct Load {
    began: Instant,
    calls: Arc<Mutex<Calls>>,
    stop: oneshot::Sender<()>,
    is_over: oneshot::Receiver<()>,
}

impl Load {
    /// Makes these requests in turn, with this timeout, which the server is told of and the client keeps.
    pub async fn start(
        server: SocketAddr,
        requests: Vec<RateLimitRequest>,
        per_second: u32,
        timeout: Duration,
    ) -> Self {
        Self::begin(server, requests, per_second, [timeout; 2]).await
    }

    /// The same, but the client waits on when the time is up that the server is told of: what this machine takes too long
    /// for is slow, and only what the server fails has failed.
    pub async fn patient(server: SocketAddr, requests: Vec<RateLimitRequest>, per_second: u32, told: Duration) -> Self {
        Self::begin(server, requests, per_second, [told, PATIENCE]).await
    }

    async fn begin(
        server: SocketAddr,
        requests: Vec<RateLimitRequest>,
        per_second: u32,
        timeouts: [Duration; 2],
    ) -> Self {
        let (stop, stopped) = oneshot::channel();
        let (over, is_over) = oneshot::channel();
        let (begun, beginning) = oneshot::channel();
        let calls = Arc::new(Mutex::new(Calls::default()));
        let offer = Offer { requests, per_second, timeouts, calls: Arc::clone(&calls) };
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            runtime.block_on(async {
                let clients = connect(server).await;
                let began = Instant::now();
                if begun.send(began).is_ok() {
                    offer.run(&clients, began, stopped).await;
                }
            });
            // Nobody may be waiting.
            let _ = over.send(());
        });
        let began = in_time("the load begins", beginning).await.expect("the server is there");
        Self { began, calls, stop, is_over }
    }

    /// The moment at which it began, from which its calls count their times.
    pub fn began(&self) -> Instant {
        self.began
    }

    /// How long it has gone on: the moment, in its calls' time.
    pub fn elapsed(&self) -> Duration {
        self.began.elapsed()
    }

    /// The calls that were answered after a moment.
    pub fn since(&self, moment: Duration) -> Calls {
        let calls = self.calls.lock().expect("no call panics");
        Calls(calls.0.iter().rev().take_while(|call| call.answered >= moment).cloned().collect())
    }

    /// The calls that are answered by now.
    pub fn so_far(&self) -> Calls {
        self.calls.lock().expect("no call panics").clone()
    }

    /// Makes no more calls, and waits for the answers that are out.
    pub async fn stop(self) -> Calls {
        drop(self.stop);
        in_time("the last call is answered", self.is_over).await.expect("no call panics");
        std::mem::take(&mut *self.calls.lock().expect("no call panics"))
    }
}

/// One connection. Unlike a `Channel`, it reads no timeout out of what it sends.
#[derive(Clone)]
struct Line(SendRequest<Body>);

impl Service<http::Request<Body>> for Line {
    type Response = http::Response<Incoming>;
    type Error = hyper::Error;
    type Future = Pin<Box<dyn Future<Output = hyper::Result<Self::Response>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<hyper::Result<()>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        Box::pin(self.0.send_request(request))
    }
}

async fn connect(server: SocketAddr) -> Vec<RateLimitServiceClient<Line>> {
    let origin: http::Uri = format!("http://{server}").parse().expect("an address");
    let mut clients = Vec::new();
    for _ in 0..CONNECTIONS {
        let stream = TcpStream::connect(server).await.expect("it takes connections");
        stream.set_nodelay(true).expect("a socket option");
        let (line, connection) = handshake(TokioExecutor::new(), TokioIo::new(stream)).await.expect("it speaks HTTP/2");
        tokio::spawn(connection);
        clients.push(RateLimitServiceClient::with_origin(Line(line), origin.clone()));
    }
    clients
}

/// What is asked for.
struct Offer {
    requests: Vec<RateLimitRequest>,
    per_second: u32,
    /// What the server is told of, and what the client keeps.
    timeouts: [Duration; 2],
    calls: Arc<Mutex<Calls>>,
}

impl Offer {
    async fn run(&self, clients: &[RateLimitServiceClient<Line>], began: Instant, mut stopped: oneshot::Receiver<()>) {
        // As fine as the timer is.
        let mut ticks = interval(Duration::from_millis(1));
        ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
        let mut open = JoinSet::new();
        let mut made = 0;
        loop {
            tokio::select! {
                biased;
                _ = &mut stopped => break,
                _ = ticks.tick() => {}
            }
            let due = |number: u64| Duration::from_micros(number * 1_000_000 / u64::from(self.per_second));
            while due(made) <= began.elapsed() {
                let turn = |of: usize| usize::try_from(made).expect("it fits") % of;
                open.spawn(self.call(
                    clients[turn(clients.len())].clone(),
                    turn(self.requests.len()),
                    began,
                    due(made),
                ));
                made += 1;
            }
            while let Some(ended) = open.try_join_next() {
                ended.expect("no call panics");
            }
        }
        while let Some(ended) = open.join_next().await {
            ended.expect("no call panics");
        }
    }

    fn call(
        &self,
        mut client: RateLimitServiceClient<Line>,
        number: usize,
        began: Instant,
        due: Duration,
    ) -> impl Future<Output = ()> + use<> {
        let mut request = Request::new(self.requests[number].clone());
        let [told, kept] = self.timeouts;
        request.set_timeout(told);
        let calls = Arc::clone(&self.calls);
        async move {
            let made = began.elapsed();
            let answer = match timeout(kept, client.should_rate_limit(request)).await {
                Ok(answer) => answer.map(tonic::Response::into_inner).map_err(|status| status.code()),
                Err(_) => Err(Code::DeadlineExceeded),
            };
            let call = Call { request: number, due, made, answered: began.elapsed(), answer };
            calls.lock().expect("no call panics").0.push(call);
        }
    }
}

/// The support itself.
mod tests {
    use rustix::process::Signal;

    use super::*;
    use crate::support::{Tidegate, eventually};

    const RULES: &str = "domain: d\ndescriptors:\n  - { key: a, rate_limit: { unit: week, requests_per_unit: 300 } }\n";

    async fn server() -> Tidegate {
        let rules = rule_file(RULES);
        Tidegate::start(rules.path(), &[("LOG_LEVEL", "warn")]).await
    }

    fn request(value: &'static str) -> RateLimitRequest {
        crate::grpc::one("d", "a", value)
    }

    async fn until(load: &Load, calls: usize) {
        eventually("calls are answered", async || (load.so_far().count() >= calls).then_some(())).await;
    }

    #[tokio::test]
    async fn load_comes_at_its_rate_and_all_of_it_is_accounted_for() {
        let server = server().await;
        let requests = vec![request("one"), request("other")];
        let load = Load::start(server.grpc, requests, 2_000, Duration::from_secs(60)).await;
        until(&load, 1_000).await;
        let calls = load.stop().await;
        let last = calls.iter().map(|call| call.due).max().expect("there are calls");
        assert_eq!(u128::try_from(calls.count() - 1).expect("it fits") * 500, last.as_micros());
        assert!(calls.iter().all(|call| (call.due..=call.answered).contains(&call.made)));
        assert_eq!((calls.answered(Outcome::Ok), calls.failed()), (600, 0));
        assert_eq!(calls.answered(Outcome::OverLimit), calls.count() - 600);
        assert_eq!(calls.iter().filter(|call| call.request == 1).count(), calls.count() / 2);
        assert!(calls.permille(500) <= calls.permille(990));
        assert_eq!(calls.iter().map(Call::duration).max(), Some(calls.permille(1_000)));
    }

    #[tokio::test]
    async fn a_pause_of_the_server_is_seen_by_every_call_that_was_due_in_it() {
        let server = server().await;
        let patient = Load::start(server.grpc, vec![request("one")], 500, Duration::from_secs(60)).await;
        let hasty = Load::start(server.grpc, vec![request("one")], 100, Duration::from_millis(50)).await;
        until(&patient, 100).await;
        server.signal(Signal::STOP);
        let paused = patient.elapsed();
        eventually("the hasty give up", async || (hasty.so_far().failed() >= 10).then_some(())).await;
        let resumed = patient.elapsed();
        server.signal(Signal::CONT);
        until(&patient, patient.so_far().count() + 100).await;
        let calls = patient.stop().await;
        let caught = calls.between(paused, resumed);
        let expected = usize::try_from((resumed - paused).as_millis() / 2).expect("it fits");
        assert!(caught.count().abs_diff(expected) <= 1, "{} of {expected}", caught.count());
        let early = caught.such_that(|call| call.answered < resumed);
        assert_eq!((early.count(), calls.failed()), (0, 0), "{:?}", early.iter().next());
        let failed = hasty.stop().await.such_that(|call| call.answer.is_err());
        assert!(failed.iter().all(|call| call.duration() >= Duration::from_millis(50)));
    }
}
