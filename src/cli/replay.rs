//! `tidegate replay`: decides recorded requests by other rules, on a virtual clock, and compares the outcomes.

use std::collections::{BTreeSet, HashMap};
use std::io::{IsTerminal, Read, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, ensure};
use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};

use self::access_log::AccessLog;
use self::recording::{By, ChangedValue, Doubt, Recorded, Recording};
use self::tally::Tally;
use crate::app::simulator::MOST_COUNTERS;
use crate::app::simulator::replay::{Gap, Replay};
use crate::file;
use crate::model::{Decision, Finding, Micros, Outcome, Request, counted};
use crate::rules::live::LiveRules;
use crate::rules::{RuleSet, ValueUse};

mod access_log;
mod recording;
mod tally;
mod time;

/// Maximum size of a recording: 2 GiB, about four million decisions.
const MOST_BYTES: usize = 2 << 30;
/// Decisions between two updates of the progress line: 10,000.
const PROGRESS_EVERY: usize = 10_000;
/// Maximum number of domains that are named because the rules do not have them: 10.
const MOST_DOMAINS: usize = 10;
/// End of the message about an access log without the fields of any descriptor.
const FIELDS: &str = "a field of each --descriptor. Name fields that the lines have, or log these fields";
/// Path that means standard input.
const STDIN: &str = "-";

pub(super) fn command() -> Command {
    Command::new("replay")
        .about("Show whom other rules would have refused, from recorded decisions; exit code 0: nobody else, 1: others, 2: a file is wrong")
        .long_about(
            "Decides recorded requests by other rules, in the order of their times, and shows who would be refused that was admitted, and the reverse. Nothing is sent and nothing waits: the limiter of `tidegate serve` decides in this process, with counters in memory, on a virtual clock.\nHits may be missing in a recording: from before its start, and where decisions were skipped. A decision that depends on them is `undetermined`, and so is one of which the recording lacks a value that a rule compares. These are counted apart, with the reason.\nExit code 0: no decision would change. 1: at least one would. 2: a file is wrong or cannot be read, or there is no decision in the files.",
        )
        .after_help(
            "Examples:\n  Record all decisions for ten minutes, and decide them by new rules:\n    tidegate tap --json --rate 10000 --duration 10m > decisions.jsonl\n    tidegate replay --rules new/ decisions.jsonl\n  The same with an access log of Envoy in JSON:\n    tidegate replay --rules new/ --domain edge --descriptor user={x_user_id} --descriptor path={path} access.log",
        )
        .arg(
            Arg::new("rules")
                .long("rules")
                .value_name("PATH")
                .required(true)
                .action(ArgAction::Append)
                .value_parser(value_parser!(PathBuf))
                .help("Rule file or directory to decide by. Can be repeated"),
        )
        .arg(super::overlay())
        .arg(
            Arg::new("from-empty")
                .long("from-empty")
                .action(ArgAction::SetTrue)
                .help("Take every counter as empty at the start of the recording, except where the recording shows that it was not"),
        )
        .args(access_log::arguments())
        .arg(super::most().help("Most rows of each list"))
        .arg(Arg::new("json").long("json").action(ArgAction::SetTrue).help("Print the report as JSON"))
        .arg(
            Arg::new("FILE")
                .required(true)
                .num_args(1..)
                .value_parser(value_parser!(PathBuf))
                .help("Lines of JSON from `tidegate tap --json` or /v1/decisions, or an access log; - for standard input. Name the recordings of all instances that share counters"),
        )
}

pub(super) fn run(matches: &ArgMatches) -> anyhow::Result<ExitCode> {
    let rules = matches.get_many("rules").into_iter().flatten().cloned().collect();
    let rules = Arc::new(LiveRules::new(super::load_to_decide(matches, rules)?));
    let access_log = AccessLog::new(matches)?;
    let mut recording = Recording::default();
    let mut without_descriptor = 0_u64;
    for path in super::paths(matches) {
        without_descriptor += read(&path, access_log.as_ref(), &mut recording)?;
    }
    ensure!(
        !recording.decisions.is_empty(),
        "there is no decision to replay{}",
        match without_descriptor {
            0 => ": the files have no line with a decision. Record for longer, while requests arrive".to_owned(),
            1 => format!(": the only request lacks {FIELDS}"),
            number => format!(": all {number} requests lack {FIELDS}"),
        }
    );
    recording.decisions.sort_by_key(|recorded| recorded.time);
    let mut tally = Tally::default();
    if without_descriptor > 0 {
        tally.notes.push(match without_descriptor {
            1 => "1 request has no descriptor, and no limit applies to it".to_owned(),
            number => format!("{number} requests have no descriptor, and no limit applies to them"),
        });
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(decide_all(recording, &rules, matches.get_flag("from-empty"), &mut tally))?;
    let most = usize::try_from(super::most_rows(matches))?;
    super::print(&if matches.get_flag("json") { tally.json(most) } else { tally.text(most) })?;
    Ok(if tally.has_changes() { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Adds the lines of a file to `recording`. Returns the number of requests without a descriptor.
fn read(path: &Path, access_log: Option<&AccessLog>, recording: &mut Recording) -> anyhow::Result<u64> {
    let name = path.display();
    let bytes = if path.as_os_str() == STDIN {
        let mut bytes = Vec::new();
        let most = u64::try_from(MOST_BYTES).unwrap_or(u64::MAX);
        std::io::stdin()
            .take(most.saturating_add(1))
            .read_to_end(&mut bytes)
            .context("standard input cannot be read")?;
        ensure!(
            bytes.len() <= MOST_BYTES,
            "standard input is larger than {} MiB: replay a part of it",
            MOST_BYTES >> 20
        );
        bytes
    } else {
        file::read(path, MOST_BYTES).with_context(|| name.to_string())?
    };
    let mut without_descriptor = 0;
    let mut has_right_line = false;
    let mut lines = bytes.split_inclusive(|byte| *byte == b'\n').enumerate().peekable();
    while let Some((index, line)) = lines.next() {
        let is_cut = lines.peek().is_none() && line.last() != Some(&b'\n');
        let line = String::from_utf8_lossy(line);
        if line.trim().is_empty() {
            continue;
        }
        let added = match access_log {
            None => recording.add(&line),
            Some(access_log) => access_log.read(&line).map(|read| match read {
                Some(recorded) => recording.decisions.push(recorded),
                None => without_descriptor += 1,
            }),
        };
        let is_right = added.is_ok();
        match added {
            // Without a right line before it, the file is more likely no recording at all.
            Err(_) if is_cut && has_right_line => {
                eprintln!("{name}:{}: this last line is cut off, and is left out", index + 1);
            }
            added => added.with_context(|| format!("{name}:{}", index + 1))?,
        }
        has_right_line |= is_right;
    }
    Ok(without_descriptor)
}

/// Decides all decisions of a recording by `rules`, and counts them in `tally`.
async fn decide_all(
    recording: Recording,
    rules: &Arc<LiveRules>,
    is_from_empty: bool,
    tally: &mut Tally,
) -> anyhow::Result<()> {
    let Recording { decisions, mut gaps, starts, skipped, filters } = recording;
    let first = decisions.first().map(|recorded| recorded.time);
    // All instances are recorded from the last start on.
    let start = starts.into_iter().max().or(first).unwrap_or_default();
    if !is_from_empty {
        gaps.push(Gap { since: Micros::ZERO, until: start });
    }
    if skipped > 0 {
        tally.notes.push(format!(
            "{} {} skipped while it was recorded: use a higher --rate of `tidegate tap`",
            counted(skipped, "decision"),
            if skipped == 1 { "was" } else { "were" }
        ));
    }
    if !filters.is_empty() {
        tally.notes.push(format!(
            "it was filtered by {}, so other requests are missing: record without filters",
            filters.join(", ")
        ));
    }
    let mut replay = Replay::new(rules, gaps);
    let snapshot = replay.rules();
    let mut uses = ValueUses { rules: &snapshot, known: HashMap::new() };
    let mut unmatched = Unmatched::default();
    let (all, is_shown) = (decisions.len(), std::io::stderr().is_terminal());
    for (number, recorded) in decisions.into_iter().enumerate() {
        if is_shown && number % PROGRESS_EVERY == 0 {
            let _ = write!(std::io::stderr(), "\r{number} of {all} decided");
        }
        decide(recorded, &mut replay, &mut uses, &mut unmatched, tally).await;
        ensure!(
            replay.dropped_counters() == 0,
            "the recording has more than {MOST_COUNTERS} counters at a time, which do not fit: replay a part of it"
        );
    }
    if is_shown {
        // Clears the line.
        let _ = write!(std::io::stderr(), "\r\x1b[K");
    }
    let counters = replay.counters_in_use();
    if counters > 0 {
        let were = if counters == 1 { "was" } else { "were" };
        tally.notes.push(format!("{} {were} in use before it began", counted(counters, "counter")));
    }
    unmatched.note(&mut tally.notes);
    if tally.has_several_generations() {
        tally.notes.push("the rules changed while it was recorded".to_owned());
    }
    Ok(())
}

/// Decides one recorded request, and counts the result.
async fn decide(
    recorded: Recorded,
    replay: &mut Replay,
    uses: &mut ValueUses<'_>,
    unmatched: &mut Unmatched,
    tally: &mut Tally,
) {
    let rules = uses.rules;
    let Some(request) = &recorded.request else {
        let doubt = recorded.doubt.clone().or(Some(Doubt::TooLarge));
        return tally.add(recorded, doubt, Outcome::Admitted, By::default);
    };
    unmatched.add_domain(rules, request.domain());
    let unknown = recorded.changed.iter().find_map(|changed| uses.doubt(request, *changed));
    if let Some(doubt) = unknown.or_else(|| recorded.doubt.clone().filter(|doubt| *doubt == Doubt::Cut)) {
        replay.charge_in_doubt(rules, request, recorded.time).await;
        return tally.add(recorded, Some(doubt), Outcome::Admitted, By::default);
    }
    let replayed = replay.decide(rules, request, recorded.time, &recorded.readings).await;
    unmatched.add(&replayed.decision);
    let uncertain = (!replayed.is_certain).then_some(Doubt::MissingHits);
    let doubt = recorded.doubt.clone().or(uncertain);
    let (outcome, by) = (replayed.decision.outcome, by(&replayed.decision, request));
    tally.add(recorded, doubt, outcome, || by);
}

/// Returns rule, limit and descriptor of a decision.
fn by(decision: &Decision<'_>, request: &Request) -> By {
    if !decision.outcome.is_refused() {
        return By::default();
    }
    let deciding = decision.deciding();
    let descriptor = deciding.descriptor.and_then(|index| request.descriptors().get(index));
    let descriptor = descriptor.or_else(|| request.descriptors().first());
    By {
        rule: deciding.rule.map(|rule| rule.path.to_string()).unwrap_or_default(),
        limit: deciding.limit.unwrap_or_default().to_owned(),
        descriptor: descriptor.map(super::descriptor::spelled).unwrap_or_default(),
    }
}

/// Recorded requests that no rule is for.
#[derive(Default)]
struct Unmatched {
    /// Number of decisions without a rule for any descriptor.
    decisions: u64,
    /// Domains that the rules do not have, at most [`MOST_DOMAINS`].
    domains: BTreeSet<String>,
}

impl Unmatched {
    fn add_domain(&mut self, rules: &RuleSet, domain: &str) {
        if self.domains.len() < MOST_DOMAINS && rules.domain(domain).is_none() && !self.domains.contains(domain) {
            self.domains.insert(domain.to_owned());
        }
    }

    fn add(&mut self, decision: &Decision<'_>) {
        let is_unmatched = decision.parts.iter().all(|part| matches!(part.finding, Finding::Unmatched));
        self.decisions += u64::from(is_unmatched);
    }

    /// Adds the remarks about these requests.
    fn note(&self, notes: &mut Vec<String>) {
        if self.decisions > 0 {
            notes.push(format!("{} met no rule of these files", counted(self.decisions, "decision")));
        }
        notes.extend(self.domains.iter().map(|domain| format!("domain {} is not in the rules", domain.escape_debug())));
    }
}

/// Uses that the rules make of values, by domain, keys up to the entry's, and index of the entry.
struct ValueUses<'a> {
    rules: &'a RuleSet,
    known: HashMap<(String, Vec<Vec<u8>>), ValueUse>,
}

impl ValueUses<'_> {
    /// Returns the reason why the rules cannot decide `request` with a value in another form, if they cannot.
    fn doubt(&mut self, request: &Request, changed: ChangedValue) -> Option<Doubt> {
        let descriptor = request.descriptors().get(changed.descriptor)?;
        let keys: Vec<Vec<u8>> =
            descriptor.entries.iter().take(changed.entry + 1).map(|entry| entry.key.to_vec()).collect();
        let known = self.known.entry((request.domain().to_owned(), keys));
        let value_use = *known.or_insert_with(|| self.rules.value_use(request.domain(), descriptor, changed.entry));
        let key = String::from_utf8_lossy(&descriptor.entries.get(changed.entry)?.key).into_owned();
        match value_use {
            ValueUse::Unused => None,
            ValueUse::Counted if changed.is_digest => None,
            ValueUse::Compared if changed.is_digest => Some(Doubt::Digest(key)),
            ValueUse::Counted | ValueUse::Compared => Some(Doubt::CutValue(key)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::ValueUses;
    use super::recording::{Doubt, Recording};
    use crate::model::Descriptor;
    use crate::rulefile::{File, Options, load};
    use crate::rules::ValueUse;

    #[test]
    fn a_masked_recording_is_decided_only_where_the_rules_need_no_value() {
        let text = "domain: d
descriptors:
  - { key: user, rate_limit: { unit: day, requests_per_unit: 1 } }
  - { key: path, value: /login, rate_limit: { unit: day, requests_per_unit: 1 } }
  - { key: ip, rate_limit: { unit: day, requests_per_unit: 2 } }
";
        let file = File { name: "rules.yaml".into(), bytes: text.into() };
        let rules = load(&[file], Options::default()).unwrap().rules;
        let mut uses = ValueUses { rules: &rules, known: HashMap::new() };
        let mut doubt = |entry: &str| {
            let mut recording = Recording::default();
            let start =
                r#"{"time_us": 1, "domain": "d", "outcome": "admitted", "descriptors": [{"index": 0, "entries": ["#;
            recording.add(&format!("{start}{entry}]}}]}}")).unwrap();
            let recorded = &recording.decisions[0];
            recorded.changed.iter().find_map(|changed| uses.doubt(recorded.request.as_ref().unwrap(), *changed))
        };
        let digest = |key: &str| format!(r#"{{"key": "{key}", "value": "5f0c", "is_digest": true}}"#);
        let network = |key: &str| format!(r#"{{"key": "{key}", "value": "203.0.113.0/24", "is_cut": true}}"#);
        assert_eq!(doubt(&digest("user")), None, "a digest has a counter of its own");
        assert_eq!(doubt(&digest("path")), Some(Doubt::Digest("path".into())));
        assert_eq!(doubt(&network("ip")), Some(Doubt::CutValue("ip".into())), "a network has several addresses");
        assert_eq!(doubt(&network("path")), Some(Doubt::CutValue("path".into())));
        assert_eq!(doubt(&network("other")), None);
        let both = r#"{"key": "user", "value": "5f0c", "is_digest": true, "is_cut": true}"#;
        assert_eq!(doubt(both), Some(Doubt::CutValue("user".into())), "the digest of a cut value is of several values");
    }

    #[test]
    fn a_value_is_compared_if_a_rule_is_for_some_values_only() {
        let text = "domain: d
descriptors:
  - key: user
    rate_limit: { unit: day, requests_per_unit: 1 }
    descriptors:
      - { key: path, value: /login, rate_limit: { unit: day, requests_per_unit: 1 } }
      - { key: path, rate_limit: { unit: day, requests_per_unit: 2 } }
  - { key: address, cidr: [10.0.0.0/8], deny: true }
";
        let file = File { name: "rules.yaml".into(), bytes: text.into() };
        let rules = load(&[file], Options::default()).unwrap().rules;
        let value_use =
            |domain: &str, entries: &str, index| rules.value_use(domain, &Descriptor::parse(entries).unwrap(), index);
        assert_eq!(value_use("d", "user=1", 0), ValueUse::Counted);
        assert_eq!(value_use("d", "user=1,path=/x", 0), ValueUse::Counted);
        assert_eq!(value_use("d", "user=1,path=/x", 1), ValueUse::Compared);
        assert_eq!(value_use("d", "user=1,other=/x", 1), ValueUse::Unused);
        assert_eq!(value_use("d", "address=a", 0), ValueUse::Compared);
        assert_eq!(value_use("e", "user=1", 0), ValueUse::Unused);
    }
}
