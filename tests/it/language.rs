//! The rule language: who is one client, who is exempt or refused, and what a request costs.

use std::io::Write;

use proptest::prelude::*;
use tempfile::NamedTempFile;
use tidegate::model::{Decision, Descriptor, Entry, Finding, Outcome, Override};
use tidegate::normalize::digest::KeySecret;
use tidegate::rulefile::Options;
use tidegate::rules::explain;

use crate::world::{World, descriptor, file, load, request};

mod unfit;

/// Rules that know a secret.
fn options() -> Options {
    let key_secret = KeySecret::new(b"a secret of some length");
    Options { key_secret, ..Options::default() }
}

fn world(rules: &str) -> World {
    World::with(rules, options())
}

/// A list of these lines.
fn list(lines: &str) -> NamedTempFile {
    let mut list = NamedTempFile::new().expect("a file");
    list.write_all(lines.as_bytes()).expect("it is written");
    list
}

/// What `load` says of rules that are wrong, without the lines of the file.
fn wrong(rules: &str) -> Vec<String> {
    let invalid = load(&[file("rules.yaml", rules)], options()).expect_err("they are wrong");
    invalid.problems.iter().map(|problem| problem.to_string().lines().next().unwrap_or_default().to_owned()).collect()
}

/// The name of the rule that answers for a descriptor.
fn rule(decision: &Decision<'_>) -> Option<String> {
    decision.parts[0].rule.map(|rule| rule.path.to_string())
}

const ADDRESSES: &str = "domain: d
entries: { remote_address: { as: ip } }
descriptors: [{ key: remote_address, rate_limit: { unit: week, requests_per_unit: 10 } }]
";

#[test]
fn every_spelling_of_an_address_is_one_client() {
    let world = world(ADDRESSES);
    for (index, address) in
        ["192.0.2.1", "::ffff:192.0.2.1", "::FFFF:c000:0201", "192.0.2.1:4711"].into_iter().enumerate()
    {
        world.hit(&format!("remote_address={address}"), 1).admitted(9 - u32::try_from(index).unwrap());
    }
    world.hit("remote_address=192.0.2.2", 1).admitted(9);
    for (left, address) in [(9, "2001:db8::1"), (8, "2001:DB8:0::0001"), (7, "[2001:db8::1]"), (6, "2001:db8::ffff")] {
        world.hit(&format!("remote_address={address}"), 1).admitted(left);
    }
    world.hit("remote_address=2001:db8:0:1::1", 1).admitted(9);
}

#[test]
fn a_thousand_addresses_of_one_network_share_one_counter() {
    let world = world(&ADDRESSES.replace("requests_per_unit: 10 ", "requests_per_unit: 1000 "));
    for host in 0..1_000_u32 {
        world.hit(&format!("remote_address=2001:db8:1:2:{host:x}::{host:x}"), 1).admitted(999 - host);
    }
    assert_eq!(world.store.counters(), 1);
}

#[test]
fn the_file_says_how_many_bits_of_an_address_count() {
    let world = world(&ADDRESSES.replace("as: ip", "as: ip, v4_prefix: 24, v6_prefix: 48"));
    world.hit("remote_address=192.0.2.1", 1).admitted(9);
    world.hit("remote_address=192.0.2.254", 1).admitted(8);
    world.hit("remote_address=192.0.3.1", 1).admitted(9);
    world.hit("remote_address=2001:db8:1:2::", 1).admitted(9);
    world.hit("remote_address=2001:db8:1:3::", 1).admitted(8);
    world.hit("remote_address=2001:db8:2:2::", 1).admitted(9);
}

#[test]
fn an_address_with_a_rule_of_its_own_is_not_counted_with_its_neighbours() {
    let world = world(
        "domain: d
entries: { ip: { as: ip, v4_prefix: 24 } }
descriptors:
  - { key: ip, value: 192.0.2.1, rate_limit: { unit: week, requests_per_unit: 3 } }
  - { key: ip, cidr: [192.0.2.128/25], rate_limit: { unit: week, requests_per_unit: 5 } }
  - { key: ip, rate_limit: { unit: week, requests_per_unit: 10 } }
",
    );
    world.hit("ip=192.0.2.2", 1).admitted(9);
    world.hit("ip=::ffff:192.0.2.1", 1).admitted(2);
    world.hit("ip=192.0.2.129", 1).admitted(4);
    world.hit("ip=192.0.2.200", 1).admitted(3);
    world.hit("ip=192.0.2.3", 1).admitted(8);
}

const PATHS: &str = "domain: d
entries: { path: { as: path, case: lower } }
descriptors:
  - { key: path, value: /Login, rate_limit: { unit: week, requests_per_unit: 20000 } }
  - { key: path, value: /API/*, rate_limit: { unit: week, requests_per_unit: 5 } }
  - { key: path, rate_limit: { unit: week, requests_per_unit: 7 } }
";

#[test]
fn every_spelling_of_a_path_is_one_path() {
    let world = world(PATHS);
    for query in 0..10_000_u32 {
        world
            .hit(&format!("path=/login?x={query}").replace('=', "=").replacen("x=", "x%3D", 1), 1)
            .admitted(19_999 - query);
    }
    for (left, path) in
        [(9_999, "//login"), (9_998, "/%6Cogin"), (9_997, "/a/../LOGIN"), (9_996, "/login#top"), (9_995, "/./login")]
    {
        world.hit(&format!("path={path}"), 1).admitted(left);
    }
    assert_eq!(world.store.counters(), 1);
    world.hit("path=/api/Users", 1).admitted(4);
    world.hit("path=/x//y", 1).admitted(6);
    world.hit("path=/X/y?z", 1).admitted(5);
}

#[test]
fn a_sensitive_value_is_counted_and_stands_nowhere() {
    let rules = "domain: d
entries: { api_key: { sensitive: true } }
descriptors:
  - { key: api_key, value: k-of-the-partner, rate_limit: { unit: week, requests_per_unit: 9 } }
  - { key: api_key, rate_limit: { unit: week, requests_per_unit: 2 } }
";
    let world = world(rules);
    world.hit("api_key=k-123", 1).admitted(1);
    world.hit("api_key=k-124", 1).admitted(1);
    world.hit("api_key=k-123", 1).admitted(0);
    world.hit("api_key=k-123", 1).refused(0);
    world.hit("api_key=k-of-the-partner", 1).admitted(8);

    let loaded = load(&[file("rules.yaml", rules)], options()).expect("rules").rules;
    for value in ["k-123", "k-of-the-partner"] {
        let asked = request([descriptor(&format!("api_key={value}"))]);
        let matched = loaded.find(&asked);
        let key = matched.charges[0].key.to_string();
        assert!(key.starts_with("{d|api_key=#") && !key.contains(value), "{key}");
        assert!(matched.hidden[0].digest.len() == 32 && !matched.hidden[0].digest.contains(value));
        let told = explain(&loaded, "d", &asked.descriptors()[0]).to_string();
        assert!(told.contains(&key) && !told.contains(value), "{told}");
        assert!(!format!("{matched:?}").contains(value), "{matched:?}");
    }
    let names: Vec<_> = loaded.rules().iter().map(|rule| rule.path().to_string()).collect();
    assert!(names[0].starts_with("d.api_key_") && !names[0].contains("partner"), "{names:?}");
    let other = Options { key_secret: KeySecret::new(b"another secret of some length"), ..options() };
    let other = load(&[file("rules.yaml", rules)], other).expect("rules").rules;
    let key =
        |rules: &tidegate::rules::RuleSet| rules.find(&request([descriptor("api_key=k-123")])).charges[0].key.clone();
    assert_ne!(key(&loaded), key(&other), "without the secret nobody can make the name of a counter");
}

#[test]
fn sensitive_values_need_a_secret_where_requests_are_decided() {
    let rules = [file(
        "rules.yaml",
        "domain: d\nentries: { k: { sensitive: true } }\ndescriptors: [{ key: k, rate_limit: { unit: day, requests_per_unit: 1 } }]\n",
    )];
    let told = |needs_secret| load(&rules, Options { needs_secret, ..Options::default() });
    let error = told(true).expect_err("it has none").to_string();
    assert!(error.contains("rules.yaml:2:17: error") && error.contains("KEY_SECRET_FILE"), "{error}");
    let loaded = told(false).expect("to be looked at it needs none");
    assert!(loaded.warnings[0].message.contains("KEY_SECRET_FILE"), "{:?}", loaded.warnings);
}

#[test]
fn the_smallest_network_answers_and_an_exact_value_before_it() {
    let world = world(
        "domain: d
descriptors:
  - { key: ip, cidr: [10.0.0.0/8, 2001:db8::/32], metadata: { is: eight } }
  - { key: ip, cidr: [10.1.0.0/16], rate_limit: { unit: week, requests_per_unit: 16 } }
  - { key: ip, values: [10.1.2.3, \"2001:db8::1\", alice], rate_limit: { unit: week, requests_per_unit: 32 } }
  - { key: ip, value: 10.9.9.9, rate_limit: { unit: week, requests_per_unit: 99 } }
  - { key: ip, value: 10.*, rate_limit: { unit: week, requests_per_unit: 77 } }
  - { key: ip, rate_limit: { unit: week, requests_per_unit: 1000 } }
",
    );
    for (value, limit) in [
        ("10.1.2.3", Some(32)),
        ("::ffff:10.1.2.3", Some(32)),
        ("2001:DB8::0001", Some(32)),
        ("alice", Some(32)),
        ("10.1.2.4", Some(16)),
        ("10.9.9.9", Some(99)),
        ("10.2.0.1", None),
        ("2001:db8::2", None),
        ("10.bob", Some(77)),
        ("11.0.0.1", Some(1000)),
        ("bob", Some(1000)),
    ] {
        assert_eq!(world.look(&format!("ip={value}")).limit, limit, "{value}");
    }
}

#[test]
fn the_values_of_a_list_share_a_counter_where_they_are_told_to() {
    let world = world(
        "domain: d
descriptors:
  - { key: ip, cidr: [10.0.0.0/8], share_threshold: true, rate_limit: { unit: week, requests_per_unit: 5 } }
  - { key: user, values: [a, b], rate_limit: { unit: week, requests_per_unit: 5 } }
",
    );
    world.hit("ip=10.0.0.1", 1).admitted(4);
    world.hit("ip=10.0.0.2", 1).admitted(3);
    world.hit("user=a", 1).admitted(4);
    world.hit("user=b", 1).admitted(4);
}

#[test]
fn a_list_may_stand_in_a_file_of_its_own() {
    let list = list("# partners\n192.0.2.0/24\n2001:db8::1 # the office\nAlice\n\n");
    let world = world(&format!(
        "domain: d
entries: {{ who: {{ case: lower }} }}
descriptors:
  - {{ key: who, values_file: {}, exempt: true }}
  - {{ key: who, rate_limit: {{ unit: week, requests_per_unit: 0 }} }}
",
        list.path().display()
    ));
    for who in ["192.0.2.77", "2001:db8::1", "alice", "ALICE"] {
        assert!(!world.look(&format!("who={who}")).refused && !world.hit(&format!("who={who}"), 1).refused, "{who}");
    }
    for who in ["192.0.3.1", "2001:db8::2", "bob", "# partners", ""] {
        assert!(world.hit(&format!("who={who}"), 1).refused, "{who}");
    }
}

#[test]
fn an_address_within_a_network_stands_for_the_network_in_a_list() {
    let list = list("10.0.0.1/8\n");
    let world = world(&format!(
        "domain: d\ndescriptors:\n  - {{ key: ip, values_file: {}, deny: true }}\n",
        list.path().display()
    ));
    assert!(world.look("ip=10.255.0.9").refused && !world.look("ip=11.0.0.1").refused);
}

#[test]
fn what_is_wrong_with_a_list_is_said_with_its_line() {
    let list = list("10.0.0.0/8\n10.0.0.0/99\n10.1.2.3/16\nfe80::1%eth0\n");
    let name = list.path().display().to_string();
    let rules = format!(
        "domain: d\ndescriptors:\n  - {{ key: ip, values_file: {name}, deny: true }}\n  - {{ key: ip, values_file: /no/such/list, deny: true }}\n"
    );
    let found = wrong(&rules);
    assert_eq!(
        found[0],
        format!(
            "{name}:2:1: error: the line (11 bytes, not shown) is not a network: the prefix length after the slash must be a number from 0 to 32"
        )
    );
    assert_eq!(
        found[1],
        format!(
            "{name}:3:1: warning: the line (11 bytes, not shown) is an address with a prefix length, not a network: it is read as its network"
        )
    );
    assert_eq!(
        found[2],
        format!(
            "{name}:4:1: warning: the line (12 bytes, not shown) has a zone id, which is not part of a client's address: it is read without it, and matches on every interface"
        )
    );
    assert!(
        found[3].starts_with("rules.yaml:4:29: error: the list /no/such/list cannot be read: No such file"),
        "{found:?}"
    );
}

#[test]
fn of_two_lists_with_the_same_value_the_one_that_refuses_goes_first() {
    let (partners, blocked) = (list("10.0.0.0/8\n192.0.2.1\n"), list("10.0.0.0/8\n"));
    for order in [[("exempt", &partners), ("deny", &blocked)], [("deny", &blocked), ("exempt", &partners)]] {
        let items = order
            .map(|(word, list)| format!("  - {{ key: ip, values_file: {}, {word}: true }}\n", list.path().display()));
        let world = world(&format!(
            "domain: d\ndescriptors:\n{}  - {{ key: ip, rate_limit: {{ unit: week, requests_per_unit: 0 }} }}\n",
            items.concat()
        ));
        assert!(world.hit("ip=10.1.1.1", 1).refused);
        assert!(!world.hit("ip=192.0.2.1", 1).refused);
    }
}

#[test]
fn of_two_items_with_the_same_value_one_of_them_in_a_file_exempt_goes_before_a_limit_and_the_first_of_two_limits() {
    let list = list("alice\n");
    let of_file = |rest: &str| format!("  - {{ key: who, values_file: {}, {rest} }}\n", list.path().display());
    let limit = |hits: u32| format!("rate_limit: {{ unit: week, requests_per_unit: {hits} }}");
    let plain = format!("  - {{ key: who, value: alice, {} }}\n", limit(0));
    let exempt = of_file("exempt: true");
    for items in [[&plain, &exempt], [&exempt, &plain]] {
        let world = world(&format!("domain: d\ndescriptors:\n{}", items.map(String::as_str).concat()));
        assert!(!world.hit("who=alice", 1).refused, "{items:?}");
    }
    let world = world(&format!("domain: d\ndescriptors:\n{}{}", of_file(&limit(5)), of_file(&limit(9))));
    world.hit("who=alice", 1).admitted(4);
}

#[test]
fn a_million_entries_load() {
    let lines: String =
        (0..1_000_000_u32).map(|n| format!("{}\n", std::net::Ipv4Addr::from(0x0a00_0000 + n * 3))).collect();
    let list = list(&lines);
    let world = world(&format!(
        "domain: d\ndescriptors:\n  - {{ key: ip, values_file: {}, deny: true }}\n  - {{ key: ip, rate_limit: {{ unit: week, requests_per_unit: 9 }} }}\n",
        list.path().display()
    ));
    assert!(world.hit("ip=10.0.0.3", 1).refused && world.hit("ip=10.45.198.189", 1).refused);
    world.hit("ip=10.0.0.4", 1).admitted(8);
}

const TIERS: &str = "domain: d
descriptors:
  - { key: ip, cidr: [203.0.113.0/24], deny: true, message: Go away. }
  - { key: ip, values: [203.0.113.7, 192.0.2.9], exempt: true }
  - { key: ip, rate_limit: { unit: week, requests_per_unit: 1 } }
  - { key: tier, rate_limit: { unit: week, requests_per_unit: 2 } }
  - { key: user, value: mallory, deny: true }
  - { key: user, rate_limit: { unit: week, requests_per_unit: 2 } }
";

#[test]
fn a_denied_request_charges_nothing_and_says_why() {
    let world = world(TIERS);
    let asked = request(["tier=all", "ip=203.0.113.1"].map(descriptor));
    let decision = world.ask(&asked);
    assert_eq!(decision.outcome, Outcome::Refused);
    let ruling = decision.ruling.expect("a rule decides");
    assert!(ruling.is_denied);
    assert_eq!(ruling.rule.message.as_deref(), Some("Go away."));
    assert!(
        matches!(decision.parts[0].finding, Finding::Unmatched) && matches!(decision.parts[1].finding, Finding::Denied)
    );
    assert_eq!(decision.parts[1].outcome(), Outcome::Refused);
    assert_eq!((decision.retry, world.store.counters()), (None, 0));
}

#[test]
fn an_exempt_request_passes_when_every_tier_is_full_and_moves_no_counter() {
    let world = world(TIERS);
    let tiers = |ip: &str| request(["tier=all", ip, "user=alice"].map(descriptor));
    for ip in ["ip=192.0.2.1", "ip=192.0.2.2"] {
        assert_eq!(world.ask(&tiers(ip)).outcome, Outcome::Admitted);
    }
    assert_eq!(world.ask(&tiers("ip=192.0.2.3")).outcome, Outcome::Refused);
    let before = ["tier=all", "user=alice", "ip=192.0.2.1"].map(|entries| world.look(entries));
    for _ in 0..10 {
        let asked = tiers("ip=192.0.2.9");
        let decision = world.ask(&asked);
        assert_eq!(
            (decision.outcome, decision.ruling.map(|ruling| ruling.is_denied)),
            (Outcome::Admitted, Some(false))
        );
        assert!(decision.parts.iter().all(|part| part.outcome() == Outcome::Admitted));
    }
    assert_eq!(["tier=all", "user=alice", "ip=192.0.2.1"].map(|entries| world.look(entries)), before);
}

#[test]
fn a_smaller_network_is_carved_out_of_a_larger_and_of_two_entries_the_denied_one_decides() {
    let world = world(TIERS);
    assert!(!world.hit("ip=203.0.113.7", 1).refused, "the exempt address within the denied network");
    assert!(world.all(["ip=203.0.113.7", "user=mallory"]).0, "deny goes before exempt");
    assert!(world.all(["user=mallory", "ip=203.0.113.7"]).0, "in any order");
}

#[test]
fn where_refusals_are_only_watched_a_denial_is_too_and_nobody_waits_or_is_warned() {
    let shadowed = World::with(TIERS, Options { shadow_mode: true, ..options() });
    let asked = request([descriptor("user=mallory")]);
    let decision = shadowed.ask(&asked);
    assert_eq!((decision.outcome, decision.parts[0].outcome()), (Outcome::Admitted, Outcome::Refused));

    let rules = "domain: d
descriptors: [{ key: user, rate_limit: { unit: week, requests_per_unit: 1, warn_at: 1%, delay: { step: 1s, max: 9s, beyond: admit } } }]
";
    for (shadow_mode, waits) in [(false, 1_000_000), (true, 0)] {
        let world = World::with(rules, Options { shadow_mode, ..options() });
        let asked = request([descriptor("user=alice")]);
        let _ = world.ask(&asked);
        let decision = world.ask(&asked);
        assert_eq!((decision.wait.header.get(), decision.warnings.is_empty()), (waits, shadow_mode));
    }
}

#[test]
fn an_address_with_a_port_or_in_brackets_is_one_in_a_list_too() {
    let world = world(
        "domain: d
entries: { ip: { as: ip } }
descriptors:
  - { key: ip, values: [\"192.0.2.1:443\", \"[2001:db8::1]\"], deny: true }
  - { key: ip, rate_limit: { unit: week, requests_per_unit: 9 } }
",
    );
    for address in ["192.0.2.1", "192.0.2.1:443", "::ffff:192.0.2.1", "2001:db8::1", "[2001:db8:0::1]:443"] {
        assert!(world.hit(&format!("ip={address}"), 1).refused, "{address}");
    }
    world.hit("ip=2001:db8::2", 1).admitted(8);
}

#[test]
fn link_local_clients_of_one_network_are_one_client_whatever_their_zone() {
    let world = world(ADDRESSES);
    let spelled =
        ["fe80::1%eth0", "fe80::2%25eth0", "FE80::3%2", "[fe80::4%eth0]", "[fe80::5%eth0]:443", "fe80::6%", "fe80::7"];
    for (index, address) in spelled.into_iter().enumerate() {
        world.hit(&format!("remote_address={address}"), 1).admitted(9 - u32::try_from(index).unwrap());
    }
    assert_eq!(world.store.counters(), 1);
    world.hit("remote_address=::ffff:192.0.2.1%eth0", 1).admitted(9);
    world.hit("remote_address=192.0.2.1", 1).admitted(8);
}

#[test]
fn no_zone_slips_past_a_list() {
    // Without `entries` a value that is in no list is compared with the networks all the same.
    for entries in ["{ ip: { as: ip } }", "{}"] {
        let world = world(&format!(
            "domain: d
entries: {entries}
descriptors:
  - {{ key: ip, cidr: [\"fe80::/10\", 192.0.2.0/24], deny: true }}
  - {{ key: ip, rate_limit: {{ unit: week, requests_per_unit: 9 }} }}
"
        ));
        for address in ["fe80::9%2", "[fe80::9%eth0]", "[fe80::9%eth0]:443", "fe80::9%", "::ffff:192.0.2.1%1"] {
            assert!(world.hit(&format!("ip={address}"), 1).refused, "{address}");
        }
        for last in ["fe80::9%2", "[fe80::9%eth0]:443", "192.0.2.1"] {
            let entries = vec![Entry::new("ip", format!("2001:db8::1, {last}"))];
            assert!(world.one(Descriptor { entries, ..Descriptor::default() }).refused, "{last}");
        }
        world.hit("ip=2001:db8::1%eth0", 1).admitted(8);
    }
}

#[test]
fn a_wildcard_on_paths_whose_other_spellings_are_denied_is_not_warned_of() {
    let guards = |guards: &[&str]| {
        let deny = |value: &&str| format!("  - {{ key: path, value: \"{value}\", deny: true }}\n");
        guards.iter().map(deny).collect::<String>()
    };
    let rules = |entries: &str, guards: &str| {
        format!(
            "domain: d
entries: {{ path: {{ {entries} }} }}
descriptors:
{guards}  - {{ key: path, value: /static/*, exempt: true }}
  - {{ key: path, value: /admin/*, deny: true }}
  - {{ key: path, rate_limit: {{ unit: week, requests_per_unit: 9 }} }}
"
        )
    };
    let warned = |rules: &str| load(&[file("rules.yaml", rules)], options()).expect("rules").warnings.len();
    for entries in ["as: path", "as: path, case: lower"] {
        assert_eq!(warned(&rules(entries, "")), 2);
        assert_eq!(warned(&rules(entries, &guards(&["*;*", "*%5C*"]))), 2, "`%2f` is left");
        let guarded = rules(entries, &guards(&["*;*", "*%2f*", "*%5C*"]));
        assert_eq!(warned(&guarded), 0);
        let world = world(&guarded);
        for path in
            ["/static/..;/x", "/static/..%2fx", "/static/..%2Fx", "/static/..\\x", "/x/..;/admin/y", "/admin%2Fy"]
        {
            assert!(world.hit(&format!("path={path}"), 1).refused, "{path}");
        }
    }
}

#[test]
fn a_limit_that_is_sent_where_no_rule_answers_is_counted_by_what_is_read() {
    let rules = "domain: d
entries: { path: { as: path }, ip: { as: ip }, api_key: { sensitive: true } }
descriptors: [{ key: path, value: /x }, { key: ip, value: 192.0.2.1 }, { key: api_key, value: x }]
";
    let world = world(rules);
    for (left, path) in [(2, "/login"), (1, "/login?1"), (0, "//login")] {
        assert_eq!(world.overridden(&format!("path={path}"), 3, 7).remaining, left, "{path}");
    }
    assert!(world.overridden("path=/login?2", 3, 7).refused);
    for left in [2, 1, 0] {
        assert_eq!(world.overridden(&format!("ip=2001:db8::{left}"), 3, 7).remaining, left);
    }
    let loaded = load(&[file("rules.yaml", rules)], options()).expect("rules").rules;
    let limit = Override::new(1, 1, 1).ok();
    let asked = request([Descriptor { limit, ..descriptor("api_key=k-123") }]);
    assert!(loaded.find(&asked).charges[0].key.to_string().starts_with("{d|api_key=#"));
}

#[test]
fn what_stands_for_shared_values_is_neither_shown_nor_taken_for_another() {
    let rules = |reading: &str| {
        format!(
            "domain: d
entries: {{ k: {{ {reading} }} }}
descriptors:
  - {{ key: k, values: [k-one, k-two], share_threshold: true, rate_limit: {{ unit: week, requests_per_unit: 5 }} }}
  - {{ key: k, value: k-live*, share_threshold: true, rate_limit: {{ unit: week, requests_per_unit: 5 }} }}
  - {{ key: k, rate_limit: {{ unit: week, requests_per_unit: 5 }} }}
"
        )
    };
    let hidden = load(&[file("rules.yaml", &rules("sensitive: true"))], options()).expect("rules").rules;
    let keys = ["k-one", "k-two", "k-live1", "k-live2", "k-live*", "k-one,k-two"].map(|value| {
        let entries = vec![Entry::new("k", value)];
        let asked = request([Descriptor { entries, ..Descriptor::default() }]);
        let key = hidden.find(&asked).charges[0].key.to_string();
        assert!(key.starts_with("{d|k=#") && !key.contains("k-"), "{key}");
        key
    });
    assert_eq!((&keys[0], &keys[2], &keys[2]), (&keys[1], &keys[3], &keys[4]));
    assert!(keys[0] != keys[2] && keys[5] != keys[0]);
    assert!(hidden.example().is_none_or(|example| example.entries.iter().all(|(_, value)| !value.contains("k-"))));

    // A network that is counted, and the same letters as a text.
    let world = world(
        "domain: d\nentries: { k: { as: ip } }\ndescriptors: [{ key: k, rate_limit: { unit: week, requests_per_unit: 5 } }]\n",
    );
    world.hit("k=2001:db8::1", 1).admitted(4);
    world.hit("k=2001:db8::/64", 1).admitted(4);
}

#[test]
fn letters_beyond_ascii_have_a_case_too_in_paths_and_beside_bytes_that_are_no_text() {
    let world = world(
        "domain: d
entries: { path: { as: path, case: lower }, name: { case: lower } }
descriptors:
  - { key: path, value: /École, deny: true }
  - { key: path, rate_limit: { unit: week, requests_per_unit: 9 } }
  - { key: name, value: É*, deny: true }
  - { key: name, value: \"*ΟΔΟΣ*\", deny: true }
  - { key: name, rate_limit: { unit: week, requests_per_unit: 9 } }
",
    );
    for path in ["/École", "/école", "/%C3%89COLE", "/%c3%a9cole"] {
        assert!(world.hit(&format!("path={path}"), 1).refused, "{path}");
    }
    for name in ["É", "éa", "xΟΔΟΣ", "ΟΔΟΣx", "οδοσ"] {
        assert!(world.hit(&format!("name={name}"), 1).refused, "{name}");
    }
    let broken = Entry::new("name", [b"\xc3\x89".to_vec(), vec![0xff]].concat());
    assert!(world.one(Descriptor { entries: vec![broken], ..Descriptor::default() }).refused);
}

#[test]
fn what_is_denied_is_denied_at_every_depth_below_and_by_an_override_too() {
    let world = world(TIERS);
    assert!(world.hit("ip=203.0.113.1,path=/", 1).refused, "no descriptor hides below the item that denies");
    assert!(world.overridden("ip=203.0.113.1", 100, 1).refused);
    assert!(world.look("ip=203.0.113.1").refused && world.refund("ip=203.0.113.1", 1).refused);
}

const COSTS: &str = "domain: d
charging: all_or_nothing
descriptors:
  - { key: path, value: /search, request_cost: 10 }
  - { key: path, value: /profile }
  - { key: path, request_cost: 5 }
  - key: user
    rate_limits:
      - { unit: week, requests_per_unit: 100 }
      - { unit: day, requests_per_unit: 1000, algorithm: sliding_window, cost: 3, name: bytes }
  - { key: tier, rate_limit: { unit: week, requests_per_unit: 1000000 } }
";

#[test]
fn the_rule_of_one_descriptor_says_what_the_whole_request_costs() {
    let world = world(COSTS);
    let mut left = 100;
    for (path, cost) in [("/search", 10), ("/profile", 1), ("/other", 5), ("/search", 10)] {
        left -= cost;
        let (is_refused, answers) = world.all([&format!("path={path}"), "user=alice", "tier=all"]);
        assert_eq!((is_refused, answers[1].remaining), (false, left), "{path}");
    }
    assert_eq!(world.look("tier=all").remaining, 1_000_000 - 26, "every limit of the request");
    assert!(world.all(["path=/search", "user=bob"]).1[0].limit.is_none(), "a cost is no limit");
}

#[test]
fn five_searches_and_fifty_profiles_exhaust_a_hundred() {
    let world = world(COSTS);
    let ask = |path: &str| world.all([&format!("path={path}"), "user=alice"]).0;
    assert!((0..5).all(|_| !ask("/search")));
    assert!((0..50).all(|_| !ask("/profile")));
    assert!(ask("/profile") && ask("/search") && ask("/other"));
}

#[test]
fn costs_multiply_each_other_and_the_callers_own() {
    let world = world(COSTS);
    let hit = |path: &str, hits: u64, is_negative_hits: bool| {
        let user = Descriptor { hits_addend: Some(hits), is_negative_hits, ..descriptor("user=alice") };
        let asked = request([descriptor(&format!("path={path}")), user]);
        world.ask(&asked).outcome
    };
    assert_eq!(hit("/search", 7, false), Outcome::Admitted);
    assert_eq!(world.look("user=alice").remaining, 30);
    let asked = request([descriptor("user=alice")]);
    let rules = load(&[file("rules.yaml", COSTS)], options()).expect("rules").rules;
    assert_eq!(rules.find(&asked).charges.iter().map(|charge| charge.hits.taken()).collect::<Vec<_>>(), [1, 3]);
    assert_eq!(hit("/search", 7, true), Outcome::Admitted, "given back as it was taken");
    assert_eq!(world.look("user=alice").remaining, 100);
    assert_eq!(hit("/search", 0, false), Outcome::Admitted, "a look stays a look");
    assert_eq!(world.look("user=alice").remaining, 100);
    assert_eq!(hit("/search", u64::MAX, false), Outcome::Refused);
    let both = request(["path=/search", "path=/search", "path=/other", "user=alice"].map(descriptor));
    assert_eq!(rules.find(&both).charges[0].hits.taken(), 50, "each rule once");
}

#[test]
fn what_contradicts_itself_is_pointed_at() {
    assert_eq!(
        wrong(
            "domain: d
entries:
  ip: { as: ip, v4_prefix: 33 }
  path: { v6_prefix: 64 }
descriptors:
  - { key: ip, value: 10.0.0.0/8 }
  - { key: ip, value: 10.1.1.1, cidr: [10.2.0.0/16] }
  - { key: ip, cidr: [10.1.2.3/8, x, 10.3.0.0/16] }
  - { key: ip, values: [10.3.0.0/16, 10.*] }
  - { key: path, deny: true, exempt: true }
  - { key: path, value: a, deny: true, rate_limit: { unit: day, requests_per_unit: 1 } }
  - { key: path, value: b, request_cost: 0 }
  - { key: path, value: c, rate_limit: { unit: day, requests_per_unit: 1, cost: 0, warn_at: 101% } }
  - { key: \"p*\", values: [a] }
  - { key: \"i*\", value: 10.0.0.1 }
  - { key: ip, deny: , cidr: }
  - { key: path, value: d, deny: true, shadow_mode: true }
"
        ),
        [
            "rules.yaml:3:28: error: the prefix length 33 is too large: write a number from 0 to 32",
            "rules.yaml:4:22: error: `v6_prefix` applies only to addresses: write `as: ip` beside it, or remove it",
            "rules.yaml:6:23: error: `10.0.0.0/8` is a network: write `cidr: [10.0.0.0/8]` instead of `value`",
            "rules.yaml:7:23: error: the item has both `value` and a list: write `10.1.1.1` into `values` instead",
            "rules.yaml:8:23: error: `10.1.2.3/8` is an address with a prefix length, not a network: write the network `10.0.0.0/8`, or the address without a prefix length",
            "rules.yaml:8:35: error: `x` is not a network: write one like `10.0.0.0/8`, `2001:db8::/32` or `192.0.2.1`",
            "rules.yaml:9:25: error: the item on line 8 of rules.yaml already has this value: remove one of the two",
            "rules.yaml:9:38: error: `10.*` contains a `*`, but `values` has no wildcards: write a separate item with `value:` for the wildcard",
            "rules.yaml:10:30: error: the item has both `deny` and `exempt`: remove one of the two",
            "rules.yaml:11:28: error: `deny` decides the whole request, so a limit beside it has no effect: remove one of the two",
            "rules.yaml:12:42: error: a cost of 0 counts nothing: write at least 1, or write `exempt: true` on the item if its requests are free",
            "rules.yaml:13:93: error: `101%` is not a valid percentage for `warn_at`: write a value from `1%` to `100%`.",
            "rules.yaml:14:5: error: a list needs a key without a wildcard, but `p*` is a wildcard: write the whole key, or `value` instead of the list",
            "rules.yaml:15:25: error: the wildcard key `i*` matches `ip`, whose values `entries` normalises, so this value may never match: write a separate item for that key",
            "rules.yaml:16:20: error: `deny` must be `true` or `false`, but is empty.",
            "rules.yaml:16:28: error: `cidr` must be a list like `[10.0.0.0/8, 2001:db8::/32]`, but is empty.",
            "rules.yaml:17:28: error: `deny` decides the whole request, so `shadow_mode` beside it has no effect: remove one of the two",
        ]
    );
}

proptest! {
    /// Nothing that stands in an entry makes an exempt or free one of it.
    #[test]
    fn no_value_slips_past_a_list_by_its_spelling(bits: u32, form in 0_usize..7) {
        let address = std::net::Ipv4Addr::from(0xcb00_7100 | (bits & 0xff));
        let [_, _, c, d] = address.octets();
        let spelling = [
            address.to_string(),
            format!("::ffff:{address}"),
            format!("::ffff:cb00:{c:02x}{d:02x}"),
            format!("{address}:{}", bits >> 16),
            format!("::ffff:{address}%eth{}", bits >> 28),
            format!("[::ffff:{address}%25eth0]:{}", bits >> 16),
            format!("::ffff:cb00:{c:02x}{d:02x}%"),
        ][form].clone();
        let world = world(TIERS);
        let is_carved_out = d == 7;
        prop_assert_eq!(world.hit(&format!("ip={spelling}"), 1).refused, !is_carved_out, "{}", spelling);
        let asked = request([descriptor(&format!("ip={spelling}"))]);
        prop_assert!(rule(&world.ask(&asked)).is_some());
    }
}

#[test]
fn explain_names_what_else_a_rule_asks_of_a_limit_and_nothing_that_it_does_not() {
    let rules = "
domain: d
descriptors:
  - { key: plain, rate_limit: { unit: minute, requests_per_unit: 4 } }
  - { key: costly, rate_limit: { unit: minute, requests_per_unit: 4, cost: 2, warn_at: 80% } }
  - { key: waits, rate_limit: { unit: minute, requests_per_unit: 4, algorithm: leaky_bucket, delay: { max: 30s } } }
  - { key: grows, rate_limit: { unit: minute, requests_per_unit: 4, delay: { step: 100ms, max: 5s, beyond: admit } } }
";
    let loaded = load(&[file("rules.yaml", rules)], Options::default()).expect("rules").rules;
    let sentences = [
        "each hit counts 2 times",
        "sends a warning header when 80% of the limit is used",
        "waits at most 30s",
        "waits 100ms for each hit over the limit, at most 5s",
    ];
    for (key, said) in [
        ("plain", [false; 4]),
        ("costly", [true, true, false, false]),
        ("waits", [false, false, true, false]),
        ("grows", [false, false, false, true]),
    ] {
        let told = explain(&loaded, "d", &descriptor(&format!("{key}=x"))).to_string();
        assert_eq!(sentences.map(|sentence| told.contains(sentence)), said, "{told}");
    }
}

#[test]
fn explain_shows_the_whole_way_to_a_rule_and_all_that_it_does() {
    let rules = "
domain: d
on_store_failure: open
descriptors:
  - { key: ip, cidr: [10.0.0.0/8], deny: true, message: Go away. }
  - { key: ip, values: [192.0.2.1], exempt: true }
  - key: ip
    request_cost: 2
    expose: false
    message: slower
    remember_refusals: false
    quota_mode: true
    rate_limits:
      - { unit: minute, requests_per_unit: 4, algorithm: gcra, name: fast, count_refused: true }
      - { unit: day, requests_per_unit: 90, replaces: [{ name: base }] }
  - { key: base, shadow_mode: true, rate_limit: { unit: minute, requests_per_unit: 4, name: base } }
  - { key: both, shadow_mode: true, quota_mode: true, rate_limit: { unit: minute, requests_per_unit: 4 } }
  - { key: free, rate_limit: { unlimited: true, replaces: [{ name: base }] } }
";
    let options = Options { shadow_mode: true, ..Options::default() };
    let loaded = load(&[file("rules.yaml", rules)], options).expect("rules").rules;
    let asked = [("d", "ip=10.1.1.1"), ("d", "ip=192.0.2.1"), ("d", "ip=8.8.8.8"), ("d", "base=1"), ("d", "both=1")];
    let asked = asked.into_iter().chain([("d", "free=1"), ("d", "ip=8.8.8.8,a=b"), ("d", "none=1"), ("e", "a=b")]);
    let told: Vec<_> = asked.map(|(domain, asked)| explain(&loaded, domain, &descriptor(asked)).to_string()).collect();
    assert_eq!(told.join("\n"), EXPLAINED.trim_start());
}

/// The explanations of that test.
const EXPLAINED: &str = "
domain d
  ip=10.1.1.1
    ✓ ip=[10.0.0.0/8]  in its list  (rules.yaml:5)
    ✗ ip=[192.0.2.1]  the value is not in this list, or another list has a smaller network for it  (rules.yaml:6)
    ✗ ip  would match, but a list comes first  (rules.yaml:7)
    ✗ 3 with another key: base, both, free
=> rule d.ip_[10.0.0.0/8]
  deny     refuses the whole request and charges nothing
  message  Go away.
  mode     SHADOW_MODE: refusals are not enforced

domain d
  ip=192.0.2.1
    ✓ ip=[192.0.2.1]  in its list  (rules.yaml:6)
    ✗ ip=[10.0.0.0/8]  the value is not in this list, or another list has a smaller network for it  (rules.yaml:5)
    ✗ ip  would match, but a list comes first  (rules.yaml:7)
    ✗ 3 with another key: base, both, free
=> rule d.ip_[192.0.2.1]
  exempt   admits the whole request and charges nothing, unless another rule denies the request
  mode     SHADOW_MODE: refusals are not enforced

domain d
  ip=8.8.8.8
    ✓ ip  any value of this key  (rules.yaml:7)
    ✗ ip=[10.0.0.0/8]  the value is not in this list, or another list has a smaller network for it  (rules.yaml:5)
    ✗ ip=[192.0.2.1]  the value is not in this list, or another list has a smaller network for it  (rules.yaml:6)
    ✗ 3 with another key: base, both, free
=> rule d.ip
  limit    4 per minute, gcra, burst 4, called fast
  counter  {d|ip=8.8.8.8}gcra:1m
           counts refused charges too
  limit    90 per day, fixed_window
  counter  {d|ip=8.8.8.8}fixed_window:1d
  replaces base in requests that match both
  cost     multiplies the hits of the request by 2, on each of its limits
  message  slower
  expose   false: no header and no body shows this rule
  quota    the request is refused only if all its quotas refuse
  mode     SHADOW_MODE: refusals are not enforced
  charging each
  failure  open, under overload local
  remember_refusals false: the store decides each charge

domain d
  base=1
    ✓ base  any value of this key  (rules.yaml:16)
    ✗ 5 with another key: ip, both, free
=> rule d.base
  limit    4 per minute, fixed_window, called base
  counter  {d|base=1}fixed_window:1m
  shadow   refusals are counted but not enforced
  mode     SHADOW_MODE: refusals are not enforced
  charging each
  failure  open, under overload local

domain d
  both=1
    ✓ both  any value of this key  (rules.yaml:17)
    ✗ 5 with another key: ip, base, free
=> rule d.both
  limit    4 per minute, fixed_window
  counter  {d|both=1}fixed_window:1m
  shadow   refusals are counted; for the other quotas, this quota always has room
  mode     SHADOW_MODE: refusals are not enforced
  charging each
  failure  open, under overload local

domain d
  free=1
    ✓ free  any value of this key  (rules.yaml:18)
    ✗ 5 with another key: ip, base, both
=> rule d.free
  unlimited: admitted without counting
  replaces base in requests that match both
  mode     SHADOW_MODE: refusals are not enforced
  charging each
  failure  open, under overload local

domain d
  ip=8.8.8.8
    ✓ ip  any value of this key  (rules.yaml:7)
    ✗ ip=[10.0.0.0/8]  the value is not in this list, or another list has a smaller network for it  (rules.yaml:5)
    ✗ ip=[192.0.2.1]  the value is not in this list, or another list has a smaller network for it  (rules.yaml:6)
    ✗ 3 with another key: base, both, free
    a=b
      ✗ the rules end one level above: a rule matches only descriptors of its own depth
=> not limited

domain d
  none=1
    ✗ 6 with another key: ip, base, both, free
=> not limited

domain e
  no rule file has this domain; known domains: d
=> not limited
";
