//! What is wrong with a rule file, and where.

use std::fmt;
use std::sync::Arc;

/// A place in a rule file, counted from 1 as editors do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// The line.
    pub line: u32,
    /// The column, in characters.
    pub column: u32,
}

/// Something written at a place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placed<T> {
    /// What is written.
    pub value: T,
    /// Where.
    pub place: Place,
}

/// How much a problem matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// The load is refused.
    Error,
    /// The load goes on; the file probably does not mean what it says.
    Warning,
}

/// One thing wrong with a rule file, as a sentence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The file.
    pub file: Arc<str>,
    /// Where in it; `None` when the whole file is meant.
    pub place: Option<Place>,
    /// How much it matters.
    pub severity: Severity,
    /// What is wrong, and what to write instead.
    pub message: String,
    /// The line of the file that `place` is in, for the reader.
    pub excerpt: Option<String>,
}

/// `rules.yaml:3:7: error: ...`, and the line with a mark under the place.
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
            let indent = usize::try_from(place.column.saturating_sub(1)).unwrap_or(0);
            write!(f, "\n  {number} | {excerpt}\n  {:1$} | {2:3$}^", "", number.len(), "", indent)?;
        }
        Ok(())
    }
}

/// The most characters of a line that are shown beside a problem.
const LONGEST_EXCERPT: usize = 160;

impl Problem {
    /// A problem at a place of a file, with the line it is in.
    pub fn at(file: &Arc<str>, text: &[u8], place: Place, severity: Severity, message: String) -> Self {
        let line = usize::try_from(place.line.saturating_sub(1)).unwrap_or(usize::MAX);
        let excerpt = text.split(|&byte| byte == b'\n').nth(line).map(|line| {
            let line = String::from_utf8_lossy(&line[..line.len().min(4 * LONGEST_EXCERPT)]);
            let clean = |c: char| if c.is_control() { ' ' } else { c };
            line.trim_end().chars().take(LONGEST_EXCERPT).map(clean).collect()
        });
        Self { file: Arc::clone(file), place: Some(place), severity, message, excerpt }
    }
}
