//! `tidegate check`: what is wrong with rule files.

use std::process::ExitCode;

use clap::{ArgMatches, Command};

use super::{FAILED, files, paths};
use crate::app::{self, summary};
use crate::rules::{self, Loaded};
use crate::settings::Settings;
use crate::source::file::Source;

pub(super) fn command() -> Command {
    Command::new("check")
        .about("Say everything that is wrong with rule files, with file, line and column")
        .long_about(
            "Reads rule files exactly as `tidegate serve` does and says everything that is wrong with them.\nExit code 0: they load, perhaps with warnings. 1: they do not. 2: they cannot be read.\nMERGE_DOMAIN_CONFIG=true lets several files extend one domain, here as there.",
        )
        .arg(files().num_args(1..).required(true))
}

pub(super) fn run(matches: &ArgMatches) -> anyhow::Result<ExitCode> {
    let settings = Settings::read(app::environment)?;
    let files = match Source::Paths(paths(matches)).read() {
        Ok(files) => files,
        Err(wrong) => {
            wrong.iter().for_each(|wrong| eprintln!("{wrong}"));
            return Ok(ExitCode::from(FAILED));
        }
    };
    match rules::load(&files, app::options(&settings)) {
        Ok(Loaded { rules, warnings }) => {
            warnings.iter().for_each(|warning| eprintln!("{warning}"));
            println!("ok: {}", summary::counted(&rules, files.len()));
            Ok(ExitCode::SUCCESS)
        }
        Err(invalid) => {
            eprintln!("{invalid}");
            let errors = invalid.errors();
            eprintln!("{errors} {}", if errors == 1 { "error" } else { "errors" });
            Ok(ExitCode::FAILURE)
        }
    }
}
