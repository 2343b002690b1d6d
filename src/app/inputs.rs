//! Inputs of every load, and the state of the overlay.

use std::sync::atomic::AtomicBool;

use parking_lot::Mutex;

use crate::rulefile::{self, CompiledRules, Documents, InvalidRules, Options, Overlay, OverlayEffect};

/// The last valid documents of the source, and the overlay that is laid over them. A change of either compiles both.
#[derive(Debug, Default)]
pub(super) struct Inputs {
    /// Documents of the source; `None` until the source has offered valid ones, and without an overlay.
    pub(super) source: Option<Documents>,
    /// The overlay, if one is set.
    pub(super) overlay: Option<Overlay>,
}

impl Inputs {
    /// Compiles `documents` with the overlay, and keeps them for the next overlay.
    ///
    /// # Errors
    /// All errors in the documents.
    pub(super) fn compile(
        &mut self,
        documents: Documents,
        options: &Options,
    ) -> Result<(CompiledRules, OverlayEffect), InvalidRules> {
        let Some(overlay) = &self.overlay else {
            return rulefile::compile(documents, options).map(|compiled| (compiled, OverlayEffect::default()));
        };
        let compiled = overlay.compile(Some(documents.clone()), options)?;
        self.source = Some(documents);
        Ok(compiled)
    }
}

/// State of the overlay for the metrics page.
#[derive(Debug, Default)]
pub(super) struct OverlayState {
    /// True while the current overlay is rejected.
    pub(super) is_rejected: AtomicBool,
    /// Effect of the overlay in force on the rules in force.
    pub(super) effect: Mutex<OverlayEffect>,
}
