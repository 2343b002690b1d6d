//! File watching: waits for events of rule files, and polls in addition.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf, absolute};
use std::sync::Arc;
use std::time::Duration;

use foldhash::{HashMap, HashMapExt};
use notify::event::{ModifyKind, RenameMode};
use notify::{Event, EventKind, RecommendedWatcher, RecursiveMode, Watcher};
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout, timeout_at};

use super::load::{Places, WatchedNames};

/// Debounce: reload after 100 ms without file events. A file that is written in several steps is complete by then.
const DEBOUNCE: Duration = Duration::from_millis(100);
/// Maximum debounce: 1 s. Some directories have events all the time.
const MAX_DEBOUNCE: Duration = Duration::from_secs(1);
/// Polling interval: 10 s. Network file systems send no events for writes of other machines.
const POLL_INTERVAL: Duration = Duration::from_secs(10);
/// Maximum number of watched directories: 1,024. Some systems allow 8,192 for all processes of a user.
const MOST_DIRECTORIES: usize = 1_024;

/// File watcher for a set of directories.
#[derive(Debug)]
pub struct Watch {
    /// `None` if the system provides no watcher.
    watcher: Option<Mutex<RecommendedWatcher>>,
    events: Arc<EventSink>,
}

/// Reason for a look at the rule files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trigger {
    /// A change was reported, or may have gone unseen: events were lost, or a directory is newly watched.
    Event,
    /// Another input of the load has changed.
    OtherInput,
    /// The polling interval has passed without an event.
    Poll,
}

/// Receiver of events, on the thread of the watcher. No caller may wait for the watcher while `directories` is locked: that would
/// be a deadlock, because the watcher replies from that thread.
#[derive(Debug, Default)]
struct EventSink {
    /// Watched directories, by the path under which the watcher knows them.
    directories: Mutex<HashMap<PathBuf, Watched>>,
    /// Last error of the watcher.
    error: Mutex<Option<String>>,
    /// Notified at each change.
    changed: Notify,
}

#[derive(Debug)]
struct Watched {
    /// `None` once the directory may have left its path. The watcher then no longer watches it.
    directory: Option<Directory>,
    names: WatchedNames,
}

/// Device and inode number. They distinguish a directory from another one that replaces it at its path.
type Directory = (u64, u64);

impl Watch {
    /// Creates a watch without directories. Returns an error too if only polling is possible: most systems allow a user 128
    /// watchers.
    pub fn new() -> (Self, Option<io::Error>) {
        let events = Arc::new(EventSink::default());
        let sink = Arc::clone(&events);
        let (watcher, error) = match notify::recommended_watcher(move |event| sink.receive(event)) {
            Ok(watcher) => (Some(Mutex::new(watcher)), None),
            Err(error) => (None, Some(io::Error::other(error))),
        };
        (Self { watcher, events }, error)
    }

    /// Watches the directories in `places`, and no others. A directory that is new may have changed before it was watched, so
    /// it counts as changed. Blocks while the file system does.
    ///
    /// # Errors
    /// The reason why some directories are only polled.
    pub fn follow(&self, places: &Places) -> io::Result<()> {
        let Some(watcher) = &self.watcher else { return Ok(()) };
        let mut watcher = watcher.lock();
        let (wanted, mut outcome) = wanted(places);
        // The watcher identifies directories by path: one that has moved or was replaced must be removed before it is added
        // again.
        let is_stale = |path: &PathBuf, watched: &mut Watched| {
            let wanted = watched.directory.and_then(|directory| wanted.get(&directory));
            wanted.is_none_or(|(wanted, _)| wanted != path)
        };
        let stale: Vec<_> = self.events.directories.lock().extract_if(is_stale).collect();
        for (path, _) in stale {
            // An error here means that the watcher has seen the directory go and removed it already.
            let _ = watcher.unwatch(&path);
        }
        for (directory, (path, names)) in wanted {
            // Before `watch`, so that events never refer to an unknown directory.
            if !self.events.expect(&path, directory, names) {
                continue;
            }
            match watcher.watch(&path, RecursiveMode::NonRecursive) {
                Ok(()) => self.events.changed.notify_one(),
                Err(error) => {
                    self.events.directories.lock().remove(&path);
                    // If the directory is gone meanwhile, its parent's watch reports that.
                    if !matches!(error.kind, notify::ErrorKind::PathNotFound) {
                        outcome = Err(io::Error::other(error));
                    }
                }
            }
        }
        let error = self.events.error.lock().take();
        outcome.and(error.map_or(Ok(()), |error| Err(io::Error::other(error))))
    }

    /// Waits for a change and the end of its debounce, or for the polling interval. Returns which of them it was.
    pub async fn changed(&self) -> Trigger {
        let changed = &self.events.changed;
        if timeout(POLL_INTERVAL, changed.notified()).await.is_err() {
            return Trigger::Poll;
        }
        let latest = Instant::now() + MAX_DEBOUNCE;
        let debounced = async { while timeout(DEBOUNCE, changed.notified()).await.is_ok() {} };
        // After the maximum debounce, reload although events continue.
        let _ = timeout_at(latest, debounced).await;
        Trigger::Event
    }
}

impl EventSink {
    /// Sets the names that count as changes in a directory. Returns true if the watcher does not watch the directory yet.
    fn expect(&self, path: &Path, directory: Directory, names: WatchedNames) -> bool {
        let mut directories = self.directories.lock();
        if let Some(known) = directories.get_mut(path) {
            // If an event has reported the directory gone meanwhile, it stays unwatched until the next call of `follow`.
            known.names = names;
            return false;
        }
        directories.insert(path.to_owned(), Watched { directory: Some(directory), names });
        true
    }

    /// Notifies the waiting task if `event` may change the rules.
    fn receive(&self, event: notify::Result<Event>) {
        let is_change = match event {
            Ok(event) => self.is_change(&event),
            Err(error) => {
                *self.error.lock() = Some(error.to_string());
                true
            }
        };
        if is_change {
            self.changed.notify_one();
        }
    }

    fn is_change(&self, event: &Event) -> bool {
        // Reading the files causes such events.
        if matches!(event.kind, EventKind::Access(_)) {
            return false;
        }
        let is_gone =
            matches!(event.kind, EventKind::Remove(_) | EventKind::Modify(ModifyKind::Name(RenameMode::From)));
        let mut directories = self.directories.lock();
        let is_relevant = |path: &PathBuf| {
            if directories.contains_key(path) {
                // The watcher also drops all watches below this path.
                let below = directories.iter_mut().filter(|(other, _)| is_gone && other.starts_with(path));
                below.for_each(|(_, watched)| watched.directory = None);
                return true;
            }
            let watched = path.parent().and_then(|parent| directories.get(parent));
            watched.is_some_and(|watched| match &watched.names {
                WatchedNames::All => true,
                WatchedNames::These(names) => path.file_name().is_some_and(|name| names.contains(name)),
            })
        };
        // A lost event or one matching path makes a change. Every path is examined, because `is_relevant` also marks directories
        // that are gone.
        event.paths.iter().map(is_relevant).fold(event.need_rescan(), |is_change, is_relevant| is_change | is_relevant)
    }
}

/// Returns the directories in `places`, each under one path, with the names of all its paths. A watcher that gets two paths
/// of one directory stops watching it when one of them is removed.
fn wanted(places: &Places) -> (HashMap<Directory, (PathBuf, WatchedNames)>, io::Result<()>) {
    let mut wanted = HashMap::<Directory, (PathBuf, WatchedNames)>::new();
    let mut outcome = Ok(());
    for (path, names) in places {
        let found = absolute(path).and_then(|path| fs::metadata(&path).map(|found| (path, found)));
        let (path, found) = match found {
            Ok((path, found)) if found.is_dir() => (path, found),
            Err(error) if !matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                outcome = Err(error);
                continue;
            }
            // The directory is gone meanwhile; its parent's watch reports that.
            _ => continue,
        };
        let directory = (found.dev(), found.ino());
        if let Some((_, known)) = wanted.get_mut(&directory) {
            match (&mut *known, names) {
                (WatchedNames::These(known), WatchedNames::These(names)) => known.extend(names.iter().cloned()),
                _ => *known = WatchedNames::All,
            }
        } else if wanted.len() < MOST_DIRECTORIES {
            wanted.insert(directory, (path, names.clone()));
        } else {
            outcome = Err(io::Error::other(format!("at most {MOST_DIRECTORIES} directories are watched")));
            break;
        }
    }
    (wanted, outcome)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::os::unix::fs::symlink;
    use std::sync::mpsc;

    use futures_util::FutureExt;
    use notify::event::{Flag, RemoveKind};
    use tempfile::TempDir;

    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn place(directory: &Path, names: &[&str]) -> Places {
        let names: BTreeSet<_> = names.iter().map(Into::into).collect();
        Places::from([(
            directory.to_owned(),
            if names.is_empty() { WatchedNames::All } else { WatchedNames::These(names) },
        )])
    }

    /// A watch whose events are handled only when the test asks for them.
    struct Scene {
        watch: Watch,
        events: mpsc::Receiver<notify::Result<Event>>,
        /// Watched too: once its events arrive, all earlier events have arrived.
        mark: TempDir,
    }

    impl Scene {
        fn new() -> Self {
            let (sender, events) = mpsc::channel();
            let mut watcher = notify::recommended_watcher(sender).unwrap();
            let mark = tempfile::tempdir().unwrap();
            watcher.watch(mark.path(), RecursiveMode::NonRecursive).unwrap();
            let watch = Watch { watcher: Some(Mutex::new(watcher)), events: Arc::default() };
            Self { watch, events, mark }
        }

        fn follow(&self, places: &Places) {
            self.watch.follow(places).unwrap();
        }

        /// Returns true if there was a change since the last call.
        fn is_relevant(&self) -> bool {
            let mark = self.mark.path().join("mark");
            fs::create_dir(&mark).unwrap();
            fs::remove_dir(&mark).unwrap();
            loop {
                let event = self.events.recv_timeout(60_000 * MS).unwrap();
                let is_mark = |event: &Event| event.paths.contains(&mark) && event.kind.is_remove();
                if event.as_ref().is_ok_and(is_mark) {
                    break;
                }
                self.watch.events.receive(event);
            }
            self.watch.events.changed.notified().now_or_never().is_some()
        }

        fn watched(&self) -> usize {
            self.watch.events.directories.lock().len()
        }
    }

    #[test]
    fn what_is_newly_watched_counts_as_changed_and_what_is_watched_still_does_not() {
        let directory = tempfile::tempdir().unwrap();
        let scene = Scene::new();
        let places = place(directory.path(), &["rules.yaml"]);
        scene.follow(&places);
        assert!(scene.is_relevant());
        scene.follow(&places);
        assert!(!scene.is_relevant());
    }

    #[test]
    fn of_the_names_in_a_directory_only_those_asked_for_are_told() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        let scene = Scene::new();
        scene.follow(&place(directory.path(), &["rules.yaml"]));
        scene.is_relevant();
        fs::write(at("other.yaml"), "").unwrap();
        assert!(!scene.is_relevant());
        fs::write(at("rules.yaml"), "").unwrap();
        assert!(scene.is_relevant());
        fs::rename(at("other.yaml"), at("rules.yaml")).unwrap();
        assert!(scene.is_relevant());
        fs::remove_file(at("rules.yaml")).unwrap();
        assert!(scene.is_relevant());
        scene.follow(&place(directory.path(), &[]));
        fs::write(at("other.yaml"), "").unwrap();
        assert!(scene.is_relevant());
    }

    #[test]
    fn to_read_a_file_or_a_directory_is_no_change() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("rules.yaml");
        fs::write(&file, "domain: d").unwrap();
        let scene = Scene::new();
        scene.follow(&place(directory.path(), &[]));
        scene.is_relevant();
        fs::read(&file).unwrap();
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
        assert!(!scene.is_relevant());
    }

    #[test]
    fn a_directory_made_anew_is_watched_anew_and_one_that_is_no_place_any_more_is_not() {
        let parent = tempfile::tempdir().unwrap();
        let at = parent.path().join("config");
        fs::create_dir(&at).unwrap();
        let scene = Scene::new();
        scene.follow(&place(&at, &[]));
        scene.is_relevant();
        fs::remove_dir(&at).unwrap();
        assert!(scene.is_relevant());
        fs::create_dir(&at).unwrap();
        scene.follow(&place(&at, &[]));
        assert!(scene.is_relevant());
        fs::write(at.join("rules.yaml"), "").unwrap();
        assert!(scene.is_relevant());
        scene.follow(&Places::new());
        scene.is_relevant();
        fs::write(at.join("rules.yaml"), "").unwrap();
        assert!(!scene.is_relevant());
        assert_eq!(scene.watched(), 0);
    }

    #[test]
    fn directories_moved_away_and_back_are_watched_anew_with_what_is_below_them() {
        let parent = tempfile::tempdir().unwrap();
        let (at, away) = (parent.path().join("config"), parent.path().join("away"));
        fs::create_dir_all(at.join("deep")).unwrap();
        let mut places = place(parent.path(), &["config"]);
        places.extend(place(&at, &[]));
        places.extend(place(&at.join("deep"), &[]));
        let scene = Scene::new();
        scene.follow(&places);
        scene.is_relevant();
        fs::rename(&at, &away).unwrap();
        fs::rename(&away, &at).unwrap();
        assert!(scene.is_relevant());
        scene.follow(&places);
        scene.is_relevant();
        fs::write(at.join("deep/rules.yaml"), "").unwrap();
        assert!(scene.is_relevant());
        fs::write(at.join("rules.yaml"), "").unwrap();
        assert!(scene.is_relevant());
    }

    #[test]
    fn a_directory_whose_parent_was_replaced_is_watched_anew_though_nothing_tells_of_it() {
        let parent = tempfile::tempdir().unwrap();
        let at = |path: &str| parent.path().join(path);
        fs::create_dir_all(at("release/config")).unwrap();
        fs::create_dir_all(at("next/config")).unwrap();
        let places = place(&at("release/config"), &[]);
        let scene = Scene::new();
        scene.follow(&places);
        scene.is_relevant();
        fs::rename(at("release"), at("before")).unwrap();
        fs::rename(at("next"), at("release")).unwrap();
        assert!(!scene.is_relevant());
        scene.follow(&places);
        assert!(scene.is_relevant());
        fs::write(at("before/config/rules.yaml"), "").unwrap();
        assert!(!scene.is_relevant());
        fs::write(at("release/config/rules.yaml"), "").unwrap();
        assert!(scene.is_relevant());
    }

    #[test]
    fn a_directory_of_two_paths_is_watched_by_the_names_of_both_and_stays_so_without_one() {
        let parent = tempfile::tempdir().unwrap();
        let at = |path: &str| parent.path().join(path);
        fs::create_dir(at("1")).unwrap();
        fs::create_dir(at("2")).unwrap();
        symlink("1", at("0_current")).unwrap();
        let mut places = place(&at("0_current"), &["a.yaml"]);
        places.extend(place(&at("1"), &["b.yaml"]));
        let scene = Scene::new();
        scene.follow(&places);
        scene.is_relevant();
        for name in ["a.yaml", "b.yaml"] {
            fs::write(at("1").join(name), "").unwrap();
            assert!(scene.is_relevant(), "{name}");
        }
        fs::remove_file(at("0_current")).unwrap();
        symlink("2", at("0_current")).unwrap();
        scene.follow(&places);
        scene.is_relevant();
        for (path, is_relevant) in [("1/b.yaml", true), ("1/a.yaml", false), ("2/a.yaml", true), ("2/b.yaml", false)] {
            fs::write(at(path), "").unwrap();
            assert_eq!(scene.is_relevant(), is_relevant, "{path}");
        }
    }

    #[test]
    fn a_directory_named_from_here_is_watched_like_one_named_from_the_root() {
        let directory = tempfile::tempdir_in(".").unwrap();
        let path = Path::new(directory.path().file_name().unwrap());
        let scene = Scene::new();
        scene.follow(&place(path, &["rules.yaml"]));
        scene.is_relevant();
        fs::write(path.join("rules.yaml"), "").unwrap();
        assert!(scene.is_relevant());
    }

    #[test]
    fn events_that_were_lost_count_as_a_change_and_an_error_is_told_with_the_next_word() {
        let directory = tempfile::tempdir().unwrap();
        let scene = Scene::new();
        let places = place(directory.path(), &["rules.yaml"]);
        scene.follow(&places);
        scene.is_relevant();
        let hear = |event| scene.watch.events.receive(event);
        hear(Ok(Event::new(EventKind::Remove(RemoveKind::File)).add_path("elsewhere/rules.yaml".into())));
        assert!(!scene.is_relevant());
        hear(Ok(Event::new(EventKind::Other).set_flag(Flag::Rescan)));
        assert!(scene.is_relevant());
        hear(Err(notify::Error::generic("the system lost its events")));
        assert!(scene.is_relevant());
        assert_eq!(scene.watch.follow(&places).unwrap_err().to_string(), "the system lost its events");
    }

    #[test]
    fn beyond_its_most_directories_the_rest_is_left_to_the_timer_and_said_so() {
        let parent = tempfile::tempdir().unwrap();
        let mut places = Places::new();
        for number in 0..=MOST_DIRECTORIES {
            let at = parent.path().join(number.to_string());
            fs::create_dir(&at).unwrap();
            places.extend(place(&at, &[]));
        }
        let scene = Scene::new();
        assert!(scene.watch.follow(&places).unwrap_err().to_string().contains("1024"));
        assert_eq!(scene.watched(), MOST_DIRECTORIES);
    }

    #[tokio::test(start_paused = true)]
    async fn it_is_looked_once_all_is_quiet_or_after_a_second_or_unasked_after_ten() {
        let watch = Watch { watcher: None, events: Arc::default() };
        let waited = async || {
            let began = Instant::now();
            (watch.changed().await, began.elapsed())
        };
        assert_eq!(waited().await, (Trigger::Poll, 10_000 * MS));
        watch.events.changed.notify_one();
        assert_eq!(waited().await, (Trigger::Event, 100 * MS));
        let ringing = async {
            loop {
                watch.events.changed.notify_one();
                tokio::time::sleep(90 * MS).await;
            }
        };
        tokio::select! {
            biased;
            () = ringing => {}
            waited = waited() => assert_eq!(waited, (Trigger::Event, 1_000 * MS)),
        }
    }
}
