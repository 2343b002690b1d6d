//! The libraries of gRPC against real servers: transports, compression, deadlines, pings, servers that go and come back, and
//! calls that are sent twice. The tables of `docs/api.md` are what is seen here.

use std::panic::AssertUnwindSafe;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use tempfile::NamedTempFile;

use super::toolchains::{self, Program};
use crate::http;
use crate::redis::Single;
use crate::redis::certificates::Authority;
use crate::support::{Tidegate, eventually, repository, rule_file};
use crate::tls::Secured;
use crate::unix::Served;

/// Programs that a test steers.
mod probe;
/// Connections that a test can hold and cut.
mod wire;

use probe::{Channel, Ended, Probe};
use wire::Wire;

/// `user` has a limit that is never reached, `once` a limit of one.
const RULES: &str = "domain: clients
descriptors:
  - { key: user, rate_limit: { unit: week, requests_per_unit: 1000000 } }
  - { key: once, rate_limit: { unit: week, requests_per_unit: 1 } }
";

/// The statuses of gRPC that are expected.
const OK: u64 = 0;
/// Status of a call that tonic itself has ended: at its deadline, or unsent because its connection ended.
const CANCELLED: u64 = 1;
/// Status of a call that tonic has sent and whose connection ended.
const UNKNOWN: u64 = 2;
const DEADLINE_EXCEEDED: u64 = 4;
const UNAVAILABLE: u64 = 14;

/// The longest that a client may take to come back once its server listens again, on a very busy machine.
const BACK: Duration = Duration::from_secs(20);

/// A library, and what is particular about it.
struct Library {
    /// As the tables name it.
    name: &'static str,
    probe: Probe,
    /// The shortest time between its pings, in milliseconds, and how many to wait for.
    pings: (u64, usize),
    /// The settings of retries that it has, beside none.
    retries: &'static [&'static str],
}

#[tokio::test]
#[ignore = "tests/nightly runs it"]
async fn the_c_core_of_grpc_gets_what_the_table_says() {
    if let Some(built) = toolchains::python().await {
        let retries = &["policy", "off"];
        gets_what_the_table_says("gRPC C core (Python)", &built.probe, (100, 3), retries).await;
    }
}

#[tokio::test]
#[ignore = "tests/nightly runs it"]
async fn grpc_go_gets_what_the_table_says() {
    if let Some(built) = toolchains::go().await {
        gets_what_the_table_says("grpc-go", &built.probe, (10_000, 1), &["policy", "off"]).await;
    }
}

#[tokio::test]
#[ignore = "tests/nightly runs it"]
async fn grpc_js_gets_what_the_table_says() {
    if let Some(built) = toolchains::node().await {
        gets_what_the_table_says("grpc-js", &built.probe, (100, 3), &["policy", "off", "hedging"]).await;
    }
}

#[tokio::test]
#[ignore = "tests/nightly runs it"]
async fn grpc_java_gets_what_the_table_says() {
    if let Some(built) = toolchains::java().await {
        gets_what_the_table_says("grpc-java", &built.probe, (10_000, 1), &["policy", "off", "hedging"]).await;
    }
}

#[tokio::test]
#[ignore = "tests/nightly runs it"]
async fn tonic_gets_what_the_table_says() {
    gets_what_the_table_says("tonic", &toolchains::rust().await.probe, (100, 3), &[]).await;
}

/// Tries every cell of a library's rows.
async fn gets_what_the_table_says(
    name: &'static str,
    program: &Program,
    pings: (u64, usize),
    retries: &'static [&'static str],
) {
    let library = &Library { name, probe: Probe::start(program), pings, retries };
    let seen: [&str; 8] = tokio::join!(
        works(tcp(library)),
        works(tls(library)),
        works(unix_socket(library)),
        works(gzip(library)),
        works(deadline(library)),
        works(keepalive_pings(library)),
        works(goaways(library)),
        works(restart(library)),
    )
    .into();
    let charged = lost_answers(library).await;
    // A cell that does not promise anything may have any text.
    let cells_of_transports = cells(name, "| client | TCP | TLS |");
    let is_kept = |(cell, seen): (&String, &&str)| cell != "works" || *seen == "works";
    assert!(cells_of_transports.iter().zip(&seen).all(is_kept), "{name}: {cells_of_transports:?}, and it is {seen:?}");
    let table = "| client | lost answer | `retryPolicy` | `hedgingPolicy` | retries off |";
    assert_eq!(cells(name, table)[..4], charged, "{name}: {}", library.probe.errors());
}

/// The text of a cell. Why it fails is what its panic says.
async fn works(cell: impl Future<Output = ()>) -> &'static str {
    AssertUnwindSafe(cell).catch_unwind().await.map_or("fails", |()| "works")
}

/// The cells of a row of a table of `docs/api.md`, without its name.
fn cells(row: &str, table: &str) -> Vec<String> {
    let page = std::fs::read_to_string(repository("docs/api.md")).expect("it reads");
    let table = page.split_once(table).unwrap_or_else(|| panic!("docs/api.md has no table {table}")).1;
    let mut rows = table.lines().skip(2).take_while(|line| line.starts_with('|'));
    let cells = rows.find_map(|line| line.strip_prefix(&format!("| {row} |")));
    let Some(cells) = cells else { panic!("docs/api.md has no row {row}") };
    cells.trim_end_matches('|').split('|').map(|cell| cell.trim().to_owned()).collect()
}

/// A server with the rules and these variables.
struct Server {
    tidegate: Tidegate,
    rules: NamedTempFile,
}

impl Server {
    async fn start(variables: &[(&str, &str)]) -> Self {
        let rules = rule_file(RULES);
        Self { tidegate: Tidegate::start(rules.path(), variables).await, rules }
    }

    /// Hits that were charged to this user, of all that were ever sent.
    async fn charged(&self, user: &str) -> u64 {
        let entries = format!(r#"[{{"key":"user","value":"{user}"}}]"#);
        let body = format!(r#"{{"domain":"clients","descriptors":[{{"entries":{entries},"hitsAddend":"0"}}]}}"#);
        let request = http::post(self.tidegate.http, "/json", body).header("content-type", "application/json");
        let answer = request.await;
        let left = answer.json()["statuses"][0]["limitRemaining"].as_u64();
        1_000_000 - left.unwrap_or_else(|| panic!("no limit in {answer}"))
    }

    /// Waits until so many hits were charged to this user.
    async fn charges(&self, user: &str, hits: u64) {
        eventually("the hits are charged", async || (self.charged(user).await == hits).then_some(())).await;
    }
}

async fn is_admitted(library: &Library, channel: &Channel<'_>, what: &str) {
    let ended = channel.call("user", "a").await;
    assert_eq!((ended.status, ended.code), (OK, 1), "{}, {what}: {}", library.name, library.probe.errors());
}

async fn tcp(library: &Library) {
    let server = Server::start(&[]).await;
    let channel = library.probe.open(&server.tidegate.grpc.to_string()).await;
    is_admitted(library, &channel, "TCP").await;
}

async fn tls(library: &Library) {
    let authority = Authority::new();
    let own = authority.issue("127.0.0.1");
    let server = Secured::start_of(rule_file(RULES), authority, &own, &[]).await;
    let target = server.tidegate.grpc.to_string();
    let channel = library.probe.open_with(&target, Some(&server.file("ca.crt")), "default", None).await;
    is_admitted(library, &channel, "TLS").await;
}

/// Both spellings of the target.
async fn unix_socket(library: &Library) {
    let server = Served::start_with(rule_file(RULES), &[]).await;
    for scheme in ["unix:", "unix://"] {
        let channel = library.probe.open(&format!("{scheme}{}", server.socket().display())).await;
        is_admitted(library, &channel, scheme).await;
    }
}

/// Compressed calls, the second of which is refused.
async fn gzip(library: &Library) {
    let server = Server::start(&[]).await;
    let channel = library.probe.open(&server.tidegate.grpc.to_string()).await;
    // Long enough to become shorter: some libraries send what does not as it is.
    let long = "a".repeat(1_000);
    for code in [1, 2] {
        let ended = channel.compressed("once", &long).await;
        assert_eq!((ended.status, ended.code), (OK, code), "{}, gzip: {}", library.name, library.probe.errors());
    }
}

/// A call that is not answered in time ends in time, is charged, and leaves the connection as it is.
async fn deadline(library: &Library) {
    let server = Server::start(&[]).await;
    let wire = Wire::to(server.tidegate.grpc).await;
    let channel = library.probe.open(&wire.at.to_string()).await;
    is_admitted(library, &channel, "deadline").await;
    wire.hold(true);
    let late = channel.call_within("user", "a", Duration::from_millis(300)).await;
    let expected = if library.name == "tonic" { CANCELLED } else { DEADLINE_EXCEEDED };
    assert_eq!(late.status, expected, "{}: {}", library.name, library.probe.errors());
    assert!((290..5_000).contains(&late.ms), "{}: after {} ms", library.name, late.ms);
    server.charges("a", 2).await;
    wire.hold(false);
    is_admitted(library, &channel, "after a deadline").await;
    assert_eq!(wire.opened(), 1, "{}: the connection stays", library.name);
}

/// Pings of an idle connection are answered, and it stays.
async fn keepalive_pings(library: &Library) {
    let server = Server::start(&[]).await;
    let wire = Wire::to(server.tidegate.grpc).await;
    let (every_ms, pings) = library.pings;
    let channel =
        library.probe.open_with(&wire.at.to_string(), None, "default", Some(Duration::from_millis(every_ms))).await;
    is_admitted(library, &channel, "keepalive").await;
    // The pings by which some libraries measure the bandwidth come with the call.
    tokio::time::sleep(Duration::from_secs(1)).await;
    let before = wire.pongs.load(Ordering::Relaxed);
    eventually("pings are answered", async || (wire.pongs.load(Ordering::Relaxed) >= before + pings).then_some(()))
        .await;
    is_admitted(library, &channel, "after pings").await;
    assert_eq!(wire.opened(), 1, "{}: the connection stays", library.name);
}

/// Calls while connections reach their age, and while an instance drains and another takes over, are answered and charged once.
async fn goaways(library: &Library) {
    let aging = Server::start(&[("GRPC_MAX_CONNECTION_AGE", "1s")]).await;
    let wire = Wire::to(aging.tidegate.grpc).await;
    let channel = library.probe.open(&wire.at.to_string()).await;
    let sent = calls_until(library, &channel, async || wire.opened() >= 3).await;
    assert_eq!(aging.charged("b").await, sent, "{}: at the age of connections", library.name);

    let redis = Single::start(&[]).await;
    let url = redis.url();
    let variables = [("REDIS_URL", &*url), ("STORE_DEADLINE", "10s"), ("DRAIN_DELAY", "300ms")];
    let (mut leaving, coming) = tokio::join!(Server::start(&variables), Server::start(&variables));
    let wire = Wire::to(leaving.tidegate.grpc).await;
    let channel = library.probe.open(&wire.at.to_string()).await;
    let sent = calls_until(library, &channel, async || coming.charged("b").await >= 20).await;
    wire.leads_to(coming.tidegate.grpc);
    leaving.tidegate.terminate();
    let ended = async {
        assert!(leaving.tidegate.ended().await.success(), "{}", leaving.tidegate.log());
    };
    let mut ended = std::pin::pin!(ended);
    let mut has_ended = false;
    let is_over = async || {
        if !has_ended {
            has_ended = tokio::time::timeout(Duration::from_millis(1), &mut ended).await.is_ok();
        }
        has_ended && wire.opened() >= 2
    };
    let sent = sent + calls_until(library, &channel, is_over).await;
    is_admitted(library, &channel, "after a drain").await;
    assert_eq!(coming.charged("b").await, sent, "{}: while an instance drains", library.name);
}

/// Makes calls four at a time, all of which are admitted, until `is_over`. Returns their number.
async fn calls_until(library: &Library, channel: &Channel<'_>, mut is_over: impl AsyncFnMut() -> bool) -> u64 {
    let (begun, mut sent) = (Instant::now(), 0);
    while !is_over().await {
        let call = || channel.call("user", "b");
        let ended: [Ended; 4] = tokio::join!(call(), call(), call(), call()).into();
        for ended in ended {
            assert_eq!((ended.status, ended.code), (OK, 1), "{}: {}", library.name, library.probe.errors());
        }
        sent += 4;
        assert!(begun.elapsed() < crate::support::PATIENCE, "{}: {sent} calls", library.name);
    }
    sent
}

/// Without a server calls fail at once, and the client comes back by itself.
async fn restart(library: &Library) {
    let mut server = Server::start(&[]).await;
    let channel = library.probe.open(&server.tidegate.grpc.to_string()).await;
    is_admitted(library, &channel, "before a restart").await;
    let port = server.tidegate.grpc.port().to_string();
    server.tidegate.kill();
    server.tidegate.ended().await;
    eventually("a call is UNAVAILABLE", async || {
        let status = channel.call("user", "a").await.status;
        // tonic takes a call before it notices that the connection is gone, and a later one knows.
        let is_early = library.name == "tonic" && [UNKNOWN, CANCELLED].contains(&status);
        assert!(is_early || status == UNAVAILABLE, "{}: {status}: {}", library.name, library.probe.errors());
        (status == UNAVAILABLE).then_some(())
    })
    .await;
    server.tidegate = Tidegate::start(server.rules.path(), &[("GRPC_PORT", &port)]).await;
    let began = Instant::now();
    eventually("the client is back", async || {
        let ended = channel.call_within("user", "a", Duration::from_secs(1)).await;
        (ended.status == OK).then_some(())
    })
    .await;
    eprintln!("{}: back {:?} after the restart", library.name, began.elapsed());
    assert!(began.elapsed() < BACK, "{}: {:?}", library.name, began.elapsed());
}

/// How often a call is charged whose answer is lost, and how it ends, with each setting of retries.
async fn lost_answers(library: &Library) -> Vec<String> {
    let server = Server::start(&[]).await;
    let mut seen = Vec::new();
    for retries in ["default", "policy", "hedging", "off"] {
        if retries != "default" && !library.retries.contains(&retries) {
            seen.push("-".to_owned());
            continue;
        }
        let wire = Wire::to(server.tidegate.grpc).await;
        let channel = library.probe.open_with(&wire.at.to_string(), None, retries, None).await;
        assert_eq!(channel.call("user", retries).await.status, OK, "{}", library.probe.errors());
        server.charges(retries, 1).await;
        wire.hold(true);
        let lose = async {
            if retries == "hedging" {
                server.charges(retries, 4).await;
            } else {
                server.charges(retries, 2).await;
                wire.cut();
            }
            wire.hold(false);
        };
        let (ended, ()) = tokio::join!(channel.call("user", retries), lose);
        let charged = server.charged(retries).await - 1;
        let is_answered = ended.status == OK;
        let expected = [OK, UNKNOWN, UNAVAILABLE];
        assert!(expected.contains(&ended.status), "{}: {}", library.name, library.probe.errors());
        let times = if charged == 1 { "once".to_owned() } else { format!("{charged} times") };
        seen.push(format!("{times}, {}", if is_answered { "answered" } else { "fails" }));
    }
    seen
}
