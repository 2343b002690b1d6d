//! Tests of the calls that a node takes, and of its threads.

use tokio::time::sleep;

use super::*;
use crate::store::redis::address::Topology;
use crate::store::redis::servers::Servers;
use crate::store::redis::tests::{access, address};
use crate::store::redis::{Instance, Redis, ScriptTaken};

fn node() -> Arc<Node> {
    Arc::new(Node::new(Locate::At(address()), access(), 1, Arc::default()))
}

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// Opens the breaker of `node` by calls that failed after the time `waited`.
async fn open_breaker(node: &Node, waited: Duration) {
    for _ in 0..30 {
        node.failed(waited);
        tokio::time::advance(ms(10)).await;
    }
    assert!(node.breaker.missed(Instant::now() + ms(100), Instant::now() + ms(200)), "the breaker opens");
}

#[test]
fn a_thread_keeps_its_number_and_shares_it_with_no_other() {
    let number = thread();
    assert_eq!(thread(), number);
    let other = std::thread::spawn(thread).join().expect("it ends");
    assert_ne!(other, number);
}

#[tokio::test(start_paused = true)]
async fn a_caller_with_more_time_than_those_who_failed_is_let_through_and_what_is_charged_later_is_not() {
    let node = node();
    open_breaker(&node, ms(10)).await;
    let ask = async |wait, turn| node.permit(Instant::now(), 1, Instant::now() + wait, turn).await.map(drop);
    let is_down = |result| matches!(result, Err(StoreError::Down { .. }));
    assert!(is_down(ask(ms(10), CallPriority::InOrder).await));
    assert_eq!(ask(ms(1_000), CallPriority::InOrder).await, Ok(()));
    assert!(is_down(ask(ms(1_000), CallPriority::Spare).await));
}

#[tokio::test(start_paused = true)]
async fn what_is_charged_later_and_finds_no_room_at_a_silent_node_is_no_failure_of_the_node() {
    let node = node();
    let until = Instant::now() + ms(10_000);
    let all = node.permit(Instant::now(), node.room(), until, CallPriority::InOrder).await;
    assert!(all.is_ok() && node.room() == 0);
    node.silence.sent(Instant::now());
    tokio::time::advance(SILENT).await;
    assert_eq!(node.permit(Instant::now(), 1, until, CallPriority::Spare).await.err(), Some(StoreError::Overloaded));
    assert_eq!(node.permit(Instant::now(), 1, until, CallPriority::AtOnce).await.err(), Some(StoreError::TimedOut));
}

#[tokio::test]
async fn a_node_is_silent_after_100_ms_or_three_round_trips() {
    let node = node();
    assert_eq!(node.silent_after(), ms(100));
    node.round_trips.add(Instant::now(), ms(50));
    assert_eq!(node.silent_after(), ms(150), "a reply may be on its way for that long");
}

#[tokio::test(start_paused = true)]
async fn a_server_further_away_than_a_caller_waits_is_not_called() {
    let node = node();
    node.round_trips.add(Instant::now(), ms(50));
    let ask = async |wait| node.permit(Instant::now(), 1, Instant::now() + wait, CallPriority::InOrder).await.map(drop);
    assert_eq!(ask(ms(49)).await, Err(StoreError::Overloaded));
    assert_eq!(ask(ms(50)).await, Ok(()));
}

/// Returns true if the supervisor of a server that cannot be reached tries to connect between 5 s and 6.2 s after its start. There are
/// `alive` connections, and a call fails after 5 s if `is_hinted`.
async fn tries_again(alive: usize, is_hinted: bool) -> bool {
    let access = access();
    access.alive.store(alive, Ordering::Release);
    let servers = Arc::new(Servers::new(Topology::Single(address()), access, 1));
    let node = servers.node(0).expect("it is the only one");
    let supervised = Arc::clone(&servers);
    let supervisor = tokio::spawn(async move { supervised.supervise().await });
    sleep(ms(5_000)).await;
    if is_hinted {
        servers.doubt_map();
    }
    let mut has_tried = false;
    // A failed attempt shows for 400 ms.
    for _ in 0..12 {
        sleep(ms(100)).await;
        has_tried |= node.backoff.until().is_some();
    }
    supervisor.abort();
    has_tried
}

#[tokio::test(start_paused = true)]
async fn a_server_is_tried_again_while_no_connection_is_alive_and_when_a_call_has_failed() {
    assert!(tries_again(0, false).await, "there is none to call on");
    assert!(!tries_again(1, false).await, "calls have a connection");
    assert!(tries_again(1, true).await, "a call has failed");
}

#[tokio::test(start_paused = true)]
async fn an_undo_that_a_node_does_not_take_goes_to_the_node_that_takes_its_place() {
    let redis = Redis::new(Instance { topology: Topology::Single(address()), access: access() }, None, "", 1);
    let servers = &redis.0.main;
    let (old, new) = (servers.node(0).expect("it is the only one"), node());
    // Longer than an undo is tried.
    open_breaker(&old, ms(1_000)).await;
    let undo = redis.give_back(vec![ScriptTaken { is_per_second: false, slot: 0, charges: Vec::new() }]);
    let moved = async {
        sleep(ms(100)).await;
        servers.replace(Arc::clone(&new));
    };
    tokio::join!(undo, moved);
    // No server listens there.
    assert!(new.backoff.until().is_some(), "it was tried");
}
