//! One connection to a Redis server, shared by many calls at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{Cmd, RedisResult, Value, cmd, pipe};
use tokio::time::{Instant, sleep};

use super::backoff::{Backoff, Quiet};
use super::credentials::Credentials;

/// How many calls in a row may time out on a connection before it is replaced: 3. Nothing else tells of a path that
/// swallows packets before the kernel gives up.
const MOST_TIMEOUTS: u32 = 3;
/// How soon a changed password that a server does not know yet is tried again: 1 s, as often as its file is read.
const AUTHENTICATE_AGAIN: Duration = Duration::from_secs(1);

/// A connection, shared by as many calls as there are clones.
#[derive(Clone)]
pub struct Connection {
    handle: MultiplexedConnection,
    health: Arc<Health>,
}

/// What is known of a connection.
pub struct Health {
    is_broken: AtomicBool,
    timeouts: AtomicU32,
    /// The generation of the credentials it was last authenticated with.
    generation: AtomicU64,
    made: Instant,
    alive: Arc<AtomicUsize>,
}

impl Health {
    /// That of a connection that is being made with credentials of that generation.
    pub fn new(generation: u64, alive: Arc<AtomicUsize>) -> Self {
        Self {
            // Until it is established.
            is_broken: AtomicBool::new(true),
            timeouts: AtomicU32::new(0),
            generation: generation.into(),
            made: Instant::now(),
            alive,
        }
    }

    fn establish(&self) {
        if self.is_broken.swap(false, Ordering::AcqRel) {
            self.alive.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// The connection is to be replaced.
    pub fn give_up(&self) {
        if !self.is_broken.swap(true, Ordering::AcqRel) {
            self.alive.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

impl Drop for Health {
    fn drop(&mut self) {
        self.give_up();
    }
}

impl Connection {
    /// A connection of this handle and health.
    pub const fn new(handle: MultiplexedConnection, health: Arc<Health>) -> Self {
        Self { handle, health }
    }

    /// It is ready for calls.
    pub fn establish(&self) {
        self.health.establish();
    }

    /// Whether it is to be replaced.
    pub fn is_broken(&self) -> bool {
        self.health.is_broken.load(Ordering::Acquire)
    }

    /// It is to be replaced.
    pub fn give_up(&self) {
        self.health.give_up();
    }

    /// Whether it was made so lately that another would be no better.
    pub fn is_new(&self) -> bool {
        self.health.made.elapsed() < Backoff::LEAST
    }

    /// Notes that a call was answered.
    pub fn answered(&self) {
        if self.health.timeouts.load(Ordering::Relaxed) > 0 {
            self.health.timeouts.store(0, Ordering::Relaxed);
        }
    }

    /// Notes that a call was not answered in time.
    pub fn timed_out(&self) {
        if self.health.timeouts.fetch_add(1, Ordering::Relaxed) + 1 >= MOST_TIMEOUTS {
            self.give_up();
        }
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
        self.handle.send_packed_command(command).await
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
        self.handle.send_packed_commands(&together, 0, count).await
    }
}
