//! Rule files: named files and directories, or a directory in the layout of the reference's runtime.

use std::fs;
use std::io;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use thiserror::Error;

use crate::file::{self, Roots, Unreadable};
use crate::rulefile::File;
use crate::rulefile::document::MAX_FILE_BYTES;

/// Prefix of the names that Kubernetes creates beside the files of a ConfigMap (`..data`, `..2026_01_01`). The files
/// themselves are links to them, so reading these too would read every rule twice.
const KUBERNETES: &str = "..";
/// Maximum depth of directories: 16. Links to directories are not followed, so they cannot form loops; this
/// bounds real directories.
const DEEPEST: usize = 16;
/// Maximum size of all rule files together: 256 MiB, eight files of the largest size. 100,000 rules take 8 MiB.
const MAX_BYTES: usize = 256 << 20;

/// Maximum size of a file that may be a rule file in the wrong place: 1 MiB, about ten thousand rules.
const MAX_PASSED_OVER: usize = 1 << 20;

/// Location of the rule files.
#[derive(Clone, Debug)]
pub enum Location {
    /// Files, and directories of which every `*.yaml` and `*.yml` file is read.
    Paths(Vec<PathBuf>),
    /// A directory of the reference's runtime.
    Runtime {
        /// `RUNTIME_ROOT/RUNTIME_SUBDIRECTORY`, joined by [`joined`].
        directory: PathBuf,
        /// `RUNTIME_APPDIRECTORY`.
        app_directory: String,
        /// True if every file below `directory` is read whose dotted path begins with the app directory's name; false if only
        /// the files below the app directory are.
        is_root_watched: bool,
        /// True if names that begin with a dot are skipped.
        ignores_dot_files: bool,
    },
}

/// A reason why rule files could not be read.
#[derive(Debug, Error)]
pub enum UnreadableRules {
    /// A file or directory could not be read.
    #[error("{}: {error}", path.display())]
    Path {
        /// Path of the file or directory.
        path: PathBuf,
        /// The reason.
        error: Unreadable,
    },
    /// The rule files together are too large.
    #[error("{}: with this file, the rule files of the load are larger than {} MiB together, which is the maximum", path.display(), MAX_BYTES >> 20)]
    TooLarge {
        /// Path of the file that exceeds the maximum.
        path: PathBuf,
    },
    /// A directory named on the command line has no rule file.
    #[error("{}: there is no *.yaml or *.yml file in this directory{}", path.display(), other(passed_over.as_deref()))]
    NoRuleFile {
        /// Path of the directory.
        path: PathBuf,
        /// A file in it with another name that looks like a rule file.
        passed_over: Option<PathBuf>,
    },
    /// The runtime directory does not exist, or is no directory.
    #[error(
        "{}: there is no such directory: name rule files on the command line (`tidegate serve rules.yaml`), or set `RUNTIME_ROOT`, `RUNTIME_SUBDIRECTORY` and `RUNTIME_APPDIRECTORY`", path.display()
    )]
    NoDirectory {
        /// Path of the directory.
        path: PathBuf,
    },
}

/// Rule files to read, and the directories that were searched.
#[derive(Debug, Default)]
pub(super) struct FoundFiles {
    /// Paths of the rule files.
    pub(super) files: Vec<PathBuf>,
    /// Directories that were searched for rule files.
    pub(super) directories: Vec<PathBuf>,
    wrong: Vec<UnreadableRules>,
}

/// Rule files that were read.
pub(super) struct FilesRead {
    pub(super) files: Vec<File>,
    /// Names of the files to which links lead from outside of their own directories.
    pub(super) elsewhere: Vec<Arc<str>>,
}

impl Location {
    /// Reads every rule file, sorted by path within each directory.
    ///
    /// # Errors
    /// Every path that could not be read.
    pub fn read(&self) -> Result<Vec<File>, Vec<UnreadableRules>> {
        Ok(self.find().read(&Roots::default())?.files)
    }

    /// Returns the paths that the operator named, or the one runtime directory.
    pub(super) fn roots(&self) -> Vec<PathBuf> {
        match self {
            Self::Paths(named) => named.clone(),
            Self::Runtime { directory, app_directory, is_root_watched, .. } => {
                vec![if *is_root_watched { directory.clone() } else { joined(directory, app_directory) }]
            }
        }
    }

    /// Returns the roots of the lists of `found` files: the directory of each file, each directory that was searched, the runtime directory, and `more`.
    pub(super) fn list_roots(&self, found: &FoundFiles, more: Option<&Path>) -> Roots {
        let of_files = found.files.iter().filter_map(|file| file.parent());
        let searched = found.directories.iter().map(PathBuf::as_path);
        let runtime = match self {
            Self::Paths(_) => None,
            Self::Runtime { directory, .. } => Some(directory.as_path()),
        };
        Roots::of(of_files.chain(searched).chain(runtime).chain(more).map(Path::to_owned))
    }

    /// Returns the files that look like rule files and are not read, because of their names or because of their directory, each with the
    /// reason.
    pub(super) fn passed_over(&self) -> Vec<(PathBuf, String)> {
        let Self::Runtime { directory, app_directory, .. } = self else {
            let why = "in a directory that the command line names, only *.yaml and *.yml files are read (below RUNTIME_ROOT, every file is): rename the file, or move it away";
            let directories = self.roots().into_iter().filter(|root| root.is_dir());
            let files = directories.flat_map(|root| passed_over(&root, &|path| !is_yaml(path)));
            return files.map(|path| (path, why.to_owned())).collect();
        };
        let app = joined(directory, app_directory);
        if app == *directory || app.is_file() {
            return Vec::new();
        }
        let why = format!(
            "only files below {} are read: move the file there, or change RUNTIME_ROOT, RUNTIME_SUBDIRECTORY or RUNTIME_APPDIRECTORY",
            app.display()
        );
        let read = self.find().files;
        let files = passed_over(directory, &is_yaml).into_iter().filter(|path| !read.contains(path));
        files.map(|path| (path, why.clone())).collect()
    }

    /// Searches for rule files.
    pub(super) fn find(&self) -> FoundFiles {
        let mut found = FoundFiles::default();
        for root in self.roots() {
            match self {
                Self::Paths(_) if !root.is_dir() => found.files.push(root),
                Self::Paths(_) => {
                    let before = found.files.len();
                    found.walk(&root, DEEPEST, true, &is_yaml);
                    if found.files.len() == before && found.wrong.is_empty() {
                        let passed_over = passed_over(&root, &|path| !is_yaml(path)).into_iter().next();
                        found.wrong.push(UnreadableRules::NoRuleFile { path: root, passed_over });
                    }
                }
                // A file that is mounted in place of the app directory.
                Self::Runtime { is_root_watched: false, .. } if root.is_file() => found.files.push(root),
                Self::Runtime { .. } if !root.is_dir() => found.wrong.push(UnreadableRules::NoDirectory { path: root }),
                Self::Runtime { directory, app_directory, is_root_watched, ignores_dot_files } => {
                    let app = joined(Path::new(""), app_directory);
                    let names = app.iter().filter(|name| *name != ".");
                    let prefix: String = names.map(|name| format!("{}.", name.to_string_lossy())).collect();
                    let is_app = |path: &Path| !is_root_watched || runtime_key(directory, path).starts_with(&prefix);
                    found.walk(&root, DEEPEST, *ignores_dot_files, &is_app);
                }
            }
        }
        found
    }
}

impl FoundFiles {
    /// Reads the files. Returns them, and the names of the files outside of `roots`, to which links lead.
    ///
    /// # Errors
    /// Each path that could not be read.
    pub(super) fn read(self, roots: &Roots) -> Result<FilesRead, Vec<UnreadableRules>> {
        let Self { files: paths, mut wrong, .. } = self;
        let mut files = Vec::with_capacity(paths.len());
        let (mut read, mut elsewhere) = (0, Vec::new());
        for path in paths {
            match file::read_and_locate(&path, MAX_FILE_BYTES, roots) {
                Ok((bytes, _)) if read + bytes.len() > MAX_BYTES => {
                    wrong.push(UnreadableRules::TooLarge { path });
                    break;
                }
                Ok((bytes, is_below)) => {
                    read += bytes.len();
                    let name = Arc::from(path.to_string_lossy());
                    elsewhere.extend((!is_below).then(|| Arc::clone(&name)));
                    files.push(File { name, bytes });
                }
                Err(error) => wrong.push(UnreadableRules::Path { path, error }),
            }
        }
        if wrong.is_empty() { Ok(FilesRead { files, elsewhere }) } else { Err(wrong) }
    }

    /// Adds the files below `directory` for which `counts` returns true, sorted. Links to directories are not followed, as in
    /// the reference.
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
                    let error = io::Error::other(format!(
                        "directories of rule files can be nested at most {DEEPEST} levels deep"
                    ));
                    self.wrong.push(UnreadableRules::Path { path, error: error.into() });
                }
            } else if is_to_be_read(&path, &name) && counts(&path) {
                self.files.push(path);
            }
        }
    }
}

/// Returns true if `path` is to be read as a rule file. This includes a pipe and a link to a missing file: reading them
/// fails, while skipping them would drop their rules silently. A link to a directory is skipped, and so is a dangling link
/// `.#NAME`, with which some editors mark a file that is being edited.
fn is_to_be_read(path: &Path, name: &str) -> bool {
    fs::metadata(path).map_or(!name.starts_with(".#"), |found| !found.is_dir())
}

/// Reads the list of values that a rule file names.
///
/// # Errors
/// If `path` is not a regular file below one of `roots`, cannot be read, or is too large.
pub(super) fn read_list(path: &Path, roots: &Roots) -> Result<Vec<u8>, Unreadable> {
    file::read_below(path, file::MAX_LIST, roots)
}

/// Joins two paths as the reference does (Go's `filepath.Join`): `path` is below `directory` even if it begins with a slash, and `.` and
/// `..` are resolved without looking at links.
pub fn joined(directory: &Path, path: &str) -> PathBuf {
    let below = Path::new(path).components().filter(|part| !matches!(part, Component::RootDir));
    let mut joined = PathBuf::new();
    for part in directory.components().chain(below) {
        match part {
            Component::CurDir => {}
            Component::ParentDir if joined.file_name().is_some() => {
                joined.pop();
            }
            Component::ParentDir if joined.has_root() => {}
            part => joined.push(part),
        }
    }
    let is_here = joined.as_os_str().is_empty() && !(directory.as_os_str().is_empty() && path.is_empty());
    if is_here { PathBuf::from(".") } else { joined }
}

/// Returns the files of `directory` itself that look like rule files and for whose paths `is_named` returns true, sorted.
fn passed_over(directory: &Path, is_named: &dyn Fn(&Path) -> bool) -> Vec<PathBuf> {
    let paths = fs::read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.path());
    let is_hidden = |path: &Path| path.file_name().is_none_or(|name| name.to_string_lossy().starts_with('.'));
    let is_rule_file = |path: &PathBuf| {
        let bytes = file::read(path, MAX_PASSED_OVER).unwrap_or_default();
        let text = String::from_utf8_lossy(&bytes);
        let mut lines = text.lines().map(|line| line.trim_start_matches(['{', ' ', '"', '\'']));
        lines.any(|line| {
            let name = line.strip_prefix("domain").or_else(|| line.strip_prefix("overlay"));
            name.is_some_and(|rest| rest.trim_start_matches(['"', '\'']).starts_with(':'))
        }) && text.contains("descriptors")
    };
    let mut files: Vec<_> = paths.filter(|path| !is_hidden(path) && is_named(path)).filter(is_rule_file).collect();
    files.sort();
    files
}

/// Returns the end of the message about a directory without rule files.
fn other(passed_over: Option<&Path>) -> String {
    let named =
        passed_over.map(|path| path.file_name().unwrap_or_default().to_string_lossy().escape_debug().to_string());
    named.map_or_else(String::new, |name| {
        format!(": `{name}` looks like a rule file, and only below RUNTIME_ROOT every file is read, so rename it")
    })
}

fn is_yaml(path: &Path) -> bool {
    matches!(extension(path), "yaml" | "yml")
}

fn extension(path: &Path) -> &str {
    path.extension().and_then(|extension| extension.to_str()).unwrap_or("")
}

/// Returns the reference's name for a path: `config.x.yaml` for `config/x.yaml`.
fn runtime_key(directory: &Path, path: &Path) -> String {
    let below = path.strip_prefix(directory).unwrap_or(path);
    below.iter().map(|part| part.to_string_lossy()).collect::<Vec<_>>().join(".")
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::{Location, joined};

    #[test]
    fn paths_are_joined_as_in_the_reference() {
        for (directory, path, expected) in [
            ("/data", "/ratelimit", "/data/ratelimit"),
            ("/data/", "/ratelimit/", "/data/ratelimit"),
            ("/data", "//ratelimit//a", "/data/ratelimit/a"),
            ("/data", "ratelimit", "/data/ratelimit"),
            ("/data", "./ratelimit", "/data/ratelimit"),
            ("/data", "", "/data"),
            ("/data", "/", "/data"),
            ("/data", ".", "/data"),
            ("/data", "../x", "/x"),
            ("/data", "/../../x", "/x"),
            ("/data/current/..", "a/./b", "/data/a/b"),
            ("data", "/a", "data/a"),
            ("data", "..", "."),
            ("..", "/a", "../a"),
            ("../..", "../a", "../../../a"),
            (".", "", "."),
            ("", "/a", "a"),
            ("", "", ""),
        ] {
            let found = joined(Path::new(directory), path);
            assert_eq!(found.to_str(), Some(expected), "{directory} and {path}");
        }
    }

    /// The names of the files that are found below `made`, with this app directory.
    fn found(made: &Path, app_directory: &str, is_root_watched: bool) -> Vec<String> {
        let location = Location::Runtime {
            directory: made.to_owned(),
            app_directory: app_directory.to_owned(),
            is_root_watched,
            ignores_dot_files: false,
        };
        let files = location.find().files;
        files.iter().map(|path| path.strip_prefix(made).unwrap().display().to_string()).collect()
    }

    #[test]
    fn an_app_directory_may_begin_and_end_with_a_slash_be_nested_or_be_a_file() {
        let made = tempfile::tempdir().unwrap();
        let write = |path: &str| {
            let path = made.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "domain: d\n").unwrap();
        };
        ["config/a.yaml", "config/deep/b.yaml", "other/c.yaml", "rules.yaml"].into_iter().for_each(write);
        for is_root_watched in [true, false] {
            let found = |app: &str| found(made.path(), app, is_root_watched);
            for app in ["config", "/config", "config/", "/config/", "./config", "other/../config"] {
                assert_eq!(found(app), ["config/a.yaml", "config/deep/b.yaml"], "{app}");
            }
            for app in ["config/deep", "/config/deep"] {
                assert_eq!(found(app), ["config/deep/b.yaml"], "{app}");
            }
            for app in ["", "/", "."] {
                assert_eq!(found(app).len(), 4, "{app:?}");
            }
        }
        for app in ["rules.yaml", "/rules.yaml", "config/a.yaml"] {
            assert_eq!(found(made.path(), app, false), [app.trim_start_matches('/')]);
            assert_eq!(
                found(made.path(), app, true),
                Vec::<String>::new(),
                "its name has no part behind the app directory's"
            );
        }
    }

    #[test]
    fn a_rule_file_that_is_passed_over_is_named() {
        let made = tempfile::tempdir().unwrap();
        let rules = "domain: d\ndescriptors: []\n";
        let write = |path: &str, text: &str| {
            let path = made.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        for name in [
            "config/a.yaml",
            "config/other.conf",
            "config/.swap.yaml",
            "rules.yaml",
            "config.x.yaml",
            "config/deep/b.txt",
        ] {
            write(name, rules);
        }
        write("config/rules.json", "{ \"domain\": \"d\", \"descriptors\": [] }\n");
        write("config/README.md", "The domain: one for each gateway.\n");
        write("config/list.txt", "10.0.0.0/8\n");
        write("values.yaml", "replicas: 2\n");
        let names = |location: Location| {
            let passed_over = location.passed_over();
            let names =
                passed_over.iter().map(|(path, _)| path.strip_prefix(made.path()).unwrap().display().to_string());
            names.collect::<Vec<_>>()
        };
        assert_eq!(
            names(Location::Paths(vec![made.path().join("config")])),
            ["config/other.conf", "config/rules.json"]
        );
        assert!(names(Location::Paths(vec![made.path().join("config/a.yaml")])).is_empty());
        let runtime = |app: &str, is_root_watched| Location::Runtime {
            directory: made.path().to_owned(),
            app_directory: app.to_owned(),
            is_root_watched,
            ignores_dot_files: false,
        };
        assert_eq!(names(runtime("config", true)), ["rules.yaml"]);
        assert_eq!(names(runtime("config", false)), ["config.x.yaml", "rules.yaml"]);
        assert!(names(runtime("", true)).is_empty());
    }
}
