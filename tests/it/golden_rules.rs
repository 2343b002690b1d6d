//! Rule files with mistakes that people make, and all that `tidegate check` says of each, word by word.
//!
//! `TIDEGATE_BLESS=1 cargo test --test it golden_rules` writes what it says now; read it as somebody who has never seen the code.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use crate::support::repository;

fn directory() -> PathBuf {
    repository("tests/golden/broken")
}

/// The names of the files with this extension, without it.
fn names(extension: &str) -> BTreeSet<String> {
    let entries = fs::read_dir(directory()).expect("the directory");
    let paths = entries.map(|entry| entry.expect("an entry").path());
    let paths = paths.filter(|path| path.extension().is_some_and(|found| found == extension));
    paths.map(|path| path.file_stem().expect("a name").to_string_lossy().into_owned()).collect()
}

/// What the command says in the directory of the file, where it was said, and its exit code.
fn check(name: &str) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    command.args(["check", &format!("{name}.yaml")]).current_dir(directory()).env_clear();
    let output = command.output().expect("the command runs");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let code = output.status.code().expect("it ends by itself");
    format!("{}--- stdout\n{}--- exit code {code}\n", text(&output.stderr), text(&output.stdout))
}

#[test]
fn check_says_of_every_broken_file_what_is_kept_beside_it() {
    let blesses = std::env::var_os("TIDEGATE_BLESS").is_some();
    let mut wrong = Vec::new();
    for name in &names("yaml") {
        let (said, kept) = (check(name), directory().join(name).with_extension("txt"));
        if blesses {
            fs::write(&kept, &said).expect("it is written");
        }
        let kept = fs::read_to_string(&kept).unwrap_or_default();
        if said != kept {
            wrong.push(format!("# {name}: kept\n{kept}# {name}: said now\n{said}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn every_answer_that_is_kept_has_its_file_and_every_number_is_there_once() {
    let (files, mut kept) = (names("yaml"), names("txt"));
    assert!(kept.remove("networks"), "the list that one of the files names");
    assert_eq!(files, kept);
    for (index, name) in files.iter().enumerate() {
        assert!(name.starts_with(&format!("{:02}-", index + 1)), "{name} should be number {}", index + 1);
    }
}

/// Each file is there for a mistake, so something is said of it.
#[test]
fn no_broken_file_passes_without_a_word() {
    for name in &names("yaml") {
        let said = check(name);
        assert!(said.contains(": error: ") || said.contains(": warning: "), "{name}: {said}");
        assert_eq!(said.contains(": error: "), said.ends_with("--- exit code 1\n"), "{name}: {said}");
    }
}
