//! Libraries that change what a server sees of its machine, made where the tests run.

use std::collections::BTreeMap;
use std::fs::rename;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

use crate::support::repository;

/// The library of `tests/it/redis/NAME.c`, compiled once by each process.
pub fn preloaded(name: &str) -> PathBuf {
    static MADE: Mutex<BTreeMap<String, PathBuf>> = Mutex::new(BTreeMap::new());
    let mut made = MADE.lock().expect("a C compiler");
    made.entry(name.to_owned()).or_insert_with(|| make(name)).clone()
}

fn make(name: &str) -> PathBuf {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let library = directory.join(format!("{name}.so"));
    let new = directory.join(format!("{name}.{}.so", std::process::id()));
    let mut compile = Command::new("cc");
    compile.args(["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-o"]).arg(&new);
    let source = repository(&format!("tests/it/redis/{name}.c"));
    let output = compile.arg(source).arg("-ldl").output().expect("a C compiler");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    // Another process may have it mapped.
    rename(&new, &library).expect("it is renamed");
    library
}
