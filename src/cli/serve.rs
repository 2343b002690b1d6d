//! `tidegate serve`: runs the service.

use std::process::ExitCode;

use clap::{Arg, ArgAction, ArgMatches, Command};

use super::{FAILED, files, paths};
use crate::app;
use crate::settings::{LogFormat, Settings};

/// Settings that `-h` shows: those that a first installation chooses. `--help` shows all.
const SHORT: usize = 8;
/// Settings that `--help` shows first: those that most installations set sooner or later. The first ones are those of `-h`.
const FIRST: [&str; 20] = [
    "GRPC_PORT",
    "PORT",
    "REDIS_TYPE",
    "REDIS_URL",
    "ON_STORE_FAILURE",
    "RESPONSE_HEADERS",
    "SHADOW_MODE",
    "LOG_LEVEL",
    "LOG_FORMAT",
    "REDIS_TLS",
    "REDIS_AUTH_FILE",
    "STORE_DEADLINE",
    "LEASE_DEFAULT",
    "REFUSAL_BODY",
    "DECISION_METADATA",
    "CALLERS_FILE",
    "GRPC_SERVER_USE_TLS",
    "CONFIG_TYPE",
    "RULES_OVERLAY",
    "TRACING_ENABLED",
];
const FIRST_HEADING: &str = "Settings that matter first (each is also an environment variable)";
/// Groups of the others: the heading, and the beginnings of the names. The longest beginning that fits decides.
const GROUPS: [(&str, &[&str]); 10] = [
    (
        "Listeners and calls",
        &["GRPC_", "HOST", "PORT", "DEBUG_", "JSON_", "CALLERS_", "ADMIN_", "WORKERS", "DRAIN_", "MAX_HELD_"],
    ),
    ("TLS of the listeners", &["GRPC_SERVER_", "GRPC_CLIENT_", "HTTP_SERVER_", "DEBUG_SERVER_"]),
    ("Rule files", &["RUNTIME_", "MERGE_", "RULES_", "VALUES_", "KEY_SECRET_"]),
    ("Rules of a control plane", &["CONFIG_", "XDS_", "STATE_", "FORCE_START_", "HEALTHY_"]),
    (
        "Counters and policies",
        &[
            "BACKEND_",
            "MEMORY_",
            "CACHE_",
            "STORE_",
            "LEASE_",
            "REPLICAS",
            "ON_STORE_",
            "STOP_CACHE_",
            "SHADOW_",
            "QUOTA_",
        ],
    ),
    ("Redis", &["REDIS_"]),
    ("Answers and records", &["RESPONSE_", "REFUSAL", "LIMIT_", "DECISION_"]),
    (
        "Metrics and statistics",
        &[
            "USE_PROMETHEUS",
            "PROMETHEUS_",
            "NEAR_LIMIT_",
            "DISABLE_STATS",
            "USE_STATSD",
            "USE_DOG_",
            "STATS",
            "EXTRA_TAGS",
            "DD_",
            "OTEL_METRIC",
            "OTEL_EXPORTER_OTLP_METRICS_",
        ],
    ),
    ("Traces, and what metrics over OTLP share with them", &["TRACING_", "OTEL_"]),
    ("Log", &["LOG_"]),
];
const EXAMPLES: &str = "Examples:\n  Counters in memory:\n    tidegate serve rules.yaml\n  Counters in Redis, for several instances:\n    REDIS_URL=127.0.0.1:6379 tidegate serve rules.yaml";

/// Name of the argument whose values are arguments that envoyproxy/ratelimit was given, which it ignores.
pub(super) const IGNORED: &str = "ignored";

pub(super) fn command() -> Command {
    let mut rows: Vec<_> = Settings::table().collect();
    rows.sort_by_key(|row| position(row.variable));
    let flags = rows.into_iter().filter_map(|row| {
        let (flag, (place, heading)) = (row.flag()?, position(row.variable));
        let default = if row.default.is_empty() { "empty" } else { row.default };
        let argument = Arg::new(row.variable)
            .long(flag)
            .value_name("VALUE")
            .help_heading(heading)
            .hide_default_value(true)
            .hide_short_help(place >= SHORT)
            .help(format!("{} [default: {default}]", row.does.split(';').next().unwrap_or_default()))
            .long_help(format!("{}. Accepts {}. [env: {}] [default: {default}]", row.does, row.takes, row.variable));
        Some(argument)
    });
    let secrets = Settings::table().filter(|row| row.is_secret);
    let secrets = secrets.map(|row| format!("\n  {}. Accepts {}. [env: {}]", row.does, row.takes, row.variable));
    Command::new("serve")
        .about("Run the service: answer ShouldRateLimit over gRPC, and as JSON over HTTP")
        .long_about(
            "Runs the service: answers ShouldRateLimit over gRPC, and as JSON over HTTP.\n\nReads rules from the files and directories on the command line. Without any, reads them from\nRUNTIME_ROOT/RUNTIME_SUBDIRECTORY/RUNTIME_APPDIRECTORY, as envoyproxy/ratelimit does.\nAt SIGTERM the health checks fail at once, calls in flight finish, and the exit code is 0. A second SIGTERM stops it\nat once.",
        )
        .arg(files().num_args(0..))
        .arg(Arg::new(IGNORED).long(IGNORED).hide(true).action(ArgAction::Append).num_args(1..).allow_hyphen_values(true))
        .args(flags)
        .after_help(format!(
            "These are the settings that a first installation chooses. `tidegate serve --help` has all, with what each accepts.\n\n{EXAMPLES}"
        ))
        .after_long_help(format!(
            "Secrets (environment variables only, because every user of the machine can read command lines):{}\n\n{EXAMPLES}",
            secrets.collect::<String>()
        ))
}

/// Returns the place of a setting in the help, and the heading of its group.
fn position(variable: &str) -> (usize, &'static str) {
    if let Some(place) = FIRST.iter().position(|first| *first == variable) {
        return (place, FIRST_HEADING);
    }
    let fits =
        |begins: &[&str]| begins.iter().filter(|begin| variable.starts_with(**begin)).map(|begin| begin.len()).max();
    let groups =
        GROUPS.iter().enumerate().filter_map(|(place, (heading, begins))| Some((fits(begins)?, place, *heading)));
    let (_, place, heading) = groups.max_by_key(|(length, ..)| *length).unwrap_or((0, GROUPS.len(), "Other settings"));
    (FIRST.len() + place, heading)
}

pub(super) fn run(matches: &ArgMatches) -> anyhow::Result<ExitCode> {
    serve(matches).or_else(|error| match is_json(Some(matches)) {
        true => {
            app::failed(&error);
            Ok(ExitCode::from(FAILED))
        }
        false => Err(error),
    })
}

fn serve(matches: &ArgMatches) -> anyhow::Result<ExitCode> {
    let settings = Settings::read(|name| given(Some(matches), name))?;
    let ignored: Vec<String> = matches.get_many(IGNORED).into_iter().flatten().cloned().collect();
    app::serve(&settings, &app::source_choice(&settings, paths(matches))?, &ignored)
}

/// Returns the text of a setting: its flag, else its variable. A variable without a row in the settings table has no flag.
fn given(matches: Option<&ArgMatches>, name: &str) -> Option<String> {
    let flag = || matches?.try_get_one::<String>(name).ok().flatten().cloned();
    flag().or_else(|| app::environment(name))
}

/// Returns true if log lines are JSON, also if other settings are wrong.
pub(super) fn is_json(matches: Option<&ArgMatches>) -> bool {
    given(matches, "LOG_FORMAT").is_some_and(|text| LogFormat::named(text.trim()) == Some(LogFormat::Json))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_setting_is_in_a_group_of_the_help() {
        for row in Settings::table() {
            assert_ne!(
                position(row.variable).1,
                "Other settings",
                "{}: add the beginning of its name to GROUPS",
                row.variable
            );
        }
        for first in FIRST {
            assert!(Settings::table().any(|row| row.variable == first), "{first}");
        }
        for (variable, heading) in [
            ("GRPC_SERVER_TLS_CERT", "TLS of the listeners"),
            ("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "Metrics and statistics"),
            ("OTEL_EXPORTER_OTLP_ENDPOINT", "Traces, and what metrics over OTLP share with them"),
            ("REDIS_URL", FIRST_HEADING),
        ] {
            assert_eq!(position(variable).1, heading, "{variable}");
        }
    }
}
