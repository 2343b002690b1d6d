//! The protocol as others generate it: every field in both directions, and health.

use std::collections::BTreeMap;

use envoy_types::pb::envoy::config::core::v3::HeaderValue as TheirHeader;
use envoy_types::pb::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor as TheirDescriptor;
use envoy_types::pb::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::{
    Entry as TheirEntry, RateLimitOverride as TheirOverride,
};
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_response::rate_limit::Unit;
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_response::{
    Code, DescriptorStatus as TheirStatus, RateLimit as TheirLimit,
};
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_service_client::RateLimitServiceClient;
use envoy_types::pb::envoy::service::ratelimit::v3::{
    RateLimitRequest as TheirRequest, RateLimitResponse as TheirResponse,
};
use envoy_types::pb::envoy::r#type::v3::RateLimitUnit;
use envoy_types::pb::google::protobuf::value::Kind;
use envoy_types::pb::google::protobuf::{Duration as TheirDuration, Struct, UInt64Value, Value};
use proptest::prelude::*;
use prost::Message;
use tidegate::proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use tonic::transport::Channel;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

use crate::support::{Tidegate, in_time};

const DAY_S: i64 = 86_400;

const RULES: &str = "domain: d
descriptors:
  - key: plan
    value: free
    metadata: { owner: team-a, tier: 2 }
    rate_limit: { unit: week, requests_per_unit: 2, name: weekly }
  - { key: long, rate_limit: { unit: minute, unit_multiplier: 15, requests_per_unit: 9 } }
  - { key: day, rate_limit: { unit: day, requests_per_unit: 10 } }
  - { key: free, rate_limit: { unlimited: true } }
";

async fn server() -> Tidegate {
    let rules = tempfile::Builder::new().suffix(".yaml").tempfile().expect("a file");
    std::fs::write(rules.path(), RULES).expect("it is written");
    let variables = [("RESPONSE_DYNAMIC_METADATA", "true"), ("LIMIT_RESPONSE_HEADERS_ENABLED", "true")];
    Tidegate::start(rules.path(), &variables).await
}

async fn channel(server: &Tidegate) -> Channel {
    let endpoint = Channel::from_shared(format!("http://{}", server.grpc)).expect("an address");
    in_time("the server is there", endpoint.connect()).await.expect("it takes connections")
}

async fn ask(channel: &Channel, request: TheirRequest) -> TheirResponse {
    let mut client = RateLimitServiceClient::new(channel.clone());
    in_time("it is answered", client.should_rate_limit(request)).await.expect("it is no error").into_inner()
}

fn request(descriptors: Vec<TheirDescriptor>) -> TheirRequest {
    TheirRequest { domain: "d".to_owned(), descriptors, hits_addend: 0 }
}

fn descriptor(entries: &[(&str, &str)]) -> TheirDescriptor {
    let entry = |(key, value): &(&str, &str)| TheirEntry { key: (*key).to_owned(), value: (*value).to_owned() };
    TheirDescriptor { entries: entries.iter().map(entry).collect(), ..TheirDescriptor::default() }
}

fn hits(entries: &[(&str, &str)], hits: u64) -> TheirDescriptor {
    TheirDescriptor { hits_addend: Some(UInt64Value { value: hits }), ..descriptor(entries) }
}

#[tokio::test]
async fn a_client_of_other_types_reads_every_field_of_an_answer() {
    let server = server().await;
    let channel = channel(&server).await;
    let asked = || {
        request(vec![
            descriptor(&[("plan", "free")]),
            descriptor(&[("long", "a")]),
            descriptor(&[("free", "")]),
            descriptor(&[("nobody", "")]),
        ])
    };
    let weekly = TheirLimit { name: "weekly".to_owned(), requests_per_unit: 2, unit: Unit::Week.into() };
    // The multiplier is younger than these types, which pass over it.
    let long = TheirLimit { name: String::new(), requests_per_unit: 9, unit: Unit::Minute.into() };
    for (overall, left) in [(Code::Ok, 1), (Code::Ok, 0), (Code::OverLimit, 0)] {
        let answer = ask(&channel, asked()).await;
        assert_eq!(answer.overall_code(), overall);
        let [plan, fifteen, free, nobody] = answer.statuses.as_slice() else { panic!("{answer:?}") };
        assert_eq!(plan.code(), overall);
        assert_eq!(plan.current_limit.as_ref(), Some(&weekly));
        assert_eq!(plan.limit_remaining, left);
        let until = plan.duration_until_reset.expect("the end of the week");
        assert!((1..=7 * DAY_S).contains(&until.seconds) && until.nanos == 0, "{until:?}");
        assert_eq!(fifteen.code(), Code::Ok);
        assert_eq!(fifteen.current_limit.as_ref(), Some(&long));
        let until = fifteen.duration_until_reset.expect("the end of the quarter");
        assert!((1..=900).contains(&until.seconds) && until.nanos == 0, "{until:?}");
        assert_eq!((free.code(), free.limit_remaining, &free.current_limit), (Code::Ok, u32::MAX, &None));
        assert_eq!(*nobody, TheirStatus { code: Code::Ok.into(), ..TheirStatus::default() });
        for status in &answer.statuses {
            assert_eq!(status.quota, None);
        }

        let headers: BTreeMap<_, _> =
            answer.response_headers_to_add.iter().map(|header| (header.key.as_str(), header.value.as_str())).collect();
        let seconds = plan.duration_until_reset.expect("as above").seconds.to_string();
        let expected =
            [("RateLimit-Limit", "2"), ("RateLimit-Remaining", &left.to_string()), ("RateLimit-Reset", &seconds)];
        assert_eq!(headers, BTreeMap::from(expected));
        assert!(answer.response_headers_to_add.iter().all(|header| header.raw_value.is_empty()));
        assert_eq!(answer.request_headers_to_add, []);
        assert_eq!((answer.raw_body.as_slice(), &answer.quota), (&b""[..], &None));

        let metadata = plain(&object(answer.dynamic_metadata.expect("it is asked for")));
        let mut expected = r#"{"descriptors": [{"entries": ["plan=free"]}, {"entries": ["long=a"]}, {"entries": ["free="]}, {"entries": ["nobody="]}], "domain": "d""#.to_owned();
        if overall == Code::Ok {
            expected += r#", "metadata": {"owner": "team-a", "tier": 2}"#;
        }
        assert_eq!(metadata, expected + "}");
    }
}

pub fn object(object: Struct) -> Value {
    Value { kind: Some(Kind::StructValue(object)) }
}

/// A value of the protocol as text, its names in order.
pub fn plain(value: &Value) -> String {
    match value.kind.as_ref().expect("a value has a kind") {
        Kind::NullValue(_) => "null".to_owned(),
        Kind::NumberValue(number) => number.to_string(),
        Kind::StringValue(text) => format!("{text:?}"),
        Kind::BoolValue(flag) => flag.to_string(),
        Kind::ListValue(list) => format!("[{}]", list.values.iter().map(plain).collect::<Vec<_>>().join(", ")),
        Kind::StructValue(object) => {
            let mut fields: Vec<_> = object.fields.iter().collect();
            fields.sort_by_key(|(name, _)| *name);
            let fields = fields.into_iter().map(|(name, value)| format!("{name:?}: {}", plain(value)));
            format!("{{{}}}", fields.collect::<Vec<_>>().join(", "))
        }
    }
}

#[tokio::test]
async fn a_client_of_other_types_says_what_its_request_costs() {
    let server = server().await;
    let channel = channel(&server).await;
    let day = [("day", "a")];
    let back = TheirDescriptor { is_negative_hits: true, ..hits(&day, 3) };
    let by_request = |hits_addend| TheirRequest { hits_addend, ..request(vec![descriptor(&day)]) };
    for (what, asked, code, left) in [
        ("without a number it costs one", by_request(0), Code::Ok, 9),
        ("the request's number", by_request(4), Code::Ok, 5),
        (
            "the descriptor's before the request's",
            TheirRequest { hits_addend: 4, ..request(vec![hits(&day, 2)]) },
            Code::Ok,
            3,
        ),
        ("a nought that is there looks", TheirRequest { hits_addend: 4, ..request(vec![hits(&day, 0)]) }, Code::Ok, 3),
        ("a nought that is there looks again", request(vec![hits(&day, 0)]), Code::Ok, 3),
        ("hits given back", request(vec![back]), Code::Ok, 6),
        ("more than there is", request(vec![hits(&day, 7)]), Code::OverLimit, 0),
    ] {
        let answer = ask(&channel, asked).await;
        assert_eq!((answer.overall_code(), answer.statuses[0].limit_remaining), (code, left), "{what}");
    }
}

#[tokio::test]
async fn a_client_of_other_types_sends_a_limit_of_its_own() {
    let server = server().await;
    let channel = channel(&server).await;
    for (sent, told, length_s) in [
        (RateLimitUnit::Second as i32, Unit::Second, 1),
        (RateLimitUnit::Minute as i32, Unit::Minute, 60),
        (RateLimitUnit::Hour as i32, Unit::Hour, 3_600),
        (RateLimitUnit::Day as i32, Unit::Day, DAY_S),
        // Younger than these types.
        (7, Unit::Week, 7 * DAY_S),
        (RateLimitUnit::Month as i32, Unit::Month, 30 * DAY_S),
        (RateLimitUnit::Year as i32, Unit::Year, 365 * DAY_S),
    ] {
        let limit = TheirOverride { requests_per_unit: 1_000, unit: sent };
        let asked = TheirDescriptor { limit: Some(limit), ..descriptor(&[("plan", "free")]) };
        let answer = ask(&channel, request(vec![asked])).await;
        let status = &answer.statuses[0];
        let expected = TheirLimit { name: String::new(), requests_per_unit: 1_000, unit: told.into() };
        assert_eq!(status.current_limit.as_ref(), Some(&expected), "{told:?}");
        assert_eq!(status.limit_remaining, 999, "{told:?}");
        let until = status.duration_until_reset.expect("the end of the window").seconds;
        assert!((1..=length_s).contains(&until), "{told:?}: {until}");
    }
}

/// What these types do not know yet, by the numbers of the protocol's own text.
#[test]
fn the_youngest_fields_have_the_numbers_of_the_protocol() {
    let bytes = vec![
        0x0a, 1, b'd', // 1: the domain
        0x12, 22, // 2: a descriptor
        0x0a, 6, 0x0a, 1, b'k', 0x12, 1, b'v', // 1: an entry, of 1: key and 2: value
        0x12, 8, 0x08, 5, 0x10, 2, 0x1a, 2, 0x08, 15, // 2: a limit, of 1: requests, 2: unit and 3: multiplier
        0x1a, 0, // 3: hits, which are there and nought
        0x20, 1, // 4: to be given back
        0x18, 7, // 3: the request's hits
    ];
    let read = RateLimitRequest::decode(bytes.as_slice()).expect("a request");
    assert_eq!((read.domain.as_str(), read.hits_addend), ("d", 7));
    let [descriptor] = read.descriptors.as_slice() else { panic!("{read:?}") };
    let limit = descriptor.limit.as_ref().expect("a limit");
    assert_eq!((limit.requests_per_unit, limit.unit, limit.unit_multiplier), (5, 2, Some(15)));
    assert_eq!((descriptor.hits_addend, descriptor.is_negative_hits), (Some(0), true));
    assert_eq!((&descriptor.entries[0].key[..], &descriptor.entries[0].value[..]), (&b"k"[..], &b"v"[..]));
    assert_eq!(read.encode_to_vec(), bytes);
}

/// The request for one descriptor of this entry, in our types.
fn asked_of(key: &str, value: &str) -> RateLimitRequest {
    let asked = request(vec![descriptor(&[(key, value)])]).encode_to_vec();
    RateLimitRequest::decode(asked.as_slice()).expect("the same request")
}

/// The limit in the answer to a request, as it is encoded: younger than the other types.
async fn limit_of(asked: RateLimitRequest) -> Vec<u8> {
    use tidegate::proto::envoy::service::ratelimit::v3::rate_limit_service_client::RateLimitServiceClient;
    let server = server().await;
    let mut client = RateLimitServiceClient::new(channel(&server).await);
    let answer = in_time("it is answered", client.should_rate_limit(asked)).await.expect("it is no error").into_inner();
    answer.statuses[0].current_limit.as_ref().expect("a limit").encode_to_vec()
}

#[tokio::test]
async fn a_multiplied_unit_is_told_by_its_number() {
    let limit = limit_of(asked_of("long", "a")).await;
    // 1: nine, 2: minutes, 4: of which fifteen.
    assert_eq!(limit, [0x08, 9, 0x10, 2, 0x22, 2, 0x08, 15]);
}

#[tokio::test]
async fn a_limit_that_is_sent_may_multiply_its_unit() {
    let mut asked = asked_of("plan", "free");
    // 1: nine, 2: minutes, 3: of which fifteen.
    let limit = [0x08, 9, 0x10, 2, 0x1a, 2, 0x08, 15];
    asked.descriptors[0].limit = Some(Message::decode(&limit[..]).expect("a limit"));
    let limit = limit_of(asked).await;
    assert_eq!(limit, [0x08, 9, 0x10, 2, 0x22, 2, 0x08, 15]);
}

#[tokio::test]
async fn health_is_told_under_every_name() {
    let server = server().await;
    let mut client = HealthClient::new(channel(&server).await);
    for name in ["", "ratelimit", "envoy.service.ratelimit.v3.RateLimitService"] {
        let asked = HealthCheckRequest { service: name.to_owned() };
        let answer = in_time("it is answered", client.check(asked)).await.expect("it is known").into_inner();
        assert_eq!(answer.status(), tonic_health::pb::health_check_response::ServingStatus::Serving, "{name:?}");
    }
    let asked = HealthCheckRequest { service: "nobody".to_owned() };
    let refused = in_time("it is answered", client.check(asked)).await.expect_err("it is unknown");
    assert_eq!(refused.code(), tonic::Code::NotFound);
}

fn their_request() -> impl Strategy<Value = TheirRequest> {
    let entry = (".{0,8}", ".{0,8}").prop_map(|(key, value)| TheirEntry { key, value });
    let limit =
        (any::<u32>(), any::<i32>()).prop_map(|(requests_per_unit, unit)| TheirOverride { requests_per_unit, unit });
    let hits = prop::option::of(prop_oneof![Just(0), any::<u64>()].prop_map(|value| UInt64Value { value }));
    let descriptor = (prop::collection::vec(entry, 0..4), prop::option::of(limit), hits, any::<bool>()).prop_map(
        |(entries, limit, hits_addend, is_negative_hits)| TheirDescriptor {
            entries,
            limit,
            hits_addend,
            is_negative_hits,
        },
    );
    (".{0,8}", prop::collection::vec(descriptor, 0..4), any::<u32>())
        .prop_map(|(domain, descriptors, hits_addend)| TheirRequest { domain, descriptors, hits_addend })
}

/// An answer; a map of several names has no order on the wire, so its metadata has one at most.
fn their_response() -> impl Strategy<Value = TheirResponse> {
    let header = || {
        let header = (".{0,8}", ".{0,8}", prop::collection::vec(any::<u8>(), 0..4));
        let header = header.prop_map(|(key, value, raw_value)| TheirHeader { key, value, raw_value });
        prop::collection::vec(header, 0..3)
    };
    let limit = (".{0,8}", any::<u32>(), 0..8).prop_map(|(name, requests_per_unit, unit)| TheirLimit {
        name,
        requests_per_unit,
        unit,
    });
    let duration = (any::<i64>(), any::<i32>()).prop_map(|(seconds, nanos)| TheirDuration { seconds, nanos });
    let status = (0..3, prop::option::of(limit), any::<u32>(), prop::option::of(duration)).prop_map(
        |(code, current_limit, limit_remaining, duration_until_reset)| TheirStatus {
            code,
            current_limit,
            limit_remaining,
            duration_until_reset,
            quota: None,
        },
    );
    let kind = prop_oneof![
        Just(Kind::NullValue(0)),
        any::<bool>().prop_map(Kind::BoolValue),
        any::<f64>().prop_map(Kind::NumberValue),
        ".{0,8}".prop_map(Kind::StringValue),
    ];
    let metadata = prop::option::of((".{0,8}", kind)).prop_map(|field| {
        field.map(|(name, kind)| Struct { fields: [(name, Value { kind: Some(kind) })].into_iter().collect() })
    });
    let body = prop::collection::vec(any::<u8>(), 0..8);
    (0..3, prop::collection::vec(status, 0..4), header(), header(), body, metadata).prop_map(
        |(overall_code, statuses, response_headers_to_add, request_headers_to_add, raw_body, dynamic_metadata)| {
            TheirResponse {
                overall_code,
                statuses,
                response_headers_to_add,
                request_headers_to_add,
                raw_body,
                dynamic_metadata,
                quota: None,
            }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn a_request_is_the_same_bytes_in_both_families_of_types(theirs in their_request()) {
        let bytes = theirs.encode_to_vec();
        let ours = RateLimitRequest::decode(bytes.as_slice()).expect("a request");
        prop_assert_eq!(ours.encode_to_vec(), bytes);
        prop_assert_eq!(&ours.domain, &theirs.domain);
        prop_assert_eq!(ours.hits_addend, theirs.hits_addend);
        prop_assert_eq!(ours.descriptors.len(), theirs.descriptors.len());
        for (ours, theirs) in ours.descriptors.iter().zip(&theirs.descriptors) {
            let entries = |key: &[u8], value: &[u8]| (key.to_vec(), value.to_vec());
            prop_assert_eq!(
                ours.entries.iter().map(|entry| entries(&entry.key, &entry.value)).collect::<Vec<_>>(),
                theirs.entries.iter().map(|entry| entries(entry.key.as_bytes(), entry.value.as_bytes())).collect::<Vec<_>>()
            );
            prop_assert_eq!(
                ours.limit.as_ref().map(|sent| (sent.requests_per_unit, sent.unit)),
                theirs.limit.as_ref().map(|sent| (sent.requests_per_unit, sent.unit))
            );
            prop_assert_eq!(ours.hits_addend, theirs.hits_addend.as_ref().map(|hits| hits.value));
            prop_assert_eq!(ours.is_negative_hits, theirs.is_negative_hits);
        }
    }

    #[test]
    fn an_answer_is_the_same_bytes_in_both_families_of_types(theirs in their_response()) {
        let bytes = theirs.encode_to_vec();
        let ours = RateLimitResponse::decode(bytes.as_slice()).expect("an answer");
        prop_assert_eq!(ours.encode_to_vec(), &bytes[..]);
        prop_assert_eq!(TheirResponse::decode(ours.encode_to_vec().as_slice()).expect("an answer"), theirs);
    }
}
