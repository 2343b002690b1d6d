//! What a store's servers owe those who watch them: how fast they answer, and why not.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use foldhash::HashMap;
use parking_lot::Mutex;

use super::histogram::Histogram;
use super::metrics::{
    STORE_BAD_REPLIES, STORE_BREAKER, STORE_CALLS, STORE_CALLS_LIMIT, STORE_FAILURES, STORE_LOST_UNDOS,
    STORE_QUEUE_DELAY, STORE_ROUND_TRIP,
};
use super::page::{Page, seconds};

/// Why a server did not answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// Not in time, and nobody else either.
    TimedOut,
    /// Not in time, though it answers others: it is busy.
    Late,
    /// There was no connection.
    Unreachable,
    /// It was known to be down, and was not asked.
    Down,
    /// It was too busy to answer in time, and was not asked.
    Overloaded,
    /// It answered with an error.
    Rejected,
}

impl Reason {
    const ALL: [(Self, &'static str); 6] = [
        (Self::TimedOut, "timed_out"),
        (Self::Late, "late"),
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

/// The calls of one worker to a server, as they are watched.
#[derive(Debug, Default)]
pub struct Calls {
    /// The calls that are not answered yet.
    pub in_flight: AtomicUsize,
    /// The most there may be.
    pub limit: AtomicUsize,
    /// The time that the last call waited at the server, in microseconds.
    pub queue_delay_us: AtomicU64,
}

/// Why a reply of a server ended its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BadReply {
    /// It is larger than its request allows.
    TooLarge,
    /// It is no reply of the protocol.
    Malformed,
    /// Nothing had asked for it.
    Unasked,
}

impl BadReply {
    const ALL: [(Self, &'static str); 3] =
        [(Self::TooLarge, "too_large"), (Self::Malformed, "malformed"), (Self::Unasked, "unasked")];
}

/// One server, as it is watched.
#[derive(Debug, Default)]
pub struct Server {
    round_trips: Histogram,
    failures: [AtomicU64; Reason::ALL.len()],
    lost_undos: AtomicU64,
    bad_replies: [AtomicU64; BadReply::ALL.len()],
    /// Of those who ask it, each with a breaker of its own.
    breakers: Mutex<Vec<Weak<AtomicBool>>>,
    /// Of each worker that asks it.
    calls: Mutex<Vec<Weak<Calls>>>,
}

/// The servers that somebody asks.
#[derive(Debug, Default)]
pub struct Servers(Mutex<HashMap<String, Weak<Server>>>);

impl Server {
    /// One write was answered.
    pub fn answered(&self, took: Duration) {
        self.round_trips.record(took);
    }

    /// So many charges were not answered.
    pub fn failed(&self, reason: Reason, charges: usize) {
        self.failures[reason as usize].fetch_add(charges as u64, Ordering::Relaxed);
    }

    /// So many charges could not be given back.
    pub fn lost_undo(&self, charges: usize) {
        self.lost_undos.fetch_add(charges as u64, Ordering::Relaxed);
    }

    /// Counts a reply that ended its connection.
    pub fn bad_reply(&self, reason: BadReply) {
        self.bad_replies[reason as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Watches the breaker of somebody who asks it: whether it is open.
    pub fn watch_breaker(&self, is_open: &Arc<AtomicBool>) {
        let mut breakers = self.breakers.lock();
        breakers.retain(|breaker| breaker.strong_count() > 0);
        breakers.push(Arc::downgrade(is_open));
    }

    /// Watches the calls of a worker.
    pub fn watch_calls(&self, calls: &Arc<Calls>) {
        let mut all = self.calls.lock();
        all.retain(|calls| calls.strong_count() > 0);
        all.push(Arc::downgrade(calls));
    }

    /// Returns the calls in flight and the most there may be, of all workers, and the longest queue delay.
    fn calls(&self) -> (usize, usize, u64) {
        let all = self.calls.lock();
        all.iter().filter_map(Weak::upgrade).fold((0, 0, 0), |(in_flight, limit, delay_us), calls| {
            (
                in_flight + calls.in_flight.load(Ordering::Relaxed),
                limit + calls.limit.load(Ordering::Relaxed),
                delay_us.max(calls.queue_delay_us.load(Ordering::Relaxed)),
            )
        })
    }

    fn is_breaker_open(&self) -> bool {
        let breakers = self.breakers.lock();
        breakers.iter().filter_map(Weak::upgrade).any(|is_open| is_open.load(Ordering::Relaxed))
    }

    /// Whether it was asked for anything. Of a cluster's replicas nobody needs to be told.
    fn is_asked(&self) -> bool {
        let failed = self.failures.iter().chain(&self.bad_replies).any(|count| count.load(Ordering::Relaxed) > 0);
        failed || self.is_breaker_open() || self.round_trips.buckets().any(|(_, count)| count > 0)
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
            let kept = servers.iter().filter_map(|(name, server)| Some((name.clone(), server.upgrade()?)));
            kept.filter(|(_, server)| server.is_asked()).collect()
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
        let calls: Vec<_> = servers.iter().map(|(name, server)| (name, server.calls())).collect();
        page.family(&STORE_CALLS, |family| calls.iter().for_each(|(name, calls)| family.sample(&[name], calls.0)));
        page.family(&STORE_CALLS_LIMIT, |family| {
            calls.iter().for_each(|(name, calls)| family.sample(&[name], calls.1));
        });
        page.family(&STORE_QUEUE_DELAY, |family| {
            calls.iter().for_each(|(name, calls)| family.sample(&[name], seconds(calls.2)));
        });
        page.family(&STORE_LOST_UNDOS, |family| {
            for (name, server) in &servers {
                family.sample(&[name], server.lost_undos.load(Ordering::Relaxed));
            }
        });
        page.family(&STORE_BAD_REPLIES, |family| {
            for (name, server) in &servers {
                for ((_, reason), count) in BadReply::ALL.iter().zip(&server.bad_replies) {
                    family.sample(&[name, reason], count.load(Ordering::Relaxed));
                }
            }
        });
        page.family(&STORE_BREAKER, |family| {
            for (name, server) in &servers {
                family.sample(&[name], u8::from(server.is_breaker_open()));
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
        for (index, (reason, _)) in BadReply::ALL.into_iter().enumerate() {
            assert_eq!(reason as usize, index);
        }
    }

    #[test]
    fn a_server_is_told_of_for_as_long_as_somebody_asks_it() {
        let servers = Servers::default();
        let (first, again) = (servers.named("10.0.0.1:6379"), servers.named("10.0.0.1:6379"));
        assert!(!told(&servers).contains("10.0.0.1"), "nobody has asked it yet");
        first.failed(Reason::TimedOut, 1);
        again.failed(Reason::TimedOut, 2);
        let (one, other) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(true)));
        [(&first, &one), (&again, &other)].iter().for_each(|(server, breaker)| server.watch_breaker(breaker));
        let text = told(&servers);
        assert!(text.contains("failures_total{server=\"10.0.0.1:6379\",reason=\"timed_out\"} 3\n"), "{text}");
        assert!(text.contains("breaker_open{server=\"10.0.0.1:6379\"} 1\n"), "{text}");
        first.bad_reply(BadReply::Unasked);
        let text = told(&servers);
        assert!(text.contains("bad_replies_total{server=\"10.0.0.1:6379\",reason=\"unasked\"} 1\n"), "{text}");
        drop(other);
        assert!(told(&servers).contains("breaker_open{server=\"10.0.0.1:6379\"} 0\n"), "{}", told(&servers));
        drop((first, again));
        assert!(!told(&servers).contains("10.0.0.1"));
    }
}
