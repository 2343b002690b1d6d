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

use super::{Asker, policies, request, tidegate};
use crate::redis::Single;
use crate::redis::proxy::{Faults, Proxy, Way};
use crate::support::{Tidegate, eventually};

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
