//! Settings that all exports over OTLP share: the standard variables of OpenTelemetry, and the types of their values.

use std::time::Duration;

use http::{HeaderName, HeaderValue, Uri};

use super::tls::TlsVariables;
use super::values::Setting;
use super::{InvalidSetting, Lookup, SettingRows, UnusedVariable, redis, rows};
use crate::dial::tls::TlsFiles;

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

/// Paths of the files of TLS, for one kind of export or for all. An empty path names none.
pub(super) struct TlsPaths {
    certificate: String,
    client_certificate: String,
    client_key: String,
}

/// Variables of these paths.
pub(super) struct TlsGroup {
    /// Rows of the group.
    pub(super) rows: SettingRows<TlsPaths>,
    /// Names, in the order of [`TlsPaths`].
    names: [&'static str; 3],
}

/// Builds a [`TlsGroup`]: prefix of the names, and the effect of each.
macro_rules! tls_group {
    ($prefix:literal, $authorities:expr, $certificate:expr, $key:expr) => {
        TlsGroup {
            rows: rows!(TlsPaths {
                certificate: String = concat!($prefix, "CERTIFICATE"), "", $authorities;
                client_certificate: String = concat!($prefix, "CLIENT_CERTIFICATE"), "", $certificate;
                client_key: String = concat!($prefix, "CLIENT_KEY"), "", $key;
            }),
            names: [
                concat!($prefix, "CERTIFICATE"),
                concat!($prefix, "CLIENT_CERTIFICATE"),
                concat!($prefix, "CLIENT_KEY"),
            ],
        }
    };
    ($prefix:literal, $kind:literal) => {
        tls_group!(
            $prefix,
            concat!("Replaces OTEL_EXPORTER_OTLP_CERTIFICATE for ", $kind),
            concat!("Replaces OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE for ", $kind, ", and needs ", $prefix, "CLIENT_KEY"),
            concat!("Replaces OTEL_EXPORTER_OTLP_CLIENT_KEY for ", $kind, ", and needs ", $prefix, "CLIENT_CERTIFICATE")
        )
    };
}

pub(super) const SHARED_TLS: TlsGroup = tls_group!(
    "OTEL_EXPORTER_OTLP_",
    "PEM file with the CA certificates to trust for a receiver of spans and metrics whose URL is https; read at the start; empty: the CAs of the system",
    "PEM file with the client certificate for such a receiver; read at the start",
    "PEM file with the private key of OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE"
);
pub(super) const TRACES_TLS: TlsGroup = tls_group!("OTEL_EXPORTER_OTLP_TRACES_", "spans");
pub(super) const METRICS_TLS: TlsGroup = tls_group!("OTEL_EXPORTER_OTLP_METRICS_", "metrics");

/// Returns the files of TLS for one kind of export to `endpoint`; `None` in plaintext. The variables of that kind, `own`, go before
/// the shared ones: the authorities alone, and certificate and key together. Adds half a client to `wrong`, and variables without
/// effect to `unused`.
pub(super) fn tls_files(
    own: &TlsGroup,
    endpoint: &str,
    given: Lookup<'_>,
    wrong: &mut Vec<InvalidSetting>,
    unused: &mut Vec<UnusedVariable>,
) -> Option<TlsFiles> {
    let (own_paths, shared_paths) = ((own.rows.read)(given, wrong)?, (SHARED_TLS.rows.read)(given, wrong)?);
    let has_client = !own_paths.client_certificate.is_empty() || !own_paths.client_key.is_empty();
    let authorities = match own_paths.certificate.is_empty() {
        true => (SHARED_TLS.names[0], shared_paths.certificate.as_str()),
        false => (own.names[0], own_paths.certificate.as_str()),
    };
    let ([_, certificate, key], paths) =
        if has_client { (own.names, &own_paths) } else { (SHARED_TLS.names, &shared_paths) };
    let (certificate, key) = ((certificate, paths.client_certificate.as_str()), (key, paths.client_key.as_str()));
    let variables = TlsVariables { authorities, certificate, key };
    if endpoint.starts_with("https:") {
        wrong.extend(variables.half_a_client());
        return Some(variables.files(false));
    }
    let why = "the URL of the receiver is not https, so it is reached in plaintext";
    let named = [authorities, certificate, key].into_iter().filter(|(_, path)| !path.is_empty());
    unused.extend(named.map(|(variable, _)| UnusedVariable { variable, why }));
    None
}

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
    const EMPTY_IS_DEFAULT: bool = true;
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
