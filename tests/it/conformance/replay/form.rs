//! The form in which requests and answers were recorded; tests/conformance/README.md describes it.

use serde_json::{Value, json};
use tidegate::proto::envoy::config::core::v3::HeaderValue;
use tidegate::proto::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use tidegate::proto::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::{Entry, RateLimitOverride};
use tidegate::proto::envoy::service::ratelimit::v3::rate_limit_response::rate_limit::Unit;
use tidegate::proto::envoy::service::ratelimit::v3::rate_limit_response::{Code, DescriptorStatus};
use tidegate::proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use tonic::{Code as Failure, Status};

use super::{list, number, text};
use crate::wire;

/// A recorded request, as it was sent.
pub fn request(recorded: &Value) -> RateLimitRequest {
    RateLimitRequest {
        domain: text(&recorded["domain"]),
        descriptors: list(&recorded["descriptors"]).iter().map(descriptor).collect(),
        hits_addend: recorded.get("hits").map_or(0, number),
    }
}

fn descriptor(recorded: &Value) -> RateLimitDescriptor {
    let entry = |entry: &Value| Entry { key: text(&entry[0]).into(), value: text(&entry[1]).into() };
    let limit = |limit: &Value| RateLimitOverride {
        requests_per_unit: number(&limit[0]),
        unit: unit(&text(&limit[1])).into(),
        unit_multiplier: None,
    };
    RateLimitDescriptor {
        entries: list(&recorded["entries"]).iter().map(entry).collect(),
        limit: recorded.get("limit").map(limit),
        hits_addend: recorded.get("hits").map(number),
        is_negative_hits: false,
    }
}

fn unit(name: &str) -> Unit {
    Unit::from_str_name(&name.to_uppercase()).unwrap_or_else(|| panic!("no unit: {name}"))
}

/// An answer in the form of the recorded ones.
pub fn recorded(answer: Result<RateLimitResponse, Status>) -> Value {
    let answer = match answer {
        Ok(answer) => answer,
        Err(status) => return json!({ "error": failure(status.code()), "text": status.message() }),
    };
    let header = |header: &HeaderValue| json!([header.key, header.value]);
    json!({
        "code": code(answer.overall_code()),
        "statuses": answer.statuses.iter().map(status).collect::<Vec<_>>(),
        "headers": answer.response_headers_to_add.iter().map(header).collect::<Vec<_>>(),
        "metadata": answer.dynamic_metadata.map(wire::json),
        "other": [answer.request_headers_to_add.len(), answer.raw_body.len()],
    })
}

fn failure(code: Failure) -> String {
    match code {
        Failure::InvalidArgument => "INVALID_ARGUMENT".to_owned(),
        other => format!("{other:?}"),
    }
}

fn code(code: Code) -> &'static str {
    code.as_str_name()
}

#[expect(clippy::cast_precision_loss, reason = "the recorded ones are such numbers")]
fn status(status: &DescriptorStatus) -> Value {
    let limit = status
        .current_limit
        .as_ref()
        .map(|limit| json!([limit.requests_per_unit, limit.unit().as_str_name().to_lowercase(), limit.name]));
    let reset = status.duration_until_reset.as_ref().map(|reset| reset.seconds as f64 + f64::from(reset.nanos) / 1e9);
    json!({ "code": code(status.code()), "limit": limit, "remaining": status.limit_remaining, "reset": reset })
}
