//! Requests over `/json`: bounded in size, in memory and in the time that they take from other calls.

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::http::{self, Request};
use crate::support::{Tidegate, in_time, rule_file};

mod rights;

const KIB: usize = 1 << 10;
/// The bound on a body, unless it is set.
const BOUND: usize = 256 * KIB;
/// The memory that any mixture of requests may take: 23 to 26 MiB were measured.
const MOST_MEMORY: u64 = 64_000_000;

const RULES: &str = "domain: d
descriptors:
  - { key: k, rate_limit: { unit: year, requests_per_unit: 1000000 } }
  - { key: full, rate_limit: { unit: year, requests_per_unit: 0 } }
";

async fn server(variables: &[(&str, &str)]) -> Tidegate {
    Tidegate::start(rule_file(RULES).path(), variables).await
}

/// How the length of a body is told.
#[derive(Clone, Copy, Debug)]
enum Told {
    ContentLength,
    Chunked,
}

/// A request whose body has these bytes.
fn post(server: &Tidegate, body: &str, told: Told) -> Request {
    match told {
        Told::ContentLength => http::post(server.http, "/json", body),
        Told::Chunked => {
            let chunks = body.as_bytes().chunks(10_000).map(|chunk| {
                let chunk = std::str::from_utf8(chunk).expect("ASCII");
                format!("{:x}\r\n{chunk}\r\n", chunk.len())
            });
            let chunks = chunks.collect::<String>() + "0\r\n\r\n";
            http::post(server.http, "/json", chunks).header("transfer-encoding", "chunked")
        }
    }
}

/// A request of exactly this many bytes, whose one descriptor has this key.
fn request(key: &str, bytes: usize) -> String {
    let around = |value: &str| {
        format!("{{\"domain\":\"d\",\"descriptors\":[{{\"entries\":[{{\"key\":\"{key}\",\"value\":\"{value}\"}}]}}]}}")
    };
    around(&"v".repeat(bytes - around("").len()))
}

/// A request of at most `bytes` bytes with as many of this as fit into an array between these.
fn many(before: &str, item: &str, after: &str, bytes: usize) -> String {
    let count = (bytes - before.len() - after.len()) / (item.len() + 1);
    format!("{before}{}{after}", vec![item; count].join(","))
}

/// The requests that take the most memory for their size, each in its own way.
fn costly(bytes: usize) -> Vec<(&'static str, String)> {
    let descriptors = "{\"domain\":\"d\",\"descriptors\":[";
    let one = "{\"domain\":\"d\",\"descriptors\":[{\"entries\":[";
    vec![
        ("empty descriptors", many(descriptors, "{}", "]}", bytes)),
        ("empty entries", many(one, "{}", "]}]}", bytes)),
        ("descriptors with a limit", many(descriptors, "{\"entries\":[{\"key\":\"k\"}]}", "]}", bytes)),
        ("descriptors that bring one", many(descriptors, "{\"limit\":{\"unit\":1}}", "]}", bytes)),
        ("escaped values", many(one, "{\"value\":\"\\n\"}", "]}]}", bytes)),
        ("one string", request("k", bytes)),
        ("one escaped string", many("{\"domain\":\"", "\\u0000", "\"}", bytes)),
        ("nesting", "[".repeat(bytes)),
        ("nested descriptors", "{\"descriptors\":[".repeat(bytes / 16)),
        ("an unknown name", format!("{{\"{}", "x".repeat(bytes - 2))),
        ("many numbers", many("{\"descriptors\":[{\"hitsAddend\":[", "1", "]}]}", bytes)),
    ]
}

#[tokio::test]
async fn a_body_up_to_the_bound_is_decided_and_one_byte_more_is_413() {
    let server = server(&[]).await;
    for told in [Told::ContentLength, Told::Chunked] {
        let answer = post(&server, &request("k", BOUND), told).await;
        assert!(answer.status == 200, "{told:?}: {answer}");
        assert!(answer.contains("\"limitRemaining\":"), "{told:?}: {answer}");
        let answer = post(&server, &request("full", BOUND), told).await;
        assert!(answer.status == 429, "{told:?}: {answer}");
        for bytes in [BOUND + 1, 2 * BOUND, 4 << 20] {
            let answer = post(&server, &request("k", bytes), told).await;
            assert!(answer.status == 413, "{told:?}, {bytes}: {answer}");
            assert!(answer.contains("JSON_MAX_BODY") && answer.contains("as a refusal"), "{answer}");
        }
    }
    let page = server.metrics().await;
    assert!(page.contains("tidegate_calls_limited_total{cause=\"json_too_large\"} 6\n"), "{page}");
}

#[tokio::test]
async fn a_body_that_is_no_request_is_answered_with_the_reason() {
    let server = server(&[]).await;
    let entry = |key: &str| format!("{{\"domain\":\"d\",\"descriptors\":[{{\"entries\":[{{\"key\":{key}}}]}}]}}");
    for (body, reason) in [
        ("x".to_owned(), "the body is not a RateLimitRequest in JSON: expected value at line 1 column 1"),
        (entry("7"), "invalid type: integer `7`, expected a string at line 1 column 49"),
        ("{}".to_owned(), "rate limit domain must not be empty"),
        ("{\"domain\":\"d\"}".to_owned(), "rate limit descriptor list must not be empty"),
        // Decoded beside the workers.
        (request("k", 9 * KIB) + "x", "trailing characters at line 1 column 9217"),
    ] {
        let answer = post(&server, &body, Told::ContentLength).await;
        assert!(answer.status == 400 && answer.contains(reason), "{body:.60}: {answer}");
    }
}

#[tokio::test]
async fn the_bound_on_a_body_is_a_setting() {
    let server = server(&[("JSON_MAX_BODY", "1KiB")]).await;
    for told in [Told::ContentLength, Told::Chunked] {
        for (bytes, status) in [(KIB, 200), (KIB + 1, 413)] {
            let answer = post(&server, &request("k", bytes), told).await;
            assert!(answer.status == status, "{told:?}, {bytes}: {answer}");
        }
    }
}

#[tokio::test]
async fn a_client_that_asks_before_it_sends_is_answered_without_its_body() {
    let server = server(&[]).await;
    let length = (BOUND + 1).to_string();
    let request = http::post(server.http, "/json", "").header("expect", "100-continue");
    let answer = request.header("content-length", length).await;
    assert_eq!(answer.status, 413, "{answer}");
}

#[tokio::test]
async fn a_large_request_and_a_small_one_are_answered_alike() {
    let server = server(&[]).await;
    for count in [3, 1_000] {
        let body = vec![r#"{"entries":[{"key":"full"}]}"#; count].join(",");
        let body = format!(r#"{{"domain":"d","descriptors":[{body}]}}"#);
        let answer = post(&server, &body, Told::ContentLength).await;
        assert_eq!((answer.status, answer.header("content-type")), (429, "application/json"), "{answer}");
        assert_eq!(answer.header("content-length"), answer.body.len().to_string());
        let answer = answer.json();
        let statuses = answer["statuses"].as_array().expect("statuses");
        assert_eq!(statuses.len(), count);
        assert!(statuses.iter().all(|status| status["code"] == "OVER_LIMIT"), "{}", statuses[0]);
    }
}

#[tokio::test]
async fn beyond_the_bound_on_a_request_its_domain_decides_over_http_too() {
    let rules = format!("{RULES}requests: {{ from_gateway: none, trusted_proxies: [127.0.0.1] }}\n");
    let server = Tidegate::start(rule_file(&rules).path(), &[]).await;
    let ask = async |path: &str, item: &str, count: usize| {
        let domain = if path == "/json" { "\"domain\":\"d\"," } else { "" };
        let body = format!("{{{domain}\"descriptors\":[{}]}}", vec![item; count].join(","));
        http::post(server.http, path, body).header("content-type", "application/json").await
    };
    for path in ["/json", "/check/d"] {
        for (what, item, most) in [("charges", r#"{"entries":[{"key":"k"}]}"#, 1_000), ("descriptors", "{}", 10_000)] {
            let within = ask(path, item, most).await;
            assert_eq!(within.status, 200, "{path}, {most} {what}: {within}");
            let beyond = ask(path, item, most + 1).await;
            assert_eq!(beyond.status, 429, "{path}, {most} {what} and one more: {beyond}");
            assert_eq!(beyond.contains("too_large"), path == "/json", "{beyond}");
        }
    }
    let page = server.metrics().await;
    assert!(page.contains("tidegate_calls_limited_total{cause=\"too_large\"} 4\n"), "{page}");
    let left = http::post(server.http, "/json", r#"{"domain":"d","descriptors":[{"entries":[{"key":"k"}]}]}"#).await;
    assert!(left.contains("\"limitRemaining\":997999"), "2,000 charges were made: {left}");
}

/// Sends a request and reads nothing of the answer.
async fn send_only(server: &Tidegate, request: Request) -> TcpStream {
    let mut socket = TcpStream::connect(server.http).await.expect("it listens");
    let _ = in_time("it is read", socket.write_all(&request.bytes())).await;
    socket
}

#[tokio::test]
async fn no_mixture_of_requests_takes_more_memory_than_the_bound() {
    let server = server(&[]).await;
    let answer = post(&server, &request("k", 100), Told::ContentLength).await;
    assert!(answer.status == 200, "{answer}");
    let before = server.peak_memory();
    let grown = || server.peak_memory().saturating_sub(before);
    for (what, body) in costly(BOUND) {
        let began = Instant::now();
        let _ = post(&server, &body, Told::ContentLength).sent().await;
        println!("one of {what}: {} KiB in all, {:?}", grown() / 1_024, began.elapsed());
    }
    // Some of whose callers read the answer, and some that never do.
    let bodies: Vec<_> = costly(BOUND).into_iter().chain(costly(4 * KIB)).collect();
    let mut silent = Vec::new();
    for (number, (_, body)) in bodies.iter().cycle().take(30).enumerate() {
        let told = if number % 2 == 0 { Told::ContentLength } else { Told::Chunked };
        silent.push(send_only(&server, post(&server, body, told)));
    }
    let silent = join_all(silent);
    let reading = join_all(
        bodies.iter().cycle().take(80).map(|(_, body)| async { post(&server, body, Told::ContentLength).sent().await }),
    );
    let health = async {
        let mut slowest = Duration::ZERO;
        for _ in 0..50 {
            let began = Instant::now();
            let answer = http::get(server.http, "/healthcheck").await;
            assert!(answer.status == 200, "{answer}");
            slowest = slowest.max(began.elapsed());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        slowest
    };
    let (sockets, _, slowest) = tokio::join!(silent, reading, health);
    println!("90 at once: {} KiB in all; the slowest /healthcheck took {slowest:?}", grown() / 1_024);
    assert!(grown() < MOST_MEMORY, "{} bytes more", grown());
    for mut socket in sockets {
        let mut byte = [0];
        let _ = in_time("each is answered", socket.read(&mut byte)).await;
    }
}

#[tokio::test]
async fn access_to_json_may_be_closed() {
    for (access, host, status) in
        [("on", "a", 200), ("loopback", "127.0.0.1:8080", 200), ("loopback", "a", 429), ("off", "127.0.0.1", 403)]
    {
        let server = server(&[("JSON_ACCESS", access)]).await;
        let answer = http::post(server.http, "/json", request("k", KIB)).header("host", host).await;
        assert!(answer.status == status, "{access}: {answer}");
        assert_eq!(answer.contains("(JSON_ACCESS"), status != 200, "{answer}");
        let health = http::get(server.http, "/healthcheck").await;
        assert!(health.status == 200, "{health}");
    }
}
