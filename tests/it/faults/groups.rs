//! Several limits in one `rate_limits` on one Redis and on two: what one of them refuses is not counted by the others.

use tidegate::proto::envoy::service::ratelimit::v3::RateLimitRequest;
use tidegate::proto::envoy::service::ratelimit::v3::rate_limit_response::Code as Outcome;

use super::{Asker, request, rule_file, tidegate_with};
use crate::redis::Single;
use crate::support::eventually;

/// Two hits fit into the year, and never into the second.
const RULES: &str = "domain: d
descriptors:
  - key: asks
    remember_refusals: false
    rate_limits: [{ unit: second, requests_per_unit: 1 }, { unit: year, requests_per_unit: 1000 }]
  - key: remembers
    rate_limits: [{ unit: year, requests_per_unit: 1000, algorithm: gcra }, { unit: second, requests_per_unit: 1 }]
  - key: leases
    rate_limits:
      - { unit: second, requests_per_unit: 1, lease: off }
      - { unit: year, requests_per_unit: 1000, algorithm: token_bucket, lease: { share: 50% } }
  - key: keeps
    rate_limits:
      - { unit: second, requests_per_unit: 1 }
      - { unit: year, requests_per_unit: 1000, count_refused: true }
  - { key: single, rate_limit: { unit: year, requests_per_unit: 1000 } }
  - { key: three, rate_limits: [{ unit: year, requests_per_unit: 10 }, { unit: month, requests_per_unit: 2 }] }
";
const REFUSED: u64 = 40;

fn two_hits(descriptors: &[&str]) -> RateLimitRequest {
    let mut all = request("none", "none");
    all.descriptors = descriptors.iter().flat_map(|key| request(key, "a").descriptors).collect();
    all.descriptors.iter_mut().for_each(|descriptor| descriptor.hits_addend = Some(2));
    all
}

/// The hits that stand on the counter of a year.
async fn hits(redis: &Single, key: &str, algorithm: &str) -> u64 {
    let found = redis.cli(&["KEYS", &format!("*|{key}=a}}{algorithm}:365d")]).await;
    match found.lines().next().filter(|found| !found.is_empty()) {
        None => 0,
        Some(name) => {
            // The second number is the count of a window, or the level of a meter.
            let numbers = redis.counter(name).await;
            numbers.split(' ').nth(1).and_then(|number| number.parse().ok()).expect("a number")
        }
    }
}

#[tokio::test]
async fn what_one_limit_of_a_list_refuses_is_not_counted_by_the_others_on_one_server_or_two() {
    for has_two in [false, true] {
        let (redis, other, rules) = (Single::start(&[]).await, Single::start(&[]).await, rule_file(RULES));
        let (url, other_url) = (redis.address().to_string(), other.address().to_string());
        let mut variables = vec![("REDIS_URL", url.as_str()), ("STORE_DEADLINE", "10s")];
        if has_two {
            variables.extend([("REDIS_PERSECOND", "true"), ("REDIS_PERSECOND_URL", other_url.as_str())]);
        }
        let server = tidegate_with(rules.path(), &variables).await;
        let mut asker = Asker::of(&server).await;
        let asked = two_hits(&["asks", "remembers", "leases", "keeps", "single", "three"]);
        for number in 1..=REFUSED {
            let answer = asker.request(asked.clone()).await.expect("no error");
            assert_eq!(answer.overall_code(), Outcome::OverLimit);
            let codes: Vec<_> = answer.statuses.iter().map(|status| status.code()).collect();
            let three = if number == 1 { Outcome::Ok } else { Outcome::OverLimit };
            let refused = Outcome::OverLimit;
            assert_eq!(codes, [refused, refused, refused, refused, Outcome::Ok, three]);
        }
        for (key, algorithm) in [("asks", "fixed_window"), ("remembers", "gcra"), ("leases", "token_bucket")] {
            eventually("all is given back", async || (hits(&redis, key, algorithm).await == 0).then_some(())).await;
        }
        assert_eq!(hits(&redis, "keeps", "fixed_window").await, 2 * REFUSED, "on two servers: {has_two}");
        assert_eq!(hits(&redis, "single", "fixed_window").await, 2 * REFUSED);
        assert_eq!(hits(&redis, "three", "fixed_window").await, 2, "the month is used up after the first");
    }
}
