//! Reads the files that an operator names: regular files only, and at most a given number of bytes.
//!
//! A pipe, a socket or a device in place of a file can block its reader for ever, or deliver bytes without end. The process reads
//! all of its own files with [`read`].

use std::collections::BTreeSet;
use std::fs::{File, FileType, OpenOptions, canonicalize, metadata, read_link};
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use thiserror::Error;

mod blocking;
mod follow;
#[cfg(feature = "server")]
pub mod pem;

pub use blocking::blocking;
pub use follow::{News, Settled, follow};

/// Maximum size of one list (`values_file`): 64 MiB. A million addresses take 16 MB.
pub const MAX_LIST: usize = 64 << 20;
/// Maximum size of a file with certificates: 4 MiB. The bundle of all public authorities takes 0.25 MB in Debian and 0.5 MB in
/// Red Hat's form with trust settings.
pub const MAX_CERTIFICATES: usize = 4 << 20;
/// Maximum size of a file with a password or a key: 64 KiB. An RSA key of 16,384 bits takes 13 KB as PEM.
pub const MAX_SECRET: usize = 64 << 10;

/// Reason why a file was not read, without its path.
#[derive(Debug, Error)]
pub enum Unreadable {
    /// Error of the operating system.
    #[error(transparent)]
    System(#[from] io::Error),
    /// No regular file is at the path.
    #[error("it is {found}: expected a regular file")]
    Irregular {
        /// Kind of file at the path.
        found: &'static str,
    },
    /// The file is not below a directory from which it may be read.
    #[error(
        "it is not below the directory of a rule file, links resolved: move it there, or set VALUES_ROOT to a directory above it"
    )]
    Outside,
    /// The file is larger than allowed.
    #[error("it is larger than {}, the maximum for this kind of file", size(*.most))]
    TooLarge {
        /// Maximum size in bytes.
        most: usize,
    },
}

/// Directories, links resolved, below which files may be read.
#[derive(Clone, Debug, Default)]
pub struct Roots(BTreeSet<PathBuf>);

/// A file that a setting names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Named {
    variable: &'static str,
    path: PathBuf,
    most: usize,
}

/// Reason why a file that a setting names cannot be used. It never quotes the file.
#[derive(Debug, Error)]
#[error("{variable} is {}: {why}", path.display())]
pub struct Unusable {
    variable: &'static str,
    path: PathBuf,
    why: String,
}

impl Roots {
    /// Returns the roots at `paths`. One that is not there has no files.
    pub fn of(paths: impl IntoIterator<Item = PathBuf>) -> Self {
        let paths: BTreeSet<_> = paths.into_iter().collect();
        let here = |path: PathBuf| if path.as_os_str().is_empty() { PathBuf::from(".") } else { path };
        Self(paths.into_iter().filter_map(|path| canonicalize(here(path)).ok()).collect())
    }

    /// Returns true if the file at `path`, which has no links, is below a root. Of the whole file system, which is the root of a rule file at the top, only
    /// the files at the top are.
    fn have(&self, path: &Path) -> bool {
        path.ancestors()
            .skip(1)
            .any(|above| self.0.contains(above) && (above.parent().is_some() || path.parent() == Some(above)))
    }
}

impl Named {
    /// Returns the file at `path`, which the setting `variable` names. At most `most` bytes of it are read.
    pub const fn new(variable: &'static str, path: PathBuf, most: usize) -> Self {
        Self { variable, path, most }
    }

    /// Returns the error that the file cannot be used because of `why`, which must not quote it.
    pub fn unusable(&self, why: impl Into<String>) -> Unusable {
        Unusable { variable: self.variable, path: self.path.clone(), why: why.into() }
    }

    /// Reads the file and returns the result of `take` on its bytes.
    ///
    /// # Errors
    /// If the file cannot be read, or if `take` returns `None`; `expected` names the expected content in that message.
    pub fn read<T>(&self, expected: &str, take: impl FnOnce(&[u8]) -> Option<T>) -> Result<T, Unusable> {
        let bytes = read(&self.path, self.most);
        let bytes = bytes.map_err(|error| self.unusable(format!("it cannot be read: {error}")))?;
        take(&bytes).ok_or_else(|| self.unusable(format!("expected {expected}")))
    }
}

/// Reads a regular file of at most `most` bytes and follows links. Opening never waits for a writer or a device. On a file system
/// that does not answer, every step blocks.
///
/// # Errors
/// If there is no regular file at the path, the system returns an error, or the file is larger than `most`.
pub fn read(path: &Path, most: usize) -> Result<Vec<u8>, Unreadable> {
    whole(open(path)?, most)
}

/// Reads a file as [`read`] does. Returns its content, and true if the file is below one of `roots`.
///
/// # Errors
/// As [`read`].
pub fn read_and_locate(path: &Path, most: usize, roots: &Roots) -> Result<(Vec<u8>, bool), Unreadable> {
    let file = open(path)?;
    // Without /proc the place is not known; then errors in the file quote nothing of it.
    let is_below = location(&file).is_ok_and(|at| roots.have(&at));
    Ok((whole(file, most)?, is_below))
}

/// Reads a file as [`read`] does if it is below one of `roots`, links resolved. A file that has another name below a root, by a hard link, is there.
///
/// # Errors
/// As [`read`], or if the file is elsewhere. Then it is not read.
pub fn read_below(path: &Path, most: usize, roots: &Roots) -> Result<Vec<u8>, Unreadable> {
    let file = open(path)?;
    if roots.have(&location(&file)?) { whole(file, most) } else { Err(Unreadable::Outside) }
}

/// Opens a regular file.
fn open(path: &Path) -> Result<File, Unreadable> {
    // Checked before opening: opening a pipe would wake its writer, and some devices act when they are opened.
    regular(metadata(path)?.file_type())?;
    let flags = i32::try_from(OFlags::NONBLOCK.bits()).unwrap_or_default();
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    // Another file may have replaced it since the first check.
    regular(file.metadata()?.file_type())?;
    Ok(file)
}

/// Returns the path of an open file, without links. The kernel knows it, whatever has replaced a link on the way since.
fn location(file: &File) -> io::Result<PathBuf> {
    read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

fn whole(file: File, most: usize) -> Result<Vec<u8>, Unreadable> {
    let length = file.metadata()?.len();
    let most_long = u64::try_from(most).unwrap_or(u64::MAX);
    if length > most_long {
        return Err(Unreadable::TooLarge { most });
    }
    let bytes = read_to_end(file, usize::try_from(length).unwrap_or(0), most_long)?;
    if bytes.len() > most { Err(Unreadable::TooLarge { most }) } else { Ok(bytes) }
}

/// Reads at most `most` + 1 bytes. `expected` is the length that the system reports; it may be wrong or change.
fn read_to_end(file: File, expected: usize, most: u64) -> io::Result<Vec<u8>> {
    // One byte more, so that the read sees the end of the file without growing the buffer.
    let mut bytes = Vec::with_capacity(expected.saturating_add(1));
    file.take(most.saturating_add(1)).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn regular(found: FileType) -> Result<(), Unreadable> {
    if found.is_file() {
        return Ok(());
    }
    let found = match found {
        kind if kind.is_dir() => "a directory",
        kind if kind.is_fifo() => "a pipe",
        kind if kind.is_socket() => "a socket",
        kind if kind.is_char_device() || kind.is_block_device() => "a device",
        _ => "not a file",
    };
    Err(Unreadable::Irregular { found })
}

/// Formats a number of bytes: `64 KiB`.
fn size(bytes: usize) -> String {
    match bytes {
        mebibytes if mebibytes >= 1 << 20 => format!("{} MiB", mebibytes >> 20),
        kibibytes => format!("{} KiB", kibibytes >> 10),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;

    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::*;

    fn refused(path: &Path) -> String {
        read(path, MAX_SECRET).unwrap_err().to_string()
    }

    #[test]
    fn a_regular_file_is_read_whole_through_links() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        fs::write(at("file"), "some text").unwrap();
        symlink("file", at("link")).unwrap();
        assert_eq!(read(&at("link"), 9).unwrap(), b"some text");
        fs::write(at("file"), "").unwrap();
        assert_eq!(read(&at("file"), 9).unwrap(), b"");
    }

    #[test]
    fn a_file_that_reports_no_length_is_read_all_the_same() {
        let path = Path::new("/proc/self/status");
        assert_eq!(metadata(path).unwrap().len(), 0);
        assert!(read(path, MAX_SECRET).unwrap().starts_with(b"Name:"));
        assert!(matches!(read(path, 16), Err(Unreadable::TooLarge { most: 16 })));
    }

    #[test]
    fn a_list_is_read_below_its_roots_only_links_resolved() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        fs::create_dir_all(at("rules/..2026")).unwrap();
        fs::create_dir(at("rules/deep")).unwrap();
        fs::create_dir(at("rules2")).unwrap();
        for name in ["rules/..2026/list", "rules/deep/list", "rules2/list", "secret"] {
            fs::write(at(name), "x").unwrap();
        }
        symlink("..2026", at("rules/..data")).unwrap();
        symlink("..data/list", at("rules/list")).unwrap();
        symlink("../secret", at("rules/out")).unwrap();
        symlink("..", at("rules/up")).unwrap();
        symlink("rules", at("current")).unwrap();
        let read = |name: &str, root: &str| read_below(&at(name), 9, &Roots::of([at(root)]));
        for inside in ["rules/list", "rules/deep/list", "current/list", "rules/deep/../list", "rules/up/rules/list"] {
            assert_eq!(read(inside, "rules").unwrap(), b"x", "{inside}");
            assert_eq!(read(inside, "current").unwrap(), b"x", "{inside}: a root may be a link");
        }
        for outside in ["secret", "rules2/list", "rules/out", "rules/../secret", "rules/up/secret"] {
            assert!(matches!(read(outside, "rules"), Err(Unreadable::Outside)), "{outside}");
            assert!(matches!(read(outside, "missing"), Err(Unreadable::Outside)), "{outside}");
        }
        for file in ["/proc/self/environ", "/etc/passwd"] {
            assert!(matches!(read(file, "rules"), Err(Unreadable::Outside)), "{file}");
            assert!(!Roots::of(["/".into()]).have(Path::new(file)), "{file}");
        }
        assert!(Roots::of(["/".into()]).have(Path::new("/list")));
        assert!(Roots::of([PathBuf::new()]).have(&canonicalize("Cargo.toml").unwrap()), "the present directory");
        mknodat(CWD, at("rules/pipe"), FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        assert!(matches!(read("rules/pipe", "rules"), Err(Unreadable::Irregular { .. })));
        fs::write(at("rules/deep/list"), "more than 9").unwrap();
        assert!(matches!(read("rules/deep/list", "rules"), Err(Unreadable::TooLarge { most: 9 })));
    }

    #[test]
    fn a_link_that_is_swapped_all_the_time_never_leads_out_of_a_root() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        fs::create_dir(at("rules")).unwrap();
        fs::write(at("rules/list"), "list").unwrap();
        fs::write(at("secret"), "secret").unwrap();
        symlink("list", at("rules/link")).unwrap();
        let (ends, ended) = std::sync::mpsc::channel::<()>();
        let link = at("rules/link");
        let swapping = std::thread::spawn(move || {
            for target in ["../secret", "list"].into_iter().cycle() {
                let new = link.with_file_name("new");
                symlink(target, &new).unwrap();
                fs::rename(&new, &link).unwrap();
                if ended.try_recv() == Err(std::sync::mpsc::TryRecvError::Disconnected) {
                    return;
                }
            }
        });
        let roots = Roots::of([at("rules")]);
        let read: Vec<_> = (0..2_000).map(|_| read_below(&at("rules/link"), 9, &roots)).collect();
        drop(ends);
        swapping.join().unwrap();
        let (inside, outside): (Vec<_>, Vec<_>) = read.into_iter().partition(Result::is_ok);
        assert!(inside.iter().flatten().all(|read| read == b"list"));
        assert!(outside.iter().flat_map(Result::as_ref).next().is_none());
    }

    #[test]
    fn anything_else_is_refused_and_named() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        mknodat(CWD, at("pipe"), FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        let _socket = UnixListener::bind(at("socket")).unwrap();
        symlink("pipe", at("link")).unwrap();
        symlink("loop", at("loop")).unwrap();
        let told = ["pipe", "link", "socket", "loop", "missing"].map(|name| refused(&at(name)));
        assert_eq!(told[0], "it is a pipe: expected a regular file");
        assert_eq!(told[1], told[0], "a link to a pipe");
        assert_eq!(told[2], "it is a socket: expected a regular file");
        assert!(told[3].starts_with("Too many levels of symbolic links"), "{}", told[3]);
        assert!(told[4].starts_with("No such file"), "{}", told[4]);
        assert_eq!(refused(Path::new("/dev/zero")), "it is a device: expected a regular file");
        assert_eq!(refused(directory.path()), "it is a directory: expected a regular file");
    }

    #[test]
    fn a_file_may_have_as_many_bytes_as_it_may_and_not_one_more() {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(&file, [b'x'; MAX_SECRET]).unwrap();
        assert_eq!(read(file.path(), MAX_SECRET).unwrap().len(), MAX_SECRET);
        // The file is sparse, and none of it is read.
        file.as_file().set_len(1 << 40).unwrap();
        assert_eq!(refused(file.path()), "it is larger than 64 KiB, the maximum for this kind of file");
        assert_eq!(Unreadable::TooLarge { most: MAX_LIST }.to_string().find("64 MiB"), Some(18));
    }
}
