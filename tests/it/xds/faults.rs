//! Sets of rules that are wrong, empty, huge or repeated.

use prost_types::Any;
use std::time::{Duration, Instant};
use tidegate::proto::ratelimit::config::ratelimit::v3::{RateLimitConfig, RateLimitUnit};

use super::plane::{Plane, StreamTo, TYPE_URL, answer, call, limit, page, response, rlconfig, start};
use crate::http;
use crate::support::{Tidegate, eventually};

const FORCED: (&str, &str) = ("FORCE_START_WITHOUT_INITIAL_CONFIG", "true");

/// A rule of which there are many.
fn many(domain: &str, rules: usize) -> RateLimitConfig {
    let mut config = limit("many", domain, RateLimitUnit::Day, 7);
    let one = config.descriptors[0].clone();
    config.descriptors = (0..rules)
        .map(|number| {
            let mut rule = one.clone();
            rule.value = format!("user-{number}");
            rule
        })
        .collect();
    config
}

async fn metric(server: &Tidegate, line: &str) -> bool {
    server.metrics().await.lines().any(|found| found == line)
}

fn day(name: &str, domain: &str) -> RateLimitConfig {
    limit(name, domain, RateLimitUnit::Day, 5)
}

/// Sets of rules with errors, each with the reasons of its refusal.
fn wrong_sets() -> [(Vec<RateLimitConfig>, String); 7] {
    let no_domain = day("res", "");
    let mut no_key = day("res", "edge");
    no_key.descriptors[0].key.clear();
    let mut nested = day("res", "edge");
    nested.descriptors[0].descriptors = vec![no_key.descriptors[0].clone()];
    let mut twice = day("res", "edge");
    twice.descriptors.push(twice.descriptors[0].clone());
    let mut unknown_unit = day("res", "edge");
    unknown_unit.descriptors[0].rate_limit.as_mut().unwrap().unit = 99;
    let empty_key = |line: u32, path: &str| {
        format!(
            "{line}:1: error: the descriptor has no key: write `key:` with the name of the entry that it matches\n  {line} | edge > {path}\n    | ^"
        )
    };
    let units = "second, minute, hour, day, week, month, year, or `window:` with a length such as 250ms\n  2 | edge > user\n    | ^";
    let known_domain = "1:1: error: duplicate domain `edge`, already defined in one: write the domain in one file, or set `MERGE_DOMAIN_CONFIG=true` to let several files extend it\n  1 | edge\n    | ^";
    [
        (
            vec![no_domain],
            "res:1:1: error: `domain` is empty, so no request matches the rules: give the resource a domain".to_owned(),
        ),
        (vec![no_key.clone()], format!("res:{}", empty_key(2, ""))),
        (vec![nested], format!("res:{}", empty_key(3, "user > "))),
        (
            vec![twice],
            "res:3:1: error: duplicate descriptor `user`, already defined on this level in res line 2: remove one of the two, or write both limits in one item (in a rule file: in a list `rate_limits`)\n  3 | edge > user\n    | ^".to_owned(),
        ),
        (
            vec![limit("res", "edge", RateLimitUnit::Unknown, 5)],
            format!("res:2:1: error: the rate limit has no unit: write `unit:` with one of {units}"),
        ),
        (vec![unknown_unit], format!("res:2:1: error: invalid rate limit unit `99`: write one of {units}")),
        (
            vec![day("one", "edge"), day("two", "edge"), no_key],
            format!(
                "res:{known_domain}\nres:{}\ntwo:{known_domain}\ntwo:2:1: error: duplicate descriptor `user`, already defined on this level in one line 2: remove one of the two, or write both limits in one item (in a rule file: in a list `rate_limits`)\n  2 | edge > user\n    | ^",
                empty_key(2, "")
            ),
        ),
    ]
}

#[tokio::test]
async fn each_kind_of_wrong_set_is_refused_with_all_reasons_and_changes_nothing() {
    let mut plane = Plane::start().await;
    let server = start(&plane.variables(), &[FORCED]).await;
    let (stream, _) = plane.stream().await;
    stream.send(response("1", "n1", &[limit("res", "edge", RateLimitUnit::Day, 5)])).unwrap();
    plane.request().await;
    let in_force = rlconfig(&server).await;
    // After a good set, the next refusal is the first in a row, which does not wait.
    let good = async |stream: &StreamTo, plane: &mut Plane| {
        stream.send(response("1", "again", &[limit("res", "edge", RateLimitUnit::Day, 5)])).unwrap();
        assert_eq!(answer(&plane.request().await), ("1", "again", None));
    };
    for (number, (resources, reasons)) in wrong_sets().iter().enumerate() {
        let (version, nonce) = (format!("wrong-{number}"), format!("nonce-{number}"));
        stream.send(response(&version, &nonce, resources)).unwrap();
        let refused = plane.request().await;
        assert_eq!(answer(&refused), ("1", &*nonce, Some(&**reasons)));
        assert_eq!(rlconfig(&server).await, in_force);
        good(&stream, &mut plane).await;
    }
    let undecodable = [
        (TYPE_URL, vec![0xff], "bytes that are not one: failed to decode Protobuf message: invalid varint"),
        ("type.googleapis.com/other.Type", vec![], "\"type.googleapis.com/other.Type\""),
    ];
    for (number, (type_url, value, found)) in undecodable.iter().enumerate() {
        let mut undecodable = response("undecodable", &format!("bytes-{number}"), &[]).unwrap();
        undecodable.resources = vec![Any { type_url: (*type_url).to_owned(), value: value.clone() }];
        stream.send(Ok(undecodable)).unwrap();
        let refused = plane.request().await;
        assert_eq!(refused.version_info, "1");
        let reason = refused.error_detail.expect("a refusal").message;
        if number == 0 {
            good(&stream, &mut plane).await;
        }
        assert_eq!(reason, format!("resource 1 of the response cannot be decoded: expected {TYPE_URL}, found {found}"));
    }
    assert_eq!(rlconfig(&server).await, in_force);
    assert!(metric(&server, r#"tidegate_xds_responses_total{answer="refused"} 9"#).await);
    let about = page(&server, "/").await;
    assert!(about.contains("last acknowledged: version \"1\""), "{about}");
    assert!(about.contains("last refused: version \"undecodable\""), "{about}");
    assert!(about.contains("expected type.googleapis.com/"), "{about}");

    // The set in force comes again: it is acknowledged, and nothing is rejected any more.
    stream.send(response("2", "n2", &[day("res", "edge")])).unwrap();
    assert_eq!(answer(&plane.request().await), ("2", "n2", None));
    assert!(metric(&server, "tidegate_rules_rejected 0").await);
}

#[tokio::test]
async fn a_first_set_that_is_wrong_leaves_no_rules_in_force_and_the_log_says_so() {
    let mut plane = Plane::start().await;
    let server = start(&plane.variables(), &[FORCED]).await;
    let (stream, _) = plane.stream().await;
    stream.send(response("1", "n1", &[limit("res", "edge", RateLimitUnit::Unknown, 5)])).unwrap();
    assert!(answer(&plane.request().await).2.is_some(), "it is refused");
    let log = server.log();
    assert!(log.contains("no rules are in force yet, so each call fails") && !log.contains("old rules"), "{log}");
    stream.send(response("2", "n2", &[day("res", "edge")])).unwrap();
    plane.request().await;
    stream.send(response("3", "n3", &[limit("res", "edge", RateLimitUnit::Unknown, 5)])).unwrap();
    assert!(answer(&plane.request().await).2.is_some(), "it is refused too");
    assert!(rlconfig(&server).await.contains("requests_per_unit=5"), "the rules between the two stay");
}

#[tokio::test]
async fn the_same_version_with_other_content_is_taken_and_rules_are_added_changed_and_removed() {
    let mut plane = Plane::start().await;
    let server = start(&plane.variables(), &[FORCED]).await;
    let (stream, _) = plane.stream().await;
    let sets: [&[(&str, u32)]; 4] =
        [&[("edge", 5)], &[("edge", 5), ("api", 3)], &[("edge", 6), ("api", 3)], &[("api", 3)]];
    for (number, set) in sets.iter().enumerate() {
        let resources: Vec<_> =
            set.iter().map(|(domain, most)| limit(domain, domain, RateLimitUnit::Day, *most)).collect();
        let nonce = number.to_string();
        stream.send(response("always", &nonce, &resources)).unwrap();
        assert_eq!(answer(&plane.request().await), ("always", &*nonce, None));
        let in_force = rlconfig(&server).await;
        assert_eq!(in_force.lines().count(), set.len(), "{in_force}");
        for (domain, most) in *set {
            assert!(in_force.contains(&format!("{domain}.user: unit=DAY requests_per_unit={most},")), "{in_force}");
        }
    }
    // Three in a row are answered in order, or the last of them alone.
    for number in ["7", "8", "9"] {
        stream
            .send(response(number, number, &[limit("res", "edge", RateLimitUnit::Day, number.parse().unwrap())]))
            .unwrap();
    }
    let mut last = plane.request().await;
    while last.response_nonce != "9" {
        last = plane.request().await;
    }
    assert_eq!(answer(&last), ("9", "9", None));
    assert!(rlconfig(&server).await.contains("requests_per_unit=9"));
}

#[tokio::test]
async fn ten_thousand_rules_come_into_force_and_a_repeated_set_is_not_loaded_again() {
    let mut plane = Plane::start().await;
    let server = start(&plane.variables(), &[FORCED]).await;
    let (stream, _) = plane.stream().await;
    stream.send(response("1", "n1", &[many("edge", 10_000)])).unwrap();
    assert_eq!(answer(&plane.request().await), ("1", "n1", None));
    assert_eq!(rlconfig(&server).await.lines().count(), 10_000);
    assert!(metric(&server, "tidegate_rules_generation 1").await);
    stream.send(response("2", "n2", &[many("edge", 10_000)])).unwrap();
    assert_eq!(answer(&plane.request().await), ("2", "n2", None));
    assert!(metric(&server, "tidegate_rules_generation 1").await);
}

#[tokio::test]
async fn a_repeated_refusal_waits_and_a_correction_does_not() {
    let mut plane = Plane::start().await;
    let server = start(&plane.variables(), &[FORCED]).await;
    let (stream, _) = plane.stream().await;
    let wrong = || limit("res", "edge", RateLimitUnit::Unknown, 5);
    stream.send(response("bad", "n1", &[wrong()])).unwrap();
    let first = plane.request().await;
    assert!(first.error_detail.is_some());
    // The control plane answers each refusal at once with the same set.
    let began = Instant::now();
    stream.send(response("bad", "n2", &[wrong()])).unwrap();
    assert_eq!(plane.request().await.response_nonce, "n2");
    assert!(began.elapsed() >= Duration::from_secs(1), "the second refusal waits for a second");
    let began = Instant::now();
    stream.send(response("bad", "n3", &[wrong()])).unwrap();
    eventually("it is refused", async || {
        metric(&server, r#"tidegate_xds_responses_total{answer="refused"} 3"#).await.then_some(())
    })
    .await;
    stream.send(response("good", "n4", &[limit("res", "edge", RateLimitUnit::Day, 5)])).unwrap();
    let answers = plane.request().await;
    if began.elapsed() < Duration::from_secs(2) {
        // The correction came while the third refusal waited: that refusal is not sent.
        assert_eq!(answer(&answers), ("good", "n4", None));
        assert!(!plane.has_request());
    }
    assert!(rlconfig(&server).await.contains("requests_per_unit=5"));
}

#[tokio::test]
async fn an_empty_set_is_acknowledged_and_held_and_rules_that_come_meanwhile_end_the_hold() {
    let mut plane = Plane::start().await;
    let server = start(&plane.variables(), &[FORCED, ("XDS_HOLD_EMPTY", "1h")]).await;
    let (stream, _) = plane.stream().await;
    let set = |most| [limit("res", "edge", RateLimitUnit::Day, most)];
    stream.send(response("1", "n1", &set(1))).unwrap();
    plane.request().await;
    assert!(call(&server).await.status == 200);
    stream.send(response("2", "n2", &[])).unwrap();
    assert_eq!(answer(&plane.request().await), ("2", "n2", None));
    assert!(call(&server).await.status == 429, "the old rule still refuses");
    assert!(metric(&server, "tidegate_xds_empty_set_held 1").await);
    assert!(page(&server, "/").await.contains("the control plane has sent an empty set"));
    stream.send(response("3", "n3", &set(1))).unwrap();
    assert_eq!(answer(&plane.request().await), ("3", "n3", None));
    assert!(metric(&server, "tidegate_xds_empty_set_held 0").await);
    assert!(call(&server).await.status == 429, "the counter lives on");

    // A wrong set is the last word of the control plane too: the rules in force stay.
    stream.send(response("4", "n4", &[])).unwrap();
    plane.request().await;
    assert!(metric(&server, "tidegate_xds_empty_set_held 1").await);
    stream.send(response("5", "n5", &[limit("res", "edge", RateLimitUnit::Unknown, 1)])).unwrap();
    assert!(plane.request().await.error_detail.is_some());
    assert!(metric(&server, "tidegate_xds_empty_set_held 0").await);
    assert!(metric(&server, "tidegate_rules_rejected 1").await);
    // And so is an empty set after it; then the set in force again.
    stream.send(response("6", "n6", &[])).unwrap();
    plane.request().await;
    stream.send(response("7", "n7", &set(1))).unwrap();
    assert_eq!(answer(&plane.request().await), ("7", "n7", None));
    assert!(metric(&server, "tidegate_rules_rejected 0").await);
    assert!(call(&server).await.status == 429, "the counter lives on");
}

#[tokio::test]
async fn an_empty_set_comes_into_force_when_its_hold_ends_even_without_a_stream() {
    let mut plane = Plane::start().await;
    let server = start(
        &plane.variables(),
        &[FORCED, ("XDS_HOLD_EMPTY", "300ms"), ("HEALTHY_WITH_AT_LEAST_ONE_CONFIG_LOADED", "true")],
    )
    .await;
    let healthy = async || http::get(server.http, "/healthcheck").await.status == 200;
    assert!(!healthy().await, "there are no rules yet");
    let (stream, _) = plane.stream().await;
    stream.send(response("1", "n1", &[limit("res", "edge", RateLimitUnit::Day, 1)])).unwrap();
    plane.request().await;
    eventually("it is healthy", async || healthy().await.then_some(())).await;
    stream.send(response("2", "n2", &[])).unwrap();
    plane.request().await;
    drop((plane, stream));
    eventually("the empty set is in force", async || rlconfig(&server).await.is_empty().then_some(())).await;
    eventually("it is not healthy", async || (!healthy().await).then_some(())).await;
    assert!(metric(&server, "tidegate_xds_empty_set_held 0").await);
}

#[tokio::test]
async fn an_empty_response_of_another_type_is_refused_and_removes_no_rules() {
    let mut plane = Plane::start().await;
    let server = start(&plane.variables(), &[FORCED]).await;
    let (stream, _) = plane.stream().await;
    stream.send(response("1", "n1", &[day("res", "edge")])).unwrap();
    assert_eq!(answer(&plane.request().await), ("1", "n1", None));
    let in_force = rlconfig(&server).await;
    let mut foreign = response("2", "n2", &[]).unwrap();
    "type.googleapis.com/envoy.config.cluster.v3.Cluster".clone_into(&mut foreign.type_url);
    stream.send(Ok(foreign)).unwrap();
    let reason = format!(
        "the response has no resources, and is of the type \"type.googleapis.com/envoy.config.cluster.v3.Cluster\": expected {TYPE_URL}"
    );
    assert_eq!(answer(&plane.request().await), ("1", "n2", Some(&*reason)));
    assert_eq!(rlconfig(&server).await, in_force);
    stream.send(response("3", "n3", &[day("res", "edge")])).unwrap();
    assert_eq!(answer(&plane.request().await), ("3", "n3", None));
    assert!(metric(&server, "tidegate_rules_rejected 0").await);
}

#[tokio::test]
async fn a_set_without_room_beside_the_overlay_is_acknowledged_once_the_overlay_has_shrunk() {
    let directory = tempfile::tempdir().unwrap();
    let overlay = directory.path().join("overlay.yaml");
    let values: Vec<_> = (0..2_000).map(|number| format!("v{number}")).collect();
    let wide = format!("overlay: \"*\"\ndescriptors: [{{ key: user, values: [{}], deny: true }}]\n", values.join(", "));
    std::fs::write(&overlay, wide).unwrap();
    let mut plane = Plane::start().await;
    let server = start(&plane.variables(), &[FORCED, ("RULES_OVERLAY", overlay.to_str().unwrap())]).await;
    let (stream, _) = plane.stream().await;
    let sets: Vec<_> = (0..100).map(|number| day(&format!("res-{number}"), &format!("edge-{number}"))).collect();
    stream.send(response("1", "n1", &sets)).unwrap();
    let refused = plane.request().await;
    assert_eq!((answer(&refused).0, answer(&refused).1), ("", "n1"));
    assert!(refused.error_detail.unwrap().message.contains("100 domains"));
    let small = directory.path().join("small");
    std::fs::write(&small, "overlay: \"*\"\ncharging: all_or_nothing\n").unwrap();
    std::fs::rename(small, &overlay).unwrap();
    assert_eq!(answer(&plane.request().await), ("1", "n1", None));
    assert!(metric(&server, "tidegate_rules 100").await);
    assert!(metric(&server, "tidegate_rules_rejected 0").await);
}

/// Responses that cost their sender nothing: a response of tiny messages, and one of another type again and again.
#[tokio::test]
async fn responses_of_tiny_messages_and_of_another_type_take_little_memory_log_and_time() {
    let mut plane = Plane::start().await;
    let server = start(&plane.variables(), &[("FORCE_START_WITHOUT_INITIAL_CONFIG", "true")]).await;
    let (stream, _) = plane.stream().await;
    stream.send(response("1", "n1", &[limit("res", "edge", RateLimitUnit::Day, 5)])).expect("it is sent");
    assert_eq!(answer(&plane.request().await), ("1", "n1", None));
    let before = server.peak_memory();
    let domain = limit("res", "edge", RateLimitUnit::Day, 6);
    let mut tiny = response("2", "n2", &[domain]).expect("a response");
    tiny.resources[0].value.extend([0x1a, 0x00].repeat(1_900_000));
    stream.send(Ok(tiny)).expect("it is sent");
    let refused = plane.request().await;
    let (version, nonce, reasons) = answer(&refused);
    assert_eq!((version, nonce), ("1", "n2"));
    assert!(reasons.is_some_and(|reasons| reasons.contains("they were not decoded")), "{reasons:?}");
    let grown = server.peak_memory() - before;
    println!("1.9 million empty descriptors: {} MiB more", grown >> 20);
    assert!(grown < 32 << 20, "{grown} bytes more");
    let mut other = response("3", "n3", &[]).expect("a response");
    other.type_url = "type.googleapis.com/envoy.config.cluster.v3.Cluster".to_owned();
    for _ in 0..20_000 {
        stream.send(Ok(other.clone())).expect("it is sent");
    }
    tokio::time::sleep(Duration::from_secs(2)).await;
    let count = server.metric("tidegate_xds_responses_total{answer=\"refused\"}").await;
    assert!((2..12).contains(&count), "{count} in 2 s");
    assert_eq!(
        server.log().matches("rules.rejected").count() + server.log().matches("new rules are invalid").count() / 2,
        1,
        "{}",
        server.log()
    );
    assert!(rlconfig(&server).await.contains("requests_per_unit=5"), "the last good rules stay");
}
