//! Callers, and how their calls end.

use std::fmt;
use std::rc::Rc;
use std::time::Duration;

use tidegate::model::{Clock as _, Decision, Micros, Outcome, Provenance, Role};
use tokio::time::{Instant, sleep, timeout};

use super::clock::SimulatedClock;
use super::world::{Process, World, request};

/// The time that an honest caller waits before it tries again.
const PAUSE: Duration = Duration::from_millis(300);

/// A call, and how it ended.
#[derive(Clone, Debug)]
pub struct Call {
    /// The number of its process.
    pub process: usize,
    pub began: Instant,
    pub ended: Instant,
    /// The same by the clock of Redis, and by that of the process.
    pub from: [Micros; 2],
    pub to: [Micros; 2],
    pub timeout: Option<Duration>,
    /// Hits of each of its descriptors. Below 0 they are given back.
    pub hits: i64,
    /// `None` if the caller left before, or the process was killed.
    pub outcome: Option<Outcome>,
    pub parts: Vec<Part>,
}

/// Answer for one descriptor.
#[derive(Clone, Debug)]
pub struct Part {
    pub key: String,
    pub value: String,
    /// Source of the answer; `None` if there is no answer, or if no rule limits the descriptor.
    pub by: Option<Provenance>,
    /// All of its limits admit it.
    pub is_admitted: bool,
    pub role: Role,
    /// The wait of a refusal.
    pub retry: Option<Micros>,
}

impl Call {
    /// Returns true if it was answered, and it was admitted.
    pub fn is_admitted(&self) -> bool {
        self.outcome == Some(Outcome::Admitted)
    }

    /// Returns its parts with this key and value.
    pub fn parts_of<'a>(&'a self, key: &'a str, value: &'a str) -> impl Iterator<Item = &'a Part> {
        self.parts.iter().filter(move |part| part.key == key && part.value == value)
    }

    /// Returns true if a policy answered a part of it in place of the store.
    pub fn is_of_policy(&self) -> bool {
        self.parts.iter().any(|part| part.by.is_some_and(Provenance::is_policy))
    }
}

fn parts(descriptors: Vec<(String, String)>, decision: Option<&Decision>) -> Vec<Part> {
    let part = |(place, (key, value)): (usize, (String, String))| {
        let answers = || decision.into_iter().flat_map(|decision| &decision.answers);
        let own = || answers().filter(move |answer| answer.descriptor == place);
        // The limits of a list are decided together.
        let refusing = || own().filter(|answer| answer.verdict.outcome != Outcome::Admitted);
        let asked = refusing().find(|answer| answer.verdict.provenance != Provenance::Spared);
        let first = asked.or_else(|| refusing().next()).or_else(|| own().next());
        Part {
            key,
            value,
            by: first.map(|first| first.verdict.provenance),
            is_admitted: own().all(|answer| answer.verdict.outcome == Outcome::Admitted),
            role: first.map_or(Role::Enforce, |first| first.role),
            retry: first.and_then(|first| first.verdict.retry),
        }
    };
    descriptors.into_iter().enumerate().map(part).collect()
}

/// Calls an instance, and returns how the call ended.
async fn call(
    process: &Process,
    clock: &SimulatedClock,
    descriptors: Vec<(String, String)>,
    hits: i64,
    (caller_timeout, patience): (Option<Duration>, Duration),
) -> Call {
    let request = request(descriptors.iter().map(|(key, value)| (key.as_str(), value.as_str())), hits);
    let now = || [clock.now(), process.clock.now()];
    let (began, from) = (Instant::now(), now());
    let rules = process.limiter.rules();
    let deciding = process.limiter.decide(&rules, &request, caller_timeout);
    let mut killed = process.is_killed.subscribe();
    let decision = tokio::select! {
        biased;
        _ = killed.wait_for(|is_killed| *is_killed) => None,
        decision = timeout(patience, deciding) => decision.ok(),
    };
    let outcome = decision.as_ref().map(|decision| decision.outcome);
    let parts = parts(descriptors, decision.as_ref());
    let (process, timeout) = (process.number, caller_timeout);
    Call { process, began, ended: Instant::now(), from, to: now(), timeout, hits, outcome, parts }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { process, timeout, hits, outcome, parts, .. } = self;
        let outcome = outcome.map_or("nothing".to_owned(), |outcome| format!("{outcome:?}"));
        let took = self.ended - self.began;
        write!(f, "{} process {process}: {outcome} x {hits} after {took:?} of {timeout:?}:", self.to[0])?;
        parts.iter().try_for_each(|Part { key, value, by, is_admitted, .. }| {
            let sign = if *is_admitted { '+' } else { '-' };
            write!(f, " {key}={value} {sign}{}", by.map_or("nobody", Provenance::name))
        })
    }
}

impl World {
    /// Starts a caller, which calls until the end.
    pub fn caller(&mut self, until: Instant) -> tokio::task::JoinHandle<()> {
        let mut random = self.random.fork();
        let (clock, calls) = (self.clock.clone(), Rc::clone(&self.calls));
        let (trace, processes) = (Rc::clone(&self.trace), Rc::clone(&self.processes));
        let mut keys: Vec<String> = self.rules[0].1.limits.keys().cloned().collect();
        keys.push("later".to_owned());
        let pace = random.u64(1_000..200_000);
        tokio::task::spawn_local(async move {
            // What is to be given back: a value, and its hits.
            let mut owed: Option<(String, i64)> = None;
            while Instant::now() < until {
                sleep(Duration::from_micros(random.u64(1..=2 * pace))).await;
                let process = {
                    let processes = processes.borrow();
                    Rc::clone(&processes[random.usize(..processes.len())])
                };
                let value = random.u8(..3).to_string();
                let mut hits = [1, 1, 1, 2, 5][random.usize(..5)];
                let mut descriptors = vec![(keys[random.usize(..keys.len())].clone(), value.clone())];
                if let Some((value, given)) = owed.take() {
                    (descriptors[0], hits) = (("refunded".to_owned(), value), -given);
                } else if descriptors[0].0 != "refunded" {
                    let second = &keys[random.usize(..keys.len())];
                    if random.u8(..3) == 0 && second != "refunded" {
                        descriptors.push((second.clone(), "other".to_owned()));
                    }
                    descriptors.push(("counted".to_owned(), value));
                }
                let timeout = [None, Some(20), Some(100), Some(250)][random.usize(..4)].map(Duration::from_millis);
                // Some callers leave before.
                let patience =
                    if random.u8(..10) == 0 { Duration::from_micros(random.u64(1..20_000)) } else { Duration::MAX };
                let call = call(&process, &clock, descriptors, hits, (timeout, patience)).await;
                if let [part] = call.parts.as_slice()
                    && (part.by, call.is_admitted()) == (Some(Provenance::Store), true)
                    && hits > 0
                    && random.bool()
                {
                    owed = Some((part.value.clone(), hits));
                }
                trace.borrow_mut().push(call.to_string());
                calls.borrow_mut().push(call);
            }
        })
    }

    /// Lets an honest caller of each limit find all of it, but for what may be leased, after all windows have ended.
    pub async fn rest_honestly(&mut self) {
        let rules = self.rules.last().expect("rules").1.clone();
        for (key, limit) in rules.limits.iter().filter(|(key, _)| *key != "refunded") {
            let earlier = self.rules.iter().filter_map(|(_, rules)| rules.limits.get(key));
            if earlier.into_iter().any(|earlier| earlier.quota().limit() > limit.quota().limit()) {
                // What was admitted then takes longer to drain.
                continue;
            }
            let process = self.some_process();
            let (mut left, mut patience) = ((limit.quota().limit() * (100 - rules.leased) / 100).min(12), 10);
            while left > 0 {
                let descriptors = vec![(key.clone(), "0".to_owned())];
                let time = (Some(Duration::from_millis(250)), Duration::MAX);
                let call = call(&process, &self.clock, descriptors, 1, time).await;
                self.trace.borrow_mut().push(call.to_string());
                let (is_of_policy, is_local) = (call.is_of_policy(), call.parts[0].by == Some(Provenance::Local));
                if is_of_policy && patience > 0 {
                    // Where all calls were too late, each is followed by a pause until some are in time.
                    patience -= 1;
                    sleep(PAUSE).await;
                } else if is_of_policy || !call.is_admitted() {
                    self.broken.push(format!("at rest {key} is refused with {left} hits to come: {call}"));
                    break;
                }
                // What an instance admits by itself is charged later.
                left -= u32::from(!is_of_policy || is_local);
                self.calls.borrow_mut().push(call);
            }
        }
    }
}
