//! Rule files: named ones, or a directory laid out as the reference has it.

use std::fs;
use std::io;
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

impl Source {
    /// Reads every rule file, sorted by path within each directory.
    ///
    /// # Errors
    /// Every path that could not be read.
    pub fn read(&self) -> Result<Vec<File>, Vec<UnreadableRules>> {
        let mut wrong = Vec::new();
        let mut paths = Vec::new();
        match self {
            Self::Paths(named) => {
                for path in named {
                    if path.is_dir() {
                        let before = paths.len();
                        let is_rule_file = |path: &Path| matches!(extension(path), "yaml" | "yml");
                        walk(
                            path,
                            DEEPEST,
                            true,
                            &mut |found| is_rule_file(&found).then(|| paths.push(found)),
                            &mut wrong,
                        );
                        if paths.len() == before && wrong.is_empty() {
                            wrong.push(UnreadableRules::NoRuleFile { path: path.clone() });
                        }
                    } else {
                        paths.push(path.clone());
                    }
                }
            }
            Self::Runtime { directory, app_directory, is_root_watched, ignores_dot_files } => {
                let top = if *is_root_watched { directory.clone() } else { directory.join(app_directory) };
                if !top.is_dir() {
                    return Err(vec![UnreadableRules::NoDirectory { path: top }]);
                }
                let prefix = format!("{app_directory}.");
                let mut take = |found: PathBuf| {
                    let is_app = !is_root_watched || runtime_key(directory, &found).starts_with(&prefix);
                    is_app.then(|| paths.push(found))
                };
                walk(&top, DEEPEST, *ignores_dot_files, &mut take, &mut wrong);
            }
        }
        let mut files = Vec::with_capacity(paths.len());
        for path in paths {
            match fs::read(&path) {
                Ok(bytes) => files.push(File { name: Arc::from(path.to_string_lossy()), bytes }),
                Err(error) => wrong.push(UnreadableRules::Path { path, error }),
            }
        }
        if wrong.is_empty() { Ok(files) } else { Err(wrong) }
    }
}

/// The most bytes a list of values may have: 256 MiB. A million addresses take 16 MB.
const MAX_LIST_BYTES: u64 = 256 << 20;

/// Reads a file that a rule file names.
///
/// # Errors
/// What the system says, and that it is too large.
pub fn read_list(path: &Path) -> io::Result<Vec<u8>> {
    let bytes = fs::metadata(path)?.len();
    if bytes > MAX_LIST_BYTES {
        return Err(io::Error::other(format!("it has {bytes} bytes, and at most {MAX_LIST_BYTES} are read")));
    }
    fs::read(path)
}

fn extension(path: &Path) -> &str {
    path.extension().and_then(|extension| extension.to_str()).unwrap_or("")
}

/// `config/x.yaml` as the reference names it: `config.x.yaml`.
fn runtime_key(directory: &Path, path: &Path) -> String {
    let below = path.strip_prefix(directory).unwrap_or(path);
    below.iter().map(|part| part.to_string_lossy()).collect::<Vec<_>>().join(".")
}

/// Hands every file below a directory to `take`, sorted; links to directories are not followed, as in the reference.
fn walk(
    directory: &Path,
    depth: usize,
    ignores_dot_files: bool,
    take: &mut dyn FnMut(PathBuf) -> Option<()>,
    wrong: &mut Vec<UnreadableRules>,
) {
    let unreadable = |error| UnreadableRules::Path { path: directory.to_owned(), error };
    let entries = fs::read_dir(directory).and_then(|entries| entries.collect::<io::Result<Vec<_>>>());
    let mut entries = match entries {
        Ok(entries) => entries,
        Err(error) => return wrong.push(unreadable(error)),
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
                walk(&path, depth - 1, ignores_dot_files, take, wrong);
            } else {
                let error = io::Error::other(format!("directories of rule files nest at most {DEEPEST} deep"));
                wrong.push(UnreadableRules::Path { path, error });
            }
        } else if path.is_file() {
            take(path);
        }
    }
}
