//! `tidegate check`: reports the errors and warnings in rule files.

use std::process::ExitCode;

use clap::{ArgMatches, Command};

use super::with_rules;
use crate::app::summary;
use crate::rulefile::CompiledRules;

pub(super) fn command() -> Command {
    let command = Command::new("check")
        .about("Report every error in rule files and overlays, with file, line and column")
        .long_about(
            "Reads rule files exactly as `tidegate serve` does, and reports every error and warning. `--overlay` checks an overlay over rule files, over a recorded push (`--push`), or alone.\nExit code 0: the rules load, perhaps with warnings. 1: the rules do not load. 2: the files cannot be read.\nMERGE_DOMAIN_CONFIG=true allows several files to extend one domain, as in `tidegate serve`.",
        );
    with_rules(command)
}

pub(super) fn run(matches: &ArgMatches) -> anyhow::Result<ExitCode> {
    let (files, loaded) = super::load(matches)?;
    match loaded {
        Ok(CompiledRules { rules, warnings }) => {
            warnings.iter().for_each(|warning| eprintln!("{warning}"));
            let with = if warnings.is_empty() {
                String::new()
            } else {
                format!(", with {}", counted(warnings.len(), "warning"))
            };
            super::print(&format_args!("ok{with}: {}\n", summary::counted(&rules, files)))?;
            Ok(ExitCode::SUCCESS)
        }
        Err(invalid) => {
            let errors = invalid.errors();
            let warnings = invalid.problems.len() - errors;
            let and = if warnings == 0 { String::new() } else { format!(", {}", counted(warnings, "warning")) };
            eprintln!("{invalid}\n{}{and}", counted(errors, "error"));
            Ok(ExitCode::FAILURE)
        }
    }
}

fn counted(number: usize, what: &str) -> String {
    format!("{number} {what}{}", if number == 1 { "" } else { "s" })
}
