//! Variables of the reference's libraries that have no effect here, and in which set-up a start names them: many are set for all
//! programs of a machine.

use super::{UnusedVariable, given_true};
use crate::settings::Lookup;

/// Set-up in which the reference reads a variable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadWith {
    /// Any.
    Anything,
    /// Traces, or metrics over OTLP.
    Otlp,
    /// DogStatsD.
    DogStatsd,
    /// A control plane, or one of those of [`ReadWith::Otlp`].
    Proxies,
}

macro_rules! libraries {
    ($($with:ident, $why:literal: $($variable:literal)+;)+) => {
        /// All variables of the reference's libraries that have no effect.
        pub const OF_LIBRARIES: &[(ReadWith, UnusedVariable)] =
            &[$($((ReadWith::$with, UnusedVariable { variable: $variable, why: $why }),)+)+];
    };
}

libraries! {
    Anything, "STATS_FLUSH_INTERVAL applies, in the reference too": "GOSTATS_FLUSH_INTERVAL_SECONDS";
    Anything, "statistics are never written on the log": "GOSTATS_LOGGING_SINK_DISABLED";
    DogStatsd, "STATSD_HOST and STATSD_PORT are the receiver, in the reference too":
        "DD_AGENT_HOST" "DD_DOGSTATSD_PORT" "DD_DOGSTATSD_URL";
    DogStatsd, "no container ID is sent; set DD_ENTITY_ID to the pod's UID": "DD_ORIGIN_DETECTION_ENABLED";
    Otlp, "the URL of the receiver decides: https is TLS, http is plaintext":
        "OTEL_EXPORTER_OTLP_INSECURE" "OTEL_EXPORTER_OTLP_TRACES_INSECURE" "OTEL_EXPORTER_OTLP_METRICS_INSECURE";
    Otlp, "spans and metrics are sent without compression":
        "OTEL_EXPORTER_OTLP_COMPRESSION" "OTEL_EXPORTER_OTLP_TRACES_COMPRESSION" "OTEL_EXPORTER_OTLP_METRICS_COMPRESSION";
    Otlp, "at most 2,048 spans wait, and 512 of them are sent at once, within a second":
        "OTEL_BSP_SCHEDULE_DELAY" "OTEL_BSP_MAX_QUEUE_SIZE" "OTEL_BSP_MAX_EXPORT_BATCH_SIZE";
    Otlp, "OTEL_EXPORTER_OTLP_TIMEOUT applies": "OTEL_BSP_EXPORT_TIMEOUT";
    Otlp, "a span has a fixed number of short attributes, and no events and links":
        "OTEL_ATTRIBUTE_COUNT_LIMIT" "OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT" "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT"
        "OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT" "OTEL_SPAN_EVENT_COUNT_LIMIT" "OTEL_SPAN_LINK_COUNT_LIMIT"
        "OTEL_EVENT_ATTRIBUTE_COUNT_LIMIT" "OTEL_LINK_ATTRIBUTE_COUNT_LIMIT";
    Otlp, "it is an experiment of OpenTelemetry for Go": "OTEL_GO_X_RESOURCE";
    Proxies, "connections to a control plane and to receivers of OTLP are direct; let them through, or put a collector on this side":
        "HTTP_PROXY" "http_proxy" "HTTPS_PROXY" "https_proxy" "NO_PROXY" "no_proxy" "REQUEST_METHOD";
    Anything, "LOG_LEVEL and LOG_FORMAT hold for the whole log":
        "GRPC_GO_LOG_SEVERITY_LEVEL" "GRPC_GO_LOG_VERBOSITY_LEVEL" "GRPC_GO_LOG_FORMATTER";
    Anything, "TLS is always negotiated with ALPN, as HTTP/2 demands": "GRPC_ENFORCE_ALPN_ENABLED";
    Anything, "calls are not logged; see tidegate tap": "GRPC_BINARY_LOG_FILTER";
    Anything, "it is for parts of grpc-go that the reference does not use":
        "GRPC_GO_IGNORE_TXT_ERRORS" "GRPC_RING_HASH_CAP" "GRPC_ALTS_MAX_CONCURRENT_HANDSHAKES"
        "GRPC_XDS_BOOTSTRAP" "GRPC_XDS_BOOTSTRAP_CONFIG" "GRPC_XDS_ENDPOINT_HASH_KEY_BACKWARD_COMPAT"
        "GRPC_EXPERIMENTAL_XDS_FALLBACK" "GRPC_EXPERIMENTAL_XDS_DUALSTACK_ENDPOINTS"
        "GRPC_EXPERIMENTAL_XDS_SYSTEM_ROOT_CERTS" "GRPC_EXPERIMENTAL_XDS_MTLS_SPIFFE"
        "GRPC_EXPERIMENTAL_RING_HASH_SET_REQUEST_HASH_KEY" "GRPC_EXPERIMENTAL_ALTS_HANDSHAKER_KEEPALIVE_PARAMS"
        "GRPC_EXPERIMENTAL_ENABLE_NEW_PICK_FIRST" "GRPC_GCP_OBSERVABILITY_CONFIG" "GRPC_GCP_OBSERVABILITY_CONFIG_FILE"
        "GRPC_TEST_ONLY_GOOGLE_C2P_RESOLVER_TRAFFIC_DIRECTOR_URI";
    Anything, "it is for Go; set WORKERS": "GOMAXPROCS";
    Anything, "it is for Go, and there is no garbage collector here; memory is bounded by the limit of the container":
        "GOGC" "GOMEMLIMIT";
    Anything, "it is for Go and its libraries":
        "GODEBUG" "GOTRACEBACK" "GOPROTODEBUG" "GOLANG_PROTOBUF_REGISTRATION_CONFLICT" "DEBUG_HTTP2_GOROUTINES";
    Anything, "times in the log are in UTC": "TZ" "ZONEINFO";
    Anything, "log lines have colours where standard error is a terminal": "CLICOLOR" "CLICOLOR_FORCE";
}

/// Returns the variables that are set, that the reference would read in this set-up, and that have no effect.
pub(super) fn set(given: Lookup<'_>) -> impl Iterator<Item = UnusedVariable> {
    let has = |variable: &str, value: &str| given(variable).is_some_and(|text| text.trim().eq_ignore_ascii_case(value));
    let has_otlp = given_true(given, "TRACING_ENABLED") || has("OTEL_METRICS_EXPORTER", "otlp");
    let has_plane = has("CONFIG_TYPE", "GRPC_XDS_SOTW");
    let has_dog = given_true(given, "USE_DOG_STATSD");
    let is_read = move |with: ReadWith| match with {
        ReadWith::Anything => true,
        ReadWith::Otlp => has_otlp,
        ReadWith::DogStatsd => has_dog,
        ReadWith::Proxies => has_otlp || has_plane,
    };
    OF_LIBRARIES.iter().filter(move |(with, _)| is_read(*with)).map(|(_, unused)| *unused)
}
