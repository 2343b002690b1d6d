//! Warnings about texts that are compared as they are written, and look as if another program should have replaced or read them.

use super::Compiler;
use crate::normalize::network::Network;
use crate::normalize::{Form, Normalizer, Normalizers};
use crate::rulefile::document::{DescriptorNode, Document, RequestPart, RequestsNode};
use crate::rulefile::problem::{Placed, quoted};

/// Pieces of regular expressions that values hardly have otherwise.
const OF_REGEX: [&str; 13] =
    [".+", "/.*", "\\d", "\\w", "\\s", "\\.", "\\/", "\\b", "[0-9", "[a-z", "[A-Z", "[^", "(?"];
/// Keys whose values are texts of the gateway's own configuration, or networks.
const NO_ADDRESSES: [&str; 4] = ["generic_key", "header_match", "query_match", "masked_remote_address"];

/// A text in a rule file that is meant for another program.
#[derive(Clone, Copy)]
enum Foreign {
    Template,
    Variable,
    Format,
    Regex,
    Space,
}

/// Document whose texts are read.
#[derive(Clone, Copy)]
struct Texts<'d> {
    file: usize,
    normalizers: Option<&'d Normalizers>,
    requests: Option<&'d RequestsNode>,
}

impl Compiler<'_> {
    /// Warns about the texts of `document`, whose file has this index.
    pub(super) fn texts(&mut self, file: usize, document: &Document, normalizers: Option<&Normalizers>) {
        self.text(file, &document.domain, "the domain", false);
        let texts = Texts { file, normalizers, requests: document.requests.as_deref() };
        self.texts_of_items(texts, &document.descriptors);
        self.texts_of_items(texts, &document.known_good);
    }

    fn texts_of_items(&mut self, texts: Texts<'_>, items: &[DescriptorNode]) {
        let Texts { file, normalizers, requests } = texts;
        for item in items {
            if let Some(key) = &item.key {
                self.text(file, key, "the key", true);
                let normalizer = normalizers.and_then(|all| all.of(key.value.as_bytes())).map(AsRef::as_ref);
                if let Some(value) = &item.value {
                    self.text(file, value, "the value", true);
                    self.network(file, &key.value, value, normalizer);
                    self.never(file, &key.value, value, normalizer, requests);
                }
            }
            let listed = item.value_list.iter().flat_map(|list| &list.values);
            listed.for_each(|value| self.text(file, value, "the value", true));
            self.texts_of_items(texts, &item.descriptors);
        }
    }

    /// Warns if `text` looks like a template, a variable or a regular expression.
    fn text(&mut self, file: usize, text: &Placed<String>, what: &str, can_be_regex: bool) {
        let Some(foreign) = foreign(&text.value).filter(|foreign| can_be_regex || !matches!(foreign, Foreign::Regex))
        else {
            return;
        };
        let shown = quoted(&text.value);
        let message = match foreign {
            Foreign::Template => format!(
                "{what} {shown} looks like a template that nothing has filled in, and it is compared as written: render the file before Tidegate reads it"
            ),
            Foreign::Variable => format!(
                "{what} {shown} looks like a variable, and rule files have none, so it is compared as written: put the text itself here, for example with `envsubst`"
            ),
            Foreign::Format => format!(
                "{what} {shown} looks like a format string of Envoy, which only Envoy's own configuration fills in, and it is compared as written: remove `value` to match every value"
            ),
            Foreign::Regex => format!(
                "{what} {shown} looks like a regular expression, and it is compared as written: only `*` is a wildcard, for any text; write an item for each text"
            ),
            Foreign::Space => {
                format!("{what} {shown} begins or ends with a space, and it is compared with the space: remove it")
            }
        };
        self.warning(file, text.place, message);
    }

    /// Warns about a value that no path or method of a request has.
    fn never(
        &mut self,
        file: usize,
        key: &str,
        value: &Placed<String>,
        normalizer: Option<&Normalizer>,
        requests: Option<&RequestsNode>,
    ) {
        let text = value.value.as_str();
        let form = normalizer.map_or(Form::Text, |normalizer| normalizer.form);
        let entries = requests.and_then(|requests| requests.descriptors.as_ref()).into_iter().flat_map(|(_, all)| all);
        let mut read = entries.flatten().filter(|entry| entry.key.as_ref().is_some_and(|own| own.value == key));
        let part = read.next().and_then(|entry| entry.from.first()).map(|from| from.part);
        let is_path = form == Form::Path || part == Some(RequestPart::Path);
        let message = if is_path && !text.is_empty() && !text.starts_with(['/', '*']) {
            format!("{} equals no path, because a path begins with `/`: write `/{text}`", quoted(text))
        } else if is_path && form != Form::Path && text.contains(['?', '#']) {
            let path = text.split(['?', '#']).next().unwrap_or_default();
            format!("{} equals no path, because a path is compared without its query: write `{path}`", quoted(text))
        } else if part == Some(RequestPart::Path) && text.split('/').any(|segment| segment.starts_with(['{', ':'])) {
            format!(
                "{} has a parameter, and the path of a request is compared as written: write `*` in place of the parameter",
                quoted(text)
            )
        } else if part == Some(RequestPart::Method)
            && normalizer.is_none_or(|normalizer| !normalizer.is_lower)
            && text.bytes().any(|byte| byte.is_ascii_lowercase())
        {
            let method = text.to_ascii_uppercase();
            format!(
                "{} equals no method, because clients send methods in capital letters: write `{method}`",
                quoted(text)
            )
        } else {
            return;
        };
        self.warning(file, value.place, message);
    }

    /// Warns about a network or a list of addresses in `value`, which equals no address.
    fn network(&mut self, file: usize, key: &str, value: &Placed<String>, normalizer: Option<&Normalizer>) {
        // For a key with `as: ip`, a network is an error.
        if normalizer.is_some_and(Normalizer::is_of_addresses) || NO_ADDRESSES.contains(&key) {
            return;
        }
        let text = value.value.as_str();
        let is_network = |text: &str| Network::parse(text.trim()).is_some();
        let several = text.split(',').filter(|part| is_network(part)).count();
        let message = if text.contains(',') && several == text.split(',').count() {
            format!(
                "{} is compared as one text, which equals no address: write a list of addresses, `cidr: [{text}]`",
                quoted(text)
            )
        } else if text.contains('/') && is_network(text) {
            format!(
                "{} is compared as text, which equals no address: write `cidr: [{text}]` in place of `value`",
                quoted(text)
            )
        } else {
            return;
        };
        self.warning(file, value.place, message);
    }
}

/// Returns the kind of foreign text that `text` looks like.
fn foreign(text: &str) -> Option<Foreign> {
    let is_name = |text: &str| {
        !text.is_empty()
            && !text.starts_with(|first: char| first.is_ascii_digit())
            && text.bytes().all(|b| b.is_ascii_uppercase() || b.is_ascii_digit() || b == b'_')
    };
    let has_variable = text.split('$').skip(1).any(|rest| {
        let name = |open: char, close: char| rest.strip_prefix(open).and_then(|rest| rest.split_once(close));
        name('{', '}').or_else(|| name('(', ')')).is_some_and(|(name, _)| !name.is_empty())
    });
    // A whole value alone: a price such as `$A` is none of a path.
    let is_variable = text.strip_prefix('$').is_some_and(is_name);
    let is_format = text.strip_prefix('%').and_then(|rest| rest.strip_suffix('%')).is_some_and(|name| {
        let name = name.split('(').next().unwrap_or_default();
        is_name(name)
    });
    // A whole value such as `<user>` or `<YOUR_KEY>`.
    let is_placeholder = text
        .strip_prefix('<')
        .and_then(|rest| rest.strip_suffix('>'))
        .is_some_and(|name| !name.is_empty() && name.chars().all(|c| c.is_alphanumeric() || "-_ ".contains(c)));
    if is_placeholder || ["{{", "}}", "{%", "<%"].iter().any(|piece| text.contains(piece)) {
        Some(Foreign::Template)
    } else if has_variable || is_variable {
        Some(Foreign::Variable)
    } else if is_format {
        Some(Foreign::Format)
    } else if is_regex(text) {
        Some(Foreign::Regex)
    } else if text.trim() != text {
        Some(Foreign::Space)
    } else {
        None
    }
}

fn is_regex(text: &str) -> bool {
    let is_anchored = text.len() > 1 && (text.starts_with('^') || text.ends_with('$'));
    let has_choice = text.contains('|') && text.contains('(') && text.contains(')');
    is_anchored || has_choice || text.starts_with(".*") || OF_REGEX.iter().any(|piece| text.contains(piece))
}

#[cfg(test)]
mod tests {
    use super::{Foreign, foreign};

    #[test]
    fn a_text_for_another_program_is_recognised() {
        for (text, is_kind) in [
            ("{{ .Values.ip }}", (|kind| matches!(kind, Foreign::Template)) as fn(Foreign) -> bool),
            ("{% if x %}", |kind| matches!(kind, Foreign::Template)),
            ("<YOUR-KEY>", |kind| matches!(kind, Foreign::Template)),
            ("alice ", |kind| matches!(kind, Foreign::Space)),
            ("$IP_ADDRESS", |kind| matches!(kind, Foreign::Variable)),
            ("${IP}", |kind| matches!(kind, Foreign::Variable)),
            ("user-${ID}-x", |kind| matches!(kind, Foreign::Variable)),
            ("$(IP)", |kind| matches!(kind, Foreign::Variable)),
            ("%REQ(x-user)%", |kind| matches!(kind, Foreign::Format)),
            ("%DOWNSTREAM_REMOTE_ADDRESS%", |kind| matches!(kind, Foreign::Format)),
            ("^/api/v1/.*$", |kind| matches!(kind, Foreign::Regex)),
            ("^/api", |kind| matches!(kind, Foreign::Regex)),
            ("/api$", |kind| matches!(kind, Foreign::Regex)),
            ("/api/.*", |kind| matches!(kind, Foreign::Regex)),
            (".*", |kind| matches!(kind, Foreign::Regex)),
            ("/users/[0-9]+", |kind| matches!(kind, Foreign::Regex)),
            ("/(login|signup)", |kind| matches!(kind, Foreign::Regex)),
            ("\\d+", |kind| matches!(kind, Foreign::Regex)),
            ("example\\.com", |kind| matches!(kind, Foreign::Regex)),
        ] {
            assert!(foreign(text).is_some_and(is_kind), "{text}");
        }
    }

    #[test]
    fn an_ordinary_value_is_none() {
        for text in [
            "",
            "*",
            "/api/*",
            "*.example.com",
            "www.*",
            "v1.*",
            "$",
            "$5",
            "100%",
            "%2F",
            "50%off%",
            "a|b",
            "f(x)",
            "Mozilla/5.0 (X11; Linux x86_64)",
            "[::1]",
            "/search?q=a+b",
            "user@example.com",
            "/pkg.Svc/Method",
            "^",
            "C:\\Users",
            "10.0.0.0/8",
            "a{b}",
            "/items/{id}",
            "<>",
            "a <b>",
            "~",
            "1.2.3.4",
            "price$usd",
            "[a, b]",
        ] {
            assert!(foreign(text).is_none(), "{text}");
        }
    }
}
