//! Search for headers that a client can make up without a limit on its address beside them.

use http::HeaderName;

use super::{ClientPart, HttpRequests, ReadEntry, Source};
use crate::model::{Descriptor, Entry};
use crate::rules::tree::{Position, TreeLevel};
use crate::rules::{Domain, Rule};

/// An address that is nobody's (RFC 7600), for which only a rule for any address has a limit.
const NOBODY: &str = "192.0.0.8";

impl Domain {
    /// Returns the places and names of the headers with any text that limited descriptors are counted by; none if a limit on the
    /// address alone stands beside them.
    pub(crate) fn headers_beyond_addresses<'a>(
        &'a self,
        requests: &'a HttpRequests,
    ) -> impl Iterator<Item = (Position, &'a HeaderName)> {
        let limits_addresses = requests.descriptors.iter().any(|entries| self.limits_addresses(entries));
        let limited = requests.descriptors.iter().filter(move |entries| !limits_addresses && self.limits(entries));
        limited.flatten().filter_map(|entry| Some((entry.place, any_text(&entry.source)?)))
    }

    /// Returns true if these entries are an address alone, and a rule limits each address.
    fn limits_addresses(&self, entries: &[ReadEntry]) -> bool {
        let sample = |entry: &ReadEntry| {
            let value = match &entry.source {
                Source::Value(value) => value.as_str(),
                source if source.is_address() => NOBODY,
                _ => return None,
            };
            Some(Entry::new(entry.key.clone(), value.to_owned()))
        };
        if !entries.iter().any(|entry| entry.source.is_address()) {
            return false;
        }
        let Some(entries) = entries.iter().map(sample).collect() else { return false };
        let places = self.places(&[Descriptor { entries, ..Descriptor::default() }]);
        let source = places.source.iter().filter_map(|found| found.rule);
        source.chain(places.overlaid.iter().filter_map(|laid| laid.found.rule)).any(is_limiting)
    }

    /// Returns true if a rule limits any descriptor with the keys of these entries.
    fn limits(&self, entries: &[ReadEntry]) -> bool {
        self.trees().any(|tree| limits(tree, entries))
    }
}

fn limits(level: &TreeLevel, entries: &[ReadEntry]) -> bool {
    let Some((first, rest)) = entries.split_first() else { return false };
    let matching = level.children.iter().filter(|child| child.key.matches(first.key.as_bytes()));
    matching.into_iter().any(|child| match rest {
        [] => child.rule.as_ref().is_some_and(is_limiting),
        rest => child.below.as_deref().is_some_and(|below| limits(below, rest)),
    })
}

fn is_limiting(rule: &Rule) -> bool {
    !rule.limits.is_empty() && rule.is_enforcing()
}

/// Returns the first header with any text that a value comes from.
fn any_text(source: &Source) -> Option<&HeaderName> {
    let Source::First(names, _) = source else { return None };
    names.iter().find_map(|name| match &name.part {
        ClientPart::Header(header) => Some(header),
        ClientPart::Address | ClientPart::AddressHeader(_) => None,
    })
}
