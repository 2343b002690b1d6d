//! The conformance cases, with rules from a control plane.

use std::collections::{BTreeMap, BTreeSet};

use futures_util::{StreamExt, stream};
use prost_types::value::Kind;
use prost_types::{ListValue, Struct};
use serde_json::Value;
use tidegate::proto::ratelimit::config::ratelimit::v3::{
    RateLimitConfig, RateLimitDescriptor, RateLimitPolicy, RateLimitReplace, RateLimitUnit,
};

use super::plane::{Plane, response, start};
use crate::conformance::{AT_ONCE, PLAIN, QUIRKS, differences, failed, passed, run};
use crate::support::rule_file;

/// Cases that a resource cannot state: it has no `share_threshold`, no `value_to_metric` and no second document.
const LEFT_OUT: [&str; 8] = [
    "metadata-lost-with-metric-flags",
    "metric-flags-do-not-change-decisions",
    "share-threshold-exact-stays-apart",
    "share-threshold-literal-pattern",
    "share-threshold-middle-star",
    "share-threshold-only-where-set",
    "share-threshold-two-in-one-request",
    "yaml-second-document-ignored",
];

/// Keys of a rule file that a resource cannot state.
const UNSTATABLE: [&str; 2] = ["share_threshold", "value_to_metric"];

fn text(value: &Value, key: &str) -> String {
    match &value[key] {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

fn flag(value: &Value, key: &str) -> bool {
    value[key].as_bool().unwrap_or_default()
}

fn items<'a>(value: &'a Value, key: &str) -> &'a [Value] {
    value[key].as_array().map_or(&[], Vec::as_slice)
}

fn mapping(value: &Value) -> Struct {
    let fields = value.as_object().expect("a mapping").iter();
    Struct { fields: fields.map(|(name, value)| (name.clone(), any(value))).collect() }
}

fn any(value: &Value) -> prost_types::Value {
    let kind = match value {
        Value::Null => Kind::NullValue(0),
        Value::Bool(value) => Kind::BoolValue(*value),
        Value::Number(value) => Kind::NumberValue(value.as_f64().expect("a number")),
        Value::String(value) => Kind::StringValue(value.clone()),
        Value::Array(values) => Kind::ListValue(ListValue { values: values.iter().map(any).collect() }),
        Value::Object(_) => Kind::StructValue(mapping(value)),
    };
    prost_types::Value { kind: Some(kind) }
}

fn policy(value: &Value) -> RateLimitPolicy {
    RateLimitPolicy {
        unit: RateLimitUnit::from_str_name(&text(value, "unit").to_uppercase()).unwrap_or_default().into(),
        requests_per_unit: u32::try_from(value["requests_per_unit"].as_u64().unwrap_or_default()).expect("32 bits"),
        unlimited: flag(value, "unlimited"),
        name: text(value, "name"),
        replaces: items(value, "replaces").iter().map(|it| RateLimitReplace { name: text(it, "name") }).collect(),
    }
}

/// The descriptor as a resource has it; `None` if it cannot be stated there.
fn descriptor(value: &Value) -> Option<RateLimitDescriptor> {
    if UNSTATABLE.iter().any(|key| !value[key].is_null()) {
        return None;
    }
    Some(RateLimitDescriptor {
        key: text(value, "key"),
        value: text(value, "value"),
        rate_limit: value["rate_limit"].is_object().then(|| policy(&value["rate_limit"])),
        descriptors: items(value, "descriptors").iter().map(descriptor).collect::<Option<_>>()?,
        shadow_mode: flag(value, "shadow_mode"),
        detailed_metric: flag(value, "detailed_metric"),
        quota_mode: flag(value, "quota_mode"),
        metadata: value["metadata"].is_object().then(|| mapping(&value["metadata"])),
    })
}

/// Runs this half of every group, each on a server that got its rules over xDS. Returns what the runner said, and the cases that
/// cannot be stated.
async fn cases(half: &[&str], more: &[(&str, &str)]) -> (String, BTreeSet<String>) {
    let groups = run(&[&["--groups"], half].concat()).await;
    let cases = stream::iter(groups.lines()).map(|group| cases_of(group, half, more)).buffered(AT_ONCE);
    let (reports, left_out): (Vec<_>, Vec<_>) = cases.unzip().await;
    (reports.concat(), left_out.into_iter().flatten().collect())
}

async fn cases_of(group: &str, half: &[&str], more: &[(&str, &str)]) -> (String, BTreeSet<String>) {
    let files = run(&[&["--documents", "--group", group], half].concat()).await;
    let files: BTreeMap<String, Value> = serde_json::from_str(&files).expect("a mapping");
    let mut resources = Vec::new();
    let mut left_out = BTreeSet::new();
    for (file, document) in &files {
        let (case, _) = file.split_once("--").expect("the name of a case");
        let descriptors = items(document, "descriptors").iter().map(descriptor).collect::<Option<_>>();
        match descriptors.filter(|_| document.is_object()) {
            Some(descriptors) => {
                resources.push(RateLimitConfig { name: file.clone(), domain: text(document, "domain"), descriptors });
            }
            None => {
                left_out.insert(case.to_owned());
            }
        }
    }
    let variables = run(&["--env", "--group", group]).await;
    let variables = variables.lines().filter_map(|line| line.split_once('=')).chain(more.iter().copied());
    let forced = [("FORCE_START_WITHOUT_INITIAL_CONFIG", "true")];
    let mut plane = Plane::start().await;
    let server = start(&plane.variables(), &variables.chain(forced).collect::<Vec<_>>()).await;
    let (stream, _) = plane.stream().await;
    stream.send(response("1", "n1", &resources)).expect("it is sent");
    let answered = plane.request().await;
    assert_eq!(answered.error_detail, None, "group {group}");
    let names = left_out.iter().map(String::as_str).collect::<Vec<_>>().join("|");
    let only = format!("^(?!({names})$)");
    let only: &[&str] = if names.is_empty() { &[] } else { &["--only", &only] };
    let said = run(&[&["--addr", &server.grpc.to_string(), "--group", group], half, only].concat()).await;
    (format!("group {group}\n{said}{}", server.log()), left_out)
}

async fn assert_same_answers(more: &[(&str, &str)]) {
    let (plain, mut left_out) = cases(PLAIN, more).await;
    assert!(failed(&plain).is_empty(), "{plain}");
    assert!(passed(&plain) > 50, "too few cases were run\n{plain}");
    let (quirks, more_left_out) = cases(QUIRKS, more).await;
    left_out.extend(more_left_out);
    assert_eq!(left_out.iter().map(String::as_str).collect::<Vec<_>>(), LEFT_OUT);
    let written = &differences()["cases"];
    let written: Vec<_> = written.keys().map(String::as_str).filter(|case| !LEFT_OUT.contains(case)).collect();
    assert_eq!(failed(&quirks), written, "{quirks}");
}

#[tokio::test]
async fn rules_from_a_control_plane_give_the_answers_of_rule_files() {
    assert_same_answers(&[]).await;
}

#[tokio::test]
async fn an_empty_overlay_over_rules_from_a_control_plane_changes_no_answer() {
    let overlay = rule_file("empty_overlay: true\n");
    assert_same_answers(&[("RULES_OVERLAY", overlay.path().to_str().expect("a path of text"))]).await;
}
