//! Timer of an HTTP/1 connection: it may rest for long between two requests, but a head that has begun must end soon.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant as StdInstant};

use hyper::rt::{Sleep, Timer};
use parking_lot::Mutex;
use tokio::time::{self, Instant};

use super::turn::State;

/// Timer for the heads of a connection. hyper starts it when it waits for a head: at first, and again at each answer.
#[derive(Debug)]
pub(super) struct HeadTimer {
    state: State,
    /// Time for a head from its first byte, and for the first head from the beginning.
    head: Duration,
    spare: SpareSleep,
}

/// Timer of the runtime that the waits of a connection use in turn. To set and to drop one for each request costs a check 4 % of its
/// instructions.
type SpareSleep = Arc<Mutex<Option<Pin<Box<time::Sleep>>>>>;

/// Wait for a head.
#[derive(Debug)]
struct HeadSleep {
    state: State,
    head: Duration,
    deadline: Instant,
    /// It may end before the deadline, and is set again then.
    sleep: Option<Pin<Box<time::Sleep>>>,
    spare: SpareSleep,
    has_begun: bool,
}

impl HeadTimer {
    /// Creates the timer of the connection with this `state`, whose heads may take as long as `head`.
    pub(super) fn new(state: State, head: Duration) -> Self {
        Self { state, head, spare: SpareSleep::default() }
    }
}

impl Timer for HeadTimer {
    fn sleep(&self, duration: Duration) -> Pin<Box<dyn Sleep>> {
        self.sleep_until(self.now() + duration)
    }

    fn sleep_until(&self, deadline: StdInstant) -> Pin<Box<dyn Sleep>> {
        let (state, spare, deadline) = (self.state.clone(), Arc::clone(&self.spare), deadline.into());
        Box::pin(HeadSleep { state, head: self.head, deadline, sleep: None, spare, has_begun: false })
    }

    fn now(&self) -> StdInstant {
        Instant::now().into_std()
    }
}

impl Future for HeadSleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        if !self.has_begun && !self.state.is_at_rest() {
            self.has_begun = true;
            self.deadline = self.deadline.min(Instant::now() + self.head);
        }
        let Self { deadline, sleep, spare, .. } = &mut *self;
        let new = || spare.lock().take().unwrap_or_else(|| Box::pin(time::sleep_until(*deadline)));
        let sleep = sleep.get_or_insert_with(new);
        loop {
            if sleep.deadline() > *deadline {
                sleep.as_mut().reset(*deadline);
            }
            ready!(sleep.as_mut().poll(cx));
            if sleep.deadline() >= *deadline {
                return Poll::Ready(());
            }
            sleep.as_mut().reset(*deadline);
        }
    }
}

impl Drop for HeadSleep {
    fn drop(&mut self) {
        if let Some(sleep) = self.sleep.take() {
            *self.spare.lock() = Some(sleep);
        }
    }
}

impl Sleep for HeadSleep {}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_connection_may_rest_but_a_head_that_has_begun_must_end() {
        let seconds = Duration::from_secs;
        let state = State::default();
        let timer = HeadTimer::new(state.clone(), seconds(5));
        let is_over =
            |sleep: &mut Pin<Box<dyn Sleep>>| sleep.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready();
        let mut first = timer.sleep(seconds(75));
        assert!(!is_over(&mut first), "the first head begins at once");
        time::advance(seconds(5)).await;
        assert!(is_over(&mut first));

        state.note_rest(true);
        let mut next = timer.sleep(seconds(75));
        time::advance(seconds(74)).await;
        assert!(!is_over(&mut next), "there is no request");
        time::advance(seconds(1)).await;
        assert!(is_over(&mut next));

        let mut next = timer.sleep(seconds(75));
        time::advance(seconds(30)).await;
        assert!(!is_over(&mut next));
        state.note_rest(false);
        assert!(!is_over(&mut next), "the first byte has arrived");
        time::advance(seconds(5)).await;
        assert!(is_over(&mut next));
    }

    #[tokio::test(start_paused = true)]
    async fn the_waits_of_a_connection_share_one_timer_and_each_lasts_as_long_as_it_should() {
        let seconds = Duration::from_secs;
        let state = State::default();
        state.note_rest(true);
        let timer = HeadTimer::new(state.clone(), seconds(5));
        let began = Instant::now();
        for request in 0..10 {
            let wait = timer.sleep(seconds(75));
            let answered = time::timeout(seconds(10), wait).await;
            assert!(answered.is_err(), "request {request} comes first");
        }
        assert_eq!(timer.spare.lock().as_ref().map(|sleep| sleep.deadline()), Some(began + seconds(145)), "set twice");
        timer.sleep(seconds(75)).await;
        assert_eq!(began.elapsed(), seconds(100 + 75));
        timer.sleep(seconds(3)).await;
        assert_eq!(began.elapsed(), seconds(100 + 75 + 3), "a shorter wait ends earlier");
    }
}
