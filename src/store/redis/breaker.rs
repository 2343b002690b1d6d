//! A circuit breaker: a node that has failed for long enough gets no calls until a probe succeeds.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// Failures in a row that raise a suspicion, if they last long enough: 20.
const FAILURES: u32 = 20;
/// The least time over which they occur: 100 ms.
const FAILING: Duration = Duration::from_millis(100);
/// Time for which a suspicion is checked before the breaker opens: 100 ms. So a pause of 150 ms, such as a slow fork, opens none.
const CHECKING: Duration = Duration::from_millis(100);
/// The longest time of an answer that closes an open breaker: 100 ms. A node that answers within it is busy or far, not silent.
pub const IN_TIME: Duration = Duration::from_millis(100);

/// The circuit breaker of one node.
///
/// After 20 failures in a row over at least 100 ms the node is suspected. Probes check it for another 100 ms; if none of them is
/// answered, the breaker opens, and only a probe or a charge that is answered within 100 ms closes it.
#[derive(Debug, Default)]
pub struct Breaker {
    /// Copies of the state under the lock, for readers without the lock.
    is_open: Arc<AtomicBool>,
    is_failing: AtomicBool,
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    phase: BreakerPhase,
    failures: u32,
    /// The longest time that one of the failed calls waited.
    needed: Duration,
}

#[derive(Debug, Default, Clone, Copy)]
enum BreakerPhase {
    #[default]
    Closed,
    Failing {
        since: Instant,
    },
    Suspected {
        until: Instant,
    },
    Open {
        next_probe: Instant,
    },
}

impl Breaker {
    /// Returns the time of the next probe if the breaker is open for a call with this `budget`.
    ///
    /// A call that can wait more than twice as long as the calls that failed is let through: the node may answer it in time.
    pub fn next_probe(&self, budget: Duration) -> Option<Instant> {
        if !self.is_open.load(Ordering::Acquire) {
            return None;
        }
        let inner = self.inner.lock();
        match inner.phase {
            BreakerPhase::Open { next_probe } if budget <= inner.needed * 2 => Some(next_probe),
            _ => None,
        }
    }

    /// Returns a flag that is true while the breaker is open.
    pub fn is_open(&self) -> &Arc<AtomicBool> {
        &self.is_open
    }

    /// Returns true if the node is not suspected and the breaker is not open.
    pub fn is_trusted(&self) -> bool {
        matches!(self.inner.lock().phase, BreakerPhase::Closed | BreakerPhase::Failing { .. })
    }

    /// Notes that a charge was answered after the time `took`. An answer of any age shows that the node is not silent, but an open
    /// breaker is closed only by one that took at most 100 ms: otherwise a node that answers later than that would open and close it
    /// again and again.
    pub fn answered(&self, took: Duration) {
        if self.is_failing.load(Ordering::Relaxed) {
            let mut inner = self.inner.lock();
            if took <= IN_TIME || !matches!(inner.phase, BreakerPhase::Open { .. }) {
                self.rest(&mut inner);
            }
        }
    }

    /// Forgets all failures.
    pub fn forget(&self) {
        self.rest(&mut self.inner.lock());
    }

    /// Notes that a charge waited in vain for the time `waited`. Returns true if this raises a suspicion.
    pub fn failed(&self, now: Instant, waited: Duration) -> bool {
        let mut inner = self.inner.lock();
        self.is_failing.store(true, Ordering::Release);
        inner.failures = inner.failures.saturating_add(1);
        inner.needed = inner.needed.max(waited);
        match inner.phase {
            BreakerPhase::Closed => {
                inner.phase = BreakerPhase::Failing { since: now };
                false
            }
            BreakerPhase::Failing { since } if inner.failures >= FAILURES && now.duration_since(since) >= FAILING => {
                inner.phase = BreakerPhase::Suspected { until: now + CHECKING };
                true
            }
            BreakerPhase::Failing { .. } | BreakerPhase::Suspected { .. } | BreakerPhase::Open { .. } => false,
        }
    }

    /// Returns true if a probe is due.
    pub fn is_probe_due(&self, now: Instant) -> bool {
        match self.inner.lock().phase {
            BreakerPhase::Closed | BreakerPhase::Failing { .. } => false,
            BreakerPhase::Suspected { .. } => true,
            BreakerPhase::Open { next_probe } => next_probe <= now,
        }
    }

    /// Notes that a probe was answered in time. Returns true if this closes an open breaker.
    pub fn passed(&self) -> bool {
        let mut inner = self.inner.lock();
        let was_open = matches!(inner.phase, BreakerPhase::Open { .. });
        self.rest(&mut inner);
        was_open
    }

    /// Notes that a probe was not answered in time; the next one is due at `next_probe`. Returns true if this opens the breaker.
    pub fn missed(&self, now: Instant, next_probe: Instant) -> bool {
        let mut inner = self.inner.lock();
        let opens = match inner.phase {
            BreakerPhase::Suspected { until } => until <= now,
            BreakerPhase::Open { .. } => true,
            BreakerPhase::Closed | BreakerPhase::Failing { .. } => false,
        };
        let was_open = matches!(inner.phase, BreakerPhase::Open { .. });
        if opens {
            inner.phase = BreakerPhase::Open { next_probe };
            self.is_open.store(true, Ordering::Release);
        }
        opens && !was_open
    }

    fn rest(&self, inner: &mut Inner) {
        *inner = Inner::default();
        self.is_failing.store(false, Ordering::Release);
        self.is_open.store(false, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WAITED: Duration = Duration::from_millis(10);

    fn ms(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    fn failing(began: Instant, calls: u64, over: Duration) -> (Breaker, bool) {
        let breaker = Breaker::default();
        let step = over / u32::try_from(calls - 1).unwrap();
        let raised = (0..calls).map(|call| breaker.failed(began + step * u32::try_from(call).unwrap(), WAITED));
        let suspected = raised.collect::<Vec<_>>().into_iter().any(|suspected| suspected);
        (breaker, suspected)
    }

    #[tokio::test]
    async fn it_takes_both_twenty_failures_and_a_tenth_of_a_second() {
        let began = Instant::now();
        assert!(!failing(began, 1_000, ms(99)).1, "many in a short time");
        assert!(!failing(began, 19, ms(5_000)).1, "few over a long time");
        assert!(failing(began, 21, ms(100)).1);
    }

    #[tokio::test]
    async fn without_a_suspicion_no_probe_is_due() {
        let began = Instant::now();
        assert!(!Breaker::default().is_probe_due(began));
        assert!(
            !failing(began, 19, ms(5_000)).0.is_probe_due(began + ms(5_000)),
            "charges fail, but not enough of them"
        );
    }

    #[tokio::test]
    async fn one_success_among_many_failures_begins_anew() {
        let began = Instant::now();
        let breaker = Breaker::default();
        for call in 0..1_000 {
            assert!(!breaker.failed(began + ms(call * 10), WAITED));
            if call % 19 == 18 {
                breaker.answered(ms(500));
            }
        }
    }

    #[tokio::test]
    async fn a_suspicion_opens_it_only_when_no_probe_is_answered_for_a_tenth_of_a_second() {
        let began = Instant::now();
        let (breaker, _) = failing(began, 21, ms(100));
        let at = |millis| began + ms(millis);
        assert!(breaker.is_probe_due(at(100)));
        assert!(!breaker.missed(at(199), at(400)));
        assert_eq!(breaker.next_probe(WAITED), None, "still asked");
        assert!(breaker.missed(at(200), at(400)), "it opens");
        assert!(breaker.is_open().load(Ordering::Acquire), "the metric shows it");
        assert_eq!(breaker.next_probe(WAITED), Some(at(400)));
        assert!(!breaker.is_probe_due(at(399)), "no probe before it is due");
        assert!(breaker.is_probe_due(at(400)));
        assert!(!breaker.missed(at(400), at(600)), "it is open already");
        assert!(breaker.passed());
        assert_eq!((breaker.next_probe(WAITED), breaker.is_trusted()), (None, true));
        assert!(!breaker.is_open().load(Ordering::Acquire), "the metric shows that it is closed");
    }

    #[tokio::test]
    async fn a_pause_that_ends_while_it_is_checked_opens_nothing() {
        let began = Instant::now();
        let (breaker, suspected) = failing(began, 21, ms(100));
        assert!(suspected);
        assert!(!breaker.missed(began + ms(140), began + ms(400)));
        assert!(!breaker.passed());
        assert!(breaker.is_trusted());
    }

    #[tokio::test]
    async fn a_late_answer_ends_a_suspicion_and_leaves_an_open_breaker_open() {
        let began = Instant::now();
        let (breaker, suspected) = failing(began, 21, ms(100));
        assert!(suspected);
        breaker.answered(ms(500));
        assert!(breaker.is_trusted());
        let (breaker, _) = failing(began, 21, ms(100));
        assert!(breaker.missed(began + ms(300), began + ms(500)));
        breaker.answered(ms(101));
        assert!(breaker.next_probe(WAITED).is_some(), "too late for everybody");
        breaker.answered(ms(100));
        assert_eq!(breaker.next_probe(WAITED), None, "too late for callers in a hurry is overload");
    }

    #[tokio::test]
    async fn callers_in_a_hurry_do_not_shut_out_those_who_can_wait() {
        let began = Instant::now();
        let (breaker, _) = failing(began, 21, ms(100));
        assert!(breaker.missed(began + ms(300), began + ms(500)));
        assert!(breaker.next_probe(WAITED * 2).is_some());
        assert_eq!(breaker.next_probe(WAITED * 2 + ms(1)), None);
        breaker.failed(began + ms(301), ms(100));
        assert!(breaker.next_probe(ms(100)).is_some(), "he failed too");
        breaker.answered(ms(100));
        assert_eq!(
            (breaker.next_probe(WAITED), breaker.is_trusted()),
            (None, true),
            "one who can wait longer was answered"
        );
    }
}
