//! `tidegate test`: runs test cases on rules, on a virtual clock.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, bail};
use clap::builder::PossibleValuesParser;
use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};

use self::run::{CaseResult, run_case};
use crate::app::simulator::Simulator;
use crate::rulefile::cases::{self, CaseFile};
use crate::rulefile::{File, InvalidRules};
use crate::rules::live::LiveRules;
use crate::source::file::find::Location;

mod answer;
mod report;
mod run;

pub(super) fn command() -> Command {
    Command::new("test")
        .about("Run test cases on rules, on a virtual clock; exit code 0: all pass, 1: a case fails, 2: a file is wrong")
        .long_about(
            "Runs test cases: requests, their times, and the expected answers. Nothing is sent and nothing waits: the requests are decided in this process, by the limiter of `tidegate serve` with counters in memory, on a virtual clock. Each case begins with empty counters, at a moment at which a window of every unit begins.\nExit code 0: all cases pass. 1: a case fails. 2: a file is wrong or cannot be read.",
        )
        .after_help(
            "Example, cases.yaml beside rules.yaml:\n  rules: rules.yaml\n  domain: edge\n  cases:\n    - name: the sixth request of a user within a minute is refused\n      steps:\n        - { descriptors: [{ user: ann }], times: 5, expect: { code: ok, remaining: 0 } }\n        - { descriptors: [{ user: ann }], expect: { code: over_limit, rule: edge.user } }\n        - { after: 1m, descriptors: [{ user: ann }], expect: ok }\n\n  tidegate test cases.yaml\n  tidegate test --format junit tests/ > results.xml",
        )
        .arg(
            Arg::new("rules")
                .long("rules")
                .value_name("PATH")
                .action(ArgAction::Append)
                .value_parser(value_parser!(PathBuf))
                .help("Rule file or directory, in place of the `rules` of each file. Can be repeated"),
        )
        .arg(super::overlay())
        .arg(
            Arg::new("format")
                .long("format")
                .value_parser(PossibleValuesParser::new(["text", "tap", "junit"]))
                .default_value("text")
                .help("Form of the results: for people, as TAP 14, or as JUnit XML"),
        )
        .arg(
            Arg::new("FILE")
                .required(true)
                .num_args(1..)
                .value_parser(value_parser!(PathBuf))
                .help("Files of test cases, or directories that contain *.yaml and *.yml files of test cases"),
        )
}

pub(super) fn run(matches: &ArgMatches) -> anyhow::Result<ExitCode> {
    let files = read(&Location::Paths(super::paths(matches)))?;
    let mut loaded: Vec<(Vec<PathBuf>, Arc<LiveRules>)> = Vec::new();
    let mut results = Vec::new();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    for (name, file) in &files {
        let paths = rule_paths(matches, name, file)?;
        let rules = match loaded.iter().find(|(of, _)| *of == paths) {
            Some((_, rules)) => Arc::clone(rules),
            None => {
                let rules =
                    super::load_to_decide(matches, paths.clone()).with_context(|| format!("the rules of {name}"))?;
                let rules = Arc::new(LiveRules::new(rules));
                loaded.push((paths, Arc::clone(&rules)));
                rules
            }
        };
        for case in &file.cases {
            results.push(runtime.block_on(run_case(name, case, &Simulator::new(&rules))));
        }
    }
    super::print(&match matches.get_one::<String>("format").map(String::as_str) {
        Some("tap") => report::tap(&results),
        Some("junit") => report::junit(&results),
        _ => report::text(&results),
    })?;
    let passed = results.iter().all(CaseResult::is_passed);
    Ok(if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Reads all files of test cases, each with its name.
///
/// # Errors
/// If a file cannot be read or is wrong; names every error of every file.
fn read(location: &Location) -> anyhow::Result<Vec<(String, CaseFile)>> {
    let files: Vec<File> = location.read().map_err(|wrong| {
        let wrong: Vec<String> = wrong.iter().map(ToString::to_string).collect();
        anyhow::anyhow!(wrong.join("\n"))
    })?;
    let (mut read, mut problems) = (Vec::new(), Vec::new());
    for file in &files {
        match cases::read(file) {
            Ok(cases) => read.push((file.name.to_string(), cases)),
            Err(mut invalid) => problems.append(&mut invalid.problems),
        }
    }
    if problems.is_empty() {
        return Ok(read);
    }
    bail!("no case was run, because files of test cases have errors\n{}", InvalidRules { problems });
}

/// Returns the paths of the rules for the cases of a file.
fn rule_paths(matches: &ArgMatches, name: &str, file: &CaseFile) -> anyhow::Result<Vec<PathBuf>> {
    let given: Vec<PathBuf> = matches.get_many("rules").into_iter().flatten().cloned().collect();
    if !given.is_empty() {
        return Ok(given);
    }
    if file.rules.is_empty() {
        bail!(
            "{name}: the file names no rules: write `rules: PATH` at its top, relative to the file, or run with --rules PATH"
        );
    }
    let beside = Path::new(name).parent().unwrap_or(Path::new(""));
    Ok(file.rules.iter().map(|path| beside.join(&path.value)).collect())
}
