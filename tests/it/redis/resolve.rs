//! A name whose addresses a test sets, for one program that resolves it.

use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use tempfile::TempDir;

use super::preloaded::preloaded;

/// The name.
pub const NAME: &str = "redis.test";

/// The addresses of the name, for the program that is started with [`Self::variables`].
pub struct Resolver {
    directory: TempDir,
    variables: [(&'static str, String); 4],
}

impl Resolver {
    /// The name has these addresses.
    pub fn new(addresses: &[Ipv4Addr]) -> Self {
        static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
        let library = LIBRARY.get_or_init(|| preloaded("resolve"));
        let directory = tempfile::tempdir().expect("a directory");
        let text = |path: &Path| path.to_str().expect("a path of text").to_owned();
        let at = |name: &str| text(&directory.path().join(name));
        let variables = [
            ("LD_PRELOAD", text(library)),
            ("RESOLVE_NAME", NAME.to_owned()),
            ("RESOLVE_FILE", at("addresses")),
            ("RESOLVE_WHILE", at("hangs")),
        ];
        let resolver = Self { directory, variables };
        resolver.set(addresses);
        resolver
    }

    /// The variables of the program that it concerns.
    pub fn variables(&self) -> Vec<(&str, &str)> {
        self.variables.iter().map(|(name, value)| (*name, value.as_str())).collect()
    }

    /// From now on the name has these addresses, in this order.
    pub fn set(&self, addresses: &[Ipv4Addr]) {
        let lines: String = addresses.iter().map(|address| format!("{address}\n")).collect();
        let written = self.directory.path().join("new");
        fs::write(&written, lines).expect("it is written");
        fs::rename(written, self.directory.path().join("addresses")).expect("it is renamed");
    }

    /// From now on no lookup ends, or lookups end again.
    pub fn hang(&self, hangs: bool) {
        let mark = self.directory.path().join("hangs");
        match hangs {
            true => fs::write(mark, "").expect("it is written"),
            false => fs::remove_file(mark).expect("it hangs"),
        }
    }
}
