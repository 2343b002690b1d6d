//! The rules: what is limited, found without asking anybody.

use std::fmt;
use std::sync::Arc;

use foldhash::{HashMap, HashSet};
use smallvec::SmallVec;

use crate::algorithm::{Charge, Limit};
use crate::model::{Charging, Colocation, Descriptor, FailurePolicy, Metadata, Request, Role, RuleId};

mod compile;
pub mod document;
mod explain;
pub mod problem;
mod replacement;
mod tree;
mod yaml;

pub use compile::{File, InvalidRules, Loaded, Options, load};
pub use explain::{Explanation, explain};
use tree::Node;

/// All rules in force, immutable.
#[derive(Debug, Default)]
pub struct RuleSet {
    domains: HashMap<Box<str>, Domain>,
    files: Vec<Arc<str>>,
    rules: u32,
    quota_mode: bool,
    shadow_mode: bool,
}

/// The rules of one domain.
#[derive(Debug)]
struct Domain {
    charging: Charging,
    on_store_failure: FailurePolicy,
    colocation: Colocation,
    root: Node,
}

/// What the configuration says about one place in the descriptor tree.
#[derive(Debug)]
pub struct Rule {
    id: RuleId,
    path: Arc<Path>,
    limits: Vec<RuleLimit>,
    is_unlimited: bool,
    /// Names of the limits that an unlimited rule replaces; a limited one keeps them by its limits.
    replaces: Vec<Arc<str>>,
    role: Role,
    charging: Charging,
    on_store_failure: FailurePolicy,
    metadata: Option<Arc<Metadata>>,
}

/// The way from a domain to a rule, one word a level. Levels are shared, so that long keys above many rules are held once.
#[derive(Debug)]
pub struct Path {
    above: Option<Arc<Path>>,
    word: String,
}

/// `edge.plan_free.user`
impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(above) = &self.above {
            write!(f, "{above}.")?;
        }
        f.write_str(&self.word)
    }
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
    /// One item per descriptor, in order.
    pub items: Vec<MatchedItem<'a>>,
    /// The charges of all items, in order.
    pub charges: Vec<Charge>,
    /// Whether a refusal of the request is only watched.
    pub is_shadowed: bool,
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
    /// The next charges: one for each name, most of which are `None`.
    Limited(SmallVec<[Option<&'a Arc<str>>; 1]>),
}

/// A limit that holds for a descriptor, and its name.
struct Named<'a> {
    limit: Limit,
    name: Option<&'a Arc<str>>,
}

impl Rule {
    /// Its number in the rule set.
    pub fn id(&self) -> RuleId {
        self.id
    }

    /// Where it stands, as the reference names it in metrics: `edge.plan_free.user`.
    pub fn path(&self) -> &Path {
        &self.path
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

    /// What is answered while the store cannot be asked.
    pub fn on_store_failure(&self) -> FailurePolicy {
        self.on_store_failure
    }

    /// Its metadata for the answer.
    pub fn metadata(&self) -> Option<&Arc<Metadata>> {
        self.metadata.as_ref()
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

    /// How many rules there are: places in the tree with limits of their own.
    pub fn len(&self) -> u32 {
        self.rules
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
            domain.root.smallest_limit(&domain.root, &mut entries, &mut best);
            best.map(|(limit, entries)| Example { domain: name, entries, limit })
        });
        examples.min_by(|one, other| (one.limit, one.domain).cmp(&(other.limit, other.domain)))
    }

    /// Finds what each descriptor of a request is to be charged. Pure; the cost is that of the request's bytes.
    pub fn find<'a>(&'a self, request: &'a Request) -> Matched<'a> {
        let is_shadowed = self.shadow_mode;
        let Some(domain) = self.domains.get(request.domain()) else {
            let unmatched = || MatchedItem { rule: None, is_overridden: false, kind: MatchedKind::Unmatched };
            let items = request.descriptors().iter().map(|_| unmatched()).collect();
            return Matched { items, charges: Vec::new(), is_shadowed };
        };
        let places: Vec<_> = request.descriptors().iter().map(|descriptor| domain.root.find(descriptor)).collect();
        let replaced = replaced_names(request, &places);
        let mut matched =
            Matched { items: Vec::with_capacity(places.len()), charges: Vec::with_capacity(places.len()), is_shadowed };
        for (index, place) in places.iter().enumerate() {
            let descriptor = &request.descriptors()[index];
            let (limits, role) = self.limits(descriptor, place.rule, &replaced);
            let charging = place.rule.map_or(domain.charging, |rule| rule.charging);
            let on_store_failure = place.rule.map_or(domain.on_store_failure, |rule| rule.on_store_failure);
            matched.charges.extend(limits.iter().map(|Named { limit, .. }| Charge {
                key: place.counter_key(request.domain(), domain.colocation, descriptor, limit),
                limit: *limit,
                hits: request.hits(descriptor),
                descriptor: index,
                role,
                charging,
                on_store_failure,
            }));
            let kind = if !limits.is_empty() {
                MatchedKind::Limited(limits.into_iter().map(|limit| limit.name).collect())
            } else if descriptor.limit.is_none() && place.rule.is_some_and(Rule::is_unlimited) {
                MatchedKind::Unlimited
            } else {
                MatchedKind::Unmatched
            };
            matched.items.push(MatchedItem { rule: place.rule, is_overridden: descriptor.limit.is_some(), kind });
        }
        matched
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
    ) -> (SmallVec<[Named<'a>; 1]>, Role) {
        if let Some(sent) = descriptor.limit {
            let first = rule.and_then(|rule| rule.limits.first()).map(|first| first.limit);
            let limit = Limit::of_override(first, sent);
            return (SmallVec::from_buf([Named { limit, name: None }]), Role::of(false, self.quota_mode));
        }
        let Some(rule) = rule else { return (SmallVec::new(), Role::default()) };
        let is_replaced = |limit: &RuleLimit| limit.name.as_ref().is_some_and(|name| replaced.contains(name.as_ref()));
        let limits = rule.limits.iter().filter(|limit| !is_replaced(limit));
        let role = self.role(rule);
        (limits.map(|limit| Named { limit: limit.limit, name: limit.name.as_ref() }).collect(), role)
    }
}

/// The names that some matched rule replaces. Overridden descriptors neither replace nor are replaced.
fn replaced_names<'a>(request: &Request, places: &[tree::Found<'a>]) -> HashSet<&'a str> {
    let rules = request.descriptors().iter().zip(places).filter(|(descriptor, _)| descriptor.limit.is_none());
    rules.filter_map(|(_, place)| place.rule).flat_map(Rule::replaces).map(AsRef::as_ref).collect()
}
