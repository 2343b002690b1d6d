//! The Retry-After of a request that several limits refuse.

use envoy_types::pb::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use envoy_types::pb::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::Entry;
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_response::Code;
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_service_client::RateLimitServiceClient;
use envoy_types::pb::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use tonic::transport::Channel;

use crate::support::{Tidegate, in_time};

/// Limits of one hit, which take an hour or a day to let the next one pass, whatever the time of day.
const RULES: &str = "domain: edge
descriptors:
  - { key: hour, rate_limit: { unit: hour, requests_per_unit: 1, algorithm: gcra } }
  - { key: day, rate_limit: { unit: day, requests_per_unit: 1, algorithm: gcra } }
  - { key: quota-hour, quota_mode: true, rate_limit: { unit: hour, requests_per_unit: 1, algorithm: gcra } }
  - { key: quota-day, quota_mode: true, rate_limit: { unit: day, requests_per_unit: 1, algorithm: gcra } }
  - { key: hidden-day, expose: false, rate_limit: { unit: day, requests_per_unit: 1, algorithm: gcra } }
  - { key: hidden-quota, expose: false, quota_mode: true, rate_limit: { unit: hour, requests_per_unit: 1, algorithm: gcra } }
";
const HOUR_S: u64 = 3_600;
const DAY_S: u64 = 24 * HOUR_S;

async fn ask(client: &mut RateLimitServiceClient<Channel>, keys: &[&str], user: &str) -> RateLimitResponse {
    let descriptor = |key: &&str| RateLimitDescriptor {
        entries: vec![Entry { key: (*key).to_owned(), value: user.to_owned() }],
        ..RateLimitDescriptor::default()
    };
    let descriptors = keys.iter().map(descriptor).collect();
    let request = RateLimitRequest { domain: "edge".to_owned(), descriptors, hits_addend: 0 };
    in_time("it is answered", client.should_rate_limit(request)).await.expect("no error").into_inner()
}

/// The header of a refusal, in seconds.
fn retry_after(answer: &RateLimitResponse) -> Option<u64> {
    assert_eq!(answer.overall_code(), Code::OverLimit, "{answer:?}");
    let header = answer.response_headers_to_add.iter().find(|header| header.key == "retry-after")?;
    Some(header.value.parse().expect("seconds"))
}

/// What each of these limits, asked for twice, says the second time.
async fn told(keys: &[&str]) -> Option<u64> {
    let rules = tempfile::Builder::new().suffix(".yaml").tempfile().expect("a file");
    std::fs::write(rules.path(), RULES).expect("it is written");
    let server = Tidegate::start(rules.path(), &[("RESPONSE_HEADERS", "ietf")]).await;
    let client = RateLimitServiceClient::connect(format!("http://{}", server.grpc)).await;
    let mut client = client.expect("the server answers");
    let told = async |client: &mut RateLimitServiceClient<Channel>, keys: &[&str], user: &str| {
        assert_eq!(ask(client, keys, user).await.overall_code(), Code::Ok);
        retry_after(&ask(client, keys, user).await)
    };
    let first = told(&mut client, keys, "first").await;
    let turned: Vec<&str> = keys.iter().rev().copied().collect();
    let second = told(&mut client, &turned, "second").await;
    assert_eq!(first.map(nearly), second.map(nearly), "the order of the descriptors means nothing");
    first.map(nearly)
}

/// A number of seconds without the moment that has passed since the first hit.
fn nearly(seconds: u64) -> u64 {
    seconds.next_multiple_of(60)
}

#[tokio::test]
async fn of_several_limits_that_refuse_the_longest_wait_is_told() {
    assert_eq!(told(&["hour"]).await, Some(HOUR_S));
    assert_eq!(told(&["hour", "day"]).await, Some(DAY_S));
    assert_eq!(told(&["hour", "quota-day"]).await, Some(HOUR_S), "a quota does not refuse beside a limit");
}

#[tokio::test]
async fn of_quotas_the_shortest_wait_is_told_for_one_with_room_is_enough() {
    assert_eq!(told(&["quota-hour", "quota-day"]).await, Some(HOUR_S));
}

#[tokio::test]
async fn what_a_rule_that_is_not_exposed_would_say_is_not_told() {
    assert_eq!(told(&["hidden-day"]).await, None);
    assert_eq!(told(&["hour", "hidden-day"]).await, None, "an hour would be wrong, and a day is not to be known");
    assert_eq!(told(&["hidden-quota", "quota-day"]).await, Some(DAY_S));
}
