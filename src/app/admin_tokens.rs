//! File of the tokens of the debug listener: read at the start, and again while the service runs.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::time::sleep;

use crate::admin::{AUDIT, AdminTokens, TokenGate, ValueDigest};
use crate::file::{Named, Unusable, apart};
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
    pub(super) async fn follow(mut self) {
        let complaints = LogThrottle::new();
        let (mut last, mut was_wrong) = (self.tokens.clone(), false);
        loop {
            sleep(EVERY).await;
            let file = self.file.clone();
            let read = apart(
                move || tokens(&file),
                |passed| {
                    tracing::warn!(
                        event = "admin.tokens.slow",
                        seconds = passed.as_secs(),
                        "still reading ADMIN_TOKEN_FILE: its file system may be stuck; the last valid tokens stay in force"
                    );
                },
            );
            // The panic hook has logged an error.
            let Ok(read) = read.await else { return };
            match read {
                Ok(tokens) if tokens == last => {
                    was_wrong = false;
                    self.is_rejected.store(false, Ordering::Relaxed);
                    self.take(tokens);
                }
                // It may be in the middle of a write, as below.
                Ok(tokens) => last = tokens,
                Err(error) => {
                    if was_wrong {
                        self.is_rejected.store(true, Ordering::Relaxed);
                        if complaints.is_due() {
                            tracing::error!(event = "admin.tokens.unusable", %error, "ADMIN_TOKEN_FILE has changed and cannot be used; the last valid tokens stay in force");
                        }
                    }
                    was_wrong = true;
                }
            }
        }
    }

    /// Puts `tokens` in force, if they are others.
    fn take(&mut self, tokens: AdminTokens) {
        if tokens != self.tokens {
            tracing::info!(target: AUDIT, event = "admin.tokens.loaded", tokens = tokens.len(), "the tokens of the debug listener have changed");
            self.gate.replace(tokens.clone());
            self.tokens = tokens;
        }
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
