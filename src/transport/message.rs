//! Message of a call before tonic reads it. A message above the bound is read without being kept, and still gets a
//! decision.
//!
//! tonic answers a message above its bound with an error, and an error is an admission to Envoy. So the prefix of the
//! message is read here first. Of a message above the bound only the domain is kept. tonic gets a substitute that
//! contains only this domain, and the extensions of the call get the mark [`UnreadMessage`].

use std::future::poll_fn;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::request::Parts;
use http_body::{Body, Frame, SizeHint};
use prost::Message;
use tonic::Status;

use self::skim::{Skimmed, Skimmer};
use crate::proto::envoy::service::ratelimit::v3::RateLimitRequest;

mod skim;

/// Largest message that is read whole: 4 MiB, the default of gRPC and of the reference.
pub const LARGEST_MESSAGE: usize = 4 << 20;
/// Bytes in front of a message: a flag and the length (gRPC over HTTP/2, Length-Prefixed-Message).
const PREFIX_BYTES: usize = 5;

/// Mark of a call whose message was above the bound. The message that comes with it has only the domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct UnreadMessage {
    /// True if the request may have brought its own limits.
    pub(super) may_bring_limit: bool,
}

/// Body whose beginning was already read.
#[derive(Debug)]
pub(super) struct BegunMessage<B> {
    first: Option<Bytes>,
    rest: B,
}

/// Beginning of a body.
pub(super) enum Beginning<B> {
    /// The message is within the bound, and the body is unchanged.
    Ordinary(BegunMessage<B>),
    /// The message is above the bound, or its length is not known yet.
    Other(Unopened<B>),
}

/// Body whose message is not known to be within the bound.
#[derive(Debug)]
pub(super) struct Unopened<B> {
    read: Bytes,
    rest: B,
}

/// Prefix of a message.
#[derive(Clone, Copy, Debug)]
struct Prefix {
    is_compressed: bool,
    length: u32,
}

impl Prefix {
    fn of(bytes: &[u8]) -> Option<Self> {
        let [flag, a, b, c, d] = *bytes.first_chunk::<PREFIX_BYTES>()?;
        Some(Self { is_compressed: flag != 0, length: u32::from_be_bytes([a, b, c, d]) })
    }

    /// Returns true if tonic can handle the message. tonic refuses a compressed message: no encoding is accepted, and
    /// Envoy compresses no call.
    fn is_ordinary(self) -> bool {
        self.is_compressed || self.length as usize <= LARGEST_MESSAGE
    }
}

impl<B> Beginning<B>
where
    B: Body<Data = Bytes> + Unpin,
{
    /// Reads the part of `body` that has arrived, without waiting.
    pub(super) fn of(mut body: B) -> Result<Self, B::Error> {
        // The next poll of the body registers a waker for the rest.
        let mut nobody = Context::from_waker(std::task::Waker::noop());
        let read = match Pin::new(&mut body).poll_frame(&mut nobody) {
            Poll::Ready(Some(frame)) => frame?.into_data().unwrap_or_default(),
            Poll::Ready(None) | Poll::Pending => Bytes::new(),
        };
        if Prefix::of(&read).is_some_and(Prefix::is_ordinary) {
            return Ok(Self::Ordinary(BegunMessage { first: Some(read), rest: body }));
        }
        Ok(Self::Other(Unopened { read, rest: body }))
    }
}

impl<B: Body> BegunMessage<B> {
    /// Returns true if the whole body has arrived.
    pub(super) fn has_arrived(&self) -> bool {
        self.rest.is_end_stream()
    }
}

impl<B> Unopened<B>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    /// Reads on until there is a message for tonic: this one, or the substitute for one above the bound. With a
    /// substitute, marks the call in `head`. `longest_domain` returns the bytes of the longest domain of the rules.
    ///
    /// # Errors
    /// Returns the error with which the body ended, or an error if the message ended early.
    pub(super) async fn open(
        mut self,
        head: &mut Parts,
        longest_domain: impl FnOnce() -> usize,
    ) -> Result<BegunMessage<B>, Status> {
        let prefix = loop {
            if let Some(prefix) = Prefix::of(&self.read) {
                break prefix;
            }
            let Some(more) = self.next().await? else { return Ok(self.begun()) };
            self.read = if self.read.is_empty() { more } else { [&self.read[..], &more].concat().into() };
        };
        if prefix.is_ordinary() {
            return Ok(self.begun());
        }
        self.read = self.read.split_off(PREFIX_BYTES);
        let Skimmed { domain, may_bring_limit } = self.skim(prefix.length, Skimmer::new(longest_domain())).await?;
        head.extensions.insert(UnreadMessage { may_bring_limit });
        let substitute = RateLimitRequest { domain, ..RateLimitRequest::default() }.encode_to_vec();
        let length = u32::try_from(substitute.len()).unwrap_or(u32::MAX).to_be_bytes();
        self.read = [&[0][..], &length, &substitute, &self.read].concat().into();
        Ok(self.begun())
    }

    /// Reads a message of `length` bytes with `skimmer`. Keeps the bytes that follow the message.
    async fn skim(&mut self, length: u32, mut skimmer: Skimmer) -> Result<Skimmed, Status> {
        let mut left = length as usize;
        loop {
            let of_message = self.read.split_to(left.min(self.read.len()));
            skimmer.read(&of_message);
            left -= of_message.len();
            if left == 0 {
                return Ok(skimmer.finish());
            }
            let more = self.next().await?;
            self.read = more.ok_or_else(|| Status::internal(format!("the message ended {left} bytes early")))?;
        }
    }

    /// Returns the next data; `None` if no data is left.
    async fn next(&mut self) -> Result<Option<Bytes>, Status> {
        match poll_fn(|cx| Pin::new(&mut self.rest).poll_frame(cx)).await {
            Some(Ok(frame)) => Ok(frame.into_data().ok()),
            Some(Err(broken)) => Err(Status::from_error(broken.into())),
            None => Ok(None),
        }
    }

    fn begun(self) -> BegunMessage<B> {
        BegunMessage { first: Some(self.read), rest: self.rest }
    }
}

impl<B> Body for BegunMessage<B>
where
    B: Body<Data = Bytes> + Unpin,
{
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        match self.first.take() {
            Some(first) => Poll::Ready(Some(Ok(Frame::data(first)))),
            None => Pin::new(&mut self.rest).poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.first.is_none() && self.rest.is_end_stream()
    }

    /// Returns an unknown size, because no caller needs it.
    fn size_hint(&self) -> SizeHint {
        SizeHint::default()
    }
}
