//! A server that executes so many scripts a second, first come first served, and callers who ask it in a closed loop. Time is
//! simulated.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::*;

/// The time in which a caller needs its answer.
const BUDGET: Duration = Duration::from_millis(10);
/// The time from the server to a caller, and back.
const WAY: Duration = Duration::from_micros(40);
/// The time from an answer to the next call of the same caller.
const PAUSE: Duration = Duration::from_millis(2);

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// The caller calls.
    Call { caller: usize },
    /// The reply to a call that was sent then, and whose first script was executed then, is there.
    Reply { caller: usize, call: u64, until: Instant, sent: Instant, executed: Instant },
    /// The caller waits no longer.
    End { caller: usize, call: u64 },
    /// The server executes one script in this time from now on.
    Takes(Duration),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Doing {
    Nothing,
    WaitingCall,
    Sent,
}

struct Caller {
    call: u64,
    began: Instant,
    doing: Doing,
}

/// The calls of one simulated second.
#[derive(Debug, Default, Clone, Copy)]
struct Second {
    /// The server decided them in time.
    decided: usize,
    /// They waited for a permit.
    waited: usize,
    /// They waited for a permit in vain.
    expired: usize,
    /// They were sent, and the reply came too late.
    late: usize,
}

struct Simulation {
    began: Instant,
    events: BinaryHeap<Reverse<(Instant, Event)>>,
    lanes: Vec<CallQueue<(usize, u64)>>,
    callers: Vec<Caller>,
    takes: Duration,
    /// The scripts of one call.
    scripts: u32,
    /// The time by which the way to the server has become longer.
    more: Duration,
    server_is_free: Instant,
    seconds: Vec<Second>,
}

impl Simulation {
    /// `callers` of a server that executes `rate` scripts a second, through `lanes` workers.
    fn new(rate: u32, callers: usize, lanes: usize) -> Self {
        let began = Instant::now();
        let caller = |_| Caller { call: 0, began, doing: Doing::Nothing };
        let mut simulation = Self {
            began,
            events: BinaryHeap::new(),
            lanes: (0..lanes).map(|_| CallQueue::new(began)).collect(),
            callers: (0..callers).map(caller).collect(),
            takes: Duration::from_secs(1) / rate,
            scripts: 1,
            more: Duration::ZERO,
            server_is_free: began,
            seconds: Vec::new(),
        };
        for caller in 0..callers {
            let after = Duration::from_micros(u64::try_from(caller * 7 % 5_000).unwrap());
            simulation.at(began + after, Event::Call { caller });
        }
        simulation
    }

    fn at(&mut self, time: Instant, event: Event) {
        self.events.push(Reverse((time, event)));
    }

    /// Runs for so many seconds.
    fn run(mut self, seconds: usize) -> Vec<Second> {
        self.seconds = vec![Second::default(); seconds];
        while let Some(Reverse((now, event))) = self.events.pop() {
            let second = usize::try_from((now - self.began).as_secs()).unwrap();
            if second >= seconds {
                break;
            }
            match event {
                Event::Takes(takes) => self.takes = takes,
                Event::Call { caller } => self.call(now, second, caller),
                Event::End { caller, call } => {
                    if self.callers[caller].call == call {
                        match self.callers[caller].doing {
                            Doing::Nothing => continue,
                            Doing::WaitingCall => self.seconds[second].expired += 1,
                            Doing::Sent => self.seconds[second].late += 1,
                        }
                        self.end(now, caller);
                    }
                }
                Event::Reply { caller, call, until, sent, executed } => {
                    let lane = caller % self.lanes.len();
                    let delay = (executed - sent).saturating_sub(WAY);
                    self.lanes[lane].learn(Measured { now, delay, budget: BUDGET, is_late: now > until });
                    let mut permitted = Vec::new();
                    let callers = &self.callers;
                    let scripts = self.scripts as usize;
                    self.lanes[lane].returned(now, scripts, Some(now - sent), |(caller, call), _| {
                        let is_there = callers[caller].call == call && callers[caller].doing == Doing::WaitingCall;
                        permitted.extend(is_there.then_some(caller));
                        is_there
                    });
                    permitted.into_iter().for_each(|caller| self.send(now, caller));
                    if self.callers[caller].call == call && self.callers[caller].doing == Doing::Sent {
                        self.seconds[second].decided += 1;
                        self.end(now, caller);
                    }
                }
            }
        }
        self.seconds
    }

    fn call(&mut self, now: Instant, second: usize, caller: usize) {
        let Caller { call, began, .. } = &mut self.callers[caller];
        (*call, *began) = (*call + 1, now);
        let (call, until, lane) = (*call, now + BUDGET, caller % self.lanes.len());
        match self.lanes[lane].ask(now, self.scripts as usize, until, CallPriority::InOrder, || (caller, call)) {
            PermitState::Permitted => self.send(now, caller),
            PermitState::Waits => {
                self.seconds[second].waited += 1;
                self.callers[caller].doing = Doing::WaitingCall;
                self.at(until, Event::End { caller, call });
            }
            PermitState::Shed => self.end(now, caller),
        }
    }

    fn send(&mut self, now: Instant, caller: usize) {
        let Caller { call, began, doing } = &mut self.callers[caller];
        *doing = Doing::Sent;
        let (call, until) = (*call, *began + BUDGET);
        let executed = self.server_is_free.max(now + WAY + self.more) + self.takes;
        let done = executed + self.takes * (self.scripts - 1);
        self.server_is_free = done;
        self.at(until, Event::End { caller, call });
        self.at(done + WAY, Event::Reply { caller, call, until, sent: now, executed });
    }

    /// The call is answered, and the next one follows.
    fn end(&mut self, now: Instant, caller: usize) {
        self.callers[caller].call += 1;
        self.callers[caller].doing = Doing::Nothing;
        self.at(now + PAUSE, Event::Call { caller });
    }
}

#[tokio::test]
async fn a_server_at_its_limit_goes_on_deciding() {
    for lanes in [1, 2, 6] {
        for callers in [16, 64, 256, 1_024] {
            let second = Simulation::new(4_000, callers, lanes).run(2)[1];
            let offered = callers * 1_000 / 4;
            let most = offered.min(4_000);
            assert!(second.decided >= most * 9 / 10, "{callers} callers, {lanes} workers: {second:?} of {most}");
            // Workers know nothing of each other, so with many of them the wait is harder to foresee.
            let percent = if lanes > 2 { 20 } else { 1 };
            assert!(
                second.expired * 100 <= second.waited.max(300) * percent,
                "{callers} callers, {lanes} workers: {second:?}"
            );
        }
    }
}

#[tokio::test]
async fn a_server_at_its_limit_goes_on_deciding_calls_of_several_scripts() {
    for (lanes, callers, scripts) in [(1, 16, 4), (2, 16, 3), (2, 64, 3), (2, 256, 4), (2, 64, 12)] {
        let mut simulation = Simulation::new(4_000, callers, lanes);
        simulation.scripts = scripts;
        let second = simulation.run(2)[1];
        let done = second.decided * scripts as usize;
        assert!(done >= 3_600, "{callers} callers, {lanes} workers: {second:?}, {done} scripts of 4,000");
    }
}

#[test]
fn a_call_takes_a_place_for_each_of_its_scripts_and_one_beyond_the_limit_goes_alone() {
    let (now, until) = (Instant::now(), Instant::now() + Duration::from_secs(1));
    let mut calls = CallQueue::new(now);
    calls.limit = 8.0;
    assert_eq!(calls.ask(now, 5, until, CallPriority::InOrder, || "five"), PermitState::Permitted);
    assert_eq!(calls.ask(now, 4, until, CallPriority::InOrder, || "four"), PermitState::Waits);
    assert_eq!(
        calls.ask(now, 1, until, CallPriority::InOrder, || "one"),
        PermitState::Waits,
        "in the order in which they came"
    );
    assert_eq!(calls.ask(now, 100, until, CallPriority::InOrder, || "hundred"), PermitState::Waits);
    let mut returned = |scripts| {
        let mut permitted = Vec::new();
        calls.returned(now, scripts, Some(Duration::from_millis(1)), |who, scripts| {
            permitted.push((who, scripts));
            true
        });
        permitted
    };
    assert_eq!(returned(5), [("four", 4), ("one", 1)]);
    assert_eq!(returned(4), []);
    assert_eq!(returned(1), [("hundred", 100)]);
    assert_eq!((calls.in_flight, calls.waiting.scripts), (100, 0));
}

#[tokio::test]
async fn a_server_that_becomes_ten_times_slower_decides_what_it_can_and_is_back_within_a_second() {
    let mut simulation = Simulation::new(4_000, 100, 2);
    let began = simulation.began;
    for (second, takes) in [(2, Duration::from_micros(2_500)), (5, Duration::from_micros(250))] {
        simulation.at(began + Duration::from_secs(second), Event::Takes(takes));
    }
    let seconds = simulation.run(8);
    let decided: Vec<_> = seconds.iter().map(|second| second.decided).collect();
    assert!(decided[3] >= 320 && decided[4] >= 320, "{decided:?} of 400 a second");
    assert!(decided[6] >= 3_600 && decided[7] >= 3_600, "{decided:?} of 4,000 a second");
}

#[tokio::test]
async fn many_workers_share_a_server_that_takes_long() {
    for (rate, lanes, least) in [(400, 2, 320), (400, 6, 300), (4_000, 12, 3_200)] {
        let second = Simulation::new(rate, 200, lanes).run(3)[2];
        assert!(second.decided >= least, "{lanes} workers: {second:?} of {rate}");
    }
}

#[tokio::test]
async fn a_server_that_has_moved_8_ms_away_gets_all_calls() {
    let mut simulation = Simulation::new(100_000, 8, 2);
    simulation.more = Duration::from_millis(8);
    let second = simulation.run(2)[1];
    assert_eq!((second.expired, second.late), (0, 0), "{second:?}");
    assert!(second.decided >= 780, "{second:?}: 8 callers who call every 10.1 ms");
}

#[tokio::test]
async fn a_server_without_delay_gets_all_calls_at_once() {
    let second = Simulation::new(400_000, 200, 2).run(2)[1];
    assert_eq!((second.expired, second.late), (0, 0), "{second:?}");
    assert!(second.decided > 80_000, "{second:?}: 200 callers who call every 2.1 ms");
}

#[tokio::test]
async fn an_undo_goes_before_the_calls_that_wait_and_a_spare_permit_behind_them() {
    let (now, until) = (Instant::now(), Instant::now() + Duration::from_secs(1));
    let mut calls = CallQueue::new(now);
    calls.limit = 1.0;
    assert_eq!(calls.ask(now, 1, until, CallPriority::InOrder, || "first"), PermitState::Permitted);
    assert_eq!(calls.ask(now, 1, until, CallPriority::InOrder, || "second"), PermitState::Waits);
    assert_eq!(calls.ask(now, 1, until, CallPriority::First, || "undo"), PermitState::Waits);
    let mut next = || {
        let mut permitted = None;
        calls.returned(now, 1, Some(Duration::from_millis(1)), |who, _| permitted.replace(who).is_none());
        permitted
    };
    assert_eq!([next(), next(), next()], [Some("undo"), Some("second"), None]);
    let spare = |calls: &mut CallQueue<_>| calls.ask(now, 1, until, CallPriority::Spare, || "later");
    calls.in_flight = 1;
    assert_eq!(spare(&mut calls), PermitState::Shed, "there is no room");
    calls.in_flight = 0;
    assert_eq!(spare(&mut calls), PermitState::Permitted);
    calls.limit = 2.0;
    assert_eq!(calls.ask(now, 2, until, CallPriority::InOrder, || "third"), PermitState::Waits);
    assert_eq!(spare(&mut calls), PermitState::Shed, "another waits");
}

#[test]
fn below_a_limit_of_one_nobody_waits_for_the_end_of_the_pause_and_undos_do_not_pause() {
    let (now, until) = (Instant::now(), Instant::now() + Duration::from_secs(1));
    let mut calls = CallQueue::new(now);
    calls.limit = 1.0;
    assert_eq!(calls.ask(now, 1, until, CallPriority::InOrder, || "first"), PermitState::Permitted);
    assert_eq!(calls.ask(now, 1, until, CallPriority::InOrder, || "second"), PermitState::Waits);
    calls.limit = 0.5;
    assert_eq!(calls.ask(now, 1, until, CallPriority::InOrder, || "third"), PermitState::Shed);
    assert_eq!(calls.ask(now, 1, until, CallPriority::First, || "undo"), PermitState::Waits);
    let mut permitted = Vec::new();
    calls.returned(now, 1, Some(Duration::from_millis(20)), |who, _| {
        permitted.push(who);
        true
    });
    assert_eq!((permitted, calls.waiting.is_empty()), (vec!["undo"], true), "the second call is shed");
    calls.returned(now, 1, Some(Duration::from_millis(20)), |_, _| true);
    assert_eq!(calls.ask(now, 1, until, CallPriority::InOrder, || "fourth"), PermitState::Shed, "a pause of 20 ms");
    let after = now + Duration::from_millis(20);
    assert_eq!(calls.ask(after, 1, until, CallPriority::InOrder, || "fifth"), PermitState::Permitted);
}

#[test]
fn a_call_whose_time_is_over_holds_up_no_other() {
    let now = Instant::now();
    let [soon, later] = [10, 1_000].map(|ms| now + Duration::from_millis(ms));
    let mut calls = CallQueue::new(now);
    calls.limit = 8.0;
    assert_eq!(calls.ask(now, 5, later, CallPriority::InOrder, || "five"), PermitState::Permitted);
    assert_eq!(calls.ask(now, 8, soon, CallPriority::InOrder, || "eight"), PermitState::Waits);
    let just_before = soon - Duration::from_nanos(1);
    assert_eq!(calls.ask(just_before, 1, later, CallPriority::AtOnce, || "one"), PermitState::Shed);
    assert_eq!(calls.ask(soon, 1, later, CallPriority::AtOnce, || "one"), PermitState::Permitted);
}

#[tokio::test(start_paused = true)]
async fn a_server_that_was_never_full_has_capacity_to_spare() {
    let concurrency = Arc::new(Concurrency::new(Instant::now()));
    assert!(concurrency.has_capacity_to_spare());
    let until = Instant::now() + Duration::from_secs(1);
    let all = concurrency.permit(Instant::now(), concurrency.room(), until, CallPriority::InOrder).await;
    assert!(all.is_some() && !concurrency.has_capacity_to_spare());
    tokio::time::advance(COUNTS_AS_FULL).await;
    assert!(concurrency.has_capacity_to_spare());
}
