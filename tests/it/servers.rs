//! Servers that lack commands, and proxies in front of servers: each row of the table in `docs/redis.md`.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use tidegate::proto::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use tidegate::proto::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::Entry;
use tidegate::proto::envoy::service::ratelimit::v3::RateLimitRequest;
use tidegate::proto::envoy::service::ratelimit::v3::rate_limit_response::Code as Outcome;
use tidegate::proto::envoy::service::ratelimit::v3::rate_limit_service_client::RateLimitServiceClient;
use tokio::time::sleep;
use tonic::Code;
use tonic::transport::Channel;

use crate::redis::Single;
use crate::redis::liar::{Liar, Lie, Then};
use crate::redis::sentinel::{MASTER, Sentinel};
use crate::support::{Tidegate, eventually, rule_file};

/// The log line about what a server lacks.
const DIALECT: &str = "store.dialect";

/// A Tidegate and a caller of it.
struct Service {
    tidegate: Tidegate,
    client: RateLimitServiceClient<Channel>,
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
        let tidegate = Tidegate::start(rule_file(&rules).path(), &variables).await;
        let client = RateLimitServiceClient::connect(format!("http://{}", tidegate.grpc)).await.expect("it listens");
        Self { tidegate, client }
    }

    async fn of(url: &str) -> Self {
        Self::start("each", &[("REDIS_URL", url)]).await
    }

    /// Asks for a hit on each of these descriptors.
    async fn ask(&mut self, descriptors: &[(&str, &str)]) -> Result<Outcome, Code> {
        let bytes = |text: &str| text.as_bytes().to_vec().into();
        let descriptor = |(key, value): &(&str, &str)| RateLimitDescriptor {
            entries: vec![Entry { key: bytes(key), value: bytes(value) }],
            ..RateLimitDescriptor::default()
        };
        let descriptors = descriptors.iter().map(descriptor).collect();
        let request = RateLimitRequest { domain: "d".to_owned(), descriptors, hits_addend: 0 };
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
        (&["HELLO", "SCRIPT"], &["no HELLO 3", "no SCRIPT LOAD"]),
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
        let log = service.tidegate.log();
        assert!(log.contains(event) && log.to_ascii_uppercase().contains("NOPERM"), "{right}: {log}");
        assert_eq!(service.told(), Vec::<String>::new(), "{right}");
    }
    let server = Single::with_password("secret", &without(&["HELLO"])).await;
    for (login, code) in [(":wrong@", "WRONGPASS"), ("", "NOAUTH")] {
        let mut service = Service::of(&format!("redis://{login}{}", server.address())).await;
        assert_eq!(service.ask(&[("user", "a")]).await, Err(Code::Unavailable));
        let log = service.tidegate.log();
        assert!(log.contains("store.connection.failed") && log.contains(code), "{log}");
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
