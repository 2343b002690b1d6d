//! `tidegate bench`, against Tidegate and against a server that does not answer.

use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use tidegate::proto::envoy::service::ratelimit::v3::rate_limit_service_server::RateLimitService;
use tidegate::proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use tonic::{Request, Response, Status};

use super::{rule_file, serving, stderr, stdout, tidegate};
use crate::support::Tidegate;

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
async fn answers_of_a_policy_and_errors_are_told_from_those_of_counters() {
    let rules = rule_file(RULES);
    let server = Tidegate::start(rules.path(), &[("REDIS_URL", "127.0.0.1:1")]).await;
    let address = server.grpc.to_string();
    let (code, results, _) = bench(&address, &["-d", "open=u{n}", "--rate", "100", "--duration", "1s"]).await;
    assert_eq!((code, number(&results, "OK"), number(&results, "by policy")), (Some(0), 100, 100), "{results}");
    let (code, results, course) = bench(&address, &["-d", "failing=u", "--rate", "100", "--duration", "1s"]).await;
    assert_eq!((code, number(&results, "failed"), number(&results, "Unavailable")), (Some(2), 100, 100), "{results}");
    assert!(results.contains("admitted by an Envoy with failure_mode_deny: false"), "{results}{course}");
    assert!(results.contains(", 1 keys"), "without {{n}} all requests are equal: {results}");
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
