//! Replay of recorded requests: the decisions that are certain, and those that depend on hits that are not in the recording.
//!
//! Two simulators decide each request. One knows the recorded hits alone. The other one assumes that each counter was used up
//! where hits may be missing. A decision on which both agree counts as certain.
//!
//! For requests of one hit against one counter, the missing hits cannot change such a decision. With charges of several hits, or of
//! several counters under `all_or_nothing`, they can: a counter that refuses one charge has room for a later one, so the two
//! simulators are not always the two extremes.

use std::sync::Arc;

use foldhash::{HashMap, HashMapExt};

use super::Simulator;
use crate::algorithm::{Algorithm, Charge};
use crate::model::{CounterKey, Decision, Micros, Request};
use crate::rules::live::{LiveRules, Snapshot};
use crate::rules::{MatchedKind, RuleSet};

/// A span of time in which hits may be missing in a recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gap {
    /// Start of the span.
    pub since: Micros,
    /// End of the span.
    pub until: Micros,
}

/// A reading of a counter just before a recorded request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reading {
    /// Index of the descriptor in the request.
    pub descriptor: usize,
    /// Path of the rule.
    pub rule: String,
    /// Name of the limit, if it has one.
    pub limit: Option<String>,
    /// Name of the algorithm that counted the limit.
    pub algorithm: String,
    /// Window of the limit.
    pub window: Micros,
    /// Hits on the counter.
    pub used: u64,
    /// True if `used` is exact, false if it is the maximum.
    pub is_exact: bool,
}

/// A decision by the replayed rules.
#[derive(Debug)]
pub struct Replayed<'a> {
    /// The decision, made from the recorded hits alone.
    pub decision: Decision<'a>,
    /// True if the outcome is the same without missing hits and with counters that were used up by them.
    pub is_certain: bool,
}

/// Decides recorded requests in the order of their times.
pub struct Replay {
    /// Counters with the recorded hits alone.
    recorded: Simulator,
    /// Counters that were used up where hits may be missing.
    used_up: Simulator,
    /// Spans in which hits may be missing, in order and apart from each other. All time before the recording is one of them, unless
    /// the counters were empty then.
    gaps: Vec<Gap>,
    /// For each counter, the time up to which missing hits are assumed.
    assumed: HashMap<CounterKey, Micros>,
    counters_in_use: u64,
}

impl Replay {
    /// Creates a replay by `rules`, of a recording in which hits may be missing in `gaps`.
    pub fn new(rules: &Arc<LiveRules>, gaps: Vec<Gap>) -> Self {
        Self {
            recorded: Simulator::new(rules),
            used_up: Simulator::new(rules),
            gaps: joined(gaps),
            assumed: HashMap::new(),
            counters_in_use: 0,
        }
    }

    /// Returns the rules.
    pub fn rules(&self) -> Snapshot {
        self.recorded.rules()
    }

    /// Returns the number of counters that a reading shows to have been in use before the recording.
    pub fn counters_in_use(&self) -> u64 {
        self.counters_in_use
    }

    /// Returns the number of counters that were dropped because there were too many.
    pub fn dropped_counters(&self) -> u64 {
        self.recorded.dropped_counters().max(self.used_up.dropped_counters())
    }

    /// Decides `request` by `rules` at the time `now`. `readings` are those of the recording.
    pub async fn decide<'a>(
        &mut self,
        rules: &'a RuleSet,
        request: &Request,
        now: Micros,
        readings: &[Reading],
    ) -> Replayed<'a> {
        self.assume(rules, request, now, readings);
        let decision = self.recorded.decide(rules, request, now).await;
        let other = self.used_up.decide(rules, request, now).await;
        Replayed { is_certain: decision.outcome == other.outcome, decision }
    }

    /// Charges a request that is known in part only: its hits may or may not be on the counters.
    pub async fn charge_in_doubt(&mut self, rules: &RuleSet, request: &Request, now: Micros) {
        self.assume(rules, request, now, &[]);
        self.used_up.decide(rules, request, now).await;
    }

    /// Charges the hits that may be missing on each counter of `request`, as far as that has not been done.
    fn assume(&mut self, rules: &RuleSet, request: &Request, now: Micros, readings: &[Reading]) {
        let matched = rules.find(request);
        let origins = matched.items.iter().flat_map(|item| match &item.kind {
            MatchedKind::Limited(origins) => origins.as_slice(),
            _ => &[],
        });
        let missing_until = self.missing_until(now);
        for (charge, origin) in matched.charges.iter().zip(origins) {
            let assumed = self.assumed.get(&charge.key).copied();
            if charge.limit.is_closed()
                || assumed.is_some_and(|assumed| missing_until.is_none_or(|until| assumed >= until))
            {
                continue;
            }
            self.assumed.insert(charge.key.clone(), missing_until.unwrap_or(Micros::ZERO));
            let reading = readings.iter().find(|reading| {
                let is_of_limit = reading.limit.as_deref() == origin.limit.and_then(|limit| limit.name.as_deref());
                let is_of_rule = origin.rule.is_some_and(|rule| rule.path().to_string() == reading.rule);
                let window = charge.limit.quota().window().length();
                let is_counted_so = reading.window == window && reading.algorithm == charge.limit.algorithm().name();
                // With a delay, more hits than the capacity are admitted, and a reading does not show them.
                let is_whole = charge.limit.delay().is_none();
                reading.descriptor == charge.descriptor && is_of_limit && is_of_rule && is_counted_so && is_whole
            });
            match (reading, missing_until) {
                (Some(reading), _) => {
                    self.counters_in_use += u64::from(assumed.is_none() && reading.used > 0);
                    self.take_over(charge, reading, now, assumed.is_none());
                }
                (None, Some(until)) => self.used_up.leave_at_most(charge, 0, until),
                (None, None) => {}
            }
        }
    }

    /// Charges the hits that a reading shows. `is_first` is true if nothing was charged on the counter before.
    fn take_over(&self, charge: &Charge, reading: &Reading, now: Micros, is_first: bool) {
        let used = u32::try_from(reading.used).unwrap_or(u32::MAX);
        if used == 0 {
            return;
        }
        let left = charge.limit.capacity().saturating_sub(used);
        let (least, most) = match charge.limit.algorithm() {
            Algorithm::FixedWindow => (Some(left), left),
            // A level drains continuously, and a reading rounds it up to whole hits: up to one hit less is on the counter. A counter
            // with hits has a part of a hit of its own, which whole hits do not change.
            Algorithm::TokenBucket | Algorithm::LeakyBucket | Algorithm::Gcra => {
                (Some(left.saturating_add(1)), left.saturating_sub(u32::from(!is_first)))
            }
            // The others also depend on the times of the hits.
            Algorithm::SlidingWindow | Algorithm::SlidingLog => (None, left),
        };
        self.used_up.leave_at_most(charge, most, now);
        if let Some(least) = least.filter(|_| reading.is_exact) {
            self.recorded.leave_at_most(charge, least, now);
        }
    }

    /// Returns the latest time up to `now` at which hits may be missing; `None` if all are recorded.
    fn missing_until(&self, now: Micros) -> Option<Micros> {
        let begun = self.gaps.partition_point(|gap| gap.since <= now);
        let last = self.gaps.get(begun.checked_sub(1)?)?;
        Some(last.until.min(now))
    }
}

impl std::fmt::Debug for Replay {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Replay").field("gaps", &self.gaps).finish_non_exhaustive()
    }
}

/// Returns the spans in order, with those that overlap as one.
fn joined(mut gaps: Vec<Gap>) -> Vec<Gap> {
    gaps.sort_by_key(|gap| gap.since);
    let mut joined: Vec<Gap> = Vec::with_capacity(gaps.len());
    for gap in gaps {
        match joined.last_mut() {
            Some(last) if gap.since <= last.until => last.until = last.until.max(gap.until),
            _ => joined.push(gap),
        }
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Descriptor, Outcome};
    use crate::rulefile::{File, Options, load};

    const START: Micros = Micros::from_secs(1_795_262_400);

    fn rules(limit: &str) -> Arc<LiveRules> {
        let text = format!("domain: d\ndescriptors: [{{ key: user, rate_limit: {{ {limit} }} }}]\n");
        let file = File { name: "rules.yaml".into(), bytes: text.into() };
        Arc::new(LiveRules::new(load(&[file], Options::default()).unwrap().rules))
    }

    /// Decides a request of one hit, `seconds` after the start. Returns the outcome, and true if it is certain.
    fn hit(replay: &mut Replay, seconds: u64, readings: &[Reading]) -> (Outcome, bool) {
        let request = Request::new("d".into(), vec![Descriptor::parse("user=ann").unwrap()], 0).unwrap();
        let now = START.saturating_add(Micros::from_secs(seconds));
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let rules = replay.rules();
        let replayed = runtime.block_on(replay.decide(&rules, &request, now, readings));
        (replayed.decision.outcome, replayed.is_certain)
    }

    fn before() -> Gap {
        Gap { since: Micros::ZERO, until: START }
    }

    fn reading(used: u64, is_exact: bool) -> Reading {
        let window = Micros::from_secs(60);
        let algorithm = "fixed_window".to_owned();
        Reading { descriptor: 0, rule: "d.user".into(), limit: None, algorithm, window, used, is_exact }
    }

    #[test]
    fn an_admission_is_uncertain_until_hits_from_before_the_recording_no_longer_count() {
        let mut replay = Replay::new(&rules("unit: minute, requests_per_unit: 2"), vec![before()]);
        assert_eq!(hit(&mut replay, 0, &[]), (Outcome::Admitted, false));
        assert_eq!(hit(&mut replay, 59, &[]), (Outcome::Admitted, false));
        assert_eq!(hit(&mut replay, 59, &[]), (Outcome::Refused, true), "more hits change nothing");
        assert_eq!(hit(&mut replay, 60, &[]), (Outcome::Admitted, true), "the next window");

        let mut empty = Replay::new(&rules("unit: minute, requests_per_unit: 2"), Vec::new());
        assert_eq!(hit(&mut empty, 0, &[]), (Outcome::Admitted, true));
    }

    #[test]
    fn a_reading_of_the_same_limit_replaces_the_assumption() {
        let replayed = |limit: &str, of: Reading| {
            let mut replay = Replay::new(&rules(limit), vec![before()]);
            let outcomes = [0, 0, 0].map(|seconds| hit(&mut replay, seconds, std::slice::from_ref(&of)));
            (outcomes, replay.counters_in_use())
        };
        let (admitted, refused) = ((Outcome::Admitted, true), (Outcome::Refused, true));
        let minute = "unit: minute, requests_per_unit: 2";
        assert_eq!(replayed(minute, reading(0, true)), ([admitted, admitted, refused], 0));
        assert_eq!(replayed(minute, reading(1, true)), ([admitted, refused, refused], 1));
        let unsure = (Outcome::Admitted, false);
        assert_eq!(replayed(minute, reading(1, false)), ([admitted, unsure, refused], 1), "one hit at most");
        let log = "unit: minute, requests_per_unit: 2, algorithm: sliding_log";
        let of_log = Reading { algorithm: "sliding_log".into(), ..reading(1, true) };
        assert_eq!(replayed(log, of_log), ([admitted, unsure, refused], 1), "the time of the hit is not known");
        let hour = "unit: hour, requests_per_unit: 2";
        assert_eq!(replayed(hour, reading(0, true)), ([unsure, unsure, refused], 0), "an hour began earlier");
    }

    #[test]
    fn a_reading_of_another_algorithm_is_none() {
        let text = |algorithm: &str| format!("unit: minute, requests_per_unit: 100, algorithm: {algorithm}");
        // A fixed window begins empty; a log still has the hits of the minute before.
        let outcome = |algorithm: &str| {
            let mut replay = Replay::new(&rules(&text(algorithm)), vec![before()]);
            (hit(&mut replay, 0, &[reading(0, true)]), replay.counters_in_use())
        };
        assert_eq!(outcome("fixed_window"), ((Outcome::Admitted, true), 0));
        for other in ["sliding_log", "sliding_window", "token_bucket", "gcra"] {
            assert_eq!(outcome(other), ((Outcome::Admitted, false), 0), "{other}");
        }
    }

    #[test]
    fn a_reading_of_a_level_is_exact_to_a_hit_so_the_same_rules_make_no_difference() {
        for algorithm in ["token_bucket", "leaky_bucket", "gcra"] {
            let rules = rules(&format!("unit: minute, requests_per_unit: 10, algorithm: {algorithm}"));
            let served = Simulator::new(&rules);
            let mut replay = Replay::new(&rules, vec![before()]);
            let request = Request::new("d".into(), vec![Descriptor::parse("user=ann").unwrap()], 0).unwrap();
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            let snapshot = rules.snapshot();
            let at = |millis| START.saturating_add(Micros::from_millis(millis));
            for _ in 0..10 {
                runtime.block_on(served.decide(&snapshot, &request, START));
            }
            let mut certain = 0;
            for millis in [11_500, 12_100, 18_000, 18_100, 24_000, 25_000, 90_000, 95_000] {
                let recorded = runtime.block_on(served.decide(&snapshot, &request, at(millis)));
                let used = 9_u64.saturating_sub(recorded.answers[0].verdict.remaining.into());
                let readings = [Reading { algorithm: algorithm.into(), ..reading(used, true) }];
                let replayed = runtime.block_on(replay.decide(&snapshot, &request, at(millis), &readings));
                certain += usize::from(replayed.is_certain);
                let is_same = replayed.decision.outcome == recorded.outcome;
                assert!(is_same || !replayed.is_certain, "{algorithm} at {millis} ms");
            }
            assert!((3..8).contains(&certain), "{algorithm}: {certain} are certain");
        }
    }

    #[test]
    fn hits_may_be_missing_in_each_gap() {
        let at = |seconds| START.saturating_add(Micros::from_secs(seconds));
        let gaps = vec![Gap { since: at(10), until: at(20) }, Gap { since: at(15), until: at(30) }];
        let mut replay = Replay::new(&rules("unit: minute, requests_per_unit: 9"), gaps);
        let certain = [0, 9, 10, 25, 30, 59, 60].map(|seconds| hit(&mut replay, seconds, &[]).1);
        assert_eq!(certain, [true, true, false, false, false, false, true]);
    }

    #[test]
    fn a_request_that_is_known_in_part_makes_later_ones_uncertain() {
        let rules = rules("unit: minute, requests_per_unit: 1");
        let mut replay = Replay::new(&rules, Vec::new());
        let request = Request::new("d".into(), vec![Descriptor::parse("user=ann").unwrap()], 0).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(replay.charge_in_doubt(&rules.snapshot(), &request, START));
        assert_eq!(hit(&mut replay, 0, &[]), (Outcome::Admitted, false));
        assert_eq!(hit(&mut replay, 0, &[]), (Outcome::Refused, true));
    }
}
