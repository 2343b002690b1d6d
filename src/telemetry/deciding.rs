//! The rule and the origin that decided a request, for metrics, spans and the log.

use crate::model::{About, Answered, Decision, Micros, Outcome, Provenance};

/// The rule and the origin that decided a request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Deciding<'d, 'r> {
    /// The deciding answer, if one of the answers decided.
    pub(super) answer: Option<&'d Answered<'r>>,
    /// The deciding rule, if there is one.
    pub(super) rule: Option<&'r About>,
    /// Origin of the decision.
    pub(super) origin: Origin,
}

/// Origin of a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Origin {
    /// The store answered.
    Store,
    /// Known refusal: the store refused the same charge less than a second ago, or was too busy for another call.
    Known,
    /// Without the store: admitted unchecked.
    Open,
    /// Without the store: refused unchecked.
    Closed,
    /// Without the store: decided by this instance alone.
    Local,
    /// Without the store: the caller gets an error.
    Error,
    /// A rule decided without counting.
    Rule,
    /// The message was too large: refused without counting.
    TooLarge,
    /// No limit applies to the request.
    Nothing,
}

impl Origin {
    /// All origins, in the order of their discriminants.
    pub(super) const ALL: [Self; 9] = [
        Self::Store,
        Self::Known,
        Self::Open,
        Self::Closed,
        Self::Local,
        Self::Error,
        Self::Rule,
        Self::TooLarge,
        Self::Nothing,
    ];

    /// Returns the name in metrics, spans and logs.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Store => Provenance::Store.name(),
            Self::Open => Provenance::Open.name(),
            Self::Closed => Provenance::Closed.name(),
            Self::Local => Provenance::Local.name(),
            Self::Known => Provenance::Known.name(),
            Self::Error => Provenance::Error.name(),
            Self::Rule => "rule",
            Self::TooLarge => "too_large",
            Self::Nothing => "none",
        }
    }
}

impl From<Provenance> for Origin {
    fn from(provenance: Provenance) -> Self {
        match provenance {
            Provenance::Store => Self::Store,
            Provenance::Open => Self::Open,
            Provenance::Closed => Self::Closed,
            Provenance::Local => Self::Local,
            Provenance::Known => Self::Known,
            // Another charge of the same request is known to be refused, and decides it.
            Provenance::Spared => Self::Known,
            Provenance::Error => Self::Error,
        }
    }
}

/// All outcomes with their names.
pub(super) const OUTCOMES: [(Outcome, &str); 3] =
    [(Outcome::Admitted, "admitted"), (Outcome::Refused, "refused"), (Outcome::Failed, "failed")];

impl<'d, 'r> Deciding<'d, 'r> {
    /// Returns the rule and origin that decided the whole request.
    ///
    /// A ruling decides first, then the size of the message. A refusal: the limit with the longest delay if there was no room
    /// to hold the call, else the first limit that refuses, with quotas last. A failure: the first limit that could not be
    /// checked. An admission: the first enforced limit that a failure policy answered, else the first enforced limit, else the
    /// first limit.
    pub(super) fn of(decision: &'d Decision<'r>) -> Self {
        if let Some(ruling) = decision.ruling {
            return Self { answer: None, rule: Some(ruling.rule), origin: Origin::Rule };
        }
        if decision.is_unread && decision.outcome.is_refused() {
            return Self { answer: None, rule: None, origin: Origin::TooLarge };
        }
        let enforced = || decision.answers.iter().filter(|answer| !answer.role.is_shadow());
        let with = |outcome| enforced().filter(move |answer| answer.verdict.outcome == outcome);
        let answer = match decision.outcome {
            Outcome::Admitted => enforced()
                .find(|answer| answer.verdict.provenance.is_policy())
                .or_else(|| enforced().next())
                .or(decision.answers.first()),
            Outcome::Refused if decision.wait.hold > Micros::ZERO => {
                enforced().max_by_key(|answer| answer.verdict.delay)
            }
            Outcome::Refused => {
                with(Outcome::Refused).find(|answer| !answer.role.is_quota()).or_else(|| with(Outcome::Refused).next())
            }
            Outcome::Failed => with(Outcome::Failed).next(),
        };
        let origin = answer.map_or(Origin::Nothing, |answer| answer.verdict.provenance.into());
        Self { answer, rule: answer.and_then(|answer| answer.rule), origin }
    }
}
