//! One Prometheus, seven instances of Tidegate, and everything that goes wrong with them.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Write;
use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::process::Signal;
use tempfile::TempDir;
use tidegate::proto::envoy::service::ratelimit::v3::RateLimitRequest;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::process::Command;
use tokio::task::AbortHandle;
use tokio::time::{Instant, MissedTickBehavior, interval};

use super::scrape::Prometheus;
use super::{ALERTS, alerts, queries, text};
use crate::grpc;
use crate::http;
use crate::redis::certificates::{Authority, Issued};
use crate::redis::proxy::{Faults, Proxy, Way};
use crate::redis::{Port, Single};
use crate::support::{PATIENCE, Tidegate, eventually, output, repository, rule_file};
use crate::tls::variables_of;

/// What an alert looks at and how long it waits, and what it does here, where a day has a minute at most. Thresholds stay.
const FASTER: &[(&str, &str)] = &[
    ("for: 1m", "for: 1s"),
    ("for: 2m", "for: 1s"),
    ("for: 5m", "for: 1s"),
    ("for: 10m", "for: 1s"),
    ("for: 15m", "for: 1s"),
    ("[5m]", "[6s]"),
    ("[10m]", "[6s]"),
    ("[15m]", "[6s]"),
    ("[30m]", "[2m]"),
    ("[1h]", "[6s]"),
    ("[1d]", "[1m]"),
    ("offset 10m", "offset 6s"),
    ("offset 1d", "offset 15s"),
    ("offset 1w", "offset 15s"),
];

/// What stands for the dashboard's variables; and however long a busy machine takes, what was provoked is still in sight.
const CHOSEN: &[(&str, &str)] = &[
    ("[$__rate_interval]", "[10m]"),
    ("[1m]", "[10m]"),
    ("$namespace", ".*"),
    ("$job", ".*"),
    ("$instance", ".*"),
    ("$domain", ".*"),
];

/// What a busy machine may bring about by itself.
const OF_TIME: [&str; 2] = ["TidegateStoreSlow", "TidegateSlow"];

/// The names of the reference, which `promtool` would like to end in `_total`; nothing else displeases it.
const WITHOUT_TOTAL: &[&str] = &[
    "ratelimit_service_config_load_error",
    "ratelimit_service_config_load_success",
    "ratelimit_service_global_shadow_mode",
    "ratelimit_service_rate_limit_near_limit",
    "ratelimit_service_rate_limit_over_limit",
    "ratelimit_service_rate_limit_shadow_mode",
    "ratelimit_service_rate_limit_total_hits",
    "ratelimit_service_rate_limit_within_limit",
    "ratelimit_service_should_rate_limit_error",
    "ratelimit_service_total_requests",
];

const RULES: &str = "domain: edge
known_good:
  - { key: little, value: \"*\" }
descriptors:
  - { key: much, rate_limit: { unit: year, requests_per_unit: 4000000000 } }
  - { key: little, rate_limit: { unit: year, requests_per_unit: 1 } }
  - { key: watched, shadow_mode: true, rate_limit: { unit: year, requests_per_unit: 1 } }
  - { key: steady, rate_limit: { unit: second, requests_per_unit: 100 } }
";

/// Calls to one Tidegate, one after the other, so many in a second, until this is dropped.
struct Calls(AbortHandle);

impl Drop for Calls {
    fn drop(&mut self) {
        self.0.abort();
    }
}

fn calls(server: SocketAddr, per_second: u32, make: impl Fn(u32) -> RateLimitRequest + Send + 'static) -> Calls {
    let calling = async move {
        let mut client = grpc::client(server).await;
        let mut due = interval(Duration::from_secs(1) / per_second);
        due.set_missed_tick_behavior(MissedTickBehavior::Delay);
        for number in 0.. {
            due.tick().await;
            // What is answered is for others to see.
            let _ = client.should_rate_limit(make(number)).await;
        }
    };
    Calls(tokio::spawn(calling).abort_handle())
}

/// Connections in plaintext to a Tidegate that serves TLS, until this is dropped.
fn in_plaintext(server: SocketAddr) -> Calls {
    let connecting = async move {
        let mut due = interval(Duration::from_millis(100));
        loop {
            due.tick().await;
            let mut stream = TcpStream::connect(server).await.expect("it takes connections");
            let _ = stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await;
            let _ = stream.read_to_end(&mut Vec::new()).await;
        }
    };
    Calls(tokio::spawn(connecting).abort_handle())
}

fn request(domain: &str, entries: impl IntoIterator<Item = (&'static str, String)>) -> RateLimitRequest {
    grpc::request(domain, entries.into_iter().map(|entry| grpc::descriptor(&[entry])))
}

fn one(key: &'static str) -> impl Fn(u32) -> RateLimitRequest {
    move |_| request("edge", [(key, "v".to_owned())])
}

/// A directory with a rule file in it.
fn rules() -> TempDir {
    let directory = tempfile::tempdir().expect("a directory");
    write(directory.path(), RULES);
    directory
}

fn write(directory: &Path, rules: &str) {
    fs::write(directory.join("rules.yaml"), rules).expect("it is written");
}

/// Waits until all of these have fired since then, be it one after the other; each with its job.
async fn fired(prometheus: &Prometheus, since: Instant, expected: &[(&str, &str)]) {
    let mut missing: BTreeSet<_> = expected.iter().copied().collect();
    let all = async {
        while !missing.is_empty() {
            tokio::time::sleep(Duration::from_millis(100)).await;
            let fired = prometheus.fired(since.elapsed()).await;
            missing.retain(|(alert, job)| !fired.contains(&((*alert).to_owned(), (*job).to_owned())));
        }
    };
    let waited = tokio::time::timeout(PATIENCE, all).await;
    assert!(waited.is_ok(), "these do not fire: {missing:?}; these do: {:?}", prometheus.fired(since.elapsed()).await);
}

/// Waits until for some seconds none has fired that a busy machine does not bring about by itself.
async fn silent(prometheus: &Prometheus) {
    eventually("no alert fires while all is well", async || {
        let fired = prometheus.fired(Duration::from_secs(3)).await;
        fired.iter().all(|(alert, _)| OF_TIME.contains(&alert.as_str())).then_some(())
    })
    .await;
}

/// Lets a process open no more files than it has.
async fn leave_no_files(pid: u32) {
    let open = fs::read_dir(format!("/proc/{pid}/fd")).expect("the kernel tells");
    let number = |file: std::io::Result<fs::DirEntry>| file.ok()?.file_name().to_str()?.parse::<u32>().ok();
    let open: BTreeSet<_> = open.filter_map(number).collect();
    // A new file is given the least number that is free.
    let most = (0..).find(|number| !open.contains(number)).expect("some are free");
    let (pid, limit) = (pid.to_string(), format!("--nofile={most}:{most}"));
    let (status, _, errors) = output(Command::new("prlimit").args(["--pid", &pid, &limit])).await;
    assert!(status.success(), "{errors}");
}

async fn assert_page_is_well_written(page: &str) {
    let mut file = tempfile::tempfile().expect("a file");
    file.write_all(page.as_bytes()).expect("it is written");
    std::io::Seek::rewind(&mut file).expect("it is a file");
    let mut command = Command::new("promtool");
    let (_, said, errors) = output(command.args(["check", "metrics"]).stdin::<File>(file)).await;
    let mut said: Vec<_> = said.lines().chain(errors.lines()).collect();
    said.sort_unstable();
    let lint = |name: &&str| format!("{name} counter metrics should have \"_total\" suffix");
    let expected: Vec<_> = WITHOUT_TOTAL.iter().map(lint).collect();
    assert_eq!(said, expected);
}

/// The alerts as they are, but for what they wait for.
fn faster() -> String {
    let mut text = fs::read_to_string(repository(ALERTS)).expect("it reads");
    for (slow, fast) in FASTER {
        assert!(text.contains(slow), "no alert has {slow} any more");
        text = text.replace(slow, fast);
    }
    text
}

#[tokio::test]
#[expect(clippy::too_many_lines, reason = "one run, step after step")]
async fn a_prometheus_sees_each_thing_go_wrong_and_the_dashboard_shows_it() {
    let began = Instant::now();
    let mut prometheus = Prometheus::start(&faster()).await;
    fired(&prometheus, began, &[("TidegateAbsent", "")]).await;

    let rules_of_all = rules();
    let mut redis = Single::with_password("hunter2", &[]).await;
    let proxy = Proxy::start(redis.address()).await;
    let url = format!("redis://{}", proxy.address());
    let login = ("REDIS_AUTH_COMMAND", "echo hunter2");
    let on_redis = [("REDIS_URL", &*url), login, ("ON_STORE_FAILURE", "open"), ("STORE_DEADLINE", "1s")];
    let with_store = Tidegate::start(rules_of_all.path(), &on_redis).await;
    let small = Tidegate::start(rules_of_all.path(), &[("MEMORY_MAX_COUNTERS", "6400")]).await;
    let asked = Tidegate::start(rules_of_all.path(), &[]).await;
    let crowded = Tidegate::start(rules_of_all.path(), &[]).await;
    let mut leaving = Tidegate::start(rules_of_all.path(), &[]).await;
    let (rules_a, rules_b) = (rules(), rules());
    let authority = Authority::new();
    let certificates = tempfile::tempdir().expect("a directory");
    let put = |issued: &Issued| {
        fs::copy(&issued.certificate, certificates.path().join("tls.crt")).expect("it is copied");
        fs::copy(&issued.key, certificates.path().join("tls.key")).expect("it is copied");
    };
    put(&authority.issue("127.0.0.1"));
    let over_tls = variables_of(&certificates, &[]);
    let over_tls: Vec<_> = over_tls.iter().map(|(name, value)| (&**name, &**value)).collect();
    let one_of_two = Tidegate::start(rules_a.path(), &[]).await;
    let other = Tidegate::start(rules_b.path(), &over_tls).await;

    prometheus.scrape("store", "a", with_store.http);
    prometheus.scrape("memory", "a", small.http);
    prometheus.scrape("callers", "a", asked.http);
    prometheus.scrape("crowd", "a", crowded.http);
    prometheus.scrape("leaving", "a", leaving.http);
    prometheus.scrape("rules", "a", one_of_two.http);
    prometheus.scrape("rules", "b", other.http);
    let mut traffic = vec![
        calls(with_store.grpc, 40, one("much")),
        calls(asked.grpc, 50, one("much")),
        calls(small.grpc, 2, one("much")),
        calls(asked.grpc, 1, one("watched")),
        calls(asked.grpc, 20, one("steady")),
    ];

    // A yesterday, fifteen seconds ago.
    eventually("there is a day to compare with", async || {
        let known = "sum by (job) (rate(tidegate_decisions_total[6s] offset 15s)) / \
                     sum by (job) (rate(tidegate_decisions_total[6s])) > 0.8";
        // Three of them are asked.
        (prometheus.query(known).await.len() >= 3).then_some(())
    })
    .await;
    silent(&prometheus).await;

    let began = Instant::now();
    traffic.push(calls(asked.grpc, 10, |_| request("nobody's", [("k", "v".to_owned())])));
    traffic.push(calls(asked.grpc, 10, |_| request("", [])));
    traffic.push(calls(asked.grpc, 50, one("little")));
    traffic.push(calls(small.grpc, 50, |number| {
        request("edge", (0..200).map(|value| ("much", format!("{number}.{value}"))))
    }));
    proxy.set(Faults { to_client: Way::latency_ms(40), ..Faults::default() });
    write(rules_a.path(), "domain: edge\ndescriptors: 7\n");
    write(rules_b.path(), &RULES.replace("watched", "more"));
    put(&authority.issue_as("127.0.0.1", |params| {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("it is later");
        params.not_after = rcgen::date_time_ymd(1970, 1, 1) + now + Duration::from_secs(3 * 86_400);
    }));
    let _strangers = in_plaintext(other.grpc);
    leave_no_files(crowded.pid()).await;
    let mut crowd = Vec::new();
    for _ in 0..64 {
        crowd.push(TcpStream::connect(crowded.grpc).await.expect("the kernel takes it"));
    }
    write(rules_b.path(), &format!("{RULES}  - {{ key: another, rate_limit: {{ unlimited: true }} }}\n"));
    fired(
        &prometheus,
        began,
        &[
            ("TidegateUnknownDomain", "callers"),
            ("TidegateKnownGoodRefused", "callers"),
            ("TidegateInvalidRequests", "callers"),
            ("TidegateRefusalsAboveNormal", "callers"),
            ("TidegateDecisionRateOffBaseline", "memory"),
            ("TidegateMemoryEvicting", "memory"),
            ("TidegateStoreSlow", "store"),
            ("TidegateSlow", "store"),
            ("TidegateRulesRejected", "rules"),
            ("TidegateRulesDiffer", "rules"),
            ("TidegateConnectionsRefused", "crowd"),
            ("TidegateHandshakesRefused", "rules"),
            ("TidegateCertificateExpires", "rules"),
        ],
    )
    .await;

    for start in ["second", "third", "fourth"] {
        leaving.kill();
        leaving.ended().await;
        leaving = Tidegate::start(rules_of_all.path(), &[]).await;
        prometheus.scrape("leaving", "a", leaving.http);
        let since = leaving.metrics().await;
        let since = since.lines().find_map(|line| line.strip_prefix("process_start_time_seconds ")).expect("it says");
        let seen = format!("process_start_time_seconds{{job=\"tidegate-leaving\"}} == {since}");
        let what = format!("the {start} start is seen");
        eventually(&what, async || (!prometheus.query(&seen).await.is_empty()).then_some(())).await;
    }
    fired(&prometheus, began, &[("TidegateRestarting", "leaving")]).await;

    let began = Instant::now();
    leaving.kill();
    redis.signal(Signal::KILL);
    redis.ended().await;
    proxy.heal();
    let last = [("TidegateDown", "leaving"), ("TidegateStoreDown", "store"), ("TidegatePolicyAnswers", "store")];
    fired(&prometheus, began, &last).await;

    for (title, query) in queries() {
        let asked = CHOSEN.iter().fold(query, |query, (variable, value)| query.replace(variable, value));
        assert!(!asked.contains('$'), "{title}: the test knows nothing of a variable of {asked}");
        let shown = prometheus.query(&asked).await;
        assert!(shown.iter().any(|value| !value.is_nan()), "{title} shows nothing of {asked}");
    }
    for (_, rule) in alerts().await {
        prometheus.query(text(&rule["expr"])).await;
    }
    for server in [&with_store, &small, &asked] {
        assert_page_is_well_written(&server.metrics().await).await;
    }
}

/// A listener of its own, for those who let nobody but Prometheus near it.
#[tokio::test]
async fn the_metrics_have_a_listener_of_their_own_where_that_is_asked_for() {
    let rules = rule_file(RULES);
    let port = Port::free();
    let address = port.address();
    drop(port);
    let listener = address.to_string();
    let variables =
        [("USE_PROMETHEUS", "true"), ("PROMETHEUS_ADDR", &*listener), ("PROMETHEUS_PATH", "/of/the/metrics")];
    let server = Tidegate::start(rules.path(), &variables).await;
    let own = http::get(address, "/of/the/metrics").await;
    assert_eq!(own.status, 200);
    assert!(own.contains("\ntidegate_rules 4\n"), "{own}");
    assert!(server.metrics().await.contains("\ntidegate_rules 4\n"));
    assert_eq!(http::get(address, "/json").await.status, 404);
}
