//! Settings of the export of metrics over OTLP, and the reading of those that it shares with traces.

use std::time::Duration;

use http::{HeaderName, HeaderValue};

use super::otel::{
    Endpoint, ExportProtocol, HeaderList, METRICS_TLS, Millis, SHARED, SHARED_TLS, Shared, TRACES_TLS, endpoint,
    tls_files,
};
use super::traces::{OWN, Own, STANDARD, TraceSettings};
use super::values::Setting;
use super::{InvalidSetting, Lookup, SettingRow, SettingRows, UnusedVariable, rows};
use crate::dial::tls::TlsFiles;

/// Rows of the settings of traces and of the export of metrics.
pub(super) const TABLES: [&[SettingRow]; 8] = [
    OWN.table,
    SHARED.table,
    SHARED_TLS.rows.table,
    STANDARD.table,
    TRACES_TLS.rows.table,
    EXPORTER.table,
    METRICS.table,
    METRICS_TLS.rows.table,
];

/// Path of metrics, appended to an endpoint of OTLP over HTTP.
const METRICS_PATH: &str = "/v1/metrics";

/// Settings of the export of metrics over OTLP.
#[derive(Clone, Debug, PartialEq)]
pub struct OtlpSettings {
    /// Protocol of the export.
    pub protocol: ExportProtocol,
    /// URL of the receiver, with the path that HTTP needs.
    pub endpoint: String,
    /// Files of TLS; `None` in plaintext.
    pub tls: Option<TlsFiles>,
    /// Headers of each request. Their values are marked as sensitive.
    pub headers: Vec<(HeaderName, HeaderValue)>,
    /// Timeout of one request.
    pub request_timeout: Duration,
    /// Time between two deliveries.
    pub interval: Duration,
    /// Timeout of one delivery with all its requests.
    pub timeout: Duration,
    /// Resource attributes of the process.
    pub resource: Vec<(String, String)>,
}

/// Choice of the export.
struct Exporter {
    exporter: MetricsExporter,
}

const EXPORTER: SettingRows<Exporter> = rows!(Exporter {
    exporter: MetricsExporter = "OTEL_METRICS_EXPORTER", "none", "Export of metrics beside /metrics: otlp sends them over OTLP; none and prometheus: no export";
});

/// Values of OpenTelemetry's variables for metrics alone.
struct Metrics {
    endpoint: Option<Endpoint>,
    protocol: Option<ExportProtocol>,
    headers: HeaderList,
    request_timeout: Option<Millis>,
    interval: Interval,
    timeout: Millis,
}

const METRICS: SettingRows<Metrics> = rows!(Metrics {
    endpoint: Option<Endpoint> = "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "", "Replaces OTEL_EXPORTER_OTLP_ENDPOINT for metrics; used as it is, without a path appended";
    protocol: Option<ExportProtocol> = "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "", "Replaces OTEL_EXPORTER_OTLP_PROTOCOL for metrics";
    headers: HeaderList = "OTEL_EXPORTER_OTLP_METRICS_HEADERS", "", "Replaces OTEL_EXPORTER_OTLP_HEADERS for metrics";
    request_timeout: Option<Millis> = "OTEL_EXPORTER_OTLP_METRICS_TIMEOUT", "", "Replaces OTEL_EXPORTER_OTLP_TIMEOUT for metrics";
    interval: Interval = "OTEL_METRIC_EXPORT_INTERVAL", "60000", "Time between two deliveries of metrics over OTLP, in milliseconds";
    timeout: Millis = "OTEL_METRIC_EXPORT_TIMEOUT", "30000", "Timeout of a delivery of metrics over OTLP with all its requests, in milliseconds";
});

/// Reads the settings of traces and of the export of metrics. The inner `None`s mean that they are off. Adds variables without effect
/// to `unused`.
pub(super) fn read(
    given: Lookup<'_>,
    wrong: &mut Vec<InvalidSetting>,
    unused: &mut Vec<UnusedVariable>,
) -> Option<(Option<TraceSettings>, Option<OtlpSettings>)> {
    let (own, exporter) = ((OWN.read)(given, wrong), (EXPORTER.read)(given, wrong));
    let (own, is_exporting) = (own?, exporter?.exporter.is_otlp);
    if !own.is_enabled && !is_exporting {
        // The other variables of OpenTelemetry may be meant for other programs, with values that this one does not know.
        return Some((None, None));
    }
    let shared = (SHARED.read)(given, wrong);
    let traces = own.is_enabled.then(|| (STANDARD.read)(given, wrong));
    let metrics = is_exporting.then(|| (METRICS.read)(given, wrong));
    let shared = shared?;
    let mut traces = match traces {
        Some(standard) => Some(own.traces(&shared, standard?)),
        None => None,
    };
    let mut metrics = match metrics {
        Some(metrics) => Some(metrics?.settings(&own, &shared)),
        None => None,
    };
    if shared.is_disabled.0 {
        return Some((None, None));
    }
    let kinds = [
        traces.as_mut().map(|traces| (&TRACES_TLS, &traces.endpoint, &mut traces.tls)),
        metrics.as_mut().map(|metrics| (&METRICS_TLS, &metrics.endpoint, &mut metrics.tls)),
    ];
    for (group, endpoint, tls) in kinds.into_iter().flatten() {
        *tls = tls_files(group, endpoint, given, wrong, unused);
    }
    Some((traces, metrics))
}

impl Metrics {
    fn settings(self, own: &Own, shared: &Shared) -> OtlpSettings {
        let protocol = self.protocol.or(shared.protocol).unwrap_or(own.protocol);
        let headers = if self.headers.0.is_empty() { shared.headers.0.clone() } else { self.headers.0 };
        OtlpSettings {
            protocol,
            endpoint: endpoint(self.endpoint, shared.endpoint.as_ref(), protocol, METRICS_PATH),
            tls: None,
            headers,
            request_timeout: self.request_timeout.or(shared.timeout).map_or(Millis::DEFAULT, |given| given.0),
            interval: self.interval.0,
            timeout: self.timeout.0,
            resource: own.resource(shared),
        }
    }
}

/// Value of `OTEL_METRICS_EXPORTER`.
struct MetricsExporter {
    is_otlp: bool,
}

impl Setting for MetricsExporter {
    const TAKES: &'static str = "otlp, prometheus or none";
    fn parse(text: &str) -> Option<Self> {
        match text {
            "otlp" => Some(Self { is_otlp: true }),
            "" | "none" | "prometheus" => Some(Self { is_otlp: false }),
            _ => None,
        }
    }
}

/// Time between two deliveries, in milliseconds.
struct Interval(Duration);

impl Setting for Interval {
    const TAKES: &'static str = "a whole number of milliseconds from 100 to 3600000";
    /// From 100 ms, which is as fine as any receiver aggregates, to 1 h, as for statsd.
    fn parse(text: &str) -> Option<Self> {
        let length = text.parse().ok().filter(|length| (100..=3_600_000).contains(length));
        length.map(|length| Self(Duration::from_millis(length)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file::{MAX_CERTIFICATES, MAX_SECRET, Named};
    use crate::settings::tests::{read, wrong};

    const ON: (&str, &str) = ("OTEL_METRICS_EXPORTER", "otlp");

    fn otlp(given: &[(&str, &str)]) -> OtlpSettings {
        let settings = read(&[&[ON], given].concat()).unwrap_or_else(|wrong| panic!("{given:?}: {wrong:?}"));
        settings.otlp.expect("it is on")
    }

    #[test]
    fn metrics_are_exported_only_if_somebody_asks() {
        assert_eq!(read(&[]).unwrap().otlp, None);
        for off in ["none", "prometheus", ""] {
            let settings = read(&[("OTEL_METRICS_EXPORTER", off), ("OTEL_METRIC_EXPORT_INTERVAL", "of somebody else")]);
            assert_eq!(settings.unwrap().otlp, None, "{off}");
        }
        assert_eq!(read(&[ON, ("OTEL_SDK_DISABLED", "true")]).unwrap().otlp, None);
        assert_eq!(read(&[ON, ("DISABLE_STATS", "true")]).unwrap().otlp, None);
        let settings = read(&[ON, ("OTEL_TRACES_SAMPLER", "of somebody else")]).unwrap();
        assert!(settings.traces.is_none() && settings.otlp.is_some(), "the sampler is none of theirs");
    }

    #[test]
    fn the_defaults_are_opentelemetrys() {
        let expected = OtlpSettings {
            protocol: ExportProtocol::Http,
            endpoint: "http://localhost:4318/v1/metrics".to_owned(),
            tls: None,
            headers: Vec::new(),
            request_timeout: Duration::from_secs(10),
            interval: Duration::from_secs(60),
            timeout: Duration::from_secs(30),
            resource: vec![("service.name".to_owned(), "RateLimit".to_owned())],
        };
        assert_eq!(otlp(&[]), expected);
    }

    #[test]
    fn what_is_set_for_metrics_goes_before_what_is_set_for_all() {
        let all = [
            ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://a:1/x/"),
            ("OTEL_EXPORTER_OTLP_HEADERS", "api-key=hunter%202"),
            ("OTEL_EXPORTER_OTLP_TIMEOUT", "5"),
            ("OTEL_SERVICE_NAME", "limits"),
        ];
        let read = otlp(&all);
        assert_eq!(
            (read.endpoint.as_str(), read.request_timeout),
            ("http://a:1/x/v1/metrics", Duration::from_millis(5))
        );
        assert_eq!((read.headers[0].0.as_str(), read.headers[0].1.as_bytes()), ("api-key", &b"hunter 2"[..]));
        assert!(!format!("{read:?}").contains("hunter"), "{read:?}");
        assert_eq!(read.resource, [("service.name".to_owned(), "limits".to_owned())]);
        let own = [
            ("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "https://b:2/y"),
            ("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "grpc"),
            ("OTEL_EXPORTER_OTLP_METRICS_HEADERS", "b=2"),
            ("OTEL_EXPORTER_OTLP_METRICS_TIMEOUT", "7"),
            ("OTEL_METRIC_EXPORT_INTERVAL", "100"),
            ("OTEL_METRIC_EXPORT_TIMEOUT", "50"),
        ];
        let read = otlp(&[&all[..], &own].concat());
        assert_eq!((read.protocol, read.endpoint.as_str()), (ExportProtocol::Grpc, "https://b:2/y"));
        let millis = [7, 100, 50].map(Duration::from_millis);
        assert_eq!([read.request_timeout, read.interval, read.timeout], millis);
        assert_eq!((read.headers.len(), read.headers[0].0.as_str()), (1, "b"));
        assert_eq!(otlp(&[("TRACING_EXPORTER_PROTOCOL", "grpc")]).endpoint, "http://localhost:4317", "as traces");
    }

    #[test]
    fn the_files_of_one_kind_of_export_go_before_those_of_all() {
        let all = [
            ("OTEL_EXPORTER_OTLP_ENDPOINT", "https://a:1"),
            ("OTEL_EXPORTER_OTLP_CERTIFICATE", "/ca"),
            ("OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE", "/cert"),
            ("OTEL_EXPORTER_OTLP_CLIENT_KEY", "/key"),
            ("TRACING_ENABLED", "true"),
            ON,
        ];
        let own = [
            ("OTEL_EXPORTER_OTLP_METRICS_CERTIFICATE", "/own-ca"),
            ("OTEL_EXPORTER_OTLP_METRICS_CLIENT_CERTIFICATE", "/own-cert"),
            ("OTEL_EXPORTER_OTLP_METRICS_CLIENT_KEY", "/own-key"),
        ];
        let named = |variable, path: &str, most| Named::new(variable, path.into(), most);
        let files = |[authorities, certificate, key]: [(&'static str, &str); 3]| TlsFiles {
            authorities: Some(named(authorities.0, authorities.1, MAX_CERTIFICATES)),
            client: Some((named(certificate.0, certificate.1, MAX_CERTIFICATES), named(key.0, key.1, MAX_SECRET))),
            any_hostname: false,
        };
        let tls = |given: &[(&str, &str)]| {
            let settings = read(given).unwrap();
            assert!(settings.unused.is_empty(), "{:?}", settings.unused);
            (settings.traces.unwrap().tls, settings.otlp.unwrap().tls)
        };
        let shared = Some(files([all[1], all[2], all[3]]));
        assert_eq!(tls(&all), (shared.clone(), shared.clone()));
        assert_eq!(tls(&[&all[..], &own].concat()), (shared, Some(files(own))));
        let none = TlsFiles { authorities: None, client: None, any_hostname: false };
        assert_eq!(tls(&[all[0], all[4], all[5]]), (Some(none.clone()), Some(none)));
    }

    #[test]
    fn half_a_client_of_a_receiver_stops_the_start_and_a_file_for_plaintext_has_no_effect() {
        let given = |url| [ON, ("OTEL_EXPORTER_OTLP_ENDPOINT", url), ("OTEL_EXPORTER_OTLP_METRICS_CLIENT_KEY", "/key")];
        let expected = "the file with the certificate of the client's key, which is set";
        let variable = "OTEL_EXPORTER_OTLP_METRICS_CLIENT_CERTIFICATE";
        assert_eq!(wrong(&given("https://a:1")), [format!("{variable} is \"\": expected {expected}")]);
        let unused = read(&given("http://a:1")).unwrap().unused;
        assert_eq!(unused.len(), 1);
        assert_eq!(unused[0].variable, "OTEL_EXPORTER_OTLP_METRICS_CLIENT_KEY");
    }

    #[test]
    fn a_wrong_value_is_refused_with_what_is_expected() {
        for (variable, found, expected) in [
            ("OTEL_METRIC_EXPORT_INTERVAL", "60s", "milliseconds from 100 to 3600000"),
            ("OTEL_METRIC_EXPORT_TIMEOUT", "0", "milliseconds from 1 to 600000"),
            ("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "http/json", "http/protobuf or grpc"),
            ("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "collector:4317", "http://collector:4318"),
            ("OTEL_EXPORTER_OTLP_METRICS_TIMEOUT", "1.5", "whole number"),
        ] {
            let wrong = wrong(&[ON, (variable, found)]).concat();
            assert!([variable, found, expected].iter().all(|text| wrong.contains(text)), "{wrong}");
        }
        let exporter = wrong(&[("OTEL_METRICS_EXPORTER", "console")]).concat();
        assert!(exporter.contains("otlp, prometheus or none"), "{exporter}");
        let headers = wrong(&[ON, ("OTEL_EXPORTER_OTLP_METRICS_HEADERS", "hunter2")]).concat();
        assert!(headers.contains("NAME=VALUE") && !headers.contains("hunter2"), "{headers}");
    }
}
