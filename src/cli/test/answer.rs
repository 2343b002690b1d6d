//! An answer, compared with the expected one.

use std::fmt::{Display, Write};

use crate::model::{Decision, Finding, Micros, Outcome, Part, Tightest};
use crate::rulefile::cases::{Expected, NO_RULE};
use crate::rulefile::problem::Placed;

/// The answer for a request or for one of its descriptors.
#[derive(Clone, Debug)]
pub(super) struct Answer {
    outcome: Outcome,
    /// Path of the deciding rule, if there is one.
    rule: Option<String>,
    /// Name of the deciding limit, if it has one.
    limit: Option<String>,
    /// Quota of the deciding limit, as text.
    quota: Option<String>,
    remaining: Option<u32>,
    retry: Option<Micros>,
    reset: Option<Micros>,
    delay: Micros,
}

impl Answer {
    /// Returns the answer for a whole request.
    pub(super) fn of_request(decision: &Decision<'_>) -> Self {
        let deciding = decision.deciding();
        let part = deciding.descriptor.and_then(|index| decision.parts.get(index));
        let answer = Self::new(decision.outcome, deciding.rule.map(|rule| rule.path.to_string()), part);
        Self {
            limit: deciding.limit.map(str::to_owned),
            retry: decision.retry.or(answer.retry),
            delay: decision.wait.header.saturating_add(decision.wait.hold),
            ..answer
        }
    }

    /// Returns the answer for one descriptor.
    pub(super) fn of_part(part: &Part<'_>) -> Self {
        Self::new(part.outcome(), part.rule.map(|rule| rule.path.to_string()), Some(part))
    }

    fn new(outcome: Outcome, rule: Option<String>, part: Option<&Part<'_>>) -> Self {
        let tightest: Option<&Tightest<'_>> = part.and_then(|part| match &part.finding {
            Finding::Limited(tightest) => Some(tightest),
            _ => None,
        });
        Self {
            outcome,
            rule,
            limit: tightest.and_then(|tightest| tightest.name).map(str::to_owned),
            quota: tightest.map(|tightest| tightest.quota.to_string()),
            remaining: tightest.map(|tightest| tightest.verdict.remaining_for_client()),
            retry: tightest.and_then(|tightest| tightest.verdict.retry),
            reset: tightest.map(|tightest| tightest.verdict.reset),
            delay: Micros::ZERO,
        }
    }

    /// Returns true if the outcome is the expected one.
    pub(super) fn has_code(&self, expected: &Expected) -> bool {
        expected.code.as_ref().is_none_or(|code| code.value == self.outcome)
    }

    /// Returns a line for each difference from the expected answer; the names of the fields begin with `of`.
    pub(super) fn differences(&self, expected: &Expected, of: &str) -> Vec<String> {
        let mut lines = Vec::new();
        let mut compare = |field: &str, expected: Option<String>, found: String| {
            if let Some(expected) = expected.filter(|expected| *expected != found) {
                lines.push(format!("{of}{field}: expected {expected}, got {found}"));
            }
        };
        compare(
            "code",
            text(expected.code.as_ref().map(|code| code_name(code.value))),
            code_name(self.outcome).to_owned(),
        );
        compare("rule", value(expected.rule.as_ref()), self.rule.clone().unwrap_or_else(|| NO_RULE.to_owned()));
        compare("limit", value(expected.limit.as_ref()), or_none(self.limit.as_ref()));
        compare("remaining", value(expected.remaining.as_ref()), or_none(self.remaining));
        compare("retry_after", value(expected.retry_after.as_ref()), or_none(self.retry));
        compare("reset_after", value(expected.reset_after.as_ref()), or_none(self.reset));
        compare("delay", value(expected.delay.as_ref()), self.delay.to_string());
        lines
    }

    /// Returns the rule and the limit that decided, as text for people.
    pub(super) fn decided_by(&self) -> String {
        let mut text = match &self.rule {
            Some(rule) => format!("decided by {rule}"),
            None => "no rule decided".to_owned(),
        };
        let mut add = |name: &str, value: Option<String>| {
            if let Some(value) = value {
                let _ = write!(text, ", {name} {value}");
            }
        };
        add("limit", self.limit.clone());
        add("quota", self.quota.clone());
        add("remaining", self.remaining.map(|remaining| remaining.to_string()));
        add("retry after", self.retry.map(|retry| retry.to_string()));
        add("reset after", self.reset.map(|reset| reset.to_string()));
        text
    }
}

fn text(value: Option<&str>) -> Option<String> {
    value.map(str::to_owned)
}

fn value<T: Display>(placed: Option<&Placed<T>>) -> Option<String> {
    placed.map(|placed| placed.value.to_string())
}

fn or_none<T: Display>(value: Option<T>) -> String {
    value.map_or_else(|| NO_RULE.to_owned(), |value| value.to_string())
}

/// Returns the word of an outcome in a file of test cases.
pub(super) fn code_name(outcome: Outcome) -> &'static str {
    match outcome {
        Outcome::Admitted => "ok",
        Outcome::Refused => "over_limit",
        Outcome::Failed => "failed",
    }
}
