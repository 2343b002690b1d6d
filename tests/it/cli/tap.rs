//! `tidegate tap`: decisions as they are made.

use std::net::{SocketAddr, TcpListener};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tempfile::NamedTempFile;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::{call_with, over, rule_file};
use crate::http;
use crate::support::{Tidegate, answering, eventually};

const RULES: &str = "domain: edge
descriptors:
  - { key: user, rate_limit: { unit: year, requests_per_unit: 3, name: yearly } }
  - { key: country, value: xx, deny: true }
";

/// A tap that runs in the background, and its output.
pub(super) struct Tap {
    process: Child,
    output: NamedTempFile,
    errors: NamedTempFile,
}

impl Tap {
    pub(super) fn start(instances: &[SocketAddr], more: &[&str]) -> Self {
        let (output, errors) = (NamedTempFile::new().expect("a file"), NamedTempFile::new().expect("a file"));
        let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
        command.arg("tap").args(more).env_clear().stdin(Stdio::null());
        for instance in instances {
            command.args(["--instance", &instance.to_string()]);
        }
        command.stdout(output.reopen().expect("it is there")).stderr(errors.reopen().expect("it is there"));
        Self { process: command.spawn().expect("it starts"), output, errors }
    }

    pub(super) fn told(&self) -> String {
        std::fs::read_to_string(self.output.path()).expect("it reads")
    }

    fn errors(&self) -> String {
        std::fs::read_to_string(self.errors.path()).expect("it reads")
    }
}

impl Drop for Tap {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn call(server: &Tidegate, times: &str, descriptors: &[&str]) {
    call_with(server, "edge", times, descriptors);
}

#[tokio::test]
async fn decisions_of_all_instances_are_shown_as_they_are_made_and_who_does_not_answer_is_named() {
    let rules = rule_file(RULES);
    let (one, mut other) = (Tidegate::start(rules.path(), &[]).await, Tidegate::start(rules.path(), &[]).await);
    let silent = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let three = [one.debug, other.debug, silent.local_addr().expect("an address")];
    let all = Tap::start(&three, &["--timeout", "500ms"]);
    let refused = Tap::start(&three[..2], &["--outcome", "refused", "-d", "user=ann"]);
    let missing = format!("{}: no more decisions from here on: no answer within 500ms", three[2]);
    eventually("the silent one is named", async || all.errors().contains(&missing).then_some(())).await;
    let is_seen = |tap: &Tap, server: &Tidegate, what: &str| {
        tap.told().lines().any(|line| line.contains(what) && line.ends_with(&format!("@{}", server.debug)))
    };
    for server in [&one, &other] {
        eventually("a refusal is shown by both", async || {
            call(server, "5", &["user=ann", "path=/\u{202e}"]);
            let is_shown = is_seen(
                &all,
                server,
                "refused  edge  user=ann; path=/\\\\u{202e}  by edge.user limit yearly: store, again in ",
            ) && is_seen(&refused, server, "refused  edge  user=ann");
            is_shown.then_some(())
        })
        .await;
    }
    assert!(all.told().contains("admitted edge  user=ann"), "{}", all.told());
    call(&one, "1", &["country=xx"]);
    eventually("a ruling is shown", async || {
        is_seen(&all, &one, "refused  edge  country=xx  by edge.country_xx: rule").then_some(())
    })
    .await;
    let told = refused.told();
    assert!(!told.contains("admitted") && !told.contains("country=xx"), "{told}");

    // A stop is not held up by those who listen.
    let began = Instant::now();
    other.terminate();
    assert!(other.ended().await.success());
    println!("it stopped within {:?}", began.elapsed());
    let stopped = format!("{}: it closed the stream", other.debug);
    eventually("the one that has stopped is named", async || all.errors().contains(&stopped).then_some(())).await;
    call(&one, "1", &["user=after"]);
    eventually("the other one goes on", async || is_seen(&all, &one, "user=after").then_some(())).await;
}

#[tokio::test]
async fn what_only_a_shadow_mode_admits_is_shown_with_the_limit_that_would_refuse_it() {
    let watched = rule_file(
        "domain: edge
descriptors:
  - key: user
    rate_limits:
      - { unit: year, requests_per_unit: 1000 }
      - { unit: year, requests_per_unit: 1, shadow_mode: true, name: tighter }
  - { key: path, shadow_mode: true, rate_limit: { unit: year, requests_per_unit: 1 } }
",
    );
    let enforced = rule_file(RULES);
    let one = Tidegate::start(watched.path(), &[]).await;
    let other = Tidegate::start(enforced.path(), &[("SHADOW_MODE", "true")]).await;
    let all = Tap::start(&[one.debug, other.debug], &[]);
    let shadow = Tap::start(&[one.debug, other.debug], &["--outcome", "would_be_refused"]);
    let of_rule = Tap::start(&[one.debug], &["--outcome", "would_be_refused", "--rule", "edge.path", "--json"]);
    let elsewhere = Tap::start(&[one.debug], &["--domain", "elsewhere", "--outcome", "admitted"]);
    for (server, descriptors, expected) in [
        (
            &one,
            &["user=ann"][..],
            "admitted edge  user=ann  by edge.user: store, would be refused by edge.user, 1 per year, limit tighter (shadow mode)  @",
        ),
        (
            &one,
            &["path=/", "user=eve"],
            ", would be refused by edge.path, 1 per year; edge.user, 1 per year, limit tighter (shadow mode)  @",
        ),
        (&other, &["user=bob"], ", would be refused by edge.user, 3 per year, limit yearly (shadow mode)  @"),
        (&other, &["country=xx"], "by edge.country_xx: rule, would be refused by edge.country_xx (shadow mode)  @"),
    ] {
        eventually("it is shown", async || {
            call(server, "1", descriptors);
            [&all, &shadow].iter().all(|tap| tap.told().contains(expected)).then_some(())
        })
        .await;
    }
    eventually("the rule that would refuse is selected", async || of_rule.told().contains("\"path\"").then_some(()))
        .await;
    let told = of_rule.told();
    let decision = told.lines().find(|line| line.contains("\"descriptors\"")).unwrap_or_else(|| panic!("{told}"));
    let decision: serde_json::Value = serde_json::from_str(decision).expect("JSON");
    let expected =
        serde_json::json!({ "rule": "edge.path", "limit": null, "quota": "1 per year", "provenance": "store" });
    assert!(decision["shadow"][0] == expected || decision["shadow"][0]["provenance"] == "known", "{decision}");
    call(&one, "1", &["user=new"]);
    eventually("all are shown by the other", async || all.told().contains("user=new").then_some(())).await;
    let told = shadow.told();
    assert!(told.lines().all(|line| line.contains("would be refused by")), "{told}");
    assert!(!elsewhere.told().contains("user="), "{}", elsewhere.told());
}

/// Number of the streams that a tap with `--json` has begun.
fn streams(tap: &Tap) -> usize {
    tap.told().matches("\"since_us\"").count()
}

#[tokio::test]
async fn a_tap_outlives_the_age_of_its_connections_and_says_so_once() {
    let rules = rule_file(RULES);
    let ages = [("GRPC_MAX_CONNECTION_AGE", "1s"), ("GRPC_MAX_CONNECTION_AGE_GRACE", "1s")];
    let server = Tidegate::start(rules.path(), &ages).await;
    let began = Instant::now();
    // A connection may be silent for 5 s at first, so each lasts 7 s.
    let mut in_time = Tap::start(&[server.debug], &["--json", "--duration", "15s"]);
    let tap = Tap::start(&[server.debug], &["--json"]);
    eventually("it connects for the third time", async || (streams(&tap) >= 3).then_some(())).await;
    eventually("decisions are shown still", async || {
        call(&server, "1", &["user=late"]);
        tap.told().contains("late").then_some(())
    })
    .await;
    let errors = tap.errors();
    assert_eq!((errors.lines().count(), errors.matches("Connecting again").count()), (1, 1), "{errors}");
    let expected = format!("{}: its connection was lost, or has reached GRPC_MAX_CONNECTION_AGE. ", server.debug);
    assert!(errors.contains(&expected), "{errors}");

    let status = in_time.process.wait().expect("it ends");
    assert!(status.success() && began.elapsed() >= Duration::from_secs(15), "{status}: {:?}", began.elapsed());
    assert!(streams(&in_time) > 1, "its time goes on over the ends: {}", in_time.told());
}

#[tokio::test]
async fn a_tap_connects_again_to_an_instance_that_restarts() {
    let rules = rule_file(RULES);
    let mut server = Tidegate::start(rules.path(), &[]).await;
    let debug = server.debug;
    let tap = Tap::start(&[debug], &[]);
    for (number, is_killed) in [false, true, false].into_iter().enumerate() {
        let user = format!("user=ann{number}");
        eventually("decisions are shown", async || {
            call(&server, "1", &[&user]);
            tap.told().contains(&user).then_some(())
        })
        .await;
        if is_killed {
            server.kill();
        } else {
            server.terminate();
        }
        server.ended().await;
        eventually("the end is told", async || tap.errors().contains("Connecting again").then_some(())).await;
        // It is away for longer than the first pause.
        tokio::time::sleep(Duration::from_millis(1_500)).await;
        let port = debug.port().to_string();
        server = Tidegate::start(rules.path(), &[("DEBUG_PORT", &port)]).await;
    }
    assert_eq!(tap.errors().lines().count(), 1, "{}", tap.errors());
    server.terminate();
    server.ended().await;
    let (_, _, errors) = over(&[debug], &["tap", "--duration", "10s", "--timeout", "500ms"]);
    assert!(errors.contains("no more decisions from here on") && errors.contains("no instance answered"), "{errors}");
    let (code, _, errors) = over(&[debug], &["tap", "--provenance", "redis"]);
    assert!(code == Some(2) && errors.contains("[possible values: store, known, lease,"), "{errors}");
}

#[tokio::test]
async fn an_instance_that_hangs_is_named_and_shown_again_when_it_goes_on() {
    let rules = rule_file(RULES);
    let server = Tidegate::start(rules.path(), &[]).await;
    let tap = Tap::start(&[server.debug], &["--json"]);
    eventually("it listens", async || (streams(&tap) == 1).then_some(())).await;
    server.signal(Signal::STOP);
    let hangs = format!("{}: it sends nothing any more", server.debug);
    eventually("it is named", async || tap.errors().contains(&hangs).then_some(())).await;
    server.signal(Signal::CONT);
    eventually("decisions are shown again", async || {
        call(&server, "1", &["user=ann"]);
        tap.told().contains("ann").then_some(())
    })
    .await;
    assert_eq!(tap.errors().lines().count(), 1, "{}", tap.errors());
}

#[tokio::test]
async fn an_instance_that_answers_without_a_first_line_is_named_and_the_exit_code_is_2() {
    let at = answering(|mut stream| async move {
        stream.read_buf(&mut Vec::new()).await.expect("it asks");
        let head = "HTTP/1.1 200 OK\r\ncontent-type: application/x-ndjson\r\ntransfer-encoding: chunked\r\n\r\n";
        stream.write_all(head.as_bytes()).await.expect("it is sent");
        // Until the client goes.
        let _ = stream.read_to_end(&mut Vec::new()).await;
    })
    .await;
    for (more, is_named) in
        [(["--timeout", "500ms", "--duration", "1m"], true), (["--timeout", "1m", "--duration", "500ms"], false)]
    {
        let (code, told, errors) =
            tokio::task::spawn_blocking(move || over(&[at], &[&["tap"], &more[..]].concat())).await.expect("it ends");
        assert_eq!((code, &*told), (Some(2), ""), "{more:?}: {errors}");
        assert!(errors.contains("no instance answered"), "{more:?}: {errors}");
        let name = format!("{at}: no more decisions from here on: no answer within 500ms");
        assert_eq!(errors.contains(&name), is_named, "{more:?}: {errors}");
    }
}

/// Asks for the decisions, and waits until the stream has this text.
async fn is_streamed(at: SocketAddr, accept: &str, text: &str) {
    let mut stream = TcpStream::connect(at).await.expect("it listens");
    let request = format!("GET /v1/decisions HTTP/1.1\r\nhost: localhost\r\naccept: {accept}\r\n\r\n");
    stream.write_all(request.as_bytes()).await.expect("it is sent");
    let mut read = Vec::new();
    eventually("it is streamed", async || {
        stream.read_buf(&mut read).await.expect("it is open");
        String::from_utf8_lossy(&read).contains(text).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_stream_without_decisions_has_signs_of_life() {
    let rules = rule_file(RULES);
    let server = Tidegate::start(rules.path(), &[]).await;
    tokio::join!(
        is_streamed(server.debug, "*/*", "\r\n1\r\n\n\r\n"),
        is_streamed(server.debug, "text/event-stream", "\r\n4\r\n: \n\n\r\n"),
    );
}

#[tokio::test]
async fn beyond_a_rate_decisions_are_skipped_and_counted() {
    // The tap may begin to listen after any number of calls, and the first decision that it shows is an admission.
    let rules = rule_file(&RULES.replace("requests_per_unit: 3,", "requests_per_unit: 1000000000,"));
    let server = Tidegate::start(rules.path(), &[]).await;
    let tap = Tap::start(&[server.debug], &["--rate", "10", "--json"]);
    eventually("some are shown", async || {
        call(&server, "200", &["user=bob"]);
        tap.told().contains("\"skipped\"").then_some(())
    })
    .await;
    let told = tap.told();
    let lines: Vec<serde_json::Value> =
        told.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|_| panic!("{line}"))).collect();
    // The first one is always shown.
    let decision = lines.iter().find(|line| line["outcome"] == "admitted").unwrap_or_else(|| panic!("{told}"));
    assert_eq!((&decision["rule"], &decision["provenance"]), (&"edge.user".into(), &"store".into()), "{decision}");
    let of_descriptor = &decision["descriptors"][0];
    assert_eq!(of_descriptor["entries"][0]["value"], "bob", "{decision}");
    assert_eq!((&of_descriptor["charges"][0]["hits"], &of_descriptor["finding"]), (&1.into(), &"limited".into()));
    assert_eq!(
        (&of_descriptor["index"], &of_descriptor["charges"][0]["algorithm"]),
        (&0.into(), &"fixed_window".into())
    );
}

#[tokio::test]
async fn a_wrong_query_says_what_is_expected_and_too_many_listeners_are_refused() {
    let rules = rule_file(RULES);
    let server = Tidegate::start(rules.path(), &[]).await;
    for (query, why) in [
        ("outcome=denied", "outcome is admitted, refused, failed or would_be_refused"),
        ("provenance=redis", "provenance is one of store, known,"),
        ("rate=0", "rate is a number of decisions a second, from 1 to 10000"),
        ("entry=user", "entry=KEY=VALUE"),
        ("who=42", "there is no parameter who"),
    ] {
        let page = http::get(server.debug, &format!("/v1/decisions?{query}")).await;
        assert!(page.status == 400 && page.contains(why), "{page}");
    }
    let taps: Vec<Tap> = (0..9).map(|_| Tap::start(&[server.debug], &[])).collect();
    eventually("one of nine is refused", async || {
        let refused = taps.iter().filter(|tap| tap.errors().contains("8 listeners are connected")).count();
        (refused == 1).then_some(())
    })
    .await;
    drop(taps);
    let tap = Tap::start(&[server.debug], &[]);
    eventually("there is room again", async || {
        call(&server, "1", &["user=eve"]);
        tap.told().contains("user=eve").then_some(())
    })
    .await;
}
