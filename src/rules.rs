//! The rules in force, and the lookup of the rules that apply to a request. The lookup is pure and does no I/O.

use std::num::NonZeroU32;
use std::sync::Arc;

use foldhash::{HashMap, HashSet};
use smallvec::SmallVec;

use crate::algorithm::{Charge, Limit};
use crate::model::{
    About, Charging, Colocation, Delivery, Descriptor, Hidden, Hits, Path, Request, Role, RuleId, Ruling, StorePolicies,
};
use crate::normalize::Normalizers;

mod explain;
pub(crate) mod list;
pub mod live;
pub(crate) mod replacements;
mod survey;
pub(crate) mod tree;

pub use explain::{Explanation, explain};
use replacements::Replacements;
pub use survey::Survey;
use tree::TreeLevel;

/// All rules in force. Immutable.
#[derive(Debug, Default)]
pub struct RuleSet {
    domains: HashMap<Box<str>, Domain>,
    files: Vec<Arc<str>>,
    rules: u32,
    modes: Modes,
    generation: Generation,
}

/// Number of a load of the rules, counted from 1.
pub type Generation = u64;

/// Process-wide modes of all rules.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Modes {
    /// True if refusals are recorded but not enforced (`SHADOW_MODE`).
    pub(crate) shadow: bool,
    /// True if every limit is a quota (`QUOTA_MODE`).
    pub(crate) quota: bool,
}

/// The rules of one domain.
#[derive(Debug)]
pub(crate) struct Domain {
    pub(crate) charging: Charging,
    pub(crate) policies: StorePolicies,
    pub(crate) colocation: Colocation,
    pub(crate) normalizers: Normalizers,
    pub(crate) root: TreeLevel,
    /// True if any rule of the domain can refuse a request.
    pub(crate) is_enforcing: bool,
}

/// One rule: the configuration of one place in the descriptor tree.
#[derive(Debug)]
pub struct Rule {
    pub(crate) about: About,
    pub(crate) limits: Vec<RuleLimit>,
    pub(crate) is_unlimited: bool,
    /// Names of the limits that an unlimited rule replaces. A limited rule keeps these names in its limits.
    pub(crate) replaces: Vec<Arc<str>>,
    pub(crate) role: Role,
    pub(crate) charging: Charging,
    pub(crate) policies: StorePolicies,
    pub(crate) remembers_refusals: bool,
    /// Decision for the whole request before anything is charged; `None`: the rule makes none.
    pub(crate) action: Option<Action>,
    /// Factor for the hits of every limit of the request.
    pub(crate) request_cost: NonZeroU32,
}

/// Decision of a rule for a whole request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// The request is refused.
    Deny,
    /// The request passes and charges nothing.
    Exempt,
}

/// One limit of a rule.
#[derive(Clone, Debug)]
pub struct RuleLimit {
    /// Quota and algorithm.
    pub limit: Limit,
    /// Name in answers and in `replaces` of other limits.
    pub name: Option<Arc<str>>,
    /// Names of the limits that this limit replaces.
    pub replaces: Vec<Arc<str>>,
    /// Factor for the hits on this limit.
    pub cost: NonZeroU32,
    /// Delivery of a delay: the request waits in Envoy (`Header`) or in Tidegate (`Hold`).
    pub delivery: Delivery,
    /// Usage of the limit, in percent, from which the caller is warned.
    pub warn_at: Option<u8>,
}

/// Example of a descriptor that a rule limits.
#[derive(Clone, Debug)]
pub struct Example<'a> {
    /// Domain of the descriptor.
    pub domain: &'a str,
    /// Keys and values of the descriptor.
    pub entries: Vec<(String, String)>,
    /// Number of consecutive hits that the rule admits.
    pub limit: u32,
}

/// Result of the rule lookup for a request.
#[derive(Debug)]
pub struct Matched<'a> {
    /// Domain name; `None` if no rule file has the domain.
    pub domain: Option<&'a str>,
    /// One item per descriptor, in order.
    pub items: Vec<MatchedItem<'a>>,
    /// Charges of all items, in order; empty if a rule decides the whole request.
    pub charges: Vec<Charge>,
    /// Rule that decides the whole request, if any.
    pub ruling: Option<Ruling<'a>>,
    /// True if a refusal of the request is only recorded and not enforced (shadow mode).
    pub is_shadowed: bool,
    /// Entries whose values must not be shown (`sensitive: true`).
    pub hidden: Vec<Hidden>,
}

/// Result of the rule lookup for one descriptor.
#[derive(Debug)]
pub struct MatchedItem<'a> {
    /// Matching rule, if any.
    pub rule: Option<&'a Rule>,
    /// True if the request sent a limit in place of the rule's.
    pub is_overridden: bool,
    /// Treatment of the descriptor.
    pub kind: MatchedKind<'a>,
}

/// Treatment of a descriptor.
#[derive(Debug)]
pub enum MatchedKind<'a> {
    /// Not limited: no limit applies.
    Unmatched,
    /// Not limited, and the answer reports the descriptor as unlimited.
    Unlimited,
    /// Refused by a `deny` rule. Charges nothing.
    Denied,
    /// Limited. Takes one of the next charges per element; an element is the rule limit of the charge, if any.
    Limited(SmallVec<[Option<&'a RuleLimit>; 1]>),
}

/// A limit that applies to a descriptor, and the rule limit that it comes from, if any.
struct AppliedLimit<'a> {
    limit: Limit,
    from: Option<&'a RuleLimit>,
}

impl Rule {
    /// Returns the properties of the rule that answers and logs use.
    pub fn about(&self) -> &About {
        &self.about
    }

    /// Returns the rule's number in the rule set.
    pub fn id(&self) -> RuleId {
        self.about.id
    }

    /// Returns the rule's path in the form of the reference's metrics: `edge.plan_free.user`.
    pub fn path(&self) -> &Path {
        &self.about.path
    }

    /// Returns the limits; empty for an unlimited rule and for one that only denies, exempts or multiplies hits.
    pub fn limits(&self) -> &[RuleLimit] {
        &self.limits
    }

    /// Returns true if the rule is `unlimited`.
    pub fn is_unlimited(&self) -> bool {
        self.is_unlimited
    }

    /// Returns the effect of a refusal by this rule on the request.
    pub fn role(&self) -> Role {
        self.role
    }

    /// Returns the charging mode of the rule.
    pub fn charging(&self) -> Charging {
        self.charging
    }

    /// Returns true if an instance may refuse charges of this rule for up to 1 s after the store refused them.
    pub fn remembers_refusals(&self) -> bool {
        self.remembers_refusals
    }

    /// Returns the policies that answer in place of the store.
    pub fn policies(&self) -> StorePolicies {
        self.policies
    }

    /// Returns the decision for the whole request, if the rule makes one.
    pub fn action(&self) -> Option<Action> {
        self.action
    }

    /// Returns the factor for the hits of every limit of the request.
    pub fn request_cost(&self) -> NonZeroU32 {
        self.request_cost
    }

    /// Returns true if the rule can refuse a request: it denies, or it has limits and is not a shadow rule.
    fn is_enforcing(&self) -> bool {
        self.action == Some(Action::Deny) || (!self.limits.is_empty() && !self.role.is_shadow())
    }

    fn replaces_any(&self) -> bool {
        !self.replaces.is_empty() || self.limits.iter().any(|limit| !limit.replaces.is_empty())
    }
}

impl RuleSet {
    /// Creates the rule set of `rules` rules in `domains`. `files` are the names of the rule files, for messages.
    pub(crate) fn new(domains: HashMap<Box<str>, Domain>, files: Vec<Arc<str>>, rules: u32, modes: Modes) -> Self {
        Self { domains, files, rules, modes, generation: 0 }
    }

    /// Returns the domain names, sorted.
    pub fn domains(&self) -> Vec<&str> {
        let mut names: Vec<_> = self.domains.keys().map(AsRef::as_ref).collect();
        names.sort_unstable();
        names
    }

    /// Returns the stored name of a domain, and true if any of its rules can refuse a request. `None` without such a domain.
    pub fn domain(&self, name: &str) -> Option<(&str, bool)> {
        let (name, domain) = self.domains.get_key_value(name)?;
        Some((name, domain.is_enforcing))
    }

    /// Returns the length of the longest domain name, in bytes; 0 without domains.
    pub fn longest_domain(&self) -> usize {
        self.domains.keys().map(|name| name.len()).max().unwrap_or_default()
    }

    /// Returns true if refusals are recorded but not enforced in all domains (`SHADOW_MODE`).
    pub fn is_shadowed(&self) -> bool {
        self.modes.shadow
    }

    /// Returns the number of rules: tree places with limits, `unlimited`, `deny`, `exempt` or a `request_cost` above 1.
    pub fn len(&self) -> u32 {
        self.rules
    }

    /// Returns the load number of these rules, counted from 1.
    pub fn generation(&self) -> Generation {
        self.generation
    }

    /// Returns true if rules were loaded, even if the load had none.
    pub fn is_loaded(&self) -> bool {
        self.generation > 0
    }

    /// Returns the number of files or resources with these rules.
    pub fn files(&self) -> usize {
        self.files.len()
    }

    /// Returns true if there is no rule.
    pub fn is_empty(&self) -> bool {
        self.rules == 0
    }

    /// Returns every rule, sorted by domain and then in file order.
    pub fn rules(&self) -> Vec<&Rule> {
        let mut rules = Vec::new();
        for name in self.domains() {
            if let Some(domain) = self.domains.get(name) {
                domain.root.collect_rules(&mut rules);
            }
        }
        rules
    }

    /// Returns a domain and a descriptor under the smallest enforced limit that can be tried by hand, if any.
    pub fn example(&self) -> Option<Example<'_>> {
        if self.modes.shadow {
            return None;
        }
        let examples = self.domains.iter().filter_map(|(name, domain)| {
            let mut entries = Vec::new();
            let mut best = None;
            domain.root.smallest_limit(&domain.root, &domain.normalizers, &mut entries, &mut best);
            best.map(|(limit, entries)| Example { domain: name, entries, limit })
        });
        examples.min_by(|one, other| (one.limit, one.domain).cmp(&(other.limit, other.domain)))
    }

    /// Finds the charges of each descriptor of `request`. Pure. The cost is linear in the bytes of the request.
    pub fn find(&self, request: &Request) -> Matched<'_> {
        let Some((name, domain)) = self.domains.get_key_value(request.domain()) else { return self.unmatched(request) };
        let mut matched = self.nothing(request);
        matched.domain = Some(name);
        let places = domain.places(request.descriptors());
        if domain.normalizers.has_sensitive() {
            matched.hidden = hidden(request, &domain.normalizers);
        }
        matched.ruling = ruling(&places);
        if matched.ruling.is_some() {
            matched.items.extend(places.iter().map(undecided));
            return matched;
        }
        let mut replacements = Replacements::default();
        replacements.add(request.descriptors(), &places);
        self.charge(&mut matched, domain, request, &places, &replacements.replaced(), request_cost(&places));
        matched
    }

    /// Returns an empty result for `request`.
    fn nothing(&self, request: &Request) -> Matched<'_> {
        Matched {
            domain: None,
            items: Vec::with_capacity(request.descriptors().len()),
            charges: Vec::new(),
            ruling: None,
            is_shadowed: self.modes.shadow,
            hidden: Vec::new(),
        }
    }

    /// Returns the result for a domain that no rule file has.
    fn unmatched(&self, request: &Request) -> Matched<'_> {
        let mut matched = self.nothing(request);
        let unmatched = || MatchedItem { rule: None, is_overridden: false, kind: MatchedKind::Unmatched };
        matched.items.extend(request.descriptors().iter().map(|_| unmatched()));
        matched
    }

    /// Adds the items of `request` and their charges. Multiplies their hits by `cost`. Leaves out the limits whose names
    /// are in `replaced`.
    fn charge<'a>(
        &'a self,
        matched: &mut Matched<'a>,
        domain: &'a Domain,
        request: &Request,
        places: &[tree::TreeMatch<'a>],
        replaced: &HashSet<&str>,
        cost: u64,
    ) {
        matched.charges.reserve(places.len());
        for (index, place) in places.iter().enumerate() {
            let descriptor = &request.descriptors()[index];
            let (limits, role) = self.limits(descriptor, place.rule, replaced);
            let charging = place.rule.map_or(domain.charging, |rule| rule.charging);
            let policies = place.rule.map_or(domain.policies, |rule| rule.policies);
            let remembers_refusals = place.rule.is_none_or(|rule| rule.remembers_refusals);
            let hits = request.hits(descriptor).times(cost);
            matched.charges.extend(limits.iter().map(|AppliedLimit { limit, from }| Charge {
                key: place.counter_key(request.domain(), domain.colocation, descriptor, limit),
                limit: *limit,
                hits: from.map_or(hits, |from| hits.times(from.cost.get().into())),
                descriptor: index,
                role,
                charging,
                policies,
                remembers_refusals,
            }));
            let kind = if !limits.is_empty() {
                MatchedKind::Limited(limits.into_iter().map(|limit| limit.from).collect())
            } else if descriptor.limit.is_none() && place.rule.is_some_and(Rule::is_unlimited) {
                MatchedKind::Unlimited
            } else {
                MatchedKind::Unmatched
            };
            matched.items.push(MatchedItem { rule: place.rule, is_overridden: descriptor.limit.is_some(), kind });
        }
    }

    /// Returns the role of `rule` under the process modes. `QUOTA_MODE` does not turn a shadow rule into a quota.
    fn role(&self, rule: &Rule) -> Role {
        let is_shadow = rule.role.is_shadow();
        Role::of(is_shadow, rule.role.is_quota() || (self.modes.quota && !is_shadow))
    }

    /// Returns the limits that apply to a descriptor, and their role.
    fn limits<'a>(
        &self,
        descriptor: &Descriptor,
        rule: Option<&'a Rule>,
        replaced: &HashSet<&str>,
    ) -> (SmallVec<[AppliedLimit<'a>; 1]>, Role) {
        if let Some(sent) = descriptor.limit {
            let first = rule.and_then(|rule| rule.limits.first());
            let limit = Limit::of_override(first.map(|first| first.limit), sent);
            return (SmallVec::from_buf([AppliedLimit { limit, from: first }]), Role::of(false, self.modes.quota));
        }
        let Some(rule) = rule else { return (SmallVec::new(), Role::default()) };
        let is_replaced = |limit: &RuleLimit| limit.name.as_ref().is_some_and(|name| replaced.contains(name.as_ref()));
        let limits = rule.limits.iter().filter(|limit| !is_replaced(limit));
        let role = self.role(rule);
        (limits.map(|limit| AppliedLimit { limit: limit.limit, from: Some(limit) }).collect(), role)
    }
}

impl Domain {
    /// Finds the rule of each descriptor.
    fn places(&self, descriptors: &[Descriptor]) -> Vec<tree::TreeMatch<'_>> {
        let find = |descriptor: &Descriptor| {
            let found = self.root.find(&self.normalizers, descriptor);
            // A limit that the request sends is counted even if no rule matches.
            if found.rule.is_none() && descriptor.limit.is_some() {
                found.unruled(&self.normalizers, descriptor)
            } else {
                found
            }
        };
        descriptors.iter().map(find).collect()
    }
}

/// Returns the entries with sensitive values, each with the digest to show instead.
fn hidden(request: &Request, normalizers: &Normalizers) -> Vec<Hidden> {
    let mut hidden = Vec::new();
    for (index, descriptor) in request.descriptors().iter().enumerate() {
        for (number, entry) in descriptor.entries.iter().enumerate() {
            if let Some(digest) = normalizers.digest(entry) {
                hidden.push(Hidden { descriptor: index, entry: number, digest });
            }
        }
    }
    hidden
}

/// Returns the first rule that denies the request, else the first that exempts it.
fn ruling<'a>(places: &[tree::TreeMatch<'a>]) -> Option<Ruling<'a>> {
    ruling_of(first(places, Action::Deny), || first(places, Action::Exempt))
}

fn first<'a>(places: &[tree::TreeMatch<'a>], wanted: Action) -> Option<&'a Rule> {
    places.iter().filter_map(|place| place.rule).find(|rule| rule.action == Some(wanted))
}

/// Returns the ruling of `denied`, else that of `exempt`.
fn ruling_of<'a>(denied: Option<&'a Rule>, exempt: impl FnOnce() -> Option<&'a Rule>) -> Option<Ruling<'a>> {
    let denied = denied.map(|rule| Ruling { is_denied: true, rule: &rule.about });
    denied.or_else(|| exempt().map(|rule| Ruling { is_denied: false, rule: &rule.about }))
}

/// Returns the factor for the hits of every limit of the request. Each matched rule multiplies once.
fn request_cost(places: &[tree::TreeMatch<'_>]) -> u64 {
    let mut costly: SmallVec<[(RuleId, u64); 4]> = costs(places).collect();
    costly.sort_unstable();
    costly.dedup();
    product(costly.iter().map(|(_, cost)| *cost))
}

/// Returns the matched rules with a request cost above 1, and their costs.
fn costs(places: &[tree::TreeMatch<'_>]) -> impl Iterator<Item = (RuleId, u64)> {
    let rules = places.iter().filter_map(|place| place.rule).filter(|rule| rule.request_cost.get() > 1);
    rules.map(|rule| (rule.id(), rule.request_cost.get().into()))
}

fn product(costs: impl Iterator<Item = u64>) -> u64 {
    costs.fold(1, |product, cost| product.saturating_mul(cost).min(Hits::MOST))
}

/// Returns the item of a descriptor whose request is decided before anything is charged.
fn undecided<'a>(place: &tree::TreeMatch<'a>) -> MatchedItem<'a> {
    let is_denied = place.rule.is_some_and(|rule| rule.action == Some(Action::Deny));
    let kind = if is_denied { MatchedKind::Denied } else { MatchedKind::Unmatched };
    MatchedItem { rule: place.rule, is_overridden: false, kind }
}
