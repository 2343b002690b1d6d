//! Settings of rules that overlays have set, for people who look for the line of a setting.

use std::borrow::Cow;

use super::tree::Position;
use super::{Domain, Rule, RuleSet};

/// A setting that an overlay has set, and its place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Change {
    /// Name of the setting in the overlay.
    pub(crate) field: Cow<'static, str>,
    /// Index of the limit in its rule; `None` for a setting of the whole rule or domain.
    pub(crate) limit: Option<usize>,
    /// Index of the file.
    pub(crate) file: u32,
    pub(crate) line: u32,
}

/// The settings of one rule or domain that overlays have set, each once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Changes(Vec<Change>);

impl Changes {
    /// Adds a setting. It wins over an earlier one of the same name.
    pub(crate) fn set(
        &mut self,
        field: impl Into<Cow<'static, str>>,
        limit: Option<usize>,
        file: usize,
        place: Position,
    ) {
        let field = field.into();
        self.remove(&field, limit);
        self.0.push(Change { field, limit, file: u32::try_from(file).unwrap_or(u32::MAX), line: place.line });
    }

    /// Removes a setting.
    pub(crate) fn remove(&mut self, field: &str, limit: Option<usize>) {
        self.0.retain(|change| (&*change.field, change.limit) != (field, limit));
    }
}

impl RuleSet {
    /// Returns the places of `rule` and of its settings that overlays have set:
    /// `rules.yaml:3, with algorithm and burst of overlay.yaml:4`.
    pub fn places(&self, rule: &Rule) -> String {
        let place = self.place(rule.file, rule.line);
        let changed = self.changed(rule.changes.as_deref(), rule.limits.len());
        if changed.is_empty() { place } else { format!("{place}, with {}", changed.join(", ")) }
    }

    /// Returns true if an overlay has `rule`, or has set a setting of it.
    pub fn is_overlaid(&self, rule: &Rule) -> bool {
        rule.changes.is_some() || usize::try_from(rule.file).is_ok_and(|file| file >= self.source_files)
    }

    /// Returns each domain with the settings of the whole domain that overlays have set, in the order of their names:
    /// `charging of overlay.yaml:2`.
    pub fn changed_domains(&self) -> Vec<(&str, Vec<String>)> {
        let mut changed: Vec<_> = self
            .domains
            .iter()
            .filter(|(_, domain)| domain.changes.is_some())
            .map(|(name, domain)| (&**name, self.domain_changes(domain)))
            .collect();
        changed.sort_unstable();
        changed
    }

    /// Returns the settings of a domain that overlays have set.
    pub(super) fn domain_changes(&self, domain: &Domain) -> Vec<String> {
        self.changed(domain.changes.as_deref(), 0)
    }

    /// Returns a place as `file:line`.
    pub(super) fn place(&self, file: u32, line: u32) -> String {
        let file = usize::try_from(file).ok().and_then(|file| self.files.get(file));
        format!("{}:{line}", file.map_or("", |file| file))
    }

    /// Returns the settings with their places, those of one place together: `algorithm and burst of overlay.yaml:4`. Names the limit
    /// where there are several.
    fn changed(&self, changes: Option<&Changes>, limits: usize) -> Vec<String> {
        let Some(Changes(changes)) = changes else { return Vec::new() };
        let mut changes = changes.clone();
        changes.sort_by_key(|change| (change.file, change.line, change.limit));
        let name = |change: &Change| match change.limit.filter(|_| limits > 1) {
            Some(limit) => format!("{} (limit {})", change.field, limit + 1),
            None => change.field.to_string(),
        };
        let of_place = changes.chunk_by(|one, other| (one.file, one.line) == (other.file, other.line));
        of_place
            .filter_map(|changes| {
                let at = changes.first()?;
                let names: Vec<_> = changes.iter().map(name).collect();
                Some(format!("{} of {}", names.join(" and "), self.place(at.file, at.line)))
            })
            .collect()
    }
}
