//! Tests of what is remembered of a counter, and for how long.

use std::collections::HashSet;

use super::*;
use crate::algorithm::Algorithm;
use crate::model::key::KeyPart;
use crate::model::{Colocation, Quota, Role, StorePolicies, Unit, Window};

const NOON: Micros = Micros::from_secs(1_795_262_400);

fn after(secs: u64) -> Micros {
    NOON.saturating_add(Micros::from_secs(secs))
}

/// The counter of a user.
fn key_of(user: &str) -> CounterKey {
    let part = std::iter::once(KeyPart::own(b"user", user.as_bytes()));
    let window = Window::of_unit(Unit::Minute).length();
    CounterKey::new("d", part, Colocation::Descriptor, Algorithm::SlidingWindow.name(), window)
}

/// A charge of the one counter, against so many hits a minute.
fn charge(hits: Hits, limit: u32) -> Charge {
    let window = Window::of_unit(Unit::Minute);
    let limit = Limit::new(Algorithm::SlidingWindow, Quota::new(limit, window)).expect("it can be counted");
    let key = key_of("alice");
    let (role, charging, policies) = (Role::Enforce, Charging::AllOrNothing, StorePolicies::default());
    Charge { key, limit, hits, descriptor: 0, role, charging, policies, remembers_refusals: true, lease: None, ask: 0 }
}

fn takes(hits: u64, limit: u32) -> Charge {
    charge(Hits::take(hits), limit)
}

fn answer(outcome: Outcome) -> Verdict {
    let retry = outcome.is_refused().then_some(Micros::from_secs(30));
    Verdict { reset: Micros::from_secs(90), retry, ..Verdict::uncounted(outcome, Provenance::Store) }
}

fn is_known(known: &Known, charge: &Charge, now: Micros) -> bool {
    known.answer(charge, now).is_some()
}

#[test]
fn an_admission_ends_refusals_of_as_few_hits_and_those_under_other_limits() {
    let known = Known::default();
    for refused in [takes(5, 10), takes(2, 20)] {
        known.learn(&refused, &answer(Outcome::Refused), NOON);
        assert!(is_known(&known, &refused, NOON));
    }
    known.learn(&takes(3, 10), &answer(Outcome::Admitted), NOON);
    assert!(is_known(&known, &takes(5, 10), NOON), "three hits fit, and five still do not");
    assert!(!is_known(&known, &takes(2, 20), NOON), "the hits of the counter may have drained faster");
    known.learn(&takes(5, 10), &answer(Outcome::Admitted), NOON);
    assert!(!is_known(&known, &takes(5, 10), NOON), "they were admitted");
}

#[test]
fn a_refusal_ends_in_its_time_while_those_of_other_counters_last() {
    let known = Known::default();
    let other = Charge { key: key_of("bob"), ..takes(1, 10) };
    known.learn(&takes(1, 10), &answer(Outcome::Refused), NOON);
    known.learn(&other, &Verdict { retry: Some(Micros::YEAR), ..answer(Outcome::Refused) }, NOON);
    for (secs, expected) in [(29, true), (30, false)] {
        assert_eq!(known.lasting_refusal(&takes(1, 10), after(secs)).is_some(), expected, "{secs} s after it");
        assert!(known.lasting_refusal(&other, after(secs)).is_some());
    }
}

#[test]
fn what_a_reply_left_under_one_limit_is_not_left_under_another() {
    let known = Known::default();
    known.learn(&takes(1, 100), &Verdict { remaining: 99, ..answer(Outcome::Admitted) }, NOON);
    assert_eq!(known.take_remaining(&takes(1, 10), NOON), None);
    assert_eq!(known.take_remaining(&takes(1, 100), NOON), Some(99));
}

#[test]
fn refusals_of_a_counter_are_remembered_under_its_last_four_limits() {
    let known = Known::default();
    (1..=5).for_each(|limit| _ = known.learn(&takes(1, limit), &answer(Outcome::Refused), NOON));
    let remembered = (1..=5).filter(|limit| is_known(&known, &takes(1, *limit), NOON));
    assert_eq!(remembered.collect::<Vec<_>>(), [2, 3, 4, 5]);
}

#[test]
fn a_counter_to_which_hits_were_given_back_is_asked_about_each_charge_of_that_window() {
    let known = Known::default();
    known.learn(&charge(Hits::give_back(1), 10), &answer(Outcome::Admitted), NOON);
    for (secs, expected) in [(0, false), (30, false), (59, false), (60, true)] {
        known.learn(&takes(1, 10), &answer(Outcome::Refused), after(secs));
        assert_eq!(is_known(&known, &takes(1, 10), after(secs)), expected, "{secs} s after it");
    }
}

#[test]
fn hits_that_cannot_be_charged_keep_no_others_waiting() {
    let (known, plain) = (Known::default(), takes(1, 10));
    let key = |user: u32| {
        let (bytes, window) = (user.to_le_bytes(), plain.limit.quota().window().length());
        let part = std::iter::once(KeyPart::own(b"user", &bytes));
        CounterKey::new("d", part, Colocation::Descriptor, plain.limit.algorithm().name(), window)
    };
    let keys: HashSet<CounterKey> = (0..3_000).map(key).collect();
    for key in &keys {
        known.charge_later(&Charge { key: key.clone(), ..plain.clone() }, &answer(Outcome::Admitted), NOON);
    }
    // No hits are ever charged. Each shard has about 190 counters, so two visits to each reach all of them.
    let mut sent = HashSet::new();
    for _ in 0..4 * Known::SHARDS {
        for later in known.due(NOON, 100) {
            sent.insert(later.charge.key.clone());
            known.put_back(later, NOON);
        }
    }
    assert_eq!(sent.len(), keys.len());
}
