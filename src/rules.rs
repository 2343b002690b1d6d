//! The rules in force, and the lookup of the rules that apply to a request. The lookup is pure and does no I/O.

use std::num::NonZeroU32;
use std::sync::Arc;

use foldhash::HashMap;
use smallvec::SmallVec;

use crate::algorithm::{Charge, Limit};
use crate::model::{
    About, Charging, Colocation, Delivery, Hidden, LeaseTerms, Leasing, Micros, Path, Request, Role, RuleId, Ruling,
    Series, Shown, StorePolicies,
};
use crate::normalize::Normalizers;

pub(crate) mod changes;
mod charges;
mod compared;
mod explain;
mod known_good;
pub(crate) mod list;
pub mod live;
mod nearest;
pub(crate) mod places;
pub(crate) mod replacements;
pub mod requests;
pub(crate) mod spelling;
pub(crate) mod tree;
mod trial;

use changes::Changes;
pub use compared::ValueUse;
pub use explain::{Explanation, explain};
pub use nearest::{KeyPaths, Nearest};
use places::{OverlayTree, TreeReplacements};
use requests::HttpRequests;
use tree::TreeLevel;
use trial::Trial;

/// All rules in force. Immutable.
#[derive(Debug, Default)]
pub struct RuleSet {
    domains: HashMap<Box<str>, Domain>,
    /// Names of the files: those of the source, and then those of overlays.
    files: Vec<Arc<str>>,
    /// Number of files of the source.
    source_files: usize,
    /// Digest of the documents.
    digest: Box<str>,
    rules: u32,
    modes: Modes,
    generation: Generation,
    /// True if these rules are those of overlays alone, because the source has not offered any yet.
    pub(crate) awaits_source: bool,
}

/// Maximum number of charges of a request that is decided by its limits: 1,000, as many as a store charges in one atomic step.
pub const MOST_CHARGES: usize = 1_000;

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
    pub(crate) lease: Leasing,
    pub(crate) colocation: Colocation,
    pub(crate) normalizers: Normalizers,
    /// Rules of the source.
    pub(crate) root: TreeLevel,
    /// Rules of overlays; empty for most domains.
    pub(crate) overlays: Vec<OverlayTree>,
    /// Entries of callers whose refusals are mistakes, as a tree of one level.
    pub(crate) known_good: Option<Box<TreeLevel>>,
    /// Reading of plain HTTP requests; `None` if the domain takes none.
    pub(crate) requests: Option<Box<HttpRequests>>,
    /// For each key of which a value that is no address refuses the request: the key, and the rule that denies it.
    pub(crate) not_addresses: Vec<(Box<[u8]>, Rule)>,
    /// True if any rule of the domain can refuse a request.
    pub(crate) is_enforcing: bool,
    /// Settings that overlays have set for the whole domain.
    pub(crate) changes: Option<Box<Changes>>,
}

/// One rule: the configuration of one place in the descriptor tree.
#[derive(Debug)]
pub struct Rule {
    pub(crate) about: About,
    /// Rules with equal limits refer to the same ones, so that these stay in the processor's cache.
    pub(crate) limits: Arc<[RuleLimit]>,
    pub(crate) is_unlimited: bool,
    /// Names of the limits that an unlimited rule replaces. A limited rule keeps these names in its limits.
    pub(crate) replaces: Vec<Arc<str>>,
    pub(crate) role: Role,
    pub(crate) charging: Charging,
    pub(crate) policies: StorePolicies,
    pub(crate) remembers_refusals: bool,
    /// Terms of leases for limits that requests send. Those of the rule's own limits are in the limits.
    pub(crate) lease: Leasing,
    /// Decision for the whole request before anything is charged; `None`: the rule makes none.
    pub(crate) action: Option<Action>,
    /// Factor for the hits of every limit of the request.
    pub(crate) request_cost: NonZeroU32,
    /// Effect on the limits of the source.
    pub(crate) source_limits: SourceLimits,
    /// Index of its file.
    pub(crate) file: u32,
    pub(crate) line: u32,
    /// Settings that overlays have set.
    pub(crate) changes: Option<Box<Changes>>,
}

/// Effect of a rule on the limits of the source for the same descriptor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum SourceLimits {
    /// They apply. So it is for every rule of the source itself.
    #[default]
    Apply,
    /// The rule of an overlay replaces them (`replace: true`).
    Replaced,
    /// The rule of an overlay replaces them and continues with their counters.
    TakenOver,
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
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
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
    /// True if its refusals are counted but not enforced (`shadow_mode` of the limit), whatever the role of its rule.
    pub is_shadow: bool,
    /// Terms of its leases, if it has any.
    pub lease: Option<LeaseTerms>,
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
    /// The longest time from a refusal until the rule admits a hit again.
    pub admits_again_within: Micros,
}

/// Result of the rule lookup for a request.
#[derive(Debug)]
pub struct Matched<'a> {
    /// Domain name; `None` if no rule file has the domain.
    pub domain: Option<&'a str>,
    /// One item per descriptor, in order.
    pub items: Vec<MatchedItem<'a>>,
    /// Charges of all items, in order; empty if a rule decides the whole request. More than [`MOST_CHARGES`] if the request is too large: then
    /// some descriptors have neither item nor charges.
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
    /// Limited. Takes one of the next charges per element.
    Limited(SmallVec<[ChargeOrigin<'a>; 1]>),
}

/// Origin of a charge.
#[derive(Clone, Copy, Debug)]
pub struct ChargeOrigin<'a> {
    /// Matching rule; `None` for a limit that the request sent without one.
    pub rule: Option<&'a Rule>,
    /// Limit of the rule, if any.
    pub limit: Option<&'a RuleLimit>,
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

    /// Returns a rule that denies values of `key` that are no address. `place`: the index of the file that says so, and the line.
    pub(crate) fn denying_others(id: RuleId, domain: &Arc<Path>, key: &[u8], place: (u32, u32)) -> Self {
        let path = Path::below(domain, &String::from_utf8_lossy(key), Some("not_an_address"), Shown::Pattern);
        let series = Series::Rule;
        Self {
            about: About { id, path: Arc::new(path), message: None, is_exposed: true, metadata: None, series },
            limits: Arc::default(),
            is_unlimited: false,
            replaces: Vec::new(),
            role: Role::Enforce,
            charging: Charging::Each,
            policies: StorePolicies::default(),
            remembers_refusals: true,
            lease: Leasing::Off,
            action: Some(Action::Deny),
            request_cost: NonZeroU32::MIN,
            source_limits: SourceLimits::Apply,
            file: place.0,
            line: place.1,
            changes: None,
        }
    }

    /// Returns true if the rule can refuse a request: it denies, or it has a limit that is not in shadow mode.
    fn is_enforcing(&self) -> bool {
        self.action == Some(Action::Deny)
            || (!self.role.is_shadow() && self.limits.iter().any(|limit| !limit.is_shadow))
    }

    fn replaces_any(&self) -> bool {
        !self.replaces.is_empty() || self.limits.iter().any(|limit| !limit.replaces.is_empty())
    }
}

impl RuleSet {
    /// Creates the rule set of `rules` rules in `domains`. `files` are the names of all files, for messages; those of the source
    /// are the first `source_files`. `digest` is that of the documents.
    pub(crate) fn new(
        domains: HashMap<Box<str>, Domain>,
        files: Vec<Arc<str>>,
        source_files: usize,
        digest: Box<str>,
        rules: u32,
        modes: Modes,
    ) -> Self {
        Self { domains, files, source_files, digest, rules, modes, generation: 0, awaits_source: false }
    }

    /// Returns the domain names, sorted.
    pub fn domains(&self) -> Vec<&str> {
        let mut names: Vec<_> = self.domains.keys().map(AsRef::as_ref).collect();
        names.sort_unstable();
        names
    }

    /// Returns true if the source has at least one domain. Domains of overlays alone do not count.
    pub fn has_domain_of_source(&self) -> bool {
        self.source_files > 0 && !self.awaits_source
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

    /// Returns true if the source has offered rules, even if it offered none.
    pub fn is_loaded(&self) -> bool {
        self.generation > 0 && !self.awaits_source
    }

    /// Returns true if requests of this domain can be decided: the source has offered rules, or an overlay has rules for the domain.
    pub fn can_decide(&self, domain: &str) -> bool {
        self.is_loaded() || self.domains.contains_key(domain)
    }

    /// Returns the number of files or resources with these rules, without overlays.
    pub fn files(&self) -> usize {
        self.source_files
    }

    /// Returns the names of the files or resources with these rules: those of the source, and those of overlays.
    pub fn sources(&self) -> (Vec<&str>, Vec<&str>) {
        let names = self.files.iter().map(|file| &**file);
        (names.clone().take(self.source_files).collect(), names.skip(self.source_files).collect())
    }

    /// Returns the digest of the documents with these rules and of their lists, in hexadecimal digits; empty without a load. Documents
    /// with the same content have the same digest at all instances.
    pub fn digest(&self) -> &str {
        &self.digest
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
                domain.overlays.iter().for_each(|overlay| overlay.root.collect_rules(&mut rules));
            }
        }
        rules
    }

    /// Returns a domain and a descriptor under the enforced limit that is easiest to try by hand, if any.
    pub fn example(&self) -> Option<Example<'_>> {
        if self.modes.shadow {
            return None;
        }
        // A limit of an overlay may refuse before the limit of an example does.
        let alone = self.domains.iter().filter(|(_, domain)| domain.overlays.is_empty());
        let examples = alone.filter_map(|(name, domain)| {
            let mut entries = Vec::new();
            let mut best = None;
            domain.root.easiest_trial(&domain.root, &domain.normalizers, &mut entries, &mut best);
            best.map(|(trial, entries)| (trial, &**name, entries))
        });
        let (trial, domain, entries) = examples.min()?;
        let Trial { limit, admits_again_within, .. } = trial;
        Some(Example { domain, entries, limit, admits_again_within })
    }

    /// Returns how plain HTTP requests of a domain are read. `None` if there is no such domain, or if it takes none.
    pub fn requests(&self, domain: &str) -> Option<&HttpRequests> {
        self.domains.get(domain)?.requests.as_deref()
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
        matched.ruling = places.ruling();
        if matched.ruling.is_some() {
            matched.items.extend(places.undecided());
            return matched;
        }
        let replacements = TreeReplacements::of(request.descriptors(), &places);
        self.charge(&mut matched, domain, request, &places, &replacements.replaced(), places.request_cost());
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
