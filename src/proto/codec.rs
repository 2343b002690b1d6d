//! Codecs for messages. They work as tonic's codec, with buffers of a decision's size.

use std::marker::PhantomData;

use bytes::{Buf, BufMut, Bytes};
use prost::{DecodeError, Message};
use tonic::Status;
use tonic::codec::{BufferSettings, Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic_prost::{ProstDecoder, ProstEncoder};

use super::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use super::large::is_large;

/// Initial buffer size in each direction of a call: 512 bytes, which hold a decision about four descriptors; a larger message
/// grows the buffer. tonic's default of 8 KiB misses the allocator's fast path on every call (`docs/performance.md`).
const BUFFER_BYTES: usize = 512;
/// Buffered bytes after which a stream of messages is sent on: 32 KiB, tonic's default. A decision is one message.
const YIELD_BYTES: usize = 32 * 1_024;

/// Codec for Protobuf messages of a few hundred bytes.
#[derive(Clone, Copy, Debug)]
pub struct SmallMessages<T, U>(PhantomData<(T, U)>);

impl<T, U> Default for SmallMessages<T, U> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<T, U> Codec for SmallMessages<T, U>
where
    T: Message + Send + 'static,
    U: Message + Default + Send + 'static,
{
    type Encode = T;
    type Decode = U;
    type Encoder = ProstEncoder<T>;
    type Decoder = ProstDecoder<U>;

    fn encoder(&mut self) -> Self::Encoder {
        ProstEncoder::new(buffers())
    }

    fn decoder(&mut self) -> Self::Decoder {
        ProstDecoder::new(buffers())
    }
}

/// A request: decoded, or still encoded if it is too large to decode whole.
#[derive(Debug)]
pub enum Incoming {
    /// A decoded request.
    Small(RateLimitRequest),
    /// An encoded request.
    Large(Bytes),
}

impl Incoming {
    /// Decodes the whole request and returns it.
    ///
    /// # Errors
    /// If the message is not a request.
    pub fn decoded(self) -> Result<RateLimitRequest, DecodeError> {
        match self {
            Self::Small(request) => Ok(request),
            Self::Large(message) => RateLimitRequest::decode(message),
        }
    }
}

/// An answer: not encoded yet, or as encoded parts.
#[derive(Debug)]
pub enum Outgoing {
    /// An answer that is not encoded yet.
    Small(RateLimitResponse),
    /// Parts of one encoded message.
    Large(Vec<Bytes>),
}

/// Codec for `ShouldRateLimit`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Decisions;

/// Decodes requests that are not large; leaves large ones encoded.
#[derive(Debug)]
pub struct Questions(ProstDecoder<RateLimitRequest>);

/// Encodes answers.
#[derive(Debug)]
pub struct Replies(ProstEncoder<RateLimitResponse>);

impl Codec for Decisions {
    type Encode = Outgoing;
    type Decode = Incoming;
    type Encoder = Replies;
    type Decoder = Questions;

    fn encoder(&mut self) -> Replies {
        Replies(ProstEncoder::new(buffers()))
    }

    fn decoder(&mut self) -> Questions {
        Questions(ProstDecoder::new(buffers()))
    }
}

impl Decoder for Questions {
    type Item = Incoming;
    type Error = Status;

    fn decode(&mut self, source: &mut DecodeBuf<'_>) -> Result<Option<Incoming>, Status> {
        // The buffer holds the whole message in one piece.
        if is_large(source.chunk()) {
            return Ok(Some(Incoming::Large(source.copy_to_bytes(source.remaining()))));
        }
        Ok(self.0.decode(source)?.map(Incoming::Small))
    }

    fn buffer_settings(&self) -> BufferSettings {
        buffers()
    }
}

impl Encoder for Replies {
    type Item = Outgoing;
    type Error = Status;

    fn encode(&mut self, answer: Outgoing, to: &mut EncodeBuf<'_>) -> Result<(), Status> {
        match answer {
            Outgoing::Small(answer) => self.0.encode(answer, to),
            Outgoing::Large(parts) => {
                to.reserve(parts.iter().map(Bytes::len).sum());
                // Each part is freed after it is copied.
                parts.into_iter().for_each(|part| to.put(part));
                Ok(())
            }
        }
    }

    fn buffer_settings(&self) -> BufferSettings {
        buffers()
    }
}

fn buffers() -> BufferSettings {
    BufferSettings::new(BUFFER_BYTES, YIELD_BYTES)
}
