//! One call to a Redis server, from sending to its reply, even if its caller no longer waits.

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use redis::{Cmd, RedisResult, Value};
use smallvec::{SmallVec, smallvec};
use tokio::runtime::Handle;
use tokio::time::{Instant, interval_at, timeout_at};

use super::{Connection, Node};
use crate::model::Micros;
use crate::store::StoreError;
use crate::store::redis::concurrency::Permit;
use crate::store::redis::script::time_of;

/// A permit for a call, and the connection to call on.
pub struct Checkout {
    pub(super) node: Arc<Node>,
    pub(super) connection: Connection,
    /// `None` once the call is sent.
    pub(super) permit: Option<Permit>,
}

impl Checkout {
    /// Returns the time of the node's clock at `moment`, or an earlier one if it is not known exactly.
    pub fn time_at(&self, moment: Instant) -> Micros {
        self.node.clock.at(moment).unwrap_or(Micros::ZERO)
    }

    /// Sends commands in one write and waits for their replies until `until`.
    ///
    /// # Errors
    /// If they do not come, or the connection is lost: then the commands may have been executed or not.
    pub async fn send(
        &mut self,
        commands: SmallVec<[Cmd; 1]>,
        until: Instant,
    ) -> Result<SmallVec<[Value; 1]>, StoreError> {
        let began = Instant::now();
        let budget = until.saturating_duration_since(began);
        let mut connection = self.connection.clone();
        let reply = Box::pin(async move {
            match commands.as_slice() {
                [command] => connection.send(command).await.map(|reply| smallvec![reply]),
                _ => connection.send_all(commands).await.map(SmallVec::from_vec),
            }
        });
        let owed = Owed::new(self, began, budget);
        match timeout_at(until, Sent(Some((reply, owed)))).await {
            Ok(Ok(replies)) => {
                if replies.iter().any(is_blocked) {
                    self.node.failed(budget);
                }
                Ok(replies)
            }
            Ok(Err(_)) => {
                self.node.failed(budget);
                Err(StoreError::Unreachable)
            }
            Err(_) => {
                self.connection.timed_out();
                self.node.failed(budget);
                let is_silent = self.node.is_silent(Instant::now());
                Err(if is_silent { StoreError::TimedOut } else { StoreError::Late })
            }
        }
    }

    /// Notes that the server is no longer a master. The next connection may find the new one; backoff applies if it does not.
    pub fn demoted(&self) {
        if self.connection.is_new() {
            self.node.backoff.failed();
        }
        self.connection.give_up();
    }
}

type PendingReplies = RedisResult<SmallVec<[Value; 1]>>;

/// A reply that is outstanding. It holds its permit until the reply comes.
struct Owed {
    node: Arc<Node>,
    connection: Connection,
    began: Instant,
    budget: Duration,
    permit: Option<Permit>,
}

impl Owed {
    fn new(checkout: &mut Checkout, began: Instant, budget: Duration) -> Self {
        let Checkout { node, connection, permit } = checkout;
        node.silence.sent(began);
        connection.silence().sent(began);
        Self { node: Arc::clone(node), connection: connection.clone(), began, budget, permit: permit.take() }
    }

    /// Handles the replies, however late, or the loss of the connection. Learns the node's clock and queue delay from them.
    fn reply(&self, replies: &PendingReplies) {
        let now = Instant::now();
        match replies {
            Ok(replies) => {
                let Node { silence, metrics, round_trips, breaker, clock, .. } = &*self.node;
                let took = now.duration_since(self.began);
                silence.replied(now);
                self.connection.answered(now);
                metrics.answered(took);
                round_trips.add(now, took);
                if !replies.iter().any(is_blocked) {
                    breaker.answered(took);
                }
                let mut times = replies.iter().filter_map(time_of);
                let Some(first) = times.next() else { return };
                let last = times.next_back().unwrap_or(first);
                // The last script gives the latest time of the clock. The first one waited only for scripts of others.
                clock.learn(self.began, now, last);
                if let (Some(sent), Some(permit)) = (clock.at(self.began), &self.permit) {
                    let since = |time: Micros| Duration::from_micros(time.saturating_sub(sent).get());
                    let way = round_trips.least().unwrap_or_default();
                    let delay = since(first).saturating_sub(way);
                    // Scripts that take longer than they waited are late through themselves.
                    let is_late = since(last) >= self.budget && delay >= since(last).saturating_sub(since(first));
                    permit.learn(now, delay, self.budget, is_late);
                }
            }
            Err(error) => {
                if !self.connection.is_refused() && self.node.lost.is_due() {
                    tracing::warn!(event = "store.connection.lost", %error, server = self.node.name, "a connection to Redis was lost");
                }
                self.connection.give_up();
            }
        }
    }
}

impl Drop for Owed {
    fn drop(&mut self) {
        self.node.silence.ended();
        self.connection.silence().ended();
    }
}

/// A call that was sent. If it is dropped before its reply comes, a task waits on for the reply until the connection is given up.
struct Sent(Option<(PendingReply, Owed)>);

type PendingReply = Pin<Box<dyn Future<Output = PendingReplies> + Send>>;

impl Future for Sent {
    type Output = PendingReplies;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Some((reply, owed)) = &mut self.0 else { return Poll::Pending };
        let replies = ready!(reply.as_mut().poll(context));
        owed.reply(&replies);
        self.0 = None;
        Poll::Ready(replies)
    }
}

impl Drop for Sent {
    fn drop(&mut self) {
        let (Some((mut reply, owed)), Ok(runtime)) = (self.0.take(), Handle::try_current()) else { return };
        runtime.spawn(async move {
            let Owed { node, connection, began, .. } = &owed;
            let silent_after = node.silent_after();
            let mut checks = interval_at(*began + silent_after, silent_after);
            let mut given_up = pin!(connection.given_up());
            let replies = loop {
                tokio::select! {
                    replies = &mut reply => break replies,
                    () = &mut given_up => return,
                    _ = checks.tick() => connection.give_up_if_silent(silent_after),
                }
            };
            owed.reply(&replies);
        });
    }
}

/// Returns true for a reply that shows that the server executes nothing at all.
fn is_blocked(reply: &Value) -> bool {
    matches!(reply, Value::ServerError(error) if matches!(error.code(), "LOADING" | "BUSY"))
}
