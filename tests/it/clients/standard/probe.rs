use std::collections::HashMap;
use std::fs::File;
use std::io::{Read, Seek};
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, ChildStdin};
use tokio::sync::oneshot;

use crate::clients::toolchains::Program;
use crate::support::in_time;

/// Timeout of a call that is answered, on a very busy machine.
const LONG: Duration = Duration::from_secs(20);

/// How long a channel is idle before it pings, unless a test is about that.
const KEEPALIVE: Duration = Duration::from_secs(10);

type Waiting = Arc<Mutex<HashMap<u64, oneshot::Sender<Ended>>>>;

/// A running probe. Its commands are in `probes/probe.py`.
pub struct Probe {
    input: tokio::sync::Mutex<ChildStdin>,
    waiting: Waiting,
    last: AtomicU64,
    errors: Mutex<File>,
    _child: Child,
}

/// The end of a call.
pub struct Ended {
    /// Status of gRPC.
    pub status: u64,
    /// Overall code of the answer; 0 without one.
    pub code: u64,
    /// Time that it took.
    pub ms: u64,
}

/// A channel of a probe.
pub struct Channel<'a> {
    probe: &'a Probe,
    name: u64,
}

impl Probe {
    pub fn start(program: &Program) -> Self {
        let errors = tempfile::tempfile().expect("a file");
        let mut command = program.command(&[]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
        command.stderr(errors.try_clone().expect("a second handle"));
        let mut child = command.spawn().unwrap_or_else(|error| panic!("{command:?}: {error}"));
        let input = tokio::sync::Mutex::new(child.stdin.take().expect("its input is ours"));
        let mut lines = BufReader::new(child.stdout.take().expect("its output is ours")).lines();
        let waiting = Waiting::default();
        let ended = Arc::clone(&waiting);
        tokio::spawn(async move {
            while let Ok(Some(line)) = lines.next_line().await {
                let json: Value = serde_json::from_str(&line).unwrap_or_else(|error| panic!("{line}: {error}"));
                let number = |name: &str| json[name].as_u64().unwrap_or_else(|| panic!("{line} has no {name}"));
                let caller = ended.lock().remove(&number("id")).expect("a call");
                let ended = Ended { status: number("status"), code: number("code"), ms: number("ms") };
                // A test that failed waits for nothing.
                let _ = caller.send(ended);
            }
            // Without a probe no call ends.
            ended.lock().clear();
        });
        Self { input, waiting, last: AtomicU64::new(0), errors: Mutex::new(errors), _child: child }
    }

    /// What it has said of its calls, and of itself.
    pub fn errors(&self) -> String {
        let (mut file, mut text) = (self.errors.lock(), String::new());
        file.rewind().and_then(|()| file.read_to_string(&mut text)).expect("it reads");
        text
    }

    async fn says(&self, line: String) {
        let mut input = self.input.lock().await;
        let said = input.write_all(line.as_bytes()).await;
        said.unwrap_or_else(|error| panic!("{line}: {error}: {}", self.errors()));
    }

    /// A channel to this target, without TLS and with the library's own retries.
    pub async fn open(&self, target: &str) -> Channel<'_> {
        self.open_with(target, None, "default", None).await
    }

    /// The same with a CA for TLS, a setting of retries, and the time before a ping.
    pub async fn open_with(
        &self,
        target: &str,
        ca: Option<&Path>,
        retries: &str,
        keepalive: Option<Duration>,
    ) -> Channel<'_> {
        let name = self.last.fetch_add(1, Ordering::Relaxed);
        let ca = ca.map_or_else(|| "-".to_owned(), |ca| ca.display().to_string());
        let keepalive_ms = keepalive.unwrap_or(KEEPALIVE).as_millis();
        self.says(format!("open {name} {target} {ca} {retries} {keepalive_ms}\n")).await;
        Channel { probe: self, name }
    }
}

impl Channel<'_> {
    /// Makes a call with one descriptor of one entry.
    pub async fn call(&self, key: &str, value: &str) -> Ended {
        self.call_within(key, value, LONG).await
    }

    /// The same with this deadline.
    pub async fn call_within(&self, key: &str, value: &str, timeout: Duration) -> Ended {
        self.ask(key, value, timeout, "-").await
    }

    /// The same with a message that is compressed with gzip.
    pub async fn compressed(&self, key: &str, value: &str) -> Ended {
        self.ask(key, value, LONG, "gzip").await
    }

    async fn ask(&self, key: &str, value: &str, timeout: Duration, compression: &str) -> Ended {
        let id = self.probe.last.fetch_add(1, Ordering::Relaxed);
        let (caller, ended) = oneshot::channel();
        self.probe.waiting.lock().insert(id, caller);
        let (name, timeout_ms) = (self.name, timeout.as_millis());
        self.probe.says(format!("call {id} {name} {key} {value} {timeout_ms} {compression}\n")).await;
        let ended = in_time("the call ends", ended).await;
        ended.unwrap_or_else(|_| panic!("the probe has ended: {}", self.probe.errors()))
    }
}
