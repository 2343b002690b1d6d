//! Loader of rule files: reads all of them, compares them with the last load, and compiles them if they differ.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use thiserror::Error;

use super::file::{Found, ListPrint, Source, list_print, noting_lists};
use crate::rules::{self, File, Loaded, Options};

/// Maximum number of links followed from one path: 40, as in Linux.
const MOST_LINKS: usize = 40;
/// Maximum number of repetitions of a load whose files change while it runs: 3.
const MOST_RELOADS: usize = 3;

/// Reads and compiles the rules of a source, as often as it is called.
#[derive(Debug)]
pub struct Loader {
    source: Source,
    options: Options,
    /// Content from which the rules in force were loaded.
    in_force: Print,
    /// Content that was rejected, if the last load was rejected.
    refused: Option<Print>,
    places: Places,
}

/// Result of a look at the rule files.
#[derive(Debug)]
pub enum Look {
    /// Nothing has changed since the last look.
    Same,
    /// The rules have changed.
    Loaded {
        /// The new rules.
        loaded: Loaded,
        /// Number of rule files.
        files: usize,
    },
    /// The files have changed and cannot be loaded.
    Refused(NotLoaded),
    /// After a rejected change, the files again have the content of the rules in force.
    Restored,
}

/// All errors that keep rules from being loaded, each with one or more lines.
#[derive(Clone, Debug, Error)]
#[error("{0}")]
pub struct NotLoaded(String);

/// Directories, and the names in each whose change may change the rules.
pub type Places = BTreeMap<PathBuf, Names>;

/// Names in a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Names {
    /// Every name.
    All,
    /// Only these names.
    These(BTreeSet<OsString>),
}

/// Fingerprint of everything that was read: one hash of 32 bytes for the rule files, and one for each list.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Print {
    files: blake3::Hash,
    lists: Vec<(PathBuf, ListPrint)>,
}

impl Loader {
    /// Loads the rules for the first time.
    ///
    /// # Errors
    /// All errors in the rule files.
    pub fn start(source: Source, options: Options) -> Result<(Self, Loaded, usize), NotLoaded> {
        let found = source.find();
        let places = places(&source, &found);
        let files = read(found)?;
        let (loaded, lists) = noting_lists(|| rules::load(&files, options));
        let loaded = loaded.map_err(|invalid| NotLoaded(invalid.to_string()))?;
        let in_force = Print { files: print(&files), lists };
        Ok((Self { source, options, in_force, refused: None, places }, loaded, files.len()))
    }

    /// Reads everything again, and compiles it if it has changed.
    pub fn look(&mut self) -> Look {
        let found = self.source.find();
        self.places = places(&self.source, &found);
        let files = match read(found) {
            Ok(files) => files,
            Err(unreadable) => {
                let print = Print { files: blake3::hash(unreadable.0.as_bytes()), lists: Vec::new() };
                let is_known = self.refused.replace(print.clone()) == Some(print);
                return if is_known { Look::Same } else { Look::Refused(unreadable) };
            }
        };
        let print = print(&files);
        if self.in_force.is_of(print) {
            return if self.refused.take().is_some() { Look::Restored } else { Look::Same };
        }
        if self.refused.as_ref().is_some_and(|refused| refused.is_of(print)) {
            return Look::Same;
        }
        self.load(files, print)
    }

    /// Compiles `files`, whose hash is `printed`. If files change during the load, it may combine old rules with new lists,
    /// so it is repeated, at most 3 times. The next look sees later changes.
    fn load(&mut self, mut files: Vec<File>, mut printed: blake3::Hash) -> Look {
        let mut again = MOST_RELOADS;
        loop {
            // If the load panics, it is not repeated for the same files.
            self.refused = Some(Print { files: printed, lists: Vec::new() });
            let (loaded, lists) = noting_lists(|| rules::load(&files, self.options));
            let compiled = Print { files: printed, lists };
            if again > 0
                && let Ok(now) = read(self.source.find())
                && !compiled.is_of(print(&now))
            {
                again -= 1;
                (printed, files) = (print(&now), now);
                continue;
            }
            return match loaded {
                Ok(loaded) => {
                    (self.in_force, self.refused) = (compiled, None);
                    Look::Loaded { loaded, files: files.len() }
                }
                Err(invalid) => {
                    self.refused = Some(compiled);
                    Look::Refused(NotLoaded(invalid.to_string()))
                }
            };
        }
    }

    /// Returns the places where a change may change the rules, as of the last look.
    pub fn places(&self) -> Places {
        let mut places = self.places.clone();
        let lists = self.in_force.lists.iter().chain(self.refused.iter().flat_map(|refused| &refused.lists));
        lists.for_each(|(path, _)| trace(path, &mut places));
        places
    }
}

impl Print {
    /// Returns true if the fingerprint matches rule files with the hash `files` and the present content of the lists.
    fn is_of(&self, files: blake3::Hash) -> bool {
        self.files == files && self.lists.iter().all(|(path, print)| list_print(path) == *print)
    }
}

fn read(found: Found) -> Result<Vec<File>, NotLoaded> {
    let lines = |wrong: &[_]| wrong.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n");
    found.read().map_err(|wrong| NotLoaded(lines(&wrong)))
}

fn print(files: &[File]) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new();
    for part in files.iter().flat_map(|file| [file.name.as_bytes(), &file.bytes]) {
        // Each part follows its length, so different parts never give the same input.
        hasher.update(&part.len().to_le_bytes()).update(part);
    }
    hasher.finalize()
}

/// Returns the directories that were searched, and the places of everything that was named or is a link.
fn places(source: &Source, found: &Found) -> Places {
    let mut places: Places = found.directories.iter().map(|directory| (directory.clone(), Names::All)).collect();
    source.roots().iter().for_each(|root| trace(root, &mut places));
    found.files.iter().filter(|file| file.is_symlink()).for_each(|file| trace(file, &mut places));
    places
}

/// Adds the place of `path`, and of each link on the way to it, such as Kubernetes' `..data`. Pointing a link elsewhere
/// changes what is read just as a write does.
fn trace(path: &Path, places: &mut Places) {
    let mut paths = vec![path.to_owned()];
    let mut links = 0;
    while let Some(path) = paths.pop() {
        let Ok(path) = std::path::absolute(path) else { continue };
        add(&path, places);
        for at in path.ancestors() {
            if let (Ok(target), Some(parent)) = (fs::read_link(at), at.parent()) {
                links += 1;
                if links > MOST_LINKS {
                    return;
                }
                add(at, places);
                paths.push(parent.join(target));
            }
        }
    }
}

/// Adds `path` as a name in its directory. If that directory is missing, adds the missing part's name in the nearest existing
/// directory.
fn add(path: &Path, places: &mut Places) {
    let there = path.ancestors().find(|at| at.parent().is_some_and(Path::is_dir));
    let Some((directory, name)) = there.and_then(|at| Some((at.parent()?, at.file_name()?))) else { return };
    let names = places.entry(directory.to_owned()).or_insert_with(|| Names::These(BTreeSet::new()));
    if let Names::These(names) = names {
        names.insert(name.to_owned());
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::source::file::read_list;

    #[test]
    fn what_a_load_read_of_a_list_is_compared_and_not_what_it_holds_after_the_load() {
        let list = tempfile::NamedTempFile::new().unwrap();
        fs::write(&list, "10.0.0.1").unwrap();
        let (_, lists) = noting_lists(|| read_list(list.path()));
        let print = Print { files: print(&[]), lists };
        assert!(print.is_of(print.files));
        fs::write(&list, "10.0.0.2").unwrap();
        assert!(!print.is_of(print.files));
        fs::write(&list, "10.0.0.1").unwrap();
        assert!(print.is_of(print.files));
        fs::remove_file(&list).unwrap();
        assert!(!print.is_of(print.files));
    }

    #[test]
    fn a_list_that_could_not_be_read_is_a_change_once_it_can_be() {
        let directory = tempfile::tempdir().unwrap();
        let list = directory.path().join("list");
        let (_, lists) = noting_lists(|| read_list(&list));
        let print = Print { files: print(&[]), lists };
        assert!(print.is_of(print.files));
        fs::write(&list, "").unwrap();
        assert!(!print.is_of(print.files));
    }

    /// Replaces the rule file beside `list`, then reads `list`.
    fn read_list_late(list: &Path) -> io::Result<Vec<u8>> {
        fs::write(
            list.with_file_name("rules.yaml"),
            "domain: d\ndescriptors: [{ key: new, rate_limit: { unit: day, requests_per_unit: 1 } }]\n",
        )
        .unwrap();
        read_list(list)
    }

    /// Returns a loader of a rule file without limits, and its directory.
    fn loader() -> (Loader, tempfile::TempDir) {
        let directory = tempfile::tempdir().unwrap();
        let rules = directory.path().join("rules.yaml");
        fs::write(&rules, "domain: d\ndescriptors: [{ key: old }]\n").unwrap();
        let options = Options { read_list: read_list_late, ..Options::default() };
        (Loader::start(Source::Paths(vec![rules]), options).unwrap().0, directory)
    }

    #[test]
    fn a_load_whose_files_change_meanwhile_is_done_again() {
        let (mut loader, directory) = loader();
        let list = directory.path().join("list");
        fs::write(&list, "10.0.0.1").unwrap();
        let rules = format!("domain: d\ndescriptors: [{{ key: ip, values_file: {} }}]\n", list.display());
        fs::write(directory.path().join("rules.yaml"), rules).unwrap();
        let Look::Loaded { loaded, .. } = loader.look() else { panic!("other rules") };
        let paths: Vec<_> = loaded.rules.rules().iter().map(|rule| rule.path().to_string()).collect();
        assert_eq!(paths, ["d.new"]);
        assert!(matches!(loader.look(), Look::Same));
    }

    #[test]
    fn rules_that_cannot_be_read_are_refused_once() {
        let (mut loader, directory) = loader();
        fs::remove_file(directory.path().join("rules.yaml")).unwrap();
        assert!(matches!(loader.look(), Look::Refused(_)));
        assert!(matches!(loader.look(), Look::Same));
    }

    #[test]
    fn every_link_on_the_way_to_a_file_is_a_place() {
        let directory = tempfile::tempdir().unwrap();
        let at = |path: &str| directory.path().join(path);
        fs::create_dir_all(at("releases/1")).unwrap();
        fs::write(at("releases/1/rules.yaml"), "").unwrap();
        symlink("releases/1", at("current")).unwrap();
        fs::create_dir(at("etc")).unwrap();
        symlink("../current/rules.yaml", at("etc/rules.yaml")).unwrap();
        let mut places = Places::new();
        trace(&at("etc/rules.yaml"), &mut places);
        let names = |directory: &str, name: &str| match places.get(&at(directory)) {
            Some(Names::These(names)) => names.contains(&OsString::from(name)),
            _ => false,
        };
        assert!(names("etc", "rules.yaml"), "{places:?}");
        assert!(
            places
                .iter()
                .any(|(_, named)| matches!(named, Names::These(names) if names.contains(&OsString::from("current")))),
            "{places:?}"
        );
        assert!(places.keys().any(|place| place.ends_with("current")), "{places:?}");
    }

    #[test]
    fn a_link_to_itself_is_followed_no_further_than_the_system_would() {
        let directory = tempfile::tempdir().unwrap();
        let circle = directory.path().join("circle");
        symlink("circle", &circle).unwrap();
        let mut places = Places::new();
        trace(&circle, &mut places);
        assert!(places.contains_key(directory.path()));
    }

    #[test]
    fn where_a_directory_is_missing_its_name_is_waited_for_in_the_nearest_that_is_there() {
        let directory = tempfile::tempdir().unwrap();
        let mut places = Places::new();
        add(&directory.path().join("config/deep/rules.yaml"), &mut places);
        let expected = Names::These(BTreeSet::from([OsString::from("config")]));
        assert_eq!(places, Places::from([(directory.path().to_owned(), expected)]));
    }
}
