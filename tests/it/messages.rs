//! Requests beyond the bound: decided by their domain, in bounded memory, and never answered with an error.

use std::path::Path;
use std::time::Instant;

use tempfile::TempDir;
use tidegate::proto::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::RateLimitOverride;
use tidegate::proto::envoy::service::ratelimit::v3::rate_limit_response::Code;
use tidegate::proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use tonic::Status;

use crate::envoy::proxy::{Proxy, get};
use crate::grpc;
use crate::support::{Tidegate, directory, in_time, rule_file};

const MIB: usize = 1 << 20;

/// Domains that refuse in each way there is, and domains that refuse nothing.
const DOMAINS: [(&str, &str); 7] = [
    ("limits", "{ key: k, rate_limit: { unit: year, requests_per_unit: 1000 } }"),
    ("denies", "{ key: k, value: v, deny: true }"),
    ("quota", "{ key: k, quota_mode: true, rate_limit: { unit: year, requests_per_unit: 1000 } }"),
    ("below", "{ key: a, descriptors: [{ key: b, rate_limit: { unit: year, requests_per_unit: 1000 } }] }"),
    ("watches", "{ key: k, shadow_mode: true, rate_limit: { unit: year, requests_per_unit: 1 } }"),
    ("unlimited", "{ key: k, rate_limit: { unlimited: true } }"),
    ("exempts", "{ key: k, exempt: true }"),
];

struct Served {
    server: Tidegate,
    client: grpc::Client,
    /// The rule files: without them a reload would find fewer domains while they are removed.
    _rules: Option<TempDir>,
}

impl Served {
    async fn start(variables: &[(&str, &str)]) -> Self {
        let text = |rule: &str, domain: &str| format!("domain: {domain}\ndescriptors:\n  - {rule}\n");
        let rules = directory(DOMAINS.map(|(domain, rule)| (format!("{domain}.yaml"), text(rule, domain))));
        let served = Self::start_with(rules.path(), variables).await;
        Self { _rules: Some(rules), ..served }
    }

    async fn start_with(rules: &Path, variables: &[(&str, &str)]) -> Self {
        let server = Tidegate::start(rules, variables).await;
        let client = grpc::client(server.grpc).await;
        Self { server, client: client.max_encoding_message_size(usize::MAX), _rules: None }
    }

    async fn ask(&mut self, request: RateLimitRequest) -> Result<RateLimitResponse, Status> {
        Ok(in_time("it is answered", self.client.should_rate_limit(request)).await?.into_inner())
    }

    /// The overall code and the metadata for a message of `bytes` or a little more.
    async fn ask_large(&mut self, domain: &str, bytes: usize) -> (Code, Option<String>) {
        let answer = self.ask(large(domain, bytes)).await.unwrap_or_else(|status| panic!("{domain:?}: {status}"));
        assert_eq!(answer.statuses, [], "{domain:?}");
        (answer.overall_code(), metadata(&answer))
    }
}

/// A request with one descriptor, whose value has `bytes` bytes.
fn large(domain: &str, bytes: usize) -> RateLimitRequest {
    grpc::one(domain, "k", vec![b'v'; bytes])
}

fn metadata(answer: &RateLimitResponse) -> Option<String> {
    let metadata = answer.dynamic_metadata.as_ref()?;
    let mut names: Vec<_> = metadata.fields.keys().map(String::as_str).collect();
    names.sort_unstable();
    Some(names.join(" "))
}

fn refused() -> (Code, Option<String>) {
    (Code::OverLimit, Some("too_large".to_owned()))
}

#[tokio::test]
async fn a_message_above_the_bound_is_refused_where_its_domain_can_refuse_anything() {
    let mut served = Served::start(&[]).await;
    for domain in ["limits", "denies", "quota", "below"] {
        assert_eq!(served.ask_large(domain, 2 * MIB).await, refused(), "{domain}");
    }
    let longest = "x".repeat(MIB + MIB / 2);
    for domain in ["watches", "unlimited", "exempts", "unknown", "lim", "limits2", "\u{e9}", &longest] {
        let name = &domain[..domain.len().min(20)];
        assert_eq!(served.ask_large(domain, 2 * MIB).await, (Code::Ok, None), "{name}");
    }
    let invalid = served.ask(large("", 2 * MIB)).await.expect_err("the domain is empty");
    assert_eq!(invalid.code(), tonic::Code::InvalidArgument);
    assert!(invalid.message().contains("domain must not be empty"), "{invalid}");
    // No counter moved: a message within the bound has the whole limit.
    let answer = served.ask(large("limits", 5)).await.expect("an answer");
    assert_eq!((answer.overall_code(), answer.statuses[0].limit_remaining), (Code::Ok, 999));

    let page = served.server.metrics().await;
    for line in [
        "tidegate_decisions_total{domain=\"limits\",outcome=\"refused\",provenance=\"too_large\"} 1",
        "tidegate_decisions_total{domain=\"watches\",outcome=\"admitted\",provenance=\"none\"} 1",
        "tidegate_calls_limited_total{cause=\"too_large\"} 13",
    ] {
        assert!(page.contains(line), "{line} is not in\n{page}");
    }
}

#[tokio::test]
async fn the_bound_is_a_mebibyte_exactly() {
    let mut served = Served::start(&[]).await;
    // What stands around the value: the domain, and the keys and lengths of descriptor, entry, key and value.
    let around = prost::Message::encoded_len(&large("limits", MIB / 2)) - MIB / 2;
    let answer = served.ask(large("limits", MIB - around)).await.expect("an answer");
    assert_eq!((answer.overall_code(), answer.statuses.len()), (Code::Ok, 1), "1 MiB is read");
    assert_eq!(served.ask_large("limits", MIB - around + 1).await, refused(), "one byte more is not");
}

#[tokio::test]
async fn a_limit_that_a_message_above_the_bound_brings_refuses_where_no_rule_does() {
    let mut served = Served::start(&[]).await;
    let with_limit = |domain| {
        let mut request = large(domain, 2 * MIB);
        let limit = RateLimitOverride { requests_per_unit: 1_000, unit: 1, unit_multiplier: None };
        request.descriptors[0].limit = Some(limit);
        request
    };
    for (domain, expected) in [("watches", refused()), ("unlimited", refused()), ("unknown", (Code::Ok, None))] {
        let answer = served.ask(with_limit(domain)).await.expect("an answer");
        assert_eq!((answer.overall_code(), metadata(&answer)), expected, "{domain}");
    }
}

#[tokio::test]
async fn under_global_shadow_mode_a_message_above_the_bound_passes() {
    let mut served = Served::start(&[("SHADOW_MODE", "true")]).await;
    assert_eq!(served.ask_large("limits", 2 * MIB).await, (Code::Ok, None));
    let page = served.server.metrics().await;
    assert!(page.contains("\nratelimit_service_global_shadow_mode 1\n"), "{page}");
}

#[tokio::test]
async fn a_refusal_for_size_says_so_to_the_client() {
    let variables = [("REFUSAL_BODY", "json"), ("RESPONSE_HEADERS", "ietf"), ("DECISION_METADATA", "true")];
    let mut served = Served::start(&variables).await;
    let answer = served.ask(large("limits", 2 * MIB)).await.expect("an answer");
    assert_eq!(answer.raw_body, br#"{"error":"too_large","message":"This request is too large."}"#);
    let headers: Vec<_> = answer.response_headers_to_add.iter().map(|header| header.key.as_str()).collect();
    assert_eq!(headers, ["content-type"], "no limit was looked at");
    assert_eq!(metadata(&answer).as_deref(), Some("decision too_large"));
}

#[tokio::test]
async fn a_message_of_64_mebibytes_takes_no_memory_of_its_size() {
    let mut served = Served::start(&[]).await;
    let small = served.ask(large("limits", MIB / 2)).await.expect("an answer");
    assert_eq!(small.overall_code(), Code::Ok);
    let before = served.server.peak_memory();
    assert_eq!(served.ask_large("limits", 64 * MIB).await, refused());
    let grown = served.server.peak_memory().saturating_sub(before);
    assert!(grown < 8 * MIB as u64, "{grown} bytes more");
    println!("a message of 64 MiB took {} KiB", grown / 1_024);
}

/// Room for headers of 8 MiB, Envoy's most, at a listener of the example.
fn roomy(listener: &str) -> String {
    format!("stat_prefix: {listener}\n          max_request_headers_kb: 8192")
}

#[tokio::test]
async fn a_header_that_makes_a_message_too_large_lets_no_request_pass_envoy() {
    const COPIED: &str = "
              - actions:
                - request_headers: { header_name: x-user-id, descriptor_key: user }";
    let text = "domain: edge\ndescriptors: [{ key: user, rate_limit: { unit: year, requests_per_unit: 4 } }]\n";
    let rules = rule_file(text);
    let tidegate = Tidegate::start(rules.path(), &[("REFUSAL_BODY", "json")]).await;
    // The header is copied into four descriptors.
    let (copies, open, upstream) = (COPIED.repeat(4), roomy("fail_open"), roomy("upstream"));
    let changes =
        [(COPIED, copies.as_str()), ("stat_prefix: fail_open", &open), ("stat_prefix: upstream", upstream.as_str())];
    let envoy = Proxy::start("envoy.yaml", tidegate.grpc, &changes).await;
    let edge = envoy.listener("fail_open").await;

    let half_a_mebibyte = get(edge, "/", vec![b'a'; MIB / 8]).await;
    assert_eq!(half_a_mebibyte.status, 200, "half a MiB is counted: {}", half_a_mebibyte.body);
    for bytes in [MIB + MIB / 2, 3 * MIB, 7 * MIB] {
        for _ in 0..2 {
            let began = Instant::now();
            let answer = get(edge, "/", vec![b'a'; bytes]).await;
            println!("a message of {} MiB through Envoy: {:?}", 4 * bytes / MIB, began.elapsed());
            assert_eq!(answer.status, 429, "four times {bytes} bytes: {}", &answer.body[..answer.body.len().min(200)]);
            assert_eq!(answer.body, r#"{"error":"too_large","message":"This request is too large."}"#);
        }
    }
    assert_eq!(get(edge, "/", vec![b'b'; 2]).await.status, 200, "another request is decided as ever");
}
