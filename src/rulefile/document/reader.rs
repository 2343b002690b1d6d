//! Reader from the YAML tree to a document. Checks every key and value.
//!
//! It walks the tree twice. The first walk finds all problems and adds up the memory of the document. The second walk builds
//! the document. A small file with an error gets a document of its valid parts, so that `compile` reports its problems in
//! the same load. A large file with an error gets none, and takes no more memory than its tree.

use std::sync::Arc;

use foldhash::HashMap;
use smallvec::SmallVec;

use super::cases::CaseFile;
use super::keys::{Key, Level, key_advice, nearest};
use super::{CallerNode, DescriptorNode, Document};
use crate::model::{Charging, Colocation, FailurePolicy};
use crate::rulefile::problem::{Placed, Report, quoted};
use crate::rulefile::yaml::{Content, Node, Nodes, Tree};
use crate::rules::tree::Position;

mod callers;
mod cases;
mod expected;
mod limits;
mod lists;
mod metadata;
mod overlay;
mod requests;
mod values;

/// Maximum memory of a document: 192 MiB.
/// 100,000 rules with a value, two limits and some metadata each take 160 MiB; with one limit and no metadata, 54 MiB.
const MAX_DOCUMENT_BYTES: usize = 192 << 20;

/// Maximum memory of the document of a file with an error: 8 MiB, about ten thousand rules.
const MAX_BROKEN_BYTES: usize = 8 << 20;

/// Overhead of a text's allocation, rounded up, in bytes.
const TEXT_BYTES: usize = 16;

/// A key at a valid place, and its value.
#[derive(Clone, Copy)]
struct MapEntry<'t> {
    name: &'static str,
    place: Position,
    value: Node<'t>,
}

struct Reader<'r, 't> {
    report: &'r mut Report,
    /// True in the second walk, which builds the document.
    is_building: bool,
    bytes: usize,
    is_full: bool,
    /// By the place of a mapping: the mappings that the same key had above it.
    repeated: HashMap<Position, Vec<Nodes<'t>>>,
}

impl<'r> Reader<'r, '_> {
    fn new(report: &'r mut Report, is_building: bool) -> Self {
        Self { report, is_building, bytes: 0, is_full: false, repeated: HashMap::default() }
    }
}

/// Returns the document of `tree`. Returns `None` for a large file with an error.
pub(crate) fn read(file: &Arc<str>, tree: &Tree, report: &mut Report) -> Option<Document> {
    let mut first = Reader::new(report, false);
    first.file(file, tree);
    let is_small = !first.is_full && first.bytes <= MAX_BROKEN_BYTES;
    if report.has_error() && !is_small {
        return None;
    }
    // The second walk reports the same problems again; they are discarded.
    let mut found_before = Report::new(file);
    Reader::new(&mut found_before, true).file(file, tree)
}

/// Returns the items of a file of callers, whose nodes are in `tree`.
pub(crate) fn read_callers(tree: &Tree, report: &mut Report) -> Vec<CallerNode> {
    // One walk: such a file is small.
    Reader::new(report, true).callers_file(tree)
}

/// Returns the file of test cases whose nodes are in `tree`.
pub(crate) fn read_cases(tree: &Tree, report: &mut Report) -> CaseFile {
    // One walk: such a file is small.
    Reader::new(report, true).cases_file(tree)
}

impl<'t> Reader<'_, 't> {
    fn file(&mut self, file: &Arc<str>, tree: &'t Tree) -> Option<Document> {
        let place = tree.root().map_or(Position { line: 1, column: 1 }, |root| root.place);
        let mapping = self.top(tree, place)?;
        let is_emptied = mapping.clone().is_some_and(|top| overlay::has_key(top, overlay::EMPTY));
        let is_overlay = is_emptied || mapping.clone().is_some_and(overlay::is_overlay);
        let level = if is_overlay { Level::Overlay } else { Level::File };
        let mut apply = Vec::new();
        let mut domain = None;
        let mut domain_entry = None;
        let mut charging = None;
        let mut on_store_failure = None;
        let mut on_store_overload = None;
        let mut lease = None;
        let mut colocate = None;
        let mut normalizers = Vec::new();
        let mut descriptors = Vec::new();
        let mut known_good = Vec::new();
        let mut requests = None;
        let entries = mapping.map(|mapping| self.entries(mapping, level)).unwrap_or_default();
        if is_overlay {
            self.overlay_has_content(is_emptied, &entries, place);
        }
        for entry in entries {
            match entry.name {
                overlay::EMPTY => {
                    // It concerns every domain, and has nothing for any.
                    domain = Some(Placed { value: "*".to_owned(), place });
                    domain_entry = Some(entry);
                }
                "domain" | "overlay" => {
                    domain = self.text(entry);
                    domain_entry = Some(entry);
                }
                "charging" => charging = self.word(entry, &Charging::ALL),
                "on_store_failure" => on_store_failure = self.word(entry, &FailurePolicy::ALL),
                "on_store_overload" => on_store_overload = self.word(entry, &FailurePolicy::ALL),
                "lease" => lease = self.lease(entry),
                "colocate" => colocate = self.word(entry, &Colocation::ALL).map(|word| word.value),
                "entries" => normalizers = self.normalizers(entry),
                "descriptors" => descriptors = self.descriptors(entry, Level::Descriptor),
                "known_good" => known_good = self.descriptors(entry, Level::KnownGood),
                "requests" => requests = self.requests(entry).map(Box::new),
                "apply" => apply = self.apply(entry),
                _ => {}
            }
        }
        self.has_domain(domain_entry, is_overlay && domain.is_none(), place);
        let (file, domain) = (Arc::clone(file), domain?);
        Some(Document {
            file,
            domain,
            charging,
            on_store_failure,
            on_store_overload,
            lease,
            colocate,
            entries: normalizers,
            descriptors,
            known_good,
            requests,
            overlay: is_overlay.then_some(apply),
        })
    }

    /// Reports a file without a domain. `domain` is its entry, and `is_empty_overlay` says that an overlay names none.
    fn has_domain(&mut self, domain: Option<MapEntry<'t>>, is_empty_overlay: bool, place: Position) {
        match domain {
            _ if is_empty_overlay => self.report.error(place, || {
                "`overlay` is empty, so the overlay applies to no domain: write `overlay: NAME`, or `overlay: \"*\"` for every domain."
                    .to_owned()
            }),
            None => self.report.error(place, || {
                "The file has no `domain`, so no request matches its rules: write `domain: NAME` at the top of the file."
                    .to_owned()
            }),
            Some(entry) if entry.value.is_blank() => self.report.error(entry.place, || {
                "`domain` is empty, so no request matches the rules: write `domain: NAME`.".to_owned()
            }),
            Some(_) => {}
        }
    }

    /// Returns the mapping of the whole file, which is `Some(None)` for an empty file. Returns `None` for anything else, with its error.
    fn top(&mut self, tree: &'t Tree, place: Position) -> Option<Option<Nodes<'t>>> {
        match tree.root().map(Node::content) {
            Some(Content::Mapping(top)) => {
                if ["apiVersion", "kind"].iter().all(|key| overlay::has_key(top.clone(), key)) {
                    let has_data = overlay::has_key(top.clone(), "data");
                    self.report.error(place, || {
                        if has_data {
                            return "This is an object of Kubernetes, and no rule file: write the text that it holds under `data` into a file of its own.".to_owned();
                        }
                        "This is an object of Kubernetes, and no rule file: apply it to the cluster, and write the rules into a file of their own, which begins with `domain: NAME`."
                            .to_owned()
                    });
                    return None;
                }
                if cases::is_cases(top.clone()) {
                    self.report.error(place, || {
                        "This is a file of test cases, and no rule file: move it out of the directory of the rules, and run it with `tidegate test`."
                            .to_owned()
                    });
                    return None;
                }
                Some(Some(top))
            }
            Some(Content::Broken) => None,
            Some(_) if tree.root().is_some_and(|root| !root.is_null()) => {
                self.report.error(place, || {
                    "A rule file must be a mapping: start with `domain: NAME`, and write the rules under `descriptors:`."
                        .to_owned()
                });
                None
            }
            _ => Some(None),
        }
    }

    fn descriptors(&mut self, entry: MapEntry<'t>, level: Level) -> Vec<DescriptorNode> {
        let Some(items) = self.list(entry, "`- key: NAME`") else { return Vec::new() };
        let mut descriptors = self.room_for(&items);
        for item in items {
            if self.is_full {
                break;
            }
            let Content::Mapping(mapping) = item.content() else {
                self.wrong_item(entry, item, "`- key: NAME`");
                continue;
            };
            self.take(size_of::<DescriptorNode>(), item.place);
            let descriptor = self.descriptor(item.place, mapping, level);
            if self.is_building {
                descriptors.push(descriptor);
            }
        }
        descriptors
    }

    fn descriptor(&mut self, place: Position, mapping: Nodes<'t>, level: Level) -> DescriptorNode {
        let mut node = DescriptorNode { place, ..DescriptorNode::default() };
        let mut limits_entry: Option<MapEntry<'t>> = None;
        let mut empty_value: Option<Position> = None;
        for entry in self.entries(mapping, level) {
            match entry.name {
                "key" => node.key = self.text(entry),
                "value" => {
                    node.value = self.text(entry);
                    empty_value = entry.value.is_blank().then_some(entry.place);
                }
                "cidr" => node.value_list.get_or_insert_default().cidr = self.texts(entry),
                "values" => node.value_list.get_or_insert_default().values = self.texts(entry),
                "values_file" => node.value_list.get_or_insert_default().file = self.file_name(entry),
                "deny" => node.deny = self.said(entry).unwrap_or(false).then_some(entry.place),
                "exempt" => node.exempt = self.said(entry).unwrap_or(false).then_some(entry.place),
                "replace" => node.replace = self.said(entry).unwrap_or(false).then_some(entry.place),
                "request_cost" => node.request_cost = self.number(entry),
                "message" => node.message = self.text(entry),
                "expose" => node.unexposed = (!self.said(entry).unwrap_or(true)).then_some(entry.place),
                // A generator writes an explicit null for a rule without a limit.
                "rate_limit" if entry.value.is_null() && !entry.value.is_unwritten() => {}
                "rate_limit" if entry.value.is_null() => self.report.warning(entry.place, || {
                    "`rate_limit` is empty, so the item has no limit: write the keys of the limit below it, with more indentation.".to_owned()
                }),
                "rate_limit" | "rate_limits" => {
                    let limits =
                        if entry.name == "rate_limit" { self.rate_limit(entry) } else { self.rate_limits(entry) };
                    if let Some(first) = limits_entry {
                        self.report.error(entry.place, || {
                            format!(
                                "The descriptor has both `{}` and `{}`: write all its limits in one `rate_limits` list.",
                                first.name, entry.name
                            )
                        });
                    }
                    limits_entry = Some(entry);
                    node.limits = limits;
                }
                "shadow_mode" => node.shadow_mode = self.flag(entry),
                "quota_mode" => node.quota_mode = self.flag(entry),
                "detailed_metric" => node.detailed_metric = self.flag(entry),
                "value_to_metric" => node.value_to_metric = self.flag(entry),
                "share_threshold" => node.share_threshold = self.flag(entry).then_some(entry.place),
                "metadata" => node.metadata = self.metadata(entry),
                "charging" => node.charging = self.charging(entry),
                "on_store_failure" => node.on_store_failure = self.policy(entry),
                "remember_refusals" => node.remember_refusals = self.said(entry),
                "lease" => node.lease = self.lease(entry).map(|lease| lease.value),
                "on_store_overload" => node.on_store_overload = self.policy(entry),
                "descriptors" => node.descriptors = self.descriptors(entry, Level::Descriptor),
                _ => {}
            }
        }
        if let Some(place) = empty_value.filter(|_| node.exempt.is_some()) {
            self.report.warning(place, || {
                "An empty `value` matches any value, so `exempt: true` exempts every request with this key, even if the client sends an empty header: write the value to exempt, or remove `value` to exempt every value.".to_owned()
            });
        }
        node
    }

    fn charging(&mut self, entry: MapEntry<'t>) -> Option<Charging> {
        self.word(entry, &Charging::ALL).map(|word| word.value)
    }

    fn policy(&mut self, entry: MapEntry<'t>) -> Option<FailurePolicy> {
        self.word(entry, &FailurePolicy::ALL).map(|word| word.value)
    }

    /// Returns the entries that belong at `level`, each key once, including those that `<<` merges in.
    fn entries(&mut self, mapping: Nodes<'t>, level: Level) -> Vec<MapEntry<'t>> {
        self.entries_of([mapping], level)
    }

    /// As [`Reader::entries`], for the mappings of one key.
    fn entries_of(&mut self, mappings: impl IntoIterator<Item = Nodes<'t>>, level: Level) -> Vec<MapEntry<'t>> {
        let mut entries: Vec<MapEntry<'t>> = Vec::new();
        let mut merges = Vec::new();
        let mut guesses = Vec::new();
        for mut mapping in mappings {
            while !self.is_full
                && let Some((key, value)) = mapping.next_pair()
            {
                if is_merge(key) {
                    merges.push((key, value));
                    continue;
                }
                let Some((name, is_guess)) = self.key(key, level) else { continue };
                let entry = MapEntry { name, place: key.place, value };
                if is_guess {
                    guesses.push(entry);
                    continue;
                }
                if let Some(first) = entries.iter().position(|other| other.name == name) {
                    let first = entries.remove(first);
                    self.repeat(first, entry);
                }
                entries.push(entry);
            }
        }
        // The load also reports problems below a mistyped key, and does not report its key as missing.
        for guess in guesses {
            if entries.iter().all(|entry| entry.name != guess.name) {
                entries.push(guess);
            }
        }
        let written = entries.len();
        // The later of two merges wins, as in yaml.v2.
        for (key, value) in merges.into_iter().rev() {
            self.merge(key, value, level, &mut entries, written);
        }
        entries
    }

    /// Reports a key that is set twice. As in yaml.v2, and so in the reference, two mappings are combined, and of anything else the
    /// later one counts.
    fn repeat(&mut self, first: MapEntry<'t>, later: MapEntry<'t>) {
        let (name, line) = (later.name, first.place.line);
        if let (Content::Mapping(above), Content::Mapping(_)) = (first.value.content(), later.value.content()) {
            let mut mappings = self.repeated.remove(&first.value.place).unwrap_or_default();
            mappings.push(above);
            self.repeated.insert(later.value.place, mappings);
            self.report.loss(later.place, || {
                if name == "rate_limit" {
                    return format!("`rate_limit` is already set on line {line}, and the keys of both are combined, so only one limit is in force: for both, write them as a list below `rate_limits`.");
                }
                format!("`{name}` is already set on line {line}, and the keys of both are combined: write them in one place.")
            });
        } else {
            self.report.loss(later.place, || {
                format!("`{name}` is already set on line {line}, and this one overrides it: remove one of the two.")
            });
        }
    }

    /// Returns the mappings of a key: `mapping`, and before it those that the same key had above `value`.
    fn mappings(&mut self, value: Node<'t>, mapping: Nodes<'t>) -> SmallVec<[Nodes<'t>; 1]> {
        let mut mappings: SmallVec<[Nodes<'t>; 1]> = if self.repeated.is_empty() {
            SmallVec::new()
        } else {
            self.repeated.remove(&value.place).unwrap_or_default().into()
        };
        mappings.push(mapping);
        mappings
    }

    /// Adds the entries that a `<<` merges in. The first `written` entries come from the mapping itself and win over merged ones,
    /// as do entries merged earlier.
    fn merge(&mut self, key: Node<'t>, value: Node<'t>, level: Level, entries: &mut Vec<MapEntry<'t>>, written: usize) {
        for mapping in self.merged(value) {
            for merged in self.entries(mapping, level) {
                match entries.iter().position(|entry| entry.name == merged.name) {
                    None => entries.push(merged),
                    Some(index) if index < written => self.overridden(key, entries.get(index), merged),
                    Some(_) => {}
                }
            }
        }
    }

    /// Warns about a merge in which yaml.v2, and so the reference, differs from the YAML specification.
    fn overridden(&mut self, key: Node<'t>, entry: Option<&MapEntry<'t>>, merged: MapEntry<'t>) {
        let Some(entry) = entry else { return };
        let name = entry.name;
        let both_mappings = [entry.value, merged.value].iter().all(|v| matches!(v.content(), Content::Mapping(_)));
        if entry.place < key.place {
            self.report.warning(key.place, || {
                format!(
                    "`{name}` above keeps its own value, but envoyproxy/ratelimit takes the merged value, because `<<` \
                     comes later: write `<<` first."
                )
            });
        } else if both_mappings {
            self.report.warning(entry.place, || {
                format!(
                    "This `{name}` replaces the merged one, but envoyproxy/ratelimit combines the keys of both: write all \
                     its keys here."
                )
            });
        }
    }

    /// Returns the mappings that a `<<` names. The earlier mapping wins.
    fn merged(&mut self, value: Node<'t>) -> Vec<Nodes<'t>> {
        let nodes: Vec<Node<'t>> = match value.content() {
            Content::List(items) => items.collect(),
            _ => vec![value],
        };
        let mut mappings = Vec::new();
        for node in nodes {
            match node.content() {
                Content::Mapping(mapping) => mappings.push(mapping),
                _ => self.wrong("<<", node, "a mapping or a list of mappings, like `<<: *base`"),
            }
        }
        mappings
    }

    /// Returns the name of a key at `level`, and true if it is a guess. Reports mistyped keys and guesses the nearest name.
    fn key(&mut self, key: Node<'t>, level: Level) -> Option<(&'static str, bool)> {
        let word = match key.content() {
            Content::Plain(word) | Content::Text(word) => word,
            Content::Broken => return None,
            Content::List(_) | Content::Mapping(_) => {
                self.report.error(key.place, || {
                    format!(
                        "A key must be a word, but this one is {}: write a key like `domain: NAME`.",
                        values::found(key)
                    )
                });
                return None;
            }
        };
        let inside = level.inside();
        match Key::find(word, level) {
            Some(key) if key.belongs(level) => Some((key.name, false)),
            Some(known) => {
                let name = known.name;
                let advice = || known.advice(level);
                if known.is_of_reference && !level.is_of_overlay() {
                    self.report.warning(key.place, || format!("`{name}` has no effect {inside}: {}.", advice()));
                } else {
                    self.report.error(key.place, || format!("`{name}` does not belong {inside}: {}.", advice()));
                }
                None
            }
            None => {
                self.report.error(key.place, || {
                    let is_number = !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_digit());
                    let advice = if is_number {
                        "a comma ends the value before it, so write a large number without commas.".to_owned()
                    } else {
                        key_advice(word, level)
                    };
                    format!("{} is not a known key {inside}: {advice}", quoted(word))
                });
                nearest(word, level.names()).map(|name| (name, true))
            }
        }
    }

    fn room_for<T>(&self, items: &Nodes<'t>) -> Vec<T> {
        Vec::with_capacity(if self.is_building { items.clone().count() } else { 0 })
    }

    /// Adds `bytes` to the memory of the document. Reports an error above the maximum.
    fn take(&mut self, bytes: usize, place: Position) {
        self.bytes = self.bytes.saturating_add(bytes);
        if self.bytes > MAX_DOCUMENT_BYTES && !self.is_full {
            self.is_full = true;
            self.report.error(place, || {
                format!(
                    "The file is too large: the rules up to this place need more than {} MiB of memory. Write fewer \
                     rules, or less metadata.",
                    MAX_DOCUMENT_BYTES >> 20
                )
            });
        }
    }
}

fn is_merge(key: Node<'_>) -> bool {
    matches!(key.content(), Content::Plain("<<"))
}
