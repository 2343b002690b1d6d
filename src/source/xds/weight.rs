//! Bound on the memory that a response takes, checked before the response is decoded.
//!
//! An empty message takes two bytes on the wire and hundreds in memory, so the size of a response does not bound its memory.

use bytes::Buf;
use prost::Message;
use prost::encoding::{WireType, decode_key, decode_varint};
use tonic::Status;
use tonic::codec::{Codec, DecodeBuf, Decoder};
use tonic_prost::ProstEncoder;

use crate::proto::envoy::service::discovery::v3::{DiscoveryRequest, DiscoveryResponse};

/// Bytes of memory that a response may take for each byte of the largest one: 50. 160,000 descriptors of 24 bytes with a limit take 40.
const MOST_PER_BYTE: usize = 50;
/// Depth at which the decoder gives up: 100 messages in a resource, which is two messages deep itself.
const DEEPEST: usize = 103;
/// Number of the field `resources` of a response.
const RESOURCES: u32 = 2;

/// Response of a control plane.
#[derive(Debug)]
pub(super) struct Received {
    /// The response, without its resources if it is refused.
    pub(super) response: DiscoveryResponse,
    /// Reason for which its resources were not decoded.
    pub(super) refused: Option<String>,
}

/// Codec for the stream. Responses have at most this many bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Responses(pub(super) usize);

/// Kind of a message in a response.
#[derive(Clone, Copy)]
enum Kind {
    Response,
    Resource,
    Config,
    Descriptor,
    Policy,
    Replaced,
    Struct,
    Field,
    Value,
    List,
}

impl Kind {
    /// Returns the kind of the message in a field.
    const fn of_field(self, field: u32) -> Option<Self> {
        Some(match (self, field) {
            (Self::Response, RESOURCES) => Self::Resource,
            (Self::Resource, 2) => Self::Config,
            (Self::Config, 3) | (Self::Descriptor, 4) => Self::Descriptor,
            (Self::Descriptor, 3) => Self::Policy,
            (Self::Descriptor, 8) | (Self::Value, 5) => Self::Struct,
            (Self::Policy, 5) => Self::Replaced,
            (Self::Struct, 1) => Self::Field,
            (Self::Field, 2) | (Self::List, 1) => Self::Value,
            (Self::Value, 6) => Self::List,
            _ => return None,
        })
    }

    /// Returns the bytes that one takes until its rules are in force, beside its texts: decoded, as a document, and compiled. Of 160,000 descriptors
    /// with a limit, each took 975 bytes; a map takes a node of 11 places, decoded and as JSON.
    const fn bytes(self) -> usize {
        match self {
            Self::Response | Self::Config | Self::Policy | Self::Field => 0,
            Self::Replaced => 128,
            Self::Value | Self::List => 256,
            Self::Resource => 512,
            Self::Descriptor => 1_024,
            Self::Struct => 2_048,
        }
    }
}

impl Codec for Responses {
    type Encode = DiscoveryRequest;
    type Decode = Received;
    type Encoder = ProstEncoder<DiscoveryRequest>;
    type Decoder = Self;

    fn encoder(&mut self) -> Self::Encoder {
        ProstEncoder::default()
    }

    fn decoder(&mut self) -> Self {
        *self
    }
}

impl Decoder for Responses {
    type Item = Received;
    type Error = Status;

    fn decode(&mut self, source: &mut DecodeBuf<'_>) -> Result<Option<Received>, Status> {
        // The buffer holds the whole message in one piece.
        let received = received(source.chunk(), self.0);
        source.advance(source.remaining());
        received.map(Some).map_err(|error| Status::internal(error.to_string()))
    }
}

/// Decodes a response, of which the largest may have `largest` bytes.
fn received(message: &[u8], largest: usize) -> Result<Received, prost::DecodeError> {
    let most = largest.saturating_mul(MOST_PER_BYTE);
    let mut left = most;
    if add(&mut &*message, Kind::Response, DEEPEST, &mut left).is_some() {
        return Ok(Received { response: DiscoveryResponse::decode(message)?, refused: None });
    }
    let refused = format!(
        "the response has too many descriptors, values or resources: in memory they would take more than {} MiB, the maximum for XDS_CLIENT_MAX_MSG_SIZE_IN_BYTES, so they were not decoded",
        most >> 20
    );
    Ok(Received { response: DiscoveryResponse::decode(&*without_resources(message))?, refused: Some(refused) })
}

/// Subtracts from `left` what `message` and those in it take. Returns `None` if they take more. Where the message is malformed, the decoder ends
/// as well.
fn add(message: &mut &[u8], kind: Kind, deepest: usize, left: &mut usize) -> Option<()> {
    *left = left.checked_sub(kind.bytes())?;
    while let Some((field, content)) = next(message) {
        if let Some(kind) = kind.of_field(field)
            && let Some(mut content) = content
            && deepest > 0
        {
            add(&mut content, kind, deepest - 1, left)?;
        }
    }
    Some(())
}

/// Takes the next field from `message`: its number, and its content if it has a length.
fn next<'m>(message: &mut &'m [u8]) -> Option<(u32, Option<&'m [u8]>)> {
    if message.is_empty() {
        return None;
    }
    let (field, wire_type) = decode_key(message).ok()?;
    let length = match wire_type {
        WireType::SixtyFourBit => 8,
        WireType::ThirtyTwoBit => 4,
        WireType::Varint => decode_varint(message).ok().map(|_| 0)?,
        // What is in a group counts like the fields beside it.
        WireType::StartGroup | WireType::EndGroup => 0,
        WireType::LengthDelimited => usize::try_from(decode_varint(message).ok()?).ok()?,
    };
    let (content, rest) = message.split_at_checked(length)?;
    *message = rest;
    let content = matches!(wire_type, WireType::LengthDelimited).then_some(content);
    Some((field, content))
}

/// Returns a response without its resources.
fn without_resources(mut message: &[u8]) -> Vec<u8> {
    let mut kept = Vec::new();
    let mut before = message;
    while let Some((field, _)) = next(&mut message) {
        let (bytes, rest) = before.split_at(before.len() - message.len());
        if field != RESOURCES {
            kept.extend_from_slice(bytes);
        }
        before = rest;
    }
    kept
}

#[cfg(test)]
mod tests {
    use prost_types::Any;

    use super::*;
    use crate::proto::ratelimit::config::ratelimit::v3 as proto;

    const LARGEST: usize = 4 << 20;

    /// Returns a field with a length.
    fn field(number: u8, content: &[u8]) -> Vec<u8> {
        let mut field = vec![number << 3 | 2];
        prost::encoding::encode_varint(content.len() as u64, &mut field);
        [&field[..], content].concat()
    }

    fn response(config: &[u8]) -> Vec<u8> {
        let resource = Any { type_url: "t".to_owned(), value: config.to_vec() };
        let (version_info, nonce) = ("7".to_owned(), "n".to_owned());
        DiscoveryResponse { version_info, nonce, resources: vec![resource], ..DiscoveryResponse::default() }
            .encode_to_vec()
    }

    fn is_refused(message: &[u8]) -> bool {
        let received = received(message, LARGEST).unwrap();
        assert_eq!((&*received.response.version_info, &*received.response.nonce), ("7", "n"));
        assert_eq!(received.refused.is_some(), received.response.resources.is_empty());
        received.refused.is_some()
    }

    #[test]
    fn a_response_of_tiny_messages_is_refused_before_it_is_decoded() {
        let filled = |part: &[u8]| part.repeat(3_900_000 / part.len());
        let nested =
            |levels: usize, number, inner: &[u8]| (0..levels).fold(inner.to_vec(), |inner, _| field(number, &inner));
        let in_metadata = |content: &[u8]| field(3, &field(8, content));
        // A value with a list, a list with values.
        let lists = |content: &[u8]| field(6, content);
        for (what, config) in [
            ("descriptors", filled(&field(3, &[]))),
            ("descriptors in one descriptor", field(3, &filled(&field(4, &[])))),
            ("chains of descriptors", filled(&field(3, &nested(90, 4, &[])))),
            ("descriptors between unknown fields", filled(&[&field(15, &[])[..], &field(3, &[])].concat())),
            ("descriptors between numbers", filled(&[&[15 << 3, 1][..], &field(3, &[])].concat())),
            ("replaced limits", field(3, &field(3, &filled(&field(5, &[]))))),
            ("fields of metadata", in_metadata(&filled(&field(1, &field(2, &[]))))),
            ("values in a list", in_metadata(&field(1, &field(2, &lists(&filled(&field(1, &[]))))))),
            ("lists in a list", in_metadata(&field(1, &field(2, &lists(&filled(&field(1, &lists(&[])))))))),
            ("maps in a list", in_metadata(&field(1, &field(2, &lists(&filled(&field(1, &field(5, &[])))))))),
            ("metadata of one descriptor again and again", field(3, &filled(&field(8, &[])))),
        ] {
            assert!(is_refused(&response(&config)), "{what}");
        }
        let resources = [filled(&field(2, &[])), response(&[])].concat();
        assert!(is_refused(&resources), "resources");
        let deep = nested(1_000, 4, &[]);
        assert!(!is_refused(&response(&field(3, &deep))), "the decoder refuses what is too deep");
    }

    #[test]
    fn as_many_descriptors_as_people_send_are_decoded() {
        let descriptor = |number: u32| proto::RateLimitDescriptor {
            key: "user".to_owned(),
            value: number.to_string(),
            rate_limit: Some(proto::RateLimitPolicy { unit: 1, requests_per_unit: 9, ..Default::default() }),
            ..Default::default()
        };
        let config = proto::RateLimitConfig {
            domain: "edge".to_owned(),
            descriptors: (0..160_000).map(descriptor).collect(),
            ..Default::default()
        };
        let message = response(&config.encode_to_vec());
        assert!((3_400_000..LARGEST).contains(&message.len()), "{}", message.len());
        assert!(!is_refused(&message));
        assert!(!is_refused(&response(&[])));
    }

    #[test]
    fn what_is_malformed_is_an_error_of_the_decoder() {
        for message in [&[0x12, 0x05, 0x01][..], &[0xff; 20], &[0x0a], &[0x10, 0xff]] {
            assert!(received(message, LARGEST).is_err(), "{message:?}");
        }
    }
}
