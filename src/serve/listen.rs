//! Accept loop of a listener, and its graceful stop.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{self, ErrorKind};
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::{Id, JoinError, JoinSet};
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};

use super::activity::Activity;
use super::connection::live;
use super::ending::Ending;
use super::http::Protocol;
use super::idle::{Idle, LOOK_EVERY, LOOKS, LOOKS_AT_REST};
use super::limits::{ConnectionLimits, ConnectionSlots};
use super::net::{AcceptedStream, NetListener};
use super::socket::Socket;
use super::stop::StopNotice;
use super::stream::{Link, Stream};
use super::tally::{EndCause, Tally};
use super::tls::{Accepted, ListenerTls, Peer};
use super::turn::State;
use super::workers::{WorkerSlots, Workers};
use crate::telemetry::throttle::LogThrottle;

/// Pause after a failed accept: 50 ms (`docs/decisions/0003`). Without it, a process out of descriptors uses a whole
/// core.
pub const ACCEPT_REST: Duration = Duration::from_millis(50);
/// Pause after a connection over the cap was closed: 1 ms, so that callers that retry at once cost at most 1,000
/// accepts a second.
pub const REFUSAL_REST: Duration = Duration::from_millis(1);
/// Pause after an accept while too many connections are leaving: 1 ms.
pub const IDLE_REST: Duration = Duration::from_millis(1);
/// Time that the stop of a listener may take beyond `ConnectionLimits::drain`: 500 ms.
pub const DRAIN_SLACK: Duration = Duration::from_millis(500);

/// Bound socket, and the limits of its connections.
pub struct Listener {
    name: &'static str,
    socket: NetListener,
    slots: ConnectionSlots,
    limits: ConnectionLimits,
    most_idle: usize,
    /// True if connections over the cap wait in the backlog of the kernel. False if they are closed.
    waits: bool,
    tls: Option<Arc<ListenerTls>>,
    tally: Arc<Tally>,
}

/// Counts of the connections that were open when the service stopped, by their end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Drained {
    /// Connections that ended by themselves or with every call answered.
    pub closed: u64,
    /// Connections whose peer had never opened them.
    pub unopened: u64,
    /// Connections cut at the drain bound.
    pub cut: u64,
}

impl Listener {
    /// Creates a listener on the bound `socket`; `name` appears in the log.
    pub fn new(name: &'static str, socket: NetListener, slots: ConnectionSlots, limits: ConnectionLimits) -> Self {
        Self { name, socket, slots, limits, most_idle: usize::MAX, waits: false, tls: None, tally: Arc::default() }
    }

    /// Serves TLS instead of plaintext if `tls` is given.
    #[must_use]
    pub fn with_tls(self, tls: Option<Arc<ListenerTls>>) -> Self {
        Self { tls, ..self }
    }

    /// Bounds the open connections: while there are more than `most`, those that are idle longest are closed.
    /// Connections with a call in flight stay.
    #[must_use]
    pub fn with_most_idle(self, most: usize) -> Self {
        Self { most_idle: most, ..self }
    }

    /// Leaves connections over the cap in the backlog of the kernel until a slot is free. For peers to which a closed
    /// connection is an admission, and whose requests are short.
    #[must_use]
    pub fn with_waiting(self) -> Self {
        Self { waits: true, ..self }
    }

    /// Returns the counts of this listener, which continue while it serves.
    pub fn tally(&self) -> Arc<Tally> {
        Arc::clone(&self.tally)
    }

    /// Serves until `stop` turns true (or its sender is gone). Returns when no connection is left, at most the drain
    /// bound and [`DRAIN_SLACK`] later. Calls in flight are answered; new connections are refused at once.
    ///
    /// A connection over the cap is accepted and closed, not left waiting: its client learns at once that it has to go
    /// elsewhere. [`Listener::with_waiting`] leaves it waiting.
    pub async fn serve<P: Protocol>(self, protocol: P, workers: Workers, stop: watch::Receiver<bool>) -> Drained {
        let Self { name, socket, slots, limits, most_idle, waits, tls, tally } = self;
        let mut stop = StopNotice(stop);
        let slots_of_workers = workers.slots();
        let mut loops = Loop {
            name,
            tally,
            tls,
            connections: JoinSet::new(),
            idle: Idle::new(most_idle, waits),
            is_full: Arc::default(),
            waits,
            began: Instant::now(),
            ages: Ages::new(limits.age),
            errors: LogThrottle::new(),
            warnings: EndCause::ALL.map(|how| LogThrottle::every(how.log_interval())),
        };
        let mut look = interval(LOOK_EVERY);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        while !stop.is_set() {
            let rest = tokio::select! {
                biased;
                () = stop.wait() => break,
                Some(ended) = loops.connections.join_next_with_id() => { loops.ended(ended); None }
                _ = look.tick(), if loops.idle.is_over() => { loops.idle.make_room(LOOKS_AT_REST); None }
                accepted = socket.accept(), if !waits || slots.is_any_free() => match accepted {
                    Ok(accepted) => loops.accepted(accepted, &slots, &slots_of_workers, &protocol, limits, &stop),
                    Err(error) => loops.not_accepted(&error),
                }
            };
            if let Some(rest) = rest {
                stop.wait_at_most(rest).await;
            }
        }
        drop(socket);
        loops.drain(limits.drain).await
    }
}

/// State of the accept loop.
struct Loop {
    name: &'static str,
    tally: Arc<Tally>,
    tls: Option<Arc<ListenerTls>>,
    connections: JoinSet<(Ending, Option<IpAddr>)>,
    idle: Idle,
    /// True while there are more connections than may be idle, if connections over the cap wait.
    is_full: Arc<AtomicBool>,
    waits: bool,
    began: Instant,
    ages: Ages,
    errors: LogThrottle,
    warnings: [LogThrottle; EndCause::ALL.len()],
}

impl Loop {
    /// Serves `stream` of `client`, or closes it if no slot is free. Returns the pause before the next accept, if one is needed.
    fn accepted<P: Protocol>(
        &mut self,
        (stream, client): (AcceptedStream, Option<IpAddr>),
        slots: &ConnectionSlots,
        slots_of_workers: &WorkerSlots,
        protocol: &P,
        limits: ConnectionLimits,
        stop: &StopNotice,
    ) -> Option<Duration> {
        let Some(slot) = slots.take() else {
            self.count(EndCause::Refused, client);
            return Some(REFUSAL_REST);
        };
        self.tally.accepted.fetch_add(1, Ordering::Relaxed);
        let (worker, worker_slot) = slots_of_workers.take();
        let (protocol, stop) = (protocol.clone(), stop.clone());
        let limits = ConnectionLimits { age: self.ages.next(), ..limits };
        let activity = Activity::new(self.began, Arc::clone(&self.is_full));
        let shared = activity.clone();
        let tls = self.tls.clone();
        let connection = async move {
            let _held = (slot, worker_slot);
            let state = State::default();
            let ending = match tls {
                None => match stream.register() {
                    Ok(stream) => {
                        let stream = Stream::Plain(Link::plain(stream, limits.stall));
                        let accepted = Accepted { stream, peer: Peer::anyone() };
                        served(&protocol, accepted, state, activity, limits, stop).await
                    }
                    Err(error) => Ending::Failed(EndCause::Io, error.into()),
                },
                // Boxed, so that a connection in plaintext has no space for it.
                Some(tls) => {
                    Box::pin(served_over_tls(tls, protocol, (stream, client), state, activity, limits, stop)).await
                }
            };
            (ending, client)
        };
        let id = self.connections.spawn_on(connection, &worker).id();
        self.idle.add(id, shared);
        self.idle.make_room(LOOKS);
        self.note_full();
        self.idle.is_crowded().then_some(IDLE_REST)
    }

    fn note_full(&self) {
        let is_over = self.waits && self.idle.is_over();
        if self.is_full.load(Ordering::Relaxed) != is_over {
            self.is_full.store(is_over, Ordering::Relaxed);
        }
    }

    /// Counts a failed accept. Returns the pause before the next one; `None` if the error concerns that one peer only.
    fn not_accepted(&mut self, error: &io::Error) -> Option<Duration> {
        use ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset, Interrupted};
        self.tally.end(EndCause::NotAccepted, 1);
        if matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset | Interrupted) {
            return None;
        }
        if let Some(count) = self.errors.due() {
            tracing::warn!(event = "connections.not_accepted", listener = self.name, count, %error, "connections cannot be accepted; trying again every 50 ms");
        }
        Some(ACCEPT_REST)
    }

    fn ended(&mut self, ended: Result<(Id, (Ending, Option<IpAddr>)), JoinError>) -> Drained {
        let name = self.name;
        let client = ended.as_ref().ok().and_then(|(_, (_, client))| *client);
        self.idle.remove(ended.as_ref().map_or_else(JoinError::id, |(id, _)| *id));
        self.note_full();
        let how = match ended {
            Ok((_, (Ending::Closed, _))) => None,
            Ok((_, (Ending::Ended(how), _))) => Some(how),
            Ok((_, (Ending::Failed(how, error), _))) => {
                tracing::debug!(event = "connection.failed", listener = name, how = how.name(), %error, "a connection failed");
                Some(how)
            }
            Err(error) if error.is_panic() => {
                tracing::error!(
                    event = "connection.panicked",
                    listener = name,
                    "a connection ended with a panic, which is a bug"
                );
                Some(EndCause::Failed)
            }
            Err(_) => Some(EndCause::Cut),
        };
        how.into_iter().for_each(|how| self.count(how, client));
        // Counted after the cause, so that a reader that sees no open connection sees why each ended.
        self.tally.ended.fetch_add(1, Ordering::Release);
        match how {
            Some(EndCause::Unopened) => Drained { unopened: 1, ..Drained::default() },
            Some(EndCause::Cut) => Drained { cut: 1, ..Drained::default() },
            _ => Drained { closed: 1, ..Drained::default() },
        }
    }

    /// Counts a connection of `client` that ended abnormally. Logs a rate-limited warning for causes that an operator should know.
    fn count(&mut self, how: EndCause, client: Option<IpAddr>) {
        self.tally.end(how, 1);
        let (Some(sentence), Some(number)) = (how.warning(), how.number()) else { return };
        if let Some(count) = self.warnings.get(number).and_then(LogThrottle::due) {
            let (how, last_client) = (how.name(), client.map(tracing::field::display));
            tracing::warn!(event = "connections.ended", listener = self.name, how, count, last_client, "{sentence}");
        }
    }

    /// Waits for the connections, which receive the stop signal themselves. Drops those that do not end in time.
    async fn drain(mut self, bound: Duration) -> Drained {
        let mut drained = Drained::default();
        for wait in [bound.saturating_add(DRAIN_SLACK / 2), DRAIN_SLACK / 2] {
            let _ = timeout(wait, async {
                while let Some(ended) = self.connections.join_next_with_id().await {
                    let ended = self.ended(ended);
                    drained.closed += ended.closed;
                    drained.unopened += ended.unopened;
                    drained.cut += ended.cut;
                }
            })
            .await;
            self.connections.abort_all();
        }
        // The rest are connections of a worker that is stuck in a call. They end with the process.
        let stuck = u64::try_from(self.connections.len()).unwrap_or(u64::MAX);
        self.tally.end(EndCause::Cut, stuck);
        self.tally.ended.fetch_add(stuck, Ordering::Relaxed);
        drained.cut += stuck;
        tracing::info!(
            event = "listener.stopped",
            listener = self.name,
            closed = drained.closed,
            unopened = drained.unopened,
            cut = drained.cut,
            "the listener has stopped"
        );
        drained
    }
}

/// Serves a connection that speaks TLS, if it needs to, until it ends.
fn served<P: Protocol>(
    protocol: &P,
    Accepted { stream, peer }: Accepted,
    state: State,
    activity: Activity,
    limits: ConnectionLimits,
    stop: StopNotice,
) -> impl Future<Output = Ending> + use<P> {
    let socket = Socket::new(stream, protocol.opening_bytes(), state.clone());
    live(Box::pin(protocol.connect(socket, &activity, &peer)), state, activity, limits, stop, peer)
}

/// Does the TLS handshake of a connection, and serves it until it ends.
async fn served_over_tls<P: Protocol>(
    tls: Arc<ListenerTls>,
    protocol: P,
    stream: (AcceptedStream, Option<IpAddr>),
    state: State,
    activity: Activity,
    limits: ConnectionLimits,
    mut stop: StopNotice,
) -> Ending {
    let began = Instant::now();
    let accepted = match tls.accept(stream, &state, &activity, &limits, &mut stop).await {
        Ok(accepted) => accepted,
        Err(ending) => return ending,
    };
    let limits = ConnectionLimits { handshake: limits.handshake.saturating_sub(began.elapsed()), ..limits };
    served(&protocol, accepted, state, activity, limits, stop).await
}

/// Maximum ages of connections: one setting with a jitter of plus or minus 10 %, so that connections opened together do
/// not reconnect together.
struct Ages {
    age: Duration,
    position: u64,
}

impl Ages {
    /// 2^64 over the golden ratio: its multiples fill a circle evenly however many there are.
    const STEP: u64 = 0x9E37_79B9_7F4A_7C15;

    fn new(age: Duration) -> Self {
        Self { age, position: RandomState::new().build_hasher().finish() }
    }

    fn next(&mut self) -> Duration {
        self.position = self.position.wrapping_add(Self::STEP);
        let share = f64::from(u32::try_from(self.position >> 32).unwrap_or(u32::MAX)) / f64::from(u32::MAX);
        self.age.saturating_sub(self.age / 10).saturating_add((self.age / 5).mul_f64(share))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_are_spread_over_a_tenth_either_way() {
        let mut ages = Ages::new(Duration::from_secs(1_000));
        let drawn: Vec<_> = (0..100).map(|_| ages.next().as_secs()).collect();
        assert!(drawn.iter().all(|age| (900..=1_100).contains(age)), "{drawn:?}");
        assert!(drawn.iter().any(|age| *age < 910) && drawn.iter().any(|age| *age > 1_090), "{drawn:?}");
        assert!(Ages::new(Duration::MAX).next() > Duration::from_secs(u64::MAX / 10 * 8));
    }
}
