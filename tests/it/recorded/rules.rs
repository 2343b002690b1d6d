//! The rules of a run, the counters that they make, and the calls.

use std::fmt::Write;

use tidegate::proto::envoy::service::ratelimit::v3::RateLimitRequest;

use super::checker::{Counter, Counting, SECOND, Time};
use crate::faults::request;
use crate::topology::slot_of;

/// The time for which a lease may be spent.
const LEASE: Time = 500_000;
/// The longest time for which an instance holds hits: seven times that (`docs/leases.md`).
const LEASED_FOR: Time = 7 * LEASE;
/// The part of a limit that leases hold, in percent.
const SHARE: u64 = 20;

/// A limit, over 2 s unless it says otherwise.
#[derive(Clone, Copy)]
struct Limit {
    algorithm: &'static str,
    hits: u64,
    burst: Option<u64>,
    window: Time,
}

impl Limit {
    fn new(algorithm: &'static str, hits: u64) -> Self {
        Self { algorithm, hits, burst: None, window: 2 * SECOND }
    }

    fn burst(self, burst: u64) -> Self {
        Self { burst: Some(burst), ..self }
    }
}

/// A rule, each of whose values has a counter for each limit.
struct Rule {
    key: String,
    limits: Vec<Limit>,
    policy: &'static str,
    is_leased: bool,
    /// Charged together with the rule before it, in one request.
    is_second: bool,
    /// A load of the rules doubles its limit, and the next one halves it again.
    is_changed: bool,
    /// The part of the calls that are its own.
    weight: usize,
}

impl Rule {
    fn new(key: impl Into<String>, limits: &[Limit]) -> Self {
        let (key, limits) = (key.into(), limits.to_vec());
        Self { key, limits, policy: "closed", is_leased: false, is_second: false, is_changed: false, weight: 4 }
    }

    fn with_policy(self, policy: &'static str) -> Self {
        Self { policy, ..self }
    }

    fn yaml(&self, is_changed: bool) -> String {
        let Self { key, policy, .. } = self;
        let limit = |limit: &Limit| {
            let Limit { algorithm, hits, burst, window } = limit;
            let burst = burst.map_or_else(String::new, |burst| format!(", burst: {burst}"));
            let hits = if is_changed && self.is_changed { 2 * hits } else { *hits };
            let window = window / SECOND;
            format!("{{ window: {window}s, requests_per_unit: {hits}, algorithm: {algorithm}{burst} }}")
        };
        let limits: Vec<_> = self.limits.iter().map(limit).collect();
        let limits = match &*limits {
            [limit] => format!("rate_limit: {limit}"),
            limits => format!("rate_limits: [{}]", limits.join(", ")),
        };
        let charging = if self.is_in_two() { "all_or_nothing" } else { "each" };
        let lease =
            if self.is_leased { format!("{{ share: {SHARE}%, ttl: {}ms }}", LEASE / 1_000) } else { "off".into() };
        let policies = format!("on_store_failure: {policy}, on_store_overload: {policy}");
        format!("  - {{ key: {key}, charging: {charging}, lease: {lease}, {policies}, {limits} }}\n")
    }

    /// True if its requests have counters in two slots.
    fn is_in_two(&self) -> bool {
        self.key.starts_with("pair")
    }

    fn counter(&self, value: usize, limit: &Limit) -> Counter {
        let &Limit { algorithm, hits, burst, window } = limit;
        let counting = match algorithm {
            "fixed_window" => Counting::FixedWindow,
            "sliding_window" => Counting::SlidingWindow,
            "sliding_log" => Counting::SlidingLog,
            _ => Counting::Meter { burst: burst.unwrap_or(hits) },
        };
        Counter {
            name: format!("{}={value} ({algorithm})", self.key),
            counting,
            window,
            limits: [hits, if self.is_changed { 2 * hits } else { hits }],
            leased: if self.is_leased { hits * SHARE / 100 } else { 0 },
            leased_for: if self.is_leased { LEASED_FOR } else { 0 },
            policy: self.policy,
            // Of `local`, hits that an instance admitted are charged later.
            is_one_step: !self.is_leased && !self.is_in_two() && self.policy != "local",
        }
    }
}

/// A call that is made again and again.
#[derive(Clone)]
pub struct Ask {
    pub request: RateLimitRequest,
    pub counters: Vec<usize>,
    pub hits: u64,
}

/// The rules of a run, and all that can be asked.
pub struct Rules {
    rules: Vec<Rule>,
    pub counters: Vec<Counter>,
    /// The slot of each counter.
    pub slots: Vec<u16>,
    /// One of each value.
    pub asks: Vec<Ask>,
    /// How often each of them is asked, compared with the others.
    weights: Vec<usize>,
}

const ALGORITHMS: [(&str, Option<u64>); 6] = [
    ("fixed_window", None),
    ("sliding_window", None),
    ("sliding_log", None),
    ("token_bucket", None),
    ("leaky_bucket", Some(6)),
    ("gcra", Some(4)),
];
/// The weights of the values of a rule: some are asked for more than fits, and some for less.
const VALUES: [usize; 4] = [8, 4, 2, 1];

impl Rules {
    pub fn new() -> Self {
        let of = |(algorithm, burst): (&'static str, Option<u64>), hits| Limit { burst, ..Limit::new(algorithm, hits) };
        let mut rules: Vec<_> = ALGORITHMS.map(|algorithm| Rule::new(algorithm.0, &[of(algorithm, 10)])).into();
        for algorithm in ALGORITHMS.into_iter().filter(|(algorithm, _)| *algorithm != "sliding_log") {
            let limit = Limit::new(algorithm.0, 60);
            let rule = Rule::new(format!("leased_{}", algorithm.0), &[limit]);
            rules.push(Rule { is_leased: true, weight: 8, ..rule });
        }
        rules.push(Rule::new("pair_log", &[Limit::new("sliding_log", 8)]));
        rules.push(Rule { is_second: true, ..Rule::new("pair_gcra", &[Limit::new("gcra", 10)]) });
        let slow = Limit { window: 10 * SECOND, ..Limit::new("token_bucket", 40).burst(15) };
        rules.push(Rule::new("list", &[Limit::new("sliding_window", 10), slow]));
        rules.push(Rule { is_changed: true, ..Rule::new("changed", &[Limit::new("fixed_window", 8)]) });
        rules.push(Rule::new("open", &[Limit::new("sliding_log", 10)]).with_policy("open"));
        rules.push(Rule::new("local", &[Limit::new("fixed_window", 10)]).with_policy("local"));
        rules.push(Rule::new("error", &[Limit::new("gcra", 10)]).with_policy("error"));
        Self::of(rules)
    }

    fn of(rules: Vec<Rule>) -> Self {
        let mut all = Self { rules, counters: vec![], slots: vec![], asks: vec![], weights: vec![] };
        for (place, rule) in all.rules.iter().enumerate() {
            for (value, weight) in VALUES.iter().enumerate() {
                let text = format!("v{value}");
                let counters: Vec<_> = (all.counters.len()..).take(rule.limits.len()).collect();
                all.counters.extend(rule.limits.iter().map(|limit| rule.counter(value, limit)));
                all.slots.resize(all.counters.len(), slot_of(&rule.key, &text));
                if rule.is_second {
                    let first = all.asks.len() - VALUES.len() + value;
                    let ask = &mut all.asks[first];
                    ask.counters.extend(counters);
                    ask.request.descriptors.extend(request(&rule.key, &text).descriptors);
                    continue;
                }
                all.asks.push(Ask { request: request(&rule.key, &text), counters, hits: 1 });
                all.weights.push(weight * all.rules[place].weight);
            }
        }
        all
    }

    /// The rule file; `is_changed` is true for every second load.
    pub fn yaml(&self, is_changed: bool) -> String {
        let mut text = "domain: d\ndescriptors:\n".to_owned();
        for rule in &self.rules {
            let _ = write!(text, "{}", rule.yaml(is_changed));
        }
        text
    }

    /// Calls in no order, as often as the weights say, of one to three hits.
    pub fn mixed(&self, random: &mut fastrand::Rng) -> Vec<Ask> {
        let places: Vec<_> =
            self.weights.iter().enumerate().flat_map(|(place, weight)| std::iter::repeat_n(place, *weight)).collect();
        let mut ask = || self.asks[places[random.usize(..places.len())]].with([1, 1, 1, 1, 2, 3][random.usize(..6)]);
        (0..5_000).map(|_| ask()).collect()
    }

    /// A call for all the hits that fit into the counters of an ask while nothing is charged there.
    pub fn whole(&self, ask: &Ask) -> Ask {
        let room = |counter: &usize| match self.counters[*counter].counting {
            Counting::Meter { burst } => burst,
            _ => self.counters[*counter].limits[0],
        };
        ask.with(ask.counters.iter().map(room).min().expect("it has counters"))
    }
}

impl Ask {
    fn with(&self, hits: u64) -> Self {
        let mut ask = Self { hits, ..self.clone() };
        ask.request.hits_addend = u32::try_from(hits).expect("it is small");
        ask
    }
}
