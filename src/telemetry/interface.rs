//! Interfaces of the HTTP listener.

use std::sync::atomic::{AtomicU64, Ordering};

/// Interface of the HTTP listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HttpInterface {
    /// `/json`.
    Json,
    /// `/check`.
    Check,
}

/// Numbers of requests by interface.
#[derive(Debug, Default)]
pub(super) struct HttpRequests([AtomicU64; HttpInterface::ALL.len()]);

impl HttpInterface {
    /// All interfaces, in the order of the metric's series.
    pub const ALL: [Self; 2] = [Self::Json, Self::Check];

    /// Returns the value of the label `interface`.
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
    pub(super) fn count(&self, interface: HttpInterface) {
        self.0[interface as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the number of requests so far.
    pub(super) fn of(&self, interface: HttpInterface) -> u64 {
        self.0[interface as usize].load(Ordering::Relaxed)
    }
}
