//! Clocks that are wrong, and a Tidegate that stands still.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::process::Signal;
use tidegate::proto::envoy::service::ratelimit::v3::rate_limit_response::Code;

use super::{
    Asker, ENVOY, LIMIT, exact, is_counted, lasting, load, load_of, ms, patient_tidegate, restored, rules, rules_and,
    settled, tidegate_with,
};
use crate::load::alone;
use crate::redis::Single;
use crate::redis::clock::Clock;
use crate::support::Tidegate;

const SECOND_US: i64 = 1_000_000;
const HOUR_US: i64 = 3_600 * SECOND_US;

#[tokio::test]
async fn instances_whose_clocks_are_years_apart_share_one_window() {
    const YEAR_US: i64 = 365 * 24 * HOUR_US;
    for algorithm in ["fixed_window", "gcra"] {
        let redis = Single::start(&[]).await;
        let (url, rules) = (redis.address().to_string(), rules(algorithm));
        let shifts = [0, YEAR_US, -YEAR_US];
        let clocks = shifts.map(|_| Clock::new());
        let mut instances: Vec<(Tidegate, Asker)> = Vec::new();
        for (clock, shift) in clocks.iter().zip(shifts) {
            clock.shift(shift);
            let variables: Vec<_> = clock.variables().into_iter().chain([("REDIS_URL", url.as_str())]).collect();
            let server = tidegate_with(rules.path(), &variables).await;
            let asker = Asker::of(&server).await;
            instances.push((server, asker));
        }
        for counter in 0..20 {
            let mut admitted = 0;
            for round in 0..2 * LIMIT {
                let turn = (counter + round) % instances.len();
                admitted += instances[turn].1.admitted("open", &counter.to_string(), 1).await;
                // And they drift.
                clocks[turn].shift(shifts[turn] + i64::try_from(round).expect("it is small") * HOUR_US);
            }
            assert_eq!(admitted, LIMIT, "{algorithm}, counter {counter}");
        }
    }
}

#[tokio::test]
async fn a_clock_of_redis_that_steps_back_admits_nothing_and_one_that_steps_on_what_its_windows_hold() {
    let _alone = alone().await;
    let redis = Single::with_clock(&[]).await;
    // So that a step back crosses the border of a window: it is 5 s past an hour.
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("after it").as_micros();
    let past = HOUR_US - i64::try_from(now).expect("it fits") % HOUR_US + 5 * SECOND_US;
    redis.shift_clock(past);
    let rules = rules_and("fixed_window", &["fixed_window", "gcra"]);
    let server = tidegate_with(rules.path(), &[("REDIS_URL", &redis.address().to_string())]).await;
    let load = load(&server).await;
    let mut asker = Asker::of(&server).await;
    let mut steps = Vec::new();
    for (step, extra) in [(0, LIMIT), (-30 * SECOND_US, 0), (HOUR_US, LIMIT), (0, 0)] {
        redis.shift_clock(past + step);
        let stepped = load.elapsed();
        for algorithm in ["fixed_window", "gcra"] {
            assert_eq!(asker.admitted(algorithm, "99999", 2 * LIMIT).await, extra, "{algorithm}, {step} us");
        }
        exact(&load, stepped).await;
        steps.push((step, extra, stepped));
    }
    let (calls, _) = settled(load, &redis).await;
    for (step, extra, stepped) in steps {
        let after = calls.between(stepped, stepped + Duration::from_millis(500));
        let missed = after.such_that(|call| !is_counted(call)).count();
        println!(
            "C2 Redis' clock {} s off: {extra} hits admitted per counter, {missed} of {} answers by policy (bar 0)",
            step / SECOND_US,
            after.count()
        );
    }
}

#[tokio::test]
async fn the_first_call_after_a_step_of_the_clock_of_redis_is_decided_by_it() {
    let redis = Single::with_clock(&[]).await;
    let server = patient_tidegate(&redis.address().to_string()).await;
    let mut asker = Asker::of(&server).await;
    assert!(asker.decided("error", "0").await);
    for step in 1..=5 {
        // Its deadline is over by then, so it is not executed, and sent again.
        redis.shift_clock(step * HOUR_US);
        let answer = asker.ask("error", &step.to_string()).await.expect("Redis decides");
        assert_eq!(answer.overall_code(), Code::Ok);
    }
}

#[tokio::test]
async fn a_tidegate_that_stood_still_goes_on_exactly() {
    let _alone = alone().await;
    let redis = Single::start(&[]).await;
    let server = patient_tidegate(&redis.address().to_string()).await;
    // Few enough for what has come in 5 s to be done in no time.
    let load = load_of(&server, 100, ENVOY).await;
    let mut asker = Asker::of(&server).await;
    assert_eq!(asker.admitted("error", "99999", LIMIT - 1).await, LIMIT - 1);
    server.signal(Signal::STOP);
    lasting(Duration::from_secs(5)).await;
    server.signal(Signal::CONT);
    let resumed = load.elapsed();
    assert_eq!(asker.admitted("error", "99999", 3).await, 1, "what was left, and no more");
    exact(&load, resumed).await;
    let (calls, _) = settled(load, &redis).await;
    let last =
        calls.iter().filter(|call| call.made < resumed).map(|call| call.answered).max().expect("there are calls");
    println!("C3 stopped for 5 s: what had come by then is answered after {}", ms(last.saturating_sub(resumed)));
    println!("C3 stopped for 5 s: exact again after {}", ms(restored(&calls, resumed)));
}
