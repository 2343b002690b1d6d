//! Which files of a directory are rule files.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use tempfile::TempDir;
use tidegate::source::file::find::{Location, UnreadableRules};

use crate::support::directory;

/// A directory with files of these names, each of which has its name as text.
fn named(files: &[&str]) -> TempDir {
    directory(files.iter().map(|name| (name, name)))
}

/// The paths below `directory` that a source reads.
fn read(directory: &Path, source: &Location) -> Vec<String> {
    let files = source.read().unwrap_or_else(|wrong| panic!("{wrong:?}"));
    let below = |name: &str| name.strip_prefix(&format!("{}/", directory.display())).unwrap_or(name).to_owned();
    files.iter().map(|file| below(&file.name)).collect()
}

fn runtime(directory: &Path, is_root_watched: bool, ignores_dot_files: bool) -> Location {
    Location::Runtime {
        directory: directory.to_owned(),
        app_directory: "config".to_owned(),
        is_root_watched,
        ignores_dot_files,
    }
}

#[test]
fn a_directory_on_the_command_line_gives_its_yaml_files_in_order() {
    let made = named(&["b.yaml", "a.yml", "deep/c.yaml", "notes.txt", ".hidden.yaml"]);
    let source = Location::Paths(vec![made.path().to_owned()]);
    assert_eq!(read(made.path(), &source), ["a.yml", "b.yaml", "deep/c.yaml"]);
}

#[test]
fn directories_that_are_nested_too_deep_are_an_error() {
    let deep = |levels: usize| named(&[&format!("{}a.yaml", "d/".repeat(levels))]);
    let deepest = deep(16);
    assert_eq!(read(deepest.path(), &Location::Paths(vec![deepest.path().to_owned()])).len(), 1);
    let too_deep = deep(17);
    let wrong = Location::Paths(vec![too_deep.path().to_owned()]).read().expect_err("it is too deep");
    assert!(wrong[0].to_string().contains("at most 16 levels deep"), "{}", wrong[0]);
}

#[test]
fn a_file_on_the_command_line_may_have_any_name() {
    let made = named(&["rules"]);
    assert_eq!(read(made.path(), &Location::Paths(vec![made.path().join("rules")])), ["rules"]);
}

#[test]
fn with_the_root_watched_every_file_counts_whose_dotted_path_begins_with_the_app_directory() {
    let made = named(&["config/a.yaml", "config/deep/b.txt", "config.yaml", "other/c.yaml", "configuration.yaml"]);
    assert_eq!(
        read(made.path(), &runtime(made.path(), true, false)),
        ["config/a.yaml", "config/deep/b.txt", "config.yaml"]
    );
}

#[test]
fn without_it_only_the_app_directory_counts() {
    let made = named(&["config/a.yaml", "config/deep/b.yaml", "config.yaml", "other/c.yaml"]);
    assert_eq!(read(made.path(), &runtime(made.path(), false, false)), ["config/a.yaml", "config/deep/b.yaml"]);
}

#[test]
fn dot_files_count_unless_they_are_ignored() {
    let made = named(&["config/.a.yaml", "config/b.yaml"]);
    assert_eq!(read(made.path(), &runtime(made.path(), true, false)), ["config/.a.yaml", "config/b.yaml"]);
    assert_eq!(read(made.path(), &runtime(made.path(), true, true)), ["config/b.yaml"]);
}

#[test]
fn a_mounted_config_map_is_read_once_whatever_is_said_of_dot_files() {
    let made = named(&["config/..2026_11_21/rules.yaml"]);
    let config = made.path().join("config");
    symlink("..2026_11_21", config.join("..data")).expect("a link");
    symlink("..data/rules.yaml", config.join("rules.yaml")).expect("a link");
    for ignores_dot_files in [false, true] {
        assert_eq!(read(made.path(), &runtime(made.path(), true, ignores_dot_files)), ["config/rules.yaml"]);
    }
}

#[test]
fn an_empty_runtime_directory_is_no_rules_and_a_missing_one_an_error() {
    let made = named(&[]);
    assert!(read(made.path(), &runtime(made.path(), true, false)).is_empty());
    let wrong = runtime(&made.path().join("nowhere"), true, false).read().expect_err("there is none");
    assert!(matches!(wrong.as_slice(), [UnreadableRules::NoDirectory { .. }]));
}

#[test]
fn rule_files_that_are_too_large_together_are_an_error() {
    let names: Vec<_> = (0..9).map(|number| format!("config/{number}.yaml")).collect();
    let made = named(&names.iter().map(String::as_str).collect::<Vec<_>>());
    for name in &names {
        // A hole of the largest size of one file.
        fs::File::create(made.path().join(name)).expect("a file").set_len(32 << 20).expect("a hole");
    }
    let wrong = Location::Paths(vec![made.path().join("config")]).read().expect_err("nine of them are too many");
    assert!(matches!(wrong.as_slice(), [UnreadableRules::TooLarge { path }] if path.ends_with("8.yaml")), "{wrong:?}");
}

#[test]
fn a_link_that_leads_nowhere_is_an_error_unless_an_editor_made_it() {
    let made = named(&["config/a.yaml"]);
    let config = made.path().join("config");
    symlink("somebody@somewhere.4711", config.join(".#a.yaml")).expect("a link");
    let sources = [runtime(made.path(), true, false), Location::Paths(vec![config.clone()])];
    for source in &sources {
        assert_eq!(source.read().expect("the lock of an editor is no rule file").len(), 1);
    }
    symlink("nowhere", config.join("b.yaml")).expect("a link");
    for source in &sources {
        let wrong = source.read().expect_err("its rules would be missed");
        assert!(
            matches!(wrong.as_slice(), [UnreadableRules::Path { path, .. }] if path.ends_with("b.yaml")),
            "{wrong:?}"
        );
    }
    symlink("nowhere", config.join("notes.txt")).expect("a link");
    assert_eq!(sources[1].read().expect_err("as before").len(), 1, "what is no rule file may lead nowhere");
}
