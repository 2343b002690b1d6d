//! Secrets, which must not appear in a log, an error or a command line.

use super::values::Setting;
use crate::store::redis::login::Login;

/// A login in a variable; an empty value means none.
impl Setting for Option<Login> {
    const TAKES: &'static str = "PASSWORD or USER:PASSWORD, on one line";
    const IS_SECRET: bool = true;
    fn parse(text: &str) -> Option<Self> {
        match text.strip_suffix('\n').unwrap_or(text) {
            "" => Some(None),
            text if text.contains('\n') => None,
            text => Login::parse(text).map(Some),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Login;
    use crate::settings::values::Setting;

    fn read(text: &str) -> Option<(Option<String>, String)> {
        let password = |login: &Login| login.password.as_ref().map(|password| password.expose().to_owned());
        Login::parse(text).map(|read| (read.user.clone(), password(&read).expect("it has one")))
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
        assert_eq!(Option::<Login>::parse(""), Some(None));
        assert!(Option::<Login>::parse("hunter2\n").is_some_and(|read| read.is_some()));
        assert_eq!(Option::<Login>::parse("hunter2\nhunter3"), None);
        assert_eq!(Option::<Login>::parse("alice:"), None);
    }

    #[test]
    fn nobody_reads_a_secret_by_accident() {
        let login = Login::new("alice", "hunter2").expect("a password");
        assert_eq!(format!("{login:?}"), r#"Login { user: Some("alice"), password: Some(***) }"#);
    }
}
