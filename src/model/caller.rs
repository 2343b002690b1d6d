//! Callers: their names, and what an operator grants them.

use std::collections::BTreeSet;

use foldhash::HashSet;

use super::peer_name::{PeerName, Presented};

/// Rights of a caller in a domain, beside asking about it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rights {
    /// The caller may send limits with its requests.
    pub may_override: bool,
    /// The caller may give hits back.
    pub may_refund: bool,
}

/// Name to which an operator grants something.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CallerName {
    /// Every caller without a certificate, and no other.
    Anonymous,
    /// A caller whose certificate has this name.
    Certificate(PeerName),
}

/// Domains about which a caller may ask.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GrantedDomains {
    /// Every domain.
    All,
    /// Only these.
    These(HashSet<Box<str>>),
}

/// Grant to some names: domains, and rights in these domains.
#[derive(Clone, Debug)]
pub struct Grant {
    /// Names of the callers.
    pub names: Vec<CallerName>,
    /// Domains about which they may ask.
    pub domains: GrantedDomains,
    /// Their rights in these domains.
    pub rights: Rights,
}

/// All grants of an operator.
#[derive(Clone, Debug)]
pub struct Callers {
    grants: Vec<Grant>,
    anonymous: CallerGrants,
}

/// Grants that one caller has, by their place among all grants.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CallerGrants(Box<[usize]>);

impl Rights {
    /// All rights.
    pub const ALL: Self = Self { may_override: true, may_refund: true };

    /// Returns the rights of either.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        Self { may_override: self.may_override || other.may_override, may_refund: self.may_refund || other.may_refund }
    }
}

impl Callers {
    /// Creates the set of these grants.
    pub fn new(grants: Vec<Grant>) -> Self {
        let anonymous = granted(&grants, |name| *name == CallerName::Anonymous);
        Self { grants, anonymous }
    }

    /// Returns the grants.
    pub fn grants(&self) -> &[Grant] {
        &self.grants
    }

    /// Returns the domains that are granted by name, in the order of their names.
    pub fn domains(&self) -> BTreeSet<&str> {
        let named = self.grants.iter().filter_map(|grant| match &grant.domains {
            GrantedDomains::All => None,
            GrantedDomains::These(domains) => Some(domains),
        });
        named.flatten().map(|domain| &**domain).collect()
    }

    /// Returns the grants of a caller whose certificate has the names `presented`. Those of `anonymous` are not among them.
    pub fn of(&self, presented: &[Presented<'_>]) -> CallerGrants {
        granted(&self.grants, |name| match name {
            CallerName::Anonymous => false,
            CallerName::Certificate(name) => presented.iter().any(|presented| name.is_of(presented)),
        })
    }

    /// Returns the grants of a caller without a certificate.
    pub fn anonymous(&self) -> &CallerGrants {
        &self.anonymous
    }

    /// Returns the rights of a caller with `grants` of this set in `domain`: those of all its grants that have the domain.
    /// `None` if it may not ask about the domain.
    pub fn rights(&self, grants: &CallerGrants, domain: &str) -> Option<Rights> {
        let of_domain = grants.0.iter().filter_map(|index| self.grants.get(*index)).filter(|grant| grant.has(domain));
        of_domain.map(|grant| grant.rights).reduce(Rights::or)
    }
}

impl CallerGrants {
    /// Returns true if nothing is granted.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl Grant {
    fn has(&self, domain: &str) -> bool {
        match &self.domains {
            GrantedDomains::All => true,
            GrantedDomains::These(domains) => domains.contains(domain),
        }
    }
}

fn granted(grants: &[Grant], is_of_caller: impl Fn(&CallerName) -> bool) -> CallerGrants {
    let of_caller = grants.iter().enumerate().filter(|(_, grant)| grant.names.iter().any(&is_of_caller));
    CallerGrants(of_caller.map(|(index, _)| index).collect())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const OVERRIDE: Rights = Rights { may_override: true, may_refund: false };
    const REFUND: Rights = Rights { may_override: false, may_refund: true };
    const NONE: Rights = Rights { may_override: false, may_refund: false };

    fn grant(names: &[&str], domains: &[&str], rights: Rights) -> Grant {
        let name = |text: &&str| match *text {
            "anonymous" => CallerName::Anonymous,
            text => CallerName::Certificate(PeerName::parse(text).unwrap()),
        };
        let domains = match domains {
            ["*"] => GrantedDomains::All,
            domains => GrantedDomains::These(domains.iter().map(|domain| Box::from(*domain)).collect()),
        };
        Grant { names: names.iter().map(name).collect(), domains, rights }
    }

    #[test]
    fn a_caller_has_the_rights_of_each_of_its_names_in_the_domains_granted_with_them() {
        let callers = Callers::new(vec![
            grant(&["a.edge"], &["one"], OVERRIDE),
            grant(&["*.edge"], &["one", "two"], NONE),
            grant(&["spiffe://a/b", "a.edge"], &["two"], REFUND),
        ]);
        let names = [Presented::Dns("a.edge"), Presented::Uri("spiffe://a/b")];
        let both = callers.of(&names);
        assert_eq!(callers.rights(&both, "one"), Some(OVERRIDE), "a right does not spread to other domains");
        assert_eq!(callers.rights(&both, "two"), Some(REFUND));
        assert_eq!(callers.rights(&both, "three"), None);
        let other = callers.of(&[Presented::Dns("b.edge")]);
        assert_eq!(callers.rights(&other, "one"), Some(NONE));
        assert!(callers.of(&[Presented::Dns("a.b.edge")]).is_empty());
    }

    #[test]
    fn what_anonymous_is_granted_is_for_callers_without_a_certificate_only() {
        let callers = Callers::new(vec![grant(&["anonymous"], &["*"], Rights::ALL)]);
        assert_eq!(callers.rights(callers.anonymous(), "any"), Some(Rights::ALL));
        for names in [&[][..], &[Presented::Dns("anonymous")], &[Presented::Uri("anonymous")]] {
            assert!(callers.of(names).is_empty(), "{names:?}");
        }
        assert!(Callers::new(vec![grant(&["a"], &["*"], NONE)]).anonymous().is_empty());
    }

    proptest! {
        /// The rights are those of a search that knows nothing of indexes: each grant, each name, each domain.
        #[test]
        fn the_rights_of_a_caller_are_the_union_of_its_grants_with_the_domain(
            grants in prop::collection::vec((prop::collection::vec(0..4_usize, 0..3), prop::collection::vec(0..3_usize, 0..3), any::<(bool, bool)>()), 0..6),
            presented in prop::collection::vec(0..4_usize, 0..3),
            domain in 0..3_usize,
        ) {
            const NAMES: [&str; 4] = ["a.edge", "b.edge", "spiffe://a/b", "c"];
            const DOMAINS: [&str; 3] = ["one", "two", "three"];
            let rights = |(may_override, may_refund)| Rights { may_override, may_refund };
            let made = grants.iter().map(|(names, domains, right)| {
                let names: Vec<_> = names.iter().map(|name| NAMES[*name]).collect();
                let domains: Vec<_> = domains.iter().map(|domain| DOMAINS[*domain]).collect();
                grant(&names, &domains, rights(*right))
            });
            let callers = Callers::new(made.collect());
            let shown = |name: &usize| match NAMES[*name] {
                uri if uri.contains("://") => Presented::Uri(uri),
                dns => Presented::Dns(dns),
            };
            let presented_names: Vec<_> = presented.iter().map(shown).collect();
            let mut expected = None;
            for (names, domains, right) in &grants {
                if names.iter().any(|name| presented.contains(name)) && domains.contains(&domain) {
                    expected = Some(rights(*right).or(expected.unwrap_or_default()));
                }
            }
            prop_assert_eq!(callers.rights(&callers.of(&presented_names), DOMAINS[domain]), expected);
        }
    }
}
