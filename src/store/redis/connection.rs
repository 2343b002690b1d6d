//! One connection to a Redis server, shared by many concurrent calls.

use std::future::Future;
use std::io;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{Cmd, RedisError, RedisResult, Value, pipe};
use tokio::sync::Notify;
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep};

use super::backoff::Backoff;
use super::credentials::Credentials;
use super::dialect::Dialect;
use super::silence::Silence;
use super::stream::RejectedReply;
use crate::telemetry::throttle::LogThrottle;

/// Timeouts in a row after which a silent connection is replaced: 3. Nothing else reveals a path that drops packets before the
/// kernel gives up.
const MOST_TIMEOUTS: u32 = 3;
/// Factor for the silence of a connection with fewer timeouts: it is given up after 10 times the time after which a server counts
/// as silent.
const DEAD: u32 = 10;
/// Time after which a changed password that a server does not accept yet is tried again: 1 s, the interval at which its file is
/// read.
const AUTHENTICATE_AGAIN: Duration = Duration::from_secs(1);

/// A connection. Its clones share it.
#[derive(Clone)]
pub struct Connection {
    handle: MultiplexedConnection,
    _driver: Arc<Driver>,
    health: Arc<ConnectionHealth>,
    dialect: Dialect,
}

/// The task that reads and writes for a connection. Dropping it closes the connection.
pub struct Driver(AbortHandle);

/// Health state of a connection.
pub struct ConnectionHealth {
    is_broken: AtomicBool,
    /// True once the connection has been ready for calls.
    was_established: AtomicBool,
    /// The refused reply that ended the connection, if any.
    refused: OnceLock<RejectedReply>,
    timeouts: AtomicU32,
    /// Generation of the credentials of its last authentication.
    generation: AtomicU64,
    made: Instant,
    alive: Arc<AtomicUsize>,
    given_up: Notify,
    silence: Silence,
}

impl Driver {
    /// Spawns the task.
    pub fn new(task: impl Future<Output = ()> + Send + 'static) -> Self {
        Self(tokio::spawn(task).abort_handle())
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl ConnectionHealth {
    /// Creates the health state of a connection that is being made with credentials of `generation`. `alive` counts live
    /// connections.
    pub fn new(generation: u64, alive: Arc<AtomicUsize>) -> Self {
        Self {
            // True until it is established.
            is_broken: AtomicBool::new(true),
            was_established: AtomicBool::new(false),
            refused: OnceLock::new(),
            timeouts: AtomicU32::new(0),
            generation: generation.into(),
            made: Instant::now(),
            alive,
            given_up: Notify::new(),
            silence: Silence::default(),
        }
    }

    fn establish(&self) {
        self.was_established.store(true, Ordering::Release);
        if self.is_broken.swap(false, Ordering::AcqRel) {
            self.alive.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// Marks the connection for replacement.
    pub fn give_up(&self) {
        if !self.is_broken.swap(true, Ordering::AcqRel) {
            self.alive.fetch_sub(1, Ordering::AcqRel);
            self.given_up.notify_waiters();
        }
    }

    /// Marks the connection for replacement because of a refused reply. Returns true if it was ready for calls before.
    pub fn refuse(&self, refused: RejectedReply) -> bool {
        self.refused.get_or_init(|| refused);
        self.give_up();
        self.was_established.load(Ordering::Acquire)
    }

    fn answered(&self, now: Instant) {
        self.silence.replied(now);
        if self.timeouts.load(Ordering::Relaxed) > 0 {
            self.timeouts.store(0, Ordering::Relaxed);
        }
    }

    fn timed_out(&self) {
        self.timeouts.fetch_add(1, Ordering::Relaxed);
    }

    fn give_up_if_silent(&self, length: Duration) {
        let has_timed_out = self.timeouts.load(Ordering::Relaxed) >= MOST_TIMEOUTS;
        let length = if has_timed_out { length } else { length * DEAD };
        if self.silence.lasts(Instant::now(), length) {
            self.give_up();
        }
    }
}

impl Drop for ConnectionHealth {
    fn drop(&mut self) {
        self.give_up();
    }
}

impl Connection {
    /// Creates a connection from its handle, driver, health state and dialect.
    pub fn new(handle: MultiplexedConnection, driver: Driver, health: Arc<ConnectionHealth>, dialect: Dialect) -> Self {
        Self { handle, _driver: Arc::new(driver), health, dialect }
    }

    /// Returns what it has to do without.
    pub const fn dialect(&self) -> Dialect {
        self.dialect
    }

    /// Marks the connection as ready for calls in this dialect.
    pub fn establish(&mut self, dialect: Dialect) {
        self.dialect = dialect;
        self.health.establish();
    }

    /// Returns true if the connection is to be replaced.
    pub fn is_broken(&self) -> bool {
        self.health.is_broken.load(Ordering::Acquire)
    }

    /// Returns true if the connection ended because of a refused reply, which was reported then.
    pub fn is_refused(&self) -> bool {
        self.health.refused.get().is_some()
    }

    /// Marks the connection for replacement.
    pub fn give_up(&self) {
        self.health.give_up();
    }

    /// Waits until the connection is to be replaced.
    pub fn given_up(&self) -> impl Future<Output = ()> + Send + 'static {
        let health = Arc::clone(&self.health);
        async move {
            let given_up = health.given_up.notified();
            let mut given_up = pin!(given_up);
            given_up.as_mut().enable();
            if !health.is_broken.load(Ordering::Acquire) {
                given_up.await;
            }
        }
    }

    /// Returns true if the connection is so new that another would be no better.
    pub fn is_new(&self) -> bool {
        self.health.made.elapsed() < Backoff::LEAST
    }

    /// Notes that a call was answered at `now`.
    pub fn answered(&self, now: Instant) {
        self.health.answered(now);
    }

    /// Notes that a call was not answered in time.
    pub fn timed_out(&self) {
        self.health.timed_out();
    }

    /// Gives the connection up if at least 3 calls in a row have timed out and no reply, however late, has come for `length`.
    /// With only one or two calls in flight, fewer time out: then the silence must last ten times as long.
    pub fn give_up_if_silent(&self, length: Duration) {
        self.health.give_up_if_silent(length);
    }

    /// Returns the tracker of its outstanding replies.
    pub fn silence(&self) -> &Silence {
        &self.health.silence
    }

    /// Authenticates again if the credentials have changed. The command is sent in order with the others, so no call waits. Until
    /// the server accepts the new password, the connection keeps its present user.
    pub fn authenticate_if_changed(&self, credentials: &Arc<Credentials>) {
        let generation = credentials.generation();
        let ours = &self.health.generation;
        let known = ours.load(Ordering::Acquire);
        if known == generation || ours.compare_exchange(known, generation, Ordering::AcqRel, Ordering::Acquire).is_err()
        {
            return;
        }
        let (mut handle, health) = (self.handle.clone(), Arc::clone(&self.health));
        let (credentials, is_resp2) = (credentials.known(), self.dialect.is_resp2);
        tokio::spawn(async move {
            let Some(auth) = credentials.now.auth(is_resp2) else { return };
            let refusal = match handle.send_packed_command(&auth).await {
                Ok(Value::ServerError(refusal)) => refusal,
                Ok(_) => return credentials.accept(),
                Err(_) => return,
            };
            static THROTTLE: LogThrottle = LogThrottle::new();
            if THROTTLE.is_due() {
                tracing::warn!(
                    event = "store.password.rejected",
                    code = refusal.code(),
                    "Redis does not accept the changed password yet; open connections keep the old one"
                );
            }
            sleep(AUTHENTICATE_AGAIN).await;
            // A later call tries again.
            let _ = health.generation.compare_exchange(generation, known, Ordering::AcqRel, Ordering::Acquire);
        });
    }

    /// Sends one command and waits for its reply.
    ///
    /// # Errors
    /// If the connection fails. An error reply of the server is no error of the connection.
    pub async fn send(&mut self, command: &Cmd) -> RedisResult<Value> {
        self.handle.send_packed_command(command).await.map_err(|error| self.explained(error))
    }

    /// Returns true if `other` is a clone of it.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.health, &other.health)
    }

    /// Sends commands in one write and waits for the reply to each of them.
    ///
    /// # Errors
    /// The same as for [`Self::send`].
    pub async fn send_all(&mut self, commands: impl IntoIterator<Item = Cmd>) -> RedisResult<Vec<Value>> {
        let mut together = pipe();
        for command in commands {
            together.add_command(command);
        }
        let count = together.len();
        self.handle.send_packed_commands(&together, 0, count).await.map_err(|error| self.explained(error))
    }

    /// Returns the reason for which the connection ended; `error` if none is known. The Redis client passes the reason to one
    /// in-flight call at most.
    fn explained(&self, error: RedisError) -> RedisError {
        self.health.refused.get().map_or(error, |refused| io::Error::from(refused.clone()).into())
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;
    use crate::store::redis::replies::InvalidReply;

    /// Enough silence for a connection with three timeouts in a row.
    const SILENT: Duration = Duration::from_millis(100);

    fn established() -> ConnectionHealth {
        let health = ConnectionHealth::new(0, Arc::default());
        health.establish();
        health
    }

    fn is_given_up(health: &ConnectionHealth) -> bool {
        health.is_broken.load(Ordering::Acquire)
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_connection_is_given_up_after_three_timeouts_in_a_row_or_a_silence_ten_times_as_long() {
        let health = established();
        health.silence.sent(Instant::now());
        advance(SILENT).await;
        for timeouts in 1..=2 {
            health.timed_out();
            health.give_up_if_silent(SILENT);
            assert!(!is_given_up(&health), "{timeouts} timeouts");
        }
        // A reply in between, and the next call is not answered either.
        health.answered(Instant::now());
        health.timed_out();
        advance(SILENT).await;
        health.give_up_if_silent(SILENT);
        assert!(!is_given_up(&health), "one timeout after a reply");
        advance(SILENT * 9).await;
        health.give_up_if_silent(SILENT);
        assert!(is_given_up(&health), "a second of silence");

        let health = established();
        health.silence.sent(Instant::now());
        advance(SILENT).await;
        (0..3).for_each(|_| health.timed_out());
        health.give_up_if_silent(SILENT);
        assert!(is_given_up(&health), "three timeouts");
    }

    #[tokio::test]
    async fn a_refused_reply_ends_a_connection_and_is_reported_if_calls_used_it() {
        let refused = RejectedReply { server: "a:1".to_owned(), refusal: InvalidReply::Malformed };
        let being_made = ConnectionHealth::new(0, Arc::default());
        assert!(!being_made.refuse(refused.clone()), "the attempt to connect fails, which is reported");
        let in_use = established();
        assert!(in_use.refuse(refused) && is_given_up(&in_use));
    }
}
