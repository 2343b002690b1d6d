//! Notices to the service manager that started the process (`man 3 sd_notify`). Without one, they do nothing.

use std::convert::Infallible;

use sd_notify::NotifyState;

/// Says that the process waits for rules.
pub(super) fn waiting() {
    notify(&[NotifyState::Status("waiting for rules")]);
}

/// Says that all listeners serve.
pub(super) fn ready() {
    notify(&[NotifyState::Ready, NotifyState::Status("serving")]);
}

/// Says that a stop has begun.
pub(super) fn stopping() {
    notify(&[NotifyState::Stopping, NotifyState::Status("answering the calls in flight")]);
}

/// Says that the process is alive, twice in each interval of the watchdog, for ever. Without a watchdog it says nothing.
pub(super) async fn keep_alive() -> Infallible {
    let Some(interval) = sd_notify::watchdog_enabled() else { return std::future::pending().await };
    let mut due = tokio::time::interval(interval / 2);
    loop {
        due.tick().await;
        notify(&[NotifyState::Watchdog]);
    }
}

fn notify(notices: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(notices) {
        tracing::warn!(event = "systemd.not_notified", %error, "the service manager cannot be notified (NOTIFY_SOCKET): it may take this process for one that does not start");
    }
}
