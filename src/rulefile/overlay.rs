//! Overlay: settings of the operator, laid over the documents of any source before these are compiled.

use std::sync::Arc;

use super::compile::{CompiledRules, InvalidRules, Options, compile};
use super::document::{ApplyNode, Document, EntryNode};
use super::documents::{Documents, File};
use super::problem::{Problem, Report, Severity};
use crate::normalize::pattern::Pattern;
use crate::rules::tree::Position;

mod fields;
mod target;

/// The documents of an overlay, without errors.
#[derive(Debug)]
pub struct Overlay {
    files: Vec<File>,
    layers: Vec<Layer>,
    /// Warnings about the overlay alone.
    warnings: Vec<Problem>,
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
    reports: Vec<Report>,
    effect: OverlayEffect,
}

impl Overlay {
    /// Creates the overlay of `documents`.
    ///
    /// # Errors
    /// Returns every error of every document with its place, and the warnings with them.
    pub fn new(documents: Documents, options: &Options) -> Result<Self, InvalidRules> {
        let Documents { files, documents, mut problems, .. } = documents;
        let mut reports: Vec<_> = files.iter().map(|file| Report::new(&file.name)).collect();
        let mut layers = Vec::new();
        for (file, mut document) in documents {
            let place = document.domain.place;
            let Some(apply) = document.overlay.take() else {
                let message = "this is a rule file, not an overlay: write `overlay:` in place of `domain:`, or name the file as a rule file";
                reports[file].error(place, || message.to_owned());
                continue;
            };
            if let Some(first) = document.descriptors.first() {
                let message = "an overlay has no rules of its own: write `descriptors` in a rule file";
                reports[file].error(first.place, || message.to_owned());
            }
            for sensitive in document.entries.iter().filter_map(|entry| entry.sensitive) {
                if options.needs_secret && options.key_secret.is_none() {
                    let message = "`sensitive: true` needs a secret: set the environment variable `KEY_SECRET_FILE` to the path of a file with at least 16 random bytes";
                    reports[file].error(sensitive, || message.to_owned());
                }
            }
            layers.push(Layer { file, domains: Pattern::new(document.domain.value.clone()), document, apply });
        }
        finish(reports, &files, &mut problems);
        if problems.iter().any(|problem| problem.severity == Severity::Error) {
            return Err(InvalidRules { problems });
        }
        Ok(Self { files, layers, warnings: problems })
    }

    /// Compiles `documents` with this overlay laid over them.
    ///
    /// # Errors
    /// Returns the errors of `documents` alone. An overlay that does not fit is no error: its field is skipped with a warning.
    pub fn compile(
        &self,
        documents: Documents,
        options: &Options,
    ) -> Result<(CompiledRules, OverlayEffect), InvalidRules> {
        let mut laid = documents.clone();
        let (mut problems, effect) = self.lay(&mut laid, true);
        if let Ok(mut compiled) = compile(laid, options) {
            compiled.warnings.append(&mut problems);
            return Ok((compiled, effect));
        }
        compile(documents.clone(), options)?;
        // The documents are valid alone, so it is `entries` that changes the meaning of a value in them. Sensitive values stay hidden.
        let mut laid = documents;
        let (mut problems, effect) = self.lay(&mut laid, false);
        let mut compiled = compile(laid, options)?;
        compiled.warnings.append(&mut problems);
        Ok((compiled, effect))
    }

    /// Lays the overlay over `documents`. Returns the warnings, and the effect.
    /// Without `reads_values`, `entries` only marks sensitive values.
    fn lay(&self, documents: &mut Documents, reads_values: bool) -> (Vec<Problem>, OverlayEffect) {
        let reports = self.files.iter().map(|file| Report::new(&file.name)).collect();
        let mut laying = Laying { overlay: self, reports, effect: OverlayEffect::default() };
        let mut used: Vec<Vec<bool>> = self.layers.iter().map(|layer| vec![false; layer.apply.len()]).collect();
        for (_, document) in &mut documents.documents {
            let layers: Vec<_> = self.layers_of(&document.domain.value).collect();
            for (_, layer) in &layers {
                let over = &layer.document;
                document.charging = over.charging.or(document.charging);
                document.on_store_failure = over.on_store_failure.or(document.on_store_failure);
                document.on_store_overload = over.on_store_overload.or(document.on_store_overload);
            }
            laying.apply(document, &layers, &mut used);
        }
        laying.entries(documents, reads_values);
        for (layer, used) in self.layers.iter().zip(used) {
            for (item, _) in layer.apply.iter().zip(used).filter(|(_, is_used)| !is_used) {
                let message = "this item matches no limit of the rules, so it has no effect: compare `match` with `/rlconfig` of the debug listener";
                laying.unmatched(layer.file, item.place, message);
            }
        }
        let mut problems = self.warnings.clone();
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

    /// Returns `entry` with its field `sensitive` alone. Reports the others as skipped.
    fn only_sensitive(&mut self, file: usize, entry: EntryNode) -> EntryNode {
        let EntryNode { key, form, v4_prefix, v6_prefix, is_lower, sensitive } = entry;
        if form.is_some() || v4_prefix.is_some() || v6_prefix.is_some() || is_lower {
            self.skipped(file, key.place, || {
                "a rule has a value that is not valid when values are read this way, so this entry of the overlay reads no values: change that rule, or remove this entry".to_owned()
            });
        }
        EntryNode { key, form: None, v4_prefix: None, v6_prefix: None, is_lower: false, sensitive }
    }

    /// Adds the overlay's `entries` to the domains that use their keys. Without `reads_values`, only their `sensitive`; the other fields
    /// are skipped.
    fn entries(&mut self, documents: &mut Documents, reads_values: bool) {
        for layer in &self.overlay.layers {
            for entry in &layer.document.entries {
                let mut entry = entry.clone();
                if !reads_values {
                    entry = self.only_sensitive(layer.file, entry);
                    if entry.sensitive.is_none() {
                        continue;
                    }
                }
                let mut domains: Vec<Arc<str>> = Vec::new();
                for (_, document) in &documents.documents {
                    let domain = &document.domain.value;
                    let is_new = layer.domains.matches(domain.as_bytes()) && !domains.iter().any(|d| **d == **domain);
                    if is_new && target::has_key(&document.descriptors, &entry.key.value) {
                        domains.push(domain.as_str().into());
                    }
                }
                for domain in &domains {
                    merge_entry(documents, domain, &entry);
                }
                if domains.is_empty() {
                    self.unmatched(
                        layer.file,
                        entry.key.place,
                        "no rule has this key, so the entry has no effect: check the spelling",
                    );
                }
            }
        }
    }
}

/// Adds `entry` to the documents of `domain`. Its fields win over those of the documents.
fn merge_entry(documents: &mut Documents, domain: &str, entry: &EntryNode) {
    let is_of_key = |known: &EntryNode| known.key.value == entry.key.value;
    let of_domain = || documents.documents.iter().enumerate().filter(|(_, (_, other))| other.domain.value == domain);
    let with_key = of_domain().find(|(_, (_, document))| document.entries.iter().any(is_of_key));
    let Some((index, _)) = with_key.or_else(|| of_domain().next()) else { return };
    let Some((_, document)) = documents.documents.get_mut(index) else { return };
    let place = document.domain.place;
    let mut entry = entry.clone();
    entry.key.place = place;
    entry.v4_prefix.iter_mut().chain(&mut entry.v6_prefix).for_each(|prefix| prefix.place = place);
    entry.sensitive = entry.sensitive.map(|_| place);
    match document.entries.iter_mut().find(|known| known.key.value == entry.key.value) {
        None => document.entries.push(entry),
        Some(known) => {
            known.form = entry.form.or(known.form);
            known.v4_prefix = entry.v4_prefix.or(known.v4_prefix.take());
            known.v6_prefix = entry.v6_prefix.or(known.v6_prefix.take());
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
mod tests;
