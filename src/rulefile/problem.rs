//! Problems of a rule file, with their places.

use std::fmt;
use std::sync::Arc;

use crate::rules::tree::Position;

/// Maximum number of reported problems per file: 200. Nobody reads more at once; the next load shows the rest.
const MAX_PROBLEMS: usize = 200;

/// Maximum number of messages built per file: 10,000. An alias can repeat one problem millions of times.
const MAX_WORDED: usize = 10_000;

/// Maximum length of an excerpt: 160 characters, two lines of a terminal.
const MAX_EXCERPT: usize = 160;

/// Maximum length of a quotation from the file in a message: 40 characters. The excerpt shows the rest.
const MAX_QUOTED: usize = 40;

/// A value and its place in a rule file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Placed<T> {
    /// Value as written.
    pub value: T,
    /// Position of the value.
    pub place: Position,
}

/// Severity of a problem.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// The load is refused.
    Error,
    /// The load continues. The file probably does not do what its author expects.
    Warning,
}

/// One problem of a rule file, as a sentence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// File name.
    pub file: Arc<str>,
    /// Position in the file; `None` for the whole file.
    pub place: Option<Position>,
    /// Severity of the problem.
    pub severity: Severity,
    /// Message: what is wrong, and what to write instead.
    pub message: String,
    /// Text of the line at `place`.
    pub excerpt: Option<String>,
}

/// The problems of one file while it is read: at most [`MAX_PROBLEMS`]. Errors replace warnings if it is full.
#[derive(Debug)]
pub(crate) struct Report {
    file: Arc<str>,
    found: Vec<Problem>,
    warnings: usize,
    worded: usize,
    left_out: usize,
    has_error: bool,
    is_error_left_out: bool,
    is_strict: bool,
}

/// Prints `rules.yaml:3:7: error: ...`, and the line with a mark under the place.
impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.file)?;
        if let Some(place) = self.place {
            write!(f, ":{}:{}", place.line, place.column)?;
        }
        let severity = match self.severity {
            Severity::Error => "error",
            Severity::Warning => "warning",
        };
        write!(f, ": {severity}: {}", self.message)?;
        if let (Some(place), Some(excerpt)) = (self.place, &self.excerpt) {
            let number = place.line.to_string();
            // The excerpt of a long line can end before the place.
            let indent = usize::try_from(place.column.saturating_sub(1)).unwrap_or(0).min(excerpt.chars().count());
            write!(f, "\n  {number} | {excerpt}\n  {:1$} | {2:3$}^", "", number.len(), "", indent)?;
        }
        Ok(())
    }
}

impl Report {
    /// Returns an empty report for `file`.
    pub(crate) fn new(file: &Arc<str>) -> Self {
        Self {
            file: Arc::clone(file),
            found: Vec::new(),
            warnings: 0,
            worded: 0,
            left_out: 0,
            has_error: false,
            is_error_left_out: false,
            is_strict: false,
        }
    }

    /// Returns an empty report for `file`, of which every part must count.
    pub(crate) fn strict(file: &Arc<str>) -> Self {
        Self { is_strict: true, ..Self::new(file) }
    }

    /// Returns true if an error was reported.
    pub(crate) fn has_error(&self) -> bool {
        self.has_error
    }

    /// Adds an error. Calls `message` only if there is room for it.
    pub(crate) fn error(&mut self, place: Position, message: impl FnOnce() -> String) {
        self.has_error = true;
        self.add(place, Severity::Error, message);
    }

    /// Adds a warning. Calls `message` only if there is room for it.
    pub(crate) fn warning(&mut self, place: Position, message: impl FnOnce() -> String) {
        self.add(place, Severity::Warning, message);
    }

    /// Adds a warning that a part of the file does not count as written; in a strict report an error.
    pub(crate) fn loss(&mut self, place: Position, message: impl FnOnce() -> String) {
        if self.is_strict {
            self.error(place, message);
        } else {
            self.warning(place, message);
        }
    }

    /// Moves the problems to `problems`, in file order, with excerpts from `text`.
    pub(crate) fn finish(mut self, text: &str, problems: &mut Vec<Problem>) {
        self.found.sort_by_key(|problem| problem.place);
        add_excerpts(text, &mut self.found);
        problems.append(&mut self.found);
        if self.left_out > 0 {
            let severity = if self.is_error_left_out { Severity::Error } else { Severity::Warning };
            let message = format!("There are more problems ({} not shown): correct those above first.", self.left_out);
            problems.push(Problem { file: self.file, place: None, severity, message, excerpt: None });
        }
    }

    /// Does the same as `finish` without excerpts, for files that may hold secrets.
    pub(crate) fn finish_hidden(self, problems: &mut Vec<Problem>) {
        let first = problems.len();
        self.finish("", problems);
        problems.iter_mut().skip(first).for_each(|problem| problem.excerpt = None);
    }

    fn add(&mut self, place: Position, severity: Severity, message: impl FnOnce() -> String) {
        let is_full = self.found.len() >= MAX_PROBLEMS && (severity == Severity::Warning || self.warnings == 0);
        if is_full || self.worded >= MAX_WORDED {
            self.left_out += 1;
            self.is_error_left_out |= severity == Severity::Error;
            return;
        }
        self.worded += 1;
        let message = message();
        // The target of an alias is read once for each alias, so its problems repeat.
        if self.found.iter().any(|problem| problem.place == Some(place) && problem.message == message) {
            return;
        }
        if self.found.len() >= MAX_PROBLEMS
            && let Some(last) = self.found.iter().rposition(|problem| problem.severity == Severity::Warning)
        {
            self.found.remove(last);
            self.warnings -= 1;
            self.left_out += 1;
        }
        if severity == Severity::Warning {
            self.warnings += 1;
        }
        let file = Arc::clone(&self.file);
        self.found.push(Problem { file, place: Some(place), severity, message, excerpt: None });
    }
}

/// Quotes a piece of a file for a message: in backquotes, truncated, and without characters that move the cursor.
pub(crate) fn quoted(text: &str) -> String {
    format!("`{}`", shown(text.chars(), MAX_QUOTED))
}

/// Returns at most `length` characters of `text` with unsafe characters replaced. Reads no more of `text` than needed.
fn shown(text: impl Iterator<Item = char>, length: usize) -> String {
    let mut shown = String::new();
    for (index, c) in text.enumerate() {
        if index == length {
            shown.pop();
            shown.push('…');
            break;
        }
        shown.push(if is_shown(c) { c } else { replacement(c) });
    }
    shown
}

/// Returns false for control characters and for characters that change the text direction, which can hide content.
fn is_shown(c: char) -> bool {
    !c.is_control() && !matches!(c, '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{feff}')
}

fn replacement(c: char) -> char {
    if c == '\t' { ' ' } else { char::REPLACEMENT_CHARACTER }
}

/// Adds an excerpt to each problem. `problems` are in file order, so one pass over `text` is enough.
fn add_excerpts(text: &str, problems: &mut [Problem]) {
    let mut rest = text;
    let mut number = 1_u32;
    for problem in problems {
        let Some(place) = problem.place else { continue };
        while number < place.line {
            let Some(end) = rest.find(['\n', '\r']) else { return };
            let (_, tail) = rest.split_at(end);
            rest = tail.strip_prefix("\r\n").or_else(|| tail.strip_prefix(['\n', '\r'])).unwrap_or(tail);
            number += 1;
        }
        let line = rest.chars().take_while(|c| !matches!(c, '\n' | '\r'));
        problem.excerpt = Some(shown(line, MAX_EXCERPT));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::{MAX_EXCERPT, Position, Problem, Report, quoted};

    fn reported(text: &str, places: &[(u32, u32)]) -> Vec<Problem> {
        let mut report = Report::new(&Arc::from("rules.yaml"));
        for (line, column) in places {
            report.error(Position { line: *line, column: *column }, || "Wrong.".to_owned());
        }
        let mut problems = Vec::new();
        report.finish(text, &mut problems);
        problems
    }

    #[test]
    fn problems_come_in_the_order_of_the_file_with_their_lines() {
        let problems = reported("one\r\ntwo\rthree\n\nfive", &[(5, 1), (3, 1), (1, 2), (2, 1), (9, 1), (4, 1)]);
        let lines: Vec<_> = problems.iter().map(|problem| problem.excerpt.as_deref()).collect();
        assert_eq!(lines, [Some("one"), Some("two"), Some("three"), Some(""), Some("five"), None]);
    }

    #[test]
    fn an_excerpt_is_short_and_has_no_control_characters() {
        let excerpts = |text: &str| reported(text, &[(1, 200)]).remove(0).excerpt.unwrap();
        assert_eq!(excerpts("a\tb\u{1b}[1m\u{202e}c"), "a b\u{fffd}[1m\u{fffd}c");
        let cut = excerpts(&"é".repeat(MAX_EXCERPT + 1));
        assert_eq!((cut.chars().count(), cut.chars().last()), (MAX_EXCERPT, Some('…')));
        assert!(!excerpts(&"é".repeat(MAX_EXCERPT)).contains('…'));
    }

    #[test]
    fn a_problem_is_shown_with_a_mark_under_its_place() {
        let shown: Vec<String> = reported("a: b", &[(1, 4), (1, 80)]).iter().map(Problem::to_string).collect();
        assert_eq!(
            shown,
            [
                "rules.yaml:1:4: error: Wrong.\n  1 | a: b\n    |    ^",
                "rules.yaml:1:80: error: Wrong.\n  1 | a: b\n    |     ^",
            ]
        );
    }

    #[test]
    fn a_quoted_piece_is_cut() {
        assert_eq!(quoted("a\nb"), "`a\u{fffd}b`");
        assert_eq!(quoted(&"x".repeat(50)), format!("`{}…`", "x".repeat(39)));
    }
}
