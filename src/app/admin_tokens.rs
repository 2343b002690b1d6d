//! File of the tokens of the debug listener: read at the start, and again while the service runs.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::admin::{AUDIT, AdminTokens, TokenGate, ValueDigest};
use crate::file::{Named, News, Settled, Unusable, follow};
use crate::normalize::digest::{Digester, KeySecret};
use crate::settings::AdminSettings;
use crate::telemetry::throttle::LogThrottle;

/// Interval between two reads of the file: 250 ms. A change holds when the file was read twice with the same content, so
/// within a second.
const EVERY: Duration = Duration::from_millis(250);

/// File of tokens, and the gate that has its last valid content.
pub(super) struct TokenFile {
    file: Named,
    tokens: AdminTokens,
    gate: Arc<TokenGate>,
    is_rejected: Arc<AtomicBool>,
}

impl TokenFile {
    /// Reads the file that the settings name. Returns `None` if they name none. Values are masked with `secret`; without one, with a
    /// secret of this process. Blocks while the file system does.
    ///
    /// # Errors
    /// If the file cannot be read, or has errors, or the system has no random bytes.
    pub(super) fn read(settings: &AdminSettings, secret: Option<KeySecret>) -> anyhow::Result<Option<Self>> {
        let Some(file) = settings.tokens.clone() else { return Ok(None) };
        let tokens = tokens(&file)?;
        let gate = TokenGate::new(tokens.clone(), Arc::clone(&settings.hosts), value_digest(secret)?);
        Ok(Some(Self { file, tokens, gate: Arc::new(gate), is_rejected: Arc::default() }))
    }

    /// Returns the gate, which has the last valid content.
    pub(super) fn gate(&self) -> Arc<TokenGate> {
        Arc::clone(&self.gate)
    }

    /// Returns a flag that is true while the content of the file is not in force.
    pub(super) fn is_rejected(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.is_rejected)
    }

    /// Reads the file again and again, for ever. What is invalid changes nothing.
    pub(super) async fn follow(self) {
        let Self { file, tokens: at_start, gate, is_rejected } = self;
        let (complaints, mut settled) = (LogThrottle::new(), Settled::new(at_start));
        let apply = |read: Result<AdminTokens, Unusable>| match settled.next(read) {
            News::Unsettled => {}
            News::Same => is_rejected.store(false, Ordering::Relaxed),
            News::Changed(tokens) => {
                is_rejected.store(false, Ordering::Relaxed);
                tracing::info!(target: AUDIT, event = "admin.tokens.loaded", tokens = tokens.len(), "the tokens of the debug listener have changed");
                gate.replace(tokens.clone());
            }
            News::Unusable(error) => {
                is_rejected.store(true, Ordering::Relaxed);
                if complaints.is_due() {
                    tracing::error!(event = "admin.tokens.unusable", %error, "ADMIN_TOKEN_FILE has changed and cannot be used; the last valid tokens stay in force");
                }
            }
        };
        let slow = |passed: Duration| {
            tracing::warn!(
                event = "admin.tokens.slow",
                seconds = passed.as_secs(),
                "still reading ADMIN_TOKEN_FILE: its file system may be stuck; the last valid tokens stay in force"
            );
        };
        follow(EVERY, move || tokens(&file), slow, apply).await;
    }
}

fn tokens(file: &Named) -> Result<AdminTokens, Unusable> {
    let content = file.read("a file of tokens", |bytes| Some(bytes.to_vec()))?;
    AdminTokens::parse(&content).map_err(|invalid| file.unusable(invalid.to_string()))
}

/// Returns the digest of masked values. With `secret`, all instances show the same digest of a value.
fn value_digest(secret: Option<KeySecret>) -> anyhow::Result<ValueDigest> {
    let secret = match secret {
        Some(secret) => Some(secret),
        None => {
            let mut random = [0; 32];
            let source = rustls::crypto::ring::default_provider().secure_random;
            let filled = source.fill(&mut random);
            filled
                .map_err(|_| anyhow::anyhow!("the system has no random bytes for the digests of the debug listener"))?;
            KeySecret::new(&random)
        }
    };
    Ok(Arc::new(move |key, value| Digester(secret).digest(key.as_bytes(), value.as_bytes())))
}
