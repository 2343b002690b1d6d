//! `tidegate serve`: runs the service.

use std::process::ExitCode;

use clap::{Arg, ArgMatches, Command};

use super::{files, paths};
use crate::app;
use crate::settings::Settings;
use crate::source::file::find::Location;

pub(super) fn command() -> Command {
    let flags = Settings::table().filter_map(|row| {
        let flag = row.flag()?;
        let default = if row.default.is_empty() { "empty" } else { row.default };
        let argument = Arg::new(row.variable)
            .long(flag)
            .value_name("VALUE")
            .help_heading("Settings (each is an environment variable too)")
            .hide_default_value(true)
            .help(format!("{}. Takes {}. [env: {}] [default: {default}]", row.does, row.takes, row.variable));
        Some(argument)
    });
    let secrets = Settings::table().filter(|row| row.is_secret);
    let secrets = secrets.map(|row| format!("\n  {}. Takes {}. [env: {}]", row.does, row.takes, row.variable));
    Command::new("serve")
        .about("Answer ShouldRateLimit over gRPC, and the same as JSON over HTTP")
        .long_about(
            "Answers ShouldRateLimit over gRPC, and the same as JSON over HTTP.\n\nRules come from the files and directories named here or, when none are, from\nRUNTIME_ROOT/RUNTIME_SUBDIRECTORY/RUNTIME_APPDIRECTORY, as with envoyproxy/ratelimit.\nSIGTERM stops it: not ready at once, calls in flight answered, exit code 0; a second one stops it at once.",
        )
        .arg(files().num_args(0..))
        .args(flags)
        .after_help(format!(
            "Secrets (environment variables only, for everyone can read a command line):{}",
            secrets.collect::<String>()
        ))
}

pub(super) fn run(matches: &ArgMatches) -> anyhow::Result<ExitCode> {
    // A variable without a row in the settings table has no flag.
    let flag = |name: &str| matches.try_get_one::<String>(name).ok().flatten().cloned();
    let given = |name: &str| flag(name).or_else(|| app::environment(name));
    let settings = Settings::read(given)?;
    let paths = paths(matches);
    let source = if paths.is_empty() { app::runtime_location(&settings) } else { Location::Paths(paths) };
    app::serve(&settings, &source)
}
