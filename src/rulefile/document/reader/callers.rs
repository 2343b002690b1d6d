//! Reader for the file of callers.

use super::{Level, MapEntry, Reader};
use crate::model::Rights;
use crate::rulefile::document::CallerNode;
use crate::rulefile::document::keys::advice;
use crate::rulefile::problem::quoted;
use crate::rulefile::yaml::{Content, Node, Nodes, Tree};
use crate::rules::tree::Position;

const EXAMPLE: &str = "`- { names: [envoy.example.com], domains: [edge] }`";
/// Words of `rights`, each with the rights that it grants.
const RIGHTS: [(&str, Rights); 2] = [
    ("override", Rights { may_override: true, may_refund: false }),
    ("refund", Rights { may_override: false, may_refund: true }),
];

impl<'t> Reader<'_, 't> {
    /// Returns the items of `callers`.
    pub(super) fn callers_file(&mut self, tree: &'t Tree) -> Vec<CallerNode> {
        let root = tree.root();
        let place = root.map_or(Position { line: 1, column: 1 }, |root| root.place);
        let entries = match root.map(Node::content) {
            Some(Content::Broken) => return Vec::new(),
            Some(Content::Mapping(mapping)) => self.entries(mapping, Level::Callers),
            _ => {
                self.report.error(place, || {
                    format!("A file of callers must be a mapping: start with `callers:`, and write a list of items like {EXAMPLE} below it.")
                });
                return Vec::new();
            }
        };
        let Some(entry) = entries.into_iter().find(|entry| entry.name == "callers") else {
            self.report.error(place, || {
                format!("The file has no `callers`, so it grants nothing to anybody: write `callers:`, and a list of items like {EXAMPLE} below it.")
            });
            return Vec::new();
        };
        if entry.value.is_null() {
            self.wrong(entry.name, entry.value, &format!("a list of mappings like {EXAMPLE}"));
        }
        let Some(items) = self.list(entry, EXAMPLE) else { return Vec::new() };
        self.list_of_mappings(entry, items, EXAMPLE, Self::caller)
    }

    fn caller(&mut self, item: Node<'t>, mapping: Nodes<'t>) -> CallerNode {
        let place = item.place;
        let mut node = CallerNode { place, names: Vec::new(), domains: Vec::new(), rights: Rights::default() };
        let (mut has_names, mut has_domains) = (false, false);
        for entry in self.entries(mapping, Level::Caller) {
            match entry.name {
                "names" => (has_names, node.names) = (true, self.texts(entry)),
                "domains" => (has_domains, node.domains) = (true, self.texts(entry)),
                "rights" => node.rights = self.rights(entry),
                _ => {}
            }
        }
        if !has_names {
            self.report.error(place, || {
                "The item has no `names`, so it grants nothing to anybody: write names in certificates like `names: [envoy.example.com]`, or `names: [anonymous]` for callers without a certificate.".to_owned()
            });
        }
        if !has_domains {
            self.report.error(place, || {
                "The item has no `domains`, so its callers may not ask about any: write `domains: [edge]`, or `domains: [\"*\"]` for every domain.".to_owned()
            });
        }
        node
    }

    fn rights(&mut self, entry: MapEntry<'t>) -> Rights {
        let mut rights = Rights::default();
        let Content::List(items) = entry.value.content() else {
            if !entry.value.is_null() {
                self.wrong(entry.name, entry.value, "a list of rights like `[override, refund]`");
            }
            return rights;
        };
        for item in items {
            let Some(text) = self.item_text(entry, item) else { continue };
            match RIGHTS.iter().find(|(word, _)| *word == text) {
                Some((_, right)) => rights = rights.or(*right),
                None => self.report.error(item.place, || {
                    let words = RIGHTS.iter().map(|(word, _)| *word);
                    format!("{} is not a right: {}", quoted(text), advice(text, words))
                }),
            }
        }
        rights
    }
}
