//! Who we are to Redis: a user and a password that may change while we run.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use arc_swap::ArcSwap;

/// A password that may be read anew from its file, and is never printed.
pub struct Credentials {
    file: Option<File>,
    known: ArcSwap<Known>,
}

/// A file, and how to read what it says.
struct File {
    path: PathBuf,
    parse: fn(&str) -> Option<Login>,
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

impl Credentials {
    /// One that does not change.
    pub fn fixed(login: Login) -> Self {
        Self { file: None, known: ArcSwap::from_pointee(Known { now: login, before: None, generation: 0 }) }
    }

    /// What a file says, by `parse`.
    ///
    /// # Errors
    /// When the file cannot be read, or says nothing.
    pub fn of_file(path: PathBuf, parse: fn(&str) -> Option<Login>) -> io::Result<Self> {
        let file = File { path, parse };
        let now = file.read()?;
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

    /// Reads the file again. True when it says something else than before. A file that cannot be read, or says nothing while
    /// it is being written, changes nothing.
    ///
    /// # Errors
    /// When the file cannot be read, or says nothing.
    pub fn read_again(&self) -> io::Result<bool> {
        let Some(file) = &self.file else { return Ok(false) };
        let now = file.read()?;
        let known = self.known.load();
        if now == known.now {
            return Ok(false);
        }
        let generation = known.generation + 1;
        self.known.store(Arc::new(Known { now, before: Some(known.now.clone()), generation }));
        Ok(true)
    }
}

impl File {
    fn read(&self) -> io::Result<Login> {
        let text = std::fs::read_to_string(&self.path)?;
        (self.parse)(&text).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "its first line has no password"))
    }
}

#[cfg(test)]
mod tests {
    use std::fs::write;

    use super::{Credentials, Login};

    fn login(password: &str) -> Login {
        Login { user: None, password: Some(password.to_owned()) }
    }

    fn parse(text: &str) -> Option<Login> {
        (!text.is_empty()).then(|| login(text))
    }

    #[test]
    fn a_file_that_changes_is_believed_and_one_that_is_empty_or_gone_is_not() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("auth");
        write(&file, "one").unwrap();
        let credentials = Credentials::of_file(file.clone(), parse).unwrap();
        assert!(!credentials.read_again().unwrap());
        write(&file, "two").unwrap();
        assert!(credentials.read_again().unwrap());
        let known = credentials.known();
        assert!(known.now == login("two"));
        assert!(known.before == Some(login("one")));
        write(&file, "").unwrap();
        assert!(credentials.read_again().is_err());
        assert!(Credentials::of_file(file.clone(), parse).is_err());
        std::fs::remove_file(&file).unwrap();
        assert!(credentials.read_again().is_err());
        assert_eq!(credentials.generation(), 1);
    }
}
