//! Rule lookup for large requests in slices. A first pass collects the effects of each descriptor on the whole request.

use std::sync::OnceLock;

use foldhash::HashMap;

use super::places::{Replaced, TreeReplacements, product, ruling_of};
use super::{Action, Domain, Matched, Rule, RuleSet, hidden};
use crate::model::{Descriptor, Request, RuleId, Ruling};

/// Effects of the descriptors of a large request on each other. The rules bound its size, not the request.
#[derive(Debug)]
pub struct Survey<'a> {
    rules: &'a RuleSet,
    domain: Option<(&'a str, &'a Domain)>,
    denied: Option<&'a Rule>,
    exempt: Option<&'a Rule>,
    replacements: TreeReplacements<'a>,
    /// Names of the replaced limits, once all descriptors are added.
    replaced: OnceLock<Replaced<'a>>,
    costs: HashMap<RuleId, u64>,
}

impl RuleSet {
    /// Starts the survey of a request of `domain`.
    pub fn survey(&self, domain: &str) -> Survey<'_> {
        let domain = self.domains.get_key_value(domain).map(|(name, domain)| (&**name, domain));
        let (replacements, replaced, costs) = Default::default();
        Survey { rules: self, domain, denied: None, exempt: None, replacements, replaced, costs }
    }
}

impl<'a> Survey<'a> {
    /// Adds the next descriptors of the request. Add all of them before the first call of `find`.
    pub fn add(&mut self, descriptors: &[Descriptor]) {
        let Some((_, domain)) = self.domain else { return };
        let places = domain.places(descriptors);
        self.denied = self.denied.or_else(|| places.first(Action::Deny));
        self.exempt = self.exempt.or_else(|| places.first(Action::Exempt));
        self.replacements.add(descriptors, &places);
        self.costs.extend(places.costs());
    }

    /// Returns the rule set of this survey.
    pub fn rules(&self) -> &'a RuleSet {
        self.rules
    }

    /// Returns the ruling for the whole request, if a rule decides it.
    pub fn ruling(&self) -> Option<Ruling<'a>> {
        ruling_of(self.denied, || self.exempt)
    }

    /// Finds the charges of each descriptor of a slice. The results of all slices together equal the result of
    /// [`RuleSet::find`] for the whole request.
    pub fn find(&self, slice: &Request) -> Matched<'a> {
        let rules = self.rules;
        let Some((name, domain)) = self.domain else { return rules.unmatched(slice) };
        let mut matched = rules.nothing(slice);
        matched.domain = Some(name);
        let places = domain.places(slice.descriptors());
        if domain.normalizers.has_sensitive() {
            matched.hidden = hidden(slice, &domain.normalizers);
        }
        matched.ruling = self.ruling();
        if matched.ruling.is_some() {
            matched.items.extend(places.undecided());
            return matched;
        }
        let cost = product(self.costs.values().copied());
        let replaced = self.replaced.get_or_init(|| self.replacements.replaced());
        rules.charge(&mut matched, domain, slice, &places, replaced, cost);
        matched
    }
}
