//! Match of an item of `apply` against the rules of a domain.

use serde_json::Value;

use crate::model::Metadata;
use crate::normalize::pattern::Pattern;
use crate::rulefile::document::{DescriptorNode, LimitNode, MatchNode};

/// A step from the domain to a rule: key and value of an item.
pub(super) type Step = (String, Option<String>);

/// Returns true if `target` matches an item at `path`, whatever its limits are.
pub(super) fn is_item(target: &MatchNode, path: &[Step], item: &DescriptorNode) -> bool {
    let steps: Vec<&str> = target.path.iter().map(|step| step.value.as_str()).collect();
    (steps.is_empty() || is_path(&steps, path))
        && target.metadata.as_ref().is_none_or(|wanted| has_metadata(item.metadata.as_ref(), wanted))
}

/// Returns true if `target` matches a limit of such an item.
pub(super) fn is_limit(target: &MatchNode, limit: &LimitNode) -> bool {
    let text = |placed: &Option<crate::rulefile::problem::Placed<String>>| {
        placed.as_ref().map(|placed| placed.value.clone()).unwrap_or_default()
    };
    target.unit.as_ref().is_none_or(|unit| unit.value.eq_ignore_ascii_case(&text(&limit.unit)))
        && target.requests_per_unit.as_ref().is_none_or(|number| number.value == limit.requests_per_unit)
        && target.name.as_ref().is_none_or(|name| is_text(&name.value, &text(&limit.name)))
}

/// Returns true if an item of the tree can match entries with `key`.
pub(super) fn has_key(items: &[DescriptorNode], key: &str) -> bool {
    items.iter().any(|item| {
        item.key.as_ref().is_some_and(|pattern| is_text(&pattern.value, key)) || has_key(&item.descriptors, key)
    })
}

fn is_text(pattern: &str, text: &str) -> bool {
    Pattern::new(pattern.to_owned()).matches(text.as_bytes())
}

fn is_path(steps: &[&str], path: &[Step]) -> bool {
    match (steps, path) {
        ([], []) => true,
        (["**", rest @ ..], _) => {
            is_path(rest, path) || path.split_first().is_some_and(|(_, below)| is_path(steps, below))
        }
        ([step, steps @ ..], [at, below @ ..]) => is_step(step, at) && is_path(steps, below),
        _ => false,
    }
}

fn is_step(step: &str, (key, value): &Step) -> bool {
    match step.split_once('=') {
        None => is_text(step, key),
        Some((of_key, of_value)) => {
            is_text(of_key, key) && value.as_ref().is_some_and(|value| is_text(of_value, value))
        }
    }
}

fn has_metadata(found: Option<&Metadata>, wanted: &Metadata) -> bool {
    let spelled = |value: &Value| match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    wanted.iter().all(|(key, value)| {
        found.and_then(|found| found.get(key)).is_some_and(|found| spelled(found) == spelled(value))
    })
}
