//! What the script writes, for how long, and what it never touches.

use std::cell::RefCell;

use proptest::prelude::*;
use redis::{Cmd, Value};
use tidegate::algorithm::{Algorithm, Charge, Limit};
use tidegate::model::{Charging, Hits, Micros, Quota, Unit, Window};
use tidegate::store::redis::script::{self, Mode, ScriptReply};

use super::bench::{Bench, PREFIX, SLACK_MS, charging_call, key};
use super::hold;
use crate::histories::{any_limit, charge, moment, pause, per_minute, taken};
use crate::world::NOON;

fn all(name: &str, limit: Limit, hits: u64) -> Charge {
    charge(name, limit, Charging::AllOrNothing, Hits::take(hits))
}

fn each(name: &str, limit: Limit, hits: u64) -> Charge {
    charge(name, limit, Charging::Each, Hits::take(hits))
}

/// Charges three counters of which the middle one is not ours, alone and with others, on their own and together.
fn is_foreign(bench: &mut Bench, algorithm: Algorithm, what: &str) {
    let limit = per_minute(algorithm, 10);
    let foreign = each("foreign", limit, 1);
    let before = bench.run("DUMP", &[&key(&foreign)]);
    assert_ne!(before, Value::Nil, "{what} is there");
    for charging in [Charging::Each, Charging::AllOrNothing] {
        let charges = ["one", "foreign", "other"].map(|name| charge(name, limit, charging, Hits::take(1)));
        for mode in [Mode::Each, Mode::All, Mode::Take] {
            let alone = bench.rows(&charges[1..2], mode, NOON);
            assert_eq!(alone[0].answer, None, "{what} is no counter of {algorithm:?}");
            let rows = bench.rows(&charges, mode, NOON);
            let answers: Vec<_> = rows.iter().map(|row| row.answer.map(|answer| answer.outcome.is_refused())).collect();
            assert_eq!(answers, [Some(false), None, Some(false)], "{what}, {algorithm:?}, {mode:?}");
        }
    }
    // It is no outcome: what an enforced neighbour says is what holds.
    let request = [all("third", limit, 1), foreign.clone(), all("refuses", limit, 11)];
    let rows = bench.rows(&request, Mode::All, NOON);
    assert_eq!(rows[1].answer, None);
    assert_eq!(bench.text(&request[0]), None, "{what}: the refused request spent nothing");
    assert_eq!(bench.run("DUMP", &[&key(&foreign)]), before, "{what} is left as it is");
    assert_eq!(bench.run("PTTL", &[&key(&foreign)]), Value::Int(-1), "{what} is kept for ever, as before");
}

#[tokio::test]
async fn a_key_that_holds_another_type_is_nobodys_counter_and_stays() {
    let mut bench = Bench::start(&[]).await;
    for (_, algorithm) in Algorithm::ALL {
        let key = key(&each("foreign", per_minute(algorithm, 10), 1));
        let writes: [(&str, &[&[u8]]); 6] = [
            ("RPUSH", &[&key, b"1 2 3"]),
            ("SADD", &[&key, b"1 2 3"]),
            ("ZADD", &[&key, b"1", b"1 2 3"]),
            ("HSET", &[&key, b"1", b"2"]),
            ("XADD", &[&key, b"*", b"1", b"2"]),
            ("PFADD", &[&key, b"1"]),
        ];
        for (command, arguments) in writes {
            bench.empty();
            bench.run(command, arguments);
            is_foreign(&mut bench, algorithm, command);
        }
    }
}

#[tokio::test]
async fn a_text_that_no_version_wrote_is_nobodys_counter_and_stays() {
    let mut bench = Bench::start(&[]).await;
    let long = "9".repeat(400);
    let texts = [
        "",
        " ",
        "1",
        "abc",
        "1 2 3 4",
        "-1 2",
        "-1 2 3",
        "1.5 2",
        "1.5 2 3",
        "1e3 2",
        "1e3 2 3",
        "0x10 2",
        "0x10 2 3",
        "nan 2",
        "inf 2 3",
        "1 2\n",
        "1 2 3\n",
        " 1 2",
        "1  2",
        "1 2 3 ",
        "1\0 2 3",
        "{}",
        "1 -2 3",
        // More than is ever counted, and moments that no whole number tells.
        "1 4503599627370497",
        "1 4503599627370497 3",
        "9007199254740992 1",
        // The window in which the first of those moments lies.
        "150119987 1",
        "9007199254740993 1 1",
        &format!("{long} 2"),
        &format!("{long} 2 3"),
        &format!("1 {long}"),
        &format!("1 2 {long}"),
    ];
    // No charge counts against nothing or against more than 32 bits hold.
    let slowest = ["1 2 0", "1 2 4294967296"];
    let packed: [&[u64]; 7] = [
        &[1],
        &[1, 2, 3, 4],
        &[u64::MAX, 1],
        &[u64::MAX, 1, 1],
        &[1, 4_503_599_627_370_497],
        &[1, 4_503_599_627_370_497, 3],
        &[150_119_987_000, 1],
    ];
    for (_, algorithm) in Algorithm::ALL {
        for numbers in packed {
            bench.empty();
            let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
            bench.run("SET", &[&key(&each("foreign", per_minute(algorithm, 10), 1)), &bytes]);
            is_foreign(&mut bench, algorithm, &format!("{numbers:?}"));
        }
        for text in texts.into_iter().chain(slowest.into_iter().filter(|_| algorithm.has_burst())) {
            bench.empty();
            bench.set(&each("foreign", per_minute(algorithm, 10), 1), text);
            is_foreign(&mut bench, algorithm, &format!("{text:?}"));
        }
    }
}

#[tokio::test]
async fn a_sorted_set_that_no_version_wrote_is_nobodys_log_and_stays() {
    let mut bench = Bench::start(&[]).await;
    let key = key(&each("foreign", per_minute(Algorithm::SlidingLog, 10), 1));
    let noon = NOON.get().to_string();
    let entries: [(&str, &str); 12] = [
        (&noon, ""),
        (&noon, "alice"),
        (&noon, "1"),
        (&noon, "1 0"),
        (&noon, "-1 2"),
        (&noon, "1.5 2"),
        (&noon, "1 2 3"),
        // More than a start or a count can be.
        (&noon, "4503599627370496 1"),
        (&noon, "0 281474976710657"),
        // No moments.
        ("-1", "0 1"),
        ("1.5", "0 1"),
        ("inf", "0 1"),
    ];
    for (score, member) in entries {
        bench.empty();
        bench.run("ZADD", &[&key, score.as_bytes(), member.as_bytes()]);
        is_foreign(&mut bench, Algorithm::SlidingLog, &format!("{member:?} at {score}"));
    }
}

#[tokio::test]
async fn a_counter_of_as_many_hits_as_are_ever_counted_goes_on_refusing() {
    let mut bench = Bench::start(&[]).await;
    let (most, noon) = (1_u64 << 52, NOON.get());
    for (_, algorithm) in Algorithm::ALL {
        bench.empty();
        let charge = each("full", per_minute(algorithm, 10).counting_refused(), Hits::MOST);
        let text = match algorithm {
            Algorithm::FixedWindow => format!("{} {most}", noon / 60_000_000),
            Algorithm::SlidingWindow => format!("{} {most} {most}", noon / 60_000_000),
            Algorithm::SlidingLog => format!("0 {} at {noon}", 1_u64 << 48),
            Algorithm::TokenBucket | Algorithm::LeakyBucket | Algorithm::Gcra => format!("{} {most} 10", noon / 100),
        };
        bench.set_packed(&charge, &text);
        for _ in 0..2 {
            let answer = bench.rows(std::slice::from_ref(&charge), Mode::Each, NOON)[0].answer;
            assert!(answer.expect("it is ours").outcome.is_refused(), "{algorithm:?}");
            assert_eq!(bench.text(&charge).as_ref(), Some(&text), "{algorithm:?}");
        }
    }
}

#[tokio::test]
async fn what_comes_too_late_does_nothing() {
    let mut bench = Bench::start(&[]).await;
    let passed = NOON.saturating_sub(Micros::new(1));
    for (_, algorithm) in Algorithm::ALL {
        let charges = ["one", "other"].map(|name| each(name, per_minute(algorithm, 10), 1));
        for mode in [Mode::Each, Mode::All, Mode::Take] {
            for charges in [&charges[..1], &charges] {
                let all: Vec<_> = charges.iter().collect();
                let call = bench.at(NOON, &charging_call(PREFIX, &all, mode, passed));
                let reply = call.query::<Value>(&mut bench.connection).expect("Redis answers");
                assert_eq!(script::read(reply, all.len(), mode), Some(ScriptReply::TooLate { now: NOON }));
                assert_eq!(bench.counters(), 0);
            }
        }
        bench.charge(&charges[..1], NOON);
        assert_eq!(bench.counters(), 1, "at its deadline it is in time");
        bench.empty();
    }
}

#[tokio::test]
async fn a_counter_is_kept_until_it_is_idle_and_the_slack_after_that() {
    let mut bench = Bench::start(&[]).await;
    let year = |hits| Quota::new(hits, Window::of_unit(Unit::Year));
    let slow = Limit::new(Algorithm::Gcra, year(1)).expect("it can be counted").counting_refused();
    // Half a millisecond past noon: what is left of a millisecond counts as one.
    let now = NOON.saturating_add(Micros::new(500));
    for (charge, kept_ms) in [
        (each("only", per_minute(Algorithm::FixedWindow, 10), 3), 60_000 + SLACK_MS),
        // Used up, or refused: it is written in its place in the next window, too.
        (each("only", per_minute(Algorithm::FixedWindow, 10), 10), 120_000 + SLACK_MS),
        (each("only", per_minute(Algorithm::FixedWindow, 10), 11), 120_000 + SLACK_MS),
        (each("only", per_minute(Algorithm::SlidingWindow, 10), 3), 120_000 + SLACK_MS),
        (each("only", per_minute(Algorithm::SlidingLog, 10), 3), 60_000 + SLACK_MS),
        // 18 s drain; the next multiple of the power of two above that, 2^25 us.
        (each("only", per_minute(Algorithm::Gcra, 10), 3), 39_752 + SLACK_MS),
        // A tenth of a second drains; the next whole second, which is half a millisecond nearer than a second.
        (each("only", per_minute(Algorithm::Gcra, 600), 1), 1_000 + SLACK_MS),
        // Ten years, however long it would take.
        (all("only", slow, Hits::MOST), 315_360_000_000),
    ] {
        for others in [0, 1] {
            bench.empty();
            let mut request = vec![charge.clone()];
            request.extend((0..others).map(|_| each("other", per_minute(Algorithm::Gcra, 1), 1)));
            let before = bench.time_ms();
            bench.charge(&request, now);
            let after = bench.time_ms();
            let expires = bench.expires_ms(&charge);
            assert!(
                (before + kept_ms..=after + kept_ms).contains(&expires),
                "{:?}: {} ms from {before} to {after} for {kept_ms}",
                charge.limit,
                expires - before
            );
        }
    }
}

/// An expiry that the script does not set: in the year 2286.
const FAR_MS: u64 = 9_999_999_999_999;

/// The expiry costs Redis as much as the rest of a write, so it is not set again where that of the charge before is late enough.
#[tokio::test]
async fn a_counter_is_kept_until_it_is_idle_however_it_came_about() {
    let kept = RefCell::new([0_u32; 2]);
    let charges = prop::collection::vec((pause(), taken()), 2..20);
    hold(2_000, (any_limit(), moment(), charges), |bench, (limit, begin, charges)| {
        bench.empty();
        let (mut now, mut kept_until) = (begin, 0);
        for (after, amount) in charges {
            now = after.from(now, &limit);
            let charge = charge("only", limit, Charging::Each, amount.of(&limit));
            bench.run("PEXPIREAT", &[&key(&charge), FAR_MS.to_string().as_bytes()]);
            let before_ms = bench.time_ms();
            let verdict = bench.charge(std::slice::from_ref(&charge), now)[0];
            if verdict.outcome.is_refused() || charge.hits.taken() == 0 {
                // Nothing is written.
                continue;
            }
            let expires_ms = bench.expires_ms(&charge);
            let is_set = expires_ms != FAR_MS;
            kept.borrow_mut()[usize::from(is_set)] += 1;
            if is_set {
                // By the hand clock.
                kept_until = now.get() / 1_000 + (expires_ms - before_ms).saturating_sub(SLACK_MS);
            }
            let longest = now.get() / 1_000 + 315_360_000_000 - SLACK_MS;
            let idle_ms = ((now.get() + verdict.reset.get()) / 1_000).min(longest);
            prop_assert!(kept_until + 1 >= idle_ms, "{:?}: {} is before {}", limit, kept_until, idle_ms);
        }
        Ok(())
    })
    .await;
    let [kept, set] = kept.into_inner();
    assert!(kept > 1_000 && set > 1_000, "{kept} kept, {set} set");
}

#[tokio::test]
async fn the_script_itself_goes_by_the_clock_of_redis_and_a_second_of_slack() {
    let mut bench = Bench::start(&[]).await;
    let loaded: String = script::load().query(&mut bench.connection).expect("it compiles");
    for (_, algorithm) in Algorithm::ALL {
        let charge = each("only", per_minute(algorithm, 10), 1);
        let far = Micros::from_secs(4_294_967_295);
        let call = charging_call(PREFIX, &[&charge], Mode::Each, far);
        assert_eq!(call.args_iter().nth(1), Some(redis::Arg::Simple(loaded.as_bytes())));
        let before = bench.time_ms();
        let reply = call.query::<Value>(&mut bench.connection).expect("Redis answers");
        let after = bench.time_ms();
        let Some(ScriptReply::Done { now, rows }) = script::read(reply.clone(), 1, Mode::Each) else {
            panic!("{reply:?}")
        };
        assert!((before..=after).contains(&(now.get() / 1_000)), "{} is no time of Redis", now.get());
        let verdict = rows.iter().next().and_then(|row| row.answer).expect("its key is ours");
        // It is idle at its reset, or a tick of 100 us later where the reset is exact.
        let idle_ms = now.saturating_add(verdict.reset).get() / 1_000;
        let expires = bench.expires_ms(&charge);
        // Redis counts from when it writes, which on a busy machine may be later than the script's time.
        let late_ms = after - now.get() / 1_000;
        // A meter is kept until a whole second, or until a multiple of a power of two that is up to twice the reset; sliding windows to the end
        // of the second.
        let rounded_ms = match algorithm {
            Algorithm::SlidingWindow => 60_000,
            _ if algorithm.has_burst() => 1_000 + 2 * verdict.reset.get() / 1_000,
            _ => 0,
        };
        assert!(
            (idle_ms..=idle_ms + 1_002 + late_ms + rounded_ms).contains(&expires),
            "{algorithm:?}: {expires} for {idle_ms}"
        );
        assert!(expires > idle_ms + 500, "{algorithm:?}: {expires} for {idle_ms}");
    }
}

#[tokio::test]
async fn a_request_that_is_decided_as_a_whole_writes_nothing_when_a_charge_cannot_be_understood() {
    let mut bench = Bench::start(&[]).await;
    let charges = ["one", "other"].map(|name| all(name, per_minute(Algorithm::Gcra, 10), 1));
    let call = bench.at(NOON, &charging_call(PREFIX, &charges.each_ref(), Mode::All, NOON));
    let arguments: Vec<_> = call.args_iter().collect();
    let Some((redis::Arg::Simple(packed), others)) = arguments.split_last() else { panic!("it has arguments") };
    let mut unknown = packed.to_vec();
    // Each charge is 56 bytes, and its algorithm stands behind the 4 of its key.
    unknown[packed.len() - 56 + 4] = 99;
    for changed in [&unknown, &packed[..packed.len() - 1]] {
        let mut command = Cmd::new();
        for argument in others {
            let redis::Arg::Simple(bytes) = argument else { panic!("a call has plain arguments") };
            command.arg(*bytes);
        }
        command.arg(changed).query::<Value>(&mut bench.connection).expect_err("the last charge cannot be understood");
        assert_eq!(bench.counters(), 0, "the first charge was not written");
    }
    call.query::<Value>(&mut bench.connection).expect("the call itself can be understood");
}
