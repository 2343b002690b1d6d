//! What clients read of a decision: headers, bodies and metadata, from the binary itself and through a real Envoy.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::body::Body;
use axum::http::Request;
use serde_json::{Value, json};
use tidegate::edge::answer::Answers;
use tidegate::edge::grpc::Edge;
use tidegate::edge::json::{self, Readiness};
use tidegate::edge::pages::PageGate;
use tidegate::limiter::CallerTime;
use tidegate::model::Micros;
use tidegate::proto::envoy::service::ratelimit::v3::rate_limit_response::Code;
use tidegate::proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use tidegate::rulefile::{Options, load};
use tidegate::rules::live::LiveRules;
use tidegate::store::memory::Memory;
use tidegate::telemetry::Telemetry;
use tokio::process::Command;
use tokio::time::{Instant, timeout};
use tower::ServiceExt;

use crate::envoy::proxy::{Proxy, get};
use crate::grpc;
use crate::support::{Tidegate, in_time, output, repository, rule_file};
use crate::wire;
use crate::world::{HandClock, NOON, file, guard};

mod retry;

const RULES: &str = "domain: edge
descriptors:
  - key: plan
    value: free
    descriptors:
      - { key: user, rate_limit: { unit: week, requests_per_unit: 2, name: per-user } }
  - { key: path, rate_limit: { unit: week, requests_per_unit: 9 } }
";

/// Hits a minute apart. What comes earlier is held.
const HELD: &str = "domain: edge
descriptors:
  - key: user
    rate_limit: { unit: minute, requests_per_unit: 1, algorithm: gcra, delay: { max: 4m, delivery: hold } }
";

/// A server with these rules, and a client of it.
struct Served {
    tidegate: Tidegate,
    client: grpc::Client,
}

impl Served {
    async fn with(variables: &[(&str, &str)]) -> Self {
        Self::of(RULES, variables).await
    }

    async fn of(text: &str, variables: &[(&str, &str)]) -> Self {
        let rules = rule_file(text);
        let tidegate = Tidegate::start(rules.path(), variables).await;
        let client = grpc::client(tidegate.grpc).await;
        Self { tidegate, client }
    }

    /// The answer for a user of the free plan, who asks for a path.
    async fn ask(&mut self) -> RateLimitResponse {
        self.ask_for(&[&[("plan", "free"), ("user", "alice")], &[("path", "/")]]).await
    }

    /// The answer for these descriptors.
    async fn ask_for(&mut self, descriptors: &[&[(&str, &str)]]) -> RateLimitResponse {
        let request = grpc::request("edge", descriptors.iter().map(|entries| grpc::descriptor(entries)));
        in_time("it is answered", self.client.should_rate_limit(request)).await.expect("no error").into_inner()
    }

    /// The same of the third call, the first that is refused.
    async fn refused(&mut self) -> RateLimitResponse {
        for _ in 0..2 {
            assert_eq!(self.ask().await.overall_code(), Code::Ok);
        }
        let answer = self.ask().await;
        assert_eq!(answer.overall_code(), Code::OverLimit);
        answer
    }
}

fn lines(answer: &RateLimitResponse) -> Vec<String> {
    answer.response_headers_to_add.iter().map(|header| format!("{}: {}", header.key, header.value)).collect()
}

/// The seconds until the reset of each descriptor, as its status says.
fn resets(answer: &RateLimitResponse) -> Vec<i64> {
    answer.statuses.iter().map(|status| status.duration_until_reset.expect("a limit").seconds).collect()
}

/// The seconds of the epoch.
fn now_s() -> i64 {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).expect("it has begun");
    i64::try_from(since_epoch.as_secs()).expect("it fits")
}

#[tokio::test]
async fn the_drafts_headers_name_each_limit_and_what_is_left_of_it() {
    let mut served = Served::with(&[("RESPONSE_HEADERS", "ietf")]).await;
    let answer = served.ask().await;
    let policy = r#"RateLimit-Policy: "per-user";q=2;w=604800, "path";q=9;w=604800"#;
    let left = |resets: &[i64], [user, path]: [u32; 2]| {
        format!(r#"RateLimit: "per-user";r={user};t={}, "path";r={path};t={}"#, resets[0], resets[1])
    };
    assert_eq!(lines(&answer), [policy, &left(&resets(&answer), [1, 8])]);
    assert_eq!(served.ask().await.overall_code(), Code::Ok);
    let answer = served.ask().await;
    let resets = resets(&answer);
    assert_eq!(answer.overall_code(), Code::OverLimit);
    assert_eq!(lines(&answer), [policy, &left(&resets, [0, 6]), &format!("retry-after: {}", resets[0])]);
    assert_eq!(answer.raw_body, b"", "nobody asked for one");
}

#[tokio::test]
async fn the_reset_of_x_ratelimit_is_a_moment_and_the_start_says_that_envoy_sends_it_too() {
    let mut served = Served::with(&[("RESPONSE_HEADERS", "x-ratelimit")]).await;
    let before = now_s();
    let answer = served.refused().await;
    let after = now_s();
    let reset_s = resets(&answer)[0];
    let [limit, remaining, reset, retry] = &lines(&answer)[..] else { panic!("{answer:?}") };
    assert_eq!([limit, remaining], ["X-RateLimit-Limit: 2", "X-RateLimit-Remaining: 0"]);
    let moment: i64 = reset.strip_prefix("X-RateLimit-Reset: ").and_then(|text| text.parse().ok()).expect("a moment");
    assert!(
        (before + reset_s - 1..=after + reset_s + 1).contains(&moment),
        "{moment} is not {reset_s} s after {after}"
    );
    assert_eq!(retry, &format!("retry-after: {reset_s}"));
    let said = served.tidegate.log();
    assert!(said.contains("warning:") && said.contains("enable_x_ratelimit_headers"), "{said}");
}

#[tokio::test]
async fn both_styles_come_together_in_either_order_with_one_retry_after() {
    for style in ["x-ratelimit,ietf", "ietf,x-ratelimit"] {
        let mut served = Served::with(&[("RESPONSE_HEADERS", style)]).await;
        let answer = served.refused().await;
        let names: Vec<_> = answer.response_headers_to_add.iter().map(|header| header.key.as_str()).collect();
        let x_rate_limit = ["X-RateLimit-Limit", "X-RateLimit-Remaining", "X-RateLimit-Reset"];
        assert_eq!(names, [&x_rate_limit[..], &["RateLimit-Policy", "RateLimit", "retry-after"]].concat(), "{style}");
        assert!(served.tidegate.log().contains("enable_x_ratelimit_headers"), "{style}");
    }
}

#[tokio::test]
async fn retry_after_comes_with_the_style_and_not_with_the_references_own_variable() {
    let names = [("LIMIT_LIMIT_HEADER", "My-Limit")];
    for (variable, value, has_retry_after) in
        [("RESPONSE_HEADERS", "reference", true), ("LIMIT_RESPONSE_HEADERS_ENABLED", "true", false)]
    {
        let mut served = Served::with(&[names[0], (variable, value)]).await;
        let answer = served.refused().await;
        let reset_s = resets(&answer)[0];
        let mut expected =
            vec!["My-Limit: 2".to_owned(), "RateLimit-Remaining: 0".to_owned(), format!("RateLimit-Reset: {reset_s}")];
        expected.extend(has_retry_after.then(|| format!("retry-after: {reset_s}")));
        assert_eq!(lines(&answer), expected, "{variable}");
        assert!(!served.tidegate.log().contains("enable_x_ratelimit_headers"), "nothing is sent twice");
    }
}

#[tokio::test]
async fn a_refusal_has_a_body_that_a_program_or_a_person_reads() {
    let mut served = Served::with(&[("REFUSAL_BODY", "json")]).await;
    let answer = served.refused().await;
    let reset_s = resets(&answer)[0];
    let sentence = format!("Too many requests: 2 per week are allowed. Try again in {reset_s} seconds.");
    assert_eq!(
        serde_json::from_slice::<Value>(&answer.raw_body).expect("JSON"),
        json!({"error": "rate_limited", "message": sentence, "limit": 2, "window": "7d", "retry_after": reset_s})
    );
    assert_eq!(lines(&answer), ["content-type: application/json"], "and no header that was not asked for");

    let mut served = Served::with(&[("REFUSAL_BODY", "text")]).await;
    assert_eq!(served.ask().await.raw_body, b"", "who passes reads nothing");
    assert_eq!(served.ask().await.overall_code(), Code::Ok);
    let answer = served.ask().await;
    let sentence = format!("Too many requests: 2 per week are allowed. Try again in {} seconds.", resets(&answer)[0]);
    assert_eq!(String::from_utf8_lossy(&answer.raw_body), sentence);
    assert_eq!(lines(&answer), ["content-type: text/plain; charset=utf-8"]);
}

#[tokio::test]
async fn metadata_says_which_rule_decided() {
    let mut served = Served::with(&[("DECISION_METADATA", "true")]).await;
    let decided = |answer: RateLimitResponse| {
        let mut told = wire::json(answer.dynamic_metadata.expect("it is asked for"));
        let id = told["decision"].as_object_mut().and_then(|decision| decision.remove("id")).expect("it has an id");
        assert_eq!(id.as_str().map(str::len), Some(26), "{told}");
        told
    };
    let said = |outcome: &str| {
        let rule = "edge.plan_free.user";
        json!({ "decision": { "generation": 1.0, "limit": "per-user", "outcome": outcome, "provenance": "store", "rule": rule } })
    };
    assert_eq!(decided(served.ask().await), said("admitted"));
    assert_eq!(decided(served.ask().await), said("admitted"));
    assert_eq!(decided(served.ask().await), said("refused"));
}

#[tokio::test]
async fn two_ways_of_sending_headers_stop_the_start() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    command.args(["serve", "--response-headers", "ietf"]).env_clear().env("LIMIT_RESPONSE_HEADERS_ENABLED", "true");
    let (status, _, said) = output(&mut command).await;
    assert!(!status.success());
    for name in ["RESPONSE_HEADERS and LIMIT_RESPONSE_HEADERS_ENABLED", "unset one"] {
        assert!(said.contains(name), "{said}");
    }
}

/// A server with the rules of the example, whose minutes last a week, and the address of an Envoy in front of it.
async fn behind_envoy(variables: &[(&str, &str)]) -> (Tidegate, Proxy, SocketAddr) {
    let rules = std::fs::read_to_string(repository("examples/rules.yaml")).expect("it reads");
    let file = rule_file(&rules.replace("unit: minute", "unit: week"));
    let tidegate = Tidegate::start(file.path(), variables).await;
    let envoy = Proxy::start("envoy.yaml", tidegate.grpc, &[]).await;
    let edge = envoy.listener("fail_open").await;
    (tidegate, envoy, edge)
}

#[tokio::test]
async fn through_envoy_a_refused_client_reads_what_it_can_act_on() {
    let variables = [("RESPONSE_HEADERS", "ietf"), ("REFUSAL_BODY", "json"), ("DECISION_ID_HEADER", "true")];
    let (_tidegate, _envoy, edge) = behind_envoy(&variables).await;
    for _ in 0..5 {
        let answer = get(edge, "/", "alice").await;
        assert_eq!(answer.status, 200, "{answer:?}");
        assert!(answer.header("ratelimit").contains(r#""per-user";r="#), "{answer:?}");
        assert_eq!(answer.find("x-tidegate-decision-id"), None, "{answer:?}");
    }
    let answer = get(edge, "/", "alice").await;
    assert_eq!((answer.status, answer.header("content-type")), (429, "application/json"), "{answer:?}");
    assert!(answer.header("ratelimit-policy").contains(r#""per-user";q=5;w=604800"#), "{answer:?}");
    assert!(answer.header("ratelimit").contains(r#""per-user";r=0;t="#), "{answer:?}");
    let body: Value = serde_json::from_str(&answer.body).expect("JSON");
    assert_eq!((&body["error"], &body["limit"], &body["window"]), (&json!("rate_limited"), &json!(5), &json!("7d")));
    assert_eq!(answer.header("retry-after").parse(), Ok(body["retry_after"].as_u64().expect("seconds")));
    assert_eq!(body["decision_id"], answer.header("x-tidegate-decision-id"));
}

#[tokio::test]
async fn through_envoy_a_refused_grpc_client_reads_the_sentence_as_its_message() {
    let (_tidegate, _envoy, edge) = behind_envoy(&[("REFUSAL_BODY", "text")]).await;
    for _ in 0..5 {
        assert_eq!(get(edge, "/", "alice").await.status, 200);
    }
    let plain = get(edge, "/", "alice").await;
    assert!(plain.body.starts_with("Too many requests: 5 per week are allowed. Try again in "), "{plain:?}");
    // Envoy knows a gRPC client by this header.
    let answer = get(edge, "/", "alice\r\ncontent-type: application/grpc").await;
    assert_eq!((answer.status, answer.header("content-type")), (200, "application/grpc"), "{answer:?}");
    assert_eq!(answer.header("grpc-status"), "8", "as the example asks");
    assert!(answer.header("grpc-message").starts_with("Too many requests: 5 per week are allowed."), "{answer:?}");
}

/// An edge with the rules that hold calls. The clock of its counters stands still.
fn holding() -> Edge {
    let loaded = load(&[file("rules.yaml", HELD)], Options::default()).unwrap_or_else(|invalid| panic!("{invalid}"));
    let store = Arc::new(Memory::new(HandClock::at(NOON), 10_000));
    let limiter = tidegate::limiter::Limiter::new(Arc::new(LiveRules::new(loaded.rules)), Arc::new(guard(store, 1)));
    Edge::new(Arc::new(limiter), Arc::new(Answers::default()), Arc::new(Telemetry::off(Micros::ZERO)), 8)
}

/// A request of this user.
fn request(user: &str) -> RateLimitRequest {
    grpc::one("edge", "user", user)
}

/// A call for this user, and how long it waits for its answer.
async fn held(edge: &Edge, user: &str, patience: Option<&str>) -> (i32, Duration) {
    let mut call = tonic::Request::new(request(user));
    if let Some(patience) = patience {
        call.metadata_mut().insert("grpc-timeout", patience.parse().expect("a value"));
    }
    let began = Instant::now();
    let answer = edge.should_rate_limit(call.map(grpc::message)).await.expect("no error").into_inner();
    (answer.overall_code, began.elapsed())
}

#[tokio::test(start_paused = true)]
async fn a_held_call_is_answered_when_it_is_due_or_just_before_its_caller_gives_up() {
    let edge = holding();
    let (ok, minute) = (i32::from(Code::Ok), Duration::from_secs(60));
    assert_eq!(held(&edge, "alice", Some("20m")).await, (ok, Duration::ZERO), "the first is not early");
    assert_eq!(held(&edge, "alice", None).await, (ok, minute));
    assert_eq!(held(&edge, "alice", Some("1H")).await, (ok, 2 * minute));
    assert_eq!(held(&edge, "alice", Some("1S")).await, (ok, Duration::from_millis(997)));
    assert_eq!(held(&edge, "alice", Some("20m")).await, (ok, Duration::from_millis(17)));
    let refused = (i32::from(Code::OverLimit), Duration::ZERO);
    assert_eq!(held(&edge, "alice", None).await, refused, "five minutes are too long, and a refusal is told at once");
    assert_eq!(held(&edge, "bob", None).await, (ok, Duration::ZERO));
}

#[tokio::test(start_paused = true)]
async fn a_call_that_has_waited_is_held_for_the_rest_of_its_callers_time() {
    let edge = holding();
    held(&edge, "alice", None).await;
    let time = CallerTime {
        timeout: Some(Duration::from_millis(500)),
        waited: Duration::from_millis(100),
        ..CallerTime::default()
    };
    let began = Instant::now();
    let answer = edge.decide(request("alice"), time, None).await.expect("it is valid");
    assert_eq!((answer.overall_code, began.elapsed()), (i32::from(Code::Ok), Duration::from_millis(397)));
    edge.decide_message(grpc::message(request("alice")), None, time, None).await.expect("it is valid");
    assert_eq!(began.elapsed(), Duration::from_millis(2 * 397));
}

#[tokio::test(start_paused = true)]
async fn who_leaves_while_it_is_held_has_taken_its_turn_and_nobody_elses() {
    let edge = holding();
    let (ok, minute) = (i32::from(Code::Ok), Duration::from_secs(60));
    assert_eq!(held(&edge, "alice", None).await, (ok, Duration::ZERO));
    timeout(Duration::from_secs(1), held(&edge, "alice", None)).await.expect_err("it is held for a minute");
    assert_eq!(held(&edge, "alice", None).await, (ok, 2 * minute), "its turn is the one after");
}

#[tokio::test(start_paused = true)]
async fn as_json_a_call_is_held_as_well() {
    let service = json::service(holding(), Readiness::default(), 4_096, |_| true, Arc::new(PageGate::new(false)), 8);
    let mut waits = Vec::new();
    for _ in 0..3 {
        let body = r#"{"domain":"edge","descriptors":[{"entries":[{"key":"user","value":"alice"}]}]}"#;
        let request = Request::post("/json").body(Body::from(body)).expect("a request");
        let began = Instant::now();
        assert_eq!(service.clone().oneshot(request).await.expect("an answer").status(), 200);
        waits.push(began.elapsed().as_secs());
    }
    assert_eq!(waits, [0, 60, 120]);
}
