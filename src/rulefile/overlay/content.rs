//! Tests of overlays without content, and of own rules that admit nothing more than the source.

use super::*;
use crate::rulefile::File;

fn overlay(files: &[(&str, &str)]) -> Result<Overlay, InvalidRules> {
    let files = files.iter().map(|(name, text)| File { name: (*name).into(), bytes: (*text).into() });
    Overlay::new(Documents::parse(files.collect()), &Options::default())
}

/// Returns the warnings of these rules with this overlay.
fn warnings(rules: &str, over: &str) -> Vec<String> {
    let rules = Documents::parse(vec![File { name: "rules.yaml".into(), bytes: rules.into() }]);
    let (compiled, _) = overlay(&[("overlay.yaml", over)]).unwrap().compile(Some(rules), &Options::default()).unwrap();
    compiled.warnings.iter().map(ToString::to_string).collect()
}

#[test]
fn only_a_file_with_one_line_empties_an_overlay() {
    let empty = overlay(&[("overlay.yaml", "empty_overlay: true\n")]).unwrap();
    assert!(empty.layers.is_empty() && empty.problems.is_empty());
    for text in [
        "overlay: edge\n",
        "overlay: \"*\"\n# nothing\n",
        "overlay: edge\ndescriptors:\n",
        "overlay: edge\ndescriptors: []\napply: ~\nentries: {}\n",
    ] {
        let error = overlay(&[("overlay.yaml", text)]).unwrap_err().to_string();
        assert!(error.contains("nothing below `overlay`") && error.contains("`empty_overlay: true`"), "{text}{error}");
    }
    for text in [
        "empty_overlay: false\n",
        "empty_overlay: \"true\"\n",
        "empty_overlay:\n",
        "overlay: edge\nempty_overlay: true\n",
        "empty_overlay: true\ndescriptors: [{ key: user, deny: true }]\n",
    ] {
        let error = overlay(&[("overlay.yaml", text)]).unwrap_err().to_string();
        assert!(error.contains("only as the single line of its file"), "{text}{error}");
    }
    for text in ["", "# nothing\n"] {
        assert!(overlay(&[("overlay.yaml", text)]).is_err());
    }
}

#[test]
fn an_empty_overlay_stands_beside_no_other_file() {
    let deny = "overlay: edge\ndescriptors: [{ key: user, deny: true }]\n";
    let error = overlay(&[("a.yaml", deny), ("b.yaml", "empty_overlay: true\n")]).unwrap_err().to_string();
    assert!(error.starts_with("b.yaml:1:1: error: `empty_overlay: true` empties the overlay"), "{error}");
}

#[test]
fn a_rule_of_an_overlay_that_admits_nothing_more_is_a_warning() {
    let source = "domain: edge
descriptors:
  - { key: user, rate_limit: { unit: minute, requests_per_unit: 100 } }
  - { key: plan, value: free, descriptors: [{ key: path, rate_limit: { unit: hour, requests_per_unit: 10 } }] }
  - { key: team, shadow_mode: true, rate_limit: { unit: minute, requests_per_unit: 1 } }
";
    let own = |item: &str| warnings(source, &format!("overlay: edge\ndescriptors: [{item}]\n"));
    for item in [
        "{ key: user, value: alice, rate_limit: { unit: minute, requests_per_unit: 1000 } }",
        "{ key: user, rate_limit: { unit: hour, requests_per_unit: 7000 } }",
        "{ key: user, value: \"a*\", rate_limit: { unit: second, requests_per_unit: 100 } }",
        "{ key: user, values: [alice, bob], rate_limit: { unit: minute, requests_per_unit: 1000, algorithm: gcra, burst: 200 } }",
        "{ key: user, value: alice, rate_limit: { unlimited: true } }",
        "{ key: plan, value: free, descriptors: [{ key: path, value: /login, rate_limit: { unit: hour, requests_per_unit: 11 } }] }",
    ] {
        let found = own(item);
        assert!(
            found.len() == 1 && found[0].starts_with("overlay.yaml:2:") && found[0].contains("`replace: true`"),
            "{item}: {found:?}"
        );
        assert!(found[0].contains("rules.yaml:"), "{found:?}");
    }
    for item in [
        "{ key: user, value: alice, replace: true, rate_limit: { unit: minute, requests_per_unit: 1000 } }",
        "{ key: user, rate_limit: { unit: minute, requests_per_unit: 99 } }",
        "{ key: user, rate_limit: { unit: minute, requests_per_unit: 100, algorithm: sliding_log } }",
        "{ key: user, rate_limit: { unit: second, requests_per_unit: 20 } }",
        "{ key: user, rate_limit: { unit: day, requests_per_unit: 5000 } }",
        "{ key: user, rate_limit: { unit: minute, requests_per_unit: 1000, cost: 20 } }",
        "{ key: user, rate_limit: { unit: minute, requests_per_unit: 1000, algorithm: gcra, burst: 20 } }",
        "{ key: user, shadow_mode: true, rate_limit: { unit: minute, requests_per_unit: 1000 } }",
        "{ key: user, value: alice, deny: true }",
        "{ key: team, rate_limit: { unit: minute, requests_per_unit: 5 } }",
        "{ key: other, rate_limit: { unit: minute, requests_per_unit: 1000 } }",
        "{ key: plan, rate_limit: { unit: hour, requests_per_unit: 11 } }",
    ] {
        assert_eq!(own(item), Vec::<String>::new(), "{item}");
    }
    // An overlay that is laid over several domains warns once.
    let everywhere = warnings(
        source,
        "overlay: \"*\"\ndescriptors: [{ key: user, value: alice, rate_limit: { unit: minute, requests_per_unit: 1000 } }]\n",
    );
    assert_eq!(everywhere.len(), 1, "{everywhere:?}");
}
