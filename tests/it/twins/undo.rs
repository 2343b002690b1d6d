//! Charges that are taken back, because the rest of their request was refused on another node.

use std::cell::RefCell;
use std::collections::BTreeMap;

use proptest::prelude::*;
use tidegate::algorithm::{Algorithm, Charge, Limit};
use tidegate::model::{Charging, Hits, Micros, Quota, Role, Unit, Window};
use tidegate::store::redis::script::{ChargeRow, Mode};

use super::bench::Bench;
use super::hold;
use crate::histories::{Pause, algorithm, any_limit, charge, limit, moment, pause, taken};
use crate::laws::bound;
use crate::world::NOON;

mod equal;
mod groups;

const METERS: [Algorithm; 3] = [Algorithm::TokenBucket, Algorithm::LeakyBucket, Algorithm::Gcra];

fn all(name: &str, limit: Limit, hits: Hits) -> Charge {
    charge(name, limit, Charging::AllOrNothing, hits)
}

fn later(text: &str) -> Micros {
    NOON.saturating_add(Micros::parse(text).expect("a length"))
}

/// What remains of a counter.
fn remaining(bench: &mut Bench, name: &str, limit: Limit, now: Micros) -> u32 {
    bench.charge(&[all(name, limit, Hits::LOOK)], now)[0].remaining
}

/// Few hits in a second or some, so that an undo can be late by more than its window.
fn short_limit() -> impl Strategy<Value = Limit> {
    (algorithm(), 1_000_000_u64..3_000_000, 1_u32..50, prop_oneof![Just(1_000_u16), Just(3_000)]).prop_map(
        |(algorithm, window, hits, burst)| {
            let window = Window::of_length(Micros::new(window)).expect("it is in bounds");
            limit(algorithm, window, hits, burst)
        },
    )
}

#[tokio::test]
async fn an_undone_charge_never_lets_more_pass_than_if_it_had_not_been_asked() {
    // Each charge, and after how many more it is undone, if it is.
    let undone = prop_oneof![2 => Just(None), 1 => (0_usize..4).prop_map(Some)];
    let events = prop::collection::vec((pause(), taken(), undone), 1..20);
    let limits = prop_oneof![any_limit(), short_limit()];
    // How many undos of each algorithm were more than a second late, and across a border of its windows.
    let late = RefCell::new(BTreeMap::from(Algorithm::ALL.map(|(name, _)| (name, 0))));
    hold(2_000, (limits, moment(), events), |bench, (limit, begin, events)| {
        bench.empty();
        let mut now = begin;
        let mut admitted: Vec<(Micros, u128)> = Vec::new();
        let mut pending: Vec<(usize, Micros, Charge)> = Vec::new();
        for (index, (after, amount, undone)) in events.into_iter().enumerate() {
            now = after.from(now, &limit);
            let charge = all("only", limit, amount.of(&limit));
            if !bench.charge(std::slice::from_ref(&charge), now)[0].outcome.is_refused() {
                match undone {
                    Some(after) => pending.push((index + after, now, charge)),
                    None => admitted.push((now, charge.hits.taken().into())),
                }
            }
            for (_, at, charge) in pending.extract_if(.., |(due, ..)| *due == index) {
                let window = limit.quota().window().length().get();
                if now.get() - at.get() > 1_000_000 && now.get() / window > at.get() / window {
                    *late.borrow_mut().get_mut(limit.algorithm().name()).expect("it is one of them") += 1;
                }
                bench.undo(&[charge], at, now);
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
    })
    .await;
    let late = late.into_inner();
    assert!(late.values().all(|undos| *undos > 10), "too few undos were late: {late:?}");
}

#[tokio::test]
async fn a_charge_that_is_undone_at_once_leaves_the_counter_as_it_was() {
    let events = prop::collection::vec((pause(), taken()), 1..10);
    hold(1_000, (any_limit(), moment(), events, taken()), |bench, (limit, begin, events, undone)| {
        bench.empty();
        let mut now = begin;
        for (after, amount) in events {
            now = after.from(now, &limit);
            for name in ["asked", "never asked"] {
                bench.charge(&[all(name, limit, amount.of(&limit))], now);
            }
        }
        let undone = all("asked", limit, undone.of(&limit));
        if !bench.charge(std::slice::from_ref(&undone), now)[0].outcome.is_refused() {
            bench.undo(&[undone], now, now);
        }
        let look = |bench: &mut Bench, name| bench.charge(&[all(name, limit, Hits::LOOK)], now);
        prop_assert_eq!(look(bench, "asked"), look(bench, "never asked"));
        Ok(())
    })
    .await;
}

#[tokio::test]
async fn an_undo_is_dated() {
    let mut bench = Bench::start(&[]).await;
    // Ten hits drain in ten seconds, and are taken back as far as they still stand: ten, then six, then none.
    let drained = ["0s", "4s", "10s", "30s"].map(|after| METERS.map(|meter| (meter, after, 50)));
    let minute = |algorithm| limit(algorithm, Window::of_unit(Unit::Minute), 60, 1_000);
    for (algorithm, after, left) in [
        // Of its own window it is taken, and of no other.
        (Algorithm::FixedWindow, "59s", 50),
        (Algorithm::FixedWindow, "60s", 50),
        (Algorithm::SlidingWindow, "59s", 50),
        // Of the window before it is taken as far as that still counts: whole at its end.
        (Algorithm::SlidingWindow, "60s", 50),
        (Algorithm::SlidingWindow, "90s", 50),
        (Algorithm::SlidingWindow, "120s", 50),
        // Of the log that moment's hits go, and no others.
        (Algorithm::SlidingLog, "0s", 50),
        (Algorithm::SlidingLog, "59s", 50),
        (Algorithm::SlidingLog, "60s", 50),
    ]
    .into_iter()
    .chain(drained.into_iter().flatten())
    {
        bench.empty();
        let charge = all("only", minute(algorithm), Hits::take(10));
        bench.charge(std::slice::from_ref(&charge), NOON);
        let now = later(after);
        bench.charge(std::slice::from_ref(&charge), now);
        bench.undo(&[charge], NOON, now);
        let looked = bench.charge(&[all("only", minute(algorithm), Hits::LOOK)], now)[0];
        assert_eq!(looked.remaining, left, "{algorithm:?}, {after} after the charge that is undone");
    }
}

#[tokio::test]
async fn an_undo_that_is_late_across_a_border_leaves_what_its_algorithm_says_and_no_hit_more() {
    let mut bench = Bench::start(&[]).await;
    let window = Window::of_length(Micros::from_secs(2)).expect("it is in bounds");
    for (algorithm, before, after) in [
        // The window of the charge is over, and what came after the border stands.
        (Algorithm::FixedWindow, 18, 18),
        // Two and thirteen twentieths of the window before, rounded down: of sixteen hits, and then of one.
        (Algorithm::SlidingWindow, 8, 18),
        (Algorithm::SlidingLog, 2, 17),
        // Of fifteen hits twelve have drained in 1.2 seconds, and the three others are taken back.
        (Algorithm::TokenBucket, 14, 17),
        (Algorithm::LeakyBucket, 14, 17),
        (Algorithm::Gcra, 14, 17),
    ] {
        bench.empty();
        let limit = limit(algorithm, window, 20, 1_000);
        let of = |hits| all("only", limit, Hits::take(hits));
        for (at, hits) in [("1500ms", 15), ("1600ms", 1), ("2100ms", 2)] {
            assert!(!bench.charge(&[of(hits)], later(at))[0].outcome.is_refused(), "{algorithm:?} at {at}");
        }
        let now = later("2700ms");
        assert_eq!(remaining(&mut bench, "only", limit, now), before, "{algorithm:?}, before the undo");
        bench.undo(&[of(15)], later("1500ms"), now);
        assert_eq!(remaining(&mut bench, "only", limit, now), after, "{algorithm:?}, after the undo");
        assert!(bench.charge(&[of(u64::from(after) + 1)], now)[0].outcome.is_refused(), "{algorithm:?}: one too many");
        assert!(!bench.charge(&[of(after.into())], now)[0].outcome.is_refused(), "{algorithm:?}: all that is left");
        assert!(bench.charge(&[of(1)], now)[0].outcome.is_refused(), "{algorithm:?}: nothing is left");
    }
}

#[tokio::test]
async fn charges_undone_in_any_order_leave_the_counter_as_if_they_had_not_been_asked() {
    // How long after the one before, the hits, and, when it is undone, after how many more, and in how many charges it came.
    let undone = prop_oneof![Just(None), (0_usize..6, 1_usize..4).prop_map(Some)];
    let after = prop_oneof![2 => Just(0_u64), 1 => Just(1), 2 => 0_u64..3_000_000];
    let events = prop::collection::vec((after, 1_u64..5, undone), 1..30);
    let exact = [Algorithm::FixedWindow, Algorithm::SlidingWindow, Algorithm::SlidingLog];
    hold(600, (prop::sample::select(exact.to_vec()), events), |bench, (algorithm, events)| {
        bench.empty();
        let year = limit(algorithm, Window::of_unit(Unit::Year), 10_000, 1_000);
        let mut now = NOON;
        let mut pending: Vec<(usize, Micros, Vec<Charge>)> = Vec::new();
        let last = events.len() - 1;
        for (index, (after, hits, undone)) in events.into_iter().enumerate() {
            now = now.saturating_add(Micros::new(after));
            let kept = |name| all(name, year, Hits::take(hits));
            match undone {
                None => ["asked", "never asked"].into_iter().for_each(|name| drop(bench.charge(&[kept(name)], now))),
                Some((after, parts)) => {
                    let charges = vec![kept("asked"); parts];
                    bench.charge(&charges, now);
                    pending.push((index + after, now, charges));
                }
            }
            for (_, at, charges) in pending.extract_if(.., |(due, ..)| *due <= index || index == last) {
                bench.undo(&charges, at, now);
            }
        }
        let texts = ["asked", "never asked"].map(|name| bench.text(&all(name, year, Hits::LOOK)));
        if algorithm == Algorithm::SlidingLog || texts[1].is_some() {
            prop_assert_eq!(&texts[0], &texts[1]);
        }
        prop_assert_eq!(remaining(bench, "asked", year, now), remaining(bench, "never asked", year, now));
        Ok(())
    })
    .await;
}

#[tokio::test]
async fn two_charges_of_one_counter_are_taken_back_by_one_undo() {
    let mut bench = Bench::start(&[]).await;
    for (_, algorithm) in Algorithm::ALL {
        bench.empty();
        let minute = limit(algorithm, Window::of_unit(Unit::Minute), 60, 1_000);
        let [three, four, other] =
            [("one", 3), ("one", 4), ("other", 5)].map(|(name, hits)| all(name, minute, Hits::take(hits)));
        bench.charge(&[three.clone(), four.clone(), other.clone()], NOON);
        bench.charge(std::slice::from_ref(&three), later("1us"));
        bench.undo(&[three, four, other], NOON, later("1us"));
        let left = ["one", "other"].map(|name| remaining(&mut bench, name, minute, later("1us")));
        assert_eq!(left, [57, 60], "{algorithm:?}");
    }
}

#[tokio::test]
async fn charges_of_one_counter_are_taken_back_as_one() {
    let mut bench = Bench::start(&[]).await;
    for algorithm in METERS {
        bench.empty();
        let minute = limit(algorithm, Window::of_unit(Unit::Minute), 60, 1_000);
        let charges = [3, 4].map(|hits| all("only", minute, Hits::take(hits)));
        bench.charge(&charges, NOON);
        // Four hits drain in four seconds, of all seven and not of each charge.
        bench.undo(&charges, NOON, later("4s"));
        assert_eq!(remaining(&mut bench, "only", minute, later("4s")), 60, "{algorithm:?}");
    }

    // What came after them in a log is read once, also where it is too much to be moved.
    bench.empty();
    let minute = limit(Algorithm::SlidingLog, Window::of_unit(Unit::Minute), 10_000, 1_000);
    let charges = vec![all("only", minute, Hits::take(1)); 100];
    bench.charge(&charges, NOON);
    for moment in 1..=1_001 {
        bench.charge(&charges[..1], NOON.saturating_add(Micros::new(moment)));
    }
    bench.run("CONFIG", &[b"RESETSTAT"]);
    bench.undo(&charges, NOON, later("2ms"));
    let stats: String = redis::from_redis_value(bench.run("INFO", &[b"commandstats"])).expect("a text");
    let reads = stats.lines().find_map(|line| line.strip_prefix("cmdstat_zrangebyscore:calls=")).expect("it is read");
    // Once to know its ends, and once for the undo.
    assert!(reads.starts_with("2,"), "{reads}");
}

#[tokio::test]
async fn an_undone_charge_of_a_clock_that_had_stepped_back_lets_no_more_pass() {
    let back = || 0_u16..1_500;
    // How far the clock stands behind the first charge, the hits, and whether they are undone, how far behind.
    let events = prop::collection::vec((back(), 1_u64..5, prop::option::of(back())), 1..12);
    let looks = prop::collection::vec(pause(), 1..6);
    let limits = prop_oneof![any_limit(), short_limit()]
        .prop_map(|few| limit(few.algorithm(), few.quota().window(), 9_000, 1_000));
    hold(1_000, (limits, moment(), events, looks), |bench, (limit, begin, events, looks)| {
        bench.empty();
        for name in ["asked", "never asked"] {
            bench.charge(&[all(name, limit, Hits::take(7))], begin);
        }
        let mut undone = Vec::new();
        for (behind, hits, is_undone) in events {
            let now = Pause::Back(behind).from(begin, &limit);
            let asked = all("asked", limit, Hits::take(hits));
            bench.charge(std::slice::from_ref(&asked), now);
            match is_undone {
                Some(behind) => undone.push((asked, now, Pause::Back(behind).from(begin, &limit))),
                None => drop(bench.charge(&[all("never asked", limit, Hits::take(hits))], now)),
            }
        }
        for (asked, at, now) in undone {
            bench.undo(&[asked], at, now);
        }
        let mut now = begin;
        for after in looks {
            let [asked, never] = ["asked", "never asked"].map(|name| remaining(bench, name, limit, now));
            prop_assert!(asked <= never, "{} are left of {} at {}", asked, never, now);
            now = after.from(now, &limit);
        }
        Ok(())
    })
    .await;
}

#[tokio::test]
async fn an_undo_takes_no_more_than_its_charge_from_a_counter_that_was_lost_and_began_anew() {
    let mut bench = Bench::start(&[]).await;
    for (_, algorithm) in Algorithm::ALL {
        bench.empty();
        let minute = limit(algorithm, Window::of_unit(Unit::Minute), 60, 1_000);
        let [lost, kept] = [1, 30].map(|hits| all("only", minute, Hits::take(hits)));
        bench.charge(std::slice::from_ref(&lost), later("70s"));
        // Another server has taken over that never heard of it, and its clock is behind.
        bench.empty();
        bench.charge(&[kept], NOON);
        bench.undo(&[lost], later("70s"), NOON);
        let left = remaining(&mut bench, "only", minute, NOON);
        assert!(left <= 31, "{algorithm:?}: {left}");
    }
}

#[tokio::test]
async fn of_an_entry_of_a_log_that_a_refund_has_shrunk_an_undo_takes_what_is_left() {
    let mut bench = Bench::start(&[]).await;
    let minute = limit(Algorithm::SlidingLog, Window::of_unit(Unit::Minute), 60, 1_000);
    let [first, second, refund] =
        [Hits::take(10), Hits::take(5), Hits::give_back(3)].map(|hits| all("only", minute, hits));
    bench.charge(&[first], NOON);
    bench.charge(std::slice::from_ref(&second), later("1s"));
    bench.charge(&[refund], later("2s"));
    assert_eq!(remaining(&mut bench, "only", minute, later("2s")), 48);
    bench.undo(&[second], later("1s"), later("2s"));
    assert_eq!(remaining(&mut bench, "only", minute, later("2s")), 50, "the ten of the first are there");
    assert_eq!(remaining(&mut bench, "only", minute, later("59s")), 50);
    assert_eq!(remaining(&mut bench, "only", minute, later("60s")), 60, "and they go together");
}

#[tokio::test]
async fn an_undo_creates_no_counter_and_leaves_alone_what_is_not_ours() {
    let mut bench = Bench::start(&[]).await;
    for (_, algorithm) in Algorithm::ALL {
        bench.empty();
        let quota = Quota::new(10, Window::of_unit(Unit::Minute));
        let limit = Limit::new(algorithm, quota).expect("it can be counted");
        let charges = ["nobody's", "not ours"].map(|name| all(name, limit, Hits::take(3)));
        bench.set(&charges[1], "something");
        bench.undo(&charges, NOON, NOON);
        assert_eq!(charges.map(|charge| bench.text(&charge)), [None, Some("something".to_owned())]);
    }
}

/// What each charge of a call was told, and what is left without the call.
fn told(rows: &[ChargeRow]) -> Vec<(bool, u32, Option<u32>)> {
    let one = |row: &ChargeRow| {
        let verdict = row.answer.expect("its key is ours");
        (verdict.outcome.is_refused(), verdict.remaining, row.left.map(|(remaining, _)| remaining))
    };
    rows.iter().map(one).collect()
}

#[tokio::test]
async fn a_part_of_a_request_is_taken_unless_an_enforced_charge_of_it_refuses() {
    let mut bench = Bench::start(&[]).await;
    for (_, algorithm) in Algorithm::ALL {
        bench.empty();
        let minute = limit(algorithm, Window::of_unit(Unit::Minute), 10, 1_000);
        let fits = all("fits", minute, Hits::take(3));
        let refuses = all("refuses", minute, Hits::take(11));
        let kept = Charge { charging: Charging::Each, ..all("kept", minute, Hits::take(2)) };

        let request = [fits.clone(), kept.clone(), refuses.clone()];
        let rows = told(&bench.rows(&request, Mode::Take, NOON));
        assert_eq!(rows, [(false, 10, Some(10)), (false, 8, Some(8)), (true, 10, Some(10))], "{algorithm:?}");
        assert_eq!(bench.text(&fits), None, "{algorithm:?}: nothing of a refused part is taken");

        // Quotas are decided by who knows all of them.
        let quota = |charge: Charge| Charge { role: Role::Quota, ..charge };
        let request = [fits.clone(), kept.clone(), quota(refuses.clone())];
        let rows = bench.rows(&request, Mode::Take, NOON);
        assert_eq!(told(&rows), [(false, 7, Some(10)), (false, 6, Some(6)), (true, 10, Some(10))], "{algorithm:?}");
        bench.undo(std::slice::from_ref(&fits), NOON, NOON);
        let looked = bench.charge(&[all("fits", minute, Hits::LOOK)], NOON)[0];
        assert_eq!(rows[0].left, Some((looked.remaining, looked.reset)), "{algorithm:?}");
    }
}
