//! The life of the service: build, serve, shut down.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::Instant;

use super::admin_tokens::TokenFile;
use super::callers::CallersFile;
use super::health::{Conditions, HealthState, connected_at_first, report_unreached};
use super::intake::Intake;
use super::listener_tls::{ListenerFiles, Tls};
use super::log::{self, Log};
use super::otlp::{Exporter, Otlp};
use super::overlay::OverlayIntake;
use super::read::Read;
use super::signals::Signals;
use super::sockets::{Addresses, Sockets};
use super::statsd::Statsd;
use super::store::{self, RedisFiles, Stores};
use super::traces::Exporting;
use super::{SystemClock, answers, duration, metrics, summary, unless_zero, worker_count};
use crate::admin::RulesStatus;
use crate::edge::callers::CallerGate;
use crate::edge::grpc::{Edge, Services};
use crate::edge::json::{self, HttpService, Readiness};
use crate::edge::pages::PageGate;
use crate::limiter::Limiter;
use crate::model::{Micros, Rights};
use crate::rules::live::{LiveRules, Snapshot};
use crate::serve::memory::process::ProcessAccount;
use crate::serve::{ConnectionLimits, Drained, Http1, Http2, Listener, NetListener, Workers, limits as bounds};
use crate::settings::{JsonAccess, ListenerTlsSettings, Settings, StoreChoice};
use crate::source::file::FileSource;
use crate::source::xds::status::XdsStatus;
use crate::source::{RuleSource, Source};
use crate::store::guard::Guard;
use crate::store::memory::Memory;
use crate::store::redis::Redis;
use crate::store::redis::announce::Announcer;
use crate::store::replicas::Replicas;
use crate::telemetry::Telemetry;
use crate::telemetry::records::Records;

mod debug;

/// Interval between two sweeps of the memory store: 10 s. Each new counter also sweeps a little, so this matters only
/// for a store that gets no new counters.
const SWEEP_EVERY: Duration = Duration::from_secs(10);
/// Time for the worker threads to end after their connections are closed: 500 ms.
const WORKERS_END: Duration = Duration::from_millis(500);

/// Everything that decides, before a listener serves it.
pub(super) struct Service {
    /// Source of later rules, until it is followed.
    source: Option<Source>,
    /// Task that follows the source.
    following: Option<JoinHandle<()>>,
    /// Source of later overlays, if one is set.
    overlay: Option<FileSource>,
    intake: Arc<Intake>,
    /// State of the rules for the debug page.
    status: watch::Receiver<RulesStatus>,
    live: Arc<LiveRules>,
    /// State of the stream to the control plane, if that is the source.
    xds: Option<Arc<XdsStatus>>,
    limiter: Arc<Limiter>,
    guard: Arc<Guard>,
    memory: Arc<Memory>,
    redis: Option<Redis>,
    replicas: Arc<Replicas>,
    telemetry: Arc<Telemetry>,
    exporting: Option<Exporting>,
    /// Exporter of metrics, until it is started.
    exporter: Option<Exporter>,
    /// Files of the gRPC listener's TLS, if it serves TLS.
    listener_tls: Option<ListenerFiles>,
    /// File of callers, if one is set.
    callers: Option<CallersFile>,
    /// File of the tokens of the debug listener, if one is set.
    admin_tokens: Option<TokenFile>,
    /// True if the rule files are in the reference's directory.
    has_rules_of_reference: bool,
    workers: NonZeroUsize,
}

/// The service with its listeners and tasks.
pub(super) struct Running {
    addresses: Addresses,
    limiter: Arc<Limiter>,
    guard: Arc<Guard>,
    health: HealthState,
    /// Listeners.
    serving: JoinSet<Drained>,
    workers: Workers,
    stop: watch::Sender<bool>,
    announcer: Option<Arc<Announcer>>,
    exporting: Option<Exporting>,
    statsd: Option<Statsd>,
    otlp: Option<Otlp>,
    /// Tasks that end with the stop signal.
    tasks: Vec<JoinHandle<()>>,
    /// Tasks that calls in flight still need.
    store_tasks: Vec<JoinHandle<()>>,
}

/// Time in which leases are given back at a stop: 1 s.
const LEASES_END: Duration = Duration::from_secs(1);

impl Service {
    /// Connects rules, stores and telemetry.
    pub(super) fn build(settings: &Settings, log: &Log, read: Read) -> Self {
        let Read {
            source,
            options,
            rules,
            overlay,
            inputs,
            overlay_state,
            redis,
            listener_tls,
            callers,
            admin_tokens,
            has_rules_of_reference,
            spans,
            metrics: exporter,
        } = read;
        let overlay_state = Arc::new(overlay_state);
        let workers = worker_count(settings);
        let (traces, exporting) = spans.unzip();
        let telemetry = metrics::telemetry(settings, traces);
        metrics::queues(&telemetry, Arc::clone(&log.lines), exporting.as_ref().map(Exporting::dropped));
        file_metrics(&telemetry, listener_tls.as_ref(), redis.as_ref(), source.xds_status());
        // The workers and the main thread, which supervises the servers, all call the store.
        let Stores { guard, memory, redis, replicas } =
            store::open(settings, redis, workers.get() + 1, &telemetry.servers());
        metrics::stores(&telemetry, &memory, redis.as_ref());
        let live = Arc::new(rules.map_or_else(LiveRules::without_rules, LiveRules::new));
        let what = first_rules(&live, &telemetry);
        let (page, status) =
            watch::channel(RulesStatus { since: Instant::now(), what, rejected: None, slow_since: None });
        metrics::slow_load(&telemetry, status.clone());
        metrics::overlay(&telemetry, Arc::clone(&overlay_state));
        let guard = Arc::new(guard);
        metrics::guard(&telemetry, &guard, &replicas);
        let limiter = Arc::new(Limiter::new(Arc::clone(&live), Arc::clone(&guard)));
        let xds = source.xds_status();
        let intake = Intake::new(options, Arc::clone(&live), page, Arc::clone(&telemetry), inputs, overlay_state);
        let intake = Arc::new(if xds.is_some() { intake.with_few_lines() } else { intake });
        metrics::xds(&telemetry, xds.clone());
        let (source, following) = (Some(source), None);
        Self {
            source,
            following,
            overlay,
            intake,
            status,
            live,
            xds,
            limiter,
            guard,
            memory,
            redis,
            replicas,
            telemetry,
            exporting,
            exporter,
            listener_tls,
            callers,
            admin_tokens,
            has_rules_of_reference,
            workers,
        }
    }

    /// Starts the task that follows the source. Returns once the source has answered, or at once with `starts_without_rules`.
    pub(super) async fn follow_source(&mut self, starts_without_rules: bool) {
        let Some(source) = self.source.take() else { return };
        let answered = source.answered().filter(|_| !starts_without_rules);
        self.following = Some(tokio::spawn(source.follow(Arc::clone(&self.intake) as _)));
        if let Some(mut answered) = answered {
            // The sender lives as long as the task, which never ends by itself.
            let _ = answered.wait_for(|answered| *answered).await;
        }
    }

    /// Starts TLS of the listeners, and the tasks that read its files and the file of callers again. Without that file, callers of the HTTP listener have
    /// `rights_over_http`.
    ///
    /// # Errors
    /// If the threads for handshakes cannot be started.
    fn secure(&mut self, rights_over_http: Rights) -> anyhow::Result<Security> {
        let (files, callers) = (self.listener_tls.take(), self.callers.take());
        let tls = files.as_ref().map(|files| files.start(self.workers)).transpose()?;
        metrics::handshakes(&self.telemetry, tls.clone());
        let gate = callers.as_ref().map(CallersFile::gate);
        let http_gate = gate.clone().unwrap_or_else(|| Arc::new(CallerGate::of_http(rights_over_http)));
        metrics::callers(&self.telemetry, Arc::clone(&http_gate), callers.as_ref().map(CallersFile::is_rejected));
        let following = files.zip(tls.clone()).map(|(files, tls)| tokio::spawn(files.follow(tls)));
        let following = following.into_iter().chain(callers.map(|callers| tokio::spawn(callers.follow())));
        metrics::admin_tokens(&self.telemetry, self.admin_tokens.as_ref().map(TokenFile::is_rejected));
        let tokens = self.admin_tokens.take().map(|tokens| tokio::spawn(tokens.follow()));
        let tasks = following.chain(tokens).collect();
        Ok(Security { tls, callers: gate, http_callers: http_gate, tasks })
    }

    /// Starts the listeners and all tasks. Returns once health is reported.
    ///
    /// # Errors
    /// If the worker threads or a service cannot be started.
    pub(super) async fn serve(mut self, settings: &Settings, log: &Log, sockets: Sockets) -> anyhow::Result<Running> {
        let addresses = sockets.addresses()?;
        let answers = Arc::new(answers(settings, self.telemetry.records())?);
        let grpc_edge =
            Edge::new(Arc::clone(&self.limiter), answers, Arc::clone(&self.telemetry), settings.max_held_calls);
        // A held request keeps its connection. Half of the permits are left to gRPC.
        let http_edge = grpc_edge.delaying((sockets.slots.http / 4).min(settings.max_held_calls.div_ceil(2)));
        metrics::held_calls(&self.telemetry, grpc_edge.held_calls());
        let (services, health) = Services::new(grpc_edge).await?;
        let health = HealthState { health, readiness: Readiness::default() };
        let statsd = settings.statsd.as_ref().map(|settings| Statsd::start(settings, Arc::clone(&self.telemetry)));
        let workers = Workers::start(self.workers)?;
        let (stop, stopped) = watch::channel(false);
        let routes = Routes {
            services,
            http: http_service(settings, http_edge, sockets.slots.http, health.readiness.clone(), &self.telemetry),
            admin: self.debug_routes(settings, log, &addresses, &health.readiness, stopped.clone()),
        };
        let security = self.secure(settings.json_rights.rights(self.has_rules_of_reference))?;
        let serving = listeners(settings, sockets, routes, &self.telemetry, &workers, &stopped, &security);
        let Self {
            following, overlay, intake, live, limiter, guard, memory, redis, replicas, exporting, exporter, ..
        } = self;
        let mut tasks: Vec<_> = following.into_iter().chain(security.tasks).collect();
        tasks.extend(overlay.map(|overlay| {
            let sink = Arc::new(OverlayIntake::new(Arc::clone(&intake)));
            tokio::spawn(overlay.follow(sink as _))
        }));
        let store_tasks = store_tasks(&guard, redis.clone(), sweep(memory, intake, self.telemetry.records()));
        let announcer = redis.clone().filter(|_| settings.replicas.0.is_none()).map(Announcer::new).map(Arc::new);
        tasks.extend(
            announcer
                .clone()
                .map(|announcer| tokio::spawn(async move { announcer.announce(&replicas, &SystemClock).await })),
        );
        connected_at_first(redis.as_ref(), &workers).await;
        if let (Some(redis), StoreChoice::Redis { main, per_second }) = (redis.clone(), &settings.store) {
            let names = std::iter::once(main.as_ref()).chain(per_second.as_deref()).map(ToString::to_string).collect();
            let policy = settings.on_store_failure.0;
            tasks.push(tokio::spawn(report_unreached(redis, names, policy, health.readiness.clone())));
        }
        let conditions = Conditions {
            redis: redis.filter(|_| settings.redis_health_check_active_connection),
            rules: settings.source.needs_rules.then_some(live),
        };
        let is_ready = conditions.hold();
        health.show(is_ready).await;
        if conditions.are_any() {
            tasks.push(tokio::spawn(health.clone().follow(conditions, is_ready)));
        }
        Ok(Running {
            addresses,
            limiter,
            guard,
            health,
            serving,
            workers,
            stop,
            announcer,
            exporting,
            statsd: statsd.transpose()?,
            otlp: exporter.map(|exporter| exporter.start(self.telemetry)),
            tasks,
            store_tasks,
        })
    }
}

/// Adds the metrics of the rules of the start, if there are any. Returns their description.
fn first_rules(live: &LiveRules, telemetry: &Telemetry) -> String {
    let rules = live.snapshot();
    if !rules.is_empty() || rules.is_loaded() {
        metrics::rules_loaded(telemetry, &rules, rules.generation());
    }
    match (rules.is_loaded(), rules.is_empty()) {
        (true, _) => summary::counted(&rules, rules.files()),
        (false, true) => "none yet, because the control plane has sent none".to_owned(),
        (false, false) => format!("{}; the control plane has sent none yet", summary::counted(&rules, rules.files())),
    }
}

/// Starts the tasks of the stores, with `sweep` among them. Calls in flight need them.
fn store_tasks(
    guard: &Arc<Guard>,
    redis: Option<Redis>,
    sweep: impl Future<Output = ()> + Send + 'static,
) -> Vec<JoinHandle<()>> {
    let settling = Arc::clone(guard);
    let tasks = [
        tokio::spawn(sweep),
        tokio::spawn(async move { settling.settle().await }),
        tokio::spawn(Arc::clone(guard).keep_leases()),
    ];
    tasks.into_iter().chain(redis.map(|redis| tokio::spawn(async move { redis.supervise().await }))).collect()
}

/// Adds the metrics of the files that connections need.
fn file_metrics(
    telemetry: &Telemetry,
    listener: Option<&ListenerFiles>,
    redis: Option<&RedisFiles>,
    xds: Option<Arc<XdsStatus>>,
) {
    let redis_tls = redis.map(RedisFiles::tls).unwrap_or_default();
    metrics::certificates(telemetry, listener.map(ListenerFiles::expiry), redis_tls, xds);
    metrics::login_reads(telemetry, redis.map(RedisFiles::credentials).unwrap_or_default());
}

/// TLS and callers of the listeners.
struct Security {
    /// `None` for plaintext.
    tls: Option<Tls>,
    /// `None` if callers have no rights.
    callers: Option<Arc<CallerGate>>,
    /// Callers of the HTTP listener.
    http_callers: Arc<CallerGate>,
    /// Tasks that read the files again.
    tasks: Vec<JoinHandle<()>>,
}

/// Handlers of the listeners.
struct Routes {
    services: Services,
    http: HttpService,
    admin: axum::Router,
}

fn http_service(
    settings: &Settings,
    edge: Edge,
    connections: usize,
    readiness: Readiness,
    telemetry: &Telemetry,
) -> HttpService {
    let access = settings.json_access;
    let pages = Arc::new(PageGate::new(access == JsonAccess::Loopback));
    metrics::pages(telemetry, Arc::clone(&pages));
    json::service(edge, readiness, settings.json_max_body.0, move |address| access.admits(address), pages, connections)
}

/// Starts the listeners.
fn listeners(
    settings: &Settings,
    sockets: Sockets,
    routes: Routes,
    telemetry: &Arc<Telemetry>,
    workers: &Workers,
    stopped: &watch::Receiver<bool>,
    security: &Security,
) -> JoinSet<Drained> {
    let Sockets { grpc, http, debug, metrics, slots } = sockets;
    let (tls, callers, http_callers) = (security.tls.as_ref(), security.callers.clone(), &security.http_callers);
    let limits = ConnectionLimits {
        age: unless_zero(settings.grpc_max_connection_age),
        grace: unless_zero(settings.grpc_max_connection_age_grace),
        drain: duration(settings.drain_timeout),
        ..ConnectionLimits::default()
    };
    let memory_bytes = bounds::memory_bytes();
    let mut tallies = Vec::new();
    let mut listener = |name, socket, slots| {
        let listener = Listener::new(name, socket, slots, limits);
        tallies.push((name, listener.tally()));
        listener
    };
    let grpc = listener("gRPC", grpc, slots.of_grpc());
    metrics::http1_peers(telemetry, grpc.tally());
    let grpc =
        grpc.with_most_idle(slots.idle_of_grpc(settings, memory_bytes)).with_tls(tls.map(|tls| Arc::clone(&tls.grpc)));
    let tls_if = |is_on: fn(&ListenerTlsSettings) -> bool| {
        tls.filter(|_| settings.listener_tls.as_ref().is_some_and(is_on))?.others.clone()
    };
    let tcp = NetListener::Tcp;
    let http = listener("HTTP", tcp(http), slots.of_http()).with_tls(tls_if(|tls| tls.is_http_too));
    let http = http.with_most_idle(bounds::below(slots.http, slots.http)).with_waiting();
    let debug = listener("debug", tcp(debug), slots.of_other()).with_tls(tls_if(|tls| tls.is_debug_too));
    let metrics = metrics.map(|socket| listener("metrics", tcp(socket), slots.of_other()));
    metrics::connections(telemetry, tallies);
    let process = Arc::new(ProcessAccount::new(memory_bytes));
    let http_limits = ConnectionLimits { keep_alive: bounds::GATEWAY_KEEP_ALIVE, ..limits };
    let calls = Http2::new(routes.services, &limits).within(process);
    let calls = calls.counting(telemetry.limited_calls()).introducing(callers.as_ref().map(CallerGate::introduce));
    let requests = Http1::new(routes.http, &http_limits).introducing(Some(http_callers.introduce()));
    let http1 = |routes| Http1::new(routes, &limits);
    let mut serving = JoinSet::new();
    serving.spawn(grpc.serve(calls, workers.clone(), stopped.clone()));
    serving.spawn(http.serve(requests, workers.clone(), stopped.clone()));
    serving.spawn(debug.serve(http1(routes.admin), Workers::here(), stopped.clone()));
    if let Some(metrics) = metrics {
        let page = crate::edge::metrics::routes(&settings.prometheus_path.0, Arc::clone(telemetry));
        serving.spawn(metrics.serve(http1(page), Workers::here(), stopped.clone()));
    }
    serving
}

impl Running {
    /// Returns the rules in force.
    pub(super) fn rules(&self) -> Snapshot {
        self.limiter.rules()
    }

    /// Returns the addresses of the listeners.
    pub(super) fn addresses(&self) -> Addresses {
        self.addresses.clone()
    }

    /// Stops after a stop signal: health fails at once, calls in flight are finished within `DRAIN_TIMEOUT`. A second signal
    /// stops at once.
    pub(super) async fn shut_down(mut self, settings: &Settings, mut signals: Signals) {
        self.tasks.iter().for_each(JoinHandle::abort);
        if let Some(announcer) = self.announcer {
            announcer.leave().await;
        }
        self.health.show(false).await;
        let stopping = stopping(settings);
        tracing::info!(target: log::TARGET, event = "stop.begun", "stopping: {stopping}; a second signal stops at once");
        let drain = async {
            tokio::time::sleep(duration(settings.drain_delay)).await;
            self.stop.send_replace(true);
            while self.serving.join_next().await.is_some() {}
            self.workers.stop(WORKERS_END).await
        };
        tokio::select! {
            _ = drain => {}
            () = signals.wait() => {
                tracing::info!(target: log::TARGET, event = "stop.forced", "stopped at once by a second signal");
            }
        }
        // All at once, so that a stop waits for the slowest one only.
        tokio::join!(
            async {
                let _ = tokio::time::timeout(LEASES_END, self.guard.end_leases()).await;
            },
            async {
                if let Some(exporting) = self.exporting {
                    exporting.flush().await;
                }
            },
            async {
                if let Some(statsd) = self.statsd {
                    statsd.flush().await;
                }
            },
            async {
                if let Some(otlp) = self.otlp {
                    otlp.flush().await;
                }
            }
        );
        self.store_tasks.iter().for_each(JoinHandle::abort);
    }
}

/// Returns the sentence about the drain, for the log line at the stop signal.
fn stopping(settings: &Settings) -> String {
    let delay = match settings.drain_delay {
        Micros::ZERO => String::new(),
        delay => format!("new calls are accepted for {delay} more, and health checks fail already; "),
    };
    format!("{delay}calls in flight have {} to finish", settings.drain_timeout)
}

/// Drops forgotten counters, old records and unused rules, every 10 s. Never returns.
async fn sweep(store: Arc<Memory>, intake: Arc<Intake>, records: Option<Arc<Records>>) {
    let mut due = tokio::time::interval(SWEEP_EVERY);
    loop {
        due.tick().await;
        store.sweep();
        records.iter().for_each(|records| records.forget_old());
        if intake.has_retired() {
            // A large rule set takes milliseconds to drop, so this thread does not.
            let intake = Arc::clone(&intake);
            tokio::task::spawn_blocking(move || intake.drop_unused());
        }
    }
}
