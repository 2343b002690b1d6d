//! Settings that all exports over OTLP share: the standard variables of OpenTelemetry, and the types of their values.

use std::time::Duration;

use http::{HeaderName, HeaderValue, Uri};

use super::values::Setting;
use super::{SettingRows, redis, rows};

/// Protocol of an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExportProtocol {
    /// OTLP as protobuf over HTTP.
    Http,
    /// OTLP over gRPC.
    Grpc,
}

/// Values of the variables that hold for every kind of export.
pub(super) struct Shared {
    pub(super) is_disabled: Switch,
    pub(super) endpoint: Option<Endpoint>,
    pub(super) protocol: Option<ExportProtocol>,
    pub(super) headers: HeaderList,
    pub(super) timeout: Option<Millis>,
    pub(super) service_name: String,
    pub(super) attributes: Attributes,
}

pub(super) const SHARED: SettingRows<Shared> = rows!(Shared {
    is_disabled: Switch = "OTEL_SDK_DISABLED", "false", "Turns traces and the export of metrics off, whatever the other settings are";
    endpoint: Option<Endpoint> = "OTEL_EXPORTER_OTLP_ENDPOINT", "", "URL of the receiver of spans and metrics; http appends /v1/traces or /v1/metrics; empty: http://localhost:4318, or http://localhost:4317 for grpc";
    protocol: Option<ExportProtocol> = "OTEL_EXPORTER_OTLP_PROTOCOL", "", "Protocol of the export of spans and metrics; empty: TRACING_EXPORTER_PROTOCOL applies";
    headers: HeaderList = "OTEL_EXPORTER_OTLP_HEADERS", "", "Headers of each export request";
    timeout: Option<Millis> = "OTEL_EXPORTER_OTLP_TIMEOUT", "", "Timeout of an export request, in milliseconds; empty: 10000";
    service_name: String = "OTEL_SERVICE_NAME", "", "Name of this service in traces and metrics; empty: TRACING_SERVICE_NAME applies";
    attributes: Attributes = "OTEL_RESOURCE_ATTRIBUTES", "", "Further attributes of this process in traces and metrics";
});

/// Returns the URL for one kind of export: `own` as it is, else `shared`, to which HTTP appends `path`.
pub(super) fn endpoint(
    own: Option<Endpoint>,
    shared: Option<&Endpoint>,
    protocol: ExportProtocol,
    path: &str,
) -> String {
    match (own, shared, protocol) {
        (Some(Endpoint(exact)), ..) => exact,
        (None, Some(Endpoint(exact)), ExportProtocol::Grpc) => exact.clone(),
        (None, Some(Endpoint(base)), ExportProtocol::Http) => format!("{}{path}", base.trim_end_matches('/')),
        (None, None, ExportProtocol::Grpc) => "http://localhost:4317".to_owned(),
        (None, None, ExportProtocol::Http) => format!("http://localhost:4318{path}"),
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
pub(super) struct Switch(pub(super) bool);

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

/// URL of a receiver.
pub(super) struct Endpoint(String);

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
pub(super) struct Millis(pub(super) Duration);

impl Millis {
    /// Default timeout of a request: 10 s, as in OpenTelemetry.
    pub(super) const DEFAULT: Duration = Duration::from_secs(10);
}

impl Setting for Millis {
    const TAKES: &'static str = "a whole number of milliseconds from 1 to 600000";
    fn parse(text: &str) -> Option<Self> {
        let length = text.parse().ok().filter(|length| (1..=600_000).contains(length));
        length.map(|length| Self(Duration::from_millis(length)))
    }
}

impl Setting for Option<Millis> {
    const TAKES: &'static str = Millis::TAKES;
    fn parse(text: &str) -> Option<Self> {
        if text.is_empty() { Some(None) } else { Millis::parse(text).map(Some) }
    }
}

/// Headers. They may hold a key, so they are marked as sensitive, which hides their values from `Debug`.
pub(super) struct HeaderList(pub(super) Vec<(HeaderName, HeaderValue)>);

impl Setting for HeaderList {
    const TAKES: &'static str = "NAME=VALUE,NAME=VALUE, with %2C for a comma in a value";
    const IS_SECRET: bool = true;
    fn parse(text: &str) -> Option<Self> {
        let header = |(name, value): (String, String)| {
            let mut value = HeaderValue::try_from(value).ok()?;
            value.set_sensitive(true);
            Some((HeaderName::try_from(name).ok()?, value))
        };
        pairs(text)?.into_iter().map(header).collect::<Option<_>>().map(Self)
    }
}

/// Resource attributes.
pub(super) struct Attributes(pub(super) Vec<(String, String)>);

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
