//! Reader for `requests`: how plain HTTP requests are read.

use super::{Level, MapEntry, Reader};
use crate::rulefile::document::{PartNode, RequestEntryNode, RequestPart, RequestsNode};
use crate::rulefile::problem::Placed;
use crate::rulefile::yaml::{Content, Node, Nodes};
use crate::rules::requests::{Gateway, Missing};

/// Words of `escaped_slashes`; true: paths may have them.
const ESCAPED_SLASHES: [(&str, bool); 2] = [("refuse", false), ("keep", true)];
/// Example of a descriptor.
const EXAMPLE: &str = "`- [{ key: remote_address, from: client_ip }]`";

impl<'t> Reader<'_, 't> {
    /// Returns `requests` as written.
    pub(super) fn requests(&mut self, entry: MapEntry<'t>) -> Option<RequestsNode> {
        let Content::Mapping(mapping) = entry.value.content() else {
            self.wrong(
                entry.name,
                entry.value,
                "a mapping like `{from_gateway: nginx, trusted_proxies: [10.0.0.0/8], descriptors: [...]}`",
            );
            return None;
        };
        let mut node = RequestsNode {
            place: entry.place,
            from_gateway: None,
            trusted_proxies: Vec::new(),
            refusal_status: None,
            timeout: None,
            keeps_escaped_slashes: false,
            descriptors: None,
        };
        for entry in self.entries(mapping, Level::Requests) {
            match entry.name {
                "from_gateway" => node.from_gateway = self.word(entry, &Gateway::ALL),
                "trusted_proxies" => node.trusted_proxies = self.texts(entry),
                "refusal_status" => node.refusal_status = self.number(entry),
                "timeout" => node.timeout = self.length(entry),
                "escaped_slashes" => {
                    node.keeps_escaped_slashes = self.word(entry, &ESCAPED_SLASHES).is_some_and(|word| word.value);
                }
                "descriptors" => node.descriptors = Some((entry.place, self.request_descriptors(entry))),
                _ => {}
            }
        }
        Some(node)
    }

    fn request_descriptors(&mut self, entry: MapEntry<'t>) -> Vec<Vec<RequestEntryNode>> {
        let Content::List(items) = entry.value.content() else {
            self.wrong(entry.name, entry.value, &format!("a list of descriptors like {EXAMPLE}"));
            return Vec::new();
        };
        let mut descriptors = self.room_for(&items);
        for item in items {
            let Content::List(entries) = item.content() else {
                self.wrong_value(item, || {
                    format!("Each descriptor of `requests` must be a list of entries like {EXAMPLE}.")
                });
                continue;
            };
            let list = MapEntry { value: item, ..entry };
            let entries = self.list_of_mappings(list, entries, "`{ key: path, from: path }`", Self::request_entry);
            if self.is_building {
                descriptors.push(entries);
            }
        }
        descriptors
    }

    fn request_entry(&mut self, item: Node<'t>, mapping: Nodes<'t>) -> RequestEntryNode {
        let place = item.place;
        let mut node = RequestEntryNode { place, key: None, from: Vec::new(), name: None, value: None, missing: None };
        for entry in self.entries(mapping, Level::RequestEntry) {
            match entry.name {
                "key" => node.key = self.text(entry),
                "from" => node.from = self.from(entry),
                "name" => node.name = self.text(entry),
                "value" => node.value = self.text(entry),
                "missing" => node.missing = self.missing(entry),
                _ => {}
            }
        }
        node
    }

    fn from(&mut self, entry: MapEntry<'t>) -> Vec<PartNode> {
        let Content::List(items) = entry.value.content() else {
            let plain = |word: Placed<RequestPart>| {
                let Placed { value: part, place } = word;
                PartNode { place, part, header: None, is_address: false }
            };
            return self.word(entry, &RequestPart::ALL).into_iter().map(plain).collect();
        };
        let mut parts = self.room_for(&items);
        for item in items {
            self.take(size_of::<PartNode>(), item.place);
            let part = self.part(entry, item);
            if self.is_building {
                parts.extend(part);
            }
        }
        parts
    }

    /// Returns an item of the list `from`.
    fn part(&mut self, list: MapEntry<'t>, item: Node<'t>) -> Option<PartNode> {
        let place = item.place;
        let Content::Mapping(mapping) = item.content() else {
            if matches!(item.content(), Content::Plain("client_ip") | Content::Text("client_ip")) {
                return Some(PartNode { place, part: RequestPart::ClientIp, header: None, is_address: false });
            }
            self.wrong_item(list, item, "`{ header: x-user-id }` or `client_ip`");
            return None;
        };
        let mut node = PartNode { place, part: RequestPart::Header, header: None, is_address: false };
        for entry in self.entries(mapping, Level::RequestPart) {
            match entry.name {
                "header" => node.header = self.text(entry),
                "as" => node.is_address = self.word(entry, &[("ip", ())]).is_some(),
                _ => {}
            }
        }
        if node.header.is_none() {
            self.wrong_value(item, || "The item does not say which header: write `{ header: x-user-id }`.".to_owned());
        }
        Some(node)
    }

    fn missing(&mut self, entry: MapEntry<'t>) -> Option<Placed<Missing>> {
        const WORDS: [(&str, bool); 2] = [("skip", true), ("refuse", false)];
        let Content::Mapping(mapping) = entry.value.content() else {
            let word = self.word(entry, &WORDS)?;
            let value = if word.value { Missing::Skip } else { Missing::Refuse };
            return Some(Placed { value, place: word.place });
        };
        let entries = self.entries(mapping, Level::Missing);
        let value = entries.into_iter().find(|entry| entry.name == "value").and_then(|value| self.text(value));
        if value.is_none() {
            self.wrong(entry.name, entry.value, "`skip`, `refuse`, or a mapping like `{value: anonymous}`");
        }
        value.map(|value| Placed { value: Missing::Value(value.value), place: value.place })
    }
}
