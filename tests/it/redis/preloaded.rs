//! Libraries that change what a server sees of its machine, made where the tests run.

use std::fs::rename;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::repository;

/// The library of `tests/it/redis/NAME.c`, compiled.
pub fn preloaded(name: &str) -> PathBuf {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let library = directory.join(format!("{name}.so"));
    let made = directory.join(format!("{name}.{}.so", std::process::id()));
    let mut compile = Command::new("cc");
    compile.args(["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-o"]).arg(&made);
    let source = repository(&format!("tests/it/redis/{name}.c"));
    let output = compile.arg(source).arg("-ldl").output().expect("a C compiler");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    // Another process may have it mapped.
    rename(&made, &library).expect("it is renamed");
    library
}
