//! What is logged, for people and for programs, and what becomes of it where nobody reads.

use std::io::{ErrorKind, Write};
use std::time::Instant;

use rustix::fs::{OFlags, fcntl_setfl};
use rustix::process::Signal;
use serde_json::Value;
use tidegate::telemetry::escape::is_hidden;

use crate::grpc;
use crate::http::{self, Request, said};
use crate::support::{Tidegate, eventually, rule_file};

const RULES: &str = "domain: edge
descriptors: [{ key: user, rate_limit: { unit: week, requests_per_unit: 1 } }]
";
/// The value that is refused.
const VALUE: &str = "Somebody-7f3a9";

struct Client(grpc::Client);

impl Client {
    async fn of(tidegate: &Tidegate) -> Self {
        Self(grpc::client(tidegate.grpc).await)
    }

    /// Whether a call is refused.
    async fn is_refused(&mut self) -> bool {
        self.0.should_rate_limit(grpc::one("edge", "user", VALUE)).await.expect("an answer").into_inner().overall_code
            == 2
    }
}

fn put(tidegate: &Tidegate, host: &str, word: &str) -> Request {
    http::request(tidegate.debug, "PUT", "/log_level").header("host", host).body(word)
}

async fn level(tidegate: &Tidegate) -> String {
    http::get(tidegate.debug, "/log_level").await.body
}

/// Makes a line at the level `debug`.
async fn babble(tidegate: &Tidegate) {
    said(tidegate.grpc, "this is no HTTP/2 at all\r\n\r\n").await;
}

/// The objects that were logged, one a line.
fn objects(log: &str) -> Vec<Value> {
    log.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line:?}"))).collect()
}

#[tokio::test]
async fn a_thousand_refusals_are_a_line_a_second_and_none_of_them_is_lost() {
    let rules = rule_file(RULES);
    let settings = [("LOG_LEVEL", "info"), ("LOG_FORMAT", "json")];
    let tidegate = Tidegate::start(rules.path(), &settings).await;
    let mut client = Client::of(&tidegate).await;
    assert!(!client.is_refused().await);
    let (began, mut refused) = (Instant::now(), 0);
    while refused < 1_000 {
        assert!(client.is_refused().await);
        refused += 1;
    }
    let told = |line: &Value| line["refusals"].as_u64();
    eventually("all refusals are told of", async || {
        let sum: u64 = objects(&tidegate.log()).iter().filter_map(told).sum();
        // The next line tells of what was not told yet.
        assert!(sum <= refused, "{sum} are told of, and {refused} were refused");
        let is_told = sum == refused;
        if !is_told {
            assert!(client.is_refused().await);
            refused += 1;
        }
        is_told.then_some(())
    })
    .await;
    let log = tidegate.log();
    let lines: Vec<_> = objects(&log).into_iter().filter(|line| told(line).is_some()).collect();
    let most = usize::try_from(began.elapsed().as_secs()).expect("it fits") + 2;
    assert!((2..=most).contains(&lines.len()), "{} lines of at most {most}", lines.len());
    for line in &lines {
        let flat = ["level", "domain", "rule", "provenance"].map(|key| line[key].as_str().unwrap_or_default());
        assert_eq!(flat, ["info", "edge", "edge.user", "store"], "{line}");
        assert!(line["@message"].is_string() && line["@timestamp"].is_string() && line["generation"] == 1, "{line}");
    }
    assert!(!log.contains(VALUE), "{log}");
}

#[tokio::test]
async fn every_line_for_programs_is_an_object_to_the_last() {
    let rules = rule_file(RULES);
    let mut tidegate = Tidegate::start(rules.path(), &[("LOG_LEVEL", "trace"), ("LOG_FORMAT", "json")]).await;
    babble(&tidegate).await;
    let broken = RULES.replace("week", "\"\\ndecade\"");
    std::fs::write(rules.path(), broken).expect("it is written");
    eventually("the broken rules are told of", async || tidegate.log().contains("decade").then_some(())).await;
    tidegate.terminate();
    assert!(tidegate.ended().await.success());
    let lines = objects(&tidegate.log());
    let has = |level: &str, words: &str| {
        lines
            .iter()
            .any(|line| line["level"] == level && line["@message"].as_str().is_some_and(|text| text.contains(words)))
    };
    assert!(has("error", "the old rules stay in force") && has("debug", "a connection failed"), "{lines:?}");
    assert!(has("info", "stopping: "), "{lines:?}");
    let stopped = lines.iter().filter(|line| line["@message"] == "the listener has stopped");
    assert_eq!(stopped.count(), 3, "the last lines are waited for: {lines:?}");
}

#[tokio::test]
async fn what_would_reorder_or_forge_a_line_is_escaped_in_either_format() {
    for (format, escape) in [("text", "\\u{61c}"), ("json", "\\u061c")] {
        let rules = rule_file(RULES);
        let tidegate = Tidegate::start(rules.path(), &[("LOG_FORMAT", format)]).await;
        let broken = RULES.replace("week", "\"\u{202e}yad\u{2069}\u{61c}\\e[2K\"");
        std::fs::write(rules.path(), broken).expect("it is written");
        let log = eventually("the broken rules are told of", async || {
            let log = tidegate.log();
            (log.contains("rules.rejected") && log.contains("yad")).then_some(log)
        })
        .await;
        assert!(!log.lines().any(|line| line.chars().any(is_hidden)), "{log:?}");
        assert!(log.contains(escape), "{log:?}");
        // In text, what goes on after a line break is indented; in JSON, a line is an object.
        let is_begin = |line: &&str| line.starts_with("20") || line.starts_with('{');
        let ends: Vec<_> = log.lines().filter(|line| !is_begin(line) && !line.starts_with("    ")).collect();
        assert_eq!(ends, Vec::<&str>::new());
    }
}

#[tokio::test]
async fn the_level_changes_while_the_process_runs() {
    let rules = rule_file(RULES);
    let tidegate = Tidegate::start(rules.path(), &[("LOG_LEVEL", "error")]).await;
    let index = http::get(tidegate.debug, "/").await;
    assert!(index.contains("/log_level"), "{index}");
    assert_eq!(level(&tidegate).await, "error\n");
    babble(&tidegate).await;

    for (host, word, status, words) in [
        ("evil.example", "debug", 403, "neither an address nor localhost"),
        ("127.0.0.1", "loud", 400, "expected trace, debug, info, warn or error"),
    ] {
        let answer = put(&tidegate, host, word).await;
        assert!(answer.status == status && answer.contains(words), "{answer}");
        assert_eq!(level(&tidegate).await, "error\n");
    }
    assert_eq!(tidegate.log(), "");

    let host = tidegate.debug.to_string();
    let answer = put(&tidegate, &host, "debug\n").await;
    assert!(answer.status == 200 && answer.body == "debug\n", "{answer}");
    assert_eq!(level(&tidegate).await, "debug\n");
    eventually("the change is told of", async || tidegate.log().contains("log.level_changed").then_some(())).await;
    babble(&tidegate).await;
    eventually("debug lines are there", async || tidegate.log().contains("a connection failed").then_some(())).await;

    put(&tidegate, "localhost", "error").await;
    let written = eventually("this change is told of, too", async || {
        let log = tidegate.log();
        log.contains("the log level is now ERROR").then_some(log)
    })
    .await;
    babble(&tidegate).await;
    put(&tidegate, "[::1]:6070", "error").await;
    let more = eventually("what comes after is told of", async || {
        let log = tidegate.log();
        (log.matches("the log level is now ERROR").count() == 2).then(|| log[written.len()..].to_owned())
    })
    .await;
    assert_eq!(more.lines().count(), 1, "{more}");
}

#[tokio::test]
async fn where_others_reach_the_debug_listener_the_level_stays() {
    let rules = rule_file(RULES);
    let tidegate = Tidegate::start(rules.path(), &[("DEBUG_HOST", "0.0.0.0")]).await;
    let answer = put(&tidegate, "127.0.0.1", "debug").await;
    assert!(answer.status == 403 && answer.contains("DEBUG_HOST"), "{answer}");
    babble(&tidegate).await;
    assert!(level(&tidegate).await.contains("DEBUG_HOST"), "it is not read either");
    assert!(!tidegate.log().contains("a connection failed"), "{}", tidegate.log());
}

#[tokio::test]
async fn the_pages_of_the_debug_listener_are_read_by_address_unless_others_reach_it() {
    let rules = rule_file(RULES);
    let tidegate = Tidegate::start(rules.path(), &[]).await;
    let paths = ["/", "/rlconfig", "/log_level"];
    for path in paths {
        for host in ["evil.example", "localhost.evil.example:6070", ""] {
            let answer = http::get(tidegate.debug, path).header("host", host).await;
            assert!(answer.status == 403 && answer.contains("the Host header is neither"), "{answer}");
            assert!(!answer.contains("edge"), "{answer}");
        }
        for host in ["127.0.0.1:6070", "[::1]", "localhost:6070"] {
            let answer = http::get(tidegate.debug, path).header("host", host).await;
            assert!(answer.status == 200, "{answer}");
        }
    }
    let shared = Tidegate::start(rules.path(), &[("DEBUG_HOST", "0.0.0.0")]).await;
    for path in &paths[..2] {
        let answer = http::get(shared.debug, path).header("host", "tidegate.example").await;
        assert!(answer.status == 200, "{answer}");
    }
}

#[tokio::test]
async fn signals_for_users_do_nothing() {
    let rules = rule_file(RULES);
    let mut tidegate = Tidegate::start(rules.path(), &[]).await;
    let mut client = Client::of(&tidegate).await;
    assert!(!client.is_refused().await);
    for signal in [Signal::USR1, Signal::USR2, Signal::USR1] {
        tidegate.signal(signal);
        assert!(client.is_refused().await, "it goes on and has forgotten nothing");
    }
    assert_eq!(tidegate.log(), "");
    tidegate.terminate();
    assert!(tidegate.ended().await.success());
}

#[tokio::test]
async fn connections_that_end_by_an_error_are_one_warning_and_a_count_by_cause() {
    let rules = rule_file(RULES);
    let tidegate = Tidegate::start(rules.path(), &[("LOG_FORMAT", "json")]).await;
    for _ in 0..5 {
        babble(&tidegate).await;
    }
    let ended = "tidegate_connections_ended_total{listener=\"gRPC\",how=\"protocol_error\"} 5\n";
    let page = eventually("all are counted", async || {
        let page = tidegate.metrics().await;
        page.contains(ended).then_some(page)
    })
    .await;
    assert!(page.contains("{listener=\"gRPC\",how=\"failed\"} 0\n"), "{page}");
    // A connection is counted before its line is written.
    let warnings = eventually("the first is logged", async || {
        let lines = objects(&tidegate.log()).into_iter();
        let warnings: Vec<_> = lines.filter(|line| line["how"] == "protocol_error").collect();
        (!warnings.is_empty()).then_some(warnings)
    })
    .await;
    assert_eq!(warnings.len(), 1, "one in ten seconds: {warnings:?}");
    let [level, listener] = ["level", "listener"].map(|key| warnings[0][key].as_str().unwrap_or_default());
    assert_eq!((level, listener, warnings[0]["count"].as_u64()), ("warning", "gRPC", Some(1)));
}

/// More lines than have room in the queue.
const LINES: usize = 12_000;

#[tokio::test]
async fn a_log_that_nobody_reads_holds_up_no_decision_and_no_stop() {
    let (_unread, mut full) = std::io::pipe().expect("a pipe");
    fcntl_setfl(&full, OFlags::NONBLOCK).expect("it is set");
    let filled = std::iter::repeat_with(|| full.write(&[b'x'; 1 << 10])).find_map(Result::err).expect("it is full");
    assert_eq!(filled.kind(), ErrorKind::WouldBlock);
    fcntl_setfl(&full, OFlags::empty()).expect("it is set");

    let rules = rule_file(RULES);
    let mut tidegate = Tidegate::start_to(Some(rules.path()), &[("LOG_LEVEL", "trace")], Some(full.into())).await;
    let mut client = Client::of(&tidegate).await;
    assert!(!client.is_refused().await);
    let last = String::from_utf8(put(&tidegate, "localhost", "trace").bytes()).expect("text");
    let many = last.replace("connection: close\r\n", "").repeat(LINES - 1);
    let answers = said(tidegate.debug, &(many + &last)).await;
    assert_eq!(answers.matches("HTTP/1.1 200 ").count(), LINES);
    for _ in 0..1_000 {
        assert!(client.is_refused().await);
    }
    babble(&tidegate).await;
    let dropped = tidegate.metric("tidegate_log_lines_dropped_total").await;
    assert!((1..LINES as u64).contains(&dropped), "{dropped}");
    tidegate.terminate();
    assert!(tidegate.ended().await.success());
}
