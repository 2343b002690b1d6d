//! What callers see of the policies: over gRPC and as JSON.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, to_bytes};
use axum::http::{Request, StatusCode};
use serde_json::{Value, json};
use tidegate::edge::answer::{Answers, HeaderNames, Headers};
use tidegate::edge::grpc::{Edge, Services};
use tidegate::edge::json::{self, Readiness};
use tidegate::edge::pages::PageGate;
use tidegate::model::Micros;
use tidegate::proto::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use tidegate::proto::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::Entry;
use tidegate::proto::envoy::service::ratelimit::v3::rate_limit_response::{Code, DescriptorStatus, RateLimit};
use tidegate::proto::envoy::service::ratelimit::v3::rate_limit_service_client::RateLimitServiceClient;
use tidegate::proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use tidegate::store::StoreError;
use tidegate::telemetry::Telemetry;
use tonic::Status;
use tower::ServiceExt;

use super::failing::Instance;
use crate::{grpc, wire};

/// A rule for each policy, and one that nobody watches.
pub const RULES: &str = "domain: d
descriptors:
  - { key: error, rate_limit: { unit: day, requests_per_unit: 10 } }
  - { key: open, on_store_failure: open, rate_limit: { unit: day, requests_per_unit: 10 } }
  - { key: closed, on_store_failure: closed, rate_limit: { unit: day, requests_per_unit: 10 } }
  - { key: local, on_store_failure: local, rate_limit: { unit: day, requests_per_unit: 10 } }
  - { key: shadow, shadow_mode: true, rate_limit: { unit: day, requests_per_unit: 10 } }
  - { key: one, rate_limit: { unit: day, requests_per_unit: 1 } }
  - { key: quota, quota_mode: true, rate_limit: { unit: day, requests_per_unit: 1 } }
  - key: two
    on_store_failure: open
    rate_limits: [{ unit: day, requests_per_unit: 77 }, { unit: week, requests_per_unit: 90 }]
  - { key: warned, on_store_failure: local, rate_limit: { unit: day, requests_per_unit: 10, warn_at: 10% } }
";

/// Half a day, in seconds: what is left of a day at noon.
const HALF_DAY_S: i64 = 43_200;

/// The edge of an instance, one of two, that sends headers and no metadata of its own.
fn edge(instance: &Instance, dynamic_metadata: bool) -> Edge {
    let [limit, remaining, reset] = ["limit", "remaining", "reset"].map(str::to_owned);
    let headers = HeaderNames::new(limit, remaining, reset).expect("names");
    let answers = Answers { headers: Headers::Three(headers), dynamic_metadata, ..Answers::default() };
    edge_with(instance, answers)
}

fn edge_with(instance: &Instance, answers: Answers) -> Edge {
    Edge::new(Arc::new(instance.limiter(RULES).limiter), Arc::new(answers), Arc::new(Telemetry::off(Micros::ZERO)), 8)
}

fn request(entries: &[&str]) -> RateLimitRequest {
    let entry = |text: &&str| {
        let (key, value) = text.split_once('=').expect("an entry");
        Entry { key: key.to_owned().into(), value: value.to_owned().into() }
    };
    let descriptor = |text| RateLimitDescriptor { entries: vec![entry(text)], ..RateLimitDescriptor::default() };
    RateLimitRequest { domain: "d".to_owned(), descriptors: entries.iter().map(descriptor).collect(), hits_addend: 0 }
}

/// What a call is answered, over the protocol.
async fn ask(edge: &Edge, entries: &[&str]) -> Result<RateLimitResponse, Status> {
    let (services, _) = Services::new(edge.clone()).await.expect("the services of this build");
    RateLimitServiceClient::new(services).should_rate_limit(request(entries)).await.map(tonic::Response::into_inner)
}

async fn answer(edge: &Edge, entries: &[&str]) -> RateLimitResponse {
    ask(edge, entries).await.expect("no error")
}

fn headers(answer: &RateLimitResponse) -> BTreeMap<&str, &str> {
    answer.response_headers_to_add.iter().map(|header| (header.key.as_str(), header.value.as_str())).collect()
}

fn metadata(answer: &RateLimitResponse) -> Value {
    answer.dynamic_metadata.clone().map_or(Value::Null, wire::json)
}

fn status(code: Code) -> DescriptorStatus {
    DescriptorStatus { code: code.into(), ..DescriptorStatus::default() }
}

#[tokio::test]
async fn open_says_ok_of_no_limit_and_marks_it() {
    let instance = Instance::of(2);
    let answer = answer(&edge(&instance, false), &["open=down"]).await;
    assert_eq!((answer.overall_code(), &answer.statuses), (Code::Ok, &vec![status(Code::Ok)]));
    assert_eq!((headers(&answer), answer.raw_body.as_slice()), (BTreeMap::new(), &b""[..]));
    assert_eq!(metadata(&answer), json!({"on_store_failure": ["open"]}));
}

#[tokio::test]
async fn closed_refuses_of_no_limit_and_says_that_nobody_exceeded_anything() {
    let instance = Instance::of(2);
    let edge = edge(&instance, false);
    let down = |retry| StoreError::Down { retry: Micros::new(retry) };
    // In microseconds, and in the whole seconds of the status and of the header.
    let waits = [(StoreError::TimedOut, 1, "1"), (down(0), 0, "1"), (down(250_000), 1, "1"), (down(2_500_000), 3, "3")];
    for (error, seconds, retry_after) in waits {
        *instance.store.error.lock() = error;
        let answer = answer(&edge, &["closed=down"]).await;
        assert_eq!(answer.overall_code(), Code::OverLimit);
        let reset = prost_types::Duration { seconds, nanos: 0 };
        let expected = DescriptorStatus { duration_until_reset: Some(reset), ..status(Code::OverLimit) };
        assert_eq!(answer.statuses, [expected], "{error}");
        let expected = [("retry-after", retry_after), ("content-type", "application/json")];
        assert_eq!(headers(&answer), BTreeMap::from(expected), "{error}");
        assert_eq!(answer.raw_body, b"{\"error\":\"rate_limiter_unavailable\"}\n");
        assert_eq!(metadata(&answer), json!({"on_store_failure": ["closed"], "rate_limiter_unavailable": true}));
    }
}

#[tokio::test]
async fn error_is_the_error_that_leaves_the_decision_to_the_caller() {
    let instance = Instance::of(2);
    let edge = edge(&instance, false);
    for entries in [&["error=down"][..], &["one=up", "error=down"], &["open=down", "error=down", "local=down"]] {
        let error = ask(&edge, entries).await.expect_err("nobody knows");
        assert_eq!(error.code(), tonic::Code::Unavailable, "{entries:?}");
        assert!(error.message().contains("cannot be asked"), "{error}");
    }
    let answer = answer(&edge, &["shadow=down"]).await;
    assert_eq!((answer.overall_code(), &answer.statuses), (Code::Ok, &vec![status(Code::Ok)]), "a shadow only watches");
    assert_eq!(metadata(&answer), json!({"on_store_failure": ["error"]}));
}

#[tokio::test]
async fn local_is_answered_as_ever_with_what_is_left_of_this_instances_part() {
    let instance = Instance::of(2);
    let edge = edge(&instance, false);
    for (code, left) in
        [(Code::Ok, 4), (Code::Ok, 3), (Code::Ok, 2), (Code::Ok, 1), (Code::Ok, 0), (Code::OverLimit, 0)]
    {
        let answer = answer(&edge, &["local=down"]).await;
        assert_eq!(answer.overall_code(), code);
        let limit = RateLimit { name: String::new(), requests_per_unit: 10, unit: 4, unit_multiplier: None };
        let reset = prost_types::Duration { seconds: HALF_DAY_S, nanos: 0 };
        let expected = DescriptorStatus {
            current_limit: Some(limit),
            limit_remaining: left,
            duration_until_reset: Some(reset),
            ..status(code)
        };
        assert_eq!(answer.statuses, [expected]);
        let expected = [("limit", "10"), ("remaining", &left.to_string()), ("reset", &HALF_DAY_S.to_string())];
        assert_eq!(headers(&answer), BTreeMap::from(expected));
        assert_eq!((answer.raw_body.as_slice(), metadata(&answer)), (&b""[..], json!({"on_store_failure": ["local"]})));
    }
}

#[tokio::test]
async fn what_a_real_limit_refuses_beside_a_closed_failure_is_an_ordinary_refusal() {
    let instance = Instance::of(2);
    let edge = edge(&instance, false);
    assert_eq!(answer(&edge, &["one=up"]).await.overall_code(), Code::Ok);
    for entries in [["one=up", "closed=down"], ["closed=down", "one=up"]] {
        let answer = answer(&edge, &entries).await;
        assert_eq!(answer.overall_code(), Code::OverLimit);
        let half_day = HALF_DAY_S.to_string();
        assert_eq!(headers(&answer), BTreeMap::from([("limit", "1"), ("remaining", "0"), ("reset", &half_day)]));
        assert_eq!(answer.raw_body, b"");
        assert_eq!(metadata(&answer), json!({"on_store_failure": ["closed"]}));
    }
}

#[tokio::test]
async fn a_real_refusal_beside_a_closed_failure_keeps_its_retry_after() {
    let instance = Instance::of(2);
    let edge = edge_with(&instance, Answers { headers: Headers::Ietf, ..Answers::default() });
    assert_eq!(answer(&edge, &["one=up"]).await.overall_code(), Code::Ok);
    for entries in [["one=up", "closed=down"], ["closed=down", "one=up"]] {
        let answer = answer(&edge, &entries).await;
        assert_eq!(headers(&answer).get("retry-after"), Some(&&*HALF_DAY_S.to_string()), "{entries:?}");
    }
}

#[tokio::test]
async fn of_two_limits_of_a_descriptor_the_one_that_was_counted_is_shown() {
    let instance = Instance::of(2);
    let edge = edge(&instance, false);
    let counted = answer(&edge, &["two=partly"]).await;
    let limit = counted.statuses[0].current_limit.as_ref().map(|limit| limit.requests_per_unit);
    assert_eq!((limit, counted.statuses[0].limit_remaining), (Some(90), 89));
    assert_eq!(headers(&counted).get("limit"), Some(&"90"));
}

#[tokio::test]
async fn nobody_is_warned_of_an_instances_own_part() {
    let instance = Instance::of(1);
    let edge = edge(&instance, false);
    let warning = "x-ratelimit-warning";
    assert!(headers(&answer(&edge, &["warned=up"]).await).contains_key(warning));
    assert!(!headers(&answer(&edge, &["warned=down"]).await).contains_key(warning));
}

#[tokio::test]
async fn a_quota_that_would_not_refuse_alone_makes_no_ordinary_refusal_of_a_failure() {
    let instance = Instance::of(2);
    let edge = edge(&instance, false);
    assert_eq!(answer(&edge, &["quota=up"]).await.overall_code(), Code::Ok);
    assert_eq!(answer(&edge, &["quota=up", "quota=up-too"]).await.overall_code(), Code::Ok, "one has room");
    let refused = answer(&edge, &["quota=up", "quota=up-three", "closed=down"]).await;
    assert_eq!((refused.overall_code(), headers(&refused).get("retry-after")), (Code::OverLimit, Some(&"1")));
}

#[tokio::test]
async fn headers_never_describe_what_was_not_counted() {
    let instance = Instance::of(2);
    let edge = edge(&instance, false);
    let policies = ["open=down", "closed=down", "shadow=down"];
    for (index, policy) in policies.iter().enumerate() {
        let alone = answer(&edge, &[policy]).await;
        assert!(!headers(&alone).contains_key("limit"), "{policy}: {alone:?}");
        for entries in [[policy, "local=up"], ["local=up", policy]] {
            let entries = entries.map(|entry| entry.replace("=up", &format!("=up{index}")));
            let entries = entries.each_ref().map(String::as_str);
            let answer = answer(&edge, &entries).await;
            let counted = answer.statuses.iter().find(|status| status.current_limit.is_some()).expect("the other");
            let left = counted.limit_remaining.to_string();
            let told = headers(&answer);
            assert_eq!((told.get("limit"), told.get("remaining")), (Some(&"10"), Some(&left.as_str())), "{entries:?}");
        }
    }
}

#[tokio::test]
async fn every_policy_of_a_request_is_named_beside_the_metadata_that_was_asked_for() {
    let instance = Instance::of(2);
    let edge = edge(&instance, true);
    let answer = answer(&edge, &["open=down", "local=down", "closed=down", "open=down2", "error=down"]).await;
    let codes: Vec<_> = answer.statuses.iter().map(DescriptorStatus::code).collect();
    assert_eq!(codes, [Code::Ok, Code::Ok, Code::OverLimit, Code::Ok, Code::Ok]);
    let metadata = metadata(&answer);
    let names: Vec<_> = metadata.as_object().expect("an object").keys().collect();
    assert_eq!(names, ["descriptors", "domain", "on_store_failure", "rate_limiter_unavailable"]);
    assert_eq!(metadata["domain"], "d");
    assert_eq!(metadata["on_store_failure"], json!(["open", "local", "closed", "error"]));
    assert_eq!(metadata["rate_limiter_unavailable"], true);
}

#[tokio::test]
async fn as_json_the_policies_are_200_429_and_503() {
    let instance = Instance::of(2);
    let service =
        json::service(edge(&instance, false), Readiness::default(), 4_096, |_| true, Arc::new(PageGate::new(false)), 8);
    let ask = async |key: &str| {
        let body = format!(r#"{{"domain":"d","descriptors":[{{"entries":[{{"key":"{key}","value":"down"}}]}}]}}"#);
        let request = Request::post("/json").body(Body::from(body)).expect("a request");
        let answer = service.clone().oneshot(request).await.expect("an answer");
        let status = answer.status();
        let body = to_bytes(answer.into_body(), usize::MAX).await.expect("a body");
        (status, String::from_utf8(body.to_vec()).expect("text"))
    };
    let (status, body) = ask("error").await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
    assert!(body.contains("cannot be asked"), "{body}");
    for (key, expected) in
        [("open", StatusCode::OK), ("local", StatusCode::OK), ("closed", StatusCode::TOO_MANY_REQUESTS)]
    {
        let (status, body) = ask(key).await;
        assert_eq!(status, expected, "{body}");
        assert!(body.contains(&format!(r#""on_store_failure":["{key}"]"#)), "{body}");
    }
}

#[tokio::test]
async fn a_caller_without_time_is_answered_by_policy() {
    let instance = Instance::of(2);
    let edge = edge(&instance, false);
    let code = async |key: &str, patience: &str| {
        let mut call = tonic::Request::new(request(&[&format!("{key}=up")]));
        call.metadata_mut().insert("grpc-timeout", patience.parse().expect("a value"));
        edge.should_rate_limit(call.map(grpc::message)).await.map(|answer| answer.into_inner().overall_code)
    };
    // Under overload `error` and `open` are `local`, which admits the first hit of each.
    assert_eq!(code("error", "4m").await.expect("an answer"), i32::from(Code::Ok));
    assert_eq!(code("open", "4m").await.expect("an answer"), i32::from(Code::Ok));
    assert_eq!(code("closed", "4m").await.expect("an answer"), i32::from(Code::OverLimit));
    assert!(instance.store.budgets.lock().is_empty(), "the store is not called");
    assert_eq!(code("error", "20m").await.expect("an answer"), i32::from(Code::Ok));
    assert_eq!(*instance.store.budgets.lock(), vec![Duration::from_millis(10)]);
}
