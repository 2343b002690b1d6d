//! A request's body, which must arrive in time and is read while its connection has room for it.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use tokio::time::{Instant, Sleep};
use tonic::Status;

use super::budget::{self, Account, Call, Hold, UNCOUNTED_REQUEST_BYTES};
use super::message::LARGEST_MESSAGE;

/// Bytes of a part of a body, at most: 16 KiB, the largest frame (`SETTINGS_MAX_FRAME_SIZE` in RFC 9113).
const PART_BYTES: usize = 16 * 1_024;
/// Bytes of a body that must arrive while its timer runs, or its end: 64 KiB. A long message that goes on arriving is not
/// late.
const PROGRESS_BYTES: usize = 64 << 10;

/// What a client sends, and an error if the end of it takes too long.
///
/// The body of a decision is there when its head is, so most calls have nothing but the bytes. The error is the status a
/// gRPC handler answers with; other handlers see a body that broke.
#[derive(Debug)]
pub struct RequestBody {
    body: Incoming,
    /// Read, and not given to the handler yet.
    early: Option<Bytes>,
    /// All of the body was received and read. To ask h2 for it takes a lock.
    has_arrived: bool,
    /// `None` for a small request that arrived whole.
    slow: Option<Box<Slow>>,
}

/// The state of a body that is large or has not arrived: its timer, and its part in the account of the connection.
#[derive(Debug, Default)]
struct Slow {
    allowed: Option<Duration>,
    late: Option<Pin<Box<Sleep>>>,
    /// Bytes that have arrived since the timer was set.
    arrived: usize,
    /// Time left when a wait for room began; the timer stands still during that wait.
    left: Option<Duration>,
    /// The messages in it, where the account of the connection counts them. An HTTP/1 connection has one body at a time,
    /// which its handler bounds.
    messages: Option<Messages>,
    /// The part in the account of a stream that need not end, which its service may read in a task of its own. Others are
    /// read in the task of their call, whose part is the running one.
    own: Option<Call>,
    /// The bytes in `RequestBody::early`, while there is no room for the rest of their message.
    begun: Option<Hold>,
    /// A window of bytes that h2 may hold for this body. Dropped when all of the body was read.
    unread: Option<Hold>,
}

/// Where the bytes read so far end among gRPC's messages, each with a prefix of a flag and its length.
#[derive(Clone, Copy, Debug, Default)]
struct Messages {
    prefix: [u8; 5],
    prefix_bytes: usize,
    /// What is missing of the message.
    missing: usize,
    /// The longest message so far with its prefix. Of one above [`LARGEST_MESSAGE`] nothing is kept.
    largest: usize,
}

impl Messages {
    /// Returns true while none is larger than what is not counted.
    fn is_small(&self) -> bool {
        self.largest <= UNCOUNTED_REQUEST_BYTES
    }

    fn pass(&mut self, mut bytes: &[u8]) {
        while let Some((first, rest)) = bytes.split_first() {
            if self.missing > 0 {
                let passed = self.missing.min(bytes.len());
                self.missing -= passed;
                bytes = bytes.get(passed..).unwrap_or_default();
                continue;
            }
            if let Some(place) = self.prefix.get_mut(self.prefix_bytes) {
                *place = *first;
            }
            self.prefix_bytes += 1;
            bytes = rest;
            if let [_, a, b, c, d] = self.prefix
                && self.prefix_bytes == self.prefix.len()
            {
                self.prefix_bytes = 0;
                self.missing = usize::try_from(u32::from_be_bytes([a, b, c, d])).unwrap_or(usize::MAX);
                if self.missing <= LARGEST_MESSAGE {
                    self.largest = self.largest.max(self.missing + self.prefix.len());
                }
            }
        }
    }
}

impl RequestBody {
    /// A body that ends with an error when neither its end nor [`PROGRESS_BYTES`] of it arrive within `allowed` of the first
    /// wait for it, and again of each such progress; `None` waits for ever.
    pub(super) fn new(body: Incoming, allowed: Option<Duration>) -> Self {
        let slow = Slow { allowed, ..Slow::default() };
        Self { body, early: None, has_arrived: false, slow: Some(Box::new(slow)) }
    }

    /// A body of gRPC messages that is read while `account`, the one of its connection, has room. The time during which
    /// it may not be read does not count.
    pub(super) fn of_account(body: Incoming, allowed: Option<Duration>, account: &Arc<Account>) -> Self {
        let mut body = Self { body, early: None, has_arrived: false, slow: None };
        let mut messages = Messages::default();
        // A small request that has arrived is decided at once, however many large ones wait for room. Nobody has to be woken,
        // since the call's own task polls again. Errors come again then, and trailers without data are nobody's.
        let mut cx = Context::from_waker(Waker::noop());
        if let Poll::Ready(Some(Ok(frame))) = Pin::new(&mut body.body).poll_frame(&mut cx)
            && let Ok(bytes) = frame.into_data()
        {
            messages.pass(&bytes);
            body.early = Some(bytes);
        }
        body.has_arrived = body.body.is_end_stream();
        if body.has_arrived && messages.is_small() {
            return body;
        }
        let account = || Arc::clone(account);
        body.slow = Some(Box::new(Slow {
            allowed,
            arrived: body.early.as_ref().map_or(0, Bytes::len),
            messages: Some(messages),
            own: allowed.is_none().then(|| Call::new(account())),
            begun: body.early.as_ref().map(|bytes| Hold::begun(account(), bytes.len())),
            unread: (!body.has_arrived).then(|| Hold::open_body(account())),
            ..Slow::default()
        }));
        body
    }

    /// Returns true when all of the body was received and read.
    pub(super) fn has_arrived(&self) -> bool {
        self.has_arrived
    }
}

impl Slow {
    fn pass(&mut self, bytes: &[u8]) {
        self.arrived = self.arrived.saturating_add(bytes.len());
        if let Some(messages) = &mut self.messages {
            messages.pass(bytes);
        }
    }

    fn poll_late(&mut self, cx: &mut Context<'_>) -> Poll<Status> {
        let Some(allowed) = self.allowed else { return Poll::Pending };
        let late = self.late.get_or_insert_with(|| Box::pin(tokio::time::sleep(allowed)));
        if let Some(left) = self.left.take() {
            late.as_mut().reset(Instant::now() + left);
        }
        while self.arrived >= PROGRESS_BYTES && late.as_mut().poll(cx).is_ready() {
            self.arrived = 0;
            late.as_mut().reset(Instant::now() + allowed);
        }
        late.as_mut().poll(cx).map(|()| {
            Status::deadline_exceeded(format!(
                "the request's body did not arrive: neither its end nor 64 KiB of it came within {allowed:?}"
            ))
        })
    }

    /// Returns true when the next part may be read.
    fn may_begin(&mut self, has_arrived: bool, cx: &Context<'_>) -> bool {
        let Some(messages) = &self.messages else { return true };
        // A call that holds more than a part can bring does not wait for its last ones.
        let has_room = messages.missing > 0 || messages.largest > PART_BYTES || has_arrived;
        has_room
            || match &mut self.own {
                Some(own) => own.may_begin(false, cx.waker()),
                None => budget::may_begin(cx),
            }
            || self.pause()
    }

    /// Returns true when there is room for the messages that what was read belongs to.
    fn may_hold(&mut self, has_arrived: bool, cx: &Context<'_>) -> bool {
        let Some(messages) = &self.messages else { return true };
        let largest = messages.largest;
        (has_arrived && messages.is_small())
            || match &mut self.own {
                Some(own) => own.may_hold(largest, false, cx.waker()),
                None => budget::may_hold(largest, cx),
            }
            || self.pause()
    }

    /// Stops the timer while there is no room. Returns false.
    fn pause(&mut self) -> bool {
        if self.left.is_none() {
            self.left = self.late.as_ref().map(|late| late.deadline().saturating_duration_since(Instant::now()));
        }
        false
    }

    /// Counts bytes that wait for room for the rest of their message.
    fn begin(&mut self, bytes: &Bytes) {
        let account = self.own.as_ref().map(Call::account).or_else(budget::account);
        self.begun = account.map(|account| Hold::begun(account, bytes.len()));
    }
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let Self { body, early, has_arrived, slow } = &mut *self;
        let mut slow = slow.as_mut();
        if early.is_some() {
            if let Some(slow) = &mut slow {
                if !slow.may_hold(*has_arrived, cx) {
                    return Poll::Pending;
                }
                slow.begun = None;
            }
            return Poll::Ready(early.take().map(|bytes| Ok(Frame::data(bytes))));
        }
        if let Some(slow) = &mut slow {
            *has_arrived = *has_arrived || body.is_end_stream();
            if !slow.may_begin(*has_arrived, cx) {
                return Poll::Pending;
            }
        }
        let polled = Pin::new(&mut *body).poll_frame(cx);
        let frame = match polled {
            Poll::Ready(Some(Ok(frame))) => frame,
            Poll::Ready(Some(Err(broken))) => return Poll::Ready(Some(Err(Status::from_error(Box::new(broken))))),
            Poll::Ready(None) => return Poll::Ready(None),
            Poll::Pending => {
                return slow.map_or(Poll::Pending, |slow| slow.poll_late(cx).map(|late| Some(Err(late))));
            }
        };
        let bytes = match frame.into_data() {
            Ok(bytes) => bytes,
            Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
        };
        let Some(slow) = slow else { return Poll::Ready(Some(Ok(Frame::data(bytes)))) };
        slow.pass(&bytes);
        *has_arrived = body.is_end_stream();
        if *has_arrived {
            slow.unread = None;
        }
        if slow.may_hold(*has_arrived, cx) {
            return Poll::Ready(Some(Ok(Frame::data(bytes))));
        }
        slow.begin(&bytes);
        *early = Some(bytes);
        Poll::Pending
    }

    fn is_end_stream(&self) -> bool {
        self.early.is_none() && (self.has_arrived || self.body.is_end_stream())
    }

    fn size_hint(&self) -> SizeHint {
        let early = self.early.as_ref().map_or(0, |early| u64::try_from(early.len()).unwrap_or(u64::MAX));
        let mut hint = self.body.size_hint();
        if let Some(upper) = hint.upper() {
            hint.set_upper(upper.saturating_add(early));
        }
        hint.set_lower(hint.lower().saturating_add(early));
        hint
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_length_of_a_message_is_known_from_its_prefix_on_however_it_is_cut() {
        let bytes =
            [&[0, 0, 0, 1, 0][..], &[7; 256], &[0, 0, 0, 0, 0], &[1, 0, 0, 0, 3], b"abc", &[0, 0xff, 0, 0, 0]].concat();
        for cut in 1..bytes.len() {
            let mut messages = Messages::default();
            for part in bytes.chunks(cut) {
                messages.pass(part);
            }
            assert_eq!((messages.largest, messages.missing), (261, 0xff00_0000), "in parts of {cut}");
            let mut messages = Messages::default();
            bytes[..274].chunks(cut).for_each(|part| messages.pass(part));
            assert_eq!((messages.largest, messages.missing, messages.prefix_bytes), (261, 0, 0));
        }
    }
}
