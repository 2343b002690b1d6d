//! What clients can put into a request, and operators into a rule file: counted or named, never a crash.
//!
//! An error is a yes to Envoy, so whatever a client of the limited API controls is decided like anything else.

use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use proptest::prelude::*;
use prost::Message;
use tidegate::edge::answer::{Answers, Headers, RefusalBody};
use tidegate::edge::grpc::Edge;
use tidegate::limiter::Limiter;
use tidegate::model::{Clock, Micros};
use tidegate::proto::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use tidegate::proto::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::{Entry, RateLimitOverride};
use tidegate::proto::envoy::service::ratelimit::v3::rate_limit_response::Code;
use tidegate::proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use tidegate::rulefile::{CompiledRules, File, InvalidRules, Options, load};
use tidegate::rules::live::LiveRules;
use tidegate::store::Store;
use tidegate::store::memory::Memory;
use tidegate::telemetry::Telemetry;
use tonic::Status;
use tonic::metadata::KeyAndValueRef;

use crate::grpc;
use crate::support::{Tidegate, in_time, rule_file};
use crate::world::{HandClock, NOON, futures, guard};

const MIB: usize = 1 << 20;
/// A year, by its number in the protocol.
const YEAR: i32 = 6;

const RULES: &str = "domain: d
descriptors:
  - { key: k, rate_limit: { unit: year, requests_per_unit: 1 } }
  - { key: smooth, rate_limit: { unit: year, requests_per_unit: 1, algorithm: gcra } }
  - { key: wild, value: a*z, rate_limit: { unit: year, requests_per_unit: 1 } }
  - key: nested
    descriptors: [{ key: k, rate_limit: { unit: year, requests_per_unit: 1 } }]
";

fn read(bytes: &[u8]) -> Result<CompiledRules, InvalidRules> {
    load(&[File { name: "rules.yaml".into(), bytes: bytes.to_vec() }], Options::default())
}

/// The gRPC service itself, in this process.
fn edge() -> Edge {
    let loaded = read(RULES.as_bytes()).expect("rules");
    let store = Memory::new(HandClock::at(NOON) as Arc<dyn Clock>, 10_000);
    let limiter =
        Limiter::new(Arc::new(LiveRules::new(loaded.rules)), Arc::new(guard(Arc::new(store) as Arc<dyn Store>, 1)));
    let (headers, refusal_body) = (Headers::Ietf, RefusalBody::Json);
    let answers = Answers {
        headers,
        refusal_body,
        dynamic_metadata: true,
        decision_metadata: true,
        explains: true,
        decision_id_header: true,
        records: None,
    };
    Edge::new(Arc::new(limiter), Arc::new(answers), Arc::new(Telemetry::off(Micros::ZERO)), 8)
}

/// What the protocol lets a caller say, with bytes in every place where a client's may stand.
fn request() -> impl Strategy<Value = RateLimitRequest> {
    let word =
        |words: &'static [&'static str]| prop::sample::select(words).prop_map(|word| Bytes::from(word.as_bytes()));
    let any_bytes = || prop::collection::vec(any::<u8>(), 0..12).prop_map(Bytes::from);
    let key = prop_oneof![3 => word(&["k", "smooth", "wild", "nested", ""]), 1 => any_bytes()];
    let value = prop_oneof![2 => word(&["", "a", "az", "abz", "\0", "\r\n", "a\r\nz"]), 2 => any_bytes()];
    let entry = (key, value).prop_map(|(key, value)| Entry { key, value });
    let unit = prop_oneof![3 => 1..8, 1 => any::<i32>()];
    let times = prop::option::of(prop_oneof![3 => 1_u32..100, 1 => any::<u32>()]);
    let sent = (any::<u32>(), unit, times).prop_map(|(requests_per_unit, unit, unit_multiplier)| RateLimitOverride {
        requests_per_unit,
        unit,
        unit_multiplier,
    });
    let hits = prop::option::of(prop_oneof![3 => 0_u64..4, 1 => any::<u64>()]);
    let entries = prop::collection::vec(entry, 0..4);
    let descriptor = (entries, prop::option::weighted(0.2, sent), hits, any::<bool>()).prop_map(
        |(entries, limit, hits_addend, is_negative_hits)| RateLimitDescriptor {
            entries,
            limit,
            hits_addend,
            is_negative_hits,
        },
    );
    let domain = prop_oneof![6 => Just("d".to_owned()), 1 => Just(String::new()), 1 => ".*"];
    (domain, prop::collection::vec(descriptor, 0..5), any::<u32>())
        .prop_map(|(domain, descriptors, hits_addend)| RateLimitRequest { domain, descriptors, hits_addend })
}

/// The bytes of a message in which some were changed, added or cut off.
fn damaged(whole: impl Strategy<Value = Vec<u8>>) -> impl Strategy<Value = Vec<u8>> {
    let change = (any::<prop::sample::Index>(), any::<u8>(), 0_u8..4);
    (whole, prop::collection::vec(change, 1..4)).prop_map(|(mut bytes, changes)| {
        for (place, byte, how) in changes {
            let place = place.index(bytes.len() + 1);
            match how {
                0 => bytes.insert(place, byte),
                1 => bytes.truncate(place.max(1)),
                2 => drop(bytes.get(place).is_some().then(|| bytes.remove(place))),
                _ => bytes.iter_mut().skip(place).take(1).for_each(|at| *at = byte),
            }
        }
        bytes
    })
}

/// Only the rules' own words reach a client: what it sent is in no header and no body.
fn told(answer: &RateLimitResponse) -> Result<(), TestCaseError> {
    const NAMES: [&str; 5] = ["\"k", "\"smooth", "\"wild", "\"nested.k", "\"override"];
    for header in &answer.response_headers_to_add {
        prop_assert!(header.value.bytes().all(|byte| (0x20..=0x7e).contains(&byte)), "{:?}", header);
        if header.key.starts_with("RateLimit") {
            for item in header.value.split(", ") {
                let name = item.split("\";").next().unwrap_or_default();
                let name = name.trim_end_matches(|c: char| c.is_ascii_digit()).trim_end_matches('-');
                prop_assert!(NAMES.contains(&name), "{:?}", header);
            }
        }
    }
    if !answer.raw_body.is_empty() {
        let body: serde_json::Value = serde_json::from_slice(&answer.raw_body).expect("JSON");
        let is_ours =
            |text: &str| ["Too many requests", "This request is too large"].iter().any(|own| text.starts_with(own));
        prop_assert!(body["message"].as_str().is_some_and(is_ours), "{}", body);
    }
    Ok(())
}

fn decided(edge: &Edge, bytes: &[u8]) -> Result<(), TestCaseError> {
    let Ok(request) = RateLimitRequest::decode(bytes) else { return Ok(()) };
    let is_sound = !request.domain.is_empty() && !request.descriptors.is_empty();
    let has_override = request.descriptors.iter().any(|descriptor| descriptor.limit.is_some());
    let descriptors = request.descriptors.len();
    match futures(edge.decide(request, None, None)) {
        Ok(answer) => {
            prop_assert!(is_sound, "what means nothing is not decided");
            prop_assert_eq!(answer.statuses.len(), descriptors);
            prop_assert!(answer.overall_code() != Code::Unknown, "Envoy lets what is unknown pass");
            prop_assert!(answer.statuses.iter().all(|status| status.code() != Code::Unknown));
            prop_assert!(!RateLimitResponse::encode_to_vec(&answer).is_empty());
            told(&answer)?;
        }
        Err(status) => {
            prop_assert!(!is_sound || has_override, "an error is a yes: {}", status);
            prop_assert_eq!(Status::from(status).code(), tonic::Code::InvalidArgument);
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(5_000))]

    #[test]
    fn any_request_is_decided_unless_its_caller_is_wrong(request in request()) {
        decided(&edge(), &request.encode_to_vec())?;
    }

    #[test]
    fn any_bytes_in_place_of_a_request_are_decided_or_refused(
        bytes in prop_oneof![
            1 => prop::collection::vec(any::<u8>(), 0..200),
            3 => damaged(request().prop_map(|request| request.encode_to_vec())),
        ],
    ) {
        decided(&edge(), &bytes)?;
    }

    #[test]
    fn any_bytes_in_place_of_a_rule_file_are_loaded_or_refused_with_a_reason(
        bytes in prop_oneof![
            1 => prop::collection::vec(any::<u8>(), 0..200),
            1 => ".{0,200}".prop_map(String::into_bytes),
            1 => prop::collection::vec(yaml_piece(), 0..60).prop_map(|pieces| pieces.concat().into_bytes()),
            3 => damaged(Just(RULES.as_bytes().to_vec())),
        ],
    ) {
        if let Err(invalid) = read(&bytes) {
            prop_assert!(invalid.errors() > 0, "refused for nothing");
            prop_assert!(invalid.to_string().lines().all(|line| !line.trim().is_empty()));
        }
    }
}

/// What a rule file is made of, in no order.
fn yaml_piece() -> impl Strategy<Value = &'static str> {
    prop::sample::select(vec![
        "domain",
        "descriptors",
        "key",
        "value",
        "rate_limit",
        "rate_limits",
        "unit",
        "requests_per_unit",
        "second",
        "d",
        "algorithm",
        "gcra",
        "burst",
        "window",
        "1ms",
        "4294967296",
        "-1",
        "0",
        "1e9",
        "~",
        "null",
        "true",
        ": ",
        ":\n",
        "\n",
        "\n  ",
        "\n    ",
        "- ",
        "{ ",
        " }",
        "[ ",
        " ]",
        ", ",
        "&a ",
        "*a",
        "<<: ",
        "!!str ",
        "'",
        "\"",
        "\\",
        "|\n",
        ">\n",
        "---\n",
        "...\n",
        "# ",
        "\t",
        "\r\n",
        "*",
        "?",
        "\u{feff}",
        "\u{2028}",
        "%YAML 1.2\n",
    ])
}

/// A server that says all it can, and a client of it.
async fn server() -> (Tidegate, grpc::Client) {
    let rules = rule_file(RULES);
    start(rules.path()).await
}

async fn start(rules: &Path) -> (Tidegate, grpc::Client) {
    let variables = [("RESPONSE_DYNAMIC_METADATA", "true"), ("LIMIT_RESPONSE_HEADERS_ENABLED", "true")];
    let server = Tidegate::start(rules, &variables).await;
    let client = grpc::client(server.grpc).await;
    (server, client.max_encoding_message_size(usize::MAX).max_decoding_message_size(usize::MAX))
}

fn entry(key: impl Into<Bytes>, value: impl Into<Bytes>) -> Entry {
    Entry { key: key.into(), value: value.into() }
}

fn descriptor(entries: Vec<Entry>) -> RateLimitDescriptor {
    RateLimitDescriptor { entries, ..RateLimitDescriptor::default() }
}

/// A descriptor that brings its own limit of one in a year.
fn limited(entries: Vec<Entry>) -> RateLimitDescriptor {
    let limit = RateLimitOverride { requests_per_unit: 1, unit: YEAR, unit_multiplier: None };
    RateLimitDescriptor { limit: Some(limit), ..descriptor(entries) }
}

async fn ask(client: &mut grpc::Client, descriptors: Vec<RateLimitDescriptor>) -> Result<RateLimitResponse, Status> {
    let request = RateLimitRequest { domain: "d".to_owned(), descriptors, hits_addend: 0 };
    let answer = in_time("it is answered", client.should_rate_limit(request)).await?;
    for field in answer.metadata().iter() {
        let value = match field {
            KeyAndValueRef::Ascii(_, value) => value.as_bytes().to_vec(),
            KeyAndValueRef::Binary(_, value) => value.to_bytes().expect("base64").to_vec(),
        };
        assert!(is_one_line(&value), "{field:?}");
    }
    let answer = answer.into_inner();
    for header in answer.response_headers_to_add.iter().chain(&answer.request_headers_to_add) {
        assert!(is_one_line(header.key.as_bytes()) && is_one_line(header.value.as_bytes()), "{header:?}");
        assert!(header.raw_value.is_empty(), "{header:?}");
    }
    Ok(answer)
}

fn is_one_line(bytes: &[u8]) -> bool {
    !bytes.iter().any(|byte| matches!(byte, b'\r' | b'\n' | 0))
}

#[tokio::test]
async fn whatever_a_client_sends_is_counted_like_anything_else() {
    let (_server, mut client) = server().await;
    let long = |last: u8| {
        let mut value = vec![b'x'; MIB / 2];
        value.push(last);
        value
    };
    let values: [(&str, Vec<u8>); 15] = [
        ("nothing", vec![]),
        ("no UTF-8", vec![0xff, 0xfe, 0x80]),
        ("half a character", vec![0xe2, 0x82]),
        ("a surrogate", vec![0xed, 0xa0, 0x80]),
        ("NUL", b"a\0b".to_vec()),
        ("only NUL", b"\0".to_vec()),
        ("a header of its own", b"a\r\nx-admin: true".to_vec()),
        ("a line", b"a\nb".to_vec()),
        ("letters from right to left", "\u{202e}abc".into()),
        ("braces", b"}{other|k=v".to_vec()),
        ("percent", b"%00%FF".to_vec()),
        ("every byte", (0..=255).collect()),
        ("a star", b"*".to_vec()),
        ("half a mebibyte", long(b'a')),
        ("another half", long(b'b')),
    ];
    for (what, value) in &values {
        let by_rule = ["k", "smooth"].map(|key| vec![descriptor(vec![entry(key, value.clone())])]);
        let below = vec![descriptor(vec![entry("nested", ""), entry("k", value.clone())])];
        // Of a key that no rule has, only a limit of its own makes a counter.
        let as_key = (*what != "nothing").then(|| vec![limited(vec![entry(value.clone(), "v")])]);
        let empty_key = vec![limited(vec![entry("", value.clone())])];
        for asked in by_rule.into_iter().chain([below, empty_key]).chain(as_key) {
            for expected in [Code::Ok, Code::OverLimit] {
                let answer = ask(&mut client, asked.clone()).await;
                let answer = answer.unwrap_or_else(|status| panic!("{what} is an error: {}", status.message()));
                assert_eq!(answer.overall_code(), expected, "{what}");
                assert_eq!(answer.response_headers_to_add.len(), 3, "{what}");
                assert!(answer.dynamic_metadata.is_some(), "{what}");
            }
        }
    }
    let between = vec![descriptor(vec![entry("wild", &b"a\xff\0\r\nz"[..])])];
    for expected in [Code::Ok, Code::OverLimit] {
        assert_eq!(ask(&mut client, between.clone()).await.expect("an answer").overall_code(), expected, "a wildcard");
    }
}

#[tokio::test]
async fn headers_that_a_client_fills_do_not_make_the_call_an_error() {
    let (_server, mut client) = server().await;
    for outcome in [Code::Ok, Code::OverLimit] {
        let descriptors = vec![limited(vec![entry("long", "headers")])];
        let message = RateLimitRequest { domain: "d".to_owned(), descriptors, hits_addend: 0 };
        let mut request = tonic::Request::new(message);
        // Envoy takes 60 KiB of headers unless it is told otherwise, and copies those of its tracer into the call.
        for name in ["tracestate", "baggage", "traceparent"] {
            request.metadata_mut().insert(name, "x".repeat(60 << 10).parse().expect("a value"));
        }
        let answer = in_time("it is answered", client.should_rate_limit(request)).await.expect("no error");
        assert_eq!(answer.into_inner().overall_code(), outcome);
    }
}

#[tokio::test]
async fn a_caller_in_a_hurry_is_counted_by_the_store_of_this_process() {
    let (server, mut client) = server().await;
    let descriptors = || vec![descriptor(vec![entry("k", "hurry")])];
    let message =
        RateLimitRequest { domain: "d".to_owned(), descriptors: descriptors(), hits_addend: 0 }.encode_to_vec();
    let length = u32::try_from(message.len()).expect("a short one").to_be_bytes();
    let framed = Bytes::from([&[0][..], &length, &message].concat());
    // A caller with so little time is not kept waiting for Redis, and this store keeps nobody waiting.
    assert_eq!(raw_call(&server, &[("grpc-timeout", "1m")], framed, true).await, (0, String::new()));
    let answer = ask(&mut client, descriptors()).await.expect("an answer");
    assert_eq!(answer.overall_code(), Code::OverLimit, "the one there is was counted");
}

#[tokio::test]
async fn ten_thousand_of_anything_are_counted_like_one() {
    let (_server, mut client) = server().await;
    let entries = |of: usize| (0..of).map(|number| entry(format!("key {number}"), "")).collect::<Vec<_>>();
    let limits = |of: usize| (0..of).map(|number| descriptor(vec![entry("k", number.to_string())])).collect::<Vec<_>>();
    let mut unmatched =
        (0..9_999).map(|number| descriptor(vec![entry("no rule", number.to_string())])).collect::<Vec<_>>();
    unmatched.push(descriptor(vec![entry("k", "after many")]));
    let mut deep = entries(9_999);
    deep.insert(0, entry("k", "in front of many"));
    for (what, asked) in [
        ("descriptors with a limit", limits(1_000)),
        ("descriptors without one, and one with it", unmatched),
        ("entries in one descriptor", vec![limited(entries(10_000))]),
        ("entries in one descriptor after one that a rule has", vec![limited(deep)]),
    ] {
        for expected in [Code::Ok, Code::OverLimit] {
            let answer = ask(&mut client, asked.clone()).await;
            let answer = answer.unwrap_or_else(|status| panic!("many {what}: {}", status.message()));
            assert_eq!(answer.overall_code(), expected, "many {what}");
            assert_eq!(answer.statuses.len(), asked.len());
        }
    }
    // The first 256 entries make the counter, so one entry fewer does not make another.
    let one_fewer = vec![limited(entries(9_999))];
    assert_eq!(ask(&mut client, one_fewer).await.expect("an answer").overall_code(), Code::OverLimit);
    let fewer = vec![limited(entries(255))];
    assert_eq!(ask(&mut client, fewer).await.expect("an answer").overall_code(), Code::Ok);
}

/// The code and the message with which a call ends that is made of these bytes, and of more to come or not.
async fn raw_call(
    server: &Tidegate,
    headers: &[(&'static str, &str)],
    body: Bytes,
    is_complete: bool,
) -> (i32, String) {
    let socket = tokio::net::TcpStream::connect(server.grpc).await.expect("a connection");
    let (client, connection) = h2::client::handshake(socket).await.expect("a handshake");
    let connection = tokio::spawn(connection);
    let mut call = http::Request::post("http://t/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit")
        .header("content-type", "application/grpc");
    for (name, value) in headers {
        call = call.header(*name, *value);
    }
    let mut client = client.ready().await.expect("room for a call");
    let (response, mut sending) = client.send_request(call.body(()).expect("a call"), false).expect("it is sent");
    sending.send_data(body, is_complete).expect("it is sent");
    let response = in_time("the call is answered before its body ends", response).await.expect("an answer");
    let (head, mut body) = response.into_parts();
    while let Some(data) = body.data().await {
        data.expect("the rest of the answer");
    }
    let trailers = body.trailers().await.expect("the end of the answer").unwrap_or_default();
    connection.abort();
    let field = |name| {
        let found = head.headers.get(name).or_else(|| trailers.get(name));
        found.and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned()
    };
    (field("grpc-status").parse().expect("a code"), field("grpc-message"))
}

#[tokio::test]
async fn what_is_too_long_is_refused_and_not_buffered() {
    const SENT: usize = 16 * MIB;
    let (server, mut client) = server().await;
    ask(&mut client, vec![descriptor(vec![entry("k", vec![0; MIB / 2])])]).await.expect("half a mebibyte is read");
    let before = server.peak_memory();
    for _ in 0..20 {
        let refused = ask(&mut client, vec![descriptor(vec![entry("k", vec![0xff; SENT])])]).await;
        assert_eq!(refused.expect("an answer").overall_code(), Code::OverLimit, "{SENT} bytes are not counted");
    }
    let grown = server.peak_memory().saturating_sub(before);
    assert!(grown < SENT as u64, "after 20 messages of {SENT} bytes each it has had {grown} bytes more");
    ask(&mut client, vec![descriptor(vec![entry("k", "after all")])]).await.expect("others are answered");
}

#[tokio::test]
async fn what_the_callers_configuration_got_wrong_is_said_in_a_sentence() {
    let (_server, mut client) = server().await;
    let request = |domain: &str, descriptors: Vec<RateLimitDescriptor>| RateLimitRequest {
        domain: domain.to_owned(),
        descriptors,
        hits_addend: 0,
    };
    let sent = |unit: i32, unit_multiplier: Option<u32>| {
        let limit = RateLimitOverride { requests_per_unit: 1, unit, unit_multiplier };
        let overridden = RateLimitDescriptor { limit: Some(limit), ..descriptor(vec![entry("k", "override")]) };
        // It stands behind one that is sound, which must not be charged.
        request("d", vec![descriptor(vec![entry("k", "beside")]), overridden])
    };
    for (wrong, words) in [
        (request("", vec![descriptor(vec![entry("k", "v")])]), "domain must not be empty"),
        (request("", vec![]), "domain must not be empty"),
        (request("d", vec![]), "descriptor list must not be empty"),
        (sent(0, None), "undefined unit 0"),
        (sent(8, None), "undefined unit 8"),
        (sent(-1, None), "undefined unit -1"),
        (sent(1, Some(0)), "must be from 1ms to 365d"),
        (sent(YEAR, Some(2)), "must be from 1ms to 365d"),
    ] {
        let status = in_time("it is answered", client.should_rate_limit(wrong)).await.expect_err(words);
        assert_eq!(status.code(), tonic::Code::InvalidArgument, "{words}");
        assert!(status.message().contains(words), "{:?} does not say {words:?}", status.message());
        assert!(status.message().len() > words.len() + 10, "{:?} is no sentence", status.message());
    }
    let spared = ask(&mut client, vec![descriptor(vec![entry("k", "beside")])]).await.expect("an answer");
    assert_eq!(spared.overall_code(), Code::Ok, "what is refused as wrong charges nothing");
}
