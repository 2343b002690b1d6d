//! From documents to rules: everything a file can get wrong beyond its shape, and all of it at once.

use std::fmt;
use std::io;
use std::num::NonZeroU32;
use std::path::{Path as FilePath, PathBuf};
use std::sync::Arc;

use foldhash::{HashMap, HashSet};
use thiserror::Error;

use super::document::{self, DescriptorNode, Document, LimitNode, LimitsNode};
use super::problem::{Place, Problem, Report, Severity, quoted};
use super::replacement::Circles;
use super::tree::{Child, Node, Pattern};
use super::{Domain, Rule, RuleLimit, RuleSet};
use crate::algorithm::Limit;
use crate::model::{
    About, Charging, Colocation, Delivery, FailurePolicy, InvalidQuota, Path, Quota, Role, RuleId, Unit, Window,
};

/// The most limits of one descriptor: 16, twice the number of units. Each one is a counter that every request charges.
const MOST_LIMITS: usize = 16;

/// A rule file: its name for messages, and its bytes.
#[derive(Clone, Debug)]
pub struct File {
    /// The name that messages use.
    pub name: Arc<str>,
    /// What is in it.
    pub bytes: Vec<u8>,
}

/// What the process adds to the files.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Whether several files may extend one domain.
    pub merge_domains: bool,
    /// How requests are charged where no file says so.
    pub charging: Charging,
    /// What is answered without a store where no file says so.
    pub on_store_failure: FailurePolicy,
    /// Whether refusals are only watched, everywhere.
    pub shadow_mode: bool,
    /// Whether every limit is a quota.
    pub quota_mode: bool,
    /// Reads a file that a rule file names (`values_file`).
    pub read_list: fn(&FilePath) -> io::Result<Vec<u8>>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            merge_domains: false,
            charging: Charging::default(),
            on_store_failure: FailurePolicy::default(),
            shadow_mode: false,
            quota_mode: false,
            read_list: |_| Err(io::Error::other("rules that stand in no file can name none")),
        }
    }
}

/// The rules of a load, and what is odd about them.
#[derive(Debug)]
pub struct Loaded {
    /// The rules.
    pub rules: RuleSet,
    /// Things the files probably do not mean.
    pub warnings: Vec<Problem>,
    /// The files that the rule files name, to be watched like them.
    pub lists: Vec<PathBuf>,
}

/// All that is wrong with a load; nothing of it is in force.
#[derive(Clone, Debug, Error)]
pub struct InvalidRules {
    /// The problems, errors and warnings, by file and place.
    pub problems: Vec<Problem>,
}

impl InvalidRules {
    /// How many of the problems are errors.
    pub fn errors(&self) -> usize {
        self.problems.iter().filter(|problem| problem.severity == Severity::Error).count()
    }
}

impl fmt::Display for InvalidRules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, problem) in self.problems.iter().enumerate() {
            if index > 0 {
                f.write_str("\n")?;
            }
            problem.fmt(f)?;
        }
        Ok(())
    }
}

/// Reads and compiles rule files, in the order given.
///
/// # Errors
/// Every error of every file, with its place, and the warnings beside them.
pub fn load(files: &[File], options: Options) -> Result<Loaded, InvalidRules> {
    let mut problems = Vec::new();
    let documents: Vec<_> = files
        .iter()
        .enumerate()
        .filter_map(|(index, file)| Some((index, document::read(&file.name, &file.bytes, &mut problems)?)))
        .collect();
    let is_wrong = |problem: &Problem| problem.severity == Severity::Error;
    let shape: HashSet<(Arc<str>, Option<u32>)> = problems
        .iter()
        .filter(|problem| is_wrong(problem))
        .map(|problem| (Arc::clone(&problem.file), problem.place.map(|place| place.line)))
        .collect();
    let circles = Circles::of(documents.iter().map(|(_, document)| document));
    let mut compiler = Compiler {
        files,
        options,
        reports: files.iter().map(|file| Report::new(&file.name)).collect(),
        rules: 0,
        set: RuleSet {
            files: files.iter().map(|file| Arc::clone(&file.name)).collect(),
            quota_mode: options.quota_mode,
            shadow_mode: options.shadow_mode,
            ..RuleSet::default()
        },
    };
    let domains = compiler.domain_wide(&documents);
    for (file, document) in documents {
        compiler.domain(file, document, &circles, &domains);
    }
    let Compiler { reports, rules, mut set, .. } = compiler;
    set.rules = rules;
    let mut beyond = Vec::new();
    for (report, file) in reports.into_iter().zip(files) {
        report.finish(&String::from_utf8_lossy(&file.bytes), &mut beyond);
    }
    // What follows from a line whose shape is wrong says nothing new.
    beyond.retain(|problem| !shape.contains(&(Arc::clone(&problem.file), problem.place.map(|place| place.line))));
    problems.append(&mut beyond);
    problems.sort_by(|a, b| (&a.file, a.place.is_none(), a.place).cmp(&(&b.file, b.place.is_none(), b.place)));
    if problems.iter().any(is_wrong) {
        return Err(InvalidRules { problems });
    }
    Ok(Loaded { rules: set, warnings: problems, lists: Vec::new() })
}

struct Compiler<'a> {
    files: &'a [File],
    options: Options,
    /// What is wrong beyond the shape, by file.
    reports: Vec<Report>,
    rules: u32,
    set: RuleSet,
}

/// What an item takes over from the items above it.
#[derive(Clone, Copy)]
struct Inherited<'a> {
    file: usize,
    charging: Charging,
    on_store_failure: FailurePolicy,
    domain: &'a str,
    circles: &'a Circles,
}

/// What holds for a whole domain, and the first of its files.
#[derive(Clone, Copy, Default)]
struct DomainWide {
    first: usize,
    charging: Option<Charging>,
    on_store_failure: Option<FailurePolicy>,
    colocate: Option<Colocation>,
}

/// Takes what is `said` for what is known; true when something else is known already.
fn differs<T: Copy + PartialEq>(known: &mut Option<T>, said: Option<T>) -> bool {
    let is_other = known.is_some() && said.is_some() && *known != said;
    *known = known.or(said);
    is_other
}

impl Compiler<'_> {
    /// What each domain says of itself, in whichever of its files; two files may not say different things.
    fn domain_wide(&mut self, documents: &[(usize, Document)]) -> HashMap<String, DomainWide> {
        let mut domains: HashMap<String, DomainWide> = HashMap::default();
        for (file, document) in documents {
            let name = &document.domain;
            let wide =
                domains.entry(name.value.clone()).or_insert(DomainWide { first: *file, ..DomainWide::default() });
            let differing = [
                differs(&mut wide.charging, document.charging).then_some("charging"),
                differs(&mut wide.on_store_failure, document.on_store_failure).then_some("on_store_failure"),
                differs(&mut wide.colocate, document.colocate).then_some("colocate"),
            ];
            for what in differing.into_iter().flatten() {
                let message =
                    format!("`{what}` is another in an earlier file of this domain: say it once, or say the same");
                self.error(*file, name.place, message);
            }
        }
        domains
    }

    fn domain(&mut self, file: usize, document: Document, circles: &Circles, domains: &HashMap<String, DomainWide>) {
        let name = document.domain.value;
        let wide = domains.get(&name).copied().unwrap_or_default();
        if wide.first != file && !self.options.merge_domains {
            let first = &self.files[wide.first].name;
            let message = format!(
                "duplicate domain {}: {first} has it already; keep a domain in one file, or set MERGE_DOMAIN_CONFIG=true to let several files extend it",
                quoted(&name)
            );
            self.error(file, document.domain.place, message);
        }
        let charging = wide.charging.unwrap_or(self.options.charging);
        let on_store_failure = wide.on_store_failure.unwrap_or(self.options.on_store_failure);
        let colocation = wide.colocate.unwrap_or_default();
        let new = || Domain { charging, on_store_failure, colocation, root: Node::default() };
        let mut domain = self.set.domains.remove(name.as_str()).unwrap_or_else(new);
        let inherited = Inherited { file, charging, on_store_failure, domain: &name, circles };
        let path = Arc::new(Path::of_domain(&name));
        self.level(&mut domain.root, document.descriptors, &path, inherited);
        self.set.domains.insert(name.into(), domain);
    }

    fn level(&mut self, node: &mut Node, items: Vec<DescriptorNode>, path: &Arc<Path>, inherited: Inherited<'_>) {
        node.children.reserve_exact(items.len());
        for item in items {
            let place = item.place;
            let Some(child) = self.child(item, path, inherited) else { continue };
            if let Err(earlier) = node.add(child) {
                let earlier = &node.children[earlier];
                let (file, first) = (&self.files[earlier.file as usize].name, earlier.place);
                let message = format!(
                    "duplicate descriptor {}: it stands on this level in {file} line {} already; remove one, or put both limits in one `rate_limits` list",
                    quoted(&label(earlier)),
                    first.line
                );
                self.error(inherited.file, place, message);
            }
        }
    }

    fn child(&mut self, item: DescriptorNode, path: &Arc<Path>, above: Inherited<'_>) -> Option<Child> {
        let inherited = Inherited {
            charging: item.charging.unwrap_or(above.charging),
            on_store_failure: item.on_store_failure.unwrap_or(above.on_store_failure),
            ..above
        };
        let Some(key) = item.key else {
            self.error(
                inherited.file,
                item.place,
                "the descriptor has no key: write `key:` with the name of the entry it limits".to_owned(),
            );
            return None;
        };
        let mut child = Child {
            key: Pattern::new(key.value),
            value: item.value.map(|value| Pattern::new(value.value)),
            is_shared: item.share_threshold.is_some(),
            file: u32::try_from(inherited.file).unwrap_or(u32::MAX),
            place: item.place,
            rule: None,
            below: None,
        };
        let path = Arc::new(Path::below(path, child.key.text(), child.value.as_ref().map(Pattern::text)));
        if let Some(place) = item.share_threshold
            && child.key.is_literal()
            && child.value.as_ref().is_none_or(Pattern::is_literal)
        {
            let message = format!(
                "share_threshold lets the values of a wildcard share one counter, but {} has no `*`: remove it, or write a value such as `v*`",
                quoted(&label(&child))
            );
            self.error(inherited.file, place, message);
        }
        if let Some((limits, is_unlimited, replaces)) = self.limits(item.limits, inherited) {
            child.rule = Some(Rule {
                about: About {
                    id: RuleId(self.rules),
                    path: Arc::clone(&path),
                    message: None,
                    is_exposed: true,
                    metadata: item.metadata.filter(|metadata| !metadata.is_empty()).map(Box::new),
                },
                limits,
                is_unlimited,
                replaces,
                role: Role::of(item.shadow_mode, item.quota_mode),
                charging: inherited.charging,
                on_store_failure: inherited.on_store_failure,
                decides: None,
                request_cost: NonZeroU32::MIN,
            });
            self.rules = self.rules.saturating_add(1);
        }
        if !item.descriptors.is_empty() {
            let mut below = Box::<Node>::default();
            self.level(&mut below, item.descriptors, &path, inherited);
            child.below = Some(below);
        }
        Some(child)
    }

    /// The limits of an item, whether it is unlimited, and what it replaces as an unlimited one; `None` without a rule.
    fn limits(&mut self, node: LimitsNode, inherited: Inherited<'_>) -> Option<(Vec<RuleLimit>, bool, Vec<Arc<str>>)> {
        match node {
            LimitsNode::None => None,
            LimitsNode::Unlimited(node) => {
                self.unlimited(&node, inherited);
                let replaces = self.replaces(&node, inherited);
                Some((Vec::new(), true, replaces))
            }
            LimitsNode::Limited(nodes) => {
                if let Some(beyond) = nodes.get(MOST_LIMITS) {
                    let message = format!("a descriptor has at most {MOST_LIMITS} limits: remove those from here on");
                    self.error(inherited.file, beyond.place, message);
                }
                let mut limits: Vec<RuleLimit> = Vec::new();
                for node in nodes.into_iter().take(MOST_LIMITS) {
                    let Some(limit) = self.limit(&node, inherited) else { continue };
                    let same = |other: &RuleLimit| {
                        other.limit.algorithm() == limit.algorithm()
                            && other.limit.quota().window().length() == limit.quota().window().length()
                    };
                    if limits.iter().any(same) {
                        let message = format!(
                            "two limits of one descriptor count with {} over {} and would share a counter: keep the smaller",
                            limit.algorithm().name(),
                            limit.quota().window().length()
                        );
                        self.error(inherited.file, node.place, message);
                        continue;
                    }
                    let replaces = self.replaces(&node, inherited);
                    limits.push(RuleLimit {
                        limit,
                        name: node.name.map(|name| name.value.into()),
                        replaces,
                        cost: NonZeroU32::MIN,
                        delivery: Delivery::default(),
                        warn_at: None,
                    });
                }
                Some((limits, false, Vec::new()))
            }
        }
    }

    fn unlimited(&mut self, node: &LimitNode, inherited: Inherited<'_>) {
        if let Some(unit) = &node.unit {
            if Unit::parse(&unit.value).is_some() {
                let message = "should not specify a rate limit unit when unlimited: remove one of the two".to_owned();
                self.error(inherited.file, unit.place, message);
            } else {
                let message =
                    format!("{} is no unit, and an unlimited rule needs none: remove it", quoted(&unit.value));
                self.warning(inherited.file, unit.place, message);
            }
        }
        // The reference passes over a number beside it; ours are new, and mean a limit.
        let places = [
            ("window", node.window.as_ref().map(|window| window.place)),
            ("algorithm", node.algorithm.as_ref().map(|algorithm| algorithm.place)),
            ("burst", node.burst.as_ref().map(|burst| burst.place)),
        ];
        for (key, place) in places {
            if let Some(place) = place {
                let message = format!("`{key}` says how to limit, and the rule is unlimited: remove one of the two");
                self.error(inherited.file, place, message);
            }
        }
        if node.requests_per_unit > 0 {
            let message = format!(
                "`requests_per_unit: {}` is not enforced beside `unlimited`: remove one of the two",
                node.requests_per_unit
            );
            self.warning(inherited.file, node.place, message);
        }
        if let Some(name) = &node.name {
            let message = format!(
                "the name '{}' of an unlimited rule is never used: it is neither shown nor replaced",
                name.value
            );
            self.warning(inherited.file, name.place, message);
        }
    }

    fn limit(&mut self, node: &LimitNode, inherited: Inherited<'_>) -> Option<Limit> {
        let window = self.window(node, inherited)?;
        let algorithm = node.algorithm.as_ref().map(|algorithm| algorithm.value).unwrap_or_default();
        let mut quota = Quota::new(node.requests_per_unit, window);
        if let Some(burst) = &node.burst {
            if !algorithm.has_burst() {
                let message = format!(
                    "{} has no burst: remove `burst`, or choose an algorithm that has one ({})",
                    algorithm.name(),
                    with_burst()
                );
                self.error(inherited.file, burst.place, message);
                return None;
            }
            quota = quota.with_burst(burst.value);
        }
        match Limit::new(algorithm, quota) {
            Ok(limit) if node.count_refused => Some(limit.counting_refused()),
            Ok(limit) => Some(limit),
            Err(error) => {
                let place = match &error {
                    InvalidQuota::Burst { .. } => node.burst.as_ref().map(|burst| burst.place),
                    InvalidQuota::Ticks { .. } => node.window.as_ref().map(|window| window.place),
                    _ => None,
                };
                self.error(inherited.file, place.unwrap_or(node.place), format!("{}: {error}", algorithm.name()));
                None
            }
        }
    }

    fn window(&mut self, node: &LimitNode, inherited: Inherited<'_>) -> Option<Window> {
        let found = match (&node.window, &node.unit) {
            (Some(window), None) => {
                if let Some(multiplier) = &node.unit_multiplier {
                    let message = "`unit_multiplier` belongs to `unit`: write the whole length in `window`".to_owned();
                    self.error(inherited.file, multiplier.place, message);
                    return None;
                }
                Window::of_length(window.value).map_err(|error| (window.place, error.to_string()))
            }
            (Some(window), Some(_)) => {
                Err((window.place, "`window` takes the place of `unit`: remove one of the two".to_owned()))
            }
            (None, Some(unit)) => match (Unit::parse(&unit.value), &node.unit_multiplier) {
                (None, _) => Err((unit.place, unknown_unit(&unit.value))),
                (Some(unit), None) => Ok(Window::of_unit(unit)),
                (Some(unit), Some(multiplier)) => {
                    Window::of_units(unit, multiplier.value).map_err(|error| (multiplier.place, error.to_string()))
                }
            },
            (None, None) => Err((node.place, unknown_unit(""))),
        };
        found.map_err(|(place, message)| self.error(inherited.file, place, message)).ok()
    }

    fn replaces(&mut self, node: &LimitNode, inherited: Inherited<'_>) -> Vec<Arc<str>> {
        let own = node.name.as_ref().map(|name| name.value.as_str());
        let circle = own.and_then(|own| inherited.circles.not_replaced(inherited.domain, own));
        let mut names = Vec::with_capacity(node.replaces.len());
        for replaced in &node.replaces {
            let name = replaced.value.as_str();
            if name.is_empty() {
                let message =
                    "an item of `replaces` has no name: write `name:` with the name of another limit".to_owned();
                self.error(inherited.file, replaced.place, message);
            } else if own == Some(name) {
                let message = format!("the limit {} cannot replace itself: name another limit", quoted(name));
                self.error(inherited.file, replaced.place, message);
            } else if circle.is_some_and(|circle| circle.contains(name)) {
                let message = format!(
                    "this limit and {} replace each other, directly or in a circle, so neither goes: both stay in force. Remove one",
                    quoted(name)
                );
                self.warning(inherited.file, replaced.place, message);
            } else {
                names.push(name.into());
            }
        }
        names
    }

    fn error(&mut self, file: usize, place: Place, message: String) {
        self.reports[file].error(place, || message);
    }

    fn warning(&mut self, file: usize, place: Place, message: String) {
        self.reports[file].warning(place, || message);
    }
}

/// `key=value`, or the key alone.
pub(super) fn label(child: &Child) -> String {
    match &child.value {
        Some(value) => format!("{}={}", child.key.text(), value.text()),
        None => child.key.text().to_owned(),
    }
}

fn unknown_unit(found: &str) -> String {
    let units = Unit::ALL.map(Unit::name).join(", ");
    if found.is_empty() {
        format!(
            "the rate limit has no unit: write `unit:` with one of {units}, or `window:` with a length such as 250ms"
        )
    } else {
        format!(
            "invalid rate limit unit {}: write one of {units}, or `window:` with a length such as 250ms",
            quoted(found)
        )
    }
}

fn with_burst() -> String {
    let names = crate::algorithm::Algorithm::ALL.iter().filter(|(_, algorithm)| algorithm.has_burst());
    names.map(|(name, _)| *name).collect::<Vec<_>>().join(", ")
}
