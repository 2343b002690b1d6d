//! A command that prints the login for Redis, such as a token of a cloud that expires.

use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};
use thiserror::Error;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::process::{Child, Command};
use tokio::time::timeout;

use super::login::Login;

/// Maximum duration of a command: 10 s. The clients of clouds retry for a few seconds.
pub const LONGEST: Duration = Duration::from_secs(10);
/// Maximum size of the output: 64 KiB, as for a file with a password. A token of a cloud has up to 4 KB.
const MOST_OUTPUT: u64 = 64 << 10;
/// Maximum number of bytes of the error output in a log line: 512.
const MOST_ERROR: u64 = 512;

/// Maximum wait for the end of a command that was killed: 1 s.
const REAPED: Duration = Duration::from_secs(1);

/// A command with its arguments. It is run without a shell.
#[derive(Clone, PartialEq, Eq)]
pub struct AuthCommand {
    variable: &'static str,
    program: String,
    arguments: Vec<String>,
}

/// Reason why a command gave no login. It quotes the error output of the command, never its output.
#[derive(Debug, Error)]
#[error("{variable}: {program} {why}")]
pub struct CommandFailed {
    variable: &'static str,
    program: String,
    why: Why,
}

#[derive(Debug, Error)]
enum Why {
    #[error("cannot be started: {0}")]
    Start(std::io::Error),
    #[error("did not end within {} s; it was killed", LONGEST.as_secs())]
    TooLong,
    #[error("printed more than {} KiB; it was killed", MOST_OUTPUT >> 10)]
    TooLarge,
    #[error("ended with {0}{1}")]
    Status(ExitStatus, ErrorOutput),
    #[error("printed no login: expected PASSWORD or USER:PASSWORD in the first line, in UTF-8{0}")]
    NoLogin(ErrorOutput),
}

/// Beginning of what a command wrote to standard error.
#[derive(Debug)]
struct ErrorOutput(String);

impl std::fmt::Display for ErrorOutput {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.0.is_empty() { Ok(()) } else { write!(f, "; it wrote: {}", self.0) }
    }
}

/// Writes the program only: arguments may be secrets.
impl std::fmt::Debug for AuthCommand {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} with {} arguments", self.program, self.arguments.len())
    }
}

impl AuthCommand {
    /// Parses the command in `text`, which the setting `variable` has. Words are separated and quoted as in a shell; nothing is
    /// expanded. Returns `None` if there is no program or a quote is open.
    pub fn parse(variable: &'static str, text: &str) -> Option<Self> {
        let mut words = shlex::split(text)?.into_iter();
        let program = words.next().filter(|program| !program.is_empty())?;
        Some(Self { variable, program, arguments: words.collect() })
    }

    /// Runs the command in the environment of this process and returns the login that it prints, in the form of
    /// [`Login::parse`]. Blocks for up to 10 s. A command that runs longer or prints too much is killed with its process group.
    ///
    /// # Errors
    /// If the command cannot be started, fails, is killed, or prints no login.
    pub fn run(&self) -> Result<Login, CommandFailed> {
        let failed = |why| CommandFailed { variable: self.variable, program: self.program.clone(), why };
        // A runtime of its own: the caller has a thread for this.
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.map_err(Why::Start).and_then(|runtime| runtime.block_on(self.output())).map_err(failed)
    }

    async fn output(&self) -> Result<Login, Why> {
        let mut command = Command::new(&self.program);
        command.args(&self.arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.process_group(0).kill_on_drop(true).spawn().map_err(Why::Start)?;
        let group = child.id().and_then(|id| Pid::from_raw(id.cast_signed()));
        let result = timeout(LONGEST, login(&mut child)).await.unwrap_or(Err(Why::TooLong));
        if let Some(group) = group.filter(|_| matches!(result, Err(Why::TooLong | Why::TooLarge))) {
            // It may have ended meanwhile.
            let _ = kill_process_group(group, Signal::KILL);
            let _ = timeout(REAPED, child.wait()).await;
        }
        result
    }
}

/// Reads what `child` prints, and waits for its end.
async fn login(child: &mut Child) -> Result<Login, Why> {
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    let printed = async {
        let printed = beginning(stdout, MOST_OUTPUT + 1).await;
        let is_whole = u64::try_from(printed.len()).is_ok_and(|length| length <= MOST_OUTPUT);
        is_whole.then_some(printed).ok_or(Why::TooLarge)
    };
    let complained = async {
        let mut stderr = stderr;
        let complained = beginning(stderr.as_mut(), MOST_ERROR).await;
        // The rest is read, so that the command does not wait for its reader.
        if let Some(stderr) = &mut stderr {
            let _ = tokio::io::copy(stderr, &mut tokio::io::sink()).await;
        }
        Ok(ErrorOutput(String::from_utf8_lossy(&complained).trim().to_owned()))
    };
    let ended = async { child.wait().await.map_err(Why::Start) };
    let (printed, complained, status) = tokio::try_join!(printed, complained, ended)?;
    if !status.success() {
        return Err(Why::Status(status, complained));
    }
    std::str::from_utf8(&printed).ok().and_then(Login::parse).ok_or(Why::NoLogin(complained))
}

async fn beginning(pipe: Option<impl AsyncRead + Unpin>, most: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    if let Some(pipe) = pipe {
        let _ = pipe.take(most).read_to_end(&mut bytes).await;
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sh(script: &str) -> Result<Login, String> {
        let command = AuthCommand {
            variable: "REDIS_AUTH_COMMAND",
            program: "sh".into(),
            arguments: vec!["-c".into(), script.into()],
        };
        command.run().map_err(|error| error.to_string())
    }

    #[test]
    fn words_are_separated_and_quoted_as_in_a_shell_and_nothing_is_expanded() {
        let parse = |text| AuthCommand::parse("REDIS_AUTH_COMMAND", text).map(|it| (it.program, it.arguments));
        let words = |words: &[&str]| words.iter().map(|&word| word.to_owned()).collect::<Vec<_>>();
        assert_eq!(
            parse("/bin/token --for 'my cache' $HOME"),
            Some(("/bin/token".into(), words(&["--for", "my cache", "$HOME"])))
        );
        for text in ["", "  ", "'' a", "/bin/token 'open"] {
            assert_eq!(parse(text), None, "{text}");
        }
    }

    #[test]
    fn the_first_line_is_the_login() {
        assert_eq!(sh("echo alice:to:ken; echo more"), Ok(Login::new("alice", "to:ken").unwrap()));
        assert_eq!(sh("echo note >&2; printf token"), Ok(Login::new("", "token").unwrap()));
        // More than a pipe holds on standard error holds nothing up.
        assert_eq!(sh("head -c 200000 /dev/zero >&2; echo token"), Ok(Login::new("", "token").unwrap()));
    }

    #[test]
    fn what_a_command_does_wrong_is_told_without_its_output() {
        assert_eq!(
            sh("echo secret; echo no access >&2; exit 3").unwrap_err(),
            "REDIS_AUTH_COMMAND: sh ended with exit status: 3; it wrote: no access"
        );
        let none =
            "REDIS_AUTH_COMMAND: sh printed no login: expected PASSWORD or USER:PASSWORD in the first line, in UTF-8";
        for script in ["", "echo; echo secret", "echo secret:", r"printf '\377secret'"] {
            assert_eq!(sh(script).unwrap_err(), none, "{script}");
        }
        assert_eq!(sh("echo sorry >&2").unwrap_err(), format!("{none}; it wrote: sorry"));
        let missing = AuthCommand::parse("REDIS_AUTH_COMMAND", "/no/such/token").unwrap().run().unwrap_err();
        assert_eq!(
            missing.to_string(),
            "REDIS_AUTH_COMMAND: /no/such/token cannot be started: No such file or directory (os error 2)"
        );
    }

    #[test]
    fn a_command_that_prints_without_end_is_killed_with_all_that_it_started() {
        let directory = tempfile::tempdir().unwrap();
        let pid = directory.path().join("pid");
        let script = format!("sleep 600 & echo $! >{}; cat /dev/zero", pid.display());
        assert_eq!(sh(&script).unwrap_err(), "REDIS_AUTH_COMMAND: sh printed more than 64 KiB; it was killed");
        let pid: u32 = std::fs::read_to_string(&pid).unwrap().trim().parse().unwrap();
        let is_alive = || std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "));
        let began = tokio::time::Instant::now();
        while is_alive() {
            assert!(began.elapsed() < LONGEST, "the sleep goes on");
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_command_that_does_not_end_is_killed() {
        assert_eq!(sh("sleep 600").unwrap_err(), "REDIS_AUTH_COMMAND: sh did not end within 10 s; it was killed");
    }
}
