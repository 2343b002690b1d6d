//! One connection to a Redis server, shared by many calls at once.

use std::future::Future;
use std::io;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{Cmd, RedisError, RedisResult, Value, cmd, pipe};
use tokio::sync::Notify;
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep};

use super::backoff::{Backoff, Quiet};
use super::credentials::Credentials;
use super::silence::Silence;
use super::stream::Refused;

/// How many calls in a row time out on a silent connection before it is replaced: 3. Nothing else tells of a path that
/// swallows packets before the kernel gives up.
const MOST_TIMEOUTS: u32 = 3;
/// The factor for the silence of a connection on which fewer calls time out: it is given up after 10 times the time after which a
/// server counts as silent.
const DEAD: u32 = 10;
/// How soon a changed password that a server does not know yet is tried again: 1 s, as often as its file is read.
const AUTHENTICATE_AGAIN: Duration = Duration::from_secs(1);

/// A connection, shared by as many calls as there are clones.
#[derive(Clone)]
pub struct Connection {
    handle: MultiplexedConnection,
    _driver: Arc<Driver>,
    health: Arc<Health>,
}

/// The task that reads and writes for a connection; dropped, it closes the connection.
pub struct Driver(AbortHandle);

/// What is known of a connection.
pub struct Health {
    is_broken: AtomicBool,
    /// Whether it was ready for calls at any time.
    was_established: AtomicBool,
    /// The reply that ended it, if one was refused.
    refused: OnceLock<Refused>,
    timeouts: AtomicU32,
    /// The generation of the credentials it was last authenticated with.
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

impl Health {
    /// That of a connection that is being made with credentials of that generation.
    pub fn new(generation: u64, alive: Arc<AtomicUsize>) -> Self {
        Self {
            // Until it is established.
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

    /// The connection is to be replaced.
    pub fn give_up(&self) {
        if !self.is_broken.swap(true, Ordering::AcqRel) {
            self.alive.fetch_sub(1, Ordering::AcqRel);
            self.given_up.notify_waiters();
        }
    }

    /// The connection ends because of a reply that was refused. Returns whether it was ready for calls before.
    pub fn refuse(&self, refused: Refused) -> bool {
        self.refused.get_or_init(|| refused);
        self.give_up();
        self.was_established.load(Ordering::Acquire)
    }
}

impl Drop for Health {
    fn drop(&mut self) {
        self.give_up();
    }
}

impl Connection {
    /// A connection of this handle, driver and health.
    pub fn new(handle: MultiplexedConnection, driver: Driver, health: Arc<Health>) -> Self {
        Self { handle, _driver: Arc::new(driver), health }
    }

    /// It is ready for calls.
    pub fn establish(&self) {
        self.health.establish();
    }

    /// Whether it is to be replaced.
    pub fn is_broken(&self) -> bool {
        self.health.is_broken.load(Ordering::Acquire)
    }

    /// Whether it ended because of a reply that was refused, which was logged then.
    pub fn is_refused(&self) -> bool {
        self.health.refused.get().is_some()
    }

    /// It is to be replaced.
    pub fn give_up(&self) {
        self.health.give_up();
    }

    /// Waits until it is to be replaced.
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

    /// Whether it was made so lately that another would be no better.
    pub fn is_new(&self) -> bool {
        self.health.made.elapsed() < Backoff::LEAST
    }

    /// Notes that a call was answered.
    pub fn answered(&self, now: Instant) {
        self.health.silence.replied(now);
        if self.health.timeouts.load(Ordering::Relaxed) > 0 {
            self.health.timeouts.store(0, Ordering::Relaxed);
        }
    }

    /// Notes that a call was not answered in time.
    pub fn timed_out(&self) {
        self.health.timeouts.fetch_add(1, Ordering::Relaxed);
    }

    /// Gives the connection up if calls in a row have timed out on it and no reply has come for `length`, of any age. Where there may
    /// be only one or two calls in flight, not as many time out: then the silence has to last ten times as long.
    pub fn give_up_if_silent(&self, length: Duration) {
        let has_timed_out = self.health.timeouts.load(Ordering::Relaxed) >= MOST_TIMEOUTS;
        let length = if has_timed_out { length } else { length * DEAD };
        if self.health.silence.lasts(Instant::now(), length) {
            self.give_up();
        }
    }

    /// Returns what it owes.
    pub fn silence(&self) -> &Silence {
        &self.health.silence
    }

    /// Authenticates anew when the credentials have changed since it did: in the order of its commands, so that no call waits.
    /// Until the server knows the new password, the connection stays who it was.
    pub fn authenticate_if_changed(&self, credentials: &Arc<Credentials>) {
        let generation = credentials.generation();
        let ours = &self.health.generation;
        let known = ours.load(Ordering::Acquire);
        if known == generation || ours.compare_exchange(known, generation, Ordering::AcqRel, Ordering::Acquire).is_err()
        {
            return;
        }
        let (mut handle, health) = (self.handle.clone(), Arc::clone(&self.health));
        let login = credentials.known().now.clone();
        tokio::spawn(async move {
            let Some(password) = login.password else { return };
            let mut auth = cmd("AUTH");
            if let Some(user) = login.user {
                auth.arg(user);
            }
            auth.arg(password);
            let Ok(Value::ServerError(refusal)) = handle.send_packed_command(&auth).await else { return };
            static QUIET: Quiet = Quiet::new();
            if QUIET.is_over() {
                tracing::warn!(
                    code = refusal.code(),
                    "Redis does not take the changed password yet; live connections stay who they were"
                );
            }
            sleep(AUTHENTICATE_AGAIN).await;
            // Another call tries again.
            let _ = health.generation.compare_exchange(generation, known, Ordering::AcqRel, Ordering::Acquire);
        });
    }

    /// Sends one command and waits for its reply.
    ///
    /// # Errors
    /// What befell the connection. What the server says is no error of the connection.
    pub async fn send(&mut self, command: &Cmd) -> RedisResult<Value> {
        self.handle.send_packed_command(command).await.map_err(|error| self.explained(error))
    }

    /// Sends commands in one write and waits for the reply to each of them.
    ///
    /// # Errors
    /// As [`Self::send`].
    pub async fn send_all(&mut self, commands: impl IntoIterator<Item = Cmd>) -> RedisResult<Vec<Value>> {
        let mut together = pipe();
        for command in commands {
            together.add_command(command);
        }
        let count = together.len();
        self.handle.send_packed_commands(&together, 0, count).await.map_err(|error| self.explained(error))
    }

    /// The reason for which the connection ended. Redis' client gives it to one of the calls in flight at most.
    fn explained(&self, error: RedisError) -> RedisError {
        self.health.refused.get().map_or(error, |refused| io::Error::from(refused.clone()).into())
    }
}
