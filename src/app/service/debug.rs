//! Routes of the debug listener, over the parts of the service.

use std::sync::Arc;

use tokio::sync::watch;

use super::Service;
use crate::admin::{self, Access, Shown};
use crate::app::admin_tokens::TokenFile;
use crate::app::log::Log;
use crate::app::sockets::Addresses;
use crate::app::xds;
use crate::edge::json::Readiness;
use crate::settings::Settings;

impl Service {
    /// Returns the routes of the debug listener at `addresses`. `stopped` is the signal of the stop.
    pub(super) fn debug_routes(
        &self,
        settings: &Settings,
        log: &Log,
        addresses: &Addresses,
        readiness: &Readiness,
        stopped: watch::Receiver<bool>,
    ) -> axum::Router {
        let shown = Shown {
            limiter: Arc::clone(&self.limiter),
            loaded: self.status.clone(),
            source: xds::description(settings, self.xds.clone()),
            level: log.level.clone(),
            readiness: readiness.clone(),
            records: self.telemetry.records(),
            stopped,
        };
        let gate = self.admin_tokens.as_ref().map(TokenFile::gate);
        admin::routes(shown, &Access::of(addresses.debug.ip(), gate))
    }
}
