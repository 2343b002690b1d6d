//! What every algorithm obeys on every store, against oracles that compute the same from the definitions.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;

use proptest::prelude::*;
use proptest::test_runner::{TestCaseResult, TestRunner};
use tidegate::algorithm::{Algorithm, Charge, Limit};
use tidegate::model::policy::is_request_refused;
use tidegate::model::{ChargeOutcome, Charging, Hits, Micros, Role, Unit, Verdict, Window};

use crate::histories::{
    Amount, Pause, amount, any_limit, charge, charging, history, hits_per_window, limit, limit_of, moment, pause, role,
    taken, window,
};
use crate::world::NOON;
pub use bound::bound;
use bound::ticks;
use changes::{
    a_changed_algorithm_or_window_starts_a_new_counter, a_changed_limit_keeps_the_hits_already_used,
    a_refused_charge_that_is_counted_stays, what_is_left_under_another_limit_is_that_limit_less_what_was_used,
};
use delays::{
    a_charge_that_finds_no_slot_spends_nothing, a_charge_that_is_to_wait_leaves_nothing_when_its_request_is_refused,
    a_delay_that_grows_refuses_nothing_and_is_a_step_for_each_hit_over_the_limit,
    hits_that_wait_out_their_delays_pass_no_faster_than_the_limit,
    what_makes_the_longest_wait_no_longer_is_not_recorded,
    who_finds_no_slot_is_told_the_first_moment_at_which_there_is_one,
};
use oracle::{Oracle, Told};
use stores::{Counters, Store};

pub mod bound;
mod changes;
mod delays;
mod long_logs;
mod oracle;
mod stores;

/// The longest wait that is told: ten years. What takes longer is told as this.
const LONGEST_WAIT: Micros = Micros::from_secs(315_360_000);

/// Each of these laws, on each store.
macro_rules! on_every_store {
    ($($law:ident,)+) => {
        /// On the embedded store.
        mod memory {
            $(#[test]
            fn $law() {
                super::$law(&super::Store::Memory);
            })+
        }

        /// On one Redis.
        mod redis {
            $(#[tokio::test]
            async fn $law() {
                super::$law(&super::Store::redis().await);
            })+
        }

        /// On a cluster.
        mod cluster {
            $(#[tokio::test]
            async fn $law() {
                super::$law(&super::Store::cluster().await);
            })+
        }
    };
}

on_every_store! {
    every_answer_is_the_one_that_the_definitions_give,
    no_interval_admits_more_than_its_bound,
    nothing_is_wasted_under_saturation,
    a_promised_wait_is_neither_too_short_nor_too_long,
    a_refused_charge_spends_nothing,
    forgetting_an_idle_counter_changes_no_answer,
    a_counter_is_idle_when_it_says_that_all_is_reset,
    so_many_hits_of_one_are_one_of_so_many,
    raising_a_limit_refuses_no_charge_that_passed,
    raising_a_limit_never_adds_refusals,
    permuting_tiers_changes_no_outcome,
    each_group_of_a_request_is_decided_as_a_request_of_its_own,
    a_promised_wait_is_honest_where_the_refused_charge_is_kept,
    a_counter_with_two_limits_is_remembered_as_long_as_either_needs_it,
    a_changed_limit_keeps_the_hits_already_used,
    what_is_left_under_another_limit_is_that_limit_less_what_was_used,
    a_changed_algorithm_or_window_starts_a_new_counter,
    a_refused_charge_that_is_counted_stays,
    hits_that_wait_out_their_delays_pass_no_faster_than_the_limit,
    who_finds_no_slot_is_told_the_first_moment_at_which_there_is_one,
    a_delay_that_grows_refuses_nothing_and_is_a_step_for_each_hit_over_the_limit,
    what_makes_the_longest_wait_no_longer_is_not_recorded,
    a_charge_that_finds_no_slot_spends_nothing,
    a_charge_that_is_to_wait_leaves_nothing_when_its_request_is_refused,
}

/// How many examples of each law the embedded store is tried on.
const CASES: u32 = 2_000;

/// Tries a law on many examples, as many of each algorithm.
fn hold<S: Strategy<Value: Debug>>(
    store: &Store,
    embedded: u32,
    examples: impl Fn(Algorithm) -> S,
    law: impl Fn(S::Value) -> TestCaseResult,
) {
    hold_of(&Algorithm::ALL.map(|(_, algorithm)| algorithm), store, embedded, examples, law);
}

/// The same, of some algorithms.
fn hold_of<S: Strategy<Value: Debug>>(
    algorithms: &[Algorithm],
    store: &Store,
    embedded: u32,
    examples: impl Fn(Algorithm) -> S,
    law: impl Fn(S::Value) -> TestCaseResult,
) {
    let cases = store.cases(embedded).div_ceil(u32::try_from(algorithms.len()).expect("they are few"));
    for &algorithm in algorithms {
        let name = algorithm.name();
        let config = ProptestConfig { source_file: Some(file!()), ..ProptestConfig::with_cases(cases) };
        let held = TestRunner::new(config).run(&examples(algorithm), &law);
        held.unwrap_or_else(|failed| panic!("{name}: {failed}"));
    }
}

/// A limit, how it is charged, when that begins, and what happens to its counter.
fn uses(algorithm: Algorithm) -> impl Strategy<Value = (Limit, Charging, Micros, Vec<(Pause, Amount)>)> {
    (limit_of(algorithm), charging(), moment(), taking())
}

/// Time that goes on or stands, and hits that are taken.
fn taking() -> impl Strategy<Value = Vec<(Pause, Amount)>> {
    prop::collection::vec((pause(), taken()), 1..40)
}

/// A counter used so, and the moment at which that ends.
fn used<'a>(
    store: &'a Store,
    limit: Limit,
    charging: Charging,
    begin: Micros,
    events: &[(Pause, Amount)],
) -> (Counters<'a>, Micros) {
    let (counters, now, _) = used_and_refused(store, limit, charging, begin, events);
    (counters, now)
}

/// The same, and whether the counter has refused.
fn used_and_refused<'a>(
    store: &'a Store,
    limit: Limit,
    charging: Charging,
    begin: Micros,
    events: &[(Pause, Amount)],
) -> (Counters<'a>, Micros, bool) {
    let counters = store.counters();
    let (mut now, mut has_refused) = (begin, false);
    for (after, amount) in events {
        now = after.from(now, &limit);
        has_refused |= counters.charge(limit, charging, now, amount.of(&limit)).is_refused;
    }
    (counters, now, has_refused)
}

fn every_answer_is_the_one_that_the_definitions_give(store: &Store) {
    hold(store, 10_000, history, |history| {
        let counters = store.counters();
        let mut oracle = Oracle::new(history.algorithm);
        for (index, (now, limit, hits)) in history.charges().enumerate() {
            let told = counters.charge(limit, history.charging, now, hits);
            let expected = oracle.charge(&limit, history.charging, now, hits);
            prop_assert_eq!(told, expected, "charge {} of {:?} at {} against {:?}", index, hits, now.get(), limit);
        }
        Ok(())
    });
}

fn no_interval_admits_more_than_its_bound(store: &Store) {
    hold(store, CASES, uses, |(limit, charging, begin, events)| {
        let counters = store.counters();
        let mut now = begin;
        let mut admitted: Vec<(Micros, u128)> = Vec::new();
        for (after, amount) in events {
            now = after.from(now, &limit);
            let hits = amount.of(&limit);
            if !counters.charge(limit, charging, now, hits).is_refused {
                admitted.push((now, hits.taken().into()));
            }
        }
        for from in 0..admitted.len() {
            let mut sum = 0;
            for &(to, hits) in &admitted[from..] {
                sum += hits;
                let most = bound(&limit, admitted[from].0, to);
                prop_assert!(sum <= most, "{} hits from {} to {}, at most {}", sum, admitted[from].0, to, most);
            }
        }
        Ok(())
    });
}

/// Whoever asks for as much as fits at every moment gets all there is.
fn nothing_is_wasted_under_saturation(store: &Store) {
    hold(
        store,
        CASES,
        |algorithm| (limit_of(algorithm), charging(), moment(), prop::collection::vec(pause(), 1..40)),
        |(limit, charging, begin, pauses)| {
            let counters = store.counters();
            let mut now = begin;
            let mut admitted = 0;
            let mut moments = Vec::new();
            for after in pauses {
                let next = after.from(now, &limit);
                if moments.is_empty() || !stands_idle_between(&limit, now, next) {
                    now = next;
                }
                moments.push(now);
                let left = counters.charge(limit, charging, now, Hits::LOOK).remaining;
                let told = counters.charge(limit, charging, now, Hits::take(left.into()));
                prop_assert!(!told.is_refused && told.remaining == 0, "{} were left", left);
                admitted += u128::from(left);
                prop_assert!(counters.charge(limit, Charging::AllOrNothing, now, Hits::take(1)).is_refused);
                prop_assert_eq!(admitted, all_there_is(&limit, &moments));
            }
            Ok(())
        },
    );
}

fn a_promised_wait_is_neither_too_short_nor_too_long(store: &Store) {
    hold(
        store,
        CASES,
        |algorithm| (uses(algorithm), 1_u64..6),
        |((limit, charging, begin, events), hits)| {
            let (counters, now) = used(store, limit, charging, begin, &events);
            // Probes that are refused are not to keep the promised one out.
            let probe = |now: Micros, hits: u64| counters.charge(limit, Charging::AllOrNothing, now, Hits::take(hits));
            let most = limit.quota().burst();
            if probe(now, 0).remaining == most {
                probe(now, 1);
            }
            let hits = (u64::from(probe(now, 0).remaining) + hits).min(most.into());
            let looked = probe(now, hits);
            prop_assert!(looked.is_refused);
            prop_assert_eq!(probe(now, u64::from(most) + 1).retry, None, "what never fits is promised nothing");
            let retry = looked.retry.expect("what fits into an idle counter is promised a moment");
            prop_assert!(retry > Micros::ZERO && retry <= looked.reset);
            prop_assume!(retry < LONGEST_WAIT);
            let promised = now.saturating_add(retry);
            let tick = match limit.algorithm() {
                Algorithm::FixedWindow | Algorithm::SlidingLog => 1,
                _ => limit.quota().tick().get(),
            };
            for early in [1, tick, retry.get() / 2] {
                let early = Micros::new((promised.get() - early).max(now.get()));
                prop_assert!(
                    early == promised || probe(early, hits).is_refused,
                    "admitted {} early",
                    promised.saturating_sub(early)
                );
            }
            prop_assert!(!probe(promised, hits).is_refused, "refused after {retry}");
            Ok(())
        },
    );
}

/// A refused charge in front of every charge changes no answer but where the definition says that it counts.
fn a_refused_charge_spends_nothing(store: &Store) {
    hold(
        store,
        CASES,
        |algorithm| (uses(algorithm), 1_u64..1_000_000),
        |((limit, charging, begin, events), above)| {
            let charging = if limit.algorithm() == Algorithm::FixedWindow { Charging::AllOrNothing } else { charging };
            let (quiet, bothered) = (store.counters(), store.counters());
            let mut now = begin;
            for (after, amount) in events {
                now = after.from(now, &limit);
                let left = bothered.charge(limit, charging, now, Hits::LOOK).remaining;
                for above in [1, above, Hits::MOST] {
                    prop_assert!(bothered.charge(limit, charging, now, Hits::take(u64::from(left) + above)).is_refused);
                }
                let hits = amount.of(&limit);
                prop_assert_eq!(bothered.charge(limit, charging, now, hits), quiet.charge(limit, charging, now, hits));
            }
            Ok(())
        },
    );
}

fn forgetting_an_idle_counter_changes_no_answer(store: &Store) {
    hold(store, CASES, uses, |(limit, charging, begin, events)| {
        let (kept, swept) = (store.counters(), store.counters());
        let mut now = begin;
        for (after, amount) in events {
            now = after.from(now, &limit);
            swept.forget(now);
            let hits = amount.of(&limit);
            prop_assert_eq!(swept.charge(limit, charging, now, hits), kept.charge(limit, charging, now, hits));
        }
        Ok(())
    });
}

/// Before that moment something is still remembered, so the moment is not later than it must be by more than a tick, and
/// the rounding of the store.
fn a_counter_is_idle_when_it_says_that_all_is_reset(store: &Store) {
    hold(store, CASES, uses, |(limit, charging, begin, events)| {
        let (counters, now, has_refused) = used_and_refused(store, limit, charging, begin, &events);
        let kept = if has_refused { store.keeps_refused() } else { Micros::ZERO };
        let before = counters.charge(limit, charging, now, Hits::LOOK);
        prop_assume!(!before.is_refused && before.remaining < limit.quota().burst() && before.reset < LONGEST_WAIT);
        let tick = limit.quota().tick();
        counters.forget(now.saturating_add(before.reset).saturating_sub(Micros::new(1)));
        prop_assert_eq!(counters.held(), 1, "it is remembered until its reset");
        let idle_at = now.saturating_add(before.reset).saturating_add(tick);
        let rounding = store.rounding(&limit, idle_at.saturating_sub(begin));
        counters.forget(idle_at.saturating_add(rounding).saturating_add(kept));
        prop_assert_eq!(counters.held(), 0, "it is forgotten after its reset");
        Ok(())
    });
}

fn so_many_hits_of_one_are_one_of_so_many(store: &Store) {
    hold(
        store,
        CASES,
        |algorithm| (uses(algorithm), 1_u64..40),
        |((limit, charging, begin, events), hits)| {
            let (single, now) = used(store, limit, charging, begin, &events);
            let (whole, _) = used(store, limit, charging, begin, &events);
            let ones: Vec<_> =
                (0..hits).map(|_| single.charge(limit, Charging::AllOrNothing, now, Hits::take(1))).collect();
            let all = whole.charge(limit, Charging::AllOrNothing, now, Hits::take(hits));
            prop_assert_eq!(all.is_refused, ones.iter().any(|one| one.is_refused));
            if !all.is_refused {
                prop_assert_eq!(Some(&all), ones.last());
                let look = |counters: &Counters<'_>| counters.charge(limit, charging, now, Hits::LOOK);
                prop_assert_eq!(look(&whole), look(&single));
            }
            Ok(())
        },
    );
}

/// The charge that a limit admits, a higher one admits on the same counter.
fn raising_a_limit_refuses_no_charge_that_passed(store: &Store) {
    hold(
        store,
        CASES,
        |algorithm| {
            (
                (Just(algorithm), window(), hits_per_window(), hits_per_window()),
                charging(),
                moment(),
                taking(),
                (pause(), taken()),
            )
        },
        |((algorithm, window, low, high), charging, begin, events, next)| {
            let (low, high) = (low.min(high), low.max(high));
            let (low, high) = (limit(algorithm, window, low, 1_000), limit(algorithm, window, high, 1_000));
            let (counters, now) = used(store, low, charging, begin, &events);
            let (same, _) = used(store, low, charging, begin, &events);
            let now = next.0.from(now, &low);
            let hits = next.1.of(&low);
            let (under_low, under_high) =
                (counters.charge(low, charging, now, hits), same.charge(high, charging, now, hits));
            prop_assert!(under_low.is_refused || !under_high.is_refused);
            prop_assert!(under_low.is_refused || under_high.remaining >= under_low.remaining);
            Ok(())
        },
    );
}

/// Of hits that come one by one, a higher limit never admits fewer, up to any moment.
fn raising_a_limit_never_adds_refusals(store: &Store) {
    hold(
        store,
        CASES,
        |algorithm| {
            (
                (Just(algorithm), window(), hits_per_window(), hits_per_window()),
                charging(),
                moment(),
                prop::collection::vec(pause(), 1..60),
            )
        },
        |((algorithm, window, low, high), charging, begin, pauses)| {
            let (low, high) = (low.min(high), low.max(high));
            let (low, high) = (limit(algorithm, window, low, 1_000), limit(algorithm, window, high, 1_000));
            let (under_low, under_high) = (store.counters(), store.counters());
            let mut now = begin;
            let mut refused = (0, 0);
            for after in pauses {
                now = after.from(now, &low);
                refused.0 += u32::from(under_low.charge(low, charging, now, Hits::take(1)).is_refused);
                refused.1 += u32::from(under_high.charge(high, charging, now, Hits::take(1)).is_refused);
                prop_assert!(refused.1 <= refused.0, "{} refused by the higher, {} by the lower", refused.1, refused.0);
            }
            Ok(())
        },
    );
}

/// Under all_or_nothing the order of the descriptors is of no account, to the request and to each of them.
fn permuting_tiers_changes_no_outcome(store: &Store) {
    hold(
        store,
        CASES,
        |algorithm| {
            (
                tiers(algorithm).prop_flat_map(|tiers| {
                    let order = Just((0..tiers.len()).collect::<Vec<_>>()).prop_shuffle();
                    (Just(tiers), order)
                }),
                moment(),
                prop::collection::vec((pause(), taken()), 1..30),
            )
        },
        |((tiers, order), begin, requests)| {
            let (straight, shuffled) = (store.counters(), store.counters());
            let mut now = begin;
            for (after, amount) in requests {
                now = after.from(now, &tiers[0].0);
                let charge = |(place, index): (usize, usize)| {
                    let (limit, role) = tiers[index];
                    let charge = charge(&index.to_string(), limit, Charging::AllOrNothing, amount.of(&limit));
                    Charge { descriptor: place, role, ..charge }
                };
                let in_order: Vec<_> = (0..tiers.len()).map(|index| charge((index, index))).collect();
                let permuted: Vec<_> = order.iter().copied().enumerate().map(charge).collect();
                let one = straight.request(&in_order, now);
                let other = shuffled.request(&permuted, now);
                prop_assert_eq!(is_refused(&in_order, &one), is_refused(&permuted, &other));
                for (place, &index) in order.iter().enumerate() {
                    prop_assert_eq!(Told::from(one[index]), Told::from(other[place]), "tier {}", index);
                }
            }
            Ok(())
        },
    );
}

/// Two groups of limits, a limit in shadow mode and one on its own: as a request that is charged whole for each group, and one for each other.
fn each_group_of_a_request_is_decided_as_a_request_of_its_own(store: &Store) {
    let group = |first: Algorithm| (limit_of(first), any_limit(), prop::bool::weighted(0.2), any::<bool>());
    hold(
        store,
        CASES,
        |algorithm| {
            let others = (limit_of(algorithm), limit_of(algorithm));
            let requests = prop::collection::vec((pause(), prop::collection::vec(amount(), 6)), 1..30);
            (group(algorithm), group(algorithm), others, moment(), requests)
        },
        |(one, two, (watched, alone), begin, requests)| {
            let (together, apart) = (store.counters(), store.counters());
            let mut now = begin;
            for (after, amounts) in requests {
                now = after.from(now, &one.0);
                let members = [(0, &one), (1, &two)].map(|(descriptor, (first, second, counts_refused, is_quota))| {
                    let first = if *counts_refused { first.counting_refused() } else { *first };
                    [(first, 2 * descriptor), (*second, 2 * descriptor + 1)].map(|(limit, place)| {
                        let hits = amounts[place].of(&limit);
                        let charge = charge(&place.to_string(), limit, Charging::AllOrNothing, hits);
                        Charge { descriptor, role: if *is_quota { Role::Quota } else { Role::Enforce }, ..charge }
                    })
                });
                let each = |name, limit, place: usize| charge(name, limit, Charging::Each, amounts[place].of(&limit));
                let [watched, alone] = [each("watched", watched, 4), each("alone", alone, 5)];
                let watched = Charge { role: Role::Shadow, descriptor: 1, ..watched };
                let alone = Charge { descriptor: 2, ..alone };
                let in_group = |group, charges: &[Charge; 2]| {
                    charges.clone().map(|charge| Charge { charging: Charging::Group(group), ..charge })
                };
                let [[a, b], [c, d]] = [in_group(0, &members[0]), in_group(2, &members[1])];
                let told = together.request(&[a, b, c, watched.clone(), d, alone.clone()], now);
                let [one, two] = members.map(|charges| apart.request(&charges, now));
                let [watched, alone] = [watched, alone].map(|charge| apart.request(&[charge], now)[0]);
                let expected = [one[0], one[1], two[0], watched, two[1], alone];
                prop_assert_eq!(told, expected, "{:?} at {}", amounts, now.get());
            }
            Ok(())
        },
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(CASES))]

    /// No clock, no hits and no limit make a number overflow, and what is told stays within its limit. On the embedded store
    /// alone: clocks beyond 2^53 are none of Redis', whose numbers are exact up to there.
    #[test]
    fn no_number_is_too_large(
        limit in any_limit(), charging in charging(), counts_refused in any::<bool>(),
        charges in prop::collection::vec(
            (prop_oneof![any::<u64>(), Just(u64::MAX), Just(0)], prop_oneof![any::<u64>(), Just(u64::MAX)], any::<bool>()),
            1..60,
        ),
    ) {
        let limit = if counts_refused { limit.counting_refused() } else { limit };
        let counters = Store::Memory.counters();
        for (now, hits, back) in charges {
            let hits = if back { Hits::give_back(hits) } else { Hits::take(hits) };
            let told = counters.charge(limit, charging, Micros::new(now), hits);
            prop_assert!(told.remaining <= limit.quota().limit().max(limit.quota().burst()));
            prop_assert!(told.retry.is_none() || told.is_refused);
            counters.forget(Micros::new(now));
        }
    }
}

/// The most that can be taken at these moments.
fn all_there_is(limit: &Limit, moments: &[Micros]) -> u128 {
    let quota = limit.quota();
    let (most, length) = (u128::from(quota.limit()), quota.window().length().get());
    match limit.algorithm() {
        Algorithm::FixedWindow => {
            let windows: BTreeSet<u64> = moments.iter().map(|moment| moment.get() / length).collect();
            most * windows.len() as u128
        }
        // In each window, at its last moment, all that the one before leaves.
        Algorithm::SlidingWindow => {
            let mut taken = BTreeMap::new();
            for moment in moments {
                let (window, passed) = (moment.get() / length, u128::from(moment.get() % length / quota.tick().get()));
                let before: u128 = window.checked_sub(1).and_then(|before| taken.get(&before)).copied().unwrap_or(0);
                let ticks = u128::from(quota.ticks());
                taken.insert(window, most - before * (ticks - passed) / ticks);
            }
            taken.values().sum()
        }
        // What was taken is there again a window's length later.
        Algorithm::SlidingLog => {
            let mut taken: Vec<(u64, u128)> = Vec::new();
            for moment in moments {
                let live = taken.iter().filter(|(at, _)| at + length > moment.get());
                taken.push((moment.get(), most - live.map(|(_, hits)| hits).sum::<u128>()));
            }
            taken.iter().map(|(_, hits)| hits).sum()
        }
        Algorithm::TokenBucket | Algorithm::LeakyBucket | Algorithm::Gcra => {
            bound(limit, moments[0], moments[moments.len() - 1])
        }
    }
}

/// Whether even a full counter runs empty between two moments, so that what drains afterwards is nobody's.
fn stands_idle_between(limit: &Limit, from: Micros, to: Micros) -> bool {
    let quota = limit.quota();
    match limit.algorithm() {
        Algorithm::FixedWindow | Algorithm::SlidingWindow | Algorithm::SlidingLog => false,
        Algorithm::TokenBucket | Algorithm::LeakyBucket | Algorithm::Gcra => {
            let drained = (ticks(limit, to) - ticks(limit, from)) * u128::from(quota.limit());
            drained > u128::from(quota.burst() - 1) * u128::from(quota.ticks())
        }
    }
}

/// Some limits, the first of this algorithm.
fn tiers(algorithm: Algorithm) -> impl Strategy<Value = Vec<(Limit, Role)>> {
    let others = prop::collection::vec((any_limit(), role()), 1..4);
    ((limit_of(algorithm), role()), others).prop_map(|(first, others)| std::iter::once(first).chain(others).collect())
}

fn is_refused(charges: &[Charge], verdicts: &[Verdict]) -> bool {
    is_request_refused(charges.iter().zip(verdicts).map(|(charge, verdict)| ChargeOutcome {
        descriptor: charge.descriptor,
        role: charge.role,
        refused: verdict.outcome.is_refused(),
    }))
}

fn a_promised_wait_is_honest_where_the_refused_charge_is_kept(store: &Store) {
    for (name, algorithm) in Algorithm::ALL {
        let limit = limit(algorithm, Window::of_unit(Unit::Hour), 10, 1_000).counting_refused();
        let counters = store.counters();
        counters.charge(limit, Charging::AllOrNothing, NOON, Hits::take(10));
        let told = counters.charge(limit, Charging::AllOrNothing, NOON, Hits::take(1));
        assert!(told.is_refused, "{name}");
        let promised = NOON.saturating_add(told.retry.expect("it fits later"));
        let told = counters.charge(limit, Charging::AllOrNothing, promised, Hits::take(1));
        assert!(!told.is_refused, "{name}: refused at the promised moment");
    }
}

fn a_counter_with_two_limits_is_remembered_as_long_as_either_needs_it(store: &Store) {
    let later = NOON.saturating_add(Micros::from_secs(60));
    let mut forgotten = Vec::new();
    for (name, algorithm) in Algorithm::ALL {
        for other in [0, 1_000_000] {
            let [small, other] = [10, other].map(|hits| limit(algorithm, Window::of_unit(Unit::Day), hits, 1_000));
            let counters = store.counters();
            counters.charge(small, Charging::AllOrNothing, NOON, Hits::take(10));
            counters.charge(other, Charging::AllOrNothing, NOON, Hits::take(1));
            // Looked at one by one, which leaves everything as it is.
            let look = || counters.charge(small, Charging::Each, later, Hits::LOOK).remaining;
            let before = look();
            counters.forget(later);
            if look() != before {
                forgotten.push(format!(
                    "{name}, after a limit of {}: {before}, then {}",
                    other.quota().limit(),
                    look()
                ));
            }
        }
    }
    assert_eq!(forgotten, Vec::<String>::new());
}
