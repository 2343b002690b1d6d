//! User and password for Redis, which may change while the process runs.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use arc_swap::ArcSwap;
use thiserror::Error;
use tokio::sync::Mutex;
use tokio::time::{Instant, sleep_until, timeout};

use super::auth_command::{AuthCommand, CommandFailed};
use super::backoff::chance;
use super::files;
use super::hidden::hidden;
use super::login::{Login, Secret};
use crate::file::{Named, Unusable, blocking};
use crate::telemetry::throttle::LogThrottle;

/// Name of the file in log lines.
const FILE: &str = "the file with the password of Redis";
/// Interval between two reads of a file, and between two looks at the age of the connections: 1 s.
const EVERY: Duration = Duration::from_secs(1);
/// Age up to which a login is used for a new connection without another read: 1 s. So connections that are made together
/// read once, and a storm of new connections starts at most one command in a second.
const USED_AGAIN: Duration = Duration::from_secs(1);
/// Longest wait of a new connection for its login from a file: 100 ms. A file system that answers needs less than 1 ms.
const LONGEST_READ: Duration = Duration::from_millis(100);
/// Longest wait of a new connection for its login from a command: 500 ms, enough for one that asks a service on the same machine. A command that
/// takes longer goes on, and its login is for the next connection.
const LONGEST_RUN: Duration = Duration::from_millis(500);
/// Longest pause after a command that failed: 1 minute. The pause begins at 1 s and doubles.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// Credentials that may be read again, and are never printed.
pub struct Credentials {
    source: Source,
    known: ArcSwap<LoginPair>,
    /// Number of times that connections had to authenticate again. `known` is at least as new: it is stored first.
    generation: AtomicU64,
    /// Time of the last read. The lock is held during a read, so that there is one at a time.
    asked: Arc<Mutex<Option<Asked>>>,
    counts: [AtomicU64; LoginRead::ALL.len()],
    /// Throttles the log of changes.
    changes: LogThrottle,
    /// Throttles the log of failed reads.
    complaints: LogThrottle,
}

/// Source of a login.
enum Source {
    /// It does not change.
    Fixed,
    /// File with the login.
    File(Named),
    /// Command that prints the login.
    Command(AuthCommand),
}

/// A read of the login that has ended.
#[derive(Clone, Copy)]
struct Asked {
    at: Instant,
    outcome: LoginRead,
}

/// Outcome of a read of the login.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoginRead {
    /// The login differs from the one before.
    Changed,
    /// The login is the same.
    Unchanged,
    /// There is none; the last login stays in use.
    Failed,
}

/// Reason why there is no login.
#[derive(Debug, Error)]
pub enum NoLogin {
    /// The file cannot be used.
    #[error(transparent)]
    File(#[from] Unusable),
    /// The command gave none.
    #[error(transparent)]
    Command(#[from] CommandFailed),
}

impl LoginRead {
    /// All outcomes, in the order of the metric's series.
    pub const ALL: [Self; 3] = [Self::Changed, Self::Unchanged, Self::Failed];

    /// Returns the value of the label `outcome`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Changed => "changed",
            Self::Unchanged => "unchanged",
            Self::Failed => "failed",
        }
    }
}

/// The present and the previous login.
pub struct LoginPair {
    /// The present login.
    pub now: Login,
    /// The login before it, which a server has accepted: the server may not have changed yet, or `now` may be none of its logins.
    pub before: Option<Login>,
    is_accepted: AtomicBool,
}

impl LoginPair {
    fn new(now: Login, before: Option<Login>) -> Self {
        Self { now, before, is_accepted: AtomicBool::new(false) }
    }

    /// Returns the passwords of both logins.
    pub fn passwords(&self) -> impl Iterator<Item = &str> {
        let logins = [Some(&self.now), self.before.as_ref()];
        logins.into_iter().flatten().filter_map(|login| login.password.as_ref().map(Secret::expose))
    }

    /// Notes that a server has accepted the present login.
    pub fn accept(&self) {
        self.is_accepted.store(true, Ordering::Relaxed);
    }
}

impl Credentials {
    /// Creates credentials that do not change.
    pub fn fixed(login: Login) -> Self {
        Self::new(Source::Fixed, login)
    }

    /// Reads the login in `file`, in the form of [`Login::parse`]. Blocks while the file system does.
    ///
    /// # Errors
    /// If the file cannot be read or has no password.
    pub fn of_file(file: Named) -> Result<Self, Unusable> {
        let now = read(&file)?;
        Ok(Self::new(Source::File(file), now))
    }

    /// Runs `command` for the first time. Blocks until it has ended, up to 10 s.
    ///
    /// # Errors
    /// If the command fails or prints no login.
    pub fn of_command(command: AuthCommand) -> Result<Self, CommandFailed> {
        let now = command.run()?;
        Ok(Self::new(Source::Command(command), now))
    }

    fn new(source: Source, now: Login) -> Self {
        let first = Asked { at: Instant::now(), outcome: LoginRead::Changed };
        Self {
            source,
            known: ArcSwap::from_pointee(LoginPair::new(now, None)),
            generation: AtomicU64::new(0),
            asked: Arc::new(Mutex::new(Some(first))),
            counts: Default::default(),
            changes: LogThrottle::new(),
            complaints: LogThrottle::new(),
        }
    }

    /// Returns the present and the previous login.
    pub fn known(&self) -> Arc<LoginPair> {
        self.known.load_full()
    }

    /// Returns the number of times that connections had to authenticate again.
    pub fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// Returns the number of reads with this outcome; `None` if there is nothing to read.
    pub fn count(&self, outcome: LoginRead) -> Option<u64> {
        (!matches!(self.source, Source::Fixed)).then(|| self.counts[outcome as usize].load(Ordering::Relaxed))
    }

    /// Reads the login for a new connection, unless it was read within the last second. If there is none, or not in time, the last
    /// one stays in use.
    pub async fn refresh(self: &Arc<Self>) {
        let longest = match self.source {
            Source::Fixed => return,
            Source::File(_) => LONGEST_READ,
            Source::Command(_) => LONGEST_RUN,
        };
        let _ = timeout(longest, self.ask(USED_AGAIN)).await;
    }

    /// Reads the login again where it can change, and calls `authenticate` when connections have to authenticate again: after a
    /// change, and so often that none reaches `max_age` without it. Runs for ever.
    pub async fn follow(self: &Arc<Self>, max_age: Option<Duration>, authenticate: impl Fn()) {
        let mut seen = self.generation();
        let mut renew_at = max_age.map(|age| Instant::now() + renewal(age));
        let mut pause = Duration::ZERO;
        loop {
            let now = Instant::now();
            let look_at = now + EVERY;
            sleep_until(renew_at.map_or(look_at, |renew_at| renew_at.clamp(now, look_at) + pause)).await;
            let is_due = renew_at.is_some_and(|renew_at| renew_at <= Instant::now());
            let outcome = match self.source {
                Source::Fixed => LoginRead::Unchanged,
                Source::Command(_) if !is_due => LoginRead::Unchanged,
                Source::File(_) | Source::Command(_) => self.ask(Duration::ZERO).await,
            };
            let is_command = matches!(self.source, Source::Command(_));
            if is_due && is_command && outcome == LoginRead::Failed {
                pause = (pause * 2).clamp(EVERY, LONGEST_PAUSE);
            } else if is_due {
                // With the same login too: the server counts from the last authentication.
                self.generation.fetch_add(1, Ordering::Release);
                (pause, renew_at) = (Duration::ZERO, max_age.map(|age| Instant::now() + renewal(age)));
            }
            let generation = self.generation();
            if generation != seen {
                seen = generation;
                authenticate();
            }
        }
    }

    /// Reads the login on a thread of its own, unless that was done less than `used_again` ago. Callers at the same time share a
    /// read. It goes on if the caller goes away.
    async fn ask(self: &Arc<Self>, used_again: Duration) -> LoginRead {
        let mut asked = Arc::clone(&self.asked).lock_owned().await;
        if let Some(Asked { outcome, .. }) = asked.filter(|asked| asked.at.elapsed() < used_again) {
            return outcome;
        }
        let this = Arc::clone(self);
        let asking = tokio::spawn(async move {
            let reader = Arc::clone(&this);
            let is_file = matches!(this.source, Source::File(_));
            let report = |passed| {
                if is_file {
                    files::report_slow(FILE, passed);
                }
            };
            let read = blocking(move || reader.read_again(), report);
            // The panic hook has logged a panic.
            let outcome = read.await.map_or(LoginRead::Failed, |read| this.note(read));
            *asked = Some(Asked { at: Instant::now(), outcome });
            outcome
        });
        asking.await.unwrap_or(LoginRead::Failed)
    }

    /// Counts and logs the result of a read.
    fn note(&self, read: Result<bool, NoLogin>) -> LoginRead {
        let outcome = match &read {
            Ok(true) => LoginRead::Changed,
            Ok(false) => LoginRead::Unchanged,
            Err(_) => LoginRead::Failed,
        };
        self.counts[outcome as usize].fetch_add(1, Ordering::Relaxed);
        match read {
            Ok(true) if self.changes.is_due() => tracing::warn!(
                event = "store.password.changed",
                "the password of Redis has changed; connections authenticate again"
            ),
            Ok(_) => {}
            Err(_) if !self.complaints.is_due() => {}
            Err(NoLogin::File(error)) => files::report_unreadable(FILE, &error),
            Err(NoLogin::Command(error)) => {
                let error = self.without_passwords(&error);
                tracing::warn!(event = "store.password.command_failed", %error, "the command that prints the password of Redis has failed; the last password stays in use");
            }
        }
        outcome
    }

    /// Returns the text of `error` without the passwords that the command may have written to its error output.
    fn without_passwords(&self, error: &CommandFailed) -> String {
        hidden(&error.to_string(), self.known.load().passwords())
    }

    /// Reads the login again. Returns true if it differs from the one in use. A file that cannot be read, or that is empty while it is
    /// being written, changes nothing; nor does a command that fails. Blocks meanwhile.
    ///
    /// # Errors
    /// If there is no login.
    fn read_again(&self) -> Result<bool, NoLogin> {
        let now = match &self.source {
            Source::Fixed => return Ok(false),
            Source::File(file) => read(file)?,
            Source::Command(command) => command.run()?,
        };
        let known = self.known.load();
        if now == known.now {
            return Ok(false);
        }
        // A login that no server has accepted takes the place of none that one has.
        let is_kept = known.before.is_some() && !known.is_accepted.load(Ordering::Relaxed);
        let before = if is_kept { known.before.clone() } else { Some(known.now.clone()) };
        self.known.store(Arc::new(LoginPair::new(now, before)));
        self.generation.fetch_add(1, Ordering::Release);
        Ok(true)
    }
}

/// Returns the time after which connections of this greatest age authenticate again: a random part of it between two fifths and one
/// half, so that instances do not do so together.
fn renewal(max_age: Duration) -> Duration {
    let tenth = max_age / 10;
    tenth * 4 + Duration::from_millis(chance(u64::try_from(tenth.as_millis()).unwrap_or(u64::MAX)))
}

fn read(file: &Named) -> Result<Login, Unusable> {
    let expected = "PASSWORD or USER:PASSWORD in the first line, in UTF-8";
    file.read(expected, |bytes| std::str::from_utf8(bytes).ok().and_then(Login::parse))
}

#[cfg(test)]
mod tests {
    use std::fs::write;
    use std::path::Path;

    use futures_util::future::join_all;

    use super::*;
    use crate::file::MAX_SECRET;

    fn login(password: &str) -> Login {
        Login::new("", password).unwrap()
    }

    fn command(script: &str) -> AuthCommand {
        AuthCommand::parse("REDIS_AUTH_COMMAND", &format!("sh -c '{script}'")).unwrap()
    }

    /// Runs the command for the first time, on a thread where that may block.
    async fn of_command(script: String) -> Arc<Credentials> {
        let first = tokio::task::spawn_blocking(move || Credentials::of_command(command(&script)));
        Arc::new(first.await.unwrap().unwrap())
    }

    /// Makes the last read too old to be used again.
    async fn grow_old(credentials: &Credentials) {
        *credentials.asked.lock().await = None;
    }

    /// Returns the number of lines in `file`.
    fn lines(file: &Path) -> usize {
        std::fs::read_to_string(file).map_or(0, |text| text.lines().count())
    }

    #[test]
    fn a_file_that_changes_is_believed_and_one_that_is_empty_or_gone_is_not() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("auth");
        write(&file, "one").unwrap();
        let named = || Named::new("REDIS_AUTH_FILE", file.clone(), MAX_SECRET);
        let credentials = Credentials::of_file(named()).unwrap();
        assert!(!credentials.read_again().unwrap());
        write(&file, "two").unwrap();
        assert!(credentials.read_again().unwrap());
        let known = credentials.known();
        assert!(known.now == login("two"));
        assert!(known.before == Some(login("one")));
        write(&file, "three").unwrap();
        assert!(credentials.read_again().unwrap());
        assert!(credentials.known().before == Some(login("one")), "no server has accepted `two`");
        credentials.known().accept();
        write(&file, "four").unwrap();
        assert!(credentials.read_again().unwrap());
        assert!(credentials.known().before == Some(login("three")));
        write(&file, "").unwrap();
        assert!(credentials.read_again().is_err());
        assert!(Credentials::of_file(named()).is_err());
        std::fs::remove_file(&file).unwrap();
        assert!(credentials.read_again().is_err());
        assert_eq!(credentials.generation(), 3);
    }

    #[tokio::test]
    async fn connections_that_are_made_together_run_the_command_once() {
        let directory = tempfile::tempdir().unwrap();
        let runs = directory.path().join("runs");
        let script = format!("echo >>{}; echo token", runs.display());
        let credentials = of_command(script).await;
        join_all((0..50).map(|_| credentials.refresh())).await;
        assert_eq!((lines(&runs), credentials.count(LoginRead::Unchanged)), (1, Some(0)), "that was the start");
        grow_old(&credentials).await;
        join_all((0..50).map(|_| credentials.refresh())).await;
        assert_eq!((lines(&runs), credentials.count(LoginRead::Unchanged)), (2, Some(1)));
    }

    #[tokio::test]
    async fn a_run_goes_on_when_the_connection_that_asked_is_given_up() {
        let directory = tempfile::tempdir().unwrap();
        let (runs, go) = (directory.path().join("runs"), directory.path().join("go"));
        write(&go, "").unwrap();
        let script =
            format!("echo >>{0}; while ! [ -e {1} ]; do sleep 0.01; done; wc -l <{0}", runs.display(), go.display());
        let credentials = of_command(script).await;
        grow_old(&credentials).await;
        std::fs::remove_file(&go).unwrap();
        for _ in 0..3 {
            let given_up = timeout(Duration::from_millis(20), credentials.refresh()).await;
            assert!(given_up.is_err(), "it waits for the command");
        }
        write(&go, "").unwrap();
        credentials.refresh().await;
        assert_eq!((lines(&runs), credentials.known().now == login("2")), (2, true));
    }

    #[tokio::test]
    async fn a_connection_does_not_wait_for_a_command_that_hangs() {
        let directory = tempfile::tempdir().unwrap();
        let first = directory.path().join("first");
        write(&first, "").unwrap();
        let script = format!("rm {} || sleep 600; echo token", first.display());
        let credentials = of_command(script).await;
        grow_old(&credentials).await;
        let longest = crate::store::redis::auth_command::LONGEST / 2;
        assert!(timeout(longest, credentials.refresh()).await.is_ok(), "it uses the last login");
        assert!(timeout(longest, credentials.refresh()).await.is_ok(), "the second one too");
        assert_eq!(credentials.count(LoginRead::Failed), Some(0), "the command still runs");
    }

    #[tokio::test]
    async fn a_command_that_fails_keeps_the_last_login() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("token");
        write(&file, "token").unwrap();
        let credentials = of_command(format!("cat {}", file.display())).await;
        std::fs::remove_file(&file).unwrap();
        assert_eq!(credentials.ask(Duration::ZERO).await, LoginRead::Failed);
        assert!(credentials.known().now == login("token"));
        assert_eq!((credentials.generation(), credentials.count(LoginRead::Failed)), (0, Some(1)));
    }

    #[tokio::test]
    async fn a_command_that_fails_shows_no_login_that_it_has_printed() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("token");
        let path = file.display();
        write(&file, "alice:hunter2").unwrap();
        let credentials =
            of_command(format!("if test -e {path}; then cat {path}; else echo no hunter2 >&2; exit 1; fi")).await;
        std::fs::remove_file(&file).unwrap();
        let again = Arc::clone(&credentials);
        let read = tokio::task::spawn_blocking(move || again.read_again()).await.unwrap();
        let Err(NoLogin::Command(error)) = read else { panic!("it fails") };
        let text = credentials.without_passwords(&error);
        assert!(text.ends_with("it wrote: no ***"), "{text}");
    }

    #[tokio::test(start_paused = true)]
    async fn connections_authenticate_again_before_their_greatest_age_with_the_same_login_too() {
        let credentials = Arc::new(Credentials::fixed(login("token")));
        let (age, times) = (Duration::from_secs(600), AtomicU64::new(0));
        let follow = credentials.follow(Some(age), || {
            times.fetch_add(1, Ordering::Relaxed);
        });
        assert!(timeout(Duration::from_secs(3_000), follow).await.is_err());
        let times = times.into_inner();
        assert!((10..=12).contains(&times), "{times} times in five ages");
        assert_eq!(credentials.generation(), times);
    }
}
