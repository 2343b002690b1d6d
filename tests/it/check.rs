//! The HTTP check: `/check/DOMAIN`.

use std::net::Ipv4Addr;
use std::time::Duration;

use tidegate::proto::envoy::service::ratelimit::v3::RateLimitRequest;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::process::Command;

use crate::grpc;
use crate::http::{self, Answer};
use crate::support::{Tidegate, output, repository, rule_file};

mod clients;
mod delays;
mod ext_authz;
mod flood;
mod gateways;
mod smuggling;

/// Rules whose gateway is `GATEWAY`; five requests of an address, two of a path, three of a key.
const RULES: &str = "domain: edge
charging: all_or_nothing
requests:
  from_gateway: GATEWAY
  trusted_proxies: [127.0.0.0/8, 10.0.0.0/8]
  refusal_status: STATUS
  descriptors:
    - [{ key: remote_address, from: client_ip }]
    - [{ key: path, from: path }, { key: method, from: method }]
    - [{ key: api_key, from: header, name: x-api-key, missing: { value: anonymous } }]
    - [{ key: user, from: header, name: x-user-id, missing: skip }]
    - [{ key: tier, value: all }]
descriptors:
  - { key: remote_address, value: 192.0.2.66, deny: true, message: Go away. }
  - { key: remote_address, rate_limit: { unit: year, requests_per_unit: 5 } }
  - key: path
    value: /login
    descriptors: [{ key: method, value: POST, rate_limit: { unit: year, requests_per_unit: 2 } }]
  - { key: user, rate_limit: { unit: year, requests_per_unit: 3 } }
";

async fn server(gateway: &str, variables: &[(&str, &str)]) -> Tidegate {
    let rules = rule_file(&RULES.replace("GATEWAY", gateway).replace("STATUS", "403"));
    Tidegate::start(rules.path(), variables).await
}

/// The rules of an example, whose minutes last a week, so that none ends while a test runs. The API key `limited` has two requests.
fn example(name: &str) -> tempfile::NamedTempFile {
    let text = std::fs::read_to_string(repository(&format!("examples/{name}/rules.yaml"))).expect("it reads");
    let path =
        "    - [{ key: path, from: path }, { key: method, from: method }, { key: remote_address, from: client_ip }]\n";
    let key = "    - [{ key: api_key, from: [{ header: x-api-key }, client_ip] }]\n";
    assert!(text.contains(path), "{text}");
    let text = if text.contains(key) { text } else { text.replace(path, &format!("{path}{key}")) };
    let limit = "  - { key: api_key, value: limited, rate_limit: { unit: week, requests_per_unit: 2 } }\n";
    rule_file(&(text.replace("unit: minute", "unit: week") + limit))
}

/// An address that no example trusts.
const CLIENT: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);

/// Asks as NGINX does, and returns the status.
async fn nginx(tidegate: &Tidegate, client: &str, method: &str, uri: &str, more: &[(&str, &str)]) -> u16 {
    let own = [("x-forwarded-for", client), ("x-original-method", method), ("x-original-uri", uri)];
    http::get(tidegate.http, "/check/edge").headers(&[&own, more].concat()).await.status
}

#[tokio::test]
async fn the_status_is_the_answer_with_the_headers_and_the_body_that_are_chosen() {
    let tidegate = server("nginx", &[("RESPONSE_HEADERS", "ietf"), ("REFUSAL_BODY", "json")]).await;
    let asked = [("x-forwarded-for", "192.0.2.1"), ("x-original-method", "POST"), ("x-original-uri", "/login?a=b")];
    for left in [1, 0] {
        let Answer { status, head, body } = http::get(tidegate.http, "/check/edge").headers(&asked).await;
        assert_eq!((status, body.as_str()), (200, ""), "{head}");
        assert!(head.contains("\r\ncache-control: no-store") && head.contains(&format!(";r={left};")), "{head}");
    }
    let Answer { status, head, body } = http::get(tidegate.http, "/check/edge").headers(&asked).await;
    assert_eq!(status, 403, "{head}");
    assert!(head.contains("\r\ncache-control: no-store") && head.contains("\r\nretry-after: "), "{head}");
    assert!(head.contains("\r\ncontent-type: application/") && body.starts_with('{'), "{head} {body}");
    let denied = [("x-forwarded-for", "192.0.2.66"), ("x-original-method", "GET"), ("x-original-uri", "/")];
    let Answer { status, body, .. } = http::get(tidegate.http, "/check/edge").headers(&denied).await;
    assert!(status == 403 && body.contains("Go away."), "{body}");

    let Answer { status, body, .. } = http::get(tidegate.http, "/check/nothing").headers(&asked).await;
    assert!(status == 404 && body.contains("/check/DOMAIN"), "{body}");
    let page = tidegate.metrics().await;
    assert!(page.contains("outcome=\"refused\""), "{page}");
}

#[tokio::test]
async fn nothing_that_a_client_writes_changes_what_it_is_counted_as() {
    let tidegate = server("nginx", &[]).await;
    let spellings =
        ["/login", "/login?x=1", "//login", "/./login", "/%6cogin", "/a/../login", "http://elsewhere/login"];
    let mut admitted = 0;
    for (number, uri) in spellings.iter().enumerate() {
        let forged =
            [("x-forwarded-uri", "/free"), ("x-forwarded-method", "GET"), ("content-type", "application/json")];
        let client = format!("192.0.2.{number}");
        admitted += u32::from(nginx(&tidegate, &client, "POST", uri, &forged).await == 200);
    }
    assert_eq!(admitted, 2, "each spelling is the same path");

    // What stands left of the client's address is its own word. Right of it are the proxies.
    let chains = [
        "198.51.100.7",
        "1.1.1.1, 198.51.100.7",
        "10.0.0.1, 198.51.100.7, 10.9.9.9",
        "::ffff:198.51.100.7",
        "[::ffff:c633:6407]:443",
        "2001:db8::1, 198.51.100.7:1234",
        "127.0.0.1,198.51.100.7 , 10.0.0.1",
    ];
    let mut admitted = 0;
    for (number, chain) in chains.iter().enumerate() {
        admitted += u32::from(nginx(&tidegate, chain, "GET", &format!("/{number}"), &[]).await == 200);
    }
    assert_eq!(admitted, 5, "each chain is of the same client");

    let long = "192.0.2.100,".repeat(1_000) + "198.51.100.8";
    for chain in
        ["unknown, 198.51.100.8", "\"2.2.2.2, 198.51.100.8", ", ,198.51.100.8,", "a.example, 198.51.100.8", &long]
    {
        assert_eq!(nginx(&tidegate, chain, "GET", "/", &[]).await, 200, "{chain:?}");
    }
    assert_eq!(nginx(&tidegate, "unknown, 198.51.100.8", "GET", "/", &[]).await, 403, "the same client again");

    let refused = [
        ("192.0.2.100", "GET", "login", vec![]),
        ("192.0.2.100", "GET", "/x%2f..%2flogin", vec![]),
        ("192.0.2.100", "GET", "/%5Clogin", vec![]),
        ("192.0.2.100", "GET", "/a\\b", vec![]),
        ("192.0.2.100", "GET", "", vec![]),
        ("192.0.2.100", "", "/", vec![]),
        ("192.0.2.100", "GET", "/", vec![("x-original-uri", "/")]),
        ("192.0.2.100", "GET", "/", vec![("x-api-key", "a"), ("x-api-key", "b")]),
    ];
    for (client, method, uri, more) in refused {
        let status = nginx(&tidegate, client, method, uri, &more).await;
        assert_eq!(status, 403, "{client:?} {method:?} {uri:?} {more:?}");
    }
    let many: Vec<(String, String)> = (0..2_000).map(|number| (format!("x{number}"), "y".to_owned())).collect();
    let many: Vec<(&str, &str)> = many.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
    assert_eq!(nginx(&tidegate, "192.0.2.101", "GET", "/", &many).await, 200, "a gateway hands on all headers");
    assert_eq!(nginx(&tidegate, "192.0.2.101", "GET", "/", &vec![("a", ""); 2_100]).await, 431, "but not without end");
    for target in ["/check/", "/check", "/check/?edge"] {
        assert_eq!(http::get(tidegate.http, target).await.status, 404, "{target}");
    }
    let body = r#"{"descriptors":[{"entries":[{"key":"tier","value":"free"}]}]}"#;
    let request = http::post(tidegate.http, "/check/edge", body).header("content-type", "application/json");
    assert_eq!(request.await.status, 403, "the body of a gateway's domain is not read");
}

/// A gateway that cannot send on may take the check for unanswered.
#[tokio::test]
async fn a_head_that_is_too_large_is_read_to_its_end_before_the_connection_is_closed() {
    let tidegate = server("nginx", &[]).await;
    for (headers, bytes) in [(4_000, 64), (3, 100_000)].repeat(10) {
        let header = format!("a: {}\r\n", "y".repeat(bytes));
        let head = format!("GET /check/edge HTTP/1.1\r\nhost: a\r\n{}\r\n", header.repeat(headers));
        let mut stream = TcpStream::connect(tidegate.http).await.expect("it listens");
        let (first, rest) = head.as_bytes().split_at(head.len() / 2);
        stream.write_all(first).await.expect("it listens");
        let mut answer = [0; 12];
        stream.read_exact(&mut answer).await.expect("an answer");
        assert_eq!(&answer, b"HTTP/1.1 431");
        for part in rest.chunks(rest.len() / 4) {
            stream.write_all(part).await.expect("it reads on");
            // The error of one write is that of the next.
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        stream.shutdown().await.expect("it reads on");
        stream.read_to_end(&mut Vec::new()).await.expect("no reset in place of an end");
    }
}

#[tokio::test]
async fn each_gateway_has_its_own_headers_and_only_named_peers_may_ask() {
    for (gateway, uri, method) in [
        ("nginx", "x-original-uri", "x-original-method"),
        ("traefik", "x-forwarded-uri", "x-forwarded-method"),
        ("caddy", "x-forwarded-uri", "x-forwarded-method"),
    ] {
        let tidegate = server(gateway, &[]).await;
        let mut statuses = Vec::new();
        for client in ["192.0.2.1", "192.0.2.2", "192.0.2.3"] {
            let headers = [("x-forwarded-for", client), (uri, "/login"), (method, "POST")];
            statuses.push(http::get(tidegate.http, "/check/edge").headers(&headers).await.status);
        }
        assert_eq!(statuses, [200, 200, 403], "{gateway}");
        let Answer { status, body, .. } =
            http::get(tidegate.http, "/check/edge").headers(&[("x-forwarded-for", "192.0.2.4")]).await;
        assert!(status == 403 && body.contains(&format!("the header {uri} is missing")), "{gateway}: {body}");
    }
    let tidegate = server("envoy", &[]).await;
    let mut statuses = Vec::new();
    for target in ["/check/edge/login", "/check/edge/login?a", "/check/edge//login"] {
        statuses.push(
            http::request(tidegate.http, "POST", target).headers(&[("x-forwarded-for", "192.0.2.1")]).await.status,
        );
    }
    assert_eq!(statuses, [200, 200, 403], "the path is behind the domain");

    let rules = rule_file(&RULES.replace("GATEWAY", "nginx").replace("STATUS", "429").replace("127.0.0.0/8, ", ""));
    let strict = Tidegate::start(rules.path(), &[]).await;
    let Answer { status, body, .. } = http::get(strict.http, "/check/edge").headers(&[("x-original-uri", "/")]).await;
    assert!(status == 403 && body.contains("trusted_proxies"), "{body}");
}

#[tokio::test]
async fn the_headers_of_a_page_that_a_gateway_passes_on_change_no_decision() {
    for gateway in ["nginx", "traefik", "caddy", "envoy"] {
        let tidegate = server(gateway, &[]).await;
        let (uri, method) = match gateway {
            "nginx" => ("x-original-uri", "x-original-method"),
            _ => ("x-forwarded-uri", "x-forwarded-method"),
        };
        let asked = [("x-forwarded-for", "192.0.2.1"), (method, "POST"), (uri, "/login")];
        let page = [("origin", "null"), ("sec-fetch-site", "cross-site")];
        let mut statuses = Vec::new();
        for headers in [[&asked[..], &page].concat(), asked.to_vec(), [&asked[..], &page].concat()] {
            statuses.push(http::request(tidegate.http, "POST", "/check/edge/login").headers(&headers).await.status);
        }
        assert_eq!(statuses, [200, 200, 403], "{gateway}");
        assert!(tidegate.metrics().await.contains("tidegate_pages_refused_total{reason=\"site\"} 0\n"), "{gateway}");
    }
}

#[tokio::test]
async fn without_a_gateway_the_descriptors_are_in_the_body() {
    let rules = rule_file(
        "domain: jobs
requests: { from_gateway: none, trusted_proxies: [127.0.0.1] }
descriptors: [{ key: user, rate_limit: { unit: year, requests_per_unit: 2 } }]
",
    );
    let tidegate = Tidegate::start(rules.path(), &[("RESPONSE_HEADERS", "ietf")]).await;
    // The domain is that of the path, whatever the body says.
    let body = r#"{"domain":"other","descriptors":[{"entries":[{"key":"user","value":"ann"}]}]}"#;
    let post = async |body: &str| http::post(tidegate.http, "/check/jobs", body).await.status;
    let mut statuses = Vec::new();
    for _ in 0..3 {
        statuses.push(post(body).await);
    }
    assert_eq!(statuses, [200, 200, 429]);
    assert_eq!(post("{").await, 400);
    assert_eq!(post(&format!("{}{body}", " ".repeat(300 << 10))).await, 413);
    assert_eq!(http::get(tidegate.http, "/check/jobs").await.status, 405);
    assert_eq!(http::get(tidegate.http, "/check/jobs/").await.status, 405);
}

#[tokio::test]
async fn a_check_that_the_store_cannot_decide_is_503_with_the_policy_error() {
    let rules = rule_file(&RULES.replace("GATEWAY", "envoy").replace("STATUS", "429"));
    let tidegate = Tidegate::start(rules.path(), &[("REDIS_URL", "127.0.0.1:1"), ("ON_STORE_FAILURE", "error")]).await;
    let Answer { status, head, .. } =
        http::get(tidegate.http, "/check/edge/").headers(&[("x-forwarded-for", "192.0.2.1")]).await;
    assert!(status == 503 && head.contains("cache-control: no-store"), "{head}");
}

#[tokio::test]
async fn a_status_that_nginx_does_not_take_for_a_refusal_is_a_warning_and_one_that_is_none_an_error_alone() {
    let warning = "warning: NGINX' `auth_request` takes only 401 and 403";
    for (status, warns, is_error) in [("429", true, false), ("403", false, false), ("200", false, true)] {
        let rules = rule_file(&RULES.replace("GATEWAY", "nginx").replace("STATUS", status));
        let (ended, _, said) =
            output(Command::new(env!("CARGO_BIN_EXE_tidegate")).arg("check").arg(rules.path())).await;
        assert_eq!((said.contains(warning), ended.success()), (warns, !is_error), "{status}: {said}");
        assert_eq!(said.contains("error: 200 is no status that refuses"), is_error, "{said}");
    }
}

#[tokio::test]
async fn each_interface_counts_its_requests() {
    let tidegate = server("nginx", &[]).await;
    for _ in 0..3 {
        nginx(&tidegate, "192.0.2.1", "GET", "/", &[]).await;
    }
    http::get(tidegate.http, "/check/nothing").await;
    http::request(tidegate.http, "POST", "/json").await;
    for _ in 0..2 {
        let _ = grpc::client(tidegate.grpc).await.should_rate_limit(RateLimitRequest::default()).await;
    }
    let page = tidegate.metrics().await;
    for (interface, count) in [("grpc", 2), ("json", 1), ("check", 4)] {
        assert!(
            page.contains(&format!("\ntidegate_requests_total{{interface=\"{interface}\"}} {count}\n")),
            "{interface}: {page}"
        );
    }
}
