//! The process: starts the listeners, the stores, the rule loader and their tasks, and stops them.
//!
//! Only this module names the concrete types of all layers, spawns tasks and reads the clock and the environment.

use std::io::Write;
use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroUsize;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use tokio::net::TcpListener;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::Instant;

use self::intake::Intake;
use self::log::Log;
use self::read::Read;
use self::store::Stores;
use self::summary::Summary;
use self::traces::Exporting;
use crate::file;
use crate::limiter::Limiter;
use crate::model::{Clock, Micros};
use crate::rules::live::LiveRules;
use crate::settings::{BodyStyle, HeaderStyle, Settings};
use crate::source::RuleSource;
use crate::source::file::find::Location;
use crate::store::memory::Memory;
use crate::store::redis::Redis;
use crate::store::redis::announce::Announcer;
use crate::transport::budget::process::ProcessAccount;
use crate::transport::grpc::{Edge, Health, Services};
use crate::transport::json::Readiness;
use crate::transport::wire::{Answers, HeaderNames, Headers, RefusalBody};
use crate::transport::{
    self, ConnectionLimits, ConnectionSlots, Http1, Http2, Listener, Workers, admin, connection_cap, json,
    limits as bounds, raise_open_files, use_small_pages,
};

mod intake;
mod log;
mod metrics;
pub mod read;
mod store;
pub mod summary;
mod traces;

/// Interval between two sweeps of the memory store: 10 s. Each new counter also sweeps a little, so this matters only
/// for a store that gets no new counters.
const SWEEP_EVERY: Duration = Duration::from_secs(10);
/// Longest wait for the first connection to Redis, before the start reports its health without one: 500 ms. A reachable
/// Redis accepts within some milliseconds.
const FIRST_CONNECTION: Duration = Duration::from_millis(500);
/// Interval at which that wait checks for a connection: 5 ms.
const LOOK_EVERY: Duration = Duration::from_millis(5);
/// Interval at which health follows the connection to Redis, if the settings ask for that: 100 ms.
const FOLLOW_EVERY: Duration = Duration::from_millis(100);
/// Time for the worker threads to end after their connections are closed: 500 ms.
const WORKERS_END: Duration = Duration::from_millis(500);

/// Maximum number of connections of each of the HTTP, debug and metrics listeners: 128, or a quarter of all connections
/// if that is less.
const HTTP_CONNECTIONS: usize = 128;

/// Warning for response headers that Envoy can also build itself.
const SENT_TWICE: &str = "warning: RESPONSE_HEADERS=x-ratelimit sends headers that Envoy's own enable_x_ratelimit_headers builds from the statuses; with both, each client gets them twice: leave one off";

/// Returns the environment variable `name` if it is set and valid UTF-8.
pub fn environment(name: &str) -> Option<String> {
    #[expect(clippy::disallowed_methods, reason = "the one place that reads the environment")]
    std::env::var(name).ok()
}

/// Returns the location of the rule files in the reference's runtime directory.
pub fn runtime_location(settings: &Settings) -> Location {
    Location::Runtime {
        directory: [&settings.runtime_root, &settings.runtime_subdirectory].iter().collect(),
        app_directory: settings.runtime_appdirectory.clone(),
        is_root_watched: settings.runtime_watch_root,
        ignores_dot_files: settings.runtime_ignoredotfiles,
    }
}

/// Runs the service until a stop signal arrives.
///
/// # Errors
/// Returns the reason why the service cannot start.
pub fn serve(settings: &Settings, location: &Location) -> anyhow::Result<ExitCode> {
    use_small_pages();
    let log = Log::start(settings)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let code = runtime.block_on(async {
        let mut signals = Signals::new()?;
        let (given, location) = (settings.clone(), location.clone());
        let read = file::apart(
            move || Read::all(&given, location),
            |passed| {
                tracing::warn!(
                    event = "start.slow",
                    seconds = passed.as_secs(),
                    "still reading rule files and secrets: their file system may be stuck; the service starts after they are read"
                );
            },
        );
        let read = tokio::select! {
            read = read => read.context("reading the files has ended with a panic, which is a bug in this program")??,
            () = signals.wait() => {
                tracing::info!(target: log::TARGET, event = "stop.before_start", "stopped before all files were read");
                return Ok(ExitCode::SUCCESS);
            }
        };
        run(settings, &log, read, signals).await
    });
    // Do not wait for a read that is still blocked.
    runtime.shutdown_background();
    code
}

async fn run(settings: &Settings, log: &Log, read: Read, mut signals: Signals) -> anyhow::Result<ExitCode> {
    let Read { source, options, rules, files, redis, spans } = read;
    // The HTTP, debug and metrics listeners have connection slots of their own, so a flood of gRPC connections cannot
    // lock out the probes.
    let room = connection_cap(raise_open_files());
    let spare = HTTP_CONNECTIONS.min(room / 4);
    let apart = if settings.use_prometheus { 3 } else { 2 };
    let grpc_room = room - apart * spare;
    let (grpc_slots, http_slots) = (ConnectionSlots::new(grpc_room), || ConnectionSlots::new(spare));
    let memory_bytes = bounds::memory_bytes();
    let most_idle = match settings.grpc_max_idle_connections.0 {
        Some(connections) => bounds::below(connections, grpc_room),
        None => bounds::idle_connections(memory_bytes, grpc_room),
    };
    let limits = ConnectionLimits {
        age: unless_zero(settings.grpc_max_connection_age),
        grace: unless_zero(settings.grpc_max_connection_age_grace),
        drain: duration(settings.drain_timeout),
        ..ConnectionLimits::default()
    };
    let grpc = bind("GRPC_PORT", settings.grpc_host, settings.grpc_port).await?;
    let http = bind("PORT", settings.host, settings.port).await?;
    let debug = bind("DEBUG_PORT", settings.debug_host, settings.debug_port).await?;
    let prometheus = match settings.use_prometheus {
        true => Some(bind_at(settings.prometheus_addr.0, "PROMETHEUS_ADDR").await?),
        false => None,
    };
    let (grpc_at, http_at, debug_at) = (grpc.local_addr()?, http.local_addr()?, debug.local_addr()?);
    let prometheus_at = prometheus.as_ref().map(TcpListener::local_addr).transpose()?;

    let worker_count = worker_count(settings);
    // The workers and this thread, which supervises the servers, all call the store.
    let (traces, exporting) = spans.unzip();
    let telemetry = metrics::telemetry(settings, traces);
    metrics::queues(&telemetry, Arc::clone(&log.lines), exporting.as_ref().map(Exporting::dropped));
    let Stores { guard, memory, redis, replicas } =
        store::open(settings, redis, worker_count.get() + 1, &telemetry.servers());
    metrics::stores(&telemetry, &memory, redis.as_ref());
    let announcer = redis.clone().filter(|_| settings.replicas.0.is_none()).map(Announcer::new).map(Arc::new);
    let live = Arc::new(LiveRules::new(rules));
    metrics::rules_loaded(&telemetry, &live.snapshot(), live.snapshot().generation());
    let (tell, loaded) = watch::channel(admin::RulesStatus {
        since: Instant::now(),
        what: summary::counted(&live.snapshot(), files),
        rejected: None,
        slow_since: None,
    });
    metrics::slow_load(&telemetry, loaded.clone());
    let guard = Arc::new(guard);
    metrics::guard(&telemetry, &guard, &replicas);
    let limiter = Arc::new(Limiter::new(Arc::clone(&live), Arc::clone(&guard)));
    let answers = Arc::new(answers(settings)?);
    let edge = |most_held| Edge::new(Arc::clone(&limiter), Arc::clone(&answers), Arc::clone(&telemetry), most_held);
    let (grpc_edge, http_edge) = (edge(settings.max_held_calls), edge(spare / 4));
    metrics::held_calls(&telemetry, vec![Box::new(grpc_edge.held_calls()), Box::new(http_edge.held_calls())]);
    let (services, health) = Services::new(grpc_edge).await?;
    let readiness = Readiness::default();
    let workers = Workers::start(worker_count)?;

    let (stop, stopped) = watch::channel(false);
    let mut tallies = Vec::new();
    let mut listener = |name, socket, slots| {
        let listener = Listener::new(name, socket, slots, limits);
        tallies.push((name, listener.tally()));
        listener
    };
    let http1 = |routes| Http1::new(routes, &limits);
    let grpc = listener("gRPC", grpc, grpc_slots).with_most_idle(most_idle);
    let http = listener("HTTP", http, http_slots());
    let debug = listener("debug", debug, http_slots());
    let prometheus = prometheus.map(|socket| listener("metrics", socket, http_slots()));
    metrics::connections(&telemetry, tallies);
    let http_routes = json::routes(http_edge, readiness.clone(), settings.json_max_body.0);
    let debug_routes = admin::routes(Arc::clone(&limiter), loaded, log.level.clone(), debug_at.ip());
    let metrics_routes = transport::metrics::routes(&settings.prometheus_path.0, Arc::clone(&telemetry));
    let mut serving = JoinSet::new();
    let process = Arc::new(ProcessAccount::new(memory_bytes));
    let calls = Http2::new(services, &limits).counting(telemetry.limited_calls()).within(process);
    serving.spawn(grpc.serve(calls, workers.clone(), stopped.clone()));
    serving.spawn(http.serve(http1(http_routes), workers.clone(), stopped.clone()));
    serving.spawn(debug.serve(http1(debug_routes), Workers::here(), stopped.clone()));
    if let Some(prometheus) = prometheus {
        serving.spawn(prometheus.serve(http1(metrics_routes), Workers::here(), stopped));
    }
    let intake = Arc::new(Intake::new(options, live, tell, Arc::clone(&telemetry)));
    let sweeper = tokio::spawn(sweep(memory, Arc::clone(&intake)));
    let reloader = tokio::spawn(source.follow(intake));
    let health_state = HealthState { health, readiness };
    let follows = settings.redis_health_check_active_connection;
    let supervisor = redis.clone().map(|redis| tokio::spawn(async move { redis.supervise().await }));
    let announcing = announcer
        .clone()
        .map(|announcer| tokio::spawn(async move { announcer.announce(&replicas, &SystemClock).await }));
    let settler = tokio::spawn(async move { guard.settle().await });
    let is_connected = connected_at_first(redis.as_ref(), &workers).await;
    health_state.show(is_connected || !follows).await;
    let follower =
        redis.filter(|_| follows).map(|redis| tokio::spawn(follow(redis, health_state.clone(), is_connected)));
    let program = std::env::args().next().unwrap_or_else(|| "tidegate".to_owned());
    let summary = Summary {
        settings,
        rules: &limiter.rules(),
        program: &program,
        files,
        grpc: grpc_at,
        http: http_at,
        debug: debug_at,
        metrics: prometheus_at,
    };
    // Standard output may be closed; the service runs anyway.
    let _ = write!(std::io::stdout(), "{summary}");

    signals.wait().await;
    reloader.abort();
    follower.iter().chain(&announcing).for_each(JoinHandle::abort);
    if let Some(announcer) = announcer {
        announcer.leave().await;
    }
    health_state.show(false).await;
    tracing::info!(target: log::TARGET, event = "stop.begun", "stopping: {}; a second signal stops at once", stopping(settings));
    let drain = async {
        tokio::time::sleep(duration(settings.drain_delay)).await;
        stop.send_replace(true);
        while serving.join_next().await.is_some() {}
        workers.stop(WORKERS_END).await
    };
    tokio::select! {
        _ = drain => {}
        () = signals.wait() => tracing::info!(target: log::TARGET, event = "stop.forced", "stopped at once by a second signal"),
    }
    if let Some(exporting) = exporting {
        exporting.flush().await;
    }
    // Calls in flight still need the tasks that supervise the servers.
    [Some(sweeper), Some(settler), supervisor].iter().flatten().for_each(JoinHandle::abort);
    Ok(ExitCode::SUCCESS)
}

async fn bind(variable: &str, host: IpAddr, port: u16) -> anyhow::Result<TcpListener> {
    let variables = format!("{variable} or {}", variable.replace("PORT", "HOST"));
    bind_at(SocketAddr::new(host, port), &variables).await
}

async fn bind_at(address: SocketAddr, variables: &str) -> anyhow::Result<TcpListener> {
    let bound = TcpListener::bind(address).await;
    bound.with_context(|| format!("cannot listen on {address}: set {variables} to another"))
}

/// Returns the sentence about the drain, for the log line at the stop signal.
fn stopping(settings: &Settings) -> String {
    let delay = match settings.drain_delay {
        Micros::ZERO => String::new(),
        delay => format!("new calls are accepted for {delay} more, and health checks fail already; "),
    };
    format!("{delay}calls in flight have {} to finish", settings.drain_timeout)
}

/// The health check and the readiness probe: both report whether this instance accepts calls.
#[derive(Clone)]
struct HealthState {
    health: Health,
    readiness: Readiness,
}

impl HealthState {
    async fn show(&self, is_ready: bool) {
        self.readiness.set(is_ready);
        self.health.set_serving(is_ready).await;
    }
}

/// Waits at most 500 ms until Redis is connected from this thread and then from each worker, so that no first call pays
/// for connecting. Returns true once all are connected, or if there is no Redis.
async fn connected_at_first(redis: Option<&Redis>, workers: &Workers) -> bool {
    let Some(redis) = redis else { return true };
    let connect = || {
        let redis = redis.clone();
        async move { redis.connect(FIRST_CONNECTION).await }
    };
    let connected = async {
        while !redis.is_connected() {
            tokio::time::sleep(LOOK_EVERY).await;
        }
        workers.on_each(connect).await;
    };
    tokio::time::timeout(FIRST_CONNECTION, connected).await.is_ok()
}

/// Updates the health state when the connection to Redis is lost or comes back. `shown` is the state that they show now.
async fn follow(redis: Redis, health_state: HealthState, mut shown: bool) {
    let mut due = tokio::time::interval(FOLLOW_EVERY);
    loop {
        due.tick().await;
        let is_connected = redis.is_connected();
        if is_connected != shown {
            health_state.show(is_connected).await;
            shown = is_connected;
        }
    }
}

/// Drops forgotten counters and unused rules, every 10 s.
async fn sweep(store: Arc<Memory>, intake: Arc<Intake>) {
    let mut due = tokio::time::interval(SWEEP_EVERY);
    loop {
        due.tick().await;
        store.sweep();
        // A large rule set takes milliseconds to drop, so this thread does not.
        let intake = Arc::clone(&intake);
        tokio::task::spawn_blocking(move || intake.drop_unused());
    }
}

fn worker_count(settings: &Settings) -> NonZeroUsize {
    let cores = || std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
    settings.workers.0.and_then(NonZeroUsize::new).unwrap_or_else(cores)
}

fn answers(settings: &Settings) -> anyhow::Result<Answers> {
    let header = |name: &crate::settings::HeaderText| name.0.clone();
    let names = HeaderNames::new(
        header(&settings.limit_limit_header),
        header(&settings.limit_remaining_header),
        header(&settings.limit_reset_header),
    )?;
    let headers = match settings.response_headers {
        HeaderStyle::Unset if settings.limit_response_headers_enabled => Headers::Three(names),
        HeaderStyle::Unset => Headers::Off,
        HeaderStyle::Reference => Headers::Reference(names),
        HeaderStyle::XRateLimit => Headers::XRateLimit(Arc::new(SystemClock)),
        HeaderStyle::Ietf => Headers::Ietf,
    };
    let refusal_body = match settings.refusal_body {
        BodyStyle::Unset => RefusalBody::Own,
        BodyStyle::Json => RefusalBody::Json,
        BodyStyle::Text => RefusalBody::Text,
    };
    Ok(Answers {
        headers,
        refusal_body,
        dynamic_metadata: settings.response_dynamic_metadata,
        decision_metadata: settings.decision_metadata,
        explains: false,
    })
}

/// Converts a time limit. 0 means no limit, as in gRPC's own servers.
fn unless_zero(length: Micros) -> Duration {
    if length == Micros::ZERO { Duration::MAX } else { duration(length) }
}

fn duration(length: Micros) -> Duration {
    Duration::from_micros(length.get())
}

/// The system's wall clock.
struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> Micros {
        #[expect(clippy::disallowed_methods, reason = "the one clock of the process")]
        let now = std::time::SystemTime::now();
        let since_epoch = now.duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        Micros::new(u64::try_from(since_epoch.as_micros()).unwrap_or(u64::MAX))
    }
}

/// The stop signals: SIGTERM, SIGINT and, as in the reference, SIGHUP.
struct Signals([Signal; 3]);

impl Signals {
    fn new() -> std::io::Result<Self> {
        // Without a handler SIGUSR1 and SIGUSR2 would end the process. tokio's handler stays for the life of the process.
        for ignored in [SignalKind::user_defined1(), SignalKind::user_defined2()] {
            drop(signal(ignored)?);
        }
        Ok(Self([signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?, signal(SignalKind::hangup())?]))
    }

    async fn wait(&mut self) {
        let [terminate, interrupt, hangup] = &mut self.0;
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
            _ = hangup.recv() => {}
        }
    }
}
