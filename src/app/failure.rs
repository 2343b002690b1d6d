//! Log lines of rule file problems, and of a start that fails.

use crate::rulefile::InvalidRules;
use crate::rulefile::problem::{Problem, Severity};
use crate::settings::InvalidSettings;

/// Logs a warning about a place in a rule file.
pub(super) fn warning(problem: &Problem) {
    let (line, column) = (problem.place.map(|place| place.line), problem.place.map(|place| place.column));
    tracing::warn!(event = "rules.warning", file = &*problem.file, line, column, "{problem}");
}

/// Logs the reasons why the service does not start: each wrong setting and each problem of a rule file on a line of its own, then the
/// end of the start.
pub(super) fn log(error: &anyhow::Error) {
    let (invalid, wrong) = (error.downcast_ref::<InvalidRules>(), error.downcast_ref::<InvalidSettings>());
    for problem in invalid.iter().flat_map(|invalid| &invalid.problems) {
        match problem.severity {
            Severity::Warning => warning(problem),
            Severity::Error => {
                let (line, column) = (problem.place.map(|place| place.line), problem.place.map(|place| place.column));
                tracing::error!(event = "rules.invalid", file = &*problem.file, line, column, "{problem}");
            }
        }
    }
    for wrong in wrong.iter().flat_map(|wrong| &wrong.0) {
        tracing::error!(event = "settings.invalid", "{wrong}");
    }
    let why = match (invalid, wrong) {
        (Some(invalid), _) => format!("the rule files have errors: {}", invalid.errors()),
        (_, Some(wrong)) => format!("settings are invalid: {}", wrong.0.len()),
        _ => format!("{error:#}"),
    };
    tracing::error!(event = "start.failed", "the service does not start: {why}");
}
