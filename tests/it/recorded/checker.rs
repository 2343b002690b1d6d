//! What `docs/guarantees.md` and `docs/algorithms.md` promise, compared with a recorded history, by arithmetic of its own.
//!
//! A charge of a call was made at some time between the moments at which the call was sent and answered. A promise counts as broken only if
//! it is broken wherever in these spans the charges were made.

use std::fmt::{self, Write as _};

use tonic::Code;

mod tests;

/// Microseconds since the epoch, by the clock that the servers have too.
pub type Time = u64;

pub const SECOND: Time = 1_000_000;
/// The longest time for which a call may wait for its answer, and that in medians: where every other call takes long, the machine is busy.
const IN_TIME: Time = 5 * SECOND;
const IN_TIME_MEDIANS: Time = 10;
/// The time after which a caller waits no longer (`support::PATIENCE`), less what a timer may be early.
const GIVEN_UP: Time = 59 * SECOND;
/// The time after an answer by policy in which the charge may still be executed: a server finds a command late by its deadline, in RESP2 up
/// to 1 s after it.
const LATE: Time = 1_500_000;
/// The time for which an instance repeats a refusal after the server would admit again: replies take time.
const REPEATED: Time = 250_000;

/// The way in which a counter counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counting {
    FixedWindow,
    SlidingWindow,
    SlidingLog,
    /// `token_bucket`, `leaky_bucket` and `gcra`.
    Meter {
        burst: u64,
    },
}

/// One counter, and the terms of its rule.
#[derive(Clone, Debug)]
pub struct Counter {
    pub name: String,
    pub counting: Counting,
    pub window: Time,
    /// The smallest limit and the largest one that were in force.
    pub limits: [u64; 2],
    /// The most hits that leases hold, and the time for which they do.
    pub leased: u64,
    pub leased_for: Time,
    pub policy: &'static str,
    /// True if one step decides each call, and nothing is given back: then hits that fit are never refused.
    pub is_one_step: bool,
}

/// The answer to a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    Admitted,
    Refused,
    /// These policies answered.
    Policy {
        names: Vec<String>,
        is_admitted: bool,
    },
    Failed(Code),
}

#[derive(Clone, Debug)]
pub struct Call {
    pub instance: usize,
    /// The counters that it charges, each by its place in the history.
    pub counters: Vec<usize>,
    pub hits: u64,
    pub sent: Time,
    pub answered: Time,
    pub answer: Answer,
    /// The origin of the answer, for those who read the history.
    pub provenance: String,
}

/// What was done to the servers or to an instance.
#[derive(Clone, Debug)]
pub struct Fault {
    pub name: String,
    pub from: Time,
    /// The time at which all was well again.
    pub to: Time,
    /// The counters whose server may have forgotten hits.
    pub forgotten: Vec<usize>,
    /// The instance that was killed.
    pub killed: Option<usize>,
}

#[derive(Clone, Debug, Default)]
pub struct History {
    /// The time from which lines about it count theirs.
    pub began: Time,
    pub counters: Vec<Counter>,
    pub instances: u64,
    pub calls: Vec<Call>,
    pub faults: Vec<Fault>,
    /// Keys in Redis that never expire.
    pub endless: Vec<String>,
}

/// A promise that was not kept, and the part of the history that shows it.
#[derive(Clone, Debug)]
pub struct Breach {
    pub what: String,
    counter: Option<usize>,
    from: Time,
    to: Time,
}

/// Hits, and the span in which they were charged.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Span {
    from: Time,
    to: Time,
    hits: u64,
}

impl Fault {
    fn touches(&self, from: Time, to: Time) -> bool {
        self.from <= to && self.to >= from
    }
}

impl Counter {
    /// The most hits in any interval from `from` to `to`, of which the last one is at `last` at the earliest, while no server forgets any.
    fn most(&self, from: Time, last: Time, to: Time) -> u64 {
        let [_, limit] = self.limits;
        let window = self.window;
        // Windows that end with the interval and cover it, and windows of the clock.
        let (lengths, windows) = ((to - from) / window + 1, to / window - from / window + 1);
        match self.counting {
            Counting::FixedWindow => limit * windows,
            Counting::SlidingWindow => {
                // The share of the present window that has passed: all of it, if the last hit may be at the end of one.
                let passed = if last / window == to / window { to % window } else { window };
                (lengths * (limit + (limit * passed).div_ceil(window))).min(limit * windows) + self.leased
            }
            Counting::SlidingLog => limit * lengths,
            Counting::Meter { burst } => burst + limit * (to - from + self.tick()) / window + self.leased,
        }
    }

    /// The smallest power of ten microseconds of which a window has at most 2^20.
    fn tick(&self) -> Time {
        (0..)
            .map(|power| 10_u64.pow(power))
            .find(|tick| self.window / tick <= 1 << 20)
            .expect("some power is large enough")
    }

    /// The time after which no hit of an earlier call counts.
    fn memory(&self) -> Time {
        let drained = match self.counting {
            Counting::Meter { burst } => burst * self.window / self.limits[0],
            _ => 0,
        };
        (2 * self.window).max(drained) + self.leased_for
    }

    /// The charge that a call may have made.
    fn charge(&self, call: &Call) -> Option<Span> {
        let late = match call.answer {
            Answer::Admitted => 0,
            // Refused hits count in fixed windows, and what is to be given back may be lost.
            Answer::Refused if self.counting == Counting::FixedWindow || !self.is_one_step => 0,
            Answer::Refused => return None,
            Answer::Policy { .. } | Answer::Failed(_) => LATE,
        };
        Some(Span { from: call.sent, to: call.answered + late, hits: call.hits })
    }

    /// The most hits that can stand against a call which is decided between `from` and `to`, by other charges that begin before `to`. `before` is
    /// the level of a meter by the charges that end before `from`, at the end of the last of them.
    fn used(&self, charges: &[Span], before: (u64, Time), from: Time, to: Time) -> u64 {
        let window = self.window;
        let sum = |is_meant: &dyn Fn(&Span) -> bool| -> u64 {
            charges.iter().filter(|span| is_meant(span)).map(|span| span.hits).sum()
        };
        let windows = from / window..=to / window;
        let within = |number: Time| move |span: &Span| span.from / window <= number && span.to / window >= number;
        match self.counting {
            Counting::FixedWindow => windows.map(|number| sum(&within(number))).max().unwrap_or(0),
            Counting::SlidingWindow => {
                let used = |number: Time| {
                    let is_present = within(number);
                    let is_previous = |span: &Span| span.to / window == number - 1;
                    let left = window - from.max(number * window) % window;
                    sum(&is_present) + (sum(&is_previous) * left).div_ceil(window)
                };
                windows.map(used).max().unwrap_or(0) + 1
            }
            Counting::SlidingLog => sum(&|span| span.to + window >= from),
            Counting::Meter { .. } => {
                let (level, at) = before;
                let level = level.saturating_sub(self.limits[0] * (from - at));
                level.div_ceil(window) + sum(&|span| span.to >= from) + 1
            }
        }
    }

    /// The level of a meter after each charge, in parts of a hit of which a window has as many as microseconds, by charges that are made as
    /// late as they can be.
    fn levels(&self, charges: &[Span]) -> Vec<(u64, Time)> {
        let (mut level, mut at) = (0_u64, 0);
        let mut after = |span: &Span| {
            level = level.saturating_sub(self.limits[0] * (span.to - at)) + span.hits * self.window;
            at = span.to;
            (level, at)
        };
        charges.iter().map(&mut after).collect()
    }
}

impl History {
    /// The same with spans that are longer by `drift` at either end: by so much the clocks may differ.
    pub fn widened(mut self, drift: Time) -> Self {
        for call in &mut self.calls {
            (call.sent, call.answered) = (call.sent - drift, call.answered + drift);
        }
        self
    }

    /// The promises that were not kept.
    pub fn check(&self) -> Vec<Breach> {
        let in_time = IN_TIME + IN_TIME_MEDIANS * self.median();
        let mut breaches: Vec<_> = self.calls.iter().filter_map(|call| self.answer(call, in_time)).collect();
        for number in 0..self.counters.len() {
            breaches.extend(self.too_many(number));
            breaches.extend(self.too_many_by_local(number));
        }
        breaches.extend(self.refused_in_vain());
        let endless = |key: &String| Breach { what: format!("{key} never expires"), counter: None, from: 0, to: 0 };
        breaches.extend(self.endless.iter().map(endless));
        breaches
    }

    /// The time that every other call took at least.
    pub fn median(&self) -> Time {
        let mut times: Vec<_> = self.calls.iter().map(|call| call.answered - call.sent).collect();
        times.sort_unstable();
        times.get(times.len() / 2).copied().unwrap_or(0)
    }

    /// Checks that a call was answered in time, and as its policy says.
    fn answer(&self, call: &Call, in_time: Time) -> Option<Breach> {
        let policies: Vec<_> = call.counters.iter().map(|counter| self.counters[*counter].policy).collect();
        let is_killed = |fault: &&Fault| fault.killed == Some(call.instance) && fault.touches(call.sent, call.answered);
        if self.faults.iter().any(|fault| is_killed(&fault)) {
            return None;
        }
        let what = match &call.answer {
            _ if call.answered - call.sent > in_time => "is answered too late",
            // The caller gave up, on a machine that makes everybody wait.
            Answer::Failed(Code::DeadlineExceeded) if call.answered - call.sent >= GIVEN_UP => return None,
            Answer::Failed(Code::Unavailable) if policies.contains(&"error") => return None,
            Answer::Failed(_) => "ends with an error",
            Answer::Policy { names, .. } if !names.iter().all(|name| policies.contains(&&**name)) => {
                "is answered by a policy that its rule does not name"
            }
            Answer::Policy { names, is_admitted: true } if names.iter().any(|name| name == "closed") => {
                "is admitted by the policy `closed`"
            }
            Answer::Policy { names, is_admitted: false } if names.iter().all(|name| name == "open") => {
                "is refused by the policy `open`"
            }
            _ => return None,
        };
        let what = format!("a call {what}: {}", self.line(call));
        Some(Breach { what, counter: call.counters.first().copied(), from: call.sent, to: call.answered })
    }

    /// The calls of a counter.
    fn calls_of(&self, counter: usize) -> impl Iterator<Item = &Call> {
        self.calls.iter().filter(move |call| call.counters.contains(&counter))
    }

    /// Checks what the store admitted for a counter, over every interval.
    fn too_many(&self, number: usize) -> Option<Breach> {
        let counter = &self.counters[number];
        let losses: Vec<_> = self.faults.iter().filter(|fault| fault.forgotten.contains(&number)).collect();
        let most = |from: Time, last: Time, to: Time| {
            // Hits that were leased before their charge was forgotten are spent after it.
            let from_lease = from.saturating_sub(counter.leased_for);
            let losses = losses.iter().filter(|fault| fault.touches(from_lease, to)).count() as u64;
            counter.most(from, last, to) + counter.limits[1] * losses
        };
        self.over(number, |call| call.answer == Answer::Admitted, most)
    }

    /// Checks what the policy `local` admitted for a counter, over every interval. An instance that was started again counts as one more.
    fn too_many_by_local(&self, number: usize) -> Option<Breach> {
        let counter = &self.counters[number];
        let is_local = |call: &Call| matches!(&call.answer, Answer::Policy { names, is_admitted: true } if names.iter().all(|name| name == "local"));
        let restarts = self.faults.iter().filter(|fault| fault.killed.is_some()).count() as u64;
        let limit = counter.limits[1];
        // While the store fails, N times L / R; under overload, L.
        let limit = (self.instances + restarts) * limit.div_ceil(self.instances) + limit;
        let local = Counter { limits: [limit; 2], ..counter.clone() };
        self.over(number, is_local, |from, last, to| local.most(from, last, to))
    }

    /// Finds the shortest interval in which more hits of a counter were admitted than `most` says, of the calls that `is_meant` selects.
    fn over(
        &self,
        number: usize,
        is_meant: impl Fn(&Call) -> bool,
        most: impl Fn(Time, Time, Time) -> u64,
    ) -> Option<Breach> {
        let mut admitted: Vec<&Call> = self.calls_of(number).filter(|call| is_meant(call)).collect();
        admitted.sort_by_key(|call| call.answered);
        let first = |from: Time| {
            let (mut hits, mut last) = (0, from);
            // Those that surely lie within.
            for call in admitted.iter().filter(|call| call.sent >= from) {
                (hits, last) = (hits + call.hits, last.max(call.sent));
                let most = most(from, last, call.answered);
                if hits > most {
                    return Some((from, call.answered, hits, most));
                }
            }
            None
        };
        let found = admitted.iter().filter_map(|call| first(call.sent));
        let (from, to, hits, most) = found.min_by_key(|(from, to, ..)| to - from)?;
        let (name, length) = (&self.counters[number].name, seconds(to - from));
        let what = format!("{name} admitted {hits} hits in {length}, at most {most} are promised");
        Some(Breach { what, counter: Some(number), from, to })
    }

    /// Checks that each call which the store refused had no room in some counter.
    fn refused_in_vain(&self) -> Option<Breach> {
        let uses: Vec<_> = (0..self.counters.len()).map(|number| Use::of(self, number)).collect();
        let is_in_vain = |call: &&Call| {
            call.answer == Answer::Refused && !call.counters.iter().any(|counter| uses[*counter].may_refuse(call))
        };
        let call = self.calls.iter().find(is_in_vain)?;
        let counter = *call.counters.first()?;
        let what = format!("a call is refused, for which there was room: {}", self.line(call));
        Some(Breach {
            what,
            counter: Some(counter),
            from: call.sent - self.counters[counter].memory(),
            to: call.answered,
        })
    }

    /// The breach, and the calls and faults around it, at most 30 calls from either end.
    pub fn excerpt(&self, breach: &Breach) -> String {
        const CALLS: usize = 30;
        let Breach { what, counter, from, to } = breach;
        let mut text = format!("{what}\n");
        let Some(counter) = counter else { return text };
        for fault in self.faults.iter().filter(|fault| fault.touches(from - SECOND, to + SECOND)) {
            let _ = writeln!(text, "  {}", self.fault_line(fault));
        }
        let mut calls: Vec<_> =
            self.calls_of(*counter).filter(|call| call.sent <= *to && call.answered >= *from).collect();
        calls.sort_by_key(|call| call.answered);
        for (place, call) in calls.iter().enumerate() {
            if place < CALLS || place + CALLS >= calls.len() {
                let _ = writeln!(text, "  {}", self.line(call));
            } else if place == CALLS {
                let _ = writeln!(text, "  ({} more calls)", calls.len() - 2 * CALLS);
            }
        }
        text
    }

    /// One line about a call.
    pub fn line(&self, call: &Call) -> String {
        let Call { instance, hits, sent, answered, answer, provenance, .. } = call;
        let names: Vec<_> = call.counters.iter().map(|counter| &*self.counters[*counter].name).collect();
        let [sent, answered] = [sent, answered].map(|time| seconds(time.saturating_sub(self.began)));
        format!(
            "{sent} to {answered}, instance {instance}, {hits} hits of {}: {answer:?}, {provenance}",
            names.join(" and ")
        )
    }

    fn fault_line(&self, fault: &Fault) -> String {
        let [from, to] = [fault.from, fault.to].map(|time| seconds(time.saturating_sub(self.began)));
        let forgotten: Vec<_> = fault.forgotten.iter().map(|counter| &*self.counters[*counter].name).collect();
        let forgets =
            if forgotten.is_empty() { String::new() } else { format!("; may forget {}", forgotten.join(", ")) };
        format!("{from} to {to}: {}{forgets}", fault.name)
    }
}

/// The whole history, one line for each fault and call.
impl fmt::Display for History {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for counter in &self.counters {
            writeln!(f, "{counter:?}")?;
        }
        for fault in &self.faults {
            writeln!(f, "{}", self.fault_line(fault))?;
        }
        self.calls.iter().try_for_each(|call| writeln!(f, "{}", self.line(call)))
    }
}

fn seconds(time: Time) -> String {
    format!("{}.{:06} s", time / SECOND, time % SECOND)
}

/// The charges that may have been made to a counter.
struct Use<'a> {
    counter: &'a Counter,
    /// In the order of their ends.
    charges: Vec<Span>,
    /// The level of a meter after each of them.
    levels: Vec<(u64, Time)>,
    /// The length of the longest span.
    longest: Time,
}

impl<'a> Use<'a> {
    fn of(history: &'a History, number: usize) -> Self {
        let counter = &history.counters[number];
        let mut charges: Vec<Span> = history.calls_of(number).filter_map(|call| counter.charge(call)).collect();
        charges.sort_by_key(|span| span.to);
        let longest = charges.iter().map(|span| span.to - span.from).max().unwrap_or(0);
        let levels = counter.levels(&charges);
        Self { counter, charges, levels, longest }
    }

    /// Returns false if a call which names this counter fitted, whenever its own charge and those of the others were made.
    fn may_refuse(&self, call: &Call) -> bool {
        let (from, to) = (call.sent - REPEATED, call.answered);
        let begin = self.charges.partition_point(|span| span.to < from - self.counter.memory());
        let end = self.charges.partition_point(|span| span.to <= to + self.longest);
        let mut charges = self.charges[begin..end].to_vec();
        if let Some(own) = self.counter.charge(call) {
            charges.swap_remove(charges.iter().position(|span| *span == own).expect("it is one of them"));
        }
        charges.retain(|span| span.from <= to);
        if !self.counter.is_one_step {
            return !charges.is_empty();
        }
        let ended = self.charges.partition_point(|span| span.to < from);
        let before = ended.checked_sub(1).map_or((0, from), |last| self.levels[last]);
        let capacity = match self.counter.counting {
            Counting::Meter { burst } => burst,
            _ => self.counter.limits[0],
        };
        self.counter.used(&charges, before, from, to) + call.hits > capacity
    }
}
