//! Who we are to Redis: a user and a password that may change while we run.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arc_swap::ArcSwap;

/// A password that may be read anew from its file, and is never printed.
pub struct Credentials {
    file: Option<PathBuf>,
    known: ArcSwap<Known>,
}

/// What is known of a user and a password.
pub struct Known {
    /// What to say now.
    pub now: Login,
    /// What was said before the last change: the server may not have changed yet.
    pub before: Option<Login>,
    /// How often it has changed.
    pub generation: u64,
}

/// A user and a password; neither is the server's default user without a password.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Login {
    /// The user, or the server's default one.
    pub user: Option<String>,
    /// The password.
    pub password: Option<String>,
}

impl Login {
    /// `password`, or `user:password`, as in `REDIS_AUTH`; nothing is no password.
    pub fn parse(text: &str) -> Self {
        match text.split_once(':') {
            _ if text.is_empty() => Self::default(),
            Some((user, password)) if !user.is_empty() => {
                Self { user: Some(user.to_owned()), password: Some(password.to_owned()) }
            }
            Some((_, password)) => Self { user: None, password: Some(password.to_owned()) },
            None => Self { user: None, password: Some(text.to_owned()) },
        }
    }
}

impl Credentials {
    /// One that does not change.
    pub fn fixed(login: Login) -> Self {
        Self { file: None, known: ArcSwap::from_pointee(Known { now: login, before: None, generation: 0 }) }
    }

    /// What the first line of a file says.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn of_file(file: PathBuf) -> io::Result<Self> {
        let now = read(&file)?;
        Ok(Self { file: Some(file), known: ArcSwap::from_pointee(Known { now, before: None, generation: 0 }) })
    }

    /// What is known.
    pub fn known(&self) -> Arc<Known> {
        self.known.load_full()
    }

    /// How often it has changed.
    pub fn generation(&self) -> u64 {
        self.known.load().generation
    }

    /// Reads the file again. True when it says something else than before. A file that cannot be read changes nothing.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn read_again(&self) -> io::Result<bool> {
        let Some(file) = &self.file else { return Ok(false) };
        let now = read(file)?;
        let known = self.known.load();
        if now == known.now {
            return Ok(false);
        }
        let generation = known.generation + 1;
        self.known.store(Arc::new(Known { now, before: Some(known.now.clone()), generation }));
        Ok(true)
    }
}

fn read(file: &Path) -> io::Result<Login> {
    let text = std::fs::read_to_string(file)?;
    Ok(Login::parse(text.lines().next().unwrap_or_default().trim_end_matches('\r')))
}

#[cfg(test)]
mod tests {
    use std::fs::write;

    use super::{Credentials, Login};

    fn login(user: Option<&str>, password: Option<&str>) -> Login {
        Login { user: user.map(str::to_owned), password: password.map(str::to_owned) }
    }

    #[test]
    fn a_login_is_a_password_or_a_user_and_a_password() {
        assert!(Login::parse("") == login(None, None));
        assert!(Login::parse("secret") == login(None, Some("secret")));
        assert!(Login::parse("tidegate:se:cret") == login(Some("tidegate"), Some("se:cret")));
        assert!(Login::parse(":se:cret") == login(None, Some("se:cret")));
    }

    #[test]
    fn a_file_that_changes_is_believed_and_one_that_vanishes_is_not() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("auth");
        write(&file, "one\n").unwrap();
        let credentials = Credentials::of_file(file.clone()).unwrap();
        assert!(!credentials.read_again().unwrap());
        write(&file, "tidegate:two\r\nmore\n").unwrap();
        assert!(credentials.read_again().unwrap());
        let known = credentials.known();
        assert!(known.now == login(Some("tidegate"), Some("two")));
        assert!(known.before == Some(login(None, Some("one"))));
        std::fs::remove_file(&file).unwrap();
        assert!(credentials.read_again().is_err());
        assert_eq!(credentials.generation(), 1);
    }
}
