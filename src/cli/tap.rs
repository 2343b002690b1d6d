//! `tidegate tap`: shows decisions as they are made, of several instances.

use std::cell::Cell;
use std::io::{ErrorKind, Write};
use std::pin::pin;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, ensure};
use clap::builder::PossibleValuesParser;
use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use serde_json::Value;
use tokio::sync::mpsc;
use tokio::time::timeout;

use self::follow::follow;
use super::admin::{self, Ago, Clock, Instance, Instances, list, number, text};
use super::{descriptor, server};
use crate::model::{Descriptor, Micros, Origin, counted};

mod follow;

/// Path of the decisions.
const PATH: &str = "/v1/decisions";
/// Number of lines that wait to be written.
const WAITING: usize = 64;
/// Exit code if all instances have ended that were shown: 1.
const ENDED: u8 = 1;

pub(super) fn command() -> Command {
    Command::new("tap")
        .about("Show decisions as they are made; exit code 0: until its end, 1: no instance is left, 2: no instance answered")
        .long_about(
            "Shows decisions as they are made, one line each, until Ctrl-C. Nothing is kept or counted for it; while nobody listens it costs nothing. Decisions of an instance beyond --rate a second are skipped, and a line says how many.\n\nWhen an instance ends the stream, as at a restart or at GRPC_MAX_CONNECTION_AGE, or hangs, tap resolves its name and connects again: after 1 s, then 2 s, up to 10 s. It says so on standard error: the end of a stream once for each instance, and each time that an instance hangs, which is when nothing comes from it for 15 s. An address that the name no longer has is given up, and its new addresses are shown too. An instance that does not answer at the start is named and left out.",
        )
        .after_help(
            "Examples:\n  Every refusal:\n    tidegate tap --outcome refused\n  Every request that only a shadow mode admits, such as those over a limit that is being tried:\n    tidegate tap --outcome would_be_refused\n  All decisions about user 42, for ten seconds, as lines of JSON:\n    tidegate tap --domain edge --descriptor user=42 --duration 10s --json",
        )
        .arg(admin::domain())
        .arg(admin::rule())
        .arg(
            Arg::new("outcome")
                .long("outcome")
                .value_parser(PossibleValuesParser::new(["admitted", "refused", "failed", "would_be_refused"]))
                .help("Outcome of the request; would_be_refused: admitted only because of a shadow mode [default: all]"),
        )
        .arg(
            Arg::new("provenance")
                .long("provenance")
                .value_parser(PossibleValuesParser::new(Origin::ALL.map(Origin::name)))
                .help("Origin of the decision [default: all]"),
        )
        .arg(descriptor::argument().required(false).help("Entries that a descriptor of the request has"))
        .arg(
            Arg::new("rate")
                .long("rate")
                .value_name("N")
                .value_parser(value_parser!(u32).range(1..=10_000))
                .default_value("100")
                .help("Most decisions a second of each instance"),
        )
        .arg(Arg::new("json").long("json").action(ArgAction::SetTrue).help("Print the lines of JSON as they come"))
        .arg(server::duration("duration", "1h").default_value(None).help("Time after which it ends [default: at Ctrl-C]"))
        .args(admin::arguments())
}

pub(super) fn run(matches: &ArgMatches) -> anyhow::Result<ExitCode> {
    let length = matches.get_one::<Micros>("duration").copied();
    let is_served = Cell::new(false);
    admin::run(async {
        let listening = listen(matches, &is_served);
        let Some(length) = length else { return listening.await };
        timeout(Duration::from_micros(length.get()), listening).await.unwrap_or_else(|_| {
            ensure!(is_served.get(), admin::NOBODY);
            // To end in time is what was asked for.
            Ok(ExitCode::SUCCESS)
        })
    })
}

/// Prints the decisions of all instances until none of them can send any more. The first line of an instance sets `is_served`.
async fn listen(matches: &ArgMatches, is_served: &Cell<bool>) -> anyhow::Result<ExitCode> {
    let Instances { client, found, missing } = admin::instances(matches).await?;
    let (path, wait) = (path(matches), admin::wait(matches));
    let (sender, mut lines) = mpsc::channel(WAITING);
    let is_json = matches.get_flag("json");
    for (name, why) in &missing {
        eprintln!("{name} is missing: {why}");
    }
    let open = async |instance: Instance, address| admin::within(wait, client.open(&instance, address, &path)).await;
    let resolve = async |name: String| admin::resolve(&name, wait).await;
    let following = follow(open, resolve, sender, found, wait, is_served);
    let print = async {
        while let Some((name, line)) = lines.recv().await {
            let Some(line) = (if is_json { Some(line) } else { shown(&name, &line) }) else { continue };
            match writeln!(std::io::stdout(), "{line}") {
                // Who reads has read enough.
                Err(error) if error.kind() == ErrorKind::BrokenPipe => return Ok(()),
                written => written.context("standard output cannot be written")?,
            }
        }
        anyhow::Ok(())
    };
    let (mut following, mut print) = (pin!(following), pin!(print));
    tokio::select! {
        printed = &mut print => printed.map(|()| ExitCode::SUCCESS),
        () = &mut following => {
            ensure!(is_served.get(), admin::NOBODY);
            // The last lines.
            print.await?;
            eprintln!("no instance is left, so there are no more decisions");
            Ok(ExitCode::from(ENDED))
        }
    }
}

/// Returns the path and query to ask for.
fn path(matches: &ArgMatches) -> String {
    let mut query = admin::query(matches, &["domain", "rule", "outcome", "provenance"]);
    if let Some(rate) = matches.get_one::<u32>("rate") {
        query.append_pair("rate", &rate.to_string());
    }
    admin::append_entries(&mut query, matches.get_one::<Descriptor>("descriptor"));
    format!("{PATH}?{}", query.finish())
}

/// Returns a decision as people read it; `None` for the line with the start.
fn shown(instance: &str, line: &str) -> Option<String> {
    let Ok(decision) = serde_json::from_str::<Value>(line) else {
        return Some(format!("{instance}: {}", admin::FOREIGN));
    };
    if let Some(skipped) = number(&decision, "skipped") {
        return Some(format!(
            "             {} skipped: more than --rate, or too many for this terminal  @{instance}",
            counted(skipped, "decision")
        ));
    }
    if number(&decision, "since_us").is_some() {
        return None;
    }
    let millis = number(&decision, "time_us").unwrap_or_default() / 1_000;
    let descriptors = list(&decision, "descriptors").iter();
    let descriptors: Vec<String> = descriptors.map(|one| admin::descriptor(list(one, "entries"))).collect();
    let rule = match text(&decision, "rule") {
        rule if rule.is_empty() => "no rule".to_owned(),
        rule => rule,
    };
    let limit = match text(&decision, "limit") {
        limit if limit.is_empty() => limit,
        limit => format!(" limit {limit}"),
    };
    let shadow = list(&decision, "shadow").iter().map(|refusal| {
        let [rule, quota, limit] = ["rule", "quota", "limit"].map(|name| text(refusal, name));
        super::limit_of(&rule, &quota, &limit)
    });
    let shadow = match shadow.collect::<Vec<_>>() {
        none if none.is_empty() => String::new(),
        some => format!(", would be refused by {} (shadow mode)", some.join("; ")),
    };
    let retry = number(&decision, "retry_ms").map(|retry| format!(", again in {}", Ago(retry)));
    Some(format!(
        "{}.{:03} {:8} {}  {}  by {rule}{limit}: {}{}{shadow}  @{instance}",
        Clock(millis),
        millis % 1_000,
        text(&decision, "outcome"),
        text(&decision, "domain"),
        descriptors.join("; "),
        text(&decision, "provenance"),
        retry.unwrap_or_default(),
    ))
}
