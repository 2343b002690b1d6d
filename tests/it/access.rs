//! Getting at a Redis: passwords, sockets, databases, prefixes, a second one, and what is told of it.

use std::process::Stdio;

use rustix::process::Signal;
use tempfile::NamedTempFile;
use tidegate::proto::envoy::service::ratelimit::v3::RateLimitRequest;
use tokio::process::Command;
use tonic::Code;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

use crate::grpc;
use crate::http;
use crate::redis::Single;
use crate::redis::cluster::Cluster;
use crate::redis::proxy::{Faults, Proxy, Way};
use crate::redis::sentinel::Sentinel;
use crate::redis::user::{PREFIX, Shape, User};
use crate::support::{Process, Tidegate, eventually, in_time, rule_file};

mod expiring;
mod hanging;
mod rights;
mod rotation;
mod tls;

/// Limits that nobody reaches, so that what remains of them tells how often they were charged.
const RULES: &str = "domain: d
descriptors:
  - { key: week, rate_limit: { unit: week, requests_per_unit: 1000000 } }
  - { key: second, rate_limit: { unit: second, requests_per_unit: 1000000 } }
  - { key: shorter, rate_limit: { window: 900ms, requests_per_unit: 1000000 } }
  - { key: sliding_window, rate_limit: { unit: week, requests_per_unit: 1000000, algorithm: sliding_window } }
  - { key: sliding_log, rate_limit: { unit: week, requests_per_unit: 10000, algorithm: sliding_log } }
  - { key: token_bucket, rate_limit: { unit: week, requests_per_unit: 1000000, algorithm: token_bucket } }
  - { key: leaky_bucket, rate_limit: { unit: week, requests_per_unit: 1000000, algorithm: leaky_bucket } }
  - { key: gcra, rate_limit: { unit: week, requests_per_unit: 1000000, algorithm: gcra } }
";

/// A part of every password, which nobody else may ever read.
const CANARY: &str = "canary";

/// A service with those rules and these variables, in front of a Redis.
struct Service {
    tidegate: Tidegate,
    _rules: NamedTempFile,
}

impl Service {
    async fn start(variables: &[(&str, &str)]) -> Self {
        let rules = rule_file(RULES);
        // This is about who is let in, not about time.
        let own = [("STORE_DEADLINE", "5s"), ("LOG_LEVEL", "debug")];
        let tidegate = Tidegate::start(rules.path(), &[&own, variables].concat()).await;
        Self { tidegate, _rules: rules }
    }

    /// Charges the counter of this key and value: what remains of it.
    async fn ask(&self, key: &'static str, value: &str) -> Result<u32, Code> {
        let mut client = grpc::client(self.tidegate.grpc).await;
        let answer = in_time("it is answered", client.should_rate_limit(request(key, value))).await;
        answer.map(|answer| answer.into_inner().statuses[0].limit_remaining).map_err(|status| status.code())
    }

    /// Waits until a Redis has counted.
    async fn counts(&self, value: &str) {
        eventually("Redis counts", async || self.ask("week", value).await.ok()).await;
    }

    /// The log, as soon as it says this; calls fail then, and no secret is told.
    async fn fails(&self, why: &str) -> String {
        let what = format!("the log says {why:?}");
        let log = eventually(&what, async || {
            assert_eq!(self.ask("week", "in vain").await, Err(Code::Unavailable));
            let log = self.log();
            log.contains(why).then_some(log)
        });
        log.await
    }

    /// What it has logged: never a secret, never what a client sent.
    fn log(&self) -> String {
        let log = self.tidegate.log();
        assert!(!log.contains(CANARY) && !log.contains("in vain") && !log.contains("in%20vain"), "{log}");
        log
    }

    /// Whether it says that it is healthy.
    async fn is_healthy(&self) -> bool {
        let client = tonic::transport::Endpoint::new(format!("http://{}", self.tidegate.grpc)).expect("an address");
        let mut client = HealthClient::new(client.connect().await.expect("it takes connections"));
        let asked = HealthCheckRequest { service: "ratelimit".to_owned() };
        let told = in_time("it is answered", client.check(asked)).await.expect("it is known").into_inner();
        told.status() == ServingStatus::Serving
    }
}

fn request(key: &'static str, value: &str) -> RateLimitRequest {
    grpc::one("d", key, value)
}

/// A user of one server, with a password of its own.
fn user(name: &str) -> User {
    User::of(Shape::Single).but(name, &format!("{CANARY}-of-{name}"))
}

/// The counters in a database of a server, sorted; without the set in which instances count themselves.
async fn keys(server: &Single, database: &str) -> Vec<String> {
    let keys = server.cli(&["-n", database, "KEYS", "*"]).await;
    let counters = keys.lines().filter(|key| !key.ends_with("{tidegate}instances"));
    let mut keys: Vec<_> = counters.map(str::to_owned).collect();
    keys.sort();
    keys
}

#[tokio::test]
async fn a_password_or_a_user_with_one_opens_a_redis_and_a_wrong_one_is_told_without_it() {
    let password = format!("{CANARY}:with a colon");
    let server = Single::with_password(&password, &[]).await;
    let alice = user("alice");
    alice.let_in(&server).await;
    let address = server.address().to_string();
    let prefix = ("CACHE_KEY_PREFIX", PREFIX);

    for auth in [format!(":{password}"), format!("default:{password}"), alice.auth()] {
        let service = Service::start(&[("REDIS_URL", &address), ("REDIS_AUTH", &auth), prefix]).await;
        service.counts("let in").await;
        service.log();
    }
    for credentials in [alice.auth(), format!("default:{CANARY}%3Awith%20a%20colon")] {
        let service = Service::start(&[("REDIS_URL", &format!("redis://{credentials}@{address}")), prefix]).await;
        service.counts("let in").await;
        service.log();
    }
    assert_eq!(keys(&server, "0").await, ["tidegate:{d|week=let%20in}fixed_window:7d"]);
    for auth in [String::new(), format!("{CANARY}-wrong"), format!("alice:{CANARY}"), format!("bob:{CANARY}")] {
        let service = Service::start(&[("REDIS_URL", &address), ("REDIS_AUTH", &auth), prefix]).await;
        let log = service.fails("cannot connect to Redis").await;
        assert!(log.contains(if auth.is_empty() { "NOAUTH" } else { "WRONGPASS" }), "{log}");
        assert!(log.contains(&address), "it says which server: {log}");
    }
}

#[tokio::test]
async fn the_sentinels_password_is_another() {
    let password = format!("{CANARY}-of-the-sentinels");
    let set = Sentinel::with_password(&password).await;
    let (alice, watcher) = (User::of(Shape::Sentinel).but("alice", CANARY), User::of(Shape::OfSentinels));
    for server in set.servers() {
        alice.let_in(server).await;
    }
    for sentinel in set.sentinels() {
        watcher.let_in(sentinel).await;
    }
    let given = |sentinel_auth: &str| {
        let addresses = set.addresses();
        [
            ("REDIS_TYPE", "sentinel".to_owned()),
            ("REDIS_URL", addresses),
            ("REDIS_AUTH", alice.auth()),
            ("REDIS_SENTINEL_AUTH", sentinel_auth.to_owned()),
            ("CACHE_KEY_PREFIX", PREFIX.to_owned()),
        ]
    };
    for auth in [password.clone(), watcher.auth()] {
        let given = given(&auth);
        let service = Service::start(&given.each_ref().map(|(name, value)| (*name, value.as_str()))).await;
        service.counts("let in").await;
        service.log();
    }
    for sentinel in set.sentinels() {
        assert_eq!(watcher.denied(sentinel).await, "");
    }
    let given = given(&format!("{CANARY}-wrong"));
    let service = Service::start(&given.each_ref().map(|(name, value)| (*name, value.as_str()))).await;
    let log = service.fails("WRONGPASS").await;
    assert!(log.contains("server=\"sentinel 127.0.0.1:") && log.contains("check REDIS_SENTINEL_AUTH"), "{log}");
    // The same mistake at the master is told apart.
    let given = [("REDIS_AUTH", format!("alice:{CANARY}-wrong")), ("REDIS_SENTINEL_AUTH", password.clone())];
    let given: Vec<_> = given.iter().map(|(name, value)| (*name, value.as_str())).collect();
    let addresses = set.addresses();
    let service =
        Service::start(&[&given[..], &[("REDIS_TYPE", "sentinel"), ("REDIS_URL", &addresses)]].concat()).await;
    let log = service.fails("WRONGPASS").await;
    let master = format!("master {} (", set.servers()[0].address());
    assert!(log.contains(&master) && log.contains("check REDIS_AUTH"), "{log}");
}

#[tokio::test]
async fn a_socket_a_database_and_a_prefix_are_where_counters_are() {
    let server = Single::start(&["--unixsocket", "redis.sock"]).await;
    let socket = server.directory().join("redis.sock").display().to_string();
    let address = server.address().to_string();
    let keyed = |prefix: &str, value: &str| format!("{prefix}{{d|week={value}}}fixed_window:7d");
    for (url, prefix, value) in [
        (socket.clone(), "", "path"),
        (format!("unix://{socket}"), "a:", "url"),
        (format!("redis://{address}"), "b:", "tcp"),
    ] {
        let service = Service::start(&[("REDIS_URL", &url), ("CACHE_KEY_PREFIX", prefix)]).await;
        service.counts(value).await;
    }
    let third = Service::start(&[("REDIS_URL", &format!("redis://{address}/3"))]).await;
    third.counts("third").await;
    assert_eq!(keys(&server, "0").await, [keyed("a:", "url"), keyed("b:", "tcp"), keyed("", "path")]);
    assert_eq!(keys(&server, "3").await, [keyed("", "third")]);

    let nowhere = Service::start(&[("REDIS_URL", &format!("{socket}.none"))]).await;
    let log = nowhere.fails("cannot connect to Redis").await;
    assert!(log.contains(&format!("{socket}.none")) && log.contains("No such file"), "{log}");
    let beyond = Service::start(&[("REDIS_URL", &format!("redis://{address}/16"))]).await;
    let log = beyond.fails("cannot connect to Redis").await;
    assert!(log.contains("out of range"), "{log}");
}

#[tokio::test]
async fn limits_per_second_are_counted_in_a_redis_of_their_own_and_neither_needs_the_other() {
    let (mut main, mut apart) = (Single::start(&[]).await, Single::start(&[]).await);
    let (alice, bob) = (user("alice"), user("bob"));
    alice.let_in(&main).await;
    bob.let_in(&apart).await;
    let service = Service::start(&[
        ("REDIS_URL", &main.address().to_string()),
        ("REDIS_AUTH", &alice.auth()),
        ("REDIS_PERSECOND", "true"),
        ("REDIS_PERSECOND_URL", &apart.address().to_string()),
        ("REDIS_PERSECOND_AUTH", &bob.auth()),
        ("CACHE_KEY_PREFIX", PREFIX),
    ])
    .await;
    let counts = async |key| eventually("it is counted", async || service.ask(key, "a").await.ok()).await;
    let left = counts("week").await;
    counts("second").await;
    assert_eq!(keys(&main, "0").await, ["tidegate:{d|week=a}fixed_window:7d"]);
    assert_eq!(keys(&apart, "0").await, ["tidegate:{d|second=a}fixed_window:1s"]);
    counts("shorter").await;
    let shorter = "tidegate:{d|shorter=a}fixed_window:900ms".to_owned();
    assert!(keys(&main, "0").await.contains(&shorter), "a window below a second is none per second");

    apart.signal(Signal::KILL);
    apart.ended().await;
    for hit in 1..=50 {
        assert_eq!(service.ask("week", "a").await, Ok(left - hit), "exact, whatever becomes of the other");
        assert_eq!(service.ask("second", "a").await, Err(Code::Unavailable));
    }
    apart.restart().await;
    bob.let_in(&apart).await;
    counts("second").await;
    main.signal(Signal::KILL);
    main.ended().await;
    for _ in 0..50 {
        service.ask("second", "a").await.expect("it is counted");
        assert_eq!(service.ask("week", "a").await, Err(Code::Unavailable));
    }
    main.restart().await;
    alice.let_in(&main).await;
    counts("week").await;
}

#[tokio::test]
async fn a_sentinel_that_says_nothing_does_not_keep_the_next_from_being_asked() {
    let set = Sentinel::start().await;
    let [first, others @ ..] = set.sentinels() else { panic!("there are some") };
    let silent = Proxy::start(first.address()).await;
    silent.set(Faults::both(Way::black_hole()));
    let addresses = set.addresses();
    let master = addresses.split(',').next().expect("its name").to_owned();
    let addresses = [silent.address()].into_iter().chain(others.iter().map(Single::address));
    let url = [vec![master], addresses.map(|address| address.to_string()).collect()].concat().join(",");
    let service = Service::start(&[("REDIS_TYPE", "sentinel"), ("REDIS_URL", &url)]).await;
    service.counts("a").await;
    assert!(silent.accepted() > 0, "it was asked first");
}

#[tokio::test]
async fn the_first_call_after_a_start_is_counted_whatever_the_shape() {
    let single = Single::start(&[]).await;
    let set = Sentinel::start().await;
    let cluster = Cluster::shared().await;
    // What is known of the cluster takes a while to arrive.
    let slow = Proxy::start(cluster.nodes()[0].address()).await;
    slow.set(Faults::both(Way::latency_ms(20)));
    let shapes = [
        ("single", single.address().to_string()),
        ("sentinel", set.addresses()),
        ("cluster", slow.address().to_string()),
    ];
    for (shape, url) in shapes {
        for attempt in 0..3 {
            let service = Service::start(&[("REDIS_TYPE", shape), ("REDIS_URL", &url)]).await;
            let value = format!("first.{attempt}");
            assert_eq!(service.ask("week", &value).await, Ok(999_999), "{shape}: {}", service.log());
        }
    }
}

#[tokio::test]
async fn a_redis_that_may_forget_counters_is_warned_of_once() {
    let evicting = Single::start(&["--maxmemory", "100mb", "--maxmemory-policy", "volatile-lru"]).await;
    let keeping = Single::start(&["--maxmemory", "100mb"]).await;
    let alice = user("alice");
    alice.let_in(&evicting).await;
    let warned = async |server: &Single, auth: &str| {
        let service = Service::start(&[
            ("REDIS_URL", &server.address().to_string()),
            ("REDIS_AUTH", auth),
            ("CACHE_KEY_PREFIX", PREFIX),
            ("WORKERS", "2"),
        ])
        .await;
        for _ in 0..10 {
            service.counts("a").await;
        }
        service.log().matches("this Redis").count()
    };
    assert_eq!(warned(&evicting, "").await, 1);
    assert_eq!(warned(&evicting, &alice.auth()).await, 1);
    assert_eq!(warned(&keeping, "").await, 0);
    assert_eq!(evicting.cli(&["ACL", "SETUSER", "alice", "-info"]).await, "OK");
    assert_eq!(warned(&evicting, &alice.auth()).await, 0, "who must not ask counts all the same");
}

#[tokio::test]
async fn health_follows_the_connection_where_it_is_asked_to() {
    let mut server = Single::start(&[]).await;
    server.signal(Signal::KILL);
    server.ended().await;
    let address = server.address().to_string();
    let url = ("REDIS_URL", address.as_str());
    let follows = Service::start(&[url, ("REDIS_HEALTH_CHECK_ACTIVE_CONNECTION", "true")]).await;
    let ignores = Service::start(&[url]).await;
    assert!(!follows.is_healthy().await);
    for _ in 0..2 {
        server.restart().await;
        eventually("it is healthy", async || follows.is_healthy().await.then_some(())).await;
        server.signal(Signal::KILL);
        eventually("it is not", async || (!follows.is_healthy().await).then_some(())).await;
        assert!(ignores.is_healthy().await);
        server.ended().await;
    }
    // Who accepts and says nothing is no connection.
    server.restart().await;
    server.signal(Signal::STOP);
    let follows = Service::start(&[url, ("REDIS_HEALTH_CHECK_ACTIVE_CONNECTION", "true")]).await;
    eventually("it gives up", async || {
        assert!(!follows.is_healthy().await);
        follows.log().contains("cannot connect to Redis").then_some(())
    })
    .await;
    server.signal(Signal::CONT);
    eventually("it is healthy", async || follows.is_healthy().await.then_some(())).await;
}

#[tokio::test]
async fn a_redis_that_was_never_reached_shows_in_the_log_the_metrics_and_the_health_check() {
    let main = Single::start(&[]).await;
    let mut late = Single::start(&[]).await;
    late.signal(Signal::KILL);
    late.ended().await;
    let (url, apart) = (main.address().to_string(), late.address().to_string());
    let variables = [
        ("REDIS_URL", url.as_str()),
        ("REDIS_PERSECOND", "true"),
        ("REDIS_PERSECOND_URL", apart.as_str()),
        ("ON_STORE_FAILURE", "open"),
    ];
    let service = Service::start(&variables).await;
    let health = async || http::get(service.tidegate.http, "/healthcheck").await;
    let told = health().await;
    assert!(told.status == 200 && told.body.starts_with("OK, but Redis has not been reached"), "{told}");
    eventually("the log says so", async || service.tidegate.log().contains("store.unreached").then_some(())).await;
    let log = service.tidegate.log();
    let line = log.lines().find(|line| line.contains("store.unreached")).expect("it is there");
    assert!(line.contains(&format!("redis at {apart}")) && line.contains("every request is admitted"), "{line}");
    assert_eq!(log.matches("store.unreached").count(), 1, "the other one was reached: {log}");
    let page = service.tidegate.metrics().await;
    let reached = |page: &str, store: &str, is_reached| {
        page.contains(&format!("tidegate_store_reached{{store=\"{store}\"}} {is_reached}\n"))
    };
    assert!(reached(&page, "redis", 1) && reached(&page, "redis_persecond", 0), "{page}");
    late.restart().await;
    eventually("it is reached", async || service.tidegate.log().contains("store.reached").then_some(())).await;
    let told = health().await;
    assert_eq!(told.body, "OK", "{told}");
    assert!(reached(&service.tidegate.metrics().await, "redis_persecond", 1));
    // A Redis that was reached and is gone is another matter.
    late.signal(Signal::KILL);
    eventually("the policy answers", async || service.tidegate.log().contains("store.connection.").then_some(())).await;
    assert_eq!(health().await.body, "OK");
}

#[tokio::test]
async fn no_secret_is_in_a_log_a_summary_or_a_command_line() {
    let server = Single::start(&[]).await;
    let address = server.address().to_string();
    let secrets = [
        ("REDIS_URL", format!("redis://alice:{CANARY}@{address}")),
        ("REDIS_PERSECOND", "true".to_owned()),
        ("REDIS_PERSECOND_TYPE", "sentinel".to_owned()),
        ("REDIS_PERSECOND_URL", format!("main,{address}")),
        ("REDIS_PERSECOND_AUTH", format!("bob:{CANARY}")),
        ("REDIS_PERSECOND_SENTINEL_AUTH", format!("eve:{CANARY}")),
    ];
    let rules = rule_file(RULES);
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    command.arg("serve").arg(rules.path()).env_clear().envs(secrets.clone());
    for (name, value) in [("GRPC_PORT", "0"), ("PORT", "0"), ("DEBUG_PORT", "0"), ("LOG_LEVEL", "debug")] {
        command.env(name, value);
    }
    let mut process = Process::start(command.stdin(Stdio::null()));
    let mut summary = String::new();
    while !summary.contains("\n  failure") {
        summary += &process.line().await.expect("it starts");
        summary.push('\n');
    }
    assert!(
        summary.contains(&format!("store    redis at {address}; limits per second: redis master main")),
        "{summary}"
    );
    eventually("it says what is wrong", async || {
        let log = process.errors();
        (log.contains("WRONGPASS") && log.matches("cannot connect").count() >= 2).then_some(())
    })
    .await;
    let read = |file: &str| {
        let path = format!("/proc/{}/{file}", process.pid());
        String::from_utf8_lossy(&std::fs::read(path).expect("the kernel tells")).into_owned()
    };
    for told in [summary, process.errors(), read("cmdline"), read("comm")] {
        assert!(!told.contains(CANARY), "{told}");
    }
    assert!(read("environ").contains(CANARY), "it was given one");
}
