use std::collections::BTreeMap;
use std::sync::LazyLock;

use axum::body::Bytes;
use proptest::prelude::*;
use prost::Message;
use prost_reflect::{DescriptorPool, DynamicMessage, MessageDescriptor, SerializeOptions};
use prost_types::value::Kind;
use prost_types::{Duration, ListValue, Struct, Value};

use super::read::read;
use super::write::write;
use crate::edge::message::{MOST_ENTRIES, Skimmed, WireRequest};
use crate::proto::DESCRIPTORS;
use crate::proto::envoy::config::core::v3::HeaderValue;
use crate::proto::envoy::service::ratelimit::v3::rate_limit_response::{DescriptorStatus, RateLimit};
use crate::proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};

static POOL: LazyLock<DescriptorPool> = LazyLock::new(|| DescriptorPool::decode(DESCRIPTORS).unwrap());

/// Returns the descriptor of a message of the protocol, from `proto/`, for the other implementation.
fn descriptor(name: &str) -> MessageDescriptor {
    POOL.get_message_by_name(&format!("envoy.service.ratelimit.v3.{name}")).unwrap()
}

fn read_by_descriptor(body: &[u8]) -> Option<RateLimitRequest> {
    let mut json = serde_json::Deserializer::from_slice(body);
    let message = DynamicMessage::deserialize(descriptor("RateLimitRequest"), &mut json).ok()?;
    json.end().ok()?;
    RateLimitRequest::decode(message.encode_to_vec().as_slice()).ok()
}

fn write_by_descriptor(response: &RateLimitResponse) -> Option<String> {
    let bytes = response.encode_to_vec();
    let message = DynamicMessage::decode(descriptor("RateLimitResponse"), bytes.as_slice()).ok()?;
    let mut text = Vec::new();
    let mut json = serde_json::Serializer::new(&mut text);
    message.serialize_with_options(&mut json, &SerializeOptions::new()).ok()?;
    String::from_utf8(text).ok()
}

fn read_by_hand(body: &[u8]) -> Option<RateLimitRequest> {
    match read(&Bytes::copy_from_slice(body)).ok()? {
        WireRequest::Whole(request) => Some(request),
        WireRequest::TooLarge(skimmed) => panic!("{skimmed:?}"),
    }
}

#[test]
fn beyond_the_bound_the_domain_and_whether_a_limit_is_brought_are_kept() {
    let one = r#"{"entries":[{"key":"k"}]}"#;
    let limit = r#"{"limit":{"unit":1}}"#;
    for (items, may_bring_limit, entries) in [
        (vec![one; MOST_ENTRIES + 1], false, MOST_ENTRIES + 1),
        ([vec!["{}"; MOST_ENTRIES], vec![limit]].concat(), true, MOST_ENTRIES + 1),
        (vec![r#"{"entries":[{},{},{}]}"#; MOST_ENTRIES / 2], false, MOST_ENTRIES / 2 * 3),
    ] {
        let body = format!(r#"{{"descriptors":[{}],"domain":"d"}}"#, items.join(","));
        let WireRequest::TooLarge(skimmed) = read(&body.into()).unwrap() else { panic!("it is too large") };
        assert_eq!(skimmed, Skimmed { domain: "d".to_owned(), may_bring_limit, entries });
    }
    let within = format!(r#"{{"descriptors":[{}],"domain":"d"}}"#, vec![one; MOST_ENTRIES].join(","));
    assert_eq!(read_by_hand(within.as_bytes()).unwrap().descriptors.len(), MOST_ENTRIES);
}

fn compare(body: &str) -> Result<(), TestCaseError> {
    prop_assert_eq!(read_by_hand(body.as_bytes()), read_by_descriptor(body.as_bytes()), "{}", body);
    Ok(())
}

/// Generates any JSON value that a caller may put anywhere, valid there or not.
fn scalar() -> impl Strategy<Value = String> {
    let fixed = prop::sample::select(vec![
        "null",
        "true",
        "false",
        "0",
        "-0",
        "-1",
        "1",
        "7",
        "1.0",
        "1.5",
        "-0.0",
        "1e2",
        "1e400",
        "4294967295",
        "4294967296",
        "4294967295.0",
        "4294967296.0",
        "9007199254740993",
        "18446744073709549568.0",
        "18446744073709551617e1",
        "18446744073709551615",
        "2e19",
        "-9223372036854775808",
        "\"\"",
        "\"5\"",
        "\"-5\"",
        "\" 5\"",
        "\"18446744073709551615\"",
        "\"18446744073709551616\"",
        "\"true\"",
        "\"SECOND\"",
        "\"WEEK\"",
        "\"second\"",
        "\"UNKNOWN\"",
        "2147483648",
        "\"\\u0041\\n\"",
        "\"\\ud800\"",
        "\"\\ud83d\\ude00\"",
        "\"\\u0000\"",
        "{}",
        "[]",
        "[null]",
        "[{}]",
        "[[]]",
        "{\"key\":\"k\"}",
        "\"\u{e9}\"",
        "01",
        "tru",
        "",
    ]);
    prop_oneof![4 => fixed.prop_map(str::to_owned), 1 => any::<i64>().prop_map(|number| number.to_string())]
}

/// Generates an object with `names` and values of `value`, sometimes with an unknown name, or the same name twice.
fn object(
    names: &'static [&'static str],
    value: impl Fn(&'static str) -> BoxedStrategy<String>,
) -> impl Strategy<Value = String> {
    let values: Vec<_> = names.iter().map(|name| value(name).prop_map(move |value| (*name, value)).boxed()).collect();
    let field = prop_oneof![
        30 => prop::strategy::Union::new(values),
        1 => scalar().prop_map(|value| ("unknown", value)),
        1 => Just(("d\\u006fmain", "\"d\"".to_owned())),
    ];
    prop::collection::vec(field, 0..5).prop_map(|fields| {
        let fields: Vec<_> = fields.iter().map(|(name, value)| format!(" \"{name}\" : {value}")).collect();
        format!("{{{}}}", fields.join(","))
    })
}

fn array(item: impl Strategy<Value = String>) -> impl Strategy<Value = String> {
    let item = prop_oneof![20 => item, 1 => scalar()];
    prop::collection::vec(item, 0..4).prop_map(|items| format!("[{}]", items.join(",")))
}

/// Generates mostly `value`, sometimes any value.
fn mostly(value: impl Strategy<Value = String> + 'static) -> BoxedStrategy<String> {
    prop_oneof![10 => value, 1 => scalar()].boxed()
}

fn entry() -> impl Strategy<Value = String> {
    object(&["key", "value"], |_| mostly("[a-z\u{e9}]{0,6}".prop_map(|text| format!("\"{text}\""))))
}

fn limit() -> impl Strategy<Value = String> {
    object(&["requestsPerUnit", "requests_per_unit", "unit", "unitMultiplier", "unit_multiplier"], |_| scalar().boxed())
}

fn request() -> impl Strategy<Value = String> {
    let descriptor = || {
        object(&["entries", "limit", "hitsAddend", "hits_addend", "isNegativeHits", "is_negative_hits"], |name| {
            match name {
                "entries" => mostly(array(entry())),
                "limit" => mostly(limit()),
                _ => scalar().boxed(),
            }
        })
    };
    object(&["domain", "descriptors", "descriptors", "hitsAddend", "hits_addend"], move |name| match name {
        "domain" => mostly(Just("\"edge\"".to_owned())),
        "descriptors" => mostly(array(descriptor())),
        _ => scalar().boxed(),
    })
}

fn response() -> impl Strategy<Value = RateLimitResponse> {
    let text = || "[ -~\u{e9}\n]{0,6}";
    let bytes = || prop::collection::vec(any::<u8>(), 0..8);
    let headers = move || {
        let header =
            (text(), text(), bytes()).prop_map(|(key, value, raw_value)| HeaderValue { key, value, raw_value });
        prop::collection::vec(header, 0..3)
    };
    let limit = (text(), any::<u32>(), 0..9, prop::option::of(0_u32..3)).prop_map(
        |(name, requests_per_unit, unit, unit_multiplier)| RateLimit { name, requests_per_unit, unit, unit_multiplier },
    );
    let duration = (0_i64..100_000, prop::sample::select(vec![0, 500_000_000, 1]))
        .prop_map(|(seconds, nanos)| Duration { seconds, nanos });
    let status = (0..4, prop::option::of(limit), 0_u32..3, prop::option::of(duration)).prop_map(
        |(code, current_limit, limit_remaining, duration_until_reset)| DescriptorStatus {
            code,
            current_limit,
            limit_remaining,
            duration_until_reset,
            quota: None,
        },
    );
    let leaf = prop_oneof![
        Just(Kind::NullValue(0)),
        any::<bool>().prop_map(Kind::BoolValue),
        prop_oneof![any::<f64>(), any::<i32>().prop_map(f64::from), Just(1e21), Just(f64::NAN)]
            .prop_map(Kind::NumberValue),
        text().prop_map(Kind::StringValue),
    ];
    let value = leaf.prop_map(|kind| Value { kind: Some(kind) }).prop_recursive(3, 12, 3, |inner| {
        let fields = prop::collection::btree_map("[a-z]{0,3}", inner.clone(), 0..3);
        prop_oneof![
            prop::collection::vec(inner, 0..3).prop_map(|values| Kind::ListValue(ListValue { values })),
            fields.prop_map(|fields| Kind::StructValue(Struct { fields })),
        ]
        .prop_map(|kind| Value { kind: Some(kind) })
    });
    let fields = prop::option::of(prop::collection::btree_map("[a-z]{0,3}", value, 0..3));
    (0..4, prop::collection::vec(status, 0..4), headers(), headers(), bytes(), fields).prop_map(
        |(overall_code, statuses, response_headers_to_add, request_headers_to_add, raw_body, fields)| {
            RateLimitResponse {
                overall_code,
                statuses,
                response_headers_to_add,
                request_headers_to_add,
                raw_body,
                dynamic_metadata: fields.map(|fields: BTreeMap<_, _>| Struct { fields }),
                quota: None,
            }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn a_request_is_read_as_by_its_descriptor(body in request()) {
        compare(&body)?;
    }

    #[test]
    fn what_follows_or_surrounds_a_request_is_read_as_by_its_descriptor(
        body in request(),
        around in prop::sample::select(vec![("", " \n"), ("", "{}"), ("", ","), ("[", "]"), ("\u{feff}", ""), (" ", "")]),
    ) {
        compare(&format!("{}{body}{}", around.0, around.1))?;
    }

    #[test]
    fn an_answer_is_written_as_by_its_descriptor(response in response()) {
        let text = write(&response).map(|text| String::from_utf8(text).unwrap());
        prop_assert_eq!(text, write_by_descriptor(&response));
    }
}

#[test]
fn requests_with_every_form_of_a_value_are_read_as_by_their_descriptor() {
    for body in [
        "",
        " ",
        "null",
        "[]",
        "\"\"",
        "{",
        "{}",
        "{\"domain\":null}",
        "{\"domain\":\"d\",\"domain\":null}",
        "{\"domain\":\"d\",\"descriptors\":[{\"entries\":[{\"key\":\"k\",\"value\":\"v\"}]},{}],\"hits_addend\":\"3\"}",
        "{\"descriptors\":[{}],\"descriptors\":[{},{}]}",
        "{\"descriptors\":[null]}",
        "{\"descriptors\":{}}",
        "{\"descriptors\":[{\"limit\":{\"requestsPerUnit\":5,\"unit\":\"WEEK\",\"unitMultiplier\":\"2\"}}]}",
        "{\"descriptors\":[{\"limit\":{\"unit\":7},\"hitsAddend\":0,\"isNegativeHits\":true}]}",
        "{\"Domain\":\"d\"}",
        "{\"descriptors\":[{\"entries\":[{\"key\":\"\\u00e9\\\"\",\"value\":\"\"}]}]}",
    ] {
        assert_eq!(read_by_hand(body.as_bytes()), read_by_descriptor(body.as_bytes()), "{body}");
    }
    assert_eq!(read_by_hand(b"{\"domain\":\"\xff\"}"), None, "strings are UTF-8");
}

/// Compares with `protojson` of Go, which the reference uses. prost-reflect takes 2^64 as 2^64 - 1, and reads strings by other rules.
#[test]
fn a_number_is_read_as_the_reference_reads_it() {
    let hits = |text: &str| {
        let body = format!("{{\"domain\":\"d\",\"descriptors\":[{{\"hitsAddend\":{text}}}],\"hitsAddend\":1}}");
        read_by_hand(body.as_bytes()).map(|request| request.descriptors[0].hits_addend)
    };
    let whole = [
        ("0", 0),
        ("-0", 0),
        ("1e3", 1_000),
        ("1.5e1", 15),
        ("100e-2", 1),
        ("4294967296", 1 << 32),
        ("9007199254740993", (1 << 53) + 1),
        ("18446744073709551615", u64::MAX),
    ];
    for (text, number) in whole {
        for text in [text.to_owned(), format!("\"{text}\"")] {
            assert_eq!(hits(&text), Some(Some(number)), "{text}");
        }
    }
    assert_eq!(hits("null"), Some(None));
    let refused = [
        "-1",
        "1.5",
        "01",
        "+5",
        " 5",
        "5 ",
        "",
        "5.",
        ".5",
        "1e400",
        "NaN",
        "18446744073709551616",
        "18446744073709551616.0",
        "1.8446744073709552e19",
        "184467440737095516150",
    ];
    for text in refused {
        // Spaces around a number are no part of it.
        assert!(text.trim() != text || hits(text).is_none(), "{text}");
        assert_eq!(hits(&format!("\"{text}\"")), None, "{text}");
    }
    for (text, number) in [("4294967295", Some(u32::MAX)), ("4294967296", None), ("4294967296.0", None)] {
        for text in [text.to_owned(), format!("\"{text}\"")] {
            let body = format!("{{\"domain\":\"d\",\"hitsAddend\":{text}}}");
            assert_eq!(read_by_hand(body.as_bytes()).map(|request| request.hits_addend), number, "{text}");
        }
    }
}
