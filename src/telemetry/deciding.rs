//! What decided a request, for metrics, spans and the log.

use crate::model::{About, Answered, Decision, Micros, Outcome, Provenance};

/// What decided a request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Deciding<'d, 'r> {
    /// Which of the answers it was, if it was one.
    pub(super) answer: Option<&'d Answered<'r>>,
    /// Whose rule it was, if anyone's.
    pub(super) rule: Option<&'r About>,
    /// Where it comes from.
    pub(super) origin: Origin,
}

/// Where a decision comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Origin {
    /// A store was asked.
    Store,
    /// The store refused the same charge less than a second ago, or was too busy to be asked again.
    Known,
    /// It could not be: admitted unchecked.
    Open,
    /// It could not be: refused unchecked.
    Closed,
    /// It could not be: decided by this instance alone.
    Local,
    /// It could not be, and the caller is told so.
    Error,
    /// A rule decides without counting.
    Rule,
    /// The message is too large: refused without counting.
    TooLarge,
    /// Nothing limits the request.
    Nothing,
}

impl Origin {
    /// Each, in the order of their numbers.
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

    /// Its word in metrics, spans and logs.
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
            // Another charge of the same request decides it.
            Provenance::Spared => Self::Known,
            Provenance::Error => Self::Error,
        }
    }
}

/// Each outcome and its word.
pub(super) const OUTCOMES: [(Outcome, &str); 3] =
    [(Outcome::Admitted, "admitted"), (Outcome::Refused, "refused"), (Outcome::Failed, "failed")];

impl<'d, 'r> Deciding<'d, 'r> {
    /// The rule that rules the whole request. Of a refusal the first limit that refuses, a quota only where nothing else does,
    /// and where there was no room to wait in, the one that waits longest; of a failure the first that could not be checked;
    /// else the first that could not be asked of the store, or the first there is.
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
