//! Cycles of two or more limits that replace each other.
//!
//! The reference drops every limit of a cycle. A client whose request matches all of them would then have no limit.

use foldhash::{HashMap, HashSet};

use super::document::{DescriptorNode, Document, LimitsNode};

/// Ignored replacements, by domain and by name of the replacing limit.
#[derive(Debug, Default)]
pub(crate) struct Cycles(HashMap<String, HashMap<String, HashSet<String>>>);

/// Graph of the limit names of one domain: an edge goes from a limit to each limit that it replaces.
#[derive(Default)]
struct LimitGraph<'a> {
    numbers: HashMap<&'a str, usize>,
    names: Vec<&'a str>,
    replaced: Vec<Vec<usize>>,
}

impl Cycles {
    /// Finds the cycles among the limits of each domain.
    pub(crate) fn of<'a>(documents: impl Iterator<Item = &'a Document>) -> Self {
        let mut by_domain: HashMap<&str, LimitGraph<'_>> = HashMap::default();
        for document in documents {
            by_domain.entry(&document.domain.value).or_default().gather(&document.descriptors);
        }
        let cycles = by_domain.into_iter().map(|(domain, names)| (domain.to_owned(), names.cycles()));
        Self(cycles.filter(|(_, cycles)| !cycles.is_empty()).collect())
    }

    /// Returns the names that limit `name` lists in `replaces` without effect, because they form a cycle with it.
    pub(crate) fn not_replaced(&self, domain: &str, name: &str) -> Option<&HashSet<String>> {
        self.0.get(domain)?.get(name)
    }
}

impl<'a> LimitGraph<'a> {
    fn gather(&mut self, items: &'a [DescriptorNode]) {
        for item in items {
            let limits = match &item.limits {
                LimitsNode::None => &[][..],
                LimitsNode::Unlimited(limit) => std::slice::from_ref(&**limit),
                LimitsNode::Limited(limits) => limits,
            };
            for limit in limits {
                let Some(name) = &limit.name else { continue };
                for replaced in &limit.replaces {
                    let (from, to) = (self.number(&name.value), self.number(&replaced.value));
                    self.replaced[from].push(to);
                }
            }
            self.gather(&item.descriptors);
        }
    }

    fn number(&mut self, name: &'a str) -> usize {
        *self.numbers.entry(name).or_insert_with(|| {
            self.names.push(name);
            self.replaced.push(Vec::new());
            self.names.len() - 1
        })
    }

    /// Returns the edges on cycles: those within one strongly connected component.
    fn cycles(&self) -> HashMap<String, HashSet<String>> {
        let component = self.components();
        let mut cycles: HashMap<String, HashSet<String>> = HashMap::default();
        for (from, replaced) in self.replaced.iter().enumerate() {
            for &to in replaced.iter().filter(|&&to| to != from && component[to] == component[from]) {
                cycles.entry(self.names[from].to_owned()).or_default().insert(self.names[to].to_owned());
            }
        }
        cycles
    }

    /// Returns the component of each name (algorithm of Kosaraju and Sharir). It does not recurse, because a file can chain any
    /// number of limits.
    fn components(&self) -> Vec<usize> {
        let mut backwards = vec![Vec::new(); self.names.len()];
        for (from, replaced) in self.replaced.iter().enumerate() {
            for &to in replaced {
                backwards[to].push(from);
            }
        }
        let mut finished = Vec::with_capacity(self.names.len());
        let mut seen = vec![false; self.names.len()];
        for start in 0..self.names.len() {
            visit(start, &self.replaced, &mut seen, &mut finished);
        }
        let mut component = vec![0; self.names.len()];
        let mut seen = vec![false; self.names.len()];
        for &start in finished.iter().rev() {
            let mut members = Vec::new();
            visit(start, &backwards, &mut seen, &mut members);
            for list_value in members {
                component[list_value] = start;
            }
        }
        component
    }
}

/// Walks from `start` to all nodes not yet seen. Appends each node to `left` when the walk leaves it.
fn visit(start: usize, edges: &[Vec<usize>], seen: &mut [bool], left: &mut Vec<usize>) {
    if std::mem::replace(&mut seen[start], true) {
        return;
    }
    let mut path = vec![(start, 0)];
    while let Some((at, next)) = path.last_mut() {
        match edges[*at].get(*next) {
            Some(&to) => {
                *next += 1;
                if !std::mem::replace(&mut seen[to], true) {
                    path.push((to, 0));
                }
            }
            None => {
                left.push(*at);
                path.pop();
            }
        }
    }
}
