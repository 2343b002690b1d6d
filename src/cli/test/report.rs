//! Results of test cases: as text for people, as TAP, and as JUnit XML.

use std::fmt::Write;

use super::run::{CaseResult, Failure};
use crate::cli::admin::printable;
use crate::model::counted;

/// Returns the results for people.
pub(super) fn text(results: &[CaseResult]) -> String {
    let mut text = String::new();
    for CaseResult { file, line, name, failures } in results {
        let word = if failures.is_empty() { "ok  " } else { "FAIL" };
        let _ = writeln!(text, "{word}  {file}:{line}: {}", printable(name));
        for failure in failures {
            let _ = writeln!(text, "      {file}:{}: {}", failure.line, failure.step);
            failure.lines.iter().for_each(|line| _ = writeln!(text, "        {line}"));
        }
    }
    let failed = results.iter().filter(|result| !result.is_passed()).count();
    let passed = results.len() - failed;
    let failed = if failed == 0 { String::new() } else { format!(", {failed} failed") };
    let _ = writeln!(text, "{passed} of {} passed{failed}", counted(results.len(), "case"));
    text
}

/// Returns the results as TAP 14, the Test Anything Protocol.
pub(super) fn tap(results: &[CaseResult]) -> String {
    let mut text = format!("TAP version 14\n1..{}\n", results.len());
    for (index, result) in results.iter().enumerate() {
        let word = if result.is_passed() { "ok" } else { "not ok" };
        let name = format!("{}:{}: {}", result.file, result.line, printable(&result.name));
        let name = name.replace('\\', "\\\\").replace('#', "\\#");
        let _ = writeln!(text, "{word} {} - {name}", index + 1);
        if !result.is_passed() {
            let lines = failure_lines(result);
            let _ = writeln!(text, "  ---\n  message: |");
            lines.iter().for_each(|line| _ = writeln!(text, "    {line}"));
            let _ = writeln!(text, "  ...");
        }
    }
    text
}

/// Returns the results as JUnit XML: one suite for each file.
pub(super) fn junit(results: &[CaseResult]) -> String {
    let failed = |of: &[CaseResult]| of.iter().filter(|result| !result.is_passed()).count();
    let mut xml = format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuites tests=\"{}\" failures=\"{}\">\n",
        results.len(),
        failed(results)
    );
    for suite in results.chunk_by(|one, other| one.file == other.file) {
        let file = suite.first().map(|result| escaped(&result.file)).unwrap_or_default();
        let _ = writeln!(xml, "  <testsuite name=\"{file}\" tests=\"{}\" failures=\"{}\">", suite.len(), failed(suite));
        for result in suite {
            let _ = write!(
                xml,
                "    <testcase name=\"{}\" classname=\"{file}\" file=\"{file}\" line=\"{}\"",
                escaped(&result.name),
                result.line
            );
            if result.is_passed() {
                let _ = writeln!(xml, "/>");
                continue;
            }
            let lines = failure_lines(result);
            let message = result.failures.first().and_then(|failure| failure.lines.first());
            let message = message.map(|line| escaped(line)).unwrap_or_default();
            let _ = writeln!(
                xml,
                ">\n      <failure message=\"{message}\">{}</failure>\n    </testcase>",
                escaped(&lines.join("\n"))
            );
        }
        let _ = writeln!(xml, "  </testsuite>");
    }
    xml.push_str("</testsuites>\n");
    xml
}

/// Returns the lines about all failures of a case.
fn failure_lines(result: &CaseResult) -> Vec<String> {
    let lines = |failure: &Failure| {
        let first = format!("{}:{}: {}", result.file, failure.line, failure.step);
        let rest = failure.lines.iter().map(|line| format!("  {line}"));
        std::iter::once(first).chain(rest).collect::<Vec<_>>()
    };
    result.failures.iter().flat_map(lines).collect()
}

/// Returns a text for an attribute or an element of XML. Characters that XML does not allow become spaces.
fn escaped(text: &str) -> String {
    let allowed = text.chars().map(|c| match c {
        '\n' => '\n',
        c if c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}') => ' ',
        c => c,
    });
    let text: String = allowed.collect();
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
