//! The rules: what is limited, found without asking anybody.

use std::num::NonZeroU32;
use std::sync::Arc;

use foldhash::{HashMap, HashSet};
use smallvec::SmallVec;

use crate::algorithm::{Charge, Limit};
use crate::model::{
    About, Charging, Colocation, Delivery, Descriptor, Hidden, Hits, Path, Request, Role, RuleId, Ruling, StorePolicies,
};

mod compile;
pub mod document;
mod explain;
mod list;
pub mod live;
pub mod problem;
mod reading;
mod replacement;
mod survey;
mod tree;
mod yaml;

pub use compile::{File, InvalidRules, Loaded, Options, load};
pub use explain::{Explanation, explain};
pub use reading::KeySecret;
use reading::Readings;
pub use survey::Survey;
use tree::Node;

/// All rules in force, immutable.
#[derive(Debug, Default)]
pub struct RuleSet {
    domains: HashMap<Box<str>, Domain>,
    files: Vec<Arc<str>>,
    rules: u32,
    quota_mode: bool,
    shadow_mode: bool,
    generation: u64,
}

/// The rules of one domain.
#[derive(Debug)]
struct Domain {
    charging: Charging,
    policies: StorePolicies,
    colocation: Colocation,
    readings: Readings,
    root: Node,
    /// Whether any rule can refuse a request.
    is_enforcing: bool,
}

/// What the configuration says about one place in the descriptor tree.
#[derive(Debug)]
pub struct Rule {
    about: About,
    limits: Vec<RuleLimit>,
    is_unlimited: bool,
    /// Names of the limits that an unlimited rule replaces; a limited one keeps them by its limits.
    replaces: Vec<Arc<str>>,
    role: Role,
    charging: Charging,
    policies: StorePolicies,
    remembers_refusals: bool,
    /// What it decides of the whole request before anything is charged, if it does.
    decides: Option<Decides>,
    /// What the hits of every limit of the request are multiplied by.
    request_cost: NonZeroU32,
}

/// What a rule decides of a whole request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decides {
    /// It is refused.
    Deny,
    /// It passes, and charges nothing.
    Exempt,
}

/// One limit of a rule.
#[derive(Clone, Debug)]
pub struct RuleLimit {
    /// The quota and how it is counted.
    pub limit: Limit,
    /// What it is called in answers and by other limits.
    pub name: Option<Arc<str>>,
    /// Names of the limits it takes the place of.
    pub replaces: Vec<Arc<str>>,
    /// What a hit takes from its counter.
    pub cost: NonZeroU32,
    /// Who makes a request wait that comes too early.
    pub delivery: Delivery,
    /// Of how much used, in percent, the caller is warned.
    pub warn_at: Option<u8>,
}

/// A descriptor that a rule limits.
#[derive(Clone, Debug)]
pub struct Example<'a> {
    /// Its domain.
    pub domain: &'a str,
    /// Keys and values.
    pub entries: Vec<(String, String)>,
    /// How many hits in a row it admits.
    pub limit: u32,
}

/// What was found for a request.
#[derive(Debug)]
pub struct Matched<'a> {
    /// The domain; none where no rule file has it.
    pub domain: Option<&'a str>,
    /// One item per descriptor, in order.
    pub items: Vec<MatchedItem<'a>>,
    /// The charges of all items, in order; none where a rule decides the whole request.
    pub charges: Vec<Charge>,
    /// The rule that decides the whole request, if one does.
    pub ruling: Option<Ruling<'a>>,
    /// Whether a refusal of the request is only watched.
    pub is_shadowed: bool,
    /// The entries whose values are shown nowhere.
    pub hidden: Vec<Hidden>,
}

/// What was found for one descriptor.
#[derive(Debug)]
pub struct MatchedItem<'a> {
    /// The rule, if there is one.
    pub rule: Option<&'a Rule>,
    /// Whether the request sent a limit in place of the rule's.
    pub is_overridden: bool,
    /// What it asks for.
    pub kind: MatchedKind<'a>,
}

/// What a descriptor is to be asked.
#[derive(Debug)]
pub enum MatchedKind<'a> {
    /// Nothing.
    Unmatched,
    /// Nothing, and the caller is told that it is free.
    Unlimited,
    /// Nothing: it refuses the request.
    Denied,
    /// The next charges: one for each of these, which is the limit of the rule it comes from, if it comes from one.
    Limited(SmallVec<[Option<&'a RuleLimit>; 1]>),
}

/// A limit that holds for a descriptor, and the one of the rule that it comes from.
struct Holding<'a> {
    limit: Limit,
    from: Option<&'a RuleLimit>,
}

impl Rule {
    /// What answers and records say of it.
    pub fn about(&self) -> &About {
        &self.about
    }

    /// Its number in the rule set.
    pub fn id(&self) -> RuleId {
        self.about.id
    }

    /// Where it stands, as the reference names it in metrics: `edge.plan_free.user`.
    pub fn path(&self) -> &Path {
        &self.about.path
    }

    /// Its limits; none when it is unlimited.
    pub fn limits(&self) -> &[RuleLimit] {
        &self.limits
    }

    /// Whether it frees its descriptor.
    pub fn is_unlimited(&self) -> bool {
        self.is_unlimited
    }

    /// What its refusal means for the request.
    pub fn role(&self) -> Role {
        self.role
    }

    /// How it is charged.
    pub fn charging(&self) -> Charging {
        self.charging
    }

    /// Returns true where an instance may refuse charges of this rule for up to a second after the store refused them.
    pub fn remembers_refusals(&self) -> bool {
        self.remembers_refusals
    }

    /// Returns the policies that answer in place of the store.
    pub fn policies(&self) -> StorePolicies {
        self.policies
    }

    /// What it decides of the whole request, if it does.
    pub fn decides(&self) -> Option<Decides> {
        self.decides
    }

    /// What the hits of every limit of the request are multiplied by.
    pub fn request_cost(&self) -> NonZeroU32 {
        self.request_cost
    }

    /// Whether it can refuse a request: it denies, or has limits and more to do than watch.
    fn is_enforcing(&self) -> bool {
        self.decides == Some(Decides::Deny) || (!self.limits.is_empty() && !self.role.is_shadow())
    }

    fn replaces(&self) -> impl Iterator<Item = &Arc<str>> {
        self.replaces.iter().chain(self.limits.iter().flat_map(|limit| &limit.replaces))
    }
}

impl RuleSet {
    /// The names of the domains, sorted.
    pub fn domains(&self) -> Vec<&str> {
        let mut names: Vec<_> = self.domains.keys().map(AsRef::as_ref).collect();
        names.sort_unstable();
        names
    }

    /// The name of a domain that has rules, and whether any of them can refuse a request.
    pub fn domain(&self, name: &str) -> Option<(&str, bool)> {
        let (name, domain) = self.domains.get_key_value(name)?;
        Some((name, domain.is_enforcing))
    }

    /// The bytes of the longest name of a domain; 0 without domains.
    pub fn longest_domain(&self) -> usize {
        self.domains.keys().map(|name| name.len()).max().unwrap_or_default()
    }

    /// Whether refusals are only watched, everywhere.
    pub fn is_shadowed(&self) -> bool {
        self.shadow_mode
    }

    /// How many rules there are: places in the tree with limits of their own.
    pub fn len(&self) -> u32 {
        self.rules
    }

    /// Which load of the rules this is, counted from 1.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Whether there is no rule at all.
    pub fn is_empty(&self) -> bool {
        self.rules == 0
    }

    /// Every rule, by domain and then in the order of the files.
    pub fn rules(&self) -> Vec<&Rule> {
        let mut rules = Vec::new();
        for name in self.domains() {
            if let Some(domain) = self.domains.get(name) {
                domain.root.collect_rules(&mut rules);
            }
        }
        rules
    }

    /// A domain and a descriptor that meets an enforced limit, the smallest there is that can be tried by hand, if any.
    pub fn example(&self) -> Option<Example<'_>> {
        if self.shadow_mode {
            return None;
        }
        let examples = self.domains.iter().filter_map(|(name, domain)| {
            let mut entries = Vec::new();
            let mut best = None;
            domain.root.smallest_limit(&domain.root, &domain.readings, &mut entries, &mut best);
            best.map(|(limit, entries)| Example { domain: name, entries, limit })
        });
        examples.min_by(|one, other| (one.limit, one.domain).cmp(&(other.limit, other.domain)))
    }

    /// Finds what each descriptor of a request is to be charged. Pure; the cost is that of the request's bytes.
    pub fn find(&self, request: &Request) -> Matched<'_> {
        let Some((name, domain)) = self.domains.get_key_value(request.domain()) else { return self.unmatched(request) };
        let mut matched = self.nothing(request);
        matched.domain = Some(name);
        let places = domain.places(request.descriptors());
        if domain.readings.has_sensitive() {
            matched.hidden = hidden(request, &domain.readings);
        }
        matched.ruling = ruling(&places);
        if matched.ruling.is_some() {
            matched.items.extend(places.iter().map(undecided));
            return matched;
        }
        let replaced: HashSet<&str> = replaced_names(request.descriptors(), &places).collect();
        self.charge(&mut matched, domain, request, &places, &replaced, request_cost(&places));
        matched
    }

    /// Nothing found yet.
    fn nothing(&self, request: &Request) -> Matched<'_> {
        Matched {
            domain: None,
            items: Vec::with_capacity(request.descriptors().len()),
            charges: Vec::new(),
            ruling: None,
            is_shadowed: self.shadow_mode,
            hidden: Vec::new(),
        }
    }

    /// What is found for a domain that no rule file has.
    fn unmatched(&self, request: &Request) -> Matched<'_> {
        let mut matched = self.nothing(request);
        let unmatched = || MatchedItem { rule: None, is_overridden: false, kind: MatchedKind::Unmatched };
        matched.items.extend(request.descriptors().iter().map(|_| unmatched()));
        matched
    }

    /// Adds the items of a request and their charges, whose hits cost `cost` times as much, without the limits that are
    /// `replaced`.
    fn charge<'a>(
        &'a self,
        matched: &mut Matched<'a>,
        domain: &'a Domain,
        request: &Request,
        places: &[tree::Found<'a>],
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
            matched.charges.extend(limits.iter().map(|Holding { limit, from }| Charge {
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

    /// What a rule's refusal means under the modes of the process: a shadow only watches, so it is no quota by them.
    fn role(&self, rule: &Rule) -> Role {
        let is_shadow = rule.role.is_shadow();
        Role::of(is_shadow, rule.role.is_quota() || (self.quota_mode && !is_shadow))
    }

    /// The limits that hold for a descriptor, and what their refusal means.
    fn limits<'a>(
        &self,
        descriptor: &Descriptor,
        rule: Option<&'a Rule>,
        replaced: &HashSet<&str>,
    ) -> (SmallVec<[Holding<'a>; 1]>, Role) {
        if let Some(sent) = descriptor.limit {
            let first = rule.and_then(|rule| rule.limits.first());
            let limit = Limit::of_override(first.map(|first| first.limit), sent);
            return (SmallVec::from_buf([Holding { limit, from: first }]), Role::of(false, self.quota_mode));
        }
        let Some(rule) = rule else { return (SmallVec::new(), Role::default()) };
        let is_replaced = |limit: &RuleLimit| limit.name.as_ref().is_some_and(|name| replaced.contains(name.as_ref()));
        let limits = rule.limits.iter().filter(|limit| !is_replaced(limit));
        let role = self.role(rule);
        (limits.map(|limit| Holding { limit: limit.limit, from: Some(limit) }).collect(), role)
    }
}

impl Domain {
    /// Finds the rule of each descriptor.
    fn places(&self, descriptors: &[Descriptor]) -> Vec<tree::Found<'_>> {
        let find = |descriptor: &Descriptor| {
            let found = self.root.find(&self.readings, descriptor);
            // A limit that the request sends is counted where no rule answers too.
            if found.rule.is_none() && descriptor.limit.is_some() {
                found.unruled(&self.readings, descriptor)
            } else {
                found
            }
        };
        descriptors.iter().map(find).collect()
    }
}

/// The names that some matched rule replaces. Overridden descriptors neither replace nor are replaced.
fn replaced_names<'a>(descriptors: &[Descriptor], places: &[tree::Found<'a>]) -> impl Iterator<Item = &'a str> {
    let rules = descriptors.iter().zip(places).filter(|(descriptor, _)| descriptor.limit.is_none());
    rules.filter_map(|(_, place)| place.rule).flat_map(Rule::replaces).map(AsRef::as_ref)
}

/// The values that are shown nowhere, and what is shown in their place.
fn hidden(request: &Request, readings: &Readings) -> Vec<Hidden> {
    let mut hidden = Vec::new();
    for (index, descriptor) in request.descriptors().iter().enumerate() {
        for (number, entry) in descriptor.entries.iter().enumerate() {
            if let Some(digest) = readings.digest(entry) {
                hidden.push(Hidden { descriptor: index, entry: number, digest });
            }
        }
    }
    hidden
}

/// The first rule that denies the request, else the first that exempts it.
fn ruling<'a>(places: &[tree::Found<'a>]) -> Option<Ruling<'a>> {
    ruling_of(first(places, Decides::Deny), || first(places, Decides::Exempt))
}

fn first<'a>(places: &[tree::Found<'a>], wanted: Decides) -> Option<&'a Rule> {
    places.iter().filter_map(|place| place.rule).find(|rule| rule.decides == Some(wanted))
}

/// The ruling of the first rule that denies, else of the first that exempts.
fn ruling_of<'a>(denied: Option<&'a Rule>, exempt: impl FnOnce() -> Option<&'a Rule>) -> Option<Ruling<'a>> {
    let denied = denied.map(|rule| Ruling { is_denied: true, rule: &rule.about });
    denied.or_else(|| exempt().map(|rule| Ruling { is_denied: false, rule: &rule.about }))
}

/// What the hits of every limit of the request are multiplied by: each rule of it multiplies once.
fn request_cost(places: &[tree::Found<'_>]) -> u64 {
    let mut costly: SmallVec<[(RuleId, u64); 4]> = costs(places).collect();
    costly.sort_unstable();
    costly.dedup();
    product(costly.iter().map(|(_, cost)| *cost))
}

/// The rules that multiply the hits of the request, and by what.
fn costs(places: &[tree::Found<'_>]) -> impl Iterator<Item = (RuleId, u64)> {
    let rules = places.iter().filter_map(|place| place.rule).filter(|rule| rule.request_cost.get() > 1);
    rules.map(|rule| (rule.id(), rule.request_cost.get().into()))
}

fn product(costs: impl Iterator<Item = u64>) -> u64 {
    costs.fold(1, |product, cost| product.saturating_mul(cost).min(Hits::MOST))
}

/// What is said of a descriptor when its request is decided before anything is charged.
fn undecided<'a>(place: &tree::Found<'a>) -> MatchedItem<'a> {
    let is_denied = place.rule.is_some_and(|rule| rule.decides == Some(Decides::Deny));
    let kind = if is_denied { MatchedKind::Denied } else { MatchedKind::Unmatched };
    MatchedItem { rule: place.rule, is_overridden: false, kind }
}
