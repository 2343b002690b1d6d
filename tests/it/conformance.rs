//! The conformance suite: the same answers as the reference, but for the differences that are written down.

use std::collections::BTreeMap;

use futures_util::future::join_all;
use futures_util::{StreamExt, stream};
use tokio::process::Command;

use crate::redis::Single;
use crate::redis::cluster::Cluster;
use crate::redis::sentinel::Sentinel;
use crate::redis::user::{PREFIX, Shape, User};
use crate::support::{Tidegate, output, repository, rule_file, tool};

mod replay;

/// The cases that pass against the reference, in two halves.
pub const PLAIN: &[&str] = &["--skip-quirks"];
pub const QUIRKS: &[&str] = &["--quirks-only"];
const BOTH: &[&str] = &[];
/// Groups that run at a time: some wait for a window to begin, and the runner takes a processor to start.
pub const AT_ONCE: usize = 2;

/// What the runner said, of failed cases as well.
pub async fn run(arguments: &[&str]) -> String {
    let mut command = Command::new(tool("python"));
    command.arg(repository("tests/conformance/run.py")).args(arguments);
    let (status, said, errors) = output(&mut command).await;
    assert!(status.success() || said.contains(" passed, "), "run.py {arguments:?}: {status}\n{said}{errors}");
    said
}

/// Runs this half of every group, each on a server of its own with these variables, and says what the runner said.
async fn cases(half: &[&str], store: &[(&str, &str)]) -> String {
    let groups = run(&[&["--groups"], half].concat()).await;
    let reports = stream::iter(groups.lines()).map(|group| cases_of(group, half, store));
    reports.buffered(AT_ONCE).collect::<String>().await
}

async fn cases_of(group: &str, half: &[&str], store: &[(&str, &str)]) -> String {
    let rules = tempfile::tempdir().expect("a directory");
    let directory = rules.path().to_str().expect("a path of text");
    run(&[&["--prepare", directory, "--group", group], half].concat()).await;
    let variables = run(&["--env", "--group", group]).await;
    let variables = variables.lines().filter_map(|line| line.split_once('='));
    let prefix = format!("{PREFIX}{group}:");
    let variables: Vec<_> = variables.chain(store.iter().copied()).chain([("CACHE_KEY_PREFIX", &*prefix)]).collect();
    let server = Tidegate::start(rules.path(), &variables).await;
    let said = run(&[&["--addr", &server.grpc.to_string(), "--group", group], half].concat()).await;
    format!("group {group}\n{said}{}", server.log())
}

/// Runs every case of every group on a Redis, as the least privileged user there.
async fn cases_on_redis(shape: Shape, url: &str, servers: &[Single]) -> String {
    let user = User::of(shape);
    join_all(servers.iter().map(|server| user.let_in(server))).await;
    let report = cases(
        BOTH,
        &[
            ("REDIS_TYPE", shape.name()),
            ("REDIS_URL", url),
            ("REDIS_AUTH", &user.auth()),
            // On a busy machine a test would fail on time; this one is about answers.
            ("STORE_DEADLINE", "5s"),
        ],
    )
    .await;
    for server in servers {
        assert_eq!(user.denied(server).await, "", "nothing more than the documented rights is asked for");
    }
    report
}

/// Runs this half of the rule files that are loaded or refused.
async fn rule_files(half: &[&str]) -> String {
    let check = format!("{} check {{dir}}", env!("CARGO_BIN_EXE_tidegate"));
    run(&[&["--config-check", &check], half].concat()).await
}

/// The names of the cases that failed, in order.
pub fn failed(report: &str) -> Vec<&str> {
    let failed = report.lines().filter_map(|line| line.strip_prefix("FAIL "));
    let mut names: Vec<_> = failed.filter_map(|rest| rest.split([' ', ':']).next()).collect();
    names.sort_unstable();
    names
}

/// How many cases passed.
pub fn passed(report: &str) -> u32 {
    let counts = report.lines().filter_map(|line| line.split_once(" passed, "));
    counts.map(|(count, _)| count.parse::<u32>().expect("a number")).sum()
}

/// `differences.yaml`: of each section, the names and their reasons.
pub fn differences() -> BTreeMap<String, BTreeMap<String, String>> {
    let text = std::fs::read_to_string(repository("tests/conformance/differences.yaml")).expect("it reads");
    let mut sections: BTreeMap<String, BTreeMap<String, String>> = BTreeMap::new();
    let mut section = String::new();
    for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        match (line.strip_prefix("  "), line.strip_suffix(':')) {
            (Some(item), _) => {
                let (name, reason) = item.split_once(": ").unwrap_or_else(|| panic!("no reason: {line}"));
                let known = sections.entry(section.clone()).or_default().insert(name.to_owned(), reason.to_owned());
                assert!(known.is_none(), "{name} stands there twice");
            }
            (None, Some(name)) => name.clone_into(&mut section),
            (None, None) => panic!("neither a section nor a case: {line}"),
        }
    }
    sections
}

fn assert_differs_exactly(section: &str, report: &str) {
    let written = &differences()[section];
    let written: Vec<_> = written.keys().map(String::as_str).collect();
    assert_eq!(
        failed(report),
        written,
        "left, the quirks answered differently; right, those that tests/conformance/differences.yaml has under `{section}`\n{report}"
    );
}

#[tokio::test]
async fn every_case_that_is_no_quirk_is_answered_as_the_reference_does() {
    let report = cases(PLAIN, &[]).await;
    assert!(failed(&report).is_empty(), "{report}");
    assert!(passed(&report) > 60, "too few cases were run\n{report}");
}

#[tokio::test]
#[ignore = "tests/nightly runs it"]
async fn an_overlay_without_fields_changes_no_answer() {
    let overlay = rule_file("empty_overlay: true\n");
    let overlay = ("RULES_OVERLAY", overlay.path().to_str().expect("a path of text"));
    let report = cases(PLAIN, &[overlay]).await;
    assert!(failed(&report).is_empty(), "{report}");
    assert!(passed(&report) > 60, "too few cases were run\n{report}");
    assert_differs_exactly("cases", &cases(QUIRKS, &[overlay]).await);
}

#[tokio::test]
async fn every_rule_file_that_is_no_quirk_is_taken_or_refused_as_the_reference_does() {
    let report = rule_files(PLAIN).await;
    assert!(failed(&report).is_empty(), "{report}");
    assert!(passed(&report) > 60, "too few rule files were read\n{report}");
}

#[tokio::test]
async fn the_quirks_answered_differently_are_those_written_down() {
    assert_differs_exactly("cases", &cases(QUIRKS, &[]).await);
}

#[tokio::test]
async fn one_redis_server_gives_the_same_answers() {
    let server = Single::start(&[]).await;
    let url = server.address().to_string();
    assert_differs_exactly("cases", &cases_on_redis(Shape::Single, &url, &[server]).await);
}

#[tokio::test]
async fn leases_change_no_answer_but_what_remains_by_as_much_as_they_hold() {
    let server = Single::start(&[]).await;
    let url = server.address().to_string();
    let variables = [("REDIS_URL", &*url), ("STORE_DEADLINE", "5s"), ("REPLICAS", "1"), ("LEASE_DEFAULT", "5%,1m")];
    let report = cases(&["--leased", "5"], &variables).await;
    let written = &differences()["cases"];
    // Cases that differ by one hit pass.
    let differ: Vec<_> = failed(&report).into_iter().filter(|name| !written.contains_key(*name)).collect();
    assert!(differ.is_empty(), "{differ:?}\n{report}");
    assert!(passed(&report) > 60, "too few cases were run\n{report}");
}

#[tokio::test]
#[ignore = "tests/nightly runs it"]
async fn a_redis_server_named_by_sentinels_gives_the_same_answers() {
    let set = Sentinel::start().await;
    assert_differs_exactly("cases", &cases_on_redis(Shape::Sentinel, &set.addresses(), set.servers()).await);
}

#[tokio::test]
async fn a_redis_cluster_gives_the_same_answers() {
    let cluster = Cluster::shared().await;
    assert_differs_exactly("cases", &cases_on_redis(Shape::Cluster, &cluster.addresses(), cluster.nodes()).await);
}

#[tokio::test]
async fn the_rule_files_taken_differently_are_those_written_down() {
    assert_differs_exactly("config", &rule_files(QUIRKS).await);
}

#[test]
fn every_difference_is_told_to_those_who_move_here() {
    let page = std::fs::read_to_string(repository("docs/compatibility.md")).expect("it reads");
    for name in differences().values().flat_map(BTreeMap::keys) {
        assert!(page.contains(&format!("`{name}`")), "docs/compatibility.md does not name `{name}`");
    }
}
