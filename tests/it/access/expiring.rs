//! Logins that expire: each belongs to a user of its own, who is deleted with all connections 2 s after the next one comes.

use std::path::Path;
use std::time::Duration;

use tokio::process::Command;
use tokio::time::{Instant, sleep_until};

use super::{CANARY, PREFIX, RULES, Service, request};
use crate::load::Load;
use crate::redis::Single;
use crate::redis::cluster::Cluster;
use crate::redis::user::{Shape, User};
use crate::support::{by_tier, eventually, on_free_ports, output, replace_file, rule_file};

/// Calls a second.
const PER_SECOND: u32 = 1_000;
/// Time from a change to the end of the last login.
const VALID: Duration = Duration::from_secs(2);

/// A file with a login, and a command that prints it.
struct Token {
    directory: tempfile::TempDir,
}

impl Token {
    fn new(user: &User) -> Self {
        let token = Self { directory: tempfile::tempdir().expect("a directory") };
        token.write(user);
        token
    }

    fn write(&self, user: &User) {
        replace_file(self.path("token").as_ref(), &(user.auth() + "\n"));
    }

    fn path(&self, name: &str) -> String {
        self.directory.path().join(name).to_str().expect("a path of text").to_owned()
    }

    /// A command that prints the login and counts its runs.
    fn command(&self) -> String {
        format!("sh -c 'echo >>{}; cat {}'", self.path("runs"), self.path("token"))
    }

    fn runs(&self) -> usize {
        let file = self.path("runs");
        std::fs::read_to_string(Path::new(&file)).map_or(0, |text| text.lines().count())
    }
}

fn number(shape: Shape, number: usize) -> User {
    let name = format!("token{number}");
    User::of(shape).but(&name, &format!("{CANARY}-{name}"))
}

/// Changes the login so many times under load, and deletes the last one. No call fails.
async fn changes(shape: Shape, servers: &[Single], token: &Token, service: &Service, times: usize) {
    service.counts("before").await;
    let load =
        Load::start(service.tidegate.grpc, vec![request("week", "load")], PER_SECOND, Duration::from_secs(600)).await;
    let mut slowest = Duration::ZERO;
    for next in 1..=times {
        let (before, after) = (number(shape, next - 1), number(shape, next));
        for server in servers {
            after.let_in(server).await;
        }
        token.write(&after);
        let changed = Instant::now();
        let of_before = format!(" user={} ", before.name);
        for server in servers {
            eventually("all connections have authenticated again", async || {
                (!server.cli(&["CLIENT", "LIST"]).await.contains(&of_before)).then_some(())
            })
            .await;
        }
        slowest = slowest.max(changed.elapsed());
        sleep_until(changed + VALID).await;
        for server in servers {
            assert_eq!(server.cli(&["ACL", "DELUSER", &before.name]).await, "1");
        }
    }
    let calls = load.stop().await;
    println!("{} calls in {times} changes; the slowest change took {slowest:?}", calls.count());
    assert!(calls.count() > 0 && calls.failed() == 0, "{} of {} failed", calls.failed(), calls.count());
    let metrics = service.tidegate.metrics().await;
    let changed = format!("tidegate_store_login_reads_total{{store=\"redis\",outcome=\"changed\"}} {times}\n");
    assert!(metrics.contains(&changed), "{metrics}");
    assert!(!service.log().contains(CANARY), "a password is in the log");
}

async fn with(server: &Single, variables: &[(&str, &str)]) -> Service {
    let address = server.address().to_string();
    Service::start(&[&[("REDIS_URL", address.as_str()), ("CACHE_KEY_PREFIX", PREFIX)], variables].concat()).await
}

#[tokio::test]
async fn logins_in_a_file_fail_no_call() {
    let server = Single::start(&[]).await;
    number(Shape::Single, 0).let_in(&server).await;
    let token = Token::new(&number(Shape::Single, 0));
    let service = with(&server, &[("REDIS_AUTH_FILE", &token.path("token"))]).await;
    changes(Shape::Single, std::slice::from_ref(&server), &token, &service, by_tier(3, 50)).await;
}

#[tokio::test]
async fn logins_of_a_command_fail_no_call() {
    let server = Single::start(&[]).await;
    number(Shape::Single, 0).let_in(&server).await;
    let token = Token::new(&number(Shape::Single, 0));
    let command = [("REDIS_AUTH_COMMAND", &*token.command()), ("REDIS_CONNECTION_MAX_AGE", "2s")];
    let service = with(&server, &command).await;
    changes(Shape::Single, std::slice::from_ref(&server), &token, &service, by_tier(3, 50)).await;
}

#[tokio::test]
async fn logins_of_a_command_fail_no_call_on_a_cluster() {
    let cluster = Cluster::start().await;
    for server in cluster.nodes() {
        number(Shape::Cluster, 0).let_in(server).await;
    }
    let token = Token::new(&number(Shape::Cluster, 0));
    let nodes = cluster.addresses();
    let service = Service::start(&[
        ("REDIS_TYPE", "cluster"),
        ("REDIS_URL", &nodes),
        ("CACHE_KEY_PREFIX", PREFIX),
        ("REDIS_AUTH_COMMAND", &token.command()),
        ("REDIS_CONNECTION_MAX_AGE", "2s"),
    ])
    .await;
    changes(Shape::Cluster, cluster.nodes(), &token, &service, by_tier(2, 10)).await;
}

#[tokio::test]
async fn a_command_that_fails_keeps_the_last_login_and_later_connections_use_the_next() {
    let server = Single::start(&[]).await;
    number(Shape::Single, 0).let_in(&server).await;
    let token = Token::new(&number(Shape::Single, 0));
    let service = with(&server, &[("REDIS_AUTH_COMMAND", &token.command())]).await;
    service.counts("before").await;
    std::fs::remove_file(token.path("token")).expect("it was there");
    let failed = "store.password.command_failed";
    eventually("a new connection runs the command", async || {
        server.cli(&["CLIENT", "KILL", "USER", &number(Shape::Single, 0).name]).await;
        service.counts("with the last login").await;
        service.log().contains(failed).then_some(())
    })
    .await;
    assert!(service.log().contains("No such file"), "{}", service.log());
    let metrics = service.tidegate.metrics().await;
    assert!(metrics.contains("tidegate_store_login_reads_total{store=\"redis\",outcome=\"failed\"} "), "{metrics}");

    // A connection that is made later runs the command again.
    number(Shape::Single, 1).let_in(&server).await;
    token.write(&number(Shape::Single, 1));
    let runs = token.runs();
    eventually("the new login is used", async || {
        server.cli(&["CLIENT", "KILL", "USER", &number(Shape::Single, 0).name]).await;
        let _ = service.ask("week", "later").await;
        server
            .cli(&["CLIENT", "LIST"])
            .await
            .contains(&format!(" user={} ", number(Shape::Single, 1).name))
            .then_some(())
    })
    .await;
    assert!(token.runs() > runs);
    assert!(!service.log().contains(CANARY), "a password is in the log");
}

#[tokio::test]
async fn a_command_that_fails_at_the_start_stops_it_and_is_named() {
    let rules = rule_file(RULES);
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    command.arg("serve").arg(rules.path()).env_clear().envs([
        ("BACKEND_TYPE", "redis"),
        ("REDIS_URL", "127.0.0.1:1"),
        ("REDIS_AUTH_COMMAND", "sh -c 'echo no access >&2; exit 3'"),
    ]);
    let (status, _, errors) = output(on_free_ports(&mut command)).await;
    let expected = "REDIS_AUTH_COMMAND: sh ended with exit status: 3; it wrote: no access";
    assert!(status.code() == Some(2) && errors.contains(expected), "{status}: {errors}");
}
