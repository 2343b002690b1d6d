//! `tidegate top`: who is refused, or asks, most, over several instances; and `--unmatched`: what met no rule.

use std::collections::BTreeMap;
use std::fmt;
use std::io::IsTerminal;
use std::process::ExitCode;
use std::time::Duration;

use clap::builder::PossibleValuesParser;
use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use serde_json::Value;
use tokio::time::{Instant, sleep_until};

use self::keys::Keys;
use self::view::{Effect, View};
use super::admin::{self, Answers, flag, list, number, text};
use super::server;
use crate::model::Micros;

mod keys;
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
            "Shows who was refused most in the last minute, or asked most, by rule. In a terminal the table is refreshed every two seconds,\nand keys sort it, filter it and stop it; elsewhere it is printed once.\n\nAsks the debug listener of each instance, which keeps the 8,192 descriptors with the highest counts. `704-720` means\nbetween 704 and 720. What is asked is estimated from one request in 16. Reads no counter and changes nothing.\n\nWith --unmatched: descriptors that no rule matches, by their keys, each with the nearest rule; domains without a rule file; keys of rules\nthat requests do not have; and connections that speak HTTP/1 to the gRPC port. Counts start again with each load of the rules.",
        )
        .after_help(
            "Examples:\n  Who is refused most:\n    tidegate top\n  Who asks most of one rule, once:\n    tidegate top --sort asked --rule edge.user --once\n  Why a limit does nothing:\n    tidegate top --unmatched",
        )
        .arg(
            Arg::new("unmatched")
                .long("unmatched")
                .action(ArgAction::SetTrue)
                .conflicts_with_all(["rule", "sort", "once", "interval"])
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
        .arg(server::duration("interval", "2s").help("Time between two tables"))
        .args(admin::arguments())
}

pub(super) fn run(matches: &ArgMatches) -> anyhow::Result<ExitCode> {
    if matches.get_flag("unmatched") {
        return admin::run(unmatched::run(matches));
    }
    let is_live = !matches.get_flag("once") && std::io::stdout().is_terminal();
    let interval = matches.get_one::<Micros>("interval").copied().unwrap_or(Micros::from_secs(2));
    let is_by_asked = matches.get_one::<String>("sort").is_some_and(|sort| sort == "asked");
    let view = View::new(is_by_asked);
    if is_live {
        return admin::run(watch(matches, view, Duration::from_micros(interval.get())));
    }
    admin::run(async {
        let answers = ask(matches, &view).await?;
        answers.name_missing()?;
        super::print(&Table::of(&answers, matches, &view, false))?;
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
    lines: Vec<Line>,
    instances: usize,
    missed: u64,
    /// Instances that did not answer, each with the reason.
    missing: &'a [(String, String)],
    is_live: bool,
    /// True if only one domain or rule is asked about.
    is_selected: bool,
    /// True if an instance may have more than it sent.
    is_partial: bool,
}

/// Counts of what is shown as one line.
#[derive(Default)]
struct Merged<'a> {
    refused: Estimate,
    asked: Estimate,
    /// Descriptors of each instance that are shown the same.
    alike: BTreeMap<&'a str, u64>,
}

/// A descriptor under a rule, and its counts of the last minute.
struct Line {
    rule: String,
    descriptor: String,
    refused: Estimate,
    asked: Estimate,
    /// Number of descriptors of an instance that are shown the same.
    alike: u64,
}

/// A number, and by how much it may be too large.
#[derive(Clone, Copy, Default)]
struct Estimate {
    most: u64,
    error: u64,
}

impl<'a> Table<'a> {
    fn of(answers: &'a Answers, matches: &ArgMatches, view: &View, is_live: bool) -> Self {
        let Answers { pages, missing } = answers;
        let mut merged: BTreeMap<(String, String), Merged> = BTreeMap::new();
        let (mut missed, mut is_short) = (0_u64, false);
        for (instance, page) in pages {
            let top = list(page, "top");
            missed = missed.saturating_add(number(page, "missed").unwrap_or_default());
            is_short |= top.len() >= usize::try_from(depth(matches, view)).unwrap_or(usize::MAX);
            for heavy in top {
                let mut descriptor = admin::descriptor(list(heavy, "entries"));
                if flag(heavy, "is_cut") {
                    descriptor.push_str(",…");
                }
                let Merged { refused, asked, alike } = merged.entry((text(heavy, "rule"), descriptor)).or_default();
                refused.add(heavy.get("refused"));
                asked.add(heavy.get("asked"));
                *alike.entry(instance).or_default() += 1;
            }
        }
        let line = |((rule, descriptor), Merged { refused, asked, alike }): (_, Merged<'_>)| {
            let alike = alike.into_values().max().unwrap_or(1);
            Line { rule, descriptor, refused, asked, alike }
        };
        let mut lines: Vec<Line> = merged.into_iter().map(line).collect();
        lines.retain(|line| line.rule.contains(&view.filter) || line.descriptor.contains(&view.filter));
        lines.sort_by_key(|line| {
            let (refused, asked) = (line.refused.least(), line.asked.least());
            std::cmp::Reverse(if view.is_by_asked { (asked, refused) } else { (refused, asked) })
        });
        lines.truncate(usize::try_from(super::most_rows(matches)).unwrap_or(usize::MAX));
        let is_selected = !view.filter.is_empty() || ["domain", "rule"].iter().any(|name| matches.contains_id(name));
        let instances = pages.len();
        let is_partial = is_short && instances > 1;
        Self { lines, instances, missed, missing, is_live, is_selected, is_partial }
    }
}

impl Estimate {
    fn add(&mut self, value: Option<&Value>) {
        let number = |name: &str| value.and_then(|value| number(value, name)).unwrap_or_default();
        self.most = self.most.saturating_add(number("most"));
        self.error = self.error.saturating_add(number("error"));
    }

    fn least(self) -> u64 {
        self.most.saturating_sub(self.error)
    }
}

impl fmt::Display for Estimate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.error {
            0 => f.pad(&self.most.to_string()),
            _ => f.pad(&format!("{}-{}", self.least(), self.most)),
        }
    }
}

impl fmt::Display for Table<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:>16} {:>16}  rule  descriptor", "refused/min", "asked/min")?;
        for Line { rule, descriptor, refused, asked, alike } in &self.lines {
            let alike = if *alike > 1 { format!("  ({alike} descriptors look like this)") } else { String::new() };
            writeln!(f, "{refused:>16} {asked:>16}  {rule}  {descriptor}{alike}")?;
        }
        if self.lines.is_empty() && self.is_selected {
            writeln!(f, "No such request of the last minute is known.")?;
        } else if self.lines.is_empty() && self.missing.is_empty() {
            writeln!(f, "No request of the last minute met a rule, or those that did were too few to be sampled.")?;
        }
        if self.is_partial {
            writeln!(f, "Each instance sent only its first descriptors, so a sum over instances may be too small.")?;
        }
        if self.missed > 0 {
            writeln!(
                f,
                "{} events since the start are not counted, because threads used the list at the same time; real counts may be higher.",
                self.missed
            )?;
        }
        if self.is_live {
            let (of, all) = (self.instances, self.instances + self.missing.len());
            writeln!(f, "{of} of {all} instances answered.")?;
            for (instance, why) in self.missing {
                writeln!(f, "{instance} is missing: {why}")?;
            }
        }
        Ok(())
    }
}
