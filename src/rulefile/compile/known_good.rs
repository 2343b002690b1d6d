//! Compiler for `known_good`: entries of callers whose refusals are mistakes.

use std::sync::Arc;

use super::{Compiler, Inherited};
use crate::model::Path;
use crate::rulefile::document::DescriptorNode;
use crate::rules::Domain;

impl Compiler<'_> {
    /// Adds the items of `known_good` to `domain`. They match entries as the items of `descriptors` do.
    pub(super) fn known_good(
        &mut self,
        domain: &mut Domain,
        mut items: Vec<DescriptorNode>,
        path: &Arc<Path>,
        inherited: Inherited<'_>,
    ) {
        if items.is_empty() {
            return;
        }
        for item in &mut items {
            if item.value.is_none() && item.value_list.is_none() {
                let message = "an item of `known_good` without a value calls every caller good: write `value`, `values`, `cidr` or `values_file`";
                self.error(inherited.file, item.place, message.to_owned());
            }
            // An item that is found is one with a rule.
            item.exempt = Some(item.place);
        }
        // They are not counted as rules.
        let rules = self.rules;
        let mut tree = domain.known_good.take().unwrap_or_default();
        self.level(&mut tree, items, path, inherited);
        self.rules = rules;
        domain.known_good = Some(tree);
    }
}
