//! Loading rule files again and again: read whole, compared with what was read before, compiled when it differs.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use thiserror::Error;

use super::file::{Found, ListPrint, Source, list_print, noting_lists};
use crate::rules::{self, File, Loaded, Options};

/// How many links in a row are followed to see where they lead: 40, as in Linux.
const MOST_LINKS: usize = 40;
/// How often a load is done again whose files change meanwhile: 3 times.
const MOST_RELOADS: usize = 3;

/// Reads the rules of a source whenever it is asked to.
#[derive(Debug)]
pub struct Loader {
    source: Source,
    options: Options,
    /// What was read of the rules in force.
    in_force: Print,
    /// What was read and refused, if that was last.
    refused: Option<Print>,
    places: Places,
}

/// What came of looking again.
#[derive(Debug)]
pub enum Look {
    /// Everything is as it was when somebody looked last.
    Same,
    /// Other rules.
    Loaded {
        /// The rules.
        loaded: Loaded,
        /// How many files they come from.
        files: usize,
    },
    /// Something else than before that is no rules.
    Refused(NotLoaded),
    /// After something that was refused, what the rules in force were loaded from.
    Restored,
}

/// All that keeps rules from being loaded, a line or more each.
#[derive(Clone, Debug, Error)]
#[error("{0}")]
pub struct NotLoaded(String);

/// Directories, and the names in them whose change may change the rules.
pub type Places = BTreeMap<PathBuf, Names>;

/// Names in a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Names {
    /// Whatever there is.
    All,
    /// These.
    These(BTreeSet<OsString>),
}

/// What stands for all that was read, in 32 bytes for the rule files and for each list.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Print {
    files: blake3::Hash,
    lists: Vec<(PathBuf, ListPrint)>,
}

impl Loader {
    /// Loads the rules for the first time.
    ///
    /// # Errors
    /// All that is wrong.
    pub fn start(source: Source, options: Options) -> Result<(Self, Loaded, usize), NotLoaded> {
        let found = source.find();
        let places = places(&source, &found);
        let files = read(found)?;
        let (loaded, lists) = noting_lists(|| rules::load(&files, options));
        let loaded = loaded.map_err(|invalid| NotLoaded(invalid.to_string()))?;
        let in_force = Print { files: print(&files), lists };
        Ok((Self { source, options, in_force, refused: None, places }, loaded, files.len()))
    }

    /// Reads everything again, and compiles it when it is not what it was.
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

    /// Compiles what was read. A load whose files change meanwhile may have the rules of before and the lists of after, so it is done
    /// again, a few times; what changes after that the next look sees.
    fn load(&mut self, mut files: Vec<File>, mut printed: blake3::Hash) -> Look {
        let mut again = MOST_RELOADS;
        loop {
            // A load that panics is not tried again with the same files.
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

    /// Where a change may change the rules, as it was found by the last look.
    pub fn places(&self) -> Places {
        let mut places = self.places.clone();
        let lists = self.in_force.lists.iter().chain(self.refused.iter().flat_map(|refused| &refused.lists));
        lists.for_each(|(path, _)| trace(path, &mut places));
        places
    }
}

impl Print {
    /// Whether it stands for rule files that have this hash, and for what the lists say now.
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
        // With its length before it no part can run into the next.
        hasher.update(&part.len().to_le_bytes()).update(part);
    }
    hasher.finalize()
}

/// The directories whose files count, and the way to everything that was named or is a link.
fn places(source: &Source, found: &Found) -> Places {
    let mut places: Places = found.directories.iter().map(|directory| (directory.clone(), Names::All)).collect();
    source.roots().iter().for_each(|root| trace(root, &mut places));
    found.files.iter().filter(|file| file.is_symlink()).for_each(|file| trace(file, &mut places));
    places
}

/// Adds where a path stands, and where each link on the way to it stands: `..data` of Kubernetes is one, and to turn a
/// link elsewhere changes what is read as much as to write.
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

/// Adds a name in its directory; where that is missing, its own name in the nearest that is there.
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

    /// Reads a list, and replaces the rule file beside it first.
    fn read_list_late(list: &Path) -> io::Result<Vec<u8>> {
        fs::write(
            list.with_file_name("rules.yaml"),
            "domain: d\ndescriptors: [{ key: new, rate_limit: { unit: day, requests_per_unit: 1 } }]\n",
        )
        .unwrap();
        read_list(list)
    }

    /// A loader of a rule file without limits, and its directory.
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
