//! A real Prometheus that watches real runs, and the alerts and the dashboard that are made of what it sees.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::PathBuf;

use serde_json::Value;
use tidegate::telemetry::metrics::{MetricKind, TABLE};
use tokio::process::Command;

use crate::support::{output, repository, tool};

mod arithmetic;
mod run;
mod scrape;

const ALERTS: &str = "helm/tidegate/files/alerts.yaml";
const DASHBOARD: &str = "helm/tidegate/files/dashboard.json";

/// What a YAML file says.
async fn yaml(path: &str) -> Value {
    let mut command = Command::new(tool("python"));
    command.args(["-c", "import json, sys, yaml; json.dump(yaml.safe_load(open(sys.argv[1])), sys.stdout)"]);
    let (status, text, errors) = output(command.arg(repository(path))).await;
    assert!(status.success(), "{path}: {errors}");
    serde_json::from_str(&text).expect("JSON")
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_else(|| panic!("no text: {value}"))
}

/// The rule of each alert, by its name.
async fn alerts() -> BTreeMap<String, Value> {
    let file = yaml(ALERTS).await;
    let rules = list(&file["groups"]).iter().flat_map(|group| list(&group["rules"]));
    rules.map(|rule| (text(&rule["alert"]).to_owned(), rule.clone())).collect()
}

fn dashboard() -> Value {
    let text = fs::read_to_string(repository(DASHBOARD)).expect("it reads");
    serde_json::from_str(&text).expect("JSON")
}

/// The title and text of each query of the dashboard.
fn queries() -> Vec<(String, String)> {
    let dashboard = dashboard();
    let of = |title: &Value, target: &Value| (text(title).to_owned(), text(&target["expr"]).to_owned());
    let panels = list(&dashboard["panels"]).iter();
    let shown = panels.flat_map(|panel| list(&panel["targets"]).iter().map(|target| of(&panel["title"], target)));
    let notes = list(&dashboard["annotations"]["list"]).iter().map(|note| of(&note["name"], note));
    shown.chain(notes).collect()
}

/// The names of metrics in a query, each as the table has it.
fn metrics(query: &str) -> BTreeSet<&str> {
    let words = query.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    let ours = words.filter(|word| ["tidegate_", "ratelimit_", "process_"].iter().any(|begin| word.starts_with(begin)));
    ours.map(|word| ["_bucket", "_sum", "_count"].iter().find_map(|end| histogram(word, end)).unwrap_or(word)).collect()
}

fn histogram<'a>(series: &'a str, suffix: &str) -> Option<&'a str> {
    let name = series.strip_suffix(suffix)?;
    TABLE.iter().any(|metric| metric.kind == MetricKind::Histogram && metric.name == name).then_some(name)
}

/// The files of the alerts' own tests.
fn alert_tests() -> Vec<PathBuf> {
    let files = fs::read_dir(repository("tests/alerts")).expect("it is there");
    files.map(|file| file.expect("an entry").path()).collect()
}

async fn promtool(arguments: &[&str]) -> (bool, String) {
    let (status, said, errors) = output(Command::new("promtool").args(arguments)).await;
    (status.success(), said + &errors)
}

#[tokio::test]
async fn every_alert_says_what_it_means_to_whom_and_where_to_read_on() {
    let file = repository(ALERTS);
    let (is_well, said) = promtool(&["check", "rules", file.to_str().expect("a path of text")]).await;
    assert!(is_well, "{said}");
    for (name, rule) in alerts().await {
        assert!(["critical", "warning"].contains(&text(&rule["labels"]["severity"])), "{name}");
        assert!(rule["for"].is_string(), "{name} does not say how long");
        let [summary, description] = ["summary", "description"].map(|part| text(&rule["annotations"][part]));
        assert!(!summary.is_empty() && description.ends_with('.'), "{name}: {summary} {description}");
        assert_eq!(text(&rule["annotations"]["runbook"]), format!("docs/operations.md#{}", name.to_lowercase()));
    }
}

#[tokio::test]
async fn every_alert_fires_when_it_should_and_is_silent_when_it_should_not() {
    let files = alert_tests();
    let paths: Vec<_> = files.iter().map(|path| path.to_str().expect("a path of text")).collect();
    for path in &paths {
        let (is_well, said) = promtool(&["test", "rules", path]).await;
        assert!(is_well, "{said}");
    }
    let (mut fires, mut is_silent) = (BTreeSet::new(), BTreeSet::new());
    for path in paths {
        let file = yaml(path).await;
        for tried in list(&file["tests"]).iter().flat_map(|test| list(&test["alert_rule_test"])) {
            let name = text(&tried["alertname"]).to_owned();
            if list(&tried["exp_alerts"]).is_empty() {
                is_silent.insert(name)
            } else {
                fires.insert(name)
            };
        }
    }
    let names: BTreeSet<_> = alerts().await.into_keys().collect();
    assert_eq!(fires, names, "left, the alerts that a test in tests/alerts sees fire; right, those that there are");
    assert_eq!(
        is_silent, names,
        "left, the alerts that a test in tests/alerts sees silent; right, those that there are"
    );
}

#[tokio::test]
async fn alerts_and_dashboard_are_made_of_metrics_that_there_are_and_the_dashboard_of_all() {
    let known: BTreeSet<_> = TABLE.iter().map(|metric| metric.name).collect();
    let queries = queries();
    let shown: BTreeSet<_> = queries.iter().flat_map(|(_, query)| metrics(query)).collect();
    assert_eq!(shown, known, "left, the metrics that the dashboard shows; right, those that there are");
    for (name, rule) in alerts().await {
        for metric in metrics(text(&rule["expr"])) {
            assert!(known.contains(metric), "{name} asks for {metric}, which is no metric");
        }
    }
    let dashboard = dashboard();
    for variable in list(&dashboard["templating"]["list"]).iter().filter(|variable| variable["type"] == "query") {
        assert!(metrics(text(&variable["definition"])).is_subset(&known), "{variable}");
    }
}

/// Whatever names a source names the chosen one.
fn assert_source(part: &Value) {
    if let Some(source) = part.get("datasource") {
        assert_eq!(source["uid"], "${datasource}", "{part}");
    }
    match part {
        Value::Array(parts) => parts.iter().for_each(assert_source),
        Value::Object(parts) => parts.values().for_each(assert_source),
        _ => {}
    }
}

#[test]
fn the_dashboard_asks_the_chosen_source_and_its_panels_do_not_overlap() {
    let dashboard = dashboard();
    let variables = list(&dashboard["templating"]["list"]);
    assert_eq!((text(&variables[0]["name"]), text(&variables[0]["type"])), ("datasource", "datasource"));
    assert_source(&dashboard);
    let mut taken = BTreeMap::new();
    let mut numbers = BTreeSet::new();
    for panel in list(&dashboard["panels"]) {
        assert!(numbers.insert(panel["id"].as_u64()), "two panels have the number {}", panel["id"]);
        let [x, y, w, h] = ["x", "y", "w", "h"].map(|side| panel["gridPos"][side].as_u64().expect("a number"));
        assert!(x + w <= 24, "{} is beyond the border", panel["title"]);
        for place in (x..x + w).flat_map(|column| (y..y + h).map(move |row| (column, row))) {
            let other = taken.insert(place, &panel["title"]);
            assert_eq!(other, None, "{} stands there too", panel["title"]);
        }
        let is_row = panel["type"] == "row";
        assert_eq!(list(&panel["targets"]).is_empty(), is_row, "{}", panel["title"]);
    }
}
