//! The documents of one load: parsed rule files, and the lists that they name.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use foldhash::{HashMap, HashMapExt};

use super::document::{self, DescriptorNode, Document, EntryNode};
use super::problem::{Problem, Severity};
use crate::rules::changes::Changes;

/// Maximum total size of all list files of one load: 256 MiB, 16 million addresses. They stay in memory until the load ends.
pub(super) const MAX_LIST_BYTES: usize = 256 << 20;

/// A rule file: its name for messages, and its content.
#[derive(Clone, Debug)]
pub struct File {
    /// Name in messages.
    pub name: Arc<str>,
    /// Content of the file.
    pub bytes: Vec<u8>,
}

/// All documents of one load: the complete input of `compile`.
#[derive(Clone, Debug)]
pub struct Documents {
    /// The files, in the given order.
    pub(super) files: Vec<File>,
    /// Digest of the whole content, if `files` have only excerpts of it.
    content: Option<blake3::Hash>,
    /// Number of files of overlays; they are the last ones.
    pub(super) overlay_files: usize,
    /// Each document and the index of its file. A file without a usable document has none.
    pub(super) documents: Vec<(usize, Document)>,
    /// Problems in the shape of the files.
    pub(super) problems: Vec<Problem>,
    /// Content of each list, or the reason why it cannot be used.
    pub(super) lists: Lists,
    /// Own rules of overlays, each for one domain. Their files are behind those of the source.
    pub(super) overlays: Vec<OverlayRules>,
    /// Settings that overlays have set for a whole domain.
    pub(super) domain_changes: HashMap<String, Changes>,
}

/// Content of each list, or the reason why it cannot be used.
pub(super) type Lists = HashMap<PathBuf, Result<Arc<[u8]>, String>>;

/// The own rules of an overlay, for one domain.
#[derive(Clone, Debug)]
pub(super) struct OverlayRules {
    /// Index of the file.
    pub(super) file: usize,
    /// Pattern of the overlay's domains.
    pub(super) pattern: Arc<str>,
    /// Document of the overlay, with the name of the domain in place of the pattern.
    pub(super) document: Document,
    /// Settings of entries for these rules: those of the source, with those of all overlays laid over them.
    pub(super) entries: Vec<EntryNode>,
}

impl Documents {
    /// Parses rule files, in the given order. Their lists are not read yet.
    pub fn parse(files: Vec<File>) -> Self {
        let mut problems = Vec::new();
        let read =
            |(index, file): (usize, &File)| Some((index, document::read(&file.name, &file.bytes, &mut problems)?));
        let documents = files.iter().enumerate().filter_map(read).collect();
        Self::of(files, documents, problems)
    }

    /// Returns documents that were not read from YAML. Each document has the index of its file in `files`; the bytes of a file are
    /// the lines that problems show. `problems` are those found so far.
    pub fn of(files: Vec<File>, documents: Vec<(usize, Document)>, problems: Vec<Problem>) -> Self {
        let (lists, domain_changes) = (HashMap::new(), HashMap::new());
        Self {
            files,
            content: None,
            overlay_files: 0,
            documents,
            problems,
            lists,
            overlays: Vec::new(),
            domain_changes,
        }
    }

    /// Hides the text of the files with these `names` in the problems found so far. They may be no rule files at all.
    pub fn hide(&mut self, names: &[Arc<str>]) {
        for problem in self.problems.iter_mut().filter(|problem| names.contains(&problem.file)) {
            "the text here is not shown, because a link leads to this file outside of the directory of the rule files: check the file itself (`tidegate check` with its own path), or move it there".clone_into(&mut problem.message);
            problem.excerpt = None;
        }
    }

    /// Adds a warning about `file`, which need not be one of the documents.
    pub fn warn(&mut self, file: Arc<str>, message: String) {
        self.problems.push(Problem { file, place: None, severity: Severity::Warning, message, excerpt: None });
    }

    /// Sets the digest of the whole content, for files that have only excerpts of it.
    #[must_use]
    pub fn with_content(self, content: blake3::Hash) -> Self {
        Self { content: Some(content), ..self }
    }

    /// Returns true if a control plane sent the documents.
    pub(super) fn is_pushed(&self) -> bool {
        self.content.is_some()
    }

    /// Returns a digest of the content of all files and lists, 128 bits in hexadecimal digits. Names of files are no part of it.
    pub(super) fn digest(&self) -> Box<str> {
        let mut hasher = blake3::Hasher::new();
        let mut add = |bytes: &[u8]| _ = hasher.update(&(bytes.len() as u64).to_le_bytes()).update(bytes);
        self.files.iter().for_each(|file| add(&file.bytes));
        self.content.iter().for_each(|content| add(content.as_bytes()));
        let mut lists: Vec<_> = self.lists.iter().collect();
        lists.sort_unstable_by_key(|(path, _)| *path);
        lists.into_iter().filter_map(|(_, list)| list.as_ref().ok()).for_each(|list| add(list));
        hasher.finalize().to_hex()[..32].into()
    }

    /// Returns the number of files.
    pub fn len(&self) -> usize {
        self.files.len()
    }

    /// Returns true if there is no file.
    pub fn is_empty(&self) -> bool {
        self.files.is_empty()
    }

    /// Reads each list that a document names, once, with `read`. Its error is a text for people.
    pub fn read_lists(&mut self, mut read: impl FnMut(&Path) -> Result<Vec<u8>, String>) {
        let mut paths = Vec::new();
        for (file, document) in &self.documents {
            list_paths(&self.files[*file].name, &document.descriptors, &mut paths);
            list_paths(&self.files[*file].name, &document.known_good, &mut paths);
        }
        let mut total = 0;
        for path in paths {
            if self.lists.contains_key(&path) {
                continue;
            }
            let mut content = read(&path).map(Arc::<[u8]>::from).map_err(|error| format!("cannot be read: {error}"));
            if let Ok(bytes) = &content {
                total += bytes.len();
                if total > MAX_LIST_BYTES {
                    let most = MAX_LIST_BYTES >> 20;
                    content = Err(format!(
                        "cannot be used: with it, the lists of this load are larger than {most} MiB together, which is the maximum"
                    ));
                }
            }
            self.lists.insert(path, content);
        }
    }
}

/// Returns the path of the list `named` in rule file `file`. A relative name starts at the file's directory.
pub(super) fn list_path(file: &str, named: &str) -> PathBuf {
    Path::new(file).parent().unwrap_or(Path::new("")).join(named)
}

fn list_paths(file: &str, items: &[DescriptorNode], paths: &mut Vec<PathBuf>) {
    for item in items {
        let named = item.value_list.as_ref().and_then(|list| list.file.as_ref());
        paths.extend(named.map(|named| list_path(file, &named.value)));
        list_paths(file, &item.descriptors, paths);
    }
}
