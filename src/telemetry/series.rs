//! What is counted for each rule, under labels that come from the rules and, only where a rule asks for it, from requests.

use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use arc_swap::ArcSwap;
use foldhash::{HashMap, HashSet};
use parking_lot::Mutex;

use super::metrics::{DECISIONS, Metric, NEAR_LIMIT, OVER_LIMIT, SHADOW_MODE, TOTAL_HITS, WITHIN_LIMIT};
use super::page::{Family, Page};
use crate::model::{About, Answered, Decision, Descriptor, Hidden, Outcome, Provenance, Request, Series, Shown};

/// The most rules that have series of their own: 10,000, which make a page of some megabytes. The others share one per domain.
const MOST_SERIES: usize = 10_000;
/// The most of them that a client's values may make: 1,000.
const MOST_OF_VALUES: usize = 1_000;
/// The most bytes of a client's value in a label: 128.
const MOST_VALUE_BYTES: usize = 128;
/// What stands for the rules that have no series of their own.
const OTHER: &str = "other";

/// What decided a request, as metrics tell it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Deciding<'d, 'r> {
    /// Which of the answers it was, if it was one.
    pub(super) answer: Option<&'d Answered<'r>>,
    /// Whose rule it was, if anyone's.
    pub(super) rule: Option<&'r About>,
    /// Where it comes from: a provenance, `rule` where nothing was charged, or `none` where nothing limits the request.
    pub(super) provenance: &'static str,
}

/// Every word that may stand for where a decision comes from.
const PROVENANCES: [&str; 7] = ["store", "open", "closed", "local", "error", "rule", "none"];
const OUTCOMES: [(Outcome, &str); 3] =
    [(Outcome::Admitted, "admitted"), (Outcome::Refused, "refused"), (Outcome::Failed, "failed")];

/// The counts of one rule.
#[derive(Debug, Default)]
struct Counts {
    total: AtomicU64,
    over: AtomicU64,
    near: AtomicU64,
    within: AtomicU64,
    shadow: AtomicU64,
    decisions: [[AtomicU64; PROVENANCES.len()]; OUTCOMES.len()],
}

/// One of the counts.
type Of = fn(&Counts) -> &AtomicU64;

/// What tells the counts of one rule from those of others: its domain, and its path below that.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Labels {
    domain: String,
    /// A word for each level; none for what no rule of the domain answers.
    words: Vec<String>,
}

/// The counts of all rules.
#[derive(Debug)]
pub(super) struct Rules {
    near_ratio: f32,
    /// Handles for the rules in force, so that to count takes no look-up.
    table: ArcSwap<Table>,
    all: Mutex<All>,
}

#[derive(Debug, Default)]
struct All {
    counts: HashMap<Labels, Arc<Counts>>,
    /// How many of them a client's values made.
    of_values: usize,
}

#[derive(Debug, Default)]
struct Table {
    generation: u64,
    rules: Box<[OnceLock<Arc<Counts>>]>,
    domains: HashMap<Box<str>, OnceLock<Arc<Counts>>>,
}

impl Rules {
    /// Nothing yet. Beyond `near_ratio` of a limit, hits are near it.
    pub(super) fn new(near_ratio: f32) -> Self {
        Self { near_ratio, table: ArcSwap::default(), all: Mutex::default() }
    }

    /// Other rules are in force. Those that are gone are told of no more, and those that stay go on.
    pub(super) fn replace<'a>(&self, generation: u64, domains: &[&str], rules: impl Iterator<Item = &'a About>) {
        let mut kept = HashSet::default();
        let mut slots = 0;
        for about in rules {
            kept.insert(Labels::of_rule(about));
            slots += 1;
        }
        kept.extend(domains.iter().map(|domain| Labels { domain: (*domain).to_owned(), words: Vec::new() }));
        let mut all = self.all.lock();
        // What clients' values made begins anew: a rule that is gone must leave room for others.
        all.counts.retain(|labels, _| kept.contains(labels));
        all.of_values = 0;
        self.table.store(Arc::new(Table {
            generation,
            rules: std::iter::repeat_with(OnceLock::new).take(slots).collect(),
            domains: domains.iter().map(|domain| ((*domain).into(), OnceLock::new())).collect(),
        }));
    }

    /// Counts a decision and every charge of it.
    pub(super) fn count(&self, request: &Request, decision: &Decision<'_>, deciding: Deciding<'_, '_>) {
        let Some(domain) = decision.domain else { return };
        let table = self.table.load();
        let table = (table.generation == decision.generation).then_some(&**table);
        for answer in &decision.answers {
            if let Some(rule) = answer.rule {
                let counts = |counts: &Counts| counts.charge(answer, self.near_ratio);
                self.with(
                    table,
                    rule,
                    request.descriptors().get(answer.descriptor),
                    &decision.hidden,
                    answer.descriptor,
                    counts,
                );
            }
        }
        let count = |counts: &Counts| counts.decided(decision.outcome, deciding.provenance);
        match deciding.rule {
            Some(rule) => {
                let descriptor = deciding.answer.map_or(0, |answer| answer.descriptor);
                let sent = deciding.answer.and_then(|answer| request.descriptors().get(answer.descriptor));
                self.with(table, rule, sent, &decision.hidden, descriptor, count);
            }
            None => match table.and_then(|table| table.domains.get(domain)) {
                Some(slot) => count(slot.get_or_init(|| self.unruled(domain))),
                None => count(&self.unruled(domain)),
            },
        }
    }

    /// Does something with the counts of a rule, as the request that met it names them.
    fn with(
        &self,
        table: Option<&Table>,
        rule: &About,
        sent: Option<&Descriptor>,
        hidden: &[Hidden],
        index: usize,
        count: impl Fn(&Counts),
    ) {
        if rule.series != Series::Rule
            && let Some(sent) = sent
        {
            return count(&self.named(Labels::of_values(rule, sent, hidden, index), true));
        }
        let id = usize::try_from(rule.id.0).unwrap_or(usize::MAX);
        match table.and_then(|table| table.rules.get(id)) {
            Some(slot) => count(slot.get_or_init(|| self.named(Labels::of_rule(rule), false))),
            // Decided by rules that are no longer, or not yet, in force.
            None => count(&self.named(Labels::of_rule(rule), false)),
        }
    }

    fn unruled(&self, domain: &str) -> Arc<Counts> {
        self.named(Labels { domain: domain.to_owned(), words: Vec::new() }, false)
    }

    /// The counts under these labels; where there are too many, those that all others of the domain share.
    fn named(&self, labels: Labels, is_of_values: bool) -> Arc<Counts> {
        let mut all = self.all.lock();
        if let Some(counts) = all.counts.get(&labels) {
            return Arc::clone(counts);
        }
        if all.counts.len() >= MOST_SERIES || (is_of_values && all.of_values >= MOST_OF_VALUES) {
            let other = Labels { domain: labels.domain, words: vec![OTHER.to_owned()] };
            return Arc::clone(all.counts.entry(other).or_default());
        }
        all.of_values += usize::from(is_of_values);
        Arc::clone(all.counts.entry(labels).or_default())
    }

    /// Adds them to a page.
    pub(super) fn tell(&self, page: &mut Page) {
        let mut all: Vec<(Labels, Arc<Counts>)> = {
            let all = self.all.lock();
            all.counts.iter().map(|(labels, counts)| (labels.clone(), Arc::clone(counts))).collect()
        };
        all.sort_unstable_by(|(one, _), (other, _)| one.cmp(other));
        let hits: [(&'static Metric, Of); 5] = [
            (&TOTAL_HITS, |counts| &counts.total),
            (&OVER_LIMIT, |counts| &counts.over),
            (&NEAR_LIMIT, |counts| &counts.near),
            (&WITHIN_LIMIT, |counts| &counts.within),
            (&SHADOW_MODE, |counts| &counts.shadow),
        ];
        for (metric, of) in hits {
            page.family(metric, |family| {
                for (labels, counts) in all.iter().filter(|(_, counts)| counts.total.load(Ordering::Relaxed) > 0) {
                    labels.reference(family, of(counts).load(Ordering::Relaxed));
                }
            });
        }
        page.family(&DECISIONS, |family| {
            for (labels, counts) in &all {
                let rule = labels.words.join(".");
                for ((_, outcome), row) in OUTCOMES.iter().zip(&counts.decisions) {
                    for (provenance, count) in PROVENANCES.iter().zip(row) {
                        let count = count.load(Ordering::Relaxed);
                        if count > 0 {
                            family.sample(&[&labels.domain, &rule, outcome, provenance], count);
                        }
                    }
                }
            }
        });
    }
}

impl Counts {
    fn decided(&self, outcome: Outcome, provenance: &str) {
        let row = OUTCOMES.iter().position(|(each, _)| *each == outcome);
        let column = PROVENANCES.iter().position(|each| *each == provenance);
        if let (Some(row), Some(column)) = (row, column) {
            self.decisions[row][column].fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Counts one charge as the reference does: by what was used before it and after.
    fn charge(&self, answer: &Answered<'_>, near_ratio: f32) {
        let hits = answer.hits.taken();
        if hits == 0 {
            return;
        }
        let add = |count: &AtomicU64, hits: u64| {
            if hits > 0 {
                count.fetch_add(hits, Ordering::Relaxed);
            }
        };
        add(&self.total, hits);
        let split = Split::of(answer, near_ratio);
        add(&self.within, split.within);
        add(&self.near, split.near);
        add(&self.over, split.over);
        if answer.role.is_shadow() {
            add(&self.shadow, split.over);
        }
    }
}

/// The hits of one charge, by where on its limit they fall.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Split {
    within: u64,
    near: u64,
    over: u64,
}

impl Split {
    fn of(answer: &Answered<'_>, near_ratio: f32) -> Self {
        let Answered { verdict, capacity, is_spared, .. } = answer;
        let (hits, limit) = (answer.hits.taken(), u64::from(*capacity));
        match (verdict.provenance, verdict.outcome) {
            (Provenance::Store, _) => {}
            // Of an instance's own part of a limit nobody knows where it stands.
            (Provenance::Local, Outcome::Refused) => return Self { over: hits, ..Self::default() },
            (Provenance::Local, _) => return Self { within: hits, ..Self::default() },
            // Nothing was counted.
            _ => return Self::default(),
        }
        let near = near(*capacity, near_ratio);
        let left = limit.saturating_sub(u64::from(verdict.remaining));
        if verdict.outcome.is_refused() {
            let before = left;
            let over = (before + hits).saturating_sub(limit);
            if before >= limit || over == 0 {
                return Self { over: hits, ..Self::default() };
            }
            return Self { over, near: limit.saturating_sub(near.max(before)), within: 0 };
        }
        let after = if *is_spared { left + hits } else { left };
        let before = after.saturating_sub(hits);
        let near = match after > near {
            true if before >= near => hits,
            true => after - near,
            false => 0,
        };
        Self { within: hits, near, over: 0 }
    }
}

/// From how many hits on a limit is near, computed as the reference does it, in 32 bits.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    reason = "the reference's own arithmetic; the ratio is from 0 to 1"
)]
fn near(limit: u32, ratio: f32) -> u64 {
    (limit as f32 * ratio).floor() as u64
}

impl Labels {
    fn of_rule(about: &About) -> Self {
        let words = about.path.levels().into_iter().skip(1).map(|level| level.word().to_owned());
        Self { domain: domain(about), words: words.collect() }
    }

    /// With the values of the request where the rule asks for them; what is sensitive shows as its digest.
    fn of_values(about: &About, sent: &Descriptor, hidden: &[Hidden], index: usize) -> Self {
        let is_detailed = about.series == Series::Detailed;
        let levels = about.path.levels().into_iter().skip(1).enumerate();
        let words = levels.map(|(number, level)| {
            let Some(entry) = sent.entries.get(number) else { return level.word().to_owned() };
            let digest = hidden.iter().find(|hidden| (hidden.descriptor, hidden.entry) == (index, number));
            let value = || match digest {
                Some(hidden) => hidden.digest.clone(),
                None => shortened(&String::from_utf8_lossy(&entry.value)),
            };
            match level.shown() {
                Shown::Pattern => level.word().to_owned(),
                Shown::Word | Shown::Value if is_detailed => format!("{}_{}", level.key(), value()),
                Shown::Value if entry.value.is_empty() => level.key().to_owned(),
                Shown::Value => format!("{}_{}", level.key(), value()),
                Shown::Word => level.word().to_owned(),
            }
        });
        Self { domain: domain(about), words: words.collect() }
    }

    /// One series under the reference's labels: the first level, and all below it as one.
    fn reference(&self, family: &mut Family<'_>, value: u64) {
        let (key1, key2) = match self.words.split_first() {
            Some((first, rest)) => (sanitised(first), sanitised(&rest.join("."))),
            None => return,
        };
        family.sample(&[&sanitised(&self.domain), &key1, &key2], value);
    }
}

fn domain(about: &About) -> String {
    about.path.levels().first().map(|domain| domain.word().to_owned()).unwrap_or_default()
}

/// The beginning of a value, where it is long.
fn shortened(value: &str) -> String {
    let end = (0..=MOST_VALUE_BYTES.min(value.len())).rev().find(|end| value.is_char_boundary(*end));
    value.get(..end.unwrap_or(0)).unwrap_or_default().to_owned()
}

/// A name as the reference's statistics have it: without `:` and `|`, and with the dots of IPv4 addresses as underscores.
fn sanitised(name: &str) -> String {
    let name = name.replace([':', '|'], "_");
    let is_of_number = |c: char| c.is_ascii_digit() || c == '.';
    let mut text = String::with_capacity(name.len());
    let mut rest = name.as_str();
    while let Some(begin) = rest.find(is_of_number) {
        let (before, from) = rest.split_at(begin);
        let (number, after) = from.split_at(from.find(|c| !is_of_number(c)).unwrap_or(from.len()));
        text.push_str(before);
        match number.parse::<Ipv4Addr>() {
            Ok(_) => text.push_str(&number.replace('.', "_")),
            Err(_) => text.push_str(number),
        }
        rest = after;
    }
    text + rest
}

#[cfg(test)]
mod tests;
