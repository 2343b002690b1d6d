//! What strangers do to a listener, and how it ends.

use std::net::SocketAddr;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::future::join_all;
use tidegate::serve::{ConnectionLimits, EndCause};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::sync::Mutex;
use tokio::task::JoinHandle;
use tonic::Code;

use support::*;

mod causes;
mod http1;
mod idle;
mod memory;
mod served;
pub mod support;

const MS: Duration = Duration::from_millis(1);

fn limits() -> ConnectionLimits {
    ConnectionLimits::default()
}

#[tokio::test]
async fn a_client_is_told_the_bounds_of_its_connection() {
    let limits = ConnectionLimits { handshake: 300 * MS, ..limits() };
    let edge = Edge::grpc(limits, 10).await;
    let mut peer = edge.peer().await;
    let mut said = Vec::new();
    while frames(&said).iter().filter(|(kind, _)| [SETTINGS, WINDOW_UPDATE].contains(kind)).count() < 2 {
        assert!(tokio::time::timeout(PATIENCE, peer.0.read_buf(&mut said)).await.unwrap().unwrap() > 0);
    }
    let said = frames(&said);
    let settings = &said.iter().find(|(kind, _)| *kind == SETTINGS).unwrap().1;
    let settings: Vec<_> = settings
        .chunks(6)
        .map(|entry| {
            (u16::from_be_bytes([entry[0], entry[1]]), u32::from_be_bytes([entry[2], entry[3], entry[4], entry[5]]))
        })
        .collect();
    assert!(settings.contains(&(3, 1_024)), "streams: {settings:?}");
    assert!(settings.contains(&(4, 8_183)), "stream window: {settings:?}");
    assert!(settings.contains(&(6, 262_144)), "header list: {settings:?}");
    let window = &said.iter().find(|(kind, _)| *kind == WINDOW_UPDATE).unwrap().1;
    assert_eq!(65_535 + u32::from_be_bytes(window[..4].try_into().unwrap()), 1_024 * 8_183, "connection window");
}

#[tokio::test]
async fn a_flood_of_resets_ends_no_connection() {
    let edge = Edge::grpc(limits(), 10).await;
    let mut others = edge.client().await;
    let (mut reading, mut writing) = edge.peer().await.0.into_split();
    let mut flood = Vec::new();
    for stream in (0..100_000).map(|call| 2 * call + 1) {
        flood.extend(frame(HEADERS, END_HEADERS, stream, &SHORT_HEAD));
        flood.extend(frame(RST_STREAM, 0, stream, &8_u32.to_be_bytes()));
    }
    // Its answer says that all of the flood was taken, and that the connection still serves.
    flood.extend(frame(HEADERS, END_HEADERS, 200_001, &head()));
    flood.extend(frame(DATA, END_STREAM, 200_001, &message("")));
    let attack = tokio::spawn(async move {
        writing.write_all(&flood).await.unwrap();
        writing
    });
    let mut said = Vec::new();
    let answered = async {
        // The answer is headers, a message and trailers.
        while frames(&said).iter().filter(|(kind, _)| *kind == HEADERS).count() < 2 {
            assert!(reading.read_buf(&mut said).await.unwrap() > 0, "{:?}", goaway(&said));
        }
    };
    let others = async {
        for _ in 0..50 {
            others.check(order("")).await.unwrap();
        }
    };
    tokio::time::timeout(PATIENCE, async { tokio::join!(answered, others) }).await.expect("all are answered");
    attack.await.unwrap();
    assert_eq!(goaway(&said), None);
}

#[tokio::test]
async fn headers_without_an_end_are_cut_off() {
    let edge = Edge::grpc(limits(), 10).await;
    let mut peer = edge.peer().await;
    peer.send(&frame(HEADERS, 0, 1, &head())).await.unwrap();
    let mut sent = 0_u32;
    // Header fields that say nothing new: `:method` again and again would be an error of its own, so a plain name.
    let field = [&[0x00, 1, b'a', 100][..], &[b'x'; 100]].concat();
    while sent < 50_000 && peer.send(&frame(CONTINUATION, 0, 1, &field)).await.is_ok() {
        sent += 1;
    }
    until_closed(&mut peer.0).await;
    assert!(sent < 50_000, "the flood was taken whole");
    eventually("the connection is gone", || edge.tally.counts().open == 0).await;
}

#[tokio::test]
async fn a_peer_that_sends_and_never_reads_is_cut() {
    let edge = Edge::grpc(ConnectionLimits { stall: 300 * MS, ..limits() }, 10).await;
    let mut peer = edge.peer().await;
    let pings = frame(PING, 0, 0, &[7; 8]).repeat(1_000);
    let flood = async { while peer.send(&pings).await.is_ok() {} };
    tokio::time::timeout(PATIENCE, flood).await.expect("pings are taken no more");
    eventually("the connection is gone", || edge.tally.counts().open == 0).await;
}

#[tokio::test]
async fn a_connection_without_a_preface_is_closed_and_an_idle_client_is_not() {
    let edge = Edge::grpc(ConnectionLimits { handshake: 200 * MS, ..limits() }, 10).await;
    let mut client = edge.client().await;
    client.check(order("")).await.unwrap();
    let mut silent = edge.socket().await;
    let (mut slow_reading, mut slow_writing) = edge.socket().await.into_split();
    let dribble = tokio::spawn(async move {
        for byte in b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" {
            let _ = slow_writing.write_all(&[*byte]).await;
            tokio::time::sleep(100 * MS).await;
        }
        slow_writing
    });
    assert_eq!(frames(&until_closed(&mut silent).await).len(), 1, "our settings and nothing else");
    let mut said = Vec::new();
    let _ = tokio::time::timeout(PATIENCE, slow_reading.read_to_end(&mut said)).await.expect("closed");
    assert!(!dribble.is_finished(), "closed long before its preface was whole");
    eventually("both are counted", || edge.tally.counts().ended(EndCause::Unopened) == 2).await;
    client.check(order("")).await.unwrap();
    assert_eq!(edge.tally.counts().open, 1);
    dribble.abort();
}

#[tokio::test]
async fn a_body_that_trickles_in_is_answered_with_an_error() {
    let edge = Edge::grpc(ConnectionLimits { body: 300 * MS, ..limits() }, 10).await;
    let (client, _connection) = h2_client(edge.address).await;
    let (answer, mut body) = client.ready().await.unwrap().send_request(health_check(), false).unwrap();
    let trickle = tokio::spawn(async move {
        for byte in message(&"x".repeat(100)) {
            if body.send_data(Bytes::copy_from_slice(&[byte]), false).is_err() {
                return true;
            }
            tokio::time::sleep(50 * MS).await;
        }
        false
    });
    let answer = tokio::time::timeout(PATIENCE, answer).await.expect("an answer").unwrap();
    assert_eq!(answer.headers().get("grpc-status").unwrap(), "4", "DEADLINE_EXCEEDED");
    assert!(trickle.await.unwrap(), "the stream was closed before the body was whole");
}

#[tokio::test]
async fn a_long_body_that_goes_on_arriving_is_not_late() {
    const PIECE: usize = 64 << 10;
    let edge = Edge::grpc(ConnectionLimits { body: 2_000 * MS, ..limits() }, 10).await;
    let (client, _connection) = h2_client(edge.address).await;
    let (answer, mut body) = client.ready().await.unwrap().send_request(health_check(), false).unwrap();
    let message = prost::Message::encode_to_vec(&order(&"x".repeat(4 * PIECE)));
    let length = u32::try_from(message.len()).unwrap().to_be_bytes();
    for piece in [&[0][..], &length, &message].concat().chunks(PIECE) {
        body.send_data(Bytes::copy_from_slice(piece), false).unwrap();
        tokio::time::sleep(700 * MS).await;
    }
    body.send_data(Bytes::new(), true).unwrap();
    let answer = tokio::time::timeout(PATIENCE, answer).await.expect("an answer").unwrap();
    assert_eq!(answer.headers().get("grpc-status"), None, "an answer, and no error");
}

#[tokio::test]
async fn a_reflection_stream_may_pause() {
    use tonic_reflection::pb::v1::{
        ServerReflectionRequest, server_reflection_client::ServerReflectionClient,
        server_reflection_request::MessageRequest,
    };
    let edge = Edge::grpc(ConnectionLimits { body: 100 * MS, ..limits() }, 10).await;
    let mut client = ServerReflectionClient::new(channel(edge.address).await);
    let ask = || ServerReflectionRequest {
        host: String::new(),
        message_request: Some(MessageRequest::ListServices(String::new())),
    };
    let asked = futures_util::stream::unfold(0, |asked| async move {
        if asked == 1 {
            tokio::time::sleep(500 * MS).await;
        }
        (asked < 2).then_some(((), asked + 1))
    });
    let asked = futures_util::StreamExt::map(asked, move |()| ask());
    let mut answers = client.server_reflection_info(asked).await.unwrap().into_inner();
    assert!(answers.message().await.unwrap().is_some());
    assert!(answers.message().await.unwrap().is_some());
}

#[tokio::test]
async fn a_slow_http1_head_or_body_ends() {
    let limits = ConnectionLimits { handshake: 300 * MS, body: 300 * MS, ..limits() };
    let router = axum::Router::new().route("/json", axum::routing::post(|body: String| async move { body }));
    let edge = Edge::http1(limits, router).await;
    let mut good = edge.socket().await;
    let request = b"POST /json HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok";
    good.write_all(request).await.unwrap();
    assert!(until_closed(&mut good).await.ends_with(b"\r\n\r\nok"));

    let mut silent = edge.socket().await;
    let mut head = edge.socket().await;
    head.write_all(b"POST /json HT").await.unwrap();
    let mut body = edge.socket().await;
    body.write_all(b"POST /json HTTP/1.1\r\nhost: a\r\ncontent-length: 10\r\n\r\nhalf").await.unwrap();
    assert_eq!(until_closed(&mut silent).await, b"");
    until_closed(&mut head).await;
    assert!(until_closed(&mut body).await.starts_with(b"HTTP/1.1 400"));
    eventually("all are gone", || edge.tally.counts().open == 0).await;
}

#[tokio::test]
async fn a_connection_over_the_cap_is_closed_at_once_and_one_that_leaves_makes_room() {
    let edge = Edge::grpc(limits(), 3).await;
    let mut first = edge.client().await;
    first.check(order("")).await.unwrap();
    let second = edge.peer().await;
    let _third = edge.peer().await;
    eventually("three are open", || edge.tally.counts().open == 3).await;
    let mut fourth = edge.socket().await;
    assert_eq!(until_closed(&mut fourth).await, b"");
    assert_eq!(edge.tally.counts().ended(EndCause::Refused), 1);
    first.check(order("")).await.unwrap();
    drop(second);
    eventually("there is room again", || edge.tally.counts().open == 2).await;
    edge.client().await.check(order("")).await.unwrap();
}

#[tokio::test]
async fn a_process_without_descriptors_rests_and_recovers() {
    let mut child = tokio::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "edges::child_with_few_descriptors", "--ignored", "--nocapture"])
        .stdout(Stdio::piped())
        .stdin(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let address: SocketAddr = loop {
        let line = lines.next_line().await.unwrap().expect("the child says where it listens");
        if let Some((_, address)) = line.split_once("listening on ") {
            break address.parse().unwrap();
        }
    };
    let process = format!("/proc/{}/stat", child.id().unwrap());
    let cpu_ticks = || {
        let stat = std::fs::read_to_string(&process).unwrap();
        let fields: Vec<_> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
        fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
    };
    let crowd = join_all((0..80).map(|_| tokio::net::TcpStream::connect(address))).await;
    tokio::time::sleep(200 * MS).await;
    let before = cpu_ticks();
    tokio::time::sleep(1_000 * MS).await;
    // A tick is 10 ms; a spin takes a hundred of them in this second, or half of that on a busy machine.
    let taken = cpu_ticks() - before;
    drop(crowd);
    tokio::time::timeout(PATIENCE, async { client(address).await.check(order("")).await }).await.unwrap().unwrap();
    drop(child.stdin.take());
    let said = lines.next_line().await.unwrap().unwrap();
    let errors: u64 = said.strip_prefix("accept errors: ").unwrap().parse().unwrap();
    assert!(errors > 0, "descriptors did run out");
    assert!(errors < 200, "{errors} tries in little more than a second");
    assert!(taken < 20, "{taken} ticks of CPU in a second at rest");
}

#[tokio::test]
#[ignore = "the child process of the test before it"]
async fn child_with_few_descriptors() {
    use rustix::process::{Resource, Rlimit, setrlimit};
    setrlimit(Resource::Nofile, Rlimit { current: Some(60), maximum: Some(60) }).unwrap();
    let edge = Edge::grpc(limits(), 1_000).await;
    println!("listening on {}", edge.address);
    let mut stdin = Vec::new();
    tokio::task::spawn_blocking(move || std::io::Read::read_to_end(&mut std::io::stdin(), &mut stdin))
        .await
        .unwrap()
        .unwrap();
    println!("accept errors: {}", edge.tally.counts().ended(EndCause::NotAccepted));
}

/// A client that opens a new connection when the server says that it will not take more on the old one.
struct Polite {
    address: SocketAddr,
    connection: Mutex<h2::client::SendRequest<Bytes>>,
    connections: AtomicU64,
}

impl Polite {
    async fn call(&self) -> Result<(), h2::Error> {
        loop {
            let sent = {
                let mut connection = self.connection.lock().await;
                let sent = match connection.clone().ready().await {
                    Ok(mut ready) => ready.send_request(health_check(), false),
                    Err(error) => Err(error),
                };
                if sent.is_err() {
                    *connection = h2_client(self.address).await.0;
                    self.connections.fetch_add(1, Ordering::Relaxed);
                }
                sent
            };
            let Ok((answer, mut body)) = sent else { continue };
            let answer = match body.send_data(message("wait 20"), true) {
                Ok(()) => answer.await,
                Err(error) => Err(error),
            };
            match answer {
                // The stream was above the last one of the GOAWAY: not processed, so it may be sent again (RFC 9113, 6.8).
                Err(error) if error.is_go_away() && error.reason() == Some(h2::Reason::NO_ERROR) => {}
                Err(error) => return Err(error),
                Ok(answer) => {
                    let mut body = answer.into_body();
                    while let Some(data) = body.data().await {
                        data?;
                    }
                    let trailers = body.trailers().await?;
                    assert_eq!(trailers.unwrap().get("grpc-status").unwrap(), "0");
                    return Ok(());
                }
            }
        }
    }
}

#[tokio::test]
async fn old_connections_are_replaced_without_a_failed_call() {
    let edge =
        Edge::grpc(ConnectionLimits { handshake: 200 * MS, age: 200 * MS, grace: PATIENCE, ..limits() }, 100).await;
    let polite = Arc::new(Polite {
        address: edge.address,
        connection: Mutex::new(h2_client(edge.address).await.0),
        connections: AtomicU64::new(1),
    });
    let began = Instant::now();
    let callers = (0..16).map(|_| {
        let polite = Arc::clone(&polite);
        tokio::spawn(async move {
            let mut calls = 0_u64;
            while polite.connections.load(Ordering::Relaxed) < 4 || began.elapsed() < 1_500 * MS {
                assert!(began.elapsed() < PATIENCE, "connections are never replaced");
                polite.call().await.unwrap();
                calls += 1;
            }
            calls
        })
    });
    let calls: u64 = join_all(callers).await.into_iter().map(Result::unwrap).sum();
    assert!(calls > 100, "{calls} calls were made");
    assert_eq!(edge.tally.counts().ended(EndCause::Cut), 0);
}

/// The client of h2 answers a PING before it sends the calls that are in its queue.
#[tokio::test]
async fn a_call_that_the_answer_to_the_ping_of_a_shutdown_overtakes_is_answered() {
    let limits = ConnectionLimits { handshake: 100 * MS, age: 100 * MS, grace: PATIENCE, ..limits() };
    let edge = Edge::grpc(limits, 10).await;
    let mut peer = edge.peer().await;
    let mut said = Vec::new();
    let ping = loop {
        assert!(tokio::time::timeout(PATIENCE, peer.0.read_buf(&mut said)).await.unwrap().unwrap() > 0);
        let seen = frames(&said);
        if let (Some((_, ping)), true) = (
            seen.iter().find(|(kind, payload)| *kind == PING && payload.len() == 8),
            seen.iter().any(|(kind, _)| *kind == GOAWAY),
        ) {
            break ping.clone();
        }
    };
    peer.send(&frame(PING, 1, 0, &ping)).await.unwrap();
    // Long enough for the listener to act on the answer alone.
    tokio::time::sleep(200 * MS).await;
    let call = [frame(HEADERS, END_HEADERS, 1, &head()), frame(DATA, END_STREAM, 1, &message("wait 1500"))];
    let _ = peer.send(&call.concat()).await;
    let said = until_closed(&mut peer.0).await;
    assert!(frames(&said).iter().any(|(kind, _)| *kind == HEADERS), "an answer: {:?}", frames(&said));
    assert_eq!(goaway(&said), Some(0), "and the connection ends as it should");
}

#[tokio::test]
async fn a_connection_that_outlives_its_grace_is_cut() {
    let edge = Edge::grpc(ConnectionLimits { handshake: 50 * MS, age: 50 * MS, grace: 50 * MS, ..limits() }, 10).await;
    let mut client = edge.client().await;
    let cut = tokio::time::timeout(PATIENCE, client.check(order("wait 60000"))).await.expect("it is cut");
    assert!(cut.is_err());
    eventually("it is counted", || edge.tally.counts().ended(EndCause::Cut) == 1).await;
}

#[tokio::test]
async fn a_stop_answers_the_calls_in_flight_and_cuts_who_does_not_leave() {
    let edge = Edge::grpc(ConnectionLimits { drain: Duration::from_secs(3), ..limits() }, 100).await;
    let clients = [edge.client().await, edge.client().await, edge.client().await, edge.client().await];
    let calls: Vec<_> = (0..64)
        .map(|call| {
            let mut client = clients[call % 4].clone();
            tokio::spawn(async move { client.check(order("wait 1000")).await })
        })
        .collect();
    let mut idle = edge.client().await;
    idle.check(order("")).await.unwrap();
    let mut silent = edge.socket().await;
    let _half_open = edge.peer().await;
    let address = edge.address;
    eventually("all are open", || edge.tally.counts().open == 7).await;
    tokio::time::sleep(300 * MS).await;
    let stopping = tokio::spawn(edge.stop());
    until_closed(&mut silent).await;
    assert!(!stopping.is_finished(), "the silent one is dropped at once, before the calls are answered");
    assert!(tokio::net::TcpStream::connect(address).await.is_err(), "new connections are refused while calls drain");
    for call in calls {
        call.await.unwrap().unwrap();
    }
    let (drained, took) = stopping.await.unwrap();
    assert_eq!((drained.closed, drained.unopened, drained.cut), (5, 1, 1));
    assert!(took >= Duration::from_secs(2), "the half-open one had its time: {took:?}");
    assert!(took < Duration::from_secs(10), "{took:?}");
}

#[tokio::test]
async fn a_stop_does_not_wait_for_idle_or_silent_peers() {
    let edge = Edge::grpc(ConnectionLimits { drain: PATIENCE * 2, ..limits() }, 100).await;
    let mut idle = edge.client().await;
    idle.check(order("")).await.unwrap();
    let silent = join_all((0..20).map(|_| edge.socket())).await;
    eventually("all are open", || edge.tally.counts().open == 21).await;
    let (drained, _) = edge.stop().await;
    assert_eq!((drained.closed, drained.unopened, drained.cut), (1, 20, 0));
    drop(silent);
}

#[tokio::test]
async fn a_panic_in_a_handler_is_one_failed_call() {
    let edge = Edge::grpc(limits(), 10).await;
    let mut client = edge.client().await;
    let mut slow = client.clone();
    let slow = tokio::spawn(async move { slow.check(order("wait 300")).await });
    assert_ne!(client.check(order("panic")).await.unwrap_err().code(), Code::Ok);
    slow.await.unwrap().unwrap();
    for _ in 0..4 {
        edge.client().await.check(order("")).await.unwrap();
    }
    let (drained, _) = edge.stop().await;
    assert_eq!(drained.cut, 0);
}
