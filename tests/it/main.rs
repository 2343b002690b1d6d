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
/// Sixty-four at once: what is admitted is the limit, to the hit.
mod concurrency;
/// The conformance suite: the same answers as the reference, but for the differences that are written down.
mod conformance;
/// The listeners under load, attack and stop.
mod edges;
/// What clients can put into a request, and operators into a rule file: counted or named, never a crash.
mod hostile;
/// The house checks itself: who may import whom, and what every file owes its reader.
mod house;
/// What every algorithm and every store obeys, against oracles that compute the same from the definitions.
mod laws;
/// Rules, requests and time, and the decisions that follow.
mod path;
/// The protocol as others generate it: every field in both directions, and health.
mod wire;

mod support;
mod world;
