//! Limits that replace each other in a circle, of two or more.
//!
//! In the reference every limit of a circle goes, so a client that can make a request meet all of them is free of all.

use foldhash::{HashMap, HashSet};

use super::document::{DescriptorNode, Document, LimitsNode};

/// The replacements that do not count, by domain and by the name of the limit that replaces.
#[derive(Debug, Default)]
pub(super) struct Circles(HashMap<String, HashMap<String, HashSet<String>>>);

/// The names of one domain as a graph: from each limit to those it replaces.
#[derive(Default)]
struct Names<'a> {
    numbers: HashMap<&'a str, usize>,
    names: Vec<&'a str>,
    replaced: Vec<Vec<usize>>,
}

impl Circles {
    /// The circles among the limits of each domain.
    pub(super) fn of<'a>(documents: impl Iterator<Item = &'a Document>) -> Self {
        let mut by_domain: HashMap<&str, Names<'_>> = HashMap::default();
        for document in documents {
            by_domain.entry(&document.domain.value).or_default().gather(&document.descriptors);
        }
        let circles = by_domain.into_iter().map(|(domain, names)| (domain.to_owned(), names.circles()));
        Self(circles.filter(|(_, circles)| !circles.is_empty()).collect())
    }

    /// What a limit of this domain and name does not replace, although it says so.
    pub(super) fn not_replaced(&self, domain: &str, name: &str) -> Option<&HashSet<String>> {
        self.0.get(domain)?.get(name)
    }
}

impl<'a> Names<'a> {
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

    /// The edges that lie on a circle: those within one strongly connected component.
    fn circles(&self) -> HashMap<String, HashSet<String>> {
        let component = self.components();
        let mut circles: HashMap<String, HashSet<String>> = HashMap::default();
        for (from, replaced) in self.replaced.iter().enumerate() {
            for &to in replaced.iter().filter(|&&to| to != from && component[to] == component[from]) {
                circles.entry(self.names[from].to_owned()).or_default().insert(self.names[to].to_owned());
            }
        }
        circles
    }

    /// The component of each name, by the algorithm of Kosaraju and Sharir, without recursion: a file can name limits in
    /// a chain of any length.
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
            for member in members {
                component[member] = start;
            }
        }
        component
    }
}

/// Walks from `start` to everything not yet seen, and lists it in the order in which the walk leaves it.
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
