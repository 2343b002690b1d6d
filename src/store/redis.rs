//! Counters in Redis, which several instances share.

pub mod script;
