//! A file system that stops answering, for one program that reads it.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use tempfile::TempDir;

use super::preloaded::preloaded;
use crate::support::eventually;

/// A directory whose files the program that is started with [`Self::variables`] cannot open while it hangs.
pub struct Hang {
    directory: TempDir,
    variables: [(&'static str, String); 4],
}

impl Hang {
    /// A directory that answers.
    pub fn new() -> Self {
        static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
        let library = LIBRARY.get_or_init(|| preloaded("hang"));
        let directory = tempfile::tempdir().expect("a directory");
        fs::create_dir(directory.path().join("mount")).expect("a directory");
        let text = |path: &Path| path.to_str().expect("a path of text").to_owned();
        let at = |name: &str| text(&directory.path().join(name));
        let variables = [
            ("LD_PRELOAD", text(library)),
            ("HANG_PATH", at("mount/")),
            ("HANG_WHILE", at("hangs")),
            ("HANG_SEEN", at("seen")),
        ];
        Self { directory, variables }
    }

    /// A path in the directory.
    pub fn at(&self, name: &str) -> PathBuf {
        self.directory.path().join("mount").join(name)
    }

    /// The variables of the program that it concerns.
    pub fn variables(&self) -> Vec<(&str, &str)> {
        self.variables.iter().map(|(name, value)| (*name, value.as_str())).collect()
    }

    /// Hangs from now on.
    pub fn begin(&self) {
        let _ = fs::remove_file(self.directory.path().join("seen"));
        fs::write(self.directory.path().join("hangs"), "").expect("it is written");
    }

    /// Waits until the program waits for an answer.
    pub async fn is_met(&self) {
        let seen = self.directory.path().join("seen");
        eventually("a file is opened", async || fs::symlink_metadata(&seen).ok()).await;
    }

    /// Answers again.
    pub fn end(&self) {
        fs::remove_file(self.directory.path().join("hangs")).expect("it hangs");
    }
}
