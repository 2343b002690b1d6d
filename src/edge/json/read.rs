//! Reads a `RateLimitRequest` from JSON, as proto3 maps it. Beyond the bound on a request, descriptors and entries are read and not kept.
//!
//! A test compares the results with prost-reflect.

use std::cell::Cell;
use std::fmt;
use std::marker::PhantomData;

use bytes::Bytes;
use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};

use crate::edge::message::{MOST_ENTRIES, Skimmed, WireRequest};
use crate::proto::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use crate::proto::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::{Entry, RateLimitOverride};
use crate::proto::envoy::service::ratelimit::v3::RateLimitRequest;
use crate::proto::envoy::r#type::v3::RateLimitUnit;

/// Reads a request.
///
/// # Errors
/// If the body is not such a request. The error has line and column.
pub(super) fn read(body: &Bytes) -> serde_json::Result<WireRequest> {
    let source = Source { body, descriptors: Cell::default(), entries: Cell::default(), brings_limit: Cell::default() };
    let mut json = serde_json::Deserializer::from_slice(body);
    let request: RateLimitRequest = MessageFields::of(&source).deserialize(&mut json)?;
    json.end()?;
    let entries = source.entries.get().max(source.descriptors.get());
    if entries > MOST_ENTRIES {
        let may_bring_limit = source.brings_limit.get();
        return Ok(WireRequest::TooLarge(Skimmed { domain: request.domain, may_bring_limit, entries }));
    }
    Ok(WireRequest::Whole(request))
}

/// Body that is read, and what it has.
struct Source<'de> {
    body: &'de Bytes,
    descriptors: Cell<usize>,
    entries: Cell<usize>,
    brings_limit: Cell<bool>,
}

/// Message that is read field by field.
trait Message: Default {
    /// Names of its fields: in JSON, and in `proto/`. Both are read.
    const NAMES: &'static [[&'static str; 2]];

    /// Reads the value of the field with this index among [`Self::NAMES`].
    fn read<'de, A: MapAccess<'de>>(&mut self, field: usize, map: &mut A, source: &Source<'de>)
    -> Result<(), A::Error>;
}

impl Message for RateLimitRequest {
    const NAMES: &'static [[&'static str; 2]] =
        &[["domain", "domain"], ["descriptors", "descriptors"], ["hitsAddend", "hits_addend"]];

    fn read<'de, A: MapAccess<'de>>(
        &mut self,
        field: usize,
        map: &mut A,
        source: &Source<'de>,
    ) -> Result<(), A::Error> {
        match field {
            0 => set(&mut self.domain, map, PhantomData::<String>),
            1 => set(&mut self.descriptors, map, List::of(source, &source.descriptors)),
            _ => set(&mut self.hits_addend, map, Number::<u32>::NEW),
        }
    }
}

impl Message for RateLimitDescriptor {
    const NAMES: &'static [[&'static str; 2]] = &[
        ["entries", "entries"],
        ["limit", "limit"],
        ["hitsAddend", "hits_addend"],
        ["isNegativeHits", "is_negative_hits"],
    ];

    fn read<'de, A: MapAccess<'de>>(
        &mut self,
        field: usize,
        map: &mut A,
        source: &Source<'de>,
    ) -> Result<(), A::Error> {
        match field {
            0 => set(&mut self.entries, map, List::of(source, &source.entries)),
            1 => {
                set_some(&mut self.limit, map, MessageFields::of(source))?;
                source.brings_limit.set(source.brings_limit.get() || self.limit.is_some());
                Ok(())
            }
            2 => set_some(&mut self.hits_addend, map, Number::<u64>::NEW),
            _ => set(&mut self.is_negative_hits, map, PhantomData::<bool>),
        }
    }
}

impl Message for Entry {
    const NAMES: &'static [[&'static str; 2]] = &[["key", "key"], ["value", "value"]];

    fn read<'de, A: MapAccess<'de>>(
        &mut self,
        field: usize,
        map: &mut A,
        source: &Source<'de>,
    ) -> Result<(), A::Error> {
        set(if field == 0 { &mut self.key } else { &mut self.value }, map, JsonText(source.body))
    }
}

impl Message for RateLimitOverride {
    const NAMES: &'static [[&'static str; 2]] =
        &[["requestsPerUnit", "requests_per_unit"], ["unit", "unit"], ["unitMultiplier", "unit_multiplier"]];

    fn read<'de, A: MapAccess<'de>>(&mut self, field: usize, map: &mut A, _: &Source<'de>) -> Result<(), A::Error> {
        match field {
            0 => set(&mut self.requests_per_unit, map, Number::<u32>::NEW),
            1 => set(&mut self.unit, map, UnitField),
            _ => set_some(&mut self.unit_multiplier, map, Number::<u32>::NEW),
        }
    }
}

/// Reads the value of a field; `null` leaves the field as it is, and of two values the last one counts.
fn set<'de, A, S>(field: &mut S::Value, map: &mut A, seed: S) -> Result<(), A::Error>
where
    A: MapAccess<'de>,
    S: DeserializeSeed<'de>,
{
    if let Some(value) = map.next_value_seed(Nullable(seed))? {
        *field = value;
    }
    Ok(())
}

fn set_some<'de, A, S>(field: &mut Option<S::Value>, map: &mut A, seed: S) -> Result<(), A::Error>
where
    A: MapAccess<'de>,
    S: DeserializeSeed<'de>,
{
    if let Some(value) = map.next_value_seed(Nullable(seed))? {
        *field = Some(value);
    }
    Ok(())
}

/// Value, or `null` in its place.
struct Nullable<S>(S);

impl<'de, S: DeserializeSeed<'de>> DeserializeSeed<'de> for Nullable<S> {
    type Value = Option<S::Value>;

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<Self::Value, D::Error> {
        json.deserialize_option(self)
    }
}

impl<'de, S: DeserializeSeed<'de>> Visitor<'de> for Nullable<S> {
    type Value = Option<S::Value>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value or null")
    }

    fn visit_none<E: Error>(self) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_unit<E: Error>(self) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_some<D: Deserializer<'de>>(self, json: D) -> Result<Self::Value, D::Error> {
        self.0.deserialize(json).map(Some)
    }
}

/// Object of a message.
struct MessageFields<'s, 'de, T> {
    source: &'s Source<'de>,
    message: PhantomData<T>,
}

impl<'s, 'de, T> MessageFields<'s, 'de, T> {
    fn of(source: &'s Source<'de>) -> Self {
        Self { source, message: PhantomData }
    }
}

impl<'de, T: Message> DeserializeSeed<'de> for MessageFields<'_, 'de, T> {
    type Value = T;

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<T, D::Error> {
        json.deserialize_map(self)
    }
}

impl<'de, T: Message> Visitor<'de> for MessageFields<'_, 'de, T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<T, A::Error> {
        let mut message = T::default();
        while let Some(field) = map.next_key_seed(FieldName(T::NAMES))? {
            message.read(field, &mut map, self.source)?;
        }
        Ok(message)
    }
}

/// Name of a field, read as its index.
struct FieldName(&'static [[&'static str; 2]]);

impl<'de> DeserializeSeed<'de> for FieldName {
    type Value = usize;

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<usize, D::Error> {
        json.deserialize_str(self)
    }
}

impl Visitor<'_> for FieldName {
    type Value = usize;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the name of a field")
    }

    fn visit_str<E: Error>(self, name: &str) -> Result<usize, E> {
        let found = self.0.iter().position(|names| names.contains(&name));
        found.ok_or_else(|| E::custom("no field has this name"))
    }
}

/// Array of a repeated message, whose items are counted.
struct List<'s, 'de, T> {
    source: &'s Source<'de>,
    count: &'s Cell<usize>,
    items: PhantomData<T>,
}

impl<'s, 'de, T> List<'s, 'de, T> {
    fn of(source: &'s Source<'de>, count: &'s Cell<usize>) -> Self {
        Self { source, count, items: PhantomData }
    }
}

impl<'de, T: Message> DeserializeSeed<'de> for List<'_, 'de, T> {
    type Value = Vec<T>;

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<Vec<T>, D::Error> {
        json.deserialize_seq(self)
    }
}

impl<'de, T: Message> Visitor<'de> for List<'_, 'de, T> {
    type Value = Vec<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an array")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Vec<T>, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = seq.next_element_seed(MessageFields::<T>::of(self.source))? {
            self.count.set(self.count.get() + 1);
            if self.count.get() <= MOST_ENTRIES {
                items.push(item);
            }
        }
        Ok(items)
    }
}

/// String that becomes a part of the body, unless escapes in it make a copy necessary.
struct JsonText<'de>(&'de Bytes);

impl<'de> DeserializeSeed<'de> for JsonText<'de> {
    type Value = Bytes;

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<Bytes, D::Error> {
        json.deserialize_str(self)
    }
}

impl<'de> Visitor<'de> for JsonText<'de> {
    type Value = Bytes;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string")
    }

    fn visit_borrowed_str<E: Error>(self, text: &'de str) -> Result<Bytes, E> {
        Ok(self.0.slice_ref(text.as_bytes()))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Bytes, E> {
        Ok(Bytes::copy_from_slice(text.as_bytes()))
    }
}

/// Unit by its name or its number. Unknown numbers are kept, and reported later.
struct UnitField;

impl<'de> DeserializeSeed<'de> for UnitField {
    type Value = i32;

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<i32, D::Error> {
        json.deserialize_any(self)
    }
}

impl Visitor<'_> for UnitField {
    type Value = i32;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the name or the number of a unit")
    }

    fn visit_str<E: Error>(self, name: &str) -> Result<i32, E> {
        RateLimitUnit::from_str_name(name).map(Into::into).ok_or_else(|| E::custom("no unit has this name"))
    }

    fn visit_i64<E: Error>(self, number: i64) -> Result<i32, E> {
        number.try_into().map_err(E::custom)
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<i32, E> {
        number.try_into().map_err(E::custom)
    }
}

/// Whole number without a sign, as a number or as a string of digits.
struct Number<N>(PhantomData<N>);

impl<N> Number<N> {
    const NEW: Self = Self(PhantomData);
}

/// First number that is too large for 64 bits, as a float. A float that is less has at most 64 bits; `u64::MAX` itself is no float.
const TOO_LARGE: f64 = 18_446_744_073_709_551_616.0;

impl<'de, N: TryFrom<u64>> DeserializeSeed<'de> for Number<N> {
    type Value = N;

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<N, D::Error> {
        json.deserialize_any(self)
    }
}

impl<N: TryFrom<u64>> Visitor<'_> for Number<N> {
    type Value = N;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a whole number, or a string of its digits")
    }

    /// Reads the number in a string, which has the same forms as one without quotes: `"7"`, `"1e3"`, and not `"+7"` or `"07"`.
    fn visit_str<E: Error>(self, text: &str) -> Result<N, E> {
        let is_number =
            text.ends_with(|c: char| c.is_ascii_digit()) && text.starts_with(|c| matches!(c, '-' | '0'..='9'));
        let number = is_number.then(|| serde_json::from_str::<serde_json::Number>(text).ok()).flatten();
        let number = number.ok_or_else(|| E::custom("no number"))?;
        match number.as_u64() {
            Some(whole) => self.visit_u64(whole),
            None => self.visit_f64(number.as_f64().unwrap_or(f64::NAN)),
        }
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<N, E> {
        number.try_into().map_err(|_| E::custom("too large"))
    }

    fn visit_f64<E: Error>(self, number: f64) -> Result<N, E> {
        if number.fract() != 0.0 || !(0.0..TOO_LARGE).contains(&number) {
            return Err(E::custom("no whole number, or too large"));
        }
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "whole, not negative, and of at most 64 bits"
        )]
        self.visit_u64(number as u64)
    }
}
