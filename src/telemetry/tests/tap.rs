//! Tests of what a listener gets.

use std::time::Duration;

use bytes::Bytes;
use serde_json::Value;
use tokio::time::{Instant, timeout};

use super::*;
use crate::telemetry::tap::{Listening, Tap, TapFilter};

/// A tap, and its clock in microseconds.
fn tap() -> (Arc<Tap>, Arc<AtomicU64>) {
    let time = Arc::new(AtomicU64::new(0));
    let now = Arc::clone(&time);
    (Arc::new(Tap::new(Arc::new(move || Micros::new(now.load(Ordering::Relaxed))))), time)
}

async fn next(listening: &mut Listening) -> Bytes {
    timeout(Duration::from_secs(10), listening.next()).await.expect("it gets something").expect("it has not ended")
}

async fn json(listening: &mut Listening) -> Value {
    serde_json::from_slice(&next(listening).await).expect("a line of JSON")
}

/// Sends a decision at each of these milliseconds. Returns those that a listener with this rate gets, and the number of the others.
async fn sampled(rate: u64, sent: impl IntoIterator<Item = u64>) -> (Vec<u64>, u64) {
    let (tap, time) = tap();
    let mut listening = tap.listen(TapFilter::default(), rate).expect("there is room");
    let user = plain(0, "user");
    let decision = decision(&[asked(Some(&user), 5, 0, 1)]);
    for millis in sent {
        time.store(millis * 1_000, Ordering::Relaxed);
        tap.send(&request(&[("user", "ann")]), &decision, decision.deciding(), Micros::new(millis * 1_000));
    }
    assert!(json(&mut listening).await.get("since_us").is_some());
    let mut shown = Vec::new();
    loop {
        // Without a skipped decision, the last one is followed by an empty text.
        let line: Value = serde_json::from_slice(&next(&mut listening).await).unwrap_or_default();
        match line["time_us"].as_u64() {
            Some(time) => shown.push(time / 1_000),
            None => return (shown, line["skipped"].as_u64().unwrap_or_default()),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn the_first_decision_of_each_second_is_shown_at_any_rate() {
    assert_eq!(sampled(1, [400]).await, (vec![400], 0));
    assert_eq!(sampled(1, [400, 450, 950, 1_050, 1_950, 2_990]).await, (vec![400, 1_050, 2_990], 3));
    assert_eq!(sampled(7, [250]).await, (vec![250], 0));
}

#[tokio::test(start_paused = true)]
async fn a_rate_is_held_in_each_second_and_spread_over_it() {
    let (shown, skipped) = sampled(25, (0..2_000).step_by(10)).await;
    assert_eq!((shown.len(), skipped), (50, 150));
    let most = (0..20).map(|window| shown.iter().filter(|time| **time / 100 == window).count()).max();
    assert_eq!(most, Some(3));
    let (shown, _) = sampled(25, 900..1_000).await;
    assert_eq!(shown, [900, 901, 902], "what was left does not come at once");
}

#[tokio::test(start_paused = true)]
async fn a_listener_gets_a_sign_of_life_every_5_seconds_without_a_decision() {
    let (tap, _) = tap();
    let mut listening = tap.listen(TapFilter::default(), 1).expect("there is room");
    let began = Instant::now();
    assert_eq!(json(&mut listening).await["alive_every_ms"], 5_000);
    for number in 1..=3 {
        assert_eq!(next(&mut listening).await, "");
        assert_eq!(began.elapsed(), Duration::from_secs(5 * number));
    }
}
