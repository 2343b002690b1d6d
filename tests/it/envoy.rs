//! A real Envoy in front, with the configurations and rules of `examples/`.

use std::fmt::Write;

use tempfile::NamedTempFile;
use tidegate::proto::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use tidegate::proto::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::RateLimitOverride;
use tidegate::proto::envoy::service::ratelimit::v3::RateLimitRequest;
use tidegate::proto::envoy::service::ratelimit::v3::rate_limit_response::{Code, DescriptorStatus};
use tidegate::proto::envoy::r#type::v3::RateLimitUnit;

use crate::grpc;
use crate::redis::Port;
use crate::support::{Tidegate, eventually, repository, rule_file};
use proxy::{Proxy, get};

mod explained;
mod load;
mod meaning;
pub mod proxy;

/// A server with the rules of an example, whose minutes last a week, so that none ends while a test runs.
struct Served {
    tidegate: Tidegate,
    _rules: NamedTempFile,
}

async fn serve(example: &str) -> Served {
    serve_and(example, "").await
}

async fn serve_and(example: &str, more: &str) -> Served {
    let text = std::fs::read_to_string(repository("examples").join(example)).expect("it reads");
    serve_text(&(text.replace("unit: minute", "unit: week") + more), &[]).await
}

/// A server with these rules and settings.
async fn serve_text(rules: &str, variables: &[(&str, &str)]) -> Served {
    let file = rule_file(rules);
    Served { tidegate: Tidegate::start(file.path(), variables).await, _rules: file }
}

/// The settings without which Envoy lets requests pass, because it drops its own calls under load.
const UNDER_LOAD: [&str; 7] = [
    "timeout: 0.25s",
    "http.max_requests_per_io_cycle",
    "max_connections_to_accept_per_socket_event",
    "max_outbound_control_frames: 65536",
    "max_outbound_frames: 262144",
    "max_concurrent_streams: 1024",
    "max_requests: 65536, max_pending_requests: 65536",
];

#[test]
fn every_configuration_of_envoy_has_the_settings_for_load() {
    let files = [
        ("README.md", 1),
        ("examples/gateways/envoy-gateway/own-rules.yaml", 1),
        ("examples/gateways/envoy-gateway/ratelimit-cluster.yaml", 1),
        ("examples/gateways/istio/envoyfilter.yaml", 1),
        ("examples/migrate/envoy.yaml", 1),
        ("helm/tidegate/templates/NOTES.txt", 1),
        ("examples/envoy.yaml", 1),
        ("examples/envoy-llm-tokens.yaml", 1),
        ("examples/envoy-delay.yaml", 1),
        ("examples/plans/envoy.yaml", 1),
    ];
    for (file, times) in files {
        let text = std::fs::read_to_string(repository(file)).expect("it reads");
        for setting in UNDER_LOAD {
            // What is held in the example of delays takes longer; Istio has circuit breakers of its own; what an object of a
            // gateway cannot set, another file beside it does, or the page says so.
            let is_elsewhere = match file {
                "examples/envoy-delay.yaml" => setting == "timeout: 0.25s",
                "examples/gateways/istio/envoyfilter.yaml" => {
                    setting.starts_with("http.") || setting.starts_with("max_requests")
                }
                "examples/gateways/envoy-gateway/own-rules.yaml" => setting.starts_with("http."),
                "examples/gateways/envoy-gateway/ratelimit-cluster.yaml" => {
                    ["timeout", "http.", "max_connections"].iter().any(|start| setting.starts_with(start))
                }
                _ => false,
            };
            if is_elsewhere {
                continue;
            }
            assert!(text.matches(setting).count() >= times, "{file} has no {setting}");
        }
    }
}

/// Another client of the same server.
struct Other(grpc::Client, &'static str);

impl Other {
    async fn new(served: &Served, domain: &'static str) -> Self {
        Self(grpc::client(served.tidegate.grpc).await, domain)
    }

    async fn call(&mut self, descriptor: RateLimitDescriptor) -> DescriptorStatus {
        let request = RateLimitRequest { domain: self.1.to_owned(), descriptors: vec![descriptor], hits_addend: 0 };
        let answer = self.0.should_rate_limit(request).await.expect("an answer").into_inner();
        answer.statuses.into_iter().next().expect("one status")
    }

    /// Spends these hits, which are there to be spent.
    async fn spend(&mut self, descriptor: RateLimitDescriptor, hits: u64) {
        let status = self.call(RateLimitDescriptor { hits_addend: Some(hits), ..descriptor }).await;
        assert_eq!(status.code(), Code::Ok, "{hits} hits are left: {status:?}");
    }

    /// Takes such a spending back.
    async fn give_back(&mut self, descriptor: RateLimitDescriptor, hits: u64) {
        self.spend(RateLimitDescriptor { is_negative_hits: true, ..descriptor }, hits).await;
    }
}

#[tokio::test]
async fn a_user_over_the_limit_gets_429_with_what_is_left_and_when_to_come_back() {
    let served = serve("rules.yaml").await;
    let envoy = Proxy::start("envoy.yaml", served.tidegate.grpc, &[]).await;
    let edge = envoy.listener("fail_open").await;
    for left in [4, 3, 2, 1, 0] {
        let answer = get(edge, "/", "alice").await;
        assert_eq!((answer.status, answer.remaining()), (200, left), "{answer:?}");
        assert_eq!(
            answer.header("x-ratelimit-limit"),
            r#"5, 60;w=604800;name="global", 5;w=604800;name="per-user", 20;w=604800;name="per-path", 30;w=604800;name="per-address""#
        );
    }
    let answer = get(edge, "/", "alice").await;
    assert_eq!((answer.status, answer.remaining()), (429, 0), "{answer:?}");
    assert_eq!(answer.header("x-envoy-ratelimited"), "true");
    let wait_s: u64 = answer.header("retry-after").parse().expect("seconds");
    assert!((1..=604_800).contains(&wait_s), "{wait_s}");
    assert_eq!(answer.header("x-ratelimit-reset").parse(), Ok(wait_s));
    assert_eq!(get(edge, "/", "bob").await.remaining(), 4, "another user has a limit of his own");
}

#[tokio::test]
async fn each_of_four_tiers_refuses_alone_and_what_it_refuses_costs_the_others_nothing() {
    let served = serve("rules.yaml").await;
    let envoy = Proxy::start("envoy.yaml", served.tidegate.grpc, &[]).await;
    let edge = envoy.listener("fail_open").await;
    let mut other = Other::new(&served, "edge").await;
    let (path, address) = (("path", "/"), ("remote_address", "127.0.0.1"));
    let tiers: [(&[(&str, &str)], u64); 4] =
        [(&[("tier", "global")], 60), (&[("user", "alice")], 5), (&[path, address], 20), (&[address], 30)];
    for (entries, limit) in tiers {
        let tier = grpc::descriptor(entries);
        other.spend(tier.clone(), limit).await;
        for _ in 0..3 {
            let answer = get(edge, "/", "alice").await;
            assert_eq!((answer.status, answer.remaining()), (429, 0), "{entries:?}: {answer:?}");
        }
        other.give_back(tier, limit).await;
    }
    let answer = get(edge, "/", "alice").await;
    assert_eq!((answer.status, answer.remaining()), (200, 4), "{answer:?}");
}

#[tokio::test]
async fn a_route_adds_a_nested_rule_and_a_limit_of_its_own() {
    let served = serve("rules.yaml").await;
    let envoy = Proxy::start("envoy.yaml", served.tidegate.grpc, &[("unit: HOUR", "unit: DAY")]).await;
    let edge = envoy.listener("fail_open").await;
    let mut other = Other::new(&served, "edge").await;
    let answer = get(edge, "/search?q=tides", "alice").await;
    assert_eq!((answer.status, answer.remaining()), (200, 2), "three searches for each user: {answer:?}");
    let limits = answer.header("x-ratelimit-limit");
    assert!(limits.starts_with("3, ") && limits.contains(r#"3;w=604800;name="per-user-search""#), "{limits}");
    assert!(limits.contains("42;w=86400"), "the limit sent along takes the place of the rule's: {limits}");
    assert!(!limits.contains("replaced-by-the-caller"), "{limits}");

    let limit =
        RateLimitOverride { requests_per_unit: 42, unit: RateLimitUnit::Day.into(), ..RateLimitOverride::default() };
    let sent_along = RateLimitDescriptor { limit: Some(limit), ..grpc::descriptor(&[("override", "demo")]) };
    other.spend(sent_along, 41).await;
    let answer = get(edge, "/search?q=ebb", "bob").await;
    assert_eq!((answer.status, answer.remaining()), (429, 0), "42 of 42 are spent: {answer:?}");
    assert_eq!(get(edge, "/", "bob").await.status, 200, "other routes do not have it");
}

#[tokio::test]
async fn without_tidegate_one_listener_lets_pass_and_the_other_answers_503() {
    let stops: [fn(&Tidegate); 2] = [Tidegate::kill, Tidegate::terminate];
    for stop in stops {
        let mut served = serve("rules.yaml").await;
        let envoy = Proxy::start("envoy.yaml", served.tidegate.grpc, &[]).await;
        let (open, closed) = (envoy.listener("fail_open").await, envoy.listener("fail_closed").await);
        assert_eq!(get(open, "/", "alice").await.remaining(), 4);
        assert_eq!(get(closed, "/", "alice").await.remaining(), 3);
        stop(&served.tidegate);
        served.tidegate.ended().await;
        for _ in 0..10 {
            let answer = get(open, "/", "alice").await;
            assert_eq!((answer.status, answer.find("x-ratelimit-remaining")), (200, None), "{answer:?}");
            let answer = get(closed, "/", "alice").await;
            assert_eq!((answer.status, answer.find("x-ratelimit-remaining")), (503, None), "{answer:?}");
        }
    }
}

/// A rule for each policy. Two instances share the limits, so that one alone admits two of four.
const POLICIES: &str = "domain: edge
descriptors:
  - { key: user, value: error, rate_limit: { unit: week, requests_per_unit: 4 } }
  - { key: user, value: open, on_store_failure: open, rate_limit: { unit: week, requests_per_unit: 4 } }
  - { key: user, value: closed, on_store_failure: closed, rate_limit: { unit: week, requests_per_unit: 4 } }
  - { key: user, value: local, on_store_failure: local, rate_limit: { unit: week, requests_per_unit: 4 } }
";

#[tokio::test]
async fn without_redis_a_user_is_answered_by_the_policy_of_the_rule_and_only_error_asks_envoys_own() {
    let rules = rule_file(POLICIES);
    let nobody_listens = Port::free();
    let url = nobody_listens.address().to_string();
    let tidegate = Tidegate::start(rules.path(), &[("REDIS_URL", &url), ("REPLICAS", "2")]).await;
    let envoy = Proxy::start("envoy.yaml", tidegate.grpc, &[]).await;
    let (open, closed) = (envoy.listener("fail_open").await, envoy.listener("fail_closed").await);

    for (listener, on_error) in [(open, 200), (closed, 503)] {
        let answer = get(listener, "/", "error").await;
        assert_eq!((answer.status, answer.find("x-ratelimit-remaining")), (on_error, None), "{answer:?}");
        let answer = get(listener, "/", "open").await;
        assert_eq!((answer.status, answer.find("x-ratelimit-remaining")), (200, None), "{answer:?}");

        let answer = get(listener, "/", "closed").await;
        assert_eq!((answer.status, answer.find("x-ratelimit-remaining")), (429, None), "{answer:?}");
        let wait_s: u64 = answer.header("retry-after").parse().expect("seconds");
        assert!(wait_s >= 1, "{answer:?}");
        assert_eq!(answer.header("content-type"), "application/json");
        assert_eq!(answer.body, "{\"error\":\"rate_limiter_unavailable\"}\n");
    }
    for (listener, status, left) in [(open, 200, 1), (closed, 200, 0), (open, 429, 0), (closed, 429, 0)] {
        let answer = get(listener, "/", "local").await;
        assert_eq!((answer.status, answer.remaining()), (status, left), "{answer:?}");
        assert_eq!(answer.header("x-ratelimit-limit"), "4, 4;w=604800");
        assert_eq!(answer.find("retry-after").is_some(), status == 429, "{answer:?}");
    }
}

#[tokio::test]
async fn a_cost_known_only_afterwards_is_charged_and_the_next_request_refused() {
    let served = serve("llm-tokens.yaml").await;
    let envoy = Proxy::start("envoy-llm-tokens.yaml", served.tidegate.grpc, &[]).await;
    let edge = envoy.listener("llm").await;
    let mut other = Other::new(&served, "llm").await;
    let budget =
        || RateLimitDescriptor { hits_addend: Some(0), ..grpc::descriptor(&[("route", "chat"), ("user", "alice")]) };
    // Seven tokens at a time out of twenty; the last seven do not fit and are counted all the same.
    for (before, after) in [(20, 13), (13, 6), (6, 0)] {
        let answer = get(edge, "/chat", "alice").await;
        assert_eq!((answer.status, answer.remaining()), (200, before), "{answer:?}");
        eventually("the cost is charged", async || (other.call(budget()).await.limit_remaining == after).then_some(()))
            .await;
    }
    for _ in 0..3 {
        let answer = get(edge, "/chat", "alice").await;
        assert_eq!((answer.status, answer.remaining()), (429, 0), "{answer:?}");
    }
    assert_eq!(get(edge, "/chat", "bob").await.status, 200, "another user has a budget of his own");
}

#[tokio::test]
async fn tracing_headers_that_envoy_copies_into_the_call_do_not_let_a_request_pass() {
    let served = serve("rules.yaml").await;
    let tracer = "stat_prefix: fail_open
          max_request_headers_kb: 96
          tracing:
            provider:
              name: envoy.tracers.opentelemetry
              typed_config:
                \"@type\": type.googleapis.com/envoy.config.trace.v3.OpenTelemetryConfig
                grpc_service: { envoy_grpc: { cluster_name: upstream } }
                service_name: edge";
    let roomy = "stat_prefix: upstream\n          max_request_headers_kb: 96";
    let changes = [("stat_prefix: fail_open", tracer), ("stat_prefix: upstream", roomy)];
    let envoy = Proxy::start("envoy.yaml", served.tidegate.grpc, &changes).await;
    let edge = envoy.listener("fail_open").await;
    let trace = "alice\r\ntraceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\r\ntracestate: a=";
    let user = [trace.as_bytes(), &vec![b'x'; 60 << 10]].concat();
    for left in [4, 3, 2, 1, 0] {
        let answer = get(edge, "/", &user).await;
        assert_eq!((answer.status, answer.remaining()), (200, left), "{answer:?}");
    }
    assert_eq!(get(edge, "/", &user).await.status, 429);
}

/// Room for long headers on the way, and a route whose requests have two hundred descriptors beside the four tiers.
fn for_the_hostile() -> [(&'static str, String); 3] {
    let include = "typed_per_filter_config:
                  envoy.filters.http.ratelimit:
                    \"@type\": type.googleapis.com/envoy.extensions.filters.http.ratelimit.v3.RateLimitPerRoute
                    vh_rate_limits: INCLUDE";
    let limits = (0..200).fold(String::new(), |mut limits, number| {
        let key = format!("{{ descriptor_key: many, descriptor_value: \"{number}\" }}");
        let _ = write!(limits, "\n                  - actions: [{{ generic_key: {key} }}]");
        limits
    });
    let search = "- match: { prefix: \"/search\" }";
    let many = format!(
        "- match: {{ path: /many }}
                {include}
                route:
                  cluster: upstream
                  rate_limits:{limits}
              {search}"
    );
    let roomy = |listener| format!("{listener}\n          max_request_headers_kb: 96");
    let listeners = ["stat_prefix: fail_open", "stat_prefix: upstream"];
    let [open, upstream] = listeners.map(|listener| (listener, roomy(listener)));
    [open, upstream, (search, many)]
}

/// A rule for the last of the two hundred.
const LAST_OF_MANY: &str = "
  - key: many
    value: 199
    rate_limit: { name: last-of-many, unit: week, requests_per_unit: 1000 }
";

#[tokio::test]
async fn nothing_a_client_sends_turns_a_refusal_into_an_error_that_envoy_lets_pass() {
    let served = serve_and("rules.yaml", LAST_OF_MANY).await;
    let changes = for_the_hostile();
    let changes = changes.each_ref().map(|(from, to)| (*from, to.as_str()));
    let envoy = Proxy::start("envoy.yaml", served.tidegate.grpc, &changes).await;
    let edge = envoy.listener("fail_open").await;
    let mut other = Other::new(&served, "edge").await;
    let long = |byte: u8| vec![byte; 60 << 10];
    let users = [b"\x80".to_vec(), b"a\xffb".to_vec(), b"\xc3\x28".to_vec(), long(b'a'), long(0xff)];

    for user in &users {
        for left in [4, 3] {
            let answer = get(edge, "/", user).await;
            let seen = (answer.status, answer.remaining());
            assert_eq!(seen, (200, left), "{:?} is counted like any user", &user[..user.len().min(8)]);
        }
    }
    let answer = get(edge, "/many", "alice").await;
    assert_eq!(answer.status, 200);
    assert!(answer.header("x-ratelimit-limit").contains("name=\"last-of-many\""), "{answer:?}");

    other.spend(grpc::descriptor(&[("remote_address", "127.0.0.1")]), 30 - 11).await;
    for user in &users {
        assert_eq!(get(edge, "/", user).await.status, 429, "{:?}", &user[..user.len().min(8)]);
        assert_eq!(get(edge, "/many", user).await.status, 429, "{:?}", &user[..user.len().min(8)]);
    }
    assert_eq!(get(edge, "/many", "alice").await.status, 429);
}

/// Tokens of the user ann, signed with the key in the example, but for the last: its key is another.
const FREE: &str = "eyJhbGciOiJIUzI1NiJ9.eyJpc3MiOiJzaG9wIiwic3ViIjoiYW5uIiwicGxhbiI6ImZyZWUifQ.wPFYGesP17OhzTz6Kmyvf4yHnjVYsr0y5VxxXBennD4";
const PREMIUM: &str = "eyJhbGciOiJIUzI1NiJ9.eyJpc3MiOiJzaG9wIiwic3ViIjoiYW5uIiwicGxhbiI6InByZW1pdW0ifQ.vVkW8mVlwumkrEJRk5lUQ9kMEGG9eFfYLzn1zLgsrUI";
const WITHOUT_A_PLAN: &str =
    "eyJhbGciOiJIUzI1NiJ9.eyJpc3MiOiJzaG9wIiwic3ViIjoiYW5uIn0.24W_GdSli4gX4U_cRMtTmt6WFEWri5K3BNDHMJ1PwMw";
const FORGED: &str = "eyJhbGciOiJIUzI1NiJ9.eyJpc3MiOiJzaG9wIiwic3ViIjoiYW5uIiwicGxhbiI6InByZW1pdW0ifQ.yHj1a7l04szAN5ye3CCQM4WpFexxFAqlKjNX285hQHU";

#[tokio::test]
async fn the_plan_is_what_the_token_says_and_nothing_else_that_a_client_sends() {
    let served = serve("plans/rules.yaml").await;
    let envoy = Proxy::start("plans/envoy.yaml", served.tidegate.grpc, &[]).await;
    let shop = envoy.listener("shop").await;
    let with =
        async |token: &str, path: &str| get(shop, path, format!("premium\r\nauthorization: Bearer {token}")).await;
    for (token, path, left, name) in [
        (FREE, "/", 99, "free"),
        (FREE, "/?plan=premium", 98, "free"),
        (PREMIUM, "/", 9_999, "premium"),
        (WITHOUT_A_PLAN, "/", 9, "other-plan"),
        (PREMIUM, "/api/search?q=ebb", 99, "search"),
        (PREMIUM, "//api/%73earch?q=flow", 98, "search"),
    ] {
        let answer = with(token, path).await;
        assert_eq!((answer.status, answer.remaining()), (200, left), "{path}: {answer:?}");
        assert!(answer.header("x-ratelimit-limit").contains(&format!("name=\"{name}\"")), "{path}: {answer:?}");
    }
    assert_eq!(with(FORGED, "/").await.status, 401);
    assert_eq!(get(shop, "/", "premium").await.status, 401, "a header names no plan");
    assert_eq!(with(PREMIUM, "/").await.remaining(), 9_996, "what was not let in was not counted");
}

#[tokio::test]
async fn who_logs_in_needs_no_token_and_is_counted_by_address_however_the_path_is_spelled() {
    let served = serve("plans/rules.yaml").await;
    let envoy = Proxy::start("plans/envoy.yaml", served.tidegate.grpc, &[]).await;
    let shop = envoy.listener("shop").await;
    for (path, left) in [("/login", 4), ("/login?a", 3), ("/login?b=%2e", 2), ("/login", 1), ("/login", 0)] {
        let answer = get(shop, path, "").await;
        assert_eq!((answer.status, answer.remaining()), (200, left), "{path}: {answer:?}");
    }
    for path in ["/login", "/login?c"] {
        assert_eq!(get(shop, path, "").await.status, 429, "{path}");
    }
    for path in ["//login", "/./login?d", "/%6Cogin"] {
        assert_eq!(get(shop, path, "").await.status, 401, "{path} is not let in without a token");
        let answer = get(shop, path, format!("ann\r\nauthorization: Bearer {PREMIUM}")).await;
        assert_eq!((answer.status, answer.remaining()), (429, 0), "{path}: {answer:?}");
    }
}
