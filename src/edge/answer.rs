//! Conversion between the protocol's messages and the model: requests in, decisions out.

use std::sync::Arc;

use prost_types::Duration;
use thiserror::Error;

use self::body::Body;
use self::headers::header;
use crate::model::{
    Decision, Descriptor, Entry, Finding, InvalidRequest, Micros, Outcome, Override, Part, Provenance, Quota, Request,
    Unit,
};
use crate::proto::envoy::config::core::v3::HeaderValue;
use crate::proto::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use crate::proto::envoy::service::ratelimit::v3::rate_limit_response::{Code, DescriptorStatus, RateLimit, rate_limit};
use crate::proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use crate::telemetry::records::Records;

mod body;
mod headers;
mod metadata;
#[cfg(test)]
mod tests;

pub use body::RefusalBody;
pub use headers::{HeaderNames, Headers};

/// Error in body and metadata if a request is refused because the store is unavailable, not because a limit is
/// exceeded.
const UNAVAILABLE: &str = "rate_limiter_unavailable";

/// Error in body and metadata if a request is refused because its message is too large to be read.
const TOO_LARGE: &str = "too_large";
/// Header with the id of a decision, on refusals only.
const DECISION_ID_HEADER: &str = "x-tidegate-decision-id";
/// Maximum number of entries of a descriptor that are read: 256. Rule files nest at most 50 rules, so the later entries of a longer descriptor
/// match no rule. If such a descriptor brings its own limit, all descriptors that begin with the same 256 entries share its counter.
const MOST_ENTRIES: usize = 256;

/// Remaining hits of an unlimited descriptor, as the reference sends them.
const UNLIMITED: u32 = u32::MAX;

impl TryFrom<RateLimitRequest> for Request {
    type Error = InvalidRequest;

    fn try_from(wire: RateLimitRequest) -> Result<Self, InvalidRequest> {
        if wire.domain.is_empty() {
            return Err(InvalidRequest::EmptyDomain);
        }
        // `collect` of results would not know the length.
        let mut descriptors = Vec::with_capacity(wire.descriptors.len());
        for descriptor in wire.descriptors {
            descriptors.push(Descriptor::try_from(descriptor)?);
        }
        Self::new(wire.domain, descriptors, wire.hits_addend)
    }
}

impl TryFrom<RateLimitDescriptor> for Descriptor {
    type Error = InvalidRequest;

    fn try_from(wire: RateLimitDescriptor) -> Result<Self, InvalidRequest> {
        let limit =
            wire.limit.map(|sent| Override::new(sent.requests_per_unit, sent.unit, sent.unit_multiplier.unwrap_or(1)));
        Ok(Self {
            entries: (wire.entries.into_iter().take(MOST_ENTRIES))
                .map(|entry| Entry { key: entry.key, value: entry.value })
                .collect(),
            limit: limit.transpose()?,
            hits_addend: wire.hits_addend,
            is_negative_hits: wire.is_negative_hits,
            proxy_entry: None,
        })
    }
}

/// Contents of an answer besides its codes.
#[derive(Clone, Default)]
pub struct Answers {
    /// Headers that describe the limits.
    pub headers: Headers,
    /// Body for a refused client.
    pub refusal_body: RefusalBody,
    /// True if the request and the metadata of its rules are returned as dynamic metadata.
    pub dynamic_metadata: bool,
    /// True if dynamic metadata contains the decision and the rule behind it.
    pub decision_metadata: bool,
    /// True if that decision also has the rule and the origin of each descriptor's answer.
    pub explains: bool,
    /// True if a refused client gets the id of the decision: in a header, and in the body if that is JSON.
    pub decision_id_header: bool,
    /// Records of decisions, which give these their ids.
    pub records: Option<Arc<Records>>,
}

/// Form of an answer: one interface's way to write a decision.
pub type Format<T> = fn(&Answers, &Request, &Decision<'_>) -> Result<T, StoreUnavailable>;

/// Answer over plain HTTP.
#[derive(Clone, Debug, PartialEq)]
pub struct HttpAnswer {
    /// True if the request is refused.
    pub is_refused: bool,
    /// Headers for the client.
    pub headers: Vec<HeaderValue>,
    /// Body for the client.
    pub body: Vec<u8>,
}

impl Answers {
    /// Formats `decision` as an answer over plain HTTP.
    ///
    /// # Errors
    /// As [`Answers::respond`].
    pub fn http(&self, request: &Request, decision: &Decision<'_>) -> Result<HttpAnswer, StoreUnavailable> {
        self.for_client(request, decision).map(|(_, answer)| answer)
    }

    /// Formats `decision` for the wire.
    ///
    /// # Errors
    /// Returns [`StoreUnavailable`] if the caller has to decide, which happens only under the policy `error`.
    pub fn respond(&self, request: &Request, decision: &Decision<'_>) -> Result<RateLimitResponse, StoreUnavailable> {
        let (id, HttpAnswer { headers: response_headers_to_add, body: raw_body, .. }) =
            self.for_client(request, decision)?;
        Ok(RateLimitResponse {
            overall_code: code(decision.outcome).into(),
            statuses: decision.parts.iter().map(status).collect(),
            response_headers_to_add,
            request_headers_to_add: headers::request(decision),
            dynamic_metadata: metadata::of(self, request, decision, id.as_deref()),
            raw_body,
            ..RateLimitResponse::default()
        })
    }

    /// Returns the id of `decision`, if the answer has it anywhere, and what the client gets.
    fn for_client(
        &self,
        request: &Request,
        decision: &Decision<'_>,
    ) -> Result<(Option<String>, HttpAnswer), StoreUnavailable> {
        if decision.outcome.is_failed() {
            return Err(StoreUnavailable);
        }
        let id = self.id(request, decision);
        let of_client = id.as_deref().filter(|_| self.is_id_for_client(decision));
        let (mut headers, mut body) = (self.headers.response(decision), Vec::new());
        if let Some(Body { content_type, text }) = self.refusal_body.of(decision, of_client) {
            headers.push(header("content-type", content_type.to_owned()));
            body = text.into_bytes();
        }
        headers.extend(of_client.map(|id| header(DECISION_ID_HEADER, id.to_owned())));
        Ok((id, HttpAnswer { is_refused: decision.outcome.is_refused(), headers, body }))
    }

    /// Returns the id of `decision`, if the answer has it anywhere.
    fn id(&self, request: &Request, decision: &Decision<'_>) -> Option<String> {
        if !self.decision_metadata && !self.is_id_for_client(decision) {
            return None;
        }
        self.records.as_ref()?.id(request, decision).map(|id| id.to_string())
    }

    /// Returns true if the client of `decision` gets its id.
    fn is_id_for_client(&self, decision: &Decision<'_>) -> bool {
        self.decision_id_header && decision.outcome.is_refused()
    }
}

/// Error if the store is unavailable and the operator leaves the decision to the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("the store of the counters cannot be asked, and the policy of this limit is to say so")]
pub struct StoreUnavailable;

/// Returns the code of `outcome`. A failed descriptor occurs only beside a refusal, and refuses nothing itself.
fn code(outcome: Outcome) -> Code {
    match outcome {
        Outcome::Admitted | Outcome::Failed => Code::Ok,
        Outcome::Refused => Code::OverLimit,
    }
}

fn status(part: &Part) -> DescriptorStatus {
    let code = code(part.outcome()).into();
    // Envoy makes headers of the other fields.
    if !part.is_exposed() {
        return DescriptorStatus { code, ..DescriptorStatus::default() };
    }
    match &part.finding {
        Finding::Unmatched | Finding::Denied => DescriptorStatus { code, ..DescriptorStatus::default() },
        Finding::Unlimited => DescriptorStatus { code, limit_remaining: UNLIMITED, ..DescriptorStatus::default() },
        // No limit was checked. Envoy makes its own Retry-After of the time.
        Finding::Limited(tightest) if !tightest.verdict.provenance.is_counted() => DescriptorStatus {
            code,
            duration_until_reset: (tightest.verdict.provenance == Provenance::Closed)
                .then(|| seconds(tightest.verdict.duration_until_reset())),
            ..DescriptorStatus::default()
        },
        Finding::Limited(tightest) => DescriptorStatus {
            code,
            current_limit: Some(current_limit(tightest.quota, tightest.name)),
            limit_remaining: tightest.verdict.remaining_for_client(),
            duration_until_reset: Some(seconds(tightest.verdict.duration_until_reset())),
            quota: None,
        },
    }
}

/// Rounds up to whole seconds, because Envoy drops fractions of a second.
fn seconds(length: Micros) -> Duration {
    Duration { seconds: i64::try_from(length.ceil_secs()).unwrap_or(i64::MAX), nanos: 0 }
}

fn current_limit(quota: Quota, name: Option<&str>) -> RateLimit {
    let (unit, multiplier) = match quota.window().unit() {
        Some((unit, multiplier)) => (wire_unit(unit), multiplier),
        None => (rate_limit::Unit::Unknown, 1),
    };
    RateLimit {
        name: name.map(quotable).unwrap_or_default(),
        requests_per_unit: quota.limit(),
        unit: unit.into(),
        unit_multiplier: (multiplier != 1).then_some(multiplier),
    }
}

/// Returns `name` in a form that Envoy can write: Envoy puts it between quotes into a header and escapes nothing.
fn quotable(name: &str) -> String {
    let is_plain = |c: char| (c.is_ascii_graphic() || c == ' ') && c != '"' && c != '\\';
    name.chars().map(|c| if is_plain(c) { c } else { '_' }).collect()
}

fn wire_unit(unit: Unit) -> rate_limit::Unit {
    match unit {
        Unit::Second => rate_limit::Unit::Second,
        Unit::Minute => rate_limit::Unit::Minute,
        Unit::Hour => rate_limit::Unit::Hour,
        Unit::Day => rate_limit::Unit::Day,
        Unit::Week => rate_limit::Unit::Week,
        Unit::Month => rate_limit::Unit::Month,
        Unit::Year => rate_limit::Unit::Year,
    }
}
