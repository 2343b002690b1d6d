//! A node that is cut from the rest of its cluster, and that clients reach all the same.

use std::fs::rename;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command as Now;

use tempfile::NamedTempFile;
use tokio::process::Command;

use super::cluster::BUS_PORTS;
use crate::support::repository;

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
        let directory = Path::new(env!("CARGO_TARGET_TMPDIR"));
        let library = directory.join("partition.so");
        let made = directory.join(format!("partition.{}.so", std::process::id()));
        let mut compile = Now::new("cc");
        compile.args(["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-o"]).arg(&made);
        let output = compile.arg(repository("tests/it/redis/partition.c")).arg("-ldl").output().expect("a C compiler");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        // Another process may have it mapped.
        rename(&made, &library).expect("it is renamed");
        command.env("LD_PRELOAD", library).env("BUS_IS_CUT", self.0.path());
        command.env("BUS_FIRST", BUS_PORTS.start().to_string()).env("BUS_LAST", BUS_PORTS.end().to_string());
    }

    /// From now on the node is cut, or is not.
    pub fn set(&self, is_cut: bool) {
        self.0.as_file().write_all_at(&[is_cut.into()], 0).expect("it is written");
    }
}
