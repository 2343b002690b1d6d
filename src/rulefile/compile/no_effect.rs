//! Warnings about rules that do nothing: no request reaches them, or another rule always decides before them.

use foldhash::{HashMap, HashSet};

use super::Compiler;
use super::addresses::{Found, addresses};
use crate::model::{Quota, Role};
use crate::normalize::Normalizers;
use crate::rulefile::document::{DescriptorNode, Document, LimitNode, LimitsNode, RequestsNode};
use crate::rulefile::documents::OverlayRules;
use crate::rulefile::problem::{Placed, quoted};
use crate::rules::requests::{ReadEntry, Source};
use crate::rules::tree::{Child, TreeLevel};
use crate::rules::{Domain, Rule, RuleLimit, SourceLimits};

/// Parts of documents that warnings need once the rules are compiled.
pub(super) struct Written {
    /// Index of the file, and name and place of the domain.
    domains: Vec<(usize, Placed<String>)>,
    requests: Vec<(usize, String, Box<RequestsNode>)>,
    /// Warnings for which the documents are enough.
    found: Vec<Found>,
}

impl Written {
    /// Returns those parts of `documents`.
    pub(super) fn of(documents: &[(usize, Document)], overlays: &[OverlayRules]) -> Self {
        let domains = documents.iter().map(|(file, document)| (*file, document.domain.clone())).collect();
        let requests = documents
            .iter()
            .filter_map(|(file, document)| Some((*file, document.domain.value.clone(), document.requests.clone()?)));
        let found = [addresses(documents, overlays), unknown_replaced(documents, overlays)].concat();
        Self { domains, requests: requests.collect(), found }
    }
}

impl Compiler<'_> {
    /// Warns about rules without effect. The documents have no error.
    pub(super) fn without_effect(
        &mut self,
        written: Written,
        normalizers: &HashMap<String, Normalizers>,
        is_pushed: bool,
    ) {
        let none = Normalizers::default();
        let mut found = written.found;
        let mut empty = HashSet::default();
        for (file, name) in written.domains {
            let Some(domain) = self.domains.get(name.value.as_str()) else { continue };
            if !is_pushed && is_empty(domain) && empty.insert(name.value.clone()) {
                let message = "no item of this domain has a limit, `deny` or `exempt`, so only limits that requests send themselves apply: write `rate_limit:` into an item of `descriptors`";
                found.push((file, name.place, message.to_owned()));
            }
        }
        for (file, name, node) in written.requests.iter().filter(|(_, name, _)| !empty.contains(name)) {
            let Some(domain) = self.domains.get(name.as_str()) else { continue };
            unmatched_requests(*file, node, domain, normalizers.get(name).unwrap_or(&none), &mut found);
        }
        for (name, domain) in &self.domains {
            self.hidden(&domain.root, &mut found);
            let of_source = normalizers.get(&**name).unwrap_or(&none);
            for overlay in &domain.overlays {
                self.hidden(&overlay.root, &mut found);
                self.looser(&overlay.root, &domain.root, of_source, &mut found);
            }
        }
        found.sort_by(|a, b| (a.0, a.1, &a.2).cmp(&(b.0, b.1, &b.2)));
        // An overlay is compiled for each domain: the first one is enough.
        found.dedup_by_key(|(file, place, _)| (*file, *place));
        for (file, place, message) in found {
            self.warning(file, place, message);
        }
    }

    /// Finds items that never match, because another item comes first for each value.
    fn hidden(&self, level: &TreeLevel, found: &mut Vec<Found>) {
        for (index, child) in level.children.iter().enumerate() {
            if let Some(first) = level.hiding(index) {
                let todo = if child.pattern().is_some() || !child.key.is_literal() {
                    "move this item before that one, or remove it"
                } else {
                    "remove one of the two; an item with the key alone already matches every value that no other item matches"
                };
                let message = format!(
                    "{} never matches, because {} ({}) comes first for every value: {todo}",
                    quoted(&child.label()),
                    quoted(&first.label()),
                    self.place_of(first)
                );
                found.push((file_of(child), child.place, message));
            }
            if let Some((looser, smaller)) = child.rule.as_ref().and_then(looser_of_list) {
                let message = format!(
                    "the limit of {looser} refuses nothing more, because the limit of {smaller} in the same list is used up before it: remove it, or write a smaller number"
                );
                found.push((file_of(child), child.place, message));
            }
            if let Some(below) = &child.below {
                self.hidden(below, found);
            }
        }
    }

    /// Finds limits of an overlay that never refuse, because the source has a smaller limit for the same values.
    fn looser(&self, over: &TreeLevel, source: &TreeLevel, normalizers: &Normalizers, found: &mut Vec<Found>) {
        for child in &over.children {
            let Some(same) = source.like(normalizers, child).filter(|same| same.action().is_none()) else { continue };
            if let (Some(rule), Some(other)) = (&child.rule, &same.rule)
                && let Some(what) = without_effect_over(rule, other)
            {
                let message = format!(
                    "{what} the limit of the source ({}) applies too, so this item admits nothing more: write `replace: true` beside the limit if it is an exception",
                    self.place_of(same)
                );
                found.push((file_of(child), child.place, message));
            }
            if let (Some(below), Some(other)) = (&child.below, &same.below) {
                self.looser(below, other, normalizers, found);
            }
        }
    }

    fn place_of(&self, child: &Child) -> String {
        let file = self.files.get(file_of(child)).map_or("", |file| &file.name);
        format!("{file}:{}", child.place.line)
    }
}

/// Finds `replaces` with a name that no limit of the same domain has. An overlay and the source replace only their own limits.
fn unknown_replaced(documents: &[(usize, Document)], overlays: &[OverlayRules]) -> Vec<Found> {
    let of_source = documents.iter().map(|(file, document)| (*file, "", document));
    let of_overlays = overlays.iter().map(|own| (own.file, &*own.pattern, &own.document));
    let all: Vec<_> = of_source.chain(of_overlays).collect();
    let mut names: HashMap<(&str, &str), HashSet<&str>> = HashMap::default();
    for (_, side, document) in &all {
        let names = names.entry((side, &document.domain.value)).or_default();
        each_limit(&document.descriptors, &mut |limit| {
            names.extend(limit.name.as_ref().map(|name| name.value.as_str()));
        });
    }
    let mut found = Vec::new();
    for (file, side, document) in &all {
        let Some(names) = names.get(&(*side, document.domain.value.as_str())) else { continue };
        each_limit(&document.descriptors, &mut |limit| {
            let unknown =
                limit.replaces.iter().filter(|name| !name.value.is_empty() && !names.contains(name.value.as_str()));
            found.extend(unknown.map(|name| {
                let message = format!(
                    "no limit of this domain has the name {}, so it replaces nothing: check the spelling, or write `name:` into the limit that it should replace",
                    quoted(&name.value)
                );
                (*file, name.place, message)
            }));
        });
    }
    found
}

/// Calls `see` with each limit of `items` and of those below.
fn each_limit<'d>(items: &'d [DescriptorNode], see: &mut impl FnMut(&'d LimitNode)) {
    for item in items {
        match &item.limits {
            LimitsNode::None => {}
            LimitsNode::Unlimited(limit) => see(limit),
            LimitsNode::Limited(limits) => limits.iter().for_each(&mut *see),
        }
        each_limit(&item.descriptors, see);
    }
}

fn file_of(child: &Child) -> usize {
    usize::try_from(child.file).unwrap_or(usize::MAX)
}

/// Returns true if the domain has no rule, neither of the source nor of an overlay.
fn is_empty(domain: &Domain) -> bool {
    !domain.trees().any(TreeLevel::has_rule)
}

/// Finds descriptors of `requests` that match no rule.
fn unmatched_requests(
    file: usize,
    node: &RequestsNode,
    domain: &Domain,
    normalizers: &Normalizers,
    found: &mut Vec<Found>,
) {
    let (Some(requests), Some((_, places))) = (&domain.requests, &node.descriptors) else { return };
    for (index, (entries, place)) in requests.descriptors.iter().zip(places).enumerate() {
        let same = |earlier: &&Vec<ReadEntry>| {
            earlier.iter().map(ReadEntry::key_and_source).eq(entries.iter().map(ReadEntry::key_and_source))
        };
        if let Some(first) =
            place.first().filter(|_| requests.descriptors.iter().take(index).any(|earlier| same(&earlier)))
        {
            let message =
                "the same descriptor is written above, so each request is counted twice: remove one of the two";
            found.push((file, first.place, message.to_owned()));
            continue;
        }
        let with_values: Vec<(&str, Option<&str>)> = entries
            .iter()
            .map(|entry| {
                let value = if let Source::Value(value) = &entry.source { Some(value.as_str()) } else { None };
                (entry.key.as_str(), value)
            })
            .collect();
        let is_matched = domain.root.can_match(normalizers, &with_values)
            || domain.overlays.iter().any(|overlay| overlay.root.can_match(&overlay.normalizers, &with_values));
        if let Some(first) = place.first().filter(|_| !is_matched) {
            let keys: Vec<_> = with_values
                .iter()
                .map(|(key, value)| value.map_or((*key).to_owned(), |value| format!("{key}={value}")))
                .collect();
            let message = format!(
                "no rule matches the descriptor {}, so it limits nothing: write an item with a limit for exactly these keys, in this order and one below the other",
                quoted(&keys.join(", "))
            );
            found.push((file, first.place, message));
        }
    }
}

/// Returns the beginning of a message if `rule` of an overlay adds nothing to `source`, which applies too.
fn without_effect_over(rule: &Rule, source: &Rule) -> Option<&'static str> {
    let is_enforced = |rule: &Rule| rule.role() == Role::Enforce && rule.action().is_none();
    if rule.source_limits != SourceLimits::Apply || !is_enforced(rule) || !is_enforced(source) {
        return None;
    }
    let is_plain = |limit: &&RuleLimit| !limit.is_shadow && limit.limit.delay().is_none();
    let of_source = || source.limits().iter().filter(is_plain);
    if rule.is_unlimited() {
        return of_source().next().map(|_| "`unlimited` takes no limit away:");
    }
    let is_never_reached = |limit: &RuleLimit| of_source().any(|smaller| is_looser(limit, smaller));
    rule.limits()
        .iter()
        .filter(is_plain)
        .any(is_never_reached)
        .then_some("this limit is looser than that of the source:")
}

/// Returns a limit of `rule` that another of its limits makes useless, and that other one.
fn looser_of_list(rule: &Rule) -> Option<(Quota, Quota)> {
    let has_effect = |limit: &RuleLimit| {
        limit.is_shadow
            || limit.limit.delay().is_some()
            || limit.limit.records_every_charge()
            || !limit.replaces.is_empty()
            || limit.warn_at.is_some()
    };
    let limits = rule.limits();
    let pairs = limits.iter().flat_map(|limit| limits.iter().map(move |other| (limit, other)));
    let mut useless =
        pairs.filter(|(limit, other)| !has_effect(limit) && !other.is_shadow && other.limit.delay().is_none());
    useless
        .find(|(limit, other)| is_looser(limit, other))
        .map(|(limit, other)| (limit.limit.quota(), other.limit.quota()))
}

/// Returns true if `limit` admits more than `smaller`, over a long time and at once.
fn is_looser(limit: &RuleLimit, smaller: &RuleLimit) -> bool {
    let rate = |limit: &RuleLimit, other: &RuleLimit| {
        u128::from(limit.limit.quota().limit())
            * u128::from(other.limit.quota().window().length().get())
            * u128::from(other.cost.get())
    };
    let at_once =
        |limit: &RuleLimit, other: &RuleLimit| u64::from(limit.limit.capacity()) * u64::from(other.cost.get());
    let (more, less) =
        ((rate(limit, smaller), at_once(limit, smaller)), (rate(smaller, limit), at_once(smaller, limit)));
    more.0 >= less.0 && more.1 >= less.1 && more != less
}

#[cfg(test)]
mod tests {
    use crate::rulefile::{File, Options, load};

    /// Returns the warnings of rule files that extend one domain.
    fn warnings(texts: &[&str]) -> Vec<String> {
        let named = texts.iter().enumerate();
        let files: Vec<_> = named
            .map(|(index, text)| File { name: format!("{index}.yaml").as_str().into(), bytes: (*text).into() })
            .collect();
        let options = Options { merge_domains: true, ..Options::default() };
        load(&files, options).unwrap().warnings.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn rules_that_requests_reach_have_no_warning() {
        const LIMIT: &str = "rate_limit: { unit: minute, requests_per_unit: 5 }";
        for items in [
            // The more precise wildcard first, and a wildcard that leaves texts to the item with the key alone.
            format!(
                "[{{ key: path, value: /api/*, {LIMIT} }}, {{ key: path, value: /*, {LIMIT} }}, {{ key: path, {LIMIT} }}]"
            ),
            // A literal value comes before every wildcard.
            format!("[{{ key: path, value: /*, {LIMIT} }}, {{ key: path, value: /api, {LIMIT} }}]"),
            format!("[{{ key: \"x-*\", {LIMIT} }}, {{ key: x-user, value: alice, {LIMIT} }}]"),
            format!("[{{ key: path, value: \"*a\", {LIMIT} }}, {{ key: path, value: \"a*\", {LIMIT} }}]"),
            // Networks in lists, single addresses, and values of the gateway's configuration.
            format!("[{{ key: remote_address, cidr: [10.0.0.0/8], deny: true }}, {{ key: user, {LIMIT} }}]"),
            format!("[{{ key: remote_address, value: 10.0.0.1, {LIMIT} }}]"),
            format!("[{{ key: remote_address, values: [10.0.0.1, 10.0.0.2], {LIMIT} }}]"),
            format!("[{{ key: remote_address, value: \"*\", share_threshold: true, {LIMIT} }}]"),
            format!(
                "[{{ key: generic_key, value: 10.0.0.0/8, {LIMIT} }}, {{ key: masked_remote_address, value: 10.0.0.0/16, {LIMIT} }}]"
            ),
            format!("[{{ key: masked_remote_address, {LIMIT} }}]"),
            // An item without a limit takes its value out of the limit of another.
            format!("[{{ key: user, value: admin }}, {{ key: user, {LIMIT} }}]"),
        ] {
            assert_eq!(warnings(&[&format!("domain: d\ndescriptors: {items}\n")]), Vec::<String>::new(), "{items}");
        }
        let entries = format!("domain: d\nentries: {{ ip: {{ as: ip }} }}\ndescriptors: [{{ key: ip, {LIMIT} }}]\n");
        assert!(warnings(&[&entries]).is_empty());
    }

    #[test]
    fn several_files_of_a_domain_are_seen_together() {
        let limit = "rate_limit: { unit: minute, requests_per_unit: 5, replaces: [{ name: other }] }";
        let rules = format!("domain: d\ndescriptors: [{{ key: remote_address, {limit} }}]\n");
        let settings = "domain: d\nentries: { remote_address: { as: ip } }\n";
        let named =
            "domain: d\ndescriptors: [{ key: user, rate_limit: { unit: day, requests_per_unit: 5, name: other } }]\n";
        assert_eq!(warnings(&[&rules, settings, named]), Vec::<String>::new());
        let (alone, both) = (warnings(&[&rules]), warnings(&[&rules, named]));
        assert_eq!((alone.len(), both.len()), (2, 1), "{alone:?} {both:?}");
        let wide =
            "domain: d\ndescriptors: [{ key: path, value: /*, rate_limit: { unit: day, requests_per_unit: 5 } }]\n";
        let narrow = wide.replace("/*", "/a/*");
        let found = warnings(&[wide, &narrow]);
        assert!(found.len() == 1 && found[0].starts_with("1.yaml:2:") && found[0].contains("0.yaml:2"), "{found:?}");
    }
}
