//! A value that is sensitive stands nowhere: not in Redis, in a log, in an answer, in an explanation, in a metric or in a span.
//! Of the last two, no value of a client does.

use std::process::Stdio;

use prost::Message;
use rustix::process::Signal;
use tidegate::proto::envoy::service::ratelimit::v3::RateLimitRequest;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::process::Command;

use crate::grpc;
use crate::http;
use crate::redis::Single;
use crate::support::{Tidegate, eventually, output, rule_file};
use crate::traces::receiver::Receiver;

/// What is looked for: in clear, and as it would stand where bytes are spelled by their numbers.
const CANARY: &str = "Canary-7f3a9";
const SPELLED: [&str; 4] = ["canary-7f3a9", "43616e6172792d", "43,61,6e,61", "Q2FuYXJ5LTdmM2E5"];
/// A value of an entry that is not sensitive: counters and answers may tell it.
const ORDINARY: &str = "Ordinary-5d1e8";

const RULES: &str = "domain: edge
charging: all_or_nothing
entries: { api_key: { sensitive: true }, ip: { as: ip, sensitive: true } }
descriptors:
  - key: api_key
    rate_limits:
      - { name: per-key, unit: week, requests_per_unit: 3, warn_at: 1% }
      - { unit: day, requests_per_unit: 100, algorithm: sliding_log }
    descriptors: [{ key: path, rate_limit: { unit: week, requests_per_unit: 2, algorithm: gcra } }]
  - { key: ip, values: [192.0.2.77], deny: true, message: No. }
  - { key: \"other_*\", value: never*, rate_limit: { unit: week, requests_per_unit: 2 } }
";

/// Nothing of the canary in these bytes, in any case.
fn is_clean(bytes: &[u8]) -> bool {
    let text = String::from_utf8_lossy(bytes).to_lowercase();
    !SPELLED.iter().any(|spelled| text.contains(&spelled.to_lowercase()))
}

fn request(key: &str, more: &[(&str, &str)]) -> RateLimitRequest {
    let deep = [&[("api_key", key)], more].concat();
    grpc::request("edge", [grpc::descriptor(&[("api_key", key)]), grpc::descriptor(&deep)])
}

/// No page of the debug listener has the canary.
async fn pages_are_clean(tidegate: &Tidegate, level: &str) {
    let counters = format!("/v1/counters?domain=edge&entry=api_key={CANARY}");
    let pages =
        [("/v1/refusals", "api_key"), ("/v1/top", "api_key"), ("/v1/unmatched", "absent_keys"), (&counters, "per-key")];
    for (path, seen) in pages {
        let page = http::get(tidegate.debug, path).await;
        assert!(page.contains(seen) && is_clean(page.to_string().as_bytes()), "{level}: {page}");
    }
}

/// A stream of decisions from now on.
async fn tap(tidegate: &Tidegate) -> TcpStream {
    let mut stream = TcpStream::connect(tidegate.debug).await.expect("it listens");
    let ask = "GET /v1/decisions HTTP/1.1\r\nhost: localhost\r\n\r\n";
    stream.write_all(ask.as_bytes()).await.expect("it is sent");
    // Its head says that it has begun.
    let mut head = [0; 12];
    stream.read_exact(&mut head).await.expect("an answer");
    stream
}

/// What the stream has sent up to a refusal, and what came with it.
async fn tapped(stream: &mut TcpStream) -> String {
    let mut sent = Vec::new();
    while !String::from_utf8_lossy(&sent).contains("\"refused\"") {
        assert!(stream.read_buf(&mut sent).await.expect("decisions") > 0, "{}", String::from_utf8_lossy(&sent));
    }
    String::from_utf8_lossy(&sent).into_owned()
}

/// A request that a rule denies for another descriptor.
fn denied() -> RateLimitRequest {
    let mut denied = request(CANARY, &[("path", "/")]);
    denied.descriptors.push(grpc::descriptor(&[("ip", "192.0.2.77")]));
    denied
}

#[tokio::test]
async fn a_sensitive_value_is_found_nowhere_after_a_full_run() {
    let (rules, secret) = (rule_file(RULES), rule_file("a secret of some length"));
    let (rules, secret) = (rules.path(), secret.path().to_str().expect("a path"));

    for level in ["trace", "debug", "info", "warn", "error"] {
        let (mut redis, receiver) = (Single::start(&[]).await, Receiver::http().await);
        let settings = [
            ("REDIS_URL", redis.url()),
            ("KEY_SECRET_FILE", secret.to_owned()),
            ("LOG_LEVEL", level.to_owned()),
            ("RESPONSE_DYNAMIC_METADATA", "true".to_owned()),
            ("DECISION_METADATA", "true".to_owned()),
            ("RESPONSE_HEADERS", "ietf".to_owned()),
            ("REFUSAL_BODY", "json".to_owned()),
            ("STORE_DEADLINE", "2s".to_owned()),
            ("TRACING_ENABLED", "true".to_owned()),
            ("OTEL_METRICS_EXPORTER", "otlp".to_owned()),
            ("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url()),
        ];
        let mut tidegate =
            Tidegate::start(rules, &settings.each_ref().map(|(name, value)| (*name, value.as_str()))).await;
        let mut client = grpc::client(tidegate.grpc).await;
        let mut decisions = tap(&tidegate).await;
        let mut refused = 0;
        for _ in 0..5 {
            for more in [&[("path", "/")][..], &[("path", ORDINARY)], &[]] {
                let answer = client.should_rate_limit(request(CANARY, more)).await.expect("an answer").into_inner();
                refused += u32::from(answer.overall_code == 2);
                assert!(is_clean(&answer.encode_to_vec()), "{level}: {answer:?}");
            }
        }
        let answer = client.should_rate_limit(denied()).await.expect("an answer").into_inner();
        assert!(answer.overall_code == 2 && is_clean(&answer.encode_to_vec()), "{level}: {answer:?}");
        assert!(refused > 0, "some were refused");
        pages_are_clean(&tidegate, level).await;
        let decisions = tapped(&mut decisions).await;
        assert!(decisions.contains("api_key") && is_clean(decisions.as_bytes()), "{level}: {decisions}");

        let keys = redis.cli(&["KEYS", "*"]).await;
        assert!(keys.contains("api_key=#") && is_clean(keys.as_bytes()), "{keys}");
        redis.cli(&["SAVE"]).await;
        let dump = std::fs::read(redis.directory().join("dump.rdb")).expect("a dump");
        assert!(!dump.is_empty() && is_clean(&dump));

        redis.signal(Signal::KILL);
        redis.ended().await;
        eventually("a failure of the store is answered", async || {
            let answer = client.should_rate_limit(request(CANARY, &[("path", "/")])).await;
            answer.map_or_else(|status| Some(is_clean(status.message().as_bytes())), |_| None)
        })
        .await;
        let page = tidegate.metrics().await;
        tidegate.terminate();
        assert!(tidegate.ended().await.success());
        let spans = receiver.bytes();
        let sent: Vec<_> = receiver.metrics().iter().flat_map(|sent| sent.request.encode_to_vec()).collect();
        for (what, told) in [("metrics", page.as_bytes()), ("metrics over OTLP", &sent), ("spans", &spans)] {
            assert!(is_clean(told) && !String::from_utf8_lossy(told).contains(ORDINARY), "{level}: {what}");
            assert!(String::from_utf8_lossy(told).contains("api_key"), "{level}: {what} tell of the rule");
        }
        let log = tidegate.log();
        assert!(is_clean(log.as_bytes()), "{level}: {log}");
        assert!(level == "error" || !log.is_empty(), "something was logged: {level}");
    }

    let mut explain = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    explain.args(["explain", "--domain", "edge", "--descriptor", &format!("api_key={CANARY},path=/")]);
    explain.arg(rules).env("KEY_SECRET_FILE", secret).stdin(Stdio::null());
    let (status, told, errors) = output(&mut explain).await;
    assert!(status.success() && told.contains("api_key=#"), "{told}{errors}");
    assert!(is_clean(told.as_bytes()) && is_clean(errors.as_bytes()), "{told}{errors}");
}

#[test]
fn the_canary_would_be_seen() {
    for seen in ["x CANARY-7F3A9 y", "Canary-7f3a9", "43616E6172792D37"] {
        assert!(!is_clean(seen.as_bytes()), "{seen}");
    }
    assert!(is_clean(b"another"));
}
