//! Whether requests are recorded, which, and where the records go: the reference's variables, and those that everything
//! which speaks OpenTelemetry reads. Where both say something, the latter holds.

use std::time::Duration;

use http::{HeaderName, HeaderValue, Uri};

use super::values::Setting;
use super::{Given, InvalidSetting, Row, Rows, redis, rows};

/// The rows of everything about traces.
pub(super) const TABLES: [&[Row]; 2] = [OWN.table, STANDARD.table];

/// The path of traces below an endpoint of OTLP over HTTP.
const TRACES_PATH: &str = "/v1/traces";

/// Which requests are recorded, and where the records go.
#[derive(Clone, Debug, PartialEq)]
pub struct TraceSettings {
    /// How they go there.
    pub protocol: Protocol,
    /// Where: a URL, with the path that HTTP needs.
    pub endpoint: String,
    /// How long a delivery may take.
    pub timeout: Duration,
    /// The share of requests that is recorded, from 0 to 1.
    pub ratio: f64,
    /// Whether a caller that says whether its own part is recorded decides for this one, too.
    pub follows_caller: bool,
    /// What is said of this process, but for what is made up for each: `service.instance.id`, unless it stands here.
    pub resource: Vec<(String, String)>,
}

/// How spans travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// OTLP as protobuf over HTTP.
    Http,
    /// OTLP over gRPC.
    Grpc,
}

/// The reference's variables, as written.
struct Own {
    is_enabled: bool,
    protocol: Protocol,
    service_name: String,
    service_namespace: String,
    service_instance_id: String,
    sampling_rate: Share,
}

const OWN: Rows<Own> = rows!(Own {
    is_enabled: bool = "TRACING_ENABLED", "false", "Whether requests are recorded as spans of OpenTelemetry";
    protocol: Protocol = "TRACING_EXPORTER_PROTOCOL", "http", "How spans are delivered: as OTLP over http or grpc";
    service_name: String = "TRACING_SERVICE_NAME", "RateLimit", "The name of this service in traces";
    service_namespace: String = "TRACING_SERVICE_NAMESPACE", "", "What the service belongs to";
    service_instance_id: String = "TRACING_SERVICE_INSTANCE_ID", "", "The name of this instance; empty is a random UUID";
    sampling_rate: Share = "TRACING_SAMPLING_RATE", "1", "Share of requests that is recorded, where the caller does not say whether it records its own part";
});

/// The variables of OpenTelemetry, as written.
struct Standard {
    is_disabled: Switch,
    endpoint: Option<Endpoint>,
    traces_endpoint: Option<Endpoint>,
    protocol: Option<Protocol>,
    traces_protocol: Option<Protocol>,
    _headers: HeaderList,
    _traces_headers: HeaderList,
    timeout: Option<Millis>,
    traces_timeout: Option<Millis>,
    service_name: String,
    attributes: Attributes,
    sampler: Option<Sampler>,
    sampler_arg: Option<Share>,
}

const STANDARD: Rows<Standard> = rows!(Standard {
    is_disabled: Switch = "OTEL_SDK_DISABLED", "false", "Whether nothing is recorded whatever the others say";
    endpoint: Option<Endpoint> = "OTEL_EXPORTER_OTLP_ENDPOINT", "", "Where spans are delivered; empty is http://localhost:4318, or 4317 over grpc; http adds /v1/traces to it";
    traces_endpoint: Option<Endpoint> = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "", "The same for spans alone; nothing is added to it";
    protocol: Option<Protocol> = "OTEL_EXPORTER_OTLP_PROTOCOL", "", "How spans are delivered; empty is as TRACING_EXPORTER_PROTOCOL says";
    traces_protocol: Option<Protocol> = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "", "The same for spans alone";
    _headers: HeaderList = "OTEL_EXPORTER_OTLP_HEADERS", "", "Headers of each delivery";
    _traces_headers: HeaderList = "OTEL_EXPORTER_OTLP_TRACES_HEADERS", "", "The same for spans alone";
    timeout: Option<Millis> = "OTEL_EXPORTER_OTLP_TIMEOUT", "", "Milliseconds that a delivery may take; empty is 10000";
    traces_timeout: Option<Millis> = "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "", "The same for spans alone";
    service_name: String = "OTEL_SERVICE_NAME", "", "The name of this service in traces; empty is as TRACING_SERVICE_NAME says";
    attributes: Attributes = "OTEL_RESOURCE_ATTRIBUTES", "", "What else is said of this process in traces";
    sampler: Option<Sampler> = "OTEL_TRACES_SAMPLER", "", "Which requests are recorded; empty is as TRACING_SAMPLING_RATE says";
    sampler_arg: Option<Share> = "OTEL_TRACES_SAMPLER_ARG", "", "Share of requests for a sampler that takes one; empty is 1";
});

/// Reads the settings of traces; `None` inside where nothing is recorded.
pub(super) fn read(given: Given<'_>, wrong: &mut Vec<InvalidSetting>) -> Option<Option<TraceSettings>> {
    let own = (OWN.read)(given, wrong)?;
    if !own.is_enabled {
        // Others in the same environment may need what nothing here understands.
        return Some(None);
    }
    let standard = (STANDARD.read)(given, wrong)?;
    Some((!standard.is_disabled.0).then(|| own.settings(standard)))
}

impl Own {
    fn settings(self, standard: Standard) -> TraceSettings {
        let protocol = standard.traces_protocol.or(standard.protocol).unwrap_or(self.protocol);
        let endpoint = match (standard.traces_endpoint, standard.endpoint, protocol) {
            (Some(Endpoint(exact)), ..) | (None, Some(Endpoint(exact)), Protocol::Grpc) => exact,
            (None, Some(Endpoint(base)), Protocol::Http) => format!("{}{TRACES_PATH}", base.trim_end_matches('/')),
            (None, None, Protocol::Grpc) => "http://localhost:4317".to_owned(),
            (None, None, Protocol::Http) => format!("http://localhost:4318{TRACES_PATH}"),
        };
        let timeout = standard.traces_timeout.or(standard.timeout).map_or(Millis::DEFAULT, |given| given.0);
        let share = || standard.sampler_arg.map_or(1.0, |share| share.0);
        let (ratio, follows_caller) = match standard.sampler {
            None => (self.sampling_rate.0, true),
            Some(Sampler { follows_caller, ratio }) => (ratio.unwrap_or_else(share), follows_caller),
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

impl Setting for Protocol {
    const TAKES: &'static str = "http or grpc";
    fn parse(text: &str) -> Option<Self> {
        match text {
            "http" => Some(Self::Http),
            "grpc" => Some(Self::Grpc),
            _ => None,
        }
    }
}

/// As OpenTelemetry names them.
impl Setting for Option<Protocol> {
    const TAKES: &'static str = "http/protobuf or grpc";
    fn parse(text: &str) -> Option<Self> {
        match text {
            "" => Some(None),
            "http/protobuf" => Some(Some(Protocol::Http)),
            "grpc" => Some(Some(Protocol::Grpc)),
            _ => None,
        }
    }
}

/// As OpenTelemetry reads booleans: in any case.
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

/// A share of requests.
#[derive(Clone, Copy)]
struct Share(f64);

impl Setting for Share {
    const TAKES: &'static str = "a number from 0 to 1";
    fn parse(text: &str) -> Option<Self> {
        text.parse().ok().filter(|share| (0.0..=1.0).contains(share)).map(Self)
    }
}

impl Setting for Option<Share> {
    const TAKES: &'static str = Share::TAKES;
    fn parse(text: &str) -> Option<Self> {
        if text.is_empty() { Some(None) } else { Share::parse(text).map(Some) }
    }
}

/// Where spans are delivered.
struct Endpoint(String);

impl Setting for Option<Endpoint> {
    const TAKES: &'static str = "a URL such as http://collector:4318, or with https://";
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

/// A time in milliseconds.
#[derive(Clone, Copy)]
struct Millis(Duration);

impl Millis {
    /// 10 s, as OpenTelemetry has it.
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

/// Headers, which the exporter reads itself: they may hold a key, and are kept nowhere else.
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

/// Attributes of the process.
struct Attributes(Vec<(String, String)>);

impl Setting for Attributes {
    const TAKES: &'static str = "KEY=VALUE,KEY=VALUE, with %2C for a comma in a value";
    fn parse(text: &str) -> Option<Self> {
        pairs(text).map(Self)
    }
}

/// `KEY=VALUE,KEY=VALUE`, where a value may have characters by their numbers.
fn pairs(text: &str) -> Option<Vec<(String, String)>> {
    let pair = |text: &str| {
        let (key, value) = text.split_once('=')?;
        let key = key.trim();
        (!key.is_empty()).then_some((key.to_owned(), redis::decoded(value.trim())?))
    };
    text.split(',').map(str::trim).filter(|pair| !pair.is_empty()).map(pair).collect()
}

/// Which requests are recorded.
#[derive(Clone, Copy)]
struct Sampler {
    follows_caller: bool,
    /// Their share; `None` where it is given apart.
    ratio: Option<f64>,
}

impl Setting for Option<Sampler> {
    const TAKES: &'static str = "always_on, always_off or traceidratio, or one of them behind parentbased_";
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
        Some(Some(Sampler { follows_caller, ratio }))
    }
}

#[cfg(test)]
mod tests;
