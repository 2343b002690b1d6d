//! The commands, as a user types them.

use std::net::SocketAddr;
use std::path::Path;
use std::process::{Command, Output};

use tidegate::proto::envoy::service::ratelimit::v3::rate_limit_service_server::{
    RateLimitService, RateLimitServiceServer,
};
use tokio::net::TcpListener;
use tonic::transport::server::TcpIncoming;

use crate::support::{Process, Tidegate, on_free_ports, repository, rule_file};

mod bench;
mod call;
mod counter;
mod explain;
mod readers;
mod replay;
mod start;
mod tap;
mod test;
mod top;
mod why;

fn tidegate(arguments: &[&str]) -> Output {
    tidegate_with(arguments, &[])
}

fn tidegate_with(arguments: &[&str], environment: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    command.args(arguments).env_clear().envs(environment.iter().copied());
    command.output().expect("the command runs")
}

/// Makes calls with these descriptors.
fn call_with(server: &Tidegate, domain: &str, times: &str, descriptors: &[&str]) {
    let address = server.grpc.to_string();
    let named: Vec<&str> = descriptors.iter().flat_map(|descriptor| ["-d", descriptor]).collect();
    tidegate(&[&["call", "--address", &address, "--domain", domain, "--times", times], &named[..]].concat());
}

/// Runs a command over these instances. Returns its exit code, its output and its errors.
fn over(instances: &[SocketAddr], arguments: &[&str]) -> (Option<i32>, String, String) {
    let instances: Vec<String> = instances.iter().map(ToString::to_string).collect();
    let named: Vec<&str> = instances.iter().flat_map(|instance| ["--instance", instance]).collect();
    let output = tidegate(&[arguments, &named[..]].concat());
    (output.status.code(), stdout(&output), stderr(&output))
}

/// Serves calls as this service answers them. Returns its address.
async fn serving(service: impl RateLimitService) -> SocketAddr {
    let socket = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = socket.local_addr().expect("an address");
    let server = tonic::transport::Server::builder().add_service(RateLimitServiceServer::new(service));
    tokio::spawn(server.serve_with_incoming(TcpIncoming::from(socket)));
    address
}

fn path(file: &tempfile::NamedTempFile) -> &str {
    file.path().to_str().expect("a path of text")
}

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

const RULES: &str = "domain: edge
descriptors:
  - key: plan
    value: free
    descriptors:
      - key: user
        rate_limits:
          - { unit: second, requests_per_unit: 10, algorithm: gcra, burst: 20 }
          - { unit: day, requests_per_unit: 1000 }
  - key: plan
    value: f*
    rate_limit: { unit: minute, requests_per_unit: 7 }
  - key: plan
    rate_limit: { unit: minute, requests_per_unit: 9 }
";

#[test]
fn check_counts_what_it_read() {
    let file = rule_file(RULES);
    let output = tidegate(&["check", path(&file)]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(stdout(&output), "ok: 3 rules in 1 domain from 1 file\n");
}

#[test]
fn check_names_every_error_with_its_place_and_the_nearest_word() {
    let file = rule_file(
        "domain: d
descriptors:
  - key: a
    rate_limt: { unit: minute, requests_per_unit: 1 }
  - key: b
    rate_limit: { unit: fortnight, requests_per_unit: 1 }
  - key: c
    rate_limit: { unit: minute, requests_per_unit: 1, burst: 3 }
  - key: d
    rate_limit: { unit: minute, requests_per_unit: lots }
  - key: e
    rate_limit: { window: 400d, requests_per_unit: 1 }
  - key: f
    rate_limit: { window: 2000001us, requests_per_unit: 1, algorithm: gcra }
",
    );
    let output = tidegate(&["check", path(&file)]);
    assert_eq!(output.status.code(), Some(1));
    let text = stderr(&output);
    for expected in [":4:5: error:", "rate_limit", ":10:", "lots"] {
        assert!(text.contains(expected), "{expected:?} is missing in\n{text}");
    }
    for beyond_its_shape in ["invalid rate limit unit `fortnight`", "fixed_window has no burst", "from 1ms to 365d"] {
        assert!(text.contains(beyond_its_shape), "{beyond_its_shape:?} is missing in\n{text}");
    }
    assert!(text.contains("6 errors"), "{text}");
    let shaped = std::fs::read_to_string(file.path()).expect("it reads");
    let shaped = shaped.replace("rate_limt", "rate_limit").replace("lots", "5");
    let file = rule_file(&shaped);
    let output = tidegate(&["check", path(&file)]);
    assert_eq!(output.status.code(), Some(1));
    let text = stderr(&output);
    for expected in [
        ":6:25: error: invalid rate limit unit `fortnight`",
        ":8:62: error: fixed_window has no burst",
        "(token_bucket, leaky_bucket, gcra)",
        ":12:",
        "from 1ms to 365d",
        ":14:",
        "write one of the nearest, 2s or 2000010us",
        "4 errors",
    ] {
        assert!(text.contains(expected), "{expected:?} is missing in\n{text}");
    }
}

/// What `check` says of one limit that it refuses, at the place of the limit.
fn refused(limit: &str) -> String {
    let file = rule_file(&format!("domain: d\ndescriptors:\n  - key: a\n    rate_limit: {{ {limit} }}\n"));
    let output = tidegate(&["check", path(&file)]);
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{limit}: {text}");
    assert!(text.contains(":4:") && text.contains("1 error"), "{limit}: {text}");
    text
}

#[test]
fn check_refuses_a_log_of_more_than_ten_thousand_hits_and_names_what_takes_them() {
    let text = refused("unit: day, requests_per_unit: 10001, algorithm: sliding_log");
    let expected = "a limit of 10001 is too large for an algorithm that stores every hit: write at most 10000, or choose `sliding_window`, which accepts any limit";
    assert!(text.contains(expected), "{text}");
    let rules = |limit| format!("domain: d\ndescriptors: [{{ key: a, rate_limit: {{ unit: day, {limit} }} }}]\n");
    for accepted in
        ["requests_per_unit: 10000, algorithm: sliding_log", "requests_per_unit: 10001, algorithm: sliding_window"]
    {
        let output = tidegate(&["check", path(&rule_file(&rules(accepted)))]);
        assert!(output.status.success(), "{}", stderr(&output));
    }
}

#[test]
fn check_names_the_nearest_windows_of_one_that_is_no_whole_number_of_ticks() {
    for algorithm in ["sliding_window", "token_bucket", "leaky_bucket", "gcra"] {
        for (window, tick, below, above) in
            [("2000001us", "10us", "2s", "2000010us"), ("36000000001us", "100ms", "10h", "36000100ms")]
        {
            let text = refused(&format!("window: {window}, requests_per_unit: 5, algorithm: {algorithm}"));
            let expected = format!(
                "a window of {window} cannot be counted exactly in ticks of {tick}: write one of the nearest, {below} or {above}"
            );
            assert!(text.contains(&expected), "{text}");
        }
    }
    let rules = |algorithm| {
        format!(
            "domain: d\ndescriptors: [{{ key: a, rate_limit: {{ window: 2000001us, requests_per_unit: 5, algorithm: {algorithm} }} }}]\n"
        )
    };
    for any in ["fixed_window", "sliding_log"] {
        let output = tidegate(&["check", path(&rule_file(&rules(any)))]);
        assert!(output.status.success(), "{}", stderr(&output));
    }
}

#[test]
fn check_refuses_a_burst_where_there_is_none_and_one_that_is_too_small() {
    for algorithm in ["fixed_window", "sliding_window", "sliding_log"] {
        let text = refused(&format!("unit: minute, requests_per_unit: 5, algorithm: {algorithm}, burst: 9"));
        let expected = format!(
            "{algorithm} has no burst: remove `burst`, or choose an algorithm that has one (token_bucket, leaky_bucket, gcra)"
        );
        assert!(text.contains(&expected), "{text}");
    }
    for algorithm in ["token_bucket", "leaky_bucket", "gcra"] {
        let text =
            refused(&format!("unit: second, requests_per_unit: 4000000000, algorithm: {algorithm}, burst: 3999"));
        let expected = "a burst of 3999 is too small for 4000000000 hits per window, because it must hold one hit and all hits that drain in one tick: write at least 4000";
        assert!(text.contains(expected), "{text}");
    }
}

#[test]
fn a_rule_that_is_unlimited_and_limited_is_refused_and_a_number_beside_it_is_warned_of() {
    for (limit, column) in [("window: 3s", 44), ("algorithm: gcra", 47), ("burst: 4", 43)] {
        let text = refused(&format!("unlimited: true, {limit}"));
        let key = limit.split(':').next().expect("a key");
        assert!(text.contains(&format!(":4:{column}: error: `{key}` is not allowed beside `unlimited`")), "{text}");
    }
    let output = tidegate(&[
        "check",
        path(&rule_file(
            "domain: d\ndescriptors:\n  - key: a\n    rate_limit: { unlimited: true, requests_per_unit: 3 }\n",
        )),
    ]);
    let text = stderr(&output);
    assert!(output.status.success(), "the reference accepts it: {text}");
    assert!(text.contains(":4:17: warning: `requests_per_unit: 3` is not enforced"), "{text}");
}

#[test]
fn what_cannot_be_counted_is_pointed_at_and_the_algorithm_named() {
    let window = refused("requests_per_unit: 5, algorithm: gcra, window: 2000001us");
    assert!(window.contains(":4:66: error: gcra: a window of 2000001us"), "{window}");
    let burst = refused("unit: second, requests_per_unit: 4000000000, algorithm: gcra, burst: 3999");
    assert!(burst.contains(":4:88: error: gcra: a burst of 3999"), "{burst}");
}

#[test]
fn check_warns_of_what_is_accepted_and_does_nothing() {
    let file = rule_file(
        "domain: d
descriptors:
  - key: a
    rate_limit: { unit: minute, requests_per_unit: 1, shadow_mode: true }
---
domain: e
",
    );
    let output = tidegate(&["check", path(&file)]);
    assert!(output.status.success());
    let text = stderr(&output);
    assert!(text.contains(":4:") && text.contains("warning") && text.contains("shadow_mode"), "{text}");
    assert!(text.contains("second") || text.contains("document"), "{text}");
}

#[test]
fn check_and_explain_work_where_the_service_would_not_start() {
    let file = rule_file(RULES);
    let environment = [("REDIS_URL", "redis:6379"), ("GRPC_SERVER_USE_TLS", "true"), ("PORT", "x")];
    assert!(tidegate_with(&["check", path(&file)], &environment).status.success());
    assert!(
        tidegate_with(&["explain", "--domain", "edge", "-d", "plan=x", path(&file)], &environment).status.success()
    );
    let wrong = tidegate_with(&["check", path(&file)], &[("QUOTA_MODE", "maybe")]);
    assert!(stderr(&wrong).contains("QUOTA_MODE is \"maybe\""), "{}", stderr(&wrong));
}

#[test]
fn metadata_is_not_so_deep_that_receivers_refuse_it() {
    let nested = |depth: usize| format!("{}1{}", "{a: ".repeat(depth), "}".repeat(depth));
    let rules = |depth| format!("domain: d\ndescriptors:\n  - key: a\n    metadata: {}\n", nested(depth));
    assert!(tidegate(&["check", path(&rule_file(&rules(16)))]).status.success());
    let output = tidegate(&["check", path(&rule_file(&rules(17)))]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("16 levels"), "{}", stderr(&output));
}

#[test]
fn check_says_what_cannot_be_read() {
    let output = tidegate(&["check", "/nowhere/rules.yaml"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("/nowhere/rules.yaml"));
    let empty = tempfile::tempdir().expect("a directory");
    let output = tidegate(&["check", empty.path().to_str().expect("text")]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("no *.yaml"));
}

#[test]
fn output_that_cannot_be_written_is_an_error() {
    let file = rule_file(RULES);
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    command.args(["explain", "--domain", "edge", "--descriptor", "plan=free,user=alice", path(&file)]).env_clear();
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").expect("Linux has it");
    let output = command.stdout(full).output().expect("the command runs");
    assert!(!output.status.success());
    assert!(stderr(&output).contains("standard output cannot be written"), "{}", stderr(&output));
}

#[test]
fn explain_says_which_rule_which_counter_and_why_not_the_others() {
    let file = rule_file(RULES);
    let explain = |descriptor: &str| {
        let output = tidegate(&["explain", "--domain", "edge", "--descriptor", descriptor, path(&file)]);
        assert!(output.status.success(), "{}", stderr(&output));
        let is_unmatched = stdout(&output).contains("=> not limited");
        assert_eq!(stderr(&output).contains("tidegate top --unmatched"), is_unmatched, "{}", stderr(&output));
        stdout(&output)
    };
    let text = explain("plan=free,user=alice");
    for expected in [
        "✓ plan=free  exact value",
        "✗ plan=f*  would match, but the exact value comes first",
        "✗ plan  would match, but the exact value comes first",
        "=> rule edge.plan_free.user",
        "10 per second, gcra, burst 20",
        "{edge|plan=free|user=alice}gcra:1s",
        "{edge|plan=free|user=alice}fixed_window:1d",
    ] {
        assert!(text.contains(expected), "{expected:?} is missing in\n{text}");
    }
    let text = explain("plan=fair");
    assert!(text.contains("✓ plan=f*  the first wildcard that matches"), "{text}");
    assert!(text.contains("✗ plan=free  another value"), "{text}");
    assert!(explain("plan=free").contains("=> not limited"), "a request that stops above the rules");
    assert!(explain("plan=gold,user=alice").contains("the rules end one level above"));
    let output = tidegate(&["explain", "--domain", "nowhere", "-d", "a=b", path(&file)]);
    assert!(stdout(&output).contains("no rule file has this domain; known domains: edge"));
    assert!(stderr(&output).contains("tidegate top --unmatched"), "{}", stderr(&output));
    let file = rule_file(&RULES.replace("domain: edge", "domain: edge\ncolocate: domain"));
    let output = tidegate(&["explain", "--domain", "edge", "-d", "plan=free,user=alice", path(&file)]);
    assert!(stdout(&output).contains("counter  {edge}|plan=free|user=alice}gcra:1s"), "{}", stdout(&output));
}

#[test]
fn a_wrong_setting_stops_the_start_with_its_name() {
    let file = rule_file(RULES);
    let output = tidegate_with(&["serve", path(&file)], &[("GRPC_PORT", "http"), ("QUOTA_MODE", "maybe")]);
    assert_eq!(output.status.code(), Some(2));
    let text = stderr(&output);
    assert!(text.contains("GRPC_PORT is \"http\": expected a port"), "{text}");
    assert!(text.contains("QUOTA_MODE is \"maybe\": expected true or false"), "{text}");
}

#[test]
fn a_flag_wins_over_its_variable() {
    let file = rule_file(RULES);
    let output = tidegate_with(&["serve", "--grpc-port", "x", path(&file)], &[("GRPC_PORT", "y")]);
    assert!(stderr(&output).contains("GRPC_PORT is \"x\""), "{}", stderr(&output));
}

#[test]
fn broken_rules_stop_the_start_with_all_their_errors() {
    let file = rule_file("domain: d\ndescriptors:\n  - value: x\n  - key: a\n    rate_limit: { unit: eon }\n");
    let output = tidegate(&["serve", path(&file)]);
    assert_eq!(output.status.code(), Some(2));
    let text = stderr(&output);
    assert!(text.contains(":3:") && text.contains("has no key"), "{text}");
    assert!(text.contains(":5:") && text.contains("eon"), "{text}");
}

#[test]
fn a_start_without_rules_says_where_they_were_looked_for() {
    let output = tidegate_with(&["serve"], &[("RUNTIME_ROOT", "/nowhere")]);
    assert_eq!(output.status.code(), Some(2));
    let text = stderr(&output);
    assert!(text.contains("/nowhere") && text.contains("tidegate serve rules.yaml"), "{text}");
}

#[test]
fn called_as_ratelimit_with_no_argument_it_serves_as_gateways_expect() {
    let directory = tempfile::tempdir().expect("a directory");
    let called_as = |name: &str, arguments: &[&str]| {
        let program = directory.path().join(name);
        if !program.exists() {
            std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_tidegate"), &program).expect("a link");
        }
        let mut command = Command::new(program);
        command.args(arguments).env_clear().env("RUNTIME_ROOT", "/nowhere").output().expect("it runs")
    };
    let served = called_as("ratelimit", &[]);
    assert_eq!(served.status.code(), Some(2));
    assert!(stderr(&served).starts_with("tidegate serve: ") && stderr(&served).contains("/nowhere"), "it serves");
    let helped = called_as("another-name", &[]);
    assert!(stderr(&helped).contains("Usage:"), "any other name is told how it is used: {}", stderr(&helped));
    let asked = called_as("ratelimit", &["call", "--address", "127.0.0.1:1", "--domain", "d", "-d", "a=b"]);
    assert!(stderr(&asked).starts_with("tidegate call: "), "with arguments it is any command: {}", stderr(&asked));
}

/// A line that `serve` prints at its start, without what differs from machine to machine.
fn without_addresses(line: &str) -> String {
    let word = |word: &str| match word {
        _ if word.parse::<SocketAddr>().is_ok() => "ADDRESS".to_owned(),
        _ if word.starts_with("http://") => "URL".to_owned(),
        _ if word.contains("descriptors") => "BODY".to_owned(),
        _ if word.ends_with("/tidegate") => "PROGRAM".to_owned(),
        _ => word.to_owned(),
    };
    line.split_whitespace().map(word).collect::<Vec<_>>().join(" ")
}

/// Starts a server with the rules in this file.
fn started(rules: &Path) -> Process {
    let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_tidegate"));
    command.arg("serve").arg(rules).env_clear();
    Process::start(on_free_ports(&mut command))
}

#[tokio::test]
async fn the_readme_shows_what_a_start_prints() {
    let readme = std::fs::read_to_string(repository("README.md")).expect("it is there");
    let (_, shown) = readme.split_once("```text\n").expect("what a start prints");
    let (shown, _) = shown.split_once("```").expect("its end");
    let mut server = started(&repository("examples/rules.yaml"));
    for line in shown.lines() {
        let printed = server.line().await.expect("it prints as many lines");
        assert_eq!(without_addresses(line), without_addresses(&printed), "{printed}");
    }
}

/// Starts a server with these rules. Returns the limit that it suggests to try, and the first command for it.
async fn suggested(rules: &str) -> (Process, String, String) {
    let file = rule_file(rules);
    let mut server = started(file.path());
    let mut next = async || server.line().await.expect("it prints more");
    let suggestion = loop {
        let line = next().await;
        if line.starts_with("try ") {
            break line;
        }
    };
    let command = next().await;
    (server, suggestion, command)
}

#[tokio::test]
async fn a_start_suggests_a_limit_that_refuses_and_admits_again_within_seconds() {
    let minute = "  - key: minute\n    rate_limit: { unit: minute, requests_per_unit: 2 }\n";
    let quarter = "  - key: quarter\n    rate_limit: { unit: minute, unit_multiplier: 15, requests_per_unit: 1 }\n";
    let spaced = "  - key: spaced\n    rate_limit: { unit: minute, requests_per_unit: 5, algorithm: gcra }\n";
    // It is filled as fast as a loop of calls empties it.
    let filled = "  - key: filled\n    rate_limit: { unit: minute, requests_per_unit: 1000, burst: 50, algorithm: token_bucket }\n";
    let rules = |parts: &[&str]| format!("domain: edge\ndescriptors:\n{}", parts.concat());
    for (parts, key, said) in [
        (
            &[quarter, filled][..],
            "quarter",
            "the last of 2 calls is refused, and at most 15m later a call is admitted again",
        ),
        (&[quarter, minute], "minute", "the last of 3 calls is refused, and at most 1m later a call is admitted again"),
        (
            &[quarter, minute, filled, spaced],
            "spaced",
            "the last of 6 calls is refused, and at most 12s later a call is admitted again",
        ),
    ] {
        let (_server, suggestion, command) = suggested(&rules(parts)).await;
        assert!(suggestion.contains(said), "{suggestion}");
        assert!(command.contains(&format!("--descriptor {key}=demo")), "{command}");
        let output = Command::new("sh").args(["-c", &command]).output().expect("a shell");
        assert_eq!(stdout(&output).matches("OVER_LIMIT\n").count(), 1, "{command}: {}", stdout(&output));
        assert_eq!(output.status.code(), Some(1), "{command}");
    }
}

#[test]
fn help_teaches_every_setting() {
    let text = stdout(&tidegate(&["serve", "--help"]));
    for row in tidegate::settings::Settings::table() {
        let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(words.contains(&format!("[env: {}]", row.variable)), "{} is missing in\n{text}", row.variable);
    }
}

#[test]
fn the_short_help_of_serve_fits_a_screen() {
    let text = stdout(&tidegate(&["serve", "-h"]));
    assert!(text.lines().count() <= 40, "{text}");
    for said in ["--grpc-port", "--log-level", "REDIS_URL=127.0.0.1:6379 tidegate serve rules.yaml", "serve --help"] {
        assert!(text.contains(said), "{said}: {text}");
    }
}

#[test]
fn a_secret_has_no_flag_because_everyone_can_read_a_command_line() {
    let file = rule_file(RULES);
    for flag in ["--redis-auth", "--redis-sentinel-auth", "--redis-persecond-auth", "--redis-persecond-sentinel-auth"] {
        let output = tidegate_with(&["serve", flag, "hunter2", path(&file)], &[("PORT", "none, so it never starts")]);
        assert_eq!(output.status.code(), Some(2), "{flag}");
        assert!(stderr(&output).contains("unexpected argument"), "{}", stderr(&output));
    }
    let help = stdout(&tidegate(&["serve", "--help"]));
    let (flags, secrets) = help.split_once("Secrets (environment variables only").expect("a part of its own");
    assert!(secrets.contains("[env: REDIS_AUTH]") && !flags.contains("[env: REDIS_AUTH]"), "{help}");
    assert!(flags.contains("--redis-auth-file"), "{help}");
}
