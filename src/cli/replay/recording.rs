//! A recording of decisions: the lines of JSON of `tidegate tap --json` and of `/v1/decisions`.

use std::fmt;

use anyhow::{Context, bail};
use serde_json::Value;

use crate::app::simulator::replay::{Gap, Reading};
use crate::cli::admin::{flag, list, number, text};
use crate::cli::descriptor;
use crate::model::{Descriptor, Entry, Micros, Outcome, Override, Provenance, Request, Unit};

/// Decisions, and the spans in which others may be missing.
#[derive(Debug, Default)]
pub(super) struct Recording {
    /// The decisions, in the order of their lines.
    pub(super) decisions: Vec<Recorded>,
    /// Spans in which decisions were skipped or filtered out.
    pub(super) gaps: Vec<Gap>,
    /// Times at which recordings of instances began.
    pub(super) starts: Vec<Micros>,
    /// Number of decisions that were skipped.
    pub(super) skipped: u64,
    /// Names of the filters of the recordings.
    pub(super) filters: Vec<String>,
}

/// A recorded decision.
#[derive(Debug)]
pub(super) struct Recorded {
    /// Time of the decision.
    pub(super) time: Micros,
    /// The request; `None` if its descriptors were not recorded.
    pub(super) request: Option<Request>,
    /// Outcome of the request.
    pub(super) outcome: Outcome,
    /// Reason why the recording does not show the decision of its rules.
    pub(super) doubt: Option<Doubt>,
    /// Values that were not recorded as they were sent.
    pub(super) changed: Vec<ChangedValue>,
    /// Readings of the counters, just before the decision.
    pub(super) readings: Vec<Reading>,
    /// Rule, limit and descriptor that decided, as text.
    pub(super) by: By,
    /// Number of the rule load that decided.
    pub(super) generation: Option<u64>,
}

/// Rule, limit and descriptor of a decision.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct By {
    /// Path of the rule; empty if there is none.
    pub(super) rule: String,
    /// Name of the limit; empty if it has none.
    pub(super) limit: String,
    /// Descriptor.
    pub(super) descriptor: String,
}

/// A value that was not recorded as it was sent.
#[derive(Clone, Copy, Debug)]
pub(super) struct ChangedValue {
    /// Index of the descriptor.
    pub(super) descriptor: usize,
    /// Index of the entry.
    pub(super) entry: usize,
    /// True for a digest, false for a value that was cut or escaped, or of which only the network was recorded.
    pub(super) is_digest: bool,
}

/// Reason why it is unknown if a decision would change.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Doubt {
    /// A policy decided in place of the store.
    Policy(&'static str),
    /// Only the domain of the message was read.
    TooLarge,
    /// The request was refused because too many calls waited.
    TooManyHeld,
    /// The line has only a part of the request.
    Cut,
    /// A rule compares the value of this key, and the recording has its digest.
    Digest(String),
    /// The value of this key was cut.
    CutValue(String),
    /// Hits are missing that were charged before the recording or while decisions were skipped.
    MissingHits,
}

impl fmt::Display for Doubt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Policy(policy) => write!(f, "the store did not answer, and policy `{policy}` decided, not a limit"),
            Self::TooLarge => f.write_str("the message was too large, and its descriptors were not recorded"),
            Self::TooManyHeld => {
                f.write_str("the request was refused because too many calls were waiting, not by a limit")
            }
            Self::Cut => f.write_str("only a part of the request was recorded"),
            Self::Digest(key) => write!(f, "a rule compares the value of `{key}`, and the recording has its digest"),
            Self::CutValue(key) => {
                write!(f, "a rule has the key `{key}`, and the recording does not have its value as it was sent")
            }
            Self::MissingHits => f.write_str("it depends on earlier hits that are not in the recording"),
        }
    }
}

impl Recording {
    /// Adds the decision or the mark of one line.
    ///
    /// # Errors
    /// If the line is none.
    pub(super) fn add(&mut self, line: &str) -> anyhow::Result<()> {
        let value: Value = serde_json::from_str(line).context("it is not JSON")?;
        let time = |name| number(&value, name).map(Micros::new);
        if let Some(skipped) = number(&value, "skipped") {
            let (Some(since), Some(until)) = (time("since_us"), time("until_us")) else {
                bail!("it says that decisions were skipped, without since_us and until_us");
            };
            self.skipped = self.skipped.saturating_add(skipped);
            self.gaps.push(Gap { since, until });
        } else if let Some(since) = time("since_us") {
            self.starts.push(since);
            // Requests of another domain charge no counter of this one.
            let filters = list(&value, "filters").iter().filter_map(Value::as_str).filter(|name| *name != "domain");
            let filters: Vec<String> = filters.map(str::to_owned).collect();
            if !filters.is_empty() {
                self.gaps.push(Gap { since, until: Micros::new(u64::MAX) });
                self.filters.extend(filters);
            }
        } else {
            self.decisions.push(decision(&value).context("it is not a decision as `tidegate tap --json` prints it")?);
        }
        Ok(())
    }
}

/// Returns the decision of a line.
fn decision(line: &Value) -> anyhow::Result<Recorded> {
    let time = number(line, "time_us").context("it has no time_us")?;
    let word = text(line, "outcome");
    let outcome = Outcome::ALL.into_iter().find(|outcome| outcome.name() == word);
    let outcome = outcome.context("its outcome is not admitted, refused or failed")?;
    let domain = text(line, "domain");
    let mut sent: Vec<&Value> = list(line, "descriptors").iter().collect();
    let first = sent.first().map(|first| descriptor_text(first)).unwrap_or_default();
    // The deciding one is the first in the line.
    sent.sort_by_key(|descriptor| number(descriptor, "index"));
    let (mut changed, mut descriptors, mut readings) = (Vec::new(), Vec::new(), Vec::new());
    for (index, value) in sent.iter().enumerate() {
        descriptors.push(sent_descriptor(value, index, &mut changed)?);
        readings.extend(readings_of(value, index, outcome));
    }
    let hits = number(line, "hits_addend").and_then(|hits| u32::try_from(hits).ok()).unwrap_or_default();
    let is_cut = flag(line, "is_cut") || sent.iter().any(|descriptor| flag(descriptor, "is_cut"));
    let request = if descriptors.is_empty() { None } else { Some(Request::new(domain, descriptors, hits)?) };
    let provenance = text(line, "provenance");
    let policies = [Provenance::Error, Provenance::Open, Provenance::Closed, Provenance::Local];
    let policy = policies.into_iter().find(|policy| policy.name() == provenance);
    let doubt = match policy {
        Some(policy) => Some(Doubt::Policy(policy.name())),
        None if request.is_none() => Some(Doubt::TooLarge),
        None if flag(line, "is_hold_full") => Some(Doubt::TooManyHeld),
        None => is_cut.then_some(Doubt::Cut),
    };
    let by = By { rule: text(line, "rule"), limit: text(line, "limit"), descriptor: first };
    let generation = number(line, "generation");
    Ok(Recorded { time: Micros::new(time), request, outcome, doubt, changed, readings, by, generation })
}

fn descriptor_text(value: &Value) -> String {
    let entries = list(value, "entries").iter().map(|entry| Entry::new(text(entry, "key"), text(entry, "value")));
    descriptor::spelled(&Descriptor { entries: entries.collect(), ..Descriptor::default() })
}

/// Returns a descriptor as it was sent, and adds the values that were recorded in another form to `changed`.
fn sent_descriptor(value: &Value, index: usize, changed: &mut Vec<ChangedValue>) -> anyhow::Result<Descriptor> {
    let plain = |entry: &Value, name: &str| entry.get(name).and_then(Value::as_str).map(str::to_owned);
    let mut entries = Vec::new();
    for (number, entry) in list(value, "entries").iter().enumerate() {
        let (key, value) = plain(entry, "key").zip(plain(entry, "value")).context("an entry has no key or no value")?;
        let (is_digest, is_cut) = (flag(entry, "is_digest"), flag(entry, "is_cut"));
        if is_digest || is_cut {
            // The digest of a cut value stands for several values.
            changed.push(ChangedValue { descriptor: index, entry: number, is_digest: is_digest && !is_cut });
        }
        entries.push(Entry::new(key, value));
    }
    let hits = value.get("hits").and_then(Value::as_i64);
    let limit = value.get("sent_limit").filter(|limit| !limit.is_null());
    let limit = limit.map(|limit| sent_limit(limit).context("its sent_limit is wrong")).transpose()?;
    let is_negative_hits = hits.is_some_and(i64::is_negative);
    Ok(Descriptor { entries, limit, hits_addend: hits.map(i64::unsigned_abs), is_negative_hits, proxy_entry: None })
}

fn sent_limit(value: &Value) -> Option<Override> {
    let of = |name| u32::try_from(number(value, name)?).ok();
    Override::of_units(of("requests_per_unit")?, Unit::parse(&text(value, "unit"))?, of("unit_multiplier")?)
}

/// Returns the readings of a descriptor's counters just before the decision: what the store answered, without the hits of
/// the request. A charge without its algorithm or window gives none.
fn readings_of(value: &Value, index: usize, outcome: Outcome) -> impl Iterator<Item = Reading> {
    let rule = text(value, "rule");
    let gives_back = value.get("hits").and_then(Value::as_i64).is_some_and(i64::is_negative);
    list(value, "charges").iter().filter_map(move |charge| {
        let of = |name| number(charge, name);
        // A limit that refuses may have more hits than it admits.
        let is_admitted = text(charge, "outcome") == Outcome::Admitted.name();
        if gives_back || !is_admitted || text(charge, "provenance") != Provenance::Store.name() {
            return None;
        }
        // A request that another limit refuses may have spent its hits here or not.
        let is_exact = outcome == Outcome::Admitted;
        let own = if is_exact { of("hits")? } else { 0 };
        let used = of("capacity")?.saturating_sub(of("remaining")?).saturating_sub(own);
        let limit = charge.get("limit").and_then(Value::as_str).map(str::to_owned);
        Some(Reading {
            descriptor: index,
            rule: rule.clone(),
            limit,
            algorithm: charge.get("algorithm").and_then(Value::as_str)?.to_owned(),
            window: Micros::new(of("window_us")?),
            used,
            is_exact,
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_skipped_decisions_has_a_maximum() {
        let mut recording = Recording::default();
        let line = format!("{{\"skipped\": {}, \"since_us\": 1, \"until_us\": 2}}", u64::MAX);
        recording.add(&line).unwrap();
        recording.add(&line).unwrap();
        assert_eq!(recording.skipped, u64::MAX);
    }

    #[test]
    fn a_charge_without_its_algorithm_gives_no_reading() {
        let readings = |algorithm: &str| {
            let line = format!(
                r#"{{"time_us": 1, "domain": "d", "outcome": "admitted", "descriptors": [{{"index": 0, "entries": [], "rule": "d.user",
                "charges": [{{{algorithm} "capacity": 5, "window_us": 60, "hits": 1, "outcome": "admitted", "provenance": "store", "remaining": 3}}]}}]}}"#
            );
            let mut recording = Recording::default();
            recording.add(&line).unwrap();
            recording.decisions.remove(0).readings
        };
        assert_eq!(readings(""), []);
        let found = readings(r#""algorithm": "gcra","#);
        assert_eq!((found[0].algorithm.as_str(), found[0].used, found[0].is_exact), ("gcra", 1, true));
    }
}
