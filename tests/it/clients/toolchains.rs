use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::process::Command;
use tokio::sync::OnceCell;

use crate::helm::aside;
use crate::support::repository;

/// The longest that packages may take to be downloaded and built on a machine that has none yet.
const BUILD: Duration = Duration::from_mins(15);

/// Made by the package managers where someone runs a demo in the repository itself.
const GENERATED: [&str; 7] = ["node_modules", "dist", "target", "venv", "envoy", "google", "__pycache__"];

/// What is built for a language.
pub struct Built {
    pub demo: Program,
    /// A client that a test steers; its commands are in `probes/probe.py`.
    pub probe: Program,
}

/// A program, the arguments before its own, and its variables.
pub struct Program {
    program: PathBuf,
    arguments: Vec<PathBuf>,
    variables: Vec<(&'static str, PathBuf)>,
}

impl Program {
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command.args(&self.arguments).args(arguments).envs(self.variables.iter().cloned());
        command
    }
}

/// Built once, for all tests of the process.
type Once = OnceCell<Option<Built>>;

pub async fn python() -> Option<&'static Built> {
    static ONCE: Once = OnceCell::const_new();
    ONCE.get_or_init(build_python).await.as_ref()
}

pub async fn go() -> Option<&'static Built> {
    static ONCE: Once = OnceCell::const_new();
    ONCE.get_or_init(build_go).await.as_ref()
}

pub async fn node() -> Option<&'static Built> {
    static ONCE: Once = OnceCell::const_new();
    ONCE.get_or_init(build_node).await.as_ref()
}

pub async fn java() -> Option<&'static Built> {
    static ONCE: Once = OnceCell::const_new();
    ONCE.get_or_init(build_java).await.as_ref()
}

pub async fn rust() -> &'static Built {
    static ONCE: OnceCell<Built> = OnceCell::const_new();
    ONCE.get_or_init(build_rust).await
}

async fn build_python() -> Option<Built> {
    are_found("Python", &["python3"])?;
    let directory = copied("python", "probe.py", "probe.py");
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
    let program =
        |name: &str| Program { program: python.clone(), arguments: vec![directory.join(name)], variables: vec![] };
    Some(Built { demo: program("demo.py"), probe: program("probe.py") })
}

async fn build_go() -> Option<Built> {
    are_found("Go", &["go"])?;
    let directory = copied("go", "probe.go", "probe/main.go");
    // Programs have the names of the module and of the directory.
    let build = ["build", "-o", "bin/", "./..."];
    run(Command::new("go").args(build).current_dir(&directory)).await;
    let program =
        |name: &str| Program { program: directory.join("bin").join(name), arguments: vec![], variables: vec![] };
    Some(Built { demo: program("limited"), probe: program("probe") })
}

async fn build_node() -> Option<Built> {
    are_found("TypeScript", &["node", "npm"])?;
    let directory = copied("node", "probe.ts", "probe.ts");
    if is_new(&directory, "package-lock.json") {
        let install = ["ci", "--no-audit", "--no-fund", "--ignore-scripts"];
        run(Command::new("npm").args(install).current_dir(&directory)).await;
        keep(&directory, "package-lock.json");
    }
    run(Command::new("npm").args(["run", "build"]).current_dir(&directory)).await;
    let program = |name: &str| Program {
        program: "node".into(),
        arguments: vec![directory.join("dist").join(name)],
        variables: vec![("PROTOS", repository("proto"))],
    };
    Some(Built { demo: program("demo.js"), probe: program("probe.js") })
}

async fn build_java() -> Option<Built> {
    are_found("Java", &["java", "javac", "mvn"])?;
    let directory = copied("java", "Probe.java", "src/main/java/tidegate/Probe.java");
    let protos = format!("-Dprotos={}", repository("proto").display());
    let build = ["--quiet", "--batch-mode", &protos, "process-classes"];
    run(Command::new("mvn").args(build).current_dir(&directory)).await;
    let target = directory.join("target");
    let classes = format!("{}:{}/*", target.join("classes").display(), target.join("lib").display());
    let program = |name: &str| Program {
        program: "java".into(),
        arguments: ["-cp", &classes, name].map(PathBuf::from).to_vec(),
        variables: vec![],
    };
    Some(Built { demo: program("tidegate.Demo"), probe: program("tidegate.Probe") })
}

async fn build_rust() -> Built {
    let directory = copied("rust", "probe.rs", "src/bin/probe.rs");
    let mut build = Command::new(env!("CARGO"));
    build.args(["build", "--quiet", "--locked", "--features", "tonic/gzip", "--target-dir", "target"]);
    run(build.current_dir(&directory)).await;
    let program = |name: &str| Program {
        program: directory.join("target/debug").join(name),
        arguments: vec![],
        variables: vec![],
    };
    Built { demo: program("limited"), probe: program("probe") }
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

/// A copy of a client's directory below `target/`, so that what is built stays out of the repository, with this probe as
/// the file `name` in it. What an earlier run downloaded is still there.
fn copied(client: &str, probe: &str, name: &str) -> PathBuf {
    let copy = Path::new(env!("CARGO_TARGET_TMPDIR")).join("clients").join(client);
    copy_all(&repository("examples/clients").join(client), &copy);
    let name = copy.join(name);
    std::fs::create_dir_all(name.parent().expect("a directory")).expect("it is made");
    copy_file(&repository("tests/it/clients/probes").join(probe), &name);
    copy
}

/// Copies a file. One that is the same keeps its time, and is not built again.
fn copy_file(source: &Path, target: &Path) {
    if std::fs::read(target).ok() != std::fs::read(source).ok() {
        std::fs::copy(source, target).expect("it is copied");
    }
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
        } else {
            copy_file(&source, &target);
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
