//! `tidegate top`: who is refused, or asks, most, over several instances; and `--unmatched`: what met no rule.

use std::fmt;
use std::io::IsTerminal;
use std::process::ExitCode;
use std::time::Duration;

use clap::builder::PossibleValuesParser;
use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep_until};

use self::keys::Keys;
use self::sums::{Line, Most, Sums};
use self::view::{Effect, View};
use super::admin::{self, Answers};
use super::server;
use crate::model::{Micros, counted};

mod keys;
mod sums;
mod unmatched;
mod view;

/// Path of the descriptors with the highest counts.
const PATH: &str = "/v1/top";
/// Each instance is asked for 4 times as many descriptors as are shown. A descriptor with one of the highest sums can have a lower count at
/// each instance.
const DEPTH: u32 = 4;
/// Maximum number that an instance sends.
const MOST: u32 = 1_000;
/// Text that clears a terminal: moves to the first place, and erases what is there.
const CLEAR: &str = "\u{1b}[H\u{1b}[2J";

pub(super) fn command() -> Command {
    Command::new("top")
        .about("Show who is refused most, or what no rule matches, over several instances")
        .long_about(
            "Shows who was refused most in the last minute, or asked most, by rule. In a terminal the table is refreshed every two seconds, and keys sort it, filter it and stop it; elsewhere it is printed once.\n\nAsks the debug listener of each instance, which keeps the 8,192 descriptors with the highest counts. Every refusal is counted. `704-720` means between 704 and 720: a count may have begun too high, or an instance may not have listed the descriptor. `704+` means 704 or more: an instance is of an older version, or values are masked or cut, so that others that are not listed look the same. What is asked is estimated from one request in 16, so it is shown as `about 720`. Reads no counter and changes nothing.\n\nWith --unmatched: descriptors that no rule matches, by their keys, each with the nearest rule; domains without a rule file; keys of rules that requests do not have; and connections that speak HTTP/1 to the gRPC port. Counts start again with each load of the rules.",
        )
        .after_help(
            "Examples:\n  Who is refused most:\n    tidegate top\n  Who asks most of one rule, once:\n    tidegate top --sort asked --rule edge.user --once\n  The same for a program, with the bounds of each number:\n    tidegate top --sort asked --rule edge.user --json\n  Why a limit does nothing:\n    tidegate top --unmatched",
        )
        .arg(
            Arg::new("unmatched")
                .long("unmatched")
                .action(ArgAction::SetTrue)
                .conflicts_with_all(["rule", "sort", "json", "interval"])
                .help("Show what no rule matches, with the nearest rule"),
        )
        .arg(admin::domain())
        .arg(admin::rule())
        .arg(
            Arg::new("sort")
                .long("sort")
                .value_parser(PossibleValuesParser::new(["refused", "asked"]))
                .default_value("refused")
                .help("Order of the table"),
        )
        .arg(super::most().value_parser(value_parser!(u32).range(1..=i64::from(MOST))).help("Number of lines"))
        .arg(Arg::new("once").long("once").action(ArgAction::SetTrue).help("Print the table once"))
        .arg(Arg::new("json").long("json").action(ArgAction::SetTrue).help("Print the table once, as one line of JSON"))
        .arg(server::duration("interval", "2s").help("Time between two tables"))
        .args(admin::arguments())
}

pub(super) fn run(matches: &ArgMatches) -> anyhow::Result<ExitCode> {
    if matches.get_flag("unmatched") {
        return admin::run(unmatched::run(matches));
    }
    let is_json = matches.get_flag("json");
    let is_live = !matches.get_flag("once") && !is_json && std::io::stdout().is_terminal();
    let interval = matches.get_one::<Micros>("interval").copied().unwrap_or(Micros::from_secs(2));
    let is_by_asked = matches.get_one::<String>("sort").is_some_and(|sort| sort == "asked");
    let view = View::new(is_by_asked);
    if is_live {
        return admin::run(watch(matches, view, Duration::from_micros(interval.get())));
    }
    admin::run(async {
        let answers = ask(matches, &view).await?;
        answers.name_missing()?;
        let table = Table::of(&answers, matches, &view, false);
        if is_json {
            super::print(&format_args!("{}\n", table.json()))?;
        } else {
            super::print(&table)?;
        }
        Ok(ExitCode::SUCCESS)
    })
}

/// Shows the table anew each `interval`, and as keys say, until one of them or Ctrl-C ends it.
async fn watch(matches: &ArgMatches, mut view: View, interval: Duration) -> anyhow::Result<ExitCode> {
    let mut keys = Keys::open();
    let mut answers = ask(matches, &view).await?;
    let mut due = Instant::now() + interval;
    loop {
        let keys_line = if keys.is_some() { view.to_string() } else { String::new() };
        super::print(&format_args!("{CLEAR}{}{keys_line}", Table::of(&answers, matches, &view, true)))?;
        let pressed = async {
            match &mut keys {
                Some(keys) => keys.next().await,
                None => None,
            }
        };
        let effect = tokio::select! {
            () = sleep_until(due), if !view.is_frozen => Effect::Ask,
            Some(key) = pressed => view.press(key),
            ended = tokio::signal::ctrl_c() => ended.map(|()| Effect::Quit)?,
        };
        match effect {
            Effect::Quit => {
                // What follows begins on a line of its own.
                if keys.is_some() {
                    super::print(&"\n")?;
                }
                return Ok(ExitCode::SUCCESS);
            }
            Effect::Ask => {
                answers = ask(matches, &view).await?;
                due = Instant::now() + interval;
            }
            Effect::Show => {}
        }
    }
}

async fn ask(matches: &ArgMatches, view: &View) -> anyhow::Result<Answers> {
    let mut query = admin::query(matches, &["domain", "rule"]);
    query.append_pair("sort", view.sort()).append_pair("most", &depth(matches, view).to_string());
    admin::ask(matches, &format!("{PATH}?{}", query.finish()), &["top"]).await
}

/// Returns the number of descriptors that each instance is asked for: all of which a filter leaves some.
fn depth(matches: &ArgMatches, view: &View) -> u32 {
    if view.filter.is_empty() { super::most_rows(matches).saturating_mul(DEPTH).min(MOST) } else { MOST }
}

/// The descriptors of all instances that answered.
struct Table<'a> {
    sums: Sums,
    instances: Vec<&'a str>,
    /// Instances that did not answer, each with the reason.
    missing: &'a [(String, String)],
    sort: &'static str,
    is_live: bool,
    /// True if only one domain or rule is asked about.
    is_selected: bool,
}

impl<'a> Table<'a> {
    fn of(answers: &'a Answers, matches: &ArgMatches, view: &View, is_live: bool) -> Self {
        let Answers { pages, missing } = answers;
        let mut sums = Sums::of(pages.iter().map(|(_, page)| page));
        let most = usize::try_from(super::most_rows(matches)).unwrap_or(usize::MAX);
        sums.select(&view.filter, view.is_by_asked, most);
        let is_selected = !view.filter.is_empty() || ["domain", "rule"].iter().any(|name| matches.contains_id(name));
        let instances = pages.iter().map(|(instance, _)| instance.as_str()).collect();
        Self { sums, instances, missing, sort: view.sort(), is_live, is_selected }
    }

    /// Returns the table for programs, on one line.
    fn json(&self) -> Value {
        let Sums { lines, others, missed } = &self.sums;
        let missing = self.missing.iter().map(|(instance, why)| json!({ "instance": instance, "why": why }));
        json!({
            "sort": self.sort,
            "instances": self.instances,
            "missing": missing.collect::<Vec<_>>(),
            "top": lines.iter().map(Line::json).collect::<Vec<_>>(),
            "others": { "refused": others.0, "asked": null },
            "missed": missed,
        })
    }
}

impl fmt::Display for Table<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:>16} {:>16}  rule  descriptor", "refused/min", "asked/min")?;
        let Sums { lines, others, missed } = &self.sums;
        for Line { rule, descriptor, refused, asked, alike, .. } in lines {
            let alike = if *alike > 1 { format!("  ({alike} descriptors look like this)") } else { String::new() };
            writeln!(f, "{refused:>16} {asked:>16}  {rule}  {descriptor}{alike}")?;
        }
        if lines.is_empty() && self.is_selected {
            writeln!(f, "No such request of the last minute is known.")?;
        } else if lines.is_empty() && self.missing.is_empty() {
            writeln!(f, "No request of the last minute met a rule, or those that did were too few to be sampled.")?;
        }
        if *others != Most::default() {
            writeln!(f, "{others:>16} {:>16}  at most, for each other descriptor", "")?;
        }
        if *missed > 0 {
            let are = if *missed == 1 { "is" } else { "are" };
            writeln!(
                f,
                "{} since the start {are} not counted, because threads used the list at the same time; real counts may be higher.",
                counted(*missed, "event")
            )?;
        }
        if self.is_live {
            let (of, all) = (self.instances.len(), self.instances.len() + self.missing.len());
            writeln!(f, "{of} of {} answered.", counted(all, "instance"))?;
            for (instance, why) in self.missing {
                writeln!(f, "{instance} is missing: {why}")?;
            }
        }
        Ok(())
    }
}
