//! User and password for Redis, which may change while the process runs.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use arc_swap::ArcSwap;

use crate::file::{Named, Unusable};

/// Credentials that may be read again from their file, and are never printed.
pub struct Credentials {
    file: Option<Named>,
    known: ArcSwap<LoginPair>,
    /// Number of changes. `known` is at least as new: it is stored first.
    generation: AtomicU64,
}

/// The present and the previous login.
pub struct LoginPair {
    /// The present login.
    pub now: Login,
    /// The login before the last change: the server may not have changed yet.
    pub before: Option<Login>,
}

/// A user and a password. Without either, the server's default user without a password.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Login {
    /// The user; `None`: the server's default user.
    pub user: Option<String>,
    /// The password.
    pub password: Option<Secret>,
}

/// A text that `Debug` does not show.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// Wraps `text`.
    pub const fn new(text: String) -> Self {
        Self(text)
    }

    /// Returns the text. Only the server it belongs to may get it.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

impl Login {
    /// Parses `PASSWORD` or `USER:PASSWORD` from the first line of `text`. Everything after the first colon is the password,
    /// further colons included, so `:PASSWORD` allows a password with colons. Returns `None` if there is no password.
    pub fn parse(text: &str) -> Option<Self> {
        let line = text.lines().next().unwrap_or_default();
        let (user, password) = line.split_once(':').unwrap_or(("", line));
        Self::new(user, password)
    }

    /// Returns a login without a user if `user` is empty, and `None` if `password` is empty.
    pub fn new(user: &str, password: &str) -> Option<Self> {
        let user = (!user.is_empty()).then(|| user.to_owned());
        (!password.is_empty()).then(|| Self { user, password: Some(Secret::new(password.to_owned())) })
    }
}

impl Credentials {
    /// Creates credentials that do not change.
    pub fn fixed(login: Login) -> Self {
        Self::new(None, login)
    }

    /// Reads the login in `file`, in the form of [`Login::parse`]. Blocks while the file system does.
    ///
    /// # Errors
    /// If the file cannot be read or has no password.
    pub fn of_file(file: Named) -> Result<Self, Unusable> {
        let now = read(&file)?;
        Ok(Self::new(Some(file), now))
    }

    fn new(file: Option<Named>, now: Login) -> Self {
        let known = ArcSwap::from_pointee(LoginPair { now, before: None });
        Self { file, known, generation: AtomicU64::new(0) }
    }

    /// Returns the present and the previous login.
    pub fn known(&self) -> Arc<LoginPair> {
        self.known.load_full()
    }

    /// Returns the number of changes.
    pub fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// Returns true if the credentials come from a file, which may change.
    pub fn is_of_file(&self) -> bool {
        self.file.is_some()
    }

    /// Reads the file again. Returns true if its credentials differ from those in use. A file that cannot be read, or that is
    /// empty while it is being written, changes nothing. Blocks while the file system does.
    ///
    /// # Errors
    /// If the file cannot be read or has no password.
    pub fn read_again(&self) -> Result<bool, Unusable> {
        let Some(file) = &self.file else { return Ok(false) };
        let now = read(file)?;
        let known = self.known.load();
        if now == known.now {
            return Ok(false);
        }
        self.known.store(Arc::new(LoginPair { now, before: Some(known.now.clone()) }));
        self.generation.fetch_add(1, Ordering::Release);
        Ok(true)
    }
}

fn read(file: &Named) -> Result<Login, Unusable> {
    let expected = "PASSWORD or USER:PASSWORD in the first line, in UTF-8";
    file.read(expected, |bytes| std::str::from_utf8(bytes).ok().and_then(Login::parse))
}

#[cfg(test)]
mod tests {
    use std::fs::write;

    use super::{Credentials, Login};
    use crate::file::{MAX_SECRET, Named};

    fn login(password: &str) -> Login {
        Login::new("", password).unwrap()
    }

    #[test]
    fn a_file_that_changes_is_believed_and_one_that_is_empty_or_gone_is_not() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("auth");
        write(&file, "one").unwrap();
        let named = || Named::new("REDIS_AUTH_FILE", file.clone(), MAX_SECRET);
        let credentials = Credentials::of_file(named()).unwrap();
        assert!(!credentials.read_again().unwrap());
        write(&file, "two").unwrap();
        assert!(credentials.read_again().unwrap());
        let known = credentials.known();
        assert!(known.now == login("two"));
        assert!(known.before == Some(login("one")));
        write(&file, "").unwrap();
        assert!(credentials.read_again().is_err());
        assert!(Credentials::of_file(named()).is_err());
        std::fs::remove_file(&file).unwrap();
        assert!(credentials.read_again().is_err());
        assert_eq!(credentials.generation(), 1);
    }
}
