//! Table of all metrics: name, type, labels and meaning of each.

/// One metric.
#[derive(Debug)]
pub struct Metric {
    /// Name on the page.
    pub name: &'static str,
    /// Type of the metric.
    pub kind: MetricKind,
    /// Names of its labels.
    pub labels: &'static [&'static str],
    /// Meaning, for the `HELP` line.
    pub help: &'static str,
}

/// Type of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricKind {
    /// A value that only grows.
    Counter,
    /// A value that rises and falls.
    Gauge,
    /// Counts of values up to each bound.
    Histogram,
}

impl MetricKind {
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
            Metric { name: $name, kind: MetricKind::$kind, labels: &[$($label),*], help: $help };)+

        /// All metrics.
        pub const TABLE: &[&Metric] = &[$(&$constant),+];
    };
}

metrics! {
    TOTAL_HITS: Counter "ratelimit_service_rate_limit_total_hits" ["domain" "key1" "key2"] "Hits of all charges against a rule";
    OVER_LIMIT: Counter "ratelimit_service_rate_limit_over_limit" ["domain" "key1" "key2"] "Hits over a rule's limit";
    NEAR_LIMIT: Counter "ratelimit_service_rate_limit_near_limit" ["domain" "key1" "key2"] "Hits within a rule's limit but above NEAR_LIMIT_RATIO of it";
    WITHIN_LIMIT: Counter "ratelimit_service_rate_limit_within_limit" ["domain" "key1" "key2"] "Hits of charges within a rule's limit";
    SHADOW_MODE: Counter "ratelimit_service_rate_limit_shadow_mode" ["domain" "key1" "key2"] "Hits over the limit of a rule in shadow mode, which are not refused";
    GLOBAL_SHADOW_MODE: Counter "ratelimit_service_global_shadow_mode" [] "Requests admitted only because SHADOW_MODE is set";
    ERRORS: Counter "ratelimit_service_should_rate_limit_error" ["err_type"] "Calls that went wrong; redis_error: a failure policy answered instead of the store; service_error: the request is invalid";
    TOTAL_REQUESTS: Counter "ratelimit_service_total_requests" ["grpc_method"] "gRPC calls";
    REQUESTS: Counter "tidegate_requests_total" ["interface"] "Requests for a decision, by the interface at which they arrived: grpc, json (/json) or check (/check); also those that are refused or invalid";
    CALLS_LIMITED: Counter "tidegate_calls_limited_total" ["cause"] "Calls that hit a bound of this process on size, time or memory, by bound";
    CALLS_UNDECIDED: Counter "tidegate_calls_undecided_total" ["reason"] "gRPC calls that got an error and no decision, by reason; not those of the policy error and those without a right";
    RESPONSE_TIME: Histogram "ratelimit_service_response_time_seconds" ["grpc_method"] "Time from the message of a gRPC call to its answer";
    LOADS: Counter "ratelimit_service_config_load_success" [] "Loads of rules that took effect, the first included";
    REJECTED_LOADS: Counter "ratelimit_service_config_load_error" [] "Loads of rules that were rejected; a rejected load changes nothing";
    DECISIONS: Counter "tidegate_decisions_total" ["domain" "rule" "value" "outcome" "provenance"] "Requests decided, by the rule that decided, the outcome and its provenance";
    KEY_PEAK_SHARE: Histogram "tidegate_key_peak_share" ["domain" "rule"] "Highest share of a limit that a key used in a window, or in an hour of a longer one, in one of 16 decisions";
    KNOWN_GOOD_REFUSALS: Counter "tidegate_known_good_refusals_total" ["domain" "key" "mode"] "Refused requests of callers that known_good of the domain names, by the key that names them; mode shadow: a shadow mode admits the request";
    UNKNOWN_DOMAINS: Counter "tidegate_unknown_domain_requests_total" [] "Requests with a domain that no rule file has; they are admitted without a limit";
    UNKNOWN_CLIENTS: Counter "tidegate_check_unknown_clients_total" [] "Checks (/check) whose client is known only by the address of a trusted proxy, which is counted and never exempt";
    DELAYED: Counter "tidegate_delayed_requests_total" ["delivery"] "Admitted requests that a limit delayed; header: a header makes Envoy how long to wait; hold: the call is held here";
    HELD_CALLS: Gauge "tidegate_held_calls" [] "Calls held at present because a limit has delivery: hold";
    RULES: Gauge "tidegate_rules" [] "Rules in force";
    RULES_GENERATION: Gauge "tidegate_rules_generation" [] "Number of the load whose rules are in force; the first load is 1";
    RULES_LOADED: Gauge "tidegate_rules_loaded_timestamp_seconds" [] "Time when the rules in force were loaded, in seconds since 1970";
    RULES_REJECTED: Gauge "tidegate_rules_rejected" [] "1 while the current rule files are rejected and older rules stay in force, else 0";
    OVERLAY_REJECTED: Gauge "tidegate_overlay_rejected" [] "1 while the current overlay is rejected and an older one stays in force, else 0";
    OVERLAY_SKIPPED: Gauge "tidegate_overlay_fields_skipped" [] "Number of fields of the overlay that do not fit a limit and are not in force";
    OVERLAY_UNMATCHED: Gauge "tidegate_overlay_items_unmatched" [] "Number of items of the overlay that match no rule";
    RULES_LOADING: Gauge "tidegate_rules_loading_seconds" [] "Duration of the load of rules that is in progress, if it has taken more than 10 s; else 0";
    XDS_CONNECTED: Gauge "tidegate_xds_connected" [] "1 while there is a stream from the control plane, else 0; always 1 for rule files";
    XDS_DISCONNECTED: Counter "tidegate_xds_disconnected_total" [] "Streams from the control plane that ended, and attempts to open one that failed";
    XDS_RESPONSES: Counter "tidegate_xds_responses_total" ["answer"] "Responses of the control plane, by answer; acknowledged: their rules are in force; refused: they have an error and change nothing";
    XDS_EMPTY_HELD: Gauge "tidegate_xds_empty_set_held" [] "1 while rules stay in force although the control plane has sent an empty set, else 0";
    XDS_RESTORED_AGE: Gauge "tidegate_xds_restored_age_seconds" [] "Age of the rules in force if they are from STATE_DIR and the control plane has sent none since the start, else 0";
    STORE_ROUND_TRIP: Histogram "tidegate_store_round_trip_seconds" ["server"] "Time that a store server took to answer one write";
    STORE_FAILURES: Counter "tidegate_store_failures_total" ["server" "reason"] "Charges without a reply, by the first server asked; timed_out: the deadline passed; unmapped: no node is known for the slot";
    STORE_CALLS: Gauge "tidegate_store_calls_in_flight" ["server"] "Scripts in flight to a store server, one per slot of a call; at most tidegate_store_calls_limit";
    STORE_CALLS_LIMIT: Gauge "tidegate_store_calls_limit" ["server"] "Maximum number of scripts in flight to a store server at present; it follows the queue delay";
    STORE_QUEUE_DELAY: Gauge "tidegate_store_queue_delay_seconds" ["server"] "Time that the last call waited in the queue of a store server; the highest value of all workers";
    LEASES: Gauge "tidegate_leases" [] "Counters with a lease: hits that this instance may admit without asking the store";
    LEASE_HITS: Counter "tidegate_lease_hits_total" ["hits"] "Hits of leases: charged in the store (granted), spent by requests (spent), and given back (given_back)";
    KNOWN_REFUSALS: Counter "tidegate_known_refusals_total" [] "Charges refused without asking the store, because it refused the same charge less than a second ago or was too busy";
    STORE_UNTIMELY: Counter "tidegate_untimely_calls_total" [] "Calls decided without the store because no time was left to ask it: they waited for a thread, or their timeout is too short";
    LATER_BACKLOG: Gauge "tidegate_later_charges" [] "Counters with hits that were decided without the store and are not yet charged there";
    LATER_DROPPED: Counter "tidegate_later_hits_dropped_total" [] "Admitted hits that were never charged in the store, because their window ended first or there were too many counters";
    REPLICAS: Gauge "tidegate_replicas" ["source"] "Instances that share the limits; the policy local divides limits by this number; source: set, counted or assumed";
    STORE_LOST_UNDOS: Counter "tidegate_store_lost_undos_total" ["server"] "Charges that could not be undone; the counts stay too high until they expire";
    STORE_BAD_REPLIES: Counter "tidegate_store_bad_replies_total" ["server" "reason"] "Replies of a store server that ended their connection; too_large: larger than the request allows; malformed: not the Redis protocol; unasked: no request is open";
    STORE_BREAKER: Gauge "tidegate_store_breaker_open" ["server"] "1 while a store server is known to be down and gets no calls, else 0";
    STORE_LOGIN_READS: Counter "tidegate_store_login_reads_total" ["store" "outcome"] "Reads of the login for a Redis from its file or command, by outcome; failed: the last login stays in use";
    STORE_REACHED: Gauge "tidegate_store_reached" ["store"] "1 once there has been a connection to a Redis since the start, else 0";
    STORE_CONNECTED: Gauge "tidegate_store_connected" [] "1 while at least one store server can be asked, else 0; always 1 for the embedded store";
    MEMORY_COUNTERS: Gauge "tidegate_memory_counters" [] "Counters in the embedded store";
    MEMORY_EVICTED: Counter "tidegate_memory_evicted_total" [] "Counters in use that the embedded store evicted because it was full";
    CONNECTIONS: Gauge "tidegate_connections" ["listener"] "Open connections";
    CONNECTIONS_ENDED: Counter "tidegate_connections_ended_total" ["listener" "how"] "Connections that did not end normally, by cause";
    TLS_HANDSHAKES: Counter "tidegate_tls_handshakes_total" ["outcome"] "TLS handshakes on the gRPC listener, by outcome; full and resumed succeeded";
    CALLER_DENIALS: Counter "tidegate_caller_denials_total" ["what"] "Requests of which a part was denied to their caller by CALLERS_FILE or JSON_RIGHTS; domain: answered with PERMISSION_DENIED; override and refund: ignored";
    PAGES_REFUSED: Counter "tidegate_pages_refused_total" ["reason"] "Requests to /json or /check that were refused because a web page of another site made them, by the header that says so: site, origin or host";
    CALLERS_REJECTED: Gauge "tidegate_callers_rejected" [] "1 while the current CALLERS_FILE is invalid or unreadable and an older one stays in force, else 0";
    ADMIN_TOKENS_REJECTED: Gauge "tidegate_admin_tokens_rejected" [] "1 while the current ADMIN_TOKEN_FILE is invalid or unreadable and older tokens stay in force, else 0";
    CERTIFICATE_EXPIRY: Gauge "tidegate_certificate_expiry_seconds" ["use"] "Time until which a certificate in use is valid, in seconds since 1970; the earliest time if a file has several";
    SPANS_DROPPED: Counter "tidegate_spans_dropped_total" [] "Spans that were recorded but not exported, because the queue was full or the receiver did not accept them";
    LOG_LINES_DROPPED: Counter "tidegate_log_lines_dropped_total" [] "Log lines that were dropped because standard error accepted no more";
    BUILD_INFO: Gauge "tidegate_build_info" ["version"] "Always 1; the label version is the version of Tidegate";
    PROCESS_CPU: Counter "process_cpu_seconds_total" [] "CPU time of the process, in seconds";
    PROCESS_OPEN_FILES: Gauge "process_open_fds" [] "Open files of the process, its connections included";
    PROCESS_MAX_FILES: Gauge "process_max_fds" [] "Maximum number of open files of the process";
    PROCESS_VIRTUAL: Gauge "process_virtual_memory_bytes" [] "Virtual memory of the process";
    PROCESS_VIRTUAL_MAX: Gauge "process_virtual_memory_max_bytes" [] "Maximum virtual memory of the process; 18446744073709551615: no limit";
    PROCESS_RESIDENT: Gauge "process_resident_memory_bytes" [] "Resident memory of the process";
    START_TIME: Gauge "process_start_time_seconds" [] "Time when the process started, in seconds since 1970";
}
