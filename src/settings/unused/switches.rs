//! Settings that have no effect because the switch that they belong to is off.

use super::{UnusedVariable, given_true};
use crate::settings::{Lookup, SettingRow, Settings};

/// Settings that a switch puts out of effect. A name that ends in `*` is a prefix.
struct Switched {
    is_off: bool,
    why: &'static str,
    settings: &'static [&'static str],
}

/// Returns the settings that are set to another value than their default and whose switch is off.
pub(super) fn set(given: Lookup<'_>) -> impl Iterator<Item = UnusedVariable> {
    let is_of = |name: &str, variable: &str| match name.strip_suffix('*') {
        Some(prefix) => variable.starts_with(prefix),
        None => variable == name,
    };
    let is_changed =
        |row: &&SettingRow| given(row.variable).is_some_and(|text| !text.trim().eq_ignore_ascii_case(row.default));
    let mut unused = Vec::new();
    let all = of_telemetry(given).into_iter().chain(of_decisions(given));
    for Switched { why, settings, .. } in all.filter(|switched| switched.is_off) {
        let rows = Settings::table().filter(|row| settings.iter().any(|name| is_of(name, row.variable)));
        unused.extend(rows.filter(is_changed).map(|row| UnusedVariable { variable: row.variable, why }));
    }
    unused.into_iter()
}

/// Returns the text of a variable, without spaces around it and in lower case.
fn text(given: Lookup<'_>, variable: &str) -> String {
    given(variable).unwrap_or_default().trim().to_ascii_lowercase()
}

/// Returns the switches of statistics, metrics and traces.
fn of_telemetry(given: Lookup<'_>) -> [Switched; 7] {
    let text = |variable: &str| text(given, variable);
    let (is_true, is_set) = (|variable: &str| given_true(given, variable), |variable: &str| !text(variable).is_empty());
    let has_dog = is_true("USE_DOG_STATSD");
    let has_statsd = if is_set("USE_STATSD") { is_true("USE_STATSD") } else { is_set("STATSD_HOST") && !has_dog };
    let has_traces = is_true("TRACING_ENABLED");
    [
        Switched {
            is_off: !has_statsd && !has_dog,
            why: "neither statsd nor DogStatsD is on; set USE_STATSD or USE_DOG_STATSD to true",
            settings: &["STATSD_PROTOCOL", "EXTRA_TAGS", "USE_DOG_STATSD_MOGRIFIERS"],
        },
        Switched {
            // An explicit false says so itself.
            is_off: !has_statsd && !has_dog && !is_set("USE_STATSD"),
            why: "neither statsd nor DogStatsD is on; set USE_STATSD or USE_DOG_STATSD to true",
            settings: &["STATSD_PORT", "STATS_FLUSH_INTERVAL"],
        },
        Switched {
            is_off: has_statsd && !has_dog,
            why: "it is for DogStatsD; set USE_DOG_STATSD=true",
            settings: &["USE_DOG_STATSD_MOGRIFIERS"],
        },
        Switched {
            is_off: has_dog && !text("STATSD_PROTOCOL").starts_with("udp"),
            why: "DogStatsD is always sent over UDP, in the reference too",
            settings: &["STATSD_PROTOCOL"],
        },
        Switched {
            is_off: !is_true("USE_PROMETHEUS"),
            why: "metrics are on /metrics of the HTTP listener; set USE_PROMETHEUS=true for a listener of their own",
            settings: &["PROMETHEUS_ADDR", "PROMETHEUS_PATH"],
        },
        Switched {
            is_off: !has_traces,
            why: "requests are not traced; set TRACING_ENABLED=true",
            settings: &["TRACING_SAMPLING_RATE"],
        },
        Switched {
            is_off: !has_traces && text("OTEL_METRICS_EXPORTER") != "otlp",
            why: "requests are not traced; set TRACING_ENABLED=true",
            settings: &["TRACING_EXPORTER_PROTOCOL", "TRACING_SERVICE_*"],
        },
    ]
}

/// Returns the switches of Redis, of the rule source and of answers.
fn of_decisions(given: Lookup<'_>) -> [Switched; 4] {
    let text = |variable: &str| text(given, variable);
    let is_true = |variable: &str| given_true(given, variable);
    let has_redis = !text("REDIS_URL").is_empty() && text("BACKEND_TYPE") != "memory";
    let is_apart = is_true("REDIS_PERSECOND");
    let is_secure =
        |prefix: &str| is_true(&format!("{prefix}TLS")) || text(&format!("{prefix}URL")).starts_with("rediss:");
    [
        Switched {
            is_off: has_redis && !is_apart,
            why: "REDIS_PERSECOND is not true, so limits per second are in the Redis of all others",
            settings: &["REDIS_PERSECOND_*"],
        },
        Switched {
            is_off: has_redis && !is_secure("REDIS_") && !(is_apart && is_secure("REDIS_PERSECOND_")),
            why: "no connection to Redis uses TLS; set REDIS_TLS=true",
            settings: &[
                "REDIS_TLS_CLIENT_CERT",
                "REDIS_TLS_CLIENT_KEY",
                "REDIS_TLS_CACERT",
                "REDIS_TLS_SKIP_HOSTNAME_VERIFICATION",
            ],
        },
        Switched {
            is_off: text("CONFIG_TYPE") != "grpc_xds_sotw",
            why: "rules are from files; set CONFIG_TYPE=GRPC_XDS_SOTW for a control plane",
            settings: &["CONFIG_GRPC_XDS_*", "XDS_*", "STATE_MAX_AGE", "FORCE_START_WITHOUT_INITIAL_CONFIG"],
        },
        Switched {
            is_off: !is_true("LIMIT_RESPONSE_HEADERS_ENABLED") && text("RESPONSE_HEADERS") != "reference",
            why: "these headers are not sent; set LIMIT_RESPONSE_HEADERS_ENABLED=true",
            settings: &["LIMIT_LIMIT_HEADER", "LIMIT_REMAINING_HEADER", "LIMIT_RESET_HEADER"],
        },
    ]
}
