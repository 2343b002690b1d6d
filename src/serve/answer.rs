//! Body of an answer whose bytes count against the connection's memory until the peer has taken them.

use std::future::Future;
use std::mem;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use tokio::sync::oneshot;

use super::activity::InFlight;
use super::memory::{self, Hold};

/// Bytes up to which an answer part does not count: 8 KiB, the buffer that tonic allocates for each answer anyway. A
/// connection has at most `protocol::MAX_STREAMS` of them.
pub const UNCOUNTED_ANSWER_BYTES: usize = 8 * 1_024;
/// Bytes passed to HTTP/2 at once: 16 KiB, one frame. The next piece follows when the peer has room for some of it.
const PIECE_BYTES: usize = 16 * 1_024;

/// Body of an answer. Large parts are cut into pieces and counted until the peer has taken them.
#[derive(Debug)]
pub struct AnswerBody<B> {
    body: B,
    rest: Bytes,
    taken: Option<oneshot::Receiver<()>>,
    /// Makes the connection busy until the end of the answer.
    _in_flight: Option<InFlight>,
}

/// Bytes of an answer that the peer has not taken. Dropping them releases their room in the account.
struct Untaken {
    bytes: Bytes,
    _hold: Hold,
    /// Its drop signals that the peer has taken the bytes.
    _taken: oneshot::Sender<()>,
}

impl AsRef<[u8]> for Untaken {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl<B> AnswerBody<B> {
    /// Wraps `body`. `in_flight` counts its call, if nothing else does.
    pub(super) fn new(body: B, in_flight: Option<InFlight>) -> Self {
        Self { body, rest: Bytes::new(), taken: None, _in_flight: in_flight }
    }

    /// Returns the next piece of `rest`.
    fn piece(&mut self) -> Frame<Bytes> {
        let is_last = self.rest.len() <= PIECE_BYTES;
        Frame::data(if is_last { mem::take(&mut self.rest) } else { self.rest.split_to(PIECE_BYTES) })
    }
}

impl<B: Body<Data = Bytes> + Unpin> Body for AnswerBody<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        let answer = &mut *self;
        if !answer.rest.is_empty() {
            let _ = memory::note_given(false);
            return Poll::Ready(Some(Ok(answer.piece())));
        }
        if let Some(taken) = &mut answer.taken {
            // The end of a large answer waits for the peer, so the call lasts as long as its bytes.
            let _ = ready!(Pin::new(taken).poll(cx));
            answer.taken = None;
        }
        memory::note_asked();
        let frame = match ready!(Pin::new(&mut answer.body).poll_frame(cx)) {
            Some(Ok(frame)) => frame,
            end => return Poll::Ready(end),
        };
        let bytes = match frame.into_data() {
            Ok(bytes) => bytes,
            Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
        };
        let Some(account) = memory::note_given(bytes.len() > UNCOUNTED_ANSWER_BYTES) else {
            return Poll::Ready(Some(Ok(Frame::data(bytes))));
        };
        let (sender, taken) = oneshot::channel();
        let hold = Hold::untaken(account, bytes.len());
        answer.rest = Bytes::from_owner(Untaken { bytes, _hold: hold, _taken: sender });
        answer.taken = Some(taken);
        Poll::Ready(Some(Ok(answer.piece())))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let mut hint = self.body.size_hint();
        let rest = u64::try_from(self.rest.len()).unwrap_or(u64::MAX);
        if let Some(upper) = hint.upper() {
            hint.set_upper(upper.saturating_add(rest));
        }
        hint.set_lower(hint.lower().saturating_add(rest));
        hint
    }
}
