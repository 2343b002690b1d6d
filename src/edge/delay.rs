//! Delayed answers: calls that wait here because a limit delays them. Their number is bounded; calls beyond it are
//! refused.

use std::mem;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::time::Instant;

use crate::limiter::CallerTime;
use crate::model::{Decision, Micros, Outcome};
use crate::serve::memory::inflation::InflationTurn;

/// Time reserved for the answer after the delay: 3 ms, the same that the store's deadline reserves.
const OWN: Duration = Duration::from_millis(3);

/// Arrival of a call, and the time that its caller waits for the answer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Arrival {
    arrived: Instant,
    time: CallerTime,
}

/// Answer, and its delay.
#[derive(Debug)]
pub(super) struct Held<T> {
    pub(super) answer: T,
    pub(super) hold: Hold,
}

/// Delay of a call, and its permit during the delay.
#[derive(Debug, Default)]
pub(super) struct Hold {
    length: Duration,
    _permit: Option<Permit>,
}

/// Permits for delayed calls. Each delayed call is a stream of its connection and one of its caller's calls in flight.
/// Without a bound, one client could take all of them, and the calls of others would fail.
#[derive(Debug)]
pub(super) struct Permits {
    taken: AtomicUsize,
    most: usize,
    /// Permits of which each of these is one as well.
    of: Option<Arc<Permits>>,
}

#[derive(Debug)]
struct Permit {
    permits: Arc<Permits>,
    _of: Option<Box<Permit>>,
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.permits.taken.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Permits {
    /// Creates `most` permits.
    pub(super) fn new(most: usize) -> Arc<Self> {
        Arc::new(Self { taken: AtomicUsize::new(0), most, of: None })
    }

    /// Creates at most `most` permits, each of which is one of `self` as well.
    pub(super) fn at_most(self: &Arc<Self>, most: usize) -> Arc<Self> {
        Arc::new(Self { taken: AtomicUsize::new(0), most, of: Some(Arc::clone(self)) })
    }

    /// Returns the number of taken permits.
    pub(super) fn taken(&self) -> usize {
        self.taken.load(Ordering::Relaxed)
    }

    fn take(self: &Arc<Self>) -> Option<Permit> {
        let of = self.of.as_ref().map(|of| of.take().map(Box::new).ok_or(())).transpose().ok()?;
        let permit = |taken: usize| (taken < self.most).then_some(taken + 1);
        let taken = self.taken.fetch_update(Ordering::AcqRel, Ordering::Acquire, permit);
        taken.is_ok().then(|| Permit { permits: Arc::clone(self), _of: of })
    }
}

impl Arrival {
    /// Returns the arrival of a call that has just come.
    pub(super) fn now(time: impl Into<CallerTime>) -> Self {
        Self { arrived: Instant::now(), time: time.into() }
    }

    /// Returns the delay of `decision`: the delay that it asks for, but not longer than the caller waits. Subtracts it
    /// from the delay that Envoy adds. Turns the decision into a refusal if no permit is free, or if the delay is longer
    /// than the caller takes.
    pub(super) fn hold(self, decision: &mut Decision<'_>, permits: &Arc<Permits>) -> Hold {
        let longest = self.time.longest_delay.map(Micros::from);
        if longest.is_some() {
            // Nobody but this process would delay the request.
            let wait = &mut decision.wait;
            wait.hold = wait.hold.max(mem::take(&mut wait.header));
        }
        if decision.wait.hold == Micros::ZERO || decision.outcome != Outcome::Admitted {
            return Hold::default();
        }
        let is_too_long = longest.is_some_and(|longest| decision.wait.hold > longest);
        let Some(permit) = (!is_too_long).then(|| permits.take()).flatten() else {
            decision.outcome = Outcome::Refused;
            decision.retry = Some(decision.wait.hold);
            return Hold::default();
        };
        let asked = Duration::from_micros(decision.wait.hold.get());
        let passed = self.arrived.elapsed() + OWN;
        let length = self.time.left().map_or(asked, |left| asked.min(left.saturating_sub(passed)));
        let waited = Micros::from(length);
        decision.wait.header = decision.wait.header.saturating_sub(waited);
        Hold { length, _permit: Some(permit) }
    }
}

impl<T> Held<T> {
    /// Returns the answer when it is due. Dropping this is harmless: the charges were made before.
    pub(super) async fn over(self) -> T {
        self.hold.over().await;
        self.answer
    }
}

impl Hold {
    /// Waits until the answer is due.
    pub(super) async fn over(self) {
        if !self.length.is_zero() {
            InflationTurn::end();
            // Boxed, because a timer is large and hardly any call has one.
            Box::pin(tokio::time::sleep(self.length)).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;
    use crate::model::Wait;

    const MS: Duration = Duration::from_millis(1);

    /// Returns a decision that asks for 2 s here and 3 s at Envoy.
    fn waiting(outcome: Outcome) -> Decision<'static> {
        Decision {
            outcome,
            domain: None,
            answers: Vec::new(),
            parts: Vec::new(),
            ruling: None,
            retry: None,
            unavailable_for: None,
            wait: Wait { header: Micros::from_secs(3), hold: Micros::from_secs(2) },
            warnings: Vec::new(),
            known_good: None,
            hidden: Vec::new(),
            is_refusal_shadowed: false,
            is_too_large: false,
            generation: 1,
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_is_held_as_long_as_its_limit_asks_and_envoy_waits_for_the_rest() {
        let mut decision = waiting(Outcome::Admitted);
        let permits = Permits::new(8);
        let hold = Arrival::now(None).hold(&mut decision, &permits);
        assert_eq!((hold.length, decision.wait.header), (2_000 * MS, Micros::from_secs(1)));
        decision.wait = Wait { header: Micros::from_secs(1), hold: Micros::from_secs(2) };
        assert_eq!(Arrival::now(None).hold(&mut decision, &permits).length, 2_000 * MS);
        assert_eq!(decision.wait.header, Micros::ZERO, "it has waited longer than that");
        let began = Instant::now();
        assert_eq!(Held { answer: 7, hold }.over().await, 7);
        assert_eq!(began.elapsed(), 2_000 * MS);
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_is_never_held_beyond_what_its_caller_waits() {
        let arrival = Arrival::now(Some(500 * MS));
        advance(100 * MS).await;
        let mut decision = waiting(Outcome::Admitted);
        let permits = Permits::new(8);
        assert_eq!(arrival.hold(&mut decision, &permits).length, 397 * MS);
        assert_eq!(decision.wait.header, Micros::from_millis(2_603), "Envoy waits for what is not waited here");
        for waited in [397, 3, 1_000] {
            advance(waited * MS).await;
            let mut decision = waiting(Outcome::Admitted);
            let hold = arrival.hold(&mut decision, &permits);
            assert_eq!((hold.length, decision.wait.header), (Duration::ZERO, Micros::from_secs(3)));
        }
        let patient = Arrival::now(Some(60_000 * MS));
        assert_eq!(patient.hold(&mut waiting(Outcome::Admitted), &permits).length, 2_000 * MS);
    }

    #[tokio::test(start_paused = true)]
    async fn a_caller_with_a_longest_delay_is_held_whatever_the_delivery_and_refused_beyond() {
        let time = CallerTime { timeout: Some(160 * MS), longest_delay: Some(155 * MS), ..CallerTime::default() };
        let permits = Permits::new(8);
        let mut decision = waiting(Outcome::Admitted);
        assert_eq!(Arrival::now(time).hold(&mut decision, &permits).length, Duration::ZERO);
        assert_eq!((decision.outcome, decision.retry), (Outcome::Refused, Some(Micros::from_secs(3))));
        for delay in [1, 155] {
            let mut decision = waiting(Outcome::Admitted);
            decision.wait = Wait { header: Micros::from_millis(delay), hold: Micros::ZERO };
            let hold = Arrival::now(time).hold(&mut decision, &permits);
            assert_eq!((hold.length, decision.outcome), (Duration::from_millis(delay), Outcome::Admitted));
            assert_eq!(decision.wait.header, Micros::ZERO, "nobody else waits");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn who_is_refused_is_told_at_once() {
        let arrival = Arrival::now(None);
        let mut decision = waiting(Outcome::Refused);
        let hold = arrival.hold(&mut decision, &Permits::new(8));
        assert_eq!((hold.length, decision.wait.header), (Duration::ZERO, Micros::from_secs(3)));
        let began = Instant::now();
        Held { answer: (), hold }.over().await;
        assert_eq!(began.elapsed(), Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn calls_over_http_and_over_grpc_wait_within_one_bound() {
        let all = Permits::new(3);
        let http = all.at_most(2);
        let is_held = |permits: &Arc<Permits>| {
            let mut decision = waiting(Outcome::Admitted);
            let hold = Arrival::now(None).hold(&mut decision, permits);
            (decision.outcome == Outcome::Admitted).then_some(hold)
        };
        let first = is_held(&http).unwrap();
        let _second = is_held(&http).unwrap();
        assert!(is_held(&http).is_none(), "HTTP has a bound of its own");
        let _third = is_held(&all).unwrap();
        assert!(is_held(&all).is_none());
        drop(first);
        assert_eq!((http.taken(), all.taken()), (1, 2));
        let _fourth = is_held(&all).unwrap();
        assert!(is_held(&http).is_none(), "all permits are taken");
        assert_eq!((http.taken(), all.taken()), (1, 3));
    }

    #[tokio::test(start_paused = true)]
    async fn what_would_wait_beyond_the_room_there_is_is_refused_and_not_let_pass_early() {
        let permits = Permits::new(2);
        let hold = |decision: &mut Decision<'_>| Arrival::now(None).hold(decision, &permits);
        let first = hold(&mut waiting(Outcome::Admitted));
        let second = hold(&mut waiting(Outcome::Admitted));
        assert_eq!([first.length, second.length], [2_000 * MS; 2]);
        let mut third = waiting(Outcome::Admitted);
        assert_eq!(hold(&mut third).length, Duration::ZERO);
        assert_eq!((third.outcome, third.retry), (Outcome::Refused, Some(Micros::from_secs(2))));
        drop(first);
        assert_eq!(
            hold(&mut waiting(Outcome::Admitted)).length,
            2_000 * MS,
            "a caller that went away leaves its permit"
        );
    }
}
