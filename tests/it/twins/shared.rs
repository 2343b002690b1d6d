//! Requests that share a call of the script: each is decided as if it had been called alone, one after the other.

use proptest::prelude::*;
use redis::{Cmd, Value};
use tidegate::algorithm::{Algorithm, Charge, Limit};
use tidegate::model::{Charging, Hits, Micros};
use tidegate::store::redis::script::{self, By, Mode, Requests, ScriptReply};

use super::bench::{Bench, PREFIX, key, mode};
use super::hold;
use crate::histories::{algorithm, charge, per_minute, requests};
use crate::world::NOON;

/// A request: its charges, their mode and its deadline; without a mode it takes the hits of its charges back.
pub type Asked = (Vec<Charge>, Option<Mode>, Micros);

pub fn one(name: &str, limit: Limit, hits: u64) -> Asked {
    (vec![charge(name, limit, Charging::Each, Hits::take(hits))], Some(Mode::Each), NOON)
}

/// Adds a request to a call.
fn add(call: &mut Requests, (charges, mode, deadline): &Asked, at: Micros) {
    match mode {
        Some(mode) => call.charge(PREFIX, &charges.iter().collect::<Vec<_>>(), *mode, *deadline),
        None => call.undo(PREFIX, &charges.iter().map(|charge| (charge.clone(), at)).collect::<Vec<_>>()),
    }
}

/// Runs requests in calls of so many, and returns the reply to each.
pub fn run(bench: &mut Bench, asked: &[Asked], per_call: usize, now: Micros) -> Vec<Value> {
    run_as(bench, asked, per_call, now, Requests::command)
}

/// The same by such commands.
fn run_as(
    bench: &mut Bench,
    asked: &[Asked],
    per_call: usize,
    now: Micros,
    command: fn(&Requests, By) -> Cmd,
) -> Vec<Value> {
    let mut replies = Vec::new();
    for asked in asked.chunks(per_call) {
        let mut call = Requests::default();
        asked.iter().for_each(|asked| add(&mut call, asked, now));
        let command = bench.at(now, &command(&call, By::Hash));
        let reply = command.query::<Value>(&mut bench.connection).expect("Redis answers");
        replies.extend(script::split(reply, asked.len()).into_iter().map(script::unframed));
    }
    replies
}

/// What is stored of the counters of these requests.
fn stored(bench: &mut Bench, asked: &[Asked]) -> Vec<Option<String>> {
    asked.iter().flat_map(|(charges, ..)| charges).map(|charge| bench.text(charge)).collect()
}

#[tokio::test]
async fn requests_of_one_call_are_answered_and_leave_the_same_as_one_after_the_other() {
    let kinds = prop::collection::vec(0_u8..10, 20);
    let histories = algorithm().prop_flat_map(requests);
    hold(3_000, (histories, kinds), |bench, (history, kinds)| {
        let charges = history.charges();
        let now = charges[0].0;
        let asked: Vec<Asked> = charges
            .into_iter()
            .zip(kinds)
            .map(|((_, charges), kind)| match kind {
                // Too late.
                0 => (charges, Some(Mode::Each), now.saturating_sub(Micros::new(1))),
                1 => (charges, Some(Mode::Take), now),
                2 => (charges, None, now),
                3 => (charges, Some(Mode::Later), now),
                4 => (charges, Some(Mode::Lease), now),
                _ => {
                    let mode = mode(&charges);
                    (charges, Some(mode), now)
                }
            })
            .collect();
        bench.empty();
        let alone = run(bench, &asked, 1, now);
        let left_alone = stored(bench, &asked);
        for command in [Requests::command, Requests::command_over_slots] {
            bench.empty();
            prop_assert_eq!(&run_as(bench, &asked, asked.len(), now, command), &alone);
            prop_assert_eq!(&stored(bench, &asked), &left_alone);
        }
        Ok(())
    })
    .await;
}

#[tokio::test]
async fn a_request_that_fails_or_is_late_concerns_no_other_of_its_call() {
    let mut bench = Bench::start(&[]).await;
    for (_, algorithm) in Algorithm::ALL {
        bench.empty();
        let limit = per_minute(algorithm, 10);
        let foreign = charge("foreign", limit, Charging::Each, Hits::take(1));
        bench.run("HSET", &[&key(&foreign), b"a", b"1"]);
        let late = (vec![charge("late", limit, Charging::Each, Hits::take(1))], Some(Mode::Each), Micros::ZERO);
        let asked = [one("one", limit, 3), one("foreign", limit, 1), late, one("two", limit, 4), one("one", limit, 2)];
        let answers: Vec<_> = run(&mut bench, &asked, asked.len(), NOON)
            .into_iter()
            .map(|reply| match script::read(reply, 1, Mode::Each) {
                Some(ScriptReply::Done { rows, .. }) => {
                    Some(rows.iter().next().expect("a row").answer.map(|verdict| verdict.remaining))
                }
                Some(ScriptReply::TooLate { .. }) => None,
                None => panic!("no reply"),
            })
            .collect();
        assert_eq!(answers, [Some(Some(7)), Some(None), None, Some(Some(6)), Some(Some(5))], "{algorithm:?}");
    }
}

/// What a log removes needs no memory, and after a write Redis takes every other.
#[tokio::test]
async fn what_had_no_memory_leaves_nothing_of_its_request_to_be_saved_after_it() {
    let mut bench = Bench::start(&[]).await;
    let counted = |name, algorithm| charge(name, per_minute(algorithm, 10), Charging::Each, Hits::take(1));
    let log = counted("log", Algorithm::SlidingLog);
    bench.charge(std::slice::from_ref(&log), NOON);
    let before = bench.text(&log);
    bench.run("CONFIG", &[b"SET", b"maxmemory", b"1"]);
    let charges = vec![counted("one", Algorithm::FixedWindow), log.clone(), counted("two", Algorithm::FixedWindow)];
    let replies = run(&mut bench, &[(charges, Some(Mode::Each), NOON)], 1, NOON);
    let read = script::read(replies[0].clone(), 3, Mode::Each);
    let Some(ScriptReply::Done { rows, .. }) = read else { panic!("{read:?}") };
    assert!(rows.iter().all(|row| row.is_unsaved), "{rows:?}");
    assert_eq!((bench.counters(), bench.text(&log)), (1, before), "nothing was written");
}

#[tokio::test]
async fn a_right_that_is_missing_fails_the_request_that_needs_it_and_no_other_of_its_call() {
    for missing in ["zrange", "zrangebyscore", "zcount", "zadd"] {
        let mut bench = Bench::start(&[]).await;
        let limit = per_minute(Algorithm::SlidingLog, 10);
        run(&mut bench, &[one("log", limit, 3)], 1, NOON);
        bench.run("ACL", &[b"SETUSER", b"default", format!("-{missing}").as_bytes()]);
        let (window, later) = (per_minute(Algorithm::FixedWindow, 10), NOON.saturating_add(Micros::new(1)));
        let asked = [one("one", window, 1), one("log", limit, 1), one("two", window, 1), one("one", window, 1)];
        let asked = asked.map(|(charges, mode, _)| (charges, mode, later));
        let replies = run(&mut bench, &asked, asked.len(), later);
        let remaining = |reply: &Value| match script::read(reply.clone(), 1, Mode::Each) {
            Some(ScriptReply::Done { rows, .. }) => rows.iter().next()?.answer.map(|verdict| verdict.remaining),
            _ => None,
        };
        assert_eq!([0, 2, 3].map(|at: usize| remaining(&replies[at])), [Some(9), Some(9), Some(8)], "{missing}");
        assert!(matches!(replies[1], Value::ServerError(_)), "{missing}: {replies:?}");
    }
}

/// Charges of three counters: a window, a log, and a window.
fn a_log_between_windows() -> [Charge; 3] {
    let algorithms = [("one", Algorithm::FixedWindow), ("log", Algorithm::SlidingLog), ("two", Algorithm::FixedWindow)];
    algorithms.map(|(name, algorithm)| charge(name, per_minute(algorithm, 10), Charging::Each, Hits::take(3)))
}

#[tokio::test]
async fn a_request_that_has_written_something_does_not_go_again() {
    for missing in ["zrange", "zrangebyscore", "zcount", "zadd"] {
        let mut bench = Bench::start(&[]).await;
        let charges = a_log_between_windows();
        bench.charge(&charges, NOON);
        bench.run("ACL", &[b"SETUSER", b"default", format!("-{missing}").as_bytes()]);
        let asked = [(charges[..2].to_vec(), Some(Mode::Each), NOON)];
        let replies = run_as(&mut bench, &asked, 1, NOON, Requests::command_over_slots);
        let Value::ServerError(error) = &replies[0] else { panic!("{missing}: {replies:?}") };
        assert_ne!(error.code(), script::UNREAD, "{missing}");
        assert_eq!(bench.charge(&charges[..1], NOON)[0].remaining, 1, "the window has six hits and three more");
    }
}

#[tokio::test]
async fn an_undo_takes_back_what_it_can_beside_what_redis_refuses() {
    for missing in ["zrange", "zrangebyscore", "zcount", "zrem"] {
        for command in [Requests::command, Requests::command_over_slots] {
            let mut bench = Bench::start(&[]).await;
            let charges = a_log_between_windows();
            bench.charge(&charges, NOON);
            bench.run("ACL", &[b"SETUSER", b"default", format!("-{missing}").as_bytes()]);
            run_as(&mut bench, &[(charges.to_vec(), None, NOON)], 1, NOON, command);
            let left = [0, 2].map(|at: usize| bench.charge(&charges[at..=at], NOON)[0].remaining);
            assert_eq!(left, [7, 7], "{missing}: both windows have the three hits of this charge only");
        }
    }
}

#[tokio::test]
async fn an_undo_needs_no_memory() {
    let mut bench = Bench::start(&[]).await;
    for (_, algorithm) in Algorithm::ALL {
        bench.run("CONFIG", &[b"SET", b"maxmemory", b"0"]);
        bench.empty();
        let limit = per_minute(algorithm, 10);
        let charges = ["one", "two"].map(|name| charge(name, limit, Charging::Each, Hits::take(3)));
        bench.charge(&charges, NOON);
        bench.run("CONFIG", &[b"SET", b"maxmemory", b"1"]);
        bench.undo(&charges, NOON, NOON);
        bench.run("CONFIG", &[b"SET", b"maxmemory", b"0"]);
        let left = charges.map(|charge| bench.charge(std::slice::from_ref(&charge), NOON)[0].remaining);
        assert_eq!(left, [7, 7], "{algorithm:?}");
    }
}
