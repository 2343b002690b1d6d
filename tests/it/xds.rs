//! Rules from a control plane, with a management server of the tests.

use prost_types::value::Kind;
use prost_types::{Struct, Value};
use rustix::process::Signal;
use tidegate::proto::envoy::config::core::v3::Node;
use tidegate::proto::envoy::service::discovery::v3::DiscoveryRequest;
use tidegate::proto::ratelimit::config::ratelimit::v3::RateLimitUnit;
use tokio::process::Command;
use tonic::Status;

use crate::support::{Process, eventually, in_time, on_free_ports};
use plane::{Plane, TYPE_URL, answer, call, limit, response, rlconfig, start};

mod conformance;
mod faults;
mod load;
pub mod plane;
mod restart;
mod secured;
mod silence;

#[tokio::test]
async fn pushed_rules_are_acknowledged_and_decide_and_a_wrong_set_is_refused_and_changes_nothing() {
    let mut plane = Plane::start().await;
    let variables = plane.variables();
    let starting = tokio::spawn(async move { start(&variables, &[]).await });
    let (stream, first) = plane.stream().await;
    assert_eq!(answer(&first), ("", "", None));
    let zone = Value { kind: Some(Kind::StringValue("a".to_owned())) };
    let metadata = Some(Struct { fields: [("zone".to_owned(), zone)].into() });
    let node = Some(Node { id: "node-1".to_owned(), metadata, ..Node::default() });
    let expected = DiscoveryRequest { node, type_url: TYPE_URL.to_owned(), ..DiscoveryRequest::default() };
    assert_eq!(first, expected, "the whole request");

    stream.send(response("1", "n1", &[limit("res", "edge", RateLimitUnit::Week, 1)])).expect("it is sent");
    let server = in_time("the listeners open after the first rules", starting).await.expect("it starts");
    let accepted = plane.request().await;
    let expected =
        DiscoveryRequest { version_info: "1".to_owned(), response_nonce: "n1".to_owned(), ..expected.clone() };
    assert_eq!(accepted, expected, "the node is in every request");
    let in_force = "edge.user: unit=WEEK requests_per_unit=1, shadow_mode: false, quota_mode: false";
    assert_eq!(rlconfig(&server).await, in_force);
    assert!(call(&server).await.status == 200);
    assert!(call(&server).await.status == 429);

    let mut wrong = limit("res-bad", "edge", RateLimitUnit::Day, 9);
    wrong.descriptors[0].key.clear();
    stream.send(response("2", "n2", &[limit("res", "other", RateLimitUnit::Unknown, 9), wrong])).expect("it is sent");
    let refused = plane.request().await;
    let (version, nonce, reasons) = answer(&refused);
    assert_eq!((version, nonce), ("1", "n2"));
    assert_eq!(
        reasons,
        Some(
            "res:2:1: error: the rate limit has no unit: write `unit:` with one of second, minute, hour, day, week, month, year, or `window:` with a length such as 250ms\n  2 | other > user\n    | ^\nres-bad:2:1: error: the descriptor has no key: write `key:` with the name of the entry that it matches\n  2 | edge > \n    | ^"
        )
    );
    assert_eq!(rlconfig(&server).await, in_force);

    // The counter lives on under the new limit.
    stream.send(response("3", "n3", &[limit("res", "edge", RateLimitUnit::Week, 2)])).expect("it is sent");
    let corrected = plane.request().await;
    assert_eq!(answer(&corrected), ("3", "n3", None));
    assert!(rlconfig(&server).await.contains("requests_per_unit=2"));

    stream.send(response("4", "n4", &[])).expect("it is sent");
    let emptied = plane.request().await;
    assert_eq!(answer(&emptied), ("4", "n4", None));
    assert_eq!(rlconfig(&server).await, "");
}

#[tokio::test]
async fn a_new_stream_begins_without_version_and_the_rules_stay_meanwhile() {
    let mut plane = Plane::start().await;
    let server = start(&plane.variables(), &[("FORCE_START_WITHOUT_INITIAL_CONFIG", "true")]).await;
    let (stream, _) = plane.stream().await;
    let undecided = call(&server).await;
    assert!(undecided.contains("no rate limit configuration loaded"), "{undecided}");
    stream.send(response("7", "n1", &[limit("res", "edge", RateLimitUnit::Day, 5)])).expect("it is sent");
    let accepted = plane.request().await;
    assert_eq!(answer(&accepted), ("7", "n1", None));
    stream.send(Err(Status::unavailable("restarting"))).expect("it is sent");
    drop(stream);
    let (stream, first) = plane.stream().await;
    assert_eq!(answer(&first), ("", "", None));
    assert!(rlconfig(&server).await.contains("requests_per_unit=5"));
    assert!(server.log().contains("restarting"), "{}", server.log());
    stream.send(response("1", "n1", &[limit("res", "edge", RateLimitUnit::Day, 6)])).expect("it is sent");
    let accepted = plane.request().await;
    assert_eq!(answer(&accepted), ("1", "n1", None));
    assert!(rlconfig(&server).await.contains("requests_per_unit=6"));
}

#[tokio::test]
async fn a_response_above_the_bound_is_named_in_the_log_and_the_rules_stay() {
    let mut plane = Plane::start().await;
    let more = [("FORCE_START_WITHOUT_INITIAL_CONFIG", "true"), ("XDS_CLIENT_MAX_MSG_SIZE_IN_BYTES", "300")];
    let server = start(&plane.variables(), &more).await;
    let (stream, _) = plane.stream().await;
    stream.send(response("1", "n1", &[limit("res", "edge", RateLimitUnit::Day, 5)])).expect("it is sent");
    plane.request().await;
    stream.send(response("2", "n2", &[limit(&"x".repeat(300), "edge", RateLimitUnit::Day, 6)])).expect("it is sent");
    let (_stream, first) = plane.stream().await;
    assert_eq!(answer(&first), ("", "", None), "no refusal before the new stream");
    assert!(rlconfig(&server).await.contains("requests_per_unit=5"));
    let log = server.log();
    assert!(log.contains("larger than 300 bytes"), "{log}");
}

#[tokio::test]
async fn a_stop_signal_is_obeyed_while_the_first_rules_are_awaited() {
    let mut plane = Plane::start().await;
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    command.arg("serve").env_clear();
    let mut process = Process::start(on_free_ports(&mut command).envs(plane.variables()));
    plane.stream().await;
    process.signal(Signal::TERM);
    assert!(process.ended().await.success());
    eventually("it says so", async || process.errors().contains("before the control plane sent rules").then_some(()))
        .await;
}
