//! Removal of passwords from server messages: some servers repeat the arguments of a command that they refuse.

/// Minimum length at which a password that the server cut short is hidden: 4 bytes.
const SHORTEST: usize = 4;
/// Text after which Redis repeats the arguments of a command that it does not know, up to 128 bytes of them.
const ARGUMENTS: &str = "with args beginning with:";
/// Replacement of hidden text.
const HIDDEN: &str = "***";

/// Returns the server message `said` without the arguments that it repeats, and without each of `passwords` or its beginning.
pub fn hidden<'a>(said: &str, passwords: impl IntoIterator<Item = &'a str>) -> String {
    let mut text = match said.split_once(ARGUMENTS) {
        Some((before, _)) => format!("{before}{ARGUMENTS} {HIDDEN}"),
        None => said.to_owned(),
    };
    for password in passwords.into_iter().filter(|password| !password.is_empty()) {
        text = without(&text, password);
    }
    text
}

/// Replaces each occurrence of `password`, or of its beginning if that is long enough.
fn without(text: &str, password: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(next) = rest.chars().next() {
        let common = rest.bytes().zip(password.bytes()).take_while(|(found, hidden)| found == hidden).count();
        if common >= SHORTEST.min(password.len()) {
            shown.push_str(HIDDEN);
            let end = (common..=rest.len()).find(|end| rest.is_char_boundary(*end)).unwrap_or(rest.len());
            rest = rest.split_at(end).1;
        } else {
            shown.push(next);
            rest = rest.split_at(next.len_utf8()).1;
        }
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::hidden;

    #[test]
    fn a_password_is_hidden_whole_or_cut() {
        let said = |text: &str| hidden(text, ["hunter2", "päss", "x", ""]);
        assert_eq!(said("ERR what is 'hunter2' and hunter?"), "ERR what is '***' and ***?");
        assert_eq!(said("päss pä hunt hun"), "*** pä *** hun");
        assert_eq!(said("a x b"), "a *** b");
        assert_eq!(said("hunter2hunter2"), "******");
        assert_eq!(said(""), "");
    }

    #[test]
    fn repeated_arguments_are_hidden_whatever_they_are() {
        let said = "ERR unknown command 'HELLO', with args beginning with: '3' 'AUTH' 'default' 'hunter 2' ";
        assert_eq!(hidden(said, []), "ERR unknown command 'HELLO', with args beginning with: ***");
    }
}
