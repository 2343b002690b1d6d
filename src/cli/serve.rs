//! `tidegate serve`: runs the service.

use std::process::ExitCode;

use clap::{Arg, ArgAction, ArgMatches, Command};

use super::{FAILED, files, paths};
use crate::app;
use crate::settings::{LogFormat, Settings};

/// Settings that `-h` shows: those that a first installation chooses. `--help` shows all.
const SHORT: [&str; 8] = [
    "GRPC_PORT",
    "PORT",
    "REDIS_TYPE",
    "REDIS_URL",
    "ON_STORE_FAILURE",
    "RESPONSE_HEADERS",
    "SHADOW_MODE",
    "LOG_LEVEL",
];
/// End of the text of `-h`.
const AFTER_SHORT: &str = "These are the settings that a first installation chooses. `tidegate serve --help` has all, with what each accepts.\n\nExamples:\n  Counters in memory:\n    tidegate serve rules.yaml\n  Counters in Redis, for several instances:\n    REDIS_URL=127.0.0.1:6379 tidegate serve rules.yaml";

/// Name of the argument whose values are arguments that envoyproxy/ratelimit was given, which it ignores.
pub(super) const IGNORED: &str = "ignored";

pub(super) fn command() -> Command {
    let flags = Settings::table().filter_map(|row| {
        let flag = row.flag()?;
        let default = if row.default.is_empty() { "empty" } else { row.default };
        let argument = Arg::new(row.variable)
            .long(flag)
            .value_name("VALUE")
            .help_heading("Settings (each is also an environment variable)")
            .hide_default_value(true)
            .hide_short_help(!SHORT.contains(&row.variable))
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
        .after_help(AFTER_SHORT)
        .after_long_help(format!(
            "Secrets (environment variables only, because every user of the machine can read command lines):{}",
            secrets.collect::<String>()
        ))
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
