//! Conversion of the control plane's resources to documents, as if they were rule files.

use std::sync::Arc;

use prost::Message;
use prost_types::value::Kind;
use prost_types::{Any, Struct};
use serde_json::{Map, Number, Value};
use thiserror::Error;

use crate::model::Metadata;
use crate::proto::ratelimit::config::ratelimit::v3 as proto;
use crate::rulefile::document::{DescriptorNode, Document, LimitNode, LimitsNode, MAX_METADATA_DEPTH};
use crate::rulefile::problem::{Placed, Problem, Severity};
use crate::rulefile::{Documents, File};
use crate::rules::tree::Position;

/// Type of the resources.
pub(super) const TYPE_URL: &str = "type.googleapis.com/ratelimit.config.ratelimit.v3.RateLimitConfig";
/// Maximum bytes of the name of a resource, and of a line that shows a descriptor, in an error: 160, the characters of an excerpt.
const LONGEST_LINE: usize = 160;

/// Resource that is not a `RateLimitConfig`.
#[derive(Debug, Error)]
#[error("resource {number} of the response cannot be decoded: expected {TYPE_URL}, {why}")]
pub(super) struct Undecodable {
    number: usize,
    why: String,
}

/// Converts one resource. A place is the number of a descriptor in the resource, in the order sent; line 1 is the domain.
struct Conversion {
    /// One line per place: the keys and values from the domain to the descriptor.
    lines: String,
    count: u32,
}

/// Returns the documents of all resources. Errors in their content are found by the compiler.
///
/// # Errors
/// The first resource that cannot be decoded.
pub(super) fn documents(resources: &[Any]) -> Result<Documents, Undecodable> {
    let (mut files, mut documents, mut problems) = (Vec::new(), Vec::new(), Vec::new());
    for (index, resource) in resources.iter().enumerate() {
        let undecodable = |why| Undecodable { number: index + 1, why };
        if !is_ours(&resource.type_url) {
            return Err(undecodable(format!("found {:?}", resource.type_url)));
        }
        let config = proto::RateLimitConfig::decode(resource.value.as_slice());
        let config = config.map_err(|error| undecodable(format!("found bytes that are not one: {error}")))?;
        let end = config.name.floor_char_boundary(LONGEST_LINE);
        let name: Arc<str> = config.name.get(..end).unwrap_or_default().into();
        let mut conversion = Conversion { lines: String::new(), count: 0 };
        let place = conversion.place(&config.domain);
        let descriptors = conversion.descriptors(config.descriptors, &config.domain);
        if config.domain.is_empty() {
            let message = "`domain` is empty, so no request matches the rules: give the resource a domain".to_owned();
            let file = Arc::clone(&name);
            problems.push(Problem { file, place: Some(place), severity: Severity::Error, message, excerpt: None });
        } else {
            documents.push((
                files.len(),
                Document {
                    file: Arc::clone(&name),
                    domain: Placed { value: config.domain, place },
                    charging: None,
                    on_store_failure: None,
                    on_store_overload: None,
                    lease: None,
                    colocate: None,
                    entries: Vec::new(),
                    descriptors,
                    known_good: Vec::new(),
                    requests: None,
                    overlay: None,
                },
            ));
        }
        files.push(File { name, bytes: conversion.lines.into_bytes() });
    }
    let mut content = blake3::Hasher::new();
    resources.iter().for_each(|resource| _ = content.update(blake3::hash(&resource.value).as_bytes()));
    Ok(Documents::of(files, documents, problems).with_content(content.finalize()))
}

/// Returns true for the type of our resources, with any host before it.
pub(super) fn is_ours(type_url: &str) -> bool {
    let message = |url: &str| url.rsplit('/').next().map(str::to_owned);
    message(type_url) == message(TYPE_URL)
}

impl Conversion {
    /// Returns the next place and adds the line that shows it.
    fn place(&mut self, line: &str) -> Position {
        let end = line.floor_char_boundary(LONGEST_LINE);
        self.lines.extend(line[..end].chars().map(|c| if matches!(c, '\n' | '\r') { ' ' } else { c }));
        self.lines.push('\n');
        self.count = self.count.saturating_add(1);
        Position { line: self.count, column: 1 }
    }

    fn descriptors(&mut self, items: Vec<proto::RateLimitDescriptor>, above: &str) -> Vec<DescriptorNode> {
        items.into_iter().map(|item| self.descriptor(item, above)).collect()
    }

    fn descriptor(&mut self, item: proto::RateLimitDescriptor, above: &str) -> DescriptorNode {
        let mut path = match item.value.as_str() {
            "" => format!("{above} > {}", item.key),
            value => format!("{above} > {}={value}", item.key),
        };
        path.truncate(path.floor_char_boundary(LONGEST_LINE));
        let place = self.place(&path);
        let text = |value: String| (!value.is_empty()).then_some(Placed { value, place });
        let limits = match item.rate_limit {
            None => LimitsNode::None,
            Some(policy) if policy.unlimited => LimitsNode::Unlimited(Box::new(limit(policy, place))),
            Some(policy) => LimitsNode::Limited(vec![limit(policy, place)]),
        };
        DescriptorNode {
            place,
            key: text(item.key),
            value: text(item.value),
            limits,
            shadow_mode: item.shadow_mode,
            quota_mode: item.quota_mode,
            detailed_metric: item.detailed_metric,
            metadata: item.metadata.map(|metadata| object(metadata, MAX_METADATA_DEPTH)),
            descriptors: self.descriptors(item.descriptors, &path),
            ..DescriptorNode::default()
        }
    }
}

fn limit(policy: proto::RateLimitPolicy, place: Position) -> LimitNode {
    let placed = |value: String| Placed { value, place };
    // 0 is no unit. The compiler reports a number that is none.
    let unit = match proto::RateLimitUnit::try_from(policy.unit) {
        Ok(proto::RateLimitUnit::Unknown) => None,
        Ok(unit) => Some(unit.as_str_name().to_ascii_lowercase()),
        Err(_) => Some(policy.unit.to_string()),
    };
    LimitNode {
        place,
        unit: unit.map(placed),
        requests_per_unit: policy.requests_per_unit,
        name: (!policy.name.is_empty()).then(|| placed(policy.name)),
        replaces: policy.replaces.into_iter().map(|replaced| placed(replaced.name)).collect(),
        ..LimitNode::default()
    }
}

/// Returns the mapping as JSON. What is nested deeper than `depth` becomes null.
fn object(metadata: Struct, depth: usize) -> Metadata {
    metadata.fields.into_iter().map(|(name, value)| (name, json(value, depth))).collect::<Map<_, _>>()
}

fn json(value: prost_types::Value, depth: usize) -> Value {
    match value.kind {
        Some(Kind::BoolValue(value)) => Value::Bool(value),
        Some(Kind::NumberValue(value)) => Number::from_f64(value).map_or(Value::Null, Value::Number),
        Some(Kind::StringValue(value)) => Value::String(value),
        Some(Kind::ListValue(list)) if depth > 0 => {
            Value::Array(list.values.into_iter().map(|value| json(value, depth - 1)).collect())
        }
        Some(Kind::StructValue(inner)) if depth > 0 => Value::Object(object(inner, depth - 1)),
        _ => Value::Null,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rulefile::{Options, compile};

    #[test]
    fn limits_that_differ_have_different_digests() {
        let digest = |requests_per_unit| {
            let policy = proto::RateLimitPolicy {
                unit: proto::RateLimitUnit::Minute.into(),
                requests_per_unit,
                ..proto::RateLimitPolicy::default()
            };
            let user = proto::RateLimitDescriptor {
                key: "user".to_owned(),
                rate_limit: Some(policy),
                ..proto::RateLimitDescriptor::default()
            };
            let config =
                proto::RateLimitConfig { name: "r".to_owned(), domain: "d".to_owned(), descriptors: vec![user] };
            let resource = Any { type_url: TYPE_URL.to_owned(), value: config.encode_to_vec() };
            let compiled = compile(documents(&[resource]).unwrap(), &Options::default()).unwrap();
            compiled.rules.digest().to_owned()
        };
        assert_eq!(digest(1), digest(1));
        assert_ne!(digest(1), digest(2));
    }
}
