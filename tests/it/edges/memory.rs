//! What one connection may hold in memory, and that nobody's call fails for it.

use std::time::Instant;

use bytes::Bytes;
use futures_util::future::join_all;
use h2::Reason;
use prost::Message;
use tidegate::serve::ConnectionLimits;
use tidegate::serve::memory::{CONNECTION_BYTES, CONNECTION_BYTES_TO_BEGIN};
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;
use tonic::Code;

use super::support::*;
use super::{MS, limits};
use crate::grpc;
use crate::support::{Tidegate, repository};

/// The memory that one connection may take: 40 MiB. 18 to 38 MB were measured (`docs/decisions/0024`).
const LARGEST_CONNECTION: u64 = 40 << 20;
/// The same where frames are so small that h2 needs as much memory for each as it carries.
const LARGEST_CONNECTION_IN_SMALL_FRAMES: u64 = 56 << 20;
/// The memory that the calls of all connections may take together.
const LARGEST_PROCESS: u64 = 512 << 20;
/// The calls of a hostile peer: nearly all that a connection may have.
const CALLS: u32 = 1_000;

const DATA: u8 = 0;
const END_STREAM: u8 = 1;

/// A real server, and the memory it had before the attack.
struct Attacked {
    server: Tidegate,
    before: u64,
}

impl Attacked {
    async fn start() -> Self {
        let server =
            Tidegate::start(&repository("examples/rules.yaml"), &[("RESPONSE_DYNAMIC_METADATA", "true")]).await;
        client(server.grpc).await.check(order("")).await.unwrap();
        let before = server.peak_memory();
        Self { server, before }
    }

    /// A peer whose first settings are `settings`.
    async fn peer(&self, settings: &[u8]) -> Peer {
        let mut peer = Peer(TcpStream::connect(self.server.grpc).await.unwrap());
        peer.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.unwrap();
        peer.send(&frame(SETTINGS, 0, 0, settings)).await.unwrap();
        peer
    }

    /// The calls of another connection are answered, and the memory that was taken is bounded.
    async fn is_bounded(&self, largest: u64) {
        let mut others = client(self.server.grpc).await;
        for _ in 0..20 {
            tokio::time::timeout(PATIENCE, others.check(order(""))).await.expect("others are answered").unwrap();
            tokio::time::sleep(50 * MS).await;
        }
        let taken = self.server.peak_memory() - self.before;
        println!("{taken} bytes more at most");
        assert!(taken <= largest, "{taken} bytes for one connection");
    }
}

/// The number of frames of `kind` in what the server said, and the reasons of its resets.
fn said(bytes: &[u8]) -> (usize, Vec<u32>) {
    let frames = frames(bytes);
    let resets = frames.iter().filter(|(kind, _)| *kind == RST_STREAM);
    let resets = resets.map(|(_, reason)| u32::from_be_bytes(reason[..4].try_into().unwrap())).collect();
    (frames.iter().filter(|(kind, _)| *kind == DATA).count(), resets)
}

/// Reads until `is_enough` of what was said.
async fn read_until(peer: &mut Peer, said: &mut Vec<u8>, mut is_enough: impl FnMut(&[u8]) -> bool) {
    let read = async {
        while !is_enough(said) {
            assert!(peer.0.read_buf(said).await.unwrap() > 0, "the server closed the connection");
        }
    };
    tokio::time::timeout(PATIENCE, read).await.expect("the server answers");
}

#[tokio::test]
async fn calls_with_thousands_of_header_fields_take_little_memory_and_are_all_answered() {
    let attacked = Attacked::start().await;
    let mut peer = attacked.peer(&[]).await;
    for call in 0..CALLS {
        let mut head = head();
        // A field that enters the dynamic table, and then thousands of references to it of one byte each.
        head.extend(if call == 0 { &b"\x40\x01a\x01b"[..] } else { b"" });
        head.extend([0xbe; 7_500]);
        peer.send(&frame(HEADERS, END_HEADERS, 2 * call + 1, &head)).await.unwrap();
    }
    attacked.is_bounded(LARGEST_CONNECTION).await;
    for call in 0..CALLS {
        peer.send(&frame(DATA, END_STREAM, 2 * call + 1, &message(""))).await.unwrap();
    }
    let mut answers = Vec::new();
    read_until(&mut peer, &mut answers, |answers| said(answers).0 >= CALLS as usize).await;
    assert_eq!((said(&answers).1, goaway(&answers)), (vec![], None));
}

#[tokio::test]
async fn bodies_without_an_end_take_bounded_memory() {
    // Messages of 1 MiB, the largest, or of 4 MiB.
    let small_frames = LARGEST_CONNECTION_IN_SMALL_FRAMES;
    for (length, size, largest) in [(16, 8_183, LARGEST_CONNECTION), (16, 256, small_frames), (64, 256, small_frames)] {
        let attacked = Attacked::start().await;
        let (client, _connection) = h2_client(attacked.server.grpc).await;
        let mut bodies = Vec::new();
        for _ in 0..CALLS {
            let (_, mut body) = client.clone().ready().await.unwrap().send_request(health_check(), false).unwrap();
            body.reserve_capacity(64 * 1_024);
            bodies.push(body);
        }
        // A message begins, and then as much of it as the server takes.
        let mut flood = tokio::spawn(async move {
            let begun = Bytes::from(vec![0, 0, length, 0, 0]);
            bodies.iter_mut().for_each(|body| body.send_data(begun.clone(), false).unwrap());
            let piece = Bytes::from(vec![0; size]);
            loop {
                for body in &mut bodies {
                    body.reserve_capacity(size);
                    while body.capacity() >= size && body.send_data(piece.clone(), false).is_ok() {}
                }
                tokio::time::sleep(MS).await;
            }
        });
        tokio::select! {
            () = attacked.is_bounded(largest) => {}
            _ = &mut flood => unreachable!("it has no end"),
        }
        flood.abort();
    }
}

#[tokio::test]
async fn forty_connections_together_take_bounded_memory() {
    let attacked = Attacked::start().await;
    let mut hostile = Vec::new();
    for _ in 0..40 {
        let mut peer = attacked.peer(&[]).await;
        hostile.push(tokio::spawn(async move {
            for call in 0..CALLS {
                let mut begun = frame(HEADERS, END_HEADERS, 2 * call + 1, &head());
                // A message of 1 MiB begins, and then nearly as much of it as the windows allow, in frames that h2 keeps one by one.
                // With more, the connection's window is exceeded and the connection ends.
                begun.extend(frame(DATA, 0, 2 * call + 1, &[0, 0, 16, 0, 0]));
                (0..15).for_each(|_| begun.extend(frame(DATA, 0, 2 * call + 1, &[0; 512])));
                peer.send(&begun).await.unwrap();
            }
            peer
        }));
    }
    attacked.is_bounded(LARGEST_PROCESS).await;
    let waited = attacked.server.metric("tidegate_calls_limited_total{cause=\"waited_for_memory\"}").await;
    assert!(waited > 0, "no connection was slow");
    hostile.iter().for_each(|peer| peer.abort());
    let mut others = client(attacked.server.grpc).await;
    let large = order(&"x".repeat((1 << 20) - 100));
    let answer = tokio::time::timeout(PATIENCE, others.check(large)).await.expect("it is answered");
    assert_eq!(answer.unwrap_err().code(), Code::NotFound, "there is no such service");
}

#[tokio::test]
async fn tiny_parts_of_a_message_do_not_keep_what_was_read_around_them() {
    const UNKNOWN: u8 = 0xbe;
    let attacked = Attacked::start().await;
    let mut peer = attacked.peer(&[]).await;
    peer.send(&frame(HEADERS, END_HEADERS, 1, &head())).await.unwrap();
    peer.send(&frame(DATA, 0, 1, &[0, 0, 15, 0, 0])).await.unwrap();
    let part = [frame(DATA, 0, 1, &[0; 8]), frame(UNKNOWN, 0, 0, &[0; 8_000])].concat();
    // 120 MB, of which 120 KB are the message's.
    let flood = async {
        for _ in 0..15_000 {
            peer.send(&part).await.unwrap();
        }
    };
    tokio::time::timeout(PATIENCE, flood).await.expect("it is read");
    attacked.is_bounded(LARGEST_CONNECTION).await;
}

/// Sends these bytes once on each of a thousand connections, which may take so much memory together.
async fn a_thousand_connections_send(bytes: &[u8], largest: u64) {
    let attacked = Attacked::start().await;
    let mut hostile = Vec::new();
    for _ in 0..1_000 {
        let mut peer = attacked.peer(&[]).await;
        peer.send(bytes).await.unwrap();
        hostile.push(peer);
    }
    attacked.is_bounded(largest).await;
}

#[tokio::test]
async fn heads_without_an_end_on_a_thousand_connections_take_bounded_memory() {
    // 7,500 fields, which take 680 KB: 680 MB together.
    let fields = [head(), b"\x40\x01a\x01b".to_vec(), vec![0xbe; 7_500]].concat();
    a_thousand_connections_send(&frame(HEADERS, 0, 1, &fields), LARGEST_PROCESS).await;
}

#[tokio::test]
async fn messages_that_claim_much_and_bring_little_take_what_they_bring() {
    // Messages of 1 MiB begin. Where room was made for all of each, they took 1 GB together.
    let begun = [
        frame(HEADERS, END_HEADERS, 1, &head_of("/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit")),
        frame(DATA, 0, 1, &[&[0, 0, 16, 0, 0][..], &[0; 8_000]].concat()),
    ];
    a_thousand_connections_send(&begun.concat(), LARGEST_PROCESS / 4).await;
}

#[tokio::test]
async fn a_thousand_bodies_at_once_are_all_answered() {
    let edge = Edge::grpc(limits(), 10).await;
    let (client, _connection) = h2_client(edge.address).await;
    // 60 KiB each, as where Envoy copies a client's largest header: thirty times what a connection may hold.
    let body = large_message(60 * 1_024);
    assert!(body.len() * 1_000 > 10 * (CONNECTION_BYTES + CONNECTION_BYTES_TO_BEGIN));
    let calls = (0..1_000).map(|_| {
        let (client, body) = (client.clone(), body.clone());
        tokio::spawn(async move {
            let (answer, mut sending) = client.ready().await.unwrap().send_request(health_check(), false).unwrap();
            sending.send_data(body, true).unwrap();
            let mut answer = answer.await.unwrap().into_body();
            while let Some(data) = answer.data().await {
                answer.flow_control().release_capacity(data.unwrap().len()).unwrap();
            }
            answer.trailers().await.unwrap().unwrap()["grpc-status"].clone()
        })
    });
    let answers = tokio::time::timeout(PATIENCE, join_all(calls)).await.expect("they are answered");
    assert!(answers.into_iter().all(|status| status.unwrap() == "0"));
}

#[tokio::test]
async fn a_body_that_waits_for_room_is_not_late() {
    let allowed = 500 * MS;
    let edge = Edge::grpc(ConnectionLimits { body: allowed, ..limits() }, 10).await;
    let (client, _connection) = h2_client(edge.address).await;
    let begin = async |bytes: Bytes, is_end| {
        let (answer, mut body) = client.clone().ready().await.unwrap().send_request(health_check(), false).unwrap();
        body.send_data(bytes, is_end).unwrap();
        (answer, body)
    };
    // Three bodies without an end: one fills the room, one has the turn. They end one after the other.
    let most = large_message(CONNECTION_BYTES - 100).slice(..CONNECTION_BYTES * 2 / 3);
    let hostile = [begin(most.clone(), false).await, begin(most.clone(), false).await, begin(most, false).await];
    tokio::time::sleep(allowed / 2).await;
    let began = Instant::now();
    let (answer, _body) = begin(large_message(60 * 1_024), true).await;
    let answer = tokio::time::timeout(PATIENCE, answer).await.expect("it is answered").unwrap();
    let status = match answer.headers().get("grpc-status") {
        Some(status) => status.clone(),
        None => {
            let mut body = answer.into_body();
            while body.data().await.is_some() {}
            body.trailers().await.unwrap().unwrap()["grpc-status"].clone()
        }
    };
    assert_eq!(status, "0", "after {:?}", began.elapsed());
    drop(hostile);
}

#[tokio::test]
async fn answers_that_nobody_takes_take_bounded_memory() {
    let attacked = Attacked::start().await;
    // SETTINGS_INITIAL_WINDOW_SIZE = 0
    let mut peer = attacked.peer(&[0, 4, 0, 0, 0, 0]).await;
    let head = head_of("/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit");
    for call in 0..CALLS {
        peer.send(&frame(HEADERS, END_HEADERS, 2 * call + 1, &head)).await.unwrap();
        peer.send(&frame(DATA, END_STREAM, 2 * call + 1, &many_descriptors(600))).await.unwrap();
    }
    attacked.is_bounded(LARGEST_CONNECTION).await;
}

#[tokio::test]
async fn an_answer_that_is_not_taken_is_dropped() {
    let edge = Edge::grpc(ConnectionLimits { stall: 300 * MS, ..limits() }, 10).await;
    let socket = TcpStream::connect(edge.address).await.unwrap();
    let (client, connection) =
        h2::client::Builder::new().initial_window_size(0).handshake::<_, Bytes>(socket).await.unwrap();
    tokio::spawn(connection);
    let (answer, mut body) = client.ready().await.unwrap().send_request(health_check(), false).unwrap();
    body.send_data(message(""), true).unwrap();
    let mut answer = answer.await.unwrap().into_body();
    let end = tokio::time::timeout(PATIENCE, answer.data()).await.expect("it ends");
    assert_eq!(end.unwrap().unwrap_err().reason(), Some(Reason::CANCEL));
    edge.client().await.check(order("")).await.unwrap();
}

#[tokio::test]
async fn two_thousand_calls_at_once_on_a_new_connection_are_all_answered() {
    let attacked = Attacked::start().await;
    let mut burst = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    burst.extend(frame(SETTINGS, 0, 0, &[]));
    for call in 0..2_000 {
        burst.extend(frame(HEADERS, END_HEADERS, 2 * call + 1, &head()));
        burst.extend(frame(DATA, END_STREAM, 2 * call + 1, &message("")));
    }
    let mut peer = Peer(TcpStream::connect(attacked.server.grpc).await.unwrap());
    peer.send(&burst).await.unwrap();
    let mut answers = Vec::new();
    read_until(&mut peer, &mut answers, |answers| said(answers).0 + said(answers).1.len() >= 2_000).await;
    assert_eq!((said(&answers), goaway(&answers)), ((2_000, vec![]), None));
}

/// A health check for a service whose name has so many bytes, as gRPC frames it.
fn large_message(length: usize) -> Bytes {
    let mut name = vec![0x0a];
    let mut rest = length;
    while rest > 127 {
        name.push(u8::try_from(rest & 127 | 128).unwrap());
        rest >>= 7;
    }
    name.push(u8::try_from(rest).unwrap());
    name.resize(name.len() + length, b'x');
    let mut message = vec![0];
    message.extend(u32::try_from(name.len()).unwrap().to_be_bytes());
    message.extend(name);
    message.into()
}

/// A request of `count` descriptors, whose answer with dynamic metadata has about 100 bytes for each.
fn many_descriptors(count: usize) -> Vec<u8> {
    let request = grpc::request("edge", vec![grpc::descriptor(&[("user", "u")]); count]);
    let mut message = vec![0];
    message.extend(u32::try_from(request.encoded_len()).unwrap().to_be_bytes());
    request.encode(&mut message).unwrap();
    message
}
