//! More calls than Tidegate can decide.

use std::time::Duration;

use futures_util::future::join_all;
use tidegate::proto::envoy::service::ratelimit::v3::RateLimitRequest;
use tidegate::proto::envoy::service::ratelimit::v3::rate_limit_service_client::RateLimitServiceClient;

use super::{
    ENVOY, POLICIES, exact, is_counted, lasting, metric, ms, openings, report_restored, request, restored, rules,
    tidegate_with,
};
use crate::load::{Calls, Load, alone};
use crate::redis::Single;
use crate::support::in_time;

/// Descriptors of one request: enough that one thread cannot decide as many requests as are offered.
const DESCRIPTORS: usize = 400;
/// Requests in a second: more than that.
const OFFERED: u32 = 1_000;

/// A request of this number of descriptors, each with a counter of its own.
fn heavy(number: usize, descriptors: usize) -> RateLimitRequest {
    let one = |descriptor: usize| request(POLICIES[(number + descriptor) % 3], &format!("{number}-{descriptor}"));
    let descriptors = (0..descriptors).flat_map(|descriptor| one(descriptor).descriptors).collect();
    RateLimitRequest { descriptors, ..request("open", "0") }
}

#[tokio::test]
async fn who_is_offered_more_than_he_can_do_answers_everybody_and_nobody_with_an_error() {
    let _alone = alone().await;
    let redis = Single::start(&[]).await;
    let rules = rules("fixed_window");
    let variables = [("REDIS_URL", &*redis.address().to_string()), ("WORKERS", "1")];
    let server = tidegate_with(rules.path(), &variables).await;
    let light = (0..100).map(|number| request(POLICIES[number % 3], &format!("light{number}")));
    let light = Load::patient(server.grpc, light.collect(), 50, ENVOY).await;
    let load =
        Load::patient(server.grpc, (0..20).map(|number| heavy(number, DESCRIPTORS)).collect(), OFFERED, ENVOY).await;
    let began = light.elapsed();
    lasting(Duration::from_secs(3)).await;
    let calls = load.stop().await;
    let over = light.elapsed();
    // Counters that are at their limit are refused, too.
    exact(&light, over).await;
    let light = light.stop().await;
    let failed =
        |calls: &Calls| calls.iter().filter_map(|call| call.answer.as_ref().err().copied()).collect::<Vec<_>>();
    assert_eq!((failed(&calls), failed(&light)), (vec![], vec![]), "nobody is left without an answer");
    let counted = calls.such_that(is_counted).count();
    println!(
        "F3 offered {OFFERED} requests of {DESCRIPTORS} descriptors a second: {} of {} decided by the store, p99 {}, \
         others' p99 {} (bar 15.0 ms), {} breaker openings",
        counted,
        calls.count(),
        ms(calls.permille(990)),
        ms(light.between(began, over).permille(990)),
        openings(&server),
    );
    assert!(counted < calls.count(), "it was too much");
    report_restored("F3 from the last answer on", restored(&light, over));
}

#[tokio::test]
async fn a_call_that_has_waited_too_long_for_its_thread_does_not_wait_for_redis_as_well() {
    let redis = Single::start(&[]).await;
    let rules = rules("fixed_window");
    let variables = [("REDIS_URL", &*redis.address().to_string()), ("WORKERS", "1")];
    let server = tidegate_with(rules.path(), &variables).await;
    let client = RateLimitServiceClient::connect(format!("http://{}", server.grpc)).await.expect("it is there");
    // A thread takes a tenth of a second for them, ten times as long as a call may take, and longer than they take to be sent. Each
    // is sent in one piece.
    let requests: Vec<_> = (0..1_000).map(|number| heavy(number, 100)).collect();
    let calls = requests.into_iter().map(|request| {
        let mut client = client.clone();
        async move { client.should_rate_limit(request).await }
    });
    let answers = in_time("all are answered", join_all(calls)).await;
    let failed: Vec<_> = answers.into_iter().filter_map(Result::err).collect();
    assert!(failed.is_empty(), "{failed:?}");
    let untimely = metric(&server, "tidegate_untimely_calls_total").await;
    assert!(untimely > 0.0, "no call was decided without Redis");
}
