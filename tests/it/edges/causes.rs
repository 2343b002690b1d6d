//! The metric of ended connections names the cause of each.

use super::*;
use crate::support::{Tidegate, rule_file};

/// What a peer sends after its preface, and the cause by which its connection then ends.
async fn ends(how: EndCause, sent: &[u8]) {
    let edge = Edge::grpc(limits(), 10).await;
    let mut peer = edge.peer().await;
    peer.send(sent).await.unwrap();
    // The listener may have closed before it took everything.
    let _ = peer.0.shutdown().await;
    until_closed(&mut peer.0).await;
    assert_counted(&edge, &[(how, 1)]).await;
}

/// Waits until every connection has ended, and compares what was counted.
pub(super) async fn assert_counted(edge: &Edge, expected: &[(EndCause, u64)]) {
    eventually("all have ended", || edge.tally.counts().accepted > 0 && edge.tally.counts().open == 0).await;
    let counts = EndCause::ALL.map(|how| (how, edge.tally.counts().ended(how)));
    let found: Vec<_> = counts.into_iter().filter(|(_, count)| *count > 0).collect();
    assert_eq!(found, expected);
}

#[tokio::test]
async fn a_body_that_is_late_is_counted_on_either_listener() {
    let rules = rule_file("domain: edge\ndescriptors: [{ key: k, rate_limit: { unlimited: true } }]\n");
    let server = Tidegate::start(rules.path(), &[]).await;
    let (client, _connection) = h2_client(server.grpc).await;
    let call = http::Request::post("http://edge/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit");
    let call = call.header("content-type", "application/grpc").body(()).unwrap();
    let (answer, mut body) = client.ready().await.unwrap().send_request(call, false).unwrap();
    body.send_data(Bytes::from_static(&[0, 0, 0, 0, 100, 0x0a]), false).unwrap();
    let mut json = tokio::net::TcpStream::connect(server.http).await.unwrap();
    json.write_all(b"POST /json HTTP/1.1\r\nhost: a\r\ncontent-length: 100\r\n\r\n{").await.unwrap();

    let answer = tokio::time::timeout(PATIENCE, answer).await.expect("an answer").unwrap();
    assert_eq!(answer.headers().get("grpc-status").unwrap(), "4", "DEADLINE_EXCEEDED");
    assert!(until_closed(&mut json).await.starts_with(b"HTTP/1.1 400"));
    let page = server.metrics().await;
    assert!(page.contains("tidegate_calls_limited_total{cause=\"late_body\"} 2\n"), "{page}");
    assert!(server.log().contains("late_body"), "{}", server.log());
}

/// Reads an answer whose body is `ok`.
async fn until_ok(socket: &mut tokio::net::TcpStream) {
    let mut answer = Vec::new();
    while !answer.ends_with(b"\r\n\r\nok") {
        let read = tokio::time::timeout(PATIENCE, socket.read_buf(&mut answer)).await.expect("an answer");
        assert!(read.unwrap() > 0, "the connection was closed");
    }
}

#[tokio::test]
async fn an_http2_error_is_counted_by_its_reason() {
    ends(EndCause::FrameSizeError, &frame(PING, 0, 0, &[0; (16 << 10) + 1])).await;
    ends(EndCause::ProtocolError, &frame(HEADERS, END_HEADERS, 0, &head())).await;
    ends(EndCause::FlowControlError, &frame(WINDOW_UPDATE, 0, 0, &0x7fff_ffff_u32.to_be_bytes())).await;
    ends(EndCause::ProtocolError, &frame(5, 0, 1, &[0, 0, 0, 2, 0x84])).await;
    ends(EndCause::PeerGoaway, &frame(GOAWAY, 0, 0, &[0, 0, 0, 0, 0, 0, 0, 1])).await;
    let endless = frame(CONTINUATION, 0, 1, &[0x00, 1, b'a', 1, b'x']).repeat(20_000);
    ends(EndCause::EnhanceYourCalm, &[frame(HEADERS, 0, 1, &head()), endless].concat()).await;
}

#[tokio::test]
async fn a_head_that_does_not_end_and_long_trailers_end_the_connection() {
    let edge = Edge::grpc(limits(), 10).await;
    let mut peer = edge.peer().await;
    peer.send(&[frame(HEADERS, 0, 1, &head()), frame(CONTINUATION, 0, 1, &[0x88; 10])].concat()).await.unwrap();
    until_closed(&mut peer.0).await;
    assert_counted(&edge, &[(EndCause::LateHead, 1)]).await;

    let begun = frame(HEADERS, END_HEADERS, 1, &head());
    ends(EndCause::Trailers, &[begun, frame(HEADERS, END_HEADERS | END_STREAM, 1, &[0x88; 65])].concat()).await;
}

#[tokio::test]
async fn a_peer_that_speaks_http1_or_tls_is_named_other_bytes_are_a_protocol_error_and_silence_is_not_opened() {
    let edge = Edge::grpc(ConnectionLimits { handshake: 300 * MS, ..limits() }, 10).await;
    let mut stranger = edge.socket().await;
    stranger.write_all(b"GET / HTTP/1.1\r\nhost: a\r\nuser-agent: somebody\r\n\r\n").await.unwrap();
    let mut babbler = edge.socket().await;
    babbler.write_all(&[0x16; 64]).await.unwrap();
    let mut encrypting = edge.socket().await;
    encrypting.write_all(&[0x16, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3]).await.unwrap();
    let mut silent = edge.socket().await;
    until_closed(&mut stranger).await;
    until_closed(&mut babbler).await;
    until_closed(&mut encrypting).await;
    until_closed(&mut silent).await;
    let causes = [EndCause::Unopened, EndCause::Http1, EndCause::Tls, EndCause::ProtocolError];
    assert_counted(&edge, &causes.map(|cause| (cause, 1))).await;
}

#[tokio::test]
async fn a_peer_that_leaves_in_the_middle_of_a_call_is_an_error_of_the_socket() {
    let edge = Edge::grpc(limits(), 10).await;
    let mut peer = edge.peer().await;
    peer.send(&frame(HEADERS, END_HEADERS, 1, &head())[..20]).await.unwrap();
    drop(peer);
    assert_counted(&edge, &[(EndCause::Io, 1)]).await;
}

#[tokio::test]
async fn a_peer_that_answers_no_ping_is_counted_with_and_without_a_call() {
    let limits = ConnectionLimits { ping_after: 100 * MS, ping_answer: 100 * MS, ..limits() };
    let edge = Edge::grpc(limits, 10).await;
    let mut idle = edge.peer().await;
    let mut calling = edge.peer().await;
    calling.send(&frame(HEADERS, END_HEADERS, 1, &head())).await.unwrap();
    calling.send(&frame(DATA, END_STREAM, 1, &message("wait 60000"))).await.unwrap();
    until_closed(&mut idle.0).await;
    until_closed(&mut calling.0).await;
    assert_counted(&edge, &[(EndCause::UnansweredPing, 2)]).await;
}

#[tokio::test]
async fn a_peer_that_stops_reading_is_counted_as_stalled() {
    let edge = Edge::grpc(ConnectionLimits { stall: 300 * MS, ..limits() }, 10).await;
    let mut peer = edge.peer().await;
    let pings = frame(PING, 0, 0, &[7; 8]).repeat(1_000);
    let flood = async { while peer.send(&pings).await.is_ok() {} };
    tokio::time::timeout(PATIENCE, flood).await.expect("pings are taken no more");
    assert_counted(&edge, &[(EndCause::Stalled, 1)]).await;
}

#[tokio::test]
async fn an_http1_connection_that_is_idle_after_an_answer_ends_well_and_half_a_head_does_not() {
    let router = || axum::Router::new().route("/", axum::routing::get(|| async { "ok" }));
    let ask = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n";
    let short = ConnectionLimits { handshake: 10_000 * MS, keep_alive: 300 * MS, ..limits() };
    let edge = Edge::http1(short, router()).await;
    let mut kept_alive = edge.socket().await;
    for _ in 0..2 {
        kept_alive.write_all(ask).await.unwrap();
        until_ok(&mut kept_alive).await;
    }
    until_closed(&mut kept_alive).await;
    assert_counted(&edge, &[]).await;

    let long = ConnectionLimits { handshake: 300 * MS, keep_alive: 10 * PATIENCE, ..limits() };
    let edge = Edge::http1(long, router()).await;
    let mut resting = edge.socket().await;
    resting.write_all(ask).await.unwrap();
    until_ok(&mut resting).await;
    let mut first = edge.socket().await;
    first.write_all(&ask[..10]).await.unwrap();
    let mut second = edge.socket().await;
    second.write_all(ask).await.unwrap();
    until_ok(&mut second).await;
    second.write_all(&ask[..10]).await.unwrap();
    until_closed(&mut first).await;
    until_closed(&mut second).await;
    // Longer at rest than a head may take.
    resting.write_all(ask).await.unwrap();
    until_ok(&mut resting).await;
    drop(resting);
    assert_counted(&edge, &[(EndCause::LateHead, 2)]).await;
}
