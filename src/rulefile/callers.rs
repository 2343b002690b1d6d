//! Compiler of the file of callers: names in certificates, and what each is granted.

use std::sync::Arc;

use super::compile::InvalidRules;
use super::document::{self, CallerNode};
use super::documents::File;
use super::problem::{Placed, Problem, Report, quoted};
use crate::model::{CallerName, Callers, Grant, GrantedDomains, PeerName};
use crate::rules::tree::Position;

/// Maximum size of a file of callers: 1 MiB. The maxima of names and domains fit, with room for comments.
pub const MAX_CALLERS_BYTES: usize = 1 << 20;
/// Maximum number of names in a file: 1,000, as in `GRPC_CLIENT_TLS_SAN`. Each is compared with the names of each connection.
const MAX_NAMES: usize = 1_000;
/// Maximum number of domains in all items of a file: 10,000.
const MAX_DOMAINS: usize = 10_000;

/// Name of callers without a certificate.
const ANONYMOUS: &str = "anonymous";

/// Compiles a file of callers. Returns its warnings too.
///
/// # Errors
/// Every error of the file with its place, and the warnings with them.
///
/// ```
/// use tidegate::rulefile::File;
/// use tidegate::rulefile::callers::compile;
///
/// let file = |text: &str| File { name: "callers.yaml".into(), bytes: text.into() };
/// let (callers, _) = compile(&file("callers: [{ names: [anonymous], domains: [edge] }]\n"))?;
/// assert!(callers.rights(callers.anonymous(), "edge").is_some());
///
/// let problems = compile(&file("callers: [{ name: [anonymous], domains: [edge] }]\n")).unwrap_err().to_string();
/// assert!(problems.contains("did you mean `names`?"), "{problems}");
/// # Ok::<(), tidegate::rulefile::InvalidRules>(())
/// ```
pub fn compile(file: &File) -> Result<(Callers, Vec<Problem>), InvalidRules> {
    // Rights that do not count as written are errors, because a gateway without its rights limits nothing.
    let mut report = Report::strict(&file.name);
    let (nodes, text) = document::read_callers(&file.bytes, &mut report);
    let (mut names, mut domains) = (0, 0);
    let mut grants = Vec::with_capacity(nodes.len());
    for node in nodes {
        let place = node.place;
        names += node.names.len();
        domains += node.domains.len();
        for (number, most, what) in [(names, MAX_NAMES, "names"), (domains, MAX_DOMAINS, "domains")] {
            if number > most {
                report.error(place, || {
                    format!("The file has more than {most} `{what}` up to this item: remove some, or use wildcards.")
                });
            }
        }
        grants.push(grant(node, &mut report));
    }
    if grants.is_empty() && !report.has_error() {
        report.warning(Position { line: 1, column: 1 }, || {
            "The file grants nothing, so every call is answered with PERMISSION_DENIED, and an Envoy without `failure_mode_deny` admits the requests: add the names of your callers."
                .to_owned()
        });
    }
    let has_error = report.has_error();
    let mut problems = Vec::new();
    report.finish(text, &mut problems);
    if has_error { Err(InvalidRules { problems }) } else { Ok((Callers::new(grants), problems)) }
}

/// Returns a file of callers with this one error, which concerns the whole file.
pub fn unusable(file: &Arc<str>, message: String) -> InvalidRules {
    let severity = super::problem::Severity::Error;
    InvalidRules { problems: vec![Problem { file: Arc::clone(file), place: None, severity, message, excerpt: None }] }
}

fn grant(node: CallerNode, report: &mut Report) -> Grant {
    let names = node.names.iter().filter_map(|name| caller_name(name, report)).collect();
    let is_all = node.domains.iter().any(|domain| domain.value == "*");
    let domains = if is_all {
        GrantedDomains::All
    } else {
        GrantedDomains::These(node.domains.into_iter().map(|domain| domain.value.into()).collect())
    };
    Grant { names, domains, rights: node.rights }
}

fn caller_name(Placed { value, place }: &Placed<String>, report: &mut Report) -> Option<CallerName> {
    if value == ANONYMOUS {
        return Some(CallerName::Anonymous);
    }
    let Some(name) = PeerName::parse(value) else {
        report.error(*place, || {
            let hint = if value == "*" { "; no name stands for every caller, so that a new client of the CA has no rights by itself" } else { "" };
            format!(
                "{} is not a name of a caller: write a DNS name (`*.edge.example.com`: one whole label before the rest), an IP address, a URI like `spiffe://cluster.local/ns/edge/sa/envoy`, or `anonymous`{hint}.",
                quoted(value)
            )
        });
        return None;
    };
    if matches!(name, PeerName::Dns(_)) && document::is_near(value, ANONYMOUS) {
        report.warning(*place, || {
            format!(
                "{} is read as a DNS name in a certificate: for callers without a certificate, write `anonymous`.",
                quoted(value)
            )
        });
    }
    Some(CallerName::Certificate(name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Rights;
    use crate::model::peer_name::Presented;

    fn read(text: &str) -> Result<(Callers, Vec<Problem>), InvalidRules> {
        compile(&File { name: "callers.yaml".into(), bytes: text.into() })
    }

    fn wrong(text: &str) -> String {
        read(text).unwrap_err().to_string()
    }

    #[test]
    fn names_domains_and_rights_are_granted_as_written() {
        let text = "callers:\n  - names: [spiffe://cluster.local/ns/gateways/sa/envoy, \"*.gateways.example.com\", 10.1.2.3]\n    domains: [edge, internal]\n    rights: [override, refund]\n  - names: [anonymous]\n    domains: [\"*\"]\n";
        let (callers, warnings) = read(text).unwrap();
        assert_eq!(warnings, []);
        for name in [
            Presented::Uri("spiffe://cluster.local/ns/gateways/sa/envoy"),
            Presented::Dns("a.gateways.example.com"),
            Presented::Ip([10, 1, 2, 3].into()),
        ] {
            let grants = callers.of(&[name]);
            assert_eq!(callers.rights(&grants, "edge"), Some(Rights::ALL));
            assert_eq!(callers.rights(&grants, "internal"), Some(Rights::ALL));
            assert_eq!(callers.rights(&grants, "other"), None);
        }
        assert_eq!(callers.rights(callers.anonymous(), "other"), Some(Rights::default()));
    }

    #[test]
    fn errors_name_the_place_and_what_to_write() {
        for (text, place, says) in [
            ("", "1:1", "A file of callers must be a mapping"),
            ("[]", "1:1", "A file of callers must be a mapping"),
            ("{}", "1:1", "The file has no `callers`"),
            ("callers:\n", "1:", "`callers` must be a list of mappings"),
            ("caller:\n  - names: [a]\n    domains: [b]\n", "1:1", "did you mean `callers`?"),
            ("callers:\n  - names: [a]\n", "2:5", "has no `domains`"),
            ("callers:\n  - domains: [a]\n", "2:5", "has no `names`"),
            ("callers:\n  - names: a\n    domains: [b]\n", "2:12", "`names` must be a list like"),
            ("callers:\n  - names: [a]\n    domain: [b]\n", "3:5", "did you mean `domains`?"),
            ("callers:\n  - names: [\"*\"]\n    domains: [b]\n", "2:13", "no name stands for every caller"),
            ("callers:\n  - names: [en*.edge]\n    domains: [b]\n", "2:13", "`en*.edge` is not a name of a caller"),
            ("callers:\n  - names: [a]\n    domains: [b]\n    rights: [overide]\n", "4:14", "did you mean `override`?"),
            (
                "callers:\n  - names: [a]\n    domains: [b]\n    rights: refund\n",
                "4:13",
                "`rights` must be a list of rights",
            ),
            ("callers:\n  - names: [a]\n    domains: [b]\n    right: [refund]\n", "4:5", "did you mean `rights`?"),
            (
                "callers:\n  - names: [a]\n    domains: [b]\ndomain: edge\n",
                "4:1",
                "is not a known key at the top of a file of callers",
            ),
            (
                "callers:\n  - names: [\"\"]\n    domains: [b]\n",
                "2:13",
                "Each item of `names` must be a text, but this one is empty",
            ),
            (
                "callers:\n  - names: [a]\n    domains: [b]\ncallers: []\n",
                "4:1",
                "error: `callers` is already set on line 1",
            ),
            (
                "callers:\n  - names: [a]\n    names: [c]\n    domains: [b]\n",
                "3:5",
                "error: `names` is already set on line 2",
            ),
            (
                "callers:\n  - names: [a]\n    domains: [b]\n---\ncallers: []\n",
                "4:1",
                "error: A second document begins here, and it is not read",
            ),
        ] {
            let found = wrong(text);
            assert!(found.starts_with(&format!("callers.yaml:{place}")) && found.contains(says), "{text:?}: {found}");
        }
        let many: Vec<_> = (0..=MAX_NAMES).map(|name| format!("n{name}")).collect();
        let found = wrong(&format!("callers:\n  - names: [{}]\n    domains: [b]\n", many.join(",")));
        assert!(found.contains("more than 1000 `names`"), "{found}");
    }

    #[test]
    fn a_mistyped_anonymous_is_a_dns_name_and_a_warning() {
        let (callers, warnings) = read("callers:\n  - names: [Anonymous]\n    domains: [b]\n").unwrap();
        assert!(callers.anonymous().is_empty());
        assert!(warnings[0].to_string().contains("for callers without a certificate, write `anonymous`"));
    }
}
