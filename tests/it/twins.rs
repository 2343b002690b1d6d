//! The counters of the embedded store and those of Redis give the same answers to the same requests at the same moments.

use std::cell::RefCell;

use proptest::prelude::*;
use proptest::test_runner::{TestCaseResult, TestRunner};
use tidegate::algorithm::{Algorithm, Charge, Limit};
use tidegate::model::{Charging, Delay, Hits, Micros, Quota, Unit, Window};

use crate::histories::{History, charge, history, limit, requests};
use crate::support::by_tier;
use crate::world::{Counters, NOON};
use bench::Bench;

pub mod bench;
mod full;
mod golden;
mod later;
mod lease;
mod rights;
mod shared;
mod slots;
mod undo;
mod writes;

/// Number of histories of each kind that are tried; `TWIN_HISTORIES` says another one.
fn histories() -> u32 {
    std::env::var("TWIN_HISTORIES")
        .map_or_else(|_| by_tier(1_000, 4_000), |number| number.parse().expect("TWIN_HISTORIES is a number"))
}

/// Tries a law on many examples, on one Redis.
async fn hold<S: Strategy>(cases: u32, strategy: S, law: impl Fn(&mut Bench, S::Value) -> TestCaseResult) {
    let bench = RefCell::new(Bench::start(&[]).await);
    let config = ProptestConfig { source_file: Some(file!()), ..ProptestConfig::with_cases(cases) };
    let held = TestRunner::new(config).run(&strategy, |example| law(&mut bench.borrow_mut(), example));
    held.unwrap_or_else(|failed| panic!("{failed}"));
}

/// Every request of a history gets the same answers from both.
fn are_equal(bench: &mut Bench, requests: &[(Micros, Vec<Charge>)]) -> TestCaseResult {
    let memory = Counters::new();
    let answers = bench.all(requests);
    for (index, ((now, charges), answers)) in requests.iter().zip(answers).enumerate() {
        let expected = memory.request(charges, *now);
        prop_assert_eq!(answers, expected, "request {} at {}: {:?}", index, now.get(), charges);
    }
    Ok(())
}

fn alone(history: &History) -> Vec<(Micros, Vec<Charge>)> {
    let charges = history.charges();
    charges.map(|(now, limit, hits)| (now, vec![charge("only", limit, history.charging, hits)])).collect()
}

/// Both kinds of histories of one algorithm.
async fn are_twins(algorithm: Algorithm) {
    hold(histories(), history(algorithm), |bench, history| are_equal(bench, &alone(&history))).await;
    hold(histories(), requests(algorithm), |bench, requests| are_equal(bench, &requests.charges())).await;
}

#[tokio::test]
async fn hits_given_back_and_taken_by_one_request_of_a_clock_that_stepped_back_are_counted_the_same() {
    let mut bench = Bench::start(&[]).await;
    let later = |seconds| NOON.saturating_add(Micros::from_secs(seconds));
    for (_, algorithm) in Algorithm::ALL {
        let minute = limit(algorithm, Window::of_unit(Unit::Minute), 100, 1_000);
        let of = |hits| charge("only", minute, Charging::Each, hits);
        let take = |hits| of(Hits::take(hits));
        // The latest hits go, and the next come at the moment of those before them, the tenth hit.
        let requests = [
            (NOON, vec![take(9)]),
            (later(1), vec![take(1)]),
            (later(2), vec![take(2)]),
            (NOON, vec![of(Hits::give_back(2)), take(1)]),
            (later(2), vec![of(Hits::LOOK)]),
            (later(3), vec![take(89)]),
            (later(3), vec![take(1)]),
        ];
        are_equal(&mut bench, &requests).unwrap_or_else(|error| panic!("{algorithm:?}: {error}"));
        // All of them go, and as many come more than a window before them.
        let before = NOON.saturating_sub(Micros::from_secs(120));
        let requests = [
            (NOON, vec![take(100)]),
            (before, vec![of(Hits::give_back(100)), take(100)]),
            (before.saturating_add(Micros::new(1)), vec![take(1)]),
        ];
        are_equal(&mut bench, &requests).unwrap_or_else(|error| panic!("{algorithm:?}: {error}"));
    }
}

/// What the edges of slots are is told by the examples beside `gcra.rs` and `leaky_bucket.rs`.
#[tokio::test]
async fn waits_for_slots_are_told_the_same_at_their_edges() {
    let mut bench = Bench::start(&[]).await;
    let slots = |algorithm, hits, unit, burst, max| {
        let limit = Limit::new(algorithm, Quota::new(hits, Window::of_unit(unit)).with_burst(burst));
        limit.expect("it can be counted").delaying(Delay::Slot { max: Micros::new(max) }).expect("it has slots")
    };
    let (longest, most) = (Delay::LONGEST.get(), u32::MAX);
    for algorithm in [Algorithm::Gcra, Algorithm::LeakyBucket] {
        for (limit, hits) in [
            // The longest wait ends where that of a hit does, and a little before.
            (slots(algorithm, 5, Unit::Second, 11, 2_000_000), &[(0, 1); 16][..]),
            (slots(algorithm, 5, Unit::Second, 1, 1_999_999), &[(0, 1); 16]),
            (slots(algorithm, 5, Unit::Second, 1, 2_000_000), &[(0, 11), (0, 12), (0, 1), (200_000, 1), (300_000, 12)]),
            // A hit is two ticks of 100 us, and two of them fit at the end of a tick only.
            (slots(algorithm, 300_000, Unit::Minute, 1, 150), &[(0, 2), (49, 2), (50, 2), (51, 1), (99, 2)]),
            // In the bucket stands the last of the million parts of a hit, and a microsecond later nothing.
            (slots(algorithm, 3, Unit::Second, 1, 1_000_000), &[(0, 1), (333_333, 1), (333_334, 1)]),
            // The highest level drains sooner than the longest wait ends.
            (slots(algorithm, most, Unit::Second, most, longest), &[(0, most), (0, most), (1_000_000, most)]),
            // The longest wait that is promised is that until the longest wait for a slot.
            (
                slots(algorithm, 1, Unit::Year, 1, longest).counting_refused(),
                &[(0, 1), (0, most), (0, 1), (50_000_000, 1)],
            ),
        ] {
            let request = |&(after, hits): &(u64, u32)| {
                let charge = charge("only", limit, Charging::AllOrNothing, Hits::take(hits.into()));
                (NOON.saturating_add(Micros::new(after)), vec![charge])
            };
            let requests: Vec<_> = hits.iter().map(request).collect();
            are_equal(&mut bench, &requests).unwrap_or_else(|error| panic!("{limit:?}: {error}"));
        }
    }
}

#[tokio::test]
async fn a_fixed_window_gives_the_same_answers_in_lua_as_in_rust() {
    are_twins(Algorithm::FixedWindow).await;
}

#[tokio::test]
async fn a_sliding_window_gives_the_same_answers_in_lua_as_in_rust() {
    are_twins(Algorithm::SlidingWindow).await;
}

#[tokio::test]
async fn a_sliding_log_gives_the_same_answers_in_lua_as_in_rust() {
    are_twins(Algorithm::SlidingLog).await;
}

#[tokio::test]
async fn a_token_bucket_gives_the_same_answers_in_lua_as_in_rust() {
    are_twins(Algorithm::TokenBucket).await;
}

#[tokio::test]
async fn a_leaky_bucket_gives_the_same_answers_in_lua_as_in_rust() {
    are_twins(Algorithm::LeakyBucket).await;
}

#[tokio::test]
async fn gcra_gives_the_same_answers_in_lua_as_in_rust() {
    are_twins(Algorithm::Gcra).await;
}
