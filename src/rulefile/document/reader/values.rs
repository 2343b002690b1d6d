//! Reader for single values: texts, numbers, flags, words and durations. Reports values of a wrong type.

use super::{MapEntry, Reader, TEXT_BYTES};
use crate::model::Micros;
use crate::rulefile::document::keys::advice;
use crate::rulefile::problem::{Placed, quoted};
use crate::rulefile::yaml::scalar::{Scalar, resolve};
use crate::rulefile::yaml::{Content, Node, Nodes};

impl<'t> Reader<'_, 't> {
    /// Returns a text as spelled in the file; `None` if null, empty or wrong.
    pub(crate) fn text(&mut self, entry: MapEntry<'t>) -> Option<Placed<String>> {
        let text = self.spelled(entry, "a text")?;
        self.take(TEXT_BYTES.saturating_add(text.len()), entry.place);
        let value = if self.is_building { text.to_owned() } else { String::new() };
        Some(Placed { value, place: entry.value.place })
    }

    /// Returns a 32-bit whole number; `None` if null or wrong.
    pub(crate) fn number(&mut self, entry: MapEntry<'t>) -> Option<Placed<u32>> {
        let MapEntry { name, value: node, .. } = entry;
        let place = node.place;
        if let Content::Plain(text) = node.content() {
            match resolve(text) {
                Scalar::Null => return None,
                Scalar::Int { value, leading_zero } => {
                    if let Ok(value) = u32::try_from(value) {
                        if leading_zero && text.parse() != Ok(value) {
                            self.report.warning(place, || {
                                format!(
                                    "{} is octal because of its leading zero, so it means {value}: write `{value}`, or \
                                     remove the zero if you mean a decimal number.",
                                    quoted(text)
                                )
                            });
                        }
                        return Some(Placed { value, place });
                    }
                }
                _ => {}
            }
        }
        let hint = match node.content() {
            Content::Text(text) if matches!(resolve(text), Scalar::Int { .. }) => ", without quotes",
            _ => "",
        };
        let (least, most) = match name {
            "v4_prefix" => (0, 32),
            "v6_prefix" => (0, 128),
            "burst" | "cost" | "request_cost" | "unit_multiplier" | "times" => (1, u32::MAX),
            _ => (0, u32::MAX),
        };
        self.wrong(name, node, &format!("a whole number from {least} to {most}{hint}"));
        None
    }

    /// Returns a flag; `false` if null or wrong.
    pub(crate) fn flag(&mut self, entry: MapEntry<'t>) -> bool {
        let hint = match entry.value.content() {
            Content::Plain(text) => match resolve(text) {
                Scalar::Bool(flag) => return flag,
                Scalar::Null => return false,
                _ => "",
            },
            Content::Text(text) if matches!(resolve(text), Scalar::Bool(_)) => ", without quotes",
            _ => "",
        };
        self.wrong(entry.name, entry.value, &format!("`true` or `false`{hint}"));
        false
    }

    /// Returns a flag that must have a value. Reports an empty value as an error.
    pub(crate) fn said(&mut self, entry: MapEntry<'t>) -> Option<bool> {
        if entry.value.is_null() {
            self.wrong(entry.name, entry.value, "`true` or `false`");
            return None;
        }
        Some(self.flag(entry))
    }

    /// Returns the value of one of the words in `all`; `None` if null, empty or wrong.
    pub(crate) fn word<T: Copy>(&mut self, entry: MapEntry<'t>, all: &[(&'static str, T)]) -> Option<Placed<T>> {
        let text = self.spelled(entry, "one word")?;
        let place = entry.value.place;
        if let Some((_, value)) = all.iter().find(|(word, _)| *word == text) {
            return Some(Placed { value: *value, place });
        }
        self.report.error(place, || {
            let words = all.iter().map(|(word, _)| *word);
            format!("{} is not a valid value of `{}`: {}", quoted(text), entry.name, advice(text, words))
        });
        None
    }

    /// Returns a duration; `None` if null, empty or wrong.
    pub(crate) fn length(&mut self, entry: MapEntry<'t>) -> Option<Placed<Micros>> {
        let text = self.spelled(entry, "a length of time")?;
        let place = entry.value.place;
        if let Some(value) = Micros::parse(text) {
            return Some(Placed { value, place });
        }
        self.report.error(place, || {
            format!(
                "{} is not a valid length of time for `{}`: write numbers with the units `ms`, `s`, `m`, `h` or `d`, like `250ms`, `2s` or `1h30m`.",
                quoted(text),
                entry.name
            )
        });
        None
    }

    /// Returns a percentage from 1% to 100%; `None` if null, empty or wrong.
    pub(crate) fn percent(&mut self, entry: MapEntry<'t>) -> Option<Placed<u8>> {
        let text = self.spelled(entry, "a percentage like `80%`")?;
        let place = entry.value.place;
        let digits = text.strip_suffix('%').filter(|digits| digits.bytes().all(|byte| byte.is_ascii_digit()));
        if let Some(value) = digits.and_then(|digits| digits.parse().ok()).filter(|value| (1..=100).contains(value)) {
            return Some(Placed { value, place });
        }
        self.report.error(place, || {
            let meant = text.parse().ok().filter(|percent| (1..=100_u8).contains(percent));
            let advice = meant
                .map_or("write a value from `1%` to `100%`.".to_owned(), |meant| format!("did you mean `{meant}%`?"));
            format!("{} is not a valid percentage for `{}`: {advice}", quoted(text), entry.name)
        });
        None
    }

    /// Returns the items of a list; `None` if null or wrong.
    pub(crate) fn list(&mut self, entry: MapEntry<'t>, example: &str) -> Option<Nodes<'t>> {
        match entry.value.content() {
            Content::List(items) => return Some(items),
            Content::Plain(_) if entry.value.is_null() => {}
            _ => self.wrong(entry.name, entry.value, &format!("a list of mappings like {example}")),
        }
        None
    }

    /// Reports a list item that must be a mapping.
    pub(crate) fn wrong_item(&mut self, list: MapEntry<'t>, item: Node<'t>, example: &str) {
        self.wrong_value(item, || {
            format!("Each item of `{}` must be a mapping like {example}, but this one is {}.", list.name, found(item))
        });
    }

    /// Reports a value of a type that its key does not take.
    pub(crate) fn wrong(&mut self, name: &str, value: Node<'t>, expected: &str) {
        self.wrong_value(value, || format!("`{name}` must be {expected}, but is {}.", found(value)));
    }

    pub(crate) fn wrong_value(&mut self, value: Node<'t>, message: impl FnOnce() -> String) {
        // A broken node is already reported.
        if !matches!(value.content(), Content::Broken) {
            self.report.error(value.place, message);
        }
    }

    pub(super) fn spelled(&mut self, entry: MapEntry<'t>, expected: &str) -> Option<&'t str> {
        match entry.value.content() {
            Content::Plain(_) | Content::Text(_) if entry.value.is_blank() => None,
            Content::Plain(text) | Content::Text(text) => Some(text),
            _ => {
                self.wrong(entry.name, entry.value, expected);
                None
            }
        }
    }
}

/// Returns a description of a node, to follow `is` in a message.
pub(crate) fn found(node: Node<'_>) -> String {
    match node.content() {
        Content::Text("") => "empty".to_owned(),
        Content::Text(text) => format!("the text {}", quoted(text)),
        Content::Plain(text) => match resolve(text) {
            Scalar::Null => "empty".to_owned(),
            Scalar::Bool(flag) => format!("{}, which YAML reads as {flag}", quoted(text)),
            Scalar::Int { .. } | Scalar::Float(_) => format!("the number {}", quoted(text)),
            Scalar::Text => format!("the text {}", quoted(text)),
        },
        Content::List(_) => "a list".to_owned(),
        Content::Mapping(_) => "a mapping".to_owned(),
        Content::Broken => "unreadable".to_owned(),
    }
}
