//! The process: starts the listeners, the stores, the rule loader and their tasks, and stops them.
//!
//! Only this module names the concrete types of all layers, spawns tasks and reads the clock and the environment.

use std::io::Write;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;

use self::log::Log;
use self::read::Read;
use self::service::Service;
use self::signals::Signals;
use self::sockets::Sockets;
use self::summary::Summary;
use crate::edge::answer::{Answers, HeaderNames, Headers, RefusalBody};
use crate::file;
use crate::model::Micros;
use crate::serve::use_small_pages;
use crate::settings::{BodyStyle, HeaderStyle, LogFormat, Settings, StoreChoice, UnknownVariables};
use crate::source::SourceChoice;
use crate::source::file::find::{Location, joined};
use crate::store::clock::SystemClock;
pub use crate::telemetry::decision_id::DecisionId;
use crate::telemetry::records::Records;

mod admin_tokens;
mod authorities;
pub mod callers;
mod collector;
mod failure;
mod health;
mod inputs;
mod intake;
mod listener_tls;
mod log;
mod metrics;
mod otlp;
mod overlay;
pub mod process;
pub mod read;
mod service;
mod signals;
pub mod simulator;
pub mod sockets;
mod statsd;
mod store;
pub mod summary;
mod systemd;
mod traces;
mod xds;

/// Warning for response headers that Envoy can also build itself.
const SENT_TWICE: &str = "x-ratelimit in RESPONSE_HEADERS sends headers that Envoy's own enable_x_ratelimit_headers builds from the statuses; with both, each client gets them twice: leave one off";

/// Returns the environment variable `name` if it is set and valid UTF-8.
pub fn environment(name: &str) -> Option<String> {
    #[expect(clippy::disallowed_methods, reason = "the one place that reads the environment")]
    std::env::var(name).ok()
}

/// Returns all environment variables that are valid UTF-8.
fn environment_variables() -> impl Iterator<Item = (String, String)> {
    std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
}

/// Returns the rule source that the settings and the paths on the command line choose.
///
/// # Errors
/// If the command line names rule files, but the rules come from a control plane.
pub fn source_choice(settings: &Settings, paths: Vec<PathBuf>) -> anyhow::Result<SourceChoice> {
    if let Some(plane) = &settings.source.plane {
        anyhow::ensure!(
            paths.is_empty(),
            "CONFIG_TYPE is GRPC_XDS_SOTW, so the control plane sends the rules, but the command line names rule files: remove them, or set CONFIG_TYPE=FILE"
        );
        return Ok(SourceChoice::Xds(Box::new(plane.clone())));
    }
    Ok(SourceChoice::Files(location(settings, paths)))
}

/// Returns the location of the rule files at `paths`. Without paths, and for the path of the reference's runtime directory, it is that
/// directory, in which every file is a rule file.
pub fn location(settings: &Settings, paths: Vec<PathBuf>) -> Location {
    let directory = joined(settings.runtime_root.as_ref(), &settings.runtime_subdirectory);
    let app = joined(&directory, &settings.runtime_appdirectory);
    let is_runtime = match paths.as_slice() {
        [] => true,
        [path] => path.is_dir() && joined(path, "") == app,
        _ => false,
    };
    match is_runtime {
        false => Location::Paths(paths),
        true => Location::Runtime {
            directory,
            app_directory: settings.runtime_appdirectory.clone(),
            is_root_watched: settings.runtime_watch_root,
            ignores_dot_files: settings.runtime_ignoredotfiles,
        },
    }
}

/// Runs the service until a stop signal arrives. `ignored`: arguments that have no effect.
///
/// # Errors
/// Returns the reason why the service cannot start.
pub fn serve(settings: &Settings, source: &SourceChoice, ignored: &[String]) -> anyhow::Result<ExitCode> {
    use_small_pages();
    let log = Log::start(settings.log_format, settings.log_level.0)?;
    warn(settings, ignored);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let code = runtime.block_on(async {
        let mut signals = Signals::new()?;
        let (given, choice) = (settings.clone(), source.clone());
        let read = file::blocking(
            move || Read::all(&given, choice),
            |passed| {
                tracing::warn!(
                    event = "start.slow",
                    seconds = passed.as_secs(),
                    "still reading rule files and secrets: their file system may be stuck, or the command of REDIS_AUTH_COMMAND does not end; the service starts after they are read"
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
        warn_of_memory(settings, source);
        run(settings, &log, read, signals).await
    });
    // Do not wait for a read that is still blocked.
    runtime.shutdown_background();
    code
}

/// Warns of settings and arguments that probably do not do what their author expects.
fn warn(settings: &Settings, ignored: &[String]) {
    if !ignored.is_empty() {
        // Values may be secrets.
        let names = ignored.iter().filter(|argument| argument.starts_with('-'));
        let names: Vec<&str> = names.filter_map(|argument| argument.split('=').next()).collect();
        tracing::warn!(
            event = "start.arguments_ignored",
            count = ignored.len(),
            flags = names.join(" "),
            "under the name ratelimit, arguments have no effect, as in envoyproxy/ratelimit: set environment variables, or call `tidegate serve`"
        );
    }
    for unused in &settings.unused {
        let (variable, why) = (unused.variable, unused.why);
        tracing::warn!(event = "settings.unused", variable, "{variable} is set and has no effect: {why}");
    }
    let is_undecided = matches!(settings.store, StoreChoice::Memory { is_asked: false });
    if let Some(unknown) = UnknownVariables::find(environment_variables(), is_undecided) {
        tracing::warn!(event = "settings.unknown", "{unknown}");
    }
}

/// Warns of counters in the memory of this process where other instances probably share the limits.
fn warn_of_memory(settings: &Settings, source: &SourceChoice) {
    let StoreChoice::Memory { is_asked } = settings.store else { return };
    if let Some(replicas) = settings.replicas.0.filter(|replicas| replicas.get() > 1) {
        tracing::warn!(
            event = "store.memory.replicas",
            replicas,
            "REPLICAS is {replicas}, and counters are in the memory of each instance, so together they admit up to {replicas} times each limit: set REDIS_URL"
        );
    }
    if !is_asked && !matches!(source, SourceChoice::Files(Location::Paths(_))) {
        tracing::warn!(
            event = "store.memory",
            "the rules come from where envoyproxy/ratelimit reads them, but REDIS_URL is not set, so each instance counts for itself in its memory: set REDIS_URL, or BACKEND_TYPE=memory"
        );
    }
}

/// Logs the reason why the service does not start, as JSON.
pub fn failed(error: &anyhow::Error) {
    // Without a log there is nowhere to say it.
    let Ok(_log) = Log::start(LogFormat::Json, tracing::Level::WARN) else { return };
    failure::log(error);
}

async fn run(settings: &Settings, log: &Log, read: Read, mut signals: Signals) -> anyhow::Result<ExitCode> {
    let mut service = Service::build(settings, log, read);
    systemd::waiting();
    let has_begun = tokio::select! {
        () = service.follow_source(settings.source.starts_without_rules) => true,
        () = signals.wait() => false,
    };
    if !has_begun {
        tracing::info!(target: log::TARGET, event = "stop.without_rules", "stopped before the control plane sent rules");
        return Ok(ExitCode::SUCCESS);
    }
    let sockets = Sockets::bind(settings).await?;
    let running = service.serve(settings, log, sockets).await?;
    let addresses = running.addresses();
    let files = running.rules().files();
    let program = std::env::args().next().unwrap_or_else(|| "tidegate".to_owned());
    let summary = Summary { settings, rules: &running.rules(), program: &program, files, addresses };
    match settings.log_format {
        // Standard output may be closed; the service runs anyway.
        LogFormat::Text => write!(std::io::stdout(), "{summary}").unwrap_or_default(),
        LogFormat::Json => log::once_to(std::io::stdout, || summary.log()),
    }
    systemd::ready();
    tokio::spawn(systemd::keep_alive());
    signals.wait().await;
    systemd::stopping();
    running.shut_down(settings, signals).await;
    Ok(ExitCode::SUCCESS)
}

fn worker_count(settings: &Settings) -> NonZeroUsize {
    let cores = || std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
    settings.workers.0.and_then(NonZeroUsize::new).unwrap_or_else(cores)
}

fn answers(settings: &Settings, records: Option<Arc<Records>>) -> anyhow::Result<Answers> {
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
        HeaderStyle::XRateLimitAndIetf => Headers::XRateLimitAndIetf(Arc::new(SystemClock)),
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
        decision_id_header: settings.decision_id_header,
        records,
    })
}

/// Converts a time limit. 0 means no limit, as in gRPC's own servers.
fn unless_zero(length: Micros) -> Duration {
    if length == Micros::ZERO { Duration::MAX } else { duration(length) }
}

fn duration(length: Micros) -> Duration {
    Duration::from_micros(length.get())
}
