//! Conversion of text to lower case.

use std::borrow::Cow;

/// Converts letters to lower case one by one, so that a part of the text converts in the same way alone. Other characters and
/// bytes that are not UTF-8 stay.
pub fn lower(value: Cow<'_, [u8]>) -> Cow<'_, [u8]> {
    if value.iter().all(|byte| byte.is_ascii() && !byte.is_ascii_uppercase()) {
        return value;
    }
    let mut bytes = Vec::with_capacity(value.len());
    for chunk in value.utf8_chunks() {
        bytes.extend_from_slice(lower_text(chunk.valid()).as_bytes());
        bytes.extend_from_slice(chunk.invalid());
    }
    Cow::Owned(bytes)
}

/// Converts a text to lower case, letter by letter.
pub fn lower_text(text: &str) -> String {
    text.chars().flat_map(char::to_lowercase).collect()
}
