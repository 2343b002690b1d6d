//! One Redis server: its connections, the calls in flight to it, and its health.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bb8_redis::bb8::{Pool, QueueStrategy};
use redis::{Cmd, Value, cmd};
use tokio::sync::futures::Notified;
use tokio::sync::{Mutex, Notify};
use tokio::time::{Instant, sleep_until, timeout_at};

use super::backoff::{Backoff, chance};
use super::breaker::{Breaker, IN_TIME};
use super::clock::NodeClock;
use super::concurrency::{CallPriority, Concurrency, Permit};
use super::connection::Connection;
use super::dialect::{Dialect, KnownDialect, is_of_proxy};
use super::manager::{Access, Locate, Manager};
use super::round_trip::RoundTrips;
use super::silence::Silence;
use crate::model::Micros;
use crate::store::StoreError;
use crate::telemetry::servers::Server;
use crate::telemetry::throttle::LogThrottle;

mod call;
mod shared;

use shared::Sharing;

pub use call::Checkout;

/// A server that has owed replies for 100 ms and sent none is silent, and its calls fail. One that answers late is busy.
const SILENT: Duration = Duration::from_millis(100);
/// The time from one probe of a node that is down to the next: 200 ms, give or take a quarter.
const PROBE_MS: u64 = 150;
const PROBE_SPREAD_MS: u64 = 100;
/// The time from one probe to the next of a server that is too far away for its callers: 200 ms.
const PROBE_FAR: Duration = Duration::from_millis(200);

/// One Redis server.
pub struct Node {
    name: String,
    /// Number in the order of creation.
    number: usize,
    lanes: Box<[Lane]>,
    locate: Locate,
    access: Access,
    clock: Arc<NodeClock>,
    round_trips: Arc<RoundTrips>,
    backoff: Arc<Backoff>,
    is_inspected: Arc<AtomicBool>,
    dialect: Arc<KnownDialect>,
    breaker: Breaker,
    silence: Silence,
    far_probes: LogThrottle,
    /// Wakes the task that sends probes.
    attention: Arc<Notify>,
    /// Lets one call at a time load the script.
    loading: Mutex<()>,
    loads: AtomicUsize,
    /// True if it wants the counters of a call in one slot, as a node of a cluster does.
    is_slotted: AtomicBool,
    lost: LogThrottle,
    busy: LogThrottle,
    metrics: Arc<Server>,
}

/// The connection and the concurrency limit of one thread. Its calls and replies never change threads, and calls of one moment share a
/// write.
struct Lane {
    pool: OnceLock<Pool<Manager>>,
    /// The connection of the pool while it is live. Nearly every call takes it from here, without waiting and without the pool.
    live: parking_lot::Mutex<Option<Connection>>,
    concurrency: Arc<Concurrency>,
    sharing: Arc<Sharing>,
}

/// Returns the number of the calling thread.
fn thread() -> usize {
    static THREADS: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static NUMBER: Cell<Option<usize>> = const { Cell::new(None) };
    }
    NUMBER.with(|own| {
        let number = own.get().unwrap_or_else(|| THREADS.fetch_add(1, Ordering::Relaxed));
        own.set(Some(number));
        number
    })
}

impl Lane {
    fn new() -> Self {
        Self {
            pool: OnceLock::new(),
            live: parking_lot::Mutex::default(),
            concurrency: Arc::new(Concurrency::new(Instant::now())),
            sharing: Arc::default(),
        }
    }
}

impl Node {
    /// Creates a node at `locate` with a connection for each of `lanes` threads. No connection is opened yet.
    pub fn new(locate: Locate, access: Access, lanes: usize, attention: Arc<Notify>) -> Self {
        let name = locate.server();
        let (metrics, breaker) = (access.metrics.named(&locate.to_string()), Breaker::default());
        metrics.watch_breaker(breaker.is_open());
        static NUMBERS: AtomicUsize = AtomicUsize::new(0);
        let lanes: Box<[Lane]> = std::iter::repeat_with(Lane::new).take(lanes.max(1)).collect();
        lanes.iter().for_each(|lane| metrics.watch_calls(lane.concurrency.metrics()));
        Self {
            name,
            number: NUMBERS.fetch_add(1, Ordering::Relaxed),
            lanes,
            locate,
            access,
            clock: Arc::default(),
            round_trips: Arc::default(),
            backoff: Arc::default(),
            is_inspected: Arc::default(),
            dialect: Arc::default(),
            breaker,
            silence: Silence::default(),
            far_probes: LogThrottle::every(PROBE_FAR),
            attention,
            loading: Mutex::new(()),
            loads: AtomicUsize::new(0),
            is_slotted: AtomicBool::new(false),
            lost: LogThrottle::new(),
            busy: LogThrottle::new(),
            metrics,
        }
    }

    /// Returns its name in logs: its address.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns its number: the permits of several nodes are taken in this order.
    pub const fn number(&self) -> usize {
        self.number
    }

    /// Returns its host and port, or its name if it has none.
    pub fn place(&self) -> (&str, Option<u16>) {
        self.locate.host_and_port().map_or((&self.name, None), |(host, port)| (host, Some(port)))
    }

    /// Returns the location of its server.
    pub const fn locate(&self) -> &Locate {
        &self.locate
    }

    /// Waits for the next failed attempt to connect, from the time of the call on.
    pub fn failure(&self) -> Notified<'_> {
        self.backoff.failure()
    }

    /// Returns its metrics.
    pub fn metrics(&self) -> &Server {
        &self.metrics
    }

    /// Returns a permit for a call that asks at `began`, runs `scripts` scripts and has to be answered before `until`.
    ///
    /// # Errors
    /// If it is down, is too far away, or has too many calls to answer one more in time.
    pub async fn permit(
        self: &Arc<Self>,
        began: Instant,
        scripts: usize,
        until: Instant,
        turn: CallPriority,
    ) -> Result<Permit, StoreError> {
        let budget = until.saturating_duration_since(began);
        // What is charged later has more time than any caller, and waits all the same until the breaker is closed.
        let timeout = if turn == CallPriority::Spare { Duration::ZERO } else { budget };
        if let Some(next_probe) = self.breaker.next_probe(timeout) {
            let wait = next_probe.saturating_duration_since(began);
            let retry = Micros::from(wait);
            return Err(StoreError::Down { retry });
        }
        if self.round_trip().is_some_and(|round_trip| round_trip > budget) {
            self.probe_far();
            return Err(StoreError::Overloaded);
        }
        if let Some(permit) = self.lane().concurrency.permit(began, scripts, until, turn).await {
            return Ok(permit);
        }
        if turn == CallPriority::Spare {
            return Err(StoreError::Overloaded);
        }
        let now = Instant::now();
        if self.is_silent(now) {
            self.failed(now.saturating_duration_since(began));
            return Err(StoreError::TimedOut);
        }
        self.complain_of_load();
        Err(StoreError::Overloaded)
    }

    /// Returns the number of scripts that this thread may add to those in flight.
    pub fn room(&self) -> usize {
        self.lane().concurrency.room()
    }

    /// Returns true if this thread has had room for every call in the last 100 ms.
    pub fn has_capacity_to_spare(&self) -> bool {
        self.lane().concurrency.has_capacity_to_spare()
    }

    /// Connects a call that asked at `asked` and has a permit.
    ///
    /// # Errors
    /// If there is no connection before `until`.
    pub async fn checkout(
        self: &Arc<Self>,
        permit: Permit,
        asked: Instant,
        until: Instant,
    ) -> Result<Checkout, StoreError> {
        let (connection, began) = match self.live_connection() {
            // Nothing was waited for, so the clock is not read again.
            Some(live) if permit.began() == asked => (Some(live), asked),
            Some(live) => (Some(live), Instant::now()),
            // Boxed, so that calls on a live connection do not carry it.
            None => (Box::pin(self.opened_connection(until)).await, Instant::now()),
        };
        match connection {
            Some(connection) => {
                let (node, permit) = (Arc::clone(self), Some(permit.used()));
                Ok(Checkout { node, connection, began, permit, pending: None })
            }
            None => {
                self.failed(until.saturating_duration_since(permit.began()));
                Err(StoreError::Unreachable)
            }
        }
    }

    /// Logs that calls are not sent, at most every ten seconds.
    fn complain_of_load(&self) {
        if self.busy.is_due() {
            let limit = self.lane().concurrency.metrics().limit.load(Ordering::Relaxed);
            tracing::warn!(
                event = "store.overloaded",
                server = self.name,
                limit,
                "Redis is too busy to answer all calls in time: it gets the calls that it can answer, and the overload policy answers the rest"
            );
        }
    }

    /// Measures the round trip to a server that is too far away to be called, every 200 ms.
    fn probe_far(self: &Arc<Self>) {
        if self.far_probes.is_due() {
            let node = Arc::clone(self);
            tokio::spawn(async move { node.is_there().await });
        }
    }

    /// Returns true if it owes replies and has sent none for 100 ms, or for three round trips if that is longer.
    fn is_silent(&self, now: Instant) -> bool {
        self.silence.lasts(now, self.silent_after())
    }

    fn silent_after(&self) -> Duration {
        self.round_trip().map_or(SILENT, |round_trip| SILENT.max(round_trip * 3))
    }

    fn lane(&self) -> &Lane {
        &self.lanes[thread() % self.lanes.len()]
    }

    /// Returns a live connection of this thread, and opens one if there is none; `None` if there is none before `until`.
    async fn connection(&self, until: Instant) -> Option<Connection> {
        if let Some(live) = self.live_connection() {
            return Some(live);
        }
        // Boxed, so that calls on a live connection do not carry it.
        Box::pin(self.opened_connection(until)).await
    }

    /// Returns the connection of this thread if it is live.
    fn live_connection(&self) -> Option<Connection> {
        let mut live = self.lane().live.lock();
        live.take_if(|connection| connection.is_broken());
        let connection = live.clone()?;
        drop(live);
        connection.authenticate_if_changed(&self.access.credentials);
        Some(connection)
    }

    /// Authenticates the live connections of all threads again, if the credentials have changed.
    pub fn authenticate_if_changed(&self) {
        let live = self.lanes.iter().filter_map(|lane| lane.live.lock().clone());
        live.for_each(|connection| connection.authenticate_if_changed(&self.access.credentials));
    }

    async fn opened_connection(&self, until: Instant) -> Option<Connection> {
        let lane = self.lane();
        let pool = lane.pool.get_or_init(|| self.pool());
        loop {
            // It is too early to connect again, so waiting is useless.
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
                *lane.live.lock() = Some(pooled.clone());
                return Some(pooled.clone());
            }
        }
    }

    fn pool(&self) -> Pool<Manager> {
        let (clock, backoff) = (Arc::clone(&self.clock), Arc::clone(&self.backoff));
        let (round_trips, is_inspected) = (Arc::clone(&self.round_trips), Arc::clone(&self.is_inspected));
        let (locate, access, dialect) = (self.locate.clone(), self.access.clone(), Arc::clone(&self.dialect));
        let manager = Manager::new(locate, access, clock, round_trips, backoff, is_inspected, dialect);
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

    /// Notes that a charge waited in vain for the time `waited`.
    fn failed(&self, waited: Duration) {
        if self.breaker.failed(Instant::now(), waited) {
            self.attention.notify_one();
        }
    }

    /// Returns true if it answers, as far as is known.
    pub fn is_well(&self) -> bool {
        self.breaker.is_trusted()
    }

    /// Forgets that it was down. Replies correct the other measurements.
    pub fn trust(&self) {
        self.breaker.forget();
    }

    /// Sends a probe to a node in doubt if one is due. The supervisor calls it every 20 ms.
    pub async fn probe(&self) {
        if !self.breaker.is_probe_due(Instant::now()) {
            return;
        }
        // A server that was paused reads the probe after all that was sent before.
        if self.is_there().await {
            if self.breaker.passed() {
                tracing::warn!(event = "store.breaker.closed", server = self.name, "Redis answers again");
            }
            return;
        }
        let next = Instant::now() + Duration::from_millis(PROBE_MS + chance(PROBE_SPREAD_MS));
        if self.breaker.missed(Instant::now(), next) {
            tracing::warn!(
                event = "store.breaker.opened",
                server = self.name,
                "Redis does not answer: the failure policy decides until Redis answers again"
            );
        }
    }

    /// Sends a PING, or through what may be a proxy a script that charges nothing, and returns whether it is answered within 100 ms. The
    /// answer measures the round trip: a node that has moved further away is given the time that it needs once that is known.
    async fn is_there(&self) -> bool {
        let Some(connection) = self.connection(Instant::now() + IN_TIME).await else { return false };
        let probe =
            if connection.dialect().is_together() { cmd("PING") } else { self.access.time(connection.dialect()) };
        let (mut asked, sent) = (connection.clone(), Instant::now());
        connection.silence().sent(sent);
        // An answer that has arrived counts even if this thread polls late.
        let is_there = match timeout_at(sent + IN_TIME, asked.send(&probe)).await {
            // These are answers of a Redis behind a proxy, or of the proxy, whose other servers may live.
            Ok(Ok(Value::ServerError(error)))
                if !matches!(error.code(), "NOSCRIPT" | "NOPERM" | "MOVED") && !is_of_proxy(&error) =>
            {
                false
            }
            Ok(Err(_)) => false,
            Ok(Ok(_)) => {
                let now = Instant::now();
                connection.answered(now);
                self.round_trips.add(now, now.duration_since(sent));
                true
            }
            Err(_) => {
                connection.timed_out();
                connection.give_up_if_silent(IN_TIME);
                false
            }
        };
        connection.silence().ended();
        is_there
    }

    /// Returns the smallest recent round trip, if one was measured.
    pub fn round_trip(&self) -> Option<Duration> {
        self.round_trips.least()
    }

    /// Sends commands that charge nothing on this thread's connection.
    pub async fn ask(&self, commands: Vec<Cmd>, until: Instant) -> Option<Vec<Value>> {
        self.ask_in(|_| commands, until).await
    }

    /// The same for commands that depend on what the connection has to do without.
    pub async fn ask_in(&self, commands: impl FnOnce(Dialect) -> Vec<Cmd>, until: Instant) -> Option<Vec<Value>> {
        let mut connection = self.connection(until).await?;
        let commands = commands(connection.dialect());
        let replies = timeout_at(until, connection.send_all(commands)).await.ok()?;
        if replies.is_err() {
            connection.give_up();
        }
        replies.ok()
    }

    /// Returns the number of times that the script was loaded because the server had lost it.
    pub fn loads(&self) -> usize {
        self.loads.load(Ordering::Acquire)
    }

    /// Returns true if calls may share a call of the script.
    pub fn may_share(&self) -> bool {
        !self.is_slotted.load(Ordering::Relaxed) && self.is_together()
    }

    /// Returns true if a script may have several keys, as far as is known: what answers is no proxy in front of several servers.
    pub fn is_together(&self) -> bool {
        self.dialect.is_together()
    }

    /// Notes what a connection has to do without.
    #[cfg(test)]
    pub fn speaks(&self, dialect: Dialect) {
        self.dialect.learn(dialect);
    }

    /// Returns true if `EVAL` loads the script.
    pub fn loads_by_eval(&self) -> bool {
        self.dialect.next().loads_by_eval()
    }

    /// Notes that it does not run shared calls, such as a node of a cluster that is named as a single server: calls go alone from now on.
    pub fn share_no_more(&self) {
        self.is_slotted.store(true, Ordering::Relaxed);
    }

    /// Runs `load`, which loads the script, unless another call has loaded it since `seen` loads, or no time is left.
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

#[cfg(test)]
mod tests;
