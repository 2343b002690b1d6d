//! Tests of the reader: accepted files, refused files and messages.

use std::fmt::Write as _;
use std::sync::Arc;

use proptest::prelude::*;
use serde_json::json;

use super::{DescriptorNode, Document, LimitNode, LimitsNode, read};
use crate::algorithm::Algorithm;
use crate::model::{Charging, Colocation, FailurePolicy, Micros};
use crate::rulefile::problem::{Problem, Severity};
use crate::rules::tree::Position;

/// A file with every key and most of the notations.
const EVERYTHING: &str = "\
domain: edge
charging: all_or_nothing
on_store_failure: open
descriptors:
  - key: plan # a comment
    value: 'free'
    shadow_mode: yes
    quota_mode: on
    detailed_metric: true
    value_to_metric: Off
    metadata: {team: x, 3: [1, 0x10, 1.5, ~, yes, .inf], deep: {a: \"b\\n\"}}
    charging: each
    on_store_failure: closed
    descriptors:
      - key: user*
        share_threshold: true
        rate_limits:
          - {unit: second, requests_per_unit: 10, algorithm: gcra, burst: 0x14}
          - &day {unit: day, unit_multiplier: 2, requests_per_unit: 1_000, count_refused: true}
      - key: path
        rate_limit:
          <<: *day
          window: 1h30m
          name: slow
          replaces: [{name: a}, {name: b}]
      - key: free
        rate_limit: {unlimited: true, unit: eon}
";

fn read_bytes(text: &[u8]) -> (Option<Document>, Vec<Problem>) {
    let mut problems = Vec::new();
    let document = read(&Arc::from("rules.yaml"), text, &mut problems);
    assert!(document.is_some() || has_error(&problems), "a document, or an error: {problems:?}");
    assert!(problems.is_sorted_by_key(|problem| problem.place.map_or((1, None), |place| (0, Some(place)))));
    // Most of these files leave out `requests_per_unit`. That warning has its own test.
    problems.retain(|problem| !problem.message.starts_with(NO_NUMBER));
    (document, problems)
}

const NO_NUMBER: &str = "`requests_per_unit` is missing";

fn has_error(problems: &[Problem]) -> bool {
    problems.iter().any(|problem| problem.severity == Severity::Error)
}

#[test]
fn a_limit_without_a_number_is_a_warning() {
    let warned = |limit: &str| {
        let text = format!("domain: d\ndescriptors: [{{key: a, rate_limit: {limit}}}]\n");
        let mut problems = Vec::new();
        assert!(read(&Arc::from("rules.yaml"), text.as_bytes(), &mut problems).is_some());
        problems.iter().any(|problem| problem.severity == Severity::Warning && problem.message.starts_with(NO_NUMBER))
    };
    assert!(warned("{unit: day}"));
    assert!(!warned("{unit: day, requests_per_unit: 0}"));
    assert!(!warned("{unlimited: true}"));
}

fn accepted(text: &str) -> (Document, Vec<Problem>) {
    let (document, problems) = read_bytes(text.as_bytes());
    assert!(!has_error(&problems), "{text}: {problems:?}");
    (document.unwrap_or_else(|| panic!("{text}: {problems:?}")), problems)
}

/// Returns the document of a file without problems.
fn clean(text: &str) -> Document {
    let (document, problems) = accepted(text);
    assert_eq!(problems, [], "{text}");
    document
}

/// Returns `line:column: message` of each problem of a refused file.
fn refused(text: &str) -> Vec<String> {
    let (_, problems) = read_bytes(text.as_bytes());
    assert!(has_error(&problems), "{text}");
    listed(&problems)
}

/// Returns `line:column: message` of each warning about an accepted file.
fn warned(text: &str) -> Vec<String> {
    listed(&accepted(text).1)
}

fn listed(problems: &[Problem]) -> Vec<String> {
    let list = |problem: &Problem| {
        let place = problem.place.unwrap_or_default();
        format!("{}:{}: {}", place.line, place.column, problem.message)
    };
    problems.iter().map(list).collect()
}

#[track_caller]
fn assert_says(said: &[String], expected: &[&str]) {
    assert!(said.len() == expected.len() && said.iter().zip(expected).all(|(a, b)| a.starts_with(b)), "{said:#?}");
}

fn descriptor(fields: &str) -> String {
    format!("domain: d\ndescriptors:\n  - key: a\n    {fields}\n")
}

fn limit(fields: &str) -> String {
    descriptor(&format!("rate_limit: {{{fields}}}"))
}

fn first(document: &Document) -> &DescriptorNode {
    document.descriptors.first().unwrap()
}

fn only_limit(node: &DescriptorNode) -> &LimitNode {
    match &node.limits {
        LimitsNode::Limited(limits) => limits.first().unwrap(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn every_key_is_read() {
    let document = clean(EVERYTHING);
    assert_eq!((document.domain.value.as_str(), document.domain.place), ("edge", Position { line: 1, column: 9 }));
    assert_eq!(
        (
            document.charging.as_ref().map(|charging| charging.value),
            document.on_store_failure.as_ref().map(|policy| policy.value)
        ),
        (Some(Charging::AllOrNothing), Some(FailurePolicy::Open))
    );
    assert_eq!(document.colocate, None);
    assert_eq!(clean("domain: d\ncolocate: domain").colocate, Some(Colocation::Domain));
    let plan = first(&document);
    assert_eq!(plan.place, Position { line: 5, column: 5 });
    assert_eq!(plan.value.as_ref().unwrap().value, "free");
    assert!(plan.shadow_mode && plan.quota_mode && plan.detailed_metric && !plan.value_to_metric);
    assert_eq!((plan.charging, plan.on_store_failure), (Some(Charging::Each), Some(FailurePolicy::Closed)));
    let metadata = json!({"team": "x", "3": [1, 16, 1.5, null, true, ".inf"], "deep": {"a": "b\n"}});
    assert_eq!(serde_json::Value::Object(plan.metadata.clone().unwrap()), metadata);

    let [user, path, free] = plan.descriptors.as_slice() else { panic!("{plan:?}") };
    assert_eq!(user.share_threshold, Some(Position { line: 16, column: 9 }));
    let LimitsNode::Limited(limits) = &user.limits else { panic!("{user:?}") };
    let [second, day] = limits.as_slice() else { panic!("{limits:?}") };
    assert_eq!(second.algorithm.as_ref().unwrap().value, Algorithm::Gcra);
    assert_eq!((second.requests_per_unit, second.burst.as_ref().unwrap().value), (10, 20));
    assert_eq!((day.requests_per_unit, day.unit_multiplier.as_ref().unwrap().value), (1_000, 2));
    assert!(day.count_refused && !second.count_refused);

    let slow = only_limit(path);
    assert_eq!((slow.unit.as_ref().unwrap().value.as_str(), slow.requests_per_unit), ("day", 1_000));
    assert_eq!(slow.window.as_ref().unwrap().value, Micros::from_secs(5_400));
    assert_eq!(slow.name.as_ref().unwrap().value, "slow");
    assert_eq!(slow.replaces.iter().map(|name| name.value.as_str()).collect::<Vec<_>>(), ["a", "b"]);
    assert!(matches!(&free.limits, LimitsNode::Unlimited(node) if node.unit.as_ref().unwrap().value == "eon"));
}

#[test]
fn a_text_keeps_the_spelling_of_the_file() {
    for spelling in ["010", "Yes", "1.5", "12e03", "18446744073709551615", "2024-02-29", "10.0.0.1", "0x1F", "-1"] {
        let document = clean(&descriptor(&format!("value: {spelling}")));
        assert_eq!(first(&document).value.as_ref().unwrap().value, spelling);
    }
    assert_eq!(clean("domain: 17").domain.value, "17");
    assert_eq!(first(&clean(&descriptor("value: \"a\\tb\""))).value.as_ref().unwrap().value, "a\tb");
    assert_eq!(first(&clean(&descriptor("value: '~'"))).value.as_ref().unwrap().value, "~");
    assert_eq!(first(&clean(&descriptor("value: !!str 010"))).value.as_ref().unwrap().value, "010");
}

#[test]
fn nothing_is_nothing() {
    for fields in ["value:", "value: ~", "value: ''", "value: null"] {
        assert!(first(&clean(&descriptor(fields))).value.is_none(), "{fields}");
    }
    let (document, problems) = accepted(&descriptor("rate_limit:"));
    assert!(matches!(first(&document).limits, LimitsNode::None));
    assert!(problems[0].message.starts_with("`rate_limit` is empty"), "{problems:?}");
    for fields in ["rate_limit: ~", "rate_limit: null"] {
        assert!(matches!(first(&clean(&descriptor(fields))).limits, LimitsNode::None), "{fields}");
    }
    for fields in ["descriptors:", "metadata: ~", "shadow_mode:", "on_store_failure:"] {
        let document = clean(&descriptor(fields));
        assert!(matches!(first(&document).limits, LimitsNode::None) && first(&document).metadata.is_none(), "{fields}");
    }
    for fields in ["", "requests_per_unit: ", "name: ''", "replaces: ~", "unlimited: false"] {
        let document = clean(&limit(fields));
        let node = only_limit(first(&document));
        assert!(node.requests_per_unit == 0 && node.name.is_none() && node.replaces.is_empty(), "{fields}");
    }
    assert_eq!(only_limit(first(&clean(&limit("replaces: [{}]")))).replaces.first().unwrap().value, "");
    assert!(clean("domain: d").descriptors.is_empty());
}

#[test]
fn numbers_are_whole_and_unquoted() {
    for (spelling, value) in [("0", 0), ("4294967295", u32::MAX), ("1_0", 10), ("0x0c", 12), ("0b11", 3), ("0o17", 15)]
    {
        assert_eq!(
            only_limit(first(&clean(&limit(&format!("requests_per_unit: {spelling}"))))).requests_per_unit,
            value
        );
    }
    for (spelling, said) in [
        ("'5'", "the text `5`"),
        ("5.0", "the number `5.0`"),
        ("1e3", "the number `1e3`"),
        ("-1", "the number `-1`"),
        ("4294967296", "the number `4294967296`"),
        ("yes", "`yes`, which YAML reads as true"),
        ("many", "the text `many`"),
        ("[]", "a list"),
    ] {
        let found = refused(&limit(&format!("burst: {spelling}")));
        assert_says(&found, &["4:25: `burst` must be a whole number from 1 to 4294967295"]);
        assert!(found.iter().all(|message| message.contains(said)), "{found:?}");
    }
}

#[test]
fn a_leading_zero_is_octal_with_a_warning() {
    let text = limit("requests_per_unit: 010");
    assert_eq!(only_limit(first(&accepted(&text).0)).requests_per_unit, 8);
    assert_says(&warned(&text), &["4:37: `010` is octal because of its leading zero, so it means 8"]);
    assert_eq!(only_limit(first(&clean(&limit("requests_per_unit: 07")))).requests_per_unit, 7);
}

#[test]
fn flags_are_booleans_of_yaml_1_1() {
    for (spelling, flag) in [("y", true), ("Yes", true), ("ON", true), ("n", false), ("off", false), ("False", false)] {
        assert_eq!(first(&clean(&descriptor(&format!("shadow_mode: {spelling}")))).shadow_mode, flag);
    }
    for spelling in ["'true'", "!!str true", "1", "yEs", "{}"] {
        let found = refused(&descriptor(&format!("shadow_mode: {spelling}")));
        assert!(
            found.len() == 1 && found.iter().all(|said| said.contains("`shadow_mode` must be `true` or `false`")),
            "{found:?}"
        );
    }
}

#[test]
fn an_unknown_key_is_an_error_that_names_the_nearest() {
    assert_says(
        &refused("domain: d\nversion: 1"),
        &["2:1: `version` is not a known key at the top of the file: write one of `domain`"],
    );
    let found = refused(&descriptor("ratelimit: {unit: day}"));
    assert_says(&found, &["4:5: `ratelimit` is not a known key in a descriptor: did you mean `rate_limit`?"]);
    let found = refused(&limit("requestsPerUnit: 1"));
    assert_says(
        &found,
        &["4:18: `requestsPerUnit` is not a known key inside `rate_limit`: did you mean `requests_per_unit`?"],
    );
    assert_says(&refused("0.25: d\ndomain: d"), &["1:1: `0.25` is not a known key"]);
    assert_says(&refused(&descriptor("on: b")), &["4:5: `on` is not a known key"]);
    assert_says(&refused(&descriptor("? [b]\n    : c")), &["4:7: A key must be a word, but this one is a list"]);
}

#[test]
fn a_key_of_the_reference_in_the_wrong_place_is_a_warning() {
    let text = "\
domain: d
unit: day
descriptors:
  - key: a
    unlimited: true
    name: x
    rate_limit: {unit: day, requests_per_unit: 2, shadow_mode: 5, key: z}
";
    assert_says(
        &warned(text),
        &[
            "2:1: `unit` has no effect at the top of the file: write it inside `rate_limit`.",
            "5:5: `unlimited` has no effect in a descriptor: write it inside `rate_limit`.",
            "6:5: `name` has no effect in a descriptor: write it inside `rate_limit`.",
            "7:51: `shadow_mode` has no effect inside `rate_limit`: write it in a descriptor, beside `key`.",
            "7:67: `key` has no effect inside `rate_limit`: write it in an item of `descriptors`.",
        ],
    );
    assert_eq!(first(&accepted(text).0).key.as_ref().unwrap().value, "a");
}

#[test]
fn an_own_key_in_the_wrong_place_is_an_error() {
    let found = refused(
        "domain: d\nburst: 4\ndescriptors:\n  - {key: a, algorithm: gcra, rate_limit: {charging: each}, colocate: domain}\n",
    );
    assert_says(
        &found,
        &[
            "2:1: `burst` does not belong at the top of the file: write it inside `rate_limit`.",
            "4:14: `algorithm` does not belong in a descriptor: write it inside `rate_limit`.",
            "4:44: `charging` does not belong inside `rate_limit`: write it at the top of the file or in a descriptor.",
            "4:61: `colocate` does not belong in a descriptor: write it at the top of the file.",
        ],
    );
}

#[test]
fn a_key_written_twice_counts_once() {
    let text = "domain: d\ndescriptors:\n  - key: a\n    key: b\n    rate_limit: {requests_per_unit: x, requests_per_unit: 6}\n";
    assert_says(&warned(text), &["4:5: `key` is already set on line 3", "5:40: `requests_per_unit` is already"]);
    let document = accepted(text).0;
    assert_eq!(first(&document).key.as_ref().unwrap().value, "b");
    assert_eq!(only_limit(first(&document)).requests_per_unit, 6);
}

#[test]
fn mappings_of_one_key_are_combined_and_of_anything_else_the_last_counts() {
    let text = "\
domain: d
descriptors:
  - key: a
    rate_limit: {unit: day, requests_per_unit: 7, delay: {max: 2s}}
    metadata: {team: x, size: 1}
    rate_limit: {unit: hour}
    rate_limit: {name: n, delay: {delivery: hold}}
    metadata: {team: z}
    descriptors: [{key: gone}]
    descriptors: [{key: b}, {key: c}]
entries: {ip: {as: ip}}
entries: {path: {as: path}}
";
    let combined = "the keys of both are combined: write them in one place";
    let one = "the keys of both are combined, so only one limit is in force";
    let told = [
        &*format!("6:5: `rate_limit` is already set on line 4, and {one}"),
        &format!("7:5: `rate_limit` is already set on line 6, and {one}"),
        &format!("8:5: `metadata` is already set on line 5, and {combined}"),
        "10:5: `descriptors` is already set on line 9, and this one overrides it",
        &format!("12:1: `entries` is already set on line 11, and {combined}"),
        "6:18: `unit` is already set on line 4, and this one overrides it",
        &format!("7:27: `delay` is already set on line 4, and {combined}"),
        "8:16: This key is already set on line 5, and this one overrides it",
    ];
    let mut warnings = warned(text);
    warnings.sort_by_key(|warning| told.iter().position(|told| warning.starts_with(told)));
    assert_says(&warnings, &told);
    let document = accepted(text).0;
    let limit = only_limit(first(&document));
    assert_eq!((&*limit.unit.as_ref().unwrap().value, limit.requests_per_unit), ("hour", 7));
    assert_eq!(limit.name.as_ref().unwrap().value, "n");
    let delay = limit.delay.as_ref().unwrap();
    assert!(delay.max.is_some() && delay.delivery.is_some());
    assert_eq!(first(&document).descriptors.len(), 2);
    assert_eq!(document.entries.len(), 2);
    let metadata = serde_json::Value::Object(first(&document).metadata.clone().unwrap());
    assert_eq!(metadata, serde_json::json!({"team": "z", "size": 1}));
}

#[test]
fn binary_stays_as_it_is_written_with_a_warning() {
    let text = descriptor("value: !!binary aGk=");
    assert_says(&warned(&text), &["4:21: `aGk=` stays as it is written, but envoyproxy/ratelimit decodes `!!binary`"]);
    assert_eq!(first(&accepted(&text).0).value.as_ref().unwrap().value, "aGk=");
}

#[test]
fn a_merge_gives_way_to_what_is_written() {
    let text = "\
domain: d
descriptors:
  - {key: a, rate_limit: &a {unit: day, requests_per_unit: 4}}
  - {key: b, rate_limit: &b {unit: hour, name: b}}
  - {key: c, rate_limit: {<<: [*a, *b], requests_per_unit: 6}}
";
    let document = clean(text);
    let merged = only_limit(document.descriptors.last().unwrap());
    assert_eq!(merged.requests_per_unit, 6);
    assert_eq!(merged.unit.as_ref().unwrap().value, "day");
    assert_eq!(merged.name.as_ref().unwrap().value, "b");
    let late = text.replace("{<<: [*a, *b], requests_per_unit: 6}", "{requests_per_unit: 6, <<: *a}");
    assert_says(&warned(&late), &["5:49: `requests_per_unit` above keeps its own value"]);
    assert_says(&refused(&limit("<<: 5")), &["4:22: `<<` must be a mapping or a list of mappings"]);
    assert!(
        first(&clean(&descriptor("metadata: {<<: {x: 1, y: 2}, x: 3}"))).metadata.as_ref().unwrap()["x"] == json!(3)
    );
}

#[test]
fn aliases_stand_for_what_their_anchor_holds() {
    let document = clean("domain: &d e\ndescriptors: [{key: *d}, {key: a, value: *d}]");
    assert_eq!(first(&document).key.as_ref().unwrap().value, "e");
    assert_eq!(document.descriptors.last().unwrap().value.as_ref().unwrap().value, "e");
    assert_says(&refused("domain: *none"), &["1:9: This alias has no anchor: write the anchor `&none`"]);
    let found = refused("domain: d\ndescriptors: &a\n  - key: k\n    descriptors: *a\n");
    assert_says(&found, &["4:18: This alias refers to a value that contains it"]);
}

#[test]
fn a_wrong_kind_of_value_is_an_error() {
    for (text, said) in [
        ("hello".to_owned(), "1:1: A rule file must be a mapping"),
        ("[a]".to_owned(), "1:1: A rule file must be a mapping"),
        ("domain: [d]".to_owned(), "1:9: `domain` must be a text, but is a list."),
        ("domain: d\ndescriptors: [x]".to_owned(), "2:15: Each item of `descriptors` must be a mapping"),
        ("domain: d\ndescriptors: [[{key: a}]]".to_owned(), "2:15: Each item of `descriptors` must be a mapping"),
        ("domain: d\ndescriptors: {key: a}".to_owned(), "2:14: `descriptors` must be a list of mappings"),
        (
            "domain: d\ndescriptors: [~]".to_owned(),
            "2:15: Each item of `descriptors` must be a mapping like `- key: NAME`, but this one is empty.",
        ),
        (descriptor("rate_limit: []"), "4:17: `rate_limit` must be a mapping"),
        (descriptor("rate_limits: []"), "4:5: `rate_limits` is empty"),
        (descriptor("rate_limits: ~"), "4:18: `rate_limits` must be a list"),
        (descriptor("rate_limits: [{unlimited: true}]"), "4:20: `unlimited` is not allowed in `rate_limits`"),
        (descriptor("metadata: [1]"), "4:15: `metadata` must be a mapping"),
        (descriptor("metadata: {? [a] : 1}"), "4:18: A key of `metadata` must be a text"),
        (descriptor("value: {a: b}"), "4:12: `value` must be a text, but is a mapping."),
        (descriptor("charging: eech"), "4:15: `eech` is not a valid value of `charging`: did you mean `each`?"),
        ("domain: d\ncolocate: rule".to_owned(), "2:11: `rule` is not a valid value of `colocate`: write `domain`."),
        (
            descriptor("on_store_failure: off"),
            "4:23: `off` is not a valid value of `on_store_failure`: write one of `error`, `open`, `closed`, `local`.",
        ),
        (
            limit("replaces: [other]"),
            "4:29: Each item of `replaces` must be a mapping like `- name: OTHER`, but this one is the text `other`.",
        ),
        (limit("replaces: {name: n}"), "4:28: `replaces` must be a list of mappings"),
        (limit("algorithm: gcr"), "4:29: `gcr` is not a valid value of `algorithm`: did you mean `gcra`?"),
        (limit("window: 250"), "4:26: `250` is not a valid length of time for `window`"),
        (limit("name: !!int x"), "4:30: `x` is not a valid `!!int`"),
    ] {
        assert_says(&refused(&text), &[said]);
    }
    let both = descriptor("rate_limit: {unit: day}\n    rate_limits: [{unit: day}]");
    assert_says(&refused(&both), &["5:5: The descriptor has both `rate_limit` and `rate_limits`"]);
}

#[test]
fn a_file_without_a_domain_is_refused() {
    for text in ["", "# nothing here\n", "~", "descriptors: []", "---\n"] {
        let found = refused(text);
        assert!(found.iter().all(|message| message.contains("has no `domain`")), "{text:?}: {found:?}");
    }
    for text in ["domain: ''", "domain: ~", "domain:"] {
        assert_says(&refused(text), &["1:1: `domain` is empty"]);
    }
}

#[test]
fn an_object_of_kubernetes_is_refused_with_one_sentence() {
    let text = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\ndata:\n  rules.yaml: |\n    domain: edge\n";
    assert_says(&refused(text), &["1:1: This is an object of Kubernetes, and no rule file"]);
}

#[test]
fn all_errors_are_reported_together_in_the_order_of_the_file() {
    let text = "\
descriptors:
  - key: a
    rate_limit: {unit: [], requests_per_unit: -1}
    shadow_mode: 'yes'
  - descriptors: 5
nonsense: 1
domain: ''
";
    let expected = ["3:24: `unit`", "3:47: `requests", "4:18: `shadow", "5:18: `desc", "6:1: `nons", "7:1: `domain`"];
    assert_says(&refused(text), &expected);
}

#[test]
fn a_second_document_is_not_enforced() {
    let found = warned("domain: d\n---\ndescriptors: [{domain: x}]\ndomain: e\n");
    assert_says(&found, &["2:1: A second document begins here, and its rules of domain `e` are not enforced"]);
    assert_says(&warned("domain: d\n---\nx: [\n"), &["2:1: A second document begins here, and it is not read"]);
    for text in ["---\ndomain: d\n", "domain: d\n...\n", "domain: d\n---\n", "domain: d\n---\n# end\n"] {
        assert_eq!(clean(text).domain.value, "d");
    }
}

#[test]
fn a_file_that_is_not_yaml_has_an_error_with_its_place() {
    let found = refused("domain: d\ndescriptors:\n  - key: 'a\n");
    assert!(found.len() == 1 && found.iter().all(|message| message.contains("This is not YAML")), "{found:?}");
    assert_says(&refused("domain: d\n}\n"), &["2:"]);
    assert_says(&refused("domain: d\n\tkey: a\n"), &["1:9: This is not YAML"]);
    let (_, problems) = read_bytes(b"domain: d\nd\xc3\xa9scriptors: \xff[]\n");
    assert_says(&listed(&problems), &["2:14: This byte is not UTF-8"]);
    assert_eq!(problems.first().unwrap().excerpt.as_deref(), Some("déscriptors: "));
    let (_, problems) = read_bytes(b"\xff\xfed\0o\0");
    assert_says(&listed(&problems), &["1:1: This byte is not UTF-8: the file looks like UTF-16"]);
    let (_, problems) = read_bytes("\u{feff}x: 1".as_bytes());
    assert_eq!(problems.first().unwrap().excerpt.as_deref(), Some("x: 1"));
    assert_eq!(clean("\u{feff}domain: d\r\n").domain.place, Position { line: 1, column: 9 });
}

#[test]
fn a_file_that_nests_too_deep_is_refused() {
    let rules = |depth: usize| {
        format!("domain: d\ndescriptors: {}{}", "[{key: a, descriptors: ".repeat(depth), "}]".repeat(depth))
    };
    assert!(read_bytes(rules(40).replace(": }", ": ~}").as_bytes()).0.is_some());
    let mut chain = String::from("domain: d\nmetadata:\n  a0: &a0 [x]\n");
    for step in 1..1_000 {
        writeln!(chain, "  a{step}: &a{step} [*a{}]", step - 1).unwrap();
    }
    for text in [
        rules(60),
        rules(1_000),
        chain,
        "[".repeat(1_000),
        "{a: ".repeat(1_000),
        "- ".repeat(1_000),
        (0..1_000).fold(String::new(), |text, depth| text + &" ".repeat(depth) + "a:\n"),
    ] {
        let found = refused(&text);
        assert!(found.len() == 1 && found.iter().all(|message| message.contains("100 levels deep")), "{found:?}");
    }
}

#[test]
fn an_alias_bomb_is_refused() {
    let mut bomb = String::from("domain: d\nmetadata:\n  a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n");
    for step in 1..90 {
        let aliases = vec![format!("*a{}", step - 1); 10].join(", ");
        writeln!(bomb, "  a{step}: &a{step} [{aliases}]").unwrap();
    }
    assert_says(&refused(&bomb), &["9:12: The file is too large"]);
    let mut merges = String::from("domain: d\ndescriptors:\n  - &a0 {key: a}\n");
    for step in 1..30 {
        writeln!(merges, "  - &a{step} {{<<: [*a{0}, *a{0}], key: a}}", step - 1).unwrap();
    }
    let found = refused(&merges);
    assert!(found.len() == 1 && found.iter().all(|message| message.contains("is too large")), "{found:?}");
}

#[test]
fn eight_mebibytes_of_anything_are_refused() {
    let fill = |piece: &str| piece.repeat((8 << 20) / piece.len());
    for text in [
        fill("["),
        fill("a"),
        fill("a: b\n"),
        fill("\n"),
        fill("- a\n"),
        fill("x: *y\n"),
        format!("domain: d\ndescriptors: [{}]", fill("{},")),
        format!("domain: d\ndescriptors: [{}]", fill("{key: a},")),
        format!("descriptors: [{}]", fill("{key: a, x: b, y: [z, z, z, z, z, z, z]},\n")),
        format!("domain: d\ndescriptors: [{{metadata: {{a: [{}]}}}}]", fill("{a: 1},")),
        format!("domain: d\ndescriptors: [{}]", fill("{key: a, metadata: {a: 1, b: 2, c: {d: 3}}},")),
        format!("domain: \"{}", fill("\\n")),
    ] {
        let (document, problems) = read_bytes(text.as_bytes());
        assert!(document.is_none() && problems.len() <= 201, "{}", text.get(..40).unwrap());
    }
}

#[test]
fn a_file_of_more_than_32_mebibytes_is_refused_at_its_beginning() {
    assert_says(
        &refused(&format!("domain: d{}", " ".repeat(32 << 20))),
        &["1:1: The file is too large: it has 33554441 bytes"],
    );
}

#[test]
fn a_hundred_thousand_rules_are_read() {
    let mut text = String::from("domain: d\ndescriptors:\n");
    for rule in 0..100_000 {
        writeln!(text, "  - key: remote_address\n    value: 10.1.{rule}\n    rate_limit: {{unit: second, requests_per_unit: {rule}}}")
            .unwrap();
    }
    let document = clean(&text);
    assert_eq!(document.descriptors.len(), 100_000);
    assert_eq!(only_limit(document.descriptors.last().unwrap()).requests_per_unit, 99_999);
}

#[test]
fn a_file_full_of_problems_is_cut_short_and_keeps_its_errors() {
    let warnings = "unit: 1\n".repeat(300);
    let found = refused(&format!("{warnings}domain: []\nx: 1\n"));
    assert_eq!(found.len(), 201);
    assert!(found.iter().any(|message| message.starts_with("301:9: `domain` must be")), "{found:?}");
    assert!(found.last().unwrap().contains("(102 not shown)"), "{:?}", found.last());
    let (document, problems) = accepted(&format!("{warnings}domain: d\n"));
    assert_eq!((document.domain.value.as_str(), problems.len()), ("d", 201));
    let (_, problems) = read_bytes("x: 1\n".repeat(300).as_bytes());
    assert_eq!((problems.len(), problems.last().unwrap().severity), (201, Severity::Error));
}

#[test]
fn an_alias_repeats_no_problem() {
    let text = "domain: d\ndescriptors:\n  - &a {key: a, x: 1}\n  - *a\n  - *a\n";
    assert_says(&refused(text), &["3:17: `x` is not a known key in a descriptor"]);
}

#[test]
fn no_cut_of_a_file_makes_the_reader_panic() {
    for end in 0..=EVERYTHING.len() {
        read_bytes(EVERYTHING.as_bytes().get(..end).unwrap());
    }
}

proptest! {
    #[test]
    fn no_bytes_make_the_reader_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        read_bytes(&bytes);
    }

    #[test]
    fn no_marks_of_yaml_make_the_reader_panic(text in "([\\[\\]{},:?&*!|>'\"%@`#~<\\- \n\tab]|domain|descriptors|key|<<|---){0,80}") {
        read_bytes(text.as_bytes());
    }

    #[test]
    fn no_change_of_a_file_makes_the_reader_panic(
        changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0..4_usize), 1..12),
    ) {
        let mut text = EVERYTHING.as_bytes().to_vec();
        for (index, byte, kind) in changes {
            let at = index.index(text.len());
            match kind {
                0 => text[at] = byte,
                1 => text[at] = b"[]{},:&*!|>'\"#~<- \n"[usize::from(byte) % 19],
                2 => text.insert(at, byte & 0x7f),
                _ => drop(text.remove(at)),
            }
        }
        read_bytes(&text);
    }
}
