//! Escaping of characters that change how other text is displayed: in a log they could forge a line or reorder the text.

use std::borrow::Cow;
use std::fmt::Write;

/// Maximum text of one key or value: 128 bytes, as in metrics.
pub(super) const MOST_WORD: usize = 128;

/// Returns true for control characters, line separators, bidirectional marks (Unicode 16, `Bidi_Control`) and characters without width.
pub fn is_hidden(c: char) -> bool {
    let is_bidirectional =
        matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    let is_without_width = matches!(c, '\u{ad}' | '\u{200b}'..='\u{200d}' | '\u{2060}'..='\u{2065}' | '\u{feff}');
    is_bidirectional || is_without_width || matches!(c, '\u{2028}' | '\u{2029}') || c.is_control()
}

/// Replaces each hidden character by its escape, such as `\u{202e}`. Keeps line breaks and indents the line after each, so
/// that it cannot look like a separate log line. Keeps ESC if `keeps_esc` is true, for the colours of a terminal.
pub fn escaped(text: &str, keeps_esc: bool) -> Cow<'_, str> {
    let is_kept = |c: char| !is_hidden(c) || (keeps_esc && c == '\u{1b}');
    if text.chars().all(is_kept) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        match c {
            '\n' => shown.push_str("\n    "),
            c if is_kept(c) => shown.push(c),
            c => {
                let _ = write!(shown, "{}", c.escape_default());
            }
        }
    }
    Cow::Owned(shown)
}

/// Replaces each hidden character in JSON text by its JSON escape.
pub(super) fn escaped_json(json: String) -> String {
    if !json.chars().any(is_hidden) {
        return json;
    }
    let mut shown = String::with_capacity(json.len() + 16);
    for c in json.chars() {
        if is_hidden(c) {
            // All hidden characters are below U+10000, so each needs only one escape.
            let _ = write!(shown, "\\u{:04x}", u32::from(c));
        } else {
            shown.push(c);
        }
    }
    shown
}

/// Returns a key or value as text: its beginning, if it is long.
pub(super) fn word(bytes: &[u8]) -> Box<str> {
    // Cut before the conversion: a value may have megabytes. A character has at most four bytes.
    cut(&String::from_utf8_lossy(bytes.get(..MOST_WORD + 4).unwrap_or(bytes)))
}

/// Returns the beginning of a text, and a mark if it is not all. Characters that change how other text is shown are escaped.
pub(super) fn cut(text: &str) -> Box<str> {
    // Most are short and printable ASCII, and stay as they are.
    if text.len() <= MOST_WORD && text.bytes().all(|byte| matches!(byte, b' '..=b'~')) {
        return text.into();
    }
    let end = (0..=MOST_WORD.min(text.len())).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
    let line = text.get(..end).unwrap_or_default().replace('\n', "\\n");
    let mut shown = escaped(&line, false).into_owned();
    if end < text.len() {
        shown.push('…');
    }
    shown.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_hidden_is_shown_and_the_rest_stays() {
        let plain = "plain text, \u{e9}\u{4e2d}\u{1f600} and \"quotes\"";
        assert!(matches!(escaped(plain, false), Cow::Borrowed(_)));
        assert_eq!(
            escaped("a\u{202e}b\u{61c}\u{2069}c\0\r\t\u{7f}\u{9b}\u{2028}\u{200b}\u{feff}", false),
            "a\\u{202e}b\\u{61c}\\u{2069}c\\u{0}\\r\\t\\u{7f}\\u{9b}\\u{2028}\\u{200b}\\u{feff}"
        );
        assert_eq!(escaped("one\ntwo", false), "one\n    two");
        assert_eq!(escaped("\u{1b}[31mred", false), "\\u{1b}[31mred");
        assert_eq!(escaped("\u{1b}[31mred\u{7}", true), "\u{1b}[31mred\\u{7}");
    }

    #[test]
    fn a_word_is_kept_if_it_is_short_and_printable_and_is_else_escaped_and_cut() {
        let long = "x".repeat(MOST_WORD);
        for plain in ["", "user 42~", "{\"a\"}", long.as_str(), "\u{e9}\u{4e2d}"] {
            assert_eq!(&*word(plain.as_bytes()), plain);
        }
        for (text, shown) in
            [("a\nb", "a\\nb"), ("\u{7f}", "\\u{7f}"), ("\u{1f}", "\\u{1f}"), ("a\u{200b}", "a\\u{200b}")]
        {
            assert_eq!(&*cut(text), shown);
        }
        assert_eq!(*cut(&format!("{long}y")), format!("{long}…"));
        assert_eq!(&*word(b"\xff"), "\u{fffd}");
    }

    #[test]
    fn json_stays_the_same_json() {
        let text = "a\u{202e}b\u{61c}\u{200e}\u{2066}\u{7f}\u{9b}\u{2029}\n\"\\";
        let json = escaped_json(serde_json::Value::from(text).to_string());
        assert!(!json.chars().any(is_hidden), "{json:?}");
        assert_eq!(serde_json::from_str::<String>(&json).unwrap(), text);
    }
}
