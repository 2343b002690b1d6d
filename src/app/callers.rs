//! File of callers: read at the start, and again while the service runs.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::edge::callers::CallerGate;
use crate::file::{Named, News, Settled, Unusable, follow};
use crate::model::Callers;
use crate::rulefile::callers::{MAX_CALLERS_BYTES, compile};
use crate::rulefile::{File, InvalidRules};
use crate::settings::{LogFormat, Settings};
use crate::telemetry::escape::escaped;
use crate::telemetry::throttle::LogThrottle;

/// Interval between two reads of the file: 250 ms. A change holds when the file was read twice with the same content, so
/// within a second.
const EVERY: Duration = Duration::from_millis(250);

/// Logs a warning about the file.
const LOG_WARNING: fn(String) = |warning| tracing::warn!(event = "callers.warning", "{warning}");

/// File of callers, and the gate that has its last valid content.
pub(super) struct CallersFile {
    file: Named,
    path: String,
    /// The content at the start.
    content: Vec<u8>,
    gate: Arc<CallerGate>,
    is_rejected: Arc<AtomicBool>,
}

impl CallersFile {
    /// Reads the file that the settings name, and prints its warnings. Returns `None` if they name none. Blocks while the file system
    /// does.
    ///
    /// # Errors
    /// If the file cannot be read, or has errors.
    pub(super) fn read(settings: &Settings) -> anyhow::Result<Option<Self>> {
        if settings.callers_file.is_empty() {
            return Ok(None);
        }
        let path = settings.callers_file.clone();
        let file = Named::new("CALLERS_FILE", PathBuf::from(&path), MAX_CALLERS_BYTES);
        let content = bytes(&file)?;
        let warn: fn(String) = match settings.log_format {
            LogFormat::Text => |warning| eprintln!("{warning}"),
            LogFormat::Json => LOG_WARNING,
        };
        let callers = compiled(&path, &content, warn)
            .map_err(|invalid| anyhow::Error::from(invalid).context("CALLERS_FILE has errors"))?;
        let has_certificates = settings.listener_tls.as_ref().is_some_and(|tls| !tls.authorities.is_empty());
        if !has_certificates {
            tracing::warn!(
                event = "callers.without_certificates",
                "CALLERS_FILE is set and clients need no certificate, so every caller is `anonymous`: set GRPC_SERVER_USE_TLS and GRPC_CLIENT_TLS_CACERT"
            );
        }
        let gate = Arc::new(CallerGate::new(callers));
        Ok(Some(Self { file, path, content, gate, is_rejected: Arc::default() }))
    }

    /// Returns the gate, which has the last valid content.
    pub(super) fn gate(&self) -> Arc<CallerGate> {
        Arc::clone(&self.gate)
    }

    /// Returns a flag that is true while the content of the file is not in force.
    pub(super) fn is_rejected(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.is_rejected)
    }

    /// Reads the file again and again, for ever. What is invalid changes nothing.
    pub(super) async fn follow(self) {
        let Self { file, path, content, gate, is_rejected } = self;
        let (complaints, mut settled, mut is_valid) = (LogThrottle::new(), Settled::new(content), true);
        let apply = |read: Result<Vec<u8>, Unusable>| {
            match settled.next(read) {
                News::Unsettled => return,
                News::Same => {}
                News::Changed(content) => {
                    let compiled = compiled(&path, content, LOG_WARNING);
                    is_valid = compiled.is_ok();
                    match compiled {
                        Ok(callers) => {
                            let grants = callers.grants().len();
                            gate.replace(callers);
                            tracing::info!(event = "callers.loaded", grants, "the rights of callers have changed");
                        }
                        Err(invalid) => tracing::error!(
                            event = "callers.rejected",
                            "the new CALLERS_FILE is invalid, so the last valid content stays in force:\n{invalid}"
                        ),
                    }
                }
                News::Unusable(error) => {
                    if complaints.is_due() {
                        tracing::error!(event = "callers.unreadable", %error, "CALLERS_FILE cannot be read; the last valid content stays in force");
                    }
                    return is_rejected.store(true, Ordering::Relaxed);
                }
            }
            is_rejected.store(!is_valid, Ordering::Relaxed);
        };
        let slow = |passed: Duration| {
            tracing::warn!(
                event = "callers.slow",
                seconds = passed.as_secs(),
                "still reading CALLERS_FILE: its file system may be stuck; the last valid content stays in force"
            );
        };
        follow(EVERY, move || bytes(&file), slow, apply).await;
    }
}

/// Reads and compiles the file of callers at `path` as the service does, for a command.
///
/// # Errors
/// If the file cannot be read.
pub fn check(path: &str) -> Result<Result<(Callers, Vec<String>), InvalidRules>, Unusable> {
    let content = bytes(&Named::new("--callers", path.into(), MAX_CALLERS_BYTES))?;
    let mut warnings = Vec::new();
    Ok(compiled(path, &content, |warning| warnings.push(warning)).map(|callers| (callers, warnings)))
}

fn bytes(file: &Named) -> Result<Vec<u8>, Unusable> {
    file.read("a file of callers", |bytes| Some(bytes.to_vec()))
}

fn compiled(path: &str, content: &[u8], warn: impl FnMut(String)) -> Result<Callers, InvalidRules> {
    let (callers, warnings) = compile(&File { name: path.into(), bytes: content.into() })?;
    warnings.iter().map(|warning| escaped(&warning.to_string(), false).into_owned()).for_each(warn);
    Ok(callers)
}
