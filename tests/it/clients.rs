//! The clients of `examples/clients/`, each in front of a real server that refuses, is paused, dies and comes back.

use std::fs::DirEntry;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tokio::io::{AsyncReadExt, AsyncWriteExt, copy_bidirectional};
use tokio::net::TcpStream;

use crate::http::{self, Answer};
use crate::redis::certificates::Authority;
use crate::support::{Process, Tidegate, answering, eventually, output, repository};
use crate::tls::{MUTUAL, Secured};

/// What the libraries of gRPC do with each transport, and when something ends early.
mod standard;
/// The toolchains of the languages, and what they build.
mod toolchains;

use toolchains::Program;

/// The rules of the demos.
const RULES: &str = "examples/clients/rules.yaml";

/// Timeout of a demo whose answers are checked, in milliseconds: long enough for a very busy machine.
const LONG_TIMEOUT: &str = "20000";

/// Timeout of a demo that gets no answers, in milliseconds.
const SHORT_TIMEOUT: &str = "100";

/// Time from one line about calls without a decision to the next.
const LOG_PAUSE: Duration = Duration::from_secs(10);

/// Longest that a demo with `SHORT_TIMEOUT` may take without an answer of Tidegate, on a very busy machine.
const SOON: Duration = Duration::from_secs(5);

#[tokio::test]
#[ignore = "tests/nightly runs it"]
async fn a_python_service_and_its_caller_keep_limits_and_deadlines() {
    if let Some(built) = toolchains::python().await {
        keeps_limits_and_deadlines(&built.demo).await;
    }
}

#[tokio::test]
#[ignore = "tests/nightly runs it"]
async fn a_go_service_and_its_caller_keep_limits_and_deadlines() {
    if let Some(built) = toolchains::go().await {
        keeps_limits_and_deadlines(&built.demo).await;
    }
}

#[tokio::test]
#[ignore = "tests/nightly runs it"]
async fn a_node_service_and_its_caller_keep_limits_and_deadlines() {
    if let Some(built) = toolchains::node().await {
        keeps_limits_and_deadlines(&built.demo).await;
    }
}

#[tokio::test]
#[ignore = "tests/nightly runs it"]
async fn a_java_service_and_its_caller_keep_limits_and_deadlines() {
    if let Some(built) = toolchains::java().await {
        keeps_limits_and_deadlines(&built.demo).await;
    }
}

#[tokio::test]
#[ignore = "tests/nightly runs it"]
async fn a_rust_service_and_its_caller_keep_limits_and_deadlines() {
    keeps_limits_and_deadlines(&toolchains::rust().await.demo).await;
}

/// Everything that a client promises.
async fn keeps_limits_and_deadlines(demo: &Program) {
    let server = tidegate(0, "ietf").await;
    let (proxy, opened) = counts_connections(server.grpc).await;
    let service = Service::start(demo, proxy, "open", LONG_TIMEOUT).await;
    refusals_reach_the_client(&service).await;
    hits_and_limits_are_counted(&service).await;
    a_login_counts_wrong_passwords_of_an_account_and_all_tries_of_an_address(&service).await;
    assert_eq!(opened.load(Ordering::Relaxed), 1, "all calls use one connection");
    tokio::join!(
        retries_wait_for_retry_after(demo, &service),
        callers_who_wait_for_the_same_moment_spread(demo),
        no_call_is_refused(demo, &service),
        no_call_is_refused_in(demo, "x-ratelimit"),
        no_call_is_refused_in(demo, "reference"),
        files_of_a_ca_and_of_a_certificate_make_it_speak_tls(demo),
    );
    drop(service);
    the_choice_without_an_answer_is_kept(demo, server).await;
}

/// A server with the rules of the demos; port 0 is any.
async fn tidegate(port: u16, style: &str) -> Tidegate {
    let port = port.to_string();
    let variables = [("GRPC_PORT", port.as_str()), ("RESPONSE_HEADERS", style), ("REFUSAL_BODY", "json")];
    Tidegate::start(&repository(RULES), &variables).await
}

/// A proxy in front of a server, and the number of connections that were opened to it.
async fn counts_connections(server: SocketAddr) -> (SocketAddr, Arc<AtomicUsize>) {
    let opened = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&opened);
    let answer = move |mut caller: TcpStream| {
        counted.fetch_add(1, Ordering::Relaxed);
        async move {
            let mut server = TcpStream::connect(server).await?;
            copy_bidirectional(&mut caller, &mut server).await
        }
    };
    (answering(answer).await, opened)
}

/// A demo that answers over HTTP.
struct Service {
    at: SocketAddr,
    process: Process,
}

impl Service {
    async fn start(demo: &Program, server: SocketAddr, without_answer: &str, timeout_ms: &str) -> Self {
        Self::start_with(demo, server, without_answer, timeout_ms, &[]).await
    }

    /// The same with these files of TLS.
    async fn start_with(
        demo: &Program,
        server: SocketAddr,
        without_answer: &str,
        timeout_ms: &str,
        files: &[&str],
    ) -> Self {
        let server = server.to_string();
        let arguments = [&["serve", &server, without_answer, timeout_ms], files].concat();
        let mut process = Process::start(&mut demo.command(&arguments));
        let line = process.line().await;
        let at = line.as_deref().and_then(|line| line.strip_prefix("http://")?.parse().ok());
        let at = at.unwrap_or_else(|| panic!("{line:?} is no address: {}", process.errors()));
        Self { at, process }
    }

    fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.at)
    }

    async fn get(&self, path: &str, user: &str) -> Answer {
        http::get(self.at, path).header("x-user", user).await
    }

    async fn login(&self, account: &str, password: &str) -> Answer {
        let form = format!("account={account}&password={password}");
        let request = http::post(self.at, "/login", form);
        request.header("content-type", "application/x-www-form-urlencoded").await
    }

    /// The number of calls without a decision that its hook has counted.
    async fn undecided(&self) -> u64 {
        let answer = self.get("/undecided", "ops").await;
        answer.body.trim().parse().unwrap_or_else(|_| panic!("no number: {}", answer.body))
    }

    /// Waits until an answer has Tidegate's headers.
    async fn is_limited_again(&self) {
        let limited = async || self.get("/orders", "back").await.find("ratelimit").and(Some(()));
        eventually("the demo gets answers of Tidegate", limited).await;
    }
}

async fn refusals_reach_the_client(service: &Service) {
    for remaining in ["r=2;", "r=1;", "r=0;"] {
        let answer = service.get("/orders", "ann").await;
        assert_eq!(answer.status, 200, "{}", answer.head);
        let limit = answer.header("ratelimit");
        assert!(limit.contains(remaining), "{limit}");
    }
    let refusal = service.get("/orders", "ann").await;
    assert_eq!(refusal.status, 429, "{}", refusal.head);
    assert!(refusal.find("ratelimit").is_some_and(|limit| limit.contains("r=0;")), "{}", refusal.head);
    assert!(refusal.find("content-type").is_some_and(|kind| kind.starts_with("application/json")), "{}", refusal.head);
    let json = refusal.json();
    assert_eq!(json["error"], "rate_limited");
    assert_eq!(json["retry_after"].to_string(), refusal.header("retry-after"));
    assert_eq!(service.get("/orders", "bob").await.status, 200);
}

async fn hits_and_limits_are_counted(service: &Service) {
    let first = service.get("/export", "ann").await;
    assert!(first.find("ratelimit").is_some_and(|limit| limit.contains("r=2;")), "5 of 7 hits: {}", first.head);
    assert_eq!(service.get("/export", "ann").await.status, 429);
    for status in [200, 200, 429] {
        let answer = service.get("/trial", "ann").await;
        assert_eq!(answer.status, status, "2 hits each, of a limit of 4 that comes with the request: {}", answer.head);
    }
}

async fn a_login_counts_wrong_passwords_of_an_account_and_all_tries_of_an_address(service: &Service) {
    let (right, wrong) = ("right", "wrong");
    for (tries, account, password, expected) in [
        (4, "ann", right, 200), // more than the 3 of an account: their hits are given back
        (3, "bob", wrong, 401),
        (1, "BOB", right, 429), // the same account, and the address is not charged
        (1, "ann", right, 200),
        (1, "bob", wrong, 429), // the login of another gave it no try
        (2, "eve", wrong, 401),
        (1, "dan", wrong, 429), // the 11th try of the address, 5 of them were right
        (1, "ann", right, 429),
    ] {
        for _ in 0..tries {
            let answer = service.login(account, password).await;
            assert_eq!(answer.status, expected, "{account}, {password}: {}", answer.head);
            let limit = answer.find("ratelimit");
            assert!(limit.is_some(), "{account}, {password}: {}", answer.head);
        }
    }
}

/// A request of a caller, as it prints it.
struct Attempt {
    status: u16,
    retry_after_s: Option<u64>,
    began_ms: u64,
    ended_ms: u64,
}

async fn attempts(demo: &Program, how: &str, url: &str) -> Vec<Attempt> {
    let (status, said, errors) = output(&mut demo.command(&[how, url])).await;
    assert!(status.success(), "{said}{errors}");
    let attempts = said.lines().map(|line| {
        let parts: Vec<_> = line.split(' ').collect();
        let [status, retry_after, began, ended] = parts[..] else { panic!("{line}") };
        let number = |text: &str| text.parse().unwrap_or_else(|_| panic!("{line}"));
        let status = status.parse().expect("a status");
        Attempt { status, retry_after_s: retry_after.parse().ok(), began_ms: number(began), ended_ms: number(ended) }
    });
    attempts.collect()
}

async fn retries_wait_for_retry_after(demo: &Program, service: &Service) {
    let attempts = attempts(demo, "retry", &service.url("/search")).await;
    let answered = attempts.iter().filter(|attempt| attempt.status == 200).count();
    assert_eq!(answered, 2, "each call is answered in the end");
    assert!(attempts.len() > answered, "the second call comes too early and is refused");
    for pair in attempts.windows(2).filter(|pair| pair[0].status == 429) {
        let waited_ms = pair[1].began_ms - pair[0].ended_ms;
        let retry_after_s = pair[0].retry_after_s.expect("a refusal says when to come back");
        // A clock in whole milliseconds may be 1 ms off.
        assert!(waited_ms + 1 >= retry_after_s * 1_000, "{waited_ms} ms instead of {retry_after_s} s");
    }
}

async fn callers_who_wait_for_the_same_moment_spread(demo: &Program) {
    let refuses = api("429 Too Many Requests\r\nretry-after: 1").await;
    let leaves_none = api("200 OK\r\nratelimit: \"all\";r=0;t=4").await;
    let (refused, paced) = tokio::join!(attempts(demo, "retry", &refuses), attempts(demo, "pace", &leaves_none));
    assert_eq!(refused.len(), 10, "two calls of five attempts each");
    // Jitter of up to 1, 2, 4 and 8 s for each call: at most 3 s in all, 4 times in 100,000.
    assert!(waited_ms(&refused) > 8 * 1_000 + 3_000, "{} ms", waited_ms(&refused));
    assert_eq!(paced.len(), 6);
    // Jitter of up to 4 s for each of five waits: at most 1 s in all, 8 times in a million.
    assert!(waited_ms(&paced) > 5 * 4_000 + 1_000, "{} ms", waited_ms(&paced));
}

/// An API that gives every request the same answer: a status and headers. Returns its URL.
async fn api(answer: &str) -> String {
    let answer = format!("HTTP/1.1 {answer}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
    let answer = move |mut stream: TcpStream| {
        let answer = answer.clone();
        async move {
            if stream.read(&mut [0; 4_096]).await.is_ok_and(|bytes| bytes > 0) {
                stream.write_all(answer.as_bytes()).await.expect("the caller waits");
            }
        }
    };
    format!("http://{}/", answering(answer).await)
}

/// Time between the requests: from the end of each to the begin of the next.
fn waited_ms(attempts: &[Attempt]) -> u64 {
    attempts.windows(2).map(|pair| pair[1].began_ms.saturating_sub(pair[0].ended_ms)).sum()
}

async fn no_call_is_refused(demo: &Program, service: &Service) {
    let attempts = attempts(demo, "pace", &service.url("/feed")).await;
    let statuses: Vec<_> = attempts.iter().map(|attempt| attempt.status).collect();
    assert_eq!(statuses, [200; 6], "a caller that reads the headers is not refused");
}

async fn no_call_is_refused_in(demo: &Program, style: &str) {
    let server = tidegate(0, style).await;
    let service = Service::start(demo, server.grpc, "open", LONG_TIMEOUT).await;
    no_call_is_refused(demo, &service).await;
}

async fn files_of_a_ca_and_of_a_certificate_make_it_speak_tls(demo: &Program) {
    let path = |path: &Path| path.display().to_string();
    let stranger = Authority::new();
    for is_mutual in [false, true] {
        let mut variables = vec![("RESPONSE_HEADERS", "ietf")];
        variables.extend(is_mutual.then_some(MUTUAL));
        let authority = Authority::new();
        let own = authority.issue("127.0.0.1");
        let server = Secured::start_of(repository(RULES), authority, &own, &variables).await;
        let client = server.authority.issue("client");
        let (ca, certificate, key) = (path(&server.file("ca.crt")), path(&client.certificate), path(&client.key));
        let other = path(&stranger.certificate());
        let (accepted, refused) = if is_mutual {
            ([&*ca, &*certificate, &*key].to_vec(), [[&*ca].to_vec(), vec![]])
        } else {
            ([&*ca].to_vec(), [[&*other].to_vec(), vec![]])
        };
        let service = Service::start_with(demo, server.tidegate.grpc, "closed", LONG_TIMEOUT, &accepted).await;
        let answer = service.get("/orders", "ann").await;
        assert_eq!(answer.status, 200, "{accepted:?}: {}", answer.head);
        assert!(answer.find("ratelimit").is_some(), "{accepted:?}: {}", answer.head);
        for files in refused {
            let service = Service::start_with(demo, server.tidegate.grpc, "closed", SHORT_TIMEOUT, &files).await;
            let answer = service.get("/orders", "ann").await;
            assert_eq!(answer.status, 503, "{files:?}: {}", answer.head);
        }
    }
}

async fn the_choice_without_an_answer_is_kept(demo: &Program, mut server: Tidegate) {
    let started = Instant::now();
    let open = Service::start(demo, server.grpc, "open", SHORT_TIMEOUT).await;
    let closed = Service::start(demo, server.grpc, "closed", SHORT_TIMEOUT).await;
    let both = async || {
        let began = Instant::now();
        let (open, closed) = tokio::join!(open.get("/orders", "eve"), closed.get("/orders", "eve"));
        assert!(began.elapsed() < SOON, "{:?} for a timeout of {SHORT_TIMEOUT} ms", began.elapsed());
        assert_eq!(open.status, 200, "fails open: {}", open.head);
        assert_eq!(closed.status, 503, "fails closed: {}", closed.head);
        assert!(closed.find("retry-after").is_some(), "{}", closed.head);
    };
    tokio::join!(open.is_limited_again(), closed.is_limited_again());

    server.signal(Signal::STOP);
    is_paused(&server).await;
    both().await;
    server.signal(Signal::CONT);
    tokio::join!(open.is_limited_again(), closed.is_limited_again());

    server.kill();
    let port = server.grpc.port();
    server.ended().await;
    let before = open.undecided().await;
    for _ in 0..5 {
        both().await;
    }
    assert_eq!(open.undecided().await, before + 5, "the hook of the service counts each");
    let login = open.login("ann", "right").await;
    assert_eq!(login.status, 503, "guesses would have no limit: {}", login.head);
    assert_eq!(open.undecided().await, before + 6, "nothing is given back that was not counted");
    for (service, result) in [(&open, "oes on without a limit"), (&closed, "gets status 503")] {
        let errors = service.process.errors();
        let lines: Vec<_> = errors.lines().filter(|line| line.contains(" did not decide")).collect();
        assert!(!lines.is_empty() && lines.iter().all(|line| line.contains(result)), "{result}: {errors}");
        let most = 1 + started.elapsed().as_secs() / LOG_PAUSE.as_secs();
        assert!(lines.len() as u64 <= most, "{most} lines at most: {errors}");
    }
    let _server = tidegate(port, "ietf").await;
    tokio::join!(open.is_limited_again(), closed.is_limited_again());
}

/// Waits until no thread of the server runs, which may be later than the signal.
async fn is_paused(server: &Tidegate) {
    let is_stopped = |status: String| status.lines().any(|line| line.starts_with("State:\tT"));
    eventually("the server is paused", async || {
        let mut threads = std::fs::read_dir(format!("/proc/{}/task", server.pid())).expect("the kernel tells");
        let status = |thread: std::io::Result<DirEntry>| std::fs::read_to_string(thread?.path().join("status"));
        threads.all(|thread| status(thread).is_ok_and(is_stopped)).then_some(())
    })
    .await;
}
