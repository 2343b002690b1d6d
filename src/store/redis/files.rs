//! Polling of the TLS files that a connection needs, and log lines about files.

use std::time::Duration;

use crate::file::{self, Unusable};
use crate::telemetry::throttle::LogThrottle;

/// Interval between two reads of a file: 1 s.
const EVERY: Duration = Duration::from_secs(1);

/// Calls `read_again` every second, for ever, and `changed` when the content has changed. `what` names the files in logs. Reads
/// happen on a thread of their own, one at a time: while a file system does not answer, the last good content stays in use and no
/// other read begins.
pub async fn follow<R>(what: &str, read_again: R, changed: impl Fn())
where
    R: Fn() -> Result<bool, Unusable> + Clone + Send + 'static,
{
    let complaints = LogThrottle::new();
    let apply = |read| match read {
        Ok(false) => {}
        Ok(true) => changed(),
        Err(error) if complaints.is_due() => report_unreadable(what, &error),
        Err(_) => {}
    };
    file::follow(EVERY, read_again, |passed| report_slow(what, passed), apply).await;
}

/// Logs that reading `what` has taken `passed` so far.
pub fn report_slow(what: &str, passed: Duration) {
    tracing::warn!(
        event = "store.file.slow",
        seconds = passed.as_secs(),
        "still reading {what}: its file system may be stuck; the last content stays in use"
    );
}

/// Logs that `what` cannot be used.
pub fn report_unreadable(what: &str, error: &Unusable) {
    tracing::warn!(event = "store.file.unreadable", %error, "{what} cannot be read; the last content stays in use");
}
