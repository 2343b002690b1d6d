//! Rule files: named ones, or a directory laid out as the reference has it.

use std::cell::RefCell;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use thiserror::Error;

use crate::file::{self, Unreadable};
use crate::rules::File;
use crate::rules::document::MAX_FILE_BYTES;

/// What a name begins with that Kubernetes makes for itself beside the files of a ConfigMap (`..data`, `..2026_01_01`).
/// The files themselves are links beside them, so to read these too would be to read every rule twice.
const KUBERNETES: &str = "..";
/// How deep directories are walked: 16. A loop of links is not followed at all; this bounds the rest.
const DEEPEST: usize = 16;
/// The most bytes of all rule files together: 256 MiB, eight files of the largest size. 100,000 rules take 8 MiB.
const MAX_BYTES: usize = 256 << 20;

/// Where rule files are.
#[derive(Clone, Debug)]
pub enum Source {
    /// Files, and directories whose `*.yaml` and `*.yml` files are taken.
    Paths(Vec<PathBuf>),
    /// A directory of the reference's runtime.
    Runtime {
        /// `RUNTIME_ROOT/RUNTIME_SUBDIRECTORY`.
        directory: PathBuf,
        /// `RUNTIME_APPDIRECTORY`.
        app_directory: String,
        /// Whether files anywhere below `directory` count whose dotted path begins with the app directory's name.
        is_root_watched: bool,
        /// Whether names that begin with a dot are passed over.
        ignores_dot_files: bool,
    },
}

/// Why rule files could not be read.
#[derive(Debug, Error)]
pub enum UnreadableRules {
    /// A file or directory.
    #[error("{}: {error}", path.display())]
    Path {
        /// Which.
        path: PathBuf,
        /// The reason.
        error: Unreadable,
    },
    /// All rule files together are too large.
    #[error("{}: the rule files up to this one are larger than {} MiB together, the most that one load reads", path.display(), MAX_BYTES >> 20)]
    TooLarge {
        /// The file at which they are.
        path: PathBuf,
    },
    /// A directory named on the command line has no rule file.
    #[error("{}: there is no *.yaml or *.yml file in this directory", path.display())]
    NoRuleFile {
        /// Which.
        path: PathBuf,
    },
    /// The runtime directory is not there.
    #[error(
        "{}: there is no such directory; name rule files on the command line (tidegate serve rules.yaml), or set RUNTIME_ROOT, RUNTIME_SUBDIRECTORY and RUNTIME_APPDIRECTORY", path.display()
    )]
    NoDirectory {
        /// Which.
        path: PathBuf,
    },
}

/// What there is to read, and where it was looked for.
#[derive(Debug, Default)]
pub(super) struct Found {
    /// The rule files.
    pub(super) files: Vec<PathBuf>,
    /// The directories whose files count.
    pub(super) directories: Vec<PathBuf>,
    wrong: Vec<UnreadableRules>,
}

impl Source {
    /// Reads every rule file, sorted by path within each directory.
    ///
    /// # Errors
    /// Every path that could not be read.
    pub fn read(&self) -> Result<Vec<File>, Vec<UnreadableRules>> {
        self.find().read()
    }

    /// What the operator named: paths, or the one directory.
    pub(super) fn roots(&self) -> Vec<PathBuf> {
        match self {
            Self::Paths(named) => named.clone(),
            Self::Runtime { directory, app_directory, is_root_watched, .. } => {
                vec![if *is_root_watched { directory.clone() } else { directory.join(app_directory) }]
            }
        }
    }

    /// Looks for rule files.
    pub(super) fn find(&self) -> Found {
        let mut found = Found::default();
        for root in self.roots() {
            match self {
                Self::Paths(_) if !root.is_dir() => found.files.push(root),
                Self::Paths(_) => {
                    let before = found.files.len();
                    let is_rule_file = |path: &Path| matches!(extension(path), "yaml" | "yml");
                    found.walk(&root, DEEPEST, true, &is_rule_file);
                    if found.files.len() == before && found.wrong.is_empty() {
                        found.wrong.push(UnreadableRules::NoRuleFile { path: root });
                    }
                }
                Self::Runtime { .. } if !root.is_dir() => found.wrong.push(UnreadableRules::NoDirectory { path: root }),
                Self::Runtime { directory, app_directory, is_root_watched, ignores_dot_files } => {
                    let prefix = format!("{app_directory}.");
                    let is_app = |path: &Path| !is_root_watched || runtime_key(directory, path).starts_with(&prefix);
                    found.walk(&root, DEEPEST, *ignores_dot_files, &is_app);
                }
            }
        }
        found
    }
}

impl Found {
    /// Reads the files.
    pub(super) fn read(self) -> Result<Vec<File>, Vec<UnreadableRules>> {
        let Self { files: paths, mut wrong, .. } = self;
        let mut files = Vec::with_capacity(paths.len());
        let mut read = 0;
        for path in paths {
            match file::read(&path, MAX_FILE_BYTES) {
                Ok(bytes) if read + bytes.len() > MAX_BYTES => {
                    wrong.push(UnreadableRules::TooLarge { path });
                    break;
                }
                Ok(bytes) => {
                    read += bytes.len();
                    files.push(File { name: Arc::from(path.to_string_lossy()), bytes });
                }
                Err(error) => wrong.push(UnreadableRules::Path { path, error }),
            }
        }
        if wrong.is_empty() { Ok(files) } else { Err(wrong) }
    }

    /// Adds the files below a directory that count, sorted; links to directories are not followed, as in the reference.
    fn walk(&mut self, directory: &Path, depth: usize, ignores_dot_files: bool, counts: &dyn Fn(&Path) -> bool) {
        self.directories.push(directory.to_owned());
        let entries = fs::read_dir(directory).and_then(|entries| entries.collect::<io::Result<Vec<_>>>());
        let mut entries = match entries {
            Ok(entries) => entries,
            Err(error) => {
                return self.wrong.push(UnreadableRules::Path { path: directory.to_owned(), error: error.into() });
            }
        };
        entries.sort_by_key(fs::DirEntry::file_name);
        for entry in entries {
            let name = entry.file_name();
            let name = name.to_string_lossy();
            if name.starts_with(KUBERNETES) || (ignores_dot_files && name.starts_with('.')) {
                continue;
            }
            let path = entry.path();
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                if depth > 0 {
                    self.walk(&path, depth - 1, ignores_dot_files, counts);
                } else {
                    let error = io::Error::other(format!("directories of rule files nest at most {DEEPEST} deep"));
                    self.wrong.push(UnreadableRules::Path { path, error: error.into() });
                }
            } else if is_to_be_read(&path, &name) && counts(&path) {
                self.files.push(path);
            }
        }
    }
}

/// Whether a path is read as a rule file. A pipe, or a link to a missing file, counts as one: reading it is an error, while to
/// pass it over would drop its rules silently. A link to a directory is passed over, and so is the dangling link `.#NAME` by
/// which some editors mark a file that is being edited.
fn is_to_be_read(path: &Path, name: &str) -> bool {
    fs::metadata(path).map_or(!name.starts_with(".#"), |found| !found.is_dir())
}

thread_local! {
    /// The lists that this thread reads while [`noting_lists`] runs.
    static NOTED: RefCell<Option<Vec<(PathBuf, ListPrint)>>> = const { RefCell::new(None) };
}

/// What a list said, or why it could not be read.
pub(super) type ListPrint = Result<blake3::Hash, String>;

/// Reads a file that a rule file names.
///
/// # Errors
/// When there is no regular file at the path, the system refuses, or the list is too large.
pub fn read_list(path: &Path) -> io::Result<Vec<u8>> {
    let read = file::read(path, file::MAX_LIST);
    NOTED.with_borrow_mut(|noted| noted.as_mut().map(|noted| noted.push((path.to_owned(), print_of(&read)))));
    read.map_err(io::Error::other)
}

/// Runs a load, and tells which lists it read and what was in them.
/// To read them again for that would tell what is in them then, and a change between the two would never be seen.
pub(super) fn noting_lists<T>(load: impl FnOnce() -> T) -> (T, Vec<(PathBuf, ListPrint)>) {
    NOTED.set(Some(Vec::new()));
    let loaded = load();
    (loaded, NOTED.take().unwrap_or_default())
}

/// What is in a list now.
pub(super) fn list_print(path: &Path) -> ListPrint {
    print_of(&file::read(path, file::MAX_LIST))
}

fn print_of(read: &Result<Vec<u8>, Unreadable>) -> ListPrint {
    read.as_ref().map(|bytes| blake3::hash(bytes)).map_err(ToString::to_string)
}

fn extension(path: &Path) -> &str {
    path.extension().and_then(|extension| extension.to_str()).unwrap_or("")
}

/// `config/x.yaml` as the reference names it: `config.x.yaml`.
fn runtime_key(directory: &Path, path: &Path) -> String {
    let below = path.strip_prefix(directory).unwrap_or(path);
    below.iter().map(|part| part.to_string_lossy()).collect::<Vec<_>>().join(".")
}
