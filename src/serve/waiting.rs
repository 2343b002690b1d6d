//! Upper bound of the time for which a call has waited for its own thread: the call cannot have arrived before its
//! socket was last read empty, and it did not wait before its worker was last idle.

use std::cell::Cell;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::Instant;

thread_local! {
    /// End of the last time at which this worker had nothing to do.
    static IDLE: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// Moment from which times are counted.
static BEGAN: LazyLock<Instant> = LazyLock::new(Instant::now);

/// Last time at which the socket of a connection had nothing to read.
#[derive(Debug, Default)]
pub(crate) struct ReadEmpty {
    /// Microseconds since [`BEGAN`]; 0 before the first time.
    at_us: AtomicU64,
}

impl ReadEmpty {
    /// Records that the socket had nothing to read.
    pub(super) fn note(&self) {
        let at_us = u64::try_from(BEGAN.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.at_us.store(at_us.max(1), Ordering::Relaxed);
    }

    /// Returns the longest time for which a call of this connection can have waited for the current thread.
    pub(super) fn waited(&self) -> Duration {
        let at_us = self.at_us.load(Ordering::Relaxed);
        let read_empty = (at_us > 0).then(|| *BEGAN + Duration::from_micros(at_us));
        read_empty.max(IDLE.get()).map_or(Duration::ZERO, |since| since.elapsed())
    }
}

/// Records that the current worker had nothing to do until now.
pub(super) fn was_idle() {
    IDLE.set(Some(Instant::now()));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_call_has_waited_since_its_socket_was_empty_or_its_worker_idle_whichever_was_later() {
        // The time at which the socket was empty is kept in whole microseconds.
        let ms = |waited: Duration| waited.as_micros().div_ceil(1_000);
        let pass = async |ms| tokio::time::advance(Duration::from_millis(ms)).await;
        let socket = ReadEmpty::default();
        assert_eq!(socket.waited(), Duration::ZERO, "nothing is known");
        was_idle();
        pass(30).await;
        assert_eq!(ms(socket.waited()), 30);
        socket.note();
        pass(20).await;
        assert_eq!(ms(socket.waited()), 20);
        was_idle();
        pass(10).await;
        assert_eq!(ms(socket.waited()), 10);
    }
}
