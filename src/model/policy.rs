//! Choices of an operator: the charging mode of a request, and the policies that answer in place of a store.

/// Charging mode for the limits of one request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Charging {
    /// Each limit on its own: a refusal by one limit does not spare the others. The reference's behaviour.
    #[default]
    Each,
    /// A refused request spends nothing in any tier.
    AllOrNothing,
    /// A charge of a `rate_limits` list whose rule says `each`: if one charge of the list refuses, the others spend nothing.
    /// Refusals outside the list do not matter. The number tells the lists of one request apart.
    Group(u32),
}

impl Charging {
    /// The modes that a rule file may set, each with its word.
    pub const ALL: [(&'static str, Self); 2] = [("each", Self::Each), ("all_or_nothing", Self::AllOrNothing)];

    /// Returns its word in a rule file.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Each | Self::Group(_) => "each",
            Self::AllOrNothing => "all_or_nothing",
        }
    }
}

/// Set of counters that share a slot of a Redis cluster, and therefore one atomic step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Colocation {
    /// The counters of one descriptor; other counters spread over the nodes.
    #[default]
    Descriptor,
    /// The counters of a whole domain.
    Domain,
}

impl Colocation {
    /// All variants that have a word in a rule file, each with that word.
    pub const ALL: [(&'static str, Self); 1] = [("domain", Self::Domain)];
}

/// A policy that answers in place of the store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FailurePolicy {
    /// The caller gets a gRPC error, and the caller's own setting decides, as with the reference.
    #[default]
    Error,
    /// Admitted, marked as unchecked.
    Open,
    /// Refused.
    Closed,
    /// Decided by this instance alone.
    Local,
}

impl FailurePolicy {
    /// All policies, each with its word in a rule file.
    pub const ALL: [(&'static str, Self); 4] =
        [("error", Self::Error), ("open", Self::Open), ("closed", Self::Closed), ("local", Self::Local)];

    /// Returns its word in a rule file.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Open => "open",
            Self::Closed => "closed",
            Self::Local => "local",
        }
    }
}

impl FailurePolicy {
    /// Returns the policy under overload if only this policy for failures is set. Overload is no failure, and a client can cause
    /// it: the service continues to decide, unless the operator has chosen `closed`.
    const fn under_overload(self) -> Self {
        match self {
            Self::Closed => Self::Closed,
            Self::Error | Self::Open | Self::Local => Self::Local,
        }
    }
}

/// The policies that answer in place of the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StorePolicies {
    /// Answers while the store fails.
    pub on_failure: FailurePolicy,
    /// Answers while the store or this process is overloaded.
    pub on_overload: FailurePolicy,
}

impl Default for StorePolicies {
    fn default() -> Self {
        let on_failure = FailurePolicy::default();
        Self { on_failure, on_overload: on_failure.under_overload() }
    }
}

impl StorePolicies {
    /// Returns the policies of a level inside this one, which sets `on_failure`, `on_overload`, both or neither. If the level
    /// sets only `on_failure`, that policy decides overload too. So an outer policy never opens a level that is set to `closed`.
    #[must_use]
    pub fn inside(self, on_failure: Option<FailurePolicy>, on_overload: Option<FailurePolicy>) -> Self {
        let by_failure = on_failure.map(FailurePolicy::under_overload);
        Self {
            on_failure: on_failure.unwrap_or(self.on_failure),
            on_overload: on_overload.or(by_failure).unwrap_or(self.on_overload),
        }
    }
}

/// Effect of a refusal of one charge on the request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Role {
    /// The request is refused.
    #[default]
    Enforce,
    /// None: the rule only watches.
    Shadow,
    /// The request is refused if all of its quota charges refuse.
    Quota,
    /// A quota that only watches. It always counts as a quota with room, so the other quotas cannot all refuse.
    ShadowQuota,
}

impl Role {
    /// Returns the role of a rule with these two flags.
    pub const fn of(shadow: bool, quota: bool) -> Self {
        match (shadow, quota) {
            (false, false) => Self::Enforce,
            (true, false) => Self::Shadow,
            (false, true) => Self::Quota,
            (true, true) => Self::ShadowQuota,
        }
    }

    /// Returns true if a refusal does not show in the descriptor's own status.
    pub const fn is_shadow(self) -> bool {
        matches!(self, Self::Shadow | Self::ShadowQuota)
    }

    /// Returns true if the charge takes part in the quota of the request.
    pub const fn is_quota(self) -> bool {
        matches!(self, Self::Quota | Self::ShadowQuota)
    }
}

/// Role and result of one charge, for the outcome of the request.
#[derive(Clone, Copy, Debug)]
pub struct ChargeOutcome {
    /// Index of its descriptor in the request. The charges of one descriptor are adjacent.
    pub descriptor: usize,
    /// Effect of a refusal on the request.
    pub role: Role,
    /// True if the charge was refused.
    pub refused: bool,
}

/// A running count of the outcomes of one request.
#[derive(Clone, Copy, Debug, Default)]
pub struct OutcomeCount {
    is_refused: bool,
    /// The last quota: its descriptor, and true if any of its outcomes refuses.
    quota: Option<(usize, bool)>,
    quota_has_room: bool,
}

impl OutcomeCount {
    /// Counts one more outcome, in the order of the request.
    pub fn add(&mut self, ChargeOutcome { descriptor, role, refused }: ChargeOutcome) {
        match role {
            Role::Enforce => self.is_refused |= refused,
            Role::Shadow => {}
            Role::ShadowQuota => self.quota_has_room = true,
            Role::Quota => {
                self.quota = match self.quota {
                    Some((same, any)) if same == descriptor => Some((same, any || refused)),
                    Some((_, any)) => {
                        self.quota_has_room |= !any;
                        Some((descriptor, refused))
                    }
                    None => Some((descriptor, refused)),
                };
            }
        }
    }

    /// Returns true if the outcomes so far refuse the request: an enforced charge refuses, or there are quotas and all of them
    /// refuse.
    pub fn is_refused(&self) -> bool {
        self.is_refused || self.quota.is_some_and(|(_, last_refused)| last_refused && !self.quota_has_room)
    }
}

/// Returns true if a request is refused: an enforced charge refuses, or there are quotas and all of them refuse.
///
/// A quota refuses if any limit of its descriptor does. [`OutcomeCount`] alone implements this rule; stores that charge all or nothing
/// use it too.
pub fn is_request_refused(charge_outcomes: impl IntoIterator<Item = ChargeOutcome>) -> bool {
    let mut count = OutcomeCount::default();
    for charge_outcome in charge_outcomes {
        if charge_outcome.role == Role::Enforce && charge_outcome.refused {
            return true;
        }
        count.add(charge_outcome);
    }
    count.is_refused()
}

#[cfg(test)]
mod tests {
    use super::{ChargeOutcome, FailurePolicy, Role, StorePolicies, is_request_refused};

    #[test]
    fn the_nearest_level_that_sets_either_policy_decides_overload() {
        use FailurePolicy::{Closed, Error, Local, Open};
        let process = StorePolicies::default();
        assert_eq!((process.on_failure, process.on_overload), (Error, Local));
        let on_overload = |levels: &[(Option<FailurePolicy>, Option<FailurePolicy>)]| {
            let inside = |above: StorePolicies, (failure, overload): &(_, _)| above.inside(*failure, *overload);
            levels.iter().fold(process, inside).on_overload
        };
        assert_eq!(
            [Error, Open, Closed, Local].map(|on| on_overload(&[(Some(on), None)])),
            [Local, Local, Closed, Local]
        );
        assert_eq!(on_overload(&[(Some(Closed), Some(Open))]), Open, "of one level, the word for overload goes first");
        assert_eq!(
            on_overload(&[(None, Some(Open)), (Some(Closed), None)]),
            Closed,
            "an outer `open` opens no inner `closed`"
        );
        assert_eq!(on_overload(&[(Some(Closed), None), (None, Some(Error))]), Error);
        assert_eq!(on_overload(&[(None, Some(Error)), (None, None)]), Error);
        let inner = process.inside(Some(Closed), None).inside(None, Some(Open));
        assert_eq!(inner.on_failure, Closed, "overload says nothing of failure");
    }

    fn refused<const N: usize>(charge_outcomes: [(usize, Role, bool); N]) -> bool {
        is_request_refused(charge_outcomes.map(|(descriptor, role, refused)| ChargeOutcome {
            descriptor,
            role,
            refused,
        }))
    }

    #[test]
    fn an_enforced_refusal_refuses_the_request() {
        assert!(refused([(0, Role::Quota, false), (1, Role::Enforce, true)]));
        assert!(!refused([(0, Role::Enforce, false), (1, Role::Shadow, true)]));
        assert!(!refused([]));
    }

    #[test]
    fn quotas_refuse_only_together() {
        assert!(refused([(0, Role::Quota, true), (1, Role::Quota, true)]));
        assert!(!refused([(0, Role::Quota, true), (1, Role::Quota, false)]));
        assert!(!refused([(0, Role::Quota, false), (1, Role::Quota, true)]));
        assert!(!refused([(0, Role::Quota, true), (1, Role::ShadowQuota, true)]));
        assert!(!refused([(0, Role::ShadowQuota, true)]));
        assert!(refused([(0, Role::Quota, true), (1, Role::Shadow, false)]));
    }

    #[test]
    fn one_limit_of_several_is_enough_to_refuse_a_quota() {
        assert!(refused([(0, Role::Quota, true), (0, Role::Quota, false)]));
        assert!(refused([(0, Role::Quota, false), (0, Role::Quota, true)]));
        assert!(!refused([(0, Role::Quota, true), (0, Role::Quota, false), (1, Role::Quota, false)]));
    }
}
