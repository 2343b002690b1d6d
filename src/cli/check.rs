//! `tidegate check`: reports the errors and warnings in rule files.

use std::fmt;
use std::process::ExitCode;

use clap::{Arg, ArgMatches, Command};

use super::with_rules;
use crate::app::{callers, summary};
use crate::model::counted;
use crate::rulefile::{CompiledRules, InvalidRules};
use crate::rules::RuleSet;

pub(super) fn command() -> Command {
    let command = Command::new("check")
        .about("Report every error in rule files and overlays, with file, line and column")
        .long_about(
            "Reads rule files exactly as `tidegate serve` does, and reports every error and warning. `--overlay` checks an overlay over rule files, over a recorded push (`--push`), or alone. `--callers` checks a file of callers (CALLERS_FILE), with rules or alone.\nExit code 0: the rules load, perhaps with warnings. 1: the rules do not load. 2: the files cannot be read.\nWithout FILE, it reads the directory of RUNTIME_ROOT, RUNTIME_SUBDIRECTORY and RUNTIME_APPDIRECTORY, in which every file is a rule file, as in `tidegate serve`.\nMERGE_DOMAIN_CONFIG=true allows several files to extend one domain, as in `tidegate serve`.",
        );
    with_rules(command).arg(
        Arg::new("callers")
            .long("callers")
            .value_name("FILE")
            .help("File of callers that is checked too: CALLERS_FILE of `tidegate serve`"),
    )
}

pub(super) fn run(matches: &ArgMatches) -> anyhow::Result<ExitCode> {
    let callers = matches.get_one::<String>("callers");
    let has_rules = ["FILE", "overlay", "push"].iter().any(|name| matches.contains_id(name));
    let rules = (has_rules || callers.is_none()).then(|| super::load(matches)).transpose()?;
    let loaded = rules.as_ref().and_then(|(_, loaded)| Some(&loaded.as_ref().ok()?.rules));
    let are_callers_valid = callers.map_or(Ok(true), |path| check_callers(path, loaded))?;
    let are_rules_valid = rules.map_or(Ok(true), |(files, loaded)| {
        report(loaded.map(|CompiledRules { rules, warnings }| (summary::counted(&rules, files), warnings)))
    })?;
    Ok(if are_callers_valid && are_rules_valid { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Checks a file of callers, and the domains in it against `rules`. Returns true if it is valid.
fn check_callers(path: &str, rules: Option<&RuleSet>) -> anyhow::Result<bool> {
    report(callers::check(path)?.map(|(callers, mut warnings)| {
        if let Some(rules) = rules {
            let unknown = callers.domains().into_iter().filter(|domain| !rules.domains().contains(domain));
            warnings.extend(unknown.map(|domain| {
                format!("{path}: warning: The domain `{}` is granted, and no rule is for it.", domain.escape_debug())
            }));
        }
        (format!("{} of callers in {path}", counted(callers.grants().len(), "item")), warnings)
    }))
}

/// Prints what was loaded, with its warnings, or all errors. Returns true in the first case.
fn report(loaded: Result<(String, Vec<impl fmt::Display>), InvalidRules>) -> anyhow::Result<bool> {
    match loaded {
        Ok((what, warnings)) => {
            warnings.iter().for_each(|warning| eprintln!("{warning}"));
            let with = if warnings.is_empty() {
                String::new()
            } else {
                format!(", with {}", counted(warnings.len(), "warning"))
            };
            super::print(&format_args!("ok{with}: {what}\n"))?;
            Ok(true)
        }
        Err(invalid) => {
            let errors = invalid.errors();
            let warnings = invalid.problems.len() - errors;
            let and = if warnings == 0 { String::new() } else { format!(", {}", counted(warnings, "warning")) };
            eprintln!("{invalid}\n{}{and}", counted(errors, "error"));
            Ok(false)
        }
    }
}
