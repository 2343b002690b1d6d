//! Receiver of new overlays.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::watch;

use super::inputs::OverlayState;
use super::intake::{Intake, TARGET};
use crate::rulefile::{Documents, InvalidRules};
use crate::rules::Generation;
use crate::source::RuleSink;

/// Advice about an overlay that is missing.
pub(super) const EMPTIED: &str = "to empty the overlay, write a file whose single line is `empty_overlay: true`";

/// The receiver of new overlays. It passes valid ones to the receiver of rules.
pub(super) struct OverlayIntake {
    rules: Arc<Intake>,
    state: Arc<OverlayState>,
}

impl OverlayIntake {
    /// Creates the receiver of overlays for the rules that `rules` receives.
    pub(super) fn new(rules: Arc<Intake>) -> Self {
        let state = rules.overlay_state();
        Self { rules, state }
    }

    fn rejected(&self, message: &str) {
        self.state.is_rejected.store(true, Ordering::Relaxed);
        tracing::error!(event = "overlay.rejected", "{message}");
    }
}

impl RuleSink for OverlayIntake {
    fn offer(&self, documents: Documents) -> Result<Generation, InvalidRules> {
        let offered = self.rules.offer_overlay(documents);
        match &offered {
            Ok(_) => self.state.is_rejected.store(false, Ordering::Relaxed),
            Err(invalid) => self
                .rejected(&format!("the new overlay is invalid, so the last valid overlay stays in force:\n{invalid}")),
        }
        offered
    }

    fn unreadable(&self, error: &str) {
        self.rejected(&format!("the overlay cannot be read, so the last valid overlay stays in force, also if its last file was removed on purpose; {EMPTIED}:\n{error}"));
    }

    fn restored(&self) {
        self.state.is_rejected.store(false, Ordering::Relaxed);
        tracing::info!(target: TARGET, event = "overlay.restored", "the overlay has the content of the overlay in force again");
    }

    fn other_inputs(&self) -> watch::Receiver<()> {
        self.rules.accepted().documents.subscribe()
    }

    fn is_slow(&self, passed: Duration) {
        self.rules.is_slow(passed);
    }

    fn ended(&self, error: Option<&str>) {
        self.rules.ended(error);
    }
}
