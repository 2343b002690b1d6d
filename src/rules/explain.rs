//! Explanation of the rule that a descriptor matches: the walk down the rule tree, level by level.

use std::fmt::{self, Write};

use super::tree::{self, Child, TreeLevel, TreeMatch, Values};
use super::{Action, Domain, Rule, RuleLimit, RuleSet, SourceLimits};
use crate::model::{Delay, Descriptor, Entry, Hits, Role, StorePolicies, readable};
use crate::normalize::{NormalizedValue, Normalizers};

/// Maximum number of listed items per level that do not match: 20. Levels can have thousands.
const MOST_OTHERS: usize = 20;
/// Maximum number of other keys that are named per level: 8, about a line.
const MOST_KEYS: usize = 8;

/// The walk of one descriptor down the rule tree of its domain, as text for people.
#[derive(Debug)]
pub struct Explanation {
    text: String,
    is_matched: bool,
}

impl Explanation {
    /// Returns true if a rule matches the descriptor.
    pub fn is_matched(&self) -> bool {
        self.is_matched
    }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// Explains which rule matches `descriptor`, which counter it charges, and why the other rules do not match.
pub fn explain(rules: &RuleSet, domain: &str, descriptor: &Descriptor) -> Explanation {
    let mut explainer = Explainer { rules, text: String::new(), is_matched: false };
    explainer.explain(domain, descriptor);
    Explanation { text: explainer.text, is_matched: explainer.is_matched }
}

struct Explainer<'a> {
    rules: &'a RuleSet,
    text: String,
    is_matched: bool,
}

/// A tree of a domain: that of the source, or that of an overlay.
#[derive(Clone, Copy)]
struct Tree<'a> {
    normalizers: &'a Normalizers,
    root: &'a TreeLevel,
    /// Result of a walk that ends without a rule.
    none: &'static str,
}

/// The descriptor that is explained, and its domain.
#[derive(Clone, Copy)]
struct Called<'a> {
    name: &'a str,
    domain: &'a Domain,
    descriptor: &'a Descriptor,
}

impl Explainer<'_> {
    fn explain(&mut self, domain: &str, descriptor: &Descriptor) {
        self.line(0, format_args!("domain {domain}"));
        let Some(found) = self.rules.domains.get(domain) else {
            let known = self.rules.domains().join(", ");
            self.line(1, format_args!("no rule file has this domain; known domains: {known}"));
            self.line(0, format_args!("=> not limited"));
            return;
        };
        for changed in self.rules.domain_changes(found) {
            self.line(0, format_args!("overlay: {changed}"));
        }
        let places = found.places(std::slice::from_ref(descriptor));
        let none = if found.overlays.is_empty() { "not limited" } else { "no rule of the source" };
        let source = Tree { normalizers: &found.normalizers, root: &found.root, none };
        self.tree(source, descriptor);
        let called = Called { name: domain, domain: found, descriptor };
        if let Some(source) = places.source.first() {
            self.rule(called, source, "");
        }
        for (number, overlay) in found.overlays.iter().enumerate() {
            self.line(0, format_args!("overlay {}", overlay.pattern));
            let tree = Tree { normalizers: &overlay.normalizers, root: &overlay.root, none: "no rule of this overlay" };
            self.tree(tree, descriptor);
            let own = places.overlaid.iter().find(|overlaid| overlaid.tree == number);
            if let Some(own) = own {
                self.rule(called, &own.found, own.mark);
            }
        }
    }

    /// Explains the walk down one tree.
    fn tree(&mut self, tree: Tree<'_>, descriptor: &Descriptor) {
        let none = tree.none;
        let mut node = Some(tree.root);
        let mut last: Option<&Child> = None;
        for (level, entry) in descriptor.entries.iter().enumerate() {
            let normalized = tree::normalized(tree.normalizers.of(&entry.key).map(AsRef::as_ref), entry);
            self.line(level + 1, format_args!("{}", entry_text(entry, &normalized, tree.normalizers)));
            let Some(here) = node else {
                self.line(
                    level + 2,
                    format_args!("✗ the rules end one level above: a rule matches only descriptors of its own depth"),
                );
                self.line(0, format_args!("=> {none}"));
                return;
            };
            let chosen = here.child(tree.normalizers, entry);
            self.level(level + 2, here, entry, &normalized, chosen);
            let Some(chosen) = chosen else {
                self.line(0, format_args!("=> {none}"));
                return;
            };
            node = chosen.below.as_deref();
            last = Some(chosen);
            if chosen.action().is_some() {
                break;
            }
        }
        if last.is_none_or(|child| child.rule.is_none()) {
            let why = if node.is_some() { "only items below it can have one" } else { "so its value is not limited" };
            self.line(0, format_args!("=> {none}: the item has no limit itself, {why}"));
        }
    }

    fn level(
        &mut self,
        depth: usize,
        node: &TreeLevel,
        entry: &Entry,
        normalized: &NormalizedValue<'_>,
        chosen: Option<&Child>,
    ) {
        if let Some(chosen) = chosen {
            let how = how(chosen);
            self.line(depth, format_args!("✓ {}  {how}  ({})", chosen.label(), self.place(chosen)));
        }
        let others = node.children.iter().filter(|child| !chosen.is_some_and(|chosen| std::ptr::eq(*child, chosen)));
        let same_key = |child: &&Child| child.key.matches(&entry.key);
        let mut shown = 0;
        for other in others.clone().filter(same_key).take(MOST_OTHERS) {
            let why = why_not(other, entry, normalized, chosen);
            self.line(depth, format_args!("✗ {}  {why}  ({})", other.label(), self.place(other)));
            shown += 1;
        }
        let (all, same) = (others.clone().count(), others.clone().filter(same_key).count());
        if same > shown {
            self.line(depth, format_args!("✗ {} more with this key and another value", same - shown));
        }
        if all > same {
            let keys = keys(others.filter(|child| !same_key(child)));
            self.line(depth, format_args!("✗ {} with another key: {keys}", all - same));
        }
    }

    /// Explains the rule of `found`, if it has one. `mark` is that of its counters.
    fn rule(&mut self, Called { name, domain, descriptor }: Called<'_>, found: &TreeMatch<'_>, mark: &str) {
        let Some(rule) = found.rule else { return };
        self.is_matched = true;
        self.line(0, format_args!("=> rule {}", rule.path()));
        if rule.changes.is_some() {
            self.line(1, format_args!("from     {}", self.rules.places(rule)));
        }
        match rule.action() {
            Some(Action::Deny) => {
                self.line(1, format_args!("deny     refuses the whole request and charges nothing"));
            }
            Some(Action::Exempt) => {
                self.line(
                    1,
                    format_args!(
                        "exempt   admits the whole request and charges nothing, unless another rule denies the request"
                    ),
                );
            }
            None => {}
        }
        if found.is_replaced {
            self.line(1, format_args!("replaced by a rule of an overlay below: the limits of this rule do not apply"));
        }
        if rule.source_limits != SourceLimits::Apply {
            self.line(1, format_args!("replace  replaces the limits of the source"));
        }
        if rule.is_unlimited() {
            self.line(1, format_args!("unlimited: admitted without counting"));
        }
        for limit in rule.limits() {
            self.limit(limit);
            let key = found.counter_key(name, domain.colocation, mark, descriptor, &limit.limit, limit.is_shadow);
            self.line(1, format_args!("counter  {key}"));
            if limit.limit.records_every_charge() {
                self.line(1, format_args!("         counts refused charges too"));
            }
            if limit.limit.refuses_full_peek(Hits::LOOK) {
                self.line(1, format_args!("         refuses a peek (0 hits) while the limit is used up"));
            }
            for replaced in &limit.replaces {
                self.line(1, format_args!("replaces {replaced} in requests that match both"));
            }
        }
        if rule.request_cost().get() > 1 {
            self.line(
                1,
                format_args!(
                    "cost     multiplies the hits of the request by {}, on each of its limits",
                    rule.request_cost()
                ),
            );
        }
        if let Some(message) = &rule.about().message {
            self.line(1, format_args!("message  {}", message.escape_debug()));
        }
        if !rule.about().is_exposed {
            self.line(1, format_args!("expose   false: no header and no body shows this rule"));
        }
        for replaced in &rule.replaces {
            self.line(1, format_args!("replaces {replaced} in requests that match both"));
        }
        self.effects(rule);
    }

    /// Explains the effect of a refusal by `rule`, and the answer without the store.
    fn effects(&mut self, rule: &Rule) {
        match self.rules.role(rule) {
            Role::Enforce => {}
            Role::Shadow => self.line(1, format_args!("shadow   refusals are counted but not enforced")),
            Role::Quota => self.line(1, format_args!("quota    the request is refused only if all its quotas refuse")),
            Role::ShadowQuota => self.line(
                1,
                format_args!("shadow   refusals are counted; for the other quotas, this quota always has room"),
            ),
        }
        if self.rules.modes.shadow {
            self.line(1, format_args!("mode     SHADOW_MODE: refusals are not enforced"));
        }
        if rule.action().is_none() {
            self.line(1, format_args!("charging {}", rule.charging().name()));
            let StorePolicies { on_failure, on_overload } = rule.policies();
            self.line(1, format_args!("failure  {}, under overload {}", on_failure.name(), on_overload.name()));
            if !rule.remembers_refusals() {
                self.line(1, format_args!("remember_refusals false: the store decides each charge"));
            }
        }
    }

    fn limit(&mut self, limit: &RuleLimit) {
        let (quota, algorithm) = (limit.limit.quota(), limit.limit.algorithm());
        let burst = if algorithm.has_burst() { format!(", burst {}", quota.burst()) } else { String::new() };
        let name = limit.name.as_ref().map(|name| format!(", called {name}")).unwrap_or_default();
        self.line(1, format_args!("limit    {quota}, {}{burst}{name}", algorithm.name()));
        if limit.is_shadow {
            self.line(1, format_args!("         shadow: its refusals are counted but not enforced"));
        }
        if limit.cost.get() > 1 {
            self.line(1, format_args!("         each hit counts {} times", limit.cost));
        }
        let by = limit.delivery.name();
        match limit.limit.delay() {
            None => {}
            Some(Delay::Slot { max }) => {
                self.line(1, format_args!("         a request over the limit waits at most {max} for its slot (delivery: {by}), or is refused"));
            }
            Some(Delay::Growing { step, max }) => {
                self.line(
                    1,
                    format_args!(
                        "         a request waits {step} for each hit over the limit, at most {max} (delivery: {by}), and is never refused"
                    ),
                );
            }
        }
        if let Some(lease) = limit.lease {
            self.line(1, format_args!("         leases hold up to {lease}"));
        }
        if let Some(percent) = limit.warn_at {
            self.line(1, format_args!("         sends a warning header when {percent}% of the limit is used"));
        }
    }

    fn place(&self, child: &Child) -> String {
        self.rules.place(child.file, child.place.line)
    }

    fn line(&mut self, depth: usize, text: fmt::Arguments<'_>) {
        let _ = writeln!(self.text, "{:1$}{text}", "", depth * 2);
    }
}

const EXACT: &str = "exact value";
const LISTED: &str = "in its list";
const WILDCARD: &str = "the first wildcard that matches";
const ANY: &str = "any value of this key";

fn how(chosen: &Child) -> &'static str {
    match &chosen.values {
        _ if !chosen.key.is_literal() => WILDCARD,
        Values::Any => ANY,
        Values::Listed(_) => LISTED,
        Values::Pattern(value) if value.is_literal() => EXACT,
        Values::Pattern(_) => WILDCARD,
    }
}

fn why_not(other: &Child, entry: &Entry, normalized: &NormalizedValue<'_>, chosen: Option<&Child>) -> &'static str {
    if matches!(other.values, Values::Listed(_)) {
        return "the value is not in this list, or another list has a smaller network for it";
    }
    if !other.matches(&entry.key, &normalized.text()) {
        let is_wild = other.pattern().is_some_and(|value| !value.is_literal());
        return if is_wild { "the pattern does not match" } else { "another value" };
    }
    match chosen.map(how) {
        Some(EXACT) => "would match, but the exact value comes first",
        Some(LISTED) => "would match, but a list comes first",
        Some(WILDCARD) if matches!(other.values, Values::Any) && other.key.is_literal() => {
            "would match any value, but a wildcard comes first"
        }
        _ => "would match, but an earlier wildcard comes first",
    }
}

/// Returns the keys of these items, each once.
fn keys<'a>(items: impl Iterator<Item = &'a Child>) -> String {
    let mut keys: Vec<&str> = Vec::new();
    for key in items.map(|item| item.key.text()) {
        if keys.contains(&key) {
            continue;
        }
        if keys.len() == MOST_KEYS {
            keys.push("…");
            break;
        }
        keys.push(key);
    }
    keys.join(", ")
}

/// Returns `key=value`, with the normalised value if it differs. Shows the digest of a sensitive value instead.
fn entry_text(entry: &Entry, normalized: &NormalizedValue<'_>, normalizers: &Normalizers) -> String {
    let key = readable(&entry.key);
    if let Some(digest) = normalizers.digest(entry) {
        return format!("{key}=#{digest}  (sensitive)");
    }
    let value = readable(&entry.value);
    if *normalized.text() == *entry.value {
        format!("{key}={value}")
    } else {
        format!("{key}={value}  (read as {})", readable(&normalized.text()))
    }
}
