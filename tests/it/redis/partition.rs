//! A node that is cut from the rest of its cluster, and that clients reach all the same.

use std::os::unix::fs::FileExt;

use tempfile::NamedTempFile;
use tokio::process::Command;

use super::cluster::BUS_PORTS;
use super::preloaded::preloaded;

/// Whether a node is cut: one byte, which it maps into its memory.
pub struct Partition(NamedTempFile);

impl Partition {
    /// None as yet.
    pub fn new() -> Self {
        let partition = Self(NamedTempFile::new().expect("a file"));
        partition.set(false);
        partition
    }

    /// Lets it cut a node.
    pub fn preload(&self, command: &mut Command) {
        command.env("LD_PRELOAD", preloaded("partition")).env("BUS_IS_CUT", self.0.path());
        command.env("BUS_FIRST", BUS_PORTS.start().to_string()).env("BUS_LAST", BUS_PORTS.end().to_string());
    }

    /// From now on the node is cut, or is not.
    pub fn set(&self, is_cut: bool) {
        self.0.as_file().write_all_at(&[is_cut.into()], 0).expect("it is written");
    }
}
