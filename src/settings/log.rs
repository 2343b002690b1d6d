//! Settings of the log: minimum severity and format.

use super::values::Setting;

/// Minimum severity that is logged, by the reference's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogSeverity(pub tracing::Level);

impl LogSeverity {
    /// Accepted names, in words.
    pub const NAMES: &'static str = "trace, debug, info, warn or error";

    /// Returns the level named `text`, in any case; `None` if there is none.
    pub fn named(text: &str) -> Option<Self> {
        Some(Self(match text.to_ascii_lowercase().as_str() {
            "trace" => tracing::Level::TRACE,
            "debug" => tracing::Level::DEBUG,
            "info" => tracing::Level::INFO,
            "warn" | "warning" => tracing::Level::WARN,
            "error" | "fatal" | "panic" => tracing::Level::ERROR,
            _ => return None,
        }))
    }
}

impl Setting for LogSeverity {
    const TAKES: &'static str = Self::NAMES;
    fn parse(text: &str) -> Option<Self> {
        Self::named(text)
    }
}

/// Format of a log line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    /// Text for people.
    Text,
    /// One JSON object per line, for programs.
    Json,
}

impl LogFormat {
    /// Returns the format named `text`, in any case; `None` if there is none.
    pub fn named(text: &str) -> Option<Self> {
        let all = [("text", Self::Text), ("json", Self::Json)];
        all.into_iter().find(|(name, _)| text.eq_ignore_ascii_case(name)).map(|(_, format)| format)
    }
}

impl Setting for LogFormat {
    const TAKES: &'static str = "text or json";
    const EMPTY_IS_DEFAULT: bool = true;
    fn parse(text: &str) -> Option<Self> {
        Self::named(text)
    }
}
