//! Sources of rules: finding, loading and watching the rule files.

pub mod file;
pub mod load;
pub mod watch;
