//! What is counted of hits, and under which labels: as the reference does both.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use tidegate::proto::envoy::service::ratelimit::v3::RateLimitRequest;
use tidegate::telemetry::metrics::TABLE;

use crate::grpc;
use crate::redis::Single;
use crate::support::{Tidegate, in_time, rule_file};

/// Limits, and hits that are taken of them one after the other: up to each border, onto it, over it, and over several at once.
const CASES: &[(u32, &[u32])] = &[
    (1, &[1, 1, 3]),
    (1, &[2, 1]),
    (2, &[1, 1, 1]),
    (5, &[4, 1, 1]),
    (5, &[6]),
    (7, &[5, 1, 1, 1]),
    (7, &[6, 2, 1]),
    (8, &[5, 2]),
    (8, &[5, 1, 1, 1, 1]),
    (10, &[3, 3, 3, 3, 3]),
    (10, &[10, 10]),
    (10, &[25]),
    (20, &[15, 7]),
    (20, &[15, 7, 1, 30]),
    (20, &[16, 4, 1]),
    (20, &[17, 2, 2]),
    (20, &[20, 1]),
    (20, &[21]),
    (90, &[62, 1, 1, 30]),
    (90, &[63, 1]),
    (90, &[71, 2, 17, 1]),
    (100, &[79, 1, 1, 19, 1]),
    (100, &[80, 21]),
    (100, &[1, 200, 1]),
    (1_000_003, &[700_000, 100_002, 100_000, 100_001, 7]),
    // Beyond 2^24 not every number is one of 32 bits.
    (16_777_217, &[13_421_773, 1, 1, 3_355_442, 1]),
    (50_000_001, &[39_999_999, 1, 1, 10_000_000]),
    (4_294_967_295, &[3_435_973_836, 1, 858_993_458, 1]),
];

const RATIOS: [&str; 3] = ["0.8", "0.7", "1"];

/// The counts of one rule, in the reference's order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Counts {
    total: u64,
    over: u64,
    near: u64,
    within: u64,
    shadow: u64,
}

impl Counts {
    /// Hits on a limit of which so many were taken before, as the reference's `base_limiter.go` has it.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_precision_loss,
        clippy::cast_sign_loss,
        reason = "the reference computes in 32 bits"
    )]
    fn take(&mut self, limit: u32, before: u64, hits: u32, ratio: f32, is_shadow: bool) {
        let near = (limit as f32 * ratio).floor() as u64;
        let (limit, hits) = (u64::from(limit), u64::from(hits));
        let after = before + hits;
        self.total += hits;
        if after <= limit {
            self.within += hits;
            if after > near {
                self.near += if before >= near { hits } else { after - near };
            }
        } else if before >= limit {
            self.over += hits;
            self.shadow += if is_shadow { hits } else { 0 };
        } else {
            self.over += after - limit;
            self.near += limit.saturating_sub(near.max(before));
            self.shadow += if is_shadow { after - limit } else { 0 };
        }
    }

    /// What a page says of the rule of this key.
    fn read(page: &str, key: &str) -> Self {
        let of = |metric| {
            let series = format!("ratelimit_service_rate_limit_{metric}{{domain=\"d\",key1=\"{key}\"}} ");
            let value = page.lines().find_map(|line| line.strip_prefix(&series));
            value.unwrap_or_else(|| panic!("no {series}")).parse().expect("a number")
        };
        let [total, over, near, within, shadow] =
            ["total_hits", "over_limit", "near_limit", "within_limit", "shadow_mode"].map(of);
        Self { total, over, near, within, shadow }
    }
}

async fn ask(client: &mut grpc::Client, entries: &[(&str, &str)], hits: u32) {
    ask_all(client, &[entries], hits).await;
}

async fn ask_all(client: &mut grpc::Client, descriptors: &[&[(&str, &str)]], hits: u32) {
    let descriptors = descriptors.iter().map(|entries| grpc::descriptor(entries));
    let request = RateLimitRequest { hits_addend: hits, ..grpc::request("d", descriptors) };
    in_time("it is answered", client.should_rate_limit(request)).await.expect("it is no error");
}

/// Runs every case, as an ordinary rule and as one that only watches, and reads the page after each hit.
async fn count_as_the_reference_does(store: &[(&str, &str)]) {
    let mut rules = "domain: d\ndescriptors:\n".to_owned();
    for (case, (limit, _)) in CASES.iter().enumerate() {
        for flag in ["", "shadow_mode: true, "] {
            let key = key(case, !flag.is_empty());
            let limit = format!("{{ unit: year, requests_per_unit: {limit} }}");
            let _ = writeln!(rules, "  - {{ key: {key}, {flag}rate_limit: {limit} }}");
        }
    }
    let rules = rule_file(&rules);
    for ratio in RATIOS {
        let prefix = format!("{ratio}:");
        let own = [("NEAR_LIMIT_RATIO", ratio), ("CACHE_KEY_PREFIX", &prefix), ("STORE_DEADLINE", "10s")];
        let server = Tidegate::start(rules.path(), &[&own, store].concat()).await;
        let mut client = grpc::client(server.grpc).await;
        let ratio = ratio.parse().expect("a number");
        for (case, (limit, taken)) in CASES.iter().enumerate() {
            for is_shadow in [false, true] {
                let key = key(case, is_shadow);
                let (mut expected, mut before) = (Counts::default(), 0);
                for hits in *taken {
                    ask(&mut client, &[(&key, "v")], *hits).await;
                    expected.take(*limit, before, *hits, ratio, is_shadow);
                    before += u64::from(*hits);
                    let counted = Counts::read(&server.metrics().await, &key);
                    assert_eq!(counted, expected, "{hits} of {taken:?} on {limit}, ratio {ratio}, {store:?}");
                }
            }
        }
    }
}

fn key(case: usize, is_shadow: bool) -> String {
    format!("{}{case}", if is_shadow { "watch" } else { "case" })
}

/// The reference's own worked examples, so that the oracle is none of ours.
#[test]
fn the_oracle_counts_the_worked_examples() {
    let of = |limit, before, hits| {
        let mut counts = Counts::default();
        counts.take(limit, before, hits, 0.8, false);
        counts
    };
    assert_eq!(of(20, 15, 7), Counts { total: 7, over: 2, near: 4, ..Counts::default() });
    assert_eq!(of(8, 5, 2), Counts { total: 2, near: 1, within: 2, ..Counts::default() });
}

#[tokio::test]
async fn a_hit_that_a_refused_request_keeps_is_counted_once_where_it_fell() {
    let rules = rule_file(
        "domain: d\ndescriptors:\n  - { key: kept, rate_limit: { unit: year, requests_per_unit: 10 } }\n  \
         - { key: full, rate_limit: { unit: year, requests_per_unit: 1 } }\n",
    );
    let server = Tidegate::start(rules.path(), &[]).await;
    let mut client = grpc::client(server.grpc).await;
    ask(&mut client, &[("full", "v")], 1).await;
    ask(&mut client, &[("kept", "v")], 7).await;
    ask_all(&mut client, &[&[("kept", "v")], &[("full", "v")]], 1).await;
    let expected = Counts { total: 8, within: 8, ..Counts::default() };
    assert_eq!(Counts::read(&server.metrics().await, "kept"), expected, "8 of 10 are not near the limit");
}

#[tokio::test]
async fn refusals_that_are_only_watched_are_counted() {
    let rules =
        rule_file("domain: d\ndescriptors:\n  - { key: full, rate_limit: { unit: year, requests_per_unit: 1 } }\n");
    let server = Tidegate::start(rules.path(), &[("SHADOW_MODE", "true")]).await;
    let mut client = grpc::client(server.grpc).await;
    for refused in [0, 1, 2] {
        ask(&mut client, &[("full", "v")], 1).await;
        let page = server.metrics().await;
        assert!(page.contains(&format!("ratelimit_service_global_shadow_mode {refused}\n")), "{page}");
    }
}

#[tokio::test]
async fn hits_are_counted_as_the_reference_counts_them_in_memory() {
    count_as_the_reference_does(&[]).await;
}

#[tokio::test]
async fn hits_are_counted_as_the_reference_counts_them_on_redis() {
    let redis = Single::start(&[]).await;
    count_as_the_reference_does(&[("REDIS_URL", &redis.url())]).await;
}

/// A rule, the entries that meet it, and the labels that its hits are counted under, if they are.
type Named = (&'static str, &'static [(&'static str, &'static str)], Option<&'static str>);

const NAMED: &[Named] = &[
    ("{ key: plain, RATE }", &[("plain", "x")], Some("key1=\"plain\"")),
    ("{ key: valued, value: free, RATE }", &[("valued", "free")], Some("key1=\"valued_free\"")),
    ("{ key: wild, value: a*, RATE }", &[("wild", "abc")], Some("key1=\"wild_a*\"")),
    ("{ key: shown, value_to_metric: true, RATE }", &[("shown", "acme")], Some("key1=\"shown_acme\"")),
    ("{ key: empty, value_to_metric: true, RATE }", &[("empty", "")], Some("key1=\"empty\"")),
    (
        "{ key: wild_shown, value: a*, value_to_metric: true, RATE }",
        &[("wild_shown", "abc")],
        Some("key1=\"wild_shown_abc\""),
    ),
    (
        "{ key: top, value_to_metric: true, descriptors: [{ key: below, RATE }] }",
        &[("top", "one"), ("below", "two")],
        Some("key1=\"top_one\",key2=\"below\""),
    ),
    (
        "{ key: detailed, descriptors: [{ key: leaf, detailed_metric: true, RATE }] }",
        &[("detailed", "one"), ("leaf", "two")],
        Some("key1=\"detailed_one\",key2=\"leaf_two\""),
    ),
    (
        "{ key: hollow, descriptors: [{ key: leaf, detailed_metric: true, RATE }] }",
        &[("hollow", "one"), ("leaf", "")],
        Some("key1=\"hollow_one\",key2=\"leaf_\""),
    ),
    ("{ key: both, value_to_metric: true, detailed_metric: true, RATE }", &[("both", "")], Some("key1=\"both_\"")),
    (
        "{ key: inner, detailed_metric: true, descriptors: [{ key: leaf, RATE }] }",
        &[("inner", "one"), ("leaf", "two")],
        Some("key1=\"inner\",key2=\"leaf\""),
    ),
    (
        "{ key: shared, value: v*, share_threshold: true, value_to_metric: true, RATE }",
        &[("shared", "v1")],
        Some("key1=\"shared_v*\""),
    ),
    (
        "{ key: shared_detailed, value: v*, share_threshold: true, detailed_metric: true, RATE }",
        &[("shared_detailed", "v1")],
        Some("key1=\"shared_detailed_v*\""),
    ),
    (
        "{ key: deep, value: a, descriptors: [{ key: deeper, value: b, descriptors: [{ key: deepest, RATE }] }] }",
        &[("deep", "a"), ("deeper", "b"), ("deepest", "c")],
        Some("key1=\"deep_a\",key2=\"deeper_b\""),
    ),
    (
        "{ key: marks, value_to_metric: true, RATE }",
        &[("marks", "10.1.2.3:80|v1.2")],
        Some("key1=\"marks_10_1_2_3_80_v1\",key2=\"2\""),
    ),
    ("{ key: unlimited, rate_limit: { unlimited: true } }", &[("unlimited", "x")], None),
];

#[tokio::test]
async fn hits_are_counted_under_the_labels_of_the_reference() {
    let limit = "rate_limit: { unit: year, requests_per_unit: 10 }";
    let items = NAMED.iter().map(|(rule, ..)| format!("  - {}\n", rule.replace("RATE", limit)));
    let rules = rule_file(&format!("domain: d\ndescriptors:\n{}", items.collect::<String>()));
    let server = Tidegate::start(rules.path(), &[]).await;
    let mut client = grpc::client(server.grpc).await;
    let mut counted: BTreeMap<String, String> = BTreeMap::new();
    for (rule, entries, labels) in NAMED {
        ask(&mut client, entries, 3).await;
        let page = server.metrics().await;
        let series = page.lines().filter_map(|line| line.strip_prefix("ratelimit_service_rate_limit_total_hits{"));
        let series = series.map(|line| line.split_once("} ").expect("a value"));
        let now: BTreeMap<_, _> = series.map(|(labels, hits)| (labels.to_owned(), hits.to_owned())).collect();
        if let Some(labels) = labels {
            counted.insert(format!("domain=\"d\",{labels}"), "3".to_owned());
        }
        assert_eq!(now, counted, "{rule} {entries:?}");
    }
}

#[tokio::test]
async fn every_metric_of_the_table_is_on_the_page() {
    let redis = Single::start(&[]).await;
    let rules = rule_file("domain: d\ndescriptors: [{ key: k, rate_limit: { unit: day, requests_per_unit: 1 } }]\n");
    let url = redis.address().to_string();
    let variables = [("REDIS_TYPE", "SINGLE"), ("REDIS_URL", &*url), ("OTEL_TRACES_EXPORTER", "otlp")];
    let server = Tidegate::start(rules.path(), &variables).await;
    let page = server.metrics().await;
    let shown: BTreeSet<_> = page.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next()).collect();
    let known: BTreeSet<_> = TABLE.iter().map(|metric| metric.name).collect();
    assert_eq!(
        shown, known,
        "left, the metrics on the page of a service with Redis and traces; right, those of the table"
    );
}
