//! Tidegate.
pub mod model;
pub mod algorithm;
pub mod rules;
