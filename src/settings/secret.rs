//! Secrets, which must not appear in a log, an error or a command line.

use std::fmt;

use super::values::Setting;

/// Text shown in place of a secret.
pub(super) const HIDDEN: &str = "***";

/// A text that `Debug` does not show.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

/// Credentials for a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Credentials {
    /// User name; `None` for the default user.
    pub user: Option<String>,
    /// Password of the user.
    pub password: Secret,
}

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
        f.write_str(HIDDEN)
    }
}

impl Credentials {
    /// Parses `PASSWORD` or `USER:PASSWORD` from the first line of `text`. Everything after the first colon is the password,
    /// further colons included, so `:PASSWORD` allows a password with colons. Returns `None` if there is no password.
    pub fn parse(text: &str) -> Option<Self> {
        let line = text.lines().next().unwrap_or_default();
        let (user, password) = line.split_once(':').unwrap_or(("", line));
        Self::of(user, password)
    }

    /// Returns credentials without a user if `user` is empty, and `None` if `password` is empty.
    pub(super) fn of(user: &str, password: &str) -> Option<Self> {
        let user = (!user.is_empty()).then(|| user.to_owned());
        (!password.is_empty()).then(|| Self { user, password: Secret::new(password.to_owned()) })
    }
}

/// Credentials in a variable; an empty value means none.
impl Setting for Option<Credentials> {
    const TAKES: &'static str = "PASSWORD or USER:PASSWORD, on one line";
    const IS_SECRET: bool = true;
    fn parse(text: &str) -> Option<Self> {
        match text.strip_suffix('\n').unwrap_or(text) {
            "" => Some(None),
            text if text.contains('\n') => None,
            text => Credentials::parse(text).map(Some),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Credentials, Secret};
    use crate::settings::values::Setting;

    fn read(text: &str) -> Option<(Option<String>, String)> {
        Credentials::parse(text).map(|read| (read.user, read.password.expose().to_owned()))
    }

    #[test]
    fn a_password_may_have_a_user_before_it_and_a_line_end_behind_it() {
        let with = |user: Option<&str>, password: &str| Some((user.map(str::to_owned), password.to_owned()));
        assert_eq!(read("hunter2"), with(None, "hunter2"));
        assert_eq!(read("alice:hunter2\n"), with(Some("alice"), "hunter2"));
        assert_eq!(read("alice:hunter2\r\nand more"), with(Some("alice"), "hunter2"));
        assert_eq!(read(":hun:ter2"), with(None, "hun:ter2"));
        assert_eq!(read(" hunter 2 "), with(None, " hunter 2 "));
        for nothing in ["", "\n", "alice:", ":", "\nhunter2"] {
            assert_eq!(read(nothing), None, "{nothing:?}");
        }
    }

    #[test]
    fn a_variable_may_be_empty_and_has_one_line() {
        assert_eq!(Option::<Credentials>::parse(""), Some(None));
        assert!(Option::<Credentials>::parse("hunter2\n").is_some_and(|read| read.is_some()));
        assert_eq!(Option::<Credentials>::parse("hunter2\nhunter3"), None);
        assert_eq!(Option::<Credentials>::parse("alice:"), None);
    }

    #[test]
    fn nobody_reads_a_secret_by_accident() {
        let credentials = Credentials { user: Some("alice".to_owned()), password: Secret::new("hunter2".to_owned()) };
        assert_eq!(format!("{credentials:?}"), r#"Credentials { user: Some("alice"), password: *** }"#);
    }
}
