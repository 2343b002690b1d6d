//! Peers that begin handshakes and do not end them.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::Secured;
use super::client::decide;
use crate::edges::support::{
    DATA, END_HEADERS, END_STREAM, HEADERS, PING, RST_STREAM, SETTINGS, SHORT_HEAD, frame, frames, goaway, head,
    message,
};
use crate::support::{eventually, in_time};

/// The head of a record of a handshake, of which nothing follows.
const HALF: [u8; 5] = [22, 3, 1, 1, 0];

#[tokio::test]
async fn a_flood_of_half_open_handshakes_fails_no_call_and_keeps_no_new_client_out() {
    let server = Secured::start(&[]).await;
    let (at, established) = (server.tidegate.grpc, server.client().channel(server.tidegate.grpc));
    decide(&established).await.expect("it is answered");
    let flood = tokio::spawn(async move {
        let mut open = std::collections::VecDeque::new();
        loop {
            // A full backlog, or no descriptor left: some are closed first.
            if let Ok(Ok(mut stream)) = tokio::time::timeout(Duration::from_secs(1), TcpStream::connect(at)).await {
                let _ = stream.write_all(&HALF).await;
                open.push_back(stream);
            }
            if open.len() > 3_000 {
                open.pop_front();
            }
        }
    });
    let crowded = "tidegate_tls_handshakes_total{outcome=\"crowded\"}";
    eventually("there are too many", async || {
        decide(&established).await.expect("it is answered");
        (server.metric(crowded).await > 100).then_some(())
    })
    .await;
    for _ in 0..20 {
        decide(&established).await.expect("it is answered");
        server.client().call(at).await.expect("a new client comes in");
    }
    flood.abort();
    server.logs("tls.refused").await;
}

#[tokio::test]
async fn a_handshake_that_does_not_end_is_cut_in_time_and_by_its_bytes() {
    let server = Secured::start(&[]).await;
    let mut slow = TcpStream::connect(server.tidegate.grpc).await.unwrap();
    slow.write_all(&HALF).await.unwrap();
    // A message of 16 MiB, which would have to be kept whole.
    let mut large = TcpStream::connect(server.tidegate.grpc).await.unwrap();
    let mut record = vec![22, 3, 3, 0x40, 0];
    record.extend([&[1, 0xff, 0xff, 0xff][..], &[0; 0x4000 - 4]].concat());
    let flood = async {
        while large.write_all(&record).await.is_ok() {
            record.truncate(5);
            record.extend([0; 0x4000]);
        }
    };
    in_time("it is cut", flood).await;
    let _ = in_time("it is cut", slow.read_to_end(&mut Vec::new())).await;
    server.counts("timed_out", 1).await;
    let refused =
        ["too_large", "failed"].map(|outcome| format!("tidegate_tls_handshakes_total{{outcome=\"{outcome}\"}}"));
    assert_eq!(server.metric(&refused[0]).await + server.metric(&refused[1]).await, 1);
}

/// The preface of HTTP/2 and empty settings.
fn preface() -> Vec<u8> {
    [&b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..], &frame(SETTINGS, 0, 0, &[])].concat()
}

#[tokio::test]
async fn the_turns_of_a_connection_are_bounded_over_tls_too() {
    let server = Secured::start(&[]).await;
    let stream = server.client().connect(server.tidegate.grpc).await.expect("a handshake");
    let (mut reading, mut writing) = tokio::io::split(stream);
    // Without bounded turns, HTTP/2 takes so many resets for an attack, and ends the connection.
    let mut flood = preface();
    for stream in (0..50_000).map(|call| 2 * call + 1) {
        flood.extend(frame(HEADERS, END_HEADERS, stream, &SHORT_HEAD));
        flood.extend(frame(RST_STREAM, 0, stream, &8_u32.to_be_bytes()));
    }
    flood.extend(frame(HEADERS, END_HEADERS, 100_001, &head()));
    flood.extend(frame(DATA, END_STREAM, 100_001, &message("")));
    let sending = tokio::spawn(async move {
        writing.write_all(&flood).await.expect("it is taken");
        writing
    });
    let mut said = Vec::new();
    in_time("the last call is answered", async {
        while frames(&said).iter().filter(|(kind, _)| *kind == HEADERS).count() < 2 {
            assert!(reading.read_buf(&mut said).await.expect("it goes on") > 0, "{:?}", goaway(&said));
        }
    })
    .await;
    assert_eq!(goaway(&said), None);
    drop(sending.await.expect("it does not panic"));
}

#[tokio::test]
async fn a_peer_that_sends_and_never_reads_is_cut_over_tls_too() {
    let server = Secured::start(&[]).await;
    let mut stream = server.client().connect(server.tidegate.grpc).await.expect("a handshake");
    stream.write_all(&preface()).await.expect("it is taken");
    let pings = frame(PING, 0, 0, &[7; 8]).repeat(1_000);
    in_time("pings are taken no more", async { while stream.write_all(&pings).await.is_ok() {} }).await;
    let stalled = "tidegate_connections_ended_total{listener=\"gRPC\",how=\"stalled\"}";
    eventually("it is counted", async || (server.metric(stalled).await == 1).then_some(())).await;
}
