//! Timer of an HTTP/1 connection: it may rest for long between two requests, but a head that has begun must end soon.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant as StdInstant};

use hyper::rt::{Sleep, Timer};
use tokio::time::{self, Instant};

use super::turn::State;

/// Timer for the heads of a connection. hyper starts it when it waits for a head: at first, and again at each answer.
#[derive(Debug)]
pub(super) struct HeadTimer {
    state: State,
    /// Time for a head from its first byte, and for the first head from the beginning.
    head: Duration,
}

/// Wait for a head.
#[derive(Debug)]
struct HeadSleep {
    state: State,
    head: Duration,
    sleep: Pin<Box<time::Sleep>>,
    has_begun: bool,
}

impl HeadTimer {
    /// Creates the timer of the connection with this `state`, whose heads may take as long as `head`.
    pub(super) fn new(state: State, head: Duration) -> Self {
        Self { state, head }
    }
}

impl Timer for HeadTimer {
    fn sleep(&self, duration: Duration) -> Pin<Box<dyn Sleep>> {
        self.sleep_until(self.now() + duration)
    }

    fn sleep_until(&self, deadline: StdInstant) -> Pin<Box<dyn Sleep>> {
        let sleep = Box::pin(time::sleep_until(deadline.into()));
        Box::pin(HeadSleep { state: self.state.clone(), head: self.head, sleep, has_begun: false })
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
            let due = Instant::now() + self.head;
            if due < self.sleep.deadline() {
                self.sleep.as_mut().reset(due);
            }
        }
        self.sleep.as_mut().poll(cx)
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
}
