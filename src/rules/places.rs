//! The rules that the descriptors of one request meet, in the tree of the source and in those of overlays.

use std::sync::Arc;

use foldhash::HashSet;
use smallvec::SmallVec;

use super::replacements::Replacements;
use super::tree::{TreeLevel, TreeMatch};
use super::{Action, Domain, MatchedItem, MatchedKind, Rule, SourceLimits};
use crate::model::{Descriptor, Hits, RuleId, Ruling};
use crate::normalize::Normalizers;

/// The own rules of all overlays of one pattern, for one domain.
#[derive(Debug)]
pub(crate) struct OverlayTree {
    /// Pattern of its domains.
    pub(crate) pattern: Arc<str>,
    /// Mark of its counters.
    pub(crate) mark: Box<str>,
    pub(crate) normalizers: Normalizers,
    pub(crate) root: TreeLevel,
}

/// The rules that the descriptors of one request meet.
pub(super) struct Places<'a> {
    /// Results in the tree of the source: one for each descriptor.
    pub(super) source: Vec<TreeMatch<'a>>,
    /// Matching rules of overlays, sorted by descriptor and then by overlay.
    pub(super) overlaid: Vec<Overlaid<'a>>,
}

/// Rule of an overlay for one descriptor.
pub(super) struct Overlaid<'a> {
    /// Index of the descriptor.
    pub(super) descriptor: usize,
    /// Index of the overlay.
    pub(super) tree: usize,
    pub(super) found: TreeMatch<'a>,
    /// Mark of its counters; empty if the rule continues with the counters of the source.
    pub(super) mark: &'a str,
}

/// Replacements by the rules that one request meets, for each tree. A limit replaces only limits of its own tree.
#[derive(Debug, Default)]
pub(super) struct TreeReplacements<'a> {
    source: Replacements<'a>,
    overlays: Vec<Replacements<'a>>,
}

/// Names of the replaced limits, for each tree.
#[derive(Debug, Default)]
pub(super) struct Replaced<'a> {
    pub(super) source: HashSet<&'a str>,
    pub(super) overlays: Vec<HashSet<&'a str>>,
}

impl Domain {
    /// Returns the trees of the overlays and of the source.
    pub(crate) fn trees(&self) -> impl Iterator<Item = &TreeLevel> {
        self.overlays.iter().map(|overlay| &overlay.root).chain([&self.root])
    }

    /// Finds the rules of each descriptor.
    pub(super) fn places(&self, descriptors: &[Descriptor]) -> Places<'_> {
        let find = |descriptor: &Descriptor| {
            let mut found = self.root.find(&self.normalizers, descriptor);
            if let Some(rule) = self.refused_value(descriptor) {
                found.rule = Some(rule);
                return found;
            }
            // A limit that the request sends is counted even if no rule matches.
            if found.rule.is_none() && descriptor.limit.is_some() {
                found.unruled(&self.normalizers, descriptor)
            } else {
                found
            }
        };
        let mut places = Places { source: descriptors.iter().map(find).collect(), overlaid: Vec::new() };
        if !self.overlays.is_empty() {
            self.lay_over(descriptors, &mut places);
        }
        places
    }

    /// Returns the rule that denies a descriptor because a value is no address.
    fn refused_value(&self, descriptor: &Descriptor) -> Option<&Rule> {
        self.not_addresses.iter().find_map(|(key, rule)| {
            let mut own = descriptor.entries.iter().filter(|entry| entry.key[..] == **key);
            let normalizer = self.normalizers.of(key)?;
            let is_other = own.any(|entry| normalizer.normalize(&entry.value).address.is_none());
            is_other.then_some(rule)
        })
    }

    /// Adds the rules of the overlays to `places`.
    fn lay_over<'a>(&'a self, descriptors: &[Descriptor], places: &mut Places<'a>) {
        for (index, (descriptor, source)) in descriptors.iter().zip(&mut places.source).enumerate() {
            let mut is_taken_over = false;
            for (number, tree) in self.overlays.iter().enumerate() {
                let found = tree.root.find(&tree.normalizers, descriptor);
                let Some(rule) = found.rule else { continue };
                source.is_replaced |= rule.source_limits != SourceLimits::Apply;
                // Only one rule continues with the counters of the source, or two limits would share a counter.
                let takes_over = rule.source_limits == SourceLimits::TakenOver && !is_taken_over;
                is_taken_over |= takes_over;
                let mark = if takes_over { "" } else { &*tree.mark };
                places.overlaid.push(Overlaid { descriptor: index, tree: number, found, mark });
            }
        }
    }
}

impl<'a> Places<'a> {
    /// Returns the rule with this decision of the first descriptor that has one.
    pub(super) fn first(&self, wanted: Action) -> Option<&'a Rule> {
        let is_wanted = |found: &TreeMatch<'a>| found.rule.filter(|rule| rule.action == Some(wanted));
        if self.overlaid.is_empty() {
            return self.source.iter().find_map(is_wanted);
        }
        let source = self.source.iter().enumerate().find_map(|(index, found)| Some((index, is_wanted(found)?)));
        let overlaid = self.overlaid.iter().find_map(|laid| Some((laid.descriptor, is_wanted(&laid.found)?)));
        match (source, overlaid) {
            (Some((index, _)), Some((earlier, rule))) if earlier < index => Some(rule),
            (None, Some((_, rule))) => Some(rule),
            (source, _) => source.map(|(_, rule)| rule),
        }
    }

    /// Returns the first rule that denies the request, else the first that exempts it.
    pub(super) fn ruling(&self) -> Option<Ruling<'a>> {
        let ruling = |action, is_denied| self.first(action).map(|rule| Ruling { is_denied, rule: &rule.about });
        ruling(Action::Deny, true).or_else(|| ruling(Action::Exempt, false))
    }

    /// Returns the items of a request that is decided before anything is charged.
    pub(super) fn undecided(&self) -> impl Iterator<Item = MatchedItem<'a>> {
        let mut overlaid = self.overlaid.as_slice();
        self.source.iter().enumerate().map(move |(index, source)| {
            let own = overlaid.iter().take_while(|overlaid| overlaid.descriptor == index).count();
            let (own, rest) = overlaid.split_at(own);
            overlaid = rest;
            let rules = || source.rule.into_iter().chain(own.iter().filter_map(|overlaid| overlaid.found.rule));
            let with = |action| rules().find(|rule| rule.action == Some(action));
            let denied = with(Action::Deny);
            let kind = if denied.is_some() { MatchedKind::Denied } else { MatchedKind::Unmatched };
            let rule = denied.or_else(|| with(Action::Exempt)).or_else(|| rules().next());
            MatchedItem { rule, is_overridden: false, kind }
        })
    }

    /// Returns the factor for the hits of every limit of the request. Each matched rule multiplies once.
    pub(super) fn request_cost(&self) -> u64 {
        let mut costly = self.costs();
        costly.sort_unstable();
        costly.dedup();
        costly.iter().fold(1, |product, (_, cost)| product.saturating_mul(*cost).min(Hits::MOST))
    }

    /// Returns the matched rules with a request cost above 1, and their costs.
    fn costs(&self) -> SmallVec<[(RuleId, u64); 4]> {
        let mut costs = SmallVec::new();
        let mut add = |rule: Option<&Rule>| {
            if let Some(rule) = rule.filter(|rule| rule.request_cost.get() > 1) {
                costs.push((rule.id(), rule.request_cost.get().into()));
            }
        };
        self.source.iter().for_each(|found| add(found.rule));
        self.overlaid.iter().for_each(|overlaid| add(overlaid.found.rule));
        costs
    }
}

impl<'a> TreeReplacements<'a> {
    /// Returns the replacements by the rules of these descriptors.
    pub(super) fn of(descriptors: &[Descriptor], places: &Places<'a>) -> Self {
        let mut replacements = Self::default();
        // A replaced rule has no limits in force, so it replaces nothing.
        let source = descriptors.iter().zip(&places.source).filter(|(_, found)| !found.is_replaced);
        replacements.source.add(source.filter_map(|(descriptor, found)| Some((descriptor, found.rule?))));
        for Overlaid { descriptor, tree, found, .. } in &places.overlaid {
            let Some((descriptor, rule)) = descriptors.get(*descriptor).zip(found.rule) else { continue };
            if replacements.overlays.len() <= *tree {
                replacements.overlays.resize_with(tree + 1, Replacements::default);
            }
            if let Some(overlay) = replacements.overlays.get_mut(*tree) {
                overlay.add(std::iter::once((descriptor, rule)));
            }
        }
        replacements
    }

    /// Returns the names of the limits that are replaced.
    pub(super) fn replaced(&self) -> Replaced<'a> {
        let mut overlays = Vec::new();
        if !self.overlays.is_empty() {
            overlays.extend(self.overlays.iter().map(Replacements::replaced));
        }
        Replaced { source: self.source.replaced(), overlays }
    }
}
