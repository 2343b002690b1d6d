//! `tidegate counter`: reads the counters of a descriptor, without spending, at several instances.

use std::fmt::{self, Write};
use std::process::ExitCode;

use clap::{Arg, ArgMatches, Command};
use serde_json::Value;

use super::admin::{self, Ago, flag, list, number, text};
use super::{REFUSED, descriptor};
use crate::model::Descriptor;

/// Path of the counters.
const PATH: &str = "/v1/counters";

pub(super) fn command() -> Command {
    Command::new("counter")
        .about("Read the counters of a descriptor, without spending; exit code 0: limited, 1: not limited, 2: no instance answered")
        .long_about(
            "Reads the counters of a descriptor: what is used and what is left of each limit of its rule, and when the whole limit is available again.\n\nNothing is spent. With Redis all instances read the same counter, so one is enough, but hits that other instances have leased\ncount as used. With counters in memory each instance has its own.",
        )
        .after_help("Examples:\n  What user 42 has left:\n    tidegate counter --domain edge --descriptor user=42\n  The same at an instance on another machine, over TLS with a token (ADMIN_TOKEN_FILE):\n    tidegate counter --domain edge --descriptor user=42 --instance https://tidegate.edge.svc:6070 --ca ca.crt --token-file token")
        .arg(Arg::new("domain").long("domain").required(true).help("Domain of the counter"))
        .arg(descriptor::argument().help("Entries of the descriptor, in order"))
        .args(admin::arguments())
}

pub(super) fn run(matches: &ArgMatches) -> anyhow::Result<ExitCode> {
    let mut query = admin::query(matches, &["domain"]);
    admin::append_entries(&mut query, matches.get_one::<Descriptor>("descriptor"));
    let path = format!("{PATH}?{}", query.finish());
    let answers = admin::run(admin::ask(matches, &path, &["counters"]))?;
    answers.name_missing()?;
    let shown = answers.pages.iter().map(|(instance, page)| Counters { instance, page }.to_string());
    super::print(&shown.collect::<String>())?;
    let is_any = |finding: &str| answers.pages.iter().any(|(_, page)| text(page, "finding") == finding);
    if is_any("unmatched") {
        eprintln!("{}", admin::SEE_UNMATCHED);
    }
    let is_limited = is_any("limited");
    Ok(if is_limited { ExitCode::SUCCESS } else { ExitCode::from(REFUSED) })
}

/// Counters of one instance.
struct Counters<'a> {
    instance: &'a str,
    page: &'a Value,
}

impl fmt::Display for Counters<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { instance, page } = self;
        let rule = text(page, "rule");
        writeln!(f, "{instance}")?;
        match &*text(page, "finding") {
            "limited" => {}
            "denied" => return writeln!(f, "  the rule {rule} denies it; nothing is counted"),
            "exempt" => return writeln!(f, "  the rule {rule} exempts it; nothing is counted"),
            "unlimited" => return writeln!(f, "  the rule {rule} does not limit it"),
            _ if !flag(page, "is_known_domain") => {
                return writeln!(f, "  not limited: no rule file has this domain");
            }
            _ => return writeln!(f, "  not limited: no rule matches; `tidegate explain` says why"),
        }
        for counter in list(page, "counters") {
            let number = |name: &str| number(counter, name);
            let mut of = format!("rule {}", text(counter, "rule"));
            let limit = text(counter, "limit");
            if !limit.is_empty() {
                let _ = write!(of, ", limit {limit}");
            }
            let (capacity, provenance) = (number("capacity").unwrap_or_default(), text(counter, "provenance"));
            match (number("used"), number("left"), number("reset_ms")) {
                (Some(used), Some(left), Some(0)) => {
                    writeln!(f, "  {of}: {used} of {capacity} used, {left} left")?;
                }
                (Some(used), Some(left), Some(reset)) => {
                    writeln!(f, "  {of}: {used} of {capacity} used, {left} left, full again in {}", Ago(reset))?;
                }
                _ => writeln!(
                    f,
                    "  {of}: not read, because the store did not answer; the policy `{provenance}` decides"
                )?,
            }
        }
        Ok(())
    }
}
