//! The wall clock of one server or of several, which a test can step or stop while they run.

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use tempfile::NamedTempFile;
use tokio::process::Command;

use super::preloaded::preloaded;

/// The shift of a clock and the moment at which it stands still: eight bytes each, which the server maps into its memory.
pub struct Clock(NamedTempFile);

impl Clock {
    /// A clock that is right.
    pub fn new() -> Self {
        let clock = Self(NamedTempFile::new().expect("a file"));
        clock.shift(0);
        clock.write(8, 0);
        clock
    }

    /// Makes it the clock of a program: what that is told of `CLOCK_REALTIME` is shifted.
    pub fn preload(&self, command: &mut Command) {
        command.envs(self.variables());
    }

    /// The same, for a program that is started with variables.
    pub fn variables(&self) -> [(&'static str, &str); 2] {
        let files = [("LD_PRELOAD", library()), ("CLOCK_SHIFT", self.0.path())];
        files.map(|(variable, file)| (variable, file.to_str().expect("a path of ours")))
    }

    /// From now on it is so much ahead.
    pub fn shift(&self, shift_us: i64) {
        self.write(0, shift_us);
    }

    /// From now on it stands still at this moment of the epoch.
    pub fn stop(&self, at_us: i64) {
        self.write(8, at_us);
    }

    fn write(&self, at: u64, number: i64) {
        // In place: a file that is cut off under a mapping kills the program.
        self.0.as_file().write_all_at(&number.to_ne_bytes(), at).expect("it is written");
    }
}

/// The library that shifts, compiled once by each process that needs it.
fn library() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| preloaded("clock"))
}
