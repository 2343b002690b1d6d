//! Memory bound for large bodies over `/json` and `/check`. Bytes are counted as they arrive, so a body that announces much and
//! brings little keeps nobody out.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout_at};

/// Bytes of a body that are not counted: 4 KiB, a little more than a small body has (`room::SMALL_BODY_BYTES`).
pub(super) const UNCOUNTED_BYTES: usize = 4 << 10;
/// Number of bodies of `JSON_MAX_BODY` that arrive at a time: 64. They take 16 MiB unless the setting says more.
const BODIES: usize = 64;
/// Bytes of a permit: 1 KiB.
const PERMIT_BYTES: usize = 1 << 10;
/// Time that a body has to arrive while another one waits for memory: 1 s. The largest bodies, 256 KiB, then need 2 Mbit/s.
const TIME_TO_ARRIVE: Duration = Duration::from_secs(1);

/// Memory for the bodies that are arriving. Clones share it.
#[derive(Clone, Debug)]
pub(super) struct Bodies {
    permits: Arc<Semaphore>,
    /// Bodies that hold permits, the oldest first.
    arriving: Arc<Mutex<VecDeque<Arriving>>>,
}

/// Body that holds permits: the time of the first of them, and its end.
#[derive(Debug)]
struct Arriving(Instant, Weak<Notify>);

/// Permits of one body, until it is decoded.
#[derive(Debug)]
pub(super) struct BodyPermits {
    bodies: Bodies,
    permits: Option<OwnedSemaphorePermit>,
    /// Notified when the body has to end, because others need its memory.
    end: Arc<Notify>,
}

impl Bodies {
    /// Creates memory for bodies of up to `most_bytes` each.
    pub(super) fn new(most_bytes: usize) -> Self {
        let permits = Semaphore::new((BODIES * most_bytes / PERMIT_BYTES).clamp(1, Semaphore::MAX_PERMITS));
        Self { permits: Arc::new(permits), arriving: Arc::default() }
    }

    /// Creates the permits of a body of which nothing has arrived.
    pub(super) fn permits(&self) -> BodyPermits {
        BodyPermits { bodies: self.clone(), permits: None, end: Arc::default() }
    }

    /// Returns the time from which the oldest body may be ended.
    fn next_is_late(&self) -> Instant {
        let mut arriving = self.arriving.lock();
        arriving.retain(|Arriving(_, end)| end.strong_count() > 0);
        arriving.front().map_or_else(Instant::now, |Arriving(began, _)| *began) + TIME_TO_ARRIVE
    }

    /// Ends the oldest body if it is older than [`TIME_TO_ARRIVE`].
    fn end_late(&self) {
        let oldest = self.arriving.lock().pop_front_if(|Arriving(began, _)| began.elapsed() >= TIME_TO_ARRIVE);
        if let Some(end) = oldest.and_then(|Arriving(_, end)| end.upgrade()) {
            end.notify_one();
        }
    }
}

impl BodyPermits {
    /// Returns the signal of the end of the body.
    pub(super) fn end(&self) -> Arc<Notify> {
        Arc::clone(&self.end)
    }

    /// Waits until the body may have `bytes`. Meanwhile, ends bodies that are older than [`TIME_TO_ARRIVE`].
    pub(super) async fn hold(&mut self, bytes: usize) {
        let held = self.permits.as_ref().map_or(0, OwnedSemaphorePermit::num_permits);
        let more = bytes.saturating_sub(UNCOUNTED_BYTES).div_ceil(PERMIT_BYTES).saturating_sub(held);
        let Some(more) = u32::try_from(more).ok().filter(|more| *more > 0) else { return };
        let mut permits = std::pin::pin!(Arc::clone(&self.bodies.permits).acquire_many_owned(more));
        let permits = loop {
            match timeout_at(self.bodies.next_is_late(), permits.as_mut()).await {
                // The semaphore is never closed.
                Ok(permits) => break permits.ok(),
                Err(_) => self.bodies.end_late(),
            }
        };
        match (&mut self.permits, permits) {
            (Some(held), Some(permits)) => held.merge(permits),
            (held, permits) => {
                *held = permits;
                self.bodies.arriving.lock().push_back(Arriving(Instant::now(), Arc::downgrade(&self.end)));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::timeout;

    use super::*;

    const KIB: usize = 1 << 10;

    #[tokio::test(start_paused = true)]
    async fn bodies_that_announce_much_and_bring_little_take_no_memory_from_others() {
        let bodies = Bodies::new(KIB);
        let mut unfinished = Vec::new();
        for _ in 0..1_000 {
            let mut body = bodies.permits();
            body.hold(UNCOUNTED_BYTES).await;
            unfinished.push(body);
        }
        let began = Instant::now();
        bodies.permits().hold(UNCOUNTED_BYTES + BODIES * KIB).await;
        assert_eq!(began.elapsed(), Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_that_holds_memory_for_long_ends_where_another_waits_for_it() {
        let bodies = Bodies::new(KIB);
        let (mut first, mut second) = (bodies.permits(), bodies.permits());
        first.hold(UNCOUNTED_BYTES + KIB).await;
        tokio::time::advance(TIME_TO_ARRIVE / 2).await;
        second.hold(UNCOUNTED_BYTES + (BODIES - 1) * KIB).await;
        assert!(timeout(10 * TIME_TO_ARRIVE, first.end().notified()).await.is_err(), "nobody waits");
        second.hold(UNCOUNTED_BYTES + KIB).await;
        let mut third = bodies.permits();
        let waiting = tokio::spawn(async move { third.hold(UNCOUNTED_BYTES + KIB).await });
        first.end().notified().await;
        drop(first);
        waiting.await.expect("it has the memory of the first");
    }
}
