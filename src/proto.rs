//! Generated protocol: Envoy's rate limit service, version 3, from the files in `proto/`.
#![expect(
    missing_docs,
    unused_qualifications,
    clippy::allow_attributes,
    clippy::allow_attributes_without_reason,
    clippy::too_many_lines,
    reason = "generated from proto/, whose comments are the documentation"
)]

include!(concat!(env!("OUT_DIR"), "/protocol.rs"));

/// Header of a call whose caller wants the reasons of the decision in the dynamic metadata of its answer, whatever the settings
/// say.
pub const EXPLAIN: &str = "tidegate-explain";

/// File descriptors as written in `proto/` (entries are `string` there), for reflection and JSON.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));
