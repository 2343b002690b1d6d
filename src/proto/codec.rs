//! How messages become bytes: as tonic's codec does it, with buffers of a decision's size.

use std::marker::PhantomData;

use prost::Message;
use tonic::codec::{BufferSettings, Codec};
use tonic_prost::{ProstDecoder, ProstEncoder};

/// What each direction of a call allocates at first: 512 bytes, which hold a decision about four descriptors; a larger
/// message grows it. tonic's 8 KiB go past the allocator's quick path, on every call (`docs/performance.md`).
const BUFFER_BYTES: usize = 512;
/// When a stream of messages is sent on: at 32 KiB, tonic's own. A decision is one message.
const YIELD_BYTES: usize = 32 * 1_024;

/// Protobuf messages of some hundred bytes.
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

fn buffers() -> BufferSettings {
    BufferSettings::new(BUFFER_BYTES, YIELD_BYTES)
}
