//! Request body with a timeout, which is read only while its connection has room for it.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use tokio::time::{Instant, Sleep};
use tonic::Status;

use super::memory::{self, Account, Call, Hold, UNCOUNTED_REQUEST_BYTES};

/// Largest message that is kept: 1 MiB, the bound on a request (`docs/decisions/0074`).
pub const LARGEST_MESSAGE: usize = 1 << 20;
/// Maximum bytes of a part of a body: 16 KiB, the largest frame (`SETTINGS_MAX_FRAME_SIZE` in RFC 9113).
const PART_BYTES: usize = 16 * 1_024;
/// Bytes of a body that must arrive before its timeout, unless the body ends: 64 KiB. A long message that keeps
/// arriving is not late.
const PROGRESS_BYTES: usize = 64 << 10;
/// Timeout for a request to arrive while all connections hold far too much memory: 1 s, and up to 1 s more, because the
/// check runs once per second. No Envoy waits that long for an answer (its timeout is 250 ms in the examples), and the
/// memory of hostile peers is released soon.
const PRESSED: Duration = Duration::from_secs(1);

/// Body of a client's request. It ends with an error if the end of the request takes too long.
///
/// The body of a decision request has usually arrived with its head, so most calls have only the bytes. The error is
/// the status with which a gRPC handler answers. Other handlers see a broken body.
#[derive(Debug)]
pub struct RequestBody {
    body: Incoming,
    /// Last part that was read, until it is kept or passed to the handler.
    early: Option<Bytes>,
    /// True if the whole body was received and read. Cached, because h2 takes a lock to answer this.
    has_arrived: bool,
    /// `None` for a small request that arrived whole.
    slow: Option<Box<Slow>>,
}

/// State of a body that is large or has not arrived: its timers, and its part in the account of the connection.
#[derive(Debug, Default)]
struct Slow {
    allowed: Option<Duration>,
    late: Option<Pin<Box<Sleep>>>,
    /// Timer of the next check if all connections hold far too much memory.
    pressed: Option<Pin<Box<Sleep>>>,
    account: Option<Arc<Account>>,
    /// Bytes that have arrived since the timer was set.
    arrived: usize,
    /// Remaining time of the timer when a wait for room began. The timer stops during that wait.
    left: Option<Duration>,
    /// Message that is arriving, in parts. The handler gets it when it is complete: tonic allocates a whole message as
    /// soon as it sees the beginning, and a peer could announce much and send little.
    kept: Kept,
    /// Trailers, error or end that came after the last part.
    end: Option<End>,
    /// Messages in the body, if the account of the connection counts them. An HTTP/1 connection has one body at a time,
    /// and its handler bounds it.
    messages: Option<Messages>,
    /// Own part in the account, for a stream that need not end: its service may read it in another task. Other bodies
    /// are read in the task of their call, and use the part of the running call.
    own: Option<Call>,
    /// Bytes in `RequestBody::early`, counted while there is no room for the rest of their message.
    begun: Option<Hold>,
    /// One window of bytes that h2 may hold for this body. Dropped when the whole body was read.
    unread: Option<Hold>,
}

/// Copied parts of a message. h2 returns slices of a read buffer, and the buffer stays allocated as long as its
/// smallest slice.
#[derive(Debug, Default)]
struct Kept {
    blocks: VecDeque<BytesMut>,
    bytes: usize,
}

/// End of a body: trailers, an error, or nothing.
type End = Option<Result<Frame<Bytes>, Status>>;

/// Position of the bytes read so far in the sequence of gRPC messages. Each has a prefix of a flag and its length.
#[derive(Clone, Copy, Debug, Default)]
struct Messages {
    prefix: [u8; 5],
    prefix_bytes: usize,
    /// Bytes of the message that have not arrived.
    missing: usize,
    /// True if the message is above [`LARGEST_MESSAGE`].
    is_too_large: bool,
    /// Bytes of the longest message so far, with its prefix. Messages above [`LARGEST_MESSAGE`] are not kept and not
    /// counted.
    largest: usize,
}

impl Messages {
    /// Returns true while no message is above [`UNCOUNTED_REQUEST_BYTES`].
    fn is_small(&self) -> bool {
        self.largest <= UNCOUNTED_REQUEST_BYTES
    }

    /// Returns true if a part of the message is missing and the message is kept.
    fn is_open(&self) -> bool {
        self.prefix_bytes > 0 || self.missing > 0 && !self.is_too_large
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
                self.is_too_large = self.missing > LARGEST_MESSAGE;
                if !self.is_too_large {
                    self.largest = self.largest.max(self.missing + self.prefix.len());
                }
            }
        }
    }
}

impl Kept {
    fn add(&mut self, bytes: &[u8]) {
        let has_room = self.blocks.back().is_some_and(|last| last.capacity() - last.len() >= bytes.len());
        if !has_room {
            // The size of a block grows with the bytes that have arrived.
            let room = self.bytes.clamp(bytes.len(), PART_BYTES.max(bytes.len()));
            self.blocks.push_back(BytesMut::with_capacity(room));
        }
        if let Some(last) = self.blocks.back_mut() {
            last.extend_from_slice(bytes);
        }
        self.bytes += bytes.len();
    }

    fn take(&mut self) -> Option<Bytes> {
        let block = self.blocks.pop_front()?.freeze();
        self.bytes -= block.len();
        Some(block)
    }
}

impl RequestBody {
    /// Creates a body that ends with an error if neither its end nor [`PROGRESS_BYTES`] of it arrive within `allowed`.
    /// The time starts at the first wait, and again after each such progress. `None` waits forever.
    pub(super) fn new(body: Incoming, allowed: Option<Duration>) -> Self {
        let slow = Slow { allowed, ..Slow::default() };
        Self { body, early: None, has_arrived: false, slow: Some(Box::new(slow)) }
    }

    /// Creates a body of gRPC messages that is read while `account`, the one of its connection, has room. The time of a
    /// wait for room does not count.
    pub(super) fn of_account(body: Incoming, allowed: Option<Duration>, account: &Arc<Account>) -> Self {
        let mut body = Self { body, early: None, has_arrived: false, slow: None };
        let mut messages = Messages::default();
        if let Some(bytes) = arrived(&mut body.body) {
            messages.pass(&bytes);
            body.early = Some(bytes);
        }
        body.has_arrived = body.body.is_end_stream();
        if body.has_arrived && messages.is_small() {
            return body;
        }
        let account = || Arc::clone(account);
        body.early = body.early.map(|bytes| Bytes::copy_from_slice(&bytes));
        body.slow = Some(Box::new(Slow {
            allowed,
            arrived: body.early.as_ref().map_or(0, Bytes::len),
            account: Some(account()),
            messages: Some(messages),
            own: allowed.is_none().then(|| Call::new(account(), None)),
            begun: body.early.as_ref().map(|bytes| Hold::begun(account(), bytes.len())),
            unread: (!body.has_arrived).then(|| Hold::open_body(account())),
            ..Slow::default()
        }));
        body
    }

    /// Returns true if the whole body was received and read.
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

    /// Returns the error if the request has waited too long while all connections hold far too much memory.
    fn poll_pressed(&mut self, cx: &mut Context<'_>) -> Poll<Status> {
        let (Some(_), Some(account)) = (self.allowed, &self.account) else { return Poll::Pending };
        let pressed = self.pressed.get_or_insert_with(|| Box::pin(tokio::time::sleep(PRESSED)));
        while pressed.as_mut().poll(cx).is_ready() {
            if account.is_pressed() {
                return Poll::Ready(Status::deadline_exceeded(format!(
                    "the request did not arrive within {PRESSED:?}, and the memory for requests is full"
                )));
            }
            pressed.as_mut().reset(Instant::now() + PRESSED);
        }
        Poll::Pending
    }

    /// Returns true if the next part may be read.
    fn may_begin(&mut self, has_arrived: bool, cx: &Context<'_>) -> bool {
        let Some(messages) = &self.messages else { return true };
        // A call that holds more than one part can add does not wait for its last parts.
        let has_room = messages.missing > 0 || messages.largest > PART_BYTES || has_arrived;
        has_room
            || match &mut self.own {
                Some(own) => own.may_begin(false, cx.waker()),
                None => memory::may_begin(cx),
            }
            || self.pause()
    }

    /// Returns true if there is room for the messages to which the read bytes belong.
    fn may_hold(&mut self, has_arrived: bool, cx: &Context<'_>) -> bool {
        let Some(messages) = &self.messages else { return true };
        let largest = messages.largest;
        (has_arrived && messages.is_small())
            || match &mut self.own {
                Some(own) => own.may_hold(largest, false, cx.waker()),
                None => memory::may_hold(largest, cx),
            }
            || self.pause()
    }

    /// Stops the timer while there is no room. Always returns false.
    fn pause(&mut self) -> bool {
        if self.left.is_none() {
            self.left = self.late.as_ref().map(|late| late.deadline().saturating_duration_since(Instant::now()));
        }
        false
    }

    /// Counts `bytes`, which wait for room for the rest of their message, and copies them. Later calls do neither.
    fn begin(&mut self, bytes: Bytes) -> Bytes {
        if self.begun.is_some() {
            return bytes;
        }
        self.begun = self.account.as_ref().map(|account| Hold::begun(Arc::clone(account), bytes.len()));
        Bytes::copy_from_slice(&bytes)
    }

    /// Keeps `bytes`, for which there is room.
    fn keep(&mut self, bytes: &[u8]) {
        self.begun = None;
        self.kept.add(bytes);
        if self.messages.is_some_and(|messages| messages.is_open() || messages.largest > 0) {
            match &mut self.own {
                Some(own) => own.keeps(self.kept.bytes),
                None => memory::keeps(self.kept.bytes),
            }
        }
    }

    /// Returns the next part for the handler, once its message is complete.
    fn give(&mut self) -> Option<End> {
        if self.end.is_none() && self.messages.is_some_and(|messages| messages.is_open()) {
            return None;
        }
        match self.kept.take() {
            Some(bytes) => Some(Some(Ok(Frame::data(bytes)))),
            None => self.end.take(),
        }
    }

    /// Ends the body. An error drops the kept parts.
    fn end(&mut self, end: End) {
        if let Some(Err(_)) = end {
            self.kept = Kept::default();
        }
        self.end = Some(end);
    }
}

/// Returns the part of a body that has arrived with its head. A small request that has arrived is decided at once, even if many large ones
/// wait for room. No waker is needed, because the call's own task polls again. An error then comes again. Trailers without data have no reader.
fn arrived(body: &mut Incoming) -> Option<Bytes> {
    let mut cx = Context::from_waker(Waker::noop());
    match Pin::new(body).poll_frame(&mut cx) {
        Poll::Ready(Some(Ok(frame))) => frame.into_data().ok(),
        _ => None,
    }
}

fn poll_data(body: &mut Incoming, cx: &mut Context<'_>) -> Poll<Result<Bytes, End>> {
    Pin::new(body).poll_frame(cx).map(|frame| match frame {
        Some(Ok(frame)) => frame.into_data().map_err(|trailers| Some(Ok(trailers))),
        Some(Err(broken)) => Err(Some(Err(Status::from_error(Box::new(broken))))),
        None => Err(None),
    })
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let Self { body, early, has_arrived, slow } = &mut *self;
        let Some(slow) = slow else {
            return match early.take() {
                Some(bytes) => Poll::Ready(Some(Ok(Frame::data(bytes)))),
                None => {
                    poll_data(body, cx).map(|data| data.map_or_else(|end| end, |bytes| Some(Ok(Frame::data(bytes)))))
                }
            };
        };
        loop {
            if let Some(bytes) = early.take() {
                if !slow.may_hold(*has_arrived, cx) {
                    match slow.poll_pressed(cx) {
                        Poll::Ready(late) => slow.end(Some(Err(late))),
                        Poll::Pending => {
                            *early = Some(slow.begin(bytes));
                            return Poll::Pending;
                        }
                    }
                } else {
                    slow.keep(&bytes);
                }
            }
            if let Some(given) = slow.give() {
                return Poll::Ready(given);
            }
            *has_arrived = *has_arrived || body.is_end_stream();
            if !slow.may_begin(*has_arrived, cx) {
                match slow.poll_pressed(cx) {
                    Poll::Ready(late) => slow.end(Some(Err(late))),
                    Poll::Pending => return Poll::Pending,
                }
                continue;
            }
            match poll_data(body, cx) {
                Poll::Ready(Ok(bytes)) => {
                    slow.pass(&bytes);
                    *early = Some(bytes);
                    *has_arrived = body.is_end_stream();
                    if *has_arrived {
                        slow.unread = None;
                    }
                }
                Poll::Ready(Err(end)) => slow.end(end),
                Poll::Pending => match (slow.poll_late(cx), slow.poll_pressed(cx)) {
                    (Poll::Ready(late), _) | (_, Poll::Ready(late)) => slow.end(Some(Err(late))),
                    (Poll::Pending, Poll::Pending) => return Poll::Pending,
                },
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        let is_given =
            self.early.is_none() && self.slow.as_ref().is_none_or(|slow| slow.kept.bytes == 0 && slow.end.is_none());
        is_given && (self.has_arrived || self.body.is_end_stream())
    }

    fn size_hint(&self) -> SizeHint {
        let kept = self.slow.as_ref().map_or(0, |slow| slow.kept.bytes);
        let read = kept + self.early.as_ref().map_or(0, Bytes::len);
        let read = u64::try_from(read).unwrap_or(u64::MAX);
        if self.has_arrived {
            return SizeHint::with_exact(read);
        }
        let mut hint = self.body.size_hint();
        if let Some(upper) = hint.upper() {
            hint.set_upper(upper.saturating_add(read));
        }
        hint.set_lower(hint.lower().saturating_add(read));
        hint
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_kept_in_blocks_that_grow_with_them() {
        let mut kept = Kept::default();
        let parts: Vec<Vec<u8>> =
            (0..3_000_u16).map(|part| vec![part.to_be_bytes()[1]; usize::from(part % 50)]).collect();
        parts.iter().for_each(|part| kept.add(part));
        let room: usize = kept.blocks.iter().map(BytesMut::capacity).sum();
        assert!(kept.bytes == parts.concat().len() && room < 2 * kept.bytes, "{room} for {}", kept.bytes);
        let taken: Vec<Bytes> = std::iter::from_fn(|| kept.take()).collect();
        assert_eq!((taken.concat(), kept.bytes), (parts.concat(), 0));
    }

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
