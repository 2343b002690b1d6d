//! Tasks that answer the calls of a connection.

use std::future::Future;
use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use hyper::rt::Executor;
use tokio::time::{Instant, Sleep};

use super::{Account, CALL, Call};
use crate::serve::activity::Activity;
use crate::telemetry::limited::Cause;

/// Executor for the calls of one connection. Each call runs in its own task, counts into the connection's account, and
/// is in flight to its end.
#[derive(Clone, Debug)]
pub struct Runner {
    account: Arc<Account>,
    stall: Duration,
    activity: Activity,
}

/// Task of one call. It drops the call, which resets the stream, if the peer takes nothing of the answer for `stall`.
///
/// hyper does not poll the body of an answer while it waits for the peer, so a timer of the body would not run. The
/// future of the call is large, so only the spawn of the task moves it.
struct Running<F> {
    call: F,
    part: Option<Call>,
    stall: Duration,
    /// Timer, and the step of the answer at which it started.
    timer: Option<(u64, Pin<Box<Sleep>>)>,
}

/// Makes a call the running one of this thread until it is dropped.
struct Entered<'a>(&'a mut Option<Call>);

impl Runner {
    pub(crate) fn new(account: Arc<Account>, stall: Duration, activity: Activity) -> Self {
        Self { account, stall, activity }
    }

    fn running<F>(&self, call: F) -> Running<F> {
        let part = Call::new(Arc::clone(&self.account), Some(self.activity.call()));
        Running { call, part: Some(part), stall: self.stall, timer: None }
    }
}

impl<F: Future<Output = ()> + Unpin + Send + 'static> Executor<F> for Runner {
    fn execute(&self, call: F) {
        tokio::spawn(self.running(call));
    }
}

impl<'a> Entered<'a> {
    fn new(part: &'a mut Option<Call>) -> Self {
        CALL.with(|running| mem::swap(&mut *running.borrow_mut(), part));
        Self(part)
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        CALL.with(|running| mem::swap(&mut *running.borrow_mut(), self.0));
    }
}

impl<F: Future<Output = ()> + Unpin> Future for Running<F> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = &mut *self;
        let entered = Entered::new(&mut this.part);
        let polled = Pin::new(&mut this.call).poll(cx);
        drop(entered);
        let Some(part) = this.part.as_ref().filter(|_| polled.is_pending()) else { return Poll::Ready(()) };
        if !part.answer.is_given {
            this.timer = None;
            return Poll::Pending;
        }
        let (stall, step) = (this.stall, part.answer.steps);
        let (since, sleep) = this.timer.get_or_insert_with(|| (step, Box::pin(tokio::time::sleep(stall))));
        if *since != step {
            *since = step;
            sleep.as_mut().reset(Instant::now() + stall);
        }
        let stalled = sleep.as_mut().poll(cx);
        if stalled.is_ready() {
            part.account.count(Cause::StalledAnswer);
        }
        stalled
    }
}

#[cfg(test)]
mod tests {
    use super::super::note_given;
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_call_ends_when_its_peer_takes_nothing_and_not_while_the_service_thinks() {
        let stall = Duration::from_secs(10);
        let began = Instant::now();
        let runner = Runner::new(Arc::default(), stall, Activity::new(began, Arc::default()));
        runner.running(Box::pin(tokio::time::sleep(3 * stall))).await;
        assert_eq!(began.elapsed(), 3 * stall);
        let taken_slowly = Box::pin(async {
            for _ in 0..3 {
                assert!(note_given(false).is_none());
                tokio::time::sleep(stall / 2).await;
            }
            std::future::pending::<()>().await;
        });
        runner.running(taken_slowly).await;
        assert_eq!(began.elapsed(), 3 * stall + stall + stall);
    }
}
