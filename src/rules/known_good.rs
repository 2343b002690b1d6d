//! Callers that are known to be good.

use super::RuleSet;
use crate::model::Request;

impl RuleSet {
    /// Returns the key of the first entry of a request that `known_good` of its domain names, if there is one.
    pub fn known_good(&self, request: &Request) -> Option<&str> {
        let domain = self.domains.get(request.domain())?;
        let names = domain.known_good.as_deref()?;
        let mut entries = request.descriptors().iter().flat_map(|descriptor| &descriptor.entries);
        entries.find_map(|entry| names.key_of(&domain.normalizers, entry))
    }
}
