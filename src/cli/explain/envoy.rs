//! The descriptors that Envoy's rate limit actions make of an HTTP request, and what each of them meets.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, bail, ensure};
use clap::{Arg, ArgMatches, value_parser};

use super::http::{HttpRequest, PATH};
use crate::cli::descriptor::spelled;
use crate::file;
use crate::model::counted;
use crate::rulefile::document::MAX_FILE_BYTES;
use crate::rulefile::problem::Report;
use crate::rulefile::yaml::{self, Node, Tree};
use crate::rules::tree::Position;
use crate::rules::{self, RuleSet};

mod actions;
mod fields;
mod find;
mod matchers;

use actions::{Called, Made};
use fields::{Fields, Known};
use find::{Call, Found, List, Site};

/// Name of the argument for Envoy's configuration.
pub(super) const FILE: &str = "envoy";
/// Names of the arguments that choose a part of the configuration.
const HOST: &str = "virtual-host";
const ROUTE: &str = "route";
/// Maximum number of routes that are explained: 50. A configuration can have thousands.
const MOST_ROUTES: usize = 50;

/// Text of an explanation, and if each of its descriptors meets a rule.
struct Explanation<'a> {
    rules: &'a RuleSet,
    file: &'a str,
    text: String,
    is_matched: bool,
}

/// Returns the arguments for Envoy's configuration.
pub(super) fn arguments() -> [Arg; 3] {
    let part = |name: &'static str, help: &'static str| {
        Arg::new(name).long(name).value_name("NAME").requires(FILE).help(help).help_heading("Envoy")
    };
    [
        Arg::new(FILE)
            .long(FILE)
            .value_name("FILE")
            .value_parser(value_parser!(PathBuf))
            .requires(PATH)
            .conflicts_with_all(["descriptor", "gateway"])
            .help_heading("Envoy")
            .help("Envoy's configuration with `rate_limits`, as YAML or JSON: the whole of it, a config dump, a virtual host, a route, or the list alone"),
        part(HOST, "Explain the routes of this virtual host alone"),
        part(ROUTE, "Explain the route with this name, even if another one comes first for the request"),
    ]
}

/// Prints the descriptors that each route makes of the request, and what each of them meets. Returns true if each of them meets a rule.
///
/// # Errors
/// If the file cannot be read, or has no actions for this request.
pub(super) fn explain(matches: &ArgMatches, rules: &RuleSet, path: &Path) -> anyhow::Result<bool> {
    let request = HttpRequest::of(matches)?;
    let name = path.display().to_string();
    let trees = read(path, &name)?;
    let mut found = Found::default();
    trees.iter().filter_map(Tree::root).for_each(|root| found.add(root));
    let text = format!("{} {}\n", request.method, request.path.escape_debug());
    let mut explanation = Explanation { rules, file: &name, text, is_matched: true };
    let domain = matches.get_one::<String>("domain").map(String::as_str);
    let (host, route) = (matches.get_one::<String>(HOST), matches.get_one::<String>(ROUTE));
    let is_chosen = |node: Option<Node<'_>>, name: Option<&String>| {
        name.is_none_or(|name| node.and_then(|node| node.text_of("name")) == Some(name))
    };
    let mut seen: Vec<(Option<Position>, &str, Option<Position>)> = Vec::new();
    let (mut others, mut calls) = (BTreeSet::new(), 0);
    // The virtual host in which a route has answered for the request, so that no later one does.
    let mut answered = None;
    for site in found.sites().iter().filter(|site| is_chosen(site.host, host) && is_chosen(site.route, route)) {
        let of_host = site.host.map(|host| host.place);
        let is_match =
            site.route.and_then(|route| route.field("match")).map(|matcher| matchers::is_route(&request, matcher));
        if route.is_none() && (matches!(is_match, Some(Ok(false))) || (answered.is_some() && answered == of_host)) {
            others.extend(site.node().map(|node| node.place));
            continue;
        }
        if matches!(is_match, Some(Ok(true))) {
            answered = of_host;
        }
        let called = Called {
            request: &request,
            client: matches.get_one::<IpAddr>("peer").copied(),
            destination: site.cluster(),
            source: found.source_cluster,
        };
        for call in found.calls(site) {
            if domain.is_some_and(|domain| call.domain.is_some_and(|own| own != domain)) {
                continue;
            }
            let own = domain_of(domain.or(call.domain), rules)?;
            let key = (site.node().map(|node| node.place), own, call.lists.first().map(|list| list.node.place));
            if seen.contains(&key) {
                continue;
            }
            seen.push(key);
            calls += 1;
            if calls <= MOST_ROUTES {
                explanation.call(site, &call, own, is_match.as_ref(), &called);
            }
        }
    }
    if calls == 0 {
        let local =
            if found.local > 0 { ". The `local_ratelimit` filter counts in Envoy and sends nothing" } else { "" };
        ensure!(
            !others.is_empty(),
            "{name}: no list `rate_limits` with `actions` was found for this domain, virtual host and route, so Envoy does not ask Tidegate: give the configuration with the routes{local}"
        );
        explanation.line("\n=> Envoy does not ask Tidegate about this request: the route that answers has no actions");
    }
    others.retain(|place| seen.iter().all(|(explained, ..)| *explained != Some(*place)));
    explanation.end(calls, others.len());
    crate::cli::print(&explanation.text)?;
    Ok(explanation.is_matched)
}

impl Explanation<'_> {
    /// Explains one call of Envoy.
    fn call(
        &mut self,
        site: &Site<'_>,
        call: &Call<'_>,
        domain: &str,
        is_match: Option<&Known<bool>>,
        called: &Called<'_>,
    ) {
        let line = site.node().map_or(1, |node| node.place.line);
        let named = |node: Option<Node<'_>>, what: &str| {
            node.map(|node| format!("{what} {}", node.text_of("name").unwrap_or("without a name").escape_debug()))
        };
        let place: Vec<_> =
            [named(site.route, "route"), named(site.host, "virtual host")].into_iter().flatten().collect();
        let place = if place.is_empty() { "rate_limits".to_owned() } else { place.join(" of ") };
        let filter = call.filter.map(|name| format!(", by the filter {}", name.escape_debug())).unwrap_or_default();
        let _ = writeln!(self.text, "\n{}:{line}: {place}: asks about domain {domain}{filter}", self.file);
        match is_match {
            Some(Ok(false)) => self.line("✗ its `match` is for other requests"),
            Some(Err(reason)) => {
                self.line(&format!("? if this route answers for the request is not known here: {reason}"));
            }
            Some(Ok(true)) | None => {}
        }
        let mut asks = false;
        for list in &call.lists {
            for item in list.node.items() {
                asks |= self.item(*list, item, domain, called);
            }
        }
        if !asks {
            self.line("=> Envoy does not ask Tidegate about this request: it makes no descriptor");
        }
    }

    /// Explains an item of `rate_limits`. Returns true if it makes a descriptor, or perhaps does.
    fn item(&mut self, list: List<'_>, item: Node<'_>, domain: &str, called: &Called<'_>) -> bool {
        let line = item.place.line;
        let stage = item.number_of("stage").unwrap_or(0);
        if list.stage.is_some_and(|own| own != stage) {
            self.line(&format!("\nno descriptor  (line {line}): only a filter with `stage: {stage}` sends it"));
            return false;
        }
        match called.make(item) {
            Made::Nothing(reason) => {
                self.line(&format!("\nno descriptor  (line {line}): {}", reason.escape_debug()));
                return false;
            }
            Made::Unknown(entries, reason) => {
                self.line(&format!("\ndescriptor {}  (line {line})", entries.escape_debug()));
                self.line(&format!("=> not known here: {}", reason.escape_debug()));
            }
            Made::Descriptor(descriptor) if descriptor.entries.is_empty() => {
                self.line(&format!("\ndescriptor   (line {line})"));
                self.line("=> not limited: Envoy sends it without an entry, because it skips all its actions");
            }
            Made::Descriptor(descriptor) => {
                let explained = rules::explain(self.rules, domain, &descriptor);
                self.is_matched &= explained.is_matched();
                let _ = write!(self.text, "\ndescriptor {}  (line {line})\n{explained}", spelled(&descriptor));
            }
        }
        for note in notes(list, item) {
            self.line(&format!("  note     {note}"));
        }
        true
    }

    /// Adds the last lines: routes that are not explained.
    fn end(&mut self, calls: usize, others: usize) {
        if calls > MOST_ROUTES {
            let rest = calls - MOST_ROUTES;
            self.line(&format!("\n{rest} more are not shown: choose with --{HOST} or --{ROUTE}"));
        }
        if others > 0 {
            let routes = counted(others, "route");
            self.line(&format!("\n{routes} not shown: for other requests, or behind the route that answers"));
        }
    }

    fn line(&mut self, text: &str) {
        let _ = writeln!(self.text, "{text}");
    }
}

/// Returns remarks about an item that its entries do not show.
fn notes(list: List<'_>, item: Node<'_>) -> Vec<String> {
    let mut notes = Vec::new();
    if let Some(stage) = item.number_of("stage").filter(|stage| *stage != 0 && list.stage.is_none()) {
        notes.push(format!("only a filter with `stage: {stage}` sends it"));
    }
    if item.flag_of("apply_on_stream_done") == Some(true) {
        notes.push("sent when the response ends: it charges, and its answer refuses nothing".to_owned());
    }
    match item.field("hits_addend") {
        Some(_) if list.is_of_route => {
            notes.push("Envoy ignores `hits_addend` in `rate_limits` of routes and virtual hosts".to_owned());
        }
        Some(hits) => match hits.number_of("number") {
            Some(number) => notes.push(format!("costs {number} in place of 1")),
            None => notes.push("its `hits_addend` is not evaluated here".to_owned()),
        },
        None => {}
    }
    if item.field("limit").is_some() {
        notes.push("it has a `limit` of its own, which is in force in place of the limit of the rule".to_owned());
    }
    if item.field("disable_key").is_some() {
        notes.push("its `disable_key` can switch it off in Envoy's runtime".to_owned());
    }
    let values = item.field("actions").into_iter().flat_map(Fields::items).flat_map(Fields::fields);
    if values.filter_map(|(_, action)| action.text_of("descriptor_value")).any(|value| value.matches('%').count() > 1) {
        notes.push(
            "Envoy sends `%...%` in `descriptor_value` as written, unless envoy.reloadable_features.enable_formatter_for_ratelimit_action_descriptor_value is on".to_owned(),
        );
    }
    notes
}

/// Returns the domain of a call, or the only one of the rules.
fn domain_of<'a>(known: Option<&'a str>, rules: &'a RuleSet) -> anyhow::Result<&'a str> {
    match (known, rules.domains().as_slice()) {
        (Some(domain), _) => Ok(domain),
        (None, [only]) => Ok(only),
        (None, _) => bail!("the file does not say which domain Envoy's filter asks about: give it with --domain"),
    }
}

/// Reads the documents of the file.
fn read(path: &Path, name: &str) -> anyhow::Result<Vec<Tree>> {
    let bytes = file::read(path, MAX_FILE_BYTES).with_context(|| name.to_owned())?;
    let text = std::str::from_utf8(&bytes).with_context(|| name.to_owned())?;
    let mut trees = Vec::new();
    for document in documents(text) {
        let mut report = Report::new(&Arc::from(name));
        let tree = yaml::parse(&document, &mut report);
        let mut problems = Vec::new();
        report.finish(&document, &mut problems);
        match tree {
            Some(tree) => trees.push(tree),
            None => bail!("{}", problems.first().map(ToString::to_string).unwrap_or_default()),
        }
    }
    Ok(trees)
}

/// Returns each document of a file, with as many empty lines in front of it as the file has, so that its places are those of the file.
fn documents(text: &str) -> Vec<String> {
    let mut documents = vec![String::new()];
    for (number, line) in text.split_inclusive('\n').enumerate() {
        match documents.last_mut() {
            Some(last) if !line.starts_with("---") => last.push_str(line),
            _ => documents.push("\n".repeat(number + 1)),
        }
    }
    documents
}
