//! The protocol as it is published: every field in both directions, and health.
//!
//! `PUBLISHED` has the fields of Envoy 1.40 (`api/envoy/` of its repository), and the files in `proto/`, which have only the messages that are
//! needed, are compared with it. The clients here send and read messages of these files, in which keys and values of
//! entries are `string`. In the types of the service they are `bytes`. `tests/it/envoy.rs` has a real Envoy as client, and
//! `tests/it/conformance/replay.rs` answers of the reference.

use std::collections::BTreeSet;
use std::sync::LazyLock;

use proptest::prelude::*;
use prost::Message;
use prost_reflect::{DescriptorPool, DynamicMessage, MessageDescriptor, SerializeOptions};
use prost_types::value::Kind;
use prost_types::{Any, Duration, Struct};
use serde_json::{Value, json};
use tidegate::proto::DESCRIPTORS;
use tidegate::proto::envoy::config::core::v3::{HeaderValue, Node};
use tidegate::proto::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use tidegate::proto::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::{Entry, RateLimitOverride};
use tidegate::proto::envoy::service::discovery::v3::{DiscoveryRequest, DiscoveryResponse};
use tidegate::proto::envoy::service::ratelimit::v3::rate_limit_response::{DescriptorStatus, RateLimit};
use tidegate::proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use tidegate::proto::google::rpc::Status;
use tonic::transport::Channel;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

use crate::support::{Tidegate, in_time, rule_file};
use crate::undecided::{Caller, framed};

/// Each message and enumeration with its fields and values, in the words of the published files.
const PUBLISHED: &str = "\
envoy.config.core.v3.HeaderValue: string key = 1; string value = 2; bytes raw_value = 3
envoy.config.core.v3.Node: string id = 1; string cluster = 2; google.protobuf.Struct metadata = 3; string user_agent_name = 6; \
 string user_agent_version = 7
envoy.extensions.common.ratelimit.v3.RateLimitDescriptor: repeated Entry entries = 1; RateLimitOverride limit = 2; \
 google.protobuf.UInt64Value hits_addend = 3; bool is_negative_hits = 4
envoy.extensions.common.ratelimit.v3.RateLimitDescriptor.Entry: string key = 1; string value = 2
envoy.extensions.common.ratelimit.v3.RateLimitDescriptor.RateLimitOverride: uint32 requests_per_unit = 1; \
 envoy.type.v3.RateLimitUnit unit = 2; google.protobuf.UInt32Value unit_multiplier = 3
envoy.service.ratelimit.v3.RateLimitRequest: string domain = 1; \
 repeated envoy.extensions.common.ratelimit.v3.RateLimitDescriptor descriptors = 2; uint32 hits_addend = 3
envoy.service.ratelimit.v3.RateLimitResponse: Code overall_code = 1; repeated DescriptorStatus statuses = 2; \
 repeated envoy.config.core.v3.HeaderValue response_headers_to_add = 3; \
 repeated envoy.config.core.v3.HeaderValue request_headers_to_add = 4; bytes raw_body = 5; \
 google.protobuf.Struct dynamic_metadata = 6; Quota quota = 7
envoy.service.ratelimit.v3.RateLimitResponse.DescriptorStatus: Code code = 1; RateLimit current_limit = 2; uint32 limit_remaining = 3; \
 google.protobuf.Duration duration_until_reset = 4; Quota quota = 5
envoy.service.ratelimit.v3.RateLimitResponse.Quota: uint32 requests = 1; google.protobuf.Timestamp valid_until = 2; string id = 3
envoy.service.ratelimit.v3.RateLimitResponse.RateLimit: uint32 requests_per_unit = 1; RateLimit.Unit unit = 2; string name = 3; \
 google.protobuf.UInt32Value unit_multiplier = 4
envoy.service.ratelimit.v3.RateLimitResponse.Code: UNKNOWN = 0; OK = 1; OVER_LIMIT = 2
envoy.service.ratelimit.v3.RateLimitResponse.RateLimit.Unit: UNKNOWN = 0; SECOND = 1; MINUTE = 2; HOUR = 3; DAY = 4; MONTH = 5; \
 YEAR = 6; WEEK = 7
envoy.type.v3.RateLimitUnit: UNKNOWN = 0; SECOND = 1; MINUTE = 2; HOUR = 3; DAY = 4; MONTH = 5; YEAR = 6";

static FILES: LazyLock<DescriptorPool> = LazyLock::new(|| DescriptorPool::decode(DESCRIPTORS).expect("descriptors"));

#[test]
fn the_messages_in_proto_have_the_fields_of_the_published_protocol() {
    let line = |name: &str, parent: &str, mut fields: Vec<(u32, String)>| {
        fields.sort();
        // Messages inside of others have short names.
        let fields: Vec<_> = fields.into_iter().map(|(_, field)| field.replace(&format!("{parent}."), "")).collect();
        format!("{name}: {}", fields.join("; "))
    };
    let messages = FILES.all_messages().map(|message| {
        let fields = message.fields().map(|field| {
            let repeated = if field.is_list() { "repeated " } else { "" };
            (field.number(), format!("{repeated}{:?} {} = {}", field.kind(), field.name(), field.number()))
        });
        let outer = message.parent_message().unwrap_or_else(|| message.clone());
        line(message.full_name(), outer.full_name(), fields.collect())
    });
    let enumerations = FILES.all_enums().map(|values| {
        let of = values
            .values()
            .map(|value| (value.number().unsigned_abs(), format!("{} = {}", value.name(), value.number())));
        line(values.full_name(), "", of.collect())
    });
    let found: BTreeSet<_> = messages.chain(enumerations).filter(|line| line.starts_with("envoy.")).collect();
    assert_eq!(found.iter().map(String::as_str).collect::<Vec<_>>(), {
        let published: BTreeSet<_> = PUBLISHED.lines().collect();
        published.into_iter().collect::<Vec<_>>()
    });
}

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
    let variables = [("RESPONSE_DYNAMIC_METADATA", "true"), ("LIMIT_RESPONSE_HEADERS_ENABLED", "true")];
    Tidegate::start(rule_file(RULES).path(), &variables).await
}

fn message(name: &str) -> MessageDescriptor {
    FILES.get_message_by_name(&format!("envoy.service.ratelimit.v3.{name}")).expect("it is in proto/")
}

/// A request of the published protocol.
fn published(request: Value) -> DynamicMessage {
    DynamicMessage::deserialize(message("RateLimitRequest"), request).expect("a request")
}

/// Sends a request of the published protocol. Returns the answer with the fields that are not set.
async fn ask(caller: &Caller, request: Value) -> Value {
    let answer = caller.ask(&[], framed(0, &published(request).encode_to_vec())).await;
    assert_eq!(answer.status, 0, "{answer:?}");
    let answer = DynamicMessage::decode(message("RateLimitResponse"), &answer.body[5..]).expect("an answer");
    assert_eq!(answer.unknown_fields().count(), 0, "{answer:?}");
    let options = SerializeOptions::new().skip_default_fields(false);
    answer.serialize_with_options(serde_json::value::Serializer, &options).expect("JSON")
}

fn request(descriptors: &[Value]) -> Value {
    json!({ "domain": "d", "descriptors": descriptors })
}

fn descriptor(key: &str, value: &str) -> Value {
    json!({ "entries": [{ "key": key, "value": value }] })
}

/// An object with another field.
fn with(mut object: Value, name: &str, value: impl Into<Value>) -> Value {
    object[name] = value.into();
    object
}

/// The whole seconds of a duration, from 1 to `most`.
fn seconds(duration: &Value, most: i64) -> String {
    let seconds = duration.as_str().and_then(|text| text.strip_suffix('s')).expect("a duration");
    assert!(seconds.parse().is_ok_and(|seconds: i64| (1..=most).contains(&seconds)), "{duration}");
    seconds.to_owned()
}

#[tokio::test]
async fn a_client_of_the_published_protocol_reads_every_field_of_an_answer() {
    let server = server().await;
    let caller = Caller::connect(server.grpc).await;
    let asked = [("plan", "free"), ("long", "a"), ("free", ""), ("nobody", "")];
    for (overall, left) in [("OK", 1), ("OK", 0), ("OVER_LIMIT", 0)] {
        let answer = ask(&caller, request(&asked.map(|(key, value)| descriptor(key, value)))).await;
        let [plan, long] = [0, 1].map(|index| &answer["statuses"][index]);
        let (week, quarter) = (&plan["durationUntilReset"], &long["durationUntilReset"]);
        let reset = seconds(week, 7 * DAY_S);
        seconds(quarter, 900);
        let weekly = json!({ "requestsPerUnit": 2, "unit": "WEEK", "name": "weekly" });
        let fifteen = json!({ "requestsPerUnit": 9, "unit": "MINUTE", "name": "", "unitMultiplier": 15 });
        let header = |name: &str, value: &str| json!({ "key": name, "value": value, "rawValue": "" });
        let entries = asked.map(|(key, value)| json!({ "entries": [format!("{key}={value}")] }));
        let mut metadata = json!({ "descriptors": entries, "domain": "d" });
        if overall == "OK" {
            metadata["metadata"] = json!({ "owner": "team-a", "tier": 2.0 });
        }
        let expected = json!({
            "overallCode": overall,
            "statuses": [
                { "code": overall, "currentLimit": weekly, "limitRemaining": left, "durationUntilReset": week },
                { "code": "OK", "currentLimit": fifteen, "limitRemaining": long["limitRemaining"], "durationUntilReset": quarter },
                { "code": "OK", "limitRemaining": u32::MAX },
                { "code": "OK", "limitRemaining": 0 },
            ],
            "responseHeadersToAdd": [
                header("RateLimit-Limit", "2"),
                header("RateLimit-Remaining", &left.to_string()),
                header("RateLimit-Reset", &reset),
            ],
            "requestHeadersToAdd": [],
            "rawBody": "",
            "dynamicMetadata": metadata,
        });
        assert_eq!(answer, expected);
    }
}

/// Metadata of an answer.
pub fn json(object: Struct) -> Value {
    Value::Object(object.fields.into_iter().map(|(name, value)| (name, plain(value))).collect())
}

fn plain(value: prost_types::Value) -> Value {
    match value.kind {
        None | Some(Kind::NullValue(_)) => Value::Null,
        Some(Kind::NumberValue(number)) => json!(number),
        Some(Kind::StringValue(text)) => Value::String(text),
        Some(Kind::BoolValue(flag)) => Value::Bool(flag),
        Some(Kind::StructValue(object)) => json(object),
        Some(Kind::ListValue(list)) => list.values.into_iter().map(plain).collect(),
    }
}

#[tokio::test]
async fn a_client_of_the_published_protocol_says_what_its_request_costs() {
    let server = server().await;
    let caller = Caller::connect(server.grpc).await;
    let day = || descriptor("day", "a");
    let hits = |hits: u64| with(day(), "hitsAddend", hits);
    let by_request = |hits: u32, descriptor| with(request(&[descriptor]), "hitsAddend", hits);
    for (what, asked, code, left) in [
        ("without a number it costs one", by_request(0, day()), "OK", 9),
        ("the request's number", by_request(4, day()), "OK", 5),
        ("the descriptor's before the request's", by_request(4, hits(2)), "OK", 3),
        ("a nought that is there looks", by_request(4, hits(0)), "OK", 3),
        ("a nought that is there looks again", request(&[hits(0)]), "OK", 3),
        ("hits given back", request(&[with(hits(3), "isNegativeHits", true)]), "OK", 6),
        ("more than there is", request(&[hits(7)]), "OVER_LIMIT", 0),
    ] {
        let answer = ask(&caller, asked).await;
        assert_eq!(
            (&answer["overallCode"], &answer["statuses"][0]["limitRemaining"]),
            (&code.into(), &left.into()),
            "{what}"
        );
    }
}

#[tokio::test]
async fn a_client_of_the_published_protocol_sends_a_limit_of_its_own() {
    let server = server().await;
    let caller = Caller::connect(server.grpc).await;
    for (sent, told, multiplier, length_s) in [
        (json!("SECOND"), "SECOND", None, 1),
        (json!("MINUTE"), "MINUTE", None, 60),
        (json!("MINUTE"), "MINUTE", Some(15), 900),
        (json!("HOUR"), "HOUR", None, 3_600),
        (json!("DAY"), "DAY", None, DAY_S),
        // A value that this enumeration does not have.
        (json!(7), "WEEK", None, 7 * DAY_S),
        (json!("MONTH"), "MONTH", None, 30 * DAY_S),
        (json!("YEAR"), "YEAR", None, 365 * DAY_S),
    ] {
        let (mut limit, mut expected) = (
            json!({ "requestsPerUnit": 1_000, "unit": sent }),
            json!({ "requestsPerUnit": 1_000, "unit": told, "name": "" }),
        );
        if let Some(multiplier) = multiplier {
            (limit["unitMultiplier"], expected["unitMultiplier"]) = (multiplier.into(), multiplier.into());
        }
        let answer = ask(&caller, request(&[with(descriptor("plan", "free"), "limit", limit)])).await;
        let status = &answer["statuses"][0];
        assert_eq!(status["currentLimit"], expected, "{told}");
        assert_eq!(status["limitRemaining"], 999, "{told}");
        seconds(&status["durationUntilReset"], length_s);
    }
}

/// Every field of a request, by the numbers of the published protocol.
#[test]
fn the_fields_of_a_request_have_the_numbers_of_the_protocol() {
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

/// The same of the messages of a control plane, which are not among the files of the service.
#[test]
fn the_fields_of_a_control_planes_messages_have_the_numbers_of_the_protocol() {
    let any = || Any { type_url: "t".to_owned(), value: vec![7] };
    let node = Node {
        id: "i".to_owned(),
        cluster: "c".to_owned(),
        metadata: Some(Struct::default()),
        user_agent_name: "n".to_owned(),
        user_agent_version: "v".to_owned(),
    };
    let request = DiscoveryRequest {
        version_info: "1".to_owned(),
        node: Some(node),
        resource_names: vec!["r".to_owned()],
        type_url: "t".to_owned(),
        response_nonce: "n".to_owned(),
        error_detail: Some(Status { code: 3, message: "m".to_owned(), details: vec![any()] }),
    };
    let bytes = [
        &b"\x0a\x011"[..],                                         // 1: the version
        b"\x12\x0e\x0a\x01i\x12\x01c\x1a\x00\x32\x01n\x3a\x01v", // 2: a node, of 1: id, 2: cluster, 3: metadata, 6 and 7: user agent
        b"\x1a\x01r\x22\x01t\x2a\x01n",                          // 3: a name, 4: the type, 5: the nonce
        b"\x32\x0d\x08\x03\x12\x01m\x1a\x06\x0a\x01t\x12\x01\x07", // 6: an error, of 1: code, 2: message and 3: details
    ];
    assert_eq!(request.encode_to_vec(), bytes.concat());
    let response = DiscoveryResponse {
        version_info: "1".to_owned(),
        resources: vec![any()],
        type_url: "t".to_owned(),
        nonce: "n".to_owned(),
    };
    // 1: the version, 2: a resource, 4: the type, 5: the nonce.
    assert_eq!(response.encode_to_vec(), b"\x0a\x011\x12\x06\x0a\x01t\x12\x01\x07\x22\x01t\x2a\x01n");
}

#[tokio::test]
async fn health_is_told_under_every_name() {
    let server = server().await;
    let endpoint = Channel::from_shared(format!("http://{}", server.grpc)).expect("an address");
    let channel = in_time("the server is there", endpoint.connect()).await.expect("it takes connections");
    let mut client = HealthClient::new(channel);
    for name in ["", "ratelimit", "envoy.service.ratelimit.v3.RateLimitService"] {
        let asked = HealthCheckRequest { service: name.to_owned() };
        let answer = in_time("it is answered", client.check(asked)).await.expect("it is known").into_inner();
        assert_eq!(answer.status(), tonic_health::pb::health_check_response::ServingStatus::Serving, "{name:?}");
    }
    let asked = HealthCheckRequest { service: "nobody".to_owned() };
    let refused = in_time("it is answered", client.check(asked)).await.expect_err("it is unknown");
    assert_eq!(refused.code(), tonic::Code::NotFound);
}

fn a_request() -> impl Strategy<Value = RateLimitRequest> {
    let entry = (".{0,8}", ".{0,8}").prop_map(|(key, value)| Entry { key: key.into(), value: value.into() });
    let limit = (any::<u32>(), any::<i32>(), prop::option::of(any::<u32>())).prop_map(
        |(requests_per_unit, unit, unit_multiplier)| RateLimitOverride { requests_per_unit, unit, unit_multiplier },
    );
    let hits = prop::option::of(prop_oneof![Just(0), any::<u64>()]);
    let descriptor = (prop::collection::vec(entry, 0..4), prop::option::of(limit), hits, any::<bool>()).prop_map(
        |(entries, limit, hits_addend, is_negative_hits)| RateLimitDescriptor {
            entries,
            limit,
            hits_addend,
            is_negative_hits,
        },
    );
    (".{0,8}", prop::collection::vec(descriptor, 0..4), any::<u32>())
        .prop_map(|(domain, descriptors, hits_addend)| RateLimitRequest { domain, descriptors, hits_addend })
}

/// A request as JSON of the published protocol, field by field.
fn fields_of(request: &RateLimitRequest) -> Value {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).expect("UTF-8");
    let entry = |entry: &Entry| json!({ "key": text(&entry.key), "value": text(&entry.value) });
    let limit = |limit: &RateLimitOverride| {
        let RateLimitOverride { requests_per_unit, unit, unit_multiplier } = limit;
        json!({ "requestsPerUnit": requests_per_unit, "unit": unit, "unitMultiplier": unit_multiplier })
    };
    let descriptor = |descriptor: &RateLimitDescriptor| {
        json!({
            "entries": descriptor.entries.iter().map(entry).collect::<Vec<_>>(),
            "limit": descriptor.limit.as_ref().map(limit),
            "hitsAddend": descriptor.hits_addend,
            "isNegativeHits": descriptor.is_negative_hits,
        })
    };
    let descriptors: Vec<_> = request.descriptors.iter().map(descriptor).collect();
    json!({ "domain": request.domain, "descriptors": descriptors, "hitsAddend": request.hits_addend })
}

/// An answer; a map of several names has no order on the wire, so its metadata has one at most.
fn an_answer() -> impl Strategy<Value = RateLimitResponse> {
    let header = || {
        let header = (".{0,8}", ".{0,8}", prop::collection::vec(any::<u8>(), 0..4));
        let header = header.prop_map(|(key, value, raw_value)| HeaderValue { key, value, raw_value });
        prop::collection::vec(header, 0..3)
    };
    let limit = (".{0,8}", any::<u32>(), 0..8, prop::option::of(any::<u32>())).prop_map(
        |(name, requests_per_unit, unit, unit_multiplier)| RateLimit { name, requests_per_unit, unit, unit_multiplier },
    );
    let duration = (any::<i64>(), any::<i32>()).prop_map(|(seconds, nanos)| Duration { seconds, nanos });
    let status = (0..3, prop::option::of(limit), any::<u32>(), prop::option::of(duration)).prop_map(
        |(code, current_limit, limit_remaining, duration_until_reset)| DescriptorStatus {
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
        field.map(|(name, kind)| Struct { fields: [(name, prost_types::Value { kind: Some(kind) })].into() })
    });
    let body = prop::collection::vec(any::<u8>(), 0..8);
    (0..3, prop::collection::vec(status, 0..4), header(), header(), body, metadata).prop_map(
        |(overall_code, statuses, response_headers_to_add, request_headers_to_add, raw_body, dynamic_metadata)| {
            RateLimitResponse {
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
    fn a_request_is_the_same_bytes_in_the_published_protocol(request in a_request()) {
        let bytes = published(fields_of(&request)).encode_to_vec();
        prop_assert_eq!(request.encode_to_vec(), &bytes[..]);
        prop_assert_eq!(RateLimitRequest::decode(bytes.as_slice()).expect("a request"), request);
    }

    #[test]
    fn an_answer_is_the_same_bytes_in_the_published_protocol(answer in an_answer()) {
        let bytes = answer.encode_to_vec();
        let published = DynamicMessage::decode(message("RateLimitResponse"), bytes.as_slice()).expect("an answer");
        prop_assert_eq!(published.encode_to_vec(), &bytes[..]);
        prop_assert_eq!(RateLimitResponse::decode(bytes.as_slice()).expect("an answer"), answer);
    }
}
