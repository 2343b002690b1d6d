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
    Charge { key, limit, hits, descriptor: 0, role, charging, policies, remembers_refusals: true, lease, ask: 0 }
}

fn at(millis: u64) -> Micros {
    NOON.saturating_add(Micros::from_millis(millis))
}

fn admitted(remaining: u32) -> Verdict {
    Verdict { remaining, ..Verdict::uncounted(Outcome::Admitted, Provenance::Store) }
}

/// Asks at `now` for what is due, and grants as many hits of one counter. Returns the hits that were asked for.
fn grant(known: &Known, hits: u64, now: Micros) -> Option<u64> {
    let asks = known.lease_asks(now, ONE, 0, 100);
    let ask = asks.first()?;
    let reset = Micros::from_millis(500);
    known.grant(ask, Some(Granted { at: now, hits, remaining: 400, reset, retry: None }), now, now);
    Some(ask.hits.taken())
}

/// Knowledge of a counter that has a lease of `hits` since [`NOON`].
fn with_lease(charge: &Charge, hits: u64) -> Known {
    let known = Known::default();
    want(&known, charge, NOON);
    assert_eq!(grant(&known, hits, NOON), Some(2), "the first lease is small");
    known
}

/// Asks for a lease on behalf of two charges. One is not enough.
fn want(known: &Known, charge: &Charge, now: Micros) {
    (0..2).for_each(|_| known.want_lease(charge, now));
}

/// The answer of a lease.
fn spend(known: &Known, charge: &Charge, now: Micros) -> Option<Verdict> {
    known.answer(charge, now).filter(|verdict| verdict.provenance == Provenance::Lease)
}

/// The answer without a lease or a store.
fn refusal(known: &Known, charge: &Charge, now: Micros) -> Option<Verdict> {
    known.answer(charge, now).filter(|verdict| verdict.outcome.is_refused())
}

fn refused() -> Verdict {
    Verdict { retry: Some(Micros::from_millis(1)), ..Verdict::uncounted(Outcome::Refused, Provenance::Store) }
}

fn unspent(known: &Known, now: Micros) -> Vec<(u64, Micros)> {
    known.end_all_leases(now).iter().map(|unspent| (unspent.charge.hits.taken(), unspent.at)).collect()
}

#[test]
fn a_lease_is_asked_for_when_a_second_call_needs_it_within_its_length() {
    let one = leased(Algorithm::Gcra);
    for (second, asked) in [(999, Some(10)), (1_000, None)] {
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
    assert_eq!((verdict.remaining, verdict.reset), (407, Micros::from_millis(300)));
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
    assert_eq!(grant(&known, 0, NOON), Some(16), "a lease under the other limit");
    let known = with_lease(&one, 10);
    known.learn(&lowered, &refused(), NOON);
    assert_eq!(unspent(&known, NOON), [(10, NOON)], "which would fit");
    let known = with_lease(&one, 10);
    (0..8).for_each(|_| known.want_lease(&raised, NOON));
    assert_eq!(unspent(&known, NOON), [(10, NOON)], "the store is too far away to be asked");
}

#[test]
fn what_a_request_does_not_spend_after_all_is_put_back() {
    let one = leased(Algorithm::Gcra);
    let known = with_lease(&one, 10);
    let request = [Charge { key: key("other"), ..one.clone() }, one];
    let other = &request[0];
    let mut paid = known.pay(&request, NOON);
    assert_eq!(paid.iter().map(Option::is_some).collect::<Vec<_>>(), [false, true], "the other has no lease");
    known.unpay(&request[1], paid[1].take().unwrap());
    want(&known, other, NOON);
    assert_eq!(grant(&known, 1, NOON), Some(2));
    let paid = known.pay(&request, NOON);
    assert!(paid.iter().flatten().all(|paid| paid.verdict.provenance == Provenance::Lease));
    known.keep(&request, &paid);
    assert_eq!(known.lease_hits(LeaseHits::Spent), 2);
    let mut paid = known.pay(&request, NOON);
    assert!(paid[0].is_none(), "the other has no more");
    assert_eq!(unspent(&known, at(1_000)), [(8, NOON)]);
    known.unpay(&request[1], paid[1].take().unwrap());
    assert_eq!(unspent(&known, at(1_000)), [(1, NOON)], "its lease has ended meanwhile");
}

#[test]
fn a_lease_grows_while_it_is_spent_fast_up_to_its_share_and_shrinks_to_what_is_spent() {
    let one = leased(Algorithm::Gcra);
    let known = with_lease(&one, 2);
    let mut asked = Vec::new();
    for millis in 1..200 {
        let _ = spend(&known, &one, at(millis));
        let asks = known.lease_asks(at(millis), ONE, 0, 100);
        for ask in &asks {
            let hits = ask.hits.taken();
            asked.push(hits);
            known.grant(
                ask,
                Some(Granted { at: at(millis), hits, remaining: 400, reset: at(0), retry: None }),
                at(millis),
                at(millis),
            );
        }
    }
    assert_eq!(asked[..5], [4, 7, 13, 23, 41], "it holds 4, 8, 16, 32 and then 50 hits, its share");
    assert!(asked[5..].iter().all(|hits| *hits == 38), "{asked:?}: and asks when three quarters are spent");
    known.end_all_leases(at(2_000));
    want(&known, &one, at(2_000));
    let tiny = Charge { lease: LeaseTerms::new(999, Micros::from_secs(1)), ..leased(Algorithm::Gcra) };
    let known = Known::default();
    want(&known, &tiny, NOON);
    assert_eq!(grant(&known, 1, NOON), None, "its share is less than one hit");
    assert_eq!(known.leases(), 0);
}

#[test]
fn leases_that_are_closed_are_given_back_and_so_is_what_is_granted_later() {
    let one = leased(Algorithm::Gcra);
    let known = with_lease(&one, 10);
    want(&known, &Charge { key: key("other"), ..leased(Algorithm::Gcra) }, NOON);
    let asks = known.lease_asks(NOON, ONE, 0, 100);
    known.close_leases();
    assert_eq!(spend(&known, &one, NOON), None);
    assert_eq!(unspent(&known, NOON), [(10, NOON)]);
    let granted = Granted { at: at(1), hits: 2, remaining: 0, reset: Micros::ZERO, retry: None };
    known.grant(&asks[0], Some(granted), NOON, at(2));
    assert_eq!(unspent(&known, at(2)), [(2, at(1))]);
    want(&known, &one, NOON);
    assert!(known.lease_asks(NOON, ONE, 0, 100).is_empty());
}

/// Knowledge of a counter of which the store granted nothing and has so many hits left at [`NOON`]. It is asked again.
fn used_up(charge: &Charge, remaining: u32) -> Known {
    let known = Known::default();
    want(&known, charge, NOON);
    let asks = known.lease_asks(NOON, ONE, 0, 100);
    let nothing = Granted { at: NOON, hits: 0, remaining, reset: Micros::from_secs(1), retry: None };
    known.grant(&asks[0], Some(nothing), NOON, NOON);
    known
}

#[test]
fn callers_of_a_counter_at_its_limit_wait_for_its_next_lease() {
    let limit = Limit::new(Algorithm::Gcra, Quota::new(100, Window::of_unit(Unit::Second))).unwrap();
    let slow = Charge { limit, ..leased(Algorithm::Gcra) };
    // One hit drains in 10 ms, and the next grant may take 25 ms more.
    for (remaining, waits) in [(0, 35), (1, 25), (2, 15), (3, 5), (4, 0)] {
        let known = used_up(&slow, remaining);
        for millis in 0..60 {
            let refusal = refusal(&known, &slow, at(millis));
            assert_eq!(refusal.is_some(), millis < waits, "of {remaining} after {millis} ms");
            if let Some(refusal) = refusal {
                let retry = if remaining == 0 { 10_u64.saturating_sub(millis).max(5) } else { 5 };
                assert_eq!((refusal.provenance, refusal.retry), (Provenance::Known, Some(Micros::from_millis(retry))));
            }
        }
    }
    let known = used_up(&slow, 0);
    assert!(refusal(&known, &slow, at(10)).is_some());
    assert_eq!(grant(&known, 1, at(10)), Some(4));
    assert!(spend(&known, &slow, at(11)).is_some(), "it is granted");
    known.learn(&slow, &Verdict { retry: Some(Micros::new(1)), ..refused() }, at(12));
    assert!(refusal(&known, &slow, at(20)).is_some(), "a reply to a caller counts too");
    known.forget_refusal(&slow.key);
    assert_eq!(known.answer(&slow, at(1_013)), None, "it is a second old");
}

#[test]
fn charges_that_do_not_wait_for_leases_are_decided_by_the_store() {
    let limit = |algorithm, quota| Limit::new(algorithm, quota).unwrap();
    let second = Window::of_unit(Unit::Second);
    let one = leased(Algorithm::Gcra);
    for (limit, hits, waits, why) in [
        (limit(Algorithm::Gcra, Quota::new(1_000, second)), 50, true, "as many as a lease holds"),
        (limit(Algorithm::Gcra, Quota::new(1_000, second)), 51, false, "more than a lease holds"),
        (limit(Algorithm::Gcra, Quota::new(1_000, second).with_burst(200)), 1, true, "it fills in 200 ms"),
        (limit(Algorithm::Gcra, Quota::new(1_000, second).with_burst(199)), 1, false, "it fills while callers wait"),
        (limit(Algorithm::Gcra, Quota::new(240, Window::of_unit(Unit::Minute))), 1, true, "four hits a second"),
        (limit(Algorithm::Gcra, Quota::new(239, Window::of_unit(Unit::Minute))), 1, false, "its next hit is far"),
        (limit(Algorithm::SlidingWindow, Quota::new(1_000, second)), 1, true, "it drains too"),
        (limit(Algorithm::FixedWindow, Quota::new(1_000, second)), 1, false, "nothing drains"),
    ] {
        let charge = Charge { limit, hits: Hits::take(hits), ..one.clone() };
        let known = used_up(&Charge { limit, ..one.clone() }, 0);
        assert_eq!(known.answer(&charge, at(1)).is_some(), waits, "{why}");
    }
    let known = used_up(&one, 0);
    assert_eq!(known.answer(&Charge { hits: Hits::LOOK, ..one.clone() }, at(1)), None, "a look");
    assert_eq!(known.answer(&Charge { lease: None, ..one }, at(1)), None, "a limit without leases");
}

#[test]
fn no_lease_holds_more_than_its_share_although_it_is_asked_for_twice() {
    let one = leased(Algorithm::Gcra);
    let known = Known::default();
    want(&known, &Charge { hits: Hits::take(25), ..one }, NOON);
    let asks = known.lease_asks(NOON, ONE, 0, 100);
    assert_eq!(asks[0].hits.taken(), 50);
    let granted = Granted { at: NOON, hits: 50, remaining: 400, reset: Micros::ZERO, retry: None };
    (0..2).for_each(|_| known.grant(&asks[0], Some(granted), NOON, NOON));
    assert_eq!(unspent(&known, NOON), [(50, NOON)]);
}

#[test]
fn hits_that_come_one_by_one_are_kept_in_few_parcels_and_given_back_as_if_they_were_older() {
    let one = leased(Algorithm::Gcra);
    let known = Known::default();
    let many = Charge { hits: Hits::take(40), ..one };
    want(&known, &many, NOON);
    for micros in 0..35 {
        let now = NOON.saturating_add(Micros::new(micros));
        let _ = spend(&known, &many, now);
        let asks = known.lease_asks(now, ONE, 0, 100);
        let granted = Granted { at: now, hits: 1, remaining: 1, reset: Micros::ZERO, retry: None };
        known.grant(&asks[0], Some(granted), now, now);
    }
    let given_back = unspent(&known, at(1_001));
    assert_eq!(given_back.len(), 32);
    assert_eq!(given_back.iter().map(|(hits, _)| hits).sum::<u64>(), 35);
    assert_eq!(given_back[31], (4, NOON.saturating_add(Micros::new(31))));
}

#[test]
fn a_store_that_decides_nothing_is_asked_for_counters_that_two_charges_need() {
    let one = leased(Algorithm::Gcra);
    let known = Known::default();
    known.want_lease(&one, NOON);
    assert_eq!(grant(&known, 1, NOON), None);
    assert_eq!(known.take_remaining(&one, NOON), None, "nothing is known of it");
    known.want_lease(&one, at(9_000));
    assert_eq!(grant(&known, 1, at(9_000)), Some(2));
}

#[test]
fn no_lease_is_gathered_for_a_charge_that_drains_for_longer_than_it_lasts() {
    // 100 hits a second, of which leases hold 300 and a quarter at most is granted at once.
    let limit = Limit::new(Algorithm::Gcra, Quota::new(6_000, Window::of_unit(Unit::Minute))).unwrap();
    let one = Charge { limit, ..leased(Algorithm::Gcra) };
    for (hits, waits) in [(50, true), (51, false), (300, false)] {
        let known = used_up(&one, 0);
        let charge = Charge { hits: Hits::take(hits), ..one.clone() };
        assert_eq!(refusal(&known, &charge, at(1)).is_some(), waits, "{hits}");
        assert_eq!(known.answer(&charge, at(9)), refusal(&known, &charge, at(9)));
        assert_eq!(grant(&known, 0, at(9)).is_some(), waits, "{hits} are asked for");
    }
    let known = used_up(&one, 250);
    let charge = Charge { hits: Hits::take(300), ..one.clone() };
    assert!(refusal(&known, &charge, at(1)).is_some(), "most of it is there, and the rest drains soon");
    assert!(grant(&known, 0, at(1)).is_some());
    let more_than_the_burst = Limit::new(Algorithm::Gcra, limit.quota().with_burst(10)).unwrap();
    let burst = Charge { limit: more_than_the_burst, ..one };
    let known = with_lease(&burst, 50);
    assert_eq!(spend(&known, &Charge { hits: Hits::take(11), ..burst.clone() }, NOON), None, "it never fits");
    assert!(spend(&known, &Charge { hits: Hits::take(10), ..burst }, NOON).is_some());
}

#[test]
fn what_is_put_back_is_no_more_than_a_lease_may_hold() {
    let one = leased(Algorithm::Gcra);
    let known = with_lease(&one, 50);
    let request = [Charge { hits: Hits::take(50), ..one.clone() }];
    let mut paid = known.pay(&request, NOON);
    assert_eq!(grant(&known, 50, NOON), Some(50));
    known.unpay(&request[0], paid[0].take().unwrap());
    assert_eq!(unspent(&known, NOON), [(50, NOON)]);
    assert!(spend(&known, &one, NOON).is_some());
}

#[test]
fn a_lease_follows_the_terms_of_its_charges() {
    let one = leased(Algorithm::Gcra);
    let known = with_lease(&one, 2);
    let shorter = Charge { lease: LeaseTerms::new(2_000, Micros::from_millis(50)), ..one };
    assert!(spend(&known, &shorter, at(1)).is_some());
    assert!(spend(&known, &shorter, at(1)).is_some());
    assert_eq!(grant(&known, 2, at(1)), Some(2), "its share is two hits now");
    assert_eq!(spend(&known, &shorter, at(51)), None, "and lasts 50 ms");
}

#[test]
fn a_grant_is_the_last_reply_too() {
    let one = leased(Algorithm::FixedWindow);
    let known = Known::default();
    known.learn(&one, &admitted(999), NOON);
    want(&known, &one, NOON);
    grant(&known, 2, at(1));
    assert_eq!(known.take_remaining(&one, at(2)), Some(400), "what it left is shared, and not what was left before");
}

#[test]
fn a_store_that_grants_nothing_is_asked_ever_less_often() {
    for (algorithm, answers, most) in
        [(Algorithm::FixedWindow, true, 3), (Algorithm::Gcra, false, 12), (Algorithm::Gcra, true, 400)]
    {
        let one = leased(algorithm);
        let known = with_lease(&one, 0);
        let mut asked = 0;
        for millis in 0..2_000 {
            assert_eq!(spend(&known, &one, at(millis)), None);
            for ask in known.lease_asks(at(millis), ONE, 0, 100) {
                asked += 1;
                let nothing =
                    Granted { at: at(millis), hits: 0, remaining: 0, reset: Micros::from_secs(60), retry: None };
                known.grant(&ask, answers.then_some(nothing), at(millis), at(millis));
            }
        }
        assert!((2..=most).contains(&asked), "{algorithm:?}, {answers}: {asked}");
    }
}

/// Calls do not wait for a store that is far, so one that comes late must find hits too.
#[test]
fn a_lease_of_a_store_that_is_far_is_renewed_while_no_call_comes() {
    let one = leased(Algorithm::Gcra);
    for (millis, is_renewed) in [(1, false), (60, true)] {
        let known = with_lease(&one, 10);
        assert!(spend(&known, &one, at(500)).is_some());
        // It ends at 1,000 ms.
        assert_eq!(unspent(&known, at(600)), []);
        let asks = known.lease_asks(at(600), ONE, 0, 100);
        assert!(asks.is_empty(), "nine hits are left");
        assert!((0..9).all(|_| spend(&known, &one, at(600)).is_some()));
        let asks = known.lease_asks(at(600), ONE, 0, 100);
        let granted = Granted { at: at(600), hits: 10, remaining: 400, reset: Micros::from_millis(500), retry: None };
        known.grant(&asks[0], Some(granted), at(600), at(600 + millis));
        // Without a call, shortly before its end.
        assert_eq!(unspent(&known, at(1_050)), []);
        assert!(known.lease_asks(at(1_050), ONE, 0, 100).is_empty(), "ten hits are left for half a second");
        assert!(spend(&known, &one, at(1_300)).is_some());
        // The next look is 100 ms later, and a grant that is asked for then would come after its end.
        assert_eq!(unspent(&known, at(1_469)), []);
        let asked = known.lease_asks(at(1_469), ONE, 0, 100).first().map(|ask| ask.hits.taken());
        assert_eq!(asked, is_renewed.then_some(10), "a grant takes {millis} ms");
    }
}

/// Between two calls of a counter, its lease may end many times.
#[test]
fn a_counter_of_a_store_that_is_far_keeps_a_lease_for_six_lengths_after_its_last_call() {
    let one = leased(Algorithm::Gcra);
    let last = 1_000;
    for (pause, is_paid) in [(600, true), (900, true), (5_900, true), (7_500, false)] {
        let known = Known::default();
        want(&known, &one, NOON);
        let mut asked = 0;
        // As the tasks do: a look each 100 ms, and a grant that takes 60 ms.
        for millis in (0..last + pause).step_by(100) {
            let _ended = unspent(&known, at(millis));
            for ask in known.lease_asks(at(millis), ONE, 0, 100) {
                asked += 1;
                let hits = ask.hits.taken();
                let granted =
                    Granted { at: at(millis), hits, remaining: 900, reset: Micros::from_millis(500), retry: None };
                // The store is away for a while, in which the lease ends.
                let is_answered = !(2_000..4_000).contains(&millis);
                known.grant(&ask, is_answered.then_some(granted), at(millis), at(millis + 60));
            }
            if (100..=last).contains(&millis) {
                assert!(spend(&known, &one, at(millis + 60)).is_some(), "after {millis} ms");
            }
        }
        assert_eq!(spend(&known, &one, at(last + pause)).is_some(), is_paid, "{pause} ms after the last call");
        assert!(asked <= 16, "two asks a length, and not {asked}");
    }
}

/// The last hits are for those who call, and the hits of a fixed window end with it.
#[test]
fn a_lease_of_a_store_that_is_far_is_not_renewed_without_a_call_where_the_hits_would_be_lost() {
    for (algorithm, remaining, reset, is_renewed) in [
        (Algorithm::Gcra, 16, 1_000, true),
        (Algorithm::Gcra, 15, 1_000, false),
        (Algorithm::FixedWindow, 900, 1_066, true),
        (Algorithm::FixedWindow, 900, 1_065, false),
    ] {
        let one = leased(algorithm);
        let known = Known::default();
        want(&known, &one, NOON);
        let asks = known.lease_asks(NOON, ONE, 0, 100);
        let reset = Micros::from_millis(reset);
        known.grant(&asks[0], Some(Granted { at: NOON, hits: 10, remaining, reset, retry: None }), NOON, at(60));
        assert!(spend(&known, &one, at(700)).is_some());
        assert!(known.lease_asks(at(700), ONE, 0, 100).is_empty(), "nine hits are left");
        assert_eq!(unspent(&known, at(1_000)), [(9, NOON)]);
        let is_asked = !known.lease_asks(at(1_000), ONE, 0, 100).is_empty();
        assert_eq!(is_asked, is_renewed, "{algorithm:?}, {remaining} remaining, reset after {reset:?}");
    }
}

#[test]
fn hits_that_were_put_back_are_no_demand() {
    let one = leased(Algorithm::Gcra);
    let known = with_lease(&one, 10);
    for millis in 100..200 {
        for _ in 0..100 {
            let paid = known.pay(std::slice::from_ref(&one), at(millis));
            for spent in paid.into_iter().flatten() {
                known.unpay(&one, spent);
            }
        }
        assert!(known.lease_asks(at(millis), ONE, 0, 100).is_empty(), "ten hits are left, and none was spent");
    }
}

#[test]
fn hits_that_drain_soon_are_not_given_back_while_much_of_the_limit_remains() {
    let per_hour = Limit::new(Algorithm::Gcra, Quota::new(1_000, Window::of_unit(Unit::Hour))).unwrap();
    for (limit, remaining, is_given_back) in [
        (leased(Algorithm::Gcra).limit, 500, false),
        (leased(Algorithm::Gcra).limit, 499, true),
        (leased(Algorithm::SlidingWindow).limit, 900, true),
        (leased(Algorithm::TokenBucket).limit, 900, false),
        (per_hour, 900, true),
    ] {
        let known = Known::default();
        let one = Charge { limit, ..leased(Algorithm::Gcra) };
        want(&known, &one, NOON);
        let asks = known.lease_asks(NOON, ONE, 0, 100);
        let granted = Granted { at: NOON, hits: 10, remaining, reset: Micros::from_secs(9), retry: None };
        known.grant(&asks[0], Some(granted), NOON, NOON);
        let rest = unspent(&known, at(1_000));
        assert_eq!(!rest.is_empty(), is_given_back, "{limit:?}, {remaining} remaining");
    }
}

/// The store's result of charges that carry asks.
fn charged(answers: &[Result<Verdict, StoreError>], granted: &[u64]) -> Charged {
    let reset = Micros::from_millis(500);
    let beside = |hits: &u64| Granted { at: NOON, hits: *hits, remaining: 400, reset, retry: None };
    let granted = granted.iter().map(beside).enumerate().collect();
    Charged { granted, ..Charged::answered(answers.iter().copied().collect()) }
}

#[test]
fn a_charge_that_the_store_decides_carries_the_ask_of_its_lease() {
    let one = leased(Algorithm::Gcra);
    let charges = std::slice::from_ref(&one);
    let known = with_lease(&one, 0);
    assert_eq!(known.carry(charges, at(1), ONE).map(|charges| charges[0].ask), None, "nothing is needed yet");
    assert!(spend(&known, &one, at(10)).is_none());
    let carrying = known.carry(charges, at(10), ONE).expect("its lease needs hits");
    assert_eq!(carrying[0].ask, 4);
    assert!(known.lease_asks(at(10), ONE, 0, 100).is_empty(), "it is asked for once");
    assert!(known.carry(charges, at(10), ONE).is_none());
    known.carried(&carrying, &charged(&[Ok(admitted(400))], &[4]), at(10), at(11));
    assert_eq!(known.learn(&one, &admitted(400), at(10)), 4, "which are held beside what remains");
    assert!((0..4).all(|_| spend(&known, &one, at(12)).is_some()));
}

#[test]
fn an_ask_that_was_not_sent_or_is_late_is_due_again_and_one_that_is_refused_waits() {
    let one = leased(Algorithm::Gcra);
    for (error, is_due, is_carried) in [
        (StoreError::Overloaded, true, true),
        (StoreError::TimedOut, true, false),
        (StoreError::Late, true, false),
        (StoreError::Rejected, false, false),
    ] {
        let known = with_lease(&one, 0);
        assert!(spend(&known, &one, at(10)).is_none());
        let carrying = known.carry(std::slice::from_ref(&one), at(10), ONE).expect("its lease needs hits");
        known.carried(&carrying, &charged(&[Err(error)], &[]), at(10), at(11));
        assert_eq!(
            known.carry(&carrying, at(11), ONE).is_some(),
            is_carried,
            "{error}: a late store is asked without a call"
        );
        let asks = known.lease_asks(at(11), ONE, 0, 100);
        assert_eq!(!asks.is_empty(), is_due && !is_carried, "{error}");
        if !is_due {
            assert!(spend(&known, &one, at(17)).is_none());
            assert!(known.carry(&carrying, at(17), ONE).is_some(), "{error}: the store is asked again after a pause");
        }
    }
}

#[test]
fn the_second_call_within_six_lengths_of_a_lease_carries_its_first_ask() {
    let one = leased(Algorithm::Gcra);
    let charges = std::slice::from_ref(&one);
    for (millis, verdict, asks) in [(5_999, admitted(9), Some(2)), (6_000, admitted(9), None), (5, refused(), None)] {
        let known = Known::default();
        assert!(known.carry(charges, NOON, ONE).is_none(), "a counter that one call needs gets no lease");
        known.learn(&one, &verdict, NOON);
        assert_eq!(known.carry(charges, at(millis), ONE).map(|charges| charges[0].ask), asks, "{millis} ms");
    }
    let known = Known::default();
    let whole = Charge { charging: Charging::AllOrNothing, ..one.clone() };
    known.learn(&whole, &admitted(9), NOON);
    assert!(known.carry(&[whole], at(1), ONE).is_none(), "the store decides on all charges together");
}

#[test]
fn hits_of_a_new_window_are_spent_although_a_reply_about_it_came_first() {
    let one = leased(Algorithm::FixedWindow);
    let known = with_lease(&one, 2);
    (0..2).for_each(|_| _ = spend(&known, &one, at(499)).expect("two hits are left"));
    // The lease is asked for in the next window, and a call that is sent after it is answered before it.
    assert_eq!(spend(&known, &one, at(500)), None);
    let asks = known.lease_asks(at(500), ONE, 0, 100);
    let reply = Verdict { reset: Micros::from_millis(999), ..admitted(900) };
    known.learn(&one, &reply, at(501));
    let granted = Granted { at: at(500), hits: 4, remaining: 896, reset: Micros::from_secs(1), retry: None };
    known.grant(&asks[0], Some(granted), at(500), at(502));
    assert!((0..4).all(|_| spend(&known, &one, at(503)).is_some()));
}

#[test]
fn hits_of_several_parcels_are_given_back_where_they_do_not_drain_soon_together() {
    let lease = Some(LeaseTerms::new(1_000_000, Micros::from_secs(1)).unwrap());
    let many = Charge { lease, hits: Hits::take(100), ..leased(Algorithm::Gcra) };
    // The hits of a parcel drain in 60 ms.
    for (parcels, rest) in [(1, vec![]), (2, vec![(60, at(0)), (60, at(10))])] {
        let known = Known::default();
        want(&known, &many, NOON);
        for sent in (0..parcels).map(|parcel| at(10 * parcel)) {
            assert_eq!(spend(&known, &many, sent), None, "more than there are");
            let asks = known.lease_asks(sent, ONE, 0, 100);
            let granted = Granted { at: sent, hits: 60, remaining: 800, reset: Micros::from_secs(9), retry: None };
            known.grant(&asks[0], Some(granted), sent, sent);
        }
        assert_eq!(unspent(&known, at(2_000)), rest);
    }
}

#[test]
fn a_counter_far_from_its_limit_asks_for_what_drains_in_ten_milliseconds_and_keeps_that_size() {
    // Of 1,000 a second, ten hits drain in 10 ms; of 100, one; of 4,000, forty. The share of a lease is 5 %.
    for (algorithm, limit, remaining, asked) in [
        (Algorithm::Gcra, 1_000, 500, 10),
        (Algorithm::TokenBucket, 1_000, 500, 10),
        (Algorithm::TokenBucket, 1_000, 499, 2),
        (Algorithm::Gcra, 100, 100, 2),
        (Algorithm::LeakyBucket, 4_000, 4_000, 16),
        (Algorithm::SlidingWindow, 1_000, 1_000, 2),
        (Algorithm::FixedWindow, 1_000, 1_000, 2),
    ] {
        let limit = Limit::new(algorithm, Quota::new(limit, Window::of_unit(Unit::Second))).unwrap();
        let one = Charge { limit, ..leased(algorithm) };
        let known = Known::default();
        known.learn(&one, &admitted(remaining), NOON);
        let carried = known.carry(std::slice::from_ref(&one), at(1), ONE).expect("the second call asks");
        assert_eq!(carried[0].ask, asked, "{algorithm:?} {remaining}");
        if asked > 2 {
            let reset = Micros::from_millis(500);
            let granted = Granted { at: at(1), hits: asked.into(), remaining, reset, retry: None };
            known.grant(&Charge { ask: asked, ..one.clone() }, Some(granted), at(1), at(1));
            assert!(spend(&known, &one, at(2)).is_some());
            // All but one go unused, and need not be given back.
            assert_eq!(unspent(&known, at(1_001)), []);
            assert!(spend(&known, &one, at(1_002)).is_none());
            let carried = known.carry(std::slice::from_ref(&one), at(1_002), ONE).expect("it asks again");
            assert_eq!(
                carried[0].ask,
                2 * asked,
                "{algorithm:?}: its size did not fall, and a call without hits doubles it"
            );
        }
    }
}
