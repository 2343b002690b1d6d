//! The settings of connections, through the real binary.

use std::process::Stdio;

use rustix::process::Signal;
use tidegate::proto::envoy::service::ratelimit::v3::rate_limit_service_client::RateLimitServiceClient;
use tokio::process::Command;

use super::*;
use crate::grpc;
use crate::http;
use crate::support::{Tidegate, in_time, rule_file};

/// A rule whose second call waits here for a minute.
const RULES: &str = "domain: d
descriptors:
  - key: k
    rate_limit: { unit: minute, requests_per_unit: 1, algorithm: gcra, delay: { max: 4m, delivery: hold } }
";

#[tokio::test]
async fn a_flood_of_grpc_connections_leaves_room_for_the_probes() {
    let rules = rule_file(RULES);
    // 100 open files: 26 connections for gRPC, and 12 for each other listener.
    let mut limited = Command::new("sh");
    limited.args(["-c", "ulimit -n 100; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_tidegate")]);
    let server = Tidegate::start_as(limited, Some(rules.path()), &[], None::<Stdio>).await;
    let flood = join_all((0..60).map(|_| tokio::net::TcpStream::connect(server.grpc))).await;
    eventually_refused(&server).await;
    let answer = http::get(server.http, "/healthcheck").await;
    assert_eq!(answer.status, 200, "{answer}");
    drop(flood);
}

/// Waits until a server has turned a connection away.
async fn eventually_refused(server: &Tidegate) {
    crate::support::eventually("a connection is refused", async || {
        let page = server.metrics().await;
        let refused = |line: &str| {
            line.starts_with("tidegate_connections_ended_total{listener=\"gRPC\",how=\"refused\"}")
                && !line.ends_with(" 0")
        };
        page.lines().any(refused).then_some(())
    })
    .await;
}

#[tokio::test]
async fn where_connections_have_no_most_age_they_are_not_told_to_go() {
    let rules = rule_file(RULES);
    let server = Tidegate::start(rules.path(), &[("GRPC_MAX_CONNECTION_AGE", "0")]).await;
    let mut peer = Peer::connect(server.grpc).await;
    let mut told = Vec::new();
    let read = async { while peer.0.read_buf(&mut told).await.unwrap() > 0 {} };
    // The age counts from the end of the 5 s in which a connection must be opened.
    assert!(tokio::time::timeout(7_000 * MS, read).await.is_err(), "it stays open");
    let told = frames(&told);
    assert!(told.iter().any(|(kind, _)| *kind == SETTINGS) && told.iter().all(|(kind, _)| *kind != GOAWAY), "{told:?}");
}

#[tokio::test]
async fn a_call_that_outlasts_the_drain_timeout_is_cut() {
    let rules = rule_file(RULES);
    let mut server = Tidegate::start(rules.path(), &[("DRAIN_TIMEOUT", "1ms")]).await;
    let channel = channel(server.grpc).await;
    let call = async || RateLimitServiceClient::new(channel.clone()).should_rate_limit(grpc::one("d", "k", "v")).await;
    call().await.unwrap();
    let stop = async {
        crate::support::eventually("the second call is held", async || {
            server.metrics().await.contains("\ntidegate_held_calls 1\n").then_some(())
        })
        .await;
        server.signal(Signal::TERM);
    };
    let (answer, ()) = tokio::join!(call(), stop);
    assert!(answer.is_err(), "{answer:?}");
    assert!(in_time("it ends", server.ended()).await.success());
}
