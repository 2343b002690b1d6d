//! Own rules of overlays (`descriptors`), for each domain of a load that an overlay names.

use std::sync::Arc;

use foldhash::HashSet;

use super::{Layer, Laying, Overlay, merge_entry, set_top};
use crate::rulefile::document::{DescriptorNode, EntryNode};
use crate::rulefile::documents::{Documents, MAX_LIST_BYTES, OverlayRules, list_path};

/// Maximum number of items that overlays with a pattern add to all domains together, where they are copied to each domain:
/// 200,000, about 100 MiB.
const MOST_COPIED: usize = 200_000;

impl Overlay {
    /// Returns the documents of the overlay alone, each for a domain that is called like its pattern. They have every error that
    /// the overlay can have without a source.
    pub(super) fn alone(&self) -> Documents {
        let mut documents = Documents::of(self.files.clone(), Vec::new(), self.problems.clone());
        documents.lists = self.lists.clone();
        for layer in &self.layers {
            let pattern = layer.domains.text();
            documents.overlays.push(self.rules(layer, 0, pattern, Vec::new()));
        }
        documents
    }

    /// Returns the own rules of `layer` for `domain`. `first` is the index of the first file of the overlay, and `entries` are those of
    /// the source.
    fn rules(&self, layer: &Layer, first: usize, domain: &str, mut entries: Vec<EntryNode>) -> OverlayRules {
        let mut document = layer.document.clone();
        document.domain.value = domain.to_owned();
        for (_, other) in self.layers_of(domain) {
            let over = &other.document;
            set_top(&mut document, over);
            over.entries.iter().for_each(|entry| merge_entry(&mut entries, entry.clone()));
        }
        OverlayRules { file: first + layer.file, pattern: layer.domains.text().into(), document, entries }
    }
}

impl Laying<'_> {
    /// Adds the own rules of the overlay to `documents`, for the domains of the source and for those that an overlay names without
    /// wildcards.
    pub(super) fn own_rules(&mut self, documents: &mut Documents) {
        let overlay = self.overlay;
        let with_rules = || overlay.layers.iter().filter(|layer| !layer.document.descriptors.is_empty());
        let first = self.first_file;
        for (path, list) in &overlay.lists {
            documents.lists.entry(path.clone()).or_insert_with(|| list.clone());
        }
        let of_source = documents.documents.iter().map(|(_, document)| document.domain.value.as_str());
        let named = with_rules().filter(|layer| layer.domains.is_literal()).map(|layer| layer.domains.text());
        let mut known = HashSet::default();
        let domains: Vec<String> =
            of_source.chain(named).filter(|name| known.insert(*name)).map(str::to_owned).collect();
        let mut copied = Copied::default();
        for layer in with_rules() {
            let matching = || domains.iter().filter(|domain| layer.domains.matches(domain.as_bytes()));
            if matching().next().is_none() {
                let message = "the rules have no domain of this name, so the `descriptors` of this overlay are not in force: compare the name with `/rlconfig` of the debug listener";
                self.unmatched(layer.file, layer.document.domain.place, message);
            }
            if !layer.domains.is_literal() && !copied.has_room(overlay, layer, matching().count()) {
                self.too_many(layer, matching().count());
                return;
            }
            for domain in matching() {
                let entries = documents.documents.iter().filter(|(_, document)| document.domain.value == *domain);
                let entries = entries.flat_map(|(_, document)| document.entries.iter().cloned()).collect();
                documents.overlays.push(overlay.rules(layer, first, domain, entries));
            }
        }
    }

    fn too_many(&mut self, layer: &Layer, domains: usize) {
        let most = MAX_LIST_BYTES >> 20;
        self.reports[layer.file].error(layer.document.domain.place, || {
            format!(
                "the `descriptors` of this overlay are copied to {domains} domains, and overlays with a pattern may have {MOST_COPIED} items and {most} MiB of lists in all domains together: write fewer rules, or name fewer domains"
            )
        });
    }
}

/// Size of the copies of rules.
#[derive(Default)]
struct Copied {
    items: usize,
    list_bytes: usize,
}

impl Copied {
    /// Adds `copies` copies of the rules of `layer`. Returns false if there is no room for them.
    fn has_room(&mut self, overlay: &Overlay, layer: &Layer, copies: usize) -> bool {
        let (items, list_bytes) = size(overlay, layer, &layer.document.descriptors);
        self.items = self.items.saturating_add(items.saturating_mul(copies));
        self.list_bytes = self.list_bytes.saturating_add(list_bytes.saturating_mul(copies));
        self.items <= MOST_COPIED && self.list_bytes <= MAX_LIST_BYTES
    }
}

/// Returns the number of items and of values in lists, and the bytes of list files.
fn size(overlay: &Overlay, layer: &Layer, items: &[DescriptorNode]) -> (usize, usize) {
    let Some(file) = overlay.files.get(layer.file) else { return (0, 0) };
    items.iter().fold((0_usize, 0_usize), |(count, bytes), item| {
        let (below, below_bytes) = size(overlay, layer, &item.descriptors);
        let list = item.value_list.as_ref();
        let values = list.map_or(0, |list| list.cidr.len() + list.values.len());
        let named = list.and_then(|list| list.file.as_ref()).map(|named| list_path(&file.name, &named.value));
        let content: Option<&Arc<[u8]>> = named.and_then(|path| overlay.lists.get(&path)?.as_ref().ok());
        let own_bytes = content.map_or(0, |content| content.len());
        (count + 1 + values + below, bytes + own_bytes + below_bytes)
    })
}
