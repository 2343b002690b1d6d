//! `tidegate top`, over several instances, and what no rule matches.

use std::collections::BTreeSet;
use std::net::{SocketAddr, TcpListener};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::{call_with, over, rule_file};
use crate::http::{self, said};
use crate::support::{Tidegate, directory, eventually};

mod terminal;

/// Text before each table in a terminal: it moves to the first place, and erases what is there.
const CLEAR: &str = "\u{1b}[H\u{1b}[2J";

const RULES: &str = "domain: edge
descriptors:
  - { key: user, rate_limit: { unit: year, requests_per_unit: 3 } }
  - key: plan
    value: gold
    descriptors:
      - { key: path, rate_limit: { unit: year, requests_per_unit: 1000 } }
  - { key: api_key, rate_limit: { unit: year, requests_per_unit: 1000 } }
---
domain: mesh
descriptors:
  - key: source
    descriptors:
      - { key: destination, rate_limit: { unit: year, requests_per_unit: 1000 } }
";

fn top(instances: &[SocketAddr], more: &[&str]) -> (Option<i32>, String, String) {
    over(instances, &[&["top"], more].concat())
}

/// Two files of rules, for one file has one domain.
fn rule_files() -> tempfile::TempDir {
    let (edge, mesh) = RULES.split_once("---\n").expect("two domains");
    directory([("edge.yaml", edge), ("mesh.yaml", mesh)])
}

#[tokio::test]
async fn those_who_are_refused_most_are_shown_over_all_instances_and_a_missing_one_is_named() {
    let rules = rule_files();
    let one = Tidegate::start(rules.path(), &[]).await;
    let mut other = Tidegate::start(rules.path(), &[]).await;
    let both = [one.debug, other.debug];
    call_with(&one, "edge", "8", &["user=ann"]);
    call_with(&one, "edge", "7", &["user=bob"]);
    call_with(&other, "edge", "7", &["user=bob"]);
    call_with(&other, "edge", "400", &["plan=gold,path=/"]);
    let (code, told, _) = top(&both, &[]);
    assert_eq!(code, Some(0), "{told}");
    let lines: Vec<Vec<&str>> = told.lines().skip(1).map(|line| line.split_whitespace().collect()).collect();
    assert_eq!((lines[0][0], &lines[0][3..]), ("8", &["edge.user", "user=bob"][..]), "{told}");
    assert_eq!((lines[1][0], &lines[1][3..]), ("5", &["edge.user", "user=ann"][..]), "{told}");
    let (_, told, _) = top(&both, &["--json"]);
    let page: serde_json::Value = serde_json::from_str(&told).unwrap_or_else(|_| panic!("{told}"));
    let (bob, asked) = (&page["top"][0], &page["top"][0]["asked"]);
    assert_eq!(bob["refused"], serde_json::json!({ "least": 8, "most": 8 }), "{told}");
    // Each refusal is counted, and one request in 16 beside them: more than 14 were certainly not made.
    let least = asked["least"].as_u64().unwrap_or_default();
    assert!((8..=14).contains(&least) && asked["most"].is_null(), "{told}");
    assert!(asked["estimate"].as_u64().is_some_and(|estimate| estimate >= least), "{told}");
    assert_eq!(page["others"], serde_json::json!({ "refused": 0, "asked": null }), "{told}");
    let (_, told, _) = top(&both, &["--sort", "asked", "--most", "1"]);
    assert!(told.lines().nth(1).is_some_and(|line| line.contains(" about ")), "{told}");
    assert!(told.lines().nth(1).is_some_and(|line| line.ends_with("plan=gold,path=/")), "{told}");
    let (_, told, _) = top(&both, &["--rule", "mesh.source.destination"]);
    assert!(told.contains("No such request of the last minute is known"), "{told}");

    other.kill();
    other.ended().await;
    let silent = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let three = [one.debug, other.debug, silent.local_addr().expect("an address")];
    let (code, told, errors) = top(&three, &["--timeout", "500ms"]);
    assert_eq!((code, told.contains("user=ann")), (Some(0), true), "{told}");
    assert!(errors.contains(&format!("{} is missing below: no debug listener", other.debug)), "{errors}");
    assert!(errors.contains(&format!("{} is missing below: no answer within 500ms", three[2])), "{errors}");
    assert_eq!(top(&three[1..], &["--timeout", "500ms"]).0, Some(2));
    let wrong = http::get(one.debug, "/v1/top?most=0").await;
    assert!(wrong.status == 400 && wrong.contains("most is a number from 1 to 1000"), "{wrong}");
}

/// Waits until the present minute, in which instances count, goes on for 20 s at least.
async fn early_in_a_minute() {
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).expect("it is later");
    let passed = since_1970.as_secs() % 60;
    if passed > 40 {
        tokio::time::sleep(Duration::from_secs(60 - passed)).await;
    }
}

#[tokio::test]
async fn a_sum_over_instances_that_do_not_list_the_same_descriptors_has_bounds() {
    let rules = rule_files();
    let one = Tidegate::start(rules.path(), &[]).await;
    let other = Tidegate::start(rules.path(), &[]).await;
    let both = [one.debug, other.debug];
    early_in_a_minute().await;
    for number in 0..10_u32 {
        // Each is refused eleven times in all. The rule admits the first three calls.
        call_with(&one, "edge", &(3 + number + 1).to_string(), &[&format!("user=u{number}")]);
        call_with(&other, "edge", &(3 + 10 - number).to_string(), &[&format!("user=u{number}")]);
    }
    let (code, told, errors) = top(&both, &["--most", "1", "--json"]);
    assert_eq!(code, Some(0), "{errors}");
    let page: serde_json::Value = serde_json::from_str(&told).unwrap_or_else(|_| panic!("{told}"));
    // Each lists four: those with 10, 9, 8 and 7. Any other has 6 at most.
    assert_eq!(page["top"][0]["refused"], serde_json::json!({ "least": 10, "most": 16 }), "{told}");
    assert_eq!((page["top"].as_array().map(Vec::len), &page["others"]["refused"]), (Some(1), &16.into()), "{told}");
    let instances: Vec<String> = BTreeSet::from(both).iter().map(ToString::to_string).collect();
    assert_eq!((&page["instances"], &page["missing"]), (&serde_json::json!(instances), &serde_json::json!([])));
    let (_, told, _) = top(&both, &["--most", "1"]);
    let lines: Vec<Vec<&str>> = told.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!((lines[1][0], lines[2][0], &lines[2][1..3]), ("10-16", "16", &["at", "most,"][..]), "{told}");

    let (_, told, _) = top(&both, &["--most", "10"]);
    assert_eq!(told.matches("\n              11 ").count(), 10, "{told}");
    assert!(!told.contains("each other descriptor"), "{told}");
    let (code, _, errors) = top(&both, &["--json", "--unmatched"]);
    assert!(code == Some(2) && errors.contains("--unmatched"), "{errors}");
}

#[tokio::test]
async fn what_no_rule_matches_is_shown_with_the_nearest_rule_and_logged() {
    let rules = rule_files();
    let one = Tidegate::start(rules.path(), &[]).await;
    let other = Tidegate::start(rules.path(), &[]).await;
    let both = [one.debug, other.debug];
    for (domain, descriptor) in [
        ("edge", "usr=ann"),
        ("edge", "user=ann,path=/"),
        ("edge", "plan=gold"),
        ("edge", "plan=free,path=/"),
        ("edge", "path=/"),
        ("edge", "tenant=a,user=ann"),
        ("edge", "path=/,plan=gold"),
        ("edge", "source=a,destination=b"),
        ("edge", "colour=red"),
        ("egde", "user=ann"),
    ] {
        call_with(&one, domain, "2", &[descriptor]);
        call_with(&other, domain, "1", &[descriptor]);
    }
    call_with(&one, "edge", "4", &["user=ann", "api_key=k"]);
    said(one.grpc, "GET / HTTP/1.1\r\nhost: localhost\r\n\r\n").await;
    let http1 = "used HTTP/1 on the gRPC port since the start: 1.";
    eventually("the connection is counted", async || top(&both, &["--unmatched"]).1.contains(http1).then_some(()))
        .await;

    let (code, told, _) = top(&both, &["--unmatched"]);
    assert_eq!(code, Some(0));
    for (shape, nearest) in [
        ("edge  usr", "other key: the rule edge.user has the key user where this descriptor has usr"),
        ("edge  user, path", "the rule edge.user has no level for path"),
        ("edge  plan", "the rule edge.plan_gold.path also needs path"),
        ("edge  path", "the rule edge.plan_gold.path also needs plan"),
        ("edge  tenant, user", "the rule edge.user has no level for tenant"),
        (
            "edge  plan, path",
            "other value, usually intended: the rule edge.plan_gold.path has these keys, and matches other values",
        ),
        ("edge  path, plan", "the rule edge.plan_gold.path has these keys in another order: plan, path"),
        ("edge  source, destination", "a rule of another domain has these keys: mesh.source.destination"),
        ("edge  colour", "no rule: no similar rule is known"),
        ("egde  any descriptor", "no rule file has this domain; did you mean edge?"),
    ] {
        let found = told.split("\n\n").find(|found| found.lines().next() == Some(shape));
        let found = found.unwrap_or_else(|| panic!("{shape}: {told}"));
        assert!(found.contains("not limited: 3 ") && found.contains(nearest), "{found}");
        assert!(found.contains(&both[0].to_string()) && found.contains(&both[1].to_string()), "{found}");
    }
    let shapes: Vec<&str> = told.split("\n\n").filter_map(|found| found.lines().next()).take(10).collect();
    assert_eq!(shapes[8..], ["edge  colour", "edge  plan, path"], "mistakes come first: {told}");
    assert!(told.contains("edge  api_key  missing in 27 of 31 examined requests (87%)"), "{told}");
    assert!(!told.contains("ann") && !told.contains("gold,"), "no value is shown: {told}");
    let (code, once, errors) = top(&both, &["--unmatched", "--once"]);
    assert!(code == Some(0) && once.contains("edge  usr\n"), "--once changes nothing: {once}{errors}");
    let (_, told, _) = top(&both, &["--unmatched", "--domain", "egde"]);
    assert!(told.contains("egde  any") && !told.contains("edge  usr"), "{told}");
    let log = one.log();
    assert!(
        log.contains("requests.unmatched")
            && log.contains("there are 0 others")
            && log.contains("tidegate top --unmatched"),
        "{log}"
    );
    assert_eq!(log.matches("requests.unmatched").count(), 1, "one line a minute: {log}");
}

#[tokio::test]
async fn what_matched_no_rule_is_forgotten_when_the_rules_change() {
    let rules =
        rule_file("domain: edge\ndescriptors:\n  - { key: user, rate_limit: { unit: year, requests_per_unit: 9 } }\n");
    let server = Tidegate::start(rules.path(), &[]).await;
    call_with(&server, "edge", "1", &["usr=ann"]);
    assert!(top(&[server.debug], &["--unmatched"]).1.contains("edge  usr"));
    std::fs::write(
        rules.path(),
        "domain: edge\ndescriptors:\n  - { key: usr, rate_limit: { unit: year, requests_per_unit: 9 } }\n",
    )
    .expect("it is written");
    eventually("the rules are loaded", async || {
        call_with(&server, "edge", "1", &["usr=ann"]);
        top(&[server.debug], &["--unmatched"]).1.contains("No unmatched descriptor").then_some(())
    })
    .await;
}
