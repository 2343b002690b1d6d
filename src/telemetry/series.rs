//! Counts per rule. Labels come from the rules; values from requests appear only if a rule asks for them.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use arc_swap::ArcSwap;
use foldhash::{HashMap, HashSet};
use parking_lot::RwLock;

use super::label::SeriesName;
use super::metrics::{DECISIONS, Metric, NEAR_LIMIT, OVER_LIMIT, SHADOW_MODE, TOTAL_HITS, WITHIN_LIMIT};
use super::page::Page;
use super::split::Split;
use crate::model::{About, Answered, Deciding, Decision, Origin, Outcome, Request, Series};

/// Maximum number of series for rules and values: 10,000, which make a page of some megabytes. Further ones share one series.
const MOST_SERIES: usize = 10_000;
/// Maximum number of series from clients' values: 1,000, so that nine tenths remain for rules.
pub(super) const MOST_OF_VALUES: usize = 1_000;

/// Counts of one series. In this order and aligned, so that an admission by the store touches one line of the processor's cache.
#[derive(Debug, Default)]
#[repr(C, align(64))]
struct RuleCounts {
    /// The series that counts the hits, if it is another one. Rules that differ only below the second level share it, as in
    /// the reference.
    hits_of: Option<Arc<RuleCounts>>,
    total: AtomicU64,
    within: AtomicU64,
    decisions: [[AtomicU64; Origin::ALL.len()]; Outcome::ALL.len()],
    near: AtomicU64,
    over: AtomicU64,
    shadow: AtomicU64,
    /// Hits under the full name since the last flush to statsd, if that is on.
    own: Option<Arc<RuleCounts>>,
    /// Digest of the rule's name, if a client's value created the series.
    of_values: Option<u64>,
}

/// Selects one of the counts.
type Of = fn(&RuleCounts) -> &AtomicU64;

/// Counts of all rules.
#[derive(Debug)]
pub(super) struct Rules {
    near_ratio: f32,
    /// True if hits are also counted under the full name of each rule.
    keeps_names: bool,
    /// Direct references to the counts of the rules in force, so that counting needs no lookup.
    table: ArcSwap<Table>,
    all: RwLock<All>,
}

#[derive(Debug, Default)]
struct All {
    counts: HashMap<Arc<SeriesName>, Arc<RuleCounts>>,
    /// The series that count the hits, by the first two levels of the names.
    hits: HashMap<SeriesName, Arc<RuleCounts>>,
    /// Number of series that clients' values created.
    of_values: usize,
    /// Hits of removed rules that statsd has not got yet; at most `MOST_SERIES`.
    removed: Vec<NamedHits>,
}

/// Hits of one rule since the last flush to statsd.
#[derive(Clone, Debug)]
pub struct NamedHits {
    name: Arc<SeriesName>,
    hits: Arc<RuleCounts>,
}

impl NamedHits {
    /// Returns the name: the domain and the levels of the rule, joined by dots.
    pub fn name(&self) -> String {
        // Two underscores behind a dot would be a tag. The series that all domains share has no domain.
        let name = format!("{}.{}.{}", self.name.domain(), self.name.rule(), self.name.value());
        name.trim_matches('.').replace(".__", "._")
    }

    /// Returns the name and the growth of each counter, and begins anew.
    pub fn take(&self) -> [(&'static str, u64); 5] {
        let RuleCounts { total, over, near, within, shadow, .. } = &*self.hits;
        let counts = [
            ("total_hits", total),
            ("over_limit", over),
            ("near_limit", near),
            ("within_limit", within),
            ("shadow_mode", shadow),
        ];
        counts.map(|(name, count)| (name, count.swap(0, Ordering::Relaxed)))
    }
}

#[derive(Debug, Default)]
struct Table {
    generation: u64,
    rules: Box<[OnceLock<Arc<RuleCounts>>]>,
    domains: HashMap<Box<str>, OnceLock<Arc<RuleCounts>>>,
    /// Table of the rules before these; requests that started earlier still use it.
    before: Option<Arc<Table>>,
}

impl Rules {
    /// Creates an empty collection. Hits beyond `near_ratio` of a limit count as near it.
    pub(super) fn new(near_ratio: f32) -> Self {
        Self { near_ratio, keeps_names: false, table: ArcSwap::default(), all: RwLock::default() }
    }

    /// Also counts the hits of each rule under its full name.
    pub(super) fn with_names(self) -> Self {
        Self { keeps_names: true, ..self }
    }

    /// Returns the hits of all rules under their full names. Forgets removed rules without hits that no request uses
    /// any more.
    pub(super) fn named_hits(&self) -> Vec<NamedHits> {
        if !self.all.read().removed.is_empty() {
            let is_needed = |removed: &NamedHits| {
                removed.hits.total.load(Ordering::Relaxed) > 0 || Arc::strong_count(&removed.hits) > 1
            };
            self.all.write().removed.retain(is_needed);
        }
        let all = self.all.read();
        let own = |(name, counts): (&Arc<SeriesName>, &Arc<RuleCounts>)| {
            Some(NamedHits { name: Arc::clone(name), hits: Arc::clone(counts.own.as_ref()?) })
        };
        all.counts.iter().filter_map(own).chain(all.removed.iter().cloned()).collect()
    }

    /// Prepares for rules that are about to be in force. Drops the counts of removed rules and keeps those of the others.
    pub(super) fn replace<'a>(&self, generation: u64, domains: &[&str], rules: impl Iterator<Item = &'a About>) {
        // Digests instead of names: the names of a large rule set would take more memory than the rules.
        let mut kept: HashSet<u64> = domains.iter().map(|domain| SeriesName::of_domain(domain).digest()).collect();
        let mut count = 0;
        for about in rules {
            kept.insert(SeriesName::of_rule(about).digest());
            count += 1;
        }
        let now = self.table.load();
        let before = Table { before: None, ..now.shared() };
        let table = Table {
            generation,
            rules: std::iter::repeat_with(OnceLock::new).take(count).collect(),
            domains: domains.iter().map(|domain| ((*domain).into(), OnceLock::new())).collect(),
            before: Some(Arc::new(before)),
        };
        {
            let mut all = self.all.write();
            let All { counts, removed, .. } = &mut *all;
            // No request uses the rules before those that are replaced now.
            removed.retain(|removed| removed.hits.total.load(Ordering::Relaxed) > 0);
            counts.retain(|name, counts| {
                let is_kept = name.is_other() || kept.contains(&counts.of_values.unwrap_or_else(|| name.digest()));
                if let (false, true, Some(hits)) = (is_kept, removed.len() < MOST_SERIES, &counts.own) {
                    removed.push(NamedHits { name: Arc::clone(name), hits: Arc::clone(hits) });
                }
                is_kept
            });
            let upper: HashSet<SeriesName> = all.counts.keys().map(|name| name.upper()).collect();
            all.hits.retain(|name, _| upper.contains(name));
            all.of_values = all.counts.values().filter(|counts| counts.of_values.is_some()).count();
        }
        self.table.store(Arc::new(table));
    }

    /// Counts a decision and every charge of it.
    pub(super) fn count(&self, request: &Request, decision: &Decision<'_>, deciding: Deciding<'_>) {
        if decision.domain.is_none() {
            return;
        }
        let table = self.table.load();
        let table = table.of(decision.generation);
        self.charged(table, request, decision);
        self.decided(table, request, decision, deciding);
    }

    fn charged(&self, table: Option<&Table>, request: &Request, decision: &Decision<'_>) {
        for answer in &decision.answers {
            if let Some(rule) = answer.rule {
                let charged = |counts: &RuleCounts| {
                    counts.hits().charged(answer, self.near_ratio);
                    counts.own.iter().for_each(|own| own.charged(answer, self.near_ratio));
                };
                self.with(table, rule, Some(answer.descriptor), request, decision, charged);
            }
        }
    }

    fn decided(&self, table: Option<&Table>, request: &Request, decision: &Decision<'_>, deciding: Deciding<'_>) {
        let Some(domain) = decision.domain else { return };
        let decided = |counts: &RuleCounts| counts.decided(decision.outcome, deciding.origin);
        match deciding.rule {
            Some(rule) => self.with(table, rule, deciding.descriptor, request, decision, decided),
            None => match table.and_then(|table| table.domains.get(domain)) {
                Some(slot) => decided(slot.get_or_init(|| self.named(SeriesName::of_domain(domain), None))),
                None => self.known(&SeriesName::of_domain(domain)).iter().for_each(|counts| decided(counts)),
            },
        }
    }

    /// Calls `count` with the counts for `rule`, named by the request's values if the rule asks for that.
    fn with(
        &self,
        table: Option<&Table>,
        rule: &About,
        descriptor: Option<usize>,
        request: &Request,
        decision: &Decision<'_>,
        count: impl Fn(&RuleCounts),
    ) {
        if rule.series != Series::Rule
            && let Some(descriptor) = descriptor
        {
            let name = SeriesName::of_values(rule, descriptor, request, decision);
            return count(&self.named(name, Some(rule)));
        }
        let id = usize::try_from(rule.id.0).unwrap_or(usize::MAX);
        match table.and_then(|table| table.rules.get(id)) {
            Some(slot) => count(slot.get_or_init(|| self.named(SeriesName::of_rule(rule), None))),
            // The decision used rules of long ago: counts that were dropped are not created again.
            None => self.known(&SeriesName::of_rule(rule)).iter().for_each(|counts| count(counts)),
        }
    }

    fn known(&self, name: &SeriesName) -> Option<Arc<RuleCounts>> {
        self.all.read().counts.get(name).cloned()
    }

    /// Returns the counts named `name`, creating them if needed. `rule` is set if a client's value made the name. Returns the
    /// shared counts if there are too many series.
    fn named(&self, name: SeriesName, rule: Option<&About>) -> Arc<RuleCounts> {
        let found = {
            let all = self.all.read();
            let other = || all.other_than(rule);
            all.counts.get(&name).cloned().or_else(|| all.counts.get(&other()?).cloned())
        };
        if let Some(counts) = found {
            return counts;
        }
        let of_values = rule.map(|rule| SeriesName::of_rule(rule).digest());
        let mut all = self.all.write();
        let (name, of_values) = match all.other_than(rule) {
            // The series that all rules share belongs to none of them.
            Some(other) if other.is_other() => (other, None),
            Some(other) => (other, of_values),
            None => (name, of_values),
        };
        if let Some(counts) = all.counts.get(&name) {
            return Arc::clone(counts);
        }
        all.of_values += usize::from(of_values.is_some());
        let hits_of = all.hits.get(&name.upper()).cloned();
        let own = self.keeps_names.then(Arc::default);
        let counts = Arc::new(RuleCounts { hits_of, own, of_values, ..RuleCounts::default() });
        all.hits.entry(name.upper()).or_insert_with(|| Arc::clone(&counts));
        all.counts.insert(Arc::new(name), Arc::clone(&counts));
        counts
    }

    /// Adds the counts to the page.
    pub(super) fn write_to(&self, page: &mut Page) {
        let mut all: Vec<(Arc<SeriesName>, Arc<RuleCounts>)> = {
            let all = self.all.read();
            all.counts.iter().map(|(name, counts)| (Arc::clone(name), Arc::clone(counts))).collect()
        };
        let mut by_keys: Vec<(SeriesName, Arc<RuleCounts>)> = {
            let all = self.all.read();
            let counted = all.hits.iter().filter(|(_, counts)| counts.total.load(Ordering::Relaxed) > 0);
            counted.map(|(name, counts)| (name.clone(), Arc::clone(counts))).collect()
        };
        all.sort_unstable_by(|(one, _), (other, _)| one.cmp(other));
        by_keys.sort_unstable_by(|(one, _), (other, _)| one.cmp(other));
        let hits: [(&'static Metric, Of); 5] = [
            (&TOTAL_HITS, |counts| &counts.total),
            (&OVER_LIMIT, |counts| &counts.over),
            (&NEAR_LIMIT, |counts| &counts.near),
            (&WITHIN_LIMIT, |counts| &counts.within),
            (&SHADOW_MODE, |counts| &counts.shadow),
        ];
        for (metric, of) in hits {
            page.family(metric, |family| {
                for (name, counts) in &by_keys {
                    let (key1, key2) = name.keys();
                    family.sample(&[name.domain(), key1, key2], of(counts).load(Ordering::Relaxed));
                }
            });
        }
        page.family(&DECISIONS, |family| {
            for (name, counts) in &all {
                for (outcome, row) in Outcome::ALL.iter().zip(&counts.decisions) {
                    for (origin, count) in Origin::ALL.iter().zip(row) {
                        let count = count.load(Ordering::Relaxed);
                        if count > 0 {
                            let labels = [name.domain(), name.rule(), name.value(), outcome.name(), origin.name()];
                            family.sample(&labels, count);
                        }
                    }
                }
            }
        });
    }
}

impl All {
    /// Returns the name of the shared series for a new name, if there is no room for a series of its own.
    /// `rule` is set if a client's value makes the name.
    fn other_than(&self, rule: Option<&About>) -> Option<SeriesName> {
        let is_full = self.counts.len() >= MOST_SERIES;
        let values = || rule.filter(|_| self.of_values >= MOST_OF_VALUES).map(SeriesName::other_values);
        // The rule may have a series for its other values, although there is no room for a new one.
        values().filter(|name| !is_full || self.counts.contains_key(name)).or_else(|| is_full.then(SeriesName::other))
    }
}

impl Table {
    /// Returns the table of the rules with this generation, if they are in force or were just before.
    fn of(&self, generation: u64) -> Option<&Self> {
        let before = || self.before.as_deref().filter(|before| before.generation == generation);
        if self.generation == generation { Some(self) } else { before() }
    }

    /// Returns a copy that refers to the same counts.
    fn shared(&self) -> Self {
        Self { generation: self.generation, rules: self.rules.clone(), domains: self.domains.clone(), before: None }
    }
}

impl RuleCounts {
    /// Returns the series that counts its hits.
    fn hits(&self) -> &Self {
        self.hits_of.as_deref().unwrap_or(self)
    }

    fn decided(&self, outcome: Outcome, origin: Origin) {
        self.decisions[outcome as usize][origin as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Counts one charge as the reference does: by what was used before it and after.
    fn charged(&self, answer: &Answered<'_>, near_ratio: f32) {
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
