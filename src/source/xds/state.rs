//! The last acknowledged rules of a control plane, kept in a directory over a restart.

use std::fs::{self, DirBuilder, File};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use prost::Message;
use prost_types::Any;
use rustix::fs::{Mode, OFlags, fsync, open};
use rustix::io::Errno;
use rustix::process::geteuid;
use thiserror::Error;
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval};

use super::status::XdsStatus;
use crate::file::{self, blocking};
use crate::proto::envoy::service::discovery::v3::DiscoveryResponse;

/// First bytes of a state file. The number grows with each change of the format.
const HEAD: &[u8] = b"tidegate rules 1\n";
/// Name of the state file.
const NAME: &str = "rules.state";
/// Maximum size of a state file: 256 MiB, the largest message that can be allowed.
const MOST: usize = (256 << 20) + (64 << 10);

/// Flags for a state file that is written. A link is not followed.
const WRITES: OFlags = OFlags::WRONLY.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
/// Interval at which the age of the rules starts anew while there is a stream: 60 s.
const RENEW_EVERY: Duration = Duration::from_secs(60);

/// Version and resources of acknowledged rules that are not written yet.
pub(super) type Unsaved = Option<(String, Vec<Any>)>;

/// A directory that holds the last acknowledged rules.
#[derive(Clone, Debug)]
pub struct StateDirectory {
    path: PathBuf,
    max_age: Duration,
}

/// Reason why a directory cannot hold rules.
#[derive(Debug, Error)]
#[error("STATE_DIR is {}: {why}", path.display())]
pub struct UnusableState {
    path: PathBuf,
    why: String,
}

/// Rules from a state file.
#[derive(Debug)]
pub(super) struct Restored {
    /// The response with the rules.
    pub(super) response: DiscoveryResponse,
    /// Time since the control plane last stood by these rules.
    pub(super) age: Duration,
}

impl StateDirectory {
    /// Opens the directory. Creates it and those above it, with mode 0700, if there is nothing at `path`. Rules older than `max_age` are not used; 0: no
    /// limit.
    ///
    /// # Errors
    /// If it is no directory, or belongs to another user, or other users may open it.
    pub fn open(path: PathBuf, max_age: Duration) -> Result<Self, UnusableState> {
        let unusable = |why: String| UnusableState { path: path.clone(), why };
        let system = |error: io::Error| unusable(format!("it cannot be used: {error}"));
        if let Err(error) = DirBuilder::new().recursive(true).mode(0o700).create(&path)
            && error.kind() != io::ErrorKind::AlreadyExists
        {
            return Err(unusable(format!("it cannot be created: {error}")));
        }
        let found = fs::symlink_metadata(&path).map_err(system)?;
        if !found.is_dir() {
            let kind = if found.is_symlink() { "a symbolic link" } else { "not a directory" };
            return Err(unusable(format!("it is {kind}: expected a directory")));
        }
        let (owner, own) = (found.uid(), geteuid().as_raw());
        if owner != own {
            return Err(unusable(format!(
                "it belongs to user {owner}: expected user {own}, under whom this process runs"
            )));
        }
        let mode = found.permissions().mode() & 0o777;
        if mode & 0o077 != 0 {
            return Err(unusable(format!(
                "its mode is {mode:04o}, so other users could change the rules: expected 0700; run chmod 700, or name a directory that does not exist yet"
            )));
        }
        Ok(Self { path, max_age })
    }

    /// Reads the rules. Returns `None` if there are none. Blocks while the file system does.
    ///
    /// # Errors
    /// The reason why the rules cannot be used.
    pub(super) fn read(&self) -> Result<Option<Restored>, String> {
        let path = self.path.join(NAME);
        let found = match fs::symlink_metadata(&path) {
            Ok(found) => found,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(format!("{} cannot be read: {error}", path.display())),
        };
        let unusable = |why: &str| Err(format!("{} is not used: {why}", path.display()));
        if found.is_symlink() || found.uid() != geteuid().as_raw() {
            return unusable("it is a symbolic link or belongs to another user");
        }
        let written = found.modified().unwrap_or(SystemTime::UNIX_EPOCH);
        #[expect(clippy::disallowed_methods, reason = "the age of a file is measured by the clock that dates files")]
        let age = SystemTime::now().duration_since(written).unwrap_or_default();
        if !self.max_age.is_zero() && age > self.max_age {
            let (age, most) = (age.as_secs(), self.max_age.as_secs());
            return unusable(&format!("it is {age} s old, and STATE_MAX_AGE is {most} s"));
        }
        let bytes = file::read(&path, MOST).map_err(|error| format!("{} cannot be read: {error}", path.display()))?;
        let content = bytes.strip_prefix(HEAD).and_then(|rest| rest.split_at_checked(blake3::OUT_LEN));
        let Some((checksum, content)) = content else { return unusable("it is not a state file of this version") };
        if blake3::hash(content).as_bytes() != checksum {
            return unusable("its checksum is wrong");
        }
        match DiscoveryResponse::decode(content) {
            Ok(response) => Ok(Some(Restored { response, age })),
            Err(error) => unusable(&format!("it cannot be decoded: {error}")),
        }
    }

    /// Replaces the rules in one step. Blocks while the file system does.
    ///
    /// # Errors
    /// The error of the operating system. The older rules stay.
    pub(super) fn write(&self, version: &str, resources: Vec<Any>) -> io::Result<()> {
        let response =
            DiscoveryResponse { version_info: version.to_owned(), resources, ..DiscoveryResponse::default() };
        let content = response.encode_to_vec();
        let (new, path) = (self.path.join("rules.new"), self.path.join(NAME));
        remove(&new)?;
        let mut file = File::from(open(&new, WRITES | OFlags::CREATE | OFlags::EXCL, Mode::RUSR | Mode::WUSR)?);
        file.write_all(HEAD)?;
        file.write_all(blake3::hash(&content).as_bytes())?;
        file.write_all(&content)?;
        file.sync_all()?;
        fs::rename(&new, &path)?;
        let directory = open(&self.path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        Ok(fsync(directory)?)
    }

    /// Notes that the control plane still stands by the rules, so that their age starts anew. Blocks while the file system does.
    ///
    /// # Errors
    /// The error of the operating system.
    pub(super) fn renew(&self) -> io::Result<()> {
        #[expect(clippy::disallowed_methods, reason = "the age of a file is measured by the clock that dates files")]
        let now = SystemTime::now();
        match open(self.path.join(NAME), WRITES, Mode::empty()) {
            Ok(file) => File::from(file).set_modified(now),
            Err(Errno::NOENT) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

/// Writes acknowledged rules to the state directory, and renews their age while there is a stream. Returns at once without a directory,
/// else never.
pub(super) async fn save(state: Option<StateDirectory>, mut unsaved: watch::Receiver<Unsaved>, status: Arc<XdsStatus>) {
    let Some(state) = state else { return };
    let mut renewal = interval(RENEW_EVERY);
    renewal.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut pending: Unsaved = None;
    loop {
        tokio::select! {
            Ok(()) = unsaved.changed() => pending = unsaved.borrow_and_update().clone(),
            _ = renewal.tick() => {}
        }
        if pending.is_none() && !status.get().is_connected {
            continue;
        }
        let (directory, rules) = (state.clone(), pending.clone());
        let write = move || match rules {
            Some((version, resources)) => directory.write(&version, resources),
            None => directory.renew(),
        };
        let slow = |passed: Duration| {
            tracing::warn!(
                event = "xds.state_slow",
                seconds = passed.as_secs(),
                "still writing rules to STATE_DIR: its file system may be stuck"
            );
        };
        let written = blocking(write, slow).await.map_err(|error| error.to_string());
        match written.and_then(|written| written.map_err(|error| error.to_string())) {
            Ok(()) => pending = None,
            // Rules that are not written yet are tried again; the age of the older ones does not start anew.
            Err(error) => tracing::error!(
                event = "xds.not_saved",
                "the rules in force cannot be written to STATE_DIR, so older rules or none would be in force after a restart; trying again every 60 s: {error}"
            ),
        }
    }
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn resources() -> Vec<Any> {
        vec![Any { type_url: "a type".to_owned(), value: vec![1, 2, 3] }]
    }

    fn age(path: &Path, by: Duration) {
        let file = File::options().write(true).open(path.join(NAME)).unwrap();
        #[expect(clippy::disallowed_methods, reason = "the age of a file is measured by the clock that dates files")]
        file.set_modified(SystemTime::now() - by).unwrap();
    }

    #[test]
    fn rules_are_read_as_written_until_they_are_too_old() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("state");
        let state = StateDirectory::open(path.clone(), Duration::from_secs(100)).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o700);
        assert!(state.read().unwrap().is_none());
        state.write("1", Vec::new()).unwrap();
        state.write("7", resources()).unwrap();
        let restored = state.read().unwrap().unwrap();
        assert_eq!((&*restored.response.version_info, restored.response.resources), ("7", resources()));
        age(&path, Duration::from_secs(90));
        assert!(state.read().unwrap().unwrap().age >= Duration::from_secs(90));
        age(&path, Duration::from_secs(110));
        assert!(state.read().unwrap_err().contains("STATE_MAX_AGE is 100 s"));
        state.renew().unwrap();
        assert!(state.read().unwrap().unwrap().age < Duration::from_secs(90));
        age(&path, Duration::from_secs(110));
        let unlimited = StateDirectory::open(path, Duration::ZERO).unwrap();
        assert!(unlimited.read().unwrap().is_some());
    }

    #[test]
    fn a_directory_that_others_may_open_in_any_way_is_not_used() {
        let parent = tempfile::tempdir().unwrap();
        for bit in 0..6 {
            let mode = 0o700 | 1 << bit;
            fs::set_permissions(parent.path(), fs::Permissions::from_mode(mode)).unwrap();
            let refused = StateDirectory::open(parent.path().to_owned(), Duration::ZERO).unwrap_err();
            assert!(refused.to_string().contains(&format!("its mode is {mode:04o}")), "{refused}");
        }
    }

    #[test]
    fn a_damaged_file_is_not_used() {
        let parent = tempfile::tempdir().unwrap();
        let state = StateDirectory::open(parent.path().join("state"), Duration::ZERO).unwrap();
        state.write("7", resources()).unwrap();
        let path = parent.path().join("state").join(NAME);
        let whole = fs::read(&path).unwrap();
        for at in [0, HEAD.len(), whole.len() - 1] {
            let mut damaged = whole.clone();
            damaged[at] ^= 1;
            fs::write(&path, damaged).unwrap();
            let why = state.read().unwrap_err();
            assert!(why.contains("is not used"), "{why}");
        }
        fs::write(&path, &whole[..whole.len() / 2]).unwrap();
        assert!(state.read().is_err());
        fs::remove_file(&path).unwrap();
        symlink("/etc/hostname", &path).unwrap();
        assert!(state.read().unwrap_err().contains("a symbolic link"));
        state.write("8", resources()).unwrap();
        assert_eq!(state.read().unwrap().unwrap().response.version_info, "8", "a link is replaced, not followed");
    }

    #[test]
    fn a_directory_that_others_could_change_is_refused() {
        let parent = tempfile::tempdir().unwrap();
        let refused = |name: &str| StateDirectory::open(parent.path().join(name), Duration::ZERO).unwrap_err().why;
        fs::write(parent.path().join("file"), "").unwrap();
        assert!(refused("file").contains("not a directory"));
        symlink(parent.path(), parent.path().join("link")).unwrap();
        assert!(refused("link").contains("a symbolic link"));
        fs::create_dir(parent.path().join("open")).unwrap();
        fs::set_permissions(parent.path().join("open"), fs::Permissions::from_mode(0o750)).unwrap();
        assert!(refused("open").contains("its mode is 0750"));
        assert!(refused("file/below").contains("cannot be created"));
        StateDirectory::open(parent.path().join("missing/below"), Duration::ZERO).unwrap();
        for created in ["missing", "missing/below"] {
            let mode = fs::metadata(parent.path().join(created)).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o700, "{created}");
        }
    }
}
