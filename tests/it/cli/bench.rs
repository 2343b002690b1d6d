//! `tidegate bench`, against Tidegate and against a server that does not answer.

use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Stdio};
use std::sync::Arc;

use parking_lot::Mutex;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tidegate::proto::envoy::service::ratelimit::v3::rate_limit_service_server::RateLimitService;
use tidegate::proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use tonic::{Request, Response, Status};

use super::{rule_file, serving, stderr, stdout, tidegate};
use crate::support::Tidegate;
use crate::tls::{MUTUAL, Secured};
use crate::unix::Served;

const RULES: &str = "domain: d
descriptors:
  - { key: user, rate_limit: { unit: year, requests_per_unit: 10 } }
  - { key: open, on_store_failure: open, rate_limit: { unit: year, requests_per_unit: 10 } }
  - { key: failing, on_store_failure: error, rate_limit: { unit: year, requests_per_unit: 10 } }
";

/// Runs a load without warm-up. Returns the exit code, the results, and what went to standard error.
async fn bench(address: &str, more: &[&str]) -> (Option<i32>, String, String) {
    let own = ["bench", "--address", address, "--domain", "d", "--warm-up", "0"];
    let arguments: Vec<String> = own.iter().chain(more).map(|&argument| argument.to_owned()).collect();
    let output =
        tokio::task::spawn_blocking(move || tidegate(&arguments.iter().map(String::as_str).collect::<Vec<_>>()));
    let output = output.await.expect("it ends");
    (output.status.code(), stdout(&output), stderr(&output))
}

/// The number of a line of the results.
fn number(results: &str, name: &str) -> u64 {
    let line = results.lines().find(|line| line.trim_start().starts_with(&format!("{name} ")));
    let rest =
        line.and_then(|line| line.trim_start().strip_prefix(name)).unwrap_or_else(|| panic!("{name}: {results}"));
    rest.split_whitespace().next().and_then(|number| number.parse().ok()).unwrap_or_else(|| panic!("{name}: {rest}"))
}

/// The sum of a metric's series that have this label.
async fn metric(server: &Tidegate, name: &str, label: &str) -> u64 {
    let page = server.metrics().await;
    let series = page.lines().filter(|line| line.starts_with(name) && line.contains(label));
    series.filter_map(|line| line.rsplit_once(' ')?.1.parse::<u64>().ok()).sum()
}

#[tokio::test]
async fn what_a_load_reports_is_what_the_server_counted() {
    let rules = rule_file(RULES);
    let server = Tidegate::start(rules.path(), &[]).await;
    let address = server.grpc.to_string();
    let plot = tempfile::Builder::new().suffix(".svg").tempfile().expect("a file");
    let path = plot.path().to_str().expect("a path of text");
    let user = ["-d", "user=u{n}", "--keys", "7", "--duration", "1s", "--provenance"];
    let (code, results, course) = bench(&address, &[&user[..], &["--plot", path]].concat()).await;
    assert_eq!(code, Some(0), "{course}");
    let count = async |label| metric(&server, "tidegate_decisions_total", label).await;
    let (admitted, refused) = (count("outcome=\"admitted\"").await, count("outcome=\"refused\"").await);
    assert_eq!((number(&results, "OK"), admitted), (70, 70), "ten of each of seven keys: {results}");
    assert_eq!((number(&results, "OVER_LIMIT"), number(&results, "answered")), (refused, admitted + refused));
    assert_eq!(number(&results, "store"), admitted + refused, "{results}");
    assert_eq!((number(&results, "timed out"), number(&results, "failed"), number(&results, "by policy")), (0, 0, 0));
    let plot = std::fs::read_to_string(path).expect("it reads");
    assert!(plot.starts_with("<svg") && plot.contains("closed loop") && plot.contains("99 %"), "{plot}");

    // An open loop makes as many calls as it says, whatever the server does.
    let open = ["-d", "user=u{n}", "--keys", "3", "--duration", "2s", "--rate", "300", "--distribution", "zipf"];
    let (code, results, course) = bench(&address, &open).await;
    assert_eq!((code, number(&results, "answered")), (Some(0), 600), "{results}");
    assert!(course.contains("   1 s  ") && course.contains("refused 100.00 %"), "{course}");
}

#[tokio::test]
async fn a_slow_rate_is_measured_for_its_whole_time_and_a_plot_of_one_call_has_a_line() {
    let rules = rule_file(RULES);
    let server = Tidegate::start(rules.path(), &[]).await;
    let address = server.grpc.to_string();
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("one.svg");
    let path = path.to_str().expect("a path of text");
    let slow = ["--domain", "d", "-d", "user=u", "--rate", "1", "--duration", "2s", "--warm-up", "0"];
    let results = bench_json(&address, &slow).await;
    assert_eq!((results["calls"].as_u64(), results["seconds"].as_f64()), (Some(2), Some(2.0)), "{results}");
    let (code, _, errors) = bench(&address, &["-d", "user=u", "--rate", "1", "--duration", "1s", "--plot", path]).await;
    assert_eq!(code, Some(0), "{errors}");
    let plot = std::fs::read_to_string(path).expect("it reads");
    assert!(plot.contains("<polyline") && !plot.contains("points=\"\""), "{plot}");
    // A load without a server leaves no file that it has created.
    let path = folder.path().join("none.svg");
    let gone = ["-d", "user=u", "--plot", path.to_str().expect("a path of text")];
    let (code, _, _) = bench("127.0.0.1:1", &gone).await;
    assert!(code == Some(2) && !path.exists(), "{code:?}");
}

#[tokio::test]
async fn answers_of_a_policy_and_errors_are_told_from_those_of_counters() {
    let rules = rule_file(RULES);
    let server = Tidegate::start(rules.path(), &[("REDIS_URL", "127.0.0.1:1")]).await;
    let address = server.grpc.to_string();
    let (code, results, _) = bench(&address, &["-d", "open=u{n}", "--rate", "100", "--duration", "1s"]).await;
    assert_eq!((code, number(&results, "OK"), number(&results, "by policy")), (Some(0), 100, 100), "{results}");
    let (code, results, course) = bench(&address, &["-d", "failing=u", "--rate", "100", "--duration", "1s"]).await;
    assert_eq!((code, number(&results, "failed"), number(&results, "Unavailable")), (Some(2), 100, 100), "{results}");
    assert!(results.contains("admitted by a gateway that fails open"), "{results}{course}");
    assert!(results.contains(", 1 key (uniform)"), "without {{n}} all requests are equal: {results}");
}

const CHECKED: &str = "domain: d
requests: { from_gateway: none, trusted_proxies: [PEER] }
descriptors: [{ key: user, rate_limit: { unit: year, requests_per_unit: 10 } }]
";

#[tokio::test]
async fn a_load_over_http_asks_the_check_and_tells_refusals_from_errors() {
    let rules = rule_file(&CHECKED.replace("PEER", "127.0.0.1"));
    let server = Tidegate::start(rules.path(), &[]).await;
    let address = server.http.to_string();
    let each = ["--http", "-d", "user=u{n}", "--keys", "7", "--distribution", "in-turn"];
    let load = [&each[..], &["--rate", "200", "--duration", "1s"]].concat();
    let (code, results, course) = bench(&address, &load).await;
    assert_eq!(code, Some(0), "{course}");
    assert_eq!((number(&results, "OK"), number(&results, "OVER_LIMIT")), (70, 130), "{results}");
    assert!(results.starts_with("open loop, 200 calls a second over HTTP/1.1"), "{results}");
    assert_eq!(metric(&server, "tidegate_requests_total", "interface=\"check\"").await, 200);
    let closed = ["--http", "-d", "user=new{n}", "--hits", "0", "--duration", "300ms"];
    let (code, results, _) = bench(&address, &closed).await;
    assert_eq!((code, number(&results, "OVER_LIMIT"), number(&results, "failed")), (Some(0), 0, 0), "{results}");
    assert!(results.starts_with("closed loop, 32 calls in flight over HTTP/1.1, each on its connection"), "{results}");

    let rules = rule_file(&CHECKED.replace("PEER", "192.0.2.1"));
    let strict = Tidegate::start(rules.path(), &[]).await;
    let (code, results, _) = bench(&strict.http.to_string(), &load).await;
    assert_eq!((code, number(&results, "PermissionDenied")), (Some(2), 200), "{results}");
    let (code, _, errors) = bench("127.0.0.1:1", &load).await;
    assert!(code == Some(2) && errors.contains("127.0.0.1:1"), "{errors}");
    let without = tokio::task::spawn_blocking(|| tidegate(&["bench", "--http", "--domain", "d", "-d", "user=u"]));
    let without = stderr(&without.await.expect("it ends"));
    assert!(without.contains("--address"), "the port of gRPC would be asked: {without}");
}

/// Runs a load that succeeds. Returns its results as JSON.
async fn bench_json(address: &str, more: &[&str]) -> Value {
    let own = ["bench", "--address", address, "--json"];
    let arguments: Vec<String> = own.iter().chain(more).map(|&argument| argument.to_owned()).collect();
    let output =
        tokio::task::spawn_blocking(move || tidegate(&arguments.iter().map(String::as_str).collect::<Vec<_>>()));
    let output = output.await.expect("it ends");
    assert_eq!((output.status.code(), stderr(&output)), (Some(0), String::new()), "{more:?}");
    serde_json::from_str(&stdout(&output)).expect("JSON")
}

#[tokio::test]
async fn the_json_has_the_numbers_of_the_server_and_the_usage_of_its_process() {
    let rules = rule_file(RULES);
    let server = Tidegate::start(rules.path(), &[]).await;
    let process = format!("server={}", server.pid());
    let load =
        ["--domain", "d", "-d", "user=u{n}", "--keys", "7", "--warm-up", "0", "--duration", "1s", "--provenance"];
    let results = bench_json(&server.grpc.to_string(), &[&load[..], &["--process", &process]].concat()).await;
    let count = async |label| metric(&server, "tidegate_decisions_total", label).await;
    let (admitted, refused) = (count("outcome=\"admitted\"").await, count("outcome=\"refused\"").await);
    let all = admitted + refused;
    let outcomes = serde_json::json!({ "OK": admitted, "OVER_LIMIT": refused, "UNKNOWN": 0 });
    assert_eq!((admitted, &results["outcomes"]), (70, &outcomes), "{results}");
    assert_eq!((&results["calls"], &results["answered"]), (&all.into(), &all.into()), "{results}");
    assert_eq!(results["errors"], serde_json::json!({ "timed_out": 0, "disconnected": 0 }), "{results}");
    assert_eq!(results["provenances"], serde_json::json!({ "store": all }), "{results}");
    let number =
        |pointer: &str| results.pointer(pointer).and_then(Value::as_f64).unwrap_or_else(|| panic!("{results}"));
    assert!(number("/latency_us/p50") > 1.0 && number("/latency_us/p50") <= number("/latency_us/max"), "{results}");
    let maxima = ["OK", "OVER_LIMIT"].map(|outcome| number(&format!("/latency_us_by_outcome/{outcome}/max")));
    assert!(maxima.contains(&number("/latency_us/max")), "{results}");
    assert_eq!(results["latency_us_by_outcome"]["UNKNOWN"], Value::Null, "{results}");
    let decisions = f64::from(u32::try_from(all).expect("some thousands"));
    assert!((number("/answers_per_second") * number("/seconds") - decisions).abs() < 1.0, "{results}");

    assert_eq!(results["processes"][0]["name"], "server", "{results}");
    assert_eq!(results["processes"][0]["pid"], server.pid(), "{results}");
    let (cpu_us, each) = (number("/processes/0/cpu_us"), number("/processes/0/cpu_us_per_answer"));
    assert!(cpu_us > 0.0 && (each * decisions - cpu_us).abs() < 1.0, "{results}");
    assert!(number("/processes/0/resident_bytes") > 1e6, "{results}");
}

#[tokio::test]
async fn exactly_so_many_calls_are_made_and_in_turn_each_key_is_sent_as_often() {
    let rules = rule_file(RULES);
    let server = Tidegate::start(rules.path(), &[]).await;
    let address = server.grpc.to_string();
    let user = ["--domain", "d", "-d", "user=u{n}", "--keys", "7", "--distribution", "in-turn"];
    // The limit of each key is 10, so one that was sent more often would be refused.
    let results = bench_json(&address, &[&user[..], &["--calls", "70", "--connections", "3"]].concat()).await;
    assert_eq!((&results["calls"], &results["outcomes"]["OK"]), (&70.into(), &70.into()), "{results}");
    let paced = ["--calls", "31", "--rate", "200", "--connections", "3"];
    let results = bench_json(&address, &[&user[..], &paced[..]].concat()).await;
    assert_eq!((&results["calls"], &results["outcomes"]["OVER_LIMIT"]), (&31.into(), &31.into()), "{results}");
    assert_eq!(metric(&server, "tidegate_decisions_total", "").await, 101);
}

#[tokio::test]
async fn what_cannot_be_measured_says_what_to_write() {
    let address = serving(Silent).await.to_string();
    for (given, said) in [
        (
            &["-d", "a=b", "--process", "server=4194305"][..],
            "--process server=4194305: /proc/4194305/stat cannot be read",
        ),
        (&["-d", "a=b", "--process", "4242"], "write NAME=PID, such as server=4242"),
        (&["-d", "a={n%0}"], "--descriptor: '{n%0}': write {n}, or {n%M} with a number M above 0"),
        (&["-d", "a=b", "--calls", "0"], "--calls"),
        (&["-d", "a=b", "--calls", "5", "--duration", "1s"], "cannot be used with"),
    ] {
        let arguments = [&["bench", "--address", &address, "--domain", "d"], given].concat();
        let output = tidegate(&arguments);
        assert!(output.status.code() == Some(2) && stderr(&output).contains(said), "{given:?}: {}", stderr(&output));
        assert_eq!(stdout(&output), "", "{given:?}");
    }
}

#[test]
fn help_shows_the_place_for_the_number_of_a_key() {
    for (arguments, shown) in [
        (&["--help"][..], "tidegate bench --domain edge --descriptor user=u{n}\n"),
        (&["bench", "--help"], "--descriptor user=u{n} --rate 5000"),
        (&["bench", "--help"], "outermost first. {n} stands for the number"),
    ] {
        let help = stdout(&tidegate(arguments));
        assert!(help.contains(shown), "{shown}: {help}");
    }
}

/// Notes the deadline that each caller sends.
struct Deadlines(Arc<Mutex<Vec<Option<String>>>>);

#[tonic::async_trait]
impl RateLimitService for Deadlines {
    async fn should_rate_limit(&self, call: Request<RateLimitRequest>) -> Result<Response<RateLimitResponse>, Status> {
        let deadline = call.metadata().get("grpc-timeout").and_then(|value| value.to_str().ok());
        self.0.lock().push(deadline.map(str::to_owned));
        Ok(Response::new(RateLimitResponse::default()))
    }
}

#[tokio::test]
async fn the_deadline_is_sent_unless_it_is_not_wanted() {
    let deadlines = Arc::new(Mutex::new(Vec::new()));
    let address = serving(Deadlines(Arc::clone(&deadlines))).await.to_string();
    let one = ["--domain", "d", "-d", "a=b", "--calls", "1", "--timeout", "30s"];
    bench_json(&address, &one).await;
    let results = bench_json(&address, &[&one[..], &["--no-deadline"]].concat()).await;
    assert_eq!(*deadlines.lock(), [Some("30000000u".to_owned()), None]);
    assert_eq!(results["outcomes"]["UNKNOWN"], 1, "an answer without a code: {results}");
}

#[tokio::test]
async fn a_load_over_tls_trusts_an_authority_and_shows_a_certificate() {
    let server = Secured::start_with(RULES, &[MUTUAL]).await;
    let client = server.authority.issue("client");
    let (ca, address) = (server.file("ca.crt"), server.tidegate.grpc.to_string());
    let [ca, certificate, key] = [&ca, &client.certificate, &client.key].map(|path| path.display().to_string());
    let load = ["-d", "user=u{n}", "--calls", "100", "--ca", &ca, "--domain", "d"];
    let results = bench_json(&address, &[&load[..], &["--cert", &certificate, "--key", &key]].concat()).await;
    assert_eq!(results["outcomes"]["OK"], 100, "{results}");
    for (given, advice) in [
        (&[][..], "if it speaks TLS, set --tls or --ca"),
        (&["--tls"], "set --ca to the CA that issued the certificate of the server"),
    ] {
        let arguments =
            [&["bench", "--address", &address, "--domain", "d", "-d", "a=b", "--calls", "1"], given].concat();
        let output = tidegate(&arguments);
        assert!(output.status.code() == Some(2) && stderr(&output).contains(advice), "{given:?}: {}", stderr(&output));
    }
}

#[tokio::test]
async fn a_load_over_a_unix_socket_names_its_path() {
    let server = Served::start(&[]).await;
    let address = format!("unix:{}", server.socket().display());
    let load = ["--domain", "edge", "-d", "user=u{n}", "--calls", "100", "--connections", "3"];
    let results = bench_json(&address, &load).await;
    assert_eq!((&results["calls"], &results["outcomes"]["OK"]), (&100.into(), &100.into()), "{results}");
    let output = tidegate(&["bench", "--address", "unix:/missing.sock", "--domain", "d", "-d", "a=b"]);
    assert!(stderr(&output).contains("no server serves this socket"), "{}", stderr(&output));
}

/// Takes calls and answers none.
struct Silent;

#[tonic::async_trait]
impl RateLimitService for Silent {
    async fn should_rate_limit(&self, _: Request<RateLimitRequest>) -> Result<Response<RateLimitResponse>, Status> {
        std::future::pending().await
    }
}

#[tokio::test]
async fn calls_without_an_answer_have_timed_out_and_a_load_without_a_server_says_so() {
    let address = serving(Silent).await.to_string();
    let few = ["-d", "a=b", "--rate", "50", "--duration", "1s", "--timeout", "100ms"];
    let (code, results, _) = bench(&address, &few).await;
    assert_eq!((code, number(&results, "timed out"), number(&results, "failed")), (Some(2), 50, 0), "{results}");
    assert!(results.contains("latency of answers  p50 -"), "{results}");

    let (code, results, errors) = bench("127.0.0.1:1", &["-d", "a=b"]).await;
    assert_eq!((code, results.as_str()), (Some(2), ""));
    assert!(errors.contains("no ShouldRateLimit server answers at 127.0.0.1:1"), "{errors}");
    let (code, _, errors) = bench(&address, &["-d", "a=b", "--plot", "/missing/plot.svg"]).await;
    assert!(code == Some(2) && errors.contains("/missing/plot.svg cannot be written"), "{errors}");
    let (_, _, errors) = bench(&address, &["-d", "a=b", "--rate", "5", "--in-flight", "5"]).await;
    assert!(errors.contains("--in-flight") && errors.contains("cannot be used"), "{errors}");
}

#[tokio::test]
async fn ctrl_c_ends_a_load_at_once_with_the_results_so_far() {
    let address = serving(Silent).await.to_string();
    for (warm_up, code, said) in
        [("0", Some(2), "timed out                0"), ("1m", Some(2), "stopped during its warm-up")]
    {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
        command.args(["bench", "--address", &address, "--domain", "d", "-d", "a=b", "--timeout", "1m"]);
        command.args(["--duration", "1m", "--warm-up", warm_up]).env_clear();
        let ended = tokio::task::spawn_blocking(move || {
            let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
            let mut errors = BufReader::new(child.stderr.take().expect("it is piped"));
            let mut first = String::new();
            errors.read_line(&mut first).expect("it reads");
            kill_process(Pid::from_child(&child), Signal::INT).expect("it runs");
            let output = child.wait_with_output().expect("it ends");
            errors.read_to_string(&mut first).expect("it reads");
            (output.status.code(), stdout(&output) + &first)
        });
        let ended = ended.await.expect("it ends");
        assert!(ended.0 == code && ended.1.contains(said), "{ended:?}");
        assert!(ended.1.contains("   1 s  ") && !ended.1.contains("   9 s  "), "{ended:?}");
    }
}
