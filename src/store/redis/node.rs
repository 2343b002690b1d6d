//! One Redis server: its connections, what is in flight to it, and whether it is worth asking.

use std::cell::Cell;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bb8_redis::bb8::{Pool, QueueStrategy};
use redis::{Cmd, RedisError, Value, cmd};
use smallvec::{SmallVec, smallvec};
use tokio::sync::{Mutex, Notify, Semaphore, SemaphorePermit};
use tokio::time::{Instant, sleep_until, timeout_at};

use super::backoff::{Backoff, Quiet, chance};
use super::breaker::Breaker;
use super::clock::NodeClock;
use super::connection::Connection;
use super::manager::{Access, Address, Locate, Manager};
use super::round_trip::RoundTrips;
use crate::model::Micros;
use crate::store::StoreError;
use crate::telemetry::servers::Server;

/// Calls in flight to one node: 256. What waits behind so many is answered too late anyway.
const IN_FLIGHT: usize = 256;
/// The time from one probe of a node that is down to the next: 200 ms, give or take a quarter.
const PROBE_MS: u64 = 150;
const PROBE_SPREAD_MS: u64 = 100;
/// A connection on which a call timed out is suspected if the call has waited for 5 ms, half of what an ordinary caller leaves:
/// the haste of a few must not cost the others their connection.
const FAIR_WAIT: Duration = Duration::from_millis(5);
/// How long the answer to a probe is waited for: 100 ms. One that comes later than the callers need measures the round trip only.
const PROBE_PATIENCE: Duration = Duration::from_millis(100);

/// One Redis server.
pub struct Node {
    name: String,
    lanes: Box<[OnceLock<Pool<Manager>>]>,
    locate: Locate,
    access: Access,
    clock: Arc<NodeClock>,
    round_trips: Arc<RoundTrips>,
    backoff: Arc<Backoff>,
    is_inspected: Arc<AtomicBool>,
    breaker: Breaker,
    in_flight: Semaphore,
    /// Wakes who probes.
    attention: Arc<Notify>,
    /// One call at a time loads the script; how often it was loaded.
    loading: Mutex<()>,
    loads: AtomicUsize,
    lost: Quiet,
    watched: Arc<Server>,
}

/// A place among the calls in flight, and the connection to call on.
pub struct Checkout<'a> {
    node: &'a Node,
    connection: Connection,
    _permit: SemaphorePermit<'a>,
}

/// A lane is a thread's own connection: its calls and its replies never change threads, and those of one moment share a write.
fn lane() -> usize {
    static THREADS: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static LANE: Cell<Option<usize>> = const { Cell::new(None) };
    }
    LANE.with(|lane| {
        let number = lane.get().unwrap_or_else(|| THREADS.fetch_add(1, Ordering::Relaxed));
        lane.set(Some(number));
        number
    })
}

impl Node {
    /// A node that is found so, with a connection for each of `lanes` threads, none of them made yet.
    pub fn new(locate: Locate, access: Access, lanes: usize, attention: Arc<Notify>) -> Self {
        let name = locate.to_string();
        let (watched, breaker) = (access.watched.named(&name), Breaker::default());
        watched.watch_breaker(breaker.is_open());
        Self {
            name,
            lanes: std::iter::repeat_with(OnceLock::new).take(lanes.max(1)).collect(),
            locate,
            access,
            clock: Arc::default(),
            round_trips: Arc::default(),
            backoff: Arc::default(),
            is_inspected: Arc::default(),
            breaker,
            in_flight: Semaphore::new(IN_FLIGHT),
            attention,
            loading: Mutex::new(()),
            loads: AtomicUsize::new(0),
            lost: Quiet::new(),
            watched,
        }
    }

    /// What it is called in logs: its address.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its host and port, or whatever else it is found by.
    pub fn place(&self) -> (&str, Option<u16>) {
        match &self.locate {
            Locate::At(Address::Tcp(host, port)) => (host, Some(*port)),
            Locate::At(Address::Unix(_)) | Locate::Sentinel { .. } => (&self.name, None),
        }
    }

    /// Who is told how it answers.
    pub fn watched(&self) -> &Server {
        &self.watched
    }

    /// A connection to ask it on before `until`.
    ///
    /// # Errors
    /// When it is down, too busy, or not connected by then.
    pub async fn checkout(&self, until: Instant) -> Result<Checkout<'_>, StoreError> {
        let now = Instant::now();
        if let Some(next_probe) = self.breaker.next_probe(until.saturating_duration_since(now)) {
            let wait = next_probe.saturating_duration_since(now);
            let retry = Micros::new(u64::try_from(wait.as_micros()).unwrap_or(u64::MAX));
            return Err(StoreError::Down { retry });
        }
        let permit = self.in_flight.try_acquire().map_err(|_| StoreError::Overloaded)?;
        match self.connection(until).await {
            Some(connection) => Ok(Checkout { node: self, connection, _permit: permit }),
            None => {
                self.failed(until.saturating_duration_since(now));
                Err(StoreError::Unreachable)
            }
        }
    }

    /// A live connection of this thread, made anew where there is none; `None` if there is none in time.
    async fn connection(&self, until: Instant) -> Option<Connection> {
        let pool = self.lanes[lane() % self.lanes.len()].get_or_init(|| self.pool());
        loop {
            // While it is too early to connect again nobody waits for what will not come.
            if self.backoff.until().is_some() && pool.state().connections == 0 {
                return None;
            }
            let pooled = tokio::select! {
                biased;
                pooled = pool.get() => pooled.ok()?,
                () = self.backoff.failure() => return None,
                () = sleep_until(until) => return None,
            };
            if !pooled.is_broken() {
                pooled.authenticate_if_changed(&self.access.credentials);
                return Some(pooled.clone());
            }
        }
    }

    fn pool(&self) -> Pool<Manager> {
        let (clock, backoff) = (Arc::clone(&self.clock), Arc::clone(&self.backoff));
        let (round_trips, is_inspected) = (Arc::clone(&self.round_trips), Arc::clone(&self.is_inspected));
        let manager = Manager::new(self.locate.clone(), self.access.clone(), clock, round_trips, backoff, is_inspected);
        Pool::builder()
            .max_size(1)
            .queue_strategy(QueueStrategy::Fifo)
            .test_on_check_out(false)
            .retry_connection(false)
            .connection_timeout(self.access.connect_timeout)
            .idle_timeout(None)
            .max_lifetime(None)
            .build_unchecked(manager)
    }

    /// A charge waited in vain for so long.
    fn failed(&self, waited: Duration) {
        if self.breaker.failed(Instant::now(), waited) {
            self.attention.notify_one();
        }
    }

    /// Whether it answers, as far as is known.
    pub fn is_well(&self) -> bool {
        self.breaker.is_trusted()
    }

    /// Forgets that it was down. What else is known of it, each reply corrects.
    pub fn trust(&self) {
        self.breaker.succeeded();
    }

    /// Finds out whether a node in doubt is there. Called again and again by who supervises.
    pub async fn probe(&self) {
        let Some(doubt) = self.breaker.doubt(Instant::now()) else { return };
        let until = Instant::now() + doubt.needed.clamp(Duration::from_millis(1), PROBE_PATIENCE);
        // A paused server leaves what is sent on old connections unread; what is asked now comes behind it.
        if self.is_there(until).await {
            if self.breaker.passed() {
                tracing::warn!(server = self.name, "Redis answers again");
            }
            return;
        }
        let next = Instant::now() + Duration::from_millis(PROBE_MS + chance(PROBE_SPREAD_MS));
        if self.breaker.missed(Instant::now(), next) {
            tracing::warn!(server = self.name, "Redis does not answer: the policy does until it does");
        }
    }

    /// Sends a PING and returns whether it is answered before `until`. An answer that comes later, up to 100 ms after the PING, measures
    /// the round trip: a node that has moved further away is given the time that it needs once that is known.
    async fn is_there(&self, until: Instant) -> bool {
        let Some(connection) = self.connection(until).await else { return false };
        let (mut asked, ping, sent) = (connection.clone(), cmd("PING"), Instant::now());
        let mut answer = pin!(asked.send(&ping));
        // An answer that has come counts, however late this thread looks for it.
        let (reply, is_in_time) = match timeout_at(until, &mut answer).await {
            Ok(reply) => (Some(reply), true),
            Err(_) => (timeout_at(sent + PROBE_PATIENCE, answer).await.ok(), false),
        };
        match reply {
            Some(Ok(Value::ServerError(_)) | Err(_)) => false,
            Some(Ok(_)) => {
                connection.answered();
                let now = Instant::now();
                self.round_trips.add(now, now.duration_since(sent));
                is_in_time
            }
            None => {
                connection.timed_out();
                false
            }
        }
    }

    /// Returns the smallest recent round trip, if one was measured.
    pub fn round_trip(&self) -> Option<Duration> {
        self.round_trips.least()
    }

    /// Asks something that is no charge, on this thread's connection.
    pub async fn ask(&self, commands: Vec<Cmd>, until: Instant) -> Option<Vec<Value>> {
        let mut connection = self.connection(until).await?;
        let replies = timeout_at(until, connection.send_all(commands)).await.ok()?;
        if replies.is_err() {
            connection.give_up();
        }
        replies.ok()
    }

    /// How often the script was loaded because the server had lost it.
    pub fn loads(&self) -> usize {
        self.loads.load(Ordering::Acquire)
    }

    /// Runs `load`, which loads the script, unless another call has since `seen` loads, or there is no time left.
    pub async fn load_once<T>(&self, seen: usize, until: Instant, load: impl AsyncFnOnce() -> T) -> Option<T> {
        let _one = timeout_at(until, self.loading.lock()).await.ok()?;
        if self.loads() != seen {
            return None;
        }
        let loaded = load().await;
        self.loads.fetch_add(1, Ordering::AcqRel);
        Some(loaded)
    }
}

impl Checkout<'_> {
    /// The node's time at a moment of ours, at the latest.
    pub fn time_at(&self, moment: Instant) -> Micros {
        self.node.clock.at(moment).unwrap_or(Micros::ZERO)
    }

    /// Learns the node's time from a reply.
    pub fn learn(&self, sent: Instant, time: Micros) {
        self.node.clock.learn(sent, Instant::now(), time);
    }

    /// Sends commands in one write and waits for their replies until then.
    ///
    /// # Errors
    /// When they do not come, or the connection is lost: then nobody knows what was executed.
    pub async fn send(
        &mut self,
        commands: SmallVec<[Cmd; 1]>,
        until: Instant,
    ) -> Result<SmallVec<[Value; 1]>, StoreError> {
        let began = Instant::now();
        let budget = until.saturating_duration_since(began);
        let sent = async {
            match commands.as_slice() {
                [command] => self.connection.send(command).await.map(|reply| smallvec![reply]),
                _ => self.connection.send_all(commands).await.map(SmallVec::from_vec),
            }
        };
        match timeout_at(until, sent).await {
            Ok(Ok(replies)) => {
                self.connection.answered();
                let now = Instant::now();
                let took = now.duration_since(began);
                self.node.watched.answered(took);
                self.node.round_trips.add(now, took);
                if replies.iter().any(is_blocked) {
                    self.node.failed(budget);
                } else {
                    self.node.breaker.succeeded();
                }
                Ok(replies)
            }
            Ok(Err(error)) => {
                self.lost(&error);
                self.node.failed(budget);
                Err(StoreError::Unreachable)
            }
            Err(_) => {
                if budget >= FAIR_WAIT {
                    self.connection.timed_out();
                }
                self.node.failed(budget);
                Err(StoreError::TimedOut)
            }
        }
    }

    fn lost(&self, error: &RedisError) {
        if !self.connection.is_refused() && self.node.lost.is_over() {
            tracing::warn!(%error, server = self.node.name, "a Redis connection is lost");
        }
        self.connection.give_up();
    }

    /// The server is no master any more. Another connection may find the one that is; if not, not at once again.
    pub fn demoted(&self) {
        if self.connection.is_new() {
            self.node.backoff.failed();
        }
        self.connection.give_up();
    }
}

/// A server that answers everybody so is as good as away.
fn is_blocked(reply: &Value) -> bool {
    matches!(reply, Value::ServerError(error) if matches!(error.code(), "LOADING" | "BUSY"))
}
