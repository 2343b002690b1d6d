//! Cycles of two or more limits that replace each other, for warnings.

use foldhash::{HashMap, HashSet};

use super::document::{DescriptorNode, Document, LimitsNode};
use crate::rules::replacements::ReplacementGraph;

/// Replacements within a cycle, by domain and by name of the replacing limit.
#[derive(Debug, Default)]
pub(crate) struct Cycles(HashMap<String, HashMap<String, HashSet<String>>>);

impl Cycles {
    /// Finds the cycles among the limits of each domain.
    pub(crate) fn of<'a>(documents: impl Iterator<Item = &'a Document>) -> Self {
        let mut by_domain: HashMap<&str, ReplacementGraph<'_>> = HashMap::default();
        for document in documents {
            gather(by_domain.entry(&document.domain.value).or_default(), &document.descriptors);
        }
        let mut cycles: HashMap<String, HashMap<String, HashSet<String>>> = HashMap::default();
        for (domain, graph) in by_domain {
            for (name, replaced, _) in graph.edges().filter(|(.., in_cycle)| *in_cycle) {
                let of_domain = cycles.entry(domain.to_owned()).or_default();
                of_domain.entry(name.to_owned()).or_default().insert(replaced.to_owned());
            }
        }
        Self(cycles)
    }

    /// Returns true if the limits `name` and `replaced` of a domain are in one cycle.
    pub(crate) fn has(&self, domain: &str, name: &str, replaced: &str) -> bool {
        let of_domain = self.0.get(domain).and_then(|names| names.get(name));
        of_domain.is_some_and(|cycle| cycle.contains(replaced))
    }
}

/// Adds the limits of these items. An unlimited item cannot be replaced, so it is in no cycle.
fn gather<'a>(graph: &mut ReplacementGraph<'a>, items: &'a [DescriptorNode]) {
    for item in items {
        if let LimitsNode::Limited(limits) = &item.limits {
            for limit in limits {
                let Some(name) = &limit.name else { continue };
                // A limit that replaces itself is an error of its own.
                let replaced = limit.replaces.iter().filter(|replaced| replaced.value != name.value);
                replaced.for_each(|replaced| graph.add(&name.value, &replaced.value));
            }
        }
        gather(graph, &item.descriptors);
    }
}
