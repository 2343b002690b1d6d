//! Where rules come from.

pub mod file;
pub mod load;
pub mod watch;
