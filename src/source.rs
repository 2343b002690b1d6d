//! Where rules come from.

pub mod file;
