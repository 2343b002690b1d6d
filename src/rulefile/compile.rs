//! Compiler from documents to rules. Reports all errors of all files beyond their shape in one load.

use std::fmt;
use std::sync::Arc;

use foldhash::{HashMap, HashSet};
use thiserror::Error;

use self::wide::DomainWide;
use super::cycles::Cycles;
use super::document::{DescriptorNode, Document, ValueListNode};
use super::documents::{Documents, File, Lists};
use super::problem::{Placed, Problem, Report, Severity, quoted};
use crate::model::{About, Charging, Leasing, Path, Role, RuleId, Series, Shown, StorePolicies};
use crate::normalize::digest::KeySecret;
use crate::normalize::pattern::Pattern;
use crate::normalize::{Normalizer, Normalizers};
use crate::rules::tree::{Child, Position, TreeLevel, Values};
use crate::rules::{Action, Domain, Modes, Rule, RuleSet, SourceLimits};

mod actions;
mod addresses;
mod known_good;
mod limits;
mod lists;
mod literal;
mod no_effect;
mod overlays;
mod paths;
mod requests;
mod wide;

pub(super) use limits::limit;
use no_effect::Written;

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
    let is_pushed = documents.is_pushed();
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
        costs: limits::Costs::default(),
        offered: HashSet::default(),
        of_lists: Vec::new(),
        delays: Vec::new(),
        domains: HashMap::default(),
    };
    let wide = compiler.domain_wide(&documents);
    let mut normalizers = compiler.normalizers(&documents, &overlays);
    for (file, document) in &documents {
        compiler.texts(*file, document, normalizers.get(&document.domain.value));
    }
    for own in &overlays {
        compiler.texts(own.file, &own.document, normalizers.get(&own.document.domain.value));
    }
    let written = Written::of(&documents, &overlays);
    for (file, document) in documents {
        if document.overlay.is_some() {
            let message = "this is an overlay, not a rule file: set `RULES_OVERLAY` to its path, or write `domain:` in place of `overlay:`";
            compiler.error(file, document.domain.place, message.to_owned());
        }
        compiler.domain(file, document, &cycles, &wide, &normalizers);
    }
    overlays.into_iter().for_each(|overlay| compiler.overlay(overlay, &wide));
    compiler.delays_fit_checks();
    if !problems.iter().any(is_wrong) && !compiler.reports.iter().any(Report::has_error) {
        compiler.without_effect(written, &normalizers, is_pushed);
    }
    let Compiler { mut reports, mut rules, mut domains, of_lists, .. } = compiler;
    for (name, domain) in &mut domains {
        domain.normalizers = match (normalizers.remove(&**name), domain.overlays.first()) {
            (Some(own), _) => own,
            // Without rules of the source, the entries of the overlay show which values are sensitive.
            (None, Some(overlay)) => overlay.normalizers.clone(),
            (None, None) => Normalizers::default(),
        };
        domain.changes = domain_changes.remove(&**name).map(Box::new);
        refuse_not_addresses(name, domain, &mut rules);
        domain.is_enforcing = domain.trees().any(TreeLevel::is_enforcing) || !domain.not_addresses.is_empty();
        requests::warn_of_unlimited_addresses(domain, &mut reports);
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

/// Adds the rules that refuse values that are no addresses. `rules` is the number of rules so far.
fn refuse_not_addresses(name: &str, domain: &mut Domain, rules: &mut u32) {
    let path = Arc::new(Path::of_domain(name));
    for (key, place) in domain.normalizers.refusing() {
        domain.not_addresses.push((key.into(), Rule::denying_others(RuleId(*rules), &path, key, place)));
        *rules = rules.saturating_add(1);
    }
}

struct Compiler<'a> {
    files: &'a [File],
    options: &'a Options,
    lists: &'a Lists,
    /// Problems beyond the shape, by file.
    reports: Vec<Report>,
    rules: u32,
    shared_limits: limits::SharedLimits,
    costs: limits::Costs,
    /// The domains and keys for which `not_an_address` was offered.
    offered: HashSet<(String, String)>,
    /// Problems of the list files.
    of_lists: Vec<Problem>,
    /// Delays of the rule files.
    delays: Vec<requests::PlacedDelay>,
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

/// Returns the value without its place.
fn value<T: Copy>(placed: &Option<Placed<T>>) -> Option<T> {
    placed.as_ref().map(|placed| placed.value)
}

impl Compiler<'_> {
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
        self.costs_can_fit(file);
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
            not_addresses: Vec::new(),
            is_enforcing: false,
            changes: None,
        }
    }

    fn level(&mut self, node: &mut TreeLevel, items: Vec<DescriptorNode>, path: &Arc<Path>, inherited: Inherited<'_>) {
        node.children.reserve_exact(items.len());
        for mut item in items {
            let place = item.place;
            let value_list = item.value_list.take();
            let denies = item.deny;
            let Some(child) = self.child(item, value_list.as_deref(), path, inherited) else { continue };
            let shared = inherited.normalizers.of(child.key.text().as_bytes());
            let normalizer = shared.map(AsRef::as_ref);
            let has = (child.rule.is_some(), child.action().is_some());
            let added = node.add(child, shared);
            if added.is_ok()
                && let Some(value_list) = &value_list
            {
                self.list_values(node, value_list, normalizer, inherited);
                if let (Some(place), Some(normalizer)) = (denies, normalizer) {
                    let key = node.children.last().map(|child| child.key.text().to_owned()).unwrap_or_default();
                    self.offer_to_refuse(&key, place, normalizer, inherited);
                }
            }
            if let Err(earlier) = added {
                let earlier = &node.children[earlier];
                let (file, first) = (&self.files[earlier.file as usize].name, earlier.place);
                let todo = actions::twice(has, (earlier.rule.is_some(), earlier.action().is_some()));
                let message = format!(
                    "duplicate descriptor {}, already defined on this level in {file} line {}: {todo}",
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
        let limits = self.limits(item.limits, (path, item.request_cost.as_ref(), item.shadow_mode), inherited);
        if let Some(cost) = item.request_cost.as_ref().filter(|_| action.is_none()) {
            self.costs.add_request(path, cost);
        }
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
