//! Compiler for the own rules of overlays.

use std::sync::Arc;

use foldhash::HashMap;

use super::{Compiler, DomainWide, Inherited, value};
use crate::model::Path;
use crate::normalize::Normalizers;
use crate::rulefile::cycles::Cycles;
use crate::rulefile::document::{DescriptorNode, LimitsNode};
use crate::rulefile::documents::OverlayRules;
use crate::rules::places::OverlayTree;
use crate::rules::tree::TreeLevel;

impl Compiler<'_> {
    /// Adds the own rules of an overlay to their domain.
    pub(super) fn overlay(&mut self, overlay: OverlayRules, domains: &HashMap<String, DomainWide>) {
        let OverlayRules { file, pattern, document, entries } = overlay;
        for entry in &document.entries {
            self.normalizer(file, entry);
        }
        let cycles = Cycles::of(std::iter::once(&document));
        let name = document.domain.value;
        let wide = domains.get(&name).copied().unwrap_or(DomainWide {
            charging: value(&document.charging),
            on_store_failure: value(&document.on_store_failure),
            on_store_overload: value(&document.on_store_overload),
            lease: value(&document.lease),
            ..DomainWide::default()
        });
        let mut domain = self.domains.remove(name.as_str()).unwrap_or_else(|| self.new_domain(wide));
        let mark = crate::model::key::overlay_mark(&pattern);
        let index = domain.overlays.iter().position(|tree| tree.mark == mark).unwrap_or_else(|| {
            let mut normalizers = Normalizers::default();
            for entry in &entries {
                normalizers.insert(&entry.key.value, self.valid_normalizer(file, entry));
            }
            let keys = domain.requests.iter().flat_map(|requests| requests.address_keys());
            keys.for_each(|key| normalizers.default_to_addresses(key));
            domain.overlays.push(OverlayTree { pattern, mark, normalizers, root: TreeLevel::default() });
            domain.overlays.len() - 1
        });
        if let Some(tree) = domain.overlays.get_mut(index) {
            let inherited = Inherited {
                file,
                charging: domain.charging,
                policies: domain.policies,
                remembers_refusals: true,
                lease: domain.lease,
                domain: &name,
                cycles: &cycles,
                normalizers: &tree.normalizers,
                is_overlay: true,
                is_shared: false,
            };
            self.level(&mut tree.root, document.descriptors, &Arc::new(Path::of_domain(&name)), inherited);
        }
        self.domains.insert(name.into(), domain);
    }

    /// Reports a `replace` that has no effect.
    pub(super) fn replace(&mut self, item: &DescriptorNode, inherited: Inherited<'_>) {
        let Some(place) = item.replace else { return };
        let message = if !inherited.is_overlay {
            "`replace` takes the place of a limit of the rules below an overlay, and this is a rule file: remove it"
        } else if item.deny.is_some() || item.exempt.is_some() {
            "`replace` replaces limits, and this item decides the whole request: remove one of the two"
        } else if matches!(item.limits, LimitsNode::None) {
            "`replace` needs a limit in place of those that it replaces: write `rate_limit` beside it, or `rate_limit: { unlimited: true }`"
        } else if item.shadow_mode || item.limits.only_watch() {
            "`replace` takes the place of a limit that refuses, and `shadow_mode` refuses nothing, so nobody would be refused: remove one of the two"
        } else {
            return;
        };
        self.error(inherited.file, place, message.to_owned());
    }
}
