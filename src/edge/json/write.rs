//! Writer of a `RateLimitResponse` as JSON, in the proto3 mapping, directly from the generated types.
//!
//! A test compares the text with that of prost-reflect.

use prost_types::value::Kind;
use prost_types::{Duration, Struct, Value};
use serde::ser::{Error, Serialize, SerializeMap, Serializer};

use crate::proto::envoy::config::core::v3::HeaderValue;
use crate::proto::envoy::service::ratelimit::v3::RateLimitResponse;
use crate::proto::envoy::service::ratelimit::v3::rate_limit_response::{Code, DescriptorStatus, RateLimit, rate_limit};

/// Alphabet of RFC 4648, section 4.
const BASE64: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/// Writes an answer. Returns `None` if it holds a time or a number that JSON has no form for, which no answer of ours does.
pub(super) fn write(response: &RateLimitResponse) -> Option<Vec<u8>> {
    serde_json::to_vec(&Json(response)).ok()
}

/// Value of the protocol that is written as JSON.
struct Json<'a, T>(&'a T);

/// Values of the protocol that are written as an array.
struct Array<'a, T>(&'a [T]);

/// Adds a field unless it has its default value.
fn field<M: SerializeMap, T>(map: &mut M, name: &'static str, value: &T, is_default: bool) -> Result<(), M::Error>
where
    T: Serialize + ?Sized,
{
    if is_default { Ok(()) } else { map.serialize_entry(name, value) }
}

/// Adds a message if there is one.
fn optional<M: SerializeMap>(map: &mut M, name: &'static str, value: Option<impl Serialize>) -> Result<(), M::Error> {
    value.map_or(Ok(()), |value| map.serialize_entry(name, &value))
}

impl Serialize for Json<'_, RateLimitResponse> {
    fn serialize<S: Serializer>(&self, json: S) -> Result<S::Ok, S::Error> {
        // Tidegate assigns no quotas.
        let RateLimitResponse {
            overall_code,
            statuses,
            response_headers_to_add,
            request_headers_to_add,
            raw_body,
            dynamic_metadata,
            quota: _,
        } = self.0;
        let mut map = json.serialize_map(None)?;
        field(&mut map, "overallCode", &EnumCode(*overall_code), *overall_code == 0)?;
        field(&mut map, "statuses", &Array(statuses), statuses.is_empty())?;
        for (name, headers) in
            [("responseHeadersToAdd", response_headers_to_add), ("requestHeadersToAdd", request_headers_to_add)]
        {
            field(&mut map, name, &Array(headers), headers.is_empty())?;
        }
        field(&mut map, "rawBody", &base64(raw_body), raw_body.is_empty())?;
        optional(&mut map, "dynamicMetadata", dynamic_metadata.as_ref().map(Json))?;
        map.end()
    }
}

impl Serialize for Json<'_, DescriptorStatus> {
    fn serialize<S: Serializer>(&self, json: S) -> Result<S::Ok, S::Error> {
        let DescriptorStatus { code, current_limit, limit_remaining, duration_until_reset, quota: _ } = self.0;
        let mut map = json.serialize_map(None)?;
        field(&mut map, "code", &EnumCode(*code), *code == 0)?;
        optional(&mut map, "currentLimit", current_limit.as_ref().map(Json))?;
        field(&mut map, "limitRemaining", limit_remaining, *limit_remaining == 0)?;
        optional(&mut map, "durationUntilReset", duration_until_reset.as_ref().map(Json))?;
        map.end()
    }
}

impl Serialize for Json<'_, RateLimit> {
    fn serialize<S: Serializer>(&self, json: S) -> Result<S::Ok, S::Error> {
        let RateLimit { requests_per_unit, unit, name, unit_multiplier } = self.0;
        let mut map = json.serialize_map(None)?;
        field(&mut map, "requestsPerUnit", requests_per_unit, *requests_per_unit == 0)?;
        field(&mut map, "unit", &EnumUnit(*unit), *unit == 0)?;
        field(&mut map, "name", name, name.is_empty())?;
        optional(&mut map, "unitMultiplier", *unit_multiplier)?;
        map.end()
    }
}

impl Serialize for Json<'_, HeaderValue> {
    fn serialize<S: Serializer>(&self, json: S) -> Result<S::Ok, S::Error> {
        let HeaderValue { key, value, raw_value } = self.0;
        let mut map = json.serialize_map(None)?;
        field(&mut map, "key", key, key.is_empty())?;
        field(&mut map, "value", value, value.is_empty())?;
        field(&mut map, "rawValue", &base64(raw_value), raw_value.is_empty())?;
        map.end()
    }
}

impl<'a, T> Serialize for Array<'a, T>
where
    Json<'a, T>: Serialize,
{
    fn serialize<S: Serializer>(&self, json: S) -> Result<S::Ok, S::Error> {
        json.collect_seq(self.0.iter().map(Json))
    }
}

impl Serialize for Json<'_, Duration> {
    fn serialize<S: Serializer>(&self, json: S) -> Result<S::Ok, S::Error> {
        json.collect_str(self.0)
    }
}

impl Serialize for Json<'_, Struct> {
    fn serialize<S: Serializer>(&self, json: S) -> Result<S::Ok, S::Error> {
        json.collect_map(self.0.fields.iter().map(|(name, value)| (name, Json(value))))
    }
}

impl Serialize for Json<'_, Value> {
    fn serialize<S: Serializer>(&self, json: S) -> Result<S::Ok, S::Error> {
        match &self.0.kind {
            None | Some(Kind::NullValue(_)) => json.serialize_unit(),
            Some(Kind::BoolValue(flag)) => json.serialize_bool(*flag),
            Some(Kind::NumberValue(number)) if number.is_finite() => json.serialize_f64(*number),
            Some(Kind::NumberValue(_)) => Err(S::Error::custom("JSON has no such number")),
            Some(Kind::StringValue(text)) => json.serialize_str(text),
            Some(Kind::ListValue(list)) => Array(&list.values).serialize(json),
            Some(Kind::StructValue(fields)) => Json(fields).serialize(json),
        }
    }
}

/// Code, written as its name, or as its number if it has no name.
struct EnumCode(i32);

impl Serialize for EnumCode {
    fn serialize<S: Serializer>(&self, json: S) -> Result<S::Ok, S::Error> {
        match Code::try_from(self.0) {
            Ok(code) => json.serialize_str(code.as_str_name()),
            Err(_) => json.serialize_i32(self.0),
        }
    }
}

/// Unit, written as its name, or as its number if it has no name.
struct EnumUnit(i32);

impl Serialize for EnumUnit {
    fn serialize<S: Serializer>(&self, json: S) -> Result<S::Ok, S::Error> {
        match rate_limit::Unit::try_from(self.0) {
            Ok(unit) => json.serialize_str(unit.as_str_name()),
            Err(_) => json.serialize_i32(self.0),
        }
    }
}

/// Encodes bytes in base64 with padding.
fn base64(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let group = [0, 1, 2].map(|at| u32::from(chunk.get(at).copied().unwrap_or_default()));
        let group = group[0] << 16 | group[1] << 8 | group[2];
        for digit in 0..4 {
            let place = (group >> (18 - 6 * digit)) as usize & 63;
            text.push(if digit > chunk.len() { '=' } else { char::from(BASE64[place]) });
        }
    }
    text
}
