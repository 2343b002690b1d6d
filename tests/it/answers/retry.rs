//! The Retry-After of a request that several limits refuse.

use tidegate::proto::envoy::service::ratelimit::v3::RateLimitResponse;
use tidegate::proto::envoy::service::ratelimit::v3::rate_limit_response::Code;

use super::Served;

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

/// The header of a refusal, in seconds.
fn retry_after(answer: &RateLimitResponse) -> Option<u64> {
    assert_eq!(answer.overall_code(), Code::OverLimit, "{answer:?}");
    let header = answer.response_headers_to_add.iter().find(|header| header.key == "retry-after")?;
    Some(header.value.parse().expect("seconds"))
}

/// The Retry-After of the second request for these keys, which is the same whatever their order.
async fn told(keys: &[&str]) -> Option<u64> {
    let mut served = Served::of(RULES, &[("RESPONSE_HEADERS", "ietf")]).await;
    let mut told = async |keys: &[&str], user: &str| {
        let entries: Vec<_> = keys.iter().map(|key| [(*key, user)]).collect();
        let descriptors: Vec<&[(&str, &str)]> = entries.iter().map(|entry| &entry[..]).collect();
        assert_eq!(served.ask_for(&descriptors).await.overall_code(), Code::Ok);
        retry_after(&served.ask_for(&descriptors).await).map(nearly)
    };
    let first = told(keys, "first").await;
    let turned: Vec<&str> = keys.iter().rev().copied().collect();
    assert_eq!(told(&turned, "second").await, first, "the order of the descriptors means nothing");
    first
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
