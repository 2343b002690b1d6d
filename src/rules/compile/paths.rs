//! Wildcards that exempt or deny paths, and the spellings of a path with which a client gets around them.
//!
//! Tidegate and the server behind it may differ on which path a text is. `/static/..;/admin` is below `/static` here; a Tomcat cuts
//! off the `;` and answers it as `/admin`.

use super::{Compiler, Inherited, label};
use crate::model::Entry;
use crate::rules::Decides;
use crate::rules::problem::quoted;
use crate::rules::reading::{Form, Reading};
use crate::rules::tree::{Child, Node, Pattern};

/// What other servers do with these spellings.
const SPELLINGS: &str =
    "Some servers cut off what follows a `;` (`/..;/` is `/../` there) and take `%2f` and `\\` for `/`";

impl Compiler<'_> {
    /// Warns of each wildcard of this file that exempts or denies paths and is not guarded against other spellings.
    pub(super) fn other_spellings(&mut self, node: &Node, inherited: Inherited<'_>) {
        let is_of_file = |child: &&Child| usize::try_from(child.file) == Ok(inherited.file);
        for child in node.children.iter().filter(is_of_file) {
            let (Some(decides), Some(pattern)) = (child.decides(), child.pattern()) else { continue };
            let reading = inherited.readings.of(child.key.text().as_bytes()).map(AsRef::as_ref);
            if !is_of_paths(child, pattern, reading) {
                continue;
            }
            let key = child.key.example();
            let is_decided_so = |path: &str| {
                let chosen = node.child(inherited.readings, &Entry::new(key.clone(), path.to_owned()));
                chosen.and_then(Child::decides) == Some(decides)
            };
            let (spelled, what) = match decides {
                Decides::Exempt => {
                    (around_exempt(pattern).into_iter().find(|path| is_decided_so(path)), "also exempts")
                }
                Decides::Deny => {
                    (around_denied(pattern).into_iter().find(|path| !is_decided_so(path)), "does not deny")
                }
            };
            let Some(spelled) = spelled else { continue };
            let spelled = if child.is_hidden { "another spelling".to_owned() } else { quoted(&spelled) };
            let is_read = reading.is_some_and(|reading| reading.form == Form::Path);
            let todo = if is_read {
                "deny them in items before this one (`value: \"*;*\"`, `\"*%2F*\"` and `\"*%5C*\"` with `deny: true`), or have the gateway refuse them"
                    .to_owned()
            } else {
                format!(
                    "write `entries: {{ \"{}\": {{ as: path }} }}`, so that `//`, `/../` and `%61` are resolved, and have the gateway refuse the others",
                    child.key.text()
                )
            };
            let message = format!("{} {what} {spelled}. {SPELLINGS}: {todo}", quoted(&label(child)));
            self.warning(inherited.file, child.place, message);
        }
    }
}

/// Whether the values are paths: read as such, called so, or written so.
fn is_of_paths(child: &Child, pattern: &Pattern, reading: Option<&Reading>) -> bool {
    let is_wild = !pattern.is_literal() && pattern.text().bytes().any(|byte| !matches!(byte, b'*' | b'/'));
    let is_path = || match reading.map(|reading| reading.form) {
        Some(Form::Path) => true,
        Some(Form::Ip { .. }) => false,
        Some(Form::Text) | None => {
            pattern.text().starts_with('/') || child.key.text().to_ascii_lowercase().ends_with("path")
        }
    };
    is_wild && is_path()
}

/// What stands before the first wildcard, and what stands behind it without further ones.
fn ends(pattern: &Pattern) -> (&str, String) {
    let (before, behind) = pattern.text().split_once('*').unwrap_or((pattern.text(), ""));
    (before, behind.replace('*', ""))
}

/// Paths that the wildcard matches and that some servers take for others.
fn around_exempt(pattern: &Pattern) -> Vec<String> {
    let (before, behind) = ends(pattern);
    if before.trim_start_matches('/').is_empty() {
        // `*.css`: what stands before the end is a path of its own.
        return ["/x;", "/x%2f", "/x\\"].map(|path| format!("{path}{behind}")).into();
    }
    ["..;/", "..%2f", "..\\"].map(|up| format!("{before}{up}x{behind}")).into()
}

/// Paths that some servers take for one that the wildcard matches.
fn around_denied(pattern: &Pattern) -> Vec<String> {
    let (before, behind) = ends(pattern);
    let denied = format!("{}x{behind}", before.trim_start_matches('/'));
    ["/x/..;/", "/x/..%2f", "/x/..\\"]
        .map(|up| format!("{up}{denied}"))
        .into_iter()
        .chain([format!("/{denied};x")])
        .collect()
}
