//! `tidegate replay`: recorded decisions by other rules.

use std::collections::HashMap;
use std::fs;
use std::sync::Arc;

use serde_json::{Value, json};
use tempfile::TempDir;
use tidegate::app::simulator::Simulator;
use tidegate::model::{Descriptor, Micros, Request};
use tidegate::rulefile::{File, Options, load};
use tidegate::rules::live::LiveRules;

use super::tap::Tap;
use super::{call_with, rule_file, stderr, stdout, tidegate};
use crate::support::{Tidegate, eventually};
use crate::world::NOON;

const SECOND: u64 = 1_000_000;

/// A directory with files for the command.
struct Files(TempDir);

impl Files {
    fn new() -> Self {
        Self(tempfile::tempdir().expect("a directory"))
    }

    /// Writes a file and returns its path.
    fn write(&self, name: &str, text: &str) -> String {
        let path = self.0.path().join(name);
        fs::write(&path, text).expect("it is written");
        path.to_str().expect("a path of text").to_owned()
    }

    /// Replays a recording by these rules. Returns the exit code and the report.
    fn replay(&self, rules: &str, recording: &str, more: &[&str]) -> (Option<i32>, Value) {
        let (rules, recording) = (self.write("rules.yaml", rules), self.write("recording.jsonl", recording));
        let output = tidegate(&[&["replay", "--json", "--rules", &rules, &recording], more].concat());
        let report = serde_json::from_str(&stdout(&output));
        (output.status.code(), report.unwrap_or_else(|_| panic!("{}{}", stdout(&output), stderr(&output))))
    }
}

fn rules(limit: u64) -> String {
    format!(
        "domain: edge\ndescriptors: [{{ key: user, rate_limit: {{ unit: minute, requests_per_unit: {limit} }} }}]\n"
    )
}

/// A line of the tap for a hit of `user`, in the same form as the line that `a_recording_of_a_server_replays_...` records.
fn line(time: u64, user: &str, outcome: &str, remaining: u64, limit: u64) -> Value {
    json!({
        "time_us": NOON.get() + time, "domain": "edge", "hits_addend": 0, "outcome": outcome, "provenance": "store",
        "rule": "edge.user", "limit": null, "retry_ms": null, "generation": 1, "is_cut": false, "is_hold_full": false,
        "descriptors": [{
            "index": 0, "is_cut": false, "entries": [{ "key": "user", "value": user }], "hits": 1, "sent_limit": null,
            "finding": "limited", "rule": "edge.user",
            "charges": [{
                "limit": null, "algorithm": "fixed_window", "capacity": limit, "window_us": 60 * SECOND, "hits": 1, "outcome": outcome,
                "provenance": "store", "remaining": remaining, "reset_ms": 1,
            }],
        }],
    })
}

fn lines(lines: &[Value]) -> String {
    lines.iter().map(|line| format!("{line}\n")).collect()
}

/// 100,000 hits of 200 users within 20 minutes: time, user, and which hit of the user within the minute it is, from 1.
fn hits() -> Vec<(u64, u64, u64)> {
    let mut random = 88_172_645_463_325_252_u64;
    let mut counts: HashMap<(u64, u64), u64> = HashMap::new();
    let hit = |number: u64| {
        // Xorshift, with more hits for low numbers of users.
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let user = (random % 200) * (random / 200 % 200) / 200;
        let time = number * 12_000;
        let count = counts.entry((user, time / (60 * SECOND))).or_default();
        *count += 1;
        (time, user, *count)
    };
    (0..100_000).map(hit).collect()
}

/// The lines of the hits as this service decides them from empty counters, in process. They are not in the order of their times.
fn recorded(limit: u64) -> String {
    let file = File { name: "rules.yaml".into(), bytes: rules(limit).into() };
    let rules = Arc::new(LiveRules::new(load(&[file], Options::default()).expect("they are right").rules));
    let simulator = Simulator::new(&rules);
    let snapshot = simulator.rules();
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    let decided = hits().into_iter().map(|(time, user, _)| {
        let user = format!("u{user}");
        let descriptor = Descriptor::parse(&format!("user={user}")).expect("a descriptor");
        let request = Request::new("edge".to_owned(), vec![descriptor], 0).expect("a request");
        let now = Micros::new(NOON.get() + time);
        let decision = runtime.block_on(simulator.decide(&snapshot, &request, now));
        let remaining = decision.answers[0].verdict.remaining;
        line(time, &user, decision.outcome.name(), remaining.into(), limit)
    });
    let decided: Vec<Value> = decided.collect();
    let (even, odd): (Vec<_>, Vec<_>) = decided.into_iter().enumerate().partition(|(index, _)| index % 2 == 0);
    let all: Vec<Value> = odd.into_iter().rev().chain(even).map(|(_, line)| line).collect();
    lines(&all)
}

#[test]
fn a_hundred_thousand_decisions_differ_exactly_where_another_limit_decides_otherwise() {
    let files = Files::new();
    let recording = recorded(10);
    let (code, report) = files.replay(&rules(10), &recording, &[]);
    assert_eq!(code, Some(0), "{report}");
    let admitted = hits().iter().filter(|(.., count)| *count <= 10).count();
    assert!((10_000..90_000).contains(&admitted), "both occur: {admitted}");
    assert_eq!(report["unchanged"], json!({ "admitted": admitted, "refused": 100_000 - admitted }));
    for (name, count) in [("would_be_refused", 0), ("would_be_admitted", 0), ("undetermined", 0)] {
        assert_eq!(report[name]["count"], count, "{name}: {report}");
    }

    // A limit of 7 a minute refuses the hits 8, 9 and 10 too. One of 12 admits the hits 11 and 12 too.
    for (limit, changed, name, other) in
        [(7, 8..=10, "would_be_refused", "would_be_admitted"), (12, 11..=12, "would_be_admitted", "would_be_refused")]
    {
        let mut expected: HashMap<String, u64> = HashMap::new();
        for (_, user, _) in hits().iter().filter(|(.., count)| changed.contains(count)) {
            *expected.entry(format!("user=u{user}")).or_default() += 1;
        }
        let (code, report) = files.replay(&rules(limit), &recording, &["--most", "1000"]);
        assert_eq!(code, Some(1));
        assert_eq!((&report[other]["count"], &report["undetermined"]["count"]), (&0.into(), &0.into()), "{report}");
        let rows = report[name]["by"].as_array().expect("a list");
        let found: HashMap<String, u64> = rows
            .iter()
            .map(|row| {
                (row["descriptor"].as_str().expect("a text").to_owned(), row["count"].as_u64().expect("a number"))
            })
            .collect();
        assert_eq!(found, expected);
        assert_eq!(report[name]["count"], expected.values().sum::<u64>());
        assert!(rows.iter().all(|row| row["rule"] == "edge.user"), "{report}");
        assert!(rows.is_sorted_by_key(|row| std::cmp::Reverse(row["count"].as_u64())), "most first: {report}");
    }
}

const SERVED: &str = "domain: edge
charging: all_or_nothing
entries: { api_key: { sensitive: true } }
descriptors:
  - { key: user, rate_limit: { name: per-user, unit: hour, requests_per_unit: 5, algorithm: gcra } }
  - { key: tier, rate_limit: { name: per-tier, unit: year, requests_per_unit: 1000 } }
  - { key: api_key, rate_limit: { name: per-key, unit: year, requests_per_unit: 3 } }
  - { key: country, value: xx, deny: true }
";

#[tokio::test]
async fn a_recording_of_a_server_replays_without_a_difference_by_the_same_rules() {
    let (served, secret) = (rule_file(SERVED), rule_file("0123456789abcdef"));
    let server = Tidegate::start(served.path(), &[("KEY_SECRET_FILE", super::path(&secret))]).await;
    // In use before the recording.
    call_with(&server, "edge", "2", &["user=bob"]);
    let tap = Tap::start(&[server.debug], &["--json", "--rate", "10000"]);
    eventually("it listens", async || tap.told().contains("since_us").then_some(())).await;
    let long = format!("user={}", "x".repeat(200));
    for (times, descriptors) in [
        ("8", &["user=ann", "tier=gold"][..]),
        ("4", &["user=bob"]),
        ("4", &["api_key=one"]),
        ("2", &["api_key=two"]),
        ("2", &["country=xx"]),
        ("2", &["other=thing"]),
        ("1", &[&*long]),
    ] {
        call_with(&server, "edge", times, descriptors);
    }
    call_with(&server, "unknown", "1", &["user=ann"]);
    let recording = eventually("all are recorded", async || {
        let told = tap.told();
        (told.lines().filter(|line| line.contains("time_us")).count() == 24).then_some(told)
    })
    .await;
    assert!(!recording.contains("api_key\",\"value\":\"one"), "{recording}");
    let files = Files::new();
    let (code, report) = files.replay(SERVED, &recording, &[]);
    // Admitted: 5 of ann, 3 of bob, 3 and 2 of the keys, 2 without a rule, 1 of an unknown domain. The refusal of bob is not certain: the
    // lines show what gcra counted before to one hit.
    assert_eq!(report["unchanged"], json!({ "admitted": 16, "refused": 6 }), "{report}\n{recording}");
    assert_eq!(code, Some(0), "{report}");
    let cut = "a rule has the key `user`, and the recording does not have its value as it was sent";
    let missing = "it depends on earlier hits that are not in the recording";
    let by = json!([{ "why": cut, "count": 1 }, { "why": missing, "count": 1 }]);
    assert_eq!(report["undetermined"], json!({ "count": 2, "by": by }));
    let notes = [
        "1 counter was in use before it began",
        "3 decisions met no rule of these files",
        "domain unknown is not in the rules",
    ];
    assert_eq!(report["notes"], json!(notes));

    // 3 for each user: two less of ann, and one or two less of bob, who had used one or two before.
    let (code, report) = files.replay(&SERVED.replace("requests_per_unit: 5", "requests_per_unit: 3"), &recording, &[]);
    assert_eq!(code, Some(1), "{report}");
    let row = |user: &str, count: u64| json!({ "rule": "edge.user", "limit": "per-user", "descriptor": format!("user={user}"), "count": count });
    assert_eq!(report["would_be_refused"], json!({ "count": 3, "by": [row("ann", 2), row("bob", 1)] }), "{report}");

    // A rule for one key cannot be decided from digests.
    let compared = SERVED.replace("key: api_key, rate", "key: api_key, value: one, rate");
    let (_, report) = files.replay(&compared, &recording, &[]);
    let digest = "a rule compares the value of `api_key`, and the recording has its digest";
    assert_eq!(report["undetermined"]["by"][0], json!({ "why": digest, "count": 6 }), "{report}");

    // Without the deny rule.
    let (_, report) = files.replay(&SERVED.replace(", deny: true", ""), &recording, &[]);
    let row = json!({ "rule": "edge.country_xx", "limit": null, "descriptor": "country=xx", "count": 2 });
    assert_eq!(report["would_be_admitted"]["by"], json!([row]), "{report}");
}

#[test]
fn what_the_recording_cannot_show_is_undetermined_with_the_reason() {
    let files = Files::new();
    let doubts = |rules: &str, recording: &[Value], more: &[&str]| {
        let (code, report) = files.replay(rules, &lines(recording), more);
        assert_eq!(code, Some(0), "{report}");
        let by = report["undetermined"]["by"].as_array().expect("a list");
        let by: Vec<(String, u64)> = by
            .iter()
            .map(|row| (row["why"].as_str().unwrap_or_default().to_owned(), row["count"].as_u64().unwrap_or(0)))
            .collect();
        (by, report["notes"].to_string())
    };
    let missing = || "it depends on earlier hits that are not in the recording".to_owned();
    let admitted = |time| line(time, "ann", "admitted", 9, 10);
    let with = |mut line: Value, name: &str, value: Value| {
        line[name] = value;
        line
    };

    // The hour began before the recording.
    let hour = rules(10).replace("minute", "hour");
    assert_eq!(doubts(&hour, &[admitted(0)], &[]).0, [(missing(), 1)]);
    assert_eq!(doubts(&hour, &[admitted(0)], &["--from-empty"]).0, []);

    let skipped = json!({ "skipped": 3, "since_us": NOON.get() + SECOND, "until_us": NOON.get() + 2 * SECOND });
    let unread = with(admitted(3 * SECOND), "descriptors", json!([]));
    let mut later = admitted(4 * SECOND);
    later["descriptors"][0]["charges"] = json!([]);
    let (found, notes) = doubts(&rules(10), &[admitted(0), skipped, later.clone(), unread], &[]);
    let too_large = "the message was too large, and its descriptors were not recorded".to_owned();
    assert_eq!(found, [(too_large, 1), (missing(), 1)]);
    assert!(notes.contains("3 decisions were skipped"), "{notes}");

    let start = json!({ "since_us": NOON.get(), "filters": ["outcome"], "rate": 100 });
    let (found, notes) = doubts(&rules(10), &[start, later], &[]);
    assert_eq!(found, [(missing(), 1)]);
    assert!(notes.contains("filtered by outcome"), "{notes}");

    for (name, value, why) in [
        ("provenance", json!("closed"), "the store did not answer, and policy `closed` decided, not a limit"),
        ("is_hold_full", json!(true), "the request was refused because too many calls were waiting, not by a limit"),
        ("is_cut", json!(true), "only a part of the request was recorded"),
    ] {
        let refused = with(with(admitted(0), "outcome", json!("refused")), name, value);
        assert_eq!(doubts(&rules(10), &[refused], &[]).0, [(why.to_owned(), 1)]);
    }
}

#[test]
fn a_masked_recording_and_one_of_another_algorithm_are_not_taken_for_what_they_do_not_show() {
    let files = Files::new();
    let masked = |time: u64, key: &str, value: &str, mark: &str| {
        let mut line = line(time, value, "admitted", 9 - time, 10);
        line["descriptors"][0]["entries"][0] = json!({ "key": key, "value": value, mark: true });
        line
    };
    let recording = lines(&[
        masked(0, "user", "5f0c", "is_digest"),
        masked(1, "ip", "203.0.113.0/24", "is_cut"),
        masked(2, "ip", "203.0.113.0/24", "is_cut"),
        masked(3, "plan", "a81e", "is_digest"),
    ]);
    let more = "  - { key: ip, rate_limit: { unit: minute, requests_per_unit: 1 } }\n  - { key: plan, value: free, deny: true }\n";
    let rules_of =
        |limit: &str| format!("domain: edge\ndescriptors:\n  - {{ key: user, rate_limit: {{ {limit} }} }}\n{more}");
    let (code, report) = files.replay(&rules_of("unit: minute, requests_per_unit: 10"), &recording, &[]);
    assert_eq!((code, &report["unchanged"]), (Some(0), &json!({ "admitted": 1, "refused": 0 })), "{report}");
    let by = json!([
        { "why": "a rule has the key `ip`, and the recording does not have its value as it was sent", "count": 2 },
        { "why": "a rule compares the value of `plan`, and the recording has its digest", "count": 1 },
    ]);
    assert_eq!(report["undetermined"]["by"], by, "{report}");

    // A window of 100 that begins here says nothing about the minute before it, which a log counts too.
    let recording: Vec<Value> = (0..100).map(|hit| line(hit, "ann", "admitted", 99 - hit, 100)).collect();
    let limit = "unit: minute, requests_per_unit: 100";
    let (code, report) = files.replay(&rules_of(limit), &lines(&recording), &[]);
    assert_eq!((code, &report["unchanged"]["admitted"]), (Some(0), &100.into()), "{report}");
    let (code, report) = files.replay(&rules_of(&format!("{limit}, algorithm: sliding_log")), &lines(&recording), &[]);
    assert_eq!((code, &report["undetermined"]["count"]), (Some(0), &100.into()), "{report}");
}

#[test]
fn a_replay_of_nothing_is_an_error_and_one_without_a_rule_says_so() {
    let files = Files::new();
    let rules_path = files.write("rules.yaml", &rules(1));
    let start = json!({ "since_us": NOON.get(), "filters": [], "rate": 100 });
    let nothing = "there is no decision to replay";
    let access_log = ["--domain", "edge", "-d", "user={x_user_id}"];
    let request = json!({ "start_time": "2026-11-21T12:00:00Z", "response_code": 200 });
    for (text, more, says) in [
        (String::new(), &[][..], nothing),
        (lines(&[start]), &[], nothing),
        (lines(std::slice::from_ref(&request)), &access_log, "the only request lacks a field"),
        (
            lines(&[request]),
            &["--domain", "edge", "-d", "user={x_user_id"],
            "'{x_user_id' has no } after the name of a field",
        ),
        ("{\"time".to_owned(), &[], "recording.jsonl:1: it is not JSON"),
        ("no recording at all".to_owned(), &[], "recording.jsonl:1: it is not JSON"),
    ] {
        let path = files.write("recording.jsonl", &text);
        let output = tidegate(&[&["replay", "--rules", &rules_path, &path], more].concat());
        assert_eq!((output.status.code(), &*stdout(&output)), (Some(2), ""), "{text}");
        assert!(stderr(&output).contains(says), "{text}: {}", stderr(&output));
    }
    let other = rules(1).replace("edge", "other");
    let (code, report) = files.replay(&other, &lines(&[line(0, "ann", "admitted", 9, 10)]), &[]);
    let notes = json!(["1 decision met no rule of these files", "domain edge is not in the rules"]);
    assert_eq!((code, &report["notes"]), (Some(0), &notes), "{report}");
}

#[test]
fn an_access_log_of_envoy_is_a_recording_too() {
    let files = Files::new();
    let entry = |second: u64, user: &str, flags: &str| {
        let code = if flags == "RL" { 429 } else { 200 };
        json!({ "start_time": format!("2026-11-21T12:00:{second:02}.000Z"), "response_flags": flags, "response_code": code, "x_user_id": user, "path": "/a,b" })
    };
    let log = lines(&[
        entry(1, "ann", "-"),
        entry(2, "ann", "-"),
        entry(3, "ann", "-"),
        entry(4, "ann", "RL"),
        entry(5, "bob", "RL"),
        entry(6, "-", "-"),
        entry(7, "bob", "RLSE"),
    ]);
    let access_log =
        ["--domain", "edge", "-d", "user={x_user_id}", "-d", "user={x_user_id},path=p{path}", "--from-empty"];
    let (code, report) = files.replay(&rules(2), &log, &access_log);
    assert_eq!(code, Some(1));
    assert_eq!(report["unchanged"], json!({ "admitted": 2, "refused": 1 }), "{report}");
    let row =
        |rule, user: &str| json!([{ "rule": rule, "limit": null, "descriptor": format!("user={user}"), "count": 1 }]);
    assert_eq!(report["would_be_refused"]["by"], row(json!("edge.user"), "ann"), "{report}");
    assert_eq!(report["would_be_admitted"]["by"], row(Value::Null, "bob"), "{report}");
    assert_eq!(
        report["undetermined"]["by"][0]["why"],
        "the store did not answer, and policy `error` decided, not a limit"
    );
    assert_eq!(report["notes"], json!(["1 request has no descriptor, and no limit applies to it"]));
}

#[test]
fn the_report_for_people_has_the_rows_with_the_most_first_and_wrong_lines_are_named() {
    let files = Files::new();
    let mut recording: Vec<Value> = (0..3).map(|hit| line(hit, "ann", "admitted", 9 - hit, 10)).collect();
    recording.extend((0..5).map(|hit| line(10 + hit, "b,b", "admitted", 9 - hit, 10)));
    let (rules, path) = (files.write("rules.yaml", &rules(1)), files.write("recording.jsonl", &lines(&recording)));
    let output = tidegate(&["replay", "--rules", &rules, "--most", "1", &path]);
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    assert_eq!(
        stdout(&output),
        "8 decisions from 2026-11-21 12:00:00.000 to 2026-11-21 12:00:00.000 UTC
         2  would not change: 2 admitted, 0 refused
         6  would be refused, and were admitted
         0  would be admitted, and were refused
         0  undetermined

Would be refused, by the rule that would refuse:
         4  edge.user: user=b\\,b
         2  of 1 other row: see more with --most
"
    );
    for (text, says) in [
        (
            "{\"time_us\": 1}\n",
            "recording.jsonl:1: it is not a decision as `tidegate tap --json` prints it: its outcome",
        ),
        ("\nno\n", "recording.jsonl:2: it is not JSON"),
        ("{\"skipped\": 1}\n", "recording.jsonl:1: it says that decisions were skipped, without since_us"),
    ] {
        files.write("recording.jsonl", text);
        let output = tidegate(&["replay", "--rules", &rules, &path]);
        assert_eq!((output.status.code(), &*stdout(&output)), (Some(2), ""));
        assert!(stderr(&output).contains(says), "{}", stderr(&output));
    }
    files.write("recording.jsonl", &format!("{}{{\"time", lines(&recording)));
    let output = tidegate(&["replay", "--rules", &rules, &path]);
    assert!(stderr(&output).contains("recording.jsonl:9: this last line is cut off"), "{}", stderr(&output));
    assert!(stdout(&output).starts_with("8 decisions"), "{}", stdout(&output));
}
