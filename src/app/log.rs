//! Set-up of the log: a bounded queue before standard error, and a level that can change at run time.

use std::any::Any;
use std::io::IsTerminal;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use anyhow::Context;
use parking_lot::Mutex;
use tracing::Level;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::reload::{self, Handle};
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, Registry};

use crate::admin;
use crate::settings::{LogFormat, LogSeverity};
use crate::telemetry::json_lines;
use crate::telemetry::lines::Lines;

/// Target of the log lines that are written at every level: operator actions, and events that an operator waits for.
pub(super) const TARGET: &str = module_path!();
/// Longest wait for the last log lines to be written when the process ends: 500 ms.
const FLUSH: Duration = Duration::from_millis(500);

/// The log of the process. Dropping it flushes the queue, for at most 500 ms.
pub(super) struct Log {
    /// Queue of lines that are not yet written.
    pub(super) lines: Arc<Lines>,
    /// Minimum severity that is logged.
    pub(super) level: Arc<ChangingLevel>,
}

/// Minimum severity that is logged, and the filter that applies it.
pub(super) struct ChangingLevel {
    level: Mutex<Level>,
    filter: Handle<Targets, Registry>,
}

impl Log {
    /// Starts the log. A second start in one process reuses the log of the first.
    pub(super) fn start(format: LogFormat, level: Level) -> anyhow::Result<Self> {
        static FIRST: OnceLock<(Arc<Lines>, Arc<ChangingLevel>)> = OnceLock::new();
        if let Some((lines, first)) = FIRST.get().cloned() {
            return Ok(Self { lines, level: first });
        }
        let is_colored = format == LogFormat::Text && std::io::stderr().is_terminal();
        let lines = Arc::new(Lines::new(is_colored));
        let writer = Arc::clone(&lines);
        // A detached thread: standard error may be a pipe that nobody reads.
        let started = std::thread::Builder::new().name("log".to_owned()).spawn(move || {
            writer.write_to(std::io::stderr());
        });
        started.context("the thread of the log cannot be started")?;
        let (changing, filter) = reload::Layer::new(targets(level));
        let layer = match format {
            LogFormat::Text => {
                tracing_subscriber::fmt::layer().with_writer(Arc::clone(&lines)).with_ansi(is_colored).boxed()
            }
            LogFormat::Json => json_lines::layer(Arc::clone(&lines)).boxed(),
        };
        // A program that embeds this one may have set up a subscriber already; that one stays.
        let _ = tracing_subscriber::registry().with(layer.with_filter(changing)).try_init();
        std::panic::set_hook(Box::new(|panic| {
            let thread = std::thread::current().name().unwrap_or_default().to_owned();
            let place = panic.location().map(ToString::to_string).unwrap_or_default();
            tracing::error!(
                event = "process.panicked",
                thread,
                place,
                "a thread panicked, which is a bug: {}",
                words(panic.payload())
            );
        }));
        let level = Arc::new(ChangingLevel { level: Mutex::new(level), filter });
        let (lines, level) = FIRST.get_or_init(|| (lines, level)).clone();
        Ok(Self { lines, level })
    }
}

/// Writes the JSON lines of what `write` logs to `output` in place of the log.
pub(super) fn once_to<W: std::io::Write + 'static>(output: fn() -> W, write: impl FnOnce()) {
    tracing::subscriber::with_default(tracing_subscriber::registry().with(json_lines::layer(output)), write);
}

impl Drop for Log {
    fn drop(&mut self) {
        self.lines.flush(FLUSH);
    }
}

/// Returns the message of a panic; empty if the payload is not text.
fn words(payload: &(dyn Any + Send)) -> &str {
    let text = payload.downcast_ref::<&str>().copied();
    text.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or_default()
}

impl admin::LogLevel for ChangingLevel {
    fn get(&self) -> String {
        self.level.lock().to_string().to_ascii_lowercase()
    }

    fn set(&self, word: &str, token: Option<&str>) -> Result<(), String> {
        let Some(LogSeverity(wanted)) = LogSeverity::named(word) else {
            return Err(format!("{word:?} is no level of the log: expected {}", LogSeverity::NAMES));
        };
        let mut level = self.level.lock();
        self.filter.reload(targets(wanted)).map_err(|error| format!("the level of the log stays: {error}"))?;
        let was = std::mem::replace(&mut *level, wanted);
        let (before, after) = (was.to_string().to_ascii_lowercase(), wanted.to_string().to_ascii_lowercase());
        tracing::info!(target: TARGET, event = "log.level_changed", token, before, after, "the log level is now {wanted}; it was {was}");
        Ok(())
    }
}

fn targets(level: Level) -> Targets {
    // Below `info`, the frame logs of HTTP/2 would drown Tidegate's own lines.
    Targets::new()
        .with_target("tidegate", level)
        .with_target(super::intake::TARGET, level.max(Level::INFO))
        .with_target(TARGET, level.max(Level::INFO))
        .with_target(admin::AUDIT, level.max(Level::INFO))
        .with_default(level.min(Level::INFO))
}
