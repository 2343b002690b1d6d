//! The script on a Redis that has no memory, or little: what is there is written in its place, and nothing is made.

use redis::Value;
use tidegate::algorithm::{Algorithm, Charge, Limit};
use tidegate::model::{Charging, Hits, Role};
use tidegate::store::redis::script::{self, ChargeRow, Mode, ScriptReply};

use super::bench::Bench;
use super::shared::{Asked, one, run};
use crate::histories::{charge, per_minute};
use crate::world::NOON;

fn all(name: &str, limit: Limit, hits: u64) -> Charge {
    charge(name, limit, Charging::AllOrNothing, Hits::take(hits))
}

fn each(name: &str, limit: Limit, hits: u64) -> Charge {
    charge(name, limit, Charging::Each, Hits::take(hits))
}

/// Sets how much memory the server may use; 1 is less than it uses.
fn bound(bench: &mut Bench, bytes: &str) {
    bench.run("CONFIG", &[b"SET", b"maxmemory", bytes.as_bytes()]);
}

/// An answer in short: whether it is refused; none if there is no memory.
fn told(row: &ChargeRow) -> Option<bool> {
    assert_eq!(row.is_unsaved, row.answer.is_none());
    row.answer.map(|answer| answer.outcome.is_refused())
}

/// The answers to each request of one call; none where it failed for want of memory.
fn shared(bench: &mut Bench, asked: &[Asked]) -> Vec<Option<Vec<Option<bool>>>> {
    let replies = run(bench, asked, asked.len(), NOON).into_iter().zip(asked);
    let answers = replies.map(|(reply, (charges, mode, _))| {
        if let Value::ServerError(error) = &reply {
            assert_eq!(error.code(), "OOM");
            return None;
        }
        let read = script::read(reply, charges.len(), mode.expect("it charges"));
        let Some(ScriptReply::Done { rows, .. }) = read else { panic!("{read:?}") };
        Some(rows.iter().map(|row| told(&row)).collect())
    });
    answers.collect()
}

#[tokio::test]
async fn a_full_redis_writes_what_is_there_in_its_place_and_makes_nothing_whoever_shares_the_call() {
    let mut bench = Bench::start(&[]).await;
    for (_, algorithm) in Algorithm::ALL {
        bound(&mut bench, "0");
        bench.empty();
        let limit = per_minute(algorithm, 10);
        bench.charge(&[each("there", limit, 1)], NOON);
        bench.charge(&[each("full", limit, 10)], NOON);
        bound(&mut bench, "1");
        // A log grows by each charge.
        let is_log = algorithm == Algorithm::SlidingLog;
        let there = (!is_log).then_some(false);
        let of = |mode, charges: Vec<Charge>| (charges, Some(mode), NOON);
        let asked = [
            of(Mode::Each, vec![each("new", limit, 1)]),
            of(Mode::Each, vec![each("there", limit, 1)]),
            of(Mode::Each, vec![each("new", limit, 1), each("there", limit, 1), each("full", limit, 1)]),
            of(Mode::All, vec![all("new", limit, 1), all("there", limit, 1)]),
            of(Mode::Take, vec![all("there", limit, 1), all("new", limit, 1)]),
            of(Mode::All, vec![all("new", limit, 1), all("full", limit, 1)]),
            of(Mode::All, vec![all("there", limit, 1), all("there", limit, 2)]),
            of(Mode::Lean, vec![each("new", limit, 1), each("there", limit, 1)]),
            of(Mode::Later, vec![all("new", limit, 1)]),
            of(Mode::Lease, vec![all("new", limit, 1)]),
            // A fixed window records what it refuses.
            of(Mode::Each, vec![each("new", limit, 11)]),
        ];
        let whole = (!is_log).then(|| vec![Some(false); 2]);
        let expected = [
            Some(vec![None]),
            Some(vec![there]),
            Some(vec![None, there, Some(true)]),
            None,
            None,
            Some(vec![Some(false), Some(true)]),
            whole,
            Some(vec![None, there]),
            Some(vec![None]),
            Some(vec![None]),
            Some(vec![Some(true)]),
        ];
        assert_eq!(shared(&mut bench, &asked), expected, "{algorithm:?}");
        assert_eq!(bench.counters(), 2, "{algorithm:?}: nothing new is there");
        let left = bench.charge(&[each("there", limit, 0)], NOON)[0].remaining;
        assert_eq!(left, if is_log { 9 } else { 3 }, "{algorithm:?}: one, one, three and one");
    }
}

#[tokio::test]
async fn a_full_redis_admits_nothing_by_halves() {
    let mut bench = Bench::start(&[]).await;
    for (_, algorithm) in Algorithm::ALL {
        bound(&mut bench, "0");
        bench.empty();
        let limit = per_minute(algorithm, 10);
        bench.charge(&[all("full", limit, 10)], NOON);
        bound(&mut bench, "1");
        assert!(bench.charge(&[all("full", limit, 1)], NOON)[0].outcome.is_refused(), "{algorithm:?}");
        for mode in [Mode::All, Mode::Take] {
            let charges = [all("one", limit, 1), all("other", limit, 1)];
            let failed = bench.try_charge(&charges, mode, NOON).expect_err("there is no memory");
            assert_eq!(failed.code(), Some("OOM"), "{algorithm:?}: {failed}");
        }
        // The refusal of a quota leaves the decision to the caller, who then keeps what was taken.
        let quota = Charge { role: Role::Quota, ..all("full", limit, 1) };
        let rows = bench.rows(&[quota, all("other", limit, 1)], Mode::Take, NOON);
        assert_eq!(rows.iter().map(told).collect::<Vec<_>>(), [Some(true), None], "{algorithm:?}");
        assert_eq!(bench.counters(), 1, "{algorithm:?}: nothing was written");
    }
}

/// Hits that are given back to a log are taken off it first, and for that Redis needs no memory.
#[tokio::test]
async fn a_log_that_shrinks_lets_nobody_behind_it_make_a_counter() {
    let mut bench = Bench::start(&[]).await;
    let (log, limit) = (per_minute(Algorithm::SlidingLog, 10), per_minute(Algorithm::FixedWindow, 10));
    bench.charge(&[each("log", log, 3)], NOON);
    bound(&mut bench, "1");
    let back = charge("log", log, Charging::Each, Hits::give_back(1));
    let asked = [(vec![back], Some(Mode::Each), NOON), one("new", limit, 1)];
    assert_eq!(shared(&mut bench, &asked), [Some(vec![None]), Some(vec![None])]);
    assert_eq!(bench.counters(), 1);
    // What was charged before is taken back nevertheless.
    bench.undo(&[each("log", log, 2)], NOON, NOON);
    assert_eq!(bench.charge(&[each("log", log, 0)], NOON)[0].remaining, 9);
}

#[tokio::test]
async fn where_memory_is_scarce_a_refused_request_makes_no_counter_and_charges_those_that_are_there() {
    let mut bench = Bench::start(&[]).await;
    for (_, algorithm) in Algorithm::ALL {
        bench.empty();
        let limit = per_minute(algorithm, 10);
        bench.charge(&[each("full", limit, 10)], NOON);
        bench.charge(&[each("there", limit, 1)], NOON);
        // Whatever the order, and whatever refuses: a limit of nothing, more hits than ever fit, the hits before it.
        let closed = each("closed", limit, 1);
        let closed = Charge { limit: Limit::closed(), ..closed };
        for refused in [
            vec![each("new", limit, 1), each("there", limit, 1), each("full", limit, 1)],
            vec![each("full", limit, 1), each("there", limit, 1), each("new", limit, 1)],
            vec![each("new", limit, 1), closed],
            vec![each("new", limit, 11)],
            vec![each("new", limit, 6), each("new", limit, 6)],
        ] {
            let rows = bench.rows(&refused, Mode::Lean, NOON);
            assert!(rows.iter().any(|row| told(row) == Some(true)), "{algorithm:?}: {rows:?}");
            assert_eq!(bench.counters(), 2, "{algorithm:?}: none is made");
        }
        let left = |bench: &mut Bench, name| bench.charge(&[each(name, limit, 0)], NOON)[0].remaining;
        assert_eq!(left(&mut bench, "there"), 7, "{algorithm:?}: it is charged as ever");
        // A part of a request whose outcome is not known yet.
        let part = [each("there", limit, 1), each("new", limit, 1)];
        let unrecorded: Vec<_> = bench.rows(&part, Mode::Existing, NOON).iter().map(|row| row.is_unrecorded).collect();
        assert_eq!((unrecorded, bench.counters()), (vec![false, true], 2), "{algorithm:?}");
        let rows = bench.rows(&part, Mode::Lean, NOON);
        assert_eq!(rows.iter().map(told).collect::<Vec<_>>(), [Some(false); 2], "{algorithm:?}");
        assert_eq!(
            (left(&mut bench, "there"), left(&mut bench, "new")),
            (5, 9),
            "{algorithm:?}: who is admitted makes it"
        );
    }
}
