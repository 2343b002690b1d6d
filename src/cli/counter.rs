//! `tidegate counter`: reads the counters of a descriptor, without spending, at several instances.

use std::fmt::{self, Write};
use std::process::ExitCode;

use anyhow::ensure;
use clap::{Arg, ArgMatches, Command};
use form_urlencoded::Serializer;
use serde_json::Value;

use super::admin::{self, Ago, text};
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
        .after_help("Examples:\n  What user 42 has left:\n    tidegate counter --domain edge --descriptor user=42")
        .arg(Arg::new("domain").long("domain").required(true).help("Domain of the counter"))
        .arg(descriptor::argument().help("Entries of the descriptor, in order"))
        .args(admin::arguments())
}

pub(super) fn run(matches: &ArgMatches) -> anyhow::Result<ExitCode> {
    let mut query = Serializer::new(String::new());
    if let Some(domain) = matches.get_one::<String>("domain") {
        query.append_pair("domain", domain);
    }
    admin::append_entries(&mut query, matches.get_one::<Descriptor>("descriptor"));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let answers = runtime.block_on(admin::ask(matches, &format!("{PATH}?{}", query.finish())));
    runtime.shutdown_background();
    let (mut missing, mut shown, mut is_limited) = (Vec::new(), String::new(), false);
    for (instance, answer) in &answers {
        match answer {
            Ok(page) if page.get("counters").is_some_and(Value::is_array) => {
                is_limited |= text(page, "finding") == "limited";
                write!(shown, "{}", Counters { instance, page })?;
            }
            Ok(_) => missing.push((instance.clone(), admin::FOREIGN.to_owned())),
            Err(error) => missing.push((instance.clone(), format!("{error:#}"))),
        }
    }
    admin::name_missing(&missing);
    ensure!(missing.len() < answers.len(), admin::NOBODY);
    super::print(&shown)?;
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
            _ if page.get("is_known_domain").and_then(Value::as_bool) == Some(false) => {
                return writeln!(f, "  not limited: no rule file has this domain");
            }
            _ => return writeln!(f, "  not limited: no rule matches; `tidegate explain` says why"),
        }
        for counter in page.get("counters").and_then(Value::as_array).into_iter().flatten() {
            let number = |name: &str| counter.get(name).and_then(Value::as_u64);
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
