//! The accept loop, and the end of it.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{self, ErrorKind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::{JoinError, JoinSet};
use tokio::time::{Instant, timeout};

use super::connection::{Ending, Stop, live};
use super::limits::{ConnectionLimits, Slots};
use super::protocol::Protocol;
use super::socket::{Socket, State};
use super::tally::Tally;
use super::workers::{Seats, Workers};

/// The rest after a failed accept: 50 ms (`docs/decisions/0003`). Without one a process out of descriptors takes a whole core.
pub const ACCEPT_REST: Duration = Duration::from_millis(50);
/// The rest after a connection over the cap was closed: 1 ms, so that callers who try again at once cost us no more
/// than 1,000 accepts a second.
pub const REFUSAL_REST: Duration = Duration::from_millis(1);
/// The time between two warnings of one kind: 10 s.
pub const WARNING_EVERY: Duration = Duration::from_secs(10);
/// What the stop of a listener may take beyond `ConnectionLimits::drain`: 500 ms.
pub const DRAIN_SLACK: Duration = Duration::from_millis(500);

/// A bound socket and what its connections may take.
#[derive(Debug)]
pub struct Listener {
    name: &'static str,
    socket: TcpListener,
    slots: Slots,
    limits: ConnectionLimits,
    tally: Arc<Tally>,
}

/// What became of the connections that were open when the service stopped.
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
    /// A listener on a bound `socket`; `name` is for the log.
    pub fn new(name: &'static str, socket: TcpListener, slots: Slots, limits: ConnectionLimits) -> Self {
        Self { name, socket, slots, limits, tally: Arc::default() }
    }

    /// The counts of this listener, which go on while it serves.
    pub fn tally(&self) -> Arc<Tally> {
        Arc::clone(&self.tally)
    }

    /// Serves until `stop` turns true (or its sender is gone), and returns when no connection is left, at most the
    /// drain bound and [`DRAIN_SLACK`] later. Calls in flight are answered; new connections are refused at once.
    ///
    /// A connection over the cap is accepted and closed rather than left waiting: its client learns at once that it
    /// has to go elsewhere.
    pub async fn serve<P: Protocol>(self, protocol: P, workers: Workers, stop: watch::Receiver<bool>) -> Drained {
        let Self { name, socket, slots, limits, tally } = self;
        let mut stop = Stop(stop);
        let seats = workers.seats();
        let mut loops = Loop {
            name,
            tally,
            connections: JoinSet::new(),
            ages: Ages::new(limits.age),
            errors: Warning::new(),
            refusals: Warning::new(),
        };
        while !stop.is_set() {
            let rest = tokio::select! {
                biased;
                () = stop.wait() => break,
                Some(ended) = loops.connections.join_next() => { loops.ended(ended); None }
                accepted = socket.accept() => match accepted {
                    Ok((stream, _)) => loops.accepted(stream, &slots, &seats, &protocol, limits, &stop),
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

/// What the accept loop keeps between two accepts.
struct Loop {
    name: &'static str,
    tally: Arc<Tally>,
    connections: JoinSet<Ending>,
    ages: Ages,
    errors: Warning,
    refusals: Warning,
}

impl Loop {
    /// Starts to serve `stream`, or closes it and says how long to rest.
    fn accepted<P: Protocol>(
        &mut self,
        stream: TcpStream,
        slots: &Slots,
        seats: &Seats,
        protocol: &P,
        limits: ConnectionLimits,
        stop: &Stop,
    ) -> Option<Duration> {
        let Some(slot) = slots.take() else {
            self.tally.refused.fetch_add(1, Ordering::Relaxed);
            if let Some(count) = self.refusals.due() {
                tracing::warn!(
                    listener = self.name,
                    count,
                    "connections were closed at once: as many are open as there is room for"
                );
            }
            return Some(REFUSAL_REST);
        };
        // Without TCP_NODELAY an answer would wait for the acknowledgement of the one before; a socket that refuses
        // the option is dead already and ends by itself.
        let _ = stream.set_nodelay(true);
        let stream = match stream.into_std() {
            Ok(stream) => stream,
            Err(error) => return self.not_accepted(&error),
        };
        self.tally.accepted.fetch_add(1, Ordering::Relaxed);
        let (worker, seat) = seats.take();
        let (protocol, stop) = (protocol.clone(), stop.clone());
        let limits = ConnectionLimits { age: self.ages.next(), ..limits };
        let connection = async move {
            let _held = (slot, seat);
            let state = State::default();
            match TcpStream::from_std(stream) {
                Ok(stream) => {
                    let socket = Socket::new(stream, P::OPENING_BYTES, state.clone(), limits.stall);
                    live(protocol.connect(socket), state, limits, stop).await
                }
                Err(error) => Ending::Failed(error.into()),
            }
        };
        self.connections.spawn_on(connection, &worker);
        None
    }

    /// Counts a failed accept and says how long to rest; not at all when only that one peer was the matter.
    fn not_accepted(&mut self, error: &io::Error) -> Option<Duration> {
        use ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset, Interrupted};
        self.tally.accept_errors.fetch_add(1, Ordering::Relaxed);
        if matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset | Interrupted) {
            return None;
        }
        if let Some(count) = self.errors.due() {
            tracing::warn!(listener = self.name, count, %error, "connections cannot be accepted; trying again every 50 ms");
        }
        Some(ACCEPT_REST)
    }

    fn ended(&self, ended: Result<Ending, JoinError>) -> Drained {
        let (tally, name) = (&self.tally, self.name);
        tally.ended.fetch_add(1, Ordering::Relaxed);
        match ended {
            Ok(Ending::Closed) => {}
            Ok(Ending::Failed(error)) => {
                tally.failed.fetch_add(1, Ordering::Relaxed);
                tracing::debug!(listener = name, %error, "a connection failed");
            }
            Ok(Ending::Unopened) => {
                tally.unopened.fetch_add(1, Ordering::Relaxed);
                return Drained { unopened: 1, ..Drained::default() };
            }
            Err(error) if error.is_panic() => {
                tally.failed.fetch_add(1, Ordering::Relaxed);
                tracing::error!(listener = name, "a connection was lost to a panic, which is a bug in this program");
            }
            Ok(Ending::Cut) | Err(_) => {
                tally.cut.fetch_add(1, Ordering::Relaxed);
                return Drained { cut: 1, ..Drained::default() };
            }
        }
        Drained { closed: 1, ..Drained::default() }
    }

    /// Waits for the connections, which know of the stop themselves, and drops those that do not keep to it.
    async fn drain(mut self, bound: Duration) -> Drained {
        let mut drained = Drained::default();
        for wait in [bound.saturating_add(DRAIN_SLACK / 2), DRAIN_SLACK / 2] {
            let _ = timeout(wait, async {
                while let Some(ended) = self.connections.join_next().await {
                    let ended = self.ended(ended);
                    drained.closed += ended.closed;
                    drained.unopened += ended.unopened;
                    drained.cut += ended.cut;
                }
            })
            .await;
            self.connections.abort_all();
        }
        // Left over: connections of a worker that is stuck in a call. They go with the process.
        let stuck = u64::try_from(self.connections.len()).unwrap_or(u64::MAX);
        self.tally.cut.fetch_add(stuck, Ordering::Relaxed);
        self.tally.ended.fetch_add(stuck, Ordering::Relaxed);
        drained.cut += stuck;
        tracing::info!(
            listener = self.name,
            closed = drained.closed,
            unopened = drained.unopened,
            cut = drained.cut,
            "the listener has stopped"
        );
        drained
    }
}

/// The ages at which connections are finished: one setting, spread over plus or minus 10 % so that connections opened
/// together do not come back together.
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

/// A warning that is written seldom and counts what it stands for.
struct Warning {
    last: Option<Instant>,
    count: u64,
}

impl Warning {
    fn new() -> Self {
        Self { last: None, count: 0 }
    }

    /// Counts one more; the number since the last warning when it is time for the next.
    fn due(&mut self) -> Option<u64> {
        self.count += 1;
        if self.last.is_some_and(|last| last.elapsed() < WARNING_EVERY) {
            return None;
        }
        self.last = Some(Instant::now());
        Some(std::mem::take(&mut self.count))
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

    #[tokio::test(start_paused = true)]
    async fn a_warning_comes_once_in_ten_seconds_with_a_count() {
        let mut warning = Warning::new();
        assert_eq!(warning.due(), Some(1));
        assert_eq!((0..1_000).find_map(|_| warning.due()), None);
        tokio::time::advance(WARNING_EVERY).await;
        assert_eq!(warning.due(), Some(1_001));
    }
}
