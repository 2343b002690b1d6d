//! Settings of a whole domain, which several files may have.

use foldhash::HashMap;

use super::{Compiler, value};
use crate::model::{Charging, Colocation, FailurePolicy, Leasing};
use crate::rulefile::document::Document;

/// Settings of a whole domain, and the index of its first file.
#[derive(Clone, Copy, Default)]
pub(super) struct DomainWide {
    pub(super) first: usize,
    pub(super) charging: Option<Charging>,
    pub(super) on_store_failure: Option<FailurePolicy>,
    pub(super) on_store_overload: Option<FailurePolicy>,
    pub(super) lease: Option<Leasing>,
    pub(super) colocate: Option<Colocation>,
}

/// Merges `said`, the value of one more file, into `known`. Returns true if `known` already has a different value.
fn differs<T: Copy + PartialEq>(known: &mut Option<T>, said: Option<T>) -> bool {
    let is_other = known.is_some() && said.is_some() && *known != said;
    *known = known.or(said);
    is_other
}

impl Compiler<'_> {
    /// Collects the settings of each domain from all its files. Reports settings that differ between two files.
    pub(super) fn domain_wide(&mut self, documents: &[(usize, Document)]) -> HashMap<String, DomainWide> {
        let mut domains: HashMap<String, DomainWide> = HashMap::default();
        for (file, document) in documents {
            let name = &document.domain;
            let wide =
                domains.entry(name.value.clone()).or_insert(DomainWide { first: *file, ..DomainWide::default() });
            let differing = [
                differs(&mut wide.charging, value(&document.charging)).then_some("charging"),
                differs(&mut wide.on_store_failure, value(&document.on_store_failure)).then_some("on_store_failure"),
                differs(&mut wide.on_store_overload, value(&document.on_store_overload)).then_some("on_store_overload"),
                differs(&mut wide.lease, value(&document.lease)).then_some("lease"),
                differs(&mut wide.colocate, document.colocate).then_some("colocate"),
            ];
            for what in differing.into_iter().flatten() {
                let message = format!(
                    "`{what}` has another value in an earlier file of this domain: set it in one file, or to the same value in all"
                );
                self.error(*file, name.place, message);
            }
        }
        domains
    }
}
