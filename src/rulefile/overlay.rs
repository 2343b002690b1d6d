//! Overlay: settings of the operator, laid over the documents of any source before these are compiled.

use std::sync::Arc;

use foldhash::{HashMap, HashMapExt, HashSet};

use super::compile::{CompiledRules, InvalidRules, Options, compile};
use super::document::{ApplyNode, Document, EntryNode};
use super::documents::{Documents, File, Lists};
use super::problem::{Problem, Report, Severity, quoted};
use crate::normalize::pattern::Pattern;
use crate::rules::changes::Changes;
use crate::rules::tree::Position;

mod fields;
mod own;
mod target;

/// The documents of an overlay, without errors.
#[derive(Debug)]
pub struct Overlay {
    files: Vec<File>,
    lists: Lists,
    layers: Vec<Layer>,
    /// Problems of the overlay alone; only warnings once it is compiled.
    problems: Vec<Problem>,
}

/// One document of an overlay.
#[derive(Debug)]
struct Layer {
    /// Index of its file.
    file: usize,
    /// Domains over which it is laid.
    domains: Pattern,
    document: Document,
    apply: Vec<ApplyNode>,
}

/// The effect of an overlay on the rules of one load.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OverlayEffect {
    /// Number of fields that do not fit their limit and are not in force.
    pub skipped: usize,
    /// Number of items of `apply` and `entries` that match nothing.
    pub unmatched: usize,
}

/// The problems of an overlay while it is laid over documents.
struct Laying<'a> {
    overlay: &'a Overlay,
    /// Index of the first file of the overlay.
    first_file: usize,
    reports: Vec<Report>,
    effect: OverlayEffect,
    /// Settings of whole domains that the overlay has set.
    domain_changes: HashMap<String, Changes>,
}

impl Overlay {
    /// Creates the overlay of `documents`.
    ///
    /// # Errors
    /// Returns every error of every document with its place, and the warnings with them.
    pub fn new(documents: Documents, options: &Options) -> Result<Self, InvalidRules> {
        let Documents { files, documents, mut problems, lists, .. } = documents;
        let mut reports: Vec<_> = files.iter().map(|file| Report::new(&file.name)).collect();
        let mut layers = Vec::new();
        for (file, mut document) in documents {
            let place = document.domain.place;
            let Some(apply) = document.overlay.take() else {
                let message = "this is a rule file, not an overlay: write `overlay:` in place of `domain:`, or name the file as a rule file";
                reports[file].error(place, || message.to_owned());
                continue;
            };
            if is_empty(&document, &apply) {
                if files.len() > 1 {
                    let message = "`empty_overlay: true` empties the overlay, and other files of it stand beside this one: remove those, or remove this one";
                    reports[file].error(place, || message.to_owned());
                }
                continue;
            }
            layers.push(Layer { file, domains: Pattern::new(document.domain.value.clone()), document, apply });
        }
        finish(reports, &files, &mut problems);
        let mut overlay = Self { files, lists, layers, problems };
        let CompiledRules { warnings, .. } = compile(overlay.alone(), options)?;
        overlay.problems = warnings;
        Ok(overlay)
    }

    /// Compiles `documents` with this overlay laid over them. Without documents, the rules are those of the overlay alone.
    ///
    /// # Errors
    /// Returns the errors of `documents`. An overlay that does not fit is no error: its field is skipped with a warning. Only own
    /// rules of the overlay that have no room in all domains are an error.
    pub fn compile(
        &self,
        documents: Option<Documents>,
        options: &Options,
    ) -> Result<(CompiledRules, OverlayEffect), InvalidRules> {
        let Some(documents) = documents else {
            let none = Documents::of(Vec::new(), Vec::new(), Vec::new());
            let (mut compiled, _) = self.lay_and_compile(none, options, Reads::All)?;
            compiled.rules.awaits_source = true;
            // Nothing can match before the source has offered rules.
            compiled.warnings.clone_from(&self.problems);
            return Ok((compiled, OverlayEffect::default()));
        };
        let invalid = match self.lay_and_compile(documents.clone(), options, Reads::All) {
            Ok(compiled) => return Ok(compiled),
            Err(invalid) => invalid,
        };
        // Either the documents are invalid, or `entries` changes the meaning of a value in them: then only in these domains it reads no
        // values. Sensitive values stay hidden.
        let broken = domains_with_errors(&documents, &invalid);
        self.lay_and_compile(documents.clone(), options, Reads::AllBut(&broken))
            .or_else(|_| self.lay_and_compile(documents, options, Reads::None))
    }

    fn lay_and_compile(
        &self,
        mut documents: Documents,
        options: &Options,
        reads: Reads<'_>,
    ) -> Result<(CompiledRules, OverlayEffect), InvalidRules> {
        let (mut problems, effect) = self.lay(&mut documents, reads);
        documents.problems.extend(problems.extract_if(.., |problem| problem.severity == Severity::Error));
        let mut compiled = compile(documents, options)?;
        // The own rules of the overlay have the same warnings in each load.
        problems.retain(|problem| !compiled.warnings.contains(problem));
        compiled.warnings.append(&mut problems);
        Ok((compiled, effect))
    }

    /// Lays the overlay over `documents`. Returns the problems, and the effect.
    /// In domains without `reads`, `entries` only marks sensitive values.
    fn lay(&self, documents: &mut Documents, reads: Reads<'_>) -> (Vec<Problem>, OverlayEffect) {
        let reports = self.files.iter().map(|file| Report::new(&file.name)).collect();
        let first_file = documents.files.len();
        documents.files.extend(self.files.iter().cloned());
        documents.overlay_files = self.files.len();
        let (effect, domain_changes) = (OverlayEffect::default(), HashMap::new());
        let mut laying = Laying { overlay: self, first_file, reports, effect, domain_changes };
        let mut used: Vec<Vec<bool>> = self.layers.iter().map(|layer| vec![false; layer.apply.len()]).collect();
        for (_, document) in &mut documents.documents {
            let layers: Vec<_> = self.layers_of(&document.domain.value).collect();
            for (_, layer) in &layers {
                set_top(document, &layer.document);
            }
            laying.apply(document, &layers, &mut used);
        }
        laying.entries(documents, reads);
        laying.own_rules(documents);
        laying.domain_settings(documents);
        documents.domain_changes = std::mem::take(&mut laying.domain_changes);
        for (layer, used) in self.layers.iter().zip(used) {
            for (item, _) in layer.apply.iter().zip(used).filter(|(_, is_used)| !is_used) {
                let message = "this item matches no limit of the rules, so it has no effect: compare `match` with `/rlconfig` of the debug listener";
                laying.unmatched(layer.file, item.place, message);
            }
        }
        let mut problems = self.problems.clone();
        finish(laying.reports, &self.files, &mut problems);
        (problems, laying.effect)
    }

    fn layers_of(&self, domain: &str) -> impl Iterator<Item = (usize, &Layer)> {
        self.layers.iter().enumerate().filter(move |(_, layer)| layer.domains.matches(domain.as_bytes()))
    }
}

impl Laying<'_> {
    fn unmatched(&mut self, file: usize, place: Position, message: &str) {
        self.effect.unmatched += 1;
        self.reports[file].warning(place, || message.to_owned());
    }

    fn skipped(&mut self, file: usize, place: Position, message: impl FnOnce() -> String) {
        self.effect.skipped += 1;
        self.reports[file].warning(place, message);
    }

    /// Records `charging` and the policies that the overlay has set for whole domains.
    fn domain_settings(&mut self, documents: &Documents) {
        let of_source = documents.documents.iter().map(|(_, document)| &document.domain.value);
        let own = documents.overlays.iter().map(|own| &own.document.domain.value);
        let domains: HashSet<String> = of_source.chain(own).cloned().collect();
        for domain in domains {
            for (_, layer) in self.overlay.layers_of(&domain) {
                let Document { charging, on_store_failure, on_store_overload, lease, .. } = &layer.document;
                let places = [
                    ("charging", charging.as_ref().map(|placed| placed.place)),
                    ("on_store_failure", on_store_failure.as_ref().map(|placed| placed.place)),
                    ("on_store_overload", on_store_overload.as_ref().map(|placed| placed.place)),
                    ("lease", lease.as_ref().map(|placed| placed.place)),
                ];
                for (field, place) in places {
                    if let Some(place) = place {
                        let changes = self.domain_changes.entry(domain.clone()).or_default();
                        changes.set(field, None, self.first_file + layer.file, place);
                    }
                }
            }
        }
    }

    /// Adds the overlay's `entries` to the domains that use their keys. In domains without `reads`, only their `sensitive`; the other
    /// fields are skipped there.
    fn entries(&mut self, documents: &mut Documents, reads: Reads<'_>) {
        for layer in &self.overlay.layers {
            for entry in &layer.document.entries {
                let key = &entry.key.value;
                let own = |domain: &str| {
                    self.overlay.layers_of(domain).any(|(_, other)| target::has_key(&other.document.descriptors, key))
                };
                let mut domains: Vec<Arc<str>> = Vec::new();
                for (_, document) in &documents.documents {
                    let domain = &document.domain.value;
                    let is_new = layer.domains.matches(domain.as_bytes()) && !domains.iter().any(|d| **d == **domain);
                    if is_new && (target::has_key(&document.descriptors, key) || own(domain)) {
                        domains.push(domain.as_str().into());
                    }
                }
                if domains.is_empty() && !(layer.domains.is_literal() && own(layer.domains.text())) {
                    self.unmatched(
                        layer.file,
                        entry.key.place,
                        "no rule has this key, so the entry has no effect: check the spelling",
                    );
                }
                let (read, unread): (Vec<_>, Vec<_>) = domains.iter().partition(|domain| reads.includes(domain));
                for domain in read {
                    self.lay_entry(documents, domain, layer.file, entry);
                }
                let EntryNode { form, v4_prefix, v6_prefix, refuses_others, is_lower, .. } = entry;
                let has_prefix = v4_prefix.is_some() || v6_prefix.is_some();
                let reads_values = form.is_some() || has_prefix || refuses_others.is_some() || *is_lower;
                if let Some(first) = unread.first().filter(|_| reads_values) {
                    let (first, more) = (quoted(first), unread.len() - 1);
                    self.skipped(layer.file, entry.key.place, || {
                        let others = if more > 0 { format!(" and {more} more") } else { String::new() };
                        format!("in the domain {first}{others}, a rule has a value that is not valid when values are read this way, so there this entry of the overlay reads no values: change that rule, or remove this entry")
                    });
                }
                for domain in unread.into_iter().filter(|_| entry.sensitive.is_some()) {
                    self.lay_entry(documents, domain, layer.file, &only_sensitive(entry));
                }
            }
        }
    }

    /// Adds `entry` of the overlay's file `file` to the documents of `domain`. Its fields win over those of the documents.
    fn lay_entry(&mut self, documents: &mut Documents, domain: &str, file: usize, entry: &EntryNode) {
        let changes = self.domain_changes.entry(domain.to_owned()).or_default();
        let field = format!("entries {}", quoted(&entry.key.value));
        changes.set(field, None, self.first_file + file, entry.key.place);
        let is_of_key = |known: &EntryNode| known.key.value == entry.key.value;
        let of_domain =
            || documents.documents.iter().enumerate().filter(|(_, (_, other))| other.domain.value == domain);
        let with_key = of_domain().find(|(_, (_, document))| document.entries.iter().any(is_of_key));
        let Some((index, _)) = with_key.or_else(|| of_domain().next()) else { return };
        let Some((_, document)) = documents.documents.get_mut(index) else { return };
        let place = document.domain.place;
        let mut entry = entry.clone();
        entry.key.place = place;
        entry.v4_prefix.iter_mut().chain(&mut entry.v6_prefix).for_each(|prefix| prefix.place = place);
        entry.refuses_others.iter_mut().for_each(|refuses| refuses.place = place);
        entry.sensitive = entry.sensitive.map(|_| place);
        entry.is_laid = true;
        merge_entry(&mut document.entries, entry);
    }
}

/// Domains in which the overlay's `entries` reads values.
#[derive(Clone, Copy)]
enum Reads<'a> {
    All,
    AllBut(&'a HashSet<String>),
    None,
}

impl Reads<'_> {
    fn includes(self, domain: &str) -> bool {
        match self {
            Self::All => true,
            Self::AllBut(broken) => !broken.contains(domain),
            Self::None => false,
        }
    }
}

/// Returns true if an overlay has no content. Only that of `empty_overlay: true` has none.
fn is_empty(document: &Document, apply: &[ApplyNode]) -> bool {
    let Document { charging, on_store_failure, on_store_overload, lease, entries, descriptors, .. } = document;
    let has_setting =
        charging.is_some() || on_store_failure.is_some() || on_store_overload.is_some() || lease.is_some();
    !has_setting && apply.is_empty() && entries.is_empty() && descriptors.is_empty()
}

/// Returns the domains of the documents that have an error.
fn domains_with_errors(documents: &Documents, invalid: &InvalidRules) -> HashSet<String> {
    let errors = invalid.problems.iter().filter(|problem| problem.severity == Severity::Error);
    let files: HashSet<&str> = errors.map(|problem| &*problem.file).collect();
    let broken = documents.documents.iter().filter(|(_, document)| files.contains(&*document.file));
    broken.map(|(_, document)| document.domain.value.clone()).collect()
}

/// Returns `entry` with its field `sensitive` alone.
fn only_sensitive(entry: &EntryNode) -> EntryNode {
    EntryNode { form: None, v4_prefix: None, v6_prefix: None, refuses_others: None, is_lower: false, ..entry.clone() }
}

/// Sets the settings at the top of `over` on `document`.
fn set_top(document: &mut Document, over: &Document) {
    document.charging = over.charging.clone().or(document.charging.take());
    document.on_store_failure = over.on_store_failure.clone().or(document.on_store_failure.take());
    document.on_store_overload = over.on_store_overload.clone().or(document.on_store_overload.take());
    document.lease = over.lease.clone().or(document.lease.take());
}

/// Adds `entry` to `entries`. Its fields win over those of an entry with the same key.
fn merge_entry(entries: &mut Vec<EntryNode>, entry: EntryNode) {
    match entries.iter_mut().find(|known| known.key.value == entry.key.value) {
        None => entries.push(entry),
        Some(known) => {
            known.form = entry.form.or(known.form);
            known.v4_prefix = entry.v4_prefix.or(known.v4_prefix.take());
            known.v6_prefix = entry.v6_prefix.or(known.v6_prefix.take());
            known.refuses_others = entry.refuses_others.or(known.refuses_others.take());
            known.is_lower |= entry.is_lower;
            known.sensitive = entry.sensitive.or(known.sensitive);
        }
    }
}

fn finish(reports: Vec<Report>, files: &[File], problems: &mut Vec<Problem>) {
    for (report, file) in reports.into_iter().zip(files) {
        report.finish(&String::from_utf8_lossy(&file.bytes), problems);
    }
}

#[cfg(test)]
mod content;
#[cfg(test)]
mod tests;
