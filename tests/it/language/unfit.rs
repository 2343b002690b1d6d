//! Charges that never fit, and values that are no address: what `check` says, and what a client is told.

use tidegate::model::Outcome;
use tidegate::rulefile::{Options, load};

use crate::world::{World, file};

/// The places and messages of the warnings about these descriptors.
fn warned(descriptors: &str) -> Vec<String> {
    let text = format!("domain: d\ndescriptors:\n{descriptors}");
    let loaded = load(&[file("r.yaml", &text)], Options::default()).unwrap_or_else(|invalid| panic!("{invalid}"));
    loaded
        .warnings
        .iter()
        .map(ToString::to_string)
        .map(|text| text.lines().next().unwrap_or_default().to_owned())
        .collect()
}

#[test]
fn a_cost_above_what_a_limit_admits_at_once_is_a_warning() {
    let limit = |fields: &str| format!("  - {{ key: a, rate_limit: {{ unit: minute, {fields} }} }}\n");
    for (fields, expected) in [
        (
            "requests_per_unit: 5, algorithm: gcra, burst: 3, cost: 4",
            "each request costs 4 hits of a burst of 3, so this limit refuses every request: write a smaller `cost` or a larger `burst`",
        ),
        (
            "requests_per_unit: 5, cost: 10",
            "each request costs 10 hits of a limit of 5, so this limit refuses every request: write a smaller `cost` or a larger `requests_per_unit`",
        ),
        (
            "requests_per_unit: 5, algorithm: sliding_log, cost: 6",
            "each request costs 6 hits of a limit of 5, so this limit refuses every request: write a smaller `cost` or a larger `requests_per_unit`",
        ),
    ] {
        let told = warned(&limit(fields));
        assert!(told.len() == 1 && told[0].ends_with(expected), "{fields}: {told:?}");
    }
    for fields in [
        "requests_per_unit: 5, algorithm: gcra, burst: 4, cost: 4",
        "requests_per_unit: 5, cost: 5",
        "requests_per_unit: 0, cost: 5",
        "requests_per_unit: 5, cost: 6, delay: { step: 1s, max: 5s, beyond: admit }",
    ] {
        assert_eq!(warned(&limit(fields)), [""; 0], "{fields}");
    }
}

#[test]
fn a_cost_of_a_request_above_a_limit_of_its_item_or_of_another_is_a_warning() {
    let own = "  - { key: a, request_cost: 10, rate_limit: { unit: minute, requests_per_unit: 25, cost: 3 } }\n";
    let told = warned(own);
    assert!(
        told.len() == 1
            && told[0].starts_with("r.yaml:3:29: warning: each request costs 30 hits of a limit of 25 on line 3"),
        "{told:?}"
    );
    let other =
        |limit: &str| format!("  - {{ key: path, value: /export, request_cost: 10 }}\n  - {{ key: {limit} }}\n");
    let told = warned(&other("user, rate_limit: { unit: minute, requests_per_unit: 9 }"));
    assert!(
        told.len() == 1 && told[0].contains("the limit on line 4 admits at most 9 such requests at once"),
        "{told:?}"
    );
    for fits in [
        "user, rate_limit: { unit: minute, requests_per_unit: 10 }",
        "user, shadow_mode: true, rate_limit: { unit: minute, requests_per_unit: 9 }",
        "path, value: /login, rate_limit: { unit: minute, requests_per_unit: 9 }",
    ] {
        assert_eq!(warned(&other(fits)), [""; 0], "{fits}");
    }
}

#[test]
fn a_value_that_is_no_address_is_counted_as_text_or_refused_by_choice() {
    let rules = |more: &str| {
        format!(
            "domain: d
entries: {{ ip: {{ as: ip{more} }} }}
descriptors:
  - {{ key: ip, cidr: [203.0.113.0/24], deny: true }}
  - {{ key: ip, rate_limit: {{ unit: hour, requests_per_unit: 2 }} }}
  - {{ key: vip, exempt: true }}
"
        )
    };
    let outcome =
        |world: &World, entries: &str| world.ask(&crate::world::request([crate::world::descriptor(entries)])).outcome;
    let world = World::new(&rules(""));
    for spelling in [" 203.0.113.5", "203.0.113.5 \t", "203.0.113.5\r\n", "\u{b}203.0.113.5\u{c}"] {
        assert_eq!(outcome(&world, &format!("ip={spelling}")), Outcome::Refused, "{spelling:?}");
    }
    for spelling in ["192.0.2.7", " 192.0.2.7", "192.0.2.7\n"] {
        let expected = if spelling.ends_with('\n') { Outcome::Refused } else { Outcome::Admitted };
        assert_eq!(outcome(&world, &format!("ip={spelling}")), expected, "one counter for {spelling:?}");
    }
    assert_eq!(outcome(&world, "ip=unknown"), Outcome::Admitted, "other text has a counter of its own");
    let world = World::new(&rules(", not_an_address: refuse"));
    for (entries, expected) in [
        ("ip=unknown", Outcome::Refused),
        ("ip=", Outcome::Refused),
        ("other=1,ip=unknown", Outcome::Refused),
        ("vip=1,ip=unknown", Outcome::Refused),
        ("ip=192.0.2.7", Outcome::Admitted),
        ("ip= [2001:db8::1]:443 ", Outcome::Admitted),
        ("other=unknown", Outcome::Admitted),
    ] {
        assert_eq!(outcome(&world, entries), expected, "{entries}");
    }
}

#[test]
fn check_offers_to_refuse_what_is_no_address_where_a_list_denies_addresses() {
    let told = |entry: &str, item: &str| {
        let text = format!(
            "domain: d\nentries: {{ ip: {{ as: ip{entry} }} }}\ndescriptors:\n  - {{ key: ip, {item} }}\n  - {{ key: ip, rate_limit: {{ unit: hour, requests_per_unit: 2 }} }}\n"
        );
        let loaded = load(&[file("r.yaml", &text)], Options::default()).unwrap_or_else(|invalid| panic!("{invalid}"));
        loaded.warnings.iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    let warned = told("", "cidr: [203.0.113.0/24], deny: true");
    assert!(warned.len() == 1 && warned[0].contains("write `not_an_address: refuse` beside `as: ip`"), "{warned:?}");
    for (entry, item) in [
        (", not_an_address: refuse", "cidr: [203.0.113.0/24], deny: true"),
        (", not_an_address: count", "cidr: [203.0.113.0/24], deny: true"),
        ("", "cidr: [203.0.113.0/24], exempt: true"),
    ] {
        assert_eq!(told(entry, item), [""; 0], "{entry} {item}");
    }
}
