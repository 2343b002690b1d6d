//! `tidegate explain --envoy` beside a real Envoy: the descriptors that it names are those that Envoy sends.

use std::sync::Arc;

use parking_lot::Mutex;
use tidegate::proto::envoy::service::ratelimit::v3::rate_limit_service_server::{
    RateLimitService, RateLimitServiceServer,
};
use tidegate::proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use tokio::net::TcpListener;
use tokio::process::Command;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status};

use super::proxy::{Proxy, get_with};
use crate::support::{output, rule_file};

/// Descriptors of a call, each spelled as `explain` spells it.
type Spelled = Vec<String>;

/// Keeps the descriptors of each call.
struct Keeping(Arc<Mutex<Vec<Spelled>>>);

#[tonic::async_trait]
impl RateLimitService for Keeping {
    async fn should_rate_limit(&self, call: Request<RateLimitRequest>) -> Result<Response<RateLimitResponse>, Status> {
        let text = String::from_utf8_lossy;
        let descriptors = call.into_inner().descriptors.into_iter().map(|descriptor| {
            let entries = descriptor.entries.iter();
            let entries = entries.map(|entry| format!("{}={}", text(&entry.key), text(&entry.value)));
            entries.collect::<Vec<_>>().join(",")
        });
        self.0.lock().push(descriptors.collect());
        Ok(Response::new(RateLimitResponse::default()))
    }
}

/// One item for each action, and for what is particular about it.
const ITEMS: &str = r#"
              - actions: [{ generic_key: { descriptor_value: all } }]
              - actions: [{ generic_key: { descriptor_key: literal, descriptor_value: "%REQ(x-user-id)%" } }]
              - actions: [{ masked_remote_address: { v4_prefix_mask_len: 16 } }]
              - actions: [{ masked_remote_address: {} }]
              - actions: [{ destination_cluster: {} }, { source_cluster: {} }]
              - actions:
                - request_headers: { header_name: X-A, descriptor_key: a, skip_if_absent: true }
                - generic_key: { descriptor_key: rest, descriptor_value: kept }
              - actions: [{ request_headers: { header_name: x-a, descriptor_key: skipped, skip_if_absent: true } }]
              - actions:
                - request_headers: { header_name: ":method", descriptor_key: method }
                - request_headers: { header_name: ":authority", descriptor_key: host }
              - actions: [{ header_value_match: { descriptor_value: regex, headers: [{ name: ":path", string_match: { safe_regex: { regex: "/(api|v1)/.*" } } }] } }]
              - actions: [{ header_value_match: { descriptor_value: no-a, expect_match: false, headers: [{ name: x-a, present_match: true }] } }]
              - actions: [{ header_value_match: { descriptor_key: number, descriptor_value: small, headers: [{ name: x-n, range_match: { start: 1, end: 10 } }] } }]
              - actions: [{ header_value_match: { descriptor_value: both, headers: [{ name: x-a, string_match: { prefix: O, ignore_case: true } }, { name: x-n, invert_match: true, string_match: { exact: "10" } }] } }]
              - actions: [{ header_value_match: { descriptor_value: empty, headers: [{ name: x-a, treat_missing_header_as_empty: true, string_match: { exact: "" } }] } }]
              - actions: [{ header_value_match: { descriptor_value: absent, headers: [{ name: x-n, present_match: false }] } }]
              - actions: [{ query_parameter_value_match: { descriptor_value: paged, query_parameters: [{ name: page, string_match: { exact: "2" } }] } }]
              - actions: [{ query_parameter_value_match: { descriptor_key: q, descriptor_value: none, expect_match: false, query_parameters: [{ name: page, present_match: true }] } }]
              - actions: [{ query_parameter_value_match: { descriptor_key: q, descriptor_value: some, query_parameters: [{ name: page }] } }]
              - actions: [{ query_parameters: { query_parameter_name: page, descriptor_key: page } }]
              - { stage: 1, actions: [{ generic_key: { descriptor_value: other-stage } }] }
"#;

#[tokio::test]
async fn explain_names_the_descriptors_that_envoy_sends() {
    let calls = Arc::new(Mutex::new(Vec::new()));
    let socket = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = socket.local_addr().expect("an address");
    let service = RateLimitServiceServer::new(Keeping(Arc::clone(&calls)));
    tokio::spawn(
        tonic::transport::Server::builder().add_service(service).serve_with_incoming(TcpIncoming::from(socket)),
    );
    let items =
        format!("rate_limits:{ITEMS}              - actions:\n                - generic_key: {{ descriptor_key: tier");
    let items = (
        "rate_limits:\n              - actions:\n                - generic_key: { descriptor_key: tier",
        items.as_str(),
    );
    let envoy = Proxy::start("envoy.yaml", address, &[items]).await;
    let edge = envoy.listener("fail_open").await;
    let rules =
        rule_file("domain: edge\ndescriptors: [{ key: user, rate_limit: { unit: year, requests_per_unit: 9 } }]\n");
    let mut wrong = Vec::new();
    for (path, headers) in [
        ("/", &[][..]),
        ("/?page=2", &["x-user-id: alice"]),
        ("/api/x?page=3&page=2&b", &["x-a: one", "x-n: 9", "x-user-id: a", "x-user-id: b"]),
        ("/search?a", &["x-user-id: alice", "x-a: ", "x-n: 10"]),
        ("/search", &["x-a: Other", "x-n: -1", "x-user-id: a", "x-user-id: b"]),
        ("/?page=a+b&page=2", &["x-a: other"]),
        ("/?pages", &["x-a: "]),
    ] {
        calls.lock().clear();
        assert_eq!(get_with(edge, path, headers).await.status, 200, "{path}");
        let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
        command.args(["explain", "--path", path, "--peer", "127.0.0.1", "--header", "host: edge", "--envoy"]);
        command.arg(envoy.configuration()).arg(rules.path());
        for header in headers {
            command.args(["--header", header]);
        }
        let (status, explained, errors) = output(&mut command).await;
        assert!(status.success(), "{errors}");
        let named = explained.lines().filter_map(|line| line.strip_prefix("descriptor "));
        let named: Spelled = named.map(|line| line.split("  (line").next().unwrap_or(line).to_owned()).collect();
        let sent = calls.lock().clone();
        if sent != [named.clone()] {
            wrong.push(format!("{path} {headers:?}\nnamed {named:?}\nsent  {sent:?}\n{explained}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
