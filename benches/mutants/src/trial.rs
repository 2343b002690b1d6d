//! Runs tests with a change in force.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};

use crate::Failure;

/// Tests that take longer are not used.
pub const SLOWEST: Duration = Duration::from_secs(20);
/// Tests of one process together: 8 s.
const CHUNK: Duration = Duration::from_secs(8);
/// A test and the changes that it reaches.
pub struct Test {
    pub binary: PathBuf,
    pub is_unit: bool,
    pub name: String,
    pub time: Duration,
    pub reached: Vec<usize>,
}

/// Result of a run.
#[derive(PartialEq)]
pub enum Outcome {
    Passed,
    Failed(String),
    Hung,
}

/// Returns the tests of `binaries`, and whether they are unit tests.
pub fn tests(binaries: &[PathBuf]) -> Result<Vec<(PathBuf, bool, String)>, Failure> {
    let mut all = Vec::new();
    for binary in binaries {
        let is_unit = !binary.file_name().is_some_and(|name| name.to_string_lossy().starts_with("it-"));
        let listed = String::from_utf8(Command::new(binary).args(["--list", "--format", "terse"]).output()?.stdout)?;
        let names = listed.lines().filter_map(|line| line.strip_suffix(": test"));
        all.extend(names.map(|name| (binary.clone(), is_unit, name.to_owned())));
    }
    Ok(all)
}

/// Runs tests of one binary in the mode, at most for `limit`, and stops at the first that fails. The mode is the content of a
/// file named by the process group, which the servers of the tests share. Returns the changes reached in the mode `record`.
pub fn run(
    home: &Path,
    binary: &Path,
    names: &[&str],
    mode: &str,
    limit: Duration,
) -> Result<(Outcome, Vec<usize>), Failure> {
    let runs = home.join("run");
    fs::create_dir_all(&runs)?;
    let script =
        "echo \"$1\" > \"$2/$$\" && mkdir -p \"$2/$$.tmp\" && export TMPDIR=\"$2/$$.tmp\" && shift 2 && exec \"$@\"";
    let mut command = Command::new("sh");
    command.args(["-c", script, "sh", mode]).arg(&runs).arg(binary).args(names);
    command.args(["--exact", "--test-threads", "4"]).current_dir(home.join("checkout"));
    // What fails is neither shrunk nor kept.
    command.env("PROPTEST_MAX_SHRINK_ITERS", "0").env("PROPTEST_DISABLE_FAILURE_PERSISTENCE", "1");
    // Of the simulation, as many seeds as fit in [`SLOWEST`] without optimisation.
    command.env("SIMULATION_SEEDS", "16");
    if std::env::var_os("TIDEGATE_VENV").is_none() {
        command.env("TIDEGATE_VENV", home.join("../../.venv"));
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).process_group(0);
    let mut child = command.spawn()?;
    let (sender, lines) = channel();
    let output = BufReader::new(child.stdout.take().ok_or("no output")?);
    let reader = std::thread::spawn(move || output.lines().map_while(Result::ok).all(|line| sender.send(line).is_ok()));
    let began = Instant::now();
    let outcome = loop {
        match lines.recv_timeout(limit.saturating_sub(began.elapsed())) {
            Ok(line) if line.starts_with("test result:") => break Outcome::Passed,
            Ok(line) => {
                if let Some(failed) = line.strip_prefix("test ").and_then(|line| line.strip_suffix(" ... FAILED")) {
                    break Outcome::Failed(failed.to_owned());
                }
            }
            Err(RecvTimeoutError::Timeout) => break Outcome::Hung,
            Err(RecvTimeoutError::Disconnected) => break Outcome::Failed("the process".to_owned()),
        }
    };
    let group = child.id();
    // The group has the servers of tests that were stopped.
    let pid = i32::try_from(group).ok().and_then(Pid::from_raw).ok_or("no group")?;
    let _ = kill_process_group(pid, Signal::KILL);
    child.wait()?;
    let _ = reader.join();
    let reached = fs::read_to_string(runs.join(format!("{group}.reached"))).unwrap_or_default();
    for name in [format!("{group}"), format!("{group}.reached")] {
        let _ = fs::remove_file(runs.join(name));
    }
    let _ = fs::remove_dir_all(runs.join(format!("{group}.tmp")));
    let mut reached: Vec<usize> = reached.lines().filter_map(|line| line.parse().ok()).collect();
    reached.sort_unstable();
    reached.dedup();
    Ok((outcome, reached))
}

/// Runs a test, and again if it fails. Returns its time and the changes that it reaches; `None` if it fails twice or takes too long.
pub fn record(home: &Path, binary: &Path, name: &str) -> Result<Option<(Duration, Vec<usize>)>, Failure> {
    for _ in 0..2 {
        let began = Instant::now();
        match run(home, binary, &[name], "record", SLOWEST)? {
            (Outcome::Passed, reached) => return Ok(Some((began.elapsed(), reached))),
            (Outcome::Hung, _) => break,
            (Outcome::Failed(_), _) => {}
        }
    }
    Ok(None)
}

/// Tries a change with the tests that reach it: unit tests, then for Lua its twins, then the fastest, until those have taken `most` without it.
pub fn attempt(home: &Path, tests: &[Test], number: usize, is_lua: bool, most: Duration) -> Result<Outcome, Failure> {
    let mut reaching: Vec<&Test> = tests.iter().filter(|test| test.reached.binary_search(&number).is_ok()).collect();
    reaching.sort_by_key(|test| (!test.is_unit, is_lua && !test.name.starts_with("twins::"), test.time));
    let mode = number.to_string();
    let mut total = Duration::ZERO;
    reaching.retain(|test| {
        total += test.time;
        total <= most
    });
    while let Some(first) = reaching.first() {
        let mut time = Duration::ZERO;
        let together = reaching.iter().take_while(|test| {
            let fits = time.is_zero() || time + test.time <= CHUNK;
            time += test.time;
            fits && test.is_unit == first.is_unit
        });
        let chunk: Vec<&Test> = together.copied().collect();
        let names: Vec<&str> = chunk.iter().map(|test| test.name.as_str()).collect();
        let limit = time * 3 + SLOWEST;
        let (mut outcome, _) = run(home, &first.binary, &names, &mode, limit)?;
        if let Outcome::Failed(name) = &outcome
            && !first.is_unit
        {
            // A test that fails for another reason, such as a busy machine, does not count.
            (outcome, _) = run(home, &first.binary, &[name], &mode, limit)?;
        }
        if outcome != Outcome::Passed {
            return Ok(outcome);
        }
        reaching.drain(..chunk.len());
    }
    Ok(Outcome::Passed)
}
