//! Settings of traces: the reference's variables and the standard variables of OpenTelemetry. If both set the same thing, the
//! standard variable applies.

use std::time::Duration;

use super::otel::{Endpoint, ExportProtocol, HeaderList, Millis, Shared, endpoint};
use super::values::Setting;
use super::{SettingRows, rows};
use crate::dial::tls::TlsFiles;

/// Path of traces, appended to an endpoint of OTLP over HTTP.
const TRACES_PATH: &str = "/v1/traces";

/// Settings of traces: sampling and export.
#[derive(Clone, Debug, PartialEq)]
pub struct TraceSettings {
    /// Protocol of the export.
    pub protocol: ExportProtocol,
    /// URL of the receiver, with the path that HTTP needs.
    pub endpoint: String,
    /// Files of TLS; `None` in plaintext.
    pub tls: Option<TlsFiles>,
    /// Timeout of one delivery.
    pub timeout: Duration,
    /// Share of requests to record, from 0 to 1.
    pub ratio: f64,
    /// True if the caller's sampling flag also decides for this service.
    pub follows_caller: bool,
    /// Resource attributes of the process. The exporter adds a random `service.instance.id` if there is none here.
    pub resource: Vec<(String, String)>,
}

/// Values of the reference's variables.
pub(super) struct Own {
    pub(super) is_enabled: bool,
    pub(super) protocol: ExportProtocol,
    service_name: String,
    service_namespace: String,
    service_instance_id: String,
    sampling_rate: SampleShare,
}

pub(super) const OWN: SettingRows<Own> = rows!(Own {
    is_enabled: bool = "TRACING_ENABLED", "false", "Records requests as OpenTelemetry spans";
    protocol: ExportProtocol = "TRACING_EXPORTER_PROTOCOL", "http", "Protocol of the export of spans and metrics: OTLP over http or grpc";
    service_name: String = "TRACING_SERVICE_NAME", "RateLimit", "Name of this service in traces and metrics";
    service_namespace: String = "TRACING_SERVICE_NAMESPACE", "", "Namespace of this service in traces and metrics";
    service_instance_id: String = "TRACING_SERVICE_INSTANCE_ID", "", "ID of this instance in traces and metrics; empty: a random UUID";
    sampling_rate: SampleShare = "TRACING_SAMPLING_RATE", "1", "Share of requests to record, for requests whose caller sends no sampling decision";
});

/// Values of OpenTelemetry's variables for traces alone.
pub(super) struct Standard {
    endpoint: Option<Endpoint>,
    protocol: Option<ExportProtocol>,
    /// Checked here only: the exporter reads them itself.
    _headers: HeaderList,
    timeout: Option<Millis>,
    sampler: Option<SamplerKind>,
    sampler_arg: Option<SampleShare>,
}

pub(super) const STANDARD: SettingRows<Standard> = rows!(Standard {
    endpoint: Option<Endpoint> = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "", "Replaces OTEL_EXPORTER_OTLP_ENDPOINT for spans; used as it is, without a path appended";
    protocol: Option<ExportProtocol> = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "", "Replaces OTEL_EXPORTER_OTLP_PROTOCOL for spans";
    _headers: HeaderList = "OTEL_EXPORTER_OTLP_TRACES_HEADERS", "", "Replaces OTEL_EXPORTER_OTLP_HEADERS for spans";
    timeout: Option<Millis> = "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "", "Replaces OTEL_EXPORTER_OTLP_TIMEOUT for spans";
    sampler: Option<SamplerKind> = "OTEL_TRACES_SAMPLER", "", "Sampler that selects the requests to record; empty: TRACING_SAMPLING_RATE applies";
    sampler_arg: Option<SampleShare> = "OTEL_TRACES_SAMPLER_ARG", "", "Share of requests to record for a traceidratio sampler; empty: 1";
});

impl Own {
    /// Returns the settings of traces.
    pub(super) fn traces(&self, shared: &Shared, standard: Standard) -> TraceSettings {
        let protocol = standard.protocol.or(shared.protocol).unwrap_or(self.protocol);
        let share = || standard.sampler_arg.map_or(1.0, |share| share.0);
        let (ratio, follows_caller) = match standard.sampler {
            None => (self.sampling_rate.0, true),
            Some(SamplerKind { follows_caller, ratio }) => (ratio.unwrap_or_else(share), follows_caller),
        };
        TraceSettings {
            protocol,
            endpoint: endpoint(standard.endpoint, shared.endpoint.as_ref(), protocol, TRACES_PATH),
            tls: None,
            timeout: standard.timeout.or(shared.timeout).map_or(Millis::DEFAULT, |given| given.0),
            ratio,
            follows_caller,
            resource: self.resource(shared),
        }
    }

    /// Returns the resource attributes of the process.
    pub(super) fn resource(&self, shared: &Shared) -> Vec<(String, String)> {
        let mut resource = shared.attributes.0.clone();
        let mut default = |key: &str, value: &str| {
            if !value.is_empty() && !resource.iter().any(|(given, _)| given == key) {
                resource.push((key.to_owned(), value.to_owned()));
            }
        };
        default("service.namespace", &self.service_namespace);
        default("service.instance.id", &self.service_instance_id);
        if shared.service_name.is_empty() {
            default("service.name", &self.service_name);
        } else {
            resource.retain(|(key, _)| key != "service.name");
            resource.push(("service.name".to_owned(), shared.service_name.clone()));
        }
        resource
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
