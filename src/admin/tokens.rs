//! Tokens of readers on other machines.
//!
//! A file of tokens has one token per line, `NAME:RIGHT:SECRET`. Empty lines and lines that begin with `#` are skipped. Only the hash of a
//! secret is kept. Hashes are compared in constant time, as `blake3::Hash` promises.

use std::fmt;
use std::sync::Arc;

use thiserror::Error;

/// Maximum number of tokens: 256.
const MOST_TOKENS: usize = 256;
/// Maximum number of characters of a name, and of a secret: 128 and 512.
const LONGEST_NAME: usize = 128;
const LONGEST_SECRET: usize = 512;
/// Minimum number of characters of a secret in base64: 43, the length of 32 bytes.
const LEAST_BASE64: usize = 43;
/// Minimum number of characters of a secret of hexadecimal digits only: 64, the length of 32 bytes.
const LEAST_HEX: usize = 64;

/// The expected form of a line.
const EXPECTED_LINE: &str = "expected NAME:RIGHT:SECRET, such as ann:read: and the output of `openssl rand -base64 32`";

/// The tokens of one file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdminTokens(Vec<Arc<AdminToken>>);

/// A token: whoever has its secret has its right.
#[derive(Debug, PartialEq, Eq)]
pub struct AdminToken {
    pub(super) name: Box<str>,
    pub(super) right: TokenRight,
    secret: SecretHash,
}

/// Right of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TokenRight {
    /// Reads; values of clients are masked.
    Read,
    /// Reads values of clients as they are. Each request is written to the log.
    ReadClear,
    /// Changes the state of the process, and reads as `Read`.
    Write,
}

/// Hash of a secret, which is not shown.
#[derive(PartialEq, Eq)]
struct SecretHash(blake3::Hash);

/// Errors in a file of tokens, with their lines. They quote nothing of the file, because that could be a secret.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{}", .0.join("; "))]
pub struct InvalidTokens(Vec<String>);

impl AdminTokens {
    /// Parses the content of a file.
    ///
    /// # Errors
    /// All errors, each with the number of its line and the expected text.
    pub fn parse(content: &[u8]) -> Result<Self, InvalidTokens> {
        let Ok(text) = std::str::from_utf8(content) else {
            return Err(InvalidTokens(vec!["expected text in UTF-8".to_owned()]));
        };
        let (mut tokens, mut wrong) = (Vec::<Arc<AdminToken>>::new(), Vec::new());
        let lines = (1..).zip(text.lines().map(str::trim));
        for (number, line) in lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#')) {
            let token = AdminToken::parse(line).and_then(|token| match token.clash(&tokens) {
                Some(clash) => Err(clash),
                None => Ok(token),
            });
            match token {
                Ok(token) => tokens.push(Arc::new(token)),
                Err(why) => wrong.push(format!("line {number}: {why}")),
            }
        }
        if tokens.is_empty() && wrong.is_empty() {
            wrong.push(format!("it has no token: {EXPECTED_LINE}"));
        }
        if tokens.len() > MOST_TOKENS {
            wrong.push(format!("it has {} tokens: expected at most {MOST_TOKENS}", tokens.len()));
        }
        if wrong.is_empty() { Ok(Self(tokens)) } else { Err(InvalidTokens(wrong)) }
    }

    /// Returns the number of tokens.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns true if there is no token.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the token with this secret. The time that this takes says nothing about the secrets.
    pub(super) fn find(&self, secret: &str) -> Option<Arc<AdminToken>> {
        let presented = SecretHash::of(secret);
        // All tokens are compared, also after one that is found.
        let compare =
            |found, token: &Arc<AdminToken>| if token.secret == presented { Some(Arc::clone(token)) } else { found };
        self.0.iter().fold(None, compare)
    }

    /// Returns true if `token` is one of these.
    pub(super) fn contains(&self, token: &AdminToken) -> bool {
        self.0.iter().any(|own| **own == *token)
    }
}

impl AdminToken {
    fn parse(line: &str) -> Result<Self, String> {
        let mut parts = line.splitn(3, ':');
        let (Some(name), Some(right), Some(secret)) = (parts.next(), parts.next(), parts.next()) else {
            return Err(EXPECTED_LINE.to_owned());
        };
        let is_of_name = |c: char| c.is_ascii_alphanumeric() || "-_.@".contains(c);
        if name.is_empty() || name.len() > LONGEST_NAME || !name.chars().all(is_of_name) {
            return Err(format!("NAME is expected to have 1 to {LONGEST_NAME} letters, digits and characters of -_.@"));
        }
        let right = TokenRight::ALL.into_iter().find(|known| known.name() == right);
        let right = right.ok_or("RIGHT is expected to be read, read-clear or write")?;
        let is_of_secret = |c: char| c.is_ascii_alphanumeric() || "+/-_=".contains(c);
        let is_hex = secret.chars().all(|c| c.is_ascii_hexdigit());
        let least = if is_hex { LEAST_HEX } else { LEAST_BASE64 };
        if !(least..=LONGEST_SECRET).contains(&secret.len()) || !secret.chars().all(is_of_secret) {
            return Err("SECRET is expected to be at least 32 random bytes in base64 or hexadecimal digits: write the output of `openssl rand -base64 32`".to_owned());
        }
        Ok(Self { name: name.into(), right, secret: SecretHash::of(secret) })
    }

    /// Returns the error for a token whose name or secret an earlier one has.
    fn clash(&self, earlier: &[Arc<Self>]) -> Option<String> {
        earlier.iter().find_map(|other| match (other.name == self.name, other.secret == self.secret) {
            (true, _) => Some(format!("an earlier line has the name {} too: expected another name", self.name)),
            (_, true) => Some(format!("the line of {} has the same secret: expected another secret", other.name)),
            _ => None,
        })
    }
}

impl TokenRight {
    const ALL: [Self; 3] = [Self::Read, Self::ReadClear, Self::Write];

    /// Returns the word in the file.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::ReadClear => "read-clear",
            Self::Write => "write",
        }
    }
}

impl SecretHash {
    fn of(secret: &str) -> Self {
        Self(blake3::hash(secret.as_bytes()))
    }
}

impl fmt::Debug for SecretHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECRET: &str = "q83vEjRWeJq83vEjRWeJq83vEjRWeJq83vEjRWeJq80=";
    const OTHER: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

    fn wrong(content: &str) -> String {
        AdminTokens::parse(content.as_bytes()).unwrap_err().to_string()
    }

    #[test]
    fn a_token_is_found_by_its_whole_secret_only() {
        let content = format!("# readers\n\nann:read:{SECRET}\r\n  ci:write:{OTHER}\n");
        let tokens = AdminTokens::parse(content.as_bytes()).unwrap();
        let found = |secret: &str| tokens.find(secret).map(|token| (token.name.to_string(), token.right));
        assert_eq!(found(SECRET), Some(("ann".to_owned(), TokenRight::Read)));
        assert_eq!(found(OTHER), Some(("ci".to_owned(), TokenRight::Write)));
        for secret in ["", &SECRET[..43], &format!("{SECRET}="), &SECRET.to_lowercase(), "ann"] {
            assert_eq!(found(secret), None, "{secret}");
        }
    }

    #[test]
    fn every_wrong_line_is_named_with_what_is_expected_and_never_quoted() {
        let content = format!(
            "ann:read\n{SECRET}:read:ann\nbob:admin:{SECRET}\ncy:read:{}\nd:read:{}\n",
            &SECRET[..42],
            &OTHER[..63]
        );
        let told = wrong(&content);
        let lines: Vec<_> = told.split("; ").collect();
        assert_eq!(lines.len(), 5, "{told}");
        for (number, (line, expected)) in lines
            .iter()
            .zip(["NAME:RIGHT:SECRET", "NAME is", "read, read-clear or write", "32 random bytes", "32 random bytes"])
            .enumerate()
        {
            assert!(line.starts_with(&format!("line {}: ", number + 1)) && line.contains(expected), "{line}");
        }
        assert!(!told.contains(&SECRET[..8]) && !told.contains(&OTHER[..16]), "{told}");
    }

    #[test]
    fn a_name_has_1_to_128_of_its_characters() {
        for (name, is_one) in
            [("", false), ("a", true), ("a b", false), (&"a".repeat(128), true), (&"a".repeat(129), false)]
        {
            let parsed = AdminTokens::parse(format!("{name}:read:{SECRET}").as_bytes());
            assert_eq!(parsed.is_ok(), is_one, "{name}");
        }
    }

    #[test]
    fn a_file_has_a_token_and_names_and_secrets_once() {
        assert!(wrong("# nothing\n").contains("it has no token: expected NAME:RIGHT:SECRET"));
        let same_name = wrong(&format!("ann:read:{SECRET}\nann:write:{OTHER}"));
        assert_eq!(same_name, "line 2: an earlier line has the name ann too: expected another name");
        let same_secret = wrong(&format!("ann:read:{SECRET}\nbob:write:{SECRET}"));
        assert_eq!(same_secret, "line 2: the line of ann has the same secret: expected another secret");
        assert_eq!(AdminTokens::parse(b"\xff").unwrap_err().to_string(), "expected text in UTF-8");
        let many: String = (0..257).map(|number| format!("n{number}:read:{number:0>64}\n")).collect();
        assert!(wrong(&many).contains("257 tokens: expected at most 256"));
    }

    #[test]
    fn nobody_reads_a_secret_by_accident() {
        let tokens = AdminTokens::parse(format!("ann:read-clear:{SECRET}").as_bytes()).unwrap();
        let shown = format!("{tokens:?}");
        assert!(shown.contains("***") && !shown.contains(&SECRET[..8]), "{shown}");
        assert!(!shown.contains(&blake3::hash(SECRET.as_bytes()).to_hex().to_string()[..8]), "{shown}");
    }
}
