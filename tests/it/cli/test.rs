//! `tidegate test`: test cases on a virtual clock.

use std::fs;
use std::path::Path;

use tempfile::TempDir;

use super::{stderr, stdout, tidegate};
use crate::support::{self, repository};

const RULES: &str = "domain: edge
descriptors:
  - { key: user, rate_limit: { unit: minute, requests_per_unit: 3, name: per-user } }
";

const CASES: &str = "rules: rules.yaml
domain: edge
cases:
  - name: three are admitted & the rest <not>
    steps:
      - { descriptors: [{ user: ann }], times: 3, expect: { code: ok, remaining: 0 } }
      - { at: 59s, descriptors: [{ user: ann }], expect: { code: over_limit, retry_after: 1s, rule: edge.user } }
      - { after: 1s, descriptors: [{ user: ann }], expect: ok }
  - name: two too many # is wrong
    steps:
      - descriptors: [user=bob]
        times: 5
        expect: ok
";

/// A directory with rules and test cases.
fn directory(cases: &str) -> TempDir {
    support::directory([("rules.yaml", RULES), ("cases.yaml", cases)])
}

fn run(directory: &Path, arguments: &[&str]) -> (Option<i32>, String, String) {
    let path = directory.join("cases.yaml");
    let path = path.to_str().expect("a path of text");
    let output = tidegate(&[&["test", path], arguments].concat());
    let plain = |text: String| text.replace(path, "cases.yaml");
    (output.status.code(), plain(stdout(&output)), plain(stderr(&output)))
}

#[test]
fn a_failed_case_names_its_place_what_came_and_what_decided() {
    let directory = directory(CASES);
    let (code, text, errors) = run(directory.path(), &[]);
    assert_eq!((code, &*errors), (Some(1), ""));
    assert_eq!(
        text,
        "ok    cases.yaml:4: three are admitted & the rest <not>
FAIL  cases.yaml:9: two too many
      cases.yaml:11: step 1 at 0s, answer 4 of 5: user=bob
        code: expected ok, got over_limit
        decided by edge.user, limit per-user, quota 3 per minute, remaining 0, retry after 1m, reset after 1m
1 of 2 cases passed, 1 failed
"
    );
    fs::write(directory.path().join("cases.yaml"), CASES.replace("times: 5", "times: 3")).expect("it is written");
    let (code, text, _) = run(directory.path(), &[]);
    assert_eq!((code, text.lines().last()), (Some(0), Some("2 of 2 cases passed")));
}

#[test]
fn every_expectation_can_fail() {
    for (expected, says) in [
        ("over_limit", "code: expected over_limit, got ok"),
        ("{ admitted: 1 }", "admitted: expected 1 of 2, got 2"),
        ("{ rule: none }", "rule: expected none, got edge.user"),
        ("{ limit: other }", "limit: expected other, got per-user"),
        ("{ remaining: 0 }", "remaining: expected 0, got 1"),
        ("{ retry_after: 1s }", "retry_after: expected 1s, got none"),
        ("{ reset_after: 1s }", "reset_after: expected 1s, got 1m"),
        ("{ delay: 1s }", "delay: expected 1s, got 0s"),
        ("{ descriptors: [{ code: over_limit, remaining: 2 }] }", "descriptor 1, code: expected over_limit, got ok"),
    ] {
        let step = format!("{{ descriptors: [user=ann], times: 2, expect: {expected} }}");
        let cases = format!("rules: rules.yaml\ndomain: edge\ncases: [{{ name: one, steps: [{step}] }}]\n");
        let (code, text, errors) = run(directory(&cases).path(), &[]);
        assert_eq!((code, &*errors), (Some(1), ""), "{expected}: {text}");
        assert!(text.contains(&format!("\n        {says}\n")), "{expected}: {text}");
    }
}

#[test]
fn a_step_is_sent_once_at_least_and_a_million_times_at_most() {
    for (times, expected) in [(0, Some(2)), (1, Some(0)), (1_000_001, Some(2))] {
        let step = format!("{{ descriptors: [other=1], times: {times}, expect: ok }}");
        let cases = format!("rules: rules.yaml\ndomain: edge\ncases: [{{ name: one, steps: [{step}] }}]\n");
        let (code, text, errors) = run(directory(&cases).path(), &[]);
        assert_eq!(code, expected, "{times}: {text}{errors}");
    }
}

#[test]
fn results_come_as_tap_and_as_junit_xml() {
    let directory = directory(CASES);
    let (code, tap, _) = run(directory.path(), &["--format", "tap"]);
    assert_eq!(code, Some(1));
    assert_eq!(
        tap,
        "TAP version 14
1..2
ok 1 - cases.yaml:4: three are admitted & the rest <not>
not ok 2 - cases.yaml:9: two too many
  ---
  message: |
    cases.yaml:11: step 1 at 0s, answer 4 of 5: user=bob
      code: expected ok, got over_limit
      decided by edge.user, limit per-user, quota 3 per minute, remaining 0, retry after 1m, reset after 1m
  ...
"
    );
    let (code, junit, _) = run(directory.path(), &["--format", "junit"]);
    assert_eq!(code, Some(1));
    for line in [
        "<testsuites tests=\"2\" failures=\"1\">",
        "  <testsuite name=\"cases.yaml\" tests=\"2\" failures=\"1\">",
        "    <testcase name=\"three are admitted &amp; the rest &lt;not&gt;\" classname=\"cases.yaml\" file=\"cases.yaml\" line=\"4\"/>",
        "      <failure message=\"code: expected ok, got over_limit\">cases.yaml:11: step 1 at 0s, answer 4 of 5: user=bob",
    ] {
        assert!(junit.lines().any(|found| found == line), "{line}\n{junit}");
    }
}

#[test]
fn a_wrong_file_runs_no_case_and_names_every_error() {
    let directory = directory(&CASES.replace("times: 5", "time: 5").replace("over_limit", "over-limit"));
    let (code, text, errors) = run(directory.path(), &[]);
    assert_eq!((code, &*text), (Some(2), ""));
    assert!(errors.contains("cases.yaml:7:") && errors.contains("did you mean `over_limit`?"), "{errors}");
    assert!(
        errors.contains("cases.yaml:12:9: error: `time` is not a known key") && errors.contains("`times`?"),
        "{errors}"
    );

    for (wrong, says) in [
        ("expect: {}", "cases.yaml:13:17: error: `expect` expects nothing"),
        ("expect: { descriptors: [{}] }", "cases.yaml:13:17: error: `expect` expects nothing"),
        ("domain: ''\n        expect: ok", "cases.yaml:13:17: error: `domain` is empty"),
        (
            "expect: { admitted: 6 }",
            "cases.yaml:13:29: error: `admitted` is 6, and the step sends 5 requests, so it can never pass",
        ),
    ] {
        let cases = CASES.replace("        expect: ok\n", &format!("        {wrong}\n"));
        fs::write(directory.path().join("cases.yaml"), cases).expect("it is written");
        let (code, text, errors) = run(directory.path(), &[]);
        assert_eq!((code, &*text), (Some(2), ""), "{wrong}");
        assert!(errors.contains(says), "{wrong}: {errors}");
    }

    fs::write(directory.path().join("cases.yaml"), CASES).expect("it is written");
    fs::write(directory.path().join("rules.yaml"), RULES.replace("minute", "fortnight")).expect("it is written");
    let (code, text, errors) = run(directory.path(), &[]);
    assert_eq!((code, &*text), (Some(2), ""));
    assert!(errors.contains("the rules of cases.yaml") && errors.contains("rules.yaml:3:"), "{errors}");
}

#[test]
fn rules_on_the_command_line_replace_those_of_the_file() {
    let directory = directory(&CASES.replace("rules: rules.yaml\n", ""));
    let (code, _, errors) = run(directory.path(), &[]);
    assert_eq!(code, Some(2));
    assert!(errors.contains("the file names no rules: write `rules: PATH` at its top"), "{errors}");
    let larger = directory.path().join("larger.yaml");
    fs::write(&larger, RULES.replace("requests_per_unit: 3", "requests_per_unit: 5")).expect("it is written");
    let (code, text, _) = run(directory.path(), &["--rules", larger.to_str().expect("a path of text")]);
    assert_eq!(code, Some(1), "the first case expects three: {text}");
    assert!(text.contains("remaining: expected 0, got 2") && text.contains("ok    cases.yaml:8"), "{text}");
}

#[test]
fn sensitive_values_have_counters_of_their_own_without_a_secret() {
    let cases = "rules: rules.yaml\ndomain: edge\ncases:\n  - name: two keys\n    steps:\n      - { descriptors: [api_key=a], expect: ok }\n      - { descriptors: [api_key=b], expect: ok }\n      - { descriptors: [api_key=a], expect: over_limit }\n";
    let directory = directory(cases);
    let rules = "domain: edge\nentries: { api_key: { sensitive: true } }\ndescriptors: [{ key: api_key, rate_limit: { unit: day, requests_per_unit: 1 } }]\n";
    fs::write(directory.path().join("rules.yaml"), rules).expect("it is written");
    let (code, text, errors) = run(directory.path(), &[]);
    assert_eq!(code, Some(0), "{text}{errors}");
}

#[test]
fn the_example_of_test_cases_passes_on_the_example_rules() {
    let output = tidegate(&["test", repository("examples/cases.yaml").to_str().expect("a path of text")]);
    assert_eq!(output.status.code(), Some(0), "{}{}", stdout(&output), stderr(&output));
    assert!(stdout(&output).ends_with("6 of 6 cases passed\n"), "{}", stdout(&output));
}
