//! Connections beyond the bound for idle ones: the longest idle leave, and no call fails for it.

use tidegate::proto::envoy::service::ratelimit::v3::RateLimitRequest;

use super::*;
use crate::grpc;
use crate::support::{Tidegate, rule_file};

/// Longer than a connection has to be idle to be asked to leave.
const LONG_IDLE: Duration = Duration::from_millis(300);

/// A call that is in flight until the listener has waited for `ms`. The listener has it when this returns.
async fn in_flight(address: SocketAddr, ms: u64) -> JoinHandle<Result<(), h2::Error>> {
    let (client, connection) = h2_client(address).await;
    let send = |text: &str| {
        let (mut client, text) = (client.clone(), message(text));
        async move {
            let (answer, mut body) = {
                client = client.ready().await?;
                client.send_request(health_check(), false)?
            };
            body.send_data(text, true)?;
            Ok::<_, h2::Error>(answer)
        }
    };
    let slow = send(&format!("wait {ms}")).await.unwrap();
    // Calls of a connection begin in their order.
    send("").await.unwrap().await.unwrap();
    tokio::spawn(async move {
        let answer = slow.await?;
        drop((client, connection));
        assert_eq!(answer.status(), 200);
        Ok(())
    })
}

/// A peer with an open connection that makes no call and answers no ping.
async fn idle(edge: &Edge, open: u64) -> Peer {
    let peer = edge.peer().await;
    eventually("the connection is open", || edge.tally.counts().open == open).await;
    peer
}

/// Looks that the listener still reads what this peer sends.
async fn assert_open(peer: &mut Peer) {
    peer.send(&frame(PING, 0, 0, &[7; 8])).await.unwrap();
    let mut said = Vec::new();
    while !frames(&said).iter().any(|(kind, payload)| *kind == PING && payload == &[7; 8]) {
        let read = tokio::time::timeout(PATIENCE, peer.0.read_buf(&mut said)).await.expect("it is answered");
        assert!(read.unwrap() > 0, "the connection was closed");
    }
    assert_eq!(goaway(&said), None);
}

#[tokio::test]
async fn beyond_the_bound_the_longest_idle_leave_and_calls_go_on() {
    let edge = Edge::grpc_with_most_idle(limits(), 100, 5).await;
    let calls = [in_flight(edge.address, 4_000).await, in_flight(edge.address, 4_000).await];
    let mut used = edge.client().await;
    let mut first = idle(&edge, 4).await;
    let mut second = idle(&edge, 5).await;
    used.check(order("")).await.unwrap();

    tokio::time::sleep(LONG_IDLE).await;
    let mut third = idle(&edge, 6).await;
    assert_eq!(goaway(&until_closed(&mut first.0).await), Some(0), "the longest idle is told to go, for no error");
    let mut fourth = idle(&edge, 6).await;
    assert_eq!(goaway(&until_closed(&mut second.0).await), Some(0), "and then the next one");
    used.check(order("")).await.unwrap();
    assert_open(&mut third).await;
    assert_open(&mut fourth).await;
    for call in calls {
        call.await.unwrap().expect("the call is answered");
    }
    assert_eq!((edge.tally.counts().ended(EndCause::Idle), edge.tally.counts().ended(EndCause::Cut)), (2, 0));
}

#[tokio::test]
async fn a_connection_with_calls_that_need_not_end_is_idle() {
    let edge = Edge::grpc_with_most_idle(limits(), 100, 0).await;
    let mut endless = Vec::new();
    for path in ["/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", "/grpc.health.v1.Health/Watch"] {
        let mut peer = edge.peer().await;
        let body = if path.ends_with("Watch") { frame(DATA, END_STREAM, 1, &message("endless")) } else { Vec::new() };
        peer.send(&[frame(HEADERS, END_HEADERS, 1, &head_of(path)), body].concat()).await.unwrap();
        endless.push(peer);
    }
    for mut peer in endless {
        assert_eq!(goaway(&until_closed(&mut peer.0).await), Some(0), "it is told to go, for no error");
    }
}

#[tokio::test]
async fn a_connection_with_many_calls_that_need_not_end_is_asked_to_leave() {
    let edge = Edge::grpc(limits(), 100).await;
    let mut peer = edge.peer().await;
    let watch = |call: u32| {
        let head = frame(HEADERS, END_HEADERS, 2 * call + 1, &head_of("/grpc.health.v1.Health/Watch"));
        [head, frame(DATA, END_STREAM, 2 * call + 1, &message("endless"))].concat()
    };
    for call in 0..4 {
        peer.send(&watch(call)).await.unwrap();
    }
    tokio::time::sleep(LONG_IDLE).await;
    assert_eq!(edge.tally.counts().open, 1);
    peer.send(&watch(4)).await.unwrap();
    assert_eq!(goaway(&until_closed(&mut peer.0).await), Some(0), "it is told to go, for no error");
}

#[tokio::test]
async fn where_every_connection_has_a_call_new_ones_are_taken_up_to_the_cap() {
    let edge = Edge::grpc_with_most_idle(limits(), 6, 2).await;
    let mut calls = Vec::new();
    for _ in 0..6 {
        calls.push(in_flight(edge.address, 5_000).await);
    }
    let mut beyond = edge.socket().await;
    assert_eq!(until_closed(&mut beyond).await, b"");
    for call in calls {
        call.await.unwrap().expect("the call is answered");
    }
    assert_eq!((edge.tally.counts().ended(EndCause::Idle), edge.tally.counts().ended(EndCause::Refused)), (0, 1));
}

#[tokio::test]
async fn callers_whose_connections_come_and_go_lose_no_call() {
    let edge = Edge::grpc_with_most_idle(limits(), 1_000, 3).await;
    let began = Instant::now();
    let callers = (0..12).map(|_| {
        let address = edge.address;
        let tally = Arc::clone(&edge.tally);
        tokio::spawn(async move {
            let polite =
                Polite { address, connection: Mutex::new(h2_client(address).await.0), connections: AtomicU64::new(1) };
            while tally.counts().ended(EndCause::Idle) < 20 {
                assert!(began.elapsed() < PATIENCE, "connections are never told to go");
                polite.call().await.unwrap();
                tokio::time::sleep(LONG_IDLE).await;
            }
        })
    });
    for caller in join_all(callers).await {
        caller.unwrap();
    }
    assert_eq!(edge.tally.counts().ended(EndCause::Cut), 0);
}

/// Connections that a peer opens and leaves idle. Without a bound they take 36 KiB each, 175 MiB together.
const MANY: usize = 5_000;

#[tokio::test]
async fn idle_connections_take_a_bounded_amount_of_memory() {
    let rules = rule_file("domain: edge\ndescriptors: [{ key: k, rate_limit: { unlimited: true } }]\n");
    let server = Tidegate::start(rules.path(), &[("GRPC_MAX_IDLE_CONNECTIONS", "100"), ("LOG_FORMAT", "json")]).await;
    let before = server.peak_memory();
    let mut peers = Vec::new();
    for _ in 0..MANY {
        let mut peer = Peer(tokio::net::TcpStream::connect(server.grpc).await.unwrap());
        peer.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.unwrap();
        peer.send(&frame(SETTINGS, 0, 0, &[])).await.unwrap();
        peers.push(peer);
    }
    crate::support::eventually("all that are too many are gone", async || {
        let page = server.metrics().await;
        let open = page.lines().find_map(|line| line.strip_prefix("tidegate_connections{listener=\"gRPC\"} "))?;
        (open.parse::<usize>().ok()? <= 100).then_some(())
    })
    .await;
    let grown = server.peak_memory() - before;
    // Those that leave stay for a moment more, up to 2,000 of them.
    assert!(grown < 90 << 20, "{grown} bytes for {MANY} connections");
    let mut client = grpc::client(server.grpc).await;
    let request = RateLimitRequest { domain: "edge".to_owned(), ..RateLimitRequest::default() };
    assert_eq!(client.should_rate_limit(request).await.unwrap_err().code(), Code::InvalidArgument, "it answers");
    let told: Vec<_> =
        server.log().lines().filter(|line| line.contains("\"how\":\"idle\"")).map(str::to_owned).collect();
    assert!((1..=3).contains(&told.len()), "one line in ten seconds: {told:?}");
}
