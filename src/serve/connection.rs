//! Life of one connection: opened in time, served until its maximum age or the stop of the service, then finished or
//! cut. An idle HTTP/1 connection of that age waits for one request more.

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use tokio::time::{sleep, timeout};

use super::activity::Activity;
use super::ending::Ending;
use super::http::Connection;
use super::limits::ConnectionLimits;
use super::stop::StopNotice;
use super::tally::EndCause;
use super::tls::Peer;
use super::turn::State;

/// Time that an idle connection has to close when others need its memory: 1 s. It still answers the calls that were on
/// their way.
pub const IDLE_GRACE: Duration = Duration::from_secs(1);
/// Time that a connection has to close if it never had a call: 100 ms.
pub const UNUSED_GRACE: Duration = Duration::from_millis(100);
/// Time that calls have to finish on a connection whose client is no longer accepted: 30 s. With the time until each
/// connection has verified its client again (10 s), all such connections end within a minute.
pub const REVOKED_GRACE: Duration = Duration::from_secs(30);

/// Phase of a connection's life.
#[derive(Clone, Copy, Debug)]
enum ConnectionPhase {
    /// The peer has a limited time to open the connection.
    Opening,
    /// [`Activity::leave`] was called before the peer opened the connection. What the peer has sent already is read first: where
    /// the threads are busy, nobody has looked yet, and a request that is closed is an admission to some gateways.
    LeavingUnopened,
    /// The connection takes calls.
    Serving,
    /// The connection has its age, and closes with its next answer, or when it has been idle for as long as any may be.
    Ageing,
    /// The connection closes because [`Activity::leave`] was called.
    Leaving,
    /// The connection takes no new calls and answers those in flight.
    Finishing,
    /// Same as `Finishing`, because the client is no longer accepted.
    Revoked,
    /// Same as `Finishing`, while the service stops.
    Draining,
}

/// Serves `connection` of `peer` until it ends, whatever the cause. `limits.age` is the age of this connection.
///
/// `connection` is boxed, because the task would hold its space twice: as the argument, and pinned.
pub(super) async fn live<C: Connection>(
    mut connection: Pin<Box<C>>,
    state: State,
    activity: Activity,
    limits: ConnectionLimits,
    mut stop: StopNotice,
    mut peer: Peer,
) -> Ending {
    let mut phase = ConnectionPhase::Opening;
    // A single place that waits, so that the future has space for one wait only.
    loop {
        let over = phase.over(&limits, &activity, &mut stop, &mut peer);
        if let Some(ending) = until(connection.as_mut(), &state, &activity, over).await {
            return match ending {
                _ if activity.is_leaving() => Ending::Ended(EndCause::Idle),
                _ if peer.is_refused() => Ending::Ended(EndCause::Revoked),
                ending => ending,
            };
        }
        phase = match phase {
            ConnectionPhase::Opening
            | ConnectionPhase::LeavingUnopened
            | ConnectionPhase::Serving
            | ConnectionPhase::Ageing
            | ConnectionPhase::Finishing
                if peer.is_refused() && !stop.is_set() =>
            {
                connection.as_mut().finish();
                ConnectionPhase::Revoked
            }
            ConnectionPhase::Opening if activity.is_leaving() && !state.is_opened() && !stop.is_set() => {
                ConnectionPhase::LeavingUnopened
            }
            ConnectionPhase::Opening | ConnectionPhase::LeavingUnopened if !state.is_opened() => {
                return Ending::Ended(if activity.is_leaving() { EndCause::Idle } else { EndCause::Unopened });
            }
            ConnectionPhase::Opening if !activity.is_leaving() && !stop.is_set() => ConnectionPhase::Serving,
            ConnectionPhase::Serving if connection.can_announce_end() && !activity.is_leaving() && !stop.is_set() => {
                activity.announce_end();
                ConnectionPhase::Ageing
            }
            ConnectionPhase::Opening
            | ConnectionPhase::LeavingUnopened
            | ConnectionPhase::Serving
            | ConnectionPhase::Ageing => {
                connection.as_mut().finish();
                if activity.is_leaving() { ConnectionPhase::Leaving } else { ConnectionPhase::Finishing }
            }
            ConnectionPhase::Leaving if !activity.is_busy() && !stop.is_set() => return Ending::Ended(EndCause::Idle),
            ConnectionPhase::Leaving => ConnectionPhase::Finishing,
            ConnectionPhase::Finishing | ConnectionPhase::Revoked if stop.is_set() => ConnectionPhase::Draining,
            ConnectionPhase::Finishing | ConnectionPhase::Revoked | ConnectionPhase::Draining => {
                return Ending::Ended(EndCause::Cut);
            }
        };
    }
}

impl ConnectionPhase {
    /// Waits until this phase is over: by its timeout, the stop signal, [`Activity::leave`], or a refused client.
    async fn over(self, limits: &ConnectionLimits, activity: &Activity, stop: &mut StopNotice, peer: &mut Peer) {
        let (length, is_serving) = match self {
            Self::Opening => (limits.handshake, true),
            Self::LeavingUnopened => (UNUSED_GRACE, false),
            Self::Serving => (limits.age, true),
            Self::Ageing => (limits.keep_alive, true),
            Self::Leaving if activity.is_used() => (IDLE_GRACE, false),
            Self::Leaving => (UNUSED_GRACE, false),
            Self::Finishing => (limits.grace, false),
            Self::Revoked => (REVOKED_GRACE, false),
            Self::Draining => return sleep(limits.drain).await,
        };
        let _ = timeout(length, async {
            tokio::select! {
                () = stop.wait() => {}
                () = activity.asked_to_leave(), if is_serving => {}
                () = peer.refused(), if is_serving || matches!(self, Self::Finishing) => {}
            }
        })
        .await;
    }
}

/// Serves `connection` until it ends or `due` completes. Returns `None` in the second case.
async fn until<C: Connection>(
    mut connection: Pin<&mut C>,
    state: &State,
    activity: &Activity,
    due: impl Future<Output = ()>,
) -> Option<Ending> {
    let mut due = pin!(due);
    let mut alarm: Option<Arc<Alarm>> = None;
    std::future::poll_fn(|cx| {
        state.begin_turn();
        activity.begin_turn();
        if let Poll::Ready(ended) = connection.as_mut().poll(cx) {
            return Poll::Ready(Some(Ending::of(ended, state)));
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

/// Waker that records if the timer or the stop signal woke the connection. A connection wakes for every call, and
/// polling the two each time takes the lock that all connections share.
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
