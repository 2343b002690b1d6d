//! One call to a Redis server, from sending to its reply, even if its caller no longer waits.

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::try_join_all;
use redis::{Cmd, RedisResult, Value};
use smallvec::{SmallVec, smallvec};
use tokio::runtime::Handle;
use tokio::time::{Instant, interval_at, timeout_at};

use super::shared::{Replies, SharedCall};
use super::{Connection, Node};
use crate::model::Micros;
use crate::store::StoreError;
use crate::store::redis::concurrency::{Measured, Permit};
use crate::store::redis::dialect::Dialect;
use crate::store::redis::script::{Requests, time_of};

/// Time by which the clocks of several servers behind a proxy may differ: 1 s. A server that was paused counts calls of that age.
const CLOCKS: Micros = Micros::from_secs(1);

/// A connection to call on, and the call once it is sent. If it is dropped before the replies come, a task waits on for them until the
/// connection is given up.
pub struct Checkout {
    pub(super) node: Arc<Node>,
    pub(super) connection: Connection,
    /// Time at which the call begins.
    pub(super) began: Instant,
    /// `None` once the call is sent.
    pub(super) permit: Option<Permit>,
    pub(super) pending: Option<PendingReplies>,
}

type PendingReplies = Pin<Box<dyn Future<Output = RedisResult<Replies>> + Send>>;

impl Checkout {
    /// Returns the time of the node's clock at `moment`, or an earlier one if it is not known exactly. Of what may be several servers
    /// behind a proxy, each with a clock of its own, the time is one second later.
    pub fn time_at(&self, moment: Instant) -> Micros {
        let time = self.node.clock.at(moment).unwrap_or(Micros::ZERO);
        if self.dialect().is_together() { time } else { time.saturating_add(CLOCKS) }
    }

    /// Returns what the connection has to do without.
    pub const fn dialect(&self) -> Dialect {
        self.connection.dialect()
    }

    /// Begins a call. Its commands are sent in one write once [`Self::replies`] waits for the replies.
    pub fn send(&mut self, commands: SmallVec<[Cmd; 1]>, until: Instant) {
        let mut owed = Owed::new(self, until);
        self.pending = Some(Box::pin(async move {
            let replies = match commands.as_slice() {
                [command] => owed.connection.send(command).await.map(|reply| smallvec![reply]),
                _ => owed.connection.send_all(commands).await.map(SmallVec::from_vec),
            };
            owed.reply(&replies);
            replies
        }));
    }

    /// Begins to run requests, together with those of the other calls that are made now. Of each: what it costs, as a multiple of a charge
    /// of a fixed window, and what adds it. In a cluster their counters may be in any slots of the node.
    pub fn send_shared<F: FnOnce(&mut Requests)>(
        &mut self,
        requests: impl Iterator<Item = (usize, F)>,
        is_cluster: bool,
        until: Instant,
    ) {
        let mut owed = Owed::new(self, until);
        let sharing = &self.node.lane().sharing;
        let mut requests = requests.peekable();
        let mut calls: SmallVec<[SharedCall; 1]> = SmallVec::new();
        while requests.peek().is_some() {
            calls.push(sharing.join(&self.connection, is_cluster, &mut requests));
        }
        self.pending = Some(Box::pin(async move {
            let replies = match calls.pop() {
                Some(call) if calls.is_empty() => call.replies().await,
                last => {
                    let replies = try_join_all(calls.into_iter().chain(last).map(SharedCall::replies)).await;
                    replies.map(|replies| replies.into_iter().flatten().collect())
                }
            };
            owed.reply(&replies);
            replies
        }));
    }

    /// Waits for the replies until `until`.
    ///
    /// # Errors
    /// If they do not come, or the connection is lost: then the commands may have been executed or not.
    pub async fn replies(&mut self, until: Instant) -> Result<Replies, StoreError> {
        let Some(pending) = &mut self.pending else { return Err(StoreError::Rejected) };
        let came = timeout_at(until, pending.as_mut()).await;
        let budget = until.saturating_duration_since(self.began);
        let Ok(replies) = came else {
            self.connection.timed_out();
            self.node.failed(budget);
            let is_silent = self.node.is_silent(Instant::now());
            return Err(if is_silent { StoreError::TimedOut } else { StoreError::Late });
        };
        self.pending = None;
        if replies.as_ref().map_or(true, |replies| replies.iter().any(is_blocked)) {
            self.node.failed(budget);
        }
        replies.map_err(|_| StoreError::Unreachable)
    }

    /// Notes that the server is no longer a master. The next connection may find the new one; backoff applies if it does not.
    pub fn demoted(&self) {
        if self.connection.is_new() {
            self.node.backoff.failed();
        }
        self.connection.give_up();
    }
}

impl Drop for Checkout {
    fn drop(&mut self) {
        let (Some(mut pending), Ok(runtime)) = (self.pending.take(), Handle::try_current()) else { return };
        let (connection, began, silent_after) = (self.connection.clone(), self.began, self.node.silent_after());
        runtime.spawn(async move {
            let mut checks = interval_at(began + silent_after, silent_after);
            let mut given_up = pin!(connection.given_up());
            loop {
                tokio::select! {
                    // A call that others share is sent by the first of them, even where the connection is given up.
                    biased;
                    _ = &mut pending => return,
                    () = &mut given_up => return,
                    _ = checks.tick() => connection.give_up_if_silent(silent_after),
                }
            }
        });
    }
}

/// A call whose replies are outstanding. It holds its permit until they come.
struct Owed {
    node: Arc<Node>,
    connection: Connection,
    began: Instant,
    budget: Duration,
    permit: Option<Permit>,
}

impl Owed {
    fn new(checkout: &mut Checkout, until: Instant) -> Self {
        let Checkout { node, connection, began, permit, .. } = checkout;
        node.silence.sent(*began);
        connection.silence().sent(*began);
        let budget = until.saturating_duration_since(*began);
        Self { node: Arc::clone(node), connection: connection.clone(), began: *began, budget, permit: permit.take() }
    }

    /// Handles the replies, however late, or the loss of the connection. Learns the node's clock and queue delay from them.
    fn reply(&mut self, replies: &RedisResult<Replies>) {
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
                if !self.connection.dialect().is_together() {
                    // Clocks of several servers do not tell how long a script waited.
                    if let Some(permit) = self.permit.take() {
                        let delay = took.saturating_sub(round_trips.least().unwrap_or_default());
                        permit.answered(Measured { now, delay, budget: self.budget, is_late: took >= self.budget });
                    }
                } else if let (Some(sent), Some(permit)) = (clock.at(self.began), self.permit.take()) {
                    let since = |time: Micros| Duration::from_micros(time.saturating_sub(sent).get());
                    let way = round_trips.least().unwrap_or_default();
                    let delay = since(first).saturating_sub(way);
                    // Scripts that take longer than they waited are late through themselves.
                    let is_late = since(last) >= self.budget && delay >= since(last).saturating_sub(since(first));
                    permit.answered(Measured { now, delay, budget: self.budget, is_late });
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

/// Returns true for a reply that shows that the server executes nothing at all.
fn is_blocked(reply: &Value) -> bool {
    matches!(reply, Value::ServerError(error) if matches!(error.code(), "LOADING" | "BUSY"))
}
