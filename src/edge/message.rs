//! Message of a call, read from its body within the bound on a request: 1 MiB and 10,000 entries.
//!
//! An error is an admission to Envoy, so a message beyond the bound is read to its end without being kept, and its domain decides.
//! A message that is compressed by gzip is inflated up to the bound.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::HeaderValue;
use http_body::Body;
use prost::{DecodeError, Message as _};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;
use tonic::Status;
use tonic::metadata::MetadataValue;

use self::gzip::{BLOCK_BYTES, Inflation, Step};
pub use self::skim::Skimmed;
use self::skim::Skimmer;
use crate::proto::envoy::service::ratelimit::v3::RateLimitRequest;
pub use crate::serve::body::LARGEST_MESSAGE;
use crate::serve::memory::inflation::InflationTurn;
use crate::serve::memory::{self, UNCOUNTED_REQUEST_BYTES};
use crate::telemetry::undecided::Reason;

mod gzip;
mod skim;

/// Maximum number of entries, and of descriptors, of such a message: 10,000. Matching them takes a worker about 10 ms.
pub const MOST_ENTRIES: usize = 10_000;
/// Number of entries, or of descriptors, above which each worker decides one message at a time: 1,000, which take about 1 ms.
const MANY_ENTRIES: usize = 1_000;
/// Bytes that hold no more than [`MANY_ENTRIES`]: an empty one takes 2. They are not counted in a message of this size.
const FEW_BYTES: usize = 2 * MANY_ENTRIES;
/// Bytes in front of a message: a flag and the length (gRPC over HTTP/2, Length-Prefixed-Message).
const PREFIX_BYTES: usize = 5;
/// Largest compressed message that is inflated at once: 16 KiB, and the bytes up to which that is done: 64 KiB. Both take less than a
/// millisecond.
const COMPRESSED_AT_ONCE: usize = 16 << 10;
const INFLATED_AT_ONCE: usize = 64 << 10;

thread_local! {
    /// Turn of the messages with more than [`MANY_ENTRIES`] of a worker, which is a thread: first come, first served.
    static TURN: Arc<Semaphore> = Arc::new(Semaphore::new(1));
}

/// Message of a request.
#[derive(Clone, Debug)]
pub enum Message {
    /// An encoded `RateLimitRequest` within the bound.
    Whole {
        /// The message.
        bytes: Bytes,
        /// True if it has more than 1,000 entries or descriptors.
        is_many: bool,
    },
    /// A message beyond the bound.
    TooLarge(Skimmed),
}

/// Message that was read, and the time at which its caller began to wait, at the earliest, if it was compressed: such a message waits for
/// its turn to be inflated.
#[derive(Debug)]
pub(super) struct Read {
    pub(super) message: Message,
    pub(super) began: Option<Instant>,
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

/// Body that is being read.
#[derive(Debug)]
struct Reader<B> {
    /// Bytes that were received and not read yet.
    read: Bytes,
    rest: B,
}

impl Message {
    /// Returns the message of these bytes. `longest_domain` returns the bytes of the longest domain of the rules.
    pub fn of(bytes: Bytes, longest_domain: impl FnOnce() -> usize) -> Self {
        if bytes.len() <= FEW_BYTES {
            return Self::Whole { bytes, is_many: false };
        }
        let mut skimmer = Skimmer::new(longest_domain());
        skimmer.read(&bytes);
        let skimmed = skimmer.finish();
        if bytes.len() > LARGEST_MESSAGE || skimmed.entries > MOST_ENTRIES {
            return Self::TooLarge(skimmed);
        }
        Self::Whole { bytes, is_many: skimmed.entries > MANY_ENTRIES }
    }

    /// Decodes the message. One with many entries waits for the turn of this worker; keep it until the decision.
    ///
    /// # Errors
    /// If the message is no request.
    pub(super) async fn decoded(self) -> Result<(WireRequest, Turn), DecodeError> {
        match self {
            Self::TooLarge(skimmed) => Ok((WireRequest::TooLarge(skimmed), None)),
            Self::Whole { bytes, is_many } => {
                let turn = turn(is_many).await;
                Ok((WireRequest::Whole(RateLimitRequest::decode(bytes)?), turn))
            }
        }
    }
}

/// Turn of a worker to decode and decide a request with many entries.
pub(super) type Turn = Option<OwnedSemaphorePermit>;

/// Waits for the turn of this worker, if a request has many entries. Keep the result until the decision.
pub(super) async fn turn(is_many: bool) -> Turn {
    if !is_many {
        return None;
    }
    let turn = TURN.with(Arc::clone).acquire_owned().await.ok();
    // The worker serves its other calls first.
    tokio::task::yield_now().await;
    turn
}

/// Request of the wire.
#[derive(Clone, Debug)]
pub enum WireRequest {
    /// A request within the bound on bytes and entries.
    Whole(RateLimitRequest),
    /// A request beyond it.
    TooLarge(Skimmed),
}

impl WireRequest {
    /// Returns its domain.
    pub(super) fn domain_mut(&mut self) -> &mut String {
        match self {
            Self::Whole(request) => &mut request.domain,
            Self::TooLarge(skimmed) => &mut skimmed.domain,
        }
    }
}

impl Read {
    /// Returns the longest time for which the call can have waited.
    pub(super) fn waited(&self) -> Duration {
        self.began.map_or_else(memory::waited, |began| began.elapsed())
    }
}

impl Compression {
    /// Returns the compression that a header names.
    pub(super) fn of(encoding: Option<&HeaderValue>) -> Self {
        if encoding.is_some_and(|encoding| encoding.as_bytes() == b"gzip") { Self::Gzip } else { Self::Other }
    }
}

impl Unreadable {
    fn malformed(why: String) -> Self {
        Self { reason: Some(Reason::Malformed), status: Status::internal(why) }
    }

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

/// Reads the only message of `body`, and the body to its end. `longest_domain` returns the bytes of the longest domain of the rules.
///
/// # Errors
/// Returns the error with which the body ended, or an error if the message ended early or cannot be inflated.
pub(super) async fn read<B>(
    body: B,
    compression: Compression,
    longest_domain: impl FnOnce() -> usize,
) -> Result<Read, Unreadable>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let mut reader = Reader { read: Bytes::new(), rest: body };
    let (flag, length) = reader.prefix().await?;
    let read = match flag {
        0 if length <= LARGEST_MESSAGE => {
            Read { message: Message::of(reader.whole(length).await?, longest_domain), began: None }
        }
        0 => {
            let (mut skimmer, mut left) = (Skimmer::new(longest_domain()), length);
            while left > 0 {
                skimmer.read(&reader.part(&mut left).await?);
            }
            Read { message: Message::TooLarge(skimmer.finish()), began: None }
        }
        // Boxed, so that calls without compression do not carry it.
        1 if compression == Compression::Gzip => Box::pin(reader.inflate(length, longest_domain())).await?,
        1 => return Err(Unreadable::compression()),
        flag => return Err(Unreadable::malformed(format!("a message has flag {flag}; 0 and 1 are known"))),
    };
    reader.end().await?;
    Ok(read)
}

impl<B> Reader<B>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    /// Reads the prefix of the message: its flag and its length.
    async fn prefix(&mut self) -> Result<(u8, usize), Unreadable> {
        loop {
            if let Some(&[flag, a, b, c, d]) = self.read.first_chunk::<PREFIX_BYTES>() {
                self.read = self.read.split_off(PREFIX_BYTES);
                return Ok((flag, usize::try_from(u32::from_be_bytes([a, b, c, d])).unwrap_or(usize::MAX)));
            }
            let Some(more) = self.next().await? else {
                return Err(Unreadable::malformed("the call has no message".to_owned()));
            };
            self.read = if self.read.is_empty() { more } else { [&self.read[..], &more].concat().into() };
        }
    }

    /// Reads a message of `length` bytes. One that arrived in one piece is not copied.
    async fn whole(&mut self, length: usize) -> Result<Bytes, Unreadable> {
        if self.read.len() >= length {
            return Ok(self.read.split_to(length));
        }
        let mut left = length;
        let first = self.part(&mut left).await?;
        let mut whole = BytesMut::with_capacity(length);
        whole.extend_from_slice(&first);
        while left > 0 {
            whole.extend_from_slice(&self.part(&mut left).await?);
        }
        Ok(whole.freeze())
    }

    /// Inflates a compressed message of `length` bytes. One that is large, or becomes large, waits for its turn.
    async fn inflate(&mut self, length: usize, longest_domain: usize) -> Result<Read, Unreadable> {
        if length > LARGEST_MESSAGE {
            let _turn = InflationTurn::on_connection().await;
            let inflation = Inflation::new(VecDeque::new(), false);
            let message = self.inflate_in_steps(inflation, length, None, longest_domain).await?;
            return Ok(Read { message, began: None });
        }
        let (mut parts, mut left) = (VecDeque::new(), length);
        while left > 0 {
            parts.push_back(self.part(&mut left).await?);
        }
        let now = Instant::now();
        let began = Some(now.checked_sub(memory::waited()).unwrap_or(now));
        if length <= COMPRESSED_AT_ONCE {
            let inflated =
                || gzip::inflate(parts.clone(), INFLATED_AT_ONCE).map_err(|error| Unreadable::broken_gzip(&error));
            if let Some(message) = inflated()? {
                let message = with_room(message, length, inflated).await?;
                return Ok(Read { message: Message::of(message.into(), || longest_domain), began });
            }
        }
        InflationTurn::on_connection().await.and_in_process().await.keep();
        let inflation = Inflation::new(parts, true);
        let message = self.inflate_in_steps(inflation, 0, Some(Vec::new()), longest_domain).await?;
        Ok(Read { message, began })
    }

    /// Inflates a message of which `left` bytes have not been read, and lets other calls run after each step. Keeps it in
    /// `message`. What is above the bound is not inflated.
    async fn inflate_in_steps(
        &mut self,
        mut inflation: Inflation,
        mut left: usize,
        mut message: Option<Vec<u8>>,
        longest_domain: usize,
    ) -> Result<Message, Unreadable> {
        let mut skimmer = Skimmer::new(longest_domain);
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
                        return Ok(Message::TooLarge(skimmer.finish()));
                    }
                    message.iter_mut().for_each(|message| message.extend_from_slice(made));
                }
                Step::Starved => inflation.add(self.part(&mut left).await?, left == 0),
                Step::More => {}
                Step::End => {
                    return Ok(message.map_or_else(
                        || Message::TooLarge(skimmer.finish()),
                        |message| Message::of(message.into(), || longest_domain),
                    ));
                }
            }
            tokio::task::yield_now().await;
        }
    }

    /// Returns the next part of a message of which `left` bytes are missing.
    async fn part(&mut self, left: &mut usize) -> Result<Bytes, Unreadable> {
        if self.read.is_empty() {
            let more = self.next().await?;
            self.read = more.ok_or_else(|| Unreadable::malformed(format!("the message ended {left} bytes early")))?;
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

    /// Reads the body to its end.
    async fn end(&mut self) -> Result<(), Status> {
        while !self.rest.is_end_stream() && self.next().await?.is_some() {}
        Ok(())
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
        let has_room = memory::may_keep(bytes, cx);
        message = message.take().filter(|_| has_room);
        if has_room { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    message.map_or_else(|| Ok(again()?.unwrap_or_default()), Ok)
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use hyper::rt::Executor;
    use tokio::sync::oneshot;

    use super::*;
    use crate::serve::activity::Activity;
    use crate::serve::memory::runner::Runner;
    use crate::serve::memory::{Account, CONNECTION_BYTES, Call, Hold};

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
            let message = gzip::tests::gzip(&vec![0; INFLATED_AT_ONCE + 1]);
            let prefix = [&[1][..], &u32::try_from(message.len()).unwrap().to_be_bytes()].concat();
            let body = axum::body::Body::from([prefix, message].concat());
            let read = read(body, Compression::Gzip, || 0).await.unwrap();
            let _ = done.send(read.waited());
        }));
        assert_eq!(opened.await.unwrap(), WAIT);
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
