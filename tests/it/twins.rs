//! The counters of the embedded store and those of Redis give the same answers to the same requests at the same moments.

use std::cell::RefCell;

use proptest::prelude::*;
use proptest::test_runner::{TestCaseResult, TestRunner};
use tidegate::algorithm::{Algorithm, Charge};
use tidegate::model::Micros;

use crate::histories::{History, charge, history, requests};
use crate::world::Counters;
use bench::Bench;

pub mod bench;
mod golden;
mod undo;
mod writes;

/// How many histories of each kind are tried; `TWIN_HISTORIES` says another number.
fn histories() -> u32 {
    std::env::var("TWIN_HISTORIES").map_or(10_000, |number| number.parse().expect("TWIN_HISTORIES is a number"))
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
