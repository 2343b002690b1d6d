//! Reader for the part of an overlay that a rule file does not have: `apply`.

use super::{Level, MapEntry, Reader};
use crate::algorithm::Algorithm;
use crate::rulefile::document::{ApplyNode, DescriptorNode, LimitNode, MatchNode};
use crate::rulefile::problem::{Placed, quoted};
use crate::rulefile::yaml::{Content, Node, Nodes};
use crate::rules::tree::Position;

const EXAMPLE: &str = "`- { match: [\"*\", user], limit: { algorithm: gcra } }`";
const PATH_EXAMPLE: &str = "a list of keys like `[\"*\", user]`";

/// Key of a file that empties the overlay.
pub(super) const EMPTY: &str = "empty_overlay";

/// Returns true if the top of a file has the key `overlay`.
pub(super) fn is_overlay(top: Nodes<'_>) -> bool {
    has_key(top, "overlay")
}

/// Returns true if the top of a file has this key.
pub(super) fn has_key(mut top: Nodes<'_>, name: &str) -> bool {
    while let Some((key, _)) = top.next_pair() {
        if matches!(key.content(), Content::Plain(text) | Content::Text(text) if *text == *name) {
            return true;
        }
    }
    false
}

impl<'t> Reader<'_, 't> {
    /// Reports an overlay without content. Only `empty_overlay: true` alone may be one, so that a file that is cut off takes nothing out of
    /// force.
    pub(crate) fn overlay_has_content(&mut self, is_emptied: bool, entries: &[MapEntry<'t>], place: Position) {
        if is_emptied {
            let is_true = |entry: &MapEntry<'t>| matches!(entry.value.content(), Content::Plain("true"));
            if entries.len() != 1 || !entries.iter().all(is_true) {
                self.report.error(place, || {
                    "`empty_overlay: true` empties the overlay only as the single line of its file: remove the other lines, or remove this one."
                        .to_owned()
                });
            }
        } else if entries.iter().all(|entry| entry.name == "overlay" || entry.value.is_nothing()) {
            self.report.error(place, || {
                "The overlay has nothing below `overlay`, like a file that was cut off while it was written: write the rest of the file, or, to empty the overlay, a file whose single line is `empty_overlay: true`."
                    .to_owned()
            });
        }
    }

    /// Returns the items of `apply`.
    pub(crate) fn apply(&mut self, entry: MapEntry<'t>) -> Vec<ApplyNode> {
        let Some(items) = self.list(entry, EXAMPLE) else { return Vec::new() };
        self.list_of_mappings(entry, items, EXAMPLE, Self::apply_item)
    }

    fn apply_item(&mut self, item: Node<'t>, mapping: Nodes<'t>) -> ApplyNode {
        let place = item.place;
        let mut node = ApplyNode {
            place,
            target: MatchNode::default(),
            limit: LimitNode { place, ..LimitNode::default() },
            rule: DescriptorNode { place, ..DescriptorNode::default() },
            places: Vec::new(),
        };
        let mut has_match = false;
        for entry in self.entries(mapping, Level::Apply) {
            if !matches!(entry.name, "match" | "limit") {
                node.places.push((entry.name, entry.place));
            }
            match entry.name {
                "match" => {
                    has_match = true;
                    node.target = self.target(entry);
                }
                "limit" => self.limit_fields(entry, &mut node),
                "request_cost" => node.rule.request_cost = self.at_least_one(entry),
                "message" => node.rule.message = self.text(entry),
                "expose" => node.rule.unexposed = (!self.said(entry).unwrap_or(true)).then_some(entry.place),
                _ => self.rule_field(entry, &mut node.rule),
            }
        }
        if !has_match {
            self.report.error(place, || {
                format!("The item has no `match`, so it applies to no limit: write an item like {EXAMPLE}.")
            });
        }
        node
    }

    fn limit_fields(&mut self, entry: MapEntry<'t>, node: &mut ApplyNode) {
        let Content::Mapping(mapping) = entry.value.content() else {
            self.wrong(entry.name, entry.value, "a mapping like `{algorithm: gcra, burst: 20}`");
            return;
        };
        for entry in self.entries(mapping, Level::Fields) {
            node.places.push((entry.name, entry.place));
            let limit = &mut node.limit;
            match entry.name {
                "unit_multiplier" => limit.unit_multiplier = self.number(entry),
                "window" => limit.window = self.length(entry),
                "burst" => limit.burst = self.number(entry),
                "algorithm" => limit.algorithm = self.word(entry, &Algorithm::ALL),
                "count_refused" => limit.count_refused = self.flag(entry),
                "refuse_peek_at_limit" => limit.refuse_peek_at_limit = self.flag(entry).then_some(entry.place),
                "cost" => limit.cost = self.at_least_one(entry),
                "warn_at" => limit.warn_at = self.percent(entry),
                "delay" => limit.delay = self.delay(entry),
                "lease" => limit.lease = self.lease(entry),
                _ => self.rule_field(entry, &mut node.rule),
            }
        }
    }

    /// Reads a field that may stand in the item or in its `limit`.
    fn rule_field(&mut self, entry: MapEntry<'t>, rule: &mut DescriptorNode) {
        match entry.name {
            "charging" => rule.charging = self.charging(entry),
            "on_store_failure" => rule.on_store_failure = self.policy(entry),
            "on_store_overload" => rule.on_store_overload = self.policy(entry),
            "remember_refusals" => rule.remember_refusals = self.said(entry),
            _ => {}
        }
    }

    fn at_least_one(&mut self, entry: MapEntry<'t>) -> Option<Placed<u32>> {
        let number = self.number(entry)?;
        if number.value == 0 {
            self.wrong(entry.name, entry.value, "a whole number of at least 1");
            return None;
        }
        Some(number)
    }

    /// Returns the steps of a path, in both walks: the first one checks them.
    fn steps(&mut self, entry: MapEntry<'t>) -> Vec<Placed<String>> {
        let Content::List(items) = entry.value.content() else {
            self.wrong(entry.name, entry.value, PATH_EXAMPLE);
            return Vec::new();
        };
        if items.clone().next().is_none() {
            self.wrong(entry.name, entry.value, PATH_EXAMPLE);
        }
        let mut steps = Vec::new();
        for item in items {
            if let Some(text) = self.item_text(entry, item) {
                self.take(size_of::<Placed<String>>().saturating_add(text.len()), item.place);
                steps.push(Placed { value: text.to_owned(), place: item.place });
            }
        }
        steps
    }

    fn target(&mut self, entry: MapEntry<'t>) -> MatchNode {
        let mut target = MatchNode::default();
        match entry.value.content() {
            Content::List(_) => target.path = self.steps(entry),
            Content::Mapping(mapping) => {
                for entry in self.entries(mapping, Level::Match) {
                    match entry.name {
                        "path" => target.path = self.steps(entry),
                        "unit" => target.unit = self.text(entry),
                        "requests_per_unit" => target.requests_per_unit = self.number(entry),
                        "name" => target.name = self.text(entry),
                        "metadata" => target.metadata = self.metadata(entry),
                        "unsafe_index" => target.is_index_safe = self.flag(entry),
                        _ => {}
                    }
                }
                if mapping_is_empty(&target) {
                    self.wrong(
                        entry.name,
                        entry.value,
                        "a mapping with at least one of `path`, `unit`, `requests_per_unit`, `name` and `metadata`",
                    );
                }
            }
            _ => self.wrong(entry.name, entry.value, PATH_EXAMPLE),
        }
        let is_narrowed = target.unit.is_some() || target.requests_per_unit.is_some() || target.name.is_some();
        if !target.is_index_safe && !is_narrowed {
            for step in target.path.iter().filter(|step| has_index(&step.value)) {
                self.report.error(step.place, || {
                    format!(
                        "{} has the index of a rule, and the index moves when a rule is added before it, so the item would apply to another rule: add `unit`, `requests_per_unit` or `name` to `match`, or write `unsafe_index: true`.",
                        quoted(&step.value)
                    )
                });
            }
        }
        target
    }
}

fn mapping_is_empty(target: &MatchNode) -> bool {
    target.path.is_empty()
        && target.unit.is_none()
        && target.requests_per_unit.is_none()
        && target.name.is_none()
        && target.metadata.is_none()
}

/// Returns true if `step` has `rule-N`, `match-N`, `rule/N` or `match/N`, as control planes name rules by their index.
fn has_index(step: &str) -> bool {
    ["rule", "match"].into_iter().any(|word| {
        step.match_indices(word).any(|(at, _)| {
            let rest = step.get(at + word.len()..).unwrap_or_default();
            rest.strip_prefix(['-', '/']).is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
        })
    })
}
