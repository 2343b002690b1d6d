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
        items: Vec<DescriptorNode>,
        path: &Arc<Path>,
        inherited: Inherited<'_>,
    ) {
        if items.is_empty() {
            return;
        }
        for item in &items {
            if item.value.is_none() && item.value_list.is_none() {
                let message = "an item of `known_good` without a value calls every caller good: write `value`, `values`, `cidr` or `values_file`";
                self.error(inherited.file, item.place, message.to_owned());
            }
        }
        let mut tree = domain.known_good.take().unwrap_or_default();
        self.level(&mut tree, items, path, inherited);
        domain.known_good = Some(tree);
    }
}
