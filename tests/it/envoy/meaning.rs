//! Rules that say what people mean, and answers that clients can act on, as a client of a real Envoy sees them.

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use serde_json::Value;
use tidegate::proto::envoy::service::ratelimit::v3::RateLimitRequest;
use tidegate::proto::envoy::service::ratelimit::v3::rate_limit_response::Code;
use tidegate::proto::envoy::service::ratelimit::v3::rate_limit_service_client::RateLimitServiceClient;
use tokio::process::Command;

use super::proxy::{Proxy, get, get_with, statuses};
use super::{Other, serve_text};
use crate::grpc::descriptor;
use crate::http::Answer;
use crate::support::{eventually, output, repository};

/// The address that a client has is the one that it says: a proxy that is trusted stands in front.
const TRUSTED: (&str, &str) = ("xff_num_trusted_hops: 0", "xff_num_trusted_hops: 1");

/// Tiers of two hits each, and two addresses about which something else is said.
const LISTS: &str = "domain: edge
charging: all_or_nothing
entries: { remote_address: { as: ip } }
descriptors:
  - { key: remote_address, cidr: [203.0.113.0/24], deny: true, message: This network may not come in. }
  - { key: remote_address, values: [192.0.2.9], exempt: true }
  - { key: remote_address, rate_limit: { unit: week, requests_per_unit: 2 } }
  - { key: tier, rate_limit: { unit: week, requests_per_unit: 2 } }
  - { key: user, rate_limit: { unit: week, requests_per_unit: 2 } }
";

#[tokio::test]
async fn a_denied_address_is_refused_and_an_exempt_one_passes_and_neither_moves_a_counter() {
    let served = serve_text(LISTS, &[("REFUSAL_BODY", "json")]).await;
    let envoy = Proxy::start("envoy.yaml", served.tidegate.grpc, &[TRUSTED]).await;
    let edge = envoy.listener("fail_open").await;
    let mut other = Other::new(&served, "edge").await;
    let from =
        async |address: &str| get_with(edge, "/", &[&format!("x-forwarded-for: {address}"), "x-user-id: alice"]).await;

    for address in ["203.0.113.7", "::ffff:203.0.113.7"] {
        let answer = from(address).await;
        assert_eq!(answer.status, 429, "{answer:?}");
        let body: Value = serde_json::from_str(&answer.body).expect("JSON");
        assert_eq!((&body["error"], &body["message"]), (&"denied".into(), &"This network may not come in.".into()));
    }
    for left in [1, 0] {
        assert_eq!(from("192.0.2.1").await.remaining(), left, "nothing was taken before");
    }
    let tiers = [("tier", "global"), ("user", "alice"), ("remote_address", "192.0.2.1")];
    for tier in tiers {
        assert_eq!(other.call(descriptor(&[tier])).await.code(), Code::OverLimit, "{tier:?} is full");
    }
    assert_eq!(from("192.0.2.1").await.status, 429);
    for _ in 0..5 {
        let answer = from("192.0.2.9").await;
        assert_eq!((answer.status, answer.find("x-ratelimit-limit")), (200, None), "{answer:?}");
    }
    for tier in tiers {
        other.give_back(descriptor(&[tier]), 1).await;
        other.spend(descriptor(&[tier]), 1).await;
        assert_eq!(other.call(descriptor(&[tier])).await.code(), Code::OverLimit, "{tier:?} is as full as it was");
    }
}

#[tokio::test]
async fn a_thousand_addresses_of_one_network_are_one_client() {
    let rules = "domain: edge
entries: { remote_address: { as: ip } }
descriptors: [{ key: remote_address, rate_limit: { unit: week, requests_per_unit: 1000 } }]
";
    let served = serve_text(rules, &[]).await;
    let envoy = Proxy::start("envoy.yaml", served.tidegate.grpc, &[TRUSTED]).await;
    let edge = envoy.listener("fail_open").await;
    let from = |host: u32| ("/".to_owned(), format!("x-forwarded-for: 2001:db8:1:2:{host:x}::{host:x}"));
    let found = statuses(edge, (0..1_001).map(from)).await;
    assert_eq!(found.iter().filter(|status| **status == 200).count(), 1_000);
    assert_eq!(found.last(), Some(&429));
    assert_eq!(get_with(edge, "/", &["x-forwarded-for: 2001:db8:1:3::1"]).await.status, 200, "the next network");
}

/// The header that Envoy appends its peer's address to, or that a proxy in front has made, as a descriptor of its own.
const FORWARDED: (&str, &str) =
    ("- remote_address: {}", "- request_headers: { header_name: x-forwarded-for, descriptor_key: remote_address }");

#[tokio::test]
async fn a_zone_id_makes_no_new_client_and_slips_past_no_list() {
    let rules = "domain: edge
entries: { remote_address: { as: ip } }
descriptors:
  - { key: remote_address, cidr: [\"fe80:1::/32\"], deny: true }
  - { key: remote_address, rate_limit: { unit: week, requests_per_unit: 5 } }
";
    let served = serve_text(rules, &[]).await;
    // Envoy leaves the header as the trusted proxy sent it.
    let kept = ("use_remote_address: true", "use_remote_address: false");
    let envoy = Proxy::start("envoy.yaml", served.tidegate.grpc, &[TRUSTED, FORWARDED, kept]).await;
    let edge = envoy.listener("fail_open").await;
    let from = async |list: &str| get_with(edge, "/", &[&format!("x-forwarded-for: {list}")]).await.status;
    for address in ["fe80::1%eth0", "[fe80::2%eth0]", "[fe80::3%25eth0]:443", "10.0.0.1, fe80::4%2", "fe80::5"] {
        assert_eq!(from(address).await, 200, "{address}");
    }
    for address in ["fe80::6%eth1", "192.0.2.1, fe80::7%", "fe80:1::9%2", "192.0.2.1, [fe80:1::9%eth0]:443"] {
        assert_eq!(from(address).await, 429, "{address}");
    }
    assert_eq!(from("fe80::6%eth1, 192.0.2.1").await, 200, "the last address counts");
}

#[tokio::test]
async fn ten_thousand_query_strings_are_one_path() {
    let rules = "domain: edge
entries: { path: { as: path } }
descriptors: [{ key: path, descriptors: [{ key: remote_address, rate_limit: { unit: week, requests_per_unit: 10005 } }] }]
";
    let served = serve_text(rules, &[]).await;
    let envoy = Proxy::start("envoy.yaml", served.tidegate.grpc, &[]).await;
    let edge = envoy.listener("fail_open").await;
    let spelled = ["//login", "/%6cogin", "/./login?x", "/login?a=/../b", "/x/%2e%2e/login"];
    let asked = (0..10_000).map(|query| format!("/login?x={query}")).chain(spelled.map(str::to_owned));
    let found = statuses(edge, asked.map(|path| (path, "x-a: b".to_owned()))).await;
    assert!(found.iter().all(|status| *status == 200));
    assert_eq!(get(edge, "/login", "").await.status, 429, "all of them were taken from one counter");
    assert_eq!(get(edge, "/logout", "").await.status, 200);
}

#[tokio::test]
async fn searches_and_profiles_of_different_costs_exhaust_one_bucket() {
    let rules = "domain: edge
charging: all_or_nothing
entries: { path: { as: path } }
descriptors:
  - { key: path, value: /search, descriptors: [{ key: remote_address, request_cost: 10 }] }
  - { key: path, value: /profile, descriptors: [{ key: remote_address }] }
  - { key: path, descriptors: [{ key: remote_address, request_cost: 5 }] }
  - { key: user, rate_limit: { unit: week, requests_per_unit: 100, algorithm: token_bucket } }
";
    let served = serve_text(rules, &[]).await;
    // Nothing but these descriptors: that route of the example sends a limit along.
    let changes = [("- match: { prefix: \"/search\" }", "- match: { prefix: \"/elsewhere\" }")];
    let envoy = Proxy::start("envoy.yaml", served.tidegate.grpc, &changes).await;
    let edge = envoy.listener("fail_open").await;
    let mut left = 100;
    for number in 0..5 {
        left -= 10;
        assert_eq!(get(edge, &format!("/search?q={number}"), "alice").await.remaining(), left);
    }
    for _ in 0..50 {
        left -= 1;
        assert_eq!(get(edge, "/profile", "alice").await.remaining(), left);
    }
    for path in ["/profile", "/search", "/"] {
        assert_eq!(get(edge, path, "alice").await.status, 429, "{path}");
    }
    assert_eq!(get(edge, "/", "bob").await.remaining(), 95);
}

/// The access log of the example says how long each request was to wait, which its upstream is not told otherwise.
const TOLD: [(&str, &str); 2] = [
    ("request_headers_to_remove: [x-envoy-fault-delay-request]", "request_headers_to_remove: [x-none]"),
    ("%RESPONSE_FLAGS% took_ms", "wait_ms=%REQ(x-envoy-fault-delay-request)% took_ms"),
];

/// What came of sixteen requests at once: how long each was to wait, by Envoy's access log, and how long each took.
async fn sixteen(algorithm: &str) -> Vec<(u16, u64, Duration)> {
    let text = std::fs::read_to_string(repository("examples/delay.yaml")).expect("it reads");
    let served = serve_text(&text.replace("algorithm: gcra, burst: 1", algorithm), &[]).await;
    let envoy = Proxy::start("envoy-delay.yaml", served.tidegate.grpc, &TOLD).await;
    let edge = envoy.listener("delay").await;
    let began = Instant::now();
    let all = (0..16).map(|number| async move {
        let answer = get(edge, &format!("/{number}"), "alice\r\nx-envoy-fault-delay-request: 1").await;
        (number, answer.status, began.elapsed())
    });
    let answers = join_all(all).await;
    let mut told = Vec::new();
    for (number, status, took) in answers {
        let line = eventually("the request is logged", async || {
            envoy.log().lines().find(|line| line.starts_with(&format!("/{number} "))).map(str::to_owned)
        })
        .await;
        let wait = line.split("wait_ms=").nth(1).and_then(|rest| rest.split(' ').next()).expect("a wait");
        told.push((status, wait.parse().unwrap_or(0), took));
    }
    told.sort_by_key(|(status, wait, _)| (*status, *wait));
    told
}

#[tokio::test]
async fn what_comes_too_early_waits_for_its_slot_and_what_would_wait_too_long_is_refused() {
    for algorithm in ["algorithm: gcra, burst: 1", "algorithm: leaky_bucket, burst: 11"] {
        let told = sixteen(algorithm).await;
        let admitted: Vec<_> = told.iter().filter(|(status, ..)| *status == 200).collect();
        let refused = told.iter().filter(|(status, ..)| *status == 429).count();
        // A machine so busy that the burst took longer than a slot has room for more.
        let most = told.iter().filter(|(status, ..)| *status == 429).map(|(.., took)| *took).max().unwrap_or_default();
        let more = usize::try_from(most.as_millis() / 200).unwrap();
        assert!((11..=11 + more).contains(&admitted.len()) && admitted.len() + refused == 16, "{algorithm}: {told:?}");
        for (slot, (_, wait, took)) in admitted.iter().enumerate() {
            let slot_ms = 200 * u64::try_from(slot).unwrap();
            let late = u64::try_from(most.as_millis()).unwrap() + 1;
            assert!(*wait <= slot_ms && wait + late >= slot_ms, "the slot of {slot_ms} ms is {wait} ms away");
            // Envoy counts in milliseconds of its own.
            assert!(took.as_millis() + 50 >= u128::from(*wait), "nobody is answered before its wait is over: {told:?}");
        }
    }
}

#[tokio::test]
async fn a_call_may_be_held_in_place_of_the_fault_filter() {
    let text = std::fs::read_to_string(repository("examples/delay.yaml")).expect("it reads");
    let served = serve_text(&text, &[]).await;
    let envoy = Proxy::start("envoy-delay.yaml", served.tidegate.grpc, &TOLD).await;
    let edge = envoy.listener("delay").await;
    let began = Instant::now();
    let answers = join_all((0..4).map(|_| get_with(edge, "/", &["x-held: alice"]))).await;
    assert!(answers.iter().all(|answer| answer.status == 200));
    assert!(began.elapsed() >= Duration::from_millis(590), "the fourth has a slot 600 ms after the first");
    assert!(!envoy.log().contains("wait_ms=6"), "the fault filter is asked for nothing");
}

#[tokio::test]
async fn a_delay_that_grows_never_refuses() {
    let text = std::fs::read_to_string(repository("examples/delay.yaml"))
        .expect("it reads")
        .replace("unit: minute", "unit: week");
    let served = serve_text(&text, &[]).await;
    let envoy = Proxy::start("envoy-delay.yaml", served.tidegate.grpc, &TOLD).await;
    let edge = envoy.listener("delay").await;
    let mut other = Other::new(&served, "delay").await;
    let crawler = || descriptor(&[("crawler", "bot")]);
    let wait = async |path: &str| {
        assert_eq!(get_with(edge, path, &["x-crawler: bot"]).await.status, 200);
        eventually("the request is logged", async || {
            let log = envoy.log();
            let line = log.lines().find(|line| line.starts_with(&format!("{path} ")))?;
            Some(line.split("wait_ms=").nth(1)?.split(' ').next()?.to_owned())
        })
        .await
    };
    other.spend(crawler(), 59).await;
    assert_eq!(wait("/60").await, "-", "the last that fits");
    other.spend(crawler(), 9).await;
    assert_eq!(wait("/70").await, "1000", "ten over");
    other.spend(crawler(), 89).await;
    assert_eq!(wait("/160").await, "5000", "a hundred over");
    assert_eq!(wait("/more").await, "5000");
}

#[tokio::test]
async fn from_a_share_of_the_limit_on_answers_carry_a_warning() {
    let rules = "domain: edge
descriptors: [{ key: user, rate_limit: { name: per-user, unit: week, requests_per_unit: 5, warn_at: 80% } }]
";
    let served = serve_text(rules, &[]).await;
    let envoy = Proxy::start("envoy.yaml", served.tidegate.grpc, &[]).await;
    let edge = envoy.listener("fail_open").await;
    for used in 1..=5 {
        let answer = get(edge, "/", "alice").await;
        let warning = answer.find("x-ratelimit-warning");
        assert_eq!((answer.status, warning.is_some()), (200, used >= 4), "{used} of 5: {answer:?}");
        assert!(
            warning.is_none_or(|warning| warning.starts_with(&format!("\"per-user\";r={};q=5;t=", 5 - used))),
            "{answer:?}"
        );
    }
    let answer = get(edge, "/", "alice").await;
    assert_eq!((answer.status, answer.find("x-ratelimit-warning")), (429, None), "{answer:?}");
}

const REFUSING: &str = "domain: edge
descriptors:
  - { key: user, value: quiet, expose: false, rate_limit: { name: hidden, unit: week, requests_per_unit: 0 } }
  - { key: user, value: told, message: Ask for more at the desk., rate_limit: { unit: hour, requests_per_unit: 0 } }
  - { key: user, rate_limit: { name: per-user, unit: hour, requests_per_unit: 1, algorithm: gcra } }
";

async fn refused(variables: &[(&str, &str)], user: &str) -> (Proxy, Answer) {
    let served = serve_text(REFUSING, variables).await;
    let envoy = Proxy::start(
        "envoy.yaml",
        served.tidegate.grpc,
        &[("enable_retry_after_header: true", "enable_retry_after_header: false")],
    )
    .await;
    let edge = envoy.listener("fail_open").await;
    let _ = get(edge, "/", user).await;
    (envoy, get(edge, "/", user).await)
}

#[tokio::test]
async fn a_refusal_says_what_a_client_can_act_on() {
    let (_envoy, answer) = refused(&[("REFUSAL_BODY", "json"), ("RESPONSE_HEADERS", "ietf")], "alice").await;
    assert_eq!((answer.status, answer.header("content-type")), (429, "application/json"), "{answer:?}");
    let wait_s: u64 = answer.header("retry-after").parse().expect("seconds");
    assert!((3_590..=3_600).contains(&wait_s), "{answer:?}");
    let body: Value = serde_json::from_str(&answer.body).expect("JSON");
    assert_eq!(
        (&body["error"], &body["limit"], &body["retry_after"]),
        (&"rate_limited".into(), &1.into(), &wait_s.into())
    );
    assert!(body["message"].is_string() && body["window"].is_string(), "{body}");
    assert_eq!(answer.header("ratelimit"), format!("\"per-user\";r=0;t={wait_s}"));
    assert!(answer.header("ratelimit-policy").starts_with("\"per-user\";q=1"), "{answer:?}");

    let (_envoy, answer) = refused(&[("REFUSAL_BODY", "json"), ("RESPONSE_HEADERS", "x-ratelimit")], "told").await;
    let body: Value = serde_json::from_str(&answer.body).expect("JSON");
    assert_eq!(body["message"], "Ask for more at the desk.", "{answer:?}");

    let (_envoy, answer) = refused(&[("REFUSAL_BODY", "json"), ("RESPONSE_HEADERS", "ietf")], "quiet").await;
    assert_eq!(answer.status, 429);
    let said = format!("{answer:?}");
    assert!(
        !said.contains("hidden") && answer.find("ratelimit").is_none() && answer.find("x-ratelimit-limit").is_none(),
        "{said}"
    );
}

/// The settings that `examples/run` exports, with the values that an empty environment gets.
fn settings_of_the_first_contact() -> Vec<(String, String)> {
    let script = std::fs::read_to_string(repository("examples/run")).expect("it reads");
    let words = script.lines().filter_map(|line| line.strip_prefix("export ")).flat_map(str::split_whitespace);
    let setting = |word: &str| {
        let (variable, value) = word.split_once('=').expect("VARIABLE=VALUE");
        let (_, value) = value.trim_end_matches("}\"").split_once('-').expect("a default");
        (variable.to_owned(), value.to_owned())
    };
    words.map(setting).collect()
}

#[tokio::test]
async fn a_person_who_tries_the_examples_sees_headers_and_a_body() {
    let settings = settings_of_the_first_contact();
    let settings: Vec<_> = settings.iter().map(|(variable, value)| (variable.as_str(), value.as_str())).collect();
    let served = serve_text(&rules_of_the_example(), &settings).await;
    let envoy = Proxy::start("envoy.yaml", served.tidegate.grpc, &[]).await;
    let edge = envoy.listener("fail_open").await;
    for left in [4, 3, 2, 1, 0] {
        let answer = get(edge, "/", "alice").await;
        assert_eq!((answer.status, answer.remaining()), (200, left), "{answer:?}");
        assert!(answer.header("ratelimit").contains(&format!("\"per-user\";r={left};")), "{answer:?}");
    }
    let answer = get(edge, "/", "alice").await;
    assert_eq!((answer.status, answer.header("content-type")), (429, "application/json"), "{answer:?}");
    let body: Value = serde_json::from_str(&answer.body).expect("JSON");
    assert_eq!((&body["error"], &body["limit"]), (&"rate_limited".into(), &5.into()), "{body}");
    let printed = format!("{answer:?}").to_ascii_lowercase();
    for once in ["retry-after: ", "ratelimit-policy: ", "x-ratelimit-limit: "] {
        assert_eq!(printed.matches(once).count(), 1, "{once}{answer:?}");
    }
}

/// The rules of the example, whose minutes last a week.
fn rules_of_the_example() -> String {
    std::fs::read_to_string(repository("examples/rules.yaml")).expect("it reads").replace("unit: minute", "unit: week")
}

#[tokio::test]
async fn a_grpc_client_gets_a_message_that_it_can_read() {
    for (kind, begins) in [("json", "{\"error\":\"rate_limited\""), ("text", "Too many requests")] {
        let served = serve_text(REFUSING, &[("REFUSAL_BODY", kind)]).await;
        let envoy = Proxy::start("envoy.yaml", served.tidegate.grpc, &[]).await;
        let edge = envoy.listener("fail_open").await;
        let mut client = RateLimitServiceClient::connect(format!("http://{edge}")).await.expect("Envoy speaks HTTP/2");
        let mut call = async || {
            let mut request = tonic::Request::new(RateLimitRequest::default());
            request.metadata_mut().insert("x-user-id", "alice".parse().expect("a value"));
            client.should_rate_limit(request).await
        };
        // The upstream is no gRPC server; what passes to it is not refused.
        assert_ne!(call().await.err().map(|status| status.code()), Some(tonic::Code::ResourceExhausted));
        let status = call().await.expect_err("it is refused");
        assert_eq!(status.code(), tonic::Code::ResourceExhausted);
        assert!(status.message().starts_with(begins), "{status:?}");
    }
}

#[tokio::test]
async fn the_access_log_names_the_rule_behind_each_refusal() {
    let id = "%DYNAMIC_METADATA(envoy.filters.http.ratelimit:decision:id)%";
    let all = format!("{id} %DYNAMIC_METADATA(envoy.filters.http.ratelimit:decision)%");
    let served = serve_text(REFUSING, &[("DECISION_METADATA", "true")]).await;
    let envoy = Proxy::start("envoy.yaml", served.tidegate.grpc, &[(id, &all)]).await;
    let edge = envoy.listener("fail_open").await;
    assert_eq!(get(edge, "/", "alice").await.status, 200);
    assert_eq!(get(edge, "/", "alice").await.status, 429);
    let line = eventually("the refusal is logged", async || {
        envoy.log().lines().find(|line| line.starts_with("429 / decision=")).map(str::to_owned)
    })
    .await;
    assert!(!envoy.log().contains("\n200 "), "one line for each refusal: {}", envoy.log());
    let (id, decision) = line["429 / decision=".len()..].split_once(' ').expect("an id, and the decision");
    let decision: Value = serde_json::from_str(decision).expect("JSON");
    assert_eq!(decision["rule"], "edge.user", "{line}");
    assert_eq!((&decision["outcome"], &decision["provenance"]), (&"refused".into(), &"store".into()), "{line}");
    assert_eq!(decision["generation"].as_f64(), Some(1.0), "{line}");
    let mut why = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    why.args(["why", id, "--instance", &served.tidegate.debug.to_string()]);
    let (status, told, errors) = output(&mut why).await;
    assert!(status.success() && told.contains(" UTC:\nedge  user=alice\n"), "{told}{errors}");
}

/// Every way of reading a value, every answer that there is, and an address that is used up.
const HOSTILE: &str = "domain: edge
charging: all_or_nothing
entries:
  remote_address: { as: ip }
  path: { as: path, case: lower }
  user: { case: lower, sensitive: true }
descriptors:
  - { key: remote_address, values: [192.0.2.9], exempt: true }
  - { key: remote_address, warn_at_none: true }
  - { key: user, values: [root], deny: true }
  - { key: user, rate_limit: { name: per-user, unit: week, requests_per_unit: 100, warn_at: 1% } }
  - { key: path, value: /free, descriptors: [{ key: remote_address, request_cost: 1 }] }
  - { key: path, descriptors: [{ key: remote_address, request_cost: 2 }] }
";

#[tokio::test]
async fn nothing_that_a_client_sends_turns_a_refusal_into_an_admission() {
    let secret = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(secret.path(), "a secret of some length").expect("it is written");
    let rules =
        HOSTILE.replace("warn_at_none: true", "rate_limit: { name: per-address, unit: week, requests_per_unit: 4 }");
    let settings = [
        ("KEY_SECRET_FILE", secret.path().to_str().expect("a path")),
        ("REFUSAL_BODY", "json"),
        ("RESPONSE_HEADERS", "ietf"),
        ("DECISION_METADATA", "true"),
        ("RESPONSE_DYNAMIC_METADATA", "true"),
    ];
    let served = serve_text(&rules, &settings).await;
    let changes = super::for_the_hostile();
    let changes = changes.each_ref().map(|(from, to)| (*from, to.as_str()));
    let envoy = Proxy::start("envoy.yaml", served.tidegate.grpc, &changes).await;
    let edge = envoy.listener("fail_open").await;
    for _ in 0..2 {
        assert_eq!(get(edge, "/free", "alice").await.status, 200);
    }
    assert_eq!(get(edge, "/", "alice").await.status, 200, "this one costs two");
    assert_eq!(get(edge, "/free", "alice").await.status, 429, "the address is used up");
    let long = |byte: u8| vec![byte; 60 << 10];
    let users: [&[u8]; 12] = [
        b"",
        b"\x80",
        b"a\xffb",
        b"\xc3\x28",
        &long(b'a'),
        &long(0xff),
        b"a\r\nx-forwarded-for: 192.0.2.9",
        b"a\r\nx-envoy-external-address: 192.0.2.9",
        b"a\r\nx-real-ip: 192.0.2.9",
        b"a\r\nx-envoy-ratelimited: false",
        b"a\r\ngrpc-timeout: 1n",
        b"%0d%0aset-cookie: x",
    ];
    for user in users {
        for path in ["/", "/free", "/many", "//free?x=%0d%0a", "/%ff%00", "/free;x", "/search"] {
            let answer = get(edge, path, user).await;
            assert_eq!(answer.status, 429, "{path} {:?}", &user[..user.len().min(40)]);
            assert!(answer.find("set-cookie").is_none(), "{answer:?}");
        }
    }
    assert_eq!(get(edge, &format!("/{}", "x".repeat(60 << 10)), "alice").await.status, 429);
}
