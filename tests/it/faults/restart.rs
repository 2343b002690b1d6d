//! A Redis that is not there yet, comes back empty, or is still loading.

use std::time::{Duration, Instant};

use rustix::process::Signal;
use tonic::transport::Channel;
use tonic_health::ServingStatus;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

use super::{
    Asker, Books, LIMIT, POLICIES, assert_policies, exact, failing, is_counted, lasting, late, load, ms, report,
    report_restored, restored, rules, start_load, tidegate, tidegate_with,
};
use crate::load::alone;
use crate::redis::Single;
use crate::support::{Tidegate, eventually};

/// A server that has ended, and its port.
async fn absent() -> Single {
    let mut redis = Single::start(&[]).await;
    redis.signal(Signal::KILL);
    redis.ended().await;
    redis
}

#[tokio::test]
async fn a_redis_that_comes_back_empty_admits_one_limit_more_and_no_hit_beyond() {
    let _alone = alone().await;
    let mut redis = Single::start(&[]).await;
    let server = tidegate(&redis.address().to_string()).await;
    let load = load(&server).await;
    let mut asker = Asker::of(&server).await;
    for policy in POLICIES {
        assert_eq!(asker.admitted(policy, "99999", LIMIT + 2).await, LIMIT, "{policy}");
    }
    redis.restart().await;
    let healed = load.elapsed();
    for policy in POLICIES {
        assert_eq!(asker.admitted(policy, "99999", LIMIT + 2).await, LIMIT, "{policy}");
    }
    exact(&load, healed).await;
    let calls = load.stop().await;
    assert_policies(&calls);
    let books = Books::of(&redis).await;
    let kept = calls.such_that(|call| call.made >= healed);
    assert_eq!((books.double(&calls), books.forgotten(&kept)), (0, 0));
    println!("A8 restarted empty: {LIMIT} hits more than {LIMIT} per counter (bar {LIMIT})");
    report_restored("A8 restarted empty", restored(&calls, healed));
}

#[tokio::test]
async fn without_a_redis_it_starts_and_answers_by_policy_until_there_is_one() {
    let _alone = alone().await;
    let mut redis = absent().await;
    let began = Instant::now();
    let server = tidegate(&redis.address().to_string()).await;
    let up = began.elapsed();
    println!("A9 absent at boot: up after {} (bar 1000.0 ms)", ms(up));
    assert!(up <= super::FAR * Duration::from_secs(1));
    let load = start_load(&server).await;
    failing(&load, Duration::ZERO).await;
    lasting(Duration::from_secs(1)).await;
    let appears = load.elapsed();
    redis.restart().await;
    let healed = load.elapsed();
    exact(&load, healed).await;
    let calls = load.stop().await;
    assert_policies(&calls);
    let without = calls.such_that(|call| call.answered <= appears);
    assert_eq!(without.such_that(is_counted).count(), 0);
    let books = Books::of(&redis).await;
    assert_eq!(
        (books.double(&calls), books.forgotten(&calls), late(&books, &calls, Duration::ZERO, appears)),
        (0, 0, 0)
    );
    report("A9 absent at boot", &without, "0 decided by the store (bar 0)");
    report_restored("A9 absent at boot", restored(&calls, healed));
}

#[tokio::test]
async fn health_follows_the_connections_where_it_is_asked_to() {
    let _alone = alone().await;
    let mut redis = absent().await;
    let (rules, url) = (rules("fixed_window"), redis.address().to_string());
    let follows = [("REDIS_URL", url.as_str()), ("REDIS_HEALTH_CHECK_ACTIVE_CONNECTION", "true")];
    let follower = tidegate_with(rules.path(), &follows).await;
    let steady = tidegate_with(rules.path(), &follows[..1]).await;
    assert_eq!(health(&follower).await, ServingStatus::NotServing);
    assert_eq!(health(&steady).await, ServingStatus::Serving);
    for _ in 0..2 {
        redis.restart().await;
        until_health(&follower, ServingStatus::Serving).await;
        redis.signal(Signal::KILL);
        redis.ended().await;
        until_health(&follower, ServingStatus::NotServing).await;
        assert_eq!(health(&steady).await, ServingStatus::Serving);
    }
}

async fn health(server: &Tidegate) -> ServingStatus {
    let channel = Channel::from_shared(format!("http://{}", server.grpc)).expect("a URL").connect_lazy();
    let answer = HealthClient::new(channel).check(HealthCheckRequest::default()).await.expect("it answers");
    match answer.into_inner().status {
        1 => ServingStatus::Serving,
        2 => ServingStatus::NotServing,
        other => panic!("{other}"),
    }
}

async fn until_health(server: &Tidegate, wanted: ServingStatus) {
    eventually("health follows", async || (health(server).await == wanted).then_some(())).await;
}
