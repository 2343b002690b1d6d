//! Overlays: what an operator lays over rules of any source, followed live.

use std::fs;
use std::path::PathBuf;
use std::process::Stdio;

use tempfile::TempDir;
use tokio::process::Command;

mod law;

use crate::support::{Tidegate, eventually, output, said};

const RULES: &str = "domain: edge
descriptors: [{ key: user, rate_limit: { unit: minute, requests_per_unit: 5 } }]
";

fn overlay(burst: u32) -> String {
    format!("overlay: \"*\"\napply: [{{ match: [user], limit: {{ algorithm: gcra, burst: {burst} }} }}]\n")
}

/// A directory with rules and an overlay.
struct Scene {
    directory: TempDir,
}

impl Scene {
    fn new(overlay: &str) -> Self {
        let scene = Self { directory: tempfile::tempdir().expect("a directory") };
        scene.write("rules.yaml", RULES);
        scene.write("overlay.yaml", overlay);
        scene
    }

    fn at(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        let new = self.at("new");
        fs::write(&new, text).expect("it is written");
        fs::rename(new, self.at(name)).expect("it is moved");
    }

    fn overlay(&self) -> String {
        self.at("overlay.yaml").to_str().expect("a path of text").to_owned()
    }

    async fn start(&self) -> Tidegate {
        Tidegate::start(&self.at("rules.yaml"), &[("RULES_OVERLAY", &self.overlay())]).await
    }

    async fn run(&self, arguments: &[&str]) -> (bool, String, String) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
        command.args(arguments).arg(self.at("rules.yaml")).env_clear().env("RULES_OVERLAY", self.overlay());
        let (status, said, errors) = output(command.stdin(Stdio::null())).await;
        (status.success(), said, errors)
    }
}

/// The number of hits of a new user that are admitted at once.
async fn admitted(server: &Tidegate, user: &str) -> u32 {
    let body = format!(r#"{{"domain":"edge","descriptors":[{{"entries":[{{"key":"user","value":"{user}"}}]}}]}}"#);
    let request = format!(
        "POST /json HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    let mut admitted = 0;
    while said(server.http, &request).await.starts_with("HTTP/1.1 200 ") {
        admitted += 1;
        assert!(admitted < 1_000, "nothing is refused");
    }
    admitted
}

/// The value of a metric without labels.
async fn metric(server: &Tidegate, name: &str) -> String {
    let page = server.metrics().await;
    let line = page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("no {name} in {page}")).to_owned()
}

async fn generation(server: &Tidegate, load: u32) {
    eventually("the change is in force", async || {
        (metric(server, "tidegate_rules_generation").await == load.to_string()).then_some(())
    })
    .await;
}

#[tokio::test]
async fn an_overlay_and_the_rules_below_it_change_while_they_are_in_force() {
    let scene = Scene::new(&overlay(3));
    let server = scene.start().await;
    assert_eq!(admitted(&server, "a").await, 3);
    scene.write("overlay.yaml", &overlay(7));
    generation(&server, 2).await;
    assert_eq!(admitted(&server, "b").await, 7, "the new overlay over the old rules");
    scene.write("rules.yaml", &RULES.replace("requests_per_unit: 5", "requests_per_unit: 6"));
    generation(&server, 3).await;
    assert_eq!(admitted(&server, "c").await, 7, "the old overlay over the new rules");
    scene.write("overlay.yaml", "overlay: \"*\"\n");
    generation(&server, 4).await;
    assert_eq!(admitted(&server, "d").await, 6, "the rules alone");
}

#[tokio::test]
async fn a_broken_overlay_leaves_the_last_good_one_in_force_also_for_new_rules() {
    let scene = Scene::new(&overlay(3));
    let server = scene.start().await;
    scene.write("overlay.yaml", "overlay: \"*\"\napply: [{ match: [rule-0-match-0], limit: { burst: 9 } }]\n");
    eventually("it is rejected", async || (metric(&server, "tidegate_overlay_rejected").await == "1").then_some(()))
        .await;
    assert!(server.log().contains("overlay.yaml:2:"), "{}", server.log());
    assert_eq!(metric(&server, "tidegate_rules_rejected").await, "0", "the rules are right");
    scene.write("rules.yaml", &RULES.replace("requests_per_unit: 5", "requests_per_unit: 6"));
    generation(&server, 2).await;
    assert_eq!(admitted(&server, "a").await, 3);
    scene.write("overlay.yaml", &overlay(3));
    eventually("it is good again", async || (metric(&server, "tidegate_overlay_rejected").await == "0").then_some(()))
        .await;
}

#[tokio::test]
async fn rules_that_are_rejected_stay_so_when_the_overlay_changes() {
    let scene = Scene::new(&overlay(3));
    let server = scene.start().await;
    scene.write("rules.yaml", "domain: edge\ndescriptors: [{ kee: user }]\n");
    eventually("they are rejected", async || (metric(&server, "tidegate_rules_rejected").await == "1").then_some(()))
        .await;
    scene.write("overlay.yaml", &overlay(4));
    generation(&server, 2).await;
    assert_eq!(admitted(&server, "a").await, 4, "the new overlay over the last good rules");
    assert_eq!(metric(&server, "tidegate_rules_rejected").await, "1");
}

#[tokio::test]
async fn a_broken_overlay_stops_the_start_and_the_check() {
    let scene = Scene::new("overlay: \"*\"\napply: [{ match: [user], limit: { algoritm: gcra } }]\n");
    for command in ["serve", "check"] {
        let (is_good, _, errors) = scene.run(&[command]).await;
        assert!(!is_good && errors.contains("overlay.yaml:2:"), "{command}: {errors}");
    }
}

#[tokio::test]
async fn commands_read_rules_with_the_overlay() {
    let scene = Scene::new(&overlay(9));
    let (is_good, explained, errors) = scene.run(&["explain", "--domain", "edge", "--descriptor", "user=a"]).await;
    assert!(is_good && explained.contains("gcra, burst 9"), "{explained}{errors}");
    scene.write("overlay.yaml", "overlay: \"*\"\napply: [{ match: [nobody], limit: { burst: 9 } }]\n");
    let (is_good, said, errors) = scene.run(&["check"]).await;
    assert!(is_good && said.contains("1 warning") && errors.contains("matches no limit"), "{said}{errors}");
}

#[tokio::test]
async fn hundreds_of_changes_of_both_give_no_mixed_answer() {
    // Number and burst change together with the name of the user, so an answer of a mixed load would show.
    let scene = Scene::new(&overlay(1));
    let server = scene.start().await;
    for round in 1..=100_u32 {
        let load = 2 * round;
        scene.write("overlay.yaml", &overlay(1 + round % 5));
        generation(&server, load).await;
        scene.write(
            "rules.yaml",
            &RULES.replace("requests_per_unit: 5", &format!("requests_per_unit: {}", 5 + round % 2)),
        );
        generation(&server, load + 1).await;
        assert_eq!(admitted(&server, &format!("user-{round}")).await, 1 + round % 5, "round {round}");
    }
    assert_eq!(metric(&server, "tidegate_overlay_fields_skipped").await, "0");
}
