//! Metrics of a store's servers: latency, failures, load and breakers.

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
use super::page::Page;
use super::value::seconds;

/// Reason why a server did not answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureReason {
    /// No reply in time, to this call or any other.
    TimedOut,
    /// No reply in time, but replies to other calls: the server is busy.
    Late,
    /// No connection.
    Unreachable,
    /// The server was known to be down, so the call was not sent.
    Down,
    /// The server was too busy to answer in time, so the call was not sent.
    Overloaded,
    /// The server has no memory for a new counter.
    OutOfMemory,
    /// The server replied with an error.
    Rejected,
}

impl FailureReason {
    const ALL: [(Self, &'static str); 7] = [
        (Self::TimedOut, "timed_out"),
        (Self::Late, "late"),
        (Self::Unreachable, "unreachable"),
        (Self::Down, "down"),
        (Self::Overloaded, "overloaded"),
        (Self::OutOfMemory, "out_of_memory"),
        (Self::Rejected, "rejected"),
    ];

    /// Returns the name in metrics and spans.
    pub const fn name(self) -> &'static str {
        Self::ALL[self as usize].1
    }
}

/// Calls of one worker to a server, for the metrics.
#[derive(Debug, Default)]
pub struct WorkerCalls {
    /// Calls without a reply.
    pub in_flight: AtomicUsize,
    /// Maximum number of calls in flight.
    pub limit: AtomicUsize,
    /// Queue delay of the last call at the server, in microseconds.
    pub queue_delay_us: AtomicU64,
}

/// Reason why a reply ended its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BadReply {
    /// The reply is larger than its request allows.
    TooLarge,
    /// The reply does not follow the protocol.
    Malformed,
    /// No request is open for the reply.
    Unasked,
}

impl BadReply {
    const ALL: [(Self, &'static str); 3] =
        [(Self::TooLarge, "too_large"), (Self::Malformed, "malformed"), (Self::Unasked, "unasked")];
}

/// Metrics of one server.
#[derive(Debug, Default)]
pub struct Server {
    round_trips: Histogram,
    failures: [AtomicU64; FailureReason::ALL.len()],
    lost_undos: AtomicU64,
    bad_replies: [AtomicU64; BadReply::ALL.len()],
    /// Breakers of all callers, each true while it is open.
    breakers: Mutex<Vec<Weak<AtomicBool>>>,
    /// Calls of all workers.
    calls: Mutex<Vec<Weak<WorkerCalls>>>,
}

/// Metrics of all servers in use, by name.
#[derive(Debug, Default)]
pub struct ServerMetrics(Mutex<HashMap<String, Weak<Server>>>);

impl Server {
    /// Records the round trip of one write.
    pub fn answered(&self, took: Duration) {
        self.round_trips.record(took);
    }

    /// Counts `charges` charges without a reply.
    pub fn failed(&self, reason: FailureReason, charges: usize) {
        self.failures[reason as usize].fetch_add(charges as u64, Ordering::Relaxed);
    }

    /// Counts `charges` charges that could not be undone.
    pub fn lost_undo(&self, charges: usize) {
        self.lost_undos.fetch_add(charges as u64, Ordering::Relaxed);
    }

    /// Counts a reply that ended its connection.
    pub fn bad_reply(&self, reason: BadReply) {
        self.bad_replies[reason as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Adds the breaker of one caller; `is_open` is true while it is open.
    pub fn watch_breaker(&self, is_open: &Arc<AtomicBool>) {
        let mut breakers = self.breakers.lock();
        breakers.retain(|breaker| breaker.strong_count() > 0);
        breakers.push(Arc::downgrade(is_open));
    }

    /// Adds the calls of one worker.
    pub fn watch_calls(&self, calls: &Arc<WorkerCalls>) {
        let mut all = self.calls.lock();
        all.retain(|calls| calls.strong_count() > 0);
        all.push(Arc::downgrade(calls));
    }

    /// Returns the calls in flight and their maximum, summed over all workers, and the longest queue delay.
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

    /// Returns true if the server was used. A cluster's replicas are not, and are left out of the page.
    fn is_asked(&self) -> bool {
        let failed = self.failures.iter().chain(&self.bad_replies).any(|count| count.load(Ordering::Relaxed) > 0);
        failed || self.is_breaker_open() || self.round_trips.buckets().any(|(_, count)| count > 0)
    }
}

impl ServerMetrics {
    /// Returns the metrics of the server `name`. They stay on the page as long as a caller keeps them, so servers that leave
    /// a cluster disappear.
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

    /// Adds the metrics of the servers to the page.
    pub(super) fn write_to(&self, page: &mut Page) {
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
                for ((_, reason), count) in FailureReason::ALL.iter().zip(&server.failures) {
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

    fn told(servers: &ServerMetrics) -> String {
        let mut page = Page::default();
        servers.write_to(&mut page);
        page.into_text()
    }

    #[test]
    fn reasons_are_counted_where_their_names_stand() {
        for (index, (reason, _)) in FailureReason::ALL.into_iter().enumerate() {
            assert_eq!(reason as usize, index);
        }
        for (index, (reason, _)) in BadReply::ALL.into_iter().enumerate() {
            assert_eq!(reason as usize, index);
        }
    }

    #[test]
    fn a_server_is_told_of_for_as_long_as_somebody_asks_it() {
        let servers = ServerMetrics::default();
        let (first, again) = (servers.named("10.0.0.1:6379"), servers.named("10.0.0.1:6379"));
        assert!(!told(&servers).contains("10.0.0.1"), "nobody has asked it yet");
        first.failed(FailureReason::TimedOut, 1);
        again.failed(FailureReason::TimedOut, 2);
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
