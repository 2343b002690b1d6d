//! What Tidegate promises, tried from outside.
#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::disallowed_methods,
    reason = "a test that cannot go on fails"
)]

/// The commands, as a user types them.
mod cli;
/// The conformance suite: the same answers as the reference, but for the differences that are written down.
mod conformance;
/// The listeners under load, attack and stop.
mod edges;
/// The house checks itself: who may import whom, and what every file owes its reader.
mod house;
/// Rules, requests and time, and the decisions that follow.
mod path;

mod support;
mod world;
