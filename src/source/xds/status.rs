//! State of the stream to a control plane, for metrics and the debug page.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// State of the stream to a control plane.
#[derive(Debug, Default)]
pub struct XdsStatus(Mutex<StreamState>);

/// Content of an [`XdsStatus`].
#[derive(Clone, Debug, Default)]
pub struct StreamState {
    /// True while there is a stream.
    pub is_connected: bool,
    /// Number of responses that were acknowledged.
    pub acknowledged: u64,
    /// Number of responses that were refused.
    pub refused: u64,
    /// Number of streams that ended, and of attempts to open one that failed.
    pub disconnected: u64,
    /// Response that was acknowledged last.
    pub last_acknowledged: Option<Answered>,
    /// Response that was refused last.
    pub last_refused: Option<Answered>,
    /// Time of the next attempt to connect, and the reason why there is no stream.
    pub next_attempt: Option<(Instant, String)>,
    /// End of the time for which the rules in force stay although the control plane has sent an empty set.
    pub held_until: Option<Instant>,
    /// Time until which the client certificate of the last connection is valid, in seconds since 1970; `None` without one.
    pub client_expiry: Option<u64>,
    /// Time at which rules of the state directory came into force, and their age then; `None` if the control plane has sent rules
    /// since.
    pub restored: Option<(Instant, Duration)>,
}

/// A response and its answer.
#[derive(Clone, Debug)]
pub struct Answered {
    /// Version of the rules.
    pub version: String,
    /// Time of the answer.
    pub at: Instant,
    /// All reasons of a refusal; empty for an acknowledgement.
    pub reasons: String,
}

impl XdsStatus {
    /// Returns a copy of the state.
    pub fn get(&self) -> StreamState {
        self.0.lock().clone()
    }

    /// Changes the state.
    pub(super) fn set(&self, change: impl FnOnce(&mut StreamState)) {
        change(&mut self.0.lock());
    }
}

impl StreamState {
    /// Returns the age of the rules in force if they are from the state directory and the control plane has not sent rules since.
    pub fn age_of_restored(&self) -> Option<Duration> {
        self.restored.map(|(since, age)| since.elapsed().saturating_add(age))
    }
}
