//! The life of one connection: opened in time, served until it is old or the service stops, finished, or cut.

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::sleep;

use super::limits::ConnectionLimits;
use super::protocol::Connection;
use super::socket::State;

/// How a connection ended.
#[derive(Debug)]
pub(super) enum Ending {
    /// The peer closed it, or it was finished with every call answered.
    Closed,
    /// Peer, protocol or socket failed.
    Failed(Box<dyn std::error::Error + Send + Sync>),
    /// Dropped because the peer never opened it.
    Unopened,
    /// Dropped with calls in flight, or with a peer that did not let it be finished.
    Cut,
}

/// The signal to stop, as one connection or listener waits for it.
#[derive(Clone, Debug)]
pub(super) struct Stop(pub(super) watch::Receiver<bool>);

impl Stop {
    /// True from the signal on.
    pub(super) fn is_set(&self) -> bool {
        *self.0.borrow() || self.0.has_changed().is_err()
    }

    /// Waits for the signal; a signal that nobody can give any more is given.
    pub(super) async fn wait(&mut self) {
        let _ = self.0.wait_for(|stop| *stop).await;
    }

    /// Waits for the signal at most so long.
    pub(super) async fn wait_at_most(&mut self, length: Duration) {
        let _ = tokio::time::timeout(length, self.wait()).await;
    }
}

/// Serves `connection` to its end, whoever brings it about. `limits.age` is this connection's own.
pub(super) async fn live<C: Connection>(
    connection: C,
    state: State,
    limits: ConnectionLimits,
    mut stop: Stop,
) -> Ending {
    let mut connection = pin!(connection);
    if let Some(ending) = until(connection.as_mut(), &state, stop.wait_at_most(limits.handshake)).await {
        return ending;
    }
    if !state.is_opened() {
        return Ending::Unopened;
    }
    if let Some(ending) = until(connection.as_mut(), &state, stop.wait_at_most(limits.age)).await {
        return ending;
    }
    connection.as_mut().finish();
    if let Some(ending) = until(connection.as_mut(), &state, stop.wait_at_most(limits.grace)).await {
        return ending;
    }
    if !stop.is_set() {
        return Ending::Cut;
    }
    until(connection.as_mut(), &state, sleep(limits.drain)).await.unwrap_or(Ending::Cut)
}

/// Serves `connection` until it ends or `due` does; `None` is the latter.
async fn until<C: Connection>(
    mut connection: Pin<&mut C>,
    state: &State,
    due: impl Future<Output = ()>,
) -> Option<Ending> {
    let mut due = pin!(due);
    let mut alarm: Option<Arc<Alarm>> = None;
    std::future::poll_fn(|cx| {
        state.begin_turn();
        if let Poll::Ready(ended) = connection.as_mut().poll(cx) {
            return Poll::Ready(Some(ended.map_or_else(|failed| Ending::Failed(failed.into()), |()| Ending::Closed)));
        }
        if !alarm.as_ref().is_some_and(|alarm| alarm.connection.will_wake(cx.waker())) {
            alarm = Some(Arc::new(Alarm { rung: AtomicBool::new(true), connection: cx.waker().clone() }));
        }
        match &alarm {
            Some(alarm) if alarm.rung.swap(false, Ordering::AcqRel) => {
                due.as_mut().poll(&mut Context::from_waker(&Waker::from(Arc::clone(alarm)))).map(|()| None)
            }
            _ => Poll::Pending,
        }
    })
    .await
}

/// Wakes a connection for its timer and the signal to stop, and says that it was these: a connection wakes for every
/// call, and asking them each time takes the lock that all connections share.
struct Alarm {
    rung: AtomicBool,
    connection: Waker,
}

impl Wake for Alarm {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.rung.store(true, Ordering::Release);
        self.connection.wake_by_ref();
    }
}
