//! Settings of traces: the reference's variables and the standard variables of OpenTelemetry. If both set the same thing, the
//! standard variable applies.

use std::time::Duration;

use http::{HeaderName, HeaderValue, Uri};

use super::values::Setting;
use super::{InvalidSetting, Lookup, SettingRow, SettingRows, redis, rows};

/// Rows of the settings of traces.
pub(super) const TABLES: [&[SettingRow]; 2] = [OWN.table, STANDARD.table];

/// Path of traces, appended to an endpoint of OTLP over HTTP.
const TRACES_PATH: &str = "/v1/traces";

/// Settings of traces: sampling and export.
#[derive(Clone, Debug, PartialEq)]
pub struct TraceSettings {
    /// Protocol of the export.
    pub protocol: ExportProtocol,
    /// URL of the receiver, with the path that HTTP needs.
    pub endpoint: String,
    /// Timeout of one delivery.
    pub timeout: Duration,
    /// Share of requests to record, from 0 to 1.
    pub ratio: f64,
    /// True if the caller's sampling flag also decides for this service.
    pub follows_caller: bool,
    /// Resource attributes of the process. The exporter adds a random `service.instance.id` if there is none here.
    pub resource: Vec<(String, String)>,
}

/// Protocol for the export of spans.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExportProtocol {
    /// OTLP as protobuf over HTTP.
    Http,
    /// OTLP over gRPC.
    Grpc,
}

/// Values of the reference's variables.
struct Own {
    is_enabled: bool,
    protocol: ExportProtocol,
    service_name: String,
    service_namespace: String,
    service_instance_id: String,
    sampling_rate: SampleShare,
}

const OWN: SettingRows<Own> = rows!(Own {
    is_enabled: bool = "TRACING_ENABLED", "false", "Records requests as OpenTelemetry spans";
    protocol: ExportProtocol = "TRACING_EXPORTER_PROTOCOL", "http", "Protocol of the span export: OTLP over http or grpc";
    service_name: String = "TRACING_SERVICE_NAME", "RateLimit", "Name of this service in traces";
    service_namespace: String = "TRACING_SERVICE_NAMESPACE", "", "Namespace of this service in traces";
    service_instance_id: String = "TRACING_SERVICE_INSTANCE_ID", "", "ID of this instance in traces; empty: a random UUID";
    sampling_rate: SampleShare = "TRACING_SAMPLING_RATE", "1", "Share of requests to record, for requests whose caller sends no sampling decision";
});

/// Values of OpenTelemetry's variables.
struct Standard {
    is_disabled: Switch,
    endpoint: Option<Endpoint>,
    traces_endpoint: Option<Endpoint>,
    protocol: Option<ExportProtocol>,
    traces_protocol: Option<ExportProtocol>,
    _headers: HeaderList,
    _traces_headers: HeaderList,
    timeout: Option<Millis>,
    traces_timeout: Option<Millis>,
    service_name: String,
    attributes: Attributes,
    sampler: Option<SamplerKind>,
    sampler_arg: Option<SampleShare>,
}

const STANDARD: SettingRows<Standard> = rows!(Standard {
    is_disabled: Switch = "OTEL_SDK_DISABLED", "false", "Turns tracing off, whatever the other settings are";
    endpoint: Option<Endpoint> = "OTEL_EXPORTER_OTLP_ENDPOINT", "", "URL of the receiver of spans; http appends /v1/traces; empty: http://localhost:4318, or http://localhost:4317 for grpc";
    traces_endpoint: Option<Endpoint> = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "", "Replaces OTEL_EXPORTER_OTLP_ENDPOINT for spans; used as it is, without a path appended";
    protocol: Option<ExportProtocol> = "OTEL_EXPORTER_OTLP_PROTOCOL", "", "Protocol of the span export; empty: TRACING_EXPORTER_PROTOCOL applies";
    traces_protocol: Option<ExportProtocol> = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "", "Replaces OTEL_EXPORTER_OTLP_PROTOCOL for spans";
    _headers: HeaderList = "OTEL_EXPORTER_OTLP_HEADERS", "", "Headers of each export request";
    _traces_headers: HeaderList = "OTEL_EXPORTER_OTLP_TRACES_HEADERS", "", "Replaces OTEL_EXPORTER_OTLP_HEADERS for spans";
    timeout: Option<Millis> = "OTEL_EXPORTER_OTLP_TIMEOUT", "", "Timeout of an export request, in milliseconds; empty: 10000";
    traces_timeout: Option<Millis> = "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "", "Replaces OTEL_EXPORTER_OTLP_TIMEOUT for spans";
    service_name: String = "OTEL_SERVICE_NAME", "", "Name of this service in traces; empty: TRACING_SERVICE_NAME applies";
    attributes: Attributes = "OTEL_RESOURCE_ATTRIBUTES", "", "Further attributes of this process in traces";
    sampler: Option<SamplerKind> = "OTEL_TRACES_SAMPLER", "", "Sampler that selects the requests to record; empty: TRACING_SAMPLING_RATE applies";
    sampler_arg: Option<SampleShare> = "OTEL_TRACES_SAMPLER_ARG", "", "Share of requests to record for a traceidratio sampler; empty: 1";
});

/// Reads the settings of traces. The inner `None` means that tracing is off.
pub(super) fn read(given: Lookup<'_>, wrong: &mut Vec<InvalidSetting>) -> Option<Option<TraceSettings>> {
    let own = (OWN.read)(given, wrong)?;
    if !own.is_enabled {
        // The OpenTelemetry variables may be meant for other programs, with values that this one does not know.
        return Some(None);
    }
    let standard = (STANDARD.read)(given, wrong)?;
    Some((!standard.is_disabled.0).then(|| own.settings(standard)))
}

impl Own {
    fn settings(self, standard: Standard) -> TraceSettings {
        let protocol = standard.traces_protocol.or(standard.protocol).unwrap_or(self.protocol);
        let endpoint = match (standard.traces_endpoint, standard.endpoint, protocol) {
            (Some(Endpoint(exact)), ..) | (None, Some(Endpoint(exact)), ExportProtocol::Grpc) => exact,
            (None, Some(Endpoint(base)), ExportProtocol::Http) => {
                format!("{}{TRACES_PATH}", base.trim_end_matches('/'))
            }
            (None, None, ExportProtocol::Grpc) => "http://localhost:4317".to_owned(),
            (None, None, ExportProtocol::Http) => format!("http://localhost:4318{TRACES_PATH}"),
        };
        let timeout = standard.traces_timeout.or(standard.timeout).map_or(Millis::DEFAULT, |given| given.0);
        let share = || standard.sampler_arg.map_or(1.0, |share| share.0);
        let (ratio, follows_caller) = match standard.sampler {
            None => (self.sampling_rate.0, true),
            Some(SamplerKind { follows_caller, ratio }) => (ratio.unwrap_or_else(share), follows_caller),
        };
        let mut resource = standard.attributes.0;
        let mut default = |key: &str, value: String| {
            if !value.is_empty() && !resource.iter().any(|(given, _)| given == key) {
                resource.push((key.to_owned(), value));
            }
        };
        default("service.namespace", self.service_namespace);
        default("service.instance.id", self.service_instance_id);
        if standard.service_name.is_empty() {
            default("service.name", self.service_name);
        } else {
            resource.retain(|(key, _)| key != "service.name");
            resource.push(("service.name".to_owned(), standard.service_name));
        }
        TraceSettings { protocol, endpoint, timeout, ratio, follows_caller, resource }
    }
}

impl Setting for ExportProtocol {
    const TAKES: &'static str = "http or grpc";
    fn parse(text: &str) -> Option<Self> {
        match text {
            "http" => Some(Self::Http),
            "grpc" => Some(Self::Grpc),
            _ => None,
        }
    }
}

/// Protocol names as in OpenTelemetry.
impl Setting for Option<ExportProtocol> {
    const TAKES: &'static str = "http/protobuf or grpc";
    fn parse(text: &str) -> Option<Self> {
        match text {
            "" => Some(None),
            "http/protobuf" => Some(Some(ExportProtocol::Http)),
            "grpc" => Some(Some(ExportProtocol::Grpc)),
            _ => None,
        }
    }
}

/// Boolean in OpenTelemetry's format: upper and lower case are accepted.
#[derive(Clone, Copy)]
struct Switch(bool);

impl Setting for Switch {
    const TAKES: &'static str = "true or false";
    fn parse(text: &str) -> Option<Self> {
        match text.to_ascii_lowercase().as_str() {
            "true" => Some(Self(true)),
            "false" | "" => Some(Self(false)),
            _ => None,
        }
    }
}

/// Share of requests, from 0 to 1.
#[derive(Clone, Copy)]
struct SampleShare(f64);

impl Setting for SampleShare {
    const TAKES: &'static str = "a number from 0 to 1";
    fn parse(text: &str) -> Option<Self> {
        text.parse().ok().filter(|share| (0.0..=1.0).contains(share)).map(Self)
    }
}

impl Setting for Option<SampleShare> {
    const TAKES: &'static str = SampleShare::TAKES;
    fn parse(text: &str) -> Option<Self> {
        if text.is_empty() { Some(None) } else { SampleShare::parse(text).map(Some) }
    }
}

/// URL of the receiver of spans.
struct Endpoint(String);

impl Setting for Option<Endpoint> {
    const TAKES: &'static str = "a URL such as http://collector:4318 or https://collector:4318";
    fn parse(text: &str) -> Option<Self> {
        if text.is_empty() {
            return Some(None);
        }
        let url: Uri = text.parse().ok()?;
        let is_known = matches!(url.scheme_str(), Some("http" | "https"));
        let is_plain = url.authority().is_some_and(|at| !at.as_str().contains('@') && !at.host().is_empty());
        (is_known && is_plain && url.query().is_none()).then(|| Some(Endpoint(text.to_owned())))
    }
    fn shown(text: &str) -> String {
        redis::shown(text)
    }
}

/// Time in milliseconds.
#[derive(Clone, Copy)]
struct Millis(Duration);

impl Millis {
    /// Default timeout of a delivery: 10 s, as in OpenTelemetry.
    const DEFAULT: Duration = Duration::from_secs(10);
}

impl Setting for Option<Millis> {
    const TAKES: &'static str = "a whole number of milliseconds from 1 to 600000";
    fn parse(text: &str) -> Option<Self> {
        if text.is_empty() {
            return Some(None);
        }
        let length = text.parse().ok().filter(|length| (1..=600_000).contains(length));
        length.map(|length| Some(Millis(Duration::from_millis(length))))
    }
}

/// Headers, which are only checked here. They may hold a key, so they are not kept; the exporter reads them itself.
struct HeaderList;

impl Setting for HeaderList {
    const TAKES: &'static str = "NAME=VALUE,NAME=VALUE, with %2C for a comma in a value";
    const IS_SECRET: bool = true;
    fn parse(text: &str) -> Option<Self> {
        let is_header = |(name, value): &(String, String)| {
            HeaderName::try_from(name.as_str()).is_ok() && HeaderValue::try_from(value.as_str()).is_ok()
        };
        pairs(text).filter(|headers| headers.iter().all(is_header)).map(|_| Self)
    }
}

/// Resource attributes.
struct Attributes(Vec<(String, String)>);

impl Setting for Attributes {
    const TAKES: &'static str = "KEY=VALUE,KEY=VALUE, with %2C for a comma in a value";
    fn parse(text: &str) -> Option<Self> {
        pairs(text).map(Self)
    }
}

/// Parses `KEY=VALUE,KEY=VALUE`, with percent-encoded values.
fn pairs(text: &str) -> Option<Vec<(String, String)>> {
    let pair = |text: &str| {
        let (key, value) = text.split_once('=')?;
        let key = key.trim();
        (!key.is_empty()).then_some((key.to_owned(), redis::decoded(value.trim())?))
    };
    text.split(',').map(str::trim).filter(|pair| !pair.is_empty()).map(pair).collect()
}

/// Value of `OTEL_TRACES_SAMPLER`.
#[derive(Clone, Copy)]
struct SamplerKind {
    follows_caller: bool,
    /// Share of requests to record; `None` if `OTEL_TRACES_SAMPLER_ARG` gives it.
    ratio: Option<f64>,
}

impl Setting for Option<SamplerKind> {
    const TAKES: &'static str = "always_on, always_off or traceidratio, each also with the prefix parentbased_";
    fn parse(text: &str) -> Option<Self> {
        if text.is_empty() {
            return Some(None);
        }
        let (follows_caller, name) = text.strip_prefix("parentbased_").map_or((false, text), |name| (true, name));
        let ratio = match name {
            "always_on" => Some(1.0),
            "always_off" => Some(0.0),
            "traceidratio" => None,
            _ => return None,
        };
        Some(Some(SamplerKind { follows_caller, ratio }))
    }
}

#[cfg(test)]
mod tests;
