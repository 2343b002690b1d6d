//! Dynamic metadata of an answer: what the server says about its decision.

use prost_types::value::Kind;
use prost_types::{Struct, Value};

use crate::proto::envoy::service::ratelimit::v3::RateLimitResponse;

/// Returns the explained decision, if the answer has one.
pub(super) fn decision(answer: &RateLimitResponse) -> Option<&Struct> {
    object(answer.dynamic_metadata.as_ref()?.fields.get("decision")?)
}

/// Returns the items of a list; none if there is no such list.
pub(super) fn list<'v>(object: &'v Struct, name: &str) -> &'v [Value] {
    match object.fields.get(name).and_then(|value| value.kind.as_ref()) {
        Some(Kind::ListValue(list)) => &list.values,
        _ => &[],
    }
}

/// Returns the fields of an object.
pub(super) fn object(value: &Value) -> Option<&Struct> {
    match &value.kind {
        Some(Kind::StructValue(object)) => Some(object),
        _ => None,
    }
}

/// Returns the text of a field.
pub(super) fn text<'v>(object: &'v Struct, name: &str) -> Option<&'v str> {
    match &object.fields.get(name)?.kind {
        Some(Kind::StringValue(text)) => Some(text),
        _ => None,
    }
}

/// Returns the flag of a field.
pub(super) fn flag(object: &Struct, name: &str) -> Option<bool> {
    match object.fields.get(name)?.kind {
        Some(Kind::BoolValue(flag)) => Some(flag),
        _ => None,
    }
}
