//! Who may charge, refund and send limits over `/json` and `/check`: no web page of another site, and others only what a setting grants.

use std::time::Duration;

use crate::http::{self, Answer};
use crate::support::{Tidegate, directory, eventually, in_time, rule_file};

const RULES: &str = "domain: edge
requests: { from_gateway: none, trusted_proxies: [127.0.0.1] }
descriptors:
  - { key: remote_address, rate_limit: { unit: year, requests_per_unit: 3 } }
";
const ADDRESS: &str = r#""entries":[{"key":"remote_address","value":"192.0.2.7"}]"#;
/// Headers of a request that a browser makes for a page of another site.
const PAGE: &str = "host: attacker.example\r\norigin: https://attacker.example\r\nsec-fetch-site: cross-site\r\ncontent-type: text/plain\r\n";
const CURL: &str = "host: 127.0.0.1\r\n";
/// Headers of a page without an origin, which any client of a gateway can write too.
const NULL: &str = "host: 127.0.0.1\r\norigin: null\r\n";

/// Sends a descriptor with more fields, and these header lines.
async fn ask(server: &Tidegate, path: &str, headers: &str, more: &str) -> Answer {
    let body = format!(r#"{{"domain":"edge","descriptors":[{{{ADDRESS}{more}}}]}}"#);
    http::post(server.http, path, body).lines(headers).await
}

/// Uses the limit up.
async fn use_up(server: &Tidegate) {
    for status in [200, 200, 200, 429] {
        assert_eq!(ask(server, "/json", CURL, "").await.status, status);
    }
}

const REFUND: &str = r#","hitsAddend":"99","isNegativeHits":true"#;
const OVERRIDE: &str = r#","limit":{"requestsPerUnit":1000,"unit":"YEAR"}"#;

#[tokio::test]
async fn a_web_page_of_another_site_gives_back_no_hit_and_charges_none() {
    for access in ["on", "loopback"] {
        let variables = [("JSON_RIGHTS", "override,refund"), ("JSON_ACCESS", access)];
        let server = Tidegate::start(rule_file(RULES).path(), &variables).await;
        use_up(&server).await;
        for path in ["/json", "/check/edge"] {
            assert_eq!(ask(&server, path, PAGE, REFUND).await.status, 429, "{path}");
            assert_eq!(ask(&server, path, NULL, REFUND).await.status, 429, "{path}");
            assert_eq!(ask(&server, path, CURL, "").await.status, 429, "{path}: nothing was given back");
        }
        let page = server.metrics().await;
        let refused = |reason: &str, count: usize| {
            let line = format!("tidegate_pages_refused_total{{reason=\"{reason}\"}} {count}");
            assert!(page.contains(&line), "{access}: no {line}");
        };
        let (site, host) = if access == "on" { (2, 0) } else { (1, 1) };
        refused("site", site);
        refused("origin", 2);
        refused("host", host);
        for (reason, count) in [("site", 1), ("origin", 1), ("host", host.min(1))] {
            let (log, reason) = (server.log(), format!("reason=\"{reason}\""));
            let lines = log.lines().filter(|line| line.contains("http.page_refused") && line.contains(&reason));
            assert_eq!(lines.count(), count, "one a minute for each: {log}");
        }
        // The page of the same origin, and nobody's page.
        let port = server.http.port();
        let own =
            format!("host: 127.0.0.1:{port}\r\norigin: http://127.0.0.1:{port}\r\nsec-fetch-site: same-origin\r\n");
        assert_eq!(ask(&server, "/json", &own, REFUND).await.status, 200);
        assert_eq!(ask(&server, "/json", CURL, "").await.status, 200, "the refund counts");
    }
}

#[tokio::test]
async fn a_refused_page_is_told_why_in_the_form_of_a_refusal() {
    let server = Tidegate::start(rule_file(RULES).path(), &[]).await;
    let why = "The request was not decided: a web page of another site makes it (Origin).";
    let refused = ask(&server, "/json", NULL, "").await;
    assert_eq!((refused.status, refused.header("content-type")), (429, "application/json"), "{refused}");
    assert_eq!(refused.body, format!(r#"{{"overallCode":"OVER_LIMIT","dynamicMetadata":{{"reason":"{why}"}}}}"#));
    assert_eq!(ask(&server, "/check/edge", NULL, "").await.body, format!("{why}\n"));
    let rules = rule_file(&RULES.replace(" }\ndescriptors", ", refusal_status: 403 }\ndescriptors"));
    let server = Tidegate::start(rules.path(), &[]).await;
    assert_eq!(ask(&server, "/check/edge", NULL, "").await.status, 403, "refusal_status");
}

#[tokio::test]
async fn no_header_that_a_client_writes_turns_a_refusal_into_another_status() {
    for access in ["on", "loopback"] {
        let server = Tidegate::start(rule_file(RULES).path(), &[("JSON_ACCESS", access)]).await;
        use_up(&server).await;
        for header in [
            "origin: null",
            "origin: https://attacker.example",
            "origin: \u{e9}",
            "origin: http://127.0.0.1\r\norigin: http://127.0.0.1",
            "sec-fetch-site: cross-site",
            "sec-fetch-site: ",
            "host: attacker.example",
            "host: [",
            "x-forwarded-for: 192.0.2.8",
            "forwarded: for=_hidden, \"",
            "x-forwarded-host: attacker.example",
            "x-original-uri: /a%2Fb",
            "x-http-method-override: GET",
            "access-control-request-method: POST",
            "content-type: multipart/form-data",
            "content-type: application/grpc",
            "content-encoding: gzip",
            "accept: image/png",
            "accept-encoding: identity;q=0",
            "accept-language: *",
            "range: bytes=0-0",
            "if-match: \"a\"",
            "if-none-match: *",
            "if-modified-since: Sat, 21 Nov 2099 12:00:00 GMT",
            "if-unmodified-since: Sat, 21 Nov 1970 12:00:00 GMT",
            "expect: 100-continue",
            "expect: anything",
            "upgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__",
            "upgrade: websocket\r\nsec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==",
            "te: trailers",
            "trailer: x-a",
            "authorization: Bearer a",
            "cookie: a=b",
            "traceparent: a",
            "grpc-timeout: 1n",
            "x-tidegate-explain: 1",
            "max-forwards: 0",
            "pragma: no-cache",
        ] {
            for path in ["/json", "/check/edge"] {
                let own = if header.starts_with("host") { "" } else { CURL };
                let headers = format!("{own}{header}\r\n");
                assert_eq!(ask(&server, path, &headers, "").await.status, 429, "{path}: {header}");
            }
        }
    }
}

#[tokio::test]
async fn over_http_hits_are_given_back_and_limits_sent_with_the_right_only() {
    let (runtime, rules) = (directory([("config/rules.yaml", RULES)]), rule_file(RULES));
    for (variables, may_override, may_refund) in [
        (vec![], false, false),
        (vec![("JSON_RIGHTS", "none")], false, false),
        (vec![("JSON_RIGHTS", "override")], true, false),
        (vec![("JSON_RIGHTS", "refund")], false, true),
        (vec![("RUNTIME_ROOT", runtime.path().to_str().expect("UTF-8"))], true, false),
    ] {
        let is_runtime = variables.iter().any(|(name, _)| *name == "RUNTIME_ROOT");
        let server = Tidegate::start_with((!is_runtime).then_some(rules.path()), &variables).await;
        use_up(&server).await;
        for path in ["/json", "/check/edge"] {
            let expected = if may_override { 200 } else { 429 };
            assert_eq!(ask(&server, path, CURL, OVERRIDE).await.status, expected, "{variables:?}: {path}");
        }
        for path in ["/json", "/check/edge"] {
            ask(&server, path, CURL, REFUND).await;
        }
        let expected = if may_refund { 200 } else { 429 };
        assert_eq!(ask(&server, "/json", CURL, "").await.status, expected, "{variables:?}");
        let page = server.metrics().await;
        for (what, is_granted) in [("override", may_override), ("refund", may_refund)] {
            let count = if is_granted { 0 } else { 2 };
            let line = format!("tidegate_caller_denials_total{{what=\"{what}\"}} {count}");
            assert!(page.contains(&line), "{variables:?}: no {line}");
            let said = || server.log().matches(&format!("JSON_RIGHTS does not have `{what}`")).count();
            eventually("the log says it once", async || (said() == count / 2).then_some(())).await;
        }
    }
}

#[tokio::test]
async fn requests_over_http_wait_within_the_bound_of_all_calls() {
    let rules = rule_file(
        "domain: edge
descriptors:
  - key: remote_address
    rate_limit: { algorithm: gcra, unit: minute, requests_per_unit: 1, delay: { max: 5m, delivery: hold } }
",
    );
    let server = Tidegate::start(rules.path(), &[("MAX_HELD_CALLS", "1")]).await;
    assert_eq!(ask(&server, "/json", CURL, "").await.status, 200, "the first is not early");
    let held = async {
        let waits = ask(&server, "/json", CURL, "");
        tokio::time::timeout(Duration::from_secs(60), waits).await.expect_err("it waits for a minute")
    };
    let beyond = async {
        eventually("one waits", async || server.metrics().await.contains("tidegate_held_calls 1\n").then_some(()))
            .await;
        for _ in 0..3 {
            assert_eq!(in_time("it is refused at once", ask(&server, "/json", CURL, "")).await.status, 429);
        }
    };
    tokio::select! {
        _ = held => panic!("it ended"),
        () = beyond => {}
    }
}
