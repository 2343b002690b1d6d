//! Between the protocol's messages and our own words: requests in, decisions out.

use http::HeaderName;
use http::header::InvalidHeaderName;
use prost_types::value::Kind;
use prost_types::{Duration, ListValue, Struct, Value};
use smallvec::SmallVec;
use thiserror::Error;

use crate::model::{
    Decision, Descriptor, Entry, Finding, InvalidRequest, Metadata, Micros, Outcome, Override, Part, Provenance, Quota,
    Request, Tightest, Unit, Verdict,
};
use crate::proto::envoy::config::core::v3::HeaderValue;
use crate::proto::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use crate::proto::envoy::service::ratelimit::v3::rate_limit_response::{Code, DescriptorStatus, RateLimit, rate_limit};
use crate::proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};

/// The most text of entries that dynamic metadata repeats: 1 MiB. A byte that is not UTF-8 takes three there, and an
/// answer too large for its caller would be an error.
const MOST_METADATA_TEXT: usize = 1 << 20;

/// What body and metadata say when a request is refused because the store could not be asked, and nobody exceeded anything.
const UNAVAILABLE: &str = "rate_limiter_unavailable";

/// What is remaining of an unlimited descriptor, as the reference tells it.
const UNLIMITED: u32 = u32::MAX;

impl TryFrom<RateLimitRequest> for Request {
    type Error = InvalidRequest;

    fn try_from(wire: RateLimitRequest) -> Result<Self, InvalidRequest> {
        let descriptors = wire.descriptors.into_iter().map(Descriptor::try_from).collect::<Result<_, _>>();
        // An empty domain is the first thing to say, whatever else is wrong.
        if wire.domain.is_empty() {
            return Err(InvalidRequest::EmptyDomain);
        }
        Self::new(wire.domain, descriptors?, wire.hits_addend)
    }
}

impl TryFrom<RateLimitDescriptor> for Descriptor {
    type Error = InvalidRequest;

    fn try_from(wire: RateLimitDescriptor) -> Result<Self, InvalidRequest> {
        let limit =
            wire.limit.map(|sent| Override::new(sent.requests_per_unit, sent.unit, sent.unit_multiplier.unwrap_or(1)));
        Ok(Self {
            entries: wire.entries.into_iter().map(|entry| Entry { key: entry.key, value: entry.value }).collect(),
            limit: limit.transpose()?,
            hits_addend: wire.hits_addend,
            is_negative_hits: wire.is_negative_hits,
        })
    }
}

/// What an answer carries beside its codes.
#[derive(Clone, Debug, Default)]
pub struct Answers {
    /// The three headers, where they are sent.
    pub headers: Option<HeaderNames>,
    /// Whether the request and the metadata of its rules are returned as dynamic metadata.
    pub dynamic_metadata: bool,
}

/// The names of the three headers, spelled as the operator did and valid: Envoy writes them unchecked.
#[derive(Clone, Debug)]
pub struct HeaderNames {
    limit: String,
    remaining: String,
    reset: String,
}

impl Answers {
    /// The wire's view of a decision.
    ///
    /// # Errors
    /// [`StoreUnavailable`] when the decision is that the caller has to decide: only under the policy `error`.
    pub fn respond(&self, request: &Request, decision: &Decision) -> Result<RateLimitResponse, StoreUnavailable> {
        if decision.outcome.is_failed() {
            return Err(StoreUnavailable);
        }
        let mut response = RateLimitResponse {
            overall_code: code(decision.outcome).into(),
            statuses: decision.parts.iter().map(status).collect(),
            response_headers_to_add: self.headers.as_ref().map(|names| names.headers(decision)).unwrap_or_default(),
            dynamic_metadata: self.dynamic_metadata.then(|| dynamic_metadata(request, decision)),
            ..RateLimitResponse::default()
        };
        if let Some(wait) = decision.unavailable_for {
            response.response_headers_to_add.extend([
                header("retry-after", wait.ceil_secs().max(1).to_string()),
                // Envoy puts it in the place of its own `text/plain`.
                header("content-type", "application/json".to_owned()),
            ]);
            response.raw_body = format!("{{\"error\":\"{UNAVAILABLE}\"}}\n").into_bytes();
        }
        // Said whether or not metadata is asked for: what was not counted must not pass for what was.
        let unasked = unasked(decision);
        if !unasked.is_empty() {
            response.dynamic_metadata.get_or_insert_default().fields.extend(unasked);
        }
        Ok(response)
    }
}

/// The store could not be asked, and the operator leaves the decision to the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("the store of the counters cannot be asked, and the policy of this limit is to say so")]
pub struct StoreUnavailable;

/// What metadata says of answers that no store gave: the policies that answered in its place, and whether the request is
/// refused for that reason alone.
fn unasked(decision: &Decision) -> Vec<(String, Value)> {
    let mut policies: SmallVec<[&str; 4]> = SmallVec::new();
    for part in &decision.parts {
        if let Finding::Limited(Tightest { verdict: Verdict { provenance, .. }, .. }) = &part.finding
            && *provenance != Provenance::Store
            && !policies.contains(&provenance.name())
        {
            policies.push(provenance.name());
        }
    }
    if policies.is_empty() {
        return Vec::new();
    }
    let mut fields = vec![("on_store_failure".to_owned(), list(policies.into_iter().map(text)))];
    if decision.unavailable_for.is_some() {
        fields.push((UNAVAILABLE.to_owned(), value(Kind::BoolValue(true))));
    }
    fields
}

fn header(key: &str, value: String) -> HeaderValue {
    HeaderValue { key: key.to_owned(), value, raw_value: Vec::new() }
}

impl HeaderNames {
    /// The names of the headers that tell the limit, what remains of it, and the seconds until its reset.
    ///
    /// # Errors
    /// When one of them is no name that a header can have.
    pub fn new(limit: String, remaining: String, reset: String) -> Result<Self, InvalidHeaderName> {
        for name in [&limit, &remaining, &reset] {
            HeaderName::try_from(name.as_str())?;
        }
        Ok(Self { limit, remaining, reset })
    }

    /// The headers of the one descriptor they describe, if any has a limit. Numbers only: nothing a client sent can
    /// stand in them.
    fn headers(&self, decision: &Decision) -> Vec<HeaderValue> {
        let Some(tightest) = described(decision) else { return Vec::new() };
        vec![
            header(&self.limit, tightest.quota.limit().to_string()),
            header(&self.remaining, tightest.verdict.remaining.to_string()),
            header(&self.reset, tightest.verdict.duration_until_reset().ceil_secs().to_string()),
        ]
    }
}

/// The descriptor that the headers describe, chosen as the reference does: the least remaining, the first of equals; but
/// the last refused one that is no quota, if there is any.
fn described<'d, 'a>(decision: &'d Decision<'a>) -> Option<&'d Tightest<'a>> {
    let mut best = UNLIMITED;
    let mut chosen = None;
    for part in &decision.parts {
        let Finding::Limited(tightest) = &part.finding else { continue };
        if !tightest.verdict.provenance.is_counted() {
            continue;
        }
        if tightest.verdict.remaining < best {
            best = tightest.verdict.remaining;
            chosen = Some(tightest);
        }
        if part.outcome().is_refused() && !tightest.role.is_quota() {
            best = 0;
            chosen = Some(tightest);
        }
    }
    chosen
}

/// A failed descriptor stands only beside a refusal, and refuses nothing itself.
fn code(outcome: Outcome) -> Code {
    match outcome {
        Outcome::Admitted | Outcome::Failed => Code::Ok,
        Outcome::Refused => Code::OverLimit,
    }
}

fn status(part: &Part) -> DescriptorStatus {
    let code = code(part.outcome()).into();
    match &part.finding {
        Finding::Unmatched | Finding::Denied(_) => DescriptorStatus { code, ..DescriptorStatus::default() },
        Finding::Unlimited => DescriptorStatus { code, limit_remaining: UNLIMITED, ..DescriptorStatus::default() },
        // No limit was looked at. Envoy makes its own Retry-After of the time.
        Finding::Limited(tightest) if !tightest.verdict.provenance.is_counted() => DescriptorStatus {
            code,
            duration_until_reset: (tightest.verdict.provenance == Provenance::Closed)
                .then(|| seconds(tightest.verdict.duration_until_reset())),
            ..DescriptorStatus::default()
        },
        Finding::Limited(tightest) => DescriptorStatus {
            code,
            current_limit: Some(current_limit(tightest.quota, tightest.name)),
            limit_remaining: tightest.verdict.remaining,
            duration_until_reset: Some(seconds(tightest.verdict.duration_until_reset())),
            quota: None,
        },
    }
}

/// Whole seconds, rounded up: Envoy cuts off what is below a second.
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

/// A limit's name as Envoy can write it: Envoy puts it between quotes into a header and escapes nothing.
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

/// The request, and the metadata of the rules that let it pass: the first rule's where two say the same.
fn dynamic_metadata(request: &Request, decision: &Decision) -> Struct {
    let mut room = MOST_METADATA_TEXT;
    let descriptors = request.descriptors().iter().map(|descriptor| {
        let mut fields =
            vec![("entries", list(descriptor.entries.iter().map(|entry| text(&entry_text(entry, &mut room)))))];
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
    Struct { fields: fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect() }
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

/// `key=value`; a string of the protocol is UTF-8, so other bytes show as replacement characters here, and only here.
/// What `room` does not hold is cut off.
fn entry_text(entry: &Entry, room: &mut usize) -> String {
    let mut text = format!("{}={}", String::from_utf8_lossy(&entry.key), String::from_utf8_lossy(&entry.value));
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

fn structure(fields: Vec<(&str, Value)>) -> Value {
    value(Kind::StructValue(Struct {
        fields: fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect(),
    }))
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

#[cfg(test)]
mod tests {
    use super::quotable;

    #[test]
    fn a_limits_name_cannot_break_the_header_that_envoy_makes_of_it() {
        assert_eq!(quotable("per-user burst"), "per-user burst");
        assert_eq!(quotable("a\"\r\nset-cookie: x\\é"), "a___set-cookie: x__");
    }
}
