//! Chooses a change at run time. The tool puts this file into a copy of the checkout.

use std::io::Write;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

enum Mode {
    Off,
    /// This change is in force.
    On(usize),
    /// Changes that are reached go to this file, once each per process.
    Record(String),
}

/// Returns the mode of the process group, which a test binary shares with the servers that it starts, whatever their environment.
fn mode() -> &'static Mode {
    static MODE: OnceLock<Mode> = OnceLock::new();
    MODE.get_or_init(|| {
        let status = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
        let group = status.rsplit(')').next().and_then(|rest| rest.split_whitespace().nth(2)).unwrap_or_default();
        let file = format!("{}/../run/{group}", env!("CARGO_MANIFEST_DIR"));
        match std::fs::read_to_string(&file).unwrap_or_default().trim() {
            "" => Mode::Off,
            "record" => Mode::Record(file + ".reached"),
            number => Mode::On(number.parse().unwrap_or(usize::MAX)),
        }
    })
}

/// Returns true if change `number` is in force.
pub fn is(number: usize) -> bool {
    match mode() {
        Mode::Off => false,
        Mode::On(chosen) => *chosen == number,
        Mode::Record(file) => {
            static REACHED: [AtomicBool; 1 << 16] = [const { AtomicBool::new(false) }; 1 << 16];
            if !REACHED[number].swap(true, Ordering::Relaxed) {
                let file = std::fs::OpenOptions::new().append(true).create(true).open(file);
                let _ = file.and_then(|mut file| file.write_all(format!("{number}\n").as_bytes()));
            }
            false
        }
    }
}

/// Changes of Lua files: number, text of the file, start and end in it, replacement.
static LUA: &[(usize, &str, usize, usize, &str)] = include!("mutants_lua.rs");

/// Applies the change in force to a script that contains Lua files.
pub fn lua(script: &str) -> String {
    let mut script = script.to_owned();
    for &(number, file, start, end, new) in LUA {
        if let Some(place) = script.find(file)
            && is(number)
        {
            script.replace_range(place + start..place + end, new);
        }
    }
    script
}
