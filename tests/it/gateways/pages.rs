//! The pages of the gateways have the files of `examples/gateways/`, word for word.

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::Value;
use tokio::process::Command;

use crate::helm::python;
use crate::support::{output, repository, rule_file};

/// The documents of a YAML file of the repository.
pub async fn yaml(path: &str) -> Vec<Value> {
    python(&["yaml", repository(path).to_str().expect("a path of text")]).await
}

fn names(directory: &str) -> BTreeSet<String> {
    let entries = std::fs::read_dir(repository(directory)).expect("a directory");
    entries.map(|entry| entry.expect("an entry").file_name().into_string().expect("text")).collect()
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

#[tokio::test]
async fn each_page_has_its_files_word_for_word_and_they_are_yaml() {
    let pages: BTreeSet<_> = names("docs/gateways").into_iter().filter(|name| name != "README.md").collect();
    let gateways = names("examples/gateways");
    assert_eq!(pages, gateways.iter().map(|name| format!("{name}.md")).collect(), "a page for each directory");
    let index = read(&repository("docs/gateways/README.md"));
    for gateway in gateways {
        assert!(index.contains(&format!("({gateway}.md)")), "docs/gateways/README.md does not name {gateway}.md");
        let page = read(&repository(&format!("docs/gateways/{gateway}.md")));
        let mut blocks: BTreeSet<&str> =
            page.split("```yaml\n").skip(1).filter_map(|rest| rest.split("```").next()).collect();
        for file in names(&format!("examples/gateways/{gateway}")) {
            let path = format!("examples/gateways/{gateway}/{file}");
            assert!(page.contains(&format!("(../../{path})")), "docs/gateways/{gateway}.md does not link {path}");
            let text = read(&repository(&path));
            assert!(blocks.remove(text.as_str()), "docs/gateways/{gateway}.md does not have {path} word for word");
            assert!(!yaml(&path).await.is_empty(), "{path} is empty");
        }
        assert!(blocks.is_empty(), "docs/gateways/{gateway}.md has YAML that is in no file: {blocks:?}");
    }
}

#[test]
fn each_page_says_what_a_failure_does_and_what_cannot_be_set() {
    for gateway in names("examples/gateways") {
        let page = read(&repository(&format!("docs/gateways/{gateway}.md")));
        for heading in ["## While Redis is down or overloaded", "## Under load"] {
            assert!(page.contains(heading), "docs/gateways/{gateway}.md has no section {heading:?}");
        }
    }
}

#[tokio::test]
async fn the_overlay_and_the_rules_on_the_pages_pass_check() {
    let overlay = &yaml("examples/gateways/envoy-gateway/overlay.yaml").await[0]["data"]["overlay.yaml"];
    let file = rule_file(overlay.as_str().expect("text"));
    let mut check = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    let (status, _, errors) = output(check.arg("check").arg("--overlay").arg(file.path())).await;
    assert!(status.success(), "{errors}");
    let mut check = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    let (status, _, errors) = output(check.arg("check").arg(repository("examples/migrate/rules.yaml"))).await;
    assert!(status.success(), "{errors}");
}
