//! A Redis that answers, but slowly.

use std::sync::Arc;
use std::time::Duration;

use tidegate::proto::envoy::service::ratelimit::v3::rate_limit_service_client::RateLimitServiceClient;
use tidegate::store::Store;
use tidegate::store::redis::address::{Address, Topology};
use tidegate::store::redis::credentials::Credentials;
use tidegate::store::redis::login::Login;
use tidegate::store::redis::manager::Access;
use tidegate::store::redis::{HostNetwork, Instance, Redis};
use tonic::Request;

use super::{
    Asker, exact, is_counted, lasting, late, load, openings, policies, report, report_restored, request, restored,
    settled, tidegate,
};
use crate::load::alone;
use crate::redis::Single;
use crate::redis::proxy::{Faults, Proxy, Way};
use crate::support::{Tidegate, eventually};

/// How often a breaker may open and close while Redis is as slow all the time: the bar of the matrix, for a minute.
const MOST_CHANGES: usize = 6;

#[tokio::test]
async fn a_slow_redis_decides_what_it_can_in_time_and_charges_nothing_after_it() {
    let _alone = alone().await;
    let redis = Single::start(&[]).await;
    let proxy = Proxy::start(redis.address()).await;
    let server = tidegate(&proxy.address().to_string()).await;
    let load = load(&server).await;
    let mut phases = Vec::new();
    for latency_ms in [2, 8, 15, 500] {
        let (opened, broken) = (openings(&server), load.elapsed());
        proxy.set(Faults { to_server: Way::latency_ms(latency_ms), ..Faults::default() });
        lasting(Duration::from_secs(2)).await;
        let changes = 2 * (openings(&server) - opened);
        let healed = load.elapsed();
        proxy.heal();
        exact(&load, healed).await;
        phases.push((latency_ms, broken, healed, changes));
    }
    let (calls, books) = settled(load, &redis).await;
    for (latency_ms, broken, healed, changes) in phases {
        let what = format!("A3 slower by {latency_ms} ms");
        let during = calls.such_that(|call| call.made >= broken && call.answered <= healed);
        let counted = during.such_that(is_counted).count();
        let exact = format!("{} of 100 decided by the store", 100 * counted / during.count());
        if latency_ms < 10 {
            report(&what, &during, &format!("{exact} (bar 99)"));
            // However busy this machine is, some are in time.
            assert!(counted > 0, "{what}");
        } else {
            // No charge can be there within the 10 ms that it may take.
            let late = late(&books, &calls, broken, healed);
            report(&what, &during, &format!("{exact} (bar 0), {late} late charges (bar 0), {changes} changes (bar 6)"));
            assert_eq!((counted, late), (0, 0), "{what}");
            assert!(changes <= MOST_CHANGES, "{what}: {changes}");
        }
        report_restored(&what, restored(&calls, healed));
    }
}

#[tokio::test]
async fn callers_in_a_hurry_do_not_cost_the_others_their_connection() {
    let redis = Single::start(&[]).await;
    let proxy = Proxy::start(redis.address()).await;
    let server = tidegate(&proxy.address().to_string()).await;
    let mut patient = Asker::of(&server).await;
    assert!(patient.decided("open", "first").await);
    proxy.set(Faults { to_server: Way::latency_ms(10), ..Faults::default() });
    let connections = proxy.accepted();
    let hurried = RateLimitServiceClient::connect(format!("http://{}", server.grpc)).await.expect("it is there");
    for value in 0..100 {
        let mut call = Request::new(request("open", &value.to_string()));
        // Of 8 ms the store has 4, in which no answer can come.
        call.metadata_mut().insert("grpc-timeout", "8m".parse().expect("it is text"));
        let _ = hurried.clone().should_rate_limit(call).await;
    }
    assert!(patient.decided("open", "last").await);
    assert_eq!(proxy.accepted(), connections);
}

#[tokio::test]
async fn answers_that_come_byte_by_byte_are_not_waited_for() {
    let _alone = alone().await;
    let redis = Single::start(&[]).await;
    let proxy = Proxy::start(redis.address()).await;
    let server = tidegate(&proxy.address().to_string()).await;
    let load = load(&server).await;
    let broken = load.elapsed();
    let slices = Some((1, Duration::from_millis(10)));
    proxy.set(Faults { to_client: Way { slices, ..Way::default() }, ..Faults::default() });
    lasting(Duration::from_secs(2)).await;
    let healed = load.elapsed();
    proxy.heal();
    exact(&load, healed).await;
    let (calls, books) = settled(load, &redis).await;
    let during = calls.such_that(|call| call.made >= broken && call.answered <= healed);
    let unheard = books.charged_unheard(&during);
    report("A3 a byte each 10 ms", &during, &format!("0 double charges (bar 0), {unheard} replies lost"));
    report_restored("A3 a byte each 10 ms", restored(&calls, healed));
}

/// The timeout of the examples.
const EXAMPLES: Duration = Duration::from_millis(250);

/// Calls with the timeout of the examples, each with a counter of its own. Returns whether the store decided it.
async fn is_decided_by_the_store(server: &Tidegate, value: &str) -> bool {
    let client = RateLimitServiceClient::connect(format!("http://{}", server.grpc)).await;
    let mut asked = Request::new(request("open", value));
    asked.set_timeout(EXAMPLES);
    let answer = client.expect("the server answers").should_rate_limit(asked).await;
    // An answer that this machine was too busy for is none of the store's.
    answer.is_ok_and(|answer| policies(answer.get_ref()).is_empty())
}

async fn decided_of_20(server: &Tidegate, name: &str) -> usize {
    let mut decided = 0;
    for call in 0..20 {
        decided += usize::from(is_decided_by_the_store(server, &format!("{name}-{call}")).await);
    }
    decided
}

#[tokio::test]
async fn the_round_trip_to_a_redis_is_known_before_its_first_charge() {
    let server = Single::start(&[]).await;
    let address = Address::Tcp(server.address().ip().to_string(), server.address().port());
    let access = Access {
        max_age: None,
        credentials: Arc::new(Credentials::fixed(Login::default())),
        tls: None,
        db: 0,
        prefix: Arc::default(),
        connect_timeout: Duration::from_secs(10),
        alive: Arc::default(),
        metrics: Arc::default(),
        network: Arc::new(HostNetwork),
    };
    let redis = Redis::new(Instance { topology: Topology::Single(address), access }, None, "", 1);
    redis.connect(Duration::from_secs(10)).await;
    assert!(redis.is_connected() && redis.round_trip().is_some());
}

#[tokio::test]
async fn a_redis_that_is_40_ms_away_decides_for_a_caller_with_a_timeout_of_250_ms() {
    let redis = Single::start(&[]).await;
    let proxy = Proxy::start(redis.address()).await;
    proxy.set(Faults::both(Way::latency_ms(20)));
    let server = tidegate(&proxy.address().to_string()).await;
    eventually("the store decides", async || is_decided_by_the_store(&server, "first").await.then_some(())).await;
    let decided = decided_of_20(&server, "far").await;
    println!("A3 40 ms away: {decided} of 20 decided by the store");
    assert!(decided > 0, "three round trips are more than 25 ms");
}

#[tokio::test]
async fn a_near_redis_that_is_slow_is_waited_for_25_ms_and_one_that_has_moved_away_for_three_round_trips() {
    let redis = Single::start(&[]).await;
    let proxy = Proxy::start(redis.address()).await;
    let server = tidegate(&proxy.address().to_string()).await;
    eventually("the store decides", async || is_decided_by_the_store(&server, "first").await.then_some(())).await;
    proxy.set(Faults { to_server: Way::latency_ms(60), ..Faults::default() });
    assert_eq!(decided_of_20(&server, "slow").await, 0, "an answer after 60 ms is later than 25 ms");
    eventually("the new round trip is known", async || is_decided_by_the_store(&server, "moved").await.then_some(()))
        .await;
}
