//! Metadata and metrics of a decision name one rule and one origin, and it is the one that `docs/rules.md` defines.

use std::collections::BTreeMap;

use proptest::prelude::*;
use prost_types::Struct;
use prost_types::value::Kind;
use tidegate::edge::answer::Answers;
use tidegate::model::{Decision, Micros, Outcome, Request};
use tidegate::rules::Rule;
use tidegate::telemetry::Telemetry;

use super::failing::Instance;
use crate::world::{Limiter, descriptor, futures, request};

/// Every kind of rule, in every policy for a store that does not answer.
const RULES: &str = "domain: d
on_store_failure: open
descriptors:
  - { key: three, rate_limits: [{ name: small, unit: day, requests_per_unit: 3 }, { name: large, unit: week, requests_per_unit: 50 }] }
  - { key: one, rate_limit: { name: single, unit: day, requests_per_unit: 1 } }
  - { key: quota, quota_mode: true, rate_limit: { unit: day, requests_per_unit: 2 } }
  - { key: other_quota, quota_mode: true, rate_limit: { unit: day, requests_per_unit: 4 } }
  - { key: watched, shadow_mode: true, rate_limit: { name: watched, unit: day, requests_per_unit: 1 } }
  - { key: hidden, expose: false, rate_limit: { unit: day, requests_per_unit: 2 } }
  - { key: denied, deny: true }
  - { key: exempt, exempt: true }
  - { key: free, rate_limit: { unlimited: true } }
  - { key: closed, on_store_failure: closed, rate_limit: { unit: day, requests_per_unit: 5 } }
  - { key: local, on_store_failure: local, rate_limit: { unit: day, requests_per_unit: 2 } }
  - { key: error, on_store_failure: error, rate_limit: { unit: day, requests_per_unit: 5 } }
";
const KEYS: [&str; 13] = [
    "three",
    "one",
    "quota",
    "other_quota",
    "watched",
    "hidden",
    "denied",
    "exempt",
    "free",
    "closed",
    "local",
    "error",
    "no_rule",
];

/// Rule and provenance of a decision, in one of its views.
type View = (Option<String>, String);

/// Returns what the dynamic metadata says; `None` for an error, which has none.
fn of_metadata(request: &Request, decision: &Decision<'_>) -> Option<View> {
    let answers = Answers { decision_metadata: true, ..Answers::default() };
    let metadata = answers.respond(request, decision).ok()?.dynamic_metadata.expect("it is on");
    let Some(Kind::StructValue(Struct { fields })) = &metadata.fields["decision"].kind else { panic!("{metadata:?}") };
    let text = |name: &str| match &fields.get(name)?.kind {
        Some(Kind::StringValue(text)) => Some(text.clone()),
        other => panic!("{other:?}"),
    };
    Some((text("rule"), text("provenance").expect("it is always there")))
}

/// Returns what the metric of decisions says of this one.
fn of_metric(limiter: &Limiter, request: &Request, decision: &Decision<'_>) -> View {
    let telemetry = Telemetry::new(0.8, Micros::ZERO);
    let rules = limiter.rules();
    let all = rules.rules();
    telemetry.rules_loaded(1, &rules.domains(), all.iter().map(|rule| Rule::about(rule)), Micros::ZERO);
    telemetry.observe(request, decision, None);
    let page = telemetry.page();
    let mut samples = page.lines().filter(|line| line.starts_with("tidegate_decisions_total{"));
    let (Some(sample), None) = (samples.next(), samples.next()) else { panic!("one decision: {page}") };
    let labels: BTreeMap<&str, &str> = sample
        .split(['{', ',', '}'])
        .filter_map(|pair| pair.split_once('='))
        .map(|(name, value)| (name, value.trim_matches('"')))
        .collect();
    assert!(sample.ends_with(" 1"), "{sample}");
    let rule = labels.get("rule").filter(|rule| !rule.is_empty()).map(|rule| format!("d.{rule}"));
    (rule, labels["provenance"].to_owned())
}

proptest! {
    #[test]
    fn metadata_and_metrics_name_the_same_rule_and_origin(
        requests in prop::collection::vec(prop::collection::vec((0..KEYS.len(), any::<bool>()), 1..4), 1..12),
    ) {
        let instance = Instance::of(1);
        let limiter = instance.limiter(RULES);
        for keys in requests {
            let value = |(key, is_down): &(usize, bool)| format!("{}={}", KEYS[*key], if *is_down { "down" } else { "up" });
            let request = request(keys.iter().map(|key| descriptor(&value(key))));
            let decision = futures(limiter.decide(&request, None));
            let metric = of_metric(&limiter, &request, &decision);
            match of_metadata(&request, &decision) {
                Some(metadata) => prop_assert_eq!(metadata, metric, "{:?}", keys),
                None => prop_assert_eq!((metric.1.as_str(), decision.outcome), ("error", Outcome::Failed)),
            }
        }
    }
}

/// Returns what the dynamic metadata says of each limit that refuses in shadow mode: rule, limit, quota and provenance.
fn shadow_refusals(limiter: &Limiter, descriptors: &[&str]) -> Vec<String> {
    let request = request(descriptors.iter().map(|text| descriptor(text)));
    let decision = futures(limiter.decide(&request, None));
    let answers = Answers { decision_metadata: true, ..Answers::default() };
    let answer = answers.respond(&request, &decision).expect("no limit has the policy error");
    let metadata = answer.dynamic_metadata.expect("it is on");
    let Some(Kind::StructValue(Struct { fields })) = &metadata.fields["decision"].kind else { panic!("{metadata:?}") };
    let Some(shadow) = fields.get("shadow") else { return Vec::new() };
    let Some(Kind::ListValue(shadow)) = &shadow.kind else { panic!("{shadow:?}") };
    let told = shadow.values.iter().map(|refusal| {
        let Some(Kind::StructValue(Struct { fields })) = &refusal.kind else { panic!("{refusal:?}") };
        let text = |name: &str| match fields.get(name).map(|value| &value.kind) {
            Some(Some(Kind::StringValue(text))) => text.clone(),
            None => "-".to_owned(),
            other => panic!("{other:?}"),
        };
        ["rule", "limit", "quota", "provenance"].map(text).join(" ")
    });
    told.collect()
}

/// Rules of which some refuse in shadow mode only.
const SHADOWED: &str = "domain: d
on_store_failure: closed
descriptors:
  - { key: one, rate_limit: { unit: day, requests_per_unit: 1 } }
  - { key: watched, shadow_mode: true, rate_limit: { name: watched, unit: day, requests_per_unit: 1 } }
  - { key: two, rate_limits: [{ unit: day, requests_per_unit: 3 }, { unit: day, requests_per_unit: 1, shadow_mode: true }] }
  - { key: quota, quota_mode: true, rate_limit: { unit: day, requests_per_unit: 1 } }
  - { key: soft_quota, quota_mode: true, shadow_mode: true, rate_limit: { unit: day, requests_per_unit: 1 } }
  - { key: denied, deny: true }
";

#[test]
fn the_metadata_names_each_limit_that_would_refuse_without_a_shadow_mode() {
    let instance = Instance::of(1);
    let limiter = instance.limiter(SHADOWED);
    let none: &[&str] = &[];
    for (descriptors, expected) in [
        (&["watched=up", "two=up", "soft_quota=up"][..], none),
        (&["watched=up"], &["d.watched watched 1 per day store"]),
        // Each limit is told once, however many counters of it a client names.
        (&["watched=up", "two=up", "watched=up"], &["d.watched watched 1 per day known", "d.two - 1 per day store"]),
        (&["watched=down"], &["d.watched watched 1 per day closed"]),
        // A request that is refused anyway.
        (&["one=up"], none),
        (&["one=up"], none),
        (&["one=up", "watched=up"], &["d.watched watched 1 per day known"]),
        // Quotas refuse together: one of them has room.
        (&["soft_quota=up", "quota=new"], none),
        (&["soft_quota=up", "quota=new"], &["d.soft_quota - 1 per day known"]),
        (&["denied=up"], none),
    ] {
        assert_eq!(shadow_refusals(&limiter, descriptors), expected, "{descriptors:?}");
    }
}

#[test]
fn a_client_makes_the_list_of_shadow_refusals_no_longer_than_16() {
    let rules: String = (0..40)
        .map(|n| format!("  - {{ key: k{n}, shadow_mode: true, rate_limit: {{ unit: day, requests_per_unit: 0 }} }}\n"))
        .collect();
    let instance = Instance::of(1);
    let limiter = instance.limiter(&format!("domain: d\ndescriptors:\n{rules}"));
    let descriptors: Vec<String> = (0..40).map(|n| format!("k{n}=up")).collect();
    let descriptors: Vec<&str> = descriptors.iter().map(String::as_str).collect();
    let told = shadow_refusals(&limiter, &descriptors);
    assert_eq!((told.len(), &*told[15]), (16, "d.k15 - 0 per day store"));
}

/// Returns the rule and the provenance of a decision on these descriptors.
fn decided(limiter: &Limiter, descriptors: &[&str]) -> String {
    let request = request(descriptors.iter().map(|text| descriptor(text)));
    let decision = futures(limiter.decide(&request, None));
    let metric = of_metric(limiter, &request, &decision);
    if let Some(metadata) = of_metadata(&request, &decision) {
        assert_eq!(metadata, metric);
    }
    let (rule, provenance) = metric;
    format!("{} {provenance}", rule.unwrap_or_default())
}

#[test]
fn the_deciding_rule_is_the_one_that_the_documentation_defines() {
    let instance = Instance::of(1);
    let limiter = instance.limiter(RULES);
    for (descriptors, expected) in [
        (&["one=up", "denied=up"][..], "d.denied rule"),
        (&["no_rule=up"], " none"),
        (&["free=up"], " none"),
        // Admitted: the limit that the headers describe, the one with the least remaining.
        (&["three=up", "one=up"], "d.one store"),
        // Refused: the first that refuses, whatever remains of others.
        (&["three=up", "one=up"], "d.one store"),
        (&["one=up", "three=new"], "d.one known"),
        // Admitted: a limit that could not be checked comes first.
        (&["three=fresh", "one=down"], "d.one open"),
        (&["three=fresh", "closed=down"], "d.closed closed"),
        (&["three=fresh", "error=down"], "d.error error"),
        // A shadow rule is described like any other, and refuses nothing.
        (&["watched=up", "three=last"], "d.watched store"),
        (&["watched=up", "three=last"], "d.watched store"),
        (&["watched=up", "one=up"], "d.one known"),
    ] {
        assert_eq!(decided(&limiter, descriptors), expected, "{descriptors:?}");
    }
}
