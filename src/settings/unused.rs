//! Variables of the reference that have no effect here, with the reasons.

use super::Lookup;

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
        /// All variables of the reference that have no effect.
        pub const UNUSED: &[UnusedVariable] = &[$($(UnusedVariable { variable: $variable, why: $why },)+)+];
    };
}

unused! {
    "connections are shared by all calls, and no call waits for one":
        "REDIS_POOL_SIZE" "REDIS_POOL_ON_EMPTY_BEHAVIOR" "REDIS_POOL_ON_EMPTY_WAIT_DURATION"
        "REDIS_PERSECOND_POOL_SIZE" "REDIS_PERSECOND_POOL_ON_EMPTY_BEHAVIOR";
    "a request is one round trip to each node, to all nodes at once":
        "REDIS_PIPELINE_WINDOW" "REDIS_PIPELINE_LIMIT" "REDIS_CLUSTER_PIPELINE_PARALLELISM"
        "REDIS_PERSECOND_PIPELINE_WINDOW" "REDIS_PERSECOND_PIPELINE_LIMIT" "REDIS_PERSECOND_CLUSTER_PIPELINE_PARALLELISM";
    "a start does not wait for Redis":
        "REDIS_STARTUP_INITIAL_INTERVAL" "REDIS_STARTUP_MAX_INTERVAL" "REDIS_STARTUP_MAX_ELAPSED_TIME";
    "a counter expires when forgetting it changes no answer": "EXPIRATION_JITTER_MAX_SECONDS";
    "refusals are remembered without a cache of a size to choose": "LOCAL_CACHE_SIZE_IN_BYTES";
    "there is no Memcached":
        "MEMCACHE_HOST_PORT" "MEMCACHE_SRV" "MEMCACHE_SRV_REFRESH" "MEMCACHE_MAX_IDLE_CONNS" "MEMCACHE_TLS"
        "MEMCACHE_TLS_CLIENT_CERT" "MEMCACHE_TLS_CLIENT_KEY" "MEMCACHE_TLS_CACERT" "MEMCACHE_TLS_SKIP_HOSTNAME_VERIFICATION";
    "metrics have the names that the reference's own mapper gives them": "PROMETHEUS_MAPPER_YAML";
    "response times are in seconds, as their name says": "PROMETHEUS_RESPONSE_TIME_AS_MILLISECONDS";
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
    UNUSED.iter().copied().chain(beside_others).filter(|unused| is_set(unused.variable)).collect()
}

#[cfg(test)]
mod tests {
    use super::UNUSED;
    use crate::settings::Settings;
    use crate::settings::tests::read;

    /// Every variable of the reference's `settings.go`.
    const OF_THE_REFERENCE: &str = "PROTO HOST PORT DEBUG_HOST DEBUG_PORT GRPC_UDS GRPC_HOST GRPC_PORT
        GRPC_MAX_CONNECTION_AGE GRPC_MAX_CONNECTION_AGE_GRACE GRPC_SERVER_USE_TLS GRPC_SERVER_TLS_CERT GRPC_SERVER_TLS_KEY
        GRPC_CLIENT_TLS_CACERT GRPC_CLIENT_TLS_SAN LOG_LEVEL LOG_FORMAT CONFIG_TYPE USE_DOG_STATSD
        USE_DOG_STATSD_MOGRIFIERS USE_STATSD STATSD_HOST STATSD_PORT EXTRA_TAGS STATS_FLUSH_INTERVAL DISABLE_STATS
        USE_PROMETHEUS PROMETHEUS_ADDR PROMETHEUS_PATH PROMETHEUS_MAPPER_YAML PROMETHEUS_RESPONSE_TIME_AS_MILLISECONDS
        RUNTIME_ROOT RUNTIME_SUBDIRECTORY RUNTIME_APPDIRECTORY RUNTIME_IGNOREDOTFILES RUNTIME_WATCH_ROOT
        EXPIRATION_JITTER_MAX_SECONDS LOCAL_CACHE_SIZE_IN_BYTES NEAR_LIMIT_RATIO CACHE_KEY_PREFIX BACKEND_TYPE
        STOP_CACHE_KEY_INCREMENT_WHEN_OVERLIMIT LIMIT_RESPONSE_HEADERS_ENABLED LIMIT_LIMIT_HEADER LIMIT_REMAINING_HEADER
        LIMIT_RESET_HEADER RESPONSE_DYNAMIC_METADATA REDIS_SOCKET_TYPE REDIS_TYPE REDIS_URL REDIS_POOL_SIZE REDIS_AUTH
        REDIS_SENTINEL_AUTH REDIS_TLS REDIS_TIMEOUT REDIS_POOL_ON_EMPTY_BEHAVIOR REDIS_TLS_CLIENT_CERT
        REDIS_TLS_CLIENT_KEY REDIS_TLS_CACERT REDIS_TLS_SKIP_HOSTNAME_VERIFICATION REDIS_PIPELINE_WINDOW
        REDIS_PIPELINE_LIMIT REDIS_CLUSTER_PIPELINE_PARALLELISM REDIS_STARTUP_INITIAL_INTERVAL
        REDIS_STARTUP_MAX_INTERVAL REDIS_STARTUP_MAX_ELAPSED_TIME REDIS_PERSECOND REDIS_PERSECOND_SOCKET_TYPE
        REDIS_PERSECOND_TYPE REDIS_PERSECOND_URL REDIS_PERSECOND_POOL_SIZE REDIS_PERSECOND_AUTH
        REDIS_PERSECOND_SENTINEL_AUTH REDIS_PERSECOND_TLS REDIS_PERSECOND_TIMEOUT
        REDIS_PERSECOND_POOL_ON_EMPTY_BEHAVIOR REDIS_PERSECOND_PIPELINE_WINDOW REDIS_PERSECOND_PIPELINE_LIMIT
        REDIS_PERSECOND_CLUSTER_PIPELINE_PARALLELISM REDIS_HEALTH_CHECK_ACTIVE_CONNECTION MEMCACHE_HOST_PORT
        MEMCACHE_MAX_IDLE_CONNS MEMCACHE_SRV MEMCACHE_SRV_REFRESH MEMCACHE_TLS MEMCACHE_TLS_CLIENT_CERT
        MEMCACHE_TLS_CLIENT_KEY MEMCACHE_TLS_CACERT MEMCACHE_TLS_SKIP_HOSTNAME_VERIFICATION SHADOW_MODE QUOTA_MODE
        MERGE_DOMAIN_CONFIG TRACING_ENABLED TRACING_SERVICE_NAME TRACING_SERVICE_NAMESPACE TRACING_SERVICE_INSTANCE_ID
        TRACING_EXPORTER_PROTOCOL TRACING_SAMPLING_RATE HEALTHY_WITH_AT_LEAST_ONE_CONFIG_LOADED
        FORCE_START_WITHOUT_INITIAL_CONFIG CONFIG_GRPC_XDS_NODE_ID CONFIG_GRPC_XDS_NODE_METADATA
        CONFIG_GRPC_XDS_SERVER_URL CONFIG_GRPC_XDS_SERVER_CONNECT_RETRY_INTERVAL
        CONFIG_GRPC_XDS_CLIENT_ADDITIONAL_HEADERS CONFIG_GRPC_XDS_SERVER_USE_TLS CONFIG_GRPC_XDS_CLIENT_TLS_CERT
        CONFIG_GRPC_XDS_CLIENT_TLS_KEY CONFIG_GRPC_XDS_SERVER_TLS_CACERT CONFIG_GRPC_XDS_SERVER_TLS_SAN
        XDS_CLIENT_BACKOFF_INITIAL_INTERVAL XDS_CLIENT_BACKOFF_MAX_INTERVAL XDS_CLIENT_BACKOFF_RANDOM_FACTOR
        XDS_CLIENT_BACKOFF_JITTER XDS_CLIENT_MAX_MSG_SIZE_IN_BYTES";

    #[test]
    fn every_variable_of_the_reference_is_honoured_refused_or_named_as_without_effect() {
        for variable in OF_THE_REFERENCE.split_whitespace() {
            let is_setting = Settings::table().any(|row| row.variable == variable);
            let is_unused = UNUSED.iter().any(|unused| unused.variable == variable);
            let is_refused = read(&[(variable, "true")]).is_err();
            assert!(is_setting != is_unused || (is_refused && !is_setting && !is_unused), "{variable}");
        }
    }

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
}
