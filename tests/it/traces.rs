//! Spans, as a receiver of OpenTelemetry is told of them, and as parts of an Envoy's own.

use std::fmt::Write;

use rustix::process::Signal;
use tempfile::NamedTempFile;
use tidegate::proto::envoy::service::ratelimit::v3::RateLimitRequest;
use tonic::metadata::{AsciiMetadataKey, AsciiMetadataValue};
use tonic::{Code, Request};

use crate::envoy::proxy::{Proxy, get};
use crate::grpc;
use crate::http;
use crate::redis::certificates::Authority;
use crate::redis::{Port, Single};
use crate::support::{Tidegate, eventually, repository, rule_file};
use receiver::{Received, Receiver};

pub mod receiver;

const RULES: &str = "domain: edge
descriptors:
  - { key: user, rate_limit: { unit: week, requests_per_unit: 2 } }
  - { key: many, rate_limit: { unit: week, requests_per_unit: 1000000 } }
";

const RPC: &str = "envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";
const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const SPAN: &str = "b7ad6b7169203331";
const SERVER: i32 = 2;
const CLIENT: i32 = 3;

/// A server that records requests there.
async fn serve(rules: &NamedTempFile, receiver: &str, more: &[(&str, &str)]) -> Tidegate {
    let own = [("TRACING_ENABLED", "true"), ("OTEL_EXPORTER_OTLP_ENDPOINT", receiver)];
    Tidegate::start(rules.path(), &[&own, more].concat()).await
}

fn request(domain: &str, entries: &[(&str, &str)]) -> RateLimitRequest {
    grpc::request(domain, entries.iter().map(|entry| grpc::descriptor(&[*entry])))
}

struct Client(grpc::Client);

impl Client {
    async fn of(tidegate: &Tidegate) -> Self {
        Self(grpc::client(tidegate.grpc).await)
    }

    /// The overall code, or the status.
    async fn call(&mut self, request: RateLimitRequest, metadata: &[(&str, &str)]) -> Result<i32, Code> {
        let mut request = Request::new(request);
        for (key, value) in metadata {
            let key = AsciiMetadataKey::from_bytes(key.as_bytes()).expect("a key");
            request.metadata_mut().insert(key, AsciiMetadataValue::try_from(*value).expect("a value"));
        }
        self.0
            .should_rate_limit(request)
            .await
            .map(|answer| answer.into_inner().overall_code)
            .map_err(|status| status.code())
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

fn parent(flags: &str) -> String {
    format!("00-{TRACE}-{SPAN}-{flags}")
}

/// Which of these attributes a span has, and their values.
fn attributes<'a>(of: &Received, keys: &[&'a str]) -> Vec<(&'a str, String)> {
    keys.iter().filter_map(|key| Some((*key, of.attribute(key)?))).collect()
}

#[tokio::test]
async fn each_decision_is_a_span_whichever_way_it_is_delivered() {
    for protocol in ["http", "grpc"] {
        let receiver = if protocol == "grpc" { Receiver::grpc().await } else { Receiver::http().await };
        let rules = rule_file(RULES);
        let settings = [
            ("TRACING_EXPORTER_PROTOCOL", protocol),
            ("TRACING_SERVICE_NAMESPACE", "shop"),
            ("OTEL_EXPORTER_OTLP_HEADERS", "api-key=hunter%202"),
        ];
        let tidegate = serve(&rules, &receiver.url(), &settings).await;
        let mut client = Client::of(&tidegate).await;
        let traced = [("traceparent", parent("01")), ("tracestate", "a=1".to_owned())];
        let traced = traced.each_ref().map(|(key, value)| (*key, value.as_str()));
        for code in [1, 1, 2] {
            assert_eq!(client.call(request("edge", &[("user", "alice"), ("nobody", "x")]), &traced).await, Ok(code));
        }
        assert_eq!(client.call(request("", &[("user", "alice")]), &traced).await, Err(Code::InvalidArgument));
        assert_eq!(client.call(request("unknown", &[]), &[]).await, Err(Code::InvalidArgument));
        assert_eq!(client.call(request("unknown", &[("user", "alice")]), &[]).await, Ok(1));
        // A stop delivers what is left.
        tidegate.stop().await;
        let spans = receiver.of_kind(SERVER, 6).await;

        let keys = [
            "rpc.system.name",
            "rpc.method",
            "rpc.response.status_code",
            "error.type",
            "tidegate.domain",
            "tidegate.rule",
            "tidegate.outcome",
            "tidegate.provenance",
            "tidegate.generation",
            "tidegate.descriptors",
        ];
        let of_rpc =
            |status: &str| [(keys[0], "grpc".to_owned()), (keys[1], RPC.to_owned()), (keys[2], status.to_owned())];
        let decided = |domain: Option<&str>, rule: Option<&str>, outcome: &str, provenance: &str, count: usize| {
            let text = |key, text: &str| (key, text.to_owned());
            let mut all = of_rpc("OK").to_vec();
            all.extend(domain.map(|domain| text("tidegate.domain", domain)));
            all.extend(rule.map(|rule| text("tidegate.rule", rule)));
            all.extend([text("tidegate.outcome", outcome), text("tidegate.provenance", provenance)]);
            all.extend([text("tidegate.generation", "1"), text("tidegate.descriptors", &count.to_string())]);
            all
        };
        let admitted = decided(Some("edge"), Some("edge.user"), "admitted", "store", 2);
        assert_eq!(attributes(&spans[0], &keys), admitted);
        assert_eq!(attributes(&spans[1], &keys), admitted);
        assert_eq!(attributes(&spans[2], &keys), decided(Some("edge"), Some("edge.user"), "refused", "store", 2));
        assert_eq!(attributes(&spans[3], &keys), of_rpc("INVALID_ARGUMENT"));
        assert_eq!(attributes(&spans[5], &keys), decided(None, None, "admitted", "none", 1));
        for (index, received) in spans.iter().enumerate() {
            let Received { span, .. } = received;
            assert_eq!(span.name, RPC);
            let (trace, above) = (hex(&span.trace_id), hex(&span.parent_span_id));
            if index < 4 {
                assert_eq!((trace.as_str(), above.as_str(), span.trace_state.as_str()), (TRACE, SPAN, "a=1"));
            } else {
                assert_eq!((trace.len(), above.as_str(), span.trace_state.as_str()), (32, "", ""));
            }
            assert!(span.start_time_unix_nano > 0 && span.end_time_unix_nano > span.start_time_unix_nano);
            let process =
                ["service.name", "service.namespace"].map(|key| received.of_process(key).expect("it is told"));
            assert_eq!(process, ["RateLimit", "shop"]);
            assert_eq!(received.of_process("service.instance.id").expect("it is told").len(), 36);
        }
        assert!(receiver.keys().iter().all(|key| key.as_deref() == Some("hunter 2")), "{:?}", receiver.keys());
    }
}

#[tokio::test]
async fn a_request_over_http_is_recorded_as_one() {
    let (receiver, rules) = (Receiver::http().await, rule_file(RULES));
    let tidegate = serve(&rules, &receiver.url(), &[("OTEL_SERVICE_NAME", "gate")]).await;
    let body = http::descriptor("edge", &[("user", "alice")]);
    let answer = http::post(tidegate.http, "/json", body).header("traceparent", parent("01")).await;
    assert_eq!(answer.status, 200, "{answer}");
    let spans = receiver.of_kind(SERVER, 1).await;
    assert_eq!((spans[0].span.name.as_str(), hex(&spans[0].span.parent_span_id)), ("POST /json", SPAN.to_owned()));
    let keys = ["http.request.method", "http.route", "http.response.status_code", "rpc.method", "tidegate.outcome"];
    let expected = [(keys[0], "POST"), (keys[1], "/json"), (keys[2], "200"), (keys[4], "admitted")];
    assert_eq!(attributes(&spans[0], &keys), expected.map(|(key, value)| (key, value.to_owned())));
    assert_eq!(spans[0].of_process("service.name").as_deref(), Some("gate"));
    tidegate.stop().await;
}

/// Rules with a request of two descriptors, which NGINX asks about.
const CHECKED: &str = "domain: edge
requests:
  from_gateway: nginx
  trusted_proxies: [127.0.0.1]
  refusal_status: 403
  descriptors: [[{ key: user, from: header, name: x-user, missing: skip }], [{ key: path, from: path }]]
descriptors:
  - { key: user, rate_limit: { unit: week, requests_per_unit: 1 } }
";

#[tokio::test]
async fn a_check_is_recorded_with_its_decision_and_its_calls_of_the_store() {
    let (receiver, rules, redis) = (Receiver::http().await, rule_file(CHECKED), Single::start(&[]).await);
    let tidegate = serve(&rules, &receiver.url(), &[("REDIS_URL", &redis.url()), ("STORE_DEADLINE", "5s")]).await;
    let parent = parent("01");
    let ask = async |domain: &str, headers: &[(&str, &str)]| {
        let request = http::get(tidegate.http, &format!("/check/{domain}")).header("traceparent", &parent);
        request.headers(headers).await.status
    };
    let alice = &[("x-user", "alice"), ("x-original-uri", "/a")];
    assert_eq!([ask("edge", alice).await, ask("edge", alice).await], [200, 403]);
    assert_eq!([ask("edge", &alice[..1]).await, ask("other", alice).await], [403, 404]);
    let spans = receiver.of_kind(SERVER, 4).await;
    let keys = [
        "http.request.method",
        "http.route",
        "http.response.status_code",
        "tidegate.descriptors",
        "tidegate.domain",
        "tidegate.rule",
        "tidegate.outcome",
        "tidegate.provenance",
    ];
    let of = |status: &'static str, decided: &[&'static str]| {
        let values = [&["GET", "/check/{domain}", status], decided].concat();
        keys.into_iter().zip(values.into_iter().map(str::to_owned)).collect::<Vec<_>>()
    };
    assert_eq!(attributes(&spans[0], &keys), of("200", &["2", "edge", "edge.user", "admitted", "store"]));
    assert_eq!(attributes(&spans[1], &keys), of("403", &["2", "edge", "edge.user", "refused", "store"]));
    assert_eq!(attributes(&spans[2], &keys), of("403", &[]), "it cannot be read");
    assert_eq!(attributes(&spans[3], &keys), of("404", &[]));
    for Received { span, .. } in &spans {
        let (trace, above) = (hex(&span.trace_id), hex(&span.parent_span_id));
        assert_eq!((span.name.as_str(), trace.as_str(), above.as_str()), ("GET /check/{domain}", TRACE, SPAN));
    }
    eventually("the call of the store is its child", async || {
        let calls = receiver.spans().into_iter().filter(|received| received.span.kind == CLIENT);
        calls.into_iter().find(|call| call.span.parent_span_id == spans[0].span.span_id)
    })
    .await;
    tidegate.stop().await;
}

#[tokio::test]
async fn a_callers_trace_goes_on_by_b3_in_one_header_or_many() {
    let (receiver, rules) = (Receiver::grpc().await, rule_file(RULES));
    let tidegate = serve(&rules, &receiver.url(), &[("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")]).await;
    let mut client = Client::of(&tidegate).await;
    let one = format!("{TRACE}-{SPAN}-1");
    let many = [("x-b3-traceid", TRACE), ("x-b3-spanid", SPAN), ("x-b3-sampled", "1")];
    for metadata in [&[("b3", one.as_str())][..], &many, &[("b3", "0")]] {
        assert_eq!(client.call(request("edge", &[("many", "x")]), metadata).await, Ok(1));
    }
    tidegate.stop().await;
    for Received { span, .. } in receiver.of_kind(SERVER, 2).await {
        assert_eq!((hex(&span.trace_id), hex(&span.parent_span_id)), (TRACE.to_owned(), SPAN.to_owned()));
    }
}

#[tokio::test]
async fn what_is_recorded_is_up_to_the_caller_and_else_to_the_share() {
    // Recorded of: a caller that records, one that does not, and one that does not say.
    for (settings, recorded) in [
        (&[("TRACING_SAMPLING_RATE", "0")][..], [true, false, false]),
        (&[("TRACING_SAMPLING_RATE", "1")], [true, false, true]),
        (&[("OTEL_TRACES_SAMPLER", "always_off")], [false, false, false]),
        (&[("TRACING_SAMPLING_RATE", "0"), ("OTEL_TRACES_SAMPLER", "always_on")], [true, true, true]),
        (&[("OTEL_SDK_DISABLED", "true")], [false, false, false]),
        (&[("TRACING_ENABLED", "false")], [false, false, false]),
    ] {
        let (receiver, rules) = (Receiver::http().await, rule_file(RULES));
        let tidegate = serve(&rules, &receiver.url(), settings).await;
        let mut client = Client::of(&tidegate).await;
        for parent in [Some(parent("01")), Some(parent("00")), None] {
            let metadata = parent.as_deref().map(|parent| ("traceparent", parent));
            assert_eq!(client.call(request("edge", &[("many", "x")]), metadata.as_slice()).await, Ok(1));
        }
        tidegate.stop().await;
        let expected = recorded.iter().filter(|is_recorded| **is_recorded).count();
        assert_eq!(receiver.spans().len(), expected, "{settings:?}");
    }
}

#[tokio::test]
async fn a_round_trip_to_redis_is_a_child_of_the_request_and_says_why_it_failed() {
    let (receiver, rules, mut redis) = (Receiver::http().await, rule_file(RULES), Single::start(&[]).await);
    let (url, port) = (redis.url(), redis.address().port().to_string());
    let tidegate = serve(&rules, &receiver.url(), &[("REDIS_URL", &url), ("STORE_DEADLINE", "5s")]).await;
    let mut client = Client::of(&tidegate).await;
    assert_eq!(client.call(request("edge", &[("user", "alice")]), &[]).await, Ok(1));
    let request_span = receiver.of_kind(SERVER, 1).await.remove(0);
    eventually("its script has run", async || {
        let calls = receiver.spans().into_iter().filter(|received| received.span.kind == CLIENT);
        // The first may have brought the script.
        let done = calls.into_iter().find(|call| call.attribute("db.response.status_code").is_none())?;
        assert_eq!(
            (&done.span.trace_id, &done.span.parent_span_id),
            (&request_span.span.trace_id, &request_span.span.span_id)
        );
        let keys = ["db.system.name", "db.operation.name", "server.address", "server.port", "error.type"];
        let expected = [(keys[0], "redis"), (keys[1], "EVALSHA"), (keys[2], "127.0.0.1"), (keys[3], port.as_str())];
        assert_eq!(attributes(&done, &keys), expected.map(|(key, value)| (key, value.to_owned())));
        Some(())
    })
    .await;

    redis.cli(&["SCRIPT", "FLUSH"]).await;
    assert_eq!(client.call(request("edge", &[("user", "alice")]), &[]).await, Ok(1));
    eventually("the call that found no script says so", async || {
        let codes = receiver.spans().into_iter().filter_map(|call| call.attribute("db.response.status_code"));
        codes.into_iter().find(|code| code == "NOSCRIPT")
    })
    .await;

    redis.signal(Signal::KILL);
    redis.ended().await;
    let before = receiver.spans().len();
    assert_eq!(client.call(request("edge", &[("user", "alice")]), &[]).await, Err(Code::Unavailable));
    tidegate.stop().await;
    let after = receiver.spans().split_off(before);
    let failed = after.iter().find(|received| received.span.kind == SERVER).expect("a request");
    assert_eq!(
        attributes(failed, &["error.type", "tidegate.outcome", "tidegate.provenance"]),
        [
            ("error.type", "UNAVAILABLE".to_owned()),
            ("tidegate.outcome", "failed".to_owned()),
            ("tidegate.provenance", "error".to_owned()),
        ]
    );
    let call = after.iter().find(|received| received.span.parent_span_id == failed.span.span_id).expect("a child");
    assert_eq!((call.attribute("error.type").as_deref(), call.span.kind), (Some("unreachable"), CLIENT));
    assert_eq!(call.span.status.as_ref().map(|status| status.code), Some(2), "{call:?}");
}

#[tokio::test]
async fn what_is_taken_and_given_back_on_two_servers_belongs_to_the_request() {
    let rules = rule_file(
        "domain: edge
charging: all_or_nothing
descriptors:
  - key: user
    rate_limits: [{ unit: second, requests_per_unit: 1000 }, { unit: week, requests_per_unit: 1 }]
",
    );
    let (receiver, one, other) = (Receiver::http().await, Single::start(&[]).await, Single::start(&[]).await);
    let settings = [("REDIS_URL", one.url()), ("REDIS_PERSECOND_URL", other.url())];
    let settings = settings.each_ref().map(|(name, value)| (*name, value.as_str()));
    let more = [("REDIS_PERSECOND", "true"), ("STORE_DEADLINE", "5s")];
    let tidegate = serve(&rules, &receiver.url(), &[&settings[..], &more].concat()).await;
    let mut client = Client::of(&tidegate).await;
    for code in [1, 2] {
        assert_eq!(client.call(request("edge", &[("user", "alice")]), &[]).await, Ok(code));
    }
    let refused = receiver.of_kind(SERVER, 2).await.remove(1).span;
    eventually("both were asked, and one was given back to", async || {
        let of_it = receiver.spans().into_iter().filter(|received| received.span.trace_id == refused.trace_id);
        let calls: Vec<_> = of_it.filter(|received| received.span.kind == CLIENT).collect();
        assert!(calls.iter().all(|call| call.span.parent_span_id == refused.span_id), "{calls:?}");
        (calls.len() == 3).then_some(())
    })
    .await;
    tidegate.stop().await;
}

/// More spans than wait and are under way together.
const FLOOD: usize = 4_000;

#[tokio::test]
async fn a_receiver_that_is_away_or_silent_holds_up_no_decision_and_no_stop() {
    let nobody_listens = Port::free();
    let away = format!("http://{}", nobody_listens.address());
    let silent = Receiver::silent().await;
    for (protocol, receiver, floods) in
        [("http", &away, false), ("grpc", &away, false), ("http", &silent.url(), true), ("grpc", &silent.url(), true)]
    {
        let rules = rule_file(RULES);
        // Far longer than this test waits for the stop.
        let settings = [("TRACING_EXPORTER_PROTOCOL", protocol), ("OTEL_EXPORTER_OTLP_TIMEOUT", "600000")];
        let tidegate = serve(&rules, receiver, &settings).await;
        let mut client = Client::of(&tidegate).await;
        let calls = if floods { FLOOD } else { 100 };
        for _ in 0..calls {
            assert_eq!(client.call(request("edge", &[("many", "x")]), &[]).await, Ok(1));
        }
        if floods {
            let dropped = tidegate.metric("tidegate_spans_dropped_total").await;
            assert!((1..FLOOD as u64).contains(&dropped), "{protocol}: {dropped}");
        } else {
            eventually("lost spans are counted, and said to be", async || {
                let is_told = tidegate.log().contains("traces.lost");
                let is_counted = tidegate.metrics().await.contains("\ntidegate_spans_dropped_total 100\n");
                (is_told && is_counted).then_some(())
            })
            .await;
        }
        tidegate.stop().await;
    }
}

/// Makes one call, and stops `tidegate`. The receiver has the span of the call if `is_told`, and otherwise none.
async fn one_call_is_told(tidegate: Tidegate, receiver: &Receiver, is_told: bool, case: &str) {
    let mut client = Client::of(&tidegate).await;
    assert_eq!(client.call(request("edge", &[("many", "x")]), &[]).await, Ok(1), "{case}");
    if is_told {
        receiver.of_kind(SERVER, 1).await;
    } else {
        eventually("the span is lost", async || tidegate.log().contains("traces.lost").then_some(())).await;
    }
    tidegate.stop().await;
    assert_eq!(receiver.spans().len(), usize::from(is_told), "{case}");
}

#[tokio::test]
async fn a_receiver_under_tls_is_told_only_where_its_authority_is_trusted() {
    let (authority, other) = (Authority::new(), Authority::new());
    for protocol in ["http", "grpc"] {
        let receiver = if protocol == "grpc" { Receiver::grpc().await } else { Receiver::http().await };
        let (url, _way) = receiver.under_tls(&authority).await;
        for (trusted, is_told) in [(&other, false), (&authority, true)] {
            let (rules, trusted) = (rule_file(RULES), trusted.certificate());
            let trusted = trusted.to_str().expect("a path");
            // A directory of authorities is as good as a file.
            let directory = tempfile::tempdir().expect("a directory");
            std::fs::copy(trusted, directory.path().join("authority.pem")).expect("it is copied");
            let trusted = match protocol {
                "grpc" => ("SSL_CERT_DIR", directory.path().to_str().expect("a path")),
                _ => ("SSL_CERT_FILE", trusted),
            };
            let settings = [("TRACING_EXPORTER_PROTOCOL", protocol), trusted];
            let tidegate = serve(&rules, &url, &settings).await;
            one_call_is_told(tidegate, &receiver, is_told, protocol).await;
        }
    }
}

#[tokio::test]
async fn a_receiver_may_have_a_private_authority_and_ask_for_a_client_certificate() {
    let (authority, clients) = (Authority::new(), Authority::new());
    let (ca, client) = (authority.certificate(), clients.issue("tidegate"));
    let text = |path: &std::path::Path| path.to_str().expect("a path").to_owned();
    let (ca, certificate, key) = (text(&ca), text(&client.certificate), text(&client.key));
    for (protocol, prefix) in [("http", "OTEL_EXPORTER_OTLP_TRACES_"), ("grpc", "OTEL_EXPORTER_OTLP_")] {
        let receiver = if protocol == "grpc" { Receiver::grpc().await } else { Receiver::http().await };
        let (url, _way) = receiver.under_tls_for(&authority, Some(&clients)).await;
        let names = ["CERTIFICATE", "CLIENT_CERTIFICATE", "CLIENT_KEY"].map(|name| format!("{prefix}{name}"));
        let files = [(names[0].as_str(), ca.as_str()), (&names[1], &certificate), (&names[2], &key)];
        for (files, is_told) in [(&files[..1], false), (&files[1..], false), (&files[..], true)] {
            let rules = rule_file(RULES);
            let tidegate = serve(&rules, &url, &[&[("TRACING_EXPORTER_PROTOCOL", protocol)], files].concat()).await;
            one_call_is_told(tidegate, &receiver, is_told, &format!("{protocol} {files:?}")).await;
        }
    }
}

#[tokio::test]
async fn in_an_envoys_trace_the_decision_is_a_child_of_its_call() {
    let (receiver, rules) = (Receiver::grpc().await, repository("examples/rules.yaml"));
    let url = receiver.url();
    let settings = [
        ("TRACING_ENABLED", "true"),
        ("TRACING_EXPORTER_PROTOCOL", "grpc"),
        // Only what Envoy records.
        ("TRACING_SAMPLING_RATE", "0"),
        ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", &url),
    ];
    let tidegate = Tidegate::start(&rules, &settings).await;
    let tracer = "stat_prefix: fail_open
          tracing:
            provider:
              name: envoy.tracers.opentelemetry
              typed_config:
                \"@type\": type.googleapis.com/envoy.config.trace.v3.OpenTelemetryConfig
                grpc_service: { envoy_grpc: { cluster_name: collector } }
                service_name: edge";
    let collector = format!(
        "  - name: collector
    type: STATIC
    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        \"@type\": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
        explicit_http_config: {{ http2_protocol_options: {{}} }}
    load_assignment:
      cluster_name: collector
      endpoints:
      - lb_endpoints:
        - endpoint: {{ address: {{ socket_address: {{ address: 127.0.0.1, port_value: {} }} }} }}

  - name: tidegate
    type: STATIC",
        receiver.at.port()
    );
    let changes = [("stat_prefix: fail_open", tracer), ("  - name: tidegate\n    type: STATIC", collector.as_str())];
    let envoy = Proxy::start("envoy.yaml", tidegate.grpc, &changes).await;
    let edge = envoy.listener("fail_open").await;
    assert_eq!(get(edge, "/", "alice").await.status, 200);
    let (ours, theirs) = eventually("both tell of the request", async || {
        let spans = receiver.spans();
        let (ours, theirs): (Vec<_>, Vec<_>) =
            spans.into_iter().partition(|received| received.of_process("service.name").as_deref() == Some("RateLimit"));
        let above = theirs.iter().find(|envoy| ours.iter().any(|own| own.span.parent_span_id == envoy.span.span_id))?;
        Some((ours.clone(), above.clone()))
    })
    .await;
    assert_eq!((ours.len(), &ours[0].span.trace_id), (1, &theirs.span.trace_id));
    assert_eq!(theirs.of_process("service.name").as_deref(), Some("edge"));
    assert_eq!(ours[0].attribute("tidegate.outcome").as_deref(), Some("admitted"));
    tidegate.stop().await;
}

#[tokio::test]
async fn spans_that_cannot_be_delivered_as_asked_stop_the_start_with_words() {
    let rules = rule_file(RULES);
    for (variable, value, expected) in [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "collector", "expected a URL such as http://collector:4318"),
        ("TRACING_SAMPLING_RATE", "150", "expected a number from 0 to 1"),
        // Nobody is trusted.
        (
            "OTEL_EXPORTER_OTLP_ENDPOINT",
            "https://localhost:4318",
            "spans cannot be delivered to https://localhost:4318",
        ),
    ] {
        let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_tidegate"));
        command.arg("serve").arg(rules.path()).env_clear();
        command.env("SSL_CERT_FILE", "/dev/null").env("SSL_CERT_DIR", "/dev/null");
        command.env("TRACING_ENABLED", "true").env("GRPC_PORT", "0").env("PORT", "0").env("DEBUG_PORT", "0");
        let (status, _, errors) = crate::support::output(command.env(variable, value)).await;
        assert!(!status.success() && errors.contains(expected) && !errors.contains("panicked"), "{variable}: {errors}");
    }
}
