//! What a store's servers owe those who watch them: how fast they answer, and why not.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use foldhash::HashMap;
use parking_lot::Mutex;

use super::histogram::Histogram;
use super::metrics::{STORE_BREAKER, STORE_FAILURES, STORE_ROUND_TRIP};
use super::page::Page;

/// Why a server did not answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// Not in time.
    TimedOut,
    /// There was no connection.
    Unreachable,
    /// It was known to be down, and was not asked.
    Down,
    /// Too many calls waited for it already.
    Overloaded,
    /// It answered with an error.
    Rejected,
}

impl Reason {
    const ALL: [(Self, &'static str); 5] = [
        (Self::TimedOut, "timed_out"),
        (Self::Unreachable, "unreachable"),
        (Self::Down, "down"),
        (Self::Overloaded, "overloaded"),
        (Self::Rejected, "rejected"),
    ];

    /// Its word in metrics and spans.
    pub const fn name(self) -> &'static str {
        Self::ALL[self as usize].1
    }
}

/// One server, as it is watched.
#[derive(Debug, Default)]
pub struct Server {
    round_trips: Histogram,
    failures: [AtomicU64; Reason::ALL.len()],
    is_breaker_open: AtomicBool,
}

/// The servers that somebody asks.
#[derive(Debug, Default)]
pub struct Servers(Mutex<HashMap<String, Weak<Server>>>);

impl Server {
    /// One write was answered.
    pub fn answered(&self, took: Duration) {
        self.round_trips.record(took);
    }

    /// Some charges were not answered.
    pub fn failed(&self, reason: Reason) {
        self.failures[reason as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// The breaker has opened or closed.
    pub fn set_breaker(&self, is_open: bool) {
        self.is_breaker_open.store(is_open, Ordering::Relaxed);
    }
}

impl Servers {
    /// The server of this name. It is told of for as long as somebody keeps it, so a cluster that changes leaves nothing behind.
    pub fn named(&self, name: &str) -> Arc<Server> {
        let mut servers = self.0.lock();
        servers.retain(|_, server| server.strong_count() > 0);
        if let Some(server) = servers.get(name).and_then(Weak::upgrade) {
            return server;
        }
        let server = Arc::default();
        servers.insert(name.to_owned(), Arc::downgrade(&server));
        server
    }

    /// Adds them to a page.
    pub(super) fn tell(&self, page: &mut Page) {
        let mut servers: Vec<(String, Arc<Server>)> = {
            let servers = self.0.lock();
            servers.iter().filter_map(|(name, server)| Some((name.clone(), server.upgrade()?))).collect()
        };
        servers.sort_unstable_by(|(one, _), (other, _)| one.cmp(other));
        page.family(&STORE_ROUND_TRIP, |family| {
            servers.iter().for_each(|(name, server)| family.histogram(&[name], &server.round_trips));
        });
        page.family(&STORE_FAILURES, |family| {
            for (name, server) in &servers {
                for ((_, reason), count) in Reason::ALL.iter().zip(&server.failures) {
                    family.sample(&[name, reason], count.load(Ordering::Relaxed));
                }
            }
        });
        page.family(&STORE_BREAKER, |family| {
            for (name, server) in &servers {
                family.sample(&[name], u8::from(server.is_breaker_open.load(Ordering::Relaxed)));
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(servers: &Servers) -> String {
        let mut page = Page::default();
        servers.tell(&mut page);
        page.into_text()
    }

    #[test]
    fn reasons_are_counted_where_their_names_stand() {
        for (index, (reason, _)) in Reason::ALL.into_iter().enumerate() {
            assert_eq!(reason as usize, index);
        }
    }

    #[test]
    fn a_server_is_told_of_for_as_long_as_somebody_asks_it() {
        let servers = Servers::default();
        let (first, again) = (servers.named("10.0.0.1:6379"), servers.named("10.0.0.1:6379"));
        first.failed(Reason::TimedOut);
        again.failed(Reason::TimedOut);
        again.set_breaker(true);
        let text = told(&servers);
        assert!(text.contains("failures_total{server=\"10.0.0.1:6379\",reason=\"timed_out\"} 2\n"), "{text}");
        assert!(text.contains("breaker_open{server=\"10.0.0.1:6379\"} 1\n"), "{text}");
        drop((first, again));
        assert!(!told(&servers).contains("10.0.0.1"));
    }
}
