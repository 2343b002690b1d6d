//! `tidegate call`, against a running server and against one that answers as it is told.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;
use tidegate::proto::envoy::service::ratelimit::v3::rate_limit_response::Code;
use tidegate::proto::envoy::service::ratelimit::v3::rate_limit_service_server::RateLimitService;
use tidegate::proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use tonic::{Request, Response, Status};

use super::{rule_file, serving, stderr, stdout, tidegate};
use crate::redis::certificates::Authority;
use crate::support::Tidegate;
use crate::tls::{MUTUAL, Secured, rules};

#[test]
fn call_says_when_nobody_answers() {
    let output = tidegate(&["call", "--address", "127.0.0.1:1", "--domain", "d", "-d", "a=b"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("no ShouldRateLimit server answers at 127.0.0.1:1"), "{}", stderr(&output));
}

#[tokio::test]
async fn call_exits_as_the_server_answered_and_looks_without_spending() {
    let rules = rule_file("domain: d\ndescriptors: [{ key: k, rate_limit: { unit: year, requests_per_unit: 2 } }]\n");
    let server = Tidegate::start(rules.path(), &[]).await;
    let address = server.grpc.to_string();
    let call = |more: &[&str]| {
        let arguments = [&["call", "--address", &address, "--domain", "d", "-d", "k=v"], more].concat();
        let output = tidegate(&arguments);
        (output.status.code(), stdout(&output))
    };
    for _ in 0..2 {
        let (code, told) = call(&["--hits", "0", "--times", "3"]);
        assert_eq!((code, told.matches("remaining 2").count()), (Some(0), 3), "{told}");
    }
    let (code, told) = call(&["--times", "3"]);
    assert_eq!((code, told.matches("OVER_LIMIT").count()), (Some(1), 2), "{told}");
    let (_, told) = call(&["-d", "k=zoë\u{7}"]);
    assert!(told.contains(r"k=zoë\u{7} "), "{told}");
}

#[tokio::test]
async fn call_sends_limits_and_hits_of_each_descriptor_and_shows_the_whole_answer() {
    let rules = rule_file("domain: d\ndescriptors: [{ key: k, rate_limit: { unit: year, requests_per_unit: 9 } }]\n");
    let server = Tidegate::start(rules.path(), &[("RESPONSE_HEADERS", "ietf"), ("REFUSAL_BODY", "json")]).await;
    let address = server.grpc.to_string();
    let call = |more: &[&str]| {
        let arguments = [&["call", "--address", &address, "--domain", "d", "-d", "k=a", "-d", "k=b"], more].concat();
        let output = tidegate(&arguments);
        (output.status.code(), stdout(&output) + &stderr(&output))
    };
    let (code, told) = call(&["--hits", "2", "--hits", "5"]);
    assert_eq!(code, Some(0), "{told}");
    assert!(told.contains("k=a  9 per year  remaining 7") && told.contains("k=b  9 per year  remaining 4"), "{told}");
    let (_, told) = call(&["--hits", "1"]);
    assert!(told.contains("remaining 6") && told.contains("remaining 3"), "{told}");
    let (code, told) = call(&["--hits", "-2", "--hits", "-1"]);
    assert_eq!(code, Some(0), "{told}");
    assert!(told.contains("k=a  9 per year  remaining 8") && told.contains("k=b  9 per year  remaining 4"), "{told}");
    let (_, told) = call(&["--hits=-1"]);
    assert!(told.contains("remaining 9") && told.contains("remaining 5"), "{told}");
    let (code, told) = call(&["--limit", "1/hour", "--limit", "7/month", "--times", "2", "--show"]);
    assert_eq!(code, Some(1), "{told}");
    assert!(told.contains("k=a  1 per hour  remaining 0") && told.contains("k=b  7 per month  remaining 5"), "{told}");
    assert!(told.contains("  header for the client: RateLimit: "), "{told}");
    assert!(told.contains(r#"  body for the client: {"error":"rate_limited""#), "{told}");
    assert!(told.contains("  decision: outcome: refused, rule: d.k, provenance: store, id: "), "{told}");
    for (wrong, why) in [
        (&["--limit", "5"][..], "write N/UNIT, where UNIT is second"),
        (&["--limit", "5/fortnight"], "write N/UNIT"),
        (&["--hits", "1", "--hits", "2", "--hits", "3"], "--hits is given 3 times for 2 descriptors"),
        (&["--hits", "one"], "invalid value 'one' for '--hits <hits>': invalid digit found in string"),
        (&["--hits", "-1.5"], "invalid value '-1.5' for '--hits <hits>': invalid digit found in string"),
    ] {
        let (code, told) = call(wrong);
        assert_eq!((code, told.contains(why)), (Some(2), true), "{told}");
    }
}

#[tokio::test]
async fn call_names_each_limit_that_refuses_only_in_shadow_mode() {
    let rules = "domain: d
descriptors:
  - { key: user, shadow_mode: true, rate_limit: { unit: year, requests_per_unit: 1 } }
  - key: path
    rate_limits:
      - { unit: year, requests_per_unit: 5 }
      - { unit: year, requests_per_unit: 1, shadow_mode: true, name: tighter }
  - { key: plain, rate_limit: { unit: year, requests_per_unit: 1 } }
  - { key: banned, deny: true }
";
    let rules = rule_file(rules);
    let server = Tidegate::start(rules.path(), &[]).await;
    let shadowed = Tidegate::start(rules.path(), &[("SHADOW_MODE", "true")]).await;
    let call = |server: &Tidegate, descriptors: &[&str]| {
        let address = server.grpc.to_string();
        let output = tidegate(&[&["call", "--address", &address, "--domain", "d"], descriptors].concat());
        let told = stdout(&output);
        let would: Vec<String> = told.lines().skip_while(|line| !line.contains("would")).map(str::to_owned).collect();
        (output.status.code(), would.join("\n"))
    };
    let both = ["-d", "user=a", "-d", "path=a"];
    assert_eq!(call(&server, &both), (Some(0), String::new()));
    let user = "  would be refused by d.user, 1 per year (shadow mode)";
    let path = "  would be refused by d.path, 1 per year, limit tighter (shadow mode)";
    assert_eq!(call(&server, &both), (Some(0), format!("{user}\n{path}")));
    assert_eq!(call(&server, &["-d", "user=b", "-d", "user=c"]), (Some(0), String::new()));
    assert_eq!(call(&server, &["-d", "user=b", "-d", "user=c"]), (Some(0), user.to_owned()), "each limit once");
    assert_eq!(call(&server, &["-d", "plain=a"]), (Some(0), String::new()));
    assert_eq!(call(&server, &["-d", "plain=a"]), (Some(1), String::new()), "an enforced limit refuses");

    assert_eq!(call(&shadowed, &["-d", "plain=a"]), (Some(0), String::new()));
    let plain = "  would be refused by d.plain, 1 per year (shadow mode)".to_owned();
    assert_eq!(call(&shadowed, &["-d", "plain=a"]), (Some(0), plain));
    let banned = "  would be refused by d.banned (shadow mode)".to_owned();
    assert_eq!(call(&shadowed, &["-d", "banned=1"]), (Some(0), banned));
}

#[tokio::test]
async fn call_speaks_tls_and_says_what_is_missing() {
    let server = Secured::start(&[MUTUAL, ("HTTP_SERVER_USE_TLS", "true")]).await;
    let client = server.authority.issue("client");
    let (address, text) = (server.tidegate.grpc.to_string(), |path: &Path| path.display().to_string());
    let (ca, certificate, key) = (text(&server.file("ca.crt")), text(&client.certificate), text(&client.key));
    let call = |address: &str, more: &[&str]| {
        let arguments = [&["call", "--address", address, "--domain", "edge", "-d", "user=a"], more].concat();
        let output = tidegate(&arguments);
        (output.status.code(), stdout(&output) + &stderr(&output))
    };
    let whole = ["--ca", &ca, "--cert", &certificate, "--key", &key];
    assert_eq!(call(&address, &whole).0, Some(0));

    let (plaintext, http) = (Tidegate::start(rules().path(), &[]).await, server.tidegate.http.to_string());
    let elsewhere = Authority::new();
    let stranger = elsewhere.issue("stranger");
    let unknown = ["--ca", &ca, "--cert", &text(&stranger.certificate), "--key", &text(&stranger.key)];
    let swapped = ["--ca", &ca, "--cert", &certificate, "--key", &text(&stranger.key)];
    let missing = server.directory.path().join("missing").display().to_string();
    for (address, arguments, expected, advice) in [
        (&*address, &[][..], "did not answer: ", "; if it speaks TLS, set --tls or --ca, and if this is its HTTP port"),
        (
            &address,
            &["--tls"],
            "over TLS: transport error: invalid peer certificate: UnknownIssuer",
            "; set --ca to the CA",
        ),
        (&address, &["--ca", &ca], "did not answer: ", ", set --cert and --key"),
        (
            &address,
            &[&whole[..], &["--server-name", "other.example"]].concat(),
            "not valid for name \"other.example\"",
            "; set --server-name to a name of the",
        ),
        (&address, &unknown, "did not answer: ", "; the server may refuse the certificate in --cert"),
        (&address, &swapped, "--ca, --cert and --key cannot be used together", "KeyMismatch"),
        (
            &http,
            &["--ca", &ca],
            "NoApplicationProtocol",
            "; it does not speak gRPC there: set --address to the gRPC port",
        ),
        (
            &plaintext.grpc.to_string(),
            &["--tls"],
            "InvalidContentType",
            "; it does not speak TLS there: leave out --tls",
        ),
        (&format!("unix:{missing}"), &[], "No such file", "start one with GRPC_UDS set to the path"),
    ] {
        let (code, told) = call(address, arguments);
        assert!(code == Some(2) && told.contains(expected) && told.contains(advice), "{arguments:?}: {told}");
    }
    let (code, told) = call(&address, &["--ca", "/missing/ca.crt"]);
    assert!(code == Some(2) && told.contains("--ca is /missing/ca.crt: it cannot be read"), "{told}");
    assert!(call(&address, &["--cert", &certificate]).1.contains("--key <FILE>"));
    for (wrong, expected) in [
        ("unix:", "'unix:' has no path: write unix:PATH"),
        ("localhost", "'localhost' is not an address: write HOST:PORT or unix:PATH"),
        (":8081", "':8081' is not an address: write HOST:PORT or unix:PATH"),
        ("http://127.0.0.1:8081", "'http://127.0.0.1:8081' has a scheme: write HOST:PORT, without http://"),
        (
            "https://a.b:8081/",
            "'https://a.b:8081/' has a scheme: write HOST:PORT, without https://, and set --tls or --ca",
        ),
    ] {
        let (code, told) = call(wrong, &[]);
        assert!(code == Some(2) && told.contains(expected), "{told}");
    }
    assert!(call(&address, &["--timeout", "0s"]).1.contains("write a duration above 0, such as 250ms"));
    assert!(call("unix:/a", &["--tls"]).1.contains("a Unix socket has no host: set --server-name"));
}

/// Answers each call with the next of these codes, and keeps the deadlines of the calls.
struct Answering {
    codes: Vec<Code>,
    calls: AtomicUsize,
    deadlines: Arc<Mutex<Vec<String>>>,
}

#[tonic::async_trait]
impl RateLimitService for Answering {
    async fn should_rate_limit(
        &self,
        request: Request<RateLimitRequest>,
    ) -> Result<Response<RateLimitResponse>, Status> {
        let deadline = request.metadata().get("grpc-timeout").and_then(|value| value.to_str().ok());
        self.deadlines.lock().push(deadline.unwrap_or("none").to_owned());
        let code = self.codes[self.calls.fetch_add(1, Ordering::SeqCst)];
        Ok(Response::new(RateLimitResponse { overall_code: code.into(), ..RateLimitResponse::default() }))
    }
}

/// Starts a server with these answers. Returns its address and the deadlines of its calls.
async fn answering(codes: &[Code]) -> (SocketAddr, Arc<Mutex<Vec<String>>>) {
    let deadlines = Arc::default();
    let service = Answering { codes: codes.to_vec(), calls: AtomicUsize::new(0), deadlines: Arc::clone(&deadlines) };
    (serving(service).await, deadlines)
}

#[tokio::test]
async fn the_last_answer_decides_the_exit_code_and_each_call_sends_its_deadline() {
    for (codes, expected) in [([Code::OverLimit, Code::Ok], 0), ([Code::Ok, Code::OverLimit], 1)] {
        let (address, deadlines) = answering(&codes).await;
        let output = tokio::task::spawn_blocking(move || {
            let address = address.to_string();
            let to = ["call", "--address", &address, "--domain", "d", "-d", "a=b"];
            tidegate(&[&to[..], &["--times", "2", "--timeout", "7s"]].concat())
        });
        let output = output.await.expect("it ends");
        assert_eq!(output.status.code(), Some(expected), "{}", stderr(&output));
        assert_eq!(*deadlines.lock(), ["7000000u"; 2]);
    }
}

/// Every kind of rule without a limit in its answer. Redis does not answer.
const RULES: &str = "domain: d
descriptors:
  - { key: free, exempt: true }
  - { key: banned, deny: true }
  - { key: open, on_store_failure: open, rate_limit: { unit: day, requests_per_unit: 1 } }
  - { key: closed, on_store_failure: closed, rate_limit: { unit: day, requests_per_unit: 1 } }
  - { key: endless, rate_limit: { unlimited: true } }
  - key: path
    descriptors: [{ key: user, rate_limit: { unit: day, requests_per_unit: 1 } }]
";

#[tokio::test]
async fn call_names_the_reason_why_an_answer_has_no_limit() {
    let rules = rule_file(RULES);
    let server = Tidegate::start(rules.path(), &[("REDIS_URL", "127.0.0.1:1")]).await;
    let address = server.grpc.to_string();
    let call = |domain: &str, descriptor: &str| {
        let output = tidegate(&["call", "--address", &address, "--domain", domain, "-d", descriptor]);
        let answer = stdout(&output).lines().nth(1).unwrap_or_default().trim().to_owned();
        let is_unmatched = ["  no rule", "  unknown domain"].iter().any(|reason| answer.ends_with(reason));
        assert_eq!(stderr(&output).matches("tidegate top --unmatched").count(), usize::from(is_unmatched), "{answer}");
        answer
    };
    for (descriptor, expected) in [
        ("free=1", "OK          free=1  exempt by d.free"),
        ("banned=1", "OVER_LIMIT  banned=1  denied by d.banned"),
        ("none=1", "OK          none=1  no rule"),
        ("path=1", "OK          path=1  no rule"),
        ("open=1", "OK          open=1  not counted: the store did not answer, policy open of d.open"),
        ("closed=1", "OVER_LIMIT  closed=1  not counted: the store did not answer, policy closed of d.closed"),
        ("endless=1", "OK          endless=1  unlimited"),
    ] {
        assert_eq!(call("d", descriptor), expected);
    }
    assert_eq!(call("other", "free=1"), "OK          free=1  unknown domain");

    let output = tidegate(&["call", "--address", &address, "--domain", "d", "-d", "banned=1", "-d", "none=1"]);
    let last = stdout(&output).lines().last().unwrap_or_default().trim().to_owned();
    assert_eq!(last, "OK          none=1  not counted, because the rule of another descriptor decides the request");
}
