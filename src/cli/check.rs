//! `tidegate check`: what is wrong with rule files.

use std::process::ExitCode;

use clap::{ArgMatches, Command};

use super::files;
use crate::app::summary;
use crate::rules::Loaded;

pub(super) fn command() -> Command {
    Command::new("check")
        .about("Say everything that is wrong with rule files, with file, line and column")
        .long_about(
            "Reads rule files exactly as `tidegate serve` does and says everything that is wrong with them.\nExit code 0: they load, perhaps with warnings. 1: they do not. 2: they cannot be read.\nMERGE_DOMAIN_CONFIG=true lets several files extend one domain, here as there.",
        )
        .arg(files().num_args(1..).required(true))
}

pub(super) fn run(matches: &ArgMatches) -> anyhow::Result<ExitCode> {
    let (files, loaded) = super::load(matches)?;
    match loaded {
        Ok(Loaded { rules, warnings, .. }) => {
            warnings.iter().for_each(|warning| eprintln!("{warning}"));
            println!("ok: {}", summary::counted(&rules, files));
            Ok(ExitCode::SUCCESS)
        }
        Err(invalid) => {
            let errors = invalid.errors();
            eprintln!("{invalid}\n{errors} {}", if errors == 1 { "error" } else { "errors" });
            Ok(ExitCode::FAILURE)
        }
    }
}
