//! Variables of the reference that have no effect here, with the reasons.

use super::values::Setting;
use super::{Lookup, Settings, store};

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

/// Settings of how Redis is used, which do not say that there is one. Instances with and without Redis may share them.
const OF_A_STORE: [&str; 5] =
    ["CACHE_KEY_PREFIX", "STORE_DEADLINE", "LEASE_DEFAULT", "ON_STORE_OVERLOAD", "ON_STORE_FAILURE"];

/// Returns the variables that are set and have no effect.
pub(super) fn set(given: Lookup<'_>) -> Vec<UnusedVariable> {
    let is_set = |variable| given(variable).is_some_and(|text| !text.trim().is_empty());
    let (has_socket, has_plane) = (
        is_set("GRPC_UDS"),
        given("CONFIG_TYPE").is_some_and(|kind| kind.trim().eq_ignore_ascii_case("GRPC_XDS_SOTW")),
    );
    let is_memory_asked = given("BACKEND_TYPE").is_some_and(|kind| kind.trim().eq_ignore_ascii_case("memory"));
    let is_in_memory = is_memory_asked || !is_set("REDIS_URL");
    // Without BACKEND_TYPE=memory, a setting of Redis without its address is an error.
    let why = "BACKEND_TYPE is memory, so counters are in the memory of this process";
    let of_redis = store::of_redis(given).filter(|_| is_memory_asked).map(|variable| UnusedVariable { variable, why });
    let why = "counters are in the memory of this process and not in Redis";
    let of_a_store = Settings::PROCESS.iter().filter(|row| is_in_memory && OF_A_STORE.contains(&row.variable));
    let of_a_store = of_a_store.filter(|row| given(row.variable).is_some_and(|text| !row.is_default(&text)));
    let of_redis = of_redis.chain(of_a_store.map(|row| UnusedVariable { variable: row.variable, why }));
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
        .filter_map(|(is_unused, variable, why)| is_unused.then_some(UnusedVariable { variable, why }));
    let all = UNUSED
        .iter()
        .copied()
        .chain(libraries::set(given))
        .chain(beside_others)
        .chain(switches::set(given))
        .chain(of_redis);
    all.filter(|unused| is_set(unused.variable)).collect()
}

/// Returns true if a variable is set to true, in any form of that.
fn given_true(given: Lookup<'_>, variable: &str) -> bool {
    given(variable).is_some_and(|text| bool::parse(text.trim()) == Some(true))
}

#[cfg(test)]
mod tests {
    use crate::settings::LogFormat;
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
        let memory = ("BACKEND_TYPE", "Memory");
        assert_eq!(named(&[login[0], login[1], memory]), ["REDIS_AUTH_COMMAND", "REDIS_CONNECTION_MAX_AGE"]);
        assert_eq!(named(&[("REDIS_URL", "h:1"), memory]), ["REDIS_URL"]);
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

    #[test]
    fn what_only_a_store_that_can_fail_gives_a_meaning_is_named_without_one() {
        let named = |given: &[(&str, &str)]| read(given).expect("settings").unused;
        for (variable, value) in [
            ("ON_STORE_FAILURE", "local"),
            ("ON_STORE_OVERLOAD", "closed"),
            ("STORE_DEADLINE", "25ms"),
            ("CACHE_KEY_PREFIX", "p_"),
            ("LEASE_DEFAULT", "5%"),
        ] {
            for memory in [&[(variable, value)][..], &[(variable, value), ("BACKEND_TYPE", "memory")]] {
                let unused = named(memory);
                assert_eq!(unused.iter().map(|unused| unused.variable).collect::<Vec<_>>(), [variable]);
                assert!(unused[0].why.contains("in the memory of this process"), "{unused:?}");
            }
            assert!(named(&[(variable, value), ("REDIS_URL", "h:1")]).is_empty());
        }
        for default in [("ON_STORE_FAILURE", "error"), ("LEASE_DEFAULT", "false"), ("STORE_DEADLINE", "auto")] {
            assert!(named(&[default]).is_empty(), "{default:?}");
        }
    }

    /// The reference's settings that are texts there: an empty one is a value, and it starts with it.
    const TEXTS_OF_THE_REFERENCE: &str = "HOST GRPC_HOST DEBUG_HOST GRPC_UDS GRPC_SERVER_TLS_CERT GRPC_SERVER_TLS_KEY
        GRPC_CLIENT_TLS_CACERT GRPC_CLIENT_TLS_SAN LOG_FORMAT RUNTIME_ROOT RUNTIME_SUBDIRECTORY RUNTIME_APPDIRECTORY
        CONFIG_GRPC_XDS_NODE_ID CONFIG_GRPC_XDS_NODE_METADATA CONFIG_GRPC_XDS_SERVER_URL
        CONFIG_GRPC_XDS_CLIENT_ADDITIONAL_HEADERS CONFIG_GRPC_XDS_CLIENT_TLS_CERT CONFIG_GRPC_XDS_CLIENT_TLS_KEY
        CONFIG_GRPC_XDS_SERVER_TLS_CACERT CONFIG_GRPC_XDS_SERVER_TLS_SAN BACKEND_TYPE CACHE_KEY_PREFIX LIMIT_LIMIT_HEADER
        LIMIT_REMAINING_HEADER LIMIT_RESET_HEADER REDIS_AUTH REDIS_SENTINEL_AUTH REDIS_TLS_CLIENT_CERT
        REDIS_TLS_CLIENT_KEY REDIS_TLS_CACERT REDIS_PERSECOND_AUTH REDIS_PERSECOND_SENTINEL_AUTH REDIS_PERSECOND_URL
        MEMCACHE_HOST_PORT MEMCACHE_SRV MEMCACHE_TLS_CLIENT_CERT MEMCACHE_TLS_CLIENT_KEY MEMCACHE_TLS_CACERT STATSD_HOST
        USE_DOG_STATSD_MOGRIFIERS EXTRA_TAGS PROMETHEUS_ADDR PROMETHEUS_MAPPER_YAML TRACING_SERVICE_NAME
        TRACING_SERVICE_NAMESPACE TRACING_SERVICE_INSTANCE_ID TRACING_EXPORTER_PROTOCOL";

    #[test]
    fn an_empty_text_that_the_reference_starts_with_stops_no_start() {
        let refused: Vec<_> = TEXTS_OF_THE_REFERENCE
            .split_whitespace()
            .filter(|variable| ["", " "].into_iter().any(|empty| read(&[(variable, empty)]).is_err()))
            .collect();
        assert_eq!(refused, Vec::<&str>::new());
        let all =
            read(&[("HOST", ""), ("GRPC_HOST", ""), ("DEBUG_HOST", ""), ("LIMIT_RESET_HEADER", "")]).expect("settings");
        let default = read(&[]).expect("settings");
        assert_eq!((all.host, all.grpc_host, all.debug_host), (default.host, default.grpc_host, default.debug_host));
        assert_eq!(all.limit_reset_header, default.limit_reset_header);
    }

    #[test]
    fn words_in_any_case_that_the_reference_takes_stop_no_start() {
        for (variable, value) in [
            ("LOG_FORMAT", "JSON"),
            ("LOG_FORMAT", " Text"),
            ("LOG_LEVEL", "Warning"),
            ("CONFIG_TYPE", "file"),
            ("HOST", "LOCALHOST"),
            ("BACKEND_TYPE", "MEMORY"),
        ] {
            assert!(read(&[(variable, value)]).is_ok(), "{variable}={value}");
        }
        let format = |text| read(&[("LOG_FORMAT", text)]).map(|settings| settings.log_format);
        assert_eq!((format("JSON"), format("")), (Ok(LogFormat::Json), Ok(LogFormat::Text)));
    }
}
