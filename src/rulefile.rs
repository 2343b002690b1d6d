//! Rule files: what is written, compiled to the rules in force, with the place of every problem.

mod compile;
mod cycles;
pub mod document;
pub mod problem;
mod yaml;

mod documents;

pub use compile::{CompiledRules, InvalidRules, Options, compile};
pub use documents::{Documents, File};

/// Compiles rule files that name no lists, in the given order.
///
/// # Errors
/// Returns every error of every file with its place, and the warnings with them.
pub fn load(files: &[File], options: Options) -> Result<CompiledRules, InvalidRules> {
    compile(Documents::parse(files.to_vec()), &options)
}
