use std::fs;
use std::path::Path;

use tidegate::settings::Settings;
use tokio::process::Command;

use crate::support::{output, repository};

/// The instructions of the Dockerfile: word and rest, continued lines joined, comments left out.
fn instructions() -> Vec<(String, String)> {
    let text = fs::read_to_string(repository("Dockerfile")).expect("it reads");
    let lines: Vec<_> = text.lines().filter(|line| !line.starts_with('#')).collect();
    let joined = lines.join("\n").replace("\\\n", " ");
    let lines = joined.lines().filter(|line| !line.trim().is_empty());
    let instructions = lines.map(|line| line.split_once(' ').expect("an instruction and its arguments"));
    instructions.map(|(word, rest)| (word.to_owned(), rest.trim().to_owned())).collect()
}

/// What an instruction of the last stage says.
fn says(word: &str) -> String {
    let all = instructions();
    let last = all.iter().rposition(|(word, _)| word == "FROM").expect("a stage");
    let found: Vec<_> = all[last..].iter().filter(|(found, _)| found == word).collect();
    assert_eq!(found.len(), 1, "one {word} in the last stage");
    found[0].1.clone()
}

/// What the stages run.
fn runs() -> Vec<String> {
    instructions().into_iter().filter(|(word, _)| word == "RUN").map(|(_, rest)| rest).collect()
}

/// The command that puts together what is in the image, with this program and below this directory.
pub fn put_together(program: &str, below: &str) -> String {
    let run = runs().pop().expect("the last one of the first stage");
    assert!(run.contains("target/release/tidegate") && run.contains("/out"), "{run}");
    run.replace("target/release/tidegate", program).replace("/out", below)
}

/// The paths that the first stage copies from here.
fn sources() -> Vec<String> {
    let copies = instructions().into_iter().filter(|(word, rest)| word == "COPY" && !rest.starts_with("--from"));
    let words = copies.map(|(_, rest)| rest.split_whitespace().map(str::to_owned).collect::<Vec<_>>());
    words.flat_map(|words| words[..words.len() - 1].to_vec()).collect()
}

#[tokio::test]
async fn the_image_is_built_from_what_a_build_needs_and_docker_is_shown_nothing_else() {
    let shown = fs::read_to_string(repository(".dockerignore")).expect("it reads");
    let shown: Vec<_> = shown.lines().filter(|line| !line.starts_with('#')).collect();
    assert_eq!(shown[0], "*", "what is not named is not shown");
    let shown: Vec<_> = shown[1..].iter().map(|line| line.strip_prefix('!').expect("a name")).collect();
    assert_eq!(shown, sources());
    let copied = tempfile::tempdir().expect("a directory");
    for source in sources() {
        let copy = Command::new("cp").arg("-r").arg(repository(&source)).arg(copied.path()).status().await;
        assert!(copy.is_ok_and(|status| status.success()), "{source} is not there");
    }
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["metadata", "--format-version", "1", "--no-deps", "--locked", "--offline"]).current_dir(&copied);
    let (status, said, errors) = output(&mut cargo).await;
    assert!(status.success() && said.contains("\"custom-build\""), "the manifest holds without the rest: {errors}");
    let mut included = 0;
    for path in rust_files(copied.path()) {
        let text = fs::read_to_string(&path).expect("it reads");
        for macro_ in ["include_str!(\"", "include_bytes!(\""] {
            for rest in text.split(macro_).skip(1) {
                let name = rest.split('"').next().expect("a name");
                let file = path.parent().expect("a directory").join(name);
                assert!(file.exists(), "{} includes {name}, which is not copied", path.display());
                included += 1;
            }
        }
    }
    assert!(included > 0, "scripts are included");
}

fn rust_files(below: &Path) -> Vec<std::path::PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(below).expect("a directory") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            found.extend(rust_files(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
    found
}

#[test]
fn the_image_runs_as_a_number_and_answers_to_both_names() {
    let user = says("USER");
    let is_number = |text: &str| text.parse::<u32>().is_ok_and(|number| number > 0);
    assert!(user.split(':').all(is_number), "Kubernetes cannot tell whether {user} is root");
    assert_eq!(user, format!("{0}:{0}", super::container::USER));
    assert_eq!(says("ENTRYPOINT"), r#"["/bin/tidegate"]"#);
    assert_eq!(says("CMD"), r#"["serve"]"#);
    assert_eq!(says("STOPSIGNAL"), "SIGTERM");
    let default = |name: &str| Settings::table().find(|row| row.variable == name).expect("a setting").default;
    assert_eq!(says("EXPOSE"), format!("{} {}", default("GRPC_PORT"), default("PORT")));
    assert!(runs()[0].contains("cargo build --release --locked"), "{:?}", runs());
    assert_eq!(says("COPY"), "--from=build /out/ /");
}

#[test]
fn the_image_is_of_this_version_and_of_pinned_parts() {
    assert!(says("LABEL").contains(&format!("org.opencontainers.image.version=\"{}\"", env!("CARGO_PKG_VERSION"))));
    let bases: Vec<_> = instructions().into_iter().filter(|(word, rest)| word == "ARG" && rest.contains(':')).collect();
    let [(_, builder)] = &bases[..] else { panic!("one image: {bases:?}") };
    assert_eq!(*builder, format!("BUILDER=rust:{}-bookworm", env!("CARGO_PKG_RUST_VERSION")));
    let stages: Vec<_> = instructions().into_iter().filter(|(word, _)| word == "FROM").map(|(_, rest)| rest).collect();
    assert_eq!(stages, ["${BUILDER} AS build", "scratch"]);
}
