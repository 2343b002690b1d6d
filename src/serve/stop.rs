//! Stop signal of the service.

use std::time::Duration;

use tokio::sync::watch;
use tokio::time::timeout;

/// Stop signal of the service, as one connection or listener receives it.
#[derive(Clone, Debug)]
pub(super) struct StopNotice(pub(super) watch::Receiver<bool>);

impl StopNotice {
    /// Returns true after the signal, or if its sender is gone.
    pub(super) fn is_set(&self) -> bool {
        *self.0.borrow() || self.0.has_changed().is_err()
    }

    /// Waits for the signal, or until its sender is gone.
    pub(super) async fn wait(&mut self) {
        let _ = self.0.wait_for(|stop| *stop).await;
    }

    /// Waits for the signal, at most for `length`.
    pub(super) async fn wait_at_most(&mut self, length: Duration) {
        let _ = timeout(length, self.wait()).await;
    }
}
