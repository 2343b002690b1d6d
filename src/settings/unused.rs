//! Variables of the reference that have no effect here, with the reasons.

use super::Lookup;
use super::values::Setting;

mod libraries;
mod switches;

pub use libraries::{OF_LIBRARIES, ReadWith};

/// A variable that is accepted and has no effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnusedVariable {
    /// Name of the variable.
    pub variable: &'static str,
    /// Reason, in words without a full stop.
    pub why: &'static str,
}

macro_rules! unused {
    ($($why:literal: $($variable:literal)+;)+) => {
        /// All variables of the reference itself that have no effect.
        pub const UNUSED: &[UnusedVariable] = &[$($(UnusedVariable { variable: $variable, why: $why },)+)+];
    };
}

unused! {
    "connections are shared by all calls, and no call waits for one":
        "REDIS_POOL_SIZE" "REDIS_POOL_ON_EMPTY_BEHAVIOR" "REDIS_POOL_ON_EMPTY_WAIT_DURATION"
        "REDIS_PERSECOND_POOL_SIZE" "REDIS_PERSECOND_POOL_ON_EMPTY_BEHAVIOR" "REDIS_PERSECOND_POOL_ON_EMPTY_WAIT_DURATION";
    "a request is one round trip to each node, to all nodes at once":
        "REDIS_PIPELINE_WINDOW" "REDIS_PIPELINE_LIMIT" "REDIS_CLUSTER_PIPELINE_PARALLELISM"
        "REDIS_PERSECOND_PIPELINE_WINDOW" "REDIS_PERSECOND_PIPELINE_LIMIT" "REDIS_PERSECOND_CLUSTER_PIPELINE_PARALLELISM"
        "REDIS_USE_EXPLICIT_PIPELINE" "REDIS_PERSECOND_USE_EXPLICIT_PIPELINE";
    "a start does not wait for Redis":
        "REDIS_STARTUP_INITIAL_INTERVAL" "REDIS_STARTUP_MAX_INTERVAL" "REDIS_STARTUP_MAX_ELAPSED_TIME";
    "a counter expires when forgetting it changes no answer": "EXPIRATION_JITTER_MAX_SECONDS";
    "refusals are remembered without a cache of a size to choose": "LOCAL_CACHE_SIZE_IN_BYTES";
    "there is no Memcached":
        "MEMCACHE_HOST_PORT" "MEMCACHE_SRV" "MEMCACHE_SRV_REFRESH" "MEMCACHE_MAX_IDLE_CONNS" "MEMCACHE_TLS"
        "MEMCACHE_TLS_CLIENT_CERT" "MEMCACHE_TLS_CLIENT_KEY" "MEMCACHE_TLS_CACERT" "MEMCACHE_TLS_SKIP_HOSTNAME_VERIFICATION";
    "metrics have the names that the reference's own mapper gives them; for the names of this file, send statsd to a statsd_exporter that has it":
        "PROMETHEUS_MAPPER_YAML";
    "response times are in seconds, as their name says": "PROMETHEUS_RESPONSE_TIME_AS_MILLISECONDS";
    "the wait before a new connection is XDS_CLIENT_BACKOFF_INITIAL_INTERVAL, in the reference too":
        "CONFIG_GRPC_XDS_SERVER_CONNECT_RETRY_INTERVAL";
    "the listeners serve TCP, and the reference does not use it either": "PROTO";
}

/// Returns the variables that are set and have no effect.
pub(super) fn set(given: Lookup<'_>) -> Vec<UnusedVariable> {
    let is_set = |variable| given(variable).is_some_and(|text| !text.trim().is_empty());
    let (has_socket, has_plane) = (
        is_set("GRPC_UDS"),
        given("CONFIG_TYPE").is_some_and(|kind| kind.trim().eq_ignore_ascii_case("GRPC_XDS_SOTW")),
    );
    let has_redis = is_set("REDIS_URL") || is_set("REDIS_PERSECOND_URL");
    let of_redis = ["REDIS_AUTH", "REDIS_AUTH_FILE", "REDIS_AUTH_COMMAND", "REDIS_CONNECTION_MAX_AGE"];
    let of_redis = of_redis
        .map(|variable| (!has_redis, variable, "no REDIS_URL is set, so counters are in the memory of this process"));
    let beside_others = [
        (!has_socket, "GRPC_UDS_MODE", "it applies only with GRPC_UDS"),
        (has_socket, "GRPC_HOST", "GRPC_UDS is set, so gRPC is served on that socket only"),
        (has_socket, "GRPC_PORT", "GRPC_UDS is set, so gRPC is served on that socket only"),
        (
            !has_plane,
            "STATE_DIR",
            "it keeps the rules of a control plane, so it applies only with CONFIG_TYPE=GRPC_XDS_SOTW",
        ),
    ];
    let beside_others = beside_others
        .into_iter()
        .chain(of_redis)
        .filter_map(|(is_unused, variable, why)| is_unused.then_some(UnusedVariable { variable, why }));
    let all = UNUSED.iter().copied().chain(libraries::set(given)).chain(beside_others).chain(switches::set(given));
    all.filter(|unused| is_set(unused.variable)).collect()
}

/// Returns true if a variable is set to true, in any form of that.
fn given_true(given: Lookup<'_>, variable: &str) -> bool {
    given(variable).is_some_and(|text| bool::parse(text.trim()) == Some(true))
}

#[cfg(test)]
mod tests {
    use crate::settings::tests::read;

    #[test]
    fn only_variables_that_are_set_are_named() {
        let given = [("REDIS_POOL_SIZE", "20"), ("MEMCACHE_SRV", ""), ("LOCAL_CACHE_SIZE_IN_BYTES", "1000000")];
        let named = read(&given).expect("settings").unused;
        let named: Vec<_> = named.into_iter().map(|unused| unused.variable).collect();
        assert_eq!(named, ["REDIS_POOL_SIZE", "LOCAL_CACHE_SIZE_IN_BYTES"]);
    }

    #[test]
    fn a_variable_without_effect_beside_another_is_named() {
        let named = |given: &[(&str, &str)]| {
            let unused = read(given).expect("settings").unused;
            unused.into_iter().map(|unused| unused.variable).collect::<Vec<_>>()
        };
        let socket = ("GRPC_UDS", "/run/grpc.sock");
        assert_eq!(named(&[("GRPC_UDS_MODE", "0660"), ("GRPC_PORT", "1")]), ["GRPC_UDS_MODE"]);
        assert_eq!(named(&[socket, ("GRPC_UDS_MODE", "0660"), ("GRPC_PORT", "1")]), ["GRPC_PORT"]);
        assert_eq!(named(&[socket, ("GRPC_HOST", "::1")]), ["GRPC_HOST"]);
        assert_eq!(named(&[("STATE_DIR", "/a")]), ["STATE_DIR"]);
        let plane = [("CONFIG_TYPE", "GRPC_XDS_SOTW"), ("CONFIG_GRPC_XDS_SERVER_URL", "a:1")];
        assert!(named(&[&plane[..], &[("STATE_DIR", "/a")]].concat()).is_empty());
        let login = [("REDIS_AUTH_COMMAND", "/bin/token"), ("REDIS_CONNECTION_MAX_AGE", "12h")];
        assert_eq!(named(&login), ["REDIS_AUTH_COMMAND", "REDIS_CONNECTION_MAX_AGE"]);
        assert!(named(&[login[0], login[1], ("REDIS_URL", "h:1")]).is_empty());
    }
    #[test]
    fn a_variable_of_a_library_is_named_where_the_reference_would_read_it() {
        let named = |given: &[(&str, &str)]| {
            let unused = read(given).expect("settings").unused;
            unused.into_iter().map(|unused| unused.variable).collect::<Vec<_>>()
        };
        let all = [
            ("HTTPS_PROXY", "http://proxy:3128"),
            ("OTEL_BSP_MAX_QUEUE_SIZE", "9"),
            ("DD_AGENT_HOST", "agent"),
            ("GOMAXPROCS", "2"),
            ("GODEBUG", ""),
        ];
        assert_eq!(named(&all), ["GOMAXPROCS"]);
        assert_eq!(named(&[&all[..], &[("USE_DOG_STATSD", "1")]].concat()), ["DD_AGENT_HOST", "GOMAXPROCS"]);
        let spans = ["OTEL_BSP_MAX_QUEUE_SIZE", "HTTPS_PROXY", "GOMAXPROCS"];
        assert_eq!(named(&[&all[..], &[("TRACING_ENABLED", "T")]].concat()), spans);
        assert_eq!(named(&[&all[..], &[("OTEL_METRICS_EXPORTER", "otlp")]].concat()), spans);
        assert_eq!(named(&[&all[..], &[("CONFIG_TYPE", "grpc_xds_sotw")]].concat()), ["HTTPS_PROXY", "GOMAXPROCS"]);
    }

    #[test]
    fn a_setting_whose_switch_is_off_is_named() {
        let named = |given: &[(&str, &str)]| {
            let unused = read(given).expect("settings").unused;
            unused.into_iter().map(|unused| unused.variable).collect::<Vec<_>>()
        };
        let redis = ("REDIS_URL", "a:1");
        for (given, switch) in [
            (&[("EXTRA_TAGS", "a:b")][..], &[("USE_STATSD", "true")][..]),
            (&[("STATSD_PROTOCOL", "udp")], &[("STATSD_HOST", "a")]),
            (&[("STATSD_PORT", "9125")], &[("USE_DOG_STATSD", "true")]),
            (&[("STATS_FLUSH_INTERVAL", "1s")], &[("STATSD_HOST", "a")]),
            (&[("PROMETHEUS_ADDR", ":1"), ("PROMETHEUS_PATH", "/m")], &[("USE_PROMETHEUS", "true")]),
            (&[("TRACING_SAMPLING_RATE", "0.5")], &[("TRACING_ENABLED", "true")]),
            (&[("TRACING_EXPORTER_PROTOCOL", "grpc")], &[("OTEL_METRICS_EXPORTER", "otlp")]),
            (&[("TRACING_SERVICE_NAME", "a")], &[("TRACING_ENABLED", "true")]),
            (&[("CONFIG_GRPC_XDS_NODE_ID", "a")], &[("CONFIG_TYPE", "GRPC_XDS_SOTW")]),
            (&[("XDS_CLIENT_BACKOFF_JITTER", "false")], &[("CONFIG_TYPE", "GRPC_XDS_SOTW")]),
            (&[("LIMIT_RESET_HEADER", "x-reset")], &[("LIMIT_RESPONSE_HEADERS_ENABLED", "true")]),
            (&[("LIMIT_RESET_HEADER", "x-reset")], &[("RESPONSE_HEADERS", "reference")]),
        ] {
            let variables: Vec<_> = given.iter().map(|(variable, _)| *variable).collect();
            assert_eq!(named(given), variables);
            assert!(named(&[given, switch].concat()).is_empty(), "{given:?} {switch:?}");
        }
        let apart = [redis, ("REDIS_PERSECOND_URL", "b:1"), ("REDIS_PERSECOND_TLS", "true")];
        assert_eq!(named(&apart), ["REDIS_PERSECOND_URL", "REDIS_PERSECOND_TLS"]);
        assert!(named(&[&apart[..], &[("REDIS_PERSECOND", "true")]].concat()).is_empty());
        let secure = [("REDIS_TLS_CACERT", "/ca"), ("REDIS_TLS_SKIP_HOSTNAME_VERIFICATION", "true")];
        assert_eq!(named(&[&[redis][..], &secure].concat()), secure.map(|(variable, _)| variable));
        assert!(named(&[&[redis, ("REDIS_TLS", "true")][..], &secure].concat()).is_empty());
        assert!(named(&[&[("REDIS_URL", "rediss://a:1")][..], &secure].concat()).is_empty());
        let mogrifiers = [("STATSD_HOST", "a"), ("USE_DOG_STATSD_MOGRIFIERS", "A")];
        assert_eq!(named(&mogrifiers), ["USE_DOG_STATSD_MOGRIFIERS"]);
        assert_eq!(named(&[("USE_DOG_STATSD", "true"), ("STATSD_PROTOCOL", "tcp6")]), ["STATSD_PROTOCOL"]);
        assert!(named(&[("USE_STATSD", "false"), ("STATSD_PORT", "9125"), ("EXTRA_TAGS", "")]).is_empty());
        assert!(named(&[("STATSD_PORT", "8125"), ("PROMETHEUS_ADDR", ":9090")]).is_empty(), "the defaults");
    }
}
