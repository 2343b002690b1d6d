//! The bound on a request: up to it, each limit decides, and beyond it the domain alone.

use std::sync::Arc;

use tidegate::edge::answer::Answers;
use tidegate::edge::grpc::Edge;
use tidegate::edge::message::{LARGEST_MESSAGE, MOST_ENTRIES};
use tidegate::limiter::{CallerTime, Limiter};
use tidegate::model::Micros;
use tidegate::proto::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use tidegate::proto::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::{Entry, RateLimitOverride};
use tidegate::proto::envoy::service::ratelimit::v3::rate_limit_response::Code;
use tidegate::proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use tidegate::rulefile::{Options, load};
use tidegate::rules::live::LiveRules;
use tidegate::store::memory::Memory;
use tidegate::telemetry::Telemetry;

use crate::grpc;
use crate::world::{HandClock, NOON, file, guard};

mod served;

/// A limit that no request here reaches, two limits of one descriptor, a list, and nothing that can refuse.
const RULES: [&str; 2] = [
    "domain: limits
descriptors:
  - { key: user, rate_limit: { unit: year, requests_per_unit: 1000000 } }
  - { key: exempt, exempt: true }
  - key: two
    rate_limits:
      - { unit: hour, requests_per_unit: 100000 }
      - { unit: day, requests_per_unit: 200000 }
",
    "domain: watches
descriptors:
  - { key: user, shadow_mode: true, rate_limit: { unit: year, requests_per_unit: 1000000 } }
",
];

fn edge(options: Options) -> Edge {
    let clock = HandClock::at(NOON);
    let files = RULES.map(|rules| file("rules.yaml", rules));
    let loaded = load(&files, options).unwrap_or_else(|invalid| panic!("{invalid}"));
    let store = Memory::new(Arc::clone(&clock) as Arc<_>, 10_000);
    let limiter = Limiter::new(Arc::new(LiveRules::new(loaded.rules)), Arc::new(guard(Arc::new(store), 1)));
    let answers = Answers { decision_metadata: true, ..Answers::default() };
    Edge::new(Arc::new(limiter), Arc::new(answers), Arc::new(Telemetry::new(0.8, Micros::ZERO)), 0)
}

async fn answer(edge: &Edge, request: RateLimitRequest) -> RateLimitResponse {
    edge.decide_message(grpc::message(request), None, CallerTime::default(), None).await.expect("it is valid")
}

fn descriptors(key: &str, count: usize) -> Vec<RateLimitDescriptor> {
    vec![grpc::descriptor(&[(key, "v")]); count]
}

/// Returns the number of statuses, and the origin of the decision.
fn told(answer: &RateLimitResponse) -> (usize, String) {
    use prost_types::value::Kind;
    let decision = answer.dynamic_metadata.as_ref().and_then(|metadata| metadata.fields["decision"].kind.clone());
    let Some(Kind::StructValue(decision)) = decision else { panic!("there is a decision") };
    let Some(Kind::StringValue(origin)) = decision.fields["provenance"].kind.clone() else {
        panic!("it has an origin")
    };
    (answer.statuses.len(), origin)
}

#[tokio::test]
async fn a_request_with_a_thousand_charges_is_decided_by_its_limits_and_one_with_more_by_its_domain() {
    let edge = edge(Options::default());
    for (key, most) in [("user", 1_000), ("two", 500)] {
        let within = answer(&edge, grpc::request("limits", descriptors(key, most))).await;
        assert_eq!((within.overall_code(), told(&within)), (Code::Ok, (most, "store".to_owned())), "{key}");
        let beyond = answer(&edge, grpc::request("limits", descriptors(key, most + 1))).await;
        assert_eq!((beyond.overall_code(), told(&beyond)), (Code::OverLimit, (0, "too_large".to_owned())), "{key}");
        // Nothing of it was charged.
        let after = answer(&edge, grpc::request("limits", descriptors(key, 1))).await;
        let limit = if key == "user" { 1_000_000 } else { 100_000 };
        assert_eq!(after.statuses[0].limit_remaining, limit - u32::try_from(most + 1).unwrap(), "{key}");
    }
    let page = edge.telemetry().page();
    assert!(page.contains("tidegate_calls_limited_total{cause=\"too_large\"} 2\n"), "{page}");
}

#[tokio::test]
async fn descriptors_without_a_charge_do_not_count_up_to_ten_thousand() {
    let edge = edge(Options::default());
    for (what, most) in [
        ("descriptors of no rule", descriptors("none", MOST_ENTRIES)),
        ("descriptors without entries", vec![RateLimitDescriptor::default(); MOST_ENTRIES]),
        ("entries", vec![RateLimitDescriptor { entries: vec![Entry::default(); 100], ..Default::default() }; 100]),
    ] {
        let within = answer(&edge, grpc::request("limits", most.clone())).await;
        assert_eq!((within.overall_code(), within.statuses.len()), (Code::Ok, most.len()), "{what}");
        let beyond = [most, descriptors("none", 1)].concat();
        let beyond = answer(&edge, grpc::request("limits", beyond)).await;
        assert_eq!((beyond.overall_code(), told(&beyond)), (Code::OverLimit, (0, "too_large".to_owned())), "{what}");
    }
    // A list decides before the charges are counted, and not beyond the bound on entries.
    let exempt = |others| [descriptors("exempt", 1), descriptors("user", others)].concat();
    for (others, expected) in [(2_000, Code::Ok), (MOST_ENTRIES, Code::OverLimit)] {
        assert_eq!(answer(&edge, grpc::request("limits", exempt(others))).await.overall_code(), expected);
    }
}

#[tokio::test]
async fn beyond_the_bound_a_request_is_refused_exactly_where_something_can_refuse_it() {
    let limit = RateLimitOverride { requests_per_unit: 5, unit: 3, unit_multiplier: None };
    let own = |count| vec![RateLimitDescriptor { limit: Some(limit), ..grpc::descriptor(&[("none", "v")]) }; count];
    let bytes = |limit| {
        let long = RateLimitDescriptor { limit, ..grpc::descriptor(&[("user", vec![b'v'; LARGEST_MESSAGE])]) };
        vec![long]
    };
    for (domain, descriptors, expected) in [
        ("limits", descriptors("user", 1_001), Code::OverLimit),
        ("limits", bytes(None), Code::OverLimit),
        ("watches", descriptors("user", 1_001), Code::Ok),
        ("watches", descriptors("user", 10_001), Code::Ok),
        ("watches", bytes(None), Code::Ok),
        ("watches", own(1_001), Code::OverLimit),
        ("watches", own(10_001), Code::OverLimit),
        ("watches", bytes(Some(limit)), Code::OverLimit),
        ("unknown", own(10_001), Code::Ok),
        ("unknown", descriptors("user", 1_001), Code::Ok),
    ] {
        for shadow_mode in [false, true] {
            let edge = edge(Options { shadow_mode, ..Options::default() });
            let answer = answer(&edge, grpc::request(domain, descriptors.clone())).await;
            let expected = if shadow_mode { Code::Ok } else { expected };
            assert_eq!(answer.overall_code(), expected, "{domain}, {} descriptors", descriptors.len());
        }
    }
}
