//! Calls that one thread makes to one server at the same moment: they share a call of the script.
//!
//! The first call of a moment takes the others along. If no other call is in flight, it does not wait for them and is sent at once.
//! Otherwise it lets the other tasks of the thread run that can run now, and is sent then: nobody waits for a call that is not made yet.
//! Each call keeps its own deadline, permit and reply, as if it had been sent alone.

use std::io;
use std::mem;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;
use redis::{RedisError, RedisResult, Value};
use tokio::sync::oneshot;
use tokio::task::yield_now;

use super::Connection;
use crate::store::redis::script::{self, Requests};

/// The most charges of a fixed window that calls share a call for: 64, which take about 200 us of Redis. Other calls wait that long.
const MOST_CHARGES: usize = 64;

/// Calls of one thread to one server.
#[derive(Default)]
pub struct Sharing {
    /// The calls that wait for the first one of them to be sent.
    open: Mutex<Option<Arc<Group>>>,
    in_flight: AtomicUsize,
}

/// Calls that are sent together, on the connection of the first.
struct Group {
    connection: Connection,
    waiting: Mutex<Waiting>,
}

/// Requests to send, what they cost together, and the callers beside the first that wait for the replies.
#[derive(Default)]
struct Waiting {
    requests: Requests,
    /// True if their counters are in any slots of a node of a cluster.
    is_over_slots: bool,
    cost: usize,
    others: Vec<oneshot::Sender<RedisResult<Value>>>,
}

/// A call and where its reply comes from.
pub enum SharedCall {
    /// It sends itself and the others.
    First(First),
    /// It is sent by another.
    Other(oneshot::Receiver<RedisResult<Value>>),
}

/// The first call of a group. If it is dropped before it is sent, the others fail.
pub struct First {
    sharing: Arc<Sharing>,
    group: Arc<Group>,
}

impl Sharing {
    /// Adds a call that charges as much as `cost` fixed windows, in a cluster with counters of any slot. `add` adds its request.
    pub fn join(
        self: &Arc<Self>,
        connection: &Connection,
        is_cluster: bool,
        cost: usize,
        add: impl FnOnce(&mut Requests),
    ) -> SharedCall {
        let mut open = self.open.lock();
        if let Some(group) = open.as_ref().filter(|group| group.connection.is_same(connection)) {
            let mut waiting = group.waiting.lock();
            if waiting.cost.saturating_add(cost) <= MOST_CHARGES {
                add(&mut waiting.requests);
                waiting.cost += cost;
                let (sender, reply) = oneshot::channel();
                waiting.others.push(sender);
                return SharedCall::Other(reply);
            }
        }
        let mut waiting = Waiting { cost, is_over_slots: is_cluster, ..Waiting::default() };
        add(&mut waiting.requests);
        let group = Arc::new(Group { connection: connection.clone(), waiting: Mutex::new(waiting) });
        *open = Some(Arc::clone(&group));
        SharedCall::First(First { sharing: Arc::clone(self), group })
    }
}

impl SharedCall {
    /// Returns its reply.
    ///
    /// # Errors
    /// If the connection is lost: then it may have been executed or not.
    pub async fn reply(self) -> RedisResult<Value> {
        match self {
            Self::First(first) => first.send().await,
            Self::Other(reply) => reply.await.unwrap_or_else(|_| Err(unsent())),
        }
    }
}

impl First {
    async fn send(self) -> RedisResult<Value> {
        if self.sharing.in_flight.load(Ordering::Relaxed) > 0 {
            yield_now().await;
        }
        let Waiting { requests, others, is_over_slots, .. } = self.close();
        let command =
            if is_over_slots && !others.is_empty() { requests.command_over_slots() } else { requests.command() };
        let _in_flight = InFlight::new(&self.sharing);
        match self.group.connection.clone().send(&command).await {
            Ok(reply) => {
                let mut replies = script::split(reply, 1 + others.len()).into_iter();
                let own = replies.next().unwrap_or(Value::Nil);
                for (other, reply) in others.into_iter().zip(replies) {
                    // It may have gone.
                    let _ = other.send(Ok(reply));
                }
                Ok(own)
            }
            Err(error) => {
                for other in others {
                    let _ = other.send(Err(error.clone()));
                }
                Err(error)
            }
        }
    }

    /// Takes the calls of the group. Later ones begin a new group.
    fn close(&self) -> Waiting {
        self.sharing.open.lock().take_if(|open| Arc::ptr_eq(open, &self.group));
        mem::take(&mut *self.group.waiting.lock())
    }
}

impl Drop for First {
    fn drop(&mut self) {
        for other in self.close().others {
            let _ = other.send(Err(unsent()));
        }
    }
}

/// A call in flight.
struct InFlight<'a>(&'a Sharing);

impl<'a> InFlight<'a> {
    fn new(sharing: &'a Sharing) -> Self {
        sharing.in_flight.fetch_add(1, Ordering::Relaxed);
        Self(sharing)
    }
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}

fn unsent() -> RedisError {
    io::Error::from(io::ErrorKind::ConnectionAborted).into()
}
