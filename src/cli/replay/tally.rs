//! Counts of replayed decisions, and the report.

use std::collections::HashMap;
use std::fmt::Write;
use std::hash::Hash;

use serde_json::{Value, json};

use super::recording::{By, Doubt, Recorded};
use super::time::Utc;
use crate::model::counted;
use crate::model::{Micros, Outcome};

/// Counts of the decisions of a replay.
#[derive(Debug, Default)]
pub(super) struct Tally {
    first: Option<Micros>,
    last: Micros,
    decisions: u64,
    unchanged_admitted: u64,
    unchanged_refused: u64,
    /// Requests that would be refused and were admitted, by what would refuse them.
    refused: HashMap<By, u64>,
    /// Requests that would be admitted and were refused, by what refused them.
    admitted: HashMap<By, u64>,
    /// Requests of which it is unknown, by the reason.
    doubts: HashMap<Doubt, u64>,
    generations: HashMap<u64, u64>,
    /// Remarks about the recording.
    pub(super) notes: Vec<String>,
}

impl Tally {
    /// Counts a decision. `outcome` and `by` are those of the replay; `doubt` is the reason why the outcome is unknown.
    pub(super) fn add(&mut self, recorded: Recorded, doubt: Option<Doubt>, outcome: Outcome, by: impl FnOnce() -> By) {
        self.first = self.first.or(Some(recorded.time));
        self.last = recorded.time;
        self.decisions += 1;
        if let Some(generation) = recorded.generation {
            *self.generations.entry(generation).or_default() += 1;
        }
        match (doubt, recorded.outcome.is_refused(), outcome.is_refused()) {
            (Some(doubt), ..) => *self.doubts.entry(doubt).or_default() += 1,
            (None, false, false) => self.unchanged_admitted += 1,
            (None, true, true) => self.unchanged_refused += 1,
            (None, false, true) => *self.refused.entry(by()).or_default() += 1,
            (None, true, false) => *self.admitted.entry(recorded.by).or_default() += 1,
        }
    }

    /// Returns true if a decision would change.
    pub(super) fn has_changes(&self) -> bool {
        !self.refused.is_empty() || !self.admitted.is_empty()
    }

    /// Returns true if different rules were in force during the recording.
    pub(super) fn has_several_generations(&self) -> bool {
        self.generations.len() > 1
    }

    /// Returns the report for people, with the `most` frequent rows of each list.
    pub(super) fn text(&self, most: usize) -> String {
        let mut text = String::new();
        let span = self.first.map(|first| format!(" from {} to {} UTC", Utc(first), Utc(self.last)));
        let _ = writeln!(text, "{}{}", counted(self.decisions, "decision"), span.unwrap_or_default());
        let unchanged = self.unchanged_admitted + self.unchanged_refused;
        let (admitted, refused) = (self.unchanged_admitted, self.unchanged_refused);
        let mut line = |number: u64, what: &str| _ = writeln!(text, "{number:>10}  {what}");
        line(unchanged, &format!("would not change: {admitted} admitted, {refused} refused"));
        line(sum(&self.refused), "would be refused, and were admitted");
        line(sum(&self.admitted), "would be admitted, and were refused");
        line(sum(&self.doubts), "undetermined");
        rows(&mut text, "Would be refused, by the rule that would refuse:", &self.refused, most);
        rows(&mut text, "Would be admitted, by the rule that refused:", &self.admitted, most);
        if !self.doubts.is_empty() {
            let _ = writeln!(text, "\nUndetermined, because:");
            sorted(&self.doubts).into_iter().for_each(|(doubt, number)| _ = writeln!(text, "{number:>10}  {doubt}"));
        }
        if !self.notes.is_empty() {
            let _ = writeln!(text, "\nAbout the recording:");
            self.notes.iter().for_each(|note| _ = writeln!(text, "  {note}"));
        }
        text
    }

    /// Returns the report for programs.
    pub(super) fn json(&self, most: usize) -> String {
        let changes = |of: &HashMap<By, u64>| {
            let rows: Vec<Value> = sorted(of).into_iter().take(most).map(|(by, number)| {
                json!({ "rule": some(&by.rule), "limit": some(&by.limit), "descriptor": by.descriptor, "count": number })
            }).collect();
            json!({ "count": sum(of), "by": rows })
        };
        let doubts = sorted(&self.doubts).into_iter();
        let doubts: Vec<Value> =
            doubts.map(|(doubt, number)| json!({ "why": doubt.to_string(), "count": number })).collect();
        let report = json!({
            "decisions": self.decisions,
            "from_us": self.first.map(Micros::get),
            "until_us": self.first.map(|_| self.last.get()),
            "unchanged": { "admitted": self.unchanged_admitted, "refused": self.unchanged_refused },
            "would_be_refused": changes(&self.refused),
            "would_be_admitted": changes(&self.admitted),
            "undetermined": { "count": sum(&self.doubts), "by": doubts },
            "notes": self.notes,
        });
        format!("{report}\n")
    }
}

fn some(text: &str) -> Option<&str> {
    (!text.is_empty()).then_some(text)
}

fn sum<K>(of: &HashMap<K, u64>) -> u64 {
    of.values().sum()
}

/// Returns the rows, the most frequent first.
fn sorted<K: Ord + Hash>(of: &HashMap<K, u64>) -> Vec<(&K, u64)> {
    let mut rows: Vec<(&K, u64)> = of.iter().map(|(key, number)| (key, *number)).collect();
    rows.sort_by(|(one, a), (other, b)| b.cmp(a).then_with(|| one.cmp(other)));
    rows
}

fn rows(text: &mut String, title: &str, of: &HashMap<By, u64>, most: usize) {
    if of.is_empty() {
        return;
    }
    let _ = writeln!(text, "\n{title}");
    let all = sorted(of);
    for (By { rule, limit, descriptor }, number) in all.iter().take(most) {
        let rule = if rule.is_empty() { "no rule" } else { rule };
        let limit = if limit.is_empty() { String::new() } else { format!(" limit {limit}") };
        let _ = writeln!(text, "{number:>10}  {rule}{limit}: {descriptor}");
    }
    if all.len() > most {
        let rest: u64 = all.iter().skip(most).map(|(_, number)| number).sum();
        let _ = writeln!(text, "{rest:>10}  of {}: see more with --most", counted(all.len() - most, "other row"));
    }
}
