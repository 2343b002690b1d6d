//! The HTTP listener, which speaks both versions of HTTP.

use std::sync::Arc;

use axum::Router;
use axum::routing::{get, post};
use tokio::io::AsyncWriteExt;
use tokio::sync::Notify;

use super::causes::assert_counted;
use super::*;
use crate::http::said;
use crate::support::{Tidegate, directory};

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// The memory that one connection may take, as over gRPC.
const LARGEST_CONNECTION: u64 = 40 << 20;

/// Answers with what was sent.
fn echo() -> Router {
    Router::new().route("/", post(|body: String| async move { body }))
}

/// The status and the body of the answer to a request over HTTP/2.
async fn answer(at: SocketAddr, request: http::request::Builder, body: &'static str) -> (u16, String) {
    let (client, _connection) = h2_client(at).await;
    let mut client = client.ready().await.expect("it is open");
    let (answer, mut sending) =
        client.send_request(request.body(()).expect("a request"), body.is_empty()).expect("it is sent");
    if !body.is_empty() {
        sending.send_data(Bytes::from_static(body.as_bytes()), true).expect("it is sent");
    }
    let (head, mut body) = tokio::time::timeout(PATIENCE, answer).await.expect("an answer").unwrap().into_parts();
    let mut text = Vec::new();
    while let Some(part) = body.data().await {
        text.extend(part.expect("a part"));
    }
    (head.status.as_u16(), String::from_utf8(text).expect("text"))
}

#[tokio::test]
async fn a_peer_that_speaks_tls_to_a_listener_in_plaintext_is_named() {
    for edge in [Edge::http(limits(), echo()).await, Edge::json(limits(), echo()).await] {
        let mut socket = edge.socket().await;
        socket.write_all(&[0x16, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3]).await.unwrap();
        until_closed(&mut socket).await;
        assert_counted(&edge, &[(EndCause::Tls, 1)]).await;
    }
}

#[tokio::test]
async fn the_first_bytes_choose_the_version_of_http_however_they_are_cut() {
    let edge = Edge::http(limits(), echo()).await;
    let http1 = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok".to_vec();
    // A method that begins as the preface does.
    let strange = b"PRI / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n".to_vec();
    let call =
        [frame(SETTINGS, 0, 0, &[]), frame(HEADERS, END_HEADERS, 1, &head_of("/")), frame(DATA, END_STREAM, 1, b"ok")];
    let leave = frame(GOAWAY, 0, 0, &[0; 8]);
    let http2 = [PREFACE, &call.concat(), &leave].concat();
    for cut in [1, 2, 5, 23, 24, 25, 1_000] {
        for (sent, is_expected) in [
            (&http1, (|said| said.starts_with(b"HTTP/1.1 200") && said.ends_with(b"\r\n\r\nok")) as fn(&[u8]) -> bool),
            (&strange, |said| said.starts_with(b"HTTP/1.1 405")),
            (&http2, |said| frames(said).contains(&(DATA, b"ok".to_vec()))),
        ] {
            let mut socket = edge.socket().await;
            socket.set_nodelay(true).unwrap();
            for part in sent.chunks(cut) {
                socket.write_all(part).await.unwrap();
                tokio::task::yield_now().await;
            }
            let said = until_closed(&mut socket).await;
            assert!(is_expected(&said), "in parts of {cut}: {:?}", String::from_utf8_lossy(&said));
        }
    }
    eventually("all are gone", || edge.tally.counts().open == 0).await;
    assert_eq!(EndCause::ALL.map(|how| edge.tally.counts().ended(how)).iter().sum::<u64>(), 0, "and all of them well");
}

#[tokio::test]
async fn a_peer_that_does_not_finish_its_first_bytes_is_dropped() {
    let edge = Edge::http(ConnectionLimits { handshake: 300 * MS, ..limits() }, echo()).await;
    for begun in [&b""[..], b"P", b"PRI * HTTP/2.0\r\n", PREFACE] {
        let mut socket = edge.socket().await;
        socket.write_all(begun).await.unwrap();
        until_closed(&mut socket).await;
    }
    eventually("they are counted", || edge.tally.counts().ended(EndCause::Unopened) == 4).await;
    let mut other = edge.socket().await;
    other.write_all(b"PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n").await.unwrap();
    assert!(until_closed(&mut other).await.starts_with(b"HTTP/1.1 400"));
}

#[tokio::test]
async fn an_idle_connection_leaves_for_a_new_one_and_a_busy_one_stays() {
    let go = Arc::new(Notify::new());
    let wait = Arc::clone(&go);
    let slow = move || async move {
        wait.notified().await;
        "slow"
    };
    let router = Router::new().route("/", get(|| async { "ok" })).route("/slow", get(slow));
    let edge = Edge::http_with_most_idle(ConnectionLimits { keep_alive: 10 * PATIENCE, ..limits() }, router, 1).await;
    let ask = |path: &str| format!("GET {path} HTTP/1.1\r\nhost: a\r\n\r\n");
    let mut busy = edge.socket().await;
    busy.write_all(ask("/slow").as_bytes()).await.unwrap();
    let mut resting = edge.socket().await;
    resting.write_all(ask("/").as_bytes()).await.unwrap();
    let mut begun = [0; 12];
    resting.read_exact(&mut begun).await.unwrap();
    // Longer than a connection has to be idle to be closed.
    tokio::time::sleep(300 * MS).await;
    let (status, _) = answer(edge.address, http::Request::get("http://edge/"), "").await;
    assert_eq!(status, 200);
    until_closed(&mut resting).await;
    go.notify_one();
    let mut said = [0; 12];
    busy.read_exact(&mut said).await.unwrap();
    assert_eq!(&said, b"HTTP/1.1 200");
    eventually("it is counted", || edge.tally.counts().ended(EndCause::Idle) == 1).await;
}

#[tokio::test]
async fn a_request_to_a_connection_of_its_age_is_answered_and_the_answer_says_that_it_is_the_last() {
    let timeouts = ConnectionLimits { handshake: 100 * MS, age: 100 * MS, keep_alive: 2 * PATIENCE, ..limits() };
    for edge in [Edge::http(timeouts, echo()).await, Edge::json(timeouts, echo()).await] {
        let ask = |path: &str| format!("POST {path} HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\nok");
        let mut socket = edge.socket().await;
        socket.write_all(ask("/").as_bytes()).await.unwrap();
        let mut told = Vec::new();
        while !told.ends_with(b"ok") {
            socket.read_buf(&mut told).await.unwrap();
        }
        assert!(!String::from_utf8_lossy(&told).contains("connection: close"));
        // Much longer than its age: it is idle, and stays open.
        tokio::time::sleep(600 * MS).await;
        socket.write_all(ask("/").as_bytes()).await.unwrap();
        let told = String::from_utf8(until_closed(&mut socket).await).unwrap();
        assert!(told.starts_with("HTTP/1.1 200") && told.contains("connection: close"), "{told:?}");
        eventually("it is gone", || edge.tally.counts().open == 0).await;
        assert_eq!(EndCause::ALL.map(|how| edge.tally.counts().ended(how)).iter().sum::<u64>(), 0, "and well");
    }
}

#[tokio::test]
async fn a_connection_of_its_age_without_a_request_ends_well_after_the_time_that_it_may_be_idle() {
    let timeouts = ConnectionLimits { handshake: 50 * MS, age: 50 * MS, keep_alive: 300 * MS, ..limits() };
    let edge = Edge::json(timeouts, echo()).await;
    let mut socket = edge.socket().await;
    let began = Instant::now();
    socket.write_all(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\nok").await.unwrap();
    assert!(until_closed(&mut socket).await.ends_with(b"ok"));
    assert!(began.elapsed() >= 300 * MS, "{:?}", began.elapsed());
    eventually("it is gone", || edge.tally.counts().open == 0).await;
    assert_eq!(EndCause::ALL.map(|how| edge.tally.counts().ended(how)).iter().sum::<u64>(), 0, "and well");
}

/// Rules for a gateway that sends its own headers, and for scripts.
async fn server() -> (Tidegate, tempfile::TempDir) {
    let edge = "domain: edge
requests:
  from_gateway: nginx
  trusted_proxies: [127.0.0.1]
  descriptors: [[{ key: host, from: header, name: host, missing: refuse }, { key: path, from: path }]]
descriptors: [{ key: host, descriptors: [{ key: path, rate_limit: { unit: year, requests_per_unit: 2 } }] }]
";
    let jobs = "domain: jobs
requests: { from_gateway: none, trusted_proxies: [127.0.0.1] }
descriptors: [{ key: user, rate_limit: { unit: year, requests_per_unit: 2 } }]
";
    let paths = "domain: paths
requests: { from_gateway: envoy, trusted_proxies: [127.0.0.1], descriptors: [[{ key: path, from: path }]] }
descriptors: [{ key: path, rate_limit: { unit: year, requests_per_unit: 2 } }]
";
    let directory = directory([("edge.yaml", edge), ("jobs.yaml", jobs), ("paths.yaml", paths)]);
    (Tidegate::start(directory.path(), &[("HTTP_H2C", "true")]).await, directory)
}

const JOB: &str = r#"{"domain":"jobs","descriptors":[{"entries":[{"key":"user","value":"ann"}]}]}"#;

#[tokio::test]
async fn every_path_of_the_http_listener_answers_over_http2_too() {
    let (server, _rules) = server().await;
    let at = server.http;
    let url = |path: &str| format!("http://edge{path}");
    assert_eq!(answer(at, http::Request::get(url("/healthcheck")), "").await, (200, "OK".to_owned()));
    let (status, page) = answer(at, http::Request::get(url("/metrics")), "").await;
    assert!(status == 200 && page.contains("\ntidegate_rules 3\n"), "{page}");
    let (status, text) = answer(at, http::Request::post(url("/json")), JOB).await;
    assert!(status == 200 && text.contains("\"limitRemaining\":1"), "{text}");
    // Both versions share a counter.
    assert_eq!(crate::http::post(at, "/check/jobs", JOB).await.status, 200);
    assert_eq!(answer(at, http::Request::post(url("/check/jobs")), JOB).await.0, 429);
    assert_eq!(answer(at, http::Request::get(url("/check/jobs")), "").await.0, 405);
    let gateway = || http::Request::get(url("/check/edge")).header("x-original-uri", "/a");
    let first = crate::http::get(at, "/check/edge").headers(&[("host", "edge"), ("x-original-uri", "/a")]).await;
    assert_eq!(first.status, 200, "{first}");
    let mut statuses = Vec::new();
    for _ in 0..2 {
        statuses.push(answer(at, gateway(), "").await.0);
    }
    assert_eq!(statuses, [200, 429], "the authority is the host");

    let curl = tokio::process::Command::new("curl")
        .args(["-s", "--http2-prior-knowledge", "--write-out", "%{http_version} %{http_code}", "--output", "/dev/null"])
        .args(["--data", JOB, &format!("http://{at}/check/jobs")])
        .output()
        .await
        .expect("curl");
    assert_eq!(String::from_utf8_lossy(&curl.stdout), "2 429");
}

#[tokio::test]
async fn a_gateway_that_copies_the_path_of_a_client_cannot_ask_over_http2_and_nobody_can_unless_it_is_set() {
    let (server, _rules) = server().await;
    let (status, why) = answer(server.http, http::Request::get("http://edge/check/paths/a"), "").await;
    assert!(status == 403 && why.contains("HTTP/1.1"), "{why}");
    assert_eq!(crate::http::get(server.http, "/check/paths/a").await.status, 200);
    // What HTTP/2 makes an error is an answer, and a refusal.
    for path in ["/a?<", "/a?\"", "/a?\u{7f}"] {
        let answer = crate::http::get(server.http, &format!("/check/paths{path}")).await;
        assert_eq!(answer.status / 100, 4, "{path}: {answer}");
    }
    let rules = crate::support::rule_file(
        "domain: jobs\ndescriptors: [{ key: user, rate_limit: { unit: year, requests_per_unit: 2 } }]\n",
    );
    let closed = Tidegate::start(rules.path(), &[]).await;
    let preface = String::from_utf8(PREFACE.to_vec()).expect("text");
    // hyper ends a connection of HTTP/1.1 that begins so; over HTTP/2 it would send its settings first.
    assert_eq!(said(closed.http, &preface).await, "");
}

#[tokio::test]
async fn hostile_headers_over_http2_are_refused_and_fail_nobody_else() {
    let (server, _rules) = server().await;
    let check = || http::Request::get("http://edge/check/edge").header("x-original-uri", "/b");
    let refused = [
        ("a header of the gateway twice", check().header("x-original-uri", "/b"), 429),
        ("a host beside its authority", check().header("host", "a").header("host", "b"), 429),
        ("an escaped slash", http::Request::get("http://edge/check/edge").header("x-original-uri", "/x%2f"), 429),
        ("another domain", http::Request::get("http://edge/check/%65dge").header("x-original-uri", "/b"), 404),
        (
            "more than 256 KiB of headers",
            (0..40).fold(check(), |more, n| more.header(format!("x{n}"), "y".repeat(8_000))),
            431,
        ),
    ];
    for (what, request, expected) in refused {
        assert_eq!(answer(server.http, request, "").await.0, expected, "{what}");
    }
    let head = answer(server.http, http::Request::head("http://edge/check/edge"), "").await;
    assert_eq!(head, (429, String::new()), "a refusal with a reason, which HEAD leaves out");
    let many = (0..2_000).fold(check(), |more, number| more.header(format!("x{number}"), "y"));
    assert_eq!(answer(server.http, many, "").await.0, 200, "a gateway hands on all headers");

    // Frames that no client library sends: a name in upper case, a header of a connection, two paths, and trailers.
    let literal = |name: &str, value: &str| {
        let text = |text: &str| [&[u8::try_from(text.len()).unwrap()], text.as_bytes()].concat();
        [vec![0x00], text(name), text(value)].concat()
    };
    let get = |more: &[u8]| [&[0x82, 0x86][..], &literal(":path", "/check/edge"), more].concat();
    for head in [get(&literal("Upper", "x")), get(&literal("connection", "close")), get(&literal(":path", "/json"))] {
        let mut peer = Peer::connect(server.http).await;
        peer.send(&frame(HEADERS, END_HEADERS | END_STREAM, 1, &head)).await.unwrap();
        peer.send(&frame(GOAWAY, 0, 0, &[0; 8])).await.unwrap();
        let said = until_closed(&mut peer.0).await;
        let is_reset = frames(&said).contains(&(RST_STREAM, vec![0, 0, 0, 1]));
        assert!(is_reset || goaway(&said).is_some_and(|code| code > 0), "{head:?}: {:?}", frames(&said));
    }
    let mut peer = Peer::connect(server.http).await;
    peer.send(&frame(HEADERS, END_HEADERS, 1, &head_of("/json"))).await.unwrap();
    peer.send(&frame(HEADERS, END_HEADERS | END_STREAM, 1, &[0x88; 65])).await.unwrap();
    until_closed(&mut peer.0).await;
    assert_eq!(answer(server.http, http::Request::get("http://edge/healthcheck"), "").await.0, 200);
    let page = server.metrics().await;
    assert!(page.contains("{listener=\"HTTP\",how=\"trailers\"} 1\n"), "{page}");
}

#[tokio::test]
async fn a_peer_with_many_open_requests_takes_bounded_memory_and_keeps_nobody_waiting() {
    let (server, _rules) = server().await;
    assert_eq!(answer(server.http, http::Request::post("http://edge/json"), JOB).await.0, 200);
    let before = server.peak_memory();
    let mut peer = Peer::connect(server.http).await;
    // Each request waits for its body, with thousands of header fields of a byte each.
    for (number, path) in (0..1_024_u32).zip(["/json", "/check/jobs"].into_iter().cycle()) {
        let mut head = head_of(path);
        head.extend(if number == 0 { &b"\x40\x01a\x01b"[..] } else { b"" });
        head.extend([0xbe; 7_500]);
        peer.send(&frame(HEADERS, END_HEADERS, 2 * number + 1, &head)).await.unwrap();
    }
    // One more than a connection may have.
    peer.send(&frame(HEADERS, END_HEADERS | END_STREAM, 2_049, &head_of("/json"))).await.unwrap();
    let mut told = Vec::new();
    while !frames(&told).contains(&(RST_STREAM, vec![0, 0, 0, 7])) {
        let read = tokio::time::timeout(PATIENCE, peer.0.read_buf(&mut told)).await.expect("it is refused");
        assert!(read.unwrap() > 0, "{:?}", goaway(&told));
    }
    let began = Instant::now();
    assert_eq!(answer(server.http, http::Request::get("http://edge/healthcheck"), "").await.0, 200);
    assert_eq!(answer(server.http, http::Request::post("http://edge/check/jobs"), JOB).await.0, 200);
    assert!(began.elapsed() < 5_000 * MS, "before their bodies are late");
    let grown = server.peak_memory() - before;
    assert!(grown < LARGEST_CONNECTION, "{grown} bytes");
    let page = server.metrics().await;
    assert!(page.contains("tidegate_connections{listener=\"HTTP\"} "), "{page}");
}

#[tokio::test]
async fn callers_who_read_their_large_answers_slowly_do_not_hold_up_the_others() {
    let (server, _rules) = server().await;
    // 180 KB, whose answer is more than a client's window of 64 KiB.
    let one = r#"{"entries":[{"key":"user","value":"ann"}]}"#;
    let body = format!(r#"{{"domain":"jobs","descriptors":[{}]}}"#, vec![one; 4_000].join(","));
    let mut slow = Vec::new();
    for _ in 0..4 {
        let (client, connection) = h2_client(server.http).await;
        let request = http::Request::post("http://edge/json").body(()).expect("a request");
        let (answer, mut sending) =
            client.ready().await.expect("it is open").send_request(request, false).expect("it is sent");
        sending.send_data(Bytes::from(body.clone()), true).expect("it is sent");
        let answer = tokio::time::timeout(PATIENCE, answer).await.expect("an answer").expect("an answer");
        slow.push((answer.into_body(), connection));
    }
    let began = Instant::now();
    assert_eq!(crate::http::post(server.http, "/json", body).await.status, 429);
    assert!(began.elapsed() < 8_000 * MS, "before the slow ones are cut for reading nothing: {:?}", began.elapsed());
    let mut dropped = 0;
    for (mut body, _connection) in slow {
        while let Some(part) = tokio::time::timeout(PATIENCE, body.data()).await.expect("it ends") {
            let Ok(part) = part else {
                dropped += 1;
                break;
            };
            body.flow_control().release_capacity(part.len()).expect("it was taken");
        }
    }
    assert_eq!(dropped, 1, "the oldest made room");
    let page = server.metrics().await;
    assert!(page.contains("tidegate_calls_limited_total{cause=\"stalled_answer\"} 1\n"), "{page}");
}
