//! Normalisation of URL paths to one spelling.

use std::borrow::Cow;

const HEX: &[u8; 16] = b"0123456789ABCDEF";

/// Returns the normalised path of a URL. Removes query and fragment, decodes needless percent-encodings, encodes the bytes that
/// need it in upper-case digits (RFC 3986, 6.2.2), merges adjacent slashes and resolves dot segments.
///
/// Some servers treat more spellings as one path: a `;` and the text after it, an encoded slash, upper-case letters, a final
/// slash. These stay different here.
pub fn canonical(path: &[u8]) -> Cow<'_, [u8]> {
    if let Some(end) = end_of_canonical(path) {
        return Cow::Borrowed(&path[..end]);
    }
    let end = path.iter().position(|byte| matches!(byte, b'?' | b'#')).unwrap_or(path.len());
    Cow::Owned(resolved(&spelled(&path[..end])))
}

/// Role of a byte in a path.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ByteKind {
    /// Needs no other spelling.
    Plain,
    /// Needs no other spelling, but must be resolved at the beginning of a segment.
    Dot,
    Slash,
    /// Ends the path; not part of it.
    End,
    /// Needs another spelling.
    Encoded,
}

static KINDS: [ByteKind; 256] = kinds();

#[expect(clippy::cast_possible_truncation, reason = "there are 256 bytes")]
const fn kinds() -> [ByteKind; 256] {
    let mut kinds = [ByteKind::Encoded; 256];
    let mut byte = 0;
    while byte < 256 {
        kinds[byte] = match byte as u8 {
            b'/' => ByteKind::Slash,
            b'.' => ByteKind::Dot,
            b'?' | b'#' => ByteKind::End,
            plain if is_plain(plain) => ByteKind::Plain,
            _ => ByteKind::Encoded,
        };
        byte += 1;
    }
    kinds
}

/// Returns the length of a path that is already normalised, as most are; else `None`.
fn end_of_canonical(path: &[u8]) -> Option<usize> {
    if path.first() != Some(&b'/') {
        return None;
    }
    let mut before = ByteKind::Plain;
    for (at, &byte) in path.iter().enumerate() {
        let kind = KINDS[usize::from(byte)];
        match kind {
            ByteKind::Plain => {}
            ByteKind::Dot | ByteKind::Slash if before != ByteKind::Slash => {}
            ByteKind::End => return Some(at),
            ByteKind::Dot | ByteKind::Slash | ByteKind::Encoded => return None,
        }
        before = kind;
    }
    Some(path.len())
}

/// Returns true if `byte` needs no encoding in a path (RFC 3986, 3.3: `pchar`).
const fn is_plain(byte: u8) -> bool {
    byte.is_ascii_alphanumeric()
        || matches!(
            byte,
            b'-' | b'.'
                | b'_'
                | b'~'
                | b'!'
                | b'$'
                | b'&'
                | b'\''
                | b'('
                | b')'
                | b'*'
                | b'+'
                | b','
                | b';'
                | b'='
                | b':'
                | b'@'
        )
}

/// Returns the path with one spelling for each byte.
fn spelled(path: &[u8]) -> Vec<u8> {
    let mut spelled = Vec::with_capacity(path.len() + 8);
    let mut rest = path;
    while let Some((&first, tail)) = rest.split_first() {
        let decoded = match (first, tail) {
            (b'%', [high, low, ..]) => digit(*high).zip(digit(*low)).map(|(high, low)| high << 4 | low),
            _ => None,
        };
        rest = if decoded.is_some() { &tail[2..] } else { tail };
        match (decoded, first) {
            (Some(byte), _) if is_plain(byte) => spelled.push(byte),
            (None, byte) if byte == b'/' || is_plain(byte) => spelled.push(byte),
            (decoded, first) => {
                let byte = decoded.unwrap_or(first);
                spelled.extend_from_slice(&[b'%', HEX[usize::from(byte >> 4)], HEX[usize::from(byte & 15)]]);
            }
        }
    }
    spelled
}

/// Decodes the percent-encoded bytes beyond ASCII of a normalised path.
pub fn decoded(path: &[u8]) -> Vec<u8> {
    let mut decoded = Vec::with_capacity(path.len());
    let mut rest = path;
    while let Some((&first, tail)) = rest.split_first() {
        let byte = match (first, tail) {
            (b'%', [high, low, ..]) => digit(*high).zip(digit(*low)).map(|(high, low)| high << 4 | low),
            _ => None,
        };
        match byte.filter(|byte| !byte.is_ascii()) {
            Some(byte) => {
                decoded.push(byte);
                rest = &tail[2..];
            }
            None => {
                decoded.push(first);
                rest = tail;
            }
        }
    }
    decoded
}

fn digit(byte: u8) -> Option<u8> {
    char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok())
}

/// Removes empty and dot segments. `..` removes the segment before it; at the root it does nothing.
fn resolved(path: &[u8]) -> Vec<u8> {
    let mut segments: Vec<&[u8]> = Vec::new();
    let mut is_open = true;
    for segment in path.split(|&byte| byte == b'/') {
        is_open = matches!(segment, b"" | b"." | b"..");
        match segment {
            b"" | b"." => {}
            b".." => drop(segments.pop()),
            segment => segments.push(segment),
        }
    }
    let mut resolved = Vec::with_capacity(path.len() + 1);
    for segment in &segments {
        resolved.push(b'/');
        resolved.extend_from_slice(segment);
    }
    // Keep a final slash.
    if is_open {
        resolved.push(b'/');
    }
    resolved
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::canonical;

    fn of(path: &str) -> String {
        String::from_utf8(canonical(path.as_bytes()).into_owned()).expect("it is ASCII")
    }

    #[test]
    fn query_and_fragment_are_cut() {
        for path in ["/login", "/login?", "/login?x=1", "/login?x=/../y", "/login#top", "/login?a#b", "/login#a?b"] {
            assert_eq!(of(path), "/login", "{path}");
        }
    }

    #[test]
    fn slashes_and_dot_segments_collapse() {
        for path in
            ["//login", "/./login", "/a/../login", "/../login", "///./login", "/%2e/login", "/%2E%2e/login", "login"]
        {
            assert_eq!(of(path), "/login", "{path}");
        }
        assert_eq!(of("/a/"), "/a/", "a slash at the end stays");
        assert_eq!(of("/a//"), "/a/");
        assert_eq!(of("/a/."), "/a/");
        assert_eq!(of("/a/b/.."), "/a/");
        assert_eq!(of("/.well-known/x"), "/.well-known/x");
        assert_eq!(of("/..."), "/...");
        for root in ["", "/", "//", "/.", "/..", "?x", "#"] {
            assert_eq!(of(root), "/", "{root:?}");
        }
    }

    #[test]
    fn only_what_has_to_be_is_encoded() {
        assert_eq!(of("/%6Cogin"), "/login");
        assert_eq!(of("/%7euser/%41%2Db"), "/~user/A-b");
        assert_eq!(of("/a%2fb"), "/a%2Fb", "an encoded slash is no slash");
        assert_eq!(of("/a%3Fb%23"), "/a%3Fb%23");
        assert_eq!(of("/caf\u{e9}"), "/caf%C3%A9");
        assert_eq!(of("/caf%c3%a9"), "/caf%C3%A9");
        assert_eq!(of("/a b"), "/a%20b");
        assert_eq!(of("/100%"), "/100%25");
        assert_eq!(of("/100%25"), "/100%25");
        assert_eq!(of("/%zz%4"), "/%25zz%254");
        assert_eq!(of("/%2561"), "/%2561", "decoded once and not twice");
        assert_eq!(&*canonical(b"/\xff\x00"), b"/%FF%00");
    }

    proptest! {
        #[test]
        fn a_canonical_path_is_its_own(path in prop::collection::vec(prop_oneof![any::<u8>(), prop::sample::select(b"/.%2eE?#a".to_vec())], 0..60)) {
            let once = canonical(&path).into_owned();
            prop_assert_eq!(canonical(&once), &once[..]);
            prop_assert_eq!(once.first(), Some(&b'/'));
            prop_assert!(once.iter().all(u8::is_ascii_graphic));
            prop_assert!(!once.windows(2).any(|pair| pair == b"//"));
        }
    }
}
