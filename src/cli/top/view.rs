//! State of a live table, which keys change: its order, its filter, and whether it stands still.

use std::fmt;

/// Key that ends a filter: Enter.
const ENTER: u8 = b'\n';
/// Key that gives a filter up: Escape.
const ESCAPE: u8 = 0x1b;
/// Keys that erase the last letter of a filter: Delete and Backspace.
const ERASE: [u8; 2] = [0x7f, 0x08];

/// State of the table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct View {
    /// True if those who ask most come first.
    pub(super) is_by_asked: bool,
    /// Text that a shown line contains.
    pub(super) filter: String,
    /// True while keys are letters of the filter.
    is_typing: bool,
    /// True if the table stands still.
    pub(super) is_frozen: bool,
}

/// Consequence of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Effect {
    /// The command ends.
    Quit,
    /// The instances are asked again.
    Ask,
    /// The table is shown again.
    Show,
}

impl View {
    /// Returns the state at the start.
    pub(super) fn new(is_by_asked: bool) -> Self {
        Self { is_by_asked, ..Self::default() }
    }

    /// Returns the order of the table, as the instances are asked for it.
    pub(super) const fn sort(&self) -> &'static str {
        if self.is_by_asked { "asked" } else { "refused" }
    }

    /// Takes a key.
    pub(super) fn press(&mut self, key: u8) -> Effect {
        if self.is_typing {
            return self.type_letter(key);
        }
        match key {
            b'q' => Effect::Quit,
            b's' => {
                self.is_by_asked = !self.is_by_asked;
                self.is_frozen = false;
                Effect::Ask
            }
            b'/' => {
                self.filter.clear();
                self.is_typing = true;
                Effect::Show
            }
            b'f' | b' ' => {
                self.is_frozen = !self.is_frozen;
                if self.is_frozen { Effect::Show } else { Effect::Ask }
            }
            _ => Effect::Show,
        }
    }

    fn type_letter(&mut self, key: u8) -> Effect {
        match key {
            ENTER => self.is_typing = false,
            ESCAPE => {
                self.is_typing = false;
                self.filter.clear();
            }
            _ if ERASE.contains(&key) => _ = self.filter.pop(),
            b' '..=b'~' => self.filter.push(key.into()),
            _ => {}
        }
        // More lines are asked for where some are left out.
        if self.is_typing { Effect::Show } else { Effect::Ask }
    }
}

/// Writes the line below the table.
impl fmt::Display for View {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_typing {
            return write!(f, "show lines with: {}_  (Enter: done, Esc: all lines)", self.filter);
        }
        if self.is_frozen {
            write!(f, "FROZEN  ")?;
        }
        if !self.filter.is_empty() {
            write!(f, "only lines with {:?}  ", self.filter)?;
        }
        let other = if self.is_by_asked { "refused" } else { "asked" };
        let freeze = if self.is_frozen { "go on" } else { "freeze" };
        write!(f, "s: sort by {other}   /: filter   f: {freeze}   q: quit")
    }
}

#[cfg(test)]
mod tests {
    use super::{Effect, View};

    fn press(view: &mut View, keys: &str) -> Vec<Effect> {
        keys.bytes().map(|key| view.press(key)).collect()
    }

    #[test]
    fn keys_sort_filter_freeze_and_quit() {
        let mut view = View::default();
        assert_eq!(press(&mut view, "s"), [Effect::Ask]);
        assert_eq!(view.sort(), "asked");
        assert_eq!(press(&mut view, "f"), [Effect::Show]);
        assert!(view.is_frozen && view.to_string().starts_with("FROZEN"));
        assert_eq!(press(&mut view, "f"), [Effect::Ask], "it goes on with new numbers");
        assert_eq!(press(&mut view, "x"), [Effect::Show], "another key changes nothing");
        assert_eq!(press(&mut view, "q"), [Effect::Quit]);
    }

    #[test]
    fn a_filter_is_typed_until_enter_and_given_up_by_escape() {
        let mut view = View::default();
        // Letters that are keys elsewhere are letters here, and what is no letter is none.
        assert_eq!(press(&mut view, "/sq\u{1}x"), [Effect::Show; 5]);
        assert_eq!(view.to_string(), "show lines with: sqx_  (Enter: done, Esc: all lines)");
        assert_eq!(press(&mut view, "\u{7f}\n"), [Effect::Show, Effect::Ask]);
        assert_eq!(view.filter, "sq");
        assert!(view.to_string().starts_with("only lines with \"sq\""));
        assert_eq!(press(&mut view, "/a\u{1b}"), [Effect::Show, Effect::Show, Effect::Ask]);
        assert_eq!(view, View::default());
    }
}
