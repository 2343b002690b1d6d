use super::*;
use crate::algorithm::Algorithm;
use crate::rulefile::File;

const RULES: &str = "domain: edge
descriptors:
  - key: api
    value: v1
    descriptors:
      - { key: user, rate_limit: { unit: minute, requests_per_unit: 5, name: login-web } }
  - { key: remote_address, rate_limit: { unit: second, requests_per_unit: 20000 } }
";

fn documents(name: &str, text: &str) -> Documents {
    Documents::parse(vec![File { name: name.into(), bytes: text.into() }])
}

fn overlay(text: &str) -> Result<Overlay, InvalidRules> {
    Overlay::new(documents("overlay.yaml", text), &Options::default())
}

/// Lays this overlay over the rules. Returns the compiled rules and the effect.
fn laid(text: &str) -> (CompiledRules, OverlayEffect) {
    overlay(text).unwrap().compile(documents("rules.yaml", RULES), &Options::default()).unwrap()
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
        overlay.compile(documents("rules.yaml", rules), &Options::default()).unwrap();
    assert_eq!(effect.skipped, 1);
    assert_eq!(rules.rules()[0].policies().on_failure.name(), "closed");
}

#[test]
fn sensitive_values_stay_hidden_where_the_other_fields_of_their_entry_are_skipped() {
    let mut rules = documents("rules.yaml", RULES);
    let overlay =
        overlay("overlay: edge\nentries: { user: { as: path, sensitive: true }, api: { case: lower } }\n").unwrap();
    let (warnings, effect) = overlay.lay(&mut rules, false);
    let entries = &rules.documents[0].1.entries;
    let [EntryNode { key, form: None, is_lower: false, sensitive: Some(_), .. }] = entries.as_slice() else {
        panic!("{entries:?}");
    };
    assert_eq!((key.value.as_str(), warnings.len(), effect.skipped), ("user", 2, 2));
}

#[test]
fn a_rule_file_is_no_overlay_and_an_overlay_no_rule_file() {
    assert!(overlay(RULES).unwrap_err().to_string().contains("not an overlay"));
    let wrong = compile(documents("rules.yaml", "overlay: edge\n"), &Options::default()).unwrap_err();
    assert!(wrong.to_string().contains("RULES_OVERLAY"), "{wrong}");
    assert!(overlay("overlay: edge\ndescriptors: [{ key: user, deny: true }]\n").is_err());
    assert!(overlay("overlay:\n").is_err());
    assert!(overlay("overlay: edge\napply: [{ limit: { algorithm: gcra } }]\n").is_err());
}
