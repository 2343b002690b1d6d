//! Waiting for rule files to change: by the kernel's word (inotify) where there is one, and by a slow timer.

use std::ffi::OsStr;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

use foldhash::{HashMap, HashSet};
use parking_lot::Mutex;
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};
use rustix::io::Errno;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout, timeout_at};

use super::load::{Names, Places};

/// How long nothing may happen before it is looked what did: 100 ms. Who writes a file in several steps is done by then.
const QUIET: Duration = Duration::from_millis(100);
/// How long that is waited for: 1 s. Something in the directory may never be quiet.
const LATEST: Duration = Duration::from_secs(1);
/// How often it is looked without a word: every 10 s. Network file systems say nothing of what other machines write.
const UNASKED: Duration = Duration::from_secs(10);
/// The most directories watched: 1,024 of the 8,192 that some systems give to all processes of a user.
const MOST_DIRECTORIES: usize = 1_024;
/// The bytes of events read at once: 4 KiB. The longest event, with a name of 255 bytes, takes 272.
const EVENTS_BYTES: usize = 4_096;

/// Directories that are watched.
#[derive(Debug)]
pub struct Watch {
    /// `None` when the system gives none.
    inotify: Option<AsyncFd<OwnedFd>>,
    /// By their numbers in `inotify`.
    watched: Mutex<HashMap<i32, Names>>,
    /// A change that nobody else tells of.
    bell: Notify,
}

/// Why it is time to look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// Something changed, or may have.
    Told,
    /// Nobody has looked for a while.
    Unasked,
}

impl Watch {
    /// Watches nothing yet. With the error, if it will go by the timer alone; a user has 128 of these on most systems.
    ///
    /// # Panics
    /// Outside of a tokio runtime.
    pub fn new() -> (Self, Option<io::Error>) {
        let (inotify, error) = match open() {
            Ok(inotify) => (Some(inotify), None),
            Err(error) => (None, Some(error)),
        };
        (Self { inotify, watched: Mutex::default(), bell: Notify::new() }, error)
    }

    /// Watches these directories and no others. What is new among them may have changed before it was watched, so it counts
    /// as a change. Blocks while the file system does.
    ///
    /// # Errors
    /// Why some are left to the timer.
    pub fn follow(&self, places: &Places) -> io::Result<()> {
        let Some(inotify) = &self.inotify else { return Ok(()) };
        let mask = WatchFlags::ATTRIB
            | WatchFlags::CREATE
            | WatchFlags::DELETE
            | WatchFlags::DELETE_SELF
            | WatchFlags::MODIFY
            | WatchFlags::MOVE
            | WatchFlags::MOVE_SELF
            | WatchFlags::ONLYDIR;
        let mut outcome = Ok(());
        let mut followed = HashSet::default();
        for (directory, names) in places {
            if followed.len() == MOST_DIRECTORIES {
                outcome = Err(io::Error::other(format!("at most {MOST_DIRECTORIES} directories are watched")));
                break;
            }
            // To add a directory that is watched gives the same number again; one made anew in its place has another.
            match inotify::add_watch(inotify.get_ref(), directory, mask) {
                Ok(number) => {
                    let is_first = followed.insert(number);
                    self.add(number, names, is_first);
                }
                // It went away meanwhile, which the directory above tells.
                Err(Errno::NOENT | Errno::NOTDIR) => {}
                Err(error) => outcome = Err(error.into()),
            }
        }
        self.watched.lock().retain(|number, _| {
            let stays = followed.contains(number);
            if !stays {
                // The kernel has removed it already if the directory is gone.
                let _ = inotify::remove_watch(inotify.get_ref(), *number);
            }
            stays
        });
        outcome
    }

    /// Waits for a change and until all is quiet, or until it is time to look anyway: then nothing told of one.
    pub async fn changed(&self) -> Why {
        if timeout(UNASKED, self.event()).await.is_err() {
            return Why::Unasked;
        }
        let latest = Instant::now() + LATEST;
        let quiet = async { while timeout(QUIET, self.event()).await.is_ok() {} };
        // Not to be quiet is no reason to wait longer.
        let _ = timeout_at(latest, quiet).await;
        Why::Told
    }

    fn add(&self, number: i32, names: &Names, is_first: bool) {
        let mut watched = self.watched.lock();
        let is_new = !watched.contains_key(&number);
        let all = match (watched.remove(&number), names) {
            // Two paths to one directory.
            (Some(Names::These(others)), Names::These(names)) if !is_first => Names::These(&others | names),
            (Some(Names::All), _) if !is_first => Names::All,
            _ => names.clone(),
        };
        watched.insert(number, all);
        if is_new {
            self.bell.notify_one();
        }
    }

    /// Waits for one change.
    async fn event(&self) {
        tokio::select! {
            () = self.bell.notified() => {}
            () = self.told() => {}
        }
    }

    /// Waits until the kernel tells of a change.
    async fn told(&self) {
        let Some(inotify) = &self.inotify else { return std::future::pending().await };
        loop {
            // Without it there is the timer.
            let Ok(mut ready) = inotify.readable().await else { return std::future::pending().await };
            let is_change = self.drain(inotify.get_ref());
            ready.clear_ready();
            if is_change {
                return;
            }
        }
    }

    /// Reads all events there are. True if one of them may change the rules.
    fn drain(&self, inotify: &OwnedFd) -> bool {
        let mut buffer = [MaybeUninit::uninit(); EVENTS_BYTES];
        let mut events = Reader::new(inotify, &mut buffer);
        let mut is_change = false;
        loop {
            match events.next() {
                Ok(event) => is_change |= self.is_change(&event),
                Err(Errno::INTR) => {}
                Err(_) => return is_change,
            }
        }
    }

    fn is_change(&self, event: &inotify::Event<'_>) -> bool {
        let mut watched = self.watched.lock();
        if event.events().contains(ReadFlags::IGNORED) {
            return watched.remove(&event.wd()).is_some();
        }
        match (watched.get(&event.wd()), event.file_name()) {
            (Some(Names::These(names)), Some(name)) => names.contains(OsStr::from_bytes(name.to_bytes())),
            // The directory itself, one that is just being added, or events that were lost.
            _ => true,
        }
    }
}

fn open() -> io::Result<AsyncFd<OwnedFd>> {
    let inotify = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
    #[expect(
        deprecated,
        reason = "what takes its place is `unsafe`, for descriptors that another may close; none can here"
    )]
    AsyncFd::with_interest(inotify, Interest::READABLE)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs;
    use std::path::Path;

    use futures_util::FutureExt;

    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn place(directory: &Path, names: &[&str]) -> Places {
        let names: BTreeSet<_> = names.iter().map(Into::into).collect();
        Places::from([(directory.to_owned(), if names.is_empty() { Names::All } else { Names::These(names) })])
    }

    /// Whether there was a change since this was last asked.
    fn is_told(watch: &Watch) -> bool {
        let is_rung = watch.bell.notified().now_or_never().is_some();
        // The kernel has queued what it tells when the call that changes something returns.
        watch.drain(watch.inotify.as_ref().unwrap().get_ref()) || is_rung
    }

    #[tokio::test]
    async fn what_is_newly_watched_counts_as_changed_and_what_is_watched_still_does_not() {
        let directory = tempfile::tempdir().unwrap();
        let (watch, _) = Watch::new();
        let places = place(directory.path(), &["rules.yaml"]);
        watch.follow(&places).unwrap();
        assert!(is_told(&watch));
        watch.follow(&places).unwrap();
        assert!(!is_told(&watch));
    }

    #[tokio::test]
    async fn of_the_names_in_a_directory_only_those_asked_for_are_told() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        let (watch, _) = Watch::new();
        watch.follow(&place(directory.path(), &["rules.yaml"])).unwrap();
        is_told(&watch);
        fs::write(at("other.yaml"), "").unwrap();
        assert!(!is_told(&watch));
        fs::write(at("rules.yaml"), "").unwrap();
        assert!(is_told(&watch));
        fs::rename(at("other.yaml"), at("rules.yaml")).unwrap();
        assert!(is_told(&watch));
        fs::read(at("rules.yaml")).unwrap();
        assert!(!is_told(&watch));
        fs::remove_file(at("rules.yaml")).unwrap();
        assert!(is_told(&watch));
        watch.follow(&place(directory.path(), &[])).unwrap();
        fs::write(at("other.yaml"), "").unwrap();
        assert!(is_told(&watch));
    }

    #[tokio::test]
    async fn a_directory_made_anew_is_watched_anew_and_one_that_is_no_place_any_more_is_not() {
        let parent = tempfile::tempdir().unwrap();
        let at = parent.path().join("config");
        fs::create_dir(&at).unwrap();
        let (watch, _) = Watch::new();
        watch.follow(&place(&at, &[])).unwrap();
        is_told(&watch);
        fs::remove_dir(&at).unwrap();
        assert!(is_told(&watch));
        fs::create_dir(&at).unwrap();
        watch.follow(&place(&at, &[])).unwrap();
        assert!(is_told(&watch));
        fs::write(at.join("rules.yaml"), "").unwrap();
        assert!(is_told(&watch));
        watch.follow(&Places::new()).unwrap();
        is_told(&watch);
        fs::write(at.join("rules.yaml"), "").unwrap();
        assert!(!is_told(&watch));
        assert!(watch.watched.lock().is_empty());
    }

    #[tokio::test]
    async fn beyond_its_most_directories_the_rest_is_left_to_the_timer_and_said_so() {
        let parent = tempfile::tempdir().unwrap();
        let mut places = Places::new();
        for number in 0..=MOST_DIRECTORIES {
            let at = parent.path().join(number.to_string());
            fs::create_dir(&at).unwrap();
            places.extend(place(&at, &[]));
        }
        let (watch, _) = Watch::new();
        assert!(watch.follow(&places).unwrap_err().to_string().contains("1024"));
        assert_eq!(watch.watched.lock().len(), MOST_DIRECTORIES);
    }

    #[tokio::test(start_paused = true)]
    async fn it_is_looked_once_all_is_quiet_or_after_a_second_or_unasked_after_ten() {
        let watch = Watch { inotify: None, watched: Mutex::default(), bell: Notify::new() };
        let waited = async || {
            let began = Instant::now();
            (watch.changed().await, began.elapsed())
        };
        assert_eq!(waited().await, (Why::Unasked, 10_000 * MS));
        watch.bell.notify_one();
        assert_eq!(waited().await, (Why::Told, 100 * MS));
        let ringing = async {
            loop {
                watch.bell.notify_one();
                tokio::time::sleep(90 * MS).await;
            }
        };
        tokio::select! {
            biased;
            () = ringing => {}
            waited = waited() => assert_eq!(waited, (Why::Told, 1_000 * MS)),
        }
    }
}
