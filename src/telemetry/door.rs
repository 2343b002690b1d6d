//! Doors of the HTTP listener.

use std::sync::atomic::{AtomicU64, Ordering};

/// Door of the HTTP listener by which a request for a decision arrives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HttpDoor {
    /// `/json`.
    Json,
    /// `/check`.
    Check,
}

/// Numbers of requests by door.
#[derive(Debug, Default)]
pub(super) struct HttpRequests([AtomicU64; HttpDoor::ALL.len()]);

impl HttpDoor {
    /// All doors, in the order of the metric's series.
    pub const ALL: [Self; 2] = [Self::Json, Self::Check];

    /// Returns the value of the label `door`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Json => "json",
            Self::Check => "check",
        }
    }

    /// Returns the route in spans, with a name in place of each part of the path that may vary.
    pub const fn route(self) -> &'static str {
        match self {
            Self::Json => "/json",
            Self::Check => "/check/{domain}",
        }
    }
}

impl HttpRequests {
    /// Counts a request.
    pub(super) fn count(&self, door: HttpDoor) {
        self.0[door as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the number of requests so far.
    pub(super) fn of(&self, door: HttpDoor) -> u64 {
        self.0[door as usize].load(Ordering::Relaxed)
    }
}
