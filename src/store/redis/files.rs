//! Polling of the TLS files that a connection needs, and log lines about files.

use std::time::Duration;

use tokio::time::sleep;

use crate::file::{Unusable, apart};
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
    loop {
        sleep(EVERY).await;
        let read = apart(read_again.clone(), |passed| report_slow(what, passed));
        match read.await {
            Ok(Ok(false)) => {}
            Ok(Ok(true)) => changed(),
            Ok(Err(error)) if complaints.is_due() => report_unreadable(what, &error),
            Ok(Err(_)) => {}
            // The panic hook has logged it.
            Err(_) => return,
        }
    }
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
