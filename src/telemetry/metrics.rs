//! Table of all metrics: name, type, labels and meaning of each.

/// One metric.
#[derive(Debug)]
pub struct Metric {
    /// Name on the page.
    pub name: &'static str,
    /// Type of the metric.
    pub kind: Kind,
    /// Names of its labels.
    pub labels: &'static [&'static str],
    /// Meaning, for the `HELP` line.
    pub help: &'static str,
}

/// Type of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A value that only grows.
    Counter,
    /// A value that rises and falls.
    Gauge,
    /// Counts of values up to each bound.
    Histogram,
}

impl Kind {
    /// Returns the name of the type on the page.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        }
    }
}

macro_rules! metrics {
    ($($constant:ident: $kind:ident $name:literal [$($label:literal)*] $help:literal;)+) => {
        $(#[doc = $help] pub const $constant: Metric =
            Metric { name: $name, kind: Kind::$kind, labels: &[$($label),*], help: $help };)+

        /// All metrics.
        pub const TABLE: &[&Metric] = &[$(&$constant),+];
    };
}

metrics! {
    TOTAL_HITS: Counter "ratelimit_service_rate_limit_total_hits" ["domain" "key1" "key2"] "Hits that a rule was asked for";
    OVER_LIMIT: Counter "ratelimit_service_rate_limit_over_limit" ["domain" "key1" "key2"] "Hits beyond a rule's limit";
    NEAR_LIMIT: Counter "ratelimit_service_rate_limit_near_limit" ["domain" "key1" "key2"] "Hits within a rule's limit but beyond NEAR_LIMIT_RATIO of it";
    WITHIN_LIMIT: Counter "ratelimit_service_rate_limit_within_limit" ["domain" "key1" "key2"] "Hits of requests that were within a rule's limit";
    SHADOW_MODE: Counter "ratelimit_service_rate_limit_shadow_mode" ["domain" "key1" "key2"] "Hits beyond the limit of a rule that only watches";
    GLOBAL_SHADOW_MODE: Counter "ratelimit_service_global_shadow_mode" [] "Requests that would have been refused but for SHADOW_MODE";
    ERRORS: Counter "ratelimit_service_should_rate_limit_error" ["err_type"] "Calls that went wrong: redis_error where a failure policy answered for the store, service_error where the request means nothing";
    TOTAL_REQUESTS: Counter "ratelimit_service_total_requests" ["grpc_method"] "gRPC calls";
    CALLS_LIMITED: Counter "tidegate_calls_limited_total" ["cause"] "Calls that met a bound of this process, by the bound";
    RESPONSE_TIME: Histogram "ratelimit_service_response_time_seconds" ["grpc_method"] "How long gRPC calls took, from their message to their answer";
    LOADS: Counter "ratelimit_service_config_load_success" [] "Loads of rules that were put in force, the first included";
    REJECTED_LOADS: Counter "ratelimit_service_config_load_error" [] "Loads of rules that were rejected whole";
    DECISIONS: Counter "tidegate_decisions_total" ["domain" "rule" "outcome" "provenance"] "Requests decided, by the rule that decided, what was decided, and where that comes from";
    UNKNOWN_DOMAINS: Counter "tidegate_unknown_domain_requests_total" [] "Requests of a domain that no rule file has: admitted, for nothing limits them";
    DELAYED: Counter "tidegate_delayed_requests_total" ["delivery"] "Admitted requests that a limit made wait: told to Envoy by a header, or held here";
    HELD_CALLS: Gauge "tidegate_held_calls" [] "Calls that wait here because a limit has delivery: hold";
    RULES: Gauge "tidegate_rules" [] "Rules in force";
    RULES_GENERATION: Gauge "tidegate_rules_generation" [] "Which load of the rules is in force, counted from 1";
    RULES_LOADED: Gauge "tidegate_rules_loaded_timestamp_seconds" [] "When the rules in force were loaded, in seconds since 1970";
    RULES_REJECTED: Gauge "tidegate_rules_rejected" [] "1 while the rule files hold something that was rejected, so that older rules stay in force";
    RULES_LOADING: Gauge "tidegate_rules_loading_seconds" [] "How long the present load of the rules has been under way, once that is more than 10 s; else 0";
    STORE_ROUND_TRIP: Histogram "tidegate_store_round_trip_seconds" ["server"] "How long a server of the store took to answer one write";
    STORE_FAILURES: Counter "tidegate_store_failures_total" ["server" "reason"] "Charges that a server of the store was asked for first and that were not answered; the reason timed_out is a missed deadline, and the server unmapped is a cluster's unknown one";
    STORE_CALLS: Gauge "tidegate_store_calls_in_flight" ["server"] "Scripts that a server of the store has not answered yet, one for each slot of a call; at most as many as the limit";
    STORE_CALLS_LIMIT: Gauge "tidegate_store_calls_limit" ["server"] "The most scripts in flight to a server of the store at present; it follows the queue delay";
    STORE_QUEUE_DELAY: Gauge "tidegate_store_queue_delay_seconds" ["server"] "How long the last call of the slowest worker waited at a server of the store behind others";
    KNOWN_REFUSALS: Counter "tidegate_known_refusals_total" [] "Charges that were refused without asking the store, because it had refused the same less than a second ago or was too busy";
    STORE_UNTIMELY: Counter "tidegate_untimely_calls_total" [] "Calls that were decided without the store because they had no time left for it: they had waited for a thread, or their timeout is too short";
    LATER_BACKLOG: Gauge "tidegate_later_charges" [] "Counters with hits that were decided without the store and are still to be charged there";
    LATER_DROPPED: Counter "tidegate_later_hits_dropped_total" [] "Admitted hits that were never charged in the store: their window was over first, or there were too many counters";
    REPLICAS: Gauge "tidegate_replicas" ["source"] "Instances that share the limits, by which local divides them; the source is set, counted or assumed";
    STORE_LOST_UNDOS: Counter "tidegate_store_lost_undos_total" ["server"] "Charges that could not be given back, so that counts stand too high until they expire";
    STORE_BAD_REPLIES: Counter "tidegate_store_bad_replies_total" ["server" "reason"] "Replies of a server of the store that ended their connection: larger than their request allows, malformed, or not asked for";
    STORE_BREAKER: Gauge "tidegate_store_breaker_open" ["server"] "1 while a server of the store is known to be down and is not asked";
    STORE_CONNECTED: Gauge "tidegate_store_connected" [] "1 while some server of the store can be asked; the embedded store always can";
    MEMORY_COUNTERS: Gauge "tidegate_memory_counters" [] "Counters in the embedded store";
    MEMORY_EVICTED: Counter "tidegate_memory_evicted_total" [] "Counters that the embedded store forgot before they were idle, for want of room";
    CONNECTIONS: Gauge "tidegate_connections" ["listener"] "Connections that are open";
    CONNECTIONS_ENDED: Counter "tidegate_connections_ended_total" ["listener" "how"] "Connections that ended otherwise than well";
    SPANS_DROPPED: Counter "tidegate_spans_dropped_total" [] "Spans that were recorded and not delivered: there was no room for them to wait, or the receiver did not take them";
    LOG_LINES_DROPPED: Counter "tidegate_log_lines_dropped_total" [] "Log lines that were not written, because standard error took no more";
    BUILD_INFO: Gauge "tidegate_build_info" ["version"] "Always 1; the label is the version";
    START_TIME: Gauge "process_start_time_seconds" [] "When the process started, in seconds since 1970";
}
