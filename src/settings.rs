//! All settings of the process: variable, default, accepted values and effect of each.
//!
//! A setting comes from its flag (`--grpc-port`), else from its environment variable (`GRPC_PORT`), else from its default. A
//! setting that means the same as in the reference has the reference's name.

use std::net::IpAddr;

use thiserror::Error;

use crate::model::{Micros, StorePolicies};

mod admin;
mod hidden;
mod json;
mod listener_tls;
mod log;
mod otel;
mod otlp;
mod redis;
mod secret;
mod statsd;
mod store;
mod tls;
mod traces;
mod unknown;
mod unused;
mod values;
mod xds;

pub use admin::AdminSettings;
pub use json::{JsonAccess, JsonRights};
pub use listener_tls::ListenerTlsSettings;
pub use log::{LogFormat, LogSeverity};
pub use otel::ExportProtocol;
pub use otlp::OtlpSettings;
pub use redis::{Auth, RedisSettings};
pub use statsd::{StatsdSettings, StatsdTransport};
pub use store::StoreChoice;
pub use traces::TraceSettings;
pub use unknown::UnknownVariables;
pub use unused::{OF_LIBRARIES, ReadWith, UNUSED, UnusedVariable};
use values::Setting;
pub use values::{
    BodySize, BodyStyle, CounterCount, HeaderStyle, HeaderText, IdleConnections, KeyPrefix, LeaseDefault,
    ListenAddress, OverloadPolicy, PagePath, Policy, Ratio, RefusalsKeep, ReplicaCount, SocketMode, SocketPath,
    StoreDeadline, WorkerCount,
};
pub use xds::SourceSettings;

/// One row of the settings table, for help texts and documentation.
#[derive(Clone, Copy, Debug)]
pub struct SettingRow {
    /// Name of the environment variable.
    pub variable: &'static str,
    /// Value that applies when the variable is not set.
    pub default: &'static str,
    /// Accepted values, in words.
    pub takes: &'static str,
    /// Effect of the setting.
    pub does: &'static str,
    /// True if the value is a secret. A secret has no flag, because everyone on the machine can read a command line.
    pub is_secret: bool,
}

impl SettingRow {
    /// Returns the flag of the same name, such as `--grpc-port`; `None` for a secret.
    pub fn flag(&self) -> Option<String> {
        (!self.is_secret).then(|| self.variable.to_ascii_lowercase().replace('_', "-"))
    }

    /// Returns true if `text` means the same as the default.
    fn is_default(&self, text: &str) -> bool {
        let (text, default) = (text.trim(), self.default);
        // An `off` without quotes in YAML is `false`.
        let is_off = default == "off" && text == "false";
        let is_same_switch = bool::parse(default).is_some_and(|switch| bool::parse(text) == Some(switch));
        let is_same_length = Micros::parse(default).is_some_and(|length| Micros::parse(text) == Some(length));
        text.eq_ignore_ascii_case(default) || is_off || is_same_switch || is_same_length
    }
}

/// Lookup of a setting: returns the text that is given for a variable, if any.
type Lookup<'a> = &'a dyn Fn(&str) -> Option<String>;

/// A group of settings that is read together, with its rows.
struct SettingRows<T> {
    table: &'static [SettingRow],
    read: fn(Lookup<'_>, &mut Vec<InvalidSetting>) -> Option<T>,
}

/// Builds the [`SettingRows`] of a struct: one row for each field.
macro_rules! rows {
    ($name:ident { $($field:ident: $type:ty = $variable:expr, $default:literal, $does:expr;)+ }) => {
        crate::settings::SettingRows {
            table: &[$(crate::settings::row::<$type>($variable, $default, $does),)+],
            read: |given, wrong| {
                $(let $field = crate::settings::read_one::<$type>($variable, $default, given, wrong);)+
                Some($name { $($field: $field?,)+ })
            },
        }
    };
}
use rows;

macro_rules! settings {
    ($($field:ident: $type:ty = $variable:literal, $default:literal, $does:literal;)+) => {
        /// All settings, parsed and valid.
        #[derive(Clone, Debug)]
        pub struct Settings {
            $(#[doc = $does] pub $field: $type,)+
            /// Store that holds the counters.
            pub store: StoreChoice,
            /// Settings of traces; `None` if requests are not traced.
            pub traces: Option<TraceSettings>,
            /// Settings of the export of metrics over OTLP; `None` if it is off.
            pub otlp: Option<OtlpSettings>,
            /// Settings of statsd or DogStatsD; `None` if neither is on.
            pub statsd: Option<StatsdSettings>,
            /// TLS of the gRPC listener; `None` for plaintext.
            pub listener_tls: Option<ListenerTlsSettings>,
            /// Readers of the debug listener on other machines.
            pub admin: AdminSettings,
            /// Variables that are set and have no effect.
            pub unused: Vec<UnusedVariable>,
            /// Settings of the rule source.
            pub source: SourceSettings,
        }

        impl Settings {
            const PROCESS: &'static [SettingRow] = &[$(row::<$type>($variable, $default, $does),)+];

            /// Reads every setting through `given`.
            ///
            /// # Errors
            /// All settings that are invalid, unsupported by this version, or contradict each other.
            pub fn read(given: impl Fn(&str) -> Option<String>) -> Result<Self, InvalidSettings> {
                let mut wrong = unsupported(&given);
                wrong.extend(contradiction(&given));
                $(let $field = read_one::<$type>($variable, $default, &given, &mut wrong);)+
                let mut unused = unused::set(&given);
                let store = store::read(&given, &mut wrong);
                let exports = otlp::read(&given, &mut wrong, &mut unused);
                let (statsd, source) = (statsd::read(&given, &mut wrong), xds::read(&given, &mut wrong));
                let listener_tls = listener_tls::read(&given, &mut wrong, &mut unused);
                let admin = admin::read(&given, listener_tls.as_ref(), &mut wrong, &mut unused);
                match ($($field,)+ store, exports, statsd, source, listener_tls, admin) {
                    ($(Some($field),)+ Some(store), Some((traces, otlp)), Some(statsd), Some(source), Some(listener_tls), Some(admin))
                        if wrong.is_empty() =>
                    {
                        let mut all = Self { $($field,)+ store, traces, otlp, statsd, listener_tls, admin, unused, source };
                        all.statsd = all.statsd.filter(|_| !all.disable_stats);
                        all.otlp = all.otlp.filter(|_| !all.disable_stats);
                        Ok(all)
                    }
                    _ => Err(InvalidSettings(wrong)),
                }
            }
        }
    };
}

settings! {
    grpc_host: IpAddr = "GRPC_HOST", "0.0.0.0", "Address of the gRPC listener";
    grpc_port: u16 = "GRPC_PORT", "8081", "Port of the gRPC listener; 0 picks a free port";
    grpc_uds: SocketPath = "GRPC_UDS", "", "Path of a Unix socket on which gRPC is served in place of GRPC_HOST and GRPC_PORT; a socket left there on which nobody listens is replaced";
    grpc_uds_mode: SocketMode = "GRPC_UDS_MODE", "", "Permissions of the file of GRPC_UDS: a caller needs the right to write; empty: those that the umask leaves";
    host: IpAddr = "HOST", "0.0.0.0", "Address of the HTTP listener (/healthcheck, /json, /metrics)";
    port: u16 = "PORT", "8080", "Port of the HTTP listener; 0 picks a free port";
    json_max_body: BodySize = "JSON_MAX_BODY", "256KiB", "Maximum size of a request body of /json; a larger body gets HTTP status 413";
    callers_file: String = "CALLERS_FILE", "", "File that says which callers may ask about which domains, send limits and give hits back, by the names in their certificates; read again when it changes; empty: every caller may do all of this";
    json_access: JsonAccess = "JSON_ACCESS", "on", "Callers that may use /json: on: all; loopback: those on this machine; off: none; the others get HTTP status 403";
    json_rights: JsonRights = "JSON_RIGHTS", "auto", "Rights of callers over /json and over /check with from_gateway: none, where CALLERS_FILE is not set: override: they may send limits; refund: they may give hits back; auto: override if the rule files are those of RUNTIME_ROOT, as with envoyproxy/ratelimit, else none";
    debug_host: IpAddr = "DEBUG_HOST", "127.0.0.1", "Address of the debug listener (/rlconfig, /log_level, /v1/)";
    debug_port: u16 = "DEBUG_PORT", "6070", "Port of the debug listener; 0 picks a free port";
    workers: WorkerCount = "WORKERS", "auto", "Number of threads that answer calls; each thread has its own runtime";
    grpc_max_connection_age: Micros = "GRPC_MAX_CONNECTION_AGE", "24h", "Age (plus or minus a tenth) at which a gRPC connection gets a GOAWAY, so that its client reconnects; 0: never";
    grpc_max_idle_connections: IdleConnections = "GRPC_MAX_IDLE_CONNECTIONS", "auto", "Number of open gRPC connections above which connections without a call in flight are closed: first those that never had a call, then those that are idle longest; auto: a quarter of the memory that the process may use, at 36 KiB per connection, or 48 KiB over TLS";
    grpc_max_connection_age_grace: Micros = "GRPC_MAX_CONNECTION_AGE_GRACE", "1h", "Time that calls on a connection have to finish after the GOAWAY of GRPC_MAX_CONNECTION_AGE; 0: no limit";
    drain_timeout: Micros = "DRAIN_TIMEOUT", "5s", "Time that calls in flight have to finish after SIGTERM and DRAIN_DELAY";
    drain_delay: Micros = "DRAIN_DELAY", "0s", "Time after SIGTERM during which calls are still accepted while the health checks already fail, so that load balancers send new calls elsewhere";
    runtime_root: String = "RUNTIME_ROOT", "/srv/runtime_data/current", "Root directory of the rule files; used if the command line names no rule files";
    runtime_subdirectory: String = "RUNTIME_SUBDIRECTORY", "", "Directory below RUNTIME_ROOT";
    runtime_appdirectory: String = "RUNTIME_APPDIRECTORY", "config", "Directory of the rule files below RUNTIME_SUBDIRECTORY";
    runtime_ignoredotfiles: bool = "RUNTIME_IGNOREDOTFILES", "false", "Skips files and directories whose name begins with a dot";
    runtime_watch_root: bool = "RUNTIME_WATCH_ROOT", "true", "Reads every file below RUNTIME_SUBDIRECTORY whose path begins with the name of the app directory as a rule file; false: reads only the files below the app directory";
    merge_domain_config: bool = "MERGE_DOMAIN_CONFIG", "false", "Allows several files to extend one domain";
    rules_overlay: String = "RULES_OVERLAY", "", "File or directory with overlays: settings of the operator that are laid over the rules of every source; empty: none";
    values_root: String = "VALUES_ROOT", "", "Directory below which the lists of rule files and overlays (values_file) may be, beside the directories of these files; links are resolved first; empty: none";
    key_secret_file: String = "KEY_SECRET_FILE", "", "File with the secret for the digests of `sensitive` values, at least 16 random bytes; a new secret resets the counters of these values";
    memory_max_counters: CounterCount = "MEMORY_MAX_COUNTERS", "1000000", "Approximate maximum number of counters in memory; beyond it, the store evicts from a sample the counter whose loss changes the least";
    cache_key_prefix: KeyPrefix = "CACHE_KEY_PREFIX", "", "Prefix of every counter name in Redis, for a Redis that other applications use too";
    store_deadline: StoreDeadline = "STORE_DEADLINE", "auto", "Time that Redis has to answer before the failure policy answers; auto: half of the caller's timeout, at most 25ms (for a Redis further away: three round trips, at most 100ms), or 10ms for a caller without a timeout";
    lease_default: LeaseDefault = "LEASE_DEFAULT", "off", "Leases of limits whose rules set none: the share of a limit that all instances together may hold, and for how long, such as 5%,1s; off: none";
    replicas: ReplicaCount = "REPLICAS", "auto", "Number of instances that share the limits; under the policy local, each instance counts its share of a limit; auto: the number of instances that announce themselves in Redis";
    redis_health_check_active_connection: bool = "REDIS_HEALTH_CHECK_ACTIVE_CONNECTION", "false", "Fails the health checks while there is no connection to Redis";
    on_store_overload: OverloadPolicy = "ON_STORE_OVERLOAD", "", "Policy that answers while Redis or Tidegate is overloaded, unless a rule sets another one; empty: closed if ON_STORE_FAILURE is closed, else local";
    on_store_failure: Policy = "ON_STORE_FAILURE", "error", "Policy that answers while the store is unavailable, unless a rule sets another one";
    stop_cache_key_increment_when_overlimit: bool = "STOP_CACHE_KEY_INCREMENT_WHEN_OVERLIMIT", "false", "Makes all_or_nothing the default of charging in rule files";
    shadow_mode: bool = "SHADOW_MODE", "false", "Refuses no request; the statuses and metadata of the answer, `tidegate why` and `tap` show what would be refused";
    quota_mode: bool = "QUOTA_MODE", "false", "Makes every limit a quota: a request is refused only if all of its limits refuse";
    response_headers: HeaderStyle = "RESPONSE_HEADERS", "", "Style of the headers that report limits to clients; a refusal also gets Retry-After";
    refusal_body: BodyStyle = "REFUSAL_BODY", "", "Format of the body of a refusal; empty: only rules with their own message send a body";
    limit_response_headers_enabled: bool = "LIMIT_RESPONSE_HEADERS_ENABLED", "false", "Adds the headers of LIMIT_LIMIT_HEADER, LIMIT_REMAINING_HEADER and LIMIT_RESET_HEADER to answers, and no other, as envoyproxy/ratelimit does";
    limit_limit_header: HeaderText = "LIMIT_LIMIT_HEADER", "RateLimit-Limit", "Name of the header with the limit";
    limit_remaining_header: HeaderText = "LIMIT_REMAINING_HEADER", "RateLimit-Remaining", "Name of the header with the remaining hits";
    limit_reset_header: HeaderText = "LIMIT_RESET_HEADER", "RateLimit-Reset", "Name of the header with the seconds until the limit resets";
    max_held_calls: usize = "MAX_HELD_CALLS", "256", "Maximum number of calls that are held at once because a limit has delivery: hold; further calls are refused";
    response_dynamic_metadata: bool = "RESPONSE_DYNAMIC_METADATA", "false", "Adds the request and the metadata of its rules to answers as dynamic metadata";
    decision_metadata: bool = "DECISION_METADATA", "false", "Adds the decision to the dynamic metadata of answers: id, outcome, provenance and deciding rule";
    decision_id_header: bool = "DECISION_ID_HEADER", "false", "Sends the id of the decision with each refusal: in the header x-tidegate-decision-id, and as decision_id in the body if that is JSON";
    refusals_keep: RefusalsKeep = "REFUSALS_KEEP", "15m", "Time for which the last refusals are kept in memory for tidegate why, after the last refusal of the descriptor";
    use_prometheus: bool = "USE_PROMETHEUS", "false", "Opens a separate listener for the metrics; the HTTP listener serves them on /metrics in any case";
    prometheus_addr: ListenAddress = "PROMETHEUS_ADDR", ":9090", "Address of the metrics listener";
    prometheus_path: PagePath = "PROMETHEUS_PATH", "/metrics", "Path of the metrics on the metrics listener";
    near_limit_ratio: Ratio = "NEAR_LIMIT_RATIO", "0.8", "Share of a limit above which hits are counted as near the limit";
    disable_stats: bool = "DISABLE_STATS", "false", "Turns off the metrics of calls and decisions";
    log_level: LogSeverity = "LOG_LEVEL", "warn", "Minimum severity of log lines";
    log_format: LogFormat = "LOG_FORMAT", "text", "Format of log lines";
}

/// All invalid settings.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))]
pub struct InvalidSettings(pub Vec<InvalidSetting>);

/// One invalid setting.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum InvalidSetting {
    /// The setting does not accept the value.
    #[error("{variable} is {found:?}: expected {takes}")]
    Value {
        /// Name of the variable.
        variable: &'static str,
        /// The value, without the secrets in it.
        found: String,
        /// Accepted values.
        takes: &'static str,
    },
    /// The setting does not accept the value, which is that of a variable of the same name that Kubernetes sets beside a Service.
    #[error(
        "{variable} is {found:?}: expected {takes}; Kubernetes sets it beside a Service named {}: set enableServiceLinks: false in the spec of the pod, or {variable} in the env of the container",
        unknown::service_of(variable)
    )]
    OfKubernetes {
        /// Name of the variable.
        variable: &'static str,
        /// The value.
        found: String,
        /// Accepted values.
        takes: &'static str,
    },
    /// The setting does not accept the value; its name has a part that the operator chose.
    #[error("{variable} is {found:?}: expected {takes}")]
    Numbered {
        /// Name of the variable.
        variable: String,
        /// The value.
        found: String,
        /// Accepted values.
        takes: &'static str,
    },
    /// This version does not support the value.
    #[error("{variable} is {found:?}: {why}")]
    Unsupported {
        /// Name of the variable.
        variable: &'static str,
        /// The value.
        found: String,
        /// Advice for the operator.
        why: &'static str,
    },
    /// Settings of Redis are given without its address, and nothing asks for counters in memory.
    #[error("REDIS_URL is {}: set REDIS_URL, or set BACKEND_TYPE=memory, with which each instance counts for itself", without_redis(*is_empty, variables))]
    WithoutRedis {
        /// True if `REDIS_URL` is set to an empty text.
        is_empty: bool,
        /// Names of the other settings of Redis.
        variables: Vec<&'static str>,
    },
    /// Two settings exclude each other.
    #[error("{one} and {other} are both set: {why}")]
    Contradiction {
        /// Name of the first variable.
        one: &'static str,
        /// Name of the second variable.
        other: &'static str,
        /// Advice for the operator.
        why: &'static str,
    },
}

impl Settings {
    /// Returns the rows of all settings.
    pub fn table() -> impl Iterator<Item = &'static SettingRow> {
        let own = [Self::PROCESS].into_iter().chain(store::TABLES).chain(otlp::TABLES);
        own.chain([statsd::TABLE]).chain(xds::TABLES).chain([listener_tls::TABLE, admin::TABLE]).flatten()
    }

    /// Returns the policies that answer in place of the store where no rule says otherwise.
    pub fn policies(&self) -> StorePolicies {
        StorePolicies::default().inside(Some(self.on_store_failure.0), self.on_store_overload.0)
    }
}

/// Describes `REDIS_URL`, which has no address, and the settings of Redis beside it.
fn without_redis(is_empty: bool, variables: &[&str]) -> String {
    let url = if is_empty { "empty" } else { "not set" };
    match variables {
        [] => url.to_owned(),
        [variable] => format!("{url}, but {variable} is set"),
        all => format!("{url}, but {} are set", all.join(", ")),
    }
}

const fn row<T: Setting>(variable: &'static str, default: &'static str, does: &'static str) -> SettingRow {
    SettingRow { variable, default, takes: T::TAKES, does, is_secret: T::IS_SECRET }
}

fn read_one<T: Setting>(
    variable: &'static str,
    default: &'static str,
    given: Lookup<'_>,
    wrong: &mut Vec<InvalidSetting>,
) -> Option<T> {
    let is_given = |text: &String| !T::EMPTY_IS_DEFAULT || !text.trim().is_empty();
    let found = given(variable).filter(is_given).unwrap_or_else(|| default.to_owned());
    let parsed = T::parse(if T::KEEPS_BLANKS { &found } else { found.trim() });
    if parsed.is_none() {
        let (shown, takes) = (T::shown(&found), T::TAKES);
        wrong.push(match unknown::is_of_kubernetes(variable, &found) {
            true => InvalidSetting::OfKubernetes { variable, found: shown, takes },
            false => InvalidSetting::Value { variable, found: shown, takes },
        });
    }
    parsed
}

/// Returns the reference's settings that would change decisions or safety and that this version cannot honour. To ignore one
/// of them would silently do something else than the operator asked for.
fn unsupported(given: Lookup<'_>) -> Vec<InvalidSetting> {
    type Asks<'a> = &'a dyn Fn(&str) -> bool;
    let rows: [(&'static str, Asks<'_>, &'static str); 2] = [
        (
            "BACKEND_TYPE",
            &|text| text.eq_ignore_ascii_case("memcache"),
            "Memcached is not supported, because it cannot count exactly; set memory, or set redis and REDIS_URL",
        ),
        ("JSON_DOOR", &|_| true, "this setting is called JSON_ACCESS now, with the same values"),
    ];
    let asked = rows.into_iter().filter_map(|(variable, asks, why)| {
        let found = given(variable).filter(|text| !text.is_empty() && asks(text))?;
        Some(InvalidSetting::Unsupported { variable, found, why })
    });
    asked.collect()
}

/// Returns an error if both a header style and the reference's own three headers are set.
fn contradiction(given: Lookup<'_>) -> Option<InvalidSetting> {
    let (one, other) = ("RESPONSE_HEADERS", "LIMIT_RESPONSE_HEADERS_ENABLED");
    let has_style = given(one).is_some_and(|text| !text.trim().is_empty());
    let is_enabled = given(other).is_some_and(|text| bool::parse(text.trim()) == Some(true));
    let why = "unset one of them; RESPONSE_HEADERS=reference sends the same three headers, and Retry-After";
    (has_style && is_enabled).then_some(InvalidSetting::Contradiction { one, other, why })
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use super::{InvalidSetting, Settings};

    /// Runs `Settings::read` on some variables.
    pub(super) fn read(given: &[(&str, &str)]) -> Result<Settings, Vec<InvalidSetting>> {
        let find = |name: &str| given.iter().find(|(given, _)| *given == name).map(|(_, value)| (*value).to_owned());
        Settings::read(find).map_err(|wrong| wrong.0)
    }

    /// Returns the error messages for some variables.
    pub(super) fn wrong(given: &[(&str, &str)]) -> Vec<String> {
        read(given).expect_err("something is wrong").iter().map(ToString::to_string).collect()
    }

    #[test]
    fn the_defaults_are_valid() {
        assert!(read(&[]).is_ok());
    }

    #[test]
    fn every_wrong_setting_is_named_with_what_was_expected() {
        assert_eq!(
            wrong(&[("GRPC_PORT", "http"), ("SHADOW_MODE", "yes"), ("DRAIN_TIMEOUT", ""), ("REDIS_URL", "redis")]),
            [
                r#"GRPC_PORT is "http": expected a port from 0 to 65535"#,
                r#"DRAIN_TIMEOUT is "": expected a duration such as 5s, 250ms or 1h30m"#,
                r#"SHADOW_MODE is "yes": expected true or false"#,
                r#"REDIS_URL is "redis": expected HOST:PORT, the path of a socket, redis://[USER:PASSWORD@]HOST:PORT[/DATABASE], the same with rediss:// for TLS, or unix://PATH"#,
            ]
        );
    }

    #[test]
    fn what_this_version_cannot_do_stops_the_start() {
        assert_eq!(
            wrong(&[("BACKEND_TYPE", "memcache")]),
            [
                r#"BACKEND_TYPE is "memcache": Memcached is not supported, because it cannot count exactly; set memory, or set redis and REDIS_URL"#
            ]
        );
        assert_eq!(
            wrong(&[("JSON_DOOR", "off")]),
            [r#"JSON_DOOR is "off": this setting is called JSON_ACCESS now, with the same values"#]
        );
        assert!(read(&[("GRPC_SERVER_USE_TLS", "false"), ("CONFIG_TYPE", "FILE")]).is_ok());
    }

    #[test]
    fn two_ways_of_sending_headers_stop_the_start() {
        assert_eq!(
            wrong(&[("RESPONSE_HEADERS", "ietf"), ("LIMIT_RESPONSE_HEADERS_ENABLED", "true")]),
            [
                "RESPONSE_HEADERS and LIMIT_RESPONSE_HEADERS_ENABLED are both set: unset one of them; RESPONSE_HEADERS=reference sends the same three headers, and Retry-After"
            ]
        );
        assert!(read(&[("RESPONSE_HEADERS", "ietf"), ("LIMIT_RESPONSE_HEADERS_ENABLED", "false")]).is_ok());
        assert!(read(&[("RESPONSE_HEADERS", ""), ("LIMIT_RESPONSE_HEADERS_ENABLED", "true")]).is_ok());
    }

    #[test]
    fn addresses_may_be_version_six() {
        assert!(read(&[("HOST", "::"), ("GRPC_HOST", "[::1]")]).is_ok());
    }

    #[test]
    fn every_setting_has_a_name_of_its_own_and_a_flag_unless_it_is_secret() {
        let mut names: Vec<_> = Settings::table().map(|row| row.variable).collect();
        let all = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), all);
        let secrets: Vec<_> = Settings::table().filter(|row| row.flag().is_none()).map(|row| row.variable).collect();
        assert_eq!(
            secrets,
            [
                "REDIS_AUTH",
                "REDIS_SENTINEL_AUTH",
                "REDIS_PERSECOND_AUTH",
                "REDIS_PERSECOND_SENTINEL_AUTH",
                "OTEL_EXPORTER_OTLP_HEADERS",
                "OTEL_EXPORTER_OTLP_TRACES_HEADERS",
                "OTEL_EXPORTER_OTLP_METRICS_HEADERS",
                "CONFIG_GRPC_XDS_CLIENT_ADDITIONAL_HEADERS",
            ]
        );
    }

    #[test]
    fn refusals_are_kept_for_a_minute_to_an_hour() {
        let keep = |text| read(&[("REFUSALS_KEEP", text)]).map(|settings| settings.refusals_keep.0);
        for (text, seconds) in [("1m", 60), ("15m", 900), ("1h", 3_600)] {
            assert_eq!(keep(text).unwrap().get(), seconds * 1_000_000);
        }
        for text in ["59s", "61m", "0s", "15", "long"] {
            assert!(keep(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_store_has_a_deadline_that_a_caller_would_wait_for() {
        let deadline = |text| read(&[("STORE_DEADLINE", text)]).map(|settings| settings.store_deadline.0);
        assert_eq!(deadline("auto"), Ok(None));
        assert_eq!(deadline("1ms").unwrap().unwrap().get(), 1_000);
        assert_eq!(deadline("10s").unwrap().unwrap().get(), 10_000_000);
        for text in ["", "0", "999us", "10001ms", "5"] {
            assert!(deadline(text).is_err(), "{text}");
        }
        assert!(read(&[("REPLICAS", "0")]).is_err());
        assert!(read(&[("REPLICAS", "1.5")]).is_err());
        assert_eq!(read(&[("REPLICAS", "12")]).unwrap().replicas.0.map(NonZeroU32::get), Some(12));
        assert_eq!(read(&[("REPLICAS", "auto")]).unwrap().replicas, read(&[]).unwrap().replicas);
    }

    #[test]
    fn a_prefix_of_counters_chooses_no_slot() {
        assert_eq!(read(&[("CACHE_KEY_PREFIX", "team-a:")]).unwrap().cache_key_prefix.0, "team-a:");
        for text in ["{a}", "a{", "}"] {
            assert!(read(&[("CACHE_KEY_PREFIX", text)]).is_err(), "{text}");
        }
    }
}
