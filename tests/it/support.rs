//! The real parts: the `tidegate` binary, Envoy, Python, and what a test waits for.

use std::fs::{DirEntry, File};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::{NamedTempFile, TempDir};
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::{Child, ChildStdout, Command};

use crate::http;

/// What a test waits for a thing that must happen, on a machine that may be very busy.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// One of two numbers: the first in `tests/run`, the second in `tests/nightly`, which sets `TIDEGATE_NIGHTLY`.
pub fn by_tier<T>(run: T, nightly: T) -> T {
    if std::env::var_os("TIDEGATE_NIGHTLY").is_some() { nightly } else { run }
}

/// Hands each connection to a free port to `answer`. Returns the address.
pub async fn answering<A>(answer: impl Fn(TcpStream) -> A + Send + 'static) -> SocketAddr
where
    A: Future<Output: Send> + Send + 'static,
{
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a free port");
    let at = listener.local_addr().expect("it is bound");
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(answer(stream));
        }
    });
    at
}

/// A file of the repository.
pub fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// A program of the virtual environment that `tests/run` sets up.
pub fn tool(name: &str) -> PathBuf {
    let directory = std::env::var_os("TIDEGATE_VENV").map_or_else(|| repository(".venv"), PathBuf::from);
    let program = directory.join("bin").join(name);
    assert!(
        program.exists(),
        "{} is missing: this test needs Envoy, Traefik and Python packages; run `tests/run`, which installs them and then runs the tests, or set TIDEGATE_VENV to a virtual environment that has tests/requirements.txt",
        program.display()
    );
    program
}

/// Waits for what must happen.
pub async fn in_time<T>(what: &str, future: impl Future<Output = T>) -> T {
    let waited = tokio::time::timeout(PATIENCE, future).await;
    waited.unwrap_or_else(|_| panic!("in {PATIENCE:?} it did not come to pass that {what}"))
}

/// Asks again until there is an answer.
pub async fn eventually<T>(what: &str, mut ask: impl AsyncFnMut() -> Option<T>) -> T {
    in_time(what, async {
        loop {
            if let Some(answer) = ask().await {
                return answer;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await
}

/// What a program that has ended wrote, and how it ended.
pub async fn output(command: &mut Command) -> (ExitStatus, String, String) {
    let output = in_time("the program ends", command.kill_on_drop(true).output()).await.expect("it runs");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status, text(&output.stdout), text(&output.stderr))
}

/// A child process that is killed when its test ends, however it ends.
pub struct Process {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
    /// A file without a name, so that it goes with whoever has it open.
    errors: File,
}

impl Process {
    /// Starts a program.
    pub fn start(command: &mut Command) -> Self {
        Self::start_with(command, None)
    }

    /// Starts a program that complains there, if it is said where.
    fn start_with(command: &mut Command, standard_error: Option<Stdio>) -> Self {
        let errors = tempfile::tempfile().expect("a file for what it complains of");
        let to_file = errors.try_clone().expect("a second handle").into();
        let standard_error = standard_error.unwrap_or(to_file);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(standard_error).kill_on_drop(true);
        let mut child = command.spawn().unwrap_or_else(|error| panic!("{command:?}: {error}"));
        let lines = BufReader::new(child.stdout.take().expect("its output is ours")).lines();
        Self { child, lines, errors }
    }

    /// What it has written to its standard error.
    pub fn errors(&self) -> String {
        let length = self.errors.metadata().expect("it has a length").len();
        let mut text = vec![0; usize::try_from(length).expect("it fits")];
        // Where it is read from is not where the program goes on to write.
        self.errors.read_exact_at(&mut text, 0).expect("it reads");
        String::from_utf8_lossy(&text).into_owned()
    }

    /// Whether it has ended.
    pub fn has_ended(&mut self) -> bool {
        self.child.try_wait().expect("it can be asked").is_some()
    }

    /// The next line of its standard output; `None` when that has ended.
    pub async fn line(&mut self) -> Option<String> {
        in_time("the program says something", self.lines.next_line()).await.expect("its output is text")
    }

    /// The number of the running process.
    pub fn pid(&self) -> u32 {
        self.child.id().expect("the program runs")
    }

    /// Sends a signal to it.
    pub fn signal(&self, signal: Signal) {
        let pid = i32::try_from(self.pid()).ok().and_then(Pid::from_raw);
        kill_process(pid.expect("it has a number"), signal).expect("the signal is sent");
    }

    /// How it ended.
    pub async fn ended(&mut self) -> ExitStatus {
        in_time("the program ends", self.child.wait()).await.expect("it ends")
    }
}

/// A rule file with this text.
pub fn rule_file(text: &str) -> NamedTempFile {
    let file = tempfile::Builder::new().suffix(".yaml").tempfile().expect("a file");
    std::fs::write(file.path(), text).expect("it is written");
    file
}

/// A directory with files of these names, which may begin with other directories, and contents.
pub fn directory(files: impl IntoIterator<Item = (impl AsRef<Path>, impl AsRef<[u8]>)>) -> TempDir {
    let directory = tempfile::tempdir().expect("a directory");
    for (name, content) in files {
        let path = directory.path().join(name);
        std::fs::create_dir_all(path.parent().expect("it has one")).expect("it is made");
        std::fs::write(path, content).expect("it is written");
    }
    directory
}

/// Puts a text in the place of a file at once.
pub fn replace_file(file: &Path, text: &str) {
    let new = file.with_extension("new");
    std::fs::write(&new, text).expect("it is written");
    std::fs::rename(new, file).expect("it takes its place");
}

/// Has `tidegate serve` listen on ports of its own, on the loopback interface.
pub fn on_free_ports(command: &mut Command) -> &mut Command {
    for listener in ["GRPC_", "", "DEBUG_"] {
        command.env(format!("{listener}HOST"), "127.0.0.1").env(format!("{listener}PORT"), "0");
    }
    command
}

/// A running `tidegate serve`, on ports of its own.
pub struct Tidegate {
    /// Its gRPC listener.
    pub grpc: SocketAddr,
    /// Its HTTP listener.
    pub http: SocketAddr,
    /// Its debug listener.
    pub debug: SocketAddr,
    process: Process,
}

impl Tidegate {
    /// Starts it with rule files or a directory of them, and with these variables only.
    pub async fn start(rules: &Path, variables: &[(&str, &str)]) -> Self {
        Self::start_with(Some(rules), variables).await
    }

    /// Starts it with what is named, if anything is, and with these variables only.
    pub async fn start_with(named: Option<&Path>, variables: &[(&str, &str)]) -> Self {
        Self::start_to(named, variables, None).await
    }

    /// The same, and it logs there, if it is said where.
    pub async fn start_to(named: Option<&Path>, variables: &[(&str, &str)], log: Option<Stdio>) -> Self {
        Self::start_as(Command::new(env!("CARGO_BIN_EXE_tidegate")), named, variables, log).await
    }

    /// The same, by a command that runs it with its own arguments.
    pub async fn start_as(
        mut command: Command,
        named: Option<&Path>,
        variables: &[(&str, &str)],
        log: Option<Stdio>,
    ) -> Self {
        command.arg("serve").args(named).env_clear();
        on_free_ports(&mut command).envs(variables.iter().copied());
        Self::start_command(command, log).await
    }

    /// Starts it by a command with everything that it needs.
    pub async fn start_command(mut command: Command, log: Option<Stdio>) -> Self {
        let mut process = Process::start_with(&mut command, log);
        let [grpc, http, debug] = listeners(&mut process, ["gRPC", "HTTP", "debug"]).await;
        Self { grpc, http, debug, process }
    }

    /// Its page of metrics.
    pub async fn metrics(&self) -> String {
        let answer = http::get(self.http, "/metrics").await;
        assert_eq!(answer.status, 200, "{answer}");
        answer.body
    }

    /// The value of a series on its page of metrics.
    pub async fn metric(&self, series: &str) -> u64 {
        let page = self.metrics().await;
        let value = page.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
        value.and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("no number {series} in {page}"))
    }

    /// The most memory it has ever had resident, in bytes.
    pub fn peak_memory(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.process.pid())).expect("the kernel tells");
        let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB"));
        peak.and_then(|kib| kib.parse::<u64>().ok()).expect("in KiB") * 1_024
    }

    /// What it has logged. Its thread that writes the log has written what the others have given to it.
    pub fn log(&self) -> String {
        let began = Instant::now();
        while self.is_logging() && began.elapsed() < PATIENCE {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.process.errors()
    }

    /// Whether the thread that writes the log has something to do, or has not begun yet.
    fn is_logging(&self) -> bool {
        let Some(pid) = self.process.child.id() else { return false };
        let stat = |task: std::io::Result<DirEntry>| std::fs::read_to_string(task.ok()?.path().join("stat")).ok();
        let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return false };
        let stats: Vec<_> = tasks.filter_map(stat).collect();
        // Of a process that has ended nothing is left, or one thread that is neither.
        let rests =
            |stat: &String| stat.contains(" (log) ") && !stat.contains(" (log) R ") && !stat.contains(" (log) D ");
        let is_over = |stat: &String| stat.contains(") Z ") || stat.contains(") X ");
        !stats.is_empty() && !stats.iter().any(|stat| rests(stat) || is_over(stat))
    }

    /// The number of its process.
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// The number of its threads.
    pub fn threads(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/task", self.pid())).expect("the kernel tells").count()
    }

    /// Sends a signal to it: `STOP` pauses it, `CONT` lets it go on.
    pub fn signal(&self, signal: Signal) {
        self.process.signal(signal);
    }

    /// Asks it to stop, as an init system does.
    pub fn terminate(&self) {
        self.signal(Signal::TERM);
    }

    /// Stops it, and waits until it has ended well.
    pub async fn stop(mut self) {
        self.terminate();
        assert!(self.ended().await.success(), "{}", self.log());
    }

    /// Takes it away without a word.
    pub fn kill(&self) {
        self.signal(Signal::KILL);
    }

    /// How it ended.
    pub async fn ended(&mut self) -> ExitStatus {
        self.process.ended().await
    }
}

/// The addresses that the start says of these listeners, as text or as one object.
pub async fn listeners<const N: usize>(process: &mut Process, names: [&str; N]) -> [SocketAddr; N] {
    let mut addresses = [None; N];
    loop {
        let line = process.line().await;
        let line = line.unwrap_or_else(|| panic!("the server does not start: {}", process.errors()));
        let object: Value = serde_json::from_str(&line).unwrap_or_default();
        for (name, address) in names.iter().zip(&mut addresses) {
            let of_object = object[name.to_lowercase()].as_str();
            let of_text = line.trim_start().strip_prefix(name).and_then(|rest| rest.split_whitespace().next());
            if let Some(text) = of_object.or(of_text) {
                *address = Some(text.parse().unwrap_or_else(|_| panic!("no address in {line:?}")));
            }
        }
        if addresses.iter().all(Option::is_some) {
            return addresses.map(|address| address.expect("it is there"));
        }
    }
}
