//! Finds a Redis server, connects to it and prepares the connection.

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use bb8_redis::bb8::ManageConnection;
use redis::aio::MultiplexedConnection;
use redis::{
    AsyncConnectionConfig, Cmd, ErrorKind, ProtocolVersion, RedisConnectionInfo, RedisError, RedisResult, Value, cmd,
    pipe,
};
use tokio::time::{Instant, timeout};

use super::address::Address;
use super::advice;
use super::backoff::Backoff;
use super::clock::NodeClock;
use super::connection::{Connection, ConnectionHealth, Driver};
use super::credentials::Credentials;
use super::dialect::{Dialect, KnownDialect, is_of_proxy, is_unknown, refuses_resp3};
use super::hidden::hidden;
use super::login::Login;
use super::round_trip::RoundTrips;
use super::script::{self, Requests};
use super::stream::{self, Guarded, Network, RejectedReply};
use crate::dial::tls::Tls;
use crate::telemetry::servers::{Server, ServerMetrics};

/// Capacity of the queue to the connection's writer: 1,024 calls. The client's default of 50 makes callers wait for no reason.
const QUEUE: usize = 1_024;
/// Number of keys by which a proxy finds a server for a script that charges nothing, each time by the next: 64, so that no server behind it is
/// the only one that is asked. Nothing is stored there.
const PROBE_KEYS: usize = 64;
/// The most servers behind a proxy that are asked for the time when a connection is made: 4.
const MOST_ASKED: usize = 4;

/// Location of the server that a connection is made to.
#[derive(Clone)]
pub enum Locate {
    /// A known address.
    At(Address),
    /// A server that can move.
    Followed {
        /// The server.
        of: Followed,
        /// Its present place; `None` until that is known.
        place: Option<Place>,
    },
}

/// A server that can move to another address.
#[derive(Clone)]
pub enum Followed {
    /// The server at this name.
    Name(Address),
    /// A master that sentinels name.
    Master {
        /// Its name.
        name: String,
        /// The sentinels.
        sentinels: Vec<Address>,
        /// Login for the sentinels.
        login: Login,
    },
}

/// Present place of a server that can move.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The address as configured, or as the sentinels name it.
    pub address: Address,
    /// The only one of its addresses in use.
    pub at: SocketAddr,
}

/// Settings and state that all connections of one Redis share.
#[derive(Clone)]
pub struct Access {
    /// User and password.
    pub credentials: Arc<Credentials>,
    /// Age of a connection before which it authenticates again; `None` if the server sets none.
    pub max_age: Option<Duration>,
    /// The TLS settings; `None` for plaintext.
    pub tls: Option<Arc<Tls>>,
    /// Number of the database.
    pub db: i64,
    /// Text in front of the name of every counter.
    pub prefix: Arc<[u8]>,
    /// Timeout for connecting.
    pub connect_timeout: Duration,
    /// Number of live connections.
    pub alive: Arc<AtomicUsize>,
    /// Metrics of the servers.
    pub metrics: Arc<ServerMetrics>,
    /// The network by which they are reached.
    pub network: Arc<dyn Network>,
}

/// Makes connections to one node.
pub struct Manager {
    locate: Locate,
    access: Access,
    clock: Arc<NodeClock>,
    round_trips: Arc<RoundTrips>,
    backoff: Arc<Backoff>,
    /// True once a connection has inspected the node.
    is_inspected: Arc<AtomicBool>,
    dialect: Arc<KnownDialect>,
    metrics: Arc<Server>,
}

impl Access {
    /// Returns the command of a script that charges nothing and is answered with the time.
    pub fn time(&self, dialect: Dialect) -> Cmd {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let number = || NEXT.fetch_add(1, Ordering::Relaxed) % PROBE_KEYS;
        let key =
            (!dialect.is_together()).then(|| [&self.prefix, format!("{{probe{}}}", number()).as_bytes()].concat());
        Requests::time(key.as_deref()).command(dialect.by())
    }

    /// Connects and authenticates: in RESP3, or in RESP2 if the server does not know that or `dialect` says so. Calls `report` if a
    /// refused reply ends the connection, and `ended` when it has ended.
    ///
    /// # Errors
    /// If the server does not accept the connection or the login.
    pub async fn handshake(
        &self,
        (address, at): (&Address, Option<SocketAddr>),
        login: &Login,
        db: i64,
        mut dialect: Dialect,
        report: impl Fn(&RejectedReply) + Send + 'static,
        ended: impl FnOnce() + Send + 'static,
    ) -> RedisResult<(MultiplexedConnection, Driver, Dialect)> {
        // The client greets nobody itself: it would close the connection where HELLO is refused, and drop the reason where AUTH is.
        let settings = RedisConnectionInfo::default().set_protocol(ProtocolVersion::RESP2).set_skip_set_lib_name();
        // Every call has a deadline of its own.
        let config = AsyncConnectionConfig::new().set_response_timeout(None).set_pipeline_buffer_size(QUEUE);
        let socket = self.network.connect(address, at, self.tls.as_deref()).await?;
        let guarded = Guarded::new(socket, address, report);
        let failure = guarded.failure();
        let explained = |error: RedisError| failure.get().map_or(error, |failure| stream::again(failure).into());
        let (mut handle, task) = MultiplexedConnection::new_with_config(&settings, guarded, config).await?;
        let driver = Driver::new(async move {
            task.await;
            ended();
        });
        let select = (db != 0).then(|| {
            let mut select = cmd("SELECT");
            select.arg(db);
            select
        });
        if !dialect.is_resp2 {
            let hello = std::iter::once(login.hello()).chain(select.clone());
            let replies = greet(&mut handle, hello).await.map_err(explained)?;
            dialect.is_resp2 = replies.first().is_some_and(refuses_resp3);
            if !dialect.is_resp2 {
                accepted(replies.into_iter())?;
            }
        }
        if dialect.is_resp2 {
            // Who is not let in must know before the script is sent: Redis closes the connection of a stranger who sends so much.
            let auth = login.auth(true).unwrap_or_else(|| cmd("PING"));
            let replies = greet(&mut handle, std::iter::once(auth).chain(select)).await.map_err(explained)?;
            let is_stranger = |reply: &Value| matches!(reply, Value::ServerError(error) if error.code() == "NOAUTH");
            // Nobody needs PING otherwise.
            let needed = login.password.is_some() || replies.first().is_some_and(is_stranger);
            accepted(replies.into_iter().skip(usize::from(!needed)))?;
        }
        Ok((handle, driver, dialect))
    }
}

impl Manager {
    /// Creates a manager of the connections to the node at `locate`. It adds samples to `clock` and `round_trips`.
    pub fn new(
        locate: Locate,
        access: Access,
        clock: Arc<NodeClock>,
        round_trips: Arc<RoundTrips>,
        backoff: Arc<Backoff>,
        is_inspected: Arc<AtomicBool>,
        dialect: Arc<KnownDialect>,
    ) -> Self {
        let metrics = access.metrics.named(&locate.to_string());
        Self { locate, access, clock, round_trips, backoff, is_inspected, dialect, metrics }
    }

    async fn open(&self) -> RedisResult<Connection> {
        let (address, at) = match &self.locate {
            Locate::At(address) => (address, None),
            Locate::Followed { place: Some(place), .. } => (&place.address, Some(place.at)),
            Locate::Followed { place: None, .. } => {
                return Err((ErrorKind::Io, "the address of the server is not known yet").into());
            }
        };
        // Read first: then the login is at least as new.
        let generation = self.access.credentials.generation();
        let known = self.access.credentials.known();
        let first = self.connect_to(address, at, &known.now, generation).await.inspect(|_| known.accept());
        let connection = match (first, &known.before) {
            // The server may not know the new password yet.
            (Err(error), Some(before)) if is_wrong_password(&error) => {
                self.connect_to(address, at, before, generation.wrapping_sub(1)).await?
            }
            (first, _) => first?,
        };
        self.prepare(connection).await
    }

    async fn connect_to(
        &self,
        address: &Address,
        at: Option<SocketAddr>,
        login: &Login,
        generation: u64,
    ) -> RedisResult<Connection> {
        let health = Arc::new(ConnectionHealth::new(generation, Arc::clone(&self.access.alive)));
        let report = self.report(Arc::downgrade(&health));
        let (watcher, known) = (Arc::downgrade(&health), Arc::clone(&self.dialect));
        let ended = move || {
            if let Some(health) = watcher.upgrade() {
                known.forget();
                health.give_up();
            }
        };
        let (dialect, db) = (self.dialect.next(), self.access.db);
        let (handle, driver, dialect) = self.access.handshake((address, at), login, db, dialect, report, ended).await?;
        Ok(Connection::new(handle, driver, health, dialect))
    }

    /// Returns a function that counts a refused reply. For a connection in use it also starts the backoff and logs the reply. A
    /// failure while connecting is logged as such.
    fn report(&self, health: Weak<ConnectionHealth>) -> impl Fn(&RejectedReply) + Send + use<> {
        let (metrics, backoff) = (Arc::clone(&self.metrics), Arc::clone(&self.backoff));
        move |refused| {
            let RejectedReply { server, refusal } = refused;
            metrics.bad_reply(refusal.reason());
            let was_ready = health.upgrade().is_some_and(|health| health.refuse(refused.clone()));
            if was_ready {
                backoff.failed();
                if backoff.refused.is_due() {
                    tracing::warn!(event = "store.connection.closed", %server, sent = %refusal, "closed a connection to Redis, because the server sent an invalid reply");
                }
            }
        }
    }

    /// Loads the script and learns the node's time, so that the first charge is as fast as any. Checks that a master named by
    /// sentinels is one, and inspects the node once.
    async fn prepare(&self, mut connection: Connection) -> RedisResult<Connection> {
        let mut sent = Instant::now();
        let mut dialect = connection.dialect();
        let mut commands = Vec::new();
        if !dialect.loads_by_eval() {
            commands.push(script::load());
        }
        commands.push(self.access.time(dialect));
        let asked = commands.len();
        let is_named = matches!(self.locate, Locate::Followed { of: Followed::Master { .. }, .. });
        if is_named {
            commands.push(cmd("ROLE"));
        }
        if !self.is_inspected.load(Ordering::Acquire) {
            commands.extend(advice::questions());
        }
        let replies = connection.send_all(commands).await?;
        let (about_script, rest) = replies.split_at_checked(asked).unwrap_or_default();
        let (role, about) = rest.split_at_checked(usize::from(is_named)).unwrap_or_default();
        let mut time = about_script.last().and_then(script::time_of);
        dialect.lacks_evalsha |= about_script.last().is_some_and(is_unknown);
        if let [loaded, _] = about_script {
            dialect.lacks_script = is_unknown(loaded);
            if let Value::ServerError(error) = loaded
                && !dialect.lacks_script
            {
                return Err(error.clone().into());
            }
        }
        if time.is_none() && dialect.loads_by_eval() {
            let text = Dialect { lacks_evalsha: true, ..dialect };
            for _ in 0..MOST_ASKED {
                sent = Instant::now();
                let run = connection.send(&self.access.time(text)).await?;
                time = script::time_of(&run);
                match &run {
                    Value::ServerError(error) if is_unknown(&run) || error.code() == "NOPERM" => {
                        return Err(error.clone().into());
                    }
                    // Another key may be at a server that lives.
                    Value::ServerError(error) if is_of_proxy(error) => {}
                    _ => break,
                }
            }
        }
        if let [Value::Array(role)] = role
            && role.first().is_some_and(|role| !matches!(role, Value::BulkString(role) if role == b"master"))
        {
            return Err((ErrorKind::MasterNameNotFoundBySentinel, "the sentinels' master is none yet").into());
        }
        if !about.is_empty() && !self.is_inspected.swap(true, Ordering::AcqRel) {
            advice::warn(about, &self.locate);
        }
        if let Some(time) = time {
            let now = Instant::now();
            self.clock.learn(sent, now, time);
            self.round_trips.add(now, now.duration_since(sent));
        }
        if self.dialect.learn(dialect) && dialect != Dialect::default() {
            tracing::warn!(event = "store.dialect", server = %self.locate, missing = %dialect, "this Redis, or a proxy in front of it, has not all commands that Tidegate uses: it does without them");
        }
        connection.establish(dialect);
        Ok(connection)
    }

    /// Returns the text of `error` without the passwords that the server may have repeated.
    fn without_passwords(&self, error: &RedisError) -> String {
        hidden(&error.to_string(), self.access.credentials.known().passwords())
    }
}

/// Logs that no connection to `server` could be made. `auth` is the setting with its login.
pub fn report_failure(server: &str, error: &str, auth: &str) {
    let advice = match ["WRONGPASS", "NOAUTH"].iter().any(|code| error.contains(code)) {
        true => {
            let per_second = auth.replace("REDIS_", "REDIS_PERSECOND_");
            format!(
                ": check {auth} (for limits per second {per_second}), where what precedes the first colon is the user"
            )
        }
        false => String::new(),
    };
    tracing::warn!(event = "store.connection.failed", %error, server, "cannot connect to Redis{advice}");
}

/// Sends commands in one write and returns their replies.
async fn greet(handle: &mut MultiplexedConnection, commands: impl Iterator<Item = Cmd>) -> RedisResult<Vec<Value>> {
    let mut together = pipe();
    for command in commands {
        together.add_command(command);
    }
    let count = together.len();
    handle.send_packed_commands(&together, 0, count).await
}

/// Returns the first error of the server in `replies`.
fn accepted(mut replies: impl Iterator<Item = Value>) -> RedisResult<()> {
    replies.try_for_each(|reply| reply.extract_error().map(drop))
}

/// Returns true if the server refuses a password. Redis before 6 and proxies have no code for it.
fn is_wrong_password(error: &RedisError) -> bool {
    error.code() == Some("WRONGPASS") || error.detail().is_some_and(|said| said.contains("invalid password"))
}

impl ManageConnection for Manager {
    type Connection = Connection;
    type Error = RedisError;

    async fn connect(&self) -> RedisResult<Connection> {
        if self.backoff.until().is_some() {
            return Err((ErrorKind::Io, "it is too early to connect again").into());
        }
        // It has a bound of its own.
        self.access.credentials.refresh().await;
        let opened = match timeout(self.access.connect_timeout, self.open()).await {
            Ok(opened) => opened,
            Err(_) => Err(io::Error::from(io::ErrorKind::TimedOut).into()),
        };
        match opened {
            Ok(connection) => {
                self.backoff.clear();
                Ok(connection)
            }
            Err(error) => {
                self.dialect.forget();
                self.backoff.failed();
                // What follows a server reports that its place is not known.
                let is_known = !matches!(self.locate, Locate::Followed { place: None, .. });
                if is_known && self.backoff.failed.is_due() {
                    report_failure(&self.locate.server(), &self.without_passwords(&error), "REDIS_AUTH");
                }
                Err(error)
            }
        }
    }

    async fn is_valid(&self, connection: &mut Connection) -> RedisResult<()> {
        connection.send(&cmd("PING")).await.map(drop)
    }

    fn has_broken(&self, connection: &mut Connection) -> bool {
        connection.is_broken()
    }
}

impl Locate {
    /// Returns the location of a single server: one at a name can move.
    pub fn single(address: Address) -> Self {
        match &address {
            Address::Tcp(host, _) if host.parse::<IpAddr>().is_err() => {
                Self::Followed { of: Followed::Name(address), place: None }
            }
            Address::Tcp(..) | Address::Unix(_) => Self::At(address),
        }
    }

    /// Returns the server as logs name it.
    pub fn server(&self) -> String {
        match self {
            Self::Followed { of: Followed::Master { name, .. }, place: Some(place) } => {
                format!("master {} ({name})", place.address)
            }
            Self::At(_) | Self::Followed { .. } => self.to_string(),
        }
    }

    /// Returns its host and port, if it has them.
    pub fn host_and_port(&self) -> Option<(&str, u16)> {
        match self {
            Self::At(Address::Tcp(host, port))
            | Self::Followed { of: Followed::Name(Address::Tcp(host, port)), .. }
            | Self::Followed { place: Some(Place { address: Address::Tcp(host, port), .. }), .. } => {
                Some((host, *port))
            }
            Self::At(Address::Unix(_)) | Self::Followed { .. } => None,
        }
    }
}

/// Name in metrics: the same wherever a server moves.
impl fmt::Display for Locate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::At(address) | Self::Followed { of: Followed::Name(address), .. } => address.fmt(f),
            Self::Followed { of: Followed::Master { name, .. }, .. } => write!(f, "sentinels' {name}"),
        }
    }
}
