//! Parses descriptors on the command line: `key=value,key=value`.

use clap::Arg;

use super::admin;
use crate::model::Descriptor;

/// Returns the argument for a descriptor.
pub(super) fn argument() -> Arg {
    Arg::new("descriptor")
        .long("descriptor")
        .short('d')
        .value_name("KEY=VALUE,...")
        .required(true)
        .value_parser(|text: &str| Descriptor::parse(text))
        .help("Descriptor: its entries, outermost first. In a value, write \\, for a comma and \\\\ for a backslash")
}

/// Returns a descriptor as `--descriptor` reads it, without control characters.
pub(super) fn spelled(descriptor: &Descriptor) -> String {
    let text =
        |bytes: &[u8]| admin::printable(&String::from_utf8_lossy(bytes)).replace('\\', "\\\\").replace(',', "\\,");
    let entries = descriptor.entries.iter().map(|entry| format!("{}={}", text(&entry.key), text(&entry.value)));
    entries.collect::<Vec<_>>().join(",")
}
