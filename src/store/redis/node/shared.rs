//! Calls that one thread makes to one server at the same moment: they share a call of the script.
//!
//! The first call of a moment takes the others along. It lets the other tasks of the thread run that can run now, and is sent then:
//! nobody waits for a call that is not made yet.
//! Each call keeps its own deadline, permit and reply, as if it had been sent alone.

use std::io;
use std::iter::Peekable;
use std::mem;
use std::sync::Arc;

use parking_lot::Mutex;
use redis::{Cmd, RedisError, RedisResult, Value};
use smallvec::SmallVec;
use tokio::sync::oneshot;
use tokio::task::yield_now;

use super::Connection;
use crate::store::redis::script::{self, By, Requests};

/// The most charges of a fixed window that calls share a call for: 64, which take about 200 us of Redis. Other calls wait that long.
const MOST_CHARGES: usize = 64;

/// Calls of one thread to one server.
#[derive(Default)]
pub struct Sharing {
    /// The calls that wait for the first one of them to be sent.
    open: Mutex<Option<Arc<Group>>>,
}

/// Calls that are sent together, on the connection of the first.
struct Group {
    connection: Connection,
    waiting: Mutex<Waiting>,
}

/// Requests to send, and the callers that wait for their replies.
#[derive(Default)]
struct Waiting {
    requests: Requests,
    /// True if their counters are in any slots of a node of a cluster.
    is_over_slots: bool,
    count: usize,
    cost: usize,
    /// The number of requests of the first caller.
    own: usize,
    /// The other callers, each with the number of its requests.
    others: Vec<(usize, oneshot::Sender<RedisResult<Replies>>)>,
}

/// The replies to some requests, in order.
pub type Replies = SmallVec<[Value; 1]>;

/// Requests of one caller and where their replies come from.
pub enum SharedCall {
    /// It sends itself and the others.
    First(First),
    /// It is sent by another.
    Other(oneshot::Receiver<RedisResult<Replies>>),
}

/// The first call of a group. If it is dropped before it is sent, the others fail.
pub struct First {
    sharing: Arc<Sharing>,
    group: Arc<Group>,
}

impl Sharing {
    /// Adds the first requests, as many as one call takes; in a cluster their counters are in any slots. Of each: what it costs, as a multiple
    /// of a charge of a fixed window, and what adds it.
    pub fn join<F: FnOnce(&mut Requests)>(
        self: &Arc<Self>,
        connection: &Connection,
        is_cluster: bool,
        requests: &mut Peekable<impl Iterator<Item = (usize, F)>>,
    ) -> SharedCall {
        let mut open = self.open.lock();
        if let Some(group) = open.as_ref().filter(|group| group.connection.is_same(connection)) {
            let mut waiting = group.waiting.lock();
            let count = waiting.add(requests);
            if count > 0 {
                let (sender, replies) = oneshot::channel();
                waiting.others.push((count, sender));
                return SharedCall::Other(replies);
            }
        }
        let mut waiting = Waiting { is_over_slots: is_cluster, ..Waiting::default() };
        waiting.own = waiting.add(requests);
        let group = Arc::new(Group { connection: connection.clone(), waiting: Mutex::new(waiting) });
        *open = Some(Arc::clone(&group));
        SharedCall::First(First { sharing: Arc::clone(self), group })
    }
}

impl Waiting {
    /// Adds the first requests, as many as fit, or one of any size if there is none yet. Returns their number.
    fn add<F: FnOnce(&mut Requests)>(&mut self, requests: &mut Peekable<impl Iterator<Item = (usize, F)>>) -> usize {
        let before = self.count;
        while let Some((cost, add)) =
            requests.next_if(|(cost, _)| self.count == 0 || self.cost.saturating_add(*cost) <= MOST_CHARGES)
        {
            add(&mut self.requests);
            self.cost = self.cost.saturating_add(cost);
            self.count += 1;
        }
        self.count - before
    }

    fn command(&self, by: By) -> Cmd {
        let is_over_slots = self.is_over_slots && self.count > 1;
        if is_over_slots { self.requests.command_over_slots(by) } else { self.requests.command(by) }
    }
}

impl SharedCall {
    /// Returns the replies.
    ///
    /// # Errors
    /// If the connection is lost: then the requests may have been executed or not.
    pub async fn replies(self) -> RedisResult<Replies> {
        match self {
            Self::First(first) => first.send().await,
            Self::Other(replies) => replies.await.unwrap_or_else(|_| Err(unsent())),
        }
    }
}

impl First {
    async fn send(self) -> RedisResult<Replies> {
        yield_now().await;
        let waiting = self.close();
        match self.group.connection.clone().send(&waiting.command(self.group.connection.dialect().by())).await {
            Ok(reply) => {
                let mut replies = script::split(reply, waiting.count).into_iter();
                let own = replies.by_ref().take(waiting.own).collect();
                for (count, other) in waiting.others {
                    // It may have gone.
                    let _ = other.send(Ok(replies.by_ref().take(count).collect()));
                }
                Ok(own)
            }
            Err(error) => {
                for (_, other) in waiting.others {
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
        for (_, other) in self.close().others {
            let _ = other.send(Err(unsent()));
        }
    }
}

fn unsent() -> RedisError {
    io::Error::from(io::ErrorKind::ConnectionAborted).into()
}
