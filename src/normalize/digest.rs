//! Keyed digests, which logs and counter keys show in place of sensitive values.

use std::fmt;

/// Minimum length of a secret: 16 bytes, the length of a shown digest.
const LEAST_SECRET: usize = 16;
/// Context string of BLAKE3's key derivation. It must be hard-coded, globally unique and application-specific.
const CONTEXT: &str = "tidegate 2026-11-21 digests of sensitive entries";

/// Key for the digests of sensitive values.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct KeySecret([u8; 32]);

impl KeySecret {
    /// Derives the key from the content of a secret file without surrounding white space. Returns `None` below 16 bytes.
    pub fn new(bytes: &[u8]) -> Option<Self> {
        let bytes = bytes.trim_ascii();
        (bytes.len() >= LEAST_SECRET).then(|| Self(blake3::derive_key(CONTEXT, bytes)))
    }
}

impl fmt::Debug for KeySecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

/// Key for the digests of a sensitive entry; `None` if the secret is not known, as in `tidegate check`.
#[derive(Clone, Copy, Debug)]
pub struct Digester(pub Option<KeySecret>);

impl Digester {
    /// Returns 128 bits of a keyed digest of `key` and `value`; the word `sensitive` without a secret. Nobody can compute it
    /// or test guessed values without the secret.
    pub fn digest(self, key: &[u8], value: &[u8]) -> String {
        self.digest_of(b"value", key, value)
    }

    /// Returns the digest of a wildcard or list whose values share a counter. It differs from the digest of every value.
    pub fn digest_of_shared(self, key: &[u8], text: &[u8]) -> String {
        self.digest_of(b"share", key, text)
    }

    fn digest_of(self, kind: &[u8; 5], key: &[u8], value: &[u8]) -> String {
        let Self(Some(KeySecret(secret))) = self else { return "sensitive".to_owned() };
        let mut hasher = blake3::Hasher::new_keyed(&secret);
        hasher.update(kind).update(&(key.len() as u64).to_le_bytes()).update(key).update(value);
        hasher.finalize().to_hex()[..32].to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_says_nothing_without_its_secret_and_differs_by_key() {
        let secret = |text: &str| Digester(KeySecret::new(text.as_bytes()));
        let (one, other) = (secret("0123456789abcdef"), secret("0123456789abcdeX"));
        assert_eq!(one.digest(b"k", b"v").len(), 32);
        assert_ne!(one.digest(b"k", b"v"), other.digest(b"k", b"v"));
        assert_ne!(one.digest(b"k", b"v"), one.digest(b"kv", b""));
        assert_eq!(KeySecret::new(b" 0123456789abcde\n"), None, "15 bytes are too few");
        assert_eq!(format!("{:?}", KeySecret::new(b"0123456789abcdef")), "Some(***)");
    }
}
