//! Memory bound for large requests over `/json`: a bounded number of them at once, one of them being decided, the rest
//! waiting in order.

use std::collections::VecDeque;
use std::io::{self, ErrorKind};
use std::pin::{Pin, pin};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Bytes;
use http_body::{Body, Frame, SizeHint};
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout_at};

use crate::proto::large::LARGE_DESCRIPTORS;

/// Largest body that needs no room: 3,000 bytes, some thirty descriptors of a usual size. It cannot hold more (`{},`) than are decided whole.
pub(super) const SMALL_BODY_BYTES: usize = 3 * LARGE_DESCRIPTORS;
/// Maximum number of larger requests with a body or an answer in memory: 4. A body has up to `JSON_MAX_BODY` bytes (256
/// KiB), and its answer about five times as many (`{},` becomes `{"code":"OK"},`).
const LARGE_REQUESTS: usize = 4;
/// Bytes of the parts in which a large answer is written: 16 KiB. The parts are copies, so that the answer is freed
/// when its last part is taken.
const PART_BYTES: usize = 16 << 10;
/// Time that a caller has to take a large answer while another request waits for room: 1 s. The largest answers, 1.3 MB, then need
/// 11 Mbit/s. Without a bound, a few slow readers would hold up all others.
const TIME_TO_TAKE: Duration = Duration::from_secs(1);

/// Permits for memory, and the turn to be decided. Waiting is fair: first come, first served.
#[derive(Clone, Debug)]
pub(super) struct Room {
    permits: Arc<Semaphore>,
    turn: Arc<Semaphore>,
    /// Answers that are being sent, the oldest first.
    sending: Arc<Mutex<VecDeque<Sending>>>,
    /// Runtime of the process, not of a worker: the allocator keeps memory for each thread that used some, so few
    /// threads do this.
    runtime: Handle,
}

/// Permit of one large request, from its body to the end of its answer. The semaphore is never closed, so it is never `None`.
pub(super) type RoomPermit = Option<OwnedSemaphorePermit>;

/// Turn of one large request to be decoded, decided and encoded. The next one begins when this is dropped.
#[derive(Debug)]
pub(super) struct JsonTurn {
    _permit: Option<OwnedSemaphorePermit>,
}

/// Text of an answer that keeps its permit until it is written, or until others need the room.
#[derive(Debug)]
pub(super) struct Permitted {
    unsent: Arc<Mutex<Option<Unsent>>>,
    bytes: usize,
}

/// Rest of an answer, and its permit.
#[derive(Debug)]
struct Unsent {
    text: Bytes,
    _permit: Option<OwnedSemaphorePermit>,
}

/// Answer that is being sent: the time since when, and its rest.
#[derive(Debug)]
struct Sending(Instant, Weak<Mutex<Option<Unsent>>>);

impl Room {
    /// Creates [`LARGE_REQUESTS`] permits. The requests are decoded and encoded on blocking threads of the caller's
    /// runtime.
    pub(super) fn new() -> Self {
        let (permits, turn) = (Semaphore::new(LARGE_REQUESTS), Semaphore::new(1));
        Self { permits: Arc::new(permits), turn: Arc::new(turn), sending: Arc::default(), runtime: Handle::current() }
    }

    /// Runs `work` on a blocking thread.
    pub(super) fn run<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
        self.runtime.spawn_blocking(work)
    }

    /// Waits for a permit. Meanwhile, drops answers that are older than [`TIME_TO_TAKE`], and calls `dropped` for each.
    pub(super) async fn permit(&self, dropped: impl Fn()) -> RoomPermit {
        let mut permit = pin!(Arc::clone(&self.permits).acquire_owned());
        loop {
            if let Ok(permit) = timeout_at(self.next_is_late(), permit.as_mut()).await {
                return permit.ok();
            }
            if self.drop_late() {
                dropped();
            }
        }
    }

    /// Makes an answer of `text`.
    pub(super) fn answer(&self, text: Vec<u8>, permit: RoomPermit) -> Permitted {
        let bytes = text.len();
        let unsent = Arc::new(Mutex::new(Some(Unsent { text: text.into(), _permit: permit })));
        let mut sending = self.sending.lock();
        sending.retain(Sending::has_permit);
        sending.push_back(Sending(Instant::now(), Arc::downgrade(&unsent)));
        Permitted { unsent, bytes }
    }

    /// Returns the time from which the oldest answer may be dropped.
    fn next_is_late(&self) -> Instant {
        let mut sending = self.sending.lock();
        sending.retain(Sending::has_permit);
        sending.front().map_or_else(Instant::now, |Sending(began, _)| *began) + TIME_TO_TAKE
    }

    /// Drops the oldest answer and its permit, if it is older than [`TIME_TO_TAKE`]. Returns true if so.
    fn drop_late(&self) -> bool {
        let mut sending = self.sending.lock();
        let oldest = sending.pop_front_if(|Sending(began, _)| began.elapsed() >= TIME_TO_TAKE);
        let unsent = oldest.and_then(|Sending(_, unsent)| unsent.upgrade());
        unsent.is_some_and(|unsent| unsent.lock().take().is_some())
    }

    /// Waits for the turn.
    pub(super) async fn turn(&self) -> JsonTurn {
        JsonTurn { _permit: Arc::clone(&self.turn).acquire_owned().await.ok() }
    }
}

impl Sending {
    fn has_permit(&self) -> bool {
        self.1.upgrade().is_some_and(|unsent| unsent.lock().is_some())
    }
}

impl Body for Permitted {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        if self.bytes == 0 {
            return Poll::Ready(None);
        }
        let length = self.bytes.min(PART_BYTES);
        self.bytes -= length;
        let mut unsent = self.unsent.lock();
        let part = unsent.as_mut().map(|unsent| Bytes::copy_from_slice(&unsent.text.split_to(length)));
        if unsent.as_ref().is_some_and(|unsent| unsent.text.is_empty()) {
            *unsent = None;
        }
        let late =
            || io::Error::new(ErrorKind::TimedOut, "others needed the room of an answer that its caller read slowly");
        Poll::Ready(Some(part.map(Frame::data).ok_or_else(late)))
    }

    fn is_end_stream(&self) -> bool {
        self.bytes == 0
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.bytes as u64)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tokio::time::{advance, sleep};

    use super::*;

    /// Takes the next part of an answer: its bytes.
    async fn part(answer: &mut Permitted) -> Option<Result<usize, ErrorKind>> {
        let frame = std::future::poll_fn(|cx| Pin::new(&mut *answer).poll_frame(cx)).await?;
        Some(frame.map(|frame| frame.data_ref().map_or(0, Bytes::len)).map_err(|error| error.kind()))
    }

    /// As many answers as there are permits, made in turn after a millisecond each.
    async fn answers(room: &Room) -> Vec<Permitted> {
        let mut answers = Vec::new();
        for _ in 0..LARGE_REQUESTS {
            let permit = room.permit(|| panic!("there is room")).await;
            answers.push(room.answer(vec![b'a'; 3 * PART_BYTES], permit));
            sleep(Duration::from_millis(1)).await;
        }
        answers
    }

    #[tokio::test(start_paused = true)]
    async fn the_oldest_answer_that_is_read_slowly_makes_room_for_who_waits() {
        let room = Room::new();
        let mut answers = answers(&room).await;
        for answer in &mut answers {
            assert_eq!(part(answer).await, Some(Ok(PART_BYTES)));
        }
        let (began, dropped) = (Instant::now(), AtomicUsize::new(0));
        let count = || {
            dropped.fetch_add(1, Ordering::Relaxed);
        };
        let _permit = room.permit(count).await;
        assert!(began.elapsed() < TIME_TO_TAKE + Duration::from_millis(2), "{:?}", began.elapsed());
        assert_eq!(dropped.load(Ordering::Relaxed), 1);
        let mut results = Vec::new();
        for answer in &mut answers {
            results.push(part(answer).await);
        }
        let rest = Some(Ok(PART_BYTES));
        assert_eq!(results, [Some(Err(ErrorKind::TimedOut)), rest, rest, rest]);
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_may_be_read_slowly_while_nobody_waits_and_its_last_part_makes_room() {
        let room = Room::new();
        let mut answers = answers(&room).await;
        for answer in &mut answers {
            advance(10 * TIME_TO_TAKE).await;
            for _ in 0..3 {
                assert_eq!(part(answer).await, Some(Ok(PART_BYTES)));
            }
            assert!(answer.is_end_stream() && part(answer).await.is_none());
        }
        let began = Instant::now();
        let _permit = room.permit(|| panic!("there is room")).await;
        assert_eq!(began.elapsed(), Duration::ZERO);
    }
}
