//! Dynamic metadata of an answer, for Envoy's own filters and access log. Clients do not get it.

use std::borrow::Cow;

use prost_types::value::Kind;
use prost_types::{ListValue, Struct, Value};
use smallvec::SmallVec;

use super::{Answers, TOO_LARGE, UNAVAILABLE, current_limit};
use crate::model::{
    Deciding, Decision, Entry, Finding, Metadata, Origin, Outcome, Part, Request, Ruling, ShadowRefusal,
};

/// Maximum bytes of entry text in the metadata: 1 MiB. A byte that is not UTF-8 takes three there, and an answer too
/// large for its caller would be an error.
const MOST_TEXT: usize = 1 << 20;
/// Maximum number of descriptors that are explained: 64. A person asks about one or a few.
const MOST_EXPLAINED: usize = 64;

/// Returns the metadata of an answer, if it has any. `id` is that of the decision.
pub(super) fn of(answers: &Answers, request: &Request, decision: &Decision<'_>, id: Option<&str>) -> Option<Struct> {
    // Added even if metadata is off: an answer without a count must not pass for a counted one.
    let mut fields = unasked(decision);
    if decision.is_too_large && decision.outcome.is_refused() {
        fields.push((TOO_LARGE, value(Kind::BoolValue(true))));
    }
    if answers.decision_metadata {
        fields.push(("decision", decided(answers, decision, id)));
    }
    if answers.dynamic_metadata {
        fields.extend(asked(request, decision));
    }
    (!fields.is_empty()).then(|| object(fields))
}

/// Returns the fields for answers that no store gave: the policies that answered instead, and a flag if the request is
/// refused for that reason alone.
fn unasked(decision: &Decision<'_>) -> Vec<(&'static str, Value)> {
    let mut policies: SmallVec<[&str; 4]> = SmallVec::new();
    for (_, tightest) in decision.limited() {
        let provenance = tightest.verdict.provenance;
        if provenance.is_policy() && !policies.contains(&provenance.name()) {
            policies.push(provenance.name());
        }
    }
    if policies.is_empty() {
        return Vec::new();
    }
    let mut fields = vec![("on_store_failure", list(policies.into_iter().map(text)))];
    if decision.unavailable_for.is_some() {
        fields.push((UNAVAILABLE, value(Kind::BoolValue(true))));
    }
    fields
}

/// Returns the outcome, the rule, limit and origin behind it, and the id of the decision.
fn decided(answers: &Answers, decision: &Decision<'_>, id: Option<&str>) -> Value {
    let Deciding { rule, limit, origin, .. } = decision.deciding();
    let outcome = match (decision.ruling, decision.outcome) {
        (Some(ruling), _) => outcome_of_ruling(decision, ruling.is_denied),
        _ if decision.unavailable_for.is_some() => "unavailable",
        (None, Outcome::Refused) => "refused",
        (None, Outcome::Admitted | Outcome::Failed) => "admitted",
    };
    let mut fields = vec![("outcome", text(outcome)), ("provenance", text(origin.name()))];
    fields.push(("generation", number(decision.generation)));
    fields.extend(rule.map(|rule| ("rule", text(&rule.path.to_string()))));
    fields.extend(limit.map(|name| ("limit", text(name))));
    fields.extend(id.map(|id| ("id", text(id))));
    let shadow = decision.shadow_refusals();
    if !shadow.is_empty() {
        fields.push(("shadow", list(shadow.into_iter().map(shadow_refusal))));
    }
    if answers.explains {
        fields.push(("known_domain", value(Kind::BoolValue(decision.domain.is_some()))));
        let parts = decision.parts.iter().take(MOST_EXPLAINED);
        fields.push(("descriptors", list(parts.map(|part| explained(decision, part)))));
    }
    structure(fields)
}

/// Returns the rule, limit and origin that would refuse the request without a shadow mode.
fn shadow_refusal((deciding, answer): ShadowRefusal<'_, '_>) -> Value {
    let mut fields = vec![("provenance", text(deciding.origin.name()))];
    fields.extend(deciding.rule.map(|rule| ("rule", text(&rule.path.to_string()))));
    fields.extend(deciding.limit.map(|name| ("limit", text(name))));
    fields.extend(answer.map(|answer| ("quota", text(&format!("{:#}", answer.quota)))));
    structure(fields)
}

/// Returns the rule and the origin of one descriptor's answer. `uncounted`: a rule of another descriptor decided the request.
fn explained(decision: &Decision<'_>, part: &Part<'_>) -> Value {
    let is_ruling = |ruling: Ruling<'_>| part.rule.is_some_and(|rule| rule.id == ruling.rule.id);
    let provenance = match (&part.finding, decision.ruling) {
        (Finding::Limited(tightest), _) => Origin::from(tightest.verdict.provenance).name(),
        (Finding::Denied, _) => "deny",
        (_, Some(ruling)) if is_ruling(ruling) => "exempt",
        (_, Some(_)) => "uncounted",
        (Finding::Unlimited, None) => "unlimited",
        (Finding::Unmatched, None) => Origin::Nothing.name(),
    };
    let rule = part.rule.map(|rule| ("rule", text(&rule.path.to_string())));
    structure([("provenance", text(provenance))].into_iter().chain(rule).collect())
}

/// Returns the outcome under a rule that denies or exempts. In shadow mode, a rule that denies lets the request pass.
fn outcome_of_ruling(decision: &Decision<'_>, is_denied: bool) -> &'static str {
    match (is_denied, decision.outcome.is_refused()) {
        (true, true) => "denied",
        (true, false) => "admitted",
        (false, _) => "exempt",
    }
}

/// Returns the request, and the metadata of the rules that let it pass. If two rules have the same field, the first
/// wins.
fn asked(request: &Request, decision: &Decision<'_>) -> Vec<(&'static str, Value)> {
    let mut room = MOST_TEXT;
    let descriptors = request.descriptors().iter().enumerate().map(|(index, descriptor)| {
        let entries = descriptor
            .entries
            .iter()
            .enumerate()
            .map(|(number, entry)| text(&entry_text(entry, decision.digest(index, number), &mut room)));
        let mut fields = vec![("entries", list(entries))];
        if let Some(sent) = descriptor.limit {
            let limit = current_limit(sent.quota(), None);
            fields.push((
                "limit",
                text(&format!("requests_per_unit:{} unit:{}", limit.requests_per_unit, limit.unit().as_str_name())),
            ));
        }
        if let Some(hits) = descriptor.hits_addend {
            fields.push(("hitsAddend", number(hits)));
        }
        structure(fields)
    });
    let mut fields = vec![("domain", text(request.domain())), ("descriptors", list(descriptors))];
    if request.hits_addend() != 0 {
        fields.push(("hitsAddend", number(u64::from(request.hits_addend()))));
    }
    let mut merged = Metadata::new();
    for part in decision.parts.iter().filter(|part| !part.outcome().is_refused()) {
        if let Some(metadata) = &part.metadata {
            merge(&mut merged, metadata);
        }
    }
    if !merged.is_empty() {
        fields.push(("metadata", json_value(&serde_json::Value::Object(merged))));
    }
    fields
}

fn merge(into: &mut Metadata, from: &Metadata) {
    use serde_json::Value::Object;
    for (name, value) in from {
        match (into.get_mut(name), value) {
            (None, value) => drop(into.insert(name.clone(), value.clone())),
            (Some(Object(into)), Object(from)) => merge(into, from),
            (Some(_), _) => {}
        }
    }
}

/// Returns `key=value`. A string of the protocol is UTF-8, so other bytes show as replacement characters here, and only
/// here. A hidden value is shown as its `digest`. Text beyond `room` bytes is cut off.
fn entry_text(entry: &Entry, digest: Option<&str>, room: &mut usize) -> String {
    let value = digest.map_or_else(|| String::from_utf8_lossy(&entry.value), Cow::Borrowed);
    let mut text = format!("{}={value}", String::from_utf8_lossy(&entry.key));
    text.truncate(text.floor_char_boundary(*room));
    *room -= text.len();
    text
}

fn value(kind: Kind) -> Value {
    Value { kind: Some(kind) }
}

fn text(text: &str) -> Value {
    value(Kind::StringValue(text.to_owned()))
}

#[expect(clippy::cast_precision_loss, reason = "the protocol's only number is a double")]
fn number(number: u64) -> Value {
    value(Kind::NumberValue(number as f64))
}

fn list(values: impl Iterator<Item = Value>) -> Value {
    value(Kind::ListValue(ListValue { values: values.collect() }))
}

fn object(fields: Vec<(&str, Value)>) -> Struct {
    Struct { fields: fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect() }
}

fn structure(fields: Vec<(&str, Value)>) -> Value {
    value(Kind::StructValue(object(fields)))
}

fn json_value(json: &serde_json::Value) -> Value {
    use serde_json::Value as Json;
    match json {
        Json::Null => value(Kind::NullValue(0)),
        Json::Bool(flag) => value(Kind::BoolValue(*flag)),
        Json::Number(number) => value(Kind::NumberValue(number.as_f64().unwrap_or_default())),
        Json::String(string) => text(string),
        Json::Array(items) => list(items.iter().map(json_value)),
        Json::Object(fields) => {
            structure(fields.iter().map(|(name, value)| (name.as_str(), json_value(value))).collect())
        }
    }
}
