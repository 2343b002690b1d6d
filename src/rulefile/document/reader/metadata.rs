//! Reader for `metadata`: a mapping with free content.

use serde_json::{Number, Value};

use super::values::found;
use super::{MapEntry, Reader, TEXT_BYTES, is_merge};
use crate::model::Metadata;
use crate::rulefile::document::MAX_METADATA_DEPTH;
use crate::rulefile::yaml::scalar::{Scalar, resolve};
use crate::rulefile::yaml::{Content, Node, Nodes};

/// Memory of a mapping with at least one entry: 640 bytes.
/// A leaf of the standard library's `BTreeMap` has room for eleven keys and values.
const MAP_BYTES: usize = 640;

/// Memory of an entry in a half-full leaf: 110 bytes. Leaves are half full if entries come in order.
const ENTRY_BYTES: usize = 110;

impl<'t> Reader<'_, 't> {
    /// Returns the mapping; `None` if null or wrong.
    pub(crate) fn metadata(&mut self, entry: MapEntry<'t>) -> Option<Metadata> {
        match entry.value.content() {
            Content::Mapping(mapping) => {
                let mappings = self.mappings(entry.value, mapping);
                return Some(self.map(entry.value, mappings, 1));
            }
            Content::Plain(_) if entry.value.is_null() => {}
            _ => self.wrong(entry.name, entry.value, "a mapping like `{team: x}`"),
        }
        None
    }

    fn map(&mut self, node: Node<'t>, mappings: impl IntoIterator<Item = Nodes<'t>>, depth: usize) -> Metadata {
        self.take(MAP_BYTES, node.place);
        let mut map = Metadata::new();
        let mut keys: std::collections::BTreeMap<&'t str, u32> = std::collections::BTreeMap::new();
        let mut merges = Vec::new();
        let pairs = mappings.into_iter().flat_map(|mut mapping| std::iter::from_fn(move || mapping.next_pair()));
        for (key, value) in pairs {
            if self.is_full {
                break;
            }
            if is_merge(key) {
                merges.push(value);
                continue;
            }
            let Some(name) = self.metadata_key(key) else { continue };
            if let Some(line) = keys.insert(name, key.place.line) {
                self.report.warning(key.place, || {
                    format!("This key is already set on line {line}, and this one overrides it: remove one of the two.")
                });
            }
            self.take(ENTRY_BYTES.saturating_add(name.len()), key.place);
            let value = self.value(value, depth);
            if self.is_building {
                map.insert(name.to_owned(), value);
            }
        }
        for merge in merges.into_iter().rev() {
            for mapping in self.merged(merge) {
                for (name, value) in self.map(merge, [mapping], depth) {
                    map.entry(name).or_insert(value);
                }
            }
        }
        map
    }

    /// Returns a key as spelled in the file.
    fn metadata_key(&mut self, key: Node<'t>) -> Option<&'t str> {
        match key.content() {
            Content::Plain(text) | Content::Text(text) => Some(text),
            Content::Broken => None,
            Content::List(_) | Content::Mapping(_) => {
                self.report.error(key.place, || {
                    format!("A key of `metadata` must be a text, but this one is {}: write a word.", found(key))
                });
                None
            }
        }
    }

    fn value(&mut self, node: Node<'t>, depth: usize) -> Value {
        if depth >= MAX_METADATA_DEPTH && matches!(node.content(), Content::List(_) | Content::Mapping(_)) {
            self.report.error(node.place, || {
                format!(
                    "`metadata` is nested more than {MAX_METADATA_DEPTH} levels deep, and receivers reject that: use fewer levels."
                )
            });
            return Value::Null;
        }
        match node.content() {
            Content::Plain(text) => match resolve(text) {
                Scalar::Null => Value::Null,
                Scalar::Bool(flag) => Value::Bool(flag),
                Scalar::Int { value, .. } => Number::from_i128(value).map_or(Value::Null, Value::Number),
                // JSON has no infinite numbers.
                Scalar::Float(value) => {
                    Number::from_f64(value).map_or_else(|| self.metadata_text(node, text), Value::Number)
                }
                Scalar::Text => self.metadata_text(node, text),
            },
            Content::Text(text) => self.metadata_text(node, text),
            Content::List(items) => {
                let mut list = self.room_for(&items);
                for item in items {
                    if self.is_full {
                        break;
                    }
                    self.take(size_of::<Value>(), item.place);
                    let value = self.value(item, depth + 1);
                    if self.is_building {
                        list.push(value);
                    }
                }
                Value::Array(list)
            }
            Content::Mapping(mapping) => Value::Object(self.map(node, [mapping], depth + 1)),
            Content::Broken => Value::Null,
        }
    }

    fn metadata_text(&mut self, node: Node<'t>, text: &str) -> Value {
        self.take(TEXT_BYTES.saturating_add(text.len()), node.place);
        Value::String(if self.is_building { text.to_owned() } else { String::new() })
    }
}
