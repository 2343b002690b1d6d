//! Fields of Envoy's messages in YAML or JSON.

use crate::rulefile::yaml::scalar::{Scalar, resolve};
use crate::rulefile::yaml::{Content, Node};

/// A value, or the reason for which it is not known without a running Envoy.
pub(super) type Known<T> = Result<T, String>;

/// Reading of one message.
pub(super) trait Fields<'t>: Sized {
    /// Returns the names of the fields and their values.
    fn fields(self) -> impl Iterator<Item = (&'t str, Node<'t>)>;
    /// Returns the field with this name, as protobuf spells it. Null is no value.
    fn field(self, name: &str) -> Option<Node<'t>>;
    /// Returns the text of a scalar.
    fn text(self) -> Option<&'t str>;
    /// Returns the items of a list; none for another value.
    fn items(self) -> impl Iterator<Item = Node<'t>>;
    /// Returns the text of a field.
    fn text_of(self, name: &str) -> Option<&'t str>;
    /// Returns the whole number of a field.
    fn number_of(self, name: &str) -> Option<i64>;
    /// Returns the boolean of a field.
    fn flag_of(self, name: &str) -> Option<bool>;
    /// Returns true if the message has this type.
    fn has_type(self, end: &str) -> bool;
}

impl<'t> Fields<'t> for Node<'t> {
    fn fields(self) -> impl Iterator<Item = (&'t str, Node<'t>)> {
        let mut nodes = if let Content::Mapping(nodes) = self.content() { Some(nodes) } else { None };
        std::iter::from_fn(move || nodes.as_mut()?.next_pair())
            .filter_map(|(key, value)| Some((key.text()?, value)))
            .filter(|(_, value)| !value.is_null())
    }

    fn field(self, name: &str) -> Option<Node<'t>> {
        self.fields().find(|(key, _)| is_name(key, name)).map(|(_, value)| value)
    }

    fn text(self) -> Option<&'t str> {
        match self.content() {
            Content::Plain(text) | Content::Text(text) => Some(text),
            _ => None,
        }
    }

    fn items(self) -> impl Iterator<Item = Node<'t>> {
        if let Content::List(nodes) = self.content() { Some(nodes) } else { None }.into_iter().flatten()
    }

    fn text_of(self, name: &str) -> Option<&'t str> {
        self.field(name)?.text()
    }

    fn number_of(self, name: &str) -> Option<i64> {
        self.text_of(name)?.parse().ok()
    }

    fn flag_of(self, name: &str) -> Option<bool> {
        match resolve(self.text_of(name)?) {
            Scalar::Bool(flag) => Some(flag),
            _ => None,
        }
    }

    fn has_type(self, end: &str) -> bool {
        self.text_of("@type").is_some_and(|name| name.ends_with(end))
    }
}

/// Returns true if `key` is the field `name`: `descriptor_value`, or `descriptorValue` in the JSON of protobuf.
pub(super) fn is_name(key: &str, name: &str) -> bool {
    let mut is_after_underscore = false;
    let camel = name.chars().filter_map(|c| {
        let upper = std::mem::replace(&mut is_after_underscore, c == '_');
        (c != '_').then(|| if upper { c.to_ascii_uppercase() } else { c })
    });
    key == name || key.chars().eq(camel)
}
