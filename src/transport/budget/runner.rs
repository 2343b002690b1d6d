//! The tasks in which the calls of a connection are answered.

use std::cell::RefCell;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use hyper::rt::Executor;
use tokio::time::{Instant, Sleep};

use super::{Account, CALL, Call};
use crate::telemetry::limited::Cause;
use crate::transport::activity::Activity;

/// Runs the calls of one connection, each in a task of its own that counts into the connection's account, and as in flight to
/// its end.
#[derive(Clone, Debug)]
pub struct Runner {
    account: Arc<Account>,
    stall: Duration,
    activity: Activity,
}

impl Runner {
    pub(in crate::transport) fn new(account: Arc<Account>, stall: Duration, activity: Activity) -> Self {
        Self { account, stall, activity }
    }
}

impl<F: Future<Output = ()> + Send + 'static> Executor<F> for Runner {
    fn execute(&self, call: F) {
        let context = RefCell::new(Call::new(Arc::clone(&self.account)));
        let (in_flight, stall) = (self.activity.call(), self.stall);
        tokio::spawn(CALL.scope(context, async move {
            unless_stalled(call, stall).await;
            drop(in_flight);
        }));
    }
}

/// Runs `call` to its end, or drops it when its peer takes nothing of the answer for `stall`. The drop resets the stream.
///
/// hyper asks the body of an answer for nothing while it waits for the peer, so that a timer of the body would not run.
async fn unless_stalled(call: impl Future<Output = ()>, stall: Duration) {
    let mut call = pin!(call);
    let mut timer: Option<(u64, Pin<Box<Sleep>>)> = None;
    poll_fn(|cx| {
        if call.as_mut().poll(cx).is_ready() {
            return Poll::Ready(());
        }
        let answer = CALL.with(|call| call.borrow().answer);
        if !answer.is_given {
            timer = None;
            return Poll::Pending;
        }
        let (steps, sleep) = timer.get_or_insert_with(|| (answer.steps, Box::pin(tokio::time::sleep(stall))));
        if *steps != answer.steps {
            *steps = answer.steps;
            sleep.as_mut().reset(Instant::now() + stall);
        }
        let stalled = sleep.as_mut().poll(cx);
        if stalled.is_ready() {
            CALL.with(|call| call.borrow().account.count(Cause::StalledAnswer));
        }
        stalled
    })
    .await;
}

#[cfg(test)]
mod tests {
    use super::super::gives;
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_call_ends_when_its_peer_takes_nothing_and_not_while_the_service_thinks() {
        let stall = Duration::from_secs(10);
        let began = Instant::now();
        let context = || RefCell::new(Call::new(Arc::default()));
        let thinking = async { tokio::time::sleep(3 * stall).await };
        CALL.scope(context(), unless_stalled(thinking, stall)).await;
        assert_eq!(began.elapsed(), 3 * stall);
        let taken_slowly = async {
            for _ in 0..3 {
                assert!(gives(false).is_none());
                tokio::time::sleep(stall / 2).await;
            }
            std::future::pending::<()>().await;
        };
        CALL.scope(context(), unless_stalled(taken_slowly, stall)).await;
        assert_eq!(began.elapsed(), 3 * stall + stall + stall);
    }
}
