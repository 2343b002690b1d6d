//! Requests of a load: one for each key, encoded before the first call.

use std::num::NonZeroU32;

use bytes::{BufMut, Bytes, BytesMut};
use prost::Message;
use serde_json::{Value, json};

use crate::cli::call::wire;
use crate::model::{Descriptor, Entry};
use crate::proto::envoy::service::ratelimit::v3::RateLimitRequest;

/// Beginning of a place for the number of a key.
const PLACE: &str = "{n";

/// Order in which the keys are sent.
pub(super) enum Distribution {
    /// Drawn, each as often as any other.
    Uniform,
    /// Drawn, the key of rank k as often as 1/k: the probability of each key and of those before it.
    Zipf(Vec<f64>),
    /// One after the other, from the first again after the last.
    InTurn,
}

/// Part of a key or a value in `--descriptor`.
#[derive(Debug, PartialEq, Eq)]
enum Part<'t> {
    Text(&'t str),
    /// The number of the request's key.
    Number,
    /// The rest of that number divided by this one.
    Rest(NonZeroU32),
}

impl Distribution {
    /// Returns Zipf's law over so many keys.
    pub(super) fn zipf(keys: u32) -> Self {
        let mut total = 0.0;
        let mut cumulative: Vec<f64> = Vec::new();
        for rank in 1..=keys {
            total += 1.0 / f64::from(rank);
            cumulative.push(total);
        }
        cumulative.iter_mut().for_each(|sum| *sum /= total);
        Self::Zipf(cumulative)
    }

    /// Returns the key of the call `call`, one of so many.
    pub(super) fn key(&self, call: u64, keys: usize) -> usize {
        match self {
            Self::Uniform => fastrand::usize(..keys.max(1)),
            Self::Zipf(cumulative) => {
                let drawn = fastrand::f64();
                cumulative.partition_point(|sum| *sum <= drawn).min(keys.saturating_sub(1))
            }
            Self::InTurn => {
                let keys = u64::try_from(keys).unwrap_or(u64::MAX).max(1);
                usize::try_from(call % keys).unwrap_or(0)
            }
        }
    }

    pub(super) const fn name(&self) -> &'static str {
        match self {
            Self::Uniform => "uniform",
            Self::Zipf(_) => "zipf",
            Self::InTurn => "in-turn",
        }
    }
}

/// Returns the requests of `keys` keys, each as `encode` writes it. One request is as many as any number of equal ones.
///
/// # Errors
/// If a key or a value has a place for the number that cannot be read.
pub(super) fn encoded(
    domain: &str,
    descriptors: &[&Descriptor],
    hits: Option<u64>,
    keys: u32,
    encode: fn(&RateLimitRequest) -> Bytes,
) -> Result<Vec<Bytes>, String> {
    let mut has_place = false;
    for entry in descriptors.iter().flat_map(|descriptor| &descriptor.entries) {
        for text in [&entry.key, &entry.value] {
            has_place |= parts(&String::from_utf8_lossy(text))?.iter().any(|part| !matches!(part, Part::Text(_)));
        }
    }
    let keys = if has_place { keys } else { 1 };
    (0..keys).map(|key| Ok(encode(&request(domain, descriptors, hits, key)?))).collect()
}

/// Returns the descriptors of a request as JSON, for `/check`.
pub(super) fn json(request: &RateLimitRequest) -> Bytes {
    let descriptors = request.descriptors.iter().map(|descriptor| {
        let entries = descriptor.entries.iter().map(|entry| {
            let [key, value] = [&entry.key, &entry.value].map(|text| String::from_utf8_lossy(text));
            json!({ "key": key, "value": value })
        });
        let entries: Vec<Value> = entries.collect();
        match descriptor.hits_addend {
            Some(hits) => json!({ "entries": entries, "hitsAddend": hits }),
            None => json!({ "entries": entries }),
        }
    });
    let descriptors: Vec<Value> = descriptors.collect();
    json!({ "descriptors": descriptors }).to_string().into()
}

/// Returns a message as gRPC frames it: no compression, its length, itself.
pub(super) fn framed(request: &RateLimitRequest) -> Bytes {
    let length = request.encoded_len();
    let mut framed = BytesMut::with_capacity(length + 5);
    framed.put_u8(0);
    framed.put_u32(u32::try_from(length).unwrap_or(u32::MAX));
    framed.put_slice(&request.encode_to_vec());
    framed.freeze()
}

/// Returns the request of the key `number`.
fn request(
    domain: &str,
    descriptors: &[&Descriptor],
    hits: Option<u64>,
    number: u32,
) -> Result<RateLimitRequest, String> {
    let filled = |text: &[u8]| -> Result<String, String> {
        let text = String::from_utf8_lossy(text);
        let filled = parts(&text)?.into_iter().map(|part| match part {
            Part::Text(text) => text.to_owned(),
            Part::Number => number.to_string(),
            Part::Rest(divisor) => (number % divisor).to_string(),
        });
        Ok(filled.collect())
    };
    let descriptors = descriptors.iter().map(|descriptor| {
        let entries = descriptor.entries.iter().map(|entry| Ok(Entry::new(filled(&entry.key)?, filled(&entry.value)?)));
        let entries = entries.collect::<Result<_, String>>()?;
        Ok(wire(&Descriptor { entries, ..Descriptor::default() }, hits))
    });
    let descriptors = descriptors.collect::<Result<_, String>>()?;
    Ok(RateLimitRequest { domain: domain.to_owned(), descriptors, hits_addend: 0 })
}

/// Splits `text` at its places for the number: `{n}`, and `{n%M}` with a divisor M.
fn parts(text: &str) -> Result<Vec<Part<'_>>, String> {
    let mut parts = Vec::new();
    let mut rest = text;
    while let Some(at) = rest.find(PLACE) {
        let (before, place) = rest.split_at(at);
        let behind = place.get(PLACE.len()..).unwrap_or_default();
        let (part, after) = if let Some(after) = behind.strip_prefix('}') {
            (Part::Number, after)
        } else if let Some(behind) = behind.strip_prefix('%') {
            let read = behind.split_once('}').and_then(|(divisor, after)| Some((divisor.parse().ok()?, after)));
            let (divisor, after) = read.ok_or_else(|| {
                format!("'{place}': write {{n}}, or {{n%M}} with a number M above 0, such as {{n%10}}")
            })?;
            (Part::Rest(divisor), after)
        } else {
            (Part::Text(PLACE), behind)
        };
        parts.extend([Part::Text(before), part]);
        rest = after;
    }
    parts.push(Part::Text(rest));
    Ok(parts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_key_of_rank_k_is_drawn_as_often_as_one_kth_of_the_first() {
        let zipf = Distribution::zipf(3);
        let mut drawn = [0_u32; 3];
        fastrand::seed(7);
        for call in 0..110_000 {
            drawn[zipf.key(call, 3)] += 1;
        }
        for (drawn, expected) in drawn.into_iter().zip([60_000, 30_000, 20_000]) {
            assert!(drawn.abs_diff(expected) < 1_000, "{drawn} for {expected}");
        }
    }

    #[test]
    fn keys_in_turn_follow_each_other_and_begin_again() {
        let keys: Vec<_> = (0..7).map(|call| Distribution::InTurn.key(call, 3)).collect();
        assert_eq!(keys, [0, 1, 2, 0, 1, 2, 0]);
    }

    /// The entries of the request of the key 1234 with this entry.
    fn filled(key: &str, value: &str) -> Result<(String, String), String> {
        let entries = vec![Entry::new(key.to_owned(), value.to_owned())];
        let descriptor = Descriptor { entries, ..Descriptor::default() };
        let request = request("d", &[&descriptor], None, 1_234)?;
        let entry = &request.descriptors[0].entries[0];
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Ok((text(&entry.key), text(&entry.value)))
    }

    #[test]
    fn the_number_of_a_key_or_its_rest_stands_in_keys_and_values() {
        let filled = |key, value| filled(key, value).expect("it is read");
        assert_eq!(filled("k{n%10}", "u{n}-{n%1000}"), ("k4".to_owned(), "u1234-234".to_owned()));
        assert_eq!(filled("{name}", "{n"), ("{name}".to_owned(), "{n".to_owned()), "other braces stay");
    }

    #[test]
    fn a_place_for_a_number_that_cannot_be_read_is_an_error() {
        for value in ["{n%0}", "{n%}", "{n%ten}", "{n%10", "{n%-1}"] {
            let error = filled("user", value).expect_err(value);
            assert!(error.contains(value) && error.contains("such as {n%10}"), "{error}");
        }
    }

    #[test]
    fn without_a_number_all_requests_are_equal() {
        let descriptor = |value: &str| Descriptor {
            entries: vec![Entry::new("user".to_owned(), value.to_owned())],
            ..Descriptor::default()
        };
        let count = |value: &str| encoded("d", &[&descriptor(value)], None, 20, framed).expect("they are read").len();
        assert_eq!((count("u"), count("u{n}"), count("u{n%2}")), (1, 20, 20));
    }

    #[test]
    fn a_body_for_the_check_has_the_descriptors_and_their_hits() {
        let entries = vec![Entry::new("user".to_owned(), "u{n}".to_owned())];
        let descriptor = Descriptor { entries, ..Descriptor::default() };
        let body = |hits| {
            let body = encoded("d", &[&descriptor], hits, 2, json).expect("it is read").swap_remove(1);
            String::from_utf8(body.into()).expect("text")
        };
        assert_eq!(body(None), r#"{"descriptors":[{"entries":[{"key":"user","value":"u1"}]}]}"#);
        assert_eq!(body(Some(3)), r#"{"descriptors":[{"entries":[{"key":"user","value":"u1"}],"hitsAddend":3}]}"#);
    }
}
