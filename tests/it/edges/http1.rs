//! The HTTP listener.

use std::sync::Arc;

use axum::Router;
use axum::routing::{get, post};
use tokio::io::AsyncWriteExt;
use tokio::sync::Notify;

use super::causes::assert_counted;
use super::*;

/// Answers with what was sent.
fn echo() -> Router {
    Router::new().route("/", post(|body: String| async move { body }))
}

#[tokio::test]
async fn a_peer_that_speaks_tls_to_a_listener_in_plaintext_is_named() {
    let edge = Edge::http1(limits(), echo()).await;
    let mut socket = edge.socket().await;
    socket.write_all(&[0x16, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3]).await.unwrap();
    until_closed(&mut socket).await;
    assert_counted(&edge, &[(EndCause::Tls, 1)]).await;
}

#[tokio::test]
async fn a_peer_that_does_not_finish_its_head_or_speaks_another_protocol_is_dropped() {
    let edge = Edge::http1(ConnectionLimits { handshake: 300 * MS, ..limits() }, echo()).await;
    for begun in [&b"P"[..], b"GET / HTTP/1.1\r\n"] {
        let mut socket = edge.socket().await;
        socket.write_all(begun).await.unwrap();
        until_closed(&mut socket).await;
    }
    assert_counted(&edge, &[(EndCause::LateHead, 2)]).await;
    let mut other = edge.socket().await;
    other.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.unwrap();
    assert_eq!(until_closed(&mut other).await, b"", "hyper says nothing to HTTP/2");
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
    let edge = Edge::http1_with_most_idle(ConnectionLimits { keep_alive: 10 * PATIENCE, ..limits() }, router, 1).await;
    let ask = |path: &str| format!("GET {path} HTTP/1.1\r\nhost: a\r\n\r\n");
    let mut busy = edge.socket().await;
    busy.write_all(ask("/slow").as_bytes()).await.unwrap();
    let mut resting = edge.socket().await;
    resting.write_all(ask("/").as_bytes()).await.unwrap();
    let mut begun = [0; 12];
    resting.read_exact(&mut begun).await.unwrap();
    // Longer than a connection has to be idle to be closed.
    tokio::time::sleep(300 * MS).await;
    assert_eq!(crate::http::get(edge.address, "/").await.status, 200);
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
    let edge = Edge::http1(timeouts, echo()).await;
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

#[tokio::test]
async fn a_connection_of_its_age_without_a_request_ends_well_after_the_time_that_it_may_be_idle() {
    let timeouts = ConnectionLimits { handshake: 50 * MS, age: 50 * MS, keep_alive: 300 * MS, ..limits() };
    let edge = Edge::http1(timeouts, echo()).await;
    let mut socket = edge.socket().await;
    let began = Instant::now();
    socket.write_all(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\nok").await.unwrap();
    assert!(until_closed(&mut socket).await.ends_with(b"ok"));
    assert!(began.elapsed() >= 300 * MS, "{:?}", began.elapsed());
    eventually("it is gone", || edge.tally.counts().open == 0).await;
    assert_eq!(EndCause::ALL.map(|how| edge.tally.counts().ended(how)).iter().sum::<u64>(), 0, "and well");
}
