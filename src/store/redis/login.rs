//! Login for Redis: a user and a password.

use std::fmt;

use redis::{Cmd, cmd};

/// Name of the server's default user.
const DEFAULT: &str = "default";

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

    /// Returns the command that begins RESP3 and authenticates.
    pub fn hello(&self) -> Cmd {
        let mut hello = cmd("HELLO");
        hello.arg(3);
        if let Some(password) = &self.password {
            hello.arg("AUTH").arg(self.user.as_deref().unwrap_or(DEFAULT)).arg(password.expose());
        }
        hello
    }

    /// Returns the command that authenticates, if there is a password. In RESP2 the default user is not named: Redis before 6 knows no users.
    pub fn auth(&self, is_resp2: bool) -> Option<Cmd> {
        let password = self.password.as_ref()?;
        let mut auth = cmd("AUTH");
        auth.arg(self.user.as_deref().filter(|user| !is_resp2 || *user != DEFAULT)).arg(password.expose());
        Some(auth)
    }
}
