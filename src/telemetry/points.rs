//! Metrics as data points of OpenTelemetry's protocol: cumulative since the start of the process, with the names of the metrics page
//! less the suffixes that Prometheus adds.

use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::common::v1::{AnyValue, InstrumentationScope, KeyValue, any_value};
use opentelemetry_proto::tonic::metrics::v1::metric::Data;
use opentelemetry_proto::tonic::metrics::v1::number_data_point::Value as Number;
use opentelemetry_proto::tonic::metrics::v1::{
    AggregationTemporality, Gauge, Histogram as Histograms, HistogramDataPoint, Metric, NumberDataPoint,
    ResourceMetrics, ScopeMetrics, Sum,
};
use opentelemetry_proto::tonic::resource::v1::Resource;
use prost::Message;

use super::histogram::Histogram;
use super::metrics::{Metric as Row, MetricKind};
use super::value::{Value, seconds};
use crate::model::Micros;

/// Maximum size of the data points of one request: 1 MiB. Receivers take gRPC messages of at most 4 MiB by default,
/// and each point and each metric has a few bytes around it.
const MOST_BYTES: usize = 1 << 20;

/// Data points of all metrics at one moment, in portions that a receiver takes.
#[derive(Debug)]
pub(super) struct Points {
    started_ns: u64,
    now_ns: u64,
    portions: Vec<Vec<Metric>>,
    /// Size of the points in the last portion.
    bytes: usize,
}

impl Points {
    /// Creates a collection for `now` in a process that started at `started`.
    pub(super) fn new(started: Micros, now: Micros) -> Self {
        let nanos = |moment: Micros| moment.get().saturating_mul(1_000);
        Self { started_ns: nanos(started), now_ns: nanos(now), portions: Vec::new(), bytes: 0 }
    }

    /// Adds one series of a counter or a gauge.
    pub(super) fn number(&mut self, row: &'static Row, labels: &[&str], value: Value) {
        let value = match value {
            Value::Whole(number) => Number::AsInt(i64::try_from(number).unwrap_or(i64::MAX)),
            Value::Fraction(number) => Number::AsDouble(number),
        };
        let point = NumberDataPoint {
            attributes: attributes(row, labels),
            // A gauge has no start.
            start_time_unix_nano: if row.kind == MetricKind::Counter { self.started_ns } else { 0 },
            time_unix_nano: self.now_ns,
            value: Some(value),
            ..NumberDataPoint::default()
        };
        let size = point.encoded_len();
        if let Some(Data::Sum(Sum { data_points, .. }) | Data::Gauge(Gauge { data_points })) = self.metric(row, size) {
            data_points.push(point);
        }
    }

    /// Adds one series of a histogram.
    pub(super) fn histogram(&mut self, row: &'static Row, labels: &[&str], histogram: &Histogram) {
        let (bounds, counts): (Vec<_>, Vec<_>) = histogram.buckets().unzip();
        let point = HistogramDataPoint {
            attributes: attributes(row, labels),
            start_time_unix_nano: self.started_ns,
            time_unix_nano: self.now_ns,
            count: counts.iter().sum(),
            sum: Some(seconds(histogram.sum())),
            explicit_bounds: bounds.into_iter().flatten().map(seconds).collect(),
            bucket_counts: counts,
            ..HistogramDataPoint::default()
        };
        let size = point.encoded_len();
        if let Some(Data::Histogram(Histograms { data_points, .. })) = self.metric(row, size) {
            data_points.push(point);
        }
    }

    /// Returns the data of the metric `row` in a portion that has room for `bytes` more.
    fn metric(&mut self, row: &'static Row, bytes: usize) -> Option<&mut Data> {
        if self.portions.is_empty() || self.bytes + bytes > MOST_BYTES {
            self.portions.push(Vec::new());
            self.bytes = 0;
        }
        self.bytes += bytes;
        let portion = self.portions.last_mut()?;
        let (name, unit) = name_and_unit(row);
        if portion.last().is_none_or(|last| last.name != name) {
            let temporality = AggregationTemporality::Cumulative.into();
            let data = match row.kind {
                MetricKind::Counter => {
                    Data::Sum(Sum { aggregation_temporality: temporality, is_monotonic: true, data_points: Vec::new() })
                }
                MetricKind::Gauge => Data::Gauge(Gauge::default()),
                MetricKind::Histogram => {
                    Data::Histogram(Histograms { aggregation_temporality: temporality, data_points: Vec::new() })
                }
            };
            let (name, description, unit) = (name.to_owned(), row.help.to_owned(), unit.to_owned());
            portion.push(Metric { name, description, unit, data: Some(data), ..Metric::default() });
        }
        portion.last_mut()?.data.as_mut()
    }

    /// Returns the requests that send all points as those of `resource`.
    pub(super) fn into_requests(self, resource: &Resource) -> Vec<ExportMetricsServiceRequest> {
        let scope = InstrumentationScope {
            name: "tidegate".to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            ..InstrumentationScope::default()
        };
        let request = |metrics| {
            let scope_metrics = vec![ScopeMetrics { scope: Some(scope.clone()), metrics, ..ScopeMetrics::default() }];
            let resource = Some(resource.clone());
            let metrics = ResourceMetrics { resource, scope_metrics, ..ResourceMetrics::default() };
            ExportMetricsServiceRequest { resource_metrics: vec![metrics] }
        };
        self.portions.into_iter().map(request).collect()
    }
}

/// Returns the name and the unit of a metric in OpenTelemetry's form: without `_total`, and with the unit beside the name.
fn name_and_unit(row: &Row) -> (&'static str, &'static str) {
    let name = match row.kind {
        MetricKind::Counter => row.name.strip_suffix("_total").unwrap_or(row.name),
        MetricKind::Gauge | MetricKind::Histogram => row.name,
    };
    name.strip_suffix("_seconds").map_or((name, ""), |name| (name, "s"))
}

/// Returns the attributes of one series. An empty value leaves its attribute out, as on the page.
fn attributes(row: &Row, labels: &[&str]) -> Vec<KeyValue> {
    let attribute = |(key, value): (&&str, &&str)| KeyValue {
        key: (*key).to_owned(),
        value: Some(AnyValue { value: Some(any_value::Value::StringValue((*value).to_owned())) }),
        ..KeyValue::default()
    };
    row.labels.iter().zip(labels).filter(|(_, value)| !value.is_empty()).map(attribute).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::time::Duration;

    use super::*;
    use crate::telemetry::metrics::{CALLS_LIMITED, DECISIONS, RESPONSE_TIME, RULES_LOADED, TABLE, TOTAL_HITS};

    #[test]
    fn names_lose_what_prometheus_adds_and_stay_apart() {
        assert_eq!(name_and_unit(&DECISIONS), ("tidegate_decisions", ""));
        assert_eq!(name_and_unit(&TOTAL_HITS), ("ratelimit_service_rate_limit_total_hits", ""));
        assert_eq!(name_and_unit(&RESPONSE_TIME), ("ratelimit_service_response_time", "s"));
        assert_eq!(name_and_unit(&RULES_LOADED), ("tidegate_rules_loaded_timestamp", "s"));
        let names: HashSet<_> = TABLE.iter().map(|row| name_and_unit(row).0).collect();
        assert_eq!(names.len(), TABLE.len(), "two metrics would be one");
    }

    #[test]
    fn many_series_are_sent_in_portions_that_a_receiver_takes() {
        let mut points = Points::new(Micros::ZERO, Micros::from_secs(1));
        let long = "x".repeat(1_000);
        let histogram = Histogram::default();
        histogram.record(Duration::from_secs(60));
        for number in 0..10_000 {
            points.number(&DECISIONS, &["d", &format!("{long}{number}"), "admitted", ""], Value::Whole(number));
        }
        points.histogram(&RESPONSE_TIME, &["M"], &histogram);
        points.number(&CALLS_LIMITED, &["late"], Value::Whole(u64::MAX));
        let requests = points.into_requests(&Resource::default());
        assert!((10..20).contains(&requests.len()), "{}", requests.len());
        assert!(requests.iter().all(|request| request.encoded_len() < 2 << 20));
        let metrics: Vec<_> = requests.into_iter().flat_map(|request| request.resource_metrics).collect();
        let metrics = metrics.into_iter().flat_map(|of| of.scope_metrics).flat_map(|of| of.metrics);
        let (mut numbers, mut others) = (HashSet::new(), Vec::new());
        for metric in metrics {
            match metric.data {
                Some(Data::Sum(sum)) if metric.name == "tidegate_decisions" => {
                    assert!(sum.is_monotonic && sum.aggregation_temporality == 2);
                    numbers.extend(sum.data_points.iter().filter_map(|point| match point.value {
                        Some(Number::AsInt(number)) if point.attributes.len() == 3 => Some(number),
                        _ => None,
                    }));
                }
                data => others.push(data),
            }
        }
        assert_eq!(numbers.len(), 10_000, "each series once, and none is lost");
        let [Some(Data::Histogram(times)), Some(Data::Sum(limited))] = &others[..] else { panic!("{others:?}") };
        let time = &times.data_points[0];
        assert_eq!((time.count, time.sum, time.bucket_counts.len()), (1, Some(60.0), time.explicit_bounds.len() + 1));
        assert_eq!(time.bucket_counts.last(), Some(&1), "above the last bound");
        assert_eq!(limited.data_points[0].value, Some(Number::AsInt(i64::MAX)), "the greatest that the protocol has");
    }
}
