//! Rules and overlays that change while calls are decided.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use tidegate::proto::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use tidegate::proto::envoy::service::ratelimit::v3::rate_limit_response::DescriptorStatus;
use tidegate::proto::ratelimit::config::ratelimit::v3::{RateLimitConfig, RateLimitUnit};
use tokio::task::JoinSet;

use super::plane::{Plane, limit, response, start};
use crate::grpc;
use crate::http;
use crate::support::{Tidegate, by_tier, eventually, replace_file};

const KEYS: [&str; 2] = ["user", "path"];
const CALLERS: u32 = 4;

/// Numbers of the rules that callers may see.
#[derive(Default)]
struct Numbers {
    /// Last set that was acknowledged.
    acknowledged: AtomicU32,
    /// Last set that was sent.
    sent: AtomicU32,
    is_over: AtomicBool,
}

/// A set in which both keys have a limit of `number`.
fn set(number: u32) -> RateLimitConfig {
    let mut config = limit("res", "edge", RateLimitUnit::Day, number);
    let mut other = config.descriptors[0].clone();
    KEYS[1].clone_into(&mut other.key);
    config.descriptors.push(other);
    config
}

async fn ask(server: &Tidegate, numbers: Arc<Numbers>) -> u32 {
    let mut client = grpc::client(server.grpc).await;
    let descriptor = |key: &str| RateLimitDescriptor { hits_addend: Some(0), ..grpc::descriptor(&[(key, "a")]) };
    let request = grpc::request("edge", KEYS.map(descriptor));
    let seen = |status: &DescriptorStatus| {
        (status.current_limit.as_ref().map(|limit| limit.requests_per_unit), status.limit_remaining)
    };
    let (mut calls, mut last) = (0, (Some(0), 0));
    while !numbers.is_over.load(Ordering::SeqCst) {
        let acknowledged = numbers.acknowledged.load(Ordering::SeqCst);
        let answer = client.should_rate_limit(request.clone()).await.expect("an answer").into_inner();
        let sent = numbers.sent.load(Ordering::SeqCst);
        let statuses: Vec<_> = answer.statuses.iter().map(seen).collect();
        assert_eq!(statuses[0], statuses[1], "one set and one overlay decide both");
        let number = statuses[0].0.expect("a limit");
        assert!(
            number >= acknowledged,
            "{number} is older than {acknowledged}, which was acknowledged before the call"
        );
        assert!(number <= sent, "{number} was never sent, only {sent}");
        assert!(statuses[0].0 >= last.0 && statuses[0].1 >= last.1, "{:?} after {last:?}", statuses[0]);
        last = statuses[0];
        calls += 1;
    }
    calls
}

/// Sends `pushes` sets while callers ask, with `between` before each. Returns the number of calls.
async fn pushed(plane: &mut Plane, server: Arc<Tidegate>, pushes: u32, mut between: impl FnMut(u32)) -> u32 {
    let (stream, _) = plane.stream().await;
    let numbers = Arc::new(Numbers::default());
    let push = async |plane: &mut Plane, number: u32| {
        numbers.sent.store(number, Ordering::SeqCst);
        stream.send(response(&number.to_string(), &number.to_string(), &[set(number)])).expect("it is sent");
        let answered = plane.request().await;
        assert_eq!((answered.response_nonce, answered.error_detail), (number.to_string(), None));
        numbers.acknowledged.store(number, Ordering::SeqCst);
    };
    push(plane, 1_000).await;
    let mut callers = JoinSet::new();
    for _ in 0..CALLERS {
        let (server, numbers) = (Arc::clone(&server), Arc::clone(&numbers));
        callers.spawn(async move { ask(&server, numbers).await });
    }
    for number in 1..=pushes {
        between(number);
        push(plane, 1_000 + number).await;
    }
    numbers.is_over.store(true, Ordering::SeqCst);
    callers.join_all().await.into_iter().sum()
}

#[tokio::test]
async fn pushes_under_load_give_no_wrong_mixed_or_stale_answer() {
    let mut plane = Plane::start().await;
    let server = start(&plane.variables(), &[("FORCE_START_WITHOUT_INITIAL_CONFIG", "true")]).await;
    let pushes = by_tier(50, 200);
    let calls = pushed(&mut plane, Arc::new(server), pushes, |_| {}).await;
    assert!(calls > pushes, "{calls} calls");
}

#[tokio::test]
async fn pushes_and_changes_of_the_overlay_give_no_wrong_mixed_or_stale_answer() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("overlay.yaml");
    let write = |path: &Path, burst: u32| {
        let items: Vec<_> = KEYS
            .iter()
            .map(|key| format!("{{ match: [{key}], limit: {{ algorithm: gcra, burst: {burst} }} }}"))
            .collect();
        replace_file(path, &format!("overlay: \"*\"\napply: [{}]\n", items.join(", ")));
    };
    write(&path, 1);
    let mut plane = Plane::start().await;
    let overlay = path.to_str().expect("a path of text");
    let more = [("FORCE_START_WITHOUT_INITIAL_CONFIG", "true"), ("RULES_OVERLAY", overlay)];
    let server = Arc::new(start(&plane.variables(), &more).await);
    let pushes = by_tier(50, 250);
    let calls = pushed(&mut plane, Arc::clone(&server), pushes, |number| write(&path, 1 + number)).await;
    assert!(calls > pushes, "{calls} calls");
    eventually("the last overlay is in force", async || {
        let body = r#"{"domain":"edge","descriptors":[{"entries":[{"key":"user","value":"a"}],"hitsAddend":"0"}]}"#;
        http::post(server.http, "/json", body)
            .await
            .contains(&format!("\"limitRemaining\":{}", pushes + 1))
            .then_some(())
    })
    .await;
}
