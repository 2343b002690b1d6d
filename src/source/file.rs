//! Rule files: named ones, or a directory laid out as the reference has it.

use std::cell::RefCell;
use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use thiserror::Error;

use crate::rules::File;

/// What a name begins with that Kubernetes makes for itself beside the files of a ConfigMap (`..data`, `..2026_01_01`).
/// The files themselves are links beside them, so to read these too would be to read every rule twice.
const KUBERNETES: &str = "..";
/// How deep directories are walked: 16. A loop of links is not followed at all; this bounds the rest.
const DEEPEST: usize = 16;

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
        /// What the system says.
        error: io::Error,
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
        for path in paths {
            match fs::read(&path) {
                Ok(bytes) => files.push(File { name: Arc::from(path.to_string_lossy()), bytes }),
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
            Err(error) => return self.wrong.push(UnreadableRules::Path { path: directory.to_owned(), error }),
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
                    self.wrong.push(UnreadableRules::Path { path, error });
                }
            } else if is_to_be_read(&path, &name) && counts(&path) {
                self.files.push(path);
            }
        }
    }
}

/// Whether there is a file, or a link to one that is not there: to pass that over would be to drop its rules without a word. Some
/// editors mark a file that is being edited by such a link.
fn is_to_be_read(path: &Path, name: &str) -> bool {
    fs::metadata(path).map_or(!name.starts_with(".#"), |found| found.is_file())
}

/// The most bytes a list of values may have: 256 MiB. A million addresses take 16 MB.
const MAX_LIST_BYTES: u64 = 256 << 20;

thread_local! {
    /// The lists that this thread reads while [`noting_lists`] runs.
    static NOTED: RefCell<Option<Vec<(PathBuf, ListPrint)>>> = const { RefCell::new(None) };
}

/// What a list said, or why it could not be read.
pub(super) type ListPrint = Result<blake3::Hash, String>;

/// Reads a file that a rule file names.
///
/// # Errors
/// What the system says, and that it is too large.
pub fn read_list(path: &Path) -> io::Result<Vec<u8>> {
    let read = read_bounded(path);
    NOTED.with_borrow_mut(|noted| noted.as_mut().map(|noted| noted.push((path.to_owned(), print_of(&read)))));
    read
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
    print_of(&read_bounded(path))
}

fn print_of(read: &io::Result<Vec<u8>>) -> ListPrint {
    read.as_ref().map(|bytes| blake3::hash(bytes)).map_err(ToString::to_string)
}

fn read_bounded(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    // What is no file may have no end, and tells no length.
    fs::File::open(path)?.take(MAX_LIST_BYTES + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_LIST_BYTES {
        return Err(io::Error::other(format!("it is too large: at most {MAX_LIST_BYTES} bytes are read")));
    }
    Ok(bytes)
}

fn extension(path: &Path) -> &str {
    path.extension().and_then(|extension| extension.to_str()).unwrap_or("")
}

/// `config/x.yaml` as the reference names it: `config.x.yaml`.
fn runtime_key(directory: &Path, path: &Path) -> String {
    let below = path.strip_prefix(directory).unwrap_or(path);
    below.iter().map(|part| part.to_string_lossy()).collect::<Vec<_>>().join(".")
}
