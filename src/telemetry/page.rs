//! Present values of all metrics: as a page in Prometheus' text format 0.0.4, or as data points of OpenTelemetry's protocol.

use std::fmt::Write;

use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::resource::v1::Resource;

use super::escape::is_hidden;
use super::histogram::Histogram;
use super::metrics::Metric;
use super::points::Points;
use super::value::{Value, seconds};
use crate::model::Micros;

/// `Content-Type` of the page.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Metrics at one moment.
#[derive(Debug)]
pub struct Page(Form);

/// Form of the page.
#[derive(Debug)]
enum Form {
    Text(String),
    Points(Points),
}

/// Part of the page for one metric.
pub struct Family<'a> {
    form: &'a mut Form,
    metric: &'static Metric,
}

impl Default for Page {
    /// Returns an empty page of text.
    fn default() -> Self {
        Self(Form::Text(String::new()))
    }
}

impl Page {
    /// Returns an empty page of data points for `now`, of a process that started at `started`.
    pub(super) fn points(started: Micros, now: Micros) -> Self {
        Self(Form::Points(Points::new(started, now)))
    }

    /// Adds a metric; `fill` adds its series.
    pub fn family(&mut self, metric: &'static Metric, fill: impl FnOnce(&mut Family<'_>)) {
        if let Form::Text(page) = &mut self.0 {
            let Metric { name, kind, help, .. } = metric;
            let _ = writeln!(page, "# HELP {name} {help}\n# TYPE {name} {}", kind.name());
        }
        fill(&mut Family { form: &mut self.0, metric });
    }

    /// Adds a metric with one series and no labels.
    pub fn single(&mut self, metric: &'static Metric, value: impl Into<Value>) {
        self.family(metric, |family| family.sample(&[], value));
    }

    /// Adds a metric with one series and no labels, or without a series if there is no value.
    pub fn optional(&mut self, metric: &'static Metric, value: Option<impl Into<Value>>) {
        self.family(metric, |family| value.into_iter().for_each(|value| family.sample(&[], value)));
    }

    /// Returns true if the page is one of data points.
    pub fn is_of_points(&self) -> bool {
        matches!(self.0, Form::Points(_))
    }

    /// Returns the text of the page; nothing for data points.
    pub fn into_text(self) -> String {
        match self.0 {
            Form::Text(text) => text,
            Form::Points(_) => String::new(),
        }
    }

    /// Returns the requests that send the data points as those of `resource`; none for a page of text.
    pub(super) fn into_requests(self, resource: &Resource) -> Vec<ExportMetricsServiceRequest> {
        match self.0 {
            Form::Text(_) => Vec::new(),
            Form::Points(points) => points.into_requests(resource),
        }
    }
}

impl Family<'_> {
    /// Adds one series. `values` are the label values in the order of the table. An empty value leaves its label out, which
    /// means the same in Prometheus.
    pub fn sample(&mut self, values: &[&str], value: impl Into<Value>) {
        let (metric, value) = (self.metric, value.into());
        match self.form {
            Form::Text(page) => line(page, metric, "", values, None, value),
            Form::Points(points) => points.number(metric, values, value),
        }
    }

    /// Adds one series of a histogram.
    pub fn histogram(&mut self, values: &[&str], histogram: &Histogram) {
        let page = match self.form {
            Form::Text(page) => page,
            Form::Points(points) => return points.histogram(self.metric, values, histogram),
        };
        let mut upto = 0;
        for (bound, count) in histogram.buckets() {
            upto += count;
            let bound = bound.map_or_else(|| "+Inf".to_owned(), |bound| seconds(bound).to_string());
            line(page, self.metric, "_bucket", values, Some(&bound), upto.into());
        }
        line(page, self.metric, "_sum", values, None, seconds(histogram.sum()).into());
        line(page, self.metric, "_count", values, None, upto.into());
    }
}

fn line(page: &mut String, metric: &Metric, suffix: &str, values: &[&str], bound: Option<&str>, value: Value) {
    let _ = write!(page, "{}{suffix}", metric.name);
    let named = metric.labels.iter().copied().zip(values.iter().copied());
    let mut open = '{';
    for (label, value) in named.filter(|(_, value)| !value.is_empty()).chain(bound.map(|bound| ("le", bound))) {
        let _ = write!(page, "{open}{label}=\"");
        escape(value, page);
        page.push('"');
        open = ',';
    }
    let close = if open == ',' { "}" } else { "" };
    let _ = writeln!(page, "{close} {value}");
}

fn escape(value: &str, page: &mut String) {
    for c in value.chars() {
        match c {
            '\\' => page.push_str("\\\\"),
            '"' => page.push_str("\\\""),
            '\n' => page.push_str("\\n"),
            // A scraper rejects the whole page for one hidden character.
            c if is_hidden(c) => page.push('_'),
            c => page.push(c),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::telemetry::metrics::{DECISIONS, RESPONSE_TIME, RULES};

    #[test]
    fn a_page_is_what_a_scraper_reads() {
        let mut page = Page::default();
        page.single(&RULES, 7_u8);
        page.family(&DECISIONS, |family| family.sample(&["a\"b\\c\nd\0\u{202e}", "", "", "admitted", "store"], 3_u8));
        assert_eq!(
            page.into_text(),
            "# HELP tidegate_rules Rules in force\n# TYPE tidegate_rules gauge\ntidegate_rules 7\n\
             # HELP tidegate_decisions_total Requests decided, by the rule that decided, the outcome and its provenance\n\
             # TYPE tidegate_decisions_total counter\n\
             tidegate_decisions_total{domain=\"a\\\"b\\\\c\\nd__\",outcome=\"admitted\",provenance=\"store\"} 3\n"
        );
    }

    #[test]
    fn a_histogram_counts_up_to_each_bound_and_all_at_the_end() {
        let histogram = Histogram::default();
        for us in [100, 101, 3_000_000, 60_000_000] {
            histogram.record(Duration::from_micros(us));
        }
        let mut page = Page::default();
        page.family(&RESPONSE_TIME, |family| family.histogram(&["M"], &histogram));
        let text = page.into_text();
        for line in [
            "_bucket{grpc_method=\"M\",le=\"0.0001\"} 1",
            "_bucket{grpc_method=\"M\",le=\"0.00025\"} 2",
            "_bucket{grpc_method=\"M\",le=\"2.5\"} 2",
            "_bucket{grpc_method=\"M\",le=\"10\"} 3",
            "_bucket{grpc_method=\"M\",le=\"+Inf\"} 4",
            "_sum{grpc_method=\"M\"} 63.000201",
            "_count{grpc_method=\"M\"} 4",
        ] {
            assert!(text.contains(&format!("\nratelimit_service_response_time_seconds{line}\n")), "{line}\n{text}");
        }
    }
}
