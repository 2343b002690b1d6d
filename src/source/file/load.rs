//! Loader of rule files: reads all of them, compares them with the last load, and parses them if they differ.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fs;
use std::mem;
use std::path::{Path, PathBuf};

use thiserror::Error;

use super::find::{FilesRead, FoundFiles, Location, read_list};
use crate::file::{Roots, Unreadable};
use crate::rulefile::{Documents, File};

/// Maximum number of links followed from one path: 40, as in Linux.
const MOST_LINKS: usize = 40;
/// Maximum number of repetitions of a load whose files change while it runs: 3.
const MOST_RELOADS: usize = 3;

/// Reads the rule files of a location, as often as it is called.
#[derive(Debug)]
pub struct Loader {
    location: Location,
    /// Directory below which lists may be, beside those of the rule files.
    values_root: Option<PathBuf>,
    /// Roots of lists, as of the last search for the rule files.
    roots: Roots,
    /// Reads a list that a rule file names.
    read_list: ReadList,
    /// Content from which the rules in force were loaded.
    in_force: Fingerprint,
    /// Content that is not in force: it was rejected, or the caller has not accepted it yet.
    refused: Option<Fingerprint>,
    /// True if the next look returns rejected content again.
    is_retried: bool,
    places: Places,
}

type ReadList = fn(&Path, &Roots) -> Result<Vec<u8>, Unreadable>;

/// Result of a look at the rule files.
#[derive(Debug)]
pub enum Look {
    /// Nothing has changed since the last look.
    Same,
    /// The files have changed. The caller compiles the documents, and calls [`Loader::accepted`] if they are in force.
    Changed(Documents),
    /// The files have changed and cannot be read.
    Unreadable(NotLoaded),
    /// After a rejected change, the files again have the content of the rules in force.
    Restored,
}

/// All errors that keep rule files from being read, each with one or more lines.
#[derive(Clone, Debug, Error)]
#[error("{0}")]
pub struct NotLoaded(String);

/// Directories, and the names in each whose change may change the rules.
pub type Places = BTreeMap<PathBuf, WatchedNames>;

/// Names in a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WatchedNames {
    /// Every name.
    All,
    /// Only these names.
    These(BTreeSet<OsString>),
}

/// Fingerprint of everything that was read: one hash of 32 bytes for the rule files, and one for each list.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Fingerprint {
    files: blake3::Hash,
    lists: Vec<(PathBuf, ListHash)>,
}

/// Hash of a list's content, or the reason why the list could not be read.
type ListHash = Result<blake3::Hash, String>;

impl Loader {
    /// Reads the rule files for the first time. Their lists are below `values_root`, or below the directories of the rule files. The caller puts the
    /// returned documents in force.
    ///
    /// # Errors
    /// All files that cannot be read.
    pub fn open(location: Location, values_root: Option<PathBuf>) -> Result<(Self, Documents), NotLoaded> {
        Self::open_by(location, values_root, read_list)
    }

    /// Reads the rule files as [`Self::open`] does, and lists by `read_list`.
    fn open_by(
        location: Location,
        values_root: Option<PathBuf>,
        read_list: ReadList,
    ) -> Result<(Self, Documents), NotLoaded> {
        let nothing = Fingerprint { files: hash_of(&[]), lists: Vec::new() };
        let (roots, refused, places) = (Roots::default(), None, Places::new());
        let mut loader =
            Self { location, values_root, roots, read_list, in_force: nothing, refused, is_retried: false, places };
        let files = loader.read_files()?;
        let hash = hash_of(&files.files);
        let documents = loader.load(files, hash);
        loader.accepted();
        Ok((loader, documents))
    }

    /// Reads everything again.
    pub fn look(&mut self) -> Look {
        let is_retried = mem::take(&mut self.is_retried);
        let files = match self.read_files() {
            Ok(files) => files,
            Err(unreadable) => {
                let unread = Fingerprint { files: blake3::hash(unreadable.0.as_bytes()), lists: Vec::new() };
                let is_known = self.refused.replace(unread.clone()) == Some(unread);
                return if is_known { Look::Same } else { Look::Unreadable(unreadable) };
            }
        };
        let hash = hash_of(&files.files);
        if self.in_force.is_of(hash, &self.roots) {
            return if self.refused.take().is_some() { Look::Restored } else { Look::Same };
        }
        if !is_retried && self.refused.as_ref().is_some_and(|refused| refused.is_of(hash, &self.roots)) {
            return Look::Same;
        }
        Look::Changed(self.load(files, hash))
    }

    /// Searches for the rule files and reads them. Sets the places to watch and the roots of lists, which change with each link above the
    /// files.
    fn read_files(&mut self) -> Result<FilesRead, NotLoaded> {
        let found = self.location.find();
        self.places = places(&self.location, &found);
        self.roots = self.location.list_roots(&found, self.values_root.as_deref());
        let lines = |wrong: &[_]| wrong.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n");
        found.read(&self.roots).map_err(|wrong| NotLoaded(lines(&wrong)))
    }

    /// Makes the next look return content again that was rejected.
    pub fn retry(&mut self) {
        self.is_retried = true;
    }

    /// Records that the documents of the last look are in force.
    pub fn accepted(&mut self) {
        if let Some(accepted) = self.refused.take() {
            self.in_force = accepted;
        }
    }

    /// Parses `files` with the hash `hash`, and reads their lists. If files or links change meanwhile, the result may combine old rules
    /// with new lists, or lists may be outside of the old roots, so it is repeated, at most 3 times. The next look sees later changes.
    fn load(&mut self, mut files: FilesRead, mut hash: blake3::Hash) -> Documents {
        let mut again = MOST_RELOADS;
        loop {
            // If parsing panics, it is not repeated for the same files.
            self.refused = Some(Fingerprint { files: hash, lists: Vec::new() });
            let (mut documents, lists) = parse(files, self.read_list, &self.roots);
            let read_now = Fingerprint { files: hash, lists };
            if again > 0
                && let Ok(now) = self.read_files()
                && !read_now.is_of(hash_of(&now.files), &self.roots)
            {
                again -= 1;
                (hash, files) = (hash_of(&now.files), now);
                continue;
            }
            self.refused = Some(read_now);
            for (path, why) in self.location.passed_over() {
                documents.warn(
                    path.to_string_lossy().into(),
                    format!("this file looks like a rule file and is not read: {why}"),
                );
            }
            return documents;
        }
    }

    /// Returns the places where a change may change the rules, as of the last search for the rule files.
    pub fn places(&self) -> Places {
        let mut places = self.places.clone();
        let lists = self.in_force.lists.iter().chain(self.refused.iter().flat_map(|refused| &refused.lists));
        lists.for_each(|(path, _)| trace(path, &mut places));
        places
    }
}

impl Fingerprint {
    /// Returns true if the fingerprint matches rule files with the hash `files` and the present content of the lists.
    fn is_of(&self, files: blake3::Hash, roots: &Roots) -> bool {
        self.files == files && self.lists.iter().all(|(path, hash)| list_hash(&read_list(path, roots)) == *hash)
    }
}

/// Parses `files` and reads the lists that they name. Returns the hash of each list as read: hashing the lists in a second
/// read would miss a change between the two reads.
fn parse(
    FilesRead { files, elsewhere }: FilesRead,
    read_list: ReadList,
    roots: &Roots,
) -> (Documents, Vec<(PathBuf, ListHash)>) {
    let mut lists = Vec::new();
    let mut documents = Documents::parse(files);
    documents.hide(&elsewhere);
    documents.read_lists(|path| {
        let read = read_list(path, roots);
        lists.push((path.to_owned(), list_hash(&read)));
        read.map_err(|error| error.to_string())
    });
    (documents, lists)
}

fn list_hash(read: &Result<Vec<u8>, Unreadable>) -> ListHash {
    read.as_ref().map(|bytes| blake3::hash(bytes)).map_err(ToString::to_string)
}

fn hash_of(files: &[File]) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new();
    for part in files.iter().flat_map(|file| [file.name.as_bytes(), &file.bytes]) {
        // Each part follows its length, so different parts never give the same input.
        hasher.update(&part.len().to_le_bytes()).update(part);
    }
    hasher.finalize()
}

/// Returns the directories that were searched, and the places of everything that was named or is a link.
fn places(location: &Location, found: &FoundFiles) -> Places {
    let mut places: Places = found.directories.iter().map(|directory| (directory.clone(), WatchedNames::All)).collect();
    location.roots().iter().for_each(|root| trace(root, &mut places));
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
    let names = places.entry(directory.to_owned()).or_insert_with(|| WatchedNames::These(BTreeSet::new()));
    if let WatchedNames::These(names) = names {
        names.insert(name.to_owned());
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::rulefile::{Options, compile};

    fn fingerprint(list: &Path) -> Fingerprint {
        Fingerprint { files: hash_of(&[]), lists: vec![(list.to_owned(), list_hash(&read_list(list, &roots(list))))] }
    }

    fn roots(list: &Path) -> Roots {
        Roots::of(list.parent().map(Path::to_owned))
    }

    #[test]
    fn a_list_with_other_content_is_a_change() {
        let list = tempfile::NamedTempFile::new().unwrap();
        fs::write(&list, "10.0.0.1").unwrap();
        let (read, roots) = (fingerprint(list.path()), roots(list.path()));
        let is_same = || read.is_of(read.files, &roots);
        assert!(is_same());
        fs::write(&list, "10.0.0.2").unwrap();
        assert!(!is_same());
        fs::write(&list, "10.0.0.1").unwrap();
        assert!(is_same());
        fs::remove_file(&list).unwrap();
        assert!(!is_same());
    }

    #[test]
    fn a_list_that_could_not_be_read_is_a_change_once_it_can_be() {
        let directory = tempfile::tempdir().unwrap();
        let list = directory.path().join("list");
        let (read, roots) = (fingerprint(&list), roots(&list));
        let is_same = || read.is_of(read.files, &roots);
        assert!(is_same());
        fs::write(&list, "").unwrap();
        assert!(!is_same());
    }

    /// Replaces the rule file beside `list`, then reads `list`.
    fn read_list_late(list: &Path, roots: &Roots) -> Result<Vec<u8>, Unreadable> {
        fs::write(
            list.with_file_name("rules.yaml"),
            "domain: d\ndescriptors: [{ key: new, rate_limit: { unit: day, requests_per_unit: 1 } }]\n",
        )
        .unwrap();
        read_list(list, roots)
    }

    /// Returns a loader of a rule file without limits, and its directory.
    fn loader() -> (Loader, tempfile::TempDir) {
        let directory = tempfile::tempdir().unwrap();
        let rules = directory.path().join("rules.yaml");
        fs::write(&rules, "domain: d\ndescriptors: [{ key: old }]\n").unwrap();
        let (loader, _) = Loader::open(Location::Paths(vec![rules]), None).unwrap();
        (Loader { read_list: read_list_late, ..loader }, directory)
    }

    #[test]
    fn a_load_whose_files_change_meanwhile_is_done_again() {
        let (mut loader, directory) = loader();
        let list = directory.path().join("list");
        fs::write(&list, "10.0.0.1").unwrap();
        let rules = format!("domain: d\ndescriptors: [{{ key: ip, values_file: {} }}]\n", list.display());
        fs::write(directory.path().join("rules.yaml"), rules).unwrap();
        let Look::Changed(documents) = loader.look() else { panic!("other rules") };
        let loaded = compile(documents, &Options::default()).unwrap();
        loader.accepted();
        let paths: Vec<_> = loaded.rules.rules().iter().map(|rule| rule.path().to_string()).collect();
        assert_eq!(paths, ["d.new"]);
        assert!(matches!(loader.look(), Look::Same));
    }

    /// Points the link `current` at the second release, then reads `list`, which is below that link.
    fn read_list_of_next_release(list: &Path, roots: &Roots) -> Result<Vec<u8>, Unreadable> {
        let current = list.parent().unwrap();
        fs::remove_file(current).unwrap();
        symlink("2", current).unwrap();
        read_list(list, roots)
    }

    #[test]
    fn a_link_above_rules_and_lists_may_be_changed_during_a_load() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        let write = |release: &str, quota: u32| {
            let rules = format!(
                "domain: d\ndescriptors: [{{ key: ip, values_file: list, rate_limit: {{ unit: day, requests_per_unit: {quota} }} }}]\n"
            );
            fs::create_dir_all(at(release)).unwrap();
            fs::write(at(release).join("rules.yaml"), rules).unwrap();
            fs::write(at(release).join("list"), "10.0.0.1").unwrap();
        };
        let location = || Location::Paths(vec![at("current")]);
        let is_loaded =
            |documents| compile(documents, &Options::default()).map(drop).map_err(|error| error.to_string());
        // The rules of the releases differ, or are the same.
        for next in [1, 2] {
            write("1", 1);
            write("2", next);
            let link = |release: &str| {
                let _ = fs::remove_file(at("current"));
                symlink(release, at("current")).unwrap();
            };
            link("1");
            let (_, documents) = Loader::open_by(location(), None, read_list_of_next_release).unwrap();
            assert_eq!(is_loaded(documents), Ok(()));
            link("1");
            let (mut loader, _) = Loader::open(location(), None).unwrap();
            loader.read_list = read_list_of_next_release;
            write("1", 3);
            let Look::Changed(documents) = loader.look() else { panic!("other rules") };
            assert_eq!(is_loaded(documents), Ok(()));
            loader.accepted();
            assert!(matches!(loader.look(), Look::Same));
        }
    }

    #[test]
    fn a_list_elsewhere_is_an_error_and_below_a_root_of_the_operator_it_is_read() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        fs::create_dir_all(at("runtime/config/deep")).unwrap();
        fs::create_dir(at("elsewhere")).unwrap();
        for list in ["runtime/list", "elsewhere/list"] {
            fs::write(at(list), "10.0.0.1").unwrap();
        }
        let error = |list: &str, location: Location, root: Option<&str>| {
            let rules = format!("domain: d\ndescriptors: [{{ key: ip, values_file: {list}, deny: true }}]\n");
            fs::write(at("runtime/config/deep/rules.yaml"), rules).unwrap();
            let (_, documents) = Loader::open(location, root.map(at)).unwrap();
            compile(documents, &Options::default()).err().map(|invalid| invalid.to_string())
        };
        let runtime = |is_root_watched| Location::Runtime {
            directory: at("runtime"),
            app_directory: "config".to_owned(),
            is_root_watched,
            ignores_dot_files: false,
        };
        let path = |named: &str| Location::Paths(vec![at(named)]);
        let elsewhere = at("elsewhere/list").display().to_string();
        for is_root_watched in [true, false] {
            assert_eq!(error("../../list", runtime(is_root_watched), None), None, "beside the app directory");
        }
        assert_eq!(error("../../list", path("runtime"), None), None);
        assert_eq!(error(&elsewhere, path("runtime"), Some("elsewhere")), None);
        for location in [runtime(true), path("runtime"), path("runtime/config/deep/rules.yaml")] {
            let error = error(&elsewhere, location, None).unwrap();
            assert!(error.contains("elsewhere/list cannot be read: it is not below"), "{error}");
            assert!(error.contains("VALUES_ROOT") && error.contains("rules.yaml:2:"), "{error}");
        }
        assert!(error("../../list", path("runtime/config"), None).unwrap().contains("VALUES_ROOT"));
    }

    #[test]
    fn what_a_link_to_another_place_leads_to_is_not_quoted() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        fs::create_dir(at("rules")).unwrap();
        symlink("../secret", at("rules/secret.yaml")).unwrap();
        for secret in
            ["hunter2", "password: hunter2\n", "domain: d\nhunter2: x\n", "a: [hunter2", "\u{1}hunter2", "- hunter2"]
        {
            fs::write(at("secret"), secret).unwrap();
            let said = |rules: &str| {
                let (_, documents) = Loader::open(Location::Paths(vec![at(rules)]), None).unwrap();
                compile(documents, &Options::default()).map_or_else(
                    |invalid| invalid.to_string(),
                    |compiled| compiled.warnings.iter().map(ToString::to_string).collect(),
                )
            };
            for named in ["rules", "rules/secret.yaml"] {
                let said = said(named);
                assert!(said.contains("secret.yaml:") && !said.contains("hunter2"), "{secret}: {said}");
            }
            assert!(said("secret").contains("hunter2") || secret.contains('\u{1}'), "its own path shows it: {secret}");
        }
    }

    #[test]
    fn rules_that_cannot_be_read_are_refused_once() {
        let (mut loader, directory) = loader();
        fs::remove_file(directory.path().join("rules.yaml")).unwrap();
        assert!(matches!(loader.look(), Look::Unreadable(_)));
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
            Some(WatchedNames::These(names)) => names.contains(&OsString::from(name)),
            _ => false,
        };
        assert!(names("etc", "rules.yaml"), "{places:?}");
        assert!(
            places.iter().any(
                |(_, named)| matches!(named, WatchedNames::These(names) if names.contains(&OsString::from("current")))
            ),
            "{places:?}"
        );
        assert!(places.keys().any(|place| place.ends_with("current")), "{places:?}");
    }

    #[test]
    fn a_link_to_itself_is_followed_no_further_than_the_system_would() {
        let directory = tempfile::tempdir().unwrap();
        let cycle = directory.path().join("cycle");
        symlink("cycle", &cycle).unwrap();
        let mut places = Places::new();
        trace(&cycle, &mut places);
        assert!(places.contains_key(directory.path()));
    }

    #[test]
    fn where_a_directory_is_missing_its_name_is_waited_for_in_the_nearest_that_is_there() {
        let directory = tempfile::tempdir().unwrap();
        let mut places = Places::new();
        add(&directory.path().join("config/deep/rules.yaml"), &mut places);
        let expected = WatchedNames::These(BTreeSet::from([OsString::from("config")]));
        assert_eq!(places, Places::from([(directory.path().to_owned(), expected)]));
    }
}
