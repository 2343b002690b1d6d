//! Many checks in flight, each on a connection of its own, as gateways ask.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::process::Stdio;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::process::Command;

use super::gateways::Asking;
use super::{RULES, ext_authz};
use crate::load::alone;
use crate::support::{Tidegate, eventually, in_time, rule_file};

/// A check of a client that used up its limit, as NGINX sends it.
const REFUSED: &str = "GET /check/edge HTTP/1.1\r\nhost: a\r\nx-forwarded-for: 192.0.2.66\r\nx-original-method: GET\r\nx-original-uri: /\r\n\r\n";

/// Opens so many connections.
async fn connections(at: SocketAddr, count: usize) -> Vec<TcpStream> {
    join_all((0..count).map(|_| async move { TcpStream::connect(at).await.expect("it connects") })).await
}

/// Opens so many connections, each of which sends `request` at once.
async fn in_flight(at: SocketAddr, count: usize, request: &str) -> Vec<TcpStream> {
    let mut connections = Vec::with_capacity(count);
    for _ in 0..count {
        let mut connection = TcpStream::connect(at).await.expect("it connects");
        // Where the connection is closed already, there is no answer.
        let _ = connection.write_all(request.as_bytes()).await;
        connections.push(connection);
    }
    connections
}

/// The status of the answer on each connection; 0 where there was none.
async fn statuses(connections: Vec<TcpStream>) -> Vec<u16> {
    let status = async |mut connection: TcpStream| {
        let mut answer = [0; 512];
        let bytes = connection.read(&mut answer).await.ok()?;
        std::str::from_utf8(answer.get(9..12.min(bytes))?).ok()?.parse().ok()
    };
    let all = join_all(connections.into_iter().map(|connection| async { status(connection).await.unwrap_or(0) }));
    in_time("all connections are answered or closed", all).await
}

fn rules() -> tempfile::NamedTempFile {
    rule_file(&RULES.replace("GATEWAY", "nginx").replace("STATUS", "429"))
}

/// No status.
const NONE: [u16; 0] = [];

/// All statuses but 429.
fn not_refused(statuses: &[u16]) -> Vec<u16> {
    statuses.iter().copied().filter(|status| *status != 429).collect()
}

#[tokio::test]
async fn a_refused_client_with_three_thousand_checks_in_flight_is_refused_each_time_and_probes_are_answered() {
    let _alone = alone().await;
    let tidegate = Tidegate::start(rules().path(), &[]).await;
    for count in [130, 1_000, 3_000] {
        let open = in_flight(tidegate.http, count, REFUSED).await;
        let (statuses, probe, metrics) = tokio::join!(
            statuses(open),
            crate::http::get(tidegate.http, "/healthcheck").into_future(),
            crate::http::get(tidegate.http, "/metrics").into_future()
        );
        assert_eq!(not_refused(&statuses), NONE, "of {count}");
        assert_eq!((probe.status, metrics.status), (200, 200), "beside {count}");
    }
}

#[tokio::test]
async fn checks_beyond_the_open_files_wait_for_a_connection_and_none_is_closed_without_an_answer() {
    let _alone = alone().await;
    // 400 open files: 126 connections for HTTP.
    let mut limited = Command::new("sh");
    limited.args(["-c", "ulimit -n 400; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_tidegate")]);
    let tidegate = Tidegate::start_as(limited, Some(rules().path()), &[], None::<Stdio>).await;
    for round in 0..3 {
        let open = in_flight(tidegate.http, 1_000, REFUSED).await;
        let (statuses, probe) =
            tokio::join!(statuses(open), crate::http::get(tidegate.http, "/healthcheck").into_future());
        assert_eq!(not_refused(&statuses), NONE, "in round {round}");
        assert_eq!(probe.status, 200);
    }
}

#[tokio::test]
async fn idle_connections_and_heads_that_do_not_end_take_bounded_memory_and_leave_room_where_there_are_few_files() {
    let mut limited = Command::new("sh");
    limited.args(["-c", "ulimit -n 400; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_tidegate")]);
    let tidegate = Tidegate::start_as(limited, Some(rules().path()), &[], None::<Stdio>).await;
    let before = tidegate.peak_memory();
    let mut hostile = connections(tidegate.http, 1_000).await;
    let head = format!("GET /check/edge HTTP/1.1\r\nx: {}", "y".repeat(60_000));
    for connection in hostile.iter_mut().step_by(2) {
        // Some are closed already, to make room.
        let _ = connection.write_all(head.as_bytes()).await;
    }
    let asked = [("x-forwarded-for", "192.0.2.1"), ("x-original-method", "GET"), ("x-original-uri", "/")];
    assert_eq!(crate::http::get(tidegate.http, "/check/edge").headers(&asked).await.status, 200);
    assert_eq!(crate::http::get(tidegate.http, "/healthcheck").await.status, 200);
    // Each of 126 connections takes 84 KiB at most.
    let grown = tidegate.peak_memory() - before;
    assert!(grown < 24 << 20, "{grown} bytes");
}

#[tokio::test]
async fn bodies_that_do_not_end_keep_out_neither_checks_nor_json_nor_probes() {
    let rules = rule_file(
        "domain: jobs
requests: { from_gateway: none, trusted_proxies: [127.0.0.1], timeout: 1m }
descriptors: [{ key: user, rate_limit: { unit: year, requests_per_unit: 2 } }]
",
    );
    let tidegate = Tidegate::start(rules.path(), &[]).await;
    let body = r#"{"domain":"jobs","descriptors":[{"entries":[{"key":"user","value":"ann"}]}]}"#;
    let post = |path: &str, body: &str| crate::http::post(tidegate.http, path, body);
    let large = format!("{}{body}", " ".repeat(100_000));
    let mut unfinished = connections(tidegate.http, 280).await;
    for (number, connection) in unfinished.iter_mut().enumerate() {
        let path = if number % 2 == 0 { "/json" } else { "/check/jobs" };
        let request = post(path, &large).bytes();
        let half = request.len() - large.len() / (1 + number % 3) / 2;
        connection.write_all(&request[..half]).await.expect("the kernel takes it");
    }
    eventually("all of them are open", async || {
        tidegate.metrics().await.contains("tidegate_connections{listener=\"HTTP\"} 281\n").then_some(())
    })
    .await;
    // The time of a body is 10 s, and a fourth of the bodies at a time once took all that there was.
    let began = Instant::now();
    for (path, body) in [("/json", body), ("/check/jobs", &large)] {
        assert_eq!(post(path, body).await.status, 200, "{path}");
    }
    for (path, body) in [("/json", &large[..]), ("/check/jobs", body)] {
        assert_eq!(post(path, body).await.status, 429, "{path}");
    }
    assert_eq!(crate::http::get(tidegate.http, "/healthcheck").await.status, 200);
    let took = began.elapsed();
    drop(unfinished);
    assert!(took < crate::support::PATIENCE / 2, "{took:?}");
}

/// The client whose limit is used up has so many requests in flight at a gateway that fails open. None passes.
async fn refuses_a_flood(what: &str, gateway: SocketAddr, tidegate: &Tidegate) {
    let request = format!("GET /x HTTP/1.1\r\nhost: {gateway}\r\nconnection: close\r\n\r\n");
    eventually("the limit is used up", async || (crate::http::get(gateway, "/x").await.status == 429).then_some(()))
        .await;
    let open = in_flight(gateway, 300, &request).await;
    let (statuses, probe) = tokio::join!(statuses(open), crate::http::get(tidegate.http, "/healthcheck").into_future());
    assert_eq!(not_refused(&statuses), NONE, "{what}");
    assert_eq!(probe.status, 200, "{what}");
}

/// The example of a gateway with times that a busy machine keeps, so that only a check that is closed or fails admits.
fn patient(text: String) -> String {
    let times = [
        "connect_timeout 1s",
        "read_timeout 5s",
        "dial_timeout 1s",
        "header_timeout 5s",
        "dialTimeout: 1s",
        "HeaderTimeout: 5s",
    ];
    times.iter().fold(text, |text, time| text.replace(time, &time.replace(['1', '5'], "60")))
}

#[tokio::test]
async fn a_refused_client_with_three_hundred_requests_in_flight_passes_no_gateway_that_fails_open() {
    let _alone = alone().await;
    let nginx = Asking::open_nginx(patient).await;
    refuses_a_flood("NGINX", nginx.at, &nginx.tidegate).await;
    let caddy = Asking::open_caddy(patient).await;
    refuses_a_flood("Caddy", caddy.at, &caddy.tidegate).await;
    let traefik = Asking::open_traefik(patient).await;
    refuses_a_flood("Traefik", traefik.at, &traefik.tidegate).await;
    let (tidegate, _envoy, edge) =
        ext_authz::asking(&[("failure_mode_allow: false", "failure_mode_allow: true")]).await;
    refuses_a_flood("Envoy", edge, &tidegate).await;
}

/// Prints what a client whose limit is used up gets with so many requests in flight at a gateway, and how long a probe waits meanwhile.
async fn print_flood(what: &str, gateway: SocketAddr, tidegate: &Tidegate) {
    let request = format!("GET /x HTTP/1.1\r\nhost: {gateway}\r\nconnection: close\r\n\r\n");
    eventually("the limit is used up", async || (crate::http::get(gateway, "/x").await.status == 429).then_some(()))
        .await;
    for count in [100, 300, 1_000, 3_000] {
        let (mut tally, mut slowest) = (BTreeMap::<u16, usize>::new(), Duration::ZERO);
        for _ in 0..3 {
            let open = in_flight(gateway, count, &request).await;
            let probe = async {
                let begun = Instant::now();
                (crate::http::get(tidegate.http, "/healthcheck").await.status, begun.elapsed())
            };
            let (statuses, (status, took)) = tokio::join!(statuses(open), probe);
            assert_eq!(status, 200, "{what}");
            slowest = slowest.max(took);
            statuses.into_iter().for_each(|status| *tally.entry(status).or_default() += 1);
        }
        let passed = tally.get(&200).copied().unwrap_or_default();
        let total = 3 * count;
        println!(
            "{what}, {count} in flight: {passed} of {total} passed; by status {tally:?}; a probe waited {slowest:.0?}"
        );
    }
}

/// The examples as they are written. A status of 0 is a connection without an answer.
#[tokio::test]
#[ignore = "a measurement; benches/passes runs it"]
async fn passes_where_a_gateway_fails_open_or_closed() {
    let _alone = alone().await;
    let as_it_is = |text: String| text;
    for (what, asking) in [
        ("NGINX that fails open", Asking::open_nginx(as_it_is).await),
        ("NGINX that fails closed", Asking::nginx(as_it_is).await),
        ("Caddy that fails open", Asking::open_caddy(as_it_is).await),
        ("Caddy that fails closed", Asking::caddy(as_it_is).await),
        ("Traefik that fails open", Asking::open_traefik(as_it_is).await),
        ("Traefik that fails closed", Asking::traefik(as_it_is).await),
    ] {
        print_flood(what, asking.at, &asking.tidegate).await;
    }
    for (what, mode) in [("open", "failure_mode_allow: true"), ("closed", "failure_mode_allow: false")] {
        let (tidegate, _envoy, edge) = ext_authz::asking(&[("failure_mode_allow: false", mode)]).await;
        print_flood(&format!("Envoy that fails {what}"), edge, &tidegate).await;
    }
}
