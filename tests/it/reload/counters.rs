//! Counters over a change of rules: they go on where algorithm and window stay.

use tidegate::algorithm::Algorithm;

use super::*;

/// A rule for each algorithm, the key its name.
fn rules_of_all(unit: &str, limit: u32) -> String {
    let rule = |(name, _): (&str, _)| {
        let limit = format!("unit: {unit}, requests_per_unit: {limit}, algorithm: {name}");
        format!("  - {{ key: {name}, rate_limit: {{ {limit} }} }}\n")
    };
    format!("domain: d\ndescriptors:\n{}", Algorithm::ALL.map(rule).concat())
}

#[tokio::test]
async fn the_counters_of_every_algorithm_go_on_and_those_of_another_window_begin() {
    let scene = Scene::of_file(&rules_of_all("year", 100)).await;
    let mut client = scene.client().await;
    let mut left = async |hits| {
        let answer = ask(&mut client, Algorithm::ALL.map(|(name, _)| descriptor(name, hits)).to_vec()).await;
        let left = answer.statuses.iter().map(|status| (status.current_limit.is_some(), status.limit_remaining));
        left.collect::<Vec<_>>()
    };
    assert_eq!(left(80).await, [(true, 20); 6]);
    // Another limit, another name, other rules beside it: none of them is what is counted.
    let raised = rules_of_all("year", 200).replace("unit: year", "name: raised, unit: year");
    let beside = "  - { key: beside, rate_limit: { unit: year, requests_per_unit: 1 } }\n";
    scene.edit("rules.yaml", &raised.replace("descriptors:\n", &format!("descriptors:\n{beside}")));
    scene.says("new rules are in force: 7 rules").await;
    assert_eq!(left(0).await, [(true, 120); 6]);
    assert_eq!(left(10).await, [(true, 110); 6]);
    scene.edit("rules.yaml", &rules_of_all("month", 200));
    scene.says("new rules are in force: 6 rules").await;
    assert_eq!(left(0).await, [(true, 200); 6]);
    // Who goes back finds what was counted before.
    scene.edit("rules.yaml", &rules_of_all("year", 200));
    eventually("the windows of before are in force", async || (scene.load().await == 4).then_some(())).await;
    assert_eq!(left(0).await, [(true, 110); 6]);
}
