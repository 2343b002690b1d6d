//! What Tidegate promises, tried from outside.

/// The listeners under load, attack and stop.
mod edges;
/// Rules, requests and time, and the decisions that follow.
mod path;

mod world;
