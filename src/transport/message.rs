//! Message of a call before tonic reads it. A message above the bound is read without being kept, and still gets a
//! decision.
//!
//! tonic answers a message above its bound with an error, and an error is an admission to Envoy. So the prefix of the
//! message is read here first. Of a message above the bound only the domain is kept. tonic gets a substitute that
//! contains only this domain, and the extensions of the call get the mark [`UnreadMessage`].
//!
//! A message that is compressed by gzip is inflated here, up to the bound, and tonic gets it inflated.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::request::Parts;
use http::{Extensions, HeaderValue};
use http_body::{Body, Frame, SizeHint};
use prost::Message;
use tokio::time::Instant;
use tonic::Status;
use tonic::metadata::MetadataValue;

use self::gzip::{BLOCK_BYTES, Inflation, Step};
use self::skim::{Skimmed, Skimmer};
use super::budget::inflation::InflationTurn;
use super::budget::{self, UNCOUNTED_REQUEST_BYTES};
use crate::proto::envoy::service::ratelimit::v3::RateLimitRequest;
use crate::telemetry::undecided::Reason;

mod gzip;
mod skim;

/// Largest message that is read whole: 4 MiB, the default of gRPC and of the reference.
pub const LARGEST_MESSAGE: usize = 4 << 20;
/// Bytes in front of a message: a flag and the length (gRPC over HTTP/2, Length-Prefixed-Message).
const PREFIX_BYTES: usize = 5;
/// Largest compressed message that is inflated at once: 16 KiB, and the bytes up to which that is done: 64 KiB, above
/// which a request is large. Both take less than a millisecond.
const COMPRESSED_AT_ONCE: usize = 16 << 10;
const INFLATED_AT_ONCE: usize = 64 << 10;

/// Mark of a call whose message was above the bound. The message that comes with it has only the domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct UnreadMessage {
    /// True if the request may have brought its own limits.
    pub(super) may_bring_limit: bool,
}

/// Time at which the caller of a compressed message began to wait, at the earliest. Marks the call, because it may then
/// wait for its turn to be inflated.
#[derive(Clone, Copy, Debug)]
pub(super) struct Began(Instant);

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
    flag: u8,
    length: u32,
}

/// Compression of the messages of a call (header `grpc-encoding`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Compression {
    Gzip,
    /// None, or one that is not known here.
    Other,
}

/// Message of which nothing can be decided.
#[derive(Debug)]
pub(super) struct Unreadable {
    /// `None` if the body ended with an error.
    pub(super) reason: Option<Reason>,
    pub(super) status: Status,
}

/// Result of reading a message that tonic cannot read.
enum Read {
    /// Bytes of the message.
    Whole(Vec<u8>),
    Skimmed(Skimmed),
}

impl Compression {
    /// Returns the compression that a header names.
    pub(super) fn of(encoding: Option<&HeaderValue>) -> Self {
        if encoding.is_some_and(|encoding| encoding.as_bytes() == b"gzip") { Self::Gzip } else { Self::Other }
    }
}

impl Began {
    /// Returns the time for a call whose message has just been read.
    fn before_now() -> Self {
        let now = Instant::now();
        Self(now.checked_sub(budget::waited()).unwrap_or(now))
    }

    /// Returns the longest time for which the call can have waited.
    pub(super) fn waited(&self) -> Duration {
        self.0.elapsed()
    }
}

impl Unreadable {
    fn broken_gzip(error: &std::io::Error) -> Self {
        let status = Status::internal(format!("the message is no valid gzip stream: {error}"));
        Self { reason: Some(Reason::BrokenGzip), status }
    }

    fn compression() -> Self {
        let mut status = Status::unimplemented(
            "the message is compressed, and not by gzip: set no compression, or grpc-encoding: gzip",
        );
        status.metadata_mut().insert("grpc-accept-encoding", MetadataValue::from_static("identity,gzip"));
        Self { reason: Some(Reason::Compression), status }
    }
}

impl From<Status> for Unreadable {
    fn from(status: Status) -> Self {
        Self { reason: None, status }
    }
}

impl Prefix {
    fn of(bytes: &[u8]) -> Option<Self> {
        let [flag, a, b, c, d] = *bytes.first_chunk::<PREFIX_BYTES>()?;
        Some(Self { flag, length: u32::from_be_bytes([a, b, c, d]) })
    }

    /// Returns true if tonic can handle the message. It refuses flags that are not known.
    fn is_ordinary(self) -> bool {
        match self.flag {
            0 => self.length as usize <= LARGEST_MESSAGE,
            1 => false,
            _ => true,
        }
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
    /// Reads on until there is a message for tonic: this one, inflated if it is compressed, or the substitute for one above
    /// the bound. With a substitute, marks the call in `head`. `longest_domain` returns the bytes of the longest domain of
    /// the rules.
    ///
    /// # Errors
    /// Returns the error with which the body ended, or an error if the message ended early or cannot be inflated.
    pub(super) async fn open(
        mut self,
        head: &mut Parts,
        compression: Compression,
        longest_domain: impl FnOnce() -> usize,
    ) -> Result<BegunMessage<B>, Unreadable> {
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
        let (length, skimmer) = (prefix.length as usize, Skimmer::new(longest_domain()));
        let read = match (prefix.flag, compression) {
            (0, _) => Read::Skimmed(self.skim(length, skimmer).await?),
            (_, Compression::Gzip) => self.inflate(length, skimmer, &mut head.extensions).await?,
            (_, Compression::Other) => return Err(Unreadable::compression()),
        };
        let message = match read {
            Read::Whole(message) => message,
            Read::Skimmed(Skimmed { domain, may_bring_limit }) => {
                head.extensions.insert(UnreadMessage { may_bring_limit });
                RateLimitRequest { domain, ..RateLimitRequest::default() }.encode_to_vec()
            }
        };
        let length = u32::try_from(message.len()).unwrap_or(u32::MAX).to_be_bytes();
        self.read = [&[0][..], &length, &message, &self.read].concat().into();
        Ok(self.begun())
    }

    /// Reads a message of `left` bytes with `skimmer`. Keeps the bytes that follow the message.
    async fn skim(&mut self, mut left: usize, mut skimmer: Skimmer) -> Result<Skimmed, Unreadable> {
        while left > 0 {
            skimmer.read(&self.part(&mut left).await?);
        }
        Ok(skimmer.finish())
    }

    /// Inflates a compressed message of `length` bytes. One that is large, or becomes large, waits for its turn. Marks the
    /// call, whose extensions are `of_call`, with the time at which its message had been read.
    async fn inflate(&mut self, length: usize, skimmer: Skimmer, of_call: &mut Extensions) -> Result<Read, Unreadable> {
        if length > LARGEST_MESSAGE {
            let _turn = InflationTurn::on_connection().await;
            let inflation = Inflation::new(VecDeque::new(), false);
            return self.inflate_in_steps(inflation, length, None, skimmer).await;
        }
        let (mut parts, mut left) = (VecDeque::new(), length);
        while left > 0 {
            parts.push_back(self.part(&mut left).await?);
        }
        of_call.insert(Began::before_now());
        if length <= COMPRESSED_AT_ONCE {
            let inflated =
                || gzip::inflate(parts.clone(), INFLATED_AT_ONCE).map_err(|error| Unreadable::broken_gzip(&error));
            if let Some(message) = inflated()? {
                return Ok(Read::Whole(with_room(message, length, inflated).await?));
            }
        }
        InflationTurn::on_connection().await.and_in_process().await.keep();
        let inflation = Inflation::new(parts, true);
        self.inflate_in_steps(inflation, 0, Some(Vec::new()), skimmer).await
    }

    /// Inflates a message of which `left` bytes have not been read, and lets other calls run after each step. Keeps it in
    /// `message`. What is above the bound is not inflated.
    async fn inflate_in_steps(
        &mut self,
        mut inflation: Inflation,
        mut left: usize,
        mut message: Option<Vec<u8>>,
        mut skimmer: Skimmer,
    ) -> Result<Read, Unreadable> {
        let (mut bytes, mut block) = (0, vec![0; BLOCK_BYTES]);
        loop {
            match inflation.step(&mut block).map_err(|error| Unreadable::broken_gzip(&error))? {
                Step::Made(made) => {
                    let made = block.get(..made).unwrap_or_default();
                    skimmer.read(made);
                    bytes += made.len();
                    if bytes > LARGEST_MESSAGE {
                        drop((inflation, message));
                        while left > 0 {
                            self.part(&mut left).await?;
                        }
                        return Ok(Read::Skimmed(skimmer.finish()));
                    }
                    message.iter_mut().for_each(|message| message.extend_from_slice(made));
                }
                Step::Starved => inflation.add(self.part(&mut left).await?, left == 0),
                Step::More => {}
                Step::End => return Ok(message.map_or_else(|| Read::Skimmed(skimmer.finish()), Read::Whole)),
            }
            tokio::task::yield_now().await;
        }
    }

    /// Returns the next part of a message of which `left` bytes are missing.
    async fn part(&mut self, left: &mut usize) -> Result<Bytes, Unreadable> {
        if self.read.is_empty() {
            self.read = self.next().await?.ok_or_else(|| Unreadable {
                reason: Some(Reason::Malformed),
                status: Status::internal(format!("the message ended {left} bytes early")),
            })?;
        }
        let part = self.read.split_to((*left).min(self.read.len()));
        *left -= part.len();
        Ok(part)
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

/// Waits until the connection has room for `message`, which was inflated from `length` bytes. `again` inflates it anew,
/// because it is dropped while it waits.
async fn with_room(
    message: Vec<u8>,
    length: usize,
    again: impl FnOnce() -> Result<Option<Vec<u8>>, Unreadable>,
) -> Result<Vec<u8>, Unreadable> {
    if message.len() <= UNCOUNTED_REQUEST_BYTES {
        return Ok(message);
    }
    let (bytes, mut message) = (length + message.len(), Some(message));
    poll_fn(|cx| {
        let has_room = budget::may_keep(bytes, cx);
        message = message.take().filter(|_| has_room);
        if has_room { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    message.map_or_else(|| Ok(again()?.unwrap_or_default()), Ok)
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::task::Waker;

    use hyper::rt::Executor;
    use tokio::sync::oneshot;

    use super::super::activity::Activity;
    use super::super::budget::runner::Runner;
    use super::super::budget::{Account, CONNECTION_BYTES, Call, Hold};
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_compressed_call_waits_for_its_turn_within_the_time_of_its_caller() {
        const WAIT: Duration = Duration::from_millis(30);
        let runner = Runner::new(Arc::default(), Duration::MAX, Activity::new(Instant::now(), Arc::default()));
        runner.execute(Box::pin(async {
            let _turn = InflationTurn::on_connection().await;
            tokio::time::sleep(WAIT).await;
        }));
        let (done, opened) = oneshot::channel();
        runner.execute(Box::pin(async move {
            let (mut head, ()) = http::Request::new(()).into_parts();
            let message = gzip::tests::gzip(&vec![0; INFLATED_AT_ONCE + 1]);
            let prefix = [&[1][..], &u32::try_from(message.len()).unwrap().to_be_bytes()].concat();
            let body = axum::body::Body::from([prefix, message].concat());
            let Ok(Beginning::Other(body)) = Beginning::of(body) else { panic!("it is compressed") };
            body.open(&mut head, Compression::Gzip, || 0).await.unwrap();
            let _ = done.send(head.extensions.get::<Began>().map(Began::waited));
        }));
        assert_eq!(opened.await.unwrap(), Some(WAIT));
    }

    #[tokio::test]
    async fn an_inflated_message_that_has_no_room_is_dropped_and_inflated_again_when_it_has() {
        let account = Arc::new(Account::default());
        let full = Hold::untaken(Arc::clone(&account), CONNECTION_BYTES);
        let mut other = Call::new(Arc::clone(&account), None);
        assert!(other.may_hold(CONNECTION_BYTES, true, Waker::noop()), "it has the turn");
        let (done, mut inflated) = oneshot::channel();
        let again = || Ok(Some(vec![2; 2_000]));
        let call = Box::pin(async move {
            let small = with_room(vec![0; UNCOUNTED_REQUEST_BYTES], 100, again).await.unwrap();
            let _ = done.send((small, with_room(vec![1; 2_000], 100, again).await.unwrap()));
        });
        Runner::new(account, Duration::MAX, Activity::new(Instant::now(), Arc::default())).execute(call);
        for _ in 0..10 {
            tokio::task::yield_now().await;
        }
        assert!(inflated.try_recv().is_err(), "it waits");
        drop((other, full));
        assert_eq!(inflated.await.unwrap(), (vec![0; UNCOUNTED_REQUEST_BYTES], vec![2; 2_000]));
    }
}
