//! Inputs of every load where an overlay is set, and the state of the overlay.

use std::sync::atomic::AtomicBool;

use parking_lot::Mutex;

use crate::rulefile::{Documents, Overlay, OverlayEffect};

/// The last valid documents of the source, and the overlay that is laid over them. A change of either compiles both.
#[derive(Debug)]
pub(super) struct Inputs {
    /// Documents of the source; `None` until the source has offered valid ones.
    pub(super) source: Option<Documents>,
    /// The overlay.
    pub(super) overlay: Overlay,
}

/// State of the overlay for the metrics page.
#[derive(Debug, Default)]
pub(super) struct OverlayState {
    /// True while the current overlay is rejected.
    pub(super) is_rejected: AtomicBool,
    /// Effect of the overlay in force on the rules in force.
    pub(super) effect: Mutex<OverlayEffect>,
}
