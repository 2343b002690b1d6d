//! `tidegate counter`: reads the counters of a descriptor, without spending, at several instances.

use std::fmt::{self, Write};
use std::net::IpAddr;
use std::process::ExitCode;

use clap::{Arg, ArgMatches, Command};
use serde_json::Value;

use super::admin::{self, Ago, Answers, flag, list, number, text};
use super::{REFUSED, descriptor};
use crate::model::Descriptor;

/// Number of digits of the digest of a sensitive value.
const DIGEST: usize = 32;
/// Path of the counters.
const PATH: &str = "/v1/counters";

pub(super) fn command() -> Command {
    Command::new("counter")
        .about("Read the counters of a descriptor, without spending; exit code 0: limited, 1: not limited, 2: no instance answered")
        .long_about(
            "Reads the counters of a descriptor: what is used and what is left of each limit of its rule, over which time it was counted, and when the whole limit is available again.\n\nNothing is spent. With Redis all instances read the same counter, so one is enough, but hits that other instances have leased\ncount as used. With counters in memory each instance has its own.",
        )
        .after_help("Examples:\n  What user 42 has left:\n    tidegate counter --domain edge --descriptor user=42\n  The same at an instance on another machine, over TLS with a token (ADMIN_TOKEN_FILE):\n    tidegate counter --domain edge --descriptor user=42 --instance https://tidegate.edge.svc:6070 --ca ca.crt --token-file token")
        .arg(Arg::new("domain").long("domain").required(true).help("Domain of the counter"))
        .arg(descriptor::argument().help("Entries of the descriptor, in order"))
        .args(admin::arguments())
}

pub(super) fn run(matches: &ArgMatches) -> anyhow::Result<ExitCode> {
    let answers = ask(matches)?;
    answers.name_missing()?;
    super::print(&shown(&answers))?;
    for entry in matches.get_one::<Descriptor>("descriptor").into_iter().flat_map(|descriptor| &descriptor.entries) {
        let value = String::from_utf8_lossy(&entry.value);
        if let Some(how) = altered(&value) {
            let key = String::from_utf8_lossy(&entry.key);
            eprintln!(
                "The value of {key} looks {how}, as `why` and `top` show it: a counter is found by the value itself."
            );
        }
    }
    let is_any = |finding: &str| answers.pages.iter().any(|(_, page)| text(page, "finding") == finding);
    if is_any("unmatched") {
        eprintln!("{}", admin::SEE_UNMATCHED);
    }
    let is_limited = is_any("limited");
    Ok(if is_limited { ExitCode::SUCCESS } else { ExitCode::from(REFUSED) })
}

/// Asks the instances for the counters of the descriptor.
///
/// # Errors
/// If a file of the command cannot be used.
pub(super) fn ask(matches: &ArgMatches) -> anyhow::Result<Answers> {
    let mut query = admin::query(matches, &["domain"]);
    admin::append_entries(&mut query, matches.get_one::<Descriptor>("descriptor"));
    let path = format!("{PATH}?{}", query.finish());
    admin::run(admin::ask(matches, &path, &["counters"]))
}

/// Returns the counters of all instances that answered, as text for people.
pub(super) fn shown(answers: &Answers) -> String {
    answers.pages.iter().map(|(instance, page)| Counters { instance, page }.to_string()).collect()
}

/// Returns what `why` and `top` have done to a value that looks like this. `None` if it looks as clients send it.
fn altered(value: &str) -> Option<&'static str> {
    let is_digest = value.len() == DIGEST && value.bytes().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'));
    let is_network = value.split_once('/').is_some_and(|(address, _)| address.parse::<IpAddr>().is_ok());
    match () {
        () if value.contains("\\u{") => Some("escaped"),
        () if value.ends_with('…') => Some("cut"),
        () if is_digest => Some("like a digest"),
        () if is_network => Some("like the network of an address"),
        () => None,
    }
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
            if flag(counter, "is_shadow") {
                of.push_str(" (shadow mode: refuses nothing)");
            }
            match (number("used"), number("left")) {
                (Some(used), Some(left)) => {
                    let since = number("counted_for_ms").map(|counted| format!(" in the last {}", Ago(counted)));
                    let reset = number("reset_ms").filter(|reset| used > 0 && *reset > 0);
                    let reset = reset.map(|reset| format!(", full again in {}", Ago(reset)));
                    let (since, reset) = (since.unwrap_or_default(), reset.unwrap_or_default());
                    writeln!(f, "  {of}: {used} of {capacity} used{since}, {left} left{reset}")?;
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

#[cfg(test)]
mod tests {
    use super::altered;

    #[test]
    fn a_value_that_a_view_has_altered_is_recognised() {
        for (value, expected) in [
            ("203.0.113.0/24", Some("like the network of an address")),
            ("2001:db8::/64", Some("like the network of an address")),
            ("/api/v1", None),
            ("203.0.113.9", None),
            ("alice…", Some("cut")),
            ("a\\u{202e}b", Some("escaped")),
            ("alice", None),
        ] {
            assert_eq!(altered(value), expected, "{value}");
        }
    }
}
