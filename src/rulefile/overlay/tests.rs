use super::*;
use crate::algorithm::Algorithm;
use crate::model::{Descriptor, Entry, Hits, Override, Request};
use crate::rulefile::File;
use crate::rules::{Matched, MatchedKind, RuleSet};

const RULES: &str = "domain: edge
descriptors:
  - key: api
    value: v1
    descriptors:
      - { key: user, rate_limit: { unit: minute, requests_per_unit: 5, name: login-web } }
  - { key: remote_address, rate_limit: { unit: second, requests_per_unit: 20000 } }
entries: { remote_address: { as: ip } }
";

fn documents(name: &str, text: &str) -> Documents {
    Documents::parse(vec![File { name: name.into(), bytes: text.into() }])
}

fn overlay(text: &str) -> Result<Overlay, InvalidRules> {
    Overlay::new(documents("overlay.yaml", text), &Options::default())
}

/// Lays this overlay over the rules. Returns the compiled rules and the effect.
fn laid(text: &str) -> (CompiledRules, OverlayEffect) {
    overlay(text).unwrap().compile(Some(documents("rules.yaml", RULES)), &Options::default()).unwrap()
}

/// Returns algorithm and burst of the limit of `edge.api_v1.user` under this overlay.
fn user(text: &str) -> (Algorithm, u32) {
    let (CompiledRules { rules, .. }, _) = laid(text);
    let limit = rules.rules()[0].limits()[0].limit;
    (limit.algorithm(), limit.quota().burst())
}

#[test]
fn a_path_a_unit_a_number_a_name_choose_the_limit() {
    for target in [
        "[\"*\", user]",
        "[\"**\", user]",
        "[api=v1, user]",
        "[\"api=v*\", \"*\"]",
        "{ unit: minute }",
        "{ requests_per_unit: 5 }",
        "{ name: \"login*\" }",
        "{ path: [\"**\"], unit: minute, requests_per_unit: 5, name: login-web }",
    ] {
        let text = format!("overlay: \"*\"\napply: [{{ match: {target}, limit: {{ algorithm: gcra, burst: 20 }} }}]\n");
        assert_eq!(user(&text), (Algorithm::Gcra, 20), "{target}");
    }
    for target in ["[user]", "[\"*\"]", "[api=v2, user]", "{ unit: hour }", "{ name: log }", "[api, user, \"*\"]"] {
        let text = format!("overlay: \"*\"\napply: [{{ match: {target}, limit: {{ algorithm: gcra, burst: 20 }} }}]\n");
        assert_eq!(user(&text), (Algorithm::FixedWindow, 5), "{target}");
    }
}

#[test]
fn metadata_of_a_rule_chooses_its_limits() {
    let rules = RULES.replace("name: login-web }", "name: login-web }, metadata: { team: web, tier: 1 }");
    for (metadata, burst) in
        [("{ team: web }", 20), ("{ team: web, tier: 1 }", 20), ("{ team: ops }", 5), ("{ cost: 1 }", 5)]
    {
        let text = format!(
            "overlay: \"*\"\napply: [{{ match: {{ metadata: {metadata} }}, limit: {{ algorithm: gcra, burst: 20 }} }}]\n"
        );
        let sources = documents("rules.yaml", &rules);
        let (CompiledRules { rules, .. }, _) =
            overlay(&text).unwrap().compile(Some(sources), &Options::default()).unwrap();
        assert_eq!(rules.rules()[0].limits()[0].limit.quota().burst(), burst, "{metadata}");
    }
}

#[test]
fn one_setting_of_a_domain_is_content() {
    for setting in ["charging: each", "on_store_failure: open", "on_store_overload: open", "lease: off"] {
        assert_eq!(overlay(&format!("overlay: edge\n{setting}\n")).unwrap().layers.len(), 1, "{setting}");
    }
    assert!(overlay("overlay: edge\n").is_err());
}

#[test]
fn a_domain_pattern_chooses_the_domains() {
    for (domain, is_laid) in [("\"*\"", true), ("edge", true), ("\"ed*\"", true), ("other", false)] {
        let text = format!("overlay: {domain}\napply: [{{ match: [\"**\", user], limit: {{ algorithm: gcra }} }}]\n");
        assert_eq!(user(&text).0 == Algorithm::Gcra, is_laid, "{domain}");
    }
}

#[test]
fn a_later_field_wins_and_the_others_stay() {
    let text = "overlay: \"*\"
apply:
  - { match: [\"**\", user], limit: { algorithm: gcra, burst: 20 } }
  - { match: [\"**\", user], limit: { burst: 30 } }
";
    assert_eq!(user(text), (Algorithm::Gcra, 30));
}

#[test]
fn a_field_that_does_not_fit_is_skipped_with_a_warning_and_the_others_apply() {
    let text = "overlay: \"*\"
apply:
  - { match: [remote_address], limit: { algorithm: sliding_log, warn_at: 80% }, message: Slow down. }
";
    let (CompiledRules { rules, warnings }, effect) = laid(text);
    assert_eq!(effect, OverlayEffect { skipped: 1, unmatched: 0 });
    let rule = rules.rules()[1];
    assert_eq!(rule.limits()[0].limit.algorithm(), Algorithm::FixedWindow);
    assert_eq!(rule.limits()[0].warn_at, Some(80));
    assert_eq!(rule.about().message.as_deref(), Some("Slow down."));
    let warning = warnings[0].to_string();
    assert!(warning.starts_with("overlay.yaml:3:"), "{warning}");
    assert!(warning.contains("`algorithm` does not fit the limit of edge.remote_address"), "{warning}");
}

#[test]
fn an_item_that_matches_nothing_warns() {
    let (CompiledRules { warnings, .. }, effect) =
        laid("overlay: \"*\"\napply: [{ match: [nobody], limit: { algorithm: gcra } }]\n");
    assert_eq!((warnings.len(), effect), (1, OverlayEffect { skipped: 0, unmatched: 1 }));
}

#[test]
fn an_index_in_a_match_is_an_error_unless_the_match_says_more() {
    let found = |target: &str| {
        let text = format!("overlay: \"*\"\napply: [{{ match: {target}, limit: {{ algorithm: gcra }} }}]\n");
        overlay(&text).map_err(|error| error.to_string())
    };
    for target in ["[\"*\", rule-0-match-0]", "{ path: [\"*\", rule-0-match-0] }", "[\"x/rule/1/match/0/*\"]"] {
        assert!(found(target).unwrap_err().contains("index"), "{target}");
    }
    for target in [
        "{ path: [\"*\", rule-0-match-0], unit: minute }",
        "{ path: [\"*\", rule-0-match-0], unsafe_index: true }",
        "[\"*\", \"rule-*-match-*\"]",
        "[ruler-1]",
    ] {
        assert!(found(target).is_ok(), "{target}");
    }
}

#[test]
fn entries_that_break_a_rule_of_the_source_are_skipped() {
    let rules = "domain: edge
descriptors: [{ key: remote_address, value: 10.0.0.0/8, rate_limit: { unit: day, requests_per_unit: 1 } }]
";
    let text = "overlay: edge\non_store_failure: closed\nentries: { remote_address: { as: ip } }\n";
    let overlay = overlay(text).unwrap();
    let (CompiledRules { rules, .. }, effect) =
        overlay.compile(Some(documents("rules.yaml", rules)), &Options::default()).unwrap();
    assert_eq!(effect.skipped, 1);
    assert_eq!(rules.rules()[0].policies().on_failure.name(), "closed");
}

#[test]
fn entries_that_break_a_rule_of_one_domain_still_read_the_values_of_the_others() {
    let rules = |domain: &str, value: &str| {
        let rule = format!("key: remote_address{value}, rate_limit: {{ unit: day, requests_per_unit: 1 }}");
        File { name: domain.into(), bytes: format!("domain: {domain}\ndescriptors: [{{ {rule} }}]\n").into() }
    };
    let files = vec![rules("one", ", value: 10.0.0.0/8"), rules("two", "")];
    let overlay = overlay("overlay: \"*\"\nentries: { remote_address: { as: ip, v6_prefix: 64 } }\n").unwrap();
    let (CompiledRules { rules, warnings }, effect) =
        overlay.compile(Some(Documents::parse(files)), &Options::default()).unwrap();
    assert_eq!(effect.skipped, 1);
    assert!(warnings.iter().any(|warning| warning.message.contains("in the domain `one`")), "{warnings:?}");
    let key = |domain: &str, address: &str| {
        let matched = rules.find(&request(domain, &[("remote_address", address)]));
        matched.charges.iter().map(|charge| charge.key.to_string()).collect::<Vec<_>>()
    };
    assert_eq!(key("two", "2001:db8::1"), key("two", "2001:db8::2"), "one counter for a /64");
    assert_ne!(key("two", "2001:db8::1"), key("two", "2001:db8:1::1"));
}

#[test]
fn entries_change_the_file_of_the_domain_that_has_the_key() {
    let rules = |key: &str, entry: &str| {
        let rule = format!("key: {key}, rate_limit: {{ unit: day, requests_per_unit: 1 }}");
        let text = format!("domain: edge\nentries: {{ {key}: {{ {entry} }} }}\ndescriptors: [{{ {rule} }}]\n");
        File { name: key.into(), bytes: text.into() }
    };
    let files = vec![rules("user", "case: lower"), rules("remote_address", "as: ip")];
    let overlay = overlay("overlay: edge\nentries: { remote_address: { as: ip, v6_prefix: 64 } }\n").unwrap();
    let mut rules = Documents::parse(files);
    let (_, effect) = overlay.lay(&mut rules, Reads::All);
    let entries: Vec<_> = rules.documents.iter().map(|(_, document)| document.entries.as_slice()).collect();
    let [[_], [EntryNode { v6_prefix: Some(_), .. }]] = entries.as_slice() else { panic!("{entries:?}") };
    assert_eq!(effect.skipped, 0);
}

#[test]
fn sensitive_values_stay_hidden_where_the_other_fields_of_their_entry_are_skipped() {
    let mut rules = documents("rules.yaml", RULES);
    let overlay =
        overlay("overlay: edge\nentries: { user: { as: path, sensitive: true }, api: { case: lower } }\n").unwrap();
    let (warnings, effect) = overlay.lay(&mut rules, Reads::None);
    let entries = &rules.documents[0].1.entries;
    let [.., EntryNode { key, form: None, is_lower: false, sensitive: Some(_), .. }] = entries.as_slice() else {
        panic!("{entries:?}");
    };
    assert_eq!((key.value.as_str(), effect.skipped), ("user", 2));
    assert_eq!(warnings.len(), 3, "two for the entries, and one because there is no secret");
}

#[test]
fn a_key_in_a_wrong_place_of_an_overlay_is_an_error_that_names_the_right_place() {
    for (text, expected) in [
        (
            "apply: [{ match: [user], limit: { requests_per_unit: 9 } }]",
            "`requests_per_unit` does not belong inside `limit` of an overlay: the source of the rules decides it; for a limit of your own, add a rule to `descriptors` of the overlay",
        ),
        (
            "apply: [{ match: [user], burst: 9 }]",
            "`burst` does not belong inside an item of `apply`: write it inside `limit` of an item of `apply`",
        ),
        (
            "apply: [{ match: [user], limit: { expose: false } }]",
            "`expose` does not belong inside `limit` of an overlay: write it beside `limit`",
        ),
        ("domain: edge", "`domain` does not belong at the top of an overlay: write `overlay: NAME` in its place"),
    ] {
        let error = overlay(&format!("overlay: \"*\"\n{text}\n")).unwrap_err().to_string();
        assert!(error.contains(expected), "{text}: {error}");
    }
}

#[test]
fn a_rule_file_is_no_overlay_and_an_overlay_no_rule_file() {
    assert!(overlay(RULES).unwrap_err().to_string().contains("not an overlay"));
    let wrong = compile(documents("rules.yaml", "empty_overlay: true\n"), &Options::default()).unwrap_err();
    assert!(wrong.to_string().contains("RULES_OVERLAY"), "{wrong}");
    assert!(overlay("overlay:\n").is_err());
    assert!(overlay("overlay: edge\napply: [{ limit: { algorithm: gcra } }]\n").is_err());
}

/// Compiles these rules with these overlays.
fn over(rules: &str, overlays: &[&str]) -> RuleSet {
    let files = overlays.iter().enumerate().map(|(number, text)| {
        let name = format!("overlay-{number}.yaml");
        File { name: name.as_str().into(), bytes: text.as_bytes().into() }
    });
    let overlay = Overlay::new(Documents::parse(files.collect()), &Options::default()).unwrap();
    let source = (!rules.is_empty()).then(|| documents("rules.yaml", rules));
    overlay.compile(source, &Options::default()).unwrap().0.rules
}

fn request(domain: &str, entries: &[(&str, &str)]) -> Request {
    let entries = entries.iter().map(|(key, value)| Entry::new((*key).to_owned(), (*value).to_owned()));
    let descriptor = Descriptor { entries: entries.collect(), ..Descriptor::default() };
    Request::new(domain.to_owned(), vec![descriptor], 0).unwrap()
}

/// Returns the counters that a request of this user charges, and their limits.
fn charged(rules: &RuleSet, domain: &str, user: &str) -> Vec<(String, u32)> {
    let request = request(domain, &[("user", user)]);
    let Matched { charges, .. } = rules.find(&request);
    charges.iter().map(|charge| (charge.key.to_string(), charge.limit.quota().limit())).collect()
}

fn counters(expected: &[(&str, u32)]) -> Vec<(String, u32)> {
    expected.iter().map(|(key, limit)| ((*key).to_owned(), *limit)).collect()
}

/// Returns true if a request of this user is denied, false if it is exempt.
fn ruling(rules: &RuleSet, user: &str) -> Option<bool> {
    rules.find(&request("edge", &[("user", user)])).ruling.map(|ruling| ruling.is_denied)
}

const USERS: &str = "domain: edge
descriptors: [{ key: user, rate_limit: { unit: minute, requests_per_unit: 5 } }]
";

#[test]
fn the_limits_of_source_and_overlay_add_and_have_their_own_counters() {
    let own = "overlay: edge
descriptors: [{ key: user, rate_limit: { unit: minute, requests_per_unit: 100 } }]
";
    let all = own.replace("overlay: edge", "overlay: \"*\"").replace("100", "1000");
    let rules = over(USERS, &[own, &all]);
    let (source, first) = (("{edge|user=a}fixed_window:1m", 5), ("{edge|user=a}~edge~fixed_window:1m", 100));
    let second = ("{edge|user=a}~*~fixed_window:1m", 1000);
    assert_eq!(charged(&rules, "edge", "a"), counters(&[source, first, second]));
    assert_eq!(charged(&over(USERS, &[]), "edge", "a"), counters(&[source]), "an empty overlay");
    let paths: Vec<_> = rules.rules().iter().map(|rule| rule.path().to_string()).collect();
    assert_eq!(paths, ["edge.user", "edge.overlay+user", "edge.overlay+user"]);
    assert_eq!((rules.files(), rules.len()), (1, 3), "files of overlays are not counted");
}

#[test]
fn files_of_one_pattern_share_a_tree_and_may_not_have_a_rule_twice() {
    let one = |user: &str| {
        format!(
            "overlay: edge\ndescriptors: [{{ key: user, value: {user}, rate_limit: {{ unit: day, requests_per_unit: 7 }} }}]\n"
        )
    };
    let rules = over("", &[&one("a"), &one("b")]);
    assert_eq!(charged(&rules, "edge", "b"), counters(&[("{edge|user=b}~edge~fixed_window:1d", 7)]));
    let twice = ["one.yaml", "two.yaml"].map(|name| File { name: name.into(), bytes: one("a").into() });
    let error = Overlay::new(Documents::parse(twice.to_vec()), &Options::default()).unwrap_err().to_string();
    assert!(error.starts_with("two.yaml:2:15: error: duplicate descriptor"), "{error}");
}

#[test]
fn a_deny_of_either_wins_and_then_an_exempt_of_either() {
    let item = |action: &str| format!("descriptors: [{{ key: user, value: a, {action}: true }}]\n");
    for (source, own, expected) in
        [("deny", "exempt", Some(true)), ("exempt", "deny", Some(true)), ("exempt", "exempt", Some(false))]
    {
        let rules = over(&format!("domain: edge\n{}", item(source)), &[&format!("overlay: edge\n{}", item(own))]);
        assert_eq!(ruling(&rules, "a"), expected, "{source} and {own}");
    }
    // A more precise rule of the source does not hide the list of the overlay.
    let exact = USERS.replace("key: user", "key: user, value: a");
    let list = "overlay: \"*\"\ndescriptors: [{ key: user, values: [a, b], deny: true }]\n";
    let rules = over(&exact, &[list]);
    assert_eq!((ruling(&rules, "a"), ruling(&rules, "b"), ruling(&rules, "c")), (Some(true), Some(true), None));
    let found = rules.find(&request("edge", &[("user", "a")]));
    assert!(matches!(found.items[0].kind, MatchedKind::Denied));
    assert_eq!(found.items[0].rule.map(|rule| rule.path().to_string()).as_deref(), Some("edge.overlay+user_[a, b]"));
    assert_eq!(rules.domain("edge"), Some(("edge", true)));
}

#[test]
fn a_rule_that_replaces_takes_the_limits_and_the_counters_of_the_source() {
    let own = "overlay: edge
descriptors: [{ key: user, replace: true, rate_limit: { unit: minute, requests_per_unit: 9 } }]
";
    let taken = counters(&[("{edge|user=a}fixed_window:1m", 9)]);
    assert_eq!(charged(&over(USERS, &[own]), "edge", "a"), taken);
    assert_eq!(charged(&over("", &[own]), "edge", "a"), taken, "also without a rule of the source");
    // A second one keeps counters of its own.
    let all = own.replace("overlay: edge", "overlay: \"*\"");
    let second = ("{edge|user=a}~*~fixed_window:1m".to_owned(), 9);
    assert_eq!(charged(&over(USERS, &[own, &all]), "edge", "a"), [taken, vec![second]].concat());
    let unlimited = "overlay: edge\ndescriptors: [{ key: user, replace: true, rate_limit: { unlimited: true } }]\n";
    let rules = over(USERS, &[unlimited]);
    assert!(matches!(rules.find(&request("edge", &[("user", "a")])).items[0].kind, MatchedKind::Unlimited));
    // Only the place of the rule: other users keep the limit of the source.
    let one = unlimited.replace("key: user", "key: user, value: a");
    assert_eq!(charged(&over(USERS, &[&one]), "edge", "b"), counters(&[("{edge|user=b}fixed_window:1m", 5)]));
}

#[test]
fn a_shared_counter_of_a_rule_that_replaces_stays_apart() {
    let rules = USERS.replace("key: user", "key: user, value: \"v*\", share_threshold: true");
    let own = "overlay: edge
descriptors:
  - { key: user, value: v2, rate_limit: { unit: minute, requests_per_unit: 9 } }
  - { key: user, value: \"v*\", share_threshold: true, replace: true, rate_limit: { unit: minute, requests_per_unit: 9 } }
";
    let rules = over(&rules, &[own]);
    // `v2` charges the shared counter of the source, so `v1` must not.
    let source = ("{edge|user~v*}fixed_window:1m", 5);
    assert_eq!(charged(&rules, "edge", "v2"), counters(&[source, ("{edge|user=v2}~edge~fixed_window:1m", 9)]));
    assert_eq!(charged(&rules, "edge", "v1"), counters(&[("{edge|user~v*}~edge~fixed_window:1m", 9)]));
}

#[test]
fn a_wrong_replace_is_an_error() {
    for (item, expected) in [
        ("deny: true", "decides the whole request"),
        ("descriptors: [{ key: path, rate_limit: { unit: day, requests_per_unit: 1 } }]", "needs a limit"),
        ("shadow_mode: true, rate_limit: { unit: day, requests_per_unit: 1 }", "nobody would be refused"),
    ] {
        let text = format!("overlay: edge\ndescriptors: [{{ key: user, replace: true, {item} }}]\n");
        let error = overlay(&text).unwrap_err().to_string();
        assert!(error.starts_with("overlay.yaml:2:") && error.contains(expected), "{error}");
    }
    let wrong =
        compile(documents("rules.yaml", &USERS.replace("key: user", "key: user, replace: true")), &Options::default());
    assert!(wrong.unwrap_err().to_string().contains("this is a rule file"));
}

#[test]
fn a_limit_replaces_only_limits_of_its_own_tree() {
    let named = |name: &str, replaces: &str, unit: &str| {
        format!(
            "[{{ key: user, rate_limit: {{ name: {name}, replaces: [{{ name: {replaces} }}], unit: {unit}, requests_per_unit: 5 }} }}]\n"
        )
    };
    let source = format!("domain: edge\ndescriptors: {}", named("one", "two", "hour"));
    let own = format!("overlay: edge\ndescriptors: {}", named("two", "one", "day"));
    let keys: Vec<_> = charged(&over(&source, &[&own]), "edge", "a").into_iter().map(|(key, _)| key).collect();
    assert_eq!(keys, ["{edge|user=a}fixed_window:1h", "{edge|user=a}~edge~fixed_window:1d"]);
    // A replaced rule replaces nothing.
    let two = "domain: edge
descriptors:
  - { key: user, rate_limit: { name: one, replaces: [{ name: two }], unit: hour, requests_per_unit: 5 } }
  - { key: path, rate_limit: { name: two, unit: hour, requests_per_unit: 5 } }
";
    let own = "overlay: edge\ndescriptors: [{ key: user, replace: true, rate_limit: { unit: hour, requests_per_unit: 9 } }]\n";
    let both = |rules: &RuleSet| {
        let [user, path] =
            [("user", "a"), ("path", "/")].map(|entry| request("edge", &[entry]).descriptors()[0].clone());
        rules.find(&Request::new("edge".to_owned(), vec![user, path], 0).unwrap()).charges.len()
    };
    assert_eq!((both(&over(two, &[])), both(&over(two, &[own]))), (1, 2));
}

#[test]
fn a_limit_that_the_request_sends_takes_the_place_of_limits_in_both_trees() {
    let sent = |rules: &RuleSet| {
        let plain = request("edge", &[("user", "a")]).descriptors()[0].clone();
        let limit = Override::new(3, 2, 1).unwrap();
        let request = Request::new("edge".to_owned(), vec![Descriptor { limit: Some(limit), ..plain }], 0).unwrap();
        let charges = rules.find(&request).charges;
        charges.iter().map(|charge| (charge.key.to_string(), charge.limit.quota().limit())).collect::<Vec<_>>()
    };
    let own = |more: &str| {
        format!(
            "overlay: edge\ndescriptors: [{{ key: user, {more}rate_limit: {{ unit: minute, requests_per_unit: 9, algorithm: gcra }} }}]\n"
        )
    };
    let (source, added) = (("{edge|user=a}fixed_window:1m", 3), ("{edge|user=a}~edge~gcra:1m", 3));
    assert_eq!(sent(&over(USERS, &[&own("")])), counters(&[source, added]));
    assert_eq!(sent(&over(USERS, &[&own("replace: true, ")])), counters(&[("{edge|user=a}gcra:1m", 3)]));
    let none = "overlay: edge\ndescriptors: [{ key: user, REPLACErate_limit: { unlimited: true } }]\n";
    assert_eq!(sent(&over(USERS, &[&none.replace("REPLACE", "")])), counters(&[source]));
    assert_eq!(sent(&over(USERS, &[&none.replace("REPLACE", "replace: true, ")])), counters(&[source]));
}

#[test]
fn an_overlay_without_wildcards_is_in_force_without_the_domain_in_the_source() {
    let own = "overlay: NAME\non_store_failure: closed\ndescriptors: [{ key: user, rate_limit: { unit: day, requests_per_unit: 7 } }]\n";
    for rules in ["", &USERS.replace("edge", "other")] {
        let named = over(rules, &[&own.replace("NAME", "edge")]);
        assert_eq!(charged(&named, "edge", "a").len(), 1);
        assert_eq!(named.rules()[0].policies().on_failure.name(), "closed");
        assert!(charged(&over(rules, &[&own.replace("NAME", "\"ed*\"")]), "edge", "a").is_empty());
        // A pattern applies to a domain that another overlay names.
        let both = over(rules, &[&own.replace("NAME", "edge"), &own.replace("NAME", "\"ed*\"")]);
        assert_eq!(charged(&both, "edge", "a").len(), 2);
    }
}

#[test]
fn own_rules_for_no_domain_of_the_source_warn() {
    let text = "overlay: \"x*\"\ndescriptors: [{ key: user, deny: true }]\n";
    let (CompiledRules { warnings, .. }, effect) = laid(text);
    assert_eq!((warnings.len(), effect.unmatched), (1, 1));
    assert!(
        warnings[0].to_string().starts_with("overlay.yaml:1:10: warning: the rules have no domain"),
        "{}",
        warnings[0]
    );
}

#[test]
fn own_rules_read_values_as_the_entries_of_source_and_overlay_say() {
    let rules = "domain: edge
entries: { user: { case: lower } }
descriptors: [{ key: user, rate_limit: { unit: minute, requests_per_unit: 5 } }]
";
    let own = "overlay: edge\nentries: { ip: { as: ip } }
descriptors:
  - { key: user, value: alice, deny: true }
  - { key: ip, rate_limit: { unit: day, requests_per_unit: 7 } }
";
    let rules = over(rules, &[own]);
    assert_eq!(ruling(&rules, "ALICE"), Some(true));
    let charges = rules.find(&request("edge", &[("ip", "2001:db8::5")])).charges;
    assert_eq!(charges[0].key.to_string(), "{edge|ip~=2001:db8::/64}~edge~fixed_window:1d");
    // They do so although a rule of the source is not valid under the entries of the overlay.
    let source = "domain: edge\ndescriptors: [{ key: ip, value: 10.0.0.0/8, rate_limit: { unit: day, requests_per_unit: 1 } }]\n";
    let charges = over(source, &[own]);
    let charges = charges.find(&request("edge", &[("ip", "2001:db8::5")])).charges;
    assert_eq!(charges[0].key.to_string(), "{edge|ip~=2001:db8::/64}~edge~fixed_window:1d");
}

#[test]
fn errors_of_an_overlay_are_found_without_a_source() {
    for (text, place) in [
        ("overlay: \"*\"\ndescriptors: [{ key: user, rate_limit: { unit: fortnight, requests_per_unit: 1 } }]\n", "2:"),
        ("overlay: \"*\"\nentries: { ip: { as: ip, v4_prefix: 99 } }\n", "2:"),
        ("overlay: \"*\"\nentries: { ip: { v4_prefix: 9 } }\n", "2:"),
        ("overlay: \"*\"\ndescriptors: [{ value: x }]\n", "2:"),
    ] {
        let error = overlay(text).unwrap_err().to_string();
        assert!(error.starts_with(&format!("overlay.yaml:{place}")), "{error}");
    }
    let secret = Options { needs_secret: true, ..Options::default() };
    let text = "overlay: \"*\"\nentries: { user: { sensitive: true } }\n";
    let error = Overlay::new(documents("overlay.yaml", text), &secret).unwrap_err().to_string();
    assert!(error.starts_with("overlay.yaml:2:") && error.contains("KEY_SECRET_FILE"), "{error}");
}

#[test]
fn rules_that_are_copied_to_too_many_domains_are_an_error() {
    let values: Vec<_> = (0..2_000).map(|number| format!("v{number}")).collect();
    let list = values.join(", ");
    let text = format!("overlay: \"*\"\ndescriptors: [{{ key: user, values: [{list}], deny: true }}]\n");
    let overlay = overlay(&text).unwrap();
    let files: Vec<_> = (0..100)
        .map(|number| {
            let name = format!("rules-{number}.yaml");
            File { name: name.as_str().into(), bytes: USERS.replace("edge", &format!("edge-{number}")).into() }
        })
        .collect();
    let error = overlay.compile(Some(Documents::parse(files.clone())), &Options::default()).unwrap_err().to_string();
    assert!(error.starts_with("overlay.yaml:1:10: error:") && error.contains("100 domains"), "{error}");
    assert!(overlay.compile(Some(Documents::parse(files[1..].to_vec())), &Options::default()).is_ok());
}

#[test]
fn a_rule_names_its_place_and_the_lines_of_the_overlay_that_changed_it() {
    let text = "overlay: \"*\"
charging: all_or_nothing
apply:
  - { match: [\"**\", user], limit: { algorithm: gcra, burst: 20 } }
  - match: [\"**\", user]
    limit:
      burst: 30
    message: Slow down.
  - { match: [remote_address], limit: { algorithm: sliding_log } }
descriptors: [{ key: user, rate_limit: { unit: day, requests_per_unit: 7 } }]
entries:
  user: { case: lower }
";
    let (CompiledRules { rules, .. }, _) = laid(text);
    let [user, address, own] = rules.rules()[..] else { panic!("three rules") };
    let changed = "rules.yaml:6, with algorithm of overlay.yaml:4, burst of overlay.yaml:7, message of overlay.yaml:8";
    assert_eq!(rules.places(user), changed);
    assert_eq!((rules.places(address).as_str(), rules.is_overlaid(address)), ("rules.yaml:7", false));
    assert_eq!((rules.places(own).as_str(), rules.is_overlaid(own)), ("overlay.yaml:10", true));
    let descriptor = |entries| request("edge", entries).descriptors()[0].clone();
    let explained = crate::rules::explain(&rules, "edge", &descriptor(&[("api", "v1"), ("user", "a")])).to_string();
    let from = format!("from     {changed}");
    for line in
        ["overlay: charging of overlay.yaml:2", "overlay: entries `user` of overlay.yaml:12", &from, "overlay *"]
    {
        assert!(explained.contains(line), "{line} in {explained}");
    }
    let explained = crate::rules::explain(&rules, "edge", &descriptor(&[("user", "a")])).to_string();
    for line in [
        "=> no rule of the source",
        "(overlay.yaml:10)",
        "=> rule edge.overlay+user",
        "{edge|user=a}~*~fixed_window:1d",
    ] {
        assert!(explained.contains(line), "{line} in {explained}");
    }
}

#[test]
fn several_limits_of_a_rule_are_numbered_in_their_places() {
    let rules = "domain: edge
descriptors:
  - key: user
    rate_limits: [{ unit: minute, requests_per_unit: 5 }, { unit: day, requests_per_unit: 50 }]
";
    let overlay =
        overlay("overlay: edge\napply: [{ match: { unit: day }, limit: { algorithm: gcra, cost: 2 } }]\n").unwrap();
    let rules = overlay.compile(Some(documents("rules.yaml", rules)), &Options::default()).unwrap().0.rules;
    let places = rules.places(rules.rules()[0]);
    assert_eq!(places, "rules.yaml:3, with algorithm (limit 2) and cost (limit 2) of overlay.yaml:2");
}

#[test]
fn an_overlay_that_hides_a_limit_with_a_warning_header_warns() {
    let rules = USERS.replace("requests_per_unit: 5", "requests_per_unit: 5, warn_at: 80%");
    let overlay = overlay("overlay: edge\napply:\n  - match: [user]\n    expose: false\n").unwrap();
    let (CompiledRules { rules, warnings }, effect) =
        overlay.compile(Some(documents("rules.yaml", &rules)), &Options::default()).unwrap();
    let warning = warnings[0].to_string();
    assert!(
        warning.starts_with("overlay.yaml:4:5: warning: `expose: false` hides the limit of edge.user"),
        "{warning}"
    );
    assert_eq!((warnings.len(), effect), (1, OverlayEffect::default()));
    assert_eq!((rules.rules()[0].limits()[0].warn_at, rules.rules()[0].about().is_exposed), (None, false));
}

#[test]
fn a_request_cost_of_either_multiplies_the_hits_on_limits_of_both() {
    let own = "overlay: edge
descriptors: [{ key: user, request_cost: 3, rate_limit: { unit: day, requests_per_unit: 7 } }]
";
    let hits = |rules: &RuleSet| {
        let charges = rules.find(&request("edge", &[("user", "a")])).charges;
        charges.iter().map(|charge| format!("{:?}", charge.hits)).collect::<Vec<_>>()
    };
    let costly = USERS.replace("key: user", "key: user, request_cost: 2");
    let [once, three, six] = [1, 3, 6].map(|hits| format!("{:?}", Hits::take(hits)));
    assert_eq!(hits(&over(USERS, &[])), [once]);
    assert_eq!(hits(&over(USERS, &[own])), [three.as_str(), three.as_str()]);
    assert_eq!(hits(&over(&costly, &[own])), [six.as_str(), six.as_str()]);
}
