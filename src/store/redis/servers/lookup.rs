//! Resolves a name beside the threads that decide.

use std::io;
use std::net::{IpAddr, SocketAddr};

use tokio::net::lookup_host;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout_at};

/// Addresses of a name, or of an IP literal. One lookup runs at a time: while a resolver hangs, no other lookup begins.
pub(super) struct Lookup {
    host: String,
    port: u16,
    running: Option<JoinHandle<io::Result<Vec<SocketAddr>>>>,
}

impl Lookup {
    /// Creates the lookup of `host`.
    pub(super) fn new(host: &str, port: u16) -> Self {
        Self { host: host.to_owned(), port, running: None }
    }

    /// Returns true if it is the lookup of `host`.
    pub(super) fn is_for(&self, host: &str, port: u16) -> bool {
        (self.host.as_str(), self.port) == (host, port)
    }

    /// Returns the addresses. Waits until `until`; a later call waits for the same lookup.
    ///
    /// # Errors
    /// If the lookup fails, or takes longer.
    pub(super) async fn addresses(&mut self, until: Instant) -> io::Result<Vec<SocketAddr>> {
        if let Ok(ip) = self.host.parse::<IpAddr>() {
            return Ok(vec![SocketAddr::new(ip, self.port)]);
        }
        let running = self.running.get_or_insert_with(|| {
            let (host, port) = (self.host.clone(), self.port);
            tokio::spawn(async move { Ok(lookup_host((host, port)).await?.collect()) })
        });
        let Ok(found) = timeout_at(until, running).await else {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "the name was not resolved in time"));
        };
        self.running = None;
        found.map_err(io::Error::other)?
    }
}
