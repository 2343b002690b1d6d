//! Reader for a file of test cases.

use super::{Level, MapEntry, Reader, overlay};
use crate::model::{Descriptor, Entry, Micros, Override, Request};
use crate::rulefile::document::cases::{Case, CaseFile, Step};
use crate::rulefile::document::reader::values::found;
use crate::rulefile::problem::{Placed, quoted};
use crate::rulefile::yaml::scalar::{Scalar, resolve};
use crate::rulefile::yaml::{Content, Node, Nodes, Tree};
use crate::rules::tree::Position;

/// Maximum of `times`: 1,000,000, which takes about a second.
const MOST_TIMES: u32 = 1_000_000;

/// Maximum length of a case: 3,650 days, ten of the longest windows.
const MOST_TIME: Micros = Micros::from_secs(315_360_000);

const CASE: &str = "`- { name: NAME, steps: [...] }`";
const STEP: &str = "`- { descriptors: [{ user: ann }], expect: ok }`";
const DESCRIPTOR: &str = "a mapping like `{ user: ann, path: /login }`, or a text like `user=ann,path=/login`";

/// Returns true for the mapping of a file of test cases.
pub(super) fn is_cases(top: Nodes<'_>) -> bool {
    overlay::has_key(top.clone(), "cases") && !overlay::has_key(top, "descriptors")
}

/// Settings of a step as written, before they form a request.
#[derive(Default)]
struct StepNode {
    at: Option<Placed<Micros>>,
    after: Option<Placed<Micros>>,
    domain: Option<String>,
    descriptors: Vec<Descriptor>,
    hits: Placed<Vec<i64>>,
    limits: Placed<Vec<Override>>,
    times: Option<Placed<u32>>,
}

impl<'t> Reader<'_, 't> {
    /// Returns the rules and cases of a file.
    pub(super) fn cases_file(&mut self, tree: &'t Tree) -> CaseFile {
        let root = tree.root();
        let place = root.map_or(Position { line: 1, column: 1 }, |root| root.place);
        let entries = match root.map(Node::content) {
            Some(Content::Broken) => return CaseFile::default(),
            Some(Content::Mapping(mapping)) => self.entries(mapping, Level::Cases),
            _ => {
                self.report.error(place, || {
                    format!("A file of test cases must be a mapping: start with `cases:`, and write a list of items like {CASE} below it.")
                });
                return CaseFile::default();
            }
        };
        let mut file = CaseFile::default();
        let (mut domain, mut cases) = (None, None);
        for entry in entries {
            match entry.name {
                "rules" => file.rules = self.one_or_more(entry),
                "domain" => domain = self.domain_text(entry),
                _ => cases = Some(entry),
            }
        }
        let items = cases.and_then(|entry| Some((entry, self.list(entry, CASE)?)));
        let Some((entry, items)) = items else {
            self.report.error(place, || {
                format!("The file has no `cases`, so it tests nothing: write `cases:`, and a list of items like {CASE} below it.")
            });
            return file;
        };
        file.cases = self.list_of_mappings(entry, items, CASE, |reader, item, mapping| {
            reader.case(item, mapping, domain.as_deref())
        });
        if file.cases.is_empty() {
            self.report.error(entry.place, || {
                format!("`cases` is empty, so the file tests nothing: write a list of items like {CASE}.")
            });
        }
        file
    }

    /// Returns the name of a domain; `None` with an error if it is empty.
    fn domain_text(&mut self, entry: MapEntry<'t>) -> Option<String> {
        if entry.value.is_blank() {
            self.report.error(entry.value.place, || {
                "`domain` is empty: write the name of a domain of the rules, or remove it.".to_owned()
            });
            return None;
        }
        self.text(entry).map(|text| text.value)
    }

    fn case(&mut self, item: Node<'t>, mapping: Nodes<'t>, domain: Option<&str>) -> Case {
        let place = item.place;
        let (mut name, mut own_domain, mut steps) = (None, None, None);
        for entry in self.entries(mapping, Level::Case) {
            match entry.name {
                "name" => name = self.text(entry).map(|text| text.value),
                "domain" => own_domain = self.domain_text(entry),
                _ => steps = Some(entry),
            }
        }
        if name.is_none() {
            self.report.error(place, || {
                "The case has no `name`: write what it shows, like `name: the sixth login is refused`.".to_owned()
            });
        }
        let domain = own_domain.as_deref().or(domain);
        let mut now = Micros::ZERO;
        let read = steps.and_then(|entry| Some((entry, self.list(entry, STEP)?)));
        let steps: Vec<Step> = read.map_or_else(Vec::new, |(entry, items)| {
            let read = |reader: &mut Self, item: Node<'t>, mapping| reader.step(item.place, mapping, domain, &mut now);
            self.list_of_mappings(entry, items, STEP, read).into_iter().flatten().collect()
        });
        if !self.report.has_error() && steps.iter().all(|step| step.expected.is_none()) {
            self.report.error(place, || {
                format!("The case expects nothing, so it can never fail: write `steps` with items like {STEP}.")
            });
        }
        Case { place, name: name.unwrap_or_default(), steps }
    }

    /// Returns a step; `None` if it forms no request. `now` is the time of the step before it, and then that of this one.
    fn step(&mut self, place: Position, mapping: Nodes<'t>, domain: Option<&str>, now: &mut Micros) -> Option<Step> {
        let (mut node, mut expected) = (StepNode::default(), None);
        for entry in self.entries(mapping, Level::Step) {
            match entry.name {
                "at" => node.at = self.length(entry),
                "after" => node.after = self.length(entry),
                "domain" => node.domain = self.domain_text(entry),
                "descriptors" => node.descriptors = self.sent_descriptors(entry),
                "hits" => {
                    node.hits = self.of_each(entry, "a whole number, or a list with one for each descriptor", hits);
                }
                "limit" => {
                    let limit = "a limit like `5/minute`, or a list with one for each descriptor";
                    node.limits = self.of_each(entry, limit, |item| Override::parse(spelled(item)?));
                }
                "times" => node.times = self.number(entry),
                _ => expected = self.expected(entry),
            }
        }
        self.advance(&node, now);
        let times = self.times(node.times.as_ref());
        if let Some(expected) = &expected {
            self.count_expected(expected, node.descriptors.len());
            self.count_admitted(expected, times);
        }
        let request = self.request(place, node, domain)?;
        Some(Step { place, at: *now, request, times, expected })
    }

    /// Sets `now` to the time of the step.
    fn advance(&mut self, node: &StepNode, now: &mut Micros) {
        match (&node.at, &node.after) {
            (Some(_), Some(after)) => self.report.error(after.place, || {
                "The step has both `at` and `after`: write `at` for a time since the start of the case, or `after` for one since the step before.".to_owned()
            }),
            (Some(at), None) if at.value < *now => {
                let before = *now;
                self.report.error(at.place, || {
                    format!("The step is at {}, and the step before it is at {before}: write the steps in the order of their times.", at.value)
                });
            }
            (Some(at), None) => *now = at.value,
            (None, Some(after)) => *now = now.saturating_add(after.value),
            (None, None) => {}
        }
        if *now > MOST_TIME {
            let place = node.at.as_ref().or(node.after.as_ref()).map(|time| time.place).unwrap_or_default();
            self.report.error(place, || {
                format!("The step is at {now}, and a case can last {MOST_TIME} at most: write a shorter time.")
            });
        }
    }

    fn times(&mut self, times: Option<&Placed<u32>>) -> u32 {
        let Some(times) = times else { return 1 };
        if !(1..=MOST_TIMES).contains(&times.value) {
            self.report.error(times.place, || {
                format!("`times` must be a whole number from 1 to {MOST_TIMES}, but is {}.", times.value)
            });
        }
        times.value
    }

    /// Returns the request of a step; `None` with an error if there is none.
    fn request(&mut self, place: Position, node: StepNode, domain: Option<&str>) -> Option<Request> {
        let StepNode { mut descriptors, hits, limits, domain: own_domain, .. } = node;
        let number = descriptors.len();
        if number == 0 {
            self.report.error(place, || {
                format!("The step sends no descriptor: write `descriptors: [...]` with {DESCRIPTOR}.")
            });
            return None;
        }
        let (hits, limits) = (self.spread("hits", hits, number), self.spread("limit", limits, number));
        for (index, descriptor) in descriptors.iter_mut().enumerate() {
            if let Some(hits) = hits.get(index).copied() {
                descriptor.hits_addend = Some(hits.unsigned_abs());
                descriptor.is_negative_hits = hits < 0;
            }
            descriptor.limit = limits.get(index).copied();
        }
        let Some(domain) = own_domain.as_deref().or(domain) else {
            self.report.error(place, || {
                "The step has no domain: write `domain: NAME` at the top of the file, in the case, or in the step."
                    .to_owned()
            });
            return None;
        };
        let request = Request::new(domain.to_owned(), descriptors, 0);
        request.map_err(|why| self.report.error(place, || format!("The step sends no valid request: {why}."))).ok()
    }

    /// Returns one value for each of `number` descriptors. A single value is for all of them.
    fn spread<T: Clone>(&mut self, name: &str, given: Placed<Vec<T>>, number: usize) -> Vec<T> {
        match given.value.as_slice() {
            [one] => vec![one.clone(); number],
            values if values.is_empty() || values.len() == number => given.value,
            values => {
                let found = values.len();
                self.report.error(given.place, || {
                    format!("`{name}` has {found} values for {number} descriptors: write one for all, or one for each.")
                });
                Vec::new()
            }
        }
    }

    /// Returns the texts of an entry that is a text or a list of texts.
    fn one_or_more(&mut self, entry: MapEntry<'t>) -> Vec<Placed<String>> {
        match entry.value.content() {
            Content::List(_) => self.texts(entry),
            _ => self.text(entry).into_iter().collect(),
        }
    }

    /// Returns the value or the values of an entry; `read` returns `None` for a wrong one, and `expected` says what is right.
    fn of_each<T>(
        &mut self,
        entry: MapEntry<'t>,
        expected: &str,
        read: impl Fn(Node<'t>) -> Option<T>,
    ) -> Placed<Vec<T>> {
        let nodes: Vec<Node<'t>> = match entry.value.content() {
            Content::List(items) => items.collect(),
            _ => vec![entry.value],
        };
        let mut values = Vec::with_capacity(nodes.len());
        for node in nodes {
            match read(node) {
                Some(value) => values.push(value),
                None => self.wrong(entry.name, node, expected),
            }
        }
        Placed { value: values, place: entry.value.place }
    }

    fn sent_descriptors(&mut self, entry: MapEntry<'t>) -> Vec<Descriptor> {
        let Content::List(items) = entry.value.content() else {
            self.wrong(entry.name, entry.value, &format!("a list, of which each item is {DESCRIPTOR}"));
            return Vec::new();
        };
        items.filter_map(|item| self.sent_descriptor(item)).collect()
    }

    fn sent_descriptor(&mut self, item: Node<'t>) -> Option<Descriptor> {
        match item.content() {
            Content::Mapping(mapping) => {
                let entries = self.sent_entries(mapping);
                Some(Descriptor { entries, ..Descriptor::default() })
            }
            Content::Plain(text) | Content::Text(text) => match Descriptor::parse(text) {
                Ok(descriptor) => Some(descriptor),
                Err(why) => {
                    self.report.error(item.place, || format!("{why}. A descriptor is {DESCRIPTOR}."));
                    None
                }
            },
            _ => {
                self.wrong_value(item, || {
                    format!("Each item of `descriptors` must be {DESCRIPTOR}, but this one is {}.", found(item))
                });
                None
            }
        }
    }

    fn sent_entries(&mut self, mut mapping: Nodes<'t>) -> Vec<Entry> {
        let mut entries: Vec<Entry> = Vec::new();
        while let Some((key, value)) = mapping.next_pair() {
            let (Some(name), Some(text)) = (spelled(key), spelled(value)) else {
                let wrong = if spelled(key).is_some() { value } else { key };
                self.wrong_value(wrong, || {
                    format!("A key or value of a descriptor must be a text, but this one is {}.", found(wrong))
                });
                continue;
            };
            if entries.iter().any(|entry| entry.key == name.as_bytes()) {
                let name = quoted(name);
                self.report.error(key.place, || format!("{name} is already a key of this descriptor: write a descriptor with the same key twice as a text like `a=1,a=2`."));
            }
            let text = if value.is_blank() { "" } else { text };
            entries.push(Entry::new(name.to_owned(), text.to_owned()));
        }
        entries
    }
}

/// Returns a scalar as spelled in the file.
fn spelled(node: Node<'_>) -> Option<&str> {
    match node.content() {
        Content::Plain(text) | Content::Text(text) => Some(text),
        _ => None,
    }
}

/// Returns the hits of a descriptor; a negative number gives hits back.
fn hits(node: Node<'_>) -> Option<i64> {
    match node.content() {
        Content::Plain(text) => match resolve(text) {
            Scalar::Int { value, .. } => i64::try_from(value).ok(),
            _ => None,
        },
        _ => None,
    }
}
