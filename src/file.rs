//! Reads the files that an operator names: regular files only, and at most a given number of bytes.
//!
//! A pipe, a socket or a device in place of a file can block its reader for ever, or deliver bytes without end. The process reads
//! all of its own files with [`read`].

use std::fs::{File, FileType, OpenOptions, metadata};
use std::io::{self, Read};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use thiserror::Error;

mod apart;
#[cfg(feature = "server")]
pub mod pem;

pub use apart::apart;

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
    /// The file is larger than allowed.
    #[error("it is larger than {}, the maximum for this kind of file", size(*.most))]
    TooLarge {
        /// Maximum size in bytes.
        most: usize,
    },
}

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
    // Checked before opening: opening a pipe would wake its writer, and some devices act when they are opened.
    regular(metadata(path)?.file_type())?;
    let flags = i32::try_from(OFlags::NONBLOCK.bits()).unwrap_or_default();
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    // Another file may have replaced it since the first check.
    let found = file.metadata()?;
    regular(found.file_type())?;
    let most_long = u64::try_from(most).unwrap_or(u64::MAX);
    if found.len() > most_long {
        return Err(Unreadable::TooLarge { most });
    }
    let bytes = read_to_end(file, usize::try_from(found.len()).unwrap_or(0), most_long)?;
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
