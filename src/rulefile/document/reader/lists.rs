//! Reader for lists of texts and for `entries`.

use foldhash::HashMap;

use super::values::found;
use super::{Level, MapEntry, Reader, TEXT_BYTES};
use crate::rulefile::document::{EntryNode, FormWord};
use crate::rulefile::problem::Placed;
use crate::rulefile::yaml::{Content, Node};

impl<'t> Reader<'_, 't> {
    /// Returns the texts of a list; empty if it is null or wrong.
    pub(crate) fn texts(&mut self, entry: MapEntry<'t>) -> Vec<Placed<String>> {
        let example = match entry.name {
            "cidr" => "[10.0.0.0/8, 2001:db8::/32]",
            "names" => "[\"*.gateways.example.com\", anonymous]",
            "domains" => "[edge, internal]",
            _ => "[a, b]",
        };
        let Content::List(items) = entry.value.content() else {
            self.wrong(entry.name, entry.value, &format!("a list like `{example}`"));
            return Vec::new();
        };
        if items.clone().next().is_none() {
            self.report.warning(entry.place, || {
                format!("`{}` is empty, so the item matches nothing: write a list like `{example}`.", entry.name)
            });
        }
        let mut texts = self.room_for(&items);
        for item in items {
            if self.is_full {
                break;
            }
            if let Some(text) = self.item_text(entry, item) {
                self.take(size_of::<Placed<String>>() + TEXT_BYTES + text.len(), item.place);
                if self.is_building {
                    texts.push(Placed { value: text.to_owned(), place: item.place });
                }
            }
        }
        texts
    }

    /// Returns the name of a file of values.
    pub(crate) fn file_name(&mut self, entry: MapEntry<'t>) -> Option<Placed<String>> {
        if entry.value.is_blank() {
            self.wrong(entry.name, entry.value, "the name of a file like `partners.txt`");
        }
        self.text(entry)
    }

    pub(crate) fn item_text(&mut self, list: MapEntry<'t>, item: Node<'t>) -> Option<&'t str> {
        match item.content() {
            Content::Plain(text) | Content::Text(text) if !item.is_blank() => Some(text),
            _ => {
                self.wrong_value(item, || {
                    format!("Each item of `{}` must be a text, but this one is {}.", list.name, found(item))
                });
                None
            }
        }
    }

    /// Reads `entries`: a mapping from entry keys, which can be any text, to their settings.
    pub(crate) fn normalizers(&mut self, entry: MapEntry<'t>) -> Vec<EntryNode> {
        const EXAMPLE: &str = "`remote_address: {as: ip}`";
        let Content::Mapping(mapping) = entry.value.content() else {
            if !entry.value.is_null() {
                self.wrong(entry.name, entry.value, &format!("a mapping with the keys of entries, like {EXAMPLE}"));
            }
            return Vec::new();
        };
        let mut normalizers: Vec<EntryNode> = Vec::new();
        let mut lines: HashMap<&str, u32> = HashMap::default();
        let mappings = self.mappings(entry.value, mapping);
        let pairs = mappings.into_iter().flat_map(|mut mapping| std::iter::from_fn(move || mapping.next_pair()));
        for (key, value) in pairs {
            if self.is_full {
                break;
            }
            let (Content::Plain(name) | Content::Text(name)) = key.content() else {
                self.wrong_value(key, || {
                    format!("A key must be a word, but this one is {}: write {EXAMPLE}.", found(key))
                });
                continue;
            };
            let Content::Mapping(says) = value.content() else {
                self.wrong_value(value, || {
                    format!(
                        "Each item of `entries` must be a mapping like {EXAMPLE}, but this one is {}.",
                        found(value)
                    )
                });
                continue;
            };
            if let Some(line) = lines.insert(name, key.place.line) {
                self.report.error(key.place, || {
                    format!("This entry is already set on line {line}: write all its settings in one item.")
                });
                continue;
            }
            self.take(size_of::<EntryNode>() + TEXT_BYTES + name.len(), key.place);
            let mut normalizer = EntryNode {
                is_laid: false,
                key: Placed { value: name.to_owned(), place: key.place },
                form: None,
                v4_prefix: None,
                v6_prefix: None,
                refuses_others: None,
                is_lower: false,
                sensitive: None,
            };
            for entry in self.entries(says, Level::Normalizer) {
                match entry.name {
                    "as" => normalizer.form = self.word(entry, &FormWord::ALL).map(|word| word.value),
                    "v4_prefix" => normalizer.v4_prefix = self.number(entry),
                    "v6_prefix" => normalizer.v6_prefix = self.number(entry),
                    "not_an_address" => {
                        normalizer.refuses_others = self.word(entry, &[("count", false), ("refuse", true)]);
                    }
                    "case" => normalizer.is_lower = self.word(entry, &[("lower", ())]).is_some(),
                    "sensitive" => normalizer.sensitive = self.flag(entry).then_some(entry.place),
                    _ => {}
                }
            }
            normalizers.push(normalizer);
        }
        normalizers
    }
}
