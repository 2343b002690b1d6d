//! The old server lives on and takes whatever is charged there, so each hit that it still gets is one that the new one does not know.

use std::net::Ipv4Addr;
use std::time::Duration;

use rustix::process::Signal;
use tidegate::proto::envoy::service::ratelimit::v3::RateLimitRequest;
use tidegate::proto::envoy::service::ratelimit::v3::rate_limit_response::Code as Outcome;
use tokio::time::sleep;
use tonic::Code;

use crate::grpc;
use crate::load::{Load, alone};
use crate::redis::Single;
use crate::redis::resolve::{NAME, Resolver};
use crate::redis::sentinel::{Divided, Sentinel};
use crate::support::{Tidegate, eventually, in_time, rule_file};

/// A limit that is reached.
const FEW: usize = 60;
/// Whatever Redis does not decide fails.
const RULES: &str = "domain: d
descriptors:
  - { key: one, rate_limit: { unit: year, requests_per_unit: 4000000000 } }
  - { key: few, rate_limit: { unit: year, requests_per_unit: 60 } }
  - { key: second, rate_limit: { unit: second, requests_per_unit: 4000000000 } }
";
/// Calls in a second.
const RATE: u32 = 200;
/// How long a caller waits; the store has half of it.
const PATIENT: Duration = Duration::from_secs(2);
/// The bar for leaving the old server.
const LEFT: Duration = Duration::from_secs(1);
/// A bar that is missed so many times over is not missed because this machine is busy.
const FAR: u32 = 3;
/// Where servers of one name are: the same port of each.
const PLACES: [Ipv4Addr; 2] = [Ipv4Addr::new(127, 0, 0, 2), Ipv4Addr::new(127, 0, 0, 3)];

struct Instance {
    tidegate: Tidegate,
    _rules: tempfile::NamedTempFile,
}

impl Instance {
    async fn start(variables: &[(&str, &str)]) -> Self {
        let rules = rule_file(RULES);
        let own = [("ON_STORE_FAILURE", "error"), ("ON_STORE_OVERLOAD", "error"), ("STORE_DEADLINE", "1s")];
        let more = [("LOG_LEVEL", "warn"), ("WORKERS", "4")];
        let tidegate = Tidegate::start(rules.path(), &[&own[..], &more, variables].concat()).await;
        Self { tidegate, _rules: rules }
    }

    async fn ask(&self, key: &str) -> Result<Outcome, Code> {
        // A connection for each call: the calls are spread over all workers.
        let mut client = grpc::client(self.tidegate.grpc).await;
        let answer = in_time("it is answered", client.should_rate_limit(request(key))).await;
        answer.map(|answer| answer.into_inner().overall_code()).map_err(|status| status.code())
    }

    /// How many of so many calls the store admits.
    async fn admits(&self, key: &str, calls: usize) -> usize {
        let mut admitted = 0;
        for _ in 0..calls {
            let outcome = eventually("the store decides", async || self.ask(key).await.ok()).await;
            admitted += usize::from(outcome == Outcome::Ok);
        }
        admitted
    }

    async fn load(&self) -> Load {
        let load = Load::patient(self.tidegate.grpc, vec![request("one")], RATE, PATIENT).await;
        eventually("the store decides", async || (load.so_far().answered(Outcome::Ok) > 50).then_some(())).await;
        load
    }
}

fn request(key: &str) -> RateLimitRequest {
    grpc::one("d", key, "a")
}

/// The hits of all counters of a key.
async fn hits(server: &Single, key: &str) -> usize {
    let all = format!(
        "local all = 0 for _, key in ipairs(redis.call('KEYS', '{{d|{key}=*')) do \
         local _, hits = struct.unpack('<I8I8', redis.call('GET', key)) all = all + hits end return all"
    );
    server.cli(&["EVAL", &all, "0"]).await.parse().expect("a number")
}

/// The connections of instances to a server.
async fn connections(server: &Single) -> usize {
    let clients = server.cli(&["CLIENT", "LIST", "TYPE", "normal"]).await;
    clients.lines().filter(|line| !line.contains("name=sentinel-") && !line.contains("cmd=client")).count()
}

/// Waits until `new` is charged and `old` is left: by all connections, and for good.
async fn is_left(load: &Load, old: &Single, new: &Single, before: usize) {
    eventually("the new server is charged", async || (hits(new, "one").await > before).then_some(())).await;
    eventually("the old one has no connection", async || (connections(old).await == 0).then_some(())).await;
    let (kept, answered) = (hits(old, "one").await, load.so_far().count());
    eventually("calls go on", async || (load.so_far().count() > answered + 50).then_some(())).await;
    assert_eq!(hits(old, "one").await, kept, "a hit came after it was left");
}

/// Prints how many hits the new server does not know, and fails if they are far more than its bar.
fn report(what: &str, forgotten: usize, failed: usize) {
    let took = Duration::from_secs(1) * u32::try_from(forgotten).expect("few") / RATE;
    println!("{what}: {forgotten} hits forgotten, {took:.1?} of {RATE}/s (bar {LEFT:?}), {failed} calls failed");
    assert!(took <= LEFT * FAR, "{what}: left after {took:?}");
}

#[tokio::test]
async fn a_planned_failover_of_sentinels_is_followed_within_about_a_second() {
    let _alone = alone().await;
    let set = Sentinel::start().await;
    let addresses = set.addresses();
    let instance = Instance::start(&[("REDIS_TYPE", "sentinel"), ("REDIS_URL", &addresses)]).await;
    let load = instance.load().await;
    let [old, new] = set.servers();
    let replicated = hits(new, "one").await;
    set.failover().await;
    eventually("the new server is charged", async || (hits(new, "one").await > replicated + 300).then_some(())).await;
    let calls = load.stop().await;
    let admitted = calls.answered(Outcome::Ok);
    report("planned failover", admitted.saturating_sub(hits(new, "one").await), calls.failed());
    assert_eq!(instance.tidegate.log().matches("store.moved").count(), 1, "{}", instance.tidegate.log());
    eventually("the old one has no connection", async || (connections(old).await == 0).then_some(())).await;
}

#[tokio::test]
async fn a_master_that_most_sentinels_have_replaced_is_left_at_once_though_it_lives_and_the_first_sentinel_names_it() {
    let _alone = alone().await;
    let (old, new) = (Single::start(&[]).await, Single::start(&[]).await);
    let sentinels = Divided::of(&old).await;
    let addresses = sentinels.addresses();
    let variables = [("REDIS_TYPE", "sentinel"), ("REDIS_URL", addresses.as_str())];
    let first = Instance::start(&variables).await;
    assert_eq!(first.admits("few", 20).await, 20);
    let load = first.load().await;
    let before = hits(&old, "one").await;
    sentinels.others_name(&new).await;
    is_left(&load, &old, &new, 0).await;
    let forgotten = hits(&old, "one").await - before;
    report("partition", forgotten, load.stop().await.failed());
    // An instance that starts now counts there too: one limit, not two.
    let second = Instance::start(&variables).await;
    assert_eq!(first.admits("few", FEW).await + second.admits("few", FEW).await, FEW);
    assert_eq!(hits(&old, "few").await, 20);
    let log = first.tidegate.log();
    assert_eq!(log.matches("store.moved").count(), 1, "{log}");
    assert!(log.contains(&format!("from={}", old.address())) && log.contains(&new.address().to_string()), "{log}");
    // Nobody is asked any more: the last answer holds.
    sentinels.sentinels().iter().for_each(|sentinel| sentinel.signal(Signal::KILL));
    sleep(Duration::from_secs(2)).await;
    assert_eq!(first.ask("few").await, Ok(Outcome::OverLimit));
    eventually("it is logged", async || first.tidegate.log().contains("server=\"sentinel 127.0.0.1:").then_some(()))
        .await;
    assert_eq!(first.tidegate.log().matches("store.moved").count(), 1);
}

#[tokio::test]
async fn a_single_server_whose_name_moves_is_left_within_about_a_second_though_it_lives() {
    let _alone = alone().await;
    let [old, new] = Single::at_each(PLACES).await;
    let url = format!("{NAME}:{}", old.address().port());
    for is_apart in [false, true] {
        let resolver = Resolver::new(&PLACES[..1]);
        let other = Single::start(&[]).await.address().to_string();
        let mut variables = resolver.variables();
        match is_apart {
            false => variables.push(("REDIS_URL", &url)),
            // The limits per year are counted at the main Redis, which moves too.
            true => variables.extend([
                ("REDIS_URL", other.as_str()),
                ("REDIS_PERSECOND", "true"),
                ("REDIS_PERSECOND_URL", &url),
            ]),
        }
        let first = Instance::start(&variables).await;
        if is_apart {
            assert_eq!(first.admits("second", 8).await, 8);
            assert!(connections(&old).await > 0);
            resolver.set(&PLACES[1..]);
            eventually("it has moved", async || (connections(&new).await > 0).then_some(())).await;
            eventually("the old one has no connection", async || (connections(&old).await == 0).then_some(())).await;
            continue;
        }
        let load = first.load().await;
        let before = hits(&old, "one").await;
        resolver.set(&PLACES[1..]);
        is_left(&load, &old, &new, 0).await;
        report("name", hits(&old, "one").await - before, load.stop().await.failed());
        let second = Instance::start(&variables).await;
        assert_eq!(first.admits("few", FEW).await + second.admits("few", FEW).await, FEW);
        assert_eq!(hits(&old, "few").await, 0);
    }
}

#[tokio::test]
async fn a_name_with_several_addresses_is_one_server_while_it_lists_it_and_lookups_that_fail_or_hang_change_nothing() {
    let [one, mut other] = Single::at_each(PLACES).await;
    let [first, second] = PLACES;
    let resolver = Resolver::new(&PLACES);
    let url = format!("{NAME}:{}", one.address().port());
    let instance = Instance::start(&[&resolver.variables()[..], &[("REDIS_URL", &url)]].concat()).await;
    assert_eq!(instance.admits("few", 10).await, 10);
    let is_first = hits(&one, "few").await > 0;
    let (used, unused) = if is_first { (&one, &other) } else { (&other, &one) };
    let counted = async || (hits(used, "few").await, connections(unused).await);
    assert_eq!(counted().await, (10, 0), "all workers use the same");
    for addresses in [&[second, first][..], &[], &[first, second]] {
        resolver.set(addresses);
        // So that it is looked up meanwhile.
        sleep(Duration::from_millis(1_500)).await;
        instance.admits("few", 2).await;
    }
    resolver.hang(true);
    sleep(Duration::from_millis(1_500)).await;
    assert_eq!(instance.admits("few", 4).await, 4);
    assert_eq!(counted().await, (20, 0));
    assert!(!instance.tidegate.log().contains("store."), "{}", instance.tidegate.log());
    // A server that is gone is left for the other, as ever.
    resolver.hang(false);
    if is_first {
        one.signal(Signal::KILL);
        assert_eq!(instance.admits("few", 5).await, 5);
        assert_eq!(hits(&other, "few").await, 5);
    } else {
        other.signal(Signal::KILL);
        other.ended().await;
        assert_eq!(instance.admits("few", 5).await, 5);
        assert_eq!(hits(&one, "few").await, 5);
    }
}
