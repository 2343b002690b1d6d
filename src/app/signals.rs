//! Signals that stop the process.

use tokio::signal::unix::{Signal, SignalKind, signal};

/// The stop signals: SIGTERM, SIGINT and, as in the reference, SIGHUP.
pub(super) struct Signals([Signal; 3]);

impl Signals {
    /// Installs the handlers.
    ///
    /// # Errors
    /// If the system refuses a handler.
    pub(super) fn new() -> std::io::Result<Self> {
        // Without a handler SIGUSR1 and SIGUSR2 would end the process. tokio's handler stays for the life of the process.
        for ignored in [SignalKind::user_defined1(), SignalKind::user_defined2()] {
            drop(signal(ignored)?);
        }
        Ok(Self([signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?, signal(SignalKind::hangup())?]))
    }

    /// Waits for the next stop signal.
    pub(super) async fn wait(&mut self) {
        let [terminate, interrupt, hangup] = &mut self.0;
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
            _ = hangup.recv() => {}
        }
    }
}
