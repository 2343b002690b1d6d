//! Compiler from documents to rules. Reports all errors of all files beyond their shape in one load.

use std::fmt;
use std::sync::Arc;

use foldhash::{HashMap, HashSet};
use thiserror::Error;

use super::cycles::Cycles;
use super::document::{DescriptorNode, Document, LimitsNode, ValueListNode};
use super::documents::{Documents, File, Lists};
use super::problem::{Placed, Problem, Report, Severity, quoted};
use crate::model::{
    About, Charging, Colocation, FailurePolicy, Leasing, Path, Role, RuleId, Series, Shown, StorePolicies,
};
use crate::normalize::digest::KeySecret;
use crate::normalize::pattern::Pattern;
use crate::normalize::{Normalizer, Normalizers};
use crate::rules::tree::{Child, Position, TreeLevel, Values};
use crate::rules::{Action, Domain, Modes, Rule, RuleSet, SourceLimits};

mod known_good;
mod limits;
mod lists;
mod overlays;
mod paths;
mod requests;

pub(super) use limits::limit;

/// Maximum number of limits of one descriptor: 16, more than two for each of the 7 units. A request charges all.
const MOST_LIMITS: usize = 16;

/// Process settings for the load.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// True if several files may extend one domain.
    pub merge_domains: bool,
    /// Charging mode for files that set none.
    pub charging: Charging,
    /// Policies that answer in place of the store, for files that set none.
    pub policies: StorePolicies,
    /// Leases for files that set none.
    pub lease: Leasing,
    /// True if refusals are recorded but not enforced in all domains.
    pub shadow_mode: bool,
    /// True if every limit is a quota.
    pub quota_mode: bool,
    /// Key for the digests of sensitive values.
    pub key_secret: Option<KeySecret>,
    /// True if sensitive values without `key_secret` are an error. True in processes that decide requests.
    pub needs_secret: bool,
}

/// The rules of a load, and its warnings.
#[derive(Debug)]
pub struct CompiledRules {
    /// The rules.
    pub rules: RuleSet,
    /// Warnings: places where the files probably do not do what their author expects.
    pub warnings: Vec<Problem>,
}

/// All problems of a refused load. Nothing of the load takes effect.
#[derive(Clone, Debug, Error)]
pub struct InvalidRules {
    /// Errors and warnings, sorted by file and place.
    pub problems: Vec<Problem>,
}

impl InvalidRules {
    /// Returns the number of errors among the problems.
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

/// Compiles the documents of one load.
///
/// # Errors
/// Returns every error of every document with its place, and the warnings with them.
pub fn compile(documents: Documents, options: &Options) -> Result<CompiledRules, InvalidRules> {
    let digest = documents.digest();
    let Documents { files, overlay_files, documents, mut problems, lists, overlays, mut domain_changes, .. } =
        documents;
    let is_wrong = |problem: &Problem| problem.severity == Severity::Error;
    let line = |problem: &Problem| (Arc::clone(&problem.file), problem.place.map(|place| place.line));
    let shape: HashSet<_> = problems.iter().filter(|problem| is_wrong(problem)).map(line).collect();
    let cycles = Cycles::of(documents.iter().map(|(_, document)| document));
    let mut compiler = Compiler {
        files: &files,
        options,
        lists: &lists,
        reports: files.iter().map(|file| Report::new(&file.name)).collect(),
        rules: 0,
        shared_limits: limits::SharedLimits::default(),
        of_lists: Vec::new(),
        domains: HashMap::default(),
    };
    let wide = compiler.domain_wide(&documents);
    let mut normalizers = compiler.normalizers(&documents, &overlays);
    for (file, document) in documents {
        if document.overlay.is_some() {
            let message = "this is an overlay, not a rule file: set `RULES_OVERLAY` to its path, or write `domain:` in place of `overlay:`";
            compiler.error(file, document.domain.place, message.to_owned());
        }
        compiler.domain(file, document, &cycles, &wide, &normalizers);
    }
    overlays.into_iter().for_each(|overlay| compiler.overlay(overlay, &wide));
    let Compiler { reports, rules, mut domains, of_lists, .. } = compiler;
    for (name, domain) in &mut domains {
        domain.normalizers = match (normalizers.remove(&**name), domain.overlays.first()) {
            (Some(own), _) => own,
            // Without rules of the source, the entries of the overlay show which values are sensitive.
            (None, Some(overlay)) => overlay.normalizers.clone(),
            (None, None) => Normalizers::default(),
        };
        domain.changes = domain_changes.remove(&**name).map(Box::new);
        let trees = || domain.overlays.iter().map(|overlay| &overlay.root).chain([&domain.root]);
        domain.is_enforcing = trees().any(TreeLevel::is_enforcing);
    }
    let mut beyond = of_lists;
    for (report, file) in reports.into_iter().zip(&files) {
        report.finish(&String::from_utf8_lossy(&file.bytes), &mut beyond);
    }
    // A problem on a line whose shape is wrong adds nothing: it follows from that error.
    beyond.retain(|problem| !shape.contains(&line(problem)));
    problems.append(&mut beyond);
    problems.sort_by(|a, b| (&a.file, a.place.is_none(), a.place).cmp(&(&b.file, b.place.is_none(), b.place)));
    if problems.iter().any(is_wrong) {
        return Err(InvalidRules { problems });
    }
    let source_files = files.len().saturating_sub(overlay_files);
    let names = files.into_iter().map(|file| file.name).collect();
    let modes = Modes { shadow: options.shadow_mode, quota: options.quota_mode };
    Ok(CompiledRules { rules: RuleSet::new(domains, names, source_files, digest, rules, modes), warnings: problems })
}

struct Compiler<'a> {
    files: &'a [File],
    options: &'a Options,
    lists: &'a Lists,
    /// Problems beyond the shape, by file.
    reports: Vec<Report>,
    rules: u32,
    shared_limits: limits::SharedLimits,
    /// Problems of the list files.
    of_lists: Vec<Problem>,
    domains: HashMap<Box<str>, Domain>,
}

/// Properties that an item inherits from the items above it.
#[derive(Clone, Copy)]
struct Inherited<'a> {
    file: usize,
    charging: Charging,
    policies: StorePolicies,
    remembers_refusals: bool,
    lease: Leasing,
    domain: &'a str,
    cycles: &'a Cycles,
    normalizers: &'a Normalizers,
    is_overlay: bool,
    /// True if the values of an item above share a counter.
    is_shared: bool,
}

/// Settings of a whole domain, and the index of its first file.
#[derive(Clone, Copy, Default)]
struct DomainWide {
    first: usize,
    charging: Option<Charging>,
    on_store_failure: Option<FailurePolicy>,
    on_store_overload: Option<FailurePolicy>,
    lease: Option<Leasing>,
    colocate: Option<Colocation>,
}

/// Merges `said`, the value of one more file, into `known`. Returns true if `known` already has a different value.
fn differs<T: Copy + PartialEq>(known: &mut Option<T>, said: Option<T>) -> bool {
    let is_other = known.is_some() && said.is_some() && *known != said;
    *known = known.or(said);
    is_other
}

/// Returns the value without its place.
fn value<T: Copy>(placed: &Option<Placed<T>>) -> Option<T> {
    placed.as_ref().map(|placed| placed.value)
}

impl Compiler<'_> {
    /// Collects the settings of each domain from all its files. Reports settings that differ between two files.
    fn domain_wide(&mut self, documents: &[(usize, Document)]) -> HashMap<String, DomainWide> {
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

    fn domain(
        &mut self,
        file: usize,
        document: Document,
        cycles: &Cycles,
        domains: &HashMap<String, DomainWide>,
        normalizers: &HashMap<String, Normalizers>,
    ) {
        let name = document.domain.value;
        let wide = domains.get(&name).copied().unwrap_or_default();
        if wide.first != file && !self.options.merge_domains {
            let first = &self.files[wide.first].name;
            let message = format!(
                "duplicate domain {}, already defined in {first}: write the domain in one file, or set `MERGE_DOMAIN_CONFIG=true` to let several files extend it",
                quoted(&name)
            );
            self.error(file, document.domain.place, message);
        }
        let mut domain = self.domains.remove(name.as_str()).unwrap_or_else(|| self.new_domain(wide));
        let none = Normalizers::default();
        let normalizers = normalizers.get(&name).unwrap_or(&none);
        let inherited = Inherited {
            file,
            charging: domain.charging,
            policies: domain.policies,
            remembers_refusals: true,
            lease: domain.lease,
            domain: &name,
            cycles,
            normalizers,
            is_overlay: false,
            is_shared: false,
        };
        let path = Arc::new(Path::of_domain(&name));
        self.level(&mut domain.root, document.descriptors, &path, inherited);
        self.known_good(&mut domain, document.known_good, &path, inherited);
        self.requests(&mut domain, document.requests, file);
        self.domains.insert(name.into(), domain);
    }

    /// Returns a domain without rules.
    fn new_domain(&self, wide: DomainWide) -> Domain {
        Domain {
            charging: wide.charging.unwrap_or(self.options.charging),
            policies: self.options.policies.inside(wide.on_store_failure, wide.on_store_overload),
            lease: wide.lease.unwrap_or(self.options.lease),
            colocation: wide.colocate.unwrap_or_default(),
            normalizers: Normalizers::default(),
            root: TreeLevel::default(),
            overlays: Vec::new(),
            known_good: None,
            requests: None,
            is_enforcing: false,
            changes: None,
        }
    }

    fn level(&mut self, node: &mut TreeLevel, items: Vec<DescriptorNode>, path: &Arc<Path>, inherited: Inherited<'_>) {
        node.children.reserve_exact(items.len());
        for mut item in items {
            let place = item.place;
            let value_list = item.value_list.take();
            let Some(child) = self.child(item, value_list.as_deref(), path, inherited) else { continue };
            let shared = inherited.normalizers.of(child.key.text().as_bytes());
            let normalizer = shared.map(AsRef::as_ref);
            let added = node.add(child, shared);
            if added.is_ok()
                && let Some(value_list) = &value_list
            {
                self.list_values(node, value_list, normalizer, inherited);
            }
            if let Err(earlier) = added {
                let earlier = &node.children[earlier];
                let (file, first) = (&self.files[earlier.file as usize].name, earlier.place);
                let message = format!(
                    "duplicate descriptor {}, already defined on this level in {file} line {}: remove one of the two, or write both limits in one `rate_limits` list",
                    quoted(&earlier.label()),
                    first.line
                );
                self.error(inherited.file, place, message);
            }
        }
        self.other_spellings(node, inherited);
    }

    fn child(
        &mut self,
        mut item: DescriptorNode,
        value_list: Option<&ValueListNode>,
        path: &Arc<Path>,
        above: Inherited<'_>,
    ) -> Option<Child> {
        let inherited = Inherited {
            charging: item.charging.unwrap_or(above.charging),
            remembers_refusals: item.remember_refusals.unwrap_or(above.remembers_refusals),
            lease: item.lease.unwrap_or(above.lease),
            policies: above.policies.inside(item.on_store_failure, item.on_store_overload),
            is_shared: above.is_shared || item.share_threshold.is_some(),
            ..above
        };
        self.replace(&item, inherited);
        let action = self.action(&item, inherited.file);
        let Some(key) = &item.key else {
            self.error(
                inherited.file,
                item.place,
                "the descriptor has no key: write `key:` with the name of the entry that it matches".to_owned(),
            );
            return None;
        };
        let key = key.value.clone();
        let normalizer = inherited.normalizers.of(key.as_bytes()).map(AsRef::as_ref);
        let values = self.values(&item, value_list, &key, inherited.normalizers, inherited.file);
        let shown = if item.share_threshold.is_some() {
            Shown::Pattern
        } else if item.value_to_metric && !matches!(&values, Values::Pattern(one) if one.is_literal()) {
            Shown::Value
        } else {
            Shown::Word
        };
        let below = if above.is_overlay && path.is_domain() { Path::in_overlay } else { Path::below };
        let path = Arc::new(below(path, &key, word(&values, &key, normalizer).as_deref(), shown));
        let mut child = Child {
            key: Pattern::new(key),
            values,
            is_shared: item.share_threshold.is_some(),
            is_hidden: normalizer.is_some_and(|normalizer| normalizer.digester.is_some()),
            file: u32::try_from(inherited.file).unwrap_or(u32::MAX),
            place: item.place,
            rule: None,
            below: None,
        };
        if let Some(place) = item.share_threshold
            && child.key.is_literal()
            && value_list.is_none()
            && child.pattern().is_none_or(Pattern::is_literal)
        {
            let message = format!(
                "`share_threshold` makes the values of a wildcard or a list share one counter, but {} has no `*`: remove `share_threshold`, or write a value such as `v*`",
                quoted(&child.label())
            );
            self.error(inherited.file, place, message);
        }
        let descriptors = std::mem::take(&mut item.descriptors);
        child.rule = self.rule(item, action, &path, inherited);
        if !descriptors.is_empty() {
            let mut below = Box::<TreeLevel>::default();
            self.level(&mut below, descriptors, &path, inherited);
            child.below = Some(below);
        }
        Some(child)
    }

    /// Returns the rule of an item; `None` if the item only leads to the levels below.
    fn rule(
        &mut self,
        item: DescriptorNode,
        action: Option<Action>,
        path: &Arc<Path>,
        inherited: Inherited<'_>,
    ) -> Option<Rule> {
        let request_cost = self.at_least_one(item.request_cost.as_ref(), inherited.file);
        let limits = self.limits(item.limits, inherited);
        if limits.is_none() && action.is_none() && request_cost.get() == 1 {
            if let Some(message) = &item.message {
                let warning = "`message` is the text for a refused client, but this item refuses nothing: write it beside a limit or `deny: true`";
                self.warning(inherited.file, message.place, warning.to_owned());
            }
            return None;
        }
        let (limits, is_unlimited, replaces) = limits.unwrap_or_default();
        if let Some(place) = item.unexposed
            && limits.iter().any(|limit| limit.warn_at.is_some())
        {
            let message =
                "`warn_at` sends a header about the limit, but `expose: false` hides the limit: remove one of the two";
            self.error(inherited.file, place, message.to_owned());
        }
        let about = About {
            id: RuleId(self.rules),
            path: Arc::clone(path),
            message: item.message.map(|message| message.value.into()),
            is_exposed: item.unexposed.is_none(),
            metadata: item.metadata.filter(|metadata| !metadata.is_empty()).map(Box::new),
            series: if item.detailed_metric {
                Series::Detailed
            } else if path.levels().iter().any(|level| level.shown() == Shown::Value) {
                Series::Values
            } else {
                Series::Rule
            },
        };
        self.rules = self.rules.saturating_add(1);
        // The values of a shared counter may also be counted by rules that do not replace, so that counter stays apart.
        let source_limits = match item.replace {
            None => SourceLimits::Apply,
            Some(_) if inherited.is_shared => SourceLimits::Replaced,
            Some(_) => SourceLimits::TakenOver,
        };
        Some(Rule {
            about,
            limits,
            is_unlimited,
            replaces,
            role: Role::of(item.shadow_mode, item.quota_mode),
            charging: inherited.charging,
            policies: inherited.policies,
            remembers_refusals: inherited.remembers_refusals,
            lease: inherited.lease,
            action,
            request_cost,
            source_limits,
            file: u32::try_from(inherited.file).unwrap_or(u32::MAX),
            line: item.place.line,
            changes: item.changes,
        })
    }

    /// Returns the decision of an item for the whole request. Reports keys that such a decision makes useless.
    fn action(&mut self, item: &DescriptorNode, file: usize) -> Option<Action> {
        let (action, word, place) = match (item.deny, item.exempt) {
            (None, None) => return None,
            (Some(_), Some(place)) => {
                let message = "the item has both `deny` and `exempt`: remove one of the two".to_owned();
                self.error(file, place, message);
                return None;
            }
            (Some(place), None) => (Action::Deny, "deny", place),
            (None, Some(place)) => (Action::Exempt, "exempt", place),
        };
        let beside = [
            (!matches!(item.limits, LimitsNode::None), "a limit"),
            (!item.descriptors.is_empty(), "`descriptors`"),
            (item.request_cost.is_some(), "`request_cost`"),
            (item.quota_mode, "`quota_mode`"),
            (item.share_threshold.is_some(), "`share_threshold`"),
            (item.shadow_mode, "`shadow_mode`"),
            (action == Action::Exempt && item.message.is_some(), "`message`"),
        ];
        for (_, what) in beside.into_iter().filter(|(is_there, _)| *is_there) {
            let message =
                format!("`{word}` decides the whole request, so {what} beside it has no effect: remove one of the two");
            self.error(file, place, message);
        }
        Some(action)
    }

    fn error(&mut self, file: usize, place: Position, message: String) {
        self.reports[file].error(place, || message);
    }

    fn warning(&mut self, file: usize, place: Position, message: String) {
        self.reports[file].warning(place, || message);
    }
}

/// Returns the text for the item's values in the rule's path; `None` for any value.
fn word(values: &Values, key: &str, normalizer: Option<&Normalizer>) -> Option<String> {
    match values {
        Values::Any => None,
        Values::Pattern(pattern) => {
            let digest = normalizer.and_then(|normalizer| normalizer.digest(key.as_bytes(), pattern.text().as_bytes()));
            Some(digest.unwrap_or_else(|| pattern.text().to_owned()))
        }
        Values::Listed(listed) => Some(listed.shown.to_string()),
    }
}
