//! Charges of the limits that apply to a request.

use foldhash::HashSet;
use smallvec::SmallVec;

use super::places::{Overlaid, Places, Replaced};
use super::tree::TreeMatch;
use super::{
    ChargeOrigin, Domain, MOST_CHARGES, Matched, MatchedItem, MatchedKind, Rule, RuleLimit, RuleSet, SourceLimits,
};
use crate::algorithm::{Charge, Limit};
use crate::model::{Charging, Descriptor, Hits, Request, Role};

/// A limit that applies to a descriptor, and the rule limit that it comes from, if any.
struct AppliedLimit<'a> {
    limit: Limit,
    from: Option<&'a RuleLimit>,
    role: Role,
    /// True if the limit itself, and not its whole rule, is in shadow mode.
    is_shadow: bool,
}

/// The limits that a tree has for a descriptor.
type AppliedLimits<'a> = SmallVec<[AppliedLimit<'a>; 1]>;

/// The descriptor for which charges are made.
struct Called<'a> {
    domain: &'a Domain,
    /// Domain of the request.
    name: &'a str,
    /// Index of the descriptor.
    index: usize,
    descriptor: &'a Descriptor,
    hits: Hits,
}

impl RuleSet {
    /// Adds the items of `request` and their charges. Multiplies their hits by `cost`. Leaves out the limits whose names
    /// are in `replaced`.
    pub(super) fn charge<'a>(
        &'a self,
        matched: &mut Matched<'a>,
        domain: &'a Domain,
        request: &Request,
        places: &Places<'a>,
        replaced: &Replaced<'_>,
        cost: u64,
    ) {
        matched.charges.reserve(places.source.len().min(MOST_CHARGES));
        let mut overlaid = places.overlaid.as_slice();
        for (index, place) in places.source.iter().enumerate() {
            if matched.charges.len() > MOST_CHARGES {
                break;
            }
            let descriptor = &request.descriptors()[index];
            let hits = request.hits(descriptor).times(cost);
            let called = Called { domain, name: request.domain(), index, descriptor, hits };
            let mut rule = place.rule;
            let mut is_unlimited = !place.is_replaced && rule.is_some_and(Rule::is_unlimited);
            let mut origins = SmallVec::new();
            if !place.is_replaced {
                let limits = self.limits(descriptor, rule, &replaced.source);
                called.charge(place, "", limits, matched, &mut origins);
            }
            while let Some((next, rest)) = overlaid.split_first().filter(|(next, _)| next.descriptor == index) {
                overlaid = rest;
                let none = HashSet::default();
                let limits = self.overlay_limits(descriptor, next, replaced.overlays.get(next.tree).unwrap_or(&none));
                called.charge(&next.found, next.mark, limits, matched, &mut origins);
                rule = rule.filter(|_| !place.is_replaced).or(next.found.rule);
                is_unlimited |= next.found.rule.is_some_and(Rule::is_unlimited);
            }
            let kind = if !origins.is_empty() {
                MatchedKind::Limited(origins)
            } else if descriptor.limit.is_none() && is_unlimited {
                MatchedKind::Unlimited
            } else {
                MatchedKind::Unmatched
            };
            matched.items.push(MatchedItem { rule, is_overridden: descriptor.limit.is_some(), kind });
        }
    }

    /// Returns the role of `rule` under the process modes. `QUOTA_MODE` does not turn a shadow rule into a quota.
    pub(super) fn role(&self, rule: &Rule) -> Role {
        let is_shadow = rule.role.is_shadow();
        Role::of(is_shadow, rule.role.is_quota() || (self.modes.quota && !is_shadow))
    }

    /// Returns the limits that apply to a descriptor.
    fn limits<'a>(
        &self,
        descriptor: &Descriptor,
        rule: Option<&'a Rule>,
        replaced: &HashSet<&str>,
    ) -> AppliedLimits<'a> {
        if let Some(sent) = descriptor.limit {
            let limits = rule.map_or(&[][..], Rule::limits);
            let first = limits.iter().find(|limit| !limit.is_shadow).or(limits.first());
            let limit = Limit::of_override(first.map(|first| first.limit), sent);
            let role = Role::of(false, self.modes.quota);
            return SmallVec::from_buf([AppliedLimit { limit, from: first, role, is_shadow: false }]);
        }
        let Some(rule) = rule else { return SmallVec::new() };
        let is_replaced = |limit: &RuleLimit| limit.name.as_ref().is_some_and(|name| replaced.contains(name.as_ref()));
        let limits = rule.limits.iter().filter(|limit| !is_replaced(limit));
        let role = self.role(rule);
        let applied = |limit: &'a RuleLimit| AppliedLimit {
            limit: limit.limit,
            from: Some(limit),
            // A quota that only watches is no quota with room, which would admit what the others refuse.
            role: if limit.is_shadow { Role::Shadow } else { role },
            is_shadow: limit.is_shadow,
        };
        limits.map(applied).collect()
    }

    /// Returns the limits of an overlay that apply to a descriptor. A limit that the request sends takes the place of
    /// limits in the overlay, but is not added to a rule without limits.
    fn overlay_limits<'a>(
        &self,
        descriptor: &Descriptor,
        overlaid: &Overlaid<'a>,
        replaced: &HashSet<&str>,
    ) -> AppliedLimits<'a> {
        let rule = overlaid.found.rule.filter(|rule| {
            descriptor.limit.is_none() || !rule.limits.is_empty() || rule.source_limits != SourceLimits::Apply
        });
        match rule {
            Some(rule) => self.limits(descriptor, Some(rule), replaced),
            None => AppliedLimits::new(),
        }
    }
}

impl Called<'_> {
    /// Adds the charges of `limits`, which come from the rule of `place`, and their origins.
    fn charge<'a>(
        &self,
        place: &TreeMatch<'a>,
        mark: &str,
        limits: AppliedLimits<'a>,
        matched: &mut Matched<'a>,
        origins: &mut SmallVec<[ChargeOrigin<'a>; 1]>,
    ) {
        let (domain, rule, hits) = (self.domain, place.rule, self.hits);
        let charging = rule.map_or(domain.charging, |rule| rule.charging);
        let policies = rule.map_or(domain.policies, |rule| rule.policies);
        let leasing = rule.map_or(domain.lease, |rule| rule.lease);
        let remembers_refusals = rule.is_none_or(|rule| rule.remembers_refusals);
        // Several limits of one rule are one decision. A shadow limit takes no part in it.
        let is_group = charging == Charging::Each && limits.iter().filter(|limit| !limit.role.is_shadow()).count() > 1;
        let group = is_group.then(|| u32::try_from(matched.charges.len()).map_or(charging, Charging::Group));
        matched.charges.extend(limits.iter().map(|AppliedLimit { limit, from, role, is_shadow }| Charge {
            key: place.counter_key(self.name, domain.colocation, mark, self.descriptor, limit, *is_shadow),
            limit: *limit,
            hits: from.map_or(hits, |from| hits.times(from.cost.get().into())),
            descriptor: self.index,
            role: *role,
            charging: group.filter(|_| !role.is_shadow()).unwrap_or(charging),
            policies,
            remembers_refusals,
            lease: from.map_or(leasing.terms(), |from| from.lease).filter(|_| limit.can_be_leased().is_ok()),
            ask: 0,
        }));
        origins.extend(limits.into_iter().map(|applied| ChargeOrigin { rule, limit: applied.from }));
    }
}
