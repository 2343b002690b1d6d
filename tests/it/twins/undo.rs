//! Charges that are taken back, because the rest of their request was refused on another node.

use proptest::prelude::*;
use tidegate::algorithm::{Algorithm, Charge, Limit};
use tidegate::model::{Charging, Hits, Micros, Quota, Role, Unit, Window};
use tidegate::store::redis::script::{Mode, Row};

use super::bench::Bench;
use super::hold;
use crate::histories::{any_limit, charge, limit, moment, pause, taken};
use crate::laws::bound;
use crate::world::NOON;

fn all(name: &str, limit: Limit, hits: Hits) -> Charge {
    charge(name, limit, Charging::AllOrNothing, hits)
}

#[tokio::test]
async fn an_undone_charge_never_lets_more_pass_than_if_it_had_not_been_asked() {
    // Each charge, and after how many more it is undone, if it is.
    let undone = prop_oneof![2 => Just(None), 1 => (0_usize..4).prop_map(Some)];
    let events = prop::collection::vec((pause(), taken(), undone), 1..20);
    hold(1_000, (any_limit(), moment(), events), |bench, (limit, begin, events)| {
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
    let later = |text: &str| NOON.saturating_add(Micros::parse(text).expect("a length"));
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
        // Ten hits drain in ten seconds, and are taken back as far as they still stand: ten, then six, then none.
        (Algorithm::Gcra, "0s", 50),
        (Algorithm::Gcra, "4s", 50),
        (Algorithm::Gcra, "10s", 50),
        (Algorithm::Gcra, "30s", 50),
    ] {
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
fn told(rows: &[Row]) -> Vec<(bool, u32, Option<u32>)> {
    let one = |row: &Row| {
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
