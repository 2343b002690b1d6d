//! Limits that replace others, where one request meets both.
//!
//! The reference drops every limit of a cycle. A client whose request meets all of them would then have no limit, so replacements
//! within a cycle have no effect.

use foldhash::{HashMap, HashSet};

use super::Rule;
use crate::model::{Descriptor, RuleId};

/// Replacements by the rules that one request meets.
#[derive(Debug, Default)]
pub(super) struct Replacements<'a> {
    /// The rules that are in the graph already: the rules bound its size, not the request.
    rules: HashSet<RuleId>,
    /// Names of limits that a limit without a name or an unlimited rule replaces. These are in no cycle.
    unconditional: HashSet<&'a str>,
    graph: ReplacementGraph<'a>,
}

/// Graph of limit names: an edge goes from a limit to each limit that it replaces.
#[derive(Debug, Default)]
pub(crate) struct ReplacementGraph<'a> {
    numbers: HashMap<&'a str, usize>,
    names: Vec<&'a str>,
    replaced: Vec<Vec<usize>>,
}

impl<'a> Replacements<'a> {
    /// Adds descriptors with their rules. A descriptor that brings its own limit neither replaces nor is replaced.
    pub(super) fn add<'d>(&mut self, met: impl Iterator<Item = (&'d Descriptor, &'a Rule)>) {
        for (descriptor, rule) in met {
            if descriptor.limit.is_none() && rule.replaces_any() && self.rules.insert(rule.about.id) {
                self.add_rule(rule);
            }
        }
    }

    fn add_rule(&mut self, rule: &'a Rule) {
        self.unconditional.extend(rule.replaces.iter().map(AsRef::as_ref));
        for limit in rule.limits.iter() {
            let replaced = limit.replaces.iter().map(AsRef::as_ref);
            match &limit.name {
                Some(name) => replaced.for_each(|replaced| self.graph.add(name, replaced)),
                None => self.unconditional.extend(replaced),
            }
        }
    }

    /// Returns the names of the limits that are replaced.
    pub(super) fn replaced(&self) -> HashSet<&'a str> {
        let mut replaced = self.unconditional.clone();
        if !self.graph.names.is_empty() {
            replaced.extend(self.graph.edges().filter(|(.., in_cycle)| !in_cycle).map(|(_, replaced, _)| replaced));
        }
        replaced
    }
}

impl<'a> ReplacementGraph<'a> {
    /// Adds that the limit `name` replaces the limit `replaced`.
    pub(crate) fn add(&mut self, name: &'a str, replaced: &'a str) {
        let (from, to) = (self.number(name), self.number(replaced));
        self.replaced[from].push(to);
    }

    fn number(&mut self, name: &'a str) -> usize {
        *self.numbers.entry(name).or_insert_with(|| {
            self.names.push(name);
            self.replaced.push(Vec::new());
            self.names.len() - 1
        })
    }

    /// Returns each limit with a limit that it replaces, and true if both are in one cycle.
    pub(crate) fn edges(&self) -> impl Iterator<Item = (&'a str, &'a str, bool)> {
        // An edge is on a cycle if it is within one strongly connected component.
        let component = self.components();
        self.replaced.iter().enumerate().flat_map(move |(from, replaced)| {
            let in_cycle: Vec<_> = replaced.iter().map(|&to| (to, component[from] == component[to])).collect();
            in_cycle.into_iter().map(move |(to, in_cycle)| (self.names[from], self.names[to], in_cycle))
        })
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
            for member in members {
                component[member] = start;
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
