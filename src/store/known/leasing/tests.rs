//! Tests of leases: when they are asked for, spent and given back.

use super::*;
use crate::algorithm::{Algorithm, Limit};
use crate::model::key::KeyPart;
use crate::model::{
    Charging, Colocation, CounterKey, Hits, Outcome, Provenance, Quota, Role, StorePolicies, Unit, Window,
};

const NOON: Micros = Micros::from_secs(1_795_262_400);

fn key(name: &str) -> CounterKey {
    let user = std::iter::once(KeyPart::own(b"user", name.as_bytes()));
    CounterKey::new("d", user, Colocation::Descriptor, "any", Unit::Second.length())
}

const ONE: NonZeroU32 = NonZeroU32::MIN;

/// A charge of one hit of a limit of 1,000 a second, which has leases of 50 hits for a second.
fn leased(algorithm: Algorithm) -> Charge {
    let limit = Limit::new(algorithm, Quota::new(1_000, Window::of_unit(Unit::Second))).unwrap();
    let (role, charging, policies) = (Role::Enforce, Charging::Each, StorePolicies::default());
    let lease = Some(LeaseTerms::default());
    let (key, hits) = (key("one"), Hits::take(1));
    Charge { key, limit, hits, descriptor: 0, role, charging, policies, remembers_refusals: true, lease }
}

fn at(millis: u64) -> Micros {
    NOON.saturating_add(Micros::from_millis(millis))
}

fn admitted(remaining: u32) -> Verdict {
    Verdict { remaining, ..Verdict::uncounted(Outcome::Admitted, Provenance::Store) }
}

/// Asks at `now` for what is due, and grants as many hits of one counter. Returns the hits that were asked for.
fn grant(known: &Known, hits: u64, now: Micros) -> Option<u64> {
    let asks = known.lease_asks(now, ONE);
    let ask = asks.first()?;
    let reset = Micros::from_millis(500);
    known.grant(ask, Some(Granted { at: now, hits, remaining: 900, reset }), now, now);
    Some(ask.hits.taken())
}

/// Knowledge of a counter that has a lease of `hits` since [`NOON`].
fn with_lease(charge: &Charge, hits: u64) -> Known {
    let known = Known::default();
    known.want_lease(charge, NOON);
    assert_eq!(grant(&known, hits, NOON), Some(2), "the first lease is small");
    known
}

/// The answer of a lease.
fn spend(known: &Known, charge: &Charge, now: Micros) -> Option<Verdict> {
    known.answer(charge, true, now).filter(|verdict| verdict.provenance == Provenance::Lease)
}

/// The answer without a lease or a store.
fn refusal(known: &Known, charge: &Charge, now: Micros) -> Option<Verdict> {
    known.answer(charge, true, now).filter(|verdict| verdict.outcome.is_refused())
}

fn refused() -> Verdict {
    Verdict { retry: Some(Micros::from_millis(1)), ..Verdict::uncounted(Outcome::Refused, Provenance::Store) }
}

fn unspent(known: &Known, now: Micros) -> Vec<(u64, Micros)> {
    known.end_leases(now).iter().map(|unspent| (unspent.charge.hits.taken(), unspent.at)).collect()
}

#[test]
fn a_lease_is_asked_for_when_a_second_call_needs_it_within_its_length() {
    let one = leased(Algorithm::Gcra);
    for (second, asked) in [(999, Some(2)), (1_000, None)] {
        let known = Known::default();
        known.learn(&one, &admitted(999), NOON);
        assert_eq!(grant(&known, 0, NOON), None);
        known.learn(&one, &admitted(998), at(second));
        assert_eq!(grant(&known, 0, at(second)), asked, "after {second} ms");
    }
}

#[test]
fn hits_are_spent_one_by_one_and_the_rest_is_given_back_with_the_time_of_its_charge() {
    let one = leased(Algorithm::Gcra);
    let known = with_lease(&one, 10);
    let verdict = spend(&known, &Charge { hits: Hits::take(3), ..one.clone() }, at(200)).unwrap();
    assert_eq!((verdict.outcome, verdict.provenance), (Outcome::Admitted, Provenance::Lease));
    assert_eq!((verdict.remaining, verdict.reset), (907, Micros::from_millis(300)));
    assert_eq!(spend(&known, &Charge { hits: Hits::take(8), ..one.clone() }, at(200)), None, "seven are left");
    assert_eq!(unspent(&known, at(999)), []);
    assert_eq!(spend(&known, &one, at(1_000)), None, "it has ended");
    assert_eq!(unspent(&known, at(1_000)), [(7, NOON)]);
    assert_eq!(grant(&known, 0, at(1_000)), Some(3), "as many as were spent");
    assert_eq!(unspent(&known, at(9_000)), []);
    assert_eq!(known.leases(), 0, "nobody needs it any more");
    assert_eq!(LeaseHits::ALL.map(|kind| known.lease_hits(kind)), [10, 3, 7]);
}

#[test]
fn a_lease_of_a_fixed_window_ends_with_the_window_and_nothing_is_given_back_to_it() {
    let one = leased(Algorithm::FixedWindow);
    let known = with_lease(&one, 10);
    assert!(spend(&known, &one, at(499)).is_some());
    assert_eq!(spend(&known, &one, at(500)), None);
    assert_eq!(unspent(&known, at(500)), []);
}

#[test]
fn a_lease_is_not_spent_after_a_step_of_the_clock_before_it() {
    let one = leased(Algorithm::Gcra);
    let known = with_lease(&one, 10);
    let before = NOON.saturating_sub(Micros::new(1));
    assert_eq!(spend(&known, &one, before), None);
    assert_eq!(unspent(&known, before), [(10, NOON)]);
}

#[test]
fn looks_refunds_and_other_limits_are_not_paid_by_a_lease() {
    let one = leased(Algorithm::Gcra);
    let known = with_lease(&one, 10);
    for hits in [Hits::LOOK, Hits::give_back(1)] {
        assert_eq!(spend(&known, &Charge { hits, ..one.clone() }, NOON), None);
    }
    let quota = one.limit.quota().with_limit(2_000);
    let raised = Charge { limit: Limit::new(Algorithm::Gcra, quota).unwrap(), ..one.clone() };
    assert_eq!(spend(&known, &raised, NOON), None);
    assert_eq!(spend(&known, &Charge { lease: None, ..one }, NOON), None);
}

#[test]
fn a_lease_is_given_back_when_its_limit_changes_and_not_for_a_few_charges_under_another() {
    let one = leased(Algorithm::Gcra);
    let other = |limit| {
        let quota = one.limit.quota().with_limit(limit);
        Charge { limit: Limit::new(Algorithm::Gcra, quota).unwrap(), ..one.clone() }
    };
    let (raised, lowered) = (other(2_000), other(500));
    let known = with_lease(&one, 10);
    for round in 1..10 {
        for _ in 0..7 {
            assert_eq!(known.learn(&raised, &admitted(1_999), NOON), 11 - round, "held beside what remains");
        }
        assert!(spend(&known, &one, NOON).is_some(), "both limits are in use");
    }
    assert_eq!(unspent(&known, NOON), []);
    (0..8).for_each(|_| assert_eq!(known.learn(&raised, &admitted(1_999), NOON), 1));
    assert_eq!(unspent(&known, NOON), [(1, NOON)], "the limit has changed");
    assert_eq!(grant(&known, 0, NOON), Some(2), "a lease under the other limit");
    let known = with_lease(&one, 10);
    known.learn(&lowered, &refused(), NOON);
    assert_eq!(unspent(&known, NOON), [(10, NOON)], "which would fit");
    let known = with_lease(&one, 10);
    (0..8).for_each(|_| known.want_lease(&raised, NOON));
    assert_eq!(unspent(&known, NOON), [(10, NOON)], "the store is too far away to be asked");
}

#[test]
fn a_request_is_paid_whole_or_not_at_all() {
    let one = leased(Algorithm::Gcra);
    let known = with_lease(&one, 10);
    let request = [Charge { key: key("other"), ..one.clone() }, one];
    let other = &request[0];
    assert_eq!(known.spend_all(&request, NOON), None);
    known.want_lease(other, NOON);
    assert_eq!(grant(&known, 1, NOON), Some(2));
    let verdicts = known.spend_all(&request, NOON).unwrap();
    assert!(verdicts.iter().all(|verdict| verdict.provenance == Provenance::Lease));
    assert_eq!(known.spend_all(&request, NOON), None, "the other has no more");
    assert_eq!(unspent(&known, at(1_000)), [(9, NOON)]);
}

#[test]
fn a_lease_grows_while_it_is_spent_fast_up_to_its_share_and_shrinks_to_what_is_spent() {
    let one = leased(Algorithm::Gcra);
    let known = with_lease(&one, 2);
    let mut asked = Vec::new();
    for millis in 1..200 {
        let _ = spend(&known, &one, at(millis));
        let asks = known.lease_asks(at(millis), ONE);
        for ask in &asks {
            let hits = ask.hits.taken();
            asked.push(hits);
            known.grant(
                ask,
                Some(Granted { at: at(millis), hits, remaining: 900, reset: at(0) }),
                at(millis),
                at(millis),
            );
        }
    }
    assert_eq!(asked[..5], [3, 6, 12, 24, 34], "it holds 4, 8, 16, 32 and then 50 hits, its share");
    assert!(asked[5..].iter().all(|hits| *hits == 25), "{asked:?}: and asks when half of them are spent");
    known.end_leases(at(2_000));
    known.want_lease(&one, at(2_000));
    let tiny = Charge { lease: LeaseTerms::new(999, Micros::from_secs(1)), ..leased(Algorithm::Gcra) };
    let known = Known::default();
    known.want_lease(&tiny, NOON);
    assert_eq!(grant(&known, 1, NOON), None, "its share is less than one hit");
    assert_eq!(known.leases(), 0);
}

#[test]
fn leases_that_are_closed_are_given_back_and_so_is_what_is_granted_later() {
    let one = leased(Algorithm::Gcra);
    let known = with_lease(&one, 10);
    known.want_lease(&Charge { key: key("other"), ..leased(Algorithm::Gcra) }, NOON);
    let asks = known.lease_asks(NOON, ONE);
    known.close_leases();
    assert_eq!(spend(&known, &one, NOON), None);
    assert_eq!(unspent(&known, NOON), [(10, NOON)]);
    let granted = Granted { at: at(1), hits: 2, remaining: 0, reset: Micros::ZERO };
    known.grant(&asks[0], Some(granted), NOON, at(2));
    assert_eq!(unspent(&known, at(2)), [(2, at(1))]);
    known.want_lease(&one, NOON);
    assert!(known.lease_asks(NOON, ONE).is_empty());
}

#[test]
fn callers_of_a_counter_at_its_limit_wait_for_its_next_lease() {
    let one = leased(Algorithm::Gcra);
    let known = with_lease(&one, 0);
    (0..8).for_each(|millis| _ = known.learn(&one, &refused(), at(millis)));
    let held = refusal(&known, &one, at(20)).expect("the store is asked for a lease");
    assert_eq!((held.provenance, held.retry), (Provenance::Known, Some(Micros::from_millis(5))));
    known.forget_refusal(&one.key);
    assert!(refusal(&known, &one, at(20)).is_some(), "although hits are given back");
    assert_eq!(grant(&known, 5, at(20)), Some(4));
    assert!(spend(&known, &one, at(21)).is_some());
    let slow = Limit::new(Algorithm::Gcra, Quota::new(100, Window::of_unit(Unit::Minute))).unwrap();
    let slow = Charge { limit: slow, ..one };
    let known = with_lease(&slow, 0);
    (0..8).for_each(|millis| _ = known.learn(&slow, &refused(), at(millis)));
    assert_eq!(known.answer(&slow, true, at(20)), None, "its next hit is far");
}

#[test]
fn charges_that_leases_do_not_pay_do_not_wait_for_them() {
    let one = leased(Algorithm::Gcra);
    let at_limit = || {
        let known = with_lease(&one, 0);
        (0..8).for_each(|millis| _ = known.learn(&one, &refused(), at(millis)));
        assert!(refusal(&known, &one, at(20)).is_some());
        known
    };
    for (hits, waits) in [(25, true), (26, false)] {
        let charge = Charge { hits: Hits::take(hits), ..one.clone() };
        let answer = at_limit().answer(&charge, true, at(20));
        assert_eq!(answer.is_some(), waits, "{hits} of the 50 hits that a lease holds at most");
    }
    let known = at_limit();
    let mut asked = Vec::new();
    for millis in 20..3_500 {
        if refusal(&known, &one, at(millis)).is_none() {
            asked.push(millis);
            known.learn(&one, &Verdict { retry: Some(Micros::new(1)), ..refused() }, at(millis));
        }
        grant(&known, 0, at(millis));
    }
    assert_eq!(asked, [1_000, 2_000, 3_000], "one charge a second asks the store");
}

#[test]
fn a_store_that_grants_nothing_is_asked_ever_less_often() {
    for (algorithm, answers, most) in
        [(Algorithm::FixedWindow, true, 12), (Algorithm::Gcra, false, 12), (Algorithm::Gcra, true, 400)]
    {
        let one = leased(algorithm);
        let known = with_lease(&one, 0);
        let mut asked = 0;
        for millis in 0..2_000 {
            assert_eq!(spend(&known, &one, at(millis)), None);
            for ask in known.lease_asks(at(millis), ONE) {
                asked += 1;
                let nothing = Granted { at: at(millis), hits: 0, remaining: 0, reset: Micros::from_secs(60) };
                known.grant(&ask, answers.then_some(nothing), at(millis), at(millis));
            }
        }
        assert!((5..=most).contains(&asked), "{algorithm:?}, {answers}: {asked}");
    }
}
