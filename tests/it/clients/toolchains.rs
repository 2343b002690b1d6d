use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::process::Command;

use crate::helm::aside;
use crate::support::repository;

/// The longest that packages may take to be downloaded and built on a machine that has none yet.
const BUILD: Duration = Duration::from_mins(15);

/// Made by the package managers where someone runs a demo in the repository itself.
const GENERATED: [&str; 7] = ["node_modules", "dist", "target", "venv", "envoy", "google", "__pycache__"];

/// A demo that is built: a program, the arguments before its own, and its variables.
pub struct Demo {
    program: PathBuf,
    arguments: Vec<PathBuf>,
    variables: Vec<(&'static str, PathBuf)>,
}

impl Demo {
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command.args(&self.arguments).args(arguments).envs(self.variables.iter().cloned());
        command
    }
}

pub async fn python() -> Option<Demo> {
    are_found("Python", &["python3"])?;
    let directory = copied("python");
    let venv = directory.join("venv");
    let python = venv.join("bin/python");
    if is_new(&directory, "requirements.txt") {
        run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&venv)).await;
        let pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", "requirements.txt"];
        run(Command::new(&python).args(pip).current_dir(&directory)).await;
        keep(&directory, "requirements.txt");
    }
    let mut stubs = Command::new(&python);
    stubs.args(["-m", "grpc_tools.protoc", "--python_out=.", "--grpc_python_out=.", "-I"]).arg(repository("proto"));
    run(stubs.args(protos(&repository("proto/envoy"))).current_dir(&directory)).await;
    Some(Demo { program: python, arguments: vec![directory.join("demo.py")], variables: vec![] })
}

pub async fn go() -> Option<Demo> {
    are_found("Go", &["go"])?;
    let program = copied("go").join("demo");
    let mut build = Command::new("go");
    run(build.args(["build", "-o"]).arg(&program).arg(".").current_dir(repository("examples/clients/go"))).await;
    Some(Demo { program, arguments: vec![], variables: vec![] })
}

pub async fn node() -> Option<Demo> {
    are_found("TypeScript", &["node", "npm"])?;
    let directory = copied("node");
    if is_new(&directory, "package-lock.json") {
        let install = ["ci", "--no-audit", "--no-fund", "--ignore-scripts"];
        run(Command::new("npm").args(install).current_dir(&directory)).await;
        keep(&directory, "package-lock.json");
    }
    run(Command::new("npm").args(["run", "build"]).current_dir(&directory)).await;
    let variables = vec![("PROTOS", repository("proto"))];
    Some(Demo { program: "node".into(), arguments: vec![directory.join("dist/demo.js")], variables })
}

pub async fn java() -> Option<Demo> {
    are_found("Java", &["java", "javac", "mvn"])?;
    let directory = copied("java");
    let protos = format!("-Dprotos={}", repository("proto").display());
    let build = ["--quiet", "--batch-mode", &protos, "process-classes"];
    run(Command::new("mvn").args(build).current_dir(&directory)).await;
    let target = directory.join("target");
    let classes = format!("{}:{}/*", target.join("classes").display(), target.join("lib").display());
    let arguments = ["-cp", &classes, "tidegate.Demo"].map(PathBuf::from).to_vec();
    Some(Demo { program: "java".into(), arguments, variables: vec![] })
}

pub async fn rust() -> Demo {
    let directory = copied("rust").join("target");
    let mut build = Command::new(env!("CARGO"));
    build.args(["build", "--quiet", "--locked", "--target-dir"]).arg(&directory);
    run(build.current_dir(repository("examples/clients/rust"))).await;
    Demo { program: directory.join("debug/limited"), arguments: vec![], variables: vec![] }
}

/// Whether a language is on this machine. Without it its test says so and passes, unless it must not: in CI.
fn are_found(language: &str, programs: &[&str]) -> Option<()> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let is_there = |program: &str| std::env::split_paths(&path).any(|directory| directory.join(program).is_file());
    let Some(missing) = programs.iter().find(|program| !is_there(program)) else { return Some(()) };
    let must = std::env::var_os("CI").is_some()
        || std::env::var_os("TIDEGATE_REQUIRE_CLIENTS").is_some_and(|value| value == "1");
    assert!(!must, "{missing} is missing in $PATH, and CI must test the client in {language}");
    aside(&format!("the test of the client in {language} is SKIPPED: there is no {missing} in $PATH"));
    None
}

/// A copy of a client's directory below `target/`, so that what is built stays out of the repository. What an earlier run
/// downloaded is still there.
fn copied(client: &str) -> PathBuf {
    let copy = Path::new(env!("CARGO_TARGET_TMPDIR")).join("clients").join(client);
    copy_all(&repository("examples/clients").join(client), &copy);
    copy
}

fn copy_all(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).expect("a directory");
    for entry in std::fs::read_dir(from).expect("a directory").map(|entry| entry.expect("an entry")) {
        let (source, target) = (entry.path(), to.join(entry.file_name()));
        if GENERATED.iter().any(|name| entry.file_name() == *name) {
            continue;
        }
        if source.is_dir() {
            copy_all(&source, &target);
        } else if std::fs::read(&target).ok() != std::fs::read(&source).ok() {
            // A file that is the same keeps its time, and is not built again.
            std::fs::copy(&source, &target).expect("it is copied");
        }
    }
}

/// Whether the packages of this lock file have yet to be installed.
fn is_new(directory: &Path, lock: &str) -> bool {
    std::fs::read(directory.join(lock)).ok() != std::fs::read(directory.join("installed")).ok()
}

/// Remembers that the packages of this lock file are installed.
fn keep(directory: &Path, lock: &str) {
    std::fs::copy(directory.join(lock), directory.join("installed")).expect("it is copied");
}

/// The files of the protocol below a directory.
fn protos(directory: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory).expect("a directory").map(|entry| entry.expect("an entry").path());
    entries.flat_map(|path| if path.is_dir() { protos(&path) } else { vec![path] }).collect()
}

/// Runs a step of a build.
async fn run(command: &mut Command) {
    let ended = tokio::time::timeout(BUILD, command.kill_on_drop(true).output()).await;
    let output = ended.expect("it ends").unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let said = [output.stdout, output.stderr].concat();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&said));
}
