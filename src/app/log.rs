//! The wiring of the log: lines go to standard error by way of a queue, at a level that may change while the process runs.

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

use crate::settings::{LogFormat, LogLevel, Settings};
use crate::telemetry::json_lines::JsonLines;
use crate::telemetry::lines::Lines;
use crate::transport::admin;

/// Where the lines come from that are shown whatever the level: what an operator did, or waits for.
pub(super) const TARGET: &str = module_path!();
/// How long the end of the process waits for its last lines to be written: 500 ms.
const FLUSH: Duration = Duration::from_millis(500);

/// The log of the process. The last lines are written when this is dropped.
pub(super) struct Log {
    /// What waits to be written.
    pub(super) lines: Arc<Lines>,
    /// The least severity that is logged.
    pub(super) level: Arc<ChangingLevel>,
}

/// The least severity that is logged, and the filter that keeps it.
pub(super) struct ChangingLevel {
    level: Mutex<Level>,
    filter: Handle<Targets, Registry>,
}

impl Log {
    /// Begins to log as the settings say. A second start in one process goes on with the log of the first.
    pub(super) fn start(settings: &Settings) -> anyhow::Result<Self> {
        static FIRST: OnceLock<(Arc<Lines>, Arc<ChangingLevel>)> = OnceLock::new();
        let level = settings.log_level.0;
        if let Some((lines, first)) = FIRST.get().cloned() {
            return Ok(Self { lines, level: first });
        }
        let is_colored = settings.log_format == LogFormat::Text && std::io::stderr().is_terminal();
        let lines = Arc::new(Lines::new(is_colored));
        let writer = Arc::clone(&lines);
        // Not one that is waited for: standard error may be a pipe that nobody reads.
        let started = std::thread::Builder::new().name("log".to_owned()).spawn(move || {
            writer.write_to(std::io::stderr());
        });
        started.context("the thread of the log cannot be started")?;
        let (changing, filter) = reload::Layer::new(targets(level));
        let layer = tracing_subscriber::fmt::layer().with_writer(Arc::clone(&lines));
        let layer = match settings.log_format {
            LogFormat::Text => layer.with_ansi(is_colored).boxed(),
            LogFormat::Json => layer.with_ansi(false).event_format(JsonLines).boxed(),
        };
        // Whoever embeds this may have a log already, and keeps it.
        let _ = tracing_subscriber::registry().with(layer.with_filter(changing)).try_init();
        std::panic::set_hook(Box::new(|panic| {
            let thread = std::thread::current().name().unwrap_or_default().to_owned();
            let place = panic.location().map(ToString::to_string).unwrap_or_default();
            tracing::error!(thread, place, "a thread has panicked: {}", words(panic.payload()));
        }));
        let level = Arc::new(ChangingLevel { level: Mutex::new(level), filter });
        let (lines, level) = FIRST.get_or_init(|| (lines, level)).clone();
        Ok(Self { lines, level })
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        self.lines.flush(FLUSH);
    }
}

/// What a panic says.
fn words(payload: &(dyn Any + Send)) -> &str {
    let text = payload.downcast_ref::<&str>().copied();
    text.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or_default()
}

impl admin::LogLevel for ChangingLevel {
    fn get(&self) -> String {
        self.level.lock().to_string().to_ascii_lowercase()
    }

    fn set(&self, word: &str) -> Result<(), String> {
        let Some(LogLevel(wanted)) = LogLevel::named(word) else {
            return Err(format!("{word:?} is no level of the log: expected {}", LogLevel::NAMES));
        };
        let mut level = self.level.lock();
        self.filter.reload(targets(wanted)).map_err(|error| format!("the level of the log stays: {error}"))?;
        let was = std::mem::replace(&mut *level, wanted);
        tracing::info!(target: TARGET, "lines from the level {wanted} on are logged; before, it was {was}");
        Ok(())
    }
}

fn targets(level: Level) -> Targets {
    // Below `info`, what HTTP/2 does frame by frame hides what Tidegate says.
    Targets::new()
        .with_target("tidegate", level)
        .with_target(super::reload::TARGET, level.max(Level::INFO))
        .with_target(TARGET, level.max(Level::INFO))
        .with_default(level.min(Level::INFO))
}
