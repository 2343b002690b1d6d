//! Texts with `*` wildcards.

use compact_str::CompactString;

/// A text in which `*` matches zero or more bytes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Pattern {
    /// Up to 24 bytes are stored in place.
    text: CompactString,
}

impl Pattern {
    /// Creates the pattern of `text`.
    pub fn new(text: String) -> Self {
        Self { text: text.into() }
    }

    /// Returns the pattern as written.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Returns a text that the pattern matches.
    pub fn example(&self) -> String {
        let shortest = self.text.replace('*', "");
        if shortest.is_empty() { "demo".to_owned() } else { shortest }
    }

    /// Returns true if the pattern has no wildcard.
    pub fn is_literal(&self) -> bool {
        !self.text.contains('*')
    }

    /// Returns the text before the first wildcard.
    pub fn prefix(&self) -> &[u8] {
        self.text.split('*').next().unwrap_or("").as_bytes()
    }

    /// Returns true if `bytes` starts with the first piece, ends with the last piece, and contains the other pieces between them
    /// in order without overlap. Each piece matches at its first position, which leaves the most room for the rest.
    pub fn matches(&self, bytes: &[u8]) -> bool {
        let Some((first, rest)) = self.text.split_once('*') else { return self.text.as_bytes() == bytes };
        let Some(bytes) = bytes.strip_prefix(first.as_bytes()) else { return false };
        let (middle, last) = rest.rsplit_once('*').unwrap_or(("", rest));
        let Some(mut bytes) = bytes.strip_suffix(last.as_bytes()) else { return false };
        for piece in middle.split('*') {
            match memchr::memmem::find(bytes, piece.as_bytes()) {
                Some(at) => bytes = &bytes[at + piece.len()..],
                None => return false,
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::Pattern;

    #[test]
    fn pieces_match_in_order_and_apart() {
        let matches = |pattern: &str, text: &str| Pattern::new(pattern.to_owned()).matches(text.as_bytes());
        assert!(matches("*", ""));
        assert!(matches("ab*ba", "abba"));
        assert!(!matches("ab*ba", "aba"));
        assert!(!matches("ab*ba", "abXYbaZ"));
        assert!(matches("/v*/users/*/edit", "/v/users//edit"));
        assert!(!matches("/v*/users/*/edit", "/v1/users/edit"));
        assert!(matches("*.example.org", ".example.org"));
        assert!(!matches("*a*a*", "a"));
        assert!(matches("**", "x"));
    }
}
