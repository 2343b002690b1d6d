//! Check for wildcards that exempt or deny paths, and for path spellings with which a client bypasses them.
//!
//! Tidegate and the server behind it may read a path differently. `/static/..;/admin` is below `/static` here. Tomcat
//! removes the `;` and serves `/admin`.

use super::{Compiler, Inherited};
use crate::model::Entry;
use crate::normalize::pattern::Pattern;
use crate::normalize::{Form, Normalizer};
use crate::rulefile::problem::quoted;
use crate::rules::Action;
use crate::rules::tree::{Child, TreeLevel};

/// Effect of these spellings on other servers, for the message.
const SPELLINGS: &str =
    "Some servers remove the text after a `;` (so `/..;/` becomes `/../`) and read `%2f` and `\\` as `/`";

impl Compiler<'_> {
    /// Warns about each wildcard of this file that exempts or denies paths and does not cover other spellings.
    pub(crate) fn other_spellings(&mut self, node: &TreeLevel, inherited: Inherited<'_>) {
        let is_of_file = |child: &&Child| usize::try_from(child.file) == Ok(inherited.file);
        for child in node.children.iter().filter(is_of_file) {
            let (Some(action), Some(pattern)) = (child.action(), child.pattern()) else { continue };
            let normalizer = inherited.normalizers.of(child.key.text().as_bytes()).map(AsRef::as_ref);
            if !is_of_paths(child, pattern, normalizer) {
                continue;
            }
            let key = child.key.example();
            let is_decided_so = |path: &str| {
                let chosen = node.child(inherited.normalizers, &Entry::new(key.clone(), path.to_owned()));
                chosen.and_then(Child::action) == Some(action)
            };
            let (spelled, what) = match action {
                Action::Exempt => (around_exempt(pattern).into_iter().find(|path| is_decided_so(path)), "also exempts"),
                Action::Deny => (around_denied(pattern).into_iter().find(|path| !is_decided_so(path)), "does not deny"),
            };
            let Some(spelled) = spelled else { continue };
            let spelled = if child.is_hidden { "another spelling".to_owned() } else { quoted(&spelled) };
            let is_read = normalizer.is_some_and(|normalizer| normalizer.form == Form::Path);
            let todo = if is_read {
                "deny these spellings in items before this one (`value: \"*;*\"`, `\"*%2F*\"` and `\"*%5C*\"` with `deny: true`), or make the gateway reject them"
                    .to_owned()
            } else {
                format!(
                    "write `entries: {{ \"{}\": {{ as: path }} }}`, which normalises `//`, `/../` and `%61`, and make the gateway reject the other spellings",
                    child.key.text()
                )
            };
            let message = format!("{} {what} {spelled}. {SPELLINGS}: {todo}", quoted(&child.label()));
            self.warning(inherited.file, child.place, message);
        }
    }
}

/// Returns true if `pattern` is a wildcard for paths: by `as: path`, by the name of the key, or by its first `/`.
fn is_of_paths(child: &Child, pattern: &Pattern, normalizer: Option<&Normalizer>) -> bool {
    let is_wild = !pattern.is_literal() && pattern.text().bytes().any(|byte| !matches!(byte, b'*' | b'/'));
    let is_path = || match normalizer.map(|normalizer| normalizer.form) {
        Some(Form::Path) => true,
        Some(Form::Ip { .. }) => false,
        Some(Form::Text) | None => {
            pattern.text().starts_with('/') || child.key.text().to_ascii_lowercase().ends_with("path")
        }
    };
    is_wild && is_path()
}

/// Returns the text before the first wildcard, and the text after it without further wildcards.
fn ends(pattern: &Pattern) -> (&str, String) {
    let (before, behind) = pattern.text().split_once('*').unwrap_or((pattern.text(), ""));
    (before, behind.replace('*', ""))
}

/// Returns paths that the wildcard matches and that some servers read as other paths.
fn around_exempt(pattern: &Pattern) -> Vec<String> {
    let (before, behind) = ends(pattern);
    if before.trim_start_matches('/').is_empty() {
        // `*.css`: the part before the suffix becomes a path of its own.
        return ["/x;", "/x%2f", "/x\\"].map(|path| format!("{path}{behind}")).into();
    }
    ["..;/", "..%2f", "..\\"].map(|up| format!("{before}{up}x{behind}")).into()
}

/// Returns paths that some servers read as a path that the wildcard matches.
fn around_denied(pattern: &Pattern) -> Vec<String> {
    let (before, behind) = ends(pattern);
    let denied = format!("{}x{behind}", before.trim_start_matches('/'));
    ["/x/..;/", "/x/..%2f", "/x/..\\"]
        .map(|up| format!("{up}{denied}"))
        .into_iter()
        .chain([format!("/{denied};x")])
        .collect()
}
