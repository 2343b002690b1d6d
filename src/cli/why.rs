//! `tidegate why`: tells who was refused lately, and why, over several instances.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::process::ExitCode;

use anyhow::anyhow;
use clap::{Arg, ArgMatches, Command};
use serde_json::Value;

use super::admin::{self, Ago, Answers, Clock, flag, items, list, number, text};
use super::{REFUSED, counter, descriptor};
use crate::app::DecisionId;
use crate::model::{Descriptor, Micros, counted};

/// Path of the last refusals.
const PATH: &str = "/v1/refusals";
/// Milliseconds of a day.
const DAY: u64 = 86_400_000;

pub(super) fn command() -> Command {
    Command::new("why")
        .about("Tell who was refused lately, or only not because of a shadow mode, and why; exit code 0: found, 1: nobody, 2: no instance answered")
        .long_about(
            "Tells who was refused lately, and why: the rule and the limit, how often, since when, and until when. What would have been refused without a shadow mode comes last, and says so.\n\nAsks the debug listener of each instance, which keeps the last 128 refused descriptors of each rule for 15 minutes\n(REFUSALS_KEEP) after their last refusal. Reads no counter and changes nothing.",
        )
        .after_help(
            "Examples:\n  Who is refused, the most often refused first:\n    tidegate why\n  Why one request was refused, by the id in Envoy's access log or in the refusal:\n    tidegate why 3v8k2m9c4q7r1t6x5z0d8f2h4j\n  Why user 42 is refused, by two instances, whose debug listeners are forwarded to this machine:\n    tidegate why --domain edge --descriptor user=42 --instance 127.0.0.1:6070 --instance 127.0.0.1:6071\n  The same by all pods of a headless Service, over TLS with a token (ADMIN_TOKEN_FILE):\n    tidegate why --descriptor user=42 --instance https://tidegate-headless:6070 --ca ca.crt --token-file token",
        )
        .arg(
            Arg::new("ID")
                .conflicts_with_all(["domain", "rule", "descriptor", "most"])
                .help("Id of a decision, as it stands in the dynamic metadata of its answer (DECISION_METADATA), or in the header x-tidegate-decision-id of a refusal (DECISION_ID_HEADER)"),
        )
        .arg(admin::domain())
        .arg(admin::rule())
        .arg(
            descriptor::argument()
                .required(false)
                .help("Entries of the refused descriptor. Give a value that is not shown in clear, as those of sensitive keys, as the digest or network that is shown"),
        )
        .arg(super::most().help("Number of refused descriptors to show"))
        .args(admin::arguments())
}

pub(super) fn run(matches: &ArgMatches) -> anyhow::Result<ExitCode> {
    let path = path(matches)?;
    let answers = admin::run(admin::ask(matches, &path, &["refusals"]))?;
    answers.name_missing()?;
    let report = Report::of(&answers, usize::try_from(super::most_rows(matches))?);
    let decided = matches.get_one::<String>("ID").map(|id| decided(id, &answers, &report));
    if let Some(decided) = &decided {
        super::print(&format_args!("{decided}\n"))?;
    }
    if decided.is_none() || !report.refused.is_empty() {
        super::print(&report)?;
    }
    if report.refused.is_empty() {
        tell_what_is_left(matches)?;
        let elsewhere: Vec<String> = other_domains(matches)?.into_iter().collect();
        if !elsewhere.is_empty() {
            let domains = elsewhere.join(", ");
            super::print(&format_args!("A descriptor with these entries was refused in other domains: {domains}.\n"))?;
        }
        eprintln!("{}", admin::SEE_UNMATCHED);
    }
    Ok(if report.refused.is_empty() { ExitCode::from(REFUSED) } else { ExitCode::SUCCESS })
}

/// Returns the domains in which the descriptor was refused, if the command asks for another one.
fn other_domains(matches: &ArgMatches) -> anyhow::Result<BTreeSet<String>> {
    let descriptor = matches.get_one::<Descriptor>("descriptor");
    if descriptor.is_none() || !matches.contains_id("domain") {
        return Ok(BTreeSet::new());
    }
    let mut query = admin::query(matches, &[]);
    admin::append_entries(&mut query, descriptor);
    let path = format!("{PATH}?{}", query.finish());
    let Answers { pages, .. } = admin::run(admin::ask(matches, &path, &["refusals"]))?;
    let refusals = pages.iter().flat_map(|(_, page)| list(page, "refusals"));
    Ok(refusals.map(|refusal| text(refusal, "domain")).filter(|domain| !domain.is_empty()).collect())
}

/// Prints the counters of the descriptor, if the command names one of them.
fn tell_what_is_left(matches: &ArgMatches) -> anyhow::Result<()> {
    if matches.contains_id("ID") || !matches.contains_id("domain") || !matches.contains_id("descriptor") {
        return Ok(());
    }
    let answers = counter::ask(matches)?;
    if !answers.pages.is_empty() {
        super::print(&format_args!("What is left now:\n{}", counter::shown(&answers)))?;
    }
    Ok(())
}

/// Returns what became of the decision `id`, and when.
fn decided(id: &str, answers: &Answers, report: &Report) -> String {
    match answers.pages.iter().find(|(_, page)| flag(page, "is_of_this_instance")) {
        Some((instance, page)) => {
            let at = number(page, "decided_ms").map(|at| format!(" at {} UTC", Clock(at))).unwrap_or_default();
            let count: u64 = report.refused.iter().map(|refused| refused.count).sum();
            match (flag(page, "is_refused"), count) {
                (true, 1) => format!("{instance} refused this request{at}:"),
                (true, 2..) => format!("{instance} refused this request{at}. It is one of these:"),
                (true, 0) => {
                    format!("{instance} refused this request{at}, and no longer knows why. It keeps {}.", report.bounds)
                }
                (false, 0) if flag(page, "is_admitted_by_shadow") => format!(
                    "{instance} admitted this request{at} because of a shadow mode, and no longer knows what would have refused it. It keeps {}.",
                    report.bounds
                ),
                (false, _) if flag(page, "is_admitted_by_shadow") => {
                    format!("{instance} admitted this request{at} because of a shadow mode. It is one of these:")
                }
                (false, _) => format!(
                    "{instance} admitted this request{at}. `tidegate counter --domain D --descriptor KEY=VALUE` shows what is left."
                ),
            }
        }
        None => format!(
            "No instance that answered has made the decision {id}. Its instance may have restarted since: ask with --descriptor."
        ),
    }
}

/// Returns the path and query to ask for.
fn path(matches: &ArgMatches) -> anyhow::Result<String> {
    if let Some(id) = matches.get_one::<String>("ID") {
        let entry = if id.contains('=') { id.clone() } else { format!("KEY={id}") };
        let known: DecisionId = id
            .parse()
            .map_err(|why| anyhow!("'{id}' is no decision id: {why}; for a descriptor, write --descriptor {entry}"))?;
        return Ok(format!("{PATH}/{known}"));
    }
    let mut query = admin::query(matches, &["domain", "rule"]);
    admin::append_entries(&mut query, matches.get_one::<Descriptor>("descriptor"));
    Ok(format!("{PATH}?{}", query.finish()))
}

/// Refusals of all instances that answered.
struct Report {
    refused: Vec<Refused>,
    /// Number of refused descriptors that are left out.
    left_out: usize,
    /// Number of refusals that are not counted.
    missed: u64,
    /// True if some instance did not answer.
    is_partial: bool,
    /// Bounds of what an instance keeps.
    bounds: String,
}

/// Refusals of one descriptor by one limit, of all instances together.
#[derive(Default)]
struct Refused {
    count: u64,
    /// Times of the first and the last refusal, and of the next admission, in milliseconds since the epoch.
    first: u64,
    last: u64,
    until: Option<u64>,
    /// Time of the instance of the last refusal.
    now: u64,
    reason: String,
    /// Number of hits that the last one asked for.
    hits: u64,
    /// The other descriptors of a request, and the time of it.
    others: Vec<String>,
    described: u64,
    instances: Vec<(String, u64)>,
    /// Number of descriptors of an instance under one load of its rules that are shown the same.
    alike: BTreeMap<(String, Option<u64>), u64>,
    place: Place,
}

/// Identity of refusals: domain, refused descriptor, rule and limit.
#[derive(Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    /// True for refusals that a shadow mode keeps from the requests.
    is_shadow: bool,
    domain: String,
    descriptor: String,
    rule: String,
    limit: String,
    quota: String,
}

impl Report {
    /// Merges the answers; `most` is the number of descriptors to show.
    fn of(answers: &Answers, most: usize) -> Self {
        let mut merged: BTreeMap<Place, Refused> = BTreeMap::new();
        let (mut bounds, mut left_out, mut missed) = (String::new(), 0, 0);
        for (instance, page) in &answers.pages {
            let number = |name: &str| number(page, name).unwrap_or_default();
            let kept = Micros::from_millis(number("kept_for_ms"));
            bounds = format!("the last {} refused descriptors of each rule, for {kept}", number("most_of_rule"));
            left_out += usize::try_from(number("left_out")).unwrap_or_default();
            missed = u64::saturating_add(missed, number("missed"));
            let of = |name: &str, is_shadow| list(page, name).iter().map(move |refusal| (refusal, is_shadow));
            // Instances of an older version have no shadow refusals.
            for (refusal, is_shadow) in of("refusals", false).chain(of("shadow_refusals", true)) {
                let (place, others) = place(refusal, is_shadow);
                merged.entry(place.clone()).or_default().add(instance, number("now_ms"), refusal, others, place);
            }
        }
        let mut refused: Vec<Refused> = merged.into_values().collect();
        refused.sort_by_key(|refused| (refused.place.is_shadow, std::cmp::Reverse((refused.count, refused.last))));
        left_out += refused.len().saturating_sub(most);
        refused.truncate(most);
        Self { refused, left_out, missed, is_partial: !answers.missing.is_empty(), bounds }
    }
}

impl Refused {
    fn add(&mut self, instance: &str, now: u64, refusal: &Value, others: Vec<String>, place: Place) {
        let number = |name: &str| number(refusal, name);
        let (count, first) = (number("count").unwrap_or(1), number("first_ms").unwrap_or_default());
        let last = number("last_ms").unwrap_or_default();
        self.first = if self.count == 0 { first } else { self.first.min(first) };
        self.count = self.count.saturating_add(count);
        *self.alike.entry((instance.to_owned(), number("generation"))).or_default() += 1;
        match self.instances.iter_mut().find(|(name, _)| name == instance) {
            Some((_, known)) => *known = known.saturating_add(count),
            None => self.instances.push((instance.to_owned(), count)),
        }
        if last >= self.last {
            let until = number("retry_ms").map(|retry| last.saturating_add(retry));
            let (reason, hits) = (reason(refusal), number("hits").unwrap_or(1));
            let described = number("described_ms").unwrap_or(last);
            *self = Self { last, until, now, reason, hits, others, described, place, ..std::mem::take(self) };
        }
    }
}

/// Returns what was refused, and the other descriptors of the request.
fn place(refusal: &Value, is_shadow: bool) -> (Place, Vec<String>) {
    let descriptors = list(refusal, "descriptors").iter();
    let mut all: Vec<String> = descriptors.map(|descriptor| admin::descriptor(items(descriptor))).collect();
    let refused = number(refusal, "refused").and_then(|index| usize::try_from(index).ok());
    let descriptor = match refused.filter(|index| *index < all.len()) {
        Some(index) => all.remove(index),
        None => "the whole request".to_owned(),
    };
    if flag(refusal, "is_cut") {
        all.push("more that is not kept".to_owned());
    }
    let [domain, rule, limit, quota] = ["domain", "rule", "limit", "quota"].map(|name| text(refusal, name));
    (Place { is_shadow, domain, descriptor, rule, limit, quota }, all)
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for refused in &self.refused {
            writeln!(f, "{refused}")?;
        }
        if self.refused.is_empty() {
            writeln!(f, "No such refusal is known. Each instance keeps {}.", self.bounds)?;
        }
        if self.left_out > 0 {
            writeln!(f, "{} more refused descriptors are not shown: see --most, --domain and --rule.", self.left_out)?;
        }
        if self.missed > 0 {
            writeln!(
                f,
                "{} more refusals, of all rules since the instances started, are not kept: a rule refused too many descriptors at a time, or somebody read the list at that moment.",
                self.missed
            )?;
        }
        if self.is_partial {
            writeln!(f, "Not all instances answered, so there may be more refusals.")?;
        }
        Ok(())
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Place { is_shadow, domain, descriptor, rule, limit, quota } = &self.place;
        let refused = if *is_shadow { "would have been refused" } else { "refused" };
        writeln!(f, "{}  {descriptor}", if domain.is_empty() { "(no known domain)" } else { domain })?;
        let ago = Ago(self.now.saturating_sub(self.last));
        match self.count {
            1 => writeln!(f, "  {refused} once, at {} UTC, {ago} ago", Clock(self.last))?,
            count => {
                let (first, last) = (Clock(self.first), Clock(self.last));
                writeln!(f, "  {refused} {count} times from {first} to {last} UTC, the last time {ago} ago")?;
            }
        }
        let by = super::limit_of(rule, quota, limit);
        writeln!(f, "  by {}{by}: {}", if rule.is_empty() { "" } else { "rule " }, self.reason)?;
        if *is_shadow {
            writeln!(f, "  shadow mode: this refused nothing")?;
        }
        let room = if self.hits > 1 { format!("room for {} hits", self.hits) } else { "room".to_owned() };
        match self.until {
            Some(until) if until > self.now => {
                // A time of the day says nothing about another day.
                let left = until - self.now;
                let at = if left < DAY { format!("at {} UTC, ", Clock(until)) } else { String::new() };
                writeln!(f, "  this limit has {room} again {at}in {}, unless other calls take it first", Ago(left))?;
            }
            Some(until) => {
                writeln!(
                    f,
                    "  this limit has had {room} again since {} UTC, {} ago, unless other calls took it",
                    Clock(until),
                    Ago(self.now - until)
                )?;
            }
            None => {}
        }
        if let Some(alike) = self.alike.values().max().filter(|alike| **alike > 1) {
            writeln!(
                f,
                "  {alike} different descriptors look the same here: keys and values are cut after 128 bytes, and a masked reader sees networks in place of addresses"
            )?;
        }
        if !self.others.is_empty() {
            let others = self.others.join("; ");
            match self.count {
                1 => writeln!(f, "  in the same request: {others}")?,
                _ => writeln!(f, "  in the same request as the one of {} UTC: {others}", Clock(self.described))?,
            }
        }
        let at: Vec<String> = self.instances.iter().map(|(name, count)| format!("{name} ({count})")).collect();
        writeln!(f, "  at {}", at.join(", "))
    }
}

/// Returns the reason of a refusal.
fn reason(refusal: &Value) -> String {
    let by_caller = if flag(refusal, "is_sent") { " (a limit that the request sent)" } else { "" };
    let (hits, room) = (number(refusal, "hits").unwrap_or(1), number(refusal, "room").unwrap_or_default());
    let left = match (&*text(refusal, "provenance"), number(refusal, "retry_ms")) {
        ("store", None) => {
            format!("the request asked for {}, and the limit never allows as much", counted(hits, "hit"))
        }
        ("store", Some(_)) if room > 0 => {
            format!("the request asked for {}, and {room} were left", counted(hits, "hit"))
        }
        (provenance, _) => meaning(provenance).to_owned(),
    };
    left + by_caller
}

/// Returns the reason that a provenance means.
fn meaning(provenance: &str) -> &str {
    match provenance {
        "store" => "its counter is used up",
        "known" => "this instance remembered that its counter is used up, and did not ask the store again",
        "closed" => "the store did not answer, and the policy `closed` refuses then",
        "local" => "the store did not answer, and this instance's part of the limit is used up",
        "rule" => "the rule denies the request",
        "no_room" => "it was to be delayed, and as many requests were held as there is room for",
        "too_large" => "the message is too large",
        "none" => "no limit of the request can admit it",
        other => other,
    }
}
