//! Metrics, as a collector of OpenTelemetry is sent them.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;

use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue};
use opentelemetry_proto::tonic::metrics::v1::metric::Data;
use opentelemetry_proto::tonic::metrics::v1::number_data_point::Value as Number;
use opentelemetry_proto::tonic::metrics::v1::{Metric, NumberDataPoint};
use tempfile::NamedTempFile;
use tidegate::telemetry::metrics::{MetricKind, TABLE};
use tokio::net::TcpListener;

use crate::grpc;
use crate::redis::certificates::Authority;
use crate::support::{Tidegate, eventually, in_time, rule_file};
use crate::traces::receiver::{Metrics, Receiver};

const RULES: &str = "domain: edge
descriptors:
  - { key: user, value_to_metric: true, rate_limit: { unit: week, requests_per_unit: 2 } }
";

const HITS: &str = "ratelimit_service_rate_limit_total_hits";

/// A delivery at each tenth of a second.
const SOON: (&str, &str) = ("OTEL_METRIC_EXPORT_INTERVAL", "100");

/// A server that sends its metrics there, its rules, and a client of it.
struct Served {
    tidegate: Tidegate,
    client: grpc::Client,
    _rules: NamedTempFile,
}

impl Served {
    async fn with(collector: &str, more: &[(&str, &str)]) -> Self {
        let rules = rule_file(RULES);
        let own = [("OTEL_METRICS_EXPORTER", "otlp"), ("OTEL_EXPORTER_OTLP_ENDPOINT", collector)];
        let tidegate = Tidegate::start(rules.path(), &[&own, more].concat()).await;
        let client = grpc::client(tidegate.grpc).await;
        Self { tidegate, client, _rules: rules }
    }

    /// One hit of a user.
    async fn hit(&mut self, user: &str) {
        let request = grpc::one("edge", "user", user);
        in_time("it is answered", self.client.should_rate_limit(request)).await.expect("no error");
    }

    async fn stop(mut self) {
        self.tidegate.terminate();
        assert!(self.tidegate.ended().await.success());
    }
}

fn protocol(grpc: bool) -> (&'static str, &'static str) {
    ("OTEL_EXPORTER_OTLP_PROTOCOL", if grpc { "grpc" } else { "http/protobuf" })
}

async fn receiver(grpc: bool) -> Receiver {
    if grpc { Receiver::grpc().await } else { Receiver::http().await }
}

fn of(delivery: &Metrics) -> impl Iterator<Item = &Metric> {
    delivery.request.resource_metrics.iter().flat_map(|of| &of.scope_metrics).flat_map(|of| &of.metrics)
}

fn attributes(pairs: &[KeyValue]) -> BTreeMap<&str, &str> {
    let mut all = BTreeMap::new();
    for KeyValue { key, value, .. } in pairs {
        let Some(AnyValue { value: Some(Value::StringValue(text)) }) = value else { panic!("{key} is {value:?}") };
        all.insert(key.as_str(), text.as_str());
    }
    all
}

/// The latest sum of hits, over all series.
fn hits(receiver: &Receiver) -> i64 {
    let deliveries = receiver.metrics();
    let last = deliveries.iter().rev().flat_map(of).find(|metric| metric.name == HITS);
    let Some(Data::Sum(sum)) = last.and_then(|metric| metric.data.as_ref()) else { return 0 };
    let value = |point: &NumberDataPoint| match point.value {
        Some(Number::AsInt(number)) => number,
        other => panic!("{other:?}"),
    };
    sum.data_points.iter().map(value).sum()
}

async fn come(receiver: &Receiver, count: i64) {
    eventually("the hits come", async || (hits(receiver) == count).then_some(())).await;
}

/// The series of a delivery: name, attributes and value of each. A histogram has its number of values.
fn series(delivery: &Metrics) -> BTreeMap<String, f64> {
    let mut all = BTreeMap::new();
    for metric in of(delivery) {
        let mut add = |pairs: &[KeyValue], value: f64| {
            let key = format!("{} {:?}", metric.name, attributes(pairs));
            assert!(all.insert(key.clone(), value).is_none(), "{key} comes twice");
        };
        let value = |point: &NumberDataPoint| match point.value {
            Some(Number::AsInt(number)) => i32::try_from(number).expect("it is small").into(),
            Some(Number::AsDouble(number)) => number,
            None => panic!("{point:?}"),
        };
        match metric.data.as_ref().expect("data") {
            Data::Sum(sum) => {
                assert!(sum.is_monotonic && sum.aggregation_temporality == 2, "{}: cumulative", metric.name);
                let started = |point: &NumberDataPoint| point.start_time_unix_nano < point.time_unix_nano;
                assert!(sum.data_points.iter().all(|point| point.start_time_unix_nano > 0 && started(point)));
                sum.data_points.iter().for_each(|point| add(&point.attributes, value(point)));
            }
            Data::Gauge(gauge) => gauge.data_points.iter().for_each(|point| add(&point.attributes, value(point))),
            Data::Histogram(histogram) => {
                assert_eq!(histogram.aggregation_temporality, 2, "{}: cumulative", metric.name);
                for point in &histogram.data_points {
                    assert_eq!(point.bucket_counts.iter().sum::<u64>(), point.count);
                    add(&point.attributes, u32::try_from(point.count).expect("it is small").into());
                }
            }
            other => panic!("{other:?}"),
        }
    }
    all
}

/// The series of the metrics page, in the same form.
fn page(text: &str) -> BTreeMap<String, f64> {
    let mut all = BTreeMap::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let Some((series, value)) = line.rsplit_once(' ') else { continue };
        let (name, labels) = series.split_once('{').unwrap_or((series, ""));
        let row = TABLE.iter().find(|row| match row.kind {
            MetricKind::Histogram => name.strip_suffix("_count") == Some(row.name),
            _ => row.name == name,
        });
        let Some(row) = row else { continue };
        let name = if row.kind == MetricKind::Counter { row.name.trim_end_matches("_total") } else { row.name };
        let labels = labels.trim_end_matches('}').split(',').filter_map(|label| label.split_once('='));
        let labels: BTreeMap<_, _> = labels.map(|(key, value)| (key, value.trim_matches('"'))).collect();
        let value = value.parse().expect("a number");
        assert!(all.insert(format!("{} {labels:?}", name.trim_end_matches("_seconds")), value).is_none());
    }
    all
}

#[tokio::test]
async fn a_collector_gets_what_is_on_the_page_by_either_protocol() {
    for grpc in [false, true] {
        let receiver = receiver(grpc).await;
        let variables = [
            SOON,
            protocol(grpc),
            ("OTEL_EXPORTER_OTLP_HEADERS", "api-key=hunter%202"),
            ("OTEL_SERVICE_NAME", "limits"),
            ("OTEL_RESOURCE_ATTRIBUTES", "zone=north"),
        ];
        let mut served = Served::with(&receiver.url(), &variables).await;
        for user in ["alice", "alice", "alice", "bob"] {
            served.hit(user).await;
        }
        come(&receiver, 4).await;
        let deliveries = receiver.metrics();
        let last = deliveries.last().expect("one");
        let resource = last.request.resource_metrics[0].resource.as_ref().expect("a resource");
        let resource = attributes(&resource.attributes);
        assert_eq!((resource["service.name"], resource["zone"]), ("limits", "north"));
        assert!(resource.contains_key("service.instance.id") && resource.contains_key("service.version"));
        assert!(deliveries.iter().all(|delivery| delivery.key.as_deref() == Some("hunter 2")));

        // The page itself needs a connection.
        let differs = |series: &str| series.starts_with("tidegate_connections ");
        let (mut sent, mut shown) = (series(last), page(&served.tidegate.metrics().await));
        sent.retain(|series, _| !differs(series));
        // What the machine says of the process is on the page alone.
        let is_of_machine = |series: &str| series.starts_with("process_") && !series.starts_with("process_start_time");
        assert_eq!(shown.keys().filter(|series| is_of_machine(series)).count(), 6);
        shown.retain(|series, _| !differs(series) && !is_of_machine(series));
        assert_eq!(sent, shown);
        assert_eq!(
            sent["ratelimit_service_rate_limit_over_limit {\"domain\": \"edge\", \"key1\": \"user_alice\"}"],
            1.0
        );
        assert_eq!(sent["ratelimit_service_response_time {\"grpc_method\": \"ShouldRateLimit\"}"], 4.0);
        let units: BTreeMap<_, _> = of(last).map(|metric| (metric.name.as_str(), metric.unit.as_str())).collect();
        assert_eq!((units["ratelimit_service_response_time"], units["tidegate_decisions"]), ("s", ""));
        served.stop().await;
    }
}

#[tokio::test]
async fn a_stop_delivers_the_last_values() {
    for grpc in [false, true] {
        let receiver = receiver(grpc).await;
        let mut served =
            Served::with(&receiver.url(), &[("OTEL_METRIC_EXPORT_INTERVAL", "3600000"), protocol(grpc)]).await;
        served.hit("alice").await;
        served.stop().await;
        assert_eq!((hits(&receiver), receiver.metrics().len()), (1, 1));
    }
}

#[tokio::test]
async fn a_collector_that_was_away_gets_everything_once_it_is_there() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a free port");
    let at = listener.local_addr().expect("it is bound");
    drop(listener);
    let mut served = Served::with(&format!("http://{at}"), &[SOON, protocol(true)]).await;
    served.hit("alice").await;
    eventually("the log says so", async || served.tidegate.log().contains("metrics.undelivered").then_some(())).await;
    served.hit("alice").await;
    let listener = eventually("the port is free", async || TcpListener::bind(at).await.ok()).await;
    let receiver = Receiver::grpc_on(listener);
    come(&receiver, 2).await;
    served.stop().await;
}

#[tokio::test]
async fn a_collector_that_says_nothing_delays_no_answer_and_no_stop() {
    for grpc in [false, true] {
        let receiver = Receiver::silent().await;
        let timeout = ("OTEL_EXPORTER_OTLP_METRICS_TIMEOUT", "100");
        let mut served = Served::with(&receiver.url(), &[SOON, protocol(grpc), timeout]).await;
        for _ in 0..100 {
            served.hit("alice").await;
        }
        let is_told = async || served.tidegate.log().contains("metrics.undelivered").then_some(());
        eventually("the log says so", is_told).await;
        served.stop().await;
        let mut served = Served::with(&receiver.url(), &[SOON, protocol(grpc)]).await;
        served.hit("alice").await;
        // With the default timeouts a delivery is under way for 10 s.
        served.stop().await;
    }
}

#[tokio::test]
async fn a_collector_under_tls_is_sent_metrics_only_where_its_authority_is_trusted() {
    let (authority, other) = (Authority::new(), Authority::new());
    for grpc in [false, true] {
        let receiver = receiver(grpc).await;
        let (url, _way) = receiver.under_tls(&authority).await;
        for (trusted, is_sent) in [(&other, false), (&authority, true)] {
            let trusted = trusted.certificate();
            let trusted = ("SSL_CERT_FILE", trusted.to_str().expect("a path"));
            let served = Served::with(&url, &[SOON, protocol(grpc), trusted]).await;
            let is_told = async || {
                let is_told = served.tidegate.log().contains("metrics.undelivered");
                (is_told || !receiver.metrics().is_empty()).then_some(())
            };
            eventually("they are sent or lost", is_told).await;
            served.stop().await;
            assert_eq!(!receiver.metrics().is_empty(), is_sent, "{}", protocol(grpc).1);
        }
    }
}

#[tokio::test]
async fn a_collector_may_have_a_private_authority_and_ask_for_a_client_certificate() {
    let (authority, clients) = (Authority::new(), Authority::new());
    let (ca, client) = (authority.certificate(), clients.issue("tidegate"));
    let text = |path: &std::path::Path| path.to_str().expect("a path").to_owned();
    let (ca, certificate, key) = (text(&ca), text(&client.certificate), text(&client.key));
    for (grpc, prefix) in [(false, "OTEL_EXPORTER_OTLP_"), (true, "OTEL_EXPORTER_OTLP_METRICS_")] {
        let receiver = receiver(grpc).await;
        let (url, _way) = receiver.under_tls_for(&authority, Some(&clients)).await;
        let names = ["CERTIFICATE", "CLIENT_CERTIFICATE", "CLIENT_KEY"].map(|name| format!("{prefix}{name}"));
        let files = [(names[0].as_str(), ca.as_str()), (&names[1], &certificate), (&names[2], &key)];
        for (files, is_sent) in [(&files[..1], false), (&files[1..], false), (&files[..], true)] {
            let served = Served::with(&url, &[&[SOON, protocol(grpc)], files].concat()).await;
            let is_told = async || {
                let is_told = served.tidegate.log().contains("metrics.undelivered");
                (is_told || !receiver.metrics().is_empty()).then_some(())
            };
            eventually("they are sent or lost", is_told).await;
            served.stop().await;
            assert_eq!(!receiver.metrics().is_empty(), is_sent, "{} {files:?}", protocol(grpc).1);
        }
    }
}
