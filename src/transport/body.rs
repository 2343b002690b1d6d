//! A request's body, which must arrive in time.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use tokio::time::{Instant, Sleep};
use tonic::Status;

/// The bytes of a body that must arrive while its timer runs, or its end: 64 KiB, the window of a stream
/// ([`STREAM_WINDOW_BYTES`](super::protocol::STREAM_WINDOW_BYTES)). A long message that goes on arriving is not late.
const PROGRESS_BYTES: usize = 64 << 10;

/// What a client sends, and an error if the end of it takes too long.
///
/// The body of a decision is there when its head is, so the timer is armed by the first wait and most calls have none.
/// The error is the status a gRPC handler answers with; other handlers see a body that broke.
#[derive(Debug)]
pub struct RequestBody {
    body: Incoming,
    allowed: Option<Duration>,
    late: Option<Pin<Box<Sleep>>>,
    /// Bytes that have arrived since the timer was set.
    arrived: usize,
}

impl RequestBody {
    /// A body that ends with an error when neither its end nor [`PROGRESS_BYTES`] of it arrive within `allowed` of the first
    /// wait for it, and again of each such progress; `None` waits for ever.
    pub(super) fn new(body: Incoming, allowed: Option<Duration>) -> Self {
        Self { body, allowed, late: None, arrived: 0 }
    }

    fn poll_late(&mut self, cx: &mut Context<'_>) -> Poll<Status> {
        let Some(allowed) = self.allowed else { return Poll::Pending };
        let late = self.late.get_or_insert_with(|| Box::pin(tokio::time::sleep(allowed)));
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
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        match Pin::new(&mut self.body).poll_frame(cx) {
            Poll::Ready(frame) => {
                if let Some(Ok(frame)) = &frame {
                    self.arrived = self.arrived.saturating_add(frame.data_ref().map_or(0, Bytes::len));
                }
                Poll::Ready(frame.map(|frame| frame.map_err(|broken| Status::from_error(Box::new(broken)))))
            }
            Poll::Pending => self.poll_late(cx).map(|late| Some(Err(late))),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
