//! The scripts that one worker has in flight to one server: as many as the server executes without delay, and no more. A call runs one
//! script or, on a cluster, one for each slot.
//!
//! A script that waits at the server waits behind the scripts of all clients, and may be too late when its turn comes. A call
//! that waits here is sent in order while it can be in time, and is shed at once when it cannot. The signal is the queue delay:
//! the time from sending to execution, less the smallest recent round trip. A window with a delay above a fifth of the time that
//! calls have lowers the limit to 8 scripts at least; only replies that are too late lower it further. A window in which all
//! permits were taken and no call was delayed raises it (additive increase and multiplicative decrease, as in TCP).

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};

use crate::telemetry::servers::WorkerCalls;

/// The limit at the beginning: 16 scripts. A server without delay raises it by half in each window.
const BEGIN: f64 = 16.0;
/// The least: a sixteenth of a script. Below 1, a call is followed by a pause: at a half, as long as the call took.
const LEAST: f64 = 1.0 / 16.0;
/// The least limit that delay alone leaves: 8 scripts. A path that has become 8 ms longer must not look like a queue: 8 scripts in
/// flight are a thousand a second then.
const LEAST_BY_DELAY: f64 = 8.0;
/// The most: 1,024 scripts. The queue to a connection's writer holds as many calls.
const MOST: f64 = 1_024.0;
/// The queue delay that is aimed at: a fifth of the time that calls have, at least 2 ms. The server has work while a reply and the
/// next call are on their way.
const TARGET: Duration = Duration::from_millis(2);
/// The part of the time of a call that its queue delay may take: a fifth. An ordinary call has 10 ms.
const PART_OF_BUDGET: u32 = 5;
/// Below this delay the limit grows by half in a window, above it by one script: a quarter of the target.
const IDLE: Duration = Duration::from_micros(500);
/// The least length of a window: 5 ms. Where replies take longer, it is as long as one takes.
const WINDOW: Duration = Duration::from_millis(5);
/// The growth in a window where there is delay, but most replies are in time: a tenth of a script. So a limit at which replies are
/// too late is tried in one window of ten.
const CREEP: f64 = 0.1;
/// The time for which a server counts as full after all its permits were taken: 100 ms.
const COUNTS_AS_FULL: Duration = Duration::from_millis(100);
/// The longest pause: 200 ms, the time from one probe to the next.
const LONGEST_PAUSE: Duration = Duration::from_millis(200);
/// The weight of one call in the mean time of calls: an eighth.
const MEAN_OF: u32 = 8;
/// A call waits only if it would be answered in time though all took half as long again as calls take on average: so at most 1
/// in 100 of those that wait are too late (`a_server_at_its_limit_goes_on_deciding`).
const MARGIN_TO_WAIT: f64 = 1.5;
/// A call that has waited is sent only if it is answered in time though it takes a quarter longer than calls take on average.
const MARGIN_TO_SEND: f64 = 1.25;

/// The place of a call among those that ask for a permit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallPriority {
    /// Behind those that wait. It is shed if it would not be answered in time.
    InOrder,
    /// Behind those that wait, and it does not wait itself.
    AtOnce,
    /// Before all others, and never shed: an undo, which makes room for them, or a call that loads the script for all.
    First,
    /// Only where nobody waits, and it does not wait itself: what is charged later.
    Spare,
}

/// The calls of one worker to one server.
#[derive(Debug)]
pub struct Concurrency {
    calls: Mutex<CallQueue<oneshot::Sender<Permit>>>,
    metrics: Arc<WorkerCalls>,
}

/// A place among the calls in flight. When it is dropped, the next waiting call gets it.
#[derive(Debug)]
pub struct Permit {
    of: Option<Arc<Concurrency>>,
    /// The scripts that the call runs.
    scripts: usize,
    began: Instant,
    /// True if a caller waits for the reply. Only then the queue delay is compared with the time that the call has.
    has_caller: bool,
    /// True if a call was sent with it. Only then its time counts for the mean time of calls.
    is_used: bool,
}

/// Measurement of one reply.
#[derive(Clone, Copy, Debug)]
pub struct Measured {
    /// Time of the reply.
    pub now: Instant,
    /// Time for which the call waited at the server.
    pub delay: Duration,
    /// Time that its caller had.
    pub budget: Duration,
    /// True if the server came to the call too late.
    pub is_late: bool,
}

impl Concurrency {
    /// Creates the calls to a server, none of them in flight.
    pub fn new(now: Instant) -> Self {
        let (calls, metrics) = (Mutex::new(CallQueue::new(now)), Arc::<WorkerCalls>::default());
        let concurrency = Self { calls, metrics };
        concurrency.show(&concurrency.calls.lock());
        concurrency
    }

    /// Returns its metrics.
    pub fn metrics(&self) -> &Arc<WorkerCalls> {
        &self.metrics
    }

    fn show<W>(&self, calls: &CallQueue<W>) {
        self.metrics.in_flight.store(calls.in_flight, Ordering::Relaxed);
        self.metrics.limit.store(calls.whole_limit(), Ordering::Relaxed);
    }

    /// Returns a permit for a call that asks at `now`, runs `scripts` scripts and has to be answered before `until`. `None` when the
    /// call would not be answered in time, or waited in vain.
    pub async fn permit(
        self: &Arc<Self>,
        now: Instant,
        scripts: usize,
        until: Instant,
        turn: CallPriority,
    ) -> Option<Permit> {
        // Only a call that waits needs a channel.
        let mut permitted = None;
        let asked = {
            let mut calls = self.calls.lock();
            let asked = calls.ask(now, scripts, until, turn, || {
                let (handle, permit) = oneshot::channel();
                permitted = Some(permit);
                handle
            });
            self.show(&calls);
            asked
        };
        match asked {
            PermitState::Permitted => Some(Permit::new(self, scripts, now)),
            PermitState::Shed => None,
            PermitState::Waits => timeout_at(until, permitted?).await.ok()?.ok(),
        }
        .map(|mut permit| {
            permit.has_caller = matches!(turn, CallPriority::InOrder | CallPriority::AtOnce);
            permit
        })
    }

    /// Returns the number of scripts that may be added to those in flight.
    pub fn room(&self) -> usize {
        let calls = self.calls.lock();
        calls.whole_limit().saturating_sub(calls.in_flight)
    }

    /// Returns true if it has had room for every call in the last 100 ms.
    pub fn has_capacity_to_spare(&self) -> bool {
        self.calls.lock().full_until <= Instant::now()
    }

    /// Takes a permit for `scripts` scripts back, with which a call was sent at `began`, if one was. Learns what was `measured` first.
    fn returned(self: &Arc<Self>, scripts: usize, began: Option<Instant>, measured: Option<Measured>) {
        let now = measured.map_or_else(Instant::now, |measured| measured.now);
        let permit = |handle: oneshot::Sender<Permit>, scripts| {
            let sent = handle.send(Permit::new(self, scripts, now));
            // A caller that has gone returns no permit.
            sent.map_err(|mut permit| permit.of = None).is_ok()
        };
        let mut calls = self.calls.lock();
        if let Some(measured) = measured {
            let delay_us = u64::try_from(measured.delay.as_micros()).unwrap_or(u64::MAX);
            self.metrics.queue_delay_us.store(delay_us, Ordering::Relaxed);
            calls.learn(measured);
        }
        calls.returned(now, scripts, began.map(|began| now.saturating_duration_since(began)), permit);
        self.show(&calls);
    }
}

impl Permit {
    fn new(of: &Arc<Concurrency>, scripts: usize, began: Instant) -> Self {
        Self { of: Some(Arc::clone(of)), scripts, began, has_caller: true, is_used: false }
    }

    /// Returns the permit and learns from the reply. Nothing is learnt where no caller waits.
    pub fn answered(mut self, measured: Measured) {
        if let Some(of) = self.of.take() {
            of.returned(self.scripts, Some(self.began), Some(measured).filter(|_| self.has_caller));
        }
    }

    /// Returns the time at which it was given.
    pub const fn began(&self) -> Instant {
        self.began
    }

    /// Marks that a call is sent with it.
    pub const fn used(mut self) -> Self {
        self.is_used = true;
        self
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if let Some(of) = self.of.take() {
            of.returned(self.scripts, self.is_used.then_some(self.began), None);
        }
    }
}

/// The calls in flight and those that wait, without a clock of their own.
#[derive(Debug)]
struct CallQueue<W> {
    /// In scripts, as `in_flight`.
    limit: f64,
    in_flight: usize,
    undos: WaitQueue<W>,
    waiting: WaitQueue<W>,
    /// The mean time from a permit to its return.
    mean: Duration,
    /// The end of the pause after the last call, at a limit below 1.
    paused_until: Instant,
    /// The end of the time for which it counts as full.
    full_until: Instant,
    window: MeasureWindow,
}

/// Calls that wait, in the order in which they came.
#[derive(Debug)]
struct WaitQueue<W> {
    calls: VecDeque<WaitingCall<W>>,
    /// The scripts of all of them.
    scripts: usize,
}

#[derive(Debug)]
struct WaitingCall<W> {
    until: Instant,
    scripts: usize,
    who: W,
}

/// Measurements from the replies of one window.
#[derive(Debug)]
struct MeasureWindow {
    ends: Instant,
    least_delay: Duration,
    /// The least time that one of these calls had.
    least_budget: Duration,
    replies: u32,
    late_replies: u32,
    /// True if all permits were taken at some time.
    was_full: bool,
}

/// The result of asking for a permit.
#[derive(Debug, PartialEq, Eq)]
enum PermitState {
    Permitted,
    Waits,
    Shed,
}

impl<W> CallQueue<W> {
    fn new(now: Instant) -> Self {
        Self {
            limit: BEGIN,
            in_flight: 0,
            undos: WaitQueue::new(),
            waiting: WaitQueue::new(),
            mean: Duration::ZERO,
            paused_until: now,
            full_until: now,
            window: MeasureWindow::new(now + WINDOW),
        }
    }

    fn ask(
        &mut self,
        now: Instant,
        scripts: usize,
        until: Instant,
        turn: CallPriority,
        who: impl FnOnce() -> W,
    ) -> PermitState {
        self.undos.drop_ended(now);
        self.waiting.drop_ended(now);
        let is_next = match turn {
            CallPriority::First => true,
            CallPriority::InOrder | CallPriority::AtOnce => self.waiting.is_empty() && !self.is_paused(now),
            CallPriority::Spare => self.waiting.is_empty() && !self.is_paused(now) && self.undos.is_empty(),
        };
        if is_next && self.fits(scripts) {
            self.in_flight += scripts;
            if !self.fits(1) {
                self.is_full(now);
            }
            return PermitState::Permitted;
        }
        if turn != CallPriority::Spare {
            self.is_full(now);
        }
        let can_wait = match turn {
            CallPriority::First => true,
            // Below 1, a pause follows the call that is in flight.
            CallPriority::InOrder => self.limit >= 1.0 && now + self.expected(scripts) <= until,
            CallPriority::AtOnce | CallPriority::Spare => false,
        };
        if !can_wait {
            return PermitState::Shed;
        }
        let queue = if turn == CallPriority::First { &mut self.undos } else { &mut self.waiting };
        queue.push(WaitingCall { until, scripts, who: who() });
        PermitState::Waits
    }

    fn is_full(&mut self, now: Instant) {
        self.window.was_full = true;
        self.full_until = now + COUNTS_AS_FULL;
    }

    /// Takes a permit for `scripts` scripts back, and permits the calls that wait for its room. A call that was sent with it took
    /// `took`. `permit` returns false when the one that it is given went away.
    fn returned(
        &mut self,
        now: Instant,
        scripts: usize,
        took: Option<Duration>,
        mut permit: impl FnMut(W, usize) -> bool,
    ) {
        self.in_flight -= scripts;
        if self.limit < 1.0 {
            self.waiting = WaitQueue::new();
        }
        if let Some(took) = took {
            if self.limit < 1.0 {
                self.paused_until = now + took.mul_f64(1.0 / self.limit - 1.0).min(LONGEST_PAUSE);
            }
            self.mean = if self.mean.is_zero() { took } else { (self.mean * (MEAN_OF - 1) + took) / MEAN_OF };
        }
        loop {
            let queue = if self.undos.is_empty() { &self.waiting } else { &self.undos };
            if !queue.calls.front().is_some_and(|next| self.fits(next.scripts)) {
                break;
            }
            let Some(next) = self.undos.pop().or_else(|| self.waiting.pop()) else { break };
            // A call that would be answered too late gives its turn to the next one.
            if next.until >= now + self.mean.mul_f64(MARGIN_TO_SEND) && permit(next.who, next.scripts) {
                self.in_flight += next.scripts;
            }
        }
    }

    fn learn(&mut self, Measured { now, delay, budget, is_late }: Measured) {
        let window = &mut self.window;
        window.least_delay = window.least_delay.min(delay);
        window.least_budget = window.least_budget.min(budget);
        window.replies += 1;
        window.late_replies += u32::from(is_late);
        if now < window.ends {
            return;
        }
        let is_late = window.late_replies * 2 > window.replies;
        let delay = window.least_delay;
        let target = TARGET.max(window.least_budget / PART_OF_BUDGET);
        let limit = self.limit;
        self.limit = match () {
            () if is_late => limit * 0.5,
            () if delay > target && limit > LEAST_BY_DELAY => {
                (limit * target.div_duration_f64(delay).clamp(0.5, 0.9)).max(LEAST_BY_DELAY)
            }
            () if !window.was_full => limit,
            () if delay > target => (limit + CREEP).min(LEAST_BY_DELAY),
            () if delay < IDLE => (limit * 1.5).max(limit + 1.0),
            () => limit + 1.0,
        }
        .clamp(LEAST, MOST);
        self.window = MeasureWindow::new(now + WINDOW.max(self.mean));
    }

    /// Returns the limit in whole scripts.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it is at most 1,024")]
    const fn whole_limit(&self) -> usize {
        if self.limit < 1.0 { 1 } else { self.limit as usize }
    }

    /// Returns whether there is room for a call that runs `scripts` scripts. One of more than the limit is sent alone.
    const fn fits(&self, scripts: usize) -> bool {
        self.in_flight == 0 || self.in_flight + scripts <= self.whole_limit()
    }

    fn is_paused(&self, now: Instant) -> bool {
        self.limit < 1.0 && now < self.paused_until
    }

    /// Returns the time until the reply to a call of `scripts` scripts that begins to wait now, and half as much again.
    #[expect(clippy::cast_precision_loss, reason = "there are far fewer than 2^52")]
    fn expected(&self, scripts: usize) -> Duration {
        let turns = (self.waiting.scripts + scripts) as f64 / self.whole_limit() as f64 + 1.0;
        self.mean.mul_f64(turns * MARGIN_TO_WAIT)
    }
}

impl<W> WaitQueue<W> {
    const fn new() -> Self {
        Self { calls: VecDeque::new(), scripts: 0 }
    }

    fn is_empty(&self) -> bool {
        self.calls.is_empty()
    }

    fn push(&mut self, call: WaitingCall<W>) {
        self.scripts += call.scripts;
        self.calls.push_back(call);
    }

    fn pop(&mut self) -> Option<WaitingCall<W>> {
        let next = self.calls.pop_front()?;
        self.scripts -= next.scripts;
        Some(next)
    }

    /// Drops the calls at the front whose time is over.
    fn drop_ended(&mut self, now: Instant) {
        while self.calls.front().is_some_and(|next| next.until <= now) {
            self.pop();
        }
    }
}

impl MeasureWindow {
    const fn new(ends: Instant) -> Self {
        Self {
            ends,
            least_delay: Duration::MAX,
            least_budget: Duration::MAX,
            replies: 0,
            late_replies: 0,
            was_full: false,
        }
    }
}

#[cfg(test)]
mod tests;
