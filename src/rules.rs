//! rules
pub mod document;
pub mod problem;
mod yaml;
