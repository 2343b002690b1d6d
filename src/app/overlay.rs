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
}

impl RuleSink for OverlayIntake {
    fn offer(&self, documents: Documents) -> Result<Generation, InvalidRules> {
        let offered = self.rules.offer_overlay(documents);
        match &offered {
            Ok(_) => self.state.is_rejected.store(false, Ordering::Relaxed),
            Err(invalid) => self.unreadable(&invalid.to_string()),
        }
        offered
    }

    fn unreadable(&self, error: &str) {
        self.state.is_rejected.store(true, Ordering::Relaxed);
        tracing::error!(
            event = "overlay.rejected",
            "the new overlay is invalid, so the last valid overlay stays in force:\n{error}"
        );
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
