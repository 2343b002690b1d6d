//! Servers that lack commands, and proxies in front of servers: each row of the table in `docs/redis.md`.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use tempfile::NamedTempFile;
use tidegate::proto::envoy::service::ratelimit::v3::rate_limit_response::Code as Outcome;
use tokio::time::sleep;
use tonic::Code;

use crate::grpc;
use crate::redis::Single;
use crate::redis::certificates::Authority;
use crate::redis::cluster::Cluster;
use crate::redis::liar::{Liar, Lie, Then};
use crate::redis::sentinel::{MASTER, Sentinel};
use crate::support::{Tidegate, eventually, rule_file};
use proxy::Proxy;

mod proxy;

/// The log line about what a server lacks.
const DIALECT: &str = "store.dialect";

/// A Tidegate and a caller of it.
struct Service {
    tidegate: Tidegate,
    client: grpc::Client,
    _rules: NamedTempFile,
}

impl Service {
    /// Starts a Tidegate: 3 hits a year for each `user`, 5 for `all` together, and errors where the store fails.
    async fn start(charging: &str, variables: &[(&str, &str)]) -> Self {
        let limit = |key, hits| {
            format!(
                "  - {{ key: {key}, on_store_failure: error, on_store_overload: error, remember_refusals: false, rate_limit: {{ unit: year, requests_per_unit: {hits} }} }}\n"
            )
        };
        let rules = format!("domain: d\ncharging: {charging}\ndescriptors:\n{}{}", limit("user", 3), limit("all", 5));
        let variables = [variables, &[("STORE_DEADLINE", "10s"), ("LOG_LEVEL", "warn")]].concat();
        let rules = rule_file(&rules);
        let tidegate = Tidegate::start(rules.path(), &variables).await;
        let client = grpc::client(tidegate.grpc).await;
        Self { tidegate, client, _rules: rules }
    }

    async fn of(url: &str) -> Self {
        Self::start("each", &[("REDIS_URL", url)]).await
    }

    /// Asks for a hit on each of these descriptors.
    async fn ask(&mut self, descriptors: &[(&str, &str)]) -> Result<Outcome, Code> {
        let request = grpc::request("d", descriptors.iter().map(|entry| grpc::descriptor(&[*entry])));
        let answer = self.client.should_rate_limit(request).await;
        answer.map(|answer| answer.into_inner().overall_code()).map_err(|status| status.code())
    }

    /// Asks four times for a user, of whose hits three are admitted, and checks that the instances are counted.
    async fn counts(&mut self, case: &str) {
        let mut answers = Vec::new();
        for _ in 0..4 {
            answers.push(self.ask(&[("user", "a")]).await);
        }
        let expected = [Ok(Outcome::Ok), Ok(Outcome::Ok), Ok(Outcome::Ok), Ok(Outcome::OverLimit)];
        assert_eq!(answers, expected, "{case}: {}", self.tidegate.log());
        eventually("the instances are counted", async || {
            self.tidegate.metrics().await.contains("tidegate_replicas{source=\"counted\"} 1").then_some(())
        })
        .await;
    }

    /// Waits for a line of the log with all of this, in letters of either case.
    async fn says(&self, words: &[&str]) {
        let found =
            |line: &str| words.iter().all(|word| line.to_ascii_lowercase().contains(&word.to_ascii_lowercase()));
        eventually(&format!("the log has {words:?}"), async || self.tidegate.log().lines().any(found).then_some(()))
            .await;
    }

    /// The lines about what a server lacks.
    fn told(&self) -> Vec<String> {
        let log = self.tidegate.log();
        assert!(!log.contains("secret"), "{log}");
        log.lines().filter(|line| line.contains(DIALECT)).map(str::to_owned).collect()
    }
}

/// Arguments of a server without these commands.
fn without<'a>(commands: &[&'a str]) -> Vec<&'a str> {
    commands.iter().flat_map(|command| ["--rename-command", command, ""]).collect()
}

#[tokio::test]
async fn a_redis_that_lacks_commands_counts_all_the_same_and_the_log_says_what_is_missing() {
    let cases: [(&[&str], &[&str]); 9] = [
        (&[], &[]),
        (&["HELLO"], &["no HELLO 3"]),
        (&["SCRIPT"], &["no SCRIPT LOAD"]),
        (&["EVALSHA"], &["no EVALSHA"]),
        (&["HELLO", "SCRIPT"], &["no HELLO 3", "EVAL loads the script"]),
        (&["HELLO", "EVALSHA"], &["no HELLO 3", "no EVALSHA"]),
        (&["SCRIPT", "EVALSHA"], &["no EVALSHA"]),
        (&["HELLO", "INFO", "CLIENT", "CONFIG"], &["no HELLO 3"]),
        (&["HELLO", "SCRIPT", "EVALSHA", "INFO", "CLIENT"], &["no HELLO 3", "no EVALSHA"]),
    ];
    let tried = cases.iter().enumerate().map(async |(number, (commands, missing))| {
        let arguments = without(commands);
        // Each login with several of them.
        let (server, login) = match number % 3 {
            0 => (Single::with_password("secret", &arguments).await, ":secret@"),
            1 => (
                Single::start(&[&arguments[..], &["--user", "alice", "on", ">secret", "~*", "+@all"]].concat()).await,
                "alice:secret@",
            ),
            _ => (Single::start(&arguments).await, ""),
        };
        let case = format!("without {commands:?} as {login:?}");
        let mut service = Service::of(&format!("redis://{login}{}/2", server.address())).await;
        service.counts(&case).await;
        assert!(server.cli(&["-n", "2", "KEYS", "*"]).await.contains("{d|user"), "{case}");
        let told = service.told();
        assert_eq!(told.len(), usize::from(!missing.is_empty()), "{case}: {told:?}");
        for missing in *missing {
            assert!(told[0].contains(missing), "{case}: {told:?}");
        }
    });
    join_all(tried).await;
}

#[tokio::test]
async fn a_right_that_is_missing_is_reported_and_not_worked_around() {
    for (right, event) in [("-script", "store.connection.failed"), ("-evalsha", "store.script.refused")] {
        let server = Single::start(&["--user", "default", "on", "nopass", "~*", "+@all", right]).await;
        let mut service = Service::of(&server.address().to_string()).await;
        assert_eq!(service.ask(&[("user", "a")]).await, Err(Code::Unavailable), "{right}");
        service.says(&[event, "NOPERM"]).await;
        assert_eq!(service.told(), Vec::<String>::new(), "{right}");
    }
    let server = Single::with_password("secret", &without(&["HELLO"])).await;
    for (login, code) in [(":wrong@", "WRONGPASS"), ("", "NOAUTH")] {
        let mut service = Service::of(&format!("redis://{login}{}", server.address())).await;
        assert_eq!(service.ask(&[("user", "a")]).await, Err(Code::Unavailable));
        service.says(&["store.connection.failed", code]).await;
    }
}

#[tokio::test]
async fn a_connection_in_resp2_that_is_lost_fails_no_call() {
    let server = Single::start(&without(&["HELLO"])).await;
    let mut service = Service::of(&server.address().to_string()).await;
    for user in 0..20 {
        assert_eq!(service.ask(&[("user", &user.to_string())]).await, Ok(Outcome::Ok), "{}", service.tidegate.log());
        server.cli(&["CLIENT", "KILL", "TYPE", "normal"]).await;
        // The connection is idle: its end alone says that it is lost.
        sleep(Duration::from_millis(50)).await;
    }
    let log = service.tidegate.log();
    assert!(!log.contains("store.connection.lost"), "{log}");
}

#[tokio::test]
async fn a_server_that_learns_resp3_is_spoken_to_in_it_once_its_connections_are_lost() {
    let server = Single::start(&[]).await;
    let liar = Liar::start(server.address()).await;
    let begin = Arc::from("-ERR unknown command 'HELLO', with args beginning with: '3' \r\n");
    liar.lies(&Lie { word: "HELLO", begin, then: Then::Truth });
    let mut service = Service::of(&liar.address().to_string()).await;
    service.counts("in RESP2").await;
    assert_eq!(service.told().len(), 1);
    let spoken = async |protocol: &str| server.cli(&["CLIENT", "LIST"]).await.contains(protocol).then_some(());
    assert_eq!(spoken("resp=3").await, None);
    liar.is_honest();
    server.cli(&["CLIENT", "KILL", "TYPE", "normal"]).await;
    eventually("RESP3 is spoken", async || spoken("resp=3").await).await;
    assert_eq!(service.ask(&[("user", "a")]).await, Ok(Outcome::OverLimit), "the counter is the same");
}

#[tokio::test]
async fn sentinels_and_their_master_are_spoken_to_in_resp2() {
    let set = Sentinel::without_hello().await;
    let sentinel = &set.sentinels()[0];
    let liar = Liar::start(sentinel.address()).await;
    let begin = Arc::from("-ERR unknown command `HELLO`, with args beginning with: `3`, \r\n");
    liar.lies(&Lie { word: "HELLO", begin, then: Then::Truth });
    let url = format!("{MASTER},{}", liar.address());
    let mut service = Service::start("each", &[("REDIS_TYPE", "sentinel"), ("REDIS_URL", &url)]).await;
    service.counts("sentinels").await;
    assert!(service.told()[0].contains("no HELLO 3"));
}

/// Asks 12 times for a user each, and for `all`, of whose hits 5 are admitted; returns the users that were refused.
async fn ask_in_pairs(service: &mut Service) -> Vec<String> {
    let (mut admitted, mut refused) = (0, Vec::new());
    for user in 0..12 {
        let user = format!("u{user}");
        // One counter twice is one counter.
        match service.ask(&[("user", &user), ("all", ""), ("user", &user)]).await {
            Ok(Outcome::Ok) => admitted += 1,
            Ok(_) => refused.push(user),
            Err(code) => panic!("{code:?}: {}", service.tidegate.log()),
        }
    }
    assert_eq!(admitted, 5, "one counter, whoever else is charged with it");
    refused
}

#[tokio::test]
async fn behind_a_proxy_each_counter_is_one_on_whatever_server_it_is() {
    for (servers, password) in [(1, Some("secret")), (2, None)] {
        let redis = join_all((0..servers).map(async |_| Single::start(&[]).await)).await;
        let proxy = Proxy::start(&redis.iter().collect::<Vec<_>>(), password).await;
        let login = password.map_or_else(String::new, |password| format!(":{password}@"));
        let url = format!("redis://{login}{}", proxy.address);
        let mut service = Service::start("all_or_nothing", &[("REDIS_URL", &url)]).await;
        service.counts("a proxy").await;
        assert!(service.told()[0].contains("a script of its own"), "{:?}", service.told());
        for user in ask_in_pairs(&mut service).await.iter().take(4) {
            // What was taken is given back, if not at once.
            let mut admitted = 0;
            eventually("the refused request has taken nothing", async || {
                admitted += usize::from(service.ask(&[("user", user)]).await == Ok(Outcome::Ok));
                (admitted == 3).then_some(())
            })
            .await;
        }
        for server in &redis {
            assert!(server.cli(&["KEYS", "*"]).await.contains("{d|user"), "each server has some of the counters");
            server.cli(&["FLUSHALL"]).await;
            // Each server loads the script when it misses it.
            server.cli(&["SCRIPT", "FLUSH"]).await;
        }
        let mut service = Service::start("each", &[("REDIS_URL", &url)]).await;
        ask_in_pairs(&mut service).await;
        let counters = join_all(redis.iter().map(async |server| server.cli(&["KEYS", "*{d|all*"]).await)).await;
        assert_eq!(counters.iter().filter(|counters| !counters.is_empty()).count(), 1, "{counters:?}");
    }
}

#[tokio::test]
async fn behind_a_proxy_the_counters_of_a_server_that_lives_are_counted_while_another_is_down() {
    let (live, mut dead) = (Single::start(&[]).await, Single::start(&[]).await);
    let proxy = Proxy::start(&[&live, &dead], None).await;
    dead.signal(rustix::process::Signal::KILL);
    dead.ended().await;
    // It connects to the proxy now.
    let mut service = Service::of(&proxy.address.to_string()).await;
    let mut outcomes = [0; 2];
    for user in 0..20 {
        match service.ask(&[("user", &format!("u{user}"))]).await {
            Ok(Outcome::Ok) => outcomes[0] += 1,
            Err(Code::Unavailable) => outcomes[1] += 1,
            other => panic!("{other:?}: {}", service.tidegate.log()),
        }
    }
    assert!(outcomes.iter().all(|count| *count > 0), "{outcomes:?}: {}", service.tidegate.log());
}

#[tokio::test]
async fn a_server_with_tls_and_a_cluster_are_spoken_to_in_resp2() {
    let authority = Authority::new();
    let arguments = [&without(&["HELLO"])[..], &["--tls-auth-clients", "no"]].concat();
    let redis = Single::with_tls(&authority, "127.0.0.1", &arguments).await;
    let certificate = authority.certificate();
    let path = certificate.to_str().expect("a path of text");
    let url = format!("rediss://{}", redis.tls_address());
    let mut service = Service::start("each", &[("REDIS_URL", &url), ("REDIS_TLS_CACERT", path)]).await;
    service.counts("TLS").await;
    assert!(service.told()[0].contains("no HELLO 3"));

    let cluster = Cluster::start_with(&without(&["HELLO"])).await;
    let given = [("REDIS_TYPE", "cluster"), ("REDIS_URL", &cluster.addresses())];
    let mut service = Service::start("all_or_nothing", &given).await;
    service.counts("a cluster").await;
    assert!(service.told().iter().all(|told| told.contains("no HELLO 3")), "{:?}", service.told());
    ask_in_pairs(&mut service).await;
    let shards = cluster.contents().await;
    assert!(shards.len() > 12, "each user and the limit of all have a counter: {shards:?}");
}

#[tokio::test]
async fn the_log_names_what_a_server_says_where_a_command_of_the_script_is_missing() {
    let log_of = async |missing: &str, said: &str| {
        let server = Single::start(&without(&[missing])).await;
        let mut service = Service::of(&server.address().to_string()).await;
        let answer = service.ask(&[("user", "a")]).await;
        eventually("the log says it", async || service.tidegate.log().contains(said).then_some(())).await;
        let log = service.tidegate.log();
        assert!(!log.contains("{d|"), "{log}");
        (answer, log)
    };
    let (answer, log) = log_of("TIME", "store.script.refused").await;
    assert_eq!(answer, Err(Code::Unavailable));
    assert!(log.contains("Unknown Redis command called from script") && log.contains("TIME, GET and SET"), "{log}");
    let (answer, log) = log_of("ZADD", "store.replicas.not_counted").await;
    assert_eq!(answer, Ok(Outcome::Ok));
    assert!(
        log.contains("Unknown Redis command") && log.contains("has to know") && !log.contains("allow +zadd"),
        "{log}"
    );
    let (answer, log) = log_of("EVAL", "").await;
    assert_eq!((answer, log.as_str()), (Ok(Outcome::Ok), ""), "EVAL is not needed");
}
