//! The command line: dispatches to the subcommands.

use std::ffi::OsString;
use std::fmt;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use clap::{Arg, ArgMatches, Command, value_parser};

use crate::app::read::Given;
use crate::app::{self, read};
use crate::rulefile::{CompiledRules, InvalidRules};
use crate::rules::RuleSet;
use crate::settings::Settings;
use crate::source::file::find::Location;

mod admin;
mod bench;
mod call;
mod check;
mod counter;
mod descriptor;
mod explain;
mod metadata;
mod replay;
mod serve;
mod server;
mod tap;
mod test;
mod top;
mod why;

/// Function of a subcommand, called with its parsed arguments.
type Run = fn(&ArgMatches) -> anyhow::Result<ExitCode>;

/// Exit code if the last answer to `tidegate call` was a refusal.
const REFUSED: u8 = 1;
/// Exit code of a wrong call or a failed command.
const FAILED: u8 = 2;

/// Runs the command line and returns its exit code.
pub fn run() -> ExitCode {
    let commands: [(Command, Run); 11] = [
        (serve::command(), serve::run),
        (check::command(), check::run),
        (explain::command(), explain::run),
        (test::command(), test::run),
        (replay::command(), replay::run),
        (call::command(), call::run),
        (bench::command(), bench::run),
        (why::command(), why::run),
        (counter::command(), counter::run),
        (top::command(), top::run),
        (tap::command(), tap::run),
    ];
    let (names, runs): (Vec<_>, Vec<_>) = commands.into_iter().unzip();
    let order: Vec<String> = names.iter().map(|command| command.get_name().to_owned()).collect();
    let given = arguments(std::env::args_os().collect(), &order);
    let matches = Command::new("tidegate")
        .version(env!("CARGO_PKG_VERSION"))
        .about("A rate limit decision service for Envoy, API gateways and microservices")
        .after_help(with_braces(
            "Examples:\n  Run the service, with counters in memory:\n    tidegate serve rules.yaml\n  Send a request to it:\n    tidegate call --domain edge --descriptor user=alice\n  Report every error in a rule file:\n    tidegate check rules.yaml\n  Show which rule answers a request, and why:\n    tidegate explain --domain edge --descriptor user=alice rules.yaml\n  Run test cases on the rules:\n    tidegate test cases.yaml\n  Show whom new rules would refuse, from recorded decisions:\n    tidegate replay --rules new/ decisions.jsonl\n  Measure a running server under load:\n    tidegate bench --domain edge --descriptor user=u{n}\n  Tell who was refused lately, and why:\n    tidegate why\n  Show who is refused most:\n    tidegate top\n  Show what no rule matches:\n    tidegate top --unmatched",
        ))
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommands(names)
        .try_get_matches_from(given.clone());
    let matches = match matches {
        Ok(matches) => matches,
        // The log of a start is JSON from its first line, if that is wanted.
        Err(wrong)
            if wrong.use_stderr() && given.get(1).is_some_and(|name| name == "serve") && serve::is_json(None) =>
        {
            app::failed(&anyhow::Error::msg(wrong.to_string()));
            return ExitCode::from(FAILED);
        }
        Err(wrong) => wrong.exit(),
    };
    let Some((name, matches)) = matches.subcommand() else { return ExitCode::from(FAILED) };
    let run = order.iter().zip(runs).find(|(command, _)| *command == name).map(|(_, run)| run);
    match run.map(|run| run(matches)) {
        Some(Ok(code)) => code,
        Some(Err(error)) => {
            eprintln!("tidegate {name}: {error:#}");
            ExitCode::from(FAILED)
        }
        None => ExitCode::from(FAILED),
    }
}

/// Returns a text for `--help` in which `{n}` stays. clap prints a line break in its place, so an escape sequence without effect divides it.
fn with_braces(text: &str) -> String {
    text.replace("{n}", "{\u{1b}[0mn}")
}

/// Returns the command line to parse. The reference starts as `/bin/ratelimit` and ignores every argument, so `ratelimit`, as the name
/// of this program or as its first argument, means `serve`, unless one of `commands` or a question for help follows.
fn arguments(mut given: Vec<OsString>, commands: &[String]) -> Vec<OsString> {
    let is_reference = |program: &OsString| Path::new(program).file_name().is_some_and(|name| name == "ratelimit");
    let named = given.iter().take(2).take_while(|argument| is_reference(argument)).count();
    // The image has the program `tidegate`, to which `command: /bin/ratelimit` of a compose file is an argument.
    let begin = if named == 0 && given.get(1).is_some_and(is_reference) { 2 } else { named };
    if begin == 0 {
        return given;
    }
    let is_own = |argument: &OsString| {
        let own = ["help", "--help", "-h", "--version", "-V"];
        argument.to_str().is_some_and(|text| own.contains(&text) || commands.iter().any(|command| command == text))
    };
    let rest = given.split_off(begin);
    given.truncate(1);
    if rest.first().is_some_and(is_own) {
        given.extend(rest);
    } else {
        given.push("serve".into());
        given.extend((!rest.is_empty()).then(|| format!("--{}", serve::IGNORED).into()));
        given.extend(rest);
    }
    given
}

/// Reads and compiles the rule files of a command as the service does. Uses only the settings for rules, because `check` must
/// work even if the service would not start.
fn load(matches: &ArgMatches) -> anyhow::Result<(usize, Result<CompiledRules, InvalidRules>)> {
    let settings = rule_settings(matches)?;
    let given = match (matches.get_one::<PathBuf>("push"), paths(matches)) {
        (Some(push), _) => Given::Push(push.clone()),
        (None, paths) if paths.is_empty() && matches.contains_id("overlay") => Given::Overlay,
        (None, paths) => Given::Files(app::location(&settings, paths)),
    };
    read::load(settings, given)
}

/// Reads and compiles the rule files at `paths` for a command that decides by them, and prints their warnings.
fn load_to_decide(matches: &ArgMatches, paths: Vec<PathBuf>) -> anyhow::Result<RuleSet> {
    let given = Given::Files(Location::Paths(paths));
    let CompiledRules { rules, warnings } = read::load_to_decide(rule_settings(matches)?, given)?.1?;
    warnings.iter().for_each(|warning| eprintln!("{warning}"));
    Ok(rules)
}

/// Reads the settings that apply to rule files.
fn rule_settings(matches: &ArgMatches) -> anyhow::Result<Settings> {
    let mut settings =
        Settings::read(|name| read::RULE_SETTINGS.contains(&name).then(|| app::environment(name)).flatten())?;
    if let Some(overlay) = matches.get_one::<String>("overlay") {
        settings.rules_overlay.clone_from(overlay);
    }
    Ok(settings)
}

/// Writes `text` to standard output. A reader that has closed the pipe, such as `head`, has read enough: that is no error.
///
/// # Errors
/// If standard output cannot be written for any other reason.
fn print(text: &dyn fmt::Display) -> anyhow::Result<()> {
    match write!(std::io::stdout(), "{text}").and_then(|()| std::io::stdout().flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        written => written.context("standard output cannot be written"),
    }
}

/// Returns the argument for rule files.
fn files() -> Arg {
    Arg::new("FILE")
        .value_parser(clap::value_parser!(PathBuf))
        .help("Rule files, or directories that contain *.yaml and *.yml rule files")
}

/// Adds the arguments for the rules that a command reads.
fn with_rules(command: Command) -> Command {
    command
        .arg(overlay().help("Overlay that is laid over the rules, in place of RULES_OVERLAY. Without rules, it is read alone"))
        .arg(
            Arg::new("push")
                .long("push")
                .value_name("FILE")
                .value_parser(clap::value_parser!(PathBuf))
                .conflicts_with("FILE")
                .help("Recorded push of a control plane in place of rule files: the JSON of a DiscoveryResponse with resources of the type ratelimit.config.ratelimit.v3.RateLimitConfig, as grpcurl prints it, or a list of such resources"),
        )
        .arg(files().num_args(0..).help("Rule files, or directories that contain *.yaml and *.yml rule files. Without any, the directory that `tidegate serve` reads with the same RUNTIME_ROOT, RUNTIME_SUBDIRECTORY and RUNTIME_APPDIRECTORY"))
}

/// Returns the argument for the maximum number of rows.
fn most() -> Arg {
    Arg::new("most").long("most").value_name("N").value_parser(value_parser!(u32).range(1..)).default_value("20")
}

/// Returns the maximum number of rows.
fn most_rows(matches: &ArgMatches) -> u32 {
    matches.get_one::<u32>("most").copied().unwrap_or(20)
}

/// Returns the rule and the limit that refuse, as people read them.
fn limit_of(rule: &str, quota: &str, limit: &str) -> String {
    let rule = if rule.is_empty() { "no rule" } else { rule };
    let quota = if quota.is_empty() { String::new() } else { format!(", {quota}") };
    let limit = if limit.is_empty() { String::new() } else { format!(", limit {limit}") };
    format!("{rule}{quota}{limit}")
}

/// Returns the argument for an overlay.
fn overlay() -> Arg {
    Arg::new("overlay")
        .long("overlay")
        .value_name("FILE_OR_DIRECTORY")
        .help("Overlay that is laid over the rules, in place of RULES_OVERLAY")
}

fn paths(matches: &ArgMatches) -> Vec<PathBuf> {
    matches.get_many("FILE").into_iter().flatten().cloned().collect()
}

#[cfg(test)]
mod tests {
    use super::arguments;

    #[test]
    fn the_references_name_means_serve_and_what_follows_it_is_ignored() {
        for (given, expected) in [
            ("tidegate", "tidegate"),
            ("tidegate serve a.yaml", "tidegate serve a.yaml"),
            ("tidegate check ratelimit", "tidegate check ratelimit"),
            ("ratelimit", "ratelimit serve"),
            ("/bin/ratelimit", "/bin/ratelimit serve"),
            ("tidegate /bin/ratelimit", "tidegate serve"),
            ("/bin/tidegate ratelimit", "/bin/tidegate serve"),
            ("tidegate ./ratelimit", "tidegate serve"),
            ("tidegate /usr/bin/ratelimit -v", "tidegate serve --ignored -v"),
            ("ratelimit /bin/ratelimit", "ratelimit serve"),
            ("ratelimit /bin/ratelimit --a=b c", "ratelimit serve --ignored --a=b c"),
            ("ratelimit --config-dir=/d --redis-url=r:1", "ratelimit serve --ignored --config-dir=/d --redis-url=r:1"),
            ("ratelimit -configpath=/d/c.yaml", "ratelimit serve --ignored -configpath=/d/c.yaml"),
            ("ratelimit --grpc-port 1", "ratelimit serve --ignored --grpc-port 1"),
            ("ratelimit check a.yaml", "ratelimit check a.yaml"),
            ("ratelimit serve --grpc-port 1", "ratelimit serve --grpc-port 1"),
            ("tidegate /bin/ratelimit check a.yaml", "tidegate check a.yaml"),
            ("ratelimit --help", "ratelimit --help"),
            ("ratelimit -V", "ratelimit -V"),
        ] {
            let commands = ["serve", "check"].map(str::to_owned);
            let found = arguments(given.split(' ').map(Into::into).collect(), &commands);
            assert_eq!(found.join(" ".as_ref()).to_str(), Some(expected), "{given}");
        }
    }
}
