//! Finding the rules of a large request slice by slice: what one descriptor means for all others is gathered first.

use foldhash::{HashMap, HashSet};

use super::{
    Decides, Domain, Matched, Rule, RuleSet, costs, first, hidden, product, replaced_names, ruling_of, undecided,
};
use crate::model::{Descriptor, Request, RuleId, Ruling};

/// What the descriptors of a large request mean for each other. Its size is bounded by the rules, whatever the request.
#[derive(Debug)]
pub struct Survey<'a> {
    rules: &'a RuleSet,
    domain: Option<(&'a str, &'a Domain)>,
    denied: Option<&'a Rule>,
    exempt: Option<&'a Rule>,
    replaced: HashSet<&'a str>,
    costs: HashMap<RuleId, u64>,
}

impl RuleSet {
    /// Begins the survey of a request of this domain.
    pub fn survey(&self, domain: &str) -> Survey<'_> {
        let domain = self.domains.get_key_value(domain).map(|(name, domain)| (&**name, domain));
        let (replaced, costs) = Default::default();
        Survey { rules: self, domain, denied: None, exempt: None, replaced, costs }
    }
}

impl<'a> Survey<'a> {
    /// Adds the next descriptors of the request. All of them must have been added before the first slice is found.
    pub fn add(&mut self, descriptors: &[Descriptor]) {
        let Some((_, domain)) = self.domain else { return };
        let places = domain.places(descriptors);
        self.denied = self.denied.or_else(|| first(&places, Decides::Deny));
        self.exempt = self.exempt.or_else(|| first(&places, Decides::Exempt));
        self.replaced.extend(replaced_names(descriptors, &places));
        self.costs.extend(costs(&places));
    }

    /// The rules that decide.
    pub fn rules(&self) -> &'a RuleSet {
        self.rules
    }

    /// The rule that decides the whole request, if one does.
    pub fn ruling(&self) -> Option<Ruling<'a>> {
        ruling_of(self.denied, || self.exempt)
    }

    /// Finds what each descriptor of a slice is to be charged: together, the slices of a request are what
    /// [`RuleSet::find`] finds for all of it.
    pub fn find(&self, slice: &Request) -> Matched<'a> {
        let rules = self.rules;
        let Some((name, domain)) = self.domain else { return rules.unmatched(slice) };
        let mut matched = rules.nothing(slice);
        matched.domain = Some(name);
        let places = domain.places(slice.descriptors());
        if domain.readings.has_sensitive() {
            matched.hidden = hidden(slice, &domain.readings);
        }
        matched.ruling = self.ruling();
        if matched.ruling.is_some() {
            matched.items.extend(places.iter().map(undecided));
            return matched;
        }
        let cost = product(self.costs.values().copied());
        rules.charge(&mut matched, domain, slice, &places, &self.replaced, cost);
        matched
    }
}
