//! Memory bound for large requests over `/json`: a bounded number of them at once, one of them being decided, the rest
//! waiting in order.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::body::Bytes;
use http_body::{Body, Frame, SizeHint};
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinHandle;

use crate::transport::budget;

/// Largest body that needs no room: 4 KiB, some forty descriptors of a usual size. It is read and decided at once.
pub(super) const SMALL_BODY_BYTES: usize = 4 << 10;
/// Maximum number of larger requests with a body or an answer in memory: 4. A body has up to `JSON_MAX_BODY` bytes (256
/// KiB), and its answer about five times as many (`{},` becomes `{"code":"OK"},`).
const LARGE_REQUESTS: usize = 4;
/// Bytes of the parts in which a large answer is written: 16 KiB. The parts are copies, so that the answer is freed
/// when its last part is taken.
const PART_BYTES: usize = 16 << 10;

/// Permits for memory, and the turn to be decided. Waiting is fair: first come, first served.
#[derive(Clone, Debug)]
pub(super) struct Room {
    permits: Arc<Semaphore>,
    turn: Arc<Semaphore>,
    /// Runtime of the process, not of a worker: the allocator keeps memory for each thread that used some, so few
    /// threads do this.
    runtime: Handle,
}

/// Permit of one large request, from its body to the end of its answer.
#[derive(Debug)]
pub(super) struct RoomPermit {
    _permit: Option<OwnedSemaphorePermit>,
    /// Turn of its connection.
    _turn: Option<OwnedSemaphorePermit>,
}

/// Turn of one large request to be decoded, decided and encoded. The next one begins when this is dropped.
#[derive(Debug)]
pub(super) struct JsonTurn {
    _permit: Option<OwnedSemaphorePermit>,
}

/// Text of an answer that keeps its permit until it is written.
#[derive(Debug)]
pub(super) struct Permitted {
    text: Bytes,
    _room: RoomPermit,
}

impl Room {
    /// Creates [`LARGE_REQUESTS`] permits. The requests are decoded and encoded on blocking threads of the caller's
    /// runtime.
    pub(super) fn new() -> Self {
        let (permits, turn) = (Semaphore::new(LARGE_REQUESTS), Semaphore::new(1));
        Self { permits: Arc::new(permits), turn: Arc::new(turn), runtime: Handle::current() }
    }

    /// Runs `work` on a blocking thread.
    pub(super) fn run<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
        self.runtime.spawn_blocking(work)
    }

    /// Waits for a permit. The requests of an HTTP/2 connection take turns, so that it has one permit at most, and one place among those
    /// that wait.
    pub(super) async fn permit(&self) -> RoomPermit {
        // The semaphores are never closed.
        let turn = match budget::bodies() {
            Some(turn) => turn.acquire_owned().await.ok(),
            None => None,
        };
        RoomPermit { _permit: Arc::clone(&self.permits).acquire_owned().await.ok(), _turn: turn }
    }

    /// Waits for the turn.
    pub(super) async fn turn(&self) -> JsonTurn {
        JsonTurn { _permit: Arc::clone(&self.turn).acquire_owned().await.ok() }
    }
}

impl Permitted {
    pub(super) fn new(text: Vec<u8>, permit: RoomPermit) -> Self {
        Self { text: text.into(), _room: permit }
    }
}

impl Body for Permitted {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let length = self.text.len().min(PART_BYTES);
        let part = self.text.split_to(length);
        Poll::Ready((length > 0).then(|| Ok(Frame::data(Bytes::copy_from_slice(&part)))))
    }

    fn is_end_stream(&self) -> bool {
        self.text.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.text.len() as u64)
    }
}
