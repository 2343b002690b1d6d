//! Every setting of the process, once: its variable, its default, what it takes and what it does.
//!
//! A setting is read from its flag (`--grpc-port`), else from its environment variable (`GRPC_PORT`), else it has its
//! default. The names are the reference's wherever the meaning is.

use std::net::IpAddr;

use http::HeaderName;
use thiserror::Error;

use crate::model::{FailurePolicy, Micros};

/// One row of the table, for help texts and documentation.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// The environment variable.
    pub variable: &'static str,
    /// What holds when it is not set.
    pub default: &'static str,
    /// What it takes, in words.
    pub takes: &'static str,
    /// What it does.
    pub does: &'static str,
}

impl Row {
    /// The flag of the same name: `--grpc-port`.
    pub fn flag(&self) -> String {
        self.variable.to_ascii_lowercase().replace('_', "-")
    }
}

macro_rules! settings {
    ($($field:ident: $type:ty = $variable:literal, $default:literal, $does:literal;)+) => {
        /// The settings, read and valid.
        #[derive(Clone, Debug)]
        pub struct Settings {
            $(#[doc = $does] pub $field: $type,)+
        }

        impl Settings {
            /// The table.
            pub const TABLE: &'static [Row] = &[
                $(Row { variable: $variable, default: $default, takes: <$type as Setting>::TAKES, does: $does },)+
            ];

            /// Reads every setting from where `given` finds it.
            ///
            /// # Errors
            /// All settings that are wrong, and all that ask for what this version does not have.
            pub fn read(given: impl Fn(&str) -> Option<String>) -> Result<Self, InvalidSettings> {
                let mut wrong = unsupported(&given);
                $(let $field = read_one::<$type>($variable, $default, &given, &mut wrong);)+
                match ($($field,)+) {
                    ($(Some($field),)+) if wrong.is_empty() => Ok(Self { $($field,)+ }),
                    _ => Err(InvalidSettings(wrong)),
                }
            }
        }
    };
}

settings! {
    grpc_host: IpAddr = "GRPC_HOST", "0.0.0.0", "Address of the gRPC listener";
    grpc_port: u16 = "GRPC_PORT", "8081", "Port of the gRPC listener; 0 takes a free one";
    host: IpAddr = "HOST", "0.0.0.0", "Address of the HTTP listener (/healthcheck, /json)";
    port: u16 = "PORT", "8080", "Port of the HTTP listener; 0 takes a free one";
    debug_host: IpAddr = "DEBUG_HOST", "127.0.0.1", "Address of the debug listener (/rlconfig)";
    debug_port: u16 = "DEBUG_PORT", "6070", "Port of the debug listener; 0 takes a free one";
    workers: Workers = "WORKERS", "auto", "Threads that answer calls, each with a runtime of its own";
    grpc_max_connection_age: Micros = "GRPC_MAX_CONNECTION_AGE", "24h", "After this long, give or take a tenth, a gRPC connection is told to go away; 0 is never";
    grpc_max_connection_age_grace: Micros = "GRPC_MAX_CONNECTION_AGE_GRACE", "1h", "How long such a connection may finish its calls; 0 is for ever";
    drain_timeout: Micros = "DRAIN_TIMEOUT", "5s", "How long calls in flight may take to finish after SIGTERM";
    runtime_root: String = "RUNTIME_ROOT", "/srv/runtime_data/current", "Where rule files are looked for when none are named";
    runtime_subdirectory: String = "RUNTIME_SUBDIRECTORY", "", "Directory below RUNTIME_ROOT";
    runtime_appdirectory: String = "RUNTIME_APPDIRECTORY", "config", "Directory of the rule files below RUNTIME_SUBDIRECTORY";
    runtime_ignoredotfiles: bool = "RUNTIME_IGNOREDOTFILES", "false", "Whether files and directories whose name begins with a dot are passed over";
    runtime_watch_root: bool = "RUNTIME_WATCH_ROOT", "true", "Whether every file below RUNTIME_SUBDIRECTORY whose path begins with the app directory's name is a rule file, or only those in the app directory";
    merge_domain_config: bool = "MERGE_DOMAIN_CONFIG", "false", "Whether several files may extend one domain";
    memory_max_counters: CounterCount = "MEMORY_MAX_COUNTERS", "1000000", "About how many counters are held in memory; beyond it the earliest idle of a sample is forgotten";
    on_store_failure: Policy = "ON_STORE_FAILURE", "error", "What is answered while the store cannot be asked, where no rule says otherwise";
    stop_cache_key_increment_when_overlimit: bool = "STOP_CACHE_KEY_INCREMENT_WHEN_OVERLIMIT", "false", "Whether charging is all_or_nothing where no rule file says otherwise";
    local_cache_size_in_bytes: usize = "LOCAL_CACHE_SIZE_IN_BYTES", "0", "Taken from the reference; the embedded store needs no cache in front of it and gives the same answers";
    shadow_mode: bool = "SHADOW_MODE", "false", "Whether nothing is refused: refusals show in the statuses only";
    quota_mode: bool = "QUOTA_MODE", "false", "Whether every limit is a quota: a request is refused when all of its limits refuse";
    limit_response_headers_enabled: bool = "LIMIT_RESPONSE_HEADERS_ENABLED", "false", "Whether answers carry the three headers below";
    limit_limit_header: HeaderText = "LIMIT_LIMIT_HEADER", "RateLimit-Limit", "Header with the limit";
    limit_remaining_header: HeaderText = "LIMIT_REMAINING_HEADER", "RateLimit-Remaining", "Header with what remains of it";
    limit_reset_header: HeaderText = "LIMIT_RESET_HEADER", "RateLimit-Reset", "Header with the seconds until its reset";
    response_dynamic_metadata: bool = "RESPONSE_DYNAMIC_METADATA", "false", "Whether answers carry the request and the metadata of its rules as dynamic metadata";
    log_level: LogLevel = "LOG_LEVEL", "warn", "The least severity that is logged";
    log_format: LogFormat = "LOG_FORMAT", "text", "How a log line is written";
}

/// All settings that are wrong.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))]
pub struct InvalidSettings(pub Vec<InvalidSetting>);

/// One setting that is wrong.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum InvalidSetting {
    /// The value is not one that it takes.
    #[error("{variable} is {found:?}: expected {takes}")]
    Value {
        /// The variable.
        variable: &'static str,
        /// What it is.
        found: String,
        /// What it takes.
        takes: &'static str,
    },
    /// The value asks for something this version does not have.
    #[error("{variable} is {found:?}: {why}")]
    Unsupported {
        /// The variable.
        variable: &'static str,
        /// What it is.
        found: String,
        /// What to do instead.
        why: &'static str,
    },
}

/// A type that a setting can have.
trait Setting: Sized {
    const TAKES: &'static str;
    fn parse(text: &str) -> Option<Self>;
}

fn read_one<T: Setting>(
    variable: &'static str,
    default: &'static str,
    given: &impl Fn(&str) -> Option<String>,
    wrong: &mut Vec<InvalidSetting>,
) -> Option<T> {
    let found = given(variable).unwrap_or_else(|| default.to_owned());
    let parsed = T::parse(found.trim());
    if parsed.is_none() {
        wrong.push(InvalidSetting::Value { variable, found, takes: T::TAKES });
    }
    parsed
}

/// Settings of the reference that would change decisions or safety and that this version cannot honour: to start
/// without them would be to do something else than was asked.
fn unsupported(given: &impl Fn(&str) -> Option<String>) -> Vec<InvalidSetting> {
    const MEMORY_ONLY: &str = "this version keeps its counters in memory only; unset it, or set BACKEND_TYPE=memory to say that this is meant";
    let is_memory = given("BACKEND_TYPE").is_some_and(|backend| backend.eq_ignore_ascii_case("memory"));
    let asks_for_redis = |_: &str| !is_memory;
    type Asks<'a> = &'a dyn Fn(&str) -> bool;
    let rows: [(&'static str, Asks<'_>, &'static str); 6] = [
        ("BACKEND_TYPE", &asks_for_redis, MEMORY_ONLY),
        ("REDIS_URL", &asks_for_redis, MEMORY_ONLY),
        ("REDIS_PERSECOND_URL", &asks_for_redis, MEMORY_ONLY),
        (
            "CONFIG_TYPE",
            &|text| !text.eq_ignore_ascii_case("FILE"),
            "this version reads rules from files only; unset it, or set FILE",
        ),
        ("GRPC_UDS", &|_| true, "this version listens on TCP only; unset it"),
        (
            "GRPC_SERVER_USE_TLS",
            &|text| bool::parse(text) != Some(false),
            "this version serves plaintext only; unset it and end TLS in front",
        ),
    ];
    let asked = rows.into_iter().filter_map(|(variable, asks, why)| {
        let found = given(variable).filter(|text| !text.is_empty() && asks(text))?;
        Some(InvalidSetting::Unsupported { variable, found, why })
    });
    asked.collect()
}

impl Setting for IpAddr {
    const TAKES: &'static str = "an IP address such as 0.0.0.0, 127.0.0.1 or ::";
    fn parse(text: &str) -> Option<Self> {
        match text {
            "localhost" => Some(Self::from([127, 0, 0, 1])),
            _ => text.trim_start_matches('[').trim_end_matches(']').parse().ok(),
        }
    }
}

impl Setting for u16 {
    const TAKES: &'static str = "a port from 0 to 65535";
    fn parse(text: &str) -> Option<Self> {
        text.parse().ok()
    }
}

impl Setting for usize {
    const TAKES: &'static str = "a whole number";
    fn parse(text: &str) -> Option<Self> {
        text.parse().ok()
    }
}

/// How many counters a store holds. Each of its 64 shards holds its part, and fewer than a hundred in each would crowd
/// one shard while another has room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CounterCount(pub usize);

impl Setting for CounterCount {
    const TAKES: &'static str = "a whole number of at least 6400";
    fn parse(text: &str) -> Option<Self> {
        text.parse().ok().filter(|count| *count >= 6_400).map(Self)
    }
}

impl Setting for bool {
    const TAKES: &'static str = "true or false";
    /// As Go reads them.
    fn parse(text: &str) -> Option<Self> {
        match text {
            "1" | "t" | "T" | "true" | "TRUE" | "True" => Some(true),
            "0" | "f" | "F" | "false" | "FALSE" | "False" => Some(false),
            _ => None,
        }
    }
}

impl Setting for String {
    const TAKES: &'static str = "a text";
    fn parse(text: &str) -> Option<Self> {
        Some(text.to_owned())
    }
}

impl Setting for Micros {
    const TAKES: &'static str = "a duration such as 5s, 250ms or 1h30m";
    fn parse(text: &str) -> Option<Self> {
        Self::parse(text)
    }
}

/// How many threads answer calls; `None` for one per core.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Workers(pub Option<usize>);

impl Setting for Workers {
    const TAKES: &'static str = "a number of threads from 1 to 1024, or auto for one per core";
    fn parse(text: &str) -> Option<Self> {
        if text == "auto" {
            return Some(Self(None));
        }
        text.parse().ok().filter(|workers| (1..=1024).contains(workers)).map(|workers| Self(Some(workers)))
    }
}

/// A [`FailurePolicy`] as a setting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy(pub FailurePolicy);

impl Setting for Policy {
    const TAKES: &'static str = "error, open, closed or local";
    fn parse(text: &str) -> Option<Self> {
        FailurePolicy::ALL.into_iter().find(|(name, _)| *name == text).map(|(_, policy)| Self(policy))
    }
}

/// The name of a header, spelled as the operator did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeaderText(pub String);

impl Setting for HeaderText {
    const TAKES: &'static str = "a header name of letters, digits and dashes";
    fn parse(text: &str) -> Option<Self> {
        HeaderName::try_from(text).ok().map(|_| Self(text.to_owned()))
    }
}

/// The least severity that is logged, by the reference's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogLevel(pub tracing::Level);

impl Setting for LogLevel {
    const TAKES: &'static str = "trace, debug, info, warn or error";
    fn parse(text: &str) -> Option<Self> {
        Some(Self(match text.to_ascii_lowercase().as_str() {
            "trace" => tracing::Level::TRACE,
            "debug" => tracing::Level::DEBUG,
            "info" => tracing::Level::INFO,
            "warn" | "warning" => tracing::Level::WARN,
            "error" | "fatal" | "panic" => tracing::Level::ERROR,
            _ => return None,
        }))
    }
}

/// How a log line is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    /// For people.
    Text,
    /// For programs: one JSON object per line.
    Json,
}

impl Setting for LogFormat {
    const TAKES: &'static str = "text or json";
    fn parse(text: &str) -> Option<Self> {
        match text {
            "text" => Some(Self::Text),
            "json" => Some(Self::Json),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{InvalidSetting, Settings};

    fn read(given: &[(&str, &str)]) -> Result<Settings, Vec<InvalidSetting>> {
        let find = |name: &str| given.iter().find(|(given, _)| *given == name).map(|(_, value)| (*value).to_owned());
        Settings::read(find).map_err(|wrong| wrong.0)
    }

    #[test]
    fn the_defaults_are_valid() {
        assert!(read(&[]).is_ok());
    }

    #[test]
    fn every_wrong_setting_is_named_with_what_was_expected() {
        let wrong =
            read(&[("GRPC_PORT", "http"), ("SHADOW_MODE", "yes"), ("DRAIN_TIMEOUT", "")]).expect_err("all wrong");
        let text: Vec<_> = wrong.iter().map(ToString::to_string).collect();
        assert_eq!(
            text,
            [
                r#"GRPC_PORT is "http": expected a port from 0 to 65535"#,
                r#"DRAIN_TIMEOUT is "": expected a duration such as 5s, 250ms or 1h30m"#,
                r#"SHADOW_MODE is "yes": expected true or false"#,
            ]
        );
    }

    #[test]
    fn what_this_version_cannot_do_stops_the_start() {
        assert!(read(&[("REDIS_URL", "redis:6379")]).is_err());
        assert!(read(&[("REDIS_URL", "redis:6379"), ("BACKEND_TYPE", "memory")]).is_ok());
        assert!(read(&[("GRPC_SERVER_USE_TLS", "true")]).is_err());
        assert!(read(&[("GRPC_SERVER_USE_TLS", "false"), ("CONFIG_TYPE", "FILE")]).is_ok());
    }

    #[test]
    fn addresses_may_be_version_six() {
        assert!(read(&[("HOST", "::"), ("GRPC_HOST", "[::1]")]).is_ok());
    }
}
