//! What is answered while the store cannot be asked: the table of the four policies, and what each counts.

use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;
use tidegate::algorithm::Charge;
use tidegate::model::{
    Charging, Decision, Descriptor, FailurePolicy, Finding, Micros, Outcome, Override, Provenance, Role, StorePolicies,
    Verdict,
};
use tidegate::rulefile::Options;
use tidegate::store::deadline::Deadline;
use tidegate::store::{Charged, Store};

use crate::world::{HandClock, Limiter, NOON, descriptor, futures, request};
use failing::{Failing, Instance, Told, guard, limiter};

mod deciding;
pub mod failing;
mod wire;

const POLICIES: [FailurePolicy; 4] =
    [FailurePolicy::Error, FailurePolicy::Open, FailurePolicy::Closed, FailurePolicy::Local];
const ROLES: [Role; 4] = [Role::Enforce, Role::Shadow, Role::Quota, Role::ShadowQuota];
const CHARGINGS: [Charging; 2] = [Charging::Each, Charging::AllOrNothing];

/// The limit of the table's rules, and how many replicas share it.
const LIMIT: u32 = 4;
const REPLICAS: u32 = 2;
/// What is used of a counter that has no room left.
const OVERSPENT: u32 = 6;

/// What a descriptor asks for: one hit, none, or one back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ask {
    Take,
    Look,
    Refund,
}

/// What a descriptor meets.
#[derive(Clone, Copy, Debug)]
struct Meets {
    /// Whether the store fails for it.
    is_down: bool,
    counter: Counter,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Counter {
    Fresh,
    Overspent,
    /// A limit of 0.
    Closed,
}

/// One descriptor of a request.
#[derive(Clone, Copy, Debug)]
struct Case {
    policy: FailurePolicy,
    role: Role,
    ask: Ask,
    meets: Meets,
}

/// Every case there is.
fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for policy in POLICIES {
        for role in ROLES {
            for ask in [Ask::Take, Ask::Look, Ask::Refund] {
                for counter in [Counter::Fresh, Counter::Overspent, Counter::Closed] {
                    let meets = [false, true].map(|is_down| Meets { is_down, counter });
                    cases.extend(meets.map(|meets| Case { policy, role, ask, meets }));
                }
            }
        }
    }
    cases
}

impl Case {
    /// The rules say this of a descriptor that the store could be asked about, or that policy answers: the outcome, and
    /// who says so.
    fn own(self) -> (Outcome, Provenance) {
        let counted = match (self.meets.counter, self.ask) {
            (Counter::Closed | Counter::Overspent, Ask::Take | Ask::Look) => Outcome::Refused,
            _ => Outcome::Admitted,
        };
        match self.policy {
            _ if !self.meets.is_down || self.meets.counter == Counter::Closed => (counted, Provenance::Store),
            FailurePolicy::Local => (counted, Provenance::Local),
            _ if self.ask == Ask::Refund => (Outcome::Admitted, Provenance::Open),
            FailurePolicy::Error => (Outcome::Failed, Provenance::Error),
            FailurePolicy::Open => (Outcome::Admitted, Provenance::Open),
            FailurePolicy::Closed => (Outcome::Refused, Provenance::Closed),
        }
    }

    fn is_shadow(self) -> bool {
        matches!(self.role, Role::Shadow | Role::ShadowQuota)
    }

    /// Who counts it, and how far: the limit of its counter.
    fn limit(self) -> Option<u32> {
        match self.own().1 {
            _ if self.meets.counter == Counter::Closed => None,
            Provenance::Store => Some(LIMIT),
            Provenance::Local => Some(LIMIT / REPLICAS),
            _ => None,
        }
    }

    fn used_before(self) -> u32 {
        if self.meets.counter == Counter::Overspent { OVERSPENT } else { 0 }
    }

    /// What is left of its counter after the request.
    fn left(self, limit: u32, charging: Charging, is_request_refused: bool) -> u32 {
        let is_unrecorded = match charging {
            // The reference counts refused hits.
            Charging::Each => false,
            Charging::AllOrNothing | Charging::Group(_) => is_request_refused || self.own().0 == Outcome::Refused,
        };
        let used = match self.ask {
            Ask::Take if !is_unrecorded => self.used_before() + 1,
            Ask::Take | Ask::Look => self.used_before(),
            Ask::Refund => self.used_before().saturating_sub(1),
        };
        limit.saturating_sub(used)
    }

    /// Its descriptor, with a value that nobody else has.
    fn descriptor(self, number: usize) -> Descriptor {
        let Self { policy, role, ask, meets: Meets { is_down, counter } } = self;
        let size = if counter == Counter::Closed { "closed" } else { "some" };
        let value = if is_down { "down" } else { "up" };
        Descriptor {
            hits_addend: Some(u64::from(ask != Ask::Look)),
            is_negative_hits: ask == Ask::Refund,
            ..descriptor(&format!("{}-{role:?}-{size}={value}{number}", policy.name()))
        }
    }
}

/// Whether limits refuse the request: an enforced one does, or there are quotas and none has room.
fn refuse(answers: &[(Case, Outcome)]) -> bool {
    let is_refused = |outcome: Outcome| outcome == Outcome::Refused;
    let has_room = |case: Case, outcome| case.role == Role::ShadowQuota || !is_refused(outcome);
    let mut quotas = answers.iter().filter(|(case, _)| matches!(case.role, Role::Quota | Role::ShadowQuota)).peekable();
    answers.iter().any(|&(case, outcome)| case.role == Role::Enforce && is_refused(outcome))
        || (quotas.peek().is_some() && !quotas.any(|&(case, outcome)| has_room(case, outcome)))
}

/// A rule for every policy, role and size of limit.
fn table_rules() -> String {
    let mut rules = "domain: d\ndescriptors:\n".to_owned();
    for policy in POLICIES {
        for role in ROLES {
            for (size, limit) in [("closed", 0), ("some", LIMIT)] {
                let (is_shadow, is_quota) = (role.is_shadow(), role.is_quota());
                rules += &format!(
                    "- {{ key: {0}-{role:?}-{size}, on_store_failure: {0}, shadow_mode: {is_shadow}, quota_mode: {is_quota}, rate_limit: {{ unit: day, requests_per_unit: {limit} }} }}\n",
                    policy.name()
                );
            }
        }
    }
    rules
}

/// An instance that is asked the table.
struct Table {
    instance: Instance,
    /// By charging and shadow mode.
    limiters: Vec<(Charging, bool, Limiter)>,
    asked: usize,
}

impl Table {
    fn new(rules: &str) -> Self {
        let instance = Instance::of(REPLICAS);
        let ways = CHARGINGS.into_iter().flat_map(|charging| [(charging, false), (charging, true)]);
        let limiters = ways.map(|(charging, shadow_mode)| {
            let options = Options { charging, shadow_mode, ..Options::default() };
            (charging, shadow_mode, limiter(rules, options, &instance.guard))
        });
        Self { limiters: limiters.collect(), instance, asked: 0 }
    }

    fn decide(&self, way: usize, descriptors: impl IntoIterator<Item = Descriptor>) -> Decision<'_> {
        futures(self.limiters[way].2.decide(&request(descriptors), None))
    }

    /// Overspends the counter of a descriptor: the first way charges each limit on its own, and counts what it refuses.
    fn overspend(&self, descriptor: Descriptor) {
        let all = Descriptor { hits_addend: Some(OVERSPENT.into()), is_negative_hits: false, ..descriptor };
        let _ = self.decide(0, [all]);
    }

    /// What is left of the counter of a descriptor, told by a look at it.
    fn left(&self, case: Case, descriptor: Descriptor) -> u32 {
        let look = Descriptor { hits_addend: Some(0), is_negative_hits: false, ..descriptor };
        if case.own().1 == Provenance::Local {
            return verdict(&self.decide(0, [look]), 0).remaining;
        }
        let request = request([look]);
        let charges = self.limiters[0].2.rules().find(&request).charges;
        self.instance.store.memory.charge_now(&charges)[0].remaining
    }

    /// Asks for all of these at once, in every way, and holds the answer to what the rules say.
    fn ask(&mut self, cases: &[Case]) {
        let answers: Vec<_> = cases.iter().map(|case| (*case, case.own().0)).collect();
        let asked = |(case, outcome): &(Case, Outcome)| {
            let is_closed = case.own().1 == Provenance::Closed;
            (*case, if is_closed { Outcome::Admitted } else { *outcome })
        };
        let is_refused = refuse(&answers);
        let is_unavailable = is_refused && !refuse(&answers.iter().map(asked).collect::<Vec<_>>());
        let is_failed = answers.iter().any(|(case, outcome)| !case.is_shadow() && *outcome == Outcome::Failed);

        for way in 0..self.limiters.len() {
            let (charging, shadow_mode, _) = self.limiters[way];
            let first = self.asked;
            self.asked += cases.len();
            let descriptors = || cases.iter().zip(first..).map(|(case, number)| case.descriptor(number));
            for (case, descriptor) in cases.iter().zip(descriptors()) {
                if case.meets.counter == Counter::Overspent {
                    self.overspend(descriptor);
                }
            }
            let decision = self.decide(way, descriptors());

            let context = || format!("{cases:#?} {charging:?} shadow_mode {shadow_mode}: {decision:#?}");
            let expected = match () {
                () if shadow_mode => Outcome::Admitted,
                () if is_refused => Outcome::Refused,
                () if is_failed => Outcome::Failed,
                () => Outcome::Admitted,
            };
            assert_eq!(decision.outcome, expected, "{}", context());
            assert_eq!(decision.unavailable_for.is_some(), is_unavailable && !shadow_mode, "{}", context());
            for (index, (case, descriptor)) in cases.iter().zip(descriptors()).enumerate() {
                let (outcome, provenance) = case.own();
                let verdict = verdict(&decision, index);
                assert_eq!((verdict.outcome, verdict.provenance), (outcome, provenance), "{index}: {}", context());
                let shown = if case.is_shadow() { Outcome::Admitted } else { outcome };
                assert_eq!(decision.parts[index].outcome(), shown, "{index}: {}", context());
                if let Some(limit) = case.limit() {
                    let left = case.left(limit, charging, is_refused);
                    assert_eq!(verdict.remaining, left, "{index} is told: {}", context());
                    assert_eq!(self.left(*case, descriptor), left, "{index} has left: {}", context());
                }
            }
        }
    }
}

fn verdict(decision: &Decision, index: usize) -> Verdict {
    match &decision.parts[index].finding {
        Finding::Limited(tightest) => tightest.verdict,
        unlimited => panic!("{unlimited:?}"),
    }
}

#[test]
fn each_descriptor_alone_is_answered_by_its_policy() {
    let mut table = Table::new(&table_rules());
    cases().iter().for_each(|case| table.ask(&[*case]));
}

#[test]
fn any_two_descriptors_are_answered_each_by_its_policy_and_decided_as_one() {
    let rules = table_rules();
    for one in cases() {
        let mut table = Table::new(&rules);
        cases().iter().for_each(|other| table.ask(&[one, *other]));
    }
}

#[test]
fn any_three_descriptors_that_ask_for_a_hit_are_decided_as_one() {
    let rules = table_rules();
    // A policy that is not needed changes nothing: the two above show it.
    let is_plain = |case: &Case| {
        let is_told_apart = match case.meets {
            Meets { is_down: true, counter: Counter::Fresh } => true,
            Meets { is_down: true, counter: Counter::Overspent } => case.policy == FailurePolicy::Local,
            Meets { is_down: false, counter: Counter::Closed } => false,
            _ => case.policy == FailurePolicy::Error,
        };
        case.ask == Ask::Take && is_told_apart
    };
    let plain: Vec<_> = cases().into_iter().filter(is_plain).collect();
    for one in &plain {
        let mut table = Table::new(&rules);
        // The order of the last two is that of the two above.
        for (index, other) in plain.iter().enumerate() {
            plain[index..].iter().for_each(|third| table.ask(&[*one, *other, *third]));
        }
    }
}

/// Rules of two descriptors that stand for themselves, charged together.
const TIERS: &str = "domain: d
charging: all_or_nothing
on_store_failure: local
descriptors:
  - { key: tier, rate_limit: { unit: day, requests_per_unit: 10 } }
  - { key: user, rate_limit: { unit: day, requests_per_unit: 2 } }
  - { key: closed, on_store_failure: closed, rate_limit: { unit: day, requests_per_unit: 2 } }
  - { key: error, on_store_failure: error, rate_limit: { unit: day, requests_per_unit: 2 } }
";

fn ask<'a>(limiter: &'a Limiter, descriptors: &[&str]) -> Decision<'a> {
    futures(limiter.decide(&request(descriptors.iter().copied().map(descriptor)), None))
}

fn left(limiter: &Limiter, entries: &str) -> u32 {
    let look = Descriptor { hits_addend: Some(0), ..descriptor(entries) };
    verdict(&futures(limiter.decide(&request([look]), None)), 0).remaining
}

#[test]
fn a_refusal_by_the_store_or_by_this_instance_spends_nothing_in_the_other() {
    let instance = Instance::of(2);
    let limiter = instance.limiter(TIERS);
    assert_eq!(ask(&limiter, &["tier=up", "user=down"]).outcome, Outcome::Admitted);
    assert_eq!((left(&limiter, "tier=up"), left(&limiter, "user=down")), (9, 0));
    for descriptors in [["tier=up", "user=down"], ["user=down", "tier=up"]] {
        assert_eq!(ask(&limiter, &descriptors).outcome, Outcome::Refused, "this instance's half of two is spent");
        assert_eq!((left(&limiter, "tier=up"), left(&limiter, "user=down")), (9, 0));
    }
    for _ in 0..2 {
        assert_eq!(ask(&limiter, &["user=up"]).outcome, Outcome::Admitted);
    }
    for descriptors in [["tier=down", "user=up"], ["user=up", "tier=down"]] {
        assert_eq!(ask(&limiter, &descriptors).outcome, Outcome::Refused, "the store's two are spent");
        assert_eq!((left(&limiter, "tier=down"), left(&limiter, "user=up")), (5, 0));
    }
}

#[test]
fn hits_given_back_to_a_counter_of_this_instance_can_be_taken_again() {
    let instance = Instance::of(2);
    let limiter = instance.limiter(TIERS);
    let refund = || Descriptor { is_negative_hits: true, hits_addend: Some(1), ..descriptor("user=down") };
    assert_eq!(ask(&limiter, &["user=down"]).outcome, Outcome::Admitted);
    for _ in 0..2 {
        assert_eq!(futures(limiter.decide(&request([refund()]), None)).outcome, Outcome::Admitted);
        assert_eq!(left(&limiter, "user=down"), 1, "and never above the limit");
    }
}

/// Takes one hit after another until one is refused.
fn admitted(limiter: &Limiter, entries: &str) -> u32 {
    (0..1_000).find(|_| ask(limiter, &[entries]).outcome == Outcome::Refused).expect("a limit below a thousand")
}

#[test]
fn as_many_instances_as_replicas_admit_together_exactly_the_limit() {
    for algorithm in ["fixed_window", "gcra"] {
        for (replicas, limit) in [(1, 7), (2, 10), (3, 12), (5, 5), (8, 64)] {
            let rules = format!(
                "domain: d
on_store_failure: local
descriptors: [{{ key: k, rate_limit: {{ unit: day, requests_per_unit: {limit}, algorithm: {algorithm} }} }}]
"
            );
            let alone = || admitted(&Instance::of(replicas).limiter(&rules), "k=down");
            let together: u32 = (0..replicas).map(|_| alone()).sum();
            assert_eq!(together, limit, "{replicas} replicas of {algorithm}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn limit_and_burst_are_divided_by_the_replicas_and_rounded_up(
        limit in 1_u32..2_000, burst in 1_u32..2_000, replicas in 1_u32..100, counts_bursts: bool
    ) {
        let algorithm = if counts_bursts { format!("gcra, burst: {burst}") } else { "fixed_window".to_owned() };
        let instance = Instance::of(replicas);
        let limiter = instance.limiter(&format!(
            "domain: d
on_store_failure: local
descriptors: [{{ key: k, rate_limit: {{ unit: day, requests_per_unit: {limit}, algorithm: {algorithm} }} }}]
"
        ));
        let (limit, burst) = (limit.div_ceil(replicas), burst.div_ceil(replicas));
        let at_once = if counts_bursts { burst } else { limit };
        let take = |hits| Descriptor { hits_addend: Some(hits), ..descriptor("k=down") };
        let all = futures(limiter.decide(&request([take(at_once.into())]), None));
        prop_assert_eq!(all.outcome, Outcome::Admitted);
        prop_assert_eq!(verdict(&all, 0).remaining, 0);
        prop_assert_eq!(ask(&limiter, &["k=down"]).outcome, Outcome::Refused);
        instance.clock.advance("1d");
        prop_assert_eq!(left(&limiter, "k=down"), limit.min(at_once));
    }
}

#[test]
fn an_undo_is_given_back_when_the_request_is_refused_and_kept_otherwise_once() {
    let instance = Instance::of(2);
    let limiter = instance.limiter(TIERS);
    for (descriptors, outcome, told) in [
        (&["tier=up", "user=down"][..], Outcome::Admitted, (1, 0)),
        (&["tier=up", "user=down"], Outcome::Refused, (1, 1)),
        (&["tier=up", "closed=down"], Outcome::Refused, (1, 2)),
        (&["tier=up", "error=down"], Outcome::Failed, (2, 2)),
        (&["tier=up"], Outcome::Admitted, (2, 2)),
        (&["user=down"], Outcome::Refused, (2, 2)),
    ] {
        assert_eq!(ask(&limiter, descriptors).outcome, outcome, "{descriptors:?}");
        assert_eq!(instance.store.told.counts(), told, "{descriptors:?}");
    }
    assert_eq!(left(&limiter, "tier=up"), 7);
}

/// A store that has taken something and never says so.
struct Silent(Arc<Told>);

impl Store for Silent {
    fn charge<'a>(
        &'a self,
        _: &'a [Charge],
        _: Duration,
    ) -> std::pin::Pin<Box<dyn Future<Output = Charged> + Send + 'a>> {
        Box::pin(async {
            let _undo = self.0.undo([], || {});
            std::future::pending().await
        })
    }

    fn give_back<'a>(
        &'a self,
        _: &'a [Charge],
        _: &'a [Option<Micros>],
    ) -> std::pin::Pin<Box<dyn Future<Output = ()> + Send + 'a>> {
        Box::pin(std::future::pending())
    }
}

#[test]
fn what_was_taken_for_a_call_that_is_dropped_is_given_back_once() {
    let told = Arc::new(Told::default());
    let clock = HandClock::at(NOON);
    let guard = guard(Arc::new(Silent(Arc::clone(&told))), &clock, Deadline::Auto, 1);
    let limiter = limiter(TIERS, Options::default(), &guard);
    let request = request([descriptor("tier=1")]);
    {
        let mut call = std::pin::pin!(limiter.decide(&request, None));
        assert!(call.as_mut().poll(&mut std::task::Context::from_waker(std::task::Waker::noop())).is_pending());
        assert_eq!(told.counts(), (0, 0));
    }
    assert_eq!(told.counts(), (0, 1));
}

/// Who answers for a policy.
fn provenance(policy: FailurePolicy) -> Provenance {
    match policy {
        FailurePolicy::Error => Provenance::Error,
        FailurePolicy::Open => Provenance::Open,
        FailurePolicy::Closed => Provenance::Closed,
        FailurePolicy::Local => Provenance::Local,
    }
}

#[test]
fn a_rule_has_the_policy_of_the_nearest_above_it_that_says_one() {
    let policies = || POLICIES.map(Some).into_iter().chain([None]);
    let line = |policy: Option<FailurePolicy>| {
        policy.map_or("charging: each".to_owned(), |policy| format!("on_store_failure: {}", policy.name()))
    };
    let instance = Instance::of(1);
    let overridden =
        |entries: &str| Descriptor { limit: Some(Override::new(5, 4, 1).expect("five a day")), ..descriptor(entries) };
    for process in POLICIES {
        for (domain, rule, below) in policies()
            .flat_map(|domain| policies().map(move |rule| (domain, rule)))
            .flat_map(|(domain, rule)| policies().map(move |below| (domain, rule, below)))
        {
            let rules = format!(
                "domain: d
{}
descriptors:
  - {{ key: plain, rate_limit: {{ unit: day, requests_per_unit: 5 }} }}
  - key: rule
    {}
    rate_limit: {{ unit: day, requests_per_unit: 5 }}
    descriptors: [{{ key: below, {}, rate_limit: {{ unit: day, requests_per_unit: 5 }} }}]
",
                line(domain),
                line(rule),
                line(below)
            );
            let options =
                Options { policies: StorePolicies::default().inside(Some(process), None), ..Options::default() };
            let limiter = limiter(&rules, options, &instance.guard);
            let domain = domain.unwrap_or(process);
            let rule = rule.unwrap_or(domain);
            let below = below.unwrap_or(rule);
            for (asked, policy) in [
                (descriptor("plain=down"), domain),
                (descriptor("rule=down"), rule),
                (descriptor("rule=down,below=1"), below),
                (overridden("rule=down"), rule),
                (overridden("rule=down,below=1"), below),
                (overridden("nobody=down"), domain),
                (overridden("rule=down,nobody=1"), domain),
            ] {
                let decision = futures(limiter.decide(&request([asked.clone()]), None));
                assert_eq!(verdict(&decision, 0).provenance, provenance(policy), "{asked:?} of\n{rules}");
            }
        }
    }
}

proptest! {
    #[test]
    fn the_store_has_half_of_a_callers_time_at_most_25_ms_or_three_round_trips_and_leaves_3_ms(
        patience_us in 0_u64..400_000,
        round_trip_us in prop::option::of(0_u64..60_000),
    ) {
        let patience = Duration::from_micros(patience_us);
        let ms = Duration::from_millis;
        let round_trip = round_trip_us.map(Duration::from_micros);
        let budget = Deadline::Auto.budget(Some(patience), || round_trip);
        prop_assert_eq!(budget.is_none(), patience <= ms(4), "whoever waits 4 ms or less is answered without the store");
        if let Some(budget) = budget {
            let most = (3 * round_trip.unwrap_or_default()).max(ms(25)).min(ms(100));
            prop_assert_eq!(budget, (patience / 2).min(most).min(patience - ms(3)));
            prop_assert!(budget >= ms(1));
        }
        prop_assert_eq!(Deadline::Auto.budget(None, || round_trip), Some(ms(10)));
        prop_assert_eq!(Deadline::AtOnce.budget(Some(patience), || round_trip), Some(Duration::MAX));
    }

    #[test]
    fn a_fixed_deadline_leaves_the_caller_3_ms_too(fixed_us in 1_000_u64..400_000, patience_us in 0_u64..400_000) {
        let (fixed, patience) = (Duration::from_micros(fixed_us), Duration::from_micros(patience_us));
        let ms = Duration::from_millis;
        let budget = Deadline::Fixed(fixed).budget(Some(patience), || Some(ms(40)));
        prop_assert_eq!(budget, (patience > ms(4)).then(|| fixed.min(patience - ms(3))));
        prop_assert_eq!(Deadline::Fixed(fixed).budget(None, || None), Some(fixed));
    }
}

#[test]
fn a_caller_who_waits_4_ms_or_less_is_answered_by_policy_and_the_store_is_not_called() {
    let instance = Instance::of(1);
    let limiter = instance.limiter(TIERS);
    let ask = |patience: Option<Duration>| {
        futures(limiter.decide(&request([descriptor("tier=up")]), patience)).parts[0].clone()
    };
    let provenance = |part: tidegate::model::Part| match part.finding {
        Finding::Limited(tightest) => tightest.verdict.provenance,
        unlimited => panic!("{unlimited:?}"),
    };
    let ms = Duration::from_millis;
    assert_eq!(provenance(ask(Some(ms(4)))), Provenance::Local);
    assert_eq!(provenance(ask(Some(Duration::ZERO))), Provenance::Local);
    assert!(instance.store.budgets.lock().is_empty());
    for (patience, budget) in [(Some(ms(20)), ms(10)), (None, ms(10)), (Some(ms(5)), ms(2)), (Some(ms(900)), ms(25))] {
        assert_eq!(provenance(ask(patience)), Provenance::Store);
        assert_eq!(instance.store.budgets.lock().pop(), Some(budget), "{patience:?}");
    }
}

#[test]
fn a_store_in_the_process_is_asked_however_short_the_caller_waits() {
    let clock = HandClock::at(NOON);
    let store = Failing::new(&clock);
    let guard = guard(Arc::clone(&store) as Arc<dyn Store>, &clock, Deadline::AtOnce, 1);
    let limiter = limiter(TIERS, Options::default(), &guard);
    for patience in [Some(Duration::ZERO), Some(Duration::from_millis(4)), None] {
        let decision = futures(limiter.decide(&request([descriptor("error=up")]), patience));
        assert_eq!(verdict(&decision, 0).provenance, Provenance::Store, "{patience:?}");
    }
}
